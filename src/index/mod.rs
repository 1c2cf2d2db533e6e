//! Identity -> what is there: the place where two claims of one identity meet.
//!
//! ```text
//! hash   63 ...... | shard 4..10 | bucket: `bits` .............. | rest         |
//!                                | 2 bits | tag: 20 bits ........|
//! Shard  | root -> Table |
//! Table  | buckets | next -> Table | cursor | done | overflow | spills (see `spill.rs`) |
//! Bucket | slot | slot | slot | slot | slot | slot | slot | link |    64 bytes, one line
//! slot   63 frozen | 62..43 tag | 42 kind | 41..0 which          0 empty, 1 tombstone
//!        kind 0: a cell, its address / 64      kind 1: a record, its `Place`
//! link   address of an overflow bucket | 2 frozen | 1 done (head of a chain only)
//! ```
//!
//! Ground rules: the index knows identities as framed bytes and compares them exactly (R1). Its
//! hash is keyed for each store (R27). Who reads a slot or what it names holds a guard.
//!
//! Invariants:
//!
//! 1. Slots of a chain fill in order, from empty, by compare-and-swap; a slot never becomes empty
//!    again. So all claims of an absent identity meet in the first empty slot, and one wins.
//! 2. A slot that is not empty changes to another reference for the same identity, or to a
//!    tombstone. A claim that finds a slot whose record is gone with its slab cannot know whose it
//!    was: it makes it a tombstone before it goes on, because another claim, which has seen the
//!    record while it was there, may be about to replace it.
//! 3. A table with a `next` is moved there bucket by bucket, by whoever comes by; nobody waits for
//!    anybody (see `table.rs`). A bucket is current until its head is done; then `next` is.
//! 4. `done` is looked at after a slot and before what it names: a reference that was current while
//!    the caller had a guard is safe to follow.
//! 5. A table never meets 2^25 slabs that are younger than itself: it is rebuilt before, and what is
//!    gone is not copied. So no slot is left that names a slab by a number that has come back.
//!
//! A claim takes its token's number after it has seen that there is nothing, and whoever was there
//! before has taken his before that: numbers of an identity go up.

// Room 3 of 3 with unsafe code: tables and buckets are memory that threads hand to each other.
#![allow(unsafe_code)]

mod slot;
mod spill;
mod table;

use std::hash::{BuildHasher, Hasher};

use crate::{
    identity::Identity,
    reclaim::Guard,
    record::{Cell, Pages, Place, Record, Slabs, prefetch},
    sync::{Arc, AtomicU64, Ordering, Tally},
};

use self::{
    slot::{Tag, Target, Value},
    table::{Next, Table},
};

/// With so many slabs more than when it was made a table is rebuilt (invariant 5).
pub(crate) const YOUNG: u64 = 1 << 24;

/// How an identity is looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// To read: nothing is written.
    Reading,
    /// To claim: what stands in the way of a claim is cleared, and buckets are moved on.
    Claiming,
}

/// The hash of an identity: as in its frame the lengths first, so that no parts run into each other.
#[inline]
pub(crate) fn hash_of(keyed: &ahash::RandomState, id: &Identity<'_>) -> u64 {
    let mut hasher = keyed.build_hasher();
    hasher.write_u32((id.account().len() as u32) << 16 | id.endpoint().len() as u32);
    [id.account(), id.endpoint(), id.key()].iter().for_each(|part| hasher.write(part));
    hasher.finish()
}

/// Identity -> cell or record.
pub(crate) struct Index {
    hasher: ahash::RandomState,
    shards: Box<[Shard]>,
    shard_bits: u32,
    tokens: Tokens,
}

/// Kept apart, so that a new root of one does not slow down another.
#[repr(align(64))]
struct Shard {
    /// The address of the table in use; zero until the first claim.
    root: AtomicU64,
    /// Where its buckets lie, and those of the table that it is moved into (zero for none), and in the
    /// lowest bits [`Table::bits`]: to ask for one without a look at the table. Perhaps those of other
    /// tables, which does no harm.
    buckets: [Tally; 2],
    /// Where its tables lie.
    pages: Arc<Pages>,
}

