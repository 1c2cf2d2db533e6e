//! The key of an intent, made by whoever has the intent: at random, or derived from what names it.
//!
//! A derived key is the same on every attempt, in every process and with every version of this
//! crate, so nothing has to be stored to retry. Two different lists of parts never give one key:
//!
//! ```text
//! readable   name:part:part           each part of 0x21 to 0x7E without  " , / : \ ~
//! hashed     name~<64 hex digits>     where a part has another byte, or the whole were over 255
//! downstream <the key above>/name:part:part, or hashed
//! ```
//!
//! Why none collide: a readable part holds neither `:` nor `/`, so the last `/` and the `:` behind
//! it split a readable key back into what it was made of; only a hashed one ends in `~` and 64
//! digits behind a name; and what is hashed is framed by length, under a scheme of its own for each
//! kind ([`Fingerprint::builder`]). `tests/vectors.json` holds values that never change, and
//! `tests/vectors.mjs` makes them in another language.

use crate::fingerprint::{Fingerprint, FingerprintBuilder, Scheme};
use crate::header::{self, Key, KeyError};
use crate::identity::Identity;

/// The name of one intent, to be sent as its `Idempotency-Key` on every attempt.
///
/// Make it *before* the loop that retries, once for each thing that is to happen once. 1 to 255
/// characters, 0x21 to 0x7E without `"` and `,` if it was made here, so that it is the same key in
/// its quoted and in its bare form (R6).
///
/// ```
/// use oncekey::IntentKey;
///
/// // Derived from what names the intent: found again after a crash, nothing to store.
/// let key = IntentKey::derived("charge", ["inv_17", "2"]);
/// assert_eq!(key.as_str(), "charge:inv_17:2");
/// // Work that follows from it has a key that follows from it.
/// assert_eq!(key.downstream("receipt", ["mail"]).as_str(), "charge:inv_17:2/receipt:mail");
///
/// // Nothing names it: made once and kept until the answer has come.
/// assert_ne!(IntentKey::random(), IntentKey::random());
/// ```
///
/// For a call that a *server* makes on behalf of a request it was sent, see
/// [`Identity::downstream`]: what clients send is unique for each account alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IntentKey(Key);

