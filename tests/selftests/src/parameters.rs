// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The module with other parameters than usual. The C module has none of them, and the kernel ignores
//! those that it does not know.

use std::ffi::CStr;

use ktap::module::{is_loaded, load_with, unload_when_idle, Loaded};
use ktap::peers::SOON;
use ktap::prelude::*;
use ktap::wait_for_umad;

/// The module with other parameters, for as long as the value lives.
struct Reloaded {
    /// DROP ORDER: behind the value's own `drop`, which unloads.
    _again: Loaded,
}

impl Reloaded {
    pub fn with(parameters: &CStr) -> Outcome<Self> {
        unload_when_idle(SOON)?;
        let reloaded = Self { _again: Loaded };
        load_with(parameters).what("loading")?;
        wait_for_umad("rxe0")?;
        wait_for_umad("rxe1")?;
        Ok(reloaded)
    }
}

impl Drop for Reloaded {
    fn drop(&mut self) {
        if is_loaded() {
            let _ = unload_when_idle(SOON);
        }
    }
}

/// Runs `body` on the module with other parameters; what it opens is closed before the module goes.
pub fn with(parameters: &CStr, body: impl FnOnce() -> Outcome) -> Outcome {
    let _reloaded = Reloaded::with(parameters)?;
    body()
}
