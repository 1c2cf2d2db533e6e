//! Bytes that mean one thing to a proxy and another to us, and bytes that would mean something in
//! what we send: no key is taken from where none may stand, and nothing that was sent comes back.

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post as route,
};
use oncekey::{Outcome, Resolution};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    common::watchdog,
    counting, idle, layer,
    sockets::{Client, Runs, Server, serve},
    store,
    wire::{Wire, charge, keyless},
};

over_both! {
    r06_a_key_in_the_trailers_is_none,
    r06_a_field_that_connection_names_or_that_looks_alike_is_no_other_key,
    r21_nothing_that_was_sent_comes_back_in_a_problem,
    r16_an_outcome_from_elsewhere_breaks_no_line,
}

/// A trailer comes behind the body, when the head has long been passed on by a proxy.
async fn r06_a_key_in_the_trailers_is_none(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(counting(&runs).layer(once.clone())).await;
    let late = keyless("/charges").in_pieces(2).trailer("idempotency-key", "late");
    let told = wire.ask(&server, late).await;
    assert_eq!((told.status, told.problem().as_str()), (400, "key-missing"));
    let both = charge("early").in_pieces(2).trailer("idempotency-key", "late");
    assert_eq!(wire.ask(&server, both).await.status, 201);
    assert_eq!(runs.count(), 1);
    assert!(store.look_up(&crate::charge("early")).is_some());
    assert!(store.look_up(&crate::charge("late")).is_none());
    idle(&once).await;
}

async fn r06_a_field_that_connection_names_or_that_looks_alike_is_no_other_key(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(counting(&runs).layer(once.clone())).await;
    for name in ["Idempotency_Key", "X-Idempotency-Key", "Idempotency-Key2", "IdempotencyKey"] {
        let told = wire.ask(&server, keyless("/charges").field(name, "k")).await;
        assert_eq!(told.problem(), "key-missing", "{name}");
    }
    // Whatever stands beside it, the key is the one that was sent.
    let call = charge("k").field("Idempotency_Key", "other").field("X-Idempotency-Key", "other");
    assert_eq!(wire.ask(&server, call).await.status, 201);
    // HTTP/2 has no such field, and a request with it is malformed.
    if wire == Wire::Http1 {
        let call = charge("k").field("Connection", "Idempotency-Key");
        assert!(wire.ask(&server, call).await.is_replay());
        let call = keyless("/charges").field("Connection", "Idempotency-Key");
        assert_eq!(wire.ask(&server, call).await.problem(), "key-missing");
    }
    assert_eq!((runs.count(), store.stats().keys), (1, 1));
    idle(&once).await;
}

/// A key that cannot be read is told where it cannot, not what it was: what comes back might be
/// shown, logged or cached.
async fn r21_nothing_that_was_sent_comes_back_in_a_problem(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).max_request(10);
    let server = serve(counting(&runs).layer(once.clone())).await;
    let sent = "<script>evil</script>";
    let calls = [
        charge(&format!("\"{sent}")),
        charge(&format!("{sent} {sent}")),
        charge(&format!("\"{sent}\\n\"")),
        charge(sent).field("Idempotency-Key", sent),
        charge(&format!("{sent},{sent}")),
        charge(&sent.repeat(20)),
        charge(&format!("{sent}\u{e4}")),
        charge("k").body(sent),
        keyless("/charges").field("X-Evil", sent),
    ];
    for call in calls {
        let reply = wire.ask(&server, call.clone()).await;
        assert!(reply.status >= 400, "{call:?}");
        reply.problem();
        let all = reply.fields.iter().map(|(_, value)| value.as_slice()).chain([&reply.body[..]]);
        for bytes in all {
            let text = String::from_utf8_lossy(bytes);
            assert!(!text.contains("script") && !text.contains("evil"), "{text}");
        }
    }
    assert_eq!((runs.count(), store.stats().keys), (0, 0));
    idle(&once).await;
}

