//! A queue in a table of Postgres. `FOR UPDATE SKIP LOCKED` gives each consumer rows of its own; a row
//! that was taken is hidden until it is deleted, or its time is over and it is delivered again.
//!
//! What is counted are attempts: how often the work began. A delivery whose worker died before that, or
//! that met another owner, says nothing of the message.

use std::time::Duration;

use oncekey::worker::{Disposition, Ran, RunError, disposition};
use sqlx::PgPool;
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    Failure, Settings,
    books::{Books, Message},
};

/// How many messages make a batch.
const BATCH: i64 = 16;

/// How long an empty queue is left alone.
const PAUSE: Duration = Duration::from_millis(50);

/// A row of the queue.
pub(crate) struct Delivery {
    pub(crate) id: i64,
    pub(crate) message: Message,
    attempts: i32,
}

pub(crate) async fn consume(books: Books, settings: &Settings) -> Result<(), Failure> {
    loop {
        let taken = take(&books.pool, "book", settings).await?;
        if taken.is_empty() {
            sleep(PAUSE).await;
            continue;
        }
        let taken = without_poison(&books, taken, settings).await?;
        let worker = books.clone();
        survive(tokio::spawn(async move {
            let messages: Vec<Message> = taken.iter().map(|it| it.message.clone()).collect();
            let ids: Vec<i64> = taken.iter().map(|it| it.id).collect();
            let began = |places: Vec<usize>| {
                began(&worker.pool, places.into_iter().map(|place| ids[place]).collect())
            };
            let answers = worker.book_all(&messages, began).await;
            for (delivery, ran) in taken.iter().zip(answers) {
                settle(&worker, delivery, ran).await?;
            }
            Ok(())
        }))
        .await?;
    }
}

/// Work that panics ends with its task, and the consumer goes on. What the task had is delivered again,
/// one by one.
pub(crate) async fn survive(task: JoinHandle<Result<(), Failure>>) -> Result<(), Failure> {
    match task.await {
        Err(error) if error.is_panic() => {
            eprintln!("the work panicked: {error}");
            Ok(())
        }
        done => done?,
    }
}

/// Counts an attempt of each. It is committed before the work does anything, so that a message that
/// kills its worker is known.
pub(crate) async fn began(pool: &PgPool, ids: Vec<i64>) -> Result<(), Failure> {
    let count = "UPDATE queue SET attempts = attempts + 1 WHERE id = ANY($1)";
    sqlx::query(count).bind(ids).execute(pool).await?;
    Ok(())
}

/// Takes what is due: a message that was attempted before alone, so that poison takes no other with
/// it; else a batch of fresh ones.
pub(crate) async fn take(
    pool: &PgPool,
    topic: &str,
    settings: &Settings,
) -> Result<Vec<Delivery>, Failure> {
    const TAKE: &str = "
        UPDATE queue SET due = clock_timestamp() + $2 * interval '1 millisecond'
        WHERE id IN (
            SELECT id FROM queue
            WHERE topic = $1 AND due <= clock_timestamp() AND (attempts > 0) = $3
            ORDER BY due, id LIMIT $4 FOR UPDATE SKIP LOCKED
        )
        RETURNING id, intent, cents, attempts";
    let hidden_ms = i64::try_from(settings.redeliver.as_millis())?;
    for (is_old, most) in [(true, 1), (false, BATCH)] {
        let rows: Vec<(i64, String, String, i32)> = sqlx::query_as(TAKE)
            .bind(topic)
            .bind(hidden_ms as f64)
            .bind(is_old)
            .bind(most)
            .fetch_all(pool)
            .await?;
        if !rows.is_empty() {
            let delivery = |(id, intent, cents, attempts)| Delivery {
                id,
                message: Message { intent, cents },
                attempts,
            };
            return Ok(rows.into_iter().map(delivery).collect());
        }
    }
    Ok(Vec::new())
}

/// Sets aside what was attempted too often: it failed each time, or killed its worker.
pub(crate) async fn without_poison(
    books: &Books,
    taken: Vec<Delivery>,
    settings: &Settings,
) -> Result<Vec<Delivery>, Failure> {
    let mut good = Vec::new();
    for delivery in taken {
        if delivery.attempts >= i32::try_from(settings.max_attempts)? {
            bury(&books.pool, &delivery, "attempted too often").await?;
        } else {
            good.push(delivery);
        }
    }
    Ok(good)
}

/// Does with the message what its attempt ended as.
pub(crate) async fn settle(
    books: &Books,
    delivery: &Delivery,
    ran: Result<Ran, RunError>,
) -> Result<(), Failure> {
    match disposition(&ran) {
        Disposition::Ack => acknowledge(&books.pool, delivery).await,
        Disposition::Requeue { after } => {
            sqlx::query(
                "UPDATE queue SET due = clock_timestamp() + $2 * interval '1 millisecond' WHERE id = $1",
            )
            .bind(delivery.id)
            .bind(after.as_millis() as f64)
            .execute(&books.pool)
            .await?;
            Ok(())
        }
        Disposition::DeadLetter => {
            let why = ran.err().map(|error| error.to_string()).unwrap_or_default();
            bury(&books.pool, delivery, &why).await
        }
    }
}

/// Sets a message aside for an operator: out of the queue and into `dead`, both or neither.
async fn bury(pool: &PgPool, delivery: &Delivery, why: &str) -> Result<(), Failure> {
    const BURY: &str = "
        WITH gone AS (DELETE FROM queue WHERE id = $1 RETURNING intent, cents)
        INSERT INTO dead (intent, cents, why) SELECT intent, cents, $2 FROM gone";
    sqlx::query(BURY).bind(delivery.id).bind(why).execute(pool).await?;
    Ok(())
}

async fn acknowledge(pool: &PgPool, delivery: &Delivery) -> Result<(), Failure> {
    sqlx::query("DELETE FROM queue WHERE id = $1").bind(delivery.id).execute(pool).await?;
    Ok(())
}
