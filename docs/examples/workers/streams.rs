//! A consumer group of a Redis stream. What a consumer that died had taken is taken over by
//! `XAUTOCLAIM`; how often an entry was delivered, `XPENDING` tells.

use std::{collections::HashMap, time::Duration};

use oncekey::worker::{Disposition, disposition};
use redis::{
    AsyncCommands as _, RedisError, Value,
    aio::MultiplexedConnection,
    streams::{
        StreamAutoClaimOptions, StreamAutoClaimReply, StreamPendingCountReply, StreamReadOptions,
        StreamReadReply,
    },
};
use tokio::{task::JoinSet, time::Instant};

use crate::{
    Failure, Settings,
    books::{Books, Message},
};

pub(crate) const STREAM: &str = "bookings";
const GROUP: &str = "books";

/// How many entries are worked on at a time.
const AT_ONCE: usize = 16;

/// A connection that is patient: it reads where there may be nothing for a while.
pub(crate) async fn connect(url: &str) -> Result<MultiplexedConnection, Failure> {
    let patient = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(30)))
        .set_response_timeout(Some(Duration::from_secs(60)));
    let client = redis::Client::open(url)?;
    Ok(client.get_multiplexed_async_connection_with_config(&patient).await?)
}

pub(crate) async fn make_group(url: &str) -> Result<(), Failure> {
    let mut redis = connect(url).await?;
    let made: Result<(), RedisError> = redis.xgroup_create_mkstream(STREAM, GROUP, "0").await;
    match made {
        Err(error) if error.code() != Some("BUSYGROUP") => Err(error.into()),
        _ => Ok(()),
    }
}

pub(crate) async fn consume(books: Books, url: &str, settings: &Settings) -> Result<(), Failure> {
    let mut redis = connect(url).await?;
    let consumer = format!("consumer-{}", std::process::id());
    let mut next_look = Instant::now();
    loop {
        // What others left behind, one at a time: if it is poison, it takes no other with it.
        if Instant::now() >= next_look {
            match left_behind(&mut redis, &consumer, settings.redeliver).await? {
                Some((id, message)) => {
                    let delivered = deliveries(&mut redis, &id).await?;
                    if delivered > settings.max_deliveries as usize {
                        books.bury(&message, "delivered too often").await?;
                        settle(&mut redis, &id).await?;
                    } else {
                        handle(books.clone(), redis.clone(), id, message).await?;
                    }
                    continue;
                }
                None => next_look = Instant::now() + settings.redeliver / 4,
            }
        }
        let mut running = JoinSet::new();
        for (id, message) in fresh(&mut redis, &consumer).await? {
            running.spawn(handle(books.clone(), redis.clone(), id, message));
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
    }
}

/// Works on an entry, and acknowledges it when it is done for good. Else it stays pending, and comes
/// again.
async fn handle(
    books: Books,
    mut redis: MultiplexedConnection,
    id: String,
    message: Message,
) -> Result<(), Failure> {
    let ran = books.book(&message).await;
    match disposition(&ran) {
        Disposition::Ack => settle(&mut redis, &id).await,
        Disposition::Requeue { .. } => Ok(()),
        Disposition::DeadLetter => {
            let why = ran.err().map(|error| error.to_string()).unwrap_or_default();
            books.bury(&message, &why).await?;
            settle(&mut redis, &id).await
        }
    }
}

/// Acknowledges an entry and takes it out of the stream: both or neither, else what was acknowledged
/// by a worker that died would stay there.
async fn settle(redis: &mut MultiplexedConnection, id: &str) -> Result<(), Failure> {
    let mut both = redis::pipe();
    both.atomic().xack(STREAM, GROUP, &[id]).ignore().xdel(STREAM, &[id]).ignore();
    both.exec_async(redis).await?;
    Ok(())
}

async fn fresh(
    redis: &mut MultiplexedConnection,
    consumer: &str,
) -> Result<Vec<(String, Message)>, Failure> {
    let options = StreamReadOptions::default().group(GROUP, consumer).count(AT_ONCE).block(200);
    let read: Option<StreamReadReply> = redis.xread_options(&[STREAM], &[">"], &options).await?;
    let entries = read.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids);
    Ok(entries.map(|entry| (entry.id, message(&entry.map))).collect())
}

async fn left_behind(
    redis: &mut MultiplexedConnection,
    consumer: &str,
    idle: Duration,
) -> Result<Option<(String, Message)>, Failure> {
    let options = StreamAutoClaimOptions::default().count(1);
    let idle = u64::try_from(idle.as_millis())?;
    let claimed: StreamAutoClaimReply =
        redis.xautoclaim_options(STREAM, GROUP, consumer, idle, "0-0", options).await?;
    Ok(claimed.claimed.into_iter().next().map(|entry| (entry.id, message(&entry.map))))
}

async fn deliveries(redis: &mut MultiplexedConnection, id: &str) -> Result<usize, Failure> {
    let pending: StreamPendingCountReply = redis.xpending_count(STREAM, GROUP, id, id, 1).await?;
    Ok(pending.ids.first().map_or(0, |entry| entry.times_delivered))
}

fn message(fields: &HashMap<String, Value>) -> Message {
    let field = |name: &str| {
        let value = fields.get(name).cloned().unwrap_or(Value::Nil);
        redis::from_redis_value::<String>(value).unwrap_or_default()
    };
    Message { intent: field("intent"), cents: field("cents") }
}
