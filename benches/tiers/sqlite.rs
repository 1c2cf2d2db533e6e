//! SQLite: against an `INSERT` and an `UPDATE`, each a transaction of its own, through the pool of the
//! user's that the tier was opened with.

use oncekey::tier::{Durability, SqliteTier};
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use crate::load::{ACCOUNT, Directory, ENDPOINT, Settings, compare, key};

pub async fn measure(settings: &Settings) {
    let directory = Directory::new();
    let (durability, synchronous) = match settings.synced {
        true => (Durability::PowerLoss, SqliteSynchronous::Full),
        false => (Durability::KilledProcess, SqliteSynchronous::Normal),
    };
    let options = SqliteConnectOptions::new()
        .filename(directory.path().join("db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(synchronous);
    // One connection writes at a time: more would only wait for the lock, by sleeping.
    let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options.clone());
    let pool = pool.await.unwrap();
    let tiers = SqlitePool::connect_with(options).await.unwrap();
    let tier = SqliteTier::builder().durability(durability).open(tiers).await.unwrap();
    for statement in [
        "CREATE TABLE by_hand (account BLOB NOT NULL, endpoint BLOB NOT NULL, key BLOB NOT NULL, \
         fingerprint BLOB NOT NULL, state INTEGER NOT NULL, status INTEGER, headers BLOB, \
         body BLOB, created INTEGER NOT NULL, settled INTEGER, expires INTEGER NOT NULL, \
         UNIQUE (account, endpoint, key))",
        "CREATE INDEX by_hand_expires ON by_hand (expires)",
    ] {
        sqlx::query(statement).execute(&pool).await.unwrap();
    }
    let by_hand = move |number| {
        let pool = pool.clone();
        async move {
            let key = key(number);
            let inserted = sqlx::query(
                "INSERT INTO by_hand (account, endpoint, key, fingerprint, state, created, expires) \
                 VALUES ($1, $2, $3, $4, 0, unixepoch(), unixepoch() + 87300) \
                 ON CONFLICT DO NOTHING",
            )
            .bind(ACCOUNT.as_bytes())
            .bind(ENDPOINT.as_bytes())
            .bind(key.as_bytes())
            .bind(&[7_u8; 40][..])
            .execute(&pool)
            .await
            .unwrap();
            assert_eq!(inserted.rows_affected(), 1);
            let updated = sqlx::query(
                "UPDATE by_hand SET state = 2, status = 201, headers = $4, body = $5, \
                 settled = unixepoch(), expires = unixepoch() + 86400 \
                 WHERE account = $1 AND endpoint = $2 AND key = $3",
            )
            .bind(ACCOUNT.as_bytes())
            .bind(ENDPOINT.as_bytes())
            .bind(key.as_bytes())
            .bind(&[b'h'; 40][..])
            .bind(&[b'x'; 150][..])
            .execute(&pool)
            .await
            .unwrap();
            assert_eq!(updated.rows_affected(), 1);
        }
    };
    compare("sqlite", settings, tier, by_hand).await;
}
