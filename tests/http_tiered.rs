//! Two nodes of a service on one tier, over sockets: what a client sees that is sent to either
//! (T1, T2, T5), and what an outage of the tier does.
#![cfg(all(feature = "axum", feature = "tier"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/http.rs"]
mod sockets;
#[path = "common/tiers.rs"]
mod tiers;

use std::time::Duration;

use axum::{
    Router,
    routing::{get_service, post},
};
use common::{LONG, watchdog};
use oncekey::{
    Lapse, Store,
    http::IdempotencyLayer,
    tier::{MemoryTier, Tiered},
};
use sockets::{Client, Gate, Runs, Server, ask, asking, request, serve, until};
use tiers::{CLAIM, LOOK_UP, Weather, Wire};

/// One process: its memory, and what its handler does.
struct Node {
    tiered: Tiered,
    layer: IdempotencyLayer,
    server: Server,
    wire: Wire,
}

/// A node on `tier` whose handler waits at `gate` and says which run of all nodes it is.
async fn node(tier: &MemoryTier, runs: &Runs, gate: &Gate, store: Store) -> Node {
    let wire = Wire::to(std::sync::Arc::new(tier.clone()));
    let builder = Tiered::builder(store).poll_every(Duration::from_millis(5));
    let builder = builder.answer_within(LONG);
    let tiered = builder.open(wire.clone(), Lapse::TakeOver).await.unwrap();
    let layer = IdempotencyLayer::single_tenant(tiered.clone()).wait_limit(LONG);
    let (runs, gate) = (runs.clone(), gate.clone());
    let charge = move || {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move {
            let run = runs.up();
            gate.pass().await;
            (http::StatusCode::CREATED, [("x-run", run.to_string())], run.to_string())
        }
    };
    let app = Router::new()
        .route("/charges", post(charge))
        .layer(layer.clone())
        .route("/attempt", get_service(layer.look_up("POST /charges")));
    Node { tiered, layer, server: serve(app).await, wire }
}

fn charge(body: &str) -> Vec<u8> {
    sockets::post("/charges", "k", body)
}

fn memory() -> Store {
    Store::builder().build().unwrap()
}

/// Two nodes with one gate.
async fn two() -> ([Node; 2], Runs, Gate) {
    let (tier, runs, gate) = (MemoryTier::new(), Runs::default(), Gate::new());
    let nodes =
        [node(&tier, &runs, &gate, memory()).await, node(&tier, &runs, &gate, memory()).await];
    (nodes, runs, gate)
}

#[tokio::test]
async fn t5_a_duplicate_that_reaches_another_node_waits_and_gets_the_same_bytes() {
    let _watchdog = watchdog();
    let ([a, b], runs, gate) = two().await;
    let first = asking(&a.server, charge("{}"));
    gate.entered().await;
    let duplicate = asking(&b.server, charge("{}"));
    until(|| b.tiered.store().stats().waiters == 1).await;
    let mismatch = ask(&b.server, charge("{\"other\":1}")).await;
    assert_eq!((mismatch.status, mismatch.problem().as_str()), (422, "key-reused"));
    let state = ask(&b.server, request("GET", "/attempt", &[("Idempotency-Key", "k")], "")).await;
    assert!(state.text().contains("in-flight"), "{}", state.text());
    gate.open();
    let (first, duplicate) = (first.await.unwrap(), duplicate.await.unwrap());
    assert_eq!((first.status, first.text(), first.is_replay()), (201, "1", false));
    assert_eq!((duplicate.status, duplicate.text(), duplicate.is_replay()), (201, "1", true));
    assert_eq!(duplicate.field("x-run"), Some("1"));
    assert_eq!(runs.count(), 1);
    let state = ask(&b.server, request("GET", "/attempt", &[("Idempotency-Key", "k")], "")).await;
    assert!(state.text().contains("completed"), "{}", state.text());
    for node in [&a, &b] {
        until(|| node.layer.stats().tasks == 0).await;
        assert_eq!(node.tiered.store().stats().in_flight, 0);
    }
}

