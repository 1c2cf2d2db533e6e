//! Steps that meet: one of them is first, and the other one sees what it has left.

use std::{future::Future, pin::Pin, time::Duration};

use tokio::{sync::Barrier, task::JoinSet};

use super::{
    Failure,
    probe::{
        HOUR, Id, LEASE, MAX_RUN, Node, Probe, RETENTION, SECOND, Step, Verdict, outcome, shown,
    },
};
use crate::{
    Token,
    sync::Arc,
    tier::{Claimed, Forgotten, Landed, NewClaim, Resolved, State},
};

/// Callers of a race, over all nodes.
const CALLERS: usize = 24;
/// How often two steps meet.
const ROUNDS: usize = 24;

/// Lets all of `calls` go at once, each on a task of its own, and answers in their order.
async fn at_once<T, F>(p: Probe<'_>, calls: Vec<F>) -> Result<Vec<T>, Failure>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let start = Arc::new(Barrier::new(calls.len()));
    let mut tasks = JoinSet::new();
    for (number, call) in calls.into_iter().enumerate() {
        let start = Arc::clone(&start);
        tasks.spawn(async move {
            start.wait().await;
            (number, call.await)
        });
    }
    let mut answers = Vec::new();
    while let Some(joined) = tasks.join_next().await {
        match joined {
            Ok((number, answer)) => answers.push((number, answer?)),
            Err(error) => return p.at.failed(format!("a call did not end: {error}")),
        }
    }
    answers.sort_by_key(|(number, _)| *number);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// Lets two calls go at once. Which one is spawned first alternates by `round`.
async fn two_at_once<A, B>(
    p: Probe<'_>,
    round: usize,
    a: impl Future<Output = Result<A, Failure>> + Send + 'static,
    b: impl Future<Output = Result<B, Failure>> + Send + 'static,
) -> Result<(A, B), Failure>
where
    A: Send + 'static,
    B: Send + 'static,
{
    enum Either<A, B> {
        A(A),
        B(B),
    }
    type Call<T> = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send>>;
    let mut calls: Vec<Call<Either<A, B>>> = vec![
        Box::pin(async { a.await.map(Either::A) }),
        Box::pin(async { b.await.map(Either::B) }),
    ];
    if round % 2 == 1 {
        calls.reverse();
    }
    let mut both = at_once(p, calls).await?.into_iter();
    match (both.next(), both.next()) {
        (Some(Either::A(a)), Some(Either::B(b))) | (Some(Either::B(b)), Some(Either::A(a))) => {
            Ok((a, b))
        }
        _ => p.at.failed("the check itself: two calls have two answers"),
    }
}

/// Lets many claims, or takeovers of `seen`, go at once. Exactly one must win, and all others must
/// meet it or what was there before.
async fn race(
    p: Probe<'_>,
    claims: Vec<NewClaim>,
    id: &Id,
    seen: Option<Token>,
) -> Result<NewClaim, Failure> {
    let calls = claims.iter().enumerate().map(|(number, claim)| {
        let (node, id, claim) = (p.node(number), id.clone(), *claim);
        async move {
            match seen {
                None => node.claim(&id, claim).await,
                Some(seen) => node.take_over(&id, seen, claim).await,
            }
        }
    });
    let (mut winners, mut met) = (Vec::new(), Vec::new());
    for (claim, answer) in claims.iter().zip(at_once(p, calls.collect()).await?) {
        match answer {
            Claimed::Won { .. } => winners.push(*claim),
            Claimed::Met(found) => met.push(found),
        }
    }
    let [winner] = winners[..] else {
        return p.at.failed(format!("{} of {CALLERS} calls at once won", winners.len()));
    };
    for found in met {
        p.at.ensure(found.token == winner.token || Some(found.token) == seen, || {
            format!("a call that lost met neither the winner nor what was there: {found:?}")
        })?;
    }
    Ok(winner)
}

pub(super) async fn one_of_many_claims_wins(p: Probe<'_>) -> Verdict {
    let owner = p.owner().await?;
    for round in 0..ROUNDS {
        let id = p.id(&format!("round {round}"))?;
        let claims = (0..CALLERS).map(|_| owner.claim()).collect();
        let winner = race(p, claims, &id, None).await?;
        let node = p.node(round);
        let found = node.sees(&id, &State::InFlight).await?;
        node.is_of(&found, &winner)?;
    }
    Ok(())
}

pub(super) async fn one_of_many_takeovers_wins(p: Probe<'_>) -> Verdict {
    for round in 0..ROUNDS / 2 {
        let (id, node) = (p.id(&format!("round {round}"))?, p.node(round));
        let owner = p.owner().await?;
        let seen = node.won_by(&id, &owner).await?;
        if round % 2 == 0 {
            p.advance(LEASE + SECOND).await?;
        } else {
            node.does(Step::Hold, &id, seen).await?;
        }
        let taker = p.owner().await?;
        let claims = (0..CALLERS).map(|_| taker.claim()).collect();
        let winner = race(p, claims, &id, Some(seen)).await?;
        let found = node.sees(&id, &State::InFlight).await?;
        node.is_of(&found, &winner)?;
    }
    Ok(())
}

/// What ends the record that claims meet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Going {
    Released,
    Forgotten,
    Resolved,
}

