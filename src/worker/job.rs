//! What the work holds of its claim.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    Identity, IntentKey, Outcome, Token,
    tier::{Completion, Landed, TierError, Transaction, owned::Owned, through::Through},
};

/// The claim that a piece of work runs under. Cheap to clone. It is a view: the key is settled by
/// what the work says in the end ([`Verdict`](super::Verdict)), or by
/// [`on_abandon`](crate::StoreBuilder::on_abandon) if it says nothing.
#[derive(Clone)]
pub struct Job {
    shared: Arc<Shared>,
}

struct Shared {
    /// The identity, framed.
    frame: Box<[u8]>,
    token: Token,
    index: usize,
    /// `None` where the store is in memory alone.
    tier: Option<Link>,
    checkpoint: Mutex<Option<Bytes>>,
    staged: Mutex<Option<Staged>>,
}

/// The way to the tier. Whether it knows of the claim: not if it was opened in spite of an outage.
struct Link {
    through: Arc<Through>,
    is_in_tier: bool,
    has_checkpoint: Arc<AtomicBool>,
}

/// What stands in the work's transaction.
pub(super) struct Staged {
    pub(super) outcome: Outcome,
    pub(super) since: Instant,
}

/// Why a step of a [`Job`] was not done.
#[derive(Debug)]
#[non_exhaustive]
pub enum JobError {
    /// The claim was taken over, forgotten or resolved (R9): stop, and roll back.
    Lost,
    /// The tier did not take it: roll back. The claim is still this job's.
    Tier(TierError),
    /// There is no tier that it could be put into: the store is in memory alone, or the claim was
    /// let in while the tier was down
    /// ([`TieredBuilder::fail_open`](crate::tier::TieredBuilder::fail_open)).
    NoTier,
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("lost: the key belongs to another run; stop, and roll back"),
            Self::Tier(error) => error.fmt(f),
            Self::NoTier => f.write_str(
                "no tier has this claim: open the store with `Tiered`, and without `fail_open`",
            ),
        }
    }
}

impl std::error::Error for JobError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Tier(error) = self { Some(error) } else { None }
    }
}

impl Job {
    pub(super) fn in_memory(id: Identity<'_>, token: Token, index: usize) -> Self {
        Self::new(id, token, index, None, None)
    }

    pub(super) fn in_tier(owned: &mut Owned, index: usize) -> Self {
        let checkpoint = owned.take_checkpoint();
        let link = Link {
            through: Arc::clone(owned.through()),
            is_in_tier: owned.is_in_tier(),
            has_checkpoint: Arc::clone(owned.has_checkpoint()),
        };
        Self::new(owned.identity(), owned.token(), index, Some(link), checkpoint)
    }

    fn new(
        id: Identity<'_>,
        token: Token,
        index: usize,
        tier: Option<Link>,
        checkpoint: Option<Bytes>,
    ) -> Self {
        let frame = Box::from(&*id.frame());
        let checkpoint = Mutex::new(checkpoint);
        let staged = Mutex::default();
        Self { shared: Arc::new(Shared { frame, token, index, tier, checkpoint, staged }) }
    }

