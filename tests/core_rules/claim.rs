//! R1, R4, R5, R7: who is it, is it the same, who runs?

use std::cell::Cell;

use oncekey::{
    Claim, ClaimError, Entry, EntryState, Fingerprint, Identity, Lapse, Scheme, Settled, Store,
};

use crate::common::*;

#[test]
fn r01_identities_are_equal_only_byte_for_byte() {
    let (store, _) = by_hand();
    let all: &[(&[u8], &[u8], &[u8])] = &[
        (b"a:b", b"c", b"k"),
        (b"a", b"b:c", b"k"),
        (b"ab", b"c", b"k"),
        (b"a", b"bc", b"k"),
        (b"a", b"b", b"ck"),
        (b"", b"abc", b"k"),
        (b"abc", b"", b"k"),
        (b"", b"", b"abck"),
        (b"", b"", b"k"),
        (b"A", b"bc", b"k"),
        (b"a", b"BC", b"k"),
        (b"a", b"bc", b"K"),
        (b"a", b"bc", b"k "),
        (b"a", b"bc", b" k"),
        (b"a ", b"bc", b"k"),
        (b"a", b"bc ", b"k"),
        (b"a\0", b"bc", b"k"),
        (b"a", b"\0bc", b"k"),
        (b"a", b"bc\0", b"k"),
        (b"\xff", b"bc", b"k"),
        (b"\xfe", b"bc", b"k"),
    ];
    let of = |it: &(&'static [u8], &'static [u8], &'static [u8])| {
        Identity::new(it.0, it.1, it.2).unwrap()
    };
    for (n, it) in all.iter().enumerate() {
        store.claim(&of(it), fp("")).won().complete(outcome(&n.to_string())).unwrap();
    }
    assert_eq!(store.stats().keys, all.len());
    for (n, it) in all.iter().enumerate() {
        assert_eq!(store.claim(&of(it), fp("")).replayed(), outcome(&n.to_string()));
        assert!(store.forget(&of(it)).unwrap());
    }
    assert_eq!(store.stats().keys, 0);
}

#[test]
fn r04_every_byte_of_a_request_counts() {
    let (store, _) = by_hand();
    let mut body = vec![b'x'; 1 << 20];
    let first = Fingerprint::request("POST", "/a?b=1", &body);
    store.claim(&id("k"), first).won().complete(outcome("")).unwrap();
    body[(1 << 20) - 1] = b'y';
    for other in [
        Fingerprint::request("POST", "/a?b=1", &body),
        Fingerprint::request("POST", "/a?b=1", &body[..body.len() - 1]),
        Fingerprint::request("PATCH", "/a?b=1", &vec![b'x'; 1 << 20]),
        Fingerprint::request("POST", "/a?b=2", &vec![b'x'; 1 << 20]),
        Fingerprint::request("POST", "/a", &vec![b'x'; 1 << 20]),
    ] {
        assert!(matches!(store.claim(&id("k"), other), Ok(Claim::Mismatch)));
    }
    store.claim(&id("k"), first).replayed();
}

/// The attempt `body` as two layers see it.
fn by(scheme: &str, body: &str) -> Fingerprint {
    Fingerprint::builder(Scheme::named(scheme)).part(body.as_bytes()).finish()
}

#[test]
fn r04_an_attempt_is_compared_by_the_scheme_of_the_record() {
    let (store, _) = by_hand();
    store.claim(&id("k"), by("old", "x")).won().complete(outcome("1")).unwrap();
    for (body, fits) in [("x", true), ("y", false)] {
        let asked_for = Cell::new(None);
        let claim = store.claim_with(&id("k"), by("new", body), |scheme| {
            asked_for.set(Some(scheme));
            Some(by("old", body))
        });
        assert_eq!(asked_for.get(), Some(Scheme::named("old")));
        match claim.unwrap() {
            Claim::Replay(replay) if fits => assert_eq!(replay.outcome(), &outcome("1")),
            Claim::Mismatch if !fits => {}
            other => panic!("{body}: {other:?}"),
        }
    }
    // Nobody is asked where nothing has to be translated.
    let unasked = |_| panic!("asked");
    let seen = store.claim_with(&id("k"), by("old", "x"), unasked);
    seen.replayed();
    store.claim_with(&id("new"), by("new", "x"), unasked).won().release().unwrap();
}

