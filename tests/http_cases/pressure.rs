//! Too much of everything: owners, waiters, bytes, keys; and a server that is about to stop.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex, mpsc},
    task::{Context, Poll, Wake, Waker},
    thread::{self, ThreadId},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, Request, StatusCode},
    routing::post as route,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use oncekey::{
    Abandon, Store,
    http::{Fingerprinting, Problem, RequestBody},
};
use tower::{Layer, Service};

use crate::{
    assert_idle, charges, counting, gated, idle, layer,
    sockets::{Client, Gate, Runs, serve, until},
    store,
    wire::{Leave, Present, Wire, assert_replay, charge},
};

/// `POST /charges` behind a gate, which answers with the status in the field `X-Status`.
fn asked_for(runs: &Runs, gate: &Gate) -> Router {
    let (runs, gate) = (runs.clone(), gate.clone());
    let handler = move |headers: HeaderMap| async move {
        let run = runs.up();
        gate.pass().await;
        let status = headers.get("x-status").map_or(&b"201"[..], |status| status.as_bytes());
        (StatusCode::from_bytes(status).unwrap(), run.to_string())
    };
    Router::new().route("/charges", route(handler))
}

over_both! {
    case_008_an_owner_by_hand_over_outlives_its_client,
}

over_all! {
    case_116_waiting_needs_no_place_among_the_owners,
    case_116_a_waiter_takes_no_place_from_others,
    case_116_a_hand_over_finds_the_place_of_the_owner_that_gave_up,
    case_116_an_heir_without_a_place_passes_the_key_on,
    case_116_more_waiters_than_allowed_are_told_at_once,
    case_114_buffered_bytes_are_given_back_on_every_way_out,
    case_114_waiters_hold_no_bytes_of_their_own,
    case_116_a_full_store_refuses_only_what_is_new,
    case_118_a_drain_lets_those_who_are_there_finish,
    case_055_a_client_says_how_long_it_waits,
    case_055_a_wait_that_a_client_asks_for_is_capped,
}

/// All owners' places are taken, and others wait for those owners: nobody waits for a place.
async fn case_116_waiting_needs_no_place_among_the_owners(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).max_tasks(1);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    gate.open();
    let old = wire.ask(&server, charge("old")).await;
    gate.entered().await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let waiter = wire.asking(&server, charge("k")).await;
    until(|| store.stats().waiters == 1).await;

    let other = wire.ask(&server, charge("other")).await;
    assert_eq!((other.status, other.problem().as_str()), (503, "too-busy"));
    assert!(other.field("retry-after").is_some());
    assert_replay(&wire.ask(&server, charge("old")).await, &old);
    assert_eq!(wire.ask(&server, charge("k").body("x")).await.problem(), "key-reused");
    assert_eq!((store.stats().keys, once.stats().too_busy), (2, 1));

    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.text()), (201, "2"));
    assert_replay(&waiter.await.unwrap(), &first);
    until(|| once.stats().tasks == 0).await;
    gate.open();
    assert_eq!(wire.ask(&server, charge("other")).await.text(), "3");
    idle(&once).await;
}

/// Whoever waits has given the place back that it came with.
async fn case_116_a_waiter_takes_no_place_from_others(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).max_tasks(2);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let mut all = vec![wire.asking(&server, charge("k")).await];
    gate.entered().await;
    for waiters in 1..=3 {
        all.push(wire.asking(&server, charge("k")).await);
        until(|| store.stats().waiters == waiters).await;
    }
    all.push(wire.asking(&server, charge("other")).await);
    gate.entered().await;
    gate.open();
    gate.open();
    for reply in all {
        assert_eq!(reply.await.unwrap().status, 201);
    }
    assert_eq!((runs.count(), once.stats().too_busy), (2, 0));
    idle(&once).await;
}

/// The owner gives up while every place is taken, its own included: its place is the next
/// owner's.
async fn case_116_a_hand_over_finds_the_place_of_the_owner_that_gave_up(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).max_tasks(1);
    let server = serve(asked_for(&runs, &gate).layer(once.clone())).await;
    for nth in 0..40 {
        let call = || charge(&format!("k{nth}")).field("X-Status", "400");
        let mut all = vec![wire.asking(&server, call()).await];
        gate.entered().await;
        for waiters in 1..=3 {
            all.push(wire.asking(&server, call()).await);
            until(|| store.stats().waiters == waiters).await;
        }
        for _ in 0..4 {
            gate.open();
        }
        for reply in all {
            assert_eq!(reply.await.unwrap().status, 400, "round {nth}");
        }
        assert_eq!(runs.count(), 4 * (nth + 1));
        for _ in 0..3 {
            gate.entered().await;
        }
        until(|| once.stats().tasks == 0).await;
    }
    assert_eq!(once.stats().too_busy, 0);
    idle(&once).await;
}

