//! The load that all arms are under: tasks that do one thing after the other for a while.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oncekey::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{Claimed, Landed, NewClaim, State, Tier},
};

pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub struct Settings {
    /// How long each pass runs.
    pub seconds: f64,
    pub tasks: u64,
    /// How many passes of each of two that are compared.
    pub passes: usize,
    pub synced: bool,
}

/// A directory that is gone with its value.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("oncekey-tiers-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Keys are numbered, whoever makes them.
pub fn key(number: u64) -> String {
    format!("{:08x}-4f1c-{number:012x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32)
}

pub const ACCOUNT: &str = "acct_42";
pub const ENDPOINT: &str = "POST /charges";

pub fn id(key: &str) -> Identity<'_> {
    Identity::new(ACCOUNT, ENDPOINT, key).unwrap()
}

pub fn outcome(key: &str) -> Outcome {
    Outcome::new(201).header("location", key).body(vec![b'x'; 150])
}

/// Claim and completion of a key.
pub async fn pair(tier: &impl Tier, number: u64) {
    let (key, token) = (key(number), Token::new(1, number + 1));
    let claim = NewClaim {
        token,
        fingerprint: Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]),
        max_run: DAY / 96,
        retention: DAY,
    };
    let claimed = tier.claim(id(&key), claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Won { .. }));
    let landed = tier.complete(id(&key), token, Some(&outcome(&key)), DAY).await.unwrap();
    assert_eq!(landed, Landed::Done);
}

/// The look-up of a key, spread over the first `known` that were completed.
pub async fn look(tier: &impl Tier, number: u64, known: u64) {
    let key = key(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % known);
    let found = tier.look_up(id(&key)).await.unwrap().unwrap();
    assert!(matches!(found.state, State::Completed(_)));
}

/// What a pass has done.
pub struct Pass {
    pub done: u64,
    pub a_second: f64,
    /// How long one took: the median, and what one of a hundred exceeds.
    pub took: [Duration; 2],
}

/// Lets all tasks do `work` again and again, on numbers from `from` on.
pub async fn pass<F>(
    settings: &Settings,
    from: u64,
    work: impl Fn(u64) -> F + Clone + Send + 'static,
) -> Pass
where
    F: Future<Output = ()> + Send,
{
    let (next, is_over) = (Arc::new(AtomicU64::new(from)), Arc::new(AtomicBool::new(false)));
    let begun = Instant::now();
    let tasks: Vec<_> = (0..settings.tasks)
        .map(|_| {
            let (next, is_over, work) = (Arc::clone(&next), Arc::clone(&is_over), work.clone());
            tokio::spawn(async move {
                let mut took = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    work(next.fetch_add(1, Ordering::Relaxed)).await;
                    took.push(begun.elapsed());
                }
                took
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs_f64(settings.seconds)).await;
    is_over.store(true, Ordering::Relaxed);
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await.unwrap());
    }
    let done = took.len() as u64;
    let a_second = done as f64 / begun.elapsed().as_secs_f64();
    took.sort_unstable();
    Pass { done, a_second, took: [took[took.len() / 2], took[took.len() / 100 * 99]] }
}

pub fn report(name: &str, what: &str, pass: &Pass) {
    let [median, rare] = pass.took;
    println!("{name:25} {:>9.0} {what} a second, {median:.1?}, 99 %: {rare:.1?}", pass.a_second);
}

/// Pairs of a tier and pairs by hand take turns; then keys of the tier are looked up.
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
pub async fn compare<T, F>(
    name: &str,
    settings: &Settings,
    tier: T,
    by_hand: impl Fn(u64) -> F + Clone + Send + 'static,
) where
    T: Tier + Clone,
    F: Future<Output = ()> + Send,
{
    tier.beat(1, DAY).await.unwrap();
    let pairs = {
        let tier = tier.clone();
        move |number| {
            let tier = tier.clone();
            async move { pair(&tier, number).await }
        }
    };
    // Connections are made and statements prepared before anything counts.
    let short = Settings { seconds: 0.5, ..*settings };
    let mut done = pass(&short, 0, pairs.clone()).await.done;
    let mut by_hand_done = pass(&short, 0, by_hand.clone()).await.done;
    let (mut ratios, mut last) = (Vec::new(), None);
    for turn in 0..settings.passes {
        let (ours, theirs);
        if turn % 2 == 0 {
            theirs = pass(settings, by_hand_done, by_hand.clone()).await;
            ours = pass(settings, done, pairs.clone()).await;
        } else {
            ours = pass(settings, done, pairs.clone()).await;
            theirs = pass(settings, by_hand_done, by_hand.clone()).await;
        }
        done += ours.done;
        by_hand_done += theirs.done;
        ratios.push(theirs.a_second / ours.a_second);
        last = Some((ours, theirs));
    }
    if let Some((ours, theirs)) = last {
        report(&format!("{name}, by hand"), "pairs", &theirs);
        report(name, "pairs", &ours);
    }
    let each: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    println!("{name:25} {:>9.2} times as long, of {}", ratios[ratios.len() / 2], each.join(" "));
    let looks = move |number| {
        let tier = tier.clone();
        async move { look(&tier, number, done).await }
    };
    report(name, "look-ups", &pass(settings, 0, looks).await);
}
