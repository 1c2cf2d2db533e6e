//! The tier in a SQLite file: the contract, what is special to it, and what becomes of it when the
//! process is killed or the file is not as it should be.
//!
//! `ONCEKEY_KILLS=200` runs as many rounds of `kill -9`.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use common::{DAY, HOUR, LEASE, fp, id, outcome, watchdog};
use oncekey::{
    Lapse, ManualClock, Outcome, Store, Token,
    tier::{
        Claimed, Forgotten, Found, Landed, NewClaim, SqliteTier, State, Tier, TierError, Tiered,
        TieredClaim,
    },
};
use sqlx::{
    Row, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

/// A directory of its own, removed in the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("oncekey-sqlite-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("app.db")
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.0.join(format!("app.db{suffix}"))
    }

    async fn pool(&self) -> SqlitePool {
        SqlitePool::connect_with(self.options()).await.unwrap()
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new().filename(self.file()).create_if_missing(true)
    }

    async fn open(&self) -> SqliteTier {
        SqliteTier::open(self.pool().await).await.unwrap()
    }

    async fn open_at(&self, clock: &ManualClock) -> SqliteTier {
        SqliteTier::builder().clock(clock.clone()).open(self.pool().await).await.unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const OWNER: u64 = 7;

fn token(number: u64) -> Token {
    Token::new(OWNER, number)
}

fn claim(number: u64) -> NewClaim {
    NewClaim { token: token(number), fingerprint: fp("a"), max_run: HOUR, retention: DAY }
}

async fn won(tier: &SqliteTier, key: &str, number: u64) {
    tier.beat(OWNER, LEASE).await.unwrap();
    let claimed = tier.claim(id(key), claim(number)).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None });
}

async fn found(tier: &SqliteTier, key: &str) -> Option<Found> {
    tier.look_up(id(key)).await.unwrap()
}

async fn state(tier: &SqliteTier, key: &str) -> Option<State> {
    found(tier, key).await.map(|found| found.state)
}

#[cfg(feature = "conformance")]
mod contract {
    use std::{future::Future, pin::Pin, sync::Arc};

    use oncekey::tier::conformance::{Host, check};

    use super::*;

    struct OneFile {
        place: Place,
        clock: ManualClock,
        /// The tier is open all the time, so that no node finds itself alone.
        _first: SqliteTier,
    }

    impl Host for OneFile {
        fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
            Box::pin(async { Arc::new(self.place.open_at(&self.clock).await) as Arc<dyn Tier> })
        }

        fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            Box::pin(async move { self.clock.advance(by) })
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn t8_the_tier_in_sqlite_keeps_the_contract() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        let host = OneFile { _first: place.open_at(&clock).await, place, clock };
        let failures = check(&host).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

/// Whether the tier's verbs work.
async fn works(tier: &SqliteTier) {
    static NUMBER: AtomicU64 = AtomicU64::new(1 << 32);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let key = format!("works-{number}");
    won(tier, &key, number).await;
    let done = tier.complete(id(&key), token(number), Some(&outcome("works")), DAY).await.unwrap();
    assert_eq!(done, Landed::Done);
    assert_eq!(state(tier, &key).await, Some(State::Completed(outcome("works"))));
}

mod reopened {
    use super::*;

    #[tokio::test]
    async fn t7_what_was_finished_replays_and_what_was_not_is_lapsed_at_once() {
        let _watchdog = watchdog();
        let place = Place::new();
        let tier = place.open().await;
        won(&tier, "finished", 1).await;
        won(&tier, "unfinished", 2).await;
        won(&tier, "held", 3).await;
        let body = Outcome::new(201).header("a", "1").header("a", b"\xff").body("b");
        let _ = tier.complete(id("finished"), token(1), Some(&body), DAY).await.unwrap();
        let left = tier.checkpoint(id("unfinished"), token(2), "half".into()).await.unwrap();
        assert_eq!(left, Landed::Done);
        let _ = tier.hold(id("held"), token(3), DAY).await.unwrap();
        assert_eq!(state(&tier, "unfinished").await, Some(State::InFlight));
        tier.close().await;

        let tier = place.open().await;
        assert_eq!(state(&tier, "finished").await, Some(State::Completed(body)));
        assert_eq!(state(&tier, "unfinished").await, Some(State::Lapsed));
        assert_eq!(state(&tier, "held").await, Some(State::Held));
        tier.beat(8, LEASE).await.unwrap();
        let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
        let taken = tier.take_over(id("unfinished"), token(2), next).await.unwrap();
        assert_eq!(taken, Claimed::Won { checkpoint: Some("half".into()) });
    }

