// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Where a send goes: what an address handle holds.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct ib_ah`

use crate::bindings;
use core::ptr::null;

/// The part of an address that stands in a global route header (IBA 8.3).
#[derive(Clone, Copy)]
pub(crate) struct GlobalRoute {
    /// The destination's GID.
    pub(crate) dgid: [u8; 16],
    /// Index of the source's GID in its port's table.
    pub(crate) sgid_index: u8,
    /// Flow label, 20 bits.
    pub(crate) flow_label: u32,
    /// Hop limit.
    pub(crate) hop_limit: u8,
    /// Traffic class.
    pub(crate) traffic_class: u8,
}

/// Where a send goes.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    /// The destination's LID.
    pub(crate) dlid: u32,
    /// Service level.
    pub(crate) sl: u8,
    /// Low bits of the source's LID.
    pub(crate) path_bits: u8,
    /// Set for a send with a GRH.
    pub(crate) global: Option<GlobalRoute>,
}

/// An address handle as `ib_core` allocates it for this driver: plain data, nothing to be freed.
#[repr(C)]
pub(super) struct RawAh {
    ah: bindings::ib_ah,
    attr: bindings::rdma_ah_attr,
}

impl RawAh {
    /// Fills in a new handle.
    ///
    /// # Safety
    ///
    /// `ah` must be a `RawAh` that `ib_core` has just allocated, `attr` be valid.
    pub(super) unsafe fn fill(ah: *mut bindings::ib_ah, attr: *const bindings::rdma_ah_attr) {
        // SAFETY: By the caller. The reference to the GID stays the caller's.
        unsafe {
            let ours = &raw mut (*ah.cast::<Self>()).attr;
            core::ptr::copy_nonoverlapping(attr, ours, 1);
            (*ours).grh.sgid_attr = null();
        }
    }

    /// Gives the attributes that the handle was made with.
    ///
    /// # Safety
    ///
    /// `ah` must be a handle of this driver, `attr` valid for writes.
    pub(super) unsafe fn query(ah: *mut bindings::ib_ah, attr: *mut bindings::rdma_ah_attr) {
        // SAFETY: By the caller.
        unsafe { core::ptr::copy_nonoverlapping(&raw const (*ah.cast::<Self>()).attr, attr, 1) };
    }

    /// The address.
    ///
    /// # Safety
    ///
    /// `ah` must be a handle of this driver.
    pub(super) unsafe fn address(ah: *const bindings::ib_ah) -> Address {
        // SAFETY: By the caller; the two functions only read the union's member that `type` says.
        let (attr, dlid, path_bits) = unsafe {
            let attr = &(*ah.cast::<Self>()).attr;
            (
                attr,
                bindings::rdma_ah_get_dlid(attr),
                bindings::rdma_ah_get_path_bits(attr),
            )
        };
        let has_grh = u32::from(attr.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;
        Address {
            dlid,
            sl: attr.sl,
            path_bits,
            global: has_grh.then(|| GlobalRoute {
                // SAFETY: All members of the union are 16 plain bytes.
                dgid: unsafe { *attr.grh.dgid.raw },
                sgid_index: attr.grh.sgid_index,
                flow_label: attr.grh.flow_label,
                hop_limit: attr.grh.hop_limit,
                traffic_class: attr.grh.traffic_class,
            }),
        }
    }
}
