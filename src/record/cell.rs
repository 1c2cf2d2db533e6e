//! Where claims live that are not done: cells, in blocks of 21.
//!
//! ```text
//! Lane   current, cursor: numbers of blocks    shelves: | 16 | 32 | 64 | .. addresses of blocks
//! Block  | free | retired | waiting, mark | due | ghosts | long | cell | cell | ... |   4 KiB, of `Pages`
//! Cell   | state | token | claimed | settled | hash, fingerprint, identity |     192 bytes
//!
//! cell   free --take--> taken --retire--> retired --seal--> waiting --refill--> free
//! ```
//!
//! Ground rules: a cell is one claim, from winning it to the end of its permit and of its place in
//! the index. Identity and fingerprint are written before the cell is put into the index and not
//! again while anybody can see it (R12). Nobody waits for a cell: a block that is used up is left,
//! the one that was left longest ago is looked at, and if those who might still see its cells are
//! not gone, a new block is made.
//!
//! Invariants:
//!
//! 1. A cell is free, retired or waiting (one bit in its block), or taken (none). Only a thread that
//!    took it writes it.
//! 2. A cell is retired by the thread that its state word appoints (see `word.rs`), after no slot
//!    names it any more. Retired cells of a block are sealed together, with a mark (see `reclaim`),
//!    and are free again when the guards of that time are gone.
//! 3. A block that is all free may go: its bits are all taken first, so nobody takes a cell of it.
//!    Then its place on the shelf is emptied, and it is freed when nobody has it in hand. Places have
//!    numbers and are not freed, so that a number that somebody remembers is never wrong.
//! 4. `due` is no later than the earliest deadline of a taken cell. Deadlines are made later, but
//!    for claims and attended runs that begin after the sweep has looked: it leaves room for those.

use crate::{
    clock::Millis,
    fingerprint::Fingerprint,
    identity::Frame,
    reclaim::{Guard, Mark},
    sync::{Arc, AtomicU64, Ordering, Tally, UnsafeCell},
};

use super::{
    Pages, prefetch,
    word::{Kind, Word},
};

/// Bits of a cell's name: an address of 48 bits, of which its alignment needs no six.
pub(super) const BITS: u32 = 42;

/// Cells of a block: with its head, the smallest block of [`Pages`]. So blocks of a large store lie in
/// its chunks, and those that a burst has left behind are given back there, not to an allocator whose
/// locks others wait for.
const CELLS: usize = if cfg!(oncekey_loom) { 4 } else { 21 };
const ALL: u64 = u64::MAX >> (64 - CELLS);

/// So many retired cells are sealed together, unless somebody looks for free ones first.
const BATCH: u32 = if cfg!(oncekey_loom) { 1 } else { 16 };

/// So many blocks are looked at before a new one is made.
const LOOKS: usize = if cfg!(oncekey_loom) { 1 } else { 4 };

/// Places on the first shelf; each further one has twice as many.
const FIRST: usize = if cfg!(oncekey_loom) { 2 } else { 16 };

/// With so many there are places for 2^33 cells in a lane: no machine has memory for as many.
const SHELVES: usize = if cfg!(oncekey_loom) { 3 } else { 24 };

/// So many cells of a block may be ghosts: a few, because nobody counts them against a limit.
const GHOSTS: u64 = 3;

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
        (std::ptr::from_ref(self).expose_provenance() / align_of::<Self>()) as u64
    }

    /// The cell that [`Cell::bits`] names.
    ///
    /// # Safety
    ///
    /// The cell was not retired when a slot named it, and `_guard` was there by then; or its
    /// waiters' list has a waiter and is locked.
    pub(crate) unsafe fn from_bits<'g>(bits: u64, _guard: &'g Guard<'_>) -> &'g Self {
        // SAFETY: a cell that was not retired while the guard is there stays what it is.
        unsafe { &*std::ptr::with_exposed_provenance(Self::address(bits)) }
    }

    /// A cell whose waiters' list has a waiter and is locked by the caller: who moves it on empties
    /// the list before it lets go of the cell.
    pub(crate) fn waited_for<T>(bits: u64, _locked: &T) -> &Cell {
        // SAFETY: see above.
        unsafe { &*std::ptr::with_exposed_provenance(Self::address(bits)) }
    }

    /// Where the cell lies that [`Cell::bits`] names.
    pub(crate) fn address(bits: u64) -> usize {
        bits as usize * align_of::<Self>()
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
    /// [`Waiting`].
    waiting: AtomicU64,
    /// Invariant 4, in milliseconds.
    due: AtomicU64,
    /// Cells that are ghosts.
    ghosts: Tally,
    /// A set bit is a cell whose identity is on the heap. Written by who has the cell.
    long: Tally,
    cells: [Cell; CELLS],
}