    /// The identity that was claimed: account, operation and key.
    pub fn identity(&self) -> Identity<'_> {
        Identity::from_frame(&self.shared.frame)
    }

    /// The key for a call that the work makes: the same on every attempt, and another one for each
    /// name and parts ([`Identity::downstream`]). Hand it to services that take idempotency keys.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use oncekey::{Fingerprint, Identity, Outcome, Store, worker::Verdict};
    /// # let store = Store::builder().build()?;
    /// # let id = Identity::new("acct_42", "charge", "invoice-7")?;
    /// # let fp = Fingerprint::request("", "charge", b"1200 usd");
    /// let ran = store
    ///     .run(&id, fp, |job| async move {
    ///         let key = job.downstream("mail", ["receipt"]);
    ///         // mailer.send(receipt).header("Idempotency-Key", key.as_str()) ..
    ///         Verdict::Done(Outcome::new(200).body(key.as_str().to_owned()))
    ///     })
    ///     .await?;
    /// assert_eq!(&ran.outcome.bytes()[..], id.downstream("mail", ["receipt"]).as_str().as_bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub fn downstream<P: AsRef<[u8]>>(
        &self,
        name: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = P>,
    ) -> IntentKey {
        self.identity().downstream(name, parts)
    }

    /// The fencing token. Hand it to downstream systems that can refuse an older one.
    pub fn token(&self) -> Token {
        self.shared.token
    }

    /// Which of a batch's attempts this is, from 0 on ([`Worker::run_each`](super::Worker::run_each)).
    pub fn index(&self) -> usize {
        self.shared.index
    }

    /// What an owner before this one has left by [`checkpoint`](Self::checkpoint), once; nothing if it
    /// left nothing, or if the key was not taken over. Not taken here, it stays in the tier for the
    /// owner after this one.
    pub fn take_checkpoint(&self) -> Option<Bytes> {
        self.shared.checkpoint.lock().take()
    }

    /// Leaves `bytes` in the tier for the next owner, should this one vanish: it can go on where this
    /// one stopped. They take the place of what was left before.
    ///
    /// They stay until the key is completed or resolved: with [`Lapse::TakeOver`](crate::Lapse) they
    /// go to the next owner after [`Retry`](super::Verdict::Retry) too, and until then the key takes
    /// no other fingerprint. With [`Lapse::Hold`](crate::Lapse) `Retry` ends them, because what has
    /// lapsed is held there, and the next owner begins at the beginning.
    ///
    /// The step that was cut off may be made again. Give each a key of its own
    /// ([`downstream`](Self::downstream)), by which that is known.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use oncekey::{Fingerprint, Identity, Lapse, Outcome, Store, worker::Verdict};
    /// # use oncekey::tier::{MemoryTier, Tiered};
    /// # let store = Store::builder().build()?;
    /// # let id = Identity::new("acct_42", "charge", "invoice-7")?;
    /// # let fp = Fingerprint::request("", "charge", b"1200 usd");
    /// let tiered = Tiered::open(store, MemoryTier::new(), Lapse::TakeOver).await?;
    /// let refused = tiered
    ///     .run(&id, fp, |job| async move {
    ///         // reserve the amount ..
    ///         match job.checkpoint("reserved").await {
    ///             Ok(()) => Verdict::retry("the bank is closed"),
    ///             Err(error) => Verdict::unknown(error),
    ///         }
    ///     })
    ///     .await;
    /// assert!(refused.is_err());
    /// let ran = tiered
    ///     .run(&id, fp, |job| async move {
    ///         assert_eq!(job.take_checkpoint().as_deref(), Some(&b"reserved"[..]));
    ///         Verdict::Done(Outcome::new(200).body("ch_1"))
    ///     })
    ///     .await?;
    /// assert_eq!(&ran.outcome.bytes()[..], b"ch_1");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`JobError`]; with [`JobError::Lost`], stop.
    pub async fn checkpoint(&self, bytes: impl Into<Bytes>) -> Result<(), JobError> {
        let Link { through, has_checkpoint, .. } = self.tier()?;
        let id = self.identity();
        let step = through.tier.checkpoint(id, self.token(), bytes.into());
        // Before the step: it may be done though its answer is lost.
        has_checkpoint.store(true, Ordering::Relaxed);
        match through.ask(step).await.map_err(JobError::Tier)? {
            Landed::Done => Ok(()),
            Landed::Lost(_) => Err(JobError::Lost),
        }
    }

    /// Completes the key with `outcome` inside the work's own transaction, so that its rows and the
    /// outcome appear together or not at all (T6). Commit, then say
    /// [`Verdict::Committed`](super::Verdict::Committed). The database must be the one that the tier
    /// is in.
    ///
    /// From then on the transaction decides, whatever the work says: after `Committed` the outcome is
    /// published. After a panic or a dropped future, and after `Retry`, as when the answer to the commit
    /// was lost, a write that waits for the transaction finds out: committed, the key is completed;
    /// rolled back, it is released. After `Unknown` or `Done` it finds out too, and what was rolled
    /// back is held. So all that the work does should be in that transaction. As long as it is open,
    /// the caller is told [`RunError::InFlight`](super::RunError::InFlight).
    ///
    /// ```text
    /// let mut tx = pool.begin().await?;
    /// let charge = insert_charge(&mut tx, ..).await?;
    /// job.complete_in(&mut tier.within(&mut tx), Outcome::new(201).body(charge)).await?;
    /// tx.commit().await?;
    /// // and in the closure: Ok(()) => Verdict::Committed, Err(error) => Verdict::retry(error)
    /// ```
    ///
    /// # Errors
    ///
    /// [`JobError`]: roll back.
    pub async fn complete_in(
        &self,
        transaction: &mut impl Transaction,
        outcome: Outcome,
    ) -> Result<(), JobError> {
        let Link { through, .. } = self.tier()?;
        let id = self.identity();
        let since = Instant::now();
        let retention = through.settings.retention;
        let completion = Completion { id, token: self.token(), outcome: Some(&outcome), retention };
        // Before the step: it may be done though this future was dropped.
        let earlier = self.shared.staged.lock().replace(Staged { outcome: outcome.clone(), since });
        let failed = match transaction.complete(completion).await {
            Ok(Landed::Done) => return Ok(()),
            Ok(Landed::Lost(_)) => JobError::Lost,
            Err(error) => JobError::Tier(error),
        };
        // An earlier transaction may have been committed all the same.
        *self.shared.staged.lock() = earlier;
        Err(failed)
    }

    pub(super) fn take_staged(&self) -> Option<Staged> {
        self.shared.staged.lock().take()
    }

    fn tier(&self) -> Result<&Link, JobError> {
        self.shared.tier.as_ref().filter(|link| link.is_in_tier).ok_or(JobError::NoTier)
    }
}

/// Shows the token only: account and key belong in no log.
impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("token", &self.token()).finish_non_exhaustive()
    }
}
