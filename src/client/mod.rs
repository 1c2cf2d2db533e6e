//! The other half of a retry: a client that keeps the key of an intent still.
//!
//! [`IntentLayer`] sends a request until there is an answer, under one key that is made before the
//! first attempt. It is a middleware of `reqwest-middleware` and a tower layer for any other client.
//! It works with every service that takes an `Idempotency-Key`: with this crate's own layer, with
//! others that follow the draft, and with those of Stripe's form.
//!
//! ```no_run
//! use oncekey::{IntentKey, client::{IntentLayer, Report}};
//!
//! # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
//! let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
//!     .with(IntentLayer::new())
//!     .build();
//! let response = client
//!     .post("https://pay.example/charges")
//!     .with_extension(IntentKey::derived("charge", ["inv_17", "2"])) // else a random one
//!     .body(r#"{"amount_cents":1999}"#)
//!     .send()
//!     .await?;
//! if let Some(report) = response.extensions().get::<Report>() {
//!     println!("{} attempts, replayed: {}", report.attempts(), report.is_replay());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! As a tower layer, here around the client of `hyper-util`:
//!
//! ```no_run
//! use bytes::Bytes;
//! use http_body_util::Full;
//! use hyper_util::{client::legacy::Client, rt::TokioExecutor};
//! use oncekey::client::IntentLayer;
//! use tower::{Service, ServiceBuilder};
//!
//! # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
//! let mut client = ServiceBuilder::new().layer(IntentLayer::new()).service(client);
//! let request = http::Request::post("http://pay.example/charges").body(Full::from("{}"))?;
//! let response = client.call(request).await?;
//! # drop(response);
//! # Ok(())
//! # }
//! ```
//!
//! # What is tried again
//!
//! | what came | |
//! |---|---|
//! | no connection, a connection that broke off, no answer within [`attempt_timeout`](IntentLayer::attempt_timeout) | again |
//! | an answer that broke off within [`max_answer`](IntentLayer::max_answer) | again |
//! | any answer marked `Idempotent-Replayed: true` | final: the same would come again |
//! | any answer with `Stripe-Should-Retry: false` | final: the service says so |
//! | 408, 425, 429 | again |
//! | 409 with the problem `in-flight`, or another of [`in_flight_types`](IntentLayer::in_flight_types) | again |
//! | 409 in Stripe's form: error code `idempotency_key_in_use`, or `Stripe-Should-Retry: true` | again |
//! | 500, 502, 503, 504, or what [`server_errors`](IntentLayer::server_errors) says | again |
//! | all else, 400, 422 and other 409 among it | final |
//!
//! `Stripe-Should-Retry: true` says something at 409 only. The other statuses that it comes with are tried
//! again anyway, or are a matter of `server_errors`; no word makes 400 or 422 worth a second request.
//!
//! The time before an attempt is random, from nothing to a limit that doubles each time (full
//! jitter), and what `Retry-After` asks for, in seconds or as a date, is added to it. If it would end
//! behind the [`deadline`](IntentLayer::deadline), the last answer or error is what the caller gets.
//!
//! A runtime of tokio with timers is needed; the future panics without one, before anything was sent.
//!
//! # Where the key is made
//!
//! Outside of every loop that tries again: see the page `docs/clients.md` of the repository.

mod answer;
mod error;
mod judge;
mod layer;
mod report;
mod reqwest;
mod tower;
mod trial;
mod watch;

pub use self::{
    answer::AnswerBody, error::IntentError, layer::IntentLayer, report::Report, tower::Intents,
};

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
