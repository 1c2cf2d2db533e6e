//! A line to a server that a test can hold up, make dumb or cut.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Passes bytes on between clients and a server.
pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    lines: AtomicUsize,
    server: AtomicU16,
    /// Lines with a number below end.
    ended: watch::Sender<usize>,
    /// What lines with a number below the first do: those that were there when it was asked for.
    requests: watch::Sender<Fate>,
    answers: watch::Sender<Fate>,
    /// Set once a line has lost an answer.
    has_lost: AtomicBool,
}

/// What becomes of the bytes of the first so many lines, in one direction.
#[derive(Clone, Copy, Default)]
enum Fate {
    #[default]
    Pass,
    /// They wait.
    Hold(usize),
    /// The line is cut when the next come.
    Cut(usize),
}

impl Proxy {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared { server: AtomicU16::new(port), ..Shared::default() });
        let task = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let nth = shared.lines.fetch_add(1, Ordering::SeqCst);
                    tokio::spawn(line(Arc::clone(&shared), nth, client));
                }
            }
        });
        Self { port: own, shared, task }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// How many lines there were so far.
    pub fn lines(&self) -> usize {
        self.shared.lines.load(Ordering::SeqCst)
    }

    /// What is sent to the server over the present lines does not arrive, until all passes again.
    pub fn hold_requests(&self) {
        self.shared.requests.send_replace(Fate::Hold(self.lines()));
    }

    /// The present lines are cut when the server answers: the answer is lost.
    pub fn lose_answers(&self) {
        self.shared.answers.send_replace(Fate::Cut(self.lines()));
    }

    pub fn has_lost(&self) -> bool {
        self.shared.has_lost.load(Ordering::SeqCst)
    }

    /// New lines lead to another server, as when a name has a new address; the present ones stay.
    pub fn lead_to(&self, port: u16) {
        self.shared.server.store(port, Ordering::SeqCst);
    }

    /// The present lines end.
    pub fn end_lines(&self) {
        self.shared.ended.send_replace(self.lines());
    }

    pub fn pass(&self) {
        self.shared.requests.send_replace(Fate::Pass);
        self.shared.answers.send_replace(Fate::Pass);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn line(shared: Arc<Shared>, nth: usize, client: TcpStream) {
    let port = shared.server.load(Ordering::SeqCst);
    let mut ended = shared.ended.subscribe();
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (requests, answers) = (shared.requests.subscribe(), shared.answers.subscribe());
    tokio::select! {
        _ = ended.wait_for(|below| nth < *below) => {}
        () = async {
            // A client that gives up takes back nothing of what it has sent.
            pass(&mut from_client, &mut to_server, nth, requests).await;
            std::future::pending().await
        } => {}
        is_cut = pass(&mut from_server, &mut to_client, nth, answers) => {
            shared.has_lost.fetch_or(is_cut, Ordering::SeqCst);
        }
    }
}

/// Until one side closes, or the line is to be cut: then true.
async fn pass(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    nth: usize,
    mut fate: watch::Receiver<Fate>,
) -> bool {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let held = |fate: &Fate| matches!(fate, Fate::Hold(below) if nth < *below);
        if fate.wait_for(|fate| !held(fate)).await.is_err() {
            return false;
        }
        if matches!(*fate.borrow(), Fate::Cut(below) if nth < below) {
            return true;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return false;
        }
    }
    false
}
