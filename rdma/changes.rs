// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What address handles, and the ways back to senders, are made from: when it changes.
//!
//! C headers: `include/rdma/ib_verbs.h`, `struct ib_event_handler`; `include/net/netevent.h`;
//! `include/linux/netdevice.h`
//!
//! Whoever keeps something that was made of a device's tables, or on RoCE of what the network said, asks
//! for an [`Epoch`] *before* it is made and keeps it beside. What is kept counts only while its epoch
//! [`is_current`](Epoch::is_current): every change begins a new one, and in any case it ends after
//! [`MAX_AGE_MS`], since not everything shows (a hop limit set by sysctl, tables inside a driver).
//!
//! Changes of a device are told by `ib_core` ([`EventRegistration`]): GIDs, LIDs, P_Keys, subnet manager,
//! ports. Changes of the network count on RoCE only: those of neighbours and of network devices, in all
//! namespaces, and redirects are told ([`NetworkRegistration`]); those of routes and of routing rules are
//! seen in the numbers by which the network's own caches know them.

use super::device::{
    DeviceGuard,
    LiveDevice, //
};
use crate::bindings;
use core::{
    cell::UnsafeCell,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering,
            Atomic, //
        },
        Arc, //
    },
    types::Opaque, //
};

/// Nothing is kept for longer.
const MAX_AGE_MS: c_ulong = 1000;
/// [`MAX_AGE_MS`] in jiffies.
const MAX_AGE: c_ulong = MAX_AGE_MS * bindings::UMAD_HZ as c_ulong / 1000;
/// How often the network has changed.
static NETWORK: Atomic<u64> = Atomic::new(0);
fn jiffies() -> c_ulong {
    // SAFETY: The function reads a variable.
    unsafe { bindings::umad_jiffies() }
}

/// How many changes there were of one device.
pub(crate) struct Changes(Atomic<u64>);

impl Changes {
    /// None yet.
    pub(super) const fn new() -> Self {
        Self(Atomic::new(0))
    }

    fn add(&self) {
        self.0.fetch_add(1u64, ordering::Full);
    }

    fn count(&self) -> u64 {
        self.0.load(ordering::Acquire)
    }
}

/// An entry of the table of a RoCE port's own GIDs.
///
/// # Invariants
///
/// `attr` is an entry, and a reference to it is ours.
pub(crate) struct OwnGid {
    attr: NonNull<bindings::ib_gid_attr>,
}

// SAFETY: Entries of the table are read only, but for the network device, which RCU guards, and may be
// put by any thread.
unsafe impl Send for OwnGid {}
// SAFETY: As above.
unsafe impl Sync for OwnGid {}

impl OwnGid {
    /// The entry at an index of a port's table; `None` if there is none.
    pub(crate) fn get(device: &LiveDevice, port: u32, index: u8) -> Option<Self> {
        // SAFETY: The device is there.
        unsafe { Self::get_raw(device.as_raw(), port, index) }
    }

    /// The same.
    ///
    /// # Safety
    ///
    /// `device` must be there.
    pub(super) unsafe fn get_raw(
        device: *mut bindings::ib_device,
        port: u32,
        index: u8,
    ) -> Option<Self> {
        // SAFETY: By the caller; `ib_core` checks port and index.
        let attr = unsafe { bindings::rdma_get_gid_attr(device, port, index.into()) };
        // INVARIANT: `ib_core` took a reference.
        let attr = NonNull::new(from_err_ptr(attr.cast_mut()).ok()?)?;
        Some(Self { attr })
    }

    /// The C entry.
    pub(super) fn as_raw(&self) -> *const bindings::ib_gid_attr {
        self.attr.as_ptr()
    }

    /// The GID.
    pub(crate) fn gid(&self) -> [u8; 16] {
        // SAFETY: By the type invariant; all members of the union are 16 plain bytes.
        unsafe { *(*self.attr.as_ptr()).gid.raw }
    }

    /// The routes that packets from the GID take now; `None` if it is removed.
    fn routes(&self) -> Option<Routes> {
        // SAFETY: By the type invariant.
        unsafe { Routes::of(self.attr.as_ptr()) }
    }
}

impl Drop for OwnGid {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { bindings::rdma_put_gid_attr(self.attr.as_ptr()) };
    }
}

/// A state of a namespace's routes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Routes {
    ipv4: c_int,
    ipv6: c_int,
    ipv6_entries: c_uint,
}

impl Routes {
    /// The present state where the device of an own GID is; `None` if the GID is removed.
    ///
    /// # Safety
    ///
    /// `own` must be an entry of a GID table that the caller has a reference to.
    unsafe fn of(own: *const bindings::ib_gid_attr) -> Option<Self> {
        let mut routes = bindings::umad_routes::default();
        // SAFETY: By the caller.
        unsafe { bindings::umad_gid_routes(own, &mut routes) }.then_some(Self {
            ipv4: routes.ipv4,
            ipv6: routes.ipv6,
            ipv6_entries: routes.ipv6_entries,
        })
    }
}

