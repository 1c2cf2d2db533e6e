//! The example payment service on durable tiers: several processes on one server, each killed with
//! -9 again and again while clients retry wherever they like; and one process on a directory or a
//! database file that is killed and started again (T7).
//!
//! `ONCEKEY_CRASH_KEYS`, `ONCEKEY_CRASH_NODES` and `ONCEKEY_CRASH_DEATHS` make it longer.
#![cfg(all(
    unix,
    feature = "axum",
    feature = "embedded",
    feature = "sqlite",
    feature = "postgres",
    feature = "redis"
))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/program.rs"]
mod program;
#[path = "common/redis.rs"]
mod redis_server;

use std::{
    collections::HashMap,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Dice, watchdog_of};
use program::program;
use sqlx::ConnectOptions as _;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
    time::{sleep, timeout},
};

/// How many keys, each sent by one to three clients.
fn keys() -> usize {
    setting("ONCEKEY_CRASH_KEYS", 400)
}

fn nodes() -> usize {
    setting("ONCEKEY_CRASH_NODES", 2)
}

/// How many times a process is killed.
fn deaths() -> usize {
    setting("ONCEKEY_CRASH_DEATHS", 8)
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// One process of the service; it dies with its value.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    async fn start(flags: &[String]) -> Self {
        let mut child = Command::new(program("payments"))
            .args(["serve", "--listen", "127.0.0.1:0", "--lease-ms", "2000"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next_line().await.unwrap().expect("it says where it listens");
        let address = line.strip_prefix("listening on http://").unwrap().to_owned();
        Self { child, address }
    }

    /// Kills it with -9, and waits until it is gone: only then is its place free.
    async fn die(mut self) {
        self.child.kill().await.unwrap();
    }
}

/// The processes, and where to find them.
type Fleet = Arc<Mutex<Vec<String>>>;

/// An answer: its status and its body.
async fn ask(address: &str, key: &str, query: &str) -> Option<(u16, String)> {
    let body = r#"{"amount_cents":1999,"currency":"usd","source":"pm_card"}"#;
    let request = format!(
        "POST /charges{query} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nAuthorization: Bearer acme\r\n\
         Idempotency-Key: \"{key}\"\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    let answer = String::from_utf8(answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    // Cut off by the death of the process: no answer.
    let length: usize = head
        .lines()
        .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok())?;
    (body.len() == length).then(|| (status, body.to_owned()))
}

/// Asks one process after the other until there is a charge.
async fn insist(fleet: &Fleet, key: &str, query: &str, mut dice: Dice) -> String {
    loop {
        let address = {
            let fleet = fleet.lock().unwrap();
            fleet[dice.roll(fleet.len() as u64) as usize].clone()
        };
        match timeout(Duration::from_secs(15), ask(&address, key, query)).await {
            Ok(Some((201, body))) => return body,
            Ok(Some((409 | 500..=599, _)) | None) | Err(_) => {}
            Ok(Some(other)) => panic!("{key}: {other:?}"),
        }
        sleep(Duration::from_millis(10 + dice.roll(40))).await;
    }
}

/// How many claims a process has taken over, as far as it can be asked.
async fn taken_over(address: &str) -> u64 {
    let asked = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(b"GET /stats HTTP/1.0\r\n\r\n").await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let (_, tier) = answer.split_once("\"tier\":")?;
        let (_, number) = tier.split_once("\"taken_over\":")?;
        number.split(',').next()?.parse().ok()
    };
    timeout(Duration::from_secs(15), asked).await.ok().flatten().unwrap_or(0)
}

/// What came of a storm.
struct Storm {
    /// The one answer of each key.
    answers: HashMap<String, String>,
    /// Those that live.
    processes: Vec<Process>,
    /// Takeovers that those which were killed have counted, a moment before.
    counted: u64,
}