/// T4: claims that meet a record which goes away meanwhile claim again, until one of them owns.
pub(super) async fn claims_of_what_goes_away_have_one_winner(p: Probe<'_>) -> Verdict {
    let owner = p.owner().await?;
    // What goes away, before how many claims, and which of them come after it.
    for round in 0..27 {
        let id = p.id(&format!("round {round}"))?;
        let going = [Going::Released, Going::Forgotten, Going::Resolved][round % 3];
        let claims = [1, 3, CALLERS - 1][round / 3 % 3];
        let before = [0, claims / 2, claims][round / 9];
        let first = p.node(0).won_by(&id, &owner).await?;
        if going == Going::Resolved {
            p.node(0).does(Step::Hold, &id, first).await?;
        }
        type Call = Pin<Box<dyn Future<Output = Result<Option<NewClaim>, Failure>> + Send>>;
        let mut calls: Vec<Call> = Vec::new();
        for number in 0..claims {
            let (node, id, claim) = (p.node(number), id.clone(), owner.claim());
            calls.push(Box::pin(claims_until_owned(node, id, claim, first)));
        }
        let (node, gone) = (p.node(round), id.clone());
        calls.insert(
            before,
            Box::pin(async move {
                match going {
                    Going::Released => node.does(Step::Release, &gone, first).await?,
                    Going::Forgotten => {
                        let forgotten = node.forget(&gone, true).await?;
                        node.at.ensure(forgotten == Forgotten::Gone, || {
                            format!("forget: {forgotten:?}")
                        })?;
                    }
                    Going::Resolved => {
                        let resolved = node.resolve(&gone, None).await?;
                        node.at.ensure(resolved == Resolved::Done, || {
                            format!("resolve: {resolved:?}")
                        })?;
                    }
                }
                Ok(None)
            }),
        );
        let winners: Vec<_> = at_once(p, calls).await?.into_iter().flatten().collect();
        let [winner] = winners[..] else {
            return p.at.failed(format!("{} claims of what went away won", winners.len()));
        };
        let found = p.node(round + 1).sees(&id, &State::InFlight).await?;
        p.node(0).is_of(&found, &winner)?;
    }
    Ok(())
}

/// Claims until `id` has an owner after `first`; the claim, if that is its own.
async fn claims_until_owned(
    node: Node,
    id: Id,
    claim: NewClaim,
    first: Token,
) -> Result<Option<NewClaim>, Failure> {
    let until_owned = async {
        for attempt in 0_u64.. {
            match node.claim(&id, claim).await? {
                Claimed::Won { .. } => return Ok(Some(claim)),
                Claimed::Met(found) if found.token != first => break,
                // Close upon each other at first; then as those who wait do, who leave it room.
                Claimed::Met(_) if attempt < 3 => tokio::task::yield_now().await,
                Claimed::Met(_) => {
                    let settled = node.tier().settled(id.get(node.at)?);
                    let pause = Duration::from_millis(attempt.min(20));
                    let _ = tokio::time::timeout(pause, settled).await;
                }
            }
        }
        Ok(None)
    };
    match tokio::time::timeout(node.patience, until_owned).await {
        Ok(owned) => owned,
        Err(_) => node.at.failed("a claim met a record again and again that went away"),
    }
}

