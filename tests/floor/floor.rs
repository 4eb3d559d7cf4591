// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The least that a driver of umad devices can do: `ib_floor`. Test equipment of `make bench`.
//!
//! It stands in for `ib_umad` where calls are measured, and shows what of their cost is not the driver's to
//! save: the system call, `ib_mad`, and the device. So it does what is measured and nothing else. It sends to
//! one address for each file, takes what a program says as it is (but for memory), and has no duplicates, no
//! RMPP, no timeouts, no bounds and no unplugging: a device that goes waits for the close of its files.
//!
//! The life of a MAD is told in [`file`]. `bindings`, `chrdev`, `compat`, `rdma` and `uapi` are those of
//! `ib_umad`, by path: the two modules are built apart, but from one source.

#![deny(unsafe_op_in_unsafe_fn)]

#[path = "../../bindings/mod.rs"]
mod bindings;
// The module uses a part of them only.
#[allow(dead_code)]
#[path = "../../chrdev/mod.rs"]
mod chrdev;
#[path = "../../compat.rs"]
mod compat;
mod file;
mod port;
// As above.
#[allow(dead_code)]
#[path = "../../rdma/mod.rs"]
mod rdma;
// As above.
#[allow(dead_code)]
#[path = "../../uapi/mod.rs"]
mod uapi;

use chrdev::{
    class::{
        Class,
        ClassSpec, //
    },
    region::Region, //
};
use kernel::prelude::*;
use rdma::{
    changes::NetworkRegistration,
    client::Registration, //
};

module! {
    type: FloorModule,
    name: "ib_floor",
    authors: ["The umad-rs developers"],
    description: "What calls on umad devices cost without umad, for benchmarks",
    license: "Dual BSD/GPL",
}

/// The module.
///
/// DROP ORDER: changes are noticed as long as there are files.
struct FloorModule {
    _client: Registration<port::FloorClient>,
    _network: NetworkRegistration,
}

impl kernel::Module for FloorModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let region = Region::allocate(port::MAX_PORTS, port::FloorClass::NAME)?;
        let class = Class::register()?;
        let network = NetworkRegistration::new()?;
        Ok(Self {
            _client: Registration::new(port::Context::new(class, region))?,
            _network: network,
        })
    }
}
