//! Keeps nothing: what making requests and counting them costs by itself.

use std::hint::black_box;

use crate::{
    ask::{Answer, Ask, Id},
    peer::{Met, Peer, Time},
};

pub(super) const NAME: &str = "(harness)";

pub(super) struct Nothing;

impl Peer for Nothing {
    const NAME: &'static str = NAME;
    type Permit<'a> = ();
    type Kept = Answer;

    fn new(_: Time) -> Self {
        Self
    }

    fn claim(&self, ask: &Ask) -> Met<(), Answer> {
        black_box(ask);
        Met::Won(())
    }

    fn complete(&self, (): (), answer: Answer) {
        black_box(answer);
    }

    fn remove(&self, id: &Id) {
        black_box(id);
    }
}
