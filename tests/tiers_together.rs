//! What memory and tier do together, on each tier there is: the reported faults that are about both.
//!
//! Time is real here, because the servers have clocks of their own: a short lease, and waiting until
//! the tier itself says that it has lapsed.
#![cfg(all(feature = "embedded", feature = "sqlite", feature = "postgres", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/postgres.rs"]
mod postgres_server;
#[path = "common/redis.rs"]
mod redis_server;
#[path = "common/tiers.rs"]
mod tiers;

use std::{path::PathBuf, sync::Arc, time::Duration};

use common::{LONG, id, outcome, watchdog};
use oncekey::{
    Fingerprint, Lapse, Outcome, Store,
    tier::{
        EmbeddedTier, Forgotten, MemoryTier, PostgresTier, RedisTier, SqliteTier, State, Tier,
        Tiered, TieredClaim, TieredError, TieredPermit, TieredSettled,
    },
};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tiers::{CLAIM, COMPLETE, LOOK_UP, Weather, Wire};

/// A tier, and what has to live as long.
struct Place {
    name: &'static str,
    tier: Arc<dyn Tier>,
    _server: Option<redis_server::Server>,
    directory: Option<PathBuf>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(directory) = self.directory.take() {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

fn directory(test: &str, name: &str) -> PathBuf {
    let name = format!("oncekey-{test}-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// All tiers whose servers are installed.
async fn places(test: &str) -> Vec<Place> {
    let place = |name, tier, server, directory| Place { name, tier, _server: server, directory };
    let mut places =
        vec![place("memory", Arc::new(MemoryTier::new()) as Arc<dyn Tier>, None, None)];
    let at = directory(test, "embedded");
    let tier = Arc::new(EmbeddedTier::open(&at).unwrap());
    places.push(place("embedded", tier, None, Some(at)));
    let at = directory(test, "sqlite");
    let file = SqliteConnectOptions::new().filename(at.join("db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(file).await.unwrap();
    places.push(place("sqlite", Arc::new(SqliteTier::open(pool).await.unwrap()), None, Some(at)));
    if let Some(server) = postgres_server::shared() {
        let builder = PostgresTier::builder().durability(oncekey::tier::Durability::KilledProcess);
        let schema = test.to_lowercase();
        let tier = builder.schema(&schema).connect(server.pool().await).await.unwrap();
        places.push(place("postgres", Arc::new(tier), None, None));
    }
    if redis_server::is_installed() {
        let server = redis_server::Server::durable().await;
        let tier = Arc::new(RedisTier::connect(&server.url()).await.unwrap());
        places.push(place("redis", tier, Some(server), None));
    }
    places
}

/// A node on a way of its own to the tier.
async fn node(place: &Place, lease: Duration, on_lapse: Lapse) -> (Tiered, Wire) {
    let wire = Wire::to(Arc::clone(&place.tier));
    let store = Store::builder().lease(lease).build().unwrap();
    let builder = Tiered::builder(store).poll_every(Duration::from_millis(10));
    (builder.open(wire.clone(), on_lapse).await.unwrap(), wire)
}

fn same() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"same")
}

fn other() -> Fingerprint {
    Fingerprint::request("POST", "/charges", b"other")
}

async fn won(node: &Tiered, key: &str) -> TieredPermit {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Won(permit)) => permit,
        other => panic!("not won: {other:?}"),
    }
}

async fn replayed(node: &Tiered, key: &str) -> Outcome {
    match node.claim(&id(key), same()).await {
        Ok(TieredClaim::Replay(replay)) => replay.into_outcome(),
        other => panic!("no replay: {other:?}"),
    }
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until the tier says that the owner of `key` has lapsed.
async fn lapsed(place: &Place, key: &str) {
    until(async || {
        let found = place.tier.look_up(id(key)).await.unwrap();
        found.unwrap().state == State::Lapsed
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_109_nodes_see_each_other_and_a_later_one_replays() {
    let _watchdog = watchdog();
    for place in places("case_109").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(b.look_up(&id("k")).await.unwrap(), None, "{}", place.name);
        won(&a, "k").await.complete(outcome("a")).await.unwrap();
        assert!(matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Mismatch)));
        assert_eq!(replayed(&b, "k").await, outcome("a"), "{}", place.name);
        drop(a);
        let (c, _) = node(&place, LONG, Lapse::Hold).await;
        assert_eq!(replayed(&c, "k").await, outcome("a"), "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_029_two_thousand_duplicates_ask_the_tier_a_few_times() {
    let _watchdog = watchdog();
    for place in places("case_029").await {
        let (node, wire) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&node, "k").await;
        let mut waiters = Vec::new();
        for n in 0..2_000 {
            let claim = node.claim(&id("k"), same()).await;
            let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{claim:?}") };
            if n % 2 == 0 {
                waiters.push(tokio::spawn(pending.wait()));
            }
        }
        permit.complete(outcome("1")).await.unwrap();
        for waiter in waiters {
            let settled = waiter.await.unwrap();
            assert!(matches!(settled, Ok(TieredSettled::Completed(_))), "{settled:?}");
        }
        let calls = [CLAIM, COMPLETE, LOOK_UP].map(|verb| wire.calls(verb));
        assert_eq!(calls, [1, 1, 0], "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t5_a_duplicate_on_another_node_waits_and_gets_the_same_bytes() {
    let _watchdog = watchdog();
    for place in places("t5").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        let permit = won(&a, "k").await;
        let Ok(TieredClaim::InFlight(pending)) = b.claim(&id("k"), same()).await else { panic!() };
        let waiter = tokio::spawn(pending.wait());
        until(async || b.store().stats().waiters == 1).await;
        let bytes = Outcome::new(201).header("x", b"\xff\x00").header("x", "").body(vec![0, 255]);
        permit.complete(bytes.clone()).await.unwrap();
        match waiter.await.unwrap() {
            Ok(TieredSettled::Completed(replay)) => assert_eq!(replay.into_outcome(), bytes),
            other => panic!("{}: {other:?}", place.name),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_105_outages_at_the_claim_and_at_the_completion() {
    let _watchdog = watchdog();
    for place in places("case_105").await {
        let (a, wire) = node(&place, LONG, Lapse::Hold).await;
        let (b, _) = node(&place, LONG, Lapse::Hold).await;
        wire.becomes(Weather::Down);
        let refused = a.claim(&id("refused"), same()).await;
        assert!(matches!(refused, Err(TieredError::Unavailable { .. })), "{}", place.name);
        assert_eq!(place.tier.look_up(id("refused")).await.unwrap(), None, "{}", place.name);
        for (key, weather) in [("down", Weather::Down), ("deaf", Weather::Deaf)] {
            wire.becomes(Weather::Fair);
            until(async || !a.stats().is_cut_off).await;
            let permit = won(&a, key).await;
            wire.becomes(weather);
            assert!(permit.complete(outcome(key)).await.unwrap().kept);
            assert_eq!(replayed(&a, key).await, outcome(key));
            wire.becomes(Weather::Fair);
            until(async || a.stats().unwritten == 0).await;
            assert_eq!(replayed(&b, key).await, outcome(key), "{}", place.name);
            assert_eq!((a.stats().lost, a.stats().given_up), (0, 0), "{}", place.name);
        }
    }
}

/// A node that shows no sign of life: its claim is taken over, and nothing it does afterwards counts.
#[tokio::test(flavor = "multi_thread")]
async fn case_013_case_033_case_036_a_silent_owner_is_taken_over_and_its_late_steps_are_lost() {
    let _watchdog = watchdog();
    for place in places("case_036").await {
        let (a, wire) = node(&place, Duration::from_secs(1), Lapse::TakeOver).await;
        let (b, _) = node(&place, LONG, Lapse::TakeOver).await;
        let late = [won(&a, "completed").await, won(&a, "released").await];
        // Before it lapses: in flight, on every node.
        let claim = b.claim(&id("completed"), same()).await;
        let Ok(TieredClaim::InFlight(pending)) = claim else { panic!("{}: {claim:?}", place.name) };
        *wire.beats.lock().unwrap() = Weather::Down;
        let Ok(TieredSettled::Yours(second)) = pending.wait().await else { panic!() };
        lapsed(&place, "released").await;
        let third = won(&b, "released").await;
        *wire.beats.lock().unwrap() = Weather::Fair;
        second.complete(outcome("b")).await.unwrap();
        until(async || !a.stats().is_cut_off).await;
        let [completed, released] = late;
        let lost = completed.complete(outcome("a")).await.unwrap_err();
        assert_eq!(lost.found().unwrap().state, State::Completed(outcome("b")), "{}", place.name);
        assert_eq!((a.stats().lost, a.stats().double_runs), (1, 1), "{}", place.name);
        assert!(released.release().await.is_err(), "{}", place.name);
        third.complete(outcome("b")).await.unwrap();
        for node in [&a, &b] {
            assert_eq!(replayed(node, "completed").await, outcome("b"), "{}", place.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t9_what_is_forgotten_is_forgotten_on_other_nodes() {
    let _watchdog = watchdog();
    for place in places("t9").await {
        let (a, _) = node(&place, LONG, Lapse::Hold).await;
        let (b, wire) = node(&place, LONG, Lapse::Hold).await;
        // It has asked once, so that it is told from here on.
        until(async || wire.calls(tiers::OTHERS) > 0).await;
        won(&a, "k").await.complete(outcome("1")).await.unwrap();
        assert_eq!(replayed(&b, "k").await, outcome("1"));
        assert_eq!(a.forget(&id("k"), false).await.unwrap(), Forgotten::Gone);
        until(async || matches!(b.claim(&id("k"), other()).await, Ok(TieredClaim::Won(_)))).await;
    }
}

/// A way to a server that cuts, keeps silent, or loses what comes back.
#[derive(Clone)]
struct Proxy {
    port: u16,
    mode: Arc<std::sync::atomic::AtomicUsize>,
    /// Those who are to be cut.
    cut: Arc<tokio::sync::Notify>,
}

const FAIR: usize = 0;
/// Nothing gets through, and nobody is told.
const SILENT: usize = 1;
/// What is asked gets there; what is answered is lost.
const ANSWERS_LOST: usize = 2;
/// New connections end at once.
const CUT: usize = 3;

impl Proxy {
    async fn to(server: String) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Self { port, mode: Arc::default(), cut: Arc::default() };
        let here = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if here.mode() == CUT {
                    continue;
                }
                let Ok(server) = tokio::net::TcpStream::connect(&server).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let there = here.clone().pass(from_client, to_server, |mode| mode != SILENT);
                let back = here.clone().pass(from_server, to_client, |mode| mode == FAIR);
                let here = here.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = there => {}
                        () = back => {}
                        () = here.cut.notified() => {}
                    }
                });
            }
        });
        proxy
    }

    fn mode(&self) -> usize {
        self.mode.load(std::sync::atomic::Ordering::SeqCst)
    }

    fn becomes(&self, mode: usize) {
        self.mode.store(mode, std::sync::atomic::Ordering::SeqCst);
        if mode == CUT {
            self.cut.notify_waiters();
        }
    }

    async fn pass(
        self,
        mut from: tokio::net::tcp::OwnedReadHalf,
        mut to: tokio::net::tcp::OwnedWriteHalf,
        gets_through: fn(usize) -> bool,
    ) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut bytes = vec![0; 16 << 10];
        loop {
            let Ok(read @ 1..) = from.read(&mut bytes).await else { return };
            // What was lost is lost: a connection that missed something is of no use any more.
            if !gets_through(self.mode()) {
                std::future::pending::<()>().await;
            }
            if to.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }
}

/// Whatever happens between us and the server: every client ends with the right answer, and no work
/// runs twice.
#[tokio::test(flavor = "multi_thread")]
async fn t2_t4_faults_on_the_wire_cost_time_and_no_second_effect() {
    const KEYS: usize = 120;
    let _watchdog = watchdog();
    let mut places: Vec<(&str, Arc<dyn Tier>, Proxy)> = Vec::new();
    if let Some(server) = postgres_server::shared() {
        let direct = server.options();
        let proxy = Proxy::to(format!("127.0.0.1:{}", direct.get_port())).await;
        let pool = sqlx::postgres::PgPoolOptions::new()
            .acquire_timeout(Duration::from_millis(300))
            .connect_with(direct.host("127.0.0.1").port(proxy.port))
            .await
            .unwrap();
        let builder = PostgresTier::builder().durability(oncekey::tier::Durability::KilledProcess);
        let tier = builder.schema("wire").connect(pool).await.unwrap();
        places.push(("postgres", Arc::new(tier), proxy));
    }
    let redis = if redis_server::is_installed() {
        let server = redis_server::Server::durable().await;
        let proxy = Proxy::to(format!("127.0.0.1:{}", server.port)).await;
        let url = format!("redis://127.0.0.1:{}", proxy.port);
        places.push(("redis", Arc::new(RedisTier::connect(&url).await.unwrap()), proxy));
        Some(server)
    } else {
        None
    };
    for (name, tier, proxy) in places {
        let store = Store::builder().lease(LONG).build().unwrap();
        let builder = Tiered::builder(store).answer_within(Duration::from_millis(200));
        let node = builder.open_shared(Arc::clone(&tier), Lapse::Hold).await.unwrap();
        let runs: Arc<Vec<_>> =
            Arc::new((0..KEYS).map(|_| std::sync::atomic::AtomicUsize::new(0)).collect());
        let mut clients = tokio::task::JoinSet::new();
        for n in 0..KEYS * 2 {
            let (node, runs) = (node.clone(), Arc::clone(&runs));
            clients.spawn(async move {
                let key = (n / 2).to_string();
                // They come one after the other, so that each kind of fault meets some.
                tokio::time::sleep(Duration::from_millis(25 * (n as u64 / 2))).await;
                loop {
                    match node.claim(&id(&key), same()).await {
                        Ok(TieredClaim::Won(permit)) => {
                            runs[n / 2].fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                            // Long enough that faults come between claim and completion.
                            tokio::time::sleep(Duration::from_millis(40)).await;
                            permit.complete(outcome(&key)).await.unwrap();
                            return;
                        }
                        Ok(TieredClaim::Replay(replay)) => {
                            assert_eq!(replay.into_outcome(), outcome(&key), "{name}");
                            return;
                        }
                        Ok(TieredClaim::InFlight(_)) | Err(TieredError::Unavailable { .. }) => {}
                        other => panic!("{name}, {key}: {other:?}"),
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
        }
        for mode in [SILENT, CUT, ANSWERS_LOST, CUT, SILENT, CUT, ANSWERS_LOST, CUT] {
            tokio::time::sleep(Duration::from_millis(150)).await;
            proxy.becomes(mode);
            tokio::time::sleep(Duration::from_millis(150)).await;
            proxy.becomes(CUT);
            proxy.becomes(FAIR);
        }
        while let Some(client) = clients.join_next().await {
            client.unwrap();
        }
        until(async || node.stats().unwritten == 0).await;
        let stats = node.stats();
        assert!(stats.failed > 0, "{name}: there were faults");
        assert_eq!((stats.lost, stats.double_runs, stats.given_up), (0, 0, 0), "{name}");
        // Another node has them all from the server.
        let later =
            Tiered::builder(Store::builder().build().unwrap()).open_shared(tier, Lapse::Hold);
        let later = later.await.unwrap();
        for (n, ran) in runs.iter().enumerate() {
            let ran = ran.load(std::sync::atomic::Ordering::SeqCst);
            assert_eq!(ran, 1, "{name}, {n}");
            let key = n.to_string();
            assert_eq!(replayed(&later, &key).await, outcome(&key), "{name}");
        }
    }
    drop(redis);
}
