// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The user ABI of ib_umad: what read(), write() and ioctl() exchange with the kernel.
//!
//! Fields that travel on the wire are big-endian types, all others are in the machine's own order.
//! All structures are free of implicit padding, so that they can be seen as bytes and back.

use std::mem::{offset_of, size_of};

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The ioctl magic of all RDMA character devices.
pub const IOCTL_MAGIC: u8 = 0x1b;

/// The only registration flag so far: the agent handles RMPP by itself.
pub const USER_RMPP: u32 = 1;

/// Agents that one open file can hold.
pub const MAX_AGENTS: u32 = 32;

/// Length of the header that every MAD starts with.
pub const MAD_HDR_LEN: usize = 24;

/// Length of the MAD header and the RMPP header: the least that can be written.
pub const RMPP_HDR_LEN: usize = 36;

/// Length of an InfiniBand MAD.
pub const MAD_LEN: usize = 256;

/// Header of a packet without P_Key index (56 bytes).
///
/// It is what a file uses until `ENABLE_PKEY`, or `REGISTER_AGENT2` as its first registration.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct HdrOld {
    /// Agent that sends, or that the packet came for.
    pub id: u32,
    /// 0, or the (positive) errno of a send that failed; ignored in sends.
    pub status: u32,
    /// Milliseconds to wait for a response; 0: none is expected.
    pub timeout_ms: u32,
    /// Repetitions of a request that stays unanswered.
    pub retries: u32,
    /// Length of header and MAD, set by the kernel in what is received.
    pub length: u32,
    /// Remote queue pair.
    pub qpn: U32,
    /// Remote Q_Key.
    pub qkey: U32,
    /// Remote LID.
    pub lid: U16,
    /// Service level.
    pub sl: u8,
    /// Source path bits.
    pub path_bits: u8,
    /// Not zero: the fields of the GRH count.
    pub grh_present: u8,
    /// Index of the local GID.
    pub gid_index: u8,
    /// Hop limit of the GRH.
    pub hop_limit: u8,
    /// Traffic class of the GRH.
    pub traffic_class: u8,
    /// Remote GID.
    pub gid: [u8; 16],
    /// Flow label of the GRH.
    pub flow_label: U32,
}

/// Header of a packet with P_Key index (64 bytes).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Hdr {
    /// The fields that both layouts share.
    pub base: HdrOld,
    /// Index into the port's P_Key table.
    pub pkey_index: u16,
    /// Not used.
    pub reserved: [u8; 6],
}

/// Argument of `REGISTER_AGENT` (28 bytes).
///
/// The mask is an array of C `long` that is aligned to 4 bytes only; here it is four words in the
/// order that makes the same bytes ([`crate::MethodMask::to_words`]).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RegReq {
    /// Set by the kernel: the agent's id.
    pub id: u32,
    /// Methods of unsolicited MADs that the agent wants.
    pub method_mask: [u32; 4],
    /// 0 or 1.
    pub qpn: u8,
    /// Class of the unsolicited MADs; 0: none are wanted.
    pub mgmt_class: u8,
    /// Version of that class.
    pub mgmt_class_version: u8,
    /// Vendor, for classes 0x30 to 0x4f; first byte first.
    pub oui: [u8; 3],
    /// 1: the kernel does RMPP; 0: no RMPP.
    pub rmpp_version: u8,
    /// Padding of the C structure.
    pub padding: u8,
}

/// Argument of `REGISTER_AGENT2` (40 bytes).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RegReq2 {
    /// Set by the kernel: the agent's id.
    pub id: u32,
    /// 0 or 1.
    pub qpn: u32,
    /// Class of the unsolicited MADs; 0: none are wanted.
    pub mgmt_class: u8,
    /// Version of that class.
    pub mgmt_class_version: u8,
    /// Ignored.
    pub res: u16,
    /// [`USER_RMPP`]; with an unknown flag the kernel writes the known ones back.
    pub flags: u32,
    /// Methods of unsolicited MADs that the agent wants, bit 0 of word 0 first.
    pub method_mask: [u64; 2],
    /// Vendor, for classes 0x30 to 0x4f; the low 24 bits.
    pub oui: u32,
    /// Version of RMPP, 0 or 1.
    pub rmpp_version: u8,
    /// Ignored.
    pub reserved: [u8; 3],
}

