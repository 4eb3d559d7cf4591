// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Memory that calls are pointed at: good, cut off, not there yet, read-only, or none at all. It lies below
//! 4 GiB, where 32-bit calls reach it.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{madvise, mmap, mmap_anonymous, munmap, MapFlags, MmapAdvise, ProtFlags};

/// Bytes of it.
pub const ROOM: usize = 128 << 10;
const PAGE: usize = 4096;
/// An address of the kernel's.
const KERNEL: u64 = 0xffff_8880_0010_0000;

/// How memory is bad; the order is that of the words of [`crate::field::Field::Mem`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// All is well.
    Good,
    /// So many bytes at the end are missing.
    Edge(usize),
    /// Its pages have to be fetched at the first touch.
    Absent,
    /// It cannot be written.
    ReadOnly,
    /// Address 0.
    Null,
    /// The kernel's own.
    Kernel,
}

impl Manner {
    /// From the values of a call.
    pub fn new(mem: u64, bad: u64) -> Self {
        match mem {
            1 => Self::Edge(usize::try_from(bad).unwrap_or(1)),
            2 => Self::Absent,
            3 => Self::ReadOnly,
            4 => Self::Null,
            5 => Self::Kernel,
            _ => Self::Good,
        }
    }
}

/// The memory of a thread.
pub struct Memory {
    file: File,
    good: NonNull<c_void>,
    read_only: NonNull<c_void>,
}

// SAFETY: it is memory of the process like any other; who has the value uses it.
unsafe impl Send for Memory {}

impl Memory {
    /// Maps it.
    pub fn new() -> nix::Result<Self> {
        let file = File::from(memfd_create(c"fuzz", MFdFlags::empty())?);
        file.set_len(ROOM as u64)
            .map_err(|_| nix::errno::Errno::ENOSPC)?;
        let all = NonZeroUsize::MIN.saturating_add(ROOM + PAGE - 1);
        let room = NonZeroUsize::MIN.saturating_add(ROOM - 1);
        // What lies behind it stays empty.
        // SAFETY: a new mapping at an address of the kernel's choice.
        let good = unsafe {
            mmap_anonymous(
                None,
                all,
                ProtFlags::PROT_NONE,
                MapFlags::MAP_PRIVATE | MapFlags::MAP_32BIT,
            )
        }?;
        let at = NonZeroUsize::new(good.as_ptr() as usize);
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: it replaces a part of the mapping just made, which nobody uses.
        unsafe {
            mmap(
                at,
                room,
                both,
                MapFlags::MAP_SHARED | MapFlags::MAP_FIXED,
                file.as_fd(),
                0,
            )
        }?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let read_only = unsafe {
            mmap(
                None,
                room,
                ProtFlags::PROT_READ,
                MapFlags::MAP_SHARED | MapFlags::MAP_32BIT,
                file.as_fd(),
                0,
            )
        }?;
        Ok(Self {
            file,
            good,
            read_only,
        })
    }

    /// Puts bytes into it, and says where the kernel is to look for them.
    pub fn put(&self, bytes: &[u8], manner: Manner) -> io::Result<u64> {
        let at = self.place(bytes.len(), manner);
        let good = self.good.as_ptr() as u64;
        let begin = at
            .checked_sub(good)
            .filter(|begin| *begin < ROOM as u64)
            .unwrap_or(0);
        let room = ROOM - usize::try_from(begin).unwrap_or(ROOM);
        self.file
            .write_all_at(&bytes[..bytes.len().min(room)], begin)?;
        self.forget(manner);
        Ok(at)
    }

    /// Where the kernel is to put so many bytes.
    pub fn room(&self, len: usize, manner: Manner) -> u64 {
        self.forget(manner);
        self.place(len, manner)
    }

    /// What is in it from its begin on, where good memory lies.
    pub fn get(&self, to: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(to, 0)
    }

    fn place(&self, len: usize, manner: Manner) -> u64 {
        match manner {
            Manner::Good | Manner::Absent => self.good.as_ptr() as u64,
            Manner::Edge(bad) => {
                let there = len.saturating_sub(bad).min(ROOM);
                self.good.as_ptr() as u64 + (ROOM - there) as u64
            }
            Manner::ReadOnly => self.read_only.as_ptr() as u64,
            Manner::Null => 0,
            Manner::Kernel => KERNEL,
        }
    }

    fn forget(&self, manner: Manner) {
        if manner == Manner::Absent {
            // SAFETY: what was written stays in the file; the pages come back with the next touch.
            let _ = unsafe { madvise(self.good, ROOM, MmapAdvise::MADV_DONTNEED) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mappings are those of `new`, and nobody has a reference into them.
        unsafe {
            let _ = munmap(self.good, ROOM + PAGE);
            let _ = munmap(self.read_only, ROOM);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_where_it_says() {
        let memory = Memory::new().expect("memory");
        for manner in [Manner::Good, Manner::Absent, Manner::ReadOnly] {
            let at = memory.put(b"abc", manner).expect("room");
            assert!(at < 1 << 32);
            // SAFETY: three bytes lie there.
            assert_eq!(unsafe { *(at as *const [u8; 3]) }, *b"abc");
        }
        let at = memory.put(b"abcd", Manner::Edge(1)).expect("room");
        assert_eq!(at % PAGE as u64, PAGE as u64 - 3);
        // SAFETY: three of the bytes lie there.
        assert_eq!(unsafe { *(at as *const [u8; 3]) }, *b"abc");
    }
}
