//! R13 to R16: those who came second, and what they get.

use std::{
    pin::Pin,
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Waker},
    thread,
    time::Duration,
};

use oncekey::{
    Claim, Clock, EntryState, Lapse, LostCause, ManualClock, Outcome, Resolution, Settled, Store,
    Sweep, TimedOut,
};

use crate::common::*;

fn listed(store: &Store, key: &str) -> Task {
    Task::listed(store.claim(&id(key), fp("")).pending())
}

/// A thread that waits; it is listed when this returns.
fn waiting_thread(store: &Store, key: &str) -> thread::JoinHandle<Settled> {
    let pending = store.claim(&id(key), fp("")).pending();
    let before = store.stats().waiters;
    let waiter = thread::spawn(move || pending.wait_timeout(LONG).unwrap());
    until(|| store.stats().waiters == before + 1);
    waiter
}

#[test]
fn r13_a_waiter_is_woken_by_the_completion_and_by_nothing_before() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = listed(&store, "k");
    for _ in 0..5 {
        clock.advance(LEASE - MS);
        store.sweep();
        permit.renew().unwrap();
    }
    store.claim(&id("other"), fp("")).won().complete(outcome("other")).unwrap();
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(task.wakes(), 0);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.wakes(), 1);
    assert_eq!(task.poll().completed(), outcome("1"));
    assert_eq!(store.stats().waiters, 0);
}

#[test]
fn r13_a_thread_is_woken_by_the_completion() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let waiter = waiting_thread(&store, "k");
    permit.complete(outcome("1")).unwrap();
    assert_eq!(waiter.join().unwrap().completed(), outcome("1"));
}

#[test]
fn r13_no_waiter_sleeps_past_a_lapsed_lease() {
    // The tick is an hour; the timer of a record with waiters is exact all the same.
    for (on_lapse, renewed) in [
        (Lapse::Hold, false),
        (Lapse::Hold, true),
        (Lapse::TakeOver, false),
        (Lapse::TakeOver, true),
    ] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse).tick(HOUR));
        let _permit = store.claim(&id("k"), fp("")).won();
        clock.advance(LEASE / 2);
        let mut task = listed(&store, "k");
        if renewed {
            _permit.renew().unwrap();
            clock.advance(LEASE / 2);
            store.sweep();
        }
        clock.advance(LEASE / 2 - MS);
        store.sweep();
        assert_eq!(task.wakes(), 0);
        clock.advance(MS);
        store.sweep();
        assert_eq!(task.wakes(), 1, "{on_lapse:?}, renewed: {renewed}");
        match task.poll() {
            Some(Settled::Held) if on_lapse == Lapse::Hold => {}
            Some(Settled::Yours(permit)) if on_lapse == Lapse::TakeOver => {
                permit.complete(outcome("2")).unwrap();
            }
            other => panic!("{on_lapse:?}: {other:?}"),
        }
    }
}

#[test]
fn r13_a_waiter_of_an_heir_does_not_sleep_past_the_lease_of_the_heir() {
    let (store, clock) = by_hand_with(|builder| builder.tick(HOUR));
    let permit = store.claim(&id("k"), fp("")).won();
    permit.attend().unwrap();
    let (mut heir, mut next) = (listed(&store, "k"), listed(&store, "k"));
    permit.release().unwrap();
    let permit = heir.poll().yours();
    clock.advance(LEASE - MS);
    store.sweep();
    assert_eq!(next.wakes(), 0);
    clock.advance(MS);
    store.sweep();
    assert_eq!(next.wakes(), 1);
    assert!(matches!(next.poll(), Some(Settled::Held)));
    permit.complete(outcome("late")).unwrap();
}

#[test]
fn r13_a_thread_does_not_sleep_past_a_lapsed_lease_though_nobody_sweeps() {
    let _watchdog = watchdog();
    let store = Store::builder().lease(20 * MS).sweep(Sweep::Manual).build().unwrap();
    let permit = store.claim(&id("k"), fp("")).won();
    let pending = store.claim(&id("k"), fp(""));
    if let Ok(Claim::InFlight(pending)) = pending {
        assert!(matches!(pending.wait_timeout(LONG), Ok(Settled::Held)));
    }
    permit.release().unwrap();
}

