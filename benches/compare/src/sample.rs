//! One number that was measured.

use serde::{Deserialize, Serialize};

/// What a number means. The names are those of the JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Process cpu for one operation, background threads included, in ns.
    CpuNs,
    /// Time for one operation, ns: all operations of all threads in the time they took together.
    WallNs,
    /// Quantiles of single operations, ns.
    P50,
    P90,
    P99,
    P999,
    P9999,
    P99999,
    /// The longest single operation, ns, the time in which its thread had no core, or the host
    /// had stopped the machine, subtracted.
    MaxNs,
    /// Operations in which the thread lost its core.
    Preempted,
    BytesPerKey,
    Bytes,
}

impl Metric {
    /// As it is named in the JSON output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::CpuNs => "cpu_ns",
            Self::WallNs => "wall_ns",
            Self::P50 => "p50",
            Self::P90 => "p90",
            Self::P99 => "p99",
            Self::P999 => "p999",
            Self::P9999 => "p9999",
            Self::P99999 => "p99999",
            Self::MaxNs => "max_ns",
            Self::Preempted => "preempted",
            Self::BytesPerKey => "bytes_per_key",
            Self::Bytes => "bytes",
        }
    }
}

/// A number of one pass of one peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) work: String,
    pub(crate) threads: usize,
    pub(crate) metric: Metric,
    pub(crate) value: f64,
}

impl Sample {
    pub(crate) fn new(work: &str, threads: usize, metric: Metric, value: f64) -> Self {
        Self { work: work.into(), threads, metric, value }
    }
}
