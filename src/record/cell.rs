//! Where claims live that are not done: cells, in blocks of 32.
//!
//! ```text
//! Lane   current --+     blocks (locked): [ block, block, block ]
//!                  v
//! Block  | free: 32 bits | retired: 32 bits | due | cell | cell | ... |
//! Cell   | state | token | claimed | settled | hash, fingerprint, identity |     192 bytes
//! ```
//!
//! Ground rules: a cell is one claim, from winning it to the end of its permit and of its place in
//! the index. Identity and fingerprint are written before the cell is put into the index and not
//! again while anybody can see it (R12).
//!
//! Invariants:
//!
//! 1. A cell is free (bit in `free`), retired (bit in `retired`, or a deferred call carries it), or
//!    taken (neither). Only a thread that took it writes it.
//! 2. A cell is retired by the thread that its state word appoints (see `word.rs`), after no slot
//!    names it any more. Its bit comes back to `free` only when all who could see it are gone.
//! 3. A block that is all free may go: its bits are all taken first, so nobody takes a cell of it.
//! 4. `due` is no later than the earliest deadline of a taken cell. Deadlines are made later, but
//!    for claims and attended runs that begin after the sweep has looked: it leaves room for those.

use crate::{
    clock::Millis,
    fingerprint::Fingerprint,
    identity::Frame,
    reclaim::Guard,
    sync::{Arc, AtomicU64, Mutex, Ordering, Tally, UnsafeCell},
};

use super::word::{Kind, Word};

/// Cells of a block.
const CELLS: usize = if cfg!(oncekey_loom) { 4 } else { 32 };
const ALL: u64 = u64::MAX >> (64 - CELLS);

/// So many retired cells are given back together, unless the sweep comes first.
const BATCH: u32 = if cfg!(oncekey_loom) { 1 } else { 16 };

/// So many cells of a block may be ghosts: a few, because nobody counts them against a limit.
const GHOSTS: u64 = 4;

/// One claim that is not done. See the drawing at the head of the file.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Cell {
    /// A [`Word`]. Compare-and-swap only, AcqRel: it publishes what was written before it to
    /// whoever loads it with Acquire.
    state: AtomicU64,
    /// The number of the claim's token. Written by who took the cell, and at a hand-over by the
    /// owner that gives it up, while it holds the lock of the waiters' list.
    token: AtomicU64,
    /// When the present owner won. For the age shown to operators.
    claimed: AtomicU64,
    /// When it was held. For the age shown to operators.
    settled: AtomicU64,
    /// Invariant 1.
    body: UnsafeCell<Body>,
    /// Its number in its block.
    number: u8,
}

#[derive(Debug)]
struct Body {
    hash: u64,
    fingerprint: Fingerprint,
    frame: Frame,
}

// SAFETY: `body` is written by the one thread that took the cell, before the index publishes it and
// after the last who saw it is gone (invariants 1 and 2). All else is atomic.
unsafe impl Sync for Cell {}

impl Cell {
    fn blank(number: u8) -> Self {
        let none = Fingerprint::from_parts(crate::fingerprint::Scheme::from_id([0; 8]), [0; 32]);
        Self {
            state: AtomicU64::new(Word::BLANK.bits()),
            token: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            body: UnsafeCell::new(Body { hash: 0, fingerprint: none, frame: Frame::NONE }),
            number,
        }
    }

    /// The state. Acquire, partner of the CAS in [`Cell::swap`]: who sees a state sees what led to
    /// it.
    pub(crate) fn word(&self) -> Word {
        Word::from_bits(self.state.load(Ordering::Acquire))
    }

    /// Moves the state from `old` to `new`; another thread's move in between is an error that
    /// tells the state it left.
    pub(crate) fn swap(&self, old: Word, new: Word) -> Result<(), Word> {
        self.state
            .compare_exchange(old.bits(), new.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Word::from_bits)
    }

