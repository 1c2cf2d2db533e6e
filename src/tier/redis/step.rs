//! The steps as scripts, the names of their keys, and what they answer.
//!
//! ```text
//! PREFIX:{SHARD}:r:FRAME    a record: a hash. FRAME is the framed identity, byte for byte (R1)
//! PREFIX:{SHARD}:owners     when each owner's lease ends: a sorted set, a row for each process start
//! PREFIX:{SHARD}:recalls    what was forgotten or resolved lately: a sorted set
//! PREFIX:{SHARD}:g:TOKEN    the claim of this token was given up before it was answered
//! ```
//!
//! What stands in braces decides about a key's slot, so all keys of a shard are in one slot. A single
//! server has one shard.

use std::time::Duration;

use ::redis::{Cmd, Value};
use bytes::Bytes;

use crate::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{Found, State, TierError},
};

/// The longest span that is passed on; nothing waits for it to pass.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

/// A step: a Lua script.
pub(super) struct Script {
    code: String,
    sha: String,
    /// Whether doing it twice is as good as doing it once, to the answer too.
    pub(super) may_repeat: bool,
    /// Whether replicas must have what it left or saw, where that is asked for.
    pub(super) is_replicated: bool,
}

pub(super) struct Scripts {
    pub(super) claim: Script,
    pub(super) settle: Script,
    pub(super) release: Script,
    pub(super) lapse: Script,
    pub(super) checkpoint: Script,
    pub(super) look_up: Script,
    pub(super) forget: Script,
    pub(super) resolve: Script,
    pub(super) wait: Script,
    pub(super) beat: Script,
    pub(super) recalls: Script,
    pub(super) probe: Script,
}

impl Scripts {
    pub(super) fn new() -> Self {
        /// Of the steps on one record, and how they begin.
        fn step(text: &str) -> Script {
            Script::new(format!("{}\n{text}", include_str!("step.lua")))
        }
        Self {
            claim: step(include_str!("claim.lua")),
            settle: step(include_str!("settle.lua")),
            release: Script { may_repeat: false, ..step(include_str!("release.lua")) },
            lapse: Script { may_repeat: false, ..step(include_str!("lapse.lua")) },
            checkpoint: step(include_str!("checkpoint.lua")),
            look_up: step(include_str!("look_up.lua")),
            forget: Script { may_repeat: false, ..step(include_str!("forget.lua")) },
            resolve: Script { may_repeat: false, ..step(include_str!("resolve.lua")) },
            wait: Script { is_replicated: false, ..step(include_str!("wait.lua")) },
            beat: Script::new(include_str!("beat.lua").to_owned()),
            recalls: Script {
                is_replicated: false,
                ..Script::new(include_str!("recalls.lua").to_owned())
            },
            probe: Script::new(include_str!("probe.lua").to_owned()),
        }
    }
}

impl Script {
    fn new(code: String) -> Self {
        let sha = ::redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha, may_repeat: true, is_replicated: true }
    }

    /// The command that runs it, by its hash if the server knows it.
    pub(super) fn command(&self, is_known: bool, keys: &[Vec<u8>], args: &[&[u8]]) -> Cmd {
        let mut command = ::redis::cmd(if is_known { "EVALSHA" } else { "EVAL" });
        command.arg(if is_known { &self.sha } else { &self.code });
        command.arg(keys.len());
        for key in keys {
            command.arg(key.as_slice());
        }
        for arg in args {
            command.arg(*arg);
        }
        command
    }
}

/// Under which names things are kept.
pub(super) struct Names {
    pub(super) prefix: String,
    /// 1, or [`SHARDS`].
    pub(super) shards: u64,
}

impl Names {
    fn of_shard(&self, shard: u64, what: &str) -> Vec<u8> {
        format!("{}:{{{shard}}}:{what}", self.prefix).into_bytes()
    }

    pub(super) fn owners(&self, shard: u64) -> Vec<u8> {
        self.of_shard(shard, "owners")
    }

    pub(super) fn recalls(&self, shard: u64) -> Vec<u8> {
        self.of_shard(shard, "recalls")
    }

    /// The keys of each step on a record: itself, its shard's owners, its shard's recalls.
    pub(super) fn of(&self, id: Identity<'_>) -> (u64, Vec<Vec<u8>>) {
        let frame = id.frame();
        let shard = hash(&frame) % self.shards;
        let mut record = self.of_shard(shard, "r:");
        record.extend_from_slice(&frame);
        (shard, vec![record, self.owners(shard), self.recalls(shard)])
    }

    /// As [`of`](Self::of), and the note that the claim of `token` was given up.
    pub(super) fn of_claim(&self, id: Identity<'_>, token: Token) -> Vec<Vec<u8>> {
        let (shard, mut keys) = self.of(id);
        keys.push(self.of_shard(shard, &format!("g:{token}")));
        keys
    }

    /// The identity of a record by its name.
    pub(super) fn identity<'a>(&self, shard: u64, record: &'a [u8]) -> Option<Identity<'a>> {
        record.strip_prefix(self.of_shard(shard, "r:").as_slice()).map(Identity::from_frame)
    }

    /// Two keys that are nobody's.
    pub(super) fn of_probe(&self) -> Vec<Vec<u8>> {
        vec![self.of_shard(0, "probe"), self.of_shard(0, "probe-set")]
    }
}

