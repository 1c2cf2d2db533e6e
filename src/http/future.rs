//! [`ResponseFuture`]: one allocation for a request that was let in, more only if it has to wait; none for
//! one that passes.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    BoxError,
    body::{RequestBody, ResponseBody},
    owner::{self, AtOnce},
    work::Work,
};

type GoesOn<R, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, E>> + Send>>;

pin_project! {
    /// The future of [`Idempotency`](super::Idempotency). Dropping it does not stop an owner (R18).
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        #[pin]
        kind: Kind<S, B, R>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        /// Not ready yet.
        Pass { service: S, request: Option<Request<RequestBody<B>>> },
        Called { #[pin] future: S::Future },
        Answer { response: Option<Response<ResponseBody<R>>> },
        /// Let in.
        Work { work: Option<Pin<Box<Work<S, B, R>>>> },
        /// It had to wait.
        GoesOn { going_on: GoesOn<R, S::Error> },
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    pub(super) fn pass(service: S, request: Request<RequestBody<B>>) -> Self {
        Self { kind: Kind::Pass { service, request: Some(request) } }
    }

    pub(super) fn answer(response: Response<ResponseBody<R>>) -> Self {
        Self { kind: Kind::Answer { response: Some(response) } }
    }

    pub(super) fn work(work: Pin<Box<Work<S, B, R>>>) -> Self {
        Self { kind: Kind::Work { work: Some(work) } }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut kind = self.project().kind;
        loop {
            let next = match kind.as_mut().project() {
                KindProj::Pass { service, request } => {
                    ready!(service.poll_ready(cx))?;
                    // Taken once: the state is left below. A finished future stays pending.
                    let Some(request) = request.take() else { return Poll::Pending };
                    Kind::Called { future: service.call(request) }
                }
                KindProj::Called { future } => {
                    return future.poll(cx).map(|result| {
                        result.map(|response| response.map(ResponseBody::untouched))
                    });
                }
                KindProj::Answer { response } => {
                    return response
                        .take()
                        .map_or(Poll::Pending, |response| Poll::Ready(Ok(response)));
                }
                KindProj::Work { work } => {
                    let Some(work) = work.take() else { return Poll::Pending };
                    match owner::at_once(work, cx) {
                        AtOnce::Answer(answer) => return Poll::Ready(answer),
                        AtOnce::Waits(work, waits) => {
                            Kind::GoesOn { going_on: Box::pin(owner::go_on(work, waits)) }
                        }
                    }
                }
                KindProj::GoesOn { going_on } => return going_on.as_mut().poll(cx),
            };
            kind.set(next);
        }
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
