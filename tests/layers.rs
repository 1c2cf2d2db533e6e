//! The plan of the rooms, held against `src/`: who may import whom, and what only one room names.
//!
//! The floors below are the order of the house, the cellar first. It reads the text of the files
//! and needs no compiler: comments, strings and test modules are left out, `use` trees are
//! expanded, and every path that is left is looked at.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// From the cellar up. A room imports from lower floors only; rooms of one floor do not know each
/// other, but for the last one.
const FLOORS: &[&[&str]] = &[
    &["sync"],
    &["stats"],
    &["clock", "header", "fingerprint", "outcome", "reclaim"],
    &["identity", "error", "expire"],
    &["record", "intent"],
    &["waiters", "index"],
    &["capacity", "lane"],
    &["engine"],
    &["permit"],
    &["claim"],
    &["store"],
    // Memory that outlives the process: it may use what lies below, and has crates of its own.
    &["tier"],
    // The edges: they know only the front door; `axum` is another face of `http`.
    &["client", "http", "axum", "worker"],
];

/// Names that stand in these files of the core and in no other: what, where, why.
const ONLY: &[(&str, &[&str], &str)] = &[
    ("std::sync", &["sync.rs"], "a model checker takes its place there"),
    ("parking_lot", &["sync.rs"], "a model checker takes its place there"),
    ("Instant::now", &["clock.rs"], "everybody else takes the time as an argument"),
    ("dashmap", &[], "it is a peer to be compared with"),
    ("ahash", &["index/mod.rs", "capacity.rs", "waiters/mod.rs"], "hashes are keyed"),
    ("sfv", &["header/field.rs"], "one room reads fields"),
    ("sha2", &["fingerprint.rs"], "one room makes fingerprints"),
    (
        "fjall",
        &["tier/embedded/directory.rs", "tier/embedded/generations.rs", "tier/embedded/writer.rs"],
        "the embedded tier has its engine for itself",
    ),
    (
        "SystemTime",
        &["client/judge.rs", "clock.rs"],
        "the wall clock ends no record in memory (case 74); a client reads dates with it",
    ),
    ("thread::sleep", &[], "who waits, waits for an event"),
    (
        "unsafe",
        &[
            "index/mod.rs",
            "index/spill.rs",
            "index/table.rs",
            "record/cell.rs",
            "record/pages.rs",
            "record/slab.rs",
            "reclaim.rs",
        ],
        "three rooms have memory that threads hand to each other",
    ),
];

/// Crates of the edges, which the core does not name.
const EDGE_CRATES: &[&str] = &[
    "http",
    "http_body",
    "http_body_util",
    "tokio",
    "tower",
    "tower_layer",
    "tower_service",
    "axum",
    "axum_core",
    "hyper",
    "pin_project_lite",
];

struct File {
    /// From `src/` on, with `/`.
    path: String,
    text: String,
}

impl File {
    /// The room: `engine` for `engine/settle.rs`.
    fn room(&self) -> &str {
        self.path.split(['/', '.']).next().unwrap()
    }

    fn is_edge(&self) -> bool {
        FLOORS[FLOORS.len() - 1].contains(&self.room())
    }

    fn is_tier(&self) -> bool {
        self.room() == "tier"
    }

    /// It has no locks of the core's to be modelled, and may name crates that the core does not.
    fn is_outside(&self) -> bool {
        self.is_edge() || self.is_tier()
    }
}

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

/// What breaks the plan, a line for each.
fn faults(files: &[File]) -> BTreeSet<String> {
    let mut faults = BTreeSet::new();
    for file in files.iter().filter(|file| file.path != "lib.rs") {
        let (path, room) = (&file.path, file.room());
        let Some(own) = floor(room) else {
            faults.insert(format!("{path}: the room `{room}` stands on no floor"));
            continue;
        };
        let code = code_of(&file.text);
        for name in paths_of(&code) {
            let mut parts = name.split("::");
            let (first, second) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
            if first == "crate" && !second.is_empty() && second != room {
                let front_door = second.starts_with(char::is_uppercase);
                match floor(second) {
                    _ if file.is_outside() && front_door => {}
                    Some(_) if file.is_edge() && second == "tier" => {}
                    Some(other) if file.is_edge() && other == own => {}
                    Some(other) if !file.is_edge() && other < own => {}
                    _ => drop(faults.insert(format!("{path}: `{room}` imports `{name}`"))),
                }
            }
            // The root is named `crate`, so that it can be seen.
            let in_room = path.contains('/') && !path.ends_with("/mod.rs");
            if first == "super" && (!in_room || second == "super") {
                faults.insert(format!("{path}: `{name}` leaves the room"));
            }
            if !file.is_outside() && EDGE_CRATES.contains(&first) {
                faults.insert(format!("{path}: the core names `{name}`"));
            }
        }
        for (what, places, why) in ONLY {
            let anywhere = matches!(*what, "fjall" | "unsafe" | "SystemTime");
            if (anywhere || !file.is_outside())
                && !places.contains(&path.as_str())
                && names(&code, what)
            {
                faults.insert(format!("{path}: names `{what}`, but {why}"));
            }
        }
    }
    faults
}

