//! The owner's guard: complete, release, hold, renew; dropping settles (R8 to R12).
//!
//! Ground rules: a permit stands for one claim, by its cell and the token's number captured at claim
//! time (R12). There is one permit for a cell. A verb takes the permit, so no verb can follow it;
//! what a stale token meets is decided in the engine.

use std::fmt;

use crate::{
    engine::{Abandon, By, Finish, Hold},
    error::Lost,
    fingerprint::Fingerprint,
    identity::Identity,
    outcome::Outcome,
    record::Owned,
    sync::Arc,
};

/// The fencing number of one claim (R9): never used twice for an identity, also after release,
/// expiry, forget or a restart. A later claim of an identity in one store has a higher `number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) owner: u64,
    pub(crate) number: u64,
}

impl Token {
    /// A token as a tier has stored it.
    #[cfg(feature = "tier")]
    pub fn new(owner: u64, number: u64) -> Self {
        Self { owner, number }
    }

    /// Random for each store and process start.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Grows with each claim of an identity.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.owner, self.number)
    }
}

/// How a completion went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completed {
    /// False if the answer found no room and the identity was completed as "not kept" (R25):
    /// nobody runs it again, but nobody gets the answer either.
    pub kept: bool,
}

/// What the owner of an identity holds. One of its verbs ends it; a permit that is dropped is
/// settled by [`StoreBuilder::on_abandon`](crate::StoreBuilder::on_abandon) (R11).
///
/// A permit may be sent to another thread. `mem::forget` of a permit leaves the identity in flight
/// until its lease lapses.
///
/// ```
/// use oncekey::{Claim, Fingerprint, Identity, Outcome, Store};
///
/// let store = Store::builder().build()?;
/// let id = Identity::new("acct_42", "POST /charges", "7f9c1e2a")?;
/// let fp = Fingerprint::request("POST", "/charges", b"{}");
/// let Claim::Won(permit) = store.claim(&id, fp)? else { unreachable!() };
/// let completed = permit.complete(Outcome::new(201).body("ch_1"))?;
/// assert!(completed.kept);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a permit that is dropped holds its identity: nobody knows whether the work was done"]
pub struct Permit {
    claim: Claimed,
    /// Whether a verb has taken the permit: dropping it then settles nothing.
    settled: bool,
}

struct Claimed {
    hold: Arc<Hold>,
    owned: Owned,
    number: u64,
}

impl Permit {
    pub(crate) fn new(hold: Arc<Hold>, owned: Owned, number: u64) -> Self {
        Self { claim: Claimed { hold, owned, number }, settled: false }
    }

    /// Finishes the work: `outcome` is what everybody gets from now on, for the retention.
    ///
    /// The lapse of the lease alone does not matter: while nobody took the claim over, it still
    /// settles it (R9).
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's; nothing changed, the outcome comes back.
    pub fn complete(self, outcome: Outcome) -> Result<Completed, Lost> {
        self.finish(Some(outcome))
    }

    /// Finishes the work without keeping an answer: it is not run again, and who asks is told
    /// that the answer was not kept (R20).
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's.
    pub fn complete_not_kept(self) -> Result<Completed, Lost> {
        self.finish(None)
    }

    fn finish(mut self, outcome: Option<Outcome>) -> Result<Completed, Lost> {
        let Claimed { hold, owned, .. } = self.settle();
        let (engine, lane) = (hold.engine(), hold.lane());
        let guard = engine.pin();
        let finish = engine.complete(lane, owned.cell(), By::Owner, outcome, &guard)?;
        Ok(Completed { kept: matches!(finish, Finish::Kept) })
    }

    /// As [`complete`](Self::complete), or without an answer kept, for `retention`, which a tier has
    /// stated; longer than the store's it is not.
    #[cfg(feature = "tier")]
    pub(crate) fn complete_for(
        mut self,
        outcome: Option<Outcome>,
        retention: std::time::Duration,
    ) -> Result<Completed, Lost> {
        let retention = crate::clock::Millis::at(retention);
        let Claimed { hold, owned, .. } = self.settle();
        let (engine, lane) = (hold.engine(), hold.lane());
        let guard = engine.pin();
        let finish =
            engine.complete_for(retention, lane, owned.cell(), By::Owner, outcome, &guard)?;
        Ok(Completed { kept: matches!(finish, Finish::Kept) })
    }

    /// The claim, for a verb that ends the permit.
    fn settle(&mut self) -> &Claimed {
        self.settled = true;
        &self.claim
    }

    /// Gives the identity up: nothing was done, the next caller may run. The oldest waiter becomes
    /// the owner (R14); without waiters the identity remembers nothing.
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's.
    pub fn release(mut self) -> Result<(), Lost> {
        let Claimed { hold, owned, .. } = self.settle();
        hold.engine().release(hold.lane(), owned, None)
    }

    /// Gives the identity up and leaves an answer to the waiters that are there, so that they do
    /// not all run against a service that is sick (R14). Later callers may run.
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's; the answer comes back.
    pub fn release_with(mut self, answer: Outcome) -> Result<(), Lost> {
        let Claimed { hold, owned, .. } = self.settle();
        hold.engine().release(hold.lane(), owned, Some(answer))
    }

    /// Keeps the identity shut for the retention, because nobody knows whether the work was done
    /// (R11). An operator can [`resolve`](crate::Store::resolve) it.
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's.
    pub fn hold(mut self) -> Result<(), Lost> {
        let Claimed { hold, owned, .. } = self.settle();
        hold.engine().hold(hold.lane(), owned)
    }

    /// Shows a sign of life: the lease ends one lease from now, never earlier than before. A claim
    /// that is attended gets no more time by it.
    ///
    /// # Errors
    ///
    /// [`Lost`] if the claim is no longer this permit's, or with
    /// [`LostCause::Held`](crate::LostCause::Held) if its lease has lapsed and was judged.
    pub fn renew(&self) -> Result<(), Lost> {
        self.claim.hold.engine().renew(self.claim.hold.lane(), &self.claim.owned)
    }

    /// Takes the lease as renewed all the time from now on, as long as the permit lives, up to
    /// `max_run` from now; then the identity is held (R8).
    ///
    /// For owners whose permit is dropped when they end, such as a task: no timer has to renew
    /// anything, and no stall of the process is taken for a death.
    ///
    /// # Errors
    ///
    /// As for [`Permit::renew`].
    pub fn attend(&self) -> Result<(), Lost> {
        self.claim.hold.engine().attend(self.claim.hold.lane(), &self.claim.owned)
    }

    /// The fencing token of the claim. Hand it to downstream systems that can refuse an older one.
    pub fn token(&self) -> Token {
        Token { owner: self.claim.hold.engine().owner(), number: self.claim.number }
    }

    /// The identity that was claimed.
    pub fn identity(&self) -> Identity<'_> {
        Identity::from_frame(self.claim.owned.cell().frame())
    }

    /// The fingerprint it was claimed with.
    pub fn fingerprint(&self) -> Fingerprint {
        *self.claim.owned.cell().fingerprint()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let Claimed { hold, owned, .. } = &self.claim;
        let (engine, lane) = (hold.engine(), hold.lane());
        lane.counters.abandoned.up();
        // Lost means that somebody else has settled it: nothing is left to do.
        let _ = match engine.settings.on_abandon {
            Abandon::Hold => engine.hold(lane, owned),
            Abandon::Release => engine.release(lane, owned, None),
        };
    }
}

/// Shows the token only: account and key belong in no log.
impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("token", &self.token()).finish_non_exhaustive()
    }
}
