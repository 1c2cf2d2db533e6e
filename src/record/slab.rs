//! Where completed records lie: slabs, filled from front to back, in the order of completion.
//!
//! ```text
//! directory[number % 2^16]   | address of the slab / 16 (44) | generation (10) |
//! place                      | number % 2^16 (16) | generation (10) | offset / 16 (16) |
//!
//! Slab   | word | number | cap | .. | record | record | record |      free      |
//!                                   ^ reaped up to here        ^ cursor
//! word   63 closed | 62..32 records that are not dead | 31..0 cursor / 16
//! Record | state | end | token | fingerprint | lengths, status | identity | outcome |
//! state  63..3 length / 16 | 2..0  0 unwritten, 1 written, 2 live, 3 dead, 4 copy
//! ```
//!
//! Ground rules: a record never changes after it was written, but for its state. `written` is a
//! record whose completion is still to be confirmed, a `copy` one that takes the place of another
//! in a slab that is mostly dead; who meets them takes them as live.
//!
//! Invariants:
//!
//! 1. State moves unwritten -> written or copy -> live -> dead, or at once to dead, by
//!    compare-and-swap. Who moves a record from written or live to dead gives its room back; a
//!    completion that lost moves its own to dead and gives nothing back. The room of a copy is that
//!    of the one it was made of; who finds that his copy was killed gives it back.
//! 2. The number of records in `word` is raised by the addition that makes room for one, and
//!    lowered by who made it dead. Nobody adds to a closed slab. A closed slab without records is
//!    taken out of the directory by one compare-and-swap: that thread gives the memory back.
//! 3. A place is dead if the directory has another generation. Numbers go up; a number comes back
//!    after 2^26, and by then no slot has an old place of it (see `index`).
//! 4. All slabs of a lane stand in its queue in the order of opening, until they were reaped. So
//!    records stand there in the order of their ends, but for copies, which end earlier than what
//!    stands around them: `copies` of a slab is no later than the end of any live one in it, and
//!    that of the queue no later than that of any slab.
//! 5. A large outcome is a value in its record: whoever makes the record dead has it dropped when
//!    nobody reads it any more, which is before the slab's memory goes, because what is deferred
//!    runs in order.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::{
    clock::Millis,
    fingerprint::{Fingerprint, Scheme},
    outcome::Outcome,
    reclaim::Guard,
    sync::{Arc, AtomicU64, Mutex, Ordering, Tally, UnsafeCell},
};

use super::{Pages, prefetch};

const GENERATION_BITS: u32 = 10;
const GENERATION: u64 = (1 << GENERATION_BITS) - 1;

/// Entries of the directory: then numbers come round to the first one, a generation later.
const NUMBERS: u64 = if cfg!(oncekey_loom) { 2 } else { 1 << 16 };

const SMALLEST: usize = 4 << 10;
const LARGEST: usize = 1 << 20;

/// How long one is where memory for a long one is not ready.
const SHORT: usize = 64 << 10;

/// Alignment of records.
const UNIT: usize = 16;

/// Records begin with a line of the cache, or a whole number of units later.
const LINE: usize = 64;

/// Larger outcomes stay where they are and the record has their address. Below, a copy costs less
/// than a shared count and a miss.
const INLINE: usize = 512;

/// The reaping asks for memory so many records ahead.
const AHEAD: usize = 8;

/// Under the checker all records have one length and a slab has two of them.
const MODEL_UNITS: usize = 64;
const MODEL_RECORDS: usize = 2;

const CLOSED: u64 = 1 << 63;
const ONE: u64 = 1 << 32;

const CHUNK: usize = if cfg!(oncekey_loom) { 8 } else { 256 };
const CHUNKS: usize = if cfg!(oncekey_loom) { 1 } else { 256 };

/// Where a record lies. See the drawing at the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u64);

impl Place {
    pub(crate) const BITS: u32 = 32 + GENERATION_BITS;

    fn new(number: u64, offset: u64) -> Self {
        let index = number % NUMBERS;
        let generation = (number / NUMBERS) & GENERATION;
        Self(index << (16 + GENERATION_BITS) | generation << 16 | offset)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits & ((1 << Self::BITS) - 1))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    fn index(self) -> usize {
        (self.0 >> (16 + GENERATION_BITS)) as usize
    }

    fn generation(self) -> u64 {
        self.0 >> 16 & GENERATION
    }

    fn offset(self) -> usize {
        (self.0 & 0xffff) as usize * UNIT
    }
}

const _: () = assert!(LARGEST / UNIT <= 1 << 16);

const UNWRITTEN: u64 = 0;
const WRITTEN: u64 = 1;
const LIVE: u64 = 2;
const DEAD: u64 = 3;
const COPY: u64 = 4;

const KIND_BITS: u32 = 3;
const KIND: u64 = (1 << KIND_BITS) - 1;

/// A completed claim. See the drawing at the head of the file.
#[repr(C)]
pub(crate) struct Record {
    state: AtomicU64,
    body: UnsafeCell<Body>,
}

/// All zero is a value of it.
#[repr(C)]
struct Body {
    end: u64,
    token: u64,
    scheme: [u8; 8],
    digest: [u8; 32],
    head: u16,
    body: u16,
    frame: u16,
    status: u16,
    form: u8,
}

const NOT_KEPT: u8 = 0;
const SMALL: u8 = 1;
const LARGE: u8 = 2;

// SAFETY: `body` and the bytes behind it are written by the thread that made room for the record,
// before it publishes its place; then never again. `state` is atomic.
unsafe impl Sync for Record {}

/// What a call of [`Slabs::kill`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Killed {
    /// The record is dead by this call: its room is to be given back.
    Now,
    /// The same, of a copy: who made it gives the room back.
    Copy,
    /// It was dead already.
    Before,
}

