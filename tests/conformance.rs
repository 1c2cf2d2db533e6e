//! `docs/http.md` held against the tests: each row of its tables names tests that exist and that talk
//! over sockets, and the cases that it says run through nginx do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Test programs whose tests open sockets.
const OVER_SOCKETS: [&str; 2] = ["tests/http_rules", "tests/http_cases"];
/// Sections of the draft that say something to a resource or to its clients.
const SECTIONS: [&str; 9] = ["2.1", "2.2", "2.3", "2.4", "2.5.1", "2.5.2", "2.6", "2.7", "5"];
const LEVELS: [&str; 8] =
    ["MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "RECOMMENDED", "MAY", "advice", "-"];

struct Row {
    section: String,
    level: String,
    tests: Vec<String>,
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The rows of the tables whose last column is `test`.
fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut is_table = false;
    for line in text.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        match cells.as_slice() {
            ["", "section", .., "test", ""] => is_table = true,
            ["", section, level, _, _, tests, ""] if is_table => {
                if !section.starts_with("---") {
                    let tests = tests.split('`').skip(1).step_by(2).map(str::to_owned).collect();
                    rows.push(Row {
                        section: (*section).to_owned(),
                        level: (*level).to_owned(),
                        tests,
                    });
                }
            }
            _ if is_table && line.starts_with('|') => panic!("no row of five cells: {line}"),
            _ => is_table = false,
        }
    }
    rows
}

/// The text of all files below `directory`.
fn sources(directory: &str) -> String {
    let mut left = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(directory)];
    let mut text = String::new();
    while let Some(next) = left.pop() {
        if next.is_dir() {
            left.extend(fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()));
        } else if next.extension().is_some_and(|kind| kind == "rs") {
            text.push_str(&fs::read_to_string(next).unwrap());
        }
    }
    text
}

/// The tests that talk over sockets: async functions that are tests themselves, or that a macro
/// makes tests of.
fn tests_of(text: &str) -> BTreeSet<String> {
    let mut tests = lists(text, "over_both!");
    tests.extend(through_nginx(text));
    let mut is_test = false;
    for line in text.lines() {
        if line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(name) = line.strip_prefix("async fn ").filter(|_| is_test) {
            tests.insert(name.split('(').next().unwrap().to_owned());
            is_test = false;
        }
    }
    tests
}

fn through_nginx(text: &str) -> BTreeSet<String> {
    let mut names = lists(text, "over_all!");
    names.extend(lists(text, "through_hasty_nginx!"));
    names
}

/// The names that a macro is called with.
fn lists(text: &str, name: &str) -> BTreeSet<String> {
    let start = format!("\n{name} {{\n");
    text.split(start.as_str())
        .skip(1)
        .filter_map(|rest| rest.split("\n}").next())
        .flat_map(|list| list.lines().map(|line| line.trim().trim_end_matches(',').to_owned()))
        .collect()
}

fn faults(rows: &[Row], tests: &BTreeSet<String>) -> Vec<String> {
    let mut faults = Vec::new();
    for Row { section, level, tests: named } in rows {
        if !LEVELS.contains(&level.as_str()) {
            faults.push(format!("{section}: no level: {level}"));
        }
        if named.is_empty() {
            faults.push(format!("{section}, {level}: names no test"));
        }
        for name in named.iter().filter(|name| !tests.contains(*name)) {
            faults.push(format!("{section}, {level}: no test over sockets: {name}"));
        }
    }
    faults
}

#[test]
fn each_row_of_the_conformance_tables_names_a_test_over_sockets() {
    let (rows, tests) = (rows(&read("docs/http.md")), OVER_SOCKETS.map(sources).concat());
    let found = faults(&rows, &tests_of(&tests));
    assert!(found.is_empty(), "{found:#?}");
    assert!(rows.len() > 60, "read {} rows", rows.len());
    for section in SECTIONS {
        assert!(rows.iter().any(|row| row.section == section), "nothing of section {section}");
    }
}

#[test]
fn the_cases_that_are_said_to_run_through_nginx_do() {
    let text = read("docs/http.md");
    let (_, said) = text.split_once("\nCases 40").unwrap();
    let (said, _) = said.split_once("also run through nginx").unwrap();
    let numbers = said.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
    let run = through_nginx(&sources("tests/http_cases"));
    let mut count = 0;
    for number in ["40"].into_iter().chain(numbers) {
        let case = format!("case_{number:0>3}_");
        assert!(run.iter().any(|name| name.starts_with(&case)), "case {number}");
        count += 1;
    }
    assert_eq!(count, 16);
}

/// The test itself can fail.
#[test]
fn a_row_without_a_test_is_seen() {
    let tests = tests_of(
        "\nover_all! {\n    one,\n}\n#[tokio::test]\nasync fn two() {}\nasync fn helper() {}\n\
         #[test]\nfn three() {}\n",
    );
    assert_eq!(tests.iter().collect::<Vec<_>>(), ["one", "two"]);
    let table = |row: &str| {
        format!(
            "| section | level | statement | what | test |\n|---|---|---|---|---|\n{row}\n\ntext\n"
        )
    };
    let found = |row: &str| faults(&rows(&table(row)), &tests).len();
    assert_eq!(found("| 1 | MUST | a | b | `one`, `two` |"), 0);
    for row in [
        "| 1 | MUST | a | b | |",
        "| 1 | MUST | a | b | `three` |",
        "| 1 | MUST | a | b | `one`, `helper` |",
        "| 1 | MIGHT | a | b | `one` |",
    ] {
        assert_eq!(found(row), 1, "{row}");
    }
}
