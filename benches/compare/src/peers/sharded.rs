//! 64 locked tables of boxed records: the plainest thing that is fast. Growth moves pointers only.

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::Mutex;

use crate::{
    ask::{Answer, Ask, Id},
    peer::{Met, Peer, Time},
};

use super::record::Record;

const SHARDS: usize = 64;

type Table = HashTable<Box<(Id, Record)>>;

pub(super) struct Sharded {
    hasher: ahash::RandomState,
    /// Apart from each other, so that two cores at two locks do not share a cache line.
    shards: Box<[Apart]>,
}

#[repr(align(128))]
#[derive(Default)]
struct Apart(Mutex<Table>);

impl Sharded {
    fn hash(&self, id: &Id) -> u64 {
        self.hasher.hash_one(id)
    }

    /// By the middle bits: the table takes its bits from either end.
    fn shard(&self, hash: u64) -> &Mutex<Table> {
        &self.shards[(hash >> 40) as usize % SHARDS].0
    }
}

impl Peer for Sharded {
    const NAME: &'static str = "64 x Mutex";
    /// With the hash, which need not be taken again.
    type Permit<'a> = (u64, Id);
    type Kept = Answer;

    fn new(_: Time) -> Self {
        Self {
            hasher: ahash::RandomState::new(),
            shards: (0..SHARDS).map(|_| Apart::default()).collect(),
        }
    }

    fn claim(&self, ask: &Ask) -> Met<(u64, Id), Answer> {
        let hash = self.hash(&ask.id);
        let mut table = self.shard(hash).lock();
        match table.entry(hash, |there| there.0 == ask.id, |there| self.hash(&there.0)) {
            Entry::Vacant(place) => {
                place.insert(Box::new((ask.id, Record::in_flight(ask.print))));
                Met::Won((hash, ask.id))
            }
            Entry::Occupied(there) => there.get().1.tell(&ask.print),
        }
    }

    fn complete(&self, (hash, id): (u64, Id), answer: Answer) {
        let mut table = self.shard(hash).lock();
        table.find_mut(hash, |there| there.0 == id).expect("claimed").1.complete(answer);
    }

    fn remove(&self, id: &Id) {
        let hash = self.hash(id);
        let mut table = self.shard(hash).lock();
        let there = table.find_entry(hash, |there| there.0 == *id).ok();
        let record = there.map(|there| there.remove().0);
        // The lock first: freeing takes time.
        drop(table);
        drop(record);
    }
}
