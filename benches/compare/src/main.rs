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
//! made      when and on what machine       table, json, bar, report/: what comes out
//! ```

mod alloc;
mod args;
mod ask;
mod bar;
mod crew;
mod first;
mod json;
mod latency;
mod made;
mod meter;
mod peer;
mod peers;
mod report;
mod results;
mod run;
mod sample;
mod table;
mod work;
mod zipf;

use std::{
    error::Error,
    fs::File,
    io::{self, BufReader, Write},
    process::ExitCode,
};

use args::{Options, Order};
use run::Run;

fn main() -> ExitCode {
    let done = args::parse().map_err(Into::into).and_then(|order| match order {
        Order::Help => Ok(print_help()?),
        Order::Pass(pass) => {
            let samples = (pass.peer.pass)(pass.work, pass.quick, pass.threads);
            println!("{}", serde_json::to_string(&samples)?);
            Ok(ExitCode::SUCCESS)
        }
        Order::Compare(options) => compare(options),
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
fn compare(mut options: Options) -> Result<ExitCode, Box<dyn Error>> {
    let Run { made, results } = match &options.from {
        Some(file) => {
            let (made, results) = json::read(BufReader::new(File::open(file)?))?;
            options.quick = made.quick;
            Run { made, results }
        }
        None => {
            if cfg!(debug_assertions) {
                eprintln!(
                    "compare: this is a debug build, its numbers mean nothing; use --release"
                );
            }
            run::run(&options)?
        }
    };
    let mut out = io::stdout().lock();
    if options.json {
        json::print(&made, &results, &mut out)?;
        if !made.left_out.is_empty() {
            let left_out = made.left_out.join(", ");
            eprintln!("compare: the machine is busy: no time for all of {left_out}");
        }
    } else {
        table::print(&made, &results, &mut out)?;
    }
    if let Some(dir) = &options.report {
        report::write(&made, &results, dir)?;
    }
    if !options.check {
        return Ok(ExitCode::SUCCESS);
    }
    let verdicts = bar::judge(&results, &options);
    let missed = if options.json {
        bar::print(&verdicts, &mut io::stderr())?
    } else {
        bar::print(&verdicts, &mut out)?
    };
    Ok(if missed == 0 && made.left_out.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
