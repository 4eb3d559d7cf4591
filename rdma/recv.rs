// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Received MADs.
//!
//! C header: `include/rdma/ib_mad.h`, `struct ib_mad_recv_wc`
//!
//! A [`RecvMad`] owns the buffers of a MAD, of all segments of it if it came by RMPP; it needs neither
//! the agent nor the device and may outlive both. [`RecvInfo`] says where it came from, and lives only
//! while the receive handler runs.

use super::{
    address::GlobalRoute,
    changes::OwnGid,
    device::LiveDevice,
    mad::{
        class_header_len,
        MadHeader,
        MAD_HDR_LEN, //
    }, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    mem::size_of,
    ptr::NonNull,
    slice, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// Bytes of a MAD, but for those of OPA.
const MAD_LEN: usize = bindings::IB_MGMT_MAD_SIZE as usize;

/// Bytes that stand before a MAD in what was received.
const GRH_LEN: usize = size_of::<bindings::ib_grh>();

/// A received MAD.
///
/// What did not come of a MAD, because it was shorter on the wire than MADs are, is zero.
///
/// # Invariants
///
/// `wc` is a received MAD that nobody else frees. Each segment's buffer holds `mad_seg_size` bytes.
pub(crate) struct RecvMad {
    wc: NonNull<bindings::ib_mad_recv_wc>,
}

// SAFETY: Plain memory that `ib_mad` has given away.
unsafe impl Send for RecvMad {}
// SAFETY: It is only read while it is shared.
unsafe impl Sync for RecvMad {}

impl RecvMad {
    /// Takes ownership of a received MAD.
    ///
    /// # Safety
    ///
    /// `wc` must be a MAD that a receive handler was given.
    pub(super) unsafe fn from_raw(wc: NonNull<bindings::ib_mad_recv_wc>) -> Self {
        // INVARIANT: By the caller; ib_mad allocates each segment with room for a whole MAD.
        let mad = Self { wc };
        // SAFETY: By the type invariant; the work completion is part of what was given away, or lives until
        // the handler returns.
        let (byte_len, list) = unsafe { ((*(*wc.as_ptr()).wc).byte_len, (*wc.as_ptr()).rmpp_list) };
        let whole = GRH_LEN + mad.segment_len();
        let byte_len = usize::try_from(byte_len).unwrap_or(usize::MAX);
        if byte_len < whole || !core::ptr::eq(list.next, list.prev) {
            mad.clear_what_did_not_come();
        }
        mad
    }

    /// Clears the ends of segments that came short. `ib_mad` does not look at their length, and receives
    /// into buffers that may have been in use.
    fn clear_what_did_not_come(&self) {
        let segment_len = self.segment_len();
        // A single MAD of OPA ends where it ended on the wire, or was not on a wire at all.
        let is_single = self.len() <= segment_len;
        if is_single && segment_len != MAD_LEN {
            return;
        }
        // SAFETY: By the type invariant: a list of `recv_buf`s, each in a `struct ib_mad_recv_wc`, with its own
        // work completion and a buffer of `segment_len` bytes, which nobody else can see yet.
        unsafe {
            for buf in self.buffers_behind(&raw const (*self.wc.as_ptr()).rmpp_list) {
                let recv = kernel::container_of!(buf, bindings::ib_mad_recv_wc, recv_buf);
                let byte_len = usize::try_from((*(*recv).wc).byte_len).unwrap_or(usize::MAX);
                // So many bytes are those of a whole MAD if a driver does not count the GRH.
                let came = if byte_len == segment_len {
                    segment_len
                } else {
                    byte_len.saturating_sub(GRH_LEN)
                };
                if let Some(missing) = segment_len.checked_sub(came) {
                    let mad: *mut u8 = (*buf).__bindgen_anon_1.mad.cast();
                    mad.add(came).write_bytes(0, missing);
                }
            }
        }
    }

    /// Bytes of the whole message: headers once, then the data of all segments.
    pub(crate) fn len(&self) -> usize {
        // SAFETY: By the type invariant.
        usize::try_from(unsafe { (*self.wc.as_ptr()).mad_len }).unwrap_or(0)
    }

    /// Bytes of each segment's buffer: 256, or 2,048 on OPA.
    pub(crate) fn segment_len(&self) -> usize {
        // SAFETY: By the type invariant.
        unsafe { (*self.wc.as_ptr()).mad_seg_size }
    }

    /// How many segments there are; one more if the last one is full.
    pub(crate) fn segments(&self) -> usize {
        let (len, segment_len) = (self.len(), self.segment_len());
        if len <= segment_len {
            return 1;
        }
        // As `ib_mad` computes the length from their number: each has the headers of the class.
        let headers = class_header_len(self.header().mgmt_class());
        let data = segment_len.saturating_sub(headers);
        let full = len.saturating_sub(headers).checked_div(data);
        full.unwrap_or(0).saturating_add(1)
    }

    /// The first (often the only) segment, headers included.
    pub(crate) fn first_segment(&self) -> &[u8] {
        // SAFETY: By the type invariant; the union's members are all pointers to the same bytes.
        unsafe {
            let mad = (*self.wc.as_ptr()).recv_buf.__bindgen_anon_1.mad;
            slice::from_raw_parts(mad.cast(), self.segment_len())
        }
    }

    /// The segments behind the first one, each with its headers.
    pub(crate) fn more_segments(&self) -> Segments<'_> {
        // SAFETY: By the type invariant; the first segment is on the list of all of them.
        let buffers = unsafe { self.buffers_behind(&raw const (*self.wc.as_ptr()).recv_buf.list) };
        // INVARIANT: Just asked for.
        Segments {
            buffers,
            len: self.segment_len(),
        }
    }

    /// The buffers of the segments behind a place of the list of all of them.
    ///
    /// # Safety
    ///
    /// `place` must be the MAD's `rmpp_list`, which is the list's head, or an element of it.
    unsafe fn buffers_behind(&self, place: *const bindings::list_head) -> Buffers<'_> {
        // INVARIANT: By the caller.
        // SAFETY: By the type invariant, and the caller.
        unsafe {
            Buffers {
                head: &raw const (*self.wc.as_ptr()).rmpp_list,
                next: (*place).next,
                _mad: PhantomData,
            }
        }
    }

    /// The header of the (first segment of the) MAD.
    pub(crate) fn header(&self) -> MadHeader {
        MadHeader::from_mad(self.first_segment()).unwrap_or(MadHeader::from_array([0; MAD_HDR_LEN]))
    }
}

