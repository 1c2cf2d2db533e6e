//! The effect: a row in a ledger, in the database that the tier is in.

use std::{future::Future, sync::Arc};

use oncekey::{
    Abandon, Fingerprint, Identity, Lapse, Outcome, Store,
    tier::{PostgresTier, Tiered},
    worker::{Job, Ran, RunError, Verdict, Worker},
};
use sqlx::{PgConnection, PgPool, postgres::PgPoolOptions};
use tokio::time::sleep;

use crate::{Failure, Settings};

/// What stands in a message: the intent it is about, which is its key, and the amount.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) intent: String,
    pub(crate) cents: String,
}

#[derive(Clone)]
pub(crate) struct Books {
    pub(crate) pool: PgPool,
    pub(crate) worker: Worker,
    tier: PostgresTier,
    settings: Arc<Settings>,
}

/// The ledger takes an intent twice, so that a double effect can be seen.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS ledger (id bigserial PRIMARY KEY, intent text NOT NULL, cents bigint NOT NULL);
    CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, intent text NOT NULL, cents bigint NOT NULL);
    CREATE TABLE IF NOT EXISTS outbox (id bigserial PRIMARY KEY, intent text NOT NULL, cents bigint NOT NULL);
    CREATE TABLE IF NOT EXISTS queue (id bigserial PRIMARY KEY, topic text NOT NULL, intent text NOT NULL,
        cents text NOT NULL, attempts int NOT NULL DEFAULT 0, due timestamptz NOT NULL DEFAULT now());
    CREATE INDEX IF NOT EXISTS queue_due ON queue (topic, due);
    CREATE TABLE IF NOT EXISTS dead (id bigserial PRIMARY KEY, intent text NOT NULL, cents text NOT NULL,
        why text NOT NULL)";

pub(crate) async fn make_tables(settings: &Settings) -> Result<(), Failure> {
    let pool = PgPool::connect(&settings.postgres).await?;
    PostgresTier::connect(pool.clone()).await?;
    sqlx::raw_sql(TABLES).execute(&pool).await?;
    Ok(())
}

impl Books {
    pub(crate) async fn open(settings: &Settings) -> Result<Self, Failure> {
        let pool = PgPoolOptions::new().max_connections(12).connect(&settings.postgres).await?;
        let tier = PostgresTier::connect(pool.clone()).await?;
        // Work that panics in its one transaction has done nothing, nor have the others of its batch.
        // With rows and outcomes apart nobody knows.
        let on_abandon = if settings.is_apart { Abandon::Hold } else { Abandon::Release };
        let store = Store::builder().lease(settings.lease).on_abandon(on_abandon).build()?;
        // What a dead worker did not commit it did not do. Apart from the outcome that is not so.
        let lapse = if settings.is_held { Lapse::Hold } else { Lapse::TakeOver };
        let tiered = Tiered::open(store, tier.clone(), lapse).await?;
        let worker = Worker::from(tiered);
        Ok(Self { pool, worker, tier, settings: Arc::new(settings.clone()) })
    }

    /// Books a message, once for its intent. `began` counts the attempt, before there is any effect:
    /// a message that waited for another owner was not attempted.
    pub(crate) async fn book(
        &self,
        message: &Message,
        began: impl Future<Output = Result<(), Failure>>,
    ) -> Result<Ran, RunError> {
        let (id, fingerprint) = attempt("book", message)?;
        self.worker
            .run(&id, fingerprint, |job| async move {
                if let Err(error) = began.await {
                    return Verdict::retry(error);
                }
                let Some(cents) = read(message) else { return Verdict::retry("no amount") };
                if self.settings.is_apart {
                    return self.book_apart(message, cents).await;
                }
                match self.book_together(&[(&job, message, cents)]).await {
                    Ok(()) => Verdict::Committed,
                    // Whatever happened: it is all in the transaction, which decides.
                    Err(error) => Verdict::retry(error),
                }
            })
            .await
    }

