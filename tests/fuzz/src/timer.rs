// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Signals for a thread that sleeps in a call.

use std::time::Duration;

use nix::sys::signal::{
    sigaction, SaFlags, SigAction, SigEvent, SigHandler, SigSet, SigevNotify, Signal,
};
use nix::sys::timer::{Expiration, Timer as Posix, TimerSetTimeFlags};
use nix::time::ClockId;

const SOON: Duration = Duration::from_millis(3);

/// Interrupts the thread that made it, while it runs.
pub struct Timer(Posix);

extern "C" fn nothing(_: libc::c_int) {}

impl Timer {
    /// A timer that does not run.
    pub fn new() -> nix::Result<Self> {
        let action = SigAction::new(
            SigHandler::Handler(nothing),
            SaFlags::empty(),
            SigSet::empty(),
        );
        // SAFETY: the handler does nothing.
        unsafe { sigaction(Signal::SIGALRM, &action) }?;
        let event = SigEvent::new(SigevNotify::SigevThreadId {
            signal: Signal::SIGALRM,
            thread_id: nix::unistd::gettid().as_raw(),
            si_value: 0,
        });
        Ok(Self(Posix::new(ClockId::CLOCK_MONOTONIC, event)?))
    }

    /// From now on signals come.
    pub fn start(&mut self) {
        let _ = self.0.set(
            Expiration::IntervalDelayed(SOON.into(), SOON.into()),
            TimerSetTimeFlags::empty(),
        );
    }

    /// No more come.
    pub fn stop(&mut self) {
        let _ = self.0.set(
            Expiration::OneShot(Duration::ZERO.into()),
            TimerSetTimeFlags::empty(),
        );
    }
}
