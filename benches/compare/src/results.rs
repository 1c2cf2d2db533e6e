//! What was measured, and the medians of it.

use crate::{
    peers::OURS,
    sample::{Metric, Sample},
};

/// The numbers of all passes.
#[derive(Default)]
pub(crate) struct Results {
    rows: Vec<Row>,
}

/// The numbers of one peer at one thing.
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) threads: usize,
    pub(crate) peer: &'static str,
    pub(crate) metric: Metric,
    /// Pass and number.
    values: Vec<(usize, f64)>,
}

impl Results {
    pub(crate) fn add(&mut self, pass: usize, peer: &'static str, sample: Sample) {
        let Sample { work, threads, metric, value } = sample;
        let same = |row: &&mut Row| {
            row.work == work && row.threads == threads && row.peer == peer && row.metric == metric
        };
        match self.rows.iter_mut().find(same) {
            Some(row) => row.values.push((pass, value)),
            None => {
                let values = vec![(pass, value)];
                self.rows.push(Row { work, threads, peer, metric, values });
            }
        }
    }

    /// In the order in which they were measured.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter()
    }

    pub(crate) fn find(
        &self,
        work: &str,
        threads: usize,
        peer: &str,
        metric: Metric,
    ) -> Option<&Row> {
        self.rows.iter().find(|row| {
            row.work == work && row.threads == threads && row.peer == peer && row.metric == metric
        })
    }

    /// How much more `row` is than our own number: 2 for twice as much.
    pub(crate) fn ratio_to_ours(&self, row: &Row) -> Option<f64> {
        row.over(self.find(&row.work, row.threads, OURS, row.metric)?)
    }
}

impl Row {
    pub(crate) fn median(&self) -> f64 {
        median(self.values.iter().map(|(_, value)| *value)).unwrap_or(f64::NAN)
    }

    pub(crate) fn passes(&self) -> usize {
        self.values.len()
    }

    /// Each pass that was made, by its number, and what it said.
    pub(crate) fn values(&self) -> &[(usize, f64)] {
        &self.values
    }

    /// The lowest and the highest of all passes: how far apart they lie is the noise.
    pub(crate) fn range(&self) -> (f64, f64) {
        let values = self.values.iter().map(|(_, value)| *value);
        (values.clone().fold(f64::NAN, f64::min), values.fold(f64::NAN, f64::max))
    }

    /// The median of the ratios of the same passes: they ran next to each other, so what slowed
    /// the machine down for a while has slowed both. `None` if there is nothing to divide by.
    pub(crate) fn over(&self, other: &Self) -> Option<f64> {
        let of_pass = |wanted: usize| other.values.iter().find(|(pass, _)| *pass == wanted);
        let ratio = |(pass, value): &(usize, f64)| Some(value / of_pass(*pass)?.1);
        median(self.values.iter().filter_map(ratio)).filter(|ratio| ratio.is_finite())
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let (low, high) =
        (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_pass_by_pass() {
        let mut results = Results::default();
        for (pass, ours, theirs) in [(0, 1.0, 2.0), (1, 10.0, 20.0), (2, 4.0, 16.0)] {
            for (peer, value) in [(OURS, ours), ("moka", theirs)] {
                results.add(pass, peer, Sample::new("new", 1, Metric::CpuNs, value));
            }
        }
        let theirs = results.find("new", 1, "moka", Metric::CpuNs).unwrap();
        assert_eq!((theirs.median(), results.ratio_to_ours(theirs)), (16.0, Some(2.0)));
        assert_eq!(median([1.0, 4.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }
}