/// An outcome that no handler made, with what would end a line and begin another.
async fn r16_an_outcome_from_elsewhere_breaks_no_line(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(counting(&runs).layer(once.clone())).await;
    let print = oncekey::Fingerprint::request("POST", "/charges", b"{}");
    match store.claim(&crate::charge("k"), print).unwrap() {
        oncekey::Claim::Won(permit) => permit.hold().unwrap(),
        other => panic!("{other:?}"),
    }
    let outcome = Outcome::new(200)
        .header("x-good", "1")
        .header("x-bad", "a\r\nSet-Cookie: evil=1")
        .header("x-worse\r\nSet-Cookie: evil", "1")
        .header("x-nul", "a\0b")
        .header(":status", "500")
        .header(":x-bad", "a\r\nevil: 1")
        .header("::", "evil")
        .header("transfer-encoding", "chunked")
        .header("content-length", "1")
        .body("whole");
    // With the mark of a sealed outcome in it, though not in front: it is none.
    store.resolve(&crate::charge("k"), Resolution::Complete(outcome)).unwrap();
    let told = wire.ask(&server, charge("k")).await;
    assert_eq!((told.status, told.text(), told.is_cut), (200, "whole", false));
    assert_eq!(told.field("x-good"), Some("1"));
    for name in ["set-cookie", "evil", "x-bad", "x-worse", "x-nul"] {
        assert!(told.field(name).is_none(), "{told:?}");
    }
    assert!(told.trailers.iter().all(|(name, _)| name == "status"), "{told:?}");
    assert_eq!(runs.count(), 0);
    idle(&once).await;
}

/// What the handler was given, so that a test sees whether it and the key belong together.
type Seen = std::sync::Arc<std::sync::Mutex<Vec<(String, Vec<u8>)>>>;

fn seeing(seen: &Seen) -> Router {
    let handler = |State(seen): State<Seen>, headers: HeaderMap, body: Bytes| async move {
        let key = headers["idempotency-key"].to_str().unwrap().to_owned();
        seen.lock().unwrap().push((key, body.to_vec()));
        (StatusCode::CREATED, "ran")
    };
    Router::new().route("/charges", route(handler)).with_state(seen.clone())
}

/// All that a server says to these bytes until it closes, or until the client half-closes.
async fn say(server: &Server, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut told = Vec::new();
    let _ = stream.read_to_end(&mut told).await;
    String::from_utf8_lossy(&told).into_owned()
}

/// Heads that a proxy and a server may read differently. Either nothing runs, or what runs is the
/// request with the one key that can be read of it.
#[tokio::test]
async fn r06_heads_that_can_be_read_in_two_ways_run_nothing_or_what_they_say() {
    let _watchdog = watchdog();
    let refused: [&[u8]; 11] = [
        b"Idempotency-Key : k\r\n",
        b" Idempotency-Key: k\r\n",
        b"Idempotency-Key: k\r\n folded\r\n",
        b"Idempotency-Key: k\r\n\tfolded\r\n",
        b"Idempotency-Key: k\rX: y\r\n",
        b"Idempotency-Key: k\0\r\n",
        b"Idempotency-Key: k\x7f\r\n",
        b"Idempotency-Key: \r\n",
        b"Idempotency-Key: k\r\nIdempotency-Key: k\r\n",
        b"Idempotency-Key: k\r\nidempotency-key: l\r\n",
        b"Idempotency\r\n-Key: k\r\n",
    ];
    let (store, seen) = (store(), Seen::default());
    let once = layer(&store);
    let server = serve(seeing(&seen).layer(once.clone())).await;
    for head in refused {
        let mut bytes = b"POST /charges HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n".to_vec();
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(b"\r\n{}");
        let told = say(&server, &bytes).await;
        let shown = String::from_utf8_lossy(head);
        assert!(told.starts_with("HTTP/1.1 400 "), "{shown:?}: {told}");
        assert!(seen.lock().unwrap().is_empty(), "{shown:?}");
    }
    assert_eq!(store.stats().keys, 0);
    // A bare line feed ends a line for this server: the field behind it is one of its own, and the
    // key is what came before it. So it does for the handler.
    let bare = b"POST /charges HTTP/1.1\r\nHost: test\r\nIdempotency-Key: k\nX: y\r\nContent-Length: 2\r\n\r\n{}";
    let told = say(&server, bare).await;
    match &*std::mem::take(&mut *seen.lock().unwrap()) {
        [] => assert!(told.starts_with("HTTP/1.1 400 "), "{told}"),
        [(key, body)] => assert_eq!((key.as_str(), &body[..]), ("k", &b"{}"[..])),
        more => panic!("{more:?}"),
    }
    idle(&once).await;
}

