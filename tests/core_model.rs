//! Long random sequences of all verbs on few identities, with time that passes, small limits and
//! several retentions, against a model written from the rules.
//!
//! Properties: each answer is the model's, with its age and the time that remains; after each step
//! all gauges and counters are the model's; tokens of an identity grow; when all have left and all
//! time has passed nothing is left.
//!
//! One thread: what interleavings do is left to the models of the engine and to
//! `core_histories.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/model.rs"]
mod model;
#[path = "common/pair.rs"]
mod pair;

use proptest::{prelude::*, test_runner::FileFailurePersistence};

use crate::pair::{Op, Pair, rules};

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: std::env::var("PROPTEST_CASES").map_or(400, |cases| cases.parse().unwrap()),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/core_model.txt",
        ))),
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_answer_and_every_gauge_is_the_models(
        rules in any::<[u8; 4]>().prop_map(rules),
        ops in prop::collection::vec(any::<[u8; 3]>().prop_map(Op::of), 1..400),
    ) {
        let mut pair = Pair::new(rules);
        for op in ops {
            pair.step(op);
        }
        pair.end();
    }
}
