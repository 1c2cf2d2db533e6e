//! Public fault reports, played over sockets; each test carries the number of its case.
//!
//! A case that says "after 50 ms" is told here by events: while the handler is known to run, while
//! a duplicate is known to wait, once the server is known to have seen the client leave. Where a
//! limit must be seen to end something, it is set to next to nothing; where it must not, out of
//! reach. Unless a case is about one protocol, it runs over HTTP/1.1 and over HTTP/2, and many run
//! with an nginx between client and server as well.
#![cfg(feature = "axum")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/http.rs"]
mod sockets;
#[macro_use]
mod wire;

mod abuse;
mod answers;
mod around;
mod bodies;
mod framing;
mod hooks;
mod inner;
mod keys;
mod owners;
mod pressure;
mod proxied;
mod replays;
mod smuggling;

use axum::{Router, http::StatusCode, middleware::Next, response::IntoResponse, routing::post};
use http::{Request, Response};
use hyper::body::Incoming;
use oncekey::{
    Identity, Store,
    http::{BoxError, IdempotencyLayer},
};
use tower::{Service, load_shed::error::Overloaded};

use crate::{
    common::LONG,
    sockets::{Gate, Runs, Server, backing, serve_service},
};

/// A store at its defaults.
fn store() -> Store {
    Store::builder().build().unwrap()
}

/// A layer for one tenant whose limits of time no test reaches.
fn layer(store: &Store) -> IdempotencyLayer {
    IdempotencyLayer::single_tenant(backing(store))
        .wait_limit(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
}

/// `POST /charges` behind a gate; the answer says which run it was.
fn gated(runs: &Runs, gate: &Gate) -> Router {
    let (runs, gate) = (runs.clone(), gate.clone());
    charges(move || {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move {
            let run = runs.up();
            gate.pass().await;
            (StatusCode::CREATED, [("location", format!("/charges/{run}"))], run.to_string())
        }
    })
}

/// `POST /charges`, which says how often it ran.
fn counting(runs: &Runs) -> Router {
    let runs = runs.clone();
    charges(move || std::future::ready((StatusCode::CREATED, runs.up().to_string())))
}

/// `POST /charges` with a handler that looks at nothing.
fn charges<H, F>(handler: H) -> Router
where
    H: FnOnce() -> F + Clone + Send + Sync + 'static,
    F: Future<Output: IntoResponse> + Send + 'static,
{
    Router::new().route("/charges", post(handler))
}

/// The identity of `POST /charges` under the one account of a single tenant.
fn charge(key: &str) -> Identity<'_> {
    Identity::new("", "POST /charges", key).unwrap()
}

/// Serves a stack of tower services whose errors become 502, or 503 for shed load.
async fn serve_fallible<S, R>(stack: S) -> Server
where
    S: Service<Request<Incoming>, Response = Response<R>> + Clone + Send + Sync + 'static,
    S::Error: Into<BoxError> + Send,
    S::Future: Send,
    Response<R>: IntoResponse,
    R: Send + 'static,
{
    let answer = |error: S::Error| async {
        let error = error.into();
        let is_shed = error.is::<Overloaded>();
        let status =
            if is_shed { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::BAD_GATEWAY };
        (status, error.to_string())
    };
    serve_service(axum::error_handling::HandleError::new(stack, answer)).await
}

/// What authentication left in the request.
#[derive(Clone)]
struct Account(Vec<u8>);

/// Puts the account into the request that `Authorization` names.
async fn authenticate(mut request: axum::extract::Request, next: Next) -> axum::response::Response {
    if let Some(account) = request.headers().get("authorization") {
        let account = Account(account.as_bytes().to_vec());
        request.extensions_mut().insert(account);
    }
    next.run(request).await
}

/// A layer for those whom [`authenticate`] knows, whose limits of time no test reaches.
fn of_account(store: &Store) -> IdempotencyLayer {
    IdempotencyLayer::new(backing(store), |parts| {
        parts.extensions.get::<Account>().map(|account| account.0.clone())
    })
    .wait_limit(LONG)
    .read_limit(LONG)
    .capture_time(LONG)
}

/// Nothing is at work, nobody waits, no byte of a request is held.
#[track_caller]
fn assert_idle(layer: &IdempotencyLayer) {
    let (store, http) = (layer.store().stats(), layer.stats());
    assert_eq!((store.in_flight, store.waiters), (0, 0), "{store:?}");
    assert_eq!((http.tasks, http.buffered), (0, 0), "{http:?}");
}

/// As [`assert_idle`], once the tasks and connections that still run have come to their ends.
async fn idle(layer: &IdempotencyLayer) {
    sockets::until(|| {
        let (store, http) = (layer.store().stats(), layer.stats());
        [store.in_flight, store.waiters, http.tasks, http.buffered] == [0; 4]
    })
    .await;
}
