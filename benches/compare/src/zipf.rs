//! Numbers of which a few are drawn very often.

use crate::ask::mix;

/// Draws `0..n`; the one of rank `r` has the weight `1 / (r + 1)^exponent`.
pub(crate) struct Zipf {
    /// Sums of the weights. A table, because it is exact and drawing is not measured.
    sums: Vec<f64>,
    /// Spreads ranks over the numbers: records that are asked for often must not lie together.
    stride: u64,
}

impl Zipf {
    pub(crate) fn new(n: u64, exponent: f64) -> Self {
        let weights = (1..=n).map(|rank| (rank as f64).powf(-exponent));
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        // Nearly the golden section, and prime to n.
        let golden = (n as f64 * 0.618) as u64;
        let stride = (golden.max(1)..).find(|stride| gcd(*stride, n) == 1).unwrap_or(1);
        Self { sums: sums.collect(), stride }
    }

    /// The draw that goes with this seed.
    pub(crate) fn draw(&self, seed: u64) -> u64 {
        let n = self.sums.len() as u64;
        let part = (mix(seed) >> 11) as f64 / (1_u64 << 53) as f64;
        let wanted = part * self.sums.last().copied().unwrap_or(0.0);
        let rank = self.sums.partition_point(|sum| *sum <= wanted) as u64;
        rank.min(n - 1) * self.stride % n
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_are_as_frequent_as_they_should_be() {
        let zipf = Zipf::new(1_000, 0.99);
        let mut drawn = vec![0_u32; 1_000];
        (0..100_000).for_each(|seed| drawn[zipf.draw(seed) as usize] += 1);
        drawn.sort_unstable_by(|a, b| b.cmp(a));
        // 1 / sum of 1 / r^0.99 for r in 1..=1000.
        let first = f64::from(drawn[0]) / 100_000.0;
        assert!((0.124..0.134).contains(&first), "{first}");
        assert!(drawn.iter().filter(|times| **times > 0).count() > 990);
    }
}
