// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A virtual InfiniBand HCA: `ib_vhca`. Test equipment.
//!
//! It makes RDMA devices that `ib_core` takes for real ones, as far as management datagrams go: they have
//! queue pairs 0 and 1, LIDs, partitions, a subnet management agent, links that come up and go down, and
//! faults that a test asks for. Beside them it moves unreliable datagrams of the kernel, for `ib_ipoib` to
//! live on it.
//!
//! # The life of a device
//!
//! An open of `/dev/ib_vhca/control` and an ioctl plug a device in ([`control`], which says why so;
//! [`uapi`] is what the ioctls take). The ioctl makes a [`node`] with its [`port`]s, registers it with
//! `ib_core` ([`hca`], [`verbs`]), and cables it ([`fabric`]), which brings its links up. The close of the
//! file pulls it out, whatever is going on.
//!
//! # The life of a MAD
//!
//! `ib_mad` posts a send; the node decides its fate ([`faults`]), completes it, and makes a [`frame`] of
//! it, at once or later ([`agenda`]). The frame goes over a cable to another node, through a [`switch`]
//! ([`directed`]) or to user space ([`outbox`]), and is received by a queue pair there. `ib_mad` then offers it to the
//! node's agent ([`sma`]), before anybody else gets it.
//!
//! A datagram that is no MAD goes the same way over cables and through switches, but only between active
//! ports, and to the queue pairs of [`data`]: to one, or to those of a multicast group.
//!
//! # Layers
//!
//! Only [`verbs`] and the shared `chrdev` have unsafe code. `chrdev`, `compat` and `bindings` are
//! those of `ib_umad`, by path: the two modules are built apart, but from one source.
//!
//! # Locks
//!
//! `ControlFile::hca` (mutex), then `Fabric::plugged` (mutex). All others are spinlocks that any context
//! may take; none of them is held while another one of this driver's own is taken, but for those of a
//! queue pair and its completion queue, in this order.

#![deny(unsafe_op_in_unsafe_fn)]

mod agenda;
#[path = "../../bindings/mod.rs"]
mod bindings;
// The module uses a part of them only.
#[allow(dead_code)]
#[path = "../../chrdev/mod.rs"]
mod chrdev;
#[path = "../../compat.rs"]
mod compat;
mod control;
mod counters;
mod data;
mod directed;
mod fabric;
mod faults;
mod frame;
mod hca;
mod node;
mod outbox;
mod port;
mod sma;
mod switch;
mod uapi;
mod verbs;

use chrdev::{
    class::{
        Class,
        ClassSpec, //
    },
    node::Node,
    region::Region, //
};
use control::{
    ControlClass,
    ControlFile, //
};
use kernel::prelude::*;

module! {
    type: VhcaModule,
    name: "ib_vhca",
    authors: ["The umad-rs developers"],
    description: "Virtual InfiniBand HCA for tests of management datagrams",
    license: "Dual BSD/GPL",
}

/// The module.
///
/// DROP ORDER: the node before its class and its number.
struct VhcaModule {
    _node: Node<ControlFile>,
    _class: Class<ControlClass>,
    _region: Region,
}

impl kernel::Module for VhcaModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let region = Region::allocate(1, ControlClass::NAME)?;
        let class = Class::register()?;
        let number = region.get(0).ok_or(EINVAL)?;
        let fabric = fabric::Fabric::new()?;
        let node = Node::add(&class, c"control", number, None, fabric)?;
        Ok(Self {
            _node: node,
            _class: class,
            _region: region,
        })
    }
}
