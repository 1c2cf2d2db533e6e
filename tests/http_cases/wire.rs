//! One call over either protocol, and the ways in which a client leaves.

use std::{
    any::Any,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, extract::Request, middleware};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpStream, task::JoinHandle};

use crate::sockets::{Client, Reply, Server};

/// Makes two tests of each of these functions, over HTTP/1.1 and over HTTP/2, under a watchdog.
macro_rules! over_both {
    ($($name:ident,)+) => {
        $(mod $name {
            over_both!(@ http1 Http1 $name);
            over_both!(@ http2 Http2 $name);
        })+
    };
    (@ $test:ident $wire:ident $name:ident $(through $proxy:ident)?) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            let _watchdog = crate::common::watchdog();
            let test = super::$name(crate::wire::Wire::$wire);
            $(let test = crate::sockets::nginx::$proxy(test);)?
            test.await;
        }
    };
}

/// As [`over_both`], and two more tests of each, in which an nginx stands before the server.
macro_rules! over_all {
    ($($name:ident,)+) => {
        $(mod $name {
            over_both!(@ http1 Http1 $name);
            over_both!(@ http2 Http2 $name);
            over_both!(@ http1_through_nginx Http1 $name through behind_nginx);
            over_both!(@ http2_through_nginx Http2 $name through behind_nginx);
        })+
    };
}

