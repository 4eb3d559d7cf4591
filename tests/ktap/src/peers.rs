// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Two ports that see each other, open, with an agent each.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use umad::{
    sysfs, Address, AgentId, Gid, Layout, Method, Packet, Port, Registration, Tid, VendorMad,
};

use crate::device::wait_for_umad;
use crate::{patient, Failure, Outcome};

/// The OUI that the agents of [`Peers`] have.
pub const OUI: u32 = 0x00_1405;

/// The class of the agents of [`Peers`], unless another is asked for.
pub const CLASS: u8 = 0x30;

/// How long a packet that must come may take. The guest may be emulated and busy: this is a bound
/// against hanging, no measure.
pub const SOON: Duration = Duration::from_secs(20);

/// How long to look for something that must not come: many times what a packet takes here.
pub const QUIET: Duration = Duration::from_millis(400);

/// A transaction id that this process has not used yet (and, by its process id, that others are not
/// likely to use).
pub fn fresh_tid() -> Tid {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Tid::new((std::process::id() << 16) | (n & 0xffff))
}

/// A non-blocking file of `rxe0`'s port on which nothing was done yet: 56-byte headers, no agents.
pub fn fresh() -> Outcome<Port> {
    fresh_on("rxe0")
}

/// The same on another device.
pub fn fresh_on(ibdev: &str) -> Outcome<Port> {
    let number = wait_for_umad(ibdev)?;
    Ok(Port::options()
        .nonblock(true)
        .layout(Layout::Old)
        .open(number)?)
}

/// An open port with an agent.
#[derive(Debug)]
pub struct Endpoint {
    /// The open file.
    pub port: Port,
    /// The agent.
    pub agent: AgentId,
    /// Its class.
    pub class: u8,
    /// The RDMA device.
    pub ibdev: String,
    /// The umad number.
    pub umad: u32,
    /// GID at index 0.
    pub gid: Gid,
}

impl Endpoint {
    /// Opens port 1 of a device in a layout and registers an agent.
    ///
    /// In the old layout by `REGISTER_AGENT`, in the new one by `REGISTER_AGENT2`.
    pub fn open(ibdev: &str, layout: Layout, registration: &Registration) -> Outcome<Self> {
        let umad = wait_for_umad(ibdev)?;
        let port = Port::options().layout(layout).open(umad)?;
        let agent = match layout {
            Layout::Old => port.register(registration)?,
            Layout::New => port.register2(registration)?,
        };
        Ok(Self {
            port,
            agent,
            class: registration.class,
            ibdev: ibdev.to_owned(),
            umad,
            gid: sysfs::gid(ibdev, 1, 0)?,
        })
    }

    /// The address of this port for one that sends from GID index 0.
    pub fn address(&self) -> Address {
        Address::roce(self.gid, 0)
    }

    /// A packet from here to `to`, with a full-length vendor MAD in it.
    pub fn packet(&self, to: &Endpoint, method: Method, tid: Tid) -> Packet {
        let mad = VendorMad::new(to.class, OUI, method, tid);
        Packet::new(self.agent, &to.address(), mad.into_bytes())
    }

    /// The response to a packet that came here, with its MAD (the header's answer bits set).
    pub fn response(&self, to: &Packet) -> Outcome<Packet> {
        let mut mad = to.mad.clone();
        let hdr = to.mad_header()?;
        mad[3] = hdr.method.response().0;
        let mut address = to.address();
        address.qkey = Address::GSI_QKEY;
        Ok(Packet::new(self.agent, &address, mad))
    }

    /// Waits until a packet can be read.
    pub fn wait_readable(&self) -> Outcome {
        match self.port.poll(PollFlags::POLLIN, patient(SOON))? {
            events if events.contains(PollFlags::POLLIN) => Ok(()),
            events => Err(format!("no packet came: poll() says {events:?}").into()),
        }
    }

    /// Receives a packet that must come.
    pub fn recv(&self) -> Outcome<Packet> {
        Ok(self.port.recv_timeout(patient(SOON))?)
    }

    /// Receives packets until one has this transaction id (lower half); others are dropped.
    pub fn recv_tid(&self, tid: Tid) -> Outcome<Packet> {
        let end = Instant::now() + patient(SOON);
        loop {
            let packet = self
                .port
                .recv_timeout(end.saturating_duration_since(Instant::now()))?;
            if packet.tid()?.low() == tid.low() {
                return Ok(packet);
            }
        }
    }

    /// Receives the answer to the request with this transaction id: the report that there was none, which
    /// has the same id, is a failure.
    pub fn recv_answer(&self, tid: Tid) -> Outcome<Packet> {
        let packet = self.recv_tid(tid)?;
        crate::ensure_eq!(packet.header.status, 0, "the status of an answer");
        Ok(packet)
    }

    /// Fails if a packet comes within [`QUIET`].
    pub fn nothing_comes(&self) -> Outcome {
        match self.port.recv_timeout(patient(QUIET)) {
            Err(umad::Error::TimedOut) => Ok(()),
            Ok(packet) => Err(Failure::Failed(format!(
                "a packet came: status {}, {:?}",
                packet.header.status,
                packet.mad_header()
            ))),
            Err(e) => Err(e.into()),
        }
    }
}

/// Two endpoints that reach each other.
#[derive(Debug)]
pub struct Peers {
    /// The one that usually asks.
    pub a: Endpoint,
    /// The one that usually answers.
    pub b: Endpoint,
}

impl Peers {
    /// `rxe0` and `rxe1`, which every area finds, in the new layout.
    pub fn new() -> Outcome<Self> {
        Self::on("rxe0", "rxe1")
    }

    /// `rxe0` and `rxe1` in a layout.
    pub fn with_layout(layout: Layout) -> Outcome<Self> {
        Self::with("rxe0", "rxe1", layout, &Self::registration(CLASS))
    }

    /// Two devices, in the new layout.
    pub fn on(a: &str, b: &str) -> Outcome<Self> {
        Self::with(a, b, Layout::New, &Self::registration(CLASS))
    }

    /// Two devices, with a layout and the same registration on both.
    pub fn with(a: &str, b: &str, layout: Layout, registration: &Registration) -> Outcome<Self> {
        Ok(Self {
            a: Endpoint::open(a, layout, registration)?,
            b: Endpoint::open(b, layout, registration)?,
        })
    }

    /// The registration of [`Peers::new`]: Get, Set, Send and Report of a class of [`OUI`], version
    /// 1, no RMPP.
    pub fn registration(class: u8) -> Registration {
        Registration::class(class, 1).oui(OUI).methods(&[
            Method::GET,
            Method::SET,
            Method::SEND,
            Method::REPORT,
        ])
    }

    /// Sends a MAD that wants no answer from `a` to `b` and receives it there.
    pub fn deliver(&self, tid: Tid) -> Outcome<Packet> {
        self.a
            .port
            .send(&self.a.packet(&self.b, Method::SEND, tid))?;
        self.b.recv_tid(tid)
    }

    /// A Get from `a`, received by `b`, answered, and the answer received by `a`: returns what `b`
    /// got, and what `a` got.
    pub fn round_trip(&self, tid: Tid) -> Outcome<(Packet, Packet)> {
        let request = self
            .a
            .packet(&self.b, Method::GET, tid)
            .timeout(Duration::from_secs(10));
        self.a.port.send(&request)?;
        let got = self.b.recv_tid(tid)?;
        self.b.port.send(&self.b.response(&got)?)?;
        Ok((got, self.a.recv_answer(tid)?))
    }
}
