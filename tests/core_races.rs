//! The core under attack: many threads on few keys, wakers that call back, futures that are dropped
//! at any moment.
//!
//! What holds at every moment is checked by those who own a key; what must hold in the end (no
//! gauge is left above zero) is checked when all is over.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Barrier, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use oncekey::{
    Abandon, Claim, ClaimError, Clock, Fingerprint, Lapse, ManualClock, Outcome, Pending, Permit,
    Resolution, Settled, Store, Sweep,
};

mod common;

use common::*;

const KEYS: usize = 16;
const THREADS: u64 = 8;

/// Fewer in a debug build and under a sanitizer, which are an order of magnitude slower.
fn rounds() -> u64 {
    if cfg!(any(debug_assertions, oncekey_core)) { 30_000 } else { 300_000 }
}

/// One key as its owners see it from outside.
#[derive(Default)]
struct Seen {
    /// Owners that are at work now.
    at_work: AtomicUsize,
    /// The number of the last token.
    token: AtomicU64,
}

struct Attack {
    store: Store,
    clock: ManualClock,
    seen: Vec<Seen>,
    /// Whether one owner at a time can be promised: nobody forces, and no lease lapses.
    exclusive: bool,
}

impl Attack {
    fn new(on_lapse: Lapse, exclusive: bool) -> Self {
        let (store, clock) = by_hand_with(|builder| {
            let lease = if exclusive { DAY } else { 5 * MS };
            builder.on_lapse(on_lapse).lease(lease).retention(20 * MS).tick(MS).max_waiters(64)
        });
        Self { store, clock, seen: (0..KEYS).map(|_| Seen::default()).collect(), exclusive }
    }

    fn run(&self) {
        let barrier = Barrier::new(THREADS as usize);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut dice = Dice::new(thread);
                    barrier.wait();
                    for _ in 0..rounds() {
                        self.step(&mut dice);
                    }
                });
            }
        });
        let stats = self.store.stats();
        assert_eq!((stats.in_flight, stats.waiters), (0, 0), "{stats:?}");
        assert!(stats.handed_over > 0 && stats.expired > 0 && stats.lost > 0 || self.exclusive);
        // Held, completed and forgotten: all of it ends.
        for _ in 0..3 {
            self.clock.advance(DAY);
            self.store.sweep();
        }
        let stats = self.store.stats();
        assert_eq!((stats.keys, stats.bytes), (0, 0), "{stats:?}");
    }

    fn step(&self, dice: &mut Dice) {
        let key = usize::try_from(dice.roll(KEYS as u64)).unwrap();
        let name = key.to_string();
        let id = id(&name);
        match dice.roll(20) {
            0 => {
                // Slowly enough that no lease of a day lapses.
                self.clock.advance(MS);
                self.store.sweep();
            }
            1 => assert!(self.store.look_up(&id).is_none_or(|it| it.waiters <= 64)),
            2 => drop(self.store.observe(&id, same())),
            3 => drop(self.store.forget(&id)),
            4 if !self.exclusive => drop(self.store.forget_forced(&id)),
            5 if dice.roll(50) == 0 => drop(self.store.forget_account("acct")),
            6 => match self.store.claim(&id, other()) {
                // Over, and claimed by the other body.
                Ok(Claim::Won(permit)) => self.own(permit, key, dice),
                Ok(Claim::Mismatch) => {}
                other => self.meet(other, key, dice),
            },
            _ => {
                let claim = self.store.claim(&id, same());
                self.meet(claim, key, dice);
            }
        }
    }

    fn meet(&self, claim: Result<Claim, ClaimError>, key: usize, dice: &mut Dice) {
        match claim.unwrap() {
            Claim::Won(permit) => self.own(permit, key, dice),
            Claim::InFlight(pending) => self.wait(pending, key, dice),
            Claim::Held if dice.roll(2) == 0 => {
                let name = key.to_string();
                let as_ = match dice.roll(2) {
                    0 => Resolution::Release,
                    _ => Resolution::Complete(whole(dice.roll(50))),
                };
                let _ = self.store.resolve(&id(&name), as_);
            }
            Claim::Replay(replay) => check(replay.outcome()),
            Claim::Held | Claim::Mismatch | Claim::NotKept => {}
        }
    }

    /// Waits in one way or another, or stops at some moment.
    fn wait(&self, pending: Pending, key: usize, dice: &mut Dice) {
        let settled = match dice.roll(5) {
            0 => return,
            1 => match pending.wait_timeout(Duration::from_micros(dice.roll(200))) {
                Ok(settled) => settled,
                Err(_) => return,
            },
            2 => {
                // Listed, then dropped: perhaps as the heir.
                let mut task = Task::new(pending);
                match task.poll() {
                    Some(settled) => settled,
                    None => {
                        (0..dice.roll(500)).for_each(|_| std::hint::spin_loop());
                        return;
                    }
                }
            }
            3 => {
                let mut task = Task::new(pending);
                let early = task.poll();
                (0..dice.roll(500)).for_each(|_| std::hint::spin_loop());
                match early.map_or_else(|| task.wait.into_pending(), Err) {
                    Err(settled) => settled,
                    Ok(_) => return,
                }
            }
            _ => {
                let mut task = Task::new(pending);
                let mut patience = 50;
                loop {
                    if let Some(settled) = task.poll() {
                        break settled;
                    }
                    if patience == 0 {
                        return;
                    }
                    patience -= 1;
                    thread::yield_now();
                }
            }
        };
        match settled {
            Settled::Yours(permit) => self.own(permit, key, dice),
            Settled::Completed(replay) => check(replay.outcome()),
            Settled::Answered(answer) => check(&answer),
            Settled::Refused(error) => panic!("{error}"),
            _ => {}
        }
    }

    fn own(&self, permit: Permit, key: usize, dice: &mut Dice) {
        let seen = &self.seen[key];
        if self.exclusive {
            let others = seen.at_work.fetch_add(1, Ordering::SeqCst);
            assert_eq!(others, 0, "two owners of {key} are at work");
            let token = permit.token().number();
            let before = seen.token.swap(token, Ordering::SeqCst);
            assert!(before < token, "{token} of {key} was won after {before}");
        }
        match dice.roll(6) {
            0 => thread::yield_now(),
            1 => drop(permit.renew()),
            2 => drop(permit.attend()),
            _ => (0..dice.roll(300)).for_each(|_| std::hint::spin_loop()),
        }
        if self.exclusive {
            seen.at_work.fetch_sub(1, Ordering::SeqCst);
        }
        let lost = match dice.roll(8) {
            0 => permit.complete_not_kept().is_err(),
            1 | 2 => permit.release().is_err(),
            3 => permit.release_with(whole(dice.roll(50))).is_err(),
            4 => permit.hold().is_err(),
            5 => {
                drop(permit);
                false
            }
            _ => permit.complete(whole(dice.roll(50))).is_err(),
        };
        assert!(!(lost && self.exclusive), "lost, though nobody could have taken it");
    }
}

