// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Character devices: what the kernel crate lacks for a driver with numbers, nodes and a class of its
//! own.
//!
//! C headers: `include/linux/fs.h`, `include/linux/cdev.h`, `include/linux/device/class.h`,
//! `include/linux/wait.h`
//!
//! | concept | file |
//! | --- | --- |
//! | a range of device numbers | [`region`] |
//! | a class with attributes | [`class`] |
//! | a device node: a `struct cdev` and a `struct device` | [`node`] |
//! | what a file of a node can do | [`file`] |
//! | waiting, polling, waking | [`wait`] |
//! | the end of a work item | [`work`] |
//! | bytes in the memory of the program that called | [`user`] |
//! | numbers that nobody can guess | [`random`] |
//! | how much may go into the kernel's log | [`log`] |
//! | coverage of work that is done on behalf of a program | [`coverage`] |
//! | indices that user space chooses | [`nospec`] |

pub(crate) mod class;
pub(crate) mod coverage;
pub(crate) mod file;
pub(crate) mod log;
pub(crate) mod node;
pub(crate) mod nospec;
pub(crate) mod random;
pub(crate) mod region;
pub(crate) mod user;
pub(crate) mod wait;
pub(crate) mod work;
