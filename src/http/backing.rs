//! What stands behind a layer: a store in memory, or one with a tier behind it.
//!
//! Ground rules: everything that the layer asks of a store in the way of a request goes to the
//! memory first, and is answered there without a task. Only what was won in memory is taken to the
//! tier, on the owner's task (R18).

use std::{fmt, time::Duration};

use tokio::time::Instant;

#[cfg(feature = "tier")]
use crate::tier::{
    Found, State, Tiered,
    owned::{Concluded, Owned},
    through,
};
use crate::{
    Claim, Entry, EntryState, Fingerprint, Identity, Outcome, Permit, Replay, Scheme, Store, Token,
};

use super::watch::Ending;
#[cfg(feature = "tier")]
use super::{
    attempt::Caller,
    in_transaction::{InTransaction, Staged},
    policy::Policy,
};
#[cfg(feature = "tier")]
use std::sync::Arc;

/// How soon one that waits without a claim of its own looks again at what another node does.
#[cfg(feature = "tier")]
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// The store behind an [`IdempotencyLayer`](super::IdempotencyLayer): a [`Store`], or, with the
/// feature `tier`, a [`Tiered`](crate::tier::Tiered). Made by `From`.
#[derive(Clone)]
pub struct Backing {
    store: Store,
    #[cfg(feature = "tier")]
    tiered: Option<Tiered>,
}

impl From<Store> for Backing {
    fn from(store: Store) -> Self {
        Self {
            store,
            #[cfg(feature = "tier")]
            tiered: None,
        }
    }
}

#[cfg(feature = "tier")]
impl From<Tiered> for Backing {
    fn from(tiered: Tiered) -> Self {
        Self { store: tiered.store().clone(), tiered: Some(tiered) }
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing").field("store", &self.store).finish_non_exhaustive()
    }
}

/// What the owner's task settles.
#[derive(Debug)]
pub(super) enum Claimed {
    Memory(Permit),
    #[cfg(feature = "tier")]
    Tier(Box<Owned>),
}

/// What came of a claim that was won in memory.
#[derive(Debug)]
pub(super) enum Entered {
    Yours(Claimed),
    /// Nothing is to run; this is what the client is told.
    #[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone lets everyone in"))]
    Told(Told),
}

/// Why nothing is to run.
#[derive(Debug)]
#[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone lets everyone in"))]
pub(super) enum Told {
    Replay(Replay),
    NotKept,
    Mismatch,
    Held,
    /// Another node runs it: claim again, and wait in memory.
    Elsewhere,
    Unavailable {
        retry_after: Duration,
    },
}

/// What became of a claim.
pub(super) struct Seen {
    pub(super) state: EntryState,
    pub(super) age: Duration,
    pub(super) remaining: Duration,
}

/// What is there for who has the key and not the request.
pub(super) enum There {
    Nothing,
    /// In memory.
    Here(Claim),
    /// In the tier alone, where another node runs it: nobody tells when it is done.
    #[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone knows all"))]
    Elsewhere {
        look_again: Duration,
    },
    /// In the tier alone.
    #[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone knows all"))]
    Outcome(Outcome),
    #[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone knows all"))]
    Unavailable {
        retry_after: Duration,
    },
}

/// How the owner ends it.
#[derive(Debug)]
pub(super) enum Verb {
    Complete(Outcome),
    CompleteNotKept,
    Release,
    ReleaseWith(Outcome),
}

/// The token was stale (R9). The outcome that was not stored comes along.
#[derive(Debug)]
pub(super) struct Stale(pub(super) Option<Outcome>);

