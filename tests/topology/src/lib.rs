// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Topologies of InfiniBand fabrics, for ibsim.
//!
//! - [`fabric`] is a topology, and checks it,
//! - [`fat_tree`] makes one, [`discovered`] reads one as ibnetdiscover writes it,
//! - [`net`] writes one so that ibsim (and a person) can read it.

pub mod discovered;
pub mod fabric;
pub mod fat_tree;
pub mod net;
