// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The user ABI of `/dev/ib_vhca/control`: structures, ioctl numbers, limits.
//!
//! All numbers are in the byte order of the host; there is no padding, and 32-bit programs see the same.
//! A field that is 0 always means "as usual".

#![forbid(unsafe_code)]

use core::mem::size_of;
use kernel::{
    ioctl::{
        _IO,
        _IOR,
        _IOW,
        _IOWR, //
    },
    prelude::*, //
};
use zerocopy_derive::Immutable;

const IOCTL_MAGIC: u32 = b'v' as u32;

/// Makes the file's device; takes a [`Create`] and writes the device's name into it.
pub(crate) const CREATE: u32 = _IOWR::<Create>(IOCTL_MAGIC, 1);
/// Sets the faults; takes a [`Faults`].
pub(crate) const SET_FAULTS: u32 = _IOW::<Faults>(IOCTL_MAGIC, 2);
/// Reads the [`Counters`].
pub(crate) const GET_COUNTERS: u32 = _IOR::<Counters>(IOCTL_MAGIC, 3);
/// Changes a port as if a subnet manager, or somebody at the cable, had; takes a [`PortChange`].
pub(crate) const SET_PORT: u32 = _IOW::<PortChange>(IOCTL_MAGIC, 4);
/// Reads a port; takes a [`PortChange`] with its number and fills in the rest.
pub(crate) const GET_PORT: u32 = _IOWR::<PortChange>(IOCTL_MAGIC, 5);
/// Removes the file's device; the file stays open and can make another one.
pub(crate) const REMOVE: u32 = _IO(IOCTL_MAGIC, 6);

/// Ports that a device can have, without a switch's port 0.
pub(crate) const MAX_PORTS: usize = 8;
/// Entries of a P_Key table.
pub(crate) const PKEYS: usize = 16;

/// [`Create::shape`]: a channel adapter with queue pairs 0 and 1.
pub(crate) const SHAPE_CA: u32 = 0;
/// [`Create::shape`]: queue pair 0 only.
pub(crate) const SHAPE_SMI_ONLY: u32 = 1;
/// [`Create::shape`]: queue pair 1 only.
pub(crate) const SHAPE_NO_SMI: u32 = 2;
/// [`Create::shape`]: a switch, managed at its port 0; it forwards between its other ports.
pub(crate) const SHAPE_SWITCH: u32 = 3;
/// [`Create::shape`]: a channel adapter with OPA MADs (2,048 bytes, base version 0x80) and LIDs of 32 bits.
pub(crate) const SHAPE_OPA: u32 = 4;
/// [`Create::shape`]: no MADs at all.
pub(crate) const SHAPE_NO_MAD: u32 = 5;

/// [`Create::wiring`]: ports are cabled to others of this module.
pub(crate) const WIRING_CABLES: u32 = 0;
/// [`Create::wiring`]: frames go to, and come from, the control file's reader and writer.
pub(crate) const WIRING_USER: u32 = 1;

/// [`Create::flags`]: the driver has no `process_mad`.
pub(crate) const CREATE_NO_PROCESS_MAD: u32 = 1;
/// [`Create::flags`]: directed-route SMPs that go nowhere are answered by the control file's reader.
pub(crate) const CREATE_USER_SMA: u32 = 2;
/// [`Create::flags`]: the node stands in the fabric, and is no device of this host: a switch. Its agent
/// answers by itself. There is no other way to have a switch beside `ib_cm`, which looks in front of its
/// table of ports where one has number 0.
pub(crate) const CREATE_EXTERNAL: u32 = 4;
/// All flags that [`Create::flags`] may have.
pub(crate) const CREATE_FLAGS: u32 = CREATE_NO_PROCESS_MAD | CREATE_USER_SMA | CREATE_EXTERNAL;

