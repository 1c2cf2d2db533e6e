//! Who lives: heartbeats, and the one clock of all processes, in a directory beside the database.
//!
//! SQLite has one lock for all writers of a file. A heartbeat in a table would wait for whatever
//! transaction of the user's holds it, and a long one would let claims lapse whose owners live; a
//! heartbeat must wait for no such lock (T10). So each owner has a file of 16 bytes of its own.
//!
//! ```text
//! NAME-owners/lock     locked shared by each open tier, exclusively by one that finds itself alone
//! NAME-owners/origin   the tier's time when the machine's clock shows zero, in ms
//! NAME-owners/HEX      until when the owner HEX beats, in ms of the tier's clock
//! ```
//!
//! Ground rules:
//!
//! 1. Who opens the tier and gets the exclusive lock is alone: all former owners are dead (T7), and
//!    what the directory says is of another time. It begins the directory anew.
//! 2. Nobody uses what stands there before it has the shared lock. The operating system gives locks
//!    back when a process dies, however it dies.
//! 3. SQLite in WAL mode is for processes of one machine, so their monotonic clocks are one, and with
//!    the same origin so are their tier's clocks: no step of the wall clock comes between them (R23).
//! 4. A value stands beside its complement. A reader that finds them different has looked in the
//!    middle of a write, and looks again.

use std::{
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::sync::Mutex;

/// How often a value is read that changes under the reader's eyes.
const LOOKS: usize = 1_000;
/// How long a file of an owner that does not beat is left alone, in milliseconds.
const FORGOTTEN: u64 = 24 * 60 * 60 * 1000;
/// How often it is looked whether another process is through with the directory.
const AGAIN: Duration = Duration::from_millis(10);

const LOCK: &str = "lock";
const ORIGIN: &str = "origin";

pub(super) struct Owners {
    directory: PathBuf,
    /// Locked, until the tier is closed.
    lock: Mutex<Option<File>>,
}

impl Owners {
    /// Joins those who have the tier open, or begins anew with `origin`. Answers the origin
    /// that holds.
    pub(super) async fn open(
        directory: PathBuf,
        patience: Duration,
        origin: u64,
    ) -> io::Result<(Self, u64)> {
        fs::create_dir_all(&directory)?;
        let path = directory.join(LOCK);
        let lock = File::options().create(true).truncate(false).write(true).open(path)?;
        for _ in 0..=patience.as_millis() / AGAIN.as_millis() {
            if got(lock.try_lock())? {
                begin(&directory, origin)?;
                lock.unlock()?;
            }
            // Between the two another one may have begun anew, who was alone as well.
            if got(lock.try_lock_shared())? {
                let origin = read(&directory.join(ORIGIN))?;
                let origin = origin.ok_or_else(|| damaged(&directory.join(ORIGIN)))?;
                return Ok((Self { directory, lock: Mutex::new(Some(lock)) }, origin));
            }
            tokio::time::sleep(AGAIN).await;
        }
        Err(io::Error::new(ErrorKind::TimedOut, "another process keeps the tier from being opened"))
    }

    /// Shows that `owner` is alive.
    pub(super) fn beat(&self, owner: u64, alive_until: u64) -> io::Result<()> {
        write(&self.of(owner), alive_until)
    }

    /// Until when `owner` beats; 0 if it does not.
    pub(super) fn alive_until(&self, owner: u64) -> io::Result<u64> {
        Ok(read(&self.of(owner))?.unwrap_or(0))
    }

    /// Removes what is left of owners that have not beaten for a day.
    pub(super) fn reap(&self, now: u64) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if u64::from_str_radix(&entry.file_name().to_string_lossy(), 16).is_ok()
                && read(&entry.path())?.unwrap_or(0).saturating_add(FORGOTTEN) < now
            {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Gives the lock back.
    pub(super) fn close(&self) {
        drop(self.lock.lock().take());
    }

    fn of(&self, owner: u64) -> PathBuf {
        self.directory.join(format!("{owner:016x}"))
    }
}

fn got(lock: Result<(), TryLockError>) -> io::Result<bool> {
    match lock {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Nobody else is here.
fn begin(directory: &Path, origin: u64) -> io::Result<()> {
    // First, so that nobody goes by the origin of another time if this process dies here.
    remove(&directory.join(ORIGIN))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name() != LOCK {
            remove(&entry.path())?;
        }
    }
    write(&directory.join(ORIGIN), origin)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// In place: the room is there, so that a full disk stops no heart that has beaten.
fn write(path: &Path, value: u64) -> io::Result<()> {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&value.to_be_bytes());
    bytes[8..].copy_from_slice(&(!value).to_be_bytes());
    let mut file = File::options().create(true).truncate(false).write(true).open(path)?;
    io::Write::write_all(&mut file, &bytes)
}

/// `None` if nothing was written there yet.
fn read(path: &Path) -> io::Result<Option<u64>> {
    for _ in 0..LOOKS {
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        match bytes.split_first_chunk::<8>() {
            None if bytes.is_empty() => return Ok(None),
            Some((value, complement)) if value.map(|byte| !byte) == complement => {
                return Ok(Some(u64::from_be_bytes(*value)));
            }
            _ => std::thread::yield_now(),
        }
    }
    Err(damaged(path))
}

fn damaged(path: &Path) -> io::Error {
    let text = format!(
        "{} is damaged: stop all processes that use the database, then remove its directory, which \
         holds heartbeats only",
        path.display()
    );
    io::Error::new(ErrorKind::InvalidData, text)
}
