// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The version of the user ABI: 5, or 6 if the module parameter `abi_version` says so.
//!
//! The kernel's document on user MADs announced version 6: files have the header with the P_Key index from
//! the beginning, and ENABLE_PKEY is no more. The bytes that nobody used in that header must be zero there.
//! In what a program of the old header writes, class version and method stand in them, so that it is refused
//! and not taken for something that it did not mean.

#![forbid(unsafe_code)]

use crate::{
    compat,
    module_parameters,
    uapi::{
        Layout,
        PacketHeader,
        ABI_VERSION,
        NEXT_ABI_VERSION, //
    }, //
};
use kernel::prelude::*;

/// Checks the parameter.
///
/// # Errors
///
/// `EINVAL` if it names a version that there is not.
pub(crate) fn check() -> Result {
    match version() {
        ABI_VERSION | NEXT_ABI_VERSION => Ok(()),
        other => {
            pr_err!(
                "abi_version={} is neither {} nor {}\n",
                other,
                ABI_VERSION,
                NEXT_ABI_VERSION
            );
            Err(EINVAL)
        }
    }
}

/// The version.
pub(crate) fn version() -> u32 {
    compat::parameter(&module_parameters::abi_version)
}

/// The header layout that a file has when it is opened.
pub(crate) fn first_layout() -> Layout {
    if has_enable_pkey() {
        Layout::Old
    } else {
        Layout::PKeyIndex
    }
}

/// Whether there is an ioctl to choose the header with the P_Key index.
pub(crate) fn has_enable_pkey() -> bool {
    version() == ABI_VERSION
}

/// Whether a header may be written.
pub(crate) fn is_header_allowed(header: &PacketHeader) -> bool {
    header.reserved == [0; 6] || version() == ABI_VERSION
}