    #[tokio::test]
    async fn t7_while_another_process_has_it_open_owners_live_by_their_heartbeats() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        let other = place.open_at(&clock).await;
        let tier = place.open_at(&clock).await;
        won(&tier, "k", 1).await;
        tier.close().await;
        let tier = place.open_at(&clock).await;
        assert_eq!(state(&tier, "k").await, Some(State::InFlight));
        clock.advance(LEASE);
        assert_eq!(state(&tier, "k").await, Some(State::Lapsed));
        assert_eq!(state(&other, "k").await, Some(State::Lapsed));
    }

    #[tokio::test]
    async fn r23_time_goes_on_from_the_last_stamp_though_the_wall_clock_was_set_back() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        clock.advance(10 * DAY);
        let tier = place.open_at(&clock).await;
        won(&tier, "k", 1).await;
        let _ = tier.complete(id("k"), token(1), Some(&outcome("a")), HOUR).await.unwrap();
        tier.close().await;

        let clock = ManualClock::new();
        let tier = place.open_at(&clock).await;
        assert_eq!(found(&tier, "k").await.unwrap().remaining, HOUR);
        clock.advance(HOUR);
        assert_eq!(found(&tier, "k").await, None);
        won(&tier, "k", 2).await;
    }

    #[tokio::test]
    async fn r23_no_step_of_the_wall_clock_comes_between_two_that_have_it_open() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        clock.advance(DAY);
        let first = place.open_at(&clock).await;
        first.beat(OWNER, LEASE).await.unwrap();
        // Longer than any machine has been up, shorter than since 1970.
        let long = NewClaim { retention: 10_000 * DAY, ..claim(1) };
        let claimed = first.claim(id("k"), long).await.unwrap();
        assert_eq!(claimed, Claimed::Won { checkpoint: None });
        // Whose clock shows the time since the machine was started, as that of all that join.
        let real = place.open().await;
        assert_ne!(found(&real, "k").await, None);
        real.close().await;
        works(&first).await;
    }

    #[tokio::test]
    async fn t4_a_closed_tier_is_unavailable_and_its_clones_are_closed_too() {
        let _watchdog = watchdog();
        let place = Place::new();
        let tier = place.open().await;
        let clone = tier.clone();
        tier.close().await;
        tier.close().await;
        let unavailable = |error| matches!(error, TierError::Unavailable(_));
        assert!(unavailable(clone.beat(OWNER, LEASE).await.unwrap_err()));
        assert!(unavailable(clone.claim(id("k"), claim(1)).await.unwrap_err()));
        assert!(unavailable(clone.look_up(id("k")).await.unwrap_err()));
    }

    #[tokio::test]
    async fn t3_what_has_ended_is_reaped_however_much_it_is() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        let tier = place.open_at(&clock).await;
        tier.beat(OWNER, LEASE).await.unwrap();
        let keys: Vec<String> = (0..1_200).map(|number| format!("k{number}")).collect();
        let claims = keys.iter().zip(0..).map(|(key, number)| tier.claim(id(key), claim(number)));
        for claimed in futures_util::future::join_all(claims).await {
            assert_eq!(claimed.unwrap(), Claimed::Won { checkpoint: None });
        }
        assert_eq!(tier.reap(usize::MAX).await.unwrap(), 0);
        clock.advance(2 * DAY);
        assert_eq!(tier.reap(7).await.unwrap(), 7);
        assert_eq!(tier.reap(usize::MAX).await.unwrap(), 1_193);
        let pool = place.pool().await;
        let left = sqlx::query("SELECT count(*) FROM idempotency_keys").fetch_one(&pool).await;
        assert_eq!(left.unwrap().get::<i64, _>(0), 0);
    }
}

mod within_a_transaction {
    use super::*;

    async fn with_ledger(place: &Place) -> (SqliteTier, SqlitePool) {
        let pool = place.pool().await;
        let table = "CREATE TABLE ledger (key TEXT NOT NULL)";
        sqlx::query(table).execute(&pool).await.unwrap();
        (SqliteTier::open(pool.clone()).await.unwrap(), pool)
    }

    async fn rows(pool: &SqlitePool) -> i64 {
        let count = sqlx::query("SELECT count(*) FROM ledger").fetch_one(pool).await;
        count.unwrap().get(0)
    }

