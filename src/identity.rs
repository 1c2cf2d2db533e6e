//! Who is asking, and for what: account, endpoint and key, compared byte for byte.
//!
//! The three parts are framed by their lengths, never joined by a separator, so that
//! (`a:b`, `c`) is not (`a`, `b:c`). Case, trailing spaces and NUL bytes count (R1).
//!
//! ```text
//! frame:  | account length | endpoint length | account | endpoint | key        |
//!         | u8             | u16, big endian | 0..=255 | 0..=512  | the rest   |
//! ```

use std::fmt;
use std::ops::Deref;

use crate::header::{self, KeyError};

/// The longest account, in bytes.
pub(crate) const MAX_ACCOUNT: usize = 255;
const MAX_ENDPOINT: usize = 512;

/// The lengths that stand before the parts in a frame.
const HEAD: usize = 3;

/// The longest frame there is.
pub(crate) const MAX_FRAME: usize = HEAD + MAX_ACCOUNT + MAX_ENDPOINT + header::MAX_KEY;

/// What one write is known by: the account that asked, the endpoint it asked, and the key it
/// named the write with (R1). Borrows its parts, which were measured once, in [`new`](Self::new).
///
/// ```
/// use oncekey::Identity;
///
/// let identity = Identity::new("tenant-7", "POST /orders", "3f1c")?;
/// assert_eq!(identity.account(), b"tenant-7");
/// assert_ne!(identity, Identity::new("tenant-7", "POST /orders", "3F1C")?);
/// # Ok::<(), oncekey::IdentityError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity<'a> {
    account: &'a [u8],
    endpoint: &'a [u8],
    key: &'a [u8],
}

impl<'a> Identity<'a> {
    /// Puts an identity together.
    ///
    /// * `account`: the authenticated caller the key belongs to, 0 to 255 bytes. The empty
    ///   account is one account among others, not "no account"; a program with a single tenant
    ///   may use it (R3).
    /// * `endpoint`: the operation, 0 to 512 bytes; for HTTP the method and the route template,
    ///   such as `POST /orders/{}/refund` (R2).
    /// * `key`: 1 to 255 bytes, each 0x20 to 0x7E, not all of them spaces (R6).
    ///
    /// # Errors
    ///
    /// An [`IdentityError`] for the first part that is out of its bounds.
    pub fn new<A, E, K>(account: &'a A, endpoint: &'a E, key: &'a K) -> Result<Self, IdentityError>
    where
        A: AsRef<[u8]> + ?Sized,
        E: AsRef<[u8]> + ?Sized,
        K: AsRef<[u8]> + ?Sized,
    {
        let identity = Self::measured(account.as_ref(), endpoint.as_ref(), key.as_ref())?;
        header::check(identity.key).map_err(IdentityError::Key)?;
        Ok(identity)
    }

    /// As [`new`](Self::new), of a key that is known to be one.
    #[cfg(feature = "http")]
    pub(crate) fn of(
        account: &'a [u8],
        endpoint: &'a str,
        key: &'a header::Key,
    ) -> Result<Self, IdentityError> {
        Self::measured(account, endpoint.as_bytes(), key.as_ref())
    }

    fn measured(
        account: &'a [u8],
        endpoint: &'a [u8],
        key: &'a [u8],
    ) -> Result<Self, IdentityError> {
        if account.len() > MAX_ACCOUNT {
            return Err(IdentityError::Account { len: account.len() });
        }
        if endpoint.len() > MAX_ENDPOINT {
            return Err(IdentityError::Endpoint { len: endpoint.len() });
        }
        Ok(Self { account, endpoint, key })
    }

    /// The authenticated caller the key belongs to.
    pub const fn account(&self) -> &'a [u8] {
        self.account
    }

