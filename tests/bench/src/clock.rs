// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Counting instructions: the guest's time stamp counter, and who may run while it counts.
//!
//! Under `-icount shift=0` one tick is one executed instruction, and idle time passes in one step.

use std::time::Duration;

use ktap::{Failure, Outcome};

/// The counter now.
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Ticks that a call takes; what it returns is looked at afterwards.
pub fn timed<T>(call: impl FnOnce() -> T) -> (u64, T) {
    let begin = ticks();
    let result = call();
    (ticks().saturating_sub(begin), result)
}

/// Who runs when several want to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Before every worker of the kernel: these run while the caller sleeps.
    First,
    /// When nobody else wants to.
    Last,
}

/// Sets the calling thread's priority.
pub fn set_priority(priority: Priority) -> Outcome {
    let (policy, sched_priority) = match priority {
        Priority::First => (libc::SCHED_FIFO, 50),
        Priority::Last => (libc::SCHED_IDLE, 0),
    };
    let param = libc::sched_param { sched_priority };
    // SAFETY: the parameter is valid, and thread 0 is the caller.
    match unsafe { libc::sched_setscheduler(0, policy, &param) } {
        0 => Ok(()),
        _ => Err(Failure::from(std::io::Error::last_os_error().to_string())),
    }
}

/// Lets all work that was begun be done.
pub fn idle() {
    std::thread::sleep(Duration::from_millis(3));
}

/// A gap between two looks at the counter that is longer than this was somebody else's.
const OTHERS: u64 = 3_000;
/// Nobody wants to run if there was no such gap for so long.
const QUIET: u64 = 30_000;

/// Runs last until nobody else wants to run; returns the counter when the last one was done.
pub fn drained() -> Outcome<u64> {
    set_priority(Priority::Last)?;
    let mut last = ticks();
    let mut done = last;
    loop {
        std::thread::yield_now();
        let now = ticks();
        if now.saturating_sub(last) > OTHERS {
            done = now;
        }
        last = now;
        if now.saturating_sub(done) > QUIET {
            break;
        }
    }
    set_priority(Priority::First)?;
    Ok(done)
}
