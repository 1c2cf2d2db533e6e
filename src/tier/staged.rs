//! Completing inside the caller's own transaction: business rows and outcome appear together, or
//! neither does (T6).
//!
//! ```text
//! complete_in --commit--> publish                       memory has it at once
//!            '--rollback--> rolled_back                 the claim is still the caller's
//!            '--who knows--> dropped                    a locking write finds out, then memory follows
//! ```

use std::{fmt, time::Duration};

use tokio::time::Instant;

use super::{Answer, Landed, TierError, TierLost, TieredPermit, owned::Owned};
use crate::{Completed, Identity, Outcome, Token};

/// A transaction of the database that a tier keeps its records in: the connection it runs on.
pub trait Transaction: Send {
    /// Completes the record inside the transaction, if the token is not stale: as
    /// [`Tier::complete`](super::Tier::complete), but for being undone by a rollback; and not to be
    /// repeated: what this token has completed already is [`Landed::Lost`], because whatever else
    /// stands in this transaction would be there twice.
    fn complete<'a>(&'a mut self, completion: Completion<'a>) -> Answer<'a, Landed>;
}

/// What is to be written in a [`Transaction`].
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// The identity.
    pub id: Identity<'a>,
    /// The token of its claim.
    pub token: Token,
    /// `None`: not kept.
    pub outcome: Option<&'a Outcome>,
    /// How long it is kept, from now on.
    pub retention: Duration,
}

/// A completion that stands in a transaction and is not committed yet.
///
/// Say [`publish`](Self::publish) after the commit, or [`rolled_back`](Self::rolled_back) after a
/// rollback. Dropped, as when the answer to the commit was lost, the tier is asked by a write that
/// waits for the transaction: until then the identity is in flight.
#[must_use = "publish it after the commit"]
pub struct Staged {
    /// `None` once settled.
    owned: Option<Owned>,
    outcome: Option<Outcome>,
    since: Instant,
}

/// Why nothing was staged.
#[derive(Debug)]
#[non_exhaustive]
pub enum StageError {
    /// The claim is no longer this permit's: roll back.
    Lost(TierLost),
    /// The database did not take it: roll back. The claim is still the caller's.
    Tier {
        /// The permit comes back.
        permit: TieredPermit,
        /// What happened.
        error: TierError,
    },
}

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(lost) => lost.fmt(f),
            Self::Tier { error, .. } => error.fmt(f),
        }
    }
}

impl std::error::Error for StageError {}

impl Staged {
    /// Completes inside `transaction`; nothing is published.
    pub(super) async fn new(
        owned: Owned,
        transaction: &mut impl Transaction,
        outcome: Option<Outcome>,
    ) -> Result<Self, StageError> {
        let since = Instant::now();
        let completion = Completion {
            id: owned.identity(),
            token: owned.token(),
            outcome: outcome.as_ref(),
            retention: owned.retention(),
        };
        match transaction.complete(completion).await {
            Ok(Landed::Done) => Ok(Self { owned: Some(owned), outcome, since }),
            Ok(Landed::Lost(found)) => {
                Err(StageError::Lost(owned.lose(outcome, found, since).into()))
            }
            Err(error) => Err(StageError::Tier { permit: TieredPermit::of(owned), error }),
        }
    }

    /// The transaction was committed: from now on memory replays the outcome.
    ///
    /// # Errors
    ///
    /// [`TierLost`] if an operator has settled the identity meanwhile.
    pub async fn publish(mut self) -> Result<Completed, TierLost> {
        let outcome = self.outcome.take();
        let Some(owned) = self.owned.take() else { return Ok(Completed { kept: false }) };
        Ok(owned.publish(outcome, self.since)?)
    }

    /// The transaction was rolled back and nothing was done: gives the identity up.
    ///
    /// # Errors
    ///
    /// [`TierLost`] if it was committed after all, or the claim is no longer this caller's.
    pub async fn rolled_back(mut self) -> Result<(), TierLost> {
        match self.owned.take() {
            Some(owned) => Ok(owned.release(None).await?),
            None => Ok(()),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(owned) = self.owned.take() {
            owned.find_out(self.outcome.take(), self.since);
        }
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").finish_non_exhaustive()
    }
}