/// The next token's number, on a line of its own.
#[repr(align(128))]
struct Tokens(Tally);

/// What was found, and in which slot.
pub(crate) struct Seen<'g> {
    spot: Option<Spot<'g>>,
    pub(crate) what: What<'g>,
}

#[derive(Clone, Copy)]
pub(crate) enum What<'g> {
    Absent,
    Cell(&'g Cell),
    Record(Place, &'g Record),
}

struct Spot<'g> {
    slot: &'g AtomicU64,
    value: Value,
}

impl Index {
    /// An index for at most `max_keys` identities.
    pub(crate) fn new(max_keys: usize, pages: &Arc<Pages>) -> Self {
        // Shards of at most 128 Ki keys, so that no table is so large that making one is felt.
        let wanted = (max_keys >> 17).max(1).next_power_of_two().ilog2();
        let shard_bits = if cfg!(oncekey_loom) { 0 } else { wanted.clamp(4, 10) };
        let shard = || Shard {
            root: AtomicU64::new(0),
            buckets: [Tally::new(0), Tally::new(0)],
            pages: Arc::clone(pages),
        };
        Self {
            hasher: ahash::RandomState::new(),
            shards: (0..1_usize << shard_bits).map(|_| shard()).collect(),
            shard_bits,
            tokens: Tokens(Tally::new(1)),
        }
    }

    #[inline]
    pub(crate) fn hash(&self, id: &Identity<'_>) -> u64 {
        if cfg!(oncekey_loom) {
            // A model chooses where identities stand.
            return u64::from(id.key().last().copied().unwrap_or(0)) << 56;
        }
        hash_of(&self.hasher, id)
    }

    fn shard(&self, hash: u64) -> &Shard {
        // Below the number of shards by the shift.
        &self.shards[top(hash, self.shard_bits) as usize]
    }

    /// The number of the next token. See the head of the file for when to ask.
    pub(crate) fn next_token(&self) -> u64 {
        // Relaxed: who must have a higher number has seen what the lower one published.
        self.tokens.0.fetch_add(1, Ordering::Relaxed)
    }

