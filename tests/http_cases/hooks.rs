//! What a service may do to outcomes: seal them, refuse to hand them back, say when they end.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use axum::{
    Router, body::Body, http::HeaderName, http::StatusCode, middleware, routing::get_service,
    routing::post as route,
};
use oncekey::{
    Claim, Fingerprint, Identity, ManualClock, Outcome, Resolution, Store, Sweep, http::Sealing,
};

use crate::{
    authenticate,
    common::{HOUR, SECOND},
    counting, gated, idle, layer, of_account,
    sockets::{Gate, Reply, Runs, Server, serve, until},
    store,
    wire::{Call, Wire, assert_replay, charge},
};

over_both! {
    r16_what_is_kept_is_sealed_and_what_is_handed_back_is_opened,
    r16_what_was_redacted_goes_to_the_first_client_alone,
    r16_what_cannot_be_sealed_or_opened_is_told_as_not_kept,
    r16_rights_withdrawn_since_veto_a_replay,
    r22_a_field_tells_when_the_key_ends,
    r03_a_client_may_look_up_what_became_of_its_own_key,
    r03_a_client_that_lost_answer_and_request_may_attach_by_its_key,
    r13_who_attaches_waits_as_a_duplicate_and_never_runs,
    r16_what_is_attached_to_is_vetoed_and_opened_as_a_replay,
}

/// A stand-in for a cipher: every byte turned over with bytes that depend on the identity. The
/// first byte of the body says whose it is, as an authenticated cipher would.
struct Cipher;

fn turned(of: Identity<'_>, bytes: &[u8]) -> Vec<u8> {
    let by = of
        .account()
        .iter()
        .chain(of.endpoint())
        .chain(of.key())
        .fold(7_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(*byte));
    bytes.iter().map(|byte| byte ^ (by | 0x80)).collect()
}

impl Sealing for Cipher {
    fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
        let lines = outcome.header_lines().map(|(name, value)| (name, turned(of, value)));
        let sealed =
            lines.fold(Outcome::new(outcome.status()), |to, (name, value)| to.header(name, value));
        Some(sealed.body([b"sealed:", &turned(of, outcome.bytes())[..]].concat()))
    }

    fn open(&self, of: Identity<'_>, sealed: Outcome) -> Option<Outcome> {
        let body = turned(of, sealed.bytes().strip_prefix(b"sealed:")?);
        let lines = sealed.header_lines().map(|(name, value)| (name, turned(of, value)));
        let opened =
            lines.fold(Outcome::new(sealed.status()), |to, (name, value)| to.header(name, value));
        Some(opened.body(body))
    }
}

fn is_within(needle: &[u8], outcome: &Outcome) -> bool {
    let within = |bytes: &[u8]| bytes.windows(needle.len()).any(|part| part == needle);
    within(outcome.bytes()) || outcome.header_lines().any(|(_, value)| within(value))
}

fn stored(store: &Store, key: &str) -> Outcome {
    let print = Fingerprint::request("POST", "/charges", b"{}");
    match store.observe(&crate::charge(key), print) {
        Some(Claim::Replay(replay)) => replay.into_outcome(),
        other => panic!("{other:?}"),
    }
}

fn secrets(gate: &Gate) -> Router {
    let gate = gate.clone();
    let handler = move || async move {
        gate.pass().await;
        (StatusCode::CREATED, [("x-secret", "s3cret in a field")], "the s3cret itself")
    };
    Router::new().route("/charges", route(handler))
}

