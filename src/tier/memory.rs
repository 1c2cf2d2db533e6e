//! A tier that keeps nothing beyond its process: the reference for the contract, and a double for
//! users' tests of several nodes.

use std::{collections::HashMap, fmt, time::Duration};

use bytes::Bytes;

use super::{
    Answer, Claimed, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, State, Tier, TierError,
    record::{Kind, Now, Record, millis},
};
use crate::{
    Clock, Identity, Outcome, SystemClock, Token,
    sync::{Arc, Mutex},
};

/// How long it is told what was forgotten, in milliseconds (rule 13).
const TOLD: u64 = 5 * 60 * 1000;

/// A [`Tier`] in memory, without a limit. All clones are one.
///
/// It is durable as long as one clone lives, so it does not keep rule 11: use it in tests, with a
/// [`ManualClock`](crate::ManualClock) and one [`Tiered`](super::Tiered) for each node.
#[derive(Clone)]
pub struct MemoryTier {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Box<dyn Clock>,
    state: Mutex<Kept>,
    settled: tokio::sync::Notify,
}

#[derive(Default)]
struct Kept {
    records: HashMap<[Vec<u8>; 3], Record>,
    /// Until when each owner beats.
    owners: HashMap<u64, u64>,
    /// What was forgotten or resolved, when, from the number `first` on.
    recalls: Vec<(u64, [Vec<u8>; 3])>,
    first: u64,
}

impl MemoryTier {
    /// An empty tier on the system's clock.
    pub fn new() -> Self {
        Self::with_clock(SystemClock::new())
    }

    /// An empty tier on a clock of its own.
    pub fn with_clock(clock: impl Clock) -> Self {
        let (state, settled) = (Mutex::default(), tokio::sync::Notify::new());
        Self { shared: Arc::new(Shared { clock: Box::new(clock), state, settled }) }
    }

    /// How many records it keeps, ended ones that were not reaped included.
    pub fn len(&self) -> usize {
        self.shared.state.lock().records.len()
    }

    /// Whether it keeps none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One step: `verb` gets the record that is there and says what is there afterwards.
    fn step<T>(
        &self,
        id: Identity<'_>,
        verb: impl FnOnce(Option<Record>, &Time<'_>) -> (Option<Record>, T),
    ) -> T {
        let now = millis(self.shared.clock.now());
        let Kept { records, owners, .. } = &mut *self.shared.state.lock();
        let name = name(id);
        let found = records.get(&name).filter(|record| !record.is_over(now)).cloned();
        let (next, answer) = verb(found, &Time { now, owners });
        match next {
            Some(record) => drop(records.insert(name, record)),
            None => drop(records.remove(&name)),
        }
        answer
    }

    /// As [`step`](Self::step), for a verb that needs the token of an open claim (rule 5).
    fn with_token(
        &self,
        id: Identity<'_>,
        token: Token,
        verb: impl FnOnce(Record, &Time<'_>) -> Option<Record>,
    ) -> Landed {
        let landed = self.step(id, |found, time| match found {
            None => (None, Landed::Lost(None)),
            Some(record) => match record.admits(token, &time.of(&record)) {
                Ok(()) => (verb(record, time), Landed::Done),
                Err(lost) => (Some(record), lost),
            },
        });
        self.shared.settled.notify_waiters();
        landed
    }

    fn recall(&self, id: Identity<'_>) {
        let now = millis(self.shared.clock.now());
        let Kept { recalls, first, .. } = &mut *self.shared.state.lock();
        recalls.push((now, name(id)));
        let old = recalls.iter().take_while(|(at, _)| at.saturating_add(TOLD) < now).count();
        recalls.drain(..old);
        *first += old as u64;
        self.shared.settled.notify_waiters();
    }
}

struct Time<'a> {
    now: u64,
    owners: &'a HashMap<u64, u64>,
}

impl Time<'_> {
    fn of(&self, record: &Record) -> Now {
        Now { now: self.now, alive_until: self.alive_until(record.token.owner()) }
    }

    fn alive_until(&self, owner: u64) -> u64 {
        self.owners.get(&owner).copied().unwrap_or(0)
    }
}

fn name(id: Identity<'_>) -> [Vec<u8>; 3] {
    [id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec)
}

/// A step that does not wait.
fn at_once<'a, T: Send + 'a>(
    step: impl FnOnce() -> Result<T, TierError> + Send + 'a,
) -> Answer<'a, T> {
    Box::pin(async move { step() })
}

