//! When memory that others may still look at is given back.
//!
//! Ground rules: a thread looks at a store's shared memory only while it holds a [`Guard`] of it.
//! Memory is first made unreachable (no slot, table or directory leads to it), then handed to
//! [`Guard::defer`], which frees it once every guard that was there is gone.
//!
//! ```text
//! row of a lane   | seat | seat | .. | more -> row |      seat: free, or the epoch of who sits there
//! epoch           goes up with each marking
//! past            all that was marked with a lower epoch may be freed
//!
//! fresh --seal--> old, with the epoch of that time     once no guard of it or before sits: free
//! ```
//!
//! A guard takes a free seat of its lane by compare-and-swap, with the epoch that it has read before,
//! and leaves it by a store, which is half the cost of counting up and down. Where as many threads as
//! a row has seats lost their processor in the middle of a look, another row is put behind it. Who
//! sits is alone at his seat, and counts there without a lock what is done often (see `Often`).
//!
//! 1. A guard sits from before its first look to after its last.
//! 2. What is unreachable is marked with the epoch that is read after that. A guard with a later
//!    epoch has read one that was made after the marking, so it cannot reach what was marked.
//! 3. Who has seen, after an epoch was made, that no guard of an earlier one sits, knows that all is
//!    past that was marked earlier. An epoch that is read too old only makes others wait.
//!
//! The seat and the look are two words: the guard sits down, then reads links; the collector has cut
//! links, then looks at seats. A full fence on both sides makes one of them see the other. In the same
//! way the fences after the cut and after sitting down order the two readings of the epoch.
//!
//! Why not crossbeam-epoch: its garbage belongs to threads, not to stores. What a store has cut off
//! would come back when some thread next pins, perhaps one that only sleeps, and not when the store
//! is swept or dropped; then `max_bytes` would be no limit. Here a store that nobody looks at gives
//! everything back in one call, and a sleeper delays nobody but its own store. The cost is about
//! the same: a swap and a store in the lane's own lines.

// Room 1 of 3 with unsafe code: it passes on what its callers promise, and has rows of seats that
// threads put up beside each other.
#![allow(unsafe_code)]

#[cfg(any(not(oncekey_loom), oncekey_reclaim))]
pub(crate) use self::counted::{Domain, Guard};
#[cfg(all(oncekey_loom, not(oncekey_reclaim)))]
pub(crate) use self::keeping::{Domain, Guard};

/// When something was seen to be unreachable: an epoch. See the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u32);

impl Mark {
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u32 {
        self.0
    }

    /// Whether it was made in an epoch before this one. Marks go round: one that is 2^31 epochs old is
    /// taken for a new one, for as many epochs.
    #[cfg_attr(
        all(oncekey_loom, not(oncekey_reclaim), not(test)),
        allow(dead_code, reason = "the stand-in keeps everything")
    )]
    fn is_below(self, epoch: u64) -> bool {
        (epoch as u32).wrapping_sub(self.0) as i32 > 0
    }
}

/// What is to be done when all present guards are gone: a function and its two words.
struct Deferred {
    free: unsafe fn(u64, u64),
    first: u64,
    second: u64,
}

impl Deferred {
    fn run(self) {
        // SAFETY: who deferred it has promised that it may run now, on any thread.
        unsafe { (self.free)(self.first, self.second) }
    }
}

#[cfg_attr(
    all(oncekey_loom, not(oncekey_reclaim)),
    allow(dead_code, reason = "it has models of its own")
)]
mod counted {
    use std::cell::Cell;

    use crate::reclaim::{Deferred, Mark};
    use crate::stats::{Often, OftenCounts};
    use crate::sync::{AtomicU64, Mutex, Ordering, fence, fence_after_seq_cst_change};

    /// So much garbage is kept without another allocation.
    const ROOM: usize = 64;

    /// With so much garbage whoever adds to it tries to free some.
    const MUCH: usize = if cfg!(oncekey_loom) { 2 } else { 4 };

    /// Seats of a row: with the link, two lines of the cache.
    const SEATS: usize = if cfg!(oncekey_loom) { 1 } else { 15 };

    /// Nobody sits there: no epoch.
    const FREE: u64 = 0;

    /// A store's guards and garbage.
    pub(crate) struct Domain {
        lanes: Box<[Row]>,
        /// What new guards sit down with.
        epoch: Apart,
        /// All marks below it are past.
        past: Apart,
        garbage: Mutex<Garbage>,
    }