/// FNV-1a, and the last step of MurmurHash3, by which each byte counts for each bit. It decides where a
/// record is, so it is the same in all versions of this crate.
fn hash(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// A span as an argument. None is zero: the server would drop the key.
pub(super) fn millis(span: Duration) -> String {
    span.min(LONGEST).as_nanos().div_ceil(1_000_000).max(1).to_string()
}

/// A fingerprint as an argument: its scheme, its digest.
pub(super) fn fingerprint(fingerprint: &Fingerprint) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(&fingerprint.scheme().id());
    bytes[8..].copy_from_slice(fingerprint.digest());
    bytes
}

/// What a step answered: a word, and what belongs to it.
pub(super) struct Answer {
    pub(super) word: String,
    rest: std::vec::IntoIter<Value>,
}

impl Answer {
    pub(super) fn of(values: Vec<Value>) -> Result<Self, TierError> {
        let mut rest = values.into_iter();
        let word = text(rest.next()).ok_or_else(|| strange("an answer without a word"))?;
        Ok(Self { word, rest })
    }

    pub(super) fn number(&mut self) -> Result<u64, TierError> {
        match self.rest.next() {
            // The clock of the server was set back.
            Some(Value::Int(number)) => Ok(u64::try_from(number).unwrap_or(0)),
            other => Err(strange(format!("no number: {other:?}"))),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<Option<Bytes>, TierError> {
        match self.rest.next() {
            Some(Value::BulkString(bytes)) => Ok(Some(bytes.into())),
            None | Some(Value::Nil) => Ok(None),
            other => Err(strange(format!("no bytes: {other:?}"))),
        }
    }

    pub(super) fn list(&mut self) -> Vec<Value> {
        match self.rest.next() {
            Some(Value::Array(values)) => values,
            _ => Vec::new(),
        }
    }

    /// A record that stands inside of this answer, if one does.
    pub(super) fn inner(&mut self) -> Result<Option<Found>, TierError> {
        match self.rest.next() {
            Some(Value::Array(values)) => Self::of(values)?.found().map(Some),
            None | Some(Value::Nil) => Ok(None),
            other => Err(strange(format!("no record: {other:?}"))),
        }
    }

    /// The record that this answer tells of.
    pub(super) fn found(mut self) -> Result<Found, TierError> {
        if self.word != "found" {
            return Err(self.unexpected());
        }
        let state = text(self.rest.next());
        let token = text(self.rest.next());
        let token = token.as_deref().and_then(token_of).ok_or_else(|| strange("no token"))?;
        let fingerprint = self.bytes()?.as_deref().and_then(fingerprint_of);
        let fingerprint = fingerprint.ok_or_else(|| strange("no fingerprint"))?;
        let age = Duration::from_millis(self.number()?);
        let remaining = Duration::from_millis(self.number()?);
        let state = match state.as_deref() {
            Some("in-flight") => State::InFlight,
            Some("lapsed") => State::Lapsed,
            Some("held") => State::Held,
            Some("not-kept") => State::NotKept,
            Some("completed") => {
                let outcome = self.bytes()?.ok_or_else(|| strange("no outcome"))?;
                State::Completed(Outcome::from_bytes(&outcome).map_err(TierError::unusable)?)
            }
            other => return Err(strange(format!("no state: {other:?}"))),
        };
        Ok(Found { fingerprint, token, state, age, remaining })
    }

    /// The error that an answer is which the verb does not know.
    pub(super) fn unexpected(mut self) -> TierError {
        match self.word.as_str() {
            "format" => {
                let found = text(self.rest.next()).unwrap_or_default();
                TierError::unusable(format!(
                    "a record has format {found}, but this program knows 1: it was written by a newer \
                     version of Oncekey"
                ))
            }
            word => strange(format!("the word `{word}`")),
        }
    }
}

fn strange(what: impl std::fmt::Display) -> TierError {
    TierError::unusable(format!("Redis did not answer as our scripts do: {what}"))
}

fn text(value: Option<Value>) -> Option<String> {
    match value {
        Some(Value::BulkString(bytes)) => String::from_utf8(bytes).ok(),
        Some(Value::SimpleString(text)) => Some(text),
        _ => None,
    }
}

/// A token as it displays itself.
fn token_of(text: &str) -> Option<Token> {
    let (owner, number) = text.split_once('-')?;
    Some(Token::new(u64::from_str_radix(owner, 16).ok()?, number.parse().ok()?))
}

fn fingerprint_of(bytes: &[u8]) -> Option<Fingerprint> {
    let (scheme, digest) = bytes.split_first_chunk()?;
    Some(Fingerprint::from_parts(Scheme::from_id(*scheme), digest.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a record is never changes: these were computed once, by another program.
    #[test]
    fn golden() {
        for (bytes, expected) in HASHES {
            assert_eq!(hash(bytes), *expected, "{bytes:?}");
        }
        let names = Names { prefix: "p".to_owned(), shards: 64 };
        let (shard, keys) = names.of(Identity::new("a", "e", "k").unwrap());
        let keys: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        assert_eq!(shard, SHARD);
        assert_eq!(keys[0], format!("p:{{{SHARD}}}:r:\u{1}\0\u{1}aek"));
        assert_eq!(keys[1], format!("p:{{{SHARD}}}:owners"));
        assert_eq!(keys[2], format!("p:{{{SHARD}}}:recalls"));
    }

    const HASHES: &[(&[u8], u64)] = &[
        (b"", 0xefd0_1f60_ba99_2926),
        (b"a", 0x82a2_a958_a9be_ce5b),
        (b"\x01\0\x01aek", 0x2bc8_ba5a_774a_1135),
    ];
    const SHARD: u64 = 53;
}
