//! A server on a free port, and a client that writes bytes to a socket and reads what comes back
//! line by line: what a test must see is not hidden by an HTTP library.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

#[path = "nginx.rs"]
pub mod nginx;

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, response::IntoResponse};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Semaphore,
    task::JoinHandle,
};
use tower::{Service, ServiceExt as _};

use self::nginx::Nginx;

/// Waits until something that has no event of its own has come to be. Not a guess at how long it
/// takes: only the watchdog ends it.
pub async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// `store` as it is, or, where `ONCEKEY_TEST_TIER` is set, with a tier behind it: what the layer
/// promises does not depend on that. Inside a runtime only.
pub fn backing(store: &oncekey::Store) -> oncekey::http::Backing {
    #[cfg(feature = "tier")]
    if std::env::var_os("ONCEKEY_TEST_TIER").is_some() {
        use futures_util::FutureExt as _;
        use oncekey::{Lapse, tier};
        let opened = tier::Tiered::open(store.clone(), tier::MemoryTier::new(), Lapse::Hold);
        let opened = opened.now_or_never().expect("this tier answers at once");
        return opened.unwrap().into();
    }
    store.clone().into()
}

/// How often something ran; clones count together.
#[derive(Clone, Default)]
pub struct Runs(Arc<AtomicUsize>);

impl Runs {
    /// Counts one run and says which it is, from 1.
    pub fn up(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where a handler stops until the test lets it go on; clones are the same gate.
#[derive(Clone)]
pub struct Gate {
    entered: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    pub fn new() -> Self {
        Self { entered: Arc::new(Semaphore::new(0)), open: Arc::new(Semaphore::new(0)) }
    }

    /// For the handler: says that it is there, and waits to be let through.
    pub async fn pass(&self) {
        self.entered.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// For the test: waits until one more handler is there.
    pub async fn entered(&self) {
        self.entered.acquire().await.unwrap().forget();
    }

    /// For the test: lets one handler through.
    pub fn open(&self) {
        self.open.add_permits(1);
    }
}

/// A server that stops, with all its connections, when dropped. Owners' tasks go on.
pub struct Server {
    pub address: SocketAddr,
    /// What its clients connect to, if not to the server itself.
    pub nginx: Option<Nginx>,
    accepting: [JoinHandle<()>; 2],
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.iter().for_each(JoinHandle::abort);
    }
}

impl Server {
    /// Where a client of HTTP/1.1 connects.
    pub fn http1(&self) -> SocketAddr {
        self.nginx.as_ref().map_or(self.address, |nginx| nginx.buffering.http1)
    }

    /// Where a client of HTTP/2 connects.
    pub fn http2(&self) -> SocketAddr {
        self.nginx.as_ref().map_or(self.address, |nginx| nginx.buffering.http2)
    }

    pub fn is_proxied(&self) -> bool {
        self.nginx.is_some()
    }

    /// Breaks off all connections to the first of the two ports, as if its process had died.
    pub fn break_off(&self) {
        self.accepting[0].abort();
    }
}

/// Serves a router over HTTP/1.1 and HTTP/2 without TLS.
pub async fn serve(app: Router) -> Server {
    // As `axum::serve` does: without it the layers are made anew for each request.
    let app: Router = app.with_state(());
    serve_service(app.into_service()).await
}

/// A free port, with room for a storm of connections that are not accepted yet: beyond it some
/// kernels reset those that come.
fn listen() -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    socket.listen(4096).unwrap()
}

/// Serves any service that may be shared by connections. An error that it returns shows as a 502
/// with the body `inner`.
pub async fn serve_service<S, R>(service: S) -> Server
where
    S: Service<http::Request<Incoming>, Response = R> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    R: IntoResponse + Send + 'static,
{
    // Two, for a proxy that asks the next one.
    let [first, second] = [listen(), listen()];
    let [address, other] = [&first, &second].map(|listener| listener.local_addr().unwrap());
    let accepting =
        [tokio::spawn(accept(first, service.clone())), tokio::spawn(accept(second, service))];
    Server { address, nginx: Nginx::asked_for([address, other]).await, accepting }
}

async fn accept<S, R>(listener: TcpListener, service: S)
where
    S: Service<http::Request<Incoming>, Response = R> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    R: IntoResponse + Send + 'static,
{
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        // Those that have ended take memory until somebody asks.
        while connections.try_join_next().is_some() {}
        stream.set_nodelay(true).unwrap();
        let service = service.clone();
        let service = tower::service_fn(move |request: http::Request<Incoming>| {
            let response = service.clone().oneshot(request);
            async move {
                Ok::<_, Infallible>(match response.await {
                    Ok(response) => response.into_response(),
                    Err(_) => (http::StatusCode::BAD_GATEWAY, "inner").into_response(),
                })
            }
        });
        connections.spawn(async move {
            let builder = auto::Builder::new(TokioExecutor::new());
            let service = TowerToHyperService::new(service);
            // A client that goes away is an error here, and what many tests are about.
            let _ = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
        });
    }
}

