//! Redis servers of the tests' own: each in a directory of its own, on free ports of the loopback, with
//! an append-only file that is synced always. They end with the test, also if that dies.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    fs,
    future::Future,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncekey::tier::{RedisBuilder, RedisTier, Tier, conformance::Host};
use redis::{aio::MultiplexedConnection, cmd, from_redis_value};

/// Whether there is a server to start. If not, says so; with `CI` set that is a failure.
pub fn is_installed() -> bool {
    if program().is_some() {
        return true;
    }
    let how = "redis-server is not installed: apt-get install --no-install-recommends redis-server";
    assert!(std::env::var_os("CI").is_none(), "{how}");
    println!("skipped: {how}");
    false
}

fn program() -> Option<&'static Path> {
    ["/usr/bin", "/usr/local/bin", "/opt/homebrew/bin", "/usr/sbin"]
        .into_iter()
        .flat_map(|dir| ["redis-server", "valkey-server"].map(|name| Path::new(dir).join(name)))
        .find(|path| path.exists())
        .map(|path| &*Box::leak(path.into_boxed_path()))
}

/// What a durable server is started with.
pub const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

pub struct Server {
    pub port: u16,
    args: Vec<String>,
    dir: PathBuf,
    child: Child,
}

impl Server {
    /// One that keeps what it is given.
    pub async fn durable() -> Self {
        Self::start(DURABLE).await
    }

