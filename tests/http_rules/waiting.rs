//! Those who came second: R13 to R15.

use std::{mem, time::Duration};

use axum::{Router, response::IntoResponse, routing::post};
use http::StatusCode;
use oncekey::{Claim, Fingerprint, Lapse, Store, Sweep, http::Release};
use tower::{ServiceBuilder, limit::ConcurrencyLimitLayer};

use crate::{
    LONG, charge, charges,
    common::{MS, watchdog},
    gated, layer,
    sockets::{Client, Gate, Runs, Server, ask, asking, post as posting, request, serve, until},
    store,
};

fn preferring(key: &str, prefer: &str) -> Vec<u8> {
    request("POST", "/charges", &[("Idempotency-Key", key), ("Prefer", prefer)], "{}")
}

#[tokio::test]
async fn r13_a_duplicate_waits_and_gets_the_same_answer() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    let waiting: Vec<_> =
        (0..50).map(|_| asking(&server, posting("/charges", "k", "{}"))).collect();
    until(|| store.stats().waiters == 50).await;
    gate.open();
    let first = first.await.unwrap();
    assert!(!first.is_replay());
    for waiting in waiting {
        let reply = waiting.await.unwrap();
        assert!(reply.is_replay());
        assert_eq!((reply.status, &reply.body), (first.status, &first.body));
    }
    assert_eq!((runs.count(), store.stats().waiters), (1, 0));
}

#[tokio::test]
async fn r13_the_limit_ends_a_wait_with_409_and_a_time_to_ask_again() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store).wait_limit(MS))).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    for _ in 0..3 {
        let late = ask(&server, posting("/charges", "k", "{}")).await;
        assert_eq!((late.status, late.problem().as_str()), (409, "in-flight"));
        assert!(matches!(late.field("retry-after"), Some("1" | "2")));
    }
    assert_eq!(store.stats().waiters, 0);
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(ask(&server, posting("/charges", "k", "{}")).await.is_replay());
}

#[tokio::test]
async fn r13_a_client_may_lower_the_limit_and_raise_it_to_the_cap() {
    let _watchdog = watchdog();
    for (limit, cap, prefer, waits) in [
        (LONG, LONG, "wait=0", false),
        (LONG, LONG, "respond-async, wait=0, wait=100", false),
        (Duration::ZERO, LONG, "wait=100", true),
        (Duration::ZERO, LONG, "wait=soon", false),
        (Duration::ZERO, MS, "wait=3600", false),
        (LONG, MS, "wait=3600", true),
    ] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let layer = layer(&store).wait_limit(limit).wait_cap(cap);
        let server = serve(gated(&runs, &gate).layer(layer)).await;
        let first = asking(&server, posting("/charges", "k", "{}"));
        gate.entered().await;
        let second = asking(&server, preferring("k", prefer));
        if waits {
            until(|| store.stats().waiters == 1).await;
            gate.open();
            assert!(second.await.unwrap().is_replay());
        } else {
            assert_eq!(second.await.unwrap().problem(), "in-flight", "{prefer}");
            gate.open();
        }
        assert_eq!(first.await.unwrap().text(), "1");
    }
}

/// A store that nobody sweeps, with an owner that shows no sign of life, and a server on it.
async fn with_a_dead_owner(on_lapse: Lapse, runs: &Runs) -> (Store, Server) {
    let builder = Store::builder().sweep(Sweep::Manual).lease(MS * 50).on_lapse(on_lapse);
    let store = builder.build().unwrap();
    let server = serve(charges(runs).layer(layer(&store))).await;
    let print = Fingerprint::request("POST", "/charges", b"{}");
    let Ok(Claim::Won(permit)) = store.claim(&charge("k"), print) else { panic!("not won") };
    mem::forget(permit);
    (store, server)
}

