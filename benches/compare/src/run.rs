//! Who runs when: passes interleaved, peer after peer, each in a process of its own.

use std::{
    env, io,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    args::{Options, Pass},
    bar,
    made::Made,
    peers::{self, Contestant, OURS},
    report,
    results::Results,
    sample::Sample,
    work::Work,
};

/// How long a run may take.
struct Limit {
    /// What it plans with: no pass is begun that would end later.
    planned: Duration,
    /// It is over by then, and each work by its share of it, whatever is left undone: on a machine
    /// that has other things to do too, something of everything is better than all of a part.
    over: Duration,
}

const QUICK: Limit = Limit { planned: Duration::from_secs(48), over: Duration::from_secs(56) };
const FULL: Limit =
    Limit { planned: Duration::from_secs(23 * 60), over: Duration::from_secs(25 * 60) };
/// Nothing takes that long, unless it hangs: for a full run whose number of passes was told.
const HANGS: Duration = Duration::from_secs(3 * 60 * 60);

pub(crate) struct Run {
    pub(crate) results: Results,
    pub(crate) made: Made,
}

pub(crate) fn run(options: &Options) -> io::Result<Run> {
    let start = Instant::now();
    let limit = if options.quick { QUICK } else { FULL };
    let works: Vec<Work> = Work::ALL
        .into_iter()
        .filter(|work| options.works.as_ref().is_none_or(|wanted| wanted.contains(work)))
        .filter(|work| !options.check || bar::needs(*work).is_some())
        .collect();
    let shares: u32 = works.iter().map(|work| work.share(options.quick)).sum();
    let progress = progress(options, &works);
    let mut run = Run { results: Results::default(), made: Made::here(options.quick) };
    let mut share = 0;
    for work in works {
        // What earlier works have left over is taken over.
        share += work.share(options.quick);
        let (planned, over) = (limit.planned * share / shares, limit.over * share / shares);
        let bounded = options.quick || options.passes.is_none();
        let until = if bounded { start + over } else { start + HANGS };
        let (once, each_time) = contestants(work, options);
        run.pass(work, 0, &once, options, until, &progress)?;
        let began = start.elapsed();
        for pass in 0..passes(work, options) {
            let each = (start.elapsed() - began).checked_div(pass as u32);
            let late = each.is_some_and(|each| start.elapsed() + each > planned);
            if options.passes.is_none() && late {
                let left = (passes(work, options) - pass) * each_time.len();
                progress.inc((left * work.variants().len()) as u64);
                break;
            }
            run.pass(work, pass, &each_time, options, until, &progress)?;
        }
    }
    progress.finish_and_clear();
    run.made.seconds = start.elapsed().as_secs();
    Ok(run)
}

impl Run {
    /// One pass of these peers.
    fn pass(
        &mut self,
        work: Work,
        pass: usize,
        peers: &[&'static Contestant],
        options: &Options,
        until: Instant,
        progress: &ProgressBar,
    ) -> io::Result<()> {
        for threads in work.variants() {
            for peer in peers {
                progress.set_message(format!("{}: {}", work.name(), peer.name));
                let order = Pass { work, peer, quick: options.quick, threads: *threads };
                match child(&order, until)? {
                    Some(samples) => {
                        for sample in samples {
                            self.results.add(pass, peer.name, sample);
                        }
                    }
                    None if self.made.left_out.iter().any(|name| name == work.name()) => {}
                    None => self.made.left_out.push(work.name().into()),
                }
                progress.inc(1);
            }
        }
        Ok(())
    }
}

fn passes(work: Work, options: &Options) -> usize {
    options.passes.unwrap_or(work.passes())
}

/// Who takes part in `work`: in one pass only, and in each.
///
/// moka takes so much longer than all others that a full run which has to end in time has one pass
/// of it, and none of the longest work.
fn contestants(
    work: Work,
    options: &Options,
) -> (Vec<&'static Contestant>, Vec<&'static Contestant>) {
    let in_time = !options.quick && options.passes.is_none();
    let is_slow = |peer: &Contestant| in_time && peer.name == "moka";
    let wanted = |peer: &&Contestant| {
        let named = options.peers.as_ref().is_none_or(|names| names.contains(&peer.name));
        let needed =
            !options.check || bar::needs(work).is_some_and(|names| names.contains(&peer.name));
        let shown = options.report.is_none() || options.peers.is_some() || report::shows(peer.name);
        let quick_enough = !(is_slow(peer) && work == Work::Steady);
        work.has(peer, options.quick)
            && quick_enough
            && (peer.name == OURS || named && needed && shown)
    };
    peers::ALL.iter().filter(wanted).partition(|peer| is_slow(peer))
}

/// A bar on standard error, if that is a terminal.
fn progress(options: &Options, works: &[Work]) -> ProgressBar {
    let all = works.iter().map(|work| {
        let (once, each_time) = contestants(*work, options);
        (once.len() + each_time.len() * passes(*work, options)) * work.variants().len()
    });
    let bar = ProgressBar::new(all.sum::<usize>() as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {percent}% {msg}");
    bar.set_style(style.expect("a valid template"));
    bar
}

/// One pass in a fresh process; `None` if it was not done in time.
fn child(pass: &Pass, until: Instant) -> io::Result<Option<Vec<Sample>>> {
    if until <= Instant::now() {
        return Ok(None);
    }
    let mut child = Command::new(env::current_exe()?)
        .args(pass.arguments())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    // Its output is a few lines that fit into the pipe, so it never waits for this loop.
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if until <= Instant::now() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    };
    let mut output = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut output)?;
    }
    if !status.success() {
        let arguments = pass.arguments().join(" ");
        return Err(io::Error::other(format!("`compare {arguments}` ended with {status}")));
    }
    Ok(Some(serde_json::from_str(&output)?))
}
