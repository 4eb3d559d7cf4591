// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What calls give to the kernel, byte by byte: registrations, and packets.

use crate::call::Call;
use crate::execute::low;
use crate::field::{Field, FIRST_RXE};
use crate::scene::Scene;

/// Bytes of a packet's header.
pub fn header_len(new: bool) -> usize {
    if new {
        64
    } else {
        56
    }
}

/// The argument of REGISTER_AGENT.
pub fn request(call: &Call) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend_from_slice(&call.get(Field::Methods).to_ne_bytes());
    bytes.extend_from_slice(&call.get(Field::MethodsHigh).to_ne_bytes());
    bytes.extend([
        byte(call, Field::Qpn),
        byte(call, Field::Class),
        byte(call, Field::Version),
    ]);
    bytes.extend_from_slice(&low(call.get(Field::Oui)).to_be_bytes()[1..]);
    bytes.extend([byte(call, Field::Rmpp), 0]);
    bytes
}

/// The argument of REGISTER_AGENT2.
pub fn request2(call: &Call) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend_from_slice(&low(call.get(Field::Qpn)).to_ne_bytes());
    bytes.extend([byte(call, Field::Class), byte(call, Field::Version), 0, 0]);
    bytes.extend_from_slice(&low(call.get(Field::Flags)).to_ne_bytes());
    bytes.extend_from_slice(&call.get(Field::Methods).to_ne_bytes());
    bytes.extend_from_slice(&call.get(Field::MethodsHigh).to_ne_bytes());
    bytes.extend_from_slice(&low(call.get(Field::Oui)).to_ne_bytes());
    bytes.extend([byte(call, Field::Rmpp), 0, 0, 0]);
    bytes
}

/// What is written: packet header, and MAD.
pub fn packet(call: &Call, scene: &Scene, new: bool, tid: u64) -> Vec<u8> {
    let to = call.get(Field::To);
    let (lid, gid) = match to {
        0..FIRST_RXE => (Scene::lid(to), None),
        8 => (0, None),
        9 => (0xffff, None),
        10 => (0xc000, None),
        rxe => (0, Some(scene.gid(rxe).0)),
    };
    let (grh, gid) = match (call.get(Field::Grh), gid) {
        (0, gid) => (u8::from(gid.is_some()), gid.unwrap_or([0; 16])),
        (1, gid) => (0, gid.unwrap_or([0; 16])),
        (2, gid) => (1, gid.unwrap_or([0; 16])),
        // A multicast GID: it resolves to itself at once.
        (_, _) => (1, [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
    };
    let mut bytes = Vec::with_capacity(512);
    for field in [
        Field::Id,
        Field::Status,
        Field::Timeout,
        Field::Retries,
        Field::Length,
    ] {
        bytes.extend_from_slice(&low(call.get(field)).to_ne_bytes());
    }
    bytes.extend_from_slice(&low(call.get(Field::Qpn)).to_be_bytes());
    bytes.extend_from_slice(&0x8001_0000_u32.to_be_bytes());
    bytes.extend_from_slice(&lid.to_be_bytes());
    bytes.extend([
        byte(call, Field::Sl),
        byte(call, Field::PathBits),
        grh,
        byte(call, Field::GidIndex),
        1,
        0,
    ]);
    bytes.extend_from_slice(&gid);
    bytes.extend_from_slice(&[0; 4]);
    if new {
        bytes.extend_from_slice(&short(call, Field::Pkey).to_ne_bytes());
        bytes.extend_from_slice(&[0; 6]);
    }
    bytes.extend(mad(call, tid));
    bytes
}

fn mad(call: &Call, tid: u64) -> Vec<u8> {
    let mut bytes = vec![
        byte(call, Field::Base),
        byte(call, Field::Class),
        byte(call, Field::Version),
        byte(call, Field::Method),
        0,
        0,
        0,
        0,
    ];
    // A directed route that ends here, if it is one.
    if call.get(Field::Class) == 0x81 {
        bytes[7] = byte(call, Field::Segment) & 1;
    }
    bytes.extend_from_slice(&tid.to_be_bytes());
    bytes.extend_from_slice(&short(call, Field::Attribute).to_be_bytes());
    bytes.extend_from_slice(&[0; 6]);
    for field in [
        Field::RmppVersion,
        Field::RmppType,
        Field::RmppFlags,
        Field::RmppStatus,
    ] {
        bytes.push(byte(call, field));
    }
    bytes.extend_from_slice(&low(call.get(Field::Segment)).to_be_bytes());
    bytes.extend_from_slice(&low(call.get(Field::RmppLength)).to_be_bytes());
    bytes.extend_from_slice(&low(call.get(Field::Oui)).to_be_bytes());
    if call.get(Field::Class) == 0x81 && bytes.len() >= 36 {
        bytes[32..36].fill(0xff);
    }
    bytes.resize(
        usize::try_from(call.get(Field::Size))
            .unwrap_or(256)
            .min(100_000),
        0xa5,
    );
    bytes
}

fn byte(call: &Call, field: Field) -> u8 {
    call.get(field).to_le_bytes()[0]
}

fn short(call: &Call, field: Field) -> u16 {
    let [a, b, ..] = call.get(field).to_le_bytes();
    u16::from_le_bytes([a, b])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Op;
    use umad::Registration;

    #[test]
    fn registrations_are_those_of_the_abi() {
        use std::mem::size_of;
        let call = Call::new(Op::Register).with(Field::Rmpp, 1);
        assert_eq!(request(&call).len(), size_of::<umad::abi::RegReq>());
        assert_eq!(request2(&call).len(), size_of::<umad::abi::RegReq2>());
        let same = Registration::class(0x32, 1).oui(0x1405).rmpp(1).to_req2();
        let bytes = request2(&call);
        assert_eq!(
            (bytes[8], bytes[9]),
            (same.mgmt_class, same.mgmt_class_version)
        );
        assert_eq!(bytes[32..36], same.oui.to_ne_bytes());
        assert_eq!(bytes[36], same.rmpp_version);
    }

    #[test]
    fn a_mad_is_as_long_as_it_is_told() {
        let call = Call::new(Op::Write);
        for size in [0, 1, 24, 256, 3000] {
            assert_eq!(
                mad(&call.clone().with(Field::Size, size), 1).len() as u64,
                size
            );
        }
        let bytes = mad(&call.with(Field::Segment, 7), 0x0102_0304_0506_0708);
        assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[28..32], [0, 0, 0, 7]);
    }
}
