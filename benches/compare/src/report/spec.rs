//! What the report shows: each panel of a drawing is also a table.

use crate::{
    results::{Results, Row},
    sample::Metric,
};

use Metric::{BytesPerKey, CpuNs, MaxNs, P50, P90, P99, P999, P9999, P99999, WallNs};

pub(super) struct Section {
    /// Of its file, without the end.
    pub(super) name: &'static str,
    /// Whether the panels are to be compared with each other.
    pub(super) one_scale: bool,
    pub(super) title: &'static str,
    /// What was done, and how to read it.
    pub(super) text: &'static str,
    pub(super) panels: &'static [Panel],
}

pub(super) struct Panel {
    pub(super) title: &'static str,
    /// What the places along the axis are.
    pub(super) across: &'static str,
    pub(super) unit: Unit,
    pub(super) form: Form,
    pub(super) lines: &'static [Line],
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// Lines, over a scale that begins at zero.
    Linear,
    /// Lines, over a logarithmic scale.
    Log,
    /// A bar for each place, peer by peer.
    Bars,
}

/// What is shown of each peer as one line.
pub(super) struct Line {
    /// How it differs from the other one of that peer; empty if there is one only.
    pub(super) name: &'static str,
    pub(super) places: &'static [Place],
}

pub(super) struct Place {
    pub(super) name: &'static str,
    pub(super) work: &'static str,
    pub(super) threads: usize,
    pub(super) metric: Metric,
}

#[derive(Clone, Copy)]
pub(super) enum Unit {
    /// From nanoseconds for one: millions in a second.
    MillionsPerSecond,
    Nanoseconds,
    Bytes,
}

/// A number with the lowest and the highest pass.
#[derive(Clone, Copy)]
pub(super) struct Shown {
    pub(super) low: f64,
    pub(super) median: f64,
    pub(super) high: f64,
}

impl Unit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::MillionsPerSecond => "million operations a second",
            Self::Nanoseconds => "time",
            Self::Bytes => "bytes",
        }
    }

    fn of(self, value: f64) -> f64 {
        match self {
            Self::MillionsPerSecond => 1_000.0 / value,
            Self::Nanoseconds | Self::Bytes => value,
        }
    }

    pub(super) fn shown(self, row: &Row) -> Shown {
        let (one, other) = row.range();
        let (one, other) = (self.of(one), self.of(other));
        Shown { low: one.min(other), median: self.of(row.median()), high: one.max(other) }
    }

    /// For a table.
    pub(super) fn text(self, value: f64) -> String {
        match self {
            Self::MillionsPerSecond => format!("{value:.2}"),
            Self::Bytes => format!("{value:.0}"),
            Self::Nanoseconds => {
                let (value, unit) = match value {
                    ..1e3 => (value, "ns"),
                    1e3..1e6 => (value / 1e3, "us"),
                    _ => (value / 1e6, "ms"),
                };
                let digits = usize::from(value < 10.0 && unit != "ns");
                format!("{value:.digits$} {unit}")
            }
        }
    }

    /// For a table: the unit once, if it is the same.
    pub(super) fn range(self, low: f64, high: f64) -> String {
        let (low, high) = (self.text(low), self.text(high));
        match (low.split_once(' '), high.split_once(' ')) {
            (Some((number, unit)), Some((_, other))) if unit == other => {
                format!("{number} to {high}")
            }
            _ => format!("{low} to {high}"),
        }
    }

    /// For an axis, whose values are round.
    pub(super) fn label(self, value: f64) -> String {
        match self {
            Self::MillionsPerSecond | Self::Bytes => format!("{value}"),
            Self::Nanoseconds if value < 999.0 => format!("{value:.0} ns"),
            Self::Nanoseconds if value < 999e3 => format!("{:.0} us", value / 1e3),
            Self::Nanoseconds if value < 999e6 => format!("{:.0} ms", value / 1e6),
            Self::Nanoseconds => format!("{:.0} s", value / 1e9),
        }
    }
}

impl Place {
    pub(super) fn of<'a>(&self, results: &'a Results, peer: &str) -> Option<&'a Row> {
        results.find(self.work, self.threads, peer, self.metric)
    }
}

impl Panel {
    pub(super) fn is_measured(&self, results: &Results) -> bool {
        super::shown().any(|peer| self.has(results, peer))
    }

    pub(super) fn has(&self, results: &Results, peer: &str) -> bool {
        let mut places = self.lines.iter().flat_map(|line| line.places);
        places.any(|place| place.of(results, peer).is_some())
    }
}

const fn place(name: &'static str, work: &'static str, threads: usize, metric: Metric) -> Place {
    Place { name, work, threads, metric }
}

macro_rules! by_threads {
    ($work:literal, $metric:ident) => {
        &[Line {
            name: "",
            places: &[
                place("1", $work, 1, $metric),
                place("2", $work, 2, $metric),
                place("16", $work, 16, $metric),
            ],
        }]
    };
}

macro_rules! by_percentile {
    ($name:literal, $work:literal, $threads:literal) => {
        Line {
            name: $name,
            places: &[
                place("50", $work, $threads, P50),
                place("90", $work, $threads, P90),
                place("99", $work, $threads, P99),
                place("99.9", $work, $threads, P999),
                place("99.99", $work, $threads, P9999),
                place("99.999", $work, $threads, P99999),
                place("worst", $work, $threads, MaxNs),
            ],
        }
    };
}