impl IntentKey {
    /// A key that nobody else has: a random UUID (version 4, RFC 9562), 36 characters.
    ///
    /// Of use only if it outlives the attempts: keep it beside the intent, in a form field, a row
    /// or a message, until the answer has come.
    ///
    /// # Panics
    ///
    /// If the operating system has no random bytes to give, which on a supported one does not
    /// happen once it runs.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        #[allow(clippy::expect_used, reason = "documented; a key that is not random is worse")]
        getrandom::fill(&mut bytes).expect("random bytes from the operating system");
        Self::uuid(bytes)
    }

    /// The key that follows from a name and parts: always the same for the same, another for
    /// others.
    ///
    /// `name` says what is done, the parts to what. Take what names the *intent* (an invoice and
    /// the number of the charge that a person decided on), never what names the attempt (a time, a
    /// counter of retries). All bytes count, order counts, and an empty part is a part.
    ///
    /// ```
    /// use oncekey::IntentKey;
    ///
    /// let readable = IntentKey::derived("refund", ["ch_1", "1999"]);
    /// assert_eq!(readable.as_str(), "refund:ch_1:1999");
    /// assert_ne!(readable, IntentKey::derived("refund", ["ch_1:1999"]));
    ///
    /// // Bytes that a key may not hold, or too many: SHA-256 stands for them.
    /// let hashed = IntentKey::derived("refund", ["caf\u{e9}"]);
    /// assert!(hashed.as_str().starts_with("refund~") && hashed.as_str().len() == 71);
    /// ```
    pub fn derived<P: AsRef<[u8]>>(
        name: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = P>,
    ) -> Self {
        let hash = Fingerprint::builder(Scheme::named("key-derived-1"));
        Self::of(Some(Vec::new()), hash, name.as_ref(), parts)
    }

    /// The key of a call that follows from this intent: another service that takes idempotency keys
    /// gets the same one on every attempt.
    ///
    /// For keys that your own program has made, which are unique in all of it. A server that passes
    /// on what a client has sent takes [`Identity::downstream`].
    ///
    /// ```
    /// use oncekey::IntentKey;
    ///
    /// let order = IntentKey::derived("order", ["8812"]);
    /// assert_eq!(order.downstream("psp", ["hold"]).as_str(), "order:8812/psp:hold");
    /// assert_eq!(order.downstream::<&str>("mail", []).as_str(), "order:8812/mail");
    /// ```
    #[must_use]
    pub fn downstream<P: AsRef<[u8]>>(
        &self,
        name: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = P>,
    ) -> Self {
        let own = self.0.as_ref();
        let readable = own.iter().all(|byte| is_plain(*byte) || b":/~".contains(byte));
        let begun = readable.then(|| [own, b"/"].concat());
        let hash = Fingerprint::builder(Scheme::named("key-downstream-1")).part(own);
        Self::of(begun, hash, name.as_ref(), parts)
    }

    /// The characters of the key.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The key itself.
    pub const fn as_key(&self) -> &Key {
        &self.0
    }

    /// `begun` and the list, if all of it can be read, else the hash of the list.
    fn of<P: AsRef<[u8]>>(
        begun: Option<Vec<u8>>,
        hash: FingerprintBuilder,
        name: &[u8],
        parts: impl IntoIterator<Item = P>,
    ) -> Self {
        let mut hash = hash.part(name);
        let fits = |text: Vec<u8>| Some(text).filter(|text| text.len() <= header::MAX_KEY);
        let add = |text: Option<Vec<u8>>, part: &[u8]| {
            let mut text = text.filter(|_| part.iter().copied().all(is_plain))?;
            text.extend_from_slice(part);
            fits(text)
        };
        let mut text = add(begun, name);
        for part in parts {
            let part = part.as_ref();
            hash = hash.part(part);
            text = add(text.map(|text| [&text[..], b":"].concat()), part);
        }
        match text {
            // Not a single character: a name of none, and no parts.
            Some(text) if !text.is_empty() => Self::made(&text),
            _ => Self::hashed(name, &hash.finish()),
        }
    }

    /// RFC 9562, 5.4: 122 of these bits, and 6 that say that they are random.
    fn uuid(mut bytes: [u8; 16]) -> Self {
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let mut text = hex(&bytes);
        for at in [20, 16, 12, 8] {
            text.insert(at, b'-');
        }
        Self::made(&text)
    }

    fn hashed(name: &[u8], hash: &Fingerprint) -> Self {
        let digest = hex(hash.digest());
        let room = header::MAX_KEY - digest.len() - 1;
        let name =
            if name.len() <= room && name.iter().copied().all(is_plain) { name } else { b"" };
        Self::made(&[name, b"~", &digest].concat())
    }

    /// `text` is 1 to 255 bytes of visible ASCII.
    fn made(text: &[u8]) -> Self {
        debug_assert!(header::check(text).is_ok());
        Self(Key::made(text))
    }
}

fn hex(bytes: &[u8]) -> Vec<u8> {
    let digits = |byte: &u8| [byte >> 4, byte & 15].map(|four| b"0123456789abcdef"[four as usize]);
    bytes.iter().flat_map(digits).collect()
}

/// A byte of a part that can be read: it means nothing in a key, and needs no quotes.
const fn is_plain(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e) && !matches!(byte, b'"' | b',' | b'/' | b':' | b'\\' | b'~')
}

