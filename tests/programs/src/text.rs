// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What programs print, read.

/// Text without the lines that `dropped` knows.
pub fn without(text: &str, dropped: impl Fn(&str) -> bool) -> String {
    let mut kept = String::new();
    for line in text.lines().filter(|line| !dropped(line)) {
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// Number of lines that begin so.
pub fn count(text: &str, start: &str) -> usize {
    text.lines().filter(|line| line.starts_with(start)).count()
}

/// The word behind a label ("label: word", "label......word").
pub fn value<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(label)?;
    rest.trim_start_matches([':', '.', ' ', '\t', '='])
        .split_whitespace()
        .next()
}

/// Decimal digits, of any number, replaced by "N": for what differs from run to run.
pub fn numbers_hidden(text: &str) -> String {
    let mut hidden = String::new();
    let mut within = false;
    for character in text.chars() {
        let digit = character.is_ascii_digit();
        if digit && !within {
            hidden.push('N');
        } else if !digit {
            hidden.push(character);
        }
        within = digit;
    }
    hidden
}

/// The figures behind these labels ("label.....figure") replaced by "N".
pub fn figures_hidden(text: &str, labels: &[&str]) -> String {
    text.lines()
        .map(|line| {
            let label = line
                .trim_start()
                .split(['.', ':'])
                .next()
                .unwrap_or_default();
            if labels.contains(&label) {
                numbers_hidden(line) + "\n"
            } else {
                line.to_owned() + "\n"
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        assert_eq!(value("a: 1\nLid:......17\n", "Lid"), Some("17"));
        assert_eq!(value("a: 1\n", "b"), None);
    }

    #[test]
    fn hidden() {
        assert_eq!(numbers_hidden("t 12.5 s"), "t N.N s");
        assert_eq!(
            figures_hidden("\tA...12\nB...3\n", &["A"]),
            "\tA...N\nB...3\n"
        );
    }
}
