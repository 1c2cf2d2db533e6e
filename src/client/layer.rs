//! The settings of a client, and their defaults.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode};

/// Sends each request of a covered method under one key until there is an answer.
///
/// A middleware of `reqwest-middleware`, and a tower layer: see the [module](super). The key is, in
/// this order: the request's own `Idempotency-Key` field, if the caller set one; the
/// [`IntentKey`](crate::IntentKey) in the request's extensions; a random one.
///
/// ```
/// use std::time::Duration;
/// use oncekey::client::IntentLayer;
///
/// let layer = IntentLayer::new()
///     .deadline(Duration::from_secs(20))
///     .server_errors([502, 503, 504]) // not after a 500
///     .bare_keys(true); // for a service that does not know quotes
/// # drop(layer);
/// ```
#[derive(Clone)]
pub struct IntentLayer {
    pub(super) policy: Arc<Policy>,
}

#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub(super) methods: Vec<Method>,
    pub(super) field: HeaderName,
    pub(super) replay_field: HeaderName,
    pub(super) bare: bool,
    pub(super) server_errors: BTreeSet<u16>,
    pub(super) in_flight_types: Vec<String>,
    pub(super) min_delay: Duration,
    pub(super) max_delay: Duration,
    pub(super) attempt_timeout: Duration,
    pub(super) deadline: Duration,
    pub(super) max_attempts: u32,
    pub(super) max_body: u64,
    pub(super) max_answer: u64,
    pub(super) watch: bool,
}

impl Default for IntentLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl IntentLayer {
    /// With all settings at their defaults.
    pub fn new() -> Self {
        Self {
            policy: Arc::new(Policy {
                methods: vec![Method::POST, Method::PATCH],
                field: HeaderName::from_static("idempotency-key"),
                replay_field: HeaderName::from_static("idempotent-replayed"),
                bare: false,
                server_errors: [500, 502, 503, 504].into(),
                in_flight_types: vec![],
                min_delay: Duration::from_millis(100),
                max_delay: Duration::from_secs(5),
                attempt_timeout: Duration::from_secs(20),
                deadline: Duration::from_secs(60),
                max_attempts: u32::MAX,
                max_body: 1 << 20,
                max_answer: 1 << 20,
                watch: cfg!(debug_assertions),
            }),
        }
    }

    fn with(mut self, set: impl FnOnce(&mut Policy)) -> Self {
        set(Arc::make_mut(&mut self.policy));
        self
    }