    const ROW: &str = "INSERT INTO ledger (key) VALUES ('k')";

    #[tokio::test]
    async fn t6_a_commit_makes_the_row_and_the_outcome_appear() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = with_ledger(&place).await;
        won(&tier, "k", 1).await;
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query(ROW).execute(&mut *tx).await.unwrap();
        let done = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("a")), DAY).await;
        assert_eq!(done.unwrap(), Landed::Done);
        assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
        tx.commit().await.unwrap();
        let completed = Some(State::Completed(outcome("a")));
        assert_eq!((state(&tier, "k").await, rows(&pool).await), (completed, 1));
        // Who did not get the answer of the commit asks again.
        let again = tier.complete(id("k"), token(1), Some(&outcome("b")), DAY).await.unwrap();
        assert_eq!(again, Landed::Done);
        assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("a"))));
    }

    #[tokio::test]
    async fn t6_a_rollback_leaves_neither() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = with_ledger(&place).await;
        won(&tier, "k", 1).await;
        for is_dropped in [false, true] {
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
            sqlx::query(ROW).execute(&mut *tx).await.unwrap();
            let done = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
            assert_eq!(done.unwrap(), Landed::Done);
            if is_dropped {
                drop(tx)
            } else {
                tx.rollback().await.unwrap()
            }
            assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
        }
        let done = tier.complete(id("k"), token(1), None, DAY).await.unwrap();
        assert_eq!(done, Landed::Done);
        assert_eq!(state(&tier, "k").await, Some(State::NotKept));
    }

    #[tokio::test]
    async fn case_036_a_stale_token_is_lost_there_too() {
        let _watchdog = watchdog();
        let (place, clock) = (Place::new(), ManualClock::new());
        let pool = place.pool().await;
        let tier = SqliteTier::builder().clock(clock.clone()).open(pool.clone()).await.unwrap();
        won(&tier, "k", 1).await;
        clock.advance(LEASE);
        tier.beat(8, LEASE).await.unwrap();
        let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
        let taken = tier.take_over(id("k"), token(1), next).await.unwrap();
        assert_eq!(taken, Claimed::Won { checkpoint: None });
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let late = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("late")), DAY).await;
        let Ok(Landed::Lost(Some(there))) = late else { panic!("{late:?}") };
        assert_eq!((there.token, there.state), (Token::new(8, 1), State::InFlight));
        tx.rollback().await.unwrap();
        assert_eq!(state(&tier, "k").await, Some(State::InFlight));
    }

    #[tokio::test]
    async fn t3_given_up_in_the_middle_it_is_rolled_back_and_the_pool_is_usable() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = with_ledger(&place).await;
        won(&tier, "k", 1).await;
        for polls in 0..40 {
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
            sqlx::query(ROW).execute(&mut *tx).await.unwrap();
            let outcome = outcome("a");
            let mut done =
                Box::pin(tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome), DAY));
            for _ in 0..polls {
                if futures_util::FutureExt::now_or_never(&mut done).is_some() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(done);
            drop(tx);
            assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
        }
        works(&tier).await;
        let done = tier.complete(id("k"), token(1), None, DAY).await.unwrap();
        assert_eq!(done, Landed::Done);
    }

    #[tokio::test]
    async fn t6_what_is_no_such_transaction_is_refused() {
        let _watchdog = watchdog();
        let (place, elsewhere) = (Place::new(), Place::new());
        let (tier, pool) = with_ledger(&place).await;
        let (_other, other) = with_ledger(&elsewhere).await;
        won(&tier, "k", 1).await;
        let unsafer = place.options().synchronous(SqliteSynchronous::Normal);
        let unsafer = SqlitePool::connect_with(unsafer).await.unwrap();

        let mut none = pool.acquire().await.unwrap();
        let refused = tier.complete_in(&mut none, id("k"), token(1), None, DAY).await;
        assert_unusable(refused, "no transaction");
        for (pool, text) in [(&other, "another database"), (&unsafer, "less durable")] {
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
            let refused = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
            assert_unusable(refused, text);
        }
        assert_eq!(state(&tier, "k").await, Some(State::InFlight));
    }

    #[tokio::test]
    async fn t6_a_permit_completes_its_claim_in_it() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = with_ledger(&place).await;
        let store = Store::builder().build().unwrap();
        let store = Tiered::open(store, tier.clone(), Lapse::TakeOver).await.unwrap();
        for (key, is_committed) in [("rolled back", false), ("committed", true)] {
            let TieredClaim::Won(permit) = store.claim(&id(key), fp("a")).await.unwrap() else {
                panic!("not won")
            };
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
            sqlx::query(ROW).execute(&mut *tx).await.unwrap();
            let staged = permit.complete_in(&mut tier.within(&mut tx), outcome("a")).await.unwrap();
            if is_committed {
                tx.commit().await.unwrap();
                staged.publish().await.unwrap();
                assert_eq!(state(&tier, key).await, Some(State::Completed(outcome("a"))));
            } else {
                tx.rollback().await.unwrap();
                staged.rolled_back().await.unwrap();
                assert_eq!(state(&tier, key).await, None);
            }
        }
        assert_eq!(rows(&pool).await, 1);
    }

    #[tokio::test]
    async fn t6_one_that_has_read_before_another_wrote_is_told_to_begin_otherwise() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = with_ledger(&place).await;
        won(&tier, "k", 1).await;
        let mut tx = pool.begin().await.unwrap();
        sqlx::query("SELECT * FROM ledger").fetch_all(&mut *tx).await.unwrap();
        works(&tier).await;
        let refused = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
        let Err(TierError::Unavailable(error)) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
        tx.rollback().await.unwrap();
    }
}

