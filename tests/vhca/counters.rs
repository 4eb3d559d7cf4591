// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What has happened to a device.

#![forbid(unsafe_code)]

use crate::uapi;
use kernel::sync::atomic::{
    ordering::Relaxed,
    Atomic, //
};

/// A number of events.
pub(crate) struct Counter(Atomic<u64>);

impl Counter {
    const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// One more. May be called in any context.
    pub(crate) fn count(&self) {
        self.0.add(1, Relaxed);
    }

    /// How many so far.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Makes [`Counters`] out of the fields of the user ABI's structure, so that none is forgotten.
macro_rules! counters {
    ($($field:ident),* $(,)?) => {
        /// The counters of a device; [`uapi::Counters`] says what they mean.
        pub(crate) struct Counters {
            $(pub(crate) $field: Counter,)*
        }

        impl Counters {
            /// All zero.
            pub(crate) const fn new() -> Self {
                Self { $($field: Counter::new(),)* }
            }

            /// As user space sees them.
            pub(crate) fn snapshot(&self) -> uapi::Counters {
                uapi::Counters { $($field: self.$field.get(),)* }
            }
        }
    };
}

counters!(
    sends,
    sends_refused,
    completions,
    frames_out,
    frames_in,
    delivered,
    dropped,
    duplicated,
    undeliverable,
    no_queue_pair,
    no_buffer,
    pkey_violations,
    qkey_violations,
    offered,
    answered,
    modified,
    modify_failed,
    ahs_made,
    ahs_destroyed,
);
