//! What operators do, rule 13 on who is told of it, and the room that is given back.

use std::time::Duration;

use tokio::task::JoinSet;

use super::{
    Failure,
    probe::{
        HOUR, Id, LEASE, MARGIN, MAX_RUN, MINUTE, Node, Owner, Probe, RETENTION, SECOND, Step,
        Verdict, outcome,
    },
};
use crate::{
    Token,
    tier::{Forgotten, NewClaim, Recalls, Resolved, State},
};

/// One identity in each state that a record can have, with the token of its claim.
struct Everything {
    each: Vec<(Id, Token, State)>,
    beating: Owner,
}

async fn everything(p: Probe<'_>) -> Result<Everything, Failure> {
    let node = p.node(0);
    let (lapsing, beating) = (p.owner().await?, p.owner().await?);
    let mut each = Vec::new();
    for (key, state) in [
        ("in flight", State::InFlight),
        ("lapsed", State::Lapsed),
        ("held", State::Held),
        ("over max_run", State::Held),
        ("completed", State::Completed(outcome("a step"))),
        ("not kept", State::NotKept),
    ] {
        let id = p.id(key)?;
        let owner = if key == "lapsed" { &lapsing } else { &beating };
        let max_run = if key == "over max_run" { HOUR / 2 } else { MAX_RUN };
        let claim = NewClaim { max_run, ..owner.claim() };
        node.win(&id, claim).await?;
        match key {
            "held" => node.does(Step::Hold, &id, claim.token).await?,
            "completed" => node.does(Step::Complete, &id, claim.token).await?,
            "not kept" => node.does(Step::NotKept, &id, claim.token).await?,
            _ => {}
        }
        each.push((id, claim.token, state));
    }
    p.advance(LEASE + SECOND).await?;
    node.beat(beating.owner, LEASE).await?;
    for (id, token, state) in &each {
        let found = node.under(9).sees(id, state).await?;
        node.at.ensure(found.token == *token, || format!("{found:?}"))?;
    }
    Ok(Everything { each, beating })
}

/// Fails if `token` can still do something to `id`.
async fn is_stale(node: &Node, id: &Id, token: Token, why: &str) -> Verdict {
    let node = node.under(5);
    let before = node.look_up(id).await?;
    for step in Step::ALL {
        node.lost(
            &format!("{} of what was {why}", step.name()),
            node.step(step, id, token).await?,
        )?;
    }
    let after = node.look_up(id).await?;
    let is_same = before.map(|it| (it.token, it.state)) == after.map(|it| (it.token, it.state));
    node.at.ensure(is_same, || format!("a token changed what was {why}"))
}

pub(super) async fn what_is_forgotten_is_absent(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let Everything { each, beating } = everything(p).await?;
    for (id, token, state) in each {
        let is_busy = state == State::InFlight;
        let forgotten = other.forget(&id, false).await?;
        let due = if is_busy { Forgotten::Busy } else { Forgotten::Gone };
        other.at.ensure(forgotten == due, || format!("forget of {state:?}: {forgotten:?}"))?;
        if is_busy {
            let found = node.sees(&id, &state).await?;
            node.at.ensure(found.token == token, || format!("{found:?}"))?;
            let forgotten = other.forget(&id, true).await?;
            other.at.ensure(forgotten == Forgotten::Gone, || format!("forced: {forgotten:?}"))?;
        }
        node.sees_nothing(&id).await?;
        for forced in [false, true] {
            let forgotten = node.forget(&id, forced).await?;
            node.at.ensure(forgotten == Forgotten::Absent, || format!("again: {forgotten:?}"))?;
        }
        is_stale(&node, &id, token, "forgotten").await?;
        let heir = beating.claim();
        other.win(&id, heir).await?;
        is_stale(&node, &id, token, "forgotten and claimed again").await?;
        let found = node.sees(&id, &State::InFlight).await?;
        node.is_of(&found, &heir)?;
    }
    Ok(())
}

