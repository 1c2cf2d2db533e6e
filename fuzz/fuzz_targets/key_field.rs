//! The `Idempotency-Key` field: any bytes are a key or an error, and a key survives being sent (R6).
//!
//! `cargo +nightly fuzz run key_field -- -max_total_time=30`
#![no_main]

use libfuzzer_sys::fuzz_target;
use oncekey::{Key, KeyForm};

fuzz_target!(|value: &[u8]| {
    let Ok(key) = Key::parse(value, KeyForm::Any) else {
        assert!(Key::parse(value, KeyForm::Strict).is_err(), "strict takes what the other refuses");
        return;
    };
    assert!((1..=255).contains(&key.as_str().len()));
    let sent = key.to_field_value();
    assert!(Key::parse(sent.as_bytes(), KeyForm::Strict).is_ok_and(|again| again == key));
});
