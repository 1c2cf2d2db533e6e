//! The service inside: it must be ready before it is called, may refuse, fail or panic, and there
//! may be another layer of ours in it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use axum::{
    Router, body::Body, error_handling::HandleErrorLayer, http::StatusCode, routing::post as route,
};
use http::{Method, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use oncekey::{
    Abandon, Store,
    http::{BoxError, RequestBody},
};
use tower::{
    Service, ServiceBuilder, buffer::BufferLayer, limit::ConcurrencyLimitLayer,
    load_shed::LoadShedLayer, timeout::TimeoutLayer,
};

use crate::{
    assert_idle, charge as identity, counting, gated, idle, layer, serve_fallible,
    sockets::{Client, Gate, Runs, Server, serve, until},
    store,
    wire::{Present, Wire, assert_replay, charge, keyless, post},
};

type Asked = Request<RequestBody<Incoming>>;

/// Panics if it is called without having been ready itself: a clone of a ready one is not.
struct MustBeReady<S> {
    inner: S,
    is_ready: bool,
}

impl<S> MustBeReady<S> {
    fn new(inner: S) -> Self {
        Self { inner, is_ready: false }
    }
}

impl<S: Clone> Clone for MustBeReady<S> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone())
    }
}

impl<S: Service<R>, R> Service<R> for MustBeReady<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        let ready = self.inner.poll_ready(cx);
        self.is_ready |= matches!(ready, Poll::Ready(Ok(())));
        ready
    }

    fn call(&mut self, request: R) -> S::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without having been ready");
        self.inner.call(request)
    }
}

/// A handler as a plain service, behind a gate for requests with the field `X-Wait`.
fn handler(
    runs: &Runs,
    gate: &Gate,
) -> impl Service<
    Asked,
    Response = Response<Full<bytes::Bytes>>,
    Error = BoxError,
    Future: Send + 'static,
> + Clone
+ Send
+ Sync
+ 'static {
    let (runs, gate) = (runs.clone(), gate.clone());
    tower::service_fn(move |request: Asked| {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move {
            let run = runs.up();
            if request.headers().contains_key("x-wait") {
                gate.pass().await;
            }
            Ok(Response::builder().status(201).body(Full::from(run.to_string()))?)
        }
    })
}

/// Many keys at once and one after the other, with requests that only pass between them.
async fn many(wire: Wire, server: &Server) {
    for round in 0..3 {
        let mut asking = Vec::new();
        for nth in 0..10 {
            asking.push(wire.asking(server, charge(&format!("k{round}-{nth}"))).await);
            asking.push(wire.asking(server, charge(&format!("k{round}-{nth}"))).await);
            asking.push(wire.asking(server, keyless("/charges").method(Method::GET)).await);
        }
        for reply in asking {
            assert_eq!(reply.await.unwrap().status, 201);
        }
    }
}

over_both! {
    case_020_a_time_out_is_kept_as_a_response_and_released_as_an_error,
    case_011_wherever_the_service_panics_the_key_is_settled,
    case_011_a_stream_that_panics_stays_not_kept,
    case_002_a_layer_within_a_layer_claims_once,
    case_002_an_outer_layer_that_lets_pass_leaves_it_to_the_inner,
    case_016_what_no_handler_takes_leaves_no_record,
    case_038_routes_that_share_a_tail_share_no_key,
}

over_all! {
    case_111_the_instance_that_was_made_ready_is_the_one_that_is_called,
    case_111_a_buffer_inside_is_made_ready,
    case_111_only_runs_take_the_inner_permit,
    case_111_a_replay_does_not_wait_for_the_service_inside,
    case_111_shed_load_leaves_no_trace,
    case_060_wherever_axum_puts_the_layer_the_endpoint_is_the_same,
}

async fn case_111_the_instance_that_was_made_ready_is_the_one_that_is_called(wire: Wire) {
    let (runs, gate) = (Runs::default(), Gate::new());
    let once = layer(&store()).operation_name("charge");
    let stack = ServiceBuilder::new()
        .layer(once.clone())
        .layer_fn(MustBeReady::new)
        .layer(ConcurrencyLimitLayer::new(1))
        .layer_fn(MustBeReady::new)
        .service(handler(&runs, &gate));
    let server = serve_fallible(stack).await;
    many(wire, &server).await;
    assert_eq!((runs.count(), once.stats().panics), (60, 0));
    idle(&once).await;
}

