// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The programs that administrators of InfiniBand networks run, unmodified, over the `ib_umad` that is
//! loaded.
//!
//! A [`Scene`](report::Scene) is a situation (a fabric, a subnet manager) and the programs that are run
//! in it. Each check says what its program must show, whatever module is loaded, and leaves what it has
//! [`Seen`](report::Seen): what the program printed, without what differs from run to run. The host
//! compares what came of the C module with what came of ours.

pub mod command;
pub mod compare;
pub mod fabric;
pub mod opensm;
pub mod report;
pub mod simulated;
pub mod text;

use ktap::Outcome;

/// What a scene has by now; fails, by its name, if a check before this one did not bring it about.
pub fn there<T>(value: Option<T>, what: &str) -> Outcome<T> {
    value.ok_or_else(|| format!("there is no {what}").into())
}