pub(super) async fn what_is_resolved_is_settled(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let by = outcome("an operator's");
    for kept in [Some(&by), None] {
        let probe = p.named(if kept.is_some() { "kept" } else { "given up" });
        let Everything { each, beating } = everything(probe).await?;
        for (id, token, state) in each {
            let before = node.look_up(&id).await?.map(|found| found.fingerprint);
            let resolved = other.resolve(&id, kept).await?;
            let due = match state {
                State::InFlight => Resolved::InFlight,
                State::Completed(_) | State::NotKept => Resolved::Completed,
                State::Lapsed | State::Held => Resolved::Done,
            };
            other.at.ensure(resolved == due, || format!("resolve of {state:?}: {resolved:?}"))?;
            if resolved != Resolved::Done {
                let found = node.sees(&id, &state).await?;
                node.at.ensure(found.token == token, || format!("{found:?}"))?;
                continue;
            }
            match kept {
                Some(kept) => {
                    let found = node.replays(&id, kept).await?;
                    node.times(&found, Duration::ZERO, RETENTION)?;
                    node.at.ensure(Some(found.fingerprint) == before, || {
                        "another fingerprint than that of the claim".to_owned()
                    })?;
                }
                None => node.sees_nothing(&id).await?,
            }
            is_stale(&node, &id, token, "resolved").await?;
            if kept.is_none() {
                let heir = beating.claim();
                let left = other.win(&id, heir).await?;
                other.at.ensure(left.is_none(), || "a checkpoint was left".to_owned())?;
                is_stale(&node, &id, token, "resolved and claimed again").await?;
                continue;
            }
            let resolved = node.resolve(&id, None).await?;
            node.at.ensure(resolved == Resolved::Completed, || format!("again: {resolved:?}"))?;
        }
        let absent = probe.id("absent")?;
        let resolved = node.resolve(&absent, kept).await?;
        node.at.ensure(resolved == Resolved::Absent, || format!("of nothing: {resolved:?}"))?;
        other.sees_nothing(&absent).await?;
    }
    // Its retention counts from that step.
    let owner = p.owner().await?;
    let id = p.id("late")?;
    let token = node.won_by(&id, &owner).await?;
    node.does(Step::Hold, &id, token).await?;
    p.advance(RETENTION - MARGIN).await?;
    node.resolve(&id, Some(&by)).await?;
    p.advance(RETENTION - MARGIN).await?;
    let found = other.under(7).replays(&id, &by).await?;
    other.under(7).times(&found, RETENTION - MARGIN, MARGIN)?;
    p.advance(MARGIN + SECOND).await?;
    other.under(7).sees_nothing(&id).await
}

/// Fails unless `told` names `id`, byte for byte.
fn tells(node: &Node, told: &Recalls, id: &Id, why: &str) -> Verdict {
    node.at.ensure(told.identities.contains(&id.0), || {
        format!("what was {why} is not among the {} that are told", told.identities.len())
    })
}

pub(super) async fn other_nodes_are_told(p: Probe<'_>) -> Verdict {
    if !p.is_shared() {
        return Ok(());
    }
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let before = other.recalls(None).await?;
    let told = before.identities.len();
    other.at.ensure(told == 0, || format!("who asks for the present point is told {told}"))?;
    let mut gone = Vec::new();
    for (account, endpoint, key) in [
        (&b""[..], &b""[..], "k"),
        (b"a:b", b"c", "k "),
        (b"\xff\0'", b"\0\xfe\"", "K%"),
        (&[0x80; 200], &[0; 400], "long"),
    ] {
        let id = p.id_of(account, endpoint, key)?;
        let token = node.won_by(&id, &owner).await?;
        node.does(Step::Complete, &id, token).await?;
        let forgotten = node.forget(&id, false).await?;
        node.at.ensure(forgotten == Forgotten::Gone, || format!("forget: {forgotten:?}"))?;
        gone.push((id, "forgotten"));
    }
    let id = p.id("forced")?;
    node.won_by(&id, &owner).await?;
    node.forget(&id, true).await?;
    gone.push((id, "forgotten by force"));
    for (key, kept) in [("resolved", Some(outcome("by an operator"))), ("given up", None)] {
        let id = p.id(key)?;
        let token = node.won_by(&id, &owner).await?;
        node.does(Step::Hold, &id, token).await?;
        let resolved = node.resolve(&id, kept.as_ref()).await?;
        node.at.ensure(resolved == Resolved::Done, || format!("resolve: {resolved:?}"))?;
        gone.push((id, key));
    }
    let told = other.recalls(Some(before.now)).await?;
    for (id, why) in &gone {
        tells(&other, &told, id, why)?;
    }
    // To a node that did not ask meanwhile as well, and to the one that did it; also if others come
    // after them.
    p.advance(MINUTE / 2).await?;
    let late = p.id("late")?;
    node.won_by(&late, &owner).await?;
    node.forget(&late, true).await?;
    gone.push((late.clone(), "forgotten later"));
    for node in [p.node(0), p.node(1), p.node(2)] {
        let again = node.recalls(Some(before.now)).await?;
        for (id, why) in &gone {
            tells(&node, &again, id, why)?;
        }
    }
    // From the point that an answer names, the next one goes on.
    tells(&other, &other.recalls(Some(told.now)).await?, &late, "forgotten later")
}

