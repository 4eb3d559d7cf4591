// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The fuzzer's loop: make a program, run it, keep it if it reaches something new, look what the kernel says.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ktap::{module, Outcome, ResultExt};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use selftests::vhca::Module;

use crate::call::{Op, Program};
use crate::corpus;
use crate::coverage::{self, Block, Blocks, Code};
use crate::execute;
use crate::generate::{tame, Generator};
use crate::kernel::Log;
use crate::scene::{self, Exclusive};
use crate::worker::{Reply, Tell, Worker};

/// What is wanted.
pub struct Wish {
    /// The generator's seed.
    pub seed: u64,
    /// Calls to make.
    pub calls: u64,
    /// Ends after this time, whatever was made.
    pub time: Duration,
    /// Programs to begin with.
    pub corpus: Option<PathBuf>,
    /// Where results go: finds, the corpus, blocks that were reached.
    pub out: PathBuf,
    /// How many finds end it.
    pub finds: usize,
    /// How many programs run at once.
    pub workers: u32,
}

/// So many programs that ran before are told with a find.
const HISTORY: usize = 6;
const PROGRESS: Duration = Duration::from_secs(20);

struct Fuzzer {
    wish: Wish,
    log: Log,
    workers: Vec<Worker>,
    seen: HashSet<Block>,
    /// What was run last, the youngest at the end.
    history: VecDeque<Program>,
    finds: usize,
    calls: u64,
    programs: u64,
    /// Of each kind of call: those that succeeded, and those that failed.
    tally: Vec<(Op, u64, u64)>,
}

/// Runs the fuzzer. The module must not be loaded; it is not, afterwards. Returns the number of finds.
pub fn run(wish: Wish) -> Outcome<usize> {
    fs::create_dir_all(&wish.out)?;
    let mut log = Log::now()?;
    let vhca = Module::load()?;
    let mode = Exclusive::begin()?;
    let (loaded, addresses) = coverage::of(module::load);
    loaded.what("loading ib_umad")?;
    let code = Code::now();
    let mut seen: HashSet<Block> = addresses
        .iter()
        .filter_map(|address| code.block(*address))
        .collect();
    scene::allow_failures()?;
    let early = log.fault()?;
    let mut fuzzer = Fuzzer {
        workers: (0..wish.workers.max(1))
            .map(|n| Worker::start(n, &seen))
            .collect::<Outcome<_>>()?,
        log,
        seen: seen.clone(),
        history: VecDeque::new(),
        finds: 0,
        calls: 0,
        programs: 0,
        tally: Op::ALL.map(|op| (op, 0, 0)).to_vec(),
        wish,
    };
    if let Some(lines) = early {
        fuzzer.find(
            "the kernel reports a fault while the module is loaded",
            &lines,
            &Program::default(),
        )?;
    }
    let known = fuzzer.explore()?;
    let chosen = fuzzer.minimise(&known)?;
    seen = std::mem::take(&mut fuzzer.seen);
    corpus::write(&fuzzer.wish.out.join("corpus"), &chosen)?;
    fuzzer.tell();

    let Fuzzer {
        workers,
        mut log,
        mut finds,
        wish,
        ..
    } = fuzzer;
    drop(workers);
    let unload = || module::unload_when_idle(Duration::from_secs(30));
    let (unloaded, addresses) = coverage::of(|| unload().map_err(|_| ()));
    seen.extend(addresses.iter().filter_map(|address| code.block(*address)));
    if unloaded.is_err() {
        println!("find: the module cannot be unloaded");
        finds += 1;
    }
    if let Some(lines) = log.fault()? {
        println!(
            "find: the kernel reports a fault at the end\n{}",
            lines.join("\n")
        );
        finds += 1;
    }
    drop((mode, vhca));
    let blocks: Blocks = seen.into_iter().collect();
    let lines: Vec<String> = blocks.iter().map(|block| format!("{block}\n")).collect();
    let text = lines.concat();
    fs::write(wish.out.join("reached"), text)?;
    println!(
        "{} basic blocks reached, {} programs in the corpus, {finds} finds",
        blocks.len(),
        chosen.len()
    );
    Ok(finds)
}

