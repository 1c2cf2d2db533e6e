//! Who is let in, and under which name: R2 to R6.

use axum::{Router, routing::any};
use http::{HeaderName, Method};
use oncekey::{
    Identity, KeyForm,
    http::{Fingerprinting, IdempotencyLayer, RouteTemplate},
};
use tower::ServiceBuilder;

use crate::{
    charge, charges,
    common::watchdog,
    gated, layer,
    sockets::{Client, Gate, Runs, ask, asking, post as posting, request, serve, serve_service},
    store,
};

/// A route that says how often it ran.
fn route(path: &str, runs: &Runs) -> Router {
    let runs = runs.clone();
    Router::new().route(path, any(move || async move { runs.up().to_string() }))
}

#[tokio::test]
async fn r02_a_renamed_parameter_is_the_same_endpoint_and_another_path_is_a_mismatch() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let before = serve(route("/orders/{id}/refund", &runs).layer(layer(&store))).await;
    let after = serve(route("/orders/{order}/refund", &runs).layer(layer(&store))).await;
    assert_eq!(ask(&before, posting("/orders/1/refund", "k", "{}")).await.text(), "1");
    let again = ask(&after, posting("/orders/1/refund", "k", "{}")).await;
    assert!(again.is_replay() && again.text() == "1");
    for path in ["/orders/2/refund", "/orders/1/refund?x=1"] {
        let other = ask(&after, posting(path, "k", "{}")).await;
        assert_eq!((other.status, other.problem().as_str()), (422, "key-reused"));
    }
    assert_eq!(runs.count(), 1);
    let id = Identity::new("", "POST /orders/{}/refund", "k").unwrap();
    assert!(store.look_up(&id).is_some());
}

#[tokio::test]
async fn r02_a_nested_router_has_the_whole_path_in_endpoint_and_fingerprint() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let inner = charges(&runs).layer(layer(&store));
    let server = serve(Router::new().nest("/{tenant}", inner)).await;
    assert_eq!(ask(&server, posting("/a/charges", "k", "{}")).await.text(), "1");
    assert_eq!(ask(&server, posting("/b/charges", "k", "{}")).await.status, 422);
    let id = Identity::new("", "POST /{}/charges", "k").unwrap();
    assert!(store.look_up(&id).is_some());
}

#[tokio::test]
async fn r02_without_a_route_the_configured_name_counts_or_the_request_passes_and_is_counted() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let nameless = layer(&store);
    let around = ServiceBuilder::new().layer(nameless.clone()).service(charges(&runs));
    let server = serve_service(around).await;
    for run in ["1", "2"] {
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), run);
    }
    // Only what could have been claimed counts.
    assert_eq!(ask(&server, request("GET", "/charges", &[], "")).await.status, 405);
    assert_eq!((nameless.stats().unclaimed, store.stats().keys), (2, 0));

    let named = layer(&store).operation_name("charges");
    let server =
        serve_service(ServiceBuilder::new().layer(named.clone()).service(charges(&runs))).await;
    for _ in 0..2 {
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "3");
    }
    assert_eq!(named.stats().unclaimed, 0);
    assert!(store.look_up(&Identity::new("", "charges", "k").unwrap()).is_some());
}

#[tokio::test]
async fn r02_a_router_of_another_kind_hands_its_template_in() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let service = ServiceBuilder::new()
        .map_request(|mut request: http::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(RouteTemplate::new("/{thing}"));
            request
        })
        .layer(layer(&store))
        .service(charges(&runs));
    let server = serve_service(service).await;
    for _ in 0..2 {
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "1");
    }
    assert!(store.look_up(&Identity::new("", "POST /{}", "k").unwrap()).is_some());
}

#[tokio::test]
async fn r03_accounts_never_meet_and_none_is_refused() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = IdempotencyLayer::new(store.clone(), |parts| {
        parts.headers.get("x-account").map(|account| account.as_bytes().to_vec())
    });
    let server = serve(charges(&runs).layer(layer)).await;
    let by = |account: &str| {
        request("POST", "/charges", &[("Idempotency-Key", "k"), ("X-Account", account)], "{}")
    };
    assert_eq!(ask(&server, by("a")).await.text(), "1");
    assert_eq!(ask(&server, by("b")).await.text(), "2");
    assert_eq!(ask(&server, by("a")).await.text(), "1");
    for refused in [by(""), by(&"a".repeat(256)), posting("/charges", "k", "{}")] {
        let reply = ask(&server, refused).await;
        assert_eq!((reply.status, reply.problem().as_str()), (403, "account-unknown"));
    }
    assert_eq!((runs.count(), store.stats().keys), (2, 2));
}

