//! Who runs it: the claim, waiting for another owner, and being one.
//!
//! Ground rules:
//!
//! 1. The client's future reads the body, claims and waits. It may be dropped at any of its awaits:
//!    before the claim is won nothing is left behind (R19, R15).
//! 2. What is done without waiting is done by [`at_once`] in the client's first poll, and needs neither
//!    a task nor a timer nor a future of its own: most requests. The rest is [`go_on`].
//! 3. Between a won claim and the first poll of its run there is no await, and a run that has to wait in
//!    that poll goes to a task in the same breath. Nobody can drop a future while it is polled, so a
//!    client that leaves can only leave before or after: then it drops only the handle of the task
//!    (R18).
//! 4. The owner's slot is taken before the claim, so that a claim that was won always has one,
//!    and only after a look has found nothing: a replay or a mismatch never takes one.
//!    A waiter holds no slot; it takes one when the identity becomes its own (R15).

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;

use super::{
    BoxError,
    asked::Asked,
    at_once::{CutOff, detached},
    backing::{Entered, Told, Verb},
    body::{RequestBody, ResponseBody},
    intake::{self, Listed, Reading, Received, Refused},
    layer::{Over, Slot},
    problem::{self, Problem},
    shares::{Of, Share},
    watch::Ending,
    work::{Ended, Held, Reply, Work},
};
use crate::{Claim, Fingerprint, NotClaimed, Outcome, Pending, Permit, Settled};

/// What a request has to wait for.
pub(super) enum Waits {
    /// The rest of its body.
    Body(Reading),
    /// Another owner.
    Owner(Pending),
    /// Its own run.
    Run,
    /// The winner, which took the claim away from its run.
    Winner(Option<Outcome>),
    /// Nothing, but to be claimed anew: the memory knows by now who runs it.
    Again,
    /// To hear whether a claim with another body is what the tier has, too.
    Mismatch,
}

/// How far a request has come.
#[allow(clippy::large_enum_variant, reason = "it is looked at where it is made")]
enum Next {
    /// The reply is there.
    Replied,
    Waits(Waits),
}

/// What a claim has met.
enum Met {
    /// What is replied at once.
    Replied,
    Won(Permit, Result<Slot, Over>),
    Owner(Pending),
    /// Another body.
    Mismatch,
}

/// How far a request came without waiting.
pub(super) enum AtOnce<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    Answer(Reply<R, S::Error>),
    Waits(Pin<Box<Work<S, B, R>>>, Waits),
}

/// Takes a request as far as it comes without waiting.
pub(super) fn at_once<S, B, R>(
    mut work: Pin<Box<Work<S, B, R>>>,
    cx: &mut Context<'_>,
) -> AtOnce<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    work.held.asked.config.caps.runtime.check();
    let mut reading = work.reading();
    match work.as_mut().poll_read(&mut reading, cx) {
        Poll::Pending => return AtOnce::Waits(work, Waits::Body(reading)),
        Poll::Ready(Err(refused)) => {
            drop(reading);
            return AtOnce::Answer(Ok(not_received(work, refused)));
        }
        Poll::Ready(Ok(())) => work.as_mut().receive(reading.received()),
    }
    let met = claim(work.as_mut().held());
    let next = own(work.as_mut(), met);
    match next.unwrap_or_else(|| start(work.as_mut(), cx)) {
        Next::Replied => AtOnce::Answer(reply_of(work.as_mut().held())),
        Next::Waits(waits) => AtOnce::Waits(work, waits),
    }
}

fn reply_of<S, R, E>(held: &mut Held<S, R, E>) -> Reply<R, E> {
    // It is there.
    held.reply.take().unwrap_or_else(|| Ok(failed()))
}

