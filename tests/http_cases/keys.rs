//! Whose key it is, what it may look like, and what it stands for.

use axum::{
    Router,
    http::{HeaderMap, StatusCode},
    middleware,
    routing::post as route,
};
use oncekey::http::Fingerprinting;

use crate::{
    assert_idle, authenticate, counting, gated, idle, layer, of_account,
    sockets::{Gate, Runs, serve, until},
    store,
    wire::{Wire, assert_replay, charge, keyless},
};

over_both! {
    case_038_no_account_sees_or_blocks_anothers_key,
}

over_all! {
    case_040_another_body_is_a_mismatch_and_disturbs_nothing,
    case_044_raw_bytes_are_compared_by_default,
    case_044_canonical_json_compares_what_it_says,
    case_044_json_that_parsers_differ_on_is_compared_by_its_bytes,
    case_044_multipart_is_compared_by_its_parts_where_that_was_chosen,
    case_045_a_key_that_comes_twice_is_refused,
    case_047_what_is_no_key_is_refused,
    case_047_the_longest_key_is_a_key_in_each_form,
    case_049_another_body_is_a_mismatch_while_the_first_runs,
    case_052_a_refused_body_leaves_no_trace,
    case_049_a_waiter_whose_body_no_longer_fits_is_told_so,
}

/// Two users who chose the same key for the same thing.
async fn case_038_no_account_sees_or_blocks_anothers_key(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = of_account(&store);
    let app = {
        let (runs, gate) = (runs.clone(), gate.clone());
        let handler = move |headers: HeaderMap| async move {
            runs.up();
            gate.pass().await;
            headers["authorization"].as_bytes().to_vec()
        };
        Router::new().route("/charges", route(handler))
    };
    let app = app.layer(once.clone()).layer(middleware::from_fn(authenticate));
    let server = serve(app).await;
    let of = |account: &str| charge("k").field("Authorization", account);

    let first = wire.asking(&server, of("ada")).await;
    gate.entered().await;
    let second = wire.asking(&server, of("bob")).await;
    gate.entered().await;
    assert_eq!((runs.count(), store.stats().waiters), (2, 0));
    gate.open();
    gate.open();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!((first.text(), second.text()), ("ada", "bob"));
    assert!(!second.is_replay());
    assert_replay(&wire.ask(&server, of("ada")).await, &first);
    assert_replay(&wire.ask(&server, of("bob")).await, &second);

    // No shared bucket: neither for those who are nobody, nor for those whose name is nothing.
    for nobody in [charge("k"), charge("k").field("Authorization", "")] {
        let refused = wire.ask(&server, nobody).await;
        assert_eq!((refused.status, refused.problem().as_str()), (403, "account-unknown"));
    }
    let too_long = wire.ask(&server, of(&"x".repeat(256))).await;
    assert_eq!((too_long.status, too_long.problem().as_str()), (403, "account-unknown"));
    assert_eq!((runs.count(), store.stats().keys), (2, 2));
    assert_idle(&once);
}

