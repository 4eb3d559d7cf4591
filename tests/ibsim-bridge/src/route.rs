// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! From the device's frames to ibsim's messages, and back.
//!
//! ibsim tells requests from responses by the response bit of the method alone. A response goes to the
//! client whose number is in its transaction id. A request that ibsim does not answer itself goes to the
//! client of the node that has its queue pair, if that is above 1, and otherwise to one that is a subnet
//! manager. Acknowledgements of RMPP have the response bit against the flow: those of a
//! response are requests to ibsim, so that they have to carry the id of the request before them, and must
//! not depend on who is a subnet manager. So all general services are sent to queue pair
//! [`GSI_ON_WIRE`], which each bridge says to be its own, and its number is put right at the other end.

use vhca::Frame;

use crate::mad::{self, Mad};
use crate::portinfo::Port;
use crate::tids::{Purpose, Tids};
use crate::wire::Packet;

/// The queue pair that stands for 1 on the wire.
pub const GSI_ON_WIRE: u32 = 2;
/// The LID of directed-route SMPs.
const PERMISSIVE: u16 = 0xffff;
/// LIDs from here on are multicast ones.
const MULTICAST: u16 = 0xc000;
/// Membership bit of a P_Key.
const FULL_MEMBER: u16 = 0x8000;

/// Why a frame cannot go through ibsim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Not 256 bytes of base version 1 and class version 1 or 2.
    NoPlainMad,
    /// A directed route with a part that is LID routed.
    LidPart,
    /// To a multicast LID, or none.
    NoLid,
    /// To a queue pair other than 0 and 1.
    QueuePair,
}

/// A frame that leaves the device's port.
///
/// # Errors
///
/// See [`Unfit`].
pub fn outbound(frame: &Frame, port: &Port, tids: &mut Tids) -> Result<Packet, Unfit> {
    let mad = Mad::new(&frame.mad).filter(Mad::is_plain);
    let mad = mad.ok_or(Unfit::NoPlainMad)?;
    let lid = |lid: u32| u16::try_from(lid).map_err(|_| Unfit::NoLid);
    let (dlid, slid) = if mad.is_directed() {
        if mad.has_lid_part() {
            return Err(Unfit::LidPart);
        }
        (PERMISSIVE, PERMISSIVE)
    } else {
        let dlid = lid(frame.dlid)?;
        if dlid == 0 || dlid >= MULTICAST {
            return Err(Unfit::NoLid);
        }
        (dlid, lid(frame.slid)?)
    };
    let dest_qp = match frame.dest_qp {
        0 => 0,
        1 => GSI_ON_WIRE,
        other if mad.is_response() => other,
        _ => return Err(Unfit::QueuePair),
    };
    let src_qp = match frame.src_qp {
        1 => GSI_ON_WIRE,
        other => other,
    };
    let purpose = purpose(&mad, dlid, port);
    Ok(prepare(mad, dlid, slid, (dest_qp, src_qp), purpose, tids))
}

/// A directed-route SMP to the node itself.
pub fn question(mad: Mad, purpose: Purpose, tids: &mut Tids) -> Packet {
    prepare(mad, PERMISSIVE, PERMISSIVE, (0, 0), purpose, tids)
}

fn prepare(
    mut mad: Mad,
    dlid: u16,
    slid: u16,
    (dest_qp, src_qp): (u32, u32),
    purpose: Purpose,
    tids: &mut Tids,
) -> Packet {
    if mad.is_directed() {
        // The sender's stack has made the first step already; ibsim makes it itself.
        mad.set_hop_pointer(0);
    }
    if !mad.is_response() {
        mad.set_tid(tids.save(mad.tid(), purpose));
    }
    Packet {
        dlid,
        slid,
        dest_qp,
        src_qp,
        status: 0,
        mad,
    }
}

/// What the response to a request is for.
fn purpose(mad: &Mad, dlid: u16, port: &Port) -> Purpose {
    let here = if mad.is_directed() {
        mad.hop_count() == 0
    } else {
        port.owns_lid(dlid)
    };
    if here && mad.is_smp() {
        own_port(mad).unwrap_or_default()
    } else {
        Purpose::Device
    }
}

/// The purpose of a request to the own node that is about PortInfo of its port 1.
pub fn own_port(mad: &Mad) -> Option<Purpose> {
    let about = mad.attribute() == mad::PORT_INFO && mad.modifier() & 0xff <= 1;
    about.then(|| Purpose::OwnPort {
        reregister: mad.method() == mad::SET && Port::asks_to_reregister(&mad.data()),
    })
}

/// A message from ibsim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// A frame for the device, and what else it is good for.
    Frame(Frame, Purpose),
    /// The answer to a question.
    Answer(u32, Mad),
    /// One's own message: ibsim could not forward it.
    Bounce,
    /// A response to nothing that is known.
    Unknown,
}

