// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Ctrl-C and its like, as something to wait for: what was begun is ended properly.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::failure::{Context, Outcome};

/// Hears the signals that ask to end. From then on they do nothing else.
#[derive(Debug)]
pub struct Interrupts {
    fd: SignalFd,
}

impl Interrupts {
    /// Begins to hear; threads that are made later leave the signals to it, too.
    pub fn new() -> Outcome<Self> {
        let mut set = SigSet::empty();
        for signal in [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
        ] {
            set.add(signal);
        }
        set.thread_block().what("blocking signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let fd = SignalFd::with_flags(&set, flags).what("signalfd")?;
        Ok(Self { fd })
    }

    /// Waits; true if it is to end, or was to before.
    pub fn wait(&self, time: Duration) -> Outcome<bool> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let ms = left.as_nanos().div_ceil(1_000_000);
            let timeout = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout) {
                Ok(0) if end <= Instant::now() => return Ok(false),
                // The signal stays in the file: whoever asks later is told, too.
                Ok(n) if n > 0 => return Ok(true),
                Ok(_) | Err(Errno::EINTR) => (),
                Err(e) => return Err(e).what("poll"),
            }
        }
    }
}