#[test]
fn r13_a_limit_of_zero_looks_once_and_gives_the_view_back() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let pending = store.claim(&id("k"), fp("")).pending();
    clock.advance(SECOND);
    assert_eq!((pending.age(), pending.remaining()), (SECOND, LEASE - SECOND));
    let TimedOut { pending } = pending.wait_timeout(Duration::ZERO).unwrap_err();
    let TimedOut { pending } = pending.wait_timeout(MS).unwrap_err();
    assert_eq!(store.stats().waiters, 0);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(pending.wait_timeout(Duration::ZERO).unwrap().completed(), outcome("1"));
}

#[test]
fn r13_no_limit_is_too_long() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let pending = store.claim(&id("k"), fp("")).pending();
    let waiter = thread::spawn(move || pending.wait_timeout(Duration::MAX).unwrap());
    until(|| store.stats().waiters == 1);
    permit.complete(outcome("1")).unwrap();
    waiter.join().unwrap().completed();
}

#[test]
fn r14_a_waiter_looks_again_when_it_registers() {
    // Seen in flight, then everything else happened before it was polled for the first time.
    type Event = fn(&Store, oncekey::Permit);
    let events: [(&str, Event); 6] = [
        ("completed", |_, permit| assert!(permit.complete(outcome("1")).unwrap().kept)),
        ("not kept", |_, permit| assert!(!permit.complete_not_kept().unwrap().kept)),
        ("held", |_, permit| permit.hold().unwrap()),
        ("released", |_, permit| permit.release().unwrap()),
        ("answered", |_, permit| permit.release_with(outcome("503")).unwrap()),
        ("completed and forgotten", |store, permit| {
            permit.complete(outcome("1")).unwrap();
            assert!(store.forget(&id("k")).unwrap());
        }),
    ];
    for (event, happen) in events {
        let (store, _) = by_hand();
        let permit = store.claim(&id("k"), fp("")).won();
        let mut task = Task::new(store.claim(&id("k"), fp("")).pending());
        happen(&store, permit);
        match (event, task.poll().expect("it would wait for nobody")) {
            ("completed" | "completed and forgotten", settled) => {
                assert_eq!(settled.completed(), outcome("1"));
            }
            ("not kept", Settled::NotKept) | ("held", Settled::Held) => {}
            // It was not there when the answer was given.
            ("released" | "answered", settled) => settled.yours().release().unwrap(),
            (_, other) => panic!("{event}: {other:?}"),
        }
        assert_eq!(store.stats().waiters, 0);
    }
}

#[test]
fn r14_a_release_hands_over_to_exactly_one_the_oldest_first() {
    let (store, clock) = by_hand();
    let mut permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> = (0..5).map(|_| listed(&store, "k")).collect();
    for next in 0..5 {
        clock.advance(LEASE / 2);
        permit.release().unwrap();
        for (n, task) in tasks.iter().enumerate() {
            assert_eq!(task.wakes(), usize::from(n <= next), "task {n} of {next}");
        }
        // Never free in between: who comes now waits behind the others.
        assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::InFlight(_))));
        permit = tasks[next].poll().yours();
        // It has a lease and a token of its own.
        let entry = store.look_up(&id("k")).unwrap();
        assert_eq!((entry.remaining, entry.age), (LEASE, Duration::ZERO));
        assert_eq!((entry.token, entry.waiters), (permit.token(), 4 - next));
    }
    let stats = store.stats();
    assert_eq!((stats.in_flight, stats.waiters, stats.handed_over, stats.won), (1, 0, 5, 6));
    permit.release().unwrap();
    assert_eq!((store.stats().keys, store.stats().in_flight), (0, 0));
}

#[test]
fn r14_threads_and_tasks_stand_in_one_queue() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut first = listed(&store, "k");
    let second = waiting_thread(&store, "k");
    let mut third = listed(&store, "k");
    let fourth = waiting_thread(&store, "k");
    permit.release().unwrap();
    first.poll().yours().release().unwrap();
    let permit = second.join().unwrap().yours();
    assert_eq!((third.wakes(), store.stats().waiters), (0, 2));
    permit.release().unwrap();
    let permit = third.poll().yours();
    assert!(!fourth.is_finished());
    permit.complete(outcome("1")).unwrap();
    assert_eq!(fourth.join().unwrap().completed(), outcome("1"));
}

/// Counts how often it is read.
#[derive(Clone, Default)]
struct Watched {
    clock: ManualClock,
    readings: Arc<AtomicUsize>,
}

impl Clock for Watched {
    fn now(&self) -> Duration {
        self.readings.fetch_add(1, Ordering::SeqCst);
        self.clock.now()
    }
}

