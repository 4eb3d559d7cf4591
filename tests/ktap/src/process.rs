// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Processes: the one that a check runs in, those that a check makes, and commands.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{kill, Signal};
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use nix::unistd::{ForkResult, Pid};

use crate::{Failure, Outcome};

/// A child process made by [`fork`]. It is killed when the value goes.
#[derive(Debug)]
pub struct Forked {
    pid: Pid,
    report: Option<OwnedFd>,
    reaped: bool,
}

/// Runs `body` in a child process; its outcome is for [`Forked::wait`].
///
/// The child has copies of all open files. It must not rely on threads of its parent.
pub fn fork(body: impl FnOnce() -> Outcome) -> Outcome<Forked> {
    let (reader, writer) = nix::unistd::pipe()?;
    std::io::stdout().flush()?;
    // SAFETY: the checks' processes have one thread at this point, or (in a check that has made
    // threads) the child uses nothing but its own memory and files: no lock of the parent is
    // waited for except the allocator's, which glibc makes usable again in a child.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Forked {
            pid: child,
            report: Some(reader),
            reaped: false,
        }),
        ForkResult::Child => {
            drop(reader);
            let code = report(writer, body);
            // SAFETY: ends this process without running what belongs to the parent (destructors,
            // atexit handlers, buffered output).
            unsafe { libc::_exit(code) }
        }
    }
}

// Runs the body and writes its outcome for the parent.
fn report(to: OwnedFd, body: impl FnOnce() -> Outcome) -> i32 {
    std::panic::set_hook(Box::new(|_| ()));
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied());
        Err(Failure::Failed(format!(
            "panicked: {}",
            text.unwrap_or("?")
        )))
    });
    let text = match outcome {
        Ok(()) => "O".to_owned(),
        Err(Failure::Failed(why)) => format!("F{why}"),
        Err(Failure::Skipped(why)) => format!("S{why}"),
    };
    // What the parent does not get, it counts as a failure.
    let sent = fs::File::from(to).write_all(text.as_bytes());
    i32::from(sent.is_err())
}

impl Forked {
    /// Its process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for the child's outcome, at most that long; then shows where its threads are, and
    /// kills it.
    pub fn wait(&mut self, limit: Duration) -> Outcome {
        let Some(report) = self.report.take() else {
            return Err("the child was waited for twice".into());
        };
        let limit = crate::patient(limit);
        let end = Instant::now() + limit;
        let mut report = fs::File::from(report);
        let mut text = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(report.as_fd(), PollFlags::POLLIN)];
            let ms = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
            match nix::poll::poll(&mut fds, ms) {
                Ok(0) if left.is_zero() => return Err(self.overdue(limit)),
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => (),
                Err(e) => return Err(e.into()),
            }
            match report.read(&mut chunk)? {
                0 => break,
                n => text.extend_from_slice(&chunk[..n]),
            }
        }
        // The report is there; now the process must end: closing its files is part of the check.
        let status = loop {
            match waitpid(self.pid, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::StillAlive if Instant::now() >= end => return Err(self.overdue(limit)),
                WaitStatus::StillAlive => std::thread::sleep(Duration::from_millis(1)),
                status => break status,
            }
        };
        self.reaped = true;
        let text = String::from_utf8_lossy(&text).replace('\n', " ");
        match text.split_at_checked(1) {
            Some(("O", _)) => Ok(()),
            Some(("F", why)) => Err(Failure::Failed(why.to_owned())),
            Some(("S", why)) => Err(Failure::Skipped(why.to_owned())),
            _ => Err(format!("ended early: {status:?}").into()),
        }
    }

    /// True while the child has not ended.
    pub fn is_running(&self) -> bool {
        // State Z in the third field: ended, not yet waited for.
        !self.reaped
            && fs::read_to_string(format!("/proc/{}/stat", self.pid))
                .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").starts_with(" Z"))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Outcome {
        Ok(kill(self.pid, signal)?)
    }

    /// Kills the child and waits until it is gone, at most that long.
    pub fn kill(&mut self, limit: Duration) -> Outcome {
        if self.reaped {
            return Ok(());
        }
        kill(self.pid, Signal::SIGKILL)?;
        let limit = crate::patient(limit);
        let end = Instant::now() + limit;
        while waitpid(self.pid, Some(WaitPidFlag::WNOHANG))? == WaitStatus::StillAlive {
            if Instant::now() >= end {
                return Err(format!("killed, but not gone after {limit:?}").into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.reaped = true;
        Ok(())
    }

    fn overdue(&mut self, limit: Duration) -> Failure {
        let stacks = stacks(self.pid);
        for line in stacks.lines() {
            println!("# {line}");
        }
        let gone = match self.kill(Duration::from_secs(10)) {
            Ok(()) => "",
            Err(_) => ", and cannot be killed",
        };
        // Where the first thread is: enough for the line of the check.
        let place = stacks
            .lines()
            .find(|line| line.contains("+0x"))
            .map(|line| format!(", in {}", line.trim().trim_start_matches("[<0>] ")))
            .unwrap_or_default();
        Failure::Failed(format!("not done after {limit:?}{place}{gone}"))
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // A process that cannot be killed is shown by the runner; here nothing more can be done.
        let _ = self.kill(Duration::from_secs(10));
    }
}

/// Kernel stacks of all threads of a process.
pub fn stacks(pid: Pid) -> String {
    let mut text = String::new();
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return text;
    };
    for task in tasks.flatten() {
        let name = task.file_name();
        let stack = fs::read_to_string(task.path().join("stack")).unwrap_or_default();
        text += &format!("thread {}:\n{stack}", name.to_string_lossy());
    }
    text
}

// Runs a check in a child, with a bound.
pub(crate) fn contained(body: impl FnOnce() -> Outcome, limit: Duration) -> Outcome {
    fork(body)?.wait(limit)
}

/// Runs a command (words are split at blanks) and returns its output; a failure shows what it said.
pub fn run(command: &str) -> Outcome<String> {
    let mut words = command.split_whitespace();
    let Some(program) = words.next() else {
        return Err("an empty command".into());
    };
    let output = Command::new(program)
        .args(words)
        .output()
        .map_err(|e| format!("{command}: {e}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command}: {}: {}", output.status, stderr.trim()).into())
}