async fn r16_what_is_kept_is_sealed_and_what_is_handed_back_is_opened(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let once = layer(&store).seal(Arc::new(Cipher));
    let server = serve(secrets(&gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let waiter = wire.asking(&server, charge("k")).await;
    until(|| store.stats().waiters == 1).await;
    gate.open();
    let first = first.await.unwrap();
    assert_eq!(first.text(), "the s3cret itself");
    assert_replay(&waiter.await.unwrap(), &first);
    assert_replay(&wire.ask(&server, charge("k")).await, &first);
    assert!(!is_within(b"s3cret", &stored(&store, "k")));

    // A layer that cannot open it does not hand it out, nor does it run.
    let server = serve(secrets(&gate).layer(layer(&store))).await;
    let told = wire.ask(&server, charge("k")).await;
    assert_eq!((told.status, told.problem().as_str()), (409, "response-not-kept"));

    // What was never sealed, as what an operator found out, is handed back as it is.
    let server = serve(secrets(&gate).layer(once.clone())).await;
    let print = Fingerprint::request("POST", "/charges", b"{}");
    match store.claim(&crate::charge("held"), print).unwrap() {
        Claim::Won(permit) => permit.hold().unwrap(),
        other => panic!("{other:?}"),
    }
    let found = Resolution::Complete(Outcome::new(202).body("found out"));
    store.resolve(&crate::charge("held"), found).unwrap();
    let told = wire.ask(&server, charge("held")).await;
    assert_eq!((told.status, told.text(), told.is_replay()), (202, "found out", true));
    idle(&once).await;
}

/// The first client sees the number, and nobody after it; not even waiters, whose answer comes out
/// of the store.
async fn r16_what_was_redacted_goes_to_the_first_client_alone(wire: Wire) {
    struct Redacted;
    impl Sealing for Redacted {
        fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
            assert_eq!(of, crate::charge("k"));
            Some(Outcome::new(outcome.status()).body("the ****** itself"))
        }
    }
    let (store, gate) = (store(), Gate::new());
    let once = layer(&store).seal(Redacted);
    let server = serve(secrets(&gate).layer(once.clone())).await;
    gate.open();
    let first = wire.ask(&server, charge("k")).await;
    assert_eq!(
        (first.text(), first.field("x-secret")),
        ("the s3cret itself", Some("s3cret in a field"))
    );
    let again = wire.ask(&server, charge("k")).await;
    assert!(again.is_replay());
    assert_eq!(
        (again.status, again.text(), again.field("x-secret")),
        (201, "the ****** itself", None)
    );
    idle(&once).await;
}

async fn r16_what_cannot_be_sealed_or_opened_is_told_as_not_kept(wire: Wire) {
    struct Never;
    impl Sealing for Never {
        fn seal(&self, _: Identity<'_>, _: Outcome) -> Option<Outcome> {
            None
        }
    }
    struct Forgot(AtomicBool);
    impl Sealing for Forgot {
        fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
            Cipher.seal(of, outcome)
        }
        fn open(&self, of: Identity<'_>, sealed: Outcome) -> Option<Outcome> {
            (!self.0.load(SeqCst)).then(|| Cipher.open(of, sealed)).flatten()
        }
    }
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).seal(Never);
    let server = serve(counting(&runs).layer(once.clone())).await;
    assert_eq!(wire.ask(&server, charge("never")).await.text(), "1");
    let told = wire.ask(&server, charge("never")).await;
    assert_eq!(told.problem(), "response-not-kept");
    let key = Arc::new(Forgot(AtomicBool::new(false)));
    let once = layer(&store).seal(Arc::clone(&key));
    let server = serve(counting(&runs).layer(once.clone())).await;
    let first = wire.ask(&server, charge("forgot")).await;
    key.0.store(true, SeqCst);
    assert_eq!(wire.ask(&server, charge("forgot")).await.problem(), "response-not-kept");
    key.0.store(false, SeqCst);
    assert_replay(&wire.ask(&server, charge("forgot")).await, &first);
    assert_eq!(runs.count(), 2);
    idle(&once).await;
}

