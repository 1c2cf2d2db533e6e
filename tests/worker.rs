//! The worker API over a store in memory and over one with a tier: what the work says, what it does not
//! say, waiting, batches, transactions, values.
//!
//! Time is tokio's, and it stands still while anybody has something to do; the tests of the blocking
//! twin wait for events under a watchdog.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/tiers.rs"]
mod tiers;
#[path = "common/workers.rs"]
mod workers;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use oncekey::{
    Abandon, ClaimError, EntryState, Fingerprint, Identity, Lapse, Outcome, Resolution, Store,
    StoreBuilder,
    tier::{MemoryTier, State, Tiered},
    worker::{
        Codec as _, CodecError, Disposition, Job, JobError, Json, Ran, RunError, Verdict, Worker,
        disposition,
    },
};
use tokio::time::{Instant, sleep, timeout};

use common::{until, watchdog};
use tiers::{CLAIM, COMPLETE, RELEASE, Tx, Weather, Wire};
use workers::{
    LEASE, MAX_RUN, SECOND, both, both_with, done, fp, id, never, node, outcome, poll, settle,
    state, store_with, text, wire,
};

#[tokio::test(start_paused = true)]
async fn r16_done_work_runs_once_and_is_replayed() {
    for (worker, _) in both().await {
        let first = worker.run(&id("k"), fp("b"), |_| async { done("1") }).await.unwrap();
        assert_eq!((text(&first), first.replayed, first.kept), ("1", false, true));
        let again = worker.run(&id("k"), fp("b"), never).await.unwrap();
        assert_eq!((text(&again), again.replayed), ("1", true));
        assert!(matches!(worker.run(&id("k"), fp("c"), never).await, Err(RunError::Mismatch)));
    }
}

