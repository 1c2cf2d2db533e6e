//! Everything at once, for as long as is asked: `soak --seconds 1800`.
//!
//! ```text
//! threads ---- claims, duplicates, waiting ----> a store in memory, too small for all
//! clients ---- resets, then patience ----------> HTTP layer -> memory, too small -> a tier that fails
//! the clock runs 120 times as fast; now and then the sweep panics; a monitor looks at all limits
//! ```
//!
//! What must hold: no key is run twice; whoever asks gets the answer of the one run; no limit is
//! passed; in the end no key, byte, waiter or task is left, in memory or in the tier. The first that
//! does not hold ends it with a message and the exit status 1.
//!
//! It pauses between its steps, so that it needs about a processor, and less when it is niced.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod http;
mod memory;
#[path = "../../../tests/common/tiers.rs"]
mod tiers;

use std::{
    fmt, process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use oncekey::{Clock, Stats, Store};

/// How much faster than real time passes.
const SPEED: u32 = 120;

/// A fast clock that can be set forward, and on which the sweep can be made to panic.
#[derive(Clone)]
pub struct Fast {
    start: Instant,
    ahead: Arc<AtomicU64>,
    trap: Arc<AtomicBool>,
}

impl Fast {
    fn new() -> Self {
        Self { start: Instant::now(), ahead: Arc::default(), trap: Arc::default() }
    }

    /// The same time, with a trap of its own.
    fn apart(&self) -> Self {
        Self { trap: Arc::default(), ..self.clone() }
    }

    /// The next look of the sweep panics.
    fn arm(&self) {
        self.trap.store(true, Ordering::Relaxed);
    }

    fn skip_days(&self, days: u64) {
        self.ahead.fetch_add(days * 86_400, Ordering::Relaxed);
    }
}

impl Clock for Fast {
    fn now(&self) -> Duration {
        let is_trapped = self.trap.load(Ordering::Relaxed);
        if is_trapped && thread::current().name() == Some("oncekey-sweep") {
            self.trap.store(false, Ordering::Relaxed);
            // Not a message each time: what comes of it is counted by the store.
            std::panic::resume_unwind(Box::new("seeded by the soak"));
        }
        let ahead = Duration::from_secs(self.ahead.load(Ordering::Relaxed));
        self.start.elapsed() * SPEED + ahead
    }
}

/// What all parts share.
pub struct Soak {
    pub clock: Fast,
    pub is_over: AtomicBool,
    pub times: Times,
    pub runs: AtomicU64,
}

/// How long things took, in microseconds.
pub struct Times {
    pub core: Mutex<Histogram<u64>>,
    pub http: Mutex<Histogram<u64>>,
}

impl Soak {
    pub fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }
}

/// Ends the soak: something that must hold does not.
pub fn fail(what: impl fmt::Display) -> ! {
    eprintln!("\nFAILED: {what}");
    process::exit(1)
}

/// Waits until it holds, a minute at most.
pub fn settles(what: &str, store: &Store, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > Duration::from_secs(60) {
            fail(format!("{what}: {:?}", store.stats()));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// No gauge above its limit, nothing counted that no rule allows.
pub fn check_limits(of: &str, stats: &Stats, most: (usize, usize)) {
    if stats.keys > most.0 || stats.bytes > most.1 || stats.waiters > 16_384 {
        fail(format!("a limit of {of} was passed: {stats:?}"));
    }
    if stats.lost + stats.double_runs + stats.lapsed > 0 || !stats.sweep_alive {
        fail(format!("{of}: {stats:?}"));
    }
}

fn main() -> Result<(), lexopt::Error> {
    let mut seconds = 120;
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next()? {
        match arg {
            lexopt::Arg::Long("seconds") => {
                seconds = lexopt::ValueExt::parse(&args.value()?)?;
            }
            other => return Err(other.unexpected()),
        }
    }
    // Up to an hour.
    let histogram = || {
        let made = Histogram::new_with_bounds(1, 3_600_000_000, 3);
        Mutex::new(made.expect("the bounds are in order"))
    };
    let soak = Arc::new(Soak {
        clock: Fast::new(),
        is_over: AtomicBool::new(false),
        times: Times { core: histogram(), http: histogram() },
        runs: AtomicU64::new(0),
    });
    let mut memory = memory::Memory::start(&soak);
    let mut http = http::Http::start(&soak);
    let arm = || {
        memory.clock.arm();
        http.clock.arm();
    };
    let check = || {
        memory.check();
        http.check();
    };
    watch(&soak, seconds, check, arm);
    soak.is_over.store(true, Ordering::Relaxed);
    let reports = [memory.stop(), http.stop()];
    // All that is kept is over.
    soak.clock.skip_days(3);
    memory.check_clean();
    http.check_clean();
    for (name, times) in [("claims of threads", &soak.times.core), ("requests", &soak.times.http)] {
        print_times(name, &times.lock().expect("nobody panics with it"));
    }
    reports.iter().for_each(|report| println!("{report}"));
    println!("OK: {seconds} s");
    Ok(())
}

/// Shows how it goes, looks at everything ten times a second, and has the sweep panic each 5 s.
fn watch(soak: &Soak, seconds: u64, check: impl Fn(), arm: impl Fn()) {
    let bar = ProgressBar::new(seconds);
    let style = "{elapsed_precise} {wide_bar} {pos}/{len} s  {msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("a template"));
    let start = Instant::now();
    let (mut ticks, mut before) = (0_u64, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        thread::sleep(Duration::from_millis(100));
        check();
        ticks += 1;
        if ticks.is_multiple_of(10) {
            let runs = soak.runs.load(Ordering::Relaxed);
            let p99 = soak.times.http.lock().expect("as above").value_at_quantile(0.99);
            bar.set_position(start.elapsed().as_secs());
            bar.set_message(format!("{} runs/s, p99 {} ms", runs - before, p99 / 1_000));
            before = runs;
        }
        if ticks.is_multiple_of(50) {
            arm();
        }
    }
    bar.finish();
}

fn print_times(name: &str, times: &Histogram<u64>) {
    print!("{name}: {}", times.len());
    for quantile in [0.5, 0.9, 0.99, 0.999, 0.9999, 1.0] {
        print!(", p{} {} us", quantile * 100.0, times.value_at_quantile(quantile));
    }
    println!();
}
