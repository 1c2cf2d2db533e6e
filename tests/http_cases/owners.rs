//! The owner is slow, is left by its client, fails, or calls itself.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use futures_util::stream;
use oncekey::{
    Abandon, Claim, EntryState, Fingerprint, Resolution, ResolveError, Store,
    http::{BoxError, Idempotency, RequestBody, StatusTable},
};
use tower::{Service, ServiceBuilder, service_fn};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    assert_idle, charge as identity, charges,
    common::{HOUR, MS, SECOND, by_hand_with},
    gated, idle, layer, serve_fallible,
    sockets::{Gate, Runs, serve, until},
    store,
    wire::{Present, Wire, assert_replay, charge},
};

over_both! {
    case_002_a_duplicate_waits_for_the_slow_first_and_gets_its_bytes,
    case_002_or_is_told_409_at_once_where_nobody_waits,
    case_008_a_client_that_leaves_cancels_nothing,
    case_008_the_outcome_is_stored_for_a_retry_that_comes_later,
    case_008_a_waiter_that_leaves_only_removes_itself,
    case_011_a_panic_blocks_nobody,
    case_011_a_panic_leaves_no_waiter_behind,
    case_016_no_way_of_answering_leaves_the_key_in_flight,
    case_016_no_way_of_answering_leaves_a_waiter_behind,
    case_017_after_a_release_the_retry_runs,
    case_020_what_a_failure_leaves_is_a_setting,
    case_020_lease_and_retention_are_two_settings,
    case_022_an_owner_that_is_no_longer_polled_is_not_waited_for_in_vain,
    case_030_a_handler_that_calls_itself_ends_by_the_wait_limit,
}

