//! A tier in the SQLite file that a service keeps its own data in: an outcome can be committed
//! together with the rows that the work has written ([`SqliteTier::complete_in`], T6).
//!
//! `docs/tiers/sqlite.md` says what survives what, how much disk is used, and what several processes
//! may do.
//!
//! ```text
//! mod       SqliteTier, its builder and verbs
//! writer    the connection that writes, and its task: one commit for all that wait
//! steps     the verbs as values that are handed to it
//! rows      a step in SQL
//! open      what must be true of the file; migrations
//! owners    heartbeats, beside the database
//! ground    time, and who lives
//! fault     what SQLite's errors mean
//! ```

mod fault;
mod ground;
mod open;
mod owners;
mod rows;
mod steps;
mod writer;

use std::{fmt, path::PathBuf, time::Duration};

use bytes::Bytes;
use sqlx::{Connection, SqliteConnection, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{
    runtime::Handle,
    sync::{Mutex as Turn, MutexGuard, mpsc::UnboundedSender},
    task::JoinHandle,
};

use self::{
    fault::Fault,
    ground::{Ground, Time, whole_millis},
    owners::Owners,
    rows::{At, How},
    steps::{Claim, Finish, Forget, Reap, Resolve},
    writer::{Step, Waiting, Writer, call},
};
use crate::{
    Clock, Identity, Outcome, SystemClock, Token,
    clock::wall,
    sync::{Arc, Mutex},
    tier::{
        Answer, Claimed, Completion, Durability, Forgotten, Found, Landed, NewClaim, Recalls,
        Resolved, Tier, TierError, Transaction,
    },
};

/// The most records that are reaped in one transaction: it bounds how long others wait.
const REAPED_AT_ONCE: usize = 500;
/// The longest patience: more would only hide that something is wrong.
const LONGEST_PATIENCE: Duration = Duration::from_secs(60 * 60);
/// To how many bytes the log is cut when it has been written back, should it have grown beyond.
const LOG_SIZE: &str = "67108864";

/// A [`Tier`] in a SQLite database. All clones are one.
///
/// It has two connections of its own beside the user's pool, made by the pool's options: one writes,
/// one reads. Steps that wait at the same time share one transaction.
///
/// ```
/// # async fn payments() -> Result<(), Box<dyn std::error::Error>> {
/// use oncekey::tier::SqliteTier;
/// use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
///
/// let file = SqliteConnectOptions::new().filename("payments.db").create_if_missing(true);
/// let pool = SqlitePool::connect_with(file).await?;
/// let tier = SqliteTier::open(pool).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct SqliteTier {
    shared: Arc<Shared>,
}

struct Shared {
    ground: Arc<Ground>,
    durability: Durability,
    path: PathBuf,
    /// To the writer; `None` when the tier is closed.
    queue: Mutex<Option<UnboundedSender<Box<dyn Waiting>>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    runtime: Handle,
    /// As the pool has them.
    options: SqliteConnectOptions,
    /// `None` after a failure.
    reader: Turn<Option<SqliteConnection>>,
}

/// Settings of a [`SqliteTier`].
pub struct SqliteTierBuilder {
    durability: Durability,
    patience: Duration,
    clock: Option<Box<dyn Clock>>,
}

