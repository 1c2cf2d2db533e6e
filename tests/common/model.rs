//! What a store must do, written from the rules and not from its code, for one caller at a time.
//!
//! [`State`] is one identity: pure, small, takes the time as an argument. The linearizability check
//! walks through it. [`Model`] is all identities with what they share: room, waiters, counts. The
//! property test and the fuzz target hold a store against it (`pair.rs`).
//!
//! A record whose end has come is as good as gone to every caller, and takes room until somebody
//! reaps it: [`State::is_over`].
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::collections::BTreeMap;

use oncekey::{Abandon, Lapse, LostCause, Stats};

/// Milliseconds.
pub type Ms = u64;

/// A fingerprint: `Other` is of the same scheme as `Same`, `Foreign` is of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Print {
    Same,
    Other,
    Foreign,
}

/// The settings of a store.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub lease: Ms,
    pub retention: Ms,
    pub max_run: Ms,
    pub on_lapse: Lapse,
    pub on_abandon: Abandon,
    pub max_keys: usize,
    pub max_bytes: usize,
    pub reserve: usize,
    pub share: Option<usize>,
    pub max_waiters: usize,
    pub max_waiters_per_key: usize,
}

/// One identity. A claim is named by a number that is never used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    #[default]
    Free,
    InFlight {
        claim: u64,
        print: Print,
        won: Ms,
        deadline: Ms,
        attended: bool,
    },
    Held {
        claim: u64,
        print: Print,
        since: Ms,
        end: Ms,
    },
    /// `answer`: the number of its outcome, if that was kept.
    Done {
        claim: u64,
        print: Print,
        answer: Option<u16>,
        end: Ms,
    },
}

/// What a claim meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// Nothing that counts: it may win.
    Free,
    /// A lapsed claim that it may take over.
    Lapsed,
    InFlight,
    Replay(u16),
    NotKept,
    Mismatch,
    Held,
}

impl State {
    pub fn won(claim: u64, print: Print, now: Ms, rules: &Rules) -> Self {
        Self::InFlight { claim, print, won: now, deadline: now + rules.lease, attended: false }
    }

    /// R22: past its end. A claim has none while it is in flight.
    pub fn is_over(self, now: Ms) -> bool {
        match self {
            Self::Free => true,
            Self::InFlight { .. } => false,
            Self::Held { end, .. } | Self::Done { end, .. } => now >= end,
        }
    }

    pub fn is_lapsed(self, now: Ms) -> bool {
        matches!(self, Self::InFlight { deadline, .. } if now >= deadline)
    }

    /// The claim that its owner can still settle (R9).
    pub fn owned(self) -> Option<u64> {
        match self {
            Self::InFlight { claim, .. } | Self::Held { claim, .. } => Some(claim),
            Self::Free | Self::Done { .. } => None,
        }
    }

    /// R8, R10: what becomes of a lapsed claim that somebody looks at.
    #[must_use]
    pub fn judged(self, now: Ms, rules: &Rules) -> Self {
        match self {
            Self::InFlight { claim, print, attended, .. }
                if self.is_lapsed(now) && (attended || rules.on_lapse == Lapse::Hold) =>
            {
                Self::Held { claim, print, since: now, end: now + rules.retention }
            }
            other => other,
        }
    }

    /// R5: the mismatch test comes before the state test; what is over is not asked. A lapse must
    /// have been judged.
    pub fn meets(self, asked: Print, now: Ms) -> Met {
        if self.is_over(now) {
            return Met::Free;
        }
        let (Self::InFlight { print, .. } | Self::Held { print, .. } | Self::Done { print, .. }) =
            self
        else {
            return Met::Free;
        };
        if (asked == Print::Foreign) != (print == Print::Foreign) {
            return Met::Held; // R4
        }
        if asked != print {
            return Met::Mismatch;
        }
        match self {
            Self::InFlight { .. } if self.is_lapsed(now) => Met::Lapsed,
            Self::InFlight { .. } => Met::InFlight,
            Self::Held { .. } => Met::Held,
            Self::Done { answer: Some(answer), .. } => Met::Replay(answer),
            Self::Done { answer: None, .. } => Met::NotKept,
            Self::Free => Met::Free,
        }
    }

