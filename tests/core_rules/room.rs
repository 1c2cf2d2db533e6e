//! R25, R26: how much there is, and who gives it back.

use std::time::Duration;

use oncekey::{Busy, Claim, ClaimError, ConfigError, EntryState, Identity, Outcome, Store};

use crate::common::*;

#[test]
fn r25_the_count_limit_refuses_new_identities_before_they_run() {
    let (store, clock) = by_hand_with(|builder| builder.max_keys(3));
    store.claim(&id("completed"), fp("")).won().complete(outcome("1")).unwrap();
    store.claim(&id("held"), fp("")).won().hold().unwrap();
    let permit = store.claim(&id("running"), fp("")).won();
    assert!(matches!(store.claim(&id("new"), fp("")), Err(ClaimError::Full { .. })));
    // What is there is not touched: replays, waits and mismatches need no room.
    store.claim(&id("completed"), fp("")).replayed();
    assert!(matches!(store.claim(&id("held"), fp("")), Ok(Claim::Held)));
    assert!(matches!(store.claim(&id("running"), fp("y")), Ok(Claim::Mismatch)));
    let mut task = Task::listed(store.claim(&id("running"), fp("")).pending());
    permit.release().unwrap();
    task.poll().yours().release().unwrap();
    store.claim(&id("new"), fp("")).won().complete(outcome("2")).unwrap();
    assert!(matches!(store.claim(&id("newer"), fp("")), Err(ClaimError::Full { .. })));
    // What has ended makes room, though nobody sweeps.
    clock.advance(DAY + SECOND);
    store.claim(&id("newer"), fp("")).won().release().unwrap();
}

#[test]
fn r25_a_full_store_tells_when_to_try_again() {
    let (store, clock) = by_hand_with(|builder| builder.max_keys(1));
    let hint = || match store.claim(&id("new"), fp("")) {
        Err(ClaimError::Full { retry_after }) => retry_after,
        other => panic!("{other:?}"),
    };
    store.claim(&id("k"), fp("")).won().complete(outcome("1")).unwrap();
    // Not before it fires, as far as the timers know: the wheel rounds down.
    assert!((SECOND..=LEASE).contains(&hint()), "{:?}", hint());
    clock.advance(LEASE + MS);
    store.sweep();
    clock.advance(DAY - LEASE - 10 * SECOND);
    store.sweep();
    assert!((SECOND..=11 * SECOND).contains(&hint()), "{:?}", hint());
    clock.advance(9 * SECOND + SECOND - 2 * MS);
    store.sweep();
    assert_eq!(hint(), SECOND);
}

#[test]
fn r25_the_byte_limit_is_never_passed() {
    let limit = 64 << 10;
    let (store, clock) = by_hand_with(|builder| builder.max_bytes(limit).outcome_reserve(1_000));
    let (mut won, mut kept, mut full) = (0, 0, false);
    let mut running = std::collections::VecDeque::new();
    for n in 0..200_usize {
        let key = n.to_string();
        match store.claim(&id(&key), fp("")) {
            Ok(Claim::Won(permit)) => running.push_back(permit),
            Err(ClaimError::Full { .. }) => full = true,
            other => panic!("{other:?}"),
        }
        assert!(store.stats().bytes <= limit);
        if let Some(permit) = running.pop_front_if(|_| full || n % 8 == 7) {
            let body = vec![7; (n * 37) % 3_000];
            won += 1;
            kept += usize::from(permit.complete(Outcome::new(200).body(body)).unwrap().kept);
            assert!(store.stats().bytes <= limit);
        }
    }
    drop(running);
    let stats = store.stats();
    assert!(won > kept && kept > 10, "{won} won, {kept} kept");
    assert_eq!(stats.not_kept_no_room, (won - kept) as u64);
    assert!(stats.refused_full > 0 && stats.nearly_full);
    clock.advance(DAY + SECOND);
    store.sweep();
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
    assert!(!store.stats().nearly_full);
}

