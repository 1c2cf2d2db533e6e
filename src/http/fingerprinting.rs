//! Which parts of a request must not change between two attempts (R4).

use std::{fmt, sync::Arc};

use http::{HeaderName, request::Parts};

use super::{
    json,
    multipart::{self, Multipart, Part},
};
use crate::{Fingerprint, Scheme};

type OfBody = dyn Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync;

/// How the fingerprint of a request is made.
///
/// Always part of it: the method and the path with its query, as the client sent them. Then comes
/// what stands for the body, then the chosen headers. The name of the scheme says all of this, so
/// that a layer which was reconfigured knows how a stored fingerprint was made.
///
/// ```
/// use http::HeaderName;
/// use oncekey::http::Fingerprinting;
///
/// let plain = Fingerprinting::raw();
/// assert_eq!(plain.name(), "request-1");
/// let chosen = Fingerprinting::canonical_json().header(HeaderName::from_static("x-version"));
/// assert_eq!(chosen.name(), "json-1;headers=x-version");
/// ```
#[derive(Clone)]
pub struct Fingerprinting {
    form: Form,
    /// Sorted, without repeats: the order of the calls is no part of the scheme.
    headers: Vec<HeaderName>,
    scheme: Scheme,
}

#[derive(Clone)]
enum Form {
    Raw,
    Json,
    Multipart,
    Custom { name: Arc<str>, of_body: Arc<OfBody> },
}

impl Fingerprinting {
    /// The body bytes as they came. The same as [`Fingerprint::request`].
    pub fn raw() -> Self {
        Self::of_form(Form::Raw)
    }

    /// JSON by what it says: the order of members, white space and the escapes in strings do not
    /// count.
    ///
    /// This is the canonical form of RFC 8785 but for numbers, which are compared by their
    /// literal text: 1 and 1.0 stay distinct, because a handler may tell them apart. The order of
    /// array elements counts. A body that is no JSON, nests deeper than 32 levels or has a member
    /// twice is compared byte for byte.
    pub fn canonical_json() -> Self {
        Self::of_form(Form::Json)
    }

    /// A multipart body (RFC 2046, 5.1) by its parts: their headers and bytes, in their order. The
    /// boundary does not count, which most clients choose anew for each attempt.
    ///
    /// The type of the body counts as `multipart/form-data` or another. A body that is no multipart,
    /// by its `Content-Type` or by its form, is compared byte for byte; so is one that has text
    /// before the first boundary or behind the last, blanks behind a boundary, or a boundary within
    /// a part, on which parsers differ.
    pub fn multipart() -> Self {
        Self::of_form(Form::Multipart)
    }

    /// What `of_body` makes of the request stands for the body. Bytes that it ignores may change
    /// under one key. It must not depend on anything but its arguments.
    ///
    /// Give it a new name whenever you change what it does: the name is how older records are told
    /// from new ones.
    pub fn custom(
        name: &str,
        of_body: impl Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::of_form(Form::Custom { name: name.into(), of_body: Arc::new(of_body) })
    }

    fn of_form(form: Form) -> Self {
        let mut made = Self { form, headers: Vec::new(), scheme: Scheme::REQUEST_1 };
        made.scheme = Scheme::named(&made.name());
        made
    }

    /// Adds all values of a request header. May be called often.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.headers.push(name);
        self.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        self.headers.dedup();
        self.scheme = Scheme::named(&self.name());
        self
    }

    /// The name of the scheme: `request-1`, `json-1`, `multipart-1` or `custom-` and your name, then
    /// the headers.
    pub fn name(&self) -> String {
        let mut name = match &self.form {
            Form::Raw => "request-1".to_owned(),
            Form::Json => "json-1".to_owned(),
            Form::Multipart => "multipart-1".to_owned(),
            // By its length, because it may hold anything.
            Form::Custom { name, .. } => format!("custom-{}-{name}", name.len()),
        };
        for (nth, header) in self.headers.iter().enumerate() {
            name.push_str(if nth == 0 { ";headers=" } else { "," });
            name.push_str(header.as_str());
        }
        name
    }

    /// The scheme of the fingerprints that are made in this way.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// In words, for a client.
    pub(crate) fn described(&self) -> String {
        let body = match &self.form {
            Form::Raw => "the bytes of the body",
            Form::Json => "the body: JSON by what it says, numbers as they are written",
            Form::Multipart => "the body: multipart by its parts, whatever the boundary",
            Form::Custom { .. } => "what the operation takes from the request",
        };
        let mut told = format!("method, path with query, {body}");
        for header in &self.headers {
            told.push_str(", the field ");
            told.push_str(header.as_str());
        }
        told
    }

    /// Whether equal fingerprints mean equal body bytes.
    pub(crate) fn covers_bytes(&self) -> bool {
        matches!(self.form, Form::Raw)
    }

    /// `path` is the path with query as the client sent it.
    pub(crate) fn of(&self, parts: &Parts, path: &str, body: &[u8]) -> Fingerprint {
        let builder = Fingerprint::builder(self.scheme)
            .part(parts.method.as_str().as_bytes())
            .part(path.as_bytes());
        let mut builder = match &self.form {
            Form::Raw => builder.part(body),
            Form::Json => match json::canonical(body) {
                Some(canonical) => builder.part(b"json").part(&canonical),
                None => builder.part(b"raw").part(body),
            },
            Form::Multipart => match multipart::parsed(&parts.headers, body) {
                Some(Multipart { kind, parts }) => {
                    let count = (parts.len() as u64).to_be_bytes();
                    let builder = builder.part(b"multipart").part(kind.as_bytes()).part(&count);
                    parts
                        .into_iter()
                        .fold(builder, |builder, Part { head, body }| builder.part(head).part(body))
                }
                None => builder.part(b"raw").part(body),
            },
            Form::Custom { of_body, .. } => builder.part(&of_body(parts, body)),
        };
        for header in &self.headers {
            let values = parts.headers.get_all(header);
            builder = builder
                .part(header.as_str().as_bytes())
                .part(&(values.iter().count() as u64).to_be_bytes());
            for value in values {
                builder = builder.part(value.as_bytes());
            }
        }
        builder.finish()
    }
}

