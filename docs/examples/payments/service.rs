//! The service: handlers that know nothing of retries, and the layers around them.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::future::pending;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Extension, Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header, request};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;

use oncekey::Store;
use oncekey::http::{Attempt, IdempotencyLayer};

use crate::tiers::{Entry, Key, Opened};

/// What the handlers share.
pub(crate) struct Payments {
    /// The store, or the memory in front of a tier.
    store: Store,
    opened: Opened,
    /// How often the body of the handler ran, counted when the charge starts: a request refused
    /// for its body does not count, a charge whose client has left does.
    executions: AtomicU64,
    ledger: Mutex<Ledger>,
    /// Where a charge with `pause=1` stands; each `POST /resume` lets one go on.
    paused: Semaphore,
    /// True once the service is told to stop; ends the streams that have no end of their own.
    closing: watch::Receiver<bool>,
}

/// The business: who was charged how much. The newest 10,000 charges are kept.
struct Ledger {
    /// Differs at each start, so that a charge made after a restart cannot look like an old one.
    start: u32,
    made: u64,
    charges: HashMap<String, Arc<Charge>>,
    oldest_first: VecDeque<String>,
}

struct Charge {
    id: String,
    account: Account,
    order: Order,
}

/// What holds a key still in a browser.
const PAY: &str = include_str!("pay.js");

/// The caller, as authentication found it.
#[derive(Clone, PartialEq)]
struct Account(Vec<u8>);

/// The body of `POST /charges`, checked.
struct Order {
    amount_cents: i64,
    currency: String,
}

/// The query of `POST /charges`.
#[derive(Default)]
struct Experiment {
    delay: Duration,
    apart: Option<Duration>,
    pause: bool,
    respond: Option<StatusCode>,
    fault: Option<Fault>,
    body_bytes: usize,
    stream: bool,
}

enum Fault {
    Panic,
    Hang,
}

impl Payments {
    pub(crate) fn new(store: Store, opened: Opened, closing: watch::Receiver<bool>) -> Arc<Self> {
        let ledger = Mutex::new(Ledger::new());
        let (executions, paused) = (AtomicU64::new(0), Semaphore::new(0));
        Arc::new(Self { store, opened, executions, ledger, paused, closing })
    }