/// Sends every key by one to three clients to any process, while one of them after the other is
/// killed.
async fn storm(flags: &[String], query: &'static str, keys: usize, deaths: usize) -> Storm {
    let nodes = nodes();
    let mut processes = Vec::new();
    for _ in 0..nodes {
        processes.push(Process::start(flags).await);
    }
    let addresses = || processes.iter().map(|process| process.address.clone()).collect();
    let fleet: Fleet = Arc::new(Mutex::new(addresses()));
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let clients = Arc::clone(&fleet);
    let sending = tokio::spawn(async move {
        // So many clients at a time.
        let places = Arc::new(tokio::sync::Semaphore::new(32));
        let mut dice = Dice::new(7);
        for n in 0..keys {
            for _ in 0..=dice.roll(3) {
                let place = Arc::clone(&places).acquire_owned().await.unwrap();
                let (fleet, sender) = (Arc::clone(&clients), sender.clone());
                let own = Dice::new(dice.roll(1 << 40));
                tokio::spawn(async move {
                    let key = format!("key-{n}");
                    let answer = insist(&fleet, &key, query, own).await;
                    let _ = sender.send((key, answer));
                    drop(place);
                });
            }
        }
    });
    let mut answers: HashMap<String, String> = HashMap::new();
    let (mut kills, mut counted) = (0, 0);
    loop {
        match timeout(Duration::from_millis(1_000), receiver.recv()).await {
            Ok(None) => break,
            Ok(Some((key, answer))) => {
                let first = answers.entry(key.clone()).or_insert_with(|| answer.clone());
                assert_eq!(*first, answer, "{key} has two answers");
                // The more are answered, the more have died: whatever the machine's speed.
                if answers.len() < (kills + 1) * keys / deaths {
                    continue;
                }
            }
            Err(_) => {}
        }
        let dies = kills % processes.len();
        let next = Process::start(flags).await;
        counted += taken_over(&processes[dies].address).await;
        fleet.lock().unwrap()[dies] = next.address.clone();
        processes[dies] = next;
        kills += 1;
    }
    sending.await.unwrap();
    assert_eq!(answers.len(), keys);
    assert!(kills >= deaths / 2, "{kills} kills");
    println!("{keys} keys, {nodes} processes, {kills} killed");
    Storm { answers, processes, counted }
}

fn flags(tier: &str, on_lapse: &str) -> Vec<String> {
    ["--tier", tier, "--on-lapse", on_lapse].map(str::to_owned).to_vec()
}

/// The id in the JSON of a charge.
fn id_of(charge: &str) -> &str {
    charge.split('"').nth(3).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn t7_processes_on_one_postgres_that_are_killed_charge_each_key_once() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let url = server.options().to_url_lossy().to_string();
    let Storm { answers, .. } =
        storm(&flags(&url, "takeover"), "?delay_ms=5", keys(), deaths()).await;
    let pool = server.pool().await;
    let rows: Vec<(String, String)> =
        sqlx::query_as("SELECT intent, id FROM charges").fetch_all(&pool).await.unwrap();
    assert_eq!(rows.len(), answers.len(), "a row for each key");
    for (intent, id) in rows {
        assert_eq!(id_of(&answers[&intent]), id);
    }
}

/// Notes every takeover beside it: whose claim it was, whose it is, and whether the lease was over.
const NOTES: &str = "
    CREATE TABLE takeovers (key bytea, former bigint, taker bigint, is_lapsed boolean);
    CREATE FUNCTION note_takeover() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.takeovers VALUES (NEW.key, OLD.owner, NEW.owner, NOT EXISTS (
            SELECT FROM oncekey.idempotency_owners o
            WHERE o.owner = OLD.owner AND o.alive_until > clock_timestamp()
        ));
        RETURN NULL;
    END $$;
    CREATE TRIGGER note_takeover AFTER UPDATE ON oncekey.idempotency_keys FOR EACH ROW
        WHEN (OLD.owner <> NEW.owner) EXECUTE FUNCTION note_takeover();
";

