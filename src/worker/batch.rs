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

/// One that stands once or several times in a batch: the first place where it stands.
type Attempt<'a> = (usize, Identity<'a>, Fingerprint);

/// An answer for each distinct attempt, as they come in.
struct Batch<'a> {
    attempts: Vec<Attempt<'a>>,
    /// For each place in the batch, which of `attempts` it is.
    places: Vec<usize>,
    answers: Vec<Option<Result<Ran, RunError>>>,
}

/// What was claimed and is not answered yet, by its number among the distinct attempts.
#[derive(Default)]
struct Open {
    owners: Vec<(usize, Owner)>,
    waits: Vec<(usize, Waits)>,
}

impl<'a> Batch<'a> {
    fn of(attempts: impl IntoIterator<Item = (Identity<'a>, Fingerprint)>) -> Self {
        let mut seen = HashMap::new();
        let mut batch = Self { attempts: Vec::new(), places: Vec::new(), answers: Vec::new() };
        for (place, (id, fingerprint)) in attempts.into_iter().enumerate() {
            let (scheme, digest) = (fingerprint.scheme().id(), *fingerprint.digest());
            let name = (id.account(), id.endpoint(), id.key(), scheme, digest);
            let number = *seen.entry(name).or_insert_with(|| {
                batch.attempts.push((place, id, fingerprint));
                batch.answers.push(None);
                batch.attempts.len() - 1
            });
            batch.places.push(number);
        }
        batch
    }

    /// What is answered by its claim is answered; the rest is open.
    fn sort(&mut self, met: Vec<Met>) -> Open {
        let mut open = Open::default();
        for (number, met) in met.into_iter().enumerate() {
            match met {
                Met::Own(owner) => open.owners.push((number, owner)),
                Met::Waits(waits) => open.waits.push((number, waits)),
                Met::Over(told) => self.answers[number] = Some(told),
            }
        }
        open
    }

    fn answer(&mut self, number: usize, told: Result<Ran, RunError>) {
        self.answers[number] = Some(told);
    }

    /// An answer for each place, in order.
    fn finish(self) -> Vec<Result<Ran, RunError>> {
        let Self { attempts, places, answers } = self;
        let answer = |(place, number): (usize, usize)| {
            let told = answers[number].clone().unwrap_or(Err(RunError::InFlight));
            let is_first = attempts[number].0 == place;
            told.map(|ran| Ran { replayed: ran.replayed || !is_first, ..ran })
        };
        places.into_iter().enumerate().map(answer).collect()
    }
}

impl Open {
    fn begin(&mut self) -> Vec<Job> {
        self.owners.iter_mut().map(|(_, owner)| owner.begin()).collect()
    }

    /// Settles what was worked on. What the work has said nothing of is held.
    fn settle(&mut self, said: Vec<Verdict>) -> Vec<(usize, Settling)> {
        let silent = || Verdict::unknown("the work returned fewer verdicts than it was given jobs");
        let said = said.into_iter().chain(std::iter::repeat_with(silent));
        let settle = |((number, owner), said): ((usize, Owner), Verdict)| {
            (number, owner.settle(Ending::Said(said)))
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
    /// If the future is dropped, or the work panics: what was claimed and not begun is released, what
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
            for (number, settling) in open.settle(said) {
                batch.answer(number, settling.done().await);
            }
        }
        for (number, told) in self.wait_each(&batch.attempts, open.waits).await {
            batch.answer(number, told);
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
            for (number, settling) in open.settle(said) {
                batch.answer(number, self.await_blocking(settling));
            }
        }
        let told = match &self.backing {
            Backing::Memory(store) => {
                let deadline = Deadline::after(self.wait_limit);
                let wait = |(number, waits): (usize, Waits)| {
                    (number, given_up_if_owned(wait_blocking(store, waits, deadline, number)))
                };
                open.waits.into_iter().map(wait).collect()
            }
            Backing::Tier(tiered) => {
                tiered.runtime().block_on(self.wait_each(&batch.attempts, open.waits))
            }
        };
        for (number, told) in told {
            batch.answer(number, told);
        }
        batch.finish()
    }

    async fn claim_each(&self, attempts: &[Attempt<'_>]) -> Vec<Met> {
        match &self.backing {
            Backing::Memory(_) => self.claim_each_in_memory(attempts),
            tier @ Backing::Tier(_) => {
                let claim = |(place, id, fingerprint)| async move {
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
        let claims = store.claim_each(attempts.iter().map(|&(_, id, fp)| (id, fp)));
        let places = attempts.iter().map(|&(place, ..)| place);
        claims.into_iter().zip(places).map(|(claim, place)| met(store, claim, place)).collect()
    }

    /// Waits for the owners of all that others run, at the same time.
    async fn wait_each(
        &self,
        attempts: &[Attempt<'_>],
        waits: Vec<(usize, Waits)>,
    ) -> Vec<(usize, Result<Ran, RunError>)> {
        let deadline = Deadline::after(self.wait_limit);
        let wait = |(number, mut waits): (usize, Waits)| async move {
            let (place, id, fingerprint) = attempts[number];
            loop {
                let met = match self.backing.wait(waits, deadline, place).await {
                    Some(met) => met,
                    None => self.backing.claim(&id, fingerprint, place).await,
                };
                match met {
                    Met::Waits(next) => waits = next,
                    met => return (number, given_up_if_owned(met)),
                }
            }
        };
        join_all(waits.into_iter().map(wait)).await
    }
}

/// The batch's work was done: what it comes to own now goes to the next (dropping releases it).
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
