//! What becomes of an owner: R8, R9, R11, R12, R18.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{Extension, Router, body::Body, extract::Request, middleware, routing::post};
use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use oncekey::{
    Abandon, EntryState, Lapse, Store,
    http::{Attempt, RequestBody},
};
use tower::{Service, ServiceBuilder, limit::ConcurrencyLimitLayer};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    charge, charges,
    common::{LEASE, SECOND, by_hand, by_hand_with, watchdog},
    gated, layer,
    sockets::{
        Client, Gate, Runs, ask, asking, connect_h2, post as posting, request, serve,
        serve_service, until,
    },
    store,
};

fn impatient(key: &str) -> Vec<u8> {
    request("POST", "/charges", &[("Idempotency-Key", key), ("Prefer", "wait=0")], "{}")
}

#[tokio::test]
async fn r08_a_handler_slower_than_its_lease_is_not_overrun() {
    let _watchdog = watchdog();
    let ((store, clock), runs, gate) =
        (by_hand_with(|store| store.on_lapse(Lapse::TakeOver)), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    for _ in 0..5 {
        clock.advance(LEASE * 2);
        store.sweep();
        assert_eq!(ask(&server, impatient("k")).await.problem(), "in-flight");
    }
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(ask(&server, impatient("k")).await.is_replay());
}

#[tokio::test]
async fn r08_after_max_run_it_is_held_and_a_late_completion_still_settles_it() {
    let _watchdog = watchdog();
    let ((store, clock), runs, gate) = (by_hand(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    clock.advance(SECOND * (15 * 60 + 1));
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.problem(), "outcome-unknown");
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(ask(&server, posting("/charges", "k", "{}")).await.is_replay());
    assert_eq!((runs.count(), store.stats().double_runs), (1, 0));
}

/// A handler with a gate of its own for each run.
fn overtaking(runs: &Runs, gates: &Arc<[Gate; 2]>, status: StatusCode) -> Router {
    let (runs, gates) = (runs.clone(), Arc::clone(gates));
    let handler = move || async move {
        let run = runs.up();
        gates[run - 1].pass().await;
        (if run == 1 { status } else { StatusCode::OK }, run.to_string())
    };
    Router::new().route("/charges", post(handler))
}

#[tokio::test]
async fn r09_an_owner_that_lost_answers_with_the_winners_outcome() {
    let _watchdog = watchdog();
    // A released status of the loser gives way to the winner's outcome as well.
    for (status, winner_first) in
        [(StatusCode::OK, true), (StatusCode::OK, false), (StatusCode::NOT_FOUND, true)]
    {
        let (store, runs) = (store(), Runs::default());
        let gates = Arc::new([Gate::new(), Gate::new()]);
        let server = serve(overtaking(&runs, &gates, status).layer(layer(&store))).await;
        let first = asking(&server, posting("/charges", "k", "{}"));
        gates[0].entered().await;
        assert!(store.forget_forced(&charge("k")));
        let second = asking(&server, posting("/charges", "k", "{}"));
        gates[1].entered().await;
        if winner_first {
            gates[1].open();
            assert_eq!(second.await.unwrap().text(), "2");
            gates[0].open();
        } else {
            gates[0].open();
            until(|| store.stats().waiters == 1).await;
            gates[1].open();
            assert_eq!(second.await.unwrap().text(), "2");
        }
        let first = first.await.unwrap();
        assert_eq!((first.status, first.text()), (200, "2"));
        assert!(first.is_replay());
        assert_eq!(store.stats().double_runs, 1);
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "2");
    }
}

#[tokio::test]
async fn r09_without_a_winner_the_outcome_is_unknown() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    assert!(store.forget_forced(&charge("k")));
    gate.open();
    assert_eq!(first.await.unwrap().problem(), "outcome-unknown");
    assert_eq!(store.stats().double_runs, 1);
}

/// A handler that panics in its first run.
fn panicking(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move || async move {
        let run = runs.up();
        assert!(run > 1, "the handler panics, as it should in this test");
        run.to_string()
    };
    Router::new().route("/charges", post(handler))
}