fn other() -> Fingerprint {
    Fingerprint::from_parts(oncekey::Scheme::REQUEST_1, [2; 32])
}

/// An outcome that shows by itself whether it is whole.
fn whole(n: u64) -> Outcome {
    Outcome::new(u16::try_from(200 + n).unwrap())
        .header("n", n.to_string())
        .body(vec![n as u8; n as usize])
}

#[track_caller]
fn check(outcome: &Outcome) {
    assert_eq!(*outcome, whole(u64::from(outcome.status()) - 200));
}

#[test]
fn r07_eight_threads_on_sixteen_keys_never_make_two_owners() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    Attack::new(Lapse::Hold, true).run();
}

#[test]
fn r10_eight_threads_that_lapse_force_and_hold_leave_nothing_behind() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    Attack::new(Lapse::Hold, false).run();
}

#[test]
fn r10_eight_threads_that_lapse_force_and_take_over_leave_nothing_behind() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    Attack::new(Lapse::TakeOver, false).run();
}

/// Keys flip between all states while the timers tick each millisecond (case 70).
#[test]
fn case_070_no_stale_timer_ends_a_later_record() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let store = Store::builder().retention(DAY).lease(3 * MS).tick(MS).build().unwrap();
    let rounds = rounds() * 2;
    thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let mut dice = Dice::new(70 + thread);
                for _ in 0..rounds {
                    // Each thread has its own keys: nobody else ends what it has completed.
                    let name = format!("{thread} {}", dice.roll(100));
                    let id = id(&name);
                    match store.claim(&id, same()).unwrap() {
                        Claim::Won(permit) => {
                            permit.complete(whole(dice.roll(50))).unwrap();
                            let now = store.claim(&id, same()).replayed();
                            check(&now);
                        }
                        Claim::Replay(replay) => {
                            check(replay.outcome());
                            assert_eq!(store.forget(&id), Ok(true));
                        }
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    // A thread that is kept from running lapses, and its completion settles that all the same. The
    // sweep may still be about to take such a claim off those in flight.
    until(|| store.stats().in_flight == 0);
    let stats = store.stats();
    assert_eq!((stats.expired, stats.lost), (0, 0));
    assert!(stats.keys > 0);
    store.forget_account("acct");
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

/// A write was lost, or a reader missed an entry, while the table grew (case 95).
#[test]
fn case_095_what_was_claimed_is_found_while_the_table_grows() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let each = if cfg!(debug_assertions) { 4_000 } else { 62_500 };
    let (store, _) = by_hand_with(|builder| builder.max_bytes(4 << 30));
    let barrier = Barrier::new(16);
    thread::scope(|scope| {
        for thread in 0..16 {
            let (store, barrier) = (&store, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for n in 0..each {
                    let name = format!("{thread} {n}");
                    let permit = store.claim(&id(&name), same()).won();
                    assert!(matches!(store.claim(&id(&name), same()), Ok(Claim::InFlight(_))));
                    permit.complete(whole(n % 50)).unwrap();
                    assert_eq!(store.claim(&id(&name), same()).replayed(), whole(n % 50));
                }
            });
        }
    });
    assert_eq!(store.stats().keys as u64, 16 * each);
}

