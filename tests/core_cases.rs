//! Faults that other stores, caches and timers really had, as far as the core can have them.
//!
//! The number in a name is that of the case in the project's log of public fault reports; the first
//! line of a test says what went wrong there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use std::{
    collections::HashMap,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use oncekey::{
    Claim, ClaimError, Clock, EntryState, Identity, Lapse, LostCause, ManualClock, Outcome,
    Resolution, Settled, Store, Sweep, SystemClock,
};
use tokio::runtime::{Builder, Runtime};

mod common;

use common::*;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap()
}

/// Claims `key`, waits if it must, runs `work` if it becomes the owner. Answers what everybody got.
async fn run_once(store: &Store, key: &str, work: impl AsyncFnOnce() -> String) -> Outcome {
    let settled = match store.claim(&id(key), same()).unwrap() {
        Claim::Won(permit) => Settled::Yours(permit),
        Claim::Replay(replay) => return replay.into_outcome(),
        Claim::InFlight(pending) => pending.wait().await,
        other => panic!("{other:?}"),
    };
    match settled {
        Settled::Yours(permit) => {
            let answer = outcome(&work().await);
            assert!(permit.complete(answer.clone()).unwrap().kept);
            answer
        }
        settled => settled.completed(),
    }
}

/// The store wrote its in-flight record without looking whether one was there: both ran.
#[test]
fn case_001_one_of_64_racing_tasks_owns_the_key_and_only_that_one_runs() {
    // A tenth under a sanitizer.
    const KEYS: usize = if cfg!(oncekey_core) { 1_000 } else { 10_000 };
    const AT_A_TIME: usize = 500;
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let store = Store::builder().lease(LONG).max_waiters(usize::MAX).build().unwrap();
    let ran = Arc::new(AtomicUsize::new(0));
    let runtime = runtime();
    for batch in 0..KEYS / AT_A_TIME {
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for key in 0..AT_A_TIME {
                let barrier = Arc::new(tokio::sync::Barrier::new(64));
                for task in 0..64 {
                    let (store, ran) = (store.clone(), Arc::clone(&ran));
                    let barrier = Arc::clone(&barrier);
                    tasks.spawn(async move {
                        let key = format!("{batch}-{key}");
                        barrier.wait().await;
                        let work = async || {
                            ran.fetch_add(1, Ordering::SeqCst);
                            // The length of the handler, not a wait for anything.
                            tokio::time::sleep(20 * MS).await;
                            format!("{key} by {task}")
                        };
                        let answer = run_once(&store, &key, work).await;
                        (key.clone(), answer)
                    });
                }
            }
            let mut answers: HashMap<String, Outcome> = HashMap::new();
            while let Some(task) = tasks.join_next().await {
                let (key, answer) = task.unwrap();
                let first = answers.entry(key).or_insert_with(|| answer.clone());
                assert_eq!(*first, answer);
            }
        });
    }
    assert_eq!(ran.load(Ordering::SeqCst), KEYS);
    let stats = store.stats();
    assert_eq!((stats.won, stats.completed, stats.in_flight), (KEYS as u64, KEYS as u64, 0));
}