/// Goes on with a request that has to wait.
pub(super) async fn go_on<S, B, R>(
    mut work: Pin<Box<Work<S, B, R>>>,
    mut waits: Waits,
) -> Reply<R, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let mut place = Waiting::default();
    let mut doubted = None;
    loop {
        let met = match waits {
            Waits::Body(mut reading) => {
                let limit = work.held.asked.policy.read_limit;
                let read = poll_fn(|cx| work.as_mut().poll_read(&mut reading, cx));
                if let Err(refused) = timeout(limit, read).await.unwrap_or(Err(Refused::TooSlow)) {
                    drop(reading);
                    return Ok(not_received(work, refused));
                }
                work.as_mut().receive(reading.received());
                claim(work.as_mut().held())
            }
            Waits::Owner(pending) => match place.wait(work.as_mut().held(), pending).await {
                Ok(met) => met,
                Err(answer) => return Ok(answer),
            },
            Waits::Run => {
                let asked = work.held.asked.clone();
                let run = detached(async move {
                    let ended = poll_fn(|cx| work.as_mut().poll_run(cx)).await;
                    (ended, work)
                });
                let ended = match run.await {
                    Ok((ended, back)) => {
                        work = back;
                        ended
                    }
                    Err(CutOff::Panicked) => return Ok(failed()),
                    Err(CutOff::ShutDown) => return Ok(asked.answer(Problem::OutcomeUnknown)),
                };
                match end(work.as_mut().held(), ended) {
                    Next::Replied => return reply_of(work.as_mut().held()),
                    Next::Waits(more) => {
                        waits = more;
                        continue;
                    }
                }
            }
            Waits::Winner(ours) => {
                let Held { asked, fingerprint, .. } = &work.held;
                return Ok(after_lost(asked, *fingerprint, ours).await);
            }
            Waits::Again => claim(work.as_mut().held()),
            Waits::Mismatch => {
                let held = work.as_mut().held();
                let (asked, fingerprint) = (held.asked.clone(), held.fingerprint);
                let since = *doubted.get_or_insert_with(Instant::now);
                let translate = move |scheme| held.translate(scheme);
                match asked.judge(fingerprint, translate, since).await {
                    None => claim(work.as_mut().held()),
                    Some(Told::Unavailable { retry_after }) => {
                        return Ok(asked.unavailable(retry_after));
                    }
                    Some(_) => return Ok(asked.answer(Problem::KeyReused)),
                }
            }
        };
        if !matches!(met, Met::Owner(_)) {
            place.leave();
        }
        let next = match own(work.as_mut(), met) {
            Some(next) => next,
            // In one poll with what goes to a task if it has to wait (rule 3).
            None => poll_fn(|cx| Poll::Ready(start(work.as_mut(), cx))).await,
        };
        match next {
            Next::Replied => return reply_of(work.as_mut().held()),
            Next::Waits(more) => waits = more,
        }
    }
}

/// Claims. Where nothing is there, a place for an owner comes along.
fn claim<S, R, E>(held: &mut Held<S, R, E>) -> Met {
    let Held { asked, fingerprint, .. } = &*held;
    let answer = match asked.claim(*fingerprint, |scheme| held.translate(scheme)) {
        // Always with a slot.
        Ok((Claim::Won(permit), slot)) => return Met::Won(permit, slot.ok_or(Over::All)),
        Ok((Claim::Mismatch, _)) => return Met::Mismatch,
        Ok((Claim::InFlight(pending), _)) => return Met::Owner(pending),
        Ok((Claim::Replay(replay), _)) => asked.replay(&replay),
        Ok((Claim::NotKept, _)) => asked.answer(Problem::ResponseNotKept),
        Ok((Claim::Held, _)) => asked.answer(Problem::OutcomeUnknown),
        Err(NotClaimed::Refused(over)) => asked.over(over),
        Err(NotClaimed::Error(error)) => asked.refused(error),
    };
    held.reply = Some(Ok(answer));
    Met::Replied
}

/// Makes it the owner where the claim is won: then, with `None`, it is to be [started](start).
fn own<S, B, R>(mut work: Pin<&mut Work<S, B, R>>, met: Met) -> Option<Next>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let (permit, slot) = match met {
        Met::Replied => return Some(Next::Replied),
        Met::Owner(pending) => return Some(Next::Waits(Waits::Owner(pending))),
        Met::Mismatch => return Some(Next::Waits(Waits::Mismatch)),
        Met::Won(permit, slot) => (permit, slot),
    };
    let held = work.as_mut().held();
    let slot = match slot {
        Ok(slot) => slot,
        Err(over) => {
            // Nothing was done: to the next waiter. Lost means that somebody settled it.
            let _ = permit.release();
            held.reply = Some(Ok(held.asked.over(over)));
            return Some(Next::Replied);
        }
    };
    held.asked.watch.waited();
    work.own(permit, slot);
    None
}

/// Runs an owner as far as it comes without waiting.
fn start<S, B, R>(mut work: Pin<&mut Work<S, B, R>>, cx: &mut Context<'_>) -> Next
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    match work.as_mut().poll_run(cx) {
        Poll::Ready(ended) => end(work.held(), ended),
        Poll::Pending => Next::Waits(Waits::Run),
    }
}