async fn case_111_a_buffer_inside_is_made_ready(wire: Wire) {
    let (runs, gate) = (Runs::default(), Gate::new());
    let once = layer(&store()).operation_name("charge");
    let stack = ServiceBuilder::new()
        .layer(once.clone())
        .layer_fn(MustBeReady::new)
        .layer(BufferLayer::new(1))
        .layer_fn(MustBeReady::new)
        .layer(ConcurrencyLimitLayer::new(1))
        .service(handler(&runs, &gate));
    let server = serve_fallible(stack).await;
    many(wire, &server).await;
    assert_eq!((runs.count(), once.stats().panics), (60, 0));
    idle(&once).await;
}

/// While the only permit is taken, whoever needs none is answered, and whoever waits for it
/// may leave.
async fn case_111_only_runs_take_the_inner_permit(wire: Wire) {
    let (runs, gate, present) = (Runs::default(), Gate::new(), Present::default());
    let store = store();
    let once = layer(&store);
    let app = {
        let (runs, gate) = (runs.clone(), gate.clone());
        let handler = move |request: Request<Body>| async move {
            let run = runs.up();
            if request.headers().contains_key("x-wait") {
                gate.pass().await;
            }
            (StatusCode::CREATED, run.to_string())
        };
        Router::new().route("/charges", route(handler))
    };
    let app = app.layer(ConcurrencyLimitLayer::new(1)).layer(once.clone());
    let server = serve(present.around(app)).await;
    let old = wire.ask(&server, charge("old")).await;
    assert_eq!(old.text(), "1");
    let call = || charge("k").field("X-Wait", "1");
    let first = wire.asking(&server, call()).await;
    gate.entered().await;

    assert_replay(&wire.ask(&server, charge("old")).await, &old);
    assert_eq!(wire.ask(&server, call().body("other")).await.problem(), "key-reused");
    let waiter = wire.asking(&server, call()).await;
    until(|| store.stats().waiters == 1).await;
    let hasty = wire.ask(&server, call().field("Prefer", "wait=0")).await;
    assert_eq!(hasty.problem(), "in-flight");

    // Claimed, and not begun: its client leaves, and it is not cancelled either.
    let queued = wire.begin(&server, &charge("queued")).await;
    until(|| once.stats().tasks == 2).await;
    let _stays = queued.leave(wire.ways_to_leave()[0]).await;
    until(|| present.count() == 2).await;
    assert_eq!((runs.count(), store.stats().in_flight), (2, 2));
    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.text()), (201, "2"));
    assert_replay(&waiter.await.unwrap(), &first);
    let queued = wire.ask(&server, charge("queued")).await;
    assert!(queued.is_replay() && queued.text() == "3");
    idle(&once).await;
}

/// Work that is cut off by a time-out had begun. What its retry is told depends on what the
/// time-out was made into before it came to the layer: a response like another, or the error that
/// says that nothing was done.
async fn case_020_a_time_out_is_kept_as_a_response_and_released_as_an_error(wire: Wire) {
    for is_response in [true, false] {
        let (runs, gate) = (Runs::default(), Gate::new());
        let once = layer(&store()).operation_name("charge");
        let time_out = TimeoutLayer::new(crate::common::MS);
        let server = if is_response {
            let answer = HandleErrorLayer::new(|_: BoxError| async { StatusCode::REQUEST_TIMEOUT });
            let stack = ServiceBuilder::new().layer(once.clone()).layer(answer).layer(time_out);
            serve_fallible(stack.service(handler(&runs, &gate))).await
        } else {
            let stack = ServiceBuilder::new().layer(once.clone()).layer(time_out);
            serve_fallible(stack.service(handler(&runs, &gate))).await
        };
        let call = || charge("k").field("X-Wait", "1");
        let first = wire.ask(&server, call()).await;
        assert_eq!(first.status, if is_response { 408 } else { 502 });
        let again = wire.ask(&server, call()).await;
        if is_response {
            assert_replay(&again, &first);
        } else {
            assert_eq!((again.status, again.is_replay()), (502, false));
        }
        assert_eq!(runs.count(), if is_response { 1 } else { 2 });
        assert_idle(&once);
    }
}

