//! R8 to R12: lease, token, and how an owner ends.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use oncekey::{
    Abandon, Claim, EntryState, Fingerprint, Lapse, Lost, LostCause, ManualClock, Outcome, Permit,
    Resolution, ResolveError, Scheme, Settled, Store,
};

use crate::common::*;

fn state(store: &Store) -> Option<EntryState> {
    store.look_up(&id("k")).map(|entry| entry.state)
}

fn taking_over() -> (Store, ManualClock) {
    by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver))
}

#[test]
fn r08_a_renewed_lease_runs_on_and_never_gets_shorter() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    for _ in 0..10 {
        clock.advance(LEASE - MS);
        store.sweep();
        assert_eq!(store.look_up(&id("k")).unwrap().remaining, MS);
        permit.renew().unwrap();
        permit.renew().unwrap();
        assert_eq!(store.look_up(&id("k")).unwrap().remaining, LEASE);
    }
    // `attend` gives more time than a lease; a renewal takes none of it away.
    permit.attend().unwrap();
    permit.renew().unwrap();
    assert_eq!(store.look_up(&id("k")).unwrap().remaining, 15 * LEASE);
    permit.complete(outcome("1")).unwrap();
    store.claim(&id("k"), fp("")).replayed();
}

#[test]
fn r08_a_lapse_that_nobody_judged_can_be_renewed_and_one_that_was_judged_cannot() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(2 * LEASE);
    permit.renew().unwrap();
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::InFlight(_))));
    clock.advance(LEASE);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    assert_eq!(permit.renew().unwrap_err().cause(), LostCause::Held);
    assert_eq!(permit.attend().unwrap_err().cause(), LostCause::Held);
    // Held all the same, until the owner settles it.
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    permit.complete(outcome("1")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
}

#[test]
fn r08_an_attended_claim_is_held_after_max_run_and_still_settled_by_its_owner() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
        let permit = store.claim(&id("k"), fp("")).won();
        clock.advance(LEASE / 2);
        permit.attend().unwrap();
        // A suspend of the whole process is no lapse.
        clock.advance(15 * LEASE - MS);
        store.sweep();
        assert_eq!(state(&store), Some(EntryState::InFlight));
        // Attending again gives no more time.
        permit.attend().unwrap();
        clock.advance(MS);
        assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)), "{on_lapse:?}");
        assert_eq!((store.stats().in_flight, store.stats().lapsed), (0, 1));
        assert_eq!(permit.renew().unwrap_err().cause(), LostCause::Held);
        permit.complete(outcome("late")).unwrap();
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("late"));
    }
}

#[test]
fn r08_an_attended_claim_is_not_renewed_past_max_run() {
    let (store, clock) = by_hand_with(|builder| builder.max_run(2 * LEASE));
    let permit = store.claim(&id("k"), fp("")).won();
    permit.attend().unwrap();
    clock.advance(2 * LEASE - MS);
    permit.renew().unwrap();
    assert_eq!(store.look_up(&id("k")).unwrap().remaining, MS);
    clock.advance(MS);
    assert_eq!(permit.renew().unwrap_err().cause(), LostCause::Held);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    permit.complete(outcome("late")).unwrap();
}

#[test]
fn r08_max_run_may_be_shorter_than_the_lease() {
    let (store, clock) = by_hand_with(|builder| builder.max_run(SECOND).tick(HOUR));
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    permit.attend().unwrap();
    clock.advance(SECOND - MS);
    store.sweep();
    assert_eq!(task.wakes(), 0);
    clock.advance(MS);
    // The waiter does not sleep until the lease's old end, nor until the next tick (R13).
    store.sweep();
    assert_eq!(task.wakes(), 1);
    assert!(matches!(task.poll(), Some(Settled::Held)));
    permit.release().unwrap();
}

