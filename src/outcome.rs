//! What is kept of finished work: a status, header lines and body bytes (R16).
//!
//! Ground rules: an outcome is immutable once it is handed to a permit. A clone shares the bytes,
//! so a replay copies no body. Header lines live in one block, in order, as raw bytes:
//!
//! ```text
//! head: | name length u16 | value length u32 | name | value | next line ...
//! ```

use std::fmt;

use bytes::Bytes;

/// What a buffer costs beside its bytes: the shared count that the first replay makes, the
/// allocator's rounding of both, and what a buffer may be too large (see [`SLACK`]).
const BUFFER: usize = 64;

/// How much larger than its bytes a body's buffer may be without being copied.
const SLACK: usize = 8;

/// The version of [`Outcome::to_bytes`].
#[cfg(feature = "tier")]
const VERSION: u8 = 1;

/// Why [`Outcome::from_bytes`] made no outcome.
#[cfg(feature = "tier")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// Written by another version of this crate, which this one does not know.
    Version(u8),
    /// Cut off or changed.
    Damaged,
}

#[cfg(feature = "tier")]
impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(found) => write!(
                f,
                "format version {found}, but this program knows {VERSION}: it was written by a newer \
                 version of Oncekey"
            ),
            Self::Damaged => f.write_str("the bytes are damaged"),
        }
    }
}

#[cfg(feature = "tier")]
impl std::error::Error for DecodeError {}

/// The stored answer of one intent: the same status, the same header lines in the same order and
/// the same body bytes for everyone who asks (R16).
///
/// It is not bound to HTTP: a worker may use the status as it likes and leave the header lines
/// out. Cloning is cheap and shares the bytes.
///
/// ```
/// use oncekey::Outcome;
///
/// let outcome = Outcome::new(201).header("location", "/charges/7").body("{\"id\":7}");
/// assert_eq!(outcome.status(), 201);
/// assert_eq!(outcome.header_lines().next(), Some((&b"location"[..], &b"/charges/7"[..])));
/// assert_eq!(&outcome.bytes()[..], b"{\"id\":7}");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    status: u16,
    head: Bytes,
    body: Bytes,
}

impl Outcome {
    /// What a header line takes beside its name and value.
    pub(crate) const LINE: usize = 6;

    /// An outcome with a status, no header lines and an empty body.
    pub fn new(status: u16) -> Self {
        Self { status, head: Bytes::new(), body: Bytes::new() }
    }

    /// Adds a header line behind those that are there. Bytes are kept as they are, repeats too.
    ///
    /// A name is cut at 65,535 bytes and a value at 4 GiB, which no HTTP message reaches.
    #[must_use]
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let (name, value) = (name.as_ref(), value.as_ref());
        // Gives the buffer back without a copy, because nobody else holds it yet.
        let mut head = Vec::from(std::mem::take(&mut self.head));
        // Exactly, because what is too much stays as long as the outcome.
        head.reserve_exact(Self::LINE + name.len() + value.len());
        push_line(&mut head, name, value);
        self.head = Bytes::from(head);
        self
    }

    /// As [`Outcome::header`] for each of `lines`, of which there are `room` bytes at most, counting
    /// [`LINE`](Self::LINE) for each.
    #[cfg(feature = "http")]
    pub(crate) fn headers<'a>(
        mut self,
        room: usize,
        lines: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Self {
        let mut head = Vec::from(std::mem::take(&mut self.head));
        head.reserve_exact(room);
        lines.for_each(|(name, value)| push_line(&mut head, name, value));
        self.head = Bytes::from(head.into_boxed_slice());
        self
    }

    /// Sets the body.
    ///
    /// A buffer with room to spare, as a `String` or `Vec` that has grown, is copied into one that
    /// fits, because it is the buffer that stays in memory and the store counts the bytes. This
    /// cannot be seen of bytes that are shared already: a slice of a larger buffer keeps all of it.
    ///
    /// Bytes with an owner of the caller's own ([`Bytes::from_owner`]) are dropped by whatever thread
    /// comes by, while the store works: that `Drop` must not call the store.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = match body.into().try_into_mut() {
            Ok(body) if body.capacity() > body.len() + SLACK => Bytes::copy_from_slice(&body),
            Ok(body) => body.freeze(),
            Err(shared) => shared,
        };
        self
    }

    /// Sets the body to a copy of `body`.
    #[cfg(feature = "http")]
    pub(crate) fn copy_of(mut self, body: &[u8]) -> Self {
        self.body = Bytes::copy_from_slice(body);
        self
    }

    /// The status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The header lines (name, value), in order.
    pub fn header_lines(&self) -> HeaderLines<'_> {
        HeaderLines { rest: &self.head }
    }

    /// The body.
    pub fn bytes(&self) -> &Bytes {
        &self.body
    }

    /// What the outcome costs a store, in bytes.
    pub fn size(&self) -> usize {
        Self::size_of(self.head.len(), self.body.len())
    }

    /// What an outcome of so many bytes of header lines and body costs.
    pub(crate) fn size_of(head: usize, body: usize) -> usize {
        let buffer = |len: usize| if len == 0 { 0 } else { BUFFER + len };
        buffer(head) + buffer(body)
    }

    /// The outcome as bytes that a tier stores: a version, the status, the header lines, the body.
    ///
    /// ```text
    /// | version u8 = 1 | status u16 | length of the header lines u32 | header lines | body |
    /// ```
    #[cfg(feature = "tier")]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(7 + self.len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.status.to_be_bytes());
        // No message has 4 GiB of header lines; `from_bytes` refuses what was cut.
        bytes.extend_from_slice(&u32::try_from(self.head.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(&self.head);
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// The outcome of which [`to_bytes`](Self::to_bytes) has made `bytes`.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it has made no such bytes, or another version has.
    #[cfg(feature = "tier")]
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (version, rest) = bytes.split_first().ok_or(DecodeError::Damaged)?;
        if *version != VERSION {
            return Err(DecodeError::Version(*version));
        }
        let (status, rest) = rest.split_first_chunk().ok_or(DecodeError::Damaged)?;
        let (length, rest) = rest.split_first_chunk().ok_or(DecodeError::Damaged)?;
        let (head, body) = rest
            .split_at_checked(u32::from_be_bytes(*length) as usize)
            .ok_or(DecodeError::Damaged)?;
        let mut lines = HeaderLines { rest: head };
        while lines.next().is_some() {}
        if !lines.rest.is_empty() {
            return Err(DecodeError::Damaged);
        }
        let (head, body) = (Bytes::copy_from_slice(head), Bytes::copy_from_slice(body));
        Ok(Self { status: u16::from_be_bytes(*status), head, body })
    }

    /// An outcome of parts that another one had.
    pub(crate) fn from_parts(status: u16, head: Bytes, body: Bytes) -> Self {
        Self { status, head, body }
    }

    /// The block of header lines.
    pub(crate) fn head(&self) -> &Bytes {
        &self.head
    }

    /// Bytes of header lines and body.
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }
}

