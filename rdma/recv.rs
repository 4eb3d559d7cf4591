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
    mad::{
        class_header_len,
        MadHeader,
        MAD_HDR_LEN, //
    }, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull,
    slice, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// A received MAD.
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
        Self { wc }
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
        unsafe {
            Segments {
                head: &raw const (*self.wc.as_ptr()).rmpp_list,
                next: (*self.wc.as_ptr()).recv_buf.list.next,
                len: self.segment_len(),
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

/// Iterates over the segments of a MAD.
///
/// # Invariants
///
/// `next` is an element of the list with the head `head`, or the head; the list lives for `'a`.
pub(crate) struct Segments<'a> {
    head: *const bindings::list_head,
    next: *mut bindings::list_head,
    len: usize,
    _mad: PhantomData<&'a RecvMad>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if core::ptr::eq(self.next, self.head) {
            return None;
        }
        // SAFETY: By the type invariant this is an element, so it is the `list` field of a
        // `struct ib_mad_recv_buf`, whose MAD has `len` bytes.
        unsafe {
            let buf = kernel::container_of!(self.next, bindings::ib_mad_recv_buf, list);
            // INVARIANT: The next one of an element of a list is an element or the head.
            self.next = (*self.next).next;
            Some(slice::from_raw_parts(
                (*buf).__bindgen_anon_1.mad.cast(),
                self.len,
            ))
        }
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

    /// The way back, as far as a GRH tells it: `None` if there was no GRH. On RoCE this resolves the
    /// sender's address and may sleep up to about a second.
    ///
    /// # Errors
    ///
    /// What `ib_init_ah_attr_from_wc` says, if there is no way back.
    pub(crate) fn global(&self) -> Result<Option<GlobalRoute>> {
        // CAST: The flag is a small positive constant of an enum.
        if self.wc.wc_flags & bindings::ib_wc_flags_IB_WC_GRH as c_int == 0 {
            return Ok(None);
        }
        let mut attr = bindings::rdma_ah_attr::default();
        let attr = &raw mut attr;
        // SAFETY: By the type invariant all pointers are valid; the completion says that there is a
        // GRH. `attr` outlives the calls, and its reference to a GID is put again.
        unsafe {
            to_result(bindings::ib_init_ah_attr_from_wc(
                (*self.agent).device,
                u32::from((*self.agent).port_num),
                self.wc,
                self.grh,
                attr,
            ))?;
            let grh = &*bindings::rdma_ah_read_grh(attr);
            let global = GlobalRoute {
                gid: *grh.dgid.raw,
                gid_index: grh.sgid_index,
                flow_label: grh.flow_label,
                hop_limit: grh.hop_limit,
                traffic_class: grh.traffic_class,
            };
            bindings::rdma_destroy_ah_attr(attr);
            Ok(Some(global))
        }
    }
}