const LAPSED: &str = "lapsed";

/// What an operator sees of `k`, unless the look itself would judge the lapse.
fn entry(store: &Store, state: &str) -> Option<Entry> {
    if state == LAPSED { None } else { store.look_up(&id("k")) }
}

/// Brings `k` into each state and has `check` look at it.
fn in_each_state(on_lapse: Lapse, fingerprint: Fingerprint, check: impl Fn(&Store, &str)) {
    let fresh = || by_hand_with(|builder| builder.on_lapse(on_lapse));

    let (store, _) = fresh();
    let permit = store.claim(&id("k"), fingerprint).won();
    check(&store, "in flight");
    let _drain = store.drain();
    check(&store, "in flight, draining");
    permit.complete(outcome("1")).unwrap();
    check(&store, "completed, draining");

    let (store, _) = fresh();
    store.claim(&id("k"), fingerprint).won().complete(outcome("1")).unwrap();
    check(&store, "completed");

    let (store, _) = fresh();
    store.claim(&id("k"), fingerprint).won().complete_not_kept().unwrap();
    check(&store, "not kept");

    let (store, _) = fresh();
    store.claim(&id("k"), fingerprint).won().hold().unwrap();
    check(&store, "held");

    let (store, clock) = fresh();
    let permit = store.claim(&id("k"), fingerprint).won();
    clock.advance(LEASE);
    check(&store, LAPSED);
    // Nobody has judged it.
    permit.renew().unwrap();
    clock.advance(LEASE);
    store.sweep();
    check(&store, "lapsed and swept");

    let (store, _) = by_hand_with(|builder| builder.on_lapse(on_lapse).max_keys(1));
    store.claim(&id("k"), fingerprint).won().complete(outcome("1")).unwrap();
    check(&store, "completed, store full");
}

#[test]
fn r04_an_unknown_scheme_is_held_never_a_mismatch_and_never_a_run() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        in_each_state(on_lapse, by("old", "x"), |store, state| {
            let before = entry(store, state);
            let won = store.stats().won;
            for body in ["x", "y"] {
                let none = store.claim(&id("k"), by("new", body));
                assert!(matches!(none, Ok(Claim::Held)), "{state}: {none:?}");
                let none = store.observe(&id("k"), by("new", body));
                assert!(matches!(none, Some(Claim::Held)), "{state}: {none:?}");
                // A translation into a scheme that nobody asked for is none.
                let wrong =
                    store.claim_with(&id("k"), by("new", body), |_| Some(by("newer", body)));
                assert!(matches!(wrong, Ok(Claim::Held)), "{state}: {wrong:?}");
            }
            assert_eq!(entry(store, state), before, "{state}");
            assert_eq!(store.stats().won, won, "{state}");
        });
    }
}

#[test]
fn r04_a_waiter_of_another_scheme_gets_the_outcome() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), by("old", "x")).won();
    let other = store.claim_with(&id("k"), by("new", "x"), |_| Some(by("old", "x")));
    let mut task = Task::listed(other.pending());
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
}

#[test]
fn r04_a_waiter_of_another_scheme_is_compared_again_by_both() {
    // The claim that was waited for is forgotten and another one has taken its place, made by the
    // one scheme or the other.
    for (scheme, body, mismatch) in [("old", "x", false), ("new", "x", false), ("old", "y", true)] {
        let (store, _) = by_hand();
        let _first = store.claim(&id("k"), by("old", "x")).won();
        let other = store.claim_with(&id("k"), by("new", "x"), |_| Some(by("old", "x")));
        let mut task = Task::listed(other.pending());
        assert!(store.forget_forced(&id("k")));
        store.claim(&id("k"), by(scheme, body)).won().complete(outcome("2")).unwrap();
        match task.poll() {
            Some(Settled::Mismatch) if mismatch => {}
            settled if !mismatch => assert_eq!(settled.completed(), outcome("2")),
            other => panic!("{scheme}, {body}: {other:?}"),
        }
    }
}

