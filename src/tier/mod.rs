//! Memory that outlives the process: what a durable store behind the memory promises.
//!
//! A [`Tier`] keeps records by identity. [`Tiered`] puts a [`Store`](crate::Store) in front of one:
//! the memory answers what it knows, one local owner asks the tier for the rest, however many
//! duplicates wait, and nothing runs before its claim is in the tier.
//!
#![doc = include_str!("../../docs/drawings/tier.svg")]
//!
//! ```text
//! absent --claim--> in flight --complete--> completed or not kept --expiry--> absent
//!                    |  |  ^                 ^
//!                    |  |  '--take_over------|--- lapsed: the owner's heartbeat has ended
//!                    |  '--hold--> held -----'
//!                    |--lapse--> lapsed      for the next owner, as if this one had died
//!                    '--release--> absent
//! ```
//!
//! # What a tier owes its callers
//!
//! Each verb of the trait is one atomic step: it happens whole or not at all, whenever its future
//! is dropped and wherever the process dies (T3). Beyond that:
//!
//! 1. Identities are equal if account, endpoint and key are equal byte for byte (R1).
//! 2. [`claim`](Tier::claim) of an absent or expired identity makes exactly one caller the owner.
//!    Otherwise it changes nothing and tells what is there; it never answers "nothing": a claim
//!    that lost against one that has vanished since claims again (T4).
//! 3. A claim whose token is the one that is in flight there has been answered before: it is
//!    [`Claimed::Won`] again. So a claim whose answer was lost can be repeated.
//! 4. [`take_over`](Tier::take_over) succeeds only if the very token that was seen is still there
//!    and is [`State::Lapsed`] or [`State::Held`] at this moment; among any number of callers
//!    exactly one (R10).
//! 5. [`complete`](Tier::complete), [`release`](Tier::release), [`hold`](Tier::hold),
//!    [`lapse`](Tier::lapse) and [`checkpoint`](Tier::checkpoint) act if the record carries their
//!    token and is in flight, lapsed or held; else they change nothing and are [`Landed::Lost`]
//!    (R9). A lapsed heartbeat alone makes no token stale; a lapse by its own token does. A
//!    completion by the token that has completed the record already is [`Landed::Done`] and changes
//!    nothing: so one whose answer was lost can be repeated.
//! 6. They wait for a transaction that has the record in its hands, instead of reading past it, at
//!    most for a stated time (T6).
//! 7. Every record has an end of life from its first write on (T3): one that is in flight ends
//!    `max_run` + `retention` after its claim, one that is completed or held `retention` after that
//!    step. What has ended is absent to every verb, at once. [`reap`](Tier::reap) only gives its
//!    room back.
//! 8. Time is the tier's own (R23), and it is read within the step, not when a transaction began.
//! 9. A record in flight refers to its owner. It is [`State::InFlight`] while the owner's heartbeat
//!    lasts and its `max_run` is not over; [`State::Lapsed`] when the heartbeat has ended; and
//!    [`State::Held`] when `max_run` is over and the owner still beats (R8, T10).
//! 10. A heartbeat that comes late revives all of its owner's claims that nobody took over. A claim
//!     by an owner that does not beat is refused ([`TierError::OwnerLapsed`]) and leaves nothing.
//! 11. An acknowledged step is there after a crash of the process, and after a loss of power unless
//!     a setting says otherwise (T2, T7). A tier that cannot promise that is not opened.
//! 12. Bytes come back as they went in: fingerprint, status, header lines, body, checkpoint (R16).
//! 13. What was forgotten or resolved is told to all that ask for it
//!     ([`recalls`](Tier::recalls)) for at least a minute (T9).

mod circuit;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(any(feature = "embedded", feature = "postgres", feature = "sqlite"))]
mod durability;
#[cfg(feature = "embedded")]
mod embedded;
mod memory;
pub(crate) mod owned;
#[cfg(feature = "postgres")]
mod postgres;
mod record;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "sqlite")]
mod sqlite;
mod staged;
mod stats;
mod steps;
pub(crate) mod through;
mod tiered;
mod told;

