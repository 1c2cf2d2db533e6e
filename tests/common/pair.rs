//! A store and the model of it, side by side: each step is taken by both, and every answer, gauge
//! and counter must be equal afterwards.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use oncekey::{
    Abandon, Claim, ClaimError, Entry, EntryState, Fingerprint, Identity, Lapse, Lost, LostCause,
    ManualClock, Outcome, Pending, Permit, Resolution, ResolveError, Scheme, Settled, Store, Sweep,
    Token, Wait,
};

use crate::model::{KEYS, Model, Ms, Print, Resolved, Rules, State, Told, account};

/// A step. Permits and tasks are named by their place among those that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Claim(usize, Print),
    /// A claim that waits if an owner runs.
    ClaimAndWait(usize, Print),
    Observe(usize, Print),
    Poll(usize),
    Leave(usize),
    Renew(usize),
    Attend(usize),
    Complete(usize, Size),
    CompleteNotKept(usize),
    Release(usize),
    ReleaseWith(usize),
    Hold(usize),
    Drop(usize),
    Pass(Ms),
    Sweep,
    LookUp(usize),
    Resolve(usize, Option<Size>),
    Forget(usize),
    ForgetForced(usize),
    ForgetAccount(usize),
    Drain,
}

/// Of an outcome: nothing; within the reserve; beyond it; not in a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    Empty,
    Small,
    Large,
    Huge,
}

const SIZES: [Size; 4] = [Size::Empty, Size::Small, Size::Large, Size::Huge];
const BYTES: [usize; 4] = [0, 40, 700, 5_000];
const PRINTS: [Print; 8] = {
    use Print::{Foreign, Other, Same};
    [Same, Same, Same, Same, Same, Same, Other, Foreign]
};

impl Op {
    /// Any three bytes are a step; zeros are the simplest.
    pub fn of([kind, which, how]: [u8; 3]) -> Self {
        let which = usize::from(which);
        let (key, how_much) = (which % KEYS, usize::from(how));
        let (print, size) = (PRINTS[how_much % 8], SIZES[how_much % 4]);
        match kind % 64 {
            0..=9 => Self::Claim(key, print),
            10..=21 => Self::ClaimAndWait(key, print),
            22..=24 => Self::Observe(key, print),
            25..=29 => Self::Poll(which),
            30 => Self::Leave(which),
            31 => Self::Renew(which),
            32 => Self::Attend(which),
            33..=36 => Self::Complete(which, size),
            37 => Self::CompleteNotKept(which),
            38..=40 => Self::Release(which),
            41..=43 => Self::ReleaseWith(which),
            44 => Self::Hold(which),
            45 => Self::Drop(which),
            // Mostly less than a lease.
            46..=49 if how_much.is_multiple_of(3) => Self::Pass(1 + Ms::from(how) % 32),
            46..=52 => Self::Pass(1 + Ms::from(how) % 3),
            53..=55 => Self::Sweep,
            56..=57 => Self::LookUp(key),
            58 => Self::Resolve(key, Some(size)),
            59 => Self::Resolve(key, None),
            60 => Self::Forget(key),
            61 => Self::ForgetForced(key),
            62 => Self::ForgetAccount(which % 2),
            // Late in a sequence, if at all: after it little happens.
            _ if how > 240 => Self::Drain,
            _ => Self::Observe(key, print),
        }
    }
}

/// Settings, from any four bytes.
pub fn rules([times, ends, room, waiting]: [u8; 4]) -> Rules {
    let one_of = |from: &[u64], by: u8| from[usize::from(by) % from.len()];
    Rules {
        lease: one_of(&[10, 3, 30, 100], times),
        retention: one_of(&[20, 4, 60, 1_000], times / 4),
        max_run: one_of(&[40, 5], times / 16),
        on_lapse: if ends.is_multiple_of(2) { Lapse::Hold } else { Lapse::TakeOver },
        on_abandon: if (ends / 2).is_multiple_of(2) { Abandon::Hold } else { Abandon::Release },
        max_keys: [4, 100, 2, 3][usize::from(room) % 4],
        // Not for all of the keys, or not for all of the outcomes, or for all.
        max_bytes: [50_000, 2_100, 3_000, 7_000][usize::from(room / 4) % 4],
        reserve: 256,
        share: [None, None, Some(1), Some(2)][usize::from(room / 16) % 4],
        max_waiters: [9, 2, 3][usize::from(waiting) % 3],
        max_waiters_per_key: [9, 0, 1, 2][usize::from(waiting / 4) % 4],
    }
}

fn millis(span: Duration) -> Ms {
    span.as_millis().try_into().unwrap()
}