#[test]
fn r05_mismatch_in_every_state_of_the_record_and_without_a_trace() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        in_each_state(on_lapse, fp("x"), |store, state| {
            let seen = entry(store, state);
            let before = store.stats();
            let other = store.claim(&id("k"), fp("y"));
            assert!(matches!(other, Ok(Claim::Mismatch)), "{state}: {other:?}");
            let other = store.observe(&id("k"), fp("y"));
            assert!(matches!(other, Some(Claim::Mismatch)), "{state}: {other:?}");
            let mut after = store.stats();
            assert_eq!(after.mismatches, before.mismatches + 2, "{state}");
            after.mismatches = before.mismatches;
            assert_eq!(after, before, "{state}");
            assert_eq!(entry(store, state), seen, "{state}");
        });
    }
}

#[test]
fn r05_mismatch_while_in_flight_is_told_at_once_and_disturbs_nobody() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("x")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("x")).pending());
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!((task.wakes(), store.stats().waiters), (0, 1));
    assert!(task.poll().is_none());
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(store.claim(&id("k"), fp("x")).replayed(), outcome("1"));
}

#[test]
fn r05_mismatch_after_a_wait() {
    let (store, _) = by_hand();
    let _first = store.claim(&id("k"), fp("x")).won();
    let mut listed = Task::listed(store.claim(&id("k"), fp("x")).pending());
    let mut late = Task::new(store.claim(&id("k"), fp("x")).pending());
    assert!(store.forget_forced(&id("k")));
    let second = store.claim(&id("k"), fp("y")).won();
    assert_eq!(listed.wakes(), 1);
    assert!(matches!(listed.poll(), Some(Settled::Mismatch)));
    assert!(matches!(late.poll(), Some(Settled::Mismatch)));
    assert_eq!(store.stats().waiters, 0);
    second.complete(outcome("2")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("y")).replayed(), outcome("2"));
}

#[test]
fn r05_what_is_over_remembers_no_fingerprint() {
    let (store, clock) = by_hand();
    store.claim(&id("k"), fp("a")).won().release().unwrap();
    store.claim(&id("k"), fp("b")).won().complete(outcome("b")).unwrap();
    clock.advance(DAY);
    store.claim(&id("k"), fp("c")).won().hold().unwrap();
    clock.advance(DAY);
    store.claim(&id("k"), fp("d")).won().complete(outcome("d")).unwrap();
    assert!(store.forget(&id("k")).unwrap());
    store.claim(&id("k"), fp("e")).won().release().unwrap();
    assert_eq!(store.stats().mismatches, 0);
}

#[test]
fn r07_all_clones_are_one_store() {
    let (store, _) = by_hand();
    let clone = store.clone();
    let permit = clone.claim(&id("k"), fp("")).won();
    drop(clone);
    let mut task = Task::listed(store.clone().claim(&id("k"), fp("")).pending());
    assert_eq!(store.stats().in_flight, 1);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
    // Two stores are two.
    by_hand().0.claim(&id("k"), fp("")).won().release().unwrap();
}

#[test]
fn r07_an_observer_claims_nothing() {
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    assert!(store.observe(&id("k"), fp("")).is_none());
    assert!(store.look_up(&id("k")).is_none());
    assert_eq!((store.stats().keys, store.stats().won), (0, 0));
    let permit = store.claim(&id("k"), fp("")).won();
    assert!(matches!(store.observe(&id("k"), fp("")), Some(Claim::InFlight(_))));
    clock.advance(LEASE);
    // A claim would take over: the observer does not.
    assert!(store.observe(&id("k"), fp("")).is_none());
    permit.renew().unwrap();
    permit.complete(outcome("1")).unwrap();
    assert!(matches!(store.observe(&id("k"), fp("")), Some(Claim::Replay(_))));
    clock.advance(DAY);
    assert!(store.observe(&id("k"), fp("")).is_none());
    assert_eq!(store.stats().won, 1);
}

#[test]
fn r07_a_refused_claim_leaves_no_trace() {
    let (store, _) = by_hand_with(|builder| builder.max_keys(1));
    let permit = store.claim(&id("a"), fp("")).won();
    let before = store.stats();
    assert!(matches!(store.claim(&id("b"), fp("")), Err(ClaimError::Full { .. })));
    let mut after = store.stats();
    assert_eq!(after.refused_full, 1);
    after.refused_full = 0;
    assert_eq!(after, before);
    assert!(store.look_up(&id("b")).is_none());
    assert_eq!(store.look_up(&id("a")).unwrap().state, EntryState::InFlight);
    permit.release().unwrap();
}
