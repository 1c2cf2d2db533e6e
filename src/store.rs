//! The door: [`Store`] and its builder. Settings are parsed once; a store that was built is valid.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    thread,
    time::Duration,
};

use crate::{
    capacity::{self, Room},
    claim::{self, Claim},
    clock::{Clock, Millis, SystemClock},
    engine::{Abandon, Asked, Engine, Hold, Lapse, Settings},
    error::{Busy, ClaimError, ConfigError, ResolveError},
    expire::{self, Sweeper},
    fingerprint::{Fingerprint, Scheme},
    identity::{self, Identity},
    lane,
    outcome::Outcome,
    permit::Token,
    record::{self, word::View},
    stats::Stats,
    sync::{Arc, Weak},
    waiters::Waiters,
};

/// More keys than this are clamped.
const MOST_KEYS: usize = 1 << 31;

/// More bytes than this are clamped: 2^16 slabs of 1 MiB hold them (R25).
const MOST_BYTES: usize = 48 << 30;

/// Chunks of memory that the sweep's thread makes ready in a row.
const PREPARED: usize = 16;

/// Longer durations are clamped to this: 100 years (R23).
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Who reaps what has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sweep {
    /// A thread of the store's own. It sleeps until something ends.
    #[default]
    Thread,
    /// Nobody but [`Store::sweep`]. For tests with a [`ManualClock`](crate::ManualClock), and for
    /// services that bring a timer of their own: call it once a tick. A task that waits is told of
    /// a lapsed lease only then.
    Manual,
}

/// The settings of a store. Made by [`Store::builder`].
///
/// Each default has its reason on its setter.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct StoreBuilder {
    retention: Duration,
    lease: Duration,
    max_run: Duration,
    tick: Duration,
    max_keys: usize,
    max_bytes: usize,
    max_keys_per_account: Option<usize>,
    outcome_reserve: usize,
    max_waiters_per_key: usize,
    max_waiters: usize,
    on_abandon: Abandon,
    on_lapse: Lapse,
    sweep: Sweep,
    clock: ClockBox,
}

struct ClockBox(Box<dyn Clock>);

impl fmt::Debug for ClockBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

impl StoreBuilder {
    fn new() -> Self {
        Self {
            retention: Duration::from_secs(24 * 60 * 60),
            lease: Duration::from_secs(60),
            max_run: Duration::from_secs(15 * 60),
            tick: Duration::from_secs(1),
            max_keys: 1_000_000,
            max_bytes: 512 << 20,
            max_keys_per_account: None,
            outcome_reserve: 4 << 10,
            max_waiters_per_key: 1_024,
            max_waiters: 16_384,
            on_abandon: Abandon::Hold,
            on_lapse: Lapse::Hold,
            sweep: Sweep::Thread,
            clock: ClockBox(Box::new(SystemClock::new())),
        }
    }

    /// How long an outcome is kept, counted from completion (R22); of a held record from the hold.
    ///
    /// Default 24 h: clients and their operators retry within a day. At most 100 years, longer
    /// ones are clamped. Zero is refused.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// How long an owner that shows no sign of life keeps its claim (R8).
    ///
    /// Default 60 s: longer than any stall of a healthy process, short enough that a client that
    /// still retries gets an answer. Zero is refused, more than 100 years is clamped.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// For how long an attended claim ([`Permit::attend`](crate::Permit::attend), the HTTP layer)
    /// counts as renewed; then the identity is held (R8).
    ///
    /// Default 15 min: work that runs longer hangs. Zero is refused, more than 100 years is clamped.
    pub fn max_run(mut self, max_run: Duration) -> Self {
        self.max_run = max_run;
        self
    }

    /// How much later than its end a record may give its memory back (R22).
    ///
    /// Default 1 s: so often the background sweep wakes at most, but for waiters whose owner's
    /// lease lapses. No caller sees a record after its end, whatever the tick. Zero is refused.
    pub fn tick(mut self, tick: Duration) -> Self {
        self.tick = tick;
        self
    }

