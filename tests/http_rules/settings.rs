//! Settings: for all operations and for one, of clones, of layers around layers; and how a service
//! publishes them.

use std::time::Duration;

use axum::{
    Router,
    http::{HeaderName, StatusCode, header::CONTENT_TYPE},
    routing::{any, get},
};
use bytes::Bytes;
use http::Method;
use oncekey::{
    Identity, KeyForm, Store,
    http::{Fingerprinting, IdempotencyLayer, Problem, StatusTable},
};
use serde_json::{Value, json};
use tower::ServiceBuilder;

use crate::{
    charges,
    common::{LONG, watchdog},
    gated, layer,
    sockets::{Gate, Runs, Server, ask, asking, post as posting, request, serve},
    store,
};

/// The status that the request asks for, how often something ran, and a line `x-run` of the same.
fn asked_for(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = move |headers: http::HeaderMap| async move {
        let status =
            headers.get("x-status").map_or(201, |it| it.to_str().unwrap().parse().unwrap());
        let run = runs.up().to_string();
        (StatusCode::from_u16(status).unwrap(), [("x-run", run.clone())], run)
    };
    Router::new().route("/plain", any(handler.clone())).route("/orders/{id}/refund", any(handler))
}

/// What a request to either operation comes to, setting by setting.
#[tokio::test]
async fn r06_each_setting_of_an_operation_counts_for_that_operation_alone() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store)
        .operation("POST /orders/{whatever}/refund", |policy| {
            policy
                .header_name(HeaderName::from_static("x-once"))
                .key_form(KeyForm::Strict)
                .max_request(8)
                .max_response(1)
                .statuses(StatusTable::default().keep(StatusCode::CONFLICT))
                .fingerprint(Fingerprinting::canonical_json())
                .replay_header(HeaderName::from_static("x-again"))
                .leave_out(HeaderName::from_static("x-run"))
        })
        // The same operation by another name of its parameter: on top of what it has.
        .operation("POST /orders/{id}/refund", |policy| policy.problem_base("/problems#"))
        .operation("PUT /orders/{id}/refund", |policy| policy.methods([Method::PUT]))
        .operation("PATCH /orders/{id}/refund", |policy| policy.methods([]).required(true))
        // Set last, and still beneath what operations have set.
        .replay_header(HeaderName::from_static("x-replayed"))
        .max_request(16);
    let server = serve(asked_for(&runs).layer(layer)).await;
    let refund = |key: &str, status: &str, body: &str| {
        request("POST", "/orders/1/refund", &[("X-Once", key), ("X-Status", status)], body)
    };
    let plain = |key: &str, status: &str, body: &str| {
        request("POST", "/plain", &[("Idempotency-Key", key), ("X-Status", status)], body)
    };

    // Name and form of the field, and where a problem is explained.
    let missing = ask(&server, posting("/orders/1/refund", "k", "")).await;
    assert_eq!(missing.problem(), "key-missing");
    assert_eq!(missing.field("link"), Some("</problems#key-missing>; rel=\"describedby\""));
    assert_eq!(ask(&server, refund("k", "201", "")).await.problem(), "key-invalid");
    let missing = ask(&server, request("POST", "/plain", &[("X-Once", "\"k\"")], "")).await;
    assert!(missing.field("link").unwrap().contains("docs.rs"));
    // The largest request.
    assert_eq!(ask(&server, refund("\"k\"", "201", "123456789")).await.status, 413);
    assert_eq!(ask(&server, plain("k", "201", "123456789")).await.status, 201);
    assert_eq!(ask(&server, plain("k2", "201", "12345678901234567")).await.status, 413);
    assert_eq!(runs.count(), 1);
    // What is compared, which lines are kept, how a replay is marked.
    let first = ask(&server, refund("\"k\"", "409", "[1, 2]")).await;
    let again = ask(&server, refund("\"k\"", "409", "[1,2]")).await;
    assert_eq!((again.status, again.field("x-again"), again.text()), (409, Some("true"), "2"));
    assert_eq!((first.field("x-run"), again.field("x-run")), (Some("2"), None));
    let first = ask(&server, plain("k3", "201", "[1, 2]")).await;
    let again = ask(&server, plain("k3", "201", "[1, 2]")).await;
    assert_eq!((again.field("x-replayed"), again.field("x-run")), (Some("true"), Some("3")));
    assert_eq!(first.body, again.body);
    assert_eq!(ask(&server, plain("k3", "201", "[1,2]")).await.status, 422);
    // Which statuses are kept.
    for run in ["4", "5"] {
        assert_eq!(ask(&server, plain("k4", "409", "")).await.text(), run);
    }
    // The largest response: the runs have two digits by now.
    while runs.count() < 9 {
        runs.up();
    }
    assert_eq!(ask(&server, refund("\"long\"", "201", "")).await.text(), "10");
    let kept = ask(&server, refund("\"long\"", "201", "")).await;
    assert_eq!(kept.problem(), "response-not-kept");
    // Which methods: PUT of this operation, and not PATCH.
    let by = |method: &str| request(method, "/orders/1/refund", &[("Idempotency-Key", "k")], "");
    assert_eq!(ask(&server, by("PUT")).await.text(), "11");
    assert_eq!(ask(&server, by("PUT")).await.text(), "11");
    assert_eq!(ask(&server, by("PATCH")).await.text(), "12");
    assert_eq!(ask(&server, by("PATCH")).await.text(), "13");
    let put = request("PUT", "/plain", &[("Idempotency-Key", "k")], "");
    assert_eq!(ask(&server, &put).await.text(), "14");
    assert_eq!(ask(&server, &put).await.text(), "15");
}

