//! The face of a store with a tier behind it: the verbs of [`Store`], async.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Forgotten, Found, Landed, Resolved, StageError, Staged, Tier, TierError, Transaction,
    owned::{Owned, Stale},
    stats::TierStats,
    through::{self, Entered, Judged, Settings, Through},
};
use crate::{
    Claim, ClaimError, Completed, Fingerprint, Identity, Lapse, Outcome, Pending, Replay, Scheme,
    Settled, Store, Token,
};

/// A [`Store`] with a [`Tier`] behind it: the memory in front, the tier as the truth.
///
/// Cheap to clone; all clones are one. It needs the tokio runtime that it is opened on for as long as it
/// is used: heartbeats, and what is left to the background, run there. The store must not be claimed from
/// by anybody else: what is claimed there is not in the tier.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use oncekey::{Fingerprint, Identity, Lapse, Outcome, Store};
/// use oncekey::tier::{MemoryTier, Tiered, TieredClaim};
///
/// let tier = MemoryTier::new();
/// let a = Tiered::open(Store::builder().build()?, tier.clone(), Lapse::Hold).await?;
/// let b = Tiered::open(Store::builder().build()?, tier, Lapse::Hold).await?;
///
/// let id = Identity::new("acct_42", "POST /charges", "7f9c1e2a")?;
/// let fp = Fingerprint::request("POST", "/charges", b"{}");
/// let TieredClaim::Won(permit) = a.claim(&id, fp).await? else { unreachable!() };
/// permit.complete(Outcome::new(201).body("ch_1")).await?;
///
/// // The other node runs nothing.
/// let TieredClaim::Replay(replay) = b.claim(&id, fp).await? else { unreachable!() };
/// assert_eq!(&replay.outcome().bytes()[..], b"ch_1");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tiered {
    through: Arc<Through>,
}

/// The settings of a [`Tiered`]. Made by [`Tiered::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `open` is called"]
pub struct TieredBuilder {
    store: Store,
    answer_within: Duration,
    poll_every: Duration,
    fail_open: bool,
    max_unwritten: usize,
}

impl TieredBuilder {
    /// How long the tier may take for one answer; then the caller is told that it is unavailable.
    /// Default 5 s: well below what clients wait.
    pub fn answer_within(mut self, limit: Duration) -> Self {
        self.answer_within = limit;
        self
    }

    /// How often a record is looked at that is in flight on another node and waited for here, where
    /// the tier tells of nothing by itself; jittered by a half. Default 250 ms.
    pub fn poll_every(mut self, pause: Duration) -> Self {
        self.poll_every = pause;
        self
    }

    /// Lets claims run in memory alone while the tier is unavailable (T2). Default false: they are
    /// refused and nothing runs. With true, what runs meanwhile on one node may run again on
    /// another; it is counted ([`TierStats::failed_open`]).
    pub fn fail_open(mut self, fail_open: bool) -> Self {
        self.fail_open = fail_open;
        self
    }

    /// How many steps may wait to be told to a tier that was unavailable. Beyond it they are given
    /// up and counted ([`TierStats::given_up`]): the claims of those lapse or are held after
    /// `max_run`. Default 10,000; each keeps its outcome.
    pub fn max_unwritten(mut self, steps: usize) -> Self {
        self.max_unwritten = steps;
        self
    }

    /// Opens the store on `tier`. What becomes of a claim whose owner has vanished is asked for,
    /// because nothing is right for all (R10): [`Lapse::TakeOver`] where the outcome is completed in
    /// one transaction with the work, else [`Lapse::Hold`].
    ///
    /// # Errors
    ///
    /// [`TierError`] if the tier does not answer: there is no silent memory-only mode (T2).
    pub async fn open(self, tier: impl Tier, on_lapse: Lapse) -> Result<Tiered, TierError> {
        self.open_shared(Arc::new(tier), on_lapse).await
    }

