//! The layer's memory against the allocator's bytes: a stream is not gathered, a promise of bytes
//! is not believed, and nothing is kept that was not counted (R19, R20; case 65).
//!
//! Server, clients and tasks of a test share one thread, whose allocations are counted by
//! themselves.
#![cfg(feature = "axum")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/counting.rs"]
mod counting;
#[path = "common/http.rs"]
mod sockets;

use std::convert::Infallible;

use axum::{Router, body::Body, http::header, response::IntoResponse, routing::post as route};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::BodyExt;
use oncekey::{Store, http::IdempotencyLayer};

use crate::{
    common::{LONG, watchdog},
    counting::Since,
    sockets::{Client, Gate, ask, asking, connect_h2, post, serve, until},
};

const MIB: usize = 1 << 20;

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::single_tenant(Store::builder().build().unwrap())
        .wait_limit(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
}

/// `POST /charges`, which streams 64 MiB as `kind`.
fn streaming(kind: &'static str) -> Router {
    Router::new().route(
        "/charges",
        route(move || async move {
            let event = |_| Ok::<_, Infallible>(Bytes::from(vec![b'x'; MIB / 16]));
            let events = stream::iter((0..16 * 64).map(event));
            ([(header::CONTENT_TYPE, kind)], Body::from_stream(events)).into_response()
        }),
    )
}

/// A stream that is known by its type, and one that shows by its length. Half of the allowed
/// megabytes are what the sockets' buffers and one captured prefix may hold.
#[tokio::test]
async fn case_065_a_long_stream_takes_no_more_memory_than_a_short_one() {
    let _watchdog = watchdog();
    for (kind, at_most) in [("text/event-stream", 2 * MIB), ("application/octet-stream", 4 * MIB)] {
        let once = layer();
        let server = serve(streaming(kind).layer(once.clone())).await;
        let mut client = Client::connect(&server).await;
        client.send(post("/charges", "http1", "{}")).await;
        assert_eq!(client.head().await.status, 200);
        let since = Since::now();
        let mut received = 0;
        while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
            received += chunk.len();
        }
        assert_eq!(received, 64 * MIB);
        assert!(since.peak() < at_most, "{kind}: {} bytes at once", since.peak());
        assert_eq!(
            ask(&server, post("/charges", "http1", "{}")).await.problem(),
            "response-not-kept"
        );

        let mut client = connect_h2(&server).await;
        let request = http::Request::post("http://test/charges").header("idempotency-key", "http2");
        let response = client.send_request(request.body("{}".into()).unwrap()).await.unwrap();
        let (since, mut body, mut received) = (Since::now(), response.into_body(), 0);
        while let Some(frame) = body.frame().await {
            received += frame.unwrap().into_data().unwrap().len();
        }
        assert_eq!(received, 64 * MIB);
        assert!(since.peak() < at_most, "{kind}: {} bytes at once", since.peak());
        assert_eq!(
            ask(&server, post("/charges", "http2", "{}")).await.problem(),
            "response-not-kept"
        );
    }
}

/// Many clients that announce much and send little.
#[tokio::test]
async fn case_114_announced_bytes_are_not_allocated_before_they_come() {
    let _watchdog = watchdog();
    let once = layer().max_request(1 << 30).max_buffered(1 << 40);
    let app =
        Router::new().route("/charges", route(|body: Bytes| async move { body.len().to_string() }));
    let server = serve(app.layer(once.clone())).await;
    let head = |nth: usize| {
        format!(
            "POST /charges HTTP/1.1\r\nHost: test\r\nIdempotency-Key: k{nth}\r\n\
             Content-Length: {}\r\n\r\nx",
            1 << 30
        )
    };
    let mut clients = Vec::new();
    let since = Since::now();
    for nth in 0..50 {
        let mut client = Client::connect(&server).await;
        client.send(head(nth)).await;
        clients.push(client);
    }
    until(|| once.stats().buffered >= 50).await;
    assert!(once.stats().buffered <= 50 * 8192, "{:?}", once.stats());
    // The buffers of both ends of each connection, of a few pages, are in this as well.
    assert!(since.peak() < 50 * 100 * 1024, "{} bytes at once", since.peak());
    drop(clients);
    until(|| once.stats().buffered == 0).await;
}

