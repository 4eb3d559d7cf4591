// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! An RDMA device that may be unplugged at any moment, and its ports.
//!
//! C header: `include/rdma/ib_verbs.h`
//!
//! Life cycle: [`super::client`] makes a [`Device`] when `ib_core` adds a device and revokes it before
//! it lets `ib_core` go on with the removal. In between, [`Device::get`] hands out guards; whoever
//! holds one may use the device and keeps the removal waiting.

use super::{
    changes::Changes,
    revocable::{
        Owner,
        User, //
    }, //
};
use crate::bindings;
use core::{
    ops::RangeInclusive,
    ptr::NonNull, //
};
use kernel::{
    device,
    error::to_result,
    new_spinlock,
    prelude::*,
    sync::{
        Arc,
        SpinLock, //
    }, //
};

/// Capability bit that says that a subnet manager runs on the port.
///
/// Source: `IB_PORT_SM` of `include/rdma/ib_mad.h`; IBA 14.2.5.6, PortInfo:CapabilityMask, IsSM.
pub(crate) const CAP_IS_SM: u32 = bindings::ib_port_capability_mask_bits_IB_PORT_SM;

/// A device that is registered with `ib_core`.
///
/// # Invariants
///
/// The pointer is valid for as long as this value lives: [`Device::revoke`] and the client that made
/// it see to that.
pub(crate) struct LiveDevice {
    raw: NonNull<bindings::ib_device>,
    changes: Arc<Changes>,
}

// SAFETY: `ib_core` lets every function that is called here be called from any thread.
unsafe impl Send for LiveDevice {}
// SAFETY: As above; the functions may run at the same time, too.
unsafe impl Sync for LiveDevice {}

/// A device that is in use: its removal waits until the guard is dropped.
///
/// Must not be dropped under a spinlock.
pub(crate) type DeviceGuard = User<LiveDevice>;

impl LiveDevice {
    /// The C device.
    pub(super) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.as_ptr()
    }

    /// What has changed.
    pub(super) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// The device's number, which it keeps, whatever its name is.
    pub(crate) fn index(&self) -> u32 {
        // SAFETY: The device is valid by the type invariant; the field does not change.
        unsafe { (*self.as_raw()).index }
    }

    /// Port numbers of the device: 1..=n, or 0..=0 for a switch.
    pub(crate) fn ports(&self) -> RangeInclusive<u32> {
        // SAFETY: The device is valid by the type invariant.
        let first = unsafe { bindings::rdma_start_port(self.as_raw()) };
        // SAFETY: As above.
        let last = unsafe { bindings::rdma_end_port(self.as_raw()) };
        first..=last
    }

    /// Whether the port sends and receives MADs. False for a number that is no port.
    pub(crate) fn cap_ib_mad(&self, port: u32) -> bool {
        // SAFETY: The device is valid by the type invariant; the port number was checked, since
        // C indexes with it.
        self.ports().contains(&port) && unsafe { bindings::rdma_cap_ib_mad(self.as_raw(), port) }
    }

    /// Whether the port has a subnet management interface (QP0). False for a number that is no port.
    pub(crate) fn cap_ib_smi(&self, port: u32) -> bool {
        // SAFETY: As in `cap_ib_mad`.
        self.ports().contains(&port) && unsafe { bindings::rdma_cap_ib_smi(self.as_raw(), port) }
    }

    /// Whether the port's address handles hold Ethernet addresses, which the network is asked for:
    /// RoCE. False for a number that is no port.
    pub(crate) fn cap_eth_ah(&self, port: u32) -> bool {
        // SAFETY: As in `cap_ib_mad`.
        self.ports().contains(&port) && unsafe { bindings::rdma_cap_eth_ah(self.as_raw(), port) }
    }

    /// The device that the RDMA device hangs below, a PCI function for example.
    pub(crate) fn parent(&self) -> Option<&device::Device> {
        // SAFETY: The device is valid by the type invariant; its parent does not change while it is
        // registered.
        let parent = unsafe { bindings::umad_ib_device_parent(self.as_raw()) };
        if parent.is_null() {
            return None;
        }
        // SAFETY: A registered device holds a reference to its parent, so the parent lives as long
        // as `self` does.
        Some(unsafe { device::Device::from_raw(parent) })
    }

    /// The name that the device has now; `rdma dev set ... name` changes it.
    ///
    /// Read from `ib_device.name`, which a rename overwrites in place, and not from the `struct
    /// device`, whose old name a rename frees. A reader that meets a rename may see a mix of the
    /// two names, never memory that is not the name's.
    pub(crate) fn name(&self) -> DeviceName {
        // SAFETY: The device is valid by the type invariant; a byte may change while it is read,
        // hence the volatile read of plain bytes.
        let bytes = unsafe {
            (&raw const (*self.as_raw()).name)
                .cast::<[u8; NAME_MAX]>()
                .read_volatile()
        };
        DeviceName(bytes)
    }

    /// Whether the calling process's network namespace may use the device.
    ///
    /// Always true while RDMA devices are shared between namespaces (`rdma system`).
    pub(crate) fn accessible_from_current_netns(&self) -> bool {
        // SAFETY: `current` is valid, and its `nsproxy` is not null: the callers are system calls
        // of a process that has not begun to exit, and only a process itself changes its `nsproxy`.
        unsafe {
            let nsproxy = (*bindings::get_current()).nsproxy;
            bindings::rdma_dev_access_netns(self.as_raw(), (*nsproxy).net_ns)
        }
    }

    /// Sets and clears bits of the port's capability mask. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the driver cannot, or what the driver says.
    pub(crate) fn modify_port_caps(&self, port: u32, set: u32, clear: u32) -> Result {
        let mut props = bindings::ib_port_modify {
            set_port_cap_mask: set,
            clr_port_cap_mask: clear,
            ..Default::default()
        };
        // SAFETY: The device is valid by the type invariant; `props` outlives the call; `ib_core`
        // checks the port number.
        to_result(unsafe { bindings::ib_modify_port(self.as_raw(), port, 0, &mut props) })
    }
}