#[track_caller]
fn assert_unusable<T: std::fmt::Debug>(result: Result<T, TierError>, text: &str) {
    match result {
        Err(TierError::Unusable(error)) if error.to_string().contains(text) => {}
        other => panic!("not unusable for `{text}`: {other:?}"),
    }
}

mod locked {
    use super::*;

    async fn impatient(place: &Place) -> (SqliteTier, SqlitePool) {
        let pool = place.pool().await;
        let tier = SqliteTier::builder().patience(Duration::from_millis(30)).open(pool.clone());
        (tier.await.unwrap(), pool)
    }

    #[tokio::test]
    async fn t10_a_heartbeat_waits_for_no_business_transaction() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = impatient(&place).await;
        let tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        // Neither does one who reads.
        tier.beat(OWNER, LEASE).await.unwrap();
        assert_eq!(found(&tier, "k").await, None);
        tx.rollback().await.unwrap();
        won(&tier, "k", 1).await;
    }

    #[tokio::test]
    async fn t6_a_step_waits_for_the_transaction_that_has_the_lock_and_not_for_ever() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (tier, pool) = impatient(&place).await;
        won(&tier, "k", 1).await;
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let done = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("in")), DAY).await;
        assert_eq!(done.unwrap(), Landed::Done);
        let beside = outcome("beside");
        let steps = (0..20).map(|_| tier.complete(id("k"), token(1), Some(&beside), DAY));
        for waited in futures_util::future::join_all(steps).await {
            let Err(TierError::Unavailable(error)) = waited else { panic!("{waited:?}") };
            assert!(error.to_string().contains("locked the database"), "{error}");
        }
        tx.commit().await.unwrap();
        let late = tier.complete(id("k"), token(1), Some(&beside), DAY).await.unwrap();
        assert_eq!(late, Landed::Done);
        assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("in"))));
    }

    #[tokio::test]
    async fn case_100_a_claim_that_waits_for_anothers_commit_tells_what_is_there() {
        let _watchdog = watchdog();
        let place = Place::new();
        let (first, second) = (place.open().await, place.open().await);
        second.beat(8, LEASE).await.unwrap();
        won(&first, "k", 1).await;
        let pool = place.pool().await;
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let done = first.complete_in(&mut tx, id("k"), token(1), Some(&outcome("a")), DAY).await;
        assert_eq!(done.unwrap(), Landed::Done);
        let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
        let claimed = tokio::spawn(async move { second.claim(id("k"), next).await });
        tokio::task::yield_now().await;
        tx.commit().await.unwrap();
        let Claimed::Met(met) = claimed.await.unwrap().unwrap() else { panic!("it won") };
        assert_eq!(met.state, State::Completed(outcome("a")));
    }
}

mod refused {
    use super::*;

    async fn refused(options: SqliteConnectOptions, text: &str) {
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        assert_unusable(SqliteTier::open(pool).await, text);
    }

