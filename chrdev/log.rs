// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! How much programs may make a module write into the kernel's log.
//!
//! C header: `include/linux/ratelimit.h`

use crate::bindings;

/// Whether one more message is allowed: ten in five seconds are. When there is room again the kernel tells
/// how many there would have been.
pub(crate) fn is_message_allowed() -> bool {
    // SAFETY: The function has no arguments, and may be called anywhere.
    unsafe { bindings::umad_may_log() }
}
