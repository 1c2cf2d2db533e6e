//! What became of a key, for a client that lost the answer and perhaps the request too.

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use tower_service::Service;

use super::{
    IdempotencyLayer,
    attempt::Caller,
    body::ResponseBody,
    endpoint,
    layer::Config,
    problem::{self, Problem},
};
use crate::{EntryState, Key};

type Answer = Response<ResponseBody<Full<Bytes>>>;

/// Tells what became of a key: see [`IdempotencyLayer::look_up`].
#[derive(Clone)]
pub struct LookUp {
    config: Arc<Config>,
    endpoint: String,
}

impl IdempotencyLayer {
    /// A service that tells what became of a key of one endpoint, such as `POST /orders/{}/refund`, to
    /// the account that it belongs to. Mount it for GET, behind the same authentication.
    ///
    /// The key is sent in the same field as with the request itself, not in the path, where it
    /// would be logged. The answer is JSON that no cache may store:
    /// `{"state":"completed","age_seconds":3,"remaining_seconds":86396}`. `state` is `in-flight`,
    /// `completed`, `not-kept` or `held`; the age counts from the claim while in flight, else from
    /// completion or hold; what remains is until the lease lapses or the key ends. A key that is
    /// not there is 404, another account's too: nothing tells them apart.
    ///
    /// It claims nothing, waits for nothing and shows no response: whoever has the request sends
    /// it again, and waits or gets the replay; it is the body that proves that he means the same
    /// (R5). [`attach`](Self::attach) gives the answer to who has the key alone.
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
    ///     .route("/charges/attempt", get_service(once.look_up("POST /charges")));
    /// # }
    /// # Ok::<(), oncekey::ConfigError>(())
    /// ```
    pub fn look_up(&self, endpoint: impl AsRef<str>) -> LookUp {
        let endpoint = endpoint::erased(endpoint.as_ref());
        LookUp { config: Arc::clone(&self.config), endpoint }
    }
}

impl LookUp {
    async fn answer(self, parts: Parts) -> Answer {
        let Self { config, endpoint } = &self;
        let policy = config.policy(endpoint);
        let caller = match caller_of(config, endpoint, &parts) {
            Ok(caller) => caller,
            Err(problem) => return problem.answer(&policy.problem_base),
        };
        let found = match caller.identity() {
            Ok(id) => config.backing.look_up(id).await,
            // A name that is too long is none: nothing was ever claimed by it.
            Err(_) => Ok(None),
        };
        let seen = match found {
            Ok(Some(seen)) => seen,
            Ok(None) => return nothing(),
            Err(retry_after) => {
                let problem = Problem::TierUnavailable;
                let (base, detail) = (&policy.problem_base, problem.detail());
                return problem.answer_with(base, detail, Some(retry_after));
            }
        };
        let state = match seen.state {
            EntryState::InFlight => "in-flight",
            EntryState::Held => "held",
            EntryState::Completed => "completed",
            EntryState::NotKept => "not-kept",
        };
        let (age, remaining) = (seen.age.as_secs(), seen.remaining.as_secs());
        let json = format!(
            "{{\"state\":\"{state}\",\"age_seconds\":{age},\"remaining_seconds\":{remaining}}}"
        );
        let mut response = Response::new(ResponseBody::buffered(Bytes::from(json), None));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

/// Whose key of this endpoint is asked about.
pub(super) fn caller_of(config: &Config, endpoint: &str, parts: &Parts) -> Result<Caller, Problem> {
    let policy = config.policy(endpoint);
    let account = config.account(parts).ok_or(Problem::AccountUnknown)?;
    let lines = parts.headers.get_all(&policy.header_name);
    match Key::from_lines(lines.iter().map(|line| line.as_bytes()), policy.key_form) {
        Ok(Some(key)) => Ok(Caller { account, endpoint: endpoint.to_owned(), key }),
        Ok(None) => Err(Problem::KeyMissing),
        Err(_) => Err(Problem::KeyInvalid),
    }
}

/// The same for a key that is not there and for one of another account.
pub(super) fn nothing<B>() -> Response<ResponseBody<B>> {
    problem::plain(StatusCode::NOT_FOUND, "nothing stands for this key")
}

impl<B> Service<Request<B>> for LookUp {
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let answer = self.clone().answer(request.into_parts().0);
        Box::pin(async move { Ok(answer.await) })
    }
}

impl fmt::Debug for LookUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LookUp").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