    #[tokio::test]
    async fn t2_a_database_that_cannot_keep_the_promise_is_not_opened() {
        let _watchdog = watchdog();
        let place = Place::new();
        refused(SqliteConnectOptions::new(), "in memory").await;
        refused(place.options().create_if_missing(false), "cannot be opened").await;
        let elsewhere = place.options().filename(place.0.join("none").join("app.db"));
        refused(elsewhere, "cannot be opened").await;
        // A VFS without shared memory.
        refused(place.options().vfs("unix-dotfile"), "journal mode").await;
        drop(place.open().await);
        refused(place.options().read_only(true), "cannot be written").await;
    }

    #[tokio::test]
    async fn t2_a_pool_that_sets_another_journal_mode_is_refused() {
        let _watchdog = watchdog();
        let place = Place::new();
        let options = place.options().journal_mode(SqliteJournalMode::Delete);
        refused(options, "journal mode").await;
    }

    #[tokio::test]
    async fn t2_tables_of_a_newer_version_or_of_somebody_else_are_left_alone() {
        let _watchdog = watchdog();
        let place = Place::new();
        let pool = place.pool().await;
        sqlx::query("CREATE TABLE idempotency_keys (mine INTEGER)").execute(&pool).await.unwrap();
        assert_unusable(SqliteTier::open(pool.clone()).await, "already exists");
        let names = "SELECT group_concat(name) FROM sqlite_schema";
        let names = sqlx::query(names).fetch_one(&pool).await.unwrap();
        assert_eq!(names.get::<String, _>(0), "idempotency_keys");
        sqlx::query("DROP TABLE idempotency_keys").execute(&pool).await.unwrap();
        SqliteTier::open(pool.clone()).await.unwrap().close().await;
        sqlx::query("UPDATE idempotency_schema SET version = 2").execute(&pool).await.unwrap();
        assert_unusable(SqliteTier::open(pool.clone()).await, "newer version of Oncekey");
        sqlx::query("UPDATE idempotency_schema SET version = -1").execute(&pool).await.unwrap();
        assert_unusable(SqliteTier::open(pool.clone()).await, "version -1");
        sqlx::query("DELETE FROM idempotency_schema").execute(&pool).await.unwrap();
        assert_unusable(SqliteTier::open(pool).await, "is empty");
    }

    #[tokio::test]
    async fn t2_a_full_disk_is_told_and_takes_no_other_step_with_it() {
        let _watchdog = watchdog();
        let place = Place::new();
        place.open().await.close().await;
        let pages = fs::metadata(place.file()).unwrap().len() / 4096 + 20;
        let options = place.options().pragma("max_page_count", pages.to_string());
        let tier = SqliteTier::open(SqlitePoolOptions::new().connect_lazy_with(options)).await;
        let tier = tier.unwrap();
        tier.beat(OWNER, LEASE).await.unwrap();
        let keys: Vec<String> = (0..9).map(|number| format!("k{number}")).collect();
        for (key, number) in keys.iter().zip(0..) {
            won(&tier, key, number).await;
        }
        let (small, large) = (outcome("small"), outcome(&"x".repeat(200_000)));
        let steps = keys.iter().zip(0..).map(|(key, number)| {
            let outcome = if number == 4 { &large } else { &small };
            tier.complete(id(key), token(number), Some(outcome), DAY)
        });
        for (number, done) in futures_util::future::join_all(steps).await.into_iter().enumerate() {
            match number {
                4 => assert_unusable(done, "disk is full"),
                _ => assert_eq!(done.unwrap(), Landed::Done, "{number}"),
            }
        }
        assert_eq!(state(&tier, "k4").await, Some(State::InFlight));
        let done = tier.complete(id("k4"), token(4), None, DAY).await.unwrap();
        assert_eq!(done, Landed::Done);
    }

    #[tokio::test]
    async fn t2_a_damaged_heartbeat_is_an_error_and_gone_with_the_next_opening() {
        let _watchdog = watchdog();
        let place = Place::new();
        let tier = place.open().await;
        won(&tier, "k", 1).await;
        let heartbeat = place.beside("-owners").join(format!("{OWNER:016x}"));
        for bytes in [&b"short"[..], &[7; 16], &[7; 100]] {
            fs::write(&heartbeat, bytes).unwrap();
            assert_unusable(tier.look_up(id("k")).await, "is damaged");
        }
        fs::write(place.beside("-owners").join("origin"), "junk").unwrap();
        assert_unusable(SqliteTier::open(place.pool().await).await, "is damaged");
        tier.close().await;
        let tier = place.open().await;
        assert_eq!(state(&tier, "k").await, Some(State::Lapsed));
        assert_eq!(tier.forget(id("k"), false).await.unwrap(), Forgotten::Gone);
    }
}

