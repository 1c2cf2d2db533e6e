//! Clients over sockets: each key is sent by one that leaves at some moment, and then by one that asks
//! until it is answered. Behind the layer is a memory that is too small, and a tier that fails.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, atomic::Ordering},
    time::{Duration, Instant},
};

use axum::{Router, http::HeaderMap, routing::post};
use oncekey::{
    Lapse, Stats, Store,
    http::IdempotencyLayer,
    tier::{MemoryTier, Tiered},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    task::JoinHandle,
};

use crate::{
    Fast, Soak, check_limits,
    common::Dice,
    fail, settles,
    tiers::{Weather, Wire},
};

const CLIENTS: u64 = 24;
const MAX_KEYS: usize = 600;
const MAX_BYTES: usize = 8 << 20;
const MINUTE: Duration = Duration::from_secs(60);

type Runs = Arc<Mutex<HashMap<String, u64>>>;

pub struct Http {
    runtime: Runtime,
    pub clock: Fast,
    /// Tasks that there were before.
    tasks: usize,
    tiered: Tiered,
    tier: MemoryTier,
    layer: IdempotencyLayer,
    runs: Runs,
    clients: Vec<JoinHandle<u64>>,
    weather: JoinHandle<()>,
    server: JoinHandle<()>,
}

impl Http {
    pub fn start(soak: &Arc<Soak>) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let tasks = runtime.metrics().num_alive_tasks();
        let runs = Runs::default();
        let tier = MemoryTier::with_clock(soak.clock.clone());
        let wire = Wire::to(Arc::new(tier.clone()));
        let clock = soak.clock.apart();
        let serving = serve(soak, clock.clone(), &wire, &runs);
        let (tiered, address, layer, server) = runtime.block_on(serving);
        let client = |seed| {
            let (soak, runs) = (Arc::clone(soak), Arc::clone(&runs));
            runtime.spawn(clients(soak, address, runs, seed))
        };
        let clients = (0..CLIENTS).map(client).collect();
        let weather = runtime.spawn(changes(Arc::clone(soak), wire));
        Self { runtime, clock, tasks, tiered, tier, layer, runs, clients, weather, server }
    }

    pub fn check(&self) {
        check_limits("the tier's memory", &self.tiered.store().stats(), (MAX_KEYS, MAX_BYTES));
        let http = self.layer.stats();
        if http.tasks > 8_192 || http.buffered > 256 << 20 || http.panics > 0 {
            fail(format!("a limit of the layer was passed: {http:?}"));
        }
    }

    /// Ends the work; what it came to.
    pub fn stop(&mut self) -> String {
        let clients = std::mem::take(&mut self.clients);
        let asked = self.runtime.block_on(async {
            let mut asked = 0;
            for client in clients {
                asked += client.await.unwrap_or_else(|error| fail(error));
            }
            (&mut self.weather).await.unwrap_or_else(|error| fail(error));
            asked
        });
        let store = self.tiered.store();
        settles("somebody is still there", store, || {
            let (stats, http) = (store.stats(), self.layer.stats());
            [stats.in_flight, stats.waiters, http.tasks, http.buffered] == [0; 4]
        });
        let run = self.runs.lock().expect("nobody panics with it").len();
        if run as u64 != asked {
            fail(format!("{asked} keys were answered and {run} run"));
        }
        let (stats, tier) = (store.stats(), self.tiered.stats());
        if stats.evicted == 0 {
            fail(format!("nothing was evicted: {stats:?}"));
        }
        let Stats { replays, evicted, .. } = stats;
        format!("HTTP: {run} keys run once each, {replays} replays, {evicted} evicted; {tier:?}")
    }

    pub fn check_clean(self) {
        let store = self.tiered.store().clone();
        settles("something is left behind the layer", &store, || {
            let stats = store.stats();
            (stats.keys, stats.bytes) == (0, 0) && self.tier.is_empty()
        });
        self.server.abort();
        drop((self.tiered, self.layer));
        let metrics = self.runtime.metrics();
        settles("tasks are left", &store, || metrics.num_alive_tasks() == self.tasks);
    }
}

