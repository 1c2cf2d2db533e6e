//! One account that asks for too much, or for what is not its own: the others do not feel it (R25).

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderName, Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::post as route,
};
use oncekey::{Fingerprint, Identity, ManualClock, Outcome, Resolution, Store, Sweep};
use tower_http::cors::CorsLayer;

use crate::{
    authenticate,
    common::{DAY, LEASE},
    counting, gated, idle, layer, of_account,
    sockets::{Gate, Reply, Runs, Server, serve, until},
    store,
    wire::{Call, Leave, Wire, charge},
};

over_both! {
    case_038_keys_guessed_across_accounts_tell_nothing,
    r25_an_account_with_too_many_keys_in_flight_is_refused_and_others_are_not,
    r25_the_place_of_an_owner_is_given_back_on_every_way_out,
    r25_an_account_with_too_many_live_keys_is_refused_and_others_are_not,
    r25_an_account_with_too_many_waiters_is_told_at_once_and_others_wait,
    r25_an_account_that_sends_slowly_leaves_others_their_room,
    r25_an_heir_finds_the_place_of_its_account,
    r06_a_preflight_passes_untouched_and_a_script_may_read_what_it_is_told,
}

fn of(account: &str, key: &str) -> Call {
    charge(key).field("Authorization", account)
}

async fn serve_of_accounts(app: Router, once: &oncekey::http::IdempotencyLayer) -> Server {
    serve(app.layer(once.clone()).layer(middleware::from_fn(authenticate))).await
}

