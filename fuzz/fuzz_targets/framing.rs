//! Parts framed by their lengths: two lists of parts have the same fingerprint only if they are the
//! same, however the same bytes are cut, and so have identities (R1, R4, case 42).
//!
//! `.ci/fuzz 60 framing`
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use oncekey::{Claim, Fingerprint, Identity, Scheme, Store};

#[derive(Arbitrary, Debug)]
struct Input {
    bytes: Vec<u8>,
    /// Where the bytes are cut: twice, in two ways.
    cuts: [Vec<u8>; 2],
    /// The second list's own bytes, or none: then the same are cut in another way.
    others: Option<Vec<u8>>,
    schemes: [[u8; 8]; 2],
}

fn cut<'a>(bytes: &'a [u8], cuts: &[u8]) -> Vec<&'a [u8]> {
    let mut rest = bytes;
    let mut parts: Vec<_> = cuts
        .iter()
        .take(16)
        .map(|at| {
            let (part, more) = rest.split_at(usize::from(*at).min(rest.len()));
            rest = more;
            part
        })
        .collect();
    parts.push(rest);
    parts
}

fn fingerprint(scheme: Scheme, parts: &[&[u8]]) -> Fingerprint {
    parts.iter().fold(Fingerprint::builder(scheme), |made, part| made.part(part)).finish()
}

fuzz_target!(|input: Input| {
    let others = input.others.as_deref().unwrap_or(&input.bytes);
    let lists = [cut(&input.bytes, &input.cuts[0]), cut(others, &input.cuts[1])];
    let [a, b] = input.schemes.map(Scheme::from_id);
    for schemes in [[a, a], [a, b]] {
        let [one, two] = [0, 1].map(|n| fingerprint(schemes[n], &lists[n]));
        let same = schemes[0] == schemes[1] && lists[0] == lists[1];
        assert_eq!(one == two, same, "{lists:?}");
        assert_eq!(one.digest() == two.digest(), same, "{lists:?}");
    }

    let ids = lists.each_ref().map(|parts| match parts[..] {
        [account, endpoint, key, ..] => Identity::new(account, endpoint, key).ok(),
        _ => None,
    });
    let [Some(one), Some(two)] = ids else { return };
    let same = (one.account(), one.endpoint(), one.key())
        == (two.account(), two.endpoint(), two.key());
    assert_eq!(one == two, same);
    let store = Store::builder().sweep(oncekey::Sweep::Manual).build().expect("defaults");
    let print = fingerprint(a, &[]);
    let Ok(Claim::Won(_permit)) = store.claim(&one, print) else { panic!("the first is won") };
    let met = store.claim(&two, print);
    assert_eq!(matches!(met, Ok(Claim::InFlight(_))), same, "{lists:?} {met:?}");
});
