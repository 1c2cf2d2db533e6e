//! The same response again is framed as it must be for the connection it goes out on: the next
//! answer on that connection is where it should be.

use axum::{
    Router,
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode},
    response::IntoResponse,
    routing::{any, post as route},
};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Method, Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use oncekey::http::{BoxError, RequestBody};
use tower::{ServiceBuilder, service_fn};

use crate::{
    assert_idle, charges,
    common::LONG,
    counting, layer, serve_fallible,
    sockets::{Client, Reply, Runs, Server, serve},
    store,
    wire::{Call, Wire, assert_replay, charge},
};

over_all! {
    case_060_no_content_has_no_length,
    case_058_many_and_long_lines_come_back,
    case_060_a_replay_to_head_has_no_body,
}

/// Without a router between the layer and the wire: 204 and 304 have no length, whatever the
/// handler said, and what has no body has none.
async fn case_060_no_content_has_no_length(wire: Wire) {
    for (status, body) in [(204, ""), (304, ""), (204, "a mistake"), (304, "a mistake")] {
        let once = layer(&store()).operation_name("charge");
        let handler = service_fn(move |_: Request<RequestBody<Incoming>>| async move {
            let response = Response::builder().status(status).header("etag", "\"1\"");
            Ok::<_, BoxError>(response.body(Full::<Bytes>::from(body))?)
        });
        let server = serve_fallible(ServiceBuilder::new().layer(once).service(handler)).await;
        let first = wire.ask(&server, charge("k")).await;
        let again = wire.ask(&server, charge("k")).await;
        assert_eq!((first.status, again.status), (status, status));
        assert!(again.is_replay() && again.field("etag") == Some("\"1\""));
        assert_eq!((again.field("content-length"), again.text()), (None, ""));
    }
    // A router would tell the length of what it knows to be empty.
    for status in [204, 304] {
        let status = StatusCode::from_u16(status).unwrap();
        let server =
            serve(charges(move || std::future::ready(status)).layer(layer(&store()))).await;
        for is_replay in [false, true] {
            let reply = wire.ask(&server, charge("k")).await;
            assert_eq!((reply.status, reply.is_replay()), (status.as_u16(), is_replay));
            assert_eq!((reply.field("content-length"), reply.text()), (None, ""));
        }
    }
}

/// A header field as long, and as many of them, as a client takes.
async fn case_058_many_and_long_lines_come_back(wire: Wire) {
    // An HTTP/2 client takes 16 KiB of them by default.
    let (count, long) = if wire == Wire::Http1 { (3_000, 200_000) } else { (100, 8_000) };
    let (store, runs) = (store(), Runs::default());
    let counted = runs.clone();
    let app = charges(move || {
        counted.up();
        let mut headers = HeaderMap::new();
        for nth in 0..count {
            let name = HeaderName::try_from(format!("x-{}", nth % (count / 2))).unwrap();
            headers.append(name, HeaderValue::from(nth));
        }
        headers.insert("x-long", HeaderValue::try_from("v".repeat(long)).unwrap());
        std::future::ready((headers, "body"))
    });
    let server = serve(app.layer(layer(&store))).await;
    let first = wire.ask(&server, charge("k")).await;
    assert!(first.fields.len() > count && first.text() == "body");
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert_eq!(runs.count(), 1);
}

/// Methods that are covered only because somebody said so.
async fn case_060_a_replay_to_head_has_no_body(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let all = [Method::HEAD, Method::PUT, Method::DELETE, Method::GET];
    let once = layer(&store).methods(all.clone());
    let counted = runs.clone();
    let handler = move || async move { counted.up().to_string() };
    let server = serve(Router::new().route("/charges", any(handler)).layer(once)).await;
    for (nth, method) in all.into_iter().enumerate() {
        let call = || charge("k").body("").method(method.clone());
        let (mut replies, run) = (Vec::new(), (nth + 1).to_string());
        for _ in 0..2 {
            replies.push(match wire {
                Wire::Http1 if method == Method::HEAD => head(&server, call()).await,
                _ => wire.ask(&server, call()).await,
            });
        }
        let text = if method == Method::HEAD { "" } else { &run };
        assert_eq!((replies[0].text(), replies[1].text()), (text, text), "{method}");
        assert!(!replies[0].is_replay() && replies[1].is_replay());
        assert_eq!(runs.count(), nth + 1, "each method has an endpoint of its own");
    }
}