/// `POST {path}` with a key and a body of known length.
pub fn post(path: &str, key: &str, body: &str) -> Vec<u8> {
    request("POST", path, &[("Idempotency-Key", key)], body)
}

/// A request with a body of known length.
pub fn request(method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("Content-Length: {}\r\n\r\n{body}", body.len()));
    text.into_bytes()
}

/// One connection.
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// A response, or only its head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    /// Name in lower case and value, line by line.
    pub fields: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, Vec<u8>)>,
    /// The statuses of the 1xx responses before it.
    pub interim: Vec<u16>,
    /// Whether the connection ended before the body did.
    pub is_cut: bool,
}

impl Reply {
    /// The value of the first field of this name.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.lines(name).first().map(|value| std::str::from_utf8(value).unwrap())
    }

    /// The values of all fields of this name, in order.
    pub fn lines(&self, name: &str) -> Vec<&[u8]> {
        let is_it = |(field, _): &&(String, Vec<u8>)| field == name;
        self.fields.iter().filter(is_it).map(|(_, value)| value.as_slice()).collect()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn is_replay(&self) -> bool {
        self.field("idempotent-replayed") == Some("true")
    }

    /// The last part of the problem's type, after all that R21 says of a problem was checked.
    pub fn problem(&self) -> String {
        assert_eq!(self.field("content-type"), Some("application/problem+json"), "{self:?}");
        assert!(!self.is_replay());
        assert_eq!(self.field("content-length"), Some(self.body.len().to_string().as_str()));
        let json: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        let kind = json["type"].as_str().unwrap();
        assert_eq!(self.field("link"), Some(format!("<{kind}>; rel=\"describedby\"").as_str()));
        assert_eq!(json["status"], self.status);
        assert!(!json["title"].as_str().unwrap().is_empty());
        assert!(!json["detail"].as_str().unwrap().is_empty());
        kind.rsplit('#').next().unwrap().to_owned()
    }
}

impl Client {
    pub async fn connect(server: &Server) -> Self {
        Self::connect_to(server.http1()).await
    }

    pub async fn connect_to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.get_mut().write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends a request and reads its response. A server that answers early may shut the door on
    /// the rest of the request.
    pub async fn ask(&mut self, request: impl AsRef<[u8]>) -> Reply {
        let _ = self.stream.get_mut().write_all(request.as_ref()).await;
        self.reply().await
    }

    /// Says that nothing more will be sent, and stays to listen.
    pub async fn half_close(&mut self) {
        self.stream.get_mut().shutdown().await.unwrap();
    }

    /// Goes away by a reset, so that what the server sends from now on is an error there.
    pub fn reset(self) {
        self.stream.get_ref().set_zero_linger().unwrap();
    }

