// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Indices that user space chooses.
//!
//! C header: `include/linux/nospec.h`

use crate::bindings;

/// Clamps a checked index so that the processor cannot speculate past the end of the array with it.
///
/// Returns `index` if it is below `size`, else 0.
pub(crate) fn array_index_nospec(index: usize, size: usize) -> usize {
    // SAFETY: The function only computes.
    unsafe { bindings::umad_array_index_nospec(index, size) }
}
