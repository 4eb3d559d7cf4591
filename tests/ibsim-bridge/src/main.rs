// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `ibsim-bridge`: makes a virtual HCA that is a node of a fabric of ibsim. It prints one line, which begins
//! with "ready:", when the device is there, and leaves the fabric and removes the device at SIGTERM or
//! SIGINT. When ibsim is gone, the port is down until it is back.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ibsim_bridge::bridge::{Bridge, Options};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Makes a virtual HCA that is a node of a fabric of ibsim.
///
/// The module ib_vhca must be loaded.
#[derive(Parser)]
struct Arguments {
    /// The node: its id in the topology, or its description; by default the first one of the topology
    #[arg(long, default_value = "")]
    node: String,
    /// Name of the device; by default vhcaN
    #[arg(long, default_value = "")]
    device: String,
    /// Base of the names of ibsim's sockets
    #[arg(long, env = "IBSIM_SOCKNAME", default_value = "sim")]
    base: String,
    /// Loses this fraction of frames, each way: 0.01 is 1 %
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0, value_parser = fraction)]
    drop: f64,
    /// Chooses which frames are lost
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Keeps counters in this file, a name and a number a line
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Waits so long for ibsim at the beginning
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
}

fn fraction(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err("not from 0 to 1".to_owned())
    }
}

fn run(arguments: Arguments) -> Result<(), String> {
    // Before anything exists that would have to be removed.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().map_err(|e| e.to_string())?;
    let signals =
        SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).map_err(|e| e.to_string())?;
    let bridge = Bridge::start(&Options {
        base: arguments.base,
        node: arguments.node,
        device: arguments.device,
        loss: arguments.drop,
        seed: arguments.seed,
        stats: arguments.stats,
        patience: Duration::from_secs(arguments.wait),
    })?;
    println!("ready: {}", bridge.describe());
    bridge.run(&signals)
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("ibsim-bridge: {why}");
            ExitCode::FAILURE
        }
    }
}
