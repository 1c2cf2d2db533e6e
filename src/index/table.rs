//! A table of buckets, and how it is moved into the next one.
//!
//! Growth, rebuild (to be rid of tombstones and of records that are gone) and shrinkage are one
//! thing: a new table is put beside the old one, and each bucket (when it shrinks: each group of
//! them that goes into one) is moved by whoever comes by. Everybody does the same steps to the same
//! end, so nobody waits for who began them:
//!
//! ```text
//! help(bucket):
//! 1 freeze     | a | b | t | 0 |  ->  | a' | b' | t' | 0' |       in order, up to the first empty
//!              what is dead becomes a tombstone: judged once, by the CAS that freezes
//! 2 list       the frozen references in chain order: the same for every helper
//! 3 copy       the k-th goes to position k of its new chain: CAS empty -> it, failure is fine
//! 4 done       is set in the head; who set it counts it, and the last one moves the root on
//! ```
//!
//! 1. After a slot is frozen it never changes. After all are, no claim can win in the old chain.
//! 2. All positions are filled before `done` is set, and no position becomes empty again, so a late
//!    helper's CAS fails.
//! 3. A claim goes on in the new chain only after `done`. So it comes behind what was copied.

use std::ops::Deref;

use crate::{
    reclaim::Guard,
    record::{Cell, Cells, Pages, Slabs, prefetch},
    sync::{Arc, AtomicU64, AtomicUsize, Ordering, Tally},
};

use super::{
    Shard, What, cas,
    slot::{TAG_BITS, Target, Value},
    spill::Spills,
    top,
};

/// Slots of a bucket: with the link, one line of the cache.
const SLOTS: usize = if cfg!(oncekey_loom) { 2 } else { 7 };

/// Its length in bytes.
pub(super) const BUCKET: usize = size_of::<Bucket>();

/// Bits of the smallest table.
pub(super) const FEWEST: u32 = if cfg!(oncekey_loom) { 0 } else { 2 };

/// Bits of the largest table: the tag must hold the bit by which it would be split, and some more
/// to tell identities apart.
const MOST: u32 = FEWEST + TAG_BITS - 4;

/// A chain of so many buckets asks for a rebuild.
pub(super) const LONG: usize = 8;

/// A table with an overflow bucket for every so many of its own is to grow; with one for every so many
/// fewer it grows though nobody has made memory ready for that.
const FEW: usize = 16;
const MANY: usize = 4;

/// Buckets that are looked at to guess how full a table is. It grows with more than 2.8 live
/// references in a bucket and shrinks with less than 1: so far apart that a table that has grown
/// does not look sparse, nor one that has shrunk full.
pub(super) const SAMPLE: usize = 64;

/// A table shrinks to a quarter at most: so many buckets move at a time.
const SHRINK: u32 = 2;

const _: () = assert!(cfg!(oncekey_loom) || (MOST as usize) < BUCKET && BUCKET == 64);

const DONE: u64 = 1;
const FROZEN: u64 = 2;

#[repr(align(64))]
pub(super) struct Bucket {
    /// Compare-and-swap only. Invariants 1 and 2 of the index.
    pub(super) slots: [AtomicU64; SLOTS],
    /// Compare-and-swap from null, or to frozen; `done` by `fetch_or`.
    link: AtomicU64,
}

/// What comes after a bucket.
pub(super) enum Next<'g> {
    Bucket(&'g Bucket),
    Frozen,
    End,
}

impl Bucket {
    #[cfg(oncekey_loom)]
    pub(super) fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| AtomicU64::new(Value::EMPTY.0)),
            link: AtomicU64::new(0),
        }
    }

    pub(super) fn next(&self) -> Next<'_> {
        // Acquire, partner of the CAS in `extend`: the bucket is whole.
        let link = self.link.load(Ordering::Acquire);
        let address = (link & !(DONE | FROZEN)) as usize;
        if address != 0 {
            // SAFETY: overflow buckets live as long as their table.
            return Next::Bucket(unsafe { &*std::ptr::with_exposed_provenance(address) });
        }
        if link & FROZEN != 0 { Next::Frozen } else { Next::End }
    }

    pub(super) fn is_done(&self) -> bool {
        // Acquire, partner of the `fetch_or` in `help`: all copies are seen.
        self.link.load(Ordering::Acquire) & DONE != 0
    }
}