/// The layer itself is ready though the service inside is not.
async fn case_111_a_replay_does_not_wait_for_the_service_inside(wire: Wire) {
    let (runs, gate) = (Runs::default(), Gate::new());
    let once = layer(&store()).operation_name("charge");
    let stack = ServiceBuilder::new()
        .layer(once.clone())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(handler(&runs, &gate));
    let server = serve_fallible(stack).await;
    let old = wire.ask(&server, charge("old")).await;
    let first = wire.asking(&server, charge("k").field("X-Wait", "1")).await;
    gate.entered().await;
    assert_replay(&wire.ask(&server, charge("old")).await, &old);
    assert_eq!(wire.ask(&server, charge("old").body("other")).await.problem(), "key-reused");
    assert_eq!(wire.ask(&server, charge("a b")).await.problem(), "key-invalid");
    gate.open();
    assert_eq!(first.await.unwrap().text(), "2");
    idle(&once).await;
}

/// What is shed was not begun: the key is free again.
async fn case_111_shed_load_leaves_no_trace(wire: Wire) {
    let (runs, gate) = (Runs::default(), Gate::new());
    let store = store();
    let once = layer(&store).operation_name("charge");
    let stack = ServiceBuilder::new()
        .layer(once.clone())
        .layer_fn(MustBeReady::new)
        .layer(LoadShedLayer::new())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(handler(&runs, &gate));
    let server = serve_fallible(stack).await;
    let first = wire.asking(&server, charge("k").field("X-Wait", "1")).await;
    gate.entered().await;
    for _ in 0..3 {
        let shed = wire.ask(&server, charge("k2")).await;
        assert_eq!((shed.status, shed.is_replay()), (503, false));
        assert_eq!((store.stats().keys, once.stats().tasks), (1, 1));
    }
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    let retry = wire.ask(&server, charge("k2")).await;
    assert_eq!((retry.status, retry.text(), retry.is_replay()), (201, "2", false));
    // One after the other: two at once would rightly be shed.
    for nth in 3..13 {
        let reply = wire.ask(&server, charge(&format!("k{nth}"))).await;
        assert_eq!((reply.status, reply.text()), (201, &*nth.to_string()));
    }
    assert_eq!(once.stats().panics, 0);
    idle(&once).await;
}

/// Each place where a service can fail. Only what had begun may be held.
async fn case_011_wherever_the_service_panics_the_key_is_settled(wire: Wire) {
    for (place, afterwards) in [
        (Place::ErrorInReady, Some("2")),
        (Place::PanicInReady, Some("2")),
        (Place::PanicInCall, None),
        (Place::PanicInFuture, None),
        (Place::PanicInBody, None),
    ] {
        let (store, runs) = (store(), Runs::default());
        let once = layer(&store).operation_name("charge");
        let has_failed = Arc::new(AtomicBool::new(false));
        let faulty = Faulty { place, runs: runs.clone(), has_failed };
        let server =
            serve_fallible(ServiceBuilder::new().layer(once.clone()).service(faulty)).await;
        let first = wire.ask(&server, charge("k")).await;
        let status = if place == Place::ErrorInReady { 502 } else { 500 };
        assert_eq!((first.status, first.is_replay()), (status, false), "{place:?}");
        assert_idle(&once);
        let again = wire.ask(&server, charge("k")).await;
        match afterwards {
            Some(text) => assert_eq!((again.status, again.text()), (200, text), "{place:?}"),
            None => assert_eq!(again.problem(), "outcome-unknown", "{place:?}"),
        }
        assert_idle(&once);
    }
}

