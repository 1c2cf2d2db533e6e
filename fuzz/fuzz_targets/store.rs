//! All verbs of a store on few identities, against the model that the property test uses: every
//! answer, gauge and counter is the model's.
//!
//! ```text
//! input -> four bytes of settings, then a step for each three
//! ```
//!
//! `.ci/fuzz 60 store`
#![no_main]

#[path = "../../tests/common/model.rs"]
mod model;
#[path = "../../tests/common/pair.rs"]
mod pair;

use libfuzzer_sys::fuzz_target;

use crate::pair::{Op, Pair, rules};

fuzz_target!(|input: &[u8]| {
    let Some((settings, steps)) = input.split_first_chunk() else { return };
    let mut pair = Pair::new(rules(*settings));
    for step in steps.as_chunks().0 {
        pair.step(Op::of(*step));
    }
    pair.end();
});
