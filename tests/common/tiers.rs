//! A way to a tier that counts and can be cut, and a transaction on its database.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use oncekey::{
    Identity, Outcome, Token,
    tier::{
        Answer, Claimed, Completion, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, Tier,
        TierError, Transaction,
    },
};

/// What the way to the tier does with a verb.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weather {
    #[default]
    Fair,
    /// It does not get there.
    Down,
    /// It gets there; the answer does not come back.
    Deaf,
    /// It never ends.
    Still,
    /// A transaction has the record.
    Locked,
}

/// The way to a tier that others use too: it counts, and it can be cut.
#[derive(Clone, Debug)]
pub struct Wire {
    pub tier: Arc<dyn Tier>,
    weather: Arc<Mutex<Weather>>,
    /// Heartbeats only.
    pub beats: Arc<Mutex<Weather>>,
    /// Completions only.
    pub completions: Arc<Mutex<Weather>>,
    calls: Arc<[AtomicUsize; 6]>,
    /// After how long a claim gets there whose caller has given it up.
    pub late: Arc<Mutex<Option<Duration>>>,
    /// The same of a takeover.
    pub late_takeovers: Arc<Mutex<Option<Duration>>>,
    /// Held by a transaction that has a record in its hands: what gives it up or holds it waits.
    pub row: Arc<tokio::sync::Mutex<()>>,
    /// Whether claims wait for it too.
    claims_wait: Arc<std::sync::atomic::AtomicBool>,
}

/// A transaction on a [`Wire`]'s tier: what it completes appears with its commit.
pub struct Tx {
    wire: Wire,
    _row: tokio::sync::OwnedMutexGuard<()>,
    staged: Option<([Vec<u8>; 3], Token, Outcome, Duration)>,
}

impl Tx {
    pub async fn begin(wire: &Wire) -> Self {
        let row = Arc::clone(&wire.row).lock_owned().await;
        Self { wire: wire.clone(), _row: row, staged: None }
    }

    pub async fn commit(self) {
        let (key, token, outcome, retention) = self.staged.unwrap();
        let tier = &self.wire.tier;
        let id = Identity::new(&key[0], &key[1], &key[2]).unwrap();
        let landed = tier.complete(id, token, Some(&outcome), retention).await.unwrap();
        assert_eq!(landed, Landed::Done);
    }
}

impl Transaction for Tx {
    fn complete<'a>(&'a mut self, it: Completion<'a>) -> Answer<'a, Landed> {
        Box::pin(async move {
            let found = self.wire.tier.look_up(it.id).await?;
            if found.as_ref().is_none_or(|found| found.token != it.token) {
                return Ok(Landed::Lost(found));
            }
            let key = [it.id.account(), it.id.endpoint(), it.id.key()].map(<[u8]>::to_vec);
            self.staged = Some((key, it.token, it.outcome.unwrap().clone(), it.retention));
            Ok(Landed::Done)
        })
    }
}

pub const CLAIM: usize = 0;
pub const COMPLETE: usize = 1;
pub const LOOK_UP: usize = 2;
pub const RELEASE: usize = 3;
pub const LAPSE: usize = 4;
pub const OTHERS: usize = 5;

impl Wire {
    /// Another way to the same tier.
    pub fn to(tier: Arc<dyn Tier>) -> Self {
        Self {
            tier,
            weather: Arc::default(),
            beats: Arc::default(),
            completions: Arc::default(),
            late: Arc::default(),
            late_takeovers: Arc::default(),
            calls: Arc::default(),
            row: Arc::default(),
            claims_wait: Arc::default(),
        }
    }

    pub fn becomes(&self, weather: Weather) {
        *self.weather.lock().unwrap() = weather;
    }

    /// Claims wait for [`row`](Self::row) from now on.
    pub fn claims_wait(&self) {
        self.claims_wait.store(true, Ordering::Relaxed);
    }

    pub fn calls(&self, verb: usize) -> usize {
        self.calls[verb].load(Ordering::Relaxed)
    }

    fn send<'a, T: Send + 'a>(&'a self, verb: usize, answer: Answer<'a, T>) -> Answer<'a, T> {
        self.calls[verb].fetch_add(1, Ordering::Relaxed);
        under(*self.weather.lock().unwrap(), answer)
    }
}

fn under<'a, T: Send + 'a>(weather: Weather, answer: Answer<'a, T>) -> Answer<'a, T> {
    Box::pin(async move {
        // A step takes a while, so that others come in between.
        tokio::task::yield_now().await;
        match weather {
            Weather::Fair => {
                let answer = answer.await;
                tokio::task::yield_now().await;
                answer
            }
            Weather::Down => Err(TierError::unavailable("cut")),
            Weather::Deaf => {
                let _ = answer.await;
                Err(TierError::unavailable("the answer was lost"))
            }
            Weather::Still => std::future::pending().await,
            Weather::Locked => Err(TierError::Locked("a transaction has it".into())),
        }
    })
}

impl Tier for Wire {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        let beats = *self.beats.lock().unwrap();
        let weather = *self.weather.lock().unwrap();
        let weather = if beats == Weather::Fair { weather } else { beats };
        under(weather, self.tier.beat(owner, lease))
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        let late = *self.late.lock().unwrap();
        if let Some(late) = late {
            let tier = Arc::clone(&self.tier);
            let name = [id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec);
            tokio::spawn(async move {
                tokio::time::sleep(late).await;
                let id = Identity::new(&name[0], &name[1], &name[2]).unwrap();
                let _ = tier.claim(id, claim).await;
            });
            return Box::pin(std::future::pending());
        }
        self.send(
            CLAIM,
            Box::pin(async move {
                if self.claims_wait.load(Ordering::Relaxed) {
                    drop(self.row.lock().await);
                }
                self.tier.claim(id, claim).await
            }),
        )
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        if let Some(late) = *self.late_takeovers.lock().unwrap() {
            let tier = Arc::clone(&self.tier);
            let name = [id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec);
            tokio::spawn(async move {
                tokio::time::sleep(late).await;
                let id = Identity::new(&name[0], &name[1], &name[2]).unwrap();
                let _ = tier.take_over(id, seen, claim).await;
            });
            return Box::pin(std::future::pending());
        }
        self.send(CLAIM, self.tier.take_over(id, seen, claim))
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let completions = *self.completions.lock().unwrap();
        self.send(COMPLETE, under(completions, self.tier.complete(id, token, outcome, retention)))
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.send(
            RELEASE,
            Box::pin(async move {
                let _row = self.row.lock().await;
                self.tier.release(id, token).await
            }),
        )
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        self.send(
            OTHERS,
            Box::pin(async move {
                let _row = self.row.lock().await;
                self.tier.hold(id, token, retention).await
            }),
        )
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        self.send(
            LAPSE,
            Box::pin(async move {
                let _row = self.row.lock().await;
                self.tier.lapse(id, token).await
            }),
        )
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        self.send(OTHERS, self.tier.checkpoint(id, token, bytes))
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        self.send(LOOK_UP, self.tier.look_up(id))
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        self.send(OTHERS, self.tier.forget(id, forced))
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        self.send(OTHERS, self.tier.resolve(id, outcome, retention))
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        self.send(OTHERS, self.tier.reap(most))
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        self.send(OTHERS, self.tier.recalls(since))
    }
}