#[tokio::test]
async fn r11_after_a_panic_the_client_gets_500_and_the_identity_is_held() {
    let _watchdog = watchdog();
    for catches_outside in [false, true] {
        let (store, runs) = (store(), Runs::default());
        let layer = layer(&store);
        let app = panicking(&runs).layer(layer.clone());
        let app = if catches_outside { app.layer(CatchPanicLayer::new()) } else { app };
        let server = serve(app).await;
        let mut client = Client::connect(&server).await;
        let first = client.ask(posting("/charges", "k", "{}")).await;
        assert_eq!(first.status, 500);
        assert_eq!(first.field("content-type"), Some("application/problem+json"));
        let retry = client.ask(posting("/charges", "k", "{}")).await;
        assert_eq!((retry.status, retry.problem().as_str()), (409, "outcome-unknown"));
        assert!(retry.field("retry-after").is_none());
        assert_eq!((runs.count(), layer.stats().panics, layer.stats().tasks), (1, 1, 0));
    }
}

#[tokio::test]
async fn r11_a_panic_that_is_caught_inside_is_an_answer() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let app = panicking(&runs).layer(CatchPanicLayer::new()).layer(layer(&store));
    let server = serve(app).await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.status, 500);
    let retry = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!(retry.status, 500);
    assert!(retry.is_replay());
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r11_a_waiter_of_a_panicking_owner_is_told_at_once() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let handler = move || async move {
        at.pass().await;
        crate::fail()
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer(&store));
    let server = serve(app).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    let waiter = asking(&server, posting("/charges", "k", "{}"));
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 500);
    assert_eq!(waiter.await.unwrap().problem(), "outcome-unknown");
}

#[tokio::test]
async fn r11_releasing_what_was_abandoned_is_a_setting_of_the_store() {
    let _watchdog = watchdog();
    let store = Store::builder().on_abandon(Abandon::Release).build().unwrap();
    let runs = Runs::default();
    let server = serve(panicking(&runs).layer(layer(&store))).await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.status, 500);
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "2");
}

/// Answers after having failed once, when called or when asked whether it is ready. Panics if it is
/// called without having been asked.
#[derive(Clone)]
struct Failing {
    runs: Runs,
    when_ready: bool,
    is_ready: bool,
}

impl<B> Service<http::Request<RequestBody<B>>> for Failing {
    type Response = Response<Full<Bytes>>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.is_ready = true;
        if self.when_ready && self.runs.up() == 1 {
            return Poll::Ready(Err("not ready"));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<RequestBody<B>>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without having been made ready");
        if !self.when_ready && self.runs.up() == 1 {
            return std::future::ready(Err("failed"));
        }
        std::future::ready(Ok(Response::new(Full::from("done"))))
    }
}

#[tokio::test]
async fn r11_a_returned_error_goes_out_and_releases() {
    let _watchdog = watchdog();
    for when_ready in [false, true] {
        let store = store();
        let inner = Failing { runs: Runs::default(), when_ready, is_ready: false };
        let service =
            ServiceBuilder::new().layer(layer(&store).operation_name("charges")).service(inner);
        let server = serve_service(service).await;
        let first = ask(&server, posting("/charges", "k", "{}")).await;
        assert_eq!((first.status, first.text()), (502, "inner"));
        assert_eq!((store.stats().released, store.stats().keys), (1, 0));
        let retry = ask(&server, posting("/charges", "k", "another body")).await;
        assert_eq!(retry.text(), "done");
        assert!(!retry.is_replay());
    }
}

#[test]
fn r11_what_is_cut_off_when_the_runtime_ends_is_held_if_it_had_begun() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limited = ServiceBuilder::new().layer(layer(&store)).layer(ConcurrencyLimitLayer::new(1));
    let _server = runtime.block_on(async {
        let server = serve(gated(&runs, &gate).layer(limited)).await;
        asking(&server, posting("/charges", "begun", "{}"));
        gate.entered().await;
        asking(&server, posting("/charges", "not-begun", "{}"));
        until(|| store.stats().in_flight == 2).await;
        server
    });
    drop(runtime);
    assert_eq!(store.look_up(&charge("begun")).unwrap().state, EntryState::Held);
    let found = store.look_up(&charge("not-begun"));
    assert!(found.is_none(), "released, nothing was done: {found:?}");
}

