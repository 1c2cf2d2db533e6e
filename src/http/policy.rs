//! What is settable for each operation, and the defaults with their reasons.

use std::{fmt, time::Duration};

use http::{HeaderName, Method, StatusCode, request::Parts};

use super::{
    endpoint,
    fingerprinting::Fingerprinting,
    intake::Received,
    layer::IdempotencyLayer,
    problem,
    sealing::{Seal, Sealing},
    veto::Veto,
};
use crate::{Fingerprint, Identity, KeyForm, Scheme};

/// How one operation, or all of them, are treated.
///
/// You meet it in [`IdempotencyLayer::operation`]; the layer has the same setters for all
/// operations. What an operation does not set is as the layer has it.
#[derive(Clone)]
pub struct Policy {
    pub(crate) methods: Vec<Method>,
    pub(crate) required: bool,
    pub(crate) header_name: HeaderName,
    pub(crate) key_form: KeyForm,
    pub(crate) wait_limit: Duration,
    pub(crate) wait_cap: Duration,
    pub(crate) max_request: usize,
    pub(crate) read_limit: Duration,
    pub(crate) max_response: usize,
    pub(crate) capture_time: Duration,
    pub(crate) statuses: StatusTable,
    pub(crate) keep_set_cookie: bool,
    pub(crate) keep_www_authenticate: bool,
    pub(crate) left_out: Vec<HeaderName>,
    pub(crate) fingerprint: Fingerprinting,
    pub(crate) accepted: Vec<Fingerprinting>,
    pub(crate) replay_header: HeaderName,
    pub(crate) problem_base: String,
    pub(crate) expires_header: Option<HeaderName>,
    pub(crate) seal: Seal,
    pub(crate) veto: Veto,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            methods: vec![Method::POST, Method::PATCH],
            required: true,
            header_name: HeaderName::from_static("idempotency-key"),
            key_form: KeyForm::Any,
            wait_limit: Duration::from_secs(10),
            wait_cap: Duration::from_secs(60),
            max_request: 1 << 20,
            read_limit: Duration::from_secs(30),
            max_response: 1 << 20,
            capture_time: Duration::from_secs(5),
            statuses: StatusTable::default(),
            keep_set_cookie: false,
            keep_www_authenticate: false,
            left_out: Vec::new(),
            fingerprint: Fingerprinting::raw(),
            accepted: Vec::new(),
            replay_header: HeaderName::from_static("idempotent-replayed"),
            problem_base: problem::DEFAULT_BASE.to_owned(),
            expires_header: None,
            seal: Seal::default(),
            veto: Veto::default(),
        }
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("methods", &self.methods)
            .field("required", &self.required)
            .field("header_name", &self.header_name)
            .field("key_form", &self.key_form)
            .field("wait_limit", &self.wait_limit)
            .field("wait_cap", &self.wait_cap)
            .field("max_request", &self.max_request)
            .field("read_limit", &self.read_limit)
            .field("max_response", &self.max_response)
            .field("capture_time", &self.capture_time)
            .field("statuses", &self.statuses)
            .field("keep_set_cookie", &self.keep_set_cookie)
            .field("keep_www_authenticate", &self.keep_www_authenticate)
            .field("left_out", &self.left_out)
            .field("fingerprint", &self.fingerprint)
            .field("accepted", &self.accepted)
            .field("replay_header", &self.replay_header)
            .field("problem_base", &self.problem_base)
            .field("expires_header", &self.expires_header)
            .field("seal", &self.seal)
            .field("veto", &self.veto)
            .finish()
    }
}

/// Writes each setter once and gives it to [`Policy`] and to [`IdempotencyLayer`].
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),+) => |$policy:ident| $set:expr;)+) => {
        impl Policy {
            $($(#[$doc])* #[must_use] pub fn $name(mut self, $($arg: $kind),+) -> Self {
                let $policy = &mut self;
                $set;
                self
            })+
        }

        /// For all operations; [`operation`](Self::operation) sets the same for one.
        impl IdempotencyLayer {
            $($(#[$doc])* #[must_use] pub fn $name(self, $($arg: $kind),+) -> Self {
                self.for_all(|policy| policy.$name($($arg),+))
            })+
        }
    };
}

impl Policy {
    /// The fingerprint by the scheme of an older record, if that is a scheme we know (R4).
    pub(super) fn translate(
        &self,
        scheme: Scheme,
        parts: &Parts,
        received: &Received,
    ) -> Option<Fingerprint> {
        let of = |form: &Fingerprinting| {
            let is_it = form.scheme() == scheme;
            is_it.then(|| form.of(parts, endpoint::path(parts), received.bytes.as_ref()))
        };
        self.accepted
            .iter()
            .find_map(of)
            .or_else(|| of(&Fingerprinting::raw()))
            .or_else(|| of(&Fingerprinting::canonical_json()))
            .or_else(|| of(&Fingerprinting::multipart()))
    }
}

