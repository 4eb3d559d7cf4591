// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A function that is called later, in process context.
//!
//! C header: `include/linux/workqueue.h`, `struct delayed_work`
//!
//! Unlike `kernel::workqueue::DelayedWork`, an [`Alarm`] that is set can be set to an earlier time, and
//! [`Alarm::stop`] waits for the function, so that a module may go afterwards.

use crate::bindings;
use core::marker::PhantomPinned;
use kernel::{
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

/// What an alarm calls.
pub(crate) trait Ring: Send + Sync + 'static {
    /// Does what is due. Returns when to be called again, in ms, if ever. Does not sleep.
    fn ring(&self) -> Option<u32>;
}

/// Calls [`Ring::ring`] of its target when its time has come.
#[pin_data(PinnedDrop)]
pub(crate) struct Alarm<T: Ring> {
    #[pin]
    work: Opaque<bindings::delayed_work>,
    target: Arc<T>,
    stopped: Atomic<bool>,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: A work may be used by any thread, and the target is `Send + Sync`.
unsafe impl<T: Ring> Send for Alarm<T> {}
// SAFETY: As above.
unsafe impl<T: Ring> Sync for Alarm<T> {}

impl<T: Ring> Alarm<T> {
    /// An alarm that is not set.
    pub(crate) fn new(target: Arc<T>) -> impl PinInit<Self> {
        pin_init!(Self {
            work <- Opaque::ffi_init(|slot: *mut bindings::delayed_work| {
                // SAFETY: `slot` is valid for writes, and pinned.
                unsafe { bindings::vhca_init_delayed_work(slot, Some(Self::callback)) }
            }),
            target,
            stopped: Atomic::new(false),
            _pin: PhantomPinned,
        })
    }

    /// Sets the alarm to `ms` from now, whatever it was set to before. May be called in any context;
    /// does nothing after [`Alarm::stop`].
    pub(crate) fn set(&self, ms: u32) {
        if !self.stopped.load(ordering::Acquire) {
            // SAFETY: The work is initialised; `stop` waits for it before the memory goes.
            unsafe { bindings::vhca_schedule_work(self.work.get(), ms) };
        }
    }

    /// Stops the alarm for good. When this returns, the function does not run and will not. Sleeps.
    ///
    /// No other thread may be calling [`Alarm::set`].
    pub(crate) fn stop(&self) {
        self.stopped.store(true, ordering::Release);
        // SAFETY: The work is initialised. A callback that sets itself again finds `stopped`, or is
        // cancelled.
        unsafe { bindings::cancel_delayed_work_sync(self.work.get()) };
    }

    /// # Safety
    ///
    /// Called by the work queue with the work of an alarm.
    unsafe extern "C" fn callback(work: *mut bindings::work_struct) {
        // SAFETY: The work is the first field of a `delayed_work`, which is that of an alarm, which
        // does not go before `stop` has waited for this.
        let alarm = unsafe {
            let work = kernel::container_of!(work, bindings::delayed_work, work);
            &*kernel::container_of!(Opaque::cast_from(work.cast_const()), Self, work)
        };
        // As an interrupt of the hardware would: what a completion handler leaves to a softirq is done
        // when this ends.
        // SAFETY: The two calls are a pair, and nothing between them sleeps, see `Ring::ring`.
        let next = unsafe {
            bindings::vhca_bh_disable();
            let next = alarm.target.ring();
            bindings::vhca_bh_enable();
            next
        };
        if let Some(ms) = next {
            alarm.set(ms);
        }
    }
}

#[pinned_drop]
impl<T: Ring> PinnedDrop for Alarm<T> {
    fn drop(self: Pin<&mut Self>) {
        // Who has stopped it may drop it in a context that cannot sleep.
        if !self.stopped.load(ordering::Acquire) {
            self.stop();
        }
    }
}
