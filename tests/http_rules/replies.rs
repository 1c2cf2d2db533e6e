//! What is stored and what comes back: R16, R17, R21.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    response::IntoResponse,
    routing::{any, post},
};
use http_body_util::BodyExt;
use oncekey::{
    Outcome, Resolution, Store,
    http::{IdempotencyLayer, Keep, Release, StatusTable},
};
use tower_http::{compression::CompressionLayer, cors::CorsLayer};

use crate::{
    charge, charges,
    common::{MS, watchdog},
    gated, layer,
    sockets::{
        Client, Gate, Reply, Runs, ask, asking, connect_h2, post as posting, request, serve, until,
    },
    store,
};

/// What a handler may set, in the order of the wire.
const FIELDS: [(&str, &[u8]); 16] = [
    ("location", b"/charges/7"),
    ("etag", b"\"v1\""),
    ("content-type", b"application/json"),
    ("x-three", b"1"),
    ("x-three", b"2, 2"),
    ("x-three", b"1"),
    ("content-disposition", b"attachment; filename=\"a, b.txt\""),
    ("x-raw", b"\xff\xfe"),
    ("set-cookie", b"a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
    ("set-cookie", b"b=2; Expires=Thu, 22 Oct 2026 07:28:00 GMT"),
    ("www-authenticate", b"Bearer"),
    ("date", b"Wed, 21 Oct 2015 07:28:00 GMT"),
    ("access-control-allow-origin", b"https://a.example"),
    ("proxy-status", b"x"),
    ("keep-alive", b"timeout=5"),
    ("x-hop", b"1"),
];

fn fields() -> HeaderMap {
    let mut fields = HeaderMap::new();
    for (name, value) in FIELDS {
        fields.append(HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap());
    }
    fields.append("connection", HeaderValue::from_static("x-hop"));
    fields
}

fn pairs(reply: &Reply, names: &[&str]) -> Vec<(String, Vec<u8>)> {
    let is_one = |(name, _): &&(String, Vec<u8>)| names.contains(&name.as_str());
    reply.fields.iter().filter(is_one).cloned().collect()
}

#[tokio::test]
async fn r16_the_same_status_lines_and_bytes_come_back() {
    let _watchdog = watchdog();
    let kept = ["location", "etag", "content-type", "x-three", "content-disposition", "x-raw"];
    let (store, runs) = (store(), Runs::default());
    let count = runs.clone();
    let handler = move || async move {
        count.up();
        (StatusCode::CREATED, fields(), "{\"id\":7}")
    };
    let verbatim = |layer: IdempotencyLayer| {
        layer
            .keep_set_cookie(true)
            .keep_www_authenticate(true)
            .leave_out(HeaderName::from_static("etag"))
    };
    let app = Router::new().route("/charges", post(handler.clone())).layer(layer(&store));
    let other = Router::new().route("/verbatim", post(handler)).layer(verbatim(layer(&store)));
    let server = serve(app.merge(other)).await;

    let first = ask(&server, posting("/charges", "k", "{}")).await;
    for (name, _) in FIELDS {
        assert!(!first.lines(name).is_empty(), "the first client gets {name} as it was made");
    }
    assert!(!first.is_replay());
    let again = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!((again.status, &again.body), (201, &first.body));
    assert_eq!(pairs(&again, &kept), pairs(&first, &kept));
    // The server dates each response anew.
    let ours = ["content-length", "idempotent-replayed", "date"];
    for (name, _) in &again.fields {
        assert!([&kept[..], &ours[..]].concat().contains(&name.as_str()), "{name}");
    }
    assert_eq!(again.field("content-length"), Some("8"));
    assert_ne!(again.field("date"), first.field("date"));

    ask(&server, posting("/verbatim", "k", "{}")).await;
    let again = ask(&server, posting("/verbatim", "k", "{}")).await;
    assert_eq!(again.lines("set-cookie"), first.lines("set-cookie"));
    assert_eq!(again.lines("www-authenticate"), [b"Bearer"]);
    assert!(again.lines("etag").is_empty());
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn r16_no_content_no_length() {
    let _watchdog = watchdog();
    let store = store();
    let status = |Path(status): Path<u16>| async move {
        (StatusCode::from_u16(status).unwrap(), [("location", "/x")])
    };
    let layer = layer(&store).methods([Method::POST, Method::HEAD]);
    let server = serve(Router::new().route("/{status}", any(status)).layer(layer)).await;
    for (code, length) in [(201, Some("0")), (204, None), (303, Some("0")), (304, None)] {
        for is_replay in [false, true] {
            let asked = posting(&format!("/{code}"), &format!("k{code}"), "");
            let reply = ask(&server, asked).await;
            assert_eq!((reply.status, reply.is_replay()), (code, is_replay));
            assert_eq!(reply.field("location"), Some("/x"));
            assert!(!is_replay || reply.field("content-length") == length, "{code}");
        }
    }
    let mut client = Client::connect(&server).await;
    for is_replay in [false, true] {
        client.send(request("HEAD", "/200", &[("Idempotency-Key", "k")], "")).await;
        let reply = client.head().await;
        assert_eq!((reply.status, reply.is_replay()), (200, is_replay));
    }
}

#[tokio::test]
async fn r16_what_belongs_to_one_client_is_added_outside() {
    let _watchdog = watchdog();
    let store = store();
    let handler = || async { "compress me, compress me, compress me, compress me, compress me" };
    let app = Router::new()
        .route("/charges", post(handler))
        .layer(layer(&store))
        .layer(CompressionLayer::new())
        .layer(CorsLayer::new().allow_origin(
            ["https://a.example", "https://b.example"].map(|origin| origin.parse().unwrap()),
        ));
    let server = serve(app).await;
    let asked = |origin: &str, encoding: &str| {
        let fields = [("Idempotency-Key", "k"), ("Origin", origin), ("Accept-Encoding", encoding)];
        request("POST", "/charges", &fields, "")
    };
    let first = ask(&server, asked("https://a.example", "identity")).await;
    let again = ask(&server, asked("https://b.example", "gzip")).await;
    assert_eq!(first.field("access-control-allow-origin"), Some("https://a.example"));
    assert_eq!(again.field("access-control-allow-origin"), Some("https://b.example"));
    assert_eq!(
        (first.field("content-encoding"), again.field("content-encoding")),
        (None, Some("gzip"))
    );
    assert!(again.is_replay());
}

#[tokio::test]
async fn r16_trailers_come_back() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let count = runs.clone();
    let handler = move || async move {
        count.up();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let body = Body::from("abc").with_trailers(std::future::ready(Some(Ok(trailers))));
        ([("trailer", "grpc-status")], Body::new(body))
    };
    let server = serve(Router::new().route("/charges", post(handler)).layer(layer(&store))).await;
    let mut client = connect_h2(&server).await;
    for is_replay in [false, true] {
        let request = http::Request::post("http://test/charges").header("idempotency-key", "k");
        let response = client.send_request(request.body(Body::from("{}")).unwrap()).await.unwrap();
        assert_eq!(response.headers().contains_key("idempotent-replayed"), is_replay);
        let all = response.into_body().collect().await.unwrap();
        assert_eq!(all.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(all.to_bytes(), "abc");
    }
    let wanting = [("Idempotency-Key", "k"), ("TE", "trailers"), ("Connection", "TE")];
    let over_1 = ask(&server, request("POST", "/charges", &wanting, "{}")).await;
    assert_eq!((over_1.text(), over_1.is_replay()), ("abc", true));
    assert_eq!(over_1.trailers, [("grpc-status".to_owned(), b"0".to_vec())]);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r16_the_mark_of_a_replay_is_a_setting() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).replay_header(HeaderName::from_static("x-again"));
    let server = serve(charges(&runs).layer(layer)).await;
    ask(&server, posting("/charges", "k", "{}")).await;
    let again = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!(again.field("x-again"), Some("true"));
    assert!(!again.is_replay());
}

/// `POST /{status}` answers that status, and may say what becomes of it.
fn answering(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move |Path(status): Path<u16>, headers: HeaderMap| async move {
        runs.up();
        let mut response = (StatusCode::from_u16(status).unwrap(), "answer").into_response();
        match headers.get("x-verdict").map(HeaderValue::as_bytes) {
            Some(b"keep") => drop(response.extensions_mut().insert(Keep)),
            Some(b"release") => drop(response.extensions_mut().insert(Release)),
            _ => {}
        }
        response
    };
    Router::new().route("/{status}", post(handler))
}

/// Asks twice, and says whether the handler ran once.
async fn is_kept(client: &mut Client, runs: &Runs, status: u16, verdict: &str) -> bool {
    let before = runs.count();
    let fields = [("Idempotency-Key", "k"), ("X-Verdict", verdict)];
    let asked = request("POST", &format!("/{status}?{verdict}"), &fields, "");
    let (first, again) = (client.ask(&asked).await, client.ask(&asked).await);
    assert_eq!((first.status, again.status), (status, status));
    assert!(!first.is_replay());
    assert_eq!(again.is_replay(), runs.count() == before + 1);
    again.is_replay()
}

#[tokio::test]
async fn r17_the_default_table_status_by_status() {
    let _watchdog = watchdog();
    const RELEASED: [u16; 23] = [
        400, 401, 403, 404, 405, 406, 409, 411, 412, 413, 414, 415, 416, 417, 421, 422, 423, 425,
        426, 428, 429, 431, 503,
    ];
    for status in 200..=599 {
        let (store, runs) = (store(), Runs::default());
        let server = serve(answering(&runs).layer(layer(&store))).await;
        let mut client = Client::connect(&server).await;
        let kept = is_kept(&mut client, &runs, status, "").await;
        assert_eq!(kept, !RELEASED.contains(&status), "{status}");
        let left = store.stats();
        assert_eq!((left.in_flight, left.held, left.keys), (0, 0, usize::from(kept)));
    }
}

#[tokio::test]
async fn r17_the_table_is_a_setting_and_the_handler_has_the_last_word() {
    let _watchdog = watchdog();
    for (status, verdict, kept) in [
        (200, "keep", true),
        (200, "release", false),
        (500, "release", false),
        (503, "keep", true),
        (404, "keep", true),
        (402, "", false),
        (409, "", true),
    ] {
        let (store, runs) = (store(), Runs::default());
        let table =
            StatusTable::default().release(StatusCode::PAYMENT_REQUIRED).keep(StatusCode::CONFLICT);
        let layer =
            layer(&store).operation("POST /{any}", move |policy| policy.statuses(table.clone()));
        let server = serve(answering(&runs).layer(layer)).await;
        let mut client = Client::connect(&server).await;
        assert_eq!(is_kept(&mut client, &runs, status, verdict).await, kept, "{status} {verdict}");
    }
}

#[tokio::test]
async fn r17_our_own_answers_are_never_stored() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer = layer(&store).statuses(StatusTable::keep_all()).wait_limit(Duration::ZERO);
    let server = serve(gated(&runs, &gate).layer(layer.max_request(5))).await;
    assert_eq!(ask(&server, posting("/charges", "k", "too large")).await.status, 413);
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.status, 409);
    assert_eq!(ask(&server, posting("/charges", "k", "x")).await.status, 422);
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(ask(&server, posting("/charges", "k", "{}")).await.is_replay());
}

