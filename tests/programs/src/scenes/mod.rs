// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The situations, each with the programs that are run in it.

pub mod beside;
pub mod diags;
pub mod fabric;
pub mod sm;
pub mod udev;
