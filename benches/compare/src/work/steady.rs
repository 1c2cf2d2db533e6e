//! New keys come, the oldest end, the number stays: what a service does all day. Nine of ten
//! operations are new keys, one is a retry of a key that is kept.
//!
//! Peers in which nothing ends by itself take out the key that is as old as there are live keys;
//! they get its name for nothing. In the others time passes as keys come, by hand, in a thread of
//! its own that also reaps. What that thread costs is part of the sum, and it ends when all is
//! reaped.

use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::{
    ask::{Answer, Ask, mix, read},
    crew::{self, Cost},
    peer::{Met, Peer, Time},
    sample::Sample,
};

use super::{THREADS, leaked, run_once};

const RETENTION: Duration = Duration::from_secs(600);

/// How many operations a thread does until it says so.
const REPORT: u64 = 32;

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    // Multiples of all numbers of threads, so that a thread takes out what it has put in.
    let (live, turn) = if quick { (200_000, 160_000) } else { (5_000_000, 2_400_000) };
    let peer = leaked::<P>(Time::ByHand { retention: RETENTION });
    let mut run = Run { peer, live, first: 0, passed: 0 };
    run.turn(2, live);
    let mut samples = Vec::new();
    for threads in THREADS {
        let cost = run.turn(threads, turn);
        samples.extend(cost.samples("steady", threads, turn + turn / 9));
    }
    samples
}

struct Run<P: Peer> {
    peer: &'static P,
    live: u64,
    /// The next new key.
    first: u64,
    /// How many milliseconds have passed.
    passed: u64,
}

/// What a thread has done, apart from other threads' lines.
#[repr(align(128))]
#[derive(Default)]
struct Done(AtomicU64);

impl<P: Peer> Run<P> {
    /// Puts `keys` new keys in.
    fn turn(&mut self, threads: usize, keys: u64) -> Cost {
        let done: Vec<Done> = (0..threads).map(|_| Done::default()).collect();
        // Release and Acquire: who sees the last report has seen the records.
        let sum = || done.iter().map(|done| done.0.load(Ordering::Acquire)).sum::<u64>();
        let (cost, passed) =
            crew::run(threads + usize::from(P::ENDS), |thread| match done.get(thread) {
                Some(done) => {
                    self.claim(thread as u64, threads as u64, keys, &done.0);
                    self.passed
                }
                None => self.pass_time(keys, sum),
            });
        self.passed = passed.into_iter().max().unwrap_or(0);
        self.first += keys;
        if let Some(there) = self.peer.keys() {
            assert!(there as u64 <= self.live + self.live / 20, "{}: {there} keys", P::NAME);
        }
        cost
    }

    /// The part of one thread: every `threads`-th key.
    fn claim(&self, thread: u64, threads: u64, keys: u64, done: &AtomicU64) {
        let window = self.live * 8 / 10 / threads;
        for n in 0..keys / threads {
            let number = self.first + n * threads + thread;
            run_once(self.peer, &Ask::numbered(number), Answer::empty());
            if number >= self.live {
                if !P::ENDS {
                    self.peer.remove(&Ask::numbered(number - self.live).id);
                }
                if n % 9 == 0 {
                    self.retry(number - threads * (1 + mix(number) % window));
                }
            }
            if n % REPORT == 0 {
                done.store(n, Ordering::Release);
            }
        }
        done.store(keys / threads, Ordering::Release);
    }

    fn retry(&self, number: u64) {
        match self.peer.meet(&Ask::numbered(number)) {
            Met::Replay(kept) => drop(black_box(read(&kept))),
            // The thread was without a core for so long that its own key has ended: it is new.
            Met::Won(permit) => self.peer.complete(permit, Answer::empty()),
            Met::InFlight | Met::Mismatch => panic!("{}: a key of another", P::NAME),
        }
    }

    /// Moves the clock with the keys, and reaps, until all are there.
    fn pass_time(&self, keys: u64, done: impl Fn() -> u64) -> u64 {
        let mut passed = self.passed;
        loop {
            let done = done();
            let now = (self.first + done) * RETENTION.as_millis() as u64 / self.live;
            self.peer.pass(Duration::from_millis(now - passed));
            passed = now;
            self.peer.reap();
            if done == keys {
                return passed;
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}