impl Record {
    /// Moves the state from what was seen to another kind; else tells what is there.
    fn move_on(&self, seen: u64, kind: u64) -> Result<(), u64> {
        // AcqRel, partner of `state`: what led to it is seen.
        self.state
            .compare_exchange(seen, seen & !KIND | kind, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
    }

    #[cfg(oncekey_loom)]
    fn unwritten() -> Self {
        let body = Body {
            end: 0,
            token: 0,
            scheme: [0; 8],
            digest: [0; 32],
            head: 0,
            body: 0,
            frame: 0,
            status: 0,
            form: NOT_KEPT,
        };
        Self { state: AtomicU64::new(UNWRITTEN), body: UnsafeCell::new(body) }
    }

    fn state(&self) -> u64 {
        // Acquire, partner of the Release in `write`.
        self.state.load(Ordering::Acquire)
    }

    fn body(&self) -> &Body {
        // SAFETY: who has a reference has met the record's place or its state after it was written.
        self.body.with(|body| unsafe { &*body })
    }

    fn tail(&self) -> *mut u8 {
        let address = std::ptr::from_ref(self).addr() + size_of::<Self>();
        std::ptr::with_exposed_provenance_mut(address)
    }

    fn bytes(&self, from: usize, len: usize) -> &[u8] {
        // SAFETY: `write` has made room for these bytes and filled them.
        unsafe { std::slice::from_raw_parts(self.tail().add(from), len) }
    }

    /// Where a large outcome is, behind the identity.
    fn large(&self) -> Option<*mut Outcome> {
        let body = self.body();
        let at = usize::from(body.frame).next_multiple_of(align_of::<Outcome>());
        // SAFETY: `write` has made room for it there.
        (body.form == LARGE).then(|| unsafe { self.tail().add(at).cast() })
    }

    pub(crate) fn frame(&self) -> &[u8] {
        self.bytes(0, usize::from(self.body().frame))
    }

    pub(crate) fn end(&self) -> Millis {
        Millis(self.body().end)
    }

    pub(crate) fn token(&self) -> u64 {
        self.body().token
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        let body = self.body();
        Fingerprint::from_parts(Scheme::from_id(body.scheme), body.digest)
    }

    /// Whether the record was forgotten, reaped, or past its end.
    pub(crate) fn is_over(&self, now: Millis) -> bool {
        self.state() & KIND == DEAD || now >= self.end()
    }

    /// Whether there is an outcome.
    pub(crate) fn is_kept(&self) -> bool {
        self.body().form != NOT_KEPT
    }

    /// A copy of a small outcome, a share of a large one.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        let body = self.body();
        if let Some(large) = self.large() {
            // SAFETY: it is dropped for who made the record dead, after all guards that were there
            // are gone; the caller's is one of them.
            return Some(unsafe { &*large }.clone());
        }
        if body.form != SMALL {
            return None;
        }
        let from = usize::from(body.frame);
        let head = self.bytes(from, usize::from(body.head));
        let bytes = self.bytes(from + head.len(), usize::from(body.body));
        Some(Outcome::from_parts(body.status, copy(head), copy(bytes)))
    }

    /// As `outcome`, of a record that may be dead: what is left of it.
    pub(crate) fn remains(&self) -> Option<Outcome> {
        if self.state() & KIND == DEAD && self.large().is_some() {
            return None;
        }
        self.outcome()
    }

    /// What the record costs a store.
    pub(crate) fn cost(&self) -> usize {
        let body = self.body();
        let own = super::cost(usize::from(body.frame));
        // SAFETY: as in `outcome`.
        match self.large().map(|large| unsafe { &*large }) {
            Some(outcome) => own + outcome.size(),
            None if body.form == NOT_KEPT => own,
            None => own + Outcome::size_of(body.head.into(), body.body.into()),
        }
    }

    /// The slab that the record lies in.
    fn slab(&self, place: Place) -> *const Slab {
        std::ptr::with_exposed_provenance(std::ptr::from_ref(self).addr() - place.offset())
    }

    /// Drops a large outcome later. The caller has made the record dead.
    fn drop_outcome(&self, guard: &Guard<'_>) {
        if let Some(large) = self.large() {
            // SAFETY: exactly one thread makes a record dead, and who still reads it holds a guard
            // (invariant 5).
            unsafe { guard.defer(drop_outcome, large.expose_provenance() as u64, 0) }
        }
    }
}

/// # Safety
///
/// The address is that of a large outcome that nobody reads any more.
unsafe fn drop_outcome(address: u64, _: u64) {
    let outcome = std::ptr::with_exposed_provenance_mut::<Outcome>(address as usize);
    // Its bytes may be of a type of the caller's. One that panics when it is dropped must not keep
    // others from being freed; the panic hook has told of it.
    // SAFETY: see above.
    let dropped = std::panic::AssertUnwindSafe(|| unsafe { outcome.drop_in_place() });
    let _ = std::panic::catch_unwind(dropped);
}

fn copy(bytes: &[u8]) -> Bytes {
    if bytes.is_empty() { Bytes::new() } else { Bytes::copy_from_slice(bytes) }
}

/// The length of a record with so many bytes behind its head.
const fn length(tail: usize) -> usize {
    (size_of::<Record>() + tail).next_multiple_of(UNIT)
}

/// What is written into a record.
pub(crate) struct Finished<'a> {
    pub(crate) frame: &'a [u8],
    pub(crate) fingerprint: &'a Fingerprint,
    pub(crate) token: u64,
    pub(crate) end: Millis,
    pub(crate) outcome: Option<&'a Outcome>,
}

impl Finished<'_> {
    /// The bytes of the record in a slab.
    fn bytes(&self) -> usize {
        let outcome = match self.outcome {
            None => 0,
            Some(outcome) if outcome.len() <= INLINE => outcome.len(),
            Some(_) => {
                let frame = self.frame.len();
                frame.next_multiple_of(align_of::<Outcome>()) - frame + size_of::<Outcome>()
            }
        };
        length(self.frame.len() + outcome)
    }
}

