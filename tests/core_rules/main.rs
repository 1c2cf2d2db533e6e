//! The rules of the core, one by one, through the public face only.
//!
//! The name of a test begins with the rule that it holds. Time moves by hand, and a test that
//! needs another thread waits for an event under a watchdog.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "../common/mod.rs"]
mod common;

/// R1, R4, R5, R7: who is it, is it the same, who runs?
mod claim;
/// R8 to R12: lease, token, and how an owner ends.
mod lease;
/// R25, R26: how much there is, and who gives it back.
mod room;
/// R22 to R24 and the drain: when a record ends.
mod time;
/// R13 to R16: those who came second, and what they get.
mod waiting;