impl Backing {
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// What became of an identity: where there is a tier, it knows. An error is the time after which
    /// to ask it again.
    pub(super) async fn look_up(&self, id: Identity<'_>) -> Result<Option<Seen>, Duration> {
        #[cfg(feature = "tier")]
        if let Some(tiered) = &self.tiered {
            let found = tiered.look_up(&id).await.map_err(|_| tiered.retry_after())?;
            return Ok(found.map(|Found { state, age, remaining, .. }| {
                let state = match state {
                    State::InFlight | State::Lapsed => EntryState::InFlight,
                    State::Held => EntryState::Held,
                    State::Completed(_) => EntryState::Completed,
                    State::NotKept => EntryState::NotKept,
                };
                Seen { state, age, remaining }
            }));
        }
        let seen = |Entry { state, age, remaining, .. }| Seen { state, age, remaining };
        Ok(self.store.look_up(&id).map(seen))
    }

    /// What is there, compared with no request. Claims nothing.
    pub(super) async fn there(&self, id: Identity<'_>) -> There {
        if let Some(claim) = self.store.observe_any(&id) {
            return There::Here(claim);
        }
        #[cfg(feature = "tier")]
        if let Some(tiered) = &self.tiered {
            let found = match tiered.look_up(&id).await {
                Ok(Some(found)) => found,
                Ok(None) => return There::Nothing,
                Err(_) => return There::Unavailable { retry_after: tiered.retry_after() },
            };
            return match found.state {
                State::InFlight | State::Lapsed => There::Elsewhere { look_again: LOOK_AGAIN },
                State::Completed(outcome) => There::Outcome(outcome),
                State::NotKept => There::Here(Claim::NotKept),
                State::Held => There::Here(Claim::Held),
            };
        }
        There::Nothing
    }

    /// Whether a claim that was won in memory has to [`enter`](Self::enter).
    #[cfg(feature = "tier")]
    pub(super) fn is_tiered(&self) -> bool {
        self.tiered.is_some()
    }

    /// Takes a claim that was won in memory to the tier, if there is one.
    pub(super) async fn enter(
        &self,
        permit: Permit,
        translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Entered {
        #[cfg(feature = "tier")]
        if let Some(tiered) = &self.tiered {
            return match tiered.through().enter(permit, translate).await {
                through::Entered::Yours(owned) => Entered::Yours(Claimed::Tier(Box::new(owned))),
                through::Entered::Replay(replay) => Entered::Told(Told::Replay(replay)),
                through::Entered::NotKept => Entered::Told(Told::NotKept),
                through::Entered::Mismatch => Entered::Told(Told::Mismatch),
                through::Entered::Held => Entered::Told(Told::Held),
                through::Entered::Elsewhere => Entered::Told(Told::Elsewhere),
                through::Entered::Unavailable { retry_after, .. } => {
                    Entered::Told(Told::Unavailable { retry_after })
                }
            };
        }
        let _ = translate;
        Entered::Yours(Claimed::Memory(permit))
    }

    /// Whether a mismatch that memory has told is one: as long as the claim there is on its way to a
    /// tier, that one may have the outcome of the other. `None`: claim again. `since` is when it was
    /// told first.
    pub(super) async fn judge(
        &self,
        id: Identity<'_>,
        own: Fingerprint,
        translate: impl FnMut(Scheme) -> Option<Fingerprint>,
        since: Instant,
    ) -> Option<Told> {
        #[cfg(feature = "tier")]
        if let Some(tiered) = &self.tiered {
            return match tiered.through().judge(id, own, translate, since).await {
                through::Judged::Mismatch => Some(Told::Mismatch),
                through::Judged::Again => None,
                through::Judged::Unavailable { retry_after, .. } => {
                    Some(Told::Unavailable { retry_after })
                }
            };
        }
        let _ = (id, own, translate, since);
        Some(Told::Mismatch)
    }
}

impl Claimed {
    pub(super) fn token(&self) -> Token {
        match self {
            Self::Memory(permit) => permit.token(),
            #[cfg(feature = "tier")]
            Self::Tier(owned) => owned.token(),
        }
    }

