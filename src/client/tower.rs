//! The tower face: for any client that is a service.

use std::{
    future::{Future, poll_fn},
    ops::ControlFlow,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tower_layer::Layer;
use tower_service::Service;

use super::{AnswerBody, BoxError, IntentError, IntentLayer, layer::Policy, trial::Trial};

/// A client that keeps the key of an intent over its attempts. Made by [`IntentLayer`].
///
/// The inner service takes a body that can be made of bytes, such as `Full<Bytes>`. The body of a
/// request is taken into memory, within the [`deadline`](IntentLayer::deadline), if it knows its exact
/// size, and sent as the same bytes each time. One that does not, is over
/// [`max_body`](IntentLayer::max_body) or has trailers is refused before the first attempt. Every error of the inner service is taken for
/// one of the connection, and the request is tried again. Each attempt has a clone of the service,
/// which is dropped with it: one that failed to become ready is not asked again.
///
/// Errors are an [`IntentError`]. A future that is dropped sends nothing more; whether what it had sent
/// was done is not known, so make the key before, where you may drop it.
///
/// ```
/// use std::convert::Infallible;
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use oncekey::{IntentKey, client::{IntentLayer, Report}};
/// use tower::{Layer as _, Service as _, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let service = service_fn(|request: Request<Full<Bytes>>| async move {
///     assert_eq!(request.headers()["idempotency-key"], "\"charge:inv_17\"");
///     Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
/// });
/// let mut client = IntentLayer::new().layer(service);
/// let mut request = Request::post("http://pay.example/charges").body(Full::from("{}"))?;
/// request.extensions_mut().insert(IntentKey::derived("charge", ["inv_17"]));
/// let response = client.call(request).await?;
/// assert_eq!(response.extensions().get::<Report>().map(Report::attempts), Some(1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Intents<S> {
    inner: S,
    policy: Arc<Policy>,
}

impl<S> Layer<S> for IntentLayer {
    type Service = Intents<S>;

    fn layer(&self, inner: S) -> Intents<S> {
        Intents { inner, policy: Arc::clone(&self.policy) }
    }
}

impl<S, B, R> Service<Request<B>> for Intents<S>
where
    S: Service<Request<B>, Response = Response<R>, Error: Send, Future: Send>,
    S: Clone + Send + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + From<Bytes> + Send + 'static,
    R: Body<Data: Send, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    type Response = Response<AnswerBody<R>>;
    type Error = IntentError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    /// Always ready: each attempt waits until the inner service is.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(insist(self.inner.clone(), Arc::clone(&self.policy), request))
    }
}

/// `service` is one that nobody asks whether it is ready: attempts are made by clones of it.
async fn insist<S, B, R>(
    service: S,
    policy: Arc<Policy>,
    request: Request<B>,
) -> Result<Response<AnswerBody<R>>, IntentError<S::Error>>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: Body<Error: Into<BoxError>> + From<Bytes>,
    R: Body<Error: Into<BoxError>> + Unpin,
{
    if !policy.methods.contains(request.method()) {
        let sent = send(service, request).await;
        return sent.map(|response| response.map(AnswerBody::unread)).map_err(IntentError::Passed);
    }
    let (mut parts, body) = request.into_parts();
    if body.size_hint().exact().is_none_or(|bytes| bytes > policy.max_body) {
        return Err(IntentError::NotRepeatable);
    }
    let mut trial = Trial::begin(&policy, &mut parts.headers, &parts.extensions)?;
    let body = trial.in_time(whole(body, policy.max_body)).await??;
    if policy.watch {
        super::watch::look(&parts.method, &parts.uri.to_string(), &body, &trial.key);
    }
    loop {
        trial.begin_attempt(&mut parts.extensions);
        let request = Request::from_parts(parts.clone(), B::from(body.clone()));
        let sent = trial.in_attempt(send(service.clone(), request)).await;
        let sent = sent.map(|sent| sent.map_err(|error| (error, true)));
        if let ControlFlow::Break(end) = trial.judge(sent).await {
            return end;
        }
    }
}

/// The bytes of a body that has no more than it may have, whatever it said of its size, and nothing
/// else: what is made of bytes has no trailers.
async fn whole<B, E>(body: B, most: u64) -> Result<Bytes, IntentError<E>>
where
    B: Body<Error: Into<BoxError>>,
{
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    match Limited::new(body, most).collect().await {
        Ok(body) if body.trailers().is_some() => Err(IntentError::NotRepeatable),
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(IntentError::NotRepeatable),
        Err(error) => Err(IntentError::Body(error)),
    }
}

async fn send<S: Service<Q>, Q>(mut service: S, request: Q) -> Result<S::Response, S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}
