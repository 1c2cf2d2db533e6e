//! Every verb, given up at every await: the step has happened whole or not at all, and the tier
//! goes on as if its answer had been lost.

use std::{
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll},
};

use super::{
    Failure,
    probe::{
        Id, LEASE, MAX_RUN, Node, Owner, Probe, RETENTION, SECOND, Step, Verdict, claim_of,
        outcome, shown,
    },
};
use crate::{
    Token,
    tier::{Claimed, Forgotten, Landed, NewClaim, Resolved, State, TierError},
};

/// Beyond so many polls a future is taken for one that wakes itself, and not given up later.
const MOST: usize = 100;

/// When a future is dropped that has been polled often enough.
#[derive(Clone, Copy, Debug)]
enum When {
    /// At once: what it waits for has not come.
    Pending,
    /// When it is woken: what it waits for has come, and it was not told.
    Woken,
}

/// Polls a future `left` times, each time when it is woken, and drops it: `None`. `Some` if it has
/// ended before that.
struct Cut<'a, T> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send + 'a>>>,
    left: usize,
    when: When,
}

impl<T> Future for Cut<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(future) = this.future.as_mut().filter(|_| this.left > 0) else {
            this.future = None;
            return Poll::Ready(None);
        };
        this.left -= 1;
        if let Poll::Ready(answer) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(answer));
        }
        if this.left == 0 && matches!(this.when, When::Pending) {
            this.future = None;
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Beat,
    Claim,
    TakeOver,
    Step(Step),
    LookUp,
    Forget,
    ForgetForced,
    Resolve,
    ResolveAway,
    Reap,
    Recalls,
}

/// What a verb finds, and what it leaves.
struct Scene {
    id: Id,
    owner: Owner,
    /// Whose claim is there before, if one is.
    first: Token,
    /// What the verb claims with, if it claims.
    claim: NewClaim,
    before: Option<State>,
    after: Option<State>,
}

impl Verb {
    fn scene(self) -> (Option<State>, Option<State>) {
        let completed = || Some(State::Completed(outcome("a step")));
        match self {
            Self::Beat => (None, None),
            Self::Claim => (None, Some(State::InFlight)),
            Self::TakeOver => (Some(State::Held), Some(State::InFlight)),
            Self::Step(step) => {
                let after = match step {
                    Step::Complete => completed(),
                    Step::NotKept => Some(State::NotKept),
                    Step::Release => None,
                    Step::Hold => Some(State::Held),
                    Step::Checkpoint => Some(State::InFlight),
                    Step::Lapse => Some(State::Lapsed),
                };
                (Some(State::InFlight), after)
            }
            Self::LookUp | Self::Reap | Self::Recalls => {
                (Some(State::InFlight), Some(State::InFlight))
            }
            Self::Forget => (completed(), None),
            Self::ForgetForced => (Some(State::InFlight), None),
            Self::Resolve => (Some(State::Held), completed()),
            Self::ResolveAway => (Some(State::Held), None),
        }
    }

    async fn set(self, p: Probe<'_>, id: Id) -> Result<Scene, Failure> {
        let node = p.node(0);
        let owner = if self == Self::Beat { p.silent_owner() } else { p.owner().await? };
        let (before, after) = self.scene();
        let (first, claim) = (owner.claim(), owner.claim());
        if let Some(state) = &before {
            node.win(&id, first).await?;
            node.does(Step::Checkpoint, &id, first.token).await?;
            match state {
                State::Held => node.does(Step::Hold, &id, first.token).await?,
                State::Completed(_) => node.does(Step::Complete, &id, first.token).await?,
                _ => {}
            }
        }
        Ok(Scene { id, owner, first: first.token, claim, before, after })
    }

