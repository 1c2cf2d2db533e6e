//! The verbs as values, so that they can be handed over to the writer.

use std::time::Duration;

use super::{
    rows::{At, How, Name},
    writer::{Running, Step},
};
use crate::{
    Outcome, Token,
    tier::{Claimed, Forgotten, Landed, NewClaim, Resolved},
};

/// Claims, or takes over from the token that was seen.
pub(super) struct Claim {
    pub(super) id: Name,
    pub(super) seen: Option<Token>,
    pub(super) claim: NewClaim,
}

impl Step for Claim {
    /// `None` for an owner that does not beat.
    type Answer = Option<Claimed>;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Self::Answer> {
        Box::pin(async move {
            match self.seen {
                None => at.claim(&self.id, &self.claim).await,
                Some(seen) => at.take_over(&self.id, seen, &self.claim).await,
            }
        })
    }
}

pub(super) struct Finish {
    pub(super) id: Name,
    pub(super) token: Token,
    pub(super) how: How,
}

impl Step for Finish {
    type Answer = Landed;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Landed> {
        Box::pin(at.finish(&self.id, self.token, &self.how))
    }
}

pub(super) struct Forget {
    pub(super) id: Name,
    pub(super) forced: bool,
}

impl Step for Forget {
    type Answer = Forgotten;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Forgotten> {
        Box::pin(at.forget(&self.id, self.forced))
    }
}

pub(super) struct Resolve {
    pub(super) id: Name,
    pub(super) outcome: Option<Outcome>,
    pub(super) retention: Duration,
}

impl Step for Resolve {
    type Answer = Resolved;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, Resolved> {
        Box::pin(at.resolve(&self.id, self.outcome.as_ref(), self.retention))
    }
}

pub(super) struct Reap {
    pub(super) most: u32,
}

impl Step for Reap {
    type Answer = u64;

    fn run<'s>(&'s self, at: &'s mut At<'_>) -> Running<'s, u64> {
        Box::pin(at.reap(self.most))
    }
}