fn name(key: usize) -> Identity<'static> {
    Identity::new(account(key), "POST /charges", ["0", "1", "2", "3"][key]).unwrap()
}

fn fingerprint(print: Print) -> Fingerprint {
    match print {
        Print::Same => Fingerprint::from_parts(Scheme::REQUEST_1, [1; 32]),
        Print::Other => Fingerprint::from_parts(Scheme::REQUEST_1, [2; 32]),
        Print::Foreign => Fingerprint::from_parts(Scheme::from_id([7; 8]), [1; 32]),
    }
}

/// The outcome of a number. Its size follows from the number.
pub fn outcome(number: u16) -> Outcome {
    let bytes = BYTES[usize::from(number % 4)];
    Outcome::new(number).body(vec![number as u8; bytes])
}

fn size(number: u16) -> usize {
    // 64 for a buffer: what `max_bytes` calls its cost is told by the outcome.
    outcome(number).size()
}

struct Waiting {
    number: usize,
    wait: Wait,
}

pub struct Pair {
    store: Store,
    clock: ManualClock,
    pub model: Model,
    permits: Vec<(usize, u64, Permit)>,
    waiting: Vec<Waiting>,
    /// Tokens by claim, and the number of the last one of each key (R9).
    tokens: BTreeMap<u64, Token>,
    last: [u64; KEYS],
    outcomes: u16,
}

impl Pair {
    pub fn new(rules: Rules) -> Self {
        let clock = ManualClock::new();
        let span = Duration::from_millis;
        let mut builder = Store::builder()
            .lease(span(rules.lease))
            .retention(span(rules.retention))
            .max_run(span(rules.max_run))
            .tick(span(1))
            .on_lapse(rules.on_lapse)
            .on_abandon(rules.on_abandon)
            .max_keys(rules.max_keys)
            .max_bytes(rules.max_bytes)
            .outcome_reserve(rules.reserve)
            .max_waiters(rules.max_waiters)
            .max_waiters_per_key(rules.max_waiters_per_key)
            .sweep(Sweep::Manual)
            .clock(clock.clone());
        if let Some(share) = rules.share {
            builder = builder.max_keys_per_account(share);
        }
        // Three bytes of lengths, then the parts.
        let frame = 3 + "a".len() + "POST /charges".len() + "0".len();
        Self {
            store: builder.build().unwrap(),
            clock,
            model: Model::new(rules, frame, size),
            permits: Vec::new(),
            waiting: Vec::new(),
            tokens: BTreeMap::new(),
            last: [0; KEYS],
            outcomes: 0,
        }
    }

