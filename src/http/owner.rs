//! Who runs it: the claim, waiting for another owner, and being one.
//!
//! Ground rules:
//!
//! 1. The client's future reads the body, claims and waits. It may be dropped at any of its awaits:
//!    before the claim is won nothing is left behind (R19, R15).
//! 2. Between a won claim and the first poll of the owner there is no await, and what has to wait in
//!    that poll goes to a task in the same breath (`at_once`). A client that leaves can only leave
//!    before or after: then it drops only the handle of the task (R18).
//! 3. The owner's slot is taken before the claim, so that a claim that was won always has one,
//!    and only after a look has found nothing: a replay or a mismatch never takes one.
//!    A waiter holds no slot; it takes one when the identity becomes its own (R15), and so that it
//!    finds the one of the owner that gave up, a slot is given back before the identity is settled.
//! 4. Until the inner service is called, nothing has begun: however the task ends, the identity is
//!    released. From then on it is settled by the response, or held (R11).

use std::{future::poll_fn, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use tokio::{
    runtime::Handle,
    time::{Instant, timeout_at},
};
use tower_service::Service;

use super::{
    BoxError,
    asked::Asked,
    at_once::{self, CutOff},
    attempt::{Acted, Attempt, Caller, Keep, Release},
    backing::{Claimed, Entered, Stale, Told, Verb},
    body::{RequestBody, ResponseBody, Rest},
    capture::{self, Captured},
    intake::{self, Charge, Listed, Received, Refused},
    layer::{Config, Over, Slot},
    policy::Policy,
    problem::{self, Problem},
    reply,
    shares::Of,
    watch::{Ending, Watch},
};
use crate::{Claim, Fingerprint, NotClaimed, Outcome, Pending, Permit, Settled};

/// The way of a request that was let in, as its client sees it.
pub(super) async fn run<S, B, R>(
    mut inner: S,
    asked: Asked,
    mut parts: Parts,
    body: B,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let caps = &asked.config.caps;
    let runtime = caps.runtime.current();
    let policy = &asked.policy;
    let charge = Charge::new(&caps.budget, caps.share(&asked.caller, Of::Buffered));
    let mut body = Box::pin(body);
    let (max, limit) = (policy.max_request, policy.read_limit);
    let mut received = match intake::read(body.as_mut(), max, limit, charge).await {
        Ok(received) => received,
        Err(refused) => {
            if matches!(refused, Refused::TooLarge | Refused::NoRoom | Refused::OverShare) {
                intake::linger(&parts, body, max, limit);
            }
            return Ok(not_received(&asked, refused));
        }
    };
    drop(body);
    let fingerprint = asked.fingerprint(&parts, &received);
    let mut listed = None;
    let mut seat = caps.share(&asked.caller, Of::Waiters);
    let mut is_seated = false;
    let mut deadline = None;
    loop {
        let translate = |scheme| asked.policy.translate(scheme, &parts, &received);
        let (claim, slot) = match asked.claim(fingerprint, translate) {
            Ok(claimed) => claimed,
            Err(NotClaimed::Refused(over)) => return Ok(asked.over(over)),
            Err(NotClaimed::Error(error)) => return Ok(asked.refused(error)),
        };
        let (permit, slot) = match claim {
            // Always with a slot.
            Claim::Won(permit) => (permit, slot.ok_or(Over::All)),
            Claim::Replay(replay) => return Ok(asked.replay(&replay)),
            Claim::NotKept => return Ok(asked.answer(Problem::ResponseNotKept)),
            Claim::Mismatch => return Ok(asked.answer(Problem::KeyReused)),
            Claim::Held => return Ok(asked.answer(Problem::OutcomeUnknown)),
            Claim::InFlight(pending) => {
                // Rule 3.
                drop(slot);
                // Taken once for all the owners it may wait for.
                is_seated = is_seated || seat.as_mut().is_none_or(|seat| seat.grow(1));
                if !is_seated {
                    return Ok(asked.answer(Problem::InFlight));
                }
                asked.watch.waits();
                if listed.is_none() && policy.fingerprint.covers_bytes() {
                    share(&caps.bodies, &fingerprint, &mut received, &mut listed);
                }
                let deadline = *deadline.get_or_insert_with(|| after(asked.wait_limit));
                // Boxed, as all that most requests do not come to: they would carry its room about.
                match Box::pin(wait(pending, deadline)).await {
                    Waited::Late => return Ok(asked.answer(Problem::InFlight)),
                    Waited::Lapsed => continue,
                    Waited::Settled(Settled::Yours(permit)) => (permit, caps.slot(&asked.caller)),
                    Waited::Settled(settled) => return Ok(told(&asked, settled)),
                }
            }
        };
        let slot = match slot {
            Ok(slot) => slot,
            Err(over) => {
                // Nothing was done: to the next waiter. Lost means that somebody settled it.
                let _ = permit.release();
                return Ok(asked.over(over));
            }
        };
        drop((listed.take(), seat.take()));
        is_seated = false;
        asked.watch.waited();
        let work = Work { inner, parts, received };
        let ended = start(&runtime, work, &asked, fingerprint, permit, slot).await;
        let told = match ended {
            Ok(Ended::Answered(response)) => return Ok(response),
            Ok(Ended::Failed(error)) => return Err(error),
            Ok(Ended::Told(told, work)) => {
                Work { inner, parts, received } = *work;
                told
            }
            Ok(Ended::Lost(ours)) => {
                return Ok(Box::pin(after_lost(&asked, fingerprint, ours)).await);
            }
            #[cfg(feature = "tier")]
            Ok(Ended::InTransaction(outcome)) => return Ok(asked.first(&outcome)),
            #[cfg(feature = "tier")]
            Ok(Ended::Unknown) => return Ok(asked.answer(Problem::OutcomeUnknown)),
            Err(CutOff::Panicked) => {
                let detail = "the handler failed; it is not known whether the work was done";
                return Ok(problem::plain(StatusCode::INTERNAL_SERVER_ERROR, detail));
            }
            Err(CutOff::ShutDown) => return Ok(asked.answer(Problem::OutcomeUnknown)),
        };
        return Ok(match told {
            Told::Replay(replay) => asked.replay(&replay),
            Told::NotKept => asked.answer(Problem::ResponseNotKept),
            Told::Mismatch => asked.answer(Problem::KeyReused),
            Told::Held => asked.answer(Problem::OutcomeUnknown),
            Told::Unavailable { retry_after } => asked.unavailable(retry_after),
            // Waits in memory, for what the other node does.
            Told::Elsewhere => {
                seat = caps.share(&asked.caller, Of::Waiters);
                continue;
            }
        });
    }
}

/// What an owner runs, or gives back if nothing is to run.
struct Work<S> {
    inner: S,
    parts: Parts,
    received: Received,
}

impl<S> Work<S> {
    /// Calls the service.
    fn begin<B>(self, attempt: Attempt, owner: &Owner) -> S::Future
    where
        S: Service<Request<RequestBody<B>>>,
    {
        let Self { mut inner, mut parts, received } = self;
        parts.extensions.insert(attempt);
        parts.extensions.insert(Acted);
        #[cfg(feature = "tier")]
        if let Some(staging) = &owner.staging {
            parts.extensions.insert(staging.clone());
        }
        let _ = owner;
        let Received { bytes, trailers } = received;
        // From here on the handler's bytes are the only ones: it may drop them when it has read
        // them.
        let body = RequestBody::buffered(bytes.to_bytes(), trailers);
        inner.call(Request::from_parts(parts, body))
    }
}

fn not_received<R>(asked: &Asked, refused: Refused) -> Response<ResponseBody<R>> {
    match refused {
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
    }
}

/// A waiter gives its copy of the body up for the owner's, if that is still there; else it lists
/// its own for the next.
fn share(
    bodies: &Arc<intake::Bodies>,
    fingerprint: &Fingerprint,
    received: &mut Received,
    listed: &mut Option<Listed>,
) {
    match bodies.find(fingerprint.digest()) {
        Some(bytes) => received.bytes = bytes,
        None => *listed = Some(bodies.list(*fingerprint.digest(), received.bytes.faint())),
    }
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

/// How an owner ended that was not cut off.
enum Ended<R, E, S> {
    Answered(Response<ResponseBody<R>>),
    Failed(E),
    /// The token was stale (R9). The outcome that was not stored comes along.
    Lost(Option<Outcome>),
    /// Completed in the handler's own transaction: this is the response.
    #[cfg(feature = "tier")]
    InTransaction(Outcome),
    /// It is not known whether the handler's transaction was committed.
    #[cfg(feature = "tier")]
    Unknown,
    /// The tier says something else than the memory: nothing has run.
    Told(Told, Box<Work<S>>),
}

/// Starts the owner, which goes on if the answer is dropped; not started it would leave the claim held.
fn start<S, B, R>(
    runtime: &Handle,
    work: Work<S>,
    asked: &Asked,
    fingerprint: Fingerprint,
    permit: Permit,
    slot: Slot,
) -> impl Future<Output = Result<Ended<R, S::Error, S>, CutOff>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    // The lease counts as renewed as long as the permit lives (R8). Lost already: then the verb at
    // the end says so.
    let _ = permit.attend();
    let mut owner = Owner {
        #[cfg(feature = "tier")]
        staging: None,
        claimed: None,
        slot: Some(slot),
        has_begun: false,
        config: Arc::clone(&asked.config),
        watch: asked.watch.clone(),
    };
    // For duplicates, which may come as soon as the handler runs: before it has to wait.
    let bytes = asked.policy.fingerprint.covers_bytes().then(|| work.received.bytes.faint());
    let bodies = &asked.config.caps.bodies;
    let listed = bytes.map(|bytes| bodies.list(*fingerprint.digest(), bytes));
    let list = move || listed;
    let (policy, config) = (Arc::clone(&asked.policy), Arc::clone(&asked.config));
    let (watch, caller) = (asked.watch.clone(), Arc::clone(&asked.caller));
    let mut work = work;
    let run = async move {
        let translate = |scheme| policy.translate(scheme, &work.parts, &work.received);
        let claimed = match config.backing.enter(permit, translate).await {
            Entered::Yours(claimed) => claimed,
            Entered::Told(told) => return Ended::Told(told, Box::new(work)),
        };
        let token = claimed.token();
        #[cfg(feature = "tier")]
        {
            owner.staging = claimed.in_transaction(&caller, &policy);
        }
        owner.claimed = Some(claimed);
        owner.watch.owns(token);
        if let Err(error) = poll_fn(|cx| work.inner.poll_ready(cx)).await {
            // Nothing was done, and Lost means that somebody else has settled it.
            let _ = owner.settle(Verb::Release, Some(Ending::Failed)).await;
            return Ended::Failed(error);
        }
        owner.has_begun = true;
        let method = work.parts.method.clone();
        let attempt = Attempt { caller: Arc::clone(&caller), token };
        let answered = work.begin(attempt, &owner).await;
        #[cfg(feature = "tier")]
        if let Some(staged) = owner.staging.as_ref().and_then(|staging| staging.take()) {
            return owner.conclude(staged, answered, &config).await;
        }
        let ended = match answered {
            Ok(response) => settle(owner, response, &policy, &method, &caller).await,
            Err(error) => owner
                .settle(Verb::Release, Some(Ending::Failed))
                .await
                .map(|_| Ended::Failed(error)),
        };
        ended.unwrap_or_else(|Stale(outcome)| {
            config.backing.store().note_double_run();
            Ended::Lost(outcome)
        })
    };
    at_once::detached(runtime, Box::pin(watch.around(run)), list)
}

/// The permit of an owner, which settles when dropped: released if nothing has begun, else by the
/// setting of the store (R11).
struct Owner {
    /// What the handler may have staged in a transaction of its own.
    #[cfg(feature = "tier")]
    staging: Option<super::in_transaction::InTransaction>,
    /// `None` before the tier has let it in, and once settled.
    claimed: Option<Claimed>,
    /// Given back first (rule 3).
    slot: Option<Slot>,
    has_begun: bool,
    config: Arc<Config>,
    watch: Watch,
}

impl Owner {
    /// `None` if it was settled already. The attempt ends as `told`, if that is given.
    async fn settle(mut self, verb: Verb, told: Option<Ending>) -> Result<Option<Ending>, Stale> {
        self.slot = None;
        let Some(claimed) = self.claimed.take() else { return Ok(None) };
        let ending = claimed.settle(verb).await.map(|ending| told.unwrap_or(ending));
        self.watch.end(*ending.as_ref().unwrap_or(&Ending::Lost));
        ending.map(Some)
    }
}

#[cfg(feature = "tier")]
impl Owner {
    /// Settles the identity by what the handler has staged in its transaction, whatever it answered.
    async fn conclude<R, E, S>(
        mut self,
        staged: super::in_transaction::Staged,
        answered: Result<Response<R>, E>,
        config: &Config,
    ) -> Ended<R, E, S> {
        use crate::tier::owned::Concluded;

        self.slot = None;
        let plain = staged.plain.clone();
        let Some(claimed) = self.claimed.take() else { return Ended::Unknown };
        match claimed.conclude(staged).await {
            Concluded::Committed(completed) => {
                self.watch.end(if completed.kept { Ending::Kept } else { Ending::NotKept });
                Ended::InTransaction(plain)
            }
            Concluded::RolledBack => {
                self.watch.end(Ending::Released);
                match answered {
                    Ok(response) => Ended::Answered(response.map(ResponseBody::untouched)),
                    Err(error) => Ended::Failed(error),
                }
            }
            Concluded::Lost => {
                self.watch.end(Ending::Lost);
                config.backing.store().note_double_run();
                Ended::Lost(Some(plain))
            }
            Concluded::Unknown => Ended::Unknown,
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.slot = None;
        let is_panicking = std::thread::panicking();
        if is_panicking {
            self.config.counters.panics.up();
        }
        let Some(claimed) = self.claimed.take() else { return };
        #[cfg(feature = "tier")]
        let claimed = match self.staging.as_ref().and_then(|staging| staging.take()) {
            Some(staged) => claimed.find_out(staged),
            None => Some(claimed),
        };
        #[cfg(feature = "tier")]
        let Some(claimed) = claimed else {
            self.watch.end(if is_panicking { Ending::Panicked } else { Ending::CutOff });
            return;
        };
        if !self.has_begun {
            claimed.give_up();
        }
        self.watch.end(if is_panicking { Ending::Panicked } else { Ending::CutOff });
    }
}

/// Settles the identity by the response (R17, R20), and gives the response back for the client.
async fn settle<R, E, S>(
    owner: Owner,
    response: Response<R>,
    policy: &Policy,
    method: &Method,
    caller: &Caller,
) -> Result<Ended<R, E, S>, Stale>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let (mut head, body) = response.into_parts();
    let is_kept = if head.extensions.get::<Release>().is_some() {
        false
    } else {
        head.extensions.get::<Keep>().is_some() || policy.statuses.is_kept(head.status)
    };
    let status = head.status;
    // Only these answers are for the waiters too; after another release one of them runs (R14).
    let is_for_all = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    // A key that was settled stands for its answer from now on, also for one that was not kept.
    let retention = owner.config.backing.store().retention();
    let say_when_it_expires = |ending, headers: &mut HeaderMap| {
        if matches!(ending, Some(Ending::Kept | Ending::NotKept)) {
            reply::say_when_it_expires(policy, retention, headers);
        }
    };
    let without_answer = || if is_kept { Verb::CompleteNotKept } else { Verb::Release };
    if capture::is_stream(&head) || !(is_kept || is_for_all) {
        let ending = owner.settle(without_answer(), None).await?;
        say_when_it_expires(ending, &mut head.headers);
        return Ok(Ended::Answered(Response::from_parts(head, ResponseBody::untouched(body))));
    }
    let ending;
    let body = match capture::capture(body, policy.max_response, policy.capture_time).await {
        Captured::Whole { data, .. } if !capture::is_as_promised(&head, method, data.len()) => {
            ending = owner.settle(without_answer(), None).await?;
            let error = "the body has another length than its head says";
            ResponseBody::tail(data, Rest::Broken(error.into()))
        }
        Captured::Whole { data, trailers } => {
            let kept = data.clone();
            let outcome = reply::keep(policy, status, &head.headers, kept, trailers.as_ref());
            // Before the place is given back: it is part of the work.
            let sealed = policy.seal.seal(caller, outcome);
            let verb = match sealed {
                None => without_answer(),
                Some(outcome) if is_kept => Verb::Complete(outcome),
                Some(outcome) => Verb::ReleaseWith(outcome),
            };
            ending = owner.settle(verb, None).await?;
            capture::let_frame(&mut head.headers);
            if reply::has_no_body(status) {
                ResponseBody::without_content()
            } else {
                ResponseBody::buffered(data, trailers)
            }
        }
        Captured::Open { prefix, rest } => {
            ending = owner.settle(without_answer(), None).await?;
            ResponseBody::tail(prefix, rest)
        }
    };
    say_when_it_expires(ending, &mut head.headers);
    Ok(Ended::Answered(Response::from_parts(head, body)))
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
