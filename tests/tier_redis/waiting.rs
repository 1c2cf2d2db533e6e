//! Waiting for another node (T5): who is told, and what happens to the connection for it.

use super::*;

/// Whoever waits on another node is told by each step that settles, and nobody is told by others.
#[tokio::test]
async fn t5_whoever_waits_elsewhere_is_told() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    for redis in [Redis::server().await, Redis::cluster().await] {
        let (tier, other) = (redis.tier().await, redis.tier().await);
        for how in ["complete", "not kept", "release", "hold", "forget", "resolve", "give up"] {
            let token = won(&tier, 1, how).await;
            if matches!(how, "resolve" | "give up") {
                tier.hold(id(how), token, HOUR).await.map(drop).unwrap();
            }
            let mut waiting = tokio::spawn({
                let (other, how) = (other.clone(), how.to_owned());
                async move { other.settled(id(&how)).await }
            });
            while !is_waited_for(&redis, how).await {
                tokio::time::sleep(MS).await;
            }
            tier.checkpoint(id(how), token, "half".into()).await.map(drop).unwrap();
            tier.beat(1, LEASE).await.unwrap();
            tier.claim(id(how), claim_of(1)).await.map(drop).unwrap();
            assert!(!waiting.is_finished(), "{how}: told by what settles nothing");
            match how {
                "complete" => {
                    let body = outcome(how);
                    tier.complete(id(how), token, Some(&body), HOUR).await.map(drop)
                }
                "not kept" => tier.complete(id(how), token, None, HOUR).await.map(drop),
                "release" => tier.release(id(how), token).await.map(drop),
                "hold" => tier.hold(id(how), token, HOUR).await.map(drop),
                "forget" => tier.forget(id(how), true).await.map(drop),
                "resolve" => tier.resolve(id(how), Some(&outcome("x")), HOUR).await.map(drop),
                _ => tier.resolve(id(how), None, HOUR).await.map(drop),
            }
            .unwrap();
            // Under the watchdog.
            (&mut waiting).await.unwrap();
        }
        // What nobody waits for is said to nobody.
        for server in &redis.servers {
            let mut admin = server.connect().await;
            cmd("CONFIG").arg("RESETSTAT").exec_async(&mut admin).await.unwrap();
        }
        let token = won(&tier, 1, "alone").await;
        tier.complete(id("alone"), token, None, HOUR).await.map(drop).unwrap();
        for server in &redis.servers {
            let calls = server.calls().await;
            assert!(!calls.iter().any(|(name, _)| name == "publish"), "{calls:?}");
        }
        // Nor does one wait that came too late, or for what is not there.
        other.settled(id("alone")).await;
        other.settled(id("absent")).await;
        assert_eq!((tier.deaf(), other.deaf()), (0, 0));
    }
}

/// Whether somebody has noted that it waits for the record of `key`.
async fn is_waited_for(redis: &Redis, key: &str) -> bool {
    for server in &redis.servers {
        let mut admin = server.connect().await;
        let names: Vec<Vec<u8>> =
            cmd("KEYS").arg(format!("oncekey:*:r:*{key}")).query_async(&mut admin).await.unwrap();
        for name in names {
            let mut waited = cmd("HEXISTS");
            waited.arg(name).arg("waited");
            if waited.query_async::<bool>(&mut admin).await.unwrap() {
                return true;
            }
        }
    }
    false
}

/// The connection for waiting ends under those who wait: they are woken when it is back, because
/// something may have been said meanwhile. Nothing else needs it.
#[tokio::test]
async fn t5_a_connection_for_waiting_comes_back_by_itself() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let (tier, other) = (redis.tier().await, redis.tier().await);
    let token = won(&tier, 1, "k").await;
    let settled = |other: RedisTier| tokio::spawn(async move { other.settled(id("k")).await });
    let waiting = settled(other.clone());
    while !is_waited_for(&redis, "k").await {
        tokio::time::sleep(MS).await;
    }
    let mut admin = redis.servers[0].connect().await;
    let mut kill = cmd("CLIENT");
    let killed: u64 =
        kill.arg("KILL").arg("TYPE").arg("pubsub").query_async(&mut admin).await.unwrap();
    assert_eq!(killed, 1);
    waiting.await.unwrap();
    assert_eq!(other.deaf(), 1);
    // And it hears again.
    let waiting = settled(other.clone());
    while !is_subscribed(&mut admin).await {
        tokio::time::sleep(MS).await;
    }
    tier.complete(id("k"), token, None, HOUR).await.map(drop).unwrap();
    waiting.await.unwrap();
    // Where nobody may listen, all else goes on.
    let mut user = cmd("ACL");
    user.arg("SETUSER").arg("default").arg("-subscribe").arg("resetchannels");
    user.exec_async(&mut admin).await.unwrap();
    cmd("CLIENT").arg("KILL").arg("TYPE").arg("pubsub").exec_async(&mut admin).await.unwrap();
    let token = won(&tier, 1, "l").await;
    let mut waiting = tokio::spawn({
        let other = other.clone();
        async move { other.settled(id("l")).await }
    });
    while other.deaf() < 3 {
        tokio::time::sleep(MS).await;
    }
    let landed = other.complete(id("l"), token, None, HOUR).await.unwrap();
    assert_eq!(landed, Landed::Done);
    assert!(!waiting.is_finished());
    waiting.abort();
    let _ = (&mut waiting).await;
}

async fn is_subscribed(admin: &mut MultiplexedConnection) -> bool {
    let channels: Vec<Vec<u8>> = cmd("PUBSUB").arg("CHANNELS").query_async(admin).await.unwrap();
    !channels.is_empty()
}

/// Those who gave up waiting leave no subscription behind (R15).
#[tokio::test]
async fn r15_who_gives_up_waiting_leaves_nothing_behind() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let tier = redis.tier().await;
    won(&tier, 1, "k").await;
    let mut admin = redis.servers[0].connect().await;
    let settled = |tier: RedisTier| tokio::spawn(async move { tier.settled(id("k")).await });
    for _ in 0..20 {
        let waiting = [settled(tier.clone()), settled(tier.clone())];
        while !is_subscribed(&mut admin).await {
            tokio::time::sleep(MS).await;
        }
        for waiting in waiting {
            waiting.abort();
            let _ = waiting.await;
        }
        while is_subscribed(&mut admin).await {
            tokio::time::sleep(MS).await;
        }
    }
}
