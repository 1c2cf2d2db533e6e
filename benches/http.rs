//! What the layer costs against the bare axum route: `cargo bench --features axum --bench http`.
//!
//! Small JSON over keep-alive connections on the loopback. The server has one thread, the client
//! another; the client writes prepared bytes and reads answers whose length it knows, so that it
//! is the server that is measured. Arms take turns in slices of a fifth of a second, in an order
//! that changes with each round; each is compared with the bare route of the same round, and the
//! median of these ratios is told.
//!
//! The layer's store is as that of a service that has run for longer than its retention: it has
//! [`LIVE`] keys from the start, and as many end as are added, in the time that is measured, by the
//! store's own thread. `--growing` tells what a store costs that only grows, from nothing in each
//! slice: each record then needs memory that the system has to give, and the index is made larger
//! again and again.
//!
//! ```text
//! bare      the route alone; it gets the same bytes, key included
//! layer     each request with a key of its own: claimed, run, kept
//! replay    keys that are there: answered without the handler
//! nothing   bare, in a layer that does nothing: what axum takes for any
//! sha-256   bare, and the fingerprint of the request
//! task      bare, with the handler in a task of its own
//! body      bare, with request and response body copied into buffers of their own
//! store     bare, with a fingerprint, a claim and a completion around it: nothing is read of the
//!           request but its key, and of the response nothing
//! ```
//!
//! The last five are the parts of the layer that cannot be had for nothing. Client and
//! server have a processor each, and the client is the faster one: beside the throughput stands what
//! the server's thread took, which is what a server that is busy all the time would show. `--quick`
//! makes few rounds. `--instructions ARM REQUESTS` serves so many requests without a socket, for
//! `.ci/instructions`, which counts them.
#![allow(missing_docs, reason = "a program")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http_body_util::BodyExt;
use oncekey::{
    Claim, Fingerprint, Identity, ManualClock, Outcome, Store, Sweep, http::IdempotencyLayer,
};
use tower::{Service, ServiceExt, layer::layer_fn};

const ARMS: [&str; 8] = ["bare", "layer", "replay", "nothing", "sha-256", "task", "body", "store"];
/// Those whose keys are kept, in a store as that of a service that has run for long.
const KEEPING: [&str; 2] = ["layer", "store"];
const CONNECTIONS: usize = 16;
const SLICE: Duration = Duration::from_millis(200);
const RETENTION: Duration = Duration::from_secs(600);
/// How many keys live in the layer's store: more than a cache has room for.
const LIVE: u64 = 1 << 18;
/// After so many requests the clock goes on, and as many keys end.
const STEP: u64 = 1 << 10;
/// Keys that are there for replays: as many as fit a cache, as those of clients that retry do.
const KEPT: u64 = 1_024;

const JSON: &str =
    r#"{"amount_cents":1200,"currency":"eur","customer":"cus_8f41","note":"two of the blue ones"}"#;

/// The work: it reads the JSON and answers with some.
async fn charge(body: Bytes) -> impl IntoResponse {
    let order: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let amount = order["amount_cents"].as_u64().unwrap();
    let answer = format!(r#"{{"id":"ch_000000000042","amount_cents":{amount},"status":"done"}}"#);
    let fields = [(header::CONTENT_TYPE, "application/json"), (header::LOCATION, "/charges/42")];
    (StatusCode::CREATED, fields, answer)
}

fn app(arm: &str, store: &Store) -> Router {
    let bare = Router::new().route("/charges", post(charge));
    let app = match arm {
        "bare" => bare,
        "layer" | "replay" => bare.layer(IdempotencyLayer::single_tenant(store.clone())),
        "nothing" => bare.layer(layer_fn(Nothing)),
        "sha-256" => bare.layer(middleware::from_fn(hashed)),
        "task" => bare.layer(middleware::from_fn(in_a_task)),
        "body" => bare.layer(middleware::from_fn(copied)),
        "store" => {
            let store = store.clone();
            bare.layer(middleware::from_fn(move |request, next| {
                claimed(store.clone(), request, next)
            }))
        }
        other => panic!("no arm {other}: one of {ARMS:?}"),
    };
    app.with_state(())
}

/// Calls what it is around.
#[derive(Clone)]
struct Nothing<S>(S);

impl<S: Service<Request>> Service<Request> for Nothing<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> S::Future {
        self.0.call(request)
    }
}

async fn hashed(request: Request, next: Next) -> Response {
    // The body is not taken apart for it: that is another arm.
    let path = request.uri().path().to_owned();
    std::hint::black_box(Fingerprint::request("POST", &path, JSON.as_bytes()));
    next.run(request).await
}

async fn in_a_task(request: Request, next: Next) -> Response {
    tokio::spawn(next.run(request)).await.unwrap()
}