/// A time in which nothing has changed.
#[derive(Clone, Copy)]
pub(crate) struct Epoch {
    device: u64,
    began: c_ulong,
    /// `None` where the network does not count.
    network: Option<(u64, Routes)>,
}

impl Epoch {
    /// The present epoch of a device, for what does not depend on a network.
    pub(crate) fn of_device(device: &LiveDevice) -> Self {
        Self {
            device: device.changes().count(),
            began: jiffies(),
            network: None,
        }
    }

    /// The present epoch for packets from an own GID of a RoCE port; `None` if the GID is removed.
    pub(crate) fn of_network(device: &LiveDevice, own: &OwnGid) -> Option<Self> {
        let told = NETWORK.load(ordering::Acquire);
        Some(Self {
            network: Some((told, own.routes()?)),
            ..Self::of_device(device)
        })
    }

    /// Whether nothing was told that ends it.
    pub(crate) fn is_untold(&self, changes: &Changes) -> bool {
        self.device == changes.count()
            && self
                .network
                .is_none_or(|(told, _)| told == NETWORK.load(ordering::Acquire))
            && jiffies().wrapping_sub(self.began) < MAX_AGE
    }

    /// Whether it is still the same one, for packets from the same own GID.
    pub(crate) fn is_current(&self, changes: &Changes, own: &OwnGid) -> bool {
        self.is_untold(changes)
            && self
                .network
                .is_none_or(|(_, routes)| Some(routes) == own.routes())
    }

    /// The same, for an entry of the GID table that the caller has a reference to by other means.
    ///
    /// # Safety
    ///
    /// `own` must be such an entry, or null where the network does not count.
    pub(super) unsafe fn is_current_for(
        &self,
        changes: &Changes,
        own: *const bindings::ib_gid_attr,
    ) -> bool {
        self.is_untold(changes)
            && self.network.is_none_or(|(_, routes)| {
                // SAFETY: By the caller.
                Some(routes) == unsafe { Routes::of(own) }
            })
    }

    /// Whether the network counts.
    pub(super) fn is_of_network(&self) -> bool {
        self.network.is_some()
    }
}

/// Who is told that something of a device has changed.
pub(crate) trait Watcher: Send + Sync + 'static {
    /// A new epoch has begun. May sleep; `ib_core`'s locks on the GID table, or the network's RTNL, are
    /// held.
    fn changed(&self);
}

#[repr(C)]
struct Handler<W: Watcher> {
    raw: Opaque<bindings::ib_event_handler>,
    device: DeviceGuard,
    watcher: Arc<W>,
}

/// A watcher of a port, for the network's notifier.
struct Watching {
    handler: NonNull<c_void>,
    /// To be called with `handler`.
    changed: unsafe fn(NonNull<c_void>),
}

// SAFETY: The pointer is to a handler, whose parts are `Send + Sync`.
unsafe impl Send for Watching {}

kernel::sync::global_lock! {
    // SAFETY: `NetworkRegistration::new` initialises it, once, and comes before all users.
    unsafe(uninit) static WATCHING: Mutex<KVec<Watching>> = KVec::new();
}

/// Events of a device; no longer told when this is dropped, which sleeps until nobody is being told.
///
/// It holds a guard of the device, so it must go before the device is waited for.
///
/// # Invariants
///
/// The handler is registered.
pub(crate) struct EventRegistration<W: Watcher> {
    handler: NonNull<Handler<W>>,
}

// SAFETY: The handler's parts are `Send + Sync`, and `ib_core` locks its list.
unsafe impl<W: Watcher> Send for EventRegistration<W> {}
// SAFETY: As above.
unsafe impl<W: Watcher> Sync for EventRegistration<W> {}

impl<W: Watcher> EventRegistration<W> {
    /// Lets `watcher` be told of changes. May sleep. There must be a [`NetworkRegistration`].
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(device: DeviceGuard, watcher: Arc<W>) -> Result<Self> {
        let handler = KBox::new(
            Handler {
                raw: Opaque::new(bindings::ib_event_handler {
                    device: device.as_raw(),
                    handler: Some(Self::told),
                    ..Default::default()
                }),
                device,
                watcher,
            },
            GFP_KERNEL,
        )?;
        let handler = NonNull::from(KBox::leak(handler));
        // SAFETY: The handler is complete and stays where it is until `drop`, and the guard in it keeps
        // the device.
        unsafe { bindings::ib_register_event_handler((*handler.as_ptr()).raw.get()) };
        // INVARIANT: Just registered.
        let this = Self { handler };
        let watching = Watching {
            handler: handler.cast(),
            changed: Self::network_changed,
        };
        // On an error `this` unregisters.
        WATCHING.lock().push(watching, GFP_KERNEL)?;
        Ok(this)
    }

