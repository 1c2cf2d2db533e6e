//! Whether the tier is worth asking: after some failures in a row it is left alone for a while, and
//! callers are told at once for how long (T2).
//!
//! Ground rules: the heartbeat asks in spite of it and closes it again, so an outage costs one call
//! a second and not one for each request.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::TierError;

/// So many failures in a row open it.
const FAILURES: u32 = 3;

/// How long it stays open at first, and at most.
const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(8);

#[derive(Debug, Default)]
pub(crate) struct Circuit(Mutex<Failing>);

#[derive(Debug, Default)]
struct Failing {
    /// In a row.
    failures: u32,
    until: Option<Instant>,
}

impl Circuit {
    /// An error while it is open.
    pub(crate) fn check(&self) -> Result<(), TierError> {
        if self.is_open() {
            return Err(TierError::unavailable("it has failed several times and is left alone"));
        }
        Ok(())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().until.is_some_and(|until| Instant::now() < until)
    }

    pub(crate) fn answered(&self) {
        *self.0.lock() = Failing::default();
    }

    pub(crate) fn failed(&self) {
        let mut failing = self.0.lock();
        failing.failures = failing.failures.saturating_add(1);
        if let Some(times) = failing.failures.checked_sub(FAILURES) {
            let pause = SHORTEST.saturating_mul(1 << times.min(8)).min(LONGEST);
            failing.until = Some(Instant::now() + pause);
        }
    }

    /// When to try again: the time until it closes, at least a second.
    pub(crate) fn retry_after(&self) -> Duration {
        let until = self.0.lock().until;
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        left.unwrap_or_default().max(Duration::from_secs(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn t2_a_tier_that_fails_is_left_alone_and_asked_again() {
        let circuit = Circuit::default();
        circuit.failed();
        circuit.failed();
        assert!(circuit.check().is_ok());
        circuit.failed();
        assert!(circuit.check().is_err());
        assert_eq!(circuit.retry_after(), Duration::from_secs(1));
        tokio::time::advance(SHORTEST).await;
        assert!(circuit.check().is_ok(), "one may try");
        for _ in 0..100 {
            circuit.failed();
        }
        assert_eq!(circuit.retry_after(), LONGEST);
        circuit.answered();
        assert!(circuit.check().is_ok());
    }
}
