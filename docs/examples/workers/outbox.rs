//! An outbox: the order, the message about it and the outcome of its key share one transaction. A relay
//! sends the messages to the stream, at least once; whoever reads them there books each once.

use std::time::Duration;

use redis::AsyncCommands as _;
use tokio::time::sleep;

use crate::{
    Failure, Settings,
    books::Books,
    queue,
    streams::{STREAM, connect},
};

/// How long an empty table is left alone.
const PAUSE: Duration = Duration::from_millis(50);

/// Takes orders from the queue.
pub(crate) async fn take_orders(books: Books, settings: &Settings) -> Result<(), Failure> {
    loop {
        let taken = queue::take(&books.pool, "order", settings).await?;
        if taken.is_empty() {
            sleep(PAUSE).await;
        }
        let good = queue::without_poison(&books, taken, settings).await?;
        let worker = books.clone();
        queue::survive(tokio::spawn(async move {
            for delivery in good {
                let began = queue::began(&worker.pool, vec![delivery.id]);
                let ran = worker.order(&delivery.message, began).await;
                queue::settle(&worker, &delivery, ran).await?;
            }
            Ok(())
        }))
        .await?;
    }
}

/// Sends what stands in the outbox. Killed between the sending and the commit, it is sent again.
pub(crate) async fn relay(books: Books, url: &str) -> Result<(), Failure> {
    let mut redis = connect(url).await?;
    loop {
        let mut tx = books.pool.begin().await?;
        let rows: Vec<(i64, String, i64)> = sqlx::query_as(
            "SELECT id, intent, cents FROM outbox ORDER BY id LIMIT 16 FOR UPDATE SKIP LOCKED",
        )
        .fetch_all(&mut *tx)
        .await?;
        for (id, intent, cents) in &rows {
            let fields = [("intent", intent.clone()), ("cents", cents.to_string())];
            let _: String = redis.xadd(STREAM, "*", &fields).await?;
            sqlx::query("DELETE FROM outbox WHERE id = $1").bind(id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        if rows.is_empty() {
            sleep(PAUSE).await;
        }
    }
}