pub(super) async fn claims_race_with_giving_room_back(p: Probe<'_>) -> Verdict {
    const RECORDS: usize = 8;
    for round in 0..ROUNDS / 2 {
        let old = p.owner().await?;
        let ids = (0..RECORDS).map(|number| p.id(&format!("round {round}, {number}")));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        for id in &ids {
            p.node(0).won_by(id, &old).await?;
        }
        p.advance(MAX_RUN + RETENTION + SECOND).await?;
        let owner = p.owner().await?;
        let mut calls: Vec<Pin<Box<dyn Future<Output = _> + Send>>> = Vec::new();
        for (number, id) in ids.iter().chain(&ids).enumerate() {
            let (node, id, claim) = (p.node(number), id.clone(), owner.claim());
            calls.push(Box::pin(async move {
                let claimed = node.claim(&id, claim).await?;
                Ok(matches!(claimed, Claimed::Won { .. }).then_some((id, claim)))
            }));
        }
        // Before the claims, between them, after them.
        for before in [0, RECORDS, RECORDS * 2 + 2] {
            let node = p.node(round + before);
            let reap = async move { node.reap(RECORDS).await.map(|_| None) };
            calls.insert(before, Box::pin(reap));
        }
        let winners: Vec<_> = at_once(p, calls).await?.into_iter().flatten().collect();
        for id in &ids {
            let claims: Vec<_> = winners.iter().filter(|(of, _)| of == id).collect();
            let [(_, claim)] = claims[..] else {
                return p.at.failed(format!(
                    "{} of 2 claims of an ended record won, while its room was given back",
                    claims.len()
                ));
            };
            let found = p.node(round).under(7).sees(id, &State::InFlight).await?;
            p.node(0).is_of(&found, claim)?;
        }
    }
    Ok(())
}

pub(super) async fn a_takeover_races_with_the_completion(p: Probe<'_>) -> Verdict {
    for round in 0..ROUNDS {
        let (id, node, other) = (p.id(&format!("round {round}"))?, p.node(0), p.node(1));
        let owner = p.owner().await?;
        let token = node.won_by(&id, &owner).await?;
        if round < ROUNDS / 2 {
            node.does(Step::Hold, &id, token).await?;
        } else {
            p.advance(LEASE + SECOND).await?;
        }
        let claim = p.owner().await?.claim();
        let (completion, takeover) = {
            let (node, other, ids) = (node.clone(), other.clone(), [id.clone(), id.clone()]);
            let [a, b] = ids;
            two_at_once(
                p,
                round,
                async move { node.step(Step::Complete, &a, token).await },
                async move { other.take_over(&b, token, claim).await },
            )
            .await?
        };
        match (completion, takeover) {
            (Landed::Done, Claimed::Met(_)) => drop(node.replays(&id, &outcome("a step")).await?),
            (Landed::Lost(_), Claimed::Won { .. }) => {
                let found = node.sees(&id, &State::InFlight).await?;
                node.is_of(&found, &claim)?;
            }
            both => return p.at.failed(format!("not one of the two was first: {both:?}")),
        }
    }
    Ok(())
}

pub(super) async fn of_two_steps_with_one_token_one_is_first(p: Probe<'_>) -> Verdict {
    let owner = p.owner().await?;
    let (first, second) = (outcome("the first"), outcome("the second"));
    for round in 0..ROUNDS {
        let (node, other) = (p.node(0), p.node(1));
        // Two completions: one is kept and stays, and both are done.
        let id = p.id(&format!("complete, complete {round}"))?;
        let token = node.won_by(&id, &owner).await?;
        let calls = [&first, &second].into_iter().enumerate().map(|(number, outcome)| {
            let (node, id, outcome) = (p.node(number), id.clone(), outcome.clone());
            async move { node.complete(&id, token, Some(&outcome), RETENTION).await }
        });
        for landed in at_once(p, calls.collect()).await? {
            node.done("complete", landed)?;
        }
        let seen = node.look_up(&id).await?.map(|found| found.state);
        let kept = match seen {
            Some(State::Completed(kept)) if kept == first || kept == second => kept,
            other => return p.at.failed(format!("two completions have left {other:?}")),
        };
        other.replays(&id, &kept).await?;

        // A completion and a release: one is done.
        let id = p.id(&format!("complete, release {round}"))?;
        let token = node.won_by(&id, &owner).await?;
        let landed = two_steps(p, round, &id, token, [Step::Complete, Step::Release]).await?;
        match landed {
            (Landed::Done, Landed::Lost(_)) => drop(node.replays(&id, &outcome("a step")).await?),
            (Landed::Lost(_), Landed::Done) => node.sees_nothing(&id).await?,
            both => return p.at.failed(format!("completed and released: {both:?}")),
        }

        // A completion and a hold: it is completed in the end.
        let id = p.id(&format!("complete, hold {round}"))?;
        let token = node.won_by(&id, &owner).await?;
        let (completed, _) = two_steps(p, round, &id, token, [Step::Complete, Step::Hold]).await?;
        node.done("complete", completed)?;
        node.replays(&id, &outcome("a step")).await?;
    }
    Ok(())
}

