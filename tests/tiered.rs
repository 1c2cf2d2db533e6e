//! The memory in front of a tier: what two nodes on one tier see of each other, and what an outage
//! of the tier does (T1 to T10).
//!
//! Time is tokio's, and it stands still while anybody has something to do: memory, tier and timers
//! go by the same clock, and no test waits for real.
#![cfg(feature = "tier")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/tiers.rs"]
mod tiers;

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use oncekey::{
    Abandon, Clock, Fingerprint, Identity, Lapse, Outcome, Store, StoreBuilder, Sweep, Token,
    tier::{
        Claimed, Forgotten, Landed, MemoryTier, NewClaim, Resolved, StageError, State, Tiered,
        TieredClaim, TieredError, TieredPermit, TieredSettled,
    },
};
use tokio::time::{Instant, advance, sleep, timeout};

use tiers::{CLAIM, COMPLETE, LOOK_UP, Tx, Weather, Wire};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Tokio's clock.
struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

fn clock() -> Paused {
    Paused(Instant::now())
}

fn store(set: impl FnOnce(StoreBuilder) -> StoreBuilder) -> Store {
    set(Store::builder().sweep(Sweep::Manual).clock(clock())).build().unwrap()
}

async fn node(tier: &Wire, on_lapse: Lapse) -> Tiered {
    Tiered::open(store(|it| it), tier.clone(), on_lapse).await.unwrap()
}

fn id(key: &str) -> Identity<'_> {
    Identity::new("acct", "POST /charges", key).unwrap()
}

fn same() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"same")
}

fn other() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"other")
}

fn outcome(body: &str) -> Outcome {
    Outcome::new(201).header("location", "/charges/1").body(body.to_owned())
}

trait Expected {
    fn won(self) -> TieredPermit;
    fn replayed(self) -> Outcome;
}

impl Expected for Result<TieredClaim, TieredError> {
    fn won(self) -> TieredPermit {
        match self {
            Ok(TieredClaim::Won(permit)) => permit,
            other => panic!("not won: {other:?}"),
        }
    }

    fn replayed(self) -> Outcome {
        match self {
            Ok(TieredClaim::Replay(replay)) => replay.into_outcome(),
            other => panic!("no replay: {other:?}"),
        }
    }
}

/// A way to a tier of its own, on tokio's clock.
fn wire() -> Wire {
    Wire::to(Arc::new(MemoryTier::with_clock(clock())))
}

async fn state(tier: &Wire, key: &str) -> Option<State> {
    tier.tier.look_up(id(key)).await.unwrap().map(|found| found.state)
}

/// Polls once.
fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Until `done`, a step of a tenth of a second each.
async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    for _ in 0..6_000 {
        if done().await {
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("ten minutes have passed: {what}");
}

#[tokio::test(start_paused = true)]
async fn t1_claim_and_completion_are_in_the_tier_before_the_caller_goes_on() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    let permit = node.claim(&id("k"), same()).await.won();
    assert_eq!(state(&tier, "k").await, Some(State::InFlight));
    assert!(permit.complete(outcome("1")).await.unwrap().kept);
    assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("1"))));
    // A replay asks nobody.
    let asked = tier.calls(CLAIM) + tier.calls(LOOK_UP);
    assert_eq!(node.claim(&id("k"), same()).await.replayed(), outcome("1"));
    assert_eq!(tier.calls(CLAIM) + tier.calls(LOOK_UP), asked);
}

#[tokio::test(start_paused = true)]
async fn case_109_nodes_on_one_tier_see_each_other_and_a_restart_forgets_nothing() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    // B has seen "absent" a moment ago.
    assert_eq!(b.look_up(&id("k")).await.unwrap(), None);
    a.claim(&id("k"), same()).await.won().complete(outcome("a")).await.unwrap();
    assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("a"));
    // The mismatch is one from memory too.
    assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
    drop(a);
    let again = node(&tier, Lapse::Hold).await;
    assert_eq!(again.claim(&id("k"), same()).await.replayed(), outcome("a"));
}

#[tokio::test(start_paused = true)]
async fn t9_a_replay_ends_with_the_tiers_record() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    a.claim(&id("k"), same()).await.won().complete(outcome("a")).await.unwrap();
    advance(DAY - 10 * SECOND).await;
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("a"));
    advance(9 * SECOND).await;
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("a"));
    advance(SECOND).await;
    // Had B kept it for a day of its own, it would replay.
    b.claim(&id("k"), other()).await.won().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn t9_what_was_read_from_the_tier_gives_its_room_back_at_its_end() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    a.claim(&id("k"), same()).await.won().complete(outcome("a")).await.unwrap();
    advance(DAY - 10 * SECOND).await;
    // The first of the two ends last.
    b.claim(&id("later"), same()).await.won().complete(outcome("b")).await.unwrap();
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("a"));
    b.store().sweep();
    assert_eq!(b.store().stats().keys, 2);
    advance(10 * SECOND).await;
    b.store().sweep();
    assert_eq!(b.store().stats().keys, 1, "its neighbour has a day");
}