    /// How many records the store holds at most (R25). Beyond it new identities are refused
    /// before they run; no live record is dropped.
    ///
    /// Default 1,000,000: 11 new keys a second at the default retention. Needed: rate x retention.
    /// At most 2^31, larger numbers are clamped.
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// How many bytes the store holds at most: index, records, identities, outcomes and timers
    /// (R25). Beyond it new identities are refused before they run.
    ///
    /// Default 512 MiB: a million records of 500 bytes. Needed: rate x retention x bytes, where a
    /// record costs 232 bytes beside outcome and identity, an eighth more of that, and [`outcome_reserve`] more while it is
    /// in flight. At most 48 GiB, more are clamped.
    ///
    /// [`outcome_reserve`]: Self::outcome_reserve
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// How many records one account may hold at most (R25). Default: no limit of its own.
    pub fn max_keys_per_account(mut self, max_keys: usize) -> Self {
        self.max_keys_per_account = Some(max_keys);
        self
    }

    /// Room that a claim reserves for its outcome, in bytes (R25). A larger outcome takes more
    /// when it is there; if it finds no room, the identity is completed as "not kept".
    ///
    /// Default 4 KiB: most answers of an API with their header lines.
    pub fn outcome_reserve(mut self, bytes: usize) -> Self {
        self.outcome_reserve = bytes;
        self
    }

    /// How many may wait for one identity (R15). Default 1,024.
    pub fn max_waiters_per_key(mut self, waiters: usize) -> Self {
        self.max_waiters_per_key = waiters;
        self
    }

    /// How many may wait in all (R15). Default 16,384.
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.max_waiters = waiters;
        self
    }

    /// What becomes of a permit that is dropped without a verb (R11). Default [`Abandon::Hold`].
    pub fn on_abandon(mut self, on_abandon: Abandon) -> Self {
        self.on_abandon = on_abandon;
        self
    }

    /// What becomes of a claim whose lease lapsed (R10). Default [`Lapse::Hold`].
    pub fn on_lapse(mut self, on_lapse: Lapse) -> Self {
        self.on_lapse = on_lapse;
        self
    }

    /// Who reaps what has ended. Default [`Sweep::Thread`].
    pub fn sweep(mut self, sweep: Sweep) -> Self {
        self.sweep = sweep;
        self
    }

    /// The store's clock. Default [`SystemClock`].
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = ClockBox(Box::new(clock));
        self
    }

    /// Builds the store.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the setting and its bound.
    pub fn build(self) -> Result<Store, ConfigError> {
        let lag = Millis::rounding_up(self.clock.0.lag());
        let settings = Settings {
            retention: span("retention", self.retention)?.plus(lag),
            lease: span("lease", self.lease)?.plus(lag),
            max_run: span("max_run", self.max_run)?.plus(lag),
            tick: span("tick", self.tick)?,
            lag,
            reserve: self.outcome_reserve,
            on_abandon: self.on_abandon,
            on_lapse: self.on_lapse,
        };
        at_least("max_keys", 1, self.max_keys)?;
        let mut largest = record::cost(identity::MAX_FRAME);
        if let Some(share) = self.max_keys_per_account {
            at_least("max_keys_per_account", 1, share)?;
            largest += capacity::place(identity::MAX_ACCOUNT);
        }
        let reserve = self.outcome_reserve.max(record::CLAIM);
        at_least("max_bytes", largest.saturating_add(reserve), self.max_bytes)?;
        let (max_keys, max_bytes) = (self.max_keys.min(MOST_KEYS), self.max_bytes.min(MOST_BYTES));
        let settings = Settings { reserve: reserve.min(max_bytes - largest), ..settings };
        let room = Room::new(lane::lanes(), max_keys, max_bytes, self.max_keys_per_account);
        let waiters = Waiters::new(self.max_waiters_per_key, self.max_waiters);
        let engine = Arc::new(Engine::new(settings, self.clock.0, max_keys, room, waiters));
        if self.sweep == Sweep::Thread {
            let alarm = Arc::clone(engine.alarm());
            expire::spawn(alarm, Background(Arc::downgrade(&engine)))
                .map_err(|error| ConfigError::NoThread { kind: error.kind() })?;
        }
        let hold = |lane| Arc::new(Hold::new(Arc::clone(&engine), lane));
        Ok(Store { holds: (0..engine.lanes()).map(hold).collect() })
    }
}