/// Duplicates of one large request that wait for it.
#[tokio::test]
async fn case_114_waiters_share_the_bytes_of_the_owner() {
    let _watchdog = watchdog();
    let (once, gate) = (layer(), Gate::new());
    let at = gate.clone();
    let handler = move |body: Bytes| async move {
        at.pass().await;
        body.len().to_string()
    };
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    let since = Since::now();
    let body = "x".repeat(MIB);
    let mut all = Vec::new();
    for waiters in 0..40 {
        all.push(asking(&server, post("/charges", "k", &body)));
        until(|| once.store().stats().waiters == waiters && once.stats().buffered == MIB).await;
    }
    // The body here, the request that each client's task has sent and keeps, and up to half a
    // megabyte that a connection has read into. Without sharing it would be 40 MiB more.
    let sent = 41 * (MIB + 200);
    let rest = since.bytes().saturating_sub(sent);
    assert!(rest < MIB + 40 * MIB / 2, "{rest} bytes besides those of the clients");
    gate.open();
    for reply in all {
        assert_eq!(reply.await.unwrap().text(), MIB.to_string());
    }
    until(|| once.stats().buffered == 0).await;
}

/// A handler that answers with a few bytes of a large buffer: what is kept is what is counted.
#[tokio::test]
async fn case_065_a_kept_outcome_does_not_hold_on_to_a_larger_buffer() {
    let _watchdog = watchdog();
    let once = layer();
    let handler = |body: Bytes| async move {
        let large = Bytes::from(vec![b'x'; MIB]);
        match &body[..] {
            b"sized" => Body::from(large.slice(..10)),
            _ => Body::from_stream(stream::iter([Ok::<_, Infallible>(large.slice(..10))])),
        }
    };
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    let mut client = Client::connect(&server).await;
    let mut run = async |nth: usize| {
        for body in ["sized", "stream"] {
            let reply = client.ask(post("/charges", &format!("{body}-{nth}"), body)).await;
            assert_eq!(reply.text(), "x".repeat(10));
        }
    };
    run(0).await;
    let since = Since::now();
    for nth in 1..=50 {
        run(nth).await;
    }
    assert_eq!(once.store().stats().completed, 102);
    // The store's own count, and tables that grew.
    assert!(since.bytes() < 400 * 1024, "{} bytes", since.bytes());
}

/// Clients that ask for what is there and do not read it: each holds its connection, and all of
/// them together hold the stored bytes once.
#[tokio::test]
async fn case_060_slow_readers_of_a_replay_share_its_bytes() {
    let _watchdog = watchdog();
    let once = layer().max_response(8 * MIB);
    let handler = || async { vec![b'x'; 8 * MIB] };
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    assert_eq!(ask(&server, post("/charges", "k", "{}")).await.body.len(), 8 * MIB);
    let (since, mut slow) = (Since::now(), Vec::new());
    for _ in 0..40 {
        let mut client = Client::connect(&server).await;
        client.send(post("/charges", "k", "{}")).await;
        let head = client.head().await;
        assert_eq!((head.status, head.is_replay()), (200, true));
        slow.push(client);
    }
    assert!(since.bytes() < 8 * MIB, "{} bytes for those who do not read", since.bytes());
    assert_eq!((once.stats().tasks, once.store().stats().in_flight), (0, 0), "nobody is at work");
    // Others are not kept from it, and it is whole for those who read on, though it was forgotten.
    assert!(ask(&server, post("/charges", "k", "{}")).await.is_replay());
    let id = oncekey::Identity::new("", "POST /charges", "k").unwrap();
    assert_eq!(once.store().forget(&id), Ok(true));
    let mut last = slow.pop().unwrap();
    assert!(last.bytes(8 * MIB).await.iter().all(|&byte| byte == b'x'));
}
