//! What the checks are written with: nodes whose answers are awaited under a watchdog, identities
//! and owners that no other check has, and the expectations that all of them share.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;

use super::{Failure, Host};
use crate::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    sync::{Arc, AtomicU64, Ordering},
    tier::{
        Answer, Claimed, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, State, Tier,
        TierError,
    },
};

// Spans that lie hours apart: a clock that goes on by itself moves no answer from one to another.
pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(60 * 60);
/// How long an owner beats.
pub(super) const LEASE: Duration = HOUR;
pub(super) const MAX_RUN: Duration = Duration::from_secs(6 * 60 * 60);
pub(super) const RETENTION: Duration = Duration::from_secs(48 * 60 * 60);
/// What the tier's own clock may go on by between two steps of a check.
pub(super) const MARGIN: Duration = Duration::from_secs(10 * 60);
/// What a tier may round by.
pub(super) const SECOND: Duration = Duration::from_secs(1);

/// How a check ends.
pub(super) type Verdict = Result<(), Failure>;

/// Which check is at work, and for which rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) rule: u8,
    pub(super) check: &'static str,
}

impl At {
    pub(super) fn failed<T>(self, seen: impl Into<String>) -> Result<T, Failure> {
        Err(Failure { rule: self.rule, check: self.check, seen: seen.into() })
    }

    pub(super) fn ensure(self, holds: bool, seen: impl FnOnce() -> String) -> Verdict {
        if holds { Ok(()) } else { self.failed(seen()) }
    }

    /// The answer of `what`, if it comes while there is patience.
    async fn wait<T>(
        self,
        patience: Duration,
        what: &str,
        answer: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(patience, answer).await {
            Ok(answer) => Ok(answer),
            Err(_) => self.failed(format!("`{what}` did not answer in {patience:?}")),
        }
    }
}

/// What all checks of one run share.
pub(super) struct Run<'h> {
    host: &'h dyn Host,
    nodes: Vec<Arc<dyn Tier>>,
    /// Tells this run's identities from those of an earlier one on the same tier.
    salt: u64,
    owners: AtomicU64,
}

impl<'h> Run<'h> {
    /// A run on `nodes` handles.
    pub(super) async fn new(host: &'h dyn Host, nodes: usize) -> Result<Self, Failure> {
        let at = At { rule: 0, check: "opening" };
        let mut handles = Vec::new();
        for _ in 0..nodes {
            handles.push(at.wait(host.patience(), "Host::node", host.node()).await?);
        }
        let owners = AtomicU64::new(random());
        Ok(Self { host, nodes: handles, salt: random(), owners })
    }

    pub(super) fn probe(&self, rule: u8, check: &'static str) -> Probe<'_> {
        Probe { run: self, at: At { rule, check }, part: "" }
    }
}

/// How a check ends, and be it by a panic of the tier.
pub(super) async fn caught(probe: Probe<'_>, check: impl Future<Output = Verdict>) -> Verdict {
    let mut check = pin!(check);
    let caught = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| check.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    });
    match caught.await {
        Ok(verdict) => verdict,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or(panic.downcast_ref::<String>().map(String::as_str));
            probe.at.failed(format!("a panic: {}", text.unwrap_or("of some type")))
        }
    }
}

fn random() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    RandomState::new().build_hasher().finish()
}

/// One check at work.
#[derive(Clone, Copy)]
pub(super) struct Probe<'r> {
    run: &'r Run<'r>,
    pub(super) at: At,
    /// Which part of the check, if its identities are made more than once.
    part: &'static str,
}