#[tokio::test]
async fn r04_a_layer_that_was_reconfigured_compares_by_the_scheme_of_the_record() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let version = || Fingerprinting::raw().header(HeaderName::from_static("x-version"));
    let custom = || Fingerprinting::custom("nothing", |_, _| Vec::new());
    let raw = serve(charges(&runs).layer(layer(&store))).await;
    let json = layer(&store).fingerprint(Fingerprinting::canonical_json());
    let json = serve(charges(&runs).layer(json)).await;
    let chosen = layer(&store).fingerprint(version());
    let chosen = serve(charges(&runs).layer(chosen)).await;
    let knowing = layer(&store).also_accept(version()).also_accept(custom());
    let knowing = serve(charges(&runs).layer(knowing)).await;
    let own = serve(charges(&runs).layer(layer(&store).fingerprint(custom()))).await;

    let (body, moved) = (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    // Made by the raw scheme, met by the canonical one, and the other way round.
    assert_eq!(ask(&raw, posting("/charges", "k1", body)).await.text(), "1");
    assert!(ask(&json, posting("/charges", "k1", body)).await.is_replay());
    assert_eq!(ask(&json, posting("/charges", "k1", moved)).await.status, 422);
    assert_eq!(ask(&json, posting("/charges", "k2", body)).await.text(), "2");
    assert!(ask(&json, posting("/charges", "k2", moved)).await.is_replay());
    assert!(ask(&raw, posting("/charges", "k2", moved)).await.is_replay());

    // A scheme that is not known: neither a mismatch nor a run.
    assert_eq!(ask(&chosen, posting("/charges", "k3", body)).await.text(), "3");
    assert_eq!(ask(&own, posting("/charges", "k4", body)).await.text(), "4");
    for key in ["k3", "k4"] {
        let unknown = ask(&raw, posting("/charges", key, body)).await;
        assert_eq!((unknown.status, unknown.problem().as_str()), (409, "outcome-unknown"));
        assert!(ask(&knowing, posting("/charges", key, body)).await.is_replay());
    }
    assert_eq!(ask(&knowing, posting("/charges", "k3", moved)).await.status, 422);
    assert!(ask(&knowing, posting("/charges", "k4", moved)).await.is_replay());
    assert_eq!(runs.count(), 4);
}

#[tokio::test]
async fn r05_another_body_is_a_mismatch_at_once_while_the_first_runs_and_after_it() {
    let _watchdog = watchdog();
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let server = serve(gated(&runs, &gate).layer(layer(&store))).await;
    let first = asking(&server, posting("/charges", "k", "x"));
    gate.entered().await;
    let waiting = asking(&server, posting("/charges", "k", "x"));
    crate::sockets::until(|| store.stats().waiters == 1).await;
    let other = ask(&server, posting("/charges", "k", "y")).await;
    assert_eq!((other.status, other.problem().as_str()), (422, "key-reused"));
    assert!(other.field("retry-after").is_none());
    gate.open();
    assert_eq!(first.await.unwrap().text(), "1");
    assert!(waiting.await.unwrap().is_replay());
    assert_eq!(ask(&server, posting("/charges", "k", "y")).await.status, 422);
    assert!(ask(&server, posting("/charges", "k", "x")).await.is_replay());
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn r06_other_methods_pass_untouched() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(route("/charges", &runs).layer(layer(&store))).await;
    let key = [("Idempotency-Key", "k")];
    for method in ["OPTIONS", "GET", "PUT", "DELETE"] {
        let before = runs.count();
        for _ in 0..2 {
            assert_eq!(ask(&server, request(method, "/charges", &key, "{}")).await.status, 200);
        }
        assert_eq!(runs.count(), before + 2, "{method}");
    }
    // Not even a key that is none, or a body of any size, is looked at.
    let bad = [("Idempotency-Key", "\"")];
    let large = "x".repeat(3 << 20);
    assert_eq!(ask(&server, request("PUT", "/charges", &bad, &large)).await.status, 200);
    assert_eq!((store.stats().keys, store.stats().won), (0, 0));
    for _ in 0..2 {
        ask(&server, request("PATCH", "/charges", &key, "{}")).await;
    }
    assert_eq!(store.stats().replays, 1);
}

#[tokio::test]
async fn r06_a_quoted_and_a_bare_key_are_the_same() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(charges(&runs).layer(layer(&store))).await;
    for (key, run) in [
        ("abc", "1"),
        ("\"abc\"", "1"),
        ("  \"abc\"; v=1;w ", "1"),
        ("\"a b\\\"c\\\\\"", "2"),
        ("ABC", "3"),
        ("a:b;c", "4"),
        (&"x".repeat(255), "5"),
    ] {
        assert_eq!(ask(&server, posting("/charges", key, "{}")).await.text(), run, "{key}");
    }
    assert!(store.look_up(&charge("a b\"c\\")).is_some());
}