setters! {
    /// Which methods are covered; all others pass untouched (R6). Default: POST and PATCH, because
    /// HTTP says of the others that they may be repeated.
    methods(methods: impl IntoIterator<Item = Method>) => |policy| {
        policy.methods = methods.into_iter().collect()
    };

    /// Whether a request without a key is refused (400) or passes through unclaimed (R6). Default:
    /// refused, because a protection that a client can forget protects nobody.
    required(required: bool) => |policy| policy.required = required;

    /// The name of the field that holds the key (R6). Default: `Idempotency-Key`, as the draft has it.
    header_name(name: HeaderName) => |policy| policy.header_name = name;

    /// Which forms of the key are read (R6). Default: [`KeyForm::Any`], because most clients send
    /// the bare form.
    key_form(form: KeyForm) => |policy| policy.key_form = form;

    /// How long a duplicate waits for the owner before it gets 409; zero is never (R13). Default:
    /// 10 s, which is longer than most handlers take and shorter than most clients wait.
    wait_limit(limit: Duration) => |policy| policy.wait_limit = limit;

    /// How far a client may raise the wait limit by `Prefer: wait=N` (R13). Default: 60 s, the
    /// usual patience of a proxy. A cap below the limit counts as the limit.
    wait_cap(cap: Duration) => |policy| policy.wait_cap = cap;

    /// The largest request body, in bytes; a larger one gets 413 (R19). Default: 1 MiB, which is
    /// many times a charge and little for one client to make a server hold.
    max_request(bytes: usize) => |policy| policy.max_request = bytes;

    /// How long a request body may take to arrive; a slower one gets 408 (R19). Default: 30 s: the
    /// largest one over a slow phone line (35 kB/s), and the end of one that drips.
    read_limit(limit: Duration) => |policy| policy.read_limit = limit;

    /// The largest response body that is kept, in bytes; a larger one goes to the first client
    /// alone (R20). Default: 1 MiB: an outcome stays in memory for the retention, and what is larger
    /// is a download, not an answer to a write.
    max_response(bytes: usize) => |policy| policy.max_response = bytes;

    /// How long a response body of unknown size is buffered before it counts as a stream, which is
    /// not kept (R20). Default: 5 s, more than most answers take. The first client waits for it,
    /// and one that expects a stream would not wait for longer.
    capture_time(limit: Duration) => |policy| policy.capture_time = limit;

    /// Which statuses are kept and which release the identity (R17). Default: released is what says
    /// that the request was refused before the work; a doubt counts as work done.
    statuses(table: StatusTable) => |policy| policy.statuses = table;

    /// Whether `Set-Cookie` is kept and replayed (R16). Default: no, because a session must not be
    /// handed out again a day later.
    keep_set_cookie(keep: bool) => |policy| policy.keep_set_cookie = keep;

    /// Whether `WWW-Authenticate` is kept and replayed (R16). Default: no, because a challenge is
    /// good for one answer.
    keep_www_authenticate(keep: bool) => |policy| policy.keep_www_authenticate = keep;

    /// Leaves out one more header when an outcome is stored (R16). May be called often. Default: none
    /// but those that belong to a connection, a moment or one client.
    leave_out(name: HeaderName) => |policy| policy.left_out.push(name);

    /// What must not change between two attempts (R4). Default: [`Fingerprinting::raw`]: a client
    /// that keeps the bytes for its retries is right under every handler.
    fingerprint(fingerprinting: Fingerprinting) => |policy| policy.fingerprint = fingerprinting;

    /// An earlier choice of [`fingerprint`](Self::fingerprint), for the records that were made with
    /// it and are still alive; without it their retries are answered "outcome unknown" (R4). The
    /// plain forms of [`Fingerprinting::raw`], [`Fingerprinting::canonical_json`] and
    /// [`Fingerprinting::multipart`] are always accepted. May be called often.
    also_accept(earlier: Fingerprinting) => |policy| policy.accepted.push(earlier);

    /// The name of the field that marks a replay, with the value `true` (R16). Default:
    /// `Idempotent-Replayed`, which clients of payment services know; the draft names none.
    replay_header(name: HeaderName) => |policy| policy.replay_header = name;

    /// What the `type` of a problem begins with; one of the words of [`Problem`](super::Problem)
    /// comes behind it (R21). Characters that a URI reference cannot hold are percent-encoded.
    /// Default: the page of the module [`problem`], which explains each.
    problem_base(base: impl Into<String>) => |policy| {
        policy.problem_base = problem::clean_base(&base.into())
    };

    /// A field that tells for how many seconds more the key stands for this answer; after them it
    /// is new (R22). It comes with the first response, if it settled the key, and with each replay.
    /// A span and not a date, because a client's clock may be wrong. Default: none, because no
    /// draft has such a field.
    expires_header(name: HeaderName) => |policy| policy.expires_header = Some(name);

    /// What is done to an outcome before it is kept and before it is handed back: see [`Sealing`].
    /// Default: nothing.
    seal(sealing: impl Sealing) => |policy| policy.seal = Seal::by(sealing);

    /// Asked before each replay, with the request that asks for it and whose key it is: `false`
    /// answers 403 instead, with a problem type of its own, and changes nothing. For rights that
    /// were withdrawn since the first answer was made. It must not block. Default: authentication,
    /// which ran outside of the layer, has decided.
    may_replay(
        may: impl Fn(&Parts, Identity<'_>) -> bool + Send + Sync + 'static
    ) => |policy| policy.veto = Veto::of(may);
}

/// Which statuses are kept, and which release the identity because they say that the request was
/// refused before the work (R17).
///
/// By default 400, 401, 403, 404, 405, 406, 409, 411 to 417, 421 to 423, 425, 426, 428, 429, 431
/// and 503 release, and everything else is kept: it may stand for work that was done.
///
/// ```
/// use http::StatusCode;
/// use oncekey::http::StatusTable;
///
/// let table = StatusTable::default().keep(StatusCode::NOT_FOUND).release(StatusCode::BAD_GATEWAY);
/// assert!(table.is_kept(StatusCode::NOT_FOUND));
/// assert!(table.is_kept(StatusCode::CREATED));
/// assert!(!table.is_kept(StatusCode::BAD_GATEWAY));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct StatusTable {
    /// One bit for each status, 0 to 1023; set if it releases.
    released: [u64; 16],
}

