//! The sums of `docs/capacity.md` against real stores: what a kept key takes in memory and in tiers.
#![cfg(all(unix, feature = "sqlite", feature = "postgres", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../docs/examples/capacity/model.rs"]
mod model;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/redis.rs"]
mod redis_server;

use std::time::Duration;

use common::{DAY, Dice, by_hand, watchdog};
use oncekey::{
    Claim, Fingerprint, Identity, Lapse, Outcome, Store,
    tier::{Durability, PostgresTier, RedisTier, SqliteTier, Tier, Tiered, TieredClaim},
};
use sqlx::{
    Row as _,
    sqlite::{SqliteConnectOptions, SqlitePool},
};

const ACCOUNT: &str = "acct_0123456";
const ENDPOINT: &str = "POST /charges/{}";
const KEYS: usize = 1_000;

fn load(body: usize) -> model::Load {
    model::Load {
        rate: 100.0,
        retention: DAY,
        identity: (ACCOUNT.len() + ENDPOINT.len() + key(0).len()) as f64,
        // Seven bytes of a stored outcome are neither.
        head: (outcome(body).to_bytes().len() - 7 - body) as f64,
        body: body as f64,
        handler: Duration::ZERO,
    }
}

fn key(number: usize) -> String {
    format!("{number:08x}-0000-4000-8000-000000000000")
}

/// A body that no database can compress.
fn outcome(body: usize) -> Outcome {
    let mut dice = Dice::new(1);
    let body: Vec<u8> = (0..body).map(|_| dice.roll(256) as u8).collect();
    Outcome::new(201)
        .header("content-type", "application/json")
        .header("location", "/charges/ch_0123456789abcdef")
        .body(body)
}

fn same() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"same")
}

#[test]
fn memory_counts_what_the_sum_says() {
    for body in [0, 300, 3_000] {
        let (store, _clock) = by_hand();
        for number in 0..KEYS {
            let key = key(number);
            let id = Identity::new(ACCOUNT, ENDPOINT, &key).unwrap();
            let Ok(Claim::Won(permit)) = store.claim(&id, same()) else { panic!("not won") };
            permit.complete(outcome(body)).unwrap();
        }
        let counted = store.stats().bytes as f64 / KEYS as f64;
        let said = load(body).key();
        assert!((counted / said - 1.0).abs() < 0.01, "{counted} counted, {said} said");
    }
}

/// `KEYS` more, from this one on.
async fn fill(tier: impl Tier, first: usize, body: usize) {
    let store = Tiered::open(Store::builder().build().unwrap(), tier, Lapse::Hold).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16 {
        let store = store.clone();
        tasks.spawn(async move {
            for number in (task..KEYS).step_by(16) {
                let key = key(first + number);
                let id = Identity::new(ACCOUNT, ENDPOINT, &key).unwrap();
                let Ok(TieredClaim::Won(permit)) = store.claim(&id, same()).await else {
                    panic!("not won")
                };
                permit.complete(outcome(body)).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
}

/// Tiers grow in pages and pieces: the sum says at least what is taken, and not twice as much.
fn holds(tier: model::Tier, body: usize, taken: f64) {
    let (taken, said) = (taken / KEYS as f64, tier.row(&load(body)));
    assert!(
        taken <= said && said < 2.0 * taken,
        "{}, bodies of {body}: {taken} bytes a key taken, {said} said",
        tier.name()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_takes_what_the_sum_says() {
    let _watchdog = watchdog();
    for body in [0, 300, 3_000] {
        let name = format!("oncekey-capacity-{}-{body}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let file = SqliteConnectOptions::new().filename(directory.join("db"));
        let pool = SqlitePool::connect_with(file.create_if_missing(true)).await.unwrap();
        let builder = SqliteTier::builder().durability(Durability::KilledProcess);
        let tier = builder.open(pool.clone()).await.unwrap();
        fill(tier, 0, body).await;
        let pages = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
        let taken: i64 = sqlx::query(pages).fetch_one(&pool).await.unwrap().get(0);
        holds(model::Tier::Sqlite, body, taken as f64);
        pool.close().await;
        std::fs::remove_dir_all(directory).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_takes_what_the_sum_says() {
    let _watchdog = watchdog();
    let Some(server) = postgres_server::shared() else { return };
    for body in [0, 300, 3_000] {
        let pool = server.pool().await;
        let builder = PostgresTier::builder().durability(Durability::KilledProcess);
        let schema = format!("capacity_{body}");
        fill(builder.schema(&schema).connect(pool.clone()).await.unwrap(), 0, body).await;
        // What is dead by now depends on luck.
        sqlx::query("VACUUM FULL").execute(&pool).await.unwrap();
        let size = sqlx::query("SELECT pg_total_relation_size(format('%I.idempotency_keys', $1))");
        let taken: i64 = size.bind(&schema).fetch_one(&pool).await.unwrap().get(0);
        holds(model::Tier::Postgres, body, taken as f64);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_takes_what_the_sum_says() {
    let _watchdog = watchdog();
    if !redis_server::is_installed() {
        return;
    }
    for body in [300, 3_000] {
        let server = redis_server::Server::durable().await;
        let tier = RedisTier::connect(&server.url()).await.unwrap();
        // The first ones also take what a server takes once.
        fill(tier.clone(), 0, body).await;
        let before = used(&server).await;
        fill(tier, KEYS, body).await;
        holds(model::Tier::Redis, body, used(&server).await - before);
    }
}

async fn used(server: &redis_server::Server) -> f64 {
    let mut connection = server.connect().await;
    let info: String = redis::cmd("INFO").arg("memory").query_async(&mut connection).await.unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    line.parse().unwrap()
}