/// Threads and tasks together: the one list for both.
#[test]
fn case_001_exactly_one_owner_among_64_tasks_and_16_threads_and_all_get_its_bytes() {
    const KEYS: usize = 10_000;
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let store = Store::builder().lease(LONG).build().unwrap();
    let owners: Arc<Vec<Mutex<Option<Outcome>>>> =
        Arc::new((0..KEYS).map(|_| Mutex::new(None)).collect());
    let own = move |owners: &[Mutex<Option<Outcome>>], key: usize, who: String| {
        let answer = outcome(&who);
        let before = owners[key].lock().unwrap().replace(answer.clone());
        assert!(before.is_none(), "{key} has a second owner: {before:?} and {who}");
        answer
    };
    let runtime = runtime();
    let start = Arc::new(Barrier::new(17));
    let threads: Vec<_> = (0..16)
        .map(|number| {
            let (store, owners, start) = (store.clone(), Arc::clone(&owners), Arc::clone(&start));
            thread::spawn(move || {
                start.wait();
                (0..KEYS).for_each(|key| {
                    let name = key.to_string();
                    let settled = match store.claim(&id(&name), same()).unwrap() {
                        Claim::InFlight(pending) => pending.wait_timeout(LONG).unwrap(),
                        Claim::Won(permit) => Settled::Yours(permit),
                        Claim::Replay(replay) => Settled::Completed(replay),
                        other => panic!("{other:?}"),
                    };
                    let got = match settled {
                        Settled::Yours(permit) => {
                            let answer = own(&owners, key, format!("thread {number}"));
                            permit.complete(answer.clone()).unwrap();
                            answer
                        }
                        settled => settled.completed(),
                    };
                    assert_eq!(owners[key].lock().unwrap().as_ref(), Some(&got));
                });
            })
        })
        .collect();
    let tasks: Vec<_> = (0..64)
        .map(|number| {
            let (store, owners) = (store.clone(), Arc::clone(&owners));
            runtime.spawn(async move {
                for key in 0..KEYS {
                    let name = key.to_string();
                    let work = async || {
                        let who = format!("task {number}");
                        own(&owners, key, who.clone());
                        if key % 4 == 0 {
                            tokio::task::yield_now().await;
                        }
                        who
                    };
                    let got = run_once(&store, &name, work).await;
                    assert_eq!(owners[key].lock().unwrap().as_ref(), Some(&got));
                }
            })
        })
        .collect();
    start.wait();
    for thread in threads {
        thread.join().unwrap();
    }
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
    let stats = store.stats();
    assert_eq!((stats.won, stats.completed), (KEYS as u64, KEYS as u64));
    assert_eq!((stats.in_flight, stats.waiters, stats.lost), (0, 0, 0));
}

/// Two runs of one key each wrote their record: the last one replaced the first.
#[test]
fn case_005_of_two_completions_of_one_claim_the_first_wins() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    store.sweep();
    // The first settles what is held; a second completion of the same claim comes late.
    store.resolve(&id("k"), Resolution::Complete(outcome("first"))).unwrap();
    let lost = permit.complete(outcome("second")).unwrap_err();
    assert_eq!(lost.cause(), LostCause::Completed);
    assert_eq!(lost.to_string(), "lost: the identity is completed already");
    assert_eq!(lost.into_outcome(), Some(outcome("second")));
    for _ in 0..3 {
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("first"));
    }
}

/// The clean-up deleted another key than was locked, and nobody noticed that it deleted nothing.
#[test]
fn case_017_a_release_is_of_the_very_key_and_an_unknown_one_is_an_error() {
    for key in [r#"a"b"#, "a:b:c", r"back\slash", "*", " spaced ", "'; --", "%00", "a,b"] {
        let (store, clock) = by_hand();
        let neighbour = format!("{key}:");
        let other = store.claim(&id(&neighbour), fp("")).won();
        let permit = store.claim(&id(key), fp("")).won();
        permit.release().unwrap();
        clock.advance(SECOND);
        store.claim(&id(key), fp("")).won().release().unwrap();
        assert_eq!(store.look_up(&id(&neighbour)).unwrap().state, EntryState::InFlight);
        other.release().unwrap();
        // Nothing to release, nothing to complete: said so.
        let gone = store.claim(&id(key), fp("")).won();
        assert!(store.forget_forced(&id(key)));
        assert_eq!(gone.release().unwrap_err().cause(), LostCause::Ended);
        assert!(store.resolve(&id(key), Resolution::Release).is_err());
        assert_eq!(store.forget(&id(key)), Ok(false));
        assert_eq!(store.stats().keys, 0);
    }
}

