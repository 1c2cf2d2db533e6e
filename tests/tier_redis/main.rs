//! The tier in Redis, on servers of the tests' own: what the conformance suite asks of every tier, and
//! what is special to this one.
#![cfg(all(feature = "redis", feature = "conformance"))]
#![allow(unreachable_pub, reason = "this is a program")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;
mod lines;
mod losses;
mod opening;
#[path = "../common/proxy.rs"]
mod proxy;
#[path = "../common/redis.rs"]
mod servers;
mod steps;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{HOUR, MS, SECOND, fp, id, outcome, watchdog};
use oncekey::{
    Outcome, Token,
    tier::{
        Claimed, Forgotten, Landed, NewClaim, RedisDurability, RedisTier, Resolved, State, Tier,
        TierError,
        conformance::{Host as _, check},
    },
};
use proxy::Proxy;
use redis::{aio::MultiplexedConnection, cmd};
use servers::{DURABLE, Redis, Server, is_installed, patient, replica_of};

const LEASE: Duration = Duration::from_secs(60);

/// A claim that no other test and no other owner has.
fn claim_of(owner: u64) -> NewClaim {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    NewClaim {
        token: Token::new(owner, NUMBER.fetch_add(1, Ordering::Relaxed)),
        fingerprint: fp("body"),
        max_run: HOUR,
        retention: HOUR,
    }
}

/// Claims `key` for `owner`, who beats.
async fn won(tier: &RedisTier, owner: u64, key: &str) -> Token {
    tier.beat(owner, LEASE).await.unwrap();
    let claim = claim_of(owner);
    let claimed = tier.claim(id(key), claim).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None }, "{key}");
    claim.token
}

async fn state(tier: &RedisTier, key: &str) -> Option<State> {
    tier.look_up(id(key)).await.unwrap().map(|found| found.state)
}

async fn set(connection: &mut MultiplexedConnection, name: &str, value: &str) {
    cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(connection).await.unwrap();
}

/// The text of the refusal, which must not be one that passes.
#[track_caller]
fn unusable<T: std::fmt::Debug>(answer: Result<T, TierError>) -> String {
    match answer {
        Err(TierError::Unusable(error)) => error.to_string(),
        other => panic!("not refused as unusable: {other:?}"),
    }
}

#[track_caller]
fn unavailable<T: std::fmt::Debug>(answer: Result<T, TierError>) -> String {
    match answer {
        Err(TierError::Unavailable(error)) => error.to_string(),
        other => panic!("not unavailable: {other:?}"),
    }
}

#[tokio::test]
async fn t8_one_server_keeps_the_contract() {
    let _watchdog = watchdog();
    if is_installed() {
        let failures = check(&Redis::server().await).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

#[tokio::test]
async fn t8_a_cluster_keeps_the_contract() {
    let _watchdog = watchdog();
    if is_installed() {
        let failures = check(&Redis::cluster().await).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}
