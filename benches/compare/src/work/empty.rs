//! Memory of a store without keys: a service may have many.

use std::{thread, time::Duration};

use crate::{
    alloc, meter,
    peer::{Peer, Time},
    sample::{Metric, Sample},
};

use super::leaked;

/// Of so many the mean is taken: pages are coarse.
const STORES: usize = 16;

pub(super) fn pass<P: Peer>() -> Vec<Sample> {
    alloc::count();
    // The first one also loads code and starts what all stores share.
    leaked::<P>(Time::Real);
    thread::sleep(Duration::from_millis(20));
    let (resident, given) = (meter::resident(), alloc::given());
    for _ in 0..STORES {
        leaked::<P>(Time::Real);
    }
    thread::sleep(Duration::from_millis(20));
    let more = meter::resident().saturating_sub(resident) as f64;
    let asked = (alloc::given() - given) as f64;
    let each = |name, bytes| Sample::new(name, 1, Metric::Bytes, bytes / STORES as f64);
    vec![each("empty resident", more), each("empty heap", asked)]
}