    /// Does it and gives it up after so many polls. Whether it has ended before that.
    async fn cut(
        self,
        node: &Node,
        scene: &Scene,
        polls: usize,
        when: When,
    ) -> Result<bool, Failure> {
        let (tier, id) = (node.tier(), scene.id.get(node.at)?);
        let (first, claim) = (scene.first, scene.claim);
        let (body, left) = (outcome("a step"), || "a step".into());
        // All answers are of different types, of which nothing but the error is looked at.
        macro_rules! cut {
            ($verb:expr) => {{
                let cut = Cut { future: Some($verb), left: polls, when };
                match node.given_up(cut).await? {
                    None => Ok(false),
                    Some(Ok(_)) => Ok(true),
                    Some(Err(error)) => refused(node, self, &error),
                }
            }};
        }
        match self {
            Self::Beat => cut!(tier.beat(scene.owner.owner, LEASE)),
            Self::Claim => cut!(tier.claim(id, claim)),
            Self::TakeOver => cut!(tier.take_over(id, first, claim)),
            Self::Step(Step::Complete) => cut!(tier.complete(id, first, Some(&body), RETENTION)),
            Self::Step(Step::NotKept) => cut!(tier.complete(id, first, None, RETENTION)),
            Self::Step(Step::Release) => cut!(tier.release(id, first)),
            Self::Step(Step::Hold) => cut!(tier.hold(id, first, RETENTION)),
            Self::Step(Step::Lapse) => cut!(tier.lapse(id, first)),
            Self::Step(Step::Checkpoint) => cut!(tier.checkpoint(id, first, left())),
            Self::LookUp => cut!(tier.look_up(id)),
            Self::Forget => cut!(tier.forget(id, false)),
            Self::ForgetForced => cut!(tier.forget(id, true)),
            Self::Resolve => cut!(tier.resolve(id, Some(&body), RETENTION)),
            Self::ResolveAway => cut!(tier.resolve(id, None, RETENTION)),
            Self::Reap => cut!(tier.reap(10)),
            Self::Recalls => cut!(tier.recalls(None)),
        }
    }

    /// Does it again, as who was not answered does.
    async fn repeat(self, node: &Node, scene: &Scene) -> Verdict {
        let Scene { id, first, claim, owner, .. } = scene;
        match self {
            Self::Beat => node.beat(owner.owner, LEASE).await,
            Self::Claim => node.under(3).win(id, *claim).await.map(drop),
            Self::TakeOver => match node.under(3).take_over(id, *first, *claim).await? {
                Claimed::Won { checkpoint } if checkpoint.as_deref() == Some(b"a step") => Ok(()),
                other => node.at.failed(format!("a repeated takeover was told {other:?}")),
            },
            Self::Step(Step::Release) => match node.step(Step::Release, id, *first).await? {
                Landed::Done | Landed::Lost(None) => Ok(()),
                other => node.at.failed(format!("a repeated release was told {other:?}")),
            },
            Self::Step(Step::Lapse) => match node.step(Step::Lapse, id, *first).await? {
                Landed::Done => Ok(()),
                Landed::Lost(Some(found)) if found.state == State::Lapsed => Ok(()),
                other => node.at.failed(format!("a repeated lapse was told {other:?}")),
            },
            Self::Step(step) => node.does(step, id, *first).await,
            Self::Forget | Self::ForgetForced => {
                let forgotten = node.forget(id, self == Self::ForgetForced).await?;
                let is_gone = forgotten != Forgotten::Busy;
                node.at.ensure(is_gone, || format!("a repeated forget was told {forgotten:?}"))
            }
            Self::Resolve | Self::ResolveAway => {
                let body = outcome("a step");
                let kept = (self == Self::Resolve).then_some(&body);
                match (node.resolve(id, kept).await?, kept) {
                    (Resolved::Done, _)
                    | (Resolved::Completed, Some(_))
                    | (Resolved::Absent, None) => Ok(()),
                    (other, _) => node.at.failed(format!("a repeated resolve: {other:?}")),
                }
            }
            Self::LookUp => node.look_up(id).await.map(drop),
            Self::Reap => node.reap(10).await.map(drop),
            Self::Recalls => node.recalls(None).await.map(drop),
        }
    }
}

fn refused(node: &Node, verb: Verb, error: &TierError) -> Result<bool, Failure> {
    node.at.failed(format!("{verb:?} failed: {error}"))
}

impl Scene {
    /// Fails unless what is there is what was before, or what the step leaves, and nothing between.
    async fn is_whole(&self, node: &Node) -> Verdict {
        let found = node.look_up(&self.id).await?;
        let state = found.as_ref().map(|found| &found.state);
        let is_whole = state == self.before.as_ref() || state == self.after.as_ref();
        node.at.ensure(is_whole, || {
            let (before, after, there) = (&self.before, &self.after, shown(found.as_ref()));
            format!("a step from {before:?} to {after:?} was given up, and there is {there}")
        })?;
        let Some(found) = found.filter(|found| found.state == State::InFlight) else {
            return Ok(());
        };
        let claims = [claim_of(self.first), self.claim];
        let is_one =
            claims.iter().any(|it| it.token == found.token && it.fingerprint == found.fingerprint);
        node.at.ensure(is_one, || format!("half of a claim: {found:?}"))
    }

    async fn is_done(&self, node: &Node) -> Verdict {
        match &self.after {
            Some(state) => node.sees(&self.id, state).await.map(drop),
            None => node.sees_nothing(&self.id).await,
        }
    }
}