    /// # Safety
    ///
    /// `handler` must be a `Handler<W>` that lives.
    unsafe fn network_changed(handler: NonNull<c_void>) {
        // SAFETY: By the caller.
        unsafe { handler.cast::<Handler<W>>().as_ref() }
            .watcher
            .changed();
    }

    /// # Safety
    ///
    /// Called by `ib_core` with a registered handler of this type.
    unsafe extern "C" fn told(
        raw: *mut bindings::ib_event_handler,
        _event: *mut bindings::ib_event,
    ) {
        // SAFETY: It is the first field of a `Handler`, which lives while it is registered; and
        // unregistering waits for this call.
        let handler = unsafe { &*raw.cast::<Handler<W>>() };
        handler.device.changes().add();
        handler.watcher.changed();
    }
}

impl<W: Watcher> Drop for EventRegistration<W> {
    fn drop(&mut self) {
        const { assert!(core::mem::offset_of!(Handler<W>, raw) == 0) };
        // Whoever is being told has the lock.
        let mut all = WATCHING.lock();
        all.retain(|watching| watching.handler != self.handler.cast());
        if all.is_empty() {
            // Nobody drops a static at the end of the module.
            *all = KVec::new();
        }
        drop(all);
        // SAFETY: By the type invariant it is registered; the call waits for the handler, so that the
        // box is nobody else's afterwards. `new` leaked it.
        unsafe {
            bindings::ib_unregister_event_handler((*self.handler.as_ptr()).raw.get());
            drop(KBox::from_raw(self.handler.as_ptr()));
        }
    }
}

/// The notifiers of the network, static since the kernel keeps pointers to them.
struct Notifiers {
    registered: Atomic<bool>,
    neighbours: UnsafeCell<bindings::notifier_block>,
    devices: UnsafeCell<bindings::notifier_block>,
}

// SAFETY: `NetworkRegistration` is the only one to change the fields, and `registered` lets only one
// of it exist; afterwards they are the kernel's, which locks for itself.
unsafe impl Sync for Notifiers {}

static NOTIFIERS: Notifiers = Notifiers {
    registered: Atomic::new(false),
    neighbours: UnsafeCell::new(pin_init::zeroed()),
    devices: UnsafeCell::new(pin_init::zeroed()),
};

/// Changes of neighbours and network devices are noticed while this lives.
pub(crate) struct NetworkRegistration(());

impl NetworkRegistration {
    /// Begins to notice. May sleep.
    ///
    /// # Errors
    ///
    /// `EBUSY` if that was done already; `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        let all = &NOTIFIERS;
        if all.registered.xchg(true, ordering::Full) {
            return Err(EBUSY);
        }
        // SAFETY: `registered` was false: nobody else touches the fields, and they are not registered.
        // They are static, and their functions live as long as the module, whose end unregisters. The
        // lock is initialised once: there is one registration in the life of the module.
        let result = unsafe {
            WATCHING.init();
            (*all.neighbours.get()).notifier_call = Some(Self::told);
            (*all.devices.get()).notifier_call = Some(Self::device_told);
            // Before `ib_core`, which changes the GID table then: an entry that a kept handle refers to
            // would not be free for the GID that comes next.
            (*all.devices.get()).priority = 1;
            to_result(bindings::register_netdevice_notifier(all.devices.get()))
                // The chain takes any notifier.
                .map(|()| bindings::register_netevent_notifier(all.neighbours.get()))
        };
        match result {
            Ok(_) => Ok(Self(())),
            Err(e) => {
                all.registered.store(false, ordering::Release);
                Err(e)
            }
        }
    }

    /// # Safety
    ///
    /// May be called by anybody; the arguments are not looked at.
    unsafe extern "C" fn told(
        _notifier: *mut bindings::notifier_block,
        _event: c_ulong,
        _what: *mut c_void,
    ) -> c_int {
        NETWORK.fetch_add(1u64, ordering::Full);
        // CAST: `NOTIFY_DONE` is zero.
        bindings::NOTIFY_DONE as c_int
    }

    /// # Safety
    ///
    /// Called by the kernel from where it may sleep; the arguments are not looked at.
    unsafe extern "C" fn device_told(
        notifier: *mut bindings::notifier_block,
        event: c_ulong,
        what: *mut c_void,
    ) -> c_int {
        // SAFETY: As anybody may.
        let done = unsafe { Self::told(notifier, event, what) };
        for watching in WATCHING.lock().iter() {
            // SAFETY: Who is on the list lives: it is taken off, under the lock, before it goes.
            unsafe { (watching.changed)(watching.handler) };
        }
        done
    }
}

impl Drop for NetworkRegistration {
    fn drop(&mut self) {
        let all = &NOTIFIERS;
        // SAFETY: `new` registered both. When a call returns, nobody is in the function any more.
        unsafe {
            let _ = bindings::unregister_netdevice_notifier(all.devices.get());
            let _ = bindings::unregister_netevent_notifier(all.neighbours.get());
        }
        all.registered.store(false, ordering::Release);
    }
}
