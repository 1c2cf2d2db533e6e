//! What a bare map keeps for an identity.

use crate::{
    ask::{Answer, Print},
    peer::Met,
};

/// The fingerprint, and the answer once there is one. Until then the owner runs.
#[derive(Clone)]
pub(super) struct Record {
    print: Print,
    answer: Option<Answer>,
}

impl Record {
    pub(super) fn in_flight(print: Print) -> Self {
        Self { print, answer: None }
    }

    pub(super) fn completed(print: Print, answer: Answer) -> Self {
        Self { print, answer: Some(answer) }
    }

    pub(super) fn complete(&mut self, answer: Answer) {
        self.answer = Some(answer);
    }

    /// What a duplicate is told. The mismatch test comes first.
    pub(super) fn tell<P>(&self, print: &Print) -> Met<P, Answer> {
        match &self.answer {
            _ if self.print != *print => Met::Mismatch,
            Some(answer) => Met::Replay(answer.clone()),
            None => Met::InFlight,
        }
    }
}
