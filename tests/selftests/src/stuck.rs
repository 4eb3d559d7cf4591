// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A write() or ioctl that waits for a page of its user memory, at a [`Place`] of one's choice, and who
//! else is on the ports meanwhile.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use umad::abi;
use zerocopy::IntoBytes;

use crate::task::{Task, MUST};
use crate::uffd::{Region, PAGE};

/// Class of the pair of agents that work beside the one that is stuck.
pub const OTHER: u8 = 0x31;

/// Class that a stuck registration is about.
pub const WANTED: u8 = 0x41;

/// Where a call is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// write(): in the page that holds header and MAD.
    Header,
    /// write(): behind the MAD's headers, in its data.
    Mad,
    /// write(): in the middle of a message that the kernel cuts into segments.
    Rmpp,
    /// REGISTER_AGENT: in its argument.
    Register,
    /// REGISTER_AGENT2: in its argument.
    Register2,
    /// REGISTER_AGENT: where it writes the id back.
    WriteBack,
    /// REGISTER_AGENT2: where it writes the id back.
    WriteBack2,
    /// UNREGISTER_AGENT: in its argument.
    Unregister,
}
pub use Place::{Header, Mad, Register, Register2, Rmpp, Unregister, WriteBack, WriteBack2};

impl Place {
    /// All but [`WriteBack2`]: REGISTER_AGENT2 writes its id back as REGISTER_AGENT does.
    pub const EACH: [Self; 7] = [
        Header, Mad, Rmpp, Register, Register2, WriteBack, Unregister,
    ];

    /// For the name of a check.
    pub fn name(self) -> &'static str {
        match self {
            Header => "write() stuck in its header",
            Mad => "write() stuck in its MAD",
            Rmpp => "write() stuck in an RMPP message",
            Register => "REGISTER_AGENT stuck in its argument",
            Register2 => "REGISTER_AGENT2 stuck in its argument",
            WriteBack => "REGISTER_AGENT stuck in writing the id back",
            WriteBack2 => "REGISTER_AGENT2 stuck in writing the id back",
            Unregister => "UNREGISTER_AGENT stuck in its argument",
        }
    }

    /// Whether the C module touches that memory without a lock.
    pub fn lockless_in_c(self) -> bool {
        matches!(self, Header | Unregister)
    }

    /// Whether the call is a write().
    pub fn is_write(self) -> bool {
        matches!(self, Header | Mad | Rmpp)
    }
}

/// A check of `beside` for a call that is stuck at each place. Where the C module holds a lock there, it is an
/// improvement.
pub fn at_each_place(area: &mut ktap::Area, what: &str, beside: fn(Place) -> Outcome) {
    for place in Place::EACH {
        let check = area.check(format!("{}: {what}", place.name()), move || beside(place));
        if !place.lockless_in_c() {
            check.improvement(4);
        }
    }
}

/// Who takes part: `a` gets stuck, `b` is its peer, `other` work beside them on the same ports.
pub struct Scene {
    /// The file that a call gets stuck on.
    pub a: Arc<Endpoint>,
    /// Its peer.
    pub b: Arc<Endpoint>,
    /// Files of the same ports that do not get stuck.
    pub other: Arc<Peers>,
}

/// Opens two devices' ports for all of them.
pub fn scene(a: &str, b: &str) -> Outcome<Scene> {
    let registration = Peers::registration(CLASS).rmpp(1);
    let peers = Peers::with(a, b, Layout::New, &registration)?;
    // Agent 1, for UNREGISTER_AGENT to end.
    ensure_eq!(
        peers.a.port.register2(&Registration::send_only())?,
        AgentId(1)
    );
    let registration = Peers::registration(OTHER);
    let other = Peers::with(a, b, Layout::New, &registration)?;
    Ok(Scene {
        a: Arc::new(peers.a),
        b: Arc::new(peers.b),
        other: Arc::new(other),
    })
}