#[tokio::test]
async fn r13_the_wait_is_a_setting_of_an_operation() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer =
        layer(&store).operation("POST /charges", |policy| policy.wait_limit(Duration::ZERO));
    let other = layer.clone().operation("POST /charges", |policy| policy.wait_limit(LONG));
    let server = serve(gated(&runs, &gate).layer(layer)).await;
    let patient = serve(gated(&runs, &gate).layer(other)).await;
    let first = asking(&server, posting("/charges", "k", "{}"));
    gate.entered().await;
    assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.problem(), "in-flight");
    let waits = asking(&patient, posting("/charges", "k", "{}"));
    crate::sockets::until(|| store.stats().waiters == 1).await;
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(waits.await.unwrap().is_replay());
}

/// Clones, also those that were changed, are one: store, caps and counters.
#[tokio::test]
async fn r07_clones_of_a_layer_share_store_caps_and_counters() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let layer = layer(&store).max_tasks(1);
    let changed = layer.clone().replay_header(HeaderName::from_static("x-again"));
    let one = serve(gated(&runs, &gate).layer(layer.clone())).await;
    let other = serve(gated(&runs, &gate).layer(changed.clone())).await;

    let first = asking(&one, posting("/charges", "k", "{}"));
    gate.entered().await;
    let duplicate = asking(&other, posting("/charges", "k", "{}"));
    crate::sockets::until(|| store.stats().waiters == 1).await;
    // The one place among the owners is taken for both.
    assert_eq!(ask(&other, posting("/charges", "k2", "{}")).await.problem(), "too-busy");
    assert_eq!((layer.stats(), layer.stats().too_busy), (changed.stats(), 1));
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    let duplicate = duplicate.await.unwrap();
    assert_eq!((duplicate.text(), duplicate.field("x-again")), ("1", Some("true")));
    assert!(ask(&one, posting("/charges", "k", "{}")).await.is_replay());
    assert_eq!(runs.count(), 1);
}

/// With two layers on one request the outer acts, by its own policy, and the inner lets it pass,
/// whatever that would have asked for.
#[tokio::test]
async fn r07_the_outer_of_two_layers_acts_and_the_inner_lets_pass() {
    let _watchdog = watchdog();
    let (outer_store, inner_store, runs) = (store(), store(), Runs::default());
    let outer = layer(&outer_store).methods([Method::POST]);
    let inner = IdempotencyLayer::new(inner_store.clone(), |_| None::<String>)
        .methods([Method::POST, Method::PUT])
        .header_name(HeaderName::from_static("x-inner"))
        .max_request(0);
    let app = asked_for(&runs).layer(inner).layer(outer);
    let server = serve(app).await;
    for _ in 0..2 {
        assert_eq!(ask(&server, posting("/plain", "k", "body")).await.text(), "1");
    }
    assert_eq!((outer_store.stats().won, inner_store.stats().won), (1, 0));
    // What the outer does not cover is the inner's.
    let put = request("PUT", "/plain", &[("Idempotency-Key", "k")], "");
    assert_eq!(ask(&server, put).await.problem(), "account-unknown");
}

