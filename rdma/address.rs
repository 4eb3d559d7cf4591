// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Where a MAD is sent to, and the address handle that `ib_core` makes of it.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct rdma_ah_attr`, `struct ib_ah`

use super::agent::{
    Agent,
    MadHandler, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::{
        null_mut,
        NonNull, //
    }, //
};
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};

/// The part of an address that stands in a global route header (IBA 8.3).
#[derive(Clone, Copy)]
pub(crate) struct GlobalRoute {
    /// The other port's GID.
    pub(crate) gid: [u8; 16],
    /// Index of the own GID in the port's table.
    pub(crate) gid_index: u8,
    /// Flow label, 20 bits.
    pub(crate) flow_label: u32,
    /// Hop limit.
    pub(crate) hop_limit: u8,
    /// Traffic class.
    pub(crate) traffic_class: u8,
}

/// Where a MAD is sent to.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    /// The other port's LID.
    pub(crate) lid: u16,
    /// Service level.
    pub(crate) sl: u8,
    /// Low bits of the own LID.
    pub(crate) path_bits: u8,
    /// Set for a MAD that is to carry a GRH.
    pub(crate) global: Option<GlobalRoute>,
}

/// A handle on an address: the hardware's own form of it.
///
/// # Invariants
///
/// The pointer is an address handle that nobody else destroys. `'a` ends before the port's protection
/// domain does.
pub(crate) struct AddressHandle<'a> {
    ah: NonNull<bindings::ib_ah>,
    _agent: PhantomData<&'a ()>,
}

impl<'a> AddressHandle<'a> {
    /// Makes a handle for sends of the agent. Sleeps: on RoCE it resolves the GID to a MAC address,
    /// which takes up to about a second if nobody answers.
    ///
    /// # Errors
    ///
    /// What `rdma_create_user_ah` says: `EINVAL` (no such GID index, port, ...), `ENETUNREACH`,
    /// `ETIMEDOUT`, `ENOMEM` and others.
    pub(crate) fn new<H: MadHandler>(agent: &'a Agent<H>, address: &Address) -> Result<Self> {
        let port = agent.port();
        let device = agent.device().as_raw();
        let mut attr = bindings::rdma_ah_attr::default();
        let attr = &raw mut attr;
        // SAFETY: `attr` is valid for the whole of this function, and the device for as long as the
        // agent is.
        unsafe {
            (*attr).type_ = bindings::rdma_ah_find_type(device, port);
            bindings::rdma_ah_set_dlid(attr, u32::from(address.lid));
            bindings::rdma_ah_set_sl(attr, address.sl);
            bindings::rdma_ah_set_path_bits(attr, address.path_bits);
            bindings::rdma_ah_set_port_num(attr, port);
        }
        if let Some(mut global) = address.global {
            // SAFETY: As above; a null GID leaves the field alone, and the second call copies 16
            // bytes out of `global.gid`.
            unsafe {
                bindings::rdma_ah_set_grh(
                    attr,
                    null_mut(),
                    global.flow_label,
                    global.gid_index,
                    global.hop_limit,
                    global.traffic_class,
                );
                bindings::rdma_ah_set_dgid_raw(attr, global.gid.as_mut_ptr().cast());
            }
        }
        // SAFETY: A registered agent's QP has a protection domain; `attr` is valid; no udata is needed
        // in the kernel.
        let ah = from_err_ptr(unsafe {
            bindings::rdma_create_user_ah((*(*agent.as_raw()).qp).pd, attr, null_mut())
        })?;
        // INVARIANT: The handle was just made; the agent keeps the protection domain for `'a`.
        Ok(Self {
            ah: NonNull::new(ah).ok_or(ENOMEM)?,
            _agent: PhantomData,
        })
    }

    /// Whether the handle was made in this protection domain.
    pub(super) fn is_of(&self, pd: *const bindings::ib_pd) -> bool {
        // SAFETY: By the type invariant; the field does not change.
        core::ptr::eq(unsafe { (*self.ah.as_ptr()).pd }, pd)
    }

    /// The C handle, which must be destroyed by the caller or given to [`AddressHandle::from_raw`].
    pub(super) fn into_raw(self) -> *mut bindings::ib_ah {
        let ptr = self.ah.as_ptr();
        core::mem::forget(self);
        ptr
    }

    /// Takes back what [`AddressHandle::into_raw`] gave.
    ///
    /// # Safety
    ///
    /// `ah` must come from `into_raw` and be used no more; the port's protection domain must outlive
    /// `'a`.
    pub(super) unsafe fn from_raw(ah: NonNull<bindings::ib_ah>) -> Self {
        // INVARIANT: By the caller.
        Self {
            ah,
            _agent: PhantomData,
        }
    }
}

impl Drop for AddressHandle<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant nobody else destroys it, and the protection domain is there.
        unsafe {
            bindings::rdma_destroy_ah_user(
                self.ah.as_ptr(),
                bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE,
                null_mut(),
            )
        };
    }
}