impl Drop for RecvMad {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { bindings::ib_free_recv_mad(self.wc.as_ptr()) };
    }
}

/// Iterates over the buffers of a MAD's segments.
///
/// # Invariants
///
/// `next` is an element of the list with the head `head`, or the head; the list lives for `'a`.
struct Buffers<'a> {
    head: *const bindings::list_head,
    next: *mut bindings::list_head,
    _mad: PhantomData<&'a RecvMad>,
}

impl Iterator for Buffers<'_> {
    type Item = *mut bindings::ib_mad_recv_buf;

    fn next(&mut self) -> Option<Self::Item> {
        if core::ptr::eq(self.next, self.head) {
            return None;
        }
        // SAFETY: By the type invariant this is an element, so it is the `list` field of a
        // `struct ib_mad_recv_buf`.
        unsafe {
            let buf = kernel::container_of!(self.next, bindings::ib_mad_recv_buf, list);
            // INVARIANT: The next one of an element of a list is an element or the head.
            self.next = (*self.next).next;
            Some(buf)
        }
    }
}

/// Iterates over the segments of a MAD.
///
/// # Invariants
///
/// The buffers' MADs have `len` bytes.
pub(crate) struct Segments<'a> {
    buffers: Buffers<'a>,
    len: usize,
}

impl<'a> Iterator for Segments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let buf = self.buffers.next()?;
        // SAFETY: By the type invariants; the list, and so the buffer, lives for `'a`.
        Some(unsafe { slice::from_raw_parts((*buf).__bindgen_anon_1.mad.cast(), self.len) })
    }
}

/// Where a MAD came from. Valid while the receive handler runs.
///
/// # Invariants
///
/// All pointers are valid for `'a`, but for `grh`, which is valid if the work completion says that
/// there is one.
pub(crate) struct RecvInfo<'a> {
    agent: *mut bindings::ib_mad_agent,
    wc: &'a bindings::ib_wc,
    grh: *mut bindings::ib_grh,
}

impl<'a> RecvInfo<'a> {
    /// # Safety
    ///
    /// `agent` and `recv` must be what a receive handler was given, and `'a` end before the handler.
    pub(super) unsafe fn new(
        agent: *mut bindings::ib_mad_agent,
        recv: NonNull<bindings::ib_mad_recv_wc>,
    ) -> Self {
        // SAFETY: By the caller.
        let (wc, grh) = unsafe { (&*(*recv.as_ptr()).wc, (*recv.as_ptr()).recv_buf.grh) };
        // INVARIANT: By the caller.
        Self { agent, wc, grh }
    }

