//! A tier that is down.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn t2_case_105_outages_at_the_start_at_the_claim_and_at_the_completion() {
    let _watchdog = watchdog();
    for place in places("case_105").await {
        let (a, wire) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        wire.becomes(Weather::Down);
        let store = Store::builder().build().unwrap();
        assert!(Tiered::open(store, wire.clone(), Lapse::Hold).await.is_err(), "{}", place.name);
        let refused = a.claim(&id("refused"), same()).await;
        assert!(matches!(refused, Err(TieredError::Unavailable { .. })), "{}", place.name);
        assert_eq!(place.tier.look_up(id("refused")).await.unwrap(), None, "{}", place.name);
        for (key, weather) in [("down", Weather::Down), ("deaf", Weather::Deaf)] {
            wire.becomes(Weather::Fair);
            until(async || !a.stats().is_cut_off).await;
            let permit = won(&a, key).await;
            wire.becomes(weather);
            assert!(permit.complete(outcome(key)).await.unwrap().kept);
            assert_eq!(replayed(&a, key).await, outcome(key));
            wire.becomes(Weather::Fair);
            until(async || a.stats().unwritten == 0).await;
            assert_eq!(replayed(&b, key).await, outcome(key), "{}", place.name);
            assert_eq!((a.stats().lost, a.stats().given_up), (0, 0), "{}", place.name);
        }
    }
}
