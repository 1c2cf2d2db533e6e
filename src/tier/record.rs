//! A record of a tier that keeps no columns, as bytes, and what each verb makes of it.
//!
//! Ground rules: pure. Time comes in, in milliseconds of the tier's own clock, and so does whether
//! the owner beats. A tier that works on these holds its lock from reading a record to writing it.
//!
//! ```text
//! version u8 = 1 | kind u8 | owner u64 | number u64 | scheme 8 | digest 32 | since u64 | due u64 |
//! end u64 | checkpoint: present u8, length u32, bytes | outcome: as `Outcome::to_bytes`, the rest
//! ```
//!
//! All numbers are big endian. `since` is the time of the claim or of the settlement, `due` the end
//! of `max_run`.

use std::time::Duration;

use bytes::Bytes;

use super::{Claimed, Found, NewClaim, State};
#[cfg(feature = "embedded")]
use crate::{DecodeError, Scheme};
use crate::{Fingerprint, Outcome, Token};

#[cfg(feature = "embedded")]
/// The version that is written. Others are refused.
const VERSION: u8 = 1;

/// What a tier keeps of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) token: Token,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) kind: Kind,
    /// When it was claimed while in flight, else when it was settled.
    pub(crate) since: u64,
    /// When `max_run` is over.
    pub(crate) due: u64,
    /// When the record ends (rule 7).
    pub(crate) end: u64,
    pub(crate) checkpoint: Option<Bytes>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    InFlight,
    Held,
    Completed(Outcome),
    NotKept,
}

/// Who lives, as a record asks it.
pub(crate) struct Now {
    /// The tier's clock, in milliseconds.
    pub(crate) now: u64,
    /// Until when the record's owner beats; 0 if it does not.
    pub(crate) alive_until: u64,
}

impl Record {
    pub(crate) fn claimed(claim: &NewClaim, now: u64) -> Self {
        let due = now.saturating_add(millis(claim.max_run));
        Self {
            token: claim.token,
            fingerprint: claim.fingerprint,
            kind: Kind::InFlight,
            since: now,
            due,
            end: due.saturating_add(millis(claim.retention)),
            checkpoint: None,
        }
    }

    pub(crate) fn is_over(&self, now: u64) -> bool {
        self.end <= now
    }

    /// What a caller sees (rule 9).
    pub(crate) fn found(&self, at: &Now) -> Found {
        let (state, until) = match &self.kind {
            Kind::InFlight if at.alive_until <= at.now => (State::Lapsed, self.end),
            Kind::InFlight if self.due <= at.now => (State::Held, self.end),
            Kind::InFlight => (State::InFlight, self.due.min(at.alive_until)),
            Kind::Held => (State::Held, self.end),
            Kind::Completed(outcome) => (State::Completed(outcome.clone()), self.end),
            Kind::NotKept => (State::NotKept, self.end),
        };
        Found {
            fingerprint: self.fingerprint,
            token: self.token,
            state,
            age: Duration::from_millis(at.now.saturating_sub(self.since)),
            remaining: Duration::from_millis(until.saturating_sub(at.now)),
        }
    }

    /// What a claim meets here (rules 2 and 3).
    pub(crate) fn meet(&self, claim: &NewClaim, at: &Now) -> Claimed {
        if self.token == claim.token && self.kind == Kind::InFlight {
            return Claimed::Won { checkpoint: self.checkpoint.clone() };
        }
        Claimed::Met(self.found(at))
    }

    /// The record that a takeover leaves, if it may (rule 4).
    pub(crate) fn taken_over(&self, seen: Token, claim: &NewClaim, at: &Now) -> Option<Self> {
        let is_dead = matches!(self.found(at).state, State::Lapsed | State::Held);
        (self.token == seen && is_dead)
            .then(|| Self { checkpoint: self.checkpoint.clone(), ..Self::claimed(claim, at.now) })
    }

    /// As if its owner had died: nobody's, in flight.
    pub(crate) fn lapsed(self) -> Self {
        Self { kind: Kind::InFlight, token: Token::new(0, self.token.number()), ..self }
    }

