//! A multipart body (RFC 2046, 5.1) as its parts, so that the boundary does not count.
//!
//! Only the plainest form is read: what parsers might take in two ways has no parts here, and is
//! compared byte for byte. The string `--boundary` stands nowhere but at the line that it opens, so
//! whoever splits the body at another boundary of equal parts gets the same parts.

use http::{HeaderMap, header};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Multipart<'b> {
    /// Such as `multipart/form-data`, in lower case.
    pub(crate) kind: String,
    pub(crate) parts: Vec<Part<'b>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part<'b> {
    /// The header lines as they came.
    pub(crate) head: &'b [u8],
    pub(crate) body: &'b [u8],
}

/// The parts, or `None` for what is no multipart or may be read in two ways.
pub(crate) fn parsed<'b>(headers: &HeaderMap, body: &'b [u8]) -> Option<Multipart<'b>> {
    let mut types = headers.get_all(header::CONTENT_TYPE).iter();
    let (Some(line), None) = (types.next(), types.next()) else { return None };
    let (kind, boundary) = boundary(line.to_str().ok()?)?;
    let delimiter = format!("--{boundary}");
    let (lines, mut open) = (delimiter.as_bytes(), Vec::new());
    let mut rest = body.strip_prefix(lines)?;
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            let is_over = matches!(end, b"" | b"\r\n");
            return is_over.then_some(Multipart { kind, parts: open });
        }
        let inside = rest.strip_prefix(b"\r\n")?;
        let at = find(inside, lines)?;
        let part = inside[..at].strip_suffix(b"\r\n")?;
        // A part may have no header lines; then it begins with the empty one.
        let (head, body) = match part.strip_prefix(b"\r\n") {
            Some(body) => (&b""[..], body),
            None => {
                let end = find(part, b"\r\n\r\n")?;
                (&part[..end], &part[end + 4..])
            }
        };
        open.push(Part { head, body });
        rest = &inside[at + lines.len()..];
    }
}

/// Media type in lower case and boundary. With another parameter, or a character in the boundary that
/// parsers of the type might stop at, it is not understood.
fn boundary(value: &str) -> Option<(String, String)> {
    let (kind, parameters) = value.split_once(';')?;
    let kind = kind.trim().to_ascii_lowercase();
    if !kind.starts_with("multipart/") {
        return None;
    }
    let (name, boundary) = parameters.split_once('=')?;
    if !name.trim().eq_ignore_ascii_case("boundary") {
        return None;
    }
    let boundary = boundary.trim();
    let boundary = match boundary.strip_prefix('"') {
        Some(quoted) => quoted.strip_suffix('"')?,
        None => boundary,
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"'+_-.".contains(&byte);
    let is_boundary = (1..=70).contains(&boundary.len()) && boundary.bytes().all(is_plain);
    is_boundary.then(|| (kind, boundary.to_owned()))
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn typed(kind: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
        headers
    }

    fn of<'b>(kind: &str, body: &'b str) -> Option<Vec<(&'b str, &'b str)>> {
        let text = |bytes| std::str::from_utf8(bytes).unwrap();
        let parts = parsed(&typed(kind), body.as_bytes())?.parts;
        Some(parts.into_iter().map(|part| (text(part.head), text(part.body))).collect())
    }

    const KIND: &str = "multipart/form-data; boundary=b";

    #[test]
    fn r4_parts_are_heads_and_bytes() {
        let body = "--b\r\nX: 1\r\nY: 2\r\n\r\none\r\n\r\ntwo\r\n--b\r\n\r\n\r\n--b--\r\n";
        let expected = [("X: 1\r\nY: 2", "one\r\n\r\ntwo"), ("", "")];
        assert_eq!(of(KIND, body).unwrap(), expected);
        assert_eq!(of(KIND, body.trim_end()).unwrap(), expected);
        assert_eq!(of("MultiPart/Form-Data;BOUNDARY=\"b\"", body).unwrap(), expected);
        assert_eq!(of(KIND, "--b--").unwrap(), []);
    }

    #[test]
    fn r4_what_may_be_read_in_two_ways_has_no_parts() {
        for body in [
            "",
            "--b",
            "--b\r\n",
            "--b\r\nX: 1\r\n\r\none",
            "--b\r\nX: 1\r\n\r\none\r\n--b",
            "--b\r\nX: 1\r\none\r\n--b--",
            "--b\nX: 1\n\none\n--b--",
            "--b \r\nX: 1\r\n\r\none\r\n--b--",
            "--b\r\nX: 1\r\n\r\none--b\r\n\r\n\r\n--b--",
            "--b\r\nX: 1\r\n\r\none\n--b\r\n\r\n\r\n--b--",
            "--b\r\nX: 1\r\n\r\n--bc\r\n--b--",
            "text\r\n--b\r\nX: 1\r\n\r\none\r\n--b--",
            "--b\r\nX: 1\r\n\r\none\r\n--b--text",
            "--b\r\nX: 1\r\n\r\none\r\n--c--",
        ] {
            assert_eq!(of(KIND, body), None, "{body:?}");
        }
        let body = "--b\r\nX: 1\r\n\r\none\r\n--b--";
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=\"b",
            "multipart/form-data; boundary=b; charset=utf-8",
            "multipart/form-data; charset=utf-8; boundary=b",
            "multipart/form-data; boundary=b,b",
            "application/json; boundary=b",
        ] {
            assert_eq!(of(kind, body), None, "{kind}");
        }
        let mut twice = typed(KIND);
        twice.append(header::CONTENT_TYPE, HeaderValue::from_static(KIND));
        assert_eq!(parsed(&twice, body.as_bytes()), None);
    }

    fn assembled(boundary: &str, parts: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (value, bytes) in parts {
            body.extend_from_slice(format!("--{boundary}\r\nX: {value}\r\n\r\n").as_bytes());
            body.extend_from_slice(bytes);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
        body
    }

    proptest! {
        /// What has parts has just those that were put in, at any boundary; no bytes panic.
        #[test]
        fn r4_the_boundary_does_not_count_and_all_else_does(
            parts in prop::collection::vec(("[a-z]{0,3}", prop::collection::vec(
                prop_oneof![Just(b'-'), Just(b'b'), Just(b'\r'), Just(b'\n'), any::<u8>()], 0..20,
            )), 0..4),
            boundary in "[b-]{1,3}",
        ) {
            let kind = format!("multipart/form-data; boundary={boundary}");
            let body = assembled(&boundary, &parts);
            if let Some(read) = parsed(&typed(&kind), &body) {
                let read: Vec<_> = read.parts.iter().map(|part| {
                    (String::from_utf8(part.head[3..].to_vec()).unwrap(), part.body.to_vec())
                }).collect();
                prop_assert_eq!(read, parts);
            }
        }

        #[test]
        fn r4_no_bytes_panic(body in prop::collection::vec(
            prop_oneof![Just(b'-'), Just(b'b'), Just(b'\r'), Just(b'\n'), Just(b':')], 0..40,
        )) {
            let mut framed = b"--b\r\n".to_vec();
            framed.extend(&body);
            let _ = parsed(&typed(KIND), &framed);
        }
    }
}
