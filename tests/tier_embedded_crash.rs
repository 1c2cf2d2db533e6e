//! The tier in a directory, after its process was killed, after the power was lost, and on files
//! that were cut off or changed (T7, R16).
//!
//! The killed process is this test program again, with its part named in the environment. It says
//! what it was told, line by line; what stands in the pipe when it is killed was acknowledged before.
//! `ONCEKEY_KILLS=200` kills that often; the default is less.
#![cfg(all(feature = "embedded", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/embedded.rs"]
mod embedded;

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use common::{Dice, watchdog, watchdog_of};
use embedded::*;
use oncekey::{
    ManualClock, Token,
    tier::{Durability, EmbeddedTier, Landed, NewClaim, State, Tier, TierError},
};

/// Small, so that tables are written and merged, and journals changed, all the time.
const BUFFER: u64 = 64 << 10;
/// What the parent asks about lives for so long; the rest is there to begin and end generations.
const LIFE: Duration = Duration::from_secs(1_000_000 * 60 * 60);

fn level(name: &str) -> Durability {
    match name {
        "power" => Durability::PowerLoss,
        _ => Durability::KilledProcess,
    }
}

fn kills() -> u64 {
    std::env::var("ONCEKEY_KILLS").map_or(24, |kills| kills.parse().unwrap())
}

/// What becomes of a claim, by its number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Completed,
    Released,
    Left,
}

fn fate(number: u64) -> Fate {
    match number % 5 {
        0..=2 => Fate::Completed,
        3 => Fate::Released,
        _ => Fate::Left,
    }
}

fn body(key: &str) -> oncekey::Outcome {
    outcome(key, 100 + key.len() * 37 % 900)
}

