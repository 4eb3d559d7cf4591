// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Memory with edges: a buffer that ends exactly where a page ends that cannot be touched.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{mmap_anonymous, mprotect, munmap, MapFlags, ProtFlags};

use crate::Outcome;

/// What can be done with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prot {
    /// Nothing.
    None,
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

impl From<Prot> for ProtFlags {
    fn from(prot: Prot) -> Self {
        match prot {
            Prot::None => Self::PROT_NONE,
            Prot::Read => Self::PROT_READ,
            Prot::Write => Self::PROT_READ | Self::PROT_WRITE,
        }
    }
}

/// Pages of memory followed by one that cannot be touched.
#[derive(Debug)]
pub struct Guarded {
    start: NonNull<libc::c_void>,
    pages: usize,
}

/// Size of a page.
pub const PAGE: usize = 4096;

impl Guarded {
    /// That many zeroed pages, and the guard.
    pub fn new(pages: usize) -> Outcome<Self> {
        let Some(length) = NonZeroUsize::new((pages + 1) * PAGE) else {
            return Err("no pages".into());
        };
        // SAFETY: a new private mapping at a place that the kernel chooses.
        let start = unsafe {
            mmap_anonymous(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE,
            )
        }?;
        let memory = Self { start, pages };
        memory.protect(pages, 1, Prot::None)?;
        Ok(memory)
    }

    /// Changes what can be done with `count` pages from page `first`.
    pub fn protect(&self, first: usize, count: usize, prot: Prot) -> Outcome {
        if first + count > self.pages + 1 {
            return Err("pages outside of the mapping".into());
        }
        // SAFETY: the pages belong to this mapping, as was just checked. No reference into them
        // exists: this type gives out none.
        unsafe { mprotect(self.start.byte_add(first * PAGE), count * PAGE, prot.into()) }?;
        Ok(())
    }

    /// The address `distance` bytes before the guard.
    pub fn before_end(&self, distance: usize) -> *mut u8 {
        self.start
            .as_ptr()
            .cast::<u8>()
            .wrapping_add((self.pages * PAGE).wrapping_sub(distance))
    }

    /// The first address.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr().cast()
    }

    /// Writes bytes so that they end at the guard.
    pub fn put_at_end(&self, bytes: &[u8]) -> Outcome<*mut u8> {
        self.put(
            self.pages * PAGE - bytes.len().min(self.pages * PAGE),
            bytes,
        )
    }

    /// Writes bytes at an offset; the pages must be writable.
    pub fn put(&self, offset: usize, bytes: &[u8]) -> Outcome<*mut u8> {
        if offset + bytes.len() > self.pages * PAGE {
            return Err("bytes outside of the mapping".into());
        }
        let to = self.start().wrapping_add(offset);
        // SAFETY: the range lies in the mapping, as was just checked; the source is another object.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(to)
    }

    /// Reads bytes at an offset; the pages must be readable.
    pub fn get(&self, offset: usize, len: usize) -> Outcome<Vec<u8>> {
        if offset + len > self.pages * PAGE {
            return Err("bytes outside of the mapping".into());
        }
        let mut bytes = vec![0; len];
        // SAFETY: the range lies in the mapping, as was just checked; the target is another object.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start().wrapping_add(offset),
                bytes.as_mut_ptr(),
                len,
            )
        };
        Ok(bytes)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.start, (self.pages + 1) * PAGE) };
        // It can fail only for a range that is no mapping.
        debug_assert!(unmapped.is_ok());
    }
}
