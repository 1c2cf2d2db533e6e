//! What each verb makes of the record that is there: one state machine for the tiers that keep
//! records as bytes.
//!
//! Ground rules: pure. A step takes the record that is there, unless it has ended, and the time and
//! who beats at this moment; it says what is there afterwards, and the answer. A tier has the
//! record in its hands from reading it to keeping what the step says, and gives the answer only
//! when that is kept as safely as it promises.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;

use super::{
    Claimed, Forgotten, Found, Landed, NewClaim, Resolved, State, TierError,
    record::{Kind, Now, Record, millis},
};
use crate::{Outcome, Token};

/// What is there after a step.
#[derive(Debug)]
pub(crate) enum Change {
    /// What was there before.
    Keep,
    Put(Record),
    /// Nothing.
    Remove,
}

/// The moment of a step.
pub(crate) struct At<'a> {
    /// The tier's clock, in milliseconds.
    pub(crate) now: u64,
    pub(crate) owners: &'a Owners,
}

impl At<'_> {
    fn of(&self, record: &Record) -> Now {
        Now { now: self.now, alive_until: self.owners.alive_until(record.token.owner()) }
    }

    fn found(&self, record: &Record) -> Found {
        record.found(&self.of(record))
    }

    fn beats(&self, owner: u64) -> bool {
        self.owners.alive_until(owner) > self.now
    }
}

/// Until when each owner beats, for a tier whose owners end with its process (T7).
#[derive(Debug, Default)]
pub(crate) struct Owners(HashMap<u64, u64>);

impl Owners {
    pub(crate) fn beat(&mut self, owner: u64, lease: Duration, now: u64) {
        self.0.insert(owner, now.saturating_add(millis(lease)));
    }

    fn alive_until(&self, owner: u64) -> u64 {
        self.0.get(&owner).copied().unwrap_or(0)
    }

    /// Forgets those that do not beat; a late heartbeat brings them back.
    pub(crate) fn reap(&mut self, now: u64) {
        self.0.retain(|_, alive_until| *alive_until > now);
    }
}

type Claiming = (Change, Result<Claimed, TierError>);

fn won(record: Record) -> Claiming {
    let checkpoint = record.checkpoint.clone();
    (Change::Put(record), Ok(Claimed::Won { checkpoint }))
}

pub(crate) fn claim(found: Option<Record>, claim: &NewClaim, at: &At<'_>) -> Claiming {
    match found {
        Some(record) => (Change::Keep, Ok(record.meet(claim, &at.of(&record)))),
        None if at.beats(claim.token.owner()) => won(Record::claimed(claim, at.now)),
        None => (Change::Keep, Err(TierError::OwnerLapsed)),
    }
}

pub(crate) fn take_over(
    found: Option<Record>,
    seen: Token,
    claim: &NewClaim,
    at: &At<'_>,
) -> Claiming {
    if !at.beats(claim.token.owner()) {
        return (Change::Keep, Err(TierError::OwnerLapsed));
    }
    let Some(record) = found else { return won(Record::claimed(claim, at.now)) };
    match record.taken_over(seen, claim, &at.of(&record)) {
        Some(taken) => won(taken),
        None => (Change::Keep, Ok(record.meet(claim, &at.of(&record)))),
    }
}

/// A step that needs the token of an open claim (rule 5).
fn with_token(
    found: Option<Record>,
    token: Token,
    at: &At<'_>,
    step: impl FnOnce(Record) -> Change,
) -> (Change, Landed) {
    match found {
        Some(record) if record.admits(token) => (step(record), Landed::Done),
        found => (Change::Keep, Landed::Lost(found.map(|record| at.found(&record)))),
    }
}

pub(crate) fn complete(
    found: Option<Record>,
    token: Token,
    outcome: Option<&Outcome>,
    retention: Duration,
    at: &At<'_>,
) -> (Change, Landed) {
    if found.as_ref().is_some_and(|record| record.was_completed_by(token)) {
        return (Change::Keep, Landed::Done);
    }
    let kind = outcome.map_or(Kind::NotKept, |outcome| Kind::Completed(outcome.clone()));
    with_token(found, token, at, |mut record| {
        record.settle(kind, at.now, retention);
        Change::Put(record)
    })
}

pub(crate) fn release(found: Option<Record>, token: Token, at: &At<'_>) -> (Change, Landed) {
    with_token(found, token, at, |_| Change::Remove)
}

pub(crate) fn lapse(found: Option<Record>, token: Token, at: &At<'_>) -> (Change, Landed) {
    with_token(found, token, at, |record| Change::Put(record.lapsed()))
}

pub(crate) fn hold(
    found: Option<Record>,
    token: Token,
    retention: Duration,
    at: &At<'_>,
) -> (Change, Landed) {
    with_token(found, token, at, |mut record| {
        record.settle(Kind::Held, at.now, retention);
        Change::Put(record)
    })
}

pub(crate) fn checkpoint(
    found: Option<Record>,
    token: Token,
    bytes: Bytes,
    at: &At<'_>,
) -> (Change, Landed) {
    with_token(found, token, at, |record| Change::Put(Record { checkpoint: Some(bytes), ..record }))
}

pub(crate) fn look_up(found: Option<Record>, at: &At<'_>) -> (Change, Option<Found>) {
    (Change::Keep, found.map(|record| at.found(&record)))
}

pub(crate) fn forget(found: Option<Record>, forced: bool, at: &At<'_>) -> (Change, Forgotten) {
    match found {
        None => (Change::Keep, Forgotten::Absent),
        Some(record) if !forced && at.found(&record).state == State::InFlight => {
            (Change::Keep, Forgotten::Busy)
        }
        Some(_) => (Change::Remove, Forgotten::Gone),
    }
}

pub(crate) fn resolve(
    found: Option<Record>,
    outcome: Option<&Outcome>,
    retention: Duration,
    at: &At<'_>,
) -> (Change, Resolved) {
    let Some(mut record) = found else { return (Change::Keep, Resolved::Absent) };
    match at.found(&record).state {
        State::InFlight => (Change::Keep, Resolved::InFlight),
        State::Completed(_) | State::NotKept => (Change::Keep, Resolved::Completed),
        State::Lapsed | State::Held => {
            let Some(outcome) = outcome else { return (Change::Remove, Resolved::Done) };
            record.settle(Kind::Completed(outcome.clone()), at.now, retention);
            // The former owner's token is stale.
            record.token = Token::new(0, record.token.number());
            (Change::Put(record), Resolved::Done)
        }
    }
}
