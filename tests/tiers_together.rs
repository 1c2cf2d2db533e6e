//! What memory and tier do together, on each tier there is: the reported faults that are about both.
//!
//! Time is real here, because the servers have clocks of their own: a short lease, and waiting until
//! the tier itself says that it has lapsed.
#![cfg(all(feature = "embedded", feature = "sqlite", feature = "postgres", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/redis.rs"]
mod redis_server;
#[path = "common/tiers.rs"]
mod tiers;

use std::{path::PathBuf, sync::Arc, time::Duration};

use common::{LONG, id, outcome, watchdog};
use oncekey::{
    Fingerprint, Lapse, Outcome, Store,
    tier::{
        EmbeddedTier, Forgotten, MemoryTier, PostgresTier, RedisTier, SqliteTier, State, Tier,
        Tiered, TieredClaim, TieredError, TieredPermit, TieredSettled,
    },
};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tiers::{CLAIM, COMPLETE, LOOK_UP, Weather, Wire};

/// A tier, and what has to live as long.
struct Place {
    name: &'static str,
    tier: Arc<dyn Tier>,
    _server: Option<redis_server::Server>,
    directory: Option<PathBuf>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(directory) = self.directory.take() {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

fn directory(test: &str, name: &str) -> PathBuf {
    let name = format!("oncekey-{test}-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// All tiers whose servers are installed.
async fn places(test: &str) -> Vec<Place> {
    let place = |name, tier, server, directory| Place { name, tier, _server: server, directory };
    let mut places =
        vec![place("memory", Arc::new(MemoryTier::new()) as Arc<dyn Tier>, None, None)];
    let at = directory(test, "embedded");
    let tier = Arc::new(EmbeddedTier::open(&at).unwrap());
    places.push(place("embedded", tier, None, Some(at)));
    let at = directory(test, "sqlite");
    let file = SqliteConnectOptions::new().filename(at.join("db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(file).await.unwrap();
    places.push(place("sqlite", Arc::new(SqliteTier::open(pool).await.unwrap()), None, Some(at)));
    if let Some(server) = postgres_server::shared() {
        let builder = PostgresTier::builder().durability(oncekey::tier::Durability::KilledProcess);
        let schema = test.to_lowercase();
        let tier = builder.schema(&schema).connect(server.pool().await).await.unwrap();
        places.push(place("postgres", Arc::new(tier), None, None));
    }
    if redis_server::is_installed() {
        let server = redis_server::Server::durable().await;
        let tier = Arc::new(RedisTier::connect(&server.url()).await.unwrap());
        places.push(place("redis", tier, Some(server), None));
    }
    places
}

/// A node on a way of its own to the tier.
async fn node(place: &Place, lease: Duration, on_lapse: Lapse) -> (Tiered, Wire) {
    let wire = Wire::to(Arc::clone(&place.tier));
    let store = Store::builder().lease(lease).build().unwrap();
    let builder = Tiered::builder(store).poll_every(Duration::from_millis(10));
    (builder.open(wire.clone(), on_lapse).await.unwrap(), wire)
}

fn same() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"same")
}

fn other() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"other")
}

async fn won(node: &Tiered, key: &str) -> TieredPermit {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Won(permit)) => permit,
        other => panic!("not won: {other:?}"),
    }
}

