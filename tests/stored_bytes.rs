//! Bytes that released versions have stored, and what they must decode to: kept in `tests/data`, a
//! directory for each format, and never changed. A new format gets a new directory beside them.
#![cfg(feature = "tier")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use oncekey::{DecodeError, Outcome};

/// Format 1: the file, and the outcome that was stored.
fn outcomes() -> [(&'static [u8], Outcome); 4] {
    let lines = Outcome::new(201)
        .header("location", "/charges/1")
        .header("set-cookie", "a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT")
        .header("x", b"\xff\xfe")
        .header("x", "")
        .body("{\"id\":\"ch_1\"}");
    [
        (include_bytes!("data/outcome-1/empty"), Outcome::new(204)),
        (include_bytes!("data/outcome-1/body"), Outcome::new(65_535).body(vec![0; 300])),
        (include_bytes!("data/outcome-1/line"), Outcome::new(303).header("location", "/done")),
        (include_bytes!("data/outcome-1/lines"), lines),
    ]
}

#[test]
fn r16_outcomes_of_format_1_still_decode_and_are_still_written_so() {
    for (stored, outcome) in outcomes() {
        assert_eq!(Outcome::from_bytes(stored), Ok(outcome.clone()));
        assert_eq!(outcome.to_bytes(), stored);
    }
}

#[test]
fn r16_what_is_cut_off_or_flipped_is_never_what_was_stored() {
    for (stored, outcome) in outcomes() {
        for end in 0..stored.len() {
            assert_ne!(Outcome::from_bytes(&stored[..end]).as_ref(), Ok(&outcome), "cut at {end}");
        }
        for bit in 0..stored.len() * 8 {
            let mut flipped = stored.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Outcome::from_bytes(&flipped).as_ref(), Ok(&outcome), "bit {bit}");
        }
    }
}

#[test]
fn t7_a_newer_format_is_named_and_not_guessed_at() {
    for (stored, _) in outcomes() {
        let mut newer = stored.to_vec();
        newer[0] = 2;
        assert_eq!(Outcome::from_bytes(&newer), Err(DecodeError::Version(2)));
    }
}
