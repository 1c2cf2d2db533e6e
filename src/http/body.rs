//! The two bodies of the layer: what the inner service reads, and what the client gets.
//!
//! Ground rules: a body that passes through is polled as it is, never buffered. A body with
//! trailers does not claim to know its size, because an HTTP/1.1 server would then choose
//! `Content-Length` and could send no trailers.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::BoxError;

/// Bytes that are all there, and the trailers behind them.
#[derive(Default)]
struct Whole {
    /// `None` once sent, or if there are none: no empty frame is ever sent.
    data: Option<Bytes>,
    /// Boxed: they are rare, and a body is moved often.
    trailers: Option<Box<HeaderMap>>,
}

impl Whole {
    fn new(data: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { data: Some(data).filter(|data| !data.is_empty()), trailers }
    }

    fn next(&mut self) -> Option<Frame<Bytes>> {
        match self.data.take() {
            Some(data) => Some(Frame::data(data)),
            None => self.trailers.take().map(|trailers| Frame::trailers(*trailers)),
        }
    }

    fn is_end(&self) -> bool {
        self.data.is_none() && self.trailers.is_none()
    }

    fn size(&self) -> SizeHint {
        let len = self.data.as_ref().map_or(0, |data| data.len() as u64);
        let mut size = SizeHint::new();
        size.set_lower(len);
        if self.trailers.is_none() {
            size.set_upper(len);
        }
        size
    }
}

pin_project! {
    /// The request body that the inner service reads.
    ///
    /// For a claimed request the bytes and trailers as the layer received them, already in memory;
    /// else the body of the request itself, untouched.
    pub struct RequestBody<B> {
        #[pin]
        kind: RequestKind<B>,
    }
}

pin_project! {
    #[project = RequestKindProj]
    enum RequestKind<B> {
        Untouched { #[pin] body: B },
        Buffered { whole: Whole },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn untouched(body: B) -> Self {
        Self { kind: RequestKind::Untouched { body } }
    }

    pub(crate) fn buffered(data: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { kind: RequestKind::Buffered { whole: Whole::new(data, trailers) } }
    }
}

/// An empty body.
impl<B> Default for RequestBody<B> {
    fn default() -> Self {
        Self::buffered(Bytes::new(), None)
    }
}

/// Shows which kind of body it is, no bytes.
impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            RequestKind::Untouched { .. } => "RequestBody(untouched)",
            RequestKind::Buffered { .. } => "RequestBody(buffered)",
        })
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            RequestKindProj::Untouched { body } => {
                body.poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(Into::into)))
            }
            RequestKindProj::Buffered { whole } => Poll::Ready(whole.next().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Untouched { body } => body.is_end_stream(),
            RequestKind::Buffered { whole } => whole.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Untouched { body } => body.size_hint(),
            RequestKind::Buffered { whole } => whole.size(),
        }
    }
}

pin_project! {
    /// The response body that the client gets: the inner service's own, a captured or replayed one,
    /// or a problem.
    pub struct ResponseBody<B> {
        #[pin]
        kind: ResponseKind<B>,
    }
}

pin_project! {
    #[project = ResponseKindProj]
    enum ResponseKind<B> {
        Untouched { #[pin] body: B },
        Buffered { whole: Whole },
        Tail { prefix: Option<Bytes>, rest: Rest<B> },
    }
}

/// What comes behind the part that was buffered before the capture was given up (R20).
pub(crate) enum Rest<B> {
    Body(Pin<Box<B>>),
    /// The body broke off there. It yields once before it says so: a server that meets the error
    /// right behind the bytes closes the connection without having sent them.
    Broken(BoxError),
    BrokenNow(BoxError),
    End,
    /// There never is anything, and that is no length: a server that is told of one, zero, would say
    /// so where nothing may be said (204, 304).
    Nothing,
}

impl<B> ResponseBody<B> {
    pub(crate) fn untouched(body: B) -> Self {
        Self { kind: ResponseKind::Untouched { body } }
    }

    pub(crate) fn buffered(data: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { kind: ResponseKind::Buffered { whole: Whole::new(data, trailers) } }
    }

    /// No content, and no length of it.
    pub(crate) fn without_content() -> Self {
        Self { kind: ResponseKind::Tail { prefix: None, rest: Rest::Nothing } }
    }

    pub(crate) fn tail(prefix: Bytes, rest: Rest<B>) -> Self {
        let prefix = Some(prefix).filter(|prefix| !prefix.is_empty());
        Self { kind: ResponseKind::Tail { prefix, rest } }
    }
}

/// An empty body.
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::buffered(Bytes::new(), None)
    }
}

