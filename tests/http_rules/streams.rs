//! Responses that are not kept: R20.

use axum::{
    Router,
    body::Body,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use oncekey::{
    EntryState,
    http::{IdempotencyLayer, Keep},
};
use tokio::sync::mpsc;

use crate::{
    LONG, charge,
    common::{MS, watchdog},
    fed, layer,
    sockets::{Client, Runs, Server, ask, asking, post as posting, serve, until},
    store,
};

type Feed = mpsc::Sender<Result<Bytes, oncekey::http::BoxError>>;

/// A handler whose body the test feeds, and the feeds of its runs.
async fn feeding(
    layer: &IdempotencyLayer,
    runs: &Runs,
    head: impl Fn(Body) -> Response + Clone + Send + Sync + 'static,
) -> (Server, mpsc::UnboundedReceiver<Feed>) {
    let (feeds, fed_by_test) = mpsc::unbounded_channel();
    let runs = runs.clone();
    let handler = move || async move {
        runs.up();
        let (feed, body) = fed();
        feeds.send(feed).unwrap();
        head(body)
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer.clone());
    (serve(app).await, fed_by_test)
}

async fn assert_not_kept(server: &Server, runs: &Runs) {
    let retry = ask(server, posting("/charges", "k", "{}")).await;
    assert_eq!((retry.status, retry.problem().as_str()), (409, "response-not-kept"));
    assert!(retry.field("retry-after").is_none());
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r20_a_response_of_known_size_is_kept_up_to_the_limit() {
    let _watchdog = watchdog();
    for over in [0, 1] {
        let (store, runs) = (store(), Runs::default());
        let body = vec![b'x'; (1 << 20) + over];
        let (count, made) = (runs.clone(), body.clone());
        let handler = move || async move {
            count.up();
            made
        };
        let app = Router::new().route("/charges", post(handler)).layer(layer(&store));
        let server = serve(app).await;
        let first = ask(&server, posting("/charges", "k", "{}")).await;
        assert_eq!(first.status, 200);
        assert!(first.body == body, "every byte, also over the limit");
        if over == 0 {
            let again = ask(&server, posting("/charges", "k", "{}")).await;
            assert!(again.is_replay() && again.body == body);
        } else {
            assert_not_kept(&server, &runs).await;
        }
        assert_eq!(runs.count(), 1);
    }
}

#[tokio::test]
async fn r20_a_response_of_unknown_size_is_buffered_up_to_the_limit() {
    let _watchdog = watchdog();
    for (len, is_kept) in [(9, true), (10, true), (11, false)] {
        let (store, runs) = (store(), Runs::default());
        let layer = layer(&store).max_response(10).capture_time(LONG);
        let (server, mut feeds) = feeding(&layer, &runs, Body::into_response).await;
        let first = asking(&server, posting("/charges", "k", "{}"));
        let feed = feeds.recv().await.unwrap();
        for _ in 0..len {
            feed.send(Ok(Bytes::from_static(b"x"))).await.unwrap();
        }
        drop(feed);
        assert_eq!(first.await.unwrap().text(), "x".repeat(len));
        if is_kept {
            let again = ask(&server, posting("/charges", "k", "{}")).await;
            assert_eq!((again.text().len(), again.is_replay()), (len, true));
            assert_eq!(again.field("content-length"), Some(len.to_string().as_str()));
        } else {
            assert_not_kept(&server, &runs).await;
        }
    }
}

#[tokio::test]
async fn r20_after_the_capture_time_it_goes_out_as_it_comes() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).capture_time(MS);
    let (server, mut feeds) = feeding(&layer, &runs, Body::into_response).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    let feed = feeds.recv().await.unwrap();
    assert_eq!(client.head().await.status, 200);
    assert_eq!(store.look_up(&charge("k")).unwrap().state, EntryState::NotKept);
    for part in ["one", "two"] {
        feed.send(Ok(Bytes::from(part))).await.unwrap();
        assert_eq!(client.chunk().await.unwrap(), part.as_bytes());
    }
    drop(feed);
    assert_eq!(client.chunk().await.unwrap(), b"");
    assert_not_kept(&server, &runs).await;
}