#[test]
fn r25_a_claim_reserves_room_for_its_outcome() {
    let (store, _) = by_hand_with(|builder| builder.max_bytes(16 << 10));
    let permits: Vec<_> = ["a", "b", "c"].map(|key| store.claim(&id(key), fp("")).won()).into();
    assert!(matches!(store.claim(&id("d"), fp("")), Err(ClaimError::Full { .. })));
    let reserved = store.stats().bytes;
    // Each finds the room that was promised, though the store is full.
    for permit in permits {
        let beside = Outcome::new(200).body("1").size() - 1;
        let promised = Outcome::new(200).body(vec![7; (4 << 10) - beside]);
        assert_eq!(promised.size(), 4 << 10);
        assert!(permit.complete(promised).unwrap().kept);
    }
    assert_eq!(store.stats().bytes, reserved);
    assert!(matches!(store.claim(&id("d"), fp("")), Err(ClaimError::Full { .. })));
}

#[test]
fn r25_what_was_reserved_and_not_needed_is_given_back() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let reserved = store.stats().bytes;
    permit.complete(outcome("small")).unwrap();
    let taken = store.stats().bytes;
    assert_eq!(taken, reserved - (4 << 10) + outcome("small").size());
    // Not kept: only the record is left of it.
    store.claim(&id("l"), fp("")).won().complete_not_kept().unwrap();
    assert_eq!(store.stats().bytes - taken, reserved - (4 << 10));
}

