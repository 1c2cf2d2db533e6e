//! Rules 7 to 10: how long a record lives and whose heartbeat it hangs on.

use std::time::Duration;

use super::probe::{
    HOUR, Id, LEASE, MARGIN, MAX_RUN, Node, Owner, Probe, RETENTION, SECOND, Step, Verdict,
    outcome, shown,
};
use crate::{
    Token,
    tier::{Forgotten, NewClaim, Resolved, State},
};

/// Fails unless `id`, which `token` had, is absent to every verb.
async fn is_absent(node: &Node, id: &Id, token: Token) -> Verdict {
    node.sees_nothing(id).await?;
    for step in Step::ALL {
        let found = node.lost(step.name(), node.step(step, id, token).await?)?;
        node.at.ensure(found.is_none(), || {
            format!("`{}` found {}", step.name(), shown(found.as_ref()))
        })?;
    }
    let forgotten = node.forget(id, true).await?;
    node.at.ensure(forgotten == Forgotten::Absent, || format!("forget: {forgotten:?}"))?;
    let resolved = node.resolve(id, None).await?;
    node.at.ensure(resolved == Resolved::Absent, || format!("resolve: {resolved:?}"))?;
    node.sees_nothing(id).await
}

/// Who is the first to come to what has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Comes {
    Claim,
    TakeOver,
    /// Every verb but these two, and a claim after them.
    Others,
}

/// Fails unless `id` is new to whoever comes: absent to every verb, and a claim or takeover wins.
async fn has_ended(p: Probe<'_>, id: &Id, token: Token, owner: &Owner, first: Comes) -> Verdict {
    if first == Comes::Others {
        is_absent(&p.node(0), id, token).await?;
        is_absent(&p.node(1), id, token).await?;
    }
    let (node, claim) = (p.node(2), owner.claim());
    let claimed = match first {
        Comes::TakeOver => node.take_over(id, token, claim).await?,
        _ => node.claim(id, claim).await?,
    };
    let left = node.won("claim of what has ended", claimed)?;
    node.at.ensure(left.is_none(), || "what has ended has left a checkpoint".to_owned())?;
    let found = node.sees(id, &State::InFlight).await?;
    node.is_of(&found, &claim)?;
    node.times(&found, Duration::ZERO, LEASE)
}

pub(super) async fn a_claim_ends_by_itself(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let (silent, beating) = (p.owner().await?, p.owner().await?);
    let mut claims = Vec::new();
    for (number, first) in [Comes::Claim, Comes::TakeOver, Comes::Others].into_iter().enumerate() {
        for (owner, state) in [(&silent, State::Lapsed), (&beating, State::Held)] {
            let id = p.id(&format!("{state:?} {number}"))?;
            let token = node.won_by(&id, owner).await?;
            node.does(Step::Checkpoint, &id, token).await?;
            claims.push((token, id, state, first));
        }
    }
    node.beat(beating.owner, MAX_RUN * 100).await?;
    p.advance(MAX_RUN + RETENTION - MARGIN).await?;
    for (token, id, state, _) in &claims {
        let found = other.sees(id, state).await?;
        other.at.ensure(found.token == *token, || format!("{found:?}"))?;
    }
    p.advance(MARGIN + SECOND).await?;
    let owner = p.owner().await?;
    for (token, id, _, first) in &claims {
        has_ended(p, id, *token, &owner, *first).await?;
    }
    Ok(())
}

pub(super) async fn a_takeover_starts_anew(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let first = node.won_by(&id, &p.owner().await?).await?;
    p.advance(MAX_RUN - HOUR).await?;
    let owner = p.silent_owner();
    let claim = owner.claim();
    node.beat(owner.owner, MAX_RUN * 100).await?;
    node.won("take_over", node.take_over(&id, first, claim).await?)?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.times(&found, Duration::ZERO, MAX_RUN)?;
    p.advance(MAX_RUN - MARGIN).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.times(&found, MAX_RUN - MARGIN, MARGIN)?;
    p.advance(MARGIN + SECOND).await?;
    other.sees(&id, &State::Held).await?;
    p.advance(RETENTION - MARGIN).await?;
    let found = other.sees(&id, &State::Held).await?;
    other.is_of(&found, &claim)?;
    p.advance(MARGIN).await?;
    other.sees_nothing(&id).await
}