/// The process that is killed: claims and settles until then; by itself it does nothing.
#[test]
fn the_one_that_is_killed() {
    let Ok(dir) = std::env::var("ONCEKEY_TEST_DIR") else { return };
    let round: u64 = std::env::var("ONCEKEY_TEST_ROUND").unwrap().parse().unwrap();
    let level = level(&std::env::var("ONCEKEY_TEST_LEVEL").unwrap());
    let clock = ManualClock::new();
    let builder = EmbeddedTier::builder(dir).durability(level).buffer(BUFFER);
    let tier = builder.clock(clock.clone()).open().unwrap();
    // The harness has its own ideas of this process's standard output.
    let said = fs::File::options().write(true).open("/dev/stdout").unwrap();
    let said = Arc::new(Mutex::new(said));
    let say = move |what: char, key: &str| {
        said.lock().unwrap().write_all(format!("@{what} {key}\n").as_bytes()).unwrap();
    };
    block_on(async {
        let owner = 1_000 + round;
        tier.beat(owner, LIFE).await.unwrap();
        let mut tasks = Vec::new();
        for task in 0..16 {
            let (tier, clock, say) = (tier.clone(), clock.clone(), say.clone());
            tasks.push(tokio::spawn(async move {
                for number in 0.. {
                    let key = format!("{round}-{task}-{number}");
                    let token = Token::new(owner, task << 32 | number);
                    let new = NewClaim { token, max_run: LIFE, ..claim(0, 0) };
                    won(tier.claim(id(&key), new).await);
                    say('c', &key);
                    match fate(number) {
                        Fate::Completed => {
                            done(tier.complete(id(&key), token, Some(&body(&key)), LIFE).await);
                            say('d', &key);
                        }
                        Fate::Released => {
                            done(tier.release(id(&key), token).await);
                            say('r', &key);
                        }
                        Fate::Left => {}
                    }
                    // A short life beside it: its generations come and go.
                    let key = format!("short-{key}");
                    let token = Token::new(owner, 1 << 63 | task << 32 | number);
                    let new = NewClaim { token, max_run: LIFE / 1_000, ..claim(0, 0) };
                    won(tier.claim(id(&key), new).await);
                    let life = Duration::from_secs(60 + number * 61 % 600);
                    done(tier.complete(id(&key), token, Some(&body(&key)), life).await);
                    if task == 0 {
                        clock.advance(Duration::from_secs(20));
                        tier.reap(100).await.unwrap();
                    }
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// What the killed process was told of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Acknowledged {
    settled: bool,
}

/// From when on the time runs after which a process is killed.
#[derive(PartialEq)]
enum Begins {
    AtOnce,
    /// With its first word.
    AtWork,
}

/// Lets a process work and kills it after a while; says what it was told.
fn kill(
    dir: &Path,
    level: &str,
    round: u64,
    begins: Begins,
    after: Duration,
) -> HashMap<String, Acknowledged> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_one_that_is_killed", "--nocapture"])
        .env("ONCEKEY_TEST_DIR", dir)
        .env("ONCEKEY_TEST_LEVEL", level)
        .env("ONCEKEY_TEST_ROUND", round.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut acknowledged = HashMap::<String, Acknowledged>::new();
    let mut hear = |line: &str| {
        let Some((what, key)) = line.strip_prefix('@').and_then(|it| it.split_once(' ')) else {
            return false;
        };
        let of_key = acknowledged.entry(key.trim_end().to_owned()).or_default();
        of_key.settled |= what != "c";
        true
    };
    let mut line = String::new();
    let mut is_awaited = begins == Begins::AtWork;
    while is_awaited {
        line.clear();
        if lines.read_line(&mut line).unwrap() == 0 {
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("round {round}: the process ended by itself: {said}");
        }
        is_awaited = !hear(&line);
    }
    let killer = thread::spawn(move || {
        thread::sleep(after);
        child.kill().unwrap();
        child.wait().unwrap();
    });
    loop {
        line.clear();
        // What is not a whole line was said by nobody.
        if lines.read_line(&mut line).unwrap() == 0 || !line.ends_with('\n') {
            break;
        }
        hear(&line);
    }
    killer.join().unwrap();
    acknowledged
}

fn number(key: &str) -> u64 {
    key.rsplit_once('-').unwrap().1.parse().unwrap()
}

/// Holds what is there against what was acknowledged; what is unfinished is taken over.
async fn judge(
    tier: &EmbeddedTier,
    acknowledged: &HashMap<String, Acknowledged>,
    taken: &AtomicUsize,
) {
    let owner = 7;
    tier.beat(owner, LIFE).await.unwrap();
    for (key, of_key) in acknowledged {
        let there = found(tier, key).await;
        let state = there.as_ref().map(|found| found.state.clone());
        match (fate(number(key)), of_key.settled, &state) {
            (Fate::Completed, _, Some(State::Completed(kept))) => assert_eq!(*kept, body(key)),
            (Fate::Released, _, None) => {}
            (_, false, Some(State::Lapsed)) => {
                let seen = there.unwrap().token;
                let number = taken.fetch_add(1, Ordering::Relaxed) as u64;
                let new = NewClaim { token: Token::new(owner, number), ..claim(0, 0) };
                won(tier.take_over(id(key), seen, new).await);
                let late = tier.complete(id(key), seen, None, LIFE).await.unwrap();
                assert!(matches!(late, Landed::Lost(_)), "{key}: {late:?}");
            }
            (fate, settled, state) => panic!("{key}: {fate:?}, {settled}, but {state:?}"),
        }
    }
}

#[test]
fn t7_nothing_acknowledged_is_lost_when_the_process_is_killed() {
    let _watchdog = watchdog_of(Duration::from_secs(900));
    let seed = fastrand_seed();
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    let taken = AtomicUsize::new(0);
    for name in ["killed", "power"] {
        let (mut heard, mut settled) = (0, 0);
        let rounds: Vec<u64> = (0..kills() / 2).collect();
        // What is in the journal is read again each time, so not all rounds share a directory.
        for rounds in rounds.chunks(20) {
            let dir = Dir::new();
            let mut known = HashMap::new();
            for round in rounds {
                // The first one may be killed while it makes the directory.
                let begins = if *round == rounds[0] { Begins::AtOnce } else { Begins::AtWork };
                let after = Duration::from_millis(2 + dice.roll(40));
                let acknowledged = kill(dir.path(), name, *round, begins, after);
                heard += acknowledged.len();
                let builder = dir.builder().durability(level(name)).buffer(BUFFER);
                let tier = builder.clock(ManualClock::new()).open().unwrap();
                block_on(async {
                    judge(&tier, &acknowledged, &taken).await;
                    // What earlier rounds have settled is still there.
                    known.extend(acknowledged.into_iter().filter(|(_, of_key)| of_key.settled));
                    judge(&tier, &known, &taken).await;
                });
            }
            settled += known.len();
        }
        println!("{name}: {heard} keys, {settled} settled");
        assert!(settled > 10, "too little was done to show anything");
    }
    let taken = taken.load(Ordering::Relaxed);
    println!("{taken} taken over");
    assert!(taken > 0, "nothing was left open");
}

/// A seed that can be given again.
fn fastrand_seed() -> u64 {
    std::env::var("ONCEKEY_SEED").map_or_else(
        |_| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.subsec_nanos().into()
        },
        |seed| seed.parse().unwrap(),
    )
}

/// Where the batch that `synced` names ends in the journal: what follows was not synced. Found by
/// its stamp, which is the last of its entries: a key of one zero, then number and time.
fn synced_end(dir: &Dir) -> usize {
    let synced = fs::read(dir.records().join("synced")).unwrap();
    let stamp = [&[0][..], &synced[..8]].concat();
    let bytes = fs::read(journal(dir)).unwrap();
    let at = bytes.windows(stamp.len()).rposition(|window| window == stamp).unwrap();
    let end = at + stamp.len() + 8 + 13;
    assert_eq!(&bytes[end - 4..end], b"FJL\x03");
    end
}

/// A directory after a loss of power: `kept` outcomes were acknowledged, what was written after
/// them was not synced.
async fn after_a_loss_of_power(kept: u64, unsynced: u64, size: usize) -> Dir {
    let dir = Dir::new();
    let tier = dir.open();
    tier.beat(1, LEASE).await.unwrap();
    for number in 0..kept {
        let key = format!("kept-{number}");
        run(&tier, &key, Token::new(1, number), &outcome(&key, size)).await;
    }
    drop(tier);
    // The lower level writes without a sync, and says nothing of what is synced.
    let tier = dir.builder().durability(Durability::KilledProcess).open().unwrap();
    tier.beat(1, LEASE).await.unwrap();
    for number in 0..unsynced {
        let key = format!("unsynced-{number}");
        let token = Token::new(1, kept + number);
        let new = NewClaim { token, ..claim(0, 0) };
        won(tier.claim(id(&key), new).await);
        done(tier.complete(id(&key), token, Some(&outcome(&key, size)), DAY).await);
    }
    dir.copy()
}

/// Holds what is there after a loss of power against what was acknowledged.
async fn judge_power(dir: &Dir, kept: u64, unsynced: u64, size: usize) {
    let tier = dir.open();
    for number in 0..kept {
        let key = format!("kept-{number}");
        assert_eq!(state(&tier, &key).await, Some(State::Completed(outcome(&key, size))), "{key}");
    }
    let mut gone = false;
    for number in 0..unsynced {
        let key = format!("unsynced-{number}");
        let state = state(&tier, &key).await;
        // Whole, or on its way, or absent; and nothing is there that came after what is not.
        match &state {
            Some(State::Completed(there)) if !gone => assert_eq!(*there, outcome(&key, size)),
            Some(State::Lapsed) if !gone => gone = true,
            None => gone = true,
            other => panic!("{key}: {other:?}"),
        }
    }
    // And it goes on from there.
    tier.beat(2, LEASE).await.unwrap();
    run(&tier, "after", Token::new(2, 1), &outcome("after", size)).await;
    drop(tier);
    assert_eq!(state(&dir.open(), "after").await, Some(State::Completed(outcome("after", size))));
}

#[tokio::test]
async fn t7_after_a_loss_of_power_what_was_synced_is_there_whatever_became_of_the_rest() {
    let _watchdog = watchdog();
    let seed = fastrand_seed();
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    for (kept, unsynced, size) in [(5, 1, 100), (3, 1, 30_000), (3, 4, 5_000)] {
        let dir = after_a_loss_of_power(kept, unsynced, size).await;
        let end = synced_end(&dir);
        let bytes = fs::read(journal(&dir)).unwrap();
        let used = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        assert!(used > end + 100, "nothing is unsynced");
        for round in 0..40 {
            let copy = dir.copy();
            let mut bytes = bytes.clone();
            match round {
                0 => bytes.truncate(end),
                1 => bytes[end..].fill(0),
                2..8 => bytes.truncate(end + dice.roll((used - end) as u64) as usize),
                // Sectors that were not written, or were garbled, in any order.
                _ => {
                    let sector = [512, 4_096][round % 2];
                    for from in (end / sector..=used / sector).map(|it| (it * sector).max(end)) {
                        let to = ((from / sector + 1) * sector).min(used.max(from));
                        match dice.roll(4) {
                            0 => bytes[from..to].fill(0),
                            1 => bytes[from..to].fill_with(|| dice.roll(256) as u8),
                            _ => {}
                        }
                    }
                }
            }
            fs::write(journal(&copy), bytes).unwrap();
            judge_power(&copy, kept, unsynced, size).await;
        }
    }
}

#[tokio::test]
async fn t7_a_journal_that_was_cut_off_or_changed_before_its_end_is_refused() {
    let _watchdog = watchdog();
    let mut dice = Dice::new(fastrand_seed());
    let dir = after_a_loss_of_power(6, 1, 300).await;
    let (end, bytes) = (synced_end(&dir), fs::read(journal(&dir)).unwrap());
    for round in 0..200 {
        let copy = dir.copy();
        let mut bytes = bytes.clone();
        let at = dice.roll(end as u64) as usize;
        match round % 3 {
            0 => bytes.truncate(at),
            1 => bytes[at] ^= 1 << dice.roll(8),
            _ => {
                let to = (at + 1 + dice.roll(700) as usize).min(end);
                bytes[at..to].fill(0);
            }
        }
        fs::write(journal(&copy), &bytes).unwrap();
        let opened = catch_unwind(AssertUnwindSafe(|| copy.builder().open()));
        match opened.expect("it panicked") {
            Err(TierError::Unusable(error)) => {
                assert!(error.to_string().contains("damaged"), "{error}");
                // Behind the first batch it is known what is lost: it is left for who can repair it.
                let left = fs::read(journal(&copy)).unwrap();
                assert!(at < 500 || left == bytes, "the journal was changed");
            }
            // What was changed has changed nothing.
            other => {
                let tier = other.unwrap();
                for number in 0..6 {
                    let key = format!("kept-{number}");
                    let kept = State::Completed(outcome(&key, 300));
                    assert_eq!(state(&tier, &key).await, Some(kept), "{key}: byte {at}");
                }
            }
        }
    }
}

#[tokio::test]
async fn t7_changed_and_truncated_files_are_errors_and_never_wrong_answers() {
    let _watchdog = watchdog();
    let seed = fastrand_seed();
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    // Tables, several generations, and something in the journal.
    let dir = Dir::new();
    let clock = ManualClock::new();
    let open = |dir: &Dir| dir.builder().buffer(BUFFER).clock(ManualClock::new()).open();
    let tier = dir.builder().buffer(BUFFER).clock(clock.clone()).open().unwrap();
    tier.beat(1, LIFE).await.unwrap();
    let key = |number: u64| format!("key-{number}");
    for number in 0..600 {
        run(&tier, &key(number), Token::new(1, number), &outcome(&key(number), 300)).await;
        clock.advance(Duration::from_secs(120));
    }
    drop(tier);
    // Opened once more, the journal is as long as what is in it.
    drop(open(&dir).unwrap());
    let whole = {
        let tier = open(&dir).unwrap();
        let mut whole = Vec::new();
        for number in 0..600 {
            whole.push(state(&tier, &key(number)).await);
        }
        whole
    };
    assert!(whole.iter().filter(|state| state.is_some()).count() > 500);
    let all: Vec<_> = files(dir.path()).into_iter().filter(|it| !it.ends_with("lock")).collect();
    let tables = all.iter().filter(|it| it.to_string_lossy().contains("tables")).count();
    assert!(tables > 3, "only {tables} tables among {all:#?}");
    let (mut refused, mut unreadable, mut harmless) = (0, 0, 0);
    for round in 0..150 {
        let copy = dir.copy();
        let file = &all[dice.roll(all.len() as u64) as usize];
        let changed = copy.path().join(file.strip_prefix(dir.path()).unwrap());
        let mut bytes = fs::read(&changed).unwrap();
        if bytes.is_empty() {
            continue;
        }
        let at = dice.roll(bytes.len() as u64) as usize;
        match round % 3 {
            0 => bytes.truncate(at),
            _ => bytes[at] ^= 1 << dice.roll(8),
        }
        fs::write(&changed, bytes).unwrap();
        let what = format!("{}, byte {at}, way {}", file.display(), round % 3);
        let tier = match catch_unwind(AssertUnwindSafe(|| open(&copy))).expect(&what) {
            Ok(tier) => tier,
            Err(error) => {
                assert!(matches!(error, TierError::Unusable(_)), "{what}: {error:?}");
                refused += 1;
                continue;
            }
        };
        let mut errors = 0;
        for (number, whole) in whole.iter().enumerate() {
            match tier.look_up(id(&key(number as u64))).await {
                Ok(there) => assert_eq!(there.map(|it| it.state), *whole, "{number}: {what}"),
                Err(TierError::Unusable(_)) => errors += 1,
                Err(other) => panic!("{what}: {other:?}"),
            }
        }
        if errors > 0 {
            unreadable += 1;
        } else {
            harmless += 1;
        }
    }
    println!("{refused} refused, {unreadable} partly unreadable, {harmless} harmless");
    assert!(refused > 0 && unreadable > 0);
}
