//! What the steps are to the server: one script each, with an end for every key, whole or not at all.

use super::*;

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

/// The points of what is told go on, also where the clock of the server was set back, and a node that is
/// ahead of the server is told everything.
#[tokio::test]
async fn t9_what_is_forgotten_is_told_whatever_the_clock_does() {
    let _watchdog = watchdog();
    if !is_installed() {
        return;
    }
    let redis = Redis::server().await;
    let (tier, other) = (redis.tier().await, redis.tier().await);
    let told = async |since: u64| {
        let told = other.recalls(Some(since)).await.unwrap();
        let mut keys: Vec<_> = told
            .identities
            .into_iter()
            .map(|[_, _, key]| String::from_utf8(key).unwrap())
            .collect();
        keys.sort();
        (told.now, keys)
    };
    let forget = async |key: &str| {
        won(&tier, 1, key).await;
        assert_eq!(tier.forget(id(key), true).await.unwrap(), Forgotten::Gone);
    };
    let before = other.recalls(None).await.unwrap().now;
    forget("first").await;
    // The clock is an hour behind what it was when this was forgotten.
    let mut admin = redis.servers[0].connect().await;
    let names: Vec<Vec<u8>> = cmd("KEYS").arg("*:recalls").query_async(&mut admin).await.unwrap();
    let first: Vec<Vec<u8>> =
        cmd("ZRANGE").arg(&names[0]).arg(0).arg(-1).query_async(&mut admin).await.unwrap();
    let mut later = cmd("ZINCRBY");
    later.arg(&names[0]).arg(3_600_000).arg(&first[0]).exec_async(&mut admin).await.unwrap();
    let (point, keys) = told(before).await;
    assert_eq!(keys, ["first"]);
    assert_eq!(told(point).await, (point, vec![]));
    for key in ["second", "third"] {
        forget(key).await;
    }
    let (now, keys) = told(point).await;
    assert_eq!((now, keys), (point + 2, vec!["second".to_owned(), "third".to_owned()]));
    // Another server has taken over, whose clock is behind.
    let (_, keys) = told(now + 1).await;
    assert_eq!(keys, ["first", "second", "third"]);
}
