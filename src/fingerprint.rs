//! What must not change between two attempts, boiled down to 32 bytes.
//!
//! The parts go into SHA-256 framed by their length, never joined by a separator, so that
//! (`ab`, `c`) is not (`a`, `bc`). First goes the id of the scheme that chose the parts: a
//! fingerprint can only equal one that was made by the same scheme, and a layer that was
//! reconfigured can tell "another request" from "another way to look at it" (R4).
//!
//! What is hashed: `scheme id (8 bytes)`, then for each part `length (u64, big endian)`, `bytes`.

use std::fmt;

use sha2::{Digest, Sha256};

/// The name of a way to make fingerprints: which parts, in which order and form.
///
/// Two schemes are the same if their names are. Give a new name to each new choice of parts;
/// a stored record remembers the scheme of its fingerprint, and is compared only with a
/// fingerprint of that scheme (R4).
///
/// ```
/// use oncekey::Scheme;
///
/// assert_eq!(Scheme::named("request-1"), Scheme::REQUEST_1);
/// assert_ne!(Scheme::named("invoice-1"), Scheme::named("invoice-2"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Scheme([u8; 8]);

impl Scheme {
    /// The scheme of [`Fingerprint::request`]: method, path with query, body bytes.
    // Written out because SHA-256 is no `const fn`; a test holds it to the name.
    pub const REQUEST_1: Self = Self([0x19, 0xf1, 0x06, 0x4b, 0x61, 0x9d, 0x49, 0xd3]);

    /// The scheme of this name, of any length. Its id is the first 8 bytes of the SHA-256 of
    /// the name.
    pub fn named(name: &str) -> Self {
        let digest: [u8; 32] = Sha256::digest(name.as_bytes()).into();
        let mut id = [0; 8];
        id.copy_from_slice(&digest[..8]);
        Self(id)
    }

    /// The scheme with this id, as [`id`](Self::id) once gave it.
    pub const fn from_id(id: [u8; 8]) -> Self {
        Self(id)
    }

    /// The 8 bytes that stand for the scheme in a record.
    pub const fn id(self) -> [u8; 8] {
        self.0
    }
}

impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scheme({:016x})", u64::from_be_bytes(self.0))
    }
}

/// SHA-256 of what must not change between two attempts, with the [`Scheme`] that made it (R4).
///
/// Another fingerprint under a live identity is a mismatch (R5).
///
/// ```
/// use oncekey::{Fingerprint, Scheme};
///
/// let first = Fingerprint::request("POST", "/orders/1/refund", b"{\"amount\":5}");
/// let other = Fingerprint::request("POST", "/orders/2/refund", b"{\"amount\":5}");
/// assert_ne!(first, other);
///
/// let scheme = Scheme::named("invoice-1");
/// let own = Fingerprint::builder(scheme).part(b"A-17").part(b"120.00").finish();
/// assert_eq!(own.scheme(), scheme);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    scheme: Scheme,
    digest: [u8; 32],
}

impl Fingerprint {
    /// The fingerprint of an HTTP request, scheme [`Scheme::REQUEST_1`].
    ///
    /// All three parts are taken byte for byte: JSON with its members in another order is
    /// another request.
    pub fn request(method: &str, path_and_query: &str, body: &[u8]) -> Self {
        Self::builder(Scheme::REQUEST_1)
            .part(method.as_bytes())
            .part(path_and_query.as_bytes())
            .part(body)
            .finish()
    }

    /// Starts a fingerprint of your own.
    pub fn builder(scheme: Scheme) -> FingerprintBuilder {
        FingerprintBuilder { scheme, hash: Sha256::new().chain_update(scheme.0) }
    }

    /// A fingerprint whose digest was made elsewhere: read back from a store, or by other means
    /// than the builder.
    pub const fn from_parts(scheme: Scheme, digest: [u8; 32]) -> Self {
        Self { scheme, digest }
    }

    /// The scheme that made it.
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The 32 bytes of SHA-256.
    pub const fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

/// Shows the first 4 bytes of the digest: enough to tell two apart in a log, too few to find the
/// request they came from by trying candidates.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.digest;
        write!(f, "Fingerprint({a:02x}{b:02x}{c:02x}{d:02x}.., {:?})", self.scheme)
    }
}

/// Takes the parts of a [`Fingerprint`], in order. Made by [`Fingerprint::builder`].
#[derive(Clone)]
#[must_use = "a fingerprint is made by `finish`"]
pub struct FingerprintBuilder {
    scheme: Scheme,
    hash: Sha256,
}

