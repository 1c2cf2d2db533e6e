//! Servers that die, fail over or forget: what survives, and what is noticed of the rest.

use super::*;

/// The server is killed while claims and completions run; whatever was acknowledged is there again,
/// and the same handles go on.
#[tokio::test(flavor = "multi_thread")]
async fn t7_an_acknowledged_outcome_survives_kill_9() {
    const ROUNDS: usize = 5;
    const CALLERS: u64 = 8;
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let mut server = Server::durable().await;
    let tier = patient().connect(&server.url()).await.unwrap();
    let mut kept = BTreeMap::new();
    for round in 0..ROUNDS {
        let is_over = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let mut callers = tokio::task::JoinSet::new();
        tier.beat(1, HOUR).await.unwrap();
        for caller in 0..CALLERS {
            let (tier, is_over) = (tier.clone(), Arc::clone(&is_over));
            let acknowledged = Arc::clone(&acknowledged);
            callers.spawn(async move {
                let mut kept = Vec::new();
                for n in 0.. {
                    let key = format!("{round}-{caller}-{n}");
                    let claim = claim_of(1);
                    let Ok(claimed) = tier.claim(id(&key), claim).await else { break };
                    assert_eq!(claimed, Claimed::Won { checkpoint: None });
                    let body = outcome(&key);
                    let landed = tier.complete(id(&key), claim.token, Some(&body), HOUR).await;
                    if !matches!(landed, Ok(Landed::Done)) || is_over.load(Ordering::SeqCst) {
                        break;
                    }
                    acknowledged.fetch_add(1, Ordering::SeqCst);
                    kept.push((key, body));
                }
                kept
            });
        }
        while acknowledged.load(Ordering::SeqCst) < 100 {
            tokio::time::sleep(MS).await;
        }
        server.kill();
        is_over.store(true, Ordering::SeqCst);
        server.restart().await;
        while let Some(caller) = callers.join_next().await {
            kept.extend(caller.unwrap());
        }
        for (key, body) in &kept {
            let found = loop {
                // The handle finds out that its connection is gone.
                match tier.look_up(id(key)).await {
                    Ok(found) => break found,
                    Err(error) => assert!(matches!(error, TierError::Unavailable(_)), "{error}"),
                }
            };
            let found = found.map(|found| found.state);
            assert_eq!(found, Some(State::Completed(body.clone())), "{key} in round {round}");
        }
    }
    assert!(kept.len() >= ROUNDS * 100);
    assert_eq!(tier.vanished(), 0);
}

/// A claim that the server has lost is noticed by its owner's next step, and counted; what is gone for
/// a reason is not.
#[tokio::test]
async fn r09_a_claim_that_the_server_lost_is_counted() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let (tier, other) = (redis.tier().await, redis.tier().await);
    let mut admin = redis.servers[0].connect().await;
    let lost = async |key: &str, token: Token| {
        let landed = tier.complete(id(key), token, Some(&outcome("late")), HOUR).await.unwrap();
        assert!(matches!(landed, Landed::Lost(_)), "{key}: {landed:?}");
        tier.vanished()
    };
    // For a reason: forgotten; resolved; taken over after a lapse, and given up by the new owner;
    // taken over after `max_run`; ended here; never claimed here.
    let token = won(&tier, 1, "forgotten").await;
    assert_eq!(other.forget(id("forgotten"), true).await.unwrap(), Forgotten::Gone);
    assert_eq!(lost("forgotten", token).await, 0);
    let token = won(&tier, 1, "resolved").await;
    tier.hold(id("resolved"), token, HOUR).await.map(drop).unwrap();
    assert_eq!(other.resolve(id("resolved"), None, HOUR).await.unwrap(), Resolved::Done);
    assert_eq!(lost("resolved", token).await, 0);
    let mut gone = Vec::new();
    for key in ["lapsed", "too long"] {
        tier.beat(1, LEASE).await.unwrap();
        // The clock of the server cannot be moved, and this side has kept what it was told.
        let max_run = if key == "lapsed" { HOUR } else { MS };
        let claim = NewClaim { max_run, ..claim_of(1) };
        tier.claim(id(key), claim).await.map(drop).unwrap();
        let token = claim.token;
        if key == "lapsed" {
            redis.advance(LEASE + SECOND).await;
        }
        while state(&other, key).await == Some(State::InFlight) {}
        other.beat(2, LEASE).await.unwrap();
        let claim = claim_of(2);
        let taken = other.take_over(id(key), token, claim).await.unwrap();
        assert_eq!(taken, Claimed::Won { checkpoint: None });
        assert_eq!(other.release(id(key), claim.token).await.unwrap(), Landed::Done);
        // Noticed while it has lapsed, and after it has beaten again.
        gone.push((key, token));
        if key == "lapsed" {
            assert_eq!(lost(key, token).await, 0);
            let token = won(&tier, 1, "revived").await;
            redis.advance(LEASE + SECOND).await;
            other.beat(2, LEASE).await.unwrap();
            let claim = claim_of(2);
            other.take_over(id("revived"), token, claim).await.map(drop).unwrap();
            other.release(id("revived"), claim.token).await.map(drop).unwrap();
            tier.beat(1, LEASE).await.unwrap();
            assert_eq!(lost("revived", token).await, 0);
        }
    }
    for (key, token) in gone {
        assert_eq!(lost(key, token).await, 0);
    }
    let token = won(&tier, 1, "ended").await;
    tier.release(id("ended"), token).await.map(drop).unwrap();
    assert_eq!(lost("ended", token).await, 0);
    assert_eq!(lost("never", Token::new(1, 0)).await, 0);
    // Without one: the record alone; everything; and where another has claimed it since.
    let token = won(&tier, 1, "one").await;
    let record: Vec<Vec<u8>> = cmd("KEYS").arg("*:r:*one").query_async(&mut admin).await.unwrap();
    cmd("DEL").arg(record).exec_async(&mut admin).await.unwrap();
    assert_eq!(lost("one", token).await, 1);
    assert_eq!(lost("one", token).await, 1, "counted once");
    let tokens = [won(&tier, 1, "all 1").await, won(&tier, 1, "all 2").await];
    cmd("FLUSHALL").exec_async(&mut admin).await.unwrap();
    assert_eq!(lost("all 1", tokens[0]).await, 2);
    tier.beat(1, LEASE).await.unwrap();
    assert_eq!(lost("all 2", tokens[1]).await, 3);
    let token = won(&tier, 1, "again").await;
    cmd("FLUSHALL").exec_async(&mut admin).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    won(&other, 2, "again").await;
    assert_eq!(lost("again", token).await, 4);
    assert_eq!(other.vanished(), 0);
}