    /// The operation.
    pub const fn endpoint(&self) -> &'a [u8] {
        self.endpoint
    }

    /// What the client sent to name one intent.
    pub const fn key(&self) -> &'a [u8] {
        self.key
    }

    /// The framed bytes: equal if and only if the identities are.
    pub(crate) fn frame(&self) -> Frame {
        // Within their types: `new` has measured the parts, `from_frame` has read them from these.
        let [high, low] = (self.endpoint.len() as u16).to_be_bytes();
        Frame::of([self.account.len() as u8, high, low], [self.account, self.endpoint, self.key])
    }

    /// The identity in `frame`, which [`frame`](Self::frame) has made.
    ///
    /// Total: of other bytes it makes some identity, whose parts may break the bounds of
    /// [`new`](Self::new), but it never panics.
    pub(crate) fn from_frame(frame: &'a [u8]) -> Self {
        let (account_len, endpoint_len, parts) = match frame {
            [a, e, f, parts @ ..] => (usize::from(*a), u16::from_be_bytes([*e, *f]).into(), parts),
            short => (0, 0, short),
        };
        let (account, parts) = parts.split_at(account_len.min(parts.len()));
        let (endpoint, key) = parts.split_at(usize::min(endpoint_len, parts.len()));
        Self { account, endpoint, key }
    }
}

/// Shows lengths only: an account or a key in a log is a leak.
impl fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Identity(account: {} bytes, endpoint: {} bytes, key: {} bytes)",
            self.account.len(),
            self.endpoint.len(),
            self.key.len()
        )
    }
}

/// Bytes of a frame that need no allocation: most identities.
const SHORT: usize = 102;

/// A framed identity. A short one stands in place, a long one on the heap.
#[derive(Clone)]
pub(crate) struct Frame(Bytes);

#[derive(Clone)]
enum Bytes {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Box<[u8]>),
}

impl Frame {
    /// No identity: the place of one.
    pub(crate) const NONE: Self = Self(Bytes::Short { len: 0, bytes: [0; SHORT] });

    #[inline]
    fn of(head: [u8; HEAD], parts: [&[u8]; 3]) -> Self {
        let len = parts.iter().fold(HEAD, |len, part| len + part.len());
        let mut frame = Self(Bytes::Short { len: len as u8, bytes: [0; SHORT] });
        let Bytes::Short { bytes, .. } = &mut frame.0 else { return frame };
        // Written where it stays: to read it again at once, for a move, would wait for it.
        bytes[..HEAD].copy_from_slice(&head);
        let mut at = HEAD;
        for part in parts {
            match bytes.get_mut(at..at + part.len()) {
                Some(place) => place.copy_from_slice(part),
                None => return Self(Bytes::Long([&head[..], &parts.concat()].concat().into())),
            }
            at += part.len();
        }
        frame
    }

    /// Whether it stands on the heap.
    pub(crate) fn is_long(&self) -> bool {
        matches!(self.0, Bytes::Long(_))
    }

    /// As an assignment of a clone, which would be made somewhere else first.
    #[inline]
    pub(crate) fn copy_from(&mut self, other: &Self) {
        match (&mut self.0, &other.0) {
            (Bytes::Short { len, bytes }, Bytes::Short { len: theirs, bytes: from }) => {
                *len = *theirs;
                *bytes = *from;
            }
            _ => *self = other.clone(),
        }
    }
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short { len, bytes } => &bytes[..usize::from(*len).min(SHORT)],
            Bytes::Long(bytes) => bytes,
        }
    }
}

/// Shows the length only.
impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} bytes)", self.len())
    }
}

