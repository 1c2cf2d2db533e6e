//! Which answer: a replay, a new run, 409 or 422, and whether a client can tell them apart.

use std::time::Duration;

use axum::{
    Router,
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse,
    routing::post as route,
};
use oncekey::http::{Problem, StatusTable};

use crate::{
    assert_idle, charges, gated, idle, layer,
    sockets::{Gate, Runs, serve, until},
    store,
    wire::{Leave, Present, Wire, assert_replay, charge},
};

/// `POST /charges`, which answers its first run with `status` and all others with 201.
fn first_answers(status: StatusCode, runs: &Runs) -> Router {
    let runs = runs.clone();
    charges(move || {
        let run = runs.up();
        let status = if run == 1 { status } else { StatusCode::CREATED };
        std::future::ready((status, [("x-run", run.to_string())]))
    })
}

/// Not kept by default: the request was refused before the work.
const RELEASED: [u16; 23] = [
    400, 401, 403, 404, 405, 406, 409, 411, 412, 413, 414, 415, 416, 417, 421, 422, 423, 425, 426,
    428, 429, 431, 503,
];

over_all! {
    case_053_a_passing_failure_is_not_pinned_to_the_key,
    case_053_each_status_is_kept_or_released_by_the_table,
    case_053_the_table_is_a_setting,
    case_055_our_answers_can_be_told_from_the_handlers,
    case_116_a_client_that_repeats_only_after_network_errors_never_sees_409,
    case_116_without_waiting_409_says_when_to_come_back,
    case_118_given_up_and_tried_again_before_and_after_the_end,
    case_118_a_decline_is_kept_for_its_key_and_blocks_no_other,
}

async fn case_053_a_passing_failure_is_not_pinned_to_the_key(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(first_answers(StatusCode::SERVICE_UNAVAILABLE, &runs).layer(once)).await;
    let first = wire.ask(&server, charge("k")).await;
    assert_eq!((first.status, first.is_replay()), (503, false));
    assert_eq!(store.stats().keys, 0);
    let retry = wire.ask(&server, charge("k")).await;
    assert_eq!((retry.status, retry.field("x-run"), retry.is_replay()), (201, Some("2"), false));
    assert_replay(&wire.ask(&server, charge("k")).await, &retry);
    assert_eq!(runs.count(), 2);
}

/// Every status a handler can end with, one by one, and our own answer of the same status is
/// never meant.
async fn case_053_each_status_is_kept_or_released_by_the_table(wire: Wire) {
    let server = {
        let handler = |headers: HeaderMap| async move {
            let status = headers["x-status"].to_str().unwrap().parse::<u16>().unwrap();
            StatusCode::from_u16(status).unwrap()
        };
        serve(Router::new().route("/charges", route(handler)).layer(layer(&store()))).await
    };
    for status in 200..=599 {
        let call = || charge(&status.to_string()).field("X-Status", status.to_string());
        let first = wire.ask(&server, call()).await;
        let again = wire.ask(&server, call()).await;
        assert_eq!((first.status, again.status), (status, status));
        assert!(!first.is_replay());
        assert_eq!(again.is_replay(), !RELEASED.contains(&status), "{status}");
    }
}

/// What the table says is a setting, for all operations and for one.
async fn case_053_the_table_is_a_setting(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let keep_409 = |table: StatusTable| table.keep(StatusCode::CONFLICT);
    let once = layer(&store)
        .statuses(StatusTable::default().release(StatusCode::PAYMENT_REQUIRED))
        .operation("POST /charges", move |policy| {
            policy.statuses(keep_409(StatusTable::default()))
        });
    let counted = runs.clone();
    let answer = move |headers: HeaderMap| async move {
        counted.up();
        StatusCode::from_bytes(headers["x-status"].as_bytes()).unwrap()
    };
    let app =
        Router::new().route("/charges", route(answer.clone())).route("/refunds", route(answer));
    let server = serve(app.layer(once)).await;
    for (path, status, is_kept) in [
        ("/charges", "409", true),
        ("/charges", "402", true),
        ("/refunds", "409", false),
        ("/refunds", "402", false),
    ] {
        let call = || crate::wire::post(path, status).field("X-Status", status);
        assert!(!wire.ask(&server, call()).await.is_replay());
        assert_eq!(wire.ask(&server, call()).await.is_replay(), is_kept, "{path} {status}");
    }
    assert_eq!(runs.count(), 6);
}

