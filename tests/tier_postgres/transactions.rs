//! Locks, and transactions of the user's own.

use super::*;

/// The race of case 100: a snapshot that is older than the winner of a lost insert.
#[tokio::test]
async fn case_100_a_claim_that_waited_for_an_open_one_sees_what_became_of_it() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case100").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let tier = tier_in("case100").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    for (commits, inside) in [(true, false), (false, false), (true, true), (false, true)] {
        let key = format!("{commits}-{inside}");
        let mut transaction = pool.begin().await.unwrap();
        tier.claim_in(&mut transaction, id(&key), claim(1, 1, "a")).await.won();
        let second = tokio::spawn({
            let (tier, pool, key) = (tier.clone(), pool.clone(), key.clone());
            async move {
                if !inside {
                    return tier.claim(id(&key), claim(1, 2, "b")).await;
                }
                // Where a failure would end the transaction, and nothing can be tried again.
                let mut own = pool.begin().await.unwrap();
                let claimed = tier.claim_in(&mut own, id(&key), claim(1, 2, "b")).await;
                own.commit().await.unwrap();
                claimed
            }
        });
        until_blocked(&pool, "case100", 1).await;
        if commits {
            transaction.commit().await.unwrap();
            let found = second.await.unwrap().met();
            assert_eq!((found.token, found.state), (Token::new(1, 1), State::InFlight));
            assert_eq!(found.fingerprint, fp("a"), "a mismatch can be told");
        } else {
            transaction.rollback().await.unwrap();
            second.await.unwrap().won();
        }
    }
}

/// The winner that all others have lost against vanishes, again and again.
#[tokio::test]
async fn t4_of_many_that_lost_to_one_that_vanished_one_owns() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("vanished").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let tier = tier_in("vanished").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    for round in 0..20 {
        let key = format!("round-{round}");
        let mut transaction = pool.begin().await.unwrap();
        tier.claim_in(&mut transaction, id(&key), claim(1, 1, "a")).await.won();
        let others: Vec<_> = (2..12)
            .map(|number| {
                let (tier, key) = (tier.clone(), key.clone());
                tokio::spawn(async move { tier.claim(id(&key), claim(1, number, "a")).await })
            })
            .collect();
        until_blocked(&pool, "vanished", 10).await;
        transaction.rollback().await.unwrap();
        let mut winners = Vec::new();
        let mut owners = Vec::new();
        for (number, other) in (2..).zip(others) {
            match other.await.unwrap().unwrap() {
                Claimed::Won { .. } => winners.push(Token::new(1, number)),
                Claimed::Met(found) => owners.push(found.token),
            }
        }
        assert_eq!(winners.len(), 1);
        assert!(owners.iter().all(|owner| *owner == winners[0]), "{winners:?} {owners:?}");
    }
}

#[tokio::test]
async fn case_103_a_claim_that_meets_a_key_leaves_the_transaction_usable() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case103").await else { return };
    sql(&pool, "CREATE TABLE case103.ledger (what text NOT NULL)").await;
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("committed"), claim(1, 1, "a")).await.won();
    let mut open = pool.begin().await.unwrap();
    tier.claim_in(&mut open, id("open"), claim(1, 2, "a")).await.won();
    let hasty = tier_in("case103").lock_limit(MS).connect(pool.clone()).await.unwrap();
    for (key, token) in [("committed", Token::new(1, 1)), ("open", Token::new(0, 0))] {
        let mut transaction = pool.begin().await.unwrap();
        let found = hasty.claim_in(&mut transaction, id(key), claim(1, 3, "a")).await.met();
        assert_eq!((found.state, found.token), (State::InFlight, token), "{key}");
        // Nobody alive claims nothing, and leaves it usable too.
        let unborn = hasty.claim_in(&mut transaction, id("new"), claim(9, 1, "a")).await;
        assert!(matches!(unborn, Err(TierError::OwnerLapsed)), "{unborn:?}");
        sqlx::query("INSERT INTO case103.ledger VALUES ('used')")
            .execute(&mut *transaction)
            .await
            .unwrap();
        // The time limits of the transaction are its own again.
        let row = sqlx::raw_sql("SHOW lock_timeout").fetch_one(&mut *transaction).await.unwrap();
        assert_eq!(row.get::<String, _>(0), "0");
        transaction.commit().await.unwrap();
    }
    assert_eq!(count(&pool, "SELECT count(*) FROM case103.ledger").await, 2);
    // And by itself: in flight, by nobody that can be named.
    let found = hasty.claim(id("open"), claim(1, 4, "b")).await.met();
    assert_eq!((found.state, found.token), (State::InFlight, Token::new(0, 0)));
    assert_eq!(found.fingerprint, fp("b"));
    // Claimed, done and completed in one transaction.
    let answer = outcome("all in one");
    let token = Token::new(1, 2);
    let landed = tier.complete_in(&mut open, id("open"), token, Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    open.commit().await.unwrap();
    let found = hasty.claim(id("open"), claim(1, 4, "a")).await.met();
    assert_eq!(found.state, State::Completed(answer));
}

