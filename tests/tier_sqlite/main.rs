//! The tier in a SQLite file: the contract, what is special to it, and what becomes of it when the
//! process is killed or the file is not as it should be.
//!
//! `ONCEKEY_KILLS=200` runs as many rounds of `kill -9`.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "conformance")]
mod contract;
mod damaged;
mod killed;
mod locked;
mod refused;
mod reopened;
mod within_a_transaction;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use common::{DAY, HOUR, LEASE, fp, id, outcome, watchdog};
use oncekey::{
    Lapse, ManualClock, Outcome, Store, Token,
    tier::{
        Claimed, Forgotten, Found, Landed, NewClaim, SqliteTier, State, Tier, TierError, Tiered,
        TieredClaim,
    },
};
use sqlx::{
    Row, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

/// A directory of its own, removed in the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("oncekey-sqlite-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("app.db")
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.0.join(format!("app.db{suffix}"))
    }

    async fn pool(&self) -> SqlitePool {
        SqlitePool::connect_with(self.options()).await.unwrap()
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new().filename(self.file()).create_if_missing(true)
    }

    async fn open(&self) -> SqliteTier {
        SqliteTier::open(self.pool().await).await.unwrap()
    }

    async fn open_at(&self, clock: &ManualClock) -> SqliteTier {
        SqliteTier::builder().clock(clock.clone()).open(self.pool().await).await.unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const OWNER: u64 = 7;

fn token(number: u64) -> Token {
    Token::new(OWNER, number)
}

fn claim(number: u64) -> NewClaim {
    NewClaim { token: token(number), fingerprint: fp("a"), max_run: HOUR, retention: DAY }
}

async fn won(tier: &SqliteTier, key: &str, number: u64) {
    tier.beat(OWNER, LEASE).await.unwrap();
    let claimed = tier.claim(id(key), claim(number)).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None });
}

async fn found(tier: &SqliteTier, key: &str) -> Option<Found> {
    tier.look_up(id(key)).await.unwrap()
}

async fn state(tier: &SqliteTier, key: &str) -> Option<State> {
    found(tier, key).await.map(|found| found.state)
}

/// Whether the tier's verbs work.
async fn works(tier: &SqliteTier) {
    static NUMBER: AtomicU64 = AtomicU64::new(1 << 32);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let key = format!("works-{number}");
    won(tier, &key, number).await;
    let done = tier.complete(id(&key), token(number), Some(&outcome("works")), DAY).await.unwrap();
    assert_eq!(done, Landed::Done);
    assert_eq!(state(tier, &key).await, Some(State::Completed(outcome("works"))));
}

#[track_caller]
fn assert_unusable<T: std::fmt::Debug>(result: Result<T, TierError>, text: &str) {
    match result {
        Err(TierError::Unusable(error)) if error.to_string().contains(text) => {}
        other => panic!("not unusable for `{text}`: {other:?}"),
    }
}