pub(super) async fn a_call_that_is_given_up_is_whole(p: Probe<'_>) -> Verdict {
    let steps = Step::ALL.map(Verb::Step);
    let verbs = [
        Verb::Beat,
        Verb::Claim,
        Verb::TakeOver,
        Verb::LookUp,
        Verb::Forget,
        Verb::ForgetForced,
        Verb::Resolve,
        Verb::ResolveAway,
        Verb::Reap,
        Verb::Recalls,
    ];
    let mut left = Vec::new();
    for verb in verbs.into_iter().chain(steps) {
        for when in [When::Pending, When::Woken] {
            for polls in 0..MOST {
                let id = p.id(&format!("{verb:?}, {when:?} {polls}"))?;
                let (node, other) = (p.node(0), p.node(1));
                let scene = verb.set(p, id).await?;
                let has_ended = verb.cut(&node, &scene, polls, when).await?;
                scene.is_whole(&other).await?;
                scene.is_whole(&node).await?;
                verb.repeat(&node, &scene).await?;
                scene.is_done(&other).await?;
                scene.is_done(&node).await?;
                if verb == Verb::Beat {
                    other.under(10).won_by(&scene.id, &scene.owner).await?;
                }
                left.push(scene.id);
                if has_ended {
                    break;
                }
            }
        }
    }
    // Nothing of all this stays for ever.
    p.advance(MAX_RUN + RETENTION + SECOND).await?;
    for id in &left {
        p.node(2).under(7).sees_nothing(id).await?;
    }
    Ok(())
}

/// What a call has taken, a connection or a lock, it gives back when it is dropped.
pub(super) async fn many_calls_given_up_at_once_block_nobody(p: Probe<'_>) -> Verdict {
    const CALLS: usize = 64;
    let (node, owner) = (p.node(0), p.owner().await?);
    let shut = p.id("shut")?;
    let token = node.won_by(&shut, &owner).await?;
    let ids = (0..CALLS).map(|number| p.id(&format!("call {number}")));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    let body = outcome("given up");
    for polls in [1, 2, 10] {
        let mut calls = Vec::new();
        for id in &ids {
            let (tier, id, shut) = (node.tier(), id.get(node.at)?, shut.get(node.at)?);
            let (claim, body) = (owner.claim(), &body);
            calls.push(Box::pin(async move {
                // One after the other, so that some are given up in each.
                tier.claim(id, claim).await.map(drop)?;
                tier.complete(shut, token, Some(body), RETENTION).await.map(drop)
            }));
        }
        // All of them have begun before the first is dropped.
        for _ in 0..polls {
            std::future::poll_fn(|cx| {
                calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
        drop(calls);
        let id = p.id(&format!("after {polls}"))?;
        let token = node.won_by(&id, &owner).await?;
        node.does(Step::Complete, &id, token).await?;
        p.node(1).replays(&id, &outcome("a step")).await?;
    }
    Ok(())
}

pub(super) async fn waiting_for_a_settlement_does_no_harm(p: Probe<'_>) -> Verdict {
    const WAITERS: usize = 100;
    let (node, owner) = (p.node(0), p.owner().await?);
    let id = p.id("k")?;
    let token = node.won_by(&id, &owner).await?;
    for polls in 0..4 {
        let waiters = (0..WAITERS).map(|_| {
            let waiter = id.get(node.at).map(|id| node.tier().settled(id));
            waiter.map(|waiter| Cut { future: Some(waiter), left: polls, when: When::Woken })
        });
        let mut waiters =
            waiters.map(|waiter| waiter.map(Box::pin)).collect::<Result<Vec<_>, _>>()?;
        // They hold nothing that a verb of the same handle needs.
        let life = async {
            let id = p.id(&format!("life {polls}"))?;
            let token = node.won_by(&id, &owner).await?;
            tokio::task::yield_now().await;
            node.does(Step::Hold, &id, token).await?;
            node.does(Step::Complete, &id, token).await?;
            node.replays(&id, &outcome("a step")).await
        };
        // How many waiters have ended does not matter.
        let mut life = pin!(life);
        std::future::poll_fn(|cx| {
            waiters.retain_mut(|waiter| waiter.as_mut().poll(cx).is_pending());
            life.as_mut().poll(cx)
        })
        .await?;
    }
    // One that is settled already, or was never there.
    node.does(Step::Complete, &id, token).await?;
    for id in [id, p.id("absent")?] {
        let waiter = node.tier().settled(id.get(node.at)?);
        let cut = Cut { future: Some(waiter), left: 1, when: When::Pending };
        node.given_up(cut).await?;
    }
    let id = p.id("after")?;
    let token = node.won_by(&id, &owner).await?;
    node.does(Step::Release, &id, token).await
}
