// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! RDMA devices made in Rust: what a driver that provides MADs and unreliable datagrams needs.
//!
//! C header: `include/rdma/ib_verbs.h`
//!
//! A driver implements [`device::Provider`] and registers it with [`device::Device`]. `ib_core` sees a
//! device that has queue pairs 0 and 1 and such of unreliable datagrams, for the kernel's own use only: so
//! protection domains and memory regions are empty shells, since the only memory is the kernel's own.
//!
//! | concept | file |
//! | --- | --- |
//! | the device, its operations, its events | [`device`] |
//! | completion queues, queue pairs | [`queue`] |
//! | where a send goes | [`address`] |
//! | a spinlock for any context | [`lock`] |
//! | a function to be called later | [`alarm`] |

pub(crate) mod address;
pub(crate) mod alarm;
pub(crate) mod device;
pub(crate) mod lock;
pub(crate) mod queue;
