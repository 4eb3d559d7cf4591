// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Packets: what a read() returns.
//!
//! A packet is a received MAD, or a MAD that was sent and got no response in time. A send is made as a
//! packet when it is written, so that the report of its timeout needs no memory later; the packet goes
//! with the send through `ib_mad` and comes back with its completion.
//!
//! A packet is owned by one of: the writer, `ib_mad` (a send that is not completed), the receive queue,
//! a reader.

#![forbid(unsafe_code)]

use crate::{
    bounds,
    chrdev::user::UserRoom,
    outstanding::SendKey,
    rdma::{
        address::GlobalRoute,
        mad::{
            self,
            MadHeader,
            MAD_HDR_LEN, //
        },
        recv::{
            RecvInfo,
            RecvMad,
            Source, //
        }, //
    },
    seat::Seat,
    uapi::{
        Layout,
        PacketHeader,
        STATUS_TIMED_OUT, //
    }, //
};
use core::mem::MaybeUninit;
use kernel::{
    list::{
        impl_list_arc_safe,
        impl_list_item,
        ListArc,
        ListLinks, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        UniqueArc, //
    },
};

/// A MAD that was written to be sent.
pub(crate) struct SentMad {
    /// Its header, with the transaction id that it was sent with.
    header: MadHeader,
    /// What the outstanding sends have it listed by, if they have.
    listed: Option<SendKey>,
    /// What it costs until it is done, see [`bounds`].
    cost: usize,
}

/// A MAD that was received.
struct ReceivedMad {
    mad: RecvMad,
    /// Who sent it, if the way back has to be found yet.
    source: Option<KBox<Source>>,
}

/// Who sent a received MAD.
pub(crate) enum Sender {
    /// There was no GRH; the LID tells it all.
    Local,
    /// The way back is known.
    Found(GlobalRoute),
    /// The way back has to be found first, see [`crate::arrivals`].
    NotFoundYet(Source),
}

enum Body {
    Received(ReceivedMad),
    Sent(SentMad),
}

/// Memory for a packet.
pub(crate) struct PacketMemory(UniqueArc<MaybeUninit<Packet>>);

/// A packet.
#[pin_data]
pub(crate) struct Packet {
    #[pin]
    links: ListLinks,
    /// Position in the receive queue, once it was there.
    position: Atomic<u64>,
    seat: Seat,
    header: PacketHeader,
    body: Body,
}

impl_list_arc_safe! {
    impl ListArcSafe<0> for Packet { untracked; }
}
impl_list_item! {
    impl ListItem<0> for Packet { using ListLinks { self.links }; }
}

