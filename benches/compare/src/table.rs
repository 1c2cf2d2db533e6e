//! The results as tables for a person.

use std::io::{self, Write};

use crate::{
    made::Made,
    peers::{ALL, OURS},
    results::{Results, Row},
    sample::Metric,
};

use Metric::{Bytes, BytesPerKey, CpuNs, MaxNs, P50, P999, P9999, Preempted, WallNs};

struct Table {
    title: &'static str,
    columns: &'static [Column],
}

struct Column {
    heading: &'static str,
    work: &'static str,
    metric: Metric,
    threads: usize,
}

const fn column(
    heading: &'static str,
    work: &'static str,
    metric: Metric,
    threads: usize,
) -> Column {
    Column { heading, work, metric, threads }
}

/// The columns of a work of which cpu and time are known.
macro_rules! costs {
    ($work:literal) => {
        &[
            column("cpu, 1 thr", $work, CpuNs, 1),
            column("cpu, 2 thr", $work, CpuNs, 2),
            column("cpu, 16 thr", $work, CpuNs, 16),
            column("wall, 1 thr", $work, WallNs, 1),
            column("wall, 2 thr", $work, WallNs, 2),
            column("wall, 16 thr", $work, WallNs, 16),
        ]
    };
}

/// The columns of single claims and completions.
macro_rules! singles {
    ($threads:literal) => {
        &[
            column("p50", "claim", P50, $threads),
            column("p99.9", "claim", P999, $threads),
            column("p99.99", "claim", P9999, $threads),
            column("worst", "claim", MaxNs, $threads),
            column("compl. p99.9", "complete", P999, $threads),
            column("compl. worst", "complete", MaxNs, $threads),
            column("preempted", "claim", Preempted, $threads),
        ]
    };
}

const TABLES: [Table; 13] = [
    Table {
        title: "claim + complete of new keys, from an empty store; ns",
        columns: costs!("new"),
    },
    Table { title: "one claim of them, and one completion, 1 thread", columns: singles!(1) },
    Table { title: "one claim of them, and one completion, 2 threads", columns: singles!(2) },
    Table { title: "one claim of them, and one completion, 16 threads", columns: singles!(16) },
    Table { title: "steady state: 9 of 10 are new, the oldest end; ns", columns: costs!("steady") },
    Table { title: "losing claim on one key in flight; ns", columns: costs!("hot") },
    Table { title: "replay of 200 B, each key as often; ns", columns: costs!("replay uniform") },
    Table { title: "replay of 200 B, zipf 0.99; ns", columns: costs!("replay zipf") },
    Table {
        title: "one claim while nothing ends, and while very many records end at once",
        columns: &[
            column("calm p50", "calm claim", P50, 1),
            column("p99.9", "calm claim", P999, 1),
            column("worst", "calm claim", MaxNs, 1),
            column("storm p50", "storm claim", P50, 1),
            column("p99.9", "storm claim", P999, 1),
            column("worst", "storm claim", MaxNs, 1),
        ],
    },
    Table {
        title: "cpu to reap a record, in all, and what claims lose meanwhile; ns",
        columns: &[
            column("in all", "reap", CpuNs, 1),
            column("foreground", "reap foreground", CpuNs, 1),
        ],
    },
    Table {
        title: "memory of a completed key, resident, and asked of the allocator; bytes",
        columns: &[
            column("300k keys", "resident 300k", BytesPerKey, 1),
            column("asked", "heap 300k", BytesPerKey, 1),
            column("1M keys", "resident 1M", BytesPerKey, 1),
            column("asked", "heap 1M", BytesPerKey, 1),
            column("10M keys", "resident 10M", BytesPerKey, 1),
            column("asked", "heap 10M", BytesPerKey, 1),
        ],
    },
    Table {
        title: "memory of an empty store",
        columns: &[
            column("resident", "empty resident", Bytes, 1),
            column("asked", "empty heap", Bytes, 1),
        ],
    },
    Table {
        title: "100 tasks, or threads, wait: until the last is told",
        columns: &[
            column("tasks, p50", "wake tasks", P50, 1),
            column("worst", "wake tasks", MaxNs, 1),
            column("threads, p50", "wake threads", P50, 100),
            column("worst", "wake threads", MaxNs, 100),
        ],
    },
];

pub(crate) fn print(made: &Made, results: &Results, out: &mut impl Write) -> io::Result<()> {
    let size = if made.quick { "quick" } else { "full" };
    let Made { allocator, cores, date, .. } = made;
    writeln!(out, "{size} run, {allocator} allocator, {cores} cores, {date}, {:?}", made.took())?;
    writeln!(out, "medians; in brackets how many times {OURS}, from the same passes")?;
    for table in &TABLES {
        table.print(results, out)?;
    }
    if !made.left_out.is_empty() {
        writeln!(out, "\nthe machine is busy: no time for all of {}", made.left_out.join(", "))?;
    }
    writeln!(out)
}

impl Table {
    fn print(&self, results: &Results, out: &mut impl Write) -> io::Result<()> {
        let measured =
            |column: &&Column| ALL.iter().any(|peer| column.of(results, peer.name).is_some());
        let columns: Vec<&Column> = self.columns.iter().filter(measured).collect();
        let row = |peer: &str| columns.iter().find_map(|column| column.of(results, peer));
        let Some(passes) = ALL.iter().find_map(|peer| row(peer.name)).map(Row::passes) else {
            return Ok(());
        };
        let passes = if passes == 1 { "1 pass".into() } else { format!("{passes} passes") };
        writeln!(out, "\n{} ({passes})", self.title)?;
        let mut line = format!("  {:<12}", "");
        for column in &columns {
            // Over the numbers, not over the brackets.
            line += &format!("{:>9} {:>8}", column.heading, "");
        }
        writeln!(out, "{}", line.trim_end())?;
        for peer in ALL.iter().filter(|peer| row(peer.name).is_some()) {
            let mut line = format!("  {:<12}", peer.name);
            for column in &columns {
                let (value, ratio) = match column.of(results, peer.name) {
                    None => ("-".into(), None),
                    Some(row) => (shown(row.median(), row.metric), results.ratio_to_ours(row)),
                };
                let ratio = ratio.filter(|_| column.metric != Metric::Preempted);
                let ratio = ratio.map_or_else(String::new, |ratio| format!("({ratio:.2})"));
                line += &format!("{value:>9} {ratio:>8}");
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl Column {
    fn of<'a>(&self, results: &'a Results, peer: &str) -> Option<&'a Row> {
        results.find(self.work, self.threads, peer, self.metric)
    }
}

fn shown(value: f64, metric: Metric) -> String {
    match metric {
        CpuNs | WallNs | BytesPerKey => number(value),
        Preempted => format!("{value:.0}"),
        Bytes => format!("{:.1} KiB", value / 1024.0),
        _ if value < 1e3 => format!("{value:.0} ns"),
        _ if value < 1e6 => format!("{:.1} us", value / 1e3),
        _ => format!("{:.1} ms", value / 1e6),
    }
}

/// With as many digits as mean something.
pub(crate) fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}
