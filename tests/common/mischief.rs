//! A line to an HTTP server that loses, cuts, delays and doubles single requests and answers.
//!
//! It reads whole messages with a `Content-Length` (all that the example sends and gets, but for its
//! streams), and asks what becomes of each request.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// What becomes of one request and its answer.
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    Pass,
    /// It arrives this much later.
    Delay(Duration),
    /// The line is cut before it arrives.
    Drop,
    /// It arrives, and the line is cut before the answer comes back.
    Lose,
    /// Of the answer so many hundredths come back.
    Cut(usize),
    /// It arrives, and nothing comes back on a line that stays.
    Silence,
    /// It arrives twice at once; the answer that comes first comes back.
    Double,
    /// It arrives again this much after its answer has come back.
    Again(Duration),
}

/// What becomes of the request of this number, with these bytes.
type Fates = dyn Fn(usize, &[u8]) -> Fate + Send + Sync;

pub struct Mischief {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

struct Shared {
    server: SocketAddr,
    fates: Box<Fates>,
    requests: AtomicUsize,
    /// Requests under way that nobody waits for.
    strays: AtomicUsize,
}

impl Mischief {
    pub async fn to(
        server: SocketAddr,
        fates: impl Fn(usize, &[u8]) -> Fate + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, strays) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared { server, fates: Box::new(fates), requests, strays });
        let task = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let _ = client.set_nodelay(true);
                    tokio::spawn(line(Arc::clone(&shared), client));
                }
            }
        });
        Self { address, shared, task }
    }

    /// How many requests there were so far.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// How many requests are under way that nobody waits for.
    pub fn strays(&self) -> usize {
        self.shared.strays.load(Ordering::SeqCst)
    }
}

impl Drop for Mischief {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A line from a client, until it is cut or an error ends it.
async fn line(shared: Arc<Shared>, mut client: TcpStream) -> io::Result<()> {
    let mut upstream = None;
    loop {
        let request = message(&mut client).await?;
        let nth = shared.requests.fetch_add(1, Ordering::SeqCst);
        let fate = (shared.fates)(nth, &request);
        match fate {
            Fate::Drop => return Ok(()),
            Fate::Delay(span) => tokio::time::sleep(span).await,
            Fate::Lose => {
                shared.stray(request, Duration::ZERO);
                return Ok(());
            }
            Fate::Double => shared.stray(request.clone(), Duration::ZERO),
            Fate::Silence => {
                shared.stray(request, Duration::ZERO);
                // Until the client gives up.
                while client.read(&mut [0; 1024]).await? > 0 {}
                return Ok(());
            }
            Fate::Pass | Fate::Cut(_) | Fate::Again(_) => {}
        }
        let answer = exchange(shared.server, &mut upstream, &request).await?;
        if let Fate::Cut(share) = fate {
            return client.write_all(&answer[..answer.len() * share / 100]).await;
        }
        client.write_all(&answer).await?;
        if let Fate::Again(span) = fate {
            shared.stray(request, span);
        }
    }
}

impl Shared {
    /// Sends a request whose answer goes to nobody.
    fn stray(self: &Arc<Self>, request: Vec<u8>, after: Duration) {
        self.strays.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let _ = exchange(shared.server, &mut None, &request).await;
            shared.strays.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// A request and its answer, over the line that is there or a new one.
async fn exchange(
    server: SocketAddr,
    upstream: &mut Option<TcpStream>,
    request: &[u8],
) -> io::Result<Vec<u8>> {
    if upstream.is_none() {
        let stream = TcpStream::connect(server).await?;
        stream.set_nodelay(true)?;
        *upstream = Some(stream);
    }
    let stream = upstream.as_mut().unwrap();
    stream.write_all(request).await?;
    message(stream).await
}

/// One message with its body.
async fn message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut whole = None;
    while whole.is_none_or(|whole| bytes.len() < whole) {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if whole.is_none() {
            let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
            whole = end.map(|end| end + 4 + length(&bytes[..end]));
        }
    }
    assert_eq!(Some(bytes.len()), whole, "one message at a time");
    Ok(bytes)
}

fn length(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.map_or(0, |length| length.trim().parse().unwrap())
}