mod damaged {
    use std::panic::AssertUnwindSafe;

    use futures_util::FutureExt;

    use super::*;
    use crate::common::Dice;

    const KEYS: u64 = 12;

    fn body(number: u64) -> Outcome {
        outcome(&format!("{number}:").repeat(200 + 100 * number as usize))
    }

    fn copy(from: &Place) -> Place {
        let place = Place::new();
        for suffix in ["", "-wal", "-shm"] {
            fs::copy(from.beside(suffix), place.beside(suffix)).unwrap();
        }
        place
    }

    /// Opens a copy that was damaged and looks at all that was in it.
    async fn is_whole_or_an_error(place: &Place, how: &str) -> bool {
        let pool = SqlitePoolOptions::new().connect_lazy_with(place.options());
        let Ok(tier) = SqliteTier::open(pool.clone()).await else { return false };
        let mut is_whole = true;
        for number in 0..KEYS {
            match tier.look_up(id(&format!("k{number}"))).await {
                Ok(Some(Found { state: State::Completed(found), .. })) => {
                    assert_eq!(found, body(number), "{how}: other bytes");
                }
                Ok(_) => {}
                Err(_) => is_whole = false,
            }
        }
        let _ = tier.beat(OWNER, LEASE).await;
        is_whole &= tier.claim(id("new"), claim(99)).await.is_ok();
        is_whole &= tier.reap(10).await.is_ok();
        tier.close().await;
        pool.close().await;
        is_whole
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn t7_cut_and_garbled_files_are_whole_or_an_error() {
        let _watchdog = watchdog();
        let place = Place::new();
        let tier = place.open().await;
        for number in 0..KEYS {
            let key = format!("k{number}");
            won(&tier, &key, number).await;
            let body = body(number);
            let _ = tier.complete(id(&key), token(number), Some(&body), DAY).await.unwrap();
            if number == KEYS / 2 {
                // Half of it stands in the database, half in the log.
                let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
                sqlx::query(checkpoint).execute(&place.pool().await).await.unwrap();
            }
        }
        let mut dice = Dice::new(5);
        let (mut whole, mut errors) = (0, 0);
        for round in 0..90 {
            let damaged = copy(&place);
            let suffix = ["", "-wal", "-shm"][round % 3];
            let mut bytes = fs::read(damaged.beside(suffix)).unwrap();
            let at = dice.roll(bytes.len() as u64) as usize;
            let how = match dice.roll(4) {
                0 => {
                    bytes.truncate(at);
                    "cut"
                }
                1 => {
                    bytes[at..].iter_mut().for_each(|byte| *byte = dice.roll(256) as u8);
                    "garbled from there on"
                }
                2 => {
                    let end = bytes.len().min(at + 4096);
                    bytes[at..end].fill(0);
                    "a page of zeros"
                }
                _ => {
                    bytes[at] ^= 1 << dice.roll(8);
                    "a bit"
                }
            };
            fs::write(damaged.beside(suffix), bytes).unwrap();
            let how = format!("round {round}, app.db{suffix} at {at}: {how}");
            let end = AssertUnwindSafe(is_whole_or_an_error(&damaged, &how)).catch_unwind().await;
            match end {
                Ok(true) => whole += 1,
                Ok(false) => errors += 1,
                Err(panic) => {
                    eprintln!("{how}");
                    std::panic::resume_unwind(panic)
                }
            }
        }
        assert!(whole > 5 && errors > 5, "{whole} whole, {errors} errors");
    }

    #[tokio::test]
    async fn r16_an_outcome_that_the_disk_has_changed_is_never_replayed() {
        let _watchdog = watchdog();
        let place = Place::new();
        let tier = place.open().await;
        won(&tier, "k", 1).await;
        let kept = outcome("a").header("b", "c");
        let _ = tier.complete(id("k"), token(1), Some(&kept), DAY).await.unwrap();
        let pool = place.pool().await;
        for change in ["body = x'62'", "status = 200", "headers = x'00'", "status = NULL"] {
            let mut tx = pool.begin().await.unwrap();
            let change = format!("UPDATE idempotency_keys SET {change}");
            let change = sqlx::query(sqlx::AssertSqlSafe(change));
            change.execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
            assert_unusable(tier.look_up(id("k")).await, "damaged");
            assert_unusable(tier.claim(id("k"), claim(2)).await, "damaged");
        }
    }
}

/// Rounds of `kill -9` under load. The child is this program again.
mod killed {
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
}
