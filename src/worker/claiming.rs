//! From an attempt to an owner, or to what another owner has left: claim, wait, claim again.
//!
//! Ground rules: a future that is dropped here leaves nothing behind; what was won is an [`Owner`]
//! from the first moment on. The twins differ in how they wait, and in nothing else.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{
    Backing,
    owner::Owner,
    verdict::{Cause, Ran, RunError},
};
use crate::{
    Claim, ClaimError, Fingerprint, Identity, Outcome, Pending, Replay, Settled, Store,
    tier::{Tiered, TieredClaim, TieredError, TieredPending, TieredSettled},
};

/// A point in time so far ahead that it is none, where adding would overflow.
const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// What a claim has met.
pub(super) enum Met {
    /// The work is to run.
    Own(Owner),
    /// There is nothing to run.
    Over(Result<Ran, RunError>),
    /// Another owner runs.
    Waits(Waits),
}

/// The view of another owner.
pub(super) enum Waits {
    Memory(Pending),
    Tier(TieredPending),
}

/// Until when to wait for other owners.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn after(limit: Duration) -> Self {
        Self(Instant::now() + limit.min(FAR))
    }

    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

impl Backing {
    /// Claims once, without waiting.
    pub(super) async fn claim(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        index: usize,
    ) -> Met {
        match self {
            Self::Memory(store) => met(store, store.claim(id, fingerprint), index),
            Self::Tier(tiered) => met_in_tier(tiered.claim(id, fingerprint).await, index),
        }
    }

    /// Claims, waits for others, and claims again.
    pub(super) async fn own(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        deadline: Deadline,
    ) -> Result<Owner, Result<Ran, RunError>> {
        loop {
            let waits = match self.claim(id, fingerprint, 0).await {
                Met::Own(owner) => return Ok(owner),
                Met::Over(told) => return Err(told),
                Met::Waits(waits) => waits,
            };
            match self.wait(waits, deadline, 0).await {
                Some(Met::Own(owner)) => return Ok(owner),
                Some(Met::Over(told)) => return Err(told),
                Some(Met::Waits(_)) | None => {}
            }
        }
    }

    /// Waits for another owner. `None`: its lease has lapsed, claim again.
    pub(super) async fn wait(&self, waits: Waits, deadline: Deadline, index: usize) -> Option<Met> {
        if deadline.left().is_zero() {
            return Some(Met::Over(Err(RunError::InFlight)));
        }
        match (waits, self) {
            (Waits::Memory(pending), Self::Memory(store)) => {
                // At least a millisecond, so that a lease that is about to lapse does not spin.
                let nap = pending.remaining().max(Duration::from_millis(1));
                let lapse = Deadline::after(nap);
                let mut waiting = pending.wait();
                match timeout_at(deadline.0.min(lapse.0), &mut waiting).await {
                    Ok(settled) => Some(settled_as(store, settled, index)),
                    // What came in the very last moment is not thrown away.
                    Err(_) => match waiting.into_pending() {
                        Err(settled) => Some(settled_as(store, settled, index)),
                        Ok(_) if deadline.left().is_zero() => {
                            Some(Met::Over(Err(RunError::InFlight)))
                        }
                        Ok(_) => None,
                    },
                }
            }
            (Waits::Tier(pending), _) => {
                // Given up, it leaves nothing behind. The watcher sees a lapse of another node.
                let settled = timeout_at(deadline.0, pending.wait()).await;
                Some(settled.map_or(Met::Over(Err(RunError::InFlight)), |settled| {
                    settled_in_tier(settled, index)
                }))
            }
            // There is no pending of the memory where a tier is asked.
            (Waits::Memory(_), Self::Tier(_)) => Some(Met::Over(Err(RunError::InFlight))),
        }
    }
}

/// As [`Backing::own`], in memory, by a thread.
pub(super) fn own_blocking(
    store: &Store,
    id: &Identity<'_>,
    fingerprint: Fingerprint,
    deadline: Deadline,
) -> Result<Owner, Result<Ran, RunError>> {
    match met(store, store.claim(id, fingerprint), 0) {
        Met::Own(owner) => Ok(owner),
        Met::Over(told) => Err(told),
        Met::Waits(waits) => match wait_blocking(store, waits, deadline, 0) {
            Met::Own(owner) => Ok(owner),
            Met::Over(told) => Err(told),
            Met::Waits(_) => Err(Err(RunError::InFlight)),
        },
    }
}

