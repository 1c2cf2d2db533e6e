//! Tiers that break the contract on purpose, each in one way: the conformance suite must reject
//! each of them, by the rule that it breaks. So no check of the suite is one that cannot fail.
//!
//! A fault is a few lines around the tier in memory. Where it takes two steps instead of one, it
//! yields between them, so that others come in between without luck.
//!
//! Rules 6 and 11 are not among them, because the suite has no check for them: no caller of the
//! verbs can hold a record in a transaction, or take the power away.
#![cfg(feature = "conformance")]
#![allow(unreachable_pub, reason = "this is a program")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod claiming;
#[path = "../common/mod.rs"]
mod common;
mod fault;
mod settling;
mod tier;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::watchdog;
use fault::Fault::{self, self as F};
use oncekey::tier::{
    Tier,
    conformance::{Failure, Host, check},
};
use tier::{Shared, Wrong};

struct Wrongly {
    shared: Arc<Shared>,
    nodes: AtomicUsize,
}

impl Wrongly {
    fn new(fault: Fault) -> Self {
        let shared = Shared::new(fault);
        Self { shared: Arc::new(shared), nodes: AtomicUsize::new(0) }
    }
}

impl Host for Wrongly {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        let node = self.nodes.fetch_add(1, Ordering::Relaxed);
        Box::pin(
            async move { Arc::new(Wrong { shared: self.shared.clone(), node }) as Arc<dyn Tier> },
        )
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move { self.shared.clock.advance(by) })
    }

    fn patience(&self) -> Duration {
        match self.shared.fault {
            // These do hang, at once.
            F::GivenUpKeepsItsPlace | F::WaitingTakesAPlace | F::ForgetHangs => {
                Duration::from_millis(200)
            }
            F::Nothing => Duration::from_secs(60),
            _ => Duration::from_secs(2),
        }
    }
}

/// Runs the suite on each tier and fails unless the check that is named has seen its fault, by this
/// rule of the contract.
async fn each_is_rejected(rule: u8, faults: &[(Fault, &str)]) {
    let _watchdog = watchdog();
    for (fault, by) in faults {
        let failures = check(&Wrongly::new(*fault)).await;
        let is_seen = failures.iter().any(|it| it.rule == rule && it.check == *by);
        let all: Vec<_> = failures.iter().map(Failure::to_string).collect();
        assert!(is_seen, "{fault:?} breaks rule {rule}, and `{by}` did not say so: {all:#?}");
    }
}

