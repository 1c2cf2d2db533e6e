//! A queue in a table of Postgres. `FOR UPDATE SKIP LOCKED` gives each consumer rows of its own; a row
//! that was taken is hidden until it is deleted, or its time is over and it is delivered again.

use std::time::Duration;

use oncekey::worker::{Disposition, Ran, RunError, disposition};
use sqlx::PgPool;
use tokio::time::sleep;

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
    id: i64,
    pub(crate) message: Message,
    deliveries: i32,
}

pub(crate) async fn consume(books: Books, settings: &Settings) -> Result<(), Failure> {
    loop {
        let taken = take(&books.pool, "book", settings).await?;
        if taken.is_empty() {
            sleep(PAUSE).await;
            continue;
        }
        let taken = without_poison(&books, taken, settings).await?;
        let messages: Vec<Message> = taken.iter().map(|it| it.message.clone()).collect();
        let answers = books.book_all(&messages).await;
        for (delivery, ran) in taken.iter().zip(answers) {
            settle(&books, delivery, ran).await?;
        }
    }
}

/// Takes what is due: a message that was delivered before alone, so that poison takes no other with
/// it; else a batch of fresh ones.
pub(crate) async fn take(
    pool: &PgPool,
    topic: &str,
    settings: &Settings,
) -> Result<Vec<Delivery>, Failure> {
    const TAKE: &str = "
        UPDATE queue SET deliveries = deliveries + 1,
            due = clock_timestamp() + $2 * interval '1 millisecond'
        WHERE id IN (
            SELECT id FROM queue
            WHERE topic = $1 AND due <= clock_timestamp() AND (deliveries > 0) = $3
            ORDER BY due, id LIMIT $4 FOR UPDATE SKIP LOCKED
        )
        RETURNING id, intent, cents, deliveries";
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
            let delivery = |(id, intent, cents, deliveries)| Delivery {
                id,
                message: Message { intent, cents },
                deliveries,
            };
            return Ok(rows.into_iter().map(delivery).collect());
        }
    }
    Ok(Vec::new())
}

/// Sets aside what was delivered too often: it failed each time, or killed its worker.
pub(crate) async fn without_poison(
    books: &Books,
    taken: Vec<Delivery>,
    settings: &Settings,
) -> Result<Vec<Delivery>, Failure> {
    let mut good = Vec::new();
    for delivery in taken {
        if delivery.deliveries > i32::try_from(settings.max_deliveries)? {
            books.bury(&delivery.message, "delivered too often").await?;
            acknowledge(&books.pool, &delivery).await?;
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
            books.bury(&delivery.message, &why).await?;
            acknowledge(&books.pool, delivery).await
        }
    }
}

async fn acknowledge(pool: &PgPool, delivery: &Delivery) -> Result<(), Failure> {
    sqlx::query("DELETE FROM queue WHERE id = $1").bind(delivery.id).execute(pool).await?;
    Ok(())
}
