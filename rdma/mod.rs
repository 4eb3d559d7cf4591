// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! RDMA: safe types over `ib_core` and `ib_mad`.
//!
//! C headers: `include/rdma/ib_verbs.h`, `include/rdma/ib_mad.h`.
//!
//! | concept | file |
//! | --- | --- |
//! | a kernel client of RDMA devices (`struct ib_client`) | [`client`] |
//! | a device that may be unplugged, its ports | [`device`] |
//! | a MAD agent and its handlers (`struct ib_mad_agent`) | [`agent`] |
//! | a MAD to send (`struct ib_mad_send_buf`) | [`send`] |
//! | a MAD that was received (`struct ib_mad_recv_wc`) | [`recv`] |
//! | an address and its handle (`struct ib_ah`) | [`address`] |
//! | whether what was made of a device's tables, or of the network's, still holds | [`changes`] |
//! | the MAD's own header, rules of classes | [`mad`] |
//! | a value that can be taken back from users that sleep | [`revocable`] |
//! | the tracepoints of user MADs | [`trace`] |
//!
//! Who keeps what alive: a [`client::Client`] is given a [`device::Device`], which hands out
//! [`device::DeviceGuard`]s until it is revoked; an [`agent::Agent`] holds a guard, so removal of a
//! device waits until its agents are unregistered; so does an [`address::AddressHandle`], which sends
//! share; a send buffer borrows its agent until it is posted, and `ib_mad` keeps the agent until it is
//! completed.

pub(crate) mod address;
pub(crate) mod agent;
pub(crate) mod changes;
pub(crate) mod client;
pub(crate) mod device;
pub(crate) mod mad;
pub(crate) mod recv;
pub(crate) mod revocable;
pub(crate) mod send;
pub(crate) mod trace;