#[test]
fn r08_the_sweep_judges_a_lapse_without_traffic() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE + SECOND);
    store.sweep();
    assert_eq!((store.stats().lapsed, store.stats().held, store.stats().in_flight), (1, 1, 0));
    assert_eq!(state(&store), Some(EntryState::Held));
    permit.complete(outcome("1")).unwrap();
}

#[test]
fn r09_tokens_never_repeat_and_grow() {
    let (store, clock) = taking_over();
    let mut last = store.claim(&id("other"), fp("")).won().token();
    let mut next = |permit: &Permit| {
        let token = permit.token();
        assert_eq!(token.owner(), last.owner());
        assert!(token.number() > last.number(), "{token} after {last}");
        last = token;
    };
    let permit = store.claim(&id("k"), fp("")).won();
    next(&permit);
    permit.release().unwrap();
    let permit = store.claim(&id("k"), fp("")).won();
    next(&permit);
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    permit.release().unwrap();
    let permit = task.poll().yours();
    next(&permit);
    clock.advance(LEASE);
    let second = store.claim(&id("k"), fp("")).won();
    next(&second);
    second.hold().unwrap();
    store.resolve(&id("k"), Resolution::Release).unwrap();
    let permit = store.claim(&id("k"), fp("")).won();
    next(&permit);
    permit.complete(outcome("1")).unwrap();
    clock.advance(DAY);
    let permit = store.claim(&id("k"), fp("")).won();
    next(&permit);
    assert!(store.forget_forced(&id("k")));
    let permit = store.claim(&id("k"), fp("")).won();
    next(&permit);
    assert_eq!(store.look_up(&id("k")).unwrap().token, permit.token());
    // Another store, as after a restart, has another owner.
    assert_ne!(by_hand().0.claim(&id("k"), fp("")).won().token().owner(), permit.token().owner());
}

#[test]
fn r09_a_permit_is_shown_by_its_token_and_by_nothing_else() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let token = permit.token();
    assert_eq!(token.to_string(), format!("{:016x}-{}", token.owner(), token.number()));
    assert_eq!(format!("{permit:?}"), format!("Permit {{ token: {token:?}, .. }}"));
}

