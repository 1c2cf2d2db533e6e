//! How much memory, how many rows, how many nodes a load takes.
//!
//! ```text
//! cargo run --release --example capacity -- --rate 2000 --retention 24h --body 300
//! cargo run --release --example capacity -- --rate 2000 --retention 24h --body 300 --simulate
//! ```
//!
//! `docs/capacity.md` explains the sums; `tests/capacity.rs` holds them against real stores.

#[path = "capacity/model.rs"]
mod model;
#[path = "capacity/simulation.rs"]
mod simulation;

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use model::{Load, Tier};
use simulation::{Routing, Simulation};

const USAGE: &str = "\
usage: capacity [FLAG VALUE]...
  --rate N         new keys a second at the peak                 (100)
  --retention T    how long an answer is kept: 90s, 15m, 24h, 7d (24h)
  --body N         bytes of an answer's body                     (300)
  --head N         bytes of its header lines                     (120)
  --identity N     bytes of account, endpoint and key together   (64)
  --handler T      how long the work takes                       (100ms)
  --retried P      share of keys that are sent again, 0 to 1     (0.05)
  --memory N       MiB that one node can give the store          (4096)
  --simulate       nodes and routings: who answers retries";

/// Claims and completions a second: what was measured on two cores, rounded down
/// (`docs/engine.md`, `docs/tiers.md`).
const STEPS_OF_A_NODE: f64 = 1_000_000.0;
const PAIRS_OF_EMBEDDED: f64 = 40_000.0;

const MIB: f64 = 1_048_576.0;

struct Asked {
    load: Load,
    retried: f64,
    memory: f64,
    simulate: bool,
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(asked) => {
            // Whoever reads it may have enough of it.
            let _ = tell(&mut io::stdout().lock(), &asked);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut load = Load {
        rate: 100.0,
        retention: Duration::from_secs(24 * 60 * 60),
        identity: 64.0,
        head: 120.0,
        body: 300.0,
        handler: Duration::from_millis(100),
    };
    let (mut retried, mut memory, mut simulate) = (0.05, 4096.0 * MIB, false);
    while let Some(flag) = arguments.next() {
        if flag == "--simulate" {
            simulate = true;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{flag} wants a value"))?;
        let number = |from: f64, to: f64| {
            let number = value.parse().ok().filter(|number: &f64| (from..=to).contains(number));
            number.ok_or_else(|| format!("{flag} wants a number from {from} to {to}, not {value}"))
        };
        match flag.as_str() {
            "--rate" => load.rate = number(0.001, 1e9)?,
            "--retention" => load.retention = span(&value)?,
            "--body" => load.body = number(0.0, 1e9)?,
            "--head" => load.head = number(0.0, 1e6)?,
            "--identity" => load.identity = number(1.0, 1022.0)?,
            "--handler" => load.handler = span(&value)?,
            "--retried" => retried = number(0.0, 1.0)?,
            "--memory" => memory = number(1.0, 49_152.0)? * MIB,
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok(Asked { load, retried, memory, simulate })
}

/// `1500ms`, `90s`, `15m`, `24h`, `7d`.
fn span(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        _ => return Err(format!("{text} is no time: 90s, 15m, 24h, 7d")),
    };
    let number = digits.parse().ok().filter(|number: &f64| (0.0..=1e9).contains(number));
    let seconds = number.ok_or_else(|| format!("{text} is no time: 90s, 15m, 24h, 7d"))? * unit;
    Ok(Duration::from_secs_f64(seconds))
}

fn tell(out: &mut impl Write, asked: &Asked) -> io::Result<()> {
    let load = &asked.load;
    writeln!(out, "{} new keys a second, kept for {:?}", load.rate, load.retention)?;
    writeln!(out)?;
    writeln!(out, "memory, if nothing else keeps them")?;
    writeln!(
        out,
        "  max_keys     {:>14.0}   kept {:.0}, in flight {:.0}",
        load.max_keys(),
        load.kept(),
        load.in_flight()
    )?;
    writeln!(
        out,
        "  max_bytes    {:>14}   {:.0} for each kept key",
        size(load.max_bytes()),
        load.key()
    )?;
    writeln!(
        out,
        "  reaped       {:>14.0}   records a second, the rate at which they came",
        load.rate
    )?;
    let nodes = (load.max_bytes() / asked.memory).ceil().max(1.0);
    let fits = match (load.max_bytes() <= asked.memory, load.max_keys() <= (1_u64 << 31) as f64) {
        (true, true) => "one node keeps them all".to_owned(),
        _ => format!(
            "{nodes:.0} nodes by memory alone: put a tier behind it and let memory be a cache"
        ),
    };
    writeln!(out, "  {} a node: {fits}", size(asked.memory))?;
    writeln!(out)?;
    writeln!(out, "tiers                 rows            bytes      a day   steps a second")?;
    for tier in Tier::ALL {
        let (row, day) = (tier.row(load), load.rate * 86_400.0);
        writeln!(
            out,
            "  {:<12}{:>14.0}{:>17}{:>11}{:>12.0}",
            tier.name(),
            load.kept(),
            size(load.kept() * row + tier.fixed()),
            size(day * row),
            2.0 * load.rate
        )?;
    }
    writeln!(out)?;
    writeln!(out, "when one node is not enough")?;
    let share = |of: f64| 100.0 * 2.0 * load.rate / of;
    writeln!(
        out,
        "  claims and completions: {:.1} % of what the engine of one node does",
        share(STEPS_OF_A_NODE)
    )?;
    writeln!(
        out,
        "  a disk of its own (embedded): {:.0} % of what was measured",
        share(2.0 * PAIRS_OF_EMBEDDED)
    )?;
    if asked.simulate {
        writeln!(out)?;
        simulate(out, asked)?;
    }
    Ok(())
}

/// Memory is a cache of the tier here: so many keys as a node has room for, scaled to the number of keys
/// that are simulated.
fn simulate(out: &mut impl Write, asked: &Asked) -> io::Result<()> {
    const KEYS: u64 = 400_000;
    writeln!(out, "retries that memory answers, and steps of the tier for each new key")?;
    writeln!(out, "  nodes    any node        by account      by account, one dies")?;
    let room = asked.memory / asked.load.key();
    // As much time as the simulated keys take, at most two hours: later retries are rare.
    let seconds = 7_200.0;
    let scale = KEYS as f64 / (asked.load.rate * seconds);
    let memory = ((room * scale) as usize).max(1);
    for nodes in [1, 2, 4, 8, 16, 32] {
        write!(out, "  {nodes:>5}")?;
        for routing in [Routing::Any, Routing::Account, Routing::AccountAndADeath] {
            let simulation = Simulation {
                nodes,
                routing,
                rate: KEYS as f64 / seconds,
                memory,
                retried: asked.retried,
                keys: KEYS,
            };
            let seen = simulation.run();
            write!(out, "    {:>5.1} %, {:.2}", 100.0 * seen.hits, seen.steps)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut bytes = bytes;
    let mut unit = 0;
    while bytes >= 1_024.0 && unit + 1 < units.len() {
        bytes /= 1_024.0;
        unit += 1;
    }
    format!("{bytes:.1} {}", units[unit])
}
