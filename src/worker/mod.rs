//! The loop around a piece of work that may be delivered again: claim, wait, run, settle.
//!
//! A queue delivers a message at least once. With its key, [`Worker::run`] makes one effect of that:
//!
//! ```text
//! message --> claim --won------------> the work --Done-----> complete --> Ok, ack
//!                |                              |--Retry---> release ---> Err, requeue
//!                |                              '--Unknown-> hold ------> Err, dead letter
//!                |--in flight elsewhere--> waits, up to the wait limit --> Ok, ack; or Err, requeue
//!                |--done before----------> replay ----------------------> Ok, ack
//!                '--held, another body---------------------------------> Err, dead letter
//! ```
//!
//! It runs over a [`Store`], which forgets everything with its process, or over a [`Tiered`], which does
//! not: a redelivery in a new process needs that one. The same calls serve both. Each has a blocking twin
//! for threads.
//!
//! | time | how long | where it is set |
//! |---|---|---|
//! | waiting for another owner | 10 s | [`Worker::wait_limit`] |
//! | an answer of the tier, to a claim above all | 5 s | [`TieredBuilder::answer_within`](crate::tier::TieredBuilder::answer_within) |
//! | the work, before its key is held | 15 min | [`StoreBuilder::max_run`](crate::StoreBuilder::max_run); the work is not cut off, and its completion still settles the key |
//! | a process that shows no sign of life | 60 s | [`StoreBuilder::lease`](crate::StoreBuilder::lease); renewed while the work runs, however long it takes |
//! | an outcome, or a hold | 24 h | [`StoreBuilder::retention`](crate::StoreBuilder::retention); longer than the queue may redeliver |
//!
//! `docs/workers.md` tells which guarantee comes with which tier, and what poison messages are.

mod batch;
mod claiming;
mod job;
mod owner;
mod typed;
mod verdict;

use std::{fmt, future::Future, time::Duration};

use self::{
    claiming::{Deadline, own_blocking},
    owner::{Ending, Owner, Settling},
};
use crate::{Fingerprint, Identity, Store, tier::Tiered};

pub use job::{Job, JobError};
pub use typed::{Codec, CodecError, Json, Typed};
pub use verdict::{Cause, Disposition, Ran, RunError, Verdict, disposition};

/// Runs work under keys, over a [`Store`] or a [`Tiered`]. Cheap to clone. Made by `From`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use oncekey::{Fingerprint, Identity, Lapse, Outcome, Store};
/// use oncekey::tier::{MemoryTier, Tiered};
/// use oncekey::worker::{Disposition, RunError, Verdict, Worker};
///
/// let tiered = Tiered::open(Store::builder().build()?, MemoryTier::new(), Lapse::Hold).await?;
/// let worker = Worker::from(tiered).wait_limit(Duration::from_secs(2));
///
/// // A message: who sent it, what it is about, its key and its body.
/// let id = Identity::new("acct_42", "charge", "invoice-7")?;
/// let fp = Fingerprint::request("", "charge", b"1200 usd");
///
/// // The first delivery finds the bank closed: nothing was done, deliver it again.
/// let refused = worker.run(&id, fp, |_| async { Verdict::retry("the bank is closed") }).await;
/// let Err(error) = refused else { unreachable!() };
/// assert!(matches!(error.disposition(), Disposition::Requeue { .. }));
///
/// // The second charges. The third, after an ack that was lost, does not.
/// for delivery in [2, 3] {
///     let ran = worker
///         .run(&id, fp, |job| async move {
///             assert_eq!(job.identity().key(), b"invoice-7"); // the same on each delivery
///             Verdict::Done(Outcome::new(200).body("ch_1"))
///         })
///         .await?;
///     assert_eq!(ran.replayed, delivery == 3);
///     assert_eq!(&ran.outcome.bytes()[..], b"ch_1");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Worker {
    backing: Backing,
    wait_limit: Duration,
}

#[derive(Clone)]
enum Backing {
    Memory(Store),
    Tier(Tiered),
}

impl From<Store> for Worker {
    fn from(store: Store) -> Self {
        Self::new(Backing::Memory(store))
    }
}

