//! The Postgres tier against a private server, and through a private PgBouncer.
#![cfg(all(feature = "postgres", feature = "conformance"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;
mod contract;
mod opening;
#[path = "../common/postgres.rs"]
mod postgres;
mod steps;
mod transactions;
mod waiting;

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use common::{DAY, HOUR, LEASE, LONG, MS, SECOND, fp, id, outcome, watchdog};
use oncekey::{
    Identity, Outcome, Token,
    tier::{
        Claimed, Durability, Forgotten, Found, Landed, NewClaim, PostgresBuilder, PostgresTier,
        Resolved, State, Tier, TierError,
        conformance::{Host, check},
    },
};
use postgres::{Pooler, Relay, Server, shared};
use sqlx::{
    AssertSqlSafe, PgPool, Row as _,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};

/// The settings of a tier in a schema of its own, on a server that syncs nothing.
fn tier_in(schema: &str) -> PostgresBuilder {
    PostgresTier::builder().schema(schema).durability(Durability::KilledProcess)
}

async fn tier(schema: &str) -> Option<(PostgresTier, PgPool)> {
    let pool = shared()?.pool().await;
    Some((tier_in(schema).connect(pool.clone()).await.unwrap(), pool))
}

/// Runs statements.
async fn sql(pool: &PgPool, statements: impl Into<String>) {
    sqlx::raw_sql(AssertSqlSafe(statements.into())).execute(pool).await.unwrap();
}

/// The number that a query answers.
async fn count(pool: &PgPool, query: impl Into<String>) -> i64 {
    let row = sqlx::raw_sql(AssertSqlSafe(query.into())).fetch_one(pool).await.unwrap();
    row.try_get(0).unwrap()
}

/// Shifts all stamps back, because the clock of a server cannot be moved.
async fn advance(pool: &PgPool, schema: &str, by: Duration) {
    let by = format!("interval '{} us'", by.as_micros());
    sql(
        pool,
        format!(
            "UPDATE {schema}.idempotency_keys SET created_at = created_at - {by}, due_at = due_at \
             - {by}, settled_at = settled_at - {by}, expires_at = expires_at - {by}; \
             UPDATE {schema}.idempotency_owners SET alive_until = alive_until - {by}; \
             UPDATE {schema}.idempotency_recalls SET at = at - {by}"
        ),
    )
    .await;
}

/// Where the suite finds the tier.
struct Nodes {
    builder: PostgresBuilder,
    options: PgConnectOptions,
    schema: &'static str,
    pool: PgPool,
}

impl Nodes {
    async fn new(server: &Server, schema: &'static str) -> Self {
        let (options, pool) = (server.options(), server.pool().await);
        Self { builder: tier_in(schema), options, schema, pool }
    }

    async fn must_conform(&self) {
        let failures = check(self).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

impl Host for Nodes {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async {
            let pool = postgres::pool(self.options.clone()).await;
            Arc::new(self.builder.clone().connect(pool).await.unwrap()) as Arc<dyn Tier>
        })
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(advance(&self.pool, self.schema, by))
    }
}

/// A claim of owner 1 or another.
fn claim(owner: u64, number: u64, body: &str) -> NewClaim {
    let (token, fingerprint) = (Token::new(owner, number), fp(body));
    NewClaim { token, fingerprint, max_run: HOUR, retention: DAY }
}

/// Returns when so many statements wait for a lock in a schema. Under a watchdog only.
async fn until_blocked(pool: &PgPool, schema: &str, many: i64) {
    let query = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE \
         '%{schema}.%'"
    );
    while count(pool, &query).await != many {
        tokio::time::sleep(MS).await;
    }
}

trait MustBe {
    fn won(self) -> Option<Bytes>;
    fn met(self) -> Found;
}

impl MustBe for Result<Claimed, TierError> {
    #[track_caller]
    fn won(self) -> Option<Bytes> {
        match self {
            Ok(Claimed::Won { checkpoint }) => checkpoint,
            other => panic!("not won: {other:?}"),
        }
    }

    #[track_caller]
    fn met(self) -> Found {
        match self {
            Ok(Claimed::Met(found)) => found,
            other => panic!("met nothing: {other:?}"),
        }
    }
}