#[repr(C)]
struct Slab {
    word: AtomicU64,
    number: u64,
    /// Its length in bytes.
    len: usize,
    /// From where and up to where records may lie.
    first: u64,
    cap: u64,
    opened: Millis,
    /// Up to where all records are dead. Only the sweep writes it.
    reaped: AtomicU64,
    /// Units of records that were killed before their end, or before those in front of them.
    holes: Tally,
    /// Before this time no record in it ends that ends before its neighbours, such as a copy.
    copies: Tally,
    lane: usize,
}

const HEAD: usize = size_of::<Slab>().next_multiple_of(UNIT);

impl Slab {
    /// Makes room for a record, unless the slab is full or closed.
    fn add(&self, units: u64) -> Result<u64, Emptied> {
        // AcqRel, partner of the other changes of the word: who sees the last record go sees all
        // that came before.
        let before = self.word.fetch_add(ONE | units, Ordering::AcqRel);
        let offset = before & (ONE - 1);
        if before & CLOSED == 0 && offset + units <= self.cap {
            return Ok(offset);
        }
        self.word.fetch_or(CLOSED, Ordering::AcqRel);
        if before & CLOSED == 0 && offset < self.cap {
            // The rest is too short: the reaping steps over it as over a dead record.
            let rest = (self.cap - offset) << KIND_BITS | DEAD;
            self.record(offset).state.store(rest, Ordering::Release);
        }
        Err(self.take_away(1))
    }

    /// Takes dead records off the count.
    fn take_away(&self, records: u64) -> Emptied {
        let before = self.word.fetch_sub(records * ONE, Ordering::AcqRel);
        Emptied(before & CLOSED != 0 && before & !CLOSED < (records + 1) * ONE)
    }

    fn close(&self) -> Emptied {
        let before = self.word.fetch_or(CLOSED, Ordering::AcqRel);
        Emptied(before & !CLOSED < ONE)
    }

    fn record(&self, offset: u64) -> &Record {
        let address = std::ptr::from_ref(self).addr() + offset as usize * UNIT;
        // SAFETY: offsets come from places and from lengths of records before, so a record starts
        // there; its memory was zero, which is a record unwritten.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }
}

/// Whether a slab has no record any more and gets none.
#[must_use]
struct Emptied(bool);

/// The open slab of a lane, and those before it.
#[derive(Debug)]
struct Lane {
    /// The open slab's address, zero for none.
    open: AtomicU64,
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    /// Places and lengths of slabs, oldest first.
    slabs: VecDeque<(Place, usize)>,
    /// Bytes of them.
    bytes: usize,
    /// How long the next one is at most: what the last one had when it was closed for its age, and
    /// twice as much each time one is full.
    most: usize,
    /// Before this time no copy in them ends.
    copies: Millis,
}

/// Memory of slabs that are gone.
#[derive(Debug)]
struct Spare {
    dirty: Vec<(u64, usize)>,
    clean: Vec<(u64, usize)>,
    pages: Arc<Pages>,
}

impl Drop for Spare {
    fn drop(&mut self) {
        for (address, len) in self.dirty.iter().chain(&self.clean) {
            // SAFETY: it came from these pages with this length, and nobody knows of it any more.
            unsafe { self.pages.give_back(*address, *len) }
        }
    }
}

/// All slabs of a store.
#[derive(Debug)]
pub(crate) struct Slabs {
    lanes: Box<[Lane]>,
    directory: Box<[AtomicU64]>,
    /// The next slab's number. Written under `opening`, which holds how many slabs each chunk of
    /// the directory has.
    number: AtomicU64,
    opening: Mutex<[u16; CHUNKS]>,
    live: AtomicU64,
    /// How many records were killed before the sweep would have reaped them.
    killed: Tally,
    /// The sum of `killed` and `number` when the last look found no slab to compact.
    compacted: Tally,
    spare: Arc<Mutex<Spare>>,
    pages: Arc<Pages>,
    /// After what time an open slab is closed though it is not full.
    patience: Millis,
    retention: Millis,
}

impl Slabs {
    pub(crate) fn new(lanes: usize, retention: Millis, tick: Millis, pages: Arc<Pages>) -> Self {
        let lane = || Lane {
            open: AtomicU64::new(0),
            queue: Mutex::new(Queue {
                slabs: VecDeque::new(),
                bytes: 0,
                most: LARGEST,
                copies: Millis::MAX,
            }),
        };
        Self {
            lanes: (0..lanes).map(|_| lane()).collect(),
            directory: (0..CHUNKS).map(|_| AtomicU64::new(0)).collect(),
            number: AtomicU64::new(0),
            opening: Mutex::new([0; CHUNKS]),
            live: AtomicU64::new(0),
            killed: Tally::new(0),
            compacted: Tally::new(0),
            spare: Arc::new(Mutex::new(Spare {
                dirty: Vec::new(),
                clean: Vec::new(),
                pages: Arc::clone(&pages),
            })),
            pages,
            patience: Millis(retention.0 / 64).max(tick),
            retention,
        }
    }

    /// How many slabs were opened, and numbers passed over.
    pub(crate) fn number(&self) -> u64 {
        // Acquire, partner of the Release in `open`.
        self.number.load(Ordering::Acquire)
    }

    /// Whether there is no slab.
    pub(crate) fn is_empty(&self) -> bool {
        self.live.load(Ordering::Relaxed) == 0
    }

