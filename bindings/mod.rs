// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Generated bindings: the RDMA types and functions of the target kernel's own headers. Both modules
//! include this file; each finds its own functions in its own build folder.
//!
//! What is not generated here comes from `kernel::bindings`, so a `struct device` inside a
//! `struct ib_device` is the very type that the kernel crate knows. Only a crate's
//! abstractions may use this module.

#![allow(
    clippy::all,
    clippy::as_underscore,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    unused_imports
)]

pub(crate) use kernel::bindings::*;
use kernel::ffi;
use pin_init::{
    MaybeZeroable,
    Zeroable, //
};

// The names that bindgen is told to leave out.
type __kernel_size_t = usize;
type __kernel_ssize_t = isize;
type __kernel_ptrdiff_t = isize;

// SAFETY: `__BindgenBitfieldUnit` is a newtype around its storage, so it is zeroable where the
// storage is.
unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

// A name that these files define wins over the kernel crate's.
include!(concat!(env!("BINDINGS_OBJ"), "/bindings_types.rs"));
include!(concat!(env!("BINDINGS_OBJ"), "/bindings_funcs.rs"));