/// What the client is told of how its run ended.
fn end<S, R, E>(held: &mut Held<S, R, E>, ended: Ended) -> Next {
    let asked = &held.asked;
    let answer = match ended {
        Ended::Replied => return Next::Replied,
        Ended::Lost(ours) => return Next::Waits(Waits::Winner(ours)),
        #[cfg(feature = "tier")]
        Ended::InTransaction(outcome) => asked.first(&outcome),
        #[cfg(feature = "tier")]
        Ended::Unknown => asked.answer(Problem::OutcomeUnknown),
        Ended::Panicked => failed(),
        Ended::Told(Told::Replay(replay)) => asked.replay(&replay),
        Ended::Told(Told::NotKept) => asked.answer(Problem::ResponseNotKept),
        Ended::Told(Told::Mismatch) => asked.answer(Problem::KeyReused),
        Ended::Told(Told::Held) => asked.answer(Problem::OutcomeUnknown),
        Ended::Told(Told::Unavailable { retry_after }) => asked.unavailable(retry_after),
        // Waits in memory, for what the other node does.
        Ended::Told(Told::Elsewhere) => return Next::Waits(Waits::Again),
    };
    held.reply = Some(Ok(answer));
    Next::Replied
}

fn failed<R>() -> Response<ResponseBody<R>> {
    let detail = "the handler failed; it is not known whether the work was done";
    problem::plain(StatusCode::INTERNAL_SERVER_ERROR, detail)
}

fn not_received<S, B, R>(
    mut work: Pin<Box<Work<S, B, R>>>,
    refused: Refused,
) -> Response<ResponseBody<R>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let asked = &work.held.asked;
    let answer = match refused {
        Refused::TooLarge => asked.answer(Problem::RequestTooLarge),
        Refused::TooSlow => asked.answer(Problem::RequestTooSlow),
        Refused::NoRoom => asked.over(Over::All),
        Refused::OverShare => asked.over(Over::Account),
        // Whoever sent half a body rarely reads the answer, and no rule has a type for it.
        Refused::Broken => {
            asked.watch.end(Ending::Broken);
            problem::plain(
                StatusCode::BAD_REQUEST,
                "the body broke off or was malformed; nothing was done",
            )
        }
    };
    if matches!(refused, Refused::TooLarge | Refused::NoRoom | Refused::OverShare) {
        let (max, limit) = (asked.policy.max_request, asked.policy.read_limit);
        if work.has_more(max) {
            intake::linger(move |cx| work.as_mut().poll_rest(cx), max, limit);
        }
    }
    answer
}

/// What a duplicate has while it waits, for one owner after the other.
#[derive(Default)]
struct Waiting {
    /// Its own bytes, for the duplicates behind it.
    listed: Option<Listed>,
    /// A waiter's place of its account, if those are limited.
    seat: Option<Share>,
    is_seated: bool,
    deadline: Option<Instant>,
}

impl Waiting {
    /// Waits for one owner, then looks again. An error is the answer.
    async fn wait<S, R, E>(
        &mut self,
        held: &mut Held<S, R, E>,
        pending: Pending,
    ) -> Result<Met, Response<ResponseBody<R>>> {
        let Held { asked, fingerprint, received, .. } = &mut *held;
        let caps = &asked.config.caps;
        if !self.is_seated {
            self.seat = caps.share(&asked.caller, Of::Waiters);
            self.is_seated = self.seat.as_mut().is_none_or(|seat| seat.grow(1));
        }
        if !self.is_seated {
            return Err(asked.answer(Problem::InFlight));
        }
        asked.watch.waits();
        if let (None, true, Some(received)) =
            (&self.listed, asked.policy.fingerprint.covers_bytes(), received)
        {
            self.listed = share(&caps.bodies, fingerprint, received);
        }
        let deadline = *self.deadline.get_or_insert_with(|| after(asked.wait_limit));
        match wait(pending, deadline).await {
            Waited::Late => Err(asked.answer(Problem::InFlight)),
            // Another claim may have taken the place of the one that was waited for.
            Waited::Lapsed | Waited::Settled(Settled::Mismatch) => Ok(claim(held)),
            Waited::Settled(Settled::Yours(permit)) => {
                Ok(Met::Won(permit, caps.slot(&asked.caller)))
            }
            Waited::Settled(settled) => Err(told(asked, settled)),
        }
    }

    /// It waits no more. Should it have to once more, its time goes on.
    fn leave(&mut self) {
        *self = Self { deadline: self.deadline, ..Self::default() };
    }
}

