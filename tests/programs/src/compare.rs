// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The outcomes that came of the C module beside those of ours.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use ktap::{Outcome, ResultExt};

use crate::report::ABOUT;

/// Lines of a difference that are shown.
const SHOWN: usize = 40;

/// What a check left: its file is made by [`Report`](crate::report::Report).
struct Left {
    name: String,
    program: String,
    lines: Vec<String>,
}

fn read(folder: &Path) -> Outcome<BTreeMap<String, Left>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).what(folder.display())? {
        let entry = entry?;
        let text = String::from_utf8_lossy(&fs::read(entry.path())?).into_owned();
        let mut lines = text.lines().map(str::to_owned);
        let (Some(name), Some(program)) = (lines.next(), lines.next()) else {
            return Err(format!("{}: no outcome", entry.path().display()).into());
        };
        let left = Left {
            name,
            program,
            lines: lines.collect(),
        };
        all.insert(entry.file_name().to_string_lossy().into_owned(), left);
    }
    Ok(all)
}

// Whether two lines say the same, or two figures that are near enough.
fn same(a: &str, b: &str) -> bool {
    a == b || near(a, b) == Some(true)
}

fn near(a: &str, b: &str) -> Option<bool> {
    let parts = |line: &str| -> Option<(String, u64, u64)> {
        let (name, rest) = line.split_once(ABOUT)?;
        let (percent, value) = rest.split_once(" %): ")?;
        Some((name.to_owned(), percent.parse().ok()?, value.parse().ok()?))
    };
    let (a, b) = (parts(a)?, parts(b)?);
    Some(a.0 == b.0 && a.2.abs_diff(b.2) * 100 <= a.1 * a.2.max(b.2))
}

// The lines that differ, as a person wants to see them; none if all are the same.
fn difference(c: &[String], rust: &[String]) -> Option<String> {
    if c.len() == rust.len() && c.iter().zip(rust).all(|(c, rust)| same(c, rust)) {
        return None;
    }
    let start = c
        .iter()
        .zip(rust)
        .take_while(|(c, rust)| same(c, rust))
        .count();
    let end = c[start..]
        .iter()
        .rev()
        .zip(rust[start..].iter().rev())
        .take_while(|(c, rust)| same(c, rust))
        .count();
    let mut text = String::new();
    let sides = [
        ("-", &c[start..c.len() - end]),
        ("+", &rust[start..rust.len() - end]),
    ];
    for (mark, lines) in sides {
        for line in lines.iter().take(SHOWN) {
            let _ = writeln!(text, "  # {mark} {line}");
        }
        if lines.len() > SHOWN {
            let _ = writeln!(text, "  # {mark} ({} lines in all)", lines.len());
        }
    }
    Some(text)
}

/// Prints, as KTAP, a check for each pair of outcomes (lines with "-" are C's, with "+" ours), and one for
/// the table of the documentation; returns the number of failures.
///
/// # Errors
///
/// If the outcomes cannot be read, or there are none.
pub fn compare(c: &Path, rust: &Path, table: Option<&Path>) -> Outcome<usize> {
    let (c, rust) = (read(c)?, read(rust)?);
    let keys: BTreeSet<_> = c.keys().chain(rust.keys()).collect();
    if keys.is_empty() {
        return Err("there are no outcomes".into());
    }
    println!("1..{}", keys.len() + usize::from(table.is_some()));
    let mut failed = 0;
    let mut tell = |number: usize, ok: bool, name: &str| {
        println!("  {}ok {number} {name}", if ok { "" } else { "not " });
        failed += usize::from(!ok);
    };
    for (number, key) in (1..).zip(&keys) {
        let name = c.get(*key).or(rust.get(*key)).map_or("", |left| &left.name);
        let name = format!("{key}: {name}");
        match (c.get(*key), rust.get(*key)) {
            (Some(c), Some(rust)) => match difference(&c.lines, &rust.lines) {
                None => tell(number, true, &name),
                Some(text) => {
                    print!("{text}");
                    tell(number, false, &name);
                }
            },
            (c, _) => {
                let which = if c.is_some() {
                    "C module"
                } else {
                    "module in Rust"
                };
                tell(
                    number,
                    false,
                    &format!("{name} # only the {which} has an outcome"),
                );
            }
        }
    }
    if let Some(table) = table {
        // The fabric itself is no program of the field.
        let ran: BTreeSet<_> = c
            .values()
            .map(|left| left.program.clone())
            .filter(|program| program != "fabric")
            .collect();
        let rows = rows(&fs::read_to_string(table).what(table.display())?);
        let what = "each program has its row in the documentation, and no other";
        let (missing, other): (Vec<_>, Vec<_>) = (
            ran.difference(&rows).collect(),
            rows.difference(&ran).collect(),
        );
        let ok = missing.is_empty() && other.is_empty();
        if !ok {
            println!("  # no row: {missing:?}; did not run: {other:?}");
        }
        tell(keys.len() + 1, ok, what);
    }
    Ok(failed)
}

// The programs that have a row: those whose name, a word, begins one as a literal.
fn rows(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("``"))
        .filter_map(|line| line.split_once("``"))
        .map(|(name, _)| name.to_owned())
        .filter(|name| !name.contains(' '))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn differences() {
        assert!(difference(&lines("a\nb"), &lines("a\nb")).is_none());
        let text = difference(&lines("a\nb\nc"), &lines("a\nx\ny\nc"));
        assert_eq!(text.as_deref(), Some("  # - b\n  # + x\n  # + y\n"));
        assert!(difference(&lines("a"), &lines("a\nb")).is_some());
    }

    #[test]
    fn figures_may_be_near() {
        let about = |n: u64| {
            let mut seen = crate::report::Seen::default();
            seen.about("SMPs", n, 2);
            seen.lines().trim().to_owned()
        };
        assert!(same(&about(1000), &about(1019)));
        assert!(!same(&about(1000), &about(1030)));
        assert!(!same("SMPs: 1000", "SMPs: 1001"));
    }

    #[test]
    fn rows_of_a_table() {
        let found =
            rows("====\n``make test`` runs\n``ibstat``  yes\ntext ``no``\n``opensm``   yes\n");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["ibstat", "opensm"]);
    }
}