    pub(crate) fn token(&self) -> u64 {
        // Acquire, partner of the Release in `name_owner`.
        self.token.load(Ordering::Acquire)
    }

    /// Names the owner: before the cell is published, or at a hand-over.
    pub(crate) fn name_owner(&self, token: u64, now: Millis) {
        self.claimed.store(now.0, Ordering::Relaxed);
        self.token.store(token, Ordering::Release);
    }

    pub(crate) fn claimed(&self) -> Millis {
        Millis(self.claimed.load(Ordering::Relaxed))
    }

    pub(crate) fn settled(&self) -> Millis {
        Millis(self.settled.load(Ordering::Relaxed))
    }

    pub(crate) fn settle(&self, now: Millis) {
        self.settled.store(now.0, Ordering::Relaxed);
    }

    fn body(&self) -> &Body {
        // SAFETY: who holds a reference to a cell sees it written whole (invariant 1): it came by
        // an Acquire load of the slot or of the state.
        self.body.with(|body| unsafe { &*body })
    }

    pub(crate) fn frame(&self) -> &Frame {
        &self.body().frame
    }

    pub(crate) fn hash(&self) -> u64 {
        self.body().hash
    }

    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.body().fingerprint
    }

    /// Names the cell in a slot and in the waiters' lists.
    pub(crate) fn bits(&self) -> u64 {
        (std::ptr::from_ref(self).expose_provenance() >> 4) as u64
    }

    /// The cell that [`Cell::bits`] names.
    ///
    /// # Safety
    ///
    /// The cell was not retired when a slot named it, and `_guard` was there by then; or its
    /// waiters' list has a waiter and is locked.
    pub(crate) unsafe fn from_bits<'g>(bits: u64, _guard: &'g Guard<'_>) -> &'g Self {
        // SAFETY: a cell that was not retired while the guard is there stays what it is.
        unsafe { &*std::ptr::with_exposed_provenance((bits as usize) << 4) }
    }

    /// A cell whose waiters' list has a waiter and is locked by the caller: who moves it on empties
    /// the list before it lets go of the cell.
    pub(crate) fn waited_for<T>(bits: u64, _locked: &T) -> &Cell {
        // SAFETY: see above.
        unsafe { &*std::ptr::with_exposed_provenance((bits as usize) << 4) }
    }

    /// Block and number.
    fn block(&self) -> *const Block {
        let first = std::ptr::from_ref(self).addr() - usize::from(self.number) * size_of::<Self>();
        std::ptr::with_exposed_provenance(first - std::mem::offset_of!(Block, cells))
    }
}

/// The right of a permit to its cell: the cell's word has `out` set as long as it is there. It is
/// given away by clearing the bit or by handing it over, never twice.
#[derive(Debug)]
pub(crate) struct Owned(std::ptr::NonNull<Cell>);

// SAFETY: it is a shared reference to a cell, which is Sync.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    pub(crate) fn cell(&self) -> &Cell {
        // SAFETY: while `out` is set nobody is appointed to retire the cell (invariant 2), and the
        // permit keeps the store and with it the block.
        unsafe { self.0.as_ref() }
    }

    /// The same right, for who takes it over: the other one must not be used again.
    pub(crate) fn moved(&self) -> Self {
        Self(self.0)
    }
}

#[derive(Debug)]
#[repr(C)]
struct Block {
    /// A set bit is a free cell. Taken by `fetch_and` with Acquire, partner of the Release of the
    /// `fetch_or` that gave it back; what is in the cell is then nobody else's.
    free: AtomicU64,
    /// A set bit is a cell that nobody new can see.
    retired: AtomicU64,
    /// Invariant 4, in milliseconds.
    due: AtomicU64,
    /// Cells that are ghosts.
    ghosts: Tally,
    cells: [Cell; CELLS],
}