/// Asks twice on one connection: what follows the answer to `HEAD` is the next answer.
async fn head(server: &Server, call: Call) -> Reply {
    let mut client = Client::connect(server).await;
    client.send(call.to_bytes()).await;
    let reply = client.head().await;
    let next = client.ask(crate::wire::post("/nowhere", "next").to_bytes()).await;
    assert_eq!(next.status, 404, "{next:?}");
    reply
}

/// Every kind of response once and again on one connection, with the requests all written before
/// the first answer is read: the answers come in order, each where the one before it ends.
#[tokio::test]
async fn case_060_replays_leave_the_connection_in_step() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).required(false);
    let counted = runs.clone();
    let handler = move |headers: HeaderMap| {
        let counted = counted.clone();
        async move {
            counted.up();
            let streamed = |pieces: &[&'static str]| {
                let pieces: Vec<_> = pieces.iter().map(|piece| Ok::<_, BoxError>(*piece)).collect();
                Body::from_stream(stream::iter(pieces))
            };
            match headers["x-kind"].to_str().unwrap() {
                "sized" => "sized".into_response(),
                "streamed" => streamed(&["str", "eam", "ed"]).into_response(),
                "empty" => ().into_response(),
                "empty-stream" => streamed(&[]).into_response(),
                "204" => StatusCode::NO_CONTENT.into_response(),
                "204-with-a-body" => (StatusCode::NO_CONTENT, "no content").into_response(),
                "304-with-a-body" => (StatusCode::NOT_MODIFIED, "no content").into_response(),
                "205" => StatusCode::RESET_CONTENT.into_response(),
                "chunked-by-hand" => {
                    ([(header::TRANSFER_ENCODING, "chunked")], streamed(&["by hand"]))
                        .into_response()
                }
                "length-by-hand" => {
                    ([(header::CONTENT_LENGTH, "7")], streamed(&["by hand"])).into_response()
                }
                "trailers" => {
                    let mut trailers = HeaderMap::new();
                    trailers.insert("x-sum", HeaderValue::from_static("7"));
                    let frames = [Frame::data(Bytes::from_static(b"t")), Frame::trailers(trailers)];
                    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, BoxError>)));
                    ([(header::TRAILER, "x-sum")], Body::new(body)).into_response()
                }
                "large" => "x".repeat(300_000).into_response(),
                other => panic!("{other}"),
            }
        }
    };
    let server = serve(Router::new().route("/charges", route(handler)).layer(once.clone())).await;
    let kinds = [
        "sized",
        "streamed",
        "empty",
        "empty-stream",
        "204",
        "204-with-a-body",
        "304-with-a-body",
        "205",
        "chunked-by-hand",
        "length-by-hand",
        "trailers",
        "large",
    ];
    for te in [None, Some("trailers")] {
        let mut client = Client::connect(&server).await;
        let mut written = Vec::new();
        for kind in kinds {
            let mut call = charge(&format!("{kind}-{te:?}").replace('"', "")).field("X-Kind", kind);
            if let Some(te) = te {
                call = call.field("TE", te);
            }
            let bytes = call.to_bytes();
            written.extend_from_slice(&bytes);
            written.extend_from_slice(&bytes);
        }
        client.send(written).await;
        for kind in kinds {
            let mut first = client.reply().await;
            let again = client.reply().await;
            assert!(first.status < 400, "{kind}");
            if kind == "204-with-a-body" {
                // The router believes the handler; the replay does not.
                first.fields.retain(|(name, _)| name != "content-length");
                assert_eq!(again.field("content-length"), None);
            }
            assert_replay(&again, &first);
            assert_eq!(first.trailers.len(), usize::from(kind == "trailers" && te.is_some()));
        }
        client.half_close().await;
        assert!(client.is_closed().await, "and not a byte more");
    }
    assert_eq!(runs.count(), kinds.len() * 2);
    assert_idle(&once);
}

