// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Numbers that nobody can guess.
//!
//! C header: `include/linux/random.h`

use crate::bindings;

/// A random number. Does not sleep.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: The array is valid for so many writes.
    unsafe { bindings::get_random_bytes(bytes.as_mut_ptr().cast(), bytes.len()) };
    u64::from_ne_bytes(bytes)
}
