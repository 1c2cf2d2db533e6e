//! Time in whole milliseconds since the store was built.

use std::time::Duration;

/// A point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Millis(pub(crate) u64);

impl Millis {
    /// The last point in time a state word can hold (59 bits, 18 million years).
    pub(crate) const MAX: Self = Self((1 << 59) - 1);

    pub(crate) fn of(span: Duration) -> Self {
        Self(u64::try_from(span.as_millis()).unwrap_or(u64::MAX)).min(Self::MAX)
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
