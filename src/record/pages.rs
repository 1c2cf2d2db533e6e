//! Memory in large pages: where slabs and tables lie once a store is large.
//!
//! A claim of a store with millions of keys goes to two places at random. With pages of 4 KiB most
//! of its time is then spent on finding out where those pages are, and new memory is asked of the
//! system a page at a time. So memory is taken in chunks that the system can give as one page:
//!
//! ```text
//! chunk   2 MiB, aligned to as much   | 4 K | 4 K | 8 K | 16 K |    64 K    |     128 K    | ..
//!                                     blocks are powers of two; a free one joins its free twin
//! ```
//!
//! Ground rules: everything comes from the program's own allocator, chunks too, so that whoever
//! counts there sees all. A store of less than [`SMALL`] takes no chunk: each block is an allocation.
//! All that is handed out is zero.
//!
//! A new chunk is touched before anybody uses it, for which the system may take milliseconds. So the
//! sweep's thread keeps a few ready, and is told when one of them was taken. Who comes too fast for it
//! touches his own. It is also the sweep that gives chunks back, and nobody else: the system does that
//! under a lock that all share who touch new memory, and who lost its core under it would stop them.
//!
//! Nor does anybody wait for the lock of what is free: who had it when he lost his core would stop all
//! others until he runs again. Who does not get it takes memory of its own, and what he gives back
//! stands in a list without a lock until the sweep comes:
//!
//! ```text
//! returned -> | next, length | .. block .. |  ->  | next, length | .. block .. |
//! ```

use std::{
    alloc::Layout,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    expire::Alarm,
    sync::{Arc, Mutex, MutexGuard, Ordering, Tally},
};

/// A large page of x86-64 and of most others.
const CHUNK: usize = 2 << 20;

/// The smallest block of a chunk.
const SMALLEST: usize = 4 << 10;

/// Blocks of this many sizes: from [`SMALLEST`] to [`CHUNK`].
const ORDERS: usize = (CHUNK / SMALLEST).ilog2() as usize + 1;

/// With so much handed out, a chunk more is little.
const SMALL: usize = if cfg!(test) { 64 << 10 } else { 16 << 20 };

/// While another thread makes a chunk, nobody makes one more for so little: all who do ask the system
/// for memory at once, and it gives it to one after the other.
const LITTLE: usize = 64 << 10;

/// So many chunks are ready at most, and one in [`READY_OF`] of all, and one.
const READY: usize = 8;
const READY_OF: usize = 32;

/// So often who wants the lock looks whether it is free: longer than who has it and runs keeps it.
const LOOKS: usize = 200;

/// Blocks are aligned to a line of the cache.
const LINE: usize = 64;

/// A store's memory for slabs and tables.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    free: Mutex<Free>,
    /// The address of the block that was given back last without the lock; zero for none. Pushed to by
    /// compare-and-swap, emptied by a swap.
    returned: Tally,
    /// Bytes handed out.
    out: Tally,
    /// Whether there is a thread that makes chunks ready.
    prepares: Tally,
    /// Of the sweep, which makes chunks ready.
    alarm: Arc<Alarm>,
}

#[derive(Debug, Default)]
struct Free {
    /// Bytes handed out, when the lock was taken.
    out: usize,
    /// How many threads are making a chunk.
    making: usize,
    /// Addresses of all chunks.
    chunks: BTreeSet<usize>,
    /// Free blocks of each size by address, and whether they are zero.
    blocks: [BTreeMap<usize, bool>; ORDERS],
}

/// The place of blocks of `len` bytes among [`Free::blocks`], if chunks have such.
fn order(len: usize) -> Option<usize> {
    let fits = len.is_power_of_two() && (SMALLEST..=CHUNK).contains(&len);
    (fits && !cfg!(oncekey_loom)).then(|| (len / SMALLEST).ilog2() as usize)
}

fn layout(len: usize) -> Layout {
    let align = if len == CHUNK { CHUNK } else { LINE };
    // A power of two, and nothing here is nearly as long as the address space.
    Layout::from_size_align(len, align).unwrap_or(Layout::new::<u64>())
}

impl Pages {
    pub(crate) fn new(alarm: &Arc<Alarm>) -> Arc<Self> {
        let mut pages = Self::default();
        pages.alarm = Arc::clone(alarm);
        Arc::new(pages)
    }

