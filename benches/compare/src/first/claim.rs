//! What a claim is answered with, the owner's permit, and waiting for the owner.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use oncekey::{Fingerprint, Outcome};

use super::{
    clock::Millis,
    engine::{Engine, Met},
    record::Record,
    settle::Lost,
    waiters::{Gift, NoSeat, Ticket},
    word::View,
};

/// What a claim is answered with.
pub(crate) enum Claim {
    Won(Permit),
    Replay(Outcome),
    InFlight(Pending),
    Mismatch,
    /// Not kept, held, or refused: no work of the comparison leads here.
    Other,
}

/// What `met` means for the caller of a claim.
pub(super) fn answer(engine: &Arc<Engine>, met: Met, fingerprint: Fingerprint) -> Claim {
    match met {
        Met::Won(record, number) => Claim::Won(Permit::new(engine, record, number)),
        Met::Replay(answer) => Claim::Replay(answer.outcome),
        Met::InFlight(record) => {
            Claim::InFlight(Pending { engine: Arc::clone(engine), record, fingerprint })
        }
        Met::Mismatch => Claim::Mismatch,
        Met::NotKept | Met::Held | Met::Full => Claim::Other,
    }
}

/// What the owner of an identity holds. Dropped without a verb, it holds the identity.
pub(crate) struct Permit {
    engine: Arc<Engine>,
    record: Arc<Record>,
    number: u64,
    /// Whether a verb has taken the permit: dropping it then settles nothing.
    settled: bool,
}

impl Permit {
    fn new(engine: &Arc<Engine>, record: Arc<Record>, number: u64) -> Self {
        Self { engine: Arc::clone(engine), record, number, settled: false }
    }

    /// Finishes the work; false if there was no room to keep the outcome.
    pub(crate) fn complete(mut self, outcome: Outcome) -> Result<bool, Lost> {
        self.settled = true;
        self.engine.complete(&self.record, self.number, outcome)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.settled {
            // Lost means that somebody else has settled it: nothing is left to do.
            let _ = self.engine.hold(&self.record, self.number);
        }
    }
}

/// What a waiter is told in the end.
pub(crate) enum Settled {
    Completed(Outcome),
    /// Handed over; dropped by the comparison, in which nobody releases.
    Yours(#[expect(dead_code, reason = "only its drop matters")] Permit),
    Other,
}

/// A running owner, seen by a duplicate.
pub(crate) struct Pending {
    engine: Arc<Engine>,
    record: Arc<Record>,
    fingerprint: Fingerprint,
}

impl Pending {
    /// Waits as a task: a future that may be dropped at any time.
    pub(crate) fn wait(self) -> Wait {
        Wait { pending: self, ticket: None }
    }

    /// What the record says now: the end of the wait, or a seat.
    fn look(&mut self) -> Result<Ticket, Settled> {
        loop {
            let now = self.engine.now();
            let word = self.record.word();
            match word.view(now) {
                View::InFlight => match self.take_seat(now) {
                    Ok(ticket) => return Ok(ticket),
                    Err(NoSeat::LookAgain) => {}
                    Err(NoSeat::TooMany) => return Err(Settled::Other),
                },
                View::Completed => {
                    return Err(match self.engine.answer(&self.record, word, now) {
                        Some(answer) => {
                            super::engine::up(&self.engine.counters.replays);
                            Settled::Completed(answer.outcome)
                        }
                        None => Settled::Other,
                    });
                }
                View::NotKept | View::Held => return Err(Settled::Other),
                View::Lapsed | View::Gone => self.claim_anew()?,
            }
        }
    }

    fn take_seat(&self, now: Millis) -> Result<Ticket, NoSeat> {
        let mut deadline = now;
        let ticket = self.engine.waiters.join(&self.record, || {
            loop {
                let word = self.record.word();
                deadline = word.at();
                if word.view(now) != View::InFlight {
                    return false;
                }
                if word.has_waiters() || self.record.swap(word, word.with_waiters()).is_ok() {
                    return true;
                }
            }
        })?;
        self.engine.watch(&self.record, deadline);
        Ok(ticket)
    }

    /// The claim that was waited for is over: meets what is there now.
    fn claim_anew(&mut self) -> Result<(), Settled> {
        let frame = Arc::clone(self.record.frame());
        Err(match self.engine.claim(&frame, self.fingerprint) {
            Met::Won(record, number) => {
                self.record = Arc::clone(&record);
                Settled::Yours(Permit::new(&self.engine, record, number))
            }
            Met::Replay(answer) => Settled::Completed(answer.outcome),
            Met::InFlight(record) => {
                self.record = record;
                return Ok(());
            }
            _ => Settled::Other,
        })
    }
}

/// The future of [`Pending::wait`]. Dropping it only takes this waiter off the list.
pub(crate) struct Wait {
    pending: Pending,
    ticket: Option<Ticket>,
}

impl Future for Wait {
    type Output = Settled;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Settled> {
        let this = &mut *self;
        loop {
            let ticket = match &this.ticket {
                Some(ticket) => ticket,
                None => match this.pending.look() {
                    Ok(ticket) => this.ticket.insert(ticket),
                    Err(settled) => return Poll::Ready(settled),
                },
            };
            match ticket.seat.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Gift::LookAgain) => this.ticket = None,
                Poll::Ready(Gift::Permit(number)) => {
                    this.ticket = None;
                    let record = Arc::clone(&this.pending.record);
                    let permit = Permit::new(&this.pending.engine, record, number);
                    return Poll::Ready(Settled::Yours(permit));
                }
            }
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let Pending { engine, record, .. } = &self.pending;
        if let Some(Gift::Permit(number)) = engine.waiters.leave(record, &ticket) {
            // Nothing was done with it: to the next. Lost means that somebody settled it.
            let _ = engine.release(record, number);
        }
    }
}
