//! Rules 5 and 12: what a token settles, and what comes back of it.

use std::time::Duration;

use bytes::Bytes;

use super::probe::{
    self, HOUR, LEASE, MAX_RUN, Probe, RETENTION, SECOND, Step, Verdict, claim_of, outcome, shown,
};
use crate::{
    Fingerprint, Outcome, Scheme, Token,
    tier::{Landed, NewClaim, State},
};

pub(super) async fn a_step_needs_the_token(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let first = owner.claim();
    let id = p.id("k")?;
    node.win(&id, first).await?;
    let (own, number) = (first.token.owner(), first.token.number());
    for step in Step::ALL {
        for stale in [
            Token::new(own, number + 1),
            Token::new(own ^ 1, number),
            Token::new(own ^ 1 << 63, number),
        ] {
            let found = other.lost(step.name(), other.step(step, &id, stale).await?)?;
            other.at.ensure(found.as_ref().is_some_and(|it| it.token == first.token), || {
                format!("`{}` was lost to {}", step.name(), shown(found.as_ref()))
            })?;
            let found = node.sees(&id, &State::InFlight).await?;
            node.is_of(&found, &first)?;
        }
        // Of what is absent.
        let absent = p.id("absent")?;
        let found = node.lost(step.name(), node.step(step, &absent, first.token).await?)?;
        node.at.ensure(found.is_none(), || format!("found {}", shown(found.as_ref())))?;
        node.sees_nothing(&absent).await?;
        // With the right one.
        let id = p.id(step.name())?;
        let token = node.won_by(&id, &owner).await?;
        node.does(step, &id, token).await?;
        match step {
            Step::Complete => drop(other.replays(&id, &outcome("a step")).await?),
            Step::NotKept => drop(other.sees(&id, &State::NotKept).await?),
            Step::Hold => drop(other.sees(&id, &State::Held).await?),
            Step::Checkpoint => drop(other.sees(&id, &State::InFlight).await?),
            Step::Release => other.sees_nothing(&id).await?,
            Step::Lapse => drop(other.sees(&id, &State::Lapsed).await?),
        }
    }
    // Nothing of what was lost was left for the next owner.
    node.does(Step::Hold, &id, first.token).await?;
    let left = node.won("take_over", node.take_over(&id, first.token, owner.claim()).await?)?;
    node.at.ensure(left.is_none(), || format!("a lost step has left {left:?}"))?;
    // The former owner's token is stale after a takeover.
    let found = node.sees(&id, &State::InFlight).await?;
    for step in Step::ALL {
        node.lost(step.name(), other.step(step, &id, first.token).await?)?;
        let now = node.sees(&id, &State::InFlight).await?;
        node.at.ensure(now.token == found.token, || format!("a stale step left {now:?}"))?;
    }
    Ok(())
}

pub(super) async fn a_lapsed_or_held_claim_is_settled_by_its_token(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let mut open = Vec::new();
    for state in ["lapsed", "held", "over max_run"] {
        for step in Step::ALL {
            let id = p.id(&format!("{} of {state}", step.name()))?;
            let token = node.won_by(&id, &owner).await?;
            if state == "held" {
                node.does(Step::Hold, &id, token).await?;
            }
            open.push((state, step, id, token));
        }
    }
    p.advance(LEASE + SECOND).await?;
    for (state, step, id, token) in open {
        let there = if state == "lapsed" { State::Lapsed } else { State::Held };
        if state == "over max_run" {
            node.beat(owner.owner, MAX_RUN * 2).await?;
            p.advance(MAX_RUN).await?;
            // So that the others of this list become what they are to be.
            node.beat(owner.owner, LEASE).await?;
        }
        node.sees(&id, &there).await?;
        other.does(step, &id, token).await?;
        match step {
            Step::Complete => drop(node.replays(&id, &outcome("a step")).await?),
            Step::NotKept => drop(node.sees(&id, &State::NotKept).await?),
            Step::Release => node.sees_nothing(&id).await?,
            Step::Hold => drop(node.sees(&id, &State::Held).await?),
            Step::Checkpoint => drop(node.sees(&id, &there).await?),
            Step::Lapse => {
                node.sees(&id, &State::Lapsed).await?;
                node.lost("lapse, repeated,", node.step(step, &id, token).await?)?;
            }
        }
    }
    Ok(())
}

pub(super) async fn a_completion_is_repeated_without_effect(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let first = outcome("the first");
    for kept in [Some(&first), None] {
        let id = p.id(if kept.is_some() { "kept" } else { "not kept" })?;
        let state = kept.map_or(State::NotKept, |kept| State::Completed(kept.clone()));
        let token = node.won_by(&id, &owner).await?;
        node.done("complete", node.complete(&id, token, kept, RETENTION).await?)?;
        p.advance(HOUR).await?;
        for (node, again) in
            [(&node, kept), (&other, kept), (&other, Some(&outcome("another"))), (&node, None)]
        {
            let landed = node.complete(&id, token, again, RETENTION * 2).await?;
            node.done("complete, repeated,", landed)?;
            let found = node.sees(&id, &state).await?;
            node.times(&found, HOUR, RETENTION - HOUR)?;
        }
        // It is completions that can be repeated. The other steps come too late.
        for step in [Step::Release, Step::Hold, Step::Checkpoint, Step::Lapse] {
            other.lost(step.name(), other.step(step, &id, token).await?)?;
            node.sees(&id, &state).await?;
        }
        let stale = Token::new(token.owner(), token.number() + 100);
        other.lost("complete", other.step(Step::Complete, &id, stale).await?)?;
        node.sees(&id, &state).await?;
        node.beat(owner.owner, LEASE).await?;
    }
    Ok(())
}

