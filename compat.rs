// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What differs between kernel versions; no other file asks for the version.

#![forbid(unsafe_code)]

use kernel::{
    error::Error,
    ThisModule, //
};

/// Operation not supported. The kernel crate names it since 7.3 only.
// CAST: errno numbers are small positive constants.
pub(crate) const EOPNOTSUPP: Error = kernel::error::code::EOPNOTSUPP;

/// The module's `THIS_MODULE`.
pub(crate) const fn this_module() -> &'static ThisModule {
    kernel::module::this_module::<crate::LocalModule>()
}
