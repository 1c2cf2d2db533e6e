//! [`PublishedPolicy`]: what a service owes its clients to say, taken from the settings of its layer
//! (draft-ietf-httpapi-idempotency-key-header-07, 2.3 and 2.5.2), so that it cannot say otherwise.

use std::{fmt, sync::Arc, time::Duration};

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::{
    policy::Policy,
    problem::Problem,
    shares::{Most, Of},
};
use crate::KeyForm;

/// What the quoted form of a key looks like, without parameters and blanks around it.
const QUOTED: &str = r#""([ !#-\[\]-~]|\\["\\]){1,255}""#;
/// What the bare form looks like.
const BARE: &str = r"[!#-+\--~]{1,255}";
/// What OpenAPI has a place for.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

/// The idempotency policy of a service, for its documentation: methods, form of the key, expiry,
/// limits, statuses and problems, for all operations and for those with a policy of their own.
///
/// As text by its `Display`, as a fragment of an OpenAPI 3.1 document by
/// [`openapi`](Self::openapi). It is a picture of the settings as they were when it was made.
///
/// ```
/// use axum::{Router, http::header::CONTENT_TYPE, routing::{get, post}};
/// use oncekey::{Store, http::IdempotencyLayer};
///
/// let layer = IdempotencyLayer::single_tenant(Store::builder().build()?)
///     .operation("POST /orders/{id}/refund", |policy| policy.max_request(4096));
/// let published = layer.published_policy();
/// let (text, openapi) = (published.to_string(), published.openapi());
/// assert!(text.contains("Kept for: 24 h"));
/// # #[cfg(feature = "axum")] {
/// let app: Router = Router::new()
///     .route("/orders/{id}/refund", post(|| async { "refunded" }))
///     .layer(layer)
///     .route("/idempotency", get(move || async { text }))
///     .route("/idempotency.json", get(|| async { ([(CONTENT_TYPE, "application/json")], openapi) }));
/// # }
/// # Ok::<(), oncekey::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PublishedPolicy {
    pub(super) base: Arc<Policy>,
    /// By the names as they were given.
    pub(super) operations: Vec<(String, Arc<Policy>)>,
    pub(super) retention: Duration,
    pub(super) has_accounts: bool,
    pub(super) each: Most,
}

impl PublishedPolicy {
    /// The fragment, as JSON: `components` that hold for all operations (parameter, headers,
    /// responses, schema), `paths` for the operations with a policy of their own whose name is a
    /// method and a path, and `x-idempotency`, the settings in numbers, beside each.
    pub fn openapi(&self) -> String {
        let mut paths = Map::new();
        for (name, policy) in &self.operations {
            let Some((method, path, parameters)) = openapi_path(name, policy) else { continue };
            let mut parameters: Vec<_> = parameters
                .into_iter()
                .map(|name| {
                    json!({"name": name, "in": "path", "required": true,
                        "schema": {"type": "string"}})
                })
                .collect();
            parameters.push(parameter(policy));
            let operation = json!({
                "parameters": parameters,
                "responses": self.responses(policy),
                "x-idempotency": self.settings(policy),
            });
            let item = paths.entry(path).or_insert_with(|| json!({}));
            item[method] = operation;
        }
        let mut responses = Map::new();
        for (status, response) in self.responses(&self.base) {
            responses.insert(format!("Idempotency{status}"), response);
        }
        json!({
            "paths": paths,
            "components": {
                "parameters": {"IdempotencyKey": parameter(&self.base)},
                "headers": {"IdempotentReplayed": {
                    "description": "Only on the same response again.",
                    "schema": {"type": "string", "const": "true"},
                }},
                "responses": responses,
            },
            "x-idempotency": self.settings(&self.base),
        })
        .to_string()
    }

    /// The settings in numbers.
    fn settings(&self, policy: &Policy) -> Value {
        let most = |of| Some(self.each.of(of)).filter(|&most| most != usize::MAX);
        json!({
            "methods": policy.methods.iter().map(|method| method.as_str()).collect::<Vec<_>>(),
            "field": policy.header_name.as_str(),
            "required": policy.required,
            "bareKeys": policy.key_form == KeyForm::Any,
            "keyLength": 255,
            "scope": self.scope(),
            "keptSeconds": self.retention.as_secs_f64(),
            "compared": policy.fingerprint.name(),
            "waitSeconds": policy.wait_limit.as_secs_f64(),
            "preferWaitSeconds": policy.wait_cap.max(policy.wait_limit).as_secs_f64(),
            "requestBytes": policy.max_request,
            "requestSeconds": policy.read_limit.as_secs_f64(),
            "responseBytes": policy.max_response,
            "releasedStatuses": released(policy),
            "replayField": policy.replay_header.as_str(),
            "expiresField": policy.expires_header.as_ref().map(|name| name.as_str()),
            "accountInFlight": most(Of::Tasks),
            "accountWaiters": most(Of::Waiters),
            "accountRequestBytes": most(Of::Buffered),
        })
    }