/// A caller saw a run in progress, paused, and registered after the owner had gone.
///
/// The owner's end and the registration meet here, again and again, at another distance each time.
/// Had the waiter not looked again once it stood in the list, it would wait for nobody: the
/// watchdog would end the process.
#[test]
fn case_023_no_waiter_registers_behind_the_owners_back() {
    const ROUNDS: usize = 100_000;
    let _watchdog = watchdog_of(Duration::from_secs(120));
    let (store, _) = by_hand();
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut dice = Dice::new(23);
            for round in 0..ROUNDS {
                let permit = store.claim(&id("k"), same()).won();
                barrier.wait();
                for _ in 0..dice.roll(200) {
                    std::hint::spin_loop();
                }
                match round % 5 {
                    0 => permit.complete_not_kept().unwrap().kept,
                    1 => permit.complete(Outcome::new(200)).unwrap().kept,
                    2 => permit.release().is_ok(),
                    3 => permit.release_with(Outcome::new(503)).is_ok(),
                    _ => permit.hold().is_ok(),
                };
                barrier.wait();
                store.forget(&id("k")).unwrap();
                barrier.wait();
            }
        });
        let mut dice = Dice::new(32);
        for round in 0..ROUNDS {
            barrier.wait();
            for _ in 0..dice.roll(200) {
                std::hint::spin_loop();
            }
            // Half of the rounds as a thread and half as a task.
            let settled = match store.claim(&id("k"), same()).unwrap() {
                Claim::InFlight(pending) if round % 2 == 0 => block_on(pending.wait()),
                Claim::InFlight(pending) => pending.wait_timeout(LONG).unwrap(),
                Claim::Won(permit) => Settled::Yours(permit),
                _ => Settled::Held,
            };
            if let Settled::Yours(permit) = settled {
                permit.release().unwrap();
            }
            barrier.wait();
            barrier.wait();
        }
    });
    assert_eq!((store.stats().waiters, store.stats().in_flight), (0, 0));
}

/// Waiters slept behind an abandoned reservation until some other call touched the key.
#[test]
fn case_027_a_leaked_permit_wakes_its_waiters_at_the_end_of_the_lease_without_traffic() {
    let _watchdog = watchdog();
    let runtime = runtime();
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        // Each kind alone too, because a thread that wakes tells the tasks.
        for [threads, tasks] in [[3, 0], [0, 3], [3, 3]] {
            leak_and_wait(&runtime, on_lapse, threads, tasks);
        }
    }
}

fn leak_and_wait(runtime: &Runtime, on_lapse: Lapse, threads: usize, tasks: usize) {
    // A tick far longer than the test: the waiters do not depend on it. Who sleeps until the
    // end of the lease sleeps in real time, and then looks at a clock that is moved by hand: so the
    // lease lapses when all are there, however slow the machine is.
    let clock = ManualClock::new();
    let builder = Store::builder().lease(100 * MS).tick(LONG).on_lapse(on_lapse);
    let store = builder.clock(clock.clone()).build().unwrap();
    std::mem::forget(store.claim(&id("k"), fp("")).won());
    let pending = || store.claim(&id("k"), fp("")).pending();
    let all = tasks + threads;
    let tasks: Vec<_> = (0..tasks)
        .map(|_| pending())
        .map(|pending| runtime.spawn(async { finish(pending.wait().await) }))
        .collect();
    let threads: Vec<_> = (0..threads)
        .map(|_| pending())
        .map(|pending| thread::spawn(|| finish(pending.wait_timeout(LONG).unwrap())))
        .collect();
    until(|| store.stats().waiters == all);
    clock.advance(100 * MS);
    let mut ran = 0;
    let ends = threads.into_iter().map(|thread| thread.join().unwrap());
    for end in ends.chain(tasks.into_iter().map(|task| runtime.block_on(task).unwrap())) {
        match (on_lapse, end) {
            (Lapse::Hold, End::Held) | (Lapse::TakeOver, End::Replayed) => {}
            (Lapse::TakeOver, End::Ran) => ran += 1,
            (_, other) => panic!("{on_lapse:?}: {other:?}"),
        }
    }
    // Who has judged the lapse counts it, perhaps after a thread has seen what came of it.
    until(|| store.stats().lapsed > 0 && store.stats().in_flight == 0);
    let stats = store.stats();
    assert_eq!((stats.in_flight, stats.waiters, stats.lapsed), (0, 0, 1));
    assert_eq!(ran, usize::from(on_lapse == Lapse::TakeOver));
}