/// A waiter becomes the owner where every place is taken by others: nothing was done, and the next
/// waiter is asked.
async fn case_116_an_heir_without_a_place_passes_the_key_on(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let roomy = layer(&store);
    let narrow = roomy.clone().max_tasks(1);
    let wide = serve(asked_for(&runs, &gate).layer(roomy.clone())).await;
    let (own_runs, own_gate) = (Runs::default(), Gate::new());
    let narrows = serve(asked_for(&own_runs, &own_gate).layer(narrow.clone())).await;
    let busy = wire.asking(&narrows, charge("other")).await;
    own_gate.entered().await;

    let call = || charge("k").field("X-Status", "400");
    let first = wire.asking(&wide, call()).await;
    gate.entered().await;
    let heir = wire.asking(&narrows, call()).await;
    until(|| store.stats().waiters == 1).await;
    let next = wire.asking(&wide, charge("k")).await;
    until(|| store.stats().waiters == 2).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 400);
    let heir = heir.await.unwrap();
    assert_eq!((heir.status, heir.problem().as_str()), (503, "too-busy"));
    gate.entered().await;
    gate.open();
    assert_eq!((next.await.unwrap().text(), runs.count(), own_runs.count()), ("2", 2, 1));
    own_gate.open();
    assert_eq!(busy.await.unwrap().status, 201);
    idle(&roomy).await;
    idle(&narrow).await;
}

/// A waiter becomes the owner, and then its client leaves: it is an owner like another.
async fn case_008_an_owner_by_hand_over_outlives_its_client(wire: Wire) {
    for &way in wire.ways_to_leave() {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let (once, present) = (layer(&store), Present::default());
        let app = {
            let (runs, gate) = (runs.clone(), gate.clone());
            charges(move || {
                let (runs, gate) = (runs.clone(), gate.clone());
                async move {
                    let run = runs.up();
                    gate.pass().await;
                    let is_first = run == 1;
                    let status =
                        if is_first { StatusCode::BAD_REQUEST } else { StatusCode::CREATED };
                    (status, run.to_string())
                }
            })
        };
        let server = serve(present.around(app.layer(once.clone()))).await;
        let first = wire.asking(&server, charge("k")).await;
        gate.entered().await;
        let heir = wire.begin(&server, &charge("k")).await;
        until(|| store.stats().waiters == 1).await;
        gate.open();
        assert_eq!(first.await.unwrap().status, 400);
        gate.entered().await;
        let _stays = heir.leave(way).await;
        until(|| present.count() == 0).await;
        let third = wire.asking(&server, charge("k")).await;
        until(|| store.stats().waiters == 1).await;
        gate.open();
        let third = third.await.unwrap();
        assert!(third.is_replay());
        assert_eq!((third.status, third.text(), runs.count()), (201, "2", 2), "{way:?}");
        idle(&once).await;
    }
}