    /// As [`open`](Self::open), on a tier that others use too.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub async fn open_shared(
        self,
        tier: Arc<dyn Tier>,
        on_lapse: Lapse,
    ) -> Result<Tiered, TierError> {
        let Self { store, answer_within, poll_every, fail_open, max_unwritten } = self;
        let lease = store.lease();
        let settings = Settings {
            on_lapse,
            on_abandon: store.on_abandon(),
            lease,
            max_run: store.max_run(),
            retention: store.retention(),
            answer_within,
            poll_every: poll_every.max(Duration::from_millis(1)),
            fail_open,
            max_unwritten,
        };
        let through = Arc::new(Through::new(store, tier, settings));
        through.beat().await?;
        through.store.evict_when_full();
        tokio::spawn(through::keep(Arc::downgrade(&through), lease / 4));
        Ok(Tiered { through })
    }
}

impl Tiered {
    /// Opens `store` on `tier`, with the settings at their defaults; see [`TieredBuilder::open`].
    ///
    /// Retention, lease, `max_run` and `on_abandon` are the store's; its `on_lapse` does not matter.
    ///
    /// # Errors
    ///
    /// [`TierError`] if the tier does not answer.
    pub async fn open(store: Store, tier: impl Tier, on_lapse: Lapse) -> Result<Self, TierError> {
        Self::builder(store).open(tier, on_lapse).await
    }

    /// The settings of a tiered store, at their defaults.
    pub fn builder(store: Store) -> TieredBuilder {
        TieredBuilder {
            store,
            answer_within: Duration::from_secs(5),
            poll_every: Duration::from_millis(250),
            fail_open: false,
            max_unwritten: 10_000,
        }
    }

    #[cfg(any(feature = "http", feature = "worker"))]
    pub(crate) fn through(&self) -> &Arc<Through> {
        &self.through
    }

    /// Makes the caller the owner of `id`, or tells what is there. May be dropped at any time: a
    /// claim that nobody came to know of is given up.
    ///
    /// # Errors
    ///
    /// [`TieredError`]; nothing must run.
    pub async fn claim(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
    ) -> Result<TieredClaim, TieredError> {
        self.claim_with(id, fingerprint, |_| None).await
    }