#[tokio::test]
async fn r13_no_wait_outlasts_a_lapsed_lease() {
    let _watchdog = watchdog();
    let runs = Runs::default();
    let (_store, server) = with_a_dead_owner(Lapse::Hold, &runs).await;
    let told = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!(told.problem(), "outcome-unknown");
    assert_eq!(runs.count(), 0);

    let (_store, server) = with_a_dead_owner(Lapse::TakeOver, &runs).await;
    let waiting: Vec<_> = (0..5).map(|_| asking(&server, posting("/charges", "k", "{}"))).collect();
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().text(), "1");
    }
    assert_eq!(runs.count(), 1);
}

/// A handler that answers `first` in its first run and says how often it ran in later ones, all
/// behind a gate.
fn changing<R: IntoResponse + Clone + Send + Sync + 'static>(
    runs: &Runs,
    gate: &Gate,
    first: R,
) -> Router {
    let (runs, gate) = (runs.clone(), gate.clone());
    let handler = move || async move {
        let run = runs.up();
        gate.pass().await;
        if run == 1 { first.into_response() } else { run.to_string().into_response() }
    };
    Router::new().route("/charges", post(handler))
}

#[tokio::test]
async fn r14_those_present_get_a_released_503_and_the_next_caller_runs() {
    let _watchdog = watchdog();
    for status in [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let first = (status, [("retry-after", "7")], "sick");
        let server = serve(changing(&runs, &gate, first).layer(layer(&store))).await;
        let owner = asking(&server, posting("/charges", "k", "{}"));
        gate.entered().await;
        let present: Vec<_> =
            (0..5).map(|_| asking(&server, posting("/charges", "k", "{}"))).collect();
        until(|| store.stats().waiters == 5).await;
        gate.open();
        let owner = owner.await.unwrap();
        assert_eq!((owner.status, owner.is_replay()), (status.as_u16(), false));
        for present in present {
            let reply = present.await.unwrap();
            assert_eq!((reply.status, reply.text()), (status.as_u16(), "sick"));
            assert_eq!(reply.field("retry-after"), Some("7"));
            // A replay is final, and this is not: the key is free.
            assert!(!reply.is_replay());
        }
        assert_eq!((runs.count(), store.stats().keys), (1, 0));
        gate.open();
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "2");
    }
}

#[tokio::test]
async fn r14_on_any_other_release_exactly_one_waiter_runs() {
    let _watchdog = watchdog();
    for first in [
        (StatusCode::NOT_FOUND, "gone").into_response(),
        (StatusCode::OK, Release, "not yet").into_response(),
    ] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let status = first.status();
        // Responses are no `Clone`: handed over once.
        let first = std::sync::Arc::new(std::sync::Mutex::new(Some(first)));
        let first = Once(first);
        let server = serve(changing(&runs, &gate, first).layer(layer(&store))).await;
        let owner = asking(&server, posting("/charges", "k", "{}"));
        gate.entered().await;
        let waiting: Vec<_> =
            (0..5).map(|_| asking(&server, posting("/charges", "k", "{}"))).collect();
        until(|| store.stats().waiters == 5).await;
        gate.open();
        assert_eq!(owner.await.unwrap().status, status.as_u16());
        gate.entered().await;
        assert_eq!(store.stats().waiters, 4);
        gate.open();
        let mut replays = 0;
        for waiting in waiting {
            let reply = waiting.await.unwrap();
            assert_eq!((reply.status, reply.text()), (200, "2"));
            replays += usize::from(reply.is_replay());
        }
        assert_eq!((replays, runs.count()), (4, 2));
    }
}

/// A response that is handed out once.
#[derive(Clone)]
struct Once(std::sync::Arc<std::sync::Mutex<Option<axum::response::Response>>>);

impl IntoResponse for Once {
    fn into_response(self) -> axum::response::Response {
        self.0.lock().unwrap().take().unwrap()
    }
}

