// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Two open ports between which MADs go: one asks, one answers.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use umad::sysfs::{self, UmadPort};
use umad::{Address, AgentId, Error, Grh, Layout, Method, Packet, Port, Registration, Tid};

use crate::doctor::why_open_fails;
use crate::failure::{Context, Failure, Outcome};
use crate::ports;
use crate::signals::Interrupts;

/// What the agents are registered for.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// A vendor class with an OUI: 0x30 to 0x4f.
    pub class: u8,
    /// The vendor.
    pub oui: u32,
}

/// How MADs find their way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Routing {
    /// With a GID also where a LID is enough.
    pub by_gid: bool,
    /// Index of the sender's GID.
    pub gid_index: u8,
    /// Index of the receiver's GID.
    pub peer_gid_index: u8,
    /// Service level.
    pub sl: u8,
}

/// Between which ports MADs go, and how.
#[derive(Clone, Debug)]
pub struct Way {
    /// The port that sends.
    pub from: String,
    /// The port that receives.
    pub to: String,
    /// For whom the agents are.
    pub service: Service,
    /// The way.
    pub routing: Routing,
    /// Only the sums.
    pub quiet: bool,
}

/// The two ends of a way, open.
#[derive(Debug)]
pub struct Ends {
    /// Sends.
    pub from: End,
    /// Receives.
    pub to: End,
    /// Where that is, for `from`.
    pub address: Address,
    /// The same in words.
    pub words: String,
}

impl Way {
    /// Opens both ends. The receiver wants this method; the kernel does RMPP, or not.
    pub fn open(&self, method: Method, rmpp_version: u8) -> Outcome<Ends> {
        let (from, to) = (ports::find(&self.from)?, ports::find(&self.to)?);
        let (address, words) = address(&from, &to, &self.routing)?;
        let service = Registration::class(self.service.class, 1)
            .oui(self.service.oui)
            .rmpp(rmpp_version);
        let to = End::open(&to, &service.methods(&[method]))?;
        let from = End::open(&from, &service)?;
        Ok(Ends {
            from,
            to,
            address,
            words,
        })
    }
}

/// An open port with an agent.
#[derive(Debug)]
pub struct End {
    /// The file; it does not block.
    pub port: Port,
    /// The agent.
    pub agent: AgentId,
    /// Which port it is.
    pub which: UmadPort,
}

/// How often to look whether it is to end.
pub const LOOK: Duration = Duration::from_millis(50);

/// What waiting for a packet came to.
#[derive(Debug)]
pub enum Received {
    /// A packet.
    Packet(Packet),
    /// None in time.
    Nothing,
    /// The user wants an end.
    Interrupted,
}

impl End {
    /// Opens a port for the agent that `registration` wants.
    pub fn open(which: &UmadPort, registration: &Registration) -> Outcome<Self> {
        let port = Port::options()
            .nonblock(true)
            .layout(Layout::New)
            .open(which.number)
            .map_err(|e| cannot_open(which, &e))?;
        let agent = port
            .register2(registration)
            .map_err(|e| cannot_register(which, registration, &e))?;
        Ok(Self {
            port,
            agent,
            which: which.clone(),
        })
    }

    /// What it is called.
    pub fn name(&self) -> String {
        ports::name(&self.which)
    }

    /// Sends.
    pub fn send(&self, packet: &Packet) -> Outcome {
        self.port.send(packet).map_err(|e| {
            let failure = Failure::wrong(format!("{}: {e}", self.name()));
            match e.errno() {
                Some(Errno::EIO) => failure.hint("The port's device has gone."),
                Some(Errno::EINVAL) => failure.hint(
                    "The kernel refuses the address: the GID indices (--gid-index, --peer-gid-index) must have GIDs \
                     that can reach each other. umadctl list shows those at index 0.",
                ),
                Some(Errno::ETIMEDOUT | Errno::ENETUNREACH | Errno::EHOSTUNREACH) => failure.hint(
                    "The address does not resolve: the network devices below must reach each other.",
                ),
                _ => failure,
            }
        })
    }

