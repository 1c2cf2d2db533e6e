//! The peers, each in a file of its own.

mod dashmap;
mod first;
mod moka;
mod nothing;
mod oncekey;
mod papaya;
mod quick_cache;
mod record;
mod scc;
mod sharded;
#[cfg(test)]
mod tests;

use crate::{
    peer::Peer,
    sample::Sample,
    work::{self, Work},
};

/// A peer, ready to be sent to work.
pub(crate) struct Contestant {
    pub(crate) name: &'static str,
    pub(crate) waits: bool,
    pub(crate) seats: bool,
    /// Does one pass in this process.
    pub(crate) pass: fn(work: Work, quick: bool, threads: usize) -> Vec<Sample>,
}

const fn contestant<P: Peer>() -> Contestant {
    Contestant { name: P::NAME, waits: P::WAITS, seats: P::SEATS, pass: work::pass::<P> }
}

/// The name of the store that the others are compared with.
pub(crate) const OURS: &str = oncekey::NAME;

/// The name of the peer that does nothing: what the harness itself costs.
pub(crate) const NOTHING: &str = nothing::NAME;

/// All peers, in the order in which they run and are shown: those first that say most, should the
/// time of a quick run not be enough.
pub(crate) const ALL: [Contestant; 9] = [
    contestant::<oncekey::Oncekey>(),
    contestant::<dashmap::Dashmap>(),
    contestant::<sharded::Sharded>(),
    contestant::<first::First>(),
    contestant::<papaya::Papaya>(),
    contestant::<quick_cache::QuickCache>(),
    contestant::<scc::Scc>(),
    contestant::<moka::Moka>(),
    contestant::<nothing::Nothing>(),
];

pub(crate) fn named(name: &str) -> Option<&'static Contestant> {
    ALL.iter().find(|contestant| contestant.name == name)
}
