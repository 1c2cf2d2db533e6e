//! Workers on a clock that stands still while anybody has something to do, and what they run.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    future::Future,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use oncekey::{
    Clock, Fingerprint, Identity, Lapse, Outcome, Store, StoreBuilder, Sweep,
    tier::{MemoryTier, State, Tiered},
    worker::{Job, Ran, Verdict, Worker},
};
use tokio::time::{Instant, sleep};

use crate::tiers::Wire;

pub const SECOND: Duration = Duration::from_secs(1);
pub const LEASE: Duration = Duration::from_secs(60);
pub const MAX_RUN: Duration = Duration::from_secs(15 * 60);

/// Tokio's clock.
pub struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

pub fn clock() -> Paused {
    Paused(Instant::now())
}

pub fn store_with(set: impl FnOnce(StoreBuilder) -> StoreBuilder) -> Store {
    set(Store::builder().sweep(Sweep::Manual).clock(clock())).build().unwrap()
}

pub fn wire() -> Wire {
    Wire::to(Arc::new(MemoryTier::with_clock(clock())))
}

pub async fn node_with(
    wire: &Wire,
    lapse: Lapse,
    set: impl FnOnce(StoreBuilder) -> StoreBuilder,
) -> Tiered {
    Tiered::open(store_with(set), wire.clone(), lapse).await.unwrap()
}

pub async fn node(wire: &Wire) -> Tiered {
    node_with(wire, Lapse::TakeOver, |it| it).await
}

/// One over memory and one over a tier: the same face.
pub async fn both_with(set: fn(StoreBuilder) -> StoreBuilder) -> [(Worker, Store); 2] {
    let store = store_with(set);
    let tiered = node_with(&wire(), Lapse::TakeOver, set).await;
    let memory = tiered.store().clone();
    [(Worker::from(store.clone()), store), (Worker::from(tiered), memory)]
}

pub async fn both() -> [(Worker, Store); 2] {
    both_with(|it| it).await
}

pub fn id(key: &str) -> Identity<'_> {
    Identity::new("acct", "charge", key).unwrap()
}

pub fn fp(body: &str) -> Fingerprint {
    Fingerprint::request("", "charge", body.as_bytes())
}

pub fn outcome(body: &str) -> Outcome {
    Outcome::new(200).body(body.to_owned())
}

pub fn done(body: &str) -> Verdict {
    Verdict::Done(outcome(body))
}

pub fn text(ran: &Ran) -> &str {
    std::str::from_utf8(ran.outcome.bytes()).unwrap()
}

/// Work that must not run.
pub async fn never(_: Job) -> Verdict {
    panic!("it ran");
}

/// Polls once.
pub fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets everybody go on until they wait for something.
pub async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

pub async fn state(wire: &Wire, key: &str) -> Option<State> {
    wire.tier.look_up(id(key)).await.unwrap().map(|found| found.state)
}
