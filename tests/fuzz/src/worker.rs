// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The process that runs programs. If it hangs or dies, another takes its place. It is told a program as text, and
//! answers with a line.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ktap::Outcome;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::mman::{mmap_anonymous, MapFlags, ProtFlags};
use nix::sys::signal::{kill, Signal};
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use nix::unistd::{ForkResult, Pid};

use crate::call::{Call, Program};
use crate::coverage::{Block, Code, Of, Trace};
use crate::execute::{Result as Returned, Shared, Thread};
use crate::scene::Scene;

/// A program that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// What a program did.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// What each call returned.
    pub results: Vec<Returned>,
    /// The blocks that were reached: all, or those that were not known.
    pub blocks: Vec<Block>,
}

/// Which blocks are to be told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tell {
    /// Those that were not seen before.
    New,
    /// All.
    All,
}

/// The worker, as its master sees it.
pub struct Worker {
    pid: Pid,
    to: File,
    from: File,
    place: &'static AtomicUsize,
    running: Option<(Program, Instant)>,
    broken: bool,
}

impl AsFd for Worker {
    /// It can be read when the worker has answered, or died.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.from.as_fd()
    }
}

impl Worker {
    /// Starts the one of this number; these blocks are known. The caller has one thread.
    pub fn start(number: u32, seen: &HashSet<Block>) -> Outcome<Self> {
        let (its_input, to) = nix::unistd::pipe()?;
        let (from, its_output) = nix::unistd::pipe()?;
        let word = std::num::NonZeroUsize::MIN.saturating_add(4095);
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, which stays for good: zeroes are an atomic, and a page is aligned for it.
        let place = unsafe {
            &*mmap_anonymous(None, word, both, MapFlags::MAP_SHARED)?
                .as_ptr()
                .cast::<AtomicUsize>()
        };
        // SAFETY: the caller has one thread, so the child may do what it likes.
        match unsafe { nix::unistd::fork() }? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                to: to.into(),
                from: from.into(),
                place,
                running: None,
                broken: false,
            }),
            ForkResult::Child => {
                drop((to, from));
                // SAFETY: it ends with its master, and not later.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                let mut output = File::from(its_output);
                let work = || work(number, its_input.into(), &mut output, seen.clone(), place);
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                if !matches!(outcome, Ok(Ok(()))) {
                    eprintln!("# the worker ends: {outcome:?}");
                }
                // SAFETY: ends the process without what belongs to its parent.
                unsafe { libc::_exit(1) }
            }
        }
    }

    /// Runs a program.
    ///
    /// # Errors
    ///
    /// As [`Worker::finish`].
    pub fn run(&mut self, program: &Program, tell: Tell) -> Result<Reply, String> {
        self.begin(program.clone(), tell);
        self.finish().1
    }

    /// Begins to run a program.
    pub fn begin(&mut self, program: Program, tell: Tell) {
        let mode = if tell == Tell::All { "all" } else { "new" };
        // If it is gone, it will not answer.
        let _ = write!(self.to, "{mode}\n{program}.\n");
        self.running = Some((program, Instant::now()));
    }

    /// The program that runs, and since when.
    pub fn running(&self) -> Option<&(Program, Instant)> {
        self.running.as_ref()
    }

    /// Waits for the end of the program that was begun, and says what it did.
    ///
    /// # Errors
    ///
    /// What is wrong if there is no answer. The worker is gone then, or cannot be killed.
    pub fn finish(&mut self) -> (Program, Result<Reply, String>) {
        let (program, since) = self
            .running
            .take()
            .unwrap_or_else(|| (Program::default(), Instant::now()));
        let end = since + ktap::patient(LIMIT);
        let reply = match self.line(end).and_then(|line| parse(&line)) {
            Ok(reply) if reply.results.len() == program.0.len() => Ok(reply),
            other => {
                self.broken = true;
                let why = other.map_or_else(|e| e, |_| "an answer to something else".into());
                let place = self.place.load(Ordering::Relaxed);
                let call = program
                    .0
                    .get(place)
                    .map_or_else(|| "the end".into(), ToString::to_string);
                let stacks = ktap::process::stacks(self.pid);
                let gone = if self.kill() {
                    ""
                } else {
                    "; it cannot be killed"
                };
                Err(format!(
                    "{why}, in call {} ({call}){gone}\n{stacks}",
                    place + 1
                ))
            }
        };
        (program, reply)
    }

    /// Whether its program takes too long.
    pub fn is_overdue(&self) -> bool {
        self.running()
            .is_some_and(|(_, since)| since.elapsed() > ktap::patient(LIMIT))
    }

    /// Whether it has failed once.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    fn line(&mut self, end: Instant) -> Result<String, String> {
        let mut line = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let ms = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
            match nix::poll::poll(&mut [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)], ms) {
                Ok(0) => return Err("a call does not return".into()),
                Ok(_) => (),
                Err(e) => return Err(e.to_string()),
            }
            match self.from.read(&mut chunk) {
                Ok(0) => return Err("the worker died".into()),
                Ok(len) => line.extend_from_slice(&chunk[..len]),
                Err(e) => return Err(e.to_string()),
            }
            if line.last() == Some(&b'\n') {
                return String::from_utf8(line).map_err(|e| e.to_string());
            }
        }
    }

    // Kills it; says whether it is gone.
    fn kill(&mut self) -> bool {
        let _ = kill(self.pid, Signal::SIGKILL);
        let end = Instant::now() + ktap::patient(Duration::from_secs(20));
        while Instant::now() < end {
            if !matches!(
                waitpid(self.pid, Some(WaitPidFlag::WNOHANG)),
                Ok(WaitStatus::StillAlive)
            ) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.broken {
            self.kill();
        }
    }
}

