//! Many attempts at once: claimed with one call, worked on together, answered one by one.
//!
//! Ground rules: an attempt that stands twice in a batch is claimed once. A batch works on what it
//! owns before it waits for anybody, so two batches that own parts of each other do not wait in a
//! circle; and what it comes to own by waiting it gives up, because its work was done.

use std::{collections::HashMap, future::Future};

use futures_util::{StreamExt as _, future::join_all, stream};

use super::{
    Backing, Job, Ran, RunError, Verdict, Worker,
    claiming::{Deadline, Met, Waits, met, wait_blocking},
    owner::{Ending, Owner, Settling},
};
use crate::{Fingerprint, Identity};

/// How many claims of one batch are under way in a tier at a time.
const AT_ONCE: usize = 64;

/// One that stands once or several times in a batch, by the first place where it stands. What is
/// claimed, worked on and answered is known by that place, and by no other number.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    place: usize,
    id: Identity<'a>,
    fingerprint: Fingerprint,
}

struct Batch<'a> {
    /// The distinct ones, in order.
    attempts: Vec<Attempt<'a>>,
    /// For each place, the first one where the same stands.
    firsts: Vec<usize>,
    /// For each place; those that are no first ones have none.
    answers: Vec<Option<Result<Ran, RunError>>>,
}

/// What was claimed and is not answered yet.
#[derive(Default)]
struct Open<'a> {
    owners: Vec<(usize, Owner)>,
    waits: Vec<(Attempt<'a>, Waits)>,
}

impl<'a> Batch<'a> {
    fn of(attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>) -> Self {
        let mut seen = HashMap::new();
        let mut batch = Self { attempts: Vec::new(), firsts: Vec::new(), answers: Vec::new() };
        for (place, (id, fingerprint)) in attempts.into_iter().enumerate() {
            let (scheme, digest) = (fingerprint.scheme().id(), *fingerprint.digest());
            let name = (id.account(), id.endpoint(), id.key(), scheme, digest);
            let first = *seen.entry(name).or_insert(place);
            if first == place {
                batch.attempts.push(Attempt { place, id, fingerprint });
            }
            batch.firsts.push(first);
            batch.answers.push(None);
        }
        batch
    }

    /// What is answered by its claim is answered; the rest is open.
    fn sort(&mut self, met: Vec<Met>) -> Open<'a> {
        let mut open = Open::default();
        for (attempt, met) in self.attempts.iter().zip(met) {
            match met {
                Met::Own(owner) => open.owners.push((attempt.place, owner)),
                Met::Waits(waits) => open.waits.push((*attempt, waits)),
                Met::Over(told) => self.answers[attempt.place] = Some(told),
            }
        }
        open
    }

    fn answer(&mut self, place: usize, told: Result<Ran, RunError>) {
        self.answers[place] = Some(told);
    }

    /// An answer for each place, in order.
    fn finish(self) -> Vec<Result<Ran, RunError>> {
        let answer = |(place, first): (usize, usize)| {
            let told = self.answers[first].clone().unwrap_or(Err(RunError::InFlight));
            told.map(|ran| Ran { replayed: ran.replayed || first != place, ..ran })
        };
        self.firsts.iter().copied().enumerate().map(answer).collect()
    }
}

impl Open<'_> {
    fn begin(&mut self) -> Vec<Job> {
        self.owners.iter_mut().map(|(_, owner)| owner.begin()).collect()
    }

    /// Settles what was worked on. What the work has said nothing of is held.
    fn settle(&mut self, said: Vec<Verdict>) -> Vec<(usize, Settling)> {
        let silent = || Verdict::unknown("the work returned fewer verdicts than it was given jobs");
        let said = said.into_iter().chain(std::iter::repeat_with(silent));
        let settle = |((place, owner), said): ((usize, Owner), Verdict)| {
            (place, owner.settle(Ending::Said(said)))
        };
        self.owners.drain(..).zip(said).map(settle).collect()
    }
}

