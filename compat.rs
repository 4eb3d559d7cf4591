// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What differs between kernel versions; no other file asks for the version. `bindings/Makefile.bindgen` sets
//! `before_7_3` for older kernels.

#![forbid(unsafe_code)]
// The virtual HCA has no parameters.
#![allow(dead_code)]

use kernel::{
    error::Error,
    module_param::ModuleParamAccess,
    ThisModule, //
};

// The kernel crate names these errors since 7.3 only; the numbers are the user ABI's.

/// Operation not supported.
pub(crate) fn eopnotsupp() -> Error {
    Error::from_errno(-95)
}

/// No buffer space available.
pub(crate) fn enobufs() -> Error {
    Error::from_errno(-105)
}

/// The module's `THIS_MODULE`.
pub(crate) const fn this_module() -> &'static ThisModule {
    #[cfg(not(before_7_3))]
    return kernel::module::this_module::<crate::LocalModule>();
    #[cfg(before_7_3)]
    return &crate::THIS_MODULE;
}

/// What a module parameter says.
pub(crate) fn parameter<T: Copy>(parameter: &ModuleParamAccess<T>) -> T {
    #[cfg(not(before_7_3))]
    return parameter.value();
    #[cfg(before_7_3)]
    return *parameter.value();
}
