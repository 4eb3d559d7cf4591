// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The harness of the selftests.
//!
//! An area is one program; it names its checks, runs them one after the other, and speaks KTAP:
//!
//! ```no_run
//! //! Area `example`: ports can be opened.
//!
//! use ktap::prelude::*;
//!
//! fn main() -> std::process::ExitCode {
//!     let mut area = ktap::Area::new("example");
//!     area.check("open gives a file with the old header layout", || {
//!         let port = Port::options().layout(Layout::Old).open(0)?;
//!         ensure_eq!(port.layout(), Layout::Old);
//!         ensure_errno!(port.unregister(AgentId(0)), EINVAL);
//!         Ok(())
//!     });
//!     area.check("a reader is woken by the unplug", || {
//!         let pair = RxePair::new("x")?; // own veth and Soft-RoCE devices, gone with the value
//!         let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
//!         // ...
//!         Ok(())
//!     })
//!     .improvement(1)
//!     .timeout(60);
//!     area.run()
//! }
//! ```
//!
//! Each check runs in a child process of its own: whatever it opens, registers or forgets ends with
//! it, a panic is a failure, and when it does not end in time ([`Check::timeout`], 120 s by
//! default) the kernel stacks of its threads are shown and it is killed. Every check runs on the C
//! module and on ours (`UMAD_IMPL`); one that is marked as an improvement must *fail* on the C
//! module, and says there what was seen.

use std::fmt;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub mod device;
mod failure;
pub mod kmsg;
pub mod memory;
pub mod module;
pub mod peers;
pub mod process;

pub use device::{rxe_links, settle, wait_for_umad, RxePair, RxePort};
pub use failure::{skip, AsErrno, Failure, Outcome, ResultExt};
pub use memory::{Guarded, Prot};
pub use peers::{fresh, fresh_on, fresh_tid, Endpoint, Peers};
pub use process::{fork, run, Forked};

/// What an area usually needs.
pub mod prelude {
    pub use crate::{ensure, ensure_eq, ensure_errno};
    pub use crate::{fork, run, skip, wait_until, Forked, Outcome, ResultExt};
    pub use crate::{fresh, fresh_on, fresh_tid, Endpoint, Peers, RxePair, RxePort};
    pub use nix::errno::Errno;
    pub use std::time::{Duration, Instant};
    pub use umad::{Address, AgentId, Gid, Layout, MadHdr, Method, MethodMask, Packet, Port};
    pub use umad::{Qpn, Registration, RmppHdr, Tid, VendorMad};
}

/// Which module is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Impl {
    /// The C module: the oracle.
    C,
    /// Ours.
    Rust,
}

impl Impl {
    /// What `UMAD_IMPL` says.
    pub fn current() -> Result<Self, String> {
        match std::env::var("UMAD_IMPL").as_deref() {
            Ok("c") => Ok(Self::C),
            Ok("rust") => Ok(Self::Rust),
            other => Err(format!("UMAD_IMPL must be c or rust, not {other:?}")),
        }
    }
}

impl fmt::Display for Impl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::C => "C",
            Self::Rust => "Rust",
        })
    }
}

/// One named check of an area.
pub struct Check<'a> {
    name: String,
    body: Box<dyn FnOnce() -> Outcome + 'a>,
    timeout: Duration,
    improvement: Option<u32>,
    racy: Option<String>,
    crashes_c: bool,
}

impl Check<'_> {
    /// The C module fails here; `number` is that of the list of improvements.
    pub fn improvement(&mut self, number: u32) -> &mut Self {
        self.improvement = Some(number);
        self
    }

    /// The C module fails only sometimes, for this reason: an improvement may pass there.
    pub fn racy(&mut self, why: &str) -> &mut Self {
        self.racy = Some(why.to_owned());
        self
    }

    /// The C module, and with it the kernel, dies of this check: there it is run only if `UMAD_CRASH` is
    /// set, in a guest of its own, and then nothing else is.
    pub fn crashes_c(&mut self) -> &mut Self {
        self.crashes_c = true;
        self
    }

    /// Kills the check after so many seconds (a bound against hanging, not a measure of speed).
    pub fn timeout(&mut self, seconds: u64) -> &mut Self {
        self.timeout = Duration::from_secs(seconds);
        self
    }
}

/// A list of checks.
pub struct Area<'a> {
    name: String,
    checks: Vec<Check<'a>>,
}

