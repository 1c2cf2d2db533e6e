//! The client's half: one key over all attempts, which answers are tried again, and when. Both faces,
//! over real sockets; time is tokio's, which stands still where a test is about it.
#![cfg(all(feature = "client", feature = "axum"))]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/http.rs"]
mod sockets;

use std::{
    collections::HashMap,
    convert::Infallible,
    error::Error,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Method, Request, Response, StatusCode},
    routing::{any, post},
};
use bytes::{Buf as _, Bytes};
use http_body::Body as _;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper_util::{client::legacy, rt::TokioExecutor};
use oncekey::{
    IntentKey, Store,
    client::{IntentError, IntentLayer, Report},
    http::{IdempotencyLayer, Problem},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    time::Instant,
};
use tower::{Layer as _, Service as _, service_fn};
use tracing_subscriber::fmt::MakeWriter;

use crate::{
    common::{MS, SECOND, watchdog},
    sockets::{Gate, Runs, Server, serve},
};

/// Both ways to the same policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Face {
    Reqwest,
    Tower,
}

const FACES: [Face; 2] = [Face::Reqwest, Face::Tower];

/// The other ends of an attempt, whichever the face.
struct Got {
    status: u16,
    body: Vec<u8>,
    report: Option<Report>,
}

/// Quick, so that a test that is not about time does not wait for it.
fn layer() -> IntentLayer {
    IntentLayer::new().backoff(Duration::ZERO, Duration::ZERO).warn_of_new_keys(false)
}

impl Face {
    /// Sends a request. What a caller sets of it is its head and its body.
    async fn send(self, layer: &IntentLayer, request: Request<Bytes>) -> Result<Got, String> {
        let (parts, body) = request.into_parts();
        match self {
            Self::Reqwest => {
                // A connection for each attempt: what is cut off is not the next one's.
                let inner = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
                let client =
                    reqwest_middleware::ClientBuilder::new(inner).with(layer.clone()).build();
                let mut extensions = parts.extensions.clone();
                let mut request =
                    reqwest::Request::new(parts.method, parts.uri.to_string().parse().unwrap());
                *request.headers_mut() = parts.headers;
                *request.body_mut() = Some(body.into());
                let sent = client.execute_with_extensions(request, &mut extensions).await;
                let response = sent.map_err(|error| chain(&error))?;
                let (status, report) =
                    (response.status().as_u16(), response.extensions().get().cloned());
                let body = response.bytes().await.map_err(|error| chain(&error))?.to_vec();
                Ok(Got { status, body, report })
            }
            Self::Tower => {
                let inner = legacy::Client::builder(TokioExecutor::new())
                    .pool_max_idle_per_host(0)
                    .build_http::<Full<Bytes>>();
                let request = Request::from_parts(parts, Full::new(body));
                let sent = layer.layer(inner).call(request).await;
                let response = sent.map_err(|error| chain(&error))?;
                let (parts, body) = response.into_parts();
                let body = body.collect().await.map_err(|error| chain(&error))?.to_bytes().to_vec();
                let report = parts.extensions.get().cloned();
                Ok(Got { status: parts.status.as_u16(), body, report })
            }
        }
    }
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text += &format!(": {error}");
        next = error.source();
    }
    text
}

fn to(server: &Server, path: &str) -> Request<Bytes> {
    let uri = format!("http://{}{path}", server.address);
    Request::post(uri).body(Bytes::from_static(b"{\"amount\":5}")).unwrap()
}

/// What a service has seen: keys and bodies, in order.
type Seen = Arc<Mutex<Vec<(Option<String>, Bytes)>>>;

/// What is answered, the last first.
type Answers = Arc<Mutex<Vec<Response<&'static str>>>>;

/// A service that gives these answers in their order, and then 201 for ever.
async fn answering(answers: impl IntoIterator<Item = Response<&'static str>>) -> (Server, Seen) {
    let seen = Seen::default();
    let mut answers: Vec<_> = answers.into_iter().collect();
    answers.reverse();
    let state = (Arc::new(Mutex::new(answers)), Arc::clone(&seen));
    let handler = |State(state): State<(Answers, Seen)>, headers: HeaderMap, body: Bytes| async move {
        let key = headers.get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
        state.1.lock().unwrap().push((key, body));
        match state.0.lock().unwrap().pop() {
            Some(answer) => answer.map(Body::from),
            None => Response::builder().status(201).body(Body::from("done")).unwrap(),
        }
    };
    (serve(Router::new().fallback(any(handler)).with_state(state)).await, seen)
}

fn answer(
    status: u16,
    fields: &[(&'static str, &'static str)],
    body: &'static str,
) -> Response<&'static str> {
    let mut builder = Response::builder().status(status);
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    builder.body(body).unwrap()
}