#[test]
fn r09_tokens_of_an_identity_grow_also_where_claims_race() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let newest = AtomicU64::new(0);
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..50_000 {
                    if let Claim::Won(permit) = store.claim(&id("k"), same()).unwrap() {
                        // Nobody else is between a claim and a release now.
                        let token = permit.token().number();
                        let before = newest.swap(token, Ordering::SeqCst);
                        assert!(before < token, "{token} was won after {before}");
                        permit.release().unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(store.stats().keys, 0);
}

/// Makes the token of a claim of `k` stale; what then stands there must not change.
type Stale = fn(&Store, &ManualClock);

const WAYS_TO_LOSE: &[(&str, LostCause, Stale)] = &[
    ("taken over", LostCause::Ended, |store, clock| {
        clock.advance(LEASE);
        store.claim(&id("k"), fp("")).won().complete(outcome("theirs")).unwrap();
    }),
    ("taken over and running", LostCause::Ended, |store, clock| {
        clock.advance(LEASE);
        std::mem::forget(store.claim(&id("k"), fp("")).won());
    }),
    ("forgotten", LostCause::Ended, |store, _| assert!(store.forget_forced(&id("k")))),
    ("forgotten and claimed anew", LostCause::Ended, |store, _| {
        assert!(store.forget_forced(&id("k")));
        store.claim(&id("k"), fp("y")).won().hold().unwrap();
    }),
    ("its end reached", LostCause::Ended, |store, clock| {
        clock.advance(LEASE + DAY);
        store.sweep();
    }),
];

#[test]
fn r09_a_stale_token_changes_nothing_and_is_counted() {
    type Verb = fn(Permit) -> Result<(), Lost>;
    let verbs: [(&str, Verb, bool); 7] = [
        ("complete", |it| it.complete(outcome("mine")).map(drop), true),
        ("complete_not_kept", |it| it.complete_not_kept().map(drop), false),
        ("release", Permit::release, false),
        ("release_with", |it| it.release_with(outcome("mine")), true),
        ("hold", Permit::hold, false),
        ("renew", |it| it.renew(), false),
        ("attend", |it| it.attend(), false),
    ];
    for (way, cause, make_stale) in WAYS_TO_LOSE {
        for (verb, call, has_outcome) in verbs {
            let (store, clock) = taking_over();
            let permit = store.claim(&id("k"), fp("")).won();
            let token = permit.token();
            make_stale(&store, &clock);
            let entry = store.look_up(&id("k"));
            let before = store.stats();
            let lost = call(permit).unwrap_err();
            assert_eq!(lost.cause(), *cause, "{way}, {verb}");
            assert_eq!(lost.into_outcome(), has_outcome.then(|| outcome("mine")), "{way}, {verb}");
            assert_eq!(store.look_up(&id("k")), entry, "{way}, {verb}");
            assert_ne!(entry.map(|entry| entry.token), Some(token));
            let after = store.stats();
            assert!(after.lost > before.lost, "{way}, {verb}");
            assert_eq!(
                (after.keys, after.bytes, after.in_flight, after.completed, after.released),
                (before.keys, before.bytes, before.in_flight, before.completed, before.released),
                "{way}, {verb}"
            );
        }
    }
}

#[test]
fn r09_completing_twice_the_first_wins() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    store.resolve(&id("k"), Resolution::Complete(outcome("first"))).unwrap();
    let lost = permit.complete(outcome("second")).unwrap_err();
    assert_eq!(lost.cause(), LostCause::Completed);
    assert_eq!(lost.into_outcome(), Some(outcome("second")));
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("first"));
    // And the other way round.
    let permit = store.claim(&id("l"), fp("")).won();
    clock.advance(LEASE);
    store.sweep();
    permit.complete(outcome("first")).unwrap();
    let twice = store.resolve(&id("l"), Resolution::Complete(outcome("second")));
    assert_eq!(twice, Err(ResolveError::Completed));
    assert_eq!(store.claim(&id("l"), fp("")).replayed(), outcome("first"));
}

#[test]
fn r09_a_permit_whose_claim_others_have_ended_touches_no_later_one() {
    let ends: [fn(&Store); 3] = [
        |store| store.resolve(&id("k"), Resolution::Complete(outcome("found"))).unwrap(),
        |store| store.resolve(&id("k"), Resolution::Release).unwrap(),
        |store| assert!(store.forget_forced(&id("k"))),
    ];
    for end in ends {
        let (store, clock) = by_hand();
        let permit = store.claim(&id("k"), fp("x")).won();
        clock.advance(LEASE);
        store.sweep();
        end(&store);
        // Whatever memory is free by now has been used again when these are through.
        let names: Vec<_> = (0..500).map(|n| n.to_string()).collect();
        for _ in 0..4 {
            for name in &names {
                store.claim(&id(name), fp("")).won().release().unwrap();
            }
            clock.advance(LEASE);
            store.sweep();
        }
        let others: Vec<_> =
            names.iter().map(|name| store.claim(&id(name), fp("")).won()).collect();
        assert_eq!((permit.identity(), permit.fingerprint()), (id("k"), fp("x")));
        permit.complete(outcome("late")).unwrap_err();
        for (name, other) in names.iter().zip(others) {
            other.complete(outcome(name)).unwrap();
            assert_eq!(store.claim(&id(name), fp("")).replayed(), outcome(name));
        }
    }
}

