//! The errors of the store's verbs: small, one for each verb, and what was handed in comes back.

use std::{fmt, time::Duration};

use crate::outcome::Outcome;

/// A setting that [`StoreBuilder::build`](crate::StoreBuilder::build) cannot accept. It names the
/// setting and its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A duration of zero, which could mean "none" or "for ever" (R8, R23).
    ZeroDuration {
        /// The builder's method.
        setting: &'static str,
    },
    /// A number below its smallest sensible value.
    TooSmall {
        /// The builder's method.
        setting: &'static str,
        /// The smallest value that is accepted.
        at_least: usize,
        /// What was set.
        found: usize,
    },
    /// The thread of the background sweep could not be started.
    NoThread {
        /// What the operating system said.
        kind: std::io::ErrorKind,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroDuration { setting } => {
                write!(f, "`{setting}` is zero; set a duration of at least one millisecond")
            }
            Self::TooSmall { setting, at_least, found } => {
                write!(f, "`{setting}` is {found}; set at least {at_least}")
            }
            Self::NoThread { kind } => write!(
                f,
                "the thread of the background sweep could not be started ({kind}); \
                 use `Sweep::Manual` and call `Store::sweep` yourself"
            ),
        }
    }
}

impl std::error::Error for ConfigError {}

/// Why a new identity could not be claimed. Nothing was claimed and nothing must run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimError {
    /// The store's count or byte limit is reached (R25).
    Full {
        /// When room may be free again: the time until the next record may end, 1 to 60 s.
        retry_after: Duration,
    },
    /// The account holds as many keys as its share allows (R25).
    AccountFull {
        /// When to try again, 1 to 60 s.
        retry_after: Duration,
    },
    /// [`Store::drain`](crate::Store::drain) was called: the store takes no new claims.
    Draining,
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { retry_after } => write!(
                f,
                "the store is full; try again in {} s, or raise `max_keys` or `max_bytes`",
                retry_after.as_secs()
            ),
            Self::AccountFull { retry_after } => write!(
                f,
                "the account holds all keys of its share; try again in {} s, or raise \
                 `max_keys_per_account`",
                retry_after.as_secs()
            ),
            Self::Draining => f.write_str("the store is draining and takes no new claims"),
        }
    }
}

impl std::error::Error for ClaimError {}

/// The token was stale: the call changed nothing (R9). An outcome that was handed in comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    pub(crate) cause: LostCause,
    pub(crate) outcome: Option<Outcome>,
}

/// What a stale token met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostCause {
    /// The identity is completed already: the first completion won.
    Completed,
    /// The lease lapsed and the identity is held. It can no longer be renewed, but completing or
    /// releasing it still settles it.
    Held,
    /// The claim is over: taken over, forgotten or resolved by an operator, or past its end.
    Ended,
}

impl Lost {
    /// What the stale token met.
    pub fn cause(&self) -> LostCause {
        self.cause
    }

    /// The outcome that was not stored, if one was handed in.
    pub fn into_outcome(self) -> Option<Outcome> {
        self.outcome
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.cause {
            LostCause::Completed => "lost: the identity is completed already",
            LostCause::Held => "lost: the lease lapsed and the identity is held",
            LostCause::Ended => "lost: the claim was taken over, forgotten, resolved or has ended",
        })
    }
}

impl std::error::Error for Lost {}

/// Why [`Store::resolve`](crate::Store::resolve) changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResolveError {
    /// There is no record of that identity.
    Absent,
    /// An owner still runs, and its lease has not lapsed.
    InFlight,
    /// The identity is completed already; its outcome stays.
    Completed,
    /// The store has no room for the outcome, which comes back.
    Full(Outcome),
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "nothing to resolve: the identity is unknown",
            Self::InFlight => "an owner still runs; wait for it or forget the identity by force",
            Self::Completed => "the identity is completed already",
            Self::Full(_) => "the store has no room for the outcome",
        })
    }
}

impl std::error::Error for ResolveError {}

/// The identity is in flight: [`Store::forget`](crate::Store::forget) left it alone (R26).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the identity is in flight; `forget_forced` forgets it all the same")
    }
}

impl std::error::Error for Busy {}
