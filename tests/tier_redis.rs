//! The tier in Redis, on servers of the tests' own.
#![cfg(all(feature = "redis", feature = "conformance"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/redis.rs"]
mod servers;

use common::watchdog;
use oncekey::tier::conformance::check;
use servers::{Redis, is_installed};

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