/// The rows of the work and the outcome become visible together or not at all.
#[tokio::test]
async fn t6_the_outcome_shares_the_fate_of_the_transaction() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("fate").await else { return };
    sql(&pool, "CREATE TABLE fate.ledger (what text NOT NULL)").await;
    tier.beat(1, LEASE).await.unwrap();
    let (answer, token) = (outcome("charged"), Token::new(1, 1));
    for commits in [false, true] {
        let id = id("charge");
        if !commits {
            tier.claim(id, claim(1, 1, "a")).await.won();
        }
        let mut transaction = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO fate.ledger VALUES ('7')")
            .execute(&mut *transaction)
            .await
            .unwrap();
        let landed = tier.complete_in(&mut transaction, id, token, Some(&answer), DAY).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        // Nobody who only looks waits for it, nor a claim.
        let found = tier.look_up(id).await.unwrap().unwrap();
        assert_eq!(found.state, State::InFlight);
        let found = tier.claim(id, claim(1, 2, "b")).await.met();
        assert_eq!((found.state, found.fingerprint), (State::InFlight, fp("a")));
        let (rows, state) = if commits {
            transaction.commit().await.unwrap();
            (1, State::Completed(answer.clone()))
        } else {
            transaction.rollback().await.unwrap();
            (0, State::InFlight)
        };
        assert_eq!(count(&pool, "SELECT count(*) FROM fate.ledger").await, rows);
        assert_eq!(tier.look_up(id).await.unwrap().unwrap().state, state);
    }
    // A stale token is lost, and the transaction can be rolled back in peace. So is the own one once it
    // was committed: whoever runs his transaction again because that answer was lost must not have its
    // rows twice.
    for lost in [Token::new(1, 9), token] {
        let mut again = pool.begin().await.unwrap();
        let landed = tier.complete_in(&mut again, id("charge"), lost, None, DAY).await.unwrap();
        let Landed::Lost(Some(found)) = landed else { panic!("{landed:?}") };
        assert_eq!((found.token, found.state), (token, State::Completed(answer.clone())));
        sqlx::query("INSERT INTO fate.ledger VALUES ('8')").execute(&mut *again).await.unwrap();
        again.rollback().await.unwrap();
    }
}

/// The client has sent its commit and got no answer: the transaction is over, one way or the
/// other, or it is still open on the server.
#[tokio::test]
async fn t6_a_commit_whose_answer_was_lost_is_settled_by_a_write() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("lost").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let patient = tier_in("lost").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let hasty = tier_in("lost").lock_limit(MS).connect(pool.clone()).await.unwrap();
    let (answer, token) = (outcome("charged"), Token::new(1, 1));
    for (key, commits) in [("commits", true), ("ends", false)] {
        let id = id(key);
        tier.claim(id, claim(1, 1, "a")).await.won();
        let mut transaction = pool.begin().await.unwrap();
        let landed = tier.complete_in(&mut transaction, id, token, Some(&answer), DAY).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        // Still open: unknown, after a time.
        for unknown in [
            hasty.release(id, token).await,
            hasty.complete(id, token, None, DAY).await,
            hasty.hold(id, token, DAY).await,
            hasty.checkpoint(id, token, Bytes::new()).await,
        ] {
            assert!(matches!(unknown, Err(TierError::Locked(_))), "{unknown:?}");
        }
        let settled = tokio::spawn({
            let patient = patient.clone();
            async move { patient.release(common::id(key), token).await }
        });
        until_blocked(&pool, "lost", 1).await;
        if commits {
            transaction.commit().await.unwrap();
            let landed = settled.await.unwrap().unwrap();
            let Landed::Lost(Some(found)) = landed else { panic!("{landed:?}") };
            assert_eq!((found.token, found.state), (token, State::Completed(answer.clone())));
        } else {
            // The server gives up the client that it has lost.
            let pid = "SELECT pg_backend_pid()::bigint";
            let row = sqlx::raw_sql(pid).fetch_one(&mut *transaction).await.unwrap();
            let pid: i64 = row.get(0);
            sql(&pool, format!("SELECT pg_terminate_backend({pid})")).await;
            assert_eq!(settled.await.unwrap().unwrap(), Landed::Done);
            assert_eq!(tier.look_up(id).await.unwrap(), None);
        }
    }
}

/// One row for each owner: a business transaction may have a record in its hands, and a takeover
/// may wait for it, but a heartbeat waits for neither (T10).
#[tokio::test]
async fn t10_a_heartbeat_waits_for_no_record() {
    let _watchdog = watchdog();
    let Some((_, pool)) = tier("beats").await else { return };
    let tier = tier_in("beats").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let token = Token::new(1, 1);
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    advance(&pool, "beats", LEASE).await;
    tier.beat(2, LEASE).await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let answer = outcome("late");
    let landed = tier.complete_in(&mut transaction, id("key"), token, Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let over = tokio::spawn({
        let tier = tier.clone();
        async move { tier.take_over(common::id("key"), token, claim(2, 1, "a")).await }
    });
    until_blocked(&pool, "beats", 1).await;
    tier.beat(1, LEASE).await.unwrap();
    tier.beat(2, LEASE).await.unwrap();
    transaction.rollback().await.unwrap();
    // It beats again: nothing is taken over, although it had lapsed when the takeover began.
    let found = over.await.unwrap().met();
    assert_eq!((found.token, found.state), (token, State::InFlight));
}

/// Between the look at a lapsed owner and the commit of the takeover, that owner cannot come back.
#[tokio::test]
async fn t10_a_late_heartbeat_does_not_slip_into_a_takeover() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("slips").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    advance(&pool, "slips", LEASE).await;
    tier.beat(2, LEASE).await.unwrap();
    let mut over = pool.begin().await.unwrap();
    let take_over = "SELECT slips.idempotency_take_over('acct', 'POST /charges', 'key', 1, 1, 2, \
                     1, '12345678', '', 1000, 1000, 1000)";
    let row = sqlx::raw_sql(take_over).fetch_one(&mut *over).await.unwrap();
    let answer: Vec<u8> = row.get(0);
    assert!(answer.windows(3).any(|word| word == b"won"), "{answer:?}");
    let beat = tokio::spawn({
        let tier = tier.clone();
        async move { tier.beat(1, LEASE).await }
    });
    until_blocked(&pool, "slips", 1).await;
    over.commit().await.unwrap();
    beat.await.unwrap().unwrap();
}