const _: () = assert!(size_of::<HdrOld>() == 56 && size_of::<Hdr>() == 64);
const _: () = assert!(offset_of!(HdrOld, lid) == 28 && offset_of!(HdrOld, grh_present) == 32);
const _: () = assert!(offset_of!(HdrOld, gid) == 36 && offset_of!(Hdr, pkey_index) == 56);
const _: () = assert!(size_of::<RegReq>() == 28 && offset_of!(RegReq, qpn) == 20);
const _: () = assert!(size_of::<RegReq2>() == 40 && offset_of!(RegReq2, method_mask) == 16);
const _: () = assert!(offset_of!(RegReq2, oui) == 32);

/// ioctl `REGISTER_AGENT`.
pub const REGISTER_AGENT: u32 = 0xc01c_1b01;
/// ioctl `UNREGISTER_AGENT`.
pub const UNREGISTER_AGENT: u32 = 0x4004_1b02;
/// ioctl `ENABLE_PKEY`.
pub const ENABLE_PKEY: u32 = 0x1b03;
/// ioctl `REGISTER_AGENT2`.
pub const REGISTER_AGENT2: u32 = 0xc028_1b04;

/// The calls themselves, as thin as nix makes them.
#[allow(missing_docs)]
pub mod ioctl {
    use super::{RegReq, RegReq2, IOCTL_MAGIC};

    nix::ioctl_readwrite!(register_agent, IOCTL_MAGIC, 1, RegReq);
    nix::ioctl_write_ptr!(unregister_agent, IOCTL_MAGIC, 2, u32);
    nix::ioctl_none!(enable_pkey, IOCTL_MAGIC, 3);
    nix::ioctl_readwrite!(register_agent2, IOCTL_MAGIC, 4, RegReq2);
}

const _: () = {
    assert!(
        nix::request_code_readwrite!(IOCTL_MAGIC, 1, size_of::<RegReq>())
            == REGISTER_AGENT as nix::sys::ioctl::ioctl_num_type
    );
    assert!(
        nix::request_code_write!(IOCTL_MAGIC, 2, size_of::<u32>())
            == UNREGISTER_AGENT as nix::sys::ioctl::ioctl_num_type
    );
    assert!(
        nix::request_code_none!(IOCTL_MAGIC, 3) == ENABLE_PKEY as nix::sys::ioctl::ioctl_num_type
    );
    assert!(
        nix::request_code_readwrite!(IOCTL_MAGIC, 4, size_of::<RegReq2>())
            == REGISTER_AGENT2 as nix::sys::ioctl::ioctl_num_type
    );
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_bytes_are_where_the_kernel_looks() {
        let hdr = Hdr {
            base: HdrOld {
                id: 3,
                qpn: U32::new(1),
                qkey: U32::new(0x8001_0000),
                lid: U16::new(0x1234),
                grh_present: 1,
                hop_limit: 64,
                gid: [0xab; 16],
                flow_label: U32::new(0xf_edcb),
                ..HdrOld::default()
            },
            pkey_index: 7,
            reserved: [0; 6],
        };
        let bytes = hdr.as_bytes();
        assert_eq!(bytes[0..4], 3u32.to_ne_bytes());
        assert_eq!(bytes[20..24], [0, 0, 0, 1]);
        assert_eq!(bytes[24..28], [0x80, 0x01, 0, 0]);
        assert_eq!(bytes[28..30], [0x12, 0x34]);
        assert_eq!((bytes[32], bytes[34]), (1, 64));
        assert_eq!(bytes[36..52], [0xab; 16]);
        assert_eq!(bytes[52..56], [0x00, 0x0f, 0xed, 0xcb]);
        assert_eq!(bytes[56..58], 7u16.to_ne_bytes());
    }

    #[test]
    fn header_survives_bytes_and_back() {
        let bytes: Vec<u8> = (0..64).collect();
        let hdr = Hdr::read_from_bytes(&bytes).unwrap();
        assert_eq!(hdr.as_bytes(), bytes);
        assert!(Hdr::read_from_bytes(&bytes[..63]).is_err());
    }

    #[test]
    fn registration_fields_are_where_the_kernel_looks() {
        let req = RegReq {
            qpn: 1,
            mgmt_class: 0x30,
            mgmt_class_version: 2,
            oui: [0, 0x14, 0x05],
            rmpp_version: 1,
            ..RegReq::default()
        };
        assert_eq!(req.as_bytes()[20..], [1, 0x30, 2, 0, 0x14, 0x05, 1, 0]);
    }
}
