// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Checks in order, what they print, and what they leave for the host to compare.

use std::fmt::{Display, Write as _};
use std::fs;
use std::io::Write as _;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::Instant;

use ktap::{Failure, Outcome};

/// Marks a figure that may differ by some per cent.
pub(crate) const ABOUT: &str = " (within ";

/// What a check saw of its program: lines that must be the same with either module.
#[derive(Debug, Default)]
pub struct Seen {
    lines: String,
    notes: Vec<String>,
}

impl Seen {
    /// Adds a figure.
    pub fn figure(&mut self, name: &str, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.lines, "{name}: {value}");
    }

    /// Adds a figure that may differ by so many per cent.
    pub fn about(&mut self, name: &str, value: u64, percent: u64) {
        let _ = writeln!(self.lines, "{name}{ABOUT}{percent} %): {value}");
    }

    /// Adds text, line by line.
    pub fn text(&mut self, text: &str) {
        self.lines.push_str(text);
        if !text.is_empty() && !text.ends_with('\n') {
            self.lines.push('\n');
        }
    }

    /// What was added, but for the notes.
    pub fn lines(&self) -> &str {
        &self.lines
    }

    /// Adds something that is worth telling, and may differ: it is shown, not compared.
    pub fn note(&mut self, text: impl Display) {
        self.notes.push(text.to_string());
    }
}

type Body<W> = Box<dyn FnOnce(&mut W, &mut Seen) -> Outcome>;

/// A check: a program, what it must do, and how that is found out. `W` is what the checks of a scene
/// share.
struct Check<W> {
    program: String,
    what: String,
    body: Body<W>,
}

/// A situation, and the checks that are made in it.
pub struct Scene<W> {
    name: String,
    checks: Vec<Check<W>>,
}

impl<W> Scene<W> {
    /// An empty one.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            checks: Vec::new(),
        }
    }

    /// Adds a check.
    pub fn check(
        &mut self,
        program: &str,
        what: &str,
        body: impl FnOnce(&mut W, &mut Seen) -> Outcome + 'static,
    ) {
        self.checks.push(Check {
            program: program.to_owned(),
            what: what.to_owned(),
            body: Box::new(body),
        });
    }
}

/// Where results go.
pub struct Report {
    folder: PathBuf,
    scenes: usize,
    failed: usize,
}

impl Report {
    /// Outcomes are to be files in `folder`; prints the head.
    ///
    /// # Errors
    ///
    /// If the folder cannot be made.
    pub fn new(folder: &Path, scenes: usize) -> Outcome<Self> {
        fs::create_dir_all(folder)?;
        println!("KTAP version 1\n1..{scenes}");
        Ok(Self {
            folder: folder.to_owned(),
            scenes: 0,
            failed: 0,
        })
    }

    /// Runs a scene's checks in order, on what they share; that is dropped at the end.
    pub fn run<W>(&mut self, scene: Scene<W>, mut world: W) {
        let start = Instant::now();
        self.scenes += 1;
        println!(
            "  KTAP version 1\n  # Subtest: {}\n  1..{}",
            scene.name,
            scene.checks.len()
        );
        let before = self.failed;
        for (number, check) in (1..).zip(scene.checks) {
            self.run_check(&scene.name, number, check, &mut world);
        }
        drop(world);
        let ok = if self.failed == before {
            "ok"
        } else {
            "not ok"
        };
        println!(
            "{ok} {} {} # {} s",
            self.scenes,
            scene.name,
            start.elapsed().as_secs()
        );
    }

    fn run_check<W>(&mut self, scene: &str, number: usize, check: Check<W>, world: &mut W) {
        let start = Instant::now();
        let mut seen = Seen::default();
        let body = check.body;
        let outcome = catch_unwind(AssertUnwindSafe(|| body(world, &mut seen)))
            .unwrap_or_else(|_| Err(Failure::Failed("panicked".to_owned())));
        for note in &seen.notes {
            println!("  # {note}");
        }
        let name = format!("{}: {}", check.program, check.what);
        let took = start.elapsed();
        match &outcome {
            Ok(()) => println!("  ok {number} {name} # {:.1} s", took.as_secs_f64()),
            Err(Failure::Skipped(why)) => println!("  ok {number} {name} # SKIP {why}"),
            Err(Failure::Failed(why)) => {
                self.failed += 1;
                println!("  not ok {number} {name} # {}", why.replace('\n', " | "));
            }
        }
        if let Err(why) = self.leave(scene, number, &check.program, &name, &outcome, &seen) {
            println!("  # the outcome cannot be written: {why:?}");
            self.failed += 1;
        }
    }

    // The outcome as a file for the host.
    fn leave(
        &self,
        scene: &str,
        number: usize,
        program: &str,
        name: &str,
        outcome: &Outcome,
        seen: &Seen,
    ) -> Outcome {
        let path = self.folder.join(format!("{scene}-{number:02}"));
        let verdict = match outcome {
            Ok(()) => "as it must be",
            Err(Failure::Skipped(_)) => "skipped",
            Err(Failure::Failed(_)) => "failed",
        };
        let mut file = fs::File::create(path)?;
        write!(file, "{name}\n{program}\n{verdict}\n{}", seen.lines)?;
        Ok(())
    }

    /// Failed checks so far.
    pub fn failed(&self) -> usize {
        self.failed
    }
}
