//! The response body comes in: buffered whole if it may be kept, else handed on as it comes (R20).

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header, response::Parts};
use http_body::{Body, Frame};
use tokio::time::timeout;

use super::{BoxError, body::Rest, lines};

/// What became of a response body.
pub(crate) enum Captured<R> {
    /// It is here whole.
    Whole { data: Bytes, trailers: Option<Box<HeaderMap>> },
    /// It is too large, took too long or broke off: so much is here, and the rest is to come.
    Open { prefix: Bytes, rest: Rest<R> },
}

const EVENT_STREAM: &[u8] = b"text/event-stream";

/// Whether the body is a stream or an upgrade, which nobody waits for (R20).
pub(crate) fn is_stream(head: &Parts) -> bool {
    let is_event_stream = || {
        let kind = lines(&head.headers, &header::CONTENT_TYPE).next()?;
        let kind = kind.as_bytes().trim_ascii_start();
        let (kind, rest) = kind.split_at_checked(EVENT_STREAM.len())?;
        let is_all = matches!(rest.trim_ascii_start().first(), None | Some(b';'));
        Some(is_all && kind.eq_ignore_ascii_case(EVENT_STREAM))
    };
    head.status == StatusCode::SWITCHING_PROTOCOLS || is_event_stream().unwrap_or(false)
}

/// A response body on its way in, up to `max` bytes.
pub(crate) struct Capturing<R> {
    body: Pin<Box<R>>,
    max: usize,
    is_sized: bool,
    /// Most bodies come in one piece, which is not copied.
    first: Bytes,
    /// All of them, if there are more.
    all: Vec<u8>,
}

/// How far a body was read.
enum Read {
    ToTheEnd(Option<Box<HeaderMap>>),
    ToTheLimit,
    Broken(BoxError),
}

impl<R> Capturing<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    pub(crate) fn new(body: R, max: usize) -> Self {
        let is_sized = body.size_hint().exact().is_some();
        Self { body: Box::pin(body), max, is_sized, first: Bytes::new(), all: Vec::new() }
    }

    /// What became of it, or how far it is if it has to wait.
    pub(crate) fn at_once(mut self, cx: &mut Context<'_>) -> Result<Captured<R>, Self> {
        match self.poll(cx) {
            Poll::Ready(read) => Ok(self.captured(read)),
            Poll::Pending => Err(self),
        }
    }

    /// What became of it. One of unknown size may take `limit` for it.
    pub(crate) async fn within(mut self, limit: Duration) -> Captured<R> {
        let is_sized = self.is_sized;
        let reading = poll_fn(|cx| self.poll(cx));
        let read = match is_sized {
            true => reading.await,
            false => timeout(limit, reading).await.unwrap_or(Read::ToTheLimit),
        };
        self.captured(read)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Read> {
        if self.len() == 0 && self.body.size_hint().lower() > self.max as u64 {
            return Poll::Ready(Read::ToTheLimit);
        }
        while !self.body.is_end_stream() {
            let Some(frame) = ready!(self.body.as_mut().poll_frame(cx)) else { break };
            match frame.map(Frame::into_data) {
                Ok(Ok(chunk)) => {
                    self.take(chunk);
                    if self.len() > self.max {
                        return Poll::Ready(Read::ToTheLimit);
                    }
                }
                Ok(Err(frame)) => {
                    let trailers = frame.into_trailers().ok().map(Box::new);
                    return Poll::Ready(Read::ToTheEnd(trailers));
                }
                Err(error) => return Poll::Ready(Read::Broken(error.into())),
            }
        }
        Poll::Ready(Read::ToTheEnd(None))
    }

    fn len(&self) -> usize {
        self.first.len().max(self.all.len())
    }

    fn take(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.first = chunk;
            return;
        }
        if self.all.is_empty() {
            // What is still to come is within the limit, as far as it is known.
            let left = self.body.size_hint().lower().min(self.max as u64) as usize;
            self.all.reserve_exact(self.first.len() + chunk.len() + left);
            self.all.extend_from_slice(&self.first);
        }
        self.all.extend_from_slice(&chunk);
    }

    fn captured(self, read: Read) -> Captured<R> {
        let data = match self.all.is_empty() {
            true => self.first,
            false => Bytes::from(self.all),
        };
        match read {
            Read::ToTheEnd(trailers) => Captured::Whole { data, trailers },
            Read::ToTheLimit => Captured::Open { prefix: data, rest: Rest::Body(self.body) },
            Read::Broken(error) => Captured::Open { prefix: data, rest: Rest::Broken(error) },
        }
    }
}

/// Whether the head says of the body that it has this length, or nothing.
///
/// If not, it broke off or is longer than it may be. A server that meets it as a stream notices and
/// ends the connection; one that is told the length it really has believes it, sends the head as it
/// is, and the next response begins where the client still expects this one.
pub(crate) fn is_as_promised(head: &Parts, method: &Method, len: usize) -> bool {
    // What is said to `HEAD` and with 304 is the length of another response's body.
    if method == Method::HEAD || head.status == StatusCode::NOT_MODIFIED {
        return true;
    }
    let length = |value: &HeaderValue| value.to_str().ok()?.trim().parse::<usize>().ok();
    lines(&head.headers, &header::CONTENT_LENGTH).all(|value| length(value) == Some(len))
}