/// A slow first request, and a duplicate on another connection that waits for it.
async fn case_002_a_duplicate_waits_for_the_slow_first_and_gets_its_bytes(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let second = wire.asking(&server, charge("k")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!((first.status, first.text()), (201, "1"));
    assert_replay(&second, &first);
    assert_eq!(runs.count(), 1);
}

async fn case_002_or_is_told_409_at_once_where_nobody_waits(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).wait_limit(Duration::ZERO);
    let server = serve(gated(&runs, &gate).layer(once)).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let second = wire.ask(&server, charge("k")).await;
    assert_eq!((second.status, second.problem().as_str()), (409, "in-flight"));
    assert!(second.field("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    gate.open();
    let first = first.await.unwrap();
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert_eq!(runs.count(), 1);
}

/// The client is gone, as the server knows, while the handler runs; the retry waits for that
/// very run.
async fn case_008_a_client_that_leaves_cancels_nothing(wire: Wire) {
    for &way in wire.ways_to_leave() {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let (once, present) = (layer(&store), Present::default());
        let server = serve(present.around(gated(&runs, &gate).layer(once.clone()))).await;
        let gone = wire.begin(&server, &charge("k")).await;
        gate.entered().await;
        let _stays = gone.leave(way).await;
        until(|| present.count() == 0).await;
        assert_eq!((store.stats().in_flight, once.stats().tasks), (1, 1), "{way:?}");

        let retry = wire.asking(&server, charge("k")).await;
        until(|| store.stats().waiters == 1).await;
        gate.open();
        let retry = retry.await.unwrap();
        assert_eq!((retry.status, retry.text()), (201, "1"), "{way:?}");
        assert!(retry.is_replay());
        assert_eq!(runs.count(), 1);
        idle(&once).await;
    }
}

/// As above, but nobody asks before the handler has ended.
async fn case_008_the_outcome_is_stored_for_a_retry_that_comes_later(wire: Wire) {
    for &way in wire.ways_to_leave() {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let (once, present) = (layer(&store), Present::default());
        let server = serve(present.around(gated(&runs, &gate).layer(once.clone()))).await;
        let gone = wire.begin(&server, &charge("k")).await;
        gate.entered().await;
        let _stays = gone.leave(way).await;
        until(|| present.count() == 0).await;
        gate.open();
        idle(&once).await;
        let retry = wire.ask(&server, charge("k")).await;
        assert!(retry.is_replay() && retry.text() == "1", "{way:?}");
        assert_eq!(runs.count(), 1);
    }
}

/// A waiter that leaves takes nothing with it, and no gift is lost with it.
async fn case_008_a_waiter_that_leaves_only_removes_itself(wire: Wire) {
    for &way in wire.ways_to_leave() {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let (once, present) = (layer(&store), Present::default());
        let server = serve(present.around(gated(&runs, &gate).layer(once.clone()))).await;
        let first = wire.asking(&server, charge("k")).await;
        gate.entered().await;
        let gone = wire.begin(&server, &charge("k")).await;
        until(|| store.stats().waiters == 1).await;
        let stays = wire.asking(&server, charge("k")).await;
        until(|| store.stats().waiters == 2).await;
        let _stays = gone.leave(way).await;
        until(|| store.stats().waiters == 1).await;
        gate.open();
        assert_replay(&stays.await.unwrap(), &first.await.unwrap());
        assert_eq!(runs.count(), 1);
        idle(&once).await;
    }
}

/// Whichever side of ours a catch-panic layer stands on, and without one, the key is never in
/// flight afterwards.
async fn case_011_a_panic_blocks_nobody(wire: Wire) {
    for (inside, outside) in [(false, false), (false, true), (true, false), (true, true)] {
        for on_abandon in [Abandon::Hold, Abandon::Release] {
            let store = Store::builder().on_abandon(on_abandon).build().unwrap();
            let (once, runs) = (layer(&store), Runs::default());
            let mut app = panicking(&runs);
            if inside {
                app = app.layer(CatchPanicLayer::new());
            }
            app = app.layer(once.clone());
            if outside {
                app = app.layer(CatchPanicLayer::new());
            }
            let server = serve(app).await;
            let first = wire.ask(&server, charge("k")).await;
            assert_eq!(first.status, 500);
            assert_idle(&once);
            let again = wire.ask(&server, charge("k")).await;
            match (inside, on_abandon) {
                // To our layer it was an answer like another, and 500 is kept.
                (true, _) => assert_replay(&again, &first),
                (false, Abandon::Hold) => assert_eq!(again.problem(), "outcome-unknown"),
                (false, Abandon::Release) => assert_eq!((again.status, again.text()), (201, "2")),
            }
            let has_rerun = !inside && on_abandon == Abandon::Release;
            assert_eq!(runs.count(), 1 + usize::from(has_rerun));
            assert_eq!(once.stats().panics, u64::from(!inside));
        }
    }
}

/// The waiters of an owner that panics are told, or one of them runs.
async fn case_011_a_panic_leaves_no_waiter_behind(wire: Wire) {
    for on_abandon in [Abandon::Hold, Abandon::Release] {
        let store = Store::builder().on_abandon(on_abandon).build().unwrap();
        let (once, runs, gate) = (layer(&store), Runs::default(), Gate::new());
        let server = serve(panicking_at(&runs, &gate).layer(once.clone())).await;
        let first = wire.asking(&server, charge("k")).await;
        gate.entered().await;
        let mut waiters = Vec::new();
        for nth in 1..=3 {
            waiters.push(wire.asking(&server, charge("k")).await);
            until(|| store.stats().waiters == nth).await;
        }
        gate.open();
        assert_eq!(first.await.unwrap().status, 500);
        if on_abandon == Abandon::Release {
            gate.entered().await;
            gate.open();
        }
        for waiter in waiters {
            let told = waiter.await.unwrap();
            match on_abandon {
                Abandon::Hold => assert_eq!(told.problem(), "outcome-unknown"),
                Abandon::Release => assert_eq!((told.status, told.text()), (201, "2")),
            }
        }
        idle(&once).await;
    }
}

/// Whatever a handler ends with, its key is completed or released by rule.
async fn case_016_no_way_of_answering_leaves_the_key_in_flight(wire: Wire) {
    use Afterwards::*;
    type Answers = fn() -> Result<Response, BoxError>;
    let cases: [(&str, Answers, Afterwards); 9] = [
        ("204", || Ok(StatusCode::NO_CONTENT.into_response()), Replayed),
        (
            "a redirect",
            || Ok((StatusCode::SEE_OTHER, [("location", "/c/1")]).into_response()),
            Replayed,
        ),
        ("an error", || Err("no".into()), RunsAgain),
        ("a stream", || Ok(Body::from_stream(stream::iter(pieces(3))).into_response()), Replayed),
        ("a broken stream", || Ok(broken(StatusCode::OK)), NotKept),
        ("a broken stream of a kept failure", || Ok(broken(StatusCode::BAD_GATEWAY)), NotKept),
        (
            "a broken stream of a released status",
            || Ok(broken(StatusCode::SERVICE_UNAVAILABLE)),
            RunsAgain,
        ),
        ("an empty body", || Ok(StatusCode::OK.into_response()), Replayed),
        (
            "a stream of nothing",
            || Ok(Body::from_stream(stream::iter(pieces(0))).into_response()),
            Replayed,
        ),
    ];
    for (name, answer, afterwards) in cases {
        let (store, runs) = (store(), Runs::default());
        let once = layer(&store).operation_name("charge");
        let counted = runs.clone();
        let handler = service_fn(move |_: http::Request<RequestBody<_>>| {
            counted.up();
            std::future::ready(answer())
        });
        let stack = ServiceBuilder::new().layer(once.clone()).service(handler);
        let server = serve_fallible(stack).await;
        let first = wire.ask(&server, charge("k")).await;
        assert_eq!(first.is_cut, name.contains("broken"), "{name}");
        assert_idle(&once);
        let again = wire.ask(&server, charge("k")).await;
        match afterwards {
            Replayed => assert_replay(&again, &first),
            NotKept => assert_eq!(again.problem(), "response-not-kept", "{name}"),
            RunsAgain => assert!(again.is_cut == first.is_cut && !again.is_replay(), "{name}"),
        }
        assert_eq!(runs.count(), if afterwards == RunsAgain { 2 } else { 1 }, "{name}");
        assert_idle(&once);
    }
}

/// The same while others wait: nobody is left behind, and the handler runs as often as the
/// rule says.
async fn case_016_no_way_of_answering_leaves_a_waiter_behind(wire: Wire) {
    for (status, runs_in_all) in [
        (StatusCode::NO_CONTENT, 1),
        (StatusCode::INTERNAL_SERVER_ERROR, 1),
        // The waiters get this answer too: no storm against a sick service.
        (StatusCode::SERVICE_UNAVAILABLE, 1),
        (StatusCode::TOO_MANY_REQUESTS, 1),
        // One after the other becomes the owner.
        (StatusCode::BAD_REQUEST, 4),
    ] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let once = layer(&store);
        let handler = {
            let (runs, gate) = (runs.clone(), gate.clone());
            move || {
                let (runs, gate) = (runs.clone(), gate.clone());
                async move {
                    runs.up();
                    gate.pass().await;
                    status
                }
            }
        };
        let server = serve(charges(handler).layer(once.clone())).await;
        let first = wire.asking(&server, charge("k")).await;
        gate.entered().await;
        let mut waiters = Vec::new();
        for nth in 1..=3 {
            waiters.push(wire.asking(&server, charge("k")).await);
            until(|| store.stats().waiters == nth).await;
        }
        for _ in 0..runs_in_all {
            gate.open();
        }
        assert_eq!(first.await.unwrap().status, status.as_u16());
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap().status, status.as_u16());
        }
        assert_eq!(runs.count(), runs_in_all, "{status}");
        idle(&once).await;
    }
}

