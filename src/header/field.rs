//! Reading the `Idempotency-Key` field: one line's value to a [`Key`] (R6).

use std::borrow::Cow;
use std::convert::Infallible;

use sfv::visitor::{Ignored, ItemVisitor, ParameterVisitor};
use sfv::{BareItemFromInput, Parser, StringRef};

use super::{Key, KeyError};

/// Which forms of the field are read (R6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyForm {
    /// The quoted and the bare one. The default: most clients in the field send `abc`, while
    /// the standard says `"abc"`.
    #[default]
    Any,
    /// The quoted one only, as RFC 9651 has it.
    Strict,
}

impl Key {
    /// The key in the value of one `Idempotency-Key` field line (R6). Spaces and tabs around
    /// the value are ignored.
    ///
    /// ```
    /// use oncekey::{Key, KeyError, KeyForm};
    ///
    /// let key = Key::parse(b"\"3f1c\"; v=1", KeyForm::Any)?;
    /// assert_eq!(key, Key::parse(b"3f1c", KeyForm::Any)?);
    /// assert_eq!(Key::parse(b"3f1c", KeyForm::Strict), Err(KeyError::NotQuoted));
    /// assert_eq!(Key::parse(b"k1, k2", KeyForm::Any), Err(KeyError::List));
    /// # Ok::<(), KeyError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A [`KeyError`] for the first fault from the left.
    pub fn parse(value: &[u8], form: KeyForm) -> Result<Self, KeyError> {
        let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let Some(start) = value.iter().position(|byte| !is_blank(byte)) else {
            return Err(if value.is_empty() { KeyError::Empty } else { KeyError::Blank });
        };
        let end = value.iter().rposition(|byte| !is_blank(byte)).map_or(start, |last| last + 1);
        let trimmed = &value[start..end];
        let key = match (trimmed.first(), form) {
            (Some(b'"'), _) => quoted(trimmed),
            (_, KeyForm::Any) => bare(trimmed),
            (_, KeyForm::Strict) => Err(not_quoted(trimmed)),
        };
        key.map_err(|error| match error {
            KeyError::BadByte { at, byte } => KeyError::BadByte { at: start + at, byte },
            other => other,
        })
    }

    /// The key in all lines of the field, or `None` if there is none: absent and empty are not
    /// the same (R6).
    ///
    /// ```
    /// use oncekey::{Key, KeyError, KeyForm};
    ///
    /// assert_eq!(Key::from_lines([], KeyForm::Any), Ok(None));
    /// assert_eq!(Key::from_lines([&b""[..]], KeyForm::Any), Err(KeyError::Empty));
    /// let twice = [&b"k1"[..], &b"k1"[..]];
    /// assert_eq!(Key::from_lines(twice, KeyForm::Any), Err(KeyError::Multiple));
    /// ```
    ///
    /// # Errors
    ///
    /// [`KeyError::Multiple`] for more than one line, also of equal values; else as
    /// [`parse`](Self::parse).
    pub fn from_lines<'v>(
        lines: impl IntoIterator<Item = &'v [u8]>,
        form: KeyForm,
    ) -> Result<Option<Self>, KeyError> {
        let mut lines = lines.into_iter();
        let Some(line) = lines.next() else { return Ok(None) };
        if lines.next().is_some() {
            return Err(KeyError::Multiple);
        }
        Self::parse(line, form).map(Some)
    }
}

fn bare(value: &[u8]) -> Result<Key, KeyError> {
    // Without a way out in between, so that many bytes are looked at in one step.
    let is_bad = |byte: u8| !matches!(byte, 0x21..=0x7e) | (byte == b'"') | (byte == b',');
    if value.iter().fold(false, |bad, &byte| bad | is_bad(byte)) {
        for (at, &byte) in value.iter().enumerate() {
            match byte {
                b'"' => return Err(KeyError::Unbalanced),
                b',' => return Err(KeyError::List),
                0x21..=0x7e => {}
                _ => return Err(KeyError::BadByte { at, byte }),
            }
        }
    }
    Key::new(value)
}

/// A bare list is first of all a list, whatever the form.
fn not_quoted(value: &[u8]) -> KeyError {
    match bare(value) {
        Err(KeyError::List) => KeyError::List,
        _ => KeyError::NotQuoted,
    }
}

