//! What a claim is answered with, and waiting for the owner.
//!
//! Ground rules: a [`Wait`] holds at most one seat in the waiters' list and gives it up when it is
//! dropped; a permit that was meant for it goes to the next (R14). A waiter is woken with what the
//! owner left, so that an old waiter gets the old outcome; only if the claim is over without one
//! does it claim anew.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

use crate::{
    clock::Timer,
    engine::{Answer, Asked, Hold, Met, Running},
    error::ClaimError,
    fingerprint::{Fingerprint, Scheme},
    identity::{Frame, Identity},
    outcome::Outcome,
    permit::Permit,
    sync::{Arc, AtomicBool, Ordering},
    waiters::{Gift, Ticket},
};

/// What [`Store::claim`](crate::Store::claim) answers: the caller is the owner, or this is there.
///
#[doc = include_str!("../docs/drawings/key.svg")]
#[derive(Debug)]
#[must_use = "a claim that was won and dropped holds its identity"]
pub enum Claim {
    /// The caller is the owner and runs the work.
    Won(Permit),
    /// The work is done; this is its outcome.
    Replay(Replay),
    /// The work is done, but its answer was not kept.
    NotKept,
    /// An owner runs; wait for it.
    InFlight(Pending),
    /// The identity is taken by an attempt with another fingerprint (R5).
    Mismatch,
    /// Nobody knows whether the work was done (R11), or the record's fingerprint was made by a
    /// scheme that cannot be compared with (R4).
    Held,
}

/// A stored outcome.
#[derive(Debug)]
pub struct Replay {
    answer: Answer,
}

impl Replay {
    /// An outcome that was stored elsewhere.
    #[cfg(feature = "tier")]
    pub(crate) fn new(outcome: Outcome, age: Duration, remaining: Duration) -> Self {
        Self { answer: Answer { outcome, age, remaining } }
    }

    /// The outcome, shared with the store.
    pub fn outcome(&self) -> &Outcome {
        &self.answer.outcome
    }

    /// The outcome, shared with the store.
    pub fn into_outcome(self) -> Outcome {
        self.answer.outcome
    }

    /// The time since the work was completed.
    pub fn age(&self) -> Duration {
        self.answer.age
    }

    /// The time until the outcome's retention ends.
    pub fn remaining(&self) -> Duration {
        self.answer.remaining
    }
}

/// What a waiter is told in the end.
#[derive(Debug)]
#[must_use = "a permit in it that is dropped holds its identity"]
#[non_exhaustive]
pub enum Settled {
    /// The owner completed; this is its outcome.
    Completed(Replay),
    /// The owner gave the identity up and this waiter is the next owner.
    Yours(Permit),
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
    /// The old claim was over, and a new one was refused.
    Refused(ClaimError),
}

/// The limit of [`Pending::wait_timeout`] has passed. The view of the claim comes back.
#[derive(Debug)]
pub struct TimedOut {
    /// To wait on, or to drop.
    pub pending: Pending,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the owner has not finished within the limit")
    }
}

impl std::error::Error for TimedOut {}

/// A running owner, seen by a duplicate. Dropping it leaves no trace.
pub struct Pending {
    hold: Arc<Hold>,
    frame: Frame,
    fingerprint: Fingerprint,
    /// The fingerprint by the record's scheme, if that is another one.
    other: Option<Fingerprint>,
    /// The claim that was met.
    seen: Running,
}

impl Pending {
    #[cfg(feature = "tier")]
    pub(crate) fn identity(&self) -> Identity<'_> {
        Identity::from_frame(&self.frame)
    }

    #[cfg(feature = "tier")]
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Waits as a task: a future that may be dropped at any time.
    ///
    /// It has no limit of its own: wrap it in the runtime's time-out. It is woken by the owner, or
    /// by the sweep when the owner's lease lapses.
    pub fn wait(self) -> Wait {
        Wait { pending: self, ticket: None }
    }

    /// Waits as a thread, at most `limit` of real time.
    ///
    /// # Errors
    ///
    /// [`TimedOut`] gives the pending back.
    #[expect(clippy::result_large_err, reason = "the pending comes back as it was, unboxed")]
    pub fn wait_timeout(self, limit: Duration) -> Result<Settled, TimedOut> {
        let timer = Timer::start();
        let mut wait = self.wait();
        loop {
            // A lapsed lease ends the nap too, whether or not a sweep runs (R13). One nap of at
            // least a millisecond, so that a lease that is about to lapse does not spin.
            let left = limit.saturating_sub(timer.elapsed());
            let nap = left.min(wait.remaining().max(Duration::from_millis(1)));
            if let Some(settled) = block_on(&mut wait, nap) {
                return Ok(settled);
            }
            if limit > timer.elapsed() && !wait.remaining().is_zero() {
                // The owner has renewed: the seat in the queue stays.
                continue;
            }
            match wait.into_pending() {
                Ok(pending) if limit <= timer.elapsed() => return Err(TimedOut { pending }),
                Ok(pending) => wait = pending.wait(),
                Err(settled) => return Ok(settled),
            }
        }
    }

    /// The time until the owner's lease lapses, zero if it has; the owner may renew it.
    pub fn remaining(&self) -> Duration {
        let engine = self.hold.engine();
        engine.running(&self.frame).map_or(Duration::ZERO, |(_, until)| until.since(engine.now()))
    }

    /// The time since the present owner won.
    pub fn age(&self) -> Duration {
        let engine = self.hold.engine();
        let claimed = engine.running(&self.frame).map_or(self.seen.claimed, |(claimed, _)| claimed);
        engine.now().since(claimed)
    }

    /// What there is now: the end of the wait, or a seat. A claim that is over is claimed anew.
    ///
    /// A claim that was completed before this gives its own outcome, if its cell was not given to
    /// another claim since; else what is there answers.
    fn look(&mut self) -> Result<Ticket, Settled> {
        let (own, other) = (self.fingerprint, self.other);
        let mut translate = |scheme: Scheme| other.filter(|made| made.scheme() == scheme);
        let mut asked = Asked::new(own, &mut translate);
        let (engine, lane) = (self.hold.engine(), self.hold.lane());
        match engine.finished(&self.seen) {
            Some(Met::Replay(answer)) => {
                lane.counters.replays.up();
                return Err(Settled::Completed(Replay { answer }));
            }
            Some(_) => return Err(Settled::NotKept),
            None => {}
        }
        let hash = engine.hash(&Identity::from_frame(&self.frame));
        let guard = self.hold.approach(hash);
        let met = engine.claim(lane, hash, &self.frame, &mut asked, true, &guard);
        Err(match met.map_err(Settled::Refused)? {
            Met::Seated(ticket) => return Ok(ticket),
            Met::Won(owned, number) => {
                Settled::Yours(Permit::new(Arc::clone(&self.hold), owned, number))
            }
            Met::Replay(answer) => Settled::Completed(Replay { answer }),
            Met::NotKept => Settled::NotKept,
            Met::Mismatch => Settled::Mismatch,
            Met::Held => Settled::Held,
            Met::Crowded | Met::InFlight(_) => Settled::TooMany,
        })
    }

    fn unwrap_gift(&self, gift: Gift) -> Option<Settled> {
        let engine = self.hold.engine();
        Some(match gift {
            Gift::LookAgain => return None,
            Gift::Completed { outcome, settled, end } => {
                let now = engine.now();
                if now >= end {
                    return None;
                }
                let Some(outcome) = outcome else { return Some(Settled::NotKept) };
                self.hold.lane().counters.replays.up();
                let (age, remaining) = (now.since(settled), end.since(now));
                Settled::Completed(Replay { answer: Answer { outcome, age, remaining } })
            }
            Gift::Answer(answer) => Settled::Answered(answer),
            // Unless it has been taken away since: work that is known to be lost is not begun.
            Gift::Permit(owned, number) => {
                if !engine.owns(&owned) {
                    return None;
                }
                Settled::Yours(Permit::new(Arc::clone(&self.hold), owned, number))
            }
        })
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("remaining", &self.remaining()).finish_non_exhaustive()
    }
}