/// Routers within routers, by `nest` and by `nest_service`, with the layer on any of them: the
/// endpoint is the whole route, and the path that is compared is the one that the client sent.
#[tokio::test]
async fn r02_however_deep_a_router_is_nested_the_path_is_the_clients() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let innermost = || charges(&runs);
    let nested = |layer: IdempotencyLayer, level: usize| {
        let with = |router: Router, at| {
            if at == level { router.layer(layer.clone()) } else { router }
        };
        let router = with(innermost(), 0);
        let router = with(Router::new().nest("/{b}", router), 1);
        with(Router::new().nest("/{a}", router), 2)
    };
    for level in 0..3 {
        let server = serve(nested(once.clone(), level)).await;
        let key = format!("k{level}");
        let run = (level + 1).to_string();
        for _ in 0..2 {
            assert_eq!(ask(&server, posting("/1/2/charges", &key, "{}")).await.text(), run);
        }
        for other in ["/1/3/charges", "/3/2/charges", "/1/2/charges?x"] {
            assert_eq!(
                ask(&server, posting(other, &key, "{}")).await.status,
                422,
                "{level} {other}"
            );
        }
        let id = Identity::new("", "POST /{}/{}/charges", &key).unwrap();
        assert!(store.look_up(&id).is_some(), "{level}");
    }
    // A service that is nested has no route of its own inside: the name is given.
    let named = once.operation_name("charge");
    let service = ServiceBuilder::new().layer(named).service(charges(&runs));
    let server = serve(Router::new().nest_service("/{a}", service)).await;
    assert_eq!(ask(&server, posting("/1/charges", "k", "{}")).await.text(), "4");
    assert_eq!(ask(&server, posting("/1/charges", "k", "{}")).await.text(), "4");
    assert_eq!(ask(&server, posting("/2/charges", "k", "{}")).await.status, 422);
}

/// `GET /idempotency` and `GET /idempotency.json`, as a service would mount them.
async fn published(layer: IdempotencyLayer, runs: &Runs) -> Server {
    let published = layer.published_policy();
    let (text, openapi) = (published.to_string(), published.openapi());
    let app =
        asked_for(runs).layer(layer).route("/idempotency", get(move || async move { text })).route(
            "/idempotency.json",
            get(|| async { ([(CONTENT_TYPE, "application/json")], openapi) }),
        );
    serve(app).await
}

async fn read(server: &Server, path: &str) -> Bytes {
    let reply = ask(server, request("GET", path, &[], "")).await;
    assert_eq!(reply.status, 200);
    reply.body.into()
}

