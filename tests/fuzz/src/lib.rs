// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A coverage-guided fuzzer of the user ABI of ib_umad: random programs of system calls on umad and issm files,
//! with arguments that are almost right.
//!
//! [`generate`] makes [`call::Program`]s from a seed; a [`worker`] process runs them ([`execute`]) on the devices of a
//! [`scene`]; [`coverage`] says which basic blocks of the module were reached; [`run`] keeps the programs that
//! reach new ones, and looks what the kernel reports ([`kernel`]); [`report`] tells what was not reached.

pub mod call;
pub mod corpus;
pub mod coverage;
pub mod execute;
pub mod field;
pub mod generate;
pub mod kernel;
mod mad;
pub mod memory;
pub mod report;
pub mod run;
pub mod scene;
pub mod syscall32;
pub mod timer;
pub mod worker;