/// Leaves the framing of a body that is here whole to the server, which knows its length: a
/// `Transfer-Encoding` of the handler would contradict it. The other lines keep their order.
pub(crate) fn let_frame(headers: &mut HeaderMap) {
    if lines(headers, &header::TRANSFER_ENCODING).next().is_some() {
        let lines = std::mem::take(headers);
        let lines = lines.iter().filter(|(name, _)| *name != header::TRANSFER_ENCODING);
        for (name, value) in lines {
            headers.append(name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt, stream};
    use http::Response;
    use http_body_util::{Full, StreamBody};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn chunks(parts: &'static [&'static [u8]]) -> impl Body<Data = Bytes, Error = BoxError> {
        let frames = parts.iter().map(|part| Ok(Frame::data(Bytes::from_static(part))));
        StreamBody::new(stream::iter(frames.collect::<Vec<_>>()))
    }

    async fn capture<R>(body: R, max: usize, limit: Duration) -> Captured<R>
    where
        R: Body<Data = Bytes>,
        R::Error: Into<BoxError>,
    {
        Capturing::new(body, max).within(limit).await
    }

    fn prefix<R>(captured: Captured<R>) -> Option<Bytes> {
        match captured {
            Captured::Whole { .. } => None,
            Captured::Open { prefix, .. } => Some(prefix),
        }
    }

    #[tokio::test]
    async fn r20_up_to_the_limit_it_is_whole() {
        for max in [6, 7] {
            let Captured::Whole { data, .. } = capture(chunks(&[b"abc", b"def"]), max, LONG).await
            else {
                panic!("not whole at {max}")
            };
            assert_eq!(data, "abcdef");
        }
        let open = capture(chunks(&[b"abc", b"def", b"ghi"]), 5, LONG).await;
        assert_eq!(prefix(open).unwrap(), "abcdef");
        let known = capture(Full::new(Bytes::from_static(b"abcdef")), 5, LONG).await;
        assert_eq!(prefix(known).unwrap(), "", "a known size is not read to find out");
        let empty = capture(Full::new(Bytes::new()), 0, LONG).await;
        assert!(prefix(empty).is_none());
    }

    #[tokio::test]
    async fn r20_what_came_before_the_limit_or_the_break_is_not_lost() {
        let first = || stream::iter([Ok(Frame::data(Bytes::from_static(b"abc")))]);
        let stalled = StreamBody::new(first().chain(stream::pending::<Result<_, BoxError>>()));
        let open = capture(stalled, 99, Duration::from_millis(1)).await;
        assert_eq!(prefix(open).unwrap(), "abc");

        let cut = stream::iter([Err(BoxError::from("cut"))]);
        let cut = StreamBody::new(first().chain(cut));
        match capture(cut, 99, LONG).await {
            Captured::Open { prefix, rest: Rest::Broken(_) } => assert_eq!(prefix, "abc"),
            _ => panic!("not broken"),
        }
    }

    #[test]
    fn r20_a_body_that_is_not_as_its_head_says_is_known() {
        let is = |status: u16, lengths: &[&str], method: Method, len: usize| {
            let mut response = Response::builder().status(status);
            for length in lengths {
                response = response.header("content-length", *length);
            }
            is_as_promised(&response.body(()).unwrap().into_parts().0, &method, len)
        };
        assert!(is(200, &[], Method::POST, 5));
        assert!(is(200, &["5"], Method::POST, 5));
        assert!(!is(200, &["9"], Method::POST, 5));
        assert!(!is(200, &["4"], Method::POST, 5));
        assert!(!is(200, &["5", "6"], Method::POST, 5));
        assert!(!is(200, &["no length"], Method::POST, 5));
        assert!(is(200, &["9"], Method::HEAD, 0));
        assert!(is(304, &["9"], Method::POST, 0));
    }

    #[test]
    fn r20_only_the_framing_is_left_to_the_server() {
        let mut headers = HeaderMap::new();
        let lines =
            [("a", "1"), ("transfer-encoding", "chunked"), ("b", "2"), ("a", "3"), ("c", "4")];
        for (name, value) in lines {
            headers.append(name, HeaderValue::from_static(value));
        }
        let_frame(&mut headers);
        let left: Vec<_> = headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(left, ["a", "a", "b", "c"]);
    }

    #[test]
    fn r20_event_streams_and_upgrades_are_known_by_their_head() {
        let is = |status, kind: &str| {
            let response = Response::builder().status(status).header("content-type", kind);
            is_stream(&response.body(()).unwrap().into_parts().0)
        };
        assert!(is(200, "text/event-stream"));
        assert!(is(200, "Text/Event-Stream ; charset=utf-8"));
        assert!(!is(200, "text/event-streams"));
        assert!(!is(200, "text/plain"));
        assert!(is(101, "text/plain"));
    }
}