    fn entry(&self, index: usize) -> Option<&AtomicU64> {
        // Acquire, partner of the Release in `open`.
        let chunk = self.directory.get(index / CHUNK)?.load(Ordering::Acquire) as usize;
        if chunk == 0 {
            return None;
        }
        // SAFETY: a chunk is freed after it has left the directory and all guards are gone. The
        // callers have one, or hold `opening`.
        let chunk = unsafe { &*std::ptr::with_exposed_provenance::<Chunk>(chunk) };
        chunk.get(index % CHUNK)
    }

    /// The record at `place`; `None` if its slab is gone (invariant 3).
    pub(crate) fn at<'g>(&'g self, place: Place, guard: &'g Guard<'g>) -> Option<&'g Record> {
        let slab = self.slab(place, guard)?;
        Some(slab.record((place.offset() / UNIT) as u64))
    }

    /// Whether the slab of `place` is gone (invariant 3).
    pub(crate) fn is_gone(&self, place: Place, guard: &Guard<'_>) -> bool {
        self.slab(place, guard).is_none()
    }

    fn slab<'g>(&'g self, place: Place, _guard: &'g Guard<'g>) -> Option<&'g Slab> {
        // Acquire, partner of the Release in `open`: the slab is whole.
        let entry = self.entry(place.index())?.load(Ordering::Acquire);
        let address = (entry >> GENERATION_BITS) as usize * UNIT;
        if address == 0 || entry & GENERATION != place.generation() {
            return None;
        }
        // SAFETY: a slab is freed after it has left the directory and all guards are gone.
        Some(unsafe { &*std::ptr::with_exposed_provenance(address) })
    }

    /// Writes a record that is not yet confirmed. `None` if there are no numbers for slabs left.
    pub(crate) fn write<'g>(
        &'g self,
        lane: usize,
        finished: &Finished<'_>,
        now: Millis,
        guard: &'g Guard<'g>,
    ) -> Option<(Place, &'g Record)> {
        self.write_as(WRITTEN, lane, finished, now, guard)
    }

    fn write_as<'g>(
        &'g self,
        kind: u64,
        lane: usize,
        finished: &Finished<'_>,
        now: Millis,
        guard: &'g Guard<'g>,
    ) -> Option<(Place, &'g Record)> {
        let bytes = finished.bytes();
        let units = if cfg!(oncekey_loom) { MODEL_UNITS } else { bytes / UNIT } as u64;
        let lane = self.lanes.get(lane)?;
        let (slab, offset) = loop {
            // Acquire, partner of the Release in `open`.
            let address = lane.open.load(Ordering::Acquire) as usize;
            if address == 0 {
                self.open(lane, now)?;
                continue;
            }
            // SAFETY: a slab is freed after `open` has left it and all guards are gone.
            let slab: &'g Slab = unsafe { &*std::ptr::with_exposed_provenance(address) };
            match slab.add(units) {
                Ok(offset) => break (slab, offset),
                Err(emptied) => {
                    self.bury(slab, emptied, guard);
                    // Release: nothing is handed over, but who opens the next sees it gone.
                    let _ = lane.open.compare_exchange(
                        address as u64,
                        0,
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    );
                }
            }
        };
        let record = slab.record(offset);
        let small = finished.outcome.filter(|outcome| outcome.len() <= INLINE);
        record.body.with_mut(|body| {
            let scheme = finished.fingerprint.scheme().id();
            let digest = *finished.fingerprint.digest();
            let form = match (finished.outcome, small) {
                (None, _) => NOT_KEPT,
                (_, Some(_)) => SMALL,
                _ => LARGE,
            };
            let frame = finished.frame.len() as u16;
            let (mut head, mut len) = (0, 0);
            let mut put = record.tail();
            let mut append = |bytes: &[u8]| {
                // SAFETY: `bytes` above is the sum of what is appended.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), put, bytes.len());
                    put = put.add(bytes.len());
                }
            };
            append(finished.frame);
            if let Some(outcome) = small {
                head = outcome.head().len() as u16;
                len = outcome.bytes().len() as u16;
                // Most have no header lines, many no body: a call less.
                for part in [outcome.head(), outcome.bytes()] {
                    if !part.is_empty() {
                        append(part);
                    }
                }
            } else if let Some(outcome) = finished.outcome {
                let at = finished.frame.len().next_multiple_of(align_of::<Outcome>());
                // SAFETY: as above; the tail of a record is aligned to as much.
                unsafe { record.tail().add(at).cast::<Outcome>().write(outcome.clone()) }
            }
            let status = finished.outcome.map_or(0, Outcome::status);
            let Finished { token, end, .. } = *finished;
            let end = end.0;
            // SAFETY: this thread made room for the record and nobody has its place yet.
            unsafe {
                *body = Body { end, token, scheme, digest, head, body: len, frame, status, form }
            };
        });
        // Release, partner of `state`: the sweep finds records without an index.
        record.state.store(units << KIND_BITS | kind, Ordering::Release);
        // For the next one, which is likely as long.
        let next = std::ptr::from_ref(record).wrapping_byte_add(bytes);
        (0..bytes.min(4 * LINE)).step_by(LINE).for_each(|at| prefetch(next.wrapping_byte_add(at)));
        Some((Place::new(slab.number, offset), record))
    }

    /// The completion has won, or the copy has taken the place: the record is live. False if it was
    /// killed meanwhile, by who has met it.
    pub(crate) fn confirm(&self, record: &Record) -> bool {
        let state = record.state();
        state & KIND != DEAD && record.move_on(state, LIVE).is_ok()
    }

    /// The completion has lost: the record never was.
    pub(crate) fn withdraw(&self, place: Place, record: &Record, guard: &Guard<'_>) {
        // Nobody counts on its room. Somebody may have killed it, if it is a copy.
        let _ = self.kill(place, record, guard);
    }

    /// Makes a record dead; says so to the one thread that did.
    pub(crate) fn kill(&self, place: Place, record: &Record, guard: &Guard<'_>) -> Killed {
        let mut state = record.state();
        loop {
            if state & KIND == DEAD {
                return Killed::Before;
            }
            match record.move_on(state, DEAD) {
                Ok(()) => break,
                Err(moved) => state = moved,
            }
        }
        record.drop_outcome(guard);
        self.one_less(place, record, guard);
        if state & KIND == COPY { Killed::Copy } else { Killed::Now }
    }

    fn one_less(&self, place: Place, record: &Record, guard: &Guard<'_>) {
        // SAFETY: the record is in the slab's count, so the slab is there; then the guard keeps it.
        let slab = unsafe { &*record.slab(place) };
        slab.holes.fetch_add(record.state() >> KIND_BITS, Ordering::Relaxed);
        self.killed.fetch_add(1, Ordering::Relaxed);
        let emptied = slab.take_away(1);
        self.bury(slab, emptied, guard);
    }

    /// Passes a number over, as a slab that lived and died would have: for models.
    #[cfg(all(test, oncekey_loom))]
    pub(crate) fn pass_over(&self) {
        self.number.fetch_add(1, Ordering::Relaxed);
    }

    /// Opens a slab for a lane that has none.
    fn open(&self, lane: &Lane, now: Millis) -> Option<()> {
        let queue = lane.queue.lock();
        if lane.open.load(Ordering::Acquire) != 0 {
            return Some(());
        }
        // At most a sixteenth of what the lane has, so that what is empty in the last one does not
        // matter. A power of two, as all memory of pages.
        let len = up_to(queue.bytes / 16).min(queue.most);
        // Nobody is to wait for the lock until memory has come, or was touched.
        drop(queue);
        let (address, len) = self.memory(len);
        let mut queue = lane.queue.lock();
        if lane.open.load(Ordering::Acquire) != 0 {
            // Another thread was faster. Nobody has written to it: it is as clean as it came.
            drop(queue);
            self.spare.lock().clean.push((address, len));
            return Some(());
        }
        queue.most = (queue.most * 2).min(LARGEST);
        let mut opening = self.opening.lock();
        let from = self.number.load(Ordering::Relaxed);
        let mut number = from;
        let entry = loop {
            if number - from > NUMBERS {
                self.spare.lock().dirty.push((address, len));
                return None;
            }
            let entry = self.entry_made((number % NUMBERS) as usize)?;
            // Acquire, partner of the AcqRel in `bury`.
            if entry.load(Ordering::Acquire) == 0 {
                break entry;
            }
            number += 1;
        };
        opening[(number % NUMBERS) as usize / CHUNK % CHUNKS] += 1;
        self.number.store(number + 1, Ordering::Release);
        let first = ((address as usize + HEAD).next_multiple_of(LINE) - address as usize) / UNIT;
        let end = if cfg!(oncekey_loom) { first + MODEL_RECORDS * MODEL_UNITS } else { len / UNIT };
        let slab = Slab {
            word: AtomicU64::new(first as u64),
            number,
            len,
            first: first as u64,
            cap: end as u64,
            opened: now,
            reaped: AtomicU64::new(first as u64),
            holes: Tally::new(0),
            copies: Tally::new(Millis::MAX.0),
            lane: self.lanes.iter().position(|it| std::ptr::eq(it, lane)).unwrap_or(0),
        };
        // SAFETY: fresh memory of `len` bytes, aligned to a unit.
        unsafe {
            std::ptr::with_exposed_provenance_mut::<Slab>(address as usize).write(slab);
            #[cfg(oncekey_loom)]
            for record in 0..MODEL_RECORDS {
                let offset = (first + record * MODEL_UNITS) * UNIT;
                std::ptr::with_exposed_provenance_mut::<Record>(address as usize + offset)
                    .write(Record::unwritten());
            }
        }
        // Release, partner of `slab`: who finds it finds it whole.
        entry.store(entry_of(address, number), Ordering::Release);
        queue.slabs.push_back((Place::new(number, 0), len));
        queue.bytes += len;
        self.live.fetch_add(1, Ordering::Relaxed);
        // Release, partner of `write`.
        lane.open.store(address, Ordering::Release);
        Some(())
    }

    /// The directory's entry, made if its chunk is missing. Called under `opening`.
    fn entry_made(&self, index: usize) -> Option<&AtomicU64> {
        let chunk = self.directory.get(index / CHUNK)?;
        if chunk.load(Ordering::Relaxed) == 0 {
            let made: Box<Chunk> = Box::new(std::array::from_fn(|_| AtomicU64::new(0)));
            // Release, partner of `entry`.
            chunk.store(Box::into_raw(made).expose_provenance() as u64, Ordering::Release);
        }
        self.entry(index)
    }

    /// Zeroed memory for a slab of that length, or for a shorter one where none is ready: all who
    /// complete in the lane come here at once, and are not to touch a chunk each.
    fn memory(&self, len: usize) -> (u64, usize) {
        let mut spare = self.spare.lock();
        if let Some(found) = spare.clean.iter().rposition(|(_, clean)| *clean == len) {
            return spare.clean.swap_remove(found);
        }
        drop(spare);
        let (address, len) = match self.pages.take_ready(len) {
            Some(address) => (address, len),
            None => (self.pages.take(len.min(SHORT)), len.min(SHORT)),
        };
        super::assert_fits_a_slot(address as usize);
        (address, len)
    }

    /// Takes a slab without records out of the directory and gives its memory back (invariant 2).
    fn bury(&self, slab: &Slab, emptied: Emptied, guard: &Guard<'_>) {
        if !emptied.0 {
            return;
        }
        let address = std::ptr::from_ref(slab).addr() as u64;
        let Some(entry) = self.entry((slab.number % NUMBERS) as usize) else { return };
        let there = entry_of(address, slab.number);
        // AcqRel: only one thread goes on from here, and nobody finds the slab any more. Failure:
        // a late `add` has emptied it once more.
        if entry.compare_exchange(there, 0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        if let Some(lane) = self.lanes.get(slab.lane) {
            let _ = lane.open.compare_exchange(address, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        self.live.fetch_sub(1, Ordering::Relaxed);
        let spare = Arc::as_ptr(&self.spare).expose_provenance() as u64;
        // SAFETY: neither the directory nor a lane leads to the slab. The list of spare memory lives
        // as long as the store, which frees first what is deferred.
        unsafe { guard.defer(keep_spare, address, spare) }
        let mut opening = self.opening.lock();
        let chunk = (slab.number % NUMBERS) as usize / CHUNK % CHUNKS;
        opening[chunk] -= 1;
        if opening[chunk] == 0 {
            // AcqRel: nobody finds the chunk any more.
            let empty = self.directory[chunk].swap(0, Ordering::AcqRel);
            // SAFETY: `entry_made` has made it from a box, and the directory has left it.
            unsafe { guard.defer(drop_chunk, empty, 0) }
        }
    }

    /// Closes slabs that are open for too long and makes records dead whose end has come, at most
    /// `budget` of them; `reaped` is told of each. Only one thread at a time.
    ///
    /// Answers with the end of a record that comes next, and whether more are due.
    pub(crate) fn sweep(
        &self,
        now: Millis,
        budget: usize,
        guard: &Guard<'_>,
        mut reaped: impl FnMut(&Record),
    ) -> (Option<Millis>, bool) {
        let mut next: Option<Millis> = None;
        let mut left = budget;
        let mut sooner = |at: Millis| next = Some(next.map_or(at, |next| next.min(at)));
        for lane in &self.lanes {
            let mut turn = 0;
            loop {
                let place = lane.queue.lock().slabs.get(turn).copied();
                let Some((place, len)) = place else { break };
                let Some(slab) = self.slab(place, guard) else {
                    let mut queue = lane.queue.lock();
                    queue.slabs.remove(turn);
                    queue.bytes -= len;
                    continue;
                };
                let (dead, stop) = reap_slab(slab, now, &mut left, guard, &mut reaped);
                let mut emptied = slab.take_away(dead);
                // An open slab without a record gives its memory back.
                if slab.word.load(Ordering::Acquire) < ONE {
                    emptied = slab.close();
                }
                self.bury(slab, emptied, guard);
                match stop {
                    Stop::Budget => return (Some(now), true),
                    Stop::End(at) => {
                        sooner(at);
                        break;
                    }
                    // A record that is being written holds up its slab, not the others.
                    Stop::Unwritten => {
                        sooner(now);
                        turn += 1;
                    }
                    Stop::Cursor => turn += 1,
                }
            }
            match self.reap_copies(lane, now, &mut left, guard, &mut reaped) {
                Stop::End(at) => sooner(at),
                Stop::Budget => return (Some(now), true),
                Stop::Unwritten | Stop::Cursor => {}
            }
            self.close_old(lane, now, guard);
            let mut queue = lane.queue.lock();
            if queue.slabs.is_empty() {
                queue.most = LARGEST;
            }
            if queue.slabs.is_empty() || queue.slabs.capacity() > 4 * queue.slabs.len() + 16 {
                queue.slabs.shrink_to_fit();
            }
        }
        (next, false)
    }

    /// Makes copies dead whose end has come: they stand among younger records, which the walk from
    /// the front waits for (R22).
    fn reap_copies(
        &self,
        lane: &Lane,
        now: Millis,
        left: &mut usize,
        guard: &Guard<'_>,
        reaped: &mut impl FnMut(&Record),
    ) -> Stop {
        let queue = lane.queue.lock();
        let mut next = queue.copies;
        if next == Millis::MAX {
            return Stop::Cursor;
        }
        if now < next {
            return Stop::End(next);
        }
        let places: Vec<Place> = queue.slabs.iter().map(|(place, _)| *place).collect();
        drop(queue);
        next = Millis::MAX;
        for place in places {
            let Some(slab) = self.slab(place, guard) else { continue };
            let mut at = Millis(slab.copies.load(Ordering::Relaxed));
            if at <= now {
                // What was completed while the slab was open ends no earlier than this.
                let others = slab.opened.plus(self.retention);
                let (dead, stop) = reap_early(slab, now, others, left, guard, reaped);
                let emptied = slab.take_away(dead);
                self.bury(slab, emptied, guard);
                match stop {
                    Stop::Budget => return Stop::Budget,
                    Stop::End(end) => at = end,
                    Stop::Unwritten | Stop::Cursor => at = Millis::MAX,
                }
                slab.copies.store(at.0, Ordering::Relaxed);
            }
            next = next.min(at);
        }
        lane.queue.lock().copies = next;
        if next == Millis::MAX { Stop::Cursor } else { Stop::End(next) }
    }

    /// A record that ends before its neighbours lies at `place` of a lane: a copy, or one that was
    /// completed elsewhere. If a sweep looks at the slab this very moment it may miss this; then the
    /// record gives its memory back with its neighbours.
    pub(crate) fn note_early(&self, lane: usize, place: Place, end: Millis, guard: &Guard<'_>) {
        let (Some(lane), Some(slab)) = (self.lanes.get(lane), self.slab(place, guard)) else {
            return;
        };
        slab.copies.fetch_min(end.0, Ordering::Relaxed);
        let mut queue = lane.queue.lock();
        queue.copies = queue.copies.min(end);
    }

    /// Makes up to `budget` records of the oldest slab dead before their end; `evicted` is told of
    /// each. Only one thread at a time. False if there was none.
    pub(crate) fn evict(
        &self,
        budget: usize,
        guard: &Guard<'_>,
        mut evicted: impl FnMut(&Record),
    ) -> bool {
        let mut slabs: Vec<(u64, &Slab)> = Vec::new();
        for lane in &self.lanes {
            let queue = lane.queue.lock();
            let there = queue.slabs.iter().filter_map(|(place, _)| self.slab(*place, guard));
            slabs.extend(there.map(|slab| (slab.number, slab)));
        }
        slabs.sort_unstable_by_key(|(number, _)| *number);
        for (_, slab) in slabs {
            let mut left = budget;
            let (dead, _) = reap_slab(slab, Millis::MAX, &mut left, guard, &mut evicted);
            let mut emptied = slab.take_away(dead);
            // What is empty gives its memory back, though it be open.
            if slab.word.load(Ordering::Acquire) < ONE {
                emptied = slab.close();
            }
            self.bury(slab, emptied, guard);
            if dead != 0 {
                return true;
            }
        }
        false
    }

    /// Closes the open slab of a lane if it is open for too long: its first record must not keep the
    /// memory of the last ones, nor the last that of the first.
    fn close_old(&self, lane: &Lane, now: Millis, guard: &Guard<'_>) {
        let newest = lane.queue.lock().slabs.back().copied();
        let Some(slab) = newest.and_then(|(place, _)| self.slab(place, guard)) else { return };
        let word = slab.word.load(Ordering::Acquire);
        if word & CLOSED == 0 && now >= slab.opened.plus(self.patience) {
            let used = (word & (ONE - 1)) as usize * UNIT;
            // The next one not much longer than what such a time needs.
            lane.queue.lock().most = up_to(used + used / 4);
            let emptied = slab.close();
            self.bury(slab, emptied, guard);
        }
    }

    /// Moves what lives out of one closed slab of which more than half was killed before its time,
    /// so that it can go. Only one thread at a time. True if there was one. `swing` puts a place
    /// where another one stands in the index, or says that it does not stand there; `lost` is told
    /// of each record that was killed while it moved.
    pub(crate) fn compact<'g>(
        &'g self,
        now: Millis,
        guard: &'g Guard<'g>,
        swing: impl Fn(&[u8], Place, Place) -> bool,
        mut lost: impl FnMut(&Record),
    ) -> bool {
        // Nothing has got holes, and no slab was closed.
        let looked_at = self.killed.load(Ordering::Relaxed) + self.number();
        if looked_at == self.compacted.load(Ordering::Relaxed) {
            return false;
        }
        for (number, lane) in self.lanes.iter().enumerate() {
            let sparse = |(place, _): &(Place, usize)| {
                let slab = self.slab(*place, guard)?;
                let holes = slab.holes.load(Ordering::Relaxed);
                let closed = slab.word.load(Ordering::Acquire) & CLOSED != 0;
                // A slab of a model has two records.
                let many = if cfg!(oncekey_loom) { holes != 0 } else { holes * 2 > slab.cap };
                (closed && many).then_some(slab)
            };
            let found = lane.queue.lock().slabs.iter().find_map(sparse);
            let Some(slab) = found else { continue };
            // Whatever comes of it, once is enough.
            slab.holes.store(0, Ordering::Relaxed);
            let mut offset = slab.reaped.load(Ordering::Relaxed);
            while offset < (slab.word.load(Ordering::Acquire) & (ONE - 1)).min(slab.cap) {
                let old = slab.record(offset);
                let state = old.state();
                if state == UNWRITTEN {
                    break;
                }
                if state & KIND == LIVE && now < old.end() {
                    let from = Place::new(slab.number, offset);
                    self.relocate(number, (from, old), now, guard, &swing, &mut lost);
                }
                offset += state >> KIND_BITS;
            }
            return true;
        }
        self.compacted.store(looked_at, Ordering::Relaxed);
        false
    }

    fn relocate<'g>(
        &'g self,
        lane: usize,
        (from, old): (Place, &Record),
        now: Millis,
        guard: &'g Guard<'g>,
        swing: &impl Fn(&[u8], Place, Place) -> bool,
        lost: &mut impl FnMut(&Record),
    ) {
        let outcome = old.remains();
        if outcome.is_some() != old.is_kept() {
            return;
        }
        let finished = Finished {
            frame: old.frame(),
            fingerprint: &old.fingerprint(),
            token: old.token(),
            end: old.end(),
            outcome: outcome.as_ref(),
        };
        let Some((to, new)) = self.write_as(COPY, lane, &finished, now, guard) else { return };
        if !swing(old.frame(), from, to) {
            self.withdraw(to, new, guard);
            return;
        }
        // From here on the copy is what others find. Who has found the old one before may kill it.
        match self.kill(from, old, guard) {
            Killed::Now if self.confirm(new) => self.note_early(lane, to, new.end(), guard),
            Killed::Now => lost(new),
            Killed::Copy | Killed::Before => self.withdraw(to, new, guard),
        }
    }

    /// Zeroes memory of slabs for the next, keeps as much as a sixteenth of what is in use, and
    /// gives the rest back. One slab for each call; true if there is more.
    pub(crate) fn clean(&self) -> bool {
        let mut spare = self.spare.lock();
        let wanted = (self.live.load(Ordering::Relaxed) / 16) as usize;
        if spare.clean.len() > wanted {
            if let Some((address, len)) = spare.clean.pop() {
                drop(spare);
                // SAFETY: it came from there with this length, and nobody else knows of it.
                unsafe { self.pages.give_back(address, len) }
            }
            return true;
        }
        let Some((address, len)) = spare.dirty.pop() else {
            if spare.clean.is_empty() {
                spare.clean.shrink_to_fit();
                spare.dirty.shrink_to_fit();
            }
            return false;
        };
        let keep = spare.clean.len() < wanted && len == LARGEST;
        drop(spare);
        if keep && !cfg!(oncekey_loom) {
            // SAFETY: nobody else knows of this memory, and it has `len` bytes.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(address as usize).write_bytes(0, len)
            }
            self.spare.lock().clean.push((address, len));
        } else {
            // SAFETY: as above.
            unsafe { self.pages.give_back(address, len) }
        }
        true
    }
}

