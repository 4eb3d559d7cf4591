// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Figures: what a check measured, for people and for `make report`, which puts those of the two modules
//! side by side.
//!
//! A figure is one line, `# figure: WHAT: VALUE UNIT`. The value is a number, or `>` and a number when
//! what was measured did not end in that time.

use std::fmt::Display;
use std::time::{Duration, Instant};

use ktap::prelude::*;

use crate::task::Task;

/// Tells a figure.
pub fn figure(what: &str, value: impl Display, unit: &str) {
    println!("# figure: {what}: {value} {unit}");
}

/// Tells a time in ms, with three digits behind the point.
pub fn figure_time(what: &str, time: Duration) {
    figure(what, Millis(time), "ms");
}

struct Millis(Duration);

impl Display for Millis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3}", self.0.as_secs_f64() * 1000.0)
    }
}

/// The one in the middle; nothing of nothing.
pub fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Does something again and again in a thread of its own, so many times, each of which must be done
/// within `bound`; the median time is told as a figure, and returned.
///
/// What is not done in time is a failure, and the figure says so. The thread is not waited for then: the
/// caller sees to it that it can go on.
pub fn median_of(
    what: &str,
    times: usize,
    bound: Duration,
    mut work: impl FnMut() -> Outcome + Send + 'static,
) -> Outcome<Duration> {
    let (done, results) = std::sync::mpsc::channel();
    let _thread = Task::start(move || {
        for _ in 0..times {
            let begin = Instant::now();
            let outcome = work();
            let failed = outcome.is_err();
            if done.send(outcome.map(|()| begin.elapsed())).is_err() || failed {
                break;
            }
        }
    });
    let mut all = Vec::new();
    for _ in 0..times {
        match results.recv_timeout(ktap::patient(bound)) {
            Ok(outcome) => all.push(outcome.what(what)?),
            Err(_) => {
                figure(what, format_args!(">{}", bound.as_millis()), "ms");
                return Err(format!("{what}: not within {bound:?}").into());
            }
        }
    }
    let median = median(all).ok_or("nothing was measured")?;
    figure_time(what, median);
    Ok(median)
}

/// How many rounds of something that can go on for ever: `usual`, or `UMAD_CYCLES` where more, or fewer, are
/// asked for.
pub fn cycles(usual: u32) -> Outcome<u32> {
    match std::env::var("UMAD_CYCLES") {
        Ok(text) => text.parse().what(format!("UMAD_CYCLES is {text:?}")),
        Err(_) => Ok((usual / ktap::slowness()).max(1)),
    }
}

/// Bound of a check of so many cycles, in seconds.
pub fn cycles_bound(usual: u32) -> u64 {
    u64::from(cycles(usual).unwrap_or(usual)).max(300)
}
