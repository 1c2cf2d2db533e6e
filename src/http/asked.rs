//! One request that was let in, and what the store and we can answer it with.

use std::{sync::Arc, time::Duration};

use http::{Method, Response, Version, request::Parts};
use tokio::time::Instant;

use super::{
    attempt::Caller,
    backing::Told,
    body::ResponseBody,
    endpoint,
    intake::{Charge, Received},
    layer::{Config, Over, Slot},
    policy::Policy,
    prefer,
    problem::Problem,
    reply,
    shares::Of,
    watch::{Ending, Watch},
};
use crate::{Claim, ClaimError, Fingerprint, NotClaimed, Outcome, Replay, Scheme};

/// What is known of a request from its head, captured before anything ran (R12).
#[derive(Clone)]
pub(crate) struct Asked {
    pub(crate) config: Arc<Config>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) caller: Arc<Caller>,
    /// How long this client waits for the owner (R13).
    pub(crate) wait_limit: Duration,
    pub(crate) watch: Watch,
    /// For the veto, if there is one.
    parts: Option<Arc<Parts>>,
    pub(crate) method: Method,
    version: Version,
    /// Of its identity, for the store.
    hash: u64,
}

impl Asked {
    pub(crate) fn new(
        config: Arc<Config>,
        policy: Arc<Policy>,
        caller: Arc<Caller>,
        parts: &Parts,
    ) -> Self {
        let watch = Watch::new(&caller);
        Self::watched(config, policy, caller, parts, watch)
    }

    fn watched(
        config: Arc<Config>,
        policy: Arc<Policy>,
        caller: Arc<Caller>,
        parts: &Parts,
        watch: Watch,
    ) -> Self {
        let wait_limit = match prefer::wait(&parts.headers) {
            Some(wait) => wait.min(policy.wait_cap.max(policy.wait_limit)),
            None => policy.wait_limit,
        };
        // What the claim will read is on its way while the body comes in and is hashed.
        let ask = |identity| config.backing.store().ask_for(&identity);
        let hash = caller.identity().map_or(0, ask);
        let (method, version) = (parts.method.clone(), parts.version);
        let parts = policy.veto.keeps(parts);
        Self { config, policy, caller, wait_limit, watch, parts, method, version, hash }
    }

    /// One that attaches: no attempt that logs and metrics are told of.
    pub(crate) fn attached(
        config: Arc<Config>,
        policy: Arc<Policy>,
        caller: Arc<Caller>,
        parts: &Parts,
    ) -> Self {
        let watch = Watch::silent(&caller);
        Self::watched(config, policy, caller, parts, watch)
    }

    /// The fingerprint by the scheme of the policy.
    pub(crate) fn fingerprint(&self, parts: &Parts, received: &Received) -> Fingerprint {
        let path = endpoint::path(parts);
        self.policy.fingerprint.of(parts, path, received.bytes.as_ref())
    }

    /// What its body takes of the budget: nothing yet.
    pub(crate) fn charge(&self) -> Charge {
        let caps = &self.config.caps;
        Charge::new(&caps.budget, caps.share(&self.caller, Of::Buffered))
    }

