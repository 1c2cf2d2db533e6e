//! [`Idempotency`]: who is let in.
//!
//! Ground rules: everything that the head of a request can decide is decided in
//! [`call`](Idempotency), in this order: method, an outer layer, endpoint, account, key, announced
//! length. What passes is not touched. The body is not polled before.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower_service::Service;

use super::{
    BoxError,
    asked::Asked,
    attempt::{Acted, Caller},
    body::{RequestBody, ResponseBody},
    future::ResponseFuture,
    intake,
    layer::Config,
    policy::Policy,
    problem::Problem,
    watch,
    work::Work,
};
use crate::{IdentityError, Key};

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes of another.
///
/// It is always ready: an inner service that is not delays or refuses only the requests that get
/// there, not the replays (R18).
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> Idempotency<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }
}

impl<S> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").finish_non_exhaustive()
    }
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let pass = |request: Request<B>| {
            ResponseFuture::pass(self.inner.clone(), request.map(RequestBody::untouched))
        };
        if !self.config.covers(request.method()) || request.extensions().get::<Acted>().is_some() {
            return pass(request);
        }
        let (parts, body) = request.into_parts();
        match admit(&self.config, &parts) {
            Admission::Pass => pass(Request::from_parts(parts, body)),
            Admission::Refuse { problem, policy, detail } => {
                linger(&parts, body, policy.max_request, policy.read_limit);
                let detail = detail.as_deref().unwrap_or(problem.detail());
                let answer = problem.answer_with(&policy.problem_base, detail, None);
                ResponseFuture::answer(answer)
            }
            Admission::Enter { policy, caller } => {
                if intake::is_announced_too_large(&parts.headers, &body, policy.max_request) {
                    watch::refused(&caller.endpoint, Problem::RequestTooLarge);
                    // As much again as is allowed.
                    let max = policy.max_request.saturating_mul(2);
                    linger(&parts, body, max, policy.read_limit);
                    let answer = Problem::RequestTooLarge.answer(&policy.problem_base);
                    return ResponseFuture::answer(answer);
                }
                let asked = Asked::new(Arc::clone(&self.config), policy, caller, &parts);
                ResponseFuture::work(Work::new(self.inner.clone(), asked, parts, body))
            }
        }
    }
}

/// Reads on what is still coming of a request that its head has refused.
fn linger<B>(parts: &Parts, body: B, max: usize, limit: Duration)
where
    B: Body<Data = Bytes> + Send + 'static,
{
    if !intake::is_over(parts, &body, max) {
        let mut body = Box::pin(body);
        intake::linger(move |cx| body.as_mut().poll_frame(cx), max, limit);
    }
}

enum Admission {
    /// To the inner service, untouched.
    Pass,
    Refuse {
        problem: Problem,
        policy: Arc<Policy>,
        /// `None`: nothing more to say than usual.
        detail: Option<String>,
    },
    Enter {
        policy: Arc<Policy>,
        caller: Arc<Caller>,
    },
}

/// What the head of a request of a covered method decides.
fn admit(config: &Config, parts: &Parts) -> Admission {
    let Some(endpoint) = config.endpoint(parts) else {
        config.counters.unclaimed.up();
        watch::unclaimed();
        return Admission::Pass;
    };
    let policy = config.policy(&endpoint);
    if !policy.methods.contains(&parts.method) {
        return Admission::Pass;
    }
    let refuse = |endpoint: &str, problem, detail| {
        watch::refused(endpoint, problem);
        let policy = Arc::clone(policy);
        Admission::Refuse { problem, policy, detail }
    };
    let Some(account) = config.account(parts) else {
        return refuse(&endpoint, Problem::AccountUnknown, None);
    };
    let lines = parts.headers.get_all(&policy.header_name);
    let key = match Key::from_lines(lines.iter().map(|line| line.as_bytes()), policy.key_form) {
        Ok(Some(key)) => key,
        Ok(None) if policy.required => {
            let field = policy.header_name.as_str();
            let detail = format!("this operation asks for the field {field}: send one");
            return refuse(&endpoint, Problem::KeyMissing, Some(detail));
        }
        Ok(None) => return Admission::Pass,
        Err(error) => {
            return refuse(&endpoint, Problem::KeyInvalid, Some(error.to_string()));
        }
    };
    let caller = Caller { account, endpoint, key };
    match caller.identity() {
        Ok(_) => Admission::Enter { policy: Arc::clone(policy), caller: Arc::new(caller) },
        // A name that is too long is none: it would have to be cut, and R1 forbids that.
        Err(IdentityError::Endpoint { .. }) => {
            config.counters.unclaimed.up();
            watch::unclaimed();
            Admission::Pass
        }
        Err(error) => refuse(&caller.endpoint, Problem::AccountUnknown, Some(error.to_string())),
    }
}
