//! Where the overflow buckets of a table lie.
//!
//! ```text
//! Table  | current | spare |
//!             |       +--> a bucket that lost the race for the end of a chain
//!             v
//! Spill  | used, older | bucket | bucket | bucket | ..         at most 64 lines: 4 KiB
//!               +--> Spill  | used, older | bucket | ..        full
//! ```
//!
//! Ground rules: a bucket more is needed under way, by a claim that waits for nobody, and thousands of
//! them go with their table at once. So they are not allocations each: an allocator that puts together
//! what was given back stops whoever asks for memory then. A spill is a block of [`Pages`].
//!
//! 1. `used` is raised by the addition that hands a bucket out, so nobody else gets that one. `spare`
//!    is taken by a swap.
//! 2. Spills and their buckets live as long as the table. Of buckets that lost a race one is kept for
//!    the next, others lie idle until then.

use crate::{
    record::Pages,
    sync::{Arc, AtomicU64, AtomicUsize, Ordering},
};

use super::table::Bucket;

/// Lines of the longest spill, its head's included.
const MOST: usize = 64;

/// Lines of the shortest one.
const FEWEST: usize = if cfg!(oncekey_loom) { 3 } else { 2 };

/// A table may have a bucket more for each 16 of its own before it grows, and some while it does.
const BUCKETS_OF_A_LINE: usize = 8;

/// The overflow buckets of a table.
pub(super) struct Spills {
    /// The address of the spill in use; zero for none. Compare-and-swap only.
    current: AtomicU64,
    /// The address of a bucket that nobody has; zero for none.
    spare: AtomicU64,
    /// How long a spill is.
    lines: usize,
    pages: Arc<Pages>,
}

/// The head of a spill, whose buckets lie behind it.
#[repr(C, align(64))]
struct Spill {
    /// How many buckets were asked for: all of them that there are, and perhaps more.
    used: AtomicUsize,
    /// The address of the spill that was in use before; zero for none.
    older: u64,
}

impl Spills {
    /// For a table of so many buckets.
    pub(super) fn new(buckets: usize, pages: &Arc<Pages>) -> Self {
        // A power of two, as all memory of pages.
        let lines = if cfg!(oncekey_loom) { 0 } else { buckets / BUCKETS_OF_A_LINE };
        let (current, spare) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { current, spare, lines: lines.clamp(FEWEST, MOST), pages: Arc::clone(pages) }
    }

    /// An empty bucket that nobody else has.
    pub(super) fn take(&self) -> &Bucket {
        // Relaxed: a hint.
        if self.spare.load(Ordering::Relaxed) != 0 {
            // Acquire, partner of the Release in `put_back`: the bucket is whole.
            let spare = self.spare.swap(0, Ordering::Acquire);
            if spare != 0 {
                // SAFETY: a bucket of this table, by invariant 2.
                return unsafe { &*std::ptr::with_exposed_provenance(spare as usize) };
            }
        }
        // Acquire, partner of the exchange below: the spill is whole.
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            if current != 0 {
                // SAFETY: a spill of this table, by invariant 2.
                let spill =
                    unsafe { &*std::ptr::with_exposed_provenance::<Spill>(current as usize) };
                // Relaxed: it gives out numbers, nothing else.
                let number = spill.used.fetch_add(1, Ordering::Relaxed);
                if number < self.lines - 1 {
                    return self.bucket(current, number);
                }
            }
            let new = self.make(current);
            // Release: publishes the spill. Acquire: so was the one that is there instead.
            let put_up =
                self.current.compare_exchange(current, new, Ordering::Release, Ordering::Acquire);
            match put_up {
                Ok(_) => return self.bucket(new, 0),
                Err(other) => {
                    // SAFETY: made above, and nobody has seen it.
                    unsafe { self.pages.give_back(new, self.bytes()) }
                    current = other;
                }
            }
        }
    }

    /// Takes a bucket back that nobody has seen.
    pub(super) fn put_back(&self, bucket: &Bucket) {
        let address = std::ptr::from_ref(bucket).expose_provenance() as u64;
        // Release: whoever takes it finds it whole. One that was there lies idle from now on.
        self.spare.store(address, Ordering::Release);
    }

    fn bytes(&self) -> usize {
        size_of::<Spill>() + (self.lines - 1) * size_of::<Bucket>()
    }

    fn bucket(&self, spill: u64, number: usize) -> &Bucket {
        let address = spill as usize + size_of::<Spill>() + number * size_of::<Bucket>();
        // SAFETY: `make` has taken so much and made it buckets, which are there as long as `self`.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }

    /// A spill whose first bucket is the caller's.
    fn make(&self, older: u64) -> u64 {
        let address = self.pages.take(self.bytes());
        // SAFETY: memory of this length that is nobody else's. All zero is an empty bucket.
        unsafe {
            let spill = std::ptr::with_exposed_provenance_mut::<Spill>(address as usize);
            spill.write(Spill { used: AtomicUsize::new(1), older });
            #[cfg(oncekey_loom)]
            for number in 0..self.lines - 1 {
                spill.add(1).cast::<Bucket>().add(number).write(Bucket::new());
            }
        }
        address
    }
}

