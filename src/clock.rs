//! Time as the store sees it: monotonic, in milliseconds since the store was built (R23).
//!
//! Ground rules: this is the only file that asks the operating system for the time. Everything else
//! takes [`Millis`] as an argument or asks the store's [`Clock`].

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::sync::{Arc, AtomicU64, Ordering};

/// A monotonic clock. Only differences between two readings are used.
///
/// A clock that steps backwards stops time until it has caught up; it never panics the store.
///
/// ```
/// use oncekey::{Clock, ManualClock};
/// use std::time::Duration;
///
/// let clock = ManualClock::new();
/// clock.advance(Duration::from_secs(5));
/// assert_eq!(clock.now(), Duration::from_secs(5));
/// ```
pub trait Clock: Send + Sync + 'static {
    /// The time since an origin of the clock's own choice, which must not change.
    fn now(&self) -> Duration;

    /// By how much a reading, cut to whole milliseconds, may be behind the time. A store makes its
    /// leases and retentions longer by as much, so that none is cut short (R22). Asked once, when
    /// the store is built; default zero.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }
}

/// The wall clock, in microseconds since 1970: for numbers that follow each other from one process
/// to the next, never for the end of a record in memory (R23).
#[cfg(feature = "tier")]
pub(crate) fn wall_micros() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// The operating system's monotonic clock. It does not follow steps of the wall clock.
///
/// On Linux it is `CLOCK_MONOTONIC_COARSE`, which stands still while the machine is suspended: a
/// reading is up to a tick of the kernel behind (1 to 10 ms), and costs a seventh of a precise one.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// Whether all processes of the machine read the same time, until it is started anew.
    #[cfg(feature = "sqlite")]
    pub(crate) const IS_SHARED: bool = cfg!(target_os = "linux");

    /// A clock whose origin is now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        coarse::now().unwrap_or_else(|| self.origin.elapsed())
    }

    fn lag(&self) -> Duration {
        coarse::lag() + Duration::from_millis(1)
    }
}

#[cfg(target_os = "linux")]
mod coarse {
    use std::time::Duration;

    use nix::time::{ClockId, clock_getres, clock_gettime};

    const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC_COARSE;

    /// The time since the machine was started. No kernel that Rust runs on lacks it, so all
    /// readings of a process are of this clock or none is.
    pub(super) fn now() -> Option<Duration> {
        clock_gettime(CLOCK).ok().map(Duration::from)
    }

    pub(super) fn lag() -> Duration {
        clock_getres(CLOCK).map_or(Duration::ZERO, Duration::from)
    }
}

#[cfg(not(target_os = "linux"))]
mod coarse {
    use std::time::Duration;

    pub(super) fn now() -> Option<Duration> {
        None
    }

    pub(super) fn lag() -> Duration {
        Duration::ZERO
    }
}

/// The time since 1970 by the wall clock, zero before. It steps when it is set: only a durable tier
/// asks for it, once at its opening.
#[cfg(any(feature = "embedded", feature = "sqlite"))]
pub(crate) fn wall() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// Measures real time for a thread that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer(Instant);

impl Timer {
    /// It shows zero now.
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// A clock for tests that moves only when it is told to. Clones share one time.
///
/// Use it together with [`Sweep::Manual`](crate::Sweep::Manual) and
/// [`Store::sweep`](crate::Store::sweep): the background sweep looks at a clock at most once a tick
/// of real time.
#[derive(Clone, Default)]
pub struct ManualClock {
    millis: Arc<AtomicU64>,
}

impl ManualClock {
    /// A clock that shows zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the clock forward. Parts of a millisecond are rounded up; the clock stops at its
    /// end (584 million years) instead of wrapping.
    pub fn advance(&self, by: Duration) {
        let by = Millis::rounding_up(by).0;
        // The closure always answers Some, so there is no failure to handle.
        let _ = self
            .millis
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(now.saturating_add(by)));
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.millis.load(Ordering::Acquire))
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}

/// A point in time: whole milliseconds since the store was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Millis(pub(crate) u64);

impl Millis {
    /// The last point in time a state word can hold (59 bits, 18 million years).
    pub(crate) const MAX: Self = Self((1 << 59) - 1);

    /// The start of the millisecond that `elapsed` lies in.
    pub(crate) fn at(elapsed: Duration) -> Self {
        // By parts: a division of 128 bits costs more than all the rest.
        let seconds = elapsed.as_secs().saturating_mul(1_000);
        Self(seconds.saturating_add(elapsed.subsec_millis().into())).min(Self::MAX)
    }

    /// `span` as a number of milliseconds, never shorter than it.
    pub(crate) fn rounding_up(span: Duration) -> Self {
        let whole = span.as_nanos().div_ceil(1_000_000);
        Self(u64::try_from(whole).unwrap_or(u64::MAX)).min(Self::MAX)
    }

    /// This much later, at most [`Millis::MAX`].
    pub(crate) fn plus(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0)).min(Self::MAX)
    }

    /// The time since `earlier`, zero if that lies ahead.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r23_no_span_wraps_or_rounds_down_to_nothing() {
        assert_eq!(Millis::rounding_up(Duration::from_nanos(1)), Millis(1));
        assert_eq!(Millis::rounding_up(Duration::from_millis(7)), Millis(7));
        assert_eq!(Millis::rounding_up(Duration::MAX), Millis::MAX);
        assert_eq!(Millis(5).plus(Millis::MAX), Millis::MAX);
        assert_eq!(Millis(5).since(Millis(9)), Duration::ZERO);
        let clock = ManualClock::new();
        clock.advance(Duration::MAX);
        clock.advance(Duration::MAX);
        assert_eq!(Millis::at(clock.now()), Millis::MAX);
    }
}