    /// Whether the MAD was received whole.
    pub(super) fn is_success(&self) -> bool {
        self.wc.status == bindings::ib_wc_status_IB_WC_SUCCESS
    }

    /// Queue pair of the sender.
    pub(crate) fn src_qp(&self) -> u32 {
        self.wc.src_qp
    }

    /// LID of the sender. Of a 32-bit LID, which only OPA has, the lower half: the upper one is
    /// learnt elsewhere there.
    pub(crate) fn slid(&self) -> u16 {
        // CAST: The lower half is wanted.
        (self.wc.slid & 0xffff) as u16
    }

    /// Service level.
    pub(crate) fn sl(&self) -> u8 {
        self.wc.sl
    }

    /// Low bits of the own LID that the MAD was sent to.
    pub(crate) fn path_bits(&self) -> u8 {
        self.wc.dlid_path_bits
    }

    /// Index of the P_Key that the MAD was sent with.
    pub(crate) fn pkey_index(&self) -> u16 {
        self.wc.pkey_index
    }

    /// What is known of the way back.
    pub(crate) fn way_back(&self) -> WayBack<'_> {
        // CAST: The flag is a small positive constant of an enum.
        if self.wc.wc_flags & bindings::ib_wc_flags_IB_WC_GRH as c_int == 0 {
            return WayBack::Local;
        }
        WayBack::Global(GlobalSource {
            agent: self.agent,
            wc: self.wc,
            // SAFETY: By the type invariant, since the completion says that there is a GRH.
            grh: unsafe { &*self.grh },
        })
    }
}

/// The way back to a sender.
pub(crate) enum WayBack<'a> {
    /// There was no GRH: the LID is all.
    Local,
    /// There was a GRH.
    Global(GlobalSource<'a>),
}

/// The sender of a MAD that came with a GRH. Valid while the receive handler runs.
///
/// # Invariants
///
/// `agent` is registered during `'a`.
pub(crate) struct GlobalSource<'a> {
    agent: *mut bindings::ib_mad_agent,
    wc: &'a bindings::ib_wc,
    grh: &'a bindings::ib_grh,
}

impl GlobalSource<'_> {
    /// Whether finding the way back may ask the network, which can take up to about a second: on RoCE.
    pub(crate) fn asks_network(&self) -> bool {
        // SAFETY: By the type invariant; the device is there while its agent is, and the agent's port
        // number is right.
        unsafe { bindings::rdma_cap_eth_ah((*self.agent).device, (*self.agent).port_num.into()) }
    }

    /// Finds the way back, and does not sleep for long unless this [asks the
    /// network](GlobalSource::asks_network).
    ///
    /// # Errors
    ///
    /// What `ib_init_ah_attr_from_wc` says, if there is no way back.
    pub(crate) fn find(&self) -> Result<GlobalRoute> {
        // SAFETY: By the type invariant.
        let (device, port) = unsafe { ((*self.agent).device, (*self.agent).port_num.into()) };
        // SAFETY: As above; the agent keeps the device.
        unsafe { find_way_back(device, port, self.wc, self.grh) }
    }

    /// What it can be told by from other senders; `None` if that is not plain to see.
    pub(crate) fn key(&self) -> Option<SourceKey> {
        const WITH_TYPE: c_int = bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE as c_int;
        const WITH_VLAN: c_int = bindings::ib_wc_flags_IB_WC_WITH_VLAN as c_int;
        if self.wc.wc_flags & WITH_TYPE == 0 {
            return None;
        }
        let mut sgid = bindings::ib_gid::default();
        let mut dgid = bindings::ib_gid::default();
        let network_type = self.wc.network_hdr_type;
        // SAFETY: The GRH is valid, and a `union rdma_network_hdr` is one, or an IPv4 header in the
        // same place; both GIDs outlive the call.
        let known = unsafe {
            bindings::ib_get_gids_from_rdma_hdr(
                core::ptr::from_ref(self.grh).cast(),
                network_type.into(),
                &mut sgid,
                &mut dgid,
            )
        };
        if known != 0 {
            return None;
        }
        let vlan = if self.wc.wc_flags & WITH_VLAN == 0 {
            0xffff
        } else {
            self.wc.vlan_id
        };
        Some(SourceKey {
            gid: gid_bytes(&sgid),
            own_gid: gid_bytes(&dgid),
            kind: u32::from(network_type) << 16 | u32::from(vlan),
        })
    }

    /// The own GID at an index of the port's table.
    pub(crate) fn own_gid(&self, index: u8) -> Option<OwnGid> {
        // SAFETY: By the type invariant.
        unsafe { OwnGid::get_raw((*self.agent).device, (*self.agent).port_num.into(), index) }
    }

    /// The way back, from what is known of other MADs from there.
    pub(crate) fn route(&self, key: &SourceKey, known: Known) -> GlobalRoute {
        // IBA 8.3.1: 4 bits of version, 8 of traffic class, 20 of flow label.
        let class_and_flow = u32::from_be(self.grh.version_tclass_flow);
        GlobalRoute {
            gid: key.gid,
            gid_index: known.gid_index,
            flow_label: class_and_flow & 0xf_ffff,
            hop_limit: known.hop_limit,
            // CAST: Eight bits are left.
            traffic_class: (class_and_flow >> 20 & 0xff) as u8,
        }
    }

    /// Takes a copy, to find the way back later.
    pub(crate) fn to_owned(&self) -> Source {
        // SAFETY: Both are plain memory; the completion's pointers are not followed any more.
        unsafe {
            Source {
                key: self.key(),
                wc: core::ptr::read(self.wc),
                grh: core::ptr::read(self.grh),
            }
        }
    }
}

