//! Our own store, by its public face only, as a program would use it.

use std::time::Duration;

use oncekey::{
    Claim, Fingerprint, Identity, ManualClock, Outcome, Permit, Scheme, Settled, Store, Sweep,
};

use crate::{
    ask::{Answer, Ask, Id},
    peer::{Met, Peer, Seat, Time},
};

pub(super) const NAME: &str = "oncekey";

pub(super) struct Oncekey {
    store: Store,
    clock: ManualClock,
}

fn identity(id: &Id) -> Identity<'_> {
    Identity::new(id.account(), id.endpoint(), id.key()).expect("within its bounds")
}

fn outcome(answer: Answer) -> Outcome {
    Outcome::new(answer.status).body(answer.body)
}

impl Oncekey {
    fn ask(&self, ask: &Ask) -> Claim {
        let print = Fingerprint::from_parts(Scheme::REQUEST_1, ask.print);
        self.store.claim(&identity(&ask.id), print).expect("there is room")
    }
}

impl Peer for Oncekey {
    const NAME: &'static str = NAME;
    type Permit<'a> = Permit;
    type Kept = Outcome;

    fn new(time: Time) -> Self {
        let clock = ManualClock::new();
        // No limit is met here, but all of them are kept count of.
        let builder = Store::builder().max_keys(1 << 24).max_bytes(1 << 34);
        let builder = match time {
            Time::Real => builder,
            Time::ByHand { retention } => builder
                .retention(retention)
                .lease(retention / 4)
                .tick(retention / 600)
                .sweep(Sweep::Manual)
                .clock(clock.clone()),
        };
        Self { store: builder.build().expect("valid settings"), clock }
    }

    fn claim(&self, ask: &Ask) -> Met<Permit, Outcome> {
        match self.ask(ask) {
            Claim::Won(permit) => Met::Won(permit),
            Claim::InFlight(_) => Met::InFlight,
            Claim::Replay(replay) => Met::Replay(replay.into_outcome()),
            Claim::Mismatch => Met::Mismatch,
            other => panic!("an answer nobody expects: {other:?}"),
        }
    }

    fn complete(&self, permit: Permit, answer: Answer) {
        assert!(permit.complete(outcome(answer)).expect("the permit is good").kept);
    }

    fn remove(&self, id: &Id) {
        // In flight or gone: nothing to remove.
        let _ = self.store.forget(&identity(id));
    }

    const ENDS: bool = true;

    fn pass(&self, by: Duration) {
        self.clock.advance(by);
    }

    fn reap(&self) -> usize {
        self.store.sweep().reaped
    }

    fn keys(&self) -> Option<usize> {
        Some(self.store.stats().keys)
    }

    const WAITS: bool = true;

    fn share(&self, ask: &Ask, work: impl FnOnce() -> Answer) -> Option<Outcome> {
        match self.ask(ask) {
            Claim::Won(permit) => {
                let outcome = outcome(work());
                permit.complete(outcome.clone()).ok()?;
                Some(outcome)
            }
            Claim::InFlight(pending) => match pending.wait_timeout(Duration::from_secs(10)) {
                Ok(Settled::Completed(replay)) => Some(replay.into_outcome()),
                _ => None,
            },
            Claim::Replay(replay) => Some(replay.into_outcome()),
            _ => None,
        }
    }

    const SEATS: bool = true;

    fn seat<'a>(&'a self, ask: &Ask) -> Option<Seat<'a, Outcome>> {
        let Claim::InFlight(pending) = self.ask(ask) else { return None };
        Some(Box::pin(async {
            match pending.wait().await {
                Settled::Completed(replay) => Some(replay.into_outcome()),
                _ => None,
            }
        }))
    }
}
