//! Answers of 200 bytes handed back: each key as often as any other, and few keys very often.

use std::hint::black_box;

use crate::{
    ask::{Answer, Ask, mix, read},
    crew,
    peer::{Met, Peer, Time},
    sample::Sample,
    zipf::Zipf,
};

use super::{THREADS, leaked, part, run_once};

const BODY: usize = 200;

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    let (keys, replays) = if quick { (100_000, 60_000) } else { (1_000_000, 2_000_000) };
    let peer = leaked::<P>(Time::Real);
    crew::run(2, |thread| {
        for n in part(keys, thread, 2) {
            run_once(peer, &Ask::numbered(n), Answer::sized(BODY));
        }
    });
    // The first replay of a body may cost more than later ones; each body has had one.
    let all: Vec<u64> = (0..keys).collect();
    replay(peer, &all);

    let zipf = Zipf::new(keys, 0.99);
    let uniform: Vec<u64> = (0..replays).map(|seed| mix(!seed) % keys).collect();
    let zipf: Vec<u64> = (0..replays).map(|seed| zipf.draw(seed)).collect();
    let mut samples = Vec::new();
    for (work, numbers) in [("replay uniform", &uniform), ("replay zipf", &zipf)] {
        for threads in THREADS {
            let (cost, _) = crew::run(threads, |thread| {
                let part = part(replays, thread, threads);
                replay(peer, &numbers[part.start as usize..part.end as usize]);
            });
            samples.extend(cost.samples(work, threads, replays));
        }
    }
    samples
}

fn replay<P: Peer>(peer: &P, numbers: &[u64]) {
    for n in numbers {
        match peer.meet(&Ask::numbered(*n)) {
            Met::Replay(kept) => black_box(read(&kept)),
            _ => panic!("{}: a key that is kept", P::NAME),
        };
    }
}
