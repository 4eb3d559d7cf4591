// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Coverage of work that the kernel's own threads do on behalf of a program. Where the kernel has no KCOV,
//! all of this is nothing.
//!
//! C header: `include/linux/kcov.h`
//!
//! A program that asks KCOV for the coverage of others' work has a handle; what it opens remembers the
//! handle, and work that comes of that is a section of its coverage. Work that happens to be done by a
//! program is a part of that program's own coverage, if it wants that, and no section.

#[cfg(CONFIG_KCOV)]
use crate::bindings;
use kernel::types::NotThreadSafe;

/// On whose behalf work is done.
#[derive(Clone, Copy)]
pub(crate) struct OnBehalfOf {
    #[cfg(CONFIG_KCOV)]
    handle: u32,
}

impl OnBehalfOf {
    /// The calling program.
    pub(crate) fn current() -> Self {
        Self {
            #[cfg(CONFIG_KCOV)]
            // SAFETY: Only reads a field of the calling task.
            handle: unsafe { bindings::umad_kcov_handle() },
        }
    }

    /// Begins a section of work.
    pub(crate) fn begin(self) -> Section {
        Section {
            #[cfg(CONFIG_KCOV)]
            // SAFETY: May be called anywhere in a task. Sections do not overlap: handlers and work items,
            // which have one each, do not call each other.
            is_begun: unsafe { bindings::umad_kcov_begin(self.handle) },
            _not_thread_safe: NotThreadSafe,
        }
    }
}

/// A section of work; it ends with the value, in the same thread.
#[must_use = "the section ends at once"]
pub(crate) struct Section {
    #[cfg(CONFIG_KCOV)]
    is_begun: bool,
    _not_thread_safe: NotThreadSafe,
}

#[cfg(CONFIG_KCOV)]
impl Drop for Section {
    fn drop(&mut self) {
        if self.is_begun {
            // SAFETY: This thread began it.
            unsafe { bindings::umad_kcov_end() };
        }
    }
}
