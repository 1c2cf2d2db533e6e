//! What must come of it: one record for each identity, written from the rules and not from the code.

use std::collections::{HashMap, VecDeque};

use oncekey::EntryState;

use crate::{Answer, Frame, Mark, Plan};

pub const MINUTE: u64 = 60;
pub const MAX_RUN: u64 = 15 * MINUTE;
pub const RETENTION: u64 = 60 * MINUTE;
pub const MAX_BODY: usize = 48;
pub const MAX_RESPONSE: usize = 32;

/// Account, endpoint, key.
pub type Id = (bool, &'static str, String);
/// Path and body; the method is in the endpoint.
pub type Print = (bool, Vec<u8>);

/// What a client must be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The handler's answer: status, body, whether it broke off, whether it is a replay.
    Answer(u16, Vec<u8>, bool, bool),
    Problem(&'static str),
    /// A body that broke off.
    BadRequest,
    Failed,
}

#[derive(Clone, Debug)]
enum State {
    InFlight { claim: usize, until: u64 },
    Held { claim: usize, until: u64 },
    Done { status: u16, body: Vec<u8>, until: u64 },
    NotKept { until: u64 },
}

#[derive(Debug)]
struct Record {
    print: Print,
    state: State,
}

/// A request that has a claim or waits for one.
#[derive(Clone, Debug)]
struct Open {
    id: Id,
    print: Print,
    plan: Plan,
}

#[derive(Default)]
pub struct Model {
    now: u64,
    records: HashMap<Id, Record>,
    waiting: HashMap<Id, VecDeque<usize>>,
    /// By the number of the request.
    open: HashMap<usize, Open>,
    /// Claims whose handlers stand at their gates.
    pub gated: Vec<usize>,
    pub runs: usize,
    /// What clients were told since the last step.
    pub told: Vec<(usize, Told)>,
}

/// How an answer settles a claim.
enum Settles {
    Kept,
    NotKept,
    /// With an answer for those who wait, if it is one for all.
    Released(bool),
}

pub fn body_of(answer: &Answer) -> (u16, Vec<u8>, bool) {
    let status = |status: u16| match status % 12 {
        0 => 200,
        1 => 201,
        2 => 204,
        3 => 303,
        4 => 400,
        5 => 402,
        6 => 404,
        7 => 409,
        8 => 429,
        9 => 500,
        10 => 503,
        _ => 504,
    };
    match answer {
        Answer::Whole(code, len) => {
            let code = status(*code);
            let len = if code == 204 { 0 } else { usize::from(*len) % (2 * MAX_RESPONSE) };
            (code, vec![b'w'; len], false)
        }
        Answer::Pieces(code, pieces) => {
            let code = status(*code);
            let len: usize = pieces.iter().map(|len| usize::from(*len) % 16).sum();
            (code, vec![b'p'; if code == 204 { 0 } else { len }], false)
        }
        Answer::Stream => (200, b"data: 1\n\n".to_vec(), false),
        Answer::Broken(code) => {
            let code = status(*code);
            (if code == 204 { 200 } else { code }, b"cut".to_vec(), true)
        }
        Answer::Error => (0, Vec::new(), false),
    }
}

fn settles(plan: &Plan) -> Settles {
    let (status, body, is_broken) = body_of(&plan.answer);
    let is_released = matches!(status, 400 | 404 | 409 | 429 | 503);
    let is_kept = match plan.mark {
        Mark::Keep => true,
        Mark::Release => false,
        Mark::None => !is_released,
    };
    let is_whole =
        !is_broken && body.len() <= MAX_RESPONSE && !matches!(plan.answer, Answer::Stream);
    match (&plan.answer, is_kept) {
        (Answer::Error, _) => Settles::Released(false),
        (_, true) if is_whole => Settles::Kept,
        (_, true) => Settles::NotKept,
        (_, false) => Settles::Released(is_whole && (status == 429 || status >= 500)),
    }
}

impl Model {
    /// A request without a claim: to the handler as it is.
    pub fn passes(&mut self, request: usize, plan: &Plan) {
        self.runs += 1;
        let (status, body, is_broken) = body_of(&plan.answer);
        let told = match plan.answer {
            Answer::Error => Told::Failed,
            _ => Told::Answer(status, body, is_broken, false),
        };
        self.told.push((request, told));
    }

    pub fn refused(&mut self, request: usize, problem: &'static str) {
        self.told.push((request, Told::Problem(problem)));
    }

    /// What became of a body: its bytes, or what its client is told.
    pub fn read(frames: &[Frame]) -> Result<Vec<u8>, Told> {
        let mut body = Vec::new();
        for frame in frames {
            match frame {
                Frame::Bytes(bytes) => body.extend_from_slice(bytes),
                Frame::Trailers => {}
                Frame::Broken => return Err(Told::BadRequest),
            }
            if body.len() > MAX_BODY {
                return Err(Told::Problem("request-too-large"));
            }
        }
        Ok(body)
    }

    /// A request with a key whose body is in.
    pub fn asks(&mut self, request: usize, id: Id, print: Print, plan: Plan, is_patient: bool) {
        self.end_what_is_over();
        let told = match self.records.get(&id) {
            None => {
                self.open.insert(request, Open { id, print, plan });
                return self.claims(request);
            }
            Some(record) if record.print != print => Told::Problem("key-reused"),
            Some(record) => match &record.state {
                State::InFlight { .. } if is_patient => {
                    self.waiting.entry(id.clone()).or_default().push_back(request);
                    self.open.insert(request, Open { id, print, plan });
                    return;
                }
                State::InFlight { .. } => Told::Problem("in-flight"),
                State::Held { .. } => Told::Problem("outcome-unknown"),
                State::NotKept { .. } => Told::Problem("response-not-kept"),
                State::Done { status, body, .. } => {
                    Told::Answer(*status, body.clone(), false, true)
                }
            },
        };
        self.told.push((request, told));
    }

    fn claims(&mut self, request: usize) {
        let open = &self.open[&request];
        let state = State::InFlight { claim: request, until: self.now + MAX_RUN };
        self.records.insert(open.id.clone(), Record { print: open.print.clone(), state });
        self.runs += 1;
        if open.plan.is_gated {
            self.gated.push(request);
        } else {
            self.answers(request);
        }
    }

    /// A handler answers.
    pub fn answers(&mut self, request: usize) {
        self.gated.retain(|&gated| gated != request);
        let Open { id, print, plan } = self.open.remove(&request).unwrap();
        self.end_what_is_over();
        let is_own = |record: &Record| match record.state {
            State::InFlight { claim, .. } | State::Held { claim, .. } => claim == request,
            _ => false,
        };
        let (status, body, is_broken) = body_of(&plan.answer);
        let own = match plan.answer {
            Answer::Error => Told::Failed,
            _ => Told::Answer(status, body.clone(), is_broken, false),
        };
        if !self.records.get(&id).is_some_and(is_own) {
            // Lost: what has taken its place answers, if it is the same request.
            let told = match self.records.get(&id) {
                Some(record) if record.print == print => match &record.state {
                    State::Done { status, body, .. } => {
                        Told::Answer(*status, body.clone(), false, true)
                    }
                    State::NotKept { .. } => Told::Problem("response-not-kept"),
                    _ => Told::Problem("outcome-unknown"),
                },
                _ => Told::Problem("outcome-unknown"),
            };
            self.told.push((request, told));
            return;
        }
        self.told.push((request, own));
        let until = self.now + RETENTION;
        match settles(&plan) {
            Settles::Kept => {
                let told = Told::Answer(status, body.clone(), false, true);
                self.settled(&id, State::Done { status, body, until }, told);
            }
            Settles::NotKept => {
                let told = Told::Problem("response-not-kept");
                self.settled(&id, State::NotKept { until }, told);
            }
            Settles::Released(is_for_all) => {
                self.records.remove(&id);
                let waiting = self.waiting.entry(id).or_default();
                if is_for_all {
                    for waiter in std::mem::take(waiting) {
                        self.open.remove(&waiter);
                        self.told.push((waiter, Told::Answer(status, body.clone(), false, false)));
                    }
                } else if let Some(heir) = waiting.pop_front() {
                    self.claims(heir);
                }
            }
        }
    }

    fn settled(&mut self, id: &Id, state: State, told: Told) {
        self.records.get_mut(id).unwrap().state = state;
        for waiter in self.waiting.remove(id).unwrap_or_default() {
            self.open.remove(&waiter);
            self.told.push((waiter, told.clone()));
        }
    }

    /// A client leaves. What it owns goes on.
    pub fn leaves(&mut self, request: usize) {
        for waiting in self.waiting.values_mut() {
            waiting.retain(|&waiter| waiter != request);
        }
        if !self.gated.contains(&request) {
            self.open.remove(&request);
        }
    }

    pub fn waits(&mut self, seconds: u64) {
        self.now += seconds;
        let lapsed = self.records.iter_mut().filter_map(|(id, record)| match record.state {
            State::InFlight { claim, until } if until <= self.now => {
                record.state = State::Held { claim, until: self.now + RETENTION };
                Some(id.clone())
            }
            _ => None,
        });
        for id in lapsed.collect::<Vec<_>>() {
            for waiter in self.waiting.remove(&id).unwrap_or_default() {
                self.open.remove(&waiter);
                self.told.push((waiter, Told::Problem("outcome-unknown")));
            }
        }
        self.end_what_is_over();
    }

    fn end_what_is_over(&mut self) {
        let now = self.now;
        self.records.retain(|_, record| match record.state {
            State::InFlight { .. } => true,
            State::Held { until, .. } | State::Done { until, .. } | State::NotKept { until } => {
                until > now
            }
        });
    }

    /// False if it is in flight.
    pub fn forgets(&mut self, id: &Id) -> bool {
        let is_busy =
            matches!(self.records.get(id), Some(Record { state: State::InFlight { .. }, .. }));
        if !is_busy {
            self.records.remove(id);
        }
        !is_busy
    }

    /// True if it was held.
    pub fn resolves(&mut self, id: &Id, outcome: Option<(u16, Vec<u8>)>) -> bool {
        let Some(record) = self.records.get_mut(id) else { return false };
        if !matches!(record.state, State::Held { .. }) {
            return false;
        }
        match outcome {
            Some((status, body)) => {
                record.state = State::Done { status, body, until: self.now + RETENTION };
            }
            None => drop(self.records.remove(id)),
        }
        true
    }

    /// What an operator must see.
    pub fn state(&self, id: &Id) -> Option<EntryState> {
        Some(match self.records.get(id)?.state {
            State::InFlight { .. } => EntryState::InFlight,
            State::Held { .. } => EntryState::Held,
            State::Done { .. } => EntryState::Completed,
            State::NotKept { .. } => EntryState::NotKept,
        })
    }

    pub fn in_flight(&self) -> usize {
        let is = |record: &&Record| matches!(record.state, State::InFlight { .. });
        self.records.values().filter(is).count()
    }
}