async fn replayed(node: &Tiered, key: &str) -> Outcome {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Replay(replay)) => replay.into_outcome(),
        other => panic!("no replay: {other:?}"),
    }
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until the tier says that the owner of `key` has lapsed.
async fn lapsed(place: &Place, key: &str) {
    until(async || {
        let found = place.tier.look_up(id(key)).await.unwrap();
        found.unwrap().state == State::Lapsed
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_109_nodes_see_each_other_and_a_later_one_replays() {
    let _watchdog = watchdog();
    for place in places("case_109").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(b.look_up(&id("k")).await.unwrap(), None, "{}", place.name);
        won(&a, "k").await.complete(outcome("a")).await.unwrap();
        assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
        assert_eq!(replayed(&b, "k").await, outcome("a"), "{}", place.name);
        drop(a);
        let (c, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(replayed(&c, "k").await, outcome("a"), "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_029_two_thousand_duplicates_ask_the_tier_a_few_times() {
    let _watchdog = watchdog();
    for place in places("case_029").await {
        let (node, wire) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&node, "k").await;
        let mut waiters = Vec::new();
        for n in 0..2_000 {
            let claim = node.claim(&id("k"), same()).await;
            let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{claim:?}") };
            if n % 2 == 0 {
                waiters.push(tokio::spawn(pending.wait()));
            }
        }
        permit.complete(outcome("1")).await.unwrap();
        for waiter in waiters {
            let settled = waiter.await.unwrap();
            assert!(matches!(settled, Ok(TieredSettled::Completed(_))), "{settled:?}");
        }
        let calls = [CLAIM, COMPLETE, LOOK_UP].map(|verb| wire.calls(verb));
        assert_eq!(calls, [1, 1, 0], "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t5_a_duplicate_on_another_node_waits_and_gets_the_same_bytes() {
    let _watchdog = watchdog();
    for place in places("t5").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&a, "k").await;
        let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
        let waiter = tokio::spawn(pending.wait());
        until(async || b.store().stats().waiters == 1).await;
        let bytes = Outcome::new(201).header("x", b"\xff\x00").header("x", "").body(vec![0, 255]);
        permit.complete(bytes.clone()).await.unwrap();
        match waiter.await.unwrap() {
            Ok(TieredSettled::Completed(replay)) => assert_eq!(replay.into_outcome(), bytes),
            other => panic!("{}: {other:?}", place.name),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_105_outages_at_the_claim_and_at_the_completion() {
    let _watchdog = watchdog();
    for place in places("case_105").await {
        let (a, wire) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        wire.becomes(Weather::Down);
        let refused = a.claim(&id("refused"), same()).await;
        assert!(matches!(refused, Err(TieredError::Unavailable { .. })), "{}", place.name);
        assert_eq!(place.tier.look_up(id("refused")).await.unwrap(), None, "{}", place.name);
        for (key, weather) in [("down", Weather::Down), ("deaf", Weather::Deaf)] {
            wire.becomes(Weather::Fair);
            until(async || !a.stats().is_cut_off).await;
            let permit = won(&a, key).await;
            wire.becomes(weather);
            assert!(permit.complete(outcome(key)).await.unwrap().kept);
            assert_eq!(replayed(&a, key).await, outcome(key));
            wire.becomes(Weather::Fair);
            until(async || a.stats().unwritten == 0).await;
            assert_eq!(replayed(&b, key).await, outcome(key), "{}", place.name);
            assert_eq!((a.stats().lost, a.stats().given_up), (0, 0), "{}", place.name);
        }
    }
}

/// A node that shows no sign of life: its claim is taken over, and nothing it does afterwards counts.
#[tokio::test(flavor = "multi_thread")]
async fn case_013_case_033_case_036_a_silent_owner_is_taken_over_and_its_late_steps_are_lost() {
    let _watchdog = watchdog();
    for place in places("case_036").await {
        let (a, wire) = node(&place, Duration::from_secs(1), Lapse::TakeOver).await;
        let (b, _) = node(&place, LONG, Lapse::TakeOver).await;
        let late = [won(&a, "completed").await, won(&a, "released").await];
        // Before it lapses: in flight, on every node.
        let claim = b.claim(&id("completed"), same()).await;
        let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{}: {claim:?}", place.name) };
        *wire.beats.lock().unwrap() = Weather::Down;
        let Ok(TieredSettled::Yours(second)) = pending.wait().await else { panic!() };
        lapsed(&place, "released").await;
        let third = won(&b, "released").await;
        *wire.beats.lock().unwrap() = Weather::Fair;
        second.complete(outcome("b")).await.unwrap();
        until(async || !a.stats().is_cut_off).await;
        let [completed, released] = late;
        let lost = completed.complete(outcome("a")).await.unwrap_err();
        assert_eq!(lost.found().unwrap().state, State::Completed(outcome("b")), "{}", place.name);
        assert_eq!((a.stats().lost, a.stats().double_runs), (1, 1), "{}", place.name);
        assert!(released.release().await.is_err(), "{}", place.name);
        third.complete(outcome("b")).await.unwrap();
        for node in [&a, &b] {
            assert_eq!(replayed(node, "completed").await, outcome("b"), "{}", place.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t9_what_is_forgotten_is_forgotten_on_other_nodes() {
    let _watchdog = watchdog();
    for place in places("t9").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, wire) = node(&place, LONG, Lapse::Hold).await;
        // It has asked once, so that it is told from here on.
        until(async || wire.calls(tiers::OTHERS) > 0).await;
        won(&a, "k").await.complete(outcome("1")).await.unwrap();
        assert_eq!(replayed(&b, "k").await, outcome("1"));
        assert_eq!(a.forget(&id("k"), false).await.unwrap(), Forgotten::Gone);
        until(async || matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Won(_)))).await;
    }
}
