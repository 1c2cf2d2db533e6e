//! Rows of the work and the outcome in one SQLite transaction.
//!
//! ```text
//! cargo run --example sqlite_transaction --features axum,sqlite
//! ```
//!
//! Both appear at the commit or neither does, so a crash at any moment leaves nothing that would have to
//! be guessed about, and a claim of a process that died may be taken over.

use std::{error::Error, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
    routing::post,
};
use http_body_util::BodyExt as _;
use oncekey::{
    Lapse, Outcome, Store,
    http::{IdempotencyLayer, InTransaction},
    tier::{SqliteTier, Tiered},
};
use sqlx::{Row as _, SqlitePool, sqlite::SqliteConnectOptions};
use tower::ServiceExt as _;

struct Service {
    pool: SqlitePool,
    tier: SqliteTier,
}

/// What went wrong before the commit: the transaction is rolled back when it is dropped, nothing was
/// done, and 503 releases the key.
type Failed = (StatusCode, String);

fn failed(error: impl Error) -> Failed {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

async fn create_charge(
    State(service): State<Arc<Service>>,
    key: InTransaction,
    body: String,
) -> Result<StatusCode, Failed> {
    let amount: i64 =
        body.parse().map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}")))?;
    let mut tx = service.pool.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
    let id: i64 = sqlx::query("INSERT INTO charges (amount) VALUES (?) RETURNING id")
        .bind(amount)
        .fetch_one(&mut *tx)
        .await
        .map_err(failed)?
        .get(0);
    let outcome = Outcome::new(201).body(format!(r#"{{"id":{id},"amount":{amount}}}"#));
    key.complete(&mut service.tier.within(&mut tx), outcome).await.map_err(failed)?;
    // An error here leaves open whether it was committed. The layer finds out.
    tx.commit().await.map_err(failed)?;
    Ok(key.committed()) // the client gets the outcome
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::temp_dir().join(format!("oncekey-sqlite-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let file =
        SqliteConnectOptions::new().filename(directory.join("app.db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(file).await?;
    sqlx::query("CREATE TABLE charges (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL)")
        .execute(&pool)
        .await?;

    for start in ["first", "second"] {
        let tier = SqliteTier::open(pool.clone()).await?;
        let memory = Store::builder().build()?;
        let once = Tiered::open(memory, tier.clone(), Lapse::TakeOver).await?;
        let app = Router::new()
            .route("/charges", post(create_charge))
            .layer(IdempotencyLayer::single_tenant(once))
            .with_state(Arc::new(Service { pool: pool.clone(), tier }));
        let request = Request::post("/charges").header("idempotency-key", "order-7");
        let response = app.oneshot(request.body(Body::from("1200"))?).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        println!("{start} start: {status} {}", String::from_utf8_lossy(&body));
        assert_eq!(status, StatusCode::CREATED);
    }
    let rows: i64 = sqlx::query("SELECT count(*) FROM charges").fetch_one(&pool).await?.get(0);
    println!("2 attempts, {rows} row");
    pool.close().await;
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}
