//! Other layers around ours and inside of it: compression of requests and responses, time-outs; and
//! a handler that no layer ends.

use axum::{Router, body::Bytes, http::StatusCode, routing::post as route};
use oncekey::{Resolution, http::IdempotencyLayer};
use tower_http::{
    compression::CompressionLayer, decompression::RequestDecompressionLayer, timeout::TimeoutLayer,
};

use crate::{
    assert_idle, charge as identity,
    common::{MS, SECOND, by_hand},
    gated, idle, layer,
    sockets::{Gate, Runs, backing, serve, until},
    store,
    wire::{Leave, Present, Wire, assert_replay, charge},
};

over_all! {
    case_114_a_compressed_body_is_compared_as_it_reaches_the_layer,
    case_114_a_body_is_as_large_as_it_is_when_it_reaches_the_layer,
    case_060_what_is_compressed_inside_is_part_of_the_outcome,
    case_060_what_is_compressed_outside_is_for_each_client,
    case_118_a_time_out_outside_ends_the_waiting_and_not_the_work,
    case_022_a_handler_that_never_ends_blocks_its_key_and_no_other,
}

over_both! {
    case_020_a_time_out_inside_is_an_outcome,
}

/// `text` as a gzip file that was written at `time`: two files that say the same.
fn gzipped(text: &[u8], time: u8) -> Vec<u8> {
    let mut crc = !0_u32;
    for byte in text {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    let len = u16::try_from(text.len()).unwrap();
    let mut file = vec![0x1f, 0x8b, 8, 0, time, 0, 0, 0, 0, 255];
    // One block, stored.
    file.push(1);
    file.extend(len.to_le_bytes());
    file.extend((!len).to_le_bytes());
    file.extend(text);
    file.extend((!crc).to_le_bytes());
    file.extend(u32::from(len).to_le_bytes());
    file
}

/// 300,000 times `x` as a gzip file.
fn bomb() -> Vec<u8> {
    let head = [
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xed, 0xc1, 0x01, 0x0d, 0x00,
        0x00, 0x00, 0xc2, 0xa0, 0xda, 0x8f, 0x6f, 0x0f, 0x07, 0x14,
    ];
    let tail = [0xfc, 0x18, 0xcd, 0x2a, 0xc8, 0xb3, 0xe0, 0x93, 0x04, 0x00];
    [&head[..], &[0; 290], &tail].concat()
}

/// `POST /charges`, which says what it was sent.
fn echoing(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move |body: Bytes| async move {
        runs.up();
        (StatusCode::CREATED, body)
    };
    Router::new().route("/charges", route(handler))
}

async fn case_114_a_compressed_body_is_compared_as_it_reaches_the_layer(wire: Wire) {
    let text = b"amount=1999";
    let call = |time| charge("k").field("Content-Encoding", "gzip").body(gzipped(text, time));
    for is_outside in [true, false] {
        let (once, runs) = (layer(&store()), Runs::default());
        let unpack = RequestDecompressionLayer::new();
        let app = if is_outside {
            echoing(&runs).layer(once.clone()).layer(unpack)
        } else {
            echoing(&runs).layer(unpack).layer(once.clone())
        };
        let server = serve(app).await;
        let first = wire.ask(&server, call(1)).await;
        assert_eq!((first.status, first.body.as_slice()), (201, &text[..]));
        assert_replay(&wire.ask(&server, call(1)).await, &first);
        let (other_file, plain) = (
            wire.ask(&server, call(2)).await,
            wire.ask(&server, charge("k").body(&text[..])).await,
        );
        for other in [other_file, plain] {
            if is_outside {
                assert_replay(&other, &first);
            } else {
                assert_eq!((other.status, other.problem().as_str()), (422, "key-reused"));
            }
        }
        assert_eq!(runs.count(), 1);
        idle(&once).await;
    }
}

/// Unpacked outside, the limit is that of the content; inside, that of the bytes that were sent.
async fn case_114_a_body_is_as_large_as_it_is_when_it_reaches_the_layer(wire: Wire) {
    let call = || charge("k").field("Content-Encoding", "gzip").body(bomb());
    for is_outside in [true, false] {
        let (store, runs) = (store(), Runs::default());
        let once = layer(&store).max_request(100_000);
        let unpack = RequestDecompressionLayer::new();
        let app = if is_outside {
            echoing(&runs).layer(once.clone()).layer(unpack)
        } else {
            echoing(&runs).layer(unpack).layer(once.clone())
        };
        let server = serve(app).await;
        let answer = wire.ask(&server, call()).await;
        if is_outside {
            assert_eq!((answer.status, answer.problem().as_str()), (413, "request-too-large"));
            assert_eq!((runs.count(), store.stats().won), (0, 0));
        } else {
            assert_eq!((answer.status, answer.body.len()), (201, 300_000));
        }
        idle(&once).await;
    }
}

fn long_answer(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move || async move {
        runs.up();
        (StatusCode::CREATED, "compress me, ".repeat(20))
    };
    Router::new().route("/charges", route(handler))
}

/// The first response again, byte for byte, also to a client that would take another form.
async fn case_060_what_is_compressed_inside_is_part_of_the_outcome(wire: Wire) {
    let runs = Runs::default();
    let once = layer(&store());
    let app = long_answer(&runs).layer(CompressionLayer::new()).layer(once.clone());
    let server = serve(app).await;
    let first = wire.ask(&server, charge("k").field("Accept-Encoding", "gzip")).await;
    assert_eq!((first.status, first.field("content-encoding")), (201, Some("gzip")));
    assert_eq!(first.body[..2], [0x1f, 0x8b]);
    for accepts in ["gzip", "identity"] {
        let again = wire.ask(&server, charge("k").field("Accept-Encoding", accepts)).await;
        assert_replay(&again, &first);
    }
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

async fn case_060_what_is_compressed_outside_is_for_each_client(wire: Wire) {
    let runs = Runs::default();
    let once = layer(&store());
    let app = long_answer(&runs).layer(once.clone()).layer(CompressionLayer::new());
    let server = serve(app).await;
    let text = "compress me, ".repeat(20);
    for (accepts, is_packed) in [("gzip", true), ("identity", false), ("gzip", true)] {
        let reply = wire.ask(&server, charge("k").field("Accept-Encoding", accepts)).await;
        assert_eq!((reply.status, reply.field("content-encoding").is_some()), (201, is_packed));
        assert_eq!(reply.body == text.as_bytes(), !is_packed);
    }
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// What the client saw is the time-out; what is stored is what the work came to.
async fn case_118_a_time_out_outside_ends_the_waiting_and_not_the_work(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let app = gated(&runs, &gate).layer(once.clone());
    let patient = serve(app.clone()).await;
    let time_out = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, MS);
    let hasty = serve(app.layer(time_out)).await;

    let first = wire.ask(&hasty, charge("k")).await;
    assert_eq!((first.status, first.is_replay(), first.text()), (504, false, ""));
    // Before it was cut off it may have come as far as the claim, or not.
    if store.stats().in_flight == 0 {
        drop(wire.asking(&patient, charge("k")).await);
    }
    gate.entered().await;
    let waiter = wire.ask(&hasty, charge("k")).await;
    assert_eq!((waiter.status, waiter.is_replay()), (504, false));
    let edited = wire.ask(&patient, charge("k").body("other")).await;
    assert_eq!((edited.status, edited.problem().as_str()), (422, "key-reused"));
    gate.open();
    idle(&once).await;
    let retry = wire.ask(&patient, charge("k")).await;
    assert_eq!((retry.status, retry.text(), retry.is_replay()), (201, "1", true));
    assert_eq!((runs.count(), store.stats().keys), (1, 1));
}

/// Nobody knows whether the work was done: 504 is kept.
async fn case_020_a_time_out_inside_is_an_outcome(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let time_out = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, MS);
    let server = serve(gated(&runs, &gate).layer(time_out).layer(once.clone())).await;
    let first = wire.ask(&server, charge("k")).await;
    assert_eq!((first.status, first.is_replay()), (504, false));
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// Its client and its duplicates end by their own limits, its key by `max_run`.
async fn case_022_a_handler_that_never_ends_blocks_its_key_and_no_other(wire: Wire) {
    let ((store, clock), runs, present) = (by_hand(), Runs::default(), Present::default());
    let once = IdempotencyLayer::single_tenant(backing(&store)).wait_limit(MS);
    let counted = runs.clone();
    let app = crate::charges(move || {
        let run = counted.up();
        async move {
            if run == 1 {
                std::future::pending::<()>().await;
            }
            (StatusCode::CREATED, run.to_string())
        }
    });
    let server = serve(present.around(app.layer(once.clone()))).await;
    let first = wire.begin(&server, &charge("k")).await;
    until(|| runs.count() == 1).await;
    let told = wire.ask(&server, charge("k")).await;
    assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
    let _stays = first.leave(Leave::Reset).await;
    until(|| present.count() == 0).await;
    let other = wire.ask(&server, charge("other")).await;
    assert_eq!((other.status, other.text()), (201, "2"));

    clock.advance(SECOND * (15 * 60 + 1));
    let told = wire.ask(&server, charge("k")).await;
    assert_eq!((told.status, told.problem().as_str()), (409, "outcome-unknown"));
    assert_eq!((store.stats().in_flight, once.stats().tasks), (0, 1), "it still runs");
    // Whoever has looked may let it run again.
    store.resolve(&identity("k"), Resolution::Release).unwrap();
    let again = wire.ask(&server, charge("k")).await;
    assert_eq!((again.status, again.text(), again.is_replay()), (201, "3", false));
}
