//! When memory that others may still look at is given back.
//!
//! Ground rules: a thread looks at a store's shared memory only while it holds a [`Guard`] of it.
//! Memory is first made unreachable (no slot, table or directory leads to it), then handed to
//! [`Guard::defer`], which frees it once every guard that was there is gone.
//!
//! ```text
//! readers of a lane   | even | odd |      each guard is counted in the one of its epoch
//! epoch               e -> e + 1, when the counters that e + 1 will take are seen at zero
//!
//! fresh --seal--> old, with the epoch of that time     three epochs later: free
//! ```
//!
//! 1. A guard is counted in one counter from before its first look to after its last.
//! 2. What is unreachable is marked with the epoch that is read after that, and may be freed when
//!    the epoch is at least three further. The last two of the steps to there began later than the
//!    mark, and each has seen one side of the counters at zero. A guard that could have reached what
//!    is freed was counted all that time, so its side was not zero.
//! 3. Which epoch a guard has read does not matter, however old: it is counted in one of two sides.
//!
//! The count and the look are two words: the guard counts itself, then reads links; the collector
//! has cut links, then reads counts. A full fence on both sides makes one of them see the other.
//!
//! Why not crossbeam-epoch: its garbage belongs to threads, not to stores. What a store has cut off
//! would come back when some thread next pins, perhaps one that only sleeps, and not when the store
//! is swept or dropped; then `max_bytes` would be no limit. Here a store that nobody looks at gives
//! everything back in one call, and a sleeper delays nobody but its own store. The cost is about
//! the same: two additions in the lane's own line.

// Room 1 of 3 with unsafe code: it only passes on what its callers promise.
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
    use crate::reclaim::{Deferred, Mark};
    use crate::sync::{AtomicUsize, Mutex, Ordering, fence, fence_after_seq_cst_addition};

    /// So much garbage is kept without another allocation.
    const ROOM: usize = 64;

    /// With so much garbage whoever adds to it tries to free some.
    const MUCH: usize = if cfg!(oncekey_loom) { 2 } else { 4 };

    /// A store's guards and garbage.
    pub(crate) struct Domain {
        lanes: Box<[Readers]>,
        /// Its lowest bit is the side that new guards take.
        epoch: Epoch,
        garbage: Mutex<Garbage>,
    }

    #[repr(align(128))]
    struct Readers([AtomicUsize; 2]);

    /// Read by all and rarely written, so on a line of its own.
    #[repr(align(128))]
    struct Epoch(AtomicUsize);

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
        readers: &'a AtomicUsize,
    }

    impl Domain {
        pub(crate) fn new(lanes: usize) -> Self {
            let readers = || Readers([AtomicUsize::new(0), AtomicUsize::new(0)]);
            let room = || Vec::with_capacity(ROOM);
            Self {
                lanes: (0..lanes).map(|_| readers()).collect(),
                epoch: Epoch(AtomicUsize::new(0)),
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
            // Relaxed: either side is right.
            let side = self.epoch.0.load(Ordering::Relaxed) & 1;
            // A power of two of them.
            let Readers(sides) = &self.lanes[lane & (self.lanes.len() - 1)];
            // The fence is the partner of the one in `advance`.
            sides[side].fetch_add(1, Ordering::SeqCst);
            fence_after_seq_cst_addition();
            Guard { domain: self, readers: &sides[side] }
        }

        /// Moves the epoch on if nobody is left on the side that comes next. False if somebody is.
        fn advance(&self) -> bool {
            let epoch = self.epoch.0.load(Ordering::Relaxed);
            let next = epoch.wrapping_add(1);
            // Partner of the one in `pin`: a guard whose count is not seen below sees all links that
            // were cut before this. And of the one in `mark`.
            fence(Ordering::SeqCst);
            // Acquire, partner of the Release in the guard's drop: it has looked its last.
            let empty = |Readers(sides): &Readers| sides[next & 1].load(Ordering::Acquire) == 0;
            if !self.lanes.iter().all(empty) {
                return false;
            }
            // AcqRel: who sees the new epoch has what all steps to it have seen. Relaxed where
            // somebody else has moved it.
            let moved =
                self.epoch.0.compare_exchange(epoch, next, Ordering::AcqRel, Ordering::Relaxed);
            let _ = moved;
            true
        }

        /// Makes all marks past, unless somebody looks. To be called without a guard.
        pub(crate) fn turn_over(&self) {
            let _ = self.advance() && self.advance() && self.advance();
        }

        fn mark(&self) -> Mark {
            // Partner of the one in `advance`: a step that begins in a later epoch than is read here
            // comes after this.
            fence(Ordering::SeqCst);
            Mark(self.epoch.0.load(Ordering::Relaxed) as u32)
        }

        fn is_past(&self, mark: Mark) -> bool {
            // Acquire, partner of the AcqRel in `advance`.
            let epoch = self.epoch.0.load(Ordering::Acquire) as u32;
            // Marks go round: one that is 2^32 epochs old is taken for a new one, for three epochs.
            epoch.wrapping_sub(mark.0) >= 3
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
                    if !self.advance() {
                        return left;
                    }
                    continue;
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

        /// For what this thread has made unreachable, or seen so: from when it counts.
        pub(crate) fn mark(&self) -> Mark {
            self.domain.mark()
        }

        /// Whether all guards are gone that could have reached what was marked so. If not, tries to
        /// make it so for who asks later.
        pub(crate) fn is_past(&self, mark: Mark) -> bool {
            self.domain.is_past(mark) || {
                self.domain.advance();
                self.domain.is_past(mark)
            }
        }
    }

    impl Drop for Guard<'_> {
        fn drop(&mut self) {
            self.readers.fetch_sub(1, Ordering::Release);
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
        sync::Quiet,
    };

    pub(crate) struct Domain(Quiet<Vec<Deferred>>);

    pub(crate) struct Guard<'a>(&'a Domain);

    impl Domain {
        pub(crate) fn new(_lanes: usize) -> Self {
            Self(Quiet::default())
        }

        pub(crate) fn pin(&self, _lane: usize) -> Guard<'_> {
            Guard(self)
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
