//! The face for reqwest, as a middleware of `reqwest-middleware`.

use std::ops::ControlFlow;

use async_trait::async_trait;
use http::Extensions;
use reqwest::{Body, Request, Response, ResponseBuilderExt as _};
use reqwest_middleware::{Error, Middleware, Next, Result};

use super::{IntentError, IntentLayer, Report, trial::Trial};

/// Errors are an [`IntentError`] of [`Error`], as [`Error::Middleware`]; those of requests that are
/// not covered are what they were. The extensions have a [`Report`] from the first
/// attempt on: with `execute_with_extensions` the caller has the key also if it drops the future. Put it
/// outside of middlewares that are to see each attempt, such as one that signs or traces.
#[async_trait]
impl Middleware for IntentLayer {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let policy = &*self.policy;
        if !policy.methods.contains(request.method()) {
            return next.run(request, extensions).await;
        }
        // Of an earlier request that had these extensions: its key is not this one's.
        extensions.remove::<Report>();
        if request.try_clone().is_none() {
            return Err(failed(IntentError::NotRepeatable));
        }
        let mut trial = Trial::begin(policy, request.headers_mut(), extensions).map_err(failed)?;
        if policy.watch {
            let body = request.body().and_then(Body::as_bytes).unwrap_or_default();
            super::watch::look(request.method(), request.url().as_str(), body, &trial.key);
        }
        loop {
            let Some(again) = request.try_clone() else {
                return Err(failed(IntentError::NotRepeatable));
            };
            trial.begin_attempt(extensions);
            let sent = trial.in_attempt(next.clone().run(again, extensions)).await;
            let sent = sent.map(|sent| {
                sent.map(of_the_types).map_err(|error| {
                    let may_help = is_of_the_connection(&error);
                    (error, may_help)
                })
            });
            if let ControlFlow::Break(end) = trial.judge(sent).await {
                return end.map(|response| response.map(Body::wrap).into()).map_err(failed);
            }
        }
    }
}

/// As a response of the `http` crate, which still knows its URL when it is made one of reqwest again.
fn of_the_types(response: Response) -> http::Response<Body> {
    let url = response.url().clone();
    let mut response = http::Response::from(response);
    if let Ok(holder) = http::Response::builder().url(url).body(()) {
        response.extensions_mut().extend(holder.into_parts().0.extensions);
    }
    response
}

/// Not one that the next attempt would meet again: a URL that is none, too many redirects, another
/// middleware's refusal.
fn is_of_the_connection(error: &Error) -> bool {
    match error {
        Error::Middleware(_) => false,
        Error::Reqwest(error) => !error.is_builder() && !error.is_redirect() && !error.is_status(),
    }
}

fn failed(error: IntentError<Error>) -> Error {
    Error::middleware(error)
}
