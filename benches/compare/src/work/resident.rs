//! Memory of completed keys: what the process has more in memory than before, and what was asked of
//! the allocator.

use std::{thread, time::Duration};

use crate::{
    alloc,
    ask::{Answer, Ask},
    meter,
    peer::{Peer, Time},
    sample::{Metric, Sample},
};

use super::{leaked, run_once};

pub(super) fn pass<P: Peer>(quick: bool) -> Vec<Sample> {
    let steps: &[(u64, &str)] =
        if quick { &[(300_000, "300k")] } else { &[(1_000_000, "1M"), (10_000_000, "10M")] };
    alloc::count();
    let (resident, given) = (meter::resident(), alloc::given());
    let peer = leaked::<P>(Time::Real);
    let mut samples = Vec::new();
    let mut next = 0;
    for (keys, name) in steps {
        (next..*keys).for_each(|n| run_once(peer, &Ask::numbered(n), Answer::empty()));
        next = *keys;
        // For what is given back late.
        thread::sleep(Duration::from_millis(100));
        let more = meter::resident().saturating_sub(resident) as f64;
        let asked = (alloc::given() - given) as f64;
        let each = |name: String, bytes: f64| {
            Sample::new(&name, 1, Metric::BytesPerKey, bytes / *keys as f64)
        };
        samples.push(each(format!("resident {name}"), more));
        samples.push(each(format!("heap {name}"), asked));
    }
    samples
}
