//! The one connection that writes, and the task that it belongs to.
//!
//! Ground rules:
//!
//! 1. A step is handed to the task and done there, so that a caller who leaves cancels nothing: the
//!    step happens whole or, if it never came to its turn, not at all (T3).
//! 2. Steps that wait at the same time share one transaction, and one `fsync`. It is begun with the
//!    lock taken (`BEGIN IMMEDIATE`): it never has to give up in the middle because another one came
//!    first. Nobody is answered before the commit.
//! 3. If a step fails, all of its group are undone, and each is done again in a transaction of its
//!    own: one that does not fit takes no other with it. If a commit fails, nobody knows, and nothing
//!    is done again.
//! 4. After a failure the connection is opened anew: whatever state it was in ends with it.
//! 5. While others have the lock it is tried again and again: SQLite's own pauses get so long that
//!    one who waits hardly ever finds the moment between two transactions of a busy process.
//! 6. Who finds the database locked for longer than the patience takes all that wait with it, so that
//!    nobody waits for the patience of others.

use std::{future::Future, pin::Pin, time::Duration};

use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::{mpsc::UnboundedReceiver, oneshot};

use super::{fault::Fault, ground::Ground, open, rows::At};
use crate::{clock::Timer, sync::Arc};

/// The most steps of one transaction: it bounds how long others wait for the lock.
const GROUP: usize = 256;
/// How old the stamp may get, in milliseconds.
const STAMP: u64 = 1_000;

/// A step on its way.
pub(super) type Running<'s, T> = Pin<Box<dyn Future<Output = Result<T, Fault>> + Send + 's>>;

/// What is to be done within a transaction. It may be done twice, if the first time was undone.
pub(super) trait Step: Send + 'static {
    type Answer: Send + 'static;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Self::Answer>;
}

/// A step whose caller waits, of whatever kind.
pub(super) trait Waiting: Send {
    fn run<'s>(&'s mut self, at: &'s mut At<'_>) -> Running<'s, ()>;
    fn answer(self: Box<Self>, end: Result<(), Fault>);
}

/// How long SQLite itself waits for the lock: 1, 2, 5, 10 and 12 ms, so to say.
pub(super) const TRY: Duration = Duration::from_millis(30);

type Answer<S> = Result<<S as Step>::Answer, Fault>;

struct Called<S: Step> {
    step: S,
    answer: Option<S::Answer>,
    caller: oneshot::Sender<Answer<S>>,
}

impl<S: Step> Waiting for Called<S> {
    fn run<'s>(&'s mut self, at: &'s mut At<'_>) -> Running<'s, ()> {
        Box::pin(async move {
            self.answer = Some(self.step.run(at).await?);
            Ok(())
        })
    }

    fn answer(self: Box<Self>, end: Result<(), Fault>) {
        let Self { answer, caller, .. } = *self;
        let answer = end.and_then(|()| answer.ok_or_else(|| Fault::passing("not done")));
        // A caller who has left needs none.
        let _ = caller.send(answer);
    }
}

/// A step to be handed over, and where its answer comes.
pub(super) fn call<S: Step>(step: S) -> (Box<dyn Waiting>, oneshot::Receiver<Answer<S>>) {
    let (caller, answer) = oneshot::channel();
    (Box::new(Called { step, answer: None, caller }), answer)
}

pub(super) struct Writer {
    pub(super) ground: Arc<Ground>,
    pub(super) options: SqliteConnectOptions,
    /// How long it waits for the lock.
    pub(super) patience: Duration,
    /// None after a failure.
    pub(super) connection: Option<SqliteConnection>,
    /// The last time that was kept.
    pub(super) stamped: u64,
}

impl Writer {
    /// Ends when nobody can hand over steps any more, and all are done.
    pub(super) async fn run(mut self, mut queue: UnboundedReceiver<Box<dyn Waiting>>) {
        while let Some(first) = queue.recv().await {
            self.serve(first, &mut queue).await;
        }
        self.stamped = 0;
        if let Some(mut connection) = self.connection.take() {
            let stamp = stamp(&mut connection, self.ground.time.now()).await;
            // The steps are done; of these two nothing depends.
            drop((stamp, connection.close().await));
        }
    }