impl Probe<'_> {
    /// One of the handles, by number.
    pub(super) fn node(&self, number: usize) -> Node {
        let tier = Arc::clone(&self.run.nodes[number % self.run.nodes.len()]);
        Node { tier, at: self.at, patience: self.run.host.patience() }
    }

    /// A new handle.
    pub(super) async fn opened(&self) -> Result<Node, Failure> {
        let host = self.run.host;
        let tier = self.at.wait(host.patience(), "Host::node", host.node()).await?;
        Ok(Node { tier, at: self.at, patience: host.patience() })
    }

    /// The same check with other identities.
    pub(super) fn named(&self, part: &'static str) -> Self {
        Self { part, ..*self }
    }

    pub(super) fn is_shared(&self) -> bool {
        self.run.host.is_shared()
    }

    pub(super) async fn advance(&self, by: Duration) -> Verdict {
        self.at.wait(self.run.host.patience(), "Host::advance", self.run.host.advance(by)).await
    }

    /// An identity that only this check of this run has.
    pub(super) fn id(&self, key: &str) -> Result<Id, Failure> {
        self.id_of("", "", key)
    }

    /// As [`id`](Self::id), with something at the end of its account and endpoint.
    pub(super) fn id_of(
        &self,
        account: impl AsRef<[u8]>,
        endpoint: impl AsRef<[u8]>,
        key: &str,
    ) -> Result<Id, Failure> {
        let own = [self.at.check, self.part].concat();
        self.bare_id(account, [own.as_bytes(), endpoint.as_ref()].concat(), key)
    }

    /// As [`id_of`](Self::id_of), with nothing but `endpoint` between account and key.
    pub(super) fn bare_id(
        &self,
        account: impl AsRef<[u8]>,
        endpoint: impl AsRef<[u8]>,
        key: &str,
    ) -> Result<Id, Failure> {
        let account = [self.account().as_bytes(), account.as_ref()].concat();
        let endpoint = endpoint.as_ref().to_vec();
        match Identity::new(&account, &endpoint, key) {
            Ok(_) => Ok(Id([account, endpoint, key.into()])),
            Err(error) => self.at.failed(format!("the check itself: {error}")),
        }
    }

    /// The account of this run, 16 bytes.
    pub(super) fn account(&self) -> String {
        format!("{:016x}", self.run.salt)
    }

    /// An owner that does not beat yet.
    pub(super) fn silent_owner(&self) -> Owner {
        // Far from zero and from each other, as random ones are.
        let step = 0x9e37_79b9_7f4a_7c15;
        let owner = self.run.owners.fetch_add(step, Ordering::Relaxed) | 1;
        Owner { owner, numbers: Arc::new(AtomicU64::new(1)) }
    }

    /// An owner that beats for [`LEASE`] from now on.
    pub(super) async fn owner(&self) -> Result<Owner, Failure> {
        let owner = self.silent_owner();
        self.node(0).beat(owner.owner, LEASE).await?;
        Ok(owner)
    }
}

/// A process: its claims have tokens of their own.
#[derive(Clone)]
pub(super) struct Owner {
    pub(super) owner: u64,
    numbers: Arc<AtomicU64>,
}

impl Owner {
    /// A new claim, for the usual spans.
    pub(super) fn claim(&self) -> NewClaim {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        claim_of(Token::new(self.owner, number))
    }
}

/// The claim of `token`, for the usual spans; its fingerprint is the token's own.
pub(super) fn claim_of(token: Token) -> NewClaim {
    let mut digest = [0xfe; 32];
    digest[..8].copy_from_slice(&token.owner().to_le_bytes());
    digest[8..16].copy_from_slice(&token.number().to_be_bytes());
    let fingerprint = Fingerprint::from_parts(Scheme::named("conformance-1"), digest);
    NewClaim { token, fingerprint, max_run: MAX_RUN, retention: RETENTION }
}

/// An outcome that can be told from others.
pub(super) fn outcome(body: &str) -> Outcome {
    Outcome::new(201).header("location", "/charges/1").body(body.to_owned())
}

/// An identity that owns its parts.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Id(pub(super) [Vec<u8>; 3]);

impl Id {
    /// Which was good when the parts were put together.
    pub(super) fn get(&self, at: At) -> Result<Identity<'_>, Failure> {
        let [account, endpoint, key] = &self.0;
        Identity::new(account, endpoint, key)
            .or_else(|error| at.failed(format!("the check itself: {error}")))
    }
}

/// A step that needs the token of an open claim (rule 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Complete,
    NotKept,
    Release,
    Hold,
    Checkpoint,
    Lapse,
}

impl Step {
    pub(super) const ALL: [Self; 6] =
        [Self::Complete, Self::NotKept, Self::Release, Self::Hold, Self::Checkpoint, Self::Lapse];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::NotKept => "complete as not kept",
            Self::Release => "release",
            Self::Hold => "hold",
            Self::Checkpoint => "checkpoint",
            Self::Lapse => "lapse",
        }
    }
}

/// A handle of the tier. Every answer comes in time or is a failure, and so is an error.
#[derive(Clone)]
pub(super) struct Node {
    tier: Arc<dyn Tier>,
    pub(super) at: At,
    pub(super) patience: Duration,
}

impl Node {
    /// The same handle, for something that another rule says.
    pub(super) fn under(&self, rule: u8) -> Self {
        Self { at: At { rule, ..self.at }, ..self.clone() }
    }

    pub(super) fn tier(&self) -> &dyn Tier {
        &*self.tier
    }

    async fn answer<T>(&self, verb: &str, answer: Answer<'_, T>) -> Result<T, Failure> {
        match self.at.wait(self.patience, verb, answer).await? {
            Ok(answer) => Ok(answer),
            Err(error) => self.at.failed(format!("`{verb}` failed: {error}")),
        }
    }

