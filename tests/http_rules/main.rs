//! The rules as they show to a client over a socket; each test is named by its rule.
//!
//! A test waits for events: a handler that stands at a gate, a gauge of the store. Where a limit
//! must be seen to end something, it is set to next to nothing; where it must not, out of reach.
#![cfg(feature = "axum")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]
#![allow(unreachable_pub, reason = "the shared modules are public to whoever takes them in")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/http.rs"]
mod sockets;

mod admission;
mod limits;
mod owners;
mod replies;
mod settings;
mod streams;
mod waiting;

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use oncekey::{
    Identity, Store,
    http::{BoxError, IdempotencyLayer},
};
use tokio::sync::mpsc;

use crate::{
    common::LONG,
    sockets::{Gate, Runs, backing},
};

/// A store at its defaults.
fn store() -> Store {
    Store::builder().build().unwrap()
}

/// A layer whose limits of time no test reaches.
fn layer(store: &Store) -> IdempotencyLayer {
    IdempotencyLayer::single_tenant(backing(store))
        .wait_limit(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
}

/// `POST /charges`, which says how often it ran.
fn charges(runs: &Runs) -> Router {
    let runs = runs.clone();
    Router::new().route("/charges", post(move || async move { runs.up().to_string() }))
}

/// `POST /charges` behind a gate.
fn gated(runs: &Runs, gate: &Gate) -> Router {
    let (runs, gate) = (runs.clone(), gate.clone());
    let handler = move || async move {
        let run = runs.up();
        gate.pass().await;
        run.to_string()
    };
    Router::new().route("/charges", post(handler))
}

/// The identity of `POST /charges` under the one account of a single tenant.
fn charge(key: &str) -> Identity<'_> {
    Identity::new("", "POST /charges", key).unwrap()
}

/// A response body that the test feeds; it ends when the sender is dropped.
fn fed() -> (mpsc::Sender<Result<Bytes, BoxError>>, Body) {
    let (sender, mut receiver) = mpsc::channel(1);
    let stream = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
    (sender, Body::from_stream(stream))
}

/// What a handler that panics does.
fn fail() -> String {
    panic!("the handler panics, as it should in this test")
}