/// A reader came between the place where a record was and the one to which it was moved.
#[test]
fn r16_a_record_is_seen_while_it_is_moved_out_of_a_slab_full_of_holes() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let (store, _) = by_hand();
    let kept = id("kept");
    store.claim(&kept, same()).won().complete(whole(7)).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    match store.observe(&kept, same()) {
                        Some(Claim::Replay(replay)) => check(replay.outcome()),
                        other => panic!("{other:?}"),
                    }
                    assert!(store.look_up(&kept).is_some());
                }
            });
        }
        let _done = OnEnd(&done);
        for round in 0..rounds() / 10 {
            // More than a slab of them: the one with the record is closed and mostly dead.
            for n in 0..40 {
                let name = format!("{round} {n}");
                store.claim(&id(&name), same()).won().complete(whole(7)).unwrap();
                assert_eq!(store.forget(&id(&name)), Ok(true));
            }
            store.sweep();
        }
    });
    assert_eq!(store.stats().keys, 1);
}

/// Tells other threads to end, also if this one panics.
struct OnEnd<'a>(&'a AtomicBool);

impl Drop for OnEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn drain_says_that_nothing_runs_only_when_nothing_runs() {
    let _watchdog = watchdog_of(Duration::from_secs(120));
    for round in 0..200 {
        let (store, _) = by_hand();
        let at_work = AtomicUsize::new(0);
        let drained = AtomicBool::new(false);
        let barrier = Barrier::new(5);
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for thread in 0..4 {
                let (store, at_work, drained, barrier) = (&store, &at_work, &drained, &barrier);
                threads.push(scope.spawn(move || {
                    let mut dice = Dice::new(round * 4 + thread);
                    let work = |permit: Permit, dice: &mut Dice| {
                        at_work.fetch_add(1, Ordering::SeqCst);
                        (0..dice.roll(200)).for_each(|_| std::hint::spin_loop());
                        at_work.fetch_sub(1, Ordering::SeqCst);
                        match dice.roll(3) {
                            0 => permit.release().unwrap(),
                            1 => drop(permit.complete(Outcome::new(200)).unwrap()),
                            _ => drop(permit),
                        }
                    };
                    barrier.wait();
                    loop {
                        let before = drained.load(Ordering::SeqCst);
                        let name = dice.roll(8).to_string();
                        match store.claim(&id(&name), same()) {
                            Ok(Claim::Won(permit)) => {
                                assert!(!before, "won after the end of the drain");
                                work(permit, &mut dice);
                            }
                            Ok(Claim::InFlight(pending)) => match block_on(pending.wait()) {
                                Settled::Yours(permit) => {
                                    assert!(!before, "handed over after the end of the drain");
                                    work(permit, &mut dice);
                                }
                                _ => assert!(store.forget(&id(&name)).is_ok() || !before),
                            },
                            Err(ClaimError::Draining) if drained.load(Ordering::SeqCst) => return,
                            Ok(_) | Err(ClaimError::Draining) => {
                                let _ = store.forget(&id(&name));
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                }));
            }
            barrier.wait();
            (0..round * 50).for_each(|_| std::hint::spin_loop());
            let drain = store.drain();
            if round % 2 == 0 {
                block_on(drain);
            } else {
                assert!(drain.wait_timeout(LONG));
            }
            assert_eq!(at_work.load(Ordering::SeqCst), 0);
            drained.store(true, Ordering::SeqCst);
            // The thread sanitizer sees a join, but not the end of a scope.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

#[test]
fn drain_ends_under_a_steady_stream_of_claims_that_it_refuses() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), same()).won();
    let drain = store.drain();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while !ended.load(Ordering::SeqCst) {
                    let refused = store.claim(&id("new"), same());
                    assert!(matches!(refused, Err(ClaimError::Draining)));
                }
            });
        }
        until(|| store.stats().refused_draining > 1_000);
        permit.complete(Outcome::new(200)).unwrap();
        block_on(drain);
        ended.store(true, Ordering::SeqCst);
    });
    assert_eq!(store.stats().in_flight, 0);
}