    /// Asks for the memory that a look-up of `hash` will read first.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        for buckets in &self.shard(hash).buckets {
            let buckets = buckets.load(Ordering::Relaxed);
            if buckets == 0 {
                return;
            }
            let bits = buckets as u32 % table::BUCKET as u32;
            let number = top(hash << self.shard_bits, bits.max(1)) as usize;
            let first = std::ptr::without_provenance::<u8>((buckets - u64::from(bits)) as usize);
            prefetch(first.wrapping_byte_add(number * table::BUCKET));
        }
    }

    /// Asks for the memory of what a look-up of `hash` will compare.
    pub(crate) fn prefetch_target(&self, hash: u64, slabs: &Slabs, guard: &Guard<'_>) {
        let Some(table) = self.shard(hash).table(guard) else { return };
        let tag = Tag::of(hash << self.shard_bits);
        for slot in &table.bucket(hash << self.shard_bits).slots {
            let value = Value(slot.load(Ordering::Acquire));
            if value.is_empty() {
                return;
            }
            if value.has(tag) {
                match value.target() {
                    Target::Cell(bits) => {
                        prefetch(std::ptr::without_provenance::<u8>(Cell::address(bits)))
                    }
                    Target::Record(place) => {
                        if let Some(record) = slabs.at(place, guard) {
                            let record = std::ptr::from_ref(record);
                            prefetch(record);
                            prefetch(record.wrapping_byte_add(64));
                        }
                    }
                }
            }
        }
    }

    /// Looks for an identity. If it is absent, the answer can be filled by a claim.
    #[inline]
    pub(crate) fn find<'g>(
        &'g self,
        hash: u64,
        frame: &[u8],
        purpose: For,
        slabs: &'g Slabs,
        guard: &'g Guard<'g>,
    ) -> Seen<'g> {
        // The first steps of `find_on`, for what most look-ups find: a table that does not grow, and
        // an answer in the head of its chain.
        let path = hash << self.shard_bits;
        let tag = Tag::of(path);
        if let Some(table) = self.shard(hash).table(guard)
            && (purpose == For::Reading || table.next(guard).is_none())
        {
            let head = table.bucket(path);
            for slot in &head.slots {
                let value = Value(slot.load(Ordering::Acquire));
                if value.is_empty() {
                    if value.is_frozen() {
                        break;
                    }
                    return Seen { spot: Some(Spot { slot, value }), what: What::Absent };
                }
                if value.has(tag) {
                    if head.is_done() {
                        break;
                    }
                    match Self::follow(value, slabs, guard) {
                        Some(what) if what.is_of(frame) => {
                            return Seen { spot: Some(Spot { slot, value }), what };
                        }
                        Some(_) => {}
                        None => break,
                    }
                }
            }
        }
        self.find_on(hash, frame, purpose, slabs, guard)
    }

    /// What stands behind a slot's value, which has a tag; `None` if that is gone with its slab.
    #[inline]
    fn follow<'g>(value: Value, slabs: &'g Slabs, guard: &'g Guard<'g>) -> Option<What<'g>> {
        match value.target() {
            Target::Cell(bits) => {
                // SAFETY: the slot was current when it was read (invariant 4), so the cell was not
                // retired, and the guard was there.
                Some(What::Cell(unsafe { Cell::from_bits(bits, guard) }))
            }
            Target::Record(place) => {
                slabs.at(place, guard).map(|record| What::Record(place, record))
            }
        }
    }

    fn find_on<'g>(
        &'g self,
        hash: u64,
        frame: &[u8],
        purpose: For,
        slabs: &'g Slabs,
        guard: &'g Guard<'g>,
    ) -> Seen<'g> {
        let shard = self.shard(hash);
        let path = hash << self.shard_bits;
        let tag = Tag::of(path);
        let claiming = purpose == For::Claiming;
        let mut table = match shard.table(guard) {
            Some(table) => table,
            None if claiming => shard.first_table(slabs.number(), guard),
            None => return Seen { spot: None, what: What::Absent },
        };
        'table: loop {
            if claiming && let Some(next) = table.next(guard) {
                shard.help(table, next, path, slabs, guard);
                table = next;
                continue;
            }
            let head = table.bucket(path);
            let mut bucket = head;
            let mut chain = 0;
            let frozen_end = 'chain: loop {
                for slot in &bucket.slots {
                    // Acquire, partner of the CAS that wrote it: what it names is whole.
                    let mut value = Value(slot.load(Ordering::Acquire));
                    loop {
                        if value.is_empty() {
                            if value.is_frozen() {
                                break 'chain true;
                            }
                            let spot = Spot { slot, value };
                            return Seen { spot: Some(spot), what: What::Absent };
                        }
                        if !value.has(tag) {
                            break;
                        }
                        // Invariant 4. Acquire, partner of the `fetch_or` that has set it.
                        if head.is_done() {
                            let Some(next) = table.next(guard) else { break };
                            table = next;
                            continue 'table;
                        }
                        match Self::follow(value, slabs, guard) {
                            Some(what) if what.is_of(frame) => {
                                let spot = Spot { slot, value };
                                return Seen { spot: Some(spot), what };
                            }
                            Some(_) => break,
                            None if claiming => {
                                if value.is_frozen() {
                                    break 'chain true;
                                }
                                // Invariant 2.
                                match cas(slot, value, Value::TOMB) {
                                    Ok(()) => break,
                                    Err(moved) => value = moved,
                                }
                            }
                            None => {
                                // Not gone but moved, perhaps, while this thread looked: then who
                                // has seen its slab go sees the slot or the bucket changed too.
                                let again = Value(slot.load(Ordering::Acquire));
                                if again == value && !head.is_done() {
                                    break;
                                }
                                value = again;
                            }
                        }
                    }
                }
                match bucket.next() {
                    Next::Bucket(next) => {
                        bucket = next;
                        chain += 1;
                    }
                    Next::Frozen => break true,
                    Next::End if claiming => {
                        // No free slot: a bucket more.
                        let overflow = table.extend(bucket);
                        if overflow || chain + 1 >= table::LONG {
                            shard.grow_under_way(table, slabs, guard);
                        }
                    }
                    Next::End => break false,
                }
            };
            if claiming {
                // Some other thread has begun to move the bucket.
                continue;
            }
            if frozen_end
                && head.is_done()
                && let Some(next) = table.next(guard)
            {
                table = next;
                continue;
            }
            return Seen { spot: None, what: What::Absent };
        }
    }

    /// How many slots a look-up of what is there looks at, in all tables it goes through.
    #[cfg(test)]
    pub(crate) fn probes(
        &self,
        hash: u64,
        frame: &[u8],
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) -> usize {
        let Seen { spot: Some(Spot { slot: found, .. }), .. } =
            self.find(hash, frame, For::Reading, slabs, guard)
        else {
            return 0;
        };
        let path = hash << self.shard_bits;
        let mut probes = 0;
        let mut table = self.shard(hash).table(guard);
        while let Some(current) = table {
            let mut bucket = Some(current.bucket(path));
            while let Some(there) = bucket {
                for slot in &there.slots {
                    probes += 1;
                    if std::ptr::eq(slot, found) {
                        return probes;
                    }
                }
                let Next::Bucket(next) = there.next() else { break };
                bucket = Some(next);
            }
            table = current.next(guard);
        }
        probes
    }

    /// Puts a cell where `seen` was. False if that has changed: look again.
    #[inline]
    pub(crate) fn put(
        &self,
        seen: &Seen<'_>,
        cell: &Cell,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) -> bool {
        let Some(spot) = &seen.spot else { return false };
        let hash = cell.hash();
        let path = hash << self.shard_bits;
        if spot.value.is_frozen() {
            return false;
        }
        if cas(spot.slot, spot.value, Value::cell(Tag::of(path), cell.bits())).is_err() {
            return false;
        }
        // A winner helps a growing table on, so that it is done in time.
        let shard = self.shard(hash);
        if let Some(root) = shard.table(guard)
            && let Some(next) = root.next(guard)
        {
            shard.help_some(root, next, slabs, guard);
        }
        true
    }

    /// Puts a record where the cell stands; without a record, a tombstone. True if it stood there:
    /// afterwards no slot names the cell.
    #[inline]
    pub(crate) fn swing(
        &self,
        cell: &Cell,
        to: Option<Place>,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) -> bool {
        let hash = cell.hash();
        let tag = Tag::of(hash << self.shard_bits);
        let new = to.map_or(Value::TOMB, |place| Value::record(tag, place));
        self.exchange(hash, Value::cell(tag, cell.bits()), new, slabs, guard)
    }

    /// Puts the cell with the name `next`, of a claim that has taken over, where the other one stands.
    pub(crate) fn pass_on(&self, cell: &Cell, next: u64, slabs: &Slabs, guard: &Guard<'_>) {
        let hash = cell.hash();
        let tag = Tag::of(hash << self.shard_bits);
        let (old, new) = (Value::cell(tag, cell.bits()), Value::cell(tag, next));
        self.exchange(hash, old, new, slabs, guard);
    }

    /// Puts `new` where `wanted` stands, in whatever table that is by now.
    fn exchange(
        &self,
        hash: u64,
        wanted: Value,
        new: Value,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) -> bool {
        let shard = self.shard(hash);
        let path = hash << self.shard_bits;
        let Some(mut table) = shard.table(guard) else { return false };
        loop {
            let head = table.bucket(path);
            let mut bucket = head;
            let frozen = 'chain: loop {
                for slot in &bucket.slots {
                    let mut value = Value(slot.load(Ordering::Acquire));
                    if value == wanted {
                        match cas(slot, value, new) {
                            Ok(()) => return true,
                            Err(moved) => value = moved,
                        }
                    }
                    if value == wanted.frozen() {
                        break 'chain true;
                    }
                    if value.is_empty() {
                        break 'chain value.is_frozen();
                    }
                }
                match bucket.next() {
                    Next::Bucket(next) => bucket = next,
                    Next::Frozen => break true,
                    Next::End => break false,
                }
            };
            let done = head.is_done();
            if !frozen && !done {
                return false;
            }
            let Some(next) = table.next(guard) else { return false };
            if !done {
                shard.help(table, next, path, slabs, guard);
            }
            table = next;
        }
    }

    /// Puts a record's new place where its old one stands. False if that stands nowhere any more.
    pub(crate) fn relocate(
        &self,
        frame: &[u8],
        from: Place,
        to: Place,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) -> bool {
        let hash = self.hash(&Identity::from_frame(frame));
        let tag = Tag::of(hash << self.shard_bits);
        let (old, new) = (Value::record(tag, from), Value::record(tag, to));
        self.exchange(hash, old, new, slabs, guard)
    }

    /// Calls `look` with what stands in the bucket at `position`, and answers with the position of
    /// the next; `None` at the end. Positions are hashes: they stay right while tables grow.
    pub(crate) fn walk<'g>(
        &'g self,
        position: u64,
        slabs: &'g Slabs,
        guard: &'g Guard<'g>,
        look: &mut dyn FnMut(What<'g>),
    ) -> Option<u64> {
        let shard = self.shard(position);
        let path = position << self.shard_bits;
        let bits = match shard.table(guard) {
            None => 0,
            Some(table) => {
                walk_bucket(table, table.number(path), slabs, guard, look);
                table.bits
            }
        };
        let width = self.shard_bits + bits;
        if width == 0 {
            return None;
        }
        let step = 1_u64 << (64 - width);
        (position & !(step - 1)).checked_add(step)
    }

    /// Does a bounded step of giving memory of sparse tables back. `turn` counts the calls. True if
    /// there is more to do.
    pub(crate) fn trim(&self, turn: usize, slabs: &Slabs, guard: &Guard<'_>) -> bool {
        let Some(shard) = self.shards.get(turn % self.shards.len()) else { return false };
        let Some(table) = shard.table(guard) else { return false };
        if let Some(next) = table.next(guard) {
            for _ in 0..32 {
                shard.help_some(table, next, slabs, guard);
            }
            return true;
        }
        let live = table.live(slabs, guard);
        let sparse = table.bits > table::FEWEST && live < table::SAMPLE as u64;
        if sparse || live == 0 && table.overflows() {
            shard.grow(table, true, slabs, guard);
            return true;
        }
        false
    }

    /// Puts a new table beside the one that `hash` is in, and moves nothing: for models.
    #[cfg(all(test, oncekey_loom))]
    pub(crate) fn begin_growth(&self, hash: u64, slabs: &Slabs, guard: &Guard<'_>) {
        let shard = self.shard(hash);
        if let Some(table) = shard.table(guard) {
            shard.grow(table, true, slabs, guard);
        }
    }

    /// Moves the bucket of `hash`, if its table grows: for models.
    #[cfg(all(test, oncekey_loom))]
    pub(crate) fn move_bucket(&self, hash: u64, slabs: &Slabs, guard: &Guard<'_>) {
        let shard = self.shard(hash);
        if let Some(table) = shard.table(guard)
            && let Some(next) = table.next(guard)
        {
            shard.help(table, next, hash << self.shard_bits, slabs, guard);
        }
    }

    pub(crate) fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Rebuilds tables that are too old to tell a slab of this `number` from one long gone
    /// (invariant 5). Once in [`YOUNG`] slabs.
    pub(crate) fn renew(&self, number: u64, slabs: &Slabs, guard: &Guard<'_>) {
        for shard in &self.shards {
            while let Some(table) = shard.table(guard) {
                if number - table.base.min(number) < YOUNG {
                    break;
                }
                shard.grow(table, true, slabs, guard);
                if let Some(next) = table.next(guard) {
                    shard.help_some(table, next, slabs, guard);
                }
            }
        }
    }
}

