//! What becomes of attempts, for Prometheus to fetch.
//!
//! ```text
//! cargo run --example prometheus --features axum,metrics
//! ```
//!
//! Makes some attempts, then fetches `/metrics` and prints what is there of this crate. The names stand
//! in `docs/observability.md`.

use std::error::Error;

use axum::{
    Router,
    body::Body,
    extract::Request,
    routing::{get, post},
};
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;
use oncekey::{Store, http::IdempotencyLayer};
use tower::ServiceExt as _;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Any recorder of the `metrics` crate will do.
    let metrics = PrometheusBuilder::new().install_recorder()?;

    let once = IdempotencyLayer::single_tenant(Store::builder().build()?);
    let gauges = once.clone();
    let app = Router::new().route("/charges", post(|| async { "charged" }).layer(once)).route(
        "/metrics",
        get(move || async move {
            gauges.record_gauges(); // they are read when somebody wants to know
            metrics.render()
        }),
    );

    for (key, body) in [("a", "1"), ("a", "1"), ("b", "1"), ("a", "2")] {
        let request = Request::post("/charges").header("idempotency-key", key);
        let _ = app.clone().oneshot(request.body(Body::from(body))?).await?;
    }
    let response = app.oneshot(Request::get("/metrics").body(Body::empty())?).await?;
    let text = response.into_body().collect().await?.to_bytes();
    for line in String::from_utf8_lossy(&text).lines() {
        if line.starts_with("oncekey_") {
            println!("{line}");
        }
    }
    Ok(())
}