#[tokio::test]
async fn r12_what_the_handler_does_to_the_request_changes_nothing() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let changing = middleware::from_fn(|mut request: Request, next: middleware::Next| async {
        let attempt = request.extensions().get::<Attempt>().cloned().unwrap();
        assert_eq!((attempt.key(), attempt.endpoint()), ("k", "POST /charges"));
        assert!(attempt.account().is_empty());
        request.extensions_mut().clear();
        request.headers_mut().clear();
        *request.uri_mut() = "/other".parse().unwrap();
        next.run(request).await
    });
    let server = serve(charges(&runs).layer(changing).layer(layer(&store))).await;
    for is_replay in [false, true] {
        let reply = ask(&server, posting("/charges", "k", "{}")).await;
        assert_eq!((reply.text(), reply.is_replay()), ("1", is_replay));
    }
    assert!(store.look_up(&charge("k")).is_some());
}

#[tokio::test]
async fn r12_the_extractor_gives_key_and_token_where_the_request_was_claimed() {
    let _watchdog = watchdog();
    let store = store();
    let told = |attempt: Attempt| async move { format!("{} {}", attempt.key(), attempt.token()) };
    let perhaps = |attempt: Option<Attempt>| async move { attempt.is_some().to_string() };
    let app = Router::new()
        .route("/told", post(told).get(told))
        .route("/perhaps", post(perhaps).get(perhaps))
        .layer(layer(&store));
    let server = serve(app).await;
    let reply = ask(&server, posting("/told", "k", "{}")).await;
    let id = oncekey::Identity::new("", "POST /told", "k").unwrap();
    assert_eq!(reply.text(), format!("k {}", store.look_up(&id).unwrap().token));
    assert_eq!(ask(&server, posting("/perhaps", "k", "{}")).await.text(), "true");
    assert_eq!(ask(&server, request("GET", "/perhaps", &[], "")).await.text(), "false");
    assert_eq!(ask(&server, request("GET", "/told", &[], "")).await.status, 500);
}

/// How a client goes away.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    Reset,
    Close,
    HalfClose,
}

#[tokio::test]
async fn r18_a_client_that_leaves_does_not_stop_the_work() {
    let _watchdog = watchdog();
    for leaving in [Leaving::Reset, Leaving::Close, Leaving::HalfClose] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
        let mut client = Client::connect(&server).await;
        client.send(posting("/charges", "k", "{}")).await;
        gate.entered().await;
        match leaving {
            Leaving::Reset => client.reset(),
            Leaving::Close => drop(client),
            Leaving::HalfClose => {
                client.half_close().await;
                assert!(client.is_closed().await);
            }
        }
        let retry = asking(&server, posting("/charges", "k", "{}"));
        until(|| store.stats().waiters == 1).await;
        gate.open();
        let retry = retry.await.unwrap();
        assert_eq!((retry.text(), retry.is_replay()), ("1", true), "{leaving:?}");
        assert_eq!((runs.count(), store.stats().abandoned), (1, 0));
    }
}

#[tokio::test]
async fn r18_a_client_that_leaves_before_the_first_await_does_not_stop_the_work() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(charges(&runs).layer(layer(&store))).await;
    for nth in 0..200 {
        let key = format!("k{nth}");
        let mut client = Client::connect(&server).await;
        client.send(posting("/charges", &key, "{}")).await;
        if nth % 2 == 0 {
            client.reset()
        } else {
            drop(client)
        }
        // Whether it came through or not, a retry is answered, and nothing ran twice.
        assert_eq!(ask(&server, posting("/charges", &key, "{}")).await.status, 200);
        assert_eq!(runs.count(), nth + 1);
    }
    until(|| store.stats().in_flight == 0).await;
    assert_eq!((store.stats().held, store.stats().completed), (0, 200));
}