pub(super) struct Table {
    pub(super) buckets: Buckets,
    pub(super) bits: u32,
    /// The next slab's number when it was made: what is copied into it is not older than what
    /// lived then.
    pub(super) base: u64,
    /// The table that this one is moved into; zero for none. Compare-and-swap from zero.
    pub(super) next: AtomicU64,
    /// The next group to be helped by those who come by.
    cursor: AtomicUsize,
    /// Buckets that are done.
    done: AtomicUsize,
    /// Whether a claim is making the next table: others need not make one as well, only to find that it
    /// is not wanted. Relaxed: a hint.
    growing: Tally,
    /// How many overflow buckets stand in chains.
    overflow: AtomicUsize,
    /// Where they lie.
    spills: Spills,
}

impl Table {
    /// `None` if it need not be at once and memory is not ready.
    pub(super) fn new(
        bits: u32,
        base: u64,
        at_once: bool,
        pages: &Arc<Pages>,
    ) -> Option<Box<Self>> {
        Some(Box::new(Self {
            buckets: Buckets::new(1 << bits, at_once, pages)?,
            bits,
            base,
            next: AtomicU64::new(0),
            cursor: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            growing: Tally::new(0),
            overflow: AtomicUsize::new(0),
            spills: Spills::new(1 << bits, pages),
        }))
    }

    /// As it stands in [`Shard::buckets`].
    fn name(&self) -> u64 {
        self.buckets.as_ptr().addr() as u64 | u64::from(self.bits)
    }

    pub(super) fn number(&self, path: u64) -> usize {
        top(path, self.bits) as usize
    }

    pub(super) fn bucket(&self, path: u64) -> &Bucket {
        &self.buckets[self.number(path)]
    }

    pub(super) fn next<'g>(&'g self, _guard: &'g Guard<'_>) -> Option<&'g Self> {
        // Acquire, partner of the CAS in `grow`: the table is whole.
        let next = self.next.load(Ordering::Acquire) as usize;
        // SAFETY: it is freed only after it was the root itself, later than this one.
        (next != 0).then(|| unsafe { &*std::ptr::with_exposed_provenance(next) })
    }

    /// Appends a bucket to a chain, unless somebody else does something with its end. True if there
    /// are too many such buckets.
    pub(super) fn extend(&self, last: &Bucket) -> bool {
        let new = self.spills.take();
        let address = std::ptr::from_ref(new).expose_provenance() as u64;
        // AcqRel: publishes the bucket. Relaxed: what is there instead is read again. Only a head has
        // `done`, which is set after `frozen`.
        let linked = last.link.compare_exchange(0, address, Ordering::AcqRel, Ordering::Relaxed);
        if linked.is_err() {
            self.spills.put_back(new);
            return false;
        }
        let overflow = self.overflow.fetch_add(1, Ordering::Relaxed) + 1;
        overflow * FEW > self.buckets.len()
    }

    /// Whether there are overflow buckets.
    pub(super) fn overflows(&self) -> bool {
        self.overflow.load(Ordering::Relaxed) != 0
    }

    /// Appends a bucket to the chain with this number.
    #[cfg(all(test, oncekey_loom))]
    pub(super) fn append(&self, number: usize) -> bool {
        let mut last = &self.buckets[number];
        while let Next::Bucket(next) = last.next() {
            last = next;
        }
        self.extend(last)
    }

    /// The addresses of all overflow buckets, chain by chain.
    #[cfg(all(test, oncekey_loom))]
    pub(super) fn appended(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for head in self.buckets.iter() {
            let mut last = head;
            while let Next::Bucket(next) = last.next() {
                all.push(std::ptr::from_ref(next).addr());
                last = next;
            }
        }
        all
    }

    #[cfg(all(test, oncekey_loom))]
    pub(super) fn overflow(&self) -> usize {
        self.overflow.load(Ordering::Relaxed)
    }

    /// How many references in [`SAMPLE`] buckets name something that may still be seen.
    pub(super) fn live(&self, slabs: &Slabs, guard: &Guard<'_>) -> u64 {
        let step = (self.buckets.len() / SAMPLE).max(1);
        let (mut live, mut looked_at) = (0, 0);
        for head in self.buckets.iter().step_by(step) {
            looked_at += 1;
            let mut bucket = head;
            loop {
                let values = bucket.slots.iter().map(|slot| Value(slot.load(Ordering::Acquire)));
                let values = values.take_while(|value| !value.is_empty() && !head.is_done());
                live += values.filter(|value| !is_dead(*value, slabs, guard)).count();
                match bucket.next() {
                    Next::Bucket(next) => bucket = next,
                    _ => break,
                }
            }
        }
        (live * SAMPLE / looked_at.max(1)) as u64
    }
}