#[derive(Debug)]
enum End {
    Ran,
    Replayed,
    Held,
}

fn finish(settled: Settled) -> End {
    match settled {
        Settled::Yours(permit) => {
            permit.complete(outcome("second")).unwrap();
            End::Ran
        }
        Settled::Completed(replay) => {
            assert_eq!(replay.outcome(), &outcome("second"));
            End::Replayed
        }
        Settled::Held => End::Held,
        other => panic!("{other:?}"),
    }
}

/// Asking for a key from inside the work for a key blocked the cache.
#[test]
fn case_030_work_may_use_the_store_for_its_own_key_and_for_any_other() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let outer = store.claim(&id("outer"), fp("")).won();
    let inner = store.claim(&id("outer"), fp("")).pending();
    assert!(inner.wait_timeout(MS).is_err());
    // So many that some stand beside the outer one, wherever that is.
    let mut permits = Vec::new();
    for n in 0..2_000 {
        let key = n.to_string();
        let permit = store.claim(&id(&key), fp("")).won();
        if n % 2 == 0 {
            permit.complete(outcome(&key)).unwrap();
            store.claim(&id(&key), fp("")).replayed();
        } else {
            permits.push(permit);
        }
    }
    outer.complete(outcome("outer")).unwrap();
    assert_eq!(store.stats().in_flight, permits.len());
}

/// The lock ran out during a long job; the job's clean-up then deleted the next one's lock.
#[test]
fn case_033_a_late_release_does_not_end_the_claim_of_another() {
    let (store, clock) = by_hand_with(|builder| builder.lease(100 * MS).on_lapse(Lapse::TakeOver));
    let a = store.claim(&id("k"), fp("")).won();
    clock.advance(150 * MS);
    let b = store.claim(&id("k"), fp("")).won();
    assert!(b.token().number() > a.token().number());
    clock.advance(90 * MS);
    b.renew().unwrap();
    clock.advance(10 * MS);
    let token = b.token();
    assert_eq!(a.release().unwrap_err().cause(), LostCause::Ended);
    clock.advance(10 * MS);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::InFlight(_))));
    assert_eq!(store.look_up(&id("k")).unwrap().token, token);
    b.complete(outcome("b")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("b"));
}

/// A stalled first attempt overwrote the result of the second.
#[test]
fn case_036_a_late_completion_does_not_overwrite_the_one_that_took_over() {
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    let a = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    let b = store.claim(&id("k"), fp("")).won();
    b.complete(outcome("b")).unwrap();
    let lost = a.complete(outcome("a")).unwrap_err();
    assert_eq!(lost.into_outcome(), Some(outcome("a")));
    for _ in 0..3 {
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("b"));
    }
    let stats = store.stats();
    assert_eq!((stats.lost, stats.completed, stats.taken_over), (1, 1, 1));
}

/// The client's key alone was the key of the store: one user got another's answer.
#[test]
fn case_038_accounts_share_nothing() {
    let (store, _) = by_hand();
    let of = |account| Identity::new(account, "POST /charges", "k").unwrap();
    // The empty account is one account among others.
    for account in ["alice", "bob", ""] {
        store.claim(&of(account), fp("")).won().complete(outcome(account)).unwrap();
    }
    for account in ["alice", "bob", ""] {
        assert_eq!(store.claim(&of(account), fp("")).replayed(), outcome(account));
    }
    assert_eq!(store.forget_account("alice"), 1);
    store.claim(&of("bob"), fp("")).replayed();
    // Nor do endpoints.
    let other = Identity::new("bob", "POST /refunds", "k").unwrap();
    store.claim(&other, fp("")).won().release().unwrap();
}

/// Another write under the same id got the first one's answer and was never executed.
#[test]
fn case_040_another_body_is_a_mismatch_and_touches_nothing() {
    let (store, _) = by_hand();
    store.claim(&id("k"), fp("x")).won().complete(outcome("x")).unwrap();
    let before = store.look_up(&id("k")).unwrap();
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(store.look_up(&id("k")).unwrap(), before);
    assert_eq!(store.claim(&id("k"), fp("x")).replayed(), outcome("x"));
}