async fn two_steps(
    p: Probe<'_>,
    round: usize,
    id: &Id,
    token: Token,
    steps: [Step; 2],
) -> Result<(Landed, Landed), Failure> {
    let [a, b] = [(p.node(0), steps[0]), (p.node(1), steps[1])].map(|(node, step)| {
        let id = id.clone();
        async move { node.step(step, &id, token).await }
    });
    two_at_once(p, round, a, b).await
}

pub(super) async fn operators_race_with_the_completion(p: Probe<'_>) -> Verdict {
    let owner = p.owner().await?;
    let settled = outcome("settled by an operator");
    for round in 0..ROUNDS {
        let node = p.node(0);
        let id = p.id(&format!("resolve {round}"))?;
        let token = node.won_by(&id, &owner).await?;
        node.does(Step::Hold, &id, token).await?;
        let (completes, resolves) = (p.node(0), p.node(1));
        let (a, b, by) = (id.clone(), id.clone(), settled.clone());
        let both = two_at_once(
            p,
            round,
            async move { completes.step(Step::Complete, &a, token).await },
            async move { resolves.resolve(&b, Some(&by)).await },
        )
        .await?;
        match both {
            (Landed::Done, Resolved::Completed) => {
                drop(node.replays(&id, &outcome("a step")).await?);
            }
            (Landed::Lost(_), Resolved::Done) => drop(node.replays(&id, &settled).await?),
            both => return p.at.failed(format!("completed and resolved: {both:?}")),
        }

        let id = p.id(&format!("forget {round}"))?;
        let token = node.won_by(&id, &owner).await?;
        let (completes, forgets) = (p.node(0), p.node(1));
        let (a, b) = (id.clone(), id.clone());
        let (landed, forgotten) = two_at_once(
            p,
            round,
            async move { completes.complete(&a, token, None, HOUR).await },
            async move { forgets.forget(&b, true).await },
        )
        .await?;
        p.at.ensure(forgotten == Forgotten::Gone, || format!("forget: {forgotten:?}"))?;
        let there = node.look_up(&id).await?;
        p.at.ensure(there.is_none(), || {
            format!("forgotten, {landed:?}, and there is {}", shown(there.as_ref()))
        })?;
    }
    Ok(())
}

/// Steps that have nothing to do with each other, and some that have: none of them fails.
pub(super) async fn many_steps_at_once_fail_nobody(p: Probe<'_>) -> Verdict {
    for round in 0..ROUNDS / 4 {
        let owner = p.silent_owner();
        let mut calls: Vec<Pin<Box<dyn Future<Output = Verdict> + Send>>> = Vec::new();
        for number in 0..CALLERS {
            let (node, owner) = (p.node(number), owner.clone());
            let id = p.id(&format!("round {round}, {number}"))?;
            calls.push(Box::pin(async move {
                // The first heartbeat of this owner, by all of them.
                node.beat(owner.owner, LEASE).await?;
                let token = node.won_by(&id, &owner).await?;
                node.beat(owner.owner, LEASE).await?;
                node.does(Step::Checkpoint, &id, token).await?;
                node.does(Step::Hold, &id, token).await?;
                node.does(Step::Complete, &id, token).await?;
                node.replays(&id, &outcome("a step")).await?;
                node.forget(&id, false).await?;
                node.sees_nothing(&id).await
            }));
            let node = p.node(number + 1);
            calls.push(Box::pin(async move {
                node.reap(1).await?;
                node.recalls(None).await.map(drop)
            }));
        }
        at_once(p, calls).await?;
    }
    Ok(())
}