    /// Reads a response with its body.
    pub async fn reply(&mut self) -> Reply {
        let mut reply = self.head().await;
        if reply.status < 200 || matches!(reply.status, 204 | 304) {
            return reply;
        }
        if reply.field("transfer-encoding") == Some("chunked") {
            loop {
                match self.chunk().await {
                    Some(chunk) if chunk.is_empty() => break,
                    Some(chunk) => reply.body.extend_from_slice(&chunk),
                    None => {
                        reply.is_cut = true;
                        return reply;
                    }
                }
            }
            reply.trailers = self.fields().await;
        } else if let Some(length) = reply.field("content-length") {
            let length = length.parse().unwrap();
            let mut body = Vec::new();
            (&mut self.stream).take(length).read_to_end(&mut body).await.unwrap_or_default();
            reply.is_cut = (body.len() as u64) < length;
            reply.body = body;
        } else {
            self.stream.read_to_end(&mut reply.body).await.unwrap();
        }
        reply
    }

    /// Reads the head of a response, and the interim responses before it but for 101.
    pub async fn head(&mut self) -> Reply {
        let mut interim = Vec::new();
        loop {
            let line = self.line().await.expect("a response");
            let status = line.split(|&byte| byte == b' ').nth(1).unwrap();
            let status: u16 = std::str::from_utf8(status).unwrap().parse().unwrap();
            let fields = self.fields().await;
            if status >= 200 || status == 101 {
                return Reply { status, fields, interim, ..Reply::default() };
            }
            interim.push(status);
        }
    }

    /// Reads the next chunk of a chunked body; empty is the last, `None` a connection cut off.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.line().await?;
        let length = usize::from_str_radix(std::str::from_utf8(&line).unwrap(), 16).unwrap();
        let mut chunk = vec![0; length];
        self.stream.read_exact(&mut chunk).await.ok()?;
        if length > 0 {
            assert_eq!(self.line().await?, b"");
        }
        Some(chunk)
    }

    /// Reads so many bytes.
    pub async fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    /// Reads an interim response of this line.
    pub async fn expect_line(&mut self, line: &str) {
        assert_eq!(self.line().await.as_deref(), Some(line.as_bytes()));
        assert!(self.fields().await.is_empty());
    }

    /// Reads a line of another protocol.
    pub async fn expect_text(&mut self, line: &str) {
        assert_eq!(self.line().await.as_deref(), Some(line.as_bytes()));
    }

    /// Whether the server has closed the connection without another byte.
    pub async fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]).await, Ok(0) | Err(_))
    }

    async fn fields(&mut self) -> Vec<(String, Vec<u8>)> {
        let mut fields = Vec::new();
        loop {
            let line = self.line().await.expect("a field or the empty line");
            if line.is_empty() {
                return fields;
            }
            let colon = line.iter().position(|&byte| byte == b':').unwrap();
            let name = std::str::from_utf8(&line[..colon]).unwrap().to_ascii_lowercase();
            fields.push((name, line[colon + 1..].trim_ascii().to_vec()));
        }
    }

    async fn line(&mut self) -> Option<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            match self.stream.read_u8().await {
                Ok(b'\n') => break,
                Ok(byte) => line.push(byte),
                Err(_) => return None,
            }
        }
        assert_eq!(line.pop(), Some(b'\r'));
        Some(line)
    }
}

/// Asks on a connection of its own.
pub async fn ask(server: &Server, request: impl AsRef<[u8]>) -> Reply {
    Client::connect(server).await.ask(request).await
}

/// As [`ask`], for a handler that knows no more than an address.
pub async fn ask_at(address: SocketAddr, request: impl AsRef<[u8]>) -> Reply {
    let stream = TcpStream::connect(address).await.unwrap();
    Client { stream: BufReader::new(stream) }.ask(request).await
}

/// Asks in a task of its own, for a test that goes on meanwhile.
pub fn asking(server: &Server, request: impl AsRef<[u8]>) -> JoinHandle<Reply> {
    let (address, request) = (server.http1(), request.as_ref().to_vec());
    tokio::spawn(ask_at(address, request))
}

/// A connection over HTTP/2.
pub async fn connect_h2(server: &Server) -> hyper::client::conn::http2::SendRequest<Body> {
    let stream = TokioIo::new(TcpStream::connect(server.http2()).await.unwrap());
    let (client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    client
}