    /// Takes a step in both and compares them.
    pub fn step(&mut self, op: Op) {
        self.act(op);
        assert_eq!(self.store.stats(), self.model.stats(), "after {op:?}");
        let drained = self.model.in_flight() == 0;
        if matches!(op, Op::Drain) {
            assert_eq!(self.store.drain().wait_timeout(Duration::ZERO), drained);
        }
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Claim(key, print) => drop(self.claim(key, print)),
            Op::ClaimAndWait(key, print) => {
                if let Some(pending) = self.claim(key, print) {
                    let number = self.model.wait(key, print);
                    self.waiting.push(Waiting { number, wait: pending.wait() });
                    self.poll(self.waiting.len() - 1);
                }
            }
            Op::Observe(key, print) => {
                let told = match self.store.observe(&name(key), fingerprint(print)) {
                    None => Told::Nothing,
                    Some(claim) => self.told(key, Ok(claim)).0,
                };
                assert_eq!(told, self.model.observe(key, print));
            }
            Op::Poll(which) if !self.waiting.is_empty() => self.poll(which % self.waiting.len()),
            Op::Leave(which) if !self.waiting.is_empty() => {
                let Waiting { number, wait } = self.waiting.remove(which % self.waiting.len());
                drop(wait);
                self.model.leave(number);
            }
            Op::Poll(_) | Op::Leave(_) => {}
            Op::Pass(ms) => {
                self.clock.advance(Duration::from_millis(ms));
                self.model.now += ms;
            }
            Op::Sweep => assert_eq!(self.store.sweep().reaped, self.model.sweep()),
            Op::LookUp(key) => self.look_up(key),
            Op::Resolve(key, size) => self.resolve(key, size),
            Op::Forget(key) => {
                assert_eq!(self.store.forget(&name(key)).ok(), self.model.forget(key, false));
            }
            Op::ForgetForced(key) => {
                let forgotten = self.store.forget_forced(&name(key));
                assert_eq!(Some(forgotten), self.model.forget(key, true));
            }
            Op::ForgetAccount(which) => {
                let account = account(2 * which);
                let forgotten = self.store.forget_account(account);
                assert_eq!(forgotten, self.model.forget_account(account));
            }
            Op::Drain => {
                drop(self.store.drain());
                self.model.drain();
            }
            owners => self.settle(owners),
        }
    }

    /// The pending, if an owner runs.
    fn claim(&mut self, key: usize, print: Print) -> Option<Pending> {
        let claim = self.store.claim(&name(key), fingerprint(print));
        let (told, permit, pending) = self.told(key, claim);
        let must = self.model.claim(key, print);
        self.check(key, told, must, permit);
        pending
    }

    /// What the answer says; a won claim has no number yet.
    fn told(
        &self,
        key: usize,
        claim: Result<Claim, ClaimError>,
    ) -> (Told, Option<Permit>, Option<Pending>) {
        let told = match claim {
            Ok(Claim::Won(permit)) => return (Told::Won(0), Some(permit), None),
            Ok(Claim::InFlight(pending)) => {
                assert!(!pending.remaining().is_zero(), "{key} has lapsed");
                return (Told::InFlight, None, Some(pending));
            }
            Ok(Claim::Replay(replay)) => replayed(&replay),
            Ok(Claim::NotKept) => Told::NotKept,
            Ok(Claim::Mismatch) => Told::Mismatch,
            Ok(Claim::Held) => Told::Held,
            Err(refused) => self.refused(refused),
        };
        (told, None, None)
    }

    fn refused(&self, refused: ClaimError) -> Told {
        match refused {
            ClaimError::Full { retry_after } | ClaimError::AccountFull { retry_after } => {
                assert!((1..=60).contains(&retry_after.as_secs()), "{retry_after:?}");
            }
            _ => {}
        }
        match refused {
            ClaimError::Full { .. } => Told::Full,
            ClaimError::AccountFull { .. } => Told::AccountFull,
            _ => Told::Draining,
        }
    }

    /// Compares two answers. A claim that was won gets the number that the model gave it.
    fn check(&mut self, key: usize, told: Told, must: Told, permit: Option<Permit>) {
        let told = match (&must, told) {
            (Told::Won(claim), Told::Won(_)) => Told::Won(*claim),
            (_, told) => told,
        };
        assert_eq!(told, must);
        if let (Told::Won(claim), Some(permit)) = (told, permit) {
            let token = permit.token();
            assert!(token.number() > self.last[key], "{token} after {}", self.last[key]);
            assert_eq!(permit.identity(), name(key));
            self.last[key] = token.number();
            self.tokens.insert(claim, token);
            self.permits.push((key, claim, permit));
        }
    }

    fn poll(&mut self, which: usize) {
        let Waiting { number, wait } = &mut self.waiting[which];
        let (number, mut permit) = (*number, None);
        let key = self.model.waits_for(number);
        let polled = Pin::new(wait).poll(&mut Context::from_waker(Waker::noop()));
        let told = match polled {
            Poll::Pending => Told::Nothing,
            Poll::Ready(Settled::Completed(replay)) => replayed(&replay),
            Poll::Ready(Settled::Answered(answer)) => Told::Answered(number_of(&answer)),
            Poll::Ready(Settled::Yours(won)) => {
                permit = Some(won);
                Told::Won(0)
            }
            Poll::Ready(Settled::NotKept) => Told::NotKept,
            Poll::Ready(Settled::Mismatch) => Told::Mismatch,
            Poll::Ready(Settled::Held) => Told::Held,
            Poll::Ready(Settled::TooMany) => Told::TooMany,
            Poll::Ready(Settled::Refused(error)) => self.refused(error),
            Poll::Ready(other) => panic!("{other:?}"),
        };
        if told != Told::Nothing {
            self.waiting.remove(which);
        }
        let must = self.model.poll(number, &told);
        if must == Told::NotKept {
            // Counted if the record is met, and not if the claim that was waited for is.
            self.model.stats.replays_not_kept = self.store.stats().replays_not_kept;
        }
        self.check(key, told, must, permit);
    }

    fn settle(&mut self, op: Op) {
        let (Op::Renew(which)
        | Op::Attend(which)
        | Op::Complete(which, _)
        | Op::CompleteNotKept(which)
        | Op::Release(which)
        | Op::ReleaseWith(which)
        | Op::Hold(which)
        | Op::Drop(which)) = op
        else {
            panic!("{op:?} is not an owner's");
        };
        if self.permits.is_empty() {
            return;
        }
        let at = which % self.permits.len();
        if matches!(op, Op::Renew(_) | Op::Attend(_)) {
            let attend = matches!(op, Op::Attend(_));
            let (key, claim, permit) = &self.permits[at];
            let told = if attend { permit.attend() } else { permit.renew() };
            let must = self.model.renew(*key, *claim, attend);
            assert_eq!(told.map_err(|lost| lost.cause()), must);
            return;
        }
        let (key, claim, permit) = self.permits.remove(at);
        let number = self.number(if let Op::Complete(_, size) = op { size } else { Size::Small });
        let comes_back = |lost: Lost| -> LostCause {
            let cause = lost.cause();
            let lent = matches!(op, Op::Complete(..) | Op::ReleaseWith(_));
            assert_eq!(lost.into_outcome(), lent.then(|| outcome(number)));
            cause
        };
        match op {
            Op::Complete(..) => {
                let told = permit.complete(outcome(number)).map(|completed| completed.kept);
                let must = self.model.complete(key, claim, Some(number));
                assert_eq!(told.map_err(comes_back), must);
            }
            Op::CompleteNotKept(_) => {
                let told = permit.complete_not_kept().map(|completed| completed.kept);
                assert_eq!(told.map_err(comes_back), self.model.complete(key, claim, None));
            }
            Op::Release(_) => {
                let told = permit.release();
                assert_eq!(told.map_err(comes_back), self.model.release(key, claim, None));
            }
            Op::ReleaseWith(_) => {
                let told = permit.release_with(outcome(number));
                assert_eq!(told.map_err(comes_back), self.model.release(key, claim, Some(number)));
            }
            Op::Hold(_) => {
                let told = permit.hold();
                assert_eq!(told.map_err(comes_back), self.model.hold(key, claim));
            }
            _ => {
                drop(permit);
                self.model.abandon(key, claim);
            }
        }
    }

    fn look_up(&mut self, key: usize) {
        let told = self.store.look_up(&name(key));
        let must = self.model.look_up(key);
        let Some(must) = must else {
            assert_eq!(told, None);
            return;
        };
        let Some(Entry { state, age, remaining, token, waiters, .. }) = told else {
            panic!("absent, and not {must:?}");
        };
        let (claim, is) = match must.state {
            State::Free => panic!("nothing is shown"),
            State::InFlight { claim, .. } => (claim, EntryState::InFlight),
            State::Held { claim, .. } => (claim, EntryState::Held),
            State::Done { claim, answer: Some(_), .. } => (claim, EntryState::Completed),
            State::Done { claim, answer: None, .. } => (claim, EntryState::NotKept),
        };
        // A claim that was handed over has no token yet, for who looks from outside.
        if let Some(known) = self.tokens.get(&claim) {
            assert_eq!(token, *known);
        }
        assert_eq!(
            (state, millis(age), millis(remaining), waiters),
            (is, must.age, must.remaining, must.waiters)
        );
    }

    fn resolve(&mut self, key: usize, size: Option<Size>) {
        let number = size.map(|size| self.number(size));
        let as_ = match number {
            Some(number) => Resolution::Complete(outcome(number)),
            None => Resolution::Release,
        };
        let told = match self.store.resolve(&name(key), as_) {
            Ok(()) => Resolved::Done,
            Err(ResolveError::Absent) => Resolved::Absent,
            Err(ResolveError::InFlight) => Resolved::InFlight,
            Err(ResolveError::Completed) => Resolved::Completed,
            Err(ResolveError::Full(back)) => {
                assert_eq!(Some(number_of(&back)), number);
                Resolved::Full
            }
            Err(other) => panic!("{other}"),
        };
        assert_eq!(told, self.model.resolve(key, number));
    }

    /// A new number for an outcome of that size.
    fn number(&mut self, size: Size) -> u16 {
        self.outcomes += 4;
        self.outcomes + size as u16
    }

    /// Everybody leaves, and all time passes: nothing is left (R26).
    pub fn end(mut self) {
        while !self.waiting.is_empty() {
            self.step(Op::Leave(0));
        }
        while !self.permits.is_empty() {
            self.step(Op::Drop(0));
        }
        self.step(Op::Pass(5_000));
        self.step(Op::Sweep);
        self.step(Op::Pass(5_000));
        self.step(Op::Sweep);
        let stats = self.store.stats();
        assert_eq!((stats.keys, stats.bytes, stats.in_flight, stats.waiters), (0, 0, 0, 0));
    }
}

fn number_of(told: &Outcome) -> u16 {
    assert_eq!(*told, outcome(told.status()));
    told.status()
}

fn replayed(replay: &oncekey::Replay) -> Told {
    Told::Replay {
        answer: number_of(replay.outcome()),
        age: millis(replay.age()),
        remaining: millis(replay.remaining()),
    }
}
