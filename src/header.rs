//! The `Idempotency-Key` field: bytes to [`Key`] and back (R6).
//!
//! Two forms name the same key:
//!
//! ```text
//! quoted   "3f1c\"7"; v=1    a Structured Field String (RFC 9651, 3.3.3): 0x20 to 0x7E, of which
//!                            `"` and `\` are escaped; parameters after it are ignored if they are
//!                            well-formed, anything else after it is an error
//! bare     3f1c-7            the whole value: 0x21 to 0x7E without `"` and `,`
//! ```
//!
//! What a key is stands here, in the core. Reading the field is a matter of the `http` feature,
//! because the grammar of the parameters that we ignore is the larger part of RFC 9651, and the
//! `sfv` crate knows it.

#[cfg(feature = "http")]
mod field;

use std::fmt;

#[cfg(feature = "http")]
pub use self::field::KeyForm;

/// The longest key, in characters.
pub(crate) const MAX_KEY: usize = 255;

/// What the client sent to name one intent: 1 to 255 characters, each 0x20 to 0x7E, not all of
/// them spaces (R6). Compared byte for byte: case and spaces at the ends count.
///
/// ```
/// use oncekey::Key;
///
/// let key = Key::new("say \"hi\"")?;
/// assert_eq!(key.as_str(), "say \"hi\"");
/// assert_eq!(key.to_field_value(), r#""say \"hi\"""#);
/// # Ok::<(), oncekey::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Box<str>);

impl Key {
    /// The key with these characters, which are taken as they are: no quotes are taken off and no
    /// spaces trimmed.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`], [`KeyError::Blank`], [`KeyError::TooLong`] or [`KeyError::BadByte`].
    pub fn new(characters: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let bytes = characters.as_ref();
        check(bytes)?;
        Ok(Self::made(bytes))
    }

    /// Of bytes that [`check`] would take: ASCII, so nothing is lost.
    pub(crate) fn made(bytes: &[u8]) -> Self {
        match str::from_utf8(bytes) {
            Ok(characters) => Self(characters.into()),
            Err(_) => Self(String::from_utf8_lossy(bytes).into()),
        }
    }

    /// The characters of the key.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key as the value of an `Idempotency-Key` field: quoted and escaped, 3 to 512 bytes.
    pub fn to_field_value(&self) -> String {
        let mut value = String::with_capacity(self.0.len() + 2);
        value.push('"');
        for character in self.0.chars() {
            if matches!(character, '"' | '\\') {
                value.push('\\');
            }
            value.push(character);
        }
        value.push('"');
        value
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Shows the length only: whoever reads a key in a log could ask for the outcome with it.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} characters)", self.0.len())
    }
}

/// Whether `key` may be a key. The one place that says what a key is.
pub(crate) fn check(key: &[u8]) -> Result<(), KeyError> {
    if key.is_empty() {
        return Err(KeyError::Empty);
    }
    if key.len() > MAX_KEY {
        return Err(KeyError::TooLong { len: key.len() });
    }
    let is_bad = |byte: &u8| !matches!(byte, 0x20..=0x7e);
    // Without a way out in between, so that many bytes are looked at in one step.
    if key.iter().fold(false, |bad, byte| bad | is_bad(byte))
        && let Some((at, &byte)) = key.iter().enumerate().find(|(_, byte)| is_bad(byte))
    {
        return Err(KeyError::BadByte { at, byte });
    }
    if key[0] == b' ' && key.iter().all(|&byte| byte == b' ') {
        return Err(KeyError::Blank);
    }
    Ok(())
}

