// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Bytes in the memory of the program that called.
//!
//! C header: `include/linux/uaccess.h`
//!
//! The kernel crate's readers and writers wait for a page that is not there. [`UserBytes`] can also be
//! copied from without waiting, for those who hold something while they copy.

use crate::bindings;
use kernel::{
    uaccess::{
        UserPtr,
        UserSlice,
        UserSliceReader, //
    }, //
};

/// Bytes that a program passed to a call.
#[derive(Clone, Copy)]
pub(crate) struct UserBytes {
    ptr: UserPtr,
    len: usize,
}

impl UserBytes {
    /// So many bytes from an address on, which need not be valid.
    pub(super) fn new(ptr: UserPtr, len: usize) -> Self {
        Self { ptr, len }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Without the first `count` bytes.
    pub(crate) fn skip(&self, count: usize) -> Self {
        let count = count.min(self.len);
        Self {
            ptr: self.ptr.wrapping_byte_add(count),
            len: self.len - count,
        }
    }

    /// Reads them one after the other, and waits for pages.
    pub(crate) fn reader(&self) -> UserSliceReader {
        UserSlice::new(self.ptr, self.len).reader()
    }

    /// Copies from an offset on, without waiting: returns whether all pages were there.
    pub(crate) fn copy_if_present(&self, offset: usize, to: &mut [u8]) -> bool {
        if offset
            .checked_add(to.len())
            .is_none_or(|end| end > self.len)
        {
            return false;
        }
        // SAFETY: `to` is valid for so many writes; the function checks the user's address, and fails
        // instead of waiting.
        let left = unsafe {
            bindings::umad_copy_from_user_nofault(
                to.as_mut_ptr().cast(),
                self.ptr.wrapping_byte_add(offset).as_const_ptr(),
                to.len(),
            )
        };
        left == 0
    }
}
