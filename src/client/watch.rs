//! The wrong way is told of: one body to one URL under two keys within a minute.
//!
//! The process has one memory of what was sent, because who makes the key within the loop often makes
//! the client there too. It holds hashes only, and at most [`MOST`] of them, the oldest first out.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderValue, Method, Uri};
use tokio::time::Instant;

use crate::Fingerprint;

/// How many intents are remembered.
const MOST: usize = 1_024;
/// For how long.
const SPAN: Duration = Duration::from_secs(60);

static SEEN: Mutex<Option<Seen>> = Mutex::new(None);

/// Which key stood for which request, and when.
#[derive(Default)]
struct Seen {
    keys: HashMap<[u8; 32], (u64, Instant)>,
    /// Each digest once, the oldest first.
    order: VecDeque<[u8; 32]>,
}

/// Warns if this request was sent under another key within the last minute.
pub(super) fn look(method: &Method, url: &str, body: &[u8], key: &HeaderValue) {
    let print = *Fingerprint::request(method.as_str(), url, body).digest();
    let mut hasher = DefaultHasher::new();
    key.as_bytes().hash(&mut hasher);
    let is_new = {
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get_or_insert_default().note(print, hasher.finish(), Instant::now())
    };
    if is_new {
        tracing::warn!(
            target: "oncekey::client",
            %method,
            url = shown(url),
            "the same request was sent under another key within a minute: make the key outside of \
             the loop that tries again; if these are two intents, give them a field that differs, \
             or turn this off (`warn_of_new_keys`)",
        );
    }
}

/// Scheme, host, port and path: a user's password and the query are not for logs.
fn shown(url: &str) -> String {
    let Ok(url) = url.parse::<Uri>() else { return String::new() };
    let scheme = url.scheme_str().map_or(String::new(), |scheme| format!("{scheme}://"));
    let port = url.port().map_or(String::new(), |port| format!(":{port}"));
    format!("{scheme}{}{port}{}", url.host().unwrap_or_default(), url.path())
}

impl Seen {
    /// Remembers the request; true if it had another key less than a [`SPAN`] ago.
    fn note(&mut self, print: [u8; 32], key: u64, now: Instant) -> bool {
        match self.keys.insert(print, (key, now)) {
            Some((other, then)) => other != key && now.duration_since(then) < SPAN,
            None => {
                self.order.push_back(print);
                if self.order.len() > MOST
                    && let Some(oldest) = self.order.pop_front()
                {
                    self.keys.remove(&oldest);
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_url_only_what_is_no_secret_is_shown() {
        for (url, expected) in [
            ("https://u:p@x.example:8443/a/b?c=d#e", "https://x.example:8443/a/b"),
            ("https://u@x.example?c", "https://x.example/"),
            ("http://u:p@[::1]:80/", "http://[::1]:80/"),
            ("/a?b=@", "/a"),
            ("u:p@x.example:1", "x.example:1"),
            ("no url", ""),
        ] {
            assert_eq!(shown(url), expected, "{url}");
        }
    }

    #[test]
    fn another_key_within_a_minute_is_told_and_memory_is_bounded() {
        let (mut seen, start) = (Seen::default(), Instant::now());
        let print = |n: u32| {
            let mut print = [0; 32];
            print[..4].copy_from_slice(&n.to_be_bytes());
            print
        };
        assert!(!seen.note(print(0), 1, start));
        assert!(!seen.note(print(0), 1, start + SPAN / 2), "the same key again");
        assert!(!seen.note(print(1), 2, start + SPAN / 2), "another request");
        assert!(seen.note(print(0), 2, start + SPAN), "half a minute after the last");
        assert!(!seen.note(print(0), 3, start + SPAN * 2), "a minute after the last");
        for n in 2..10_000 {
            assert!(!seen.note(print(n), 0, start));
        }
        assert_eq!((seen.keys.len(), seen.order.len()), (MOST, MOST));
        assert!(!seen.note(print(0), 4, start + SPAN * 2), "it was forgotten");
    }
}
