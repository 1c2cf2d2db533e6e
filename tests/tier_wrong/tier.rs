//! A handle of a tier with a fault: the tier in memory with something wrong around it.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use oncekey::{
    Fingerprint, Identity, ManualClock, Outcome, Scheme, Token,
    tier::{
        Answer, Claimed, Forgotten, Found, Landed, MemoryTier, NewClaim, Recalls, Resolved, State,
        Tier, TierError,
    },
};
use tokio::{sync::Semaphore, task::yield_now};

use crate::{
    common::{HOUR, MS},
    fault::Fault::{self, self as F},
};

/// An identity that owns its parts.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Name([Vec<u8>; 3]);

impl Name {
    pub fn get(&self) -> Identity<'_> {
        Identity::new(&self.0[0], &self.0[1], &self.0[2]).unwrap()
    }
}

/// What all handles of a wrong tier share.
pub struct Shared {
    pub fault: Fault,
    pub tier: MemoryTier,
    pub clock: ManualClock,
    /// What was ever claimed, and with what.
    pub claimed: Mutex<HashMap<Name, (NewClaim, Duration)>>,
    /// What was found there by a handle.
    pub cached: Mutex<HashMap<(usize, Name), Option<Found>>>,
    pub left: Mutex<HashMap<Name, Bytes>>,
    pub beats: Mutex<HashMap<u64, Duration>>,
    pub told: Mutex<usize>,
    /// Connections.
    pub places: Semaphore,
}

impl Shared {
    pub fn new(fault: Fault) -> Self {
        let clock = ManualClock::new();
        Self {
            fault,
            tier: MemoryTier::with_clock(clock.clone()),
            clock,
            claimed: Mutex::default(),
            cached: Mutex::default(),
            left: Mutex::default(),
            beats: Mutex::default(),
            told: Mutex::default(),
            places: Semaphore::new(8),
        }
    }
}

/// A handle of a tier with a fault.
#[derive(Clone)]
pub struct Wrong {
    pub shared: Arc<Shared>,
    pub node: usize,
}

impl std::fmt::Debug for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Wrong({:?})", self.shared.fault)
    }
}

/// The middle of a step that should be one.
pub async fn others_come_in() {
    for _ in 0..3 {
        yield_now().await;
    }
}

pub fn as_text(bytes: &[u8]) -> Vec<u8> {
    String::from_utf8_lossy(bytes).into_owned().into_bytes()
}

pub fn cut(bytes: &[u8], at: usize) -> Vec<u8> {
    bytes[..bytes.len().min(at)].to_vec()
}

impl Wrong {
    pub fn fault(&self) -> Fault {
        self.shared.fault
    }

    pub fn tier(&self) -> &MemoryTier {
        &self.shared.tier
    }

    pub fn now(&self) -> Duration {
        oncekey::Clock::now(&self.shared.clock)
    }

    /// The identity as this tier takes it.
    pub fn name(&self, id: Identity<'_>) -> Name {
        let (mut account, mut endpoint, mut key) =
            (id.account().to_vec(), id.endpoint().to_vec(), id.key().to_vec());
        match self.fault() {
            F::AccountWithoutCase => account.make_ascii_lowercase(),
            F::AccountTrimmed => account = account.trim_ascii_end().to_vec(),
            F::AccountAsText => account = cut(&as_text(&account), 255),
            F::AccountUpToNul => account = account.split(|it| *it == 0).next().unwrap().to_vec(),
            F::AccountAndEndpointJoined => {
                let joined = [&account[..], b":", &endpoint].concat();
                (account, endpoint) = (joined[..16].to_vec(), cut(&joined[16..], 512));
            }
            F::EndpointWithoutCase => endpoint.make_ascii_lowercase(),
            F::KeyTrimmed => key = key.trim_ascii_end().to_vec(),
            F::KeyWithoutCase => key.make_ascii_lowercase(),
            F::EndpointCutAt255 => endpoint = cut(&endpoint, 255),
            F::KeyCutAt200 => key = cut(&key, 200),
            _ => {}
        }
        Name([account, endpoint, key])
    }

    pub async fn found(&self, name: &Name) -> Option<Found> {
        self.tier().look_up(name.get()).await.unwrap()
    }

    pub async fn state(&self, name: &Name) -> Option<State> {
        self.found(name).await.map(|found| found.state)
    }