    fn scope(&self) -> &'static str {
        if self.has_accounts { "account and operation" } else { "operation" }
    }

    /// What this operation can be answered by us.
    fn problems(&self, policy: &Policy) -> impl Iterator<Item = Problem> {
        let (required, has_accounts) = (policy.required, self.has_accounts);
        let may_refuse = policy.veto.is_set();
        Problem::ALL.into_iter().filter(move |problem| match problem {
            Problem::KeyMissing => required,
            Problem::AccountUnknown => has_accounts,
            Problem::ReplayRefused => may_refuse,
            _ => true,
        })
    }

    /// One response for each status, because that is how OpenAPI tells them apart.
    fn responses(&self, policy: &Policy) -> Map<String, Value> {
        let mut responses = Map::new();
        let all: Vec<_> = self.problems(policy).collect();
        for status in all.iter().map(|problem| problem.status()) {
            let of_status: Vec<_> = all.iter().filter(|it| it.status() == status).collect();
            let titles: Vec<_> = of_status.iter().map(|problem| problem.title()).collect();
            let types: Vec<_> = of_status.iter().map(|it| kind(policy, **it)).collect();
            let mut headers = json!({"Link": {
                "description": "rel=\"describedby\": what explains the problem.",
                "schema": {"type": "string"},
            }});
            if of_status.iter().any(|problem| problem.is_passing()) {
                headers["Retry-After"] = json!({
                    "description": "Seconds, where asking again is of use.",
                    "schema": {"type": "integer", "minimum": 1, "maximum": 60},
                });
            }
            let schema = json!({
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string", "format": "uri-reference", "enum": types},
                    "title": {"type": "string"},
                    "status": {"const": status.as_u16()},
                    "detail": {"type": "string"},
                },
            });
            let response = json!({
                "description": titles.join("; or: "),
                "headers": headers,
                "content": {"application/problem+json": {"schema": schema}},
            });
            responses.insert(status.as_str().to_owned(), response);
        }
        responses
    }

    fn write(&self, policy: &Policy, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let methods: Vec<_> = policy.methods.iter().map(|method| method.as_str()).collect();
        let field = &policy.header_name;
        let required = if policy.required { "required" } else { "optional" };
        let or_bare = if policy.key_form == KeyForm::Any { ", or without the quotes" } else { "" };
        writeln!(f, "  Methods: {}", methods.join(", "))?;
        writeln!(f, "  Key: {required}, in the field {field}, as a quoted string{or_bare}")?;
        writeln!(f, "  Compared: {}", policy.fingerprint.described())?;
        let (limit, cap) = (policy.wait_limit, policy.wait_cap.max(policy.wait_limit));
        writeln!(f, "  A duplicate waits for the first: {}", span(limit))?;
        writeln!(f, "  Prefer: wait=N sets this, up to: {}", span(cap))?;
        let (bytes, time) = (policy.max_request, span(policy.read_limit));
        writeln!(f, "  Request body: at most {bytes} bytes, sent within {time}")?;
        let bytes = policy.max_response;
        writeln!(f, "  Response body: kept up to {bytes} bytes; streams are not kept")?;
        let released: Vec<_> = released(policy).iter().map(u16::to_string).collect();
        writeln!(f, "  Responses that are not kept, so that a retry runs: {}", list(&released))?;
        writeln!(f, "  The same response again has the field: {}: true", policy.replay_header)?;
        if let Some(name) = &policy.expires_header {
            writeln!(f, "  For how many seconds more it is kept is in the field: {name}")?;
        }
        writeln!(f, "  Problems:")?;
        for problem in self.problems(policy) {
            let (status, title) = (problem.status(), problem.title());
            writeln!(f, "    {} {title}: {}", status.as_str(), kind(policy, problem))?;
        }
        Ok(())
    }
}

/// The text, in lines of `name: value`, some of them long.
impl fmt::Display for PublishedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Requests that are safe to retry")?;
        writeln!(f)?;
        writeln!(f, "A request with a key that was used before gets the first response again.")?;
        writeln!(f, "Make a key for each intent, at random, such as a UUID.")?;
        writeln!(f)?;
        writeln!(f, "  Length of a key: 1 to 255 characters, 0x20 to 0x7E, not only spaces")?;
        writeln!(f, "  A key is unique for: {}", self.scope())?;
        writeln!(f, "  Kept for: {}, from the end of the work on", span(self.retention))?;
        for (of, what) in [
            (Of::Tasks, "keys in flight"),
            (Of::Waiters, "duplicates that wait"),
            (Of::Buffered, "bytes of requests being read or at work"),
        ] {
            match self.each.of(of) {
                usize::MAX => {}
                most => writeln!(f, "  At once, for one account: {most} {what}")?,
            }
        }
        writeln!(f)?;
        writeln!(f, "All operations that are not named below:")?;
        self.write(&self.base, f)?;
        for (name, policy) in &self.operations {
            // A name is free text; it must not look like lines of this one.
            writeln!(f, "\n{}:", name.escape_debug())?;
            self.write(policy, f)?;
        }
        Ok(())
    }
}