/// The body of a stream is polled for its client. If it panics there, the work was done.
async fn case_011_a_stream_that_panics_stays_not_kept(wire: Wire) {
    let store = Store::builder().on_abandon(Abandon::Release).build().unwrap();
    let once = layer(&store).operation_name("charge").max_response(2);
    let runs = Runs::default();
    let has_failed = Arc::new(AtomicBool::new(false));
    let faulty = Faulty { place: Place::PanicInTail, runs: runs.clone(), has_failed };
    let server = serve_fallible(ServiceBuilder::new().layer(once.clone()).service(faulty)).await;
    let first = wire.ask(&server, charge("k")).await;
    assert!(first.is_cut);
    assert_idle(&once);
    for _ in 0..2 {
        assert_eq!(wire.ask(&server, charge("k")).await.problem(), "response-not-kept");
    }
    assert_eq!(runs.count(), 1);
}

/// Two layers around one handler: one acts.
async fn case_002_a_layer_within_a_layer_claims_once(wire: Wire) {
    for is_one_store in [true, false] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let inner_store = if is_one_store { store.clone() } else { crate::store() };
        let (outer, inner) = (layer(&store), layer(&inner_store));
        let app = gated(&runs, &gate).layer(inner.clone()).layer(outer.clone());
        let server = serve(app).await;
        let first = wire.asking(&server, charge("k")).await;
        gate.entered().await;
        assert_eq!(store.stats().in_flight, 1);
        let waiter = wire.asking(&server, charge("k")).await;
        until(|| store.stats().waiters == 1).await;
        gate.open();
        let first = first.await.unwrap();
        for again in [waiter.await.unwrap(), wire.ask(&server, charge("k")).await] {
            assert_replay(&again, &first);
            assert_eq!(again.lines("idempotent-replayed").len(), 1);
        }
        assert_eq!((runs.count(), store.stats().won), (1, 1));
        assert_idle(&outer);
        assert_idle(&inner);
    }
}

/// The outer layer knows no endpoint and lets the request pass; then the inner one acts.
async fn case_002_an_outer_layer_that_lets_pass_leaves_it_to_the_inner(wire: Wire) {
    let (outer_store, inner_store, runs) = (store(), store(), Runs::default());
    let (outer, inner) = (layer(&outer_store), layer(&inner_store));
    // Around the whole router, where no route is known yet.
    let app = ServiceBuilder::new().layer(outer.clone()).service(counting(&runs).layer(inner));
    let server = crate::sockets::serve_service(app).await;
    let first = wire.ask(&server, charge("k")).await;
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert_eq!((outer_store.stats().won, inner_store.stats().won), (0, 1));
    assert_eq!((outer.stats().unclaimed, runs.count()), (2, 1));
}

/// Around the router, its routes or one method of one route: the endpoint is the same, and so
/// is the key.
async fn case_060_wherever_axum_puts_the_layer_the_endpoint_is_the_same(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let handler = {
        let runs = runs.clone();
        move || async move { runs.up().to_string() }
    };
    let routes = || Router::new().route("/charges/{id}", route(handler.clone()));
    let single = route(handler.clone()).layer(once.clone());
    let mut first = None;
    for app in [
        routes().layer(once.clone()),
        routes().route_layer(once.clone()),
        Router::new().route("/charges/{charge}", single),
        Router::new()
            .nest("/charges", Router::new().route("/{id}", route(handler.clone())))
            .layer(once.clone()),
    ] {
        let server = serve(app).await;
        let reply = wire.ask(&server, post("/charges/7", "k")).await;
        match &first {
            None => first = Some(reply),
            Some(first) => assert_replay(&reply, first),
        }
    }
    assert_eq!((runs.count(), store.stats().keys), (1, 1));
}

/// What no handler takes leaves no record: no such path, no such method, and the methods that
/// are not covered.
async fn case_016_what_no_handler_takes_leaves_no_record(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let app = counting(&runs).route("/read", axum::routing::get(|| async { "read" }));
    let server = serve(app.layer(once.clone())).await;
    for (call, status) in [
        (post("/nowhere", "k"), 404),
        (post("/read", "k"), 405),
        (charge("k").method(Method::HEAD), 405),
        (charge("k").method(Method::OPTIONS), 405),
        (charge("k").method(Method::DELETE), 405),
        (charge("k").method(Method::PATCH), 405),
        (charge("a b").method(Method::GET), 405),
    ] {
        for _ in 0..2 {
            // An answer to HEAD is not read as if it had a body.
            let reply = match wire {
                Wire::Http1 => {
                    let mut client = Client::connect(&server).await;
                    client.send(call.to_bytes()).await;
                    client.head().await
                }
                Wire::Http2 => wire.ask(&server, call.clone()).await,
            };
            assert_eq!((reply.status, reply.is_replay()), (status, false));
        }
    }
    idle(&once).await;
    assert_eq!((runs.count(), store.stats().keys), (0, 0));
    assert_eq!(once.stats().unclaimed, 2, "only where there is no route");
}

