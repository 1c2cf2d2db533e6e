//! What threads that rarely meet write to, so that they rarely write to the same line of memory.
//!
//! Ground rules: which lane a thread takes decides nothing, it only spreads: it is that of the
//! processor that it runs on, so that of many threads those that run have different ones. A claim
//! keeps to one lane from winning to its end, so that what it added there it also takes away there.

use std::cell::Cell;

use crate::{
    reclaim::Guard,
    record::{Cells, Pages},
    stats::Counters,
    sync::{Arc, AtomicUsize, Ordering, Tally},
};

/// The part of a store that belongs to a lane.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Lane {
    pub(crate) number: usize,
    pub(crate) cells: Cells,
    pub(crate) counters: Counters,
    /// Identities in flight. `SeqCst` with the drain: either a claim sees the drain, or the drain
    /// sees the claim.
    pub(crate) in_flight: AtomicUsize,
    /// How many claims guards had counted as won when the sweep was here last. Only it writes this.
    won: Tally,
    /// Blocks of cells that are to stay though nobody has a cell of them.
    stay: Tally,
}

/// Blocks that a lane keeps while claims come: as many as cells that wait for readers to go.
const STAY: u64 = 6;

impl Lane {
    pub(crate) fn new(number: usize, pages: &Arc<Pages>) -> Self {
        Self {
            number,
            cells: Cells::new(pages),
            counters: Counters::default(),
            in_flight: AtomicUsize::new(0),
            won: Tally::new(0),
            stay: Tally::new(0),
        }
    }

    /// The sweep is here: a lane that no claim was won in since it was here last needs nothing.
    pub(crate) fn look_back(&self, won: u64) {
        let is_used = self.won.swap(won, Ordering::Relaxed) != won;
        self.stay.store(if is_used { STAY } else { 0 }, Ordering::Relaxed);
    }

    /// Frees blocks of cells that are not needed.
    pub(crate) fn free_blocks(&self, guard: &Guard<'_>) {
        self.cells.free_blocks(self.stay.load(Ordering::Relaxed) as usize, guard);
    }
}

/// How many lanes a store has.
pub(crate) fn lanes() -> usize {
    if cfg!(oncekey_loom) {
        return 1;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    threads.next_power_of_two().min(64)
}

/// A number for the place where this thread runs: threads that run at the same time rarely have the
/// same. It may be a little old: a thread that was moved to another processor is none the worse off
/// for some calls.
#[inline]
pub(crate) fn here() -> usize {
    /// So many calls are answered alike.
    const CALLS: u32 = 256;
    thread_local! {
        static LAST: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    }
    let here = LAST.try_with(|last| {
        let (here, left) = last.get();
        if let Some(left) = left.checked_sub(1) {
            last.set((here, left));
            return here as usize;
        }
        let here = processor();
        last.set((here as u32, CALLS));
        here
    });
    here.unwrap_or_default()
}

#[cold]
fn processor() -> usize {
    // A few nanoseconds where the C library keeps the number at hand, as glibc does since 2.35.
    #[cfg(all(target_os = "linux", not(oncekey_loom)))]
    if let Ok(processor) = nix::sched::sched_getcpu() {
        return processor;
    }
    of_thread()
}

/// A number of the present thread: neighbours have different ones.
fn of_thread() -> usize {
    static NEXT: Tally = Tally::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
    }
    // A thread that is about to end has given its number up.
    OWN.try_with(|own| *own).unwrap_or(0)
}
