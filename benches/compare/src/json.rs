//! The results as one JSON object a line: first how they were made, then the numbers.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::{
    made::Made,
    peers,
    results::Results,
    sample::{Metric, Sample},
};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Made { made: Made },
    Row(Row),
}

#[derive(Serialize, Deserialize)]
struct Row {
    work: String,
    threads: usize,
    peer: String,
    metric: Metric,
    /// The median of the passes.
    value: f64,
    /// How many times our own number that is; null if we were not measured, or are zero.
    ratio_to_oncekey: Option<f64>,
    /// Each pass, and what it said.
    passes: Vec<(usize, f64)>,
}

pub(crate) fn print(made: &Made, results: &Results, out: &mut impl Write) -> io::Result<()> {
    print_line(&Line::Made { made: made.clone() }, out)?;
    for row in results.rows() {
        let line = Row {
            work: row.work.clone(),
            threads: row.threads,
            peer: row.peer.into(),
            metric: row.metric,
            value: row.median(),
            ratio_to_oncekey: results.ratio_to_ours(row),
            passes: row.values().to_vec(),
        };
        print_line(&Line::Row(line), out)?;
    }
    Ok(())
}

fn print_line(line: &Line, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

/// What [`print`] has printed.
pub(crate) fn read(from: impl BufRead) -> io::Result<(Made, Results)> {
    let mut made = None;
    let mut results = Results::default();
    for (line, number) in from.lines().zip(1..) {
        let wrong = |what: &str| io::Error::other(format!("line {number}: {what}"));
        match serde_json::from_str(&line?).map_err(|error| wrong(&error.to_string()))? {
            Line::Made { made: found } => made = Some(found),
            Line::Row(row) => {
                let peer = peers::named(&row.peer).ok_or_else(|| wrong("no such peer"))?.name;
                for (pass, value) in row.passes {
                    results.add(pass, peer, Sample::new(&row.work, row.threads, row.metric, value));
                }
            }
        }
    }
    let made = made.ok_or_else(|| io::Error::other("no line says how the numbers were made"))?;
    Ok((made, results))
}

#[cfg(test)]
mod tests {
    use crate::peers::OURS;

    use super::*;

    #[test]
    fn what_was_printed_is_read_as_it_was() {
        let mut results = Results::default();
        for (pass, ours, theirs) in [(0, 1.0, 2.0), (2, 4.0, 16.0)] {
            for (peer, value) in [(OURS, ours), ("moka", theirs)] {
                results.add(pass, peer, Sample::new("claim", 16, Metric::P99999, value));
            }
        }
        let mut first = Vec::new();
        print(&Made::here(true), &results, &mut first).unwrap();
        let (made, read_again) = read(&first[..]).unwrap();
        let mut second = Vec::new();
        print(&made, &read_again, &mut second).unwrap();
        assert_eq!(String::from_utf8(first).unwrap(), String::from_utf8(second).unwrap());
        assert!(read(&b"{\"work\":1}\n"[..]).is_err());
        assert!(read(&b""[..]).is_err());
    }
}