/// Parts were joined without boundaries: different tuples made one key.
#[test]
fn case_042_parts_are_framed() {
    let (store, _) = by_hand();
    let tuples: [[&str; 3]; 10] = [
        ["a:b", "c", "k"],
        ["a", "b:c", "k"],
        ["ab", "c", "k"],
        ["a", "bc", "k"],
        ["", "abc", "k"],
        ["abc", "", "k"],
        ["a\0", "bc", "k"],
        ["a", "\0bc", "k"],
        ["a", "b", "ck"],
        ["a|b", "c", "k"],
    ];
    let all: Vec<_> = tuples
        .iter()
        .map(|[account, endpoint, key]| {
            let identity = Identity::new(*account, *endpoint, *key).unwrap();
            store.claim(&identity, fp("")).won()
        })
        .collect();
    assert_eq!(store.stats().in_flight, all.len());
    // The parts of a fingerprint too.
    let of = |parts: [&str; 2]| {
        let builder = oncekey::Fingerprint::builder(oncekey::Scheme::named("test"));
        builder.part(parts[0].as_bytes()).part(parts[1].as_bytes()).finish()
    };
    assert_ne!(of(["ab", "c"]), of(["a", "bc"]));
    assert_ne!(of(["a:b", "c"]), of(["a", "b:c"]));
    assert_ne!(of(["", "abc"]), of(["abc", ""]));
}

/// The state was checked before the digest: another body was told "in flight".
#[test]
fn case_049_another_body_is_a_mismatch_at_once_while_the_first_runs() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("x")).won();
    let before = store.look_up(&id("k")).unwrap();
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(store.look_up(&id("k")).unwrap(), before);
    permit.complete(outcome("x")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("x")).replayed(), outcome("x"));
}

/// Passing errors were pinned to the key for a day: no retry could succeed.
#[test]
fn case_053_what_was_released_runs_again_and_what_was_completed_does_not() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    permit.release_with(Outcome::new(503)).unwrap();
    clock.advance(SECOND);
    let permit = store.claim(&id("k"), fp("")).won();
    permit.complete(Outcome::new(402).body("declined")).unwrap();
    clock.advance(SECOND);
    let kept = store.claim(&id("k"), fp("")).replayed();
    assert_eq!((kept.status(), &kept.bytes()[..]), (402, &b"declined"[..]));
}

/// A timer's range of 2^36 ms ended after 2.2 years: it panicked.
#[test]
fn case_068_records_end_on_time_across_every_wrap_of_the_timers() {
    let _watchdog = watchdog();
    let retention = Duration::from_millis(10_000);
    let (store, clock) = by_hand_with(|builder| builder.retention(retention));
    let mut now: u64 = 0;
    // 64^n for the levels of a wheel, 2^32 and 2^36 for counters, up to a hundred years.
    let wraps = (1..=41).map(|bit| 1_u64 << bit).filter(|wrap| *wrap > 20_000);
    for (n, wrap) in wraps.enumerate() {
        // From a little before the wrap to a little after it.
        for before in [9_999, 5_000, 1] {
            let key = format!("{n} {before}");
            clock.advance(Duration::from_millis((wrap - before).saturating_sub(now)));
            now = now.max(wrap - before);
            store.claim(&id(&key), fp("")).won().complete(outcome(&key)).unwrap();
            store.sweep();
        }
        for before in [9_999, 5_000, 1] {
            let key = format!("{n} {before}");
            let end = wrap - before + 10_000;
            clock.advance(Duration::from_millis(end - 1 - now));
            store.sweep();
            assert_eq!(store.claim(&id(&key), fp("")).replayed(), outcome(&key), "{wrap}");
            clock.advance(MS);
            assert!(store.look_up(&id(&key)).is_none(), "{wrap}");
            now = end;
        }
        clock.advance(SECOND);
        now += 1_000;
        store.sweep();
        assert_eq!((store.stats().keys, store.stats().bytes), (0, 0), "{wrap}");
    }
    assert!(Duration::from_millis(now) > 25 * 365 * DAY);
}

