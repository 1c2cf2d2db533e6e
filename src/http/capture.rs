//! The response body comes in: buffered whole if it may be kept, else handed on as it comes (R20).

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header, response::Parts};
use http_body::Body;
use http_body_util::BodyExt;

use super::{BoxError, at_once, body::Rest};

/// What became of a response body.
pub(crate) enum Captured<R> {
    /// It is here whole, in a buffer of its own size.
    Whole { data: Bytes, trailers: Option<HeaderMap> },
    /// It is too large, took too long or broke off: so much is here, and the rest is to come.
    Open { prefix: Bytes, rest: Rest<R> },
}

/// Whether the body is a stream or an upgrade, which nobody waits for (R20).
pub(crate) fn is_stream(head: &Parts) -> bool {
    let is_event_stream = || {
        let kind = head.headers.get(header::CONTENT_TYPE)?.as_bytes();
        let kind = kind.split(|&byte| byte == b';').next()?.trim_ascii();
        Some(kind.eq_ignore_ascii_case(b"text/event-stream"))
    };
    head.status == StatusCode::SWITCHING_PROTOCOLS || is_event_stream().unwrap_or(false)
}

/// Buffers up to `max` bytes. One of unknown size may take `limit` for it.
pub(crate) async fn capture<R>(body: R, max: usize, limit: Duration) -> Captured<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let size = body.size_hint();
    let mut body = Box::pin(body);
    if size.lower() > max as u64 {
        return Captured::Open { prefix: Bytes::new(), rest: Rest::Body(body) };
    }
    // At most `max`, as has just been seen.
    let mut data = Vec::with_capacity(size.lower() as usize);
    let mut trailers = None;
    let reading = async {
        while let Some(frame) = body.frame().await {
            match frame.map_err(|error| Some(error.into()))?.into_data() {
                Ok(chunk) => {
                    data.extend_from_slice(&chunk);
                    if data.len() > max {
                        return Err(None);
                    }
                }
                Err(frame) => {
                    trailers = frame.into_trailers().ok();
                    break;
                }
            }
        }
        Ok(())
    };
    let read: Result<(), Option<BoxError>> = match size.exact() {
        Some(_) => reading.await,
        None => at_once::within(limit, pin!(reading)).await.unwrap_or(Err(None)),
    };
    // A buffer of its own size: the store counts the length, not the capacity.
    let data = Bytes::from(data.into_boxed_slice());
    match read {
        Ok(()) => Captured::Whole { data, trailers },
        Err(None) => Captured::Open { prefix: data, rest: Rest::Body(body) },
        Err(Some(error)) => Captured::Open { prefix: data, rest: Rest::Broken(error) },
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
    head.headers.get_all(header::CONTENT_LENGTH).iter().all(|value| length(value) == Some(len))
}

/// Leaves the framing of a body that is here whole to the server, which knows its length: a
/// `Transfer-Encoding` of the handler would contradict it. The other lines keep their order.
pub(crate) fn let_frame(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
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
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn chunks(parts: &'static [&'static [u8]]) -> impl Body<Data = Bytes, Error = BoxError> {
        let frames = parts.iter().map(|part| Ok(Frame::data(Bytes::from_static(part))));
        StreamBody::new(stream::iter(frames.collect::<Vec<_>>()))
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
