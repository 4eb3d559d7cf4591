// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Frames: datagrams on the wire, with what the link layer and the transport add (IBA 7.7, 8.3, 9.2).
//!
//! Those from and to queue pairs 0 and 1 are MADs; all others are data, of which only this driver's cables
//! know: they do not go to user space.

#![forbid(unsafe_code)]

use crate::verbs::{
    address::GlobalRoute,
    queue::GRH_LEN, //
};
use kernel::prelude::*;

/// The LID that every port of a link listens to.
pub(crate) const PERMISSIVE_LID: u32 = 0xffff;
/// The same on OPA.
pub(crate) const OPA_PERMISSIVE_LID: u32 = 0xffff_ffff;

/// Switches that a frame may go through.
pub(crate) const MAX_HOPS: u8 = 64;
/// Switches that a frame to a group may go through: tables that send it in a circle multiply it.
pub(crate) const MAX_GROUP_HOPS: u8 = 8;

/// The destination queue pair of a datagram to a multicast group (IBA 10.5.2).
pub(crate) const MULTICAST_QP: u32 = 0x00ff_ffff;
/// The LIDs of multicast groups begin here, and end before the permissive LID.
pub(crate) const FIRST_MULTICAST_LID: u32 = 0xc000;

/// A datagram on the wire.
pub(crate) struct Frame {
    /// Destination LID.
    pub(crate) dlid: u32,
    /// Source LID.
    pub(crate) slid: u32,
    /// Destination queue pair.
    pub(crate) dest_qp: u32,
    /// Source queue pair.
    pub(crate) src_qp: u32,
    /// Service level.
    pub(crate) sl: u8,
    /// P_Key.
    pub(crate) pkey: u16,
    /// Q_Key; of MADs nobody looks at it.
    pub(crate) qkey: u32,
    /// Global route header.
    pub(crate) grh: Option<[u8; GRH_LEN]>,
    /// The MAD, or the data.
    pub(crate) payload: KVec<u8>,
    /// Switches that it has been through.
    pub(crate) hops: u8,
}

impl Frame {
    /// A second one. Does not sleep.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        let mut payload = KVec::with_capacity(self.payload.len(), GFP_ATOMIC)?;
        payload.extend_from_slice(&self.payload, GFP_ATOMIC)?;
        Ok(Self { payload, ..*self })
    }

    /// Whether it goes to whoever is at the other end of the link.
    pub(crate) fn is_permissive(&self) -> bool {
        self.dlid == PERMISSIVE_LID || self.dlid == OPA_PERMISSIVE_LID
    }

    /// Whether it is something else than a MAD.
    pub(crate) fn is_data(&self) -> bool {
        self.dest_qp > 1
    }

    /// The multicast LID that it goes to, if it goes to a group.
    pub(crate) fn group(&self) -> Option<u32> {
        let multicast = (FIRST_MULTICAST_LID..PERMISSIVE_LID).contains(&self.dlid);
        (multicast && self.dest_qp == MULTICAST_QP).then_some(self.dlid)
    }

    /// The GID that it goes to, if it has a global route header.
    pub(crate) fn dgid(&self) -> Option<&[u8; 16]> {
        self.grh.as_ref()?.last_chunk()
    }
}

/// A global route header for a payload of `len` bytes.
pub(crate) fn global_route_header(
    route: &GlobalRoute,
    sgid: [u8; 16],
    len: usize,
) -> [u8; GRH_LEN] {
    /// NxtHdr of an InfiniBand transport (IBA 8.3).
    const TRANSPORT: u8 = 0x1b;
    /// Bytes of BTH, DETH and ICRC, which count, too.
    const AROUND: usize = 12 + 8 + 4;
    let first = 6 << 28 | u32::from(route.traffic_class) << 20 | route.flow_label & 0x000f_ffff;
    let payload = u16::try_from(len + AROUND).unwrap_or(u16::MAX);
    let mut grh = [0; GRH_LEN];
    let (word, rest) = grh.split_at_mut(4);
    word.copy_from_slice(&first.to_be_bytes());
    let (paylen, rest) = rest.split_at_mut(2);
    paylen.copy_from_slice(&payload.to_be_bytes());
    let (bytes, gids) = rest.split_at_mut(2);
    bytes.copy_from_slice(&[TRANSPORT, route.hop_limit]);
    let (from, to) = gids.split_at_mut(16);
    from.copy_from_slice(&sgid);
    to.copy_from_slice(&route.dgid);
    grh
}
