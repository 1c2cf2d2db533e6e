//! The tier in Redis, on servers of the tests' own: what the conformance suite asks of every tier, and
//! what is special to this one.
#![cfg(all(feature = "redis", feature = "conformance"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/proxy.rs"]
mod proxy;
#[path = "common/redis.rs"]
mod servers;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{HOUR, MS, SECOND, fp, id, outcome, watchdog};
use oncekey::{
    Outcome, Token,
    tier::{
        Claimed, Forgotten, Landed, NewClaim, RedisDurability, RedisTier, Resolved, State, Tier,
        TierError,
        conformance::{Host as _, check},
    },
};
use proxy::Proxy;
use redis::{aio::MultiplexedConnection, cmd};
use servers::{DURABLE, Redis, Server, is_installed, patient, replica_of};

const LEASE: Duration = Duration::from_secs(60);

/// A claim that no other test and no other owner has.
fn claim_of(owner: u64) -> NewClaim {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    NewClaim {
        token: Token::new(owner, NUMBER.fetch_add(1, Ordering::Relaxed)),
        fingerprint: fp("body"),
        max_run: HOUR,
        retention: HOUR,
    }
}

/// Claims `key` for `owner`, who beats.
async fn won(tier: &RedisTier, owner: u64, key: &str) -> Token {
    tier.beat(owner, LEASE).await.unwrap();
    let claim = claim_of(owner);
    let claimed = tier.claim(id(key), claim).await.unwrap();
    assert_eq!(claimed, Claimed::Won { checkpoint: None }, "{key}");
    claim.token
}

async fn state(tier: &RedisTier, key: &str) -> Option<State> {
    tier.look_up(id(key)).await.unwrap().map(|found| found.state)
}

async fn set(connection: &mut MultiplexedConnection, name: &str, value: &str) {
    cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(connection).await.unwrap();
}

/// The text of the refusal, which must not be one that passes.
#[track_caller]
fn unusable<T: std::fmt::Debug>(answer: Result<T, TierError>) -> String {
    match answer {
        Err(TierError::Unusable(error)) => error.to_string(),
        other => panic!("not refused as unusable: {other:?}"),
    }
}

#[track_caller]
fn unavailable<T: std::fmt::Debug>(answer: Result<T, TierError>) -> String {
    match answer {
        Err(TierError::Unavailable(error)) => error.to_string(),
        other => panic!("not unavailable: {other:?}"),
    }
}

