//! A tier in Redis or Valkey: one server, or a cluster.
//!
//! Ground rules:
//!
//! 1. A step is one Lua script (`*.lua`), which a server runs whole and alone. It reads the time, the
//!    record and its owner's heartbeat in one place, decides and writes (`step.lua` says how).
//! 2. A record and the heartbeat that it depends on are in one slot. A single server has one shard of
//!    keys; a cluster has [`SHARDS`], and each has a heartbeat of every owner of its own. So a lapse is
//!    judged in the very step that takes the claim over, on one server, by one clock: no heartbeat
//!    can come between (rules 4 and 9). A heartbeat that reached some shards only counts there, and
//!    its caller is told that it failed.
//! 3. Every key has an expiry from the step on that makes it, and a record's end is that expiry.
//! 4. A step is repeated by this side only where a repeated one does no harm (`link.rs`).
//!
//! What a failover, an eviction or a restart of a server can lose, and what is done about it, stands in
//! `docs/tiers/redis.md`.

mod builder;
mod claims;
mod ear;
mod link;
mod step;

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ::redis::Value;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use self::{
    claims::Claims,
    ear::Ear,
    link::Link,
    step::{Answer as Said, Names, Script, Scripts, fingerprint, millis},
};
use crate::{
    Identity, Outcome, Token,
    tier::{
        Answer, Claimed, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, Tier, TierError,
    },
};

pub use self::builder::{RedisBuilder, RedisDurability};

/// Into how many parts the records of a cluster are divided. All versions of this crate have the
/// same number, because it decides where a record is.
const SHARDS: u64 = 64;

/// How long a claim that was given up before it was answered may still be under way.
const UNDER_WAY: Duration = Duration::from_secs(600);

/// A [`Tier`] in Redis or Valkey. All clones are one.
///
/// It needs a server of version 6.2 or later that is a primary, never evicts
/// (`maxmemory-policy noeviction`) and, unless a setting says otherwise, syncs each step before it
/// answers (`appendonly yes`, `appendfsync always`); it is tested with Redis 7.0.
///
/// **What it cannot promise.** Redis replicates behind the answer. When a primary fails, its replica
/// may take its place without the last steps that were acknowledged: a claim, and then a duplicate
/// runs beside the first; or a completion, and then the claim lapses and is treated as such.
/// [`replicas`](RedisBuilder::replicas) makes this rarer. What is noticed of it is counted:
/// [`vanished`](Self::vanished). Where a second run must be impossible, complete in the transaction of
/// your own database. `docs/tiers/redis.md` says more.
///
/// ```no_run
/// use oncekey::{Lapse, Store, tier::{RedisTier, Tiered}};
///
/// # async fn open() -> Result<(), Box<dyn std::error::Error>> {
/// let tier = RedisTier::connect("redis://127.0.0.1/").await?;
/// let store = Tiered::open(Store::builder().build()?, tier, Lapse::Hold).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisTier {
    shared: Arc<Shared>,
}

struct Shared {
    names: Names,
    link: Link,
    scripts: Scripts,
    ear: Ear,
    claims: Mutex<Claims>,
    vanished: AtomicU64,
}

impl RedisTier {
    /// The settings at their defaults.
    pub fn builder() -> RedisBuilder {
        RedisBuilder::new()
    }

