//! The tier in a directory: what an opening finds, whom it refuses, and what room it takes.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/embedded.rs"]
mod embedded;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use common::watchdog;
use embedded::*;
use oncekey::{
    ManualClock, Token,
    tier::{
        Claimed, Durability, EmbeddedTier, Forgotten, Landed, NewClaim, State, Tier, TierError,
    },
};

const SECOND: Duration = Duration::from_secs(1);

/// The tier, on a clock moved by hand; a file of its own process has no other handles.
#[cfg(feature = "conformance")]
struct Host {
    tier: EmbeddedTier,
    clock: ManualClock,
}

#[cfg(feature = "conformance")]
impl oncekey::tier::conformance::Host for Host {
    fn node(&self) -> std::pin::Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async { Arc::new(self.tier.clone()) as Arc<dyn Tier> })
    }

    fn advance(&self, by: Duration) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move { self.clock.advance(by) })
    }
}

#[cfg(feature = "conformance")]
#[tokio::test]
async fn t8_the_embedded_tier_keeps_the_contract() {
    let _watchdog = watchdog();
    for level in [Durability::PowerLoss, Durability::KilledProcess] {
        let (dir, clock) = (Dir::new(), ManualClock::new());
        let builder = dir.builder().durability(level).buffer(64 << 10).clock(clock.clone());
        let host = Host { tier: builder.open().unwrap(), clock };
        let failures = oncekey::tier::conformance::check(&host).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

#[tokio::test]
async fn t7_an_opening_finds_what_the_one_before_has_left() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let tier = dir.open();
    tier.beat(1, LEASE).await.unwrap();
    for (number, key) in ["completed", "not-kept", "held", "released", "open"].iter().enumerate() {
        won(tier.claim(id(key), claim(1, number as u64)).await);
    }
    let kept = outcome("completed", 100_000);
    done(tier.complete(id("completed"), Token::new(1, 0), Some(&kept), DAY).await);
    done(tier.complete(id("not-kept"), Token::new(1, 1), None, DAY).await);
    done(tier.hold(id("held"), Token::new(1, 2), DAY).await);
    done(tier.release(id("released"), Token::new(1, 3)).await);
    done(tier.checkpoint(id("open"), Token::new(1, 4), Bytes::from_static(b"step 2")).await);
    assert_eq!(state(&tier, "open").await, Some(State::InFlight));
    drop(tier);

    // Whoever owned what was in flight is gone: no lease has to pass.
    let tier = dir.open();
    assert_eq!(state(&tier, "completed").await, Some(State::Completed(kept)));
    assert_eq!(state(&tier, "not-kept").await, Some(State::NotKept));
    assert_eq!(state(&tier, "held").await, Some(State::Held));
    assert_eq!(state(&tier, "released").await, None);
    let open = found(&tier, "open").await.unwrap();
    assert_eq!((open.state, open.token), (State::Lapsed, Token::new(1, 4)));
    let seen = open.token;
    assert!(matches!(
        tier.take_over(id("open"), seen, claim(2, 0)).await,
        Err(TierError::OwnerLapsed)
    ));
    tier.beat(2, LEASE).await.unwrap();
    match tier.take_over(id("open"), seen, claim(2, 0)).await {
        Ok(Claimed::Won { checkpoint }) => assert_eq!(checkpoint.unwrap(), "step 2"),
        other => panic!("{other:?}"),
    }
    // The late owner of the former opening has lost.
    let late = tier.complete(id("open"), seen, None, DAY).await.unwrap();
    assert!(matches!(late, Landed::Lost(Some(_))), "{late:?}");
}

#[tokio::test]
async fn t7_a_directory_is_open_once() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let tier = dir.open();
    let clone = tier.clone();
    match dir.builder().open() {
        Err(error @ TierError::Unavailable(_)) => {
            assert!(error.to_string().contains("is open already"), "{error}");
        }
        other => panic!("opened twice: {other:?}"),
    }
    // Another process is refused as well.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "another_process", "--nocapture"])
        .env("ONCEKEY_TEST_DIR", dir.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert!(String::from_utf8_lossy(&child.stdout).contains("refused"), "{child:?}");
    // The last clone gives it back, and has done so when its drop returns.
    drop(tier);
    assert!(dir.builder().open().is_err());
    drop(clone);
    drop(dir.open());
}

/// What `t7_a_directory_is_open_once` runs in another process; by itself it does nothing.
#[test]
fn another_process() {
    let Ok(dir) = std::env::var("ONCEKEY_TEST_DIR") else { return };
    assert!(matches!(EmbeddedTier::open(dir), Err(TierError::Unavailable(_))));
    println!("refused");
}

#[test]
fn t2_a_directory_of_something_else_is_refused_and_left_as_it_is() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    fs::create_dir_all(dir.path()).unwrap();
    fs::write(dir.path().join("holiday.jpg"), "palms").unwrap();
    let text = unusable(dir.builder().open());
    assert!(text.contains("holiday.jpg") && text.contains("empty"), "{text}");
    assert_eq!(files(dir.path()).len(), 1, "something was put into it");
    // No directory at all, and one that nobody may write to.
    unusable(EmbeddedTier::open(dir.path().join("holiday.jpg")));
    #[cfg(target_os = "linux")]
    unusable(EmbeddedTier::open("/sys/oncekey"));
}