impl Packet {
    fn new(seat: Seat, header: PacketHeader, body: Body) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            links <- ListLinks::new(),
            position: Atomic::new(0),
            seat,
            header,
            body,
        })
    }

    /// Makes a packet of a received MAD.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; the MAD is freed.
    pub(crate) fn received(
        seat: Seat,
        mad: RecvMad,
        info: &RecvInfo<'_>,
        from: Sender,
    ) -> Result<ListArc<Self>> {
        let (global, source) = match from {
            Sender::Local => (None, None),
            Sender::Found(global) => (Some(global), None),
            Sender::NotFoundYet(source) => (None, Some(KBox::new(source, GFP_KERNEL)?)),
        };
        let header = local_header(seat, info);
        let header = match &global {
            Some(global) => with_way_back(header, global),
            None => header,
        };
        let body = Body::Received(ReceivedMad { mad, source });
        ListArc::pin_init(Self::new(seat, header, body), GFP_KERNEL)
    }

    /// Who sent it, if the way back has to be found yet.
    pub(crate) fn source(&self) -> Option<&Source> {
        match &self.body {
            Body::Received(received) => received.source.as_deref(),
            Body::Sent(_) => None,
        }
    }

    /// Fills in the way back of a packet that it was missing in, and that nobody else has got.
    pub(crate) fn found(packet: ListArc<Self>, global: &GlobalRoute) -> Option<ListArc<Self>> {
        let mut packet = Arc::into_unique_or_drop(packet.into_arc())?;
        let fields = packet.as_mut().project();
        *fields.header = with_way_back(*fields.header, global);
        if let Body::Received(received) = fields.body {
            received.source = None;
        }
        Some(packet.into())
    }

    /// Gets memory for a send, charged to the writer.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn memory() -> Result<PacketMemory> {
        Ok(PacketMemory(UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?))
    }

    /// Makes a packet of a send. `header` is what the writer wrote, `mad` what goes onto the wire;
    /// `cost` is what the file pays until it is done.
    pub(crate) fn sent(
        memory: PacketMemory,
        seat: Seat,
        header: &PacketHeader,
        mad: MadHeader,
        listed: Option<SendKey>,
        cost: usize,
    ) -> Result<Arc<Self>> {
        let header = PacketHeader {
            status: STATUS_TIMED_OUT,
            ..*header
        };
        let body = Body::Sent(SentMad {
            header: mad,
            listed,
            cost,
        });
        Ok(memory
            .0
            .pin_init_with(Self::new(seat, header, body))?
            .into())
    }

    /// The agent that the packet belongs to.
    pub(crate) fn seat(&self) -> Seat {
        self.seat
    }

    /// What the outstanding sends have a send listed by, if they have. `None` for a received MAD.
    pub(crate) fn listed(&self) -> Option<&SendKey> {
        match &self.body {
            Body::Sent(sent) => sent.listed.as_ref(),
            Body::Received(_) => None,
        }
    }

    /// What a request is listed by that a received MAD would be the answer to.
    pub(crate) fn answered(&self) -> Option<SendKey> {
        match &self.body {
            Body::Received(received) => Some(SendKey::answered_by(&received.mad.header())),
            Body::Sent(_) => None,
        }
    }

    /// What a send costs until it is done. 0 for a received MAD.
    pub(crate) fn send_cost(&self) -> usize {
        match &self.body {
            Body::Sent(sent) => sent.cost,
            Body::Received(_) => 0,
        }
    }

    /// Position in the receive queue.
    pub(crate) fn position(&self) -> u64 {
        self.position.load(Relaxed)
    }

    /// Sets the position in the receive queue. Under the file's lock.
    pub(crate) fn set_position(&self, position: u64) {
        self.position.store(position, Relaxed);
    }

    /// Whether it is the report of a timeout, once it is queued.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self.body, Body::Sent(_))
    }

    /// What the packet costs while it is not read, see [`bounds`].
    pub(crate) fn cost(&self) -> usize {
        match &self.body {
            Body::Received(received) => {
                let mad = &received.mad;
                bounds::received_cost(mad.segments(), mad.segment_len())
            }
            Body::Sent(_) => bounds::timeout_cost(),
        }
    }

    /// Packet header and MAD header, as who reads it in this layout sees them.
    pub(crate) fn heads(&self, layout: Layout) -> (PacketHeader, MadHeader) {
        match &self.body {
            Body::Received(received) => {
                let mad = &received.mad;
                let header = self.header_of_length(layout.header_len() + mad.len());
                (header, mad.header())
            }
            Body::Sent(sent) => (self.header, sent.header),
        }
    }

    /// The header of a received MAD that takes so many bytes with it.
    fn header_of_length(&self, total: usize) -> PacketHeader {
        PacketHeader {
            length: u32::try_from(total).unwrap_or(u32::MAX),
            ..self.header
        }
    }

    /// Copies the packet to a reader, returns the number of bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `buf` has no room for the header and the first segment, and is left alone then;
    /// `ENOSPC` if it has, but not for the whole message: header and first segment are copied, and the
    /// header tells the length; `EFAULT`.
    pub(crate) fn copy_to(&self, buf: UserRoom, layout: Layout) -> Result<usize> {
        match &self.body {
            Body::Received(received) => self.copy_received(&received.mad, buf, layout),
            Body::Sent(sent) => self.copy_sent(sent, buf, layout),
        }
    }

    fn copy_received(&self, mad: &RecvMad, mut to: UserRoom, layout: Layout) -> Result<usize> {
        let len = mad.len();
        let first_len = len.min(mad.segment_len());
        // OVERFLOW: A message is at most 2^31 bytes long.
        let total = layout.header_len() + len;
        if to.len() < layout.header_len() + first_len {
            return Err(EINVAL);
        }
        let whole = to.len() >= total;
        let header = self.header_of_length(total);
        write_header(&mut to, &header, layout)?;
        to.write(mad.first_segment().get(..first_len).ok_or(EIO)?)?;
        if !whole {
            return Err(ENOSPC);
        }
        let mut left = len - first_len;
        if left > 0 {
            let skip = mad::class_header_len(mad.header().mgmt_class());
            for segment in mad.more_segments() {
                let data = segment.get(skip..).unwrap_or(&[]);
                let data = data.get(..left).unwrap_or(data);
                to.write(data)?;
                left -= data.len();
                if left == 0 {
                    break;
                }
            }
            // `ib_mad` counts the length from the segments.
            if left > 0 {
                return Err(EIO);
            }
        }
        Ok(total)
    }

    fn copy_sent(&self, sent: &SentMad, mut to: UserRoom, layout: Layout) -> Result<usize> {
        let total = layout.header_len() + MAD_HDR_LEN;
        if to.len() < total {
            return Err(EINVAL);
        }
        write_header(&mut to, &self.header, layout)?;
        to.write(sent.header.as_bytes())?;
        Ok(total)
    }
}

