//! What the tests of the embedded tier share: directories, verbs with few words, and a process of
//! one's own to be killed.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use oncekey::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{
        Claimed, EmbeddedBuilder, EmbeddedTier, Found, Landed, NewClaim, State, Tier, TierError,
    },
};

pub const HOUR: Duration = Duration::from_secs(60 * 60);
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long owners beat in tests: no clock comes so far by itself.
pub const LEASE: Duration = Duration::from_secs(1_000 * 60 * 60);

/// A directory that is gone when the test is.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("oncekey-embedded-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn records(&self) -> PathBuf {
        self.0.join("records")
    }

    pub fn builder(&self) -> EmbeddedBuilder {
        EmbeddedTier::builder(&self.0)
    }

    #[track_caller]
    pub fn open(&self) -> EmbeddedTier {
        self.builder().open().unwrap()
    }

    /// A copy of what is there now.
    pub fn copy(&self) -> Self {
        let copy = Self::new();
        copy_to(&self.0, &copy.0).unwrap();
        copy
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Zeros at the end of a file are left to the file system, so that no journal's room is written out.
fn copy_to(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, from) = (entry.as_ref().unwrap(), entry.as_ref().unwrap().path());
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_to(&from, &to)?;
            continue;
        }
        let bytes = fs::read(&from)?;
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        fs::write(&to, &bytes[..used])?;
        fs::File::options().write(true).open(&to)?.set_len(bytes.len() as u64)?;
    }
    Ok(())
}

/// All files below `path`.
pub fn files(path: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut left = vec![path.to_owned()];
    while let Some(next) = left.pop() {
        match fs::read_dir(&next) {
            Ok(inside) => left.extend(inside.map(|entry| entry.unwrap().path())),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => files.push(next),
            // The engine has dropped it since.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
    }
    files.sort();
    files
}

/// The last journal: the one that is written to.
pub fn journal(dir: &Dir) -> PathBuf {
    let number = |path: &PathBuf| -> Option<u64> {
        path.file_name()?.to_str()?.strip_suffix(".jnl")?.parse().ok()
    };
    files(&dir.records())
        .into_iter()
        .filter(|path| number(path).is_some())
        .max_by_key(number)
        .unwrap()
}

pub fn id(key: &str) -> Identity<'_> {
    Identity::new("acct", "POST /charges", key).unwrap()
}

pub fn claim(owner: u64, number: u64) -> NewClaim {
    NewClaim {
        token: Token::new(owner, number),
        fingerprint: Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]),
        max_run: HOUR,
        retention: DAY,
    }
}

/// An outcome that only `key` has, of about `bytes` bytes.
pub fn outcome(key: &str, bytes: usize) -> Outcome {
    let body = format!("{key} ").repeat(1 + bytes / (key.len() + 1));
    Outcome::new(201).header("location", key).body(body)
}

/// Claims, and must win.
#[track_caller]
pub fn won(claimed: Result<Claimed, TierError>) {
    assert!(matches!(claimed, Ok(Claimed::Won { .. })), "not won: {claimed:?}");
}

/// The step must be done.
#[track_caller]
pub fn done(landed: Result<Landed, TierError>) {
    assert!(matches!(landed, Ok(Landed::Done)), "not done: {landed:?}");
}

/// Claims and completes `key` with `outcome`.
pub async fn run(tier: &EmbeddedTier, key: &str, token: Token, outcome: &Outcome) {
    let claim = NewClaim { token, ..claim(0, 0) };
    won(tier.claim(id(key), claim).await);
    done(tier.complete(id(key), token, Some(outcome), DAY).await);
}

pub async fn state(tier: &EmbeddedTier, key: &str) -> Option<State> {
    found(tier, key).await.map(|found| found.state)
}

pub async fn found(tier: &EmbeddedTier, key: &str) -> Option<Found> {
    tier.look_up(id(key)).await.unwrap()
}

pub fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[track_caller]
pub fn unusable(opened: Result<EmbeddedTier, TierError>) -> String {
    match opened {
        Err(error @ TierError::Unusable(_)) => error.to_string(),
        other => panic!("not unusable: {other:?}"),
    }
}
