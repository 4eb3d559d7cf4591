// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `fuzz`: the programs that the fuzzer found (tests/fuzz/corpus), which together reach what it ever
//! reached, are run again. Every call returns, the kernel reports nothing, and what calls return is what they return on
//! the C module, as far as they always return the same.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use ktap::prelude::*;
use ktap::Impl;
use selftests::vhca::Module;
use umad_fuzz::call::{Op, Program};
use umad_fuzz::corpus;
use umad_fuzz::execute::{show, Result as Returned};
use umad_fuzz::kernel::Log;
use umad_fuzz::scene::Exclusive;
use umad_fuzz::worker::{Tell, Worker};

/// In the guest.
const CORPUS: &str = "/p/tests/fuzz/corpus";
/// What the C module returned, for ours to be compared with.
const OF_C: &str = "/tmp/fuzz-of-c";
const ROUNDS: usize = 3;

/// What the calls of a program return, if that is always the same.
type Results = Vec<Option<Returned>>;

fn name(path: &Path) -> String {
    path.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Runs all programs, some rounds, and says what they return.
fn replay(module: Impl) -> Outcome<BTreeMap<String, Results>> {
    let mut log = Log::now()?;
    let vhca = Module::load()?;
    let mode = Exclusive::begin()?;
    let mut worker = Worker::start(0, &HashSet::new())?;
    let mut all = BTreeMap::new();
    let mut calls = 0;
    for (path, program) in corpus::read(Path::new(CORPUS))? {
        let name = name(&path);
        if module == Impl::C && program.crashes_c() {
            println!(
                "# {name}: not on the C module, which can crash if an open of issm meets an unplug"
            );
            continue;
        }
        let mut results: Option<Results> = None;
        for _ in 0..ROUNDS {
            let reply = worker.run(&program, Tell::New).what(&name)?;
            calls += reply.results.len();
            match &mut results {
                None => results = Some(reply.results.into_iter().map(Some).collect()),
                Some(known) => {
                    for (known, new) in known.iter_mut().zip(reply.results) {
                        *known = known.filter(|known| *known == new);
                    }
                }
            }
            if let Some(lines) = log.fault()? {
                return Err(
                    format!("{name}: the kernel reports a fault: {}", lines.join(" / ")).into(),
                );
            }
        }
        all.insert(name, results.unwrap_or_default());
    }
    println!("# {} programs, {calls} calls", all.len());
    ensure!(!all.is_empty(), "the corpus is empty");
    drop((worker, mode, vhca));
    Ok(all)
}

fn write(results: &BTreeMap<String, Results>) -> Outcome {
    let mut text = String::new();
    for (name, results) in results {
        text += name;
        for result in results {
            text += &result.map_or(" ?".to_owned(), |result| format!(" {result}"));
        }
        text.push('\n');
    }
    Ok(fs::write(OF_C, text)?)
}

fn read() -> Outcome<BTreeMap<String, Results>> {
    let text = fs::read_to_string(OF_C)?;
    let line = |line: &str| {
        let (name, results) = line.split_once(' ').unwrap_or((line, ""));
        (
            name.to_owned(),
            results
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect(),
        )
    };
    Ok(text.lines().map(line).collect())
}

/// Whether the two modules may differ in what this call returns: it depends on how fast packets come, or one of the
/// differences of the manual is behind it.
fn may_differ(program: &Program, n: usize) -> bool {
    let timing = [Op::Read, Op::Poll, Op::Look];
    program
        .0
        .get(n)
        .is_none_or(|call| timing.contains(&call.op))
        || program.0.iter().any(|call| {
            call.aside || matches!(call.op, Op::Fail | Op::Unplug | Op::Port | Op::Fault)
        })
}

fn compare(ours: &BTreeMap<String, Results>) -> Outcome {
    let of_c = read()?;
    let mut same = 0;
    let mut different = Vec::new();
    for (path, program) in corpus::read(Path::new(CORPUS))? {
        let (Some(c), Some(ours)) = (of_c.get(&name(&path)), ours.get(&name(&path))) else {
            continue;
        };
        for (n, (c, ours)) in c.iter().zip(ours).enumerate() {
            match (c, ours) {
                (Some(c), Some(ours)) if c == ours => same += 1,
                (Some(c), Some(ours)) => {
                    let text = format!(
                        "{}: {}: {}, on C {}",
                        name(&path),
                        program.0[n],
                        show(*ours),
                        show(*c)
                    );
                    println!(
                        "# {text}{}",
                        if may_differ(&program, n) {
                            " (may differ)"
                        } else {
                            ""
                        }
                    );
                    if !may_differ(&program, n) {
                        different.push(text);
                    }
                }
                _ => (),
            }
        }
    }
    println!("# {same} calls return the same");
    ensure!(same > 0, "nothing was compared");
    ensure!(different.is_empty(), "{}", different.join(" / "));
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("fuzz");
    area.check("every call of the corpus returns, and the kernel reports nothing; what is returned is as on C", || {
        let module = Impl::current()?;
        let results = replay(module)?;
        match module {
            Impl::C => write(&results),
            Impl::Rust if fs::exists(OF_C)? => compare(&results),
            Impl::Rust => {
                println!("# not compared: the C module did not run in this boot");
                Ok(())
            }
        }
    })
    .timeout(240);
    area.run()
}
