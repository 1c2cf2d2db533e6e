//! What oncekey must reach against its peers, and what it aims at.

use std::{
    fmt,
    io::{self, Write},
};

use crate::{args::Options, peers::OURS, results::Results, sample::Metric, table, work::Work};

/// A number that must not be passed.
struct Figure {
    work: &'static str,
    metric: Metric,
    against: Against,
    threads: &'static [usize],
    must: f64,
    aim: f64,
}

enum Against {
    /// Our number divided by that of this peer.
    Peer(&'static str),
    /// Our number divided by our number at this other work.
    Ourselves(&'static str),
    /// Our number as it is.
    Nothing,
}

use Against::{Nothing, Ourselves, Peer};
use Metric::{Bytes, BytesPerKey, CpuNs, MaxNs, P999};

const ALL: &[usize] = &[1, 2, 16];

const fn figure(
    work: &'static str,
    metric: Metric,
    against: Against,
    threads: &'static [usize],
    must: f64,
    aim: f64,
) -> Figure {
    Figure { work, metric, against, threads, must, aim }
}

const KIB: f64 = 1024.0;

#[rustfmt::skip]
const FIGURES: [Figure; 20] = [
    figure("new", CpuNs, Peer("dashmap"), ALL, 0.55, 0.33),
    figure("new", CpuNs, Peer("64 x Mutex"), ALL, 0.85, 0.55),
    figure("new", CpuNs, Peer("moka"), ALL, 0.2, 0.1),
    figure("new", CpuNs, Peer("quick_cache"), ALL, 0.6, 0.3),
    figure("claim", P999, Peer("dashmap"), ALL, 1.0, 0.5),
    figure("claim", MaxNs, Peer("dashmap"), ALL, 0.05, 0.005),
    figure("steady", CpuNs, Peer("dashmap"), ALL, 0.6, 0.33),
    figure("hot", CpuNs, Peer("dashmap"), &[2, 16], 0.8, 0.4),
    figure("replay uniform", CpuNs, Peer("dashmap"), ALL, 1.05, 0.75),
    figure("replay uniform", CpuNs, Peer("papaya"), ALL, 1.05, 0.75),
    figure("replay zipf", CpuNs, Peer("dashmap"), ALL, 1.05, 0.75),
    figure("replay zipf", CpuNs, Peer("papaya"), ALL, 1.05, 0.75),
    figure("storm claim", P999, Ourselves("calm claim"), &[1], 3.0, 3.0),
    figure("reap foreground", CpuNs, Nothing, &[1], 10.0, 2.0),
    figure("reap", CpuNs, Nothing, &[1], 60.0, 10.0),
    // A quick run has the first, a full run the others.
    figure("resident 300k", BytesPerKey, Nothing, &[1], 190.0, 130.0),
    figure("resident 1M", BytesPerKey, Nothing, &[1], 190.0, 130.0),
    figure("resident 10M", BytesPerKey, Nothing, &[1], 190.0, 130.0),
    figure("empty resident", Bytes, Nothing, &[1], 256.0 * KIB, 64.0 * KIB),
    figure("empty heap", Bytes, Nothing, &[1], 256.0 * KIB, 64.0 * KIB),
];

/// The peers that the bar needs at `work`; `None` if it does not need the work.
pub(crate) fn needs(work: Work) -> Option<&'static [&'static str]> {
    Some(match work {
        Work::New => &[OURS, "dashmap", "64 x Mutex", "moka", "quick_cache"],
        Work::Single | Work::Steady | Work::Hot => &[OURS, "dashmap"],
        Work::Replay => &[OURS, "dashmap", "papaya"],
        Work::Storm | Work::Resident | Work::Empty => &[OURS],
        Work::Wake => return None,
    })
}

/// How a figure came out.
pub(crate) struct Verdict {
    figure: &'static Figure,
    threads: usize,
    /// `None` if it was not measured.
    found: Option<f64>,
}

impl Verdict {
    pub(crate) fn is_missed(&self) -> bool {
        self.found.is_none_or(|found| found > self.figure.must)
    }
}

/// Holds what was measured against the bar. What was not asked for is left out.
pub(crate) fn judge(results: &Results, options: &Options) -> Vec<Verdict> {
    let all = options.works.is_none() && options.peers.is_none();
    let other_size =
        if options.quick { ["resident 1M", "resident 10M"] } else { ["resident 300k"; 2] };
    let figures = FIGURES.iter().filter(|figure| !other_size.contains(&figure.work));
    let of_figure = |figure: &'static Figure| {
        let verdict =
            move |threads| Verdict { figure, threads, found: find(results, figure, threads) };
        figure.threads.iter().copied().map(verdict)
    };
    figures.flat_map(of_figure).filter(|verdict| all || verdict.found.is_some()).collect()
}