    /// Whether `token` still settles it (rule 5).
    pub(crate) fn admits(&self, token: Token) -> bool {
        self.token == token && matches!(self.kind, Kind::InFlight | Kind::Held)
    }

    /// Whether `token` has completed it already.
    pub(crate) fn was_completed_by(&self, token: Token) -> bool {
        self.token == token && matches!(self.kind, Kind::Completed(_) | Kind::NotKept)
    }

    /// Settles it.
    pub(crate) fn settle(&mut self, kind: Kind, now: u64, retention: Duration) {
        self.kind = kind;
        self.since = now;
        self.end = now.saturating_add(millis(retention));
        if !matches!(self.kind, Kind::Held) {
            self.checkpoint = None;
        }
    }

    #[cfg(feature = "embedded")]
    /// About as many bytes as [`to_bytes`](Self::to_bytes) makes.
    pub(crate) fn size(&self) -> usize {
        let outcome = match &self.kind {
            Kind::Completed(outcome) => outcome.size(),
            _ => 0,
        };
        96 + self.checkpoint.as_ref().map_or(0, Bytes::len) + outcome
    }

    #[cfg(feature = "embedded")]
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, outcome) = match &self.kind {
            Kind::InFlight => (0, None),
            Kind::Held => (1, None),
            Kind::Completed(outcome) => (2, Some(outcome)),
            Kind::NotKept => (3, None),
        };
        let mut bytes = Vec::with_capacity(96 + outcome.map_or(0, |outcome| outcome.size()));
        bytes.extend_from_slice(&[VERSION, kind]);
        bytes.extend_from_slice(&self.token.owner().to_be_bytes());
        bytes.extend_from_slice(&self.token.number().to_be_bytes());
        bytes.extend_from_slice(&self.fingerprint.scheme().id());
        bytes.extend_from_slice(self.fingerprint.digest());
        for time in [self.since, self.due, self.end] {
            bytes.extend_from_slice(&time.to_be_bytes());
        }
        let checkpoint = self.checkpoint.as_deref().unwrap_or_default();
        bytes.push(u8::from(self.checkpoint.is_some()));
        bytes.extend_from_slice(&(checkpoint.len() as u32).to_be_bytes());
        bytes.extend_from_slice(checkpoint);
        if let Some(outcome) = outcome {
            bytes.extend_from_slice(&outcome.to_bytes());
        }
        bytes
    }

    #[cfg(feature = "embedded")]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        match bytes.first() {
            Some(&VERSION) => Self::read(&bytes[1..]).ok_or(DecodeError::Damaged),
            Some(other) => Err(DecodeError::Version(*other)),
            None => Err(DecodeError::Damaged),
        }
    }

    #[cfg(feature = "embedded")]
    fn read(mut bytes: &[u8]) -> Option<Self> {
        let [kind] = *take::<1>(&mut bytes)?;
        let mut number = || Some(u64::from_be_bytes(*take::<8>(&mut bytes)?));
        let token = Token::new(number()?, number()?);
        let scheme = Scheme::from_id(*take::<8>(&mut bytes)?);
        let fingerprint = Fingerprint::from_parts(scheme, *take::<32>(&mut bytes)?);
        let mut number = || Some(u64::from_be_bytes(*take::<8>(&mut bytes)?));
        let (since, due, end) = (number()?, number()?, number()?);
        let [has_checkpoint] = *take::<1>(&mut bytes)?;
        let length = u32::from_be_bytes(*take::<4>(&mut bytes)?) as usize;
        let (checkpoint, rest) = bytes.split_at_checked(length)?;
        let checkpoint = match has_checkpoint {
            0 if length == 0 => None,
            1 => Some(Bytes::copy_from_slice(checkpoint)),
            _ => return None,
        };
        let kind = match kind {
            0 if rest.is_empty() => Kind::InFlight,
            1 if rest.is_empty() => Kind::Held,
            2 => Kind::Completed(Outcome::from_bytes(rest).ok()?),
            3 if rest.is_empty() => Kind::NotKept,
            _ => return None,
        };
        Some(Self { token, fingerprint, kind, since, due, end, checkpoint })
    }
}

#[cfg(feature = "embedded")]
fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(taken)
}

/// Rounded up, so that nothing ends early; what does not fit is clamped.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
