//! A payment service whose `POST /charges` is safe to retry, and a client that tries to break it.
//!
//! ```text
//! cargo run --release --example payments --features axum              # make the promise good
//! cargo run --release --example payments --features axum -- serve     # keep serving, for curl
//! ```
//!
//! Without arguments it starts the service on a free port, makes the calls a careless client and a
//! bad network would make, over real sockets, prints each request and each answer, and exits 1 if
//! a promise was broken. What to read, in this order:
//!
//! - `payments/service.rs`: handlers that know nothing of retries, and the layers around them;
//! - `payments/server.rs`: running the service, and stopping it without losing a charge;
//! - `payments/promises.rs`: the client and its promises;
//! - `payments/tiers.rs`: where keys and charges are kept, if not in memory alone;
//! - `payments/arguments.rs`: the command line.
//!
//! While it serves, `/` is a page with a button that may be pressed twice (`payments/page.html`,
//! `payments/pay.js`).
//!
//! The query of `POST /charges`, and of the page, is for experiments: `delay_ms=N` (the charge takes that long),
//! `pause=1` (it takes until somebody calls `POST /resume`), `respond=STATUS` (charge, then answer
//! with this status), `fault=panic` or `fault=hang` (charge, then never answer), `body_bytes=N` (pad
//! the answer to N bytes), `stream=1` (charge, then send an event each 200 ms without end), `apart_ms=N`
//! (with a database: commit the charge by itself, and the answer N ms later).

#[path = "payments/arguments.rs"]
mod arguments;
#[path = "payments/promises.rs"]
mod promises;
#[path = "payments/server.rs"]
mod server;
#[path = "payments/service.rs"]
mod service;
#[path = "payments/tiers.rs"]
mod tiers;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

use crate::arguments::{Command, USAGE};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into());
    let done = match Command::parse(arguments) {
        Ok(Command::Promise) => promises::make_good().await,
        Ok(Command::Serve(settings)) => server::serve(&settings).await,
        Ok(Command::Help) => {
            say(USAGE);
            Ok(())
        }
        Err(why) => Err(Failure::Usage(why)),
    };
    let Err(failure) = done else { return ExitCode::SUCCESS };
    let _ = writeln!(io::stderr(), "{failure}");
    ExitCode::from(match failure {
        Failure::Usage(_) => 2,
        Failure::Run(_) => 1,
    })
}

#[derive(Debug)]
enum Failure {
    /// The command line is wrong: exit 2.
    Usage(String),
    /// It was right and did not work, or a promise was broken: exit 1.
    Run(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(why) => write!(f, "payments: {why}\n\n{USAGE}"),
            Self::Run(why) => write!(f, "payments: {why}"),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Run(error.to_string())
    }
}

/// A line on stdout. Unlike `println!` it survives a reader that has gone away.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
