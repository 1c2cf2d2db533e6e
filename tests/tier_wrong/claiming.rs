//! Faults of those who want to become the owner.

use std::time::Duration;

use oncekey::{
    Fingerprint, Scheme, Token,
    tier::{Claimed, Found, Landed, NewClaim, State, Tier as _, TierError},
};

use crate::{
    common::HOUR,
    fault::Fault as F,
    tier::{Name, Wrong, others_come_in},
};

impl Wrong {
    pub async fn claim_wrongly(&self, name: &Name, claim: NewClaim) -> Result<Claimed, TierError> {
        let (tier, id) = (self.tier(), name.get());
        let claim = self.taken_down(claim);
        let there = self.found(name).await;
        match self.fault() {
            F::TwoClaimsWin if there.is_none() => {
                others_come_in().await;
                return self.seize(name, claim).await;
            }
            F::VanishedIsAnError if there.is_some() => {
                others_come_in().await;
                if self.found(name).await.is_none() {
                    return Err(TierError::unavailable("the record has vanished"));
                }
            }
            F::RepeatedClaimMeetsItself => {
                if let Some(there) = there.filter(|it| it.token == claim.token) {
                    return Ok(Claimed::Met(there));
                }
            }
            F::AnyClaimOfTheOwnerWins
                if there.as_ref().is_some_and(|it| {
                    it.token.owner() == claim.token.owner() && it.state == State::InFlight
                }) =>
            {
                return Ok(Claimed::Won { checkpoint: None });
            }
            F::RepeatedClaimStartsAnew | F::CompletedClaimWinsAgain
                if there.as_ref().is_some_and(|it| it.token == claim.token) =>
            {
                let is_open = there.is_some_and(|it| it.state == State::InFlight);
                if is_open == (self.fault() == F::RepeatedClaimStartsAnew) {
                    return self.seize(name, claim).await;
                }
            }
            F::EndsOnceReaped if there.is_none() => {
                if let Some((old, _)) = self.shared.claimed.lock().unwrap().get(name) {
                    return Ok(Claimed::Met(Found {
                        fingerprint: old.fingerprint,
                        token: old.token,
                        state: State::Lapsed,
                        age: old.max_run,
                        remaining: Duration::ZERO,
                    }));
                }
            }
            F::SilentOwnerClaims if !self.beats(claim.token) => {
                tier.beat(claim.token.owner(), HOUR).await?;
            }
            F::RefusedLeavesAClaim if !self.beats(claim.token) && there.is_none() => {
                tier.beat(claim.token.owner(), HOUR).await?;
                tier.claim(id, claim).await?;
                return Err(TierError::OwnerLapsed);
            }
            F::HalfAClaim if there.is_none() && self.beats(claim.token) => {
                let empty = Fingerprint::from_parts(Scheme::REQUEST_1, [0; 32]);
                let half = NewClaim { fingerprint: empty, ..claim };
                tier.claim(id, half).await?;
                others_come_in().await;
                return self.seize(name, claim).await;
            }
            F::GivenUpKeepsItsPlace => {
                self.shared.places.acquire().await.unwrap().forget();
                others_come_in().await;
                self.shared.places.add_permits(1);
            }
            F::WaitingTakesAPlace => drop(self.shared.places.acquire().await.unwrap()),
            _ => {}
        }
        let mut claimed = tier.claim(id, claim).await?;
        match (&mut claimed, self.fault()) {
            (Claimed::Met(found), F::MetWithOwnFingerprint) => {
                found.fingerprint = claim.fingerprint;
            }
            (Claimed::Met(found), F::MeetingMovesTheEnd)
                if matches!(found.state, State::Completed(_)) =>
            {
                let State::Completed(outcome) = found.state.clone() else { unreachable!() };
                let old = NewClaim { token: found.token, fingerprint: found.fingerprint, ..claim };
                self.seize(name, old).await?;
                let landed = tier.complete(id, old.token, Some(&outcome), claim.retention).await?;
                assert_eq!(landed, Landed::Done);
                found.remaining = claim.retention;
            }
            (Claimed::Won { checkpoint }, F::CheckpointOutlivesItsRecord) => {
                let left = self.shared.left.lock().unwrap().get(name).cloned();
                *checkpoint = checkpoint.take().or(left);
            }
            _ => {}
        }
        Ok(claimed)
    }

    pub async fn take_over_wrongly(
        &self,
        name: &Name,
        seen: Token,
        claim: NewClaim,
    ) -> Result<Claimed, TierError> {
        let (tier, id) = (self.tier(), name.get());
        let claim = self.taken_down(claim);
        let there = self.found(name).await;
        let state = there.as_ref().map(|it| it.state.clone());
        let token = there.as_ref().map(|it| it.token);
        let is_seen = token == Some(seen);
        let is_dead = matches!(state, Some(State::Lapsed | State::Held));
        match self.fault() {
            F::TakesWhatItHasNotSeen if is_dead => {
                return tier.take_over(id, token.unwrap(), claim).await;
            }
            F::TakesTheLiving if is_seen && state == Some(State::InFlight) => {
                return self.seize(name, claim).await;
            }
            F::TakesTheCompleted
                if is_seen && matches!(state, Some(State::Completed(_) | State::NotKept)) =>
            {
                return self.seize(name, claim).await;
            }
            F::TakesNoHeld if state == Some(State::Held) => {
                return Ok(Claimed::Met(there.unwrap()));
            }
            F::TakesNoAbsent if there.is_none() => {
                return Err(TierError::unusable("there is nothing to take over"));
            }
            F::TwoTakeoversWin if is_seen && is_dead => {
                others_come_in().await;
                return self.seize(name, claim).await;
            }
            F::TakesWhatIsCompletedMeanwhile if is_seen && is_dead => {
                others_come_in().await;
                if !matches!(self.state(name).await, Some(State::InFlight)) {
                    return self.seize(name, claim).await;
                }
            }
            F::RepeatedTakeoverMeetsItself if token == Some(claim.token) => {
                return Ok(Claimed::Met(there.unwrap()));
            }
            F::RepeatedTakeoverLosesTheCheckpoint if token == Some(claim.token) => {
                return Ok(Claimed::Won { checkpoint: None });
            }
            F::SilentOwnerTakes if !self.beats(claim.token) => {
                tier.beat(claim.token.owner(), HOUR).await?;
            }
            F::HalfATakeover if is_seen && is_dead => {
                let checkpoint = tier.take_over(id, seen, claim).await?;
                let landed = tier.hold(id, claim.token, HOUR).await?;
                assert_eq!(landed, Landed::Done);
                others_come_in().await;
                self.seize(name, claim).await?;
                return Ok(checkpoint);
            }
            F::CheckpointGoesWithTheTaker if is_seen && is_dead => {
                let taken = tier.take_over(id, seen, claim).await?;
                self.seize(name, claim).await?;
                return Ok(taken);
            }
            F::TakeoverEndsWithTheFirst if is_seen && is_dead => {
                let max_run = claim.max_run - there.unwrap().age;
                return self.seize(name, NewClaim { max_run, ..claim }).await;
            }
            F::EndsOnceReaped if there.is_none() => return self.claim_wrongly(name, claim).await,
            _ => {}
        }
        tier.take_over(id, seen, claim).await
    }
}
