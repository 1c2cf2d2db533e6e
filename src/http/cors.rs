//! What a browser's client has to be allowed, by a CORS layer outside of ours.

use http::{HeaderName, header};

use super::{IdempotencyLayer, policy::Policy};

/// For a CORS layer, which belongs outside of this one: a preflight is no request of a covered
/// method and passes untouched, and what such a layer adds to an answer (`Access-Control-*`) is
/// never stored.
///
/// ```
/// use oncekey::{Store, http::IdempotencyLayer};
/// use tower_http::cors::CorsLayer;
///
/// let once = IdempotencyLayer::single_tenant(Store::builder().build()?);
/// let cors = CorsLayer::new()
///     .allow_headers(once.request_headers())
///     .expose_headers(once.exposed_headers());
/// # Ok::<(), oncekey::ConfigError>(())
/// ```
impl IdempotencyLayer {
    /// The fields that a client sends: that of the key, and `Prefer`.
    pub fn request_headers(&self) -> Vec<HeaderName> {
        self.fields(
            |policy| [Some(&policy.header_name), None],
            &[HeaderName::from_static("prefer")],
        )
    }

    /// The fields of answers that a script must be allowed to read to know what it was told: the
    /// mark of a replay, `Retry-After`, `Link`, and the one that says when the key ends, if it is
    /// set.
    pub fn exposed_headers(&self) -> Vec<HeaderName> {
        self.fields(
            |policy| [Some(&policy.replay_header), policy.expires_header.as_ref()],
            &[header::RETRY_AFTER, header::LINK],
        )
    }

    fn fields(
        &self,
        of: impl Fn(&Policy) -> [Option<&HeaderName>; 2],
        always: &[HeaderName],
    ) -> Vec<HeaderName> {
        let set = self.config.policies().flat_map(of).flatten();
        let mut fields: Vec<_> = set.chain(always).cloned().collect();
        fields.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        fields.dedup();
        fields
    }
}