#[test]
fn t2_a_foreign_format_is_refused_by_its_name() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    drop(dir.open());
    for (file, put) in [
        ("oncekey", &b"oncekey embedded tier, format 2\n"[..]),
        ("oncekey", b""),
        ("version", b"FJL\x04"),
        ("version", b"FJL\x02"),
        ("version", b""),
        ("synced", b"0123456789abcdef"),
        ("synced", b""),
    ] {
        let copy = dir.copy();
        fs::write(copy.records().join(file), put).unwrap();
        let text = unusable(copy.builder().open());
        assert!(text.contains("version") || text.contains("synced"), "{text}");
    }
    for file in ["oncekey", "synced"] {
        let copy = dir.copy();
        fs::remove_file(copy.records().join(file)).unwrap();
        let text = unusable(copy.builder().open());
        assert!(text.contains("missing"), "{text}");
    }
    drop(dir.open());
}

#[test]
fn t7_a_creation_that_was_cut_off_begins_anew() {
    let _watchdog = watchdog();
    let whole = Dir::new();
    drop(whole.open());
    // Each file may be the last that was made, and half of it.
    for last in files(&whole.records()) {
        let dir = whole.copy();
        let name = last.strip_prefix(whole.records()).unwrap();
        fs::write(dir.records().join(name), b"ha").unwrap();
        fs::rename(dir.records(), dir.path().join("records.new")).unwrap();
        drop(dir.open());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_many_steps_share_a_sync() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let tier = Arc::new(dir.open());
    tier.beat(1, LEASE).await.unwrap();
    let before = batches(&dir);
    let tasks: Vec<_> = (0..256)
        .map(|task| {
            let tier = Arc::clone(&tier);
            tokio::spawn(async move {
                for round in 0..4 {
                    let key = format!("{task}-{round}");
                    let token = Token::new(1, task * 4 + round);
                    run(&tier, &key, token, &outcome(&key, 10)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let batches = batches(&dir) - before;
    assert!((8..1_024).contains(&batches), "2048 steps in {batches} batches");
}

/// How many batches are known to be synced.
fn batches(dir: &Dir) -> u64 {
    let synced = fs::read(dir.records().join("synced")).unwrap();
    u64::from_be_bytes(*synced.first_chunk().unwrap())
}

/// Looks at what the threads of this process are at, while the tier works.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[tokio::test]
async fn t2_the_default_level_syncs() {
    let _watchdog = watchdog();
    // `fdatasync`, as the kernel numbers it.
    let sync = if cfg!(target_arch = "x86_64") { "75 " } else { "83 " };
    let dir = Dir::new();
    let tier = dir.open();
    tier.beat(1, LEASE).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let looking = std::thread::spawn(move || {
        let mut seen = false;
        while !over.load(Ordering::Relaxed) && !seen {
            for thread in fs::read_dir("/proc/self/task").unwrap() {
                let thread = thread.unwrap().path();
                // A thread may have ended since.
                let name = fs::read_to_string(thread.join("comm")).unwrap_or_default();
                let call = fs::read_to_string(thread.join("syscall")).unwrap_or_default();
                seen |= name.starts_with("oncekey-embed") && call.starts_with(sync);
            }
        }
        seen
    });
    let mut number = 0;
    while number < 10_000 && !looking.is_finished() {
        won(tier.claim(id(&number.to_string()), claim(1, number)).await);
        number += 1;
    }
    is_over.store(true, Ordering::Relaxed);
    assert!(looking.join().unwrap(), "the writer was not seen to sync in {number} batches");
}

#[tokio::test]
async fn t3_a_call_that_is_dropped_is_whole_or_nothing() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let tier = dir.open();
    tier.beat(1, LEASE).await.unwrap();
    for number in 0..200 {
        let key = format!("dropped-{number}");
        let mut claiming = tier.claim(id(&key), claim(1, number));
        if number % 2 == 0 {
            // Once polled, the step is the writer's.
            let _ = claiming.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        drop(claiming);
        let found = found(&tier, &key).await;
        assert_eq!(found.is_some(), number % 2 == 0, "{key}");
        won(tier.claim(id(&key), claim(1, number)).await);
    }
    // Closed with steps that wait: those are done.
    let (key, another) = (outcome("last", 10), tier.clone());
    won(tier.claim(id("last"), claim(1, 1_000)).await);
    let mut completing = another.complete(id("last"), Token::new(1, 1_000), Some(&key), DAY);
    let _ = completing.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(completing);
    drop((tier, another));
    assert_eq!(state(&dir.open(), "last").await, Some(State::Completed(key)));
}

#[tokio::test]
async fn r23_time_goes_on_across_openings_and_never_back() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let clock = ManualClock::new();
    clock.advance(100 * DAY);
    let tier = dir.builder().clock(clock.clone()).open().unwrap();
    tier.beat(1, LEASE).await.unwrap();
    run(&tier, "old", Token::new(1, 1), &outcome("old", 10)).await;
    clock.advance(HOUR);
    won(tier.claim(id("stamp"), claim(1, 2)).await);
    drop(tier);
    // The clock of the next opening is behind the stamp: time goes on from there.
    let clock = ManualClock::new();
    let tier = dir.builder().clock(clock.clone()).open().unwrap();
    assert_eq!(found(&tier, "old").await.unwrap().remaining, DAY - HOUR);
    clock.advance(DAY - HOUR - SECOND);
    assert_eq!(found(&tier, "old").await.unwrap().remaining, SECOND);
    clock.advance(SECOND);
    assert_eq!(found(&tier, "old").await, None);
    // And where the clock is ahead, time has passed.
    tier.beat(1, LEASE).await.unwrap();
    run(&tier, "new", Token::new(1, 3), &outcome("new", 10)).await;
    drop(tier);
    let clock = ManualClock::new();
    clock.advance(102 * DAY);
    let tier = dir.builder().clock(clock).open().unwrap();
    assert_eq!(found(&tier, "new").await, None);
    // Without a clock of the test's it is the wall clock's, long after all that.
    drop(tier);
    let tier = dir.open();
    tier.beat(1, LEASE).await.unwrap();
    run(&tier, "today", Token::new(1, 4), &outcome("today", 10)).await;
    drop(tier);
    let clock = ManualClock::new();
    clock.advance(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap());
    let tier = dir.builder().clock(clock.clone()).open().unwrap();
    let remaining = found(&tier, "today").await.unwrap().remaining;
    assert!(remaining > DAY - HOUR && remaining < DAY + HOUR, "{remaining:?}");
    clock.advance(DAY + SECOND);
    assert_eq!(found(&tier, "today").await, None);
}

#[tokio::test]
async fn r22_a_record_that_moves_between_generations_is_there_once() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let clock = ManualClock::new();
    let tier = dir.builder().clock(clock.clone()).open().unwrap();
    tier.beat(1, LEASE).await.unwrap();
    // From one life to another, up and down, with other records that begin and end generations.
    for (number, minutes) in [1, 10_000, 5, 100, 50_000, 2, 1_000].into_iter().enumerate() {
        let (token, life) = (Token::new(1, number as u64), minutes * 60 * SECOND);
        let new = NewClaim { token, ..claim(1, 0) };
        tier.beat(1, LEASE).await.unwrap();
        won(tier.claim(id("moving"), new).await);
        done(tier.hold(id("moving"), token, life).await);
        clock.advance(life - SECOND);
        tier.reap(1).await.unwrap();
        let found = found(&tier, "moving").await.unwrap();
        assert_eq!((found.state, found.token, found.remaining), (State::Held, token, SECOND));
        let kept = outcome("moving", minutes as usize);
        done(tier.complete(id("moving"), token, Some(&kept), life).await);
        clock.advance(life - SECOND);
        tier.reap(1).await.unwrap();
        assert_eq!(state(&tier, "moving").await, Some(State::Completed(kept)));
        if number % 2 == 0 {
            assert_eq!(tier.forget(id("moving"), false).await.unwrap(), Forgotten::Gone);
        }
        clock.advance(SECOND);
        assert_eq!(state(&tier, "moving").await, None, "after {minutes} minutes");
    }
}

/// The room that the files take on the disk, without the journals.
fn tables(dir: &Dir) -> u64 {
    let tables = files(&dir.records().join("keyspaces"));
    // The engine may have dropped one since.
    tables.iter().flat_map(fs::metadata).map(|file| file.blocks() * 512).sum()
}

#[tokio::test]
async fn r22_the_room_of_what_has_ended_comes_back_without_traffic() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let clock = ManualClock::new();
    let level = Durability::KilledProcess;
    let builder = dir.builder().clock(clock.clone()).durability(level).buffer(256 << 10);
    let tier = builder.open().unwrap();
    tier.beat(1, LEASE).await.unwrap();
    let mut live = Vec::new();
    // Three lives of a day, an hour at a time.
    for hour in 0..72_u64 {
        for number in 0..20 {
            let key = format!("{hour}-{number}");
            run(&tier, &key, Token::new(1, hour * 20 + number), &outcome(&key, 10_000)).await;
        }
        clock.advance(HOUR);
        tier.reap(1_000).await.unwrap();
        live.push(tables(&dir));
    }
    let needed = 24 * 20 * 10_000;
    let most = *live.iter().max().unwrap();
    assert!(most > needed / 2, "{most} bytes: nothing was written out, so nothing is shown");
    assert!(most < needed * 5 / 2, "{most} bytes for {needed} that are alive");
    // No traffic any more: all is gone half a life after the last has ended.
    clock.advance(DAY + DAY / 2);
    tier.reap(1_000).await.unwrap();
    drop(tier);
    drop(dir.open());
    let left = tables(&dir);
    assert!(left < 200_000, "{left} bytes of {most}");
}

/// A file system of so many bytes, if the machine lets the test have one.
#[cfg(target_os = "linux")]
struct Mount(Dir);

#[cfg(target_os = "linux")]
impl Mount {
    fn new(options: &str) -> Option<Self> {
        let dir = Dir::new();
        fs::create_dir_all(dir.path()).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path())
            .output()
            .is_ok_and(|mount| mount.status.success());
        if !mounted {
            println!("left out: this needs the right to mount a file system");
        }
        mounted.then_some(Self(dir))
    }

    fn remount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,{options}")]).arg(self.0.path());
        assert!(mount.status().unwrap().success());
    }
}

#[cfg(target_os = "linux")]
impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn t2_a_full_disk_is_an_error_and_loses_nothing_that_was_acknowledged() {
    let _watchdog = watchdog();
    for level in [Durability::PowerLoss, Durability::KilledProcess] {
        let Some(mount) = Mount::new("size=24m") else { return };
        let path = mount.0.path().join("tier");
        let open = || EmbeddedTier::builder(&path).durability(level).buffer(1 << 20).open();
        let tier = open().unwrap();
        tier.beat(1, LEASE).await.unwrap();
        let mut kept = Vec::new();
        let error = loop {
            let key = format!("{}", kept.len());
            let token = Token::new(1, kept.len() as u64);
            let new = NewClaim { token, ..claim(1, 0) };
            let claimed = tier.claim(id(&key), new).await;
            let Ok(Claimed::Won { .. }) = claimed else { break claimed.unwrap_err() };
            let outcome = outcome(&key, 50_000);
            match tier.complete(id(&key), token, Some(&outcome), DAY).await {
                Ok(landed) => assert_eq!(landed, Landed::Done),
                Err(error) => break error,
            }
            kept.push((key, outcome));
        };
        assert!(matches!(error, TierError::Unusable(_)), "{error:?}");
        assert!(error.to_string().contains("full"), "{error}");
        assert!(kept.len() > 50, "only {} were kept", kept.len());
        // Reading goes on, writing does not, and it ends without waiting for what will not come.
        assert_eq!(state(&tier, "0").await, Some(State::Completed(kept[0].1.clone())));
        let again = tier.claim(id("again"), claim(1, 1 << 40)).await;
        assert!(matches!(again, Err(TierError::Unusable(_))), "{again:?}");
        let text = again.unwrap_err().to_string();
        assert!(text.contains("full") && text.contains("open it again"), "{text}");
        drop(tier);
        mount.remount("size=96m");
        let tier = open().unwrap();
        for (key, outcome) in kept {
            assert_eq!(state(&tier, &key).await, Some(State::Completed(outcome)), "{key}");
        }
        tier.beat(1, LEASE).await.unwrap();
        won(tier.claim(id("again"), claim(1, 1 << 40)).await);
    }
}

/// The engine's threads give up, while the journal could still be written.
#[tokio::test]
async fn t2_tables_that_cannot_be_written_are_an_error_and_no_wait_for_ever() {
    let _watchdog = watchdog();
    let dir = Dir::new();
    let open = || dir.builder().durability(Durability::KilledProcess).buffer(64 << 10).open();
    let tier = open().unwrap();
    tier.beat(1, LEASE).await.unwrap();
    run(&tier, "first", Token::new(1, 0), &outcome("first", 10)).await;
    for keyspace in fs::read_dir(dir.records().join("keyspaces")).unwrap() {
        let tables = keyspace.unwrap().path().join("tables");
        fs::rename(&tables, tables.with_extension("away")).unwrap();
        fs::write(&tables, "no directory").unwrap();
    }
    let mut kept = 0;
    let error = loop {
        let key = format!("{kept}");
        let token = Token::new(1, 1 + kept);
        let claimed = tier.claim(id(&key), NewClaim { token, ..claim(0, 0) }).await;
        let Ok(Claimed::Won { .. }) = claimed else { break claimed.unwrap_err() };
        match tier.complete(id(&key), token, Some(&outcome(&key, 5_000)), DAY).await {
            Ok(landed) => assert_eq!(landed, Landed::Done),
            Err(error) => break error,
        }
        kept += 1;
    };
    assert!(matches!(error, TierError::Unusable(_)), "{error:?}");
    drop(tier);
    for keyspace in fs::read_dir(dir.records().join("keyspaces")).unwrap() {
        let tables = keyspace.unwrap().path().join("tables");
        fs::remove_file(&tables).unwrap();
        fs::rename(tables.with_extension("away"), &tables).unwrap();
    }
    let tier = open().unwrap();
    for key in (0..kept).map(|number| format!("{number}")) {
        assert_eq!(state(&tier, &key).await, Some(State::Completed(outcome(&key, 5_000))), "{key}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn t2_a_read_only_directory_is_refused_by_its_name() {
    let _watchdog = watchdog();
    let Some(mount) = Mount::new("size=24m") else { return };
    let path = mount.0.path().join("tier");
    drop(EmbeddedTier::open(&path).unwrap());
    mount.remount("ro");
    let text = unusable(EmbeddedTier::open(&path));
    assert!(text.contains("cannot be written"), "{text}");
    mount.remount("rw");
    drop(EmbeddedTier::open(&path).unwrap());
}
