//! The steps, each on a connection that has a transaction open: SQL on one side, [`Record`] on the
//! other.
//!
//! Ground rules:
//!
//! 1. What is common takes one statement: a claim of what is absent, and a step by the token of an
//!    open claim. Only what is met otherwise is read, and judged as all tiers judge it.
//! 2. Time is read within the step, when the transaction has the lock (rule 8 of the contract).
//! 3. Nothing here panics over what stands in a row: it is somebody's file.

use std::time::Duration;

use bytes::Bytes;
use sqlx::{
    Row, Sqlite, SqliteConnection,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::{fault::Fault, ground::Ground};
use crate::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{
        Claimed, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, State,
        record::{Kind, Record, millis},
    },
};

/// For how long it is told what was forgotten, in milliseconds (rule 13).
const TOLD: u64 = 5 * 60 * 1000;

/// What makes a checksum of an outcome.
const CHECKSUM: Scheme = Scheme::from_id(*b"outcome1");

/// What a step works with.
pub(super) struct At<'a> {
    pub(super) sql: &'a mut SqliteConnection,
    pub(super) ground: &'a Ground,
}

/// An identity of its own.
#[derive(Clone)]
pub(super) struct Name([Vec<u8>; 3]);

impl From<Identity<'_>> for Name {
    fn from(id: Identity<'_>) -> Self {
        Self([id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec))
    }
}

/// How a claim ends, or goes on.
pub(super) enum How {
    Complete(Option<Outcome>, Duration),
    Hold(Duration),
    Release,
    Lapse,
    Checkpoint(Bytes),
}

type Statement = Query<'static, Sqlite, SqliteArguments>;

impl Name {
    /// A statement whose first three parameters are the identity.
    fn query(&self, sql: &'static str) -> Statement {
        self.0.iter().fold(sqlx::query(sql), |query, part| query.bind(part.clone()))
    }

    /// A statement about an open claim of `token`: six parameters.
    fn query_open(&self, sql: &'static str, token: Token, now: u64) -> Statement {
        let token = [token.owner(), token.number()].map(u64::cast_signed);
        self.query(sql).bind(token[0]).bind(token[1]).bind(time(now))
    }
}