/// Makes two tests of each of these functions, which are about an nginx that soon asks the next
/// upstream.
macro_rules! through_hasty_nginx {
    ($($name:ident,)+) => {
        $(mod $name {
            over_both!(@ http1 Http1 $name through behind_hasty_nginx);
            over_both!(@ http2 Http2 $name through behind_hasty_nginx);
        })+
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Http1,
    Http2,
}

/// How the body of a call is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// With its length in the head.
    Length,
    /// In pieces of this size, without a length.
    Pieces(usize),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Call {
    method: Method,
    path: String,
    fields: Vec<(String, Vec<u8>)>,
    body: Bytes,
    framing: Framing,
    trailers: Vec<(&'static str, &'static str)>,
}

/// `POST /charges` with a key.
pub fn charge(key: &str) -> Call {
    post("/charges", key)
}

pub fn post(path: &str, key: &str) -> Call {
    keyless(path).field("Idempotency-Key", key)
}

pub fn keyless(path: &str) -> Call {
    Call {
        method: Method::POST,
        path: path.to_owned(),
        fields: Vec::new(),
        body: Bytes::from_static(b"{}"),
        framing: Framing::Length,
        trailers: Vec::new(),
    }
}

impl Call {
    pub fn field(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Sets a field that is there already.
    pub fn set(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.fields.retain(|(there, _)| there != name);
        self.field(name, value)
    }

    /// To another path.
    pub fn at(mut self, path: &str) -> Self {
        self.path = path.to_owned();
        self
    }

    pub fn method(mut self, method: Method) -> Self {
        self.method = method;
        self
    }

    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub fn in_pieces(mut self, of: usize) -> Self {
        self.framing = Framing::Pieces(of);
        self
    }

    /// A trailer, which needs a body in pieces.
    pub fn trailer(mut self, name: &'static str, value: &'static str) -> Self {
        self.trailers.push((name, value));
        self
    }

    pub fn body_bytes(&self) -> Bytes {
        self.body.clone()
    }

    /// The value of the first field of this name.
    pub fn field_value(&self, name: &str) -> Option<&str> {
        let (_, value) = self.fields.iter().find(|(there, _)| there == name)?;
        Some(std::str::from_utf8(value).unwrap())
    }

    /// The trailers as `name=value`, joined by `&`.
    pub fn trailer_text(&self) -> String {
        let text = self.trailers.iter().map(|(name, value)| format!("{name}={value}"));
        text.collect::<Vec<_>>().join("&")
    }

    fn pieces(&self) -> Vec<Bytes> {
        let of = match self.framing {
            Framing::Length => self.body.len().max(1),
            Framing::Pieces(of) => of,
        };
        self.body.chunks(of).map(|piece| self.body.slice_ref(piece)).collect()
    }

    /// As it stands on an HTTP/1.1 connection.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = format!("{} {} HTTP/1.1\r\nHost: test\r\n", self.method, self.path).into();
        let put = |bytes: &mut Vec<u8>, name: &str, value: &[u8]| {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        };
        for (name, value) in &self.fields {
            put(&mut bytes, name, value);
        }
        match self.framing {
            Framing::Length => {
                put(&mut bytes, "Content-Length", self.body.len().to_string().as_bytes());
                bytes.extend_from_slice(b"\r\n");
                bytes.extend_from_slice(&self.body);
            }
            Framing::Pieces(_) => {
                put(&mut bytes, "Transfer-Encoding", b"chunked");
                bytes.extend_from_slice(b"\r\n");
                for piece in self.pieces() {
                    bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                    bytes.extend_from_slice(&piece);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n");
                for (name, value) in &self.trailers {
                    put(&mut bytes, name, value.as_bytes());
                }
                bytes.extend_from_slice(b"\r\n");
            }
        }
        bytes
    }

    fn to_request(&self) -> http::Request<Sent> {
        let mut request = http::Request::builder()
            .method(self.method.clone())
            .uri(format!("http://test{}", self.path))
            .body(())
            .unwrap();
        for (name, value) in &self.fields {
            let value = HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().append(HeaderName::try_from(name).unwrap(), value);
        }
        if self.framing == Framing::Length {
            request.headers_mut().insert("content-length", self.body.len().into());
        }
        let mut frames: Vec<_> = self.pieces().into_iter().map(Frame::data).collect();
        if !self.trailers.is_empty() {
            let mut trailers = HeaderMap::new();
            for (name, value) in &self.trailers {
                trailers.append(*name, HeaderValue::from_static(value));
            }
            frames.push(Frame::trailers(trailers));
        }
        let body = if frames.is_empty() {
            http_body_util::Empty::new().boxed_unsync()
        } else {
            StreamBody::new(stream::iter(frames.into_iter().map(Ok))).boxed_unsync()
        };
        request.map(|()| body)
    }
}

type Sent = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

impl Wire {
    /// Asks on a connection of its own.
    pub async fn ask(self, server: &Server, call: Call) -> Reply {
        self.begin(server, &call).await.reply().await
    }

    /// Asks in a task of its own, for a test that goes on meanwhile.
    pub async fn asking(self, server: &Server, call: Call) -> JoinHandle<Reply> {
        let begun = self.begin(server, &call).await;
        tokio::spawn(begun.reply())
    }

    /// Sends a call and does not wait for the answer.
    pub async fn begin(self, server: &Server, call: &Call) -> Begun {
        match self {
            Self::Http1 => {
                let mut client = Client::connect(server).await;
                client.send(call.to_bytes()).await;
                Begun::Http1(client)
            }
            Self::Http2 => Begun::http2(server.http2(), call.to_request()).await,
        }
    }

    /// Sends the head of a call and the first `sent` bytes of its body. A proxy between hands them
    /// on as they come.
    pub async fn upload(self, server: &Server, call: &Call, sent: usize) -> Upload {
        let (http1, http2) = match &server.nginx {
            None => (server.address, server.address),
            Some(nginx) => (nginx.streaming.http1, nginx.streaming.http2),
        };
        match self {
            Self::Http1 => {
                let mut client = Client::connect_to(http1).await;
                let bytes = call.to_bytes();
                let (now, later) = bytes.split_at(bytes.len() - call.body.len() + sent);
                client.send(now).await;
                Upload { begun: Begun::Http1(client), rest: Rest::Bytes(later.to_vec()) }
            }
            Self::Http2 => {
                let (rest, later) = tokio::sync::oneshot::channel();
                let now = stream::iter([Ok(Frame::data(call.body.slice(..sent)))]);
                let later =
                    stream::once(async { Ok(Frame::data(later.await.unwrap_or_default())) });
                let body = StreamBody::new(futures_util::StreamExt::chain(now, later));
                let request = call.to_request().map(|_| BodyExt::boxed_unsync(body));
                let begun = Begun::http2(http2, request).await;
                Upload { begun, rest: Rest::Frame(rest, call.body.slice(sent..)) }
            }
        }
    }

    /// The ways to leave that this protocol has.
    pub fn ways_to_leave(self) -> &'static [Leave] {
        match self {
            Self::Http1 => &[Leave::Reset, Leave::HalfClose, Leave::Close],
            Self::Http2 => &[Leave::Reset, Leave::Close],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The connection (HTTP/1.1) or the stream (HTTP/2) is reset.
    Reset,
    /// Nothing more is sent, but the client goes on to listen.
    HalfClose,
    /// The connection ends in the usual way.
    Close,
}

type Answering =
    std::pin::Pin<Box<dyn Future<Output = hyper::Result<http::Response<Incoming>>> + Send>>;

/// A call that was sent.
pub enum Begun {
    Http1(Client),
    Http2 { sender: http2::SendRequest<Sent>, response: Answering, connection: JoinHandle<()> },
}

impl Begun {
    async fn http2(address: SocketAddr, request: http::Request<Sent>) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move { drop(connection.await) });
        sender.ready().await.unwrap();
        // It is sent whether or not somebody polls the response.
        let response = Box::pin(sender.send_request(request));
        Self::Http2 { sender, response, connection }
    }

    /// Waits for the whole answer.
    pub async fn reply(self) -> Reply {
        match self {
            Self::Http1(mut client) => client.reply().await,
            Self::Http2 { sender, response, connection } => {
                // A stream may be reset before its head was written.
                let reply = match response.await {
                    Ok(response) => collect(response).await,
                    Err(_) => Reply { is_cut: true, ..Reply::default() },
                };
                drop(sender);
                connection.abort();
                reply
            }
        }
    }

    /// Leaves. What is given back is what stays of the client: dropping it is leaving altogether.
    pub async fn leave(self, way: Leave) -> Box<dyn Any + Send> {
        match (self, way) {
            (Self::Http1(client), Leave::Reset) => client.reset(),
            (Self::Http1(client), Leave::Close) => drop(client),
            (Self::Http1(mut client), Leave::HalfClose) => {
                client.half_close().await;
                return Box::new(client);
            }
            // The connection goes on, and its task sends the reset of the stream.
            (Self::Http2 { response, sender, .. }, Leave::Reset) => {
                drop(response);
                return Box::new(sender);
            }
            (Self::Http2 { connection, .. }, _) => connection.abort(),
        }
        Box::new(())
    }
}

/// A call whose body is not sent whole.
pub struct Upload {
    begun: Begun,
    rest: Rest,
}

enum Rest {
    /// For HTTP/1.1.
    Bytes(Vec<u8>),
    /// For HTTP/2.
    Frame(tokio::sync::oneshot::Sender<Bytes>, Bytes),
}

impl Upload {
    /// Sends the rest.
    pub async fn finish(self) -> Begun {
        let Self { mut begun, rest } = self;
        match (rest, &mut begun) {
            (Rest::Bytes(rest), Begun::Http1(client)) => client.send(rest).await,
            (Rest::Frame(sender, rest), _) => sender.send(rest).unwrap(),
            (Rest::Bytes(_), Begun::Http2 { .. }) => unreachable!(),
        }
        begun
    }

    /// Waits for an answer to what was sent.
    pub async fn reply(self) -> Reply {
        let _unsent = self.rest;
        self.begun.reply().await
    }

    /// Leaves without sending the rest.
    pub async fn leave(self, way: Leave) -> Box<dyn Any + Send> {
        let gone = self.begun.leave(way).await;
        Box::new((gone, self.rest))
    }
}

/// The answer as the tests look at it.
async fn collect(response: http::Response<Incoming>) -> Reply {
    let (head, mut body) = response.into_parts();
    let mut reply =
        Reply { status: head.status.as_u16(), fields: lines(&head.headers), ..Reply::default() };
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            reply.is_cut = true;
            break;
        };
        match frame.into_data() {
            Ok(data) => reply.body.extend_from_slice(&data),
            Err(frame) => reply.trailers = lines(&frame.into_trailers().unwrap()),
        }
    }
    reply
}

