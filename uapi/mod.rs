// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The user ABI of umad devices: structures, numbers, limits.
//!
//! C header: `include/uapi/rdma/ib_user_mad.h`. The layouts are checked against it at compile time in
//! `bindings/abi_check.rs`. All of them are the same for 32-bit and 64-bit programs.

#![forbid(unsafe_code)]

use kernel::{
    ioctl::{
        _IO,
        _IOW,
        _IOWR, //
    },
    prelude::*, //
};
use zerocopy_derive::Immutable;

/// What `abi_version` in sysfs says, and GET_CHARDEV, as long as nobody asks for the next one.
pub(crate) const ABI_VERSION: u32 = 5;
/// The version that the kernel's document announced.
pub(crate) const NEXT_ABI_VERSION: u32 = 6;

/// Agents of one file; agent ids are below this number.
pub(crate) const MAX_AGENTS: usize = 32;

// A C `long` of the method bitmap is read as two words, lower one first, for 64-bit programs as well.
const _: () = assert!(cfg!(target_endian = "little"));

const IOCTL_MAGIC: u32 = 0x1b;

/// Registers an agent; takes and returns a [`RegReq`].
pub(crate) const REGISTER_AGENT: u32 = _IOWR::<RegReq>(IOCTL_MAGIC, 1);
/// Unregisters an agent; takes its id, a `u32`.
pub(crate) const UNREGISTER_AGENT: u32 = _IOW::<u32>(IOCTL_MAGIC, 2);
/// Chooses the [`PacketHeader`] with a P_Key index for a file that has had no agent yet.
pub(crate) const ENABLE_PKEY: u32 = _IO(IOCTL_MAGIC, 3);
/// Registers an agent; takes and returns a [`RegReq2`].
pub(crate) const REGISTER_AGENT2: u32 = _IOWR::<RegReq2>(IOCTL_MAGIC, 4);

const _: () = assert!(REGISTER_AGENT == 0xc01c_1b01);
const _: () = assert!(UNREGISTER_AGENT == 0x4004_1b02);
const _: () = assert!(ENABLE_PKEY == 0x0000_1b03);
const _: () = assert!(REGISTER_AGENT2 == 0xc028_1b04);

/// [`RegReq2::flags`]: the agent does RMPP itself.
pub(crate) const REG_USER_RMPP: u32 = 1;
/// All flags that [`RegReq2::flags`] may have.
pub(crate) const REG_FLAGS_CAP: u32 = REG_USER_RMPP;

/// [`PacketHeader::status`] of a send that got no response: `ETIMEDOUT`, positive.
pub(crate) const STATUS_TIMED_OUT: u32 = 110;

/// What REGISTER_AGENT takes and returns (`struct ib_user_mad_reg_req`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct RegReq {
    /// The agent's id, set by the kernel.
    pub(crate) id: u32,
    /// Methods to receive requests of: a bitmap of C `long`s, whose words need an alignment of 4 only.
    pub(crate) method_mask: [u32; 4],
    /// Queue pair, 0 or 1.
    pub(crate) qpn: u8,
    /// Management class to receive requests of, 0 for none.
    pub(crate) mgmt_class: u8,
    /// Version of the class.
    pub(crate) mgmt_class_version: u8,
    /// OUI of a vendor class 0x30 to 0x4f.
    pub(crate) oui: [u8; 3],
    /// RMPP version, 0 for none.
    pub(crate) rmpp_version: u8,
    /// Padding that C has, too.
    pub(crate) pad: u8,
}

impl RegReq {
    /// Where [`RegReq::id`] lies.
    pub(crate) const ID_OFFSET: usize = core::mem::offset_of!(Self, id);

    /// The method bitmap, bit n of word n / 64.
    pub(crate) fn methods(&self) -> [u64; 2] {
        let [a, b, c, d] = self.method_mask;
        [long_from_words(a, b), long_from_words(c, d)]
    }
}

/// The C `long` of a 64-bit program, or two of a 32-bit one, as a word of 64 bits.
fn long_from_words(first: u32, second: u32) -> u64 {
    u64::from(second) << 32 | u64::from(first)
}

