// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A thread that may hang.
//!
//! Many checks make a call that must return, or must not, within a bound. [`Task`] makes the call
//! in a thread of its own; the test waits for its result for as long as it likes, can see that the
//! thread sleeps in a system call, and can interrupt it with a signal.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use ktap::patient;
use nix::sys::pthread::{pthread_kill, pthread_self, Pthread};
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::unistd::{gettid, Pid};

/// Long enough for anything that must happen, on the slowest machine; its length costs nothing when
/// all is well.
pub const MUST: Duration = Duration::from_secs(20);

/// A limit for a poll() that must be woken: by its end it looks once more, and finds what it was not woken
/// for, so the end must come after everybody has given up.
pub const NEVER: Duration = Duration::from_secs(600);

/// How long something that must not happen is waited for. It has no event to wait for, so it needs
/// a bound: several times what the slow case of the same thing takes when it does happen.
pub const MUST_NOT: Duration = Duration::from_millis(600);

/// A call that runs in its own thread.
pub struct Task<T> {
    result: Receiver<T>,
    got: Option<T>,
    tid: Pid,
    thread: Pthread,
    handle: Option<thread::JoinHandle<()>>,
}

impl<T: Send + 'static> Task<T> {
    /// Starts `call` in a thread.
    pub fn start(call: impl FnOnce() -> T + Send + 'static) -> Self {
        let (ids, who) = mpsc::channel();
        let (done, result) = mpsc::channel();
        let handle = thread::spawn(move || {
            let _ = ids.send((gettid(), pthread_self()));
            let _ = done.send(call());
        });
        let (tid, thread) = who.recv().expect("the thread tells its id first");
        Self {
            result,
            got: None,
            tid,
            thread,
            handle: Some(handle),
        }
    }

    /// Starts `call` and waits until its thread sleeps in the system call `nr`, or has returned.
    pub fn start_asleep(nr: libc::c_long, call: impl FnOnce() -> T + Send + 'static) -> Self {
        let mut task = Self::start(call);
        let end = Instant::now() + patient(MUST);
        while !task.asleep_in(nr) && !task.within(Duration::ZERO) && Instant::now() < end {
            thread::sleep(Duration::from_millis(2));
        }
        task
    }

    /// Whether the call has returned, or does so within `bound`.
    pub fn within(&mut self, bound: Duration) -> bool {
        if self.got.is_none() {
            match self.result.recv_timeout(patient(bound)) {
                Ok(got) => self.got = Some(got),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => panic!("the thread of a task panicked"),
            }
        }
        self.got.is_some()
    }

    /// The call's result, if it has returned within `bound`.
    pub fn result(&mut self, bound: Duration) -> Option<&T> {
        self.within(bound);
        self.got.as_ref()
    }

    /// Whether the thread sleeps in the system call `nr` right now.
    pub fn asleep_in(&self, nr: libc::c_long) -> bool {
        // "running", or the number of the call in which the thread sleeps and its arguments.
        fs::read_to_string(format!("/proc/self/task/{}/syscall", self.tid))
            .ok()
            .and_then(|text| {
                text.split_whitespace()
                    .next()
                    .and_then(|nr| nr.parse().ok())
            })
            .is_some_and(|at: libc::c_long| at == nr)
    }

    /// Sends SIGUSR1 to the thread, which must have a handler (see [`handle_signal`]).
    pub fn signal(&self) {
        self.signaller()();
    }

    /// What [`Task::signal`] does, for another thread to do.
    pub fn signaller(&self) -> impl Fn() + Send + Sync {
        let thread = self.thread;
        move || {
            // ESRCH: the thread is gone already.
            let _ = pthread_kill(thread, Signal::SIGUSR1);
        }
    }

    /// Ends the task: signals the thread until its call returns. `None` when it does not.
    pub fn stop(mut self) -> Option<T> {
        let end = Instant::now() + patient(MUST);
        while !self.within(Duration::from_millis(50)) && Instant::now() < end {
            self.signal();
        }
        if self.got.is_some() {
            if let Some(handle) = self.handle.take() {
                let _ = handle.join();
            }
        }
        self.got.take()
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// Installs a handler for SIGUSR1 that does nothing: calls are interrupted, and begun anew by the
/// kernel only if `restart`.
pub fn handle_signal(restart: bool) {
    let flags = if restart {
        SaFlags::SA_RESTART
    } else {
        SaFlags::empty()
    };
    let action = SigAction::new(SigHandler::Handler(nothing), flags, SigSet::empty());
    // SAFETY: the handler does nothing, so it is async-signal-safe.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.expect("SIGUSR1 can be handled");
}
