// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What calls on umad files cost, in instructions.
//!
//! `umad-bench run [quick|floor]` measures the module that is loaded, in a guest that counts instructions
//! (`make bench`), and prints a line `operation<TAB>ticks` for each operation. `umad-bench warm` does
//! what makes later figures steady, and `umad-bench loop` sends and receives for ever, to be looked at. `umad-bench table KERNEL FILE [LIMITS]` reads the lines
//! `round implementation operation ticks` of many runs and prints them as a table; with LIMITS, lines
//! `ratio operation`, it fails if a ratio is worse by more than 3 %.

mod clock;
mod operations;
mod table;

use std::process::ExitCode;

use ktap::{Failure, Outcome};
use operations::Extent;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["warm"] => operations::warm(),
        ["loop"] => operations::repeat(),
        ["run"] => operations::run(Extent::All),
        ["run", "quick"] => operations::run(Extent::Quick),
        ["run", "floor"] => operations::run(Extent::Floor),
        ["table", kernel, file] => table::print(kernel, file, None),
        ["table", kernel, file, limits] => table::print(kernel, file, Some(limits)),
        _ => usage(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(why) | Failure::Skipped(why)) => {
            eprintln!("umad-bench: {why}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> Outcome {
    Err("usage: umad-bench warm | loop | run [quick|floor] | table KERNEL FILE [LIMITS]".into())
}
