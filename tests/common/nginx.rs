//! A real nginx in front of a server of the tests: a reverse proxy that asks the next upstream where
//! the first is silent for too long or breaks off, also with a POST. Both upstreams are ports of one
//! process.
//!
//! Each is the test's own: in a directory of its own, on free ports of the loopback, without root,
//! and it ends with the test, also if that dies.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

tokio::task_local! {
    /// How long the nginx before each server of a test waits for an upstream.
    static PATIENCE: Duration;
}

/// Runs a test whose servers each stand behind an nginx that is patient. Where nginx is not
/// installed, says so and runs nothing; with `CI` set that is a failure.
pub async fn behind_nginx(test: impl Future<Output = ()>) {
    behind(Duration::from_secs(3_600), test).await;
}

/// As [`behind_nginx`], with one that soon asks the next upstream: what answers at once does so
/// within this time on a busy machine too.
pub async fn behind_hasty_nginx(test: impl Future<Output = ()>) {
    behind(Duration::from_secs(2), test).await;
}

async fn behind(patience: Duration, test: impl Future<Output = ()>) {
    if program().is_some() {
        PATIENCE.scope(patience, test).await;
        return;
    }
    let how = "nginx is not installed: apt-get install --no-install-recommends nginx";
    assert!(std::env::var_os("CI").is_none(), "{how}");
    println!("skipped: {how}");
}

fn program() -> Option<&'static Path> {
    ["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx", "/opt/homebrew/bin/nginx"]
        .map(Path::new)
        .into_iter()
        .find(|path| path.exists())
}

pub struct Nginx {
    /// Reads a request whole before it asks an upstream: only so can it ask two.
    pub buffering: Fronts,
    /// Hands a body on as it comes, to one upstream.
    pub streaming: Fronts,
    nginx: Child,
    dir: PathBuf,
}

/// Where clients connect; without TLS each protocol has a port of its own.
pub struct Fronts {
    pub http1: SocketAddr,
    pub http2: SocketAddr,
}

impl Nginx {
    /// The one that this test asked for, if any.
    pub async fn asked_for(upstreams: [SocketAddr; 2]) -> Option<Self> {
        let patience = PATIENCE.try_with(|patience| *patience).ok()?;
        loop {
            if let Some(nginx) = Self::start(upstreams, patience).await {
                return Some(nginx);
            }
            // Somebody took a port that was free a moment ago.
        }
    }

    async fn start(upstreams: [SocketAddr; 2], patience: Duration) -> Option<Self> {
        static NTH: AtomicUsize = AtomicUsize::new(0);
        let nth = NTH.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("oncekey-nginx-{}-{nth}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let [a, b, c, d] = free_ports();
        let buffering = Fronts { http1: a, http2: b };
        let streaming = Fronts { http1: c, http2: d };
        let config = config(upstreams, patience, &buffering, &streaming);
        fs::write(dir.join("nginx.conf"), config).unwrap();
        // It ends when its standard input does, which is when this process lets go of it.
        let run = "exec 3<&0; (read -r _ <&3; kill $$) & exec \"$1\" -e error.log -p \"$2\" -c nginx.conf 3<&-";
        let nginx = Command::new("sh")
            .args(["-c", run, "sh"])
            .arg(program()?)
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut started = Self { buffering, streaming, nginx, dir };
        // Written once all ports are open.
        while !started.dir.join("pid").exists() {
            if started.nginx.try_wait().unwrap().is_some() {
                let said = started.said();
                assert!(said.contains("bind()"), "nginx does not start: {said}");
                return None;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Some(started)
    }

    fn said(&self) -> String {
        fs::read_to_string(self.dir.join("error.log")).unwrap_or_default()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("nginx said: {}", self.said());
        }
        drop(self.nginx.stdin.take());
        let _ = self.nginx.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn free_ports() -> [SocketAddr; 4] {
    [(); 4]
        .map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
        .map(|listener| listener.local_addr().unwrap())
}

fn config(
    [first, second]: [SocketAddr; 2],
    patience: Duration,
    buffering: &Fronts,
    streaming: &Fronts,
) -> String {
    let server = |front: &Fronts, buffers: &str| {
        let Fronts { http1, http2 } = front;
        format!(
            "server {{ listen {http1}; location / {{ proxy_request_buffering {buffers}; \
             proxy_pass http://service; }} }}\n\
             server {{ listen {http2} http2; location / {{ proxy_request_buffering {buffers}; \
             proxy_pass http://service; }} }}\n"
        )
    };
    let (whole, piecewise) = (server(buffering, "on"), server(streaming, "off"));
    let patience = patience.as_secs();
    format!(
        "daemon off;
master_process off;
pid pid;
error_log error.log info;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    client_max_body_size 0;
    large_client_header_buffers 8 32k;
    proxy_http_version 1.1;
    proxy_set_header Connection \"\";
    proxy_set_header Host $http_host;
    proxy_buffering off;
    proxy_buffer_size 512k;
    proxy_buffers 4 512k;
    proxy_busy_buffers_size 1m;
    proxy_read_timeout {patience}s;
    proxy_next_upstream error timeout non_idempotent;
    upstream service {{
        server {first} max_fails=0;
        server {second} max_fails=0;
        keepalive 8;
    }}
{whole}{piecewise}}}
"
    )
}
