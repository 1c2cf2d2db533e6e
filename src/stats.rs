//! What a store has done and holds, in numbers.

use crate::sync::{Ordering, Tally};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a store: Relaxed, because each stands for itself.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        /// A reading of a store's gauges and counters. Counters start at zero with the store and
        /// never fall; readings of several of them are not one snapshot.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            /// Gauge: records the store holds, expired ones that were not reaped yet included.
            pub keys: usize,
            /// Gauge: bytes counted against `max_bytes`.
            pub bytes: usize,
            /// Gauge: identities in flight.
            pub in_flight: usize,
            /// Gauge: waiters, threads and tasks.
            pub waiters: usize,
            /// Whether 80 % of `max_keys` or of `max_bytes` is taken (R25).
            pub nearly_full: bool,
            /// Whether the background sweep is alive; true for a manual sweep.
            pub sweep_alive: bool,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Adds these to what other lanes have counted.
            pub(crate) fn read_into(&self, stats: &mut Stats) {
                $(stats.$name += self.$name.read();)*
            }
        }
    };
}

counters! {
    /// Claims won, hand-overs and takeovers included.
    won,
    /// Outcomes handed back instead of running, waiters included.
    replays,
    /// Meetings of a record that was completed without its answer.
    replays_not_kept,
    /// Attempts that met a running owner.
    met_in_flight,
    /// Attempts that met a held identity.
    met_held,
    /// Attempts with another fingerprint (R5).
    mismatches,
    /// Attempts refused because the store was full (R25).
    refused_full,
    /// Attempts refused because the account's share was used up (R25).
    refused_account,
    /// Attempts refused because the store was draining.
    refused_draining,
    /// Waits refused because of a cap (R15).
    refused_waiters,
    /// Outcomes kept.
    completed,
    /// Completions without an answer kept, by choice or for lack of room.
    not_kept,
    /// Completions without an answer kept for lack of room (R25).
    not_kept_no_room,
    /// Releases, hand-overs included.
    released,
    /// Releases that made a waiter the next owner (R14).
    handed_over,
    /// Identities held: by the owner, by an abandoned permit, or by a lapsed lease.
    held,
    /// Permits dropped without a verb (R11).
    abandoned,
    /// Leases that lapsed without a sign of life.
    lapsed,
    /// Lapsed claims that another caller took over (R10).
    taken_over,
    /// Calls with a stale token, which changed nothing (R9).
    lost,
    /// Runs whose completion met another run's (R9).
    double_runs,
    /// Records that ended by their retention.
    expired,
    /// Completed records that left memory for room, because a tier has them (R25).
    evicted,
    /// Records forgotten by an operator.
    forgotten,
    /// Held identities resolved by an operator.
    resolved,
    /// Panics of the sweep, which went on afterwards.
    sweep_panics,
}

/// What is done so often that guards count it, mostly without a lock: see `reclaim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Often {
    Won,
    Completed,
    Replayed,
    MetInFlight,
}

/// A counter for each.
#[derive(Debug, Default)]
pub(crate) struct OftenCounts([Tally; 4]);

impl OftenCounts {
    /// By the stand-in under the model checker, where all share them.
    #[cfg(all(oncekey_loom, not(oncekey_reclaim)))]
    pub(crate) fn add(&self, what: Often) {
        self.0[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// By who is alone to write these.
    pub(crate) fn add_alone(&self, what: Often) {
        let counter = &self.0[what as usize];
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self, what: Often) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }
}

impl Counters {
    /// How many records and claims have left.
    pub(crate) fn ended(&self) -> u64 {
        [&self.expired, &self.evicted, &self.forgotten, &self.released, &self.taken_over]
            .iter()
            .fold(0, |sum, counter| sum + counter.read())
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(Tally);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn up(&self) {
        self.add(1);
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
