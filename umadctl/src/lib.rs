// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl`: looks into `ib_umad`, for the people who run it.
//!
//! [`cli`] holds the arguments; each subcommand has a module of its own, named after it. What they share:
//! [`output`] (for people and, as JSON, for programs), [`failure`] (errors that say what to do, exit codes),
//! [`ports`] (which there are, and how they are named), [`holders`] (who has which file open), [`loaded`]
//! (which `ib_umad` the kernel has), [`signals`] (Ctrl-C), [`ends`] (two open ports for traffic).
//!
//! Names of devices and processes are other people's: nothing of theirs reaches the terminal but through
//! [`output::shown`].

#![forbid(unsafe_code)]

pub mod cli;
pub mod doctor;
pub mod ends;
pub mod failure;
pub mod holders;
pub mod list;
pub mod loaded;
pub mod names;
pub mod output;
pub mod ping;
pub mod ports;
pub mod rmpp;
pub mod show;
pub mod signals;
pub mod sniff;
pub mod trace;