pub(super) async fn what_is_settled_ends_its_retention_later(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    // Shorter than the claim's own spans, and longer.
    for (retention, first) in [
        (HOUR * 2, Comes::Claim),
        ((MAX_RUN + RETENTION) * 2, Comes::TakeOver),
        (HOUR * 3, Comes::Others),
    ] {
        let owner = p.owner().await?;
        let mut settled = Vec::new();
        for (key, outcome) in [("kept", Some(outcome("kept"))), ("not kept", None), ("held", None)]
        {
            let id = p.id(&format!("{key} for {}", retention.as_secs()))?;
            let token = node.won_by(&id, &owner).await?;
            settled.push((key, id, token, outcome));
        }
        p.advance(HOUR / 2).await?;
        for (key, id, token, outcome) in &settled {
            let landed = match *key {
                "held" => node.hold(id, *token, retention).await?,
                _ => node.complete(id, *token, outcome.as_ref(), retention).await?,
            };
            node.done(key, landed)?;
        }
        let state_of = |key: &str, outcome: &Option<crate::Outcome>| match outcome {
            Some(outcome) => State::Completed(outcome.clone()),
            None if key == "held" => State::Held,
            None => State::NotKept,
        };
        for (key, id, token, outcome) in &settled {
            let found = other.sees(id, &state_of(key, outcome)).await?;
            other.at.ensure(found.token == *token, || format!("{found:?}"))?;
            other.times(&found, Duration::ZERO, retention)?;
        }
        p.advance(retention - MARGIN).await?;
        for (key, id, _, outcome) in &settled {
            let found = other.sees(id, &state_of(key, outcome)).await?;
            other.times(&found, retention - MARGIN, MARGIN)?;
        }
        p.advance(MARGIN + SECOND).await?;
        let owner = p.owner().await?;
        for (_, id, token, _) in &settled {
            has_ended(p, id, *token, &owner, first).await?;
        }
    }
    Ok(())
}

pub(super) async fn a_claim_lapses_with_its_owner(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let (owner, second) = (p.owner().await?, p.owner().await?);
    let claim = owner.claim();
    node.win(&id, claim).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.is_of(&found, &claim)?;
    other.times(&found, Duration::ZERO, LEASE)?;
    p.advance(LEASE / 2).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.times(&found, LEASE / 2, LEASE / 2)?;
    // A heartbeat moves all claims of its owner at once, and is for itself: not added up.
    node.beat(owner.owner, LEASE).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.times(&found, LEASE / 2, LEASE)?;
    p.advance(LEASE - MARGIN).await?;
    other.sees(&id, &State::InFlight).await?;
    // The heartbeat of another changes nothing.
    other.beat(second.owner, LEASE).await?;
    p.advance(MARGIN + SECOND).await?;
    for node in [&node, &other] {
        let found = node.sees(&id, &State::Lapsed).await?;
        node.is_of(&found, &claim)?;
        node.times(&found, LEASE * 3 / 2, MAX_RUN + RETENTION - LEASE * 3 / 2)?;
        let found = node.meet(&id, second.claim()).await?;
        node.is_of(&found, &claim)?;
        node.at.ensure(found.state == State::Lapsed, || format!("a claim met {found:?}"))?;
    }
    Ok(())
}

pub(super) async fn a_claim_is_held_after_max_run(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let owner = p.owner().await?;
    let claim = NewClaim { max_run: LEASE * 2, ..owner.claim() };
    node.win(&id, claim).await?;
    node.beat(owner.owner, LEASE * 3).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.times(&found, Duration::ZERO, LEASE * 2)?;
    p.advance(LEASE * 2 - MARGIN).await?;
    other.sees(&id, &State::InFlight).await?;
    p.advance(MARGIN + SECOND).await?;
    for node in [&node, &other] {
        let found = node.sees(&id, &State::Held).await?;
        node.is_of(&found, &claim)?;
        node.at.ensure(found.remaining <= RETENTION + SECOND, || {
            format!("a claim over its max_run lives longer than its retention: {found:?}")
        })?;
    }
    // Where both are over, it is the heartbeat that counts, and a late one shows the other.
    p.advance(LEASE + SECOND).await?;
    other.sees(&id, &State::Lapsed).await?;
    node.beat(owner.owner, LEASE).await?;
    other.sees(&id, &State::Held).await?;
    node.does(Step::Complete, &id, claim.token).await
}

pub(super) async fn all_handles_have_one_time(p: Probe<'_>) -> Verdict {
    for number in 0..3 {
        let id = p.id(&format!("beat by {number}"))?;
        let owner = p.silent_owner();
        p.node(number).beat(owner.owner, LEASE).await?;
        p.node(number + 1).won_by(&id, &owner).await?;
        p.advance(LEASE / 2).await?;
        // One that was opened later as well.
        for node in [p.node(0), p.node(1), p.node(2), p.opened().await?] {
            let found = node.sees(&id, &State::InFlight).await?;
            node.times(&found, LEASE / 2, LEASE / 2)?;
        }
    }
    Ok(())
}