async fn r16_rights_withdrawn_since_veto_a_replay(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let once = {
        let asked = Arc::clone(&asked);
        layer(&store).may_replay(move |parts, of| {
            let key = String::from_utf8(of.key().to_vec()).unwrap();
            asked.lock().unwrap().push(format!("{} {key}", parts.uri.path()));
            parts.headers.get("x-role").is_some_and(|role| role == "clerk")
        })
    };
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let clerk = || charge("k").field("x-role", "clerk");
    // Who runs is not asked: that is what authentication has let in.
    let first = wire.asking(&server, charge("k")).await;
    gate.entered().await;
    let waiters = [wire.asking(&server, clerk()).await, wire.asking(&server, charge("k")).await];
    until(|| store.stats().waiters == 2).await;
    assert!(asked.lock().unwrap().is_empty());
    gate.open();
    let first = first.await.unwrap();
    assert_eq!(first.status, 201);
    let [allowed, refused] = waiters;
    assert_replay(&allowed.await.unwrap(), &first);
    let refused = refused.await.unwrap();
    assert_eq!((refused.status, refused.problem().as_str()), (403, "replay-refused"));
    for _ in 0..2 {
        assert_eq!(wire.ask(&server, charge("k")).await.problem(), "replay-refused");
        assert_replay(&wire.ask(&server, clerk()).await, &first);
    }
    // Another body is told so without a question.
    let before = asked.lock().unwrap().len();
    assert_eq!(wire.ask(&server, charge("k").body("other")).await.status, 422);
    let asked = asked.lock().unwrap().clone();
    assert_eq!(asked.len(), before);
    assert!(asked.iter().all(|asked| asked == "/charges k"), "{asked:?}");
    assert_eq!(runs.count(), 1);
    idle(&once).await;
}

async fn r22_a_field_tells_when_the_key_ends(wire: Wire) {
    let clock = ManualClock::new();
    let store = Store::builder().clock(clock.clone()).sweep(Sweep::Manual).retention(HOUR);
    let store = store.build().unwrap();
    let once = layer(&store).max_response(10).expires_header(HeaderName::from_static("x-expires"));
    let handler = |body: String| async move {
        match body.as_str() {
            "large" => (StatusCode::OK, Body::from("x".repeat(11))),
            "refused" => (StatusCode::BAD_REQUEST, Body::empty()),
            "sick" => (StatusCode::SERVICE_UNAVAILABLE, Body::empty()),
            _ => (StatusCode::OK, Body::from("kept")),
        }
    };
    let app = Router::new().route("/charges", route(handler)).layer(once.clone());
    let server = serve(app).await;
    let expires = async |key: &str, body: &'static str| {
        let reply = wire.ask(&server, charge(key).body(body)).await;
        reply.field("x-expires").map(str::to_owned)
    };
    assert_eq!(expires("k", "kept").await.as_deref(), Some("3600"));
    clock.advance(100 * SECOND + SECOND / 2);
    assert_eq!(expires("k", "kept").await.as_deref(), Some("3499"), "rounded down");
    // One that is not kept keeps its key; one that is released does not.
    assert_eq!(expires("large", "large").await.as_deref(), Some("3600"));
    assert_eq!(expires("refused", "refused").await, None);
    assert_eq!(expires("sick", "sick").await, None);
    // Without the setting there is none.
    let app = Router::new().route("/charges", route(handler)).layer(layer(&store));
    let server = serve(app).await;
    let reply = wire.ask(&server, charge("k").body("kept")).await;
    assert_eq!((reply.is_replay(), reply.field("x-expires")), (true, None));
    idle(&once).await;
}