    pub async fn token(&self, name: &Name) -> Option<Token> {
        self.found(name).await.map(|found| found.token)
    }

    /// Puts `claim` there, whatever was there before.
    pub async fn seize(&self, name: &Name, claim: NewClaim) -> Result<Claimed, TierError> {
        self.tier().forget(name.get(), true).await?;
        self.tier().claim(name.get(), claim).await
    }

    /// What there is as this tier tells it.
    pub fn shown(&self, mut found: Found) -> Found {
        let shared = &self.shared;
        match self.fault() {
            F::LapsedIsHeld if found.state == State::Lapsed => found.state = State::Held,
            F::HeldIsLapsed if found.state == State::Held => found.state = State::Lapsed,
            F::RemainingToTheEnd if found.state == State::InFlight => found.remaining += 48 * HOUR,
            F::AgeOfTheBeat if found.state == State::InFlight => {
                let beat = shared.beats.lock().unwrap()[&found.token.owner()];
                found.age = self.now() - beat;
            }
            F::SchemeForgotten => {
                let digest = *found.fingerprint.digest();
                found.fingerprint = Fingerprint::from_parts(Scheme::REQUEST_1, digest);
            }
            F::TimeOfTheNode => found.age += HOUR * self.node as u32,
            _ => {}
        }
        found
    }

    pub fn told(&self, claimed: Claimed) -> Claimed {
        match claimed {
            Claimed::Met(found) => Claimed::Met(self.shown(found)),
            Claimed::Won { checkpoint } => Claimed::Won {
                checkpoint: match self.fault() {
                    F::NoCheckpoints => None,
                    F::EmptyCheckpointIsNone => checkpoint.filter(|bytes| !bytes.is_empty()),
                    _ => checkpoint,
                },
            },
        }
    }

    /// A claim as this tier takes it down.
    pub fn taken_down(&self, mut claim: NewClaim) -> NewClaim {
        let (owner, number) = (claim.token.owner(), claim.token.number());
        match self.fault() {
            F::ClaimsNeverEnd => claim.retention = Duration::MAX,
            F::EndlessIsShort => {
                claim.retention = Duration::from_millis(claim.retention.as_millis() as u32 as u64);
            }
            F::ZeroIsForEver if claim.max_run < MS => claim.max_run = Duration::MAX,
            F::MaxRunIsNotLooked => claim.max_run = 1000 * HOUR,
            F::TokenAsFloat => claim.token = Token::new(owner, number as f64 as u64),
            F::TokenSigned => {
                claim.token = Token::new(owner, i64::try_from(number).unwrap_or(i64::MAX) as u64);
            }
            _ => {}
        }
        claim
    }

    pub fn landed(&self, landed: Landed) -> Landed {
        match landed {
            Landed::Lost(Some(found)) => Landed::Lost(Some(self.shown(found))),
            landed => landed,
        }
    }

    pub fn note(&self, name: &Name, claim: NewClaim, claimed: &Result<Claimed, TierError>) {
        if matches!(claimed, Ok(Claimed::Won { .. })) {
            let now = self.now();
            self.shared.claimed.lock().unwrap().insert(name.clone(), (claim, now));
        }
    }

    fn has_beaten(&self, owner: u64) -> bool {
        self.shared.beats.lock().unwrap().contains_key(&owner)
    }

    pub fn beats(&self, token: Token) -> bool {
        let beats = self.shared.beats.lock().unwrap();
        beats.get(&token.owner()).is_some_and(|at| *at + HOUR > self.now())
    }
}

