//! The project's first core: dashmap again, with all the rules around it.

use std::time::Duration;

use oncekey::{Fingerprint, Identity, ManualClock, Outcome, Scheme, SystemClock};

use crate::{
    ask::{Answer, Ask, Id},
    first::{Claim, Permit, Settings, Settled, Store},
    peer::{Met, Peer, Seat, Time},
};

pub(super) struct First {
    store: Store,
    clock: ManualClock,
}

impl First {
    fn ask(&self, ask: &Ask) -> Claim {
        let id = &ask.id;
        let id = Identity::new(id.account(), id.endpoint(), id.key()).expect("within its bounds");
        self.store.claim(&id, Fingerprint::from_parts(Scheme::REQUEST_1, ask.print))
    }
}

impl Peer for First {
    const NAME: &'static str = "first core";
    type Permit<'a> = Permit;
    type Kept = Outcome;

    fn new(time: Time) -> Self {
        let clock = ManualClock::new();
        let (max_keys, max_bytes) = (1 << 30, 1 << 40);
        let store = match time {
            Time::Real => Store::new(Settings {
                retention: Duration::from_secs(24 * 60 * 60),
                lease: Duration::from_secs(60),
                tick: Duration::from_secs(1),
                max_keys,
                max_bytes,
                clock: SystemClock::new(),
                thread: true,
            }),
            Time::ByHand { retention } => Store::new(Settings {
                retention,
                lease: retention / 4,
                tick: retention / 600,
                max_keys,
                max_bytes,
                clock: clock.clone(),
                thread: false,
            }),
        };
        Self { store, clock }
    }

    fn claim(&self, ask: &Ask) -> Met<Permit, Outcome> {
        match self.ask(ask) {
            Claim::Won(permit) => Met::Won(permit),
            Claim::InFlight(_) => Met::InFlight,
            Claim::Replay(outcome) => Met::Replay(outcome),
            Claim::Mismatch => Met::Mismatch,
            Claim::Other => panic!("an answer nobody expects"),
        }
    }

    fn complete(&self, permit: Permit, answer: Answer) {
        let outcome = Outcome::new(answer.status).body(answer.body);
        assert!(permit.complete(outcome).expect("the permit is good"));
    }

    fn remove(&self, _: &Id) {
        // Its records end by themselves.
    }

    const ENDS: bool = true;

    fn pass(&self, by: Duration) {
        self.clock.advance(by);
    }

    fn reap(&self) -> usize {
        self.store.sweep()
    }

    fn keys(&self) -> Option<usize> {
        Some(self.store.keys())
    }

    const SEATS: bool = true;

    fn seat<'a>(&'a self, ask: &Ask) -> Option<Seat<'a, Outcome>> {
        let Claim::InFlight(pending) = self.ask(ask) else { return None };
        Some(Box::pin(async {
            match pending.wait().await {
                Settled::Completed(outcome) => Some(outcome),
                Settled::Yours(_) | Settled::Other => None,
            }
        }))
    }
}
