//! The queue of steps, and the thread that makes them.
//!
//! Ground rules:
//!
//! - A step is told of once what it has changed is written as the tier's durability asks. What
//!   changes nothing, and has seen nothing that is not yet written, is told of at once.
//! - The steps of a batch see what those before them have changed.
//! - After a failed write nothing is written any more: the engine cannot say what of it is there.
//! - The engine makes a writer wait in loops of its own while tables are behind, and if one of its
//!   threads has given up, for ever. So the writer waits before, [`Writer::wait_for_tables`], where it
//!   notices that, and leaves room for what one batch can add.

use std::{
    collections::HashMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use fjall::{PersistMode, UserKey};
use tokio::sync::oneshot;

use super::{
    Shared,
    directory::{Directory, Stamp, failure},
    generations::Place,
};
use crate::{
    Identity,
    sync::{Arc, Condvar, Mutex},
    tier::{
        Durability, TierError,
        record::Record,
        steps::{At, Change},
    },
};

/// Steps that may wait, so that callers that give up and come again fill no memory while a disk hangs.
const WAITING: usize = 16_384;

/// Steps and bytes after which a batch is written.
const BATCH_STEPS: usize = 4_096;
const BATCH_BYTES: usize = 8 << 20;

/// The longest record. The engine would cut a length above 4 GiB.
const LONGEST: usize = 1 << 30;

/// How often the writer looks whether the engine has caught up, which nothing tells it.
const LOOK: Duration = Duration::from_millis(1);

/// Tells a caller what its step has come to.
type Tell = Box<dyn FnOnce(Result<(), TierError>) + Send>;

/// What the writer is to do.
pub(super) enum Step {
    /// A verb on a record.
    Verb { key: UserKey, run: Run },
    /// Drop the generations that have ended.
    Reap(oneshot::Sender<Result<(), TierError>>),
}

/// Makes a verb of what is there, or hears why that cannot be read.
type Run = Box<dyn FnOnce(Result<Option<Record>, TierError>, &At<'_>) -> Made + Send>;

/// What a verb has come to.
pub(super) struct Made {
    change: Change,
    /// Whether the clones are told of it (rule 13).
    is_told: bool,
    tell: Tell,
}

impl Step {
    pub(super) fn new<T: Send + 'static>(
        id: Identity<'_>,
        is_told: fn(&T) -> bool,
        verb: impl FnOnce(Option<Record>, &At<'_>) -> (Change, T) + Send + 'static,
        tell: oneshot::Sender<Result<T, TierError>>,
    ) -> Self {
        let run: Run = Box::new(move |found, at| {
            let (change, answer) = match found {
                Ok(found) => {
                    let (change, answer) = verb(found, at);
                    (change, Ok(answer))
                }
                Err(error) => (Change::Keep, Err(error)),
            };
            let is_told = answer.as_ref().is_ok_and(is_told);
            // A caller that is gone hears nothing; the step is whole all the same.
            let tell: Tell = Box::new(move |written: Result<(), TierError>| {
                drop(tell.send(written.and(answer)));
            });
            Made { change, is_told, tell }
        });
        Self::Verb { key: UserKey::from(&*id.frame()), run }
    }
}

/// The steps that wait for the writer.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    /// Something waits, or the tier is closed.
    ready: Condvar,
}

#[derive(Default)]
struct Waiting {
    steps: Vec<Step>,
    is_closed: bool,
}

impl Queue {
    pub(super) fn push(&self, step: Step) -> Result<(), TierError> {
        let mut waiting = self.waiting.lock();
        if waiting.is_closed {
            return Err(TierError::unavailable("the tier is closed"));
        }
        if waiting.steps.len() >= WAITING {
            let text = format!("{WAITING} steps wait already: the disk is slow or hangs");
            return Err(TierError::unavailable(text));
        }
        waiting.steps.push(step);
        if waiting.steps.len() == 1 {
            self.ready.notify_all();
        }
        Ok(())
    }

    /// What is left is done, and nothing more is taken.
    pub(super) fn close(&self) {
        self.waiting.lock().is_closed = true;
        self.ready.notify_all();
    }

    /// Takes what waits into `steps`, which is empty, or waits for it; `false` if nothing will come.
    fn take(&self, steps: &mut Vec<Step>) -> bool {
        let mut waiting = self.waiting.lock();
        while waiting.steps.is_empty() && !waiting.is_closed {
            self.ready.wait(&mut waiting);
        }
        mem::swap(&mut waiting.steps, steps);
        !steps.is_empty()
    }

    /// Returns a little later.
    fn wait_a_little(&self) {
        let mut waiting = self.waiting.lock();
        self.ready.wait_for(&mut waiting, LOOK);
    }
}

/// The one that reads and writes.
pub(super) struct Writer {
    directory: Directory,
    durability: Durability,
    shared: Arc<Shared>,
    /// The last batch that was written.
    stamp: Stamp,
    /// Why nothing is written any more.
    broken: Option<String>,
}

/// What a batch changes of a record.
struct Changed {
    /// Where it was before the batch, if it was anywhere.
    was: Option<Place>,
    /// What is there now.
    record: Option<Record>,
}

impl Writer {
    pub(super) fn new(directory: Directory, durability: Durability, shared: Arc<Shared>) -> Self {
        let stamp = directory.stamp();
        Self { directory, durability, shared, stamp, broken: None }
    }

    /// Until the tier is closed.
    pub(super) fn run(mut self) {
        let mut steps = Vec::new();
        while self.shared.clone().queue.take(&mut steps) {
            let mut rest = steps.drain(..);
            while rest.len() > 0 {
                // What a panic has left half done is in memory only, and never used again.
                let made = catch_unwind(AssertUnwindSafe(|| self.batch(&mut rest)));
                if made.is_err() {
                    self.broken.get_or_insert_with(|| "the engine has panicked".to_owned());
                }
            }
        }
        self.close();
    }

    /// Makes a batch of `steps` and writes it.
    fn batch(&mut self, steps: &mut impl Iterator<Item = Step>) {
        let mut changed: HashMap<UserKey, Changed> = HashMap::new();
        let mut untold: Vec<Tell> = Vec::new();
        let mut told: Vec<UserKey> = Vec::new();
        let mut bytes = 0;
        for step in steps.take(BATCH_STEPS) {
            let (key, run) = match step {
                Step::Verb { key, run } => (key, run),
                Step::Reap(tell) => {
                    // Nobody waits for it any more, perhaps.
                    drop(tell.send(self.reap()));
                    continue;
                }
            };
            let (was, found, is_written) = match changed.get(&key) {
                Some(Changed { was, record }) => (*was, Ok(record.clone()), false),
                None => match self.directory.generations.find(&key, self.shared.time.now()) {
                    Ok(Some((place, record))) => (Some(place), Ok(Some(record)), true),
                    Ok(None) => (None, Ok(None), true),
                    Err(error) => (None, Err(error), true),
                },
            };
            let made = {
                let owners = self.shared.owners.lock();
                let now = self.shared.time.now();
                let found = found.map(|found| found.filter(|record| !record.is_over(now)));
                run(found, &At { now, owners: &owners })
            };
            let record = match made.change {
                Change::Keep if is_written => {
                    (made.tell)(Ok(()));
                    continue;
                }
                Change::Keep => {
                    untold.push(made.tell);
                    continue;
                }
                Change::Put(record) => Some(record),
                Change::Remove => None,
            };
            if let Some(text) = &self.broken {
                (made.tell)(Err(TierError::unusable(text.clone())));
                continue;
            }
            let size = record.as_ref().map_or(0, Record::size);
            if size > LONGEST {
                let text = format!("a record of {size} bytes is too long: {LONGEST} is the most");
                (made.tell)(Err(TierError::unusable(text)));
                continue;
            }
            bytes += size;
            if made.is_told {
                told.push(key.clone());
            }
            changed.insert(key, Changed { was, record });
            untold.push(made.tell);
            if bytes >= BATCH_BYTES {
                break;
            }
        }
        if changed.is_empty() {
            return;
        }
        let written = self.write(changed);
        if written.is_ok() {
            let mut recalls = self.shared.told.lock();
            for key in told {
                recalls.tell(Identity::from_frame(&key), self.stamp.time);
            }
            drop(recalls);
            self.shared.settled.notify_waiters();
        }
        for tell in untold {
            tell(written.clone().map_err(TierError::unusable));
        }
    }

    /// Writes what has changed, as safely as the durability asks.
    fn write(&mut self, changed: HashMap<UserKey, Changed>) -> Result<(), String> {
        let written = self.try_write(changed).map_err(|error| failure(&error));
        if let Err(text) = &written {
            self.broken = Some(format!("{text}; nothing was written since: open it again"));
        }
        written
    }

    fn try_write(&mut self, changed: HashMap<UserKey, Changed>) -> fjall::Result<()> {
        self.wait_for_tables()?;
        let now = self.shared.time.now();
        let stamp = Stamp { number: self.stamp.number + 1, time: now };
        let mode = match self.durability {
            Durability::PowerLoss => PersistMode::SyncData,
            Durability::KilledProcess => PersistMode::Buffer,
        };
        let mut batch = self.directory.database.batch().durability(Some(mode));
        for (key, Changed { was, record }) in changed {
            let Directory { generations, database, .. } = &mut self.directory;
            generations.keep(database, &mut batch, key, was, record, now)?;
        }
        self.directory.put_stamp(&mut batch, stamp);
        batch.commit()?;
        self.stamp = stamp;
        if self.durability == Durability::PowerLoss {
            self.directory.synced.set(stamp.number);
        }
        Ok(())
    }

    /// Waits until the engine would not make a batch wait.
    fn wait_for_tables(&self) -> fjall::Result<()> {
        while self.directory.generations.is_behind() {
            // Fails if one of the engine's threads has given up.
            self.directory.database.persist(PersistMode::Buffer)?;
            self.shared.queue.wait_a_little();
        }
        Ok(())
    }

    fn reap(&mut self) -> Result<(), TierError> {
        let now = self.shared.time.now();
        let Directory { generations, database, .. } = &mut self.directory;
        generations.drop_ended(database, now).map_err(|error| TierError::unusable(failure(&error)))
    }

    fn close(self) {
        if self.broken.is_none() && self.directory.database.persist(PersistMode::SyncAll).is_ok() {
            self.directory.synced.set(self.stamp.number);
        }
    }
}
