//! Arbitrary requests through the layer, against a model that says how often the handler may have
//! run and which answer each client may get (R4 to R6, R11, R13, R14, R16, R17, R19, R20, R22).
//!
//! ```text
//! input -> steps: ask, leave, open a gate, let time pass, forget, resolve
//!           |                              \
//!           v                               v
//!         the layer (world.rs)            the model (model.rs): what must come of it
//! ```
//!
//! Everything is on one thread with a clock moved by hand, so an input always does the same.
//!
//! `.ci/fuzz 60 requests`
#![no_main]

mod model;
mod world;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

/// What happens next.
#[derive(Arbitrary, Debug)]
pub enum Step {
    Ask(Ask),
    /// The client of an open request leaves.
    Leave(u8),
    /// A handler that stands at its gate goes on.
    Open(u8),
    /// Minutes, up to 64.
    Wait(u8),
    Forget(u8),
    /// A held key is settled by an operator: with an outcome, or as not done.
    Resolve(u8, bool),
}

/// Most requests are alike, so that they meet.
#[derive(Arbitrary, Debug)]
pub struct Ask {
    /// Its three lowest bits: another method or account, or none.
    pub who: u8,
    pub key: KeyField,
    pub path: bool,
    pub body: Body,
    pub plan: Plan,
    /// Waits for an owner. Its own handler then stands at no gate.
    pub is_patient: bool,
}

impl Ask {
    pub fn method(&self) -> Method {
        match self.who % 8 {
            0 => Method::Get,
            1 => Method::Patch,
            _ => Method::Post,
        }
    }

    /// No route is known.
    pub fn is_lost(&self) -> bool {
        self.who % 8 == 2
    }

    /// `None`: nobody knows whose it is.
    pub fn account(&self) -> Option<bool> {
        match self.who % 8 {
            3 => None,
            4 => Some(true),
            _ => Some(false),
        }
    }

    pub fn body(&self) -> Vec<Frame> {
        match &self.body {
            Body::Empty => Vec::new(),
            Body::One => vec![Frame::Bytes(b"one".to_vec())],
            Body::Other => vec![Frame::Bytes(b"ot".to_vec()), Frame::Bytes(b"her".to_vec())],
            Body::Frames(frames) => frames.clone(),
        }
    }
}

#[derive(Arbitrary, Clone, Debug, PartialEq, Eq)]
pub enum Body {
    Empty,
    One,
    Other,
    Frames(Vec<Frame>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Post,
    Patch,
    Get,
}

#[derive(Arbitrary, Debug)]
pub enum KeyField {
    /// One of two.
    Good(bool),
    Quoted(u8),
    None,
    Lines(Vec<Vec<u8>>),
}

#[derive(Arbitrary, Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    Bytes(Vec<u8>),
    Trailers,
    Broken,
}

/// What the handler does.
#[derive(Arbitrary, Clone, Debug)]
pub struct Plan {
    pub is_gated: bool,
    pub answer: Answer,
    pub mark: Mark,
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    None,
    Keep,
    Release,
}

#[derive(Arbitrary, Clone, Debug)]
pub enum Answer {
    /// A status and a body of known length, too long to be kept perhaps.
    Whole(u16, u8),
    /// In pieces of unknown length.
    Pieces(u16, Vec<u8>),
    Stream,
    Broken(u16),
    Error,
}

fuzz_target!(|steps: Vec<Step>| {
    world::play(&steps[..steps.len().min(64)]);
});
