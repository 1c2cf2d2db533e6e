//! scc: a map of locked buckets that grows bucket by bucket.

use scc::{HashMap, hash_map::Entry};

use crate::{
    ask::{Answer, Ask, Id},
    peer::{Met, Peer, Time},
};

use super::record::Record;

pub(super) struct Scc(HashMap<Id, Record, ahash::RandomState>);

impl Peer for Scc {
    const NAME: &'static str = "scc";
    type Permit<'a> = Id;
    type Kept = Answer;

    fn new(_: Time) -> Self {
        Self(HashMap::with_hasher(ahash::RandomState::new()))
    }

    fn claim(&self, ask: &Ask) -> Met<Id, Answer> {
        match self.0.entry_sync(ask.id) {
            Entry::Vacant(place) => {
                place.insert_entry(Record::in_flight(ask.print));
                Met::Won(ask.id)
            }
            Entry::Occupied(there) => there.get().tell(&ask.print),
        }
    }

    fn meet(&self, ask: &Ask) -> Met<Id, Answer> {
        let there = self.0.read_sync(&ask.id, |_, there| there.tell(&ask.print));
        there.unwrap_or_else(|| self.claim(ask))
    }

    fn complete(&self, id: Id, answer: Answer) {
        self.0.update_sync(&id, |_, record| record.complete(answer)).expect("claimed");
    }

    fn remove(&self, id: &Id) {
        self.0.remove_sync(id);
    }
}