    /// What a handler needs to complete it in a transaction of its own.
    #[cfg(feature = "tier")]
    pub(super) fn in_transaction(
        &self,
        caller: &Arc<Caller>,
        policy: &Arc<Policy>,
    ) -> Option<InTransaction> {
        let Self::Tier(owned) = self else { return None };
        let (caller, policy) = (Arc::clone(caller), Arc::clone(policy));
        let retention = owned.retention();
        owned.is_in_tier().then(|| InTransaction::new(caller, policy, owned.token(), retention))
    }

    /// Follows what a handler's transaction has left.
    #[cfg(feature = "tier")]
    pub(super) async fn conclude(self, staged: Staged) -> Concluded {
        let Staged { kept, since, is_committed, .. } = staged;
        match self {
            Self::Tier(owned) => owned.conclude(kept, since, is_committed).await,
            // There is no tier that anything could have been staged in.
            Self::Memory(permit) => {
                drop(permit);
                Concluded::Unknown
            }
        }
    }

    /// Whether a handler that ended without an answer has committed what it staged is found out in
    /// the background. What is not in a tier comes back.
    #[cfg(feature = "tier")]
    pub(super) fn find_out(self, staged: Staged) -> Option<Self> {
        match self {
            Self::Tier(owned) => {
                owned.find_out(staged.kept, staged.since);
                None
            }
            memory @ Self::Memory(_) => Some(memory),
        }
    }

    /// Nothing was done, and nobody can wait for it. Lost means that somebody else has settled it.
    pub(super) fn give_up(self) {
        match self {
            Self::Memory(permit) => drop(permit.release()),
            #[cfg(feature = "tier")]
            Self::Tier(owned) => owned.give_up(),
        }
    }

    /// Settles what is in memory alone. What is in a tier comes back, with the verb.
    pub(super) fn settle_at_once(self, verb: Verb) -> Result<Result<Ending, Stale>, InTier> {
        let permit = match self {
            Self::Memory(permit) => permit,
            #[cfg(feature = "tier")]
            Self::Tier(owned) => return Err(InTier { owned, verb }),
        };
        let result = match verb {
            Verb::Complete(outcome) => permit.complete(outcome).map(ending),
            Verb::CompleteNotKept => permit.complete_not_kept().map(ending),
            Verb::Release => permit.release().map(|()| Ending::Released),
            Verb::ReleaseWith(answer) => permit.release_with(answer).map(|()| Ending::Released),
        };
        Ok(result.map_err(|lost| Stale(lost.into_outcome())))
    }

    pub(super) async fn settle(self, verb: Verb) -> Result<Ending, Stale> {
        match self.settle_at_once(verb) {
            Ok(result) => result,
            Err(in_tier) => in_tier.settle().await,
        }
    }
}

/// What is to be settled in a tier too.
#[cfg(not(feature = "tier"))]
pub(super) enum InTier {}

#[cfg(not(feature = "tier"))]
impl InTier {
    pub(super) async fn settle(self) -> Result<Ending, Stale> {
        match self {}
    }
}

/// What is to be settled in a tier too.
#[cfg(feature = "tier")]
pub(super) struct InTier {
    owned: Box<Owned>,
    verb: Verb,
}

#[cfg(feature = "tier")]
impl InTier {
    pub(super) async fn settle(self) -> Result<Ending, Stale> {
        let Self { owned, verb } = self;
        match verb {
            Verb::Complete(outcome) => owned.complete(Some(outcome)).await.map(ending),
            Verb::CompleteNotKept => owned.complete(None).await.map(ending),
            Verb::Release => owned.release(None).await.map(|()| Ending::Released),
            Verb::ReleaseWith(answer) => {
                owned.release(Some(answer)).await.map(|()| Ending::Released)
            }
        }
        .map_err(|stale| Stale(stale.outcome))
    }
}

fn ending(completed: crate::Completed) -> Ending {
    if completed.kept { Ending::Kept } else { Ending::NotKept }
}