async fn case_116_more_waiters_than_allowed_are_told_at_once(wire: Wire) {
    let store = Store::builder().max_waiters_per_key(2).max_waiters(3).build().unwrap();
    let (once, runs, gate) = (layer(&store), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let mut all = Vec::new();
    let mut waiting = 0;
    for (key, waits) in [("a", 2), ("b", 1)] {
        all.push(wire.asking(&server, charge(key)).await);
        gate.entered().await;
        for _ in 0..waits {
            waiting += 1;
            all.push(wire.asking(&server, charge(key)).await);
            until(|| store.stats().waiters == waiting).await;
        }
    }
    for key in ["a", "b"] {
        let told = wire.ask(&server, charge(key)).await;
        assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
        assert!(told.field("retry-after").is_some());
    }
    gate.open();
    gate.open();
    for reply in all {
        assert_eq!(reply.await.unwrap().status, 201);
    }
    assert_eq!((runs.count(), store.stats().refused_waiters), (2, 2));
    idle(&once).await;
}

/// The bytes of all requests together: refused where there is no room, and given back on every
/// way out.
async fn case_114_buffered_bytes_are_given_back_on_every_way_out(wire: Wire) {
    let store = Store::builder().on_abandon(Abandon::Release).build().unwrap();
    let (runs, gate, present) = (Runs::default(), Gate::new(), Present::default());
    let at = gate.clone();
    let counted = runs.clone();
    let handler = move |request: Request<Body>| async move {
        counted.up();
        let (head, body) = request.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let does = head.headers.get("x-does").map_or("", |does| does.to_str().unwrap());
        match does {
            "wait" => at.pass().await,
            "panic" => panic!("as it should in this test"),
            _ => {}
        }
        let status = if does == "refuse" { 400 } else { 201 };
        (StatusCode::from_u16(status).unwrap(), bytes.len().to_string())
    };
    let once = layer(&store).max_buffered(100_000).max_request(80_000);
    let app = Router::new().route("/charges", route(handler)).layer(once.clone());
    let server = serve(present.around(app)).await;
    let large = |key: &str, does: &str| charge(key).body(vec![b'x'; 60_000]).field("X-Does", does);
    for does in ["", "refuse", "panic"] {
        let reply = wire.ask(&server, large(does, does).set("Idempotency-Key", "k1")).await;
        assert!([201, 400, 500].contains(&reply.status));
        idle(&once).await;
        let _ = store.forget_forced(&crate::charge("k1"));
    }
    for over in [
        charge("over").body(vec![b'x'; 80_001]).in_pieces(10_000),
        charge("over").body(vec![b'x'; 80_001]),
    ] {
        assert_eq!(wire.ask(&server, over).await.status, 413);
        idle(&once).await;
    }

    let owner = wire.asking(&server, large("k", "wait")).await;
    gate.entered().await;
    assert_eq!(once.stats().buffered, 60_000);
    // No room for another one, whatever its key, and whether or not it says how long it is.
    for other in [large("other", ""), large("other", "").in_pieces(7_000), large("k", "wait")] {
        let refused = wire.ask(&server, other).await;
        assert_eq!((refused.status, refused.problem().as_str()), (503, "too-busy"));
        until(|| once.stats().buffered == 60_000).await;
    }
    // A small duplicate, a mismatch and a stalled upload have room.
    assert_eq!(wire.ask(&server, charge("k")).await.problem(), "key-reused");
    let stalls = wire.upload(&server, &charge("s").body(vec![b'x'; 30_000]), 20_000).await;
    until(|| once.stats().buffered >= 80_000).await;
    let before = present.count();
    drop(stalls.leave(Leave::Reset).await);
    until(|| present.count() < before).await;
    assert_eq!(once.stats().buffered, 60_000);
    gate.open();
    assert_eq!(owner.await.unwrap().text(), "60000");
    idle(&once).await;
    assert_eq!(wire.ask(&server, large("other", "")).await.status, 201);
    assert_eq!(store.stats().keys, 2);
    idle(&once).await;
}

/// Waiters share the owner's bytes, and give their own back at once.
async fn case_114_waiters_hold_no_bytes_of_their_own(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let handler = move |body: Bytes| async move {
        at.pass().await;
        body.len().to_string()
    };
    // Room for two bodies and a half.
    let once = layer(&store).max_buffered(150_000);
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    let call = || charge("k").body(vec![b'x'; 60_000]);
    let mut all = vec![wire.asking(&server, call()).await];
    gate.entered().await;
    for waiters in 1..=10 {
        all.push(wire.asking(&server, call()).await);
        until(|| store.stats().waiters == waiters).await;
        until(|| once.stats().buffered == 60_000).await;
    }
    gate.open();
    for reply in all {
        assert_eq!(reply.await.unwrap().text(), "60000");
    }
    idle(&once).await;
}

/// A full store refuses what is new before it runs, and drops nothing.
async fn case_116_a_full_store_refuses_only_what_is_new(wire: Wire) {
    let store = Store::builder().max_keys(1).build().unwrap();
    let (once, runs) = (layer(&store), Runs::default());
    let server = serve(counting(&runs).layer(once.clone())).await;
    let first = wire.ask(&server, charge("k")).await;
    for _ in 0..3 {
        let refused = wire.ask(&server, charge("other")).await;
        assert_eq!((refused.status, refused.problem().as_str()), (503, "store-full"));
        let after: u64 = refused.field("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&after));
        assert_replay(&wire.ask(&server, charge("k")).await, &first);
    }
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// The server is about to stop while one runs and others wait for it.
async fn case_118_a_drain_lets_those_who_are_there_finish(wire: Wire) {
    for status in ["201", "400"] {
        let (store, runs, gate) = (store(), Runs::default(), Gate::new());
        let once = layer(&store);
        let server = serve(asked_for(&runs, &gate).layer(once.clone())).await;
        gate.open();
        let old = wire.ask(&server, charge("old")).await;
        gate.entered().await;
        let call = || charge("k").field("X-Status", status);
        let first = wire.asking(&server, call()).await;
        gate.entered().await;
        let waiter = wire.asking(&server, call()).await;
        until(|| store.stats().waiters == 1).await;

        let drained = tokio::spawn(store.drain());
        let refused = wire.ask(&server, charge("new")).await;
        assert_eq!((refused.status, refused.problem().as_str()), (503, Problem::TooBusy.slug()));
        assert!(refused.field("retry-after").is_some());
        assert_replay(&wire.ask(&server, charge("old")).await, &old);
        assert!(!drained.is_finished());
        gate.open();
        gate.open();
        let (first, waiter) = (first.await.unwrap(), waiter.await.unwrap());
        assert_eq!((first.status.to_string(), waiter.status), (status.to_owned(), first.status));
        // Who waited becomes the owner of what was given up, also now.
        assert_eq!(runs.count(), if status == "201" { 2 } else { 3 });
        drained.await.unwrap();
        idle(&once).await;
    }
}

/// `Prefer: wait` in all its forms, while the owner runs. A wait that is cut by the cap ends
/// by itself; one that is not ends when the gate opens.
async fn case_055_a_client_says_how_long_it_waits(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    // What cannot be read counts as not sent: then it waits for longer than this test takes.
    let once = layer(&store).wait_cap(Duration::from_secs(1));
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let now: [&[&str]; 8] = [
        &["wait=0"],
        &["WAIT = 0"],
        &["wait=\"0\""],
        &["wait=00000000000000000000000000"],
        &["respond-async, wait=0; foo=bar"],
        &["respond-async", "wait=0", "wait=5"],
        &["foo=\"wait=9, \", wait=0, wait=abc"],
        &[",,, wait=0"],
    ];
    for lines in now {
        let call = lines.iter().fold(charge("k"), |call, line| call.field("Prefer", line));
        let told = wire.ask(&server, call).await;
        assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"), "{lines:?}");
        assert_eq!(told.field("preference-applied"), None);
    }
    let long: [&[&str]; 10] = [
        &["wait=abc"],
        &["wait=-1"],
        &["wait"],
        &["wait="],
        &["wait=0.5"],
        &["wait=abc, wait=0"],
        &["wait=99999999999999999999"],
        &["waiting=0"],
        &["x=\"wait=0"],
        &["respond-async; wait=0"],
    ];
    let mut waiting = Vec::new();
    for (nth, lines) in long.into_iter().enumerate() {
        let call = lines.iter().fold(charge("k"), |call, line| call.field("Prefer", line));
        waiting.push(wire.asking(&server, call).await);
        until(|| store.stats().waiters == nth + 1).await;
    }
    gate.open();
    for waiter in waiting {
        assert!(waiter.await.unwrap().is_replay());
    }
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// The cap of a wait that a client asks for, where the layer itself would not wait at all.
async fn case_055_a_wait_that_a_client_asks_for_is_capped(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).wait_limit(Duration::ZERO).wait_cap(Duration::from_millis(20));
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let told = wire.ask(&server, charge("k").field("Prefer", "wait=86400")).await;
    assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
    gate.open();
    assert_eq!(first.await.unwrap().status, 201);
    idle(&once).await;
}

/// As above, with the race decided: the waiter is polled before the owner's call that gives up
/// returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_116_a_hand_over_finds_the_place_however_quick_the_heir_is() {
    let _watchdog = crate::common::watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        tower::service_fn(move |_: Request<RequestBody<Full<Bytes>>>| {
            let (runs, gate) = (runs.clone(), gate.clone());
            async move {
                runs.up();
                gate.pass().await;
                let response = http::Response::builder().status(400);
                response.body(Full::<Bytes>::default())
            }
        })
    };
    let once = layer(&store).operation_name("charge").max_tasks(1);
    let mut service = once.layer(handler);
    let mut call = || {
        let request = Request::post("/").header("idempotency-key", "k");
        service.call(request.body(Full::from("{}")).unwrap())
    };
    let first = tokio::spawn(call());
    gate.entered().await;
    let heir = on_a_thread_of_its_own(call());
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().unwrap().status(), 400);
    gate.open();
    assert_eq!(heir.await.unwrap().unwrap().status(), 400);
    assert_eq!((runs.count(), once.stats().too_busy), (2, 0));
    idle(&once).await;
}