/// # Safety
///
/// `slab` is a slab that nobody sees any more, `spare` the list of its store.
unsafe fn keep_spare(slab: u64, spare: u64) {
    // SAFETY: see above.
    let (len, spare) = unsafe {
        let memory = std::ptr::with_exposed_provenance::<Slab>(slab as usize);
        ((*memory).len, &*std::ptr::with_exposed_provenance::<Mutex<Spare>>(spare as usize))
    };
    spare.lock().dirty.push((slab, len));
}

/// # Safety
///
/// The address is that of a chunk that came from a box and that nobody sees any more.
unsafe fn drop_chunk(chunk: u64, _: u64) {
    // SAFETY: see above.
    drop(unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Chunk>(chunk as usize)) });
}

/// The length of a slab that is no longer than `len`, if that can be.
fn up_to(len: usize) -> usize {
    1 << len.clamp(SMALLEST, LARGEST).ilog2()
}

/// What stands in the directory for a slab.
fn entry_of(address: u64, number: u64) -> u64 {
    (address / UNIT as u64) << GENERATION_BITS | (number / NUMBERS) & GENERATION
}

type Chunk = [AtomicU64; CHUNK];

/// Why the reaping of a slab has stopped.
enum Stop {
    /// At a record whose end this is.
    End(Millis),
    /// At a record that is not yet confirmed.
    Unwritten,
    /// Nothing more is in it.
    Cursor,
    Budget,
}

