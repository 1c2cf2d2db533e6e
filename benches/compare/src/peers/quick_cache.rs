//! quick_cache: its guard is a claim, and the placeholder behind it is "in flight". What waits
//! there has no fingerprint yet, so a mismatch is seen only after completion.
//!
//! It is a cache and may evict: its room is far above what is put in.

use std::time::Duration;

use quick_cache::{
    OptionsBuilder, UnitWeighter,
    sync::{Cache, DefaultLifecycle, GuardResult, PlaceholderGuard},
};

use crate::{
    ask::{Answer, Ask, Id, Print},
    peer::{Met, Peer, Time},
};

use super::record::Record;

type Hasher = ahash::RandomState;
type Lifecycle = DefaultLifecycle<Id, Record>;
type Guard<'a> = PlaceholderGuard<'a, Id, Record, UnitWeighter, Hasher, Lifecycle>;

pub(super) struct QuickCache(Cache<Id, Record, UnitWeighter, Hasher, Lifecycle>);

pub(super) struct Permit<'a> {
    guard: Guard<'a>,
    print: Print,
}

impl QuickCache {
    fn ask(&self, ask: &Ask, wait: Option<Duration>) -> Met<Permit<'_>, Answer> {
        match self.0.get_value_or_guard(&ask.id, wait) {
            GuardResult::Guard(guard) => Met::Won(Permit { guard, print: ask.print }),
            GuardResult::Value(there) => there.tell(&ask.print),
            GuardResult::Timeout => Met::InFlight,
        }
    }
}

impl Peer for QuickCache {
    const NAME: &'static str = "quick_cache";
    type Permit<'a> = Permit<'a>;
    type Kept = Answer;

    fn new(_: Time) -> Self {
        let options = OptionsBuilder::new()
            .estimated_items_capacity(1_000_000)
            .weight_capacity(1 << 32)
            .build()
            .expect("both are set");
        Self(Cache::with_options(options, UnitWeighter, Hasher::new(), DefaultLifecycle::default()))
    }

    fn claim<'a>(&'a self, ask: &Ask) -> Met<Permit<'a>, Answer> {
        self.ask(ask, Some(Duration::ZERO))
    }

    fn complete(&self, permit: Permit<'_>, answer: Answer) {
        let inserted = permit.guard.insert(Record::completed(permit.print, answer));
        assert!(inserted.is_ok(), "the placeholder is gone");
    }

    fn remove(&self, id: &Id) {
        self.0.remove(id);
    }

    const WAITS: bool = true;

    fn share(&self, ask: &Ask, work: impl FnOnce() -> Answer) -> Option<Answer> {
        match self.ask(ask, None) {
            Met::Won(permit) => {
                let answer = work();
                self.complete(permit, answer.clone());
                Some(answer)
            }
            Met::Replay(answer) => Some(answer),
            Met::InFlight | Met::Mismatch => None,
        }
    }
}
