//! The layer in an axum service, as small as it gets.
//!
//! ```text
//! cargo run --example web --features axum
//! ```
//!
//! The service is called within the process: a first attempt, its retry, and the same key with
//! another amount. `docs/examples/payments.rs` is the same over sockets, with all that a service has.

use std::{
    error::Error,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{StatusCode, request::Parts},
    middleware::{self, Next},
    response::Response,
    routing::post,
};
use http_body_util::BodyExt as _;
use oncekey::{
    Store,
    http::{Attempt, IdempotencyLayer},
};
use tower::ServiceExt as _;

/// What authentication leaves in the request.
#[derive(Clone)]
struct Account(String);

static CHARGES: AtomicUsize = AtomicUsize::new(0);

async fn create_charge(attempt: Attempt, body: String) -> (StatusCode, String) {
    let number = CHARGES.fetch_add(1, Relaxed) + 1;
    println!("  charging {body} under key {}", attempt.key());
    (StatusCode::CREATED, format!(r#"{{"id":"ch_{number}"}}"#))
}

/// Stands for yours: it must run outside of the layer, because a key belongs to an account.
async fn authenticate(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(Account("acct_42".to_owned()));
    next.run(request).await
}

fn account_of(parts: &Parts) -> Option<String> {
    parts.extensions.get::<Account>().map(|account| account.0.clone())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::builder().max_keys(200_000).build()?;
    let app = Router::new()
        .route("/charges", post(create_charge))
        .layer(IdempotencyLayer::new(store, account_of))
        .layer(middleware::from_fn(authenticate));

    for (amount, wanted) in [
        (1200, StatusCode::CREATED),
        (1200, StatusCode::CREATED),
        (9900, StatusCode::UNPROCESSABLE_ENTITY),
    ] {
        let request = Request::post("/charges")
            .header("idempotency-key", "order-7")
            .body(Body::from(format!(r#"{{"amount_cents":{amount}}}"#)))?;
        let response = app.clone().oneshot(request).await?;
        let is_replay = response.headers().contains_key("idempotent-replayed");
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        println!("{status}, replay: {is_replay}, {}", String::from_utf8_lossy(&body));
        assert_eq!(status, wanted);
    }
    println!("3 requests, {} charge", CHARGES.load(Relaxed));
    Ok(())
}