#[tokio::test]
async fn t8_one_server_keeps_the_contract() {
    let _watchdog = watchdog();
    if is_installed() {
        let failures = check(&Redis::server().await).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

#[tokio::test]
async fn t8_a_cluster_keeps_the_contract() {
    let _watchdog = watchdog();
    if is_installed() {
        let failures = check(&Redis::cluster().await).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

/// Only one of the eight policies never drops a live key.
#[tokio::test]
async fn t2_a_server_that_may_evict_is_refused() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let server = Server::durable().await;
    let mut admin = server.connect().await;
    for policy in ["allkeys-lru", "volatile-lru", "volatile-ttl", "volatile-random"] {
        set(&mut admin, "maxmemory-policy", policy).await;
        let text = unusable(patient().connect(&server.url()).await);
        assert!(text.contains(policy) && text.contains("noeviction"), "{text}");
    }
    set(&mut admin, "maxmemory-policy", "noeviction").await;
    patient().connect(&server.url()).await.unwrap();
    // Of a cluster, each node counts.
    let cluster = Redis::cluster().await;
    set(&mut cluster.servers[2].connect().await, "maxmemory-policy", "volatile-lfu").await;
    let text = unusable(patient().connect_cluster(cluster.servers.iter().map(Server::url)).await);
    assert!(text.contains("volatile-lfu"), "{text}");
    assert!(text.contains(&cluster.servers[2].port.to_string()), "{text}");
}

#[tokio::test]
async fn t2_less_durability_than_asked_is_refused() {
    use RedisDurability::{EverySecond, PowerLoss, Unchecked};
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let server = Server::durable().await;
    let mut admin = server.connect().await;
    for (name, value, enough) in [
        ("appendfsync", "always", &[PowerLoss, EverySecond, Unchecked][..]),
        ("no-appendfsync-on-rewrite", "yes", &[EverySecond, Unchecked]),
        ("appendfsync", "everysec", &[EverySecond, Unchecked]),
        ("no-appendfsync-on-rewrite", "no", &[EverySecond, Unchecked]),
        ("appendfsync", "no", &[Unchecked]),
        ("appendfsync", "always", &[PowerLoss, EverySecond, Unchecked]),
        ("appendonly", "no", &[Unchecked]),
    ] {
        set(&mut admin, name, value).await;
        for asked in [PowerLoss, EverySecond, Unchecked] {
            let connected = patient().durability(asked).connect(&server.url()).await;
            if enough.contains(&asked) {
                connected.unwrap();
            } else {
                let text = unusable(connected);
                assert!(text.contains("append"), "{text}");
            }
        }
        // What is asked for by default is the most.
        let by_default = RedisTier::connect(&server.url()).await;
        assert_eq!(by_default.is_ok(), enough.contains(&PowerLoss), "{name}, {value}");
    }
}

#[tokio::test]
async fn t2_a_server_that_cannot_be_used_is_an_error_at_start() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    // Nobody there.
    let gone = { Server::durable().await.url() };
    unavailable(patient().answer_within(SECOND).connect(&gone).await);
    unavailable(patient().answer_within(SECOND).connect_cluster([&gone]).await);
    // Of a form that is none, and the password stays out of the text.
    let text = unusable(patient().connect("http://user:secret@host/").await);
    assert!(!text.contains("secret"), "{text}");
    let server = Server::durable().await;
    for prefix in ["", "a{b", "a}b"] {
        assert!(unusable(patient().prefix(prefix).connect(&server.url()).await).contains("prefix"));
    }
    assert!(
        unusable(patient().answer_within(Duration::ZERO).connect(&server.url()).await)
            .contains("answer_within")
    );
    // A replica, a node of a cluster, and no cluster.
    let replica = Server::start(&[DURABLE, &["--replicaof", "127.0.0.1", "1"]].concat()).await;
    assert!(unusable(patient().connect(&replica.url()).await).contains("replica"));
    let node = Server::start(&[DURABLE, &["--cluster-enabled", "yes"]].concat()).await;
    assert!(unusable(patient().connect(&node.url()).await).contains("connect_cluster"));
    let no_cluster = patient().connect_cluster([server.url()]).await;
    assert!(matches!(no_cluster, Err(TierError::Unusable(_) | TierError::Unavailable(_))));
    // A wrong password, and a user who may do all but set an expiry: a step would leave a record that
    // never ends.
    let mut admin = server.connect().await;
    let mut user = cmd("ACL");
    user.arg("SETUSER").arg("app").arg("on").arg(">right").arg("~*").arg("&*");
    user.arg("+@all").arg("-pexpireat").exec_async(&mut admin).await.unwrap();
    let url = |password: &str| format!("redis://app:{password}@127.0.0.1:{}/", server.port);
    let text = unusable(patient().connect(&url("wrong")).await);
    assert!(!text.contains("wrong@"), "{text}");
    let text = unusable(patient().connect(&url("right")).await);
    assert!(text.contains("rights") && text.contains("PEXPIREAT"), "{text}");
    let keys: u64 = cmd("DBSIZE").query_async(&mut admin).await.unwrap();
    assert_eq!(keys, 0, "what was refused at start has left nothing");
    cmd("ACL").arg("SETUSER").arg("app").arg("+pexpireat").exec_async(&mut admin).await.unwrap();
    let tier = patient().connect(&url("right")).await.unwrap();
    won(&tier, 1, "k").await;
    assert!(!format!("{tier:?}").contains("right"), "{tier:?}");
}

/// Services that share a server do not meet.
#[tokio::test]
async fn r01_prefixes_are_apart() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let server = Server::durable().await;
    let one = patient().connect(&server.url()).await.unwrap();
    let other = patient().prefix("other").connect(&server.url()).await.unwrap();
    won(&one, 1, "k").await;
    won(&other, 2, "k").await;
    let keys: Vec<String> =
        cmd("KEYS").arg("*").query_async(&mut server.connect().await).await.unwrap();
    let prefixes: BTreeSet<_> = keys.iter().map(|key| key.split(':').next().unwrap()).collect();
    assert_eq!(prefixes, BTreeSet::from(["oncekey", "other"]));
}

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

/// Whatever runs: no key is ever seen without an expiry.
#[tokio::test(flavor = "multi_thread")]
async fn case_108_every_key_has_an_end_at_every_moment() {
    const CALLERS: u64 = 4;
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let tier = redis.tier().await;
    let mut scan = redis.servers[0].connect().await;
    let is_over = Arc::new(AtomicBool::new(false));
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..CALLERS {
        let (tier, is_over) = (tier.clone(), Arc::clone(&is_over));
        callers.spawn(async move {
            for n in 0.. {
                let key = format!("{caller}-{n}");
                let key = key.as_str();
                let token = won(&tier, caller, key).await;
                tier.checkpoint(id(key), token, "half".into()).await.map(drop).unwrap();
                // Waits for it, and gives up.
                let _ = tokio::time::timeout(MS, tier.settled(id(key))).await;
                match n % 6 {
                    0 => tier.complete(id(key), token, Some(&outcome(key)), HOUR).await.map(drop),
                    1 => tier.complete(id(key), token, None, HOUR).await.map(drop),
                    2 => tier.release(id(key), token).await.map(drop),
                    3 => tier.forget(id(key), true).await.map(drop),
                    _ => tier.hold(id(key), token, HOUR).await.map(drop),
                }
                .unwrap();
                match n % 6 {
                    4 => {
                        let body = outcome(key);
                        let resolved = tier.resolve(id(key), Some(&body), HOUR).await.unwrap();
                        assert_eq!(resolved, Resolved::Done);
                    }
                    5 => {
                        let taken = tier.take_over(id(key), token, claim_of(caller)).await.unwrap();
                        assert!(matches!(taken, Claimed::Won { .. }));
                    }
                    _ => {}
                }
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
            }
        });
    }
    let mut kinds = BTreeSet::new();
    let mut seen = 0;
    // One step sees all keys as they are at one moment.
    let endless = "local all = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
                   all[#all + 1] = {key, redis.call('PTTL', key)} end return all";
    while seen < 3_000 || kinds.len() < 3 {
        let mut all = cmd("EVAL");
        let all = all.arg(endless).arg(0).query_async(&mut scan).await.unwrap();
        let all: Vec<(Vec<u8>, i64)> = all;
        for (key, ttl) in &all {
            let key = String::from_utf8_lossy(key);
            assert!(*ttl > 0, "{key} ends in {ttl}");
            assert!(*ttl <= 3 * 3_600_000, "{key} ends in {ttl}");
            kinds.insert(key.split(':').nth(2).unwrap().to_owned());
        }
        seen += all.len();
    }
    is_over.store(true, Ordering::SeqCst);
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    let kinds: Vec<_> = kinds.iter().map(String::as_str).collect();
    assert_eq!(kinds, ["owners", "r", "recalls"]);
}

/// Each verb is one script: one round trip, and no second one once the server knows the script.
#[tokio::test]
async fn t3_each_verb_is_one_round_trip() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let (tier, other) = (redis.tier().await, redis.tier().await);
    let mut admin = redis.servers[0].connect().await;
    macro_rules! verbs {
        ($counted:ident) => {
            let claim = claim_of(1);
            let (token, body) = (claim.token, outcome("x"));
            $counted!("beat", tier.beat(1, LEASE));
            $counted!("claim", tier.claim(id("k"), claim));
            $counted!("met", other.claim(id("k"), claim_of(1)));
            $counted!("look_up", tier.look_up(id("k")));
            $counted!("checkpoint", tier.checkpoint(id("k"), token, "half".into()));
            $counted!("hold", tier.hold(id("k"), token, HOUR));
            $counted!("take_over", tier.take_over(id("k"), token, claim_of(1)));
            $counted!("lost", tier.complete(id("k"), token, Some(&body), HOUR));
            $counted!("forget", tier.forget(id("k"), true));
            let claim = claim_of(1);
            $counted!("claim", tier.claim(id("k"), claim));
            $counted!("complete", tier.complete(id("k"), claim.token, Some(&body), HOUR));
            $counted!("replay", other.claim(id("k"), claim_of(1)));
            $counted!("resolve", tier.resolve(id("k"), None, HOUR));
            $counted!("recalls", tier.recalls(None));
            let claim = claim_of(1);
            $counted!("claim", tier.claim(id("l"), claim));
            $counted!("release", tier.release(id("l"), claim.token));
            let nobody = tier.reap(10).await.unwrap();
            assert_eq!(nobody, 0);
        };
    }
    macro_rules! uncounted {
        ($verb:literal, $call:expr) => {
            let _ = $call.await.unwrap();
        };
    }
    verbs!(uncounted);
    tier.forget(id("k"), true).await.unwrap();
    macro_rules! counted {
        ($verb:literal, $call:expr) => {
            cmd("CONFIG").arg("RESETSTAT").exec_async(&mut admin).await.unwrap();
            let _ = $call.await.unwrap();
            let calls = redis.servers[0].calls().await;
            let calls: BTreeMap<_, _> = calls.into_iter().collect();
            assert_eq!(calls.get("evalsha"), Some(&1), "{}: {calls:?}", $verb);
            assert_eq!(calls.get("eval"), None, "{}: {calls:?}", $verb);
        };
    }
    verbs!(counted);
}

/// A server that was restarted, or that was a replica, has no scripts.
#[tokio::test]
async fn t2_a_server_that_does_not_know_the_scripts_is_told_them() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let tier = redis.tier().await;
    let token = won(&tier, 1, "k").await;
    let mut admin = redis.servers[0].connect().await;
    cmd("SCRIPT").arg("FLUSH").exec_async(&mut admin).await.unwrap();
    let landed = tier.complete(id("k"), token, None, HOUR).await.unwrap();
    assert_eq!(landed, Landed::Done);
}

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
    let tier = patient().answer_within(SECOND).connect(&proxy.url()).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
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
    let tier = patient().answer_within(SECOND).connect(&proxy.url()).await.unwrap();
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

