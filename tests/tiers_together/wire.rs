//! A way to a server that fails.

use std::sync::atomic::{AtomicUsize, Ordering};

use Line::{AnswersLost, Cut, Fair, PingsLost, Silent, Slow};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
    sync::{Notify, watch},
};

use super::*;

/// What becomes of what is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Fair,
    /// It gets there when it is delivered, and so does the answer: what is said later, on another
    /// connection, is faster.
    Slow,
    /// It is lost, and nobody is told.
    Silent,
    /// What is asked gets there; what is answered is lost.
    AnswersLost,
    /// As fair, but that a connection of Postgres which is only asked whether it is still there says
    /// nothing any more.
    PingsLost,
    /// Connections end, new ones at once.
    Cut,
}

/// Postgres' message "Sync" alone.
const PING: &[u8] = &[b'S', 0, 0, 0, 4];

/// A way to a server.
#[derive(Clone)]
struct Proxy {
    port: u16,
    line: watch::Sender<Line>,
    /// Whether what was slow is still on its way.
    under_way: watch::Sender<bool>,
    /// Those who are to be cut.
    cut: Arc<Notify>,
}

impl Proxy {
    async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (line, under_way) = (watch::Sender::default(), watch::Sender::default());
        let proxy = Self { port, line, under_way, cut: Arc::default() };
        let here = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *here.line.borrow() == Cut {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let there = here.clone().pass(from_client, to_server, |line, bytes| {
                    line != Silent && (line != PingsLost || bytes != PING)
                });
                let back = here
                    .clone()
                    .pass(from_server, to_client, |line, _| matches!(line, Fair | PingsLost));
                let here = here.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        // Whoever has gone takes back nothing of what is on its way.
                        () = async { tokio::join!(there, back); } => {}
                        () = here.cut.notified() => {}
                    }
                });
            }
        });
        proxy
    }

    fn becomes(&self, line: Line) {
        if line == Slow {
            self.under_way.send_replace(true);
        }
        self.line.send_replace(line);
        if line == Cut {
            self.cut.notify_waiters();
        }
    }

    /// Lets what was slow get there.
    fn deliver(&self) {
        self.under_way.send_replace(false);
    }

    async fn pass(
        self,
        mut from: tcp::OwnedReadHalf,
        mut to: tcp::OwnedWriteHalf,
        gets_through: fn(Line, &[u8]) -> bool,
    ) {
        let (mut bytes, mut under_way) = (vec![0; 16 << 10], self.under_way.subscribe());
        loop {
            let Ok(read @ 1..) = from.read(&mut bytes).await else { return };
            let is_slow = *self.line.borrow() == Slow;
            if is_slow && under_way.wait_for(|under_way| !under_way).await.is_err() {
                return;
            }
            let now = *self.line.borrow();
            // What was lost is lost: a connection that missed something is of no use any more. Nobody
            // is told, neither now nor when the line is fair again.
            if !gets_through(now, &bytes[..read]) {
                std::future::pending::<()>().await;
            }
            if to.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }
}

/// Until all connections are there, and none is being asked anything.
async fn all_idle(pool: &sqlx::PgPool, connections: usize) {
    let all = (0..connections).map(|_| pool.acquire());
    drop(futures_util::future::try_join_all(all).await.unwrap());
    until(async || pool.num_idle() == connections).await;
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
            // Else it is a test of the connection that is slow, and not the claim.
            .test_before_acquire(false)
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
        let runs: Arc<Vec<_>> = Arc::new((0..KEYS).map(|_| AtomicUsize::new(0)).collect());
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
                            runs[n / 2].fetch_add(1, Ordering::SeqCst);
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
        let mut late = Vec::new();
        for line in [Silent, Cut, Slow, AnswersLost, Cut, Silent, Slow, Cut, AnswersLost, Slow] {
            tokio::time::sleep(Duration::from_millis(120)).await;
            if line == Slow {
                until(async || !node.stats().is_cut_off).await;
            }
            proxy.becomes(line);
            if line == Slow {
                // A claim that is given up, and gets there when its release has found nothing. Where
                // all share one connection its release waits behind it.
                let key = format!("late {}", late.len());
                let claim = node.claim(&id(&key), same()).await;
                assert!(matches!(claim, Err(TieredError::Unavailable { .. })), "{name}: {claim:?}");
                late.push(key);
                proxy.becomes(Fair);
                let told = until(async || node.stats().unwritten == 0);
                let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
                proxy.deliver();
            } else {
                tokio::time::sleep(Duration::from_millis(120)).await;
            }
            proxy.becomes(Fair);
        }
        while let Some(client) = clients.join_next().await {
            client.unwrap();
        }
        until(async || node.stats().unwritten == 0).await;
        // They shut nobody out.
        for key in &late {
            until(async || matches!(node.claim(&id(key), same()).await, Ok(TieredClaim::Won(_))))
                .await;
        }
        let stats = node.stats();
        assert!(stats.failed > 0, "{name}: there were faults");
        assert_eq!((stats.lost, stats.double_runs, stats.given_up), (0, 0, 0), "{name}");
        // Another node has them all from the server.
        let later =
            Tiered::builder(Store::builder().build().unwrap()).open_shared(tier, Lapse::Hold);
        let later = later.await.unwrap();
        for (n, ran) in runs.iter().enumerate() {
            let ran = ran.load(Ordering::SeqCst);
            assert_eq!(ran, 1, "{name}, {n}");
            let key = n.to_string();
            assert_eq!(replayed(&later, &key).await, outcome(&key), "{name}");
        }
    }
    drop(redis);
}

