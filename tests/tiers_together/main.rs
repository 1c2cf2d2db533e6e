//! What memory and tier do together, on each tier there is: the reported faults that are about both.
//!
//! Time is real here, because the servers have clocks of their own: a short lease, and waiting until
//! the tier itself says that it has lapsed.
#![cfg(all(feature = "embedded", feature = "sqlite", feature = "postgres", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/postgres.rs"]
mod postgres_server;
#[path = "../common/redis.rs"]
mod redis_server;
#[path = "../common/tiers.rs"]
mod tiers;

mod books;
mod nodes;
mod outages;
mod owners;
mod records;
mod wire;

use std::{future::poll_fn, path::PathBuf, pin::pin, sync::Arc, task::Poll, time::Duration};

use books::Books;
use common::{LONG, id, outcome, watchdog};
use oncekey::{
    Fingerprint, Lapse, Outcome, Store, Token,
    tier::{
        Claimed, EmbeddedTier, Forgotten, Found, Landed, MemoryTier, NewClaim, PostgresTier,
        RedisTier, SqliteTier, State, Tier, Tiered, TieredClaim, TieredError, TieredPermit,
        TieredSettled,
    },
};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tiers::{CLAIM, COMPLETE, LOOK_UP, Weather, Wire};

/// A tier, and what has to live as long.
struct Place {
    name: &'static str,
    tier: Arc<dyn Tier>,
    books: Books,
    _server: Option<redis_server::Server>,
    _directory: Option<Directory>,
}

/// A directory that is gone with its value.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str, name: &str) -> Self {
        let name = format!("oncekey-{test}-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All tiers whose servers are installed.
async fn places(test: &str) -> Vec<Place> {
    let place = |name, tier, books| {
        let (_server, _directory) = (None, None);
        Place { name, tier, books, _server, _directory }
    };
    let mut places = vec![place("memory", Arc::new(MemoryTier::new()), Books::None)];
    let at = Directory::new(test, "embedded");
    let tier = Arc::new(EmbeddedTier::open(&at.0).unwrap());
    places.push(Place { _directory: Some(at), ..place("embedded", tier, Books::None) });
    let at = Directory::new(test, "sqlite");
    let file = SqliteConnectOptions::new().filename(at.0.join("db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(file).await.unwrap();
    // No transaction of these tests is so long that a step gives up waiting for it.
    let tier = SqliteTier::builder().patience(LONG).open(pool.clone()).await.unwrap();
    let books = Books::Sqlite(tier.clone(), pool);
    places.push(Place { _directory: Some(at), ..place("sqlite", Arc::new(tier), books) });
    if let Some(server) = postgres_server::shared() {
        let builder = PostgresTier::builder().durability(oncekey::tier::Durability::KilledProcess);
        let builder = builder.schema(test.to_lowercase()).lock_limit(LONG);
        let pool = server.pool().await;
        let tier = builder.connect(pool.clone()).await.unwrap();
        let books = Books::Postgres(tier.clone(), pool);
        places.push(place("postgres", Arc::new(tier), books));
    }
    if redis_server::is_installed() {
        let server = redis_server::Server::durable().await;
        let tier = Arc::new(RedisTier::connect(&server.url()).await.unwrap());
        places.push(Place { _server: Some(server), ..place("redis", tier, Books::None) });
    }
    places
}

/// A node on a way of its own to the tier.
async fn node(place: &Place, lease: Duration, on_lapse: Lapse) -> (Tiered, Wire) {
    let wire = Wire::to(Arc::clone(&place.tier));
    let store = Store::builder().lease(lease).build().unwrap();
    let builder = Tiered::builder(store).poll_every(Duration::from_millis(10));
    (builder.open(wire.clone(), on_lapse).await.unwrap(), wire)
}

fn same() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"same")
}

fn other() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"other")
}

async fn won(node: &Tiered, key: &str) -> TieredPermit {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Won(permit)) => permit,
        other => panic!("not won: {other:?}"),
    }
}

async fn replayed(node: &Tiered, key: &str) -> Outcome {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Replay(replay)) => replay.into_outcome(),
        other => panic!("no replay: {other:?}"),
    }
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until the tier says that the owner of `key` has lapsed.
async fn lapsed(place: &Place, key: &str) {
    until(async || state(place, key).await.unwrap() == State::Lapsed).await;
}

/// Polls a future `times` times, each time that it is woken, and drops it, as one does who goes away.
/// `Some` if it has ended before that.
async fn given_up<T>(future: impl Future<Output = T>, times: usize) -> Option<T> {
    let (mut future, mut left) = (pin!(future), times);
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// A claim by owner 1 or another, past the memory.
fn claim(owner: u64, number: u64) -> NewClaim {
    let token = Token::new(owner, number);
    NewClaim { token, fingerprint: same(), max_run: LONG, retention: LONG }
}

/// What the tier knows of `key`.
async fn found(place: &Place, key: &str) -> Option<Found> {
    place.tier.look_up(id(key)).await.unwrap()
}

async fn state(place: &Place, key: &str) -> Option<State> {
    found(place, key).await.map(|found| found.state)
}