    /// As [`claim`](Self::claim), for callers that know several schemes; see [`Store::claim_with`].
    ///
    /// # Errors
    ///
    /// As for [`claim`](Self::claim).
    pub async fn claim_with(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Result<TieredClaim, TieredError> {
        let mut doubted = None;
        loop {
            let through = &self.through;
            let claim = match through.store.claim_with(id, fingerprint, &mut translate)? {
                Claim::Won(permit) => match through.enter(permit, &mut translate).await {
                    Entered::Yours(owned) => TieredClaim::Won(TieredPermit { owned }),
                    Entered::Replay(replay) => TieredClaim::Replay(replay),
                    Entered::NotKept => TieredClaim::NotKept,
                    Entered::Mismatch => TieredClaim::Mismatch,
                    Entered::Held => TieredClaim::Held,
                    // In memory the watcher is the owner now.
                    Entered::Elsewhere => continue,
                    Entered::Unavailable { error, retry_after } => {
                        return Err(TieredError::Unavailable { error, retry_after });
                    }
                },
                Claim::Replay(replay) => TieredClaim::Replay(replay),
                Claim::NotKept => TieredClaim::NotKept,
                Claim::Mismatch => {
                    let since = *doubted.get_or_insert_with(Instant::now);
                    match through.judge(*id, fingerprint, &mut translate, since).await {
                        Judged::Mismatch => TieredClaim::Mismatch,
                        Judged::Again => continue,
                        Judged::Unavailable { error, retry_after } => {
                            return Err(TieredError::Unavailable { error, retry_after });
                        }
                    }
                }
                Claim::Held => TieredClaim::Held,
                Claim::InFlight(pending) => {
                    let through = Arc::clone(through);
                    TieredClaim::InFlight(TieredPending { through, pending })
                }
            };
            return Ok(claim);
        }
    }

    /// What the tier knows of `id`; `None` if a claim would win.
    ///
    /// # Errors
    ///
    /// [`TierError`] if it does not answer.
    pub async fn look_up(&self, id: &Identity<'_>) -> Result<Option<Found>, TierError> {
        self.through.ask(self.through.tier.look_up(*id)).await
    }

    /// Forgets `id` here, in the tier, and within 5 s on other nodes (T9). One that is in flight is
    /// left alone, unless `forced`: then its owner's token is stale and the work may run twice.
    ///
    /// # Errors
    ///
    /// [`TierError`] if the tier does not answer; nothing is known then.
    pub async fn forget(&self, id: &Identity<'_>, forced: bool) -> Result<Forgotten, TierError> {
        let forgotten = self.through.ask(self.through.tier.forget(*id, forced)).await?;
        if forgotten != Forgotten::Busy {
            if forced {
                self.through.store.forget_forced(id);
            } else {
                let _ = self.through.store.forget(id);
            }
        }
        Ok(forgotten)
    }

    /// Settles a held or lapsed identity (R11), with an outcome or, with `None`, by giving it up.
    ///
    /// # Errors
    ///
    /// [`TierError`] if the tier does not answer; nothing is known then.
    pub async fn resolve(
        &self,
        id: &Identity<'_>,
        outcome: Option<&Outcome>,
    ) -> Result<Resolved, TierError> {
        let through = &self.through;
        let retention = through.settings.retention;
        let resolved = through.ask(through.tier.resolve(*id, outcome, retention)).await?;
        if resolved == Resolved::Done {
            // Held in memory: what the tier has now is read when it is asked for.
            let _ = through.store.forget(id);
        }
        Ok(resolved)
    }

    #[cfg(feature = "http")]
    pub(crate) fn retry_after(&self) -> Duration {
        self.through.circuit.retry_after()
    }

    /// The memory in front: its gauges, and draining it.
    pub fn store(&self) -> &Store {
        &self.through.store
    }

    /// Reads the gauges and counters of the tier.
    pub fn stats(&self) -> TierStats {
        let through = &self.through;
        let unwritten = through.unwritten.load(Ordering::Relaxed);
        through.counters.read(unwritten, through.circuit.is_open())
    }
}

impl fmt::Debug for Tiered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiered").field("tier", &self.through.tier).finish_non_exhaustive()
    }
}

/// What [`Tiered::claim`] answers: as [`Claim`].
#[derive(Debug)]
#[must_use = "a claim that was won and dropped holds its identity"]
pub enum TieredClaim {
    /// The caller is the owner and runs the work.
    Won(TieredPermit),
    /// The work is done; this is its outcome.
    Replay(Replay),
    /// The work is done, but its answer was not kept.
    NotKept,
    /// An owner runs, here or on another node; wait for it.
    InFlight(TieredPending),
    /// The identity is taken by an attempt with another fingerprint (R5).
    Mismatch,
    /// Nobody knows whether the work was done (R11).
    Held,
}

/// Why an identity could not be claimed. Nothing must run.
#[derive(Debug)]
#[non_exhaustive]
pub enum TieredError {
    /// The memory could not take it in.
    Memory(ClaimError),
    /// The tier did not answer (T2).
    Unavailable {
        /// What happened.
        error: TierError,
        /// When to try again, at least 1 s.
        retry_after: Duration,
    },
}

impl From<ClaimError> for TieredError {
    fn from(error: ClaimError) -> Self {
        Self::Memory(error)
    }
}

impl fmt::Display for TieredError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(error) => error.fmt(f),
            Self::Unavailable { error, retry_after } => {
                write!(f, "{error}; nothing was done, try again in {} s", retry_after.as_secs())
            }
        }
    }
}

impl std::error::Error for TieredError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            Self::Unavailable { error, .. } => Some(error),
        }
    }
}

/// A running owner, here or on another node, seen by a duplicate. Dropping it leaves no trace.
#[derive(Debug)]
pub struct TieredPending {
    through: Arc<Through>,
    pending: Pending,
}

