// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Runs scenes, or compares what they left; see the library.
//!
//! ```text
//! programs run FOLDER SCENE...         in the guest; outcomes go to FOLDER
//! programs compare C RUST [TABLE]      folders of outcomes; TABLE is the page with the table of programs
//! ```

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use ktap::Outcome;
use programs::compare::compare;
use programs::report::{Report, Scene};

mod scenes;

fn play(folder: &Path, names: &[&str]) -> Outcome<usize> {
    // In the order in which they are named.
    fn on<W: Default>(report: &mut Report, scene: Scene<W>) {
        report.run(scene, W::default());
    }
    let mut report = Report::new(folder, names.len())?;
    for name in names {
        match *name {
            "udev" => on(&mut report, scenes::udev::scene()),
            "diags" => on(&mut report, scenes::diags::scene()),
            "beside" => on(&mut report, scenes::beside::scene()),
            "medium" => on(&mut report, scenes::fabric::medium()),
            "large" => on(&mut report, scenes::fabric::large()),
            "sm" => on(&mut report, scenes::sm::scene()),
            _ => return Err(format!("there is no scene {name}").into()),
        }
    }
    Ok(report.failed())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let failed = match arguments.as_slice() {
        ["run", folder, names @ ..] => play(Path::new(folder), names),
        ["compare", c, rust, rest @ ..] => {
            compare(Path::new(c), Path::new(rust), rest.first().map(Path::new))
        }
        _ => Err("usage: programs run FOLDER SCENE... | programs compare C RUST [TABLE]".into()),
    };
    match failed {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(why) => {
            println!("Bail out! {why:?}");
            ExitCode::FAILURE
        }
    }
}