/// A node that asks from point to point misses none, whoever else forgets at that moment.
pub(super) async fn no_recall_is_missed(p: Probe<'_>) -> Verdict {
    const FORGETTERS: usize = 8;
    const EACH: usize = 8;
    if !p.is_shared() {
        return Ok(());
    }
    let (asking, owner) = (p.node(0), p.owner().await?);
    let mut missing = Vec::new();
    let mut forgetters = JoinSet::new();
    let mut since = asking.recalls(None).await?.now;
    for number in 0..FORGETTERS {
        let ids = (0..EACH).map(|key| p.id(&format!("{number}, {key}")));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        missing.extend(ids.iter().map(|id| id.0.clone()));
        let (node, owner) = (p.node(number), owner.clone());
        forgetters.spawn(async move {
            for id in ids {
                node.won_by(&id, &owner).await?;
                node.forget(&id, true).await?;
                tokio::task::yield_now().await;
            }
            Ok(())
        });
    }
    loop {
        let is_over = forgetters.is_empty();
        let told = asking.recalls(Some(since)).await?;
        since = told.now;
        missing.retain(|id| !told.identities.contains(id));
        if is_over {
            break;
        }
        while let Some(joined) = forgetters.try_join_next() {
            match joined {
                Ok(forgotten) => forgotten?,
                Err(error) => return p.at.failed(format!("a call did not end: {error}")),
            }
        }
        tokio::task::yield_now().await;
    }
    p.at.ensure(missing.is_empty(), || {
        let all = FORGETTERS * EACH;
        format!("{} of {all} that were forgotten meanwhile were never told", missing.len())
    })
}

pub(super) async fn room_is_given_back_in_bounded_steps(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let mut ended = Vec::new();
    for (number, step) in Step::ALL.into_iter().enumerate() {
        for key in ["a", "b"] {
            let id = p.id(&format!("ended {number} {key}"))?;
            let token = node.won_by(&id, &owner).await?;
            node.does(step, &id, token).await?;
            ended.push(id);
        }
    }
    p.advance(MAX_RUN + RETENTION + SECOND).await?;
    // None of these may go with them.
    let living = everything(p).await?;
    let bounded = async |most: usize| {
        let reaped = other.reap(most).await?;
        other
            .at
            .ensure(reaped <= most, || format!("{reaped} were reaped, at most {most} asked for"))?;
        Ok(reaped)
    };
    bounded(0).await?;
    bounded(1).await?;
    // The ended records of all checks before this one are gone after so many steps.
    let mut steps = 0;
    while bounded(100).await? > 0 {
        steps += 1;
        other.at.ensure(steps < 1000, || "giving room back never ends".to_owned())?;
    }
    for id in &ended {
        node.sees_nothing(id).await?;
    }
    for (id, token, state) in &living.each {
        let found = node.sees(id, state).await?;
        node.at.ensure(found.token == *token, || format!("{found:?}"))?;
    }
    Ok(())
}
