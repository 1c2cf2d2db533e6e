//! `docs/observability.md` against what the layer says: every name on the page is emitted, every
//! name that is emitted is on the page, each attempt ends once, and nothing shows whose it was.
#![cfg(feature = "full")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/http.rs"]
mod sockets;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse,
    routing::post as route,
};
use http_body_util::Full;
use metrics_util::{
    MetricKind,
    debugging::{DebugValue, DebuggingRecorder},
};
use oncekey::{
    Claim, Fingerprint, Identity, Key, KeyForm, Outcome, Store,
    http::{Attempt, IdempotencyLayer, Policy, RequestBody, ResponseBody},
};
use tower::{Layer as _, ServiceBuilder};
use tower_http::trace::TraceLayer;
use tracing::{Event, Metadata, Subscriber, field::Visit, span};
use tracing_subscriber::{
    Layer,
    filter::filter_fn,
    fmt::{MakeWriter, format::FmtSpan},
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};

use crate::{
    common::{LONG, watchdog},
    sockets::{
        Client, Gate, Reply, Server, ask, asking, post, request, serve, serve_service, until,
    },
};

const PAGE: &str = include_str!("../docs/observability.md");

/// In whatever belongs to a caller.
const SECRET: &str = "s3cret";
const KEY: &str = "key-s3cret";
const BODY: &str = "body-s3cret";
const ACCOUNT: &str = "acct-s3cret";