fn lines(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect()
}

/// The lines that must be the same for the first client and for a replay: all but those of the
/// moment and of the framing.
pub fn kept(reply: &Reply) -> Vec<(String, Vec<u8>)> {
    let changes = ["date", "idempotent-replayed", "content-length", "transfer-encoding", "trailer"];
    let is_kept = |(name, _): &&(String, Vec<u8>)| !changes.contains(&name.as_str());
    reply.fields.iter().filter(is_kept).cloned().collect()
}

/// Asserts that `again` is the replay of `first`: same status, lines, bytes and trailers, each
/// with a true length, if any.
#[track_caller]
pub fn assert_replay(again: &Reply, first: &Reply) {
    assert!(again.is_replay() && !first.is_replay(), "{first:?} {again:?}");
    assert_eq!(again.status, first.status);
    assert_eq!(kept(again), kept(first));
    assert_eq!(again.body, first.body);
    assert_eq!(again.trailers, first.trailers);
    for reply in [first, again] {
        assert!(!reply.is_cut);
        match reply.field("content-length") {
            // The length is that of the content which 304 spares the client.
            Some(length) if reply.status != 304 => assert_eq!(length, reply.body.len().to_string()),
            _ => {}
        }
    }
}

/// How many requests the server is at, as their clients see it; clones count together.
#[derive(Clone, Default)]
pub struct Present(Arc<AtomicUsize>);

struct Here(Arc<AtomicUsize>);

impl Drop for Here {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Present {
    /// Counts the requests to `app` until their response's head is made or the client has left.
    pub fn around(&self, app: Router) -> Router {
        let count = Arc::clone(&self.0);
        app.layer(middleware::from_fn(move |request: Request, next: middleware::Next| {
            count.fetch_add(1, Ordering::SeqCst);
            let here = Here(Arc::clone(&count));
            async move {
                let response = next.run(request).await;
                drop(here);
                response
            }
        }))
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}
