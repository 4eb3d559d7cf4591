// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The kernel's fault injection: makes one allocation, or one copy from or to a program, fail, and
//! the next one the next time.
//!
//! A thread tells the kernel (`/proc/thread-self/fail-nth`) that the nth point at which something can
//! fail is to fail. What the kernel does on behalf of others, in its work queues, has no such
//! number; there every allocation of a module can be made to fail ([`Injection::starve`]).

use std::cell::Cell;
use std::fmt::Debug;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ktap::prelude::*;
use ktap::AsErrno;

const FAIL_NTH: &str = "/proc/thread-self/fail-nth";
const DEBUGFS: &str = "/sys/kernel/debug";
/// What can be made to fail: slab allocations, pages, copies from and to programs.
const KINDS: [&str; 3] = ["failslab", "fail_page_alloc", "fail_usercopy"];

/// Code addresses.
pub type Code = Range<u64>;

/// Where x86-64 has its modules.
pub const ALL_MODULES: Code = 0xffff_ffff_a000_0000..0xffff_ffff_ff00_0000;

/// Fault injection, set up.
pub struct Injection {
    fail_nth: File,
}

impl Injection {
    /// Sets it up: everything can fail, memory that would be waited for as well, whoever asks.
    ///
    /// The check is skipped where the kernel has no fault injection.
    pub fn new() -> Outcome<Self> {
        if !Path::new(FAIL_NTH).exists() {
            return skip("the kernel has no /proc/self/fail-nth (CONFIG_FAULT_INJECTION)");
        }
        for kind in KINDS {
            // Its own report of each failure is a stack, thousands of times.
            set(kind, "verbose", "0")?;
            set(kind, "probability", "0")?;
            set(kind, "stacktrace-depth", "32")?;
        }
        set("failslab", "ignore-gfp-wait", "N")?;
        set("fail_page_alloc", "ignore-gfp-wait", "N")?;
        set("fail_page_alloc", "ignore-gfp-highmem", "N")?;
        set("fail_page_alloc", "min-order", "0")?;
        let injection = Self {
            fail_nth: File::options().read(true).write(true).open(FAIL_NTH)?,
        };
        injection.within(None)?;
        Ok(injection)
    }

    /// Only points below a function of this code count, or all.
    pub fn within(&self, code: Option<Code>) -> Outcome {
        let code = code.unwrap_or(0..u64::MAX);
        for kind in KINDS {
            set(kind, "require-start", &format!("{:#x}", code.start))?;
            set(kind, "require-end", &format!("{:#x}", code.end))?;
        }
        Ok(())
    }

    /// Runs `round` with its first point failing, then the second, ... until a round ends with all
    /// points behind it. Prints and returns how many points there were.
    ///
    /// At least `expected` points must have been there, or the rounds did not reach what they are to.
    pub fn every(
        &self,
        what: &str,
        expected: u32,
        mut round: impl FnMut(&Nth<'_>) -> Outcome,
    ) -> Outcome<u32> {
        let mut refused = 0;
        for n in 1.. {
            ensure!(n < 20_000, "{what}: no end of fault points");
            let nth = Nth {
                injection: self,
                n,
                state: Cell::new(State::Before),
                refused: Cell::new(false),
            };
            round(&nth).what(format!("{what}, point {n}"))?;
            refused += u32::from(nth.refused.get());
            match nth.state.get() {
                State::Before => return Err(format!("{what}: no call was made").into()),
                State::Hit => (),
                State::Missed => {
                    let points = n - 1;
                    println!(
                        "# {what}: {points} fault points, {refused} of them told to the caller"
                    );
                    ensure!(points >= expected, "{what}: {points} fault points only");
                    return Ok(points);
                }
            }
        }
        Ok(0)
    }

    /// While `body` runs, every slab allocation below a function of `code` fails, but for those of
    /// this thread.
    pub fn starve(&self, code: Code, body: impl FnOnce() -> Outcome) -> Outcome {
        self.within(Some(code))?;
        // Points that count for a thread are no longer left to chance.
        self.arm(u32::MAX)?;
        set("failslab", "times", "-1")?;
        set("failslab", "probability", "100")?;
        let outcome = body();
        set("failslab", "probability", "0")?;
        self.disarm()?;
        self.within(None)?;
        outcome
    }

    fn arm(&self, n: u32) -> Outcome {
        self.fail_nth.write_all_at(n.to_string().as_bytes(), 0)?;
        Ok(())
    }

    // Whether the point was met.
    fn disarm(&self) -> Outcome<bool> {
        let mut text = [0; 16];
        let met = match self.fail_nth.read_at(&mut text, 0) {
            Ok(len) => text[..len].starts_with(b"0"),
            // The point was the copying of the answer.
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) => false,
            Err(e) => return Err(e.into()),
        };
        // Here, too, the copying may have been the point; then it is behind us.
        if self.arm(0).is_err() {
            self.arm(0)?;
        }
        Ok(met)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Before,
    Hit,
    Missed,
}

/// One round of [`Injection::every`].
pub struct Nth<'a> {
    injection: &'a Injection,
    n: u32,
    state: Cell<State>,
    refused: Cell<bool>,
}

impl Nth<'_> {
    /// Makes the call whose nth point fails. It should be no more than that: the points of everything
    /// that it does are counted.
    pub fn call<T>(&self, call: impl FnOnce() -> T) -> Outcome<T> {
        ensure!(self.state.get() == State::Before, "one call a round");
        self.injection.arm(self.n)?;
        let result = call();
        self.state.set(match self.injection.disarm()? {
            true => State::Hit,
            false => State::Missed,
        });
        Ok(result)
    }

    /// The call was refused for another reason before anything could fail; it will be made again.
    pub fn again(&self) {
        self.state.set(State::Before);
    }

    /// The result of the call: a value, or nothing if the caller was told that something failed. Any
    /// other error is a fault, and so is an error without a failure.
    pub fn sensible<T, E: AsErrno + Debug>(&self, result: Result<T, E>) -> Outcome<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(e) => {
                ensure!(self.state.get() == State::Hit, "{e:?}, and nothing failed");
                let errno = e.as_errno();
                ensure!(
                    matches!(errno, Some(Errno::ENOMEM | Errno::EFAULT)),
                    "{e:?}, not ENOMEM or EFAULT"
                );
                self.refused.set(true);
                Ok(None)
            }
        }
    }
}

fn set(kind: &str, name: &str, value: &str) -> Outcome {
    let path = format!("{DEBUGFS}/{kind}/{name}");
    fs::write(&path, value).what(path)
}

/// The code of a loaded module.
pub fn code_of(module: &str) -> Outcome<Code> {
    let tag = format!("[{module}]");
    let addresses: Vec<u64> = fs::read_to_string("/proc/kallsyms")?
        .lines()
        .filter(|line| line.ends_with(&tag))
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = words.next()?;
            matches!(words.next()?, "t" | "T").then_some(())?;
            u64::from_str_radix(address, 16).ok()
        })
        .collect();
    match (addresses.iter().min(), addresses.iter().max()) {
        // Whole pages: the last function has an end, too.
        (Some(first), Some(last)) if *first > 0 => Ok(*first..(last | 0xfff) + 1),
        _ => Err(format!("no code of {module} in /proc/kallsyms").into()),
    }
}
