//! A tier that keeps nothing beyond its process: the reference for the contract, and a double for
//! users' tests of several nodes.

use std::{collections::HashMap, fmt, time::Duration};

use bytes::Bytes;

use super::{
    Answer, Claimed, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, Tier,
    record::{Record, millis},
    steps::{self, At, Change, Owners},
    told::{Told, name},
};
use crate::{
    Clock, Identity, Outcome, SystemClock, Token,
    sync::{Arc, Mutex},
};

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
    owners: Owners,
    told: Told,
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

    fn now(&self) -> u64 {
        millis(self.shared.clock.now())
    }

    fn step<'a, T: Send + 'a>(
        &'a self,
        id: Identity<'a>,
        verb: impl FnOnce(Option<Record>, &At<'_>) -> (Change, T) + Send + 'a,
    ) -> Answer<'a, T> {
        Box::pin(async move { Ok(self.step_at_once(id, verb)) })
    }

    fn step_at_once<T>(
        &self,
        id: Identity<'_>,
        verb: impl FnOnce(Option<Record>, &At<'_>) -> (Change, T),
    ) -> T {
        let Kept { records, owners, .. } = &mut *self.shared.state.lock();
        let now = self.now();
        let name = name(id);
        let found = records.get(&name).filter(|record| !record.is_over(now)).cloned();
        let (change, answer) = verb(found, &At { now, owners });
        match change {
            Change::Keep => return answer,
            Change::Put(record) => drop(records.insert(name, record)),
            Change::Remove => drop(records.remove(&name)),
        }
        self.shared.settled.notify_waiters();
        answer
    }

    fn tell(&self, id: Identity<'_>) {
        let now = self.now();
        self.shared.state.lock().told.tell(id, now);
    }
}

impl Tier for MemoryTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        Box::pin(async move {
            let now = self.now();
            self.shared.state.lock().owners.beat(owner, lease, now);
            Ok(())
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        let step = self.step(id, move |found, at| steps::claim(found, &claim, at));
        Box::pin(async move { step.await? })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        let step = self.step(id, move |found, at| steps::take_over(found, seen, &claim, at));
        Box::pin(async move { step.await? })
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::complete(found, token, outcome, retention, at))
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::release(found, token, at))
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::hold(found, token, retention, at))
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::lapse(found, token, at))
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        self.step(id, move |found, at| steps::checkpoint(found, token, bytes, at))
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        self.step(id, steps::look_up)
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        Box::pin(async move {
            let forgotten = self.step_at_once(id, |found, at| steps::forget(found, forced, at));
            if forgotten == Forgotten::Gone {
                self.tell(id);
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
        Box::pin(async move {
            let resolved =
                self.step_at_once(id, |found, at| steps::resolve(found, outcome, retention, at));
            if resolved == Resolved::Done {
                self.tell(id);
            }
            Ok(resolved)
        })
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        Box::pin(async move {
            let Kept { records, owners, .. } = &mut *self.shared.state.lock();
            let now = self.now();
            owners.reap(now);
            let ended = records.iter().filter(|(_, record)| record.is_over(now));
            let ended: Vec<_> = ended.take(most).map(|(name, _)| name.clone()).collect();
            for name in &ended {
                records.remove(name);
            }
            Ok(ended.len())
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move { Ok(self.shared.state.lock().told.since(since)) })
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