#[test]
fn r09_a_lapsed_lease_alone_makes_no_token_stale() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        for swept in [false, true] {
            let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
            let [a, b, c] = ["a", "b", "c"].map(|key| store.claim(&id(key), fp("")).won());
            clock.advance(2 * LEASE);
            if swept {
                store.sweep();
            }
            a.complete(outcome("1")).unwrap();
            assert_eq!(store.claim(&id("a"), fp("")).replayed(), outcome("1"));
            b.release().unwrap();
            assert!(store.look_up(&id("b")).is_none());
            c.hold().unwrap();
            assert!(matches!(store.claim(&id("c"), fp("")), Ok(Claim::Held)));
            assert_eq!((store.stats().lost, store.stats().in_flight), (0, 0));
        }
    }
}

#[test]
fn r10_a_lapsed_claim_is_held_by_default() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE - MS);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::InFlight(_))));
    clock.advance(MS);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    assert!(matches!(store.observe(&id("k"), fp("")), Some(Claim::Held)));
    let stats = store.stats();
    assert_eq!((stats.lapsed, stats.held, stats.taken_over, stats.in_flight), (1, 1, 0, 0));
    drop(permit);
}

#[test]
fn r10_a_lapsed_claim_is_taken_over_where_that_was_chosen() {
    let (store, clock) = taking_over();
    let first = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE - MS);
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    clock.advance(MS);
    let second = store.claim(&id("k"), fp("")).won();
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::InFlight(_))));
    let stats = store.stats();
    assert_eq!((stats.lapsed, stats.held, stats.taken_over, stats.in_flight), (1, 0, 1, 1));
    // Who waited for the first waits for the second.
    assert_eq!(task.wakes(), 1);
    assert!(task.poll().is_none());
    assert_eq!(first.complete(outcome("1")).unwrap_err().cause(), LostCause::Ended);
    second.complete(outcome("2")).unwrap();
    assert_eq!(task.poll().completed(), outcome("2"));
}

#[test]
fn r10_a_takeover_by_another_body_is_a_mismatch() {
    let (store, clock) = taking_over();
    let permit = store.claim(&id("k"), fp("x")).won();
    clock.advance(LEASE);
    store.sweep();
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    assert_eq!(store.stats().taken_over, 0);
    permit.renew().unwrap();
    permit.complete(outcome("1")).unwrap();
    assert_eq!(store.claim(&id("k"), fp("x")).replayed(), outcome("1"));
}

#[test]
fn r10_a_takeover_takes_the_very_record_that_was_seen() {
    // The owner shows a sign of life at the moment of the takeover: exactly one of them succeeds.
    let _watchdog = watchdog();
    let rounds = if cfg!(debug_assertions) { 2_000 } else { 50_000 };
    let (store, clock) = taking_over();
    let barrier = Barrier::new(2);
    let taken_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut dice = Dice::new(1);
            for round in 0..rounds {
                let owner = store.claim(&id("k"), same()).won();
                clock.advance(LEASE);
                barrier.wait();
                (0..dice.roll(100)).for_each(|_| std::hint::spin_loop());
                let alive = match round % 3 {
                    0 => owner.renew().is_ok(),
                    1 => owner.attend().is_ok(),
                    _ => owner.complete(outcome("1")).is_ok(),
                };
                barrier.wait();
                assert_eq!(alive, !taken_over.load(Ordering::SeqCst), "round {round}");
                assert!(store.forget_forced(&id("k")));
            }
        });
        let mut dice = Dice::new(2);
        for _ in 0..rounds {
            barrier.wait();
            (0..dice.roll(100)).for_each(|_| std::hint::spin_loop());
            let claim = store.claim(&id("k"), same()).unwrap();
            taken_over.store(matches!(claim, Claim::Won(_)), Ordering::SeqCst);
            // A permit that was won lives until the other has looked.
            barrier.wait();
        }
    });
    // Who comes first is up to the machine.
    assert_eq!((store.stats().keys, store.stats().in_flight), (0, 0));
}

