//! [`IdempotencyLayer`]: built once, shared by all services it makes.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use http::{Method, request::Parts};
use tower_layer::Layer;

use super::{
    at_once::Runtime,
    attempt::Caller,
    backing::Backing,
    endpoint,
    intake::{Bodies, Budget, Charge, Refused},
    policy::Policy,
    published::PublishedPolicy,
    service::Idempotency,
    shares::{Most, Of, Share, Shares},
};
use crate::Store;

type AccountOf = dyn Fn(&Parts) -> Option<Vec<u8>> + Send + Sync;
type EndpointOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type Change = dyn Fn(Policy) -> Policy + Send + Sync;

/// Makes a service safe to retry: see the [module](super) for what it does and where it belongs.
///
/// Setters may be called in any order. Clones share the store, the caps and the counters, also
/// after a setter was called on one of them; only [`max_tasks`](Self::max_tasks),
/// [`max_buffered`](Self::max_buffered) and the limits for each account start new ones.
#[derive(Clone)]
pub struct IdempotencyLayer {
    pub(super) config: Arc<Config>,
}

impl IdempotencyLayer {
    /// A layer whose accounts are read from what authentication left in the request (R3).
    ///
    /// `account` answers at most 255 bytes: a user or tenant id. A request for which it answers
    /// `None`, nothing or more is refused (403).
    pub fn new<A: AsRef<[u8]>>(
        store: impl Into<Backing>,
        account: impl Fn(&Parts) -> Option<A> + Send + Sync + 'static,
    ) -> Self {
        Self::of(store.into(), Some(Arc::new(move |parts| Some(account(parts)?.as_ref().to_vec()))))
    }

    /// A layer for a service with one tenant: all callers share one account (R3).
    pub fn single_tenant(store: impl Into<Backing>) -> Self {
        Self::of(store.into(), None)
    }

    fn of(backing: Backing, account: Option<Arc<AccountOf>>) -> Self {
        let mut config = Config {
            backing,
            account,
            endpoint: None,
            operation_name: None,
            base: Arc::default(),
            changes: Vec::new(),
            operations: HashMap::new(),
            methods: Vec::new(),
            counters: Arc::default(),
            caps: Arc::new(Caps::new(Limits::default())),
        };
        config.settle();
        Self { config: Arc::new(config) }
    }

    fn change(self, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Arc::unwrap_or_clone(self.config);
        change(&mut config);
        config.settle();
        Self { config: Arc::new(config) }
    }

    /// Starts new counts.
    pub(super) fn limits(self, set: impl FnOnce(&mut Limits)) -> Self {
        self.change(|config| {
            let mut limits = config.caps.limits;
            set(&mut limits);
            config.caps = Arc::new(Caps::new(limits));
        })
    }

    pub(super) fn for_all(self, change: impl FnOnce(Policy) -> Policy) -> Self {
        self.change(|config| config.base = Arc::new(change(Policy::clone(&config.base))))
    }

    /// Sets a policy for one endpoint, such as `POST /orders/{id}/refund`; the parameter's name
    /// does not count. It starts from what is set for all operations.
    ///
    /// ```
    /// use std::time::Duration;
    /// use oncekey::{Store, http::IdempotencyLayer};
    ///
    /// let layer = IdempotencyLayer::single_tenant(Store::builder().build()?)
    ///     .operation("POST /orders/{id}/refund", |policy| {
    ///         policy.wait_limit(Duration::ZERO).max_request(4096)
    ///     });
    /// # Ok::<(), oncekey::ConfigError>(())
    /// ```
    #[must_use]
    pub fn operation(
        self,
        name: impl AsRef<str>,
        change: impl Fn(Policy) -> Policy + Send + Sync + 'static,
    ) -> Self {
        let name = name.as_ref().to_owned();
        self.change(|config| config.changes.push((name, Arc::new(change))))
    }

    /// The endpoint of requests whose route is not known (R2). Without it they pass unclaimed and
    /// are counted in [`HttpStats::unclaimed`].
    #[must_use]
    pub fn operation_name(self, name: impl Into<String>) -> Self {
        let name = endpoint::erased(&name.into());
        self.change(|config| config.operation_name = Some(name))
    }

    /// Names the endpoint before the route is asked (R2). Where `name` answers `None`, the route
    /// names it.
    ///
    /// Never name it by the path of the request: that belongs to the fingerprint, where another
    /// path under the same key shows as a mismatch instead of a second run.
    #[must_use]
    pub fn endpoint(self, name: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.change(|config| config.endpoint = Some(Arc::new(name)))
    }

    /// How many owners may be at work at once; beyond it 503 (R18). Default: 8192, about as many
    /// as one process serves well. Replays and waiters do not count.
    #[must_use]
    pub fn max_tasks(self, tasks: usize) -> Self {
        self.limits(|limits| limits.tasks = tasks)
    }

