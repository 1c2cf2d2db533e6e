//! What an opening finds that an earlier one has left, or another process has.

use super::*;

#[tokio::test]
async fn t7_what_was_finished_replays_and_what_was_not_is_lapsed_at_once() {
    let _watchdog = watchdog();
    let place = Place::new();
    let tier = place.open().await;
    won(&tier, "finished", 1).await;
    won(&tier, "unfinished", 2).await;
    won(&tier, "held", 3).await;
    let body = Outcome::new(201).header("a", "1").header("a", b"\xff").body("b");
    let _ = tier.complete(id("finished"), token(1), Some(&body), DAY).await.unwrap();
    let left = tier.checkpoint(id("unfinished"), token(2), "half".into()).await.unwrap();
    assert_eq!(left, Landed::Done);
    let _ = tier.hold(id("held"), token(3), DAY).await.unwrap();
    assert_eq!(state(&tier, "unfinished").await, Some(State::InFlight));
    tier.close().await;

    let tier = place.open().await;
    assert_eq!(state(&tier, "finished").await, Some(State::Completed(body)));
    assert_eq!(state(&tier, "unfinished").await, Some(State::Lapsed));
    assert_eq!(state(&tier, "held").await, Some(State::Held));
    tier.beat(8, LEASE).await.unwrap();
    let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
    let taken = tier.take_over(id("unfinished"), token(2), next).await.unwrap();
    assert_eq!(taken, Claimed::Won { checkpoint: Some("half".into()) });
}

#[tokio::test]
async fn t7_while_another_process_has_it_open_owners_live_by_their_heartbeats() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    let other = place.open_at(&clock).await;
    let tier = place.open_at(&clock).await;
    won(&tier, "k", 1).await;
    tier.close().await;
    let tier = place.open_at(&clock).await;
    assert_eq!(state(&tier, "k").await, Some(State::InFlight));
    clock.advance(LEASE);
    assert_eq!(state(&tier, "k").await, Some(State::Lapsed));
    assert_eq!(state(&other, "k").await, Some(State::Lapsed));
}

#[tokio::test]
async fn r23_time_goes_on_from_the_last_stamp_though_the_wall_clock_was_set_back() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    clock.advance(10 * DAY);
    let tier = place.open_at(&clock).await;
    won(&tier, "k", 1).await;
    let _ = tier.complete(id("k"), token(1), Some(&outcome("a")), HOUR).await.unwrap();
    tier.close().await;

    let clock = ManualClock::new();
    let tier = place.open_at(&clock).await;
    assert_eq!(found(&tier, "k").await.unwrap().remaining, HOUR);
    clock.advance(HOUR);
    assert_eq!(found(&tier, "k").await, None);
    won(&tier, "k", 2).await;
}

#[tokio::test]
async fn r23_no_step_of_the_wall_clock_comes_between_two_that_have_it_open() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    clock.advance(DAY);
    let first = place.open_at(&clock).await;
    first.beat(OWNER, LEASE).await.unwrap();
    // Longer than any machine has been up, shorter than since 1970.
    let long = NewClaim { retention: 10_000 * DAY, ..claim(1) };
    let claimed = first.claim(id("k"), long).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None });
    // Whose clock shows the time since the machine was started, as that of all that join.
    let real = place.open().await;
    assert_ne!(found(&real, "k").await, None);
    real.close().await;
    works(&first).await;
}

#[tokio::test]
async fn t4_a_closed_tier_is_unavailable_and_its_clones_are_closed_too() {
    let _watchdog = watchdog();
    let place = Place::new();
    let tier = place.open().await;
    let clone = tier.clone();
    tier.close().await;
    tier.close().await;
    let unavailable = |error| matches!(error, TierError::Unavailable(_));
    assert!(unavailable(clone.beat(OWNER, LEASE).await.unwrap_err()));
    assert!(unavailable(clone.claim(id("k"), claim(1)).await.unwrap_err()));
    assert!(unavailable(clone.look_up(id("k")).await.unwrap_err()));
}

#[tokio::test]
async fn t3_what_has_ended_is_reaped_however_much_it_is() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    let tier = place.open_at(&clock).await;
    tier.beat(OWNER, LEASE).await.unwrap();
    let keys: Vec<String> = (0..1_200).map(|number| format!("k{number}")).collect();
    let claims = keys.iter().zip(0..).map(|(key, number)| tier.claim(id(key), claim(number)));
    for claimed in futures_util::future::join_all(claims).await {
        assert_eq!(claimed.unwrap(), Claimed::Won { checkpoint: None });
    }
    assert_eq!(tier.reap(usize::MAX).await.unwrap(), 0);
    clock.advance(2 * DAY);
    assert_eq!(tier.reap(7).await.unwrap(), 7);
    assert_eq!(tier.reap(usize::MAX).await.unwrap(), 1_193);
    let pool = place.pool().await;
    let left = sqlx::query("SELECT count(*) FROM idempotency_keys").fetch_one(&pool).await;
    assert_eq!(left.unwrap().get::<i64, _>(0), 0);
}