fn span(setting: &'static str, span: Duration) -> Result<Millis, ConfigError> {
    if span.is_zero() {
        return Err(ConfigError::ZeroDuration { setting });
    }
    Ok(Millis::rounding_up(span.min(LONGEST)))
}

fn at_least(setting: &'static str, at_least: usize, found: usize) -> Result<(), ConfigError> {
    if found < at_least {
        return Err(ConfigError::TooSmall { setting, at_least, found });
    }
    Ok(())
}

/// Perhaps the last of the store. A function of its own, because the thread sanitizer does not
/// understand how an `Arc` ends and has to be told by name (`.ci/tsan.supp`).
#[inline(never)]
fn let_go(engine: Arc<Engine>) {
    drop(engine);
}

/// What the sweep's thread holds of a store.
struct Background(Weak<Engine>);

impl Sweeper for Background {
    fn sweep(&self, about_to_sleep: impl Fn(Option<Millis>)) -> Option<Option<Duration>> {
        loop {
            // Not held across steps: a store that is dropped ends soon.
            let engine = self.0.upgrade()?;
            let now = engine.now();
            let step = engine.sweep_step();
            if step.more || engine.trim() {
                // Callers that wait for a lock that the step held come first.
                let_go(engine);
                thread::yield_now();
                continue;
            }
            // Whoever waits from now on rings, if its owner's lease ends earlier.
            let tick = engine.settings.tick;
            let next = step.next.unwrap_or(Millis::MAX).min(now.plus(tick));
            let idle = engine.is_empty();
            about_to_sleep(Some(next).filter(|_| !idle));
            // At most a tick, because the clock may be one that is moved by hand.
            let nap = next.since(engine.now()).max(Duration::from_millis(1));
            let_go(engine);
            return Some((!idle).then(|| nap.min(Duration::from_millis(tick.0))));
        }
    }

    fn prepare(&self) {
        if let Some(engine) = self.0.upgrade() {
            // As long as claims come faster than this, and no longer than is good for the rest.
            let _ = (0..PREPARED).all(|_| engine.pages.prepare());
            let_go(engine);
        }
    }

    fn panicked(&self) {
        if let Some(engine) = self.0.upgrade() {
            engine.own_lane().counters.sweep_panics.up();
        }
    }
}

/// The key store: one intent, one effect, one answer.
///
/// Cheap to clone; all clones are one store. The last one that is dropped ends the background
/// sweep.
///
/// ```
/// use oncekey::{Claim, Fingerprint, Identity, Outcome, Store};
///
/// let store = Store::builder().build()?;
/// let id = Identity::new("acct_42", "POST /charges", "7f9c1e2a")?;
/// let body = br#"{"amount_cents": 1200}"#;
///
/// for attempt in 1..=2 {
///     match store.claim(&id, Fingerprint::request("POST", "/charges", body))? {
///         Claim::Won(permit) => {
///             assert_eq!(attempt, 1);
///             permit.complete(Outcome::new(201).body("ch_1"))?;
///         }
///         Claim::Replay(replay) => {
///             assert_eq!(attempt, 2);
///             assert_eq!(&replay.outcome().bytes()[..], b"ch_1");
///         }
///         other => unreachable!("{other:?}"),
///     }
/// }
///
/// let other_body = Fingerprint::request("POST", "/charges", br#"{"amount_cents": 9900}"#);
/// assert!(matches!(store.claim(&id, other_body)?, Claim::Mismatch));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Store {
    /// One for each lane; all are one store.
    holds: Arc<[Arc<Hold>]>,
}

impl Store {
    /// The settings of a store, at their defaults.
    pub fn builder() -> StoreBuilder {
        StoreBuilder::new()
    }

    /// Makes the caller the owner of `id`, or tells what is there (R5, R7). Never blocks, never
    /// waits.
    ///
    /// # Errors
    ///
    /// [`ClaimError`] if `id` is new and cannot be taken in. Nothing was claimed then.
    pub fn claim(&self, id: &Identity<'_>, fingerprint: Fingerprint) -> Result<Claim, ClaimError> {
        self.claim_with(id, fingerprint, |_| None)
    }

