//! How long single operations take.
//!
//! Each operation is timed by itself, which costs two readings of the clock; so these passes say
//! nothing about cpu, and the passes that measure cpu time nothing. The time in which a thread had
//! no core is subtracted, because it says more about the machine than about a store, and so is that
//! in which a virtual machine's host had a core for others. Waiting for another thread's lock is not:
//! that is the store's doing.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::{
    meter::{Interruption, Preemption, Steal},
    sample::{Metric, Sample},
};

/// Shorter operations are not asked whether they were interrupted: a thread that loses its core
/// loses it for longer.
const SLOW: Duration = Duration::from_micros(20);

/// Shorter operations are not asked whether the host had stopped the machine.
const LONG: Duration = Duration::from_micros(500);

/// What the host has done is read as often, so that what is subtracted from an operation was hardly
/// before it. It is told in steps twice as long.
const FRESH: Duration = Duration::from_millis(5);

/// How many operations there are between two looks at most.
const CHUNK: u32 = 256;

/// The times of one thread's operations.
pub(crate) struct Stopwatch {
    preemption: Preemption,
    steal: Steal,
    until_look: u32,
}

/// The times of one kind of operation.
pub(crate) struct Times {
    histogram: Histogram<u64>,
    longest: Duration,
    preempted: u64,
}

impl Stopwatch {
    /// For the calling thread.
    pub(crate) fn new() -> Self {
        let preemption = Preemption::of_this_thread();
        Self { preemption, steal: Steal::new(), until_look: CHUNK }
    }

    /// To be called between two operations.
    pub(crate) fn between(&mut self) {
        self.until_look -= 1;
        if self.until_look == 0 {
            self.preemption.look();
            self.until_look = CHUNK;
        }
    }

    /// Takes down an operation that has lasted from `start` until `end`.
    pub(crate) fn note(&mut self, times: &mut Times, start: Instant, end: Instant) {
        let whole = end - start;
        let stolen = if whole >= LONG || end - self.steal.read() >= FRESH {
            self.steal.look(end)
        } else {
            Duration::ZERO
        };
        let mut lasted = whole;
        if lasted < SLOW {
            times.record(lasted);
            times.longest = times.longest.max(lasted);
            return;
        }
        // Since the last look, which may be a few operations ago: they would have been slow, had
        // they been interrupted, and looked.
        let interruption = self.preemption.look();
        self.until_look = CHUNK;
        times.preempted += u64::from(interruption.preempted);
        let stolen = if whole >= LONG { stolen } else { Duration::ZERO };
        lasted = without(whole, interruption, stolen);
        times.record(lasted);
        // How long it would have lasted is not known then.
        if !(interruption.preempted && interruption.waited.is_none()) {
            times.longest = times.longest.max(lasted);
        }
    }
}

impl Times {
    pub(crate) fn new() -> Self {
        // Up to 100 s, to within 1 %.
        let histogram = Histogram::new_with_bounds(1, 100_000_000_000, 2).expect("valid bounds");
        Self { histogram, longest: Duration::ZERO, preempted: 0 }
    }

    /// Takes down what has lasted as long on other threads too, so that no time without a core is
    /// subtracted.
    pub(crate) fn note_whole(&mut self, lasted: Duration) {
        self.record(lasted);
        self.longest = self.longest.max(lasted);
    }

    fn record(&mut self, lasted: Duration) {
        self.histogram.saturating_record(lasted.as_nanos() as u64);
    }

    pub(crate) fn add(&mut self, others: &Self) {
        self.histogram.add(&others.histogram).expect("the same bounds");
        self.longest = self.longest.max(others.longest);
        self.preempted += others.preempted;
    }

    pub(crate) fn all<'a>(each: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::new();
        each.into_iter().for_each(|times| all.add(times));
        all
    }

    pub(crate) fn samples(&self, work: &str, threads: usize) -> Vec<Sample> {
        let quantile = |metric, quantile| {
            let value = self.histogram.value_at_quantile(quantile) as f64;
            Sample::new(work, threads, metric, value)
        };
        vec![
            quantile(Metric::P50, 0.5),
            quantile(Metric::P90, 0.9),
            quantile(Metric::P99, 0.99),
            quantile(Metric::P999, 0.999),
            quantile(Metric::P9999, 0.9999),
            quantile(Metric::P99999, 0.99999),
            Sample::new(work, threads, Metric::MaxNs, self.longest.as_nanos() as f64),
            Sample::new(work, threads, Metric::Preempted, self.preempted as f64),
        ]
    }
}

/// What is left of an operation for the store to answer for. If the thread never slept, that is no more
/// than it ran, which is told exactly. Else a thread that waits for a core while the machine is stopped
/// waits for both, and the time is not to be subtracted twice; where they came one after the other, the
/// shorter one stays the store's.
fn without(whole: Duration, interruption: Interruption, stolen: Duration) -> Duration {
    let Interruption { waited, ran, .. } = interruption;
    let left = whole.saturating_sub(stolen.max(waited.unwrap_or_default()));
    ran.map_or(left, |ran| left.min(ran))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_subtracted_twice_nor_more_than_there_is() {
        let ms = Duration::from_millis;
        let left = |whole, waited, stolen| {
            let interruption =
                Interruption { preempted: true, waited: Some(ms(waited)), ran: None };
            without(ms(whole), interruption, ms(stolen))
        };
        assert_eq!(left(42, 0, 40), ms(2));
        assert_eq!(left(42, 30, 40), ms(2));
        assert_eq!(left(42, 30, 10), ms(12));
        assert_eq!(left(7, 0, 10), ms(0));
        // It has waited for nothing but a core, and was stopped for 15 ms of which 10 are told.
        let ran = Interruption { preempted: true, waited: Some(ms(2)), ran: Some(ms(3)) };
        assert_eq!(without(ms(20), ran, ms(10)), ms(3));
        assert_eq!(without(ms(2), ran, ms(0)), ms(0));
    }

    #[test]
    fn the_longest_is_kept_to_the_nanosecond_and_quantiles_within_a_percent() {
        let (mut watch, mut times) = (Stopwatch::new(), Times::new());
        let start = Instant::now();
        for micros in 1..=1_000 {
            watch.between();
            watch.note(&mut times, start, start + Duration::from_nanos(micros));
        }
        assert_eq!(times.longest, Duration::from_nanos(1_000));
        let samples = Times::all([&times]).samples("w", 1);
        assert!((490.0..=510.0).contains(&samples[0].value), "{samples:?}");
    }
}