    pub async fn start(args: &[&str]) -> Self {
        static NTH: AtomicUsize = AtomicUsize::new(0);
        loop {
            let nth = NTH.fetch_add(1, Ordering::Relaxed);
            let name = format!("oncekey-redis-{}-{nth}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            fs::create_dir(&dir).unwrap();
            let port = free_port();
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            let child = spawn(port, &args, &dir);
            let mut server = Self { port, args, dir, child };
            if server.answers().await {
                return server;
            }
            // Somebody took a port that was free a moment ago.
        }
    }

    /// Until it has loaded its data; false if it ended instead.
    async fn answers(&mut self) -> bool {
        loop {
            if let Ok(mut connection) = self.try_connect().await
                && cmd("PING").exec_async(&mut connection).await.is_ok()
            {
                return true;
            }
            if self.child.try_wait().unwrap().is_some() {
                let said = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
                assert!(said.contains("Address already in use"), "it does not start: {said}");
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub async fn connect(&self) -> MultiplexedConnection {
        self.try_connect().await.unwrap()
    }

    async fn try_connect(&self) -> redis::RedisResult<MultiplexedConnection> {
        let config =
            redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
        let client = redis::Client::open(self.url()).unwrap();
        client.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Kills it: no warning, no last write.
    pub fn kill(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }

    /// Starts it again where it was, on what it has written.
    pub async fn restart(&mut self) {
        loop {
            self.child = spawn(self.port, &self.args, &self.dir);
            if self.answers().await {
                return;
            }
        }
    }

    /// Returns when the server says so of itself.
    pub async fn says(&self, line: &str) {
        let mut connection = self.connect().await;
        loop {
            let info: String =
                cmd("INFO").arg("replication").query_async(&mut connection).await.unwrap();
            if info.lines().any(|said| said == line) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// How often each command was called, those of scripts included, since the last reset.
    pub async fn calls(&self) -> Vec<(String, u64)> {
        let mut connection = self.connect().await;
        let text: String =
            cmd("INFO").arg("commandstats").query_async(&mut connection).await.unwrap();
        text.lines()
            .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="))
            .map(|(name, rest)| (name.to_owned(), rest.split(',').next().unwrap().parse().unwrap()))
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            println!("redis on {} said: {said}", self.port);
        }
        self.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn spawn(port: u16, args: &[String], dir: &Path) -> Child {
    // It ends when its standard input does, which is when this process lets go of it.
    let run = "exec 3<&0; (read -r _ <&3; kill -9 $$) & exec \"$@\" 3<&-";
    Command::new("sh")
        .args(["-c", run, "sh"])
        .arg(program().unwrap())
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
        .args(["--logfile", "log", "--dir"])
        .arg(dir)
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Free, and so is the one that a node of a cluster on it would take for its bus.
fn free_port() -> u16 {
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        if port < 55_000 && TcpListener::bind((Ipv4Addr::LOCALHOST, port + 10_000)).is_ok() {
            return port;
        }
    }
}

/// Three primaries that share all slots.
pub struct Cluster {
    pub nodes: Vec<Server>,
}

impl Cluster {
    pub async fn start() -> Self {
        let mut nodes = Vec::new();
        for _ in 0..3 {
            let args = [DURABLE, &["--cluster-enabled", "yes"]].concat();
            nodes.push(Server::start(&args).await);
        }
        let bounds = [0, 5461, 10_923, 16_384];
        for (node, slots) in nodes.iter().zip(bounds.windows(2)) {
            let mut connection = node.connect().await;
            let mut add = cmd("CLUSTER");
            add.arg("ADDSLOTSRANGE").arg(slots[0]).arg(slots[1] - 1);
            add.exec_async(&mut connection).await.unwrap();
            let mut meet = cmd("CLUSTER");
            meet.arg("MEET").arg("127.0.0.1").arg(nodes[0].port);
            meet.exec_async(&mut connection).await.unwrap();
        }
        for node in &nodes {
            let mut connection = node.connect().await;
            loop {
                let info: String =
                    cmd("CLUSTER").arg("INFO").query_async(&mut connection).await.unwrap();
                if info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Self { nodes }
    }
}

/// Makes a new node a replica of `primary`, and returns once it has its data.
pub async fn replica_of(primary: &Server) -> Server {
    let replica = Server::start(&[DURABLE, &["--cluster-enabled", "yes"]].concat()).await;
    let mut connection = replica.connect().await;
    let mut meet = cmd("CLUSTER");
    meet.arg("MEET").arg("127.0.0.1").arg(primary.port);
    meet.exec_async(&mut connection).await.unwrap();
    let mut myself = cmd("CLUSTER");
    myself.arg("MYID");
    let id: String = myself.query_async(&mut primary.connect().await).await.unwrap();
    let mut replicate = cmd("CLUSTER");
    replicate.arg("REPLICATE").arg(id);
    // Until it has heard of the primary.
    while replicate.exec_async(&mut connection).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    replica.says("master_link_status:up").await;
    replica
}

/// A tier on servers of the tests.
pub struct Redis {
    pub servers: Vec<Server>,
    is_cluster: bool,
    pub builder: RedisBuilder,
}

impl Redis {
    pub async fn server() -> Self {
        let servers = vec![Server::durable().await];
        Self { servers, is_cluster: false, builder: patient() }
    }

    pub async fn cluster() -> Self {
        let servers = Cluster::start().await.nodes;
        Self { servers, is_cluster: true, builder: patient() }
    }

    pub async fn tier(&self) -> RedisTier {
        let builder = self.builder.clone();
        let tier = if self.is_cluster {
            builder.connect_cluster(self.servers.iter().map(Server::url)).await
        } else {
            builder.connect(&self.servers[0].url()).await
        };
        tier.unwrap()
    }
}

/// A machine that is busy with others takes its time.
pub fn patient() -> RedisBuilder {
    RedisTier::builder().answer_within(Duration::from_secs(30))
}

/// Takes `by` from each stamp of a record and of the owners, and from each expiry. What was recalled
/// keeps its number, because those who ask have kept theirs.
const SHIFT: &str = "
local by = tonumber(ARGV[1])
for _, key in ipairs(redis.call('KEYS', ARGV[2])) do
  local is = redis.call('TYPE', key).ok
  if is == 'hash' then
    for _, name in ipairs({'since', 'due'}) do
      redis.call('HINCRBY', key, name, -by)
    end
  elseif is == 'zset' and string.sub(key, -6) == 'owners' then
    for _, owner in ipairs(redis.call('ZRANGE', key, 0, -1)) do
      redis.call('ZINCRBY', key, -by, owner)
    end
  end
  redis.call('PEXPIRE', key, redis.call('PTTL', key) - by)
end
";

impl Host for Redis {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async { Arc::new(self.tier().await) as Arc<dyn Tier> })
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            for server in &self.servers {
                let mut connection = server.connect().await;
                let mut shift = cmd("EVAL");
                shift.arg(SHIFT).arg(0).arg(by.as_millis() as u64).arg("oncekey:*");
                let shifted = shift.query_async::<redis::Value>(&mut connection).await;
                from_redis_value::<redis::Value>(shifted.unwrap()).unwrap();
            }
        })
    }
}
