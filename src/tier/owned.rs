//! A claim that is in memory and in the tier: its verbs, which tell the tier first.
//!
//! Ground rules: whoever drops one of these futures leaves a guard, so that the tier and the memory are
//! told all the same (T8). A verb takes the claim, so none can follow it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use backon::Retryable;
use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::{
    Found, Landed, State, TierError,
    through::{Settings, Through, Unwritten, backoff, watch},
};
use crate::{Abandon, Completed, Identity, Lapse, Outcome, Permit, Token, identity::Frame};

/// A claim that is in memory and in the tier. Dropping it settles it by `on_abandon`.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(super) through: Arc<Through>,
    pub(super) frame: Frame,
    pub(super) token: Token,
    /// `None` once settled.
    pub(super) permit: Option<Permit>,
    pub(super) checkpoint: Option<Bytes>,
    /// Whether the tier may have something for the next owner.
    pub(super) has_checkpoint: Arc<AtomicBool>,
    /// Whether the tier knows of the claim: not if it was opened in spite of an outage.
    pub(super) is_in_tier: bool,
}

/// A step that lost its token, and what was to be stored.
#[derive(Debug)]
pub(crate) struct Stale {
    pub(crate) outcome: Option<Outcome>,
    /// Boxed, because it is rare and large.
    pub(crate) found: Option<Box<Found>>,
}

/// What became of a transaction.
#[derive(Debug)]
#[cfg_attr(
    not(any(feature = "http", feature = "worker")),
    expect(dead_code, reason = "what was found out in the background is told to nobody")
)]
pub(crate) enum Concluded {
    /// With the outcome that stands there.
    Committed {
        completed: Completed,
        #[cfg_attr(not(feature = "worker"), expect(dead_code, reason = "handlers know theirs"))]
        outcome: Option<Outcome>,
    },
    RolledBack,
    Lost,
    /// The identity is in flight until it is known.
    Unknown,
}

