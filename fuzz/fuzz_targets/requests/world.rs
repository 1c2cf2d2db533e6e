//! The layer with a handler that does as its request says, driven step by step on one thread.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use oncekey::{
    Identity, Key, KeyForm, ManualClock, Outcome, Resolution, Store, Sweep,
    http::{Attempt, Idempotency, IdempotencyLayer, Keep, Release, RequestBody, RouteTemplate},
};
use tokio::{runtime::Runtime, sync::oneshot, task::JoinHandle};
use tower::{Layer as _, Service, ServiceExt};

use crate::{
    Answer, Ask, Frame, KeyField, Mark, Method, Plan, Step,
    model::{Id, MAX_BODY, MAX_RESPONSE, Model, RETENTION, Told, body_of},
};

type Body = UnsyncBoxBody<Bytes, Cut>;

/// What a body says when it breaks off, and a service that did nothing.
#[derive(Debug)]
struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut")
    }
}

impl std::error::Error for Cut {}

/// What handlers share with the driver: gates by the number of the request.
#[derive(Clone, Default)]
struct Handlers {
    gates: Arc<Mutex<HashMap<usize, oneshot::Sender<()>>>>,
    runs: Arc<Mutex<usize>>,
}

#[derive(Clone)]
struct Number(usize);

impl Handlers {
    async fn answer(self, request: Request<RequestBody<Body>>) -> Result<Response<Body>, Cut> {
        *self.runs.lock().unwrap() += 1;
        let number = request.extensions().get::<Number>().unwrap().0;
        let plan = request.extensions().get::<Arc<Plan>>().unwrap().clone();
        let is_claimed = request.extensions().get::<Attempt>().is_some();
        // The bytes are those that were sent, whether or not somebody looks.
        drop(request.into_body().collect().await);
        if plan.is_gated && is_claimed {
            let (open, opened) = oneshot::channel();
            self.gates.lock().unwrap().insert(number, open);
            let _ = opened.await;
        }
        respond(&plan)
    }
}

fn respond(plan: &Plan) -> Result<Response<Body>, Cut> {
    let (status, body, is_broken) = body_of(&plan.answer);
    let frames = |pieces: Vec<Result<Bytes, Cut>>| {
        let frames = pieces.into_iter().map(|piece| piece.map(http_body::Frame::data));
        StreamBody::new(stream::iter(frames.collect::<Vec<_>>())).boxed_unsync()
    };
    let whole = |body: Vec<u8>| {
        http_body_util::Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync()
    };
    let mut response = match &plan.answer {
        Answer::Error => return Err(Cut),
        Answer::Whole(..) => Response::new(whole(body)),
        Answer::Pieces(..) => {
            Response::new(frames(body.chunks(5).map(|it| Ok(Bytes::copy_from_slice(it))).collect()))
        }
        Answer::Stream => Response::new(frames(vec![Ok(Bytes::from(body))])),
        Answer::Broken(_) => {
            assert!(is_broken);
            Response::new(frames(vec![Ok(Bytes::from(body)), Err(Cut)]))
        }
    };
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
    if matches!(plan.answer, Answer::Stream) {
        let kind = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", kind);
    }
    match plan.mark {
        Mark::None => None,
        Mark::Keep => response.extensions_mut().insert(Keep).map(drop),
        Mark::Release => response.extensions_mut().insert(Release).map(drop),
    };
    Ok(response)
}

/// What a client saw, as the model says it.
async fn told<R>(answered: Result<Response<R>, Cut>) -> Told
where
    R: http_body::Body<Data = Bytes>,
{
    let Ok(response) = answered else { return Told::Failed };
    let (head, body) = response.into_parts();
    let mut body = std::pin::pin!(body);
    let (mut bytes, mut is_broken) = (Vec::new(), false);
    while let Some(frame) = body.frame().await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(data)) => bytes.extend_from_slice(&data),
            Ok(Err(_)) => {}
            Err(_) => is_broken = true,
        }
    }
    let is_replay = head.headers.get("idempotent-replayed").is_some();
    if head.headers.get("content-type").is_some_and(|kind| kind == "application/problem+json") {
        assert!(!is_replay && !is_broken);
        let link = head.headers.get("link").map(|link| link.to_str().unwrap().to_owned());
        return match link {
            None => {
                assert_eq!(head.status, 400);
                Told::BadRequest
            }
            Some(link) => {
                let slug = link.split(['#', '>']).nth(1).unwrap();
                let problem = oncekey::http::Problem::ALL.into_iter().find(|it| it.slug() == slug);
                let problem = problem.unwrap();
                assert_eq!(problem.status(), head.status);
                Told::Problem(problem.slug())
            }
        };
    }
    Told::Answer(head.status.as_u16(), bytes, is_broken, is_replay)
}

struct World {
    service: Idempotency<HandlerService>,
    layer: IdempotencyLayer,
    store: Store,
    clock: ManualClock,
    handlers: Handlers,
    clients: HashMap<usize, JoinHandle<()>>,
    told: Arc<Mutex<Vec<(usize, Told)>>>,
    model: Model,
    asked: usize,
}

