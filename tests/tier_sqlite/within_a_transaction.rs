//! Completions in the user's own transaction.

use super::*;

async fn with_ledger(place: &Place) -> (SqliteTier, SqlitePool) {
    let pool = place.pool().await;
    let table = "CREATE TABLE ledger (key TEXT NOT NULL)";
    sqlx::query(table).execute(&pool).await.unwrap();
    (SqliteTier::open(pool.clone()).await.unwrap(), pool)
}

async fn rows(pool: &SqlitePool) -> i64 {
    let count = sqlx::query("SELECT count(*) FROM ledger").fetch_one(pool).await;
    count.unwrap().get(0)
}

const ROW: &str = "INSERT INTO ledger (key) VALUES ('k')";

#[tokio::test]
async fn t6_a_commit_makes_the_row_and_the_outcome_appear() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    won(&tier, "k", 1).await;
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::query(ROW).execute(&mut *tx).await.unwrap();
    let done = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("a")), DAY).await;
    assert_eq!(done.unwrap(), Landed::Done);
    assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
    tx.commit().await.unwrap();
    let completed = Some(State::Completed(outcome("a")));
    assert_eq!((state(&tier, "k").await, rows(&pool).await), (completed, 1));
    // Who did not get the answer of the commit asks again.
    let again = tier.complete(id("k"), token(1), Some(&outcome("b")), DAY).await.unwrap();
    assert_eq!(again, Landed::Done);
    assert_eq!(state(&tier, "k").await, Some(State::Completed(outcome("a"))));
}

/// Whoever runs his transaction again, because the answer to its commit was lost, must not have its rows twice.
#[tokio::test]
async fn t6_a_second_transaction_of_what_was_committed_is_lost() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    won(&tier, "k", 1).await;
    for is_second in [false, true] {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query(ROW).execute(&mut *tx).await.unwrap();
        let landed = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("a")), DAY).await;
        match landed.unwrap() {
            Landed::Done => {
                assert!(!is_second);
                tx.commit().await.unwrap();
            }
            Landed::Lost(found) => {
                assert!(is_second);
                assert_eq!(found.unwrap().token, token(1));
                tx.rollback().await.unwrap();
            }
        }
    }
    assert_eq!(rows(&pool).await, 1);
}

#[tokio::test]
async fn t6_a_rollback_leaves_neither() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    won(&tier, "k", 1).await;
    for is_dropped in [false, true] {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query(ROW).execute(&mut *tx).await.unwrap();
        let done = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
        assert_eq!(done.unwrap(), Landed::Done);
        if is_dropped {
            drop(tx)
        } else {
            tx.rollback().await.unwrap()
        }
        assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
    }
    let done = tier.complete(id("k"), token(1), None, DAY).await.unwrap();
    assert_eq!(done, Landed::Done);
    assert_eq!(state(&tier, "k").await, Some(State::NotKept));
}

#[tokio::test]
async fn case_036_a_stale_token_is_lost_there_too() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    let pool = place.pool().await;
    let tier = SqliteTier::builder().clock(clock.clone()).open(pool.clone()).await.unwrap();
    won(&tier, "k", 1).await;
    clock.advance(LEASE);
    tier.beat(8, LEASE).await.unwrap();
    let next = NewClaim { token: Token::new(8, 1), ..claim(0) };
    let taken = tier.take_over(id("k"), token(1), next).await.unwrap();
    assert_eq!(taken, Claimed::Won { checkpoint: None });
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let late = tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome("late")), DAY).await;
    let Ok(Landed::Lost(Some(there))) = late else { panic!("{late:?}") };
    assert_eq!((there.token, there.state), (Token::new(8, 1), State::InFlight));
    tx.rollback().await.unwrap();
    assert_eq!(state(&tier, "k").await, Some(State::InFlight));
}

#[tokio::test]
async fn t3_given_up_in_the_middle_it_is_rolled_back_and_the_pool_is_usable() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    won(&tier, "k", 1).await;
    for polls in 0..40 {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query(ROW).execute(&mut *tx).await.unwrap();
        let outcome = outcome("a");
        let mut done = Box::pin(tier.complete_in(&mut tx, id("k"), token(1), Some(&outcome), DAY));
        for _ in 0..polls {
            if futures_util::FutureExt::now_or_never(&mut done).is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(done);
        drop(tx);
        assert_eq!((state(&tier, "k").await, rows(&pool).await), (Some(State::InFlight), 0));
    }
    works(&tier).await;
    let done = tier.complete(id("k"), token(1), None, DAY).await.unwrap();
    assert_eq!(done, Landed::Done);
}

#[tokio::test]
async fn t6_what_is_no_such_transaction_is_refused() {
    let _watchdog = watchdog();
    let (place, elsewhere) = (Place::new(), Place::new());
    let (tier, pool) = with_ledger(&place).await;
    let (_other, other) = with_ledger(&elsewhere).await;
    won(&tier, "k", 1).await;
    let unsafer = place.options().synchronous(SqliteSynchronous::Normal);
    let unsafer = SqlitePool::connect_with(unsafer).await.unwrap();

    let mut none = pool.acquire().await.unwrap();
    let refused = tier.complete_in(&mut none, id("k"), token(1), None, DAY).await;
    assert_unusable(refused, "no transaction");
    for (pool, text) in [(&other, "another database"), (&unsafer, "less durable")] {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let refused = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
        assert_unusable(refused, text);
    }
    assert_eq!(state(&tier, "k").await, Some(State::InFlight));
}

#[tokio::test]
async fn t6_a_permit_completes_its_claim_in_it() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    let store = Store::builder().build().unwrap();
    let store = Tiered::open(store, tier.clone(), Lapse::TakeOver).await.unwrap();
    for (key, is_committed) in [("rolled back", false), ("committed", true)] {
        let TieredClaim::Won(permit) = store.claim(&id(key), fp("a")).await.unwrap() else {
            panic!("not won")
        };
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query(ROW).execute(&mut *tx).await.unwrap();
        let staged = permit.complete_in(&mut tier.within(&mut tx), outcome("a")).await.unwrap();
        if is_committed {
            tx.commit().await.unwrap();
            staged.publish().await.unwrap();
            assert_eq!(state(&tier, key).await, Some(State::Completed(outcome("a"))));
        } else {
            tx.rollback().await.unwrap();
            staged.rolled_back().await.unwrap();
            assert_eq!(state(&tier, key).await, None);
        }
    }
    assert_eq!(rows(&pool).await, 1);
}

#[tokio::test]
async fn t6_one_that_has_read_before_another_wrote_is_told_to_begin_otherwise() {
    let _watchdog = watchdog();
    let place = Place::new();
    let (tier, pool) = with_ledger(&place).await;
    won(&tier, "k", 1).await;
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("SELECT * FROM ledger").fetch_all(&mut *tx).await.unwrap();
    works(&tier).await;
    let refused = tier.complete_in(&mut tx, id("k"), token(1), None, DAY).await;
    let Err(TierError::Unavailable(error)) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
    tx.rollback().await.unwrap();
}