impl From<Tiered> for Worker {
    fn from(tiered: Tiered) -> Self {
        Self::new(Backing::Tier(tiered))
    }
}

impl Worker {
    fn new(backing: Backing) -> Self {
        Self { backing, wait_limit: Duration::from_secs(10) }
    }

    /// How long an attempt waits for another owner of its key; then it is [`RunError::InFlight`].
    /// Zero: it does not wait. A batch waits so long for all of its attempts together, after its work.
    ///
    /// Default 10 s: most work has ended by then, and a consumer does not stand still for longer
    /// because of one message. More than 30 years is clamped.
    ///
    /// It bounds the waiting and what is asked of a tier in the end of it. It does not bound the
    /// claim, which comes first, else a limit of zero would let nothing run: each answer of a tier
    /// may take [`TieredBuilder::answer_within`](crate::tier::TieredBuilder::answer_within) (5 s),
    /// then it is [`RunError::Unavailable`]. Nor does it bound the work. A claim that is cut off is
    /// given up, so that it shuts the key for nobody.
    #[must_use]
    pub fn wait_limit(mut self, limit: Duration) -> Self {
        self.wait_limit = limit;
        self
    }

    /// Runs `work` under `id`, or gives what another attempt has left.
    ///
    /// `fingerprint` is over what two deliveries of one message have in common, its body above all,
    /// and not over what differs, such as a count of deliveries or a time.
    ///
    /// The lease is renewed as long as the work runs in a process that lives. If the work panics or
    /// this future is dropped in the middle of it,
    /// [`on_abandon`](crate::StoreBuilder::on_abandon) decides: by default the key is held, because
    /// nobody knows how far it came. Dropped before the work has begun, it leaves nothing behind, and
    /// to the next owner what one that died has left ([`Job::checkpoint`]). It may be dropped on any
    /// thread.
    /// Once the work has spoken, the key is settled whether or not anybody still waits for it.
    ///
    /// Waiting for other owners needs tokio's timers.
    ///
    /// # Errors
    ///
    /// [`RunError`]; [`RunError::disposition`] tells what to do with the message.
    pub async fn run<F, Fut>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Fut,
        Fut: Future<Output = Verdict>,
    {
        let mut owner = match self.own(id, fingerprint).await {
            Ok(owner) => owner,
            Err(told) => return told,
        };
        let said = work(owner.begin()).await;
        owner.settle(Ending::Said(said)).done().await
    }

    /// As [`run`](Self::run), by a thread. Over a [`Store`] it needs no runtime; over a [`Tiered`] it
    /// uses the one that it was opened on, which must run on other threads than this one.
    /// In the work, `tokio::runtime::Handle::current().block_on` is there for what is async, such as
    /// [`Job::checkpoint`] and [`Job::complete_in`].
    ///
    /// ```
    /// use oncekey::{Fingerprint, Identity, Outcome, Store};
    /// use oncekey::worker::{Verdict, Worker};
    ///
    /// let worker = Worker::from(Store::builder().build()?);
    /// let id = Identity::new("acct_42", "charge", "invoice-7")?;
    /// let fp = Fingerprint::request("", "charge", b"1200 usd");
    /// let ran = worker.run_blocking(&id, fp, |_| Verdict::Done(Outcome::new(200).body("ch_1")))?;
    /// assert!(!ran.replayed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// Over a [`Tiered`], if it is called by a task of tokio, which must not block: use
    /// `tokio::task::spawn_blocking`, or [`run`](Self::run). And if the runtime that the store was
    /// opened on has been shut down.
    pub fn run_blocking<F>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Verdict,
    {
        let _entered = self.enter();
        let mut owner = match self.own_blocking(id, fingerprint) {
            Ok(owner) => owner,
            Err(told) => return told,
        };
        let said = work(owner.begin());
        self.await_blocking(owner.settle(Ending::Said(said)))
    }

    async fn own(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
    ) -> Result<Owner, Result<Ran, RunError>> {
        self.backing.own(id, fingerprint, Deadline::after(self.wait_limit)).await
    }

