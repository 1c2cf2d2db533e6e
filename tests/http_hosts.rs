//! The same layer in other houses than axum's: hyper without a framework, and tonic. No adapter:
//! both speak tower's traits and the types of `http` and `http-body`.
#![cfg(feature = "http")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/mod.rs"]
mod common;

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
};

use bytes::{Buf, BufMut, Bytes};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client, server};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use oncekey::{
    Store,
    http::{Attempt, IdempotencyLayer, Release, RequestBody, RouteTemplate},
};
use tokio::net::{TcpListener, TcpStream};
use tonic::{
    Code, Status,
    body::Body as GrpcBody,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    server::{NamedService, UnaryService},
    transport::{Channel, server::TcpIncoming},
};
use tower::{Layer as _, Service, ServiceBuilder};

use crate::common::{LONG, watchdog};

fn layer(store: &Store) -> IdempotencyLayer {
    IdempotencyLayer::single_tenant(store.clone())
        .wait_limit(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
}

fn store() -> Store {
    Store::builder().build().unwrap()
}

/// A handler for hyper, which has no router: the path is looked at here and there.
async fn charge(
    runs: Arc<AtomicUsize>,
    request: Request<RequestBody<Incoming>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let run = runs.fetch_add(1, SeqCst) + 1;
    let has_attempt = request.extensions().get::<Attempt>().is_some();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let text = format!("{run} {has_attempt} {}", body.len());
    let response = Response::builder().status(StatusCode::CREATED).header("location", "/1");
    Ok(response.body(Full::from(text)).unwrap())
}

#[derive(Clone, Copy, PartialEq)]
enum Protocol {
    Http1,
    Http2,
}

/// Serves with nothing but hyper.
async fn serve_hyper(
    once: &IdempotencyLayer,
    runs: &Arc<AtomicUsize>,
    protocol: Protocol,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let runs = Arc::clone(runs);
    let handler = tower::service_fn(move |request| charge(Arc::clone(&runs), request));
    // What stands for a router: it names the template before the layer asks for it.
    let service = ServiceBuilder::new()
        .map_request(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(RouteTemplate::new("/charges/{id}"));
            request
        })
        .service(once.layer(handler));
    tokio::spawn(async move {
        loop {
            let io = TokioIo::new(listener.accept().await.unwrap().0);
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                match protocol {
                    Protocol::Http1 => {
                        server::conn::http1::Builder::new().serve_connection(io, service).await
                    }
                    Protocol::Http2 => {
                        let builder = server::conn::http2::Builder::new(TokioExecutor::new());
                        builder.serve_connection(io, service).await
                    }
                }
            });
        }
    });
    address
}

async fn ask_hyper(
    address: SocketAddr,
    protocol: Protocol,
    path: &str,
    key: &str,
) -> (StatusCode, bool, String) {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let request = Request::post(format!("http://test{path}"))
        .header("host", "test")
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from_static(b"{}")))
        .unwrap();
    let response = match protocol {
        Protocol::Http1 => {
            let (mut sender, connection) = client::conn::http1::handshake(io).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        }
        Protocol::Http2 => {
            let handshake = client::conn::http2::handshake(TokioExecutor::new(), io);
            let (mut sender, connection) = handshake.await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        }
    };
    let (status, is_replay) =
        (response.status(), response.headers().contains_key("idempotent-replayed"));
    assert!(status != 201 || response.headers()["location"] == "/1");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, is_replay, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn hyper_without_a_framework_needs_no_adapter() {
    let _watchdog = watchdog();
    for protocol in [Protocol::Http1, Protocol::Http2] {
        let (store, runs) = (store(), Arc::default());
        let address = serve_hyper(&layer(&store), &runs, protocol).await;
        let ask = |path, key| ask_hyper(address, protocol, path, key);
        let ran = "1 true 2".to_owned();
        assert_eq!(ask("/charges/1", "k").await, (StatusCode::CREATED, false, ran.clone()));
        assert_eq!(ask("/charges/1", "k").await, (StatusCode::CREATED, true, ran));
        // Another path on the same route is a mismatch: the template is the endpoint.
        assert_eq!(ask("/charges/2", "k").await.0, 422);
        assert_eq!(runs.load(SeqCst), 1);
        let id = oncekey::Identity::new("", "POST /charges/{}", "k").unwrap();
        assert!(store.look_up(&id).is_some());
    }
}

/// Messages that are bytes: what a generated codec does, without a generator.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

const CREATE: &str = "/test.Charges/Create";

/// A service as a generator would write it. What it is sent says what becomes of it.
#[derive(Clone, Default)]
struct Charges {
    runs: Arc<AtomicUsize>,
}

impl NamedService for Charges {
    const NAME: &'static str = "test.Charges";
}

impl UnaryService<Vec<u8>> for Charges {
    type Response = Vec<u8>;
    type Future = std::future::Ready<Result<tonic::Response<Vec<u8>>, Status>>;

    fn call(&mut self, request: tonic::Request<Vec<u8>>) -> Self::Future {
        let run = self.runs.fetch_add(1, SeqCst) + 1;
        std::future::ready(match request.get_ref().as_slice() {
            b"declined" => Err(Status::failed_precondition(format!("declined in run {run}"))),
            b"sick" => Err(Status::unavailable("sick")),
            message => {
                let mut answer = [message, format!(" in run {run}").as_bytes()].concat();
                answer.extend_from_slice(&[0, 159, 146, 150]);
                let mut response = tonic::Response::new(answer);
                response.metadata_mut().insert("x-run", run.to_string().parse().unwrap());
                Ok(response)
            }
        })
    }
}

