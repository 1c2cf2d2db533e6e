//! A reverse proxy that sends a request again by itself: to the next upstream, because the first was
//! silent for too long or broke off. Both upstreams are ports of one process.

use std::time::Duration;

use crate::{
    gated, idle, layer,
    sockets::{Gate, Runs, serve, until},
    store,
    wire::{Wire, charge},
};

through_hasty_nginx! {
    case_116_a_request_that_the_proxy_repeats_runs_once,
    case_116_a_proxy_repeats_what_its_upstream_broke_off,
    case_118_a_proxy_that_gives_up_is_no_second_charge,
    case_055_a_409_about_the_proxys_own_repetition_can_be_acted_on,
    case_049_another_body_is_a_mismatch_while_the_proxy_repeats,
}

async fn case_116_a_request_that_the_proxy_repeats_runs_once(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let asking = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.text()), (201, "1"));
    assert!(answer.is_replay(), "the proxy has it from the second port");
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// The connection to one upstream breaks off while the handler is at work.
async fn case_116_a_proxy_repeats_what_its_upstream_broke_off(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let asking = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    server.break_off();
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let answer = asking.await.unwrap();
    assert_eq!((answer.status, answer.text(), answer.is_replay()), (201, "1", true));
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// No upstream answers in time: the client gets the proxy's 504, asks again, and pays once.
async fn case_118_a_proxy_that_gives_up_is_no_second_charge(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let call = || charge("order-1").body(r#"{"amount":1999}"#);
    let given_up = wire.asking(&server, call()).await;
    gate.entered().await;
    let given_up = given_up.await.unwrap();
    assert_eq!((given_up.status, given_up.field("link")), (504, None));
    until(|| store.stats().waiters == 0).await;

    let retry = wire.asking(&server, call()).await;
    until(|| store.stats().waiters == 1).await;
    let edited = wire.ask(&server, charge("order-1").body(r#"{"amount":2999}"#)).await;
    assert_eq!((edited.status, edited.problem().as_str()), (422, "key-reused"));
    gate.open();
    let retry = retry.await.unwrap();
    assert_eq!((retry.status, retry.text(), retry.is_replay()), (201, "1", true));
    assert_eq!(wire.ask(&server, call()).await.body, retry.body);
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

/// Where nobody waits, the answer to the proxy's repetition is a 409 about the client's own request:
/// it can be told from the handler's, and says when to come back.
async fn case_055_a_409_about_the_proxys_own_repetition_can_be_acted_on(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store).wait_limit(Duration::ZERO);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let told = wire.ask(&server, charge("k")).await;
    gate.entered().await;
    assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
    assert!(told.field("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    gate.open();
    idle(&once).await;
    let again = wire.ask(&server, charge("k")).await;
    assert_eq!((again.status, again.text(), again.is_replay()), (201, "1", true));
    assert_eq!(runs.count(), 1);
}

async fn case_049_another_body_is_a_mismatch_while_the_proxy_repeats(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k").body("x")).await;
    gate.entered().await;
    until(|| store.stats().waiters == 1).await;
    let other = wire.ask(&server, charge("k").body("y")).await;
    assert_eq!((other.status, other.problem().as_str()), (422, "key-reused"));
    assert_eq!(store.stats().waiters, 1, "and disturbs nobody");
    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.text()), (201, "1"));
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}