/// A replay that takes its time, here to make its fingerprint by an earlier scheme, takes no place
/// among the owners meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_116_a_replay_takes_no_place_among_the_owners() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let handler = {
        let runs = runs.clone();
        tower::service_fn(move |_: Request<RequestBody<Full<Bytes>>>| {
            runs.up();
            std::future::ready(Ok::<_, Infallible>(http::Response::new(Full::<Bytes>::default())))
        })
    };
    let before = Fingerprinting::custom("before", |_, body| body.to_vec());
    let ((entered, has_entered), (open, is_open)) = (mpsc::channel(), mpsc::channel::<()>());
    let is_open = Mutex::new(is_open);
    let slow = Fingerprinting::custom("before", move |_, body| {
        entered.send(()).unwrap();
        is_open.lock().unwrap().recv().unwrap();
        body.to_vec()
    });
    let once = layer(&store).operation_name("charge");
    let mut earlier = once.clone().fingerprint(before).layer(handler.clone());
    let now = once.also_accept(slow).max_tasks(1);
    let mut service = now.layer(handler);
    let request = |key: &'static str| {
        let request = Request::post("/").header("idempotency-key", key);
        request.body(Full::<Bytes>::from("{}")).unwrap()
    };
    let first = earlier.call(request("k")).await.unwrap();
    assert_eq!(first.status(), 200);
    let again = on_a_thread_of_its_own(service.call(request("k")));
    tokio::task::spawn_blocking(move || has_entered.recv().unwrap()).await.unwrap();
    assert_eq!(service.call(request("other")).await.unwrap().status(), 200);
    open.send(()).unwrap();
    let again = again.await.unwrap().unwrap();
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    assert_eq!((runs.count(), now.stats().too_busy), (2, 0));
    idle(&now).await;
}

