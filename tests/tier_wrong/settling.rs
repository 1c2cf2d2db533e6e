//! Faults of the steps that settle a claim, and of what they keep.

use std::time::Duration;

use oncekey::{
    Fingerprint, Outcome, Scheme, Token,
    tier::{Found, Landed, NewClaim, Resolved, State, Tier as _, TierError},
};

use crate::{
    common::MS,
    fault::Fault as F,
    tier::{Name, Wrong, as_text, cut, others_come_in},
};

fn rebuilt(
    outcome: &Outcome,
    status: u16,
    value_of: fn(&[u8]) -> Vec<u8>,
    body: Vec<u8>,
) -> Outcome {
    outcome
        .header_lines()
        .fold(Outcome::new(status), |new, (name, value)| new.header(name, value_of(value)))
        .body(body)
}

impl Wrong {
    pub fn outcome(&self, outcome: Option<&Outcome>) -> Option<Outcome> {
        let outcome = outcome?;
        let (status, body) = (outcome.status(), outcome.bytes());
        match self.fault() {
            F::HeaderLinesMerged => {
                let mut lines: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
                for (name, value) in outcome.header_lines() {
                    match lines.iter_mut().find(|(other, _)| other == name) {
                        Some((_, all)) => all.extend([b", ", value].concat()),
                        None => lines.push((name.to_vec(), value.to_vec())),
                    }
                }
                let new = lines
                    .iter()
                    .fold(Outcome::new(status), |new, (name, value)| new.header(name, value));
                Some(new.body(body.clone()))
            }
            F::HeaderLinesAsText => Some(rebuilt(outcome, status, as_text, body.to_vec())),
            F::BodyAsText => Some(rebuilt(outcome, status, <[u8]>::to_vec, as_text(body))),
            F::BodyCutAt64KiB => Some(rebuilt(outcome, status, <[u8]>::to_vec, cut(body, 65_536))),
            F::EmptyBodyIsNotKept if body.is_empty() => None,
            F::StatusOfThreeDigits => {
                Some(rebuilt(outcome, status.clamp(100, 999), <[u8]>::to_vec, body.to_vec()))
            }
            _ => Some(outcome.clone()),
        }
    }

    /// The token that a step is done with.
    pub async fn token_for(&self, verb: &str, name: &Name, token: Token) -> Token {
        let there = self.found(name).await;
        let is_open =
            |found: &Found| matches!(found.state, State::InFlight | State::Lapsed | State::Held);
        let Some(there) = there else { return token };
        match (self.fault(), verb) {
            (F::AnyTokenCompletes, "complete") if is_open(&there) => there.token,
            (F::AnyTokenRepeatsACompletion, "complete") if !is_open(&there) => there.token,
            (F::AnyTokenLeavesACheckpoint, "checkpoint") => there.token,
            (F::AnyOwnerReleases, "release") if there.token.number() == token.number() => {
                there.token
            }
            (F::AnyOwnerLapses, "lapse") if there.token.number() == token.number() => there.token,
            (F::AnyNumberHolds, "hold") if there.token.owner() == token.owner() => there.token,
            (F::TokenAsFloat, _) => Token::new(token.owner(), token.number() as f64 as u64),
            (F::TokenSigned, _) => {
                Token::new(token.owner(), i64::try_from(token.number()).unwrap_or(i64::MAX) as u64)
            }
            (F::LapsedTokenIsStale, _) if there.state == State::Lapsed => Token::new(0, 0),
            (F::HeldTokenIsStale, _) if there.state == State::Held => Token::new(0, 0),
            _ => token,
        }
    }