#[tokio::test]
async fn r18_a_client_that_leaves_while_the_response_is_made_or_written_finds_it_later() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let handler = move || async move {
        let (sender, body) = crate::fed();
        tokio::spawn(async move {
            sender.send(Ok(Bytes::from(vec![b'a'; 400_000]))).await.unwrap();
            at.pass().await;
            sender.send(Ok(Bytes::from(vec![b'b'; 400_000]))).await.unwrap();
        });
        body
    };
    let app = Router::new().route("/charges", post(handler));
    let server = serve(app.layer(layer(&store).capture_time(crate::LONG))).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    gate.entered().await;
    client.reset();
    gate.open();
    until(|| store.stats().completed == 1).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    assert_eq!(client.head().await.status, 200);
    // More is to come than the sockets buffer.
    client.reset();
    let retry = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!(retry.body, [vec![b'a'; 400_000], vec![b'b'; 400_000]].concat());
}

#[tokio::test]
async fn r18_a_stream_reset_of_http_2_does_not_stop_the_work() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let mut client = connect_h2(&server).await;
    let asked = || {
        let request = http::Request::post("http://test/charges").header("idempotency-key", "k");
        request.body(axum::body::Body::from("{}")).unwrap()
    };
    let mut first = Box::pin(client.send_request(asked()));
    tokio::select! {
        _ = &mut first => panic!("the gate is shut"),
        () = gate.entered() => {}
    }
    drop(first);
    let retry = tokio::spawn(client.send_request(asked()));
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let retry = retry.await.unwrap().unwrap();
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    let body = http_body_util::BodyExt::collect(retry.into_body()).await.unwrap().to_bytes();
    assert_eq!((&body[..], runs.count()), (&b"1"[..], 1));
}

#[tokio::test]
async fn r18_the_number_of_owners_is_capped_and_replays_need_none() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer = layer(&store).max_tasks(1);
    let app = gated(&runs, &gate).merge(Router::new().route("/quick", post(|| async { "q" })));
    let server = serve(app.layer(layer.clone())).await;
    assert_eq!(ask(&server, posting("/quick", "k", "{}")).await.text(), "q");
    let first = asking(&server, posting("/charges", "k1", "{}"));
    gate.entered().await;
    let busy = ask(&server, posting("/charges", "k2", "{}")).await;
    assert_eq!((busy.status, busy.problem().as_str()), (503, "too-busy"));
    assert!(matches!(busy.field("retry-after"), Some("1" | "2")));
    assert!(store.look_up(&charge("k2")).is_none());
    assert_eq!(store.stats().won, 2, "it was not claimed, not even for a moment");
    assert_eq!((layer.stats().tasks, layer.stats().too_busy), (1, 1));
    assert!(ask(&server, posting("/quick", "k", "{}")).await.is_replay());
    assert_eq!(ask(&server, posting("/quick", "k", "other")).await.status, 422);
    let waiter = asking(&server, posting("/charges", "k1", "{}"));
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(waiter.await.unwrap().is_replay());
    until(|| layer.stats().tasks == 0).await;
    gate.open();
    assert_eq!(ask(&server, posting("/charges", "k2", "{}")).await.text(), "2");
}

#[tokio::test]
async fn r18_the_clone_that_was_made_ready_is_the_one_that_is_called() {
    let _watchdog = watchdog();
    // Failing panics if it is called unready, and so do these layers of tower.
    let (store, runs) = (store(), Runs::default());
    runs.up();
    let inner = Failing { runs: runs.clone(), when_ready: false, is_ready: false };
    let plain = ServiceBuilder::new()
        .layer(layer(&store).operation_name("plain"))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(inner.clone());
    let server = serve_service(plain).await;
    let asked: Vec<_> =
        (0..20).map(|nth| asking(&server, posting("/", &format!("k{nth}"), "{}"))).collect();
    for asked in asked {
        assert_eq!(asked.await.unwrap().text(), "done");
    }
    // What passes is made ready as well.
    assert_eq!(ask(&server, request("GET", "/", &[], "")).await.text(), "done");

    let buffered = ServiceBuilder::new()
        .layer(layer(&store).operation_name("buffered"))
        .buffer::<http::Request<RequestBody<hyper::body::Incoming>>>(4)
        .load_shed()
        .layer(ConcurrencyLimitLayer::new(1))
        .service(inner);
    let server = serve_service(buffered).await;
    for nth in 0..20 {
        let reply = ask(&server, posting("/", &format!("k{nth}"), "{}")).await;
        assert_eq!(reply.text(), "done");
    }
    assert_eq!(store.stats().held, 0);
}

