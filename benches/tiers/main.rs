//! What tiers do in a second: `cargo bench --all-features --bench tiers -- embedded`; another arm is
//! `sqlite`, `postgres` or `redis`; without a name, all of them.
//!
//! So many tasks claim a key of their own, complete it with 200 bytes, and go on with the next, without
//! a memory in front; then they look up keys that were completed, as a replay of a key that has left
//! memory does.
//!
//! The embedded tier stands beside a plain file that is written and synced as often as the disk allows.
//! Each of the others stands beside the two statements or commands that one would write by hand, on an
//! equal table, through the same pool or connection: passes of both take turns, and what counts is the
//! median of how many times as long ours takes. Servers are private and sync what they acknowledge;
//! `--unsynced` lets them sync nothing, so that the servers' own work shows.
//!
//! Everything lies below the temporary directory: set `TMPDIR` to a disk that syncs. `--seconds N` sets
//! how long each pass runs, `--tasks N` how many tasks there are, `--passes N` how many passes of each.
#![allow(missing_docs, unreachable_pub, reason = "a program")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

mod embedded;
#[allow(dead_code, reason = "with few features nothing is compared")]
mod load;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(all(feature = "redis", feature = "conformance"))]
mod redis;
#[cfg(feature = "sqlite")]
mod sqlite;

use load::Settings;

fn main() {
    let mut settings = Settings { seconds: 5.0, tasks: 256, passes: 5, synced: true };
    let mut arms = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--seconds" => settings.seconds = arguments.next().unwrap().parse().unwrap(),
            "--tasks" => settings.tasks = arguments.next().unwrap().parse().unwrap(),
            "--passes" => settings.passes = arguments.next().unwrap().parse().unwrap(),
            "--unsynced" => settings.synced = false,
            "embedded" | "sqlite" | "postgres" | "redis" => arms.push(argument),
            other => panic!("no argument {other}: see the head of benches/tiers/main.rs"),
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let is_asked = |arm: &str| arms.is_empty() || arms.iter().any(|asked| asked == arm);
    if is_asked("embedded") {
        runtime.block_on(embedded::measure(&settings));
    }
    #[cfg(feature = "sqlite")]
    if is_asked("sqlite") {
        runtime.block_on(sqlite::measure(&settings));
    }
    #[cfg(feature = "postgres")]
    if is_asked("postgres") {
        runtime.block_on(postgres::measure(&settings));
    }
    #[cfg(all(feature = "redis", feature = "conformance"))]
    if is_asked("redis") {
        runtime.block_on(redis::measure(&settings));
    }
}
