// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! write(): sending a MAD.
//!
//! Everything is copied from the program first, with nothing held: no lock, no agent, no send buffer.
//! Then the agent is borrowed, which its unregistering waits for, for as long as it takes to resolve the
//! address, fill a send buffer and post it. Errors are those, and in that order, that a program knows
//! from copying piece by piece: what is wrong with the copied bytes is told only when its turn comes.

#![forbid(unsafe_code)]

use crate::{
    agents::{
        FileAgent,
        Handler, //
    },
    file::UmadFile,
    outstanding::{
        Room,
        SendKey, //
    },
    packet::{
        Packet,
        PacketMemory, //
    },
    rdma::{
        address::{
            Address,
            GlobalRoute, //
        },
        mad::{
            self,
            MadHeader,
            MAD_HDR_LEN,
            RMPP_FLAG_ACTIVE,
            RMPP_HDR_LEN, //
        },
        send::{
            SendMad,
            Shape, //
        }, //
    },
    seat::{
        AgentId,
        Seat, //
    },
    uapi::{
        Layout,
        PacketHeader,
        HEADER_LEN,
        OLD_HEADER_LEN, //
    }, //
};
use kernel::{
    prelude::*,
    uaccess::UserSliceReader, //
};

/// Bytes of the largest MAD that is not sent by RMPP: one of OPA.
const MAX_SINGLE_MAD: usize = 2048;

/// Sends the MAD that is written, returns the number of bytes.
///
/// # Errors
///
/// In this order: `EINVAL` if it is shorter than packet header and RMPP header; `EFAULT` if the packet
/// header cannot be read; `EINVAL` for an agent id that cannot be; `EFAULT` if the RMPP header cannot be
/// read; `EIO` if there is no such agent (any more);
/// `EINVAL` if the MAD is shorter than its class's headers; what [`UmadFile::address_handle`] says; `EINVAL`
/// if it is too long for one MAD and not sent by RMPP; `ENOMEM`; `EFAULT` if the rest cannot be read;
/// `EINVAL` for a duplicate, see [`crate::outstanding`]; what posting says (`EINVAL` for a class without
/// RMPP from an agent with RMPP, among others).
pub(crate) fn write(file: &UmadFile, mut from: UserSliceReader) -> Result<usize> {
    let count = from.len();
    let layout = file.layout();
    let mad_len = count
        .checked_sub(layout.header_len())
        .filter(|len| *len >= RMPP_HDR_LEN)
        .ok_or(EINVAL)?;
    let header = read_header(&mut from, layout)?;
    let id = AgentId::from_user(header.id)?;
    let head: [u8; RMPP_HDR_LEN] = from.read()?;
    let kernel_rmpp = file.agent_has_kernel_rmpp(id).ok_or(EIO)?;
    let written = Written::copy(header, head, from, mad_len, kernel_rmpp);
    let memory = Memory::new(&written)?;
    let (agent, seat) = file.agent(id).ok_or(EIO)?;
    send(file, &agent, seat, &written, memory)?;
    Ok(count)
}

/// Reads the packet header; what the old layout lacks is zero.
fn read_header(from: &mut UserSliceReader, layout: Layout) -> Result<PacketHeader> {
    let bytes: [u8; HEADER_LEN] = match layout {
        Layout::PKeyIndex => from.read()?,
        Layout::Old => {
            let old: [u8; OLD_HEADER_LEN] = from.read()?;
            let mut bytes = [0; HEADER_LEN];
            for (to, from) in bytes.iter_mut().zip(old) {
                *to = from;
            }
            bytes
        }
    };
    PacketHeader::read_from_bytes(&bytes).map_err(|_| EINVAL)
}

/// What a program wrote, copied.
struct Written {
    header: PacketHeader,
    /// MAD header and RMPP header, or what is there in other classes.
    head: [u8; RMPP_HDR_LEN],
    mad_len: usize,
    /// The rest of the MAD, or why it could not be copied.
    rest: Result<KVVec<u8>>,
}

impl Written {
    fn copy(
        header: PacketHeader,
        head: [u8; RMPP_HDR_LEN],
        from: UserSliceReader,
        mad_len: usize,
        kernel_rmpp: bool,
    ) -> Self {
        let mut written = Self {
            header,
            head,
            mad_len,
            rest: Err(EINVAL),
        };
        // What is too long for one MAD and is not sent by RMPP is refused later, whatever is in it.
        if mad_len <= MAX_SINGLE_MAD || (kernel_rmpp && written.wants_rmpp()) {
            let mut rest = KVVec::new();
            written.rest = from.read_all(&mut rest, GFP_KERNEL_ACCOUNT).map(|()| rest);
        }
        written
    }

