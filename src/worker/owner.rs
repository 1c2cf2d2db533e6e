//! Being the owner: the guard around the work, and how what the work says settles the key.
//!
//! Ground rules:
//!
//! 1. From a won claim on there is an [`Owner`], and it settles when dropped: what had not begun is
//!    given up; what stands in a transaction is found out; the rest is settled by `on_abandon` (R11).
//! 2. What stands in a transaction decides, whatever the work says (T6).
//! 3. What the work has said is told to the tier by a task of its own: a caller that leaves does
//!    not cut it off.
//!
//! ```text
//!                 nothing staged      staged in a transaction
//! Done            complete            hold, unless it was committed
//! Committed       hold                publish
//! Retry           release             release, unless it was committed
//! Unknown         hold                hold, unless it was committed
//! panic, dropped  on_abandon          release, unless it was committed
//! ```
//!
//! A release after a checkpoint is a lapse: the checkpoint goes to the next owner. Where a lapse is
//! held (`Lapse::Hold`), it is a release.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::{
    job::{Job, Staged},
    verdict::{Cause, Ran, RunError, Verdict},
};
use crate::{
    Completed, Outcome, Permit, Store,
    tier::{
        TieredPermit,
        owned::{Concluded, Owned, Stale},
    },
};

enum Claimed {
    Memory { permit: Permit, store: Store },
    Tier(Box<Owned>),
}

/// The owner of a key whose work runs, or is about to.
pub(super) struct Owner {
    /// `None` once settled.
    claimed: Option<Claimed>,
    job: Job,
    has_begun: bool,
}

/// How the key is settled.
pub(super) enum Ending {
    Said(Verdict),
    /// Done, but the outcome cannot be written.
    NotKept,
}

impl Owner {
    pub(super) fn in_memory(permit: Permit, store: Store, index: usize) -> Self {
        // The lease counts as renewed as long as the permit lives (R8). Lost already: then the verb
        // at the end says so.
        let _ = permit.attend();
        let job = Job::in_memory(permit.identity(), permit.token(), index);
        Self { claimed: Some(Claimed::Memory { permit, store }), job, has_begun: false }
    }

    pub(super) fn in_tier(permit: TieredPermit, index: usize) -> Self {
        let mut owned = permit.into_owned();
        let job = Job::in_tier(&mut owned, index);
        Self { claimed: Some(Claimed::Tier(Box::new(owned))), job, has_begun: false }
    }

    /// The work begins.
    pub(super) fn begin(&mut self) -> Job {
        self.has_begun = true;
        self.job.clone()
    }