/// A huge lifetime overflowed: a panic in one build, "expired already" in the other.
#[test]
fn case_072_no_duration_overflows_or_means_none() {
    type Build = fn(Duration) -> Result<Store, oncekey::ConfigError>;
    let build: Build = |span| {
        let builder = Store::builder().sweep(Sweep::Manual).clock(ManualClock::new());
        builder.retention(span).lease(span).max_run(span).tick(span).build()
    };
    assert!(build(Duration::ZERO).is_err());
    for span in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_nanos(1)] {
        let store = build(span).unwrap();
        let permit = store.claim(&id("k"), fp("")).won();
        permit.renew().unwrap();
        permit.attend().unwrap();
        store.sweep();
        assert_eq!(store.look_up(&id("k")).unwrap().state, EntryState::InFlight);
        permit.complete(outcome("1")).unwrap();
        store.sweep();
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
    }
}

/// Expiry followed the wall clock. Here nothing asks it: `tests/layers.rs` holds that no file does.
#[test]
fn case_074_a_minute_of_the_monotonic_clock_ends_nothing() {
    let (store, clock) = by_hand();
    store.claim(&id("k"), fp("")).won().complete(outcome("1")).unwrap();
    let permit = store.claim(&id("l"), fp("")).won();
    clock.advance(LEASE - MS);
    store.sweep();
    store.claim(&id("k"), fp("")).replayed();
    assert!(matches!(store.claim(&id("l"), fp("")), Ok(Claim::InFlight(_))));
    permit.release().unwrap();
}

/// One entry that never finished stood at the head of a queue: nothing behind it expired.
#[test]
fn case_076_an_endless_claim_stops_the_expiry_of_nobody() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
        let endless = store.claim(&id("endless"), same()).won();
        for n in 0..10_000 {
            let key = n.to_string();
            store.claim(&id(&key), same()).won().complete(Outcome::new(200)).unwrap();
        }
        clock.advance(25 * HOUR);
        store.sweep();
        // A lapsed claim that may be taken over is kept for a retention and not held anew.
        let stats = store.stats();
        match on_lapse {
            Lapse::Hold => assert_eq!((stats.expired, stats.keys, stats.held), (10_000, 1, 1)),
            Lapse::TakeOver => assert_eq!((stats.expired, stats.keys), (10_001, 0)),
        }
        let claim = store.claim(&id("endless"), same()).unwrap();
        match (on_lapse, claim) {
            (Lapse::Hold, Claim::Held) => drop(endless.complete(outcome("late")).unwrap()),
            (Lapse::TakeOver, Claim::Won(second)) => {
                second.release().unwrap();
                assert!(endless.complete(outcome("late")).is_err());
            }
            (_, other) => panic!("{on_lapse:?}: {other:?}"),
        }
    }
}

/// Lifetime counted from the start of the work: what took long was stale when it was ready.
#[test]
fn case_078_lifetime_counts_from_the_completion() {
    let (store, clock) = by_hand_with(|builder| builder.retention(SECOND));
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    clock.advance(1_500 * MS);
    store.sweep();
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
    clock.advance(500 * MS);
    store.sweep();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
    clock.advance(500 * MS);
    assert!(store.look_up(&id("k")).is_none());
}

/// Expiry ran only while the cache was used: without traffic the count never fell.
#[test]
fn case_080_keys_and_bytes_fall_to_zero_without_traffic() {
    let _watchdog = watchdog();
    let store = Store::builder().retention(300 * MS).tick(50 * MS).build().unwrap();
    for n in 0..100_000 {
        let key = n.to_string();
        store.claim(&id(&key), same()).won().complete(Outcome::new(200).body("1")).unwrap();
    }
    // The sweep gives the room of the last ones back, and then counts them.
    until(|| {
        let stats = store.stats();
        (stats.keys, stats.bytes) == (0, 0) && stats.expired >= 100_000
    });
    assert_eq!((store.stats().expired, store.stats().sweep_panics), (100_000, 0));
}