/// What is published is what the layer does.
#[tokio::test]
async fn r06_a_service_publishes_its_policy_and_keeps_to_it() {
    let _watchdog = watchdog();
    let store = Store::builder().retention(Duration::from_secs(90 * 60)).build().unwrap();
    let runs = Runs::default();
    let layer = IdempotencyLayer::single_tenant(store)
        .problem_base("/problems#")
        .max_tasks_per_account(7)
        .expires_header(HeaderName::from_static("x-expires"))
        .operation("POST /orders/{id}/refund", |policy| {
            policy
                .header_name(HeaderName::from_static("x-once"))
                .key_form(KeyForm::Strict)
                .required(false)
                .max_request(9)
                .statuses(StatusTable::keep_all())
                .may_replay(|parts, _| !parts.headers.contains_key("x-withdrawn"))
        });
    let server = published(layer, &runs).await;

    let text = read(&server, "/idempotency").await;
    let text = std::str::from_utf8(&text).unwrap();
    let (base, refund) = text.split_once("\nPOST /orders/{id}/refund:\n").unwrap();
    for (part, line) in [
        (base, "  Kept for: 90 min, from the end of the work on"),
        (base, "  Length of a key: 1 to 255 characters, 0x20 to 0x7E, not only spaces"),
        (base, "  A key is unique for: operation"),
        (base, "  At once, for one account: 7 keys in flight"),
        (base, "  For how many seconds more it is kept is in the field: x-expires"),
        (refund, "    403 The answer of this key may not be handed out: /problems#replay-refused"),
        (base, "  Methods: POST, PATCH"),
        (
            base,
            "  Key: required, in the field idempotency-key, as a quoted string, or without the quotes",
        ),
        (base, "  Compared: method, path with query, the bytes of the body"),
        (base, "  A duplicate waits for the first: 10 s"),
        (base, "  Prefer: wait=N sets this, up to: 1 min"),
        (base, "  Request body: at most 1048576 bytes, sent within 30 s"),
        (base, "    400 Idempotency key missing: /problems#key-missing"),
        (base, "    422 The key was used for another request: /problems#key-reused"),
        (refund, "  Key: optional, in the field x-once, as a quoted string"),
        (refund, "  Request body: at most 9 bytes, sent within 30 s"),
        (refund, "  Responses that are not kept, so that a retry runs: none"),
    ] {
        assert!(part.lines().any(|told| told == line), "{line}\n{text}");
    }
    assert!(!text.contains("account-unknown") && !refund.contains("key-missing"), "{text}");
    assert!(!base.contains("replay-refused") && !text.contains("that wait"), "{text}");

    let openapi: Value = serde_json::from_slice(&read(&server, "/idempotency.json").await).unwrap();
    let settings = &openapi["x-idempotency"];
    assert_eq!(settings["methods"], json!(["POST", "PATCH"]));
    assert_eq!(
        (&settings["accountInFlight"], &settings["accountWaiters"]),
        (&json!(7), &Value::Null)
    );
    assert_eq!(settings["expiresField"], "x-expires");
    assert_eq!((&settings["keptSeconds"], &settings["keyLength"]), (&json!(5400.0), &json!(255)));
    let everywhere = &openapi["components"]["parameters"]["IdempotencyKey"];
    assert_eq!(everywhere["name"], "idempotency-key");
    assert_eq!(everywhere["required"], true);
    let conflict = &openapi["components"]["responses"]["Idempotency409"];
    let types = &conflict["content"]["application/problem+json"]["schema"]["properties"]["type"];
    let expected =
        ["in-flight", "outcome-unknown", "response-not-kept"].map(|it| format!("/problems#{it}"));
    assert_eq!(types["enum"], json!(expected));
    assert!(conflict["headers"]["Retry-After"].is_object());
    let problems = openapi["components"]["responses"].as_object().unwrap();
    for problem in Problem::ALL.into_iter().filter(|it| it.status() != StatusCode::FORBIDDEN) {
        assert!(problems.contains_key(&format!("Idempotency{}", problem.status().as_u16())));
    }

    let operation = &openapi["paths"]["/orders/{id}/refund"]["post"];
    let [in_path, in_header] = operation["parameters"].as_array().unwrap().as_slice() else {
        panic!("{operation}")
    };
    assert_eq!((&in_path["name"], &in_path["in"]), (&json!("id"), &json!("path")));
    let told = &operation["x-idempotency"];
    // A client that knows no more than this.
    let (field, key) =
        (in_header["name"].as_str().unwrap(), in_header["example"].as_str().unwrap());
    let largest = usize::try_from(told["requestBytes"].as_u64().unwrap()).unwrap();
    let send = |key: &str, len: usize, status: &str| {
        let fields = [(field, key), ("X-Status", status)];
        request("POST", "/orders/1/refund", &fields, &"x".repeat(len))
    };
    assert_eq!(in_header["required"], false);
    assert_eq!(told["bareKeys"], false);
    assert_eq!(ask(&server, send("bare", 1, "201")).await.status, 400);
    assert_eq!(ask(&server, send(key, largest + 1, "201")).await.status, 413);
    for run in ["1", "1"] {
        assert_eq!(ask(&server, send(key, largest, "503")).await.text(), run);
    }
    assert_eq!(told["releasedStatuses"], json!([]));
    let released = settings["releasedStatuses"].as_array().unwrap();
    for status in released {
        let status = status.to_string();
        let fields = [("Idempotency-Key", status.as_str()), ("X-Status", &status)];
        for _ in 0..2 {
            let reply = ask(&server, request("POST", "/plain", &fields, "")).await;
            assert!(!reply.is_replay() && reply.status.to_string() == status);
        }
    }
    assert_eq!(runs.count(), 1 + 2 * released.len());
}
