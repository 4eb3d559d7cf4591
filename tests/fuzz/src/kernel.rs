// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What the kernel reports: lines of its log that tell of a fault. The judgement that counts is that of
//! tests/guest/dmesg-faults, on the whole log; this one finds the program.

use ktap::kmsg::Mark;
use ktap::Outcome;

const WORDS: &[&str] = &[
    "WARNING",
    "BUG",
    "Oops",
    "KASAN",
    "KFENCE",
    "UBSAN",
    "lockdep",
    "refcount_t",
    "general protection",
    "kernel panic",
    "blocked for more than",
    "soft lockup",
    "circular locking",
    "recursive locking",
    "scheduling while atomic",
    "sleeping function called",
    "list_add corruption",
    "list_del corruption",
    "rust_kernel: panicked",
    "suspicious RCU usage",
    "inconsistent lock state",
    "detected stalls",
    "unregister_netdevice: waiting",
];
/// Soft-RoCE warns when ib_mad gives a buffer back to a queue pair that goes.
const KNOWN: &str = "rxe_post_recv";

/// The kernel's log, from now on.
pub struct Log(Mark);

impl Log {
    /// The log's end.
    pub fn now() -> Outcome<Self> {
        Ok(Self(Mark::now()?))
    }

    /// If a fault was reported since the last call: all that was logged.
    pub fn fault(&mut self) -> Outcome<Option<Vec<String>>> {
        let lines = self.0.lines()?;
        Ok(lines.iter().any(|line| is_fault(line)).then_some(lines))
    }
}

fn is_fault(line: &str) -> bool {
    WORDS.iter().any(|word| line.contains(word)) && !line.contains(KNOWN)
}

#[cfg(test)]
mod tests {
    use super::is_fault;

    #[test]
    fn faults_are_told_from_news() {
        assert!(is_fault(
            "BUG: KASAN: slab-use-after-free in f+0x1/0x2 [ib_umad]"
        ));
        assert!(is_fault(
            "WARNING: possible circular locking dependency detected"
        ));
        assert!(!is_fault("ib_umad: umad0 closed"));
        assert!(!is_fault(
            "WARNING: drivers/infiniband/sw/rxe/rxe_verbs.c:1 at rxe_post_recv+0x1/0x2"
        ));
    }
}