impl Tier for Wrong {
    fn beat(&self, owner: u64, mut lease: Duration) -> Answer<'_, ()> {
        Box::pin(async move {
            let (now, tier) = (self.now(), self.tier());
            if self.fault() == F::FirstBeatsCollide && !self.has_beaten(owner) {
                others_come_in().await;
                if self.has_beaten(owner) {
                    return Err(TierError::unavailable("a row of this owner is there"));
                }
            }
            let last = self.shared.beats.lock().unwrap().insert(owner, now);
            match self.fault() {
                F::BeatPanics => panic!("a beat"),
                F::LateBeatIsTooLate if last.is_some_and(|at| at + HOUR <= now) => return Ok(()),
                F::BeatsAddUp => {
                    let left = last.map_or(Duration::ZERO, |at| (at + HOUR).saturating_sub(now));
                    lease += left;
                }
                F::OneBeatForAll => {
                    let all: Vec<_> = self.shared.beats.lock().unwrap().keys().copied().collect();
                    for owner in all {
                        tier.beat(owner, lease).await?;
                    }
                }
                F::TimeOfTheNode => lease += HOUR * self.node as u32,
                F::ZeroIsForEver if lease < MS => lease = Duration::MAX,
                F::BeatRevivesWhatWasTaken => {
                    let claimed = self.shared.claimed.lock().unwrap().clone();
                    for (name, (claim, _)) in claimed {
                        let is_own = claim.token.owner() == owner;
                        let token = self.token(&name).await;
                        let is_taken = token.is_some_and(|it| it != claim.token);
                        let state = self.state(&name).await;
                        if is_own && is_taken && state == Some(State::InFlight) {
                            tier.beat(owner, lease).await?;
                            self.seize(&name, claim).await?;
                        }
                    }
                }
                _ => {}
            }
            tier.beat(owner, lease).await
        })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        Box::pin(async move {
            let name = self.name(id);
            let claimed = self.claim_wrongly(&name, claim).await;
            self.note(&name, claim, &claimed);
            claimed.map(|claimed| self.told(claimed))
        })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        Box::pin(async move {
            let name = self.name(id);
            let claimed = self.take_over_wrongly(&name, seen, claim).await;
            if self.fault() != F::BeatRevivesWhatWasTaken {
                self.note(&name, claim, &claimed);
            }
            claimed.map(|claimed| self.told(claimed))
        })
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let name = self.name(id);
            let landed = self.complete_wrongly(&name, token, outcome, retention).await?;
            Ok(self.landed(landed))
        })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(async move {
            let name = self.name(id);
            let token = self.token_for("release", &name, token).await;
            let there = self.found(&name).await;
            let is_own = there.as_ref().is_some_and(|it| it.token == token);
            if self.fault() == F::CompletedIsReleased && is_own {
                self.tier().forget(name.get(), true).await?;
                return Ok(Landed::Done);
            }
            if self.fault() == F::HalfARelease && is_own {
                let landed = self.tier().hold(name.get(), token, HOUR).await?;
                others_come_in().await;
                if landed != Landed::Done {
                    return Ok(landed);
                }
            }
            let landed = self.tier().release(name.get(), token).await?;
            if landed == Landed::Done {
                self.shared.claimed.lock().unwrap().remove(&name);
            }
            Ok(self.landed(landed))
        })
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        mut retention: Duration,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let name = self.name(id);
            let token = self.token_for("hold", &name, token).await;
            match self.fault() {
                F::HeldForEver => retention = Duration::MAX,
                F::CompletedIsHeld if self.token(&name).await == Some(token) => {
                    let (claim, _) = self.shared.claimed.lock().unwrap()[&name];
                    self.seize(&name, claim).await?;
                }
                _ => {}
            }
            let landed = self.tier().hold(name.get(), token, retention).await?;
            Ok(self.landed(landed))
        })
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        Box::pin(async move {
            let name = self.name(id);
            let token = self.token_for("lapse", &name, token).await;
            let landed = match self.fault() {
                F::LapseIsARelease => self.tier().release(name.get(), token).await?,
                F::LapseLeavesNothing => {
                    let _ = self.tier().checkpoint(name.get(), token, Bytes::new()).await?;
                    self.tier().lapse(name.get(), token).await?
                }
                _ => self.tier().lapse(name.get(), token).await?,
            };
            Ok(self.landed(landed))
        })
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        mut bytes: Bytes,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let name = self.name(id);
            let token = self.token_for("checkpoint", &name, token).await;
            if self.fault() == F::CheckpointsAddUp {
                let left = self.shared.left.lock().unwrap().get(&name).cloned();
                bytes = [left.unwrap_or_default(), bytes].concat().into();
            }
            let landed = self.tier().checkpoint(name.get(), token, bytes.clone()).await?;
            if landed == Landed::Done {
                self.shared.left.lock().unwrap().insert(name, bytes);
            }
            Ok(self.landed(landed))
        })
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        Box::pin(async move {
            let name = self.name(id);
            let found = self.found(&name).await.map(|found| self.shown(found));
            if self.fault() == F::AbsentIsCached {
                let cached = (self.node, name);
                let mut all = self.shared.cached.lock().unwrap();
                return Ok(all.entry(cached).or_insert(found.clone()).as_ref().and(found));
            }
            Ok(found)
        })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, mut forced: bool) -> Answer<'a, Forgotten> {
        Box::pin(async move {
            let name = self.name(id);
            match self.fault() {
                F::ForgetHangs => std::future::pending().await,
                F::ForgetsTheLiving => forced = true,
                F::ForcedIsNotForced => forced = false,
                F::ForgetsNoLapsed if self.state(&name).await == Some(State::Lapsed) => {
                    return Ok(Forgotten::Busy);
                }
                _ => {}
            }
            let forgotten = self.tier().forget(name.get(), forced).await?;
            if forgotten == Forgotten::Gone {
                self.shared.claimed.lock().unwrap().remove(&name);
            }
            Ok(forgotten)
        })
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        Box::pin(async move {
            let name = self.name(id);
            self.resolve_wrongly(&name, outcome, retention).await
        })
    }

    fn reap(&self, mut most: usize) -> Answer<'_, usize> {
        Box::pin(async move {
            let claimed = || self.shared.claimed.lock().unwrap().clone();
            match self.fault() {
                F::ReapedWithoutLooking => {
                    let mut ended = Vec::new();
                    for (name, _) in claimed() {
                        if self.found(&name).await.is_none() {
                            ended.push(name);
                        }
                    }
                    others_come_in().await;
                    for name in ended {
                        self.tier().forget(name.get(), true).await?;
                    }
                }
                F::ReapsTheLapsed => {
                    for (name, _) in claimed() {
                        if self.state(&name).await == Some(State::Lapsed) {
                            self.tier().forget(name.get(), false).await?;
                        }
                    }
                }
                F::EndsOnceReaped => {
                    for (name, _) in claimed() {
                        if self.found(&name).await.is_none() {
                            self.shared.claimed.lock().unwrap().remove(&name);
                        }
                    }
                }
                F::ReapForgetsOwners => {
                    for (name, (claim, _)) in claimed() {
                        if self.state(&name).await == Some(State::Lapsed) {
                            self.seize_as_dead(&name, claim).await?;
                        }
                    }
                }
                F::ReapsMoreThanAsked => most = most.saturating_mul(2).max(1),
                F::ReapNeverEnds => return Ok(most),
                _ => {}
            }
            self.tier().reap(most).await
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        Box::pin(async move {
            let asked = match self.fault() {
                F::PresentPointTellsAll => since.or(Some(0)),
                _ => since,
            };
            let mut recalls = self.tier().recalls(asked).await?;
            match self.fault() {
                F::NothingIsTold => recalls.identities.clear(),
                F::ResolvedIsNotTold => {
                    recalls.identities.retain(|id| !id[2].starts_with(b"resolved"));
                }
                F::ToldToOneNode if !recalls.identities.is_empty() => {
                    let told = &mut *self.shared.told.lock().unwrap();
                    if *told != 0 && *told != self.node {
                        recalls.identities.clear();
                    } else {
                        *told = self.node;
                    }
                }
                F::ToldForSeconds => {
                    let claimed = self.shared.claimed.lock().unwrap();
                    let now = self.now();
                    recalls.identities.retain(|id| {
                        claimed
                            .get(&Name(id.clone()))
                            .is_none_or(|(_, at)| *at + Duration::from_secs(5) > now)
                    });
                }
                F::ToldAsText => {
                    for id in &mut recalls.identities {
                        id[0] = as_text(&id[0]);
                    }
                }
                F::PointAhead => recalls.now += 1,
                _ => {}
            }
            Ok(recalls)
        })
    }

    fn settled<'a>(&'a self, id: Identity<'a>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        if self.fault() == F::WaitingTakesAPlace {
            return Box::pin(async move {
                let _place = self.shared.places.acquire().await.unwrap();
                std::future::pending().await
            });
        }
        self.tier().settled(id)
    }
}

impl Wrong {
    /// Leaves `name` to an owner that nobody is.
    async fn seize_as_dead(&self, name: &Name, claim: NewClaim) -> Result<(), TierError> {
        let token = Token::new(7, claim.token.number());
        self.tier().beat(7, Duration::from_millis(1)).await?;
        self.seize(name, NewClaim { token, ..claim }).await?;
        self.tier().beat(7, Duration::ZERO).await
    }
}