/// Nested and wildcard routes: what was matched and what was asked for are both whole.
async fn case_038_routes_that_share_a_tail_share_no_key(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let inner = || {
        let runs = runs.clone();
        let handler = move || async move { runs.up().to_string() };
        Router::new()
            .route("/charges", route(handler.clone()))
            .route("/files/{*rest}", route(handler))
    };
    // The same inner router in three places, one of them with the layer inside.
    let app = Router::new()
        .nest("/a", inner())
        .nest("/{tenant}/b", inner())
        .layer(once.clone())
        .nest("/{tenant}/c", inner().layer(once.clone()));
    let server = serve(app).await;
    for (nth, (path, endpoint)) in [
        ("/a/charges", "POST /a/charges"),
        ("/x/b/charges", "POST /{}/b/charges"),
        ("/x/c/charges", "POST /{}/c/charges"),
        ("/a/files/1/2", "POST /a/files/{*}"),
        ("/x/c/files/1", "POST /{}/c/files/{*}"),
    ]
    .into_iter()
    .enumerate()
    {
        let first = wire.ask(&server, post(path, "k")).await;
        assert_eq!(first.text(), (nth + 1).to_string(), "{path}");
        assert_replay(&wire.ask(&server, post(path, "k")).await, &first);
        let of_route = oncekey::Identity::new("", endpoint, "k").unwrap();
        assert!(store.look_up(&of_route).is_some(), "{endpoint}");
    }
    // Another path or query of one route: a mismatch, never a replay.
    for other in [
        "/y/b/charges",
        "/y/c/charges",
        "/a/files/1/3",
        "/a/files/1/2?x",
        "/x/c/files/1/",
        "/a/charges?",
    ] {
        let refused = wire.ask(&server, post(other, "k")).await;
        assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"), "{other}");
    }
    assert_eq!((runs.count(), store.stats().keys), (5, 5));
    assert_eq!(store.look_up(&identity("k")), None);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    ErrorInReady,
    PanicInReady,
    PanicInCall,
    PanicInFuture,
    PanicInBody,
    PanicInTail,
}

/// A service that fails once, in one place.
#[derive(Clone)]
struct Faulty {
    place: Place,
    runs: Runs,
    has_failed: Arc<AtomicBool>,
}

impl Faulty {
    fn fails_at(&self, place: Place) -> bool {
        self.place == place && !self.has_failed.swap(true, Ordering::SeqCst)
    }
}

impl Service<Asked> for Faulty {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.fails_at(Place::ErrorInReady) {
            self.runs.up();
            return Poll::Ready(Err("not ready".into()));
        }
        if self.fails_at(Place::PanicInReady) {
            self.runs.up();
            panic!("not ready, as it should be in this test");
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Asked) -> Self::Future {
        let run = self.runs.up();
        assert!(!self.fails_at(Place::PanicInCall), "as it should in this test");
        let this = self.clone();
        Box::pin(async move {
            assert!(!this.fails_at(Place::PanicInFuture), "as it should in this test");
            if this.fails_at(Place::PanicInBody) || this.fails_at(Place::PanicInTail) {
                let mut polls = 0;
                let body = futures_util::stream::poll_fn(move |cx| {
                    polls += 1;
                    // A pause, so that the server sends what it has.
                    if polls == 3 {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    assert!(polls < 3, "as it should in this test");
                    Poll::Ready(Some(Ok::<_, BoxError>("piece")))
                });
                return Ok(Response::new(Body::from_stream(body)));
            }
            Ok(Response::new(Body::from(run.to_string())))
        })
    }
}