/// What REGISTER_AGENT2 takes and returns (`struct ib_user_mad_reg_req2`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct RegReq2 {
    /// The agent's id, set by the kernel.
    pub(crate) id: u32,
    /// Queue pair, 0 or 1.
    pub(crate) qpn: u32,
    /// Management class to receive requests of, 0 for none.
    pub(crate) mgmt_class: u8,
    /// Version of the class.
    pub(crate) mgmt_class_version: u8,
    /// Not looked at.
    pub(crate) res: u16,
    /// [`REG_USER_RMPP`] or 0. If it is something else, [`REG_FLAGS_CAP`] is written back.
    pub(crate) flags: u32,
    /// Methods to receive requests of, bit n of word n / 64.
    pub(crate) method_mask: [u64; 2],
    /// OUI of a vendor class 0x30 to 0x4f, 24 bits.
    pub(crate) oui: u32,
    /// RMPP version, 0 for none.
    pub(crate) rmpp_version: u8,
    /// Not looked at.
    pub(crate) reserved: [u8; 3],
}

impl RegReq2 {
    /// Where [`RegReq2::id`] lies.
    pub(crate) const ID_OFFSET: usize = core::mem::offset_of!(Self, id);
    /// Where [`RegReq2::flags`] lies.
    pub(crate) const FLAGS_OFFSET: usize = core::mem::offset_of!(Self, flags);
}

/// What stands before each MAD in read() and write() (`struct ib_user_mad_hdr`).
///
/// Fields named `*_be` are in network byte order.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct PacketHeader {
    /// The agent's id.
    pub(crate) id: u32,
    /// 0, or [`STATUS_TIMED_OUT`]. Not looked at in write().
    pub(crate) status: u32,
    /// write(): milliseconds to wait for a response, 0 for none.
    pub(crate) timeout_ms: u32,
    /// write(): how often to send again.
    pub(crate) retries: u32,
    /// read(): bytes of header and MAD.
    pub(crate) length: u32,
    /// The other side's queue pair.
    pub(crate) qpn_be: u32,
    /// The other side's Q_Key. Not looked at: `ib_mad` uses the well-known one.
    pub(crate) qkey_be: u32,
    /// The other side's LID.
    pub(crate) lid_be: u16,
    /// Service level.
    pub(crate) sl: u8,
    /// Low bits of the own LID.
    pub(crate) path_bits: u8,
    /// Whether the fields down to the flow label mean something.
    pub(crate) grh_present: u8,
    /// Index of the own GID.
    pub(crate) gid_index: u8,
    /// Hop limit.
    pub(crate) hop_limit: u8,
    /// Traffic class.
    pub(crate) traffic_class: u8,
    /// The other side's GID.
    pub(crate) gid: [u8; 16],
    /// Flow label.
    pub(crate) flow_label_be: u32,
    /// P_Key index. The old layout ends before this field.
    pub(crate) pkey_index: u16,
    /// Zero in read(), not looked at in write().
    pub(crate) reserved: [u8; 6],
}

/// Which of the two headers a file uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// 56 bytes, without P_Key index.
    Old,
    /// 64 bytes.
    PKeyIndex,
}

/// Bytes of the whole header.
pub(crate) const HEADER_LEN: usize = core::mem::size_of::<PacketHeader>();
/// Bytes of the old header.
pub(crate) const OLD_HEADER_LEN: usize = core::mem::offset_of!(PacketHeader, pkey_index);

impl Layout {
    /// Bytes of the header.
    pub(crate) const fn header_len(self) -> usize {
        match self {
            Layout::Old => OLD_HEADER_LEN,
            Layout::PKeyIndex => HEADER_LEN,
        }
    }
}

#[kunit_tests(umad_uapi)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn methods_of_both_requests_are_the_same_bits() {
        let mut req = RegReq::new_zeroed();
        req.method_mask = [1, 2, 4, 1 << 31];
        assert_eq!(req.methods(), [1 | 2 << 32, 4 | 1 << 63]);
    }

    #[test]
    fn the_old_header_is_the_new_one_without_its_end() {
        assert_eq!(Layout::Old.header_len(), 56);
        assert_eq!(Layout::PKeyIndex.header_len(), 64);
    }
}
