// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A spinlock that may be taken in any context.
//!
//! C header: `include/linux/spinlock.h`, `spin_lock_irqsave`
//!
//! `ib_core` calls some of a driver's operations with interrupts off and a spinlock of its own held,
//! others with interrupts on, and does not say which. Guards must be dropped in the reverse order of
//! their making, as blocks do by themselves.

use crate::bindings;
use kernel::{
    ffi::{
        c_char,
        c_ulong, //
    },
    sync::lock::{
        Backend,
        Lock, //
    }, //
};

/// How the lock works.
pub(crate) struct IrqSaveBackend;

// SAFETY: The C spinlock excludes all others; `relock` is the default.
unsafe impl Backend for IrqSaveBackend {
    type State = bindings::spinlock_t;
    /// The processor's flags before the lock was taken.
    type GuardState = c_ulong;

    unsafe fn init(ptr: *mut Self::State, name: *const c_char, key: *mut bindings::lock_class_key) {
        // SAFETY: By the caller.
        unsafe { bindings::__spin_lock_init(ptr, name, key) }
    }

    unsafe fn lock(ptr: *mut Self::State) -> Self::GuardState {
        // SAFETY: By the caller the lock is initialised.
        unsafe { bindings::vhca_spin_lock_irqsave(ptr) }
    }

    unsafe fn try_lock(ptr: *mut Self::State) -> Option<Self::GuardState> {
        let mut flags = 0;
        // SAFETY: By the caller the lock is initialised; `flags` is valid.
        let locked = unsafe { bindings::vhca_spin_trylock_irqsave(ptr, &mut flags) };
        (locked != 0).then_some(flags)
    }

    unsafe fn unlock(ptr: *mut Self::State, guard_state: &Self::GuardState) {
        // SAFETY: By the caller this thread holds the lock; the flags are those of `lock`.
        unsafe { bindings::vhca_spin_unlock_irqrestore(ptr, *guard_state) }
    }

    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: By the caller the lock is initialised.
        unsafe { bindings::spin_assert_is_held(ptr) }
    }
}

/// A spinlock that turns interrupts off and leaves them as they were.
pub(crate) type IrqSpinLock<T> = Lock<T, IrqSaveBackend>;

/// Makes an [`IrqSpinLock`] with a lock class of its own.
macro_rules! new_irq_spinlock {
    ($inner:expr, $name:literal) => {
        $crate::verbs::lock::IrqSpinLock::new(
            $inner,
            ::kernel::c_str!($name),
            ::kernel::static_lock_class!(),
        )
    };
}
pub(crate) use new_irq_spinlock;