/// Whatever a key may look like to somebody, it names a record and nothing else.
#[tokio::test]
async fn r06_a_key_is_data() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(charges(&runs).layer(layer(&store))).await;
    let keys = [
        "\"'; DROP TABLE keys; --\"",
        "\"k' OR '1'='1\"",
        "../../etc/passwd",
        "%00",
        "%0d%0aSet-Cookie:%20a=1",
        "*",
        "k?*[a-z]",
        "$(id)`id`",
        "{}%s%n",
        "<script>",
        "POST:/charges:k",
        "K",
        "k",
        "\" k\"",
        "\"k \"",
    ];
    for (nth, key) in keys.into_iter().enumerate() {
        let run = (nth + 1).to_string();
        let first = ask(&server, posting("/charges", key, "{}")).await;
        assert_eq!((first.status, first.text()), (200, run.as_str()), "{key}");
        assert!(first.fields.iter().all(|(name, _)| name != "set-cookie"));
    }
    for (nth, key) in keys.into_iter().enumerate() {
        let again = ask(&server, posting("/charges", key, "{}")).await;
        assert_eq!((again.is_replay(), again.text()), (true, (nth + 1).to_string().as_str()));
    }
    assert_eq!(store.stats().keys, keys.len());
}

#[tokio::test]
async fn r06_what_is_no_key_is_refused_and_nothing_runs() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let server = serve(charges(&runs).layer(layer(&store).required(false))).await;
    let long = "x".repeat(256);
    let long_quoted = format!("\"{long}\"");
    for value in [
        "",
        "   ",
        "\"\"",
        "\"  \"",
        &long,
        &long_quoted,
        "k\u{e9}",
        "\"k\u{e9}\"",
        "\"abc",
        "abc\"",
        "a\"b",
        "\"a\\bc\"",
        "\"abc\\\"",
        "k1,k1",
        "k1, k2",
        "\"k1\", \"k2\"",
        "\"k\" x",
        "a b",
    ] {
        let reply = ask(&server, posting("/charges", value, "{}")).await;
        assert_eq!(reply.status, 400, "{value:?}");
        assert_eq!(reply.problem(), "key-invalid", "{value:?}");
    }
    for (one, two) in [("k", "k"), ("k", "l")] {
        let fields = [("Idempotency-Key", one), ("idempotency-key", two)];
        let reply = ask(&server, request("POST", "/charges", &fields, "{}")).await;
        assert_eq!((reply.status, reply.problem().as_str()), (400, "key-invalid"));
    }
    assert_eq!((runs.count(), store.stats().won), (0, 0));
}

#[tokio::test]
async fn r06_a_missing_key_is_refused_where_required_and_passes_where_optional() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store).operation("POST /free", |policy| policy.required(false));
    let app = charges(&runs).merge(route("/free", &runs)).layer(layer);
    let server = serve(app).await;
    let refused = ask(&server, request("POST", "/charges", &[], "{}")).await;
    assert_eq!((refused.status, refused.problem().as_str()), (400, "key-missing"));
    assert_eq!(runs.count(), 0);
    for run in ["1", "2"] {
        let passed = ask(&server, request("POST", "/free", &[], "{}")).await;
        assert_eq!(passed.text(), run);
    }
    assert_eq!(store.stats().won, 0);
}

#[tokio::test]
async fn r06_field_name_form_and_methods_are_settings() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let layer = layer(&store)
        .header_name(HeaderName::from_static("x-once"))
        .key_form(KeyForm::Strict)
        .operation("PUT /charges", |policy| policy.methods([Method::PUT]));
    let server = serve(route("/charges", &runs).layer(layer)).await;
    let mut client = Client::connect(&server).await;
    let refused = client.ask(request("POST", "/charges", &[("X-Once", "k")], "{}")).await;
    assert_eq!(refused.problem(), "key-invalid");
    let other = client.ask(posting("/charges", "\"k\"", "{}")).await;
    assert_eq!(other.problem(), "key-missing");
    for method in ["POST", "PUT"] {
        let asked = request(method, "/charges", &[("X-Once", "\"k\"")], "{}");
        assert!(!client.ask(&asked).await.is_replay());
        assert!(client.ask(&asked).await.is_replay());
    }
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn two_layers_on_one_request_are_as_one() {
    let _watchdog = watchdog();
    let (store, runs) = (store(), Runs::default());
    let inner = crate::store();
    let app = charges(&runs).layer(layer(&inner)).layer(layer(&store));
    let server = serve(app).await;
    for _ in 0..2 {
        assert_eq!(ask(&server, posting("/charges", "k", "{}")).await.text(), "1");
    }
    assert_eq!((store.stats().won, inner.stats().won), (1, 0));
}