    /// The lock, unless somebody has it who does not run.
    fn try_free(&self) -> Option<MutexGuard<'_, Free>> {
        (0..LOOKS).find_map(|_| {
            let free = self.free.try_lock();
            if free.is_none() {
                std::hint::spin_loop();
            }
            free.map(|free| self.counted(free))
        })
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.counted(self.free.lock())
    }

    fn counted<'a>(&self, mut free: MutexGuard<'a, Free>) -> MutexGuard<'a, Free> {
        free.out = self.out.load(Ordering::Relaxed) as usize;
        free
    }

    /// Makes a chunk ready, if there are too few; true if there still are.
    pub(crate) fn prepare(&self) -> bool {
        self.prepares.store(1, Ordering::Relaxed);
        let mut free = self.free();
        if !free.is_short() {
            return false;
        }
        free.making += 1;
        drop(free);
        let chunk = chunk();
        let mut free = self.free();
        free.making -= 1;
        free.chunks.insert(chunk);
        free.blocks[ORDERS - 1].insert(chunk, true);
        free.is_short()
    }

    /// Bytes handed out in blocks.
    #[cfg(test)]
    pub(crate) fn out(&self) -> usize {
        self.out.load(Ordering::Relaxed) as usize
    }

    /// Gives a free chunk back to the allocator, if there are too many; true if there still are. Of the
    /// sweep alone: see the head of the file.
    pub(crate) fn shed(&self) -> bool {
        self.collect();
        let mut free = self.free();
        let Some(chunk) = free.spare_chunk() else { return false };
        let more = free.has_spare();
        drop(free);
        release(chunk, CHUNK);
        more
    }

    /// Zeroed memory of `len` bytes, aligned to a line of the cache.
    pub(crate) fn take(&self, len: usize) -> u64 {
        self.find(len, true).unwrap_or_else(|| {
            self.out.fetch_add(len as u64, Ordering::Relaxed);
            alone(len)
        })
    }

    /// As `take`, but `None` if somebody has the lock or the sweep has still to make a chunk ready: for
    /// who can do without for a while.
    pub(crate) fn take_ready(&self, len: usize) -> Option<u64> {
        self.find(len, false)
    }

    fn find(&self, len: usize, must: bool) -> Option<u64> {
        let Some(order) = order(len) else { return Some(alone(len)) };
        let mut free = self.try_free()?;
        self.out.fetch_add(len as u64, Ordering::Relaxed);
        free.out += len;
        let ready = free.ready();
        let (address, is_clean) = match free.take(order) {
            Some(block) => block,
            None if free.out < SMALL || free.making != 0 && len <= LITTLE => {
                let is_short = free.is_short() && free.making == 0;
                drop(free);
                if is_short {
                    self.alarm.ask_for_memory();
                }
                return Some(alone(len));
            }
            None if !must && (self.prepares.load(Ordering::Relaxed) != 0 || free.making != 0) => {
                self.out.fetch_sub(len as u64, Ordering::Relaxed);
                drop(free);
                self.alarm.ask_for_memory();
                return None;
            }
            None => {
                // Others need not wait until it is zero.
                free.making += 1;
                drop(free);
                let chunk = chunk();
                free = self.free();
                free.making -= 1;
                free.chunks.insert(chunk);
                free.split(chunk, ORDERS - 1, order, true);
                (chunk, true)
            }
        };
        let is_one_less = free.ready() < ready || ready == 0;
        let rings = is_one_less && free.is_short();
        drop(free);
        if rings {
            self.alarm.ask_for_memory();
        }
        if !is_clean {
            // SAFETY: a free block of this length, which nobody else knows of now.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(0, len) }
        }
        Some(address as u64)
    }

    /// # Safety
    ///
    /// `address` came from [`Pages::take`] with this `len`, and nobody uses it any more.
    pub(crate) unsafe fn give_back(&self, address: u64, len: usize) {
        if len > CHUNK {
            // The system's part of it is the sweep's, too.
            self.put_off(address, len);
        } else if order(len).is_none() {
            release(address as usize, len);
        } else if let Some(free) = self.try_free() {
            self.put(free, address as usize, len);
        } else {
            self.put_off(address, len);
        }
    }

    fn put(&self, mut free: MutexGuard<'_, Free>, address: usize, len: usize) {
        if let Some(order) = order(len) {
            self.out.fetch_sub(len as u64, Ordering::Relaxed);
            if free.chunks.contains(&(address & !(CHUNK - 1))) {
                free.put(address, order);
                return;
            }
        }
        drop(free);
        release(address, len);
    }

    /// Leaves a block for the sweep.
    fn put_off(&self, address: u64, len: usize) {
        let head = std::ptr::with_exposed_provenance_mut::<[u64; 2]>(address as usize);
        let mut next = self.returned.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller has given the block away, and nobody else knows of it before the
            // exchange. It has more than two words.
            unsafe { head.write([next, len as u64]) }
            // Release, partner of the swap in `collect`: the two words are written.
            let pushed = self.returned.compare_exchange_weak(
                next,
                address,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// Takes back what was left because the lock was not to be had.
    fn collect(&self) {
        // Acquire, partner of the exchange in `put_off`, and of those before it by the release
        // sequence.
        let mut address = self.returned.swap(0, Ordering::Acquire);
        while address != 0 {
            let head = std::ptr::with_exposed_provenance::<[u64; 2]>(address as usize);
            // SAFETY: a block of the list, which is this thread's alone now.
            let [next, len] = unsafe { head.read() };
            self.put(self.free(), address as usize, len as usize);
            address = next;
        }
    }

    /// Whether no block was left for the sweep.
    pub(crate) fn is_settled(&self) -> bool {
        self.returned.load(Ordering::Relaxed) == 0
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.collect();
    }
}

impl Free {
    /// Chunks of which nothing is in use.
    fn ready(&self) -> usize {
        self.blocks[ORDERS - 1].len()
    }

    /// How many of them there should be.
    fn wanted(&self) -> usize {
        if self.out < SMALL / 2 { 0 } else { (self.chunks.len() / READY_OF + 1).min(READY) }
    }

    fn is_short(&self) -> bool {
        self.ready() < self.wanted()
    }

    /// A free block, and whether it is zero. The smallest that is large enough is cut.
    fn take(&mut self, order: usize) -> Option<(usize, bool)> {
        let from = (order..ORDERS).find(|&from| !self.blocks[from].is_empty())?;
        let (address, is_clean) = self.blocks[from].pop_first()?;
        self.split(address, from, order, is_clean);
        Some((address, is_clean))
    }

    /// Cuts a block of one size to another; what is left over is free.
    fn split(&mut self, address: usize, from: usize, to: usize, is_clean: bool) {
        for order in to..from {
            self.blocks[order].insert(address + (SMALLEST << order), is_clean);
        }
    }

    /// Takes a block back.
    fn put(&mut self, mut address: usize, mut order: usize) {
        while order < ORDERS - 1 {
            let twin = address ^ (SMALLEST << order);
            if self.blocks[order].remove(&twin).is_none() {
                break;
            }
            address &= twin;
            order += 1;
        }
        self.blocks[order].insert(address, false);
    }

    fn has_spare(&self) -> bool {
        self.ready() > self.wanted().max(self.chunks.len() / 8)
    }

    /// A free chunk that is to go: one in eight may stay for the next. Tables that are rebuilt at
    /// about the same time need as many.
    fn spare_chunk(&mut self) -> Option<usize> {
        if !self.has_spare() {
            return None;
        }
        let (chunk, _) = self.blocks[ORDERS - 1].pop_first()?;
        self.chunks.remove(&chunk);
        Some(chunk)
    }
}

impl Drop for Free {
    fn drop(&mut self) {
        self.chunks.iter().for_each(|chunk| release(*chunk, CHUNK));
    }
}

/// Memory of its own.
fn alone(len: usize) -> u64 {
    let layout = layout(len);
    // SAFETY: nothing of no length is asked for.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    if memory.is_null() {
        std::alloc::handle_alloc_error(layout);
    }
    memory.expose_provenance() as u64
}

