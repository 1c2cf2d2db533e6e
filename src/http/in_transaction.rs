//! Completing in the handler's own transaction: business rows and outcome appear together, or
//! neither does (T6).
//!
//! Ground rules: what was staged decides, whatever the handler returns. Said to be committed, the
//! outcome is published and is the response. Else nobody knows yet, and the tier is asked by a write
//! that waits for the transaction.

use std::{fmt, sync::Arc, time::Duration};

use http::StatusCode;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{attempt::Caller, policy::Policy};
use crate::{
    Outcome, Token,
    tier::{Completion, Landed, TierError, Transaction},
};

/// Lets a handler complete its key in a transaction of its own (T6).
///
/// A request extension of every claimed request of a layer whose store has a tier, and with the
/// feature `axum` an extractor. The transaction must be one of the database that the tier is in.
///
/// ```text
/// async fn charge(key: InTransaction, State((tier, pool)): ..) -> Result<StatusCode, Error> {
///     let mut tx = pool.begin().await?;
///     let id = insert_charge(&mut tx).await?;
///     key.complete(&mut tier.within(&mut tx), Outcome::new(201).body(id)).await?;
///     tx.commit().await?;
///     Ok(key.committed())             // the client gets the outcome
/// }
/// ```
#[derive(Clone)]
pub struct InTransaction {
    shared: Arc<Shared>,
}

struct Shared {
    caller: Arc<Caller>,
    policy: Arc<Policy>,
    token: Token,
    retention: Duration,
    staged: Mutex<Option<Staged>>,
}

/// What stands in the handler's transaction.
pub(super) struct Staged {
    /// As the client gets it.
    pub(super) plain: Outcome,
    /// As it is kept; `None` is "not kept".
    pub(super) kept: Option<Outcome>,
    pub(super) since: Instant,
    pub(super) is_committed: bool,
}

/// Why nothing was staged: roll back.
#[derive(Debug)]
#[non_exhaustive]
pub enum InTransactionError {
    /// The claim was taken over, forgotten or resolved: this run must leave nothing behind.
    Lost,
    /// The database did not take it.
    Tier(TierError),
}

impl fmt::Display for InTransactionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("lost: the key belongs to another run; roll back"),
            Self::Tier(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for InTransactionError {}

impl InTransaction {
    pub(super) fn new(
        caller: Arc<Caller>,
        policy: Arc<Policy>,
        token: Token,
        retention: Duration,
    ) -> Self {
        let staged = Mutex::default();
        Self { shared: Arc::new(Shared { caller, policy, token, retention, staged }) }
    }

    /// Completes the key with `outcome` inside `transaction`. Commit, then say
    /// [`committed`](Self::committed).
    ///
    /// # Errors
    ///
    /// [`InTransactionError`]: roll back.
    pub async fn complete(
        &self,
        transaction: &mut impl Transaction,
        outcome: Outcome,
    ) -> Result<(), InTransactionError> {
        let Shared { caller, policy, token, retention, staged } = &*self.shared;
        let kept = policy.seal.seal(caller, outcome.clone());
        let since = Instant::now();
        // The parts were measured when the request was let in.
        let Ok(id) = caller.identity() else { return Err(InTransactionError::Lost) };
        let completion =
            Completion { id, token: *token, outcome: kept.as_ref(), retention: *retention };
        match transaction.complete(completion).await {
            Ok(Landed::Done) => {}
            Ok(Landed::Lost(_)) => return Err(InTransactionError::Lost),
            Err(error) => return Err(InTransactionError::Tier(error)),
        }
        *staged.lock() = Some(Staged { plain: outcome, kept, since, is_committed: false });
        Ok(())
    }

    /// Says that the transaction was committed: the outcome is the response, whatever the handler
    /// returns. The status is the outcome's, for a handler that has nothing else to return.
    pub fn committed(&self) -> StatusCode {
        let mut staged = self.shared.staged.lock();
        let Some(staged) = &mut *staged else { return StatusCode::INTERNAL_SERVER_ERROR };
        staged.is_committed = true;
        StatusCode::from_u16(staged.plain.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    pub(super) fn take(&self) -> Option<Staged> {
        self.shared.staged.lock().take()
    }
}

/// Shows the token only.
impl fmt::Debug for InTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InTransaction").field("token", &self.shared.token).finish_non_exhaustive()
    }
}