/// `value` begins with a quote.
fn quoted(value: &[u8]) -> Result<Key, KeyError> {
    let mut string = None;
    match Parser::new(value).parse_item_with_visitor(Item(&mut string)) {
        Ok(()) => string.ok_or(KeyError::Unbalanced).and_then(|key| Key::new(key.as_str())),
        // The error is opaque but for the offset where reading stopped. If the string had been
        // read, it is in what follows; else in the string, where a printable byte can only be
        // wrong after a backslash.
        Err(error) => Err(match error.index().and_then(|at| Some((at, *value.get(at)?))) {
            Some((_, b',')) if string.is_some() => KeyError::List,
            _ if string.is_some() => KeyError::Trailing,
            None => KeyError::Unbalanced,
            Some((_, 0x20..=0x7e)) => KeyError::BadEscape,
            Some((at, byte)) => KeyError::BadByte { at, byte },
        }),
    }
}

/// Takes the string, as soon as it is read, and ignores the parameters.
struct Item<'s, 'v>(&'s mut Option<Cow<'v, StringRef>>);

impl<'v> ItemVisitor<'v> for Item<'_, 'v> {
    type Out = ();
    type Error = Infallible;

    fn bare_item(
        self,
        item: BareItemFromInput<'v>,
    ) -> Result<impl ParameterVisitor<'v, Out = ()>, Infallible> {
        if let BareItemFromInput::String(string) = item {
            *self.0 = Some(string);
        }
        Ok(Ignored)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any(value: impl AsRef<[u8]>) -> Result<Key, KeyError> {
        Key::parse(value.as_ref(), KeyForm::Any)
    }

    fn strict(value: impl AsRef<[u8]>) -> Result<Key, KeyError> {
        Key::parse(value.as_ref(), KeyForm::Strict)
    }

    #[test]
    fn both_forms_name_the_same_key() {
        let key = Key::new("abc").unwrap();
        for value in ["abc", "\"abc\"", " \tabc\t ", "  \"abc\"  ", "\t\"abc\"\t"] {
            assert_eq!(any(value).as_ref(), Ok(&key), "{value:?}");
        }
        for value in ["\"abc\"", "  \"abc\" ", "\"abc\";a", "\"abc\"; a=1;b=\"x\";b=?0"] {
            assert_eq!(strict(value).as_ref(), Ok(&key), "{value:?}");
        }
    }

    #[test]
    fn well_formed_parameters_are_ignored() {
        // One of each kind in RFC 9651, 3.3; keys as in 3.1.2.
        for good in [
            "a=1",
            "a=-1",
            "a=1.5",
            "a=\"x,\\\"y\"",
            "a=tok/en",
            "*",
            "a-_.*9=*t",
            "a=:aGk=:",
            "a=?1",
            "a=@1659578233",
            "a=%\"f%c3%bc\"",
            "a;  b; a=2",
        ] {
            assert_eq!(any(format!("\"k\";{good}")), Key::new("k"), "{good}");
        }
        for bad in
            ["", "A=1", "a=", "a =1", "a= 1", "1", "a=1.2345", "a=\"x", "a=?2", "a=(1)", "a;;b"]
        {
            assert_eq!(any(format!("\"k\";{bad}")), Err(KeyError::Trailing), "{bad}");
        }
    }

