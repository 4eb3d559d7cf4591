// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Virtual InfiniBand HCAs, made by the module `ib_vhca` (tests/vhca): a device for each open control
//! file, gone with it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ktap::peers::SOON;
use ktap::prelude::*;
use nix::fcntl::OFlag;
use nix::kmod::{delete_module, finit_module, DeleteModuleFlags, ModuleInitFlags};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::stat::Mode;
use umad::{sysfs, PkeyIndex};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const CONTROL: &str = "/dev/ib_vhca/control";
const NAME: &CStr = c"ib_vhca";

/// The loaded module; unloaded with the value, if it was loaded by it.
pub struct Module {
    loaded: bool,
}

impl Module {
    /// Loads the module that `UMAD_KO_VHCA` names, unless it is there.
    pub fn load() -> Result<Self, String> {
        if Path::new("/sys/module/ib_vhca").exists() {
            return Ok(Self { loaded: false });
        }
        let path = std::env::var_os("UMAD_KO_VHCA").ok_or("UMAD_KO_VHCA is not set")?;
        let file = File::open(&path).map_err(|e| format!("{}: {e}", Path::new(&path).display()))?;
        finit_module(&file, c"", ModuleInitFlags::empty())
            .map_err(|e| format!("ib_vhca cannot be loaded: {e}"))?;
        let end = Instant::now() + SOON;
        while !Path::new(CONTROL).exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { loaded: true })
    }

    /// Runs an area with the module; without it, the area fails as a whole.
    pub fn run(area: ktap::Area<'_>) -> std::process::ExitCode {
        match Self::load() {
            Ok(module) => {
                let code = area.run();
                drop(module);
                code
            }
            Err(why) => {
                println!("KTAP version 1\nBail out! {why}");
                std::process::ExitCode::FAILURE
            }
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if !self.loaded {
            return;
        }
        // A file that a killed check left open may be closing still.
        let end = Instant::now() + SOON;
        while delete_module(NAME, DeleteModuleFlags::O_NONBLOCK).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Shape {
    /// Queue pairs 0 and 1.
    Ca = 0,
    /// Queue pair 0 only.
    SmiOnly = 1,
    /// Queue pair 1 only.
    NoSmi = 2,
    /// A switch.
    Switch = 3,
    /// OPA MADs and LIDs.
    Opa = 4,
    /// No MADs.
    NoMad = 5,
}

/// The port is down, whatever is at its cable.
pub const PORT_DOWN: u32 = 1;
/// The port waits in Init for a subnet manager.
pub const PORT_WAIT_FOR_SM: u32 = 2;
/// The driver has no `process_mad`.
pub const NO_PROCESS_MAD: u32 = 1;
/// Directed-route SMPs that go nowhere are answered by the control file's reader.
pub const USER_SMA: u32 = 2;

/// The bit of the capability mask that says that a subnet manager runs on the port.
pub const IS_SM: u32 = 1 << 1;

/// What a port is like; zeroes stand for what is usual.
#[derive(
    Clone, Copy, Default, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PortParams {
    /// LID.
    pub lid: u32,
    /// LMC.
    pub lmc: u32,
    /// LID of the subnet manager.
    pub sm_lid: u32,
    /// The two ports with the same cable are connected.
    pub cable: u32,
    /// Capability mask.
    pub cap_mask: u32,
    /// [`PORT_DOWN`], [`PORT_WAIT_FOR_SM`].
    pub flags: u32,
    /// Upper half of the GIDs.
    pub gid_prefix: u64,
    /// The P_Key table.
    pub pkeys: [u16; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Create {
    size: u32,
    shape: u32,
    ports: u32,
    wiring: u32,
    flags: u32,
    reserved: u32,
    node_guid: u64,
    name: [u8; 64],
    node_desc: [u8; 64],
    port: [PortParams; 9],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct PortChange {
    number: u32,
    state: u32,
    port: PortParams,
}

/// Faults of what leaves the device.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Faults {
    /// Only MADs of this class suffer; 0 for all.
    pub mgmt_class: u32,
    /// Drops each so-manieth frame.
    pub drop_every: u32,
    /// Drops the next so many frames.
    pub drop_next: u32,
    /// Sends each so-manieth frame twice.
    pub duplicate_every: u32,
    /// Delays frames.
    pub delay_ms: u32,
    /// This `post_send` fails (1 is the next) ..
    pub fail_send_at: u32,
    /// .. with this errno.
    pub fail_send_errno: u32,
    /// This send (1 is the next) is completed with ..
    pub send_status_at: u32,
    /// .. this status.
    pub send_status: u32,
    /// Completes sends late.
    pub complete_delay_ms: u32,
    /// Sleeps in `process_mad`.
    pub process_mad_delay_ms: u32,
    /// `modify_port` fails with this errno.
    pub modify_port_errno: u32,
    /// Swallows the next so many requests to the device's agent.
    pub consume_next: u32,
    /// Refuses the next so many requests to the device's agent.
    pub refuse_next: u32,
}

/// What has happened so far.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // told in tests/vhca/uapi.rs
pub struct Counters {
    pub sends: u64,
    pub sends_refused: u64,
    pub completions: u64,
    pub frames_out: u64,
    pub frames_in: u64,
    pub delivered: u64,
    pub dropped: u64,
    pub duplicated: u64,
    pub undeliverable: u64,
    pub no_queue_pair: u64,
    pub no_buffer: u64,
    pub pkey_violations: u64,
    pub qkey_violations: u64,
    pub offered: u64,
    pub answered: u64,
    pub modified: u64,
    pub modify_failed: u64,
    pub ahs_made: u64,
    pub ahs_destroyed: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FrameHeader {
    kind: u32,
    port: u32,
    dlid: u32,
    slid: u32,
    dest_qp: u32,
    src_qp: u32,
    sl: u32,
    pkey: u32,
    len: u32,
    id: u32,
    flags: u32,
    reserved: u32,
    grh: [u8; 40],
}

/// A MAD on a wire in user space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// [`Frame::MAD`], [`Frame::CAP_MASK`] or [`Frame::LOCAL`].
    pub kind: u32,
    /// The port that it leaves, or comes in through.
    pub port: u32,
    /// Destination LID; of [`Frame::CAP_MASK`], the mask.
    pub dlid: u32,
    /// Source LID.
    pub slid: u32,
    /// Destination queue pair.
    pub dest_qp: u32,
    /// Source queue pair.
    pub src_qp: u32,
    /// Service level.
    pub sl: u32,
    /// P_Key.
    pub pkey: u32,
    /// Number of a question.
    pub id: u32,
    /// Global route header.
    pub grh: Option<[u8; 40]>,
    /// The MAD.
    pub mad: Vec<u8>,
}

impl Frame {
    /// A MAD.
    pub const MAD: u32 = 1;
    /// The port's capability mask has changed.
    pub const CAP_MASK: u32 = 2;
    /// A directed-route SMP that goes nowhere, or its answer.
    pub const LOCAL: u32 = 3;
}

const _: () = assert!(size_of::<FrameHeader>() == 88);
const _: () = assert!(size_of::<Create>() == 736);
const _: () = assert!(size_of::<PortChange>() == 72);
const _: () = assert!(size_of::<Faults>() == 56);
const _: () = assert!(size_of::<Counters>() == 152);

mod ioctl {
    use super::{Counters, Create, Faults, PortChange};

    const MAGIC: u8 = b'v';

    nix::ioctl_readwrite! {
        /// Makes the file's device, and tells its name.
        create, MAGIC, 1, Create
    }
    nix::ioctl_write_ptr! {
        /// Sets the faults.
        set_faults, MAGIC, 2, Faults
    }
    nix::ioctl_read! {
        /// Reads the counters.
        get_counters, MAGIC, 3, Counters
    }
    nix::ioctl_write_ptr! {
        /// Changes a port.
        set_port, MAGIC, 4, PortChange
    }
    nix::ioctl_readwrite! {
        /// Reads a port.
        get_port, MAGIC, 5, PortChange
    }
    nix::ioctl_none! {
        /// Removes the file's device.
        remove, MAGIC, 6
    }
}

/// A wish for a device.
pub struct Spec(Create);

impl Spec {
    /// A device with so many ports, connected to nothing.
    pub fn new(shape: Shape, ports: u32) -> Self {
        Self(Create {
            size: u32::try_from(size_of::<Create>()).unwrap_or(0),
            shape: shape as u32,
            ports,
            wiring: 0,
            flags: 0,
            reserved: 0,
            node_guid: 0,
            name: [0; 64],
            node_desc: [0; 64],
            port: [PortParams::default(); 9],
        })
    }

    /// Sets what the device as a whole is to be like.
    pub fn flags(mut self, flags: u32) -> Self {
        self.0.flags = flags;
        self
    }

    /// Names the device, and describes the node by the same word.
    pub fn name(mut self, name: &str) -> Self {
        for (to, from) in self.0.name.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        self.0.node_desc = self.0.name;
        self
    }

    /// Wires the device to user space: what leaves it is read from its control file.
    pub fn in_user_space(mut self) -> Self {
        self.0.wiring = 1;
        self
    }

    /// Changes a port.
    pub fn port(mut self, number: usize, change: impl FnOnce(&mut PortParams)) -> Self {
        change(&mut self.0.port[number]);
        self
    }

    /// Gives a port a LID and a cable.
    pub fn cabled(self, number: usize, lid: u32, cable: u32) -> Self {
        self.port(number, |port| {
            port.lid = lid;
            port.cable = cable;
        })
    }

    /// Plugs the device in.
    pub fn plug(self) -> Outcome<Vhca> {
        self.try_plug().what("making a virtual HCA")
    }

    /// Plugs the device in, unless the equipment refuses.
    pub fn try_plug(mut self) -> nix::Result<Vhca> {
        let file = nix::fcntl::open(CONTROL, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
        // SAFETY: the argument is the structure that the call reads and writes.
        unsafe { ioctl::create(file.as_raw_fd(), &mut self.0) }?;
        let end = self.0.name.iter().position(|byte| *byte == 0).unwrap_or(0);
        let ibdev = String::from_utf8_lossy(&self.0.name[..end]).into_owned();
        Ok(Vhca {
            control: file,
            ibdev,
        })
    }
}

/// A device; dropping it pulls it out, as a surprise.
pub struct Vhca {
    control: OwnedFd,
    /// Its name.
    pub ibdev: String,
}

impl AsFd for Vhca {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

impl Vhca {
    /// Sets the faults; those of before are forgotten.
    pub fn faults(&self, faults: Faults) -> Outcome {
        // SAFETY: the argument is the structure that the call reads.
        unsafe { ioctl::set_faults(self.control.as_raw_fd(), &faults) }?;
        Ok(())
    }

    /// What has happened so far.
    pub fn counters(&self) -> Outcome<Counters> {
        let mut counters = Counters::default();
        // SAFETY: the argument is the structure that the call writes.
        unsafe { ioctl::get_counters(self.control.as_raw_fd(), &mut counters) }?;
        Ok(counters)
    }

    /// A port as it is now, and its state.
    pub fn port(&self, number: u32) -> nix::Result<(PortParams, u32)> {
        let mut change = PortChange {
            number,
            state: 0,
            port: PortParams::default(),
        };
        // SAFETY: the argument is the structure that the call reads and writes.
        unsafe { ioctl::get_port(self.control.as_raw_fd(), &mut change) }?;
        Ok((change.port, change.state))
    }

    /// Changes a port.
    pub fn change(&self, number: u32, change: impl FnOnce(&mut PortParams)) -> Outcome {
        let (mut port, state) = self.port(number)?;
        change(&mut port);
        let change = PortChange {
            number,
            state,
            port,
        };
        // SAFETY: the argument is the structure that the call reads.
        unsafe { ioctl::set_port(self.control.as_raw_fd(), &change) }?;
        Ok(())
    }

    /// Pulls the device out now, even if another process has a copy of the control file. Returns when it
    /// is gone.
    pub fn unplug(self) -> Outcome {
        // SAFETY: the call takes no argument.
        unsafe { ioctl::remove(self.control.as_raw_fd()) }?;
        Ok(())
    }

    /// Number of the port's umad device; waits for its node.
    pub fn umad(&self, port: u32) -> Outcome<u32> {
        wait_for_umad(&self.ibdev, port)
    }

    /// Path of the port's issm node; waits for it.
    pub fn issm(&self, port: u32) -> Outcome<PathBuf> {
        let path = PathBuf::from(format!("/dev/infiniband/issm{}", self.umad(port)?));
        wait_until(&format!("{} is there", path.display()), SOON, || {
            path.exists()
        })?;
        Ok(path)
    }

    /// The port's capability mask in sysfs.
    pub fn cap_mask(&self, port: u32) -> Outcome<u32> {
        let path = sysfs::port_dir(&self.ibdev, port).join("cap_mask");
        let text = fs::read_to_string(&path)?;
        Ok(u32::from_str_radix(
            text.trim().trim_start_matches("0x"),
            16,
        )?)
    }

    /// Reads what leaves a device that is wired to user space.
    pub fn read_frame(&self, limit: Duration) -> Outcome<Frame> {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        let ms = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
        if nix::poll::poll(&mut fds, ms)? == 0 {
            return Err("no frame came".into());
        }
        let mut buf = vec![0; size_of::<FrameHeader>() + 2048];
        let len = nix::unistd::read(&self.control, &mut buf)?;
        let Ok((header, mad)) = FrameHeader::read_from_prefix(&buf[..len]) else {
            return Err(format!("a frame of {len} bytes").into());
        };
        ensure_eq!(usize::try_from(header.len)?, mad.len());
        Ok(Frame {
            kind: header.kind,
            port: header.port,
            dlid: header.dlid,
            slid: header.slid,
            dest_qp: header.dest_qp,
            src_qp: header.src_qp,
            sl: header.sl,
            pkey: header.pkey,
            id: header.id,
            grh: (header.flags & 1 != 0).then_some(header.grh),
            mad: mad.to_vec(),
        })
    }

    /// Lets a frame arrive at a device that is wired to user space, or answers its question.
    pub fn write_frame(&self, frame: &Frame) -> Outcome {
        let header = FrameHeader {
            kind: frame.kind,
            port: frame.port,
            dlid: frame.dlid,
            slid: frame.slid,
            dest_qp: frame.dest_qp,
            src_qp: frame.src_qp,
            sl: frame.sl,
            pkey: frame.pkey,
            len: u32::try_from(frame.mad.len())?,
            id: frame.id,
            flags: frame.grh.is_some().into(),
            reserved: 0,
            grh: frame.grh.unwrap_or([0; 40]),
        };
        let bytes = [header.as_bytes(), &frame.mad].concat();
        let wrote = nix::unistd::write(&self.control, &bytes)?;
        ensure_eq!(wrote, bytes.len());
        Ok(())
    }

    /// Opens a port for subnet management: an agent of queue pair 0 that asks for nothing unsolicited.
    pub fn manager(&self, port: u32) -> Outcome<Agent> {
        self.agent(port, &Registration::send_only().qpn(0))
    }

    /// Opens a port and registers an agent.
    pub fn agent(&self, port: u32, registration: &Registration) -> Outcome<Agent> {
        let port = Port::open(self.umad(port)?)?;
        let agent = port.register2(registration)?;
        Ok(Agent { port, agent })
    }
}

/// Waits until a port has a umad device and its node, and returns its number.
pub fn wait_for_umad(ibdev: &str, port: u32) -> Outcome<u32> {
    let end = Instant::now() + SOON;
    loop {
        match sysfs::find(ibdev, port) {
            Ok(Some(found)) if umad::port::node(found.number).exists() => return Ok(found.number),
            other if Instant::now() >= end => {
                return Err(format!("{ibdev} port {port}: no umad node: {other:?}").into())
            }
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Numbers of the issm devices of an RDMA device, with their ports, as sysfs tells.
pub fn issms(ibdev: &str) -> Outcome<Vec<(u32, u32)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(sysfs::CLASS)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("issm") else {
            continue;
        };
        let read = |attribute: &str| fs::read_to_string(entry.path().join(attribute));
        if read("ibdev").is_ok_and(|owner| owner.trim() == ibdev) {
            found.push((number.parse()?, read("port")?.trim().parse()?));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Two devices with a cable between their first ports: LIDs 1 and 2.
pub struct Pair {
    /// Has LID 1.
    pub a: Vhca,
    /// Has LID 2.
    pub b: Vhca,
}

impl Pair {
    /// A pair of channel adapters, active.
    pub fn new() -> Outcome<Self> {
        Self::of(Shape::Ca)
    }

    /// A pair of some shape, active.
    pub fn of(shape: Shape) -> Outcome<Self> {
        Self::with(shape, |_, port| port)
    }

    /// A pair whose ports 1 are changed, given the LIDs that they have.
    pub fn with(shape: Shape, change: impl Fn(u32, PortParams) -> PortParams) -> Outcome<Self> {
        let make = |lid: u32| {
            // A cable that no other process uses.
            let spec = Spec::new(shape, 1).cabled(1, lid, std::process::id());
            spec.name(&format!("v{}x{lid}", std::process::id()))
                .port(1, |port| *port = change(lid, *port))
                .plug()
        };
        let pair = Self {
            a: make(1)?,
            b: make(2)?,
        };
        for device in [&pair.a, &pair.b] {
            wait_until("the link is up", SOON, || {
                device.port(1).is_ok_and(|(_, state)| state > 1)
            })?;
        }
        Ok(pair)
    }
}

/// An open port with an agent.
pub struct Agent {
    /// The file.
    pub port: Port,
    /// The agent.
    pub agent: AgentId,
}

impl Agent {
    /// A request to an address that waits for an answer.
    pub fn request(&self, to: &Address, mad: Vec<u8>) -> Packet {
        Packet::new(self.agent, to, mad).timeout(Duration::from_secs(10))
    }

    /// Sends a request, and receives its answer (or its timeout); other packets are dropped.
    pub fn ask(&self, to: &Address, mad: Vec<u8>) -> Outcome<Packet> {
        let request = self.request(to, mad);
        self.port.send(&request)?;
        self.recv_tid(request.tid()?)
    }

    /// Receives packets until one has this transaction id (lower half).
    pub fn recv_tid(&self, tid: Tid) -> Outcome<Packet> {
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let packet = self.port.recv_timeout(left)?;
            if packet.tid()?.low() == tid.low() {
                return Ok(packet);
            }
        }
    }

    /// Receives packets until one has this class and attribute.
    pub fn recv_attribute(&self, class: u8, attribute: u16) -> Outcome<Packet> {
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let packet = self.port.recv_timeout(left)?;
            let header = packet.mad_header()?;
            if header.mgmt_class == class && header.attr_id.get() == attribute {
                return Ok(packet);
            }
        }
    }

    /// Fails if a packet with this transaction id (lower half) comes within a time.
    pub fn nothing_comes(&self, tid: Tid, within: Duration) -> Outcome {
        let end = Instant::now() + within;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.port.recv_timeout(left) {
                Err(umad::Error::TimedOut) => return Ok(()),
                Ok(packet) if packet.tid()?.low() == tid.low() => {
                    return Err(format!(
                        "a packet came: status {}, {:?}",
                        packet.header.status,
                        packet.mad_header()?
                    )
                    .into())
                }
                Ok(_) => (),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Class of LID-routed subnet management.
pub const LID_ROUTED: u8 = 0x01;
/// Class of directed-route subnet management.
pub const DIRECTED: u8 = 0x81;

/// Attributes of subnet management.
pub mod attr {
    /// NodeDescription.
    pub const NODE_DESCRIPTION: u16 = 0x10;
    /// NodeInfo.
    pub const NODE_INFO: u16 = 0x11;
    /// SwitchInfo.
    pub const SWITCH_INFO: u16 = 0x12;
    /// GUIDInfo.
    pub const GUID_INFO: u16 = 0x14;
    /// PortInfo.
    pub const PORT_INFO: u16 = 0x15;
    /// P_KeyTable.
    pub const PKEY_TABLE: u16 = 0x16;
    /// SLtoVLMappingTable.
    pub const SL_TO_VL: u16 = 0x17;
    /// VLArbitrationTable.
    pub const VL_ARBITRATION: u16 = 0x18;
    /// LinearForwardingTable.
    pub const LINEAR_FORWARDING: u16 = 0x19;
    /// MulticastForwardingTable.
    pub const MULTICAST_FORWARDING: u16 = 0x1b;
    /// SMInfo.
    pub const SM_INFO: u16 = 0x20;
}

/// Status of a MAD whose method or attribute is not supported.
pub const UNSUPPORTED: u16 = 0x000c;
/// The direction bit in the status of a directed-route SMP.
pub const DIRECTION: u16 = 0x8000;
/// Status of a umad packet that says that no answer came.
pub const TIMED_OUT: u32 = 110;

/// A subnet management MAD.
#[derive(Clone)]
pub struct Smp(pub Vec<u8>);

impl Smp {
    /// Where the data lies.
    pub const DATA: usize = 64;

    fn new(class: u8, method: Method, attribute: u16, modifier: u32) -> Self {
        let mad = VendorMad::new(class, 0, method, fresh_tid())
            .attribute(attribute, modifier)
            .into_bytes();
        Self(mad)
    }

    /// A LID-routed one.
    pub fn lid_routed(method: Method, attribute: u16, modifier: u32) -> Self {
        Self::new(LID_ROUTED, method, attribute, modifier)
    }

    /// A directed-route one; `path` has the ports to leave through, without the first, empty, entry.
    pub fn directed(method: Method, attribute: u16, modifier: u32, path: &[u8]) -> Self {
        let mut smp = Self::new(DIRECTED, method, attribute, modifier);
        smp.0[7] = u8::try_from(path.len()).unwrap_or(u8::MAX);
        smp.0[32..36].fill(0xff);
        for (to, from) in smp.0[129..192].iter_mut().zip(path) {
            *to = *from;
        }
        smp
    }

    /// With this M_Key.
    pub fn m_key(mut self, m_key: u64) -> Self {
        self.0[24..32].copy_from_slice(&m_key.to_be_bytes());
        self
    }

    /// With this data.
    pub fn data(mut self, data: &[u8]) -> Self {
        self.0[Self::DATA..Self::DATA + data.len()].copy_from_slice(data);
        self
    }

    /// Its transaction id.
    pub fn tid(&self) -> Tid {
        Tid(self.0[8..16].try_into().map_or(0, u64::from_be_bytes))
    }
}

/// The address of a directed-route SMP.
pub fn direct() -> Address {
    smi(0xffff)
}

/// Queue pair 0 of the port with a LID.
pub fn smi(lid: u16) -> Address {
    Address {
        qpn: Qpn(0),
        qkey: 0,
        lid,
        pkey_index: PkeyIndex(0),
        ..Address::default()
    }
}

/// The data of an answer that must be a success.
pub fn answer(packet: &Packet) -> Outcome<[u8; 64]> {
    ensure_eq!(packet.header.status, 0, "the packet's status");
    let header = packet.mad_header()?;
    ensure_eq!(header.method, Method::GET_RESP);
    ensure_eq!(header.status.get() & !DIRECTION, 0, "the MAD's status");
    match packet.mad.get(Smp::DATA..Smp::DATA + 64) {
        Some(data) => Ok(data.try_into()?),
        None => Err(format!("an answer of {} bytes", packet.mad.len()).into()),
    }
}

/// CapabilityMask in a PortInfo.
pub fn cap_mask_of(port_info: &[u8; 64]) -> u32 {
    u32::from_be_bytes([port_info[20], port_info[21], port_info[22], port_info[23]])
}

/// An ioctl that a file is not to know, without an argument.
pub fn bare_ioctl(file: &impl AsFd, command: u32) -> nix::Result<()> {
    let raw = file.as_fd().as_raw_fd();
    // SAFETY: the callers' commands are those of ib_umad, on files that do not know them; a null
    // argument could at worst be EFAULT.
    Errno::result(unsafe {
        libc::ioctl(raw, libc::Ioctl::from(command), std::ptr::null_mut::<u8>())
    })?;
    Ok(())
}