async fn copied(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let request = Request::from_parts(head, Body::from(body.to_vec()));
    let (head, body) = next.run(request).await.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Response::from_parts(head, Body::from(body.to_vec()))
}

async fn claimed(store: Store, request: Request, next: Next) -> Response {
    let key = request.headers()["idempotency-key"].clone();
    let identity = Identity::new("", "POST /charges", &key).unwrap();
    store.prefetch(&identity);
    let fingerprint = Fingerprint::request("POST", "/charges", JSON.as_bytes());
    let Ok(Claim::Won(permit)) = store.claim(&identity, fingerprint) else {
        panic!("a new key was not won")
    };
    let response = next.run(request).await;
    permit.complete(outcome()).unwrap();
    response
}

/// As that of [`charge`].
fn outcome() -> Outcome {
    Outcome::new(201)
        .header("content-type", "application/json")
        .header("location", "/charges/42")
        .body(r#"{"id":"ch_000000000042","amount_cents":1200,"status":"done"}"#)
}

/// What an arm is measured with.
struct Arm {
    name: &'static str,
    store: Store,
    clock: ManualClock,
    is_growing: bool,
    next_key: u64,
    connections: Vec<TcpStream>,
    /// Cpu of the server's thread.
    cpu: Arc<Mutex<Cpu>>,
}

/// Asks a thread how much cpu it has used: only it knows.
type Cpu = std::sync::mpsc::Sender<std::sync::mpsc::Sender<Duration>>;

impl Arm {
    fn new(name: &'static str, is_growing: bool) -> Self {
        let is_growing = is_growing || !KEEPING.contains(&name);
        let sweep = if is_growing { Sweep::Manual } else { Sweep::Thread };
        let (store, clock) = store(sweep);
        if !is_growing {
            fill(&store, &clock);
        }
        let (address, cpu) = serve(name, app(name, &store));
        let connect = |_| {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_nodelay(true).unwrap();
            stream
        };
        let connections = (0..CONNECTIONS).map(connect).collect();
        let cpu = Arc::new(Mutex::new(cpu));
        let mut arm = Self { name, store, clock, is_growing, next_key: 0, connections, cpu };
        while arm.next_key < KEPT {
            arm.turn();
        }
        arm
    }

    /// One request on each connection, and the answers.
    fn turn(&mut self) {
        for connection in &mut self.connections {
            let key = if self.name == "replay" { self.next_key % KEPT } else { self.next_key };
            self.next_key += 1;
            connection.write_all(&bytes_of(key)).unwrap();
        }
        let mut answer = [0; 2_048];
        for connection in &mut self.connections {
            let mut len = 0;
            loop {
                len += connection.read(&mut answer[len..]).unwrap();
                if answer[..len].ends_with(br#""status":"done"}"#) {
                    break;
                }
            }
            assert!(answer.starts_with(b"HTTP/1.1 201"), "{}", String::from_utf8_lossy(&answer));
        }
    }

    fn server_cpu(&self) -> Duration {
        let (tell, told) = std::sync::mpsc::channel();
        self.cpu.lock().unwrap().send(tell).unwrap();
        told.recv().unwrap()
    }

    /// Requests a second, and nanoseconds of the server's cpu for each.
    fn slice(&mut self) -> (f64, f64) {
        let (cpu, start, before) = (self.server_cpu(), Instant::now(), self.next_key);
        while start.elapsed() < SLICE {
            self.turn();
            if !self.is_growing && self.next_key.is_multiple_of(STEP) {
                self.clock.advance(step());
            }
        }
        let (time, requests) = (start.elapsed(), (self.next_key - before) as f64);
        let cpu = self.server_cpu() - cpu;
        if self.is_growing && self.name != "replay" {
            self.clock.advance(2 * RETENTION);
            self.store.sweep();
        }
        (requests / time.as_secs_f64(), cpu.as_nanos() as f64 / requests)
    }
}

fn store(sweep: Sweep) -> (Store, ManualClock) {
    let clock = ManualClock::new();
    let builder = Store::builder().retention(RETENTION).sweep(sweep).clock(clock.clone());
    // Twice in a slice.
    let builder = builder.tick(SLICE / 2);
    (builder.max_keys(1 << 24).max_bytes(8 << 30).build().unwrap(), clock)
}

/// The clock goes on by so much: after [`LIVE`] requests by the retention.
fn step() -> Duration {
    RETENTION * STEP as u32 / LIVE as u32
}

/// Records as those of the requests, of other keys, spread over the retention.
fn fill(store: &Store, clock: &ManualClock) {
    let outcome = outcome();
    for nth in 0..LIVE {
        let key = format!("before-{nth:024x}");
        let identity = Identity::new("", "POST /charges", &key).unwrap();
        let fingerprint = Fingerprint::request("POST", "/charges", JSON.as_bytes());
        let Ok(Claim::Won(permit)) = store.claim(&identity, fingerprint) else {
            panic!("a new key was not won")
        };
        permit.complete(outcome.clone()).unwrap();
        if (nth + 1) % STEP == 0 {
            clock.advance(step());
        }
    }
}

fn bytes_of(key: u64) -> Vec<u8> {
    let len = JSON.len();
    format!(
        "POST /charges HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n\
         Idempotency-Key: {key:016x}-0000-0000-0000\r\nContent-Length: {len}\r\n\r\n{JSON}"
    )
    .into_bytes()
}

/// A server on a thread of its own.
fn serve(name: &str, app: Router) -> (SocketAddr, Cpu) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let (cpu, asked) = std::sync::mpsc::channel::<std::sync::mpsc::Sender<Duration>>();
    // By its name a profiler knows it.
    let thread = std::thread::Builder::new().name(name.to_owned());
    let serving = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let listener = axum::serve::ListenerExt::tap_io(listener, |io| {
                let _ = io.set_nodelay(true);
            });
            tokio::spawn(async { axum::serve(listener, app).await });
            // Between slices the server has nothing to do, so a timer that ends late costs nothing.
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                while let Ok(tell) = asked.try_recv() {
                    let _ = tell.send(thread_cpu());
                }
            }
        });
    };
    thread.spawn(serving).unwrap();
    (address, cpu)
}

