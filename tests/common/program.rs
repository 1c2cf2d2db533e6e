//! The examples as programs, built beside the test.
//!
//! `cargo test` and `cargo nextest run` build the examples of the package first; with `--test NAME`
//! alone nobody does: a program that is missing, or older than what it is made of, is a failure that
//! says so.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// `target/PROFILE/examples/NAME`; the test is `target/PROFILE/deps/TEST-HASH`.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    let build = "cargo build --examples --all-features";
    assert!(program.is_file(), "{} is missing: {build}", program.display());
    if let Some(source) = newer(&program) {
        panic!("{} is older than {source}: {build}", program.display());
    }
    program
}

/// A source that was changed after the program was built, by the list that cargo has written beside it.
fn newer(program: &Path) -> Option<String> {
    let list = fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let (_, sources) = list.split_once(": ")?;
    let built = changed(program)?;
    let sources = sources.replace("\\ ", "\0");
    let mut sources = sources.split_whitespace().map(|source| source.replace('\0', " "));
    sources.find(|source| changed(Path::new(source)).is_some_and(|changed| changed > built))
}

fn changed(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|file| file.modified()).ok()
}