/// Bytes of a device name, `IB_DEVICE_NAME_MAX`.
const NAME_MAX: usize = 64;
const _: () = assert!(NAME_MAX == bindings::IB_DEVICE_NAME_MAX as usize);

/// A copy of a device's name.
#[derive(Clone, Copy)]
pub(crate) struct DeviceName([u8; NAME_MAX]);

impl DeviceName {
    /// The name's bytes, without the terminating zero.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(NAME_MAX);
        self.0.get(..len).unwrap_or(&[])
    }
}

/// A device for those who must live with its going away.
#[pin_data]
pub(crate) struct Device {
    #[pin]
    live: SpinLock<Option<Owner<LiveDevice>>>,
    changes: Arc<Changes>,
}

impl Device {
    /// Takes note of a device that `ib_core` adds.
    ///
    /// # Safety
    ///
    /// `raw` must be valid until [`Device::revoke`] and [`Revoked::wait`] have been called.
    pub(super) unsafe fn new(raw: NonNull<bindings::ib_device>) -> Result<Arc<Self>> {
        // INVARIANT: The caller keeps `raw` valid until the value is dropped, which `wait` waits for.
        let changes = Arc::new(Changes::new(), GFP_KERNEL)?;
        let live = LiveDevice {
            raw,
            changes: changes.clone(),
        };
        let live = Owner::new(live, GFP_KERNEL)?;
        Arc::pin_init(
            pin_init!(Self {
                live <- new_spinlock!(Some(live), "rdma::Device::live"),
                changes,
            }),
            GFP_KERNEL,
        )
    }

    /// The device, while it is there. Does not sleep.
    pub(crate) fn get(&self) -> Option<DeviceGuard> {
        self.live.lock().as_ref().map(Owner::share)
    }

    /// What has changed, as long as it is there.
    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Whether the device is still there. It may be gone when the call returns.
    pub(crate) fn is_live(&self) -> bool {
        self.live.lock().is_some()
    }

    /// Lets nobody in any more. `None` if that was done before.
    pub(crate) fn revoke(&self) -> Option<Revoked> {
        self.live.lock().take().map(Revoked)
    }
}

/// A revoked device: nobody new can get at it.
#[must_use = "guards may still be in use: call `wait`"]
pub(crate) struct Revoked(Owner<LiveDevice>);

impl Revoked {
    /// Sleeps until every guard is dropped.
    pub(crate) fn wait(self) {
        self.0.retire();
    }
}