/// A server that is full, read-only or busy loading refuses a step as a whole, and for a time.
#[tokio::test]
async fn t2_a_server_that_refuses_leaves_nothing_half_done() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let tier = redis.tier().await;
    let mut admin = redis.servers[0].connect().await;
    let (in_flight, held) = (won(&tier, 1, "in flight").await, won(&tier, 1, "held").await);
    tier.hold(id("held"), held, HOUR).await.map(drop).unwrap();
    let dump = async |admin: &mut MultiplexedConnection| -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut all = cmd("EVAL");
        let text = "local all = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
                    all[#all + 1] = {key, redis.call('DUMP', key)} end return all";
        let mut all: Vec<_> = all.arg(text).arg(0).query_async(admin).await.unwrap();
        all.sort();
        all
    };
    let before = dump(&mut admin).await;
    let nothing_changes = async |admin: &mut MultiplexedConnection, says: &str| {
        let body = outcome("x");
        let texts = [
            unavailable(tier.claim(id("new"), claim_of(1)).await),
            unavailable(tier.take_over(id("held"), held, claim_of(1)).await),
            unavailable(tier.complete(id("in flight"), in_flight, Some(&body), HOUR).await),
            unavailable(tier.hold(id("in flight"), in_flight, HOUR).await),
            unavailable(tier.checkpoint(id("in flight"), in_flight, "x".into()).await),
            unavailable(tier.resolve(id("held"), Some(&body), HOUR).await),
            unavailable(tier.beat(2, LEASE).await),
        ];
        for text in texts {
            assert!(text.contains(says), "{text}");
        }
        assert_eq!(dump(admin).await, before, "{says}");
    };
    set(&mut admin, "maxmemory", "1").await;
    nothing_changes(&mut admin, "full").await;
    // What gives room back is let through.
    assert_eq!(tier.forget(id("absent"), true).await.unwrap(), Forgotten::Absent);
    set(&mut admin, "maxmemory", "0").await;
    cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec_async(&mut admin).await.unwrap();
    nothing_changes(&mut admin, "primary").await;
    cmd("REPLICAOF").arg("NO").arg("ONE").exec_async(&mut admin).await.unwrap();
    set(&mut admin, "min-replicas-to-write", "1").await;
    nothing_changes(&mut admin, "NOREPLICAS").await;
    set(&mut admin, "min-replicas-to-write", "0").await;
    // All is as before, over new connections.
    assert_eq!(tier.complete(id("in flight"), in_flight, None, HOUR).await.unwrap(), Landed::Done);
    set(&mut admin, "maxmemory", "1").await;
    assert_eq!(tier.forget(id("held"), false).await.unwrap(), Forgotten::Gone);
    set(&mut admin, "maxmemory", "0").await;
    let told = tier.recalls(Some(0)).await.unwrap();
    assert_eq!(told.identities.len(), 1);
}

