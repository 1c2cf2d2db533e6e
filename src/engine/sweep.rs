//! What the sweep does: lapses are judged, what has ended gives its memory back (R22, R24, R26).

use crate::{
    clock::Millis,
    identity::Identity,
    lane::Lane,
    reclaim::Guard,
    record::{
        Cell, Cells,
        word::{Kind, View},
    },
    stats::Often,
    sync::Ordering,
    waiters::Woken,
};

use super::Engine;

/// Blocks of cells that a step looks at in each lane.
const BLOCKS: usize = 16;

/// Records that a step makes dead.
const RECORDS: usize = 1024;

/// Records that are evicted for one that finds no room.
const EVICTED: usize = 64;

/// Shards of the index whose tables a step looks at.
const SHARDS: usize = 32;

/// What one step of the sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Records and claims taken out.
    pub(crate) reaped: usize,
    /// Whether more is due.
    pub(crate) more: bool,
    /// When to look again, at the latest.
    pub(crate) next: Option<Millis>,
}

/// What the sweep remembers from one step to the next.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// What has ended, by the counters, when the sweep last looked.
    ended: u64,
    /// What has ended since a round of looks at the tables was last begun, for shrinking.
    gone: u64,
    /// In such a round, the shard that is next.
    shard: Option<usize>,
}

impl Engine {
    /// Looks at a bounded number of claims and records whose time has come (R24).
    pub(crate) fn sweep_step(&self) -> Step {
        let (step, woken) = self.sweep_silently();
        self.unwoken.lock().extend(woken.take());
        // Nothing is locked: a waker may call the store.
        loop {
            let waker = self.unwoken.lock().pop_front();
            let Some(waker) = waker else { return step };
            waker.wake();
        }
    }

