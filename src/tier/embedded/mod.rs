//! A tier in a directory of this process: durable without a server.
//!
//! One thread, the *writer*, reads and writes. Callers leave their steps in a queue; the writer takes
//! all that wait there, makes them one after the other, writes what they have changed as one batch
//! with one sync, and only then answers. So steps are atomic and in one order, many callers share
//! a sync, and a caller that no longer listens has no part in whether its step is whole.
//!
//! # Ground rules
//!
//! - The writer alone has the records; `fjall` is named in this folder only. Its threads write tables
//!   and merge them, but no step waits in one of its loops: the writer waits before them, where it
//!   sees that the engine has stopped ([`writer`]).
//! - Heartbeats and recalls are in memory, under locks that are never held over a read or a write:
//!   whoever was alive in an earlier opening is dead, because the directory is locked (T7).
//! - Nothing is removed from a keyspace, key by key: what is gone is written as gone, and all of it
//!   goes with its generation ([`generations`]).
//!
//! # In the directory
//!
//! ```text
//! lock                 locked while the tier is open
//! records.new/         a creation that was cut off; the next opening begins anew
//! records/             there as a whole or not at all
//!   oncekey            which format this is
//!   synced             a batch that is known to be synced, by its number
//!   version, *.jnl, keyspaces/, lock    fjall's own
//! ```
//!
//! Every batch has a *stamp*: its number, and the time. The numbers have no gaps, so an opening sees
//! that an acknowledged batch is missing, wherever a file was cut off or changed ([`journal`]).

mod directory;
mod generations;
mod journal;
mod manifests;
mod time;
mod writer;

use std::{
    fmt,
    path::{Path, PathBuf},
    pin::Pin,
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};

use crate::{
    Clock, Identity, Outcome, Token,
    sync::{Arc, Mutex},
    tier::{
        Answer, Claimed, Durability, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, Tier,
        TierError,
        record::Record,
        steps::{self, At, Change, Owners},
        told::Told,
    },
};

use directory::Directory;
use time::Time;
use writer::{Queue, Step, Writer};

/// A [`Tier`] in a directory that this process has for itself (feature `embedded`). All clones are
/// one.
///
/// ```no_run
/// use oncekey::tier::EmbeddedTier;
///
/// let tier = EmbeddedTier::open("/var/lib/payments/idempotency")?;
/// # Ok::<(), oncekey::tier::TierError>(())
/// ```
///
/// **Owners.** The claims that an earlier opening has left are [`State::Lapsed`](crate::tier::State) at
/// once: the directory is locked, so whoever owned them is gone.
///
/// **Time** (R23) is the wall clock at the opening, but never before the last stamp in the directory,
/// and the monotonic clock from there on. If the system's clock was set forward between two
/// openings, records end early by as much.
///
/// **Room on disk.** Records lie in generations that are dropped whole, at the latest half of their
/// life after their end (at least two minutes; [`reap`](Tier::reap) does it, and a claim that begins
/// a generation). An identity costs its length and 100 bytes plus its outcome and checkpoint; it is
/// written twice, when it is claimed and when it is completed, until tables are merged. So, for a
/// rate of `r` identities a second of `b` bytes each, kept for `t` seconds, count on
/// `1.5 * 1.2 * r * t * b`, and twice `r * t * b` while merges run behind; beyond that at most
/// 320 MiB of journals. What is given up by a release takes its identity's bytes until then.
///
/// **Memory**: [`buffer`](EmbeddedBuilder::buffer) for each generation that is written to, up to three
/// times while it is written out, 32 MiB of cache, and the steps that wait, at most 16,384.
///
/// **Errors.** A directory that is locked is [`TierError::Unavailable`]. One that cannot be written,
/// belongs to something else, has another format or is damaged is [`TierError::Unusable`], with a
/// text that says what to do. So is a full disk; once a write has failed, nothing is written until
/// the tier is opened again, because nobody knows what of it has reached the disk.
///
/// Dropping the last clone ends the writer and gives the directory back; it waits for that, as a rule
/// some milliseconds.
#[derive(Clone)]
pub struct EmbeddedTier {
    handle: Arc<Handle>,
}

/// How an [`EmbeddedTier`] is opened.
pub struct EmbeddedBuilder {
    directory: PathBuf,
    durability: Durability,
    buffer: u64,
    clock: Option<Box<dyn Clock>>,
}

impl EmbeddedBuilder {
    /// What an acknowledged step survives. Default: a loss of power.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// How many bytes of new records a generation keeps in memory before it writes them out as a
    /// table, from 64 KiB to 1 GiB; what is beyond is clamped. Default 16 MiB, which merges little
    /// and opens in well under a second after a crash.
    #[must_use]
    pub fn buffer(mut self, bytes: u64) -> Self {
        self.buffer = bytes.clamp(64 << 10, 1 << 30);
        self
    }

    /// The tier's time, for tests: the readings of `clock`, across openings too, but never before
    /// the last stamp in the directory.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Opens the tier and, if the directory is empty or missing, makes it.
    ///
    /// Blocks, after a crash for as long as reading up to 320 MiB of journals takes: call it before
    /// the runtime is started, or on a thread for blocking work.
    ///
    /// # Errors
    ///
    /// [`TierError::Unavailable`] if the directory is locked, [`TierError::Unusable`] if it cannot
    /// be used as it is.
    pub fn open(self) -> Result<EmbeddedTier, TierError> {
        let Self { directory, durability, buffer, clock } = self;
        let opened = Directory::open(&directory, buffer)?;
        let time = Time::new(clock, opened.stamp().time);
        let shared = Arc::new(Shared {
            queue: Queue::default(),
            owners: Mutex::default(),
            told: Mutex::default(),
            settled: Notify::new(),
            time,
        });
        let writer = Writer::new(opened, durability, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("oncekey-embedded".to_owned())
            .spawn(move || writer.run())
            .map_err(TierError::unavailable)?;
        let handle = Handle { shared, directory, durability, thread: Mutex::new(Some(thread)) };
        Ok(EmbeddedTier { handle: Arc::new(handle) })
    }
}

impl fmt::Debug for EmbeddedBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedBuilder")
            .field("directory", &self.directory)
            .field("durability", &self.durability)
            .field("buffer", &self.buffer)
            .finish_non_exhaustive()
    }
}

