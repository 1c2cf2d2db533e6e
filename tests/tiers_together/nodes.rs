//! What nodes on one tier see of each other.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn t1_claim_and_completion_are_in_the_tier_before_the_caller_goes_on() {
    let _watchdog = watchdog();
    for place in places("t1").await {
        let (node, wire) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&node, "k").await;
        let there = found(&place, "k").await.unwrap();
        assert_eq!((there.state, there.fingerprint), (State::InFlight, same()), "{}", place.name);
        let Ok(TieredClaim::InFlight(pending)) = node.claim(&id("k"), same()).await else {
            panic!("{}: it won", place.name)
        };
        let told = async {
            let settled = pending.wait().await;
            assert!(matches!(settled, Ok(TieredSettled::Completed(_))), "{settled:?}");
            state(&place, "k").await
        };
        let (done, there) = tokio::join!(permit.complete(outcome("1")), told);
        assert!(done.unwrap().kept);
        let completed = Some(State::Completed(outcome("1")));
        assert_eq!(there, completed, "{}: it was told before", place.name);
        assert_eq!(state(&place, "k").await, completed, "{}", place.name);
        // A replay asks nobody.
        let asked = [CLAIM, COMPLETE, LOOK_UP].map(|verb| wire.calls(verb));
        assert_eq!(replayed(&node, "k").await, outcome("1"));
        assert_eq!([CLAIM, COMPLETE, LOOK_UP].map(|verb| wire.calls(verb)), asked);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_109_nodes_see_each_other_and_a_later_one_replays() {
    let _watchdog = watchdog();
    for place in places("case_109").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(b.look_up(&id("k")).await.unwrap(), None, "{}", place.name);
        won(&a, "k").await.complete(outcome("a")).await.unwrap();
        assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
        assert_eq!(replayed(&b, "k").await, outcome("a"), "{}", place.name);
        drop(a);
        let (c, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(replayed(&c, "k").await, outcome("a"), "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_029_two_thousand_duplicates_ask_the_tier_a_few_times() {
    let _watchdog = watchdog();
    for place in places("case_029").await {
        let (node, wire) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&node, "k").await;
        let mut waiters = Vec::new();
        for n in 0..2_000 {
            let claim = node.claim(&id("k"), same()).await;
            let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{claim:?}") };
            if n % 2 == 0 {
                waiters.push(tokio::spawn(pending.wait()));
            }
        }
        permit.complete(outcome("1")).await.unwrap();
        for waiter in waiters {
            let settled = waiter.await.unwrap();
            assert!(matches!(settled, Ok(TieredSettled::Completed(_))), "{settled:?}");
        }
        let calls = [CLAIM, COMPLETE, LOOK_UP].map(|verb| wire.calls(verb));
        assert_eq!(calls, [1, 1, 0], "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t5_a_duplicate_on_another_node_waits_and_gets_the_same_bytes() {
    let _watchdog = watchdog();
    for place in places("t5").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&a, "k").await;
        let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
        let waiter = tokio::spawn(pending.wait());
        until(async || b.store().stats().waiters == 1).await;
        let bytes = Outcome::new(201).header("x", b"\xff\x00").header("x", "").body(vec![0, 255]);
        permit.complete(bytes.clone()).await.unwrap();
        match waiter.await.unwrap() {
            Ok(TieredSettled::Completed(replay)) => assert_eq!(replay.into_outcome(), bytes),
            other => panic!("{}: {other:?}", place.name),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t9_what_is_forgotten_is_forgotten_on_other_nodes() {
    let _watchdog = watchdog();
    for place in places("t9").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, wire) = node(&place, LONG, Lapse::Hold).await;
        // It has asked once, so that it is told from here on.
        until(async || wire.calls(tiers::OTHERS) > 0).await;
        won(&a, "k").await.complete(outcome("1")).await.unwrap();
        assert_eq!(replayed(&b, "k").await, outcome("1"));
        assert_eq!(a.forget(&id("k"), false).await.unwrap(), Forgotten::Gone);
        until(async || matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Won(_)))).await;
    }
}
