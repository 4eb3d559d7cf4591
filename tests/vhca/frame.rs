// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Frames: MADs on the wire, with what the link layer adds (IBA 7.7, 8.3).

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

/// A MAD on the wire.
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
    /// Global route header.
    pub(crate) grh: Option<[u8; GRH_LEN]>,
    /// The MAD.
    pub(crate) mad: KVec<u8>,
    /// Switches that it has been through.
    pub(crate) hops: u8,
}

impl Frame {
    /// A second one. Does not sleep.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        let mut mad = KVec::with_capacity(self.mad.len(), GFP_ATOMIC)?;
        mad.extend_from_slice(&self.mad, GFP_ATOMIC)?;
        Ok(Self { mad, ..*self })
    }

    /// Whether it goes to whoever is at the other end of the link.
    pub(crate) fn is_permissive(&self) -> bool {
        self.dlid == PERMISSIVE_LID || self.dlid == OPA_PERMISSIVE_LID
    }
}

/// A global route header for a MAD of `len` bytes.
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