    /// Read by all and rarely written, so on a line of its own.
    #[repr(align(128))]
    struct Apart(AtomicU64);

    #[repr(align(128))]
    struct Row {
        /// [`FREE`], or the epoch of who sits there.
        seats: [AtomicU64; SEATS],
        /// The address of another row; zero for none. Compare-and-swap from zero.
        more: AtomicU64,
        /// What was done by who sat there.
        counts: [OftenCounts; SEATS],
    }

    thread_local! {
        /// The seat that this thread found free last: it likely is again.
        static SEAT: Cell<usize> = const { Cell::new(0) };
    }

    impl Row {
        fn new() -> Self {
            Self {
                seats: std::array::from_fn(|_| AtomicU64::new(FREE)),
                more: AtomicU64::new(0),
                counts: std::array::from_fn(|_| OftenCounts::default()),
            }
        }

        /// Takes a seat, unless somebody sits there.
        #[inline]
        fn sit(&self, seat: usize, epoch: u64) -> bool {
            let Some(seat) = self.seats.get(seat) else { return false };
            // Relaxed where somebody sits: nothing is concluded. The fence behind it is the partner
            // of the ones in `mark` and `look_around`.
            let took = seat.compare_exchange(FREE, epoch, Ordering::SeqCst, Ordering::Relaxed);
            fence_after_seq_cst_change();
            took.is_ok()
        }

        /// Takes any seat, of this row or one behind it.
        #[cold]
        fn sit_anywhere(&self, epoch: u64) -> (&Self, usize) {
            let mut row = self;
            loop {
                for (seat, there) in row.seats.iter().enumerate() {
                    // Relaxed: a hint.
                    if there.load(Ordering::Relaxed) == FREE && row.sit(seat, epoch) {
                        SEAT.set(seat);
                        return (row, seat);
                    }
                }
                row = row.more().unwrap_or_else(|| row.add());
            }
        }

        fn more(&self) -> Option<&Self> {
            // Acquire, partner of the swap in `add`: the row is whole.
            let more = self.more.load(Ordering::Acquire) as usize;
            // SAFETY: rows stay until the domain is dropped.
            (more != 0).then(|| unsafe { &*std::ptr::with_exposed_provenance(more) })
        }

        /// Puts a row behind this one, unless another thread has.
        fn add(&self) -> &Self {
            let row = Box::into_raw(Box::new(Self::new()));
            let address = row.expose_provenance() as u64;
            // Release: the row is whole. Acquire: so is that of another thread.
            let there =
                self.more.compare_exchange(0, address, Ordering::Release, Ordering::Acquire);
            let row = match there {
                Ok(_) => row.cast_const(),
                Err(other) => {
                    // SAFETY: made above, and nobody knows of it.
                    drop(unsafe { Box::from_raw(row) });
                    std::ptr::with_exposed_provenance(other as usize)
                }
            };
            // SAFETY: as in `more`.
            unsafe { &*row }
        }

        fn rows(&self) -> impl Iterator<Item = &Self> {
            std::iter::successors(Some(self), |row| row.more())
        }
    }