#[tokio::test]
async fn r18_a_load_that_is_shed_is_released() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let inner = tower::service_fn(move |_: http::Request<RequestBody<hyper::body::Incoming>>| {
        let at = at.clone();
        async move {
            at.pass().await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
        }
    });
    let service = ServiceBuilder::new()
        .layer(layer(&store).operation_name("charges"))
        .load_shed()
        .layer(ConcurrencyLimitLayer::new(1))
        .service(inner);
    let server = serve_service(service).await;
    let first = asking(&server, posting("/", "k1", "{}"));
    gate.entered().await;
    assert_eq!(ask(&server, posting("/", "k2", "{}")).await.status, 502);
    gate.open();
    assert_eq!(first.await.unwrap().text(), "done");
    gate.open();
    assert_eq!(ask(&server, posting("/", "k2", "{}")).await.text(), "done");
}

#[tokio::test]
async fn r18_replays_need_no_inner_service_that_is_ready() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let app = gated(&runs, &gate)
        .layer(ServiceBuilder::new().layer(layer(&store)).layer(ConcurrencyLimitLayer::new(1)));
    let server = serve(app).await;
    gate.open();
    assert_eq!(ask(&server, posting("/charges", "k1", "{}")).await.text(), "1");
    gate.entered().await;
    let busy = asking(&server, posting("/charges", "k2", "{}"));
    gate.entered().await;
    assert!(ask(&server, posting("/charges", "k1", "{}")).await.is_replay());
    gate.open();
    assert_eq!(busy.await.unwrap().text(), "2");
}

#[tokio::test]
async fn r18_an_owner_may_call_its_own_server() {
    let _watchdog = watchdog();
    let store = store();
    let address = Arc::new(std::sync::OnceLock::new());
    let own = Arc::clone(&address);
    let handler = move |Extension(_): Extension<()>, attempt: Attempt| async move {
        let nested = sockets_ask(*own.get().unwrap(), impatient(attempt.key())).await;
        format!("{} {}", nested.status, nested.problem())
    };
    let app =
        Router::new().route("/charges", post(handler)).layer(Extension(())).layer(layer(&store));
    let server = serve(app).await;
    address.set(server.address).unwrap();
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "409 in-flight");
}

use crate::sockets::ask_at as sockets_ask;

/// A handler that does not wait runs where its client is served, whatever it does there: a thread that
/// it blocks is one that it would have blocked without the layer. One that waits has a task of its own.
#[tokio::test]
async fn r18_a_handler_that_never_waits_has_no_task_and_one_that_waits_has() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let once = layer(&store);
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let handler = {
        let gate = gate.clone();
        move |waits: String| async move {
            if waits == "waits" {
                gate.pass().await;
            }
            tasks().to_string()
        }
    };
    let app = Router::new().route("/charges", post(handler)).layer(once.clone());
    let call = |body: &'static str| {
        let request = Request::post("/charges").header("idempotency-key", body);
        tower::ServiceExt::oneshot(app.clone(), request.body(Body::from(body)).unwrap())
    };
    let text = async |answer: Result<axum::response::Response, Infallible>| {
        axum::body::to_bytes(answer.unwrap().into_body(), 99).await.unwrap()
    };
    let none = tasks();
    assert_eq!(text(call("runs").await).await, none.to_string());
    // A client that is there for one poll only.
    let mut client = Box::pin(call("waits"));
    let polled = client.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()));
    assert!(polled.is_pending());
    drop(client);
    assert_eq!((tasks(), once.stats().tasks, store.stats().in_flight), (none + 1, 1, 1));
    gate.open();
    until(|| store.stats().in_flight == 0).await;
    // What a retry gets is what it has done after its client was gone, in its task.
    assert_eq!(text(call("waits").await).await, (none + 1).to_string());
    until(|| tasks() == none).await;
}