/// A waker that does something when it is called, or when it is dropped.
struct Hook {
    on_wake: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Hook {
    fn on_wake(act: impl FnOnce() + Send + 'static) -> Waker {
        Waker::from(Arc::new(Self { on_wake: Mutex::new(Some(Box::new(act))), on_drop: None }))
    }

    fn on_drop(act: impl FnOnce() + Send + Sync + 'static) -> Waker {
        Waker::from(Arc::new(Self { on_wake: Mutex::new(None), on_drop: Some(Box::new(act)) }))
    }
}

impl Wake for Hook {
    fn wake(self: Arc<Self>) {
        let act = self.on_wake.lock().unwrap().take();
        if let Some(act) = act {
            act();
        }
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        if let Some(act) = self.on_drop.take() {
            act();
        }
    }
}

fn poll_with<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

#[test]
fn r14_a_waker_may_call_the_store_whatever_has_woken_it() {
    let _watchdog = watchdog();
    type Event = fn(&Store, &ManualClock, Permit);
    let events: [(&str, Event); 8] = [
        ("complete", |_, _, permit| assert!(permit.complete(outcome("1")).unwrap().kept)),
        ("not kept", |_, _, permit| assert!(!permit.complete_not_kept().unwrap().kept)),
        ("release", |_, _, permit| permit.release().unwrap()),
        ("answer", |_, _, permit| permit.release_with(outcome("503")).unwrap()),
        ("hold", |_, _, permit| permit.hold().unwrap()),
        ("drop", |_, _, permit| drop(permit)),
        ("forget", |store, _, permit| {
            assert!(store.forget_forced(&id("k")));
            drop(permit);
        }),
        ("lapse", |store, clock, permit| {
            clock.advance(LEASE);
            store.sweep();
            drop(permit);
        }),
    ];
    for (event, happen) in events {
        let (store, clock) = by_hand();
        let permit = store.claim(&id("k"), fp("")).won();
        let second = store.claim(&id("second"), fp("")).won();
        let mut behind = Task::listed(store.claim(&id("second"), fp("")).pending());
        let mut waits: Vec<_> =
            (0..3).map(|_| store.claim(&id("k"), fp("")).pending().wait()).collect();
        let done = Arc::new(AtomicUsize::new(0));
        let again = Arc::new(Mutex::new(Some(second)));
        for wait in &mut waits {
            let (store, done, again) = (store.clone(), Arc::clone(&done), Arc::clone(&again));
            let waker = Hook::on_wake(move || {
                // Everything, from the inside: also an end that wakes others in turn.
                let second = again.lock().unwrap().take();
                if let Some(second) = second {
                    second.complete(outcome("second")).unwrap();
                }
                drop(store.claim(&id("k"), fp("")));
                drop(store.claim(&id("k"), fp("y")));
                let _ = store.look_up(&id("k"));
                let _ = store.stats();
                store.sweep();
                drop(store.drain());
                let _ = store.forget(&id("k"));
                done.fetch_add(1, Ordering::SeqCst);
            });
            assert!(poll_with(wait, &waker).is_pending());
        }
        happen(&store, &clock, permit);
        let woken = done.load(Ordering::SeqCst);
        assert_eq!(woken, if event == "release" { 1 } else { 3 }, "{event}");
        assert_eq!(behind.poll().completed(), outcome("second"));
        drop(waits);
        assert_eq!((store.stats().waiters, store.stats().in_flight), (0, 0), "{event}");
    }
}

#[test]
fn r14_a_waker_of_a_takeover_may_call_the_store() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    let first = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    let inside = store.clone();
    let waker = Hook::on_wake(move || {
        // In the middle of the takeover: it has won, though nobody has its permit yet.
        drop(inside.claim(&id("k"), fp("")).pending());
        assert!(matches!(inside.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
        inside.sweep();
    });
    assert!(poll_with(&mut wait, &waker).is_pending());
    clock.advance(LEASE);
    let second = store.claim(&id("k"), fp("")).won();
    assert!(first.complete(outcome("1")).is_err());
    second.complete(outcome("2")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("2"));
    assert_eq!((store.stats().in_flight, store.stats().keys), (0, 1));
}

#[test]
fn r14_a_waker_that_panics_in_a_takeover_gives_the_claim_up() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    let first = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    assert!(poll_with(&mut wait, &Hook::on_wake(|| panic!("seeded by the test"))).is_pending());
    clock.advance(LEASE);
    let claimed = catch_unwind(AssertUnwindSafe(|| store.claim(&id("k"), fp(""))));
    assert!(claimed.is_err());
    // Nobody has its permit, and nothing waits for a lease of nobody.
    store.claim(&id("k"), fp("")).won().complete(outcome("2")).unwrap();
    assert!(first.complete(outcome("1")).is_err());
    assert_eq!((store.stats().in_flight, store.stats().keys), (0, 1));
}

#[test]
fn r14_a_waker_that_is_replaced_may_end_what_it_likes() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    // With the old waker goes its task, and with the task the owner of what is waited for.
    let owner = Mutex::new(Some(permit));
    let waker = Hook::on_drop(move || {
        owner.lock().unwrap().take().unwrap().complete(outcome("1")).unwrap();
    });
    assert!(poll_with(&mut wait, &waker).is_pending());
    drop(waker);
    let bell = Arc::new(Bell::default());
    let mut task = Task::new(store.claim(&id("k"), fp("")).pending());
    drop(bell);
    assert!(task.poll().is_none());
    let next = Waker::noop();
    let _ = poll_with(&mut wait, next);
    match poll_with(&mut wait, next) {
        Poll::Ready(settled) => assert_eq!(settled.completed(), outcome("1")),
        Poll::Pending => panic!("it is completed"),
    }
    assert_eq!(task.poll().completed(), outcome("1"));
}

