//! The directory: made, locked, looked through, opened.

use std::{
    error::Error,
    fmt,
    fs::{self, File, TryLockError},
    io::{self, ErrorKind, Seek, SeekFrom, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::Duration,
};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, OwnedWriteBatch};

use super::{generations::Generations, journal, manifests};
use crate::tier::TierError;

/// The format that is written. Others are refused.
const FORMAT: &str = "oncekey embedded tier, format 1\n";

/// The keyspace of the stamp.
pub(super) const META: &str = "meta";

/// The key of the stamp, which no identity has: a frame is longer.
pub(super) const STAMP: [u8; 1] = [0];

/// The engine's threads: one writes tables while the other merges some.
const THREADS: usize = 2;

/// What all journals may take, beside the one that is written to.
const JOURNALS: u64 = 256 << 20;

/// How many bytes of stamps are kept in memory. The engine keeps a journal until its stamps are in a
/// table, so few.
const STAMPS: u64 = 1 << 20;

/// What each batch has: its number, and when it was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) number: u64,
    pub(super) time: u64,
}

impl Stamp {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.number.to_be_bytes());
        bytes[8..].copy_from_slice(&self.time.to_be_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (number, time) = bytes.split_first_chunk()?;
        let time = u64::from_be_bytes(time.try_into().ok()?);
        Some(Self { number: u64::from_be_bytes(*number), time })
    }
}

/// A directory that is open. Fields are dropped in this order: the lock last.
pub(super) struct Directory {
    pub(super) generations: Generations,
    meta: Keyspace,
    pub(super) database: Database,
    pub(super) synced: Synced,
    stamp: Stamp,
    _lock: File,
}

impl Directory {
    /// Opens the directory at `path`, or makes it.
    pub(super) fn open(path: &Path, buffer: u64) -> Result<Self, TierError> {
        let failed = |error| io_error(path, &error);
        fs::create_dir_all(path).map_err(failed)?;
        let is_new = is_new(path)?;
        let lock = lock(path)?;
        let records = path.join("records");
        if is_new && !records.try_exists().map_err(failed)? {
            create(path, &records)?;
        }
        check_format(&records)?;
        let synced = Synced::open(&records)?;
        let known = synced.number().map_err(|error| io_error(&records, &error))?;
        let known = known.ok_or_else(|| damaged("the file `synced` was changed".to_owned()))?;
        manifests::check(&records)?;
        let journaled = journal::mend(&records, known)?;
        let database = start(&records)?;
        let unopened = |error: fjall::Error| refusal(&records, &error);
        let meta = database.keyspace(META, stamps).map_err(unopened)?;
        let stamp = match meta.get(STAMP).map_err(unopened)? {
            None => Some(Stamp::default()),
            Some(bytes) => Stamp::from_bytes(&bytes),
        };
        let stamp = stamp.filter(|stamp| stamp.number >= known.max(journaled.unwrap_or(0)));
        let stamp = stamp.ok_or_else(|| damaged("the last batches are missing".to_owned()))?;
        let generations = Generations::open(&database, buffer).map_err(unopened)?;
        let generations = generations
            .map_err(|name| TierError::unusable(format!("there is a foreign keyspace {name}")))?;
        Ok(Self { generations, meta, database, synced, stamp, _lock: lock })
    }

    /// The last stamp at the opening.
    pub(super) fn stamp(&self) -> Stamp {
        self.stamp
    }

    pub(super) fn put_stamp(&self, batch: &mut OwnedWriteBatch, stamp: Stamp) {
        batch.insert(&self.meta, STAMP, stamp.to_bytes());
    }
}

fn stamps() -> KeyspaceCreateOptions {
    KeyspaceCreateOptions::default().max_memtable_size(STAMPS)
}

/// Whether nothing but an unfinished creation is there. A directory of something else is refused
/// before anything is put into it.
fn is_new(path: &Path) -> Result<bool, TierError> {
    let failed = |error| io_error(path, &error);
    let mut foreign = None;
    for entry in fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        match name.to_str() {
            Some("records") => return Ok(false),
            Some("lock" | "records.new" | "lost+found") => {}
            _ => foreign = Some(name),
        }
    }
    match foreign {
        None => Ok(true),
        Some(name) => Err(TierError::unusable(format!(
            "{} is no tier, but has {} in it: name a directory that is empty or missing",
            path.display(),
            name.display(),
        ))),
    }
}

