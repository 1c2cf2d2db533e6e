//! The request body: whole for the handler, and nothing claimed before it is in.

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, Request, StatusCode},
    middleware,
    response::{IntoResponse, Response},
    routing::{any, post as route},
};
use bytes::Bytes;
use http::Method;
use http_body_util::{BodyExt, Limited};

use crate::{
    assert_idle,
    common::MS,
    idle, layer,
    sockets::{Client, Gate, Runs, serve, until},
    store,
    wire::{Present, Wire, assert_replay, charge, keyless},
};

const LIMIT: usize = 20_000;

/// Answers with what it has read: the body's bytes, its trailers and its type.
async fn echo(request: Request<Body>) -> Response {
    let kind = request.headers().get("content-type").cloned();
    let read = request.into_body().collect().await.unwrap();
    let trailers: Vec<_> = read
        .trailers()
        .into_iter()
        .flat_map(HeaderMap::iter)
        .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
        .collect();
    let mut response = (StatusCode::CREATED, read.to_bytes()).into_response();
    response.headers_mut().remove("content-type");
    response.headers_mut().extend(kind.map(|kind| (http::header::CONTENT_TYPE, kind)));
    response.headers_mut().insert("x-trailers", trailers.join("&").try_into().unwrap());
    response
}

/// `POST /charges`, which echoes and counts.
fn echoing(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move |request: Request<Body>| {
        runs.up();
        echo(request)
    };
    Router::new().route("/charges", any(handler))
}

/// Bytes that tell where one is.
fn numbered(len: usize) -> Bytes {
    (0..len).map(|at| (at ^ (at >> 8)) as u8).collect()
}

over_all! {
    case_114_the_handler_sees_the_same_body,
    case_114_one_byte_more_is_413_and_claims_nothing,
    case_114_a_body_limit_outside_is_413_too,
    case_114_the_claim_is_taken_when_the_body_is_in,
    case_114_an_upload_that_stalls_is_408_and_claims_nothing,
    case_114_a_client_gone_in_the_middle_of_its_upload_claims_nothing,
    case_114_a_body_that_nobody_reads_does_no_harm,
    case_114_a_refusal_reaches_a_client_that_is_still_writing,
    case_114_a_refusal_for_lack_of_room_reaches_it_too,
}

