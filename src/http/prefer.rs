//! `Prefer: wait=N` (RFC 7240): how long this client wants to wait (R13).
//!
//! Only what the rule needs is read. A preference is `token [ "=" word ] *( ";" parameter )`, a
//! word is a token or a quoted string, and preferences are joined by commas or spread over lines.
//! Of a preference that comes more than once the first counts; one that cannot be read counts as
//! not sent, because RFC 7240 forbids to fail for it.

use std::time::Duration;

use http::{HeaderMap, HeaderName};

const PREFER: HeaderName = HeaderName::from_static("prefer");

/// The first `wait` preference, in whole seconds.
pub(crate) fn wait(headers: &HeaderMap) -> Option<Duration> {
    if !headers.contains_key(PREFER) {
        return None;
    }
    headers
        .get_all(PREFER)
        .iter()
        .flat_map(|line| split(line.as_bytes(), b','))
        .filter_map(|preference| split(preference, b';').next())
        .find_map(|preference| {
            let mut sides = preference.splitn(2, |&byte| byte == b'=');
            let name = sides.next()?.trim_ascii();
            name.eq_ignore_ascii_case(b"wait").then(|| sides.next().unwrap_or_default())
        })
        .and_then(seconds)
}

/// The pieces between separators that stand outside of quoted strings.
fn split(mut rest: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut done = false;
    std::iter::from_fn(move || {
        if done {
            return None;
        }
        let mut quoted = false;
        let mut escaped = false;
        let end = rest.iter().position(|&byte| {
            if escaped {
                escaped = false;
            } else if quoted && byte == b'\\' {
                escaped = true;
            } else if byte == b'"' {
                quoted = !quoted;
            }
            byte == separator && !quoted
        });
        let piece = match end {
            Some(end) => {
                let piece = &rest[..end];
                rest = &rest[end + 1..];
                piece
            }
            None => {
                done = true;
                rest
            }
        };
        Some(piece)
    })
}

/// `10` or `"10"`. More seconds than a `u64` holds are as many as it holds: the cap cuts them.
fn seconds(word: &[u8]) -> Option<Duration> {
    let word = word.trim_ascii();
    let digits =
        word.strip_prefix(b"\"").and_then(|inner| inner.strip_suffix(b"\"")).unwrap_or(word);
    if digits.is_empty() {
        return None;
    }
    let mut seconds = 0_u64;
    for &digit in digits {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        seconds = seconds.saturating_mul(10).saturating_add(digit);
    }
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn of(lines: &[&str]) -> Option<u64> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("prefer", HeaderValue::from_str(line).unwrap());
        }
        wait(&headers).map(|wait| wait.as_secs())
    }

    #[test]
    fn r13_the_first_wait_counts_wherever_it_stands() {
        assert_eq!(of(&["wait=10"]), Some(10));
        assert_eq!(of(&["respond-async, WAIT = 7 ; x=1"]), Some(7));
        assert_eq!(of(&["handling=lenient", "foo; wait=3, wait=5", "wait=9"]), Some(5));
        assert_eq!(of(&["wait=\"4\""]), Some(4));
        assert_eq!(of(&["foo=\"a, wait=3; \\\", \", wait=6"]), Some(6));
        assert_eq!(of(&["wait=0"]), Some(0));
        assert_eq!(of(&["wait=99999999999999999999999"]), Some(u64::MAX));
    }

    #[test]
    fn r13_what_cannot_be_read_was_not_sent() {
        for line in [
            "",
            ",",
            "wait",
            "wait=",
            "wait=\"\"",
            "wait=-1",
            "wait=1.5",
            "waits=3",
            "=3",
            "x=\"wait=3",
        ] {
            assert_eq!(of(&[line]), None, "{line}");
        }
        assert_eq!(of(&["wait=x, wait=5"]), None, "the first instance counts, read or not");
        assert_eq!(of(&[]), None);
    }
}