pub(super) async fn outcomes_come_back_byte_for_byte(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let owner = p.owner().await?;
    let every_byte: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..1_u32 << 20).map(|at| (at ^ at >> 8) as u8).collect();
    let outcomes = [
        Outcome::new(204),
        Outcome::new(0),
        Outcome::new(u16::MAX).body("\0"),
        Outcome::new(200).body(every_byte.clone()),
        Outcome::new(200).body(vec![b' '; 3]),
        Outcome::new(201)
            .header("set-cookie", "a=1, b; c")
            .header("x", "1")
            .header("set-cookie", "b=2")
            .header("Set-Cookie", "")
            .header("", "")
            .header("x", every_byte)
            .header("x", "1"),
        Outcome::new(200).header("large", vec![0xff; 70_000]).body(large),
    ];
    for (number, outcome) in outcomes.iter().enumerate() {
        let id = p.id(&format!("outcome {number}"))?;
        let token = node.won_by(&id, &owner).await?;
        node.done("complete", node.complete(&id, token, Some(outcome), RETENTION).await?)?;
        for node in [&node, &other] {
            node.replays(&id, outcome).await?;
            let found = node.meet(&id, owner.claim()).await?;
            let is_same = found.state == State::Completed(outcome.clone());
            node.at.ensure(is_same, || format!("a claim met other bytes: {found:?}"))?;
        }
    }
    // Fingerprints and tokens: no sign, no rounding, no text.
    for (number, token) in [
        Token::new(owner.owner, u64::MAX),
        Token::new(owner.owner, 1 << 63),
        Token::new(owner.owner, (1 << 53) + 1),
        Token::new(owner.owner, 1 << 53),
        Token::new(u64::MAX, 1),
        Token::new(u64::MAX - 1, 1),
        Token::new(1 << 63, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let id = p.id(&format!("token {number}"))?;
        node.beat(token.owner(), LEASE).await?;
        let digest = [[0xff, 0].as_slice(), &[number as u8; 30]].concat();
        let digest = digest.try_into().unwrap_or([0; 32]);
        let scheme = Scheme::from_id([0xff, 0, b'\'', b'%', 0x80, b'\n', 0, number as u8]);
        let fingerprint = Fingerprint::from_parts(scheme, digest);
        let claim = NewClaim { fingerprint, ..claim_of(token) };
        node.win(&id, claim).await?;
        let found = other.sees(&id, &State::InFlight).await?;
        other.is_of(&found, &claim)?;
        let neighbour = Token::new(token.owner(), token.number() ^ 1);
        other.lost("hold", other.hold(&id, neighbour, RETENTION).await?)?;
        other.does(Step::Complete, &id, token).await?;
        let found = node.replays(&id, &probe::outcome("a step")).await?;
        node.is_of(&found, &claim)?;
    }
    Ok(())
}

pub(super) async fn checkpoints_go_to_the_next_owner(p: Probe<'_>) -> Verdict {
    let (node, other) = (p.node(0), p.node(1));
    let every_byte: Bytes = (0..=255_u8).cycle().take(100_000).collect();
    for (number, bytes) in [every_byte, Bytes::new(), Bytes::from_static(b"\0")].iter().enumerate()
    {
        let owner = p.owner().await?;
        let id = p.id(&format!("checkpoint {number}"))?;
        let first = node.won_by(&id, &owner).await?;
        node.done("checkpoint", node.checkpoint(&id, first, "replaced").await?)?;
        node.done("checkpoint", node.checkpoint(&id, first, bytes.clone()).await?)?;
        let found = node.sees(&id, &State::InFlight).await?;
        node.times(&found, Duration::ZERO, LEASE)?;
        p.advance(LEASE + SECOND).await?;
        // To the taker, and if that one leaves none, to the taker after it.
        let taker = p.owner().await?;
        let second = taker.claim();
        let left = other.won("take_over", other.take_over(&id, first, second).await?)?;
        other.at.ensure(left.as_ref() == Some(bytes), || "other bytes were left".to_owned())?;
        other.does(Step::Hold, &id, second.token).await?;
        let third = taker.claim();
        let left = node.won("take_over", node.take_over(&id, second.token, third).await?)?;
        node.at.ensure(left.as_ref() == Some(bytes), || {
            "a checkpoint did not stay until it was replaced".to_owned()
        })?;
        // And if that one lapses by itself, at once and though its owner beats. Nobody revives it.
        other.does(Step::Lapse, &id, third.token).await?;
        node.beat(taker.owner, LEASE).await?;
        let found = node.sees(&id, &State::Lapsed).await?;
        node.at.ensure(found.fingerprint == third.fingerprint, || format!("{found:?}"))?;
        let fourth = taker.claim();
        let left = node.won("take_over", node.take_over(&id, found.token, fourth).await?)?;
        node.at.ensure(left.as_ref() == Some(bytes), || "a lapse left no checkpoint".to_owned())?;
        other.lost("complete", other.step(Step::Complete, &id, third.token).await?)?;
        let third = fourth;
        // Nothing is left once it is completed or given up.
        let landed = if number == 0 {
            node.step(Step::Release, &id, third.token).await?
        } else {
            let landed = node.step(Step::Complete, &id, third.token).await?;
            node.forget(&id, false).await?;
            landed
        };
        node.at.ensure(landed == Landed::Done, || format!("{landed:?}"))?;
        other.won_by(&id, &taker).await?;
    }
    Ok(())
}