/// What all clones are.
struct Handle {
    shared: Arc<Shared>,
    directory: PathBuf,
    durability: Durability,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What callers and the writer share.
struct Shared {
    queue: Queue,
    owners: Mutex<Owners>,
    told: Mutex<Told>,
    settled: Notify,
    time: Time,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.queue.close();
        let Some(thread) = self.thread.lock().take() else { return };
        // The writer itself drops the last clone if waking a task ends it.
        if thread.thread().id() != std::thread::current().id() {
            // A writer that has panicked has nothing left to tell.
            let _ = thread.join();
        }
    }
}

impl EmbeddedTier {
    /// Opens the tier in `directory` at its defaults, and makes it if there is none.
    ///
    /// # Errors
    ///
    /// Those of [`EmbeddedBuilder::open`].
    pub fn open(directory: impl AsRef<Path>) -> Result<Self, TierError> {
        Self::builder(directory).open()
    }

    /// A tier in `directory`, with settings.
    pub fn builder(directory: impl AsRef<Path>) -> EmbeddedBuilder {
        EmbeddedBuilder {
            directory: directory.as_ref().to_owned(),
            durability: Durability::default(),
            buffer: 16 << 20,
            clock: None,
        }
    }

    fn shared(&self) -> &Shared {
        &self.handle.shared
    }

    /// Leaves a step with the writer and waits for its answer.
    fn step<'a, T: Send + 'static>(
        &'a self,
        id: Identity<'a>,
        verb: impl FnOnce(Option<Record>, &At<'_>) -> (Change, T) + Send + 'static,
    ) -> Answer<'a, T> {
        self.told_step(id, |_| false, verb)
    }

    /// A step that all clones are told of if `is_told` says so of its answer, whether its caller
    /// still listens or not.
    fn told_step<'a, T: Send + 'static>(
        &'a self,
        id: Identity<'a>,
        is_told: fn(&T) -> bool,
        verb: impl FnOnce(Option<Record>, &At<'_>) -> (Change, T) + Send + 'static,
    ) -> Answer<'a, T> {
        Box::pin(async move {
            let (tell, told) = oneshot::channel();
            self.shared().queue.push(Step::new(id, is_told, verb, tell))?;
            heard(told).await
        })
    }

    /// A span, longer by what the clock may be behind, so that nothing ends early (R22).
    fn span(&self, span: Duration) -> Duration {
        span.saturating_add(self.shared().time.lag())
    }

    fn new_claim(&self, claim: NewClaim) -> NewClaim {
        NewClaim { retention: self.span(claim.retention), ..claim }
    }
}

/// The writer's answer.
async fn heard<T>(told: oneshot::Receiver<Result<T, TierError>>) -> Result<T, TierError> {
    told.await.unwrap_or_else(|_| {
        Err(TierError::unavailable("the tier was closed before the step was answered"))
    })
}

impl Tier for EmbeddedTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        Box::pin(async move {
            let (now, lease) = (self.shared().time.now(), self.span(lease));
            self.shared().owners.lock().beat(owner, lease, now);
            Ok(())
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        let claim = self.new_claim(claim);
        let step = self.step(id, move |found, at| steps::claim(found, &claim, at));
        Box::pin(async move { step.await? })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        let claim = self.new_claim(claim);
        let step = self.step(id, move |found, at| steps::take_over(found, seen, &claim, at));
        Box::pin(async move { step.await? })
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let (outcome, retention) = (outcome.cloned(), self.span(retention));
        self.step(id, move |found, at| {
            steps::complete(found, token, outcome.as_ref(), retention, at)
        })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::release(found, token, at))
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let retention = self.span(retention);
        self.step(id, move |found, at| steps::hold(found, token, retention, at))
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::lapse(found, token, at))
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::checkpoint(found, token, bytes, at))
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        self.step(id, steps::look_up)
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        self.told_step(
            id,
            |forgotten| *forgotten == Forgotten::Gone,
            move |found, at| steps::forget(found, forced, at),
        )
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        let (outcome, retention) = (outcome.cloned(), self.span(retention));
        self.told_step(
            id,
            |resolved| *resolved == Resolved::Done,
            move |found, at| steps::resolve(found, outcome.as_ref(), retention, at),
        )
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        // Whole generations go, however many records they had.
        let _ = most;
        Box::pin(async move {
            let now = self.shared().time.now();
            self.shared().owners.lock().reap(now);
            let (tell, told) = oneshot::channel();
            self.shared().queue.push(Step::Reap(tell))?;
            heard(told).await?;
            Ok(0)
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move { Ok(self.shared().told.lock().since(since)) })
    }

    fn settled<'a>(&'a self, id: Identity<'a>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        // Of whatever identity: it may end too early.
        let _ = id;
        Box::pin(self.shared().settled.notified())
    }
}

impl fmt::Debug for EmbeddedTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedTier")
            .field("directory", &self.handle.directory)
            .field("durability", &self.handle.durability)
            .finish_non_exhaustive()
    }
}