    fn sweep_silently(&self) -> (Step, Woken) {
        let mut woken = Woken::default();
        let mut turn = self.sweeping.lock();
        let now = self.now();
        let guard = self.pin();
        let own = self.own_lane();
        let mut step = Step::default();
        let mut sooner = |at: Option<Millis>| {
            step.next = match (step.next, at) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        let none_before = self.none_before(now);
        for lane in &self.lanes {
            let reaped = &mut step.reaped;
            let look = |cell: &Cell| self.judge(own, cell, now, reaped, &mut woken, &guard);
            let (next, more) = lane.cells.sweep(now, none_before, BLOCKS, &guard, look);
            lane.look_back(self.domain.counted_in(lane.number, Often::Won));
            lane.free_blocks(&guard);
            sooner(next);
            step.more |= more;
        }
        let (mut keys, mut bytes) = (0, 0);
        let has_shares = self.room.has_shares();
        let (next, more) = self.slabs.sweep(now, RECORDS, &guard, |record| {
            keys += 1;
            bytes += record.cost() as u64;
            if has_shares {
                self.room.leave_share(own.number, Identity::from_frame(record.frame()).account());
            }
        });
        sooner(next);
        step.more |= more;
        if keys != 0 {
            self.room.leave_many(keys, bytes);
            own.counters.expired.add(keys);
            step.reaped += keys as usize;
        }
        let deadline = |cell: &Cell| {
            let word = cell.word();
            (word.kind() == Kind::InFlight).then(|| word.at())
        };
        let leases = self.waiters.lapse(now, deadline, &mut woken);
        sooner(leases);
        let due = if step.more { now } else { step.next.unwrap_or(none_before).min(none_before) };
        // Release, partner of the Acquire of a claim that found no room.
        self.next_due.store(due.0, Ordering::Release);
        step.more |= self.slabs.compact(
            now,
            &guard,
            |frame, from, to| self.index.relocate(frame, from, to, &self.slabs, &guard),
            |record| self.leave_record(own, record),
        );
        let ended = self.lanes.iter().map(|lane| lane.counters.ended()).fold(0, u64::wrapping_add);
        turn.gone += ended.wrapping_sub(turn.ended);
        turn.ended = ended;
        (step, woken)
    }

    /// Takes completed records out, oldest first, until `done` says that there is room enough or none
    /// is left: a tier behind the store still has them (R25). False if that was not reached, or
    /// nobody has allowed it.
    pub(super) fn evict_until(&self, done: impl Fn() -> bool, guard: &Guard<'_>) -> bool {
        if !self.evicts.load(Ordering::Relaxed) {
            return false;
        }
        let own = self.own_lane();
        // One at a time; who comes next finds what the one before has made room for.
        let turn = self.sweeping.lock();
        let mut more = true;
        while !done() {
            if !more {
                return false;
            }
            let (mut keys, mut bytes) = (0, 0);
            more = self.slabs.evict(EVICTED, guard, |record| {
                keys += 1;
                bytes += record.cost() as u64;
                self.room.leave_share(own.number, Identity::from_frame(record.frame()).account());
            });
            self.room.leave_many(keys, bytes);
            own.counters.evicted.add(keys);
        }
        drop(turn);
        true
    }

    /// Whether nothing is in the store, nor anything left of what was; if so, the next claim rings
    /// the alarm. Until then nobody else frees what a released claim has left in its slot, or what
    /// a reader has held back (R26).
    pub(crate) fn is_empty(&self) -> bool {
        // First: who ends a claim later than this draws room for it after this, and rings.
        self.room.call_back()
            && self.lanes.iter().all(|lane| lane.cells.is_idle())
            && self.slabs.is_empty()
            && self.domain.is_clean()
            && self.pages.is_settled()
    }

    /// Gives memory back that a burst has left behind (R26), a bounded step of it; true if there is
    /// more.
    pub(crate) fn trim(&self) -> bool {
        let mut turn = self.sweeping.lock();
        // What the sweep has sealed, with a guard that was in the way until now.
        self.domain.turn_over();
        let guard = self.pin();
        self.lanes.iter().for_each(|lane| lane.free_blocks(&guard));
        drop(guard);
        let mut more = self.domain.collect();
        more |= self.slabs.clean();
        more |= self.pages.shed();
        // A look at all tables costs as much as some tens of thousands of reaped records.
        let keys = self.room.used().0 as u64;
        if turn.shard.is_none() && (turn.gone > (keys / 8).max(512) || turn.gone > 0 && keys == 0) {
            turn.gone = 0;
            turn.shard = Some(0);
        }
        if let Some(from) = turn.shard {
            let guard = self.pin();
            let to = self.index.shards().min(from + SHARDS);
            let moving = (from..to).find(|&shard| self.index.trim(shard, &self.slabs, &guard));
            turn.shard = moving.or(Some(to)).filter(|&next| next < self.index.shards());
            more |= turn.shard.is_some();
        }
        more
    }

    /// Looks at one claim that is not done; answers when to do so again.
    fn judge(
        &self,
        lane: &Lane,
        cell: &Cell,
        now: Millis,
        reaped: &mut usize,
        woken: &mut Woken,
        guard: &Guard<'_>,
    ) -> Option<Millis> {
        loop {
            let word = cell.word();
            match word.view(now) {
                View::InFlight | View::Held | View::NotKept => return Some(word.at()),
                View::Completed => return None,
                View::Gone if word.is_ghost() => {
                    let end = word.at().plus(self.settings.tick);
                    if now < end {
                        return Some(end);
                    }
                    if self.index.swing(cell, None, &self.slabs, guard) {
                        Cells::retire(cell, guard);
                    }
                    return None;
                }
                View::Gone if word.kind() == Kind::Ended => return None,
                View::Lapsed if self.lapse_holds(word) => {
                    // Its end is the next date.
                    woken.join(self.hold_lapsed(lane, cell, word, now));
                }
                View::Lapsed => {
                    // Waits for who takes it over, one of its waiters or a caller to come, until
                    // its retention ends (T3).
                    let end = word.at().plus(self.settings.retention);
                    if now < end {
                        return Some(end);
                    }
                    if let Some(settled) = self.end(lane, cell, word, guard) {
                        woken.join(settled);
                        lane.counters.lapsed.up();
                        lane.counters.expired.up();
                        *reaped += 1;
                        return None;
                    }
                }
                View::Gone => {
                    if let Some(settled) = self.end(lane, cell, word, guard) {
                        woken.join(settled);
                        lane.counters.expired.up();
                        *reaped += 1;
                        return None;
                    }
                }
            }
        }
    }
}