/// [`PortParams::flags`]: the port is down, whatever is at its cable.
pub(crate) const PORT_DOWN: u32 = 1;
/// [`PortParams::flags`]: the port does not go further than Init by itself, a subnet manager does that.
pub(crate) const PORT_WAIT_FOR_SM: u32 = 2;
/// [`PortParams::flags`] of [`SET_PORT`]: the port, if it is up, goes to [`PortChange::state`].
pub(crate) const PORT_SET_STATE: u32 = 4;
/// [`PortParams::flags`] of [`SET_PORT`]: clients are told to register anew with the subnet manager.
pub(crate) const PORT_REREGISTER: u32 = 8;
/// All flags that [`PortParams::flags`] may have.
pub(crate) const PORT_FLAGS: u32 = PORT_DOWN | PORT_WAIT_FOR_SM | PORT_SET_STATE | PORT_REREGISTER;

/// What a port is like.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct PortParams {
    /// LID.
    pub(crate) lid: u32,
    /// LMC, 0 to 7.
    pub(crate) lmc: u32,
    /// MasterSMLID.
    pub(crate) sm_lid: u32,
    /// The two ports that name the same cable are connected; 0 for none. Only [`CREATE`] looks at it.
    pub(crate) cable: u32,
    /// CapabilityMask; 0 for a common one. [`SET_PORT`] leaves the mask alone if it is 0.
    pub(crate) cap_mask: u32,
    /// [`PORT_DOWN`] and others.
    pub(crate) flags: u32,
    /// Upper half of the port's GIDs; 0 for fe80::/64.
    pub(crate) gid_prefix: u64,
    /// The P_Key table; all 0 for the default P_Key at index 0 ([`SET_PORT`]: for no change).
    pub(crate) pkeys: [u16; PKEYS],
}

/// What [`CREATE`] takes and returns.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Create {
    /// Bytes of this structure.
    pub(crate) size: u32,
    /// [`SHAPE_CA`] and others.
    pub(crate) shape: u32,
    /// Ports, 1 to [`MAX_PORTS`], without a switch's port 0.
    pub(crate) ports: u32,
    /// [`WIRING_CABLES`] or [`WIRING_USER`].
    pub(crate) wiring: u32,
    /// [`CREATE_NO_PROCESS_MAD`] and others.
    pub(crate) flags: u32,
    /// Must be 0.
    pub(crate) reserved: u32,
    /// GUID of the node; 0 for one that the kernel chooses. Ports have the GUIDs behind it.
    pub(crate) node_guid: u64,
    /// Name, ended by a zero; empty for `vhcaN`. The kernel writes the name that the device got,
    /// if it is one.
    pub(crate) name: [u8; 64],
    /// NodeDescription.
    pub(crate) node_desc: [u8; 64],
    /// Port n is at index n.
    pub(crate) port: [PortParams; MAX_PORTS + 1],
}

/// What [`SET_PORT`] and [`GET_PORT`] take.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct PortChange {
    /// Number of the port.
    pub(crate) number: u32,
    /// PortState, filled in by [`GET_PORT`]; with [`PORT_SET_STATE`] what it is to be.
    pub(crate) state: u32,
    /// The port.
    pub(crate) port: PortParams,
}

/// Faults. They happen to sends and frames that leave the device (and to nothing that it receives),
/// counted from the call of [`SET_FAULTS`] on.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Faults {
    /// Only MADs of this class are counted and suffer; 0 for all.
    pub(crate) mgmt_class: u32,
    /// Drops each so-manieth frame.
    pub(crate) drop_every: u32,
    /// Drops the next so many frames.
    pub(crate) drop_next: u32,
    /// Sends each so-manieth frame twice.
    pub(crate) duplicate_every: u32,
    /// Delays frames by so many ms.
    pub(crate) delay_ms: u32,
    /// Lets this (1 is the next) `post_send` fail ..
    pub(crate) fail_send_at: u32,
    /// .. with this errno; 0 for `EINVAL`.
    pub(crate) fail_send_errno: u32,
    /// Completes this (1 is the next) send with ..
    pub(crate) send_status_at: u32,
    /// .. this `enum ib_wc_status`; 0 for a general error. Its frame is dropped.
    pub(crate) send_status: u32,
    /// Completes sends so many ms late.
    pub(crate) complete_delay_ms: u32,
    /// Sleeps so many ms in `process_mad` with a subnet management MAD.
    pub(crate) process_mad_delay_ms: u32,
    /// Lets `modify_port` fail with this errno.
    pub(crate) modify_port_errno: u32,
    /// Swallows the next so many requests that are offered to `process_mad`, without an answer.
    pub(crate) consume_next: u32,
    /// Refuses the next so many requests that are offered to `process_mad`.
    pub(crate) refuse_next: u32,
    /// Lets address handles not be made, with this errno.
    pub(crate) create_ah_errno: u32,
}