use std::{error::Error, fmt, future::Future, pin::Pin, time::Duration};

use bytes::Bytes;

use crate::{Fingerprint, Identity, Outcome, Token};

#[cfg(feature = "redis")]
pub use self::redis::{RedisBuilder, RedisDurability, RedisTier};
#[cfg(any(feature = "embedded", feature = "postgres", feature = "sqlite"))]
pub use durability::Durability;
#[cfg(feature = "embedded")]
pub use embedded::{EmbeddedBuilder, EmbeddedTier};
pub use memory::MemoryTier;
#[cfg(feature = "postgres")]
pub use postgres::{PostgresBuilder, PostgresTier, PostgresTransaction};
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteTier, SqliteTierBuilder, SqliteTransaction};
pub use staged::{Completion, StageError, Staged, Transaction};
pub use stats::TierStats;
pub use tiered::{
    TierLost, Tiered, TieredBuilder, TieredClaim, TieredError, TieredPending, TieredPermit,
    TieredSettled,
};

/// What a verb of a tier answers with, in the end. Dropping it gives the answer up, not the step:
/// that may still happen, whole.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, TierError>> + Send + 'a>>;

/// A durable store of records. The contract stands in the [module's documentation](self), by
/// numbers; `oncekey::tier::conformance` (feature `conformance`) holds a tier against it.
pub trait Tier: fmt::Debug + Send + Sync + 'static {
    /// Shows that `owner` is alive: its claims are in flight for `lease` from now on (rules 9, 10).
    /// Writes one row or key, and waits for no record (T10).
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()>;

    /// Makes `claim.token` the owner of `id`, or tells what is there (rules 2, 3).
    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed>;

    /// Makes `claim.token` the owner in place of `seen`, if that is still there and not alive (rule
    /// 4); else tells what is there. If nothing is there, it claims.
    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed>;

    /// Finishes the claim of `token` with an outcome, or with `None` as "not kept", for `retention`
    /// from now on (rules 5, 6).
    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed>;

    /// Gives `id` up: it is absent (rules 5, 6).
    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed>;

    /// Keeps `id` shut for `retention`, because nobody knows whether the work was done (rules 5, 6).
    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed>;

    /// Gives `id` up as if its owner had died: it is lapsed from now on, and who takes it over gets
    /// what was left by [`checkpoint`](Self::checkpoint). Fingerprint and end of life stay; `token`
    /// is stale (rules 5, 6). A tier does it by giving the record to owner 0, which never beats.
    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed>;

    /// Leaves `bytes` for the next owner, in place of what was left before (rule 5).
    fn checkpoint<'a>(&'a self, id: Identity<'a>, token: Token, bytes: Bytes)
    -> Answer<'a, Landed>;

    /// What is there; `None` if a claim would win.
    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>>;

    /// Forgets `id`, unless it is in flight (lapsed is not) and `forced` is false.
    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten>;

    /// Settles `id` if it is held or lapsed: with an outcome, or with `None` by giving it up. The
    /// former token is stale from then on.
    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved>;

    /// Gives the room of at most `most` ended records back, and tells of how many. Fights no claim.
    /// A tier that ends records by itself answers 0.
    fn reap(&self, most: usize) -> Answer<'_, usize>;

    /// What was forgotten or resolved after the point that `since` names (rule 13), and a name for
    /// the present point. `None` asks for the present point alone.
    ///
    /// A tier that only this process writes has nothing to tell; that is what is built in here.
    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move { Ok(Recalls { now: since.unwrap_or(0), identities: Vec::new() }) })
    }

    /// Ends when `id` may have been settled since the call, or has been; it may end too early. It
    /// may also never end: who waits looks from time to time all the same.
    fn settled<'a>(&'a self, id: Identity<'a>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        let _ = id;
        Box::pin(std::future::pending())
    }
}