/// Cells that were sealed, and when: a bit for each, and a [`Mark`].
#[derive(Clone, Copy)]
struct Waiting {
    cells: u64,
    mark: Mark,
}

impl Waiting {
    fn from_bits(bits: u64) -> Self {
        Self { cells: bits >> 32, mark: Mark::from_bits(bits as u32) }
    }

    fn bits(self) -> u64 {
        self.cells << 32 | u64::from(self.mark.bits())
    }
}

const _: () = assert!(CELLS <= 32);

#[cfg(not(oncekey_loom))]
const _: () = assert!(size_of::<Block>() == 4096);

impl Block {
    /// A new one, of which the caller has the address.
    fn make(due: Millis, pages: &Pages) -> u64 {
        let address = pages.take(size_of::<Self>());
        super::assert_fits_a_slot(address as usize);
        let block = Self {
            free: AtomicU64::new(ALL),
            retired: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            due: AtomicU64::new(due.0),
            ghosts: Tally::new(0),
            long: Tally::new(0),
            cells: std::array::from_fn(|number| Cell::blank(number as u8)),
        };
        // SAFETY: memory of this length that is nobody else's, aligned to a line as a block is.
        unsafe { std::ptr::with_exposed_provenance_mut::<Self>(address as usize).write(block) }
        address
    }

    /// # Safety
    ///
    /// `address` came from `make` with these pages, and nobody uses the block any more.
    unsafe fn unmake(address: u64, pages: &Pages) {
        // SAFETY: see above. Cells may have identities on the heap.
        unsafe {
            std::ptr::with_exposed_provenance_mut::<Self>(address as usize).drop_in_place();
            pages.give_back(address, size_of::<Self>());
        }
    }

    #[inline]
    fn take(&self) -> Option<&Cell> {
        loop {
            // Relaxed: only a hint, the next line decides.
            let free = self.free.load(Ordering::Relaxed);
            if free == 0 {
                return None;
            }
            let bit = free & free.wrapping_neg();
            if self.free.fetch_and(!bit, Ordering::Acquire) & bit != 0 {
                // The next one has not been looked at for a while.
                if let Some(next) = self.cells.get((free & !bit).trailing_zeros() as usize) {
                    let next = std::ptr::from_ref(next);
                    (0..size_of::<Cell>())
                        .step_by(64)
                        .for_each(|at| prefetch(next.wrapping_byte_add(at)));
                }
                return self.cells.get(bit.trailing_zeros() as usize);
            }
        }
    }

    /// Marks the retired cells, unless others wait.
    fn seal(&self, guard: &Guard<'_>) {
        let before = self.waiting.load(Ordering::Relaxed);
        if Waiting::from_bits(before).cells != 0 {
            return;
        }
        // AcqRel: takes over what the retiring threads did.
        let cells = self.retired.swap(0, Ordering::AcqRel);
        if cells == 0 {
            return;
        }
        let waiting = Waiting { cells, mark: guard.mark() }.bits();
        // AcqRel, partner of the CAS in `refill`: what retired them, and what gave back those before.
        let sealed =
            self.waiting.compare_exchange(before, waiting, Ordering::AcqRel, Ordering::Relaxed);
        if sealed.is_err() {
            // Somebody else has sealed some. Release: for who takes them over next.
            self.retired.fetch_or(cells, Ordering::Release);
        }
    }

