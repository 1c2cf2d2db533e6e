//! What a step is made of: statements, round trips, ends, and what it leaves alone.

use super::*;

/// By a user's own transaction, which the commit of another one may make impossible; the verbs
/// themselves are tried again.
#[tokio::test]
async fn t3_serialization_failures_are_tried_again() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let mut nodes = Nodes::new(server, "serial").await;
    nodes.options = nodes.options.options([("default_transaction_isolation", "serializable")]);
    nodes.must_conform().await;
}

#[tokio::test]
async fn t3_each_verb_is_one_statement_and_one_round_trip() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    // One message each way; the parts of a prepared one are sent together, and `S` asks for the
    // answer.
    for form in [("prepared", "BECS"), ("inline", "Q")] {
        let relay = Relay::start(server).await;
        let one = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
        let pool = one.connect_with(relay.options()).await.unwrap();
        let mut builder = tier_in("counted");
        if form.0 == "inline" {
            builder = builder.through_pooler();
        }
        let tier = builder.connect(pool.clone()).await.unwrap();
        // Twice: the first time prepares the statements of the connection.
        for round in 0..2 {
            let key = format!("{}-{round}", form.0);
            let (id, token) = (id(&key), Token::new(1, 1));
            let answer = outcome("done");
            let mut transaction = pool.begin().await.unwrap();
            let business = &mut *transaction;
            macro_rules! counted {
                ($said:expr, $($verb:expr),* $(,)?) => {$(
                    relay.said();
                    let _ = $verb.await.unwrap();
                    let said = $said(relay.said()).await;
                    if round == 1 {
                        assert_eq!(said, form.1, "{}: {}", form.0, stringify!($verb));
                    }
                )*};
            }
            // The pool has one connection, so its transaction comes first.
            sqlx::raw_sql("SELECT counted.idempotency_beat(1, 60000)")
                .execute(&mut *business)
                .await
                .unwrap();
            counted!(
                async |said| said,
                tier.claim_in(business, id, claim(1, 1, "a")),
                tier.claim_in(business, id, claim(1, 2, "a")),
                tier.complete_in(business, id, token, Some(&answer), DAY),
            );
            transaction.rollback().await.unwrap();
            // After the answer, the driver asks a connection once more when it goes back to the pool.
            let without_the_question_after = async |mut said: String| {
                while pool.num_idle() != 1 {
                    tokio::task::yield_now().await;
                }
                said.push_str(&relay.said());
                said.strip_suffix('S').unwrap().to_owned()
            };
            without_the_question_after(String::new()).await;
            counted!(
                without_the_question_after,
                tier.beat(1, LEASE),
                tier.claim(id, claim(1, 1, "a")),
                tier.claim(id, claim(1, 2, "a")),
                tier.look_up(id),
                tier.checkpoint(id, token, Bytes::from_static(b"half")),
                tier.take_over(id, token, claim(1, 3, "a")),
                tier.hold(id, token, DAY),
                tier.take_over(id, token, claim(1, 3, "a")),
                tier.release(id, token),
                tier.complete(id, Token::new(1, 3), Some(&answer), DAY),
                tier.resolve(id, Some(&answer), DAY),
                tier.forget(id, false),
                tier.reap(100),
                tier.recalls(None),
                tier.recalls(Some(0)),
            );
        }
    }
}

/// Duplicates of a key that is in flight read: no row is written, locked or tried in vain.
#[tokio::test]
async fn case_29_duplicates_in_flight_write_nothing() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case29").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("hot"), claim(1, 1, "a")).await.won();
    // Where the row is, who has written it, and who has locked it.
    let row = "SELECT (ctid::text || xmin::text || '/' || xmax::text) AS row FROM \
               case29.idempotency_keys";
    let before: String = sqlx::raw_sql(row).fetch_one(&pool).await.unwrap().get(0);
    let blocks = "SELECT pg_relation_size('case29.idempotency_keys')";
    let size = count(&pool, blocks).await;
    for number in 2..202 {
        let found = tier.claim(id("hot"), claim(1, number, "a")).await.met();
        assert_eq!(found.token, Token::new(1, 1));
    }
    let after: String = sqlx::raw_sql(row).fetch_one(&pool).await.unwrap().get(0);
    assert_eq!(before, after);
    assert_eq!(count(&pool, blocks).await, size, "a failed insert leaves a dead row");
}

