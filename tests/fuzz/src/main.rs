// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umad-fuzz`: fuzzes, replays programs, and tells what was reached.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use ktap::{Failure, Outcome};
use umad_fuzz::{report, run};

#[derive(Parser)]
#[command(about = "Fuzzes the user ABI of ib_umad")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Makes and runs programs; loads the module (UMAD_KO_RUST, or UMAD_KO_C with UMAD_IMPL=c) before, and unloads it after.
    Run {
        /// Where the generator begins.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Calls to make.
        #[arg(long, default_value_t = 100_000)]
        calls: u64,
        /// Seconds after which it ends in any case.
        #[arg(long, default_value_t = 3600)]
        seconds: u64,
        /// Programs to begin with.
        #[arg(long)]
        corpus: Option<PathBuf>,
        /// Folder for the corpus, finds, and what was reached.
        #[arg(long)]
        out: PathBuf,
        /// Finds after which it ends.
        #[arg(long, default_value_t = 5)]
        finds: usize,
        /// How many programs run at once.
        #[arg(long, default_value_t = 3)]
        workers: u32,
    },
    /// Runs programs (files, or folders of them) on the loaded module, and prints what each call returned.
    Replay {
        /// How often each.
        #[arg(long, default_value_t = 1)]
        rounds: u32,
        /// Programs.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Tells which basic blocks were reached, and lists the others.
    Report {
        /// What `objdump -drlC --no-show-raw-insn`, and then `objdump -rC`, say of ib_umad.ko.
        #[arg(long)]
        disassembly: PathBuf,
        /// Files `reached` of runs.
        #[arg(required = true)]
        reached: Vec<PathBuf>,
        /// Where the list goes.
        #[arg(long)]
        list: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    match begin(Arguments::parse().command) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(Failure::Failed(why) | Failure::Skipped(why)) => {
            eprintln!("umad-fuzz: {why}");
            ExitCode::from(2)
        }
    }
}

fn begin(command: Command) -> Outcome<usize> {
    match command {
        Command::Run {
            seed,
            calls,
            seconds,
            corpus,
            out,
            finds,
            workers,
        } => run::run(run::Wish {
            seed,
            calls,
            time: Duration::from_secs(seconds),
            corpus,
            out,
            finds,
            workers,
        }),
        Command::Replay { rounds, files } => run::replay(&files, rounds),
        Command::Report {
            disassembly,
            reached,
            list,
        } => {
            report::report(&disassembly, &reached, list.as_deref())?;
            Ok(0)
        }
    }
}
