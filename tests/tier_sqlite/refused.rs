//! What is not opened, and full or damaged places.

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
