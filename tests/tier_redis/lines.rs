//! Connections that go dead, lose an answer or deliver late, by a proxy between.

use super::*;

/// A step that is not answered costs a test so long; one that is has so long on a busy machine.
const LIMIT: Duration = Duration::from_secs(5);

/// A claim that was given up because no answer came may still be on its way, on a connection that was
/// replaced since. It must not claim anything when it arrives after its release.
#[tokio::test]
async fn t4_a_claim_that_arrives_after_its_release_claims_nothing() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let proxy = Proxy::to(redis.servers[0].port).await;
    let tier = patient().answer_within(LIMIT).connect(&proxy.url()).await.unwrap();
    // Else what arrives late is the name of a script that the server does not know.
    won(&tier, 1, "known").await;
    let claim = claim_of(1);
    proxy.hold_requests();
    unavailable(tier.claim(id("k"), claim).await);
    // On the next connection.
    assert_eq!(tier.release(id("k"), claim.token).await.unwrap(), Landed::Lost(None));
    let mut admin = redis.servers[0].connect().await;
    cmd("CONFIG").arg("RESETSTAT").exec_async(&mut admin).await.unwrap();
    proxy.pass();
    while !redis.servers[0].calls().await.iter().any(|(name, _)| name == "evalsha") {
        tokio::time::sleep(MS).await;
    }
    assert_eq!(state(&tier, "k").await, None);
    // Others claim it, and so does the same owner with its next token.
    won(&tier, 1, "k").await;
    assert_eq!(tier.vanished(), 0);
}

/// A line that is dead without a word costs one step its answer, and no more.
#[tokio::test]
async fn t2_a_half_open_connection_is_replaced() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let proxy = Proxy::to(redis.servers[0].port).await;
    let tier = patient().answer_within(LIMIT).connect(&proxy.url()).await.unwrap();
    let token = won(&tier, 1, "k").await;
    assert_eq!(proxy.lines(), 1);
    proxy.hold_requests();
    let text = unavailable(tier.look_up(id("k")).await);
    assert!(text.contains("no answer"), "{text}");
    assert_eq!(tier.complete(id("k"), token, None, HOUR).await.unwrap(), Landed::Done);
    assert_eq!(proxy.lines(), 2);
}

/// The connection ends between a step and its answer. Where a repeated step does no harm it is
/// repeated; where it would tell something else, the caller is told that nobody knows.
#[tokio::test]
async fn t6_an_answer_that_was_lost_is_asked_for_again() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let proxy = Proxy::to(redis.servers[0].port).await;
    let tier = patient().connect(&proxy.url()).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    let claim = claim_of(1);
    proxy.lose_answers();
    let claimed = tier.claim(id("k"), claim).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None });
    assert!(proxy.has_lost());
    proxy.lose_answers();
    let body = outcome("x");
    let landed = tier.complete(id("k"), claim.token, Some(&body), HOUR).await.unwrap();
    assert_eq!(landed, Landed::Done);
    assert_eq!(state(&tier, "k").await, Some(State::Completed(body)));
    let token = won(&tier, 1, "l").await;
    // The answer that gets lost is to be that of the step, not that the script is unknown.
    assert_eq!(tier.release(id("absent"), token).await.unwrap(), Landed::Lost(None));
    proxy.lose_answers();
    unavailable(tier.release(id("l"), token).await);
    assert_eq!(state(&tier, "l").await, None);
    assert_eq!(tier.vanished(), 0);
}

/// After a failover the name leads to the new primary, but the connection is still with the old one.
#[tokio::test]
async fn t2_a_connection_to_a_primary_that_was_demoted_is_replaced() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let (old, new) = (Server::durable().await, Server::durable().await);
    let proxy = Proxy::to(old.port).await;
    let tier = patient().connect(&proxy.url()).await.unwrap();
    won(&tier, 1, "k").await;
    proxy.lead_to(new.port);
    let mut demote = cmd("REPLICAOF");
    demote.arg("127.0.0.1").arg(new.port).exec_async(&mut old.connect().await).await.unwrap();
    let text = unavailable(tier.claim(id("l"), claim_of(1)).await);
    assert!(text.contains("primary"), "{text}");
    won(&tier, 1, "l").await;
    assert_eq!(proxy.lines(), 2);
}