/// A header of a MAD that came without a GRH.
pub(crate) fn local_header(seat: Seat, info: &RecvInfo<'_>) -> PacketHeader {
    PacketHeader {
        id: seat.id().as_u32(),
        status: 0,
        timeout_ms: 0,
        retries: 0,
        // Depends on the reader's layout, see `Packet::heads`.
        length: 0,
        qpn_be: info.src_qp().to_be(),
        qkey_be: 0,
        lid_be: info.slid().to_be(),
        sl: info.sl(),
        path_bits: info.path_bits(),
        grh_present: 0,
        gid_index: 0,
        hop_limit: 0,
        traffic_class: 0,
        gid: [0; 16],
        flow_label_be: 0,
        pkey_index: info.pkey_index(),
        reserved: [0; 6],
    }
}

/// A header of a MAD that came with a GRH.
fn with_way_back(header: PacketHeader, global: &GlobalRoute) -> PacketHeader {
    PacketHeader {
        grh_present: 1,
        gid_index: global.gid_index,
        hop_limit: global.hop_limit,
        traffic_class: global.traffic_class,
        gid: global.gid,
        flow_label_be: global.flow_label.to_be(),
        ..header
    }
}

/// Writes as much of the header as the layout has.
fn write_header(to: &mut UserRoom, header: &PacketHeader, layout: Layout) -> Result {
    let bytes = header.as_bytes().get(..layout.header_len());
    to.write(bytes.ok_or(EINVAL)?)
}

#[kunit_tests(umad_packet)]
pub(crate) mod tests {
    use super::*;
    use kernel::uaccess::UserPtr;
    use zerocopy::FromZeros;

    /// A send that got no response, with this transaction id.
    pub(crate) fn unanswered(seat: Seat, tid: u64) -> Result<ListArc<Packet>> {
        let mut mad = [0; MAD_HDR_LEN];
        let [_, _, _, _, _, _, _, _, at_tid @ .., _, _, _, _, _, _, _, _] = &mut mad;
        *at_tid = tid.to_be_bytes();
        let mad = MadHeader::from_array(mad);
        let header = PacketHeader::new_zeroed();
        let packet = Packet::sent(Packet::memory()?, seat, &header, mad, None, 0)?;
        Arc::into_unique_or_drop(packet)
            .map(ListArc::from)
            .ok_or(EBUSY)
    }

    /// The transaction id of a send.
    pub(crate) fn tid(packet: &Packet) -> Option<u64> {
        match &packet.body {
            Body::Sent(sent) => Some(sent.header.tid()),
            Body::Received(_) => None,
        }
    }

    /// Room for `len` bytes where no program may write: what passes the checks of length ends in
    /// `EFAULT`, and nothing is written.
    fn out_of_reach(len: usize) -> UserRoom {
        UserRoom::new(UserPtr::from_addr(usize::MAX - (1 << 20)), len)
    }

    #[test]
    fn a_timeout_needs_room_for_header_and_mad_header() -> Result {
        let packet = unanswered(Seat::new(crate::seat::AgentId::from_user(0)?, 1), 7)?;
        for (layout, len) in [(Layout::Old, 56 + 24), (Layout::PKeyIndex, 64 + 24)] {
            for short in [0, 1, len - 1] {
                assert!(packet.copy_to(out_of_reach(short), layout) == Err(EINVAL));
            }
            for enough in [len, len + 1, 64 + 256] {
                assert!(packet.copy_to(out_of_reach(enough), layout) == Err(EFAULT));
            }
        }
        Ok(())
    }

    #[test]
    fn a_send_is_a_timeout_if_it_is_queued() -> Result {
        let packet = unanswered(Seat::new(crate::seat::AgentId::from_user(0)?, 1), 7)?;
        assert!(packet.is_timeout());
        assert_eq!(packet.header.status, STATUS_TIMED_OUT);
        assert!(tid(&packet) == Some(7));
        Ok(())
    }
}