/// Takes a message from ibsim to the device's port 1.
pub fn inbound(packet: Packet, port: &Port, tids: &Tids) -> Inbound {
    let mut mad = packet.mad;
    if packet.status != 0 {
        return Inbound::Bounce;
    }
    let mut purpose = Purpose::Device;
    if mad.is_response() {
        let Some(saved) = tids.restore(mad.tid()) else {
            return Inbound::Unknown;
        };
        mad.set_tid(saved.tid);
        purpose = saved.purpose;
    }
    if mad.is_directed() {
        // Where the last step but one left it.
        let hop = if mad.is_response() {
            0
        } else {
            mad.hop_count()
        };
        mad.set_hop_pointer(hop);
    }
    if let Purpose::Question(id) = purpose {
        return Inbound::Answer(id, mad);
    }
    let qp = |number: u32| match number {
        0..=GSI_ON_WIRE => u32::from(!mad.is_smp()),
        other => other,
    };
    let pkey = match port.pkeys[0] {
        0 => u16::MAX,
        pkey => pkey | FULL_MEMBER,
    };
    let frame = Frame {
        kind: Frame::MAD,
        port: 1,
        dlid: packet.dlid.into(),
        slid: packet.slid.into(),
        dest_qp: qp(packet.dest_qp),
        src_qp: qp(packet.src_qp),
        sl: 0,
        pkey: pkey.into(),
        id: 0,
        grh: None,
        mad: mad.0.to_vec(),
    };
    Inbound::Frame(frame, purpose)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SA: u8 = 0x03;
    const GET_TABLE: u8 = 0x12;
    const RESPONSE: u8 = 0x80;
    const CLIENT: u64 = 4;

    fn mad(class: u8, method: u8, tid: u64) -> Mad {
        let mut mad = Mad::local_get(tid, 0x35, 0);
        mad.0[1] = class;
        mad.0[2] = if class == SA { 2 } else { 1 };
        mad.0[3] = method;
        mad
    }

    fn frame(mad: &Mad, dlid: u32) -> Frame {
        let qp = u32::from(!mad.is_smp());
        Frame {
            kind: Frame::MAD,
            port: 1,
            dlid,
            slid: 9,
            dest_qp: qp,
            src_qp: qp,
            sl: 0,
            pkey: 0xffff,
            id: 0,
            grh: None,
            mad: mad.0.to_vec(),
        }
    }

    /// What ibsim does to a message that it forwards.
    fn forward(mut packet: Packet) -> Packet {
        if !packet.mad.is_response() {
            let tid = packet.mad.tid() & 0xffff_ffff_ffff | (CLIENT << 48);
            packet.mad.set_tid(tid);
        }
        packet
    }

    fn delivered(packet: Packet, tids: &Tids) -> Frame {
        match inbound(packet, &Port::default(), tids) {
            Inbound::Frame(frame, _) => frame,
            other => panic!("{other:?}"),
        }
    }

    fn tid(frame: &Frame) -> u64 {
        Mad::new(&frame.mad).expect("a MAD").tid()
    }

    #[test]
    fn a_table_goes_to_the_asker_and_its_acknowledgements_to_the_answerer() {
        let (mut asker, mut answerer) = (Tids::new(8), Tids::new(8));
        let port = Port::default();
        let own = 0x7777_0001_0000_0002;
        let request = outbound(&frame(&mad(SA, GET_TABLE, own), 3), &port, &mut asker);
        let request = forward(request.expect("it is fit"));
        assert_eq!(request.dest_qp, GSI_ON_WIRE, "whoever is subnet manager");
        let asked = delivered(request, &answerer);
        assert_eq!((asked.dest_qp, asked.src_qp), (1, 1));
        assert_eq!(tid(&asked) >> 48, CLIENT);

        // Each segment is a response with the id that the request arrived with.
        let segment = mad(SA, GET_TABLE | RESPONSE, tid(&asked));
        let segment = outbound(&frame(&segment, 9), &port, &mut answerer).expect("it is fit");
        assert_eq!(
            segment.mad.tid(),
            tid(&asked),
            "ibsim finds the asker by this"
        );
        let segment = delivered(forward(segment), &asker);
        assert_eq!(tid(&segment), own);

        // The acknowledgement is no response; the answerer must know its id.
        let ack = mad(SA, GET_TABLE, tid(&segment));
        let ack = outbound(&frame(&ack, 3), &port, &mut asker).expect("it is fit");
        assert_eq!(ack.dest_qp, GSI_ON_WIRE);
        let ack = delivered(forward(ack), &answerer);
        assert_eq!(tid(&ack), tid(&asked));
    }

    #[test]
    fn acknowledgements_of_a_long_request_go_back_as_responses() {
        let (mut sender, mut receiver) = (Tids::new(8), Tids::new(8));
        let port = Port::default();
        let own = 0x8888_0001_0000_0002;
        let data = outbound(&frame(&mad(0x32, 0x03, own), 3), &port, &mut sender);
        let data = delivered(forward(data.expect("it is fit")), &receiver);
        let ack = mad(0x32, 0x03 | RESPONSE, tid(&data));
        let ack = outbound(&frame(&ack, 9), &port, &mut receiver).expect("it is fit");
        let ack = delivered(forward(ack), &sender);
        assert_eq!(tid(&ack), own);
    }

    #[test]
    fn hop_pointers() {
        let mut tids = Tids::new(8);
        let port = Port::default();
        let mut smp = Mad::local_get(1, mad::NODE_INFO, 0);
        smp.0[6] = 1;
        smp.0[7] = 3;
        let packet = outbound(&frame(&smp, 0xffff), &port, &mut tids).expect("it is fit");
        assert_eq!(packet.mad.hop_pointer(), 0);
        assert_eq!((packet.dlid, packet.slid), (0xffff, 0xffff));
        let request = delivered(packet.clone(), &tids);
        assert_eq!(request.mad[6], 3);
        let mut response = packet;
        response.mad.respond(0);
        let response = delivered(response, &tids);
        assert_eq!(response.mad[6], 0);
        assert_eq!((response.dest_qp, response.src_qp), (0, 0));
    }

    #[test]
    fn what_tells_about_the_own_port() {
        let mut tids = Tids::new(8);
        let port = Port {
            lid: 9,
            ..Port::default()
        };
        let mut set = Mad::local_get(1, mad::PORT_INFO, 1);
        set.0[3] = mad::SET;
        set.0[64 + 51] = 0x80;
        let mut answered = |smp: &Mad, dlid: u32| {
            let mut packet = outbound(&frame(smp, dlid), &port, &mut tids).expect("it is fit");
            packet.mad.respond(0);
            match inbound(packet, &port, &tids) {
                Inbound::Frame(_, purpose) => purpose,
                other => panic!("{other:?}"),
            }
        };
        let reregister = true;
        assert_eq!(answered(&set, 0xffff), Purpose::OwnPort { reregister });
        set.0[1] = mad::LID_ROUTED;
        assert_eq!(answered(&set, 9), Purpose::OwnPort { reregister });
        assert_eq!(answered(&set, 10), Purpose::Device, "another node's");
        set.set_modifier(2);
        assert_eq!(answered(&set, 9), Purpose::Device, "another port's");
        set.set_modifier(0);
        set.0[3] = mad::GET;
        let reregister = false;
        assert_eq!(answered(&set, 9), Purpose::OwnPort { reregister });
    }

    #[test]
    fn questions_bounces_and_strangers() {
        let mut tids = Tids::new(8);
        let smp = Mad::local_get(0xffff_0000_0000_0001, mad::NODE_INFO, 0);
        let mut packet = question(smp.clone(), Purpose::Question(6), &mut tids);
        packet.mad.respond(0);
        let Inbound::Answer(6, answer) = inbound(packet.clone(), &Port::default(), &tids) else {
            panic!("no answer");
        };
        assert_eq!(answer.tid(), smp.tid());
        packet.status = 110;
        assert_eq!(
            inbound(packet.clone(), &Port::default(), &tids),
            Inbound::Bounce
        );
        packet.status = 0;
        packet.mad.set_tid(99);
        assert_eq!(inbound(packet, &Port::default(), &tids), Inbound::Unknown);
    }

    #[test]
    fn what_ibsim_cannot_carry() {
        let mut tids = Tids::new(8);
        let port = Port::default();
        let mut why = |frame: &Frame| outbound(frame, &port, &mut tids).err();
        let sa = mad(SA, GET_TABLE, 1);
        assert_eq!(why(&frame(&sa, 0xc001)), Some(Unfit::NoLid));
        assert_eq!(why(&frame(&sa, 0)), Some(Unfit::NoLid));
        assert_eq!(why(&frame(&sa, 0x1_0001)), Some(Unfit::NoLid));
        let mut to_user = frame(&sa, 3);
        to_user.dest_qp = 5;
        assert_eq!(why(&to_user), Some(Unfit::QueuePair));
        to_user.mad[3] |= RESPONSE;
        assert_eq!(why(&to_user), None, "ibsim finds whom a response is for");
        let mut smp = Mad::local_get(1, mad::NODE_INFO, 0);
        smp.0[32] = 0;
        assert_eq!(why(&frame(&smp, 0xffff)), Some(Unfit::LidPart));
        let mut jumbo = frame(&sa, 3);
        jumbo.mad.resize(2048, 0);
        assert_eq!(why(&jumbo), Some(Unfit::NoPlainMad));
        let mut opa = frame(&sa, 3);
        opa.mad[0] = 0x80;
        assert_eq!(why(&opa), Some(Unfit::NoPlainMad));
    }

    #[test]
    fn frames_carry_a_partition_of_the_port() {
        let packet = question(
            Mad::local_get(1, mad::NODE_INFO, 0),
            Purpose::Device,
            &mut Tids::new(1),
        );
        let mut port = Port::default();
        let mut pkey = |first: u16| {
            port.pkeys[0] = first;
            match inbound(packet.clone(), &port, &Tids::new(1)) {
                Inbound::Frame(frame, _) => frame.pkey,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(pkey(0), 0xffff);
        assert_eq!(pkey(0x7fff), 0xffff);
        assert_eq!(pkey(0x8001), 0x8001);
    }
}