impl Block {
    fn new(due: Millis) -> Arc<Self> {
        let block = Arc::new(Self {
            free: AtomicU64::new(ALL),
            retired: AtomicU64::new(0),
            due: AtomicU64::new(due.0),
            ghosts: Tally::new(0),
            cells: std::array::from_fn(|number| Cell::blank(number as u8)),
        });
        super::assert_fits_a_slot(block.cells.as_ptr().addr());
        block
    }

    fn take(&self) -> Option<&Cell> {
        loop {
            // Relaxed: only a hint, the next line decides.
            let free = self.free.load(Ordering::Relaxed);
            if free == 0 {
                return None;
            }
            let bit = free & free.wrapping_neg();
            if self.free.fetch_and(!bit, Ordering::Acquire) & bit != 0 {
                return self.cells.get(bit.trailing_zeros() as usize);
            }
        }
    }

    /// Gives cells back that nobody sees any more.
    fn give_back(&self, cells: u64) {
        for cell in self.cells.iter().filter(|cell| cells >> cell.number & 1 != 0) {
            // The sweep looks at cells that are taken and not yet filled: a word of the last claim
            // must not be taken for the next one's.
            cell.state.store(Word::BLANK.bits(), Ordering::Relaxed);
            // SAFETY: retired long ago and not yet free: nobody else looks at it (invariant 1).
            cell.body.with_mut(|body| unsafe { (*body).frame = Frame::NONE });
        }
        self.free.fetch_or(cells, Ordering::Release);
    }
}

/// The cells of a lane.
#[derive(Debug)]
pub(crate) struct Cells {
    /// The block that cells are taken from: an address, zero for none. Its `Arc` is in `blocks`.
    current: AtomicU64,
    blocks: Mutex<Vec<Arc<Block>>>,
    /// Where in `blocks` the present block stands, or stood. Read and written under their lock.
    found: Tally,
}

impl Cells {
    pub(crate) fn new() -> Self {
        Self { current: AtomicU64::new(0), blocks: Mutex::new(Vec::new()), found: Tally::new(0) }
    }

    /// A cell in flight that no slot names yet. Its token is still to be set. No deadline of a
    /// claim made from now on lies before `due`.
    #[expect(clippy::too_many_arguments, reason = "they are the parts of a claim")]
    pub(crate) fn make(
        &self,
        hash: u64,
        frame: &Frame,
        fingerprint: Fingerprint,
        now: Millis,
        deadline: Millis,
        due: Millis,
        guard: &Guard<'_>,
    ) -> Owned {
        let cell = self.take(due, guard);
        // SAFETY: the cell was free and is taken by this thread (invariant 1).
        cell.body.with_mut(|body| unsafe {
            *body = Body { hash, fingerprint, frame: frame.clone() };
        });
        cell.claimed.store(now.0, Ordering::Relaxed);
        // Release, partner of `word` in the sweep, which finds cells without an index.
        let word = Word::new(Kind::InFlight, deadline).with_out(true);
        cell.state.store(word.bits(), Ordering::Release);
        Owned(std::ptr::NonNull::from(cell))
    }

