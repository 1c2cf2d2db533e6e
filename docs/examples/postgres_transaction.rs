//! Rows of the work and the outcome in one Postgres transaction, on two nodes.
//!
//! ```text
//! cargo run --example postgres_transaction --features axum,postgres -- postgres://app@localhost/app
//! ```
//!
//! The first run makes the schema `oncekey` and a table `charges_of_example` in that database.

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
    tier::{PostgresTier, Tiered},
};
use sqlx::{PgPool, Row as _, postgres::PgPoolOptions};
use tower::ServiceExt as _;

struct Service {
    pool: PgPool,
    tier: PostgresTier,
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
    let mut tx = service.pool.begin().await.map_err(failed)?;
    let id: i64 = sqlx::query("INSERT INTO charges_of_example (amount) VALUES ($1) RETURNING id")
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

/// One process of the service.
async fn node(pool: &PgPool) -> Result<Router, Box<dyn Error>> {
    let tier = PostgresTier::connect(pool.clone()).await?;
    // What a dead node did not commit it did not do, so whoever comes next may run.
    let once = Tiered::open(Store::builder().build()?, tier.clone(), Lapse::TakeOver).await?;
    Ok(Router::new()
        .route("/charges", post(create_charge))
        .layer(IdempotencyLayer::single_tenant(once))
        .with_state(Arc::new(Service { pool: pool.clone(), tier })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url =
        std::env::args().nth(1).ok_or("usage: postgres_transaction postgres://USER@HOST/DB")?;
    let pool = PgPoolOptions::new().test_before_acquire(false).connect(&url).await?;
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS charges_of_example \
         (id bigint GENERATED ALWAYS AS IDENTITY, amount bigint NOT NULL)",
    )
    .execute(&pool)
    .await?;
    let count = "SELECT count(*) FROM charges_of_example";
    let before: i64 = sqlx::query(count).fetch_one(&pool).await?.get(0);

    // A key that no earlier run has used.
    let key = format!("order-{before}-{}", std::process::id());
    let nodes = [node(&pool).await?, node(&pool).await?];
    let mut bodies = Vec::new();
    for (n, app) in nodes.into_iter().enumerate() {
        let request = Request::post("/charges").header("idempotency-key", &key);
        let response = app.oneshot(request.body(Body::from("1200"))?).await?;
        let (head, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        let is_replay = head.headers.contains_key("idempotent-replayed");
        println!(
            "node {n}: {}, replay: {is_replay}, {}",
            head.status,
            String::from_utf8_lossy(&body)
        );
        bodies.push(body);
    }
    assert_eq!(bodies[0], bodies[1]);
    let rows: i64 = sqlx::query(count).fetch_one(&pool).await?.get(0);
    println!("2 attempts on 2 nodes, {} row", rows - before);
    Ok(())
}