/// A plan is kept until the table is analyzed again, so one that was made while it was empty must do
/// for a full one: no verb reads a table, or the index of ends, as a whole.
#[tokio::test]
async fn t3_no_plan_of_an_empty_table_reads_a_full_one() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    for schema in ["planned", "planned_in_parts"] {
        // One connection, which keeps its plans.
        let one = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
        let pool = one.connect_with(server.options()).await.unwrap();
        let tier = tier_in(schema).connect(pool.clone()).await.unwrap();
        if schema == "planned_in_parts" {
            let parts = include_str!("../../src/tier/postgres/partition.sql");
            sql(&pool, parts.replace("oncekey.", "planned_in_parts.")).await;
        }
        sql(&pool, format!("VACUUM ANALYZE {schema}.idempotency_keys")).await;
        sql(&pool, format!("VACUUM ANALYZE {schema}.idempotency_owners")).await;
        let whole = format!(
            "SELECT ((SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE schemaname = '{schema}' \
             AND relname ~ '^idempotency_(keys|owners)') + (SELECT sum(idx_scan) FROM \
             pg_stat_user_indexes WHERE schemaname = '{schema}' AND indexrelname ~ 'expires_at'))::bigint"
        );
        let flushed = "SELECT pg_stat_force_next_flush()";
        sql(&pool, flushed).await;
        let before = count(&pool, &whole).await;
        tier.beat(1, LEASE).await.unwrap();
        // More often than a statement is planned anew for its arguments.
        for number in 0..20 {
            let (key, answer) = (format!("key-{number}"), outcome("done"));
            let (id, token) = (id(&key), Token::new(1, 2 * number));
            tier.claim(id, claim(1, 2 * number, "a")).await.won();
            tier.claim(id, claim(1, 2 * number + 1, "a")).await.met();
            let _ = tier.checkpoint(id, token, Bytes::from_static(b"half")).await.unwrap();
            tier.look_up(id).await.unwrap().unwrap();
            let ended = match number % 4 {
                0 => tier.complete(id, token, Some(&answer), DAY).await,
                1 => tier.release(id, token).await,
                2 => tier.hold(id, token, DAY).await,
                _ => tier.lapse(id, token).await,
            };
            assert_eq!(ended.unwrap(), Landed::Done);
            // What is lost, or comes a second time.
            let _ = tier.complete(id, Token::new(7, 7), Some(&answer), DAY).await.unwrap();
            let _ = tier.take_over(id, token, claim(1, 2 * number + 1, "a")).await.unwrap();
            let mut transaction = pool.begin().await.unwrap();
            let theirs = Token::new(1, 2 * number + 1);
            let _ = tier.complete_in(&mut transaction, id, theirs, None, DAY).await.unwrap();
            transaction.commit().await.unwrap();
            let _ = tier.resolve(id, None, DAY).await.unwrap();
            let _ = tier.forget(id, true).await.unwrap();
        }
        sql(&pool, flushed).await;
        let after = count(&pool, &whole).await;
        assert_eq!(after - before, 0, "{schema}");
    }
}

/// Whatever the moment at which a caller goes away, a record has an end and is whole.
#[tokio::test]
async fn case_108_no_record_is_without_an_end() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case108").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    // The tables themselves refuse one, and an outcome in parts.
    for broken in [
        "expires_at = NULL",
        "due_at = NULL",
        "state = 2, settled_at = now(), status = 200, headers = ''",
        "state = 2, settled_at = now()",
        "state = 1",
        "state = 4, settled_at = now()",
        "owner = NULL",
    ] {
        tier.claim(id("key"), claim(1, 1, "a")).await.won();
        let set = AssertSqlSafe(format!("UPDATE case108.idempotency_keys SET {broken}"));
        let refused = sqlx::raw_sql(set).execute(&pool).await.unwrap_err();
        let code = refused.as_database_error().unwrap().code().unwrap().into_owned();
        assert!(matches!(code.as_str(), "23502" | "23514"), "{broken}: {refused}");
    }
    // A connection that ends in the middle of a claim leaves nothing.
    let patient = tier_in("case108").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let mut open = pool.begin().await.unwrap();
    patient.claim_in(&mut open, id("cut"), claim(1, 1, "a")).await.won();
    let cut = tokio::spawn({
        let patient = patient.clone();
        async move { patient.claim(common::id("cut"), claim(1, 2, "a")).await }
    });
    until_blocked(&pool, "case108", 1).await;
    sql(
        &pool,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
         AND query LIKE '%case108.%'",
    )
    .await;
    let cut = cut.await.unwrap();
    assert!(matches!(cut, Err(TierError::Unavailable(_))), "{cut:?}");
    open.rollback().await.unwrap();
    assert_eq!(tier.look_up(id("cut")).await.unwrap(), None);
}