#[test]
fn r25_a_larger_outcome_takes_more_room_or_is_not_kept() {
    let (store, _) = by_hand_with(|builder| builder.max_bytes(64 << 10));
    let large = |n: usize| Outcome::new(200).body(vec![7; n << 10]);
    let kept = store.claim(&id("a"), fp("")).won().complete(large(32)).unwrap();
    assert!(kept.kept);
    assert_eq!(store.claim(&id("a"), fp("")).replayed(), large(32));
    let permit = store.claim(&id("b"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("b"), fp("")).pending());
    let before = store.stats();
    assert!(!permit.complete(large(32)).unwrap().kept);
    // Done, and not run again; but nobody gets the answer.
    assert!(matches!(task.poll(), Some(oncekey::Settled::NotKept)));
    assert!(matches!(store.claim(&id("b"), fp("")), Ok(Claim::NotKept)));
    assert!(matches!(store.claim(&id("b"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(store.look_up(&id("b")).unwrap().state, EntryState::NotKept);
    let after = store.stats();
    assert_eq!((after.not_kept, after.not_kept_no_room), (1, 1));
    assert_eq!(after.bytes, before.bytes - (4 << 10));
    store.claim(&id("c"), fp("")).won().release().unwrap();
}

#[test]
fn r25_a_gauge_warns_at_80_percent() {
    let (store, _) = by_hand_with(|builder| builder.max_keys(10));
    let mut permits = Vec::new();
    for n in 1..=10 {
        permits.push(store.claim(&id(&n.to_string()), fp("")).won());
        assert_eq!(store.stats().nearly_full, n >= 8, "{n} of 10");
    }
    for permit in permits.drain(..3) {
        permit.release().unwrap();
    }
    assert!(!store.stats().nearly_full);
    let (store, _) = by_hand_with(|builder| builder.max_bytes(100 << 10));
    let _permit = store.claim(&id("k"), fp("")).won();
    assert!(!store.stats().nearly_full);
    store
        .claim(&id("l"), fp(""))
        .won()
        .complete(Outcome::new(200).body(vec![7; 76 << 10]))
        .unwrap();
    assert!(store.stats().nearly_full);
}

#[test]
fn r25_an_account_has_a_share_where_that_was_set() {
    let (store, clock) = by_hand_with(|builder| builder.max_keys_per_account(2).max_keys(5));
    fn of<'a>(account: &'a str, key: &'a str) -> Identity<'a> {
        Identity::new(account, "POST /charges", key).unwrap()
    }
    for key in ["1", "2"] {
        store.claim(&of("a", key), fp("")).won().complete(outcome("1")).unwrap();
    }
    let before = store.stats();
    match store.claim(&of("a", "3"), fp("")) {
        Err(ClaimError::AccountFull { retry_after }) => {
            assert!((SECOND..=LEASE).contains(&retry_after));
        }
        other => panic!("{other:?}"),
    }
    let after = store.stats();
    assert_eq!((after.refused_account, after.keys, after.bytes), (1, 2, before.bytes));
    // What it has, it has; others have their own share.
    store.claim(&of("a", "1"), fp("")).replayed();
    let other = store.claim(&of("b", "3"), fp("")).won();
    let empty = store.claim(&of("", "3"), fp("")).won();
    // Every way in which a record leaves gives the share back.
    assert!(store.forget(&of("a", "1")).unwrap());
    store.claim(&of("a", "3"), fp("")).won().release().unwrap();
    let permit = store.claim(&of("a", "3"), fp("")).won();
    assert!(matches!(store.claim(&of("a", "4"), fp("")), Err(ClaimError::AccountFull { .. })));
    assert!(store.forget_forced(&of("a", "3")));
    assert!(permit.release().is_err());
    clock.advance(DAY + SECOND);
    store.claim(&of("a", "5"), fp("")).won().complete(outcome("1")).unwrap();
    store.claim(&of("a", "6"), fp("")).won().complete(outcome("1")).unwrap();
    clock.advance(DAY + SECOND);
    assert_eq!(store.sweep().reaped, 4);
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
    drop((other, empty));
}

#[test]
fn r25_a_refusal_of_the_store_takes_nothing_of_the_share() {
    let (store, _) = by_hand_with(|builder| builder.max_keys_per_account(2).max_keys(2));
    let of = |account, key| Identity::new(account, "POST /charges", key).unwrap();
    let first = store.claim(&of("a", "1"), fp("")).won();
    let _second = store.claim(&of("b", "1"), fp("")).won();
    for _ in 0..5 {
        assert!(matches!(store.claim(&of("a", "2"), fp("")), Err(ClaimError::Full { .. })));
    }
    assert!(store.forget_forced(&of("b", "1")));
    let second = store.claim(&of("a", "2"), fp("")).won();
    first.release().unwrap();
    second.release().unwrap();
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn r25_limits_that_hold_nothing_are_refused_by_their_name() {
    let refused = |builder: oncekey::StoreBuilder, name: &str| match builder.build() {
        Err(ConfigError::TooSmall { setting, at_least, found }) => {
            assert_eq!(setting, name);
            assert!(found < at_least);
            at_least
        }
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(refused(Store::builder().max_keys(0), "max_keys"), 1);
    assert_eq!(refused(Store::builder().max_keys_per_account(0), "max_keys_per_account"), 1);
    let least = refused(Store::builder().max_bytes(0), "max_bytes");
    refused(Store::builder().outcome_reserve(usize::MAX), "max_bytes");
    // What it says is enough for the largest identity.
    let (store, _) = by_hand_with(|builder| builder.max_bytes(least));
    let long = [b'x'; 512];
    let largest = Identity::new(&long[..255], &long[..], &long[..255]).unwrap();
    assert!(store.claim(&largest, fp("")).won().complete(outcome("1")).unwrap().kept);
    assert!(store.stats().bytes <= least);
}

#[test]
fn r25_no_number_overflows() {
    let (store, _) = by_hand_with(|builder| {
        builder.max_bytes(usize::MAX).outcome_reserve(usize::MAX).max_keys(usize::MAX)
    });
    let permit = store.claim(&id("k"), fp("")).won();
    assert!(matches!(store.claim(&id("l"), fp("")), Err(ClaimError::Full { .. })));
    permit.complete(outcome("1")).unwrap();
    assert!(store.forget(&id("k")).unwrap());
    store.claim(&id("l"), fp("")).won().release().unwrap();
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn r26_forget_lets_the_next_caller_run_but_not_beside_an_owner() {
    let (store, _) = by_hand();
    assert_eq!(store.forget(&id("k")), Ok(false));
    assert!(!store.forget_forced(&id("k")));
    let permit = store.claim(&id("k"), fp("")).won();
    assert_eq!(store.forget(&id("k")), Err(Busy));
    assert_eq!(store.look_up(&id("k")).unwrap().state, EntryState::InFlight);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(store.forget(&id("k")), Ok(true));
    assert_eq!(store.forget(&id("k")), Ok(false));
    store.claim(&id("k"), fp("")).won().hold().unwrap();
    assert_eq!(store.forget(&id("k")), Ok(true));
    store.claim(&id("k"), fp("")).won().complete_not_kept().unwrap();
    assert!(store.forget_forced(&id("k")));
    let permit = store.claim(&id("k"), fp("other")).won();
    assert!(store.forget_forced(&id("k")));
    assert!(permit.release().is_err());
    let stats = store.stats();
    assert_eq!((stats.forgotten, stats.keys, stats.bytes, stats.in_flight), (4, 0, 0, 0));
}

#[test]
fn r26_a_lapsed_claim_is_not_in_flight_and_can_be_forgotten() {
    for on_lapse in [oncekey::Lapse::Hold, oncekey::Lapse::TakeOver] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
        let permit = store.claim(&id("k"), fp("")).won();
        let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
        clock.advance(LEASE - MS);
        assert_eq!(store.forget(&id("k")), Err(Busy));
        clock.advance(MS);
        assert_eq!(store.forget(&id("k")), Ok(true));
        assert!(permit.complete(outcome("1")).is_err());
        task.poll().yours().release().unwrap();
        let stats = store.stats();
        assert_eq!((stats.keys, stats.bytes, stats.in_flight, stats.lapsed), (0, 0, 0, 1));
    }
}

#[test]
fn r26_forget_account_forgets_its_own_and_leaves_what_runs() {
    let (store, clock) = by_hand();
    for n in 0..100 {
        let key = n.to_string();
        for account in ["a", "ab", ""] {
            let id = Identity::new(account, "POST /charges", &key).unwrap();
            store.claim(&id, fp("")).won().complete(outcome("1")).unwrap();
        }
    }
    let held = Identity::new("a", "POST /charges", "held").unwrap();
    store.claim(&held, fp("")).won().hold().unwrap();
    let runs = Identity::new("a", "POST /charges", "runs").unwrap();
    let permit = store.claim(&runs, fp("")).won();
    assert_eq!(store.forget_account("a"), 101);
    assert_eq!((store.stats().keys, store.stats().forgotten), (201, 101));
    permit.complete(outcome("1")).unwrap();
    assert_eq!(store.forget_account("a"), 1);
    assert_eq!(store.forget_account("b"), 0);
    clock.advance(DAY);
    // They have ended already: nobody could have seen them.
    assert_eq!(store.forget_account("ab"), 0);
    store.sweep();
    clock.advance(SECOND);
    store.sweep();
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn r26_nothing_is_left_of_what_was_released_forgotten_or_taken_over() {
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(oncekey::Lapse::TakeOver));
    for round in 0..100_u32 {
        let key = round.to_string();
        store.claim(&id(&key), fp("")).won().release().unwrap();
        let permit = store.claim(&id(&key), fp("")).won();
        clock.advance(LEASE);
        let second = store.claim(&id(&key), fp("")).won();
        assert!(permit.release().is_err());
        second.complete(outcome("1")).unwrap();
        assert_eq!(store.stats().keys, 1);
        assert!(store.forget(&id(&key)).unwrap());
        assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
    }
    assert_eq!(store.sweep().reaped, 0);
    clock.advance(Duration::from_secs(1_000_000));
    assert_eq!(store.sweep().reaped, 0);
}
