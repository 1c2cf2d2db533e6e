//! What the tests share: a watchdog, stores on a clock moved by hand, tasks polled by hand.
//!
//! Nothing here waits for time to pass: a test waits for an event, and the watchdog ends the
//! process if the event never comes.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    future::Future,
    io::Write as _,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

use oncekey::{
    Claim, ClaimError, Fingerprint, Identity, ManualClock, Outcome, Pending, Permit, Scheme,
    Settled, Store, StoreBuilder, Sweep, Wait,
};

pub const MS: Duration = Duration::from_millis(1);
pub const SECOND: Duration = Duration::from_secs(1);
pub const HOUR: Duration = Duration::from_secs(60 * 60);
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The default lease.
pub const LEASE: Duration = Duration::from_secs(60);
/// A limit that no test reaches: the watchdog comes first.
pub const LONG: Duration = Duration::from_secs(3_600);

/// Ends the process with a message if the test has not dropped it within four minutes, which is a
/// multiple of what the longest takes, because a machine may be busy with others: a wake-up that
/// was lost is a failure, not a job that hangs.
#[must_use = "the watchdog watches as long as it lives"]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

pub fn watchdog() -> Watchdog {
    watchdog_of(Duration::from_secs(240))
}

/// A watchdog for a test that has much to do.
pub fn watchdog_of(limit: Duration) -> Watchdog {
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let (alive, dropped) = mpsc::channel();
    thread::spawn(move || {
        if dropped.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            // Past the capture of the test harness, which dies with the process.
            let _ = writeln!(std::io::stderr(), "watchdog: {test} still runs after {limit:?}");
            std::process::abort();
        }
    });
    Watchdog { _alive: alive }
}

/// Returns when `event` has happened. Under a watchdog only.
pub fn until(event: impl Fn() -> bool) {
    while !event() {
        thread::sleep(MS);
    }
}

/// A store at its defaults on a clock moved by hand, swept by hand.
pub fn by_hand() -> (Store, ManualClock) {
    by_hand_with(|builder| builder)
}

/// As [`by_hand`], with settings.
pub fn by_hand_with(set: impl FnOnce(StoreBuilder) -> StoreBuilder) -> (Store, ManualClock) {
    let clock = ManualClock::new();
    let builder = Store::builder().clock(clock.clone()).sweep(Sweep::Manual);
    (set(builder).build().unwrap(), clock)
}

/// The identity that `key` names for the tests' one account and endpoint.
pub fn id(key: &str) -> Identity<'_> {
    Identity::new("acct", "POST /charges", key).unwrap()
}

pub fn fp(body: &str) -> Fingerprint {
    Fingerprint::request("POST", "/charges", body.as_bytes())
}

/// Some fingerprint, always the same, for tests with very many claims: a hash costs more than all
/// the rest of a claim.
pub fn same() -> Fingerprint {
    Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32])
}

pub fn outcome(body: &str) -> Outcome {
    Outcome::new(201).header("location", "/charges/1").body(body.to_owned())
}

/// The answer to a claim that must be this one.
pub trait MustBe {
    fn won(self) -> Permit;
    fn pending(self) -> Pending;
    fn replayed(self) -> Outcome;
}

impl MustBe for Result<Claim, ClaimError> {
    #[track_caller]
    fn won(self) -> Permit {
        match self {
            Ok(Claim::Won(permit)) => permit,
            other => panic!("not won: {other:?}"),
        }
    }

    #[track_caller]
    fn pending(self) -> Pending {
        match self {
            Ok(Claim::InFlight(pending)) => pending,
            other => panic!("not in flight: {other:?}"),
        }
    }

    #[track_caller]
    fn replayed(self) -> Outcome {
        match self {
            Ok(Claim::Replay(replay)) => replay.into_outcome(),
            other => panic!("no replay: {other:?}"),
        }
    }
}

/// The end of a wait that must be this one.
pub trait MustEnd {
    fn completed(self) -> Outcome;
    fn yours(self) -> Permit;
}

impl MustEnd for Settled {
    #[track_caller]
    fn completed(self) -> Outcome {
        match self {
            Settled::Completed(replay) => replay.into_outcome(),
            other => panic!("not completed: {other:?}"),
        }
    }

    #[track_caller]
    fn yours(self) -> Permit {
        match self {
            Settled::Yours(permit) => permit,
            other => panic!("not the next owner: {other:?}"),
        }
    }
}

impl MustEnd for Option<Settled> {
    #[track_caller]
    fn completed(self) -> Outcome {
        self.expect("still waits").completed()
    }

    #[track_caller]
    fn yours(self) -> Permit {
        self.expect("still waits").yours()
    }
}

/// A waker that counts.
#[derive(Default)]
pub struct Bell {
    rung: AtomicUsize,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.fetch_add(1, Ordering::SeqCst);
    }
}

/// A task that waits for an owner and is polled by hand.
pub struct Task {
    pub wait: Wait,
    bell: Arc<Bell>,
}

impl Task {
    /// Not listed before its first poll.
    pub fn new(pending: Pending) -> Self {
        Self { wait: pending.wait(), bell: Arc::default() }
    }

    /// A task that has taken its seat.
    #[track_caller]
    pub fn listed(pending: Pending) -> Self {
        let mut task = Self::new(pending);
        let early = task.poll();
        assert!(early.is_none(), "settled at once: {early:?}");
        task
    }

    pub fn poll(&mut self) -> Option<Settled> {
        let waker = Waker::from(Arc::clone(&self.bell));
        match Pin::new(&mut self.wait).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(settled) => Some(settled),
            Poll::Pending => None,
        }
    }

    /// How often the task was woken so far.
    pub fn wakes(&self) -> usize {
        self.bell.rung.load(Ordering::SeqCst)
    }
}

/// Runs a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Numbers for a stress run: the same for the same seed, so that a failure can be looked at.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(1))
    }

    /// A number below `sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        // Knuth's MMIX generator; the low bits are its weak ones.
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}
