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
    peers::{self, Contestant, OURS},
    results::Results,
    sample::Sample,
    work::Work,
};

/// A quick run is over by then, and each work by its share of it, whatever is left undone: on a
/// machine that has other things to do too, something of everything is better than all of a part.
const QUICK: Duration = Duration::from_secs(56);
/// What a quick run plans with.
const PLANNED: Duration = Duration::from_secs(48);
/// No full run takes that long, unless something hangs.
const HANGS: Duration = Duration::from_secs(3 * 60 * 60);

pub(crate) struct Run {
    pub(crate) results: Results,
    /// What was left out for lack of time.
    pub(crate) left_out: Vec<&'static str>,
    pub(crate) took: Duration,
}

pub(crate) fn run(options: &Options) -> io::Result<Run> {
    let start = Instant::now();
    let works: Vec<Work> = Work::ALL
        .into_iter()
        .filter(|work| options.works.as_ref().is_none_or(|wanted| wanted.contains(work)))
        .filter(|work| !options.check || bar::needs(*work).is_some())
        .collect();
    let shares: u32 = works.iter().map(|work| work.share()).sum();
    let progress = progress(options, &works);
    let mut run = Run { results: Results::default(), left_out: Vec::new(), took: Duration::ZERO };
    let mut share = 0;
    for work in works {
        // What earlier works have left over is taken over.
        share += work.share();
        let (planned, until) = (PLANNED * share / shares, QUICK * share / shares);
        let until = if options.quick { start + until } else { start + HANGS };
        let began = start.elapsed();
        for pass in 0..passes(work, options) {
            let each = (start.elapsed() - began).checked_div(pass as u32);
            let late = each.is_some_and(|each| start.elapsed() + each > planned);
            if options.quick && options.passes.is_none() && late {
                break;
            }
            run.pass(work, pass, options, until, &progress)?;
        }
    }
    progress.finish_and_clear();
    run.took = start.elapsed();
    Ok(run)
}

impl Run {
    /// One pass of all peers.
    fn pass(
        &mut self,
        work: Work,
        pass: usize,
        options: &Options,
        until: Instant,
        progress: &ProgressBar,
    ) -> io::Result<()> {
        for threads in work.variants() {
            for peer in contestants(work, options) {
                progress.set_message(format!("{}: {}", work.name(), peer.name));
                let order = Pass { work, peer, quick: options.quick, threads: *threads };
                match child(&order, until)? {
                    Some(samples) => {
                        for sample in samples {
                            self.results.add(pass, peer.name, sample);
                        }
                    }
                    None if self.left_out.contains(&work.name()) => {}
                    None => self.left_out.push(work.name()),
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

/// Who takes part in `work`.
fn contestants(work: Work, options: &Options) -> Vec<&'static Contestant> {
    let wanted = |peer: &&Contestant| {
        let named = options.peers.as_ref().is_none_or(|names| names.contains(&peer.name));
        let needed =
            !options.check || bar::needs(work).is_some_and(|names| names.contains(&peer.name));
        work.has(peer, options.quick) && (peer.name == OURS || named && needed)
    };
    peers::ALL.iter().filter(wanted).collect()
}

/// A bar on standard error, if that is a terminal.
fn progress(options: &Options, works: &[Work]) -> ProgressBar {
    let steps = |work: &Work| {
        contestants(*work, options).len() * work.variants().len() * passes(*work, options)
    };
    let bar = ProgressBar::new(works.iter().map(steps).sum::<usize>() as u64);
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
