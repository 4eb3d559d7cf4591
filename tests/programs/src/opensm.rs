// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! OpenSM: started, watched by its log and by its console.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ktap::{ensure, Outcome, ResultExt};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::command::{run, Running};
use crate::text;

/// How long a sweep of a small fabric may take, with retries.
pub const SWEEP: Duration = Duration::from_secs(60);

/// How it is started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// GUID of the port to bind to.
    pub guid: String,
    /// More options of its command line.
    pub more: String,
}

/// A subnet manager.
pub struct OpenSm {
    folder: PathBuf,
    seen: usize,
    process: Process,
}

enum Process {
    Foreground(Running),
    Daemon(Pid),
}

impl OpenSm {
    // Options file and folders; the words before and behind the program's name.
    fn command(folder: &Path, options: &Options) -> Outcome<String> {
        fs::create_dir_all(folder)?;
        let (log, conf) = (folder.join("log"), folder.join("conf"));
        // An emulated guest can stand still for a moment; a buffered log would tell nothing.
        // A standby asks its master every now and then: often, so that a test need not wait for a minute.
        fs::write(
            &conf,
            "force_log_flush TRUE\ntransaction_timeout 1000\ntransaction_retries 5\n\
             sminfo_polling_timeout 1000\npolling_retry_number 3\n",
        )?;
        let _ = fs::remove_file(&log);
        let folder = folder.display();
        Ok(format!(
            "env OSM_CACHE_DIR={folder} OSM_TMP_DIR={folder} opensm -F {} -f {} -g {} {}",
            conf.display(),
            log.display(),
            options.guid,
            options.more
        ))
    }

    /// Starts it in the foreground, with a console on its input. Files are to be in `folder`.
    pub fn start(folder: &Path, options: &Options) -> Outcome<Self> {
        let command = format!("{} --console local", Self::command(folder, options)?);
        Ok(Self {
            folder: folder.to_owned(),
            seen: 0,
            process: Process::Foreground(Running::start(&command, &folder.join("output"))?),
        })
    }

    /// Starts it as a daemon.
    pub fn daemon(folder: &Path, options: &Options) -> Outcome<Self> {
        let pid_file = folder.join("pid");
        let _ = fs::remove_file(&pid_file);
        run(&format!(
            "{} -B --pidfile {}",
            Self::command(folder, options)?,
            pid_file.display()
        ))?
        .ok()?;
        let end = Instant::now() + SWEEP;
        let pid = loop {
            let text = fs::read_to_string(&pid_file).unwrap_or_default();
            if let Ok(pid) = text.trim().parse() {
                break Pid::from_raw(pid);
            }
            ensure!(Instant::now() < end, "the daemon wrote no process id");
            std::thread::sleep(Duration::from_millis(20));
        };
        Ok(Self {
            folder: folder.to_owned(),
            seen: 0,
            process: Process::Daemon(pid),
        })
    }

    /// Its process.
    pub fn pid(&self) -> Outcome<Pid> {
        Ok(match &self.process {
            Process::Foreground(running) => Pid::from_raw(i32::try_from(running.pid())?),
            Process::Daemon(pid) => *pid,
        })
    }

    /// Its log.
    pub fn log(&self) -> String {
        fs::read(self.folder.join("log")).map_or(String::new(), |bytes| {
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// True while it has not ended.
    pub fn is_running(&mut self) -> bool {
        match &mut self.process {
            Process::Foreground(running) => running.is_running(),
            Process::Daemon(pid) => kill(*pid, None).is_ok(),
        }
    }

    /// Waits until its log, from the last mark on, holds something; marks the place behind it.
    pub fn wait_for(&mut self, what: &str, limit: Duration) -> Outcome {
        let end = Instant::now() + limit;
        loop {
            let running = self.is_running();
            let log = self.log();
            let new = log.get(self.seen..).unwrap_or_default();
            if let Some(at) = new.find(what) {
                self.seen += at + what.len();
                return Ok(());
            }
            if !running || Instant::now() >= end {
                let tail: Vec<_> = new.lines().filter(|line| !line.is_empty()).collect();
                let tail = tail[tail.len().saturating_sub(6)..].join(" | ");
                let why = if running { "not in time" } else { "it ended" };
                return Err(format!("opensm: no {what:?} in its log: {why}: {tail}").into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// From here on, [`wait_for`](Self::wait_for) looks only at what is new.
    pub fn mark(&mut self) {
        self.seen = self.log().len();
    }

    /// Waits for the end of the next sweep.
    pub fn wait_up(&mut self, limit: Duration) -> Outcome {
        self.wait_for("SUBNET UP", limit)
    }

    /// Tells it to sweep anew, and waits for the end of that.
    pub fn sweep(&mut self, limit: Duration) -> Outcome {
        self.mark();
        self.signal(Signal::SIGHUP)?;
        self.wait_up(limit)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Outcome {
        kill(self.pid()?, signal).what("opensm")
    }

    /// A figure of the console's "status" (foreground only).
    pub fn status(&mut self, label: &str) -> Outcome<u64> {
        let Process::Foreground(running) = &mut self.process else {
            return Err("a daemon has no console".into());
        };
        let before = running.output().len();
        running.type_line("status")?;
        running.wait_until("the console's status", SWEEP, |output| {
            output
                .get(before..)
                .unwrap_or_default()
                .contains("Known SMs")
        })?;
        let output = running.output();
        let new = output.get(before..).unwrap_or_default();
        match text::value(new, label) {
            Some(value) => Ok(value.parse()?),
            None => Err(format!("the console's status has no {label:?}").into()),
        }
    }

    /// Errors in its log: those lines that hold an error number, without time and thread.
    pub fn errors(&self) -> Vec<String> {
        self.log()
            .lines()
            .filter(|line| line.contains(" ERR "))
            .filter_map(|line| line.split_once("-> ").map(|(_, rest)| rest.to_owned()))
            .collect()
    }

    /// Asks it to go, waits for that, and returns its exit status (0 of a daemon).
    pub fn stop(self, limit: Duration) -> Outcome<String> {
        self.end(Signal::SIGTERM, limit)
    }

    /// Kills it at once.
    pub fn kill(self, limit: Duration) -> Outcome<String> {
        self.end(Signal::SIGKILL, limit)
    }

    fn end(mut self, signal: Signal, limit: Duration) -> Outcome<String> {
        match std::mem::replace(&mut self.process, Process::Daemon(Pid::from_raw(0))) {
            Process::Foreground(running) => running.stop(signal, limit),
            Process::Daemon(pid) => {
                kill(pid, signal)?;
                ktap::wait_until("the daemon is gone", limit, || kill(pid, None).is_err())?;
                Ok("0".to_owned())
            }
        }
    }
}

impl Drop for OpenSm {
    fn drop(&mut self) {
        if let Process::Daemon(pid) = self.process {
            if pid.as_raw() > 0 {
                let _ = kill(pid, Signal::SIGKILL);
            }
        }
    }
}