impl Fuzzer {
    // Runs programs until there were enough calls; returns those that reached something new.
    fn explore(&mut self) -> Outcome<Vec<Program>> {
        let mut known = Vec::new();
        if let Some(folder) = &self.wish.corpus {
            for (_, mut program) in corpus::read(folder)? {
                tame(&mut program);
                known.push(program);
            }
        }
        for program in &known {
            self.one(program, Tell::New)?;
        }
        let mut generator = Generator::new(self.wish.seed);
        let begin = Instant::now();
        let mut told = begin;
        loop {
            let go_on = self.calls < self.wish.calls
                && begin.elapsed() < self.wish.time
                && self.finds < self.wish.finds;
            for n in 0..self.workers.len() {
                if go_on && self.workers[n].running().is_none() {
                    self.revive(n)?;
                    let program = generator.program(&known);
                    self.remember(&program);
                    self.workers[n].begin(program, Tell::New);
                }
            }
            let Some(n) = self.ready()? else { break };
            let (program, reply) = self.workers[n].finish();
            let is_new = reply
                .as_ref()
                .is_ok_and(|reply| reply.blocks.iter().any(|block| !self.seen.contains(block)));
            self.judge(&program, reply)?;
            if is_new {
                known.push(program);
            }
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                println!(
                    "{} s: {} calls, {} programs, {} blocks, {} programs kept, {} finds",
                    begin.elapsed().as_secs(),
                    self.calls,
                    self.programs,
                    self.seen.len(),
                    known.len(),
                    self.finds
                );
            }
        }
        println!(
            "seed {}: {} calls in {} programs, {} calls/s",
            self.wish.seed,
            self.calls,
            self.programs,
            self.calls / begin.elapsed().as_secs().max(1)
        );
        Ok(known)
    }

    // Waits until a worker has an answer, or none for too long; nothing if none has a program.
    fn ready(&self) -> Outcome<Option<usize>> {
        let busy: Vec<usize> = (0..self.workers.len())
            .filter(|n| self.workers[*n].running().is_some())
            .collect();
        if busy.is_empty() {
            return Ok(None);
        }
        loop {
            let mut fds: Vec<_> = busy
                .iter()
                .map(|n| PollFd::new(self.workers[*n].as_fd(), PollFlags::POLLIN))
                .collect();
            match nix::poll::poll(&mut fds, 1000_u16) {
                Ok(_) | Err(Errno::EINTR) => (),
                Err(e) => return Err(e.into()),
            }
            let answered = fds.iter().position(|fd| fd.any().unwrap_or(true));
            let overdue = || busy.iter().position(|n| self.workers[*n].is_overdue());
            if let Some(at) = answered.or_else(overdue) {
                return Ok(Some(busy[at]));
            }
        }
    }

    fn revive(&mut self, n: usize) -> Outcome {
        if self.workers[n].is_broken() {
            self.workers[n] = Worker::start(u32::try_from(n)?, &self.seen)?;
        }
        Ok(())
    }

    fn remember(&mut self, program: &Program) {
        self.history.push_back(program.clone());
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    // Runs one program while no other runs.
    fn one(&mut self, program: &Program, tell: Tell) -> Outcome<Reply> {
        self.revive(0)?;
        self.remember(program);
        let reply = self.workers[0].run(program, tell);
        self.judge(program, reply)
    }

    // Counts what a program did, and sees to what it broke.
    fn judge(&mut self, program: &Program, reply: Result<Reply, String>) -> Outcome<Reply> {
        let reply = match reply {
            Ok(reply) => reply,
            Err(why) => {
                // What the kernel says comes a moment later.
                std::thread::sleep(Duration::from_millis(200));
                let lines = self.log.fault()?.unwrap_or_default();
                self.find(&why, &lines, program)?;
                return Ok(Reply::default());
            }
        };
        self.programs += 1;
        for (call, result) in program.0.iter().zip(&reply.results) {
            self.calls += 1;
            if let Some((_, good, bad)) = self.tally.iter_mut().find(|(op, ..)| *op == call.op) {
                *(if *result >= 0 { good } else { bad }) += 1;
            }
        }
        self.seen.extend(&reply.blocks);
        if let Some(lines) = self.log.fault()? {
            self.find("the kernel reports a fault", &lines, program)?;
        }
        Ok(reply)
    }

    // Prints what was found, and writes it to a file that can be replayed.
    fn find(&mut self, what: &str, log: &[String], program: &Program) -> Outcome {
        self.finds += 1;
        let mut text = format!(
            "# find {} of seed {}: {}\n",
            self.finds,
            self.wish.seed,
            what.trim_end().replace('\n', "\n# ")
        );
        log.iter()
            .for_each(|line| text += &format!("# log: {line}\n"));
        let others = self
            .workers
            .iter()
            .filter_map(Worker::running)
            .map(|(other, _)| ("at the same time", other));
        let before = self.history.iter().map(|old| ("not long before", old));
        for (when, old) in before.chain(others) {
            text += &format!("# {when}:\n");
            old.to_string()
                .lines()
                .for_each(|line| text += &format!("#   {line}\n"));
        }
        text += &program.to_string();
        println!("{text}");
        fs::write(self.wish.out.join(format!("find-{}.txt", self.finds)), text)?;
        Ok(())
    }

    // The few programs that reach what all do, without the calls that they do not need for it.
    fn minimise(&mut self, known: &[Program]) -> Outcome<Vec<(Program, usize)>> {
        if self.seen.is_empty() || self.finds >= self.wish.finds {
            return Ok(Vec::new());
        }
        let begin = Instant::now();
        let mut reached = Vec::new();
        for program in known {
            reached.push(
                self.one(program, Tell::All)?
                    .blocks
                    .into_iter()
                    .collect::<Blocks>(),
            );
        }
        let mut small = Vec::new();
        for (n, new) in corpus::choose(&reached) {
            let mut program = known[n].clone();
            let mut at = program.0.len();
            // The time for this is bounded: what is not made small stays as it is.
            while at > 0 && begin.elapsed() < self.wish.time / 3 {
                at -= 1;
                let mut shorter = program.clone();
                shorter.0.remove(at);
                let still: Blocks = self.one(&shorter, Tell::All)?.blocks.into_iter().collect();
                if new.is_subset(&still) {
                    program = shorter;
                }
            }
            small.push((program, new.len()));
        }
        println!(
            "the corpus was made small in {} s",
            begin.elapsed().as_secs()
        );
        Ok(small)
    }

    fn tell(&self) {
        println!("in all {} calls:", self.calls);
        for (op, good, bad) in &self.tally {
            println!(
                "  {:<12} {good:>9} succeeded {bad:>9} failed",
                op.spec().name
            );
        }
    }
}

/// Runs programs, and prints what each call returned. Returns the number of finds.
pub fn replay(files: &[PathBuf], rounds: u32) -> Outcome<usize> {
    let mut log = Log::now()?;
    let vhca = Module::load()?;
    let mode = Exclusive::begin()?;
    let code = Code::now();
    let mut finds = 0;
    let mut worker = Worker::start(0, &HashSet::new())?;
    for file in files {
        for (path, program) in corpus::read(file)? {
            for _ in 0..rounds {
                if worker.is_broken() {
                    worker = Worker::start(0, &HashSet::new())?;
                }
                println!("== {}", path.display());
                match worker.run(&program, Tell::All) {
                    Ok(reply) => {
                        for (call, result) in program.0.iter().zip(&reply.results) {
                            println!("{call}  # {}", execute::show(*result));
                        }
                        println!("# {} basic blocks", reply.blocks.len());
                    }
                    Err(why) => {
                        println!("{program}find: {why}");
                        finds += 1;
                    }
                }
                if let Some(lines) = log.fault()? {
                    println!("find: the kernel reports a fault\n{}", lines.join("\n"));
                    finds += 1;
                }
            }
        }
    }
    drop((worker, mode, vhca, code));
    Ok(finds)
}