impl Service<Request<GrpcBody>> for Charges {
    type Response = Response<GrpcBody>;
    type Error = Infallible;
    type Future =
        std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<GrpcBody>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(tonic::server::Grpc::new(Raw).unary(service, request).await) })
    }
}

/// In gRPC every answer is a 200, and what was refused before the work stands in `grpc-status`: an
/// error that is answered before any message has it in its head. This is the table of R17 for it.
fn release_what_was_refused<B>(mut response: Response<B>) -> Response<B> {
    let code = response.headers().get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    let is_refused = matches!(
        code,
        Some(
            Code::InvalidArgument
                | Code::Unauthenticated
                | Code::PermissionDenied
                | Code::NotFound
                | Code::ResourceExhausted
                | Code::Unimplemented
                | Code::Unavailable
        )
    );
    if is_refused {
        response.extensions_mut().insert(Release);
    }
    response
}

type Answer = Result<tonic::Response<Vec<u8>>, Status>;

async fn call(channel: &Channel, key: Option<&str>, message: &str) -> Answer {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = tonic::Request::new(message.as_bytes().to_vec());
    if let Some(key) = key {
        request.metadata_mut().insert("idempotency-key", key.parse().unwrap());
    }
    client.unary(request, CREATE.parse().unwrap(), Raw).await
}

fn is_replay(metadata: &tonic::metadata::MetadataMap) -> bool {
    metadata.get("idempotent-replayed").is_some_and(|mark| mark == "true")
}

async fn serve_tonic(once: IdempotencyLayer, charges: &Charges) -> (SocketAddr, Channel) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let layers =
        ServiceBuilder::new().layer(once).map_response(release_what_was_refused).into_inner();
    let server = tonic::transport::Server::builder().layer(layers).add_service(charges.clone());
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    (address, channel.connect().await.unwrap())
}

/// The path of a call is the name of its operation, and the service knows which there are.
fn of_grpc(store: &Store) -> IdempotencyLayer {
    layer(store).endpoint(|parts| (parts.uri.path() == CREATE).then(|| CREATE.to_owned()))
}

#[tokio::test]
async fn tonic_needs_no_adapter_and_its_status_in_the_trailers_is_replayed() {
    let _watchdog = watchdog();
    let (store, charges) = (store(), Charges::default());
    let (address, channel) = serve_tonic(of_grpc(&store), &charges).await;
    let first = call(&channel, Some("k"), "charge").await.unwrap();
    let again = call(&channel, Some("k"), "charge").await.unwrap();
    assert_eq!(first.get_ref(), again.get_ref());
    assert_eq!(first.metadata().get("x-run"), again.metadata().get("x-run"));
    assert_eq!((is_replay(first.metadata()), is_replay(again.metadata())), (false, true));
    assert_eq!(again.metadata().get("grpc-status").unwrap(), "0", "the status of its trailers");
    assert_eq!(charges.runs.load(SeqCst), 1);

    // As it stands on the wire: the status in the trailers, behind the message.
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let handshake = client::conn::http2::handshake(TokioExecutor::new(), io);
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let message = [&[0, 0, 0, 0, 6][..], b"charge"].concat();
    let request = Request::post(format!("http://test{CREATE}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("idempotency-key", "k")
        .body(Full::new(Bytes::from(message)))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert!(response.headers().contains_key("idempotent-replayed"));
    assert!(!response.headers().contains_key("grpc-status"));
    let all = response.into_body().collect().await.unwrap();
    assert_eq!(all.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(&all.to_bytes()[5..], first.get_ref());
    assert_eq!(charges.runs.load(SeqCst), 1);
}

#[tokio::test]
async fn tonic_errors_are_kept_or_released_by_their_status() {
    let _watchdog = watchdog();
    let (store, charges) = (store(), Charges::default());
    let (_, channel) = serve_tonic(of_grpc(&store), &charges).await;
    for (message, code, runs) in
        [("declined", Code::FailedPrecondition, 1), ("sick", Code::Unavailable, 2)]
    {
        let before = charges.runs.load(SeqCst);
        let first = call(&channel, Some(message), message).await.unwrap_err();
        let again = call(&channel, Some(message), message).await.unwrap_err();
        assert_eq!((first.code(), again.code()), (code, code));
        assert_eq!(first.message(), again.message());
        assert_eq!(is_replay(again.metadata()), runs == 1);
        assert_eq!(charges.runs.load(SeqCst) - before, runs, "{message}");
    }
    // Our own answers are no gRPC: a client tells them by their HTTP status and its headers.
    let reused = call(&channel, Some("declined"), "another").await.unwrap_err();
    let missing = call(&channel, None, "charge").await.unwrap_err();
    for told in [&reused, &missing] {
        assert_ne!(told.code(), Code::Ok);
        let link = told.metadata().get("link").map(|link| link.to_str().unwrap().to_owned());
        assert!(link.is_some_and(|link| link.contains("/problem/")), "{told:?}");
    }
    assert_eq!(store.stats().in_flight, 0);
}
