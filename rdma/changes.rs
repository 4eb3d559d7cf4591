// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What address handles, and the ways back to senders, are made from: when it changes.
//!
//! C headers: `include/rdma/ib_verbs.h`, `struct ib_event_handler`; `include/net/netevent.h`;
//! `include/net/fib_notifier.h`; `include/linux/netdevice.h`
//!
//! Whoever keeps something that was made of a device's tables, or on RoCE of what the network said, asks
//! for an [`Epoch`] *before* it is made and keeps it beside. What is kept counts only while its epoch
//! [`is_current`](Epoch::is_current): every change that is told begins a new one, and in any case it
//! ends after [`MAX_AGE_MS`], since not everything is told (a hop limit set by sysctl, tables inside a
//! driver).
//!
//! Told are, of a device, the events of `ib_core` ([`EventRegistration`]): GIDs, LIDs, P_Keys, subnet
//! manager, ports. Of the network, which only counts on RoCE, and of all namespaces alike
//! ([`NetworkRegistration`]): neighbours, redirects, network devices, routes and routing rules. Some
//! of the latter are told a moment before they can be seen, so what was made within [`CALM_JIFFIES`]
//! of such a change is not to be kept at all ([`Epoch::is_calm`]).

use super::device::{
    DeviceGuard,
    LiveDevice, //
};
use crate::bindings;
use core::{
    cell::UnsafeCell,
    ptr::{
        null_mut,
        NonNull, //
    }, //
};
use kernel::{
    error::to_result,
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
/// How long after a change of the network nothing is kept.
const CALM_JIFFIES: c_ulong = 3;

/// How often the network has changed.
static NETWORK: Atomic<u64> = Atomic::new(0);
/// When it changed last, in jiffies.
static NETWORK_CHANGED: Atomic<u64> = Atomic::new(0);
/// Namespaces whose routes are not watched.
static UNWATCHED: Atomic<u64> = Atomic::new(0);

fn jiffies() -> c_ulong {
    // SAFETY: The function reads a variable.
    unsafe { bindings::umad_jiffies() }
}

/// The network has changed.
fn network_changed() {
    // CAST: Both have 64 bits, or the upper ones are zero.
    NETWORK_CHANGED.store(jiffies() as u64, ordering::Relaxed);
    // Whoever sees the new number sees the time, too.
    NETWORK.fetch_add(1u64, ordering::Full);
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

/// A time in which nothing has changed.
#[derive(Clone, Copy)]
pub(crate) struct Epoch {
    device: u64,
    /// `None` where the network does not count.
    network: Option<u64>,
    began: c_ulong,
}

impl Epoch {
    /// The present epoch of a port.
    pub(crate) fn now(device: &LiveDevice, port: u32) -> Self {
        Self {
            device: device.changes().count(),
            network: device
                .cap_eth_ah(port)
                .then(|| NETWORK.load(ordering::Acquire)),
            began: jiffies(),
        }
    }

    /// Whether it is still the same one.
    pub(crate) fn is_current(&self, changes: &Changes) -> bool {
        self.device == changes.count()
            && self
                .network
                .is_none_or(|network| network == NETWORK.load(ordering::Acquire))
            && jiffies().wrapping_sub(self.began) < MAX_AGE
    }

    /// Whether what was made in it may be kept.
    pub(crate) fn is_calm(&self) -> bool {
        // CAST: The time was stored from the same type.
        self.network.is_none()
            || (UNWATCHED.load(ordering::Relaxed) == 0
                && self
                    .began
                    .wrapping_sub(NETWORK_CHANGED.load(ordering::Relaxed) as c_ulong)
                    >= CALM_JIFFIES)
    }
}

/// Who is told that something of a device has changed.
pub(crate) trait Watcher: Send + Sync + 'static {
    /// A new epoch has begun. May sleep; `ib_core`'s locks on the GID table are held.
    fn changed(&self);
}

#[repr(C)]
struct Handler<W: Watcher> {
    raw: Opaque<bindings::ib_event_handler>,
    device: DeviceGuard,
    watcher: Arc<W>,
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
    /// Lets `watcher` be told of changes. May sleep.
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
        Ok(Self { handler })
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
    namespaces: UnsafeCell<bindings::pernet_operations>,
    /// Which part of each namespace's memory is ours.
    namespace_id: UnsafeCell<c_uint>,
}

// SAFETY: `NetworkRegistration` is the only one to change the fields, and `registered` lets only one
// of it exist; afterwards they are the kernel's, which locks for itself.
unsafe impl Sync for Notifiers {}

static NOTIFIERS: Notifiers = Notifiers {
    registered: Atomic::new(false),
    neighbours: UnsafeCell::new(pin_init::zeroed()),
    devices: UnsafeCell::new(pin_init::zeroed()),
    namespaces: UnsafeCell::new(pin_init::zeroed()),
    namespace_id: UnsafeCell::new(0),
};

/// Changes of the network are noticed while this lives.
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
        // They are static, and their functions live as long as the module, whose end unregisters.
        unsafe {
            (*all.neighbours.get()).notifier_call = Some(Self::told);
            (*all.devices.get()).notifier_call = Some(Self::told);
            *all.namespaces.get() = bindings::pernet_operations {
                init: Some(Self::enter_namespace),
                exit: Some(Self::leave_namespace),
                id: all.namespace_id.get(),
                size: core::mem::size_of::<bindings::notifier_block>(),
                ..Default::default()
            };
            let mut result = to_result(bindings::register_pernet_subsys(all.namespaces.get()));
            if result.is_ok() {
                // The chain takes any notifier.
                bindings::register_netevent_notifier(all.neighbours.get());
                result = to_result(bindings::register_netdevice_notifier(all.devices.get()));
                if result.is_err() {
                    bindings::unregister_netevent_notifier(all.neighbours.get());
                    bindings::unregister_pernet_subsys(all.namespaces.get());
                }
            }
            if let Err(e) = result {
                all.registered.store(false, ordering::Release);
                return Err(e);
            }
        }
        Ok(Self(()))
    }

    /// # Safety
    ///
    /// May be called by anybody; the arguments are not looked at.
    unsafe extern "C" fn told(
        _notifier: *mut bindings::notifier_block,
        _event: c_ulong,
        _what: *mut c_void,
    ) -> c_int {
        network_changed();
        // CAST: `NOTIFY_DONE` is zero.
        bindings::NOTIFY_DONE as c_int
    }

    /// The notifier of a namespace's routes.
    ///
    /// # Safety
    ///
    /// `net` must be a namespace in which the pernet operations are registered.
    unsafe fn routes(net: *mut bindings::net) -> *mut bindings::notifier_block {
        // SAFETY: By the caller; the id was set before the first namespace was entered.
        unsafe { bindings::umad_net_generic(net, *NOTIFIERS.namespace_id.get()) }.cast()
    }

    /// # Safety
    ///
    /// Called by the kernel with a namespace that is there or comes.
    unsafe extern "C" fn enter_namespace(net: *mut bindings::net) -> c_int {
        // SAFETY: The memory is the namespace's part for us, of the size that was asked for, zeroed;
        // it lives until after `leave_namespace`.
        let result = unsafe {
            let routes = Self::routes(net);
            (*routes).notifier_call = Some(Self::told);
            to_result(bindings::register_fib_notifier(
                net,
                routes,
                None,
                null_mut(),
            ))
        };
        if result.is_err() {
            // A namespace must not fail to come because of this: nothing is kept as long as it is
            // there.
            UNWATCHED.fetch_add(1u64, ordering::Full);
            // SAFETY: As above; nobody else knows the memory.
            unsafe { (*Self::routes(net)).notifier_call = None };
        }
        0
    }

    /// # Safety
    ///
    /// Called by the kernel with a namespace that was entered and goes, or with any of them when the
    /// operations are unregistered.
    unsafe extern "C" fn leave_namespace(net: *mut bindings::net) {
        // SAFETY: `enter_namespace` filled in the memory, and set the function if it is registered.
        unsafe {
            let routes = Self::routes(net);
            if (*routes).notifier_call.is_some() {
                // The only error is that it is not registered.
                let _ = bindings::unregister_fib_notifier(net, routes);
            } else {
                UNWATCHED.fetch_sub_one();
            }
        }
    }
}

/// Counting down, which [`Atomic`] has no word for.
trait FetchSubOne {
    fn fetch_sub_one(&self);
}

impl FetchSubOne for Atomic<u64> {
    fn fetch_sub_one(&self) {
        self.fetch_add(u64::MAX, ordering::Full);
    }
}

impl Drop for NetworkRegistration {
    fn drop(&mut self) {
        let all = &NOTIFIERS;
        // SAFETY: `new` registered all three. When a call returns, nobody is in its function any more.
        unsafe {
            let _ = bindings::unregister_netdevice_notifier(all.devices.get());
            let _ = bindings::unregister_netevent_notifier(all.neighbours.get());
            bindings::unregister_pernet_subsys(all.namespaces.get());
        }
        all.registered.store(false, ordering::Release);
    }
}