impl TieredPending {
    /// Waits until the owner settles or its lease ends. May be dropped at any time; it has no limit
    /// of its own.
    ///
    /// # Errors
    ///
    /// [`TieredError`] if this waiter was to be the next owner and the tier did not answer.
    pub async fn wait(self) -> Result<TieredSettled, TieredError> {
        let Self { through, mut pending } = self;
        loop {
            let (account, endpoint, key) = {
                let id = pending.identity();
                (id.account().to_vec(), id.endpoint().to_vec(), id.key().to_vec())
            };
            let fingerprint = pending.fingerprint();
            let settled = pending.wait().await;
            let permit = match settled {
                Settled::Yours(permit) => Some(permit),
                // Of a claim that may be on its way to the tier yet.
                Settled::Mismatch => None,
                Settled::Completed(replay) => return Ok(TieredSettled::Completed(replay)),
                Settled::Answered(outcome) => return Ok(TieredSettled::Answered(outcome)),
                Settled::NotKept => return Ok(TieredSettled::NotKept),
                Settled::Held => return Ok(TieredSettled::Held),
                Settled::TooMany => return Ok(TieredSettled::TooMany),
                Settled::Refused(error) => return Err(error.into()),
            };
            if let Some(permit) = permit {
                match through.enter(permit, |_| None).await {
                    Entered::Yours(owned) => {
                        return Ok(TieredSettled::Yours(TieredPermit { owned }));
                    }
                    Entered::Replay(replay) => return Ok(TieredSettled::Completed(replay)),
                    Entered::NotKept => return Ok(TieredSettled::NotKept),
                    Entered::Mismatch => return Ok(TieredSettled::Mismatch),
                    Entered::Held => return Ok(TieredSettled::Held),
                    Entered::Unavailable { error, retry_after } => {
                        return Err(TieredError::Unavailable { error, retry_after });
                    }
                    Entered::Elsewhere => {}
                }
            }
            let id = Identity::new(&account, &endpoint, &key);
            let Ok(id) = id else { return Ok(TieredSettled::Held) };
            match (Tiered { through: Arc::clone(&through) }).claim(&id, fingerprint).await? {
                TieredClaim::InFlight(next) => pending = next.pending,
                TieredClaim::Won(permit) => return Ok(TieredSettled::Yours(permit)),
                TieredClaim::Replay(replay) => return Ok(TieredSettled::Completed(replay)),
                TieredClaim::NotKept => return Ok(TieredSettled::NotKept),
                TieredClaim::Mismatch => return Ok(TieredSettled::Mismatch),
                TieredClaim::Held => return Ok(TieredSettled::Held),
            }
        }
    }
}

/// What a waiter is told in the end: as [`Settled`].
#[derive(Debug)]
#[must_use = "a permit in it that is dropped holds its identity"]
#[non_exhaustive]
pub enum TieredSettled {
    /// The owner completed; this is its outcome.
    Completed(Replay),
    /// The owner gave the identity up, or vanished, and this waiter is the next owner.
    Yours(TieredPermit),
    /// The owner gave the identity up and left this answer to those who were waiting (R14).
    Answered(Outcome),
    /// The owner completed, but its answer was not kept.
    NotKept,
    /// The identity was claimed anew with another fingerprint.
    Mismatch,
    /// Nobody knows whether the work was done (R11).
    Held,
    /// As many wait already as the caps allow (R15). Nothing was waited for.
    TooMany,
}

/// What the owner of an identity holds: as [`Permit`](crate::Permit), with verbs that tell the tier first.
///
/// A verb's future may be dropped: what the tier was not told by then it is told again. A permit
/// that is dropped is settled by [`StoreBuilder::on_abandon`](crate::StoreBuilder::on_abandon), in
/// the background.
#[must_use = "a permit that is dropped holds its identity: nobody knows whether the work was done"]
pub struct TieredPermit {
    owned: Owned,
}

impl TieredPermit {
    /// Finishes the work: `outcome` is in the tier before this is ready (T1), unless the tier cannot
    /// be reached: then memory answers for as long as no other node may run it, and the tier is told
    /// until it knows ([`TierStats::unwritten`]).
    ///
    /// # Errors
    ///
    /// [`TierLost`] if the claim is no longer this permit's; the outcome comes back.
    pub async fn complete(self, outcome: Outcome) -> Result<Completed, TierLost> {
        Ok(self.owned.complete(Some(outcome)).await?)
    }