#[derive(Clone)]
struct HandlerService(Handlers);

impl Service<Request<RequestBody<Body>>> for HandlerService {
    type Response = Response<Body>;
    type Error = Cut;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, Cut>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Cut>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Body>>) -> Self::Future {
        Box::pin(self.0.clone().answer(request))
    }
}

const LONG: Duration = Duration::from_secs(1 << 30);

fn key_name(n: u8) -> String {
    format!("k{}", n % 4)
}

fn account_of(is_second: bool) -> &'static str {
    if is_second { "acct_b" } else { "acct_a" }
}

fn endpoint_of(method: Method) -> &'static str {
    match method {
        Method::Post => "POST /charges/{}",
        Method::Patch => "PATCH /charges/{}",
        Method::Get => "GET /charges/{}",
    }
}

impl World {
    fn new() -> Self {
        let clock = ManualClock::new();
        let store = Store::builder()
            .clock(clock.clone())
            .sweep(Sweep::Manual)
            .retention(Duration::from_secs(RETENTION))
            .max_keys(1 << 10)
            .max_bytes(8 << 20)
            .build()
            .unwrap();
        let handlers = Handlers::default();
        let layer = IdempotencyLayer::new(store.clone(), |parts| {
            Some(parts.headers.get("x-account")?.as_bytes().to_vec())
        })
        .wait_limit(Duration::ZERO)
        .wait_cap(LONG)
        .read_limit(LONG)
        .capture_time(LONG)
        .max_request(MAX_BODY)
        .max_response(MAX_RESPONSE)
        .max_tasks_per_account(1 << 10)
        .max_waiters_per_account(1 << 10)
        .max_buffered_per_account(1 << 24);
        let service = layer.layer(HandlerService(handlers.clone()));
        Self {
            service,
            layer,
            store,
            clock,
            handlers,
            clients: HashMap::new(),
            told: Arc::default(),
            model: Model::default(),
            asked: 0,
        }
    }