/// With `replicas(1)` a step counts once a replica has it, and is unavailable until then.
#[tokio::test]
async fn t2_a_step_waits_for_its_replicas() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let primary = Server::durable().await;
    // A quarter of it is for the replica.
    let asking = || patient().answer_within(8 * SECOND).replicas(1);
    let text = unavailable(asking().connect(&primary.url()).await);
    assert!(text.contains("0 replicas"), "{text}");
    let port = primary.port.to_string();
    let replica = Server::start(&[DURABLE, &["--replicaof", "127.0.0.1", &port]].concat()).await;
    let tier = loop {
        match asking().connect(&primary.url()).await {
            Ok(tier) => break tier,
            Err(error) => assert!(matches!(error, TierError::Unavailable(_)), "{error}"),
        }
    };
    let token = won(&tier, 1, "k").await;
    let mut there = replica.connect().await;
    let keys: Vec<Vec<u8>> = cmd("KEYS").arg("*:r:*").query_async(&mut there).await.unwrap();
    assert_eq!(keys.len(), 1, "acknowledged, so the replica has it");
    // It goes its own way: the next step is done here only.
    cmd("REPLICAOF").arg("NO").arg("ONE").exec_async(&mut there).await.unwrap();
    let text = unavailable(tier.complete(id("k"), token, None, HOUR).await);
    assert!(text.contains("0 of 1"), "{text}");
    // And so is a repeated one, which writes nothing.
    unavailable(tier.complete(id("k"), token, None, HOUR).await);
    unavailable(tier.look_up(id("k")).await);
    cmd("REPLICAOF").arg("127.0.0.1").arg(primary.port).exec_async(&mut there).await.unwrap();
    let landed = loop {
        match tier.complete(id("k"), token, None, HOUR).await {
            Ok(landed) => break landed,
            Err(error) => assert!(matches!(error, TierError::Unavailable(_)), "{error}"),
        }
    };
    assert_eq!(landed, Landed::Done);
}