#[test]
fn r14_a_waker_that_panics_keeps_the_others_from_nothing() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks = vec![Task::listed(store.claim(&id("k"), fp("")).pending())];
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    assert!(poll_with(&mut wait, &Hook::on_wake(|| panic!("seeded by the test"))).is_pending());
    tasks.extend((0..3).map(|_| Task::listed(store.claim(&id("k"), fp("")).pending())));
    let completed = catch_unwind(AssertUnwindSafe(|| permit.complete(outcome("1"))));
    assert!(completed.is_err(), "the caller sees the panic");
    for task in &mut tasks {
        assert_eq!(task.wakes(), 1);
        assert_eq!(task.poll().completed(), outcome("1"));
    }
    match poll_with(&mut wait, Waker::noop()) {
        Poll::Ready(settled) => assert_eq!(settled.completed(), outcome("1")),
        Poll::Pending => panic!("it is completed"),
    }
}

#[test]
fn r22_a_panic_in_the_middle_of_a_sweep_loses_no_timer() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand();
    let mut waits = Vec::new();
    for n in 0..100 {
        let name = n.to_string();
        std::mem::forget(store.claim(&id(&name), fp("")).won());
        let mut wait = store.claim(&id(&name), fp("")).pending().wait();
        let panics = n % 10 == 0;
        let waker = Hook::on_wake(move || assert!(!panics, "seeded by the test"));
        assert!(poll_with(&mut wait, &waker).is_pending());
        waits.push(wait);
    }
    clock.advance(LEASE);
    let mut panics = 0;
    while catch_unwind(AssertUnwindSafe(|| store.sweep())).is_err() {
        panics += 1;
    }
    assert_eq!(panics, 10);
    assert_eq!((store.stats().held, store.stats().in_flight, store.stats().waiters), (100, 0, 0));
    clock.advance(DAY + SECOND);
    assert_eq!(store.sweep().reaped, 100);
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn drain_a_waker_may_call_the_store() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut drains: Vec<_> = (0..3).map(|_| store.drain()).collect();
    let done = Arc::new(AtomicUsize::new(0));
    for drain in &mut drains {
        let (store, done) = (store.clone(), Arc::clone(&done));
        let waker = Hook::on_wake(move || {
            assert!(store.drain().wait_timeout(Duration::ZERO));
            store.sweep();
            done.fetch_add(1, Ordering::SeqCst);
        });
        // Another waker before: the last one counts.
        assert!(poll_with(drain, Waker::noop()).is_pending());
        assert!(poll_with(drain, &waker).is_pending());
    }
    permit.release().unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 3);
    for drain in drains {
        block_on(drain);
    }
}