    impl Drop for Row {
        fn drop(&mut self) {
            // Relaxed: nobody else has the domain any more.
            let more = self.more.load(Ordering::Relaxed) as usize;
            if more != 0 {
                // SAFETY: from `add`, and nobody uses it.
                drop(unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Self>(more)) });
            }
        }
    }

    struct Garbage {
        fresh: Vec<Deferred>,
        /// Sealed: nothing is added.
        old: Vec<Deferred>,
        /// When `old` was sealed.
        sealed: Mark,
        /// Whether a thread frees what was sealed before. No other does then: what was asked for
        /// later may be the memory of what is freed now.
        busy: bool,
    }

    /// While it lives, nothing that is reachable now is freed.
    pub(crate) struct Guard<'a> {
        domain: &'a Domain,
        seat: &'a AtomicU64,
        counts: &'a OftenCounts,
        epoch: u64,
    }

    impl Domain {
        pub(crate) fn new(lanes: usize) -> Self {
            let room = || Vec::with_capacity(ROOM);
            Self {
                lanes: (0..lanes).map(|_| Row::new()).collect(),
                epoch: Apart(AtomicU64::new(FREE + 1)),
                past: Apart(AtomicU64::new(FREE)),
                garbage: Mutex::new(Garbage {
                    fresh: room(),
                    old: room(),
                    sealed: Mark(0),
                    busy: false,
                }),
            }
        }

        /// Holds off reclamation. `lane` spreads, it decides nothing; it is taken modulo.
        #[inline]
        pub(crate) fn pin(&self, lane: usize) -> Guard<'_> {
            // Relaxed: one that is too old is right too.
            let epoch = self.epoch.0.load(Ordering::Relaxed);
            // A power of two of them.
            let first = &self.lanes[lane & (self.lanes.len() - 1)];
            let last = SEAT.get();
            let (row, seat) =
                if first.sit(last, epoch) { (first, last) } else { first.sit_anywhere(epoch) };
            Guard { domain: self, seat: &row.seats[seat], counts: &row.counts[seat], epoch }
        }

        /// How often something was done by guards of a lane.
        pub(crate) fn counted_in(&self, lane: usize, what: Often) -> u64 {
            let rows = self.lanes.get(lane).into_iter().flat_map(Row::rows);
            rows.flat_map(|row| &row.counts).map(|counts| counts.read(what)).sum()
        }

        /// How often something was done by guards.
        pub(crate) fn counted(&self, what: Often) -> u64 {
            (0..self.lanes.len()).map(|lane| self.counted_in(lane, what)).sum()
        }

        /// Makes a new epoch, if the present one is `epoch`.
        fn move_on_from(&self, epoch: u64) {
            let next = epoch + 1;
            // Relaxed: the fences order it. Failure: somebody else has made one.
            let _ =
                self.epoch.0.compare_exchange(epoch, next, Ordering::Relaxed, Ordering::Relaxed);
        }

        /// Sees what is past.
        fn look_around(&self) {
            let epoch = self.epoch.0.load(Ordering::Relaxed);
            // Partner of the ones in `sit` and `mark`: a guard that is not seen below sees all links
            // that were cut before a marking with an earlier epoch.
            fence(Ordering::SeqCst);
            let mut past = epoch;
            for seat in self.lanes.iter().flat_map(Row::rows).flat_map(|row| &row.seats) {
                // Acquire, partner of the Release in the guard's drop: it has looked its last. Who has
                // taken its seat since goes on with what it released.
                let sits = seat.load(Ordering::Acquire);
                if sits != FREE {
                    past = past.min(sits);
                }
            }
            // Release, partner of `is_past`.
            self.past.0.fetch_max(past, Ordering::AcqRel);
        }

        /// Makes all marks past, unless somebody looks. To be called without a guard.
        pub(crate) fn turn_over(&self) {
            self.move_on_from(self.epoch.0.load(Ordering::Relaxed));
            self.look_around();
        }

        fn mark(&self) -> Mark {
            // Partner of the ones in `sit` and `look_around`: a guard with a later epoch than is read
            // here has sat down after this.
            fence(Ordering::SeqCst);
            let epoch = self.epoch.0.load(Ordering::Relaxed);
            // Guards to come are told from those that the mark waits for.
            self.move_on_from(epoch);
            Mark(epoch as u32)
        }

        fn is_past(&self, mark: Mark) -> bool {
            // Acquire, partner of the change in `look_around`: what the guards did that are gone.
            mark.is_below(self.past.0.load(Ordering::Acquire)) || {
                self.look_around();
                mark.is_below(self.past.0.load(Ordering::Acquire))
            }
        }

        /// Frees what can be freed; true if something is left for which the caller may try again.
        pub(crate) fn collect(&self) -> bool {
            let mut left = false;
            let mut garbage = self.garbage.lock();
            if garbage.busy {
                return left;
            }
            loop {
                if garbage.old.is_empty() {
                    if garbage.fresh.is_empty() {
                        return left;
                    }
                    let Garbage { fresh, old, sealed, .. } = &mut *garbage;
                    std::mem::swap(fresh, old);
                    *sealed = self.mark();
                }
                if !self.is_past(garbage.sealed) {
                    return left;
                }
                let mut ready = std::mem::take(&mut garbage.old);
                garbage.busy = true;
                drop(garbage);
                let busy = Busy(self);
                ready.drain(..).for_each(Deferred::run);
                drop(busy);
                garbage = self.garbage.lock();
                if garbage.busy {
                    return true;
                }
                if garbage.old.capacity() == 0 {
                    ready.shrink_to(ROOM);
                    garbage.old = ready;
                }
                left = true;
            }
        }

        /// Whether nothing waits to be freed.
        pub(crate) fn is_clean(&self) -> bool {
            let garbage = self.garbage.lock();
            garbage.fresh.is_empty() && garbage.old.is_empty() && !garbage.busy
        }
    }

    /// Ends what it stands for also if a value panics that is dropped.
    struct Busy<'a>(&'a Domain);

    impl Drop for Busy<'_> {
        fn drop(&mut self) {
            self.0.garbage.lock().busy = false;
        }
    }

    impl Guard<'_> {
        /// Calls `free` with the two words once all present guards are gone. In the order in which
        /// it was asked.
        ///
        /// # Safety
        ///
        /// What `free` frees can no longer be reached by a thread that pins from now on. `free` may
        /// run on any thread, until the domain is dropped at the latest.
        pub(crate) unsafe fn defer(&self, free: unsafe fn(u64, u64), first: u64, second: u64) {
            let mut garbage = self.domain.garbage.lock();
            garbage.fresh.push(Deferred { free, first, second });
            let much = garbage.fresh.len() >= MUCH;
            drop(garbage);
            if much {
                self.domain.collect();
            }
        }

        /// Counts something that was done.
        #[inline]
        pub(crate) fn count(&self, what: Often) {
            self.counts.add_alone(what);
        }

        /// For what this thread has made unreachable, or seen so: from when it counts.
        pub(crate) fn mark(&self) -> Mark {
            self.domain.mark()
        }

        /// Whether all guards are gone that could have reached what was marked so.
        pub(crate) fn is_past(&self, mark: Mark) -> bool {
            // Else this guard itself is in the way.
            mark.is_below(self.epoch) && self.domain.is_past(mark)
        }
    }

    impl Drop for Guard<'_> {
        #[inline]
        fn drop(&mut self) {
            // Release, partner of the loads in `look_around`.
            self.seat.store(FREE, Ordering::Release);
        }
    }

    impl Drop for Domain {
        fn drop(&mut self) {
            // Nobody has a guard. What runs may defer nothing more.
            let mut garbage = self.garbage.lock();
            let Garbage { fresh, old, .. } = &mut *garbage;
            old.drain(..).chain(fresh.drain(..)).for_each(Deferred::run);
        }
    }
}

