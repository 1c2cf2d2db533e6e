//! Losing claims on one key whose owner runs: a client that retries too fast, or many that share a
//! key. Whatever is shared and written here is fought for.

use crate::{
    ask::Ask,
    crew,
    peer::{Met, Peer, Time},
    sample::Sample,
};

use super::{THREADS, leaked, part};

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    let claims = if quick { 400_000 } else { 4_000_000 };
    let peer = leaked::<P>(Time::Real);
    let ask = Ask::numbered(0);
    let Met::Won(_permit) = peer.claim(&ask) else { panic!("{}: a new key", P::NAME) };
    let mut samples = Vec::new();
    for threads in THREADS {
        let (cost, _) = crew::run(threads, |thread| {
            for _ in part(claims, thread, threads) {
                assert!(matches!(peer.meet(&ask), Met::InFlight), "{}: it is in flight", P::NAME);
            }
        });
        samples.extend(cost.samples("hot", threads, claims));
    }
    samples
}
