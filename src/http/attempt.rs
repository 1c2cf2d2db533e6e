//! What the layer leaves in a request for the handler, and the handler in a response for the layer.

use std::{fmt, sync::Arc};

use crate::{Identity, IdentityError, IntentKey, Key, Token};

/// The identity in parts that own their bytes, as captured from the head of the request (R12).
pub(crate) struct Caller {
    pub(crate) account: Vec<u8>,
    pub(crate) endpoint: String,
    pub(crate) key: Key,
}

impl Caller {
    pub(crate) fn identity(&self) -> Result<Identity<'_>, IdentityError> {
        Identity::of(&self.account, &self.endpoint, &self.key)
    }
}

/// On whose behalf, under which key and with which token the handler runs.
///
/// A request extension of every claimed request, and with the feature `axum` an extractor. Changing
/// it, or the request, changes nothing of the claim (R12).
///
/// ```
/// use oncekey::http::Attempt;
///
/// fn reference(request: &http::Request<()>) -> Option<String> {
///     let attempt = request.extensions().get::<Attempt>()?;
///     Some(format!("{}/{}", attempt.endpoint(), attempt.token()))
/// }
/// # assert_eq!(reference(&http::Request::new(())), None);
/// ```
#[derive(Clone)]
pub struct Attempt {
    pub(crate) caller: Arc<Caller>,
    pub(crate) token: Token,
}

impl Attempt {
    /// The key that the client sent.
    pub fn key(&self) -> &str {
        self.caller.key.as_str()
    }

    /// The account; empty for [`single_tenant`](super::IdempotencyLayer::single_tenant).
    pub fn account(&self) -> &[u8] {
        &self.caller.account
    }

    /// The endpoint, such as `POST /orders/{}/refund` (R2).
    pub fn endpoint(&self) -> &str {
        &self.caller.endpoint
    }

    /// The key of a call to another service that the handler makes to do its work: the same on
    /// every attempt, another for every account ([`Identity::downstream`]).
    ///
    /// ```
    /// use oncekey::http::Attempt;
    ///
    /// fn capture(attempt: &Attempt) -> http::request::Builder {
    ///     let key = attempt.downstream("psp", ["capture"]);
    ///     http::Request::post("/captures").header("Idempotency-Key", key.as_str())
    /// }
    /// ```
    pub fn downstream<P: AsRef<[u8]>>(
        &self,
        name: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = P>,
    ) -> IntentKey {
        match self.caller.identity() {
            Ok(identity) => identity.downstream(name, parts),
            // It was one when it was claimed, so this is for the compiler; it would do no harm.
            Err(_) => IntentKey::derived(self.account(), [self.endpoint(), self.key()])
                .downstream(name, parts),
        }
    }

    /// The fencing number of the claim under which the handler runs (R9).
    pub fn token(&self) -> Token {
        self.token
    }
}

/// Shows endpoint and token; neither key nor account.
impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("endpoint", &self.endpoint())
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

/// As a response extension: this response is kept, whatever its status (R17).
///
/// ```
/// use http::Response;
/// use oncekey::http::Keep;
///
/// let mut response = Response::new("rejected for good");
/// *response.status_mut() = http::StatusCode::CONFLICT;
/// response.extensions_mut().insert(Keep);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep;

/// As a response extension: nothing was done, the next caller may run, whatever the status (R17).
///
/// It wins over [`Keep`] if both are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release;

/// As a request extension: a layer has this request, an inner one lets it pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acted;
