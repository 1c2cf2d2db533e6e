//! An owner completes while 100 wait: how long until the last one has the answer?

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use crate::{
    ask::{Answer, Ask},
    latency::{Stopwatch, Times},
    peer::{Met, Peer, Time},
    sample::Sample,
};

use super::leaked;

const WAITERS: usize = 100;

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    let (tasks, threads) = if quick { (200, 4) } else { (2_000, 20) };
    let peer = leaked::<P>(Time::Real);
    let mut samples = Vec::new();
    if P::SEATS {
        let mut times = Times::new();
        (0..tasks).for_each(|n| wake_tasks(peer, &Ask::numbered(n), &mut times));
        samples.extend(times.samples("wake tasks", 1));
    }
    if P::WAITS {
        let mut times = Times::new();
        (0..threads).for_each(|n| wake_threads(peer, &Ask::numbered(!n), &mut times));
        samples.extend(times.samples("wake threads", WAITERS));
    }
    samples
}

/// Counts who was woken; a runtime would put tasks into a queue here.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// One thread completes, is told of each waiter and polls it, as a runtime of one thread would.
fn wake_tasks<P: Peer>(peer: &P, ask: &Ask, times: &mut Times) {
    let Met::Won(permit) = peer.claim(ask) else { panic!("{}: a new key", P::NAME) };
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut cx = Context::from_waker(&waker);
    let mut seats: Vec<_> = (0..WAITERS).map(|_| peer.seat(ask).expect("in flight")).collect();
    for seat in &mut seats {
        assert!(seat.as_mut().poll(&mut cx).is_pending(), "{}: nobody has completed", P::NAME);
    }
    let mut watch = Stopwatch::new();
    let start = Instant::now();
    peer.complete(permit, Answer::sized(200));
    for seat in &mut seats {
        let told = matches!(seat.as_mut().poll(&mut cx), Poll::Ready(Some(_)));
        assert!(told, "{}: a waiter was not told", P::NAME);
    }
    watch.note(times, start, Instant::now());
    assert_eq!(woken.0.load(Ordering::Relaxed), WAITERS, "{}: each is woken once", P::NAME);
}

/// All wait as threads.
fn wake_threads<P: Peer>(peer: &P, ask: &Ask, times: &mut Times) {
    let go = Barrier::new(2);
    let (start, last) = thread::scope(|scope| {
        let work = || {
            go.wait();
            Answer::sized(200)
        };
        let share = move || {
            let kept = peer.share(ask, work);
            assert!(kept.is_some(), "{}: a waiter was not told", P::NAME);
            Instant::now()
        };
        let all: Vec<_> = (0..=WAITERS).map(|_| scope.spawn(share)).collect();
        // Until all sleep. Who comes later still finds the answer, and only looks faster.
        thread::sleep(Duration::from_millis(30));
        go.wait();
        let start = Instant::now();
        let told = all.into_iter().map(|thread| thread.join().expect("no panic"));
        (start, told.max().expect("there are some"))
    });
    // In which this thread has no core, because those that it waits for have it.
    times.note_whole(last.saturating_duration_since(start));
}
