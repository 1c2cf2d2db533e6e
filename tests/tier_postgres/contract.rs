//! What every tier owes: the suite, in four ways; bytes; what a killed server has kept.

use super::*;

#[tokio::test]
async fn t8_it_keeps_the_contract() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    Nodes::new(server, "contract").await.must_conform().await;
}

/// Two connections to the server for all nodes, handed on after each transaction, and nothing
/// prepared.
#[tokio::test]
async fn t8_it_keeps_the_contract_through_a_pooler() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let Some(pooler) = Pooler::start(server) else { return };
    let mut nodes = Nodes::new(server, "pooled").await;
    nodes.options = pooler.options().statement_cache_capacity(0);
    nodes.builder = nodes.builder.through_pooler();
    nodes.must_conform().await;
}

#[tokio::test]
async fn t8_it_keeps_the_contract_in_partitions() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("parted").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("before"), claim(1, 1, "a")).await.won();
    let partition = include_str!("../../src/tier/postgres/partition.sql");
    sql(&pool, partition.replace("oncekey.", "parted.")).await;
    let parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = \
                 'parted.idempotency_keys'::regclass";
    assert_eq!(count(&pool, parts).await, 16);
    // What was there is there, and connections that knew the old table know the new one.
    assert_eq!(tier.claim(id("before"), claim(1, 2, "a")).await.met().token, Token::new(1, 1));
    Nodes::new(shared().unwrap(), "parted").await.must_conform().await;
}

/// The bytes of (R1), in a database whose collation takes "a" for "A".
#[tokio::test]
async fn r1_identities_are_bytes_whatever_the_collation() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let pool = server.pool().await;
    sql(
        &pool,
        "CREATE DATABASE loose TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1'",
    )
    .await;
    let pool = postgres::pool(server.options().database("loose")).await;
    let tier = tier_in("oncekey").connect(pool).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    let all: &[(&[u8], &[u8], &str)] = &[
        (b"a:b", b"c", "k"),
        (b"a", b"b:c", "k"),
        (b"ab", b"c", "k"),
        (b"a", b"bc", "k"),
        (b"A", b"bc", "k"),
        (b"a ", b"bc", "k"),
        (b"a\0", b"bc", "k"),
        (b"a", b"\0bc", "k"),
        (b"a", b"bc", "K"),
        (b"a", b"bc", "k "),
        (b"\xff", b"bc", "k"),
        (b"\xfe", b"bc", "k"),
        (b"\\xff", b"bc", "k"),
        ("\u{e9}".as_bytes(), b"bc", "k"),
        ("e\u{301}".as_bytes(), b"bc", "k"),
        (b"e", b"bc", "k"),
        (b"", b"bc", "k"),
        (b"a", b"", "k"),
    ];
    for through_pooler in [false, true] {
        let builder = tier_in("oncekey");
        let builder = if through_pooler { builder.through_pooler() } else { builder };
        let pool = postgres::pool(server.options().database("loose")).await;
        let tier = builder.connect(pool).await.unwrap();
        for (number, (account, endpoint, key)) in (1..).zip(all) {
            let id = Identity::new(*account, *endpoint, *key).unwrap();
            if !through_pooler {
                tier.claim(id, claim(1, number, "a")).await.won();
            }
            let found = tier.look_up(id).await.unwrap().unwrap();
            assert_eq!(found.token, Token::new(1, number));
        }
    }
}

/// An outcome of a megabyte of bytes of all kinds, in both forms of a call.
#[tokio::test]
async fn r16_a_large_outcome_comes_back_byte_for_byte() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("large").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let inline = tier_in("large").through_pooler().connect(pool).await.unwrap();
    let body: Vec<u8> =
        (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let answer = Outcome::new(599)
        .header("a", b"\0\xff'\\")
        .header("a", "")
        .header("", "'; DROP SCHEMA large CASCADE; --")
        .body(body);
    for (number, key) in [(1, "'one"), (2, "\\two$1")] {
        let token = Token::new(1, number);
        let [by, other]: [&PostgresTier; 2] =
            if number == 1 { [&tier, &inline] } else { [&inline, &tier] };
        by.claim(id(key), claim(1, number, "a")).await.won();
        assert_eq!(by.complete(id(key), token, Some(&answer), DAY).await.unwrap(), Landed::Done);
        for reader in [by, other] {
            let found = reader.look_up(id(key)).await.unwrap().unwrap();
            assert_eq!(found.state, State::Completed(answer.clone()));
        }
    }
}