async fn case_114_the_handler_sees_the_same_body(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(LIMIT);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    let calls = [
        charge("json").field("Content-Type", "application/json").body(r#"{"a": [1, 2.0]}"#),
        charge("form").field("Content-Type", "application/x-www-form-urlencoded").body("a=1&b=%20"),
        charge("binary").body(numbered(1_000)),
        charge("pieces").body(numbered(1_000)).in_pieces(1),
        charge("trailers").body("abc").in_pieces(2).trailer("x-sum", "7").trailer("x-end", "1"),
        charge("only-trailers").body("").in_pieces(1).trailer("x-sum", "0"),
        charge("nothing").body(""),
        charge("no-pieces").body("").in_pieces(1),
        charge("limit").body(numbered(LIMIT)),
        charge("limit-in-pieces").body(numbered(LIMIT)).in_pieces(999),
    ];
    // This nginx drops trailers that are chunked, and takes those of HTTP/2 for a fault.
    let calls =
        calls.into_iter().filter(|call| !server.is_proxied() || call.trailer_text().is_empty());
    for (nth, call) in calls.enumerate() {
        let first = wire.ask(&server, call.clone()).await;
        assert_eq!(first.status, 201, "{nth}");
        assert_eq!(first.body, call.body_bytes(), "{nth}");
        assert_eq!(first.field("content-type"), call.field_value("Content-Type"));
        assert_eq!(first.field("x-trailers").unwrap(), call.trailer_text());
        assert_replay(&wire.ask(&server, call).await, &first);
        assert_eq!(runs.count(), nth + 1);
    }
    // How it was framed does not count, the bytes do.
    let pieces = wire.ask(&server, charge("limit").body(numbered(LIMIT)).in_pieces(7_777)).await;
    assert!(pieces.is_replay());
    assert_idle(&once);
}

async fn case_114_one_byte_more_is_413_and_claims_nothing(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(LIMIT);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    for over in [
        charge("k").body(numbered(LIMIT + 1)),
        charge("k").body(numbered(LIMIT + 1)).in_pieces(1_000),
        charge("k").body(numbered(LIMIT + 1)).in_pieces(LIMIT + 1),
    ] {
        let refused = wire.ask(&server, over).await;
        assert_eq!((refused.status, refused.problem().as_str()), (413, "request-too-large"));
        idle(&once).await;
        assert_eq!((runs.count(), store.stats().won, store.stats().keys), (0, 0, 0));
    }
    // The key is as new, also for another body.
    assert_eq!(wire.ask(&server, charge("k")).await.status, 201);
    // What is not covered is not limited.
    let put = charge("k").method(Method::PUT).body(numbered(LIMIT + 1));
    assert_eq!(wire.ask(&server, put).await.body, numbered(LIMIT + 1));
}

/// A limit of another layer outside of ours.
async fn case_114_a_body_limit_outside_is_413_too(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let limited = middleware::map_request(|request: Request<Body>| async {
        request.map(|body| Body::new(Limited::new(body, LIMIT)))
    });
    let server = serve(echoing(&runs).layer(once.clone()).layer(limited)).await;
    let over = charge("k").body(numbered(LIMIT + 1));
    for over in [over.clone(), over.in_pieces(1_000)] {
        let refused = wire.ask(&server, over).await;
        assert_eq!((refused.status, refused.problem().as_str()), (413, "request-too-large"));
    }
    assert_eq!((runs.count(), store.stats().won), (0, 0));
    idle(&once).await;
}

/// Two uploads with one key: the one that is in first runs, whichever began first.
async fn case_114_the_claim_is_taken_when_the_body_is_in(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    let call = charge("k").body(numbered(1_000));
    let slow = wire.upload(&server, &call, 400).await;
    until(|| once.stats().buffered >= 400).await;
    assert_eq!((store.stats().keys, once.stats().tasks), (0, 0));
    let quick = wire.ask(&server, call.clone()).await;
    assert_eq!((quick.status, quick.is_replay(), runs.count()), (201, false, 1));
    let slow = slow.finish().await.reply().await;
    assert_replay(&slow, &quick);
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// An upload that stalls holds nothing but its own bytes, and not for ever.
async fn case_114_an_upload_that_stalls_is_408_and_claims_nothing(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).read_limit(MS);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    let call = charge("k").body(numbered(1_000));
    let told = wire.upload(&server, &call, 400).await.reply().await;
    assert_eq!((told.status, told.problem().as_str()), (408, "request-too-slow"));
    idle(&once).await;
    assert_eq!((runs.count(), store.stats().won, store.stats().keys), (0, 0, 0));
}

async fn case_114_a_client_gone_in_the_middle_of_its_upload_claims_nothing(wire: Wire) {
    for &way in wire.ways_to_leave() {
        let (store, runs) = (store(), Runs::default());
        let (once, present) = (layer(&store), Present::default());
        let server = serve(present.around(echoing(&runs).layer(once.clone()))).await;
        let call = charge("k").body(numbered(1_000));
        let gone = wire.upload(&server, &call, 400).await;
        until(|| once.stats().buffered >= 400).await;
        let _stays = gone.leave(way).await;
        until(|| present.count() == 0).await;
        assert_idle(&once);
        assert_eq!((store.stats().won, store.stats().keys), (0, 0), "{way:?}");
        let retry = wire.ask(&server, call).await;
        assert_eq!((retry.status, retry.is_replay(), runs.count()), (201, false, 1));
    }
}

/// The handler may read the body when it likes, or not at all.
async fn case_114_a_body_that_nobody_reads_does_no_harm(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let once = layer(&store);
    let at = gate.clone();
    let handler = move |request: Request<Body>| async move {
        at.pass().await;
        drop(request);
        at.pass().await;
        "unread"
    };
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    let call = charge("k").body(numbered(50_000));
    let first = wire.asking(&server, call.clone()).await;
    gate.entered().await;
    assert_eq!(once.stats().buffered, 50_000, "held for the handler");
    gate.open();
    gate.entered().await;
    assert_eq!(once.stats().buffered, 0, "until it drops the body");
    gate.open();
    assert_replay(&wire.ask(&server, call).await, &first.await.unwrap());
    assert_idle(&once);
}

/// Whoever sends first and listens then, as proxies do, finds the answer and not a connection that
/// was cut off under its hands.
async fn case_114_a_refusal_reaches_a_client_that_is_still_writing(wire: Wire) {
    const LARGE: usize = 1_000_000;
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store)
        .max_request(LARGE)
        .operation("PATCH /charges", |policy| policy.max_request(LARGE / 2));
    let server = serve(echoing(&runs).layer(once.clone())).await;
    let body = numbered(LARGE);
    for (call, status, problem) in [
        (keyless("/charges"), 400, "key-missing"),
        (charge("a b"), 400, "key-invalid"),
        (charge("k").method(Method::PATCH), 413, "request-too-large"),
    ] {
        let call = call.body(body.clone());
        for call in [call.clone(), call.in_pieces(9_999)] {
            let refused = wire.ask(&server, call).await;
            assert_eq!((refused.status, refused.problem().as_str()), (status, problem));
        }
    }
    idle(&once).await;
    assert_eq!((runs.count(), store.stats().keys), (0, 0));
}