    async fn serve(
        &mut self,
        first: Box<dyn Waiting>,
        queue: &mut UnboundedReceiver<Box<dyn Waiting>>,
    ) {
        let mut group = vec![first];
        let done = self.group(&mut group, queue).await;
        match done {
            Done::All => group.into_iter().for_each(|step| step.answer(Ok(()))),
            Done::Unknown(fault) => {
                self.connection = None;
                group.into_iter().for_each(|step| step.answer(Err(fault.clone())));
            }
            Done::None(fault) => {
                self.connection = None;
                while let Ok(step) = queue.try_recv() {
                    group.push(step);
                }
                group.into_iter().for_each(|step| step.answer(Err(fault.clone())));
            }
            Done::Undone(fault) if group.len() == 1 => {
                self.connection = None;
                group.into_iter().for_each(|step| step.answer(Err(fault.clone())));
            }
            Done::Undone(_) => {
                self.connection = None;
                for step in group {
                    self.alone(step).await;
                }
            }
        }
    }

    async fn alone(&mut self, mut step: Box<dyn Waiting>) {
        let end = self.one(&mut step).await;
        if end.is_err() {
            self.connection = None;
        }
        step.answer(end);
    }

    async fn one(&mut self, step: &mut Box<dyn Waiting>) -> Result<(), Fault> {
        let ground = Arc::clone(&self.ground);
        let sql = self.begin().await?;
        step.run(&mut At { sql, ground: &ground }).await?;
        commit(sql).await
    }

    /// One transaction, for the first step and those that come while it runs.
    async fn group(
        &mut self,
        group: &mut Vec<Box<dyn Waiting>>,
        queue: &mut UnboundedReceiver<Box<dyn Waiting>>,
    ) -> Done {
        let (ground, stamped) = (Arc::clone(&self.ground), self.stamped);
        let sql = match self.begin().await {
            Ok(sql) => sql,
            Err(fault) => return Done::None(fault),
        };
        let mut next = 0;
        while let Some(step) = group.get_mut(next) {
            let at = &mut At { sql, ground: &ground };
            if let Err(fault) = step.run(at).await {
                return Done::Undone(fault);
            }
            next += 1;
            if next < GROUP
                && let Ok(step) = queue.try_recv()
            {
                group.push(step);
            }
        }
        let now = ground.time.now();
        let stamps = now.saturating_sub(stamped) >= STAMP;
        if stamps && let Err(fault) = stamp(sql, now).await {
            return Done::Undone(fault);
        }
        if let Err(fault) = commit(sql).await {
            return Done::Unknown(fault);
        }
        if stamps {
            self.stamped = now;
        }
        Done::All
    }

    async fn begin(&mut self) -> Result<&mut SqliteConnection, Fault> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => open::connect(&self.options).await?,
        };
        let waits = Timer::start();
        while let Err(error) = sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await {
            let fault = Fault::from(error);
            if !fault.is_lock() || waits.elapsed() >= self.patience {
                return Err(fault);
            }
        }
        Ok(self.connection.insert(connection))
    }
}

async fn commit(connection: &mut SqliteConnection) -> Result<(), Fault> {
    sqlx::query("COMMIT").execute(connection).await?;
    Ok(())
}

/// What became of a group.
enum Done {
    All,
    /// The transaction could not be begun.
    None(Fault),
    /// It was begun and rolled back.
    Undone(Fault),
    /// The commit has failed.
    Unknown(Fault),
}

/// Keeps a time that has been, from which the next opening goes on (R23).
pub(super) async fn stamp(connection: &mut SqliteConnection, now: u64) -> Result<(), Fault> {
    let stamp = "UPDATE idempotency_schema SET stamp = max(stamp, ?1)";
    sqlx::query(stamp).bind(now.cast_signed()).execute(connection).await?;
    Ok(())
}