    /// `wait`: how long a duplicate waits for the first attempt; `None` leaves the default.
    ///
    /// The order of the layers matters. Outside of ours: authentication (ours needs the account),
    /// CORS, compression, tracing. Inside: limits on concurrency, rate and time, which then count
    /// work that really runs and not the duplicates that only wait for it.
    pub(crate) fn router(self: &Arc<Self>, wait: Option<Duration>) -> Router {
        let mut once =
            IdempotencyLayer::new(self.opened.backing.clone(), |request: &request::Parts| {
                request.extensions.get::<Account>().map(|account| account.0.clone())
            });
        if let Some(limit) = wait {
            once = once.wait_limit(limit);
        }
        Router::new()
            .route("/charges", post(create_charge))
            .route("/charges/{id}", get(read_charge))
            .layer(once)
            .layer(middleware::from_fn(authenticate))
            .route("/stats", get(stats))
            .route("/resume", post(resume))
            .route("/", get(async || Html(include_str!("page.html"))))
            .route("/pay.js", get(async || ([(header::CONTENT_TYPE, "text/javascript")], PAY)))
            .with_state(Arc::clone(self))
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn executions(&self) -> u64 {
        self.executions.load(Relaxed)
    }

    /// Lets one charge with `pause=1` go on, at once or when it comes.
    pub(crate) fn resume(&self) {
        self.paused.add_permits(1);
    }

    /// The id of the oldest charge that came to its end.
    pub(crate) fn first_charge(&self) -> Option<String> {
        self.ledger().oldest_first.front().cloned()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // A charge is entered whole or not at all, so a panic elsewhere leaves nothing half-done.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `Authorization: Bearer NAME` makes NAME the account; a real service would verify a token here.
async fn authenticate(mut request: Request, next: Next) -> Response {
    match bearer(request.headers()) {
        Some(account) => {
            request.extensions_mut().insert(account);
            next.run(request).await
        }
        None => {
            let refused = problem(StatusCode::UNAUTHORIZED, "say who you are: Bearer NAME");
            ([(header::WWW_AUTHENTICATE, "Bearer")], refused).into_response()
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<Account> {
    let mut lines = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return None };
    let (scheme, name) = line.as_bytes().split_at_checked("Bearer ".len())?;
    let name = name.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !name.is_empty()).then(|| Account(name.to_vec()))
}

/// `POST /charges`. A refused body is a 400, which is not kept: the client may correct the body
/// and use the same key again. The 201 is kept. So are most statuses, but not those that say
/// "refused before the work", such as 429 and 503: a handler that must answer one of them although
/// it has charged adds `oncekey::http::Keep` to its response. `respond` does not, to show it.
async fn create_charge(
    State(payments): State<Arc<Payments>>,
    Extension(account): Extension<Account>,
    attempt: Option<Attempt>,
    key: Key,
    Query(query): Query<Vec<(String, String)>>,
    body: Bytes,
) -> Result<Response, Response> {
    let refuse = |why: String| problem(StatusCode::BAD_REQUEST, &why);
    let experiment = Experiment::from_query(&query).map_err(refuse)?;
    let order = Order::from_json(&body).map_err(refuse)?;

    payments.executions.fetch_add(1, Relaxed);
    sleep(experiment.delay).await;
    if experiment.pause
        && let Ok(resumed) = payments.paused.acquire().await
    {
        resumed.forget();
    }
    let charge = payments.ledger().enter(account, order);
    let status = experiment.respond.unwrap_or(StatusCode::CREATED);
    let entry = Entry {
        id: charge.id.clone(),
        account: String::from_utf8_lossy(&charge.account.0).into_owned(),
        intent: attempt.map_or_else(String::new, |attempt| attempt.key().to_owned()),
        amount_cents: charge.order.amount_cents,
        currency: charge.order.currency.clone(),
        answer: (status, format!("/charges/{}", charge.id), charge.to_json(experiment.body_bytes)),
    };
    // With a database: the row of the charge and the answer, in one transaction.
    let key = if experiment.apart.is_some() { Key::default() } else { key };
    let committed = payments
        .opened
        .books
        .enter(key, entry)
        .await
        .map_err(|error| (problem(StatusCode::SERVICE_UNAVAILABLE, &error)).into_response())?;

    // Who dies here has charged, and nobody knows.
    sleep(experiment.apart.unwrap_or_default()).await;
    match experiment.fault {
        #[expect(clippy::panic, reason = "asked for, to see what a retry is told afterwards")]
        Some(Fault::Panic) => panic!("fault=panic was asked for"),
        Some(Fault::Hang) => pending().await,
        None => {}
    }
    if experiment.stream {
        let status = experiment.respond.unwrap_or(StatusCode::OK);
        return Ok((status, endless(charge, payments.closing.clone())).into_response());
    }
    if let Some(status) = committed {
        return Ok(status.into_response()); // the layer answers with what was committed
    }
    let location = [(header::LOCATION, format!("/charges/{}", charge.id))];
    if matches!(status.as_u16(), 204 | 205 | 304) {
        return Ok((status, location).into_response()); // HTTP gives these no body
    }
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((status, location, json, charge.to_json(experiment.body_bytes)).into_response())
}

/// `GET /charges/ID`: to others than its account a charge does not exist.
async fn read_charge(
    State(payments): State<Arc<Payments>>,
    Extension(account): Extension<Account>,
    Path(id): Path<String>,
) -> Response {
    match payments.opened.books.find(&id).await {
        Ok(None) => {}
        Ok(Some((owner, json))) if owner.as_bytes() == account.0 => {
            return ([(header::CONTENT_TYPE, "application/json")], json).into_response();
        }
        Ok(Some(_)) => return problem(StatusCode::NOT_FOUND, "no such charge"),
        Err(error) => return problem(StatusCode::SERVICE_UNAVAILABLE, &error),
    }
    match payments.ledger().charges.get(&id) {
        Some(charge) if charge.account == account => {
            let json = [(header::CONTENT_TYPE, "application/json")];
            (json, charge.to_json(0)).into_response()
        }
        _ => problem(StatusCode::NOT_FOUND, "no such charge"),
    }
}

/// `POST /resume`: what the payment provider of a charge with `pause=1` has waited for.
async fn resume(State(payments): State<Arc<Payments>>, _: Bytes) -> StatusCode {
    payments.resume();
    StatusCode::NO_CONTENT
}

/// `GET /stats`: how often the handler's body ran, and what the store holds and counts.
async fn stats(State(payments): State<Arc<Payments>>) -> Response {
    let stats = payments.store.stats();
    let mut body = format!(r#"{{"executions":{}"#, payments.executions());
    macro_rules! members {
        ($($name:ident)*) => {
            $(body += &format!(concat!(",\"", stringify!($name), "\":{}"), stats.$name);)*
        };
    }
    members! {
        keys bytes in_flight waiters nearly_full sweep_alive
        won replays replays_not_kept met_in_flight met_held mismatches
        refused_full refused_account refused_draining refused_waiters
        completed not_kept not_kept_no_room released handed_over held abandoned
        lapsed taken_over lost double_runs expired evicted forgotten resolved sweep_panics
    }
    #[cfg(feature = "tier")]
    if let Some(tiered) = &payments.opened.tiered {
        let tier = tiered.stats();
        body += &format!(
            concat!(
                ",\"tier\":{{\"unwritten\":{},\"is_cut_off\":{},\"claims\":{},\"taken_over\":{},",
                "\"read_through\":{},\"failed\":{},\"late\":{},\"given_up\":{},\"lost\":{},",
                "\"double_runs\":{}}}"
            ),
            tier.unwritten,
            tier.is_cut_off,
            tier.claims,
            tier.taken_over,
            tier.read_through,
            tier.failed,
            tier.late,
            tier.given_up,
            tier.lost,
            tier.double_runs,
        );
    }
    body.push('}');
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// An event at once and then each 200 ms, until the client leaves or the service stops.
fn endless(charge: Arc<Charge>, closing: watch::Receiver<bool>) -> Response {
    let events = stream::unfold((0_u64, closing), move |(tick, mut closing)| {
        let event = Event::default().data(format!(r#"{{"id":"{}","tick":{tick}}}"#, charge.id));
        async move {
            if tick > 0 {
                tokio::select! {
                    () = sleep(Duration::from_millis(200)) => {}
                    _ = closing.wait_for(|closing| *closing) => return None,
                }
            }
            Some((Ok::<_, Infallible>(event), (tick + 1, closing)))
        }
    });
    Sse::new(events).into_response()
}

fn problem(status: StatusCode, detail: &str) -> Response {
    let title = status.canonical_reason();
    let body = json!({ "status": status.as_u16(), "title": title, "detail": detail }).to_string();
    (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
}

impl Ledger {
    const LIMIT: usize = 10_000;

    fn new() -> Self {
        let start = RandomState::new().hash_one("start") as u32;
        Self { start, made: 0, charges: HashMap::new(), oldest_first: VecDeque::new() }
    }

    fn enter(&mut self, account: Account, order: Order) -> Arc<Charge> {
        if self.oldest_first.len() == Self::LIMIT
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.charges.remove(&oldest);
        }
        self.made += 1;
        let id = format!("ch_{:08x}{:04}", self.start, self.made);
        let charge = Arc::new(Charge { id: id.clone(), account, order });
        self.oldest_first.push_back(id.clone());
        self.charges.insert(id, Arc::clone(&charge));
        charge
    }
}

impl Charge {
    /// The answer, padded to `bytes` bytes if that is more than it needs.
    fn to_json(&self, bytes: usize) -> String {
        let Self { id, order: Order { amount_cents, currency }, .. } = self;
        let charge =
            format!(r#"{{"id":"{id}","amount_cents":{amount_cents},"currency":"{currency}""#);
        if bytes <= charge.len() + 1 {
            return charge + "}";
        }
        let pad = "x".repeat(bytes.saturating_sub(charge.len() + r#","pad":""}"#.len()));
        charge + r#","pad":""# + &pad + r#""}"#
    }
}

impl Order {
    fn from_json(body: &[u8]) -> Result<Self, String> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| format!("the body is no JSON: {error}"))?;
        let Value::Object(body) = body else { return Err("the body is no JSON object".into()) };

        let amount_cents = match body.get("amount_cents").and_then(Value::as_i64) {
            Some(cents @ 1..) => cents,
            _ => return Err("amount_cents must be a positive integer".into()),
        };
        let currency = match body.get("currency").and_then(Value::as_str) {
            Some(code) if code.len() == 3 && code.bytes().all(|b| b.is_ascii_lowercase()) => code,
            _ => return Err(r#"currency must be three lower-case letters, as in "usd""#.into()),
        };
        match body.get("source").and_then(Value::as_str) {
            Some(source) if source.len() > 3 && source.starts_with("pm_") => {}
            _ => return Err(r#"source must be a payment method, as in "pm_card""#.into()),
        }
        Ok(Self { amount_cents, currency: currency.to_owned() })
    }
}

impl Experiment {
    fn from_query(query: &[(String, String)]) -> Result<Self, String> {
        /// 64 MiB and a day: more is a slip of the finger.
        const MOST_BYTES: u64 = 64 << 20;
        const MOST_MS: u64 = 24 * 60 * 60 * 1000;

        let mut experiment = Self::default();
        for (name, value) in query {
            let number = |from: u64, to: u64| match value.parse::<u64>() {
                Ok(number) if (from..=to).contains(&number) => Ok(number),
                _ => Err(format!("{name} must be a number from {from} to {to}")),
            };
            match name.as_str() {
                "delay_ms" => experiment.delay = Duration::from_millis(number(0, MOST_MS)?),
                "apart_ms" => experiment.apart = Some(Duration::from_millis(number(0, MOST_MS)?)),
                "pause" => experiment.pause = number(0, 1)? == 1,
                "respond" => {
                    experiment.respond = StatusCode::from_u16(number(200, 599)? as u16).ok();
                }
                "fault" => {
                    experiment.fault = Some(match value.as_str() {
                        "panic" => Fault::Panic,
                        "hang" => Fault::Hang,
                        _ => return Err("fault must be panic or hang".into()),
                    });
                }
                "body_bytes" => experiment.body_bytes = number(0, MOST_BYTES)? as usize,
                "stream" => experiment.stream = number(0, 1)? == 1,
                _ => {} // part of the fingerprint all the same, as every byte of the query
            }
        }
        Ok(experiment)
    }
}