#[test]
fn drain_a_waker_may_call_the_store_whatever_has_landed_last() {
    let _watchdog = watchdog();
    type Event = fn(&Store, &ManualClock);
    let events: [(&str, Event); 4] = [
        ("lapse", |store, clock| {
            clock.advance(LEASE);
            store.sweep();
        }),
        ("lapse that is met", |store, clock| {
            clock.advance(LEASE);
            // The waker forgets it.
            let met = store.claim(&id("k"), fp(""));
            assert!(matches!(met, Err(ClaimError::Draining)));
        }),
        ("forget", |store, _| assert!(store.forget_forced(&id("k")))),
        ("forget of the account", |store, clock| {
            clock.advance(LEASE);
            assert_eq!(store.forget_account("acct"), 1);
        }),
    ];
    for (event, happen) in events {
        let (store, clock) = by_hand();
        let permit = store.claim(&id("k"), fp("")).won();
        let mut drain = store.drain();
        let done = Arc::new(AtomicUsize::new(0));
        let (inside, counted) = (store.clone(), Arc::clone(&done));
        let waker = Hook::on_wake(move || {
            inside.sweep();
            let _ = inside.forget(&id("k"));
            inside.forget_account("acct");
            counted.fetch_add(1, Ordering::SeqCst);
        });
        assert!(poll_with(&mut drain, &waker).is_pending());
        happen(&store, &clock);
        assert_eq!(done.load(Ordering::SeqCst), 1, "{event}");
        drop(permit);
        assert_eq!(store.stats().in_flight, 0, "{event}");
    }
}

#[test]
fn drain_a_waker_that_panics_keeps_no_waiter_from_its_answer() {
    let _watchdog = watchdog();
    type Event = fn(Permit);
    let events: [(&str, Event); 3] = [
        ("complete", |permit| drop(permit.complete(outcome("1")))),
        ("hold", |permit| drop(permit.hold())),
        ("answer", |permit| drop(permit.release_with(outcome("503")))),
    ];
    for (event, happen) in events {
        let (store, clock) = by_hand();
        let permit = store.claim(&id("k"), fp("")).won();
        let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
        let mut drain = store.drain();
        let waker = Hook::on_wake(|| panic!("seeded by the test"));
        assert!(poll_with(&mut drain, &waker).is_pending());
        let ended = catch_unwind(AssertUnwindSafe(|| happen(permit)));
        assert!(ended.is_err(), "{event}: the caller sees the panic");
        assert_eq!(task.wakes(), 1, "{event}");
        match task.poll() {
            Some(Settled::Completed(_)) if event == "complete" => {}
            Some(Settled::Held) if event == "hold" => {}
            Some(Settled::Answered(_)) if event == "answer" => {}
            other => panic!("{event}: {other:?}"),
        }
        clock.advance(DAY + SECOND);
        store.sweep();
        assert_eq!((store.stats().keys, store.stats().bytes), (0, 0), "{event}");
    }
}

#[test]
fn drain_is_told_by_a_claim_that_is_refused_after_the_last_has_landed() {
    // A claim that found no room is still counted while its sweep wakes others; there the last
    // owner lands, and only the refused claim can tell the drain.
    let _watchdog = watchdog();
    let (store, clock) = by_hand_with(|builder| builder.max_keys(2));
    let last = store.claim(&id("last"), fp("")).won();
    last.attend().unwrap();
    let lapsed = store.claim(&id("lapsed"), fp("")).won();
    let mut wait = store.claim(&id("lapsed"), fp("")).pending().wait();
    let told = Arc::new(AtomicBool::new(false));
    let drain = Arc::new(Mutex::new(None));
    let (inside, kept, tells) = (store.clone(), Arc::clone(&drain), Arc::clone(&told));
    let waker = Hook::on_wake(move || {
        let mut drain = inside.drain();
        let bell = Hook::on_wake(move || tells.store(true, Ordering::SeqCst));
        assert!(poll_with(&mut drain, &bell).is_pending());
        last.complete(outcome("last")).unwrap();
        assert_eq!(inside.stats().in_flight, 1, "the claim that is about to be refused");
        *kept.lock().unwrap() = Some(drain);
    });
    assert!(poll_with(&mut wait, &waker).is_pending());
    clock.advance(LEASE);
    assert!(matches!(store.claim(&id("new"), fp("")), Err(ClaimError::Full { .. })));
    assert!(told.load(Ordering::SeqCst), "the drain sleeps on");
    assert_eq!(store.stats().in_flight, 0);
    drop(lapsed);
}

