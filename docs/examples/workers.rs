//! Consumers of queues that deliver at least once, and effects that happen once.
//!
//! ```text
//! workers setup   --postgres URL [--redis URL]     makes the tables and the consumer group
//! workers streams --postgres URL --redis URL       books what comes by a Redis stream
//! workers queue   --postgres URL                   books what comes by a table, in batches
//! workers orders  --postgres URL                   takes orders from a table; each leaves a message
//! workers relay   --postgres URL --redis URL       sends those messages to the stream
//! ```
//!
//! Start as many of each as you like, and kill them as you like. `docs/workers.md` explains it;
//! `tests/example_workers.rs` does it. What is booked stands in the table `ledger`, which would take an
//! intent twice: that none stands there twice is what the key is for.
//!
//! Flags: `--lease-ms` (default 60000), `--redeliver-ms` (30000: after that the queue gives a message to
//! somebody else), `--max-attempts` (10: then it is a poison message), `--work-ms` (0: how long the
//! work takes beside the database), `--apart` (the effect in a transaction of its own, to see what that
//! costs), `--hold` (with it: what a dead worker has begun is not run again).

#[path = "workers/books.rs"]
mod books;
#[path = "workers/outbox.rs"]
mod outbox;
#[path = "workers/queue.rs"]
mod queue;
#[path = "workers/streams.rs"]
mod streams;

use std::time::Duration;

/// What can go wrong beside a message: the process ends, and its messages are delivered to others.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The command line.
#[derive(Clone, Debug)]
struct Settings {
    postgres: String,
    redis: Option<String>,
    lease: Duration,
    redeliver: Duration,
    max_attempts: u32,
    work: Duration,
    is_apart: bool,
    is_held: bool,
}

fn settings(arguments: &[String]) -> Result<Settings, Failure> {
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let number = |name: &str, default: u64| -> Result<u64, Failure> {
        value(name).map_or(Ok(default), |text| Ok(text.parse()?))
    };
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    Ok(Settings {
        postgres: value("--postgres")
            .ok_or("say where: --postgres postgres://user@host/database")?,
        redis: value("--redis"),
        lease: Duration::from_millis(number("--lease-ms", 60_000)?),
        redeliver: Duration::from_millis(number("--redeliver-ms", 30_000)?),
        max_attempts: u32::try_from(number("--max-attempts", 10)?)?,
        work: Duration::from_millis(number("--work-ms", 0)?),
        is_apart: has("--apart"),
        is_held: has("--hold"),
    })
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let role = arguments.first().map(String::as_str).unwrap_or_default();
    let settings = settings(&arguments)?;
    if role == "setup" {
        books::make_tables(&settings).await?;
        return match &settings.redis {
            Some(redis) => streams::make_group(redis).await,
            None => Ok(()),
        };
    }
    let books = books::Books::open(&settings).await?;
    let redis = || settings.redis.as_deref().ok_or("say where: --redis redis://host/");
    match role {
        "streams" => streams::consume(books, redis()?, &settings).await,
        "queue" => queue::consume(books, &settings).await,
        "orders" => outbox::take_orders(books, &settings).await,
        "relay" => outbox::relay(books, redis()?).await,
        _ => Err("say what: setup, streams, queue, orders or relay".into()),
    }
}