    fn take<'g>(&'g self, due: Millis, _guard: &'g Guard<'_>) -> &'g Cell {
        loop {
            // Acquire, partner of the stores below: the block is there.
            let current = self.current.load(Ordering::Acquire) as usize;
            if current != 0 {
                // SAFETY: a block is freed after `current` has left it and all guards are gone.
                let block = unsafe { &*std::ptr::with_exposed_provenance::<Block>(current) };
                if let Some(cell) = block.take() {
                    return cell;
                }
            }
            let mut blocks = self.blocks.lock();
            if self.current.load(Ordering::Acquire) as usize != current {
                continue;
            }
            // From where the last one was found: those before it are taken or wait to be given back.
            let from = (self.found.load(Ordering::Relaxed) as usize).min(blocks.len());
            let has_free = |&at: &usize| {
                blocks.get(at).is_some_and(|block| block.free.load(Ordering::Relaxed) != 0)
            };
            let found = (from..blocks.len()).chain(0..from).find(has_free);
            self.found.store(found.unwrap_or(blocks.len()) as u64, Ordering::Relaxed);
            let block = match found.and_then(|at| blocks.get(at)) {
                Some(block) => block,
                None => {
                    blocks.push(Block::new(due));
                    let Some(block) = blocks.last() else { continue };
                    block
                }
            };
            let address = Arc::as_ptr(block).expose_provenance() as u64;
            self.current.store(address, Ordering::Release);
        }
    }

    /// The state of the cell that `bits` names, if it is one of this lane's and still that of the
    /// claim with this token. Needs no guard.
    pub(crate) fn word_of(&self, bits: u64, token: u64) -> Option<Word> {
        let address = (bits as usize) << 4;
        let blocks = self.blocks.lock();
        let block = blocks.iter().find(|block| {
            let cells = block.cells.as_ptr_range();
            (cells.start.addr()..cells.end.addr()).contains(&address)
        })?;
        let number = (address - block.cells.as_ptr().addr()) / size_of::<Cell>();
        let cell = block.cells.get(number)?;
        // Tokens are used once: if it is the same after the word was read, the word is that claim's.
        let word = (cell.token() == token).then(|| cell.word())?;
        (cell.token() == token).then_some(word)
    }

    /// Whether one more cell beside this one may be left in its slot; then it counts as such.
    pub(crate) fn may_haunt(cell: &Cell) -> bool {
        // SAFETY: a taken cell keeps its block.
        let block = unsafe { &*cell.block() };
        let ghosts = block.ghosts.fetch_add(1, Ordering::Relaxed);
        if ghosts >= GHOSTS {
            block.ghosts.fetch_sub(1, Ordering::Relaxed);
        }
        ghosts < GHOSTS
    }

    /// It did not come to that.
    pub(crate) fn haunts_not(cell: &Cell) {
        // SAFETY: as above.
        unsafe { &*cell.block() }.ghosts.fetch_sub(1, Ordering::Relaxed);
    }

    /// Gives a cell back whose word has appointed the caller, and that no slot names (invariant 2).
    pub(crate) fn retire(cell: &Cell, guard: &Guard<'_>) {
        // SAFETY: a taken cell keeps its block.
        let block = unsafe { &*cell.block() };
        let bit = 1 << cell.number;
        if cell.word().is_ghost() {
            block.ghosts.fetch_sub(1, Ordering::Relaxed);
            // The sweep finds cells without an index. If it still meets a ghost, its guard is older
            // than this, and the cell waits for it.
            cell.state.store(Word::BLANK.bits(), Ordering::Release);
        }
        // AcqRel, partner of the swap in `flush`: who flushes has what this thread did.
        let before = block.retired.fetch_or(bit, Ordering::AcqRel);
        if (before | bit).count_ones() >= BATCH {
            // SAFETY: `cell.block()` is what `Arc::as_ptr` gave, and the block is not all free, so
            // its `Arc` in `blocks` is there.
            let block = unsafe {
                let block = std::ptr::from_ref(block);
                Arc::increment_strong_count(block);
                Arc::from_raw(block)
            };
            flush(block, guard);
        }
    }

    /// Calls `look` for each taken cell of at most `budget` blocks that have a deadline at or
    /// before `now`, gives retired cells back, and frees blocks that are not needed. `look` answers
    /// with the cell's next deadline, `none_before` bounds those of cells it does not see.
    ///
    /// Only one thread at a time. Answers with the next deadline, and whether more is due.
    pub(crate) fn sweep(
        &self,
        now: Millis,
        none_before: Millis,
        budget: usize,
        guard: &Guard<'_>,
        mut look: impl FnMut(&Cell) -> Option<Millis>,
    ) -> (Option<Millis>, bool) {
        let blocks: Vec<Arc<Block>> = self.blocks.lock().clone();
        let mut next: Option<Millis> = None;
        let mut left = budget;
        for block in &blocks {
            let free = block.free.load(Ordering::Relaxed);
            if free & ALL == ALL {
                continue;
            }
            if block.due.load(Ordering::Relaxed) <= now.0 {
                if left == 0 {
                    return (Some(now), true);
                }
                left -= 1;
                let mut due = none_before;
                for cell in block.cells.iter().filter(|cell| free >> cell.number & 1 == 0) {
                    if let Some(at) = look(cell) {
                        due = due.min(at);
                    }
                }
                block.due.store(due.0, Ordering::Relaxed);
            }
            if block.retired.load(Ordering::Relaxed) != 0 {
                flush(Arc::clone(block), guard);
            }
            let due = Millis(block.due.load(Ordering::Relaxed));
            next = Some(next.map_or(due, |next| next.min(due)));
        }
        (next, false)
    }

    /// Whether there is nothing to look at and nothing to free.
    pub(crate) fn is_idle(&self) -> bool {
        self.blocks.lock().is_empty()
    }

    /// Frees blocks without a taken cell: all of them, or at most every other one and not the first
    /// few that are to stay, so that what comes and goes is not given away each time.
    pub(crate) fn free_blocks(&self, mut stay: usize, guard: &Guard<'_>) {
        let mut freed = Vec::new();
        let mut blocks = self.blocks.lock();
        let is_unused = |block: &&Arc<Block>| block.free.load(Ordering::Relaxed) & ALL == ALL;
        if stay > 0 {
            stay = stay.max(blocks.iter().filter(is_unused).count() / 2);
        }
        let mut index = blocks.len();
        while index > 0 {
            index -= 1;
            let block = &blocks[index];
            if stay > 0 && is_unused(&block) {
                stay -= 1;
                continue;
            }
            // Acquire, partner of the Release in `give_back`; invariant 3.
            let taken = block.free.compare_exchange(ALL, 0, Ordering::Acquire, Ordering::Relaxed);
            if taken.is_ok() {
                let address = Arc::as_ptr(block).expose_provenance() as u64;
                if self.current.load(Ordering::Relaxed) == address {
                    self.current.store(0, Ordering::Release);
                }
                freed.push(blocks.swap_remove(index));
            }
        }
        if !freed.is_empty() {
            blocks.shrink_to_fit();
        }
        drop(blocks);
        if !freed.is_empty() {
            for block in freed {
                let block = Arc::into_raw(block).expose_provenance() as u64;
                // SAFETY: neither `current` nor the list leads to it any more, and it has no cell.
                unsafe { guard.defer(drop_block, block, 0) }
            }
        }
    }
}

/// Hands the retired cells of a block to the reclaimer.
fn flush(block: Arc<Block>, guard: &Guard<'_>) {
    // AcqRel: takes over what the retiring threads did.
    let cells = block.retired.swap(0, Ordering::AcqRel);
    if cells != 0 {
        let block = Arc::into_raw(block).expose_provenance() as u64;
        // SAFETY: no slot names these cells (invariant 2). The block is kept by its count.
        unsafe { guard.defer(give_back, block, cells) }
    }
}

/// # Safety
///
/// `block` is what `Arc::into_raw` gave, and nobody sees `cells` any more.
unsafe fn give_back(block: u64, cells: u64) {
    // SAFETY: see above.
    let block =
        unsafe { Arc::from_raw(std::ptr::with_exposed_provenance::<Block>(block as usize)) };
    block.give_back(cells);
}

/// # Safety
///
/// `block` is what `Arc::into_raw` gave.
unsafe fn drop_block(block: u64, _: u64) {
    // SAFETY: see above.
    drop(unsafe { Arc::from_raw(std::ptr::with_exposed_provenance::<Block>(block as usize)) });
}
