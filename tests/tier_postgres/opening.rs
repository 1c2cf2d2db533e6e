//! What is refused when the tier is opened.

use super::*;

/// What makes a tier unusable is said when it is opened, with what to do (T2).
#[tokio::test]
async fn t2_a_server_that_cannot_keep_the_promise_is_refused() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let (_, pool) = tier("refused").await.unwrap();
    let refused = async |builder: PostgresBuilder, options: PgConnectOptions| {
        let pool = postgres::pool(options).await;
        match builder.connect(pool).await {
            Err(TierError::Unusable(why)) => why.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let with = |name, value| server.options().options([(name, value)]);
    let said = refused(PostgresTier::builder(), server.options()).await;
    assert!(said.contains("fsync"), "{said}");
    let said = refused(tier_in("refused"), with("synchronous_commit", "off")).await;
    assert!(said.contains("synchronous_commit"), "{said}");
    let said = refused(tier_in("refused"), with("default_transaction_read_only", "on")).await;
    assert!(said.contains("read-only"), "{said}");
    let inline = tier_in("refused").through_pooler();
    let said = refused(inline, with("bytea_output", "escape")).await;
    assert!(said.contains("bytea_output"), "{said}");
    for name in ["", "1st", "Upper", "a-b", "a\"b", "a.b", &"a".repeat(41)] {
        let said = refused(tier_in(name), server.options()).await;
        assert!(said.contains("no name for a schema"), "{name}: {said}");
    }
    sql(&pool, "CREATE ROLE weak LOGIN; GRANT USAGE ON SCHEMA refused TO weak").await;
    let said = refused(tier_in("another"), server.options().username("weak")).await;
    assert!(said.contains("CREATE SCHEMA another AUTHORIZATION"), "{said}");
    let said = refused(tier_in("refused"), server.options().username("weak")).await;
    assert!(said.contains("needs USAGE on the schema"), "{said}");
    sql(&pool, "ALTER TABLE refused.idempotency_keys SET UNLOGGED").await;
    let said = refused(tier_in("refused"), server.options()).await;
    assert!(said.contains("SET LOGGED"), "{said}");
    sql(
        &pool,
        "ALTER TABLE refused.idempotency_keys SET LOGGED; INSERT INTO refused.idempotency_schema \
         VALUES (99)",
    )
    .await;
    let said = refused(tier_in("refused"), server.options()).await;
    assert!(said.contains("version 99") && said.contains("newer version"), "{said}");
    // Not to be reached is another thing: trying again may help.
    let lazy = PgPoolOptions::new().acquire_timeout(SECOND);
    let nowhere = lazy.connect_lazy_with(server.options().port(1));
    let away = tier_in("refused").connect(nowhere).await;
    assert!(matches!(away, Err(TierError::Unavailable(_))), "{away:?}");
}

/// The pooler is told from its symptom, if it does not keep prepared statements apart by itself.
#[tokio::test]
async fn t2_a_pooler_that_nobody_spoke_of_is_named() {
    let _watchdog = watchdog();
    let Some((_, _)) = tier("unspoken").await else { return };
    let Some(pooler) = Pooler::start(shared().unwrap()) else { return };
    for owner in 1..4 {
        let pool = postgres::pool(pooler.options()).await;
        let tier = tier_in("unspoken").connect(pool).await.unwrap();
        match tier.beat(owner, LEASE).await {
            Ok(()) => {}
            Err(TierError::Unusable(why)) => {
                assert!(why.to_string().contains("through_pooler"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn t2_processes_that_start_at_once_make_the_tables_once() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let starts: Vec<_> = (0..8)
        .map(|_| {
            let options = server.options();
            tokio::spawn(
                async move { tier_in("together").connect(postgres::pool(options).await).await },
            )
        })
        .collect();
    for start in starts {
        start.await.unwrap().unwrap();
    }
    let pool = server.pool().await;
    let versions = "SELECT count(*) FROM together.idempotency_schema";
    assert_eq!(count(&pool, versions).await, 1);
}