/// A waiter is made the owner, and leaves before it has been polled again.
#[tokio::test]
async fn case_008_an_heir_that_left_before_it_knew_passes_the_key_on() {
    let _watchdog = crate::common::watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        tower::service_fn(move |_: Request<RequestBody<Full<Bytes>>>| {
            let (runs, gate) = (runs.clone(), gate.clone());
            async move {
                let status = if runs.up() == 1 { 400 } else { 201 };
                gate.pass().await;
                http::Response::builder().status(status).body(Full::<Bytes>::default())
            }
        })
    };
    let once = layer(&store).operation_name("charge");
    let mut service = once.layer(handler);
    let mut call = || {
        let request = Request::post("/").header("idempotency-key", "k");
        service.call(request.body(Full::from("{}")).unwrap())
    };
    let first = tokio::spawn(call());
    gate.entered().await;
    let mut heir = Box::pin(call());
    let is_pending = |cx: &mut Context<'_>| Poll::Ready(heir.as_mut().poll(cx).is_pending());
    assert!(poll_fn(is_pending).await);
    assert_eq!(store.stats().waiters, 1);
    let next = tokio::spawn(call());
    until(|| store.stats().waiters == 2).await;
    gate.open();
    assert_eq!(first.await.unwrap().unwrap().status(), 400);
    assert_eq!((store.stats().waiters, store.stats().handed_over), (1, 1));
    drop(heir);
    gate.entered().await;
    gate.open();
    assert_eq!(next.await.unwrap().unwrap().status(), 201);
    assert_eq!((runs.count(), store.stats().held), (2, 0));
    idle(&once).await;
}

/// Polls `future` on a thread of its own. Whoever wakes it waits until it has been polled.
fn on_a_thread_of_its_own<F>(future: F) -> tokio::sync::oneshot::Receiver<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    struct Bell {
        ring: mpsc::Sender<mpsc::Sender<()>>,
        own: ThreadId,
    }
    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            let (done, polled) = mpsc::channel();
            if self.ring.send(done).is_ok() && thread::current().id() != self.own {
                let _ = polled.recv();
            }
        }
    }
    let (answer, answered) = tokio::sync::oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    thread::spawn(move || {
        let _runtime = runtime.enter();
        let (ring, rung) = mpsc::channel();
        let waker = Waker::from(Arc::new(Bell { ring, own: thread::current().id() }));
        let mut future = pin!(future);
        let mut polled: Option<mpsc::Sender<()>> = None;
        loop {
            let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
            if let Poll::Ready(output) = poll {
                let _ = answer.send(output);
                return;
            }
            if let Some(polled) = polled.take() {
                let _ = polled.send(());
            }
            polled = rung.recv().ok();
        }
    });
    answered
}

/// Two requests in one segment, of which the second waits for the first: on one connection the
/// answers come one by one, and so must not wait for each other.
#[tokio::test]
async fn case_116_a_duplicate_on_the_same_connection_is_a_replay() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(counting(&runs).layer(once.clone())).await;
    let mut client = Client::connect(&server).await;
    let bytes = charge("k").to_bytes();
    client.send([bytes.clone(), bytes].concat()).await;
    let first = client.reply().await;
    assert_replay(&client.reply().await, &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}