    /// How many bytes of request bodies may be in memory at once; beyond it 503 (R19). Default:
    /// 256 MiB: 256 of the largest at once, and half of what the store may take. A body
    /// counts from its first byte until the handler has dropped it.
    #[must_use]
    pub fn max_buffered(self, bytes: usize) -> Self {
        self.limits(|limits| limits.buffered = bytes)
    }

    /// What clients must be told of these settings, for the documentation of the service.
    pub fn published_policy(&self) -> PublishedPolicy {
        let Config { backing, account, base, changes, operations, caps, .. } = &*self.config;
        let mut told: Vec<(String, Arc<Policy>)> = Vec::new();
        for (name, _) in changes {
            let erased = endpoint::erased(name);
            if let Some(policy) = operations.get(&erased)
                && !told.iter().any(|(name, _)| endpoint::erased(name) == erased)
            {
                told.push((name.clone(), Arc::clone(policy)));
            }
        }
        PublishedPolicy {
            base: Arc::clone(base),
            operations: told,
            retention: backing.store().retention(),
            has_accounts: account.is_some(),
            each: caps.limits.each,
        }
    }

    /// The store, or the memory in front of the tier.
    pub fn store(&self) -> &Store {
        self.config.backing.store()
    }

    /// What the layer has done and holds, in numbers. What the store knows is in
    /// [`Store::stats`](crate::Store::stats).
    pub fn stats(&self) -> HttpStats {
        let Config { counters, caps, .. } = &*self.config;
        HttpStats {
            tasks: caps.tasks.used(),
            buffered: caps.budget.used(),
            accounts: caps.shares.as_ref().map_or(0, |shares| shares.accounts()),
            unclaimed: counters.unclaimed.read(),
            too_busy: counters.too_busy.read(),
            panics: counters.panics.read(),
        }
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency::new(inner, Arc::clone(&self.config))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config { base, operations, operation_name, caps, .. } = &*self.config;
        let mut names: Vec<_> = operations.keys().collect();
        names.sort_unstable();
        f.debug_struct("IdempotencyLayer")
            .field("policy", base)
            .field("operations", &names)
            .field("operation_name", operation_name)
            .field("max_tasks", &caps.limits.tasks)
            .field("max_buffered", &caps.limits.buffered)
            .field("most_of_each_account", &caps.limits.each)
            .finish_non_exhaustive()
    }
}

/// A reading of a layer's gauges and counters; clones of a layer have them in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpStats {
    /// Gauge: owners at work.
    pub tasks: usize,
    /// Gauge: bytes of request bodies in memory.
    pub buffered: usize,
    /// Gauge: accounts that have owners, waiters or bytes here; zero where nothing is limited for
    /// each account.
    pub accounts: usize,
    /// Requests of a covered method that passed unclaimed because no endpoint was known (R2).
    pub unclaimed: u64,
    /// Requests refused because of [`max_tasks`](IdempotencyLayer::max_tasks) or
    /// [`max_buffered`](IdempotencyLayer::max_buffered).
    pub too_busy: u64,
    /// Handlers that panicked (R11).
    pub panics: u64,
}

/// What a layer and its services have in common.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) backing: Backing,
    /// `None` for one tenant.
    account: Option<Arc<AccountOf>>,
    endpoint: Option<Arc<EndpointOf>>,
    operation_name: Option<String>,
    base: Arc<Policy>,
    /// By the names as they were given.
    changes: Vec<(String, Arc<Change>)>,
    /// `base` with the changes, so that the order of the setters does not count.
    operations: HashMap<String, Arc<Policy>>,
    /// All methods that some policy covers.
    methods: Vec<Method>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) caps: Arc<Caps>,
}

impl Config {
    /// Works out what follows from the settings.
    fn settle(&mut self) {
        self.operations.clear();
        for (name, change) in &self.changes {
            let name = endpoint::erased(name);
            let before = self.operations.get(&name).unwrap_or(&self.base);
            let after = change(Policy::clone(before));
            self.operations.insert(name, Arc::new(after));
        }
        self.methods = self.base.methods.clone();
        for policy in self.operations.values() {
            self.methods.extend_from_slice(&policy.methods);
        }
    }

    /// The policy for all, and those of operations.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &Policy> {
        std::iter::once(&*self.base).chain(self.operations.values().map(|policy| &**policy))
    }

    /// Whether some policy covers the method: the first test (R6).
    pub(crate) fn covers(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    /// The name of the operation, if it has one (R2).
    pub(crate) fn endpoint(&self, parts: &Parts) -> Option<String> {
        self.endpoint
            .as_ref()
            .and_then(|name| Some(endpoint::erased(&name(parts)?)))
            .or_else(|| endpoint::of_route(parts))
            .or_else(|| self.operation_name.clone())
    }

    pub(crate) fn policy(&self, endpoint: &str) -> &Arc<Policy> {
        self.operations.get(endpoint).unwrap_or(&self.base)
    }

    /// The account, if there is one (R3). Nothing stands for the one of a single tenant, which no
    /// other layer can have.
    pub(crate) fn account(&self, parts: &Parts) -> Option<Vec<u8>> {
        match &self.account {
            None => Some(Vec::new()),
            Some(account) => account(parts).filter(|account| !account.is_empty()),
        }
    }
}