    fn own_blocking(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
    ) -> Result<Owner, Result<Ran, RunError>> {
        let deadline = Deadline::after(self.wait_limit);
        match &self.backing {
            Backing::Memory(store) => own_blocking(store, id, fingerprint, deadline),
            Backing::Tier(tiered) => tiered.runtime().block_on(self.own(id, fingerprint)),
        }
    }

    fn await_blocking(&self, settling: Settling) -> Result<Ran, RunError> {
        match (settling, &self.backing) {
            (Settling::Told(told), _) => told,
            (settling, Backing::Tier(tiered)) => tiered.runtime().block_on(settling.done()),
            // In memory nothing is left to a task.
            (Settling::Task(_), Backing::Memory(_)) => Err(RunError::InFlight),
        }
    }

    /// Within it, what is left to the background has a runtime to be left to.
    fn enter(&self) -> Option<tokio::runtime::EnterGuard<'_>> {
        let Backing::Tier(tiered) = &self.backing else { return None };
        Some(tiered.runtime().enter())
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut worker = f.debug_struct("Worker");
        match &self.backing {
            Backing::Memory(store) => worker.field("store", store),
            Backing::Tier(tiered) => worker.field("tiered", tiered),
        };
        worker.field("wait_limit", &self.wait_limit).finish()
    }
}

impl Store {
    /// Runs `work` under `id`, or gives what another attempt has left: [`Worker::run`] with its
    /// defaults.
    ///
    /// # Errors
    ///
    /// As for [`Worker::run`].
    pub async fn run<F, Fut>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Fut,
        Fut: Future<Output = Verdict>,
    {
        Worker::from(self.clone()).run(id, fingerprint, work).await
    }

    /// As [`run`](Self::run), by a thread and without a runtime: [`Worker::run_blocking`] with its
    /// defaults.
    ///
    /// # Errors
    ///
    /// As for [`Worker::run`].
    pub fn run_blocking<F>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Verdict,
    {
        Worker::from(self.clone()).run_blocking(id, fingerprint, work)
    }
}

impl Tiered {
    /// Runs `work` under `id`, or gives what another attempt has left: [`Worker::run`] with its
    /// defaults.
    ///
    /// # Errors
    ///
    /// As for [`Worker::run`].
    pub async fn run<F, Fut>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Fut,
        Fut: Future<Output = Verdict>,
    {
        Worker::from(self.clone()).run(id, fingerprint, work).await
    }

    /// As [`run`](Self::run), by a thread: [`Worker::run_blocking`] with its defaults.
    ///
    /// # Errors
    ///
    /// As for [`Worker::run`].
    ///
    /// # Panics
    ///
    /// As [`Worker::run_blocking`].
    pub fn run_blocking<F>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran, RunError>
    where
        F: FnOnce(Job) -> Verdict,
    {
        Worker::from(self.clone()).run_blocking(id, fingerprint, work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles: what `run` and `run_each` make can be spawned.
    #[allow(dead_code, reason = "only its types matter")]
    fn futures_are_send(worker: Worker, fingerprint: Fingerprint) {
        fn send(_: impl Send + 'static) {}
        let typed = worker.clone().typed(Json::default());
        let other = worker.clone();
        send(async move {
            let Ok(id) = Identity::new("a", "b", "c") else { return };
            let done = || async { Verdict::Done(crate::Outcome::new(200)) };
            let _ = worker.run(&id, fingerprint, |_| done()).await;
            let work =
                |jobs: Vec<Job>| async move { jobs.iter().map(|_| Verdict::retry("no")).collect() };
            worker.run_each([(id, fingerprint)], work).await;
        });
        send(async move {
            let Ok(id) = Identity::new("a", "b", "c") else { return };
            let _ = typed.run(&id, fingerprint, |_| async { Verdict::Done(7) }).await;
            let keys = [String::from("a")];
            let attempts = keys.iter().filter_map(|key| Identity::new("a", "b", key).ok());
            let work = |_: Vec<Job>| async { Vec::new() };
            other.run_each(attempts.map(|id| (id, fingerprint)), work).await;
        });
    }
}
