// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What checks do with virtual InfiniBand HCAs (the crate `vhca`): devices in pairs, their umad ports, and
//! agents and SMPs on them.

use std::ffi::CStr;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ktap::patient;
use ktap::peers::SOON;
use ktap::prelude::*;
use nix::kmod::{delete_module, finit_module, DeleteModuleFlags, ModuleInitFlags};
use umad::{sysfs, PkeyIndex};
use vhca::CONTROL;
pub use vhca::{
    Counters, Faults, Frame, PortParams, Shape, Spec, Vhca, EXTERNAL, IS_SM, NO_PROCESS_MAD,
    PORT_DOWN, PORT_WAIT_FOR_SM, USER_SMA,
};

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
        let end = Instant::now() + patient(SOON);
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
        let end = Instant::now() + patient(SOON);
        while delete_module(NAME, DeleteModuleFlags::O_NONBLOCK).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Plugs devices in.
pub trait SpecExt {
    /// Plugs the device in.
    fn plug(self) -> Outcome<Vhca>;
}

impl SpecExt for Spec {
    fn plug(self) -> Outcome<Vhca> {
        self.create().what("making a virtual HCA")
    }
}

/// The umad side of a device.
pub trait VhcaExt {
    /// Number of the port's umad device; waits for its node.
    fn umad(&self, port: u32) -> Outcome<u32>;

    /// Path of the port's issm node; waits for it.
    fn issm(&self, port: u32) -> Outcome<PathBuf> {
        let path = PathBuf::from(format!("/dev/infiniband/issm{}", self.umad(port)?));
        wait_until(&format!("{} is there", path.display()), SOON, || {
            path.exists()
        })?;
        Ok(path)
    }

    /// The port's capability mask in sysfs.
    fn cap_mask(&self, port: u32) -> Outcome<u32>;

    /// The next frame of a MAD with a transaction id (lower half), of a device whose wire is in user space;
    /// `ib_core` has MADs of its own to send. The limit is for each frame.
    fn frame(&self, tid: Tid, limit: Duration) -> Outcome<Frame>;

    /// Opens a port for subnet management: an agent of queue pair 0 that asks for nothing unsolicited.
    fn manager(&self, port: u32) -> Outcome<Agent> {
        self.agent(port, &Registration::send_only().qpn(0))
    }

    /// Opens a port and registers an agent.
    fn agent(&self, port: u32, registration: &Registration) -> Outcome<Agent> {
        let port = Port::open(self.umad(port)?)?;
        let agent = port.register2(registration)?;
        Ok(Agent { port, agent })
    }
}

impl VhcaExt for Vhca {
    fn frame(&self, tid: Tid, limit: Duration) -> Outcome<Frame> {
        loop {
            let frame = self.read_frame(limit)?;
            if frame.kind == Frame::MAD && MadHdr::of(&frame.mad)?.tid().low() == tid.low() {
                return Ok(frame);
            }
        }
    }

    fn umad(&self, port: u32) -> Outcome<u32> {
        wait_for_umad(&self.ibdev, port)
    }

    fn cap_mask(&self, port: u32) -> Outcome<u32> {
        let path = sysfs::port_dir(&self.ibdev, port).join("cap_mask");
        let text = fs::read_to_string(&path)?;
        Ok(u32::from_str_radix(
            text.trim().trim_start_matches("0x"),
            16,
        )?)
    }
}

/// Waits until a port has a umad device and its node, and returns its number.
pub fn wait_for_umad(ibdev: &str, port: u32) -> Outcome<u32> {
    let end = Instant::now() + patient(SOON);
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

/// Names in the class of umad and issm devices.
pub fn names_in_class() -> Outcome<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(sysfs::CLASS)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
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
        let end = Instant::now() + patient(SOON);
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
        let end = Instant::now() + patient(SOON);
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
