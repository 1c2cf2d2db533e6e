//! Waiting on another node.

use super::*;

/// A notification for what is waited for, and for nothing else (T5).
#[tokio::test]
async fn t5_whoever_waits_is_told_and_nobody_else() {
    let _watchdog = watchdog();
    let Some((a, pool)) = tier("heard").await else { return };
    let options = shared().unwrap().options();
    let b = tier_in("heard").listen(options).connect(pool.clone()).await.unwrap();
    a.beat(1, LEASE).await.unwrap();
    let mut heard = PgListener::connect_with(&pool).await.unwrap();
    heard.listen("heard.settled").await.unwrap();
    let answer = outcome("told");
    let watched = "SELECT count(*) FROM heard.idempotency_keys WHERE waited IS NOT NULL";
    for (number, end) in (1..).zip(["complete", "release", "hold", "forget", "resolve"]) {
        let token = Token::new(1, number);
        let unwatched = format!("{end}-unwatched");
        for key in [end, &unwatched] {
            a.claim(id(key), claim(1, number, "a")).await.won();
        }
        if end == "resolve" {
            advance(&pool, "heard", LEASE).await;
        }
        let wait = tokio::spawn({
            let b = b.clone();
            async move { b.settled(common::id(end)).await }
        });
        while count(&pool, watched).await != 1 {
            tokio::time::sleep(MS).await;
        }
        // A checkpoint settles nothing.
        let landed = a.checkpoint(id(end), token, Bytes::from_static(b"half")).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        assert!(!wait.is_finished());
        for key in [&unwatched, end] {
            match end {
                "complete" => {
                    let landed = a.complete(id(key), token, Some(&answer), DAY).await;
                    assert_eq!(landed.unwrap(), Landed::Done);
                }
                "release" => {
                    assert_eq!(a.release(id(key), token).await.unwrap(), Landed::Done);
                }
                "hold" => assert_eq!(a.hold(id(key), token, DAY).await.unwrap(), Landed::Done),
                "forget" => assert_eq!(a.forget(id(key), true).await.unwrap(), Forgotten::Gone),
                _ => {
                    let resolved = a.resolve(id(key), Some(&answer), DAY).await;
                    assert_eq!(resolved.unwrap(), Resolved::Done);
                }
            }
        }
        wait.await.unwrap();
        // One was told, of one hash; all that was said before this comes before it.
        sql(&pool, "SELECT pg_notify('heard.settled', 'all')").await;
        assert_eq!(heard.recv().await.unwrap().payload().len(), 32, "{end}");
        assert_eq!(heard.recv().await.unwrap().payload(), "all", "{end}");
        assert_eq!(count(&pool, watched).await, 0);
        // What is settled is not waited for.
        if end != "hold" {
            b.settled(id(end)).await;
        }
    }
    // At the commit, when a transaction of the user's own completes it.
    a.beat(1, LEASE).await.unwrap();
    a.claim(id("in"), claim(1, 77, "a")).await.won();
    let wait = tokio::spawn({
        let b = b.clone();
        async move { b.settled(common::id("in")).await }
    });
    while count(&pool, watched).await != 1 {
        tokio::time::sleep(MS).await;
    }
    let mut transaction = pool.begin().await.unwrap();
    let landed =
        a.complete_in(&mut transaction, id("in"), Token::new(1, 77), Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    assert!(!wait.is_finished());
    transaction.commit().await.unwrap();
    wait.await.unwrap();
}

/// A record that somebody has in hands is not waited for on the server; the connection may be cut.
#[tokio::test]
async fn t5_waiting_blocks_nobody_and_survives_a_cut() {
    let _watchdog = watchdog();
    let Some((_, pool)) = tier("cut").await else { return };
    let options = shared().unwrap().options().application_name("listens");
    let tier = tier_in("cut").listen(options).connect(pool.clone()).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    let mut open = pool.begin().await.unwrap();
    let landed = tier.complete_in(&mut open, id("key"), Token::new(1, 1), None, DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let watch = "SELECT cut.idempotency_watch('acct', 'POST /charges', 'key', 'name')";
    let row = sqlx::raw_sql(watch).fetch_one(&pool).await.unwrap();
    assert!(row.get::<bool, _>(0), "it is not settled yet");
    open.rollback().await.unwrap();

    let listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'listens'";
    for _ in 0..2 {
        let wait = tokio::spawn({
            let tier = tier.clone();
            async move { tier.settled(common::id("key")).await }
        });
        let watched = "SELECT count(*) FROM cut.idempotency_keys WHERE length(waited) = 16";
        while count(&pool, watched).await != 1 {
            tokio::time::sleep(MS).await;
        }
        // Whoever may have missed something looks.
        sql(
            &pool,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = \
             'listens'",
        )
        .await;
        wait.await.unwrap();
        while count(&pool, listening).await != 1 {
            tokio::time::sleep(MS).await;
        }
    }
}