impl Tier for MemoryTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        at_once(move || {
            let now = millis(self.shared.clock.now());
            let Kept { owners, .. } = &mut *self.shared.state.lock();
            owners.insert(owner, now.saturating_add(millis(lease)));
            Ok(())
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        at_once(move || {
            self.step(id, |found, time| match found {
                Some(record) => {
                    let met = record.meet(&claim, &time.of(&record));
                    (Some(record), Ok(met))
                }
                None if time.alive_until(claim.token.owner()) <= time.now => {
                    (None, Err(TierError::OwnerLapsed))
                }
                None => {
                    let record = Record::claimed(&claim, time.now);
                    (Some(record), Ok(Claimed::Won { checkpoint: None }))
                }
            })
        })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        at_once(move || {
            self.step(id, |found, time| {
                let is_alive = time.alive_until(claim.token.owner()) > time.now;
                match found {
                    _ if !is_alive => (found, Err(TierError::OwnerLapsed)),
                    None => {
                        let record = Record::claimed(&claim, time.now);
                        (Some(record), Ok(Claimed::Won { checkpoint: None }))
                    }
                    Some(record) => match record.taken_over(seen, &claim, &time.of(&record)) {
                        Some(taken) => {
                            let checkpoint = taken.checkpoint.clone();
                            (Some(taken), Ok(Claimed::Won { checkpoint }))
                        }
                        None => {
                            let met = record.meet(&claim, &time.of(&record));
                            (Some(record), Ok(met))
                        }
                    },
                }
            })
        })
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        at_once(move || {
            let landed = self.with_token(id, token, |mut record, time| {
                let kind =
                    outcome.map_or(Kind::NotKept, |outcome| Kind::Completed(outcome.clone()));
                record.settle(kind, time.now, retention);
                Some(record)
            });
            Ok(match landed {
                Landed::Lost(Some(Found { token: by, state, .. }))
                    if by == token && matches!(state, State::Completed(_) | State::NotKept) =>
                {
                    Landed::Done
                }
                landed => landed,
            })
        })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        at_once(move || Ok(self.with_token(id, token, |_, _| None)))
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        at_once(move || {
            Ok(self.with_token(id, token, |mut record, time| {
                record.settle(Kind::Held, time.now, retention);
                Some(record)
            }))
        })
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        at_once(move || {
            Ok(self.with_token(id, token, |record, _| {
                Some(Record { checkpoint: Some(bytes), ..record })
            }))
        })
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        at_once(move || {
            Ok(self.step(id, |found, time| {
                let shown = found.as_ref().map(|record| record.found(&time.of(record)));
                (found, shown)
            }))
        })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        at_once(move || {
            let forgotten = self.step(id, |found, time| match found {
                None => (None, Forgotten::Absent),
                Some(record)
                    if !forced && record.found(&time.of(&record)).state == State::InFlight =>
                {
                    (Some(record), Forgotten::Busy)
                }
                Some(_) => (None, Forgotten::Gone),
            });
            if forgotten == Forgotten::Gone {
                self.recall(id);
            }
            Ok(forgotten)
        })
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        at_once(move || {
            let resolved = self.step(id, |found, time| {
                let Some(mut record) = found else { return (None, Resolved::Absent) };
                match record.found(&time.of(&record)).state {
                    State::InFlight => (Some(record), Resolved::InFlight),
                    State::Completed(_) | State::NotKept => (Some(record), Resolved::Completed),
                    State::Lapsed | State::Held => {
                        let next = outcome.map(|outcome| {
                            let kind = Kind::Completed(outcome.clone());
                            record.settle(kind, time.now, retention);
                            // The former owner's token is stale.
                            record.token = Token::new(0, record.token.number());
                            record
                        });
                        (next, Resolved::Done)
                    }
                }
            });
            if resolved == Resolved::Done {
                self.recall(id);
            }
            Ok(resolved)
        })
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        at_once(move || {
            let now = millis(self.shared.clock.now());
            let Kept { records, owners, .. } = &mut *self.shared.state.lock();
            owners.retain(|_, alive_until| *alive_until > now);
            let ended = records.iter().filter(|(_, record)| record.is_over(now));
            let ended: Vec<_> = ended.take(most).map(|(name, _)| name.clone()).collect();
            for name in &ended {
                records.remove(name);
            }
            Ok(ended.len())
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        at_once(move || {
            let Kept { recalls, first, .. } = &*self.shared.state.lock();
            let now = first + recalls.len() as u64;
            let skipped = since.unwrap_or(now).clamp(*first, now) - first;
            let identities = recalls.iter().skip(skipped as usize).map(|(_, name)| name.clone());
            Ok(Recalls { now, identities: identities.collect() })
        })
    }

    fn settled<'a>(
        &'a self,
        id: Identity<'a>,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        // Of whatever identity: it may end too early.
        let _ = id;
        Box::pin(self.shared.settled.notified())
    }
}

impl Default for MemoryTier {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTier").field("records", &self.len()).finish_non_exhaustive()
    }
}