#[test]
fn r14_a_thread_keeps_its_place_when_the_owner_renews() {
    let _watchdog = watchdog();
    let clock = Watched::default();
    let builder = Store::builder().sweep(Sweep::Manual).clock(clock.clone());
    let store = builder.lease(20 * MS).build().unwrap();
    let permit = store.claim(&id("k"), fp("")).won();
    let thread = waiting_thread(&store, "k");
    let mut task = listed(&store, "k");
    // The thread naps for a lease of real time, looks at the clock and sees that the owner has
    // renewed: three times over.
    for _ in 0..3 {
        clock.clock.advance(10 * MS);
        permit.renew().unwrap();
        let before = clock.readings.load(Ordering::SeqCst);
        until(|| clock.readings.load(Ordering::SeqCst) > before);
    }
    permit.release().unwrap();
    assert_eq!(task.wakes(), 0, "the task came later");
    thread.join().unwrap().yours().release().unwrap();
    task.poll().yours().release().unwrap();
}

#[test]
fn r14_an_heir_that_is_gone_is_passed_over() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> = (0..5).map(|_| listed(&store, "k")).collect();
    permit.release().unwrap();
    // Chosen, but dropped before it knew; so is the next.
    drop(tasks.remove(0));
    drop(tasks.remove(0));
    assert_eq!((tasks[0].wakes(), tasks[1].wakes()), (1, 0));
    // A waiter that stops waiting is told; it may be the owner by now.
    let settled = tasks.remove(0).wait.into_pending().unwrap_err();
    settled.yours().release().unwrap();
    tasks[0].poll().yours().complete(outcome("1")).unwrap();
    assert_eq!(tasks[1].poll().completed(), outcome("1"));
    let stats = store.stats();
    assert_eq!((stats.abandoned, stats.held, stats.lost), (0, 0, 0));
}

#[test]
fn r14_the_last_heir_that_is_gone_leaves_the_identity_free() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let task = listed(&store, "k");
    permit.release().unwrap();
    drop(task);
    let stats = store.stats();
    assert_eq!((stats.keys, stats.bytes, stats.in_flight, stats.waiters), (0, 0, 0, 0));
    store.claim(&id("k"), fp("other")).won().release().unwrap();
}

#[test]
fn r14_an_heir_whose_claim_was_taken_away_begins_no_work() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut heirs: Vec<_> = (0..3).map(|_| listed(&store, "k")).collect();
    permit.release().unwrap();
    assert_eq!(heirs[0].wakes(), 1);
    // Before it looks, an operator forgets the identity and somebody else runs.
    assert!(store.forget_forced(&id("k")));
    store.claim(&id("k"), fp("")).won().complete(outcome("2")).unwrap();
    assert_eq!(heirs[0].poll().completed(), outcome("2"));
    assert_eq!(heirs.remove(1).wait.into_pending().unwrap().age(), Duration::ZERO);
    assert_eq!(heirs[1].poll().completed(), outcome("2"));
    assert_eq!((store.stats().lost, store.stats().won), (0, 3));
}

#[test]
fn r14_an_answer_goes_to_those_who_wait_and_to_nobody_else() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> = (0..3).map(|_| listed(&store, "k")).collect();
    let thread = waiting_thread(&store, "k");
    permit.release_with(outcome("busy")).unwrap();
    for task in &mut tasks {
        match task.poll() {
            Some(Settled::Answered(answer)) => assert_eq!(answer, outcome("busy")),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(thread.join().unwrap(), Settled::Answered(it) if it == outcome("busy")));
    assert_eq!((store.stats().keys, store.stats().handed_over), (0, 0));
    store.claim(&id("k"), fp("other")).won().release().unwrap();
}

#[test]
fn r14_old_waiters_get_the_old_outcome_and_new_ones_the_new() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut old = listed(&store, "k");
    let mut late = Task::new(store.claim(&id("k"), fp("")).pending());
    permit.complete(outcome("old")).unwrap();
    // Before they look, the identity is forgotten, claimed anew and completed.
    assert!(store.forget(&id("k")).unwrap());
    let permit = store.claim(&id("k"), fp("")).won();
    let mut new = listed(&store, "k");
    assert_eq!(old.poll().completed(), outcome("old"));
    assert_eq!(new.wakes(), 0);
    permit.complete(outcome("new")).unwrap();
    assert_eq!(late.poll().completed(), outcome("old"));
    assert_eq!(new.poll().completed(), outcome("new"));
}