    #[test]
    fn each_fault_has_its_name() {
        use KeyError::*;
        let long = "x".repeat(256);
        for (value, error) in [
            ("", Empty),
            ("\"\"", Empty),
            ("  \t", Blank),
            ("\"  \"", Blank),
            (&long, TooLong { len: 256 }),
            (&format!("\"{long}\""), TooLong { len: 256 }),
            ("k1,k1", List),
            ("k1, k2", List),
            (",", List),
            ("k1,", List),
            ("\"a\", \"b\"", List),
            ("\"a\",\"a\"", List),
            ("\"a\" , b", List),
            ("\"a\";v=1, \"b\"", List),
            ("\"a", Unbalanced),
            ("\"", Unbalanced),
            ("a\"", Unbalanced),
            ("a\"b\"", Unbalanced),
            ("\"a\\\"", Unbalanced),
            ("\"a\\", Unbalanced),
            ("\"a\\n\"", BadEscape),
            ("\"\\ \"", BadEscape),
            ("\"a\\,b\"", BadEscape),
            ("\"a\"b", Trailing),
            ("\"a\" \"b\"", Trailing),
            ("\"a\"\"b\"", Trailing),
            ("\"a\";", Trailing),
            ("\"a\" ;v", Trailing),
            ("k 1", BadByte { at: 1, byte: b' ' }),
            (" k\t1", BadByte { at: 2, byte: b'\t' }),
            (" \"k\x7f\"", BadByte { at: 3, byte: 0x7f }),
            ("\"k\t\"", BadByte { at: 2, byte: b'\t' }),
            ("k\u{e9}", BadByte { at: 1, byte: 0xc3 }),
            ("\"k\u{e9}\"", BadByte { at: 2, byte: 0xc3 }),
            ("\0", BadByte { at: 0, byte: 0 }),
        ] {
            assert_eq!(any(value), Err(error), "{value:?}");
        }
        assert_eq!(strict("abc"), Err(NotQuoted));
        assert_eq!(strict("k1, k2"), Err(List));
        assert_eq!(strict(""), Err(Empty));
    }

    #[test]
    fn length_counts_decoded_characters() {
        let quotes = Key::new([b'"'; 255]).unwrap();
        assert_eq!(strict(quotes.to_field_value()), Ok(quotes));
    }

    #[test]
    fn one_line_only() {
        let lines = |lines: &[&'static str]| {
            Key::from_lines(lines.iter().map(|line| line.as_bytes()), KeyForm::Any)
        };
        assert_eq!(lines(&[]), Ok(None));
        assert_eq!(lines(&["k"]), Ok(Key::new("k").ok()));
        assert_eq!(lines(&[""]), Err(KeyError::Empty));
        assert_eq!(lines(&["k", "k"]), Err(KeyError::Multiple));
        assert_eq!(lines(&["k", ""]), Err(KeyError::Multiple));
    }

    /// 1. What `to_field_value` writes is read back, in both modes, with blanks around it.
    /// 2. A bare key, its quoted form and that form with parameters name one key; strict mode
    ///    refuses the bare one and nothing else.
    /// 3. Any value is read as a key that reads back, or refused; never a panic.
    /// 4. The same for values made of the bytes that matter, which random ones seldom are.
    mod properties {
        use super::*;

        proptest! {
            #[test]
            fn field_value_round_trips(
                text in "[ -~]{1,255}", before in "[ \t]{0,3}", after in "[ \t]{0,3}",
            ) {
                prop_assume!(text.bytes().any(|byte| byte != b' '));
                let key = Key::new(&text).unwrap();
                let value = format!("{before}{}{after}", key.to_field_value());
                prop_assert_eq!(any(&value), Ok(key.clone()));
                prop_assert_eq!(strict(&value), Ok(key));
            }

            #[test]
            fn forms_agree(text in "[!#-+\\--~]{1,255}") {
                let key = any(&text).unwrap();
                prop_assert_eq!(key.as_str(), &text);
                prop_assert_eq!(any(key.to_field_value()), Ok(key.clone()));
                let more = format!("{}; a=1.5;b", key.to_field_value());
                prop_assert_eq!(strict(more), Ok(key));
                prop_assert_eq!(strict(&text), Err(KeyError::NotQuoted));
            }

            #[test]
            fn any_bytes(value in prop::collection::vec(any_byte(), 0..400)) {
                sound(&value)?;
            }

            #[test]
            fn telling_bytes(
                value in prop::collection::vec(
                    prop::sample::select(&b"\"\"\\,; a=:?@%1\t\x7f\x80"[..]),
                    0..24,
                ),
            ) {
                sound(&value)?;
            }
        }

        fn any_byte() -> impl Strategy<Value = u8> {
            proptest::arbitrary::any::<u8>()
        }

        fn sound(value: &[u8]) -> Result<(), TestCaseError> {
            let read = any(value);
            if let Ok(key) = &read {
                prop_assert_eq!(strict(key.to_field_value()), Ok(key.clone()));
            }
            match strict(value) {
                Err(KeyError::NotQuoted) => {}
                other => prop_assert_eq!(read, other),
            }
            Ok(())
        }
    }
}
