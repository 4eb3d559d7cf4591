// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Programs: those that end, within a bound, and those that stay.

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ktap::{ensure, Outcome, ResultExt};
use nix::sys::signal::{killpg, Signal};
use nix::unistd::Pid;

/// How long a program that talks to a fabric may take, unless said otherwise: a bound against hanging,
/// no measure, as the guest may be emulated and busy.
pub const LIMIT: Duration = Duration::from_secs(60);

/// How long a killed program may take to be gone.
const GONE: Duration = Duration::from_secs(10);

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The command.
    pub command: String,
    /// Its exit status, or "signal N".
    pub status: String,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl Ended {
    /// Fails unless it ended with status 0.
    pub fn ok(self) -> Outcome<Self> {
        ensure!(
            self.status == "0",
            "{}: exit status {}: {}",
            self.command,
            self.status,
            end_of(&format!("{}{}", self.stdout, self.stderr))
        );
        Ok(self)
    }

    /// Fails unless it ended with this status.
    pub fn with_status(self, status: &str) -> Outcome<Self> {
        ensure!(
            self.status == status,
            "{}: exit status {}, not {status}: {}",
            self.command,
            self.status,
            end_of(&format!("{}{}", self.stdout, self.stderr))
        );
        Ok(self)
    }

    /// Fails unless it printed this.
    pub fn says(self, part: &str) -> Outcome<Self> {
        ensure!(
            self.stdout.contains(part) || self.stderr.contains(part),
            "{}: does not say {part:?} but: {}",
            self.command,
            end_of(&format!("{}{}", self.stdout, self.stderr))
        );
        Ok(self)
    }
}

// The last of a text, for a message.
fn end_of(text: &str) -> String {
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines[lines.len().saturating_sub(6)..].join(" | ")
}

fn told(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => code.to_string(),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "?".to_owned(),
    }
}

// Words are split at blanks; a word in single quotes may hold some.
fn words(command: &str) -> Vec<String> {
    command
        .split('\'')
        .enumerate()
        .flat_map(|(n, part)| -> Vec<String> {
            if n % 2 == 1 {
                vec![part.to_owned()]
            } else {
                part.split_whitespace().map(str::to_owned).collect()
            }
        })
        .collect()
}

fn prepare(command: &str) -> Outcome<Command> {
    let words = words(command);
    let Some((program, arguments)) = words.split_first() else {
        return Err("an empty command".into());
    };
    let mut prepared = Command::new(program);
    prepared.args(arguments).process_group(0);
    Ok(prepared)
}

/// Runs a command to its end.
pub fn run(command: &str) -> Outcome<Ended> {
    run_for(command, LIMIT)
}

/// The same with a bound of its own; a program that does not end in time is a failure.
pub fn run_for(command: &str, limit: Duration) -> Outcome<Ended> {
    let mut stdout = unnamed()?;
    let mut stderr = unnamed()?;
    let mut child = prepare(command)?
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .what(command)?;
    let status = wait(&mut child, limit).what(command)?;
    Ok(Ended {
        command: command.to_owned(),
        status: told(status),
        stdout: content(&mut stdout)?,
        stderr: content(&mut stderr)?,
    })
}

// A file without a name, which nobody waits for, unlike the end of a pipe.
fn unnamed() -> Outcome<File> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "output-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = std::env::temp_dir().join(name);
    let file = File::options()
        .create_new(true)
        .read(true)
        .append(true)
        .open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn content(file: &mut File) -> Outcome<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(file, &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn group(child: &Child) -> Outcome<Pid> {
    Ok(Pid::from_raw(i32::try_from(child.id())?))
}

// Waits for the end; a program that does not come to it is killed.
fn wait(child: &mut Child, limit: Duration) -> Outcome<ExitStatus> {
    let end = Instant::now() + limit;
    let mut nap = Duration::from_millis(2);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            let stacks = ktap::process::stacks(group(child)?);
            for line in stacks.lines() {
                println!("  # {line}");
            }
            kill(child)?;
            return Err(format!("not done after {} s", limit.as_secs()).into());
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(50));
    }
}

