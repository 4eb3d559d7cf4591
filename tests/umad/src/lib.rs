// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Management datagrams (MADs) from user space: `/dev/infiniband/umadN` for Rust programs.
//!
//! A [`Port`] is an open umad file. On it a program registers agents ([`Registration`]), which say
//! which unsolicited MADs it wants; it sends a [`Packet`] (an address and the MAD's bytes) in an
//! agent's name, and receives packets: requests that an agent asked for, responses to its own
//! requests, and one packet with status `ETIMEDOUT` for each request that stayed unanswered.
//!
//! ```no_run
//! use std::time::Duration;
//! use umad::{Address, Gid, Method, Packet, Port, Registration, Tid, VendorMad};
//!
//! # fn main() -> umad::Result<()> {
//! let port = Port::open(0)?;
//! let agent = port.register2(&Registration::class(0x30, 1).oui(0x001405))?;
//! let peer: Gid = "fe80::1".parse().map_err(|_| umad::Error::Address)?;
//! let mad = VendorMad::new(0x30, 0x001405, Method::GET, Tid::new(7)).payload(b"who are you?");
//! let request = Packet::new(agent, &Address::roce(peer, 0), mad.into_bytes())
//!     .timeout(Duration::from_millis(200))
//!     .retries(2);
//! port.send(&request)?;
//! let answer = port.recv()?;
//! println!("status {}, {} bytes", answer.header.status, answer.mad.len());
//! # Ok(())
//! # }
//! ```
//!
//! - [`abi`] holds the structures and ioctl numbers as the kernel sees them,
//! - [`addr`] the types of an address, [`mad`] the headers that a MAD starts with,
//! - [`port`] the open file, [`agent`] registration, [`packet`] what is sent and received,
//! - [`fdinfo`] what the kernel says of an open file, also of one that came from another process,
//! - [`sysfs`] finds ports, and which umad number belongs to which device; [`netlink`] asks RDMA's netlink
//!   family for it.

pub mod abi;
pub mod addr;
pub mod agent;
pub mod error;
pub mod fdinfo;
pub mod mad;
pub mod netlink;
pub mod packet;
pub mod port;
pub mod sysfs;

pub use abi::{Hdr, HdrOld, RegReq, RegReq2};
pub use addr::{Address, Gid, Grh, PkeyIndex, Qpn, Tid};
pub use agent::{AgentId, MethodMask, Registration};
pub use error::{Error, Result};
pub use fdinfo::FileInfo;
pub use mad::{MadHdr, Method, RmppHdr, VendorMad};
pub use packet::Packet;
pub use port::{Layout, OpenOptions, Port};
