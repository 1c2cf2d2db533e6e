//! The results as one JSON object a line.

use std::io::{self, Write};

use serde::Serialize;

use crate::results::Results;

#[derive(Serialize)]
struct Line<'a> {
    work: &'a str,
    threads: usize,
    peer: &'a str,
    metric: &'a str,
    value: f64,
    /// How many times our own number that is; null if we were not measured, or are zero.
    ratio_to_oncekey: Option<f64>,
}

pub(crate) fn print(results: &Results, out: &mut impl Write) -> io::Result<()> {
    for row in results.rows() {
        let line = Line {
            work: &row.work,
            threads: row.threads,
            peer: row.peer,
            metric: row.metric.name(),
            value: row.median(),
            ratio_to_oncekey: results.ratio_to_ours(row),
        };
        serde_json::to_writer(&mut *out, &line)?;
        writeln!(out)?;
    }
    Ok(())
}
