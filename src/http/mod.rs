//! The tower layer: makes an HTTP service safe to retry.
//!
//! A client that sends the same `Idempotency-Key` with the same request again gets the first
//! response again, marked `Idempotent-Replayed: true`; the handler runs once. A duplicate that
//! comes while the first is at work waits for it. Everything else is answered with a problem that
//! has a type of its own ([`problem`]).
//!
#![doc = include_str!("../../docs/drawings/retry.svg")]
//!
//! ```
//! use std::convert::Infallible;
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use oncekey::{Store, http::{IdempotencyLayer, RequestBody}};
//! use tower::{ServiceBuilder, service_fn};
//!
//! # type Bytes = bytes::Bytes;
//! async fn charge<B>(_: Request<RequestBody<B>>) -> Result<Response<Full<Bytes>>, Infallible> {
//!     Ok(Response::new(Full::from("charged")))
//! }
//!
//! let store = Store::builder().build()?;
//! let service = ServiceBuilder::new()
//!     .layer(IdempotencyLayer::single_tenant(store).operation_name("charge"))
//!     .service(service_fn(charge::<Full<Bytes>>));
//! # use tower::ServiceExt;
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! # for is_replay in [false, true] {
//! #     let request = Request::post("/").header("idempotency-key", "k").body(Full::default())?;
//! #     let response = service.clone().oneshot(request).await?;
//! #     assert_eq!(response.headers().contains_key("idempotent-replayed"), is_replay);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With axum, several tenants, and an operation of its own kind:
//!
//! ```
//! # #[cfg(feature = "axum")] {
//! use std::time::Duration;
//! use axum::{Router, http::StatusCode, routing::post};
//! use oncekey::{Store, http::{Attempt, Fingerprinting, IdempotencyLayer, StatusTable}};
//!
//! /// What authentication left in the request.
//! #[derive(Clone)]
//! struct Account(String);
//!
//! async fn refund(attempt: Attempt) -> (StatusCode, String) {
//!     (StatusCode::CREATED, format!("refunded under {}", attempt.token()))
//! }
//!
//! let layer = IdempotencyLayer::new(Store::builder().build()?, |parts| {
//!     parts.extensions.get::<Account>().map(|account| account.0.clone())
//! })
//! .wait_limit(Duration::from_secs(5))
//! .operation("POST /orders/{id}/refund", |policy| {
//!     policy
//!         .fingerprint(Fingerprinting::canonical_json())
//!         .statuses(StatusTable::default().keep(StatusCode::CONFLICT))
//! });
//! let app: Router = Router::new().route("/orders/{id}/refund", post(refund)).layer(layer);
//! # }
//! # Ok::<(), oncekey::ConfigError>(())
//! ```
//!
//! # Where it belongs
//!
//! Outside of this layer: authentication, which says whose key it is; CORS and compression, whose
//! headers belong to one client and not to the outcome; tracing. Inside of it: limits of
//! concurrency and rate, load shedding, time-outs, so that a replay costs none of them and a
//! time-out is an outcome like another. A body limit outside works too (413).
//!
//! A service that returns an error says that nothing was done: the identity is released (R11). That
//! is not what a time-out means, which cuts work off that had begun; so make a response of it inside
//! of this layer. 408 and 504 are kept. tower-http's time-out answers with a response; around
//! tower's put axum's `HandleErrorLayer`, or what your framework has for it.
//!
//! With axum use `Router::layer` or `route_layer`, which run when the route is known. In one
//! `ServiceBuilder`, whatever is inside of this layer must take any request body ([`RequestBody`]),
//! as tower's and tower-http's layers do; `axum::middleware::from_fn` takes only axum's: give it a
//! `Router::layer` call of its own.
//!
//! # What runs where
//!
//! The body is read, and the claim made, by the client's future. Once the claim is won, a client that
//! leaves changes nothing (R18): the handler is polled once where it is, and what has to wait then goes
//! to a tokio task in the same breath. A handler that answers without waiting needs no task. A runtime
//! of tokio with timers must be there: without one the future panics, before anything ran.
//! Task-locals that were set outside of the layer are there in that first poll and gone after it: hand
//! over what the handler needs in the request's extensions.
//!
//! The first client gets the response as the handler made it. What is stored for the others leaves
//! out what belongs to the connection or the moment (R16). Trailers are kept. A response that is
//! too large or a stream is handed to the first client as it comes; if that client leaves, the body
//! is dropped, and the identity stays "not kept" (R20).
//!
//! # What one account may do
//!
//! Nothing limits a single account unless you say so: the store its live keys
//! ([`max_keys_per_account`](crate::StoreBuilder::max_keys_per_account)), the layer its owners,
//! waiters and body bytes ([`max_tasks_per_account`](IdempotencyLayer::max_tasks_per_account) and
//! those beside it). Set them where accounts are strangers to each other.
//!
//! A client that reads a replay slowly holds no more than its connection and a share of the stored
//! bytes, which live on after the record until it is done: limit how long a response may take to
//! be written where your server is built.
//!
//! # Stopping
//!
//! First stop accepting connections, then [`Store::drain`](crate::Store::drain) and wait for it:
//! owners may outlive their connections. New claims are answered with 503 meanwhile, and replays go
//! on. What is cut off when the runtime ends is held (R11).

mod asked;
mod at_once;
mod attach;
mod attempt;
mod backing;
mod body;
mod capture;
mod cors;
mod endpoint;
mod fingerprinting;
mod future;
#[cfg(feature = "tier")]
mod in_transaction;
mod intake;
mod json;
mod layer;
mod look_up;
mod multipart;
mod owner;
mod policy;
mod prefer;
pub mod problem;
mod published;
mod reply;
mod sealing;
mod service;
mod shares;
mod veto;
mod watch;
mod work;

#[cfg(feature = "tier")]
pub use self::in_transaction::{InTransaction, InTransactionError};
pub use self::{
    attach::Attach,
    attempt::{Attempt, Keep, Release},
    backing::Backing,
    body::{RequestBody, ResponseBody},
    endpoint::RouteTemplate,
    fingerprinting::Fingerprinting,
    future::ResponseFuture,
    layer::{HttpStats, IdempotencyLayer},
    look_up::LookUp,
    policy::{Policy, StatusTable},
    problem::Problem,
    published::PublishedPolicy,
    sealing::Sealing,
    service::Idempotency,
};

/// The values of a field in a response. Found by a look at each line: most have a few, and to hash a
/// name, as the map does, takes longer.
fn lines<'a>(
    headers: &'a http::HeaderMap,
    name: &'a http::HeaderName,
) -> impl Iterator<Item = &'a http::HeaderValue> {
    headers.iter().filter(move |(there, _)| *there == name).map(|(_, value)| value)
}

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
