//! Postgres: against an `INSERT .. ON CONFLICT` and an `UPDATE` on an equal table, through the same
//! pool of 16 connections.

#[path = "../../tests/common/postgres.rs"]
mod server;

use oncekey::tier::{Durability, PostgresTier};

use crate::load::{ACCOUNT, ENDPOINT, Settings, compare, key};

pub async fn measure(settings: &Settings) {
    let synced: &[&str] = if settings.synced { &[] } else { server::FAST };
    let Some(server) = server::Server::start(synced) else { return };
    let pool = server.pool().await;
    let durability = match settings.synced {
        true => Durability::PowerLoss,
        false => Durability::KilledProcess,
    };
    let builder = PostgresTier::builder().durability(durability);
    let tier = builder.connect(pool.clone()).await.unwrap();
    let equal = "CREATE TABLE by_hand (LIKE oncekey.idempotency_keys INCLUDING ALL)";
    sqlx::query(equal).execute(&pool).await.unwrap();
    let by_hand = move |number| {
        let pool = pool.clone();
        async move {
            let key = key(number);
            let inserted = sqlx::query(
                "INSERT INTO by_hand (account, endpoint, key, scheme, fingerprint, owner, number, \
                 state, created_at, due_at, expires_at) VALUES ($1, $2, $3, $4, $5, $6, $7, 0, \
                 now(), now() + interval '15 min', now() + interval '1 day') \
                 ON CONFLICT (account, endpoint, key) DO NOTHING",
            )
            .bind(ACCOUNT.as_bytes())
            .bind(ENDPOINT.as_bytes())
            .bind(key.as_bytes())
            .bind(&b"request1"[..])
            .bind(&[7_u8; 32][..])
            .bind(1_i64)
            .bind(number.cast_signed())
            .execute(&pool)
            .await
            .unwrap();
            assert_eq!(inserted.rows_affected(), 1);
            let updated = sqlx::query(
                "UPDATE by_hand SET state = 2, status = 201, headers = $4, body = $5, \
                 settled_at = now(), expires_at = now() + interval '1 day' \
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
    compare("postgres", settings, tier, by_hand).await;
}
