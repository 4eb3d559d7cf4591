// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Coverage, as the kernel's KCOV tells it: which basic blocks of the module a thread went through, or the
//! module's handlers in the kernel's work queues on its behalf.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{mmap, munmap, MapFlags, ProtFlags};

const DEVICE: &str = "/sys/kernel/debug/kcov";
const TRACE_PC: u64 = 0;

mod ioctl {
    use super::Remote;

    nix::ioctl_write_int_bad!(init, nix::request_code_read!(b'c', 1, 8));
    nix::ioctl_write_int_bad!(enable, nix::request_code_none!(b'c', 100));
    nix::ioctl_write_ptr!(remote_enable, b'c', 102, Remote);
}

#[repr(C)]
struct Remote {
    trace_mode: u32,
    area_size: u32,
    num_handles: u32,
    padding: u32,
    common_handle: u64,
}

/// Sections of code of a module.
pub const SECTIONS: [&str; 4] = [".text", ".init.text", ".exit.text", ".text.unlikely"];

/// A place in the module's code, behind a call of the coverage hook: a basic block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Which of [`SECTIONS`].
    pub section: u8,
    /// Bytes from its begin.
    pub offset: u32,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:x}", self.section, self.offset)
    }
}

impl FromStr for Block {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (section, offset) = text.split_once(':')?;
            Some(Self {
                section: section.parse().ok()?,
                offset: u32::from_str_radix(offset, 16).ok()?,
            })
        };
        parse().ok_or_else(|| format!("{text}: not a block"))
    }
}

/// Where a section of ib_umad lies.
pub fn section_address(name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/module/ib_umad/sections/{name}")).ok()?;
    u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Where the module's code lies.
#[derive(Clone)]
pub struct Code([Option<u64>; SECTIONS.len()]);

impl Code {
    /// Of the module that is loaded.
    pub fn now() -> Self {
        Self(SECTIONS.map(section_address))
    }

    /// What an address is in it: of the section that begins next before it.
    pub fn block(&self, address: u64) -> Option<Block> {
        let (offset, section) = (0..)
            .zip(self.0)
            .filter_map(|(n, begin)| Some((address.checked_sub(begin?)?, n)))
            .min()?;
        // No module has that much code.
        let offset = u32::try_from(offset)
            .ok()
            .filter(|offset| *offset < 16 << 20)?;
        Some(Block { section, offset })
    }
}

/// What is traced.
#[derive(Clone, Copy)]
pub enum Of {
    /// The calling thread.
    Thread,
    /// The work that is done for all threads made by the calling one from now on.
    Others,
}

/// A trace.
pub struct Trace {
    _file: File,
    area: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the area is shared memory of atomics.
unsafe impl Send for Trace {}

impl Trace {
    /// Begins to trace, until the thread ends; `None` if the kernel has no KCOV.
    pub fn begin(of: Of) -> nix::Result<Option<Self>> {
        let Ok(file) = File::options().read(true).write(true).open(DEVICE) else {
            return Ok(None);
        };
        let words: usize = 64 << 10;
        let raw = file.as_raw_fd();
        // SAFETY: the argument is a number of words.
        unsafe { ioctl::init(raw, i32::try_from(words).unwrap_or(i32::MAX)) }?;
        let bytes = NonZeroUsize::MIN.saturating_add(words * size_of::<u64>() - 1);
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let area = unsafe { mmap(None, bytes, both, MapFlags::MAP_SHARED, file.as_fd(), 0) }?;
        match of {
            // SAFETY: the argument is a mode.
            Of::Thread => unsafe { ioctl::enable(raw, i32::try_from(TRACE_PC).unwrap_or(0)) }?,
            Of::Others => {
                let remote = Remote {
                    trace_mode: 0,
                    area_size: 16 << 10,
                    num_handles: 0,
                    padding: 0,
                    common_handle: u64::from(std::process::id()),
                };
                // SAFETY: the argument is the structure that the call reads.
                unsafe { ioctl::remote_enable(raw, &remote) }?
            }
        };
        Ok(Some(Self {
            _file: file,
            area: area.cast(),
            words,
        }))
    }

    fn word(&self, n: usize) -> &AtomicU64 {
        assert!(n < self.words);
        // SAFETY: the mapping has so many words, and lives as long as the value.
        unsafe { self.area.add(n).as_ref() }
    }

    /// Hands out what was traced, and begins anew.
    pub fn take(&self, mut each: impl FnMut(u64)) {
        let len = usize::try_from(self.word(0).load(Ordering::Acquire)).unwrap_or(0);
        for n in 1..=len.min(self.words - 1) {
            each(self.word(n).load(Ordering::Relaxed));
        }
        self.word(0).store(0, Ordering::Release);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: the mapping is that of `begin`, and no reference into it is left.
        let _ = unsafe { munmap(self.area.cast(), self.words * size_of::<u64>()) };
    }
}

/// Blocks.
pub type Blocks = BTreeSet<Block>;

/// Runs something, and says which blocks the calling thread went through.
pub fn of<T>(body: impl FnOnce() -> T + Send) -> (T, Vec<u64>)
where
    T: Send,
{
    // A thread has one trace in its life.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let trace = Trace::begin(Of::Thread).ok().flatten();
            let value = body();
            let mut addresses = Vec::new();
            if let Some(trace) = trace {
                trace.take(|address| addresses.push(address));
            }
            (value, addresses)
        });
        match thread.join() {
            Ok(both) => both,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_block_of_its_section() {
        let code = Code([Some(0x1000), Some(0x9000), None, None]);
        let block = code.block(0x1234).expect("a block");
        assert_eq!(
            block,
            Block {
                section: 0,
                offset: 0x234
            }
        );
        assert_eq!(code.block(0x9001).map(|block| block.section), Some(1));
        assert_eq!(code.block(0xfff), None);
        assert_eq!(block.to_string().parse(), Ok(block));
    }
}