async fn serve(
    soak: &Arc<Soak>,
    clock: Fast,
    wire: &Wire,
    runs: &Runs,
) -> (Tiered, SocketAddr, IdempotencyLayer, JoinHandle<()>) {
    let store = Store::builder()
        .clock(clock)
        .retention(60 * MINUTE)
        // Longer than any soak: a tier is told of life in real time, and this clock is a fast one.
        .lease(10 * 24 * 60 * MINUTE)
        .max_run(24 * 60 * MINUTE)
        .max_keys(MAX_KEYS)
        .max_bytes(MAX_BYTES)
        .build()
        .expect("the settings are in their bounds");
    let builder = Tiered::builder(store).answer_within(Duration::from_secs(20));
    let tiered = builder.open(wire.clone(), Lapse::Hold).await.expect("the tier is there");
    let layer = IdempotencyLayer::single_tenant(tiered.clone());
    let (soak, counted) = (Arc::clone(soak), Arc::clone(runs));
    let handler = move |headers: HeaderMap| async move {
        let key = headers["idempotency-key"].to_str().unwrap_or_default().to_owned();
        let nth: u64 = key.parse().unwrap_or_default();
        tokio::time::sleep(Duration::from_millis(nth % 7)).await;
        let mut runs = counted.lock().expect("nobody panics with it");
        let count = runs.entry(key.clone()).or_default();
        *count += 1;
        if *count > 1 {
            fail(format!("{key} is run twice over HTTP"));
        }
        soak.runs.fetch_add(1, Ordering::Relaxed);
        (axum::http::StatusCode::CREATED, body(nth))
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            fail(error);
        }
    });
    (tiered, address, layer, server)
}

fn body(nth: u64) -> String {
    format!("{nth}{}", "x".repeat((nth % 50) as usize * 100))
}

/// Fair for most of the time; then cut off, or the answers are lost.
async fn changes(soak: Arc<Soak>, wire: Wire) {
    let mut dice = Dice::new(3);
    while soak.goes_on() {
        for weather in [Weather::Fair, Weather::Down, Weather::Fair, Weather::Deaf] {
            wire.becomes(weather);
            let most = if weather == Weather::Fair { 4_000 } else { 600 };
            tokio::time::sleep(Duration::from_millis(most / 2 + dice.roll(most / 2))).await;
        }
    }
    wire.becomes(Weather::Fair);
}

/// One key after the other; how many were answered.
async fn clients(soak: Arc<Soak>, server: SocketAddr, runs: Runs, seed: u64) -> u64 {
    let (mut dice, mut nth) = (Dice::new(seed), 0);
    while soak.goes_on() {
        let key = nth * CLIENTS + seed;
        nth += 1;
        careless(server, key, &mut dice).await;
        let start = Instant::now();
        loop {
            let (status, text) = patient(server, key).await.unwrap_or_default();
            match status {
                201 if text == body(key) => break,
                409 if text.contains("in-flight") => {}
                // The tier is away, or the connection was refused in a full queue.
                503 | 0 => {}
                _ => fail(format!("{key} got {status} {text}")),
            }
            if start.elapsed() > Duration::from_secs(120) {
                fail(format!("{key} is not answered, but {status} {text}"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let took = start.elapsed().as_micros() as u64;
        soak.times.http.lock().expect("nobody panics with it").saturating_record(took);
        if runs.lock().expect("as above").get(&key.to_string()) != Some(&1) {
            fail(format!("{key} was answered and not run"));
        }
        tokio::time::sleep(Duration::from_millis(dice.roll(100))).await;
    }
    nth
}

fn request(key: u64) -> String {
    format!(
        "POST /charges HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nIdempotency-Key: {key}\r\n\
         Content-Length: 2\r\n\r\n{{}}"
    )
}

/// Sends a part of a request or all of it, and resets or closes the connection at some moment.
async fn careless(server: SocketAddr, key: u64, dice: &mut Dice) {
    let Ok(mut stream) = TcpStream::connect(server).await else { return };
    let request = request(key);
    let sent = match dice.roll(4) {
        0 => dice.roll(request.len() as u64) as usize,
        _ => request.len(),
    };
    // That the server is gone already is its good right.
    let _ = stream.write_all(&request.as_bytes()[..sent]).await;
    tokio::time::sleep(Duration::from_millis(dice.roll(8))).await;
    if dice.roll(2) == 0 {
        // What was not read makes it a reset.
        let _ = stream.set_zero_linger();
    }
}

/// Status and body.
async fn patient(server: SocketAddr, key: u64) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(server).await.ok()?;
    stream.write_all(request(key).as_bytes()).await.ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.get(9..12)?.parse().ok()?, body.to_owned()))
}
