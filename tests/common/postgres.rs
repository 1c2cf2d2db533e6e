//! A real Postgres of the tests' own, and a PgBouncer in front of it.
//!
//! Each is private: in a directory of its own, on a free port of the loopback, and it ends with the
//! test program, also if that dies. Where the programs are missing a test says so and passes; with
//! `CI` set that is a failure.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    fs,
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
};

/// What a server that need not survive the machine is started with.
pub const FAST: &[&str] = &["fsync=off", "full_page_writes=off"];

/// The server that the tests of one program share, and its databases. It syncs nothing.
pub fn shared() -> Option<&'static Server> {
    static SHARED: OnceLock<Option<Server>> = OnceLock::new();
    SHARED.get_or_init(|| Server::start(FAST)).as_ref()
}

pub struct Server {
    programs: PathBuf,
    dir: PathBuf,
    port: u16,
    settings: Vec<String>,
    /// Ends the server and removes its directory when its standard input ends.
    keeper: Child,
}

impl Server {
    /// A server with `settings` beside its defaults, if Postgres is installed.
    pub fn start(settings: &[&str]) -> Option<Self> {
        let Some(programs) = programs() else {
            left_out("postgresql");
            return None;
        };
        let dir = directory("postgres");
        let data = dir.join("data");
        let init = ["-A", "trust", "-U", "app", "--no-sync", "--locale=C", "-E", "UTF8", "-D"];
        must(unprivileged(&programs.join("initdb")).args(init).arg(&data));
        let keep = "read -r _; \"$1\" -D \"$2/data\" -m immediate stop; rm -rf \"$2\"";
        let keeper = unprivileged(Path::new("sh"))
            // Not in the group of the tests: whoever ends those by a signal to the group, as a
            // terminal does, is not to end what cleans up after them.
            .process_group(0)
            .args(["-c", keep, "sh"])
            .arg(programs.join("pg_ctl"))
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let settings = settings.iter().map(|setting| (*setting).to_owned()).collect();
        let mut server = Self { programs, dir, port: 0, settings, keeper };
        loop {
            server.port = free_port();
            match server.try_start() {
                Ok(()) => return Some(server),
                // Somebody took a port that was free a moment ago.
                Err(said) => assert!(said.contains("could not bind"), "no start: {said}"),
            }
        }
    }

    fn try_start(&self) -> Result<(), String> {
        let log = self.dir.join("log");
        let _ = fs::remove_file(&log);
        let mut options = format!(
            "-p {} -k {} -c listen_addresses=127.0.0.1 -c max_connections=200",
            self.port,
            self.dir.display()
        );
        for setting in &self.settings {
            options.push_str(&format!(" -c {setting}"));
        }
        let started = unprivileged(&self.programs.join("pg_ctl"))
            .args(["-w", "-t", "120", "-o", &options, "-l"])
            .arg(&log)
            .arg("-D")
            .arg(self.dir.join("data"))
            .arg("start")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        match started.success() {
            true => Ok(()),
            false => Err(fs::read_to_string(log).unwrap_or_default()),
        }
    }

    /// Kills the server's first process with a signal that it cannot catch.
    pub fn kill(&self) {
        let pid = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        must(Command::new("kill").args(["-KILL", pid.lines().next().unwrap()]));
    }