#[tokio::test(start_paused = true)]
async fn t5_a_duplicate_on_another_node_waits_and_gets_the_same_bytes() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    let permit = a.claim(&id("k"), same()).await.won();
    let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
    let waiter = tokio::spawn(pending.wait());
    sleep(5 * SECOND).await;
    assert!(!waiter.is_finished());
    permit.complete(outcome("a")).await.unwrap();
    match timeout(SECOND, waiter).await.unwrap().unwrap().unwrap() {
        TieredSettled::Completed(replay) => assert_eq!(replay.into_outcome(), outcome("a")),
        other => panic!("{other:?}"),
    }
    assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
}

#[tokio::test(start_paused = true)]
async fn t5_what_the_owner_on_another_node_gives_up_a_waiter_here_runs() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    let permit = a.claim(&id("k"), same()).await.won();
    let mut waiters = Vec::new();
    for _ in 0..3 {
        let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
        waiters.push(tokio::spawn(pending.wait()));
    }
    sleep(SECOND).await;
    permit.release().await.unwrap();
    let (mut won, mut told) = (0, 0);
    for waiter in waiters {
        match timeout(10 * SECOND, waiter).await.unwrap().unwrap().unwrap() {
            TieredSettled::Yours(permit) => {
                won += 1;
                permit.complete(outcome("b")).await.unwrap();
            }
            TieredSettled::Completed(_) => told += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((won, told), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn case_029_two_thousand_duplicates_ask_the_tier_a_few_times() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    let permit = node.claim(&id("k"), same()).await.won();
    let mut waiters = Vec::new();
    for _ in 0..1_000 {
        let Ok(TieredClaim::InFlight(pending)) = node.claim(&id("k"), same()).await else {
            panic!()
        };
        waiters.push(tokio::spawn(pending.wait()));
    }
    for _ in 0..1_000 {
        assert!(matches!(node.claim(&id("k"), same()).await, Ok(TieredClaim::InFlight(_))));
    }
    sleep(5 * SECOND).await;
    permit.complete(outcome("1")).await.unwrap();
    for waiter in waiters {
        assert!(matches!(waiter.await.unwrap(), Ok(TieredSettled::Completed(_))));
    }
    assert_eq!((tier.calls(CLAIM), tier.calls(COMPLETE), tier.calls(LOOK_UP)), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn case_029_on_another_node_too() {
    let tier = wire();
    let theirs = Wire::to(tier.tier.clone());
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&theirs, Lapse::Hold).await);
    let permit = a.claim(&id("k"), same()).await.won();
    let mut waiters = Vec::new();
    for _ in 0..1_000 {
        let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
        waiters.push(tokio::spawn(pending.wait()));
    }
    sleep(5 * SECOND).await;
    permit.complete(outcome("1")).await.unwrap();
    for waiter in waiters {
        assert!(matches!(waiter.await.unwrap(), Ok(TieredSettled::Completed(_))));
    }
    // One look in a quarter of a second, jittered by a half.
    assert!(theirs.calls(CLAIM) <= 2, "{}", theirs.calls(CLAIM));
    assert!((10..=50).contains(&theirs.calls(LOOK_UP)), "{}", theirs.calls(LOOK_UP));
}

#[tokio::test(start_paused = true)]
async fn case_105_a_tier_that_is_down_at_the_claim_lets_nothing_run() {
    let tier = wire();
    let closed = node(&tier, Lapse::Hold).await;
    let open = Tiered::builder(store(|it| it)).fail_open(true);
    let open = open.open(tier.clone(), Lapse::Hold).await.unwrap();
    for weather in [Weather::Down, Weather::Still] {
        tier.becomes(weather);
        for _ in 0..5 {
            match closed.claim(&id("k"), same()).await {
                Err(TieredError::Unavailable { retry_after, .. }) => assert!(retry_after >= SECOND),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(closed.stats().is_cut_off);
    // By setting, and counted.
    open.claim(&id("k"), same()).await.won().complete(outcome("open")).await.unwrap();
    assert_eq!(open.stats().failed_open, 1);
    assert_eq!(open.claim(&id("k"), same()).await.replayed(), outcome("open"));
    tier.becomes(Weather::Fair);
    until("the tier is asked again", async || !closed.stats().is_cut_off).await;
    closed.claim(&id("k"), same()).await.won().release().await.unwrap();
    assert!(Tiered::open(store(|it| it), cut(&tier), Lapse::Hold).await.is_err(), "at start");
}

#[tokio::test(start_paused = true)]
async fn r05_who_waits_for_another_node_hears_that_a_claim_with_another_body_took_its_place() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    let owner = a.claim(&id("k"), same()).await.won();
    let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
    let waiter = tokio::spawn(pending.wait());
    sleep(SECOND).await;
    // At once, so that nobody sees the key free.
    let token = Token::new(7, 1);
    let claim = NewClaim { token, fingerprint: other(), max_run: DAY, retention: DAY };
    tier.tier.beat(7, DAY).await.unwrap();
    assert_eq!(tier.tier.release(id("k"), owner.token()).await.unwrap(), Landed::Done);
    let _ = tier.tier.claim(id("k"), claim).await.unwrap();
    sleep(SECOND).await;
    assert!(waiter.is_finished(), "it waits for what is not there any more");
    assert!(matches!(waiter.await.unwrap(), Ok(TieredSettled::Mismatch)));
    assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::InFlight(_))));
}

#[tokio::test(start_paused = true)]
async fn r05_a_mismatch_with_what_was_let_in_past_the_tier_is_one() {
    let tier = wire();
    let open = Tiered::builder(store(|it| it)).fail_open(true);
    let open = open.open(tier.clone(), Lapse::Hold).await.unwrap();
    tier.becomes(Weather::Down);
    let _owner = open.claim(&id("k"), same()).await.won();
    assert!(matches!(open.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
    // The tier comes back, and never hears of the owner.
    tier.becomes(Weather::Fair);
    until("the tier is asked again", async || !open.stats().is_cut_off).await;
    let met = open.claim(&id("k"), other()).await;
    assert!(matches!(met, Ok(TieredClaim::Mismatch)), "{met:?}");
}

fn cut(tier: &Wire) -> Wire {
    let cut = Wire::to(tier.tier.clone());
    cut.becomes(Weather::Down);
    cut
}

#[tokio::test(start_paused = true)]
async fn case_105_a_tier_that_is_down_at_the_completion_is_told_later() {
    for weather in [Weather::Down, Weather::Deaf, Weather::Still] {
        let tier = wire();
        let theirs = Wire::to(tier.tier.clone());
        let (a, b) = (node(&tier, Lapse::Hold).await, node(&theirs, Lapse::Hold).await);
        let permit = a.claim(&id("k"), same()).await.won();
        let Ok(TieredClaim::InFlight(pending)) = a.claim(&id("k"), same()).await else { panic!() };
        let waiter = tokio::spawn(pending.wait());
        sleep(SECOND).await;
        tier.becomes(weather);
        assert!(permit.complete(outcome("1")).await.unwrap().kept, "the client gets its 201");
        assert!(
            matches!(waiter.await.unwrap(), Ok(TieredSettled::Completed(_))),
            "and so do others"
        );
        assert_eq!(a.claim(&id("k"), same()).await.replayed(), outcome("1"));
        assert_eq!((a.stats().unwritten, a.stats().late), (1, 1));
        sleep(5 * SECOND).await;
        tier.becomes(Weather::Fair);
        until("it lands", async || a.stats().unwritten == 0).await;
        assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("1"))));
        assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("1"));
        assert_eq!((a.stats().lost, a.stats().double_runs, a.stats().given_up), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn t1_memory_answers_for_a_completion_that_has_not_landed_only_while_its_owner_is_taken_for_alive()
 {
    let tier = wire();
    let a = node(&tier, Lapse::TakeOver).await;
    let permit = a.claim(&id("k"), same()).await.won();
    tier.becomes(Weather::Down);
    permit.complete(outcome("a")).await.unwrap();
    advance(LEASE - 3 * SECOND).await;
    assert_eq!(a.claim(&id("k"), same()).await.replayed(), outcome("a"));
    advance(3 * SECOND).await;
    // Another node may run it by now, so the tier is asked.
    assert!(matches!(a.claim(&id("k"), same()).await, Err(TieredError::Unavailable { .. })));
    tier.becomes(Weather::Fair);
    until("it lands", async || a.stats().unwritten == 0).await;
    assert_eq!(a.claim(&id("k"), same()).await.replayed(), outcome("a"));
}

/// The process was suspended, and by the tier's clock its lease is over: it does not take its own
/// claim over, whose completion the tier has still to be told.
#[tokio::test(start_paused = true)]
async fn r08_a_process_that_was_suspended_renews_its_claims_before_it_judges_them() {
    for on_lapse in [Lapse::TakeOver, Lapse::Hold] {
        let theirs = oncekey::ManualClock::new();
        let tier = Wire::to(Arc::new(MemoryTier::with_clock(theirs.clone())));
        let node = node(&tier, on_lapse).await;
        let permit = node.claim(&id("k"), same()).await.won();
        *tier.completions.lock().unwrap() = Weather::Down;
        permit.complete(outcome("1")).await.unwrap();
        // It has left a full memory.
        assert!(node.store().forget(&id("k")).unwrap());
        theirs.advance(2 * LEASE);
        assert_eq!(state(&tier, "k").await, Some(State::Lapsed));
        let settled = match node.claim(&id("k"), same()).await.unwrap() {
            TieredClaim::InFlight(pending) => {
                *tier.completions.lock().unwrap() = Weather::Fair;
                pending.wait().await.unwrap()
            }
            other => panic!("{on_lapse:?}: {other:?}"),
        };
        match settled {
            TieredSettled::Completed(replay) => assert_eq!(replay.into_outcome(), outcome("1")),
            other => panic!("{on_lapse:?}: {other:?}"),
        }
        assert_eq!((node.stats().taken_over, node.stats().lost), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn t4_a_claim_whose_answer_was_lost_shuts_nobody_out() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    tier.becomes(Weather::Deaf);
    assert!(matches!(node.claim(&id("k"), same()).await, Err(TieredError::Unavailable { .. })));
    assert_eq!(state(&tier, "k").await, Some(State::InFlight), "it got there");
    tier.becomes(Weather::Fair);
    until("it is given up", async || state(&tier, "k").await.is_none()).await;
    node.claim(&id("k"), same()).await.won().complete(outcome("1")).await.unwrap();
}

/// A claim is stuck on a connection, its caller gives up, and it gets there after its release did.
#[tokio::test(start_paused = true)]
async fn t4_a_claim_that_gets_there_after_its_release_shuts_nobody_out() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    *tier.late.lock().unwrap() = Some(8 * SECOND);
    assert!(matches!(node.claim(&id("k"), same()).await, Err(TieredError::Unavailable { .. })));
    *tier.late.lock().unwrap() = None;
    until("it gets there", async || state(&tier, "k").await == Some(State::InFlight)).await;
    sleep(LEASE).await;
    node.claim(&id("k"), same()).await.won().complete(outcome("1")).await.unwrap();
}

/// .. also if the tier does not answer when it is looked for.
#[tokio::test(start_paused = true)]
async fn t4_a_late_claim_is_looked_for_until_the_tier_answers() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    *tier.late.lock().unwrap() = Some(8 * SECOND);
    assert!(matches!(node.claim(&id("k"), same()).await, Err(TieredError::Unavailable { .. })));
    *tier.late.lock().unwrap() = None;
    until("it gets there", async || state(&tier, "k").await == Some(State::InFlight)).await;
    tier.becomes(Weather::Down);
    sleep(60 * SECOND).await;
    tier.becomes(Weather::Fair);
    until("it is looked for", async || state(&tier, "k").await.is_none()).await;
}

/// Polls `future` `times` times and drops it; what it answered, if it came to that.
async fn dropped_after<F: Future>(times: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    for _ in 0..times {
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(output) = polled {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

#[tokio::test(start_paused = true)]
async fn t8_a_claim_that_is_dropped_at_any_await_is_given_up() {
    for times in 0.. {
        let tier = wire();
        let node = node(&tier, Lapse::Hold).await;
        let claimed = dropped_after(times, node.claim(&id("k"), same())).await;
        let is_over = claimed.is_some();
        if let Some(claim) = claimed {
            claim.won().release().await.unwrap();
            assert!(times >= 3, "there were awaits to be dropped at: {times}");
        }
        let next = timeout(LEASE, async {
            match node.claim(&id("k"), same()).await.unwrap() {
                TieredClaim::Won(permit) => permit,
                TieredClaim::InFlight(pending) => match pending.wait().await.unwrap() {
                    TieredSettled::Yours(permit) => permit,
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            }
        });
        next.await
            .unwrap_or_else(|_| panic!("shut after {times}"))
            .complete(outcome("1"))
            .await
            .unwrap();
        if is_over {
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn t8_a_completion_that_is_dropped_at_any_await_lands() {
    for times in 0.. {
        let tier = wire();
        let node = node(&tier, Lapse::Hold).await;
        let permit = node.claim(&id("k"), same()).await.won();
        let is_over = dropped_after(times, permit.complete(outcome("1"))).await.is_some();
        if times == 0 {
            // Nobody has polled it: the permit was dropped, and nobody knows.
            continue;
        }
        until("it lands", async || node.stats().unwritten == 0).await;
        assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("1"))), "{times}");
        assert_eq!(node.claim(&id("k"), same()).await.replayed(), outcome("1"));
        if is_over {
            assert!(times > 2);
            return;
        }
    }
}

/// A claim of a node that has died: it beat once.
async fn left_by_the_dead(tier: &Wire, key: &str) -> Token {
    // By a clock that was far ahead.
    let token = Token::new(0xdead, u64::MAX / 2);
    tier.tier.beat(token.owner(), LEASE).await.unwrap();
    let (max_run, retention) = (15 * LEASE, DAY);
    let claim = NewClaim { token, fingerprint: same(), max_run, retention };
    assert_eq!(tier.tier.claim(id(key), claim).await.unwrap(), Claimed::Won { checkpoint: None });
    token
}

#[tokio::test(start_paused = true)]
async fn case_013_a_claim_of_a_dead_node_is_waited_for_and_then_treated_by_the_setting() {
    let tier = wire();
    left_by_the_dead(&tier, "taken").await;
    left_by_the_dead(&tier, "held").await;
    let taking = node(&tier, Lapse::TakeOver).await;
    let holding = node(&tier, Lapse::Hold).await;
    // Before its lease ends: in flight.
    let Ok(TieredClaim::InFlight(pending)) = taking.claim(&id("taken"), same()).await else {
        panic!()
    };
    let waiter = tokio::spawn(pending.wait());
    sleep(LEASE - SECOND).await;
    assert!(!waiter.is_finished());
    sleep(2 * SECOND).await;
    match timeout(SECOND, waiter).await.unwrap().unwrap().unwrap() {
        TieredSettled::Yours(permit) => drop(permit.complete(outcome("2")).await.unwrap()),
        other => panic!("{other:?}"),
    }
    assert_eq!(taking.stats().taken_over, 1);
    assert!(matches!(holding.claim(&id("held"), other()).await, Ok(TieredClaim::Mismatch)));
    assert!(matches!(holding.claim(&id("held"), same()).await, Ok(TieredClaim::Held)));
    // An operator finds out.
    let resolved = taking.resolve(&id("held"), Some(&outcome("3"))).await.unwrap();
    assert_eq!(resolved, Resolved::Done);
    sleep(5 * SECOND).await;
    assert_eq!(holding.claim(&id("held"), same()).await.replayed(), outcome("3"));
}

#[tokio::test(start_paused = true)]
async fn case_036_a_late_completion_after_a_takeover_is_lost_and_counted() {
    let tier = wire();
    let slow = Wire::to(tier.tier.clone());
    let (a, b) = (node(&slow, Lapse::TakeOver).await, node(&tier, Lapse::TakeOver).await);
    let permit = a.claim(&id("k"), same()).await.won();
    let first = permit.token();
    *slow.beats.lock().unwrap() = Weather::Down;
    sleep(LEASE + SECOND).await;
    let second = b.claim(&id("k"), same()).await.won();
    assert!(second.token().number() > first.number());
    second.complete(outcome("b")).await.unwrap();
    *slow.beats.lock().unwrap() = Weather::Fair;
    until("it beats again", async || !a.stats().is_cut_off).await;
    let lost = permit.complete(outcome("a")).await.unwrap_err();
    assert_eq!(lost.found().unwrap().state, State::Completed(outcome("b")));
    assert_eq!(lost.into_outcome(), Some(outcome("a")));
    assert_eq!((a.stats().lost, a.stats().double_runs), (1, 1));
    for node in [&a, &b] {
        assert_eq!(node.claim(&id("k"), same()).await.replayed(), outcome("b"));
    }
}

#[tokio::test(start_paused = true)]
async fn case_033_a_late_release_does_not_take_the_next_owners_claim() {
    let tier = wire();
    let slow = Wire::to(tier.tier.clone());
    let (a, b) = (node(&slow, Lapse::TakeOver).await, node(&tier, Lapse::TakeOver).await);
    let permit = a.claim(&id("k"), same()).await.won();
    *slow.beats.lock().unwrap() = Weather::Down;
    sleep(LEASE + SECOND).await;
    let second = b.claim(&id("k"), same()).await.won();
    *slow.beats.lock().unwrap() = Weather::Fair;
    until("it beats again", async || !a.stats().is_cut_off).await;
    assert!(permit.release().await.is_err());
    assert!(matches!(a.claim(&id("k"), same()).await, Ok(TieredClaim::InFlight(_))));
    second.complete(outcome("b")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn r8_an_owner_that_was_silent_and_beats_again_keeps_what_nobody_took() {
    let tier = wire();
    let slow = Wire::to(tier.tier.clone());
    let (a, b) = (node(&slow, Lapse::TakeOver).await, node(&tier, Lapse::TakeOver).await);
    let permit = a.claim(&id("k"), same()).await.won();
    *slow.beats.lock().unwrap() = Weather::Down;
    sleep(LEASE + SECOND).await;
    assert_eq!(state(&tier, "k").await, Some(State::Lapsed));
    *slow.beats.lock().unwrap() = Weather::Fair;
    until("it beats", async || state(&tier, "k").await == Some(State::InFlight)).await;
    let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
    permit.complete(outcome("a")).await.unwrap();
    assert!(matches!(pending.wait().await, Ok(TieredSettled::Completed(_))));
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("a"));
}

#[tokio::test(start_paused = true)]
async fn t9_what_is_forgotten_is_forgotten_on_other_nodes_within_five_seconds() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::Hold).await, node(&tier, Lapse::Hold).await);
    sleep(3 * SECOND).await;
    a.claim(&id("k"), same()).await.won().complete(outcome("1")).await.unwrap();
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("1"));
    assert_eq!(a.forget(&id("k"), false).await.unwrap(), Forgotten::Gone);
    sleep(5 * SECOND).await;
    let permit = b.claim(&id("k"), same()).await.won();
    assert_eq!(a.forget(&id("k"), false).await.unwrap(), Forgotten::Busy);
    assert_eq!(a.forget(&id("k"), true).await.unwrap(), Forgotten::Gone);
    assert!(permit.complete(outcome("2")).await.is_err(), "its token is stale");
}

#[tokio::test(start_paused = true)]
async fn r11_a_permit_that_is_dropped_is_settled_in_the_tier() {
    let tier = wire();
    let a = node(&tier, Lapse::TakeOver).await;
    let b =
        Tiered::open(store(|it| it.on_abandon(Abandon::Release)), tier.clone(), Lapse::TakeOver);
    let b = b.await.unwrap();
    drop(a.claim(&id("held"), same()).await.won());
    drop(b.claim(&id("free"), same()).await.won());
    until("told", async || a.stats().unwritten + b.stats().unwritten == 0).await;
    assert_eq!(state(&tier, "held").await, Some(State::Held));
    assert!(matches!(b.claim(&id("held"), same()).await, Ok(TieredClaim::Held)));
    a.claim(&id("free"), same()).await.won().hold().await.unwrap();
    assert!(matches!(b.claim(&id("free"), same()).await, Ok(TieredClaim::Held)));
    // Given up by an operator: here at once, there within 5 s.
    assert_eq!(a.resolve(&id("free"), None).await.unwrap(), Resolved::Done);
    sleep(5 * SECOND).await;
    b.claim(&id("free"), same()).await.won().complete_not_kept().await.unwrap();
    assert!(matches!(a.claim(&id("free"), same()).await, Ok(TieredClaim::NotKept)));
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_goes_to_the_next_owner() {
    let tier = wire();
    let token = left_by_the_dead(&tier, "k").await;
    let left = Bytes::from_static(b"charged");
    assert_eq!(tier.tier.checkpoint(id("k"), token, left.clone()).await.unwrap(), Landed::Done);
    let node = node(&tier, Lapse::TakeOver).await;
    advance(LEASE).await;
    let mut permit = node.claim(&id("k"), same()).await.won();
    assert_eq!(permit.take_checkpoint(), Some(left));
    assert!(permit.token().number() > token.number(), "whatever the clocks say");
    assert!(permit.checkpoint("booked").await.unwrap());
    assert_eq!(tier.tier.checkpoint(id("k"), token, Bytes::new()).await.unwrap(), {
        Landed::Lost(tier.tier.look_up(id("k")).await.unwrap())
    });
    permit.complete(outcome("1")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn r25_completed_records_leave_memory_for_new_ones_and_are_replayed_from_the_tier() {
    let tier = wire();
    let small = store(|it| it.max_keys(500));
    let node = Tiered::open(small, tier.clone(), Lapse::Hold).await.unwrap();
    let running = node.claim(&id("running"), same()).await.won();
    for n in 0..5_000 {
        let key = n.to_string();
        node.claim(&id(&key), same()).await.won().complete(outcome(&key)).await.unwrap();
    }
    let stats = node.store().stats();
    assert!(stats.keys <= 500 && stats.evicted >= 4_500, "{stats:?}");
    // The youngest are still there, the oldest are read again, and nobody forgets.
    let is_there = |n: &usize| node.store().look_up(&id(&n.to_string())).is_some();
    let kept: Vec<usize> = (0..5_000).filter(is_there).collect();
    // Some more than needed leave at a time; what is left is the end of the line, without a gap.
    assert!(kept.len() > 400 && kept[0] == 5_000 - kept.len(), "{kept:?}");
    let asked = tier.calls(CLAIM);
    assert_eq!(node.claim(&id("4999"), same()).await.replayed(), outcome("4999"));
    assert_eq!(tier.calls(CLAIM), asked);
    for n in 0..5_000 {
        let key = n.to_string();
        assert_eq!(node.claim(&id(&key), same()).await.replayed(), outcome(&key));
    }
    assert!(matches!(node.claim(&id("running"), same()).await, Ok(TieredClaim::InFlight(_))));
    running.complete(outcome("ran")).await.unwrap();
    // An answer that needs more room than was reserved finds it too.
    let large = Outcome::new(200).body(vec![7; 100_000]);
    node.claim(&id("large"), same()).await.won().complete(large.clone()).await.unwrap();
    assert_eq!(node.claim(&id("large"), same()).await.replayed(), large);
}

#[tokio::test(start_paused = true)]
async fn r26_memory_that_was_evicted_is_given_back() {
    let memory = MemoryTier::with_clock(clock());
    let tier = Wire::to(Arc::new(memory.clone()));
    let small = store(|it| it.max_bytes(1 << 20));
    let node = Tiered::open(small, tier.clone(), Lapse::Hold).await.unwrap();
    for n in 0..3_000 {
        let key = n.to_string();
        let large = Outcome::new(200).body(vec![7; 5_000]);
        node.claim(&id(&key), same()).await.won().complete(large).await.unwrap();
        assert!(node.store().stats().bytes <= 1 << 20);
    }
    advance(DAY + LEASE).await;
    node.store().sweep();
    assert_eq!(node.store().stats().keys, 0);
    until("the tier is reaped", async || memory.is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn t2_records_that_transactions_have_in_their_hands_close_the_tier_to_nobody_else() {
    let tier = wire();
    let node = node(&tier, Lapse::Hold).await;
    let mut permits = Vec::new();
    for n in 0..10 {
        permits.push(node.claim(&id(&n.to_string()), same()).await.won());
    }
    *tier.completions.lock().unwrap() = Weather::Locked;
    for permit in permits {
        permit.complete(outcome("1")).await.unwrap();
    }
    assert_eq!((node.stats().is_cut_off, node.stats().unwritten), (false, 10));
    *tier.completions.lock().unwrap() = Weather::Fair;
    until("they land", async || node.stats().unwritten == 0).await;
    assert_eq!((node.stats().given_up, node.stats().lost), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn t6_outcome_and_transaction_appear_together() {
    let tier = wire();
    let (a, b) = (node(&tier, Lapse::TakeOver).await, node(&tier, Lapse::TakeOver).await);
    let permit = a.claim(&id("k"), same()).await.won();
    let mut tx = Tx::begin(&tier).await;
    let staged = permit.complete_in(&mut tx, outcome("1")).await.unwrap();
    assert_eq!(state(&tier, "k").await, Some(State::InFlight));
    assert!(matches!(a.claim(&id("k"), same()).await, Ok(TieredClaim::InFlight(_))));
    tx.commit().await;
    let completions = tier.calls(COMPLETE);
    assert!(staged.publish().await.unwrap().kept);
    assert_eq!(tier.calls(COMPLETE), completions, "no step of its own");
    assert_eq!(a.claim(&id("k"), same()).await.replayed(), outcome("1"));
    assert_eq!(b.claim(&id("k"), same()).await.replayed(), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn t6_a_transaction_that_was_rolled_back_leaves_the_identity_free() {
    let tier = wire();
    let node = node(&tier, Lapse::TakeOver).await;
    let permit = node.claim(&id("k"), same()).await.won();
    let mut tx = Tx::begin(&tier).await;
    let staged = permit.complete_in(&mut tx, outcome("1")).await.unwrap();
    drop(tx);
    staged.rolled_back().await.unwrap();
    node.claim(&id("k"), same()).await.won().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn t6_a_commit_whose_answer_was_lost_is_found_out_by_a_write_that_waits_for_it() {
    for commits in [true, false] {
        let tier = wire();
        let node = node(&tier, Lapse::TakeOver).await;
        let permit = node.claim(&id("k"), same()).await.won();
        let mut tx = Tx::begin(&tier).await;
        let staged = permit.complete_in(&mut tx, outcome("1")).await.unwrap();
        drop(staged);
        // The transaction is still open: nobody runs it, whatever it becomes.
        sleep(30 * SECOND).await;
        assert!(matches!(node.claim(&id("k"), same()).await, Ok(TieredClaim::InFlight(_))));
        if commits {
            tx.commit().await;
            until("it is known", async || {
                matches!(node.claim(&id("k"), same()).await, Ok(TieredClaim::Replay(_)))
            })
            .await;
            assert_eq!(node.claim(&id("k"), same()).await.replayed(), outcome("1"));
        } else {
            drop(tx);
            until("it is given up", async || state(&tier, "k").await.is_none()).await;
            sleep(SECOND).await;
            node.claim(&id("k"), same()).await.won().release().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn t6_who_has_lost_the_claim_stages_nothing() {
    let tier = wire();
    let slow = Wire::to(tier.tier.clone());
    let (a, b) = (node(&slow, Lapse::TakeOver).await, node(&tier, Lapse::TakeOver).await);
    let permit = a.claim(&id("k"), same()).await.won();
    *slow.beats.lock().unwrap() = Weather::Down;
    sleep(LEASE + SECOND).await;
    let second = b.claim(&id("k"), same()).await.won();
    *slow.beats.lock().unwrap() = Weather::Fair;
    let mut tx = Tx::begin(&slow).await;
    match permit.complete_in(&mut tx, outcome("a")).await {
        Err(StageError::Lost(lost)) => assert_eq!(lost.into_outcome(), Some(outcome("a"))),
        other => panic!("{other:?}"),
    }
    drop(tx);
    second.complete(outcome("b")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn r05_a_mismatch_with_a_claim_on_its_way_to_the_tier_is_none_yet() {
    let tier = wire();
    let a = node(&tier, Lapse::Hold).await;
    a.claim(&id("k"), same()).await.won().complete(outcome("a")).await.unwrap();
    // A cold node, and a way to the tier that is long.
    let slow = Wire::to(Arc::clone(&tier.tier));
    let b = node(&slow, Lapse::Hold).await;
    slow.claims_wait();
    let on_its_way = slow.row.clone().lock_owned().await;
    let claims = b.clone();
    let wrong = tokio::spawn(async move { claims.claim(&id("k"), other()).await });
    sleep(Duration::from_millis(1)).await;
    let claims = b.clone();
    let right = tokio::spawn(async move { claims.claim(&id("k"), same()).await });
    sleep(SECOND).await;
    assert!(!right.is_finished() && !wrong.is_finished());
    drop(on_its_way);
    assert_eq!(right.await.unwrap().replayed(), outcome("a"));
    assert!(matches!(wrong.await.unwrap(), Ok(TieredClaim::Mismatch)));

    // Once it is there it is one, at once.
    let _owner = b.claim(&id("l"), same()).await.won();
    let asked = Instant::now();
    assert!(matches!(b.claim(&id("l"), other()).await, Ok(TieredClaim::Mismatch)));
    assert_eq!(asked.elapsed(), Duration::ZERO);

    // Nor is it one to who waited for another, and finds it in its place.
    let owner = b.claim(&id("n"), same()).await.won();
    let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("n"), same()).await else { panic!() };
    let mut waiter = pin!(pending.wait());
    assert!(poll(waiter.as_mut()).is_pending());
    // An operator forgets it, here alone: in the tier it is completed meanwhile.
    b.store().forget_forced(&id("n"));
    let _ = tier.tier.complete(id("n"), owner.token(), Some(&outcome("n")), DAY).await.unwrap();
    let on_its_way = slow.row.clone().lock_owned().await;
    let n = id("n");
    let mut wrong = pin!(b.claim(&n, other()));
    assert!(poll(wrong.as_mut()).is_pending());
    let release = async {
        sleep(SECOND).await;
        drop(on_its_way);
    };
    let (told, wrong, ()) = tokio::join!(waiter, wrong, release);
    assert!(matches!(told, Ok(TieredSettled::Completed(_))), "{told:?}");
    assert!(matches!(wrong, Ok(TieredClaim::Mismatch)), "{wrong:?}");

    // While the tier is down nobody knows.
    let _on_its_way = slow.row.clone().lock_owned().await;
    let o = id("o");
    let mut lost = pin!(b.claim(&o, other()));
    for _ in 0..5 {
        assert!(poll(lost.as_mut()).is_pending());
        tokio::task::yield_now().await;
    }
    slow.becomes(Weather::Down);
    let met = b.claim(&o, same()).await;
    assert!(matches!(met, Err(TieredError::Unavailable { .. })), "{met:?}");
}
