//! dashmap: what a reader would reach for. A claim is an entry; completion looks the key up again,
//! because a guard of the map must not be held while work runs.

use dashmap::{DashMap, Entry};

use crate::{
    ask::{Answer, Ask, Id},
    peer::{Met, Peer, Time},
};

use super::record::Record;

pub(super) struct Dashmap(DashMap<Id, Record, ahash::RandomState>);

impl Peer for Dashmap {
    const NAME: &'static str = "dashmap";
    type Permit<'a> = Id;
    type Kept = Answer;

    fn new(_: Time) -> Self {
        Self(DashMap::with_hasher(ahash::RandomState::new()))
    }

    fn claim(&self, ask: &Ask) -> Met<Id, Answer> {
        match self.0.entry(ask.id) {
            Entry::Vacant(place) => {
                place.insert(Record::in_flight(ask.print));
                Met::Won(ask.id)
            }
            Entry::Occupied(there) => there.get().tell(&ask.print),
        }
    }

    fn meet(&self, ask: &Ask) -> Met<Id, Answer> {
        let there = self.0.get(&ask.id).map(|there| there.tell(&ask.print));
        there.unwrap_or_else(|| self.claim(ask))
    }

    fn complete(&self, id: Id, answer: Answer) {
        self.0.get_mut(&id).expect("claimed").complete(answer);
    }

    fn remove(&self, id: &Id) {
        self.0.remove(id);
    }
}