    /// Whether a claim by `asked` judges a lapse: one that does not fit leaves no trace (R5).
    pub fn fits(self, asked: Print) -> bool {
        matches!(self, Self::InFlight { print, .. } if print == asked)
    }

    /// R8: a sign of life. Called with `attend`, the lease ends `max_run` from now.
    pub fn renew(
        &mut self,
        own: u64,
        attend: bool,
        now: Ms,
        rules: &Rules,
    ) -> Result<(), LostCause> {
        if self.owned() != Some(own) {
            return Err(LostCause::Ended);
        }
        match self {
            Self::InFlight { attended: true, .. } if self.is_lapsed(now) => {
                *self = self.judged(now, rules);
                Err(LostCause::Held)
            }
            Self::InFlight { attended: true, .. } => Ok(()),
            Self::InFlight { deadline, attended, .. } if attend => {
                (*deadline, *attended) = (now + rules.max_run, true);
                Ok(())
            }
            Self::InFlight { deadline, .. } => {
                *deadline = (*deadline).max(now + rules.lease);
                Ok(())
            }
            _ => Err(LostCause::Held),
        }
    }

    /// R9: also of a claim that is held, as long as nobody else has ended it.
    pub fn complete(
        &mut self,
        own: u64,
        answer: Option<u16>,
        now: Ms,
        rules: &Rules,
    ) -> Result<(), LostCause> {
        match *self {
            Self::InFlight { claim, print, .. } | Self::Held { claim, print, .. }
                if claim == own =>
            {
                *self = Self::Done { claim, print, answer, end: now + rules.retention };
                Ok(())
            }
            _ => Err(LostCause::Ended),
        }
    }

    pub fn release(&mut self, own: u64) -> Result<(), LostCause> {
        if self.owned() != Some(own) {
            return Err(LostCause::Ended);
        }
        *self = Self::Free;
        Ok(())
    }

    pub fn hold(&mut self, own: u64, now: Ms, rules: &Rules) -> Result<(), LostCause> {
        match *self {
            Self::InFlight { claim, print, .. } if claim == own => {
                *self = Self::Held { claim, print, since: now, end: now + rules.retention };
                Ok(())
            }
            Self::Held { claim, .. } if claim == own => Ok(()),
            _ => Err(LostCause::Ended),
        }
    }

    /// R26: `None` if it is busy; else whether there was something to forget.
    pub fn forget(&mut self, force: bool, now: Ms) -> Option<bool> {
        if matches!(self, Self::InFlight { .. }) && !self.is_lapsed(now) && !force {
            return None;
        }
        let seen = !self.is_over(now);
        *self = Self::Free;
        Some(seen)
    }
}

/// What a caller is told. Ages and remaining times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The caller is the owner, by this claim.
    Won(u64),
    Replay {
        answer: u16,
        age: Ms,
        remaining: Ms,
    },
    /// The owner's answer, which is not stored.
    Answered(u16),
    NotKept,
    InFlight,
    Mismatch,
    Held,
    /// A claim would win; or, of a task: nothing yet.
    Nothing,
    TooMany,
    Full,
    AccountFull,
    Draining,
}

/// What an operator is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub state: State,
    pub age: Ms,
    pub remaining: Ms,
    pub waiters: usize,
}

#[derive(Clone, Debug)]
enum Seat {
    Listed,
    LookAgain,
    Completed { answer: Option<u16>, at: Ms, end: Ms },
    Answer(u16),
    Permit(u64),
}

#[derive(Clone, Debug)]
struct Waiter {
    key: usize,
    print: Print,
    /// The claim that it met first.
    met: u64,
    /// None before its first poll.
    seat: Option<Seat>,
    /// Its turn on the list.
    turn: usize,
}

/// How operators settle what is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    Done,
    Absent,
    InFlight,
    Completed,
    Full,
}

pub const KEYS: usize = 4;

/// The account of a key: two of each.
pub fn account(key: usize) -> &'static str {
    ["a", "b"][key / 2]
}

