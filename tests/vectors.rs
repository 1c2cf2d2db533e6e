//! Values that never change: keys that were stored, or sent to other services, outlive the build
//! that made them, and programs in other languages make the same ones (`tests/vectors.mjs`).
#![cfg(not(any(oncekey_loom, oncekey_core)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use std::{path::Path, process::Command};

use oncekey::{Fingerprint, Identity, IntentKey, Scheme};
use serde_json::Value;

const VECTORS: &str = include_str!("vectors.json");

/// A part: its text, `{"hex": ..}` or `{"repeat": [text, times]}`.
fn bytes(part: &Value) -> Vec<u8> {
    if let Some(text) = part.as_str() {
        return text.into();
    }
    if let Some(hex) = part["hex"].as_str() {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        return (0..hex.len()).step_by(2).map(byte).collect();
    }
    let text = part["repeat"][0].as_str().unwrap();
    text.repeat(part["repeat"][1].as_u64().unwrap() as usize).into()
}

fn list(parts: &Value) -> Vec<Vec<u8>> {
    parts.as_array().unwrap().iter().map(bytes).collect()
}

fn vectors(of: &str) -> Vec<Value> {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let vectors = vectors[of].as_array().unwrap().clone();
    assert!(vectors.len() >= 10);
    vectors
}

#[test]
fn r04_fingerprints_are_as_they_were() {
    for vector in vectors("fingerprints") {
        let scheme = vector["scheme"].as_str().unwrap();
        let parts = list(&vector["parts"]);
        let mut builder = Fingerprint::builder(Scheme::named(scheme));
        for part in &parts {
            builder = builder.part(part);
        }
        let print = builder.finish();
        let hex: String = print.digest().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, vector["digest"].as_str().unwrap(), "{vector}");
        if scheme == "request-1" && parts.len() == 3 {
            let text = |part: &[u8]| String::from_utf8(part.to_vec()).unwrap();
            let (method, path) = (text(&parts[0]), text(&parts[1]));
            assert_eq!(print, Fingerprint::request(&method, &path, &parts[2]), "{vector}");
        }
    }
}

#[test]
fn derived_keys_are_as_they_were() {
    for vector in vectors("keys") {
        let (from, parts) = (list(&vector["from"]), list(&vector["parts"]));
        let (name, parts) = parts.split_first().unwrap();
        let key = match (vector["scheme"].as_str().unwrap(), &from[..]) {
            ("key-derived-1", []) => IntentKey::derived(name, parts),
            ("key-downstream-1", [own]) => {
                let own: IntentKey = String::from_utf8(own.clone()).unwrap().parse().unwrap();
                own.downstream(name, parts)
            }
            ("key-identity-1", [account, endpoint, key]) => {
                Identity::new(account, endpoint, key).unwrap().downstream(name, parts)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(key.as_str(), vector["key"].as_str().unwrap(), "{vector}");
    }
}

#[test]
fn another_language_makes_the_same_values() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors.mjs");
    let file = script.with_file_name("vectors.json");
    let Ok(output) = Command::new("node").arg(script).arg(file).output() else {
        assert!(std::env::var_os("CI").is_none(), "CI is set and there is no node to run");
        eprintln!("skipped: no node, such as Debian's package nodejs");
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (prints, keys) = (vectors("fingerprints").len(), vectors("keys").len());
    assert!(said.contains(&format!("{prints} fingerprints, {keys} keys")), "{said}");
}
