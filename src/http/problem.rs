//! Our own answers: problem details (RFC 9457), each with a type of its own (R21).
//!
//! A client can tell them from the answers of the handler by their `type`, which is the base
//! ([`problem_base`](super::Policy::problem_base)) and one of these words:
//!
//! # key-missing
//!
//! Status 400. The operation asks for an `Idempotency-Key` and the request has none. Nothing ran.
//! Send one.
//!
//! # key-invalid
//!
//! Status 400. The key cannot be read, is empty or too long, or came more than once. Nothing ran.
//!
//! # account-unknown
//!
//! Status 403. It is not known on whose behalf the request came, and without that a key means
//! nothing. Nothing ran. Authenticate.
//!
//! # replay-refused
//!
//! Status 403. There is an answer for this key, but it may no longer be handed out to you. Nothing
//! ran, and the answer stays as it is.
//!
//! # request-too-slow
//!
//! Status 408. The body did not arrive in time. Nothing ran. Send it again with the same key.
//!
//! # in-flight
//!
//! Status 409, with `Retry-After`. The first request with this key is still at work. Ask again
//! with the same key and the same request.
//!
//! # outcome-unknown
//!
//! Status 409. An earlier request with this key ended without an answer, and nobody knows whether
//! its work was done. It is not run again before an operator has looked or the record has ended.
//! Look whether the work was done before you send it under another key.
//!
//! # response-not-kept
//!
//! Status 409. The work of this key is done, but its response was too large or a stream and was
//! not kept. It is not run again. Read the result in another way.
//!
//! # request-too-large
//!
//! Status 413. The body is larger than the operation allows. Nothing ran.
//!
//! # key-reused
//!
//! Status 422. The key stands for another request: another path, query or body. Nothing ran. Make
//! a key for each intent and keep it for the retries of that intent only.
//!
//! # account-over-share
//!
//! Status 429, with `Retry-After`. The account has as many live keys, keys in flight or bytes being
//! sent as it may have. Nothing ran. For live keys the time is that to the next end of a record,
//! 60 s at most: it is no promise of room.
//!
//! # store-full
//!
//! Status 503, with `Retry-After`. There is no room for another key. Nothing ran.
//! The time is that to the next end of a record, 60 s at most: it is no promise of room.
//!
//! # tier-unavailable
//!
//! Status 503, with `Retry-After`. The durable store cannot be reached. Nothing ran.
//!
//! # too-busy
//!
//! Status 503, with `Retry-After`. Too many requests are at work or being read, or the server is
//! about to stop. Nothing ran.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::Value;

use super::body::ResponseBody;

/// Where this page stands.
pub(crate) const DEFAULT_BASE: &str =
    "https://docs.rs/oncekey/latest/oncekey/http/problem/index.html#";

/// What our own answers say (R21). The module's page explains each to the client who got it.
///
/// ```
/// use oncekey::http::Problem;
///
/// assert_eq!(Problem::InFlight.slug(), "in-flight");
/// assert_eq!(Problem::InFlight.status(), 409);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Problem {
    /// 400: the operation asks for a key and there is none.
    KeyMissing,
    /// 400: the key cannot be read (R6).
    KeyInvalid,
    /// 403: no account (R3).
    AccountUnknown,
    /// 403: the service refused the replay
    /// ([`may_replay`](super::IdempotencyLayer::may_replay)).
    ReplayRefused,
    /// 408: the body came too slowly (R19).
    RequestTooSlow,
    /// 409: the owner is still at work (R13).
    InFlight,
    /// 409: held, nobody knows whether the work was done (R11).
    OutcomeUnknown,
    /// 409: done, but the response was not kept (R20).
    ResponseNotKept,
    /// 413: the body is too large (R19).
    RequestTooLarge,
    /// 422: another fingerprint under a live identity (R5).
    KeyReused,
    /// 429: the account has as many live keys, keys in flight or bytes as it may have (R25).
    AccountOverShare,
    /// 503: no room for another identity (R25).
    StoreFull,
    /// 503: the durable tier does not answer (T2).
    TierUnavailable,
    /// 503: too many owners at work or bytes buffered (R18, R19), or the store is being drained.
    TooBusy,
}

impl Problem {
    /// All of them, in the order of their status.
    pub const ALL: [Self; 14] = [
        Self::KeyMissing,
        Self::KeyInvalid,
        Self::AccountUnknown,
        Self::ReplayRefused,
        Self::RequestTooSlow,
        Self::InFlight,
        Self::OutcomeUnknown,
        Self::ResponseNotKept,
        Self::RequestTooLarge,
        Self::KeyReused,
        Self::AccountOverShare,
        Self::StoreFull,
        Self::TierUnavailable,
        Self::TooBusy,
    ];