/// All identities of a store, and its gauges and counters.
#[derive(Clone, Debug)]
pub struct Model {
    pub rules: Rules,
    pub now: Ms,
    pub states: [State; KEYS],
    pub stats: Stats,
    draining: bool,
    claims: u64,
    waiters: BTreeMap<usize, Waiter>,
    /// Waiters so far, and seats taken so far.
    waited: usize,
    seated: usize,
    /// Completed claims: an old waiter may get the outcome of the claim that it met, even if that
    /// was forgotten since.
    done: BTreeMap<u64, (Option<u16>, Ms)>,
    /// Claims that an operator completed: their owners learn so.
    resolved: Vec<u64>,
    /// Bytes of an identity's frame, and of an outcome.
    frame: usize,
    size: fn(u16) -> usize,
}

impl Model {
    pub fn new(rules: Rules, frame: usize, size: fn(u16) -> usize) -> Self {
        let stats = Stats::default();
        Self {
            rules,
            now: 0,
            states: [State::Free; KEYS],
            stats,
            draining: false,
            claims: 0,
            waiters: BTreeMap::new(),
            waited: 0,
            seated: 0,
            done: BTreeMap::new(),
            resolved: Vec::new(),
            frame,
            size,
        }
    }

    /// The gauges and counters as they must be now.
    pub fn stats(&self) -> Stats {
        let (keys, bytes) = self.used();
        let mut stats = self.stats.clone();
        stats.keys = keys;
        stats.bytes = bytes;
        stats.in_flight = self.in_flight();
        stats.waiters = self.listed(|_| true).len();
        stats.nearly_full =
            keys * 5 >= self.rules.max_keys * 4 || bytes * 5 >= self.rules.max_bytes * 4;
        stats.sweep_alive = true;
        stats
    }

    pub fn in_flight(&self) -> usize {
        self.states.iter().filter(|state| matches!(state, State::InFlight { .. })).count()
    }

    pub fn drain(&mut self) {
        self.draining = true;
    }

    // Room (R25).

    /// What a record costs beside its outcome.
    fn cost(&self) -> usize {
        232 + self.frame + self.frame / 8
    }

    fn used(&self) -> (usize, usize) {
        let bytes = |state: &State| match state {
            State::Free => 0,
            State::InFlight { .. } | State::Held { .. } => self.cost() + self.rules.reserve,
            State::Done { answer, .. } => self.cost() + answer.map_or(0, self.size),
        };
        let keys = self.states.iter().filter(|state| **state != State::Free).count();
        let accounts = ["a", "b"].iter().filter(|of| self.of_account(of) > 0);
        let places = if self.rules.share.is_some() { 121 * accounts.count() } else { 0 };
        (keys, places + self.states.iter().map(bytes).sum::<usize>())
    }

    fn of_account(&self, name: &str) -> usize {
        let has = |key: &usize| account(*key) == name && self.states[*key] != State::Free;
        (0..KEYS).filter(has).count()
    }

    fn room_for(&self, key: usize) -> Result<(), Told> {
        let (keys, mut bytes) = self.used();
        let of_account = self.of_account(account(key));
        if let Some(share) = self.rules.share {
            if of_account >= share {
                return Err(Told::AccountFull);
            }
            bytes += if of_account == 0 { 121 } else { 0 };
        }
        bytes += self.cost() + self.rules.reserve;
        if keys < self.rules.max_keys && bytes <= self.rules.max_bytes {
            return Ok(());
        }
        Err(Told::Full)
    }

    /// Whether an outcome finds room, beside what its claim has reserved.
    fn fits(&self, answer: u16) -> bool {
        let more = (self.size)(answer).saturating_sub(self.rules.reserve);
        more == 0 || self.used().1 + more <= self.rules.max_bytes
    }

    // Claims.

    pub fn claim(&mut self, key: usize, print: Print) -> Told {
        self.claim_or_sit(key, print, None)
    }

    /// With `seat`, a waiter that meets a running owner is listed.
    fn claim_or_sit(&mut self, key: usize, print: Print, seat: Option<usize>) -> Told {
        if self.states[key].fits(print) {
            self.judge(key);
        }
        if matches!(self.states[key], State::Held { .. }) && self.states[key].is_over(self.now) {
            self.reap(key);
        }
        match self.states[key].meets(print, self.now) {
            Met::Free => self.begin(key, print),
            Met::Lapsed => self.take_over(key, print),
            Met::InFlight => match seat {
                None => self.count(key, Met::InFlight),
                Some(number) => self.sit(key, number),
            },
            met => self.count(key, met),
        }
    }