/// Our 409 and 422 have a type of their own, so that they can be told from the handler's.
async fn case_055_our_answers_can_be_told_from_the_handlers(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let once = layer(&store).wait_limit(Duration::ZERO);
    let own = |status: StatusCode| {
        let body = format!(r#"{{"type":"https://app.example/{}"}}"#, status.as_u16());
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    };
    let at = gate.clone();
    let handler = move |headers: HeaderMap| async move {
        if headers.contains_key("x-wait") {
            at.pass().await;
        }
        own(StatusCode::from_bytes(headers["x-status"].as_bytes()).unwrap())
    };
    let app = Router::new().route("/charges", route(handler)).layer(once);
    let server = serve(app).await;
    let call = |key: &str, status: &str| charge(key).field("X-Status", status);

    for status in ["409", "422"] {
        for _ in 0..2 {
            let answer = wire.ask(&server, call(status, status)).await;
            assert_eq!(answer.status.to_string(), status);
            assert_eq!(answer.text(), format!(r#"{{"type":"https://app.example/{status}"}}"#));
            assert!(answer.field("link").is_none() && answer.field("retry-after").is_none());
            assert!(!answer.is_replay(), "refused before the work: not kept");
        }
    }
    let first = wire.asking(&server, call("k", "201").field("X-Wait", "1")).await;
    gate.entered().await;
    let in_flight = wire.ask(&server, call("k", "201").field("X-Wait", "1")).await;
    assert_eq!((in_flight.status, in_flight.problem().as_str()), (409, Problem::InFlight.slug()));
    let after: u64 = in_flight.field("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&after));
    let reused = wire.ask(&server, call("k", "201").body("other")).await;
    assert_eq!((reused.status, reused.problem().as_str()), (422, Problem::KeyReused.slug()));
    assert!(reused.field("retry-after").is_none(), "asking again is of no use");
    gate.open();
    assert_eq!(first.await.unwrap().status, 201);
}

/// A client library that repeats a request after a lost connection, and takes any answer as
/// final: it must not be told 409 about its own request.
async fn case_116_a_client_that_repeats_only_after_network_errors_never_sees_409(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let (once, present) = (layer(&store), Present::default());
    let server = serve(present.around(gated(&runs, &gate).layer(once.clone()))).await;
    let mut attempt = wire.begin(&server, &charge("k")).await;
    gate.entered().await;
    for _ in 0..3 {
        drop(attempt.leave(Leave::Reset).await);
        until(|| present.count() == 0).await;
        attempt = wire.begin(&server, &charge("k")).await;
        until(|| store.stats().waiters == 1).await;
    }
    gate.open();
    let answer = attempt.reply().await;
    assert_eq!((answer.status, answer.text()), (201, "1"));
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// Without waiting, a 409 says when to come back, and coming back is worth it.
async fn case_116_without_waiting_409_says_when_to_come_back(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).wait_limit(Duration::ZERO);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    for _ in 0..3 {
        let told = wire.ask(&server, charge("k")).await;
        assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
        assert!(told.field("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    }
    gate.open();
    let first = first.await.unwrap();
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// The whole story: given up while the provider is at work, tried again before and after it
/// has ended, and once with another amount.
async fn case_118_given_up_and_tried_again_before_and_after_the_end(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let (once, present) = (layer(&store), Present::default());
    let server = serve(present.around(gated(&runs, &gate).layer(once.clone()))).await;
    let call = || charge("order-1").body(r#"{"amount":1999}"#);
    let given_up = wire.begin(&server, &call()).await;
    gate.entered().await;
    drop(given_up.leave(Leave::Close).await);
    until(|| present.count() == 0).await;

    let retry_1 = wire.asking(&server, call()).await;
    until(|| store.stats().waiters == 1).await;
    let other_amount = charge("order-1").body(r#"{"amount":2999}"#);
    let edited = wire.ask(&server, other_amount.clone()).await;
    assert_eq!((edited.status, edited.problem().as_str()), (422, "key-reused"));
    gate.open();
    let retry_1 = retry_1.await.unwrap();
    let retry_2 = wire.ask(&server, call()).await;
    assert_eq!((retry_1.status, retry_1.text()), (201, "1"));
    assert!(retry_1.is_replay() && retry_2.is_replay());
    assert_eq!(retry_2.body, retry_1.body);
    let edited = wire.ask(&server, other_amount).await;
    assert_eq!((edited.status, edited.problem().as_str()), (422, "key-reused"));
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// A decline is an outcome; being asked to slow down is none.
async fn case_118_a_decline_is_kept_for_its_key_and_blocks_no_other(wire: Wire) {
    for (decline, is_kept) in
        [(StatusCode::PAYMENT_REQUIRED, true), (StatusCode::TOO_MANY_REQUESTS, false)]
    {
        let (store, runs) = (store(), Runs::default());
        let server = serve(first_answers(decline, &runs).layer(layer(&store))).await;
        let declined = wire.ask(&server, charge("order-1")).await;
        assert_eq!(declined.status, decline.as_u16());
        let again = wire.ask(&server, charge("order-1")).await;
        if is_kept {
            assert_replay(&again, &declined);
        } else {
            assert_eq!((again.status, again.is_replay()), (201, false));
        }
        let another = wire.ask(&server, charge("order-1-again")).await;
        assert_eq!((another.status, another.is_replay()), (201, false));
    }
}
