//! Stored bytes of outcomes: any bytes are an outcome or an error, and an outcome's own bytes, cut off
//! anywhere or with a bit flipped, never come back as it (R16, T7).
//!
//! What the format cannot see is a flip that makes another outcome of it: it has no sum of its own,
//! that is the tiers' business. But the flip is never taken for what was stored.
//!
//! `.ci/fuzz 60 outcome`
#![no_main]

use libfuzzer_sys::fuzz_target;
use oncekey::Outcome;

/// Decodes, and holds what comes of it against its own bytes.
fn read(bytes: &[u8]) -> Option<Outcome> {
    let outcome = Outcome::from_bytes(bytes).ok()?;
    // One form for each outcome, and all of it is walked.
    assert_eq!(outcome.to_bytes(), bytes, "other bytes for the same outcome");
    let lines: usize = outcome.header_lines().map(|(name, value)| 6 + name.len() + value.len()).sum();
    assert_eq!(7 + lines + outcome.bytes().len(), bytes.len(), "bytes that belong to nothing");
    Some(outcome)
}

/// An outcome of which the input says how its parts are cut.
fn make(input: &[u8]) -> Outcome {
    let [a, b, rest @ ..] = input else { return Outcome::new(200) };
    let mut outcome = Outcome::new(u16::from_be_bytes([*a, *b]));
    let mut rest = rest;
    while let [name, value, more @ ..] = rest {
        if *name > 16 || more.len() < usize::from(*name) + usize::from(*value) {
            break;
        }
        let (name, more) = more.split_at(usize::from(*name));
        let (value, more) = more.split_at(usize::from(*value));
        outcome = outcome.header(name, value);
        rest = more;
    }
    outcome.body(rest.to_vec())
}

fuzz_target!(|input: &[u8]| {
    read(input);
    let outcome = make(input);
    let bytes = outcome.to_bytes();
    assert_eq!(read(&bytes).as_ref(), Some(&outcome));
    for end in 0..bytes.len() {
        assert_ne!(read(&bytes[..end]).as_ref(), Some(&outcome), "cut off at {end}");
    }
    let mut flipped = bytes;
    for bit in 0..flipped.len() * 8 {
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(read(&flipped).as_ref(), Some(&outcome), "bit {bit} is flipped");
        flipped[bit / 8] ^= 1 << (bit % 8);
    }
});
