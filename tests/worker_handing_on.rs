//! What a worker leaves to the next one: checkpoints, and keys that it had not begun to work on, could
//! not tell the tier of, or whose transaction is still open.
//!
//! Time is tokio's, and it stands still while anybody has something to do; the test with threads waits
//! for events under a watchdog.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/tiers.rs"]
mod tiers;
#[path = "common/workers.rs"]
mod workers;

use std::{
    future::Future as _,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use oncekey::{
    Abandon, Lapse, Outcome, Store,
    tier::{Answer, Completion, Landed, MemoryTier, NewClaim, State, Tiered, Transaction},
    worker::{Disposition, Job, RunError, Verdict, Worker, disposition},
};
use tokio::time::{Instant, sleep, timeout};

use common::{until, watchdog};
use tiers::{LAPSE, Tx, Weather, Wire};
use workers::{
    LEASE, SECOND, done, fp, id, never, node, node_with, outcome, poll, settle, state, text, wire,
};

/// Of a worker that has left `one` and has vanished. Its lease is over.
async fn dead_owner(wire: &Wire, key: &str) {
    let tier = &wire.tier;
    let token = oncekey::Token::new(7, 1);
    let (max_run, retention) = (30 * LEASE, 100 * LEASE);
    tier.beat(7, SECOND).await.unwrap();
    let claim = NewClaim { token, fingerprint: fp("b"), max_run, retention };
    let _ = tier.claim(id(key), claim).await.unwrap();
    assert_eq!(tier.checkpoint(id(key), token, "one".into()).await.unwrap(), Landed::Done);
    sleep(2 * SECOND).await;
    assert_eq!(state(wire, key).await, Some(State::Lapsed));
}

/// What the next owner gets, on a node of its own.
async fn left(wire: &Wire, key: &str) -> Option<String> {
    let other = Wire::to(Arc::clone(&wire.tier));
    let work = |job: Job| async move {
        let left = job.take_checkpoint().map_or("nothing".into(), |bytes| bytes.to_vec());
        Verdict::Done(Outcome::new(200).body(left))
    };
    let ran = node(&other).await.run(&id(key), fp("b"), work).await.unwrap();
    assert!(!ran.replayed, "it had been run");
    Some(text(&ran).to_owned()).filter(|left| left != "nothing")
}

#[tokio::test(start_paused = true)]
async fn what_is_taken_over_and_not_begun_keeps_its_checkpoint() {
    let (mut before, mut after) = (0, 0);
    // Given up at each await, until the work has begun: in the middle of the takeover too.
    for polls in 1..40 {
        let wire = wire();
        dead_owner(&wire, "k").await;
        dead_owner(&wire, "l").await;
        let tiered = node(&wire).await;
        let worker = Worker::from(tiered.clone());
        let begun = AtomicUsize::new(0);
        {
            let attempts = ["k", "l"].map(|key| (id(key), fp("b")));
            let work = |_: Vec<Job>| {
                begun.fetch_add(1, Ordering::SeqCst);
                std::future::pending()
            };
            let mut attempt = pin!(worker.run_each(attempts, work));
            for _ in 0..polls {
                assert!(poll(attempt.as_mut()).is_pending());
                tokio::task::yield_now().await;
            }
        }
        sleep(40 * SECOND).await;
        if begun.load(Ordering::SeqCst) > 0 {
            after += 1;
            continue;
        }
        before += 1;
        for key in ["k", "l"] {
            assert_eq!(state(&wire, key).await, Some(State::Lapsed), "{polls}");
            assert_eq!(left(&wire, key).await.as_deref(), Some("one"), "{polls}");
        }
        assert_eq!(tiered.store().stats().in_flight, 0);
    }
    assert!(before > 3 && after > 0, "{before}, {after}");
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_comes_to_own_a_key_by_waiting_gives_it_up_with_its_checkpoint() {
    let wire = wire();
    let owner = node(&wire).await;
    let dying = owner.clone();
    let task = tokio::spawn(async move {
        let work = |job: Job| async move {
            job.checkpoint("one").await.unwrap();
            std::future::pending().await
        };
        dying.run(&id("k"), fp("b"), work).await
    });
    settle().await;
    let other = Wire::to(Arc::clone(&wire.tier));
    let waits = Worker::from(node(&other).await).wait_limit(4 * LEASE);
    let batch = tokio::spawn(async move {
        let work = |_: Vec<Job>| async { panic!("it ran") };
        waits.run_each([(id("k"), fp("b"))], work).await.pop().unwrap()
    });
    settle().await;
    wire.becomes(Weather::Down);
    task.abort();
    drop(owner);
    let told = batch.await.unwrap();
    assert!(matches!(told, Err(RunError::Retry(_))), "{told:?}");
    settle().await;
    assert_eq!(left(&wire, "k").await.as_deref(), Some("one"));
}

#[tokio::test(start_paused = true)]
async fn a_takeover_that_gets_there_after_it_was_given_up_keeps_the_checkpoint() {
    let wire = wire();
    dead_owner(&wire, "k").await;
    let tiered = node(&wire).await;
    *wire.late_takeovers.lock().unwrap() = Some(Duration::from_millis(500));
    let limit = timeout(Duration::from_millis(100), tiered.run(&id("k"), fp("b"), never)).await;
    assert!(limit.is_err());
    *wire.late_takeovers.lock().unwrap() = None;
    sleep(40 * SECOND).await;
    assert_eq!(state(&wire, "k").await, Some(State::Lapsed), "it is shut");
    assert_eq!(left(&wire, "k").await.as_deref(), Some("one"));
}

/// A piece of work that leaves a checkpoint and ends as `said`; or says nothing.
async fn leaves(tiered: &Tiered, key: &str, said: Option<Verdict>) {
    let work = |job: Job| async move {
        job.checkpoint("one").await.unwrap();
        match said {
            Some(said) => said,
            None => std::future::pending().await,
        }
    };
    let _ = timeout(SECOND, tiered.run(&id(key), fp("b"), work)).await;
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn after_retry_the_next_owner_gets_the_checkpoint_where_a_lapse_is_taken_over() {
    let retry = || Some(Verdict::retry("closed"));
    for on_abandon in [Abandon::Hold, Abandon::Release] {
        let wire = wire();
        let set = |it: oncekey::StoreBuilder| it.on_abandon(on_abandon);
        let tiered = node_with(&wire, Lapse::TakeOver, set).await;
        leaves(&tiered, "k", retry()).await;
        // It is no key that remembers nothing.
        let other_body = tiered.run(&id("k"), fp("c"), never).await;
        assert!(matches!(other_body, Err(RunError::Mismatch)), "{other_body:?}");
        assert_eq!(left(&wire, "k").await.as_deref(), Some("one"));
        // On the same node too, to one that waits.
        let waits = tiered.clone();
        let waits = tokio::spawn(async move {
            settle().await;
            let work = |job: Job| async move {
                assert_eq!(job.take_checkpoint().as_deref(), Some(&b"one"[..]));
                done("2")
            };
            waits.run(&id("l"), fp("b"), work).await
        });
        let work = |job: Job| async move {
            job.checkpoint("one").await.unwrap();
            sleep(SECOND).await;
            Verdict::retry("closed")
        };
        assert!(tiered.run(&id("l"), fp("b"), work).await.is_err());
        assert_eq!(text(&waits.await.unwrap().unwrap()), "2");
        // A transaction that is rolled back takes no checkpoint with it.
        let database = wire.clone();
        let work = |job: Job| async move {
            job.checkpoint("one").await.unwrap();
            let mut tx = Tx::begin(&database).await;
            job.complete_in(&mut tx, outcome("1")).await.unwrap();
            Verdict::retry("deadlock")
        };
        let rolled_back = tiered.run(&id("t"), fp("b"), work).await;
        assert!(matches!(rolled_back, Err(RunError::Retry(_))), "{rolled_back:?}");
        assert_eq!(left(&wire, "t").await.as_deref(), Some("one"));
        leaves(&tiered, "dropped", None).await;
        match on_abandon {
            Abandon::Release => assert_eq!(left(&wire, "dropped").await.as_deref(), Some("one")),
            _ => assert_eq!(state(&wire, "dropped").await, Some(State::Held)),
        }
        // Without a checkpoint it is a release.
        let refused = tiered.run(&id("n"), fp("b"), |_| async { Verdict::retry("closed") }).await;
        assert!(refused.is_err());
        assert_eq!(state(&wire, "n").await, None);
    }
    // Where a lapse is held, it begins at its beginning.
    let wire = wire();
    let tiered = node_with(&wire, Lapse::Hold, |it| it).await;
    leaves(&tiered, "k", retry()).await;
    assert_eq!(left(&wire, "k").await, None);
}

#[test]
fn a_run_that_is_dropped_off_its_runtime_leaves_no_key_shut() {
    /// How far it has come.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum At {
        Claim,
        Work,
        Staged,
    }
    let _watchdog = watchdog();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let wire = Wire::to(Arc::new(MemoryTier::new()));
    let store = Store::builder().build().unwrap();
    let tiered =
        runtime.block_on(async { Tiered::open(store, wire.clone(), Lapse::Hold).await }).unwrap();
    for at in [At::Claim, At::Work, At::Staged] {
        let key = format!("{at:?}");
        let (tiered, database, name) = (tiered.clone(), wire.clone(), key.clone());
        let begun = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&begun);
        let mut attempt = Box::pin(async move {
            let work = |job: Job| async move {
                if at == At::Staged {
                    let mut tx = Tx::begin(&database).await;
                    job.complete_in(&mut tx, outcome("1")).await.unwrap();
                }
                seen.fetch_add(1, Ordering::SeqCst);
                std::future::pending().await
            };
            let name = name;
            tiered.run(&id(&name), fp("b"), work).await
        });
        runtime.block_on(std::future::poll_fn(|context| {
            // In the middle of the claim, or when the work has begun.
            let _ = attempt.as_mut().poll(context);
            if at == At::Claim || begun.load(Ordering::SeqCst) > 0 {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        }));
        thread::spawn(move || drop(attempt)).join().unwrap();
        let due = if at == At::Work { Some(State::Held) } else { None };
        until(|| runtime.block_on(state(&wire, &key)) == due);
    }
    assert_eq!(tiered.stats().given_up, 0);
}

/// The transaction stays open for longer than anybody waits for it; then it ends as `ends`.
async fn open_for_long(said: fn() -> Verdict, is_committed: bool) -> (Tiered, Wire) {
    let wire = wire();
    let tiered = node(&wire).await;
    let database = wire.clone();
    let work = |job: Job| async move {
        let mut tx = Tx::begin(&database).await;
        job.complete_in(&mut tx, outcome("staged")).await.unwrap();
        // Somebody else ends it.
        tokio::spawn(async move {
            sleep(20 * SECOND).await;
            if is_committed { tx.commit().await } else { drop(tx) }
        });
        said()
    };
    let told = tiered.run(&id("k"), fp("b"), work).await;
    assert!(matches!(told, Err(RunError::InFlight)), "nobody knows yet: {told:?}");
    assert!(matches!(disposition(&told), Disposition::Requeue { .. }));
    (tiered, wire)
}

#[tokio::test(start_paused = true)]
async fn t6_a_transaction_that_is_still_open_is_in_flight_whatever_the_work_says() {
    let says: [(fn() -> Verdict, bool); 3] = [
        (|| Verdict::unknown("the answer was lost"), true),
        (|| done("something else"), true),
        (|| Verdict::retry("the answer was lost"), false),
    ];
    for (said, is_held) in says {
        let (tiered, _wire) = open_for_long(said, true).await;
        let impatient = Worker::from(tiered.clone()).wait_limit(Duration::ZERO);
        let met = impatient.run(&id("k"), fp("b"), never).await;
        assert!(matches!(met, Err(RunError::InFlight)), "{met:?}");
        sleep(60 * SECOND).await;
        assert_eq!(text(&tiered.run(&id("k"), fp("b"), never).await.unwrap()), "staged");

        let (tiered, _wire) = open_for_long(said, false).await;
        sleep(60 * SECOND).await;
        let next = tiered.run(&id("k"), fp("b"), |_| async { done("next") }).await;
        match is_held {
            true => assert!(matches!(next, Err(RunError::Held)), "{next:?}"),
            false => assert_eq!(text(&next.unwrap()), "next"),
        }
    }
}

/// Whoever completes in it is cut off.
struct Endless;

impl Transaction for Endless {
    fn complete<'a>(&'a mut self, _: Completion<'a>) -> Answer<'a, Landed> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn t6_of_two_transactions_the_one_that_was_committed_is_told() {
    let wire = wire();
    let tiered = node(&wire).await;
    let database = wire.clone();
    let work = |job: Job| async move {
        let mut tx = Tx::begin(&database).await;
        job.complete_in(&mut tx, outcome("first")).await.unwrap();
        // The answer to the commit is lost, so it is tried again, and cut off.
        tx.commit().await;
        let mut endless = Endless;
        let second = job.complete_in(&mut endless, outcome("second"));
        assert!(timeout(SECOND, second).await.is_err());
        Verdict::retry("the answers were lost")
    };
    let ran = tiered.run(&id("k"), fp("b"), work).await.unwrap();
    assert_eq!((text(&ran), ran.replayed), ("first", false));
    assert_eq!(text(&tiered.run(&id("k"), fp("b"), never).await.unwrap()), "first");
}

#[tokio::test(start_paused = true)]
async fn a_lapse_that_is_made_again_because_its_answer_was_lost_is_no_lost_claim() {
    let wire = wire();
    let tiered = node(&wire).await;
    let database = wire.clone();
    let work = |job: Job| async move {
        job.checkpoint("one").await.unwrap();
        let mut tx = Tx::begin(&database).await;
        job.complete_in(&mut tx, outcome("1")).await.unwrap();
        database.becomes(Weather::Deaf);
        Verdict::retry("deadlock")
    };
    let told = tiered.run(&id("k"), fp("b"), work).await;
    assert!(matches!(told, Err(RunError::InFlight)), "{told:?}");
    wire.becomes(Weather::Fair);
    sleep(LEASE).await;
    assert!(wire.calls(LAPSE) > 1, "{}", wire.calls(LAPSE));
    assert_eq!(state(&wire, "k").await, Some(State::Lapsed));
    assert_eq!((tiered.stats().lost, tiered.stats().double_runs), (0, 0));
    assert_eq!(left(&wire, "k").await.as_deref(), Some("one"));
}

#[tokio::test(start_paused = true)]
async fn r13_an_attempt_whose_claim_is_cut_off_shuts_no_key() {
    // It waits, becomes the next owner, and the tier does not answer until its limit is over.
    let wire = wire();
    let tiered = node(&wire).await;
    let owner = tiered.clone();
    let running = tokio::spawn(async move {
        let work = |_| async {
            sleep(8 * SECOND).await;
            Verdict::retry("closed")
        };
        owner.run(&id("k"), fp("b"), work).await
    });
    settle().await;
    let waits = Worker::from(tiered.clone());
    let started = Instant::now();
    let waits = tokio::spawn(async move { waits.run(&id("k"), fp("b"), never).await });
    sleep(7 * SECOND).await;
    // The claim gets there when nobody waits for its answer any more.
    *wire.late.lock().unwrap() = Some(5 * SECOND);
    let told = waits.await.unwrap();
    assert!(matches!(told, Err(RunError::InFlight)), "{told:?}");
    assert_eq!(started.elapsed().as_secs(), 10);
    *wire.late.lock().unwrap() = None;
    assert!(running.await.unwrap().is_err());
    sleep(LEASE).await;
    assert_eq!(state(&wire, "k").await, None);

    // No limit bounds the claim itself; the tier has one for its answer.
    wire.becomes(Weather::Still);
    let impatient = Worker::from(tiered.clone()).wait_limit(Duration::ZERO);
    let started = Instant::now();
    let told = impatient.run(&id("k"), fp("b"), never).await;
    assert!(matches!(told, Err(RunError::Unavailable { .. })), "{told:?}");
    assert_eq!(started.elapsed().as_secs(), 5);
    wire.becomes(Weather::Fair);
    sleep(LEASE).await;
    let ran = impatient.run(&id("k"), fp("b"), |_| async { done("1") }).await.unwrap();
    assert!(!ran.replayed);
}