    pub(super) async fn beat(&self, owner: u64, lease: Duration) -> Verdict {
        self.answer("beat", self.tier.beat(owner, lease)).await
    }

    pub(super) async fn claim(&self, id: &Id, claim: NewClaim) -> Result<Claimed, Failure> {
        self.answer("claim", self.tier.claim(id.get(self.at)?, claim)).await
    }

    pub(super) async fn take_over(
        &self,
        id: &Id,
        seen: Token,
        claim: NewClaim,
    ) -> Result<Claimed, Failure> {
        self.answer("take_over", self.tier.take_over(id.get(self.at)?, seen, claim)).await
    }

    pub(super) async fn complete(
        &self,
        id: &Id,
        token: Token,
        outcome: Option<&Outcome>,
        retention: Duration,
    ) -> Result<Landed, Failure> {
        let answer = self.tier.complete(id.get(self.at)?, token, outcome, retention);
        self.answer("complete", answer).await
    }

    pub(super) async fn release(&self, id: &Id, token: Token) -> Result<Landed, Failure> {
        self.answer("release", self.tier.release(id.get(self.at)?, token)).await
    }

    pub(super) async fn lapse(&self, id: &Id, token: Token) -> Result<Landed, Failure> {
        self.answer("lapse", self.tier.lapse(id.get(self.at)?, token)).await
    }

    pub(super) async fn hold(
        &self,
        id: &Id,
        token: Token,
        retention: Duration,
    ) -> Result<Landed, Failure> {
        self.answer("hold", self.tier.hold(id.get(self.at)?, token, retention)).await
    }

    pub(super) async fn checkpoint(
        &self,
        id: &Id,
        token: Token,
        bytes: impl Into<Bytes>,
    ) -> Result<Landed, Failure> {
        let answer = self.tier.checkpoint(id.get(self.at)?, token, bytes.into());
        self.answer("checkpoint", answer).await
    }

    pub(super) async fn look_up(&self, id: &Id) -> Result<Option<Found>, Failure> {
        self.answer("look_up", self.tier.look_up(id.get(self.at)?)).await
    }

    pub(super) async fn forget(&self, id: &Id, forced: bool) -> Result<Forgotten, Failure> {
        self.answer("forget", self.tier.forget(id.get(self.at)?, forced)).await
    }

    pub(super) async fn resolve(
        &self,
        id: &Id,
        outcome: Option<&Outcome>,
    ) -> Result<Resolved, Failure> {
        let answer = self.tier.resolve(id.get(self.at)?, outcome, RETENTION);
        self.answer("resolve", answer).await
    }

    pub(super) async fn reap(&self, most: usize) -> Result<usize, Failure> {
        self.answer("reap", self.tier.reap(most)).await
    }

    pub(super) async fn recalls(&self, since: Option<u64>) -> Result<Recalls, Failure> {
        self.answer("recalls", self.tier.recalls(since)).await
    }

    /// The end of a call that may be given up before it has ended.
    pub(super) async fn given_up<T>(&self, call: impl Future<Output = T>) -> Result<T, Failure> {
        self.at.wait(self.patience, "a call that is given up", call).await
    }

    pub(super) async fn step(&self, step: Step, id: &Id, token: Token) -> Result<Landed, Failure> {
        match step {
            Step::Complete => self.complete(id, token, Some(&outcome("a step")), RETENTION).await,
            Step::NotKept => self.complete(id, token, None, RETENTION).await,
            Step::Release => self.release(id, token).await,
            Step::Hold => self.hold(id, token, RETENTION).await,
            Step::Checkpoint => self.checkpoint(id, token, "a step").await,
            Step::Lapse => self.lapse(id, token).await,
        }
    }

    /// A claim that must win.
    pub(super) async fn win(&self, id: &Id, claim: NewClaim) -> Result<Option<Bytes>, Failure> {
        let claimed = self.claim(id, claim).await?;
        self.won("claim", claimed)
    }

    /// A claim of its own for `owner`, which must win, with nothing that another has left.
    pub(super) async fn won_by(&self, id: &Id, owner: &Owner) -> Result<Token, Failure> {
        let claim = owner.claim();
        let left = self.win(id, claim).await?;
        self.at.ensure(left.is_none(), || {
            "a claim of what was absent was handed a checkpoint".to_owned()
        })?;
        Ok(claim.token)
    }

    /// A claim that must meet something.
    pub(super) async fn meet(&self, id: &Id, claim: NewClaim) -> Result<Found, Failure> {
        let claimed = self.claim(id, claim).await?;
        self.met("claim", claimed)
    }

