//! From a response to the outcome that is kept, and back to the response of a replay (R16).
//!
//! Trailers are kept as header lines whose name begins with a colon, which no header name can.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};

use super::{body::ResponseBody, lines, policy::Policy};
use crate::Outcome;

/// Marks a header line of an outcome as a trailer.
const TRAILER: u8 = b':';

/// What is kept of a response: copies, because it is buffers that stay in memory and the store counts
/// the bytes.
pub(crate) fn keep(
    policy: &Policy,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    trailers: Option<&HeaderMap>,
) -> Outcome {
    let named = named_by_connection(headers);
    let is_kept = |name: &HeaderName| !is_left_out(policy, name) && !named.contains(name);
    let line = |(name, value): (&'_ HeaderName, &'_ HeaderValue)| name.as_str().len() + value.len();
    let room = headers.iter().map(line).sum::<usize>() + headers.len() * Outcome::LINE;
    let lines = headers.iter().filter(|(name, _)| is_kept(name));
    let mut outcome = Outcome::new(status.as_u16())
        .headers(room, lines.map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes())));
    for (name, value) in trailers.into_iter().flatten().filter(|(name, _)| is_kept(name)) {
        outcome = outcome.header([&[TRAILER], name.as_str().as_bytes()].concat(), value.as_bytes());
    }
    if body.is_empty() { outcome } else { outcome.copy_of(body) }
}

