// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A bridge between a virtual HCA (the module `ib_vhca`, wired to user space) and a node of a fabric that
//! `ibsim` simulates: what leaves the device's port goes to ibsim, which answers for all other nodes and
//! takes MADs from client to client.
//!
//! - [`bridge`] is the whole, and its loop; [`fabric`] the connection to ibsim, [`wire`] what is said on it,
//! - [`route`] makes messages of frames and frames of messages, with the help of [`tids`],
//! - [`portinfo`] is the port that is kept in step, [`agent`] answers the device's SMPs to itself,
//! - [`loss`] and [`stats`] are for tests; [`mad`] knows the fields of a MAD.

pub mod agent;
pub mod bridge;
pub mod fabric;
pub mod loss;
pub mod mad;
pub mod portinfo;
pub mod route;
pub mod stats;
pub mod tids;
pub mod wire;
