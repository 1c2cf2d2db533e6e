//! Holds a tier against the [contract](super), rule by rule: for authors of tiers.
//!
//! A [`Host`] gives the suite handles of the tier and moves its time; [`check`] answers what the
//! tier owes and did not do. A test is four lines, and the host a few more:
//!
//! ```
//! use std::{future::Future, pin::Pin, sync::Arc, time::Duration};
//!
//! use oncekey::{
//!     ManualClock,
//!     tier::{
//!         MemoryTier, Tier,
//!         conformance::{Host, check},
//!     },
//! };
//!
//! struct Memory {
//!     tier: MemoryTier,
//!     clock: ManualClock,
//! }
//!
//! impl Host for Memory {
//!     fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
//!         Box::pin(async { Arc::new(self.tier.clone()) as Arc<dyn Tier> })
//!     }
//!
//!     fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
//!         Box::pin(async move { self.clock.advance(by) })
//!     }
//! }
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let clock = ManualClock::new();
//! let tier = MemoryTier::with_clock(clock.clone());
//! let failures = check(&Memory { tier, clock }).await;
//! assert!(failures.is_empty(), "{failures:#?}");
//! # });
//! ```
//!
//! # What a run is like
//!
//! It makes about 7,000 calls, some with an outcome of 1 MiB, and lets 850 days pass. Its
//! identities and owners are its own, so it can run again on records that an earlier run has left;
//! but nobody else can use the tier meanwhile, because its time is moved. It is to be awaited in a
//! tokio runtime whose timers are enabled and not paused, best in one of several threads, where
//! calls that are made at once do overlap.
//!
//! Every answer is waited for at most as long as [`Host::patience`] says: a tier that hangs fails,
//! and so does one that panics. One that blocks its thread for good blocks the run.
//!
//! The clock of the tier may go on by itself: spans in the checks lie hours apart, and an age may
//! be ten minutes too high.
//!
//! # What it cannot see
//!
//! * Rule 6, waiting for the caller's own transaction: the verbs alone open none.
//! * Rule 8, that time is read within the step. That all handles have one time is checked.
//! * Rule 11: crashes, lost power, and settings that are less durable than was asked for.
//! * Whether [`Tier::reap`] gives the room back. That it is bounded, ends, and takes no living
//!   record is checked.
//! * Whether [`Tier::settled`] ever ends, because it need not. That it does no harm is checked.
//!
//! A tier has tests of its own for these.

mod cancelling;
mod identities;
mod life;
mod operators;
mod owning;
mod probe;
mod races;
mod steps;

use std::{error::Error, fmt, future::Future, pin::Pin, time::Duration};

use crate::{sync::Arc, tier::Tier};

use probe::{Run, caught};

/// Where the suite finds the tier: makes handles of it and moves its time.
pub trait Host: Send + Sync {
    /// A handle as another process has it: a connection of its own, the same records. A tier that
    /// only one process can open answers with the same handle again.
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>>;

    /// Lets `by` pass for the tier, up to 400 days at once: for its records, its owners and what it
    /// recalls. A server whose clock cannot be moved shifts their stamps back instead; no check
    /// needs to sleep. No answer is waited for meanwhile.
    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Whether several processes can have the tier open at once. If not, it need not tell what was
    /// forgotten ([`Tier::recalls`]). Default: true.
    fn is_shared(&self) -> bool {
        true
    }

    /// How long an answer is waited for, until its absence is a failure. Default: 30 s.
    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }
}

/// Something that a tier owes and did not do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The number of the rule in the [contract](super). 0 stands for what is said outside of the
    /// list: that each verb is one atomic step, and what each does by its own documentation.
    pub rule: u8,
    /// Which check has seen it.
    pub check: &'static str,
    /// What was seen.
    pub seen: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}, {}: {}", self.rule, self.check, self.seen)
    }
}

impl Error for Failure {}

/// How many handles the checks work with.
const NODES: usize = 3;

/// Runs all checks, each on identities of its own, and answers what failed: at most one failure for
/// each check, in the order of the rules. A tier without failures keeps the contract as far as
/// [can be seen](self#what-it-cannot-see).
pub async fn check(host: &dyn Host) -> Vec<Failure> {
    let run = match Run::new(host, NODES).await {
        Ok(run) => run,
        Err(failure) => return vec![failure],
    };
    let mut failures = Vec::new();
    macro_rules! checks {
        ($($rule:literal $room:ident::$check:ident,)*) => {$(
            let probe = run.probe($rule, stringify!($check));
            failures.extend(caught(probe, $room::$check(probe)).await.err());
        )*};
    }
    checks! {
        1 identities::every_byte_of_an_identity_counts,
        1 identities::the_longest_identities_have_room,
        2 owning::a_claim_that_meets_one_changes_nothing,
        2 races::one_of_many_claims_wins,
        2 races::claims_of_what_goes_away_have_one_winner,
        2 races::claims_race_with_giving_room_back,
        3 owning::a_repeated_claim_wins_again,
        4 owning::a_takeover_needs_the_token_that_was_seen,
        4 owning::a_takeover_needs_an_owner_that_is_not_alive,
        4 races::one_of_many_takeovers_wins,
        4 races::a_takeover_races_with_the_completion,
        5 steps::a_step_needs_the_token,
        5 steps::a_lapsed_or_held_claim_is_settled_by_its_token,
        5 steps::a_completion_is_repeated_without_effect,
        5 races::of_two_steps_with_one_token_one_is_first,
        5 races::operators_race_with_the_completion,
        7 life::a_claim_ends_by_itself,
        7 life::a_takeover_starts_anew,
        7 life::what_is_settled_ends_its_retention_later,
        7 life::a_span_without_end_is_no_short_one,
        7 life::a_span_of_nothing_is_over,
        7 operators::room_is_given_back_in_bounded_steps,
        8 life::all_handles_have_one_time,
        9 life::a_claim_lapses_with_its_owner,
        9 life::a_claim_is_held_after_max_run,
        10 life::a_late_beat_revives,
        10 life::an_owner_that_does_not_beat_claims_nothing,
        12 steps::outcomes_come_back_byte_for_byte,
        12 steps::checkpoints_go_to_the_next_owner,
        13 operators::other_nodes_are_told,
        13 operators::no_recall_is_missed,
        0 operators::what_is_forgotten_is_absent,
        0 operators::what_is_resolved_is_settled,
        0 races::many_steps_at_once_fail_nobody,
        0 cancelling::a_call_that_is_given_up_is_whole,
        0 cancelling::many_calls_given_up_at_once_block_nobody,
        0 cancelling::waiting_for_a_settlement_does_no_harm,
    }
    failures
}