/// Has `act` happen between the look of a claim at a lapsed record and its judgement: the claim
/// asks there for its fingerprint by the scheme of the record.
fn in_the_middle_of_a_claim(
    on_lapse: Lapse,
    act: impl FnOnce(&Store, Permit) -> Option<Permit>,
    check: impl FnOnce(&Store, Claim, Option<Permit>),
) {
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
    let by = |name| Fingerprint::builder(Scheme::named(name)).finish();
    let mut owner = Some((act, store.claim(&id("k"), by("old")).won()));
    clock.advance(LEASE);
    let mut left = None;
    let claim = store.claim_with(&id("k"), by("new"), |_| {
        if let Some((act, permit)) = owner.take() {
            left = act(&store, permit);
        }
        Some(by("old"))
    });
    check(&store, claim.unwrap(), left);
    assert_eq!((store.stats().in_flight, store.stats().waiters), (0, 0));
}

#[test]
fn r10_a_sign_of_life_in_the_middle_of_a_judgement_wins() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        for attends in [false, true] {
            let sign = |_: &Store, permit: Permit| {
                if attends { permit.attend() } else { permit.renew() }.unwrap();
                Some(permit)
            };
            in_the_middle_of_a_claim(on_lapse, sign, |store, claim, owner| {
                assert!(matches!(claim, Claim::InFlight(_)), "{on_lapse:?}: {claim:?}");
                owner.unwrap().complete(outcome("1")).unwrap();
                assert_eq!((store.stats().lapsed, store.stats().held), (0, 0));
            });
        }
    }
}

#[test]
fn r10_an_end_in_the_middle_of_a_judgement_wins() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        let complete = |_: &Store, permit: Permit| {
            permit.complete(outcome("1")).unwrap();
            None
        };
        in_the_middle_of_a_claim(on_lapse, complete, |_, claim, _| match claim {
            Claim::Replay(replay) => assert_eq!(replay.outcome(), &outcome("1")),
            other => panic!("{on_lapse:?}: {other:?}"),
        });
        let hold = |_: &Store, permit: Permit| {
            permit.hold().unwrap();
            None
        };
        in_the_middle_of_a_claim(on_lapse, hold, |store, claim, _| {
            assert!(matches!(claim, Claim::Held), "{on_lapse:?}: {claim:?}");
            assert_eq!((store.stats().held, store.stats().lapsed), (1, 0));
        });
        let release = |_: &Store, permit: Permit| {
            permit.release().unwrap();
            None
        };
        in_the_middle_of_a_claim(on_lapse, release, |_, claim, _| match claim {
            Claim::Won(permit) => permit.release().unwrap(),
            other => panic!("{on_lapse:?}: {other:?}"),
        });
        let forget = |store: &Store, permit: Permit| {
            assert!(store.forget_forced(&id("k")));
            Some(permit)
        };
        in_the_middle_of_a_claim(on_lapse, forget, |_, claim, old| match claim {
            Claim::Won(permit) => {
                assert!(old.unwrap().complete(outcome("1")).is_err());
                permit.release().unwrap();
            }
            other => panic!("{on_lapse:?}: {other:?}"),
        });
    }
}

#[test]
fn r10_of_two_takeovers_of_one_claim_one_wins() {
    let other = |store: &Store, permit: Permit| {
        let by_old = Fingerprint::builder(Scheme::named("old")).finish();
        store.claim(&id("k"), by_old).won().complete(outcome("2")).unwrap();
        Some(permit)
    };
    in_the_middle_of_a_claim(Lapse::TakeOver, other, |store, claim, old| {
        match claim {
            Claim::Replay(replay) => assert_eq!(replay.outcome(), &outcome("2")),
            other => panic!("{other:?}"),
        }
        assert!(old.unwrap().complete(outcome("1")).is_err());
        assert_eq!((store.stats().taken_over, store.stats().won), (1, 2));
    });
}

