//! What all connections of one tier stand on: its time and who lives.

use std::{io, time::Duration};

use super::owners::Owners;
use crate::{
    Clock,
    tier::record::{Now, Record, millis},
};

pub(super) struct Ground {
    pub(super) time: Time,
    pub(super) owners: Owners,
}

impl Ground {
    /// Shows that `owner` is alive for `lease` from now on.
    pub(super) fn beat(&self, owner: u64, lease: Duration) -> io::Result<()> {
        self.owners.beat(owner, self.time.ahead().saturating_add(millis(lease)))
    }

    /// The present moment, for a record of this owner.
    pub(super) fn at(&self, owner: u64) -> io::Result<Now> {
        Ok(Now { now: self.time.now(), alive_until: self.owners.alive_until(owner)? })
    }

    /// Whether there is something for a caller to see.
    pub(super) fn living(&self, record: Option<Record>) -> Option<Record> {
        record.filter(|record| !record.is_over(self.time.now()))
    }
}

/// Milliseconds since about 1970, monotonic (R23): how far the clock has come, from an origin on that
/// all who have the tier open share.
pub(super) struct Time {
    clock: Box<dyn Clock>,
    origin: u64,
}

impl Time {
    pub(super) fn new(clock: Box<dyn Clock>, origin: u64) -> Self {
        Self { clock, origin }
    }

    /// The origin with which `clock` shows `start` now.
    pub(super) fn origin(clock: &dyn Clock, start: u64) -> u64 {
        start.saturating_sub(whole_millis(clock))
    }

    /// What deadlines are compared with: at most by [`Clock::lag`] behind.
    pub(super) fn now(&self) -> u64 {
        self.origin.saturating_add(whole_millis(&*self.clock))
    }

    /// What deadlines count from: not behind, so that none comes early (R22).
    pub(super) fn ahead(&self) -> u64 {
        self.now().saturating_add(millis(self.clock.lag()))
    }
}

/// Cut, so that nothing is over before its time.
pub(super) fn whole_millis(clock: &dyn Clock) -> u64 {
    u64::try_from(clock.now().as_millis()).unwrap_or(u64::MAX)
}