/// A refusal of the account, which says when to come back.
#[track_caller]
fn assert_over_share(reply: &Reply) {
    assert_eq!((reply.status, reply.problem().as_str()), (429, "account-over-share"));
    let seconds: u64 = reply.field("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
}

/// `POST /charges`: what becomes of it stands in the field `x-way`.
fn ways(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move |request: axum::extract::Request| async move {
        runs.up();
        let way = request.headers().get("x-way").map(|way| way.to_str().unwrap().to_owned());
        match way.as_deref() {
            Some("panic") => panic!("as it should in this test"),
            Some("release") => StatusCode::BAD_REQUEST.into_response(),
            Some("answer all") => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            Some("stream") => {
                ([(header::CONTENT_TYPE, "text/event-stream")], "data: 1\n\n").into_response()
            }
            Some("break off") => {
                let pieces = [Ok(Bytes::from_static(b"x")), Err("broken".into())];
                let pieces: [Result<Bytes, oncekey::http::BoxError>; 2] = pieces;
                Response::new(Body::from_stream(futures_util::stream::iter(pieces)))
            }
            _ => (StatusCode::CREATED, "done").into_response(),
        }
    };
    Router::new().route("/charges", route(handler))
}

/// Somebody who knows, or guesses, the keys of another: whatever stands for them there, he gets
/// what he would get for a key that nobody has used.
async fn case_038_keys_guessed_across_accounts_tell_nothing(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = of_account(&store);
    let server = serve_of_accounts(ways(&runs), &once).await;
    for (key, way) in
        [("done", "done"), ("held", "panic"), ("not kept", "stream"), ("released", "release")]
    {
        wire.ask(
            &server,
            of("alice", "k").set("Idempotency-Key", format!("\"{key}\"")).field("x-way", way),
        )
        .await;
    }
    let alice = |key: &'static str| Identity::new("alice", "POST /charges", key).unwrap();
    let entry = |key| store.look_up(&alice(key)).map(|entry| (entry.state, entry.token));
    let before = ["done", "held", "not kept", "released"].map(entry);
    let unknown = wire.ask(&server, of("mallory", "unused")).await;
    for key in ["done", "held", "not kept", "released"] {
        let guess = of("mallory", "k").set("Idempotency-Key", format!("\"{key}\""));
        let ran = runs.count();
        let told = wire.ask(&server, guess.clone()).await;
        assert_eq!((told.status, &told.body), (unknown.status, &unknown.body), "{key}");
        assert!(!told.is_replay(), "{key}");
        assert_eq!(runs.count(), ran + 1, "{key}: it is his own");
        assert!(wire.ask(&server, guess.body("other")).await.status == 422, "{key}: his own");
    }
    assert_eq!(["done", "held", "not kept", "released"].map(entry), before);
    idle(&once).await;
}

async fn r25_an_account_with_too_many_keys_in_flight_is_refused_and_others_are_not(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = of_account(&store).max_tasks_per_account(3);
    let server = serve_of_accounts(gated(&runs, &gate), &once).await;
    gate.open();
    assert_eq!(wire.ask(&server, of("greedy", "before")).await.status, 201);
    gate.entered().await;
    let mut first = Vec::new();
    for key in ["1", "2", "3"] {
        first.push(wire.asking(&server, of("greedy", key)).await);
        gate.entered().await;
    }
    for key in ["4", "5"] {
        assert_over_share(&wire.ask(&server, of("greedy", key)).await);
    }
    assert_eq!(runs.count(), 4);
    // What takes no place is answered.
    assert!(wire.ask(&server, of("greedy", "before")).await.is_replay());
    assert_eq!(wire.ask(&server, of("greedy", "1").body("other")).await.status, 422);
    let waiter = wire.asking(&server, of("greedy", "1")).await;
    until(|| store.stats().waiters == 1).await;
    // Nor do others feel it.
    let other = wire.asking(&server, of("modest", "4")).await;
    gate.entered().await;
    assert_eq!(once.stats().accounts, 2);
    (0..4).for_each(|_| gate.open());
    for reply in first.into_iter().chain([waiter, other]) {
        assert_eq!(reply.await.unwrap().status, 201);
    }
    // It may come again.
    gate.open();
    let again = wire.ask(&server, of("greedy", "4")).await;
    assert_eq!((again.status, again.is_replay()), (201, false));
    idle(&once).await;
    assert_eq!(once.stats().accounts, 0, "who has nothing takes no memory");
}

async fn r25_the_place_of_an_owner_is_given_back_on_every_way_out(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = of_account(&store).max_tasks_per_account(1).max_response(8);
    let server = serve_of_accounts(ways(&runs), &once).await;
    let ways = ["done", "panic", "release", "answer all", "stream", "break off"];
    for (nth, way) in ways.into_iter().enumerate() {
        wire.ask(&server, of("a", way).set("Idempotency-Key", nth.to_string()).field("x-way", way))
            .await;
        // A panic is over when it is counted, and a broken body when it has broken.
        until(|| once.stats().tasks == 0).await;
        assert_eq!(once.stats().accounts, 0, "{way}");
    }
    let (gate, left) = (Gate::new(), Runs::default());
    let server = serve_of_accounts(gated(&left, &gate), &once).await;
    for (nth, way) in wire.ways_to_leave().iter().enumerate() {
        let begun = wire.begin(&server, &of("a", &format!("left {nth}").replace(' ', "-"))).await;
        gate.entered().await;
        let gone = begun.leave(*way).await;
        // The work goes on, and its place is taken.
        assert_over_share(&wire.ask(&server, of("a", "another")).await);
        gate.open();
        until(|| once.stats().tasks == 0).await;
        assert_eq!(once.stats().accounts, 0, "{way:?}");
        drop(gone);
    }
    assert_eq!((runs.count(), left.count()), (ways.len(), wire.ways_to_leave().len()));
    idle(&once).await;
}

/// The store counts live keys, and knows every way in which they end.
async fn r25_an_account_with_too_many_live_keys_is_refused_and_others_are_not(wire: Wire) {
    let clock = ManualClock::new();
    let store = Store::builder().clock(clock.clone()).sweep(Sweep::Manual).max_keys_per_account(2);
    let store = store.build().unwrap();
    let runs = Runs::default();
    let once = of_account(&store);
    let server = serve_of_accounts(ways(&runs), &once).await;
    let ask = async |account: &str, key: &str, way: &str| {
        wire.ask(&server, of(account, key).field("x-way", way)).await
    };
    assert_eq!(ask("greedy", "1", "done").await.status, 201);
    assert_eq!(ask("greedy", "2", "panic").await.status, 500);
    assert_over_share(&ask("greedy", "3", "done").await);
    assert!(ask("greedy", "1", "done").await.is_replay());
    assert_eq!(ask("modest", "3", "done").await.status, 201);
    // Forgotten.
    let greedy = |key: &'static str| Identity::new("greedy", "POST /charges", key).unwrap();
    assert_eq!(store.forget(&greedy("1")), Ok(true));
    assert_eq!(ask("greedy", "3", "release").await.status, 400);
    // Released: still one, held, beside it.
    assert_eq!(ask("greedy", "4", "stream").await.status, 200);
    assert_over_share(&ask("greedy", "5", "done").await);
    // Resolved to be released.
    store.resolve(&greedy("2"), Resolution::Release).unwrap();
    assert_eq!(ask("greedy", "5", "done").await.status, 201);
    assert_over_share(&ask("greedy", "6", "done").await);
    // At their ends.
    clock.advance(DAY + LEASE);
    store.sweep();
    for key in ["6", "7"] {
        assert_eq!(ask("greedy", key, "done").await.status, 201);
    }
    assert_over_share(&ask("greedy", "8", "done").await);
    idle(&once).await;
}

async fn r25_an_account_with_too_many_waiters_is_told_at_once_and_others_wait(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = of_account(&store).max_waiters_per_account(2);
    let server = serve_of_accounts(gated(&runs, &gate), &once).await;
    let mut all = Vec::new();
    for account in ["greedy", "modest"] {
        all.push(wire.asking(&server, of(account, "k")).await);
        gate.entered().await;
    }
    for waiters in 1..=2 {
        all.push(wire.asking(&server, of("greedy", "k")).await);
        until(|| store.stats().waiters == waiters).await;
    }
    let refused = wire.ask(&server, of("greedy", "k")).await;
    assert_eq!((refused.status, refused.problem().as_str()), (409, "in-flight"));
    assert!(refused.field("retry-after").is_some());
    all.push(wire.asking(&server, of("modest", "k")).await);
    until(|| store.stats().waiters == 3).await;
    // One that leaves makes room for another.
    let leaving = wire.begin(&server, &of("modest", "k")).await;
    until(|| store.stats().waiters == 4).await;
    assert_eq!(wire.ask(&server, of("modest", "k")).await.status, 409);
    let gone = leaving.leave(Leave::Reset).await;
    until(|| store.stats().waiters == 3).await;
    all.push(wire.asking(&server, of("modest", "k")).await);
    until(|| store.stats().waiters == 4).await;
    drop(gone);
    (0..2).for_each(|_| gate.open());
    for reply in all {
        assert_eq!(reply.await.unwrap().status, 201);
    }
    assert_eq!(runs.count(), 2);
    idle(&once).await;
    until(|| once.stats().accounts == 0).await;
}

/// A client that sends and sends, and never comes to an end.
async fn r25_an_account_that_sends_slowly_leaves_others_their_room(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = of_account(&store).max_buffered_per_account(100_000).max_buffered(1 << 20);
    let server = serve_of_accounts(counting(&runs), &once).await;
    let upload = |account, key| of(account, key).body(vec![b'x'; 70_000]).in_pieces(10_000);
    let slow = wire.upload(&server, &of("greedy", "slow").body(vec![b'x'; 70_000]), 60_000).await;
    until(|| once.stats().buffered >= 60_000).await;
    assert_over_share(&wire.ask(&server, upload("greedy", "2")).await);
    assert_eq!(wire.ask(&server, upload("modest", "2")).await.status, 201);
    assert_eq!(runs.count(), 1);
    let gone = slow.leave(Leave::Reset).await;
    until(|| once.stats().buffered == 0).await;
    assert_eq!(once.stats().accounts, 0);
    assert_eq!(wire.ask(&server, upload("greedy", "2")).await.status, 201);
    drop(gone);
    idle(&once).await;
}

/// Of two keys that may be in flight one is given up while a duplicate waits for it.
async fn r25_an_heir_finds_the_place_of_its_account(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = of_account(&store).max_tasks_per_account(1);
    let app = {
        let (runs, gate) = (runs.clone(), gate.clone());
        let handler = move || async move {
            let run = runs.up();
            gate.pass().await;
            if run == 1 { StatusCode::BAD_REQUEST } else { StatusCode::CREATED }
        };
        Router::new().route("/charges", route(handler))
    };
    let server = serve_of_accounts(app, &once).await;
    let first = wire.asking(&server, of("a", "k")).await;
    gate.entered().await;
    let heir = wire.asking(&server, of("a", "k")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 400);
    gate.entered().await;
    assert_over_share(&wire.ask(&server, of("a", "other")).await);
    gate.open();
    assert_eq!(heir.await.unwrap().status, 201);
    idle(&once).await;
    assert_eq!(once.stats().accounts, 0);
}

/// A browser asks before it sends a key. With a CORS layer outside, that answers; without, the
/// handler does. A replay is told to the origin that asks now.
async fn r06_a_preflight_passes_untouched_and_a_script_may_read_what_it_is_told(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).expires_header(HeaderName::from_static("x-expires"));
    let preflight = |key: Option<&str>| {
        let call = charge("k")
            .method(Method::OPTIONS)
            .body("")
            .field("Origin", "https://a.example")
            .field("Access-Control-Request-Method", "POST")
            .field("Access-Control-Request-Headers", "idempotency-key");
        match key {
            Some(key) => call.set("Idempotency-Key", key),
            None => call.set("X-None", ""),
        }
    };
    let options = axum::routing::options(|| async { (StatusCode::NO_CONTENT, "") });
    let bare = Router::new().route("/charges", options).layer(once.clone());
    let server = serve(bare).await;
    for key in [Some("k"), Some(""), None] {
        assert_eq!(wire.ask(&server, preflight(key)).await.status, 204);
    }
    assert_eq!((store.stats().keys, once.stats().unclaimed), (0, 0));

    let cors = CorsLayer::new()
        .allow_origin(["https://a.example", "https://b.example"].map(|it| it.parse().unwrap()))
        .allow_methods([Method::POST])
        .allow_headers(once.request_headers())
        .expose_headers(once.exposed_headers());
    let server = serve(counting(&runs).layer(once.clone()).layer(cors)).await;
    let told = wire.ask(&server, preflight(None)).await;
    assert_eq!((told.status, runs.count()), (200, 0));
    assert_eq!(told.field("access-control-allow-headers"), Some("idempotency-key,prefer"));
    let exposed = "idempotent-replayed,link,retry-after,x-expires";
    for origin in ["https://a.example", "https://b.example"] {
        for call in [charge("k"), charge("k").body("other"), charge("")] {
            let reply = wire.ask(&server, call.field("Origin", origin)).await;
            assert_eq!(reply.lines("access-control-allow-origin"), [origin.as_bytes()]);
            assert_eq!(reply.field("access-control-expose-headers"), Some(exposed));
        }
    }
    assert_eq!(runs.count(), 1);
    // Nothing of it was stored.
    let print = Fingerprint::request("POST", "/charges", b"{}");
    let kept = match store.observe(&crate::charge("k"), print) {
        Some(oncekey::Claim::Replay(replay)) => replay.into_outcome(),
        other => panic!("{other:?}"),
    };
    let is_cors = |outcome: &Outcome| {
        outcome.header_lines().any(|(name, _)| name.starts_with(b"access-control"))
    };
    assert!(!is_cors(&kept));
    // Nor is there a vary of the CORS layer's own.
    assert!(kept.header_lines().all(|(name, _)| name != b"vary"));
}