impl Worker {
    /// Runs `work` once for all of `attempts` that this caller owns, and answers each, in order.
    ///
    /// All are claimed first; then `work` is called with the jobs of those that are to run, in order,
    /// unless there are none, and returns a [`Verdict`] for each. [`Job::index`] tells whose attempt a
    /// job is. They may share a transaction, of which each is completed by its own
    /// [`Job::complete_in`].
    ///
    /// An attempt that stands in the batch again (the same identity and fingerprint) gets the answer
    /// of the first. One that another owner runs is waited for after the work, up to the
    /// [`wait_limit`](Self::wait_limit) for all together; if its owner gives it up meanwhile, it is
    /// [`RunError::Retry`].
    ///
    /// If the future is dropped, or the work panics: what was claimed and not begun is given up, what
    /// was begun is settled by `on_abandon`, all of the batch. If the work returns too few verdicts,
    /// the last ones are held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use oncekey::{Fingerprint, Identity, Outcome, Store};
    /// use oncekey::worker::{Verdict, Worker};
    ///
    /// let worker = Worker::from(Store::builder().build()?);
    /// let messages = [("invoice-7", "1200 usd"), ("invoice-8", "80 usd"), ("invoice-7", "1200 usd")];
    /// let attempts = messages.map(|(key, body)| {
    ///     let fp = Fingerprint::request("", "charge", body.as_bytes());
    ///     (Identity::new("acct_42", "charge", key).unwrap(), fp)
    /// });
    /// let answers = worker
    ///     .run_each(attempts, |jobs| async move {
    ///         let charge = |job: &oncekey::worker::Job| {
    ///             Verdict::Done(Outcome::new(200).body(messages[job.index()].1))
    ///         };
    ///         jobs.iter().map(charge).collect()
    ///     })
    ///     .await;
    /// let replayed: Vec<bool> = answers.into_iter().map(|ran| ran.unwrap().replayed).collect();
    /// assert_eq!(replayed, [false, false, true]);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_each<'a, F, Fut>(
        &self,
        attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>,
        work: F,
    ) -> Vec<Result<Ran, RunError>>
    where
        F: FnOnce(Vec<Job>) -> Fut,
        Fut: Future<Output = Vec<Verdict>>,
    {
        let mut batch = Batch::of(attempts);
        let mut open = batch.sort(self.claim_each(&batch.attempts).await);
        if !open.owners.is_empty() {
            let said = work(open.begin()).await;
            for (place, settling) in open.settle(said) {
                batch.answer(place, settling.done().await);
            }
        }
        for (place, told) in self.wait_each(open.waits).await {
            batch.answer(place, told);
        }
        batch.finish()
    }

    /// As [`run_each`](Self::run_each), by a thread.
    ///
    /// # Panics
    ///
    /// As [`run_blocking`](Self::run_blocking).
    pub fn run_each_blocking<'a, F>(
        &self,
        attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>,
        work: F,
    ) -> Vec<Result<Ran, RunError>>
    where
        F: FnOnce(Vec<Job>) -> Vec<Verdict>,
    {
        let _entered = self.enter();
        let mut batch = Batch::of(attempts);
        let met = match &self.backing {
            Backing::Memory(_) => self.claim_each_in_memory(&batch.attempts),
            Backing::Tier(tiered) => tiered.runtime().block_on(self.claim_each(&batch.attempts)),
        };
        let mut open = batch.sort(met);
        if !open.owners.is_empty() {
            let said = work(open.begin());
            for (place, settling) in open.settle(said) {
                batch.answer(place, self.await_blocking(settling));
            }
        }
        let told = match &self.backing {
            Backing::Memory(store) => {
                let deadline = Deadline::after(self.wait_limit);
                let wait = |(Attempt { place, .. }, waits): (Attempt<'_>, Waits)| {
                    (place, given_up_if_owned(wait_blocking(store, waits, deadline, place)))
                };
                open.waits.into_iter().map(wait).collect()
            }
            Backing::Tier(tiered) => tiered.runtime().block_on(self.wait_each(open.waits)),
        };
        for (place, told) in told {
            batch.answer(place, told);
        }
        batch.finish()
    }

    async fn claim_each(&self, attempts: &[Attempt<'_>]) -> Vec<Met> {
        match &self.backing {
            Backing::Memory(_) => self.claim_each_in_memory(attempts),
            tier @ Backing::Tier(_) => {
                let claim = |Attempt { place, id, fingerprint }| async move {
                    tier.claim(&id, fingerprint, place).await
                };
                // Collected, so that no future borrows from the iterator.
                let claims: Vec<_> = attempts.iter().copied().map(claim).collect();
                stream::iter(claims).buffered(AT_ONCE).collect().await
            }
        }
    }

    fn claim_each_in_memory(&self, attempts: &[Attempt<'_>]) -> Vec<Met> {
        let Backing::Memory(store) = &self.backing else { return Vec::new() };
        let claims = store.claim_each(attempts.iter().map(|it| (it.id, it.fingerprint)));
        let places = attempts.iter().map(|it| it.place);
        claims.into_iter().zip(places).map(|(claim, place)| met(store, claim, place)).collect()
    }

    /// Waits for the owners of all that others run, at the same time.
    async fn wait_each<'a>(
        &self,
        waits: Vec<(Attempt<'a>, Waits)>,
    ) -> Vec<(usize, Result<Ran, RunError>)> {
        let deadline = Deadline::after(self.wait_limit);
        let wait = |(attempt, mut waits): (Attempt<'a>, Waits)| async move {
            let Attempt { place, id, fingerprint } = attempt;
            loop {
                let met = match self.backing.wait(waits, deadline, place).await {
                    Some(met) => met,
                    None => self.backing.claim(&id, fingerprint, place).await,
                };
                match met {
                    Met::Waits(next) => waits = next,
                    met => return (place, given_up_if_owned(met)),
                }
            }
        };
        join_all(waits.into_iter().map(wait)).await
    }
}

/// The batch's work was done: what it comes to own now goes to the next (dropping gives it up).
fn given_up_if_owned(met: Met) -> Result<Ran, RunError> {
    match met {
        Met::Over(told) => told,
        Met::Own(_) => {
            match Verdict::<()>::retry("its owner gave it up, while this batch waited") {
                Verdict::Retry(cause) => Err(RunError::Retry(cause)),
                _ => Err(RunError::InFlight),
            }
        }
        Met::Waits(_) => Err(RunError::InFlight),
    }
}
