// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Network namespaces, and the mode in which RDMA devices belong to them.

use std::fs::File;

use ktap::peers::SOON;
use ktap::prelude::*;
use nix::sched::CloneFlags;

use crate::task::MUST;

/// The mode in which a device belongs to one namespace. It ends with the value.
pub struct Exclusive;

impl Exclusive {
    /// Begins it, when namespaces of earlier checks, which go in the background, are gone.
    pub fn begin() -> Outcome<Self> {
        wait_until("the mode can be changed", SOON, || {
            run("rdma system set netns exclusive").is_ok()
        })?;
        Ok(Self)
    }

    /// Back to the mode that everybody else expects.
    pub fn end() -> Outcome {
        wait_until("the mode can be changed back", SOON, || {
            run("rdma system set netns shared").is_ok()
        })
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        // The check "shared again" says it if this does not succeed.
        let _ = Self::end();
    }
}

/// A named network namespace; it ends with the value.
pub struct Named(&'static str);

impl Named {
    /// Makes it.
    pub fn new(name: &'static str) -> Outcome<Self> {
        run(&format!("ip netns add {name}"))?;
        Ok(Self(name))
    }

    /// What stands for it.
    pub fn file(&self) -> Outcome<File> {
        Ok(File::open(format!("/run/netns/{}", self.0))?)
    }

    /// Runs `body` in a child process in the namespace.
    pub fn inside(&self, body: impl FnOnce() -> Outcome) -> Outcome {
        let namespace = self.file()?;
        fork(|| {
            nix::sched::setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            body()
        })?
        .wait(MUST)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = run(&format!("ip netns delete {}", self.0));
    }
}
