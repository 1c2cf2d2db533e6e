//! The state word of a record: one word in which lapse, completion, release and the
//! registration of a waiter compete, so that exactly one of them wins.
//!
//! ```text
//!  63                                   5    4       3         2      0
//! | at: milliseconds since the store  59 | unused | waiters 1 | kind 3 |
//!
//!               hand-over
//!               +--------+
//!               v        |
//!  claim --> InFlight ---+--> Completed (end)      final
//!               |   |             ^   NotKept (end) final
//!        lapse, |   | release,    | late completion
//!        hold,  |   |             |
//!        drop   v   v             |
//!             Held --+--> Ended   |                final
//!               +-----------------+
//! ```
//!
//! `at` is the lease's deadline while in flight, else the end of the record.

use super::clock::Millis;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An owner runs; `at` is the deadline of its lease.
    InFlight,
    /// Nobody knows whether the work was done; `at` is the end of the hold.
    Held,
    /// Finished, with an outcome; `at` is its end.
    Completed,
    /// Finished, but the answer was not kept; `at` is its end.
    NotKept,
    /// Released or past its end: the next claim takes its place.
    Ended,
}

/// What a record is at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// In flight, the lease runs.
    InFlight,
    /// In flight, but the lease has lapsed and nobody has judged it yet.
    Lapsed,
    /// Outcome unknown.
    Held,
    /// An outcome is there.
    Completed,
    /// Finished without an outcome.
    NotKept,
    /// Ended, or past its end: as if it were not there.
    Gone,
}

/// A state word. See the drawing at the head of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

const KIND_BITS: u32 = 3;
const WAITERS: u64 = 1 << KIND_BITS;
const AT_SHIFT: u32 = KIND_BITS + 2;

const _: () = assert!(Millis::MAX.0 << AT_SHIFT >> AT_SHIFT == Millis::MAX.0);

impl Word {
    /// A word without waiters, not attended.
    pub(crate) fn new(kind: Kind, at: Millis) -> Self {
        Self(at.min(Millis::MAX).0 << AT_SHIFT | kind as u64)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn kind(self) -> Kind {
        match self.0 & ((1 << KIND_BITS) - 1) {
            0 => Kind::InFlight,
            1 => Kind::Held,
            2 => Kind::Completed,
            3 => Kind::NotKept,
            _ => Kind::Ended,
        }
    }

    pub(crate) fn at(self) -> Millis {
        Millis(self.0 >> AT_SHIFT)
    }

    /// Whether somebody may be in the waiters' list. Set under the list's lock only.
    pub(crate) fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    pub(crate) fn with_waiters(self) -> Self {
        Self(self.0 | WAITERS)
    }

    /// Ended at the same time, no bits.
    pub(crate) fn ended(self) -> Self {
        Self::new(Kind::Ended, self.at())
    }

    /// What the record is at `now`. At its deadline a lease has lapsed and a record has ended.
    pub(crate) fn view(self, now: Millis) -> View {
        let past = now >= self.at();
        match (self.kind(), past) {
            (Kind::InFlight, false) => View::InFlight,
            (Kind::InFlight, true) => View::Lapsed,
            (Kind::Held, false) => View::Held,
            (Kind::Completed, false) => View::Completed,
            (Kind::NotKept, false) => View::NotKept,
            (Kind::Held | Kind::Completed | Kind::NotKept, true) | (Kind::Ended, _) => View::Gone,
        }
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Word")
            .field("kind", &self.kind())
            .field("at", &self.at())
            .field("waiters", &self.has_waiters())
            .finish()
    }
}