    fn refused(&mut self, told: Told) -> Told {
        match told {
            Told::Full => self.stats.refused_full += 1,
            Told::AccountFull => self.stats.refused_account += 1,
            _ => self.stats.refused_draining += 1,
        }
        told
    }

    fn begin(&mut self, key: usize, print: Print) -> Told {
        if self.draining {
            return self.refused(Told::Draining);
        }
        if self.room_for(key).is_err() {
            // What has ended makes room.
            self.sweep();
        }
        if self.states[key] != State::Free {
            self.reap(key);
        }
        if let Err(refused) = self.room_for(key) {
            return self.refused(refused);
        }
        self.stats.won += 1;
        self.win(key, print)
    }

    fn win(&mut self, key: usize, print: Print) -> Told {
        self.claims += 1;
        self.states[key] = State::won(self.claims, print, self.now, &self.rules);
        Told::Won(self.claims)
    }

    fn take_over(&mut self, key: usize, print: Print) -> Told {
        if self.draining {
            return self.refused(Told::Draining);
        }
        if self.room_for(key).is_err() {
            self.sweep();
        }
        if self.states[key] == State::Free {
            return self.begin(key, print);
        }
        self.stats.lapsed += 1;
        self.stats.taken_over += 1;
        self.stats.won += 1;
        self.tell_all(key, Seat::LookAgain);
        self.win(key, print)
    }

    /// An answer that needs no more than what is there.
    fn count(&mut self, key: usize, met: Met) -> Told {
        let (counter, told) = match met {
            Met::InFlight => (&mut self.stats.met_in_flight, Told::InFlight),
            Met::NotKept => (&mut self.stats.replays_not_kept, Told::NotKept),
            Met::Mismatch => (&mut self.stats.mismatches, Told::Mismatch),
            Met::Held => (&mut self.stats.met_held, Told::Held),
            Met::Free | Met::Lapsed => return Told::Nothing,
            Met::Replay(answer) => {
                self.stats.replays += 1;
                let State::Done { end, .. } = self.states[key] else { panic!("a replay of none") };
                return self.replay(answer, end);
            }
        };
        *counter += 1;
        told
    }

    fn replay(&self, answer: u16, end: Ms) -> Told {
        let remaining = end - self.now;
        Told::Replay { answer, age: self.rules.retention - remaining, remaining }
    }

    pub fn observe(&mut self, key: usize, print: Print) -> Told {
        if self.states[key].fits(print) {
            self.judge(key);
        }
        if matches!(self.states[key], State::Held { .. }) && self.states[key].is_over(self.now) {
            self.reap(key);
        }
        self.count(key, self.states[key].meets(print, self.now))
    }

    // The owner's verbs. `key` is that of its claim.

    fn lost<T>(&mut self, own: u64, cause: LostCause) -> Result<T, LostCause> {
        self.stats.lost += 1;
        Err(if self.resolved.contains(&own) { LostCause::Completed } else { cause })
    }

    pub fn renew(&mut self, key: usize, own: u64, attend: bool) -> Result<(), LostCause> {
        let before = self.states[key];
        match self.states[key].renew(own, attend, self.now, &self.rules) {
            Ok(()) => Ok(()),
            Err(cause) => {
                self.note_hold(key, before, true);
                self.lost(own, cause)
            }
        }
    }

    /// True if the answer is kept.
    pub fn complete(
        &mut self,
        key: usize,
        own: u64,
        answer: Option<u16>,
    ) -> Result<bool, LostCause> {
        let kept = answer.filter(|answer| self.fits(*answer));
        if let Err(cause) = self.states[key].complete(own, kept, self.now, &self.rules) {
            return self.lost(own, cause);
        }
        self.stats.not_kept_no_room += u64::from(answer.is_some() && kept.is_none());
        *if kept.is_some() { &mut self.stats.completed } else { &mut self.stats.not_kept } += 1;
        let end = self.now + self.rules.retention;
        self.done.insert(own, (kept, end));
        self.tell_all(key, Seat::Completed { answer: kept, at: self.now, end });
        Ok(kept.is_some())
    }

