//! The request body: R19.

use axum::{Router, body::Bytes, routing::post};
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use oncekey::http::Fingerprinting;

use crate::{
    LONG, charge,
    common::{MS, watchdog},
    layer,
    sockets::{
        Client, Gate, Runs, ask, asking, connect_h2, post as posting, request, serve, until,
    },
    store,
};

/// Gives the body back.
fn echo(runs: &Runs) -> Router {
    let runs = runs.clone();
    Router::new().route(
        "/charges",
        post(move |body: Bytes| async move {
            runs.up();
            body
        }),
    )
}

#[tokio::test]
async fn r19_the_handler_gets_the_same_bytes_up_to_the_limit() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(echo(&runs).layer(layer(&store))).await;
    for len in [0, 1, 8 * 1024, 100_000, (1 << 20) - 1, 1 << 20] {
        let body: String = (0..len).map(|nth| char::from(b'a' + (nth % 23) as u8)).collect();
        let key = format!("k{len}");
        for is_replay in [false, true] {
            let reply = ask(&server, posting("/charges", &key, &body)).await;
            assert_eq!((reply.status, reply.is_replay()), (200, is_replay), "{len}");
            assert!(reply.text() == body, "{len}");
        }
    }
    let runs_before = runs.count();
    let over = ask(&server, posting("/charges", "over", &"x".repeat((1 << 20) + 1))).await;
    assert_eq!((over.status, over.problem().as_str()), (413, "request-too-large"));
    assert!(store.look_up(&charge("over")).is_none());
    assert_eq!(runs.count(), runs_before);
}

#[tokio::test]
async fn r19_an_announced_length_over_the_limit_is_refused_unread() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(echo(&runs).layer(layer(&store).max_request(10))).await;
    let mut client = Client::connect(&server).await;
    let head = "POST /charges HTTP/1.1\r\nHost: t\r\nIdempotency-Key: k\r\n";
    // Nothing of the body is ever sent.
    let reply = client.ask(format!("{head}Content-Length: 11\r\n\r\n")).await;
    assert_eq!(reply.problem(), "request-too-large");

    // One that announces nothing is cut off as it comes.
    let mut client = Client::connect(&server).await;
    let chunks = "6\r\nabcdef\r\n5\r\nghijk\r\n0\r\n\r\n";
    let reply = client.ask(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunks}")).await;
    assert_eq!(reply.problem(), "request-too-large");
    assert_eq!((runs.count(), store.stats().won), (0, 0));

    let mut client = Client::connect(&server).await;
    let chunks = "6\r\nabcdef\r\n4\r\nghij\r\n0\r\n\r\n";
    let reply = client.ask(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunks}")).await;
    assert_eq!(reply.text(), "abcdefghij");
    assert_eq!(client.ask(posting("/charges", "k", "abcdefghij")).await.text(), "abcdefghij");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r19_a_body_slower_than_the_limit_is_refused_and_nothing_is_claimed() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(echo(&runs).layer(layer(&store).read_limit(MS * 20))).await;
    let mut client = Client::connect(&server).await;
    let head = "POST /charges HTTP/1.1\r\nHost: t\r\nIdempotency-Key: k\r\nContent-Length: 9\r\n";
    let reply = client.ask(format!("{head}\r\nabc")).await;
    assert_eq!((reply.status, reply.problem().as_str()), (408, "request-too-slow"));
    assert_eq!((runs.count(), store.stats().won), (0, 0));
}

#[tokio::test]
async fn r19_the_claim_is_taken_only_after_the_body_is_in() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).read_limit(LONG);
    let server = serve(echo(&runs).layer(layer.clone())).await;
    let head = "POST /charges HTTP/1.1\r\nHost: t\r\nIdempotency-Key: k\r\nContent-Length: 6\r\n";
    let mut slow = Client::connect(&server).await;
    slow.send(format!("{head}\r\nabc")).await;
    until(|| layer.stats().buffered > 0).await;
    assert!(store.look_up(&charge("k")).is_none());
    // Another one with the same key passes it by.
    assert_eq!(ask(&server, posting("/charges", "k", "abcdef")).await.text(), "abcdef");
    slow.send("def").await;
    assert!(slow.reply().await.is_replay());

    let mut leaving = Client::connect(&server).await;
    leaving.send(format!("{head}\r\nabc").replace(": k", ": l")).await;
    until(|| layer.stats().buffered > 0).await;
    leaving.reset();
    until(|| layer.stats().buffered == 0).await;
    assert_eq!((runs.count(), store.stats().won), (1, 1));
}