#[tokio::test]
async fn r14_if_the_next_owner_is_gone_the_one_after_it_runs() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let first = (StatusCode::NOT_FOUND, "gone");
    let server = serve(changing(&runs, &gate, first).layer(layer(&store))).await;
    let owner = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    let mut leaving = Client::connect(&server).await;
    leaving.send(posting("/charges", "k", "{}")).await;
    until(|| store.stats().waiters == 1).await;
    let staying = asking(&server, posting("/charges", "k", "{}"));
    until(|| store.stats().waiters == 2).await;
    leaving.reset();
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(owner.await.unwrap().status, 404);
    gate.open();
    assert_eq!(staying.await.unwrap().text(), "2");
}

#[tokio::test]
async fn r14_the_next_owner_may_leave_as_well_and_its_work_goes_on() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let first = (StatusCode::NOT_FOUND, "gone");
    let server = serve(changing(&runs, &gate, first).layer(layer(&store))).await;
    let owner = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    let mut next = Client::connect(&server).await;
    next.send(posting("/charges", "k", "{}")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(owner.await.unwrap().status, 404);
    gate.entered().await;
    next.reset();
    gate.open();
    until(|| store.stats().completed == 1).await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "2");
}

#[tokio::test]
async fn r14_a_next_owner_without_a_task_gives_the_identity_on() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer = layer(&store).max_tasks(1);
    let server = serve(gated(&runs, &gate).layer(layer)).await;
    let print = Fingerprint::request("POST", "/charges", b"{}");
    let Ok(Claim::Won(permit)) = store.claim(&charge("k"), print) else { panic!("not won") };
    let busy = asking(&server, posting("/charges", "other", "{}"));
    gate.entered().await;
    let waiting: Vec<_> = (0..2).map(|_| asking(&server, posting("/charges", "k", "{}"))).collect();
    until(|| store.stats().waiters == 2).await;
    permit.release().unwrap();
    for waiting in waiting {
        let reply = waiting.await.unwrap();
        assert_eq!((reply.status, reply.problem().as_str()), (503, "too-busy"));
    }
    assert!(store.look_up(&charge("k")).is_none());
    gate.open();
    assert_eq!(busy.await.unwrap().text(), "1");
}

#[tokio::test]
async fn r15_beyond_the_cap_a_waiter_is_refused_at_once() {
    let _watchdog = watchdog();
    for per_key in [true, false] {
        let builder = Store::builder();
        let builder = if per_key { builder.max_waiters_per_key(1) } else { builder.max_waiters(1) };
        let store = builder.build().unwrap();
        let (runs, gate) = (Runs::default(), Gate::new());
        let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
        let first = asking(&server, posting("/charges", "k", "{}"));
        gate.entered().await;
        let waiting = asking(&server, posting("/charges", "k", "{}"));
        until(|| store.stats().waiters == 1).await;
        let refused = ask(&server, posting("/charges", "k", "{}")).await;
        assert_eq!((refused.status, refused.problem().as_str()), (409, "in-flight"));
        assert!(refused.field("retry-after").is_some());
        gate.open();
        assert_eq!(first.await.unwrap().text(), "1");
        assert!(waiting.await.unwrap().is_replay());
    }
}

#[tokio::test]
async fn r15_waiters_hold_no_permit_of_the_inner_service_and_no_task() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer = layer(&store).max_tasks(2);
    let limited = ServiceBuilder::new().layer(layer).layer(ConcurrencyLimitLayer::new(2));
    let server = serve(gated(&runs, &gate).layer(limited)).await;
    let first = asking(&server, posting("/charges", "k1", "{}"));
    gate.entered().await;
    let waiting: Vec<_> =
        (0..10).map(|_| asking(&server, posting("/charges", "k1", "{}"))).collect();
    until(|| store.stats().waiters == 10).await;
    let other = asking(&server, posting("/charges", "k2", "{}"));
    gate.entered().await;
    gate.open();
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert_eq!(other.await.unwrap().text(), "2");
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().text(), "1");
    }
}