fn walk_bucket<'g>(
    table: &'g Table,
    number: usize,
    slabs: &'g Slabs,
    guard: &'g Guard<'g>,
    look: &mut dyn FnMut(What<'g>),
) {
    let Some(head) = table.buckets.get(number) else { return };
    let mut bucket = head;
    loop {
        for slot in &bucket.slots {
            let value = Value(slot.load(Ordering::Acquire));
            if value.is_empty() || head.is_done() {
                break;
            }
            if value.is_tomb() {
                continue;
            }
            match value.target() {
                // SAFETY: as in `find`.
                Target::Cell(bits) => look(What::Cell(unsafe { Cell::from_bits(bits, guard) })),
                Target::Record(place) => {
                    if let Some(record) = slabs.at(place, guard) {
                        look(What::Record(place, record));
                    }
                }
            }
        }
        match bucket.next() {
            Next::Bucket(next) => bucket = next,
            _ => break,
        }
    }
    if head.is_done()
        && let Some(next) = table.next(guard)
    {
        // What was seen in both is looked at twice, which does no harm.
        if next.bits > table.bits {
            walk_bucket(next, number << 1, slabs, guard, look);
            walk_bucket(next, number << 1 | 1, slabs, guard, look);
        } else {
            walk_bucket(next, number >> (table.bits - next.bits), slabs, guard, look);
        }
    }
}