/// A call in a thread that waits for a page.
pub struct Stuck {
    /// The call.
    pub call: Task<io::Result<usize>>,
    /// Its memory.
    pub region: Arc<Region>,
    place: Place,
    /// What the missing page is to hold.
    page: Vec<u8>,
    /// The MAD, of a write().
    pub mad: Vec<u8>,
}

/// The RMPP message that gets stuck: it spans three pages.
fn message(scene: &Scene, tid: Tid) -> Packet {
    let payload: Vec<u8> = (0u8..=250).cycle().take(5000).collect();
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, tid)
        .rmpp()
        .payload(&payload)
        .into_bytes();
    Packet::new(scene.a.agent, &scene.b.address(), mad).timeout(Duration::from_secs(10))
}

impl Stuck {
    /// Starts the call on the file of `a` and waits until it is stuck.
    pub fn at(place: Place, scene: &Scene) -> Outcome<Self> {
        let region = Region::new(3)?;
        let wanted = Peers::registration(WANTED);
        let mut mad = Vec::new();
        // Where the call's memory starts, what it holds, and the page that is to be missing.
        let (start, bytes, missing) = match place {
            Header | Mad => {
                let mut packet = scene.a.packet(&scene.b, Method::SEND, fresh_tid());
                packet.mad[40..].fill(0x5a);
                mad = packet.mad.clone();
                // The kernel may look at header and RMPP header (64 + 36 bytes) before the rest.
                let present = if place == Header { 0 } else { 100 };
                (PAGE - present, packet.to_bytes(Layout::New), 1)
            }
            Rmpp => {
                let packet = message(scene, fresh_tid());
                mad = packet.mad.clone();
                (PAGE - 1000, packet.to_bytes(Layout::New), 1)
            }
            Register | WriteBack => (PAGE, wanted.to_req().as_bytes().to_vec(), 1),
            Register2 | WriteBack2 => (PAGE, wanted.to_req2().as_bytes().to_vec(), 1),
            Unregister => (PAGE, 1u32.to_ne_bytes().to_vec(), 1),
        };
        let mut memory = vec![0; 3 * PAGE];
        memory[start..start + bytes.len()].copy_from_slice(&bytes);
        let page = |n: usize| &memory[n * PAGE..(n + 1) * PAGE];
        region.deliver(0, page(0))?;
        region.deliver(2, page(2))?;
        if matches!(place, WriteBack | WriteBack2) {
            region.deliver_protected(1, page(1))?;
        }
        let (file, memory_of_call, len) = (Arc::clone(&scene.a), Arc::clone(&region), bytes.len());
        let call = Task::start(move || {
            let fd = file.port.as_fd();
            let ioctl = |request: u32| {
                let request = libc::c_ulong::from(request);
                memory_of_call.ioctl(fd, request, start, len).map(|()| 0)
            };
            match place {
                Header | Mad | Rmpp => memory_of_call.write(fd, start, len),
                Register | WriteBack => ioctl(abi::REGISTER_AGENT),
                Register2 | WriteBack2 => ioctl(abi::REGISTER_AGENT2),
                Unregister => ioctl(abi::UNREGISTER_AGENT),
            }
        });
        let mut stuck = Self {
            call,
            region,
            place,
            page: page(missing).to_vec(),
            mad,
        };
        match stuck.region.wait_fault(MUST)? {
            Some(1) => Ok(stuck),
            other => {
                let result = stuck.call.result(Duration::ZERO);
                Err(format!("page {other:?} is waited for, the call: {result:?}").into())
            }
        }
    }

    /// Delivers the page; the call's result.
    pub fn release(&mut self) -> Outcome<io::Result<usize>> {
        match self.place {
            WriteBack | WriteBack2 => self.region.allow_write(1)?,
            _ => self.region.deliver(1, &self.page)?,
        }
        match self.call.result(MUST) {
            Some(Ok(n)) => Ok(Ok(*n)),
            Some(Err(e)) => Ok(Err(io::Error::from_raw_os_error(
                e.raw_os_error().unwrap_or(libc::EIO),
            ))),
            None => Err("the page is there, and the call does not end".into()),
        }
    }
}