impl At<'_> {
    async fn change(&mut self, statement: Statement) -> Result<bool, Fault> {
        Ok(statement.execute(&mut *self.sql).await?.rows_affected() > 0)
    }

    /// `None` for an owner that does not beat.
    pub(super) async fn claim(
        &mut self,
        id: &Name,
        claim: &NewClaim,
    ) -> Result<Option<Claimed>, Fault> {
        if !self.beats(claim.token.owner())? {
            // It may still learn what is there.
            let met = self.living(id).await?;
            return met.map(|record| self.meet(&record, claim)).transpose();
        }
        let record = Record::claimed(claim, self.ground.time.ahead());
        let over = self.ground.time.now();
        if self.put(id, &record, over).await? {
            return Ok(Some(Claimed::Won { checkpoint: None }));
        }
        match self.living(id).await? {
            Some(met) => Ok(Some(self.meet(&met, claim)?)),
            // It has ended between the two looks at the clock.
            None => self.put(id, &record, u64::MAX).await.map(|_| Some(won(&record))),
        }
    }

    /// `None` for an owner that does not beat.
    pub(super) async fn take_over(
        &mut self,
        id: &Name,
        seen: Token,
        claim: &NewClaim,
    ) -> Result<Option<Claimed>, Fault> {
        if !self.beats(claim.token.owner())? {
            return Ok(None);
        }
        let from = self.ground.time.ahead();
        let next = match self.living(id).await? {
            None => Record::claimed(claim, from),
            Some(record) => {
                let at = self.ground.at(record.token.owner())?;
                match record.taken_over(seen, claim, &at) {
                    Some(taken) => {
                        Record { checkpoint: taken.checkpoint, ..Record::claimed(claim, from) }
                    }
                    None => return Ok(Some(record.meet(claim, &at))),
                }
            }
        };
        self.put(id, &next, u64::MAX).await?;
        Ok(Some(won(&next)))
    }

    pub(super) async fn finish(
        &mut self,
        id: &Name,
        token: Token,
        how: &How,
    ) -> Result<Landed, Fault> {
        let now = self.ground.time.now();
        let done = match how {
            How::Complete(outcome, retention) => {
                let kind = outcome.clone().map_or(Kind::NotKept, Kind::Completed);
                self.settle(id, token, token.owner(), &kind, *retention).await?
            }
            How::Hold(retention) => {
                self.settle(id, token, token.owner(), &Kind::Held, *retention).await?
            }
            How::Release => {
                let release = id.query_open(include_str!("release.sql"), token, now);
                self.change(release).await?
            }
            How::Lapse => {
                let lapse = id.query_open(include_str!("lapse.sql"), token, now);
                self.change(lapse).await?
            }
            How::Checkpoint(bytes) => {
                let keep = id.query_open(include_str!("checkpoint.sql"), token, now);
                self.change(keep.bind(bytes.to_vec())).await?
            }
        };
        if done {
            return Ok(Landed::Done);
        }
        Ok(match self.living(id).await? {
            Some(record) if matches!(how, How::Complete(..)) && record.was_completed_by(token) => {
                Landed::Done
            }
            Some(record) => Landed::Lost(Some(self.found(&record)?)),
            None => Landed::Lost(None),
        })
    }

    /// What this token has completed already.
    pub(super) async fn completed_by(
        &mut self,
        id: &Name,
        token: Token,
    ) -> Result<Option<Found>, Fault> {
        let record = self.living(id).await?.filter(|record| record.was_completed_by(token));
        record.map(|record| self.found(&record)).transpose()
    }

    pub(super) async fn look_up(&mut self, id: &Name) -> Result<Option<Found>, Fault> {
        let record = self.living(id).await?;
        record.map(|record| self.found(&record)).transpose()
    }

    pub(super) async fn forget(&mut self, id: &Name, forced: bool) -> Result<Forgotten, Fault> {
        let Some(found) = self.look_up(id).await? else { return Ok(Forgotten::Absent) };
        if found.state == State::InFlight && !forced {
            return Ok(Forgotten::Busy);
        }
        self.remove(id).await?;
        Ok(Forgotten::Gone)
    }

    pub(super) async fn resolve(
        &mut self,
        id: &Name,
        outcome: Option<&Outcome>,
        retention: Duration,
    ) -> Result<Resolved, Fault> {
        let Some(found) = self.look_up(id).await? else { return Ok(Resolved::Absent) };
        match found.state {
            State::InFlight => return Ok(Resolved::InFlight),
            State::Completed(_) | State::NotKept => return Ok(Resolved::Completed),
            State::Lapsed | State::Held => {}
        }
        match outcome {
            None => self.remove(id).await?,
            Some(outcome) => {
                let kind = Kind::Completed(outcome.clone());
                // Of nobody: the former owner's token is stale.
                self.settle(id, found.token, 0, &kind, retention).await?;
                self.recall(id).await?;
            }
        }
        Ok(Resolved::Done)
    }

    pub(super) async fn reap(&mut self, most: u32) -> Result<u64, Fault> {
        let now = self.ground.time.now();
        let reap = sqlx::query(include_str!("reap.sql")).bind(time(now)).bind(most);
        Ok(reap.execute(&mut *self.sql).await?.rows_affected())
    }

    pub(super) async fn recalls(&mut self, since: Option<u64>) -> Result<Recalls, Fault> {
        let Some(since) = since else {
            let last = "SELECT coalesce(max(number), 0) FROM idempotency_recalls";
            let row = sqlx::query(last).fetch_one(&mut *self.sql).await?;
            let now = row.try_get::<i64, _>(0)?.cast_unsigned();
            return Ok(Recalls { now, identities: Vec::new() });
        };
        let told = "SELECT number, account, endpoint, key FROM idempotency_recalls
                    WHERE number > ?1 ORDER BY number";
        let rows = sqlx::query(told).bind(time(since)).fetch_all(&mut *self.sql).await?;
        let mut recalls = Recalls { now: since, identities: Vec::with_capacity(rows.len()) };
        for row in rows {
            recalls.now = row.try_get::<i64, _>(0)?.cast_unsigned();
            recalls.identities.push([row.try_get(1)?, row.try_get(2)?, row.try_get(3)?]);
        }
        Ok(recalls)
    }

    fn beats(&self, owner: u64) -> Result<bool, Fault> {
        let at = self.ground.at(owner)?;
        Ok(at.alive_until > at.now)
    }

    fn found(&self, record: &Record) -> Result<Found, Fault> {
        Ok(record.found(&self.ground.at(record.token.owner())?))
    }

    fn meet(&self, record: &Record, claim: &NewClaim) -> Result<Claimed, Fault> {
        Ok(record.meet(claim, &self.ground.at(record.token.owner())?))
    }

    /// What is there and has not ended.
    async fn living(&mut self, id: &Name) -> Result<Option<Record>, Fault> {
        let row = id.query(include_str!("read.sql")).fetch_optional(&mut *self.sql).await?;
        Ok(self.ground.living(row.as_ref().map(record).transpose()?))
    }

    /// A claim that is not settled, where nothing is there that ends after `over`.
    async fn put(&mut self, id: &Name, record: &Record, over: u64) -> Result<bool, Fault> {
        let statement = id
            .query(include_str!("claim.sql"))
            .bind([&record.fingerprint.scheme().id()[..], record.fingerprint.digest()].concat())
            .bind(time(record.since))
            .bind(time(record.due))
            .bind(time(record.end))
            .bind(record.token.owner().cast_signed())
            .bind(record.token.number().cast_signed())
            .bind(record.checkpoint.as_deref().map(<[u8]>::to_vec))
            .bind(time(over));
        self.change(statement).await
    }

    /// Settles an open claim of `token`, which becomes one of `owner`.
    async fn settle(
        &mut self,
        id: &Name,
        token: Token,
        owner: u64,
        kind: &Kind,
        retention: Duration,
    ) -> Result<bool, Fault> {
        let (now, since) = (self.ground.time.now(), self.ground.time.ahead());
        let outcome = match kind {
            Kind::Completed(outcome) => Some(outcome),
            _ => None,
        };
        let statement = id
            .query_open(include_str!("settle.sql"), token, now)
            .bind(number_of(kind))
            .bind(outcome.map(|outcome| i64::from(outcome.status())))
            .bind(outcome.map(|outcome| outcome.head().to_vec()))
            .bind(outcome.map(|outcome| outcome.bytes().to_vec()))
            .bind(time(since))
            .bind(time(since.saturating_add(millis(retention))))
            .bind(owner.cast_signed())
            .bind(outcome.map(|outcome| checksum(outcome).to_vec()));
        self.change(statement).await
    }

    /// Removes what is there, and tells of it.
    async fn remove(&mut self, id: &Name) -> Result<(), Fault> {
        self.change(id.query(
            "DELETE FROM idempotency_keys \
                              WHERE account = ?1 AND endpoint = ?2 AND key = ?3",
        ))
        .await?;
        self.recall(id).await
    }

    async fn recall(&mut self, id: &Name) -> Result<(), Fault> {
        let now = self.ground.time.now();
        let tell = "INSERT INTO idempotency_recalls (account, endpoint, key, told)
                    VALUES (?1, ?2, ?3, ?4)";
        self.change(id.query(tell).bind(time(now))).await?;
        // The last one is there, so numbers go on from it.
        let forget = sqlx::query("DELETE FROM idempotency_recalls WHERE told < ?1");
        self.change(forget.bind(time(now.saturating_sub(TOLD)))).await?;
        Ok(())
    }
}

