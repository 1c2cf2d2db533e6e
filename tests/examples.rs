//! The small examples, each as a user runs it: a program that ends well and says what it shows.
//! `payments` and `checkpoints` have tests of their own.
#![cfg(all(unix, feature = "axum", feature = "metrics", feature = "postgres", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/program.rs"]
mod program;

use std::process::Command;

use common::watchdog;
use program::program;
use sqlx::ConnectOptions as _;

/// What it prints.
fn run(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(program(name)).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {text}{said}");
    text
}

fn says(text: &str, line: &str) {
    assert!(text.lines().any(|there| there == line), "no '{line}' in:\n{text}");
}

#[test]
fn embed_charges_once_for_eight_threads() {
    let _watchdog = watchdog();
    let text = run("embed", &[]);
    says(&text, "8 callers, 1 charge");
    says(&text, "another body: the key was used for another request");
    says(&text, "another account: 2 charges in all");
}

#[test]
fn web_shows_a_replay_and_a_mismatch() {
    let _watchdog = watchdog();
    let text = run("web", &[]);
    says(&text, r#"201 Created, replay: false, {"id":"ch_1"}"#);
    says(&text, r#"201 Created, replay: true, {"id":"ch_1"}"#);
    assert!(text.contains("422 Unprocessable Entity, replay: false"), "{text}");
    says(&text, "3 requests, 1 charge");
}

#[test]
fn grpc_is_charged_once() {
    let _watchdog = watchdog();
    let text = run("grpc", &[]);
    says(&text, "charge 1 of 1200, replay: false");
    says(&text, "charge 1 of 1200, replay: true");
    says(&text, "2 calls, 1 charge");
}

#[test]
fn prometheus_finds_the_attempts() {
    let _watchdog = watchdog();
    let text = run("prometheus", &[]);
    for (outcome, times) in [("kept", 2), ("replayed", 1), ("key-reused", 1)] {
        let line = format!(
            "oncekey_attempts_total{{endpoint=\"POST /charges\",outcome=\"{outcome}\"}} {times}"
        );
        says(&text, &line);
    }
    says(&text, "oncekey_keys 2");
}

#[test]
fn sqlite_transaction_survives_a_restart() {
    let _watchdog = watchdog();
    let text = run("sqlite_transaction", &[]);
    says(&text, r#"first start: 201 Created {"id":1,"amount":1200}"#);
    says(&text, r#"second start: 201 Created {"id":1,"amount":1200}"#);
    says(&text, "2 attempts, 1 row");
}

#[test]
fn postgres_transaction_is_one_for_two_nodes() {
    let _watchdog = watchdog();
    // One that syncs: the tier asks for it.
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let text = run("postgres_transaction", &[server.options().to_url_lossy().as_str()]);
    says(&text, r#"node 0: 201 Created, replay: false, {"id":1,"amount":1200}"#);
    says(&text, r#"node 1: 201 Created, replay: true, {"id":1,"amount":1200}"#);
    says(&text, "2 attempts on 2 nodes, 1 row");
}

#[test]
fn capacity_does_the_sum_and_refuses_what_is_no_number() {
    let _watchdog = watchdog();
    let text = run("capacity", &["--rate", "20", "--retention", "24h", "--body", "300"]);
    assert!(text.contains("one node keeps them all"), "{text}");
    let text = run("capacity", &["--rate", "2000", "--retention", "24h", "--simulate"]);
    assert!(text.contains("put a tier behind it") && text.contains("by account"), "{text}");
    for wrong in [&["--rate"][..], &["--rate", "-1"], &["--retention", "24"], &["--bogus", "1"]] {
        let output = Command::new(program("capacity")).args(wrong).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage: capacity"));
    }
}