    /// Gives waiting cells back, if nobody sees them any more. True if there are free ones now.
    fn refill(&self, guard: &Guard<'_>) -> bool {
        self.seal(guard);
        let bits = self.waiting.load(Ordering::Acquire);
        let Waiting { cells, mark } = Waiting::from_bits(bits);
        if cells == 0 || !guard.is_past(mark) {
            return self.free.load(Ordering::Relaxed) != 0;
        }
        // AcqRel: one thread gives them back, and has what those did who retired them.
        let none = Waiting { cells: 0, mark }.bits();
        let taken = self.waiting.compare_exchange(bits, none, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            // Nothing else of the cells is touched: most were not looked at for long. Their words are
            // final ones of claims that are over, of which a sweep that meets a cell that is taken and
            // not yet filled makes nothing.
            let long = cells & self.long.load(Ordering::Relaxed);
            if long != 0 {
                self.long.fetch_and(!long, Ordering::Relaxed);
                for cell in self.cells.iter().filter(|cell| long >> cell.number & 1 != 0) {
                    // SAFETY: retired long ago and not yet free: nobody else looks at it (invariant 1).
                    cell.body.with_mut(|body| unsafe { (*body).frame = Frame::NONE });
                }
            }
            self.free.fetch_or(cells, Ordering::Release);
        }
        true
    }

    /// Whether no cell is retired, waiting or taken.
    fn is_unused(&self) -> bool {
        self.free.load(Ordering::Relaxed) == ALL
    }
}

/// The cells of a lane.
#[derive(Debug)]
pub(crate) struct Cells {
    /// The number of the block that cells are taken from. As the next one, it is only a hint.
    current: Tally,
    /// The number of the block that was left longest ago.
    cursor: Tally,
    /// Number of changes (32 bits) and a length (32): places that may have a block lie below it.
    len: AtomicU64,
    /// Blocks that there are, are about to be, or wait to be freed.
    count: AtomicU64,
    /// Addresses of arrays of places, zero for none; and each place the address of a block, zero for
    /// none. What they lead to is written whole before (Release, and Acquire in `place` and `block`).
    shelves: [AtomicU64; SHELVES],
    /// Where blocks lie.
    pages: Arc<Pages>,
}

impl Cells {
    pub(crate) fn new(pages: &Arc<Pages>) -> Self {
        Self {
            current: Tally::new(0),
            cursor: Tally::new(0),
            len: AtomicU64::new(0),
            count: AtomicU64::new(0),
            shelves: std::array::from_fn(|_| AtomicU64::new(0)),
            pages: Arc::clone(pages),
        }
    }

    /// The shelf of a place, and where on it.
    fn shelf(at: usize) -> (usize, usize) {
        let shelf = (at / FIRST + 1).ilog2() as usize;
        (shelf, at - ((FIRST << shelf) - FIRST))
    }

    /// The place with the number `at`, if its shelf is there.
    #[inline]
    fn place(&self, at: usize) -> Option<&AtomicU64> {
        let (shelf, index) = Self::shelf(at);
        let address = self.shelves.get(shelf)?.load(Ordering::Acquire) as usize;
        if address == 0 {
            return None;
        }
        let places = std::ptr::with_exposed_provenance::<AtomicU64>(address);
        // SAFETY: the shelf has so many places and stays until `self` is dropped.
        Some(unsafe { &*places.add(index) })
    }

