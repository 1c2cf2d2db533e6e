//! A consumer group of a Redis stream. What a consumer that died had taken is taken over by
//! `XAUTOCLAIM`. How often the work began, a hash beside the stream tells: the deliveries that
//! `XPENDING` counts may have met another owner, or a worker that died before that.

use std::{collections::HashMap, time::Duration};

use oncekey::worker::{Disposition, disposition};
use redis::{
    AsyncCommands as _, Pipeline, RedisError, Value,
    aio::MultiplexedConnection,
    streams::{StreamAutoClaimOptions, StreamAutoClaimReply, StreamReadOptions, StreamReadReply},
};
use tokio::{
    task::{JoinError, JoinSet},
    time::Instant,
};

use crate::{
    Failure, Settings,
    books::{Books, Message},
};

pub(crate) const STREAM: &str = "bookings";
const GROUP: &str = "books";

/// How often the work of an entry began.
const ATTEMPTS: &str = "bookings:attempts";

/// What was set aside for an operator.
const DEAD: &str = "bookings:dead";

/// How many entries are worked on at a time.
const AT_ONCE: usize = 16;

/// Where `XAUTOCLAIM` begins, and what it says when it has come to the end.
const START: &str = "0-0";

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
    let mut cursor = START.to_owned();
    loop {
        // What others left behind, one at a time: if it is poison, it takes no other with it.
        if Instant::now() >= next_look {
            let found;
            (found, cursor) =
                left_behind(&mut redis, &consumer, settings.redeliver, &cursor).await?;
            if let Some((id, message)) = found {
                if attempts(&mut redis, &id).await? >= settings.max_attempts {
                    bury(&mut redis, &id, &message, "attempted too often").await?;
                } else {
                    let one = tokio::spawn(handle(books.clone(), redis.clone(), id, message));
                    survive(one.await)?;
                }
                continue;
            }
            if cursor == START {
                next_look = Instant::now() + settings.redeliver / 4;
            }
        }
        let mut running = JoinSet::new();
        for (id, message) in fresh(&mut redis, &consumer).await? {
            running.spawn(handle(books.clone(), redis.clone(), id, message));
        }
        while let Some(done) = running.join_next().await {
            survive(done)?;
        }
    }
}

/// Work that panics ends with its task; its entry stays pending, and comes again.
fn survive(done: Result<Result<(), Failure>, JoinError>) -> Result<(), Failure> {
    match done {
        Err(error) if error.is_panic() => {
            eprintln!("the work panicked: {error}");
            Ok(())
        }
        done => done?,
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
    // Counted before the work does anything, so that a message that kills its worker is known.
    let mut counter = redis.clone();
    let began = async { Ok(counter.hincr::<_, _, _, ()>(ATTEMPTS, &id, 1).await?) };
    let ran = books.book(&message, began).await;
    match disposition(&ran) {
        Disposition::Ack => settle(&mut redis, &id).await,
        Disposition::Requeue { .. } => Ok(()),
        Disposition::DeadLetter => {
            let why = ran.err().map(|error| error.to_string()).unwrap_or_default();
            bury(&mut redis, &id, &message, &why).await
        }
    }
}

/// Sets an entry aside for an operator: into the stream of dead ones and out of this one, in one
/// transaction.
async fn bury(
    redis: &mut MultiplexedConnection,
    id: &str,
    message: &Message,
    why: &str,
) -> Result<(), Failure> {
    let fields = [("intent", message.intent.as_str()), ("cents", &message.cents), ("why", why)];
    let mut all = redis::pipe();
    all.atomic().xadd(DEAD, "*", &fields).ignore();
    done_with(&mut all, id).exec_async(redis).await?;
    Ok(())
}

/// Acknowledges an entry and takes it out of the stream: both or neither, else what was acknowledged
/// by a worker that died would stay there.
async fn settle(redis: &mut MultiplexedConnection, id: &str) -> Result<(), Failure> {
    let mut all = redis::pipe();
    done_with(all.atomic(), id).exec_async(redis).await?;
    Ok(())
}

fn done_with<'a>(all: &'a mut Pipeline, id: &str) -> &'a mut Pipeline {
    all.xack(STREAM, GROUP, &[id]).ignore().xdel(STREAM, &[id]).ignore();
    all.hdel(ATTEMPTS, id).ignore()
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

/// The next that nobody has worked on for `idle`, from `cursor` on; and the cursor behind it. A look
/// goes past a few entries only, so those behind many that others work on need more than one.
async fn left_behind(
    redis: &mut MultiplexedConnection,
    consumer: &str,
    idle: Duration,
    cursor: &str,
) -> Result<(Option<(String, Message)>, String), Failure> {
    let options = StreamAutoClaimOptions::default().count(1);
    let idle = u64::try_from(idle.as_millis())?;
    let claimed: StreamAutoClaimReply =
        redis.xautoclaim_options(STREAM, GROUP, consumer, idle, cursor, options).await?;
    let found = claimed.claimed.into_iter().next().map(|entry| (entry.id, message(&entry.map)));
    Ok((found, claimed.next_stream_id))
}

async fn attempts(redis: &mut MultiplexedConnection, id: &str) -> Result<u32, Failure> {
    Ok(redis.hget::<_, _, Option<u32>>(ATTEMPTS, id).await?.unwrap_or(0))
}

fn message(fields: &HashMap<String, Value>) -> Message {
    let field = |name: &str| {
        let value = fields.get(name).cloned().unwrap_or(Value::Nil);
        redis::from_redis_value::<String>(value).unwrap_or_default()
    };
    Message { intent: field("intent"), cents: field("cents") }
}
