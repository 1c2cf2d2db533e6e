//! What tiers do in a second: `cargo bench --features embedded --bench tiers`.
//!
//! 256 tasks claim a key of their own, complete it with 200 bytes, and go on with the next, without a
//! memory in front; then they look up keys that were completed, as a replay of a key that has left
//! memory does. Each arm runs in a directory of its own below the temporary one (set `TMPDIR` to a
//! disk that syncs); a plain file that is written and synced as often as the disk allows stands beside
//! them. `--seconds N` sets how long each arm runs, `--tasks N` how many there are.
#![allow(missing_docs, reason = "a program")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oncekey::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{Claimed, Durability, EmbeddedTier, Landed, NewClaim, State, Tier},
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

struct Settings {
    seconds: u64,
    tasks: u64,
}

fn main() {
    let mut settings = Settings { seconds: 5, tasks: 256 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--seconds" => settings.seconds = arguments.next().unwrap().parse().unwrap(),
            "--tasks" => settings.tasks = arguments.next().unwrap().parse().unwrap(),
            other => panic!("no argument {other}: --seconds N, --tasks N"),
        }
    }
    println!("syncs of one file         {:>9.0} a second", syncs());
    for (name, level) in [
        ("embedded, killed process", Durability::KilledProcess),
        ("embedded, power loss", Durability::PowerLoss),
    ] {
        let directory = directory();
        let tier = EmbeddedTier::builder(&directory).durability(level).open().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        runtime.block_on(measure(name, tier, &settings));
        fs::remove_dir_all(directory).unwrap();
    }
}

fn directory() -> PathBuf {
    let directory = std::env::temp_dir().join(format!("oncekey-tiers-{}", std::process::id()));
    let _ = fs::remove_dir_all(&directory);
    directory
}

/// What the disk gives: a block that is overwritten and synced, again and again.
fn syncs() -> f64 {
    let path = directory();
    let mut file = fs::File::create(&path).unwrap();
    let (begun, mut syncs) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(1) {
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&[7; 4_096]).unwrap();
        file.sync_data().unwrap();
        syncs += 1;
    }
    fs::remove_file(path).unwrap();
    f64::from(syncs) / begun.elapsed().as_secs_f64()
}

/// What the tasks of an arm share.
struct Shared<T> {
    tier: T,
    is_over: AtomicBool,
    done: AtomicU64,
}

fn key(task: u64, number: u64) -> String {
    format!("{task:04x}-4f1c-{number:012x}")
}

fn id(key: &str) -> Identity<'_> {
    Identity::new("acct_42", "POST /charges", key).unwrap()
}

async fn measure<T: Tier>(name: &str, tier: T, settings: &Settings) {
    tier.beat(1, DAY).await.unwrap();
    let shared =
        Arc::new(Shared { tier, is_over: AtomicBool::new(false), done: AtomicU64::new(0) });
    let of_pairs = Arc::clone(&shared);
    let pairs = move |task, number| {
        let shared = Arc::clone(&of_pairs);
        async move {
            let (key, token) = (key(task, number), Token::new(1, task << 32 | number));
            let claim = NewClaim {
                token,
                fingerprint: Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]),
                max_run: DAY / 96,
                retention: DAY,
            };
            let claimed = shared.tier.claim(id(&key), claim).await.unwrap();
            assert!(matches!(claimed, Claimed::Won { .. }));
            let outcome = Outcome::new(201).header("location", &key).body(vec![b'x'; 150]);
            let landed = shared.tier.complete(id(&key), token, Some(&outcome), DAY).await.unwrap();
            assert_eq!(landed, Landed::Done);
        }
    };
    let written = run(&shared, settings, pairs).await;
    report(name, "claim + complete", &written);
    let of_looks = Arc::clone(&shared);
    let looks = move |task, number: u64| {
        let shared = Arc::clone(&of_looks);
        let known = written.of_each[task as usize];
        async move {
            // Spread over all that were written.
            let key = key(task, number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % known);
            let found = shared.tier.look_up(id(&key)).await.unwrap().unwrap();
            assert!(matches!(found.state, State::Completed(_)));
        }
    };
    report(name, "look up", &run(&shared, settings, looks).await);
}

/// What an arm has done.
struct Done {
    a_second: f64,
    /// How long one took: the median, and what one of a hundred exceeds.
    took: [Duration; 2],
    of_each: Vec<u64>,
}

async fn run<T, F>(
    shared: &Arc<Shared<T>>,
    settings: &Settings,
    work: impl Fn(u64, u64) -> F + Clone + Send + 'static,
) -> Done
where
    T: Tier,
    F: Future<Output = ()> + Send,
{
    shared.is_over.store(false, Ordering::Relaxed);
    shared.done.store(0, Ordering::Relaxed);
    let begun = Instant::now();
    let tasks: Vec<_> = (0..settings.tasks)
        .map(|task| {
            let (shared, work) = (Arc::clone(shared), work.clone());
            tokio::spawn(async move {
                let (mut number, mut took) = (0, Vec::new());
                while !shared.is_over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    work(task, number).await;
                    took.push(begun.elapsed());
                    number += 1;
                    shared.done.fetch_add(1, Ordering::Relaxed);
                }
                (number, took)
            })
        })
        .collect();
    let (seconds, over) = (settings.seconds, Arc::clone(shared));
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(seconds));
        over.is_over.store(true, Ordering::Relaxed);
    });
    let (mut of_each, mut took) = (Vec::new(), Vec::new());
    for task in tasks {
        let (number, its) = task.await.unwrap();
        of_each.push(number);
        took.extend(its);
    }
    let a_second = shared.done.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64();
    took.sort_unstable();
    Done { a_second, took: [took[took.len() / 2], took[took.len() / 100 * 99]], of_each }
}

fn report(name: &str, what: &str, done: &Done) {
    let [median, rare] = done.took;
    println!("{name:25} {:>9.0} {what} a second, {median:.1?}, 99 %: {rare:.1?}", done.a_second);
}
