//! Who is taken for alive, and what becomes of the claims of those that are not.

use super::*;

/// A node that shows no sign of life: its claim is taken over, and nothing it does afterwards counts.
#[tokio::test(flavor = "multi_thread")]
async fn case_013_case_033_case_036_a_silent_owner_is_taken_over_and_its_late_steps_are_lost() {
    let _watchdog = watchdog();
    for place in places("case_036").await {
        let (a, wire) = node(&place, Duration::from_secs(1), Lapse::TakeOver).await;
        let (b, _) = node(&place, LONG, Lapse::TakeOver).await;
        let late = [won(&a, "completed").await, won(&a, "released").await];
        // Before it lapses: in flight, on every node.
        let claim = b.claim(&id("completed"), same()).await;
        let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{}: {claim:?}", place.name) };
        *wire.beats.lock().unwrap() = Weather::Down;
        let Ok(TieredSettled::Yours(second)) = pending.wait().await else { panic!() };
        lapsed(&place, "released").await;
        let third = won(&b, "released").await;
        *wire.beats.lock().unwrap() = Weather::Fair;
        second.complete(outcome("b")).await.unwrap();
        until(async || !a.stats().is_cut_off).await;
        let [completed, released] = late;
        let lost = completed.complete(outcome("a")).await.unwrap_err();
        assert_eq!(lost.found().unwrap().state, State::Completed(outcome("b")), "{}", place.name);
        assert_eq!((a.stats().lost, a.stats().double_runs), (1, 1), "{}", place.name);
        assert!(released.release().await.is_err(), "{}", place.name);
        third.complete(outcome("b")).await.unwrap();
        for node in [&a, &b] {
            assert_eq!(replayed(node, "completed").await, outcome("b"), "{}", place.name);
        }
    }
}

/// Whoever asked for a key goes away before it was told, at any await: the key is free again.
#[tokio::test(flavor = "multi_thread")]
async fn t4_a_claim_whose_caller_went_away_shuts_nobody_out() {
    let _watchdog = watchdog();
    for place in places("t4").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        for polls in 0.. {
            let key = polls.to_string();
            let claim = given_up(a.claim(&id(&key), same()), polls).await;
            let is_told = claim.is_some();
            if let Some(claim) = claim {
                let Ok(TieredClaim::Won(permit)) = claim else { panic!("{claim:?}") };
                permit.release().await.unwrap();
            }
            until(async || match b.claim(&id(&key), same()).await {
                Ok(TieredClaim::Won(permit)) => {
                    permit.complete(outcome("b")).await.unwrap();
                    true
                }
                Ok(TieredClaim::InFlight(_)) => false,
                other => panic!("{}, {polls}: {other:?}", place.name),
            })
            .await;
            if is_told {
                break;
            }
        }
    }
}

/// The lease of a process is one row, whatever it owns: with it all its claims lapse and live. A
/// transaction that has one of the records in its hands keeps no heartbeat waiting.
#[tokio::test(flavor = "multi_thread")]
async fn t10_one_heartbeat_is_for_all_claims_and_waits_for_no_record() {
    const CLAIMS: usize = 30;
    let _watchdog = watchdog();
    for place in places("t10").await {
        let (a, wire) = node(&place, Duration::from_secs(1), Lapse::TakeOver).await;
        let keys: Vec<_> = (0..CLAIMS).map(|n| n.to_string()).collect();
        let mut permits = Vec::new();
        for key in &keys {
            permits.push(won(&a, key).await);
        }
        *wire.beats.lock().unwrap() = Weather::Down;
        for key in &keys {
            lapsed(&place, key).await;
        }
        let token = found(&place, "0").await.unwrap().token;
        let open = match place.books.begin().await {
            Some(mut open) => {
                assert_eq!(open.complete("0", token, &outcome("in")).await, Landed::Done);
                Some(open)
            }
            None => None,
        };
        place.tier.beat(token.owner(), LONG).await.unwrap();
        for key in &keys {
            assert_eq!(state(&place, key).await, Some(State::InFlight), "{}, {key}", place.name);
        }
        if let Some(open) = open {
            open.end(true).await;
            assert_eq!(state(&place, "0").await, Some(State::Completed(outcome("in"))));
        }
    }
}