impl SqliteTierBuilder {
    /// What an acknowledged step survives. Default: [`Durability::PowerLoss`].
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// How long a step waits for a transaction of somebody else that writes to the database, before
    /// the tier is [`TierError::Unavailable`]. Whole milliseconds, at least 1, at most an hour.
    /// Default: 4 s, less than [`Tiered`](crate::tier::Tiered) waits for an answer.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        let whole = Duration::from_millis(1);
        self.patience = patience.clamp(whole, LONGEST_PATIENCE);
        self
    }

    /// A clock in place of the system's, for tests. It counts from 1970 and must show all who open
    /// the database the same time.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Opens the tier in the database of `pool`: makes its tables, or brings them up to date, and
    /// puts the database into WAL mode, which it keeps.
    ///
    /// If no other process has the tier open, the owners of all claims in flight are dead, and these
    /// are lapsed at once (T7).
    ///
    /// # Errors
    ///
    /// [`TierError::Unusable`] for a database that is in memory, read-only, damaged, cannot be in WAL
    /// mode, or has tables of a newer version or of somebody else; outside of a tokio runtime; and on
    /// a full disk. [`TierError::Unavailable`] if somebody else keeps it locked.
    pub async fn open(self, pool: SqlitePool) -> Result<SqliteTier, TierError> {
        Ok(self.open_file(pool).await.map_err(|fault| fault.during("opening the SQLite tier"))?)
    }

    async fn open_file(self, pool: SqlitePool) -> Result<SqliteTier, Fault> {
        let runtime = Handle::try_current().map_err(|error| Fault::lasting(error.to_string()))?;
        let options = SqliteConnectOptions::clone(&pool.connect_options())
            .busy_timeout(self.patience)
            .pragma("journal_size_limit", LOG_SIZE);
        let writing = options.clone().synchronous(open::synchronous(self.durability));
        let mut connection = open::connect(&writing).await?;
        let (path, _) = open::described(&mut connection).await?;
        if path.as_os_str().is_empty() {
            return Err(Fault::lasting("a database in memory ends with its process: use a file"));
        }
        open::use_wal(&mut connection).await?;
        let stamp = open::migrate(&mut connection).await?;
        let reader = open::connect_as_pool(&options).await?;
        // Waited for: as the last one it writes the log back, and nobody can write meanwhile.
        connection.close().await?;
        let (durability, patience) = (self.durability, self.patience);
        let ground = Arc::new(self.ground(&path, stamp).await?);
        let (queue, steps) = tokio::sync::mpsc::unbounded_channel();
        let writer = Writer {
            ground: Arc::clone(&ground),
            options: writing.busy_timeout(writer::TRY.min(patience)),
            patience,
            connection: None,
            stamped: 0,
        };
        let shared = Shared {
            ground,
            durability,
            path,
            queue: Mutex::new(Some(queue)),
            writer: Mutex::new(Some(runtime.spawn(writer.run(steps)))),
            runtime,
            options,
            reader: Turn::new(Some(reader)),
        };
        Ok(SqliteTier { shared: Arc::new(shared) })
    }

    async fn ground(self, database: &std::path::Path, stamp: u64) -> Result<Ground, Fault> {
        let mut directory = database.as_os_str().to_owned();
        directory.push("-owners");
        let is_shared = self.clock.is_some() || SystemClock::IS_SHARED;
        let injected = self.clock.as_deref().map(whole_millis);
        let start = injected.unwrap_or_else(|| u64::try_from(wall().as_millis()).unwrap_or(0));
        let clock = self.clock.unwrap_or_else(|| Box::new(SystemClock::new()));
        // Never below what has been (R23).
        let own = Time::origin(&*clock, start.max(stamp));
        let (owners, theirs) = Owners::open(directory.into(), self.patience, own).await?;
        let time = Time::new(clock, if is_shared { theirs } else { own });
        owners.reap(time.now())?;
        Ok(Ground { time, owners })
    }
}

impl fmt::Debug for SqliteTierBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTierBuilder")
            .field("durability", &self.durability)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

impl SqliteTier {
    /// Opens the tier in the database of `pool`, with the default settings.
    ///
    /// # Errors
    ///
    /// As [`SqliteTierBuilder::open`].
    pub async fn open(pool: SqlitePool) -> Result<Self, TierError> {
        Self::builder().open(pool).await
    }

    /// Settings that differ from the defaults.
    pub fn builder() -> SqliteTierBuilder {
        SqliteTierBuilder {
            durability: Durability::default(),
            patience: Duration::from_secs(4),
            clock: None,
        }
    }

    /// `transaction` as one that a permit can complete its claim in: for
    /// [`TieredPermit::complete_in`](crate::tier::TieredPermit::complete_in) and the HTTP layer's
    /// handlers. See [`complete_in`](Self::complete_in).
    pub fn within<'a>(&'a self, transaction: &'a mut SqliteConnection) -> SqliteTransaction<'a> {
        SqliteTransaction { tier: self, connection: transaction }
    }

