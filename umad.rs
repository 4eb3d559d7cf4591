// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Userspace access to InfiniBand management datagrams (MADs): `ib_umad`.
//!
//! For each port of each RDMA device that does MADs there is a character device `umadN`, through which
//! programs register MAD agents, send MADs and receive them; and, where the port has a subnet management
//! interface, a device `issmN`, which marks the port as a subnet manager's while it is held open. The
//! user ABI is that of `include/uapi/rdma/ib_user_mad.h`; `Documentation/userspace-mad.rst` tells it all.
//!
//! # Layers
//!
//! The driver, which is this file and those beside it, stands on the abstractions [`rdma`] and
//! [`chrdev`], and those on generated [`bindings`]. Only the abstractions have unsafe code.
//!
//! # The life of a device
//!
//! `ib_core` calls the client in [`port`] with a new device. Each of its ports gets the lowest free
//! number N ([`numbers`]), a node umadN ([`file`]) and perhaps a node issmN ([`issm`]), with attributes
//! ([`sysfs`]) that can be read before anybody is told of the node. When the device goes, the nodes go,
//! nobody gets at the device any more, all who wait on it are woken with an error, every agent is
//! unregistered, and then the removal goes on. Files that are still open keep their memory only.
//!
//! # The life of a file
//!
//! open() makes a [`file::UmadFile`] and enters it into its port. ioctls register agents ([`register`]),
//! which have seats ([`seat`]) in the file's table ([`agents`]). write() copies a MAD, borrows its agent, makes an
//! address handle, or takes one that the file has kept ([`cache`]), makes a send buffer, and posts it
//! ([`write`]); from then on the send belongs to
//! `ib_mad`, and is listed among the outstanding ones ([`outstanding`]). Received MADs, and sends that
//! nobody answered, become packets ([`packet`]) in the file's queue ([`queue`]), which read() copies out;
//! where the way back to a sender has to be asked for first, they wait for that ([`arrivals`]).
//! The close of the last descriptor retires the agents and drops what is queued.
//!
//! # Locks
//!
//! In the order in which they may be taken:
//!
//! 1. `UmadFile::registering` (mutex, one for each file): registering and unregistering an agent.
//! 2. `UmadFile::sieving` (mutex, one for each file): looking through the queue for packets to drop.
//! 3. `Port::files` (spinlock, one for each port): the files that are open.
//! 4. `UmadFile::inner` (spinlock, one for each file): agents, queue, outstanding sends, layout, life.
//! 5. `rdma::Device::live` (spinlock, one for each device), `IsSm::turn` and `Ways::remembered` (spinlocks,
//!    one each for each port).
//! 6. The locks inside wait queues.
//!
//! `rdma::changes::WATCHING` (mutex) comes before 3 to 5, and address handles are destroyed under it; only
//! devices that come and go need it. The network's RTNL may be held before it.
//! `Numbers::used` (mutex) is taken with no other held. 3 to 5 are in fact never held together. `ib_core`
//! tells of events ([`rdma::changes`]) with locks of its own held, and 3 and 4 are taken then, one after
//! the other; so nothing of `ib_core` is called under those.
//!
//! The rule that makes one process harmless to all others: no lock that a handler of `ib_mad` takes (4),
//! and none that another file or open() needs (3 to 5), is held while a program's memory is touched, an
//! address handle made or destroyed, an agent registered or unregistered, or a send posted. Nor is an agent
//! borrowed, or a send buffer held, while a program's memory is waited for: the removal of a device waits
//! for those. (It may be copied from while they are, if that fails where it would have to wait.) And
//! nothing with a destructor that calls `ib_core` is dropped under a lock, address handles included.

#![deny(unsafe_op_in_unsafe_fn)]

mod abi;
#[path = "bindings/abi_check.rs"]
mod abi_check;
mod agents;
mod arrivals;
mod bindings;
mod bounds;
mod cache;
mod chrdev;
mod compat;
mod fdinfo;
mod file;
mod issm;
mod numbers;
mod outstanding;
mod packet;
mod port;
mod queue;
mod rdma;
mod register;
mod seat;
mod sysfs;
mod uapi;
mod write;

use chrdev::class::{
    Class,
    ClassSpec, //
};
use kernel::prelude::*;
use rdma::{
    changes::NetworkRegistration,
    client::{
        AliasRegistration,
        Registration, //
    }, //
};

module! {
    type: UmadModule,
    name: "ib_umad",
    authors: ["The umad-rs developers"],
    description: "InfiniBand userspace MAD packet access",
    license: "Dual BSD/GPL",
    alias: ["rdma-client-umad", "rdma-client-issm"],
    params: {
        abi_version: u32 {
            default: 5,
            description: "Version of the user ABI: 5 (default), or 6: the header with the P_Key index is the only one",
        },
        max_message: usize {
            default: 256 << 20,
            description: "Bytes of the longest message that write() takes (default 256 MiB)",
        },
        max_outstanding: usize {
            default: 512 << 20,
            description: "Bytes that the sends of one file may take until they are done (default 512 MiB)",
        },
        max_unread: usize {
            default: 512 << 20,
            description: "Bytes that the received MADs of one file may take until they are read (default 512 MiB)",
        },
    },
}

/// The module: it is registered as the client "umad", and by the name "issm" besides.
///
/// DROP ORDER: changes are noticed as long as there are files.
struct UmadModule {
    _clients: AliasRegistration<port::IssmAlias>,
    _network: NetworkRegistration,
}

impl kernel::Module for UmadModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        abi::check()?;
        let numbers = numbers::Numbers::register(sysfs::UmadClass::NAME)?;
        let class =
            Class::register().inspect_err(|_| pr_err!("cannot make the class infiniband_mad\n"))?;
        let network = NetworkRegistration::new()?;
        let umad = Registration::new(port::Context { class, numbers })?;
        Ok(Self {
            _clients: AliasRegistration::new(umad)?,
            _network: network,
        })
    }
}