/// A live key was dropped to make room. Here the newest write is refused instead.
#[test]
fn case_084_a_full_store_refuses_and_drops_no_live_record() {
    for by_bytes in [false, true] {
        let (store, _) =
            by_hand_with(
                |builder| {
                    if by_bytes { builder.max_bytes(1 << 20) } else { builder.max_keys(200) }
                },
            );
        let mut live = Vec::new();
        let mut running = Vec::new();
        let mut refused = 0;
        for n in 0..5_000 {
            let key = n.to_string();
            match store.claim(&id(&key), fp("")) {
                Ok(Claim::Won(permit)) if n % 3 == 0 => {
                    permit.complete(outcome(&key)).unwrap();
                    live.push(key);
                }
                Ok(Claim::Won(permit)) if n % 3 == 1 => permit.hold().unwrap(),
                Ok(Claim::Won(permit)) => running.push(permit),
                Err(ClaimError::Full { .. }) => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(live.len() > 50 && refused > 4_000, "{} live, {refused} refused", live.len());
        for key in &live {
            assert_eq!(store.claim(&id(key), fp("")).replayed(), outcome(key));
        }
        for permit in &running {
            assert!(permit.renew().is_ok());
        }
        assert_eq!(store.stats().won + refused, 5_000);
    }
}

/// A guard of the map lived over an await: the one thread of the executor blocked itself.
#[test]
fn case_091_many_handlers_that_await_share_one_thread() {
    let _watchdog = watchdog();
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let store = Store::builder().lease(LONG).build().unwrap();
    let tasks = tokio::task::LocalSet::new();
    let ran = Arc::new(AtomicUsize::new(0));
    let all: Vec<_> = (0..8_000)
        .map(|n| {
            let (store, ran) = (store.clone(), Arc::clone(&ran));
            tasks.spawn_local(async move {
                let key = (n % 2_000).to_string();
                let work = async || {
                    ran.fetch_add(1, Ordering::SeqCst);
                    for _ in 0..3 {
                        tokio::task::yield_now().await;
                        // The work uses the store too.
                        assert!(store.look_up(&id(&key)).is_some());
                    }
                    key.clone()
                };
                assert_eq!(run_once(&store, &key, work).await, outcome(&key));
            })
        })
        .collect();
    tasks.block_on(&runtime, async {
        for task in all {
            task.await.unwrap();
        }
    });
    assert_eq!(ran.load(Ordering::SeqCst), 2_000);
}

/// The housekeeping could panic, and nobody saw it.
#[test]
fn case_099_a_panic_of_the_sweep_is_counted_and_the_sweep_goes_on() {
    /// Panics, while armed, when the sweep's own thread asks for the time.
    #[derive(Clone, Default)]
    struct Trap {
        armed: Arc<AtomicBool>,
        real: SystemClock,
    }
    impl Clock for Trap {
        fn now(&self) -> Duration {
            let in_sweep = thread::current().name() == Some("oncekey-sweep");
            assert!(!(in_sweep && self.armed.load(Ordering::SeqCst)), "seeded by the test");
            self.real.now()
        }
    }
    let _watchdog = watchdog();
    let trap = Trap::default();
    let builder = Store::builder().clock(trap.clone()).retention(10 * MS).tick(10 * MS);
    let store = builder.build().unwrap();
    trap.armed.store(true, Ordering::SeqCst);
    for n in 0..100 {
        let key = n.to_string();
        store.claim(&id(&key), fp("")).won().complete(outcome(&key)).unwrap();
    }
    until(|| store.stats().sweep_panics > 0);
    // Claims go on in the meantime, and the records are reaped once it works again.
    store.claim(&id("new"), fp("")).won().complete(outcome("1")).unwrap();
    trap.armed.store(false, Ordering::SeqCst);
    until(|| store.stats().keys == 0);
    assert!(store.stats().sweep_alive);
}