#[test]
fn drain_ends_no_lapsed_claim_for_one_that_it_refuses() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    let first = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    let inside = store.clone();
    // In the middle of the takeover.
    let waker = Hook::on_wake(move || drop(inside.drain()));
    assert!(poll_with(&mut wait, &waker).is_pending());
    clock.advance(LEASE);
    let second = store.claim(&id("k"), fp("")).won();
    assert!(!store.drain().wait_timeout(Duration::ZERO), "the second runs");
    assert!(first.complete(outcome("1")).is_err());
    second.complete(outcome("2")).unwrap();
    assert!(store.drain().wait_timeout(Duration::ZERO));
}

#[test]
fn r14_a_waker_of_an_heir_may_panic_while_the_owner_does() {
    let _watchdog = watchdog();
    let (store, _) = by_hand_with(|builder| builder.on_abandon(Abandon::Release));
    let permit = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    assert!(poll_with(&mut wait, &Hook::on_wake(|| panic!("seeded by the test"))).is_pending());
    let ended = catch_unwind(AssertUnwindSafe(move || {
        let _permit = permit;
        panic!("the work");
    }));
    assert_eq!(*ended.unwrap_err().downcast::<&str>().unwrap(), "the work");
    let stats = store.stats();
    assert_eq!((stats.handed_over, stats.released, stats.won), (1, 1, 2));
    match poll_with(&mut wait, Waker::noop()) {
        Poll::Ready(settled) => settled.yours().release().unwrap(),
        Poll::Pending => panic!("it is the heir"),
    }
    // The same of one that is given up by a verb: it is counted all the same.
    let permit = store.claim(&id("k"), fp("")).won();
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    assert!(poll_with(&mut wait, &Hook::on_wake(|| panic!("seeded by the test"))).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(move || permit.release())).is_err());
    assert_eq!((store.stats().handed_over, store.stats().in_flight), (2, 1));
    drop(wait);
    assert_eq!(store.stats().in_flight, 0);
}

#[test]
fn r25_what_has_ended_makes_room_while_another_thread_sweeps() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand_with(|builder| builder.max_keys(1).retention(SECOND));
    let (turn, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let rounds = rounds();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = 0;
            while !ended.load(Ordering::SeqCst) {
                let now = turn.load(Ordering::SeqCst);
                if now != seen {
                    seen = now;
                    store.sweep();
                }
                std::hint::spin_loop();
            }
        });
        store.claim(&id("k"), same()).won().complete(Outcome::new(200)).unwrap();
        let mut refused = 0;
        for round in 1..=rounds {
            clock.advance(SECOND);
            turn.store(round, Ordering::SeqCst);
            (0..round % 64).for_each(|_| std::hint::spin_loop());
            let key = if round % 2 == 0 { "k" } else { "other" };
            match store.claim(&id(key), same()) {
                Ok(Claim::Won(permit)) => drop(permit.complete(Outcome::new(200)).unwrap()),
                Err(_) => refused += 1,
                Ok(other) => panic!("{other:?}"),
            }
        }
        ended.store(true, Ordering::SeqCst);
        assert_eq!(refused, 0, "of {rounds}: a store with nothing but ended records is not full");
    });
}

#[test]
fn r15_a_wait_may_be_dropped_in_every_state() {
    type Event = fn(&Store, Permit);
    let events: [Event; 6] = [
        |_, permit| assert!(permit.complete(outcome("1")).unwrap().kept),
        |_, permit| permit.release().unwrap(),
        |_, permit| permit.release_with(outcome("503")).unwrap(),
        |_, permit| permit.hold().unwrap(),
        |store, permit| {
            assert!(store.forget_forced(&id("k")));
            drop(permit);
        },
        |_, permit| drop(permit),
    ];
    for event in events {
        for polls_before in 0..3 {
            for polls_after in 0..3 {
                let (store, _) = by_hand();
                let permit = store.claim(&id("k"), fp("")).won();
                let mut task = Task::new(store.claim(&id("k"), fp("")).pending());
                (0..polls_before).for_each(|_| assert!(task.poll().is_none()));
                event(&store, permit);
                let mut owner = None;
                for _ in 0..polls_after {
                    match task.poll() {
                        Some(Settled::Yours(permit)) => owner = Some(permit),
                        Some(_) => {}
                        // Polled again after it had become the owner: it waits for itself.
                        None => assert!(owner.is_some()),
                    }
                }
                drop(task);
                assert_eq!(store.stats().waiters, 0);
                if let Some(permit) = owner {
                    permit.release().unwrap();
                }
                assert_eq!(store.stats().in_flight, 0);
            }
        }
    }
}

