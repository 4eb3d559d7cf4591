// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The end of a work item.
//!
//! C header: `include/linux/workqueue.h`
//!
//! A work item of the kernel crate holds what it works on, so that can be given up at any time. But its
//! code is the module's, which must not be unloaded while it runs: whoever asks an item to run must wait
//! for it before the module can go, that is before the last file is closed or the last device gone.

use crate::bindings;
use kernel::workqueue::Work;

/// Sleeps until a work item is neither queued nor running. Who calls this sees to it that it is not
/// queued again.
pub(crate) fn wait_for<T: ?Sized, const ID: u64>(work: &Work<T, ID>) {
    // SAFETY: The reference is valid, and a `Work` is initialised when it is made.
    unsafe { bindings::flush_work(Work::raw_get(work)) };
}