/// Whether `code` has `what` as a path, a part of a path or a word.
fn names(code: &str, what: &str) -> bool {
    let framed = |path: &str| format!("::{path}::").contains(&format!("::{what}::"));
    paths_of(code).iter().any(|path| framed(path))
        || code.split(|c: char| !is_word(c)).any(|word| word == what)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The text without comments, strings and the test module, which stands last.
fn code_of(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or("");
    let mut code = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' => {
                let mut end = 1;
                while let Some(inside) = rest[end..].chars().next().filter(|c| *c != '"') {
                    end += inside.len_utf8() + usize::from(inside == '\\');
                }
                end + 1
            }
            // A character, not a lifetime.
            '\'' if rest.starts_with("'\\") => 2 + rest[2..].find('\'').unwrap_or(0) + 1,
            '\'' if rest.chars().nth(2) == Some('\'') => {
                rest.char_indices().nth(3).map_or(rest.len(), |(at, _)| at)
            }
            c => {
                code.push(c);
                c.len_utf8()
            }
        };
        rest = &rest[skipped.min(rest.len())..];
    }
    code
}

/// Every path in `code`: what `use` brings in, one by one, and what is written out.
fn paths_of(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for line in code.split(';') {
        // `use` begins a statement, but for its visibility and attributes.
        if let Some((before, tree)) = line.split_once("use ")
            && !before.ends_with(is_word)
        {
            expand("", tree, &mut paths);
        }
    }
    let written = code.split(|c: char| !is_word(c) && c != ':').filter(|it| it.contains("::"));
    paths.extend(written.map(|path| path.trim_matches(':').to_owned()));
    paths
}

fn expand(before: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((head, inner)) = tree.split_once('{') else {
        let name = tree.split_whitespace().next().unwrap_or("");
        paths.push(format!("{before}{name}"));
        return;
    };
    let before = format!("{before}{}", head.trim());
    let (mut depth, mut from) = (0, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                if !inner[from..at].trim().is_empty() {
                    expand(&before, &inner[from..at], paths);
                }
                from = at + 1;
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
}

fn source() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    let mut left: Vec<PathBuf> = vec![root.clone()];
    while let Some(next) = left.pop() {
        if next.is_dir() {
            left.extend(fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let inside = next.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        // A file of tests is a room's own business.
        if inside.ends_with(".rs") && !inside.ends_with("/tests.rs") {
            files.push(File { path: inside, text: fs::read_to_string(&next).unwrap() });
        }
    }
    files
}

#[test]
fn the_house_stands_as_planned() {
    let files = source();
    assert!(files.len() > 20, "read {} files", files.len());
    let found = faults(&files);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_room_has_a_floor_and_every_floor_has_its_rooms() {
    let rooms: BTreeSet<String> = source().iter().map(|file| file.room().to_owned()).collect();
    for room in FLOORS.concat() {
        assert!(rooms.contains(room), "`{room}` is planned and not built");
    }
    assert_eq!(rooms.len(), FLOORS.concat().len() + 1, "the front page has no floor");
}

/// The test itself can fail: each fault is seen, and what only looks like one is not.
#[test]
fn a_fault_in_the_house_is_seen() {
    for (path, text) in [
        ("record/mod.rs", "use crate::engine::Engine;"),
        ("record/mod.rs", "use crate::{clock::Millis, sync::{Arc, Mutex}, store::Store};"),
        ("waiters/mod.rs", "fn f() { crate::index::Index::new() }"),
        ("clock.rs", "use crate::Store;"),
        ("claim.rs", "use super::store::Store;"),
        ("engine/mod.rs", "use super::store::Store;"),
        ("engine/settle.rs", "use super::super::store::Store;"),
        ("http/owner.rs", "use crate::engine::Engine;"),
        ("cellar.rs", ""),
        ("store.rs", "use std::{fmt, sync::Arc};"),
        ("store.rs", "use std::sync::atomic::AtomicBool;"),
        ("expire.rs", "static LOCK: parking_lot::Mutex<()> = parking_lot::Mutex::new(());"),
        ("engine/mod.rs", "let now = std::time::Instant::now();"),
        ("engine/mod.rs", "use std::time::Instant; fn now() -> Instant { Instant::now() }"),
        ("http/owner.rs", "let now = std::time::SystemTime::now();"),
        ("tier/through.rs", "use fjall::Database;"),
        ("waiters/mod.rs", "use dashmap::{DashMap, Entry};"),
        ("engine/mod.rs", "unsafe { std::hint::unreachable_unchecked() }"),
        ("http/body.rs", "let at = unsafe { at.add(1) };"),
        ("claim.rs", "std::thread::sleep(limit);"),
        ("claim.rs", "use tokio::sync::Notify;"),
        ("outcome.rs", "pub fn status(&self) -> http::StatusCode {}"),
        ("store.rs", "pub use tower_service::Service;"),
        ("wheel/mod.rs", "#[cfg(test)]\nmod tests;\nuse crate::record::Record;"),
    ] {
        let seeded = [File { path: path.into(), text: text.into() }];
        assert!(!faults(&seeded).is_empty(), "not seen: {path}: {text}");
    }
    for (path, text) in [
        ("claim.rs", "use crate::{engine::{Answer, Engine}, sync::{Arc, Ordering}};"),
        ("claim.rs", "// use crate::store::Store; std::sync::Arc, unsafe\n"),
        ("claim.rs", "let it = \"crate::store::Store unsafe \\\" tokio::spawn\"; let c = '\"';"),
        ("claim.rs", "#[cfg(test)]\nmod tests { use crate::store::Store; }"),
        ("engine/settle.rs", "use super::Engine; use crate::engine::By;"),
        (
            "http/owner.rs",
            "use crate::{Claim, Permit}; use std::sync::Arc; let n = Instant::now();",
        ),
        ("sync.rs", "pub(crate) use std::sync::Arc; pub(crate) use parking_lot::Mutex;"),
        ("permit.rs", "let unsafe_code = 1; self.claim.engine.renew();"),
    ] {
        let innocent = [File { path: path.into(), text: text.into() }];
        let found = faults(&innocent);
        assert!(found.is_empty(), "{path}: {text}: {found:?}");
    }
}