    pub async fn complete_wrongly(
        &self,
        name: &Name,
        token: Token,
        outcome: Option<&Outcome>,
        mut retention: Duration,
    ) -> Result<Landed, TierError> {
        let (tier, id) = (self.tier(), name.get());
        let token = self.token_for("complete", name, token).await;
        let there = self.found(name).await;
        let is_completed = |state: &State| matches!(state, State::Completed(_) | State::NotKept);
        let is_done = there.as_ref().is_some_and(|it| it.token == token && is_completed(&it.state));
        let is_own = there.as_ref().is_some_and(|it| it.token == token);
        match self.fault() {
            F::LastCompletionWins | F::RepeatedCompletionLivesLonger if is_done => {
                let found = there.unwrap();
                let (claim, _) = self.shared.claimed.lock().unwrap()[name];
                let old = match &found.state {
                    State::Completed(outcome) => Some(outcome),
                    _ => None,
                };
                let kept = if self.fault() == F::LastCompletionWins { outcome } else { old };
                self.seize(name, claim).await?;
                return tier.complete(id, token, kept, retention).await;
            }
            F::RepeatedCompletionIsLost if is_done => return Ok(Landed::Lost(there)),
            F::AbsentIsCompleted if there.is_none() => return Ok(Landed::Done),
            F::ReleasedAndCompleted if is_own && !is_done => {
                others_come_in().await;
                if self.found(name).await.is_none() {
                    return Ok(Landed::Done);
                }
            }
            F::SettledFromTheClaim if is_own && !is_done => {
                retention = retention.saturating_sub(there.unwrap().age);
            }
            F::SettledAtTheClaimsEnd if is_own && !is_done => {
                let (claim, at) = self.shared.claimed.lock().unwrap()[name];
                let end = at.saturating_add(claim.max_run).saturating_add(claim.retention);
                retention = end.saturating_sub(self.now());
            }
            F::ZeroIsForEver if retention < MS => retention = Duration::MAX,
            F::EndlessIsShort => {
                retention = Duration::from_millis(retention.as_millis() as u32 as u64);
            }
            F::HalfACompletion if is_own && !is_done => {
                let landed = tier.hold(id, token, retention).await?;
                assert_eq!(landed, Landed::Done);
                others_come_in().await;
            }
            _ => {}
        }
        let kept = self.outcome(outcome);
        tier.complete(id, token, kept.as_ref(), retention).await
    }

    pub async fn resolve_wrongly(
        &self,
        name: &Name,
        outcome: Option<&Outcome>,
        retention: Duration,
    ) -> Result<Resolved, TierError> {
        let (tier, id) = (self.tier(), name.get());
        let Some(there) = self.found(name).await else {
            return tier.resolve(id, outcome, retention).await;
        };
        let is_open = matches!(there.state, State::Lapsed | State::Held);
        match self.fault() {
            F::ResolvedTokenCompletes if is_open && outcome.is_some() => {
                let landed = tier.complete(id, there.token, outcome, retention).await?;
                assert_eq!(landed, Landed::Done);
                return Ok(Resolved::Done);
            }
            F::ResolvesTheLiving if there.state == State::InFlight => {
                let landed = tier.hold(id, there.token, retention).await?;
                assert_eq!(landed, Landed::Done);
            }
            F::ResolvesNoLapsed if there.state == State::Lapsed => return Ok(Resolved::InFlight),
            F::ResolvesTheCompleted | F::ResolvedOverACompletion
                if matches!(there.state, State::Completed(_) | State::NotKept)
                    == (self.fault() == F::ResolvesTheCompleted) =>
            {
                others_come_in().await;
                let (claim, _) = self.shared.claimed.lock().unwrap()[name];
                if is_open || self.fault() == F::ResolvesTheCompleted {
                    let token = Token::new(claim.token.owner(), u64::MAX / 2);
                    self.seize(name, NewClaim { token, ..claim }).await?;
                    let landed = tier.hold(id, token, retention).await?;
                    assert_eq!(landed, Landed::Done);
                }
            }
            F::ResolvesWithoutFingerprint if is_open && outcome.is_some() => {
                let (claim, _) = self.shared.claimed.lock().unwrap()[name];
                let fingerprint = Fingerprint::from_parts(Scheme::REQUEST_1, [0; 32]);
                self.seize(name, NewClaim { fingerprint, ..claim }).await?;
                let landed = tier.hold(id, claim.token, retention).await?;
                assert_eq!(landed, Landed::Done);
            }
            F::ResolvesAwayAsNotKept if is_open && outcome.is_none() => {
                let landed = tier.complete(id, there.token, None, retention).await?;
                assert_eq!(landed, Landed::Done);
                return Ok(Resolved::Done);
            }
            F::HalfAResolve if is_open && outcome.is_some() => {
                let (claim, _) = self.shared.claimed.lock().unwrap()[name];
                tier.resolve(id, None, retention).await?;
                others_come_in().await;
                tier.claim(id, claim).await?;
                let landed = tier.hold(id, claim.token, retention).await?;
                assert_eq!(landed, Landed::Done);
            }
            _ => {}
        }
        tier.resolve(id, outcome, retention).await
    }
}