#[tokio::test]
async fn t8_a_tier_without_a_fault_is_not_rejected() {
    let _watchdog = watchdog();
    let failures = check(&Wrongly::new(F::Nothing)).await;
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A check that no tier here fails by is one that may not be able to fail.
#[test]
fn t8_every_check_rejects_a_tier() {
    let suite = include_str!("../../src/tier/conformance/mod.rs");
    let checks = suite.split("checks! {").nth(1).unwrap().split('}').next().unwrap();
    let checks: Vec<_> = checks
        .lines()
        .filter_map(|line| line.trim().strip_suffix(',')?.split("::").nth(1))
        .collect();
    assert!(checks.len() > 30, "{checks:?}");
    let named = |check: &&&str| include_str!("main.rs").contains(&format!("\"{check}\""));
    let unnamed: Vec<_> = checks.iter().filter(|check| !named(check)).collect();
    assert!(unnamed.is_empty(), "{unnamed:?}");
}

#[tokio::test]
async fn t8_rule_1_identities_that_are_not_compared_byte_for_byte() {
    let (each, long) = ("every_byte_of_an_identity_counts", "the_longest_identities_have_room");
    each_is_rejected(
        1,
        &[
            (F::AccountWithoutCase, each),
            (F::AccountTrimmed, each),
            (F::AccountAsText, each),
            (F::AccountUpToNul, each),
            (F::AccountAndEndpointJoined, each),
            (F::EndpointWithoutCase, each),
            (F::KeyTrimmed, each),
            (F::KeyWithoutCase, each),
            (F::EndpointCutAt255, long),
            (F::KeyCutAt200, long),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_2_claims_that_have_no_owner_or_two() {
    each_is_rejected(
        2,
        &[
            (F::TwoClaimsWin, "one_of_many_claims_wins"),
            (F::MetWithOwnFingerprint, "a_claim_that_meets_one_changes_nothing"),
            (F::MeetingMovesTheEnd, "a_claim_that_meets_one_changes_nothing"),
            (F::AbsentIsCached, "a_claim_that_meets_one_changes_nothing"),
            (F::VanishedIsAnError, "claims_of_what_goes_away_have_one_winner"),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_3_claims_that_cannot_be_repeated() {
    let by = "a_repeated_claim_wins_again";
    each_is_rejected(
        3,
        &[
            (F::RepeatedClaimMeetsItself, by),
            (F::RepeatedTakeoverMeetsItself, by),
            (F::RepeatedTakeoverLosesTheCheckpoint, by),
            (F::AnyClaimOfTheOwnerWins, by),
            (F::RepeatedClaimStartsAnew, by),
            (F::CompletedClaimWinsAgain, by),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_4_takeovers_that_do_not_compare() {
    let (seen, alive) =
        ("a_takeover_needs_the_token_that_was_seen", "a_takeover_needs_an_owner_that_is_not_alive");
    each_is_rejected(
        4,
        &[
            (F::TakesWhatItHasNotSeen, seen),
            (F::TakesNoAbsent, seen),
            (F::TakesTheLiving, alive),
            (F::TakesTheCompleted, alive),
            (F::TakesNoHeld, alive),
            (F::TwoTakeoversWin, "one_of_many_takeovers_wins"),
            (F::TakesWhatIsCompletedMeanwhile, "a_takeover_races_with_the_completion"),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_5_steps_without_their_token() {
    let (token, open, again) = (
        "a_step_needs_the_token",
        "a_lapsed_or_held_claim_is_settled_by_its_token",
        "a_completion_is_repeated_without_effect",
    );
    each_is_rejected(
        5,
        &[
            (F::AnyTokenCompletes, token),
            (F::AnyTokenLeavesACheckpoint, token),
            (F::AnyOwnerReleases, token),
            (F::AnyNumberHolds, token),
            (F::AnyOwnerLapses, token),
            (F::LapseIsARelease, token),
            (F::AbsentIsCompleted, token),
            (F::LapsedTokenIsStale, open),
            (F::HeldTokenIsStale, open),
            (F::LastCompletionWins, again),
            (F::RepeatedCompletionIsLost, again),
            (F::RepeatedCompletionLivesLonger, again),
            (F::AnyTokenRepeatsACompletion, again),
            (F::CompletedIsReleased, again),
            (F::CompletedIsHeld, again),
            (F::ReleasedAndCompleted, "of_two_steps_with_one_token_one_is_first"),
            (F::ResolvedTokenCompletes, "what_is_resolved_is_settled"),
            (F::ResolvedOverACompletion, "operators_race_with_the_completion"),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_7_records_that_end_too_late_or_too_early() {
    let (ends, settled, reap) = (
        "a_claim_ends_by_itself",
        "what_is_settled_ends_its_retention_later",
        "room_is_given_back_in_bounded_steps",
    );
    each_is_rejected(
        7,
        &[
            (F::ClaimsNeverEnd, ends),
            (F::EndsOnceReaped, ends),
            (F::TakeoverEndsWithTheFirst, "a_takeover_starts_anew"),
            (F::SettledFromTheClaim, settled),
            (F::SettledAtTheClaimsEnd, settled),
            (F::HeldForEver, settled),
            (F::EndlessIsShort, "a_span_without_end_is_no_short_one"),
            (F::ZeroIsForEver, "a_span_of_nothing_is_over"),
            (F::ReapsMoreThanAsked, reap),
            (F::ReapsTheLapsed, reap),
            (F::ReapNeverEnds, reap),
            (F::ReapedWithoutLooking, "claims_race_with_giving_room_back"),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_8_time_that_is_not_the_tiers() {
    each_is_rejected(8, &[(F::TimeOfTheNode, "all_handles_have_one_time")]).await;
}

#[tokio::test]
async fn t8_rule_9_owners_that_are_not_referred_to() {
    let (lapses, held) = ("a_claim_lapses_with_its_owner", "a_claim_is_held_after_max_run");
    each_is_rejected(
        9,
        &[
            (F::LapsedIsHeld, lapses),
            (F::BeatsAddUp, lapses),
            (F::OneBeatForAll, lapses),
            (F::RemainingToTheEnd, lapses),
            (F::AgeOfTheBeat, lapses),
            (F::HeldIsLapsed, held),
            (F::MaxRunIsNotLooked, held),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_10_owners_that_do_not_beat() {
    let (late, silent) = ("a_late_beat_revives", "an_owner_that_does_not_beat_claims_nothing");
    each_is_rejected(
        10,
        &[
            (F::LateBeatIsTooLate, late),
            (F::ReapForgetsOwners, late),
            (F::BeatRevivesWhatWasTaken, late),
            (F::SilentOwnerClaims, silent),
            (F::SilentOwnerTakes, silent),
            (F::RefusedLeavesAClaim, silent),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_12_bytes_that_come_back_as_others() {
    let (bytes, left) = ("outcomes_come_back_byte_for_byte", "checkpoints_go_to_the_next_owner");
    each_is_rejected(
        12,
        &[
            (F::HeaderLinesMerged, bytes),
            (F::HeaderLinesAsText, bytes),
            (F::BodyAsText, bytes),
            (F::BodyCutAt64KiB, bytes),
            (F::EmptyBodyIsNotKept, bytes),
            (F::StatusOfThreeDigits, bytes),
            (F::SchemeForgotten, bytes),
            (F::TokenAsFloat, bytes),
            (F::TokenSigned, bytes),
            (F::NoCheckpoints, left),
            (F::CheckpointsAddUp, left),
            (F::LapseLeavesNothing, left),
            (F::CheckpointGoesWithTheTaker, left),
            (F::EmptyCheckpointIsNone, left),
            (F::CheckpointOutlivesItsRecord, left),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_13_other_nodes_that_are_not_told() {
    let told = "other_nodes_are_told";
    each_is_rejected(
        13,
        &[
            (F::NothingIsTold, told),
            (F::ResolvedIsNotTold, told),
            (F::ToldToOneNode, told),
            (F::ToldForSeconds, told),
            (F::ToldAsText, told),
            (F::PresentPointTellsAll, told),
            (F::PointAhead, "no_recall_is_missed"),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_0_verbs_that_do_something_else() {
    let (forgotten, resolved) = ("what_is_forgotten_is_absent", "what_is_resolved_is_settled");
    each_is_rejected(
        0,
        &[
            (F::ForgetsTheLiving, forgotten),
            (F::ForgetsNoLapsed, forgotten),
            (F::ForcedIsNotForced, forgotten),
            (F::ResolvesTheLiving, resolved),
            (F::ResolvesNoLapsed, resolved),
            (F::ResolvesTheCompleted, resolved),
            (F::ResolvesWithoutFingerprint, resolved),
            (F::ResolvesAwayAsNotKept, resolved),
        ],
    )
    .await;
}

#[tokio::test]
async fn t8_rule_0_steps_that_happen_by_halves_or_never() {
    let cut = "a_call_that_is_given_up_is_whole";
    each_is_rejected(
        0,
        &[
            (F::FirstBeatsCollide, "many_steps_at_once_fail_nobody"),
            (F::HalfAClaim, cut),
            (F::HalfATakeover, cut),
            (F::HalfACompletion, cut),
            (F::HalfARelease, cut),
            (F::HalfAResolve, cut),
            (F::GivenUpKeepsItsPlace, "many_calls_given_up_at_once_block_nobody"),
            (F::WaitingTakesAPlace, "waiting_for_a_settlement_does_no_harm"),
            (F::ForgetHangs, "what_is_forgotten_is_absent"),
            (F::BeatPanics, cut),
        ],
    )
    .await;
}