    /// As [`Store::claim`], for callers that know several schemes (R4): if the record that is there
    /// carries a fingerprint of another scheme, `translate` is asked for this attempt's fingerprint
    /// by that scheme. If it has none, the answer is [`Claim::Held`].
    ///
    /// # Errors
    ///
    /// As for [`Store::claim`].
    pub fn claim_with(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Result<Claim, ClaimError> {
        let hold = self.hold();
        Self::claim_hashed(hold, hold.engine().hash(id), id, fingerprint, &mut translate)
    }

    /// As [`Store::claim_with`], but where nothing is there `admit` is asked first, and its refusal is
    /// the answer: nothing was claimed then. What it has let in comes along; what is there already is
    /// told without asking it. `hash` is what [`ask_for`](Self::ask_for) has said of `id`.
    #[cfg(feature = "http")]
    pub(crate) fn claim_admitted<P, R>(
        &self,
        id: &Identity<'_>,
        hash: u64,
        fingerprint: Fingerprint,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
        admit: impl FnOnce() -> Result<P, R>,
    ) -> Result<(Claim, Option<P>), NotClaimed<R>> {
        let hold = self.hold();
        let engine = hold.engine();
        let guard = hold.approach(hash);
        // While the memory comes.
        let frame = id.frame();
        let mut asked = Asked::new(fingerprint, &mut translate);
        let mut admitted = None;
        let met = match engine.observe(hold.lane(), hash, &frame, &mut asked, &guard) {
            Some(met) => met,
            None => {
                admitted = Some(admit().map_err(NotClaimed::Refused)?);
                engine
                    .claim(hold.lane(), hash, &frame, &mut asked, false, &guard)
                    .map_err(NotClaimed::Error)?
            }
        };
        let other = asked.other();
        Ok((claim::answer(hold, met, &frame, fingerprint, other), admitted))
    }

    /// Tells what is there and claims nothing; `None` if [`Store::claim`] would win.
    pub fn observe(&self, id: &Identity<'_>, fingerprint: Fingerprint) -> Option<Claim> {
        self.observe_with(id, fingerprint, |_| None)
    }

    /// As [`Store::observe`], for callers that know several schemes; see [`Store::claim_with`].
    pub fn observe_with(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Option<Claim> {
        let hold = self.hold();
        Self::observe_hashed(hold, hold.engine().hash(id), id, fingerprint, &mut translate)
    }

    /// As [`Store::observe`], for who has the key and not the request: there is no mismatch.
    #[cfg(feature = "http")]
    pub(crate) fn observe_any(&self, id: &Identity<'_>) -> Option<Claim> {
        loop {
            let fingerprint = self.engine().show(&id.frame())?.fingerprint;
            match self.observe(id, fingerprint) {
                // Claimed anew in between.
                Some(Claim::Mismatch) => {}
                there => return there,
            }
        }
    }

    /// Asks for the memory that a claim of `id` will read, and does not wait for it. Worth its few
    /// nanoseconds if something is done before the claim, such as hashing the body.
    pub fn prefetch(&self, id: &Identity<'_>) {
        self.ask_for(id);
    }

    /// As [`Store::prefetch`]. What comes back is for [`claim_admitted`](Self::claim_admitted).
    pub(crate) fn ask_for(&self, id: &Identity<'_>) -> u64 {
        let engine = self.engine();
        let hash = engine.hash(id);
        engine.prefetch(hash);
        hash
    }

    /// As [`Store::claim`] for each of `attempts`, in order. Faster for many: the waits for memory
    /// overlap.
    pub fn claim_each<'a>(
        &self,
        attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>,
    ) -> Vec<Result<Claim, ClaimError>> {
        let attempts = self.fetched(attempts);
        let claim = |(hash, id, fp)| Self::claim_hashed(self.hold(), hash, &id, fp, &mut |_| None);
        attempts.into_iter().map(claim).collect()
    }

    /// As [`Store::observe`] for each of `attempts`, in order. Faster for many: the waits for
    /// memory overlap.
    pub fn observe_each<'a>(
        &self,
        attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>,
    ) -> Vec<Option<Claim>> {
        let attempts = self.fetched(attempts);
        let observe =
            |(hash, id, fp)| Self::observe_hashed(self.hold(), hash, &id, fp, &mut |_| None);
        attempts.into_iter().map(observe).collect()
    }