/// What is not ours, or of a version to come, is refused for good, and stays as it is.
#[tokio::test]
async fn t2_foreign_records_are_refused() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let tier = redis.tier().await;
    let mut admin = redis.servers[0].connect().await;
    let token = won(&tier, 1, "k").await;
    let body = outcome("x");
    tier.complete(id("k"), token, Some(&body), HOUR).await.map(drop).unwrap();
    let record: Vec<Vec<u8>> = cmd("KEYS").arg("*:r:*").query_async(&mut admin).await.unwrap();
    let [record] = &record[..] else { panic!("one record") };
    for (field, value, says) in [
        ("format", &b"2"[..], "format 2"),
        ("token", b"x", "token"),
        ("fingerprint", b"short", "fingerprint"),
        ("state", b"strange", "state"),
        ("outcome", b"\x02", "version 2"),
        ("outcome", b"\x01\0", "damaged"),
    ] {
        let before: Vec<u8> =
            cmd("HGET").arg(record).arg(field).query_async(&mut admin).await.unwrap();
        let mut put = cmd("HSET");
        put.arg(record).arg(field).arg(value).exec_async(&mut admin).await.unwrap();
        for text in [
            unusable(tier.look_up(id("k")).await),
            unusable(tier.claim(id("k"), claim_of(1)).await),
        ] {
            assert!(text.contains(says), "{field}: {text}");
        }
        let mut put = cmd("HSET");
        put.arg(record).arg(field).arg(before).exec_async(&mut admin).await.unwrap();
    }
    assert_eq!(state(&tier, "k").await, Some(State::Completed(body)));
    cmd("SET").arg(record).arg("a value of somebody else").exec_async(&mut admin).await.unwrap();
    let text = unusable(tier.claim(id("k"), claim_of(1)).await);
    assert!(text.contains("prefix"), "{text}");
}