// Kills a program and its children; fails if it cannot be killed.
fn kill(child: &mut Child) -> Outcome {
    // Who is gone already needs no signal.
    let _ = killpg(group(child)?, Signal::SIGKILL);
    let end = Instant::now() + GONE;
    while child.try_wait()?.is_none() {
        if Instant::now() >= end {
            return Err(format!("process {} cannot be killed", child.id()).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Runs a command again and again until it says something: for a server that does not tell when it is
/// ready.
pub fn run_until(command: &str, says: &str) -> Outcome {
    let end = Instant::now() + LIMIT;
    loop {
        let last = run(command)?.says(says);
        match last {
            Ok(_) => return Ok(()),
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(50)),
            Err(why) => return Err(why),
        }
    }
}

/// A program that stays until it is told to go. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    command: String,
    child: Child,
    stdin: Option<ChildStdin>,
    log: PathBuf,
}

impl Running {
    /// Starts a command, with its output in a file.
    pub fn start(command: &str, log: &Path) -> Outcome<Self> {
        let file = File::create(log).what(log.display())?;
        let mut child = prepare(command)?
            .stdin(Stdio::piped())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .what(command)?;
        let stdin = child.stdin.take();
        Ok(Self {
            command: command.to_owned(),
            child,
            stdin,
            log: log.to_owned(),
        })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    pub fn output(&self) -> String {
        fs::read(&self.log).map_or(String::new(), |bytes| {
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// Types a line.
    pub fn type_line(&mut self, line: &str) -> Outcome {
        match &mut self.stdin {
            Some(stdin) => Ok(writeln!(stdin, "{line}")?),
            None => Err("its input is closed".into()),
        }
    }

    /// Waits until its output holds something.
    pub fn wait_for(&mut self, what: &str, limit: Duration) -> Outcome {
        self.wait_until(what, limit, |output| output.contains(what))
    }

    /// Waits until its output is as wanted.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&str) -> bool,
    ) -> Outcome {
        let end = Instant::now() + limit;
        loop {
            // Looked at first: what it says before it ends counts.
            let status = self.child.try_wait()?;
            let output = self.output();
            if done(&output) {
                return Ok(());
            }
            if let Some(status) = status {
                return Err(format!(
                    "{}: ended with {}: {}",
                    self.command,
                    told(status),
                    end_of(&output)
                )
                .into());
            }
            if Instant::now() >= end {
                return Err(format!(
                    "{}: not within {} s: {what}; it says: {}",
                    self.command,
                    limit.as_secs(),
                    end_of(&output)
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Outcome {
        Ok(nix::sys::signal::kill(group(&self.child)?, signal)?)
    }

    /// True while it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Asks it to go, and waits for that; returns its exit status.
    pub fn stop(mut self, signal: Signal, limit: Duration) -> Outcome<String> {
        self.signal(signal)?;
        let status = wait(&mut self.child, limit).what(&self.command)?;
        Ok(told(status))
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(mut self) -> Outcome {
        kill(&mut self.child).what(&self.command)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(why) = kill(&mut self.child) {
            println!("  # {}: {why:?}", self.command);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_quotes() {
        assert_eq!(words("a  'b c' d"), ["a", "b c", "d"]);
    }

    #[test]
    fn an_end_is_told() {
        let ended = run("sh -c 'echo out; echo err >&2; exit 3'").expect("it runs");
        assert_eq!(
            (&*ended.status, &*ended.stdout, &*ended.stderr),
            ("3", "out\n", "err\n")
        );
        assert!(ended.ok().is_err());
        let killed = run("sh -c 'kill -9 $$'").expect("it runs");
        assert_eq!(killed.status, "signal 9");
        assert!(run_until("echo ready", "ready").is_ok());
    }

    #[test]
    fn a_hang_is_a_failure() {
        let hung = run_for("sleep 100", Duration::from_millis(100));
        assert!(format!("{hung:?}").contains("not done after"), "{hung:?}");
    }
}