/// Two nodes on one database.
#[tokio::test]
async fn case_109_what_one_node_finished_another_replays() {
    let _watchdog = watchdog();
    let Some((a, pool)) = tier("case109").await else { return };
    let b = tier_in("case109").connect(shared().unwrap().pool().await).await.unwrap();
    a.beat(1, LEASE).await.unwrap();
    b.beat(2, LEASE).await.unwrap();
    assert_eq!(b.look_up(id("key")).await.unwrap(), None);
    a.claim(id("key"), claim(1, 1, "a")).await.won();
    let answer = outcome("by a");
    let landed = a.complete(id("key"), Token::new(1, 1), Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let found = b.claim(id("key"), claim(2, 1, "another")).await.met();
    assert_eq!((found.fingerprint, found.state), (fp("a"), State::Completed(answer.clone())));
    // A is restarted.
    pool.close().await;
    let a = tier_in("case109").connect(shared().unwrap().pool().await).await.unwrap();
    assert_eq!(a.look_up(id("key")).await.unwrap().unwrap().state, State::Completed(answer));
}

/// What somebody has in hands is stepped over, and claims go on: of new identities, and of ended
/// ones that are still there.
#[tokio::test]
async fn t3_reaping_fights_no_claim() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("reaped").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let keys: Vec<_> = (0..200).map(|n| format!("old-{n}")).collect();
    for (number, key) in (1..).zip(&keys) {
        tier.claim(id(key), claim(1, number, "a")).await.won();
    }
    advance(&pool, "reaped", HOUR + DAY).await;
    tier.beat(1, LEASE).await.unwrap();
    // One is being claimed anew at this moment, another is looked at by somebody.
    let mut open = pool.begin().await.unwrap();
    tier.claim_in(&mut open, id("old-7"), claim(1, 1001, "b")).await.won();
    sqlx::raw_sql("SELECT FROM reaped.idempotency_keys WHERE key = 'old-8' FOR UPDATE")
        .execute(&mut *open)
        .await
        .unwrap();
    assert_eq!(tier.reap(50).await.unwrap(), 50);
    tier.claim(id("new"), claim(1, 1002, "a")).await.won();
    let anew = async {
        for (number, key) in (2001..).zip(&keys[150..]) {
            tier.claim(id(key), claim(1, number, "b")).await.won();
        }
    };
    let reaping = async {
        let mut reaped = 50;
        loop {
            match tier.reap(10).await.unwrap() {
                0 => break reaped,
                some => reaped += some,
            }
        }
    };
    let ((), reaped) = tokio::join!(anew, reaping);
    open.commit().await.unwrap();
    assert_eq!(tier.reap(10).await.unwrap(), 1, "the one that was stepped over");
    let found = tier.look_up(id("old-7")).await.unwrap().unwrap();
    assert_eq!((found.token, found.fingerprint), (Token::new(1, 1001), fp("b")));
    for (number, key) in (2001..).zip(&keys[150..]) {
        let found = tier.look_up(id(key)).await.unwrap().unwrap();
        assert_eq!(found.token, Token::new(1, number), "it was claimed anew and not reaped");
    }
    assert!((148..=198).contains(&reaped), "{reaped}");
    assert_eq!(count(&pool, "SELECT count(*) FROM reaped.idempotency_keys").await, 52);
}
