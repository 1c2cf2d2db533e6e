//! Compares oncekey with other stores on the same work:
//! `cargo run --release -p compare -- --quick`.
//!
//! ```text
//! args      the command line
//! run       who runs when: passes, each in a process of its own
//! work/     what there is to do            ask    what is asked: identities, answers
//! peer      the trait all stand behind     peers/ the stores      first/ the project's first core
//! crew      threads that start together    latency, meter, alloc, zipf: how it is measured
//! sample    one number                     results  medians and ratios
//! table, json, bar: what comes out
//! ```

mod alloc;
mod args;
mod ask;
mod bar;
mod crew;
mod first;
mod json;
mod latency;
mod meter;
mod peer;
mod peers;
mod results;
mod run;
mod sample;
mod table;
mod work;
mod zipf;

use std::{
    error::Error,
    io::{self, Write},
    process::ExitCode,
};

use args::{Options, Order};

fn main() -> ExitCode {
    let done = args::parse().map_err(Into::into).and_then(|order| match order {
        Order::Help => Ok(print_help()?),
        Order::Pass(pass) => {
            let samples = (pass.peer.pass)(pass.work, pass.quick, pass.threads);
            println!("{}", serde_json::to_string(&samples)?);
            Ok(ExitCode::SUCCESS)
        }
        Order::Compare(options) => compare(&options),
    });
    done.unwrap_or_else(|error: Box<dyn Error>| {
        eprintln!("compare: {error}");
        ExitCode::from(2)
    })
}

fn print_help() -> io::Result<ExitCode> {
    io::stdout().write_all(args::HELP.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Compares, and answers with 1 if the bar was to be held and is missed.
fn compare(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    if cfg!(debug_assertions) {
        eprintln!("compare: this is a debug build, its numbers mean nothing; use --release");
    }
    let run = run::run(options)?;
    let mut out = io::stdout().lock();
    if options.json {
        json::print(&run.results, &mut out)?;
        if !run.left_out.is_empty() {
            let left_out = run.left_out.join(", ");
            eprintln!("compare: the machine is busy: no time for all of {left_out}");
        }
    } else {
        table::print(&run, options.quick, &mut out)?;
    }
    if !options.check {
        return Ok(ExitCode::SUCCESS);
    }
    let verdicts = bar::judge(&run.results, options);
    let missed = if options.json {
        bar::print(&verdicts, &mut io::stderr())?
    } else {
        bar::print(&verdicts, &mut out)?
    };
    Ok(if missed == 0 && run.left_out.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