impl Identity<'_> {
    /// The key of a call that a server makes to do what it was asked for, from the account, the
    /// endpoint and the key of the request that it is working on.
    ///
    /// The other service knows your server as one caller. Two of your accounts may well have chosen
    /// one key, such as `order-1`; passed on as it is, the second would get the answer of the
    /// first. So this key stands for all three, hashed: `name~` and 64 hexadecimal digits.
    ///
    /// ```
    /// use oncekey::Identity;
    ///
    /// let acme = Identity::new("acme", "POST /charges", "order-1")?;
    /// let other = Identity::new("other", "POST /charges", "order-1")?;
    /// assert_ne!(acme.downstream("psp", ["capture"]), other.downstream("psp", ["capture"]));
    /// assert!(acme.downstream("psp", ["capture"]).as_str().starts_with("psp~"));
    /// # Ok::<(), oncekey::IdentityError>(())
    /// ```
    pub fn downstream<P: AsRef<[u8]>>(
        &self,
        name: impl AsRef<[u8]>,
        parts: impl IntoIterator<Item = P>,
    ) -> IntentKey {
        let hash = Fingerprint::builder(Scheme::named("key-identity-1"))
            .part(self.account())
            .part(self.endpoint())
            .part(self.key());
        IntentKey::of(None, hash, name.as_ref(), parts)
    }
}

/// A key that was made elsewhere, or kept since an earlier attempt.
impl From<Key> for IntentKey {
    fn from(key: Key) -> Self {
        Self(key)
    }
}

impl From<IntentKey> for Key {
    fn from(key: IntentKey) -> Self {
        key.0
    }
}

impl std::str::FromStr for IntentKey {
    type Err = KeyError;

    fn from_str(characters: &str) -> Result<Self, KeyError> {
        Key::new(characters).map(Self)
    }
}

impl AsRef<[u8]> for IntentKey {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn hash_of(scheme: &str, parts: &[&[u8]]) -> String {
        let mut builder = Fingerprint::builder(Scheme::named(scheme));
        for part in parts {
            builder = builder.part(part);
        }
        builder.finish().digest().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_key_is_readable_up_to_255_characters_and_hashed_from_there() {
        let longest = "x".repeat(250);
        assert_eq!(IntentKey::derived("name", [&longest]).as_str(), format!("name:{longest}"));
        let longer = "x".repeat(251);
        let hash = hash_of("key-derived-1", &[b"name", longer.as_bytes()]);
        assert_eq!(IntentKey::derived("name", [&longer]).as_str(), format!("name~{hash}"));
        for (len, shown) in [(190, 190), (191, 0)] {
            let name = "n".repeat(len);
            let key = IntentKey::derived(&name, ["\n"]);
            assert_eq!(key.as_str().len(), shown + 65);
        }
    }

    #[test]
    fn a_byte_that_means_something_in_a_key_is_hashed() {
        for byte in 0..=255 {
            let part = [b'a', byte];
            let hash = hash_of("key-derived-1", &[b"n", &part]);
            let found = IntentKey::derived("n", [part]);
            match byte {
                0..=0x20 | 0x7f.. | b'"' | b',' | b'/' | b':' | b'\\' | b'~' => {
                    assert_eq!(found.as_str(), format!("n~{hash}"));
                }
                _ => assert_eq!(found.as_str(), format!("n:a{}", char::from(byte))),
            }
        }
    }

    #[test]
    fn a_key_from_elsewhere_has_downstream_keys_too() {
        let own: IntentKey = "no 1".parse().unwrap();
        let hash = hash_of("key-downstream-1", &[b"no 1", b"psp", b"x"]);
        assert_eq!(own.downstream("psp", ["x"]).as_str(), format!("psp~{hash}"));
        let deep = (0..100).fold(own, |key, _| key.downstream("again", ["and again"]));
        assert!(deep.as_str().len() <= 255);
        assert_eq!("".parse::<IntentKey>(), Err(KeyError::Empty));
    }