    /// Connects to a single server with all settings at their defaults.
    ///
    /// # Errors
    ///
    /// As [`RedisBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, TierError> {
        Self::builder().connect(url).await
    }

    /// Counter: claims of this process that the server has lost, as far as it was noticed. A step came
    /// with the token of a claim that was won by this handle, whose `max_run` was not over, whose owner
    /// had not lapsed since and that nobody had forgotten or resolved; and the claim was not there.
    ///
    /// Each may be a second run: alarm on it. The cause is a failover to a replica that had less, data
    /// that were deleted by hand, or a restart without an append-only file.
    pub fn vanished(&self) -> u64 {
        self.shared.vanished.load(Ordering::Relaxed)
    }

    /// Counter: connections for waiting that were lost or refused. While there is none, duplicates
    /// that wait for another node find out by looking.
    pub fn deaf(&self) -> u64 {
        self.shared.ear.failed()
    }

    async fn run(
        &self,
        script: &Script,
        keys: &[Vec<u8>],
        args: &[&[u8]],
    ) -> Result<Said, TierError> {
        Said::of(self.shared.link.run(script, keys, args).await?)
    }

    /// A step on the record of `id`.
    async fn on(
        &self,
        id: Identity<'_>,
        script: &Script,
        args: &[&[u8]],
    ) -> Result<Said, TierError> {
        self.run(script, &self.shared.names.of(id).1, args).await
    }

    /// The same step in each shard.
    async fn everywhere(
        &self,
        script: fn(&Scripts) -> &Script,
        key: fn(&Names, u64) -> Vec<u8>,
        args: &[Vec<u8>],
    ) -> Result<Vec<(u64, Said)>, TierError> {
        let mut steps = JoinSet::new();
        for shard in 0..self.shared.names.shards {
            let (tier, args) = (self.clone(), args.to_vec());
            steps.spawn(async move {
                let Shared { names, scripts, .. } = &*tier.shared;
                let args: Vec<_> = args.iter().map(Vec::as_slice).collect();
                Ok((shard, tier.run(script(scripts), &[key(names, shard)], &args).await?))
            });
        }
        let mut answers = Vec::new();
        let mut failed = None;
        // To the end, though one has failed: what the others reach counts there.
        while let Some(step) = steps.join_next().await {
            match step.map_err(TierError::unavailable).and_then(|answer| answer) {
                Ok(answer) => answers.push(answer),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(answers), Err)
    }

    async fn own(
        &self,
        id: Identity<'_>,
        seen: Option<Token>,
        claim: NewClaim,
    ) -> Result<Claimed, TierError> {
        let NewClaim { token, max_run, retention, .. } = claim;
        let Shared { names, scripts, claims, .. } = &*self.shared;
        claims.lock().asked(token, max_run);
        let args = [
            token.to_string().into_bytes(),
            fingerprint(&claim.fingerprint).to_vec(),
            millis(max_run).into_bytes(),
            millis(retention).into_bytes(),
            seen.map(|seen| seen.to_string()).unwrap_or_default().into_bytes(),
        ];
        let args = args.each_ref().map(Vec::as_slice);
        let mut said = self.run(&scripts.claim, &names.of_claim(id, token), &args).await?;
        match said.word.as_str() {
            "won" => {
                claims.lock().won(token, said.number()?);
                return Ok(Claimed::Won { checkpoint: said.bytes()? });
            }
            "given-up" => return Err(TierError::unavailable("the claim was given up meanwhile")),
            _ => claims.lock().ended(token),
        }
        match said.word.as_str() {
            "owner-lapsed" => Err(TierError::OwnerLapsed),
            _ => said.found().map(Claimed::Met),
        }
    }

    /// What a step with a token came to.
    fn landed(&self, token: Token, mut said: Said) -> Result<Landed, TierError> {
        match said.word.as_str() {
            "done" => Ok(Landed::Done),
            "lost" => {
                let (now, is_explained) = (said.number()?, said.number()? == 1);
                if !is_explained && self.shared.claims.lock().is_missed(token, now) {
                    self.shared.vanished.fetch_add(1, Ordering::Relaxed);
                }
                self.shared.claims.lock().ended(token);
                Ok(Landed::Lost(said.inner()?))
            }
            _ => Err(said.unexpected()),
        }
    }

    /// A release or a lapse.
    async fn give_up(
        &self,
        id: Identity<'_>,
        token: Token,
        script: &Script,
    ) -> Result<Landed, TierError> {
        let Shared { names, claims, .. } = &*self.shared;
        let is_unanswered = claims.lock().is_unanswered(token);
        let noted = if is_unanswered { millis(UNDER_WAY) } else { "0".to_owned() };
        let by = token.to_string();
        let args = [by.as_bytes(), noted.as_bytes()];
        let said = self.run(script, &names.of_claim(id, token), &args).await?;
        claims.lock().ended(token);
        self.landed(token, said)
    }

    async fn settle(
        &self,
        id: Identity<'_>,
        token: Token,
        becomes: &str,
        retention: Duration,
        outcome: &[u8],
    ) -> Result<Landed, TierError> {
        let (by, retention) = (token.to_string(), millis(retention));
        let args = [by.as_bytes(), becomes.as_bytes(), retention.as_bytes(), outcome];
        let said = self.on(id, &self.shared.scripts.settle, &args).await?;
        let landed = self.landed(token, said)?;
        if landed == Landed::Done && becomes != "held" {
            self.shared.claims.lock().ended(token);
        }
        Ok(landed)
    }
}