    /// The methods that get a key and are tried again; POST and PATCH unless set. Requests of others
    /// pass untouched: the rest of HTTP's methods need no key to be repeated, or must not be.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|policy| policy.methods = methods.into_iter().collect())
    }

    /// The field that carries the key; `Idempotency-Key` unless set.
    #[must_use]
    pub fn field_name(self, name: HeaderName) -> Self {
        self.with(|policy| policy.field = name)
    }

    /// The field that marks a replay; `Idempotent-Replayed` unless set. Its value is `true`.
    #[must_use]
    pub fn replay_field_name(self, name: HeaderName) -> Self {
        self.with(|policy| policy.replay_field = name)
    }

    /// Whether keys are sent as they are, `abc`, as Stripe and most services have it, and not as the
    /// String of structured fields that the draft asks for, `"abc"`, which is the default (RFC 9651).
    /// A key that cannot be told without quotes, because it has a space, a `"` or a `,`, is refused
    /// before the first attempt ([`NotBare`](super::IntentError::NotBare)); those that
    /// [`IntentKey`](crate::IntentKey) makes never have. A field that the caller set is sent as it is.
    #[must_use]
    pub fn bare_keys(self, bare: bool) -> Self {
        self.with(|policy| policy.bare = bare)
    }

    /// After which answers of 500 to 599 the request is tried again; 500, 502, 503 and 504 unless
    /// set. Numbers that are no server error are left out: they are no matter of taste.
    #[must_use]
    pub fn server_errors(self, statuses: impl IntoIterator<Item = u16>) -> Self {
        let of_server = |status: &u16| {
            StatusCode::from_u16(*status).is_ok_and(|status| status.is_server_error())
        };
        let statuses = statuses.into_iter().filter(of_server).collect();
        self.with(|policy| policy.server_errors = statuses)
    }

    /// The `type` of those problems of another service (RFC 9457), answered with 409, that say that
    /// the first request is still at work; none unless set. Compared byte for byte, without resolving
    /// relative ones.
    ///
    /// Those whose last part, behind the last `#`, `/` or `:`, is exactly `in-flight`, as in this crate's,
    /// need not be named: `https://x.example/problems#in-flight`, `urn:example:in-flight`.
    #[must_use]
    pub fn in_flight_types<T: Into<String>>(self, types: impl IntoIterator<Item = T>) -> Self {
        let types = types.into_iter().map(Into::into).collect();
        self.with(|policy| policy.in_flight_types = types)
    }

    /// The time before the second attempt is at most `first`; the limit doubles with each further
    /// one, up to `most`. 100 ms and 5 s unless set. Within it the time is random (full jitter), so
    /// that clients that failed together do not come back together. Zero means not to wait, but for
    /// `Retry-After`.
    #[must_use]
    pub fn backoff(self, first: Duration, most: Duration) -> Self {
        self.with(|policy| (policy.min_delay, policy.max_delay) = (first, most.max(first)))
    }

    /// How long one attempt may take, its answer included; 20 s unless set, because a server of this
    /// crate lets a duplicate wait for 10 s. An attempt that is cut off does no harm: the next one
    /// has the same key. Zero cuts off whatever is not there at once; a century is the most.
    #[must_use]
    pub fn attempt_timeout(self, limit: Duration) -> Self {
        self.with(|policy| policy.attempt_timeout = limit)
    }

    /// How long all attempts and the times between them may take, and in the tower layer reading the
    /// caller's body before them; 60 s unless set. An attempt that is under way is cut off, and none
    /// is begun that could not be. Zero leaves one attempt, cut off at once; a century is the most.
    #[must_use]
    pub fn deadline(self, limit: Duration) -> Self {
        self.with(|policy| policy.deadline = limit)
    }

    /// How many attempts there are at most, the first included; unless set, only the deadline limits
    /// them. 0 counts as 1.
    #[must_use]
    pub fn max_attempts(self, most: u32) -> Self {
        self.with(|policy| policy.max_attempts = most.max(1))
    }

    /// The largest request body, in bytes, that the tower layer takes into memory to send it again;
    /// 1 MiB unless set. reqwest's bodies are in memory anyway, or are refused as streams.
    #[must_use]
    pub fn max_body(self, bytes: u64) -> Self {
        self.with(|policy| policy.max_body = bytes)
    }

    /// Up to how many bytes an answer is read to its end before it counts as come; 1 MiB unless
    /// set. If one breaks off before, the request is tried again. Each piece that it comes in counts
    /// for some 100 bytes more, as its place does. What is larger, and event streams (`text/event-stream`),
    /// are handed over as they come: nothing of them is cut off, by no time either.
    ///
    /// Zero: hand all over at once, but for a 409, whose problem is read up to 64 KiB. That is for
    /// other answers that come bit by bit for longer than an [`attempt_timeout`](Self::attempt_timeout).
    #[must_use]
    pub fn max_answer(self, bytes: u64) -> Self {
        self.with(|policy| policy.max_answer = bytes)
    }

    /// Whether a warning is logged (`tracing`, target `oncekey::client`) if one body goes to one URL
    /// under two keys within a minute, by any client of the process: the sign of a key that is made
    /// within a loop. In debug builds unless set. It remembers the last 1,024 intents by their hashes,
    /// and shows scheme, host, port and path of the URL, no key, query or body.
    ///
    /// Two intents whose requests are equal look the same to it. Give them a field that differs, which
    /// is of use to whoever reads the charges too, or turn this off.
    #[must_use]
    pub fn warn_of_new_keys(self, warn: bool) -> Self {
        self.with(|policy| policy.watch = warn)
    }
}

impl fmt::Debug for IntentLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IntentLayer").field(&self.policy).finish()
    }
}