fn kind(policy: &Policy, problem: Problem) -> String {
    format!("{}{}", policy.problem_base, problem.slug())
}

/// The field of the request.
fn parameter(policy: &Policy) -> Value {
    let (form, example) = match policy.key_form {
        KeyForm::Strict => (format!("^{QUOTED}$"), "Quoted (RFC 9651)"),
        KeyForm::Any => (format!("^({QUOTED}|{BARE})$"), "Quoted (RFC 9651) or bare"),
    };
    json!({
        "name": policy.header_name.as_str(),
        "in": "header",
        "required": policy.required,
        "description": format!("{example}, 1 to 255 characters, one for each intent."),
        "schema": {"type": "string", "pattern": form},
        "example": "\"8e03978e-40d5-43e8-bc93-6894a57f9324\"",
    })
}

fn released(policy: &Policy) -> Vec<u16> {
    (200..=599)
        .filter_map(|status| StatusCode::from_u16(status).ok())
        .filter(|&status| !policy.statuses.is_kept(status))
        .map(|status| status.as_u16())
        .collect()
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

/// In the largest unit that does not need a fraction.
fn span(span: Duration) -> String {
    let millis = span.as_millis();
    let (unit, name) = [(3_600_000, "h"), (60_000, "min"), (1_000, "s")]
        .into_iter()
        .find(|(unit, _)| millis >= *unit && millis.is_multiple_of(*unit))
        .unwrap_or((1, "ms"));
    if millis == 0 { "not at all".to_owned() } else { format!("{} {name}", millis / unit) }
}

/// Method, path and names of its parameters, if the operation's name is one of a route that OpenAPI
/// can tell and the policy covers.
fn openapi_path(name: &str, policy: &Policy) -> Option<(String, String, Vec<String>)> {
    let (method, path) = name.split_once(' ')?;
    let lower = method.to_ascii_lowercase();
    let is_covered = policy.methods.iter().any(|covered| covered.as_str() == method);
    if !is_covered || !METHODS.contains(&lower.as_str()) || !path.starts_with('/') {
        return None;
    }
    let (mut told, mut parameters) = (String::new(), Vec::new());
    let mut rest = path;
    while let Some((before, inside)) = rest.split_once('{') {
        let (name, after) = inside.split_once('}')?;
        let name = match name.trim_start_matches('*') {
            "" => format!("parameter{}", parameters.len() + 1),
            name => name.to_owned(),
        };
        told.push_str(&format!("{before}{{{name}}}"));
        parameters.push(name);
        rest = after;
    }
    told.push_str(rest);
    Some((lower, told, parameters))
}

#[cfg(test)]
mod tests {
    use http::Method;
    use proptest::prelude::*;

    use super::*;
    use crate::Key;

    proptest! {
        /// What a client makes by the pattern is a key, but for one of spaces only.
        #[test]
        fn r6_the_published_pattern_is_the_form_of_a_key(
            quoted in proptest::string::string_regex(QUOTED).unwrap(),
            bare in proptest::string::string_regex(BARE).unwrap(),
        ) {
            let is_blank = quoted.trim_matches('"').trim().is_empty();
            for form in [KeyForm::Any, KeyForm::Strict] {
                prop_assert!(is_blank || Key::parse(quoted.as_bytes(), form).is_ok(), "{}", quoted);
            }
            prop_assert!(Key::parse(bare.as_bytes(), KeyForm::Any).is_ok(), "{}", bare);
        }
    }

    #[test]
    fn spans_are_told_whole() {
        for (millis, told) in [
            (0, "not at all"),
            (1, "1 ms"),
            (1_500, "1500 ms"),
            (30_000, "30 s"),
            (90_000, "90 s"),
            (900_000, "15 min"),
            (86_400_000, "24 h"),
        ] {
            assert_eq!(span(Duration::from_millis(millis)), told);
        }
    }

    #[test]
    fn only_routes_that_are_covered_have_a_path() {
        let policy = Policy::default().methods([Method::POST]);
        let of = |name| openapi_path(name, &policy).map(|(method, path, _)| method + " " + &path);
        assert_eq!(of("POST /a/{b}/c").unwrap(), "post /a/{b}/c");
        assert_eq!(of("POST /a/{*b}").unwrap(), "post /a/{b}");
        assert_eq!(of("POST /{}/{}").unwrap(), "post /{parameter1}/{parameter2}");
        for other in ["PATCH /a", "charge", "POST a", "post /a", "POST /{a"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