    /// Receives the packet with this transaction id, within a time, unless the user wants an end before. Others,
    /// that were given up by then, are passed over.
    pub fn recv_tid(&self, interrupts: &Interrupts, tid: Tid, time: Duration) -> Outcome<Received> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.recv_unless(interrupts, left)? {
                Received::Packet(packet)
                    if packet.tid().is_ok_and(|got| got.low() != tid.low()) => {}
                received => return Ok(received),
            }
        }
    }

    /// Receives, within a time, unless the user wants an end before.
    fn recv_unless(&self, interrupts: &Interrupts, time: Duration) -> Outcome<Received> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.recv(left.min(LOOK))? {
                Some(packet) => return Ok(Received::Packet(packet)),
                None if interrupts.wait(Duration::ZERO)? => return Ok(Received::Interrupted),
                None if left <= LOOK => return Ok(Received::Nothing),
                None => (),
            }
        }
    }

    /// Receives, within a time; `None` if nothing comes.
    pub fn recv(&self, time: Duration) -> Outcome<Option<Packet>> {
        match self.port.recv_timeout(time) {
            Ok(packet) => Ok(Some(packet)),
            Err(Error::TimedOut) => Ok(None),
            Err(e) => Err(Failure::wrong(format!("{}: {e}", self.name()))),
        }
    }
}

/// The address of a port for MADs from another one.
fn address(from: &UmadPort, to: &UmadPort, routing: &Routing) -> Outcome<(Address, String)> {
    let mut address = Address::lid(0);
    address.sl = routing.sl;
    let infiniband = ports::is_infiniband(to);
    if infiniband != ports::is_infiniband(from) {
        return Err(Failure::new(format!(
            "{} and {} are not of the same network: one is InfiniBand, the other is not",
            ports::name(from),
            ports::name(to)
        )));
    }
    let mut words = String::new();
    if infiniband {
        address.lid = ports::lid(to).ok_or_else(|| {
            Failure::new(format!("{} has no LID yet", ports::name(to)))
                .hint("A subnet manager gives it one: one has to run on this network, opensm say.")
        })?;
        words = format!("LID {}", address.lid);
    }
    if !infiniband || routing.by_gid {
        let index = routing.peer_gid_index;
        let gid = sysfs::gid(&to.ibdev, to.port, index.into()).what(ports::name(to))?;
        if gid.is_zero() {
            return Err(Failure::new(format!("{} has no GID at index {index}", ports::name(to)))
                .hint("On RoCE the network device must be up and have an address; --peer-gid-index takes another index."));
        }
        address.grh = Some(Grh {
            gid,
            gid_index: routing.gid_index,
            hop_limit: 64,
            ..Grh::default()
        });
        words += &format!("{}GID {gid}", if words.is_empty() { "" } else { ", " });
    }
    Ok((address, words))
}

fn cannot_open(which: &UmadPort, error: &Error) -> Failure {
    let node = umad::port::node(which.number);
    let what = format!("{}: {error}", ports::name(which));
    match error.errno() {
        Some(errno) => Failure::new(what).hint(why_open_fails(Path::new(&node), errno)),
        None => Failure::new(what),
    }
}

fn cannot_register(which: &UmadPort, registration: &Registration, error: &Error) -> Failure {
    let failure = Failure::new(format!("{}: {error}", ports::name(which)));
    match error.errno() {
        Some(Errno::EINVAL) => failure.hint(format!(
            "Somebody answers class {:#04x} on this port already; --class takes another one (0x30 to 0x4f).",
            registration.class
        )),
        Some(Errno::EPROTONOSUPPORT) => {
            failure.hint("The port has no queue pair 1: it is for subnet management only.")
        }
        Some(Errno::EACCES) => failure.hint("A security module (SELinux, say) forbids it."),
        _ => failure,
    }
}
