//! The work of one request: all that is known of it, and from a won claim on the run of its handler.
//!
//! Ground rules:
//!
//! 1. A request that was let in lies in one box from its head to its answer: the body that comes in,
//!    then in the same place the handler's future. Who goes on with it, a task too, takes the box.
//! 2. What is done at once is done here, in plain steps; only what has to wait for something else than
//!    the service itself is a future of its own ([`Stage::Later`]). Most requests have none.
//! 3. From the claim on [`Work::poll_run`] is polled until it is done, by whoever has the box, and what
//!    it does does not depend on who that is (R18).
//! 4. Until the inner service is called, nothing has begun: however the work ends, the identity is
//!    released. From then on it is settled by the response, or held (R11).
//! 5. A panic ends the work as it would end a task: it is caught here, and the client's connection goes
//!    on.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts, response};
use http_body::{Body, Frame};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    BoxError,
    asked::Asked,
    attempt::{Acted, Attempt, Keep, Release},
    backing::{Claimed, Stale, Told, Verb},
    body::{RequestBody, ResponseBody, Rest},
    capture::{self, Captured, Capturing},
    intake::{self, Listed, Reading, Received, Refused},
    layer::Slot,
    reply,
    watch::Ending,
};
#[cfg(feature = "tier")]
use super::{
    backing::Entered,
    in_transaction::{InTransaction, Staged},
};
use crate::{Fingerprint, Outcome, Permit, Scheme};

pin_project! {
    /// A request that was let in.
    pub(super) struct Work<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        // Dropped first: what it holds is part of the work, which ends before the identity is settled.
        #[pin]
        stage: Stage<B, S::Future, R>,
        pub(super) held: Held<S, R, S::Error>,
    }
}

/// What stays in its place while the stage changes.
pub(super) struct Held<S, R, E> {
    pub(super) asked: Asked,
    /// Until it is called.
    inner: Option<S>,
    /// Until the handler has them.
    parts: Option<Parts>,
    pub(super) received: Option<Received>,
    /// The body's place in the list for duplicates.
    listed: Option<Listed>,
    /// Of no request before the body is there.
    pub(super) fingerprint: Fingerprint,
    /// `None` before the tier has let it in, and once settled.
    claimed: Option<Claimed>,
    /// Given back before the identity is settled, so that a waiter that becomes the owner finds it.
    slot: Option<Slot>,
    has_begun: bool,
    /// What the client gets, once that is known. It stays here until then: to hand it on from step to
    /// step would be to copy it each time.
    pub(super) reply: Option<Reply<R, E>>,
    /// What the handler may have staged in a transaction of its own.
    #[cfg(feature = "tier")]
    staging: Option<InTransaction>,
}

/// Something that has to be waited for.
type Later<R> = Pin<Box<dyn Future<Output = Then<R>> + Send>>;