/// The future of [`Pending::wait`]. Dropping it only takes this waiter off the list (R15).
#[must_use = "futures do nothing unless polled"]
pub struct Wait {
    pending: Pending,
    ticket: Option<Ticket>,
}

impl Wait {
    /// Stops waiting.
    ///
    /// # Errors
    ///
    /// What this waiter was told just before, a permit perhaps.
    pub fn into_pending(mut self) -> Result<Pending, Settled> {
        if let Some(ticket) = self.ticket.take()
            && let Some(gift) = self.pending.hold.engine().waiters.leave(&ticket)
            && let Some(settled) = self.pending.unwrap_gift(gift)
        {
            return Err(settled);
        }
        // Without a ticket dropping this does nothing more.
        Ok(Pending {
            hold: Arc::clone(&self.pending.hold),
            frame: self.pending.frame.clone(),
            fingerprint: self.pending.fingerprint,
            other: self.pending.other,
            seen: self.pending.seen,
        })
    }

    /// The time until the owner's lease lapses, zero if it has.
    pub fn remaining(&self) -> Duration {
        self.pending.remaining()
    }
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
                Poll::Ready(gift) => {
                    this.ticket = None;
                    if let Some(settled) = this.pending.unwrap_gift(gift) {
                        return Poll::Ready(settled);
                    }
                }
            }
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let hold = &self.pending.hold;
        if let Some(Gift::Permit(owned, _)) = hold.engine().waiters.leave(&ticket) {
            // Nothing was done with it: to the next. Lost means that somebody settled it.
            let _ = hold.engine().release(hold.lane(), &owned, None);
        }
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait").field("listed", &self.ticket.is_some()).finish_non_exhaustive()
    }
}

/// Runs `future` on this thread, at most `limit` of real time.
pub(crate) fn block_on<F: Future + Unpin>(future: &mut F, limit: Duration) -> Option<F::Output> {
    let timer = Timer::start();
    let parker = Arc::new(Parker { thread: thread::current(), rung: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&parker));
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut cx) {
            return Some(output);
        }
        // Acquire, partner of the Release in `wake`: what the waker did before is seen by the poll.
        while !parker.rung.swap(false, Ordering::Acquire) {
            let left = limit.saturating_sub(timer.elapsed());
            if left.is_zero() {
                return None;
            }
            thread::park_timeout(left);
        }
    }
}

/// Wakes a thread. The flag tells a wake-up from a thread that was unparked for something else.
struct Parker {
    thread: Thread,
    rung: AtomicBool,
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// What `met` means for the caller of a claim.
#[inline]
pub(crate) fn answer(
    hold: &Arc<Hold>,
    met: Met,
    frame: &Frame,
    fingerprint: Fingerprint,
    other: Option<Fingerprint>,
) -> Claim {
    match met {
        Met::Won(owned, number) => Claim::Won(Permit::new(Arc::clone(hold), owned, number)),
        Met::Replay(answer) => Claim::Replay(Replay { answer }),
        Met::NotKept => Claim::NotKept,
        Met::InFlight(seen) => {
            let (hold, frame) = (Arc::clone(hold), frame.clone());
            Claim::InFlight(Pending { hold, frame, fingerprint, other, seen })
        }
        Met::Mismatch => Claim::Mismatch,
        // A claim without a seat is never told of one.
        Met::Held | Met::Seated(_) | Met::Crowded => Claim::Held,
    }
}