/// The stand-in under the model checker: it keeps everything to the end. The real one would make
/// three threads too many to walk through; it has models of its own, and with `--cfg oncekey_reclaim`
/// the engine's models of two threads run on it.
#[cfg(all(oncekey_loom, not(oncekey_reclaim)))]
mod keeping {
    use crate::{
        reclaim::{Deferred, Mark},
        stats::{Often, OftenCounts},
        sync::Quiet,
    };

    pub(crate) struct Domain(Quiet<Vec<Deferred>>, OftenCounts);

    pub(crate) struct Guard<'a>(&'a Domain);

    impl Domain {
        pub(crate) fn new(_lanes: usize) -> Self {
            Self(Quiet::default(), OftenCounts::default())
        }

        pub(crate) fn pin(&self, _lane: usize) -> Guard<'_> {
            Guard(self)
        }

        pub(crate) fn counted_in(&self, _lane: usize, what: Often) -> u64 {
            self.1.read(what)
        }

        pub(crate) fn counted(&self, what: Often) -> u64 {
            self.1.read(what)
        }

        pub(crate) fn turn_over(&self) {}

        pub(crate) fn collect(&self) -> bool {
            false
        }

        pub(crate) fn is_clean(&self) -> bool {
            true
        }
    }

    impl Guard<'_> {
        /// # Safety
        ///
        /// As for the real one.
        pub(crate) unsafe fn defer(&self, free: unsafe fn(u64, u64), first: u64, second: u64) {
            if let Ok(mut kept) = self.0.0.lock() {
                kept.push(Deferred { free, first, second });
            }
        }

        pub(crate) fn count(&self, what: Often) {
            self.0.1.add(what);
        }

        pub(crate) fn mark(&self) -> Mark {
            Mark(0)
        }

        pub(crate) fn is_past(&self, _: Mark) -> bool {
            false
        }
    }

    impl Drop for Domain {
        fn drop(&mut self) {
            let kept = self.0.lock().map(|mut kept| std::mem::take(&mut *kept));
            kept.into_iter().flatten().for_each(Deferred::run);
        }
    }
}

