//! Which answers are final, and when to come back after one that is not.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};
use serde_json::Value;

use super::layer::Policy;

/// The last part of the `type` of this crate's own 409 while the first request runs, behind whatever base
/// the service has set: a fragment, the end of a path, or of a URN.
const IN_FLIGHT: &str = "in-flight";

impl Policy {
    /// Whether the answer is one that an earlier attempt got.
    pub(super) fn is_replay(&self, headers: &HeaderMap) -> bool {
        headers
            .get(&self.replay_field)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"))
    }

    /// Whether the same request may get another answer. `body` is there if it could be read.
    pub(super) fn is_passing(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<&[u8]>,
    ) -> bool {
        if self.is_replay(headers) {
            return false;
        }
        let advised = |word: &str| {
            let advice = headers.get("stripe-should-retry");
            advice.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(word.as_bytes()))
        };
        if advised("false") {
            return false;
        }
        match status.as_u16() {
            408 | 425 | 429 => true,
            409 => advised("true") || body.is_some_and(|body| self.is_in_flight(body)),
            status => self.server_errors.contains(&status),
        }
    }

    /// Whether the body of a 409 says that the first request is still at work: a problem (RFC 9457),
    /// or an error in Stripe's form.
    fn is_in_flight(&self, body: &[u8]) -> bool {
        let Ok(body) = serde_json::from_slice::<Value>(body) else { return false };
        if body["error"]["code"] == "idempotency_key_in_use" {
            return true;
        }
        let Some(kind) = body["type"].as_str() else { return false };
        kind.rsplit(['#', '/', ':']).next() == Some(IN_FLIGHT)
            || self.in_flight_types.iter().any(|known| known == kind)
    }
}

/// The time that the answer asks to wait: `Retry-After` in seconds or as a date (RFC 9110, 10.2.3).
/// A date counts from the answer's own, if it has one: the clocks of two machines differ.
pub(super) fn retry_after(headers: &HeaderMap) -> Duration {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let date = |name| text(name).and_then(|text| httpdate::parse_http_date(text).ok());
    let Some(asked) = text(header::RETRY_AFTER) else { return Duration::ZERO };
    if !asked.is_empty() && asked.bytes().all(|byte| byte.is_ascii_digit()) {
        return Duration::from_secs(asked.parse().unwrap_or(u64::MAX)); // too many digits: never
    }
    let Some(then) = date(header::RETRY_AFTER) else { return Duration::ZERO };
    let now = date(header::DATE).unwrap_or_else(SystemTime::now);
    then.duration_since(now).unwrap_or_default()
}