/// Whether a current value names nothing that may still be seen.
fn is_dead(value: Value, slabs: &Slabs, guard: &Guard<'_>) -> bool {
    if value.is_tomb() {
        return true;
    }
    match value.target() {
        // SAFETY: it was current when it was read, so the cell was not retired.
        Target::Cell(bits) => What::Cell(unsafe { Cell::from_bits(bits, guard) }).is_dead(),
        Target::Record(place) => slabs.is_gone(place, guard),
    }
}

impl Shard {
    /// The table, made by the first claim.
    pub(super) fn first_table<'g>(&'g self, base: u64, guard: &'g Guard<'g>) -> &'g Table {
        loop {
            if let Some(table) = self.table(guard) {
                return table;
            }
            let Some(new) = Table::new(FEWEST, base, true, &self.pages) else { continue };
            let new = Box::into_raw(new);
            let address = new.expose_provenance() as u64;
            // AcqRel: publishes the table. Relaxed: another one is read again.
            if self.root.compare_exchange(0, address, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                // SAFETY: nobody has seen it.
                drop(unsafe { Box::from_raw(new) });
            } else if let Some(table) = self.table(guard) {
                self.name_buckets(table);
            }
        }
    }

    fn name_buckets(&self, table: &Table) {
        let [buckets, next] = &self.buckets;
        buckets.store(table.name(), Ordering::Relaxed);
        next.store(0, Ordering::Relaxed);
    }

    /// As [`Shard::grow`], for claims: unless another one is at it, or memory is not ready and chains
    /// are not yet so long. The next one that finds them too long tries again.
    pub(super) fn grow_under_way(&self, table: &Table, slabs: &Slabs, guard: &Guard<'_>) {
        if table.growing.swap(1, Ordering::Relaxed) == 0 {
            let overflow = table.overflow.load(Ordering::Relaxed);
            self.grow(table, overflow * MANY > table.buckets.len(), slabs, guard);
            table.growing.store(0, Ordering::Relaxed);
        }
    }

    /// Puts a new table beside `table`, of a size that fits what lives, unless there is one or
    /// `table` is itself still being filled.
    /// Not `at_once`, it is left for later if memory is not ready.
    pub(super) fn grow(&self, table: &Table, at_once: bool, slabs: &Slabs, guard: &Guard<'_>) {
        let is_root = self.table(guard).is_some_and(|root| std::ptr::eq(root, table));
        if !is_root || table.next(guard).is_some() {
            return;
        }
        let live = table.live(slabs, guard) as usize;
        let bits = if cfg!(oncekey_loom) {
            (table.bits + 1).min(2)
        } else if live * 5 > SAMPLE * 14 {
            (table.bits + 1).min(MOST)
        } else if live * 2 < SAMPLE {
            table.bits.saturating_sub(SHRINK).max(FEWEST)
        } else if live < SAMPLE {
            table.bits.saturating_sub(1).max(FEWEST)
        } else {
            table.bits
        };
        let Some(new) = Table::new(bits, slabs.number(), at_once, &self.pages) else { return };
        let name = new.name();
        let new = Box::into_raw(new);
        let address = new.expose_provenance() as u64;
        // AcqRel: publishes the table. Relaxed: another one is not looked at here.
        if table.next.compare_exchange(0, address, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: nobody has seen it.
            drop(unsafe { Box::from_raw(new) });
        } else {
            let [_, next] = &self.buckets;
            next.store(name, Ordering::Relaxed);
        }
    }

    /// Moves the next two groups, whichever they are.
    pub(super) fn help_some(&self, table: &Table, next: &Table, slabs: &Slabs, guard: &Guard<'_>) {
        let group = table.bits.saturating_sub(next.bits);
        for _ in 0..if group == 0 { 2 } else { 1 } {
            // Relaxed: it only spreads the work. Past the end it goes round again, for groups that
            // a helper took and has not finished.
            let turn = table.cursor.fetch_add(1, Ordering::Relaxed);
            let groups = table.buckets.len() >> group;
            self.help_group(table, next, turn % groups, slabs, guard);
        }
        if next.bits > table.bits {
            // For the next one who comes by.
            let from = table.cursor.load(Ordering::Relaxed);
            table.buckets.iter().skip(from).take(2).for_each(|bucket| prefetch(bucket));
            next.buckets.iter().skip(from * 2).take(4).for_each(|bucket| prefetch(bucket));
        }
    }

    /// Moves the bucket of `path` (when it shrinks, with its group).
    pub(super) fn help(
        &self,
        table: &Table,
        next: &Table,
        path: u64,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) {
        let group = table.bits.saturating_sub(next.bits);
        self.help_group(table, next, table.number(path) >> group, slabs, guard);
    }

    fn help_group(
        &self,
        table: &Table,
        next: &Table,
        group: usize,
        slabs: &Slabs,
        guard: &Guard<'_>,
    ) {
        let shift = table.bits.saturating_sub(next.bits);
        let from = group << shift;
        let Some(heads) = table.buckets.get(from..from + (1 << shift)) else { return };
        if heads.iter().all(Bucket::is_done) {
            return;
        }
        heads.iter().for_each(|head| freeze(head, slabs, guard));
        let doubles = next.bits > table.bits;
        let first = if doubles { group << 1 } else { group };
        let mut filled = [0, 0];
        for head in heads {
            for_each_frozen(head, |value| {
                let half = if doubles { value.split_bit(table.bits) } else { 0 };
                copy(next, first + half, filled[half], value);
                filled[half] += 1;
            });
        }
        let mut done = 0;
        for head in heads {
            // AcqRel, partner of `is_done`: the copies are seen by who sees it.
            done += usize::from(head.link.fetch_or(DONE, Ordering::AcqRel) & DONE == 0);
        }
        // AcqRel: who counts the last one has seen what all others did.
        if done != 0 && table.done.fetch_add(done, Ordering::AcqRel) + done == table.buckets.len() {
            let (old, new) = (std::ptr::from_ref(table), std::ptr::from_ref(next));
            let old = old.expose_provenance() as u64;
            let new = new.expose_provenance() as u64;
            // Relaxed: who has moved it on before is not followed.
            let moved = self.root.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed);
            if moved.is_ok() {
                self.name_buckets(next);
                // SAFETY: the root has left the table, and nothing else leads to it. It came from a
                // box.
                unsafe {
                    guard.defer(drop_table, old, 0);
                }
            }
        }
    }
}

