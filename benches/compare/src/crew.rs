//! Threads that start together, and what they cost together.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use crate::{
    meter,
    sample::{Metric, Sample},
};

/// How long a store is left alone afterwards, so that what it put off is paid for as well.
const SETTLE: Duration = Duration::from_millis(30);

/// What a crew has cost.
pub(crate) struct Cost {
    cpu: Duration,
    wall: Duration,
}

impl Cost {
    pub(crate) fn samples(&self, work: &str, threads: usize, operations: u64) -> [Sample; 2] {
        let each = |span: Duration| span.as_nanos() as f64 / operations as f64;
        [
            Sample::new(work, threads, Metric::CpuNs, each(self.cpu)),
            Sample::new(work, threads, Metric::WallNs, each(self.wall)),
        ]
    }
}

/// Runs `body` on `threads` threads, each with its number. Measures the cpu of the process from
/// when all are there, and the time from when the first begins until the last has ended, as they
/// see it: on few cores this thread may get to run much later.
pub(crate) fn run<T: Send>(threads: usize, body: impl Fn(usize) -> T + Sync) -> (Cost, Vec<T>) {
    let gate = Barrier::new(threads + 1);
    thread::scope(|scope| {
        let (gate, body) = (&gate, &body);
        let timed = |number| {
            move || {
                gate.wait();
                let start = Instant::now();
                let done = body(number);
                (done, start, Instant::now())
            }
        };
        let crew: Vec<_> = (0..threads).map(|number| scope.spawn(timed(number))).collect();
        let cpu = meter::process_cpu();
        gate.wait();
        let (mut all, mut first, mut last) = (Vec::new(), None, None);
        for thread in crew {
            let (done, start, end) = thread.join().expect("no panic");
            all.push(done);
            first = first.into_iter().chain([start]).min();
            last = last.max(Some(end));
        }
        let wall = last.zip(first).map_or(Duration::ZERO, |(last, first)| last - first);
        thread::sleep(SETTLE);
        (Cost { cpu: meter::process_cpu() - cpu, wall }, all)
    })
}