/// How long a lock is waited for: a child that this process has just forked has all that was open, also
/// if it was closed here since, until it begins its own program.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

/// Nobody else has the directory open until the file is dropped.
fn lock(path: &Path) -> Result<File, TierError> {
    let mut patience = PATIENCE;
    lock_while(path, || {
        std::thread::sleep(PAUSE);
        patience = patience.saturating_sub(PAUSE);
        !patience.is_zero()
    })
}

/// Tries again after each `pause`, as long as that says so.
fn lock_while(path: &Path, mut pause: impl FnMut() -> bool) -> Result<File, TierError> {
    let file = path.join("lock");
    let options = File::options().write(true).create(true).truncate(false).open(&file);
    let lock = options.map_err(|error| io_error(path, &error))?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) if pause() => {}
            Err(TryLockError::WouldBlock) => {
                return Err(TierError::unavailable(format!(
                    "{} is open already, in this process or in another: only one may have it",
                    path.display(),
                )));
            }
            Err(TryLockError::Error(error)) => return Err(io_error(path, &error)),
        }
    }
}

/// Makes `records`, whole or not at all.
fn create(path: &Path, records: &Path) -> Result<(), TierError> {
    let new = path.join("records.new");
    let made = || {
        if new.try_exists()? {
            fs::remove_dir_all(&new)?;
        }
        fs::create_dir(&new)?;
        fs::write(new.join("oncekey"), FORMAT)?;
        fs::write(new.join("synced"), Synced::bytes(0))?;
        for file in ["oncekey", "synced"] {
            File::open(new.join(file))?.sync_all()?;
        }
        Ok(())
    };
    made().map_err(|error| io_error(path, &error))?;
    let database = start(&new)?;
    database.keyspace(META, stamps).map_err(|error| refusal(&new, &error))?;
    drop(database);
    let put = || {
        sync_directory(&new)?;
        fs::rename(&new, records)?;
        sync_directory(path)
    };
    put().map_err(|error| io_error(path, &error))
}

#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Elsewhere a directory cannot be opened as a file.
#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}

fn check_format(records: &Path) -> Result<(), TierError> {
    let found = match fs::read(records.join("oncekey")) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(damaged("the file `oncekey` is missing".to_owned()));
        }
        Err(error) => return Err(io_error(records, &error)),
    };
    if found == FORMAT.as_bytes() {
        return Ok(());
    }
    Err(TierError::unusable(format!(
        "{} has the format {:?}, but this program knows {FORMAT:?}: it was written by another \
         version of Oncekey, or is damaged",
        records.display(),
        String::from_utf8_lossy(&found[..found.len().min(64)]),
    )))
}

/// Starts the engine.
fn start(records: &Path) -> Result<Database, TierError> {
    let open =
        || Database::builder(records).worker_threads(THREADS).max_journaling_size(JOURNALS).open();
    // It asserts of some files that they are as they should be.
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(error)) => Err(refusal(records, &error)),
        Err(_) => Err(damaged("the engine has panicked over them".to_owned())),
    }
}

/// The number of a batch that is known to be synced, with all before it. It may be behind, and is
/// itself not synced, so that it costs nothing.
pub(super) struct Synced(File);

impl Synced {
    fn open(records: &Path) -> Result<Self, TierError> {
        let file = File::options().read(true).write(true).open(records.join("synced"));
        match file {
            Ok(file) => Ok(Self(file)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(damaged("the file `synced` is missing".to_owned()))
            }
            Err(error) => Err(io_error(records, &error)),
        }
    }

    /// The number, and its complement to know it by.
    fn bytes(number: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        bytes[8..].copy_from_slice(&(!number).to_be_bytes());
        bytes
    }