    /// Settles the key by what the work has said: in memory at once, in a tier by a task.
    pub(super) fn settle(mut self, ending: Ending) -> Settling {
        match self.claimed.take() {
            None => Settling::Told(Err(RunError::InFlight)),
            Some(Claimed::Memory { permit, store }) => {
                Settling::Told(settle_in_memory(permit, &store, ending))
            }
            Some(Claimed::Tier(owned)) => {
                let staged = self.job.take_staged();
                // Rule 3.
                let runtime = owned.through().runtime.clone();
                Settling::Task(runtime.spawn(settle_in_tier(*owned, staged, ending)))
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        match (self.claimed.take(), self.job.take_staged()) {
            (None, _) => {}
            // Lost means that somebody else has settled it.
            (Some(Claimed::Memory { permit, .. }), _) if !self.has_begun => {
                let _ = permit.release();
            }
            (Some(Claimed::Tier(owned)), _) if !self.has_begun => owned.give_up(),
            (Some(Claimed::Tier(owned)), Some(staged)) => {
                owned.find_out(Some(staged.outcome), staged.since);
            }
            (Some(abandoned), _) => drop(abandoned),
        }
    }
}

/// A key on its way to be settled. It goes on if this is dropped.
pub(super) enum Settling {
    Told(Result<Ran, RunError>),
    Task(JoinHandle<Result<Ran, RunError>>),
}

impl Settling {
    pub(super) async fn done(self) -> Result<Ran, RunError> {
        match self {
            Self::Told(told) => told,
            // An error: the runtime ends, and the process with it.
            Self::Task(task) => task.await.unwrap_or(Err(RunError::InFlight)),
        }
    }
}

fn settle_in_memory(permit: Permit, store: &Store, ending: Ending) -> Result<Ran, RunError> {
    let lost = |lost: crate::Lost| RunError::Lost(lost.into_outcome());
    match ending {
        Ending::Said(Verdict::Done(outcome)) => match permit.complete(outcome.clone()) {
            Ok(completed) => Ok(first(outcome, completed)),
            Err(stale) => {
                store.note_double_run();
                Err(lost(stale))
            }
        },
        Ending::Said(Verdict::Retry(cause)) => {
            permit.release().map_err(lost)?;
            Err(RunError::Retry(cause))
        }
        Ending::Said(Verdict::Unknown(cause)) => {
            permit.hold().map_err(lost)?;
            Err(RunError::Unknown(cause))
        }
        Ending::Said(Verdict::Committed) => {
            permit.hold().map_err(lost)?;
            Err(RunError::Unknown(nothing_staged()))
        }
        Ending::NotKept => {
            permit.complete_not_kept().map_err(lost)?;
            Err(RunError::NotKept)
        }
    }
}

async fn settle_in_tier(
    owned: Owned,
    staged: Option<Staged>,
    ending: Ending,
) -> Result<Ran, RunError> {
    let lost = |stale: Stale| RunError::Lost(stale.outcome);
    match (ending, staged) {
        (Ending::Said(Verdict::Done(outcome)), None) => {
            let completed = owned.complete(Some(outcome.clone())).await.map_err(lost)?;
            Ok(first(outcome, completed))
        }
        (Ending::NotKept, None) => {
            owned.complete(None).await.map_err(lost)?;
            Err(RunError::NotKept)
        }
        (Ending::Said(Verdict::Retry(cause)), None) => {
            owned.hand_on().await.map_err(lost)?;
            Err(RunError::Retry(cause))
        }
        (Ending::Said(Verdict::Unknown(cause)), None) => {
            owned.hold().await.map_err(lost)?;
            Err(RunError::Unknown(cause))
        }
        (Ending::Said(Verdict::Committed), None) => {
            owned.hold().await.map_err(lost)?;
            Err(RunError::Unknown(nothing_staged()))
        }
        (Ending::Said(Verdict::Committed), Some(Staged { outcome, since })) => {
            let concluded = owned.conclude(Some(outcome.clone()), since, true).await;
            concluded_as(concluded, outcome, RunError::Retry(nothing_staged()))
        }
        (Ending::Said(Verdict::Retry(cause)), Some(Staged { outcome, since })) => {
            let concluded = owned.conclude(Some(outcome.clone()), since, false).await;
            concluded_as(concluded, outcome, RunError::Retry(cause))
        }
        (ending, Some(Staged { outcome, since })) => {
            let cause = match ending {
                Ending::Said(Verdict::Unknown(cause)) => cause,
                _ => text(
                    "the work said `Done`, but the transaction that it completed the key in was \
                     rolled back; after the commit, say `Committed`",
                ),
            };
            let concluded = owned.hold_unless_committed(Some(outcome.clone()), since).await;
            concluded_as(concluded, outcome, RunError::Unknown(cause))
        }
    }
}

/// What the caller is told of a transaction.
fn concluded_as(
    concluded: Concluded,
    outcome: Outcome,
    rolled_back: RunError,
) -> Result<Ran, RunError> {
    match concluded {
        Concluded::Committed { completed, outcome: Some(outcome) } => Ok(first(outcome, completed)),
        Concluded::Committed { outcome: None, .. } => Err(RunError::NotKept),
        Concluded::RolledBack => Err(rolled_back),
        Concluded::Lost => Err(RunError::Lost(Some(outcome))),
        // It is found out in the background.
        Concluded::Unknown => Err(RunError::InFlight),
    }
}

fn first(outcome: Outcome, completed: Completed) -> Ran {
    Ran { outcome, replayed: false, kept: completed.kept }
}

fn nothing_staged() -> Cause {
    text("the work said `Committed`, but it had completed nothing by `Job::complete_in`")
}

fn text(cause: &str) -> Cause {
    Arc::from(Box::<dyn std::error::Error + Send + Sync>::from(cause))
}