/// A client that knows neither chunks nor trailers.
#[tokio::test]
async fn case_060_an_http_1_0_client_gets_a_replay_it_can_read() {
    let _watchdog = crate::common::watchdog();
    let store = store();
    let handler = || async {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("7"));
        let frames = [Frame::data(Bytes::from_static(b"body")), Frame::trailers(trailers)];
        let body = StreamBody::new(stream::iter(frames.map(Ok::<_, BoxError>)));
        ([(header::TRAILER, "x-sum")], Body::new(body))
    };
    let app = Router::new().route("/charges", route(handler));
    let server = serve(app.layer(layer(&store))).await;
    let call = "POST /charges HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}";
    for is_again in [false, true] {
        let mut client = Client::connect(&server).await;
        let reply = client.ask(call).await;
        assert_eq!((reply.status, reply.text(), reply.is_replay()), (200, "body", is_again));
        assert_eq!(reply.field("transfer-encoding"), None);
        assert!(client.is_closed().await);
    }
}

/// One target in the forms that HTTP/1.1 has for it.
#[tokio::test]
async fn case_040_the_absolute_form_names_the_same_target() {
    let _watchdog = crate::common::watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(counting(&runs).layer(layer(&store))).await;
    let first = Wire::Http1.ask(&server, charge("k")).await;
    let absolute = crate::wire::post("http://test/charges", "k");
    assert_replay(&Wire::Http1.ask(&server, absolute).await, &first);
    let http2 = Wire::Http2.ask(&server, charge("k")).await;
    assert!(http2.is_replay(), "nor does the protocol count");
    assert_eq!(runs.count(), 1);
}

/// The handler promises a length and does not keep to it: no client may take the part for the
/// whole, nor wait for more on a connection that goes on, and there is no replay of it.
#[tokio::test]
async fn case_016_a_body_shorter_than_promised_is_never_taken_for_whole() {
    let _watchdog = crate::common::watchdog();
    for (len, ends_by_error) in [("50", true), ("9", false), ("4", false)] {
        let store = store();
        let once = layer(&store).capture_time(LONG);
        let app = charges(move || {
            let pieces = [Ok("piece"), Err(BoxError::from("broken"))];
            let pieces = pieces.into_iter().take(1 + usize::from(ends_by_error));
            let body = Body::from_stream(stream::iter(pieces));
            std::future::ready(([(header::CONTENT_LENGTH, len)], body))
        });
        let server = serve(app.layer(once.clone())).await;
        let first = Wire::Http1.ask(&server, charge("k")).await;
        assert_eq!(first.field("content-length"), Some(len));
        assert!(first.is_cut || first.text() == "piec", "{first:?}");
        let again = Wire::Http1.ask(&server, charge("k")).await;
        assert_eq!(again.problem(), "response-not-kept");
        assert_idle(&once);
    }
}

/// What the two bodies of the layer say of themselves, as a server reads it.
#[tokio::test]
async fn case_114_a_body_that_passes_keeps_its_length() {
    let _watchdog = crate::common::watchdog();
    let once = layer(&store()).required(false);
    let handler = |request: axum::extract::Request| async move {
        let exact = http_body::Body::size_hint(request.body()).exact();
        let len = request.into_body().collect().await.unwrap().to_bytes().len();
        format!("{exact:?} {len}")
    };
    let server = serve(Router::new().route("/charges", any(handler)).layer(once)).await;
    for call in [charge("k"), crate::wire::keyless("/charges"), charge("k").method(Method::PUT)] {
        let reply = Wire::Http1.ask(&server, call.body("12345")).await;
        assert_eq!(reply.text(), "Some(5) 5");
    }
}