/// # Safety
///
/// The table came from a box and nobody sees it any more.
unsafe fn drop_table(table: u64, _: u64) {
    // SAFETY: see above.
    let table =
        unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Table>(table as usize)) };
    drop(table);
}

/// Step 1: freezes a chain.
fn freeze(head: &Bucket, slabs: &Slabs, guard: &Guard<'_>) {
    let mut bucket = head;
    loop {
        for slot in &bucket.slots {
            let mut value = Value(slot.load(Ordering::Acquire));
            while !value.is_frozen() {
                let dead = !value.is_empty() && is_dead(value, slabs, guard);
                let frozen = if dead { Value::TOMB } else { value }.frozen();
                match cas(slot, value, frozen) {
                    Ok(()) => {
                        if dead {
                            lay_ghost(value, guard);
                        }
                        value = frozen;
                    }
                    Err(moved) => value = moved,
                }
            }
            if value.is_empty() {
                return;
            }
        }
        match bucket.next() {
            Next::Bucket(next) => bucket = next,
            Next::Frozen => return,
            Next::End => {
                // Failure: it was frozen, or a bucket more to freeze has come; it is read again.
                let _ =
                    bucket.link.compare_exchange(0, FROZEN, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// Gives a ghost back that was taken out of its slot.
fn lay_ghost(value: Value, guard: &Guard<'_>) {
    if !value.is_tomb()
        && let Target::Cell(bits) = value.target()
    {
        // SAFETY: it was current a moment ago.
        let cell = unsafe { Cell::from_bits(bits, guard) };
        if cell.word().is_ghost() {
            Cells::retire(cell, guard);
        }
    }
}

/// Step 2: the references of a frozen chain, in order.
fn for_each_frozen(head: &Bucket, mut each: impl FnMut(Value)) {
    let mut bucket = head;
    loop {
        for slot in &bucket.slots {
            let value = Value(slot.load(Ordering::Acquire));
            if value.is_empty() {
                return;
            }
            if !value.is_tomb() {
                each(value.thawed());
            }
        }
        match bucket.next() {
            Next::Bucket(next) => bucket = next,
            _ => return,
        }
    }
}

/// Step 3: puts `value` at a position of a chain, unless that has been done.
fn copy(table: &Table, number: usize, position: usize, value: Value) {
    let Some(mut bucket) = table.buckets.get(number) else { return };
    for _ in 0..position / SLOTS {
        bucket = loop {
            match bucket.next() {
                Next::Bucket(next) => break next,
                // All was copied before the new table began to move on.
                Next::Frozen => return,
                Next::End => {
                    table.extend(bucket);
                }
            }
        };
    }
    let _ = cas(&bucket.slots[position % SLOTS], Value::EMPTY, value);
}

/// The buckets of a table: a slice in pages.
#[cfg(not(oncekey_loom))]
pub(super) struct Buckets {
    address: u64,
    len: usize,
    pages: Arc<Pages>,
}

#[cfg(not(oncekey_loom))]
impl Buckets {
    fn new(len: usize, at_once: bool, pages: &Arc<Pages>) -> Option<Self> {
        let bytes = len * size_of::<Bucket>();
        let address = if at_once { pages.take(bytes) } else { pages.take_ready(bytes)? };
        Some(Self { address, len, pages: Arc::clone(pages) })
    }
}

#[cfg(not(oncekey_loom))]
impl Deref for Buckets {
    type Target = [Bucket];

    fn deref(&self) -> &[Bucket] {
        let first = std::ptr::with_exposed_provenance(self.address as usize);
        // SAFETY: so many were taken in `new`, aligned as buckets are, and all zero is an empty one.
        unsafe { std::slice::from_raw_parts(first, self.len) }
    }
}

#[cfg(not(oncekey_loom))]
impl Drop for Buckets {
    fn drop(&mut self) {
        // SAFETY: taken in `new` with this length; who drops the table is the last to see it.
        unsafe { self.pages.give_back(self.address, self.len * size_of::<Bucket>()) }
    }
}

/// Under the checker buckets are values of its own.
#[cfg(oncekey_loom)]
pub(super) struct Buckets(Box<[Bucket]>);

#[cfg(oncekey_loom)]
impl Buckets {
    fn new(len: usize, _at_once: bool, _pages: &Arc<Pages>) -> Option<Self> {
        Some(Self((0..len).map(|_| Bucket::new()).collect()))
    }
}

#[cfg(oncekey_loom)]
impl Deref for Buckets {
    type Target = [Bucket];

    fn deref(&self) -> &[Bucket] {
        &self.0
    }
}
