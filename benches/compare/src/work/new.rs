//! Claim and complete of new keys, from an empty store: what a write costs that is made once.

use crate::{
    ask::{Answer, Ask},
    crew,
    peer::{Peer, Time},
    sample::Sample,
};

use super::{leaked, part, run_once};

pub(super) const fn keys(quick: bool) -> u64 {
    if quick { 300_000 } else { 4_000_000 }
}

pub(super) fn pass<P: Peer>(quick: bool, threads: usize) -> Vec<Sample> {
    let keys = keys(quick);
    let peer = leaked::<P>(Time::Real);
    let (cost, _) = crew::run(threads, |thread| {
        for n in part(keys, thread, threads) {
            run_once(peer, &Ask::numbered(n), Answer::empty());
        }
    });
    cost.samples("new", threads, keys).into()
}
