// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What several areas of the selftests share and the harness does not offer.

pub mod calls;
pub mod cm;
pub mod fdinfo;
pub mod figure;
pub mod injection;
pub mod netlink;
pub mod netns;
pub mod parameters;
pub mod rights;
pub mod slab;
pub mod stuck;
pub mod task;
pub mod trace;
pub mod uffd;
pub mod vhca;
