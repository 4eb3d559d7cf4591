// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Two netlink families that tell of umad devices: RDMA's device family (which character device
//! serves a port?), with changes of devices by it, and kobject uevents (a device has come, or gone).

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{
    bind, recv, setsockopt, socket, sockopt, AddressFamily, MsgFlags, NetlinkAddr, SockFlag,
    SockProtocol, SockType,
};
pub use umad::netlink::Chardev;
use umad::netlink::{ATTR_DEV_INDEX, ATTR_DEV_NAME};

const NLM_F_ACK: u16 = 0x04;
const CMD_SET: u16 = 2;
const CMD_NEWLINK: u16 = 3;
const CMD_DELLINK: u16 = 4;
const ATTR_NDEV_NAME: u16 = 51;
const ATTR_LINK_TYPE: u16 = 65;
const ATTR_NET_NS_FD: u16 = 68;

/// A socket of RDMA's netlink family, by which devices can be changed, too.
pub struct Rdma(umad::netlink::Rdma);

impl Deref for Rdma {
    type Target = umad::netlink::Rdma;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Rdma {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Rdma {
    /// Opens a socket.
    pub fn open() -> nix::Result<Self> {
        umad::netlink::Rdma::open().map(Self)
    }

    /// Makes an RDMA device of a kind ("rxe") on a network device; what `rdma link add` does.
    pub fn add_link(&mut self, name: &str, kind: &str, netdev: &str) -> nix::Result<()> {
        let text = |value: &str| [value.as_bytes(), b"\0"].concat();
        let attributes = [
            (ATTR_DEV_NAME, text(name)),
            (ATTR_LINK_TYPE, text(kind)),
            (ATTR_NDEV_NAME, text(netdev)),
        ];
        self.ask(CMD_NEWLINK, NLM_F_ACK, &attributes).map(drop)
    }

    /// Removes an RDMA device; what `rdma link delete` does.
    pub fn delete_link(&mut self, name: &str) -> nix::Result<()> {
        let index = self.index(name)?.to_ne_bytes().to_vec();
        self.ask(CMD_DELLINK, NLM_F_ACK, &[(ATTR_DEV_INDEX, index)])
            .map(drop)
    }

    /// Renames an RDMA device; what `rdma dev set NAME name NEW` does.
    pub fn rename(&mut self, name: &str, new: &str) -> nix::Result<()> {
        let new = [new.as_bytes(), b"\0"].concat();
        self.set(name, ATTR_DEV_NAME, new)
    }

    /// Moves an RDMA device to a network namespace; what `rdma dev set NAME netns NS` does.
    pub fn move_to(&mut self, name: &str, namespace: BorrowedFd<'_>) -> nix::Result<()> {
        let fd = namespace.as_raw_fd().to_ne_bytes().to_vec();
        self.set(name, ATTR_NET_NS_FD, fd)
    }

    fn set(&mut self, name: &str, attribute: u16, value: Vec<u8>) -> nix::Result<()> {
        let index = self.index(name)?.to_ne_bytes().to_vec();
        self.ask(
            CMD_SET,
            NLM_F_ACK,
            &[(ATTR_DEV_INDEX, index), (attribute, value)],
        )
        .map(drop)
    }
}

/// A kobject uevent: its action and its variables (ACTION, DEVPATH, SUBSYSTEM, DEVNAME, ...).
pub type Uevent = BTreeMap<String, String>;

/// A socket that hears the kernel's uevents from the moment it is opened.
pub struct Uevents {
    socket: OwnedFd,
}

impl Uevents {
    /// Starts listening.
    pub fn open() -> nix::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkKObjectUEvent,
        )?;
        setsockopt(&socket, sockopt::RcvBufForce, &(4 << 20))?;
        // Group 1 is the kernel's own; group 2 is what udev says after it has worked.
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 1))?;
        Ok(Self { socket })
    }

    /// The next event for which `wanted` holds; others are thrown away. ETIMEDOUT when none comes
    /// within `bound`.
    pub fn wait(&self, bound: Duration, wanted: impl Fn(&Uevent) -> bool) -> io::Result<Uevent> {
        let end = Instant::now() + bound;
        let mut buffer = vec![0u8; 16384];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).map_err(io::Error::other)?;
            let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, timeout)? == 0 {
                return Err(Errno::ETIMEDOUT.into());
            }
            let n = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let event: Uevent = buffer[..n]
                .split(|b| *b == 0)
                .filter_map(|part| std::str::from_utf8(part).ok())
                .filter_map(|part| part.split_once('='))
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect();
            if wanted(&event) {
                return Ok(event);
            }
        }
    }
}