pub(super) async fn a_late_beat_revives(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let (first, second, taken) = (p.id("first")?, p.id("second")?, p.id("taken")?);
    let tokens = [node.won_by(&first, &owner).await?, node.won_by(&second, &owner).await?];
    let seen = node.won_by(&taken, &owner).await?;
    p.advance(LEASE * 2).await?;
    other.sees(&first, &State::Lapsed).await?;
    let taker = p.owner().await?;
    let claim = taker.claim();
    other.won("take_over", other.take_over(&taken, seen, claim).await?)?;
    // Giving room back takes no claim's owner from it.
    node.reap(1000).await?;
    other.beat(owner.owner, LEASE).await?;
    for (id, token) in [&first, &second].into_iter().zip(tokens) {
        let found = node.sees(id, &State::InFlight).await?;
        node.at.ensure(found.token == token, || format!("{found:?}"))?;
        node.times(&found, LEASE * 2, LEASE)?;
        node.does(Step::Complete, id, token).await?;
    }
    let found = node.sees(&taken, &State::InFlight).await?;
    node.is_of(&found, &claim)
}

pub(super) async fn an_owner_that_does_not_beat_claims_nothing(p: Probe<'_>) -> Verdict {
    let (id, node, other) = (p.id("k")?, p.node(0), p.node(1));
    let silent = p.silent_owner();
    let claim = silent.claim();
    let seen = Token::new(silent.owner, 99);
    node.claim_is_refused(&id, claim).await?;
    node.take_over_is_refused(&id, seen, claim).await?;
    other.sees_nothing(&id).await?;
    // Nor one that has beaten once.
    let lapsed = p.owner().await?;
    let held = p.id("lapsed")?;
    let token = node.won_by(&held, &lapsed).await?;
    p.advance(LEASE + SECOND).await?;
    node.claim_is_refused(&id, lapsed.claim()).await?;
    node.take_over_is_refused(&held, token, lapsed.claim()).await?;
    let found = other.sees(&held, &State::Lapsed).await?;
    other.at.ensure(found.token == token, || format!("{found:?}"))?;
    other.sees_nothing(&id).await?;
    // It has to beat, no more. What was refused before can be claimed.
    other.beat(silent.owner, LEASE).await?;
    node.win(&id, claim).await?;
    let found = other.sees(&id, &State::InFlight).await?;
    other.is_of(&found, &claim)
}

/// Who wants to keep something for ever says `Duration::MAX`.
pub(super) async fn a_span_without_end_is_no_short_one(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.silent_owner();
    node.beat(owner.owner, Duration::MAX).await?;
    let endless = || NewClaim { max_run: Duration::MAX, retention: Duration::MAX, ..owner.claim() };
    let mut kept = Vec::new();
    for state in [State::InFlight, State::Held, State::NotKept] {
        let (id, claim) = (p.id(&format!("{state:?}"))?, endless());
        node.win(&id, claim).await?;
        let landed = match state {
            State::Held => node.hold(&id, claim.token, Duration::MAX).await?,
            State::NotKept => node.complete(&id, claim.token, None, Duration::MAX).await?,
            _ => node.checkpoint(&id, claim.token, "").await?,
        };
        node.done("a step without end", landed)?;
        kept.push((id, claim, state));
    }
    for _ in 0..2 {
        for (id, claim, state) in &kept {
            let found = other.sees(id, state).await?;
            other.is_of(&found, claim)?;
        }
        // Over a year.
        p.advance(HOUR * 24 * 400).await?;
    }
    // They would outlive every other record of the run.
    for (id, _, _) in &kept {
        let forgotten = node.forget(id, true).await?;
        node.at.ensure(forgotten == Forgotten::Gone, || format!("forget: {forgotten:?}"))?;
    }
    node.beat(owner.owner, LEASE).await
}

/// What is over at once is neither refused nor there for ever (R8).
pub(super) async fn a_span_of_nothing_is_over(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let mut short = Vec::new();
    for (number, span) in [Duration::ZERO, Duration::from_nanos(1)].into_iter().enumerate() {
        let id = p.id(&format!("claimed {number}"))?;
        let claim = NewClaim { max_run: span, retention: span, ..owner.claim() };
        node.win(&id, claim).await?;
        short.push(id);
        let id = p.id(&format!("completed {number}"))?;
        let token = node.won_by(&id, &owner).await?;
        node.done("complete", node.complete(&id, token, None, span).await?)?;
        short.push(id);
        let id = p.id(&format!("held {number}"))?;
        let token = node.won_by(&id, &owner).await?;
        node.done("hold", node.hold(&id, token, span).await?)?;
        short.push(id);
    }
    let id = p.id("of an owner")?;
    node.beat(owner.owner, Duration::ZERO).await?;
    p.advance(SECOND).await?;
    for id in &short {
        other.sees_nothing(id).await?;
    }
    other.under(10).claim_is_refused(&id, owner.claim()).await
}