/// Why [`Identity::new`] made no identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdentityError {
    /// The account is longer than 255 bytes.
    Account {
        /// Its length in bytes.
        len: usize,
    },
    /// The endpoint is longer than 512 bytes.
    Endpoint {
        /// Its length in bytes.
        len: usize,
    },
    /// The key is no key.
    Key(KeyError),
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Account { len } => write!(
                f,
                "the account is {len} bytes long, at most {MAX_ACCOUNT} are allowed: \
                 use a shorter name for it, such as its database id or a hash"
            ),
            Self::Endpoint { len } => write!(
                f,
                "the endpoint is {len} bytes long, at most {MAX_ENDPOINT} are allowed: \
                 use the method and the route template, not the concrete path"
            ),
            Self::Key(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for IdentityError {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn identity<'a>(a: &'a [u8], e: &'a [u8], k: &'a [u8]) -> Identity<'a> {
        Identity::new(a, e, k).unwrap()
    }

    #[test]
    fn parts_are_framed() {
        let all: &[(&[u8], &[u8], &[u8])] = &[
            (b"a:b", b"c", b"k"),
            (b"a", b"b:c", b"k"),
            (b"ab", b"c", b"k"),
            (b"a", b"bc", b"k"),
            (b"a", b"b", b"ck"),
            (b"abc", b"", b"k"),
            (b"", b"abc", b"k"),
            (b"", b"", b"abck"),
            (b"a\0", b"bc", b"k"),
            (b"a", b"\0bc", b"k"),
            (b"a", b"bc", b"K"),
            (b"a", b"bc", b"k "),
            (b"a ", b"bc", b"k"),
        ];
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                let (a, b) = (identity(a.0, a.1, a.2), identity(b.0, b.1, b.2));
                assert_eq!(*a.frame() == *b.frame(), i == j);
                assert_eq!(a == b, i == j);
            }
        }
    }

    #[test]
    fn the_frame_is_as_drawn() {
        let endpoint = [b'e'; 258];
        let framed = identity(b"ab", &endpoint, b"k").frame();
        assert_eq!(framed[..5], [2, 1, 2, b'a', b'b']);
        assert_eq!(framed[5..263], endpoint);
        assert_eq!(framed[263..], *b"k");
    }

    #[test]
    fn bounds() {
        let long = [b'x'; 513];
        assert!(Identity::new("", "", "k").is_ok());
        let largest = identity(&long[..255], &long[..512], &long[..255]);
        assert_eq!(largest.frame().len(), MAX_FRAME);
        assert_eq!(Identity::from_frame(&largest.frame()), largest);
        assert_eq!(Identity::new(&long[..256], "", "k"), Err(IdentityError::Account { len: 256 }));
        assert_eq!(Identity::new("", &long, "k"), Err(IdentityError::Endpoint { len: 513 }));
        assert_eq!(Identity::new("", "", ""), Err(IdentityError::Key(KeyError::Empty)));
        assert_eq!(
            Identity::new("", "", &long[..256]),
            Err(IdentityError::Key(KeyError::TooLong { len: 256 }))
        );
        for byte in [0, b'\t', 0x1f, 0x7f, 0x80, 0xff] {
            assert_eq!(
                Identity::new("", "", &[b'k', byte]),
                Err(IdentityError::Key(KeyError::BadByte { at: 1, byte }))
            );
        }
    }

    #[test]
    fn an_error_says_the_part_the_bound_and_what_to_do() {
        let text = IdentityError::Account { len: 300 }.to_string();
        for word in ["account", "255", "300", "shorter"] {
            assert!(text.contains(word), "{text}");
        }
        let text = IdentityError::Endpoint { len: 600 }.to_string();
        for word in ["endpoint", "512", "600", "template"] {
            assert!(text.contains(word), "{text}");
        }
        let text = IdentityError::Key(KeyError::TooLong { len: 256 }).to_string();
        for word in ["key", "255", "256"] {
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn debug_shows_lengths_only() {
        let identity = identity(b"alice", b"POST /", b"secret");
        let shown = "Identity(account: 5 bytes, endpoint: 6 bytes, key: 6 bytes)";
        assert_eq!(format!("{identity:?}"), shown);
        assert_eq!(format!("{:?}", identity.frame()), "Frame(20 bytes)");
    }

    proptest! {
        // 1. What was framed is read back as it was.
        // 2. Bytes nobody framed never panic, and lose nothing but the head.
        #[test]
        fn frame_round_trips(
            account in prop::collection::vec(any::<u8>(), 0..=255),
            endpoint in prop::collection::vec(any::<u8>(), 0..=512),
            key in prop::collection::vec(0x20..=0x7eu8, 1..=255),
        ) {
            prop_assume!(key.iter().any(|byte| *byte != b' '));
            let identity = Identity::new(&account, &endpoint, &key).unwrap();
            let framed = identity.frame();
            prop_assert_eq!(Identity::from_frame(&framed), identity);
        }

        #[test]
        fn from_frame_is_total(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
            let identity = Identity::from_frame(&bytes);
            let parts = [identity.account(), identity.endpoint(), identity.key()].concat();
            let head = if bytes.len() < HEAD { 0 } else { HEAD };
            prop_assert_eq!(&parts, &bytes[head..]);
        }
    }
}