/// Keys that a careless clean-up would look up under another name.
async fn case_017_after_a_release_the_retry_runs(wire: Wire) {
    let store = store();
    let (once, runs) = (layer(&store), Runs::default());
    let table = StatusTable::default().release(StatusCode::INTERNAL_SERVER_ERROR);
    let server = serve(failing_first(&runs).layer(once.clone().statuses(table))).await;
    let keys: [(&str, &str); 7] = [
        ("plain", "plain"),
        ("a:b:c", "a:b:c"),
        (r#""a:b""#, "a:b"),
        (r#""say \"hi\"""#, r#"say "hi""#),
        (r#""back\\slash""#, r"back\slash"),
        ("{}'()*;=", "{}'()*;="),
        (r#"" spaces at the ends ""#, " spaces at the ends "),
    ];
    for (field, key) in keys {
        let run = runs.count();
        let first = wire.ask(&server, charge(field)).await;
        assert_eq!((first.status, runs.count()), (500, run + 1), "{field}");
        assert_eq!(store.look_up(&identity(key)), None, "a released identity remembers nothing");
        let retry = wire.ask(&server, charge(field)).await;
        assert_eq!((retry.status, runs.count()), (201, run + 2), "{field}");
        assert_eq!(store.look_up(&identity(key)).unwrap().state, EntryState::Completed);
        assert_replay(&wire.ask(&server, charge(field)).await, &retry);
    }
    assert_idle(&once);
    assert_eq!(store.stats().keys, keys.len());
}

/// "Store" and "release" for a failure after the side effect, each of both kinds.
async fn case_020_what_a_failure_leaves_is_a_setting(wire: Wire) {
    let release_500 = StatusTable::default().release(StatusCode::INTERNAL_SERVER_ERROR);
    for (table, is_kept) in [(StatusTable::default(), true), (release_500, false)] {
        let (store, runs) = (store(), Runs::default());
        let server = serve(failing_first(&runs).layer(layer(&store).statuses(table))).await;
        let first = wire.ask(&server, charge("k")).await;
        assert_eq!(first.status, 500);
        let again = wire.ask(&server, charge("k")).await;
        assert_eq!(
            (again.status, again.is_replay()),
            if is_kept { (500, true) } else { (201, false) }
        );
        assert_eq!(runs.count(), if is_kept { 1 } else { 2 });
    }
    for (on_abandon, status, runs_in_all) in [(Abandon::Hold, 409, 1), (Abandon::Release, 201, 2)] {
        let store = Store::builder().on_abandon(on_abandon).build().unwrap();
        let runs = Runs::default();
        let server = serve(panicking(&runs).layer(layer(&store))).await;
        assert_eq!(wire.ask(&server, charge("k")).await.status, 500);
        assert_eq!(wire.ask(&server, charge("k")).await.status, status);
        assert_eq!(runs.count(), runs_in_all);
    }
}

/// The time an owner may be silent and the time an outcome is kept are two settings.
async fn case_020_lease_and_retention_are_two_settings(wire: Wire) {
    let (store, clock) = by_hand_with(|store| store.lease(SECOND).retention(HOUR));
    let (runs, gate) = (Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    clock.advance(SECOND * 10);
    store.sweep();
    let hasty = wire.ask(&server, charge("k").field("Prefer", "wait=0")).await;
    assert_eq!(hasty.problem(), "in-flight", "a living owner is not overrun");
    gate.open();
    let first = first.await.unwrap();
    clock.advance(HOUR - SECOND);
    store.sweep();
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    clock.advance(SECOND);
    gate.open();
    assert_eq!(wire.ask(&server, charge("k")).await.text(), "2");
}

/// The first request's future is polled once and then kept: alive, and never polled again. The
/// body is empty, so that one poll is enough to claim.
async fn case_022_an_owner_that_is_no_longer_polled_is_not_waited_for_in_vain(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let (once, frozen) = (layer(&store), Frozen::default());
    let server = serve(frozen.around(gated(&runs, &gate).layer(once.clone()))).await;
    let unanswered = wire.begin(&server, &charge("k").body("").field("X-Freeze", "1")).await;
    gate.entered().await;
    let hasty = charge("k").body("").field("Prefer", "wait=0");
    let hasty = wire.ask(&server, hasty).await;
    assert_eq!((hasty.status, hasty.problem().as_str()), (409, "in-flight"));
    assert!(hasty.field("retry-after").is_some());

    let second = wire.asking(&server, charge("k").body("")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let second = second.await.unwrap();
    assert!(second.is_replay() && second.text() == "1");
    // The task of the owner runs by itself, also before the future that began it is put away.
    until(|| frozen.count() == 1).await;
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
    drop(unanswered);
}

/// The handler calls its own server for the very thing it is doing.
async fn case_030_a_handler_that_calls_itself_ends_by_the_wait_limit(wire: Wire) {
    let store = store();
    let (runs, own) = (Runs::default(), Arc::new(tokio::sync::OnceCell::new()));
    let handler = {
        let (runs, own) = (runs.clone(), Arc::clone(&own));
        move || {
            let (runs, own) = (runs.clone(), Arc::clone(&own));
            async move {
                runs.up();
                let inner = wire.ask(own.get().unwrap(), charge("k")).await;
                (StatusCode::CREATED, format!("{} {}", inner.status, inner.problem()))
            }
        }
    };
    let once = layer(&store).wait_limit(MS);
    let server = serve(charges(handler).layer(once.clone())).await;
    let shared = own.get_or_init(|| std::future::ready(server)).await;
    let first = wire.ask(shared, charge("k")).await;
    assert_eq!((first.status, first.text()), (201, "409 in-flight"));
    assert_replay(&wire.ask(shared, charge("k")).await, &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// More other keys than the store has shards, so that some of them share one with the outer key,
/// and on one thread, where a lock that is held by the handler could never be had.
#[tokio::test]
async fn case_030_a_handler_that_calls_itself_for_other_keys_does_not_deadlock() {
    let _watchdog = crate::common::watchdog();
    let store = store();
    let own = Arc::new(tokio::sync::OnceCell::new());
    let inner_runs = Runs::default();
    let handler = {
        let (own, inner_runs) = (Arc::clone(&own), inner_runs.clone());
        move |headers: HeaderMap| async move {
            if headers["idempotency-key"] != "outer" {
                return inner_runs.up().to_string();
            }
            for nth in 0..300 {
                let inner = Wire::Http1.ask(own.get().unwrap(), charge(&format!("k{nth}"))).await;
                assert_eq!(inner.status, 200);
            }
            "outer".to_owned()
        }
    };
    let once = layer(&store);
    let server = serve(Router::new().route("/charges", post(handler)).layer(once.clone())).await;
    let shared = own.get_or_init(|| std::future::ready(server)).await;
    assert_eq!(Wire::Http1.ask(shared, charge("outer")).await.text(), "outer");
    assert_eq!(inner_runs.count(), 300);
    assert_idle(&once);
}

/// What the store says to those who release what is not theirs.
#[test]
fn case_017_releasing_what_is_unknown_or_anothers_is_an_error() {
    let store = store();
    let released = store.resolve(&identity("unknown"), Resolution::Release);
    assert_eq!(released, Err(ResolveError::Absent));

    let fingerprint = Fingerprint::request("POST", "/charges", b"{}");
    let Ok(Claim::Won(stale)) = store.claim(&identity("k"), fingerprint) else { panic!() };
    assert!(store.forget_forced(&identity("k")));
    let Ok(Claim::Won(present)) = store.claim(&identity("k"), fingerprint) else { panic!() };
    assert!(stale.release().is_err());
    assert_eq!(store.look_up(&identity("k")).unwrap().state, EntryState::InFlight);
    present.release().unwrap();
}

/// The layer's future by itself, without any server around it: polled once, then kept.
#[tokio::test]
async fn case_022_one_poll_of_the_layers_future_is_enough() {
    let _watchdog = crate::common::watchdog();
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let handler = service_fn(move |_: http::Request<RequestBody<http_body_util::Full<Bytes>>>| {
        let at = at.clone();
        async move {
            at.pass().await;
            Ok::<_, BoxError>(http::Response::new(http_body_util::Full::from("done")))
        }
    });
    let once = layer(&store).operation_name("charge");
    let mut service: Idempotency<_> = ServiceBuilder::new().layer(once.clone()).service(handler);
    let request = || {
        let request = http::Request::post("/").header("idempotency-key", "k");
        request.body(http_body_util::Full::from("{}")).unwrap()
    };
    let mut kept = pin!(service.call(request()));
    poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx).is_pending())).await;
    gate.entered().await;
    let second = tokio::spawn(service.call(request()));
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let second = second.await.unwrap().unwrap();
    assert_eq!(second.headers()["idempotent-replayed"], "true");
    assert_idle(&once);
    let first = kept.await.unwrap();
    assert!(!first.headers().contains_key("idempotent-replayed"));
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Afterwards {
    Replayed,
    NotKept,
    RunsAgain,
}

fn pieces(of: usize) -> impl Iterator<Item = Result<Bytes, BoxError>> {
    (0..of).map(|_| Ok(Bytes::from_static(b"piece")))
}

/// A body that breaks off after its first piece.
fn broken(status: StatusCode) -> Response {
    let pieces = [Ok(Bytes::from_static(b"piece")), Err(BoxError::from("broken"))];
    (status, Body::from_stream(stream::iter(pieces))).into_response()
}

/// `POST /charges`, whose first run panics.
fn panicking(runs: &Runs) -> Router {
    let gate = Gate::new();
    gate.open();
    gate.open();
    panicking_at(runs, &gate)
}

/// As [`panicking`], behind a gate.
fn panicking_at(runs: &Runs, gate: &Gate) -> Router {
    let (runs, gate) = (runs.clone(), gate.clone());
    charges(move || {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move {
            let run = runs.up();
            gate.pass().await;
            assert!(run > 1, "the first run panics, as it should in this test");
            (StatusCode::CREATED, run.to_string())
        }
    })
}

/// `POST /charges`, which answers 500 to each odd run.
fn failing_first(runs: &Runs) -> Router {
    let runs = runs.clone();
    charges(move || {
        let run = runs.up();
        let status =
            if run % 2 == 1 { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::CREATED };
        std::future::ready((status, run.to_string()))
    })
}

/// A careless server: it polls some of the futures inside once, and then only keeps them.
#[derive(Clone, Default)]
struct Frozen(Arc<Mutex<Vec<Box<dyn Send>>>>);

impl Frozen {
    /// Freezes each request with the field `X-Freeze`.
    fn around(&self, app: Router) -> Router {
        let frozen = Arc::clone(&self.0);
        app.layer(middleware::from_fn(move |request: Request, next: Next| {
            let frozen = Arc::clone(&frozen);
            async move {
                let freezes = request.headers().contains_key("x-freeze");
                let mut inner = Box::pin(next.run(request));
                if freezes {
                    let is_pending =
                        poll_fn(|cx| Poll::Ready(inner.as_mut().poll(cx).is_pending())).await;
                    assert!(is_pending);
                    frozen.lock().unwrap().push(Box::new(inner));
                    std::future::pending::<()>().await;
                    unreachable!()
                }
                inner.await
            }
        }))
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}