/// A charge and its answer in two transactions: who dies between them has charged, and whoever takes
/// the key over charges again. That happens by a takeover of a lapsed claim and in no other way, and
/// each takeover is counted by who made it. No client ever sees two answers.
#[tokio::test(flavor = "multi_thread")]
async fn t7_without_one_transaction_what_runs_twice_was_taken_over_and_counted() {
    let Some(server) = postgres_server::Server::start(&[]) else { return };
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let pool = server.pool().await;
    drop(oncekey::tier::PostgresTier::connect(pool.clone()).await.unwrap());
    sqlx::raw_sql(NOTES).execute(&pool).await.unwrap();
    let url = server.options().to_url_lossy().to_string();
    // A quarter of what the others have: here every death costs a lease, because clients wait for it.
    let (keys, deaths) = (keys() / 4, deaths() / 4);
    let storm = storm(&flags(&url, "takeover"), "?delay_ms=5&apart_ms=20", keys, deaths).await;
    let number = async |query: &'static str| -> i64 {
        sqlx::query_scalar(query).fetch_one(&pool).await.unwrap()
    };
    let unexplained = "SELECT count(*) FROM (
            SELECT intent, count(*) AS rows FROM charges GROUP BY intent
        ) charged WHERE rows > 1 + (
            SELECT count(*) FROM takeovers WHERE key = convert_to(charged.intent, 'UTF8')
        )";
    assert_eq!(number(unexplained).await, 0, "keys that ran again and were not taken over");
    let early = "SELECT count(*) FROM takeovers WHERE NOT is_lapsed";
    assert_eq!(number(early).await, 0, "claims that were taken over while their owner beat");
    // A key that somebody was answered for stands in the books.
    let keys: i64 = number("SELECT count(DISTINCT intent) FROM charges").await;
    assert_eq!(keys, storm.answers.len() as i64);
    let noted = number("SELECT count(*) FROM takeovers").await;
    let twice = number("SELECT count(*) - count(DISTINCT intent) FROM charges").await;
    // The last of those that were killed is taken for alive for the rest of its lease.
    let alive =
        "SELECT count(*) FROM oncekey.idempotency_owners WHERE alive_until > clock_timestamp()";
    while number(alive).await != storm.processes.len() as i64 {
        sleep(Duration::from_millis(50)).await;
    }
    let mut living = 0;
    for process in &storm.processes {
        living += taken_over(&process.address).await;
    }
    println!(
        "{twice} rows beyond one for each key; {noted} takeovers, counted by those that live {living}, \
         by those that were killed, a moment before, {}",
        storm.counted
    );
    assert!(twice <= noted);
    let of_living = "SELECT count(*) FROM takeovers WHERE taker IN (
            SELECT owner FROM oncekey.idempotency_owners WHERE alive_until > clock_timestamp()
        )";
    let of_living = number(of_living).await;
    assert!(storm.counted + living <= noted as u64, "none is counted that did not happen");
    assert_eq!(living, of_living as u64, "who lives has counted all of its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn t7_processes_on_one_redis_that_are_killed_give_each_key_one_answer() {
    if !redis_server::is_installed() {
        return;
    }
    let server = redis_server::Server::durable().await;
    let _watchdog = watchdog_of(Duration::from_secs(1_800));
    let flags = flags(&server.url(), "takeover");
    let Storm { answers, .. } = storm(&flags, "?delay_ms=5", keys(), deaths()).await;
    let ids: std::collections::HashSet<_> = answers.values().map(|body| id_of(body)).collect();
    assert_eq!(ids.len(), answers.len(), "no charge stands for two keys");
}

/// A process that has its place for itself is killed in the middle of charges and started again.
#[tokio::test(flavor = "multi_thread")]
async fn t7_a_process_with_a_tier_of_its_own_forgets_nothing_when_it_is_killed() {
    let _watchdog = watchdog_of(Duration::from_secs(600));
    let directory = std::env::temp_dir().join(format!("oncekey-example-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let at = |name: &str| directory.join(name).display().to_string();
    for tier in [format!("embedded:{}", at("keys")), format!("sqlite:{}", at("charges.db"))] {
        let flags = flags(&tier, "takeover");
        let mut answers: HashMap<String, String> = HashMap::new();
        for round in 0..4 {
            let process = Process::start(&flags).await;
            // What was answered before is answered again.
            for (key, answer) in &answers {
                let again = ask(&process.address, key, "?delay_ms=5").await.unwrap();
                assert_eq!(again, (201, answer.clone()), "{tier}, {key}");
            }
            let mut asked = tokio::task::JoinSet::new();
            for n in 0..30 {
                let (address, key) = (process.address.clone(), format!("{round}-{n}"));
                asked.spawn(async move { (ask(&address, &key, "?delay_ms=5").await, key) });
            }
            while let Some(asked) = asked.join_next().await {
                let (Some((status, body)), key) = asked.unwrap() else { continue };
                assert_eq!(status, 201, "{body}");
                answers.insert(key, body);
                if answers.len() >= 20 * (round + 1) {
                    // The rest is cut off where it is.
                    break;
                }
            }
            process.die().await;
        }
        assert!(answers.len() >= 80);
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[tokio::test]
async fn t7_work_of_three_steps_goes_on_behind_its_last_checkpoint() {
    let _watchdog = watchdog_of(Duration::from_secs(240));
    let output = Command::new(program("checkpoints")).output().await.unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(told.matches("each call was made once").count(), 6, "{told}");
}