/// Why some bytes are no key, or are not the field value of one (R6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// There is nothing: an empty value, or `""`.
    Empty,
    /// There are only spaces.
    Blank,
    /// The key has more than 255 characters.
    TooLong {
        /// How many it has, after unquoting.
        len: usize,
    },
    /// A byte that a key may not hold, in the form in which it was sent.
    BadByte {
        /// Its offset in the bytes that were handed in.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// A quote without its partner.
    Unbalanced,
    /// A backslash before something else than `"` or `\`.
    BadEscape,
    /// A list, such as `k1, k2`: one request has one key.
    List,
    /// After the closing quote comes something that is not a well-formed parameter.
    Trailing,
    /// A bare key, where `KeyForm::Strict` asks for a quoted one.
    NotQuoted,
    /// The field came more than once.
    Multiple,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the key is empty: send 1 to 255 characters"),
            Self::Blank => f.write_str("the key holds only spaces: send 1 to 255 characters"),
            Self::TooLong { len } => write!(
                f,
                "the key has {len} characters, at most {MAX_KEY} are allowed: \
                 send a shorter one, such as a UUID"
            ),
            Self::BadByte { at, byte: byte @ (b' ' | b'\t') } => write!(
                f,
                "the key holds the byte 0x{byte:02x} at offset {at}: \
                 a key that is not quoted holds no blanks"
            ),
            Self::BadByte { at, byte } => write!(
                f,
                "the key holds the byte 0x{byte:02x} at offset {at}: \
                 only printable ASCII (0x20 to 0x7e) is allowed"
            ),
            Self::Unbalanced => f.write_str(
                "the key has a quote without its partner: \
                 put quotes at both ends, and write a quote inside as \\\"",
            ),
            Self::BadEscape => f.write_str(
                "the quoted key has a backslash before a character other than \" and \\: \
                 write a backslash as \\\\",
            ),
            Self::List => f.write_str(
                "there is more than one key: send one; a comma is allowed only in a quoted key",
            ),
            Self::Trailing => f.write_str(
                "something follows the quoted key: \
                 send nothing after it, or well-formed parameters (RFC 9651)",
            ),
            Self::NotQuoted => f.write_str("the key is not quoted: put it between double quotes"),
            Self::Multiple => f.write_str("the key was sent in more than one field: send one"),
        }
    }
}

impl std::error::Error for KeyError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_key_is() {
        assert_eq!(Key::new("k").unwrap().as_str(), "k");
        assert_eq!(Key::new([b'~'; 255]).unwrap().as_str().len(), 255);
        assert_eq!(Key::new(" k ").unwrap().as_ref(), b" k ");
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert_eq!(Key::new("  "), Err(KeyError::Blank));
        assert_eq!(Key::new([b'x'; 256]), Err(KeyError::TooLong { len: 256 }));
        for byte in 0..=255 {
            let found = Key::new([b'k', byte]);
            match byte {
                0x20..=0x7e => assert_eq!(found.unwrap().as_ref(), [b'k', byte]),
                _ => assert_eq!(found, Err(KeyError::BadByte { at: 1, byte })),
            }
        }
        for bytes in [&b"k\0\0"[..], b"k\x7fk\n", b"k\n\xff\0\0"] {
            assert_eq!(Key::new(bytes), Err(KeyError::BadByte { at: 1, byte: bytes[1] }));
        }
    }

    #[test]
    fn a_field_value_is_quoted_and_escaped() {
        assert_eq!(Key::new(r#"a"b\c"#).unwrap().to_field_value(), r#""a\"b\\c""#);
        assert_eq!(Key::new([b'"'; 255]).unwrap().to_field_value().len(), 512);
    }

    #[test]
    fn each_error_says_what_is_wrong_and_where() {
        for (error, parts) in [
            (KeyError::Empty, ["empty", "1 to 255"]),
            (KeyError::Blank, ["only spaces", "1 to 255"]),
            (KeyError::TooLong { len: 300 }, ["300 characters", "at most 255"]),
            (KeyError::BadByte { at: 7, byte: b'\t' }, ["0x09 at offset 7", "no blanks"]),
            (KeyError::BadByte { at: 7, byte: 0xc3 }, ["0xc3 at offset 7", "printable ASCII"]),
            (KeyError::Unbalanced, ["without its partner", "both ends"]),
            (KeyError::BadEscape, ["backslash", r"\\"]),
            (KeyError::List, ["more than one key", "send one"]),
            (KeyError::Trailing, ["follows the quoted key", "RFC 9651"]),
            (KeyError::NotQuoted, ["not quoted", "double quotes"]),
            (KeyError::Multiple, ["more than one field", "send one"]),
        ] {
            let told = error.to_string();
            assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        }
    }

    #[test]
    fn debug_shows_the_length_only() {
        assert_eq!(format!("{:?}", Key::new("secret").unwrap()), "Key(6 characters)");
    }
}