#[test]
fn r15_a_dropped_wait_keeps_no_waker() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let dropped = Arc::new(AtomicBool::new(false));
    let note = Arc::clone(&dropped);
    let waker = Hook::on_drop(move || note.store(true, Ordering::SeqCst));
    let mut wait = store.claim(&id("k"), fp("")).pending().wait();
    assert!(poll_with(&mut wait, &waker).is_pending());
    let mut drain = store.drain();
    assert!(poll_with(&mut drain, &waker).is_pending());
    drop(waker);
    drop(wait);
    assert!(!dropped.load(Ordering::SeqCst));
    drop(drain);
    assert!(dropped.load(Ordering::SeqCst));
    permit.release().unwrap();
}

/// A clock that shows by its own end that the store is gone.
#[derive(Clone)]
struct Tied(Arc<ManualClock>);

impl Clock for Tied {
    fn now(&self) -> Duration {
        self.0.now()
    }
}

fn tied(sweep: Sweep) -> (Store, Weak<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let alive = Arc::downgrade(&clock);
    (Store::builder().clock(Tied(clock)).sweep(sweep).build().unwrap(), alive)
}

#[test]
fn r12_permits_waits_and_drains_may_outlive_the_store_and_then_nothing_is_left() {
    let _watchdog = watchdog();
    for sweep in [Sweep::Manual, Sweep::Thread] {
        let (store, alive) = tied(sweep);
        let permit = store.claim(&id("k"), fp("")).won();
        let other = store.claim(&id("l"), fp("")).won();
        let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
        let leaver = Task::listed(store.claim(&id("l"), fp("")).pending());
        let mut drain = store.drain();
        assert!(poll_with(&mut drain, Waker::noop()).is_pending());
        drop(store);
        assert!(alive.upgrade().is_some());
        permit.complete(outcome("1")).unwrap();
        assert_eq!(task.poll().completed(), outcome("1"));
        other.release().unwrap();
        drop(leaver);
        block_on(drain);
        drop(task);
        // The sweep's thread may be in the middle of a step.
        until(|| alive.upgrade().is_none());
    }
}

#[test]
fn r22_the_thread_of_the_sweep_keeps_no_store_alive() {
    let _watchdog = watchdog();
    // Asleep without an end, asleep until a timer, and just started.
    for keys in [0, 10] {
        let (store, alive) = tied(Sweep::Thread);
        for n in 0..keys {
            let name = n.to_string();
            store.claim(&id(&name), fp("")).won().complete(outcome("1")).unwrap();
        }
        drop(store);
        until(|| alive.upgrade().is_none());
    }
}

/// Stores that come and go while they are swept leave no thread behind.
#[cfg(target_os = "linux")]
#[test]
fn r22_the_thread_of_the_sweep_ends_with_the_store() {
    let _watchdog = watchdog();
    let sweeps = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.trim_end() == "oncekey-sweep")
            .count()
    };
    let stores: Vec<_> = (0..200)
        .map(|n| {
            let store = Store::builder().build().unwrap();
            if n % 2 == 0 {
                store.claim(&id("k"), fp("")).won().complete(outcome("1")).unwrap();
            }
            store
        })
        .collect();
    // Other tests of this program may have some of their own.
    until(|| sweeps() >= 200);
    drop(stores);
    until(|| sweeps() < 100);
}

#[test]
fn api_handles_go_where_they_are_needed() {
    fn free<T: Send + Sync + 'static>() {}
    fn movable<T: Send + Unpin + 'static>() {}
    free::<Store>();
    free::<Permit>();
    free::<oncekey::Replay>();
    free::<oncekey::Stats>();
    movable::<Claim>();
    movable::<Pending>();
    movable::<oncekey::Wait>();
    movable::<Settled>();
    movable::<oncekey::Drain>();
}