/// The lines of the table behind a headline, cell by cell, without the backticks.
fn table(headline: &str) -> Vec<Vec<String>> {
    let section = PAGE.split_once(&format!("\n## {headline}\n")).unwrap().1;
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| `"));
    let cells = |line: &str| {
        line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
    };
    lines.map(cells).collect()
}

fn words(cell: &str) -> BTreeSet<String> {
    cell.split(", ").filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Kind, name, level, fields.
type Name = (&'static str, String, String, BTreeSet<String>);

/// What was said, by target `oncekey`. And where a handler's line stood.
#[derive(Clone, Default)]
struct Said {
    names: Arc<Mutex<BTreeSet<Name>>>,
    scopes: Arc<Mutex<BTreeSet<String>>>,
    text: Arc<Mutex<Vec<u8>>>,
}

#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Said {
    fn note(&self, kind: &'static str, name: String, metadata: &Metadata<'_>) {
        let fields = metadata.fields().iter().map(|field| field.name().to_owned());
        let fields = fields.filter(|name| name != "message").collect();
        let level = metadata.level().to_string();
        self.names.lock().unwrap().insert((kind, name, level, fields));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Said {
    fn on_new_span(&self, span: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        if span.metadata().target() == "oncekey" {
            self.note("span", span.metadata().name().to_owned(), span.metadata());
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut message = Message::default();
        event.record(&mut message);
        match event.metadata().target() {
            "oncekey" => self.note("event", message.0, event.metadata()),
            "handler" => {
                let scope =
                    context.event_scope(event).into_iter().flat_map(|scope| scope.from_root());
                let scope: Vec<_> = scope.map(|span| span.name()).collect();
                self.scopes.lock().unwrap().insert(scope.join(" > "));
            }
            other => assert!(!other.starts_with("oncekey"), "another target: {other}"),
        }
    }
}

impl io::Write for Said {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Said {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn store() -> Store {
    Store::builder().build().unwrap()
}

fn of_one(store: &Store) -> IdempotencyLayer {
    IdempotencyLayer::new(store.clone(), |_| Some(ACCOUNT))
        .wait_limit(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
}

/// `POST /charges`: what becomes of it stands in the field `x-way`.
fn ways(gate: &Gate) -> Router {
    let gate = gate.clone();
    let handler = move |attempt: Option<Attempt>, headers: HeaderMap, body: String| async move {
        tracing::info!(target: "handler", "at work");
        assert!(!format!("{attempt:?}").contains(SECRET));
        match headers.get("x-way").map(|way| way.to_str().unwrap()) {
            Some("panic") => panic!("as it should in this test"),
            Some("release") => StatusCode::BAD_REQUEST.into_response(),
            Some("stream") => {
                ([(header::CONTENT_TYPE, "text/event-stream")], "data: 1\n\n").into_response()
            }
            Some("gate") => {
                gate.pass().await;
                "behind the gate".into_response()
            }
            _ => (StatusCode::CREATED, [("x-own", "hdr-s3cret")], body).into_response(),
        }
    };
    Router::new().route("/charges", route(handler))
}

/// A request whose `x-way` says what becomes of it.
fn way(key: &str, way: &str) -> Vec<u8> {
    request("POST", "/charges", &[("Idempotency-Key", key), ("x-way", way)], BODY)
}

async fn serving(once: &IdempotencyLayer, gate: &Gate) -> Server {
    serve(ways(gate).layer(once.clone()).layer(TraceLayer::new_for_http())).await
}

/// What is recorded is that of the whole process.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// One request for each outcome at least. Answers how many attempts there were.
async fn everything() -> u64 {
    let (store, gate) = (store(), Gate::new());
    let once = of_one(&store);
    let server = serving(&once, &gate).await;
    let mut attempts = 0;
    let mut asked = |reply: Reply, status: u16, problem: &str| {
        attempts += 1;
        assert_eq!(reply.status, status, "{problem}: {reply:?}");
        assert!(problem.is_empty() || reply.problem() == problem, "{problem}: {reply:?}");
    };
    let refused = async |once: &IdempotencyLayer, bytes: Vec<u8>| {
        ask(&serving(once, &gate).await, bytes).await
    };
    asked(ask(&server, way(KEY, "")).await, 201, "");
    asked(ask(&server, way(KEY, "")).await, 201, "");
    asked(ask(&server, post("/charges", KEY, "another s3cret")).await, 422, "key-reused");
    asked(ask(&server, way("stream-s3cret", "stream")).await, 200, "");
    asked(ask(&server, way("stream-s3cret", "stream")).await, 409, "response-not-kept");
    asked(ask(&server, way("release-s3cret", "release")).await, 400, "");
    asked(ask(&server, way("panic-s3cret", "panic")).await, 500, "");
    asked(ask(&server, way("panic-s3cret", "panic")).await, 409, "outcome-unknown");
    asked(ask(&server, request("POST", "/charges", &[], BODY)).await, 400, "key-missing");
    asked(ask(&server, post("/charges", "\"s3cret", BODY)).await, 400, "key-invalid");

    // While it runs: one that waits and is told, one that waits and leaves, one that does not wait.
    let first = asking(&server, way("gate-s3cret", "gate"));
    gate.entered().await;
    let waiter = asking(&server, way("gate-s3cret", "gate"));
    until(|| store.stats().waiters == 1).await;
    let mut leaving = Client::connect(&server).await;
    leaving.send(way("gate-s3cret", "gate")).await;
    until(|| store.stats().waiters == 2).await;
    leaving.reset();
    until(|| store.stats().waiters == 1).await;
    let unwilling = once.clone().wait_limit(Duration::ZERO);
    asked(refused(&unwilling, way("gate-s3cret", "gate")).await, 409, "in-flight");
    once.record_gauges();
    gate.open();
    asked(first.await.unwrap(), 200, "");
    asked(waiter.await.unwrap(), 200, "");

    let lost = asking(&server, way("lost-s3cret", "gate"));
    gate.entered().await;
    assert!(store.forget_forced(&Identity::new(ACCOUNT, "POST /charges", "lost-s3cret").unwrap()));
    gate.open();
    asked(lost.await.unwrap(), 409, "outcome-unknown");

    let veto = once.clone().may_replay(|_, _| false);
    asked(refused(&veto, way(KEY, "")).await, 403, "replay-refused");
    let nobody = IdempotencyLayer::new(store.clone(), |_| None::<&str>);
    asked(refused(&nobody, way(KEY, "")).await, 403, "account-unknown");
    let small = once.clone().max_request(3);
    asked(refused(&small, way("s3cret-1", "")).await, 413, "request-too-large");
    let busy = once.clone().max_tasks(0);
    asked(refused(&busy, way("s3cret-2", "")).await, 503, "too-busy");
    let share = once.clone().max_tasks_per_account(0);
    asked(refused(&share, way("s3cret-3", "")).await, 429, "account-over-share");
    let full = Store::builder().max_keys(1).build().unwrap();
    let full = of_one(&full);
    asked(refused(&full, way("s3cret-4", "")).await, 201, "");
    asked(refused(&full, way("s3cret-5", "")).await, 503, "store-full");
    full.store().drain().await;
    asked(refused(&full, way("s3cret-5", "")).await, 503, "too-busy");
    let slow = serving(&once.clone().read_limit(Duration::from_millis(1)), &gate).await;
    let stalled = "POST /charges HTTP/1.1\r\nHost: test\r\nIdempotency-Key: s3cret-6\r\n";
    let mut client = Client::connect(&slow).await;
    client.send(format!("{stalled}Content-Length: 9\r\n\r\nx")).await;
    asked(client.reply().await, 408, "request-too-slow");
    let broken = format!("{stalled}Transfer-Encoding: chunked\r\n\r\nno length\r\n");
    asked(ask(&server, broken).await, 400, "");

    // Not of axum: no route, and a service that fails.
    let inner = tower::service_fn(|request: http::Request<RequestBody<_>>| async move {
        let is_well = request.headers().contains_key("x-well");
        drop(request);
        is_well.then(|| http::Response::new(Full::from("ok"))).ok_or("s3cret failure")
    });
    let nameless = ServiceBuilder::new().layer(once.clone()).service(inner);
    let told = ask(&serve_service(nameless).await, way("s3cret-7", "")).await;
    assert_eq!(told.status, 502, "it passes: no attempt");
    let named = ServiceBuilder::new().layer(once.clone().operation_name("charge")).service(inner);
    asked(ask(&serve_service(named).await, way("s3cret-7", "")).await, 502, "");
    // That of who left is there when its future was dropped.
    attempts + 1
}

/// Nobody knows what became of what was cut off.
fn cut_off() -> u64 {
    let (store, gate) = (store(), Gate::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _server = runtime.block_on(async {
        let server = serving(&of_one(&store), &gate).await;
        asking(&server, way("cut-s3cret", "gate"));
        gate.entered().await;
        server
    });
    drop(runtime);
    1
}

#[test]
fn every_name_is_on_the_page_and_every_name_on_the_page_is_emitted() {
    let _watchdog = watchdog();
    let _alone = ALONE.lock();
    let recorder = DebuggingRecorder::new();
    let read = recorder.snapshotter();
    recorder.install().unwrap();
    let said = Said::default();
    let log = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_span_events(FmtSpan::FULL)
        .with_writer(said.clone())
        .with_filter(filter_fn(|metadata| metadata.target() != "h2"));
    let filter = filter_fn(|metadata| !metadata.target().starts_with("hyper"));
    let subscriber =
        tracing_subscriber::registry().with(log.with_filter(filter)).with(said.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut attempts = runtime.block_on(everything());
    drop(runtime);
    attempts += cut_off();

    let mut metrics = BTreeMap::<String, (String, BTreeSet<String>)>::new();
    let mut outcomes = BTreeMap::<String, u64>::new();
    let mut lost = 0;
    for (key, _, _, value) in read.snapshot().into_vec() {
        let kind = match key.kind() {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let labels = key.key().labels().map(|label| label.key().to_owned()).collect();
        metrics.insert(key.key().name().to_owned(), (kind.to_owned(), labels));
        for label in key.key().labels() {
            assert!(!label.value().contains(SECRET), "{label:?}");
            match (key.key().name(), label.key(), &value) {
                ("oncekey_attempts_total", "outcome", DebugValue::Counter(count)) => {
                    *outcomes.entry(label.value().to_owned()).or_default() += count;
                }
                ("oncekey_lost_tokens_total", _, DebugValue::Counter(count)) => lost += count,
                _ => {}
            }
        }
    }
    let documented: BTreeMap<_, _> = table("Metrics")
        .into_iter()
        .map(|cells| (cells[0].clone(), (cells[1].clone(), words(&cells[2]))))
        .collect();
    assert_eq!(metrics, documented);
    assert_eq!(lost, 1);

    let of_tables = table("Outcomes of attempts").into_iter().map(|cells| cells[0].clone());
    let problems = PAGE.split_once("The others are our own answers").unwrap().1;
    let problems = problems.split("\n## ").next().unwrap().split('`').skip(3).step_by(2);
    let documented: BTreeSet<_> = of_tables.chain(problems.map(str::to_owned)).collect();
    let mut emitted: BTreeSet<_> = outcomes.keys().cloned().collect();
    emitted.insert("tier-unavailable".to_owned());
    assert_eq!(emitted, documented);
    assert_eq!(outcomes.values().sum::<u64>(), attempts, "each ends once: {outcomes:?}");

    let documented: BTreeSet<_> = table("Logs")
        .into_iter()
        .flat_map(|cells| {
            let levels: &[&str] =
                if cells[2].contains("WARN") { &["DEBUG", "WARN"] } else { &["DEBUG"] };
            let line = |level: &&str| {
                let kind = if cells[1] == "span" { "span" } else { "event" };
                (kind, cells[0].clone(), (*level).to_owned(), words(&cells[3]))
            };
            levels.iter().map(line).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(*said.names.lock().unwrap(), documented);
    let scopes = said.scopes.lock().unwrap();
    assert_eq!(*scopes, BTreeSet::from(["request > attempt".to_owned()]), "the request's own");

    let text = String::from_utf8(said.text.lock().unwrap().clone()).unwrap();
    assert!(text.contains("POST /charges") && text.contains("outcome=\"kept\""), "{text}");
    for field in ["token=", "waited_ms=", "age_ms="] {
        assert!(text.contains(field), "{field}: {text}");
    }
    let shown = text.lines().find(|line| line.contains(SECRET));
    assert_eq!(shown, None);
}

/// Each public type that holds something of a caller's, as a log might show it.
#[test]
fn no_debug_output_shows_account_key_or_body() {
    let _watchdog = watchdog();
    let _alone = ALONE.lock();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(debug_output());
}

async fn debug_output() {
    let store = store();
    let once =
        of_one(&store).operation_name("charge").may_replay(|_, _| true).max_tasks_per_account(9);
    let id = Identity::new(ACCOUNT, "POST /charges", KEY).unwrap();
    let print = Fingerprint::request("POST", "/charges?s3cret", BODY.as_bytes());
    let outcome = Outcome::new(201).header("x-s3cret", "hdr-s3cret").body(BODY);
    let mut shown = Vec::new();
    macro_rules! show {
        ($($it:expr),+ $(,)?) => { $(shown.push((stringify!($it), format!("{:?} {0:#?}", $it)));)+ };
    }
    let key = Key::parse(KEY.as_bytes(), KeyForm::Any).unwrap();
    show!(id, print, outcome, outcome.header_lines(), key, Policy::default());
    show!(Key::parse(b"\"s3cret", KeyForm::Any), Key::new("s3cret\u{e4}"));
    show!(Identity::new(&SECRET.repeat(50), "", KEY));
    let won = store.claim(&id, print).unwrap();
    show!(won);
    let pending = store.claim(&id, print).unwrap();
    show!(pending);
    let Claim::InFlight(pending) = pending else { panic!() };
    let wait = pending.wait();
    show!(wait, store.look_up(&id));
    let Claim::Won(permit) = won else { panic!() };
    show!(permit.identity(), permit.fingerprint(), permit);
    permit.complete(outcome.clone()).unwrap();
    show!(wait.await, store.claim(&id, print), store, store.stats(), store.drain());
    show!(once, once.stats());
    let inner = tower::service_fn(|request: http::Request<RequestBody<Body>>| async move {
        let attempt = request.extensions().get::<Attempt>().cloned();
        let shown = [format!("{attempt:?}"), format!("{:?}", request.body())];
        assert!(shown.iter().all(|shown| !shown.contains(SECRET)), "{shown:?}");
        Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(BODY)))
    });
    // The store is draining, so this is one of our own answers, and so are the others.
    let service = once.layer(inner);
    show!(service);
    for key in [KEY, "\"s3cret"] {
        let request = http::Request::post("/").header("idempotency-key", key);
        let request = request.body(Body::from(BODY)).unwrap();
        let future = tower::ServiceExt::oneshot(service.clone(), request);
        let response = future.await.unwrap();
        show!(response.body());
    }
    show!(RequestBody::<Body>::default(), ResponseBody::<Body>::default());
    for (what, shown) in shown {
        assert!(!shown.contains(SECRET) && !shown.contains("115, 51, 99"), "{what}: {shown}");
    }
}