fn parse(line: &str) -> Result<Reply, String> {
    let (results, blocks) = line
        .trim_end()
        .split_once('|')
        .ok_or_else(|| format!("an answer: {line}"))?;
    let mut reply = Reply::default();
    for word in results.split_whitespace() {
        reply
            .results
            .push(word.parse().map_err(|_| format!("a result: {word}"))?);
    }
    for word in blocks.split_whitespace() {
        reply.blocks.push(word.parse()?);
    }
    Ok(reply)
}

// The worker's own side: this thread has the work of others traced, and another makes the calls.
fn work(
    number: u32,
    input: File,
    output: &mut File,
    seen: HashSet<Block>,
    place: &AtomicUsize,
) -> Outcome {
    let others = Trace::begin(Of::Others)?;
    let scene = Scene::new(number)?;
    let shared = Shared::new(&scene);
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| calls(input, output, seen, place, &shared, others));
        calls
            .join()
            .unwrap_or_else(|_| Err("a thread ended early".into()))
    })
}

fn calls(
    input: File,
    output: &mut File,
    mut seen: HashSet<Block>,
    place: &AtomicUsize,
    shared: &Shared<'_>,
    others: Option<Trace>,
) -> Outcome {
    let (to_aside, aside_from) = mpsc::channel::<Option<(usize, Call)>>();
    let (aside_to, from_aside) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || aside(shared, &aside_from, &aside_to));
        // It ends with the channel, so that must not outlive this.
        let to_aside = to_aside;
        let mut thread = Thread::new(shared)?;
        let own = Trace::begin(Of::Thread)?;
        let code = Code::now();
        let mut input = BufReader::new(input);
        let mut addresses = Vec::new();
        loop {
            let Some((tell, program)) = next(&mut input)? else {
                return Ok(());
            };
            let mut results = vec![0; program.0.len()];
            let mut is_aside = false;
            for (n, call) in program.0.into_iter().enumerate() {
                place.store(n, Ordering::Relaxed);
                if call.aside {
                    is_aside = true;
                    let _ = to_aside.send(Some((n, call)));
                } else {
                    results[n] = thread.run(&call);
                }
            }
            place.store(results.len(), Ordering::Relaxed);
            if is_aside {
                let _ = to_aside.send(None);
                while let Some((n, result, mut more)) = from_aside.recv()? {
                    results[n] = result;
                    addresses.append(&mut more);
                }
            }
            thread.end();
            shared.end()?;
            for trace in [&own, &others].into_iter().flatten() {
                trace.take(|address| addresses.push(address));
            }
            addresses.sort_unstable();
            addresses.dedup();
            let mut blocks = Vec::new();
            for block in addresses
                .drain(..)
                .filter_map(|address| code.block(address))
            {
                if seen.insert(block) || tell == Tell::All {
                    blocks.push(block);
                }
            }
            let mut line = String::new();
            results
                .iter()
                .for_each(|result| line += &format!("{result} "));
            line.push('|');
            blocks.iter().for_each(|block| line += &format!("{block} "));
            line.push('\n');
            output.write_all(line.as_bytes())?;
        }
    })
}

type FromAside = Option<(usize, Returned, Vec<u64>)>;

// The second thread.
fn aside(
    shared: &Shared<'_>,
    from: &mpsc::Receiver<Option<(usize, Call)>>,
    to: &mpsc::Sender<FromAside>,
) -> Outcome {
    let mut thread = Thread::new(shared)?;
    let own = Trace::begin(Of::Thread)?;
    while let Ok(next) = from.recv() {
        let answer = next.map(|(n, call)| {
            let result = thread.run(&call);
            let mut addresses = Vec::new();
            if let Some(trace) = &own {
                trace.take(|address| addresses.push(address));
            }
            (n, result, addresses)
        });
        if answer.is_none() {
            thread.end();
        }
        to.send(answer)?;
    }
    Ok(())
}

fn next(input: &mut impl BufRead) -> Outcome<Option<(Tell, Program)>> {
    let mut text = String::new();
    let mut lines = input.lines();
    let tell = match lines.next().transpose()?.as_deref() {
        None => return Ok(None),
        Some("all") => Tell::All,
        Some(_) => Tell::New,
    };
    for line in lines {
        let line = line?;
        if line == "." {
            return Ok(Some((tell, text.parse()?)));
        }
        text += &line;
        text.push('\n');
    }
    Ok(None)
}