/// The most there may be at once.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    tasks: usize,
    buffered: usize,
    pub(super) each: Most,
}

impl Default for Limits {
    fn default() -> Self {
        Self { tasks: 8192, buffered: 256 << 20, each: Most::NO_LIMIT }
    }
}

/// What is limited over all requests of a layer.
pub(crate) struct Caps {
    limits: Limits,
    /// One for each owner at work.
    tasks: Arc<Budget>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) bodies: Arc<Bodies>,
    shares: Option<Arc<Shares>>,
    pub(crate) runtime: Runtime,
}

/// The place of an owner at work: of all, and of its account. Dropping it gives it back.
pub(crate) struct Slot {
    _place: Charge,
}

/// Who has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// The account has its share.
    Account,
    /// All together have what there is.
    All,
}

impl Caps {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            tasks: Arc::new(Budget::new(limits.tasks)),
            budget: Arc::new(Budget::new(limits.buffered)),
            bodies: Arc::default(),
            shares: Shares::new(limits.each),
            runtime: Runtime::default(),
        }
    }

    /// The account's share of something, if that is limited.
    pub(crate) fn share(&self, caller: &Arc<Caller>, of: Of) -> Option<Share> {
        self.shares.as_ref().map(|shares| shares.open(caller, of))
    }

    /// A place for an owner.
    pub(crate) fn slot(&self, caller: &Arc<Caller>) -> Result<Slot, Over> {
        let mut place = Charge::new(&self.tasks, self.share(caller, Of::Tasks));
        match place.grow_to(1) {
            Ok(()) => Ok(Slot { _place: place }),
            Err(Refused::OverShare) => Err(Over::Account),
            Err(_) => Err(Over::All),
        }
    }
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) unclaimed: Counter,
    pub(crate) too_busy: Counter,
    pub(crate) panics: Counter,
}

/// Relaxed, because each counter stands for itself.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn up(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Request;

    use super::*;

    fn layer() -> IdempotencyLayer {
        IdempotencyLayer::single_tenant(Store::builder().build().unwrap())
    }

    #[test]
    fn the_order_of_the_setters_does_not_count() {
        let seconds = Duration::from_secs;
        let before = layer()
            .operation("PUT /a/{x}", |policy| policy.methods([Method::PUT]))
            .wait_limit(seconds(3))
            .operation("PUT /a/{y}", |policy| policy.max_request(7));
        for name in ["PUT /a/{}", "POST /b"] {
            assert_eq!(before.config.policy(name).wait_limit, seconds(3));
        }
        assert_eq!(before.config.policy("PUT /a/{}").max_request, 7);
        assert_eq!(before.config.policy("PUT /a/{}").methods, [Method::PUT]);
        assert!(before.config.covers(&Method::PUT) && before.config.covers(&Method::POST));
        assert!(!layer().config.covers(&Method::PUT));
    }

    #[test]
    fn r2_a_function_names_the_endpoint_before_the_route_and_a_name_after_it() {
        let named = layer().operation_name("fallback").endpoint(|parts| {
            let name = parts.headers.get("x-operation")?;
            Some(format!("{{v}} {}", name.to_str().ok()?))
        });
        let endpoint = |route: Option<&'static str>, name: Option<&str>| {
            let mut request = Request::post("/x");
            if let Some(name) = name {
                request = request.header("x-operation", name);
            }
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            if let Some(route) = route {
                parts.extensions.insert(super::super::RouteTemplate::new(route));
            }
            named.config.endpoint(&parts)
        };
        assert_eq!(endpoint(Some("/{a}"), Some("pay")).as_deref(), Some("{} pay"));
        assert_eq!(endpoint(Some("/{a}"), None).as_deref(), Some("POST /{}"));
        assert_eq!(endpoint(None, None).as_deref(), Some("fallback"));
        let (parts, ()) = Request::post("/x").body(()).unwrap().into_parts();
        assert_eq!(layer().config.endpoint(&parts), None);
    }

    #[test]
    fn r3_an_empty_account_is_none() {
        let store = Store::builder().build().unwrap();
        let layer = IdempotencyLayer::new(store, |parts| {
            parts.headers.get("x-account").map(|account| account.as_bytes().to_vec())
        });
        let account = |request: http::request::Builder| {
            layer.config.account(&request.body(()).unwrap().into_parts().0)
        };
        assert_eq!(account(Request::post("/").header("x-account", "a")), Some(b"a".to_vec()));
        assert_eq!(account(Request::post("/").header("x-account", "")), None);
        assert_eq!(account(Request::post("/")), None);
    }
}
