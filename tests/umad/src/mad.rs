// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The headers that a MAD starts with.

use std::fmt;
use std::mem::size_of;

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{MAD_HDR_LEN, MAD_LEN, RMPP_HDR_LEN};
use crate::{Error, Result, Tid};

/// The method of a MAD. Bit 7 marks a response.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Method(pub u8);

impl Method {
    /// Get.
    pub const GET: Self = Self(0x01);
    /// Set.
    pub const SET: Self = Self(0x02);
    /// Send: no response belongs to it.
    pub const SEND: Self = Self(0x03);
    /// Trap.
    pub const TRAP: Self = Self(0x05);
    /// Report.
    pub const REPORT: Self = Self(0x06);
    /// TrapRepress: counts as a response, though without its bit.
    pub const TRAP_REPRESS: Self = Self(0x07);
    /// GetResp: the response to Get and to Set.
    pub const GET_RESP: Self = Self(0x81);
    /// The bit of a response.
    pub const RESPONSE: u8 = 0x80;

    /// The method that answers this one.
    pub const fn response(self) -> Self {
        match self {
            Self::SET => Self::GET_RESP,
            Self(m) => Self(m | Self::RESPONSE),
        }
    }
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#04x}", self.0)
    }
}

/// The header of every MAD (24 bytes).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct MadHdr {
    /// 1.
    pub base_version: u8,
    /// Management class.
    pub mgmt_class: u8,
    /// Version of the class.
    pub class_version: u8,
    /// Method.
    pub method: Method,
    /// Status of a response.
    pub status: U16,
    /// Belongs to the class.
    pub class_specific: U16,
    /// Transaction id.
    pub tid: U64,
    /// Attribute.
    pub attr_id: U16,
    /// Not used.
    pub reserved: U16,
    /// Attribute modifier.
    pub attr_mod: U32,
}

impl MadHdr {
    /// The transaction id.
    pub fn tid(&self) -> Tid {
        Tid(self.tid.get())
    }

    /// Reads the header of a MAD.
    pub fn of(mad: &[u8]) -> Result<Self> {
        match Self::read_from_prefix(mad) {
            Ok((hdr, _)) => Ok(hdr),
            Err(_) => Err(Error::Truncated {
                got: mad.len(),
                need: MAD_HDR_LEN,
            }),
        }
    }
}

/// The RMPP header (12 bytes), behind the MAD header in the classes that know RMPP.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RmppHdr {
    /// 1, or 0 where RMPP is not used.
    pub version: u8,
    /// [`RmppHdr::DATA`] and its like.
    pub rmpp_type: u8,
    /// Response time in the upper five bits, flags in the lower three.
    pub rtime_flags: u8,
    /// Status.
    pub status: u8,
    /// Number of the segment, from 1.
    pub segment: U32,
    /// Bytes in the message or in the last segment; window of an ACK.
    pub length: U32,
}

impl RmppHdr {
    /// Type: data.
    pub const DATA: u8 = 1;
    /// Type: acknowledgement.
    pub const ACK: u8 = 2;
    /// Type: stop.
    pub const STOP: u8 = 3;
    /// Type: abort.
    pub const ABORT: u8 = 4;
    /// Flag: RMPP is in use.
    pub const ACTIVE: u8 = 1;
    /// Flag: the first segment.
    pub const FIRST: u8 = 2;
    /// Flag: the last segment.
    pub const LAST: u8 = 4;

    /// What a program writes before a message that the kernel shall cut into segments.
    pub fn active() -> Self {
        Self {
            version: 1,
            rmpp_type: Self::DATA,
            rtime_flags: Self::ACTIVE,
            ..Self::default()
        }
    }

    /// Reads the RMPP header of a MAD.
    pub fn of(mad: &[u8]) -> Result<Self> {
        match mad.get(MAD_HDR_LEN..).map(Self::read_from_prefix) {
            Some(Ok((hdr, _))) => Ok(hdr),
            _ => Err(Error::Truncated {
                got: mad.len(),
                need: RMPP_HDR_LEN,
            }),
        }
    }
}

const _: () = assert!(size_of::<MadHdr>() == MAD_HDR_LEN);
const _: () = assert!(size_of::<MadHdr>() + size_of::<RmppHdr>() == RMPP_HDR_LEN);