/// Two lengths, or a length and chunks: whichever the server takes, the bytes behind it are not
/// taken for a second request under a key of the attacker's choice, or that request is one that the
/// attacker could have sent as well. What is claimed and what the handler reads are the same bytes.
#[tokio::test]
async fn r04_bodies_that_can_be_read_in_two_ways_are_read_in_one() {
    let _watchdog = watchdog();
    let framings: [(&str, &str); 6] = [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\nX"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "1\r\nA\r\n0\r\n\r\n"),
        ("Content-Length: 1\r\nContent-Length: 2\r\n", "AB"),
        ("Content-Length: 2, 2\r\n", "AB"),
        ("Transfer-Encoding: xchunked\r\n", "1\r\nA\r\n0\r\n\r\n"),
        ("Content-Length: +2\r\n", "AB"),
    ];
    let (store, seen) = (store(), Seen::default());
    let once = layer(&store);
    let server = serve(seeing(&seen).layer(once.clone())).await;
    for (nth, (framing, body)) in framings.into_iter().enumerate() {
        let head = format!("POST /charges HTTP/1.1\r\nHost: test\r\nIdempotency-Key: k{nth}\r\n");
        let bytes = format!("{head}{framing}\r\n{body}");
        let told = say(&server, bytes.as_bytes()).await;
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        for (key, body) in seen {
            assert_eq!(key, format!("k{nth}"), "{framing:?}: {told}");
            // A retry of what was read is a replay: that is what was claimed.
            let again = format!("{head}Content-Length: {}\r\n\r\n", body.len());
            let mut client = Client::connect(&server).await;
            let reply = client.ask([again.as_bytes(), &body].concat()).await;
            assert!(reply.is_replay(), "{framing:?}: {reply:?}");
        }
    }
    idle(&once).await;
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A header block of literal fields, as no HTTP library would let us write it.
fn block(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        block.push(name.len() as u8);
        block.extend_from_slice(name.as_bytes());
        block.push(value.len() as u8);
        block.extend_from_slice(value);
    }
    block
}

/// What HTTP/1.1 cannot carry in a field, HTTP/2 could: line ends and more. Were it passed on to
/// an HTTP/1.1 server it would be a second field, or a second request.
#[tokio::test]
async fn r06_line_ends_within_a_field_of_http_2_run_nothing() {
    let _watchdog = watchdog();
    let (store, seen) = (store(), Seen::default());
    let once = layer(&store);
    let server = serve(seeing(&seen).layer(once.clone())).await;
    let ask = async |key_name: &str, key: &[u8]| {
        let fields: [(&str, &[u8]); 5] = [
            (":method", b"POST"),
            (":scheme", b"http"),
            (":path", b"/charges"),
            (":authority", b"test"),
            (key_name, key),
        ];
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend_from_slice(&frame(4, 0, 0, &[]));
        // END_HEADERS, then the body with END_STREAM.
        bytes.extend_from_slice(&frame(1, 4, 1, &block(&fields)));
        bytes.extend_from_slice(&frame(0, 1, 1, b"{}"));
        let _ = stream.write_all(&bytes).await;
        // Until there is an answer or a reset of the stream or of all.
        loop {
            let mut head = [0; 9];
            if stream.read_exact(&mut head).await.is_err() {
                return false;
            }
            let len = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; len as usize];
            if stream.read_exact(&mut payload).await.is_err() {
                return false;
            }
            match head[3] {
                // HEADERS; `:status` 201 is no entry of the static table, 400 is its twelfth.
                1 => return payload.first() != Some(&0x8c),
                3 | 7 => return false,
                _ => {}
            }
        }
    };
    for key in [
        &b"k\r\nx-account: other"[..],
        b"k\r\n\r\nPOST /charges HTTP/1.1\r\n",
        b"k\nx: y",
        b"k\rx",
        b"k\0",
        b"\r\nk",
        b"k\x7f",
        b"",
        b"k\xc3\xa4",
    ] {
        assert!(!ask("idempotency-key", key).await, "{key:?}");
        assert!(seen.lock().unwrap().is_empty(), "{key:?}");
    }
    for name in ["idempotency-key\r\nx", "idempotency-key:", "Idempotency-Key", ":idempotency-key"]
    {
        assert!(!ask(name, b"k").await, "{name:?}");
        assert!(seen.lock().unwrap().is_empty(), "{name:?}");
    }
    assert_eq!(store.stats().keys, 0);
    assert!(ask("idempotency-key", b"good").await);
    assert_eq!(*seen.lock().unwrap(), [("good".to_owned(), b"{}".to_vec())]);
    idle(&once).await;
}
