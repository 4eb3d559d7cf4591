// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Virtual InfiniBand HCAs, made by the module `ib_vhca` (tests/vhca): a device for each open control
//! file, gone with it. The structures are those of tests/vhca/uapi.rs.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::stat::Mode;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The control device.
pub const CONTROL: &str = "/dev/ib_vhca/control";

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
/// [`Vhca::set_port`] puts the port, if it is up, into the state that it is given.
pub const PORT_SET_STATE: u32 = 4;
/// [`Vhca::set_port`] tells clients to register anew with the subnet manager.
pub const PORT_REREGISTER: u32 = 8;
/// The driver has no `process_mad`.
pub const NO_PROCESS_MAD: u32 = 1;
/// Directed-route SMPs that go nowhere are answered by the control file's reader.
pub const USER_SMA: u32 = 2;

/// The node, a switch, stands in the fabric only, and is no device of this host.
pub const EXTERNAL: u32 = 4;

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
    /// `create_ah` fails with this errno.
    pub create_ah_errno: u32,
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

/// [`FrameHeader::flags`]: with a global route header.
const FRAME_GRH: u32 = 1;
/// Bytes of the longest MAD that there is.
const LONGEST_MAD: usize = 2048;

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

    /// A MAD between queue pairs 1, with the default P_Key, at a port.
    pub fn mad(port: u32, slid: u32, dlid: u32, mad: Vec<u8>) -> Self {
        Self {
            kind: Self::MAD,
            port,
            dlid,
            slid,
            dest_qp: 1,
            src_qp: 1,
            sl: 0,
            pkey: 0xffff,
            id: 0,
            grh: None,
            mad,
        }
    }

    /// A frame from the bytes of one read().
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, mad) = FrameHeader::read_from_prefix(bytes).ok()?;
        (usize::try_from(header.len).ok()? == mad.len()).then(|| Self {
            kind: header.kind,
            port: header.port,
            dlid: header.dlid,
            slid: header.slid,
            dest_qp: header.dest_qp,
            src_qp: header.src_qp,
            sl: header.sl,
            pkey: header.pkey,
            id: header.id,
            grh: (header.flags & FRAME_GRH != 0).then_some(header.grh),
            mad: mad.to_vec(),
        })
    }

    /// The bytes of one write().
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the MAD is too long.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let len = u32::try_from(self.mad.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let header = FrameHeader {
            kind: self.kind,
            port: self.port,
            dlid: self.dlid,
            slid: self.slid,
            dest_qp: self.dest_qp,
            src_qp: self.src_qp,
            sl: self.sl,
            pkey: self.pkey,
            len,
            id: self.id,
            flags: if self.grh.is_some() { FRAME_GRH } else { 0 },
            reserved: 0,
            grh: self.grh.unwrap_or([0; 40]),
        };
        Ok([header.as_bytes(), &self.mad].concat())
    }
}

const _: () = assert!(size_of::<FrameHeader>() == 88);
const _: () = assert!(size_of::<Create>() == 736);
const _: () = assert!(size_of::<PortChange>() == 72);
const _: () = assert!(size_of::<Faults>() == 60);
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

    /// Gives the node a GUID; ports have those behind it.
    pub fn guid(mut self, guid: u64) -> Self {
        self.0.node_guid = guid;
        self
    }

    /// Describes the node, by bytes of a NodeDescription.
    pub fn description(mut self, description: &[u8; 64]) -> Self {
        self.0.node_desc = *description;
        self
    }

    /// Plugs the device in, unless the equipment refuses.
    pub fn create(mut self) -> nix::Result<Vhca> {
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
    pub fn faults(&self, faults: Faults) -> nix::Result<()> {
        // SAFETY: the argument is the structure that the call reads.
        unsafe { ioctl::set_faults(self.control.as_raw_fd(), &faults) }?;
        Ok(())
    }

    /// What has happened so far.
    pub fn counters(&self) -> nix::Result<Counters> {
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
    pub fn change(&self, number: u32, change: impl FnOnce(&mut PortParams)) -> nix::Result<()> {
        let (mut port, state) = self.port(number)?;
        change(&mut port);
        self.set_port(number, port, state)
    }

    /// Sets a port; `state` counts only with [`PORT_SET_STATE`].
    pub fn set_port(&self, number: u32, port: PortParams, state: u32) -> nix::Result<()> {
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
    pub fn unplug(self) -> nix::Result<()> {
        // SAFETY: the call takes no argument.
        unsafe { ioctl::remove(self.control.as_raw_fd()) }?;
        Ok(())
    }

    /// Reads what leaves a device that is wired to user space; waits at most `limit`.
    ///
    /// # Errors
    ///
    /// `TimedOut` if nothing came, `UnexpectedEof` if the device is gone.
    pub fn read_frame(&self, limit: Duration) -> io::Result<Frame> {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        let ms = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
        if nix::poll::poll(&mut fds, ms)? == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no frame came"));
        }
        let mut buf = [0; size_of::<FrameHeader>() + LONGEST_MAD];
        let len = nix::unistd::read(&self.control, &mut buf)?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Frame::parse(&buf[..len])
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a frame"))
    }

    /// Lets a frame arrive at a device that is wired to user space, or answers its question.
    ///
    /// # Errors
    ///
    /// `ESRCH` if nobody waits for the answer (any more), `EINVAL` if it is no frame.
    pub fn write_frame(&self, frame: &Frame) -> io::Result<()> {
        let bytes = frame.to_bytes()?;
        let wrote = nix::unistd::write(&self.control, &bytes)?;
        if wrote != bytes.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_way_there_and_back() {
        let frame = Frame {
            kind: Frame::MAD,
            port: 1,
            dlid: 5,
            slid: 6,
            dest_qp: 1,
            src_qp: 2,
            sl: 3,
            pkey: 0x8001,
            id: 9,
            grh: Some([7; 40]),
            mad: vec![1; 256],
        };
        let bytes = frame.to_bytes().expect("a frame");
        assert_eq!(bytes.len(), 88 + 256);
        assert_eq!(Frame::parse(&bytes), Some(frame));
        assert_eq!(Frame::parse(&bytes[..300]), None, "a length that is wrong");
        assert_eq!(Frame::parse(&bytes[..80]), None, "half a header");
    }
}