#[tokio::test]
async fn r21_a_full_store_says_when_to_ask_again_and_replays_go_on() {
    let _watchdog = watchdog();
    for (per_account, status, problem) in
        [(false, 503, "store-full"), (true, 429, "account-over-share")]
    {
        let builder = Store::builder();
        let builder =
            if per_account { builder.max_keys_per_account(1) } else { builder.max_keys(1) };
        let (store, runs) = (builder.build().unwrap(), Runs::default());
        let server = serve(charges(&runs).layer(layer(&store))).await;
        assert_eq!(ask(&server, posting("/charges", "k1", "{}")).await.text(), "1");
        let full = ask(&server, posting("/charges", "k2", "{}")).await;
        assert_eq!((full.status, full.problem().as_str()), (status, problem));
        let seconds: u64 = full.field("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&seconds));
        assert!(ask(&server, posting("/charges", "k1", "{}")).await.is_replay());
        assert_eq!(runs.count(), 1);
    }
}

#[tokio::test]
async fn r21_while_draining_new_work_is_refused_and_replays_go_on() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k1", "{}"));
    gate.entered().await;
    let mut drain = Box::pin(store.drain());
    tokio::select! {
        biased;
        () = &mut drain => panic!("one is in flight"),
        () = std::future::ready(()) => {}
    }
    let refused = ask(&server, posting("/charges", "k2", "{}")).await;
    assert_eq!((refused.status, refused.problem().as_str()), (503, "too-busy"));
    assert!(matches!(refused.field("retry-after"), Some("1" | "2")));
    gate.open();
    drain.await;
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(ask(&server, posting("/charges", "k1", "{}")).await.is_replay());
}