fn find(results: &Results, figure: &Figure, threads: usize) -> Option<f64> {
    let ours = results.find(figure.work, threads, OURS, figure.metric)?;
    match figure.against {
        Peer(peer) => ours.over(results.find(figure.work, threads, peer, figure.metric)?),
        Ourselves(work) => ours.over(results.find(work, threads, OURS, figure.metric)?),
        Nothing => Some(ours.median()),
    }
}

/// Prints the verdicts, and answers how many are missed.
pub(crate) fn print(verdicts: &[Verdict], out: &mut impl Write) -> io::Result<usize> {
    writeln!(out, "the bar{:>47} {:>8} {:>8} {:>8}", "threads", "found", "must", "aim")?;
    for verdict in verdicts {
        writeln!(out, "  {verdict}")?;
    }
    let missed = verdicts.iter().filter(|verdict| verdict.is_missed()).count();
    writeln!(out, "{} of {} held, {missed} missed", verdicts.len() - missed, verdicts.len())?;
    Ok(missed)
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figure { work, metric, against, must, aim, .. } = self.figure;
        let what = match against {
            Peer(peer) => format!("{work}, {}, against {peer}", metric.name()),
            Ourselves(other) => format!("{work}, {}, against {other}", metric.name()),
            Nothing => format!("{work}, {}", metric.name()),
        };
        let word = match self.found {
            None => "NOT MEASURED",
            Some(found) if found > *must => "MISSED",
            Some(found) if found > *aim => "held",
            Some(_) => "held, the aim too",
        };
        let number = |number: f64| match against {
            Nothing => table::number(number),
            _ => format!("{number:.3}"),
        };
        let found = self.found.map_or_else(|| "-".into(), number);
        let (must, aim) = (number(*must), number(*aim));
        write!(f, "{what:<44} {:>7} {found:>8} {must:>8} {aim:>8}  {word}", self.threads)
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::Sample;

    use super::*;

    #[test]
    fn a_figure_is_missed_if_it_is_passed_or_not_measured() {
        let mut results = Results::default();
        for (peer, value) in [(OURS, 54.0), ("dashmap", 100.0), ("moka", 200.0)] {
            results.add(0, peer, Sample::new("new", 1, CpuNs, value));
        }
        let verdicts = judge(&results, &Options { quick: true, ..Options::default() });
        let verdict = |against: &str| {
            let same = |verdict: &&Verdict| {
                let figure = verdict.figure;
                figure.work == "new"
                    && verdict.threads == 1
                    && matches!(figure.against, Peer(peer) if peer == against)
            };
            verdicts.iter().find(same).unwrap()
        };
        assert!(!verdict("dashmap").is_missed());
        assert!(verdict("moka").is_missed());
        assert!(verdict("quick_cache").is_missed());
        let mut out = Vec::new();
        assert_eq!(print(&verdicts, &mut out).unwrap(), verdicts.len() - 1);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("0.540    0.550    0.330  held"), "{text}");
        assert!(text.contains("NOT MEASURED"), "{text}");
    }
}
