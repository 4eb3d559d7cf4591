// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The messages that ibsim and its clients exchange: 80 bytes on the control socket, in the byte order of
//! the host; 288 bytes on the data socket, in a mixture.

use std::mem::size_of;

use zerocopy::big_endian;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::mad::{self, Mad};

const MAGIC: u32 = 0xdead_beef;

/// Bytes of a control message's data.
pub const CONTROL_DATA: usize = 64;
/// Bytes of a control message.
pub const CONTROL_LEN: usize = size_of::<Control>();
/// Bytes of a data message.
pub const PACKET_LEN: usize = size_of::<RawPacket>();
const _: () = assert!(CONTROL_LEN == 80 && PACKET_LEN == 288 && size_of::<Connect>() == 44);

/// What a control message is about; the answer has the same type, or 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Kind {
    Connect = 1,
    Disconnect = 2,
    GetNodeInfo = 7,
    GetPortInfo = 8,
    SetIsSm = 9,
    GetPkeys = 10,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Control {
    magic: u32,
    client: u32,
    kind: u32,
    len: u32,
    data: [u8; CONTROL_DATA],
}

impl Control {
    /// A request of a client, with data.
    pub fn new(client: u32, kind: Kind, bytes: &[u8]) -> Self {
        let mut data = [0; CONTROL_DATA];
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = *from;
        }
        Self {
            magic: MAGIC,
            client,
            kind: kind as u32,
            len: u32::try_from(bytes.len().min(CONTROL_DATA)).unwrap_or(0),
            data,
        }
    }

    /// As bytes.
    pub fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// The data of an answer to a request of this kind; `None` for anything else, `Some(Err)` for a refusal.
    pub fn answer(bytes: &[u8], kind: Kind) -> Option<Result<[u8; CONTROL_DATA], Refused>> {
        let this = Self::read_from_bytes(bytes).ok()?;
        match this.kind {
            _ if this.magic != MAGIC => None,
            0 => Some(Err(Refused)),
            other => (other == kind as u32).then_some(Ok(this.data)),
        }
    }
}

/// ibsim refuses what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// The data of [`Kind::Connect`], and of its answer.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Connect {
    /// Part of the names of the client's sockets, not 0; in the answer, the client's number.
    pub id: u32,
    /// Requests to this queue pair, other than 0 and 1, are for the client.
    pub qp: u32,
    /// A subnet manager.
    pub is_sm: u32,
    /// Name of the node, ended by a zero; empty for the server's choice.
    pub node: [u8; 32],
}

impl Connect {
    /// A wish to be at a node. `None` if its name is too long for ibsim.
    pub fn new(id: u32, qp: u32, node: &str) -> Option<Self> {
        let mut name = [0; 32];
        name[..31]
            .get_mut(..node.len())?
            .copy_from_slice(node.as_bytes());
        Some(Self {
            id,
            qp,
            is_sm: 0,
            node: name,
        })
    }

    /// As bytes.
    pub fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// What the server says: the client's number, and the node.
    pub fn answer(data: &[u8; CONTROL_DATA]) -> Option<(u32, String)> {
        let (this, _) = Self::read_from_prefix(data).ok()?;
        let name = this.node.split(|byte| *byte == 0).next()?;
        Some((this.id, String::from_utf8_lossy(name).into_owned()))
    }
}

/// A data message as it lies in memory. LIDs are 16 bits in network order, widened to 32 bits of the host.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawPacket {
    dlid: u32,
    slid: u32,
    dest_qp: big_endian::U32,
    src_qp: big_endian::U32,
    status: big_endian::U32,
    pad: u32,
    len: big_endian::U64,
    mad: [u8; mad::LEN],
}

/// A data message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Destination LID.
    pub dlid: u16,
    /// Source LID; with 0, ibsim fills it in.
    pub slid: u16,
    /// Destination queue pair.
    pub dest_qp: u32,
    /// Source queue pair.
    pub src_qp: u32,
    /// Not 0 in a message that ibsim could not forward, and sends back.
    pub status: u32,
    /// The MAD.
    pub mad: Mad,
}

impl Packet {
    /// From the bytes of a message.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let raw = RawPacket::read_from_bytes(bytes).ok()?;
        let lid = |raw: u32| u16::try_from(raw).ok().map(u16::from_be);
        Some(Self {
            dlid: lid(raw.dlid)?,
            slid: lid(raw.slid)?,
            dest_qp: raw.dest_qp.get(),
            src_qp: raw.src_qp.get(),
            status: raw.status.get(),
            mad: Mad(raw.mad),
        })
    }

    /// As the bytes of a message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let raw = RawPacket {
            dlid: self.dlid.to_be().into(),
            slid: self.slid.to_be().into(),
            dest_qp: self.dest_qp.into(),
            src_qp: self.src_qp.into(),
            status: self.status.into(),
            pad: 0,
            len: u64::try_from(mad::LEN).unwrap_or(0).into(),
            mad: self.mad.0,
        };
        raw.as_bytes().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_message_and_its_answers() {
        let request = Control::new(3, Kind::GetPortInfo, &[1]);
        let bytes = request.bytes();
        assert_eq!(bytes.len(), 80);
        assert_eq!(bytes[..4], 0xdead_beef_u32.to_ne_bytes());
        assert_eq!(bytes[4..8], 3u32.to_ne_bytes());
        assert_eq!(bytes[8..12], 8u32.to_ne_bytes());
        assert_eq!(bytes[12..16], 1u32.to_ne_bytes());
        let data = Control::answer(bytes, Kind::GetPortInfo);
        assert_eq!(data.expect("an answer").expect("no refusal")[0], 1);
        assert_eq!(Control::answer(bytes, Kind::GetPkeys), None, "another's");
        let mut refused = bytes.to_vec();
        refused[8..12].fill(0);
        assert_eq!(
            Control::answer(&refused, Kind::GetPortInfo),
            Some(Err(Refused))
        );
        refused[0] = 0;
        assert_eq!(Control::answer(&refused, Kind::GetPortInfo), None, "magic");
        assert_eq!(Control::answer(&bytes[1..], Kind::GetPortInfo), None);
    }

    #[test]
    fn connecting() {
        let wish = Connect::new(77, 2, "H-1").expect("a short name");
        let mut data = [0; CONTROL_DATA];
        data[..44].copy_from_slice(wish.bytes());
        assert_eq!(Connect::answer(&data), Some((77, "H-1".into())));
        assert!(Connect::new(1, 2, &"x".repeat(31)).is_some());
        assert!(Connect::new(1, 2, &"x".repeat(32)).is_none(), "no room");
    }

    #[test]
    fn a_data_message() {
        let packet = Packet {
            dlid: 0x1234,
            slid: 5,
            dest_qp: 2,
            src_qp: 1,
            status: 110,
            mad: Mad::local_get(9, mad::NODE_INFO, 0),
        };
        let bytes = packet.to_bytes();
        assert_eq!(bytes.len(), 288);
        if cfg!(target_endian = "little") {
            assert_eq!(bytes[..4], [0x12, 0x34, 0, 0]);
        }
        assert_eq!(bytes[8..12], [0, 0, 0, 2]);
        assert_eq!(bytes[24..32], [0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(bytes[32], 1, "the MAD is the last 256 bytes");
        assert_eq!(Packet::parse(&bytes), Some(packet));
        assert_eq!(Packet::parse(&bytes[..287]), None);
    }
}
