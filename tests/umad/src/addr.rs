// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Addresses: GID, queue pair, P_Key index, transaction id, and where a MAD goes as a whole.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use zerocopy::byteorder::big_endian::{U16, U32};

use crate::abi::{Hdr, HdrOld};
use crate::Error;

/// A global identifier: 128 bits, written like an IPv6 address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// True for the GID of an unused table entry.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// True for fe80::/10.
    pub fn is_link_local(&self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv6Addr::from(self.0), f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Gid {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let addr: Ipv6Addr = s.trim().parse().map_err(|_| Error::Address)?;
        Ok(Self(addr.octets()))
    }
}

/// A queue pair number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Qpn(pub u32);

impl Qpn {
    /// QP 0, for subnet management.
    pub const SMI: Self = Self(0);
    /// QP 1, for all other classes.
    pub const GSI: Self = Self(1);
}

/// An index into the port's P_Key table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PkeyIndex(pub u16);

/// A transaction id. The kernel owns the upper half of a request's id: it names the agent, so that
/// the response finds it. Programs choose, and compare, the lower half.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tid(pub u64);

impl Tid {
    /// The id that a program gives to a request.
    pub const fn new(low: u32) -> Self {
        Self(low as u64)
    }

    /// The program's half.
    #[allow(clippy::cast_possible_truncation)] // the lower half is what is asked for
    pub const fn low(self) -> u32 {
        self.0 as u32
    }

    /// The kernel's half.
    pub const fn high(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Debug for Tid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}:{:08x}", self.high(), self.low())
    }
}

impl fmt::Display for Tid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The global route of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grh {
    /// Remote GID.
    pub gid: Gid,
    /// Index of the local GID.
    pub gid_index: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label (20 bits).
    pub flow_label: u32,
}

/// Where a MAD goes to, or came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// Remote queue pair.
    pub qpn: Qpn,
    /// Remote Q_Key.
    pub qkey: u32,
    /// Remote LID; 0 on RoCE.
    pub lid: u16,
    /// Service level.
    pub sl: u8,
    /// Source path bits.
    pub path_bits: u8,
    /// The global route; RoCE cannot do without.
    pub grh: Option<Grh>,
    /// P_Key index; only the new header layout carries it.
    pub pkey_index: PkeyIndex,
}

impl Address {
    /// The well-known Q_Key of QP 1.
    pub const GSI_QKEY: u32 = 0x8001_0000;

    /// QP 1 of the port that has `lid`.
    pub fn lid(lid: u16) -> Self {
        Self {
            qpn: Qpn::GSI,
            qkey: Self::GSI_QKEY,
            lid,
            ..Self::default()
        }
    }

    /// QP 1 of the port that has `gid`, from the local GID at `gid_index`.
    pub fn roce(gid: Gid, gid_index: u8) -> Self {
        Self {
            grh: Some(Grh {
                gid,
                gid_index,
                hop_limit: 64,
                ..Grh::default()
            }),
            ..Self::lid(0)
        }
    }

    /// Writes the address into a header.
    pub fn store(&self, hdr: &mut Hdr) {
        let grh = self.grh.unwrap_or_default();
        hdr.base = HdrOld {
            qpn: U32::new(self.qpn.0),
            qkey: U32::new(self.qkey),
            lid: U16::new(self.lid),
            sl: self.sl,
            path_bits: self.path_bits,
            grh_present: u8::from(self.grh.is_some()),
            gid_index: grh.gid_index,
            hop_limit: grh.hop_limit,
            traffic_class: grh.traffic_class,
            gid: grh.gid.0,
            flow_label: U32::new(grh.flow_label),
            ..hdr.base
        };
        hdr.pkey_index = self.pkey_index.0;
    }

    /// Reads the address of a header. Of a received packet it is the sender's, ready to answer to.
    pub fn load(hdr: &Hdr) -> Self {
        let base = &hdr.base;
        Self {
            qpn: Qpn(base.qpn.get()),
            qkey: base.qkey.get(),
            lid: base.lid.get(),
            sl: base.sl,
            path_bits: base.path_bits,
            grh: (base.grh_present != 0).then_some(Grh {
                gid: Gid(base.gid),
                gid_index: base.gid_index,
                hop_limit: base.hop_limit,
                traffic_class: base.traffic_class,
                flow_label: base.flow_label.get(),
            }),
            pkey_index: PkeyIndex(hdr.pkey_index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_reads_both_ways_of_writing() {
        let long: Gid = "fe80:0000:0000:0000:5054:00ff:fe12:3456\n".parse().unwrap();
        let short: Gid = "fe80::5054:ff:fe12:3456".parse().unwrap();
        assert_eq!(long, short);
        assert!(long.is_link_local() && !long.is_zero());
        assert_eq!(long.to_string(), "fe80::5054:ff:fe12:3456");
        assert!("fe80".parse::<Gid>().is_err());
    }

    #[test]
    fn tid_has_two_halves() {
        let tid = Tid(0x1234_5678_9abc_def0);
        assert_eq!((tid.high(), tid.low()), (0x1234_5678, 0x9abc_def0));
        assert_eq!(Tid::new(5).high(), 0);
    }

    #[test]
    fn address_survives_the_header() {
        let addr = Address {
            sl: 3,
            path_bits: 1,
            lid: 77,
            pkey_index: PkeyIndex(2),
            ..Address::roce("fe80::2".parse().unwrap(), 4)
        };
        let mut hdr = Hdr::default();
        hdr.base.id = 9;
        addr.store(&mut hdr);
        assert_eq!(Address::load(&hdr), addr);
        assert_eq!(hdr.base.id, 9);
        let plain = Address::lid(5);
        plain.store(&mut hdr);
        assert_eq!(Address::load(&hdr), plain);
        assert_eq!(hdr.base.gid, [0; 16]);
    }
}