impl<'a> Area<'a> {
    /// An empty area.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            checks: Vec::new(),
        }
    }

    /// Adds a check; the value that is returned takes the marks.
    pub fn check(
        &mut self,
        name: impl Into<String>,
        body: impl FnOnce() -> Outcome + 'a,
    ) -> &mut Check<'a> {
        let at = self.checks.len();
        self.checks.push(Check {
            name: name.into(),
            body: Box::new(body),
            timeout: Duration::from_secs(120),
            improvement: None,
            racy: None,
            crashes_c: false,
        });
        &mut self.checks[at]
    }

    /// Runs the checks in order. Arguments of the program, if any, are parts of the names to run.
    ///
    /// `KTAP_IMPROVEMENTS` chooses those that are marked as improvements; with `KTAP_STOP` the first
    /// failure is the last check.
    pub fn run(self) -> ExitCode {
        println!("KTAP version 1");
        let module = match Impl::current() {
            Ok(module) => module,
            Err(why) => {
                println!("Bail out! {}: {why}", self.name);
                return ExitCode::FAILURE;
            }
        };
        let wanted: Vec<String> = std::env::args().skip(1).collect();
        let crash = std::env::var_os("UMAD_CRASH").is_some();
        let (checks, elsewhere): (Vec<_>, Vec<_>) = self
            .checks
            .into_iter()
            .partition(|c| c.crashes_c == crash || module == Impl::Rust && !crash);
        if !crash {
            for check in &elsewhere {
                println!(
                    "# in a guest of its own, as the C module crashes the kernel: {}",
                    check.name
                );
            }
        }
        let improvements = std::env::var_os("KTAP_IMPROVEMENTS").is_some();
        let stop = std::env::var_os("KTAP_STOP").is_some();
        let checks: Vec<_> = checks
            .into_iter()
            .filter(|c| !improvements || c.improvement.is_some())
            .filter(|c| wanted.is_empty() || wanted.iter().any(|w| c.name.contains(w)))
            .collect();
        println!("1..{}", checks.len());
        let mut failed = 0;
        for (number, check) in (1..).zip(checks) {
            let (ok, text) = run_check(check, module);
            println!("{} {number} {text}", if ok { "ok" } else { "not ok" });
            failed += usize::from(!ok);
            if stop && !ok {
                println!("# KTAP_STOP: no more checks after a failure");
                break;
            }
        }
        println!("# {}: {failed} failed on the {module} module", self.name);
        if failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

// Runs one check; says whether it counts as passed, and what to print behind its number.
fn run_check(check: Check<'_>, module: Impl) -> (bool, String) {
    let name = check.name;
    let outcome = process::contained(check.body, check.timeout);
    let expected = check.improvement.filter(|_| module == Impl::C);
    match (expected, outcome) {
        (_, Err(Failure::Skipped(why))) => (true, format!("{name} # SKIP {why}")),
        (None, Ok(())) => (true, name),
        (None, Err(Failure::Failed(why))) => (false, format!("{name} # {why}")),
        (Some(n), Err(Failure::Failed(why))) => {
            (true, format!("{name} # XFAIL improvement {n}: {why}"))
        }
        (Some(n), Ok(())) => match check.racy {
            Some(why) => (
                true,
                format!("{name} # improvement {n}, passed by luck: {why}"),
            ),
            None => (
                false,
                format!("{name} # improvement {n} passes on the C module: it shows no difference"),
            ),
        },
    }
}

/// How many times as patient as usual to be: `KTAP_SLOW`, for kernels that take longer for everything.
pub fn slowness() -> u32 {
    static SLOWNESS: OnceLock<u32> = OnceLock::new();
    *SLOWNESS.get_or_init(|| {
        let text = std::env::var("KTAP_SLOW").ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
    })
}

/// A bound of time, on this kernel. All waits of this crate have it in them.
pub fn patient(limit: Duration) -> Duration {
    limit * slowness()
}

/// Looks again and again until `done` says yes, for at most `limit`.
pub fn wait_until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Outcome {
    let limit = patient(limit);
    let end = Instant::now() + limit;
    loop {
        if done() {
            return Ok(());
        }
        if Instant::now() >= end {
            return Err(format!("not within {limit:?}: {what}").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(
        body: impl FnOnce() -> Outcome,
        marks: impl FnOnce(&mut Check<'_>),
        module: Impl,
    ) -> (bool, String) {
        let mut area = Area::new("t");
        marks(area.check("name", body));
        run_check(area.checks.pop().expect("one check"), module)
    }

    #[test]
    fn verdicts() {
        let ok = || Ok(());
        let bad = || Err("why".into());
        assert_eq!(one(ok, |_| (), Impl::C), (true, "name".into()));
        assert_eq!(one(bad, |_| (), Impl::C), (false, "name # why".into()));
        assert_eq!(
            one(|| skip("none here"), |_| (), Impl::C),
            (true, "name # SKIP none here".into())
        );
        let marked = |c: &mut Check<'_>| {
            c.improvement(5);
        };
        assert_eq!(
            one(bad, marked, Impl::C),
            (true, "name # XFAIL improvement 5: why".into())
        );
        assert!(!one(ok, marked, Impl::C).0);
        assert!(one(ok, marked, Impl::Rust).0);
        assert!(!one(bad, marked, Impl::Rust).0);
        let racy = |c: &mut Check<'_>| {
            c.improvement(5).racy("it depends");
        };
        assert!(one(ok, racy, Impl::C).0);
    }

    #[test]
    fn a_panic_and_a_hang_are_failures() {
        let (ok, text) = one(|| panic!("boom\nbang"), |_| (), Impl::C);
        assert!(!ok && text.contains("boom bang"), "{text}");
        let (ok, text) = one(
            || loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            |c| {
                c.timeout(1);
            },
            Impl::C,
        );
        assert!(!ok && text.contains("not done after"), "{text}");
        let (ok, text) = one(|| std::process::exit(3), |_| (), Impl::C);
        assert!(!ok && text.contains("ended early"), "{text}");
    }

    #[test]
    fn a_wait_is_bounded() {
        let mut n = 0;
        assert!(wait_until("three", Duration::from_secs(5), || {
            n += 1;
            n == 3
        })
        .is_ok());
        assert!(wait_until("never", Duration::ZERO, || false).is_err());
    }
}