#[test]
fn r14_old_waiters_get_the_old_answer() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut old = listed(&store, "k");
    permit.release_with(outcome("busy")).unwrap();
    store.claim(&id("k"), fp("")).won().complete(outcome("new")).unwrap();
    assert!(matches!(old.poll(), Some(Settled::Answered(it)) if it == outcome("busy")));
}

#[test]
fn r14_a_waiter_whose_claim_was_forgotten_claims_anew() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> = (0..3).map(|_| listed(&store, "k")).collect();
    assert!(store.forget_forced(&id("k")));
    assert!(tasks.iter().all(|task| task.wakes() == 1));
    // One of them is the owner now, and the others wait for it.
    let second = tasks[1].poll().yours();
    assert!(tasks[0].poll().is_none() && tasks[2].poll().is_none());
    assert_eq!(permit.complete(outcome("1")).unwrap_err().cause(), LostCause::Ended);
    second.complete(outcome("2")).unwrap();
    assert_eq!(tasks[0].poll().completed(), outcome("2"));
    assert_eq!(tasks[2].poll().completed(), outcome("2"));
}

#[test]
fn r14_a_resolved_hold_is_seen_by_a_waiter_that_looks_late() {
    for release in [false, true] {
        let (store, _) = by_hand();
        let permit = store.claim(&id("k"), fp("")).won();
        let mut task = listed(&store, "k");
        permit.hold().unwrap();
        assert_eq!(task.wakes(), 1);
        if release {
            store.resolve(&id("k"), Resolution::Release).unwrap();
            task.poll().yours().release().unwrap();
        } else {
            store.resolve(&id("k"), Resolution::Complete(outcome("found"))).unwrap();
            assert_eq!(task.poll().completed(), outcome("found"));
        }
    }
}

#[test]
fn r14_a_late_release_of_a_hold_lets_the_next_caller_run() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    permit.release().unwrap();
    store.claim(&id("k"), fp("other")).won().release().unwrap();
}

#[test]
fn r14_a_lapsed_owner_that_releases_hands_over_too() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
        let permit = store.claim(&id("k"), fp("")).won();
        let mut task = listed(&store, "k");
        clock.advance(2 * LEASE);
        // Nobody has judged the lapse yet.
        permit.release().unwrap();
        task.poll().yours().complete(outcome("1")).unwrap();
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
    }
}

#[test]
fn r15_a_waiter_that_gives_up_removes_only_itself() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> = (0..5).map(|_| listed(&store, "k")).collect();
    let thread = waiting_thread(&store, "k");
    assert_eq!((store.stats().waiters, store.look_up(&id("k")).unwrap().waiters), (6, 6));
    drop(tasks.remove(4));
    drop(tasks.remove(2));
    drop(tasks.remove(0));
    let pending = store.claim(&id("k"), fp("")).pending();
    pending.wait_timeout(MS).unwrap_err();
    assert_eq!((store.stats().waiters, store.look_up(&id("k")).unwrap().waiters), (3, 3));
    assert_eq!(store.look_up(&id("k")).unwrap().state, EntryState::InFlight);
    permit.complete(outcome("1")).unwrap();
    for task in &mut tasks {
        assert_eq!(task.poll().completed(), outcome("1"));
    }
    assert_eq!(thread.join().unwrap().completed(), outcome("1"));
    assert_eq!(store.stats().waiters, 0);
}

#[test]
fn r15_a_waiter_that_stops_may_go_on_later() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let task = listed(&store, "k");
    let pending = task.wait.into_pending().unwrap();
    assert_eq!(store.stats().waiters, 0);
    let never_polled = pending.wait().into_pending().unwrap();
    let mut task = Task::listed(never_polled);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
}

#[test]
fn r15_caps_for_each_identity_and_in_all_refuse_at_once() {
    let _watchdog = watchdog();
    let (store, _) = by_hand_with(|builder| builder.max_waiters_per_key(3).max_waiters(5));
    let a = store.claim(&id("a"), fp("")).won();
    let b = store.claim(&id("b"), fp("")).won();
    let refused = |key| {
        let pending = store.claim(&id(key), fp("")).pending();
        assert!(matches!(pending.wait_timeout(LONG), Ok(Settled::TooMany)));
        let mut task = Task::new(store.claim(&id(key), fp("")).pending());
        assert!(matches!(task.poll(), Some(Settled::TooMany)));
    };
    let mut of_a = vec![listed(&store, "a"), listed(&store, "a")];
    let thread = waiting_thread(&store, "a");
    refused("a");
    let mut of_b = vec![listed(&store, "b"), listed(&store, "b")];
    refused("b");
    assert_eq!((store.stats().waiters, store.stats().refused_waiters), (5, 4));
    // A place that was given up is free, for whoever may have it.
    drop(of_a.pop());
    refused_not(&store, "a");
    refused_not(&store, "b");
    of_b.push(listed(&store, "b"));
    refused("a");
    refused("b");
    // Who waits is not disturbed by any of it.
    a.complete(outcome("a")).unwrap();
    b.complete(outcome("b")).unwrap();
    assert_eq!(of_a[0].poll().completed(), outcome("a"));
    assert_eq!(thread.join().unwrap().completed(), outcome("a"));
    for task in &mut of_b {
        assert_eq!(task.poll().completed(), outcome("b"));
    }
    assert_eq!(store.stats().waiters, 0);
}