#[tokio::test]
async fn r20_an_event_reaches_the_client_before_the_next_is_made() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).capture_time(LONG);
    let head = |body: Body| ([("content-type", "text/event-stream")], body).into_response();
    let (server, mut feeds) = feeding(&layer, &runs, head).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    let feed = feeds.recv().await.unwrap();
    assert_eq!(client.head().await.status, 200);
    // Before the first byte went out.
    assert_eq!(store.look_up(&charge("k")).unwrap().state, EntryState::NotKept);
    assert_not_kept(&server, &runs).await;
    for event in ["data: 1\n\n", "data: 2\n\n"] {
        feed.send(Ok(Bytes::from(event))).await.unwrap();
        assert_eq!(client.chunk().await.unwrap(), event.as_bytes());
    }
    assert_eq!(layer.stats().tasks, 0, "a stream takes no slot of an owner");
    // The stream ends with its client.
    client.reset();
    feed.closed().await;
}

#[tokio::test]
async fn r20_a_stream_is_pulled_by_its_client_and_buffered_nowhere() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).max_response(100_000).capture_time(LONG);
    let (server, mut feeds) = feeding(&layer, &runs, Body::into_response).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    let feed = feeds.recv().await.unwrap();
    let chunk = Bytes::from(vec![b'x'; 50_000]);
    // Far more than sockets hold: a client that does not read stops the source.
    let pushing = tokio::spawn(async move {
        let mut sent = 0;
        while sent < 4_000 && feed.send(Ok(chunk.clone())).await.is_ok() {
            sent += 1;
        }
        sent
    });
    assert_eq!(client.head().await.status, 200);
    assert!(!pushing.is_finished());
    assert_not_kept(&server, &runs).await;
    client.reset();
    assert!(pushing.await.unwrap() < 4_000, "200 MB were swallowed");
}

#[tokio::test]
async fn r20_a_body_that_breaks_off_is_not_kept_unless_its_status_is_released() {
    let _watchdog = watchdog();
    for (status, is_done) in [
        (StatusCode::CREATED, true),
        (StatusCode::NOT_FOUND, false),
        (StatusCode::SERVICE_UNAVAILABLE, false),
    ] {
        for capture_time in [LONG, MS] {
            let (store, runs) = (store(), Runs::default());
            let layer = layer(&store).capture_time(capture_time);
            let head = move |body: Body| (status, body).into_response();
            let (server, mut feeds) = feeding(&layer, &runs, head).await;
            let first = asking(&server, posting("/charges", "k", "{}"));
            let feed = feeds.recv().await.unwrap();
            feed.send(Ok(Bytes::from_static(b"abc"))).await.unwrap();
            if capture_time == MS {
                until(|| store.stats().not_kept + store.stats().released == 1).await;
            }
            feed.send(Err("the source broke".into())).await.unwrap();
            let first = first.await.unwrap();
            assert_eq!((first.status, first.text()), (status.as_u16(), "abc"));
            assert!(first.is_cut, "the client sees that it broke off");
            if is_done {
                assert_not_kept(&server, &runs).await;
            } else {
                assert!(store.look_up(&charge("k")).is_none());
            }
        }
    }
}

#[tokio::test]
async fn r20_waiters_are_told_that_it_was_not_kept() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).max_response(2).capture_time(LONG);
    // Kept by the handler's word is not kept by force.
    let head = |body: Body| (StatusCode::CONFLICT, Keep, body).into_response();
    let (server, mut feeds) = feeding(&layer, &runs, head).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    let feed = feeds.recv().await.unwrap();
    let waiter = asking(&server, posting("/charges", "k", "{}"));
    until(|| store.stats().waiters == 1).await;
    feed.send(Ok(Bytes::from_static(b"abc"))).await.unwrap();
    drop(feed);
    assert_eq!(first.await.unwrap().text(), "abc");
    assert_eq!(waiter.await.unwrap().problem(), "response-not-kept");
}

#[tokio::test]
async fn r20_an_upgrade_goes_through_and_is_not_kept() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let count = runs.clone();
    let handler = move |mut request: axum::extract::Request| async move {
        count.up();
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = hyper_util::rt::TokioIo::new(upgrade.await.unwrap());
            let (mut read, mut write) = tokio::io::split(&mut stream);
            tokio::io::copy(&mut read, &mut write).await.unwrap();
        });
        let fields = [("connection", "upgrade"), ("upgrade", "echo")];
        (StatusCode::SWITCHING_PROTOCOLS, fields)
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer(&store));
    let server = serve(app).await;
    let mut client = Client::connect(&server).await;
    let fields = [("Idempotency-Key", "k"), ("Connection", "upgrade"), ("Upgrade", "echo")];
    client.send(crate::sockets::request("POST", "/charges", &fields, "")).await;
    assert_eq!(client.head().await.status, 101);
    client.send("over there\r\n").await;
    client.expect_text("over there").await;
    let retry = ask(&server, posting("/charges", "k", "")).await;
    assert_eq!((retry.problem().as_str(), runs.count()), ("response-not-kept", 1));
}