fn won(record: &Record) -> Claimed {
    Claimed::Won { checkpoint: record.checkpoint.clone() }
}

/// What does not fit is 292 million years ahead.
fn time(millis: u64) -> i64 {
    i64::try_from(millis).unwrap_or(i64::MAX)
}

fn number_of(kind: &Kind) -> i64 {
    match kind {
        Kind::InFlight => 0,
        Kind::Held => 1,
        Kind::Completed(_) => 2,
        Kind::NotKept => 3,
    }
}

/// No client is ever handed bytes that the disk has changed.
fn checksum(outcome: &Outcome) -> [u8; 8] {
    let hash = Fingerprint::builder(CHECKSUM)
        .part(&outcome.status().to_be_bytes())
        .part(outcome.head())
        .part(outcome.bytes())
        .finish();
    let mut checksum = [0; 8];
    checksum.copy_from_slice(&hash.digest()[..8]);
    checksum
}

/// The record in a row of `read.sql`.
fn record(row: &SqliteRow) -> Result<Record, Fault> {
    let damaged = || Fault::lasting("a row of `idempotency_keys` is damaged: restore a backup");
    let number = |column| row.try_get::<i64, _>(column).map(i64::cast_unsigned);
    let bytes = |column| row.try_get::<Option<&[u8]>, _>(column);
    let (scheme, digest) = row
        .try_get::<&[u8], _>("fingerprint")?
        .split_first_chunk::<8>()
        .and_then(|(scheme, digest)| Some((*scheme, *<&[u8; 32]>::try_from(digest).ok()?)))
        .ok_or_else(damaged)?;
    let kind = match row.try_get::<i64, _>("state")? {
        0 => Kind::InFlight,
        1 => Kind::Held,
        2 => {
            let status = row.try_get::<Option<i64>, _>("status")?;
            let status = status.and_then(|status| u16::try_from(status).ok());
            let head = bytes("headers")?.unwrap_or_default();
            let body = bytes("body")?.unwrap_or_default();
            let [head, body] = [head, body].map(Bytes::copy_from_slice);
            let outcome = Outcome::from_parts(status.ok_or_else(damaged)?, head, body);
            if bytes("checksum")? != Some(&checksum(&outcome)[..]) {
                return Err(damaged());
            }
            Kind::Completed(outcome)
        }
        3 => Kind::NotKept,
        _ => return Err(damaged()),
    };
    let since = match row.try_get::<Option<i64>, _>("settled")? {
        Some(settled) => settled.cast_unsigned(),
        None => number("created")?,
    };
    Ok(Record {
        token: Token::new(number("owner")?, number("number")?),
        fingerprint: Fingerprint::from_parts(Scheme::from_id(scheme), digest),
        kind,
        since,
        due: number("due")?,
        end: number("expires")?,
        checkpoint: bytes("checkpoint")?.map(Bytes::copy_from_slice),
    })
}