    /// [`complete`](Tier::complete) within a transaction of the caller's own, on the same database:
    /// what it has written and the outcome are committed together, or neither is (T6).
    ///
    /// On [`Landed::Lost`] another one owns the claim, or has completed it: roll back. The answer
    /// counts when the transaction is committed. If the commit fails, or its answer does not come,
    /// [`complete`](Tier::complete) tells whether it was done, and does it if it was not.
    ///
    /// Begin the transaction by `pool.begin_with("BEGIN IMMEDIATE")`: one that reads first and then
    /// writes is refused by SQLite if another one has written in between. Dropping the future leaves
    /// the completion in the transaction or not, so roll back then.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use oncekey::{Identity, Outcome, Token, tier::{Landed, SqliteTier}};
    /// # async fn charge(
    /// #     pool: sqlx::SqlitePool, tier: &SqliteTier, id: Identity<'_>, token: Token,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// let day = Duration::from_secs(24 * 60 * 60);
    /// let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// sqlx::query("INSERT INTO charges (amount) VALUES (500)").execute(&mut *transaction).await?;
    /// let outcome = Outcome::new(201).body("charged");
    /// match tier.complete_in(&mut transaction, id, token, Some(&outcome), day).await? {
    ///     Landed::Done => transaction.commit().await?,
    ///     Landed::Lost(_) => transaction.rollback().await?,
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`TierError::Unusable`] if no transaction of `sqlx` is open, if the connection is of another
    /// database, or if it is less durable than the tier (`synchronous`).
    /// [`TierError::Unavailable`] if the database is locked for longer than the connection waits.
    /// Roll back in either case.
    pub async fn complete_in(
        &self,
        transaction: &mut SqliteConnection,
        id: Identity<'_>,
        token: Token,
        outcome: Option<&Outcome>,
        retention: Duration,
    ) -> Result<Landed, TierError> {
        self.is_open()?;
        if !transaction.is_in_transaction() {
            return Err(TierError::unusable("no transaction of `sqlx` is open on this connection"));
        }
        let (path, rank) = open::described(transaction).await?;
        if path != self.shared.path {
            return Err(TierError::unusable("the transaction is of another database"));
        }
        if rank < open::rank(self.shared.durability) {
            return Err(TierError::unusable(
                "the transaction's connection is less durable than the tier: open the pool with \
                 `synchronous(SqliteSynchronous::Full)`, or ask the tier for less",
            ));
        }
        let mut at = At { sql: transaction, ground: &self.shared.ground };
        // Committed already, in a transaction whose answer was lost: what this one holds beside the
        // outcome would be there twice.
        if let Some(found) = at.completed_by(&id.into(), token).await? {
            return Ok(Landed::Lost(Some(found)));
        }
        let how = How::Complete(outcome.cloned(), retention);
        Ok(at.finish(&id.into(), token, &how).await?)
    }

    /// Does what was begun, then closes its connections and lets go of the database: whoever opens
    /// it next finds the owners of this one dead. Every verb is [`TierError::Unavailable`] from then
    /// on, on all clones.
    pub async fn close(&self) {
        drop(self.shared.queue.lock().take());
        let writer = self.shared.writer.lock().take();
        if let Some(writer) = writer {
            // It ends when its steps are done; a runtime that ends takes it along.
            drop(writer.await);
        }
        let reader = self.shared.reader.lock().await.take();
        if let Some(reader) = reader {
            // It has only read.
            drop(reader.close().await);
        }
        self.shared.ground.owners.close();
    }

    async fn step<S: Step>(&self, step: S) -> Result<S::Answer, TierError> {
        let (step, answer) = call(step);
        let is_open = match &*self.shared.queue.lock() {
            Some(queue) => queue.send(step).is_ok(),
            None => false,
        };
        if !is_open {
            return Err(closed().into());
        }
        Ok(answer.await.unwrap_or_else(|_| Err(closed()))?)
    }

    async fn claim_after(
        &self,
        id: Identity<'_>,
        seen: Option<Token>,
        claim: NewClaim,
    ) -> Result<Claimed, TierError> {
        self.step(Claim { id: id.into(), seen, claim }).await?.ok_or(TierError::OwnerLapsed)
    }

    async fn finish(&self, id: Identity<'_>, token: Token, how: How) -> Result<Landed, TierError> {
        self.step(Finish { id: id.into(), token, how }).await
    }

    fn is_open(&self) -> Result<(), Fault> {
        if self.shared.queue.lock().is_some() { Ok(()) } else { Err(closed()) }
    }

    /// The connection that reads, for one reader at a time.
    async fn reader(&self) -> Result<MutexGuard<'_, Option<SqliteConnection>>, Fault> {
        let mut reader = self.shared.reader.lock().await;
        self.is_open()?;
        if reader.is_none() {
            *reader = Some(open::connect(&self.shared.options).await?);
        }
        Ok(reader)
    }
}