/// The response of a replay to a request of this method and version.
///
/// An outcome that no handler made (an operator's, or a worker's) may hold what is no HTTP: such
/// lines are left out, and such a status is a 500.
pub(crate) fn replay<B>(
    policy: &Policy,
    outcome: &Outcome,
    method: &Method,
    version: Version,
) -> Response<ResponseBody<B>> {
    let status =
        StatusCode::from_u16(outcome.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut headers = HeaderMap::new();
    let mut trailers = HeaderMap::new();
    for (name, value) in outcome.header_lines() {
        let (fields, name) = match name.strip_prefix(&[TRAILER]) {
            Some(name) => (&mut trailers, name),
            None => (&mut headers, name),
        };
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            // Beyond 32,768 lines, which no handler can have sent, the rest is left out.
            let _ = fields.try_append(name, value);
        }
    }
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::TRANSFER_ENCODING);
    // Neither content nor trailers follow such a head (RFC 9110, 15.3.5). An HTTP/2 server would
    // send what a handler made of them by mistake.
    let has_no_body = has_no_body(status);
    if has_no_body {
        trailers.clear();
    }
    // HTTP/1 sends trailers only behind a chunked body, and names them before it.
    let is_chunked = !trailers.is_empty() && version < Version::HTTP_2;
    if is_chunked {
        for name in trailers.keys() {
            let _ = headers.try_append(header::TRAILER, HeaderValue::from(name.clone()));
        }
    } else if !has_no_body && method != Method::HEAD {
        let _ = headers.try_insert(header::CONTENT_LENGTH, outcome.bytes().len().into());
    }
    let _ = headers.try_insert(policy.replay_header.clone(), HeaderValue::from_static("true"));

    let trailers = Some(trailers).filter(|trailers| !trailers.is_empty()).map(Box::new);
    let body = if has_no_body {
        ResponseBody::without_content()
    } else {
        ResponseBody::buffered(outcome.bytes().clone(), trailers)
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Adds for how long the key stands for its answer, where that is set. Rounded down: it is a promise.
pub(crate) fn say_when_it_expires(policy: &Policy, remaining: Duration, headers: &mut HeaderMap) {
    if let Some(name) = &policy.expires_header {
        let _ = headers.try_insert(name.clone(), HeaderValue::from(remaining.as_secs()));
    }
}

/// 1xx, 204 and 304 have no content, and no length of it (RFC 9110, 8.6).
pub(crate) fn has_no_body(status: StatusCode) -> bool {
    status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}

/// The fields that `Connection` names belong to this connection as well (RFC 9110, 7.6.1).
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    lines(headers, &header::CONNECTION)
        .flat_map(|line| line.as_bytes().split(|&byte| byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

fn is_left_out(policy: &Policy, name: &HeaderName) -> bool {
    // Names that the crate knows are compared by their number.
    match *name {
        header::CONNECTION
        | header::TE
        | header::TRAILER
        | header::TRANSFER_ENCODING
        | header::UPGRADE
        | header::CONTENT_LENGTH
        | header::DATE => return true,
        header::SET_COOKIE => return !policy.keep_set_cookie,
        header::WWW_AUTHENTICATE => return !policy.keep_www_authenticate,
        _ => {}
    }
    let text = name.as_str();
    text == "keep-alive"
        || text.starts_with("proxy-")
        || text.starts_with("access-control-")
        || policy.left_out.contains(name)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body::Body as _;
    use http_body_util::{BodyExt, Full};

    use super::*;

    fn map(lines: &[(&str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(
                HeaderName::try_from(*name).unwrap(),
                HeaderValue::from_bytes(value).unwrap(),
            );
        }
        headers
    }

    fn back(
        outcome: &Outcome,
        method: Method,
        version: Version,
    ) -> Response<ResponseBody<Full<Bytes>>> {
        replay(&Policy::default(), outcome, &method, version)
    }

    #[test]
    fn r16_lines_come_back_in_order_with_repeats_and_raw_bytes() {
        let headers = map(&[
            ("location", b"/charges/7"),
            ("x-three", b"1"),
            ("content-disposition", b"attachment; filename=\"a, b.txt\""),
            ("x-three", b"2, 2"),
            ("x-raw", b"\xff\xfe"),
            ("x-three", b"1"),
            ("etag", b"\"abc\""),
        ]);
        let outcome = keep(&Policy::default(), StatusCode::CREATED, &headers, b"{}", None);
        let response = back(&outcome, Method::POST, Version::HTTP_11);
        assert_eq!(response.status(), 201);
        let mut found = response.headers().clone();
        assert_eq!(found.remove("idempotent-replayed").unwrap(), "true");
        assert_eq!(found.remove("content-length").unwrap(), "2");
        assert!(found.iter().eq(headers.iter()), "{found:?}");
    }

    #[test]
    fn r16_what_belongs_to_the_connection_or_the_moment_is_left_out() {
        let headers = map(&[
            ("connection", b"close, X-Hop"),
            ("x-hop", b"1"),
            ("keep-alive", b"timeout=5"),
            ("proxy-authenticate", b"Basic"),
            ("proxy-connection", b"close"),
            ("te", b"trailers"),
            ("trailer", b"x"),
            ("transfer-encoding", b"chunked"),
            ("upgrade", b"h2c"),
            ("content-length", b"999"),
            ("date", b"Wed, 21 Oct 2026 07:28:00 GMT"),
            ("access-control-allow-origin", b"https://a.example"),
            ("set-cookie", b"a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
            ("set-cookie", b"b=2"),
            ("www-authenticate", b"Bearer"),
            ("x-request-id", b"7"),
            ("x-kept", b"1"),
        ]);
        let names = |policy: &Policy| {
            keep(policy, StatusCode::OK, &headers, b"", None)
                .header_lines()
                .map(|(name, _)| String::from_utf8(name.to_vec()).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&Policy::default()), ["x-request-id", "x-kept"]);
        let policy = Policy::default()
            .keep_set_cookie(true)
            .keep_www_authenticate(true)
            .leave_out(HeaderName::from_static("x-request-id"));
        assert_eq!(names(&policy), ["set-cookie", "set-cookie", "www-authenticate", "x-kept"]);
    }

    #[test]
    fn r16_no_length_where_there_is_no_content() {
        for (status, method, length) in [
            (200, Method::POST, Some("0")),
            (204, Method::POST, None),
            (304, Method::POST, None),
            (200, Method::HEAD, None),
        ] {
            let response = back(&Outcome::new(status), method, Version::HTTP_11);
            let found = response.headers().get("content-length").map(|v| v.to_str().unwrap());
            assert_eq!(found, length, "{status}");
        }
    }

    #[tokio::test]
    async fn r16_trailers_come_back_behind_the_body() {
        let trailers = map(&[("grpc-status", b"0"), ("grpc-message", b"ok"), ("date", b"x")]);
        let policy = Policy::default();
        let outcome = keep(&policy, StatusCode::OK, &HeaderMap::new(), b"abc", Some(&trailers));
        let kept = map(&[("grpc-status", b"0"), ("grpc-message", b"ok")]);

        let response = back(&outcome, Method::POST, Version::HTTP_2);
        assert_eq!(response.headers()["content-length"], "3");
        assert_eq!(response.into_body().collect().await.unwrap().trailers(), Some(&kept));

        let response = back(&outcome, Method::POST, Version::HTTP_11);
        assert!(!response.headers().contains_key("content-length"));
        assert_eq!(response.headers().get_all("trailer").iter().count(), 2);
        assert_eq!(response.body().size_hint().exact(), None);
        assert_eq!(response.into_body().collect().await.unwrap().trailers(), Some(&kept));
    }

    #[test]
    fn r16_an_outcome_that_is_no_http_does_no_harm() {
        let outcome = Outcome::new(7)
            .header("bad name", "x")
            .header("x-bad", "a\r\nb")
            .header("content-length", "99")
            .header("x-good", "1")
            .body("abc");
        let response = back(&outcome, Method::POST, Version::HTTP_11);
        assert_eq!(response.status(), 500);
        assert_eq!(response.headers()["content-length"], "3");
        assert_eq!(response.headers()["x-good"], "1");
        assert_eq!(response.headers().len(), 3);
    }
}
