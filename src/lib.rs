#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

// The walk: reading order is the way of a request.
//
// The door.
mod store;
// Who is asking?
mod fingerprint;
mod header;
mod identity;
mod intent;
// Who runs it?
mod claim;
mod engine;
mod index;
mod record;
mod waiters;
// The answer.
mod outcome;
mod permit;
// Time and room.
mod capacity;
mod expire;
mod lane;
// Memory that outlives the process.
#[cfg(feature = "tier")]
pub mod tier;
// The edges.
#[cfg(feature = "axum")]
mod axum;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "worker")]
pub mod worker;
// The cellar.
mod clock;
mod error;
mod reclaim;
mod stats;
mod sync;

#[cfg(all(any(doc, doctest), feature = "full"))]
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}

pub use claim::{Claim, Pending, Replay, Settled, TimedOut, Wait};
pub use clock::{Clock, ManualClock, SystemClock};
pub use engine::{Abandon, Lapse};
pub use error::{Busy, ClaimError, ConfigError, Lost, LostCause, ResolveError};
pub use fingerprint::{Fingerprint, FingerprintBuilder, Scheme};
#[cfg(feature = "http")]
pub use header::KeyForm;
pub use header::{Key, KeyError};
pub use identity::{Identity, IdentityError};
pub use intent::IntentKey;
#[cfg(feature = "tier")]
pub use outcome::DecodeError;
pub use outcome::{HeaderLines, Outcome};
pub use permit::{Completed, Permit, Token};
pub use stats::Stats;
#[cfg(feature = "http")]
pub(crate) use store::NotClaimed;
pub use store::{Drain, Entry, EntryState, Resolution, Store, StoreBuilder, Sweep, Swept};