async fn case_114_a_refusal_for_lack_of_room_reaches_it_too(wire: Wire) {
    const LARGE: usize = 1_000_000;
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(LARGE);
    for (once, status, problem) in [
        (once.clone().max_buffered(LARGE / 10), 503, "too-busy"),
        (once.max_buffered_per_account(LARGE / 10), 429, "account-over-share"),
    ] {
        let server = serve(echoing(&runs).layer(once.clone())).await;
        for call in
            [charge("k").body(numbered(LARGE)), charge("k").body(numbered(LARGE)).in_pieces(9_999)]
        {
            let refused = wire.ask(&server, call).await;
            assert_eq!((refused.status, refused.problem().as_str()), (status, problem));
        }
        idle(&once).await;
    }
    assert_eq!((runs.count(), store.stats().keys), (0, 0));
}

/// What is read for nobody has an end.
#[tokio::test]
async fn case_114_a_refused_upload_without_end_is_cut_off() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(LIMIT);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    for (method, head) in [("POST", ""), ("POST", "Idempotency-Key: k\r\n")] {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let head = format!(
            "{method} /charges HTTP/1.1\r\nHost: test\r\n{head}Transfer-Encoding: chunked\r\n\r\n"
        );
        let chunk = format!("3e8\r\n{}\r\n", "x".repeat(1_000));
        tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
        while tokio::io::AsyncWriteExt::write_all(&mut stream, chunk.as_bytes()).await.is_ok() {}
    }
    assert_eq!((runs.count(), store.stats().keys), (0, 0));
    assert_idle(&once);
}

/// A client that asks before it sends is told to go on only if the head is good.
#[tokio::test]
async fn case_114_expect_100_continue_is_answered_once_the_head_is_good() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(LIMIT);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    let head = |call: crate::wire::Call| {
        let bytes = call.field("Expect", "100-continue").to_bytes();
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        bytes[..end].to_vec()
    };
    let good = charge("k").body(numbered(LIMIT));
    for is_again in [false, true] {
        let mut client = Client::connect(&server).await;
        client.send(head(good.clone())).await;
        client.expect_line("HTTP/1.1 100 Continue").await;
        assert_eq!(store.stats().won, u64::from(is_again), "nothing claimed before the body");
        let reply = client.ask(good.body_bytes()).await;
        assert_eq!((reply.status, reply.is_replay()), (201, is_again));
        assert_eq!(reply.body, numbered(LIMIT));
    }
    for (bad, problem) in [
        (keyless("/charges").body(numbered(100)), "key-missing"),
        (charge("a b").body(numbered(100)), "key-invalid"),
        (charge("k").field("Idempotency-Key", "k"), "key-invalid"),
        (charge("k2").body(numbered(LIMIT + 1)), "request-too-large"),
    ] {
        let mut client = Client::connect(&server).await;
        let reply = client.ask(head(bad)).await;
        assert_eq!(reply.interim, [0; 0], "{problem}");
        assert_eq!(reply.problem(), problem);
    }
    assert_eq!((runs.count(), store.stats().keys), (1, 1));
    assert_idle(&once);
}

/// A body that is no chunked body.
#[tokio::test]
async fn case_114_a_malformed_body_claims_nothing() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(echoing(&runs).layer(once.clone())).await;
    for body in ["zz\r\nabc\r\n0\r\n\r\n", "3\r\nabcd\r\n0\r\n\r\n", "ffffffffffffffffff\r\n"] {
        let mut client = Client::connect(&server).await;
        let head = "POST /charges HTTP/1.1\r\nHost: test\r\nIdempotency-Key: k\r\n\
                    Transfer-Encoding: chunked\r\n\r\n";
        let reply = client.ask(format!("{head}{body}")).await;
        assert_eq!(reply.status, 400, "{body:?}");
    }
    idle(&once).await;
    assert_eq!((runs.count(), store.stats().won), (0, 0));
}
