//! JSON in canonical form (RFC 8785), but for numbers, which keep their literal text.
//!
//! Members are ordered by the UTF-16 code units of their names, white space goes, strings are
//! written in one way. Numbers are not read: RFC 8785 would have 1, 1.0 and 1e0 as one, and cut
//! integers above 2^53, while a handler may tell them apart.
//!
//! Each level is read by itself and hands its values on as unread text, so that the time is at most
//! the length times [`MAX_DEPTH`], and the stack as deep as that.

use std::fmt;

use serde_core::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Deserializer, value::RawValue};

/// How deep arrays and objects may nest. Deeper ones are compared byte for byte.
const MAX_DEPTH: usize = 32;

/// The canonical form, or `None` for what has none: no JSON, nested too deeply, a member twice (on
/// whose meaning parsers differ), half a surrogate pair.
pub(crate) fn canonical(body: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(body).ok()?;
    let value: &RawValue = serde_json::from_str(text).ok()?;
    let mut out = Vec::with_capacity(text.len());
    write(value, MAX_DEPTH, &mut out)?;
    Some(out)
}

/// `depth` is how many levels may still be opened.
fn write(value: &RawValue, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    let text = value.get().trim_ascii();
    match text.as_bytes().first()? {
        b'{' | b'[' => {
            let level = Level { depth: depth.checked_sub(1)?, out };
            level.deserialize(&mut Deserializer::from_str(text)).ok()
        }
        b'"' => write_string(&serde_json::from_str::<String>(text).ok()?, out),
        _ => {
            out.extend_from_slice(text.as_bytes());
            Some(())
        }
    }
}

/// `serde_json` escapes as RFC 8785 does: `\b \t \n \f \r \" \\`, `\u00xx` for the other controls.
fn write_string(string: &str, out: &mut Vec<u8>) -> Option<()> {
    serde_json::to_writer(out, string).ok()
}

/// Reads one array or object and writes its canonical form.
struct Level<'o> {
    depth: usize,
    out: &'o mut Vec<u8>,
}

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = ();

    fn deserialize<D: serde_core::Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        self.out.push(b'[');
        let mut is_first = true;
        while let Some(element) = elements.next_element::<&RawValue>()? {
            if !std::mem::take(&mut is_first) {
                self.out.push(b',');
            }
            write(element, self.depth, self.out).ok_or_else(no_form)?;
        }
        self.out.push(b']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut sorted: Vec<(String, &RawValue)> = Vec::new();
        while let Some(member) = members.next_entry()? {
            sorted.push(member);
        }
        sorted.sort_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
        if sorted.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err(no_form());
        }
        self.out.push(b'{');
        for (nth, (name, value)) in sorted.into_iter().enumerate() {
            if nth > 0 {
                self.out.push(b',');
            }
            write_string(&name, self.out).ok_or_else(no_form)?;
            self.out.push(b':');
            write(value, self.depth, self.out).ok_or_else(no_form)?;
        }
        self.out.push(b'}');
        Ok(())
    }
}

fn no_form<E: serde_core::de::Error>() -> E {
    E::custom("no canonical form")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<String> {
        canonical(text.as_bytes()).map(|form| String::from_utf8(form).unwrap())
    }

    #[test]
    fn r4_order_space_and_escapes_are_folded_and_numbers_are_not() {
        let form = of(" {\"b\" : [ 1.0 , 1e0,-0, 12345678901234567890123 ] ,\t\"a\":{ },\
                       \"\\u00e4\\/\\u001f\\n\":[ null ,true, false,\"\\ud83d\\ude00\"]}\n");
        let expected = "{\"a\":{},\"b\":[1.0,1e0,-0,12345678901234567890123],\
                        \"\u{e4}/\\u001f\\n\":[null,true,false,\"\u{1f600}\"]}";
        assert_eq!(form.as_deref(), Some(expected));
        assert_eq!(of(" 7 ").as_deref(), Some("7"));
        assert_eq!(of("[]").as_deref(), Some("[]"));
    }

    #[test]
    fn r4_members_are_ordered_by_utf_16() {
        // U+FB33 is above the surrogates of U+1F600.
        let form = of("{\"\u{fb33}\":1,\"\u{1f600}\":2,\"1\":3,\"\\r\":4}");
        assert_eq!(form.unwrap(), "{\"\\r\":4,\"1\":3,\"\u{1f600}\":2,\"\u{fb33}\":1}");
    }

    #[test]
    fn r4_what_has_no_canonical_form() {
        for text in [
            "",
            "{",
            "[1,]",
            "nul",
            "01",
            "{} {}",
            "\"\\ud800\"",
            "{\"a\":1,\"\\u0061\":2}",
            "\u{feff}{}",
        ] {
            assert_eq!(of(text), None, "{text:?}");
        }
        assert_eq!(canonical(b"\"\xff\""), None);
        let nested = |depth| "[".repeat(depth) + &"]".repeat(depth);
        assert_eq!(of(&nested(MAX_DEPTH)).unwrap(), nested(MAX_DEPTH));
        assert_eq!(of(&nested(MAX_DEPTH + 1)), None);
        assert_eq!(of(&nested(500_000)), None);
    }

    proptest::proptest! {
        /// The form says the same as the text, and is its own form.
        #[test]
        fn r4_canonical_is_idempotent_and_keeps_the_value(text in json()) {
            let form = of(&text).unwrap();
            proptest::prop_assert_eq!(of(&form), Some(form.clone()));
            let (a, b): (serde_json::Value, serde_json::Value) =
                (serde_json::from_str(&text).unwrap(), serde_json::from_str(&form).unwrap());
            proptest::prop_assert_eq!(a, b);
        }
    }

    fn json() -> impl proptest::strategy::Strategy<Value = String> {
        use proptest::prelude::*;
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(serde_json::Value::from),
            any::<i64>().prop_map(serde_json::Value::from),
            any::<String>().prop_map(serde_json::Value::from),
        ];
        leaf.prop_recursive(5, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(serde_json::Value::from),
                prop::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
        .prop_map(|value| serde_json::to_string_pretty(&value).unwrap())
    }
}