/// As [`Backing::wait`], in memory, by a thread. It claims again by itself.
pub(super) fn wait_blocking(store: &Store, waits: Waits, deadline: Deadline, index: usize) -> Met {
    match waits {
        Waits::Memory(pending) => match pending.wait_timeout(deadline.left()) {
            Ok(settled) => settled_as(store, settled, index),
            Err(_) => Met::Over(Err(RunError::InFlight)),
        },
        Waits::Tier(_) => Met::Over(Err(RunError::InFlight)),
    }
}

/// What the memory's answer to a claim means.
pub(super) fn met(store: &Store, claim: Result<Claim, ClaimError>, index: usize) -> Met {
    Met::Over(match claim {
        Ok(Claim::Won(permit)) => {
            return Met::Own(Owner::in_memory(permit, store.clone(), index));
        }
        Ok(Claim::InFlight(pending)) => return Met::Waits(Waits::Memory(pending)),
        Ok(Claim::Replay(replay)) => replayed(replay),
        Ok(Claim::NotKept) => Err(RunError::NotKept),
        Ok(Claim::Mismatch) => Err(RunError::Mismatch),
        Ok(Claim::Held) => Err(RunError::Held),
        Err(error) => Err(error.into()),
    })
}

fn settled_as(store: &Store, settled: Settled, index: usize) -> Met {
    Met::Over(match settled {
        Settled::Yours(permit) => return Met::Own(Owner::in_memory(permit, store.clone(), index)),
        Settled::Completed(replay) => replayed(replay),
        Settled::Answered(answer) => Err(RunError::Retry(given_up(&answer))),
        Settled::NotKept => Err(RunError::NotKept),
        Settled::Mismatch => Err(RunError::Mismatch),
        Settled::Held => Err(RunError::Held),
        Settled::TooMany => Err(RunError::InFlight),
        Settled::Refused(error) => Err(error.into()),
    })
}

fn met_in_tier(claim: Result<TieredClaim, TieredError>, index: usize) -> Met {
    Met::Over(match claim {
        Ok(TieredClaim::Won(permit)) => return Met::Own(Owner::in_tier(permit, index)),
        Ok(TieredClaim::InFlight(pending)) => return Met::Waits(Waits::Tier(pending)),
        Ok(TieredClaim::Replay(replay)) => replayed(replay),
        Ok(TieredClaim::NotKept) => Err(RunError::NotKept),
        Ok(TieredClaim::Mismatch) => Err(RunError::Mismatch),
        Ok(TieredClaim::Held) => Err(RunError::Held),
        Err(error) => Err(error.into()),
    })
}

fn settled_in_tier(settled: Result<TieredSettled, TieredError>, index: usize) -> Met {
    Met::Over(match settled {
        Ok(TieredSettled::Yours(permit)) => return Met::Own(Owner::in_tier(permit, index)),
        Ok(TieredSettled::Completed(replay)) => replayed(replay),
        Ok(TieredSettled::Answered(answer)) => Err(RunError::Retry(given_up(&answer))),
        Ok(TieredSettled::NotKept) => Err(RunError::NotKept),
        Ok(TieredSettled::Mismatch) => Err(RunError::Mismatch),
        Ok(TieredSettled::Held) => Err(RunError::Held),
        Ok(TieredSettled::TooMany) => Err(RunError::InFlight),
        Err(error) => Err(error.into()),
    })
}

fn replayed(replay: Replay) -> Result<Ran, RunError> {
    Ok(Ran { outcome: replay.into_outcome(), replayed: true, kept: true })
}

fn given_up(answer: &Outcome) -> Cause {
    let cause = format!("its owner gave the key up with status {}", answer.status());
    Cause::from(Box::<dyn std::error::Error + Send + Sync>::from(cause))
}

impl From<TieredError> for RunError {
    fn from(error: TieredError) -> Self {
        match error {
            TieredError::Memory(error) => Self::Refused(error),
            TieredError::Unavailable { error, retry_after } => {
                Self::Unavailable { error: error.into(), retry_after }
            }
        }
    }
}

impl Tiered {
    pub(super) fn runtime(&self) -> &tokio::runtime::Handle {
        &self.through().runtime
    }
}