/// What has happened so far.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Counters {
    /// Sends that were posted, refused ones included.
    pub(crate) sends: u64,
    /// Sends that `post_send` refused.
    pub(crate) sends_refused: u64,
    /// Sends that were completed.
    pub(crate) completions: u64,
    /// Frames that left a port.
    pub(crate) frames_out: u64,
    /// Frames that came to a port.
    pub(crate) frames_in: u64,
    /// Frames that a queue pair received.
    pub(crate) delivered: u64,
    /// Frames that a fault dropped.
    pub(crate) dropped: u64,
    /// Frames that a fault sent twice.
    pub(crate) duplicated: u64,
    /// Frames that had nowhere to go: port down, no such LID, data in a device wired to user space.
    pub(crate) undeliverable: u64,
    /// Frames that found no queue pair, or none that receives.
    pub(crate) no_queue_pair: u64,
    /// Frames that found no receive buffer.
    pub(crate) no_buffer: u64,
    /// Frames with a P_Key that is not the port's.
    pub(crate) pkey_violations: u64,
    /// Datagrams with a Q_Key that is not the queue pair's.
    pub(crate) qkey_violations: u64,
    /// MADs that were offered to `process_mad`.
    pub(crate) offered: u64,
    /// MADs that `process_mad` answered.
    pub(crate) answered: u64,
    /// Calls of `modify_port`.
    pub(crate) modified: u64,
    /// Calls of `modify_port` that failed.
    pub(crate) modify_failed: u64,
    /// Address handles that were made.
    pub(crate) ahs_made: u64,
    /// Address handles that were destroyed.
    pub(crate) ahs_destroyed: u64,
}

/// [`FrameHeader::kind`]: a MAD on the wire.
pub(crate) const KIND_MAD: u32 = 1;
/// [`FrameHeader::kind`], read only: the port's capability mask changed; it stands in `dlid`.
pub(crate) const KIND_CAP_MASK: u32 = 2;
/// [`FrameHeader::kind`]: read, a directed-route SMP that goes nowhere, to be answered; written, the
/// answer, with the same `id`.
pub(crate) const KIND_LOCAL: u32 = 3;

/// [`FrameHeader::flags`]: with a global route header.
pub(crate) const FRAME_GRH: u32 = 1;

/// What stands before a MAD in read() and write() of a control file whose device is wired to user space.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct FrameHeader {
    /// [`KIND_MAD`] and others.
    pub(crate) kind: u32,
    /// The port that it leaves, or is to come in through.
    pub(crate) port: u32,
    /// Destination LID.
    pub(crate) dlid: u32,
    /// Source LID.
    pub(crate) slid: u32,
    /// Destination queue pair.
    pub(crate) dest_qp: u32,
    /// Source queue pair.
    pub(crate) src_qp: u32,
    /// Service level.
    pub(crate) sl: u32,
    /// P_Key.
    pub(crate) pkey: u32,
    /// Bytes of the MAD behind this header.
    pub(crate) len: u32,
    /// Tells local questions apart.
    pub(crate) id: u32,
    /// [`FRAME_GRH`].
    pub(crate) flags: u32,
    /// Not looked at.
    pub(crate) reserved: u32,
    /// The global route header.
    pub(crate) grh: [u8; 40],
}

const _: () = assert!(size_of::<PortParams>() == 64);
const _: () = assert!(size_of::<Create>() == 736);
const _: () = assert!(size_of::<PortChange>() == 72);
const _: () = assert!(size_of::<Faults>() == 60);
const _: () = assert!(size_of::<Counters>() == 152);
const _: () = assert!(size_of::<FrameHeader>() == 88);
