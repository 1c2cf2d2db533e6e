//! The example workers as processes on real servers: messages that are delivered several times to
//! several workers, which are killed with -9 in the middle of their work, and two that are poison. What
//! was booked stands in a table that would take an intent twice.
//!
//! `ONCEKEY_WORKER_MESSAGES`, `ONCEKEY_WORKERS` and `ONCEKEY_WORKER_DEATHS` make it longer;
//! `ONCEKEY_WORKER_APART` also measures what happens without one transaction.
#![cfg(all(
    unix,
    feature = "conformance",
    feature = "postgres",
    feature = "redis",
    feature = "worker"
))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/program.rs"]
mod program;
#[path = "common/redis.rs"]
mod redis_server;

use std::{os::unix::process::ExitStatusExt as _, process::Stdio, time::Duration};

use common::{Dice, watchdog_of};
use oncekey::{
    Fingerprint, Identity, Lapse, Store,
    tier::{PostgresTier, Tiered, TieredClaim},
};
use program::program;
use redis::{
    AsyncCommands as _,
    aio::MultiplexedConnection,
    cmd,
    streams::{StreamId, StreamRangeReply},
};
use sqlx::{ConnectOptions as _, PgPool};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

/// How many messages, each sent one to four times.
fn messages() -> usize {
    setting("ONCEKEY_WORKER_MESSAGES", 300)
}

/// How many processes of a role.
fn workers() -> usize {
    setting("ONCEKEY_WORKERS", 2)
}