#[cfg(target_os = "linux")]
fn thread_cpu() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[cfg(not(target_os = "linux"))]
fn thread_cpu() -> Duration {
    Duration::ZERO
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn compare(rounds: usize, is_growing: bool) {
    let mut arms = ARMS.map(|name| Arm::new(name, is_growing));
    let mut seen: [Vec<(f64, f64)>; ARMS.len()] = Default::default();
    for round in 0..rounds {
        for nth in 0..ARMS.len() {
            // Neighbours change, so that none always comes behind the same.
            let nth = (nth * [1, 3][round % 2] + round / 2) % ARMS.len();
            seen[nth].push(arms[nth].slice());
        }
    }
    println!("{rounds} rounds of {} ms, {CONNECTIONS} connections, medians", SLICE.as_millis());
    println!(
        "{:<8} {:>12} {:>10} {:>16} {:>12} {:>10}",
        "arm", "requests/s", "of bare", "server ns each", "added ns", "of bare"
    );
    let bare = seen[0].clone();
    for (name, seen) in ARMS.iter().zip(&seen) {
        let rate = median(seen.iter().map(|(rate, _)| *rate).collect());
        let ratio = seen.iter().zip(&bare).map(|(arm, bare)| arm.0 / bare.0).collect();
        let cpu = median(seen.iter().map(|(_, cpu)| *cpu).collect());
        let added = seen.iter().zip(&bare).map(|(arm, bare)| arm.1 - bare.1).collect();
        let of_cpu = seen.iter().zip(&bare).map(|(arm, bare)| bare.1 / arm.1).collect();
        println!(
            "{name:<8} {rate:>12.0} {:>8.1} % {cpu:>16.0} {:>12.0} {:>8.1} %",
            100.0 * median(ratio),
            median(added),
            100.0 * median(of_cpu)
        );
    }
    let live = arms.iter().find(|arm| arm.name == "layer").map_or(0, |arm| arm.store.stats().keys);
    println!("keys of the layer at the end: {live}");
}

/// Serves so many requests without sockets: what is counted is the service alone.
fn instructions(arm: &str, requests: u64) {
    let (store, _clock) = store(Sweep::Manual);
    let app = app(arm, &store);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for n in 0..requests {
            let key = if arm == "replay" { n % 8 } else { n };
            let request = Request::post("/charges")
                .header(header::CONTENT_TYPE, "application/json")
                .header(header::CONTENT_LENGTH, JSON.len())
                .header("idempotency-key", format!("{key:016x}-0000-0000-0000"))
                .body(Body::from(JSON))
                .unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 201);
            std::hint::black_box(response.into_body().collect().await.unwrap());
        }
    });
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).filter(|it| it != "--bench").collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => compare(60, false),
        ["--quick"] => compare(5, false),
        ["--growing"] => compare(60, true),
        ["--rounds", rounds] => compare(rounds.parse().unwrap(), false),
        ["--rounds", rounds, "--growing"] => compare(rounds.parse().unwrap(), true),
        ["--instructions", arm, requests] => instructions(arm, requests.parse().unwrap()),
        // As `cargo test --benches` calls it.
        ["--test"] => compare(1, false),
        _ => {
            eprintln!(
                "usage: http [--quick | [--rounds N] [--growing] | --instructions ARM REQUESTS]"
            );
            std::process::exit(2);
        }
    }
}
