//! The layer in front of a gRPC service of tonic.
//!
//! ```text
//! cargo run --example grpc --features http
//! ```
//!
//! What `tonic-build` would generate is written by hand here, with messages that are plain bytes, so
//! that nothing has to be generated. The rest is what a service needs: the name of an operation, and
//! the table of which errors release their key.

use std::{
    convert::Infallible,
    error::Error,
    future::{Future, Ready, ready},
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    task::{Context, Poll},
};

use bytes::{Buf as _, BufMut as _};
use http::{Request, Response};
use oncekey::{
    Store,
    http::{IdempotencyLayer, Release},
};
use tokio::net::TcpListener;
use tonic::{
    Code, Status,
    body::Body,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    server::{Grpc, NamedService, UnaryService},
    transport::{Channel, Server, server::TcpIncoming},
};
use tower::{Service, ServiceBuilder};

const CREATE: &str = "/payments.Charges/Create";

static CHARGES: AtomicUsize = AtomicUsize::new(0);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let once = IdempotencyLayer::single_tenant(Store::builder().build()?)
        // In gRPC the path is the name of the operation. What is not named here passes unclaimed.
        .endpoint(|parts| (parts.uri.path() == CREATE).then(|| CREATE.to_owned()));
    let layers = ServiceBuilder::new().layer(once).map_response(release_what_was_refused);

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = Server::builder().layer(layers.into_inner()).add_service(Charges);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let channel = Channel::from_shared(format!("http://{address}"))?.connect().await?;
    for _ in 0..2 {
        let mut client = tonic::client::Grpc::new(channel.clone());
        client.ready().await?;
        let mut request = tonic::Request::new(b"1200".to_vec());
        request.metadata_mut().insert("idempotency-key", "order-7".parse()?);
        let answer = client.unary(request, CREATE.parse()?, Bytes).await?;
        let is_replay = answer.metadata().contains_key("idempotent-replayed");
        println!("{}, replay: {is_replay}", String::from_utf8_lossy(answer.get_ref()));
    }
    println!("2 calls, {} charge", CHARGES.load(Relaxed));
    Ok(())
}

/// In gRPC every answer is a 200. An error that comes before any message has its code in the head:
/// these say that nothing was done, so their key is free again.
fn release_what_was_refused<B>(mut response: Response<B>) -> Response<B> {
    let code = response.headers().get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    if let Some(
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::Unauthenticated
        | Code::Unavailable
        | Code::Unimplemented,
    ) = code
    {
        response.extensions_mut().insert(Release);
    }
    response
}

#[derive(Clone)]
struct Charges;

impl UnaryService<Vec<u8>> for Charges {
    type Response = Vec<u8>;
    type Future = Ready<Result<tonic::Response<Vec<u8>>, Status>>;

    fn call(&mut self, request: tonic::Request<Vec<u8>>) -> Self::Future {
        let number = CHARGES.fetch_add(1, Relaxed) + 1;
        let amount = String::from_utf8_lossy(request.get_ref()).into_owned();
        ready(Ok(tonic::Response::new(format!("charge {number} of {amount}").into_bytes())))
    }
}

// From here on: what `tonic-build` generates.

impl NamedService for Charges {
    const NAME: &'static str = "payments.Charges";
}

impl Service<Request<Body>> for Charges {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async { Ok(Grpc::new(Bytes).unary(Charges, request).await) })
    }
}

/// Messages that are bytes.
#[derive(Clone, Copy, Default)]
struct Bytes;

impl Codec for Bytes {
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

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}