fn refused_not(store: &Store, key: &str) {
    drop(listed(store, key));
}

#[test]
fn r15_a_cap_of_zero_means_that_nobody_waits() {
    let _watchdog = watchdog();
    for per_key in [true, false] {
        let (store, _) = by_hand_with(|builder| {
            if per_key { builder.max_waiters_per_key(0) } else { builder.max_waiters(0) }
        });
        let permit = store.claim(&id("k"), fp("")).won();
        let pending = store.claim(&id("k"), fp("")).pending();
        assert!(matches!(pending.wait_timeout(LONG), Ok(Settled::TooMany)));
        permit.release().unwrap();
        assert_eq!((store.stats().keys, store.stats().waiters), (0, 0));
    }
}

#[test]
fn r15_the_waker_of_the_last_poll_counts() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = listed(&store, "k");
    let (told, by) = mpsc::channel();
    struct Tell(mpsc::Sender<()>);
    impl std::task::Wake for Tell {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }
    // The task moves to another executor.
    let waker = Waker::from(Arc::new(Tell(told)));
    let mut cx = Context::from_waker(&waker);
    for _ in 0..3 {
        assert!(Future::poll(Pin::new(&mut task.wait), &mut cx).is_pending());
    }
    permit.complete(outcome("1")).unwrap();
    assert_eq!((by.try_iter().count(), task.wakes()), (1, 0));
    assert_eq!(task.poll().completed(), outcome("1"));
}

fn large(n: u64) -> Outcome {
    Outcome::new(u16::try_from(n % 400).unwrap() + 200)
        .header("set-cookie", format!("a={n}; Expires=Wed, 21 Oct 2026 07:28:00 GMT"))
        .header("x-raw", b"\xff\xfe")
        .header("set-cookie", format!("b={n}"))
        .header("", "")
        .body(n.to_string().repeat(5_000))
}

#[test]
fn r16_the_same_status_lines_and_bytes_come_back_to_all() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = listed(&store, "k");
    permit.complete(large(7)).unwrap();
    let waited = task.poll().completed();
    let replayed = store.claim(&id("k"), fp("")).replayed();
    let observed = match store.observe(&id("k"), fp("")) {
        Some(Claim::Replay(replay)) => replay.into_outcome(),
        other => panic!("{other:?}"),
    };
    let lines: Vec<_> = waited.header_lines().collect();
    assert_eq!(lines[0].1, b"a=7; Expires=Wed, 21 Oct 2026 07:28:00 GMT");
    assert_eq!(lines[1], (&b"x-raw"[..], &b"\xff\xfe"[..]));
    assert_eq!(lines[2], (&b"set-cookie"[..], &b"b=7"[..]));
    assert_eq!(lines[3], (&b""[..], &b""[..]));
    for other in [waited, replayed, observed] {
        assert_eq!(other, large(7));
    }
}

#[test]
fn r16_an_outcome_is_whole_or_absent_to_whoever_looks() {
    let _watchdog = watchdog();
    let rounds = if cfg!(debug_assertions) { 1_000 } else { 10_000 };
    let (store, _) = by_hand();
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..rounds {
                    let key = round.to_string();
                    barrier.wait();
                    loop {
                        match store.observe(&id(&key), fp("")) {
                            Some(Claim::Replay(replay)) => {
                                assert_eq!(replay.outcome(), &large(round));
                                break;
                            }
                            Some(Claim::InFlight(_)) | None => std::hint::spin_loop(),
                            other => panic!("{other:?}"),
                        }
                    }
                }
            });
        }
        for round in 0..rounds {
            let key = round.to_string();
            let whole = large(round);
            barrier.wait();
            store.claim(&id(&key), fp("")).won().complete(whole).unwrap();
        }
    });
}
