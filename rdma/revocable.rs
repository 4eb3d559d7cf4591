// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A value that its owner can take back, waiting until nobody uses it any more.
//!
//! `kernel::revocable` does this under RCU, so its users may not sleep; what is shared here (an RDMA
//! device, a MAD agent) is used by calls that do: registering, resolving an address, posting.
//!
//! Life cycle: an [`Owner`] shares the value as any number of [`User`]s. [`Owner::retire`] gives up
//! the owner's share and sleeps until the last user has let go and the value is dropped. The value
//! is dropped by whoever lets go last, so a user must not let go under a spinlock, nor under a lock
//! that the value's destructor wants.

use core::ops::Deref;
use kernel::{
    alloc::Flags,
    prelude::*,
    sync::{
        Arc,
        Completion, //
    }, //
};

/// Completes when it is dropped.
struct Gone(Arc<Completion>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.complete_all();
    }
}

/// DROP ORDER: fields are dropped in their order here, so `gone` speaks after `value` is dropped.
struct Shared<T> {
    value: T,
    _gone: Gone,
}

/// The one handle that can take the value back.
///
/// Dropping it without [`Owner::retire`] gives up the share and waits for nobody.
pub(crate) struct Owner<T> {
    shared: Arc<Shared<T>>,
    gone: Arc<Completion>,
}

impl<T> Owner<T> {
    /// Puts `value` under ownership.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; the value is dropped then.
    pub(crate) fn new(value: T, flags: Flags) -> Result<Self> {
        let gone = Arc::pin_init(Completion::new(), flags)?;
        let shared = Arc::new(
            Shared {
                value,
                _gone: Gone(gone.clone()),
            },
            flags,
        )?;
        Ok(Self { shared, gone })
    }

    /// Lends the value out.
    pub(crate) fn share(&self) -> User<T> {
        User(self.shared.clone())
    }

    /// Gives up the owner's share and sleeps until the value is dropped.
    ///
    /// The caller must not hold a [`User`] of the same value: it would wait for itself.
    pub(crate) fn retire(self) {
        let Self { shared, gone } = self;
        drop(shared);
        gone.wait_for_completion();
    }
}

impl<T> Deref for Owner<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.shared.value
    }
}

/// A share of a value that its [`Owner`] may be waiting to get back.
pub(crate) struct User<T>(Arc<Shared<T>>);

impl<T> Clone for User<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Deref for User<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}