/// A claim whose caller has given up gets there after its release, which has found nothing. It is
/// looked for again, so it shuts nobody out.
#[tokio::test(flavor = "multi_thread")]
async fn t4_a_claim_that_arrives_after_its_release_is_released_once_more() {
    let _watchdog = watchdog();
    let Some(server) = postgres_server::shared() else { return };
    let builder = PostgresTier::builder().schema("late");
    let builder = builder.durability(oncekey::tier::Durability::KilledProcess);
    let beside = builder.clone().connect(server.pool().await).await.unwrap();
    let proxy = Proxy::to(format!("127.0.0.1:{}", server.options().get_port())).await;
    // The claim waits on one connection, and maybe a heartbeat or a poll; its release passes.
    let pool = sqlx::postgres::PgPoolOptions::new()
        .min_connections(6)
        .max_connections(6)
        .test_before_acquire(false)
        .connect_with(server.options().host("127.0.0.1").port(proxy.port))
        .await
        .unwrap();
    let tier: Arc<dyn Tier> = Arc::new(builder.connect(pool.clone()).await.unwrap());
    let store = Store::builder().lease(LONG).build().unwrap();
    let node = Tiered::builder(store).answer_within(Duration::from_millis(500));
    let node = node.open_shared(tier, Lapse::Hold).await.unwrap();
    // All have prepared their statements.
    for round in 0..20 {
        let warm = (0..6).map(|n| {
            let node = node.clone();
            async move {
                let claim = node.claim(&id(&format!("{round} {n}")), same()).await.unwrap();
                let TieredClaim::Won(permit) = claim else { panic!("{claim:?}") };
                permit.release().await.unwrap();
            }
        });
        futures_util::future::join_all(warm).await;
    }

    // Else the claim may not be sent: a connection that is asked whether it is still there is slow too.
    all_idle(&pool, 6).await;
    proxy.becomes(Slow);
    let claim = node.claim(&id("late"), same()).await;
    assert!(matches!(claim, Err(TieredError::Unavailable { .. })), "{claim:?}");
    proxy.becomes(Fair);
    until(async || node.stats().unwritten == 0).await;
    assert_eq!(beside.look_up(id("late")).await.unwrap(), None, "it is still on its way");
    proxy.deliver();
    until(async || beside.look_up(id("late")).await.unwrap().is_some()).await;
    until(async || beside.look_up(id("late")).await.unwrap().is_none()).await;
}

/// Servers and firewalls go without a word: the connections stay, and are silent for ever. There is
/// a place in the pool for new ones, whether the old ones were asked something or only whether they
/// are still there.
#[tokio::test(flavor = "multi_thread")]
async fn t2_connections_that_fall_silent_leave_their_places_in_the_pool() {
    const CONNECTIONS: u32 = 2;
    let _watchdog = watchdog();
    let Some(server) = postgres_server::shared() else { return };
    let proxy = Proxy::to(format!("127.0.0.1:{}", server.options().get_port())).await;
    let pool = sqlx::postgres::PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .test_before_acquire(false)
        .connect_with(server.options().host("127.0.0.1").port(proxy.port))
        .await
        .unwrap();
    let builder = PostgresTier::builder().durability(oncekey::tier::Durability::KilledProcess);
    let tier = builder.schema("silent").connect(pool.clone()).await.unwrap();
    tier.beat(1, LONG).await.unwrap();
    let claim = |number: u64| NewClaim {
        token: Token::new(1, number),
        fingerprint: same(),
        max_run: LONG,
        retention: LONG,
    };
    for (round, line) in [PingsLost, Silent, AnswersLost].into_iter().enumerate() {
        all_idle(&pool, CONNECTIONS as usize).await;
        proxy.becomes(line);
        for n in 1..=u64::from(CONNECTIONS) {
            let key = format!("{round} {n}");
            let answer = tier.claim(id(&key), claim(n));
            if line == PingsLost {
                assert!(matches!(answer.await, Ok(Claimed::Won { .. })));
            } else {
                let answer = tokio::time::timeout(Duration::from_millis(100), answer).await;
                assert!(answer.is_err(), "{line:?}: {answer:?}");
            }
        }
        proxy.becomes(Fair);
        for n in 3..=9 {
            let key = format!("{round} {n}");
            let answer = tier.claim(id(&key), claim(n)).await;
            assert!(matches!(answer, Ok(Claimed::Won { .. })), "{line:?}: {answer:?}");
        }
    }
}

/// The one connection to Redis is replaced when it is silent, also if no caller ever waits for as
/// long as that takes to know.
#[tokio::test(flavor = "multi_thread")]
async fn t2_a_connection_that_falls_silent_is_replaced_however_soon_callers_give_up() {
    let _watchdog = watchdog();
    if !redis_server::is_installed() {
        return;
    }
    let server = redis_server::Server::durable().await;
    let proxy = Proxy::to(format!("127.0.0.1:{}", server.port)).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port);
    let builder = RedisTier::builder().answer_within(Duration::from_millis(500));
    let tier = builder.connect(&url).await.unwrap();
    let beats = async || {
        let beat = tokio::time::timeout(Duration::from_millis(100), tier.beat(1, LONG)).await;
        matches!(beat, Ok(Ok(())))
    };
    for line in [Silent, AnswersLost] {
        until(beats).await;
        proxy.becomes(line);
        assert!(!beats().await, "{line:?}");
        proxy.becomes(Fair);
        until(beats).await;
    }
}
