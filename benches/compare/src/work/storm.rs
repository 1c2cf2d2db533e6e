//! Very many records end at once while claims go on: does anybody notice, and what does it cost?
//!
//! One thread claims new keys, each claim timed; another reaps (or, where nothing ends by itself,
//! removes) what has ended. The claims before that are the measure: what claims cost more
//! while the others end is the foreground's part of reaping. It includes that two cores get into
//! each other's way.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    ask::{Answer, Ask},
    crew,
    latency::{Stopwatch, Times},
    meter,
    peer::{Met, Peer, Time},
    sample::{Metric, Sample},
};

use super::{leaked, part, run_once};

const RETENTION: Duration = Duration::from_secs(600);
/// The first is not counted: in it the store grows.
const ROUNDS: usize = 3;

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    let (ending, claims) = if quick { (100_000, 20_000) } else { (1_000_000, 300_000) };
    let mut storm = Storm { peer: leaked::<P>(Time::ByHand { retention: RETENTION }), next: 0 };
    let mut all = Round::new();
    for round in 0..ROUNDS {
        let of_round = storm.round(ending, claims);
        if round > 0 {
            all.add(&of_round);
        }
    }
    // What as many claims cost in calm.
    let usual = all.calm.cpu.as_nanos() as f64 / all.calm.claims as f64 * all.storm.claims as f64;
    let each = |nanos: f64| nanos.max(0.0) / all.ended as f64;
    let foreground = each(all.storm.cpu.as_nanos() as f64 - usual);
    let background = each(all.background.as_nanos() as f64);
    let mut samples = all.calm.times.samples("calm claim", 1);
    samples.extend(all.storm.times.samples("storm claim", 1));
    samples.push(Sample::new("reap foreground", 1, Metric::CpuNs, foreground));
    samples.push(Sample::new("reap", 1, Metric::CpuNs, background + foreground));
    samples
}

struct Storm<P: Peer> {
    peer: &'static P,
    /// The next new key.
    next: u64,
}

/// What was seen of one fill and its end, or of several.
struct Round {
    calm: Claims,
    storm: Claims,
    /// The cpu of all but the claiming thread while records ended.
    background: Duration,
    /// How many records ended.
    ended: u64,
}

impl<P: Peer> Storm<P> {
    fn round(&mut self, ending: u64, claims: u64) -> Round {
        let (peer, old) = (self.peer, self.next);
        crew::run(2, |thread| {
            for n in part(ending, thread, 2) {
                run_once(peer, &Ask::numbered(old + n), Answer::empty());
            }
        });
        self.next += ending;
        let mut round = Round::new();
        round.calm.make(peer, &mut self.next, |done| done < claims);
        peer.pass(RETENTION);

        let over = AtomicBool::new(false);
        let cpu = meter::process_cpu();
        thread::scope(|scope| {
            let (storm, next) = (&mut round.storm, &mut self.next);
            scope.spawn(|| storm.make(peer, next, |_| !over.load(Ordering::Relaxed)));
            if P::ENDS {
                round.ended = peer.reap() as u64;
            } else {
                (old..old + ending).for_each(|n| peer.remove(&Ask::numbered(n).id));
                round.ended = ending;
            }
            over.store(true, Ordering::Relaxed);
        });
        // For what is given back late.
        thread::sleep(Duration::from_millis(20));
        round.background = (meter::process_cpu() - cpu).saturating_sub(round.storm.cpu);
        assert!(round.ended >= ending, "{}: {} ended", P::NAME, round.ended);
        round
    }
}

impl Round {
    fn new() -> Self {
        let background = Duration::ZERO;
        Self { calm: Claims::new(), storm: Claims::new(), background, ended: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.calm.add(&other.calm);
        self.storm.add(&other.storm);
        self.background += other.background;
        self.ended += other.ended;
    }
}

/// Claims made in a row, or in several.
struct Claims {
    times: Times,
    claims: u64,
    /// Of the claiming thread.
    cpu: Duration,
}

impl Claims {
    fn new() -> Self {
        Self { times: Times::new(), claims: 0, cpu: Duration::ZERO }
    }

    fn add(&mut self, other: &Self) {
        self.times.add(&other.times);
        self.claims += other.claims;
        self.cpu += other.cpu;
    }

    /// Claims and completes new keys while there is more to do.
    fn make<P: Peer>(&mut self, peer: &P, next: &mut u64, more: impl Fn(u64) -> bool) {
        let mut watch = Stopwatch::new();
        let cpu = meter::thread_cpu();
        let mut done = 0;
        while more(done) {
            let ask = Ask::numbered(*next);
            watch.between();
            let start = Instant::now();
            let met = peer.claim(&ask);
            let end = Instant::now();
            let Met::Won(permit) = met else { panic!("{}: a new key was not won", P::NAME) };
            watch.note(&mut self.times, start, end);
            peer.complete(permit, Answer::empty());
            *next += 1;
            done += 1;
        }
        self.claims += done;
        self.cpu += meter::thread_cpu() - cpu;
    }
}