    /// Claims. Where nothing is there, a place for an owner is taken before, and comes along.
    pub(crate) fn claim(
        &self,
        fingerprint: Fingerprint,
        translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Result<(Claim, Option<Slot>), NotClaimed<Over>> {
        // The parts were measured when the request was let in, so there is an identity.
        let Ok(identity) = self.caller.identity() else {
            return Err(NotClaimed::Refused(Over::All));
        };
        let place = || self.config.caps.slot(&self.caller);
        let store = self.config.backing.store();
        store.claim_admitted(&identity, self.hash, fingerprint, translate, place)
    }

    /// Whether a mismatch is one; see `Backing::judge`.
    pub(super) async fn judge(
        &self,
        fingerprint: Fingerprint,
        translate: impl FnMut(Scheme) -> Option<Fingerprint>,
        since: Instant,
    ) -> Option<Told> {
        let Ok(identity) = self.caller.identity() else { return Some(Told::Mismatch) };
        self.config.backing.judge(identity, fingerprint, translate, since).await
    }

    /// What is there, claiming nothing.
    pub(crate) fn observe(&self, fingerprint: Fingerprint) -> Option<Claim> {
        let identity = self.caller.identity().ok()?;
        self.config.backing.store().observe(&identity, fingerprint)
    }

    pub(crate) fn answer<R>(&self, problem: Problem) -> Response<ResponseBody<R>> {
        self.watch.end(Ending::Refused(problem));
        problem.answer(&self.policy.problem_base)
    }

    pub(crate) fn too_busy<R>(&self) -> Response<ResponseBody<R>> {
        self.config.counters.too_busy.up();
        self.answer(Problem::TooBusy)
    }

    /// Without a place for an owner, or for its bytes.
    pub(crate) fn over<R>(&self, over: Over) -> Response<ResponseBody<R>> {
        match over {
            Over::Account => self.answer(Problem::AccountOverShare),
            Over::All => self.too_busy(),
        }
    }

    pub(crate) fn refused<R>(&self, error: ClaimError) -> Response<ResponseBody<R>> {
        let (problem, retry_after) = match error {
            ClaimError::Full { retry_after } => (Problem::StoreFull, Some(retry_after)),
            ClaimError::AccountFull { retry_after } => {
                (Problem::AccountOverShare, Some(retry_after))
            }
            ClaimError::Draining => {
                let detail = "the server is about to stop; nothing was done, \
                              ask again later with the same key";
                self.watch.end(Ending::Refused(Problem::TooBusy));
                return Problem::TooBusy.answer_with(&self.policy.problem_base, detail, None);
            }
        };
        self.watch.end(Ending::Refused(problem));
        problem.answer_with(&self.policy.problem_base, problem.detail(), retry_after)
    }

    /// The tier did not answer (T2).
    pub(crate) fn unavailable<R>(&self, retry_after: Duration) -> Response<ResponseBody<R>> {
        let problem = Problem::TierUnavailable;
        self.watch.end(Ending::Refused(problem));
        problem.answer_with(&self.policy.problem_base, problem.detail(), Some(retry_after))
    }

    /// What is stored.
    pub(crate) fn replay<R>(&self, replay: &Replay) -> Response<ResponseBody<R>> {
        self.hand_back(replay.outcome(), Some(replay))
    }

    /// What an owner left to those who waited when it released the key (R14). It is not marked: a
    /// replay is final, and this key may be sent again.
    pub(crate) fn released<R>(&self, outcome: &Outcome) -> Response<ResponseBody<R>> {
        let mut response = self.hand_back(outcome, None);
        response.headers_mut().remove(&self.policy.replay_header);
        response
    }

    /// An outcome for the one whose run has made it: no replay.
    #[cfg(feature = "tier")]
    pub(crate) fn first<R>(&self, outcome: &Outcome) -> Response<ResponseBody<R>> {
        let mut response = reply::replay(&self.policy, outcome, &self.method, self.version);
        response.headers_mut().remove(&self.policy.replay_header);
        response
    }

    /// An outcome as it came out of the store or was made for it; `replay` if it is stored.
    pub(crate) fn hand_back<R>(
        &self,
        outcome: &Outcome,
        replay: Option<&Replay>,
    ) -> Response<ResponseBody<R>> {
        let Self { policy, caller, .. } = self;
        if !policy.veto.allows(self.parts.as_deref(), caller) {
            return self.answer(Problem::ReplayRefused);
        }
        let Some(outcome) = policy.seal.open(caller, outcome) else {
            return self.answer(Problem::ResponseNotKept);
        };
        self.watch.replayed(replay.map(Replay::age));
        let mut response = reply::replay(policy, &outcome, &self.method, self.version);
        if let Some(replay) = replay {
            reply::say_when_it_expires(policy, replay.remaining(), response.headers_mut());
        }
        response
    }
}