impl fmt::Debug for Fingerprinting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fingerprinting").field(&self.name()).finish()
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};

    use super::*;

    fn parts(lines: &[(&'static str, &'static str)]) -> Parts {
        let mut request = Request::post("/x?y=1");
        for (name, value) in lines {
            request = request.header(*name, HeaderValue::from_static(value));
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn r4_the_default_is_the_fingerprint_of_the_core() {
        let made = Fingerprinting::raw().of(&parts(&[("x-a", "1")]), "/x?y=1", b"body");
        assert_eq!(made, Fingerprint::request("POST", "/x?y=1", b"body"));
    }

    #[test]
    fn r4_schemes_are_told_apart_by_all_that_is_configured() {
        let [a, b] = ["x-a", "x-b"].map(HeaderName::from_static);
        let made = [
            Fingerprinting::raw(),
            Fingerprinting::raw().header(a.clone()),
            Fingerprinting::raw().header(a.clone()).header(b.clone()),
            Fingerprinting::canonical_json(),
            Fingerprinting::canonical_json().header(a.clone()),
            Fingerprinting::multipart(),
            Fingerprinting::custom("1", |_, body| body.to_vec()),
            Fingerprinting::custom("1;headers=x-a", |_, body| body.to_vec()),
            Fingerprinting::custom("1", |_, body| body.to_vec()).header(a.clone()),
        ];
        for (nth, one) in made.iter().enumerate() {
            for other in &made[..nth] {
                assert_ne!(one.scheme(), other.scheme(), "{one:?} {other:?}");
            }
        }
        let other_order = Fingerprinting::raw().header(b).header(a.clone()).header(a);
        assert_eq!(other_order.scheme(), made[2].scheme());
    }

    #[test]
    fn r4_multipart_is_compared_by_its_parts_and_other_bodies_by_their_bytes() {
        let of = |kind: &'static str, body: &str| {
            let parts = parts(&[("content-type", kind)]);
            Fingerprinting::multipart().of(&parts, "/", body.as_bytes())
        };
        let (b, c) = ("multipart/form-data; boundary=b", "multipart/form-data; boundary=c");
        let one = of(b, "--b\r\nX: 1\r\n\r\none\r\n--b--");
        assert_eq!(of(c, "--c\r\nX: 1\r\n\r\none\r\n--c--\r\n"), one);
        let mixed = "multipart/mixed; boundary=b";
        for other in [
            of(b, "--b\r\nX: 1\r\n\r\none!\r\n--b--"),
            of(b, "--b\r\nX: 2\r\n\r\none\r\n--b--"),
            of(b, "--b\r\nX: 1\r\n\r\none\r\n--b\r\n\r\n\r\n--b--"),
            of(mixed, "--b\r\nX: 1\r\n\r\none\r\n--b--"),
            of("text/plain", "--b\r\nX: 1\r\n\r\none\r\n--b--"),
        ] {
            assert_ne!(other, one);
        }
        assert_eq!(of("text/plain", "x"), of(b, "x"), "neither has parts");
        assert_ne!(of("text/plain", "x"), of("text/plain", "x\r\n"));
    }

    #[test]
    fn r4_chosen_headers_count_with_repeats_and_absence() {
        let of = |lines: &[(&'static str, &'static str)]| {
            let name = HeaderName::from_static("x-a");
            Fingerprinting::raw().header(name).of(&parts(lines), "/", b"")
        };
        let made = [
            of(&[]),
            of(&[("x-a", "")]),
            of(&[("x-a", "12")]),
            of(&[("x-a", "1"), ("x-a", "2")]),
            of(&[("x-a", "2"), ("x-a", "1")]),
        ];
        for (nth, one) in made.iter().enumerate() {
            assert!(!made[..nth].contains(one));
        }
        assert_eq!(of(&[("x-a", "1"), ("x-b", "1")]), of(&[("x-b", "2"), ("x-a", "1")]));
    }

    #[test]
    fn r4_json_is_compared_by_what_it_says_and_no_json_by_its_bytes() {
        let of =
            |body: &str| Fingerprinting::canonical_json().of(&parts(&[]), "/", body.as_bytes());
        assert_eq!(of(r#"{"a":1,"b":[1,2]}"#), of("{ \"b\" : [1, 2],\n\"\\u0061\": 1 }"));
        assert_ne!(of(r#"{"a":1}"#), of(r#"{"a":1.0}"#));
        assert_ne!(of("[1,2]"), of("[2,1]"));
        assert_ne!(of("{"), of("{ "));
        assert_ne!(of(r#"{"a":1,"a":1}"#), of(r#"{"a":1, "a":1}"#));
    }
}
