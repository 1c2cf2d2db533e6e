//! The tier's time (R23).

use std::time::Duration;

use crate::{
    Clock, SystemClock,
    clock::wall,
    sync::{AtomicU64, Ordering},
    tier::record::millis,
};

/// Milliseconds since 1970, or of the injected clock: monotonic, and never before the last stamp.
pub(super) struct Time {
    clock: Box<dyn Clock>,
    /// The clock's reading at the opening.
    origin: Duration,
    /// The time at the opening.
    base: u64,
    /// The latest time that was told.
    last: AtomicU64,
}

impl Time {
    pub(super) fn new(injected: Option<Box<dyn Clock>>, last_stamp: u64) -> Self {
        let (clock, base): (Box<dyn Clock>, _) = match injected {
            Some(clock) => {
                let now = clock.now();
                (clock, now)
            }
            None => (Box::new(SystemClock::new()), wall()),
        };
        let (origin, base) = (clock.now(), millis(base).max(last_stamp));
        Self { clock, origin, base, last: AtomicU64::new(base) }
    }

    pub(super) fn now(&self) -> u64 {
        let elapsed = self.clock.now().saturating_sub(self.origin);
        let now = self.base.saturating_add(millis(elapsed));
        // Relaxed: the number says all there is to know.
        self.last.fetch_max(now, Ordering::Relaxed).max(now)
    }

    pub(super) fn lag(&self) -> Duration {
        self.clock.lag()
    }
}
