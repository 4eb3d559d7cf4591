// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl`: see the library beside this file.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    umadctl::cli::main()
}
