//! While others have the lock of the database.

use super::*;

async fn impatient(place: &Place) -> (SqliteTier, SqlitePool) {
    let pool = place.pool().await;
    let tier = SqliteTier::builder().patience(Duration::from_millis(30)).open(pool.clone());
    (tier.await.unwrap(), pool)
}

#[tokio::test]
async fn t10_a_heartbeat_waits_for_no_business_transaction() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = impatient(&place).await;
    let tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    // Neither does one who reads.
    tier.beat(OWNER, LEASE).await.unwrap();
    assert_eq!(found(&tier, "k").await, None);
    tx.rollback().await.unwrap();
    won(&tier, "k", 1).await;
}

#[tokio::test]
async fn t6_a_step_waits_for_the_transaction_that_has_the_lock_and_not_for_ever() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = impatient(&place).await;
    won(&tier, "k", 1).await;
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let done = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("in")), DAY).await;
    assert_eq!(done.unwrap(), Landed::Done);
    let beside = outcome("beside");
    let steps = (0..20).map(|_| tier.complete(id("k"), token(1), Some(&beside), DAY));
    for waited in futures_util::future::join_all(steps).await {
        let Err(TierError::Unavailable(error)) = waited else { panic!("{waited:?}") };
        assert!(error.to_string().contains("locked the database"), "{error}");
    }
    tx.commit().await.unwrap();
    let late = tier.complete(id("k"), token(1), Some(&beside), DAY).await.unwrap();
    assert_eq!(late, Landed::Done);
    assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("in"))));
}

#[tokio::test]
async fn case_100_a_claim_that_waits_for_anothers_commit_tells_what_is_there() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (first, second) = (place.open().await, place.open().await);
    second.beat(8, LEASE).await.unwrap();
    won(&first, "k", 1).await;
    let pool = place.pool().await;
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let done = first.complete_in(&mut tx, id("k"), token(1), Some(&outcome("a")), DAY).await;
    assert_eq!(done.unwrap(), Landed::Done);
    let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
    let claimed = tokio::spawn(async move { second.claim(id("k"), next).await });
    tokio::task::yield_now().await;
    tx.commit().await.unwrap();
    let Claimed::Met(met) = claimed.await.unwrap().unwrap() else { panic!("it won") };
    assert_eq!(met.state, State::Completed(outcome("a")));
}