#[tokio::test(start_paused = true)]
async fn r07_of_64_workers_with_one_message_one_runs_it() {
    for (worker, _) in both().await {
        let runs = Arc::new(AtomicUsize::new(0));
        let tasks: Vec<_> = (0..64)
            .map(|_| {
                let (worker, runs) = (worker.clone(), Arc::clone(&runs));
                tokio::spawn(async move {
                    let work = |_| async move {
                        sleep(SECOND).await;
                        done(&format!("run {}", runs.fetch_add(1, Ordering::SeqCst)))
                    };
                    worker.run(&id("k"), fp("b"), work).await.unwrap()
                })
            })
            .collect();
        let mut ran = 0;
        for task in tasks {
            let one = task.await.unwrap();
            assert_eq!(text(&one), "run 0");
            ran += usize::from(!one.replayed);
        }
        assert_eq!((ran, runs.load(Ordering::SeqCst)), (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn r11_retry_lets_the_next_attempt_run_and_unknown_does_not() {
    for (worker, store) in both().await {
        let refused = worker.run(&id("k"), fp("b"), |_| async { Verdict::retry("closed") }).await;
        let Err(RunError::Retry(cause)) = refused else { panic!("{refused:?}") };
        assert_eq!(cause.to_string(), "closed");
        // It remembers nothing: another body may come.
        let unknown = worker.run(&id("k"), fp("c"), |_| async { Verdict::unknown("cut") }).await;
        assert!(matches!(&unknown, Err(RunError::Unknown(cause)) if cause.to_string() == "cut"));
        assert_eq!(disposition(&unknown), Disposition::DeadLetter);
        let held = worker.run(&id("k"), fp("c"), never).await;
        assert!(matches!(held, Err(RunError::Held)), "{held:?}");
        assert_eq!(store.look_up(&id("k")).map(|entry| entry.state), Some(EntryState::Held));
    }
}

#[tokio::test(start_paused = true)]
async fn r11_an_operator_resolves_what_is_unknown() {
    let store = store_with(|it| it);
    let _ = store.run(&id("k"), fp("b"), |_| async { Verdict::unknown("cut") }).await;
    store.resolve(&id("k"), Resolution::Complete(outcome("found"))).unwrap();
    assert_eq!(text(&store.run(&id("k"), fp("b"), never).await.unwrap()), "found");

    let tiered = node(&wire()).await;
    let _ = tiered.run(&id("k"), fp("b"), |_| async { Verdict::unknown("cut") }).await;
    tiered.resolve(&id("k"), None).await.unwrap();
    let ran = tiered.run(&id("k"), fp("b"), |_| async { done("2") }).await.unwrap();
    assert_eq!((text(&ran), ran.replayed), ("2", false));
}

#[tokio::test(start_paused = true)]
async fn r13_an_attempt_waits_for_another_owner_up_to_the_limit() {
    for (worker, _) in both().await {
        let owner = worker.clone();
        let running = tokio::spawn(async move {
            let work = |_| async {
                sleep(30 * SECOND).await;
                done("1")
            };
            owner.run(&id("k"), fp("b"), work).await
        });
        settle().await;
        let at = Instant::now();
        let early = worker.run(&id("k"), fp("b"), never).await;
        assert!(matches!(early, Err(RunError::InFlight)), "{early:?}");
        assert_eq!(disposition(&early), Disposition::Requeue { after: SECOND });
        assert_eq!(at.elapsed().as_secs(), 10);
        let impatient = worker.clone().wait_limit(Duration::ZERO);
        let at = Instant::now();
        assert!(matches!(impatient.run(&id("k"), fp("b"), never).await, Err(RunError::InFlight)));
        assert_eq!(at.elapsed(), Duration::ZERO);
        let patient = worker.clone().wait_limit(Duration::MAX);
        assert!(patient.run(&id("k"), fp("b"), never).await.unwrap().replayed);
        running.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn r14_when_an_owner_gives_up_one_of_those_who_wait_runs() {
    for (worker, _) in both().await {
        let owner = worker.clone();
        let running = tokio::spawn(async move {
            let work = |_| async {
                sleep(SECOND).await;
                Verdict::retry("closed")
            };
            owner.run(&id("k"), fp("b"), work).await
        });
        settle().await;
        let ran = worker.run(&id("k"), fp("b"), |_| async { done("2") }).await.unwrap();
        assert_eq!((text(&ran), ran.replayed), ("2", false));
        assert!(matches!(running.await.unwrap(), Err(RunError::Retry(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn r08_work_longer_than_its_lease_is_not_overrun() {
    for (worker, store) in both().await {
        let owner = worker.clone();
        let running = tokio::spawn(async move {
            let work = |_| async {
                sleep(10 * LEASE).await;
                done("1")
            };
            owner.run(&id("k"), fp("b"), work).await
        });
        for _ in 0..9 {
            sleep(LEASE).await;
            store.sweep();
            let other = worker.clone().wait_limit(Duration::ZERO);
            let met = other.run(&id("k"), fp("b"), never).await;
            assert!(matches!(met, Err(RunError::InFlight)), "{met:?}");
        }
        assert!(!running.await.unwrap().unwrap().replayed);
    }
}

#[tokio::test(start_paused = true)]
async fn r08_after_max_run_the_key_is_held_and_a_late_completion_settles_it() {
    for (worker, store) in both().await {
        let owner = worker.clone();
        let running = tokio::spawn(async move {
            let work = |_| async {
                sleep(MAX_RUN + 2 * SECOND).await;
                done("late")
            };
            owner.run(&id("k"), fp("b"), work).await
        });
        sleep(MAX_RUN + SECOND).await;
        store.sweep();
        let held = worker.run(&id("k"), fp("b"), never).await;
        assert!(matches!(held, Err(RunError::Held)), "{held:?}");
        assert_eq!(text(&running.await.unwrap().unwrap()), "late");
        settle().await;
        // What a tier holds is forgotten in memory after a second.
        sleep(2 * SECOND).await;
        assert_eq!(text(&worker.run(&id("k"), fp("b"), never).await.unwrap()), "late");
    }
}

#[tokio::test(start_paused = true)]
async fn r11_work_that_panics_or_is_dropped_is_settled_by_on_abandon() {
    for on_abandon in [Abandon::Hold, Abandon::Release] {
        let set = match on_abandon {
            Abandon::Hold => |it: StoreBuilder| it.on_abandon(Abandon::Hold),
            _ => |it: StoreBuilder| it.on_abandon(Abandon::Release),
        };
        for (worker, _) in both_with(set).await {
            let panics = worker.clone();
            let task = tokio::spawn(async move {
                let work = |_| async { panic!("on purpose") };
                let _ = panics.run(&id("panics"), fp("b"), work).await;
            });
            assert!(task.await.unwrap_err().is_panic());
            let limit = timeout(SECOND, async {
                let work = |_| async {
                    sleep(LEASE).await;
                    done("1")
                };
                worker.run(&id("dropped"), fp("b"), work).await
            });
            assert!(limit.await.is_err());
            // The tier is told in the background.
            sleep(5 * SECOND).await;
            for key in ["panics", "dropped"] {
                let next = worker.run(&id(key), fp("b"), |_| async { done("2") }).await;
                match on_abandon {
                    Abandon::Hold => assert!(matches!(next, Err(RunError::Held)), "{next:?}"),
                    _ => assert_eq!(text(&next.unwrap()), "2"),
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn t4_an_attempt_that_is_dropped_before_its_work_leaves_nothing() {
    let wire = wire();
    let tiered = node(&wire).await;
    let (mut before, mut after) = (0, 0);
    // Given up at each await, until the work has begun.
    for polls in 1..20 {
        let key = format!("k-{polls}");
        let begun = AtomicUsize::new(0);
        {
            let name = id(&key);
            let work = |_| {
                begun.fetch_add(1, Ordering::SeqCst);
                std::future::pending()
            };
            let mut attempt = pin!(tiered.run(&name, fp("b"), work));
            for _ in 0..polls {
                assert!(poll(attempt.as_mut()).is_pending());
            }
        }
        sleep(40 * SECOND).await;
        let left = state(&wire, &key).await;
        if begun.load(Ordering::SeqCst) == 0 {
            before += 1;
            assert_eq!(left, None);
        } else {
            after += 1;
            assert_eq!(left, Some(State::Held));
        }
    }
    assert!(before > 0 && after > 0, "{before}, {after}");
}

#[tokio::test(start_paused = true)]
async fn r09_a_lost_token_is_told() {
    for (worker, store) in both().await {
        let work = |_: Job| async {
            // An operator is mistaken.
            store.forget_forced(&id("k"));
            done("mine")
        };
        let lost = worker.run(&id("k"), fp("b"), work).await;
        match lost {
            // In memory the token is stale.
            Err(RunError::Lost(Some(outcome))) => assert_eq!(&outcome.bytes()[..], b"mine"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r09_the_steps_of_a_lost_token_are_refused() {
    let wire = wire();
    let tiered = node(&wire).await;
    let (operator, database) = (tiered.clone(), wire.clone());
    let work = |job: Job| async move {
        // An operator is mistaken.
        operator.forget(&id("k"), true).await.unwrap();
        let refused = job.checkpoint("one").await;
        assert!(matches!(refused, Err(JobError::Lost)), "{refused:?}");
        let mut tx = Tx::begin(&database).await;
        let refused = job.complete_in(&mut tx, outcome("1")).await;
        assert!(matches!(refused, Err(JobError::Lost)), "{refused:?}");
        drop(tx);
        Verdict::retry("lost")
    };
    let ran = tiered.run(&id("k"), fp("b"), work).await;
    // What is gone already is as good as given up.
    assert!(matches!(ran, Err(RunError::Retry(_))), "{ran:?}");
}

#[tokio::test(start_paused = true)]
async fn case_036_a_worker_that_was_taken_over_is_told_and_the_winner_is_replayed() {
    let wire = wire();
    let other = Wire::to(Arc::clone(&wire.tier));
    let (a, b) = (Worker::from(node(&wire).await), Worker::from(node(&other).await));
    let silent = a.clone();
    let running = tokio::spawn(async move {
        let work = |_| async move {
            sleep(10 * LEASE).await;
            done("a")
        };
        silent.run(&id("k"), fp("b"), work).await
    });
    settle().await;
    // No heartbeat gets through, until the lease is over.
    *wire.beats.lock().unwrap() = Weather::Down;
    sleep(2 * LEASE).await;
    let b = b.wait_limit(4 * LEASE);
    let taken = b.run(&id("k"), fp("b"), |_| async { done("b") }).await;
    *wire.beats.lock().unwrap() = Weather::Fair;
    let late = running.await.unwrap();
    match (taken, late) {
        (Ok(ran), Err(error @ RunError::Lost(_))) => {
            assert_eq!(text(&ran), "b");
            assert!(matches!(error.disposition(), Disposition::Requeue { .. }));
            assert_eq!(text(&a.run(&id("k"), fp("b"), never).await.unwrap()), "b");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_goes_to_the_next_owner_and_memory_has_none() {
    let wire = wire();
    let first = node(&wire).await;
    let dying = first.clone();
    let task = tokio::spawn(async move {
        let work = |job: Job| async move {
            assert_eq!(job.take_checkpoint(), None);
            job.checkpoint("one").await.unwrap();
            job.checkpoint("two").await.unwrap();
            std::future::pending().await
        };
        dying.run(&id("k"), fp("b"), work).await
    });
    settle().await;
    // It dies: nobody beats, and nobody says that it is over.
    wire.becomes(Weather::Down);
    task.abort();
    drop(first);
    sleep(2 * LEASE).await;
    wire.becomes(Weather::Fair);
    let next = Wire::to(Arc::clone(&wire.tier));
    let work = |job: Job| async move {
        let left = job.take_checkpoint().unwrap();
        assert_eq!(job.take_checkpoint(), None, "once");
        Verdict::Done(Outcome::new(200).body(left))
    };
    let ran = node(&next).await.run(&id("k"), fp("b"), work).await;
    assert_eq!(text(&ran.unwrap()), "two");

    let work = |job: Job| async move {
        assert!(matches!(job.checkpoint("one").await, Err(JobError::NoTier)));
        done("1")
    };
    store_with(|it| it).run(&id("k"), fp("b"), work).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn r11_what_the_work_has_said_is_settled_though_its_caller_leaves() {
    let wire = wire();
    let tiered = node(&wire).await;
    for (key, verdict) in [("done", done("1")), ("retry", Verdict::retry("closed"))] {
        let name = id(key);
        let held_up = wire.row.clone().lock_owned().await;
        *wire.completions.lock().unwrap() = Weather::Still;
        {
            let mut attempt = pin!(tiered.run(&name, fp("b"), |_| async { verdict }));
            let before = wire.calls(COMPLETE) + wire.calls(RELEASE);
            while wire.calls(COMPLETE) + wire.calls(RELEASE) == before {
                assert!(poll(attempt.as_mut()).is_pending());
                tokio::task::yield_now().await;
            }
        }
        *wire.completions.lock().unwrap() = Weather::Fair;
        drop(held_up);
        sleep(LEASE).await;
    }
    assert_eq!(state(&wire, "done").await, Some(State::Completed(outcome("1"))));
    assert_eq!(state(&wire, "retry").await, None, "released, not held");
}

/// How a transaction ends before the work has spoken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Committed,
    RolledBack,
}

#[tokio::test(start_paused = true)]
async fn t6_the_transaction_decides_whatever_the_work_says() {
    use Ends::{Committed, RolledBack};
    let cases: [(Ends, Option<Verdict>, &str); 9] = [
        (Committed, Some(Verdict::Committed), "done"),
        (Committed, Some(Verdict::retry("the answer was lost")), "done"),
        (Committed, Some(Verdict::unknown("the answer was lost")), "done"),
        (Committed, Some(done("something else")), "done"),
        (Committed, None, "dropped, done"),
        (RolledBack, Some(Verdict::retry("deadlock")), "retry"),
        (RolledBack, Some(Verdict::unknown("deadlock")), "unknown"),
        (RolledBack, Some(done("something else")), "unknown"),
        (RolledBack, None, "dropped, retry"),
    ];
    for (n, (ends, said, expected)) in cases.into_iter().enumerate() {
        let wire = wire();
        let tiered = node(&wire).await;
        let key = format!("k-{n}");
        let (database, is_dropped) = (wire.clone(), said.is_none());
        let work = |job: Job| async move {
            let mut tx = Tx::begin(&database).await;
            job.complete_in(&mut tx, outcome("staged")).await.unwrap();
            match ends {
                Committed => tx.commit().await,
                RolledBack => drop(tx),
            }
            match said {
                Some(said) => said,
                None => std::future::pending().await,
            }
        };
        let limit = timeout(SECOND, tiered.run(&id(&key), fp("b"), work)).await;
        assert_eq!(limit.is_err(), is_dropped, "{n}");
        let told = match limit {
            Ok(Ok(ran)) => {
                assert_eq!((text(&ran), ran.replayed), ("staged", false), "{n}");
                "done"
            }
            Ok(Err(RunError::Retry(_))) => "retry",
            Ok(Err(RunError::Unknown(_))) => "unknown",
            Ok(Err(other)) => panic!("{n}: {other:?}"),
            Err(_) => "",
        };
        let expected_now = expected.trim_start_matches("dropped, ");
        if !is_dropped {
            assert_eq!(told, expected_now, "{n}");
        }
        if is_dropped {
            // It is found out in the background.
            sleep(5 * SECOND).await;
        }
        let next = tiered.run(&id(&key), fp("b"), |_| async { done("next") }).await;
        match expected_now {
            "done" => assert_eq!(text(&next.unwrap()), "staged", "{n}"),
            "retry" => assert_eq!(text(&next.unwrap()), "next", "{n}"),
            _ => assert!(matches!(next, Err(RunError::Held)), "{n}: {next:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn t6_committed_without_a_transaction_is_held_and_memory_has_none() {
    for (worker, _) in both().await {
        let wrong = worker.run(&id("k"), fp("b"), |_| async { Verdict::Committed }).await;
        assert!(matches!(wrong, Err(RunError::Unknown(_))), "{wrong:?}");
        assert!(matches!(worker.run(&id("k"), fp("b"), never).await, Err(RunError::Held)));
    }
    let database = wire();
    let work = |job: Job| async move {
        let mut tx = Tx::begin(&database).await;
        let refused = job.complete_in(&mut tx, outcome("1")).await;
        assert!(matches!(refused, Err(JobError::NoTier)), "{refused:?}");
        Verdict::retry("no tier")
    };
    let ran = store_with(|it| it).run(&id("k"), fp("b"), work).await;
    assert!(matches!(ran, Err(RunError::Retry(_))), "{ran:?}");
}

#[tokio::test(start_paused = true)]
async fn t2_nothing_runs_while_the_tier_is_down_or_the_store_drains() {
    let wire = wire();
    let tiered = node(&wire).await;
    wire.becomes(Weather::Down);
    let refused = tiered.run(&id("k"), fp("b"), never).await;
    let Err(error @ RunError::Unavailable { .. }) = refused else { panic!("{refused:?}") };
    assert!(matches!(error.disposition(), Disposition::Requeue { after } if after >= SECOND));
    wire.becomes(Weather::Fair);
    for (worker, store) in both().await {
        drop(store.drain());
        let refused = worker.run(&id("k"), fp("b"), never).await;
        assert!(matches!(refused, Err(RunError::Refused(ClaimError::Draining))), "{refused:?}");
    }
}

// Batches.

fn batch<'a>(keys: &[(&'a str, &'a str)]) -> Vec<(Identity<'a>, Fingerprint)> {
    keys.iter().map(|(key, body)| (id(key), fp(body))).collect()
}

/// A verdict for each job: its place in the batch.
async fn places(jobs: Vec<Job>) -> Vec<Verdict> {
    jobs.iter().map(|job| done(&job.index().to_string())).collect()
}

fn told(answers: &[Result<Ran, RunError>]) -> Vec<String> {
    let one = |answer: &Result<Ran, RunError>| match answer {
        Ok(ran) => format!("{} {}", text(ran), if ran.replayed { "replayed" } else { "ran" }),
        Err(RunError::Retry(_)) => "retry".into(),
        Err(RunError::Unknown(_)) => "unknown".into(),
        Err(other) => format!("{other:?}"),
    };
    answers.iter().map(one).collect()
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_claimed_worked_on_and_answered_in_order() {
    for (worker, _) in both().await {
        worker.run(&id("old"), fp("b"), |_| async { done("old") }).await.unwrap();
        let attempts =
            batch(&[("a", "b"), ("old", "b"), ("b", "b"), ("a", "b"), ("a", "other"), ("c", "b")]);
        let mut calls = 0;
        let answers = worker
            .run_each(attempts.clone(), |jobs| {
                calls += 1;
                let keys: Vec<_> = jobs.iter().map(|job| job.identity().key().to_vec()).collect();
                assert_eq!(keys, [b"a", b"b", b"c"]);
                places(jobs)
            })
            .await;
        let expected = ["0 ran", "old replayed", "2 ran", "0 replayed", "Mismatch", "5 ran"];
        assert_eq!(told(&answers), expected);
        assert_eq!(calls, 1);
        // Nothing is left to run: the work is not called.
        let work = |_| async { panic!("it ran") };
        let again = told(&worker.run_each(attempts, work).await);
        assert_eq!(again[0], "0 replayed");
        assert_eq!(again[5], "5 replayed");
        assert!(worker.run_each([], |_| async { panic!("it ran") }).await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_claims_what_stands_in_it_twice_once() {
    let wire = wire();
    let worker = Worker::from(node(&wire).await);
    let keys: Vec<String> = (0..200).map(|n| format!("k-{}", n % 100)).collect();
    let attempts = keys.iter().map(|key| (id(key), fp("b")));
    let answers = worker.run_each(attempts, places).await;
    assert_eq!(wire.calls(CLAIM), 100);
    for (n, answer) in answers.iter().enumerate() {
        let ran = answer.as_ref().unwrap();
        assert_eq!((text(ran), ran.replayed), (&*(n % 100).to_string(), n >= 100));
    }
}

#[tokio::test(start_paused = true)]
async fn each_place_of_a_batch_is_answered_though_others_stand_twice() {
    for (worker, _) in both().await {
        let owner = worker.clone();
        tokio::spawn(async move {
            let work = |_| async {
                sleep(SECOND).await;
                done("other")
            };
            owner.run(&id("waits"), fp("b"), work).await
        });
        let held = worker.run(&id("held"), fp("b"), |_| async { Verdict::unknown("cut") }).await;
        assert!(held.is_err());
        worker.run(&id("used"), fp("b"), |_| async { done("used") }).await.unwrap();
        settle().await;
        let keys = ["waits", "waits", "a", "held", "a", "used", "b", "held", "waits", "c", "b"];
        let attempts = keys.map(|key| (id(key), fp(if key == "used" { "c" } else { "b" })));
        let answers = worker.run_each(attempts, places).await;
        let expected = [
            "other replayed",
            "other replayed",
            "2 ran",
            "Held",
            "2 replayed",
            "Mismatch",
            "6 ran",
            "Held",
            "other replayed",
            "9 ran",
            "6 replayed",
        ];
        assert_eq!(told(&answers), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn each_of_a_batch_ends_as_the_work_says_and_what_it_says_nothing_of_is_held() {
    for (worker, _) in both().await {
        let attempts = batch(&[("a", "b"), ("b", "b"), ("c", "b"), ("b", "b"), ("d", "b")]);
        let said = vec![done("a"), Verdict::retry("closed"), Verdict::unknown("cut")];
        let answers = worker.run_each(attempts.clone(), |_| async { said }).await;
        assert_eq!(told(&answers), ["a ran", "retry", "unknown", "retry", "unknown"]);
        let again = told(&worker.run_each(attempts, places).await);
        assert_eq!(again, ["a replayed", "1 ran", "Held", "1 replayed", "Held"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_works_first_and_then_waits_for_what_others_run() {
    for (worker, store) in both().await {
        for (key, verdict) in [("done", done("other")), ("gives up", Verdict::retry("closed"))] {
            let owner = worker.clone();
            tokio::spawn(async move {
                let work = |_| async {
                    sleep(3 * SECOND).await;
                    verdict
                };
                let _ = owner.run(&id(key), fp("b"), work).await;
            });
        }
        let owner = worker.clone();
        let long = tokio::spawn(async move {
            let work = |_| async {
                sleep(LEASE).await;
                done("late")
            };
            owner.run(&id("long"), fp("b"), work).await
        });
        settle().await;
        let at = Instant::now();
        let attempts = batch(&[("done", "b"), ("own", "b"), ("gives up", "b"), ("long", "b")]);
        let answers = worker
            .run_each(attempts, |jobs| {
                assert_eq!(at.elapsed(), Duration::ZERO, "before it waits");
                places(jobs)
            })
            .await;
        assert_eq!(told(&answers), ["other replayed", "1 ran", "retry", "InFlight"]);
        assert_eq!(at.elapsed().as_secs(), 10);
        // What it came to own by waiting it has given up.
        assert_eq!(told(&worker.run_each(batch(&[("gives up", "b")]), places).await), ["0 ran"]);
        long.await.unwrap().unwrap();
        assert_eq!(store.stats().in_flight, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn two_batches_that_own_parts_of_each_other_do_not_wait_in_a_circle() {
    for (worker, _) in both().await {
        let other = worker.clone();
        let slowly = |jobs: Vec<Job>| async {
            sleep(SECOND).await;
            places(jobs).await
        };
        let task = tokio::spawn(async move {
            told(&other.run_each(batch(&[("a", "b"), ("b", "b")]), slowly).await)
        });
        settle().await;
        let answers = worker.run_each(batch(&[("c", "b"), ("a", "b"), ("b", "b")]), slowly).await;
        assert_eq!(told(&answers), ["0 ran", "0 replayed", "1 replayed"]);
        assert_eq!(task.await.unwrap(), ["0 ran", "1 ran"]);
    }
}

#[tokio::test(start_paused = true)]
async fn r11_a_batch_that_panics_or_is_dropped_is_abandoned_whole() {
    for (worker, store) in both().await {
        let panics = worker.clone();
        let task = tokio::spawn(async move {
            let work = |_| async { panic!("on purpose") };
            panics.run_each(batch(&[("a", "b"), ("b", "b")]), work).await
        });
        assert!(task.await.unwrap_err().is_panic());
        let work = |_: Vec<Job>| std::future::pending();
        let limit = timeout(SECOND, worker.run_each(batch(&[("c", "b"), ("d", "b")]), work)).await;
        assert!(limit.is_err());
        sleep(SECOND / 2).await;
        let keys = batch(&[("a", "b"), ("b", "b"), ("c", "b"), ("d", "b")]);
        assert_eq!(told(&worker.run_each(keys, places).await), ["Held"; 4]);
        assert_eq!(store.stats().in_flight, 0);
    }
    // Dropped while it claims: nothing had begun.
    let wire = wire();
    let tiered = node(&wire).await;
    let worker = Worker::from(tiered.clone());
    {
        let mut attempt = pin!(worker.run_each(batch(&[("a", "b"), ("b", "b")]), places));
        assert!(poll(attempt.as_mut()).is_pending());
    }
    sleep(40 * SECOND).await;
    assert_eq!((state(&wire, "a").await, state(&wire, "b").await), (None, None));
    assert_eq!(tiered.store().stats().in_flight, 0);
}

// Values.

#[tokio::test(start_paused = true)]
async fn values_come_back_and_a_record_of_another_codec_is_an_error() {
    for (worker, _) in both().await {
        let typed = worker.clone().typed(Json::default());
        let value = || ("ch_1".to_owned(), vec![1_u64, 2]);
        let first = typed.run(&id("k"), fp("b"), |_| async { Verdict::Done(value()) }).await;
        assert_eq!(first.unwrap().outcome, value());
        let again: Ran<(String, Vec<u64>)> =
            typed.run(&id("k"), fp("b"), |_| async { panic!("it ran") }).await.unwrap();
        assert_eq!((again.outcome, again.replayed), (value(), true));

        // Another version.
        let next = worker.clone().typed(Json::version_of(2));
        let read = next.run(&id("k"), fp("b"), |_| async { Verdict::Done(0_u64) }).await;
        let Err(error) = read else { panic!("{read:?}") };
        assert_eq!(error.disposition(), Disposition::DeadLetter);
        let said = error.to_string();
        assert!(said.contains("`json/1`") && said.contains("`json/2`"), "{said}");
        // Another type under the same version.
        let read = typed.run(&id("k"), fp("b"), |_| async { Verdict::Done(0_u64) }).await;
        assert!(matches!(read, Err(RunError::Codec(CodecError::Decode(_)))), "{read:?}");
        // Bytes without a codec.
        worker.run(&id("bytes"), fp("b"), |_| async { done("0") }).await.unwrap();
        let read = typed.run(&id("bytes"), fp("b"), |_| async { Verdict::Done(0_u64) }).await;
        let foreign = matches!(
            &read,
            Err(RunError::Codec(CodecError::Foreign { found: None, expected })) if expected == "json/1"
        );
        assert!(foreign, "{read:?}");
        assert_eq!(Json::default().name(), "json");
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_written_is_done_and_not_kept() {
    use std::collections::BTreeMap;
    for (worker, _) in both().await {
        let typed = worker.clone().typed(Json::default());
        // JSON has no such keys.
        let value = || BTreeMap::from([(vec![1_u8], 1_u8)]);
        let ran = typed.run(&id("k"), fp("b"), |_| async { Verdict::Done(value()) }).await;
        assert!(matches!(ran, Err(RunError::Codec(CodecError::Encode(_)))), "{ran:?}");
        let again = worker.run(&id("k"), fp("b"), never).await;
        assert!(matches!(again, Err(RunError::NotKept)), "{again:?}");
        assert_eq!(disposition(&again), Disposition::Ack);
    }
}

#[tokio::test(start_paused = true)]
async fn t6_a_value_is_completed_in_a_transaction_too() {
    let wire = wire();
    let typed = Worker::from(node(&wire).await).typed(Json::default());
    let writes = typed.clone();
    let database = wire.clone();
    let work = |job: Job| async move {
        let mut tx = Tx::begin(&database).await;
        job.complete_in(&mut tx, writes.outcome(&7_u64).unwrap()).await.unwrap();
        tx.commit().await;
        Verdict::<u64>::Committed
    };
    let ran = typed.run(&id("k"), fp("b"), work).await.unwrap();
    assert_eq!((ran.outcome, ran.replayed), (7, false));
}

// Threads.

#[test]
fn the_blocking_twin_needs_no_runtime_in_memory() {
    let _watchdog = watchdog();
    let store = Store::builder().build().unwrap();
    let begun = AtomicUsize::new(0);
    thread::scope(|scope| {
        let owner = scope.spawn(|| {
            store.run_blocking(&id("k"), fp("b"), |job| {
                begun.fetch_add(1, Ordering::SeqCst);
                assert_eq!(job.identity().account(), b"acct");
                until(|| store.look_up(&id("k")).is_some_and(|entry| entry.waiters == 1));
                done("1")
            })
        });
        until(|| begun.load(Ordering::SeqCst) == 1);
        let impatient = Worker::from(store.clone()).wait_limit(Duration::ZERO);
        let met = impatient.run_blocking(&id("k"), fp("b"), |_| panic!("it ran"));
        assert!(matches!(met, Err(RunError::InFlight)), "{met:?}");
        let patient = Worker::from(store.clone()).wait_limit(Duration::MAX);
        let ran = patient.run_blocking(&id("k"), fp("b"), |_| panic!("it ran")).unwrap();
        assert_eq!((text(&ran), ran.replayed), ("1", true));
        assert!(!owner.join().unwrap().unwrap().replayed);
    });
    let refused = store.run_blocking(&id("r"), fp("b"), |_| Verdict::retry("closed"));
    assert!(matches!(refused, Err(RunError::Retry(_))));
    let panics = || store.run_blocking(&id("r"), fp("b"), |_| panic!("on purpose"));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    let held = store.run_blocking(&id("r"), fp("b"), |_| panic!("it ran"));
    assert!(matches!(held, Err(RunError::Held)), "{held:?}");
    let typed = Worker::from(store.clone()).typed(Json::default());
    let ran = typed.run_blocking(&id("t"), fp("b"), |_| Verdict::Done(7_u64)).unwrap();
    assert_eq!(ran.outcome, 7);
    let jobs = |jobs: Vec<Job>| jobs.iter().map(|job| done(&job.index().to_string())).collect();
    let worker = Worker::from(store);
    let keys = batch(&[("x", "b"), ("k", "b"), ("x", "b")]);
    let answers = worker.run_each_blocking(keys, jobs);
    assert_eq!(told(&answers), ["0 ran", "1 replayed", "0 replayed"]);
}

#[test]
fn the_blocking_twin_uses_the_runtime_of_the_tier() {
    let _watchdog = watchdog();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let tier = MemoryTier::new();
    let store = Store::builder().build().unwrap();
    let tiered = runtime.block_on(Tiered::open(store, tier, Lapse::Hold)).unwrap();
    // This thread is none of the runtime's.
    let ran = tiered.run_blocking(&id("k"), fp("b"), |job| {
        let runtime = tokio::runtime::Handle::current();
        runtime.block_on(job.checkpoint("half")).unwrap();
        done("1")
    });
    assert!(!ran.unwrap().replayed);
    assert!(tiered.run_blocking(&id("k"), fp("b"), |_| panic!("it ran")).unwrap().replayed);
    let panics = || tiered.run_blocking(&id("p"), fp("b"), |_| panic!("on purpose"));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    // The tier is told, by the runtime.
    let in_tier = || runtime.block_on(tiered.look_up(&id("p"))).unwrap().map(|found| found.state);
    until(|| in_tier() == Some(State::Held));
    assert_eq!(tiered.stats().given_up, 0);
    let worker = Worker::from(tiered);
    let jobs = |jobs: Vec<Job>| jobs.iter().map(|job| done(&job.index().to_string())).collect();
    let answers = worker.run_each_blocking(batch(&[("x", "b"), ("k", "b"), ("x", "b")]), jobs);
    assert_eq!(told(&answers), ["0 ran", "1 replayed", "0 replayed"]);
    let typed = worker.typed(Json::default());
    let ran = typed.run_blocking(&id("t"), fp("b"), |_| Verdict::Done(7_u64)).unwrap();
    assert_eq!(ran.outcome, 7);
}