    /// The last part of the problem's `type`.
    pub const fn slug(self) -> &'static str {
        match self {
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid => "key-invalid",
            Self::AccountUnknown => "account-unknown",
            Self::ReplayRefused => "replay-refused",
            Self::RequestTooSlow => "request-too-slow",
            Self::InFlight => "in-flight",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::ResponseNotKept => "response-not-kept",
            Self::RequestTooLarge => "request-too-large",
            Self::KeyReused => "key-reused",
            Self::AccountOverShare => "account-over-share",
            Self::StoreFull => "store-full",
            Self::TierUnavailable => "tier-unavailable",
            Self::TooBusy => "too-busy",
        }
    }

    /// The status it is answered with.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::KeyMissing | Self::KeyInvalid => StatusCode::BAD_REQUEST,
            Self::AccountUnknown | Self::ReplayRefused => StatusCode::FORBIDDEN,
            Self::RequestTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::InFlight | Self::OutcomeUnknown | Self::ResponseNotKept => StatusCode::CONFLICT,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::AccountOverShare => StatusCode::TOO_MANY_REQUESTS,
            Self::StoreFull | Self::TierUnavailable | Self::TooBusy => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// The same sentence each time, for people.
    pub const fn title(self) -> &'static str {
        match self {
            Self::KeyMissing => "Idempotency key missing",
            Self::KeyInvalid => "Idempotency key invalid",
            Self::AccountUnknown => "Account unknown",
            Self::ReplayRefused => "The answer of this key may not be handed out",
            Self::RequestTooSlow => "Request body too slow",
            Self::InFlight => "The first request with this key is still at work",
            Self::OutcomeUnknown => "It is not known whether the work of this key was done",
            Self::ResponseNotKept => "Done, but the response was not kept",
            Self::RequestTooLarge => "Request body too large",
            Self::KeyReused => "The key was used for another request",
            Self::AccountOverShare => "The account is over its share",
            Self::StoreFull => "No room for another key",
            Self::TierUnavailable => "The durable store cannot be reached",
            Self::TooBusy => "Too busy",
        }
    }

    /// What is said where there is nothing more to say about this one.
    pub(crate) const fn detail(self) -> &'static str {
        match self {
            Self::KeyMissing => "this operation asks for an idempotency key: send one",
            Self::KeyInvalid => "the key cannot be read",
            Self::AccountUnknown => {
                "it is not known on whose behalf this request came, so its key means nothing"
            }
            Self::ReplayRefused => {
                "there is an answer, but it may no longer be handed out to you; nothing was done"
            }
            Self::RequestTooSlow => "the body did not arrive in time; nothing was done",
            Self::InFlight => "ask again later with the same key and the same request",
            Self::OutcomeUnknown => {
                "an earlier request with this key ended without an answer; \
                 find out whether its work was done before you send it under another key"
            }
            Self::ResponseNotKept => {
                "the work was done and is not done again; read its result in another way"
            }
            Self::RequestTooLarge => {
                "the body is larger than this operation allows; nothing was done"
            }
            Self::KeyReused => {
                "path, query or body differ from those that this key was first used with; \
                 nothing was done"
            }
            Self::AccountOverShare => {
                "requests or keys of this account must end first; nothing was done"
            }
            Self::StoreFull => "other keys must end first; nothing was done",
            Self::TierUnavailable => "nothing was done; ask again later with the same key",
            Self::TooBusy => "nothing was done; ask again later with the same key",
        }
    }

    /// Whether asking again is of use, and the answer says when.
    pub(crate) const fn is_passing(self) -> bool {
        matches!(
            self,
            Self::InFlight
                | Self::TooBusy
                | Self::AccountOverShare
                | Self::StoreFull
                | Self::TierUnavailable
        )
    }

    /// The answer with the usual detail.
    pub(crate) fn answer<B>(self, base: &str) -> Response<ResponseBody<B>> {
        self.answer_with(base, self.detail(), None)
    }

    /// The answer. `retry_after` is the time before which asking again is of no use.
    pub(crate) fn answer_with<B>(
        self,
        base: &str,
        detail: &str,
        retry_after: Option<Duration>,
    ) -> Response<ResponseBody<B>> {
        let link = format!("{base}{}", self.slug());
        let mut response = details(self.status(), &link, self.title(), detail);
        // The base was cleaned when it was set, so this is a header value.
        if let Ok(value) = HeaderValue::try_from(format!("<{link}>; rel=\"describedby\"")) {
            response.headers_mut().insert(header::LINK, value);
        }
        let retry_after = match self {
            Self::InFlight | Self::TooBusy | Self::AccountOverShare => {
                Some(retry_after.unwrap_or(Duration::from_secs(1)))
            }
            Self::StoreFull | Self::TierUnavailable => retry_after,
            _ => None,
        };
        if let Some(span) = retry_after {
            let value = HeaderValue::from(jittered(span, random()));
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        response
    }
}