#[tokio::test]
async fn r21_the_base_of_the_types_is_a_setting() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).problem_base("https://errors.example/once#");
    let server = serve(charges(&runs).layer(layer)).await;
    let reply = ask(&server, request("POST", "/charges", &[], "")).await;
    assert_eq!(reply.problem(), "key-missing");
    let json: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(json["type"], "https://errors.example/once#key-missing");
    assert!(json["detail"].as_str().unwrap().contains("idempotency-key"));
}

#[tokio::test]
async fn r21_what_has_no_type_of_its_own_is_about_blank_and_tells_nothing_of_the_inside() {
    let _watchdog = watchdog();
    let app = Router::new().route("/charges", post(|| async { crate::fail() }));
    let server = serve(app.layer(layer(&store()))).await;
    let reply = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!(reply.status, 500);
    let json: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!((&json["type"], &json["status"]), (&"about:blank".into(), &500.into()));
    assert_eq!(json["title"], "Internal Server Error");
    assert!(!reply.text().contains("panics"), "{}", reply.text());
    assert!(!reply.text().contains(".rs"), "{}", reply.text());
}

/// Asking again is of use only after a 409 that says when, or with what was asked for.
#[tokio::test]
async fn r21_what_was_refused_is_refused_until_it_is_corrected() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store).wait_limit(MS))).await;
    let first = asking(&server, posting("/charges", "secret-k", "{}"));
    gate.entered().await;
    let mut titles = std::collections::HashMap::new();
    for _ in 0..3 {
        for (refused, problem) in [
            (request("POST", "/charges", &[], "{}"), "key-missing"),
            (posting("/charges", "secret b", "{}"), "key-invalid"),
            (posting("/charges", "secret-k", "secret"), "key-reused"),
            (posting("/charges", "secret-k", "{}"), "in-flight"),
        ] {
            let reply = ask(&server, refused).await;
            assert_eq!(reply.problem(), problem);
            assert!(!reply.text().contains("secret"), "neither key nor body");
            let json: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
            let title = titles.entry(problem).or_insert_with(|| json["title"].clone());
            assert_eq!(*title, json["title"]);
        }
    }
    assert_eq!(titles.len(), 4);
    gate.open();
    let first = first.await.unwrap();
    gate.open();
    gate.open();
    assert_eq!(ask(&server, posting("/charges", "secret-k", "{}")).await.body, first.body);
    assert_eq!(ask(&server, posting("/charges", "secret-b", "{}")).await.text(), "2");
    assert_eq!(ask(&server, posting("/charges", "k2", "secret")).await.text(), "3");
}

#[tokio::test]
async fn r21_a_client_that_gave_up_and_an_operator_meet_the_same_record() {
    let _watchdog = watchdog();
    let (store, gate) = (store(), Gate::new());
    let at = gate.clone();
    let handler = move || async move {
        at.pass().await;
        crate::fail()
    };
    let app = Router::new().route("/charges", post(handler)).layer(layer(&store).wait_limit(MS));
    let server = serve(app).await;
    let mut client = Client::connect(&server).await;
    client.send(posting("/charges", "k", "{}")).await;
    gate.entered().await;
    client.reset();
    gate.open();
    until(|| store.stats().held == 1).await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.problem(), "outcome-unknown");
    let outcome = Outcome::new(201).header("location", "/charges/7").body("by hand");
    store.resolve(&charge("k"), Resolution::Complete(outcome)).unwrap();
    let reply = ask(&server, posting("/charges", "k", "{}")).await;
    assert_eq!((reply.status, reply.text(), reply.is_replay()), (201, "by hand", true));
    assert_eq!(reply.field("location"), Some("/charges/7"));
}