impl What<'_> {
    /// Whether a thread that holds its guard still has found nothing else than before.
    pub(crate) fn is_same(&self, before: &Self) -> bool {
        match (self, before) {
            (Self::Absent, Self::Absent) => true,
            (Self::Cell(cell), Self::Cell(before)) => std::ptr::eq(*cell, *before),
            (Self::Record(place, _), Self::Record(before, _)) => place == before,
            _ => false,
        }
    }

    #[inline]
    fn is_of(&self, frame: &[u8]) -> bool {
        match self {
            Self::Absent => false,
            Self::Cell(cell) => **cell.frame() == *frame,
            Self::Record(_, record) => record.frame() == frame,
        }
    }

    /// Whether nobody will ever see it again, whatever the time: judged when a bucket moves.
    fn is_dead(&self) -> bool {
        match self {
            Self::Absent => true,
            Self::Cell(cell) => cell.word().is_over(),
            Self::Record(..) => false,
        }
    }
}

impl Shard {
    #[inline]
    fn table<'g>(&'g self, _guard: &'g Guard<'_>) -> Option<&'g Table> {
        // Acquire, partner of the CAS that put it there.
        let root = self.root.load(Ordering::Acquire) as usize;
        // SAFETY: a table is freed after `root` has left it and all guards are gone.
        (root != 0).then(|| unsafe { &*std::ptr::with_exposed_provenance(root) })
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        for shard in &self.shards {
            // Relaxed: nobody else has the index any more.
            let mut address = shard.root.load(Ordering::Relaxed) as usize;
            while address != 0 {
                // SAFETY: nobody uses the index any more; tables come from boxes.
                let table = unsafe {
                    Box::from_raw(std::ptr::with_exposed_provenance_mut::<Table>(address))
                };
                address = table.next.load(Ordering::Relaxed) as usize;
            }
        }
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("shards", &self.shards.len()).finish_non_exhaustive()
    }
}

/// AcqRel: it publishes what the new value names, and the old one's owner is heard. The failure is
/// an Acquire for the same reason as a load.
fn cas(slot: &AtomicU64, old: Value, new: Value) -> Result<(), Value> {
    slot.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
        .map(drop)
        .map_err(Value)
}

/// The first `bits` bits.
const fn top(hash: u64, bits: u32) -> u64 {
    // Only models have tables and shards of one.
    if cfg!(oncekey_loom) && bits == 0 { 0 } else { hash >> (64 - bits) }
}