    fn mad_header(&self) -> MadHeader {
        let mut bytes = [0; MAD_HDR_LEN];
        for (to, from) in bytes.iter_mut().zip(self.head) {
            *to = from;
        }
        MadHeader::from_array(bytes)
    }

    fn is_rmpp_class(&self) -> bool {
        mad::is_rmpp_class(self.mad_header().mgmt_class())
    }

    /// Whether class and RMPP flags say that the MAD takes part in RMPP.
    fn wants_rmpp(&self) -> bool {
        let [.., flags, _, _, _, _, _, _, _, _, _] = self.head;
        self.is_rmpp_class() && flags & RMPP_FLAG_ACTIVE != 0
    }

    fn address(&self) -> Address {
        let header = &self.header;
        Address {
            lid: u16::from_be(header.lid_be),
            sl: header.sl,
            path_bits: header.path_bits,
            global: (header.grh_present != 0).then(|| GlobalRoute {
                gid: header.gid,
                gid_index: header.gid_index,
                flow_label: u32::from_be(header.flow_label_be),
                hop_limit: header.hop_limit,
                traffic_class: header.traffic_class,
            }),
        }
    }
}

/// What a send needs besides `ib_mad`'s own. It is charged to the program, which may be made to wait for
/// it, so it is got before the agent is borrowed.
struct Memory {
    packet: PacketMemory,
    /// None for a plain response: that is on its way when it is posted, see [`crate::outstanding`].
    room: Option<Room>,
}

impl Memory {
    fn new(written: &Written) -> Result<Self> {
        let plain_response = written.mad_header().is_response()
            && !written.wants_rmpp()
            && written.header.timeout_ms == 0;
        Ok(Self {
            packet: Packet::memory()?,
            room: if plain_response {
                None
            } else {
                Some(Room::new()?)
            },
        })
    }
}

/// Sends what was written from an agent that is borrowed for the time of the call.
fn send(
    file: &UmadFile,
    agent: &FileAgent,
    seat: Seat,
    written: &Written,
    memory: Memory,
) -> Result {
    let mut header = written.mad_header();
    let hdr_len = mad::class_header_len(header.mgmt_class());
    let data_len = written.mad_len.checked_sub(hdr_len).ok_or(EINVAL)?;
    let kernel_rmpp = agent.kernel_rmpp();
    let rmpp = kernel_rmpp && written.wants_rmpp();

    let ah = file.address_handle(agent, &written.address())?;
    let mut mad = SendMad::new(
        agent,
        Shape {
            remote_qpn: u32::from_be(written.header.qpn_be),
            pkey_index: written.header.pkey_index,
            rmpp,
            hdr_len,
            data_len,
            base_version: header.base_version(),
        },
    )?;
    let rest = written.rest.as_ref().map_err(|e| *e)?;

    // The upper half of a request's transaction id makes it unique among all agents, and leads the
    // response back to this one. A response has that of its request.
    if !header.is_response() {
        header.set_hi_tid(agent.hi_tid());
    }
    fill(&mut mad, written, &header, rest, hdr_len, rmpp, kernel_rmpp);

    let key = SendKey::new(&written.header, &header);
    let send = Packet::sent(memory.packet, seat, written.header, header, key)?;
    // An agent that does RMPP itself sends many MADs with one transaction id.
    let user_segment = !kernel_rmpp && written.wants_rmpp();
    file.begin_send(&send, memory.room, !user_segment)?;
    mad.post(ah, written.header.timeout_ms, written.header.retries, send)
        .map_err(|(e, send)| {
            file.abort_send(&send);
            e
        })
}

/// Copies the MAD into the send buffer.
fn fill(
    mad: &mut SendMad<'_, Handler>,
    written: &Written,
    header: &MadHeader,
    rest: &[u8],
    hdr_len: usize,
    rmpp: bool,
    kernel_rmpp: bool,
) {
    let bytes = mad.bytes_mut();
    copy(bytes, 0, header.as_bytes());
    // `ib_mad` keeps the RMPP header of its own agents.
    if !(kernel_rmpp && written.is_rmpp_class()) {
        copy(
            bytes,
            MAD_HDR_LEN,
            written.head.get(MAD_HDR_LEN..).unwrap_or(&[]),
        );
    }
    if rmpp {
        let class_header = hdr_len.saturating_sub(RMPP_HDR_LEN).min(rest.len());
        let (class_header, data) = rest.split_at_checked(class_header).unwrap_or((rest, &[]));
        copy(bytes, RMPP_HDR_LEN, class_header);
        mad.copy_segments(data);
    } else {
        copy(bytes, RMPP_HDR_LEN, rest);
    }
}

/// Copies to an offset; what has no room is left out.
fn copy(to: &mut [u8], offset: usize, from: &[u8]) {
    if let Some(to) = to.get_mut(offset..) {
        let len = from.len().min(to.len());
        if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
            to.copy_from_slice(from);
        }
    }
}