#[tokio::test]
async fn r19_a_client_that_expects_100_is_told_to_go_on_only_after_the_head_has_passed() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(echo(&runs).layer(layer(&store).max_request(10))).await;
    let head = "POST /charges HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n";
    for (rest, problem) in [
        ("Content-Length: 6\r\n", "key-missing"),
        ("Content-Length: 6\r\nIdempotency-Key: \"\r\n", "key-invalid"),
        ("Content-Length: 11\r\nIdempotency-Key: k\r\n", "request-too-large"),
    ] {
        let mut client = Client::connect(&server).await;
        let reply = client.ask(format!("{head}{rest}\r\n")).await;
        assert_eq!(reply.problem(), problem);
        assert!(reply.interim.is_empty(), "{problem}");
    }
    let mut client = Client::connect(&server).await;
    client.send(format!("{head}Content-Length: 6\r\nIdempotency-Key: k\r\n\r\n")).await;
    client.expect_line("HTTP/1.1 100 Continue").await;
    client.send("abcdef").await;
    assert_eq!(client.reply().await.text(), "abcdef");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r19_trailers_reach_the_handler() {
    let _watchdog = watchdog();
    let store = store();
    let handler = |body: axum::body::Body| async move {
        let all = body.collect().await.unwrap();
        let trailer = all.trailers().and_then(|trailers| trailers.get("x-sum")).cloned();
        format!("{:?} {:?}", trailer, all.to_bytes())
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer(&store));
    let server = serve(app).await;
    let head = "POST /charges HTTP/1.1\r\nHost: t\r\nIdempotency-Key: k\r\nTrailer: x-sum\r\n";
    let chunked = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 7\r\n\r\n";
    let reply = ask(&server, format!("{head}{chunked}")).await;
    assert_eq!(reply.text(), "Some(\"7\") b\"abc\"");

    let mut client = connect_h2(&server).await;
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("8"));
    let body = http_body_util::Full::<Bytes>::from("abc")
        .with_trailers(std::future::ready(Some(Ok(trailers))));
    let request = http::Request::post("http://test/charges").header("idempotency-key", "k2");
    let request = request.body(axum::body::Body::new(body)).unwrap();
    let reply = client.send_request(request).await.unwrap().into_body();
    assert_eq!(reply.collect().await.unwrap().to_bytes(), "Some(\"8\") b\"abc\"");
}

/// A handler that holds its body at a gate.
fn holding(gate: &Gate) -> Router {
    let gate = gate.clone();
    let handler = move |body: Bytes| async move {
        gate.pass().await;
        body.len().to_string()
    };
    Router::new().route("/charges", post(handler))
}

#[tokio::test]
async fn r19_all_buffered_bytes_together_are_limited() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let layer = layer(&store).max_buffered(1_000_000);
    let server = serve(holding(&gate).layer(layer.clone())).await;
    let large = "x".repeat(600_000);
    let first = asking(&server, posting("/charges", "k1", &large));
    gate.entered().await;
    assert_eq!(layer.stats().buffered, 600_000);
    let busy = ask(&server, posting("/charges", "k2", &large)).await;
    assert_eq!((busy.status, busy.problem().as_str()), (503, "too-busy"));
    assert!(store.look_up(&charge("k2")).is_none());
    gate.open();
    assert_eq!(first.await.unwrap().text(), "600000");
    until(|| layer.stats().buffered == 0).await;
    gate.open();
    assert_eq!(ask(&server, posting("/charges", "k2", &large)).await.text(), "600000");
}

#[tokio::test]
async fn r19_a_waiter_shares_the_owners_bytes_where_the_fingerprint_covers_them() {
    let _watchdog = watchdog();
    for covers in [true, false] {
        let (store, gate) = (store(), Gate::new());
        let layer = layer(&store);
        let layer = match covers {
            true => layer,
            false => layer.fingerprint(Fingerprinting::canonical_json()),
        };
        let server = serve(holding(&gate).layer(layer.clone())).await;
        let body = "x".repeat(100_000);
        let first = asking(&server, posting("/charges", "k", &body));
        gate.entered().await;
        let waiting: Vec<_> =
            (0..5).map(|_| asking(&server, posting("/charges", "k", &body))).collect();
        until(|| store.stats().waiters == 5).await;
        assert_eq!(layer.stats().buffered, if covers { 100_000 } else { 600_000 });
        gate.open();
        assert_eq!(first.await.unwrap().text(), "100000");
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap().text(), "100000");
        }
        until(|| layer.stats().buffered == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn r19_a_waiter_shares_the_owners_bytes_while_the_handler_has_not_waited_yet() {
    let _watchdog = watchdog();
    let store = store();
    let layer = layer(&store);
    let (inside, seen) = (store.clone(), layer.clone());
    let (entered, is_entered) = tokio::sync::oneshot::channel();
    let entered = std::sync::Mutex::new(Some(entered));
    let entered = std::sync::Arc::new(entered);
    let handler = move |body: Bytes| {
        let (inside, seen, entered) = (inside.clone(), seen.clone(), entered.clone());
        async move {
            if let Some(entered) = entered.lock().unwrap().take() {
                entered.send(()).unwrap();
                // All in one poll, which a waiter in another thread need not wait for.
                while inside.stats().waiters == 0 {
                    std::thread::yield_now();
                }
            }
            format!("{} of {}", seen.stats().buffered, body.len())
        }
    };
    let server = serve(Router::new().route("/charges", post(handler)).layer(layer)).await;
    let first = asking(&server, posting("/charges", "k", "a small body"));
    is_entered.await.unwrap();
    let second = asking(&server, posting("/charges", "k", "a small body"));
    for reply in [first, second] {
        assert_eq!(reply.await.unwrap().text(), "12 of 12");
    }
}

#[tokio::test]
async fn r19_a_waiter_that_shared_its_bytes_and_becomes_the_owner_has_them() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let (runs, at) = (runs.clone(), gate.clone());
    let handler = move |body: Bytes| async move {
        let run = runs.up();
        at.pass().await;
        let status = if run == 1 { http::StatusCode::NOT_FOUND } else { http::StatusCode::OK };
        (status, body)
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer(&store));
    let server = serve(app).await;
    let first = asking(&server, posting("/charges", "k", "the body"));
    gate.entered().await;
    let second = asking(&server, posting("/charges", "k", "the body"));
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 404);
    gate.open();
    let second = second.await.unwrap();
    assert_eq!((second.status, second.text()), (200, "the body"));
    let key = [("Idempotency-Key", "k")];
    assert!(ask(&server, request("POST", "/charges", &key, "the body")).await.is_replay());
}