    /// Starts the server again after [`kill`](Self::kill), once the last of its processes has seen
    /// that the first is gone. Under a watchdog only.
    pub fn restart(&self) {
        while let Err(said) = self.try_start() {
            let is_early = said.contains("still in use") || said.contains("lock file");
            assert!(is_early, "no restart: {said}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn options(&self) -> PgConnectOptions {
        connect_to(self.port)
    }

    pub async fn pool(&self) -> PgPool {
        pool(self.options()).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// A pooler that hands its two connections to the server on after each transaction.
pub struct Pooler {
    dir: PathBuf,
    port: u16,
    pooler: Child,
}

impl Pooler {
    pub fn start(server: &Server) -> Option<Self> {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/opt/homebrew/bin/pgbouncer"]
            .map(Path::new)
            .into_iter()
            .find(|path| path.exists());
        let Some(program) = program else {
            left_out("pgbouncer");
            return None;
        };
        let dir = directory("pgbouncer");
        loop {
            let port = free_port();
            let config = format!(
                "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {port}\nunix_socket_dir =\nauth_type = trust\n\
                 auth_file = {dir}/users\npool_mode = transaction\ndefault_pool_size = 2\n\
                 ignore_startup_parameters = extra_float_digits\n",
                server.port,
                dir = dir.display()
            );
            fs::write(dir.join("users"), "\"app\" \"\"\n").unwrap();
            fs::write(dir.join("config"), config).unwrap();
            let run = "exec 3<&0; (read -r _ <&3; kill $$) & exec \"$1\" -q \"$2\" 3<&-";
            let pooler = unprivileged(Path::new("sh"))
                .process_group(0)
                .args(["-c", run, "sh"])
                .arg(program)
                .arg(dir.join("config"))
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(fs::File::create(dir.join("log")).unwrap())
                .spawn()
                .unwrap();
            let mut started = Self { dir: dir.clone(), port, pooler };
            if started.is_up() {
                return Some(started);
            }
        }
    }

    fn is_up(&mut self) -> bool {
        while std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            if self.pooler.try_wait().unwrap().is_some() {
                let said = fs::read_to_string(self.dir.join("log")).unwrap();
                assert!(said.contains("in use"), "pgbouncer does not start: {said}");
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    pub fn options(&self) -> PgConnectOptions {
        connect_to(self.port)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        drop(self.pooler.stdin.take());
        let _ = self.pooler.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Carries connections to a server, and counts what clients say.
pub struct Relay {
    port: u16,
    said: std::sync::Arc<Mutex<String>>,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    pub async fn start(server: &Server) -> Self {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (said, to) = (std::sync::Arc::<Mutex<String>>::default(), server.port);
        let task = tokio::spawn({
            let said = std::sync::Arc::clone(&said);
            async move {
                loop {
                    let (client, _) = listener.accept().await.unwrap();
                    tokio::spawn(carry(client, to, std::sync::Arc::clone(&said)));
                }
            }
        });
        Self { port, said, task }
    }

    pub fn options(&self) -> PgConnectOptions {
        connect_to(self.port)
    }

    /// The kinds of the messages since the last call, one letter each: `Q` is a statement in one
    /// message; `P`, `B`, `E`, `S` are the parts of one whose arguments stand apart, of which each
    /// `S` is waited for.
    pub fn said(&self) -> String {
        std::mem::take(&mut self.said.lock().unwrap())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: tokio::net::TcpStream, to: u16, said: std::sync::Arc<Mutex<String>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let server = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    // The first message has no kind.
    let mut has_kind = false;
    loop {
        let mut head = vec![0; if has_kind { 5 } else { 4 }];
        if from_client.read_exact(&mut head).await.is_err() {
            return;
        }
        let length = u32::from_be_bytes(*head.last_chunk().unwrap()) as usize;
        let mut body = vec![0; length - 4];
        from_client.read_exact(&mut body).await.unwrap();
        if has_kind {
            said.lock().unwrap().push(char::from(head[0]));
        }
        has_kind = true;
        to_server.write_all(&[head, body].concat()).await.unwrap();
    }
}

fn connect_to(port: u16) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .username("app")
        .database("postgres")
        .ssl_mode(PgSslMode::Disable)
}

pub async fn pool(options: PgConnectOptions) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(16).test_before_acquire(false);
    pool.acquire_timeout(Duration::from_secs(120)).connect_with(options).await.unwrap()
}

/// Where the server's programs are, of the newest version that is installed.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<_> = versions
        .filter_map(|entry| {
            let version: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .filter(|(_, bin)| bin.join("initdb").exists())
        .collect();
    found.sort();
    let others = ["/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"].map(PathBuf::from);
    let other = others.into_iter().find(|bin| bin.join("initdb").exists());
    found.pop().map(|(_, bin)| bin).or(other)
}

fn left_out(package: &str) {
    let how = format!("not installed: apt-get install --no-install-recommends {package}");
    assert!(std::env::var_os("CI").is_none(), "{how}");
    // Past the capture of the test harness: who runs the tests is to see it.
    let _ = writeln!(std::io::stderr(), "left out, {how}");
}

/// Runs `program` as `postgres` if this is root, whom the server refuses.
fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/");
    if let Some((user, group)) = user() {
        command.uid(user).gid(group);
    }
    command
}

fn user() -> Option<(u32, u32)> {
    let id = |args: &[&str]| -> u32 {
        let said = must(Command::new("id").args(args)).stdout;
        String::from_utf8(said).unwrap().trim().parse().unwrap()
    };
    (id(&["-u"]) == 0).then(|| (id(&["-u", "postgres"]), id(&["-g", "postgres"])))
}

fn directory(what: &str) -> PathBuf {
    static NTH: AtomicUsize = AtomicUsize::new(0);
    let nth = NTH.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("oncekey-{what}-{}-{nth}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    if let Some((user, group)) = user() {
        chown(&dir, Some(user), Some(group)).unwrap();
    }
    dir
}

fn must(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}
