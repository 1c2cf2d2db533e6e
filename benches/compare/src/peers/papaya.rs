//! papaya: lock-free look-ups. Values do not change in place, so the answer has a cell of its own.
//!
//! It resizes in the blocking mode, which its documentation recommends for throughput and which
//! leaves reads one table to look into.

use std::sync::OnceLock;

use papaya::{HashMap, ResizeMode};

use crate::{
    ask::{Answer, Ask, Id, Print},
    peer::{Met, Peer, Time},
};

pub(super) struct Papaya(HashMap<Id, Record, ahash::RandomState>);

struct Record {
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

impl Peer for Papaya {
    const NAME: &'static str = "papaya";
    type Permit<'a> = Id;
    type Kept = Answer;

    fn new(_: Time) -> Self {
        let builder = HashMap::builder().hasher(ahash::RandomState::new());
        Self(builder.resize_mode(ResizeMode::Blocking).build())
    }

    fn claim(&self, ask: &Ask) -> Met<Id, Answer> {
        let fresh = Record { print: ask.print, answer: OnceLock::new() };
        match self.0.pin().try_insert(ask.id, fresh) {
            Ok(_) => Met::Won(ask.id),
            Err(there) => there.current.tell(&ask.print),
        }
    }

    fn meet(&self, ask: &Ask) -> Met<Id, Answer> {
        let there = self.0.pin().get(&ask.id).map(|there| there.tell(&ask.print));
        there.unwrap_or_else(|| self.claim(ask))
    }

    fn complete(&self, id: Id, answer: Answer) {
        let first = self.0.pin().get(&id).expect("claimed").answer.set(answer);
        assert!(first.is_ok(), "completed twice");
    }

    fn remove(&self, id: &Id) {
        self.0.pin().remove(id);
    }
}