impl Tier for RedisTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        Box::pin(async move {
            let args = [format!("{owner:016x}").into_bytes(), millis(lease).into_bytes()];
            let answers = self.everywhere(|scripts| &scripts.beat, Names::owners, &args).await?;
            for (_, said) in answers {
                match said.word.as_str() {
                    "done" => {}
                    "lapsed" => self.shared.claims.lock().lapsed(owner),
                    _ => return Err(said.unexpected()),
                }
            }
            Ok(())
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        Box::pin(self.own(id, None, claim))
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        Box::pin(self.own(id, Some(seen), claim))
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let (becomes, bytes) = match outcome {
                Some(outcome) => ("completed", outcome.to_bytes()),
                None => ("not-kept", Vec::new()),
            };
            self.settle(id, token, becomes, retention, &bytes).await
        })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(self.give_up(id, token, &self.shared.scripts.release))
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(self.give_up(id, token, &self.shared.scripts.lapse))
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(self.settle(id, token, "held", retention, b""))
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let by = token.to_string();
            let args = [by.as_bytes(), &bytes[..]];
            let said = self.on(id, &self.shared.scripts.checkpoint, &args).await?;
            self.landed(token, said)
        })
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        Box::pin(async move {
            let said = self.on(id, &self.shared.scripts.look_up, &[]).await?;
            match said.word.as_str() {
                "absent" => Ok(None),
                _ => said.found().map(Some),
            }
        })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        Box::pin(async move {
            let forced: &[u8] = if forced { b"1" } else { b"0" };
            let said = self.on(id, &self.shared.scripts.forget, &[forced]).await?;
            match said.word.as_str() {
                "gone" => Ok(Forgotten::Gone),
                "absent" => Ok(Forgotten::Absent),
                "busy" => Ok(Forgotten::Busy),
                _ => Err(said.unexpected()),
            }
        })
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        Box::pin(async move {
            let (retention, outcome) = (millis(retention), outcome.map(Outcome::to_bytes));
            let mut args = vec![retention.as_bytes()];
            args.extend(outcome.as_deref());
            let said = self.on(id, &self.shared.scripts.resolve, &args).await?;
            match said.word.as_str() {
                "done" => Ok(Resolved::Done),
                "absent" => Ok(Resolved::Absent),
                "in-flight" => Ok(Resolved::InFlight),
                "completed" | "not-kept" => Ok(Resolved::Completed),
                _ => Err(said.unexpected()),
            }
        })
    }

    fn reap(&self, _most: usize) -> Answer<'_, usize> {
        // The server ends records by itself.
        Box::pin(async { Ok(0) })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move {
            let since = since.map(|since| since.to_string()).unwrap_or_default();
            let args = [since.into_bytes()];
            let answers =
                self.everywhere(|scripts| &scripts.recalls, Names::recalls, &args).await?;
            let (mut points, mut identities) = (Vec::new(), Vec::new());
            for (shard, mut said) in answers {
                if said.word != "recalls" {
                    return Err(said.unexpected());
                }
                points.push(said.number()?);
                for name in said.list() {
                    let Value::BulkString(name) = name else { continue };
                    let Some(id) = self.shared.names.identity(shard, &name) else { continue };
                    identities.push([id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec));
                }
            }
            // The earliest: what comes after it in another shard is told twice rather than never.
            Ok(Recalls { now: points.into_iter().min().unwrap_or(0), identities })
        })
    }

    fn settled<'a>(&'a self, id: Identity<'a>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            let Shared { names, scripts, ear, .. } = &*self.shared;
            let keys = names.of(id).1;
            let mut seat = ear.sit(keys[0].clone());
            seat.listens().await;
            match self.run(&scripts.wait, &keys, &[]).await {
                Ok(said) if said.word == "settled" => {}
                // If it could not be asked for, the ring may never come: the caller looks by itself.
                _ => seat.rings().await,
            }
        })
    }
}

impl fmt::Debug for RedisTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTier")
            .field("prefix", &self.shared.names.prefix)
            .field("shards", &self.shared.names.shards)
            .finish_non_exhaustive()
    }
}