    #[inline]
    fn block<'g>(&'g self, at: usize, _guard: &'g Guard<'g>) -> Option<&'g Block> {
        let address = self.place(at)?.load(Ordering::Acquire) as usize;
        if address == 0 {
            return None;
        }
        // SAFETY: a block is freed after its place was emptied and all guards are gone.
        Some(unsafe { &*std::ptr::with_exposed_provenance::<Block>(address) })
    }

    fn blocks<'g>(&'g self, guard: &'g Guard<'g>) -> impl Iterator<Item = (usize, &'g Block)> {
        (0..self.len()).filter_map(move |at| Some((at, self.block(at, guard)?)))
    }

    fn len(&self) -> usize {
        // Acquire, partner of the change in `make_block`.
        self.len.load(Ordering::Acquire) as u32 as usize
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
        if frame.is_long() {
            // SAFETY: a taken cell keeps its block.
            unsafe { &*cell.block() }.long.fetch_or(1 << cell.number, Ordering::Relaxed);
        }
        // SAFETY: the cell was free and is taken by this thread (invariant 1).
        cell.body.with_mut(|body| unsafe {
            (*body).hash = hash;
            (*body).fingerprint = fingerprint;
            (*body).frame.copy_from(frame);
        });
        cell.claimed.store(now.0, Ordering::Relaxed);
        // Release, partner of `word` in the sweep, which finds cells without an index.
        let word = Word::new(Kind::InFlight, deadline).with_out(true);
        cell.state.store(word.bits(), Ordering::Release);
        Owned(std::ptr::NonNull::from(cell))
    }

    #[inline]
    fn take<'g>(&'g self, due: Millis, guard: &'g Guard<'g>) -> &'g Cell {
        loop {
            let current = self.current.load(Ordering::Relaxed) as usize;
            if let Some(block) = self.block(current, guard)
                && let Some(cell) = block.take()
            {
                return cell;
            }
            self.go_on(due, guard);
        }
    }

    /// Finds a block with free cells, or makes one.
    #[cold]
    fn go_on(&self, due: Millis, guard: &Guard<'_>) {
        let len = self.len();
        let mut vacant = len;
        for _ in 0..LOOKS.min(len) {
            let mut at = self.cursor.fetch_add(1, Ordering::Relaxed) as usize;
            if at >= len {
                self.cursor.store(1, Ordering::Relaxed);
                at = 0;
            }
            match self.block(at, guard) {
                Some(block) if block.refill(guard) => {
                    self.current.store(at as u64, Ordering::Relaxed);
                    return;
                }
                Some(_) => {}
                None => vacant = at,
            }
        }
        self.make_block(vacant, due);
    }

    /// Puts a new block into the first place from `at` on that has none.
    fn make_block(&self, mut at: usize, due: Millis) {
        // First: a lane that has a block, if only for a moment, is not idle.
        self.count.fetch_add(1, Ordering::Relaxed);
        let block = Block::make(due, &self.pages);
        loop {
            let place = self.place(at).unwrap_or_else(|| self.put_up(at));
            // Release: the block is whole.
            if place.compare_exchange(0, block, Ordering::Release, Ordering::Relaxed).is_ok() {
                break;
            }
            at += 1;
        }
        // Each block is a change, though the length may stay as it is: see `shorten`.
        let longer = |len: u64| {
            let (changes, len) = (len >> 32, u64::from(len as u32));
            Some(changes.wrapping_add(1) << 32 | len.max(at as u64 + 1))
        };
        let _ = self.len.fetch_update(Ordering::AcqRel, Ordering::Relaxed, longer);
        self.current.store(at as u64, Ordering::Relaxed);
    }

    /// Puts up the shelf of the place `at`, unless another thread has.
    fn put_up(&self, at: usize) -> &AtomicU64 {
        let (shelf, index) = Self::shelf(at);
        let len = FIRST << shelf;
        let places: Box<[AtomicU64]> = (0..len).map(|_| AtomicU64::new(0)).collect();
        let places = Box::into_raw(places).cast::<AtomicU64>();
        let address = places.expose_provenance() as u64;
        // Below the number of shelves: see there.
        let there = &self.shelves[shelf];
        let places = match there.compare_exchange(0, address, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => places.cast_const(),
            Err(other) => {
                // SAFETY: made above, and nobody knows of it.
                drop(unsafe { Self::take_down(address, shelf) });
                std::ptr::with_exposed_provenance(other as usize)
            }
        };
        // SAFETY: as in `place`.
        unsafe { &*places.add(index) }
    }

    /// # Safety
    ///
    /// `address` is that of a shelf with this number, and nobody uses it any more.
    unsafe fn take_down(address: u64, shelf: usize) -> Box<[AtomicU64]> {
        let places = std::ptr::with_exposed_provenance_mut::<AtomicU64>(address as usize);
        // SAFETY: `put_up` made it so.
        unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(places, FIRST << shelf)) }
    }

    /// The state of the cell that `bits` names, if it is one of this lane's and still that of the
    /// claim with this token.
    pub(crate) fn word_of(&self, bits: u64, token: u64, guard: &Guard<'_>) -> Option<Word> {
        let address = Cell::address(bits);
        let (_, block) = self.blocks(guard).find(|(_, block)| {
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
        // SAFETY: a taken cell keeps its block, and afterwards the guard does.
        let block = unsafe { &*cell.block() };
        let bit = 1 << cell.number;
        if cell.word().is_ghost() {
            block.ghosts.fetch_sub(1, Ordering::Relaxed);
            // The sweep finds cells without an index. If it still meets a ghost, its guard is older
            // than this, and the cell waits for it.
            cell.state.store(Word::BLANK.bits(), Ordering::Release);
        }
        // AcqRel, partner of the swap in `seal`: who seals has what this thread did.
        let before = block.retired.fetch_or(bit, Ordering::AcqRel);
        if (before | bit).count_ones() >= BATCH {
            block.seal(guard);
        }
    }

    /// Calls `look` for each taken cell of at most `budget` blocks that have a deadline at or
    /// before `now`, and seals retired cells. `look` answers with the cell's next deadline,
    /// `none_before` bounds those of cells it does not see.
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
        let mut next: Option<Millis> = None;
        let mut left = budget;
        for (_, block) in self.blocks(guard) {
            if block.is_unused() {
                continue;
            }
            if block.due.load(Ordering::Relaxed) <= now.0 {
                if left == 0 {
                    return (Some(now), true);
                }
                left -= 1;
                let free = block.free.load(Ordering::Relaxed);
                let mut due = none_before;
                for cell in block.cells.iter().filter(|cell| free >> cell.number & 1 == 0) {
                    if let Some(at) = look(cell) {
                        due = due.min(at);
                    }
                }
                block.due.store(due.0, Ordering::Relaxed);
            }
            block.seal(guard);
            let due = Millis(block.due.load(Ordering::Relaxed));
            next = Some(next.map_or(due, |next| next.min(due)));
        }
        (next, false)
    }

    /// Whether there is nothing to look at and nothing to free.
    pub(crate) fn is_idle(&self) -> bool {
        // A change, so that it reads the latest.
        self.count.fetch_add(0, Ordering::AcqRel) == 0
    }

    /// Gives sealed cells back, and frees blocks without a taken cell: all of them, or at most every
    /// other one and not the first few that are to stay, so that what comes and goes is not given
    /// away each time. Only one thread at a time.
    pub(crate) fn free_blocks(&self, mut stay: usize, guard: &Guard<'_>) {
        let mut unused = 0;
        for (_, block) in self.blocks(guard) {
            block.refill(guard);
            unused += usize::from(block.is_unused());
        }
        if stay > 0 {
            stay = stay.max(unused / 2);
        }
        for (at, block) in self.blocks(guard) {
            if !block.is_unused() {
                continue;
            }
            if stay > 0 {
                stay -= 1;
                continue;
            }
            // Acquire, partner of the Release in `refill`; invariant 3.
            let taken = block.free.compare_exchange(ALL, 0, Ordering::Acquire, Ordering::Relaxed);
            if taken.is_err() {
                continue;
            }
            if let Some(place) = self.place(at) {
                place.store(0, Ordering::Release);
            }
            // The next look begins with those that have stayed.
            self.cursor.store(0, Ordering::Relaxed);
            let block = std::ptr::from_ref(block).expose_provenance() as u64;
            let pages = Arc::as_ptr(&self.pages).expose_provenance() as u64;
            // SAFETY: no place leads to it any more, and it has no cell. Its pages live as long as the
            // store, which frees first what is deferred.
            unsafe { guard.defer(drop_block, block, pages) }
            // Last: it counts until it is among what waits to be freed.
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        self.shorten();
    }

    /// Nobody has to look at places behind the last block.
    fn shorten(&self) {
        let len = self.len.load(Ordering::Acquire);
        let is_vacant =
            |at: &usize| self.place(*at).is_none_or(|place| place.load(Ordering::Relaxed) == 0);
        let vacant = (0..len as u32 as usize).rev().take_while(is_vacant).count() as u64;
        // A block that was put there meanwhile was not seen perhaps: then the length has changed, or
        // it will be and is raised again.
        let _ = self.len.compare_exchange(len, len - vacant, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        for place in (0..self.len()).filter_map(|at| self.place(at)) {
            // Relaxed: nobody else has the lane any more.
            let block = place.load(Ordering::Relaxed);
            if block != 0 {
                // SAFETY: from `make_block`, and nobody has it.
                unsafe { Block::unmake(block, &self.pages) }
            }
        }
        for (number, shelf) in self.shelves.iter().enumerate() {
            let address = shelf.load(Ordering::Relaxed);
            if address != 0 {
                // SAFETY: from `put_up`, and nobody uses it.
                drop(unsafe { Self::take_down(address, number) });
            }
        }
    }
}

/// # Safety
///
/// `block` came from [`Block::make`] with these `pages`, and nobody has it.
unsafe fn drop_block(block: u64, pages: u64) {
    // SAFETY: see above.
    unsafe { Block::unmake(block, &*std::ptr::with_exposed_provenance::<Pages>(pages as usize)) }
}

#[cfg(all(test, oncekey_loom, oncekey_reclaim))]
mod models {
    use loom::thread;

    use super::*;
    use crate::{
        fingerprint::Scheme,
        identity::Identity,
        reclaim::Domain,
        sync::{Arc, explore},
    };

    struct World {
        domain: Domain,
        cells: Cells,
        slot: AtomicU64,
    }

    fn make(world: &World, guard: &Guard<'_>) -> u64 {
        let Ok(identity) = Identity::new("a", "e", "k") else { panic!("no identity") };
        let fingerprint = Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]);
        let at = Millis(0);
        let frame = identity.frame();
        world.cells.make(7, &frame, fingerprint, at, at, at, guard).cell().bits()
    }

    fn refill(world: &World, times: usize) {
        let guard = world.domain.pin(0);
        let Some(block) = world.cells.block(0, &guard) else { panic!("no block") };
        (0..times).for_each(|_| drop(block.refill(&guard)));
    }

    #[test]
    fn loom_cell_retired_by_one_and_sealed_by_another_against_a_look() {
        explore(2, || {
            let (domain, cells) = (Domain::new(2), Cells::new(&Arc::new(Pages::default())));
            let world = Arc::new(World { domain, cells, slot: AtomicU64::new(0) });
            {
                let guard = world.domain.pin(0);
                let other = make(&world, &guard);
                world.slot.store(make(&world, &guard), Ordering::Release);
                // It waits, so that who retires the next one does not seal it.
                // SAFETY: made above.
                Cells::retire(unsafe { Cell::from_bits(other, &guard) }, &guard);
            }
            world.domain.turn_over();
            let runs: [fn(&World); 3] = [
                |world| {
                    let guard = world.domain.pin(0);
                    let bits = world.slot.swap(0, Ordering::AcqRel);
                    // SAFETY: the slot named it, and this thread has taken it out.
                    Cells::retire(unsafe { Cell::from_bits(bits, &guard) }, &guard);
                },
                |world| {
                    refill(world, 2);
                    world.domain.turn_over();
                    refill(world, 1);
                },
                |world| {
                    let guard = world.domain.pin(1);
                    let bits = world.slot.load(Ordering::Acquire);
                    if bits != 0 {
                        // SAFETY: the slot names it, and there is a guard.
                        assert_eq!(unsafe { Cell::from_bits(bits, &guard) }.hash(), 7);
                    }
                },
            ];
            let threads = runs.map(|run| {
                let world = Arc::clone(&world);
                thread::spawn(move || run(&world))
            });
            threads.into_iter().for_each(|thread| assert!(thread.join().is_ok()));
        });
    }
}