/// With `replicas(1)` a step counts once a replica has it, and is unavailable until then.
#[tokio::test]
async fn t2_a_step_waits_for_its_replicas() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let primary = Server::durable().await;
    let asking = || patient().answer_within(2 * SECOND).replicas(1);
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

/// Records are spread over the nodes, each beside a heartbeat of its owner.
#[tokio::test]
async fn t10_each_node_of_a_cluster_has_records_and_heartbeats() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::cluster().await;
    let tier = redis.tier().await;
    // What stands in braces in an identity does not decide where it is.
    for n in 0..200 {
        won(&tier, 1, &format!("{{id}}-{n}")).await;
    }
    let mut owners = 0;
    for server in &redis.servers {
        let keys: Vec<Vec<u8>> =
            cmd("KEYS").arg("*").query_async(&mut server.connect().await).await.unwrap();
        let count = |what: &str| {
            keys.iter().filter(|key| String::from_utf8_lossy(key).contains(what)).count()
        };
        assert!(count("}:r:") > 30, "{} of 200 records", count("}:r:"));
        owners += count("}:owners");
    }
    assert_eq!(owners, 64);
}

/// A node that is gone takes the cluster with it until it is back; nothing is half done.
#[tokio::test]
async fn t2_a_cluster_that_lost_a_node_is_unavailable_until_it_is_back() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let mut redis = Redis::cluster().await;
    redis.builder = patient().answer_within(2 * SECOND);
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