/// How many times a process is killed.
fn deaths() -> usize {
    setting("ONCEKEY_WORKER_DEATHS", 6)
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// The processes; they die with it.
struct Fleet {
    processes: Vec<(&'static str, Child)>,
    flags: Vec<String>,
    dice: Dice,
    kills: usize,
    /// Ended by a poison message.
    poisoned: usize,
}

impl Fleet {
    async fn start(roles: &[&'static str], flags: Vec<String>) -> Self {
        let setup =
            Command::new(program("workers")).arg("setup").args(&flags).status().await.unwrap();
        assert!(setup.success());
        let dice = Dice::new(7);
        let mut fleet = Self { processes: Vec::new(), flags, dice, kills: 0, poisoned: 0 };
        for role in roles {
            fleet.add(role);
        }
        fleet
    }

    fn spawn(&self, role: &str) -> Child {
        Command::new(program("workers"))
            .arg(role)
            .args(&self.flags)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    }

    fn add(&mut self, role: &'static str) {
        let process = self.spawn(role);
        self.processes.push((role, process));
    }

    /// Kills one of them with -9, and puts another in its place.
    async fn kill_one(&mut self) {
        let at = self.dice.roll(self.processes.len() as u64) as usize;
        self.processes[at].1.kill().await.unwrap();
        self.kills += 1;
        self.replace(at);
    }

    /// Puts others in the place of those that a poison message has ended.
    fn revive(&mut self) {
        for at in 0..self.processes.len() {
            if let Some(status) = self.processes[at].1.try_wait().unwrap() {
                let role = self.processes[at].0;
                assert!(status.signal().is_some(), "{role} gave up: {status}");
                self.poisoned += 1;
                self.replace(at);
            }
        }
    }

    fn replace(&mut self, at: usize) {
        let role = self.processes[at].0;
        self.processes[at].1 = self.spawn(role);
    }
}

/// Where messages are put, and whether any is left.
enum Line {
    Stream(MultiplexedConnection),
    /// The topic.
    Table(&'static str),
}

struct Shop {
    pool: PgPool,
    fleet: Fleet,
    line: Line,
    /// What is behind the outbox.
    stream: Option<MultiplexedConnection>,
    /// How many deliveries the messages made, redeliveries not counted.
    sent: usize,
}

/// What became of the messages.
#[derive(Debug, Default)]
struct Told {
    rows: i64,
    intents: i64,
    cents: i64,
}

impl Shop {
    async fn send(&mut self, messages: &[(String, String)]) {
        self.sent += messages.len();
        match &mut self.line {
            Line::Stream(redis) => {
                let mut all = redis::pipe();
                for (intent, cents) in messages {
                    let add = all.cmd("XADD").arg("bookings").arg("*");
                    add.arg("intent").arg(intent).arg("cents").arg(cents).ignore();
                }
                all.exec_async(redis).await.unwrap();
            }
            Line::Table(topic) => {
                let (intents, cents): (Vec<_>, Vec<_>) = messages.iter().cloned().unzip();
                let all = "INSERT INTO queue (topic, intent, cents) \
                           SELECT $1, * FROM unnest($2::text[], $3::text[])";
                sqlx::query(all)
                    .bind(*topic)
                    .bind(intents)
                    .bind(cents)
                    .execute(&self.pool)
                    .await
                    .unwrap();
            }
        }
    }

    async fn count(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(&self.pool).await.unwrap()
    }

    async fn told(&self, table: &str) -> Told {
        let query = match table {
            "orders" => {
                "SELECT count(*), count(DISTINCT intent), coalesce(sum(cents), 0)::bigint FROM orders"
            }
            _ => {
                "SELECT count(*), count(DISTINCT intent), coalesce(sum(cents), 0)::bigint FROM ledger"
            }
        };
        let (rows, intents, cents) = sqlx::query_as(query).fetch_one(&self.pool).await.unwrap();
        Told { rows, intents, cents }
    }

    /// How many messages are on their way.
    async fn left(&mut self) -> i64 {
        let tables = "SELECT (SELECT count(*) FROM queue) + (SELECT count(*) FROM outbox)";
        let mut left = self.count(tables).await;
        let stream = match &mut self.line {
            Line::Stream(redis) => Some(redis),
            Line::Table(_) => self.stream.as_mut(),
        };
        if let Some(redis) = stream {
            left += cmd("XLEN").arg("bookings").query_async::<i64>(redis).await.unwrap();
        }
        left
    }

    /// Sends all messages, one to four times each, some long after they were done; and kills a worker
    /// whenever half of what was sent last is done.
    async fn storm(&mut self) {
        let (messages, deaths) = (messages(), deaths());
        let mut dice = Dice::new(11);
        let mut later: Vec<usize> = Vec::new();
        let message = |n: &usize| (format!("m-{n}"), (n + 1).to_string());
        let mut bad = bad();
        for round in 0..deaths {
            let new = round * messages / deaths..(round + 1) * messages / deaths;
            let half = (new.start + new.len() / 2) as i64;
            let mut now: Vec<usize> = later.split_off(later.len() / 2);
            for n in new {
                now.push(n);
                for _ in 0..dice.roll(4) {
                    if dice.roll(2) == 0 { now.push(n) } else { later.push(n) }
                }
            }
            for last in (1..now.len()).rev() {
                now.swap(last, dice.roll(last as u64 + 1) as usize);
            }
            let mut now: Vec<_> = now.iter().map(message).collect();
            // Among good ones, which are in one batch with them.
            for bad in bad.drain(..) {
                now.insert(dice.roll(now.len() as u64) as usize, bad);
            }
            self.send(&now).await;
            while self.count("SELECT count(*) FROM ledger").await < half {
                self.fleet.revive();
                sleep(Duration::from_millis(2)).await;
            }
            self.fleet.kill_one().await;
        }
        self.send(&later.iter().map(message).collect::<Vec<_>>()).await;
        while self.left().await > 0 {
            self.fleet.revive();
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// What was set aside, in order; each as often as it was.
    async fn dead(&mut self) -> Vec<String> {
        let mut dead: Vec<String> =
            sqlx::query_scalar("SELECT intent FROM dead").fetch_all(&self.pool).await.unwrap();
        let stream = match &mut self.line {
            Line::Stream(redis) => Some(redis),
            Line::Table(_) => self.stream.as_mut(),
        };
        if let Some(redis) = stream {
            let entries: StreamRangeReply = redis.xrange_all("bookings:dead").await.unwrap();
            let intent = |entry: StreamId| entry.get::<String>("intent").unwrap();
            dead.extend(entries.ids.into_iter().map(intent));
        }
        dead.sort_unstable();
        dead
    }

    fn say(&self, what: &str, since: Instant) {
        let Fleet { kills, poisoned, processes, .. } = &self.fleet;
        println!(
            "{what}: {} messages sent {} times, {} processes, {kills} killed, {poisoned} poisoned, {} s",
            messages(),
            self.sent,
            processes.len(),
            since.elapsed().as_secs()
        );
    }
}

/// A lease and a time to redeliver that are short; and what the work takes beside the database.
fn flags(servers: &[String], others: &[&str]) -> Vec<String> {
    let short = ["--lease-ms", "1000", "--redeliver-ms", "2000", "--max-attempts", "5"];
    let work = ["--work-ms", "5"];
    let text = short.iter().chain(&work).chain(others).map(|flag| (*flag).to_owned());
    servers.iter().cloned().chain(text).collect()
}

fn postgres(server: &postgres_server::Server) -> [String; 2] {
    ["--postgres".to_owned(), server.options().to_url_lossy().to_string()]
}

/// Each intent has one row, with its amount.
fn exactly_once(told: &Told) {
    let messages = messages() as i64;
    assert_eq!((told.rows, told.intents), (messages, messages), "{told:?}");
    assert_eq!(told.cents, messages * (messages + 1) / 2);
}

/// Messages that fail each time: one ends its worker, one panics, one has no amount, and one no key.
fn bad() -> Vec<(String, String)> {
    let no_key = "k".repeat(300);
    [("poison", "crash"), ("panics", "panic"), ("malformed", "a few"), (&no_key, "1")]
        .map(|(intent, cents)| (intent.to_owned(), cents.to_owned()))
        .into()
}

fn only_bad() -> Vec<String> {
    let mut bad: Vec<String> = bad().into_iter().map(|(intent, _)| intent).collect();
    bad.sort_unstable();
    bad
}

fn roles(role: &'static str) -> Vec<&'static str> {
    vec![role; workers()]
}

#[tokio::test(flavor = "multi_thread")]
async fn t7_workers_of_a_redis_stream_that_are_killed_book_each_message_once() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    if !redis_server::is_installed() {
        return;
    }
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let redis = redis_server::Server::durable().await;
    let servers = [&postgres(&server)[..], &["--redis".to_owned(), redis.url()]].concat();
    let fleet = Fleet::start(&roles("streams"), flags(&servers, &[])).await;
    let line = Line::Stream(redis.connect().await);
    let mut shop = Shop { pool: server.pool().await, fleet, line, stream: None, sent: 0 };
    let since = Instant::now();
    shop.storm().await;
    shop.say("stream", since);
    exactly_once(&shop.told("ledger").await);
    assert_eq!(shop.dead().await, only_bad());
    assert!(shop.fleet.poisoned >= 5, "it was delivered again after it had killed its worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn t7_workers_of_a_postgres_queue_that_are_killed_book_each_message_once() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let fleet = Fleet::start(&roles("queue"), flags(&postgres(&server), &[])).await;
    let line = Line::Table("book");
    let mut shop = Shop { pool: server.pool().await, fleet, line, stream: None, sent: 0 };
    let since = Instant::now();
    shop.storm().await;
    shop.say("queue", since);
    exactly_once(&shop.told("ledger").await);
    assert_eq!(shop.dead().await, only_bad());
    assert!(shop.fleet.poisoned >= 5, "it was delivered again after it had killed its worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn t6_orders_and_the_messages_about_them_are_there_once_though_all_are_killed() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    if !redis_server::is_installed() {
        return;
    }
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let redis = redis_server::Server::durable().await;
    let servers = [&postgres(&server)[..], &["--redis".to_owned(), redis.url()]].concat();
    let roles = [roles("orders"), vec!["relay", "streams"]].concat();
    let fleet = Fleet::start(&roles, flags(&servers, &[])).await;
    let stream = Some(redis.connect().await);
    let line = Line::Table("order");
    let mut shop = Shop { pool: server.pool().await, fleet, line, stream, sent: 0 };
    let since = Instant::now();
    shop.storm().await;
    shop.say("outbox", since);
    exactly_once(&shop.told("orders").await);
    exactly_once(&shop.told("ledger").await);
    assert_eq!(shop.dead().await, only_bad());
}

/// An entry behind many that a living consumer works on is found all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_stream_is_looked_through_to_its_end_for_what_was_left_behind() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    if !redis_server::is_installed() {
        return;
    }
    let _watchdog = watchdog_of(Duration::from_secs(120));
    let redis = redis_server::Server::durable().await;
    let servers = [&postgres(&server)[..], &["--redis".to_owned(), redis.url()]].concat();
    // So long that those in work do not become idle meanwhile.
    let flags = [servers, ["--redeliver-ms", "3600000"].map(str::to_owned).into()].concat();
    let fleet = Fleet::start(&[], flags).await;
    let line = Line::Stream(redis.connect().await);
    let mut shop = Shop { pool: server.pool().await, fleet, line, stream: None, sent: 0 };
    let messages: Vec<_> = (0..100).map(|n| (format!("m-{n}"), "1".to_owned())).collect();
    shop.send(&messages).await;
    let Line::Stream(line) = &mut shop.line else { unreachable!() };
    let mut read = cmd("XREADGROUP");
    read.arg(&["GROUP", "books", "busy", "COUNT", "100", "STREAMS", "bookings", ">"]);
    let _: redis::Value = read.query_async(line).await.unwrap();
    // The last was left behind long ago.
    let entries: StreamRangeReply = line.xrange_all("bookings").await.unwrap();
    let last = &entries.ids.last().unwrap().id;
    let mut age = cmd("XCLAIM");
    age.arg("bookings").arg("books").arg("busy").arg(0).arg(last).arg("IDLE").arg(7_200_000);
    let _: redis::Value = age.query_async(line).await.unwrap();
    shop.fleet.add("streams");
    while shop.count("SELECT count(*) FROM ledger").await == 0 {
        shop.fleet.revive();
        sleep(Duration::from_millis(10)).await;
    }
    let booked: String =
        sqlx::query_scalar("SELECT intent FROM ledger").fetch_one(&shop.pool).await.unwrap();
    assert_eq!(booked, "m-99");
}

/// What is set aside is out of the queue, or neither. And a delivery whose work never began, because
/// another owner was in the way, is no attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_set_aside_whole_and_by_its_attempts() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let _watchdog = watchdog_of(Duration::from_secs(120));
    let once = ["--max-attempts", "1"].map(str::to_owned);
    let flags = [&postgres(&server)[..], &once].concat();
    let fleet = Fleet::start(&[], flags).await;
    let pool = server.pool().await;
    let line = Line::Table("book");
    let mut shop = Shop { pool, fleet, line, stream: None, sent: 0 };
    // Nothing leaves the queue.
    let shut = "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE 'it may not leave'; END $$;
                CREATE TRIGGER no BEFORE DELETE ON queue FOR EACH ROW EXECUTE FUNCTION no()";
    sqlx::raw_sql(shut).execute(&shop.pool).await.unwrap();
    let no_key = ("k".repeat(300), "1".to_owned());
    shop.send(std::slice::from_ref(&no_key)).await;
    let status = Command::new(program("workers"))
        .arg("queue")
        .args(&shop.fleet.flags)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .status()
        .await
        .unwrap();
    assert!(!status.success(), "it cannot set the message aside");
    assert_eq!(shop.dead().await, [""; 0]);
    sqlx::raw_sql("DROP TRIGGER no ON queue").execute(&shop.pool).await.unwrap();

    // An owner that does nothing for long, and a message that is delivered meanwhile.
    let tier = PostgresTier::connect(shop.pool.clone()).await.unwrap();
    let owner = Store::builder().build().unwrap();
    let owner = Tiered::open(owner, tier, Lapse::TakeOver).await.unwrap();
    let id = Identity::new("shop", "book", "slow").unwrap();
    let claim = owner.claim(&id, Fingerprint::request("", "book", b"1")).await.unwrap();
    let TieredClaim::Won(permit) = claim else { panic!("{claim:?}") };
    shop.send(&[("slow".to_owned(), "1".to_owned())]).await;
    shop.fleet.add("queue");
    shop.fleet.add("queue");
    // Two deliveries, to both: one attempt may be made.
    let in_work = "SELECT count(*) FROM queue WHERE intent = 'slow' AND due > clock_timestamp()";
    for delivery in 1..=2 {
        while shop.count(in_work).await == 0 {
            sleep(Duration::from_millis(2)).await;
        }
        if delivery == 2 {
            break;
        }
        let again = "UPDATE queue SET due = clock_timestamp() WHERE intent = 'slow'";
        sqlx::query(again).execute(&shop.pool).await.unwrap();
    }
    permit.release().await.unwrap();
    while shop.left().await > 0 {
        shop.fleet.revive();
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(shop.dead().await, [no_key.0]);
    assert_eq!(shop.told("ledger").await.rows, 1);
}

/// Without one transaction a killed worker leaves rows that no outcome stands for. Held, none of them is
/// booked again, and an operator has to look at them.
#[tokio::test(flavor = "multi_thread")]
async fn r10_without_one_transaction_what_a_killed_worker_had_begun_is_held_and_not_run_again() {
    apart(true).await;
    if std::env::var_os("ONCEKEY_WORKER_APART").is_some() {
        // Taken over, they are booked again: how many is what is measured here.
        apart(false).await;
    }
}

async fn apart(is_held: bool) {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let others: &[&str] = if is_held { &["--apart", "--hold"] } else { &["--apart"] };
    let fleet = Fleet::start(&roles("queue"), flags(&postgres(&server), others)).await;
    let line = Line::Table("book");
    let mut shop = Shop { pool: server.pool().await, fleet, line, stream: None, sent: 0 };
    let since = Instant::now();
    shop.storm().await;
    shop.say(if is_held { "apart, held" } else { "apart, taken over" }, since);
    let told = shop.told("ledger").await;
    let twice =
        "SELECT count(*) FROM (SELECT FROM ledger GROUP BY intent HAVING count(*) > 1) AS twice";
    let unknown = "SELECT count(DISTINCT intent) FROM dead WHERE intent LIKE 'm-%'";
    let done = "SELECT count(DISTINCT dead.intent) FROM dead JOIN ledger USING (intent)";
    let (twice, unknown, done) =
        (shop.count(twice).await, shop.count(unknown).await, shop.count(done).await);
    println!("{twice} booked more than once; {unknown} set aside, of which {done} had been booked");
    // Nothing is lost.
    assert_eq!(told.intents + unknown - done, messages() as i64);
    if is_held {
        assert_eq!(twice, 0, "{told:?}");
    } else {
        assert_eq!(unknown, 0);
    }
}
