//! A replay is the same response.

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response, Sse, sse::Event},
    routing::post as route,
};
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use oncekey::http::BoxError;
use tokio::sync::mpsc;

use crate::{
    assert_idle, charges, gated, idle, layer,
    sockets::{Client, Gate, Runs, serve, until},
    store,
    wire::{Leave, Wire, assert_replay, charge, kept},
};

/// Lines that a careless capture would fold, split, reorder or lose.
fn delicate() -> HeaderMap {
    let lines: [(&str, &[u8]); 12] = [
        ("set-cookie", b"a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT; Path=/"),
        ("set-cookie", b"b=\"2, 3\"; Expires=Thu, 22 Oct 2026 07:28:00 GMT"),
        ("content-disposition", b"attachment; filename=\"a, b; c.txt\""),
        ("x-three", b"1"),
        ("x-three", b"2, 2"),
        ("x-three", b"1"),
        ("x-raw", b"caf\xe9 \xff\xfe"),
        ("x-empty", b""),
        ("x-spaces", b"a   b\tc"),
        ("link", b"</a>; rel=\"next\", </b>; rel=\"prev\""),
        ("vary", b"accept"),
        ("vary", b"origin"),
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_static(name);
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

over_both! {
    case_060_trailers_come_back,
}

over_all! {
    case_058_lines_keep_their_order_number_and_raw_bytes,
    case_060_status_and_lines_come_back,
    case_062_a_response_over_the_limit_is_whole_and_not_kept,
    case_062_waiters_are_told_before_the_last_byte_is_sent,
    case_065_a_stream_without_end_reaches_the_client_event_by_event,
    case_060_a_slow_first_client_delays_no_replay,
    case_060_a_waiter_gets_status_and_lines_too,
}

async fn case_058_lines_keep_their_order_number_and_raw_bytes(wire: Wire) {
    for keep_cookies in [true, false] {
        let (store, runs) = (store(), Runs::default());
        let counted = runs.clone();
        let app = charges(move || {
            counted.up();
            std::future::ready((StatusCode::CREATED, delicate(), "body"))
        });
        let server = serve(app.layer(layer(&store).keep_set_cookie(keep_cookies))).await;
        let mut first = wire.ask(&server, charge("k")).await;
        assert_eq!(first.lines("set-cookie").len(), 2);
        assert_eq!(first.lines("x-three"), [&b"1"[..], b"2, 2", b"1"]);
        assert_eq!(first.lines("x-raw"), [b"caf\xe9 \xff\xfe"]);
        let again = wire.ask(&server, charge("k")).await;
        if !keep_cookies {
            first.fields.retain(|(name, _)| name != "set-cookie");
        }
        assert_replay(&again, &first);
        assert_eq!(runs.count(), 1);
    }
}

/// The probe and the store use one key: a replay really happens, for every part of it.
async fn case_060_status_and_lines_come_back(wire: Wire) {
    type Lines = &'static [(&'static str, &'static str)];
    let cases: [(StatusCode, Lines, &'static str); 7] = [
        (StatusCode::CREATED, &[("location", "/c/1"), ("etag", "\"v1\"")], "{\"id\":1}"),
        (StatusCode::NO_CONTENT, &[("etag", "W/\"v2\"")], ""),
        (StatusCode::RESET_CONTENT, &[("etag", "\"v4\"")], ""),
        (StatusCode::SEE_OTHER, &[("location", "/c/2?x=a,b")], ""),
        (StatusCode::NOT_MODIFIED, &[("etag", "\"v3\"")], ""),
        (StatusCode::ACCEPTED, &[("content-location", "/jobs/1")], "later"),
        (StatusCode::from_u16(299).unwrap(), &[], "odd"),
    ];
    for (status, lines, body) in cases {
        let (store, runs) = (store(), Runs::default());
        let once = layer(&store);
        let counted = runs.clone();
        let headers: HeaderMap = lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let app = charges(move || {
            counted.up();
            std::future::ready((status, headers, body))
        });
        let server = serve(app.layer(once.clone())).await;
        let first = wire.ask(&server, charge("k")).await;
        assert_eq!((first.status, first.text()), (status.as_u16(), body));
        for (name, value) in lines {
            assert_eq!(first.field(name), Some(*value));
        }
        for _ in 0..2 {
            let again = wire.ask(&server, charge("k")).await;
            assert_replay(&again, &first);
            if status == StatusCode::RESET_CONTENT {
                assert_eq!(again.field("content-length"), Some("0"), "it says that there is none");
            }
        }
        assert_eq!((runs.count(), store.stats().replays), (1, 2));
        assert_idle(&once);
    }
}

/// One byte more than is kept: nothing is cut, and nothing runs twice.
async fn case_062_a_response_over_the_limit_is_whole_and_not_kept(wire: Wire) {
    const LIMIT: usize = 10_000;
    for (len, is_sized) in
        [(LIMIT, true), (LIMIT, false), (LIMIT + 1, true), (LIMIT + 1, false), (0, false)]
    {
        let (store, runs) = (store(), Runs::default());
        let once = layer(&store).max_response(LIMIT);
        let counted = runs.clone();
        let app = charges(move || {
            counted.up();
            let bytes = Bytes::from_iter((0..len).map(|at| at as u8));
            std::future::ready(if is_sized { Body::from(bytes) } else { unsized_body(bytes) })
        });
        let server = serve(app.layer(once.clone())).await;
        let first = wire.ask(&server, charge("k")).await;
        assert!(first.status == 200 && !first.is_cut, "{len} {is_sized}");
        assert!(first.body.iter().copied().eq((0..len).map(|at| at as u8)), "{len} {is_sized}");
        for _ in 0..2 {
            let again = wire.ask(&server, charge("k")).await;
            if len <= LIMIT {
                assert_replay(&again, &first);
            } else {
                assert_eq!((again.status, again.problem().as_str()), (409, "response-not-kept"));
                assert!(again.field("retry-after").is_none());
            }
        }
        assert_eq!(runs.count(), 1);
        assert_idle(&once);
    }
}

/// Whoever waits for such a response is told the same, and at once: not when the last byte has
/// gone to the first client.
async fn case_062_waiters_are_told_before_the_last_byte_is_sent(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let (sender, body) = fed();
    let body = std::sync::Arc::new(std::sync::Mutex::new(Some(body)));
    let app = {
        let gate = gate.clone();
        charges(move || {
            let (gate, body) = (gate.clone(), std::sync::Arc::clone(&body));
            async move {
                gate.pass().await;
                body.lock().unwrap().take().unwrap()
            }
        })
    };
    let once = layer(&store).max_response(10).capture_time(crate::common::LONG);
    let server = serve(app.layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let waiter = wire.asking(&server, charge("k")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    sender.send(Ok(Bytes::from_static(b"0123456789"))).await.unwrap();
    assert_eq!(store.stats().waiters, 1, "so far it may be kept");
    sender.send(Ok(Bytes::from_static(b"0"))).await.unwrap();
    assert_eq!(waiter.await.unwrap().problem(), "response-not-kept");
    assert_idle(&once);
    sender.send(Ok(Bytes::from_static(b"the end"))).await.unwrap();
    drop(sender);
    assert_eq!(first.await.unwrap().text(), "01234567890the end");
}

/// An event stream without end, and a client that reads it slowly: each event is on its way
/// before the next is made.
async fn case_065_a_stream_without_end_reaches_the_client_event_by_event(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    // Were it taken for anything but a stream, its head would never come.
    let once = layer(&store).capture_time(crate::common::LONG);
    let (sender, receiver) = mpsc::channel::<&'static str>(1);
    let receiver = std::sync::Arc::new(std::sync::Mutex::new(Some(receiver)));
    let app = {
        let runs = runs.clone();
        charges(move || {
            runs.up();
            let mut receiver = receiver.lock().unwrap().take().unwrap();
            let events = stream::poll_fn(move |cx| receiver.poll_recv(cx));
            let events = futures_util::StreamExt::map(events, |event| {
                Ok::<_, BoxError>(Event::default().data(event))
            });
            std::future::ready(Sse::new(events))
        })
    };
    let server = serve(app.layer(once.clone())).await;
    let mut stream = Stream::open(wire, &server).await;
    assert_eq!(stream.status, 200);
    assert_idle(&once);
    for event in ["one", "two", "three"] {
        // Made only now: what came before was read already.
        sender.send(event).await.unwrap();
        assert_eq!(stream.next().await, format!("data: {event}\n\n"));
        let again = wire.ask(&server, charge("k")).await;
        assert_eq!((again.status, again.problem().as_str()), (409, "response-not-kept"));
    }
    assert_eq!(runs.count(), 1);
    // A client that has had enough ends the stream for the handler too.
    drop(stream);
    sender.closed().await;
    let again = wire.ask(&server, charge("k")).await;
    assert_eq!(again.problem(), "response-not-kept");
}

/// Trailers belong to the response.
async fn case_060_trailers_come_back(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let counted = runs.clone();
    let app = charges(move || {
        counted.up();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("7"));
        trailers.insert("x-raw", HeaderValue::from_bytes(b"\xff").unwrap());
        trailers.append("x-sum", HeaderValue::from_static("8"));
        let frames = [Frame::data(Bytes::from_static(b"body")), Frame::trailers(trailers)];
        let body = StreamBody::new(stream::iter(frames.map(Ok::<_, BoxError>)));
        let names = [(header::TRAILER, "x-sum, x-raw")];
        std::future::ready((names, Body::new(body)).into_response())
    });
    let server = serve(app.layer(layer(&store))).await;
    let call = || charge("k").field("TE", "trailers");
    let first = wire.ask(&server, call()).await;
    assert_eq!(first.text(), "body");
    assert_eq!(first.trailers.len(), 3);
    let again = wire.ask(&server, call()).await;
    assert_replay(&again, &first);
    assert_eq!(runs.count(), 1);
    // A client that cannot take them gets the body all the same.
    let without = wire.ask(&server, charge("k")).await;
    assert_eq!((without.status, without.text(), without.is_cut), (200, "body", false));
}

/// The outcome is stored before it is sent: a client that does not read it keeps nobody.
async fn case_060_a_slow_first_client_delays_no_replay(wire: Wire) {
    let store = store();
    let once = layer(&store).max_response(32 << 20);
    // More than the buffers of both sides hold.
    let app = charges(|| std::future::ready(vec![7_u8; 16 << 20]));
    let server = serve(app.layer(once.clone())).await;
    let slow = wire.begin(&server, &charge("k")).await;
    until(|| store.stats().completed == 1).await;
    // The owner counts its answer, and then itself as gone.
    idle(&once).await;
    let again = wire.ask(&server, charge("k")).await;
    assert!(again.is_replay());
    assert_eq!(again.body.len(), 16 << 20);
    drop(slow.leave(Leave::Reset).await);
    assert!(wire.ask(&server, charge("k")).await.is_replay());
}

/// Waiters get the same response as replays.
async fn case_060_a_waiter_gets_status_and_lines_too(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let waiter = wire.asking(&server, charge("k")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let (first, waiter) = (first.await.unwrap(), waiter.await.unwrap());
    assert_eq!(first.field("location"), Some("/charges/1"));
    assert_replay(&waiter, &first);
    assert!(kept(&waiter).contains(&("location".to_owned(), b"/charges/1".to_vec())));
    idle(&once).await;
}

/// A response over HTTP/1.1 whose handler names a header as its connection's own.
#[tokio::test]
async fn case_058_what_connection_names_is_not_replayed() {
    let _watchdog = crate::common::watchdog();
    let store = store();
    let handler = || async {
        let lines = [
            ("connection", "x-hop, close"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authenticate", "Basic"),
            ("access-control-allow-origin", "https://a.example"),
            ("x-end", "1"),
        ];
        (StatusCode::CREATED, lines, "body").into_response()
    };
    let app: Router = Router::new().route("/charges", route(handler));
    let server = serve(app.layer(layer(&store))).await;
    let mut client = Client::connect(&server).await;
    let first = client.ask(charge("k").to_bytes()).await;
    assert_eq!((first.status, first.field("x-hop")), (201, Some("1")));
    assert!(client.is_closed().await, "the handler asked for it");
    let mut client = Client::connect(&server).await;
    for _ in 0..2 {
        // Twice on one connection: the replay closes nothing.
        let again = client.ask(charge("k").to_bytes()).await;
        assert!(again.is_replay());
        let names: Vec<_> = again.fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            ["content-type", "x-end", "content-length", "idempotent-replayed", "date"],
            "neither what belongs to the connection nor what belongs to one client"
        );
    }
}

/// `bytes` in pieces of a size that is not known before.
fn unsized_body(bytes: Bytes) -> Body {
    let pieces: Vec<_> = bytes.chunks(999).map(|piece| bytes.slice_ref(piece)).collect();
    Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, BoxError>)))
}

/// A body that the test feeds; it ends when the sender is dropped.
fn fed() -> (mpsc::Sender<Result<Bytes, BoxError>>, Body) {
    let (sender, mut receiver) = mpsc::channel(1);
    (sender, Body::from_stream(stream::poll_fn(move |cx| receiver.poll_recv(cx))))
}

/// A response that is read piece by piece.
struct Stream {
    status: u16,
    source: Source,
}

enum Source {
    Http1(Client),
    Http2(Response<hyper::body::Incoming>),
}

impl Stream {
    async fn open(wire: Wire, server: &crate::sockets::Server) -> Self {
        match wire {
            Wire::Http1 => {
                let mut client = Client::connect(server).await;
                client.send(charge("k").to_bytes()).await;
                Self { status: client.head().await.status, source: Source::Http1(client) }
            }
            Wire::Http2 => {
                let mut client = crate::sockets::connect_h2(server).await;
                let request = http::Request::post("http://test/charges");
                let request = request.header("idempotency-key", "k").body("{}".into()).unwrap();
                let response = client.send_request(request).await.unwrap();
                Self { status: response.status().as_u16(), source: Source::Http2(response) }
            }
        }
    }

    /// The next piece.
    async fn next(&mut self) -> String {
        let bytes = match &mut self.source {
            Source::Http1(client) => client.chunk().await.unwrap(),
            Source::Http2(response) => {
                let frame = http_body_util::BodyExt::frame(response.body_mut()).await;
                frame.unwrap().unwrap().into_data().unwrap().to_vec()
            }
        };
        String::from_utf8(bytes).unwrap()
    }
}