/// A key that a client uses for two things.
async fn case_040_another_body_is_a_mismatch_and_disturbs_nothing(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store);
    let server = serve(counting(&runs).layer(once.clone())).await;
    let first = wire.ask(&server, charge("k").body(r#"{"amount":1}"#)).await;
    for other in [r#"{"amount":2}"#, r#"{"amount":1}x"#, "", "\0"] {
        let refused = wire.ask(&server, charge("k").body(other)).await;
        assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"));
    }
    assert_replay(&wire.ask(&server, charge("k").body(r#"{"amount":1}"#)).await, &first);
    assert_eq!((runs.count(), store.stats().keys), (1, 1));
    assert_idle(&once);
}

async fn case_044_raw_bytes_are_compared_by_default(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let server = serve(counting(&runs).layer(layer(&store))).await;
    let first = wire.ask(&server, charge("k").body(r#"{"a":1,"b":2}"#)).await;
    for reordered in [r#"{"b":2,"a":1}"#, r#"{"a": 1, "b": 2}"#] {
        let refused = wire.ask(&server, charge("k").body(reordered)).await;
        assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"));
    }
    assert_replay(&wire.ask(&server, charge("k").body(r#"{"a":1,"b":2}"#)).await, &first);
    assert_eq!(runs.count(), 1);
}

async fn case_044_canonical_json_compares_what_it_says(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).fingerprint(Fingerprinting::canonical_json());
    let server = serve(counting(&runs).layer(once)).await;
    let body = r#"{"amount":1,"list":[1,2],"name":"\u00e4"}"#;
    let first = wire.ask(&server, charge("k").body(body)).await;
    for same in [
        r#"{"list":[1,2],"amount":1,"name":"ä"}"#,
        "{ \"name\" : \"\\u00E4\",\r\n\"amount\":1,\t\"list\": [ 1 , 2 ] }",
    ] {
        assert_replay(&wire.ask(&server, charge("k").body(same.to_owned())).await, &first);
    }
    for other in [
        r#"{"amount":1.0,"list":[1,2],"name":"\u00e4"}"#,
        r#"{"amount":1e0,"list":[1,2],"name":"\u00e4"}"#,
        r#"{"amount":"1","list":[1,2],"name":"\u00e4"}"#,
        r#"{"amount":1,"list":[2,1],"name":"\u00e4"}"#,
        r#"{"amount":1,"list":[1,2],"name":"\u00e4","more":null}"#,
        r#"{"amount":1,"amount":1,"list":[1,2],"name":"\u00e4"}"#,
        "no JSON",
    ] {
        let refused = wire.ask(&server, charge("k").body(other)).await;
        assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"), "{other}");
    }
    assert_eq!(runs.count(), 1);
}

/// A member twice, numbers that no number type holds, nesting that would end a stack: nothing is
/// guessed, and nothing breaks.
async fn case_044_json_that_parsers_differ_on_is_compared_by_its_bytes(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let once = layer(&store).fingerprint(Fingerprinting::canonical_json());
    let server = serve(counting(&runs).layer(once.clone())).await;
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    let (deep, deeper) = (nested(100), nested(100_000));
    let cases = [
        (r#"{"a":1,"a":2}"#, r#"{"a":2,"a":1}"#),
        (r#"{"a":1,"\u0061":1}"#, r#"{"a":1,"a":1}"#),
        (r#"{"a":1e400}"#, r#"{"a":2e400}"#),
        (r#"{"a":9007199254740993}"#, r#"{"a":9007199254740992}"#),
        (r#"{"a":0.1000000000000000055}"#, r#"{"a":0.1}"#),
        (r#"{"a":-0}"#, r#"{"a":0}"#),
        (deep.as_str(), &format!(" {deep}")),
        (deeper.as_str(), &format!(" {deeper}")),
        (r#"{"a":"\ud800"}"#, r#"{"a":"\ud801"}"#),
    ];
    for (nth, (body, other)) in cases.into_iter().enumerate() {
        let call = |body: &str| charge(&format!("k{nth}")).body(body.to_owned());
        let first = wire.ask(&server, call(body)).await;
        assert_eq!((first.status, runs.count()), (201, nth + 1));
        assert_replay(&wire.ask(&server, call(body)).await, &first);
        let refused = wire.ask(&server, call(other)).await;
        assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"), "{nth}");
    }
    assert_idle(&once);
}

/// A form with a file, sent again as clients do: at another boundary.
async fn case_044_multipart_is_compared_by_its_parts_where_that_was_chosen(wire: Wire) {
    let form = |boundary: &str, amount: u32, file: &str| {
        let body = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n{amount}\r\n\
             --{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\
             Content-Type: text/plain\r\n\r\n{file}\r\n--{boundary}--\r\n"
        );
        let kind = format!("multipart/form-data; boundary={boundary}");
        charge("k").field("Content-Type", kind).body(body)
    };
    for by_parts in [false, true] {
        let (once, runs) = (layer(&store()), Runs::default());
        let once = if by_parts { once.fingerprint(Fingerprinting::multipart()) } else { once };
        let server = serve(counting(&runs).layer(once.clone())).await;
        let first = wire.ask(&server, form("----a1", 1999, "text\r\n--text")).await;
        assert_eq!(first.status, 201);
        assert_replay(&wire.ask(&server, form("----a1", 1999, "text\r\n--text")).await, &first);
        let again = wire.ask(&server, form("----b2", 1999, "text\r\n--text")).await;
        if by_parts {
            assert_replay(&again, &first);
        } else {
            assert_eq!((again.status, again.problem().as_str()), (422, "key-reused"));
        }
        for other in [form("----b2", 2999, "text\r\n--text"), form("----b2", 1999, "text")] {
            let refused = wire.ask(&server, other).await;
            assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"));
        }
        assert_eq!(runs.count(), 1);
        assert_idle(&once);
    }
}

/// One key sent twice must not count as none.
async fn case_045_a_key_that_comes_twice_is_refused(wire: Wire) {
    let store = store();
    for required in [true, false] {
        let (once, runs) = (layer(&store).required(required), Runs::default());
        let server = serve(counting(&runs).layer(once.clone())).await;
        for twice in [
            charge("k").field("Idempotency-Key", "k"),
            charge("k").field("idempotency-key", "other"),
            charge("k").field("X-Between", "1").field("IDEMPOTENCY-KEY", ""),
            charge("k,k"),
            charge("k, other"),
            charge(r#""k", "k""#),
            charge("k,"),
        ] {
            let refused = wire.ask(&server, twice).await;
            assert_eq!((refused.status, refused.problem().as_str()), (400, "key-invalid"));
        }
        assert_eq!((runs.count(), store.stats().keys), (0, 0));
        assert_idle(&once);
    }
}

/// An empty key must not switch the protection off, and no key is without a bound.
async fn case_047_what_is_no_key_is_refused(wire: Wire) {
    let store = store();
    for required in [true, false] {
        let (once, runs) = (layer(&store).required(required), Runs::default());
        let server = serve(counting(&runs).layer(once.clone())).await;
        let (long, longer) = ("x".repeat(256), format!("\"{}\"", "x".repeat(256)));
        let huge = "x".repeat(8_000);
        let bad: [&[u8]; 18] = [
            b"",
            b"\"\"",
            b"\" \"",
            long.as_bytes(),
            longer.as_bytes(),
            huge.as_bytes(),
            b"k\xe9y",
            b"\xff",
            "k\u{e4}y".as_bytes(),
            b"k\ty",
            b"a b",
            b"\"k",
            b"k\"",
            b"\"k\"k",
            b"\"k\\x\"",
            b"\"k\\",
            b"\"k\";",
            b"\"k\t\"",
        ];
        for value in bad {
            let refused = wire.ask(&server, charge("").set("Idempotency-Key", value)).await;
            let name = String::from_utf8_lossy(value);
            assert_eq!(
                (refused.status, refused.problem().as_str()),
                (400, "key-invalid"),
                "{name}"
            );
        }
        if wire == Wire::Http1 {
            let refused = wire.ask(&server, charge(" \t ")).await;
            assert_eq!((refused.status, refused.problem().as_str()), (400, "key-invalid"));
        }
        assert_eq!((runs.count(), store.stats().keys), (0, 0));

        let absent = wire.ask(&server, keyless("/charges")).await;
        if required {
            assert_eq!((absent.status, absent.problem().as_str()), (400, "key-missing"));
        } else {
            assert_eq!((absent.status, absent.text()), (201, "1"));
            assert_eq!(wire.ask(&server, keyless("/charges")).await.text(), "2");
        }
        assert_eq!(store.stats().keys, 0);
        assert_idle(&once);
    }
}

/// The longest key there is, in the longest way to write it.
async fn case_047_the_longest_key_is_a_key_in_each_form(wire: Wire) {
    let (store, runs) = (store(), Runs::default());
    let server = serve(counting(&runs).layer(layer(&store))).await;
    let bare = "x".repeat(255);
    let first = wire.ask(&server, charge(&bare)).await;
    assert_eq!(first.status, 201);
    assert_replay(&wire.ask(&server, charge(&format!("\"{bare}\""))).await, &first);
    let escaped = format!("\"{}\"", r"\\".repeat(255));
    let first = wire.ask(&server, charge(&escaped)).await;
    assert_eq!((first.status, first.text()), (201, "2"));
    assert_replay(&wire.ask(&server, charge(&r"\".repeat(255))).await, &first);
    assert_eq!((runs.count(), store.stats().keys), (2, 2));
}

/// The mismatch is seen before the state: no waiting, no 409, and no mark on the owner.
async fn case_049_another_body_is_a_mismatch_while_the_first_runs(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let first = wire.asking(&server, charge("k").body("x")).await;
    gate.entered().await;
    let waiter = wire.asking(&server, charge("k").body("x")).await;
    until(|| store.stats().waiters == 1).await;
    // Answered while the gate is shut, though it would wait as long as the test runs.
    let other = wire.ask(&server, charge("k").body("y")).await;
    assert_eq!((other.status, other.problem().as_str()), (422, "key-reused"));
    assert_eq!(store.stats().waiters, 1);
    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.text()), (201, "1"));
    assert_replay(&waiter.await.unwrap(), &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// Neither while the first runs nor after it does a mismatch change what is kept, or its room.
async fn case_052_a_refused_body_leaves_no_trace(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let server = serve(gated(&runs, &gate).layer(once.clone())).await;
    let kept = || {
        let stats = store.stats();
        (stats.keys, stats.bytes, stats.in_flight, stats.waiters, stats.won, stats.completed)
    };
    let first = wire.asking(&server, charge("k").body("x")).await;
    gate.entered().await;
    for is_running in [true, false] {
        let before = kept();
        for nth in 0..20 {
            let other = charge("k").body(format!("other {nth}"));
            assert_eq!(wire.ask(&server, other).await.problem(), "key-reused");
        }
        assert_eq!(kept(), before);
        if is_running {
            gate.open();
            idle(&once).await;
        }
    }
    let first = first.await.unwrap();
    assert_replay(&wire.ask(&server, charge("k").body("x")).await, &first);
    assert_eq!(runs.count(), 1);
    assert_idle(&once);
}

/// Whoever waits for a run that is given up, and then meets a claim with another body.
async fn case_049_a_waiter_whose_body_no_longer_fits_is_told_so(wire: Wire) {
    let (store, runs, gate) = (store(), Runs::default(), Gate::new());
    let once = layer(&store);
    let app = {
        let (runs, gate) = (runs.clone(), gate.clone());
        crate::charges(move || {
            let (runs, gate) = (runs.clone(), gate.clone());
            async move {
                let run = runs.up();
                gate.pass().await;
                if run == 1 { StatusCode::BAD_REQUEST } else { StatusCode::CREATED }
            }
        })
    };
    let server = serve(app.layer(once.clone())).await;
    let first = wire.asking(&server, charge("k").body("x")).await;
    gate.entered().await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 400);
    // Released: the key remembers nothing, and another body may have it.
    let second = wire.asking(&server, charge("k").body("y")).await;
    gate.entered().await;
    let refused = wire.ask(&server, charge("k").body("x")).await;
    assert_eq!((refused.status, refused.problem().as_str()), (422, "key-reused"));
    gate.open();
    assert_eq!(second.await.unwrap().status, 201);
    assert_idle(&once);
}