#[tokio::test]
async fn case_109_a_node_that_starts_later_replays() {
    let _watchdog = watchdog();
    let (tier, runs, gate) = (MemoryTier::new(), Runs::default(), Gate::new());
    gate.open();
    let a = node(&tier, &runs, &gate, memory()).await;
    assert_eq!(ask(&a.server, charge("{}")).await.text(), "1");
    drop(a);
    let b = node(&tier, &runs, &gate, memory()).await;
    let mismatch = ask(&b.server, charge("{\"other\":1}")).await;
    assert_eq!((mismatch.status, mismatch.problem().as_str()), (422, "key-reused"));
    let replay = ask(&b.server, charge("{}")).await;
    assert_eq!((replay.status, replay.text(), replay.is_replay()), (201, "1", true));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r05_another_body_that_comes_first_to_a_cold_node_takes_no_answer_away() {
    let _watchdog = watchdog();
    let ([a, b], runs, gate) = two().await;
    gate.open();
    assert_eq!(ask(&a.server, charge("{}")).await.text(), "1");
    b.wire.claims_wait();
    let on_its_way = b.wire.row.clone().lock_owned().await;
    let wrong = asking(&b.server, charge("{\"other\":1}"));
    until(|| b.wire.calls(CLAIM) == 1).await;
    let right = asking(&b.server, charge("{}"));
    until(|| right.is_finished() || b.wire.calls(LOOK_UP) > 0).await;
    drop(on_its_way);
    let (wrong, right) = (wrong.await.unwrap(), right.await.unwrap());
    assert_eq!((wrong.status, wrong.problem().as_str()), (422, "key-reused"));
    assert_eq!((right.status, right.text(), right.is_replay()), (201, "1", true));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn t2_a_tier_that_is_down_is_a_503_that_says_when_to_come_back() {
    let _watchdog = watchdog();
    let ([a, _b], runs, gate) = two().await;
    gate.open();
    a.wire.becomes(Weather::Down);
    for _ in 0..5 {
        let refused = ask(&a.server, charge("{}")).await;
        assert_eq!((refused.status, refused.problem().as_str()), (503, "tier-unavailable"));
        let after: u64 = refused.field("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&after));
    }
    assert_eq!(runs.count(), 0);
    a.wire.becomes(Weather::Fair);
    until(|| !a.tiered.stats().is_cut_off).await;
    assert_eq!(ask(&a.server, charge("{}")).await.text(), "1");
}

#[tokio::test]
async fn case_105_a_charge_whose_outcome_cannot_be_stored_is_answered_and_stored_later() {
    let _watchdog = watchdog();
    for weather in [Weather::Down, Weather::Deaf] {
        let ([a, b], runs, gate) = two().await;
        let first = asking(&a.server, charge("{}"));
        gate.entered().await;
        a.wire.becomes(weather);
        gate.open();
        let first = first.await.unwrap();
        assert_eq!((first.status, first.text()), (201, "1"));
        let replay = ask(&a.server, charge("{}")).await;
        assert_eq!((replay.text(), replay.is_replay()), ("1", true));
        assert_eq!(a.tiered.stats().unwritten, 1);
        a.wire.becomes(Weather::Fair);
        until(|| a.tiered.stats().unwritten == 0).await;
        let replay = ask(&b.server, charge("{}")).await;
        assert_eq!((replay.text(), replay.is_replay()), ("1", true));
        assert_eq!(runs.count(), 1);
    }
}

/// The tier is silent while the claim is on its way: the client gives up, the work is done, and its
/// retry gets the answer.
#[tokio::test]
async fn r18_a_client_that_leaves_during_the_claim_finds_its_answer_later() {
    let _watchdog = watchdog();
    let ([a, _b], runs, gate) = two().await;
    gate.open();
    let silence = a.wire.row.clone().lock_owned().await;
    a.wire.claims_wait();
    let mut client = Client::connect(&a.server).await;
    client.send(charge("{}")).await;
    until(|| a.wire.calls(tiers::CLAIM) == 1).await;
    client.reset();
    drop(silence);
    until(|| a.tiered.store().stats().completed == 1).await;
    let replay = ask(&a.server, charge("{}")).await;
    assert_eq!((replay.text(), replay.is_replay()), ("1", true));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r25_what_has_left_memory_is_replayed_from_the_tier() {
    let _watchdog = watchdog();
    let (tier, runs, gate) = (MemoryTier::new(), Runs::default(), Gate::new());
    (0..50).for_each(|_| gate.open());
    let store = Store::builder().max_keys(10).build().unwrap();
    let a = node(&tier, &runs, &gate, store).await;
    let charge = |n: u32| sockets::post("/charges", &format!("key-{n}"), "{}");
    for n in 1..=50 {
        assert_eq!(ask(&a.server, charge(n)).await.text(), n.to_string());
    }
    for n in 1..=50 {
        let replay = ask(&a.server, charge(n)).await;
        assert_eq!((replay.text(), replay.is_replay()), (&*n.to_string(), true));
    }
    assert_eq!(runs.count(), 50);
}
