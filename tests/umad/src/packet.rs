// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A packet: the header that umad puts before a MAD, and the MAD.

use std::mem::size_of;
use std::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use crate::abi::{Hdr, HdrOld};
use crate::port::Layout;
use crate::{Address, AgentId, Error, MadHdr, Result, Tid};

/// What is written to, or was read from, a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Agent that sends, or that the packet came for.
    pub agent: AgentId,
    /// The header; of the old layout the P_Key index is 0.
    pub header: HdrOld,
    /// P_Key index.
    pub pkey_index: u16,
    /// The MAD.
    pub mad: Vec<u8>,
}

impl Packet {
    /// A packet to `to` that waits for no response.
    pub fn new(agent: AgentId, to: &Address, mad: Vec<u8>) -> Self {
        let mut hdr = Hdr::default();
        to.store(&mut hdr);
        hdr.base.id = agent.0;
        Self {
            agent,
            header: hdr.base,
            pkey_index: hdr.pkey_index,
            mad,
        }
    }

    /// Waits that long for a response (whole milliseconds; at most 2^32 - 1 of them).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.header.timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self
    }

    /// Repeats the request so often before it counts as unanswered.
    pub fn retries(mut self, retries: u32) -> Self {
        self.header.retries = retries;
        self
    }

    /// Where the packet goes to, or came from.
    pub fn address(&self) -> Address {
        Address::load(&self.full_header())
    }

    /// The MAD's header.
    pub fn mad_header(&self) -> Result<MadHdr> {
        MadHdr::of(&self.mad)
    }

    /// The MAD's transaction id.
    pub fn tid(&self) -> Result<Tid> {
        Ok(self.mad_header()?.tid())
    }

    /// The header in the new layout.
    pub fn full_header(&self) -> Hdr {
        Hdr {
            base: self.header,
            pkey_index: self.pkey_index,
            reserved: [0; 6],
        }
    }

    /// The bytes to write.
    pub fn to_bytes(&self, layout: Layout) -> Vec<u8> {
        let mut hdr = self.full_header();
        hdr.base.id = self.agent.0;
        let mut bytes = Vec::with_capacity(layout.header_len() + self.mad.len());
        bytes.extend_from_slice(&hdr.as_bytes()[..layout.header_len()]);
        bytes.extend_from_slice(&self.mad);
        bytes
    }

    /// The packet in bytes that were read.
    pub fn from_bytes(bytes: &[u8], layout: Layout) -> Result<Self> {
        let need = layout.header_len();
        let Some((head, mad)) = bytes.split_at_checked(need) else {
            return Err(Error::Truncated {
                got: bytes.len(),
                need,
            });
        };
        let mut full = [0; size_of::<Hdr>()];
        full[..need].copy_from_slice(head);
        let hdr = Hdr::read_from_bytes(&full).map_err(|_| Error::Truncated {
            got: bytes.len(),
            need,
        })?;
        Ok(Self {
            agent: AgentId(hdr.base.id),
            header: hdr.base,
            pkey_index: hdr.pkey_index,
            mad: mad.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Method, VendorMad};

    #[test]
    fn packet_survives_both_layouts() {
        let mad = VendorMad::new(0x30, 1, Method::GET, Tid::new(4)).into_bytes();
        let mut to = Address::roce("fe80::2".parse().unwrap(), 1);
        to.pkey_index = crate::PkeyIndex(3);
        let packet = Packet::new(AgentId(2), &to, mad).timeout(Duration::from_millis(250));
        let new = packet.to_bytes(Layout::New);
        assert_eq!(new.len(), 64 + 256);
        assert_eq!(Packet::from_bytes(&new, Layout::New).unwrap(), packet);
        let old = packet.to_bytes(Layout::Old);
        assert_eq!(old.len(), 56 + 256);
        let back = Packet::from_bytes(&old, Layout::Old).unwrap();
        assert_eq!(back.pkey_index, 0);
        assert_eq!(back.header, packet.header);
        assert!(Packet::from_bytes(&old[..55], Layout::Old).is_err());
    }
}
