// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The figures of many runs as a table.

use std::collections::BTreeMap;
use std::fs;

use ktap::prelude::*;

/// The figures of an operation, by implementation.
#[derive(Default)]
struct Row {
    /// The C module's.
    c: Vec<f64>,
    /// The C module's again, measured after ours.
    again: Vec<f64>,
    /// Ours.
    ours: Vec<f64>,
    /// The least that a driver can do; of some operations.
    floor: Vec<f64>,
}

/// What a ratio may be worse than its limit.
const TOLERANCE: f64 = 1.03;

fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// How far the values lie apart, in parts of their median.
fn spread(values: &[f64]) -> Option<f64> {
    let median = median(values)?;
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    Some((most - least) / median)
}

/// A figure with commas between thousands.
fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn parse(text: &str) -> Outcome<(Vec<String>, BTreeMap<String, Row>)> {
    let mut order = Vec::new();
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (_round, implementation) = (words.next(), words.next());
        let (name, ticks) = words
            .next()
            .and_then(|rest| rest.split_once('\t'))
            .ok_or_else(|| format!("cannot read the line {line:?}"))?;
        if !rows.contains_key(name) {
            order.push(name.to_owned());
        }
        let row = rows.entry(name.to_owned()).or_default();
        match implementation {
            Some("c") => row.c.push(ticks.parse()?),
            Some("again") => row.again.push(ticks.parse()?),
            Some("rust") => row.ours.push(ticks.parse()?),
            Some("floor") => row.floor.push(ticks.parse()?),
            other => return Err(format!("implementation {other:?}").into()),
        }
    }
    Ok((order, rows))
}

/// Prints the table; with limits, fails if one of them is broken.
pub fn print(kernel: &str, file: &str, limits: Option<&str>) -> Outcome {
    let (order, rows) = parse(&fs::read_to_string(file).what(file)?)?;
    let width = order.iter().map(String::len).max().unwrap_or(0);
    let rule = format!(
        "{:=<width$}  {0:=<11}  {0:=<11}  {0:=<6}  {0:=<11}  {0:=<7}  {0:=<7}",
        ""
    );
    println!("Executed instructions, Linux {kernel}:");
    println!();
    println!("{rule}");
    println!(
        "{:width$}  {:>11}  {:>11}  {:>6}  {:>11}  {:>7}  {:>7}",
        "operation", "C module", "ours", "ratio", "floor", "C : C", "spread"
    );
    println!("{rule}");
    let mut ratios = BTreeMap::new();
    for name in &order {
        let row = rows.get(name).ok_or("a row is missing")?;
        let (Some(c), Some(ours)) = (median(&row.c), median(&row.ours)) else {
            return Err(format!("{name} was not measured on both modules").into());
        };
        let again = median(&row.again).map_or("-".into(), |again| format!("{:.3}", again / c));
        let floor = median(&row.floor).map_or("-".into(), thousands);
        let spread = spread(&row.ours).unwrap_or(0.0);
        println!(
            "{name:width$}  {:>11}  {:>11}  {:>6.3}  {floor:>11}  {again:>7}  {:>5.1} %",
            thousands(c),
            thousands(ours),
            ours / c,
            spread * 100.0
        );
        // Against the dearer of the two: what lies between them the method cannot tell apart.
        let dearer = median(&row.again).map_or(c, |again| again.max(c));
        ratios.insert(name.as_str(), ours / dearer);
    }
    println!("{rule}");
    match limits {
        Some(limits) => check(&ratios, &fs::read_to_string(limits).what(limits)?),
        None => Ok(()),
    }
}

/// Fails if a ratio is worse than its limit allows.
fn check(ratios: &BTreeMap<&str, f64>, limits: &str) -> Outcome {
    let mut worse = String::new();
    for line in limits.lines().filter(|line| !line.starts_with('#')) {
        let (limit, name) = line
            .split_once(' ')
            .ok_or_else(|| format!("cannot read the limit {line:?}"))?;
        let limit: f64 = limit.parse()?;
        if let Some(ratio) = ratios.get(name) {
            if *ratio > limit * TOLERANCE {
                worse.push_str(&format!("\n  {name}: {ratio:.3}, recorded {limit:.3}"));
            }
        }
    }
    ensure!(worse.is_empty(), "worse than recorded:{worse}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "1 c write call\t100\n1 rust write call\t40\n1 again write call\t101\n\
                         2 c write call\t102\n2 rust write call\t41\n2 again write call\t102\n";

    #[test]
    fn lines_become_rows() {
        let (order, rows) = parse(LINES).unwrap();
        assert_eq!(order, ["write call"]);
        assert_eq!(median(&rows["write call"].ours), Some(41.0));
        assert_eq!(thousands(1_234_567.0), "1,234,567");
        assert_eq!(thousands(999.0), "999");
    }

    #[test]
    fn a_worse_ratio_fails() {
        let ratios = BTreeMap::from([("read", 0.80)]);
        assert!(check(&ratios, "# recorded\n0.79 read\n").is_ok());
        assert!(check(&ratios, "0.75 read\n").is_err());
    }
}
