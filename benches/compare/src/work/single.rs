//! The same as `new`, each claim and each completion timed by itself: who grows must not stop
//! anybody.

use std::time::Instant;

use crate::{
    ask::{Answer, Ask},
    crew,
    latency::{Stopwatch, Times},
    peer::{Met, Peer, Time},
    sample::Sample,
};

use super::{leaked, new, part};

pub(super) fn pass<P: Peer>(quick: bool, threads: usize) -> Vec<Sample> {
    let peer = leaked::<P>(Time::Real);
    let (_, times) = crew::run(threads, |thread| {
        let mut watch = Stopwatch::new();
        let (mut claims, mut completions) = (Times::new(), Times::new());
        for n in part(new::keys(quick), thread, threads) {
            let (ask, answer) = (Ask::numbered(n), Answer::empty());
            watch.between();
            let start = Instant::now();
            let met = peer.claim(&ask);
            let claimed = Instant::now();
            let Met::Won(permit) = met else { panic!("{}: a new key was not won", P::NAME) };
            watch.note(&mut claims, start, claimed);
            let start = Instant::now();
            peer.complete(permit, answer);
            watch.note(&mut completions, start, Instant::now());
        }
        (claims, completions)
    });
    let claims = Times::all(times.iter().map(|(claims, _)| claims));
    let completions = Times::all(times.iter().map(|(_, completions)| completions));
    [claims.samples("claim", threads), completions.samples("complete", threads)].concat()
}