    pub fn release(&mut self, key: usize, own: u64, answer: Option<u16>) -> Result<(), LostCause> {
        let before = self.states[key];
        if let Err(cause) = self.states[key].release(own) {
            return self.lost(own, cause);
        }
        self.stats.released += 1;
        let heir = self.listed(|waiter| waiter.key == key).first().copied();
        if let (State::InFlight { print, .. }, Some(heir), None) = (before, heir, answer) {
            self.stats.handed_over += 1;
            self.stats.won += 1;
            self.win(key, print);
            self.waiters.get_mut(&heir).unwrap().seat = Some(Seat::Permit(self.claims));
            return Ok(());
        }
        self.tell_all(key, answer.map_or(Seat::LookAgain, Seat::Answer));
        Ok(())
    }

    pub fn hold(&mut self, key: usize, own: u64) -> Result<(), LostCause> {
        let before = self.states[key];
        if let Err(cause) = self.states[key].hold(own, self.now, &self.rules) {
            return self.lost(own, cause);
        }
        self.note_hold(key, before, false);
        Ok(())
    }

    /// A permit is dropped without a verb (R11).
    pub fn abandon(&mut self, key: usize, own: u64) {
        self.stats.abandoned += 1;
        // Lost is counted, and nobody is told.
        let _ = match self.rules.on_abandon {
            Abandon::Hold => self.hold(key, own),
            Abandon::Release => self.release(key, own, None),
        };
    }

    fn judge(&mut self, key: usize) {
        let before = self.states[key];
        self.states[key] = before.judged(self.now, &self.rules);
        self.note_hold(key, before, true);
    }

    fn note_hold(&mut self, key: usize, before: State, lapsed: bool) {
        if let (State::InFlight { .. }, State::Held { .. }) = (before, self.states[key]) {
            self.stats.held += 1;
            self.stats.lapsed += u64::from(lapsed);
            self.tell_all(key, Seat::LookAgain);
        }
    }

    fn reap(&mut self, key: usize) {
        self.states[key] = State::Free;
        self.stats.expired += 1;
    }

    /// How many were reaped.
    pub fn sweep(&mut self) -> usize {
        let mut reaped = 0;
        for key in 0..KEYS {
            self.judge(key);
            let state = self.states[key];
            let is_over = match state {
                State::Free => continue,
                State::InFlight { deadline, .. } => {
                    if state.is_lapsed(self.now) {
                        // To take it over, R13.
                        self.tell_all(key, Seat::LookAgain);
                    }
                    self.now >= deadline + self.rules.retention
                }
                State::Held { .. } | State::Done { .. } => state.is_over(self.now),
            };
            if is_over {
                self.stats.lapsed += u64::from(state.is_lapsed(self.now));
                self.reap(key);
                reaped += 1;
            }
        }
        reaped
    }

    // Operators.

    pub fn look_up(&mut self, key: usize) -> Option<Shown> {
        self.judge(key);
        let state = self.states[key];
        if state.is_over(self.now) {
            return None;
        }
        let (since, end) = match state {
            State::Free => return None,
            State::InFlight { won, deadline, .. } => (won, deadline),
            State::Held { since, end, .. } => (since, end),
            State::Done { end, .. } => (end - self.rules.retention, end),
        };
        let waiters = self.listed(|waiter| waiter.key == key).len();
        let remaining = end.saturating_sub(self.now);
        Some(Shown { state, age: self.now - since, remaining, waiters })
    }

    pub fn resolve(&mut self, key: usize, answer: Option<u16>) -> Resolved {
        self.judge(key);
        let state = self.states[key];
        let State::Held { claim, .. } = state else {
            return match state {
                State::InFlight { .. } => Resolved::InFlight,
                State::Done { .. } if !state.is_over(self.now) => Resolved::Completed,
                _ => Resolved::Absent,
            };
        };
        if state.is_over(self.now) {
            return Resolved::Absent;
        }
        match answer {
            Some(answer) if !self.fits(answer) => return Resolved::Full,
            Some(answer) => {
                self.states[key].complete(claim, Some(answer), self.now, &self.rules).unwrap();
                self.done.insert(claim, (Some(answer), self.now + self.rules.retention));
                self.resolved.push(claim);
                self.stats.completed += 1;
            }
            None => {
                self.states[key] = State::Free;
                self.stats.released += 1;
            }
        }
        self.stats.resolved += 1;
        Resolved::Done
    }

