//! What a server must be (T2): refused at start, and never silently.

use super::*;

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
