// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Ranges of character device numbers.
//!
//! C header: `include/linux/fs.h`, `register_chrdev_region`

use crate::bindings;
use kernel::{
    error::to_result,
    prelude::*, //
};

/// A device number.
#[derive(Clone, Copy)]
pub(crate) struct DevNumber(bindings::dev_t);

impl DevNumber {
    /// The number of a major and a minor.
    pub(crate) fn new(major: u32, minor: u32) -> Self {
        // SAFETY: The function only computes.
        Self(unsafe { bindings::umad_mkdev(major, minor) })
    }

    /// The C number.
    pub(super) fn as_raw(self) -> bindings::dev_t {
        self.0
    }
}

/// A registered range of device numbers; given back when dropped.
pub(crate) struct Region {
    first: bindings::dev_t,
    count: u32,
}

impl Region {
    /// Registers the `count` numbers from `first` on.
    ///
    /// # Errors
    ///
    /// `EBUSY` if one of them is taken, `ENOMEM`, `EINVAL`.
    pub(crate) fn register(first: DevNumber, count: u32, name: &'static CStr) -> Result<Self> {
        // SAFETY: The name is static.
        to_result(unsafe { bindings::register_chrdev_region(first.0, count, name.as_char_ptr()) })?;
        Ok(Self {
            first: first.0,
            count,
        })
    }

    /// Registers `count` numbers from minor 0 on of a major that is free.
    ///
    /// # Errors
    ///
    /// `EBUSY` if no major is free, `ENOMEM`.
    pub(crate) fn allocate(count: u32, name: &'static CStr) -> Result<Self> {
        let mut first = 0;
        // SAFETY: `first` outlives the call; the name is static.
        to_result(unsafe {
            bindings::alloc_chrdev_region(&mut first, 0, count, name.as_char_ptr())
        })?;
        Ok(Self { first, count })
    }

    /// The `index`th number of the range, if there is one.
    pub(crate) fn get(&self, index: u32) -> Option<DevNumber> {
        // OVERFLOW: The region was registered, so `first + count` is a device number.
        (index < self.count).then(|| DevNumber(self.first + index))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: The region is registered.
        unsafe { bindings::unregister_chrdev_region(self.first, self.count) };
    }
}