    #[test]
    fn a_random_key_is_a_uuid_of_version_4() {
        let of = |byte| IntentKey::uuid([byte; 16]);
        assert_eq!(of(0).as_str(), "00000000-0000-4000-8000-000000000000");
        assert_eq!(of(0xff).as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(of(0xa5).as_str(), "a5a5a5a5-a5a5-45a5-a5a5-a5a5a5a5a5a5");
        let keys: Vec<_> = (0..100).map(|_| IntentKey::random()).collect();
        assert!(keys.iter().all(|key| key.as_str().as_bytes()[14] == b'4'));
        let different: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(different.len(), 100);
    }

    #[test]
    fn debug_shows_the_length_only() {
        assert_eq!(
            format!("{:?}", IntentKey::derived("a", ["secret"])),
            "IntentKey(Key(8 characters))"
        );
    }

    #[test]
    fn lists_that_are_nearly_alike_have_keys_of_their_own() {
        const NONE: [&str; 0] = [];
        let of = |name: &str, parts: &[&str]| IntentKey::derived(name, parts);
        let keys = [
            of("a", &[]),
            of("a", &[""]),
            of("", &["a"]),
            of("a", &["b", "c"]),
            of("a", &["b:c"]),
            of("a:b", &["c"]),
            of("a", &["b"]),
            of("a", &["b", ""]),
            of("a", &["", "b"]),
            of("a", &["b/c"]),
            of("a/b", &["c"]),
            of("a/b:c", &[]),
            of("a", &["b"]).downstream("c", NONE),
            of("a", &[]).downstream("b", ["c"]),
            of("a", &[]).downstream("b:c", NONE),
            of("a", &[]).downstream("b/c", NONE),
            of("a", &[]).downstream("", NONE),
            of("a/", &[]),
            of("a", &["\n"]),
            of(of("a", &["\n"]).as_str(), &[]),
        ];
        let apart: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(apart.len(), keys.len(), "{keys:?}");
    }

    /// What a key is made of, in all three ways.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    enum Made {
        Derived(Vec<Vec<u8>>),
        Downstream(Box<Made>, Vec<Vec<u8>>),
        Identity(Vec<u8>, Vec<u8>, Box<Made>, Vec<Vec<u8>>),
    }

    impl Made {
        fn key(&self) -> IntentKey {
            match self {
                Self::Derived(list) => IntentKey::derived(&list[0], &list[1..]),
                Self::Downstream(from, list) => from.key().downstream(&list[0], &list[1..]),
                Self::Identity(account, endpoint, from, list) => {
                    let key = from.key();
                    let identity = Identity::new(account, endpoint, &key).unwrap();
                    identity.downstream(&list[0], &list[1..])
                }
            }
        }
    }

    /// Short, and of what means something in a key, so that lists are nearly alike.
    fn part() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            8 => prop::collection::vec(prop::sample::select(&b"a:/~"[..]), 0..4),
            // What is hashed, and what that looks like, as a part.
            1 => Just(b"\0".to_vec()),
            1 => Just(IntentKey::derived("", ["\0"]).as_str().as_bytes().to_vec()),
            1 => prop::collection::vec(prop::sample::select(&b" \\\",\xff"[..]), 1..3),
            1 => (120_usize..130).prop_map(|len| vec![b'a'; len]),
        ]
    }

    fn made() -> impl Strategy<Value = Made> {
        let list = || prop::collection::vec(part(), 1..5);
        let derived = list().prop_map(Made::Derived);
        derived.prop_recursive(3, 8, 2, move |inner| {
            let inner = inner.prop_map(Box::new);
            prop_oneof![
                (inner.clone(), list()).prop_map(|(from, list)| Made::Downstream(from, list)),
                (part(), part(), inner, list()).prop_map(|(a, e, k, l)| Made::Identity(a, e, k, l)),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1))]
        // 1. Whatever the parts, it is a key, and the same one again.
        // 2. It needs no quotes.
        // 3. Of two thousand nearly equal lists no two different ones give one key.
        #[test]
        fn no_two_lists_give_one_key(all in prop::collection::vec(made(), 2_000)) {
            let mut seen: HashMap<String, Made> = HashMap::new();
            for made in all {
                let key = made.key();
                prop_assert_eq!(header::check(key.as_ref()), Ok(()));
                prop_assert_eq!(&key, &made.key());
                prop_assert!(!key.as_str().contains([' ', '"', ',', '\\']));
                if let Some(other) = seen.insert(key.as_str().to_owned(), made.clone()) {
                    prop_assert_eq!(made, other);
                }
            }
        }
    }
}