/// What of a way back stays the same for all MADs of a sender.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    /// Index of the own GID.
    pub(crate) gid_index: u8,
    /// Hop limit.
    pub(crate) hop_limit: u8,
}

/// A sender and what it sent to, as far as the way back depends on them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SourceKey {
    gid: [u8; 16],
    own_gid: [u8; 16],
    /// Kind of network and VLAN.
    kind: u32,
}

impl SourceKey {
    /// The GID that was sent to.
    pub(crate) fn own_gid(&self) -> &[u8; 16] {
        &self.own_gid
    }

    /// All of it, in a few words: two keys with the same words are the same.
    pub(crate) fn words(&self) -> [u64; 5] {
        let [a, b, c, d, e, f, g, h, low @ ..] = self.gid;
        let [i, j, k, l, m, n, o, p, own_low @ ..] = self.own_gid;
        [
            u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            u64::from_ne_bytes(low),
            u64::from_ne_bytes([i, j, k, l, m, n, o, p]),
            u64::from_ne_bytes(own_low),
            u64::from(self.kind),
        ]
    }
}

/// The sender of a MAD whose way back is not known yet.
pub(crate) struct Source {
    key: Option<SourceKey>,
    wc: bindings::ib_wc,
    grh: bindings::ib_grh,
}

// SAFETY: Plain memory: the completion's pointers are not followed.
unsafe impl Send for Source {}
// SAFETY: As above.
unsafe impl Sync for Source {}

impl Source {
    /// What it can be told by from other senders, if that is plain to see.
    pub(crate) fn key(&self) -> Option<&SourceKey> {
        self.key.as_ref()
    }

    /// Finds the way back, which may take up to about a second.
    ///
    /// # Errors
    ///
    /// What `ib_init_ah_attr_from_wc` says, if there is no way back.
    pub(crate) fn find(&self, device: &LiveDevice, port: u32) -> Result<GlobalRoute> {
        // SAFETY: The device is there while the reference is.
        unsafe { find_way_back(device.as_raw(), port, &self.wc, &self.grh) }
    }
}

fn gid_bytes(gid: &bindings::ib_gid) -> [u8; 16] {
    // SAFETY: All members of the union are 16 plain bytes.
    unsafe { *gid.raw }
}

/// # Safety
///
/// `device` must be there, with such a port.
unsafe fn find_way_back(
    device: *mut bindings::ib_device,
    port: u32,
    wc: &bindings::ib_wc,
    grh: &bindings::ib_grh,
) -> Result<GlobalRoute> {
    let mut attr = bindings::rdma_ah_attr::default();
    let attr = &raw mut attr;
    // SAFETY: By the caller; completion and GRH are valid, and `attr` outlives the calls. Its reference
    // to a GID is put again.
    unsafe {
        to_result(bindings::ib_init_ah_attr_from_wc(
            device, port, wc, grh, attr,
        ))?;
        let grh = &*bindings::rdma_ah_read_grh(attr);
        let global = GlobalRoute {
            gid: gid_bytes(&grh.dgid),
            gid_index: grh.sgid_index,
            flow_label: grh.flow_label,
            hop_limit: grh.hop_limit,
            traffic_class: grh.traffic_class,
        };
        bindings::rdma_destroy_ah_attr(attr);
        Ok(global)
    }
}