    /// Finishes the work inside the caller's own transaction, so that its rows and the outcome appear
    /// together or not at all (T6). The database must be the one that the tier is in.
    ///
    /// ```text
    /// let mut tx = pool.begin().await?;
    /// let charge = insert_charge(&mut tx).await?;
    /// let staged = permit.complete_in(&mut tier.within(&mut tx), outcome).await?;
    /// tx.commit().await?;
    /// staged.publish().await?;
    /// ```
    ///
    /// # Errors
    ///
    /// [`StageError`]: roll back.
    pub async fn complete_in(
        self,
        transaction: &mut impl Transaction,
        outcome: Outcome,
    ) -> Result<Staged, StageError> {
        Staged::new(self.owned, transaction, Some(outcome)).await
    }

    pub(super) fn of(owned: Owned) -> Self {
        Self { owned }
    }

    #[cfg(feature = "worker")]
    pub(crate) fn into_owned(self) -> Owned {
        self.owned
    }

    /// Finishes the work without keeping an answer (R20).
    ///
    /// # Errors
    ///
    /// [`TierLost`] if the claim is no longer this permit's.
    pub async fn complete_not_kept(self) -> Result<Completed, TierLost> {
        Ok(self.owned.complete(None).await?)
    }

    /// Gives the identity up: nothing was done, the next caller may run.
    ///
    /// # Errors
    ///
    /// [`TierLost`] if the claim is no longer this permit's.
    pub async fn release(self) -> Result<(), TierLost> {
        Ok(self.owned.release(None).await?)
    }

    /// Gives the identity up and leaves an answer to those who wait on this node (R14).
    ///
    /// # Errors
    ///
    /// [`TierLost`] if the claim is no longer this permit's.
    pub async fn release_with(self, answer: Outcome) -> Result<(), TierLost> {
        Ok(self.owned.release(Some(answer)).await?)
    }

    /// Keeps the identity shut for the retention, because nobody knows whether the work was done.
    ///
    /// # Errors
    ///
    /// [`TierLost`] if the claim is no longer this permit's.
    pub async fn hold(self) -> Result<(), TierLost> {
        Ok(self.owned.hold().await?)
    }

    /// Leaves `bytes` in the tier for the next owner, should this one vanish: it can go on where this
    /// one stopped. They take the place of what was left before.
    ///
    /// # Errors
    ///
    /// [`TierError`] if the tier does not answer. False if the claim is no longer this permit's: stop.
    pub async fn checkpoint(&self, bytes: impl Into<Bytes>) -> Result<bool, TierError> {
        Ok(self.owned.leave_checkpoint(bytes.into()).await? == Landed::Done)
    }

    /// What an owner before this one has left, once.
    pub fn take_checkpoint(&mut self) -> Option<Bytes> {
        self.owned.take_checkpoint()
    }

    /// The fencing token of the claim. Hand it to downstream systems that can refuse an older one.
    pub fn token(&self) -> Token {
        self.owned.token()
    }

    /// The identity that was claimed.
    pub fn identity(&self) -> Identity<'_> {
        self.owned.identity()
    }
}

/// Shows the token only.
impl fmt::Debug for TieredPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TieredPermit").field("token", &self.token()).finish_non_exhaustive()
    }
}

/// The token was stale: the call changed nothing in the tier (R9).
#[derive(Debug)]
pub struct TierLost {
    stale: Stale,
}

impl TierLost {
    /// What is there now, if anything.
    pub fn found(&self) -> Option<&Found> {
        self.stale.found.as_deref()
    }

    /// The outcome that was not stored, if one was handed in.
    pub fn into_outcome(self) -> Option<Outcome> {
        self.stale.outcome
    }
}

impl From<Stale> for TierLost {
    fn from(stale: Stale) -> Self {
        Self { stale }
    }
}

impl fmt::Display for TierLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lost: the claim was taken over, forgotten, resolved or has ended")
    }
}

impl std::error::Error for TierLost {}
