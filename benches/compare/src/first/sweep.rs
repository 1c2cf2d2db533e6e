//! What the sweep does.

use std::sync::Arc;

use super::{
    clock::Millis,
    engine::{Engine, up},
    record::Record,
    word::{Kind, View, Word},
};

/// What one step of the sweep did.
pub(crate) struct Step {
    /// Records taken out.
    pub(crate) reaped: usize,
    /// Whether more is due.
    pub(crate) more: bool,
}

impl Engine {
    /// A time before which nothing is due.
    pub(crate) fn next_due(&self) -> Option<Millis> {
        self.expiry.next()
    }

    /// Looks at a bounded number of records whose timers have fired.
    pub(crate) fn sweep_step(&self, now: Millis) -> Step {
        let mut fired = Vec::new();
        let more = self.expiry.fired(now, &mut fired);
        let reaped = fired.into_iter().map(|record| self.fire(&record, now)).filter(|it| *it);
        Step { reaped: reaped.count(), more }
    }

    /// Gives memory back that a burst has left behind.
    pub(crate) fn trim(&self) {
        self.index.shrink_if_sparse();
    }

    /// Looks at one record whose timer has fired; true if it was taken out.
    fn fire(&self, record: &Arc<Record>, now: Millis) -> bool {
        {
            // A timer set for later by somebody else in the meantime stays.
            let mut parts = record.parts();
            parts.timer = parts.timer.filter(|(_, set)| *set > now);
        }
        loop {
            let word = record.word();
            match word.view(now) {
                View::InFlight if word.has_waiters() => {
                    self.expiry.exactly(record, &mut record.parts(), word.at());
                    return false;
                }
                View::InFlight | View::Held | View::Completed | View::NotKept => {
                    self.expiry.by_tick(record, &mut record.parts(), word.at());
                    return false;
                }
                View::Lapsed => {
                    // Its end has a new timer now.
                    self.hold_lapsed(record, word, now);
                    return false;
                }
                View::Gone => {
                    if word.kind() != Kind::Held || record.swap(word, word.ended()).is_ok() {
                        return self.reap(record, word);
                    }
                }
            }
        }
    }

    fn reap(&self, record: &Arc<Record>, word: Word) -> bool {
        let reaped = self.unlink(record);
        if reaped {
            self.count_end(word);
        }
        reaped
    }

    /// Counts a record that ended by its retention; what ended otherwise was counted then.
    pub(super) fn count_end(&self, word: Word) {
        if word.kind() != Kind::Ended {
            up(&self.counters.expired);
        }
    }
}
