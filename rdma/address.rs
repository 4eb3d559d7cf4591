// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Where a MAD is sent to, and the address handle that `ib_core` makes of it.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct rdma_ah_attr`, `struct ib_ah`

use super::{
    agent::{
        Agent,
        MadHandler, //
    },
    changes::{
        Epoch,
        OwnGid, //
    },
    device::DeviceGuard, //
};
use crate::bindings;
use core::ptr::{
    null_mut,
    NonNull, //
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

impl Address {
    /// All of it, in a few words: two addresses with the same words are the same.
    pub(crate) fn words(&self) -> [u64; 4] {
        let [lid_hi, lid_lo] = self.lid.to_be_bytes();
        let local = [lid_hi, lid_lo, self.sl, self.path_bits];
        let word = |bytes: [u8; 4]| u64::from(u32::from_be_bytes(bytes));
        match &self.global {
            None => [word(local) << 32, 0, 0, 0],
            Some(global) => {
                let [a, b, c, d, e, f, g, h, low @ ..] = global.gid;
                let rest = [1, global.gid_index, global.hop_limit, global.traffic_class];
                [
                    word(local) << 32 | word(rest),
                    u64::from(global.flow_label),
                    u64::from_be_bytes([a, b, c, d, e, f, g, h]),
                    u64::from_be_bytes(low),
                ]
            }
        }
    }
}

/// A handle on an address: the hardware's own form of it. It may be used for any number of sends of
/// any agent of the port. Dropping it sleeps.
///
/// # Invariants
///
/// The pointer is an address handle that nobody else destroys.
pub(crate) struct AddressHandle {
    ah: NonNull<bindings::ib_ah>,
    /// `None` if it is not to be used a second time.
    epoch: Option<Epoch>,
    /// The device, and with it the protection domain: `ib_mad`, which owns that, lets go of a device
    /// after its agents' owners have. DROP ORDER: the handle is destroyed by `drop`, before this goes.
    device: DeviceGuard,
}

// SAFETY: `ib_core` lets address handles be used and destroyed by any thread.
unsafe impl Send for AddressHandle {}
// SAFETY: As above; it is only read while it is shared.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Makes a handle. Sleeps: on RoCE it resolves the GID to a MAC address, which takes up to about a
    /// second if nobody answers.
    ///
    /// # Errors
    ///
    /// What `rdma_create_user_ah` says: `EINVAL` (no such GID index, port, ...), `ENETUNREACH`,
    /// `ETIMEDOUT`, `ENOMEM` and others.
    pub(crate) fn new<H: MadHandler>(agent: &Agent<H>, address: &Address) -> Result<Self> {
        let port = agent.port();
        let guard = agent.device();
        let device = guard.as_raw();
        // Before anything is asked: what changes from here on makes the handle an old one.
        let own = match &address.global {
            Some(global) if guard.cap_eth_ah(port) => {
                Some(OwnGid::get(guard, port, global.gid_index))
            }
            _ => None,
        };
        let epoch = match &own {
            Some(own) => own.as_ref().and_then(|own| Epoch::of_network(guard, own)),
            None => Some(Epoch::of_device(guard)),
        };
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
        let ah = NonNull::new(ah).ok_or(ENOMEM)?;
        // SAFETY: The handle was just made.
        let used = unsafe { (*ah.as_ptr()).sgid_attr };
        // The entry may have been replaced before the handle was made.
        let same = own
            .flatten()
            .is_none_or(|own| core::ptr::eq(own.as_raw(), used));
        // INVARIANT: The handle was just made.
        Ok(Self {
            ah,
            epoch: epoch.filter(|_| same),
            device: guard.clone(),
        })
    }

    /// Whether a handle made now would be the same: nothing that it was made from has changed.
    pub(crate) fn is_current(&self) -> bool {
        // SAFETY: By the type invariant; a handle keeps the entry of the GID table that it was made with.
        // On RoCE it has one.
        unsafe {
            let own = (*self.ah.as_ptr()).sgid_attr;
            self.epoch.as_ref().is_some_and(|epoch| {
                epoch.is_current_for(self.device.changes(), own)
                    && (own.is_null() || epoch.is_of_network() || self.has_its_gid(own))
            })
        }
    }

    /// Whether the handle may be kept for later sends: nothing was told since it was made. Calls nothing.
    pub(crate) fn may_be_kept(&self) -> bool {
        self.epoch
            .as_ref()
            .is_some_and(|epoch| epoch.is_untold(self.device.changes()))
    }

    /// Whether the own GID that the handle was made with still stands at its index. On InfiniBand the
    /// table may change before that is told.
    ///
    /// # Safety
    ///
    /// `own` must be the entry that the handle was made with.
    unsafe fn has_its_gid(&self, own: *const bindings::ib_gid_attr) -> bool {
        // SAFETY: By the caller; a handle keeps the entry.
        let (port, index) = unsafe { ((*own).port_num, (*own).index) };
        u8::try_from(index).is_ok_and(|index| {
            OwnGid::get(&self.device, port, index)
                .is_some_and(|there| core::ptr::eq(there.as_raw(), own))
        })
    }

    /// Whether the handle was made in this protection domain.
    pub(super) fn is_of(&self, pd: *const bindings::ib_pd) -> bool {
        // SAFETY: By the type invariant; the field does not change.
        core::ptr::eq(unsafe { (*self.ah.as_ptr()).pd }, pd)
    }

    /// The C handle.
    pub(super) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.ah.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: By the type invariant nobody else destroys it, and the device is there.
        unsafe {
            bindings::rdma_destroy_ah_user(
                self.ah.as_ptr(),
                bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE,
                null_mut(),
            )
        };
    }
}