#[test]
fn r10_a_full_store_still_hands_a_lapsed_claim_over() {
    // It is no new identity (R25): what the old claim has taken goes to the new one.
    for shares in [false, true] {
        let (store, clock) = by_hand_with(|builder| {
            let builder = builder.on_lapse(Lapse::TakeOver);
            if shares { builder.max_keys_per_account(1) } else { builder.max_keys(1) }
        });
        let first = store.claim(&id("k"), fp("")).won();
        let before = store.stats();
        clock.advance(LEASE);
        let second = store.claim(&id("k"), fp("")).won();
        let after = store.stats();
        assert_eq!((after.keys, after.bytes, after.in_flight), (1, before.bytes, 1));
        assert!(first.complete(outcome("1")).is_err());
        second.complete(outcome("2")).unwrap();
        assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("2"));
        clock.advance(2 * DAY);
        store.sweep();
        assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
        store.claim(&id("other"), fp("")).won().release().unwrap();
    }
}

#[test]
fn r11_a_permit_that_is_dropped_or_panics_holds() {
    let (store, _) = by_hand();
    drop(store.claim(&id("k"), fp("")).won());
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _permit = store.claim(&id("l"), fp("")).won();
        panic!("in the work");
    }));
    assert!(panicked.is_err());
    // Neither blocked nor told "in flight".
    assert!(matches!(store.claim(&id("l"), fp("")), Ok(Claim::Held)));
    let stats = store.stats();
    assert_eq!((stats.abandoned, stats.held, stats.in_flight, stats.lapsed), (2, 2, 0, 0));
}

#[test]
fn r11_a_dropped_permit_releases_where_that_was_chosen() {
    let (store, _) = by_hand_with(|builder| builder.on_abandon(Abandon::Release));
    drop(store.claim(&id("k"), fp("x")).won());
    let permit = store.claim(&id("k"), fp("y")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("y")).pending());
    drop(permit);
    task.poll().yours().complete(outcome("1")).unwrap();
    let stats = store.stats();
    assert_eq!((stats.abandoned, stats.released, stats.held), (2, 2, 0));
}

#[test]
fn r11_a_verb_settles_once_and_dropping_after_it_does_nothing() {
    let (store, _) = by_hand();
    store.claim(&id("a"), fp("")).won().complete(outcome("1")).unwrap();
    store.claim(&id("b"), fp("")).won().release().unwrap();
    store.claim(&id("c"), fp("")).won().hold().unwrap();
    let stats = store.stats();
    assert_eq!((stats.abandoned, stats.lost), (0, 0));
    assert_eq!((stats.completed, stats.released, stats.held), (1, 1, 1));
}

#[test]
fn r11_those_who_wait_are_told_of_a_hold_at_once() {
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut tasks: Vec<_> =
        (0..3).map(|_| Task::listed(store.claim(&id("k"), fp("")).pending())).collect();
    drop(permit);
    for task in &mut tasks {
        assert_eq!(task.wakes(), 1);
        assert!(matches!(task.poll(), Some(Settled::Held)));
    }
}

#[test]
fn r11_a_hold_lasts_for_the_retention_and_counts_from_the_hold() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE / 2);
    permit.hold().unwrap();
    clock.advance(DAY - MS);
    store.sweep();
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    assert_eq!(store.look_up(&id("k")).unwrap().remaining, MS);
    clock.advance(MS);
    assert!(store.look_up(&id("k")).is_none());
    store.claim(&id("k"), fp("other")).won().release().unwrap();
}

#[test]
fn r11_a_late_completion_of_a_hold_counts_its_retention_anew() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    store.sweep();
    clock.advance(DAY / 2);
    permit.complete(outcome("late")).unwrap();
    clock.advance(DAY - MS);
    store.sweep();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("late"));
    clock.advance(MS);
    store.claim(&id("k"), fp("")).won().release().unwrap();
}

