// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Memory of the program that called.
//!
//! C header: `include/linux/uaccess.h`
//!
//! Beside what the kernel crate's readers and writers do, [`UserBytes`] can be copied from without waiting for
//! a page, for those who hold something while they copy; and both are quick with few bytes, of which MADs
//! consist.

use crate::bindings;
use kernel::{
    prelude::*,
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

    /// Copies the first `N`, and waits for pages.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there are fewer, or they cannot be read.
    pub(crate) fn first<const N: usize>(&self) -> Result<[u8; N]> {
        let mut to = [0; N];
        if N > self.len {
            return Err(EFAULT);
        }
        // SAFETY: `to` is valid for so many writes; the function checks the user's address.
        let done = unsafe {
            bindings::umad_read_user(to.as_mut_ptr().cast(), self.ptr.as_const_ptr(), to.len())
        };
        done.then_some(to).ok_or(EFAULT)
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
        unsafe {
            bindings::umad_read_user_nofault(
                to.as_mut_ptr().cast(),
                self.ptr.wrapping_byte_add(offset).as_const_ptr(),
                to.len(),
            )
        }
    }
}

/// Room for bytes that a program wants from a call. It is filled from its beginning on.
pub(crate) struct UserRoom {
    ptr: UserPtr,
    len: usize,
}

impl UserRoom {
    /// Room for so many bytes from an address on, which need not be valid.
    pub(crate) fn new(ptr: UserPtr, len: usize) -> Self {
        Self { ptr, len }
    }

    /// How many bytes there is room for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends bytes, and waits for pages.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no room for them, or they cannot be written; some of them may be there then.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result {
        let left = self.len.checked_sub(bytes.len()).ok_or(EFAULT)?;
        // SAFETY: `bytes` is valid for so many reads; the function checks the user's address.
        let done = unsafe {
            bindings::umad_write_user(self.ptr.as_mut_ptr(), bytes.as_ptr().cast(), bytes.len())
        };
        if !done {
            return Err(EFAULT);
        }
        self.ptr = self.ptr.wrapping_byte_add(bytes.len());
        self.len = left;
        Ok(())
    }
}