    /// Asks for all buckets first, then for what stands in them.
    fn fetched<'a>(
        &self,
        attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>,
    ) -> Vec<(u64, Identity<'a>, Fingerprint)> {
        let hold = self.hold();
        let bucket = |(id, fingerprint): (Identity<'a>, Fingerprint)| {
            let hash = hold.engine().hash(&id);
            drop(hold.approach(hash));
            (hash, id, fingerprint)
        };
        let attempts: Vec<_> = attempts.into_iter().map(bucket).collect();
        attempts.iter().for_each(|(hash, ..)| hold.engine().prefetch_target(*hash));
        attempts
    }

    fn claim_hashed(
        hold: &Arc<Hold>,
        hash: u64,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        translate: &mut dyn FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Result<Claim, ClaimError> {
        let engine = hold.engine();
        let guard = hold.approach(hash);
        // While the memory comes.
        let frame = id.frame();
        let mut asked = Asked::new(fingerprint, translate);
        let met = engine.claim(hold.lane(), hash, &frame, &mut asked, false, &guard)?;
        let other = asked.other();
        Ok(claim::answer(hold, met, &frame, fingerprint, other))
    }

    fn observe_hashed(
        hold: &Arc<Hold>,
        hash: u64,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        translate: &mut dyn FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Option<Claim> {
        let engine = hold.engine();
        let guard = hold.approach(hash);
        let frame = id.frame();
        let mut asked = Asked::new(fingerprint, translate);
        let met = engine.observe(hold.lane(), hash, &frame, &mut asked, &guard)?;
        let other = asked.other();
        Some(claim::answer(hold, met, &frame, fingerprint, other))
    }

    /// The present thread's hold.
    fn hold(&self) -> &Arc<Hold> {
        // A power of two of them, at least one.
        &self.holds[lane::here() & (self.holds.len() - 1)]
    }

    fn engine(&self) -> &Engine {
        self.hold().engine()
    }

    /// What the store knows of `id`, for operators; `None` if a caller would not see it.
    pub fn look_up(&self, id: &Identity<'_>) -> Option<Entry> {
        let engine = self.engine();
        let shown = engine.show(&id.frame())?;
        let state = match shown.view {
            View::InFlight | View::Lapsed => EntryState::InFlight,
            View::Held => EntryState::Held,
            View::Completed => EntryState::Completed,
            View::NotKept => EntryState::NotKept,
            View::Gone => return None,
        };
        Some(Entry {
            state,
            age: shown.age,
            remaining: shown.remaining,
            token: Token { owner: engine.owner(), number: shown.token },
            waiters: shown.waiters,
        })
    }

    /// Settles a held identity (R11), as an operator who has found out what happened.
    ///
    /// # Errors
    ///
    /// [`ResolveError`] if `id` is not held; nothing changed.
    pub fn resolve(&self, id: &Identity<'_>, as_: Resolution) -> Result<(), ResolveError> {
        let outcome = match as_ {
            Resolution::Complete(outcome) => Some(outcome),
            Resolution::Release => None,
        };
        self.engine().resolve(&id.frame(), outcome)
    }

    /// Forgets `id`: the next claim is a new one. True if there was something to forget.
    ///
    /// # Errors
    ///
    /// [`Busy`] if it is in flight.
    pub fn forget(&self, id: &Identity<'_>) -> Result<bool, Busy> {
        self.engine().forget(&id.frame(), false)
    }

    /// Forgets `id` even if it is in flight: its owner's token is stale from then on, and the work
    /// may run twice. True if there was something to forget.
    pub fn forget_forced(&self, id: &Identity<'_>) -> bool {
        self.engine().forget(&id.frame(), true).unwrap_or(false)
    }

    /// Forgets all identities of `account` that are not in flight, and says how many. Walks the
    /// whole store, a bucket at a time.
    pub fn forget_account(&self, account: impl AsRef<[u8]>) -> usize {
        self.engine().forget_account(account.as_ref())
    }

    /// Reaps what has ended by now, in bounded steps, and judges lapsed leases. With
    /// [`Sweep::Thread`] it need not be called.
    pub fn sweep(&self) -> Swept {
        let engine = self.engine();
        let mut swept = Swept { reaped: 0 };
        loop {
            let step = engine.sweep_step();
            swept.reaped += step.reaped;
            if !step.more {
                while engine.trim() {}
                return swept;
            }
        }
    }

    /// Reads the gauges and counters.
    pub fn stats(&self) -> Stats {
        self.engine().stats()
    }

    /// Ends the taking in of new claims, for a shutdown: they get [`ClaimError::Draining`] from
    /// now on. Replays, waiting and hand-overs go on. The answer can be awaited or waited for;
    /// dropping it does not reopen the store.
    pub fn drain(&self) -> Drain {
        self.engine().drain();
        Drain { engine: Arc::clone(self.hold().engine()), listed: None }
    }

    /// How long an outcome is kept.
    pub fn retention(&self) -> Duration {
        let settings = &self.engine().settings;
        settings.retention.since(settings.lag)
    }

    /// How long an owner without a sign of life keeps its claim.
    pub fn lease(&self) -> Duration {
        let settings = &self.engine().settings;
        settings.lease.since(settings.lag)
    }

    /// For how long an attended claim counts as renewed.
    #[cfg(feature = "tier")]
    pub(crate) fn max_run(&self) -> Duration {
        let settings = &self.engine().settings;
        settings.max_run.since(settings.lag)
    }

    #[cfg(feature = "tier")]
    pub(crate) fn on_abandon(&self) -> Abandon {
        self.engine().settings.on_abandon
    }

    /// Lets completed records leave memory when room is needed, because a tier has them (R25).
    #[cfg(feature = "tier")]
    pub(crate) fn evict_when_full(&self) {
        self.engine().evict_when_full();
    }

    /// Counts a run whose completion met another run's (R9).
    #[cfg(any(feature = "http", feature = "worker"))]
    pub(crate) fn note_double_run(&self) {
        self.hold().lane().counters.double_runs.up();
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("engine", self.engine()).finish()
    }
}

/// Why [`Store::claim_admitted`] claimed nothing.
#[cfg(feature = "http")]
#[derive(Debug)]
pub(crate) enum NotClaimed<R> {
    /// As the caller's own function said.
    Refused(R),
    Error(ClaimError),
}

/// What [`Store::look_up`] tells of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// What became of the claim.
    pub state: EntryState,
    /// The time since the present owner won, while in flight; else since completion or hold.
    pub age: Duration,
    /// The time until the lease lapses, while in flight; else until the record ends.
    pub remaining: Duration,
    /// The fencing token of the claim.
    pub token: Token,
    /// How many wait for the owner.
    pub waiters: usize,
}

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryState {
    /// An owner runs.
    InFlight,
    /// Nobody knows whether the work was done.
    Held,
    /// There is an outcome.
    Completed,
    /// Finished, but the answer was not kept.
    NotKept,
}