impl Owned {
    pub(crate) fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn identity(&self) -> Identity<'_> {
        Identity::from_frame(&self.frame)
    }

    pub(crate) fn take_checkpoint(&mut self) -> Option<Bytes> {
        self.checkpoint.take()
    }

    /// Finishes the work: first in the tier, then in memory (T1). An outcome that the tier could not
    /// be told is published all the same, for as long as nobody else may run it.
    pub(crate) async fn complete(mut self, outcome: Option<Outcome>) -> Result<Completed, Stale> {
        let through = Arc::clone(&self.through);
        let frame = self.frame.clone();
        let retention = through.settings.retention;
        let sent = Instant::now();
        // Until the answer is there it is not known whether it has landed: dropped here, it is told
        // again.
        let mut completing = Completing { owned: &mut self, outcome: Some(outcome) };
        let landed = match &completing.outcome {
            Some(outcome) if completing.owned.is_in_tier => {
                let id = Identity::from_frame(&frame);
                let token = completing.owned.token;
                through.ask(through.tier.complete(id, token, outcome.as_ref(), retention)).await
            }
            _ => Ok(Landed::Done),
        };
        let outcome = completing.outcome.take().flatten();
        drop(completing);
        let Some(permit) = self.permit.take() else {
            return Err(Stale { outcome, found: None });
        };
        match landed {
            Ok(Landed::Done) => {
                self.permit = Some(permit);
                self.publish(outcome, sent)
            }
            Ok(Landed::Lost(found)) => {
                self.permit = Some(permit);
                Err(self.lose(outcome, found, sent))
            }
            Err(_) => Ok(through.publish_unwritten(permit, frame, self.token, outcome)),
        }
    }

    #[cfg(any(feature = "http", feature = "worker"))]
    pub(crate) fn is_in_tier(&self) -> bool {
        self.is_in_tier
    }

    #[cfg(feature = "worker")]
    pub(crate) fn through(&self) -> &Arc<Through> {
        &self.through
    }

    #[cfg(feature = "worker")]
    pub(crate) fn has_checkpoint(&self) -> &Arc<AtomicBool> {
        &self.has_checkpoint
    }

    /// How the identity is given up to whoever comes next. What was left by a checkpoint stays for
    /// that one, unless a lapse would be held: then the work begins at its beginning.
    fn giving_up(&self) -> Unwritten {
        let is_resumed = self.through.settings.on_lapse == Lapse::TakeOver;
        if is_resumed && self.has_checkpoint.load(Ordering::Relaxed) {
            Unwritten::Lapse
        } else {
            Unwritten::Release
        }
    }

    pub(crate) fn retention(&self) -> Duration {
        self.through.settings.retention
    }

    /// The token is stale: memory follows what the tier has found at `asked`.
    pub(crate) fn lose(
        mut self,
        outcome: Option<Outcome>,
        found: Option<Found>,
        asked: Instant,
    ) -> Stale {
        let through = Arc::clone(&self.through);
        through.note_lost(found.as_ref());
        let stale = Stale { outcome, found: found.clone().map(Box::new) };
        let Some(permit) = self.permit.take() else { return stale };
        match found {
            Some(Found { state, age, remaining, .. })
                if matches!(state, State::Completed(_) | State::NotKept) =>
            {
                through.settle_as(permit, &self.frame, state, age, remaining, asked);
            }
            // Another owner runs: those who wait here, and this caller, wait for that one.
            Some(Found { state: State::InFlight, token, .. }) => {
                let runtime = through.runtime.clone();
                runtime.spawn(watch(through, permit, self.frame.clone(), token));
            }
            _ => drop(permit.release()),
        }
        stale
    }

    /// The tier has the outcome since some time after `asked`.
    pub(crate) fn publish(
        mut self,
        outcome: Option<Outcome>,
        asked: Instant,
    ) -> Result<Completed, Stale> {
        let Some(permit) = self.permit.take() else { return Err(Stale { outcome, found: None }) };
        let remaining = self.retention().saturating_sub(asked.elapsed());
        let given = outcome.clone();
        permit.complete_for(outcome, remaining).map_err(|_| Stale { outcome: given, found: None })
    }

    /// What became of the transaction that completes the record, if that is found out soon; else it
    /// is found out in the background. Rolled back, the identity is given up.
    #[cfg(any(feature = "http", feature = "worker"))]
    pub(crate) async fn conclude(
        self,
        outcome: Option<Outcome>,
        since: Instant,
        is_committed: bool,
    ) -> Concluded {
        if is_committed {
            return self.committed(outcome, since);
        }
        let step = self.giving_up();
        self.ask_transaction(step, outcome, since).await
    }

    /// As [`conclude`](Self::conclude) of what may have been committed; rolled back, it is held.
    #[cfg(feature = "worker")]
    pub(crate) async fn hold_unless_committed(
        self,
        outcome: Option<Outcome>,
        since: Instant,
    ) -> Concluded {
        self.ask_transaction(Unwritten::Hold, outcome, since).await
    }

    #[cfg(any(feature = "http", feature = "worker"))]
    async fn ask_transaction(
        self,
        step: Unwritten,
        outcome: Option<Outcome>,
        since: Instant,
    ) -> Concluded {
        match self.try_step(&step).await {
            Ok(landed) => self.follow(&step, landed, outcome, since),
            Err(_) => {
                self.find_out_by(step, outcome, since);
                Concluded::Unknown
            }
        }
    }

    /// Nobody knows whether the transaction was committed that completes the record. A release waits
    /// for it (rule 6 of the contract): done, it was rolled back; lost, it was committed.
    pub(crate) fn find_out(self, outcome: Option<Outcome>, since: Instant) {
        let step = self.giving_up();
        self.find_out_by(step, outcome, since);
    }

    fn find_out_by(self, step: Unwritten, outcome: Option<Outcome>, since: Instant) {
        let through = Arc::clone(&self.through);
        through.runtime.clone().spawn(async move {
            let Settings { retention, max_run, .. } = through.settings;
            let step_of = || self.try_step(&step);
            let landed = step_of.retry(backoff(max_run.saturating_add(retention))).await;
            // Else it is dropped: held, or what the setting says.
            if let Ok(landed) = landed {
                self.follow(&step, landed, outcome, since);
            }
        });
    }

    /// A step that waits for a transaction. Not behind the circuit: that a transaction takes long says
    /// nothing of the tier.
    async fn try_step(&self, step: &Unwritten) -> Result<Landed, TierError> {
        let Settings { answer_within, retention, .. } = self.through.settings;
        let (tier, id) = (&self.through.tier, self.identity());
        let answer = match step {
            Unwritten::Hold => tier.hold(id, self.token, retention),
            Unwritten::Lapse => tier.lapse(id, self.token),
            _ => tier.release(id, self.token),
        };
        let late = |_| Err(TierError::unavailable("the transaction is open"));
        let landed = timeout(answer_within, answer).await.unwrap_or_else(late)?;
        Ok(self.unless_repeated(step, landed))
    }

    /// A lapse whose answer was lost, and that is made again, has been done.
    fn unless_repeated(&self, step: &Unwritten, landed: Landed) -> Landed {
        let lapsed = Token::new(0, self.token.number());
        match &landed {
            Landed::Lost(Some(found))
                if matches!(step, Unwritten::Lapse)
                    && found.token == lapsed
                    && found.state == State::Lapsed =>
            {
                Landed::Done
            }
            _ => landed,
        }
    }

    /// Memory follows what a step has found out of a transaction.
    fn follow(
        mut self,
        step: &Unwritten,
        landed: Landed,
        outcome: Option<Outcome>,
        since: Instant,
    ) -> Concluded {
        let is_held = matches!(step, Unwritten::Hold);
        match landed {
            Landed::Lost(Some(found)) if found.token == self.token => {
                // One of several transactions, and not always the one that was staged last.
                let outcome = match found.state {
                    State::Completed(committed) => Some(committed),
                    State::NotKept => None,
                    _ => outcome,
                };
                self.committed(outcome, since)
            }
            Landed::Lost(found) if found.is_some() || is_held => {
                drop(self.lose(outcome, found, since));
                Concluded::Lost
            }
            Landed::Done | Landed::Lost(_) => {
                if let Some(permit) = self.permit.take() {
                    if is_held {
                        self.through.shut(permit, &self.frame);
                    } else {
                        let _ = permit.release();
                    }
                }
                Concluded::RolledBack
            }
        }
    }

    fn committed(self, outcome: Option<Outcome>, since: Instant) -> Concluded {
        match self.publish(outcome.clone(), since) {
            Ok(completed) => Concluded::Committed { completed, outcome },
            Err(_) => Concluded::Lost,
        }
    }

    /// Gives the identity up, with an answer for those who wait here.
    pub(crate) async fn release(self, answer: Option<Outcome>) -> Result<(), Stale> {
        self.give_up_by(Unwritten::Release, answer).await
    }

    /// Gives the identity up to the next owner, who gets what was left by a checkpoint.
    #[cfg(feature = "worker")]
    pub(crate) async fn hand_on(self) -> Result<(), Stale> {
        let step = self.giving_up();
        self.give_up_by(step, None).await
    }

    async fn give_up_by(mut self, step: Unwritten, answer: Option<Outcome>) -> Result<(), Stale> {
        let landed = self.step(step).await;
        let Some(permit) = self.permit.take() else { return Ok(()) };
        let _ = match answer {
            Some(answer) => permit.release_with(answer),
            None => permit.release(),
        };
        match landed {
            // Gone already is as good as given up.
            Landed::Done | Landed::Lost(None) => Ok(()),
            Landed::Lost(found) => Err(Stale { outcome: None, found: found.map(Box::new) }),
        }
    }

    /// Keeps the identity shut.
    pub(crate) async fn hold(mut self) -> Result<(), Stale> {
        let sent = Instant::now();
        let landed = self.step(Unwritten::Hold).await;
        if let Some(permit) = self.permit.take() {
            match &landed {
                // It is done: memory follows the tier at once.
                Landed::Lost(Some(Found { state, age, remaining, .. }))
                    if matches!(state, State::Completed(_) | State::NotKept) =>
                {
                    let state = state.clone();
                    self.through.settle_as(permit, &self.frame, state, *age, *remaining, sent);
                }
                _ => self.through.shut(permit, &self.frame),
            }
        }
        match landed {
            Landed::Done => Ok(()),
            Landed::Lost(found) => Err(Stale { outcome: None, found: found.map(Box::new) }),
        }
    }

    /// Tells the tier; what it cannot be told now is told later.
    async fn step(&mut self, step: Unwritten) -> Landed {
        if !self.is_in_tier {
            return Landed::Done;
        }
        let id = Identity::from_frame(&self.frame);
        let answer = match step {
            Unwritten::Hold => {
                self.through.tier.hold(id, self.token, self.through.settings.retention)
            }
            Unwritten::Lapse => self.through.tier.lapse(id, self.token),
            _ => self.through.tier.release(id, self.token),
        };
        match self.through.ask(answer).await {
            // A connection may have made it twice by itself.
            Ok(landed) => self.unless_repeated(&step, landed),
            Err(_) => {
                self.through.write_later(self.frame.clone(), self.token, step);
                Landed::Done
            }
        }
    }

    /// Gives the identity up without waiting for the tier: nothing was done.
    #[cfg(any(feature = "http", feature = "worker"))]
    pub(crate) fn give_up(mut self) {
        let Some(permit) = self.permit.take() else { return };
        if self.is_in_tier {
            self.through.write_later(self.frame.clone(), self.token, self.giving_up());
        }
        let _ = permit.release();
    }

    /// Leaves `bytes` for the next owner, should this one vanish.
    pub(crate) async fn leave_checkpoint(&self, bytes: Bytes) -> Result<Landed, TierError> {
        let id = Identity::from_frame(&self.frame);
        self.has_checkpoint.store(true, Ordering::Relaxed);
        self.through.ask(self.through.tier.checkpoint(id, self.token, bytes)).await
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        let step = match self.through.settings.on_abandon {
            Abandon::Hold => Unwritten::Hold,
            Abandon::Release => self.giving_up(),
        };
        if self.is_in_tier {
            self.through.write_later(self.frame.clone(), self.token, step);
        }
        drop(permit);
    }
}

/// A completion on its way. Dropped before it is answered, it is told again, and memory publishes.
struct Completing<'a> {
    owned: &'a mut Owned,
    /// `None` once answered.
    outcome: Option<Option<Outcome>>,
}

impl Drop for Completing<'_> {
    fn drop(&mut self) {
        let Some(outcome) = self.outcome.take() else { return };
        let Some(permit) = self.owned.permit.take() else { return };
        let Owned { through, frame, token, .. } = &*self.owned;
        through.publish_unwritten(permit, frame.clone(), *token, outcome);
    }
}