/// Length of all headers of a class: where the data of a MAD starts.
pub const fn data_offset(class: u8) -> usize {
    match class {
        0x03 => 56,
        0x06 | 0x10 | 0x12 => 64,
        0x30..=0x4f => 40,
        _ => MAD_HDR_LEN,
    }
}

/// Builds a MAD of the vendor classes 0x30 to 0x4f: MAD header, RMPP header, OUI, payload.
///
/// Without RMPP it is [`MAD_LEN`] bytes long, whatever its payload; with it as long as it has to be.
#[derive(Clone, Debug)]
pub struct VendorMad {
    bytes: Vec<u8>,
    rmpp: bool,
}

impl VendorMad {
    /// Where the payload starts.
    pub const DATA: usize = 40;

    /// An empty MAD of class version 1.
    pub fn new(class: u8, oui: u32, method: Method, tid: Tid) -> Self {
        let hdr = MadHdr {
            base_version: 1,
            mgmt_class: class,
            class_version: 1,
            method,
            tid: U64::new(tid.0),
            attr_id: U16::new(1),
            ..MadHdr::default()
        };
        let mut bytes = vec![0; Self::DATA];
        bytes[..MAD_HDR_LEN].copy_from_slice(hdr.as_bytes());
        bytes[36..40].copy_from_slice(&(oui & 0x00ff_ffff).to_be_bytes());
        Self { bytes, rmpp: false }
    }

    /// Appends to the payload.
    pub fn payload(mut self, data: &[u8]) -> Self {
        self.bytes.extend_from_slice(data);
        self
    }

    /// Asks for RMPP: the kernel cuts the message into segments.
    pub fn rmpp(mut self) -> Self {
        self.bytes[MAD_HDR_LEN..RMPP_HDR_LEN].copy_from_slice(RmppHdr::active().as_bytes());
        self.rmpp = true;
        self
    }

    /// Sets the status field.
    pub fn status(mut self, status: u16) -> Self {
        self.bytes[4..6].copy_from_slice(&status.to_be_bytes());
        self
    }

    /// Sets the version of the class.
    pub fn class_version(mut self, version: u8) -> Self {
        self.bytes[2] = version;
        self
    }

    /// Sets the attribute and its modifier.
    pub fn attribute(mut self, id: u16, modifier: u32) -> Self {
        self.bytes[16..18].copy_from_slice(&id.to_be_bytes());
        self.bytes[20..24].copy_from_slice(&modifier.to_be_bytes());
        self
    }

    /// The MAD as it is written.
    pub fn into_bytes(mut self) -> Vec<u8> {
        if !self.rmpp && self.bytes.len() < MAD_LEN {
            self.bytes.resize(MAD_LEN, 0);
        }
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendor_mad_has_its_fields_in_place() {
        let mad = VendorMad::new(0x30, 0x001405, Method::GET, Tid(0x0102_0304_0506_0708))
            .attribute(0x11, 0x22)
            .payload(b"abc")
            .into_bytes();
        assert_eq!(mad.len(), 256);
        assert_eq!(mad[..4], [1, 0x30, 1, 1]);
        assert_eq!(mad[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!((mad[17], mad[23]), (0x11, 0x22));
        assert_eq!(mad[36..43], [0, 0, 0x14, 0x05, b'a', b'b', b'c']);
        let hdr = MadHdr::of(&mad).unwrap();
        assert_eq!(hdr.tid().low(), 0x0506_0708);
        assert_eq!(hdr.method.response(), Method::GET_RESP);
        assert_eq!(Method::SET.response(), Method::GET_RESP);
    }

    #[test]
    fn rmpp_mad_is_as_long_as_its_payload() {
        let mad = VendorMad::new(0x30, 1, Method::SEND, Tid::new(1))
            .rmpp()
            .payload(&[9; 1000])
            .into_bytes();
        assert_eq!(mad.len(), 1040);
        let rmpp = RmppHdr::of(&mad).unwrap();
        assert_eq!((rmpp.version, rmpp.rmpp_type, rmpp.rtime_flags), (1, 1, 1));
    }

    #[test]
    fn short_bytes_are_no_header() {
        assert!(MadHdr::of(&[0; 23]).is_err());
        assert!(RmppHdr::of(&[0; 35]).is_err());
        assert!(RmppHdr::of(&[0; 20]).is_err());
    }
}