#[cfg(all(test, oncekey_loom))]
mod models {
    use loom::{sync::atomic::AtomicU64 as Link, thread};

    use crate::reclaim::counted::Domain;
    use crate::sync::{Arc, Ordering, UnsafeCell, explore};

    struct World {
        domain: Domain,
        link: Link,
    }

    struct Thing(UnsafeCell<u64>);

    unsafe fn free(address: u64, _: u64) {
        // SAFETY: made from a box, unlinked, and nobody looks any more: what the model checks.
        let thing = unsafe {
            Box::from_raw(std::ptr::with_exposed_provenance_mut::<Thing>(address as usize))
        };
        thing.0.with_mut(|value| {
            // SAFETY: as above.
            unsafe { *value = 0 }
        });
    }

    fn look(world: &World) {
        let _guard = world.domain.pin(0);
        let address = world.link.load(Ordering::Acquire) as usize;
        if address != 0 {
            // SAFETY: it was reachable and there is a guard.
            let thing = unsafe { &*std::ptr::with_exposed_provenance::<Thing>(address) };
            // SAFETY: nobody writes to it but who frees it.
            assert_eq!(thing.0.with(|value| unsafe { *value }), 7);
        }
    }

    fn cut(world: &World) {
        let guard = world.domain.pin(0);
        let address = world.link.swap(0, Ordering::AcqRel);
        // SAFETY: nothing leads to it any more.
        unsafe { guard.defer(free, address, 0) }
        drop(guard);
        while world.domain.collect() {}
    }

    fn model(all: &'static [fn(&World)]) {
        explore(3, move || {
            let thing = Box::into_raw(Box::new(Thing(UnsafeCell::new(7))));
            let link = Link::new(thing.expose_provenance() as u64);
            let world = Arc::new(World { domain: Domain::new(1), link });
            let threads: Vec<_> = all
                .iter()
                .map(|run| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || run(&world))
                })
                .collect();
            for thread in threads {
                assert!(thread.join().is_ok());
            }
        });
    }

    #[test]
    fn loom_reclaim_against_a_look() {
        model(&[look, cut]);
        model(&[cut, look]);
    }

    /// Who has marked what is to be freed may have failed to move the epoch on.
    #[test]
    fn loom_reclaim_with_another_against_a_look() {
        fn turn(world: &World) {
            world.domain.turn_over();
        }
        model(&[look, cut, turn]);
        model(&[turn, look, cut]);
        model(&[cut, turn, look]);
    }

    #[test]
    fn loom_reclaim_against_two_looks() {
        fn twice(world: &World) {
            look(world);
            look(world);
        }
        model(&[cut, twice]);
        model(&[twice, cut]);
    }
}

#[cfg(not(oncekey_loom))]
#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;

    struct World {
        entered: Barrier,
        may_go: Barrier,
        freed: Mutex<Vec<u64>>,
    }

    unsafe fn free(world: u64, number: u64) {
        // SAFETY: the test keeps it until all is freed.
        let world = unsafe { &*std::ptr::with_exposed_provenance::<World>(world as usize) };
        if number == 0 {
            world.entered.wait();
            world.may_go.wait();
        }
        if let Ok(mut freed) = world.freed.lock() {
            freed.push(number);
        }
    }

    #[test]
    fn what_was_asked_for_later_is_freed_later_also_by_another_thread() {
        let (entered, may_go) = (Barrier::new(2), Barrier::new(2));
        let world = World { entered, may_go, freed: Mutex::default() };
        let address = std::ptr::from_ref(&world).expose_provenance() as u64;
        let domain = Domain::new(2);
        let defer = |number| {
            // SAFETY: nobody reaches what it frees.
            unsafe { domain.pin(0).defer(free, address, number) }
        };
        defer(0);
        let too_early = std::thread::scope(|scope| {
            scope.spawn(|| domain.collect());
            world.entered.wait();
            // The other thread is in the middle of it and holds no guard.
            (1..9).for_each(defer);
            domain.collect();
            let too_early = world.freed.lock().ok().map(|freed| freed.len());
            world.may_go.wait();
            too_early
        });
        assert_eq!(too_early, Some(0));
        while domain.collect() {}
        assert!(domain.is_clean());
        assert_eq!(world.freed.into_inner().ok(), Some((0..9).collect()));
    }
}