#[tokio::test]
async fn each_answer_is_final_or_tried_again() {
    let _watchdog = watchdog();
    let in_use = r#"{"error":{"code":"idempotency_key_in_use","type":"invalid_request_error"}}"#;
    let others = r#"{"error":{"code":"resource_busy"}}"#;
    let ours = r#"{"type":"https://x.example/problems#in-flight","status":409}"#;
    let theirs = r#"{"type":"https://y.example/errors/outstanding"}"#;
    let unknown = r#"{"type":"https://x.example/problems#outcome-unknown"}"#;
    let replayed: &[_] = &[("Idempotent-Replayed", "true")];
    let (go, stop): (&[_], &[_]) =
        (&[("Stripe-Should-Retry", "true")], &[("Stripe-Should-Retry", "false")]);
    let plain = layer();
    let named = layer().in_flight_types(["https://y.example/errors/outstanding"]);
    let fewer = layer().server_errors([200, 400, 409, 503, 599]);
    for (policy, answer, again) in [
        (&plain, answer(408, &[], ""), true),
        (&plain, answer(425, &[], ""), true),
        (&plain, answer(429, &[], ""), true),
        (&plain, answer(409, &[], ours), true),
        (&plain, answer(409, &[], in_use), true),
        (&plain, answer(409, go, others), true),
        (&plain, answer(409, stop, ours), false),
        (&plain, answer(409, &[], others), false),
        (&plain, answer(409, &[], unknown), false),
        (&plain, answer(409, &[], "in-flight"), false),
        (&plain, answer(409, &[], r#"{"type":"urn:example:problem:in-flight"}"#), true),
        (&plain, answer(409, &[], r#"{"type":"https://x.example/in-flight"}"#), true),
        (&plain, answer(409, &[], r#"{"type":"in-flight"}"#), true),
        (&plain, answer(409, &[], r#"{"type":"urn:example:not-in-flight"}"#), false),
        (&plain, answer(409, &[], r#"{"type":"urn:example:In-Flight"}"#), false),
        (&plain, answer(409, &[], r#"{"type":"https://x.example/in-flight?no"}"#), false),
        (&plain, answer(409, &[], r#"{"type":"https://x.example/in-flight/"}"#), false),
        (&plain, answer(409, &[], r#"{"type":["in-flight"]}"#), false),
        (&named, answer(409, &[], r#"{"type":"https://y.example/errors/outstanding#"}"#), false),
        (&named, answer(409, &[], r#"{"type":"https://y.example/errors/Outstanding"}"#), false),
        (&plain, answer(409, &[], theirs), false),
        (&named, answer(409, &[], theirs), true),
        (&named, answer(409, &[], ours), true),
        (&plain, answer(500, &[], ""), true),
        (&plain, answer(501, &[], ""), false),
        (&plain, answer(502, &[], ""), true),
        (&plain, answer(503, &[], ""), true),
        (&plain, answer(504, &[], ""), true),
        (&plain, answer(505, &[], ""), false),
        (&plain, answer(500, stop, ""), false),
        (&plain, answer(408, stop, ""), false),
        (&plain, answer(425, stop, ""), false),
        (&plain, answer(429, stop, ""), false),
        (&plain, answer(409, &[("Stripe-Should-Retry", "False")], ours), false),
        (&plain, answer(501, go, ""), false),
        (&plain, answer(500, replayed, ""), false),
        (&plain, answer(429, replayed, ""), false),
        (&plain, answer(409, replayed, ours), false),
        (&plain, answer(500, &[("Idempotent-Replayed", "false")], ""), true),
        (&fewer, answer(500, &[], ""), false),
        (&fewer, answer(503, &[], ""), true),
        (&fewer, answer(599, &[], ""), true),
        (&fewer, answer(400, &[], ""), false),
        (&fewer, answer(200, &[], "ok"), false),
        (&fewer, answer(409, &[], others), false),
        (&plain, answer(400, go, ""), false),
        (&plain, answer(422, go, ""), false),
        (&plain, answer(400, &[], ours), false),
        (&plain, answer(422, &[], ours), false),
        (&plain, answer(402, &[], ""), false),
        (&plain, answer(404, &[], ""), false),
        (&plain, answer(200, &[], "ok"), false),
        (&plain, answer(204, &[], ""), false),
    ] {
        for face in FACES {
            let (server, seen) = answering([answer.clone()]).await;
            let got = face.send(policy, to(&server, "/")).await.unwrap();
            let said = format!("{face:?} {answer:?}");
            let (status, body) = (answer.status().as_u16(), answer.body().as_bytes());
            let expected = if again { (201, &b"done"[..]) } else { (status, body) };
            assert_eq!((got.status, &got.body[..]), expected, "{said}");
            let report = got.report.unwrap();
            assert_eq!(report.attempts(), 1 + u32::from(again), "{said}");
            assert_eq!(seen.lock().unwrap().len(), 1 + usize::from(again), "{said}");
            let is_replay =
                answer.headers().get("idempotent-replayed").is_some_and(|v| v == "true");
            assert_eq!(report.is_replay(), is_replay, "{said}");
        }
    }
}

#[tokio::test]
async fn one_key_and_the_same_bytes_over_all_attempts() {
    let _watchdog = watchdog();
    let intent = IntentKey::derived("charge", ["inv_17", "2"]);
    let quotes: IntentKey = r#"say "hi""#.parse().unwrap();
    for face in FACES {
        let mut random = Vec::new();
        for (policy, set, extension, expected) in [
            (layer(), None, None, None),
            (layer().bare_keys(true), None, None, None),
            (layer(), None, Some(&intent), Some(r#""charge:inv_17:2""#)),
            (layer().bare_keys(true), None, Some(&intent), Some("charge:inv_17:2")),
            (layer(), None, Some(&quotes), Some(r#""say \"hi\"""#)),
            (layer(), Some("as it is"), Some(&intent), Some("as it is")),
            (layer().bare_keys(true), Some("\"q\""), None, Some("\"q\"")),
        ] {
            let (server, seen) = answering([answer(503, &[], ""), answer(500, &[], "")]).await;
            let mut request = to(&server, "/");
            if let Some(set) = set {
                request.headers_mut().insert("idempotency-key", set.parse().unwrap());
            }
            if let Some(extension) = extension {
                request.extensions_mut().insert(extension.clone());
            }
            let got = face.send(&policy, request).await.unwrap();
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            assert_eq!(seen.len(), 3);
            let key = seen[0].0.clone().unwrap();
            assert!(seen.iter().all(|attempt| *attempt == seen[0]), "{seen:?}");
            assert_eq!(seen[0].1, "{\"amount\":5}");
            let report = got.report.unwrap();
            assert_eq!((report.attempts(), report.is_replay()), (3, false));
            assert_eq!(report.key(), &*key);
            assert!(!format!("{report:?}").contains(&key));
            match expected {
                Some(expected) => assert_eq!(key, expected),
                None => random.push(key),
            }
        }
        assert_eq!((random[0].len(), random[1].len()), (38, 36), "a UUID, with quotes and without");
        assert!(random[0].starts_with('"') && random[0].trim_matches('"') != random[1]);
    }
}

#[tokio::test]
async fn a_key_that_needs_quotes_is_never_sent_without() {
    let _watchdog = watchdog();
    let (server, seen) = answering([]).await;
    for face in FACES {
        for key in [" k", "k ", "a b", "a,b", "a\"b", "\"k\"", "\"", ","] {
            let mut request = to(&server, "/");
            request.extensions_mut().insert(key.parse::<IntentKey>().unwrap());
            let error = face.send(&layer().bare_keys(true), request).await.err().unwrap();
            assert!(error.contains("nothing was sent: the key has a space"), "{key}: {error}");
        }
        assert!(seen.lock().unwrap().is_empty());
        for byte in (0x21..0x7f).filter(|byte| !b"\",".contains(byte)) {
            let key = char::from(byte).to_string();
            let mut request = to(&server, "/");
            request.extensions_mut().insert(key.parse::<IntentKey>().unwrap());
            face.send(&layer().bare_keys(true), request).await.unwrap();
            assert_eq!(seen.lock().unwrap().pop().unwrap().0, Some(key));
        }
    }
}

#[tokio::test]
async fn other_methods_pass_untouched() {
    let _watchdog = watchdog();
    for face in FACES {
        let (server, seen) = answering([answer(503, &[], ""), answer(503, &[], "")]).await;
        for (policy, method, covered) in [
            (layer(), Method::PUT, false),
            (layer().methods([Method::PUT]), Method::POST, false),
            (layer().methods([Method::PUT]), Method::PUT, true),
        ] {
            let mut request = to(&server, "/");
            *request.method_mut() = method;
            let got = face.send(&policy, request).await.unwrap();
            let key = seen.lock().unwrap().last().unwrap().0.clone();
            assert_eq!((key.is_some(), got.report.is_some()), (covered, covered));
            assert_eq!(got.status, if covered { 201 } else { 503 });
        }
    }
}

/// A body that says that it has so many bytes.
struct Claiming<B> {
    body: B,
    bytes: u64,
}

impl<B: http_body::Body + Unpin> http_body::Body for Claiming<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.bytes)
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_sent_twice_is_refused_before_it_is_sent_once() {
    let _watchdog = watchdog();
    let (server, seen) = answering([]).await;
    let uri = format!("http://{}/", server.address);
    let chunk = || Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(b"x")));
    let stream = || StreamBody::new(futures_util::stream::iter([chunk(), chunk()]));

    let client =
        reqwest_middleware::ClientBuilder::new(reqwest::Client::new()).with(layer()).build();
    let sent = client.post(&uri).body(reqwest::Body::wrap(stream())).send().await;
    let text = chain(&sent.unwrap_err());
    assert!(text.contains("nothing was sent: the body is a stream"), "{text}");

    // A body that is made of bytes, and may be a stream as well: axum's.
    let policy = layer().max_body(1_000).max_attempts(1);
    let mut tower = policy.layer(service_fn(|_: Request<Body>| async {
        Err::<Response<Full<Bytes>>, _>("it was sent")
    }));
    let more = futures_util::stream::iter((0..1_001).map(move |_| chunk()));
    let trailers = std::future::ready(Some(Ok(HeaderMap::new())));
    for body in [
        Body::new(stream()),
        Body::from(vec![0; 1_001]),
        Body::new(Claiming { body: StreamBody::new(more), bytes: 4 }),
        Body::new(Full::<Bytes>::from("x").with_trailers(trailers)),
    ] {
        let sent = tower.call(Request::post(&uri).body(body).unwrap()).await;
        let error = sent.unwrap_err();
        assert!(matches!(error, IntentError::NotRepeatable), "{error:?}");
        assert!(error.report().is_none());
    }
    let mut twice = Request::post(&uri).body(Body::empty()).unwrap();
    twice.headers_mut().append("idempotency-key", "a".parse().unwrap());
    twice.headers_mut().append("idempotency-key", "b".parse().unwrap());
    assert!(matches!(tower.call(twice).await, Err(IntentError::ManyKeys)));
    assert!(seen.lock().unwrap().is_empty());
}

/// A middleware inside that refuses, as one does that cannot sign.
struct Refusing(Runs);

#[async_trait::async_trait]
impl reqwest_middleware::Middleware for Refusing {
    async fn handle(
        &self,
        _: reqwest::Request,
        _: &mut http::Extensions,
        _: reqwest_middleware::Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        self.0.up();
        Err(reqwest_middleware::Error::middleware(io::Error::other("no signature")))
    }
}

#[tokio::test]
async fn an_error_that_the_next_attempt_would_meet_again_is_final() {
    let _watchdog = watchdog();
    let runs = Runs::default();
    let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
        .with(layer().max_attempts(5))
        .with(Refusing(runs.clone()))
        .build();
    let error = client.post("http://x.invalid/").send().await.unwrap_err();
    assert!(chain(&error).contains("at attempt 1"), "{}", chain(&error));
    assert!(chain(&error).contains("no signature"), "{}", chain(&error));
    assert_eq!(runs.count(), 1);
}

/// A service whose first instances fail to become ready, and which is then not to be touched: the
/// contract of tower.
#[derive(Debug)]
struct Fragile {
    failures: Arc<Mutex<usize>>,
    /// Of this instance; a clone has a life of its own.
    has_failed: bool,
    is_ready: bool,
}

impl Fragile {
    fn failing(times: usize) -> Self {
        Self { failures: Arc::new(Mutex::new(times)), has_failed: false, is_ready: false }
    }
}

impl Clone for Fragile {
    fn clone(&self) -> Self {
        assert!(!self.has_failed, "a clone of one that failed");
        Self { failures: Arc::clone(&self.failures), has_failed: false, is_ready: false }
    }
}

impl tower::Service<Request<Full<Bytes>>> for Fragile {
    type Response = Response<Full<Bytes>>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        assert!(!self.has_failed, "asked again after it had failed");
        let mut failures = self.failures.lock().unwrap();
        match failures.checked_sub(1) {
            Some(left) => {
                (*failures, self.has_failed) = (left, true);
                Poll::Ready(Err("not ready"))
            }
            None => {
                self.is_ready = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without being ready");
        std::future::ready(Ok(Response::new(Full::from("done"))))
    }
}

#[tokio::test]
async fn a_service_that_failed_to_become_ready_is_not_asked_again() {
    let _watchdog = watchdog();
    let mut client = layer().layer(Fragile::failing(3));
    let request = |method: Method| {
        Request::builder().method(method).uri("http://x/").body(Full::from("x")).unwrap()
    };
    let answer = client.call(request(Method::POST)).await.unwrap();
    assert_eq!(answer.extensions().get::<Report>().unwrap().attempts(), 4);
    // The caller's own next request too, also of a method that is sent once.
    let mut client = layer().layer(Fragile::failing(1));
    let error = client.call(request(Method::GET)).await.unwrap_err();
    assert!(matches!(error, IntentError::Passed("not ready")), "{error:?}");
    assert_eq!(client.call(request(Method::GET)).await.unwrap().status(), 200);
}

/// A server that plays a script: for each connection the bytes it sends before it hangs up.
async fn hanging_up(script: Vec<&'static str>) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn({
        let seen = Arc::clone(&seen);
        async move {
            for bytes in script {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"{\"amount\":5}") {
                    let mut more = [0; 4096];
                    let count = stream.read(&mut more).await.unwrap();
                    request.extend_from_slice(&more[..count]);
                }
                seen.lock().unwrap().push(String::from_utf8(request).unwrap());
                stream.write_all(bytes.as_bytes()).await.unwrap();
            }
        }
    });
    (port, seen)
}

#[tokio::test]
async fn a_connection_or_an_answer_that_breaks_off_is_tried_again() {
    let _watchdog = watchdog();
    const HALF: &str = "HTTP/1.1 201 Created\r\nContent-Length: 6\r\n\r\ndo";
    const CHUNKED: &str = "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\ndo\r\n";
    const WHOLE: &str = "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\ndone";
    for face in FACES {
        let script = vec!["", "HTTP/1.1 20", HALF, CHUNKED, WHOLE];
        let (port, seen) = hanging_up(script).await;
        let request = || {
            let request = Request::post(format!("http://127.0.0.1:{port}/"));
            request.body(Bytes::from_static(b"{\"amount\":5}")).unwrap()
        };
        let got = face.send(&layer(), request()).await.unwrap();
        assert_eq!((got.status, &got.body[..]), (201, &b"done"[..]));
        assert_eq!(got.report.unwrap().attempts(), 5);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert!(seen.len() == 5 && seen.iter().all(|request| *request == seen[0]), "{seen:?}");

        // The port is closed by now. The number of attempts is a setting, and the caller gets the key
        // to go on with.
        let error = face.send(&layer().max_attempts(3), request()).await.err().unwrap();
        assert!(error.contains("the request failed, at attempt 3; whether"), "{error}");

        // What is not read before it is handed over is the caller's: all, or an event stream.
        const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream ;a=b\r\n\
            Content-Length: 6\r\n\r\ndo";
        const OTHERS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-streams\r\n\
            Content-Length: 6\r\n\r\ndo";
        for (policy, first, count) in
            [(layer().max_answer(0), HALF, 1), (layer(), EVENTS, 1), (layer(), OTHERS, 2)]
        {
            let (port, seen) = hanging_up(vec![first, WHOLE]).await;
            let request = Request::post(format!("http://127.0.0.1:{port}/"));
            let request = request.body(Bytes::from_static(b"{\"amount\":5}")).unwrap();
            assert_eq!(face.send(&policy, request).await.is_ok(), count == 2, "{first}");
            assert_eq!(seen.lock().unwrap().len(), count, "{first}");
        }
    }
}

#[tokio::test]
async fn an_error_has_the_key_to_go_on_with() {
    let _watchdog = watchdog();
    let (port, seen) = hanging_up(vec!["", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]).await;
    let inner = legacy::Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let mut client = layer().max_attempts(1).layer(inner);
    let request = || {
        let request = Request::post(format!("http://127.0.0.1:{port}/"));
        request.body(Full::from("{\"amount\":5}")).unwrap()
    };
    let error = client.call(request()).await.unwrap_err();
    let key = error.report().unwrap().key().clone();
    let mut later = request();
    later.headers_mut().insert("idempotency-key", key);
    assert_eq!(client.call(later).await.unwrap().status(), 200);
    {
        let seen = seen.lock().unwrap();
        assert_eq!(seen[0].to_lowercase(), seen[1].to_lowercase());
    }

    // The port is closed by now.
    let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
        .with(layer().max_attempts(2))
        .build();
    let url = format!("http://127.0.0.1:{port}/");
    let error = client.post(&url).with_extension(IntentKey::derived("a", ["1"])).send().await;
    let error = error.unwrap_err();
    let report = Report::of(&error).unwrap();
    assert_eq!((report.attempts(), report.key().as_bytes()), (2, &b"\"a:1\""[..]));
    let error = client.get(&url).send().await.unwrap_err();
    assert!(Report::of(&error).is_none());
}

/// A middleware inside that looks at what it is told, and never has an answer.
struct Looking(Arc<Mutex<Vec<Report>>>);

#[async_trait::async_trait]
impl reqwest_middleware::Middleware for Looking {
    async fn handle(
        &self,
        _: reqwest::Request,
        extensions: &mut http::Extensions,
        _: reqwest_middleware::Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        self.0.lock().unwrap().push(extensions.get::<Report>().unwrap().clone());
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_was_made_is_known_while_it_is_sent_and_is_not_taken_for_the_next() {
    let _watchdog = watchdog();
    let policy = layer().attempt_timeout(SECOND);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
        .with(policy.clone())
        .with(Looking(Arc::clone(&seen)))
        .build();
    let mut extensions = http::Extensions::new();
    let mut keys = Vec::new();
    for _ in 0..2 {
        let request = reqwest::Request::new(Method::POST, "http://x.invalid/".parse().unwrap());
        let send = client.execute_with_extensions(request, &mut extensions);
        // Given up in the third attempt: no answer, no error, and the caller has the key.
        assert!(tokio::time::timeout(SECOND * 5 / 2, send).await.is_err());
        let report = extensions.get::<Report>().unwrap().clone();
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen.iter().map(Report::attempts).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(seen.iter().all(|one| one.key() == report.key()) && report.attempts() == 3);
        keys.push(report.key().clone());
    }
    assert_ne!(keys[0], keys[1], "the same extensions, another intent");
    // Nor is the key of the one before what is told of a request that was never sent.
    let mut request = reqwest::Request::new(Method::POST, "http://x.invalid/".parse().unwrap());
    for key in ["a", "b"] {
        request.headers_mut().append("idempotency-key", key.parse().unwrap());
    }
    assert!(client.execute_with_extensions(request, &mut extensions).await.is_err());
    assert!(extensions.get::<Report>().is_none());

    let inner = service_fn({
        let seen = Arc::clone(&seen);
        move |request: Request<Full<Bytes>>| {
            let report = request.extensions().get::<Report>().unwrap().clone();
            assert_eq!(report.key(), &request.headers()["idempotency-key"]);
            seen.lock().unwrap().push(report);
            std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
        }
    });
    let request = Request::post("http://x/").body(Full::from("x")).unwrap();
    let error = policy.max_attempts(2).layer(inner).call(request).await.unwrap_err();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen.iter().map(Report::attempts).collect::<Vec<_>>(), [1, 2]);
    assert!(seen.iter().all(|one| one.key() == error.report().unwrap().key()));
}

#[tokio::test]
async fn an_answer_that_is_large_or_a_stream_comes_through_whole() {
    let _watchdog = watchdog();
    let large = vec![b'x'; 3 << 20];
    let body = Bytes::from(large.clone());
    let app = Router::new()
        .route("/large", post(move || async move { body }))
        .route(
            "/chunked",
            post(|| async {
                let chunk = |n: usize| Ok::<_, Infallible>(Bytes::from(vec![b'x'; n]));
                Body::from_stream(futures_util::stream::iter([chunk(3 << 19), chunk(3 << 19)]))
            }),
        )
        .route(
            "/some-events",
            post(|| async {
                let event = |n: u8| Ok::<_, Infallible>(Bytes::from(format!("data: {n}\n\n")));
                let body = Body::from_stream(futures_util::stream::iter((0..3).map(event)));
                ([("content-type", "text/event-stream")], body)
            }),
        )
        .route(
            "/silent",
            post(|| async {
                Body::from_stream(futures_util::stream::pending::<Result<Bytes, Infallible>>())
            }),
        )
        .route(
            "/events",
            post(|| async {
                // It never ends: the head must come through all the same.
                let stream = futures_util::stream::pending::<Result<Bytes, Infallible>>();
                ([("content-type", "TEXT/event-stream; charset=utf-8")], Body::from_stream(stream))
            }),
        );
    let server = serve(app).await;
    for face in FACES {
        for path in ["/large", "/chunked"] {
            for most in [0, 1 << 20, 4 << 20] {
                let got = face.send(&layer().max_answer(most), to(&server, path)).await.unwrap();
                assert!(got.body == large, "{face:?} {path} {most}: {} bytes", got.body.len());
            }
        }
    }
    for face in FACES {
        let got = face.send(&layer(), to(&server, "/some-events")).await.unwrap();
        assert_eq!(got.body, b"data: 0\n\ndata: 1\n\ndata: 2\n\n");
    }
    let inner = reqwest::Client::new();
    let client = reqwest_middleware::ClientBuilder::new(inner.clone()).with(layer()).build();
    let events = client.post(format!("http://{}/events", server.address)).send().await.unwrap();
    assert_eq!(events.status(), 200);
    assert_eq!(events.url().path(), "/events");
    let at_once = layer().max_answer(0);
    let client = reqwest_middleware::ClientBuilder::new(inner).with(at_once).build();
    let silent = client.post(format!("http://{}/silent", server.address)).send().await.unwrap();
    assert_eq!(silent.status(), 200);
}

#[tokio::test]
async fn an_answer_in_many_pieces_is_bounded_and_one_in_parts_is_understood() {
    let _watchdog = watchdog();
    // A frame takes room though it has no bytes.
    let polled = Arc::new(AtomicUsize::new(0));
    let mut client = layer().layer(service_fn({
        let polled = Arc::clone(&polled);
        move |_: Request<Full<Bytes>>| {
            let polled = Arc::clone(&polled);
            let pieces = (0..100_000_u32).map(move |nth| {
                polled.fetch_add(1, Ordering::SeqCst);
                let data = if nth % 10_000 == 0 { Bytes::from_static(b"x") } else { Bytes::new() };
                Ok::<_, Infallible>(http_body::Frame::data(data))
            });
            let body = StreamBody::new(futures_util::stream::iter(pieces));
            async move { Ok::<_, Infallible>(Response::new(body)) }
        }
    }));
    let request = || Request::post("http://x/").body(Full::from("x")).unwrap();
    let answer = client.call(request()).await.unwrap();
    let read = polled.load(Ordering::SeqCst);
    assert!((1_000..20_000).contains(&read), "{read} pieces");
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "xxxxxxxxxx");

    // A piece whose bytes do not lie in one place.
    let told = Arc::new(AtomicUsize::new(0));
    let mut client = layer().layer(service_fn(move |_: Request<Full<Bytes>>| {
        let status = [409, 200][told.fetch_add(1, Ordering::SeqCst)];
        let parts = Bytes::from_static(br#"{"type":"urn:x:in-"#).chain(&b"flight\"}"[..]);
        let answer = Response::builder().status(status).body(Full::new(parts)).unwrap();
        async { Ok::<_, Infallible>(answer) }
    }));
    let answer = client.call(request()).await.unwrap();
    assert_eq!((answer.status(), answer.body().size_hint().exact()), (StatusCode::OK, Some(26)));
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, r#"{"type":"urn:x:in-flight"}"#);
}

#[tokio::test]
async fn a_duplicate_that_meets_its_first_attempt_gets_its_answer() {
    let _watchdog = watchdog();
    for face in FACES {
        let (runs, gate) = (Runs::default(), Gate::new());
        let handler = {
            let (runs, gate) = (runs.clone(), gate.clone());
            move || async move {
                runs.up();
                gate.pass().await;
                (StatusCode::CREATED, "the only charge")
            }
        };
        let store = Store::builder().build().unwrap();
        let once = IdempotencyLayer::single_tenant(store.clone()).wait_limit(Duration::ZERO);
        let server = serve(Router::new().route("/charges", post(handler)).layer(once)).await;
        let policy = layer().attempt_timeout(Duration::from_secs(100));

        let mut request = to(&server, "/charges");
        request.extensions_mut().insert(IntentKey::derived("charge", ["1"]));
        let (first, second) = (request.clone(), request);
        let first = tokio::spawn({
            let policy = policy.clone();
            async move { face.send(&policy, first).await.unwrap() }
        });
        gate.entered().await;
        let second = tokio::spawn(async move { face.send(&policy, second).await.unwrap() });
        // It has been told 409 at least once.
        sockets::until(|| store.stats().met_in_flight > 0).await;
        gate.open();
        let (first, second) = (first.await.unwrap(), second.await.unwrap());
        assert_eq!((first.status, second.status, runs.count()), (201, 201, 1));
        assert_eq!(first.body, second.body);
        let (first, second) = (first.report.unwrap(), second.report.unwrap());
        assert_eq!((first.attempts(), first.is_replay()), (1, false));
        assert!(second.attempts() > 1 && second.is_replay(), "{second:?}");
        assert_eq!(first.key(), second.key());
    }
    // The word by which it is known is that of the layer.
    assert_eq!(Problem::InFlight.slug(), "in-flight");
}

/// A service in the form of Stripe's: bare keys, errors of its own kind, results kept for a key,
/// those of failures too.
#[tokio::test]
async fn a_service_in_the_form_of_stripe_is_understood() {
    let _watchdog = watchdog();
    #[derive(Default)]
    struct Kept {
        runs: usize,
        in_use: usize,
        results: HashMap<String, (Bytes, u16, String)>,
    }
    let kept = Arc::new(Mutex::new(Kept::default()));
    let handler = |State(kept): State<Arc<Mutex<Kept>>>, headers: HeaderMap, body: Bytes| async move {
        let mut kept = kept.lock().unwrap();
        let key = headers["idempotency-key"].to_str().unwrap().to_owned();
        let reply = |status: u16, body: String, fields: &[(&str, &str)]| {
            let mut reply = Response::builder().status(status);
            for (name, value) in fields {
                reply = reply.header(*name, *value);
            }
            reply.body(Body::from(body)).unwrap()
        };
        if key.starts_with('"') {
            return reply(400, "not a key".into(), &[]);
        }
        if kept.in_use > 0 {
            kept.in_use -= 1;
            let error = r#"{"error":{"code":"idempotency_key_in_use"}}"#;
            return reply(409, error.into(), &[]);
        }
        if let Some((first, status, result)) = kept.results.get(&key) {
            if *first != body {
                let error = r#"{"error":{"type":"idempotency_error"}}"#;
                return reply(400, error.into(), &[("Stripe-Should-Retry", "false")]);
            }
            let replayed = [("Idempotent-Replayed", "true"), ("Original-Request", "req_1")];
            return reply(*status, result.clone(), &replayed);
        }
        kept.runs += 1;
        let (status, result) = match &body[..] {
            b"fail" => (500, r#"{"error":{"type":"api_error"}}"#.to_owned()),
            _ => (200, format!(r#"{{"id":"ch_{}"}}"#, kept.runs)),
        };
        kept.results.insert(key, (body, status, result.clone()));
        reply(status, result, &[])
    };
    let app = Router::new().route("/v1/charges", post(handler)).with_state(Arc::clone(&kept));
    let server = serve(app).await;
    let policy = layer().bare_keys(true);
    for face in FACES {
        *kept.lock().unwrap() = Kept { in_use: 2, ..Kept::default() };
        let send = |key: &'static str, body: &'static str| {
            let mut request =
                to(&server, "/v1/charges").map(|_| Bytes::from_static(body.as_bytes()));
            request.extensions_mut().insert(key.parse::<IntentKey>().unwrap());
            face.send(&policy, request)
        };
        let told = |got: &Got| {
            let report = got.report.clone().unwrap();
            (got.status, report.attempts(), report.is_replay())
        };
        let first = send("k1", "amount=5").await.unwrap();
        assert_eq!((told(&first), &first.body[..]), ((200, 3, false), &br#"{"id":"ch_1"}"#[..]));
        let again = send("k1", "amount=5").await.unwrap();
        assert_eq!((told(&again), &again.body), ((200, 1, true), &first.body));
        let other = send("k1", "amount=6").await.unwrap();
        assert_eq!(told(&other), (400, 1, false));
        // The first answer is a failure, and it is asked once more: the same, and that is the end.
        let failed = send("k2", "fail").await.unwrap();
        assert_eq!(told(&failed), (500, 2, true));
        assert_eq!(kept.lock().unwrap().runs, 2);
    }
}

/// A client whose attempts are these answers, on a clock that stands still; when each began.
async fn times(
    policy: &IntentLayer,
    answers: impl Fn(usize) -> Option<Response<Full<Bytes>>> + Send + Sync + 'static,
) -> (Vec<Duration>, Duration, Result<StatusCode, IntentError<Infallible>>) {
    let start = Instant::now();
    let at = Arc::new(Mutex::new(Vec::new()));
    let answers = Arc::new(answers);
    let inner = service_fn({
        let at = Arc::clone(&at);
        move |_: Request<Full<Bytes>>| {
            let nth = {
                let mut at = at.lock().unwrap();
                at.push(start.elapsed());
                at.len() - 1
            };
            let answer = answers(nth);
            async move {
                match answer {
                    Some(answer) => Ok::<_, Infallible>(answer),
                    None => std::future::pending().await,
                }
            }
        }
    });
    let request = Request::post("http://x/").body(Full::from("x")).unwrap();
    let end = policy.layer(inner).call(request).await.map(|response| response.status());
    let at = at.lock().unwrap().clone();
    (at, start.elapsed(), end)
}

fn reply(status: u16, fields: &[(&str, &str)]) -> Option<Response<Full<Bytes>>> {
    let mut reply = Response::builder().status(status);
    for (name, value) in fields {
        reply = reply.header(*name, *value);
    }
    Some(reply.body(Full::default()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn the_time_before_an_attempt_is_anywhere_below_a_limit_that_doubles() {
    let _watchdog = watchdog();
    fastrand::seed(7);
    let policy = layer().backoff(100 * MS, 1_000 * MS).deadline(1_000 * SECOND).max_attempts(9);
    let limits = [100, 200, 400, 800, 1_000, 1_000, 1_000, 1_000];
    let mut shares = Vec::new();
    for _ in 0..50 {
        let (at, _, end) = times(&policy, |_| reply(503, &[])).await;
        assert_eq!((at.len(), end.unwrap()), (9, StatusCode::SERVICE_UNAVAILABLE));
        for (pair, limit) in at.windows(2).zip(limits) {
            // A timer of tokio is a millisecond late at most.
            let share = (pair[1] - pair[0]).as_secs_f64() * 1_000.0 / f64::from(limit);
            assert!(share <= 1.0 + 2.0 / f64::from(limit), "{share} of {limit}");
            shares.push(share);
        }
    }
    // Full jitter: all of the way, evenly.
    for tenth in 0..10 {
        let within = |share: &&f64| (**share * 10.0) as u32 == tenth;
        let count = shares.iter().filter(within).count();
        assert!((15..80).contains(&count), "{count} of 400 in tenth {tenth}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_waited_for_in_seconds_and_as_a_date() {
    let _watchdog = watchdog();
    let policy = layer().deadline(100 * SECOND);
    const DATE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    for (fields, seconds) in [
        (&[("Retry-After", "7")][..], 7),
        (&[("Retry-After", " 0 ")], 0),
        (&[("Retry-After", "Sun, 06 Nov 1994 08:49:57 GMT"), ("Date", DATE)], 20),
        (&[("Retry-After", "Sunday, 06-Nov-94 08:49:40 GMT"), ("Date", DATE)], 3),
        (&[("Retry-After", DATE), ("Date", "Sun, 06 Nov 1994 08:50:00 GMT")], 0),
        (&[("Retry-After", DATE)], 0), // long ago by our own clock
        (&[("Retry-After", "-1")], 0),
        (&[("Retry-After", "soon")], 0),
        (&[("Retry-After", "")], 0),
    ] {
        for status in [429, 503] {
            let first = move |nth| reply(if nth == 0 { status } else { 200 }, fields);
            let (at, _, end) = times(&policy, first).await;
            let waited = at[1].as_millis();
            let expected = seconds * 1_000;
            assert!((expected..expected + 3).contains(&waited), "{fields:?}: {waited} ms");
            assert_eq!(end.unwrap(), StatusCode::OK);
        }
    }
    // By our own clock where the answer has no date.
    let soon = httpdate::fmt_http_date(std::time::SystemTime::now() + 50 * SECOND);
    let soon: &'static str = soon.leak();
    let first = move |nth| reply(if nth == 0 { 503 } else { 200 }, &[("Retry-After", soon)]);
    let (at, _, _) = times(&policy, first).await;
    assert!((1..=51).contains(&at[1].as_secs()), "{:?}", at[1]); // real time went on meanwhile

    // Those who were told the same time do not come back together.
    let policy = layer().backoff(10 * SECOND, 10 * SECOND).deadline(100 * SECOND);
    let first = |nth| reply(if nth == 0 { 503 } else { 200 }, &[("Retry-After", "7")]);
    let mut waited = Vec::new();
    for _ in 0..20 {
        waited.push(times(&policy, first).await.0[1]);
    }
    assert!(waited.iter().all(|time| (7 * SECOND..=17 * SECOND + MS).contains(time)), "{waited:?}");
    assert!(waited.iter().max().unwrap().abs_diff(*waited.iter().min().unwrap()) > SECOND);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_and_the_time_of_an_attempt_are_kept() {
    let _watchdog = watchdog();
    // It would come back behind the deadline: the answer is handed over now.
    let policy = layer().deadline(10 * SECOND);
    for asked in ["10", "99999999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        let (at, took, end) = times(&policy, move |_| reply(503, &[("Retry-After", asked)])).await;
        assert_eq!((at.len(), end.unwrap()), (1, StatusCode::SERVICE_UNAVAILABLE));
        assert!(took < SECOND, "{asked}: {took:?}");
    }
    // An attempt that is silent is cut off, and there is time for three.
    let silent = layer().attempt_timeout(3 * SECOND).deadline(10 * SECOND);
    let (at, took, end) = times(&silent, |nth| if nth < 2 { None } else { reply(200, &[]) }).await;
    assert_eq!((at.len(), end.unwrap()), (3, StatusCode::OK));
    assert!((6 * SECOND..7 * SECOND).contains(&took), "{took:?}");
    // The last one is cut off by the deadline.
    let (at, took, end) = times(&silent, |_| None).await;
    assert!(at.len() == 4 && (10 * SECOND..11 * SECOND).contains(&took), "{at:?} {took:?}");
    let error = end.unwrap_err();
    assert!(matches!(&error, IntentError::TimedOut(report) if report.attempts() == 4), "{error:?}");
    let told = "no answer in time, at attempt 4; whether the work was done is not known: ask again \
                later with the same key (`Report::key`), not with a new one";
    assert_eq!(error.to_string(), told);
    // The caller's own body is waited for as long, and nothing is sent.
    let slow = Claiming {
        body: StreamBody::new(futures_util::stream::pending::<Result<_, Infallible>>()),
        bytes: 4,
    };
    let mut client = policy.layer(service_fn(|_: Request<Body>| async {
        Err::<Response<Full<Bytes>>, _>("it was sent")
    }));
    let start = Instant::now();
    let request = Request::post("http://x/").body(Body::new(slow)).unwrap();
    let error = client.call(request).await.unwrap_err();
    assert!(matches!(error, IntentError::Body(_)) && error.report().is_none(), "{error:?}");
    assert_eq!(start.elapsed().as_secs(), 10);
    // A server that is down answers at once: nobody asks more often than the limits say.
    let policy = IntentLayer::new().warn_of_new_keys(false);
    let (at, took, end) = times(&policy, |_| reply(503, &[])).await;
    assert!((10..60).contains(&at.len()), "{} attempts in {took:?}", at.len());
    assert!(took <= 60 * SECOND && end.unwrap() == StatusCode::SERVICE_UNAVAILABLE);
}

/// What was logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn a_key_made_within_the_loop_is_told_of() {
    let _watchdog = watchdog();
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let said = || String::from_utf8(std::mem::take(&mut *log.0.lock().unwrap())).unwrap();

    let (server, seen) = answering([]).await;
    for face in FACES {
        let path = format!("/{face:?}?secret=1");
        let watched = layer().warn_of_new_keys(true);
        let with = |key: &str| {
            let mut request = to(&server, &path);
            let uri = format!("http://user:s3cret@{}{path}", server.address);
            *request.uri_mut() = uri.parse().unwrap();
            request.extensions_mut().insert(key.parse::<IntentKey>().unwrap());
            request
        };
        face.send(&watched, with("k1")).await.unwrap();
        face.send(&watched, with("k1")).await.unwrap();
        let other = with("k2").map(|_| Bytes::from_static(b"other"));
        face.send(&watched, other).await.unwrap();
        face.send(&layer(), with("k3")).await.unwrap();
        assert_eq!(said(), "");
        // Another client of the same process: it is often made within the loop too.
        face.send(&layer().warn_of_new_keys(true), with("s3cret")).await.unwrap();
        let said = said();
        let wanted = [
            "WARN",
            "oncekey::client",
            "POST",
            "make the key outside of the loop",
            "if these are two intents, give them a field that differs, or turn this off",
        ];
        assert!(wanted.iter().all(|word| said.contains(word)), "{said}");
        let url = format!("url=\"http://{}/{face:?}\"", server.address);
        assert!(said.contains(&url) && said.lines().count() == 1, "{said}");
        assert!(!said.contains("s3cret") && !said.contains("secret"), "{said}");
    }
    assert_eq!(seen.lock().unwrap().len(), 10);
    // By itself in debug builds.
    let by_itself = format!("{:?}", IntentLayer::new());
    assert!(by_itself.contains(&format!("watch: {}", cfg!(debug_assertions))), "{by_itself}");
}
