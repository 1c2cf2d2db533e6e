//! Rules 2 to 4: who becomes the owner.

use std::time::Duration;

use super::probe::{
    HOUR, Id, LEASE, MAX_RUN, Node, Probe, RETENTION, SECOND, Step, Verdict, outcome,
};
use crate::{
    Token,
    tier::{Claimed, NewClaim, State},
};

pub(super) async fn a_claim_that_meets_one_changes_nothing(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let (owner, second) = (p.owner().await?, p.owner().await?);
    let first = owner.claim();
    // That nothing was there is nothing to remember.
    for node in [&node, &other] {
        node.sees_nothing(&id).await?;
    }
    node.win(&id, first).await?;
    for node in [&node, &other] {
        let found = node.sees(&id, &State::InFlight).await?;
        node.is_of(&found, &first)?;
    }
    // Of another fingerprint and for other spans.
    let late = NewClaim { max_run: MAX_RUN * 2, retention: RETENTION * 2, ..second.claim() };
    for node in [&node, &other] {
        let found = node.meet(&id, late).await?;
        node.is_of(&found, &first)?;
        node.at.ensure(found.state == State::InFlight, || format!("met {found:?}"))?;
        node.times(&found, Duration::ZERO, LEASE)?;
    }
    let body = outcome("the first");
    node.done("complete", node.complete(&id, first.token, Some(&body), RETENTION).await?)?;
    let found = other.meet(&id, late).await?;
    other.is_of(&found, &first)?;
    other.at.ensure(found.state == State::Completed(body.clone()), || format!("met {found:?}"))?;
    other.times(&found, Duration::ZERO, RETENTION)?;
    other.replays(&id, &body).await?;
    // What was given up is absent, and a claim of it wins.
    let id = p.id("released")?;
    let token = node.won_by(&id, &owner).await?;
    node.does(Step::Release, &id, token).await?;
    other.sees_nothing(&id).await?;
    other.won_by(&id, &second).await?;
    Ok(())
}

pub(super) async fn a_repeated_claim_wins_again(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let (owner, second) = (p.owner().await?, p.owner().await?);
    let claim = owner.claim();
    for node in [&node, &node, &other] {
        node.win(&id, claim).await?;
    }
    // It is not the repetition that counts, but the token.
    let found = node.meet(&id, second.claim()).await?;
    node.is_of(&found, &claim)?;
    let found = node.meet(&id, owner.claim()).await?;
    node.is_of(&found, &claim)?;
    // A repetition does not move the end of `max_run`.
    node.beat(owner.owner, MAX_RUN * 2).await?;
    p.advance(HOUR).await?;
    node.win(&id, claim).await?;
    let found = node.sees(&id, &State::InFlight).await?;
    node.times(&found, HOUR, MAX_RUN - HOUR)?;
    // After its own completion it meets the outcome.
    node.does(Step::NotKept, &id, claim.token).await?;
    let found = node.meet(&id, claim).await?;
    node.at.ensure(found.state == State::NotKept, || format!("met {found:?}"))?;
    // So is a takeover whose answer was lost, with what it was handed.
    let id = p.id("taken")?;
    let first = node.won_by(&id, &owner).await?;
    node.done("checkpoint", node.checkpoint(&id, first, "left").await?)?;
    node.does(Step::Hold, &id, first).await?;
    let taker = owner.claim();
    for node in [&node, &other] {
        let left = node.take_over(&id, first, taker).await?;
        let left = node.won("take_over", left)?;
        node.at.ensure(left.as_deref() == Some(b"left"), || {
            format!("a takeover, or its repetition, was handed {left:?} as checkpoint")
        })?;
    }
    Ok(())
}

async fn cannot_take(node: &Node, id: &Id, seen: Token, claim: NewClaim, why: &str) -> Verdict {
    match node.take_over(id, seen, claim).await? {
        Claimed::Met(_) => Ok(()),
        Claimed::Won { .. } => node.at.failed(format!("a takeover won {why}")),
    }
}

pub(super) async fn a_takeover_needs_the_token_that_was_seen(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let owner = p.owner().await?;
    let first = owner.claim();
    node.win(&id, first).await?;
    p.advance(LEASE + SECOND).await?;
    let taker = p.owner().await?;
    for stale in [
        Token::new(first.token.owner(), first.token.number() + 1),
        Token::new(first.token.owner() ^ 1, first.token.number()),
        Token::new(first.token.owner() ^ 1 << 63, first.token.number()),
        taker.claim().token,
    ] {
        cannot_take(&other, &id, stale, taker.claim(), "with a token that is not there").await?;
        let found = node.sees(&id, &State::Lapsed).await?;
        node.is_of(&found, &first)?;
    }
    let second = taker.claim();
    other.won("take_over", other.take_over(&id, first.token, second).await?)?;
    let found = node.sees(&id, &State::InFlight).await?;
    node.is_of(&found, &second)?;
    node.times(&found, Duration::ZERO, LEASE)?;
    // The one that was seen has gone.
    p.advance(LEASE + SECOND).await?;
    let third = p.owner().await?;
    cannot_take(&node, &id, first.token, third.claim(), "of a claim that was taken over").await?;
    let found = node.sees(&id, &State::Lapsed).await?;
    node.is_of(&found, &second)?;
    node.won("take_over", node.take_over(&id, second.token, third.claim()).await?)?;
    // What is absent is claimed.
    let id = p.id("absent")?;
    let claim = third.claim();
    let left = node.won("take_over", node.take_over(&id, first.token, claim).await?)?;
    node.at.ensure(left.is_none(), || "a checkpoint of nobody".to_owned())?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.is_of(&found, &claim)
}

pub(super) async fn a_takeover_needs_an_owner_that_is_not_alive(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let (owner, taker) = (p.owner().await?, p.owner().await?);
    let alive = p.id("alive")?;
    let first = owner.claim();
    node.win(&alive, first).await?;
    cannot_take(&other, &alive, first.token, taker.claim(), "of an owner that beats").await?;
    let found = node.sees(&alive, &State::InFlight).await?;
    node.is_of(&found, &first)?;
    for step in [Step::Complete, Step::NotKept] {
        let id = p.id(step.name())?;
        let token = node.won_by(&id, &owner).await?;
        node.does(step, &id, token).await?;
        cannot_take(&other, &id, token, taker.claim(), "of what is completed").await?;
    }
    // Its owner is alive, but it is held.
    let held = p.id("held")?;
    let token = node.won_by(&held, &owner).await?;
    node.does(Step::Hold, &held, token).await?;
    let claim = taker.claim();
    other.won("take_over", other.take_over(&held, token, claim).await?)?;
    let found = node.sees(&held, &State::InFlight).await?;
    node.is_of(&found, &claim)?;
    // An owner that came back in time keeps its claim.
    p.advance(LEASE + SECOND).await?;
    node.sees(&alive, &State::Lapsed).await?;
    node.beat(owner.owner, LEASE).await?;
    node.beat(taker.owner, LEASE).await?;
    cannot_take(&other, &alive, first.token, taker.claim(), "of an owner that beats again").await
}