/// The server is killed under load, with everything that it keeps in memory only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t7_a_killed_server_has_all_that_it_acknowledged() {
    let _watchdog = watchdog();
    let Some(server) = Server::start(&[]) else { return };
    type Acknowledged = HashMap<String, (Token, Option<Outcome>)>;
    let acknowledged = Arc::<Mutex<Acknowledged>>::default();
    for round in 0..4_u64 {
        // While the server is away, the driver tries to reach it for so long.
        let pool = PgPoolOptions::new().acquire_timeout(SECOND).max_connections(8);
        let pool = pool.connect_with(server.options()).await.unwrap();
        let tier = PostgresTier::connect(pool.clone()).await.unwrap();
        tier.beat(round + 1, LEASE).await.unwrap();
        // Somebody who waits meanwhile is told to look.
        let listens = PostgresTier::builder().listen(server.options());
        let listens = listens.connect(server.pool().await).await.unwrap();
        let waited = format!("waited-{round}");
        let claim_of_it = claim(round + 1, 1 << 40, "a");
        tier.claim(id(&waited), claim_of_it).await.won();
        let wait = tokio::spawn(async move { listens.settled(id(&waited)).await });
        let marked = "SELECT count(*) FROM oncekey.idempotency_keys WHERE waited IS NOT NULL";
        while count(&pool, marked).await == 0 {
            tokio::time::sleep(MS).await;
        }
        // One kind of step at a time: another that waits for its own commit would take those of
        // steps that do not along.
        let claims = |each: u64| -> Vec<_> {
            (0..8)
                .map(|task| {
                    let (tier, acknowledged) = (tier.clone(), Arc::clone(&acknowledged));
                    tokio::spawn(async move {
                        for number in 0..each {
                            let key = format!("{round}-{task}-{number}");
                            let token = Token::new(round + 1, number * 8 + task);
                            let claim = NewClaim { token, ..claim(0, 0, &key) };
                            let Ok(Claimed::Won { .. }) = tier.claim(id(&key), claim).await else {
                                return;
                            };
                            acknowledged.lock().unwrap().insert(key, (token, None));
                        }
                    })
                })
                .collect()
        };
        let load = if round % 2 == 0 {
            claims(u64::MAX >> 8)
        } else {
            for task in claims(50) {
                task.await.unwrap();
            }
            let claimed: Vec<_> = acknowledged
                .lock()
                .unwrap()
                .iter()
                .filter(|(key, _)| key.starts_with(&format!("{round}-")))
                .map(|(key, (token, _))| (key.clone(), *token))
                .collect();
            assert_eq!(claimed.len(), 400);
            claimed
                .chunks(50)
                .map(|part| {
                    let (tier, part) = (tier.clone(), part.to_vec());
                    let acknowledged = Arc::clone(&acknowledged);
                    tokio::spawn(async move {
                        for (key, token) in part {
                            let answer = outcome(&key);
                            let landed = tier.complete(id(&key), token, Some(&answer), DAY).await;
                            let Ok(landed) = landed else { return };
                            assert_eq!(landed, Landed::Done);
                            acknowledged.lock().unwrap().insert(key, (token, Some(answer)));
                        }
                    })
                })
                .collect()
        };
        let is_enough = || {
            let acknowledged = acknowledged.lock().unwrap();
            let of_round = acknowledged.iter().filter(|(key, (_, answer))| {
                key.starts_with(&format!("{round}-")) && answer.is_some() == (round % 2 == 1)
            });
            of_round.count() >= 100
        };
        while !is_enough() {
            tokio::time::sleep(MS).await;
        }
        server.kill();
        for task in load {
            task.await.unwrap();
        }
        server.restart();
        wait.await.unwrap();
        let tier = PostgresTier::connect(server.pool().await).await.unwrap();
        sql(&server.pool().await, "UPDATE oncekey.idempotency_keys SET waited = NULL").await;
        let acknowledged = acknowledged.lock().unwrap().clone();
        for (key, (token, answer)) in &acknowledged {
            let found = tier.look_up(id(key)).await.unwrap();
            let found = found.unwrap_or_else(|| panic!("{key} is lost"));
            assert_eq!(found.token, *token);
            if let Some(answer) = answer {
                assert_eq!(found.state, State::Completed(answer.clone()), "{key}");
            }
        }
    }
}