macro_rules! waits {
    ($work:literal, $threads:literal) => {
        &[Line {
            name: "",
            places: &[
                place("50", $work, $threads, P50),
                place("90", $work, $threads, P90),
                place("worst", $work, $threads, MaxNs),
            ],
        }]
    };
}

const THREADS: &str = "threads";
const PERCENTILES: &str = "percentile of claims";

pub(super) const SECTIONS: [Section; 6] = [
    Section {
        name: "throughput",
        one_scale: false,
        title: "Throughput against threads",
        text: "\
New keys: each is claimed and completed once, with an empty answer, from an empty store to 4 million.
Replays: an answer of 200 bytes is handed back, each of a million keys as often. Threads beyond the cores
take turns on them. More is better.",
        panels: &[
            Panel {
                title: "Claim and complete new keys",
                across: THREADS,
                unit: Unit::MillionsPerSecond,
                form: Form::Linear,
                lines: by_threads!("new", WallNs),
            },
            Panel {
                title: "Replay 200 bytes",
                across: THREADS,
                unit: Unit::MillionsPerSecond,
                form: Form::Linear,
                lines: by_threads!("replay uniform", WallNs),
            },
        ],
    },
    Section {
        name: "latency",
        one_scale: true,
        title: "One claim while the store grows",
        text: "\
The same new keys, each claim timed by itself, from an empty store to 4 million: a store that moves its
records at once when it grows stops who comes meanwhile. The time in which a thread had no core, or
the host had stopped the machine, is subtracted; waiting for another thread's lock is not. Less is better.",
        panels: &[
            Panel {
                title: "1 thread",
                across: PERCENTILES,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: &[by_percentile!("", "claim", 1)],
            },
            Panel {
                title: "2 threads",
                across: PERCENTILES,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: &[by_percentile!("", "claim", 2)],
            },
            Panel {
                title: "16 threads",
                across: PERCENTILES,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: &[by_percentile!("", "claim", 16)],
            },
        ],
    },
    Section {
        name: "bytes",
        one_scale: false,
        title: "Memory of a completed key",
        text: "\
What the process has more in memory, for each key: an identity of 48 bytes (a key of 36), a fingerprint of
32, an empty answer. It depends on where between two doublings a store happens to be, so it is shown at two
sizes. Less is better.",
        panels: &[Panel {
            title: "Resident bytes for each completed key",
            across: "store",
            unit: Unit::Bytes,
            form: Form::Bars,
            lines: &[Line {
                name: "",
                places: &[
                    place("300,000 keys", "resident 300k", 1, BytesPerKey),
                    place("1 million keys", "resident 1M", 1, BytesPerKey),
                    place("10 million keys", "resident 10M", 1, BytesPerKey),
                ],
            }],
        }],
    },
    Section {
        name: "hot",
        one_scale: false,
        title: "A hot key",
        text: "\
Left: all threads claim one key whose owner runs, and are told so: a client that retries too fast. Right: 200
bytes are handed back, and a few keys of a million are asked for very often (zipf 0.99). Cpu of the process
for each claim, which waiting for a core or a sleeping lock does not change. Less is better.",
        panels: &[
            Panel {
                title: "Cpu of a losing claim on one key",
                across: THREADS,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: by_threads!("hot", CpuNs),
            },
            Panel {
                title: "Cpu of a replay, few keys are hot",
                across: THREADS,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: by_threads!("replay zipf", CpuNs),
            },
        ],
    },
    Section {
        name: "expiry",
        one_scale: false,
        title: "Expiry under load",
        text: "\
Left: 5 million keys live, the oldest end as new ones come, 9 of 10 claims are new; cpu of the process for
each, reaping included. Where nothing ends by itself the oldest key is removed by name, which is a favour: nobody
knows the name in real life. moka is left out, because it takes ten times as long. Right: one claim while
nothing ends (calm), and while a million keys end at once; in two stores only. Less is better.",
        panels: &[
            Panel {
                title: "Cpu of a claim, the oldest end",
                across: THREADS,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: by_threads!("steady", CpuNs),
            },
            Panel {
                title: "One claim while a million keys end",
                across: PERCENTILES,
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: &[
                    by_percentile!("calm", "calm claim", 1),
                    by_percentile!("they end", "storm claim", 1),
                ],
            },
        ],
    },
    Section {
        name: "waiters",
        one_scale: false,
        title: "Waiters",
        text: "\
An owner completes while 100 duplicates wait: the time until the last one has the answer. Left as tasks,
polled by the thread that completes; right as threads, which the system has to wake. Only stores in which
a duplicate can wait. Less is better.",
        panels: &[
            Panel {
                title: "100 tasks wait",
                across: "percentile of completions",
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: waits!("wake tasks", 1),
            },
            Panel {
                title: "100 threads wait",
                across: "percentile of completions",
                unit: Unit::Nanoseconds,
                form: Form::Log,
                lines: waits!("wake threads", 100),
            },
        ],
    },
];