/// Shows which kind of body it is, no bytes.
impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            ResponseKind::Untouched { .. } => "ResponseBody(untouched)",
            ResponseKind::Buffered { .. } => "ResponseBody(buffered)",
            ResponseKind::Tail { .. } => "ResponseBody(tail)",
        })
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            ResponseKindProj::Untouched { body } => {
                body.poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(Into::into)))
            }
            ResponseKindProj::Buffered { whole } => Poll::Ready(whole.next().map(Ok)),
            ResponseKindProj::Tail { prefix, rest } => {
                if let Some(prefix) = prefix.take() {
                    return Poll::Ready(Some(Ok(Frame::data(prefix))));
                }
                let frame = match rest {
                    Rest::Body(body) => ready!(body.as_mut().poll_frame(cx)),
                    ended => {
                        return match std::mem::replace(ended, Rest::End) {
                            Rest::Broken(error) => {
                                *ended = Rest::BrokenNow(error);
                                cx.waker().wake_by_ref();
                                Poll::Pending
                            }
                            Rest::BrokenNow(error) => Poll::Ready(Some(Err(error))),
                            Rest::Body(_) | Rest::End | Rest::Nothing => Poll::Ready(None),
                        };
                    }
                };
                if !matches!(frame, Some(Ok(_))) {
                    *rest = Rest::End;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ResponseKind::Untouched { body } => body.is_end_stream(),
            ResponseKind::Buffered { whole } => whole.is_end(),
            ResponseKind::Tail { prefix, rest } => {
                prefix.is_none()
                    && match rest {
                        Rest::Body(body) => body.is_end_stream(),
                        Rest::Broken(_) | Rest::BrokenNow(_) => false,
                        Rest::End | Rest::Nothing => true,
                    }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            ResponseKind::Untouched { body } => body.size_hint(),
            ResponseKind::Buffered { whole } => whole.size(),
            ResponseKind::Tail { prefix, rest } => {
                let before = prefix.as_ref().map_or(0, |prefix| prefix.len() as u64);
                let rest = match rest {
                    Rest::Body(body) => body.size_hint(),
                    // The length that was promised is not known any more.
                    Rest::Broken(_) | Rest::BrokenNow(_) | Rest::Nothing => SizeHint::new(),
                    Rest::End => SizeHint::with_exact(0),
                };
                let mut size = SizeHint::new();
                size.set_lower(rest.lower().saturating_add(before));
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(before)) {
                    size.set_upper(upper);
                }
                size
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    type Response = ResponseBody<Full<Bytes>>;

    fn trailers() -> Box<HeaderMap> {
        let mut trailers = Box::new(HeaderMap::new());
        trailers.insert("x-sum", http::HeaderValue::from_static("1"));
        trailers
    }

    #[tokio::test]
    async fn r19_bytes_and_trailers_come_back_and_a_size_is_promised_only_without_trailers() {
        let plain = RequestBody::<Full<Bytes>>::buffered(Bytes::from_static(b"abc"), None);
        assert_eq!(plain.size_hint().exact(), Some(3));
        assert_eq!(plain.collect().await.unwrap().to_bytes(), "abc");

        let body = Response::buffered(Bytes::from_static(b"abc"), Some(trailers()));
        assert_eq!(body.size_hint().exact(), None);
        let all = body.collect().await.unwrap();
        assert_eq!(all.trailers(), Some(&*trailers()));
        assert_eq!(all.to_bytes(), "abc");

        let only = Response::buffered(Bytes::new(), Some(trailers()));
        assert!(!only.is_end_stream());
        assert_eq!(only.collect().await.unwrap().trailers(), Some(&*trailers()));
        assert!(Response::default().is_end_stream());
        assert!(RequestBody::<Full<Bytes>>::default().is_end_stream());
    }

    #[tokio::test]
    async fn r20_the_buffered_part_comes_first_and_a_break_stays_a_break() {
        let rest = Rest::Body(Box::pin(Full::new(Bytes::from_static(b"def"))));
        let body = Response::tail(Bytes::from_static(b"abc"), rest);
        assert_eq!(body.size_hint().exact(), Some(6));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "abcdef");

        let mut body = Response::tail(Bytes::from_static(b"abc"), Rest::Broken("cut".into()));
        assert_eq!(body.size_hint().exact(), None);
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "abc");
        assert!(!body.is_end_stream());
        assert!(body.frame().await.unwrap().is_err());
        assert!(body.is_end_stream());
        assert!(body.frame().await.is_none());
    }
}