#[test]
fn r11_an_operator_resolves_a_hold_with_an_outcome_or_by_release() {
    let (store, clock) = by_hand();
    store.claim(&id("k"), fp("")).won().hold().unwrap();
    clock.advance(DAY / 2);
    store.resolve(&id("k"), Resolution::Complete(outcome("found"))).unwrap();
    clock.advance(DAY - MS);
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("found"));
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));

    store.claim(&id("l"), fp("")).won().hold().unwrap();
    store.resolve(&id("l"), Resolution::Release).unwrap();
    assert!(store.look_up(&id("l")).is_none());
    store.claim(&id("l"), fp("other")).won().release().unwrap();
    assert_eq!(store.stats().resolved, 2);
}

#[test]
fn r11_resolve_changes_nothing_that_is_not_held() {
    let (store, clock) = taking_over();
    let both = || [Resolution::Complete(outcome("no")), Resolution::Release];
    for resolution in both() {
        assert_eq!(store.resolve(&id("k"), resolution), Err(ResolveError::Absent));
    }
    let permit = store.claim(&id("k"), fp("")).won();
    for resolution in both() {
        assert_eq!(store.resolve(&id("k"), resolution), Err(ResolveError::InFlight));
    }
    permit.complete(outcome("1")).unwrap();
    for resolution in both() {
        assert_eq!(store.resolve(&id("k"), resolution), Err(ResolveError::Completed));
    }
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("1"));
    clock.advance(DAY);
    for resolution in both() {
        assert_eq!(store.resolve(&id("k"), resolution), Err(ResolveError::Absent));
    }
    assert_eq!((store.stats().resolved, store.stats().lost), (0, 0));
}

#[test]
fn r11_an_outcome_that_finds_no_room_resolves_nothing_and_comes_back() {
    let (store, _) = by_hand_with(|builder| builder.max_bytes(16 << 10));
    store.claim(&id("k"), fp("")).won().hold().unwrap();
    let before = store.stats();
    let large = Outcome::new(200).body(vec![7; 16 << 10]);
    let refused = store.resolve(&id("k"), Resolution::Complete(large.clone()));
    assert_eq!(refused, Err(ResolveError::Full(large)));
    assert_eq!(store.stats(), before);
    assert!(matches!(store.claim(&id("k"), fp("")), Ok(Claim::Held)));
    store.resolve(&id("k"), Resolution::Complete(outcome("smaller"))).unwrap();
    assert_eq!(store.claim(&id("k"), fp("")).replayed(), outcome("smaller"));
}

#[test]
fn r12_what_counts_is_what_was_captured_at_claim_time() {
    let (store, _) = by_hand();
    let mut key = b"key-1".to_vec();
    let permit =
        store.claim(&oncekey::Identity::new("acct", "POST /charges", &key).unwrap(), fp("x")).won();
    let token = permit.token();
    key.copy_from_slice(b"key-2");
    assert_eq!(permit.identity(), id("key-1"));
    assert_eq!(permit.fingerprint(), fp("x"));
    permit.renew().unwrap();
    assert_eq!(permit.token(), token);
    permit.complete(outcome("1")).unwrap();
    assert_eq!(store.claim(&id("key-1"), fp("x")).replayed(), outcome("1"));
    assert!(store.look_up(&id("key-2")).is_none());
}

#[test]
fn r12_a_permit_may_go_to_another_thread_and_outlive_the_store() {
    let _watchdog = watchdog();
    let (store, _) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    drop(store);
    thread::spawn(move || permit.complete(outcome("1")).unwrap()).join().unwrap();
    assert_eq!(task.poll().completed(), outcome("1"));
}

#[test]
fn r08_the_ends_of_leases_are_exact_to_the_millisecond() {
    let (store, clock) = by_hand_with(|builder| builder.lease(Duration::from_nanos(1)));
    assert_eq!(store.lease(), MS);
    let _permit = store.claim(&id("k"), fp("")).won();
    assert_eq!(state(&store), Some(EntryState::InFlight));
    clock.advance(MS);
    assert_eq!(state(&store), Some(EntryState::Held));
}