impl FingerprintBuilder {
    /// Adds a part, framed by its length: an empty part counts, and no two lists of parts give
    /// the same input to the hash.
    #[inline]
    pub fn part(mut self, bytes: &[u8]) -> Self {
        // A `usize` fits into 64 bits on every platform Rust has.
        self.hash.update((bytes.len() as u64).to_be_bytes());
        self.hash.update(bytes);
        self
    }

    /// The fingerprint of the parts so far.
    #[must_use]
    pub fn finish(self) -> Fingerprint {
        Fingerprint { scheme: self.scheme, digest: self.hash.finalize().into() }
    }
}

/// Shows the scheme, nothing of the parts.
impl fmt::Debug for FingerprintBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintBuilder").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Made with Python's `hashlib`. A stored record outlives the build that wrote it: these
    /// never change.
    #[test]
    fn golden() {
        assert_eq!(hex(&Scheme::named("").id()), "e3b0c44298fc1c14");
        assert_eq!(hex(&Scheme::named("json-1").id()), "0fe1d4fbc311c34d");
        assert_eq!(Scheme::named("request-1"), Scheme::REQUEST_1);
        assert_eq!(hex(&Scheme::REQUEST_1.id()), "19f1064b619d49d3");
        for (print, digest) in [
            (
                Fingerprint::request("POST", "/orders/1/refund?x=1", br#"{"amount":5}"#),
                "203fc459b2f48be1db1f892a07d6cd7080d5d57ed12283f08ad4be45a4a6b359",
            ),
            (
                Fingerprint::request("POST", "/", b""),
                "18b598d3016f6f915b05acf9332c92d0195ca0ab2d18de08e407732ec4ef3618",
            ),
            (
                Fingerprint::builder(Scheme::REQUEST_1).finish(),
                "8b97cb39245994189bf0976a85e75d1ef23acfa0f3094a38c0e9f188adc08102",
            ),
            (
                Fingerprint::builder(Scheme::named("json-1")).part(&[0; 100_000]).finish(),
                "f6cc5ad2c28a9ba0ee5e5cce6b8f6e075d543b58d34dd59c3e4194e735a1850c",
            ),
        ] {
            assert_eq!(hex(print.digest()), digest);
        }
    }

    #[test]
    fn parts_are_framed() {
        let of = |parts: &[&[u8]]| {
            let mut builder = Fingerprint::builder(Scheme::named("t"));
            for part in parts {
                builder = builder.part(part);
            }
            builder.finish()
        };
        let lists: &[&[&[u8]]] = &[
            &[],
            &[b""],
            &[b"", b""],
            &[b"ab", b"c"],
            &[b"a", b"bc"],
            &[b"abc"],
            &[b"abc", b""],
            &[b"", b"abc"],
            &[b"ab\0", b"c"],
            &[b"ab", b"\0c"],
            // The framed form of [b"a", b"b"], as one part.
            &[b"\0\0\0\0\0\0\0\x01a\0\0\0\0\0\0\0\x01b"],
            &[b"a", b"b"],
        ];
        for (i, a) in lists.iter().enumerate() {
            for (j, b) in lists.iter().enumerate() {
                assert_eq!(of(a) == of(b), i == j, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn the_scheme_counts() {
        let one = Fingerprint::builder(Scheme::named("a")).part(b"x").finish();
        let two = Fingerprint::builder(Scheme::named("b")).part(b"x").finish();
        assert_ne!(one.digest(), two.digest());
        assert_ne!(one, Fingerprint::from_parts(two.scheme(), *one.digest()));
        assert_eq!(one, Fingerprint::from_parts(one.scheme(), *one.digest()));
        assert_eq!(Scheme::from_id(one.scheme().id()), one.scheme());
    }

    #[test]
    fn debug_shows_no_more_than_four_bytes() {
        let print = Fingerprint::from_parts(Scheme::REQUEST_1, [0xab; 32]);
        assert_eq!(format!("{print:?}"), "Fingerprint(abababab.., Scheme(19f1064b619d49d3))");
        assert_eq!(
            format!("{:?}", Fingerprint::builder(Scheme::REQUEST_1).part(b"secret")),
            "FingerprintBuilder { scheme: Scheme(19f1064b619d49d3), .. }"
        );
    }
}
