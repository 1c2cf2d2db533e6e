//! Rounds of `kill -9` under load. The child is this program again.

use std::{
    collections::BTreeSet,
    env,
    io::{BufRead, BufReader, Write},
    ops::Range,
    process::{Child, Command, Stdio},
    sync::Arc,
};

use super::*;
use crate::common::{Dice, watchdog_of};

const PLACE: &str = "ONCEKEY_KILLED_IN";
const ROUND: &str = "ONCEKEY_KILLED_ROUND";
/// The identities that come new with each round; some of them are left for later ones.
const FRESH: u64 = 60;
/// How many of the last identities are asked for.
const OPEN: u64 = 5 * FRESH;
const TASKS: u64 = 8;

fn name(number: u64) -> String {
    format!("k{number}")
}

/// The numbers of the identities that a round asks for.
fn asked_in(round: u64) -> Range<u64> {
    round * FRESH..round * FRESH + OPEN
}

fn options(directory: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new().filename(directory.join("app.db")).create_if_missing(true)
}

/// Not a test of its own: what is killed.
#[test]
fn child() {
    let Ok(directory) = env::var(PLACE) else { return };
    let round: u64 = env::var(ROUND).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async move {
        let pool = SqlitePool::connect_with(options(Path::new(&directory))).await.unwrap();
        let tier = SqliteTier::open(pool.clone()).await.unwrap();
        tier.beat(round, LEASE).await.unwrap();
        let number = Arc::new(AtomicU64::new(0));
        let tasks = (0..TASKS).map(|task| {
            let (pool, tier, number) = (pool.clone(), tier.clone(), Arc::clone(&number));
            let dice = Dice::new(round * TASKS + task);
            tokio::spawn(work(pool, tier, round, number, dice))
        });
        futures_util::future::join_all(tasks).await;
    });
}

/// Claims and completes, or takes over what a killed one has left, until it is killed.
async fn work(
    pool: SqlitePool,
    tier: SqliteTier,
    round: u64,
    numbers: Arc<AtomicU64>,
    mut dice: Dice,
) {
    loop {
        let key = name(asked_in(round).start + dice.roll(OPEN));
        let token = Token::new(round, numbers.fetch_add(1, Ordering::Relaxed));
        let new = NewClaim { token, ..claim(0) };
        match tier.claim(id(&key), new).await.unwrap() {
            Claimed::Won { .. } => {}
            Claimed::Met(met) if met.state == State::Lapsed => {
                let taken = tier.take_over(id(&key), met.token, new).await.unwrap();
                if !matches!(taken, Claimed::Won { .. }) {
                    continue;
                }
            }
            Claimed::Met(_) => {
                // There is always something that is not done yet.
                let _ = tier.release(id("none"), token).await.unwrap();
                say(&format!("met {key}"));
                continue;
            }
        }
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let row = sqlx::query("INSERT INTO ledger (key) VALUES (?1)").bind(&key);
        row.execute(&mut *tx).await.unwrap();
        let outcome = outcome(&key);
        let done = tier.complete_in(&mut tx, id(&key), token, Some(&outcome), DAY).await;
        assert_eq!(done.unwrap(), Landed::Done);
        tx.commit().await.unwrap();
        say(&format!("ack {key}"));
    }
}

/// In one write, so that a line is whole or not there.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

fn spawn(place: &Place, round: u64) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "killed::child", "--nocapture"])
        .env(PLACE, &place.0)
        .env(ROUND, round.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn t7_no_kill_loses_an_acknowledged_outcome_or_runs_anything_twice() {
    let rounds = env::var("ONCEKEY_KILLS").map_or(6, |rounds| rounds.parse().unwrap());
    let _watchdog = watchdog_of(Duration::from_secs(240 + 10 * rounds));
    let place = Place::new();
    let pool = place.pool().await;
    let table = "CREATE TABLE ledger (key TEXT NOT NULL)";
    sqlx::query(table).execute(&pool).await.unwrap();
    place.open().await.close().await;
    pool.close().await;

    let mut dice = Dice::new(11);
    let mut acknowledged = BTreeSet::new();
    let (mut lapsed, mut committed) = (0, 0);
    for round in 1..=rounds {
        let mut child = spawn(&place, round);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Random moments of the work, not of the clock: so many steps, and then at once.
        let mut left = dice.roll(2 * FRESH);
        let mut took = |line: &str| {
            line.strip_prefix("ack ").is_some_and(|key| acknowledged.insert(key.to_owned()))
        };
        while left > 0 {
            let line = lines.next().expect("the child has ended by itself").unwrap();
            left -= u64::from(took(&line) || line.starts_with("met "));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        lines.map_while(Result::ok).for_each(|line| _ = took(&line));

        let pool = place.pool().await;
        let tier = SqliteTier::open(pool.clone()).await.unwrap();
        let rows = "SELECT key, count(*) FROM ledger GROUP BY key";
        let rows = sqlx::query(rows).fetch_all(&pool).await.unwrap();
        let mut ran = BTreeSet::new();
        for row in rows {
            let (key, count): (String, i64) = (row.get(0), row.get(1));
            assert_eq!(count, 1, "round {round}: {key} ran {count} times");
            ran.insert(key);
        }
        assert!(ran.is_superset(&acknowledged), "round {round}: an acknowledged row is lost");
        committed = ran.len();
        let first = if round == rounds { 0 } else { asked_in(round).start };
        for number in first..asked_in(round).end {
            let key = name(number);
            match state(&tier, &key).await {
                Some(State::Completed(found)) => {
                    assert!(ran.contains(&key), "round {round}: {key} has an outcome only");
                    assert_eq!(found, outcome(&key));
                }
                other => {
                    assert!(!ran.contains(&key), "round {round}: {key} has a row only");
                    let is_lapsed = other == Some(State::Lapsed);
                    assert!(is_lapsed || other.is_none(), "round {round}: {key}: {other:?}");
                    lapsed += u64::from(is_lapsed);
                }
            }
        }
        tier.close().await;
        pool.close().await;
    }
    println!(
        "{rounds} kills: {committed} committed, {} of them acknowledged, {lapsed} times lapsed",
        acknowledged.len()
    );
    assert!(lapsed > 0 && acknowledged.len() > 5 * rounds as usize, "too little happened");
}
