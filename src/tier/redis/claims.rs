//! What this process knows of its own claims, so that it can tell when the server has lost one.
//!
//! Ground rules: a claim is noted before it is sent. It is forgotten when it has ended here, or when
//! its owner has lapsed, because then another may have taken it over. What is left must be in the
//! tier until its `max_run` is over, or somebody has forgotten or resolved it.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::Token;

/// How many are noted before those whose time is over are looked for.
const FEW: usize = 1024;

#[derive(Debug)]
pub(super) struct Claims {
    noted: HashMap<Token, Noted>,
    look_at: usize,
}

#[derive(Debug)]
struct Noted {
    /// When this process may forget it.
    until: Instant,
    /// When its `max_run` is over, by the server's clock; `None` if no answer came.
    due: Option<u64>,
}

impl Claims {
    pub(super) fn new() -> Self {
        Self { noted: HashMap::new(), look_at: FEW }
    }

    pub(super) fn asked(&mut self, token: Token, max_run: Duration) {
        let now = Instant::now();
        if self.noted.len() >= self.look_at {
            self.noted.retain(|_, noted| noted.until > now);
            self.look_at = FEW.max(2 * self.noted.len());
        }
        let until = now.checked_add(max_run).unwrap_or(now);
        self.noted.entry(token).or_insert(Noted { until, due: None });
    }

    pub(super) fn won(&mut self, token: Token, due: u64) {
        if let Some(noted) = self.noted.get_mut(&token) {
            noted.due = Some(due);
        }
    }

    pub(super) fn ended(&mut self, token: Token) {
        self.noted.remove(&token);
    }

    /// Whether the claim was sent and no answer came.
    pub(super) fn is_unanswered(&self, token: Token) -> bool {
        self.noted.get(&token).is_some_and(|noted| noted.due.is_none())
    }

    /// Whether the tier should still have the claim at `now`, by the server's clock.
    pub(super) fn is_missed(&self, token: Token, now: u64) -> bool {
        self.noted.get(&token).and_then(|noted| noted.due).is_some_and(|due| now < due)
    }

    /// What `owner` has won may have been taken over.
    pub(super) fn lapsed(&mut self, owner: u64) {
        self.noted.retain(|token, noted| token.owner() != owner || noted.due.is_none());
    }
}