/// An answer that has no type of its own: its status says it all (RFC 9457, 4.2.1).
pub(crate) fn plain<B>(status: StatusCode, detail: &str) -> Response<ResponseBody<B>> {
    details(status, "about:blank", status.canonical_reason().unwrap_or_default(), detail)
}

fn details<B>(
    status: StatusCode,
    kind: &str,
    title: &str,
    detail: &str,
) -> Response<ResponseBody<B>> {
    let quoted = |text: &str| Value::from(text).to_string();
    let body = format!(
        "{{\"type\":{},\"title\":{},\"status\":{},\"detail\":{}}}",
        quoted(kind),
        quoted(title),
        status.as_u16(),
        quoted(detail)
    );
    let len = body.len();
    let mut response = Response::new(ResponseBody::buffered(Bytes::from(body), None));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(len));
    response
}

/// `base` as part of a URI reference in a header: whatever may not stand there is percent-encoded.
pub(crate) fn clean_base(base: &str) -> String {
    let mut clean = String::with_capacity(base.len());
    for byte in base.bytes() {
        match byte {
            b'<' | b'>' | b'"' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' | ..=0x20 | 0x7f.. => {
                clean.push_str(&format!("%{byte:02X}"));
            }
            _ => clean.push(char::from(byte)),
        }
    }
    clean
}

/// Whole seconds, 1 to 60, spread upwards so that those who were refused together do not come back
/// together: by up to a quarter and at least a second, but not beyond the 60.
///
/// A span above 60 s is cut anyway; then 45 to 60 is as good as 60 and leaves room to spread.
fn jittered(span: Duration, random: u64) -> u64 {
    let whole = span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0)).max(1);
    let (from, to) = match whole {
        61.. => (45, 60),
        _ => (whole, (whole + (whole / 4).max(1)).min(60)),
    };
    from + random % (to - from + 1)
}

/// Good enough to spread clients over seconds, and needs no crate: the standard library keys its
/// hash tables at random.
fn random() -> u64 {
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use http_body_util::{BodyExt, Full};

    use super::*;

    #[tokio::test]
    async fn r21_each_problem_has_a_type_of_its_own_and_says_so_in_body_and_link() {
        let mut types = HashSet::new();
        for problem in Problem::ALL {
            let response: Response<ResponseBody<Full<Bytes>>> =
                problem.answer_with("https://x.example/p#", "a \"detail\"\n", None);
            assert_eq!(response.status(), problem.status());
            let headers = response.headers().clone();
            assert_eq!(headers["content-type"], "application/problem+json");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(headers["content-length"], body.len().to_string());
            let json: Value = serde_json::from_slice(&body).unwrap();
            let kind = json["type"].as_str().unwrap().to_owned();
            assert_eq!(kind, format!("https://x.example/p#{}", problem.slug()));
            assert_eq!(headers["link"], format!("<{kind}>; rel=\"describedby\""));
            assert_eq!(json["status"], problem.status().as_u16());
            assert_eq!(json["title"], problem.title());
            assert_eq!(json["detail"], "a \"detail\"\n");
            assert!(types.insert(kind));
            assert!(include_str!("problem.rs").contains(&format!("//! # {}\n", problem.slug())));
        }
    }

    #[test]
    fn r21_who_may_ask_again_is_told_when() {
        for problem in Problem::ALL {
            let response: Response<ResponseBody<Full<Bytes>>> =
                problem.answer_with("", "", Some(Duration::from_secs(5)));
            let told = response.headers().contains_key("retry-after");
            let temporary = matches!(
                problem,
                Problem::InFlight
                    | Problem::AccountOverShare
                    | Problem::StoreFull
                    | Problem::TierUnavailable
                    | Problem::TooBusy
            );
            assert_eq!(told, temporary, "{problem:?}");
        }
    }

    #[test]
    fn r21_retry_after_is_one_to_sixty_seconds_and_never_early() {
        for (millis, from, to) in [
            (0, 1, 2),
            (1, 1, 2),
            (1_000, 1, 2),
            (1_001, 2, 3),
            (20_000, 20, 25),
            (59_000, 59, 60),
            (60_000, 60, 60),
            (86_400_000, 45, 60),
        ] {
            let seen: HashSet<u64> =
                (0..100).map(|n| jittered(Duration::from_millis(millis), n)).collect();
            assert_eq!(seen, (from..=to).collect(), "{millis} ms");
        }
        assert!((45..=60).contains(&jittered(Duration::MAX, u64::MAX)));
    }

    #[test]
    fn r21_a_base_that_is_no_header_value_is_encoded() {
        assert_eq!(clean_base("https://x.example/a?b=%20#c-"), "https://x.example/a?b=%20#c-");
        assert_eq!(clean_base("a b>\r\n\u{e4}"), "a%20b%3E%0D%0A%C3%A4");
    }
}
