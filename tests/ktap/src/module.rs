// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Loading and unloading ib_umad.

use std::ffi::CStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::kmod::{delete_module, finit_module, DeleteModuleFlags, ModuleInitFlags};

use crate::{wait_for_umad, wait_until, Impl, Outcome};

const NAME: &CStr = c"ib_umad";

/// The file of the module under test.
pub fn file() -> Outcome<PathBuf> {
    file_of(Impl::current()?)
}

/// The file of one of the modules.
pub fn file_of(module: Impl) -> Outcome<PathBuf> {
    let variable = match module {
        Impl::C => "UMAD_KO_C",
        Impl::Rust => "UMAD_KO_RUST",
    };
    match std::env::var_os(variable) {
        Some(path) => Ok(path.into()),
        None => Err(format!("{variable} is not set").into()),
    }
}

/// True while ib_umad is in the kernel.
pub fn is_loaded() -> bool {
    Path::new("/sys/module/ib_umad").exists()
}

/// Loads the module under test.
pub fn load() -> Result<(), Errno> {
    load_with(c"")
}

/// Loads the module under test with parameters (`name=value name=value`).
pub fn load_with(parameters: &CStr) -> Result<(), Errno> {
    load_file(&file().map_err(|_| Errno::ENOENT)?, parameters)
}

/// Loads a module of a file.
pub fn load_file(path: &Path, parameters: &CStr) -> Result<(), Errno> {
    let file =
        File::open(path).map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
    finit_module(&file, parameters, ModuleInitFlags::empty())
}

/// Unloads ib_umad; fails at once with `EWOULDBLOCK` while it is in use.
pub fn unload() -> Result<(), Errno> {
    delete_module(NAME, DeleteModuleFlags::O_NONBLOCK)
}

/// Unloads ib_umad as soon as nobody uses it, within a bound.
///
/// Something like udev may look at a node at any moment, so one refusal means nothing.
pub fn unload_when_idle(limit: Duration) -> Outcome {
    let mut last = Ok(());
    wait_until("ib_umad is unloaded", limit, || {
        last = unload();
        !matches!(last, Err(Errno::EWOULDBLOCK))
    })?;
    Ok(last?)
}

/// Sees to it that the module is loaded, with the nodes of `rxe0` and `rxe1`, when a check ends: the next
/// ones need it.
#[derive(Debug)]
pub struct Loaded;

impl Drop for Loaded {
    fn drop(&mut self) {
        if !is_loaded() {
            let _ = load();
        }
        let _ = wait_for_umad("rxe0");
        let _ = wait_for_umad("rxe1");
    }
}