    /// Books many messages, each once for its intent, in one transaction. `began` counts the attempts
    /// of those that run, by their places. A message that is none is told so and takes no other with
    /// it.
    pub(crate) async fn book_all<F, Fut>(
        &self,
        messages: &[Message],
        began: F,
    ) -> Vec<Result<Ran, RunError>>
    where
        F: FnOnce(Vec<usize>) -> Fut,
        Fut: Future<Output = Result<(), Failure>>,
    {
        let attempts: Vec<_> = messages.iter().map(|message| attempt("book", message)).collect();
        let (good, places): (Vec<_>, Vec<usize>) = attempts
            .iter()
            .enumerate()
            .filter_map(|(place, attempt)| Some((*attempt.as_ref().ok()?, place)))
            .unzip();
        let places = &places;
        let message_of = |job: &Job| &messages[places[job.index()]];
        let ran = self
            .worker
            .run_each(good, |jobs| async move {
                let begun = jobs.iter().map(|job| places[job.index()]).collect();
                if let Err(error) = began(begun).await {
                    let error = error.to_string();
                    return jobs.iter().map(|_| Verdict::retry(error.as_str())).collect();
                }
                let amounts: Vec<_> = jobs.iter().map(|job| read(message_of(job))).collect();
                if self.settings.is_apart {
                    let mut said = Vec::new();
                    for (job, cents) in jobs.iter().zip(amounts) {
                        said.push(match cents {
                            Some(cents) => self.book_apart(message_of(job), cents).await,
                            None => Verdict::retry("no amount"),
                        });
                    }
                    return said;
                }
                let good: Vec<_> = jobs
                    .iter()
                    .zip(&amounts)
                    .filter_map(|(job, cents)| Some((job, message_of(job), (*cents)?)))
                    .collect();
                let booked = self.book_together(&good).await.map_err(|error| error.to_string());
                let said = |cents: &Option<i64>| match (cents, &booked) {
                    (None, _) => Verdict::retry("no amount"),
                    (Some(_), Ok(())) => Verdict::Committed,
                    (Some(_), Err(error)) => Verdict::retry(error.as_str()),
                };
                amounts.iter().map(said).collect()
            })
            .await;
        let mut ran = ran.into_iter();
        let told = |attempt: Result<_, RunError>| match attempt {
            Ok(_) => ran.next().unwrap_or(Err(RunError::InFlight)),
            Err(error) => Err(error),
        };
        attempts.into_iter().map(told).collect()
    }

    /// Rows and outcomes in one transaction: exactly once, wherever this process dies.
    async fn book_together(&self, entries: &[(&Job, &Message, i64)]) -> Result<(), Failure> {
        let mut tx = self.pool.begin().await?;
        for (job, message, cents) in entries {
            insert(&mut tx, "INSERT INTO ledger (intent, cents) VALUES ($1, $2)", message, *cents)
                .await?;
            job.complete_in(&mut self.tier.within(&mut tx), booked(message)).await?;
        }
        sleep(self.settings.work).await;
        tx.commit().await?;
        Ok(())
    }

    /// The row in a transaction of its own: a crash between that and the outcome leaves a row that
    /// nobody knows of.
    async fn book_apart(&self, message: &Message, cents: i64) -> Verdict {
        let row = "INSERT INTO ledger (intent, cents) VALUES ($1, $2)";
        let inserted = match self.pool.acquire().await {
            Ok(mut connection) => insert(&mut connection, row, message, cents).await,
            Err(error) => return Verdict::retry(error),
        };
        sleep(self.settings.work).await;
        match inserted {
            Ok(()) => Verdict::Done(booked(message)),
            Err(error) => Verdict::unknown(error),
        }
    }

    /// Takes an order: the order, the message about it and the outcome in one transaction.
    pub(crate) async fn order(
        &self,
        message: &Message,
        began: impl Future<Output = Result<(), Failure>>,
    ) -> Result<Ran, RunError> {
        let (id, fingerprint) = attempt("order", message)?;
        self.worker
            .run(&id, fingerprint, |job| async move {
                if let Err(error) = began.await {
                    return Verdict::retry(error);
                }
                match self.order_together(&job, message).await {
                    Ok(()) => Verdict::Committed,
                    Err(error) => Verdict::retry(error),
                }
            })
            .await
    }

    async fn order_together(&self, job: &Job, message: &Message) -> Result<(), Failure> {
        let cents = read(message).ok_or("no amount")?;
        let mut tx = self.pool.begin().await?;
        for row in [
            "INSERT INTO orders (intent, cents) VALUES ($1, $2)",
            "INSERT INTO outbox (intent, cents) VALUES ($1, $2)",
        ] {
            insert(&mut tx, row, message, cents).await?;
        }
        job.complete_in(&mut self.tier.within(&mut tx), booked(message)).await?;
        sleep(self.settings.work).await;
        tx.commit().await?;
        Ok(())
    }
}

/// Who, what, and the key; and what two deliveries of one message have in common.
fn attempt<'a>(
    operation: &'a str,
    message: &'a Message,
) -> Result<(Identity<'a>, Fingerprint), RunError> {
    // A key that is none will never be one: the message is set aside.
    let id = Identity::new("shop", operation, &message.intent).map_err(|_| RunError::Mismatch)?;
    Ok((id, Fingerprint::request("", operation, message.cents.as_bytes())))
}

/// The amount. This is where a poison message does its harm.
#[expect(clippy::panic, reason = "it is one of the harms, and the consumers survive it")]
fn read(message: &Message) -> Option<i64> {
    match message.cents.as_str() {
        "crash" => std::process::abort(),
        "panic" => panic!("a message that makes its worker panic"),
        cents => cents.parse().ok(),
    }
}

async fn insert(
    connection: &mut PgConnection,
    row: &'static str,
    message: &Message,
    cents: i64,
) -> Result<(), sqlx::Error> {
    sqlx::query(row).bind(&message.intent).bind(cents).execute(connection).await.map(drop)
}

fn booked(message: &Message) -> Outcome {
    Outcome::new(200).body(format!("booked {}", message.intent))
}