/// A new chunk, zeroed.
fn chunk() -> usize {
    let layout = layout(CHUNK);
    // SAFETY: the layout is not empty; the advice is given and the zeros are written for memory that
    // is ours alone.
    unsafe {
        let memory = std::alloc::alloc(layout);
        if memory.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        // Before it is touched. It is advice: a system that cannot follow it says so, and nothing
        // is different but the speed.
        #[cfg(target_os = "linux")]
        if let Some(memory) = std::ptr::NonNull::new(memory.cast()) {
            use nix::sys::mman::{MmapAdvise, madvise};
            let _ = madvise(memory, CHUNK, MmapAdvise::MADV_HUGEPAGE);
        }
        memory.write_bytes(0, CHUNK);
        memory.expose_provenance()
    }
}

fn release(address: usize, len: usize) {
    // SAFETY: it came from `alone` or `chunk` with this length, and nobody knows of it any more.
    unsafe {
        std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address), layout(len));
    }
}

/// Asks the processor for a line of memory, and does not wait for it.
#[inline]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(oncekey_loom)))]
    // SAFETY: a hint to the processor, for any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(oncekey_loom))))]
    let _ = at;
}

#[cfg(not(oncekey_loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What is handed out.
    struct Block {
        address: u64,
        len: usize,
    }

    impl Block {
        fn bytes(&mut self) -> &mut [u8] {
            let address = std::ptr::with_exposed_provenance_mut(self.address as usize);
            // SAFETY: so much was handed out.
            unsafe { std::slice::from_raw_parts_mut(address, self.len) }
        }
    }

    fn give_back(pages: &Pages, block: Block) {
        // SAFETY: it was taken with this length.
        unsafe { pages.give_back(block.address, block.len) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// What is handed out is zero, aligned, and nobody else's; of a chunk that is free nothing
        /// stays, nor does a free block have a free twin.
        #[test]
        fn blocks_are_zero_and_ones_own(
            steps in prop::collection::vec((0..=ORDERS, any::<u8>(), any::<bool>()), 1..100),
        ) {
            let pages = Pages::default();
            let mut blocks: Vec<Block> = Vec::new();
            for (order, pick, gives) in steps {
                if gives && !blocks.is_empty() {
                    let block = blocks.swap_remove(usize::from(pick) % blocks.len());
                    give_back(&pages, block);
                } else {
                    // One size is larger than a chunk, and one is no power of two.
                    let len = (SMALLEST << order) + if pick == 0 { 64 } else { 0 };
                    let mut block = Block { address: pages.take(len), len };
                    prop_assert!(block.address.is_multiple_of(LINE as u64));
                    prop_assert!(block.bytes().iter().all(|byte| *byte == 0));
                    block.bytes().fill(pick | 1);
                    let end = block.address + len as u64;
                    let meets = |other: &Block| {
                        other.address < end && block.address < other.address + other.len as u64
                    };
                    prop_assert!(!blocks.iter().any(meets));
                    blocks.push(block);
                }
                let free = pages.free.lock();
                for (order, of_size) in free.blocks.iter().enumerate().take(ORDERS - 1) {
                    let twin = |address: &usize| address ^ (SMALLEST << order);
                    prop_assert!(!of_size.keys().any(|block| of_size.contains_key(&twin(block))));
                }
            }
            blocks.drain(..).for_each(|block| give_back(&pages, block));
            while pages.shed() {}
            let free = pages.free.lock();
            prop_assert_eq!((pages.out(), free.chunks.len()), (0, 0));
        }
    }

    #[test]
    fn nobody_waits_for_who_has_the_lock_and_nothing_is_lost_by_that() {
        let pages = Pages::default();
        let take = |len| Block { address: pages.take(len), len };
        // Of a chunk, and too short for one.
        let [of_chunk, short] = [1 << 20, 64].map(take);
        let locked = pages.free.lock();
        let (sent, waits) = std::sync::mpsc::channel();
        let done = std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(pages.take_ready(SMALLEST), None);
                let mut alone = take(1 << 20);
                assert!(alone.bytes().iter().all(|byte| *byte == 0));
                alone.bytes().fill(1);
                let more = take(SMALLEST);
                [of_chunk, alone, short, more].into_iter().for_each(|it| give_back(&pages, it));
                let _ = sent.send(());
            });
            // Whoever waited would wait for this thread, which lets go after a minute only to fail.
            let done = waits.recv_timeout(std::time::Duration::from_secs(60));
            drop(locked);
            done
        });
        assert!(done.is_ok(), "somebody waited");
        assert!(!pages.is_settled());
        assert_eq!(pages.out(), (2 << 20) + SMALLEST, "still counted");
        while pages.shed() {}
        assert!(pages.is_settled());
        assert_eq!((pages.out(), pages.free.lock().chunks.len()), (0, 0));
    }

    #[test]
    fn who_can_do_without_leaves_touching_a_chunk_to_the_sweep() {
        let pages = Pages::default();
        let ready = |len| pages.take_ready(len).map(|address| Block { address, len });
        let first = ready(1 << 20);
        assert!(first.is_some(), "nobody is there who would make one ready");
        while pages.prepare() {}
        let second = [(); 3].map(|()| ready(1 << 20));
        assert!(second.iter().all(Option::is_some), "the rest of the first chunk, and the next");
        assert!(ready(1 << 20).is_none());
        assert_eq!(pages.out(), 4 << 20, "what was not given is not counted");
        assert!(pages.alarm.is_asked(), "and the sweep was told");
        while pages.prepare() {}
        let third = ready(1 << 20);
        assert!(third.is_some());
        let all = second.into_iter().chain([first, third]);
        all.flatten().for_each(|block| give_back(&pages, block));
        while pages.shed() {}
        assert_eq!((pages.out(), pages.free.lock().chunks.len()), (0, 0));
    }

    #[test]
    fn a_chunk_is_ready_before_it_is_needed_and_no_longer_than_that() {
        let pages = Pages::default();
        let chunks = || pages.free.lock().chunks.len();
        while pages.prepare() {}
        assert_eq!(chunks(), 0, "nothing is kept ready for a small store");
        let take = || Block { address: pages.take(CHUNK), len: CHUNK };
        let first = take();
        assert_eq!(chunks(), 1);
        while pages.prepare() {}
        assert_eq!(chunks(), 2);
        let second = take();
        assert_eq!(chunks(), 2, "the one that was ready");
        while pages.prepare() {}
        [first, second].into_iter().for_each(|block| give_back(&pages, block));
        assert_eq!(chunks(), 3, "the sweep has not been here");
        assert!(pages.shed(), "there are more");
        assert_eq!(chunks(), 2, "one at a time");
        while pages.shed() {}
        assert_eq!(chunks(), 0);
    }
}