/// Makes records at the front of a slab dead. Answers how many it was.
fn reap_slab(
    slab: &Slab,
    now: Millis,
    left: &mut usize,
    guard: &Guard<'_>,
    reaped: &mut impl FnMut(&Record),
) -> (u64, Stop) {
    let mut dead = 0;
    let mut offset = slab.reaped.load(Ordering::Relaxed);
    let stop = loop {
        let cursor = slab.word.load(Ordering::Acquire) & (ONE - 1);
        if offset >= cursor.min(slab.cap) {
            break Stop::Cursor;
        }
        let record = slab.record(offset);
        let state = record.state();
        // They lie one behind the other, and nobody has looked at them for as long as they lived.
        let ahead = std::ptr::from_ref(record);
        let ahead = ahead.wrapping_byte_add(AHEAD * (state >> KIND_BITS) as usize * UNIT);
        prefetch(ahead);
        prefetch(ahead.wrapping_byte_add(size_of::<Record>() - 1));
        match state & KIND {
            UNWRITTEN | WRITTEN | COPY => break Stop::Unwritten,
            LIVE => {
                if now < record.end() {
                    break Stop::End(record.end());
                }
                if *left == 0 {
                    break Stop::Budget;
                }
                *left -= 1;
                let end = record.move_on(state, DEAD);
                // Failure: forgotten this very moment, by who gives its room back.
                if end.is_ok() {
                    reaped(record);
                    record.drop_outcome(guard);
                    dead += 1;
                }
            }
            _ => {}
        }
        offset += state >> KIND_BITS;
    };
    slab.reaped.store(offset, Ordering::Relaxed);
    (dead, stop)
}