/// A claim that wants to be the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewClaim {
    /// The owner, random for each process start, and the claim's number, which never repeats there.
    /// Kept as it is.
    pub token: Token,
    /// What must not change between two attempts.
    pub fingerprint: Fingerprint,
    /// After so long it is held, even if its owner still beats (R8).
    pub max_run: Duration,
    /// How long the record outlives `max_run`, if nobody settles it (T3).
    pub retention: Duration,
}

/// What a claim is answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// The caller is the owner.
    Won {
        /// What the owner before has left ([`Tier::checkpoint`]), if this is a takeover.
        checkpoint: Option<Bytes>,
    },
    /// Something is there.
    Met(Found),
}

/// A record of a tier.
#[derive(Clone, PartialEq, Eq)]
pub struct Found {
    /// The fingerprint it was claimed with.
    pub fingerprint: Fingerprint,
    /// The token of its claim.
    pub token: Token,
    /// What became of the claim.
    pub state: State,
    /// The time since the claim while it is in flight or lapsed; else since it was settled.
    pub age: Duration,
    /// The time until the claim lapses or is held while it is in flight; else until the record ends.
    pub remaining: Duration,
}

/// Shows no outcome: it may hold what no log should see.
impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Found")
            .field("token", &self.token)
            .field("state", &self.state)
            .field("age", &self.age)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}

/// What became of a claim (rule 9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// An owner runs.
    InFlight,
    /// The owner shows no sign of life; what to do about it is the caller's setting (R10).
    Lapsed,
    /// Nobody knows whether the work was done.
    Held,
    /// There is an outcome.
    Completed(Outcome),
    /// Finished, but the answer was not kept.
    NotKept,
}

/// Whether a step with a token was done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a step that was lost changed nothing"]
pub enum Landed {
    /// It was.
    Done,
    /// The token is stale; this is what is there now.
    Lost(Option<Found>),
}

/// What [`Tier::forget`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgotten {
    /// There was a record, and there is none now.
    Gone,
    /// There was none.
    Absent,
    /// It is in flight: nothing changed.
    Busy,
}

/// What [`Tier::resolve`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The record is settled.
    Done,
    /// There is none.
    Absent,
    /// An owner runs: nothing changed.
    InFlight,
    /// It is completed already: nothing changed.
    Completed,
}

/// What [`Tier::recalls`] tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recalls {
    /// The present point, to ask from next time.
    pub now: u64,
    /// Account, endpoint and key of each identity. One may come twice.
    pub identities: Vec<[Vec<u8>; 3]>,
}

/// Why a tier did not answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum TierError {
    /// It could not be reached or did not answer in time. Whether the step was done is unknown;
    /// it may be tried again.
    Unavailable(Box<dyn Error + Send + Sync>),
    /// A transaction had the record in its hands for longer than the tier waits (rule 6): nothing
    /// was done, and it may be tried again. It says nothing of the tier's health.
    Locked(Box<dyn Error + Send + Sync>),
    /// The claim's owner does not beat: nothing was claimed (rule 10).
    OwnerLapsed,
    /// It cannot be used as it is: settings, rights, a full disk, a foreign format or damaged bytes.
    /// Trying again does not help. The text says what to do.
    Unusable(Box<dyn Error + Send + Sync>),
}

impl TierError {
    /// As [`TierError::Unavailable`], of any error or text.
    pub fn unavailable(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unavailable(error.into())
    }

    /// As [`TierError::Unusable`], of any error or text.
    pub fn unusable(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unusable(error.into())
    }
}

impl fmt::Display for TierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(error) => write!(f, "the tier is unavailable: {error}"),
            Self::Locked(error) => write!(f, "a transaction has the record: {error}"),
            Self::OwnerLapsed => f.write_str("the owner's heartbeat has lapsed: beat, then claim"),
            Self::Unusable(error) => write!(f, "the tier cannot be used: {error}"),
        }
    }
}

impl Error for TierError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unavailable(error) | Self::Locked(error) | Self::Unusable(error) => {
                Some(&**error)
            }
            Self::OwnerLapsed => None,
        }
    }
}