/// A [`Transaction`] of a user's own, on the database of a tier. Made by [`SqliteTier::within`].
#[derive(Debug)]
pub struct SqliteTransaction<'a> {
    tier: &'a SqliteTier,
    connection: &'a mut SqliteConnection,
}

impl Transaction for SqliteTransaction<'_> {
    fn complete<'a>(&'a mut self, completion: Completion<'a>) -> Answer<'a, Landed> {
        let Completion { id, token, outcome, retention } = completion;
        Box::pin(self.tier.complete_in(self.connection, id, token, outcome, retention))
    }
}

fn closed() -> Fault {
    Fault::passing("the tier is closed, or the runtime that it was opened in has ended")
}

/// One read by the reader's connection, which is opened anew after a failure.
macro_rules! read {
    ($tier:expr, |$at:ident| $read:expr) => {{
        let mut reader = $tier.reader().await?;
        let read = match reader.as_mut() {
            Some(sql) => {
                let mut $at = At { sql, ground: &$tier.shared.ground };
                $read.await
            }
            None => Err(closed()),
        };
        if read.is_err() {
            *reader = None;
        }
        Ok(read?)
    }};
}

impl Tier for SqliteTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        Box::pin(async move {
            self.is_open()?;
            let ground = Arc::clone(&self.shared.ground);
            let beat = move || ground.beat(owner, lease);
            // A file system may take its time over it.
            let beaten = self.shared.runtime.spawn_blocking(beat).await;
            let beaten = beaten.map_err(|error| Fault::passing(error.to_string()))?;
            Ok(beaten.map_err(|error| Fault::from(error).during("a heartbeat"))?)
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        Box::pin(self.claim_after(id, None, claim))
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        Box::pin(self.claim_after(id, Some(seen), claim))
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(self.finish(id, token, How::Complete(outcome.cloned(), retention)))
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(self.finish(id, token, How::Release))
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(self.finish(id, token, How::Hold(retention)))
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(self.finish(id, token, How::Lapse))
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        Box::pin(self.finish(id, token, How::Checkpoint(bytes)))
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        Box::pin(async move { read!(self, |at| at.look_up(&id.into())) })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        Box::pin(self.step(Forget { id: id.into(), forced }))
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        Box::pin(self.step(Resolve { id: id.into(), outcome: outcome.cloned(), retention }))
    }

    /// In transactions of 500, between which others come to their turn.
    fn reap(&self, most: usize) -> Answer<'_, usize> {
        Box::pin(async move {
            let mut reaped = 0;
            while reaped < most {
                let at_once = REAPED_AT_ONCE.min(most - reaped);
                let done = self.step(Reap { most: at_once as u32 }).await? as usize;
                reaped += done;
                if done < at_once {
                    break;
                }
            }
            Ok(reaped)
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move { read!(self, |at| at.recalls(since)) })
    }
}

impl fmt::Debug for SqliteTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTier")
            .field("path", &self.shared.path)
            .field("durability", &self.shared.durability)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::sqlite::{rows::At, writer::Running};

    /// What the writer's own connection promises.
    struct Promised;

    impl Step for Promised {
        type Answer = (PathBuf, i64);

        fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Self::Answer> {
            Box::pin(open::described(at.sql))
        }
    }

    #[tokio::test]
    async fn t2_the_writer_is_as_durable_as_was_asked_for() {
        let directory = std::env::temp_dir().join(format!("oncekey-rank-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for (durability, rank) in [(Durability::PowerLoss, 2), (Durability::KilledProcess, 1)] {
            let options = SqliteConnectOptions::new().filename(directory.join("app.db"));
            let pool = SqlitePool::connect_lazy_with(options.create_if_missing(true));
            let tier = SqliteTier::builder().durability(durability).open(pool).await.unwrap();
            assert_eq!(tier.step(Promised).await.unwrap().1, rank, "{durability:?}");
            tier.close().await;
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