    fn ask(&mut self, ask: &Ask) {
        let number = self.asked;
        self.asked += 1;
        let mut plan = ask.plan.clone();
        plan.is_gated &= !ask.is_patient;
        let mut lines: Vec<Vec<u8>> = match &ask.key {
            KeyField::Good(n) => vec![key_name(u8::from(*n)).into_bytes()],
            KeyField::Quoted(n) => vec![format!("\"{}\"; a=1", key_name(*n)).into_bytes()],
            KeyField::None => Vec::new(),
            KeyField::Lines(lines) => lines.iter().take(3).cloned().collect(),
        };
        lines.retain(|line| HeaderValue::from_bytes(line).is_ok());
        let method = match ask.method() {
            Method::Post => http::Method::POST,
            Method::Patch => http::Method::PATCH,
            Method::Get => http::Method::GET,
        };
        let path = if ask.path { "/charges/1" } else { "/charges/2?x=1" };
        let body = body(&ask.body());
        let mut request = Request::builder().method(method).uri(path).body(body).unwrap();
        let headers = request.headers_mut();
        for line in &lines {
            headers.append("idempotency-key", HeaderValue::from_bytes(line).unwrap());
        }
        if let Some(account) = ask.account() {
            headers.insert("x-account", HeaderValue::from_static(account_of(account)));
        }
        if ask.is_patient {
            headers.insert("prefer", HeaderValue::from_static("wait=1000000"));
        }
        let extensions = request.extensions_mut();
        extensions.insert(Number(number));
        extensions.insert(Arc::new(plan.clone()));
        if !ask.is_lost() {
            extensions.insert(RouteTemplate::new("/charges/{id}"));
        }

        // The model first, by the order of R2, R6, R3, R6, R19.
        let model = &mut self.model;
        match (ask.is_lost() || ask.method() == Method::Get, ask.account()) {
            (true, _) => {
                // At no gate: it has no claim.
                model.passes(number, &plan);
            }
            (false, None) => model.refused(number, "account-unknown"),
            (false, Some(account)) => match &lines[..] {
                [] => model.refused(number, "key-missing"),
                [line] => match Key::parse(line, KeyForm::Any) {
                    Err(_) => model.refused(number, "key-invalid"),
                    Ok(key) => match Model::read(&ask.body()) {
                        Err(told) => model.told.push((number, told)),
                        Ok(body) => {
                            let id = (account, endpoint_of(ask.method()), key.as_str().to_owned());
                            model.asks(number, id, (ask.path, body), plan, ask.is_patient);
                        }
                    },
                },
                _ => model.refused(number, "key-invalid"),
            },
        }

        let (service, heard) = (self.service.clone(), Arc::clone(&self.told));
        let client = tokio::spawn(async move {
            let told = told(service.oneshot(request).await).await;
            heard.lock().unwrap().push((number, told));
        });
        self.clients.insert(number, client);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Ask(ask) => self.ask(ask),
            Step::Leave(n) => {
                let mut open: Vec<_> = self.clients.keys().copied().collect();
                open.sort_unstable();
                if let Some(&request) = open.get(usize::from(*n) % open.len().max(1)) {
                    self.clients.remove(&request).unwrap().abort();
                    self.model.leaves(request);
                }
            }
            Step::Open(n) => {
                let len = self.model.gated.len().max(1);
                if let Some(&request) = self.model.gated.get(usize::from(*n) % len) {
                    self.handlers.gates.lock().unwrap().remove(&request).unwrap().send(()).unwrap();
                    self.model.answers(request);
                }
            }
            Step::Wait(minutes) => {
                let seconds = (u64::from(*minutes) % 65) * 60;
                self.clock.advance(Duration::from_secs(seconds));
                self.store.sweep();
                self.model.waits(seconds);
            }
            Step::Forget(n) | Step::Resolve(n, _) => {
                let id: Id = (
                    n & 64 != 0,
                    endpoint_of(if n & 32 != 0 { Method::Patch } else { Method::Post }),
                    key_name(*n),
                );
                let identity = Identity::new(account_of(id.0), id.1, &id.2).unwrap();
                match step {
                    Step::Resolve(_, is_done) => {
                        let outcome = is_done.then(|| (299, b"found out".to_vec()));
                        let as_ = match &outcome {
                            Some((status, body)) => {
                                Resolution::Complete(Outcome::new(*status).body(body.clone()))
                            }
                            None => Resolution::Release,
                        };
                        let resolved = self.store.resolve(&identity, as_).is_ok();
                        assert_eq!(resolved, self.model.resolves(&id, outcome));
                    }
                    _ => assert_eq!(self.store.forget(&identity).is_ok(), self.model.forgets(&id)),
                }
            }
        }
    }

    /// Lets all that can go on go on, and compares.
    async fn compare(&mut self) {
        for _ in 0..32 + 8 * self.clients.len() {
            tokio::task::yield_now().await;
        }
        let mut heard = std::mem::take(&mut *self.told.lock().unwrap());
        let mut expected = std::mem::take(&mut self.model.told);
        // Nobody hears what is said to who has left.
        expected.retain(|(request, _)| self.clients.contains_key(request));
        heard.sort_by_key(|(request, _)| *request);
        expected.sort_by_key(|(request, _)| *request);
        assert_eq!(heard, expected, "heard, expected");
        for (request, _) in heard {
            self.clients.remove(&request);
        }
        assert_eq!(*self.handlers.runs.lock().unwrap(), self.model.runs, "runs");
        let stats = self.store.stats();
        assert_eq!(stats.in_flight, self.model.in_flight(), "{stats:?}");
        assert_eq!(self.layer.stats().tasks, self.model.gated.len(), "owners at work");
        assert_eq!(stats.lost, stats.double_runs);
        for (account, endpoint) in
            [(false, "POST /charges/{}"), (true, "POST /charges/{}"), (false, "PATCH /charges/{}")]
        {
            for key in ["k0", "k1"] {
                let identity = Identity::new(account_of(account), endpoint, key).unwrap();
                let seen = self.store.look_up(&identity).map(|entry| entry.state);
                let id = (account, endpoint, key.to_owned());
                assert_eq!(seen, self.model.state(&id), "{id:?}");
            }
        }
    }
}

fn body(frames: &[Frame]) -> Body {
    let frames = frames.iter().map(|frame| match frame {
        Frame::Bytes(bytes) => Ok(http_body::Frame::data(Bytes::copy_from_slice(bytes))),
        Frame::Trailers => {
            let mut trailers = HeaderMap::new();
            trailers.insert(HeaderName::from_static("x-sum"), HeaderValue::from_static("1"));
            Ok(http_body::Frame::trailers(trailers))
        }
        Frame::Broken => Err(Cut),
    });
    StreamBody::new(stream::iter(frames.collect::<Vec<Result<_, Cut>>>())).boxed_unsync()
}

thread_local! {
    static RUNTIME: RefCell<Option<Rc<Runtime>>> = const { RefCell::new(None) };
}

fn runtime() -> Rc<Runtime> {
    let build = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        Rc::new(builder.enable_time().start_paused(true).build().unwrap())
    };
    RUNTIME.with_borrow_mut(|runtime| Rc::clone(runtime.get_or_insert_with(build)))
}

/// Plays the steps; in the end all gates are opened and nothing is left.
pub fn play(steps: &[Step]) {
    runtime().block_on(async {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.compare().await;
        }
        while !world.model.gated.is_empty() {
            world.step(&Step::Open(0));
            world.compare().await;
        }
        let stats = world.store.stats();
        assert_eq!((stats.in_flight, stats.waiters), (0, 0), "{stats:?}");
        let layer = world.layer.stats();
        assert_eq!((layer.tasks, layer.buffered, layer.accounts), (0, 0, 0), "{layer:?}");
        assert!(world.clients.is_empty(), "somebody was never answered");
        world.clock.advance(Duration::from_secs(RETENTION));
        world.store.sweep();
        assert_eq!(world.store.stats().keys, 0);
    });
}
