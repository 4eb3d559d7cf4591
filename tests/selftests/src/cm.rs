// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Connection attempts by the kernel's `rdma_cm`, whose MADs go through queue pair 1 of a port like those
//! of programs: `<rdma/rdma_user_cm.h>`, as far as an attempt that is rejected needs it.

use std::fs::File;
use std::mem::size_of;
use std::os::fd::AsFd;

use ktap::prelude::*;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const CREATE_ID: u32 = 0;
const RESOLVE_IP: u32 = 3;
const RESOLVE_ROUTE: u32 = 4;
const CONNECT: u32 = 6;
const GET_EVENT: u32 = 12;

const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;
const REJECTED: u32 = 8;

/// `RDMA_PS_TCP`
const PS_TCP: u16 = 0x0106;
/// `IB_QPT_RC`
const RC: u8 = 2;

/// `struct rdma_ucm_cmd_hdr`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Command {
    cmd: u32,
    len_in: u16,
    len_out: u16,
}

/// `struct rdma_ucm_create_id`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct CreateId {
    uid: u64,
    response: u64,
    ps: u16,
    qp_type: u8,
    reserved: [u8; 5],
}

/// `struct sockaddr_in6`
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
struct SockaddrIn6 {
    family: u16,
    port_be: u16,
    flowinfo: u32,
    addr: [u8; 16],
    scope: u32,
}

/// `struct rdma_ucm_resolve_ip`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct ResolveIp {
    from: SockaddrIn6,
    to: SockaddrIn6,
    id: u32,
    timeout_ms: u32,
}

/// `struct rdma_ucm_resolve_route`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct ResolveRoute {
    id: u32,
    timeout_ms: u32,
}

/// `struct rdma_ucm_connect`
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Connect {
    qp_num: u32,
    qkey: u32,
    private_data: [u8; 256],
    /// Length of the private data, and six parameters of the connection, all zero; the last says that
    /// they are valid.
    parameters: [u8; 8],
    id: u32,
    reserved: u32,
    ece: [u32; 2],
}

/// `struct rdma_ucm_event_resp`
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Event {
    uid: u64,
    id: u32,
    event: u32,
    status: u32,
    param: [u32; 76],
    reserved: u32,
    ece: [u32; 2],
}

const _: () = assert!(size_of::<Connect>() == 272 + 16);
const _: () = assert!(size_of::<Event>() == 336);

/// An open `/dev/infiniband/rdma_cm`.
pub struct Cm(File);

impl Cm {
    /// Opens it.
    pub fn open() -> Outcome<Self> {
        let path = "/dev/infiniband/rdma_cm";
        let file = File::options().read(true).write(true).open(path);
        Ok(Self(file.what(path)?))
    }

    fn command(&self, cmd: u32, arguments: &[u8], len_out: usize) -> Outcome {
        let header = Command {
            cmd,
            len_in: u16::try_from(arguments.len())?,
            len_out: u16::try_from(len_out)?,
        };
        let bytes = [header.as_bytes(), arguments].concat();
        let wrote = nix::unistd::write(&self.0, &bytes).what(format!("command {cmd}"))?;
        ensure_eq!(wrote, bytes.len());
        Ok(())
    }

    /// Waits for an event, which must be this one.
    fn event(&self, expected: u32, limit: Duration) -> Outcome {
        let ms = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        ensure!(
            poll(&mut fds, ms)? == 1,
            "event {expected}: not within {limit:?}"
        );
        let mut event =
            Event::read_from_bytes(&[0; size_of::<Event>()]).map_err(|e| e.to_string())?;
        let response = std::ptr::from_mut(&mut event) as u64;
        self.command(GET_EVENT, response.as_bytes(), size_of::<Event>())?;
        // The kernel wrote behind the compiler's back.
        let event = std::hint::black_box(event);
        ensure_eq!(
            event.event,
            expected,
            "an event, of status {:#x}",
            event.status
        );
        Ok(())
    }

    /// Asks for a connection to an IP address that is a GID, through a network device, where nobody
    /// listens: each step of `rdma_connect()`, with a MAD there, and one back.
    pub fn be_rejected(&self, to: Gid, netdev: u32, limit: Duration) -> Outcome {
        let mut id = 0_u32;
        let create = CreateId {
            uid: 1,
            response: std::ptr::from_mut(&mut id) as u64,
            ps: PS_TCP,
            qp_type: RC,
            reserved: [0; 5],
        };
        self.command(CREATE_ID, create.as_bytes(), size_of::<u32>())?;
        let id = std::hint::black_box(id);
        let inet6 = u16::try_from(libc::AF_INET6)?;
        let timeout_ms = u32::try_from(limit.as_millis())?;
        let resolve = ResolveIp {
            from: SockaddrIn6::default(),
            to: SockaddrIn6 {
                family: inet6,
                port_be: 4791_u16.to_be(),
                flowinfo: 0,
                addr: to.0,
                scope: netdev,
            },
            id,
            timeout_ms,
        };
        self.command(RESOLVE_IP, resolve.as_bytes(), 0)?;
        self.event(ADDR_RESOLVED, limit)?;
        self.command(RESOLVE_ROUTE, ResolveRoute { id, timeout_ms }.as_bytes(), 0)?;
        self.event(ROUTE_RESOLVED, limit)?;
        let connect = Connect {
            // Of a queue pair that the peer would send to; it does not come to that.
            qp_num: 0x1234,
            qkey: 0,
            private_data: [0; 256],
            parameters: [0, 0, 0, 0, 0, 0, 0, 1],
            id,
            reserved: 0,
            ece: [0; 2],
        };
        self.command(CONNECT, connect.as_bytes(), 0)?;
        // Its end destroys the id with the file, or the next attempt makes another one.
        self.event(REJECTED, limit)
    }
}
