//! The answer of a key, for a client that lost it and has not the request any more.
//!
//! Ground rule: who attaches runs nothing. A waiter may be made the next owner; here it gives that on
//! at once, to the next who has the request, and looks again.

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header, request::Parts};
use http_body_util::Full;
use tokio::time::Instant;
use tower_service::Service;

use super::{
    IdempotencyLayer,
    asked::Asked,
    backing::There,
    body::ResponseBody,
    endpoint,
    layer::Config,
    look_up::{caller_of, nothing},
    owner::{self, Waited},
    problem::Problem,
    shares::Of,
};
use crate::{Claim, Settled};

type Answer = Response<ResponseBody<Full<Bytes>>>;

/// Gives the answer of a key: see [`IdempotencyLayer::attach`].
#[derive(Clone)]
pub struct Attach {
    config: Arc<Config>,
    endpoint: String,
}

impl IdempotencyLayer {
    /// A service that waits for and gives the answer of a key of one endpoint, such as
    /// `POST /orders/{}/refund`, to the account that it belongs to. Mount it for GET, behind the same
    /// authentication: for a client that lost the answer and has kept the key, but not the request.
    ///
    /// The key is sent in the same field as with the request itself, not in the path, where it would be
    /// logged. The answer is that of a retry: the stored response with its marks, asked for by
    /// [`may_replay`](Self::may_replay) and opened by [`Sealing`](super::Sealing) as any replay, or a
    /// problem: "outcome unknown", "response not kept", and "in flight" after
    /// [`wait_limit`](Self::wait_limit), which `Prefer: wait=N` lowers or raises as for a retry (R13).
    /// While it waits it counts as a duplicate, under the same caps (R15). A key that is not there is
    /// 404, another account's too. No cache may store any of it (`Cache-Control: no-store`, whatever
    /// the handler said of its answer to the write).
    ///
    /// It compares no body, so the key alone gives the answer: where that is not enough proof, mount
    /// [`look_up`](Self::look_up) instead. It never runs anything: where the owner gives the key up
    /// without an answer, the next who has the request is told to run, or the answer here is 404.
    /// Logs and metrics count it as no attempt.
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Router, routing::{get_service, post}};
    /// use oncekey::{Store, http::IdempotencyLayer};
    ///
    /// let once = IdempotencyLayer::single_tenant(Store::builder().build()?);
    /// let app: Router = Router::new()
    ///     .route("/charges", post(|| async { "charged" }))
    ///     .layer(once.clone())
    ///     .route("/charges/answer", get_service(once.attach("POST /charges")));
    /// # }
    /// # Ok::<(), oncekey::ConfigError>(())
    /// ```
    pub fn attach(&self, endpoint: impl AsRef<str>) -> Attach {
        let endpoint = endpoint::erased(endpoint.as_ref());
        Attach { config: Arc::clone(&self.config), endpoint }
    }
}

impl Attach {
    async fn answer(self, parts: Parts) -> Answer {
        let Self { config, endpoint } = &self;
        let policy = config.policy(endpoint);
        let caller = match caller_of(config, endpoint, &parts) {
            Ok(caller) => Arc::new(caller),
            Err(problem) => return problem.answer(&policy.problem_base),
        };
        let asked = Asked::attached(Arc::clone(config), Arc::clone(policy), caller, &parts);
        let mut seat = config.caps.share(&asked.caller, Of::Waiters);
        let mut is_seated = false;
        let deadline = owner::after(asked.wait_limit);
        loop {
            // A name that is too long is none: nothing was ever claimed by it.
            let Ok(id) = asked.caller.identity() else { return nothing() };
            let claim = match config.backing.there(id).await {
                There::Here(claim) => claim,
                There::Nothing => return nothing(),
                There::Elsewhere { look_again } => {
                    let next = owner::after(look_again);
                    tokio::time::sleep_until(next.min(deadline)).await;
                    if deadline <= Instant::now() {
                        return asked.answer(Problem::InFlight);
                    }
                    continue;
                }
                There::Outcome(outcome) => return asked.hand_back(&outcome, None),
                There::Unavailable { retry_after } => return asked.unavailable(retry_after),
            };
            let pending = match claim {
                Claim::InFlight(pending) => pending,
                Claim::Replay(replay) => return asked.replay(&replay),
                Claim::NotKept => return asked.answer(Problem::ResponseNotKept),
                Claim::Held => return asked.answer(Problem::OutcomeUnknown),
                // An observer is told of neither.
                Claim::Won(_) | Claim::Mismatch => return nothing(),
            };
            is_seated = is_seated || seat.as_mut().is_none_or(|seat| seat.grow(1));
            if !is_seated {
                return asked.answer(Problem::InFlight);
            }
            match owner::wait(pending, deadline).await {
                Waited::Late => return asked.answer(Problem::InFlight),
                Waited::Lapsed | Waited::Settled(Settled::Mismatch) => {}
                // Lost means that somebody has settled it.
                Waited::Settled(Settled::Yours(permit)) => drop(permit.release()),
                Waited::Settled(Settled::Refused(_)) => {}
                Waited::Settled(settled) => return owner::told(&asked, settled),
            }
        }
    }
}

impl<B> Service<Request<B>> for Attach {
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let answer = self.clone().answer(request.into_parts().0);
        Box::pin(async move {
            let mut answer = answer.await;
            // Another key in the same field of the same request has another answer.
            let no_store = HeaderValue::from_static("no-store");
            answer.headers_mut().insert(header::CACHE_CONTROL, no_store);
            Ok(answer)
        })
    }
}

impl fmt::Debug for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attach").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
