//! moka: an entry inserts once, and tells who did. Its values are shared, so the owner completes
//! the one it put in without looking it up again.
//!
//! A caller that waits takes `get_with`, in which the work itself runs. It is a cache and may
//! evict: it is given no capacity, so that nothing is.

use std::sync::{Arc, OnceLock};

use moka::sync::Cache;

use crate::{
    ask::{Answer, Ask, Id, Print},
    peer::{Met, Peer, Time},
};

pub(super) struct Moka(Cache<Id, Arc<Record>, ahash::RandomState>);

pub(super) struct Record {
    print: Print,
    answer: OnceLock<Answer>,
}

impl Record {
    fn tell<P>(&self, print: &Print) -> Met<P, Answer> {
        match self.answer.get() {
            _ if self.print != *print => Met::Mismatch,
            Some(answer) => Met::Replay(answer.clone()),
            None => Met::InFlight,
        }
    }
}

impl Peer for Moka {
    const NAME: &'static str = "moka";
    type Permit<'a> = Arc<Record>;
    type Kept = Answer;

    fn new(_: Time) -> Self {
        Self(Cache::builder().build_with_hasher(ahash::RandomState::new()))
    }

    fn claim(&self, ask: &Ask) -> Met<Arc<Record>, Answer> {
        let fresh = || Arc::new(Record { print: ask.print, answer: OnceLock::new() });
        let entry = self.0.entry(ask.id).or_insert_with(fresh);
        if entry.is_fresh() {
            return Met::Won(entry.into_value());
        }
        entry.value().tell(&ask.print)
    }

    fn meet(&self, ask: &Ask) -> Met<Arc<Record>, Answer> {
        let there = self.0.get(&ask.id).map(|there| there.tell(&ask.print));
        there.unwrap_or_else(|| self.claim(ask))
    }

    fn complete(&self, record: Arc<Record>, answer: Answer) {
        assert!(record.answer.set(answer).is_ok(), "completed twice");
    }

    fn remove(&self, id: &Id) {
        self.0.invalidate(id);
    }

    const WAITS: bool = true;

    fn share(&self, ask: &Ask, work: impl FnOnce() -> Answer) -> Option<Answer> {
        let record = self.0.get_with(ask.id, || {
            Arc::new(Record { print: ask.print, answer: OnceLock::from(work()) })
        });
        match record.tell::<()>(&ask.print) {
            Met::Replay(answer) => Some(answer),
            _ => None,
        }
    }
}