/// Shows the status and lengths only: header lines and bodies may hold what no log should see.
impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("status", &self.status)
            .field("header_lines", &self.header_lines().count())
            .field("body_bytes", &self.body.len())
            .finish()
    }
}

/// Writes a header line behind those that are there.
fn push_line(head: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    let name = &name[..name.len().min(usize::from(u16::MAX))];
    let value = &value[..value.len().min(u32::MAX as usize)];
    head.extend_from_slice(&(name.len() as u16).to_be_bytes());
    head.extend_from_slice(&(value.len() as u32).to_be_bytes());
    head.extend_from_slice(name);
    head.extend_from_slice(value);
}

/// The header lines of an [`Outcome`], in order.
#[derive(Clone)]
pub struct HeaderLines<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for HeaderLines<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (name_len, rest) = self.rest.split_first_chunk::<2>()?;
        let (value_len, rest) = rest.split_first_chunk::<4>()?;
        let (name, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*name_len)))?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_len) as usize)?;
        self.rest = rest;
        Some((name, value))
    }
}

impl fmt::Debug for HeaderLines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeaderLines").field("left", &self.clone().count()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r16_header_lines_keep_order_repeats_and_raw_bytes() {
        let lines: [(&[u8], &[u8]); 5] = [
            (b"set-cookie", b"a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
            (b"x", b"\xff\xfe"),
            (b"set-cookie", b"b=2"),
            (b"", b""),
            (b"x", b""),
        ];
        let mut outcome = Outcome::new(201);
        for (name, value) in lines {
            outcome = outcome.header(name, value);
        }
        assert_eq!(outcome.header_lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn r16_a_clone_shares_the_bytes() {
        let outcome = Outcome::new(200).body(vec![7_u8; 10_000]);
        assert_eq!(outcome.clone().bytes().as_ptr(), outcome.bytes().as_ptr());
    }

    #[test]
    fn r25_a_buffer_with_room_to_spare_is_not_kept() {
        let mut grown = Vec::with_capacity(10_000);
        grown.extend_from_slice(b"small");
        let outcome = Outcome::new(200).body(grown);
        let body = outcome.body.try_into_mut().unwrap();
        assert_eq!((&body[..], body.capacity()), (&b"small"[..], 5));
        // One that fits is taken as it is.
        let exact = vec![7; 100].into_boxed_slice();
        let at = exact.as_ptr();
        assert_eq!(Outcome::new(200).body(exact).bytes().as_ptr(), at);
        let mut outcome = Outcome::new(200);
        for n in 1..50 {
            outcome = outcome.header("a", vec![7; n]);
        }
        let head = outcome.head.try_into_mut().unwrap();
        assert_eq!(head.capacity(), head.len());
    }

    #[test]
    fn debug_shows_no_contents() {
        let outcome = Outcome::new(200).header("x-secret", "s3cret").body("s3cret");
        assert!(!format!("{outcome:?} {:?}", outcome.header_lines()).contains("cret"));
    }
}