async fn r03_a_client_may_look_up_what_became_of_its_own_key(wire: Wire) {
    let clock = ManualClock::new();
    let store = Store::builder().clock(clock.clone()).sweep(Sweep::Manual).build().unwrap();
    let once = of_account(&store);
    let gate = Gate::new();
    let app = secrets(&gate)
        .layer(once.clone())
        .route("/attempt", get_service(once.look_up("POST /charges")))
        .layer(middleware::from_fn(authenticate));
    let server = serve(app).await;
    let look = async |account: &str, key: &str| {
        let call = charge(key).at("/attempt").method(http::Method::GET).body("");
        wire.ask(&server, call.field("Authorization", account)).await
    };
    assert_eq!(look("alice", "k").await.status, 404);
    let first = wire.asking(&server, charge("k").field("Authorization", "alice")).await;
    gate.entered().await;
    clock.advance(5 * SECOND);
    let told = look("alice", "k").await;
    assert_eq!(told.field("cache-control"), Some("no-store"));
    let told: serde_json::Value = serde_json::from_slice(&told.body).unwrap();
    assert_eq!((&told["state"], &told["age_seconds"]), (&"in-flight".into(), &5.into()));
    gate.open();
    assert_eq!(first.await.unwrap().status, 201);
    clock.advance(HOUR);
    let told = look("alice", "k").await;
    assert_eq!(
        told.text(),
        r#"{"state":"completed","age_seconds":3600,"remaining_seconds":82800}"#
    );
    let theirs = Identity::new("alice", "POST /charges", "held").unwrap();
    match store.claim(&theirs, Fingerprint::request("POST", "/charges", b"")).unwrap() {
        Claim::Won(permit) => permit.hold().unwrap(),
        other => panic!("{other:?}"),
    }
    assert!(look("alice", "\"held\"").await.text().contains(r#""state":"held""#));
    // Nobody else is told that there is anything.
    let (mut theirs, mut none) = (look("mallory", "k").await, look("mallory", "none").await);
    for reply in [&mut theirs, &mut none] {
        reply.fields.retain(|(name, _)| name != "date");
    }
    assert_eq!((theirs.status, &theirs), (404, &none));
    assert_eq!(look("alice", "bad key").await.problem(), "key-invalid");
    let nobody = charge("k").at("/attempt").method(http::Method::GET).body("");
    assert_eq!(wire.ask(&server, nobody).await.problem(), "account-unknown");
    assert_eq!(store.stats().keys, 2);
    idle(&once).await;
}

/// Asks for the answer of a key, without a body.
async fn attached(wire: Wire, server: &Server, account: &str, key: &str) -> Reply {
    wire.ask(server, attaching(account, key)).await
}

fn attaching(account: &str, key: &str) -> Call {
    let call = charge(key).at("/answer").method(http::Method::GET).body("");
    call.field("Authorization", account)
}

async fn r03_a_client_that_lost_answer_and_request_may_attach_by_its_key(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let once = of_account(&store);
    let app = secrets(&gate)
        .layer(once.clone())
        .route("/answer", get_service(once.attach("POST /charges")))
        .layer(middleware::from_fn(authenticate));
    let server = serve(app).await;
    let bare = |mut reply: Reply| {
        reply.fields.retain(|(name, _)| name != "date");
        reply
    };
    let none = bare(attached(wire, &server, "alice", "k").await);
    assert_eq!((none.status, none.field("cache-control")), (404, Some("no-store")));
    assert_eq!(store.stats().keys, 0, "it claims nothing");

    let first = wire.asking(&server, charge("k").field("Authorization", "alice")).await;
    gate.entered().await;
    let waiting = wire.asking(&server, attaching("alice", "k")).await;
    until(|| store.stats().waiters == 1).await;
    // Nobody else is told that there is anything, neither now nor later.
    assert_eq!(bare(attached(wire, &server, "mallory", "k").await), none);
    gate.open();
    let first = first.await.unwrap();
    let later = attached(wire, &server, "alice", "\"k\"").await;
    for mut told in [waiting.await.unwrap(), later] {
        assert_eq!(told.field("cache-control"), Some("no-store"));
        told.fields.retain(|(name, _)| name != "cache-control");
        assert_replay(&told, &first);
    }
    assert_eq!(bare(attached(wire, &server, "mallory", "k").await), none);
    assert_eq!(attached(wire, &server, "alice", "bad key").await.problem(), "key-invalid");
    let nobody = charge("k").at("/answer").method(http::Method::GET).body("");
    assert_eq!(wire.ask(&server, nobody).await.problem(), "account-unknown");
    assert_eq!(store.stats().keys, 1);
    idle(&once).await;
}

async fn r13_who_attaches_waits_as_a_duplicate_and_never_runs(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = of_account(&store).max_waiters_per_account(2);
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        move || async move {
            let run = runs.up();
            gate.pass().await;
            // The first gives the key up without an answer that others could have.
            let status = if run == 1 { StatusCode::BAD_REQUEST } else { StatusCode::CREATED };
            (status, run.to_string())
        }
    };
    let app = crate::charges(handler)
        .layer(once.clone())
        .route("/answer", get_service(once.attach("POST /charges")))
        .layer(middleware::from_fn(authenticate));
    let server = serve(app).await;
    let retry = || charge("k").field("Authorization", "alice");
    let first = wire.asking(&server, retry()).await;
    gate.entered().await;
    let told = wire.ask(&server, attaching("alice", "k").field("Prefer", "wait=0")).await;
    assert_eq!((told.status, told.problem().as_str()), (409, "in-flight"));
    assert!(told.field("retry-after").is_some());

    // It is the oldest waiter, but the one behind it is the one that can run.
    let waiting = wire.asking(&server, attaching("alice", "k")).await;
    until(|| store.stats().waiters == 1).await;
    let heir = wire.asking(&server, retry()).await;
    until(|| store.stats().waiters == 2).await;
    assert_eq!(attached(wire, &server, "alice", "k").await.problem(), "in-flight");
    gate.open();
    gate.open();
    assert_eq!(first.await.unwrap().status, 400);
    let second = heir.await.unwrap();
    assert_eq!((second.status, second.text(), second.is_replay()), (201, "2", false));
    let mut told = waiting.await.unwrap();
    told.fields.retain(|(name, _)| name != "cache-control");
    assert_replay(&told, &second);

    // Where nobody else waits there is nothing in the end.
    let theirs = Identity::new("alice", "POST /charges", "given-up").unwrap();
    let permit = match store.claim(&theirs, Fingerprint::request("POST", "/charges", b"")) {
        Ok(Claim::Won(permit)) => permit,
        other => panic!("{other:?}"),
    };
    let waiting = wire.asking(&server, attaching("alice", "given-up")).await;
    until(|| store.stats().waiters == 1).await;
    permit.release().unwrap();
    assert_eq!(waiting.await.unwrap().status, 404);
    assert_eq!((runs.count(), store.stats().keys), (2, 1));

    for (key, told) in [("held", "outcome-unknown"), ("not kept", "response-not-kept")] {
        let theirs = Identity::new("alice", "POST /charges", key).unwrap();
        match store.claim(&theirs, Fingerprint::request("POST", "/charges", b"")).unwrap() {
            Claim::Won(permit) if key == "held" => permit.hold().unwrap(),
            Claim::Won(permit) => assert!(!permit.complete_not_kept().unwrap().kept),
            other => panic!("{other:?}"),
        }
        let quoted = format!("\"{key}\"");
        assert_eq!(attached(wire, &server, "alice", &quoted).await.problem(), told);
    }
    idle(&once).await;
}

async fn r16_what_is_attached_to_is_vetoed_and_opened_as_a_replay(wire: Wire) {
    let (store, gate) = (store(), Gate::new());
    let once = of_account(&store)
        .seal(Cipher)
        .may_replay(|parts, _| parts.headers.get("x-role").is_some_and(|role| role == "clerk"));
    let app = secrets(&gate)
        .layer(once.clone())
        .route("/answer", get_service(once.attach("POST /charges")))
        .layer(middleware::from_fn(authenticate));
    let server = serve(app).await;
    gate.open();
    let first = wire.ask(&server, charge("k").field("Authorization", "alice")).await;
    assert_eq!(first.text(), "the s3cret itself");
    let refused = attached(wire, &server, "alice", "k").await;
    assert_eq!((refused.status, refused.problem().as_str()), (403, "replay-refused"));
    let clerk = attaching("alice", "k").field("x-role", "clerk");
    let mut told = wire.ask(&server, clerk).await;
    told.fields.retain(|(name, _)| name != "cache-control");
    assert_replay(&told, &first);
    idle(&once).await;
}
