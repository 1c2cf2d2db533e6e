//! What passed between the memory and its tier, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// A reading of the gauges and counters of a [`Tiered`](super::Tiered). Counters start at
        /// zero with it and never fall.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct TierStats {
            /// Gauge: steps that the tier has still to be told; each is tried until it lands.
            pub unwritten: usize,
            /// Gauge: whether the tier has failed so often that it is left alone for a while.
            pub is_cut_off: bool,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn read(&self, unwritten: usize, is_cut_off: bool) -> TierStats {
                TierStats {
                    unwritten,
                    is_cut_off,
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }
        }
    };
}

counters! {
    /// Claims that the tier has let in.
    claims,
    /// Of these, takeovers of claims whose owner had lapsed.
    taken_over,
    /// Outcomes that were read from the tier into memory.
    read_through,
    /// Looks at records that are in flight on another node.
    polls,
    /// Calls that failed or were not answered in time.
    failed,
    /// Claims that ran without the tier, by setting.
    failed_open,
    /// Completions that were published before the tier could be told.
    late,
    /// Steps that the tier was never told: too many waited, or the record has ended meanwhile.
    given_up,
    /// Completions with a stale token.
    lost,
    /// Of these, those that met another run's completion: the work ran twice.
    double_runs,
    /// Ended records of which this process has given the room back.
    reaped,
}