    pub fn forget(&mut self, key: usize, force: bool) -> Option<bool> {
        let before = self.states[key];
        let seen = self.states[key].forget(force, self.now)?;
        if before == State::Free {
            return Some(false);
        }
        *if seen { &mut self.stats.forgotten } else { &mut self.stats.expired } += 1;
        if before.is_lapsed(self.now) {
            self.stats.lapsed += 1;
        }
        self.tell_all(key, Seat::LookAgain);
        Some(seen)
    }

    pub fn forget_account(&mut self, name: &str) -> usize {
        let of = (0..KEYS).filter(|key| account(*key) == name);
        of.filter(|key| self.forget(*key, false) == Some(true)).count()
    }

    // Waiters (R13 to R15).

    /// The oldest first.
    fn listed(&self, which: impl Fn(&Waiter) -> bool) -> Vec<usize> {
        let is = |waiter: &Waiter| matches!(waiter.seat, Some(Seat::Listed)) && which(waiter);
        let listed = self.waiters.iter().filter(|(_, waiter)| is(waiter));
        let mut listed: Vec<_> = listed.map(|(number, waiter)| (waiter.turn, *number)).collect();
        listed.sort_unstable();
        listed.into_iter().map(|(_, number)| number).collect()
    }

    fn tell_all(&mut self, key: usize, seat: Seat) {
        for number in self.listed(|waiter| waiter.key == key) {
            self.waiters.get_mut(&number).unwrap().seat = Some(seat.clone());
        }
    }

    /// A task that has met a running owner, and takes its seat when it is polled first.
    pub fn wait(&mut self, key: usize, print: Print) -> usize {
        let met = self.states[key].owned().unwrap();
        self.waited += 1;
        self.waiters.insert(self.waited, Waiter { key, print, met, seat: None, turn: 0 });
        self.waited
    }

    fn sit(&mut self, key: usize, number: usize) -> Told {
        let here = self.listed(|waiter| waiter.key == key).len();
        if here >= self.rules.max_waiters_per_key
            || self.listed(|_| true).len() >= self.rules.max_waiters
        {
            self.stats.refused_waiters += 1;
            return Told::TooMany;
        }
        self.seated += 1;
        let waiter = self.waiters.get_mut(&number).unwrap();
        (waiter.seat, waiter.turn) = (Some(Seat::Listed), self.seated);
        Told::Nothing
    }

    /// What a task is told when it is polled; told anything, it is over. `said` is what the store
    /// said: it decides where the rules leave a choice, which is if the claim that the task once
    /// met was completed and forgotten since.
    pub fn poll(&mut self, number: usize, said: &Told) -> Told {
        let Waiter { key, print, met, seat, .. } = self.waiters[&number].clone();
        let told = match seat {
            Some(Seat::Listed) => Told::Nothing,
            Some(Seat::Answer(answer)) => Told::Answered(answer),
            Some(Seat::Completed { answer: None, end, .. }) if self.now < end => Told::NotKept,
            Some(Seat::Completed { answer: Some(answer), at, end }) if self.now < end => {
                self.stats.replays += 1;
                Told::Replay { answer, age: self.now - at, remaining: end - self.now }
            }
            Some(Seat::Permit(claim)) if self.states[key].owned() == Some(claim) => {
                Told::Won(claim)
            }
            None | Some(_) => match self.done.get(&met) {
                Some(&(answer, end)) if self.now < end && self.may_say(answer, end, said) => {
                    match answer {
                        Some(answer) => {
                            self.stats.replays += 1;
                            self.replay(answer, end)
                        }
                        None => Told::NotKept,
                    }
                }
                _ => self.claim_or_sit(key, print, Some(number)),
            },
        };
        if told != Told::Nothing {
            self.waiters.remove(&number);
        }
        told
    }

    fn may_say(&self, answer: Option<u16>, end: Ms, said: &Told) -> bool {
        match answer {
            Some(answer) => *said == self.replay(answer, end),
            None => *said == Told::NotKept,
        }
    }

    /// A task is dropped. What it inherited goes to the next.
    pub fn leave(&mut self, number: usize) {
        let waiter = self.waiters.remove(&number).unwrap();
        if let Some(Seat::Permit(claim)) = waiter.seat {
            let _ = self.release(waiter.key, claim, None);
        }
    }

    /// The task's key.
    pub fn waits_for(&self, number: usize) -> usize {
        self.waiters[&number].key
    }
}