/// How an operator settles a held identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The work was done, and this is its outcome.
    Complete(Outcome),
    /// The work was not done: the next caller runs.
    Release,
}

/// What [`Store::sweep`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Records taken out.
    pub reaped: usize,
}

/// The end of a drain: ready when nothing is in flight. See [`Store::drain`].
///
/// ```
/// # let store = oncekey::Store::builder().build()?;
/// let drained = store.drain().wait_timeout(std::time::Duration::from_secs(30));
/// assert!(drained, "nothing was in flight");
/// # Ok::<(), oncekey::ConfigError>(())
/// ```
#[must_use = "the drain goes on, but nobody waits for its end"]
pub struct Drain {
    engine: Arc<Engine>,
    listed: Option<u64>,
}

impl Drain {
    /// Waits as a thread, at most `limit`. True if nothing is in flight.
    pub fn wait_timeout(mut self, limit: Duration) -> bool {
        claim::block_on(&mut self, limit).is_some()
    }
}

impl Future for Drain {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { engine, listed } = &mut *self;
        if engine.is_drained(listed, cx.waker()) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        if let Some(number) = self.listed {
            self.engine.leave_drain(number);
        }
    }
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("in_flight", &self.engine.stats().in_flight).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "this is a test")]

    use super::*;
    use crate::clock::ManualClock;

    const LEASE: Duration = Duration::from_secs(60);

    /// Whether the sweep's thread would sleep until a claim wakes it.
    fn would_sleep(store: &Store) -> bool {
        let background = Background(Arc::downgrade(store.hold().engine()));
        matches!(background.sweep(|_| {}), Some(None))
    }

    fn store() -> (Store, ManualClock) {
        let clock = ManualClock::new();
        let builder = Store::builder().lease(LEASE).sweep(Sweep::Manual).clock(clock.clone());
        (builder.build().unwrap(), clock)
    }

    fn win(store: &Store, key: &str) -> crate::Permit {
        let id = Identity::new("acct", "POST /charges", key).unwrap();
        match store.claim(&id, Fingerprint::request("POST", "/charges", b"")) {
            Ok(Claim::Won(permit)) => permit,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn r26_the_sweep_does_not_fall_asleep_over_what_was_released() {
        let (store, clock) = store();
        // Few: no table grows, and none is moved when it is empty again.
        let permits: Vec<_> = (0..50).map(|n| win(&store, &n.to_string())).collect();
        permits.into_iter().for_each(|permit| permit.release().unwrap());
        assert_eq!(store.stats().keys, 0);
        assert!(!would_sleep(&store), "cells are still left in their slots");
        clock.advance(LEASE);
        assert!(would_sleep(&store), "once they are due, one sweep gives all back");
    }

    #[test]
    fn r26_the_sweep_does_not_fall_asleep_over_what_a_reader_held_back() {
        let (store, clock) = store();
        for n in 0..1_000 {
            win(&store, &n.to_string()).complete(Outcome::new(200)).unwrap();
        }
        clock.advance(store.retention() + LEASE);
        let reader = store.engine().pin();
        assert!(!would_sleep(&store), "somebody still looks at what is to be freed");
        assert_eq!(store.stats().keys, 0);
        drop(reader);
        assert!(would_sleep(&store));
    }

    #[test]
    fn r25_a_gauge_that_is_read_while_claims_come_and_go_is_never_absurd() {
        let (store, _) = store();
        // As a reader sees it that was in the first lane before a claim came there, and in the
        // last when it was taken off: by its heir, or by who forgot it.
        let lane = store.engine().lane(store.engine().lanes() - 1);
        lane.in_flight.fetch_sub(1, crate::sync::Ordering::SeqCst);
        assert_eq!(store.stats().in_flight, 0);
    }

    /// How many slots of the index are looked at to find all of `keys`, which are put in first.
    fn probes(keys: &[String]) -> usize {
        let (store, _) = store();
        for key in keys {
            win(&store, key).complete(Outcome::new(200)).unwrap();
        }
        let engine = store.engine();
        let looked_at = |key: &String| {
            let id = Identity::new("acct", "POST /charges", key).unwrap();
            engine.probes(&id.frame())
        };
        keys.iter().map(looked_at).sum()
    }

    /// An attacker has prepared keys whose hashes agree in their first bits, where the shards and
    /// buckets are chosen, by the very hash that the index uses. It is another one in each process.
    #[test]
    fn r27_prepared_keys_are_looked_for_no_longer_than_others() {
        const KEYS: usize = 100_000;
        let theirs = ahash::RandomState::with_seeds(1, 2, 3, 4);
        let prepared = |n: &u64| {
            let key = n.to_string();
            let id = Identity::new("acct", "POST /charges", &key).unwrap();
            crate::index::hash_of(&theirs, &id) >> (64 - 6) == 0
        };
        let name = |n: u64| n.to_string();
        let prepared: Vec<_> = (0..).filter(prepared).take(KEYS).map(name).collect();
        let random: Vec<_> = (0..KEYS as u64).map(name).collect();
        let (prepared, random) = (probes(&prepared), probes(&random));
        assert!(prepared <= 3 * random, "{prepared} probes, {random} for other keys");
        assert!(random <= 12 * KEYS, "{random} probes for {KEYS} keys");
    }
}