#[cfg(not(oncekey_loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fingerprint::Scheme, identity::Identity, reclaim::Domain};

    /// A large store's blocks are cut from the chunks that are there, and go back to them.
    #[test]
    fn blocks_of_cells_lie_in_pages_with_their_identities_outside() {
        const BLOCKS: usize = 100;
        let pages = Arc::new(Pages::default());
        let (domain, cells) = (Domain::new(1), Cells::new(&pages));
        // Longer than a cell has room for.
        let long = "k".repeat(200);
        let Ok(identity) = Identity::new("a", "e", &long) else { panic!("no identity") };
        let frame = identity.frame();
        let fingerprint = Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]);
        let at = Millis(0);
        let guard = domain.pin(0);
        let owned: Vec<Owned> = (0..BLOCKS * CELLS)
            .map(|_| cells.make(7, &frame, fingerprint, at, at, at, &guard))
            .collect();
        assert_eq!(pages.out(), BLOCKS * 4096);
        // Chunks are of 2 MiB: more than one is never needed for as much.
        let chunk = |owned: &Owned| std::ptr::from_ref(owned.cell()).addr() >> 21;
        let last: std::collections::BTreeSet<_> =
            owned.iter().rev().take(50 * CELLS).map(chunk).collect();
        assert_eq!(last.len(), 1, "the last ones share a chunk");
        for owned in owned {
            Cells::retire(owned.cell(), &guard);
        }
        drop(guard);
        // Those that were sealed wait for guards that were there; then they are free, and their blocks
        // go when no guard has them.
        for _ in 0..3 {
            domain.turn_over();
            cells.free_blocks(0, &domain.pin(0));
        }
        while domain.collect() {}
        assert_eq!(pages.out(), 0);
    }
}
