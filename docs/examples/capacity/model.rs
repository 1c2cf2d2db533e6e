//! What a load takes: sums, with the constants that `tests/capacity.rs` holds against real stores.

use std::time::Duration;

/// What comes in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// New keys a second, at the peak.
    pub(crate) rate: f64,
    /// How long an outcome is kept.
    pub(crate) retention: Duration,
    /// Bytes of account, endpoint and key together.
    pub(crate) identity: f64,
    /// Bytes of an answer's header lines.
    pub(crate) head: f64,
    /// Bytes of an answer's body.
    pub(crate) body: f64,
    /// How long the work takes.
    pub(crate) handler: Duration,
}

/// Where records are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Embedded,
    Sqlite,
    Postgres,
    Redis,
}

impl Tier {
    pub(crate) const ALL: [Self; 4] = [Self::Embedded, Self::Sqlite, Self::Postgres, Self::Redis];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Redis => "redis",
        }
    }

    /// Bytes of one completed record: on disk, in Redis in memory.
    pub(crate) fn row(self, load: &Load) -> f64 {
        let answer = load.head + load.body;
        match self {
            // Written at the claim and at the completion, until tables are merged; dropped at the
            // latest half a life after the end.
            Self::Embedded => 1.5 * 1.2 * (load.identity + 100.0 + answer),
            // In the row and in the unique index; what is long lies in pages of its own.
            Self::Sqlite => 2.0 * load.identity + 240.0 + 1.3 * answer,
            // The same, the index on the end, and the dead row of the claim until it is vacuumed.
            Self::Postgres => 2.0 * load.identity + 450.0 + 1.4 * answer,
            // As the allocator rounds it up.
            Self::Redis => load.identity + 930.0 + 1.2 * answer,
        }
    }

    /// Bytes that are there with no record.
    pub(crate) fn fixed(self) -> f64 {
        match self {
            Self::Embedded => f64::from(320 << 20), // journals
            _ => 0.0,
        }
    }
}

impl Load {
    /// Keys that are kept at a time.
    pub(crate) fn kept(&self) -> f64 {
        self.rate * self.retention.as_secs_f64()
    }

    /// Keys in flight at a time.
    pub(crate) fn in_flight(&self) -> f64 {
        self.rate * self.handler.as_secs_f64()
    }

    /// Bytes in memory of one kept key, as `max_bytes` counts them.
    pub(crate) fn key(&self) -> f64 {
        let buffer = |bytes: f64| if bytes == 0.0 { 0.0 } else { 64.0 + bytes };
        232.0 + 9.0 / 8.0 * (self.identity + 3.0) + buffer(self.head) + buffer(self.body)
    }

    /// Bytes in memory of one key in flight: `outcome_reserve` at its default.
    pub(crate) fn claim(&self) -> f64 {
        232.0 + 9.0 / 8.0 * (self.identity + 3.0) + 4096.0
    }

    /// What `max_keys` must be at least.
    pub(crate) fn max_keys(&self) -> f64 {
        self.kept() + self.in_flight()
    }

    /// What `max_bytes` must be at least.
    pub(crate) fn max_bytes(&self) -> f64 {
        self.kept() * self.key() + self.in_flight() * self.claim()
    }
}