impl Drop for Spills {
    fn drop(&mut self) {
        // Relaxed: nobody else has the table any more.
        let mut address = self.current.load(Ordering::Relaxed);
        while address != 0 {
            // SAFETY: from `make`, and nobody uses the table any more.
            unsafe {
                let spill = std::ptr::with_exposed_provenance::<Spill>(address as usize);
                let older = (*spill).older;
                self.pages.give_back(address, self.bytes());
                address = older;
            }
        }
    }
}

#[cfg(not(oncekey_loom))]
const _: () = assert!(size_of::<Spill>() == 64 && size_of::<Bucket>() == 64);

#[cfg(not(oncekey_loom))]
#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const THREADS: usize = 4;
    const EACH: usize = 500;

    #[test]
    fn a_bucket_is_handed_out_once_and_all_go_with_their_table() {
        let pages = Arc::new(Pages::default());
        let spills = Spills::new(1024, &pages);
        let mut taken: Vec<usize> = Vec::new();
        std::thread::scope(|scope| {
            let take = || -> Vec<usize> {
                (0..EACH).map(|_| std::ptr::from_ref(spills.take()).addr()).collect()
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(take)).collect();
            taken = threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect();
        });
        assert_eq!(taken.len(), THREADS * EACH);
        // No two of them share a byte, nor does one have a byte of a spill's head.
        assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), taken.len());
        assert!(taken.iter().all(|bucket| bucket.is_multiple_of(64)));
        let full = taken.len().div_ceil(MOST - 1);
        assert_eq!(pages.out(), full * 4096, "blocks of pages, each of them used up");
        drop(spills);
        assert_eq!(pages.out(), 0);
    }

    #[test]
    fn what_lost_a_race_is_the_next_ones() {
        let pages = Arc::new(Pages::default());
        let spills = Spills::new(1024, &pages);
        for _ in 0..10 * MOST {
            spills.put_back(spills.take());
        }
        assert_eq!(pages.out(), 4096);
        let bucket = spills.take();
        assert!(!std::ptr::eq(bucket, spills.take()), "once");
    }

    #[test]
    fn a_small_tables_spill_is_small() {
        let pages = Arc::new(Pages::default());
        let bytes = |buckets| Spills::new(buckets, &pages).bytes();
        assert_eq!([4, 64, 512, 1 << 20].map(bytes), [128, 512, 4096, 4096]);
    }
}

#[cfg(all(test, oncekey_loom))]
mod models {
    use loom::thread;

    use super::*;
    use crate::{index::table::Table, sync::explore};

    /// Runs each on a thread of its own, on a table of two buckets of which some have been given one
    /// more; no bucket may come twice, and as many are counted as there are.
    fn model(before: usize, runs: &'static [fn(&Table)]) {
        explore(3, move || {
            let Some(table) = Table::new(1, 0, true, &Arc::new(Pages::default())) else {
                panic!("none")
            };
            let table = Arc::new(table);
            (0..before).for_each(|_| drop(table.append(0)));
            let threads: Vec<_> = runs
                .iter()
                .map(|run| {
                    let table = Arc::clone(&table);
                    thread::spawn(move || run(&table))
                })
                .collect();
            threads.into_iter().for_each(|thread| assert!(thread.join().is_ok()));
            let all = table.appended();
            let once: std::collections::BTreeSet<_> = all.iter().collect();
            assert_eq!(once.len(), all.len());
            assert_eq!(table.overflow(), all.len());
        });
    }

    fn first(table: &Table) {
        table.append(0);
    }

    fn second(table: &Table) {
        table.append(1);
    }

    fn both(table: &Table) {
        table.append(0);
        table.append(1);
    }

    #[test]
    fn loom_spill_of_two_chains() {
        // None is there; there is one; it is full.
        (0..3).for_each(|before| model(before, &[first, second]));
    }

    #[test]
    fn loom_spill_of_one_chain_and_of_its_loser() {
        (0..3).for_each(|before| model(before, &[first, both]));
        model(0, &[first, both, second]);
    }
}