    pub(super) fn won(&self, verb: &str, claimed: Claimed) -> Result<Option<Bytes>, Failure> {
        match claimed {
            Claimed::Won { checkpoint } => Ok(checkpoint),
            Claimed::Met(found) => {
                self.at.failed(format!("`{verb}` should have won, and met {found:?}"))
            }
        }
    }

    pub(super) fn met(&self, verb: &str, claimed: Claimed) -> Result<Found, Failure> {
        match claimed {
            Claimed::Met(found) => Ok(found),
            Claimed::Won { .. } => self.at.failed(format!("`{verb}` won where it must not")),
        }
    }

    /// A step that must be done.
    pub(super) async fn does(&self, step: Step, id: &Id, token: Token) -> Verdict {
        let landed = self.step(step, id, token).await?;
        self.done(step.name(), landed)
    }

    pub(super) fn done(&self, verb: &str, landed: Landed) -> Verdict {
        match landed {
            Landed::Done => Ok(()),
            Landed::Lost(found) => {
                let there = shown(found.as_ref());
                self.at.failed(format!("`{verb}` should be done, and is lost to {there}"))
            }
        }
    }

    /// What a step is told that must be lost.
    pub(super) fn lost(&self, verb: &str, landed: Landed) -> Result<Option<Found>, Failure> {
        match landed {
            Landed::Lost(found) => Ok(found),
            Landed::Done => self.at.failed(format!("`{verb}` should be lost, and is done")),
        }
    }

    /// Fails unless `id` is there in this state.
    pub(super) async fn sees(&self, id: &Id, state: &State) -> Result<Found, Failure> {
        let found = self.look_up(id).await?;
        match found {
            Some(found) if found.state == *state => Ok(found),
            other => {
                let there = shown(other.as_ref());
                self.at.failed(format!("expected {state:?}, and there is {there}"))
            }
        }
    }

    pub(super) async fn sees_nothing(&self, id: &Id) -> Verdict {
        let found = self.look_up(id).await?;
        self.at.ensure(found.is_none(), || {
            format!("expected nothing, and there is {}", shown(found.as_ref()))
        })
    }

    /// An outcome that must be there.
    pub(super) async fn replays(&self, id: &Id, outcome: &Outcome) -> Result<Found, Failure> {
        self.sees(id, &State::Completed(outcome.clone())).await
    }

    /// A claim or takeover that must be refused because its owner does not beat.
    pub(super) async fn refused(&self, verb: &str, answer: Answer<'_, Claimed>) -> Verdict {
        match self.at.wait(self.patience, verb, answer).await? {
            Err(TierError::OwnerLapsed) => Ok(()),
            Err(error) => self.at.failed(format!("`{verb}` failed: {error}")),
            Ok(claimed) => self.at.failed(format!(
                "`{verb}` by an owner that does not beat was answered {claimed:?}"
            )),
        }
    }

    pub(super) async fn claim_is_refused(&self, id: &Id, claim: NewClaim) -> Verdict {
        self.refused("claim", self.tier.claim(id.get(self.at)?, claim)).await
    }

    pub(super) async fn take_over_is_refused(
        &self,
        id: &Id,
        seen: Token,
        claim: NewClaim,
    ) -> Verdict {
        self.refused("take_over", self.tier.take_over(id.get(self.at)?, seen, claim)).await
    }

    /// Fails unless `age` has passed and `remaining` is left, but for what the clock went on by.
    pub(super) fn times(&self, found: &Found, age: Duration, remaining: Duration) -> Verdict {
        self.aged(found, age)?;
        let left = found.remaining;
        self.at.ensure(left + MARGIN >= remaining && left <= remaining + SECOND, || {
            format!("expected {remaining:?} to remain, at most {MARGIN:?} less: {found:?}")
        })
    }

    pub(super) fn aged(&self, found: &Found, age: Duration) -> Verdict {
        self.at.ensure(found.age + SECOND >= age && found.age <= age + MARGIN, || {
            format!("expected an age of {age:?}, at most {MARGIN:?} more: {found:?}")
        })
    }

    pub(super) fn is_of(&self, found: &Found, claim: &NewClaim) -> Verdict {
        let is_of = found.token == claim.token && found.fingerprint == claim.fingerprint;
        self.at.ensure(is_of, || {
            let token = claim.token;
            format!("expected the token and fingerprint of {token}, and there is {found:?}")
        })
    }
}

pub(super) fn shown(found: Option<&Found>) -> String {
    found.map_or_else(|| "nothing".to_owned(), |found| format!("{found:?}"))
}