impl StatusTable {
    /// Keeps every status.
    pub const fn keep_all() -> Self {
        Self { released: [0; 16] }
    }

    /// Keeps this status too.
    #[must_use]
    pub fn keep(mut self, status: StatusCode) -> Self {
        let (word, bit) = Self::place(status);
        self.released[word] &= !bit;
        self
    }

    /// Releases on this status too.
    #[must_use]
    pub fn release(mut self, status: StatusCode) -> Self {
        let (word, bit) = Self::place(status);
        self.released[word] |= bit;
        self
    }

    /// Whether a response of this status is kept.
    pub fn is_kept(&self, status: StatusCode) -> bool {
        let (word, bit) = Self::place(status);
        self.released[word] & bit == 0
    }

    /// A status code is 100 to 999, so the word is there.
    fn place(status: StatusCode) -> (usize, u64) {
        let status = usize::from(status.as_u16());
        (status / 64, 1 << (status % 64))
    }
}

impl Default for StatusTable {
    fn default() -> Self {
        let singles = [400, 401, 403, 404, 405, 406, 409, 425, 426, 428, 429, 431, 503];
        singles
            .into_iter()
            .chain(411..=417)
            .chain(421..=423)
            .filter_map(|status| StatusCode::from_u16(status).ok())
            .fold(Self::keep_all(), Self::release)
    }
}

/// Lists the statuses that release.
impl fmt::Debug for StatusTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let released = (100..=999)
            .filter_map(|status| StatusCode::from_u16(status).ok())
            .filter(|&status| !self.is_kept(status));
        f.write_str("StatusTable releasing ")?;
        f.debug_list().entries(released.map(|status| status.as_u16())).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r17_the_default_table() {
        let released: Vec<u16> = (100..=999)
            .filter(|&status| {
                !StatusTable::default().is_kept(StatusCode::from_u16(status).unwrap())
            })
            .collect();
        assert_eq!(
            released,
            [
                400, 401, 403, 404, 405, 406, 409, 411, 412, 413, 414, 415, 416, 417, 421, 422,
                423, 425, 426, 428, 429, 431, 503
            ]
        );
    }

    #[test]
    fn debug_shows_each_setting_and_what_releases() {
        let table = StatusTable::keep_all().release(StatusCode::CONFLICT).release(StatusCode::GONE);
        assert_eq!(format!("{table:?}"), "StatusTable releasing [409, 410]");
        let shown = format!("{:?}", Policy::default().statuses(table).max_request(77));
        for part in ["methods: [POST, PATCH]", "max_request: 77", "releasing [409, 410]"] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn r17_a_status_can_be_moved_and_moved_back() {
        let ok = StatusCode::OK;
        let table = StatusTable::default().release(ok);
        assert!(!table.is_kept(ok));
        assert_eq!(table.keep(ok), StatusTable::default());
        let others = StatusTable::keep_all().release(StatusCode::GONE);
        assert_eq!(others.clone().release(ok).keep(ok), others);
        let all = StatusTable::keep_all();
        assert!((100..=999).all(|status| all.is_kept(StatusCode::from_u16(status).unwrap())));
    }
}
