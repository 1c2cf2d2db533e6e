//! The command line.

use std::{ffi::OsString, path::PathBuf};

use lexopt::prelude::*;

use crate::{
    peers::{self, Contestant},
    work::Work,
};

pub(crate) const HELP: &str = "\
Compares oncekey with other stores on the same work, interleaved, each pass in a fresh process.

usage: compare [--quick] [--check] [--json] [--report DIR] [--only WORKS] [--peers PEERS]
               [--passes N]
       compare --from FILE [--check] [--json] [--report DIR]

It runs for 25 minutes at most, and shows how far it is.

  --quick         small sizes, a minute at most
  --check         exits with 1 if a \"must\" of the bar is missed, or could not be measured;
                  measures only what the bar needs
  --json          one JSON object a line instead of tables: how the numbers were made, then
                  the numbers
  --report DIR    writes DIR/benchmarks.md, whose own words it keeps, and DIR/plots/*.svg; only
                  peers that the report shows take part
  --from FILE     measures nothing: takes what `--json` has printed
  --only WORKS    a comma-separated list of: new, single, steady, hot, replay, storm, resident,
                  empty, wake
  --peers PEERS   a comma-separated list of peers; oncekey always takes part
  --passes N      passes of each work, however long it takes (default: at most 5, for
                  `resident` 1, as the time allows; of moka in a full run 1, of `steady` none)

Without --features mimalloc all use the system's allocator.
";

/// What is to be done.
pub(crate) enum Order {
    Help,
    Compare(Options),
    /// One pass in this process, which another one has started for it.
    Pass(Pass),
}

#[derive(Default)]
pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) check: bool,
    pub(crate) json: bool,
    pub(crate) works: Option<Vec<Work>>,
    pub(crate) peers: Option<Vec<&'static str>>,
    pub(crate) passes: Option<usize>,
    pub(crate) report: Option<PathBuf>,
    pub(crate) from: Option<PathBuf>,
}

pub(crate) struct Pass {
    pub(crate) work: Work,
    pub(crate) peer: &'static Contestant,
    pub(crate) quick: bool,
    pub(crate) threads: usize,
}

impl Pass {
    /// As arguments for the process that does it.
    pub(crate) fn arguments(&self) -> [String; 5] {
        let size = if self.quick { "quick" } else { "full" };
        let [work, peer] = [self.work.name(), self.peer.name].map(String::from);
        ["--pass".into(), work, peer, size.into(), self.threads.to_string()]
    }
}

pub(crate) fn parse() -> Result<Order, lexopt::Error> {
    let mut options = Options::default();
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("quick") => options.quick = true,
            Long("check") => options.check = true,
            Long("json") => options.json = true,
            Long("report") => options.report = Some(parser.value()?.into()),
            Long("from") => options.from = Some(parser.value()?.into()),
            Long("only") => options.works = Some(list(parser.value()?, Work::named)?),
            Long("peers") => {
                let name = |name: &str| peers::named(name).map(|peer| peer.name);
                options.peers = Some(list(parser.value()?, name)?);
            }
            Long("passes") => options.passes = Some(parser.value()?.parse()?),
            Long("pass") => {
                let mut value = || parser.value()?.string();
                let (work, peer, size, threads) = (value()?, value()?, value()?, value()?);
                return Ok(Order::Pass(Pass {
                    work: Work::named(&work).ok_or("no such work")?,
                    peer: peers::named(&peer).ok_or("no such peer")?,
                    quick: size == "quick",
                    threads: threads.parse().map_err(|_| "no number of threads")?,
                }));
            }
            Short('h') | Long("help") => return Ok(Order::Help),
            other => return Err(other.unexpected()),
        }
    }
    let measures = options.quick
        || options.works.is_some()
        || options.peers.is_some()
        || options.passes.is_some();
    if options.from.is_some() && measures {
        return Err("--from takes what was measured as it is".into());
    }
    Ok(Order::Compare(options))
}

fn list<T>(names: OsString, named: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, lexopt::Error> {
    let known = |name: &str| named(name).ok_or_else(|| format!("nothing is named `{name}`").into());
    names.string()?.split(',').map(known).collect()
}