pin_project! {
    #[project = StageProj]
    enum Stage<B, F, R> {
        /// It comes in.
        Body { #[pin] body: B },
        /// It is here whole; the service is driven to ready once the claim is won.
        Ready,
        Handler { #[pin] future: F },
        Later { until: Later<R> },
        Over,
    }
}

/// What was waited for.
enum Then<R> {
    #[cfg(feature = "tier")]
    Entered(Entered, Parts, Received),
    Captured(Judged, Captured<R>),
    Settled(Result<Ending, Stale>),
    #[cfg(feature = "tier")]
    Concluded(Ended),
}

/// How a run ended.
pub(super) enum Ended {
    /// The reply is there.
    Replied,
    /// The token was stale (R9). The outcome that was not stored comes along.
    Lost(Option<Outcome>),
    Panicked,
    /// Completed in the handler's own transaction: this is the response.
    #[cfg(feature = "tier")]
    InTransaction(Outcome),
    /// It is not known whether the handler's transaction was committed.
    #[cfg(feature = "tier")]
    Unknown,
    /// The tier says something else than the memory: nothing has run.
    #[cfg_attr(not(feature = "tier"), expect(dead_code, reason = "memory alone lets everyone in"))]
    Told(Told),
}

/// A step that was taken.
enum Step<R> {
    Ended(Ended),
    Later(Later<R>),
}

/// What the client gets.
pub(super) type Reply<R, E> = Result<Response<ResponseBody<R>>, E>;

/// The head of a response, and what becomes of it (R17).
struct Judged {
    head: response::Parts,
    is_kept: bool,
}

impl Judged {
    fn without_answer(&self) -> Verb {
        if self.is_kept { Verb::CompleteNotKept } else { Verb::Release }
    }
}

impl<S, B, R> Work<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    pub(super) fn new(inner: S, asked: Asked, parts: Parts, body: B) -> Pin<Box<Self>> {
        // Made where it stays.
        let place = Box::new_uninit();
        let made = Box::write(
            place,
            Self {
                stage: Stage::Body { body },
                held: Held {
                    asked,
                    inner: Some(inner),
                    parts: Some(parts),
                    received: None,
                    listed: None,
                    fingerprint: Fingerprint::from_parts(Scheme::REQUEST_1, [0; 32]),
                    claimed: None,
                    slot: None,
                    has_begun: false,
                    reply: None,
                    #[cfg(feature = "tier")]
                    staging: None,
                },
            },
        );
        Box::into_pin(made)
    }

    pub(super) fn held(self: Pin<&mut Self>) -> &mut Held<S, R, S::Error> {
        self.project().held
    }

    /// Reads the body on, to its end.
    pub(super) fn poll_read(
        self: Pin<&mut Self>,
        reading: &mut Reading,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Refused>> {
        let this = self.project();
        match this.stage.project() {
            StageProj::Body { body } => reading.poll(body, this.held.asked.policy.max_request, cx),
            // It was read to its end.
            _ => Poll::Ready(Ok(())),
        }
    }

    /// A reading of nothing yet.
    pub(super) fn reading(&self) -> Reading {
        let Held { asked, .. } = &self.held;
        let announced = match &self.stage {
            Stage::Body { body } => body.size_hint().exact(),
            _ => None,
        };
        Reading::new(announced, asked.charge())
    }

    /// The body is here whole.
    pub(super) fn receive(self: Pin<&mut Self>, received: Received) {
        let mut this = self.project();
        this.stage.set(Stage::Ready);
        if let Some(parts) = &this.held.parts {
            this.held.fingerprint = this.held.asked.fingerprint(parts, &received);
        }
        this.held.received = Some(received);
    }

    /// What is still to come of a body that was refused, for nobody.
    pub(super) fn poll_rest(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().stage.project() {
            StageProj::Body { body } => body.poll_frame(cx),
            _ => Poll::Ready(None),
        }
    }

    /// Whether anything of it is worth [lingering](intake::linger) for.
    pub(super) fn has_more(&self, max: usize) -> bool {
        match (&self.held.parts, &self.stage) {
            (Some(parts), Stage::Body { body }) => !intake::is_over(parts, body, max),
            _ => false,
        }
    }

    /// The claim is won: from here on [`poll_run`](Self::poll_run) is polled to its end.
    pub(super) fn own(self: Pin<&mut Self>, permit: Permit, slot: Slot) {
        let this = self.project();
        let held = this.held;
        // The lease counts as renewed as long as the permit lives (R8). Lost already: then the verb
        // at the end says so.
        let _ = permit.attend();
        held.slot = Some(slot);
        // A duplicate may come as soon as the handler runs, before it waits (R19).
        if let (Some(received), true) =
            (&held.received, held.asked.policy.fingerprint.covers_bytes())
            && let Some(faint) = received.bytes.faint()
        {
            let bodies = &held.asked.config.caps.bodies;
            held.listed = Some(bodies.list(*held.fingerprint.digest(), faint));
        }
        #[cfg(feature = "tier")]
        if held.asked.config.backing.is_tiered()
            && let (Some(parts), Some(received)) = (held.parts.take(), held.received.take())
        {
            let mut stage = this.stage;
            stage.set(Stage::Later { until: enter(&held.asked, permit, parts, received) });
            return;
        }
        held.claim(Claimed::Memory(permit));
    }

    /// Runs the handler and settles the identity by what it answers.
    pub(super) fn poll_run(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let watch = self.held.asked.watch.clone();
        watch.within(|| {
            let steps = AssertUnwindSafe(|| self.as_mut().poll_steps(cx));
            if let Ok(polled) = catch_unwind(steps) {
                return polled;
            }
            let mut this = self.as_mut().project();
            // What it left half done may panic once more.
            let _ = catch_unwind(AssertUnwindSafe(|| this.stage.set(Stage::Over)));
            this.held.abandon(true);
            Poll::Ready(Ended::Panicked)
        })
    }

    fn poll_steps(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        loop {
            let mut this = self.as_mut().project();
            let held = this.held;
            let step = match this.stage.as_mut().project() {
                StageProj::Ready => {
                    let Some(inner) = &mut held.inner else { return Poll::Pending };
                    match ready!(inner.poll_ready(cx)) {
                        Ok(()) => match held.begin() {
                            Some(future) => {
                                this.stage.set(Stage::Handler { future });
                                continue;
                            }
                            None => return Poll::Pending,
                        },
                        // Nothing was done.
                        Err(error) => {
                            held.reply = Some(Err(error));
                            held.settle(Verb::Release)
                        }
                    }
                }
                StageProj::Handler { future } => {
                    let answered = ready!(future.poll(cx));
                    this.stage.as_mut().set(Stage::Over);
                    held.answered(answered, cx)
                }
                StageProj::Later { until } => match ready!(until.as_mut().poll(cx)) {
                    #[cfg(feature = "tier")]
                    Then::Entered(entered, parts, received) => {
                        held.parts = Some(parts);
                        held.received = Some(received);
                        this.stage.as_mut().set(Stage::Ready);
                        match entered {
                            Entered::Yours(claimed) => held.claim(claimed),
                            Entered::Told(told) => {
                                (held.slot, held.listed) = (None, None);
                                return Poll::Ready(Ended::Told(told));
                            }
                        }
                        continue;
                    }
                    Then::Captured(judged, captured) => held.captured(judged, captured),
                    Then::Settled(result) => Step::Ended(held.settled(result)),
                    #[cfg(feature = "tier")]
                    Then::Concluded(ended) => Step::Ended(ended),
                },
                // A run that has ended stays so.
                StageProj::Body { .. } | StageProj::Over => return Poll::Pending,
            };
            match step {
                Step::Ended(ended) => {
                    held.listed = None;
                    this.stage.set(Stage::Over);
                    return Poll::Ready(ended);
                }
                Step::Later(until) => this.stage.set(Stage::Later { until }),
            }
        }
    }
}

impl<S, R, E> Held<S, R, E> {
    /// The fingerprint by the scheme of an older record (R4).
    pub(super) fn translate(&self, scheme: Scheme) -> Option<Fingerprint> {
        let (parts, received) = (self.parts.as_ref()?, self.received.as_ref()?);
        self.asked.policy.translate(scheme, parts, received)
    }

    /// It is the owner's, in the tier too.
    fn claim(&mut self, claimed: Claimed) {
        #[cfg(feature = "tier")]
        {
            self.staging = claimed.in_transaction(&self.asked.caller, &self.asked.policy);
        }
        self.asked.watch.owns(claimed.token());
        self.claimed = Some(claimed);
    }

    /// Calls the service. `None` if that was done already.
    fn begin<B>(&mut self) -> Option<S::Future>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        let mut inner = self.inner.take()?;
        let extensions = &mut self.parts.as_mut()?.extensions;
        let Received { bytes, trailers } = self.received.take()?;
        let token = self.claimed.as_ref()?.token();
        self.has_begun = true;
        extensions.insert(Attempt { caller: self.asked.caller.clone(), token });
        extensions.insert(Acted);
        #[cfg(feature = "tier")]
        if let Some(staging) = &self.staging {
            extensions.insert(staging.clone());
        }
        // From here on the handler's bytes are the only ones: it may drop them when it has read
        // them.
        let body = RequestBody::buffered(bytes.into_bytes(), trailers);
        Some(inner.call(Request::from_parts(self.parts.take()?, body)))
    }

    fn answered(&mut self, answered: Result<Response<R>, E>, cx: &mut Context<'_>) -> Step<R>
    where
        R: Body<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        #[cfg(feature = "tier")]
        if let Some(staged) = self.staging.as_ref().and_then(|staging| staging.take()) {
            return self.conclude(staged, answered);
        }
        let (head, body) = match answered {
            Ok(response) => response.into_parts(),
            Err(error) => {
                self.reply = Some(Err(error));
                return self.settle(Verb::Release);
            }
        };
        let policy = &*self.asked.policy;
        let is_kept = if head.extensions.get::<Release>().is_some() {
            false
        } else {
            head.extensions.get::<Keep>().is_some() || policy.statuses.is_kept(head.status)
        };
        // Only these answers are for the waiters too; after another release one of them runs (R14).
        let is_for_all =
            head.status.is_server_error() || head.status == StatusCode::TOO_MANY_REQUESTS;
        let judged = Judged { head, is_kept };
        if capture::is_stream(&judged.head) || !(is_kept || is_for_all) {
            let verb = judged.without_answer();
            let body = ResponseBody::untouched(body);
            self.reply = Some(Ok(Response::from_parts(judged.head, body)));
            return self.settle(verb);
        }
        let (max, limit) = (policy.max_response, policy.capture_time);
        match Capturing::new(body, max).at_once(cx) {
            Ok(captured) => self.captured(judged, captured),
            Err(capturing) => Step::Later(Box::pin(async move {
                let captured = capturing.within(limit).await;
                Then::Captured(judged, captured)
            })),
        }
    }

    /// Settles the identity by the response (R17, R20), and keeps the response for the client.
    fn captured(&mut self, judged: Judged, captured: Captured<R>) -> Step<R> {
        let Asked { policy, caller, method, .. } = &self.asked;
        let without_answer = judged.without_answer();
        let Judged { mut head, is_kept } = judged;
        let (verb, body) = match captured {
            Captured::Whole { data, .. } if !capture::is_as_promised(&head, method, data.len()) => {
                let error = "the body has another length than its head says";
                (without_answer, ResponseBody::tail(data, Rest::Broken(error.into())))
            }
            Captured::Whole { data, trailers } => {
                let trailing = trailers.as_deref();
                let outcome = reply::keep(policy, head.status, &head.headers, &data, trailing);
                // Before the place is given back: it is part of the work.
                let verb = match policy.seal.seal(caller, outcome) {
                    None => without_answer,
                    Some(outcome) if is_kept => Verb::Complete(outcome),
                    Some(outcome) => Verb::ReleaseWith(outcome),
                };
                capture::let_frame(&mut head.headers);
                let body = match reply::has_no_body(head.status) {
                    true => ResponseBody::without_content(),
                    false => ResponseBody::buffered(data, trailers),
                };
                (verb, body)
            }
            Captured::Open { prefix, rest } => (without_answer, ResponseBody::tail(prefix, rest)),
        };
        self.reply = Some(Ok(Response::from_parts(head, body)));
        self.settle(verb)
    }

    /// Settles the identity, if it was not settled already.
    fn settle(&mut self, verb: Verb) -> Step<R> {
        self.slot = None;
        let Some(claimed) = self.claimed.take() else { return Step::Ended(Ended::Replied) };
        match claimed.settle_at_once(verb) {
            Ok(result) => Step::Ended(self.settled(result)),
            Err(in_tier) => {
                Step::Later(Box::pin(async move { Then::Settled(in_tier.settle().await) }))
            }
        }
    }

    fn settled(&mut self, result: Result<Ending, Stale>) -> Ended {
        let Asked { config, policy, watch, .. } = &self.asked;
        match result {
            Ok(ending) => {
                watch.end(if matches!(self.reply, Some(Err(_))) { Ending::Failed } else { ending });
                // A key that was settled stands for its answer from now on, also for one that was
                // not kept.
                if let (Some(Ok(response)), Ending::Kept | Ending::NotKept) =
                    (&mut self.reply, ending)
                {
                    let retention = config.backing.store().retention();
                    reply::say_when_it_expires(policy, retention, response.headers_mut());
                }
                Ended::Replied
            }
            Err(Stale(outcome)) => {
                watch.end(Ending::Lost);
                if !self.has_begun {
                    // Somebody else has settled it, and nothing was done here.
                    return Ended::Replied;
                }
                config.backing.store().note_double_run();
                self.reply = None;
                Ended::Lost(outcome)
            }
        }
    }

    /// The work ended without an answer: the identity is released if nothing has begun, else settled
    /// by the setting of the store (R11).
    fn abandon(&mut self, by_panic: bool) {
        (self.slot, self.listed, self.reply) = (None, None, None);
        if by_panic {
            self.asked.config.counters.panics.up();
        }
        let Some(claimed) = self.claimed.take() else { return };
        #[cfg(feature = "tier")]
        let claimed = match self.staging.as_ref().and_then(|staging| staging.take()) {
            Some(staged) => claimed.find_out(staged),
            None => Some(claimed),
        };
        #[cfg(not(feature = "tier"))]
        let claimed = Some(claimed);
        match claimed {
            Some(claimed) if !self.has_begun => claimed.give_up(),
            claimed => drop(claimed),
        }
        self.asked.watch.end(if by_panic { Ending::Panicked } else { Ending::CutOff });
    }
}

/// Dropped unsettled only if it was cut off, as when the runtime ends.
impl<S, R, E> Drop for Held<S, R, E> {
    fn drop(&mut self) {
        if self.claimed.is_some() {
            self.abandon(std::thread::panicking());
        }
    }
}

/// Takes a claim that was won in memory to the tier.
#[cfg(feature = "tier")]
fn enter<R>(asked: &Asked, permit: Permit, parts: Parts, received: Received) -> Later<R> {
    let (config, policy) = (asked.config.clone(), asked.policy.clone());
    Box::pin(async move {
        let translate = |scheme| policy.translate(scheme, &parts, &received);
        let entered = config.backing.enter(permit, translate).await;
        Then::Entered(entered, parts, received)
    })
}

#[cfg(feature = "tier")]
impl<S, R, E> Held<S, R, E> {
    /// Settles the identity by what the handler has staged in its transaction, whatever it answered.
    fn conclude(&mut self, staged: Staged, answered: Result<Response<R>, E>) -> Step<R> {
        use crate::tier::owned::Concluded;

        self.slot = None;
        let plain = staged.plain.clone();
        let Some(claimed) = self.claimed.take() else { return Step::Ended(Ended::Unknown) };
        let (config, watch) = (self.asked.config.clone(), self.asked.watch.clone());
        // If it was rolled back.
        self.reply = Some(answered.map(|response| response.map(ResponseBody::untouched)));
        Step::Later(Box::pin(async move {
            Then::Concluded(match claimed.conclude(staged).await {
                Concluded::Committed { completed, .. } => {
                    watch.end(if completed.kept { Ending::Kept } else { Ending::NotKept });
                    Ended::InTransaction(plain)
                }
                Concluded::RolledBack => {
                    watch.end(Ending::Released);
                    Ended::Replied
                }
                Concluded::Lost => {
                    watch.end(Ending::Lost);
                    config.backing.store().note_double_run();
                    Ended::Lost(Some(plain))
                }
                Concluded::Unknown => Ended::Unknown,
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Full;
    use tokio::runtime::Handle;
    use tower::{ServiceBuilder, ServiceExt, service_fn};

    use super::*;
    use crate::{Store, http::IdempotencyLayer};

    fn tasks() -> usize {
        Handle::current().metrics().num_alive_tasks()
    }

    /// How many tasks there are while the handler runs, if it waits first and if not.
    #[tokio::test]
    async fn what_does_not_wait_needs_no_task() {
        for (waits, expected) in [(false, 0), (true, 1)] {
            let handler = move |_: Request<RequestBody<Full<Bytes>>>| async move {
                if waits {
                    tokio::task::yield_now().await;
                }
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(tasks().to_string()))))
            };
            let once = IdempotencyLayer::single_tenant(Store::builder().build().unwrap());
            let service = ServiceBuilder::new()
                .layer(once.operation_name("charge"))
                .service(service_fn(handler));
            let request = Request::post("/").header("idempotency-key", "k").body(Full::default());
            let answer = service.oneshot(request.unwrap()).await.unwrap();
            let body = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap();
            assert_eq!(body.to_bytes(), expected.to_string());
        }
    }
}