/// A node that is gone takes the cluster with it until it is back; nothing is half done.
#[tokio::test]
async fn t2_a_cluster_that_lost_a_node_is_unavailable_until_it_is_back() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let mut redis = Redis::cluster().await;
    redis.builder = patient().answer_within(5 * SECOND);
    let tier = redis.tier().await;
    let mut tokens = Vec::new();
    for n in 0..30 {
        let key = format!("k{n}");
        let token = won(&tier, 1, &key).await;
        tokens.push((key, token));
    }
    redis.servers[1].kill();
    unavailable(tier.beat(1, LEASE).await);
    let mut is_down = 0;
    for (key, _) in &tokens {
        match tier.look_up(id(key)).await {
            Ok(found) => assert_eq!(found.unwrap().state, State::InFlight),
            Err(error) => {
                assert!(matches!(error, TierError::Unavailable(_)), "{error}");
                is_down += 1;
                break;
            }
        }
    }
    assert_eq!(is_down, 1);
    redis.servers[1].restart().await;
    while let Err(error) = tier.beat(1, LEASE).await {
        assert!(matches!(error, TierError::Unavailable(_)), "{error}");
    }
    for (key, token) in tokens {
        let body = Outcome::new(201).body(key.clone());
        let landed = tier.complete(id(&key), token, Some(&body), HOUR).await.unwrap();
        assert_eq!(landed, Landed::Done, "{key}");
    }
}

/// A replica takes a primary's place while steps run: some are unavailable for a moment, and what was
/// acknowledged is there.
#[tokio::test(flavor = "multi_thread")]
async fn t2_a_failover_of_a_cluster_is_gone_through() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::cluster().await;
    let replica = replica_of(&redis.servers[0]).await;
    let tier = redis.tier().await;
    let is_over = Arc::new(AtomicBool::new(false));
    let running = tokio::spawn({
        let (tier, is_over) = (tier.clone(), Arc::clone(&is_over));
        async move {
            let mut kept = Vec::new();
            while !is_over.load(Ordering::SeqCst) || kept.len() < 500 {
                let key = format!("k{}", kept.len());
                while let Err(error) = tier.beat(1, HOUR).await {
                    assert!(matches!(error, TierError::Unavailable(_)), "{error}");
                }
                let claim = claim_of(1);
                loop {
                    match tier.claim(id(&key), claim).await {
                        Ok(claimed) => {
                            assert_eq!(claimed, Claimed::Won { checkpoint: None });
                            break;
                        }
                        Err(error) => {
                            assert!(matches!(error, TierError::Unavailable(_)), "{error}");
                        }
                    }
                }
                let body = outcome(&key);
                loop {
                    match tier.complete(id(&key), claim.token, Some(&body), HOUR).await {
                        Ok(landed) => {
                            assert_eq!(landed, Landed::Done);
                            break;
                        }
                        Err(error) => {
                            assert!(matches!(error, TierError::Unavailable(_)), "{error}");
                        }
                    }
                }
                kept.push((key, body));
            }
            kept
        }
    });
    let mut failover = cmd("CLUSTER");
    failover.arg("FAILOVER").exec_async(&mut replica.connect().await).await.unwrap();
    replica.says("role:master").await;
    redis.servers[0].says("role:slave").await;
    is_over.store(true, Ordering::SeqCst);
    for (key, body) in running.await.unwrap() {
        assert_eq!(state(&tier, &key).await, Some(State::Completed(body)), "{key}");
    }
    assert_eq!(tier.vanished(), 0);
}

/// A replica that had less takes the primary's place: what it had not yet is lost, and that is noticed.
#[tokio::test]
async fn r09_a_failover_that_lost_a_claim_is_noticed() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let primary = Server::durable().await;
    let port = primary.port.to_string();
    let replica = Server::start(&[DURABLE, &["--replicaof", "127.0.0.1", &port]].concat()).await;
    replica.says("master_link_status:up").await;
    let proxy = Proxy::to(primary.port).await;
    let tier = patient().connect(&proxy.url()).await.unwrap();
    let both_have = won(&tier, 1, "both").await;
    let mut wait = cmd("WAIT");
    let have: u64 = wait.arg(1).arg(0).query_async(&mut primary.connect().await).await.unwrap();
    assert_eq!(have, 1);
    // The line between the two is cut, and the primary does not know it.
    let mut there = replica.connect().await;
    cmd("REPLICAOF").arg("NO").arg("ONE").exec_async(&mut there).await.unwrap();
    let [first, second] = [won(&tier, 1, "first").await, won(&tier, 1, "second").await];
    proxy.lead_to(replica.port);
    proxy.end_lines();
    assert_eq!(tier.complete(id("both"), both_have, None, HOUR).await.unwrap(), Landed::Done);
    let body = outcome("x");
    let landed = tier.complete(id("first"), first, Some(&body), HOUR).await.unwrap();
    assert_eq!((landed, tier.vanished()), (Landed::Lost(None), 1));
    // Another has claimed it since.
    let other = patient().connect(&replica.url()).await.unwrap();
    won(&other, 2, "second").await;
    let landed = tier.complete(id("second"), second, Some(&body), HOUR).await.unwrap();
    assert!(matches!(landed, Landed::Lost(Some(_))), "{landed:?}");
    assert_eq!(tier.vanished(), 2);
}
