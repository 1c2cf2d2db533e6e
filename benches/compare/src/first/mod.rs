//! The project's first core, kept as an honest baseline: a dashmap of shared records, with the
//! rules that a bare map leaves out. Leases, retention, fencing tokens, limits, waiters, counters.
//!
//! It is the core that stood behind the public face before the present one, reduced to what the
//! comparison runs: claiming, completing, releasing, waiting, lapse and expiry. What it did on
//! these paths it still does, counters included; operators' verbs, renewal, shares for accounts and
//! fingerprints of several schemes are gone. Nothing here is ever made faster.
//!
//! ```text
//! store     the face: settings, the background sweep
//! claim     what a caller meets, and waiting     permit: in claim too
//! engine    claims; settle ends them; sweep reaps them
//! index     identity -> record, a dashmap
//! record    one claim: a state word, and parts under a lock
//! waiters   expire   wheel   capacity   clock
//! ```

mod capacity;
mod claim;
mod clock;
mod engine;
mod expire;
mod index;
mod record;
mod settle;
mod store;
mod sweep;
mod waiters;
mod wheel;
mod word;

pub(crate) use claim::{Claim, Permit, Settled};
pub(crate) use store::{Settings, Store};