/// As [`reap_slab`], of those records only that end before `others`, wherever they stand. Stops at
/// the end of the earliest that is left.
fn reap_early(
    slab: &Slab,
    now: Millis,
    others: Millis,
    left: &mut usize,
    guard: &Guard<'_>,
    reaped: &mut impl FnMut(&Record),
) -> (u64, Stop) {
    let mut dead = 0;
    let mut next = others;
    let mut offset = slab.reaped.load(Ordering::Relaxed);
    while offset < (slab.word.load(Ordering::Acquire) & (ONE - 1)).min(slab.cap) {
        let record = slab.record(offset);
        let state = record.state();
        if state == UNWRITTEN {
            break;
        }
        if state & KIND == LIVE && record.end() < others {
            if now < record.end() {
                next = next.min(record.end());
            } else if *left == 0 {
                return (dead, Stop::Budget);
            } else {
                *left -= 1;
                if record.move_on(state, DEAD).is_ok() {
                    reaped(record);
                    record.drop_outcome(guard);
                    slab.holes.fetch_add(state >> KIND_BITS, Ordering::Relaxed);
                    dead += 1;
                }
            }
        }
        offset += state >> KIND_BITS;
    }
    (dead, if next < others { Stop::End(next) } else { Stop::Cursor })
}

impl Drop for Slabs {
    fn drop(&mut self) {
        for lane in &self.lanes {
            for (place, _) in std::mem::take(&mut lane.queue.lock().slabs) {
                let domain = crate::reclaim::Domain::new(1);
                let guard = domain.pin(0);
                let Some(slab) = self.slab(place, &guard) else { continue };
                let mut offset = slab.first;
                // Relaxed, as below: nobody else has the slabs any more.
                while offset < (slab.word.load(Ordering::Relaxed) & (ONE - 1)).min(slab.cap) {
                    let record = slab.record(offset);
                    let state = record.state();
                    if state == UNWRITTEN {
                        break;
                    }
                    if state & KIND != DEAD {
                        record.drop_outcome(&guard);
                    }
                    offset += state >> KIND_BITS;
                }
                let (address, len) = (std::ptr::from_ref(slab).addr() as u64, slab.len);
                self.spare.lock().dirty.push((address, len));
            }
        }
        for chunk in &self.directory {
            let chunk = chunk.load(Ordering::Relaxed) as usize;
            if chunk != 0 {
                // SAFETY: `entry_made` has made it from a box; nobody uses the store any more.
                unsafe {
                    drop(Box::from_raw(std::ptr::with_exposed_provenance_mut::<Chunk>(chunk)))
                }
            }
        }
    }
}
