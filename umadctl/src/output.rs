// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What is printed: for people, or as JSON for programs.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::time::Duration;

use serde::Serialize;

use crate::failure::{Context, Failure, Outcome};

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Prints a text as it is; it comes from here, and names in it went through [`shown`].
pub fn print(text: impl fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    let done = write!(out, "{text}").and_then(|()| out.flush());
    match done {
        // Who reads has seen enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Failure {
            code: 0,
            ..Failure::new("")
        }),
        done => done.what("standard output"),
    }
}

/// Says something beside the output; it comes from here, too.
pub fn note(text: impl fmt::Display) {
    // There is nowhere to say that this failed.
    let _ = writeln!(io::stderr(), "umadctl: {text}");
}

/// Prints a value as one line of JSON.
pub fn print_json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string(value).what("JSON")?;
    print(format_args!("{}\n", ascii(&text)))
}

/// JSON in ASCII: in it, other characters stand in strings only. So nothing in a name can make a terminal
/// do something, whatever it takes for a control character.
fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if matches!(c, ' '..='~') {
            text.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a String does not fail.
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
    }
    text
}

/// A name of somebody else's, for the terminal: what is not printable is escaped, and what only seems to be
/// nothing (bidirectional marks, spaces of no width), too.
pub fn shown(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '\'' | '"' => text.push(c),
            c => text.extend(c.escape_debug()),
        }
    }
    text
}

/// Bytes of somebody else's as a string; what is no UTF-8 becomes U+FFFD.
pub fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Columns that are as wide as they have to be.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these heads.
    pub fn new(heads: &[&str]) -> Self {
        Self {
            rows: vec![heads.iter().map(|&head| head.to_owned()).collect()],
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                write!(line, "{cell:width$}  ")?;
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A time as a person would write it.
pub fn human(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    if us < 1e3 {
        format!("{us:.0} us")
    } else if us < 1e6 {
        format!("{:.2} ms", us / 1e3)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

/// Least, mean and most of some times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// The shortest, in microseconds.
    pub min_us: f64,
    /// The mean.
    pub avg_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Times {
    /// Of these times; `None` if there is none.
    pub fn of(times: &[Duration]) -> Option<Self> {
        let (min, max) = (times.iter().min()?, times.iter().max()?);
        let count = u32::try_from(times.len()).ok()?;
        let us = |time: Duration| (time.as_secs_f64() * 1e7).round() / 10.0;
        Some(Self {
            min_us: us(*min),
            avg_us: us(times.iter().sum::<Duration>() / count),
            max_us: us(*max),
        })
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let human = |us: f64| human(Duration::from_secs_f64(us / 1e6));
        let (min, avg, max) = (human(self.min_us), human(self.avg_us), human(self.max_us));
        write!(f, "min {min}, avg {avg}, max {max}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_that_could_act_there() {
        let hostile = "a\x1b[2Jb\u{9b}31m\u{202e}c\u{200b}d\n\t\0\u{7f}\u{feff}";
        let text = shown(hostile);
        assert!(text.chars().all(|c| (' '..='~').contains(&c)), "{text:?}");
        assert_eq!(shown("mlx5_0 \"it's\" \u{e4}"), "mlx5_0 \"it's\" \u{e4}");
        assert_eq!(shown("\\x"), "\\\\x");
        let json = serde_json::to_string(&(hostile, "\u{1f980}\"")).unwrap();
        let text = ascii(&json);
        assert!(text.chars().all(|c| (' '..='~').contains(&c)), "{text:?}");
        let back: (String, String) = serde_json::from_str(&text).unwrap();
        assert_eq!(back, (hostile.to_owned(), "\u{1f980}\"".to_owned()));
    }

    #[test]
    fn columns_are_as_wide_as_they_have_to_be() {
        let mut table = Table::new(&["A", "LONG"]);
        table.row(vec!["xyz".into(), "\u{e4}".into()]);
        assert_eq!(table.to_string(), "A    LONG\nxyz  \u{e4}\n");
    }

    #[test]
    fn times_are_summed_up() {
        assert_eq!(Times::of(&[]), None);
        let times = [1, 2, 6].map(Duration::from_millis);
        let times = Times::of(&times).unwrap();
        assert_eq!(times.to_string(), "min 1.00 ms, avg 3.00 ms, max 6.00 ms");
        assert_eq!(human(Duration::from_micros(412)), "412 us");
        assert_eq!(human(Duration::from_millis(2500)), "2.50 s");
    }
}