    fn number(&self) -> io::Result<Option<u64>> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut &self.0, &mut bytes)?;
        let number = bytes.first_chunk().map(|number| u64::from_be_bytes(*number));
        Ok(number.filter(|number| bytes == Self::bytes(*number)))
    }

    pub(super) fn set(&self, number: u64) {
        let mut file = &self.0;
        let put = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&Self::bytes(number)));
        // The number that stands there is smaller, and as true.
        drop(put);
    }
}

/// Why a file could not be read or written.
pub(super) fn io_error(path: &Path, error: &io::Error) -> TierError {
    let path = path.display();
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            TierError::unusable(format!("the disk of {path} is full: {error}"))
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            TierError::unusable(format!(
                "{path} cannot be written: {error}; the tier needs a directory that it may write"
            ))
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            TierError::unusable(format!("{path} is no directory: {error}"))
        }
        ErrorKind::UnexpectedEof | ErrorKind::InvalidData => damaged(format!("{path}: {error}")),
        // Out of file handles or memory, or interrupted.
        _ => TierError::unavailable(format!("{path}: {error}")),
    }
}

/// The files are not as they were written.
pub(super) fn damaged(what: String) -> TierError {
    TierError::unusable(format!(
        "the files are damaged: {what}. Restore the directory from a copy, or name an empty one, \
         which forgets what was acknowledged"
    ))
}

/// Why the engine does not open a directory.
fn refusal(records: &Path, error: &fjall::Error) -> TierError {
    match error {
        fjall::Error::Locked => TierError::unavailable(format!("{} is open", records.display())),
        fjall::Error::Io(io) | fjall::Error::Storage(fjall::LsmError::Io(io))
            if io.kind() != ErrorKind::NotFound =>
        {
            io_error(records, io)
        }
        fjall::Error::InvalidVersion(_) => TierError::unusable(format!(
            "{} was written by another version of the engine, or is damaged: {error}",
            records.display(),
        )),
        _ => damaged(error.to_string()),
    }
}

/// Why a record cannot be read.
pub(super) fn unreadable(error: &(dyn Error + 'static)) -> TierError {
    TierError::unusable(format!("a record cannot be read, its file is damaged: {error}"))
}

/// Why a batch was not written.
pub(super) fn failure(error: &fjall::Error) -> String {
    let cause: &dyn fmt::Display = match error {
        fjall::Error::Io(io) | fjall::Error::Storage(fjall::LsmError::Io(io)) => io,
        fjall::Error::Poisoned => &"its threads could not write their tables",
        other => other,
    };
    format!("the engine has stopped, because the disk is full or failing: {cause}")
}

#[cfg(all(test, unix))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    /// An empty directory, gone with its value.
    struct Empty(std::path::PathBuf);

    impl Empty {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("oncekey-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Empty {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A child that was forked has the very file that is locked, as a second handle of it has.
    #[test]
    fn t7_a_lock_that_a_child_still_has_is_waited_for() {
        let directory = Empty::new("lock-of-a-child");
        let locked = lock(&directory.0).unwrap();
        let mut child = Some(locked.try_clone().unwrap());
        drop(locked);
        let mut pauses = 0;
        let lock = lock_while(&directory.0, || {
            pauses += 1;
            if pauses == 3 {
                // It has begun its own program.
                child = None;
            }
            true
        });
        drop(lock.unwrap());
        assert_eq!(pauses, 3);
    }

    #[test]
    fn t7_a_lock_that_another_keeps_is_an_error_that_says_so() {
        let directory = Empty::new("lock-of-another");
        let locked = lock(&directory.0).unwrap();
        let mut pauses = 0;
        let refused = lock_while(&directory.0, || {
            pauses += 1;
            pauses < 5
        });
        let said = refused.unwrap_err();
        assert!(matches!(said, TierError::Unavailable(_)), "{said:?}");
        assert!(said.to_string().contains("is open already"), "{said}");
        assert_eq!(pauses, 5, "it was waited for");
        // What is waited for in earnest ends too.
        assert!(matches!(lock(&directory.0), Err(TierError::Unavailable(_))));
        drop(locked);
        drop(lock(&directory.0).unwrap());
    }
}