/// A waiter gives its copy of the body up for the owner's, if that is still there; else it lists
/// its own for the next.
fn share(
    bodies: &Arc<intake::Bodies>,
    fingerprint: &Fingerprint,
    received: &mut Received,
) -> Option<Listed> {
    if let Some(bytes) = bodies.find(fingerprint.digest()) {
        received.bytes = bytes;
        return None;
    }
    Some(bodies.list(*fingerprint.digest(), received.bytes.faint()?))
}

/// A point in time so far ahead that it is none, where adding would overflow.
pub(super) fn after(span: Duration) -> Instant {
    let now = Instant::now();
    let far = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    now + span.min(far)
}

pub(super) enum Waited {
    Settled(Settled),
    /// The lease of the owner has lapsed: it is time to claim again.
    Lapsed,
    /// The limit has passed.
    Late,
}

/// Waits until the owner settles, its lease lapses, or the limit has passed (R13).
pub(super) async fn wait(pending: Pending, deadline: Instant) -> Waited {
    if deadline <= Instant::now() {
        return Waited::Late;
    }
    // At least a millisecond, so that a lease that is about to lapse does not spin.
    let lapse = after(pending.remaining().max(Duration::from_millis(1)));
    let mut waiting = pending.wait();
    match timeout_at(deadline.min(lapse), &mut waiting).await {
        Ok(settled) => Waited::Settled(settled),
        // What came in the very last moment is not thrown away.
        Err(_) => match waiting.into_pending() {
            Err(settled) => Waited::Settled(settled),
            Ok(_) if deadline <= Instant::now() => Waited::Late,
            Ok(_) => Waited::Lapsed,
        },
    }
}

/// The answer to a waiter that is not the next owner.
pub(super) fn told<R>(asked: &Asked, settled: Settled) -> Response<ResponseBody<R>> {
    match settled {
        Settled::Completed(replay) => asked.replay(&replay),
        Settled::Answered(outcome) => asked.released(&outcome),
        Settled::NotKept => asked.answer(Problem::ResponseNotKept),
        Settled::Mismatch => asked.answer(Problem::KeyReused),
        Settled::Held => asked.answer(Problem::OutcomeUnknown),
        Settled::TooMany => asked.answer(Problem::InFlight),
        Settled::Refused(error) => asked.refused(error),
        // Handled by the caller; dropping it would hold what was not begun.
        Settled::Yours(permit) => {
            let _ = permit.release();
            asked.too_busy()
        }
    }
}

/// The winner's outcome for a client whose own run came too late, waiting for it (R9).
async fn after_lost<R>(
    asked: &Asked,
    fingerprint: Fingerprint,
    ours: Option<Outcome>,
) -> Response<ResponseBody<R>> {
    let deadline = after(asked.wait_limit);
    loop {
        match asked.observe(fingerprint) {
            Some(Claim::Replay(replay)) => return asked.replay(&replay),
            Some(Claim::NotKept) => return asked.answer(Problem::ResponseNotKept),
            Some(Claim::InFlight(pending)) => match wait(pending, deadline).await {
                Waited::Settled(Settled::Completed(replay)) => {
                    return asked.replay(&replay);
                }
                Waited::Settled(Settled::NotKept) => {
                    return asked.answer(Problem::ResponseNotKept);
                }
                // The winner gave up, and this run is the one that was done.
                Waited::Settled(Settled::Yours(permit)) => {
                    return own_after_all(asked, permit, ours).await;
                }
                Waited::Lapsed => {}
                Waited::Settled(_) | Waited::Late => {
                    return asked.answer(Problem::OutcomeUnknown);
                }
            },
            _ => return asked.answer(Problem::OutcomeUnknown),
        }
    }
}

/// The winner gave up: the run that came too late is the one that was done.
async fn own_after_all<R>(
    asked: &Asked,
    permit: Permit,
    ours: Option<Outcome>,
) -> Response<ResponseBody<R>> {
    let Some(outcome) = ours else {
        let _ = permit.release();
        return asked.answer(Problem::OutcomeUnknown);
    };
    match asked.config.backing.enter(permit, |_| None).await {
        Entered::Yours(claimed) => {
            let answer = asked.hand_back(&outcome, None);
            let _ = claimed.settle(Verb::Complete(outcome)).await;
            answer
        }
        Entered::Told(Told::Replay(replay)) => asked.replay(&replay),
        Entered::Told(_) => asked.answer(Problem::OutcomeUnknown),
    }
}
