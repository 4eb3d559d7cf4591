// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Memory whose pages arrive when the test says so.
//!
//! A [`Region`] is anonymous memory under userfaultfd(2): whoever touches one of its pages, the
//! kernel on behalf of a system call included, sleeps until the test delivers the page
//! ([`Region::deliver`]) or takes the memory away ([`Region::revoke`], after which the access ends
//! in EFAULT). That stops a system call at the exact byte where it touches user memory, for as long
//! as the test likes.
//!
//! The system calls on such memory are made here, by address: a Rust slice must not be made of
//! bytes that are not there yet.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

/// Bytes of one page on x86.
pub const PAGE: usize = 4096;

/// `struct uffdio_api`
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`
#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_writeprotect`
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffd_msg`, of which a page fault uses event, flags and address.
#[repr(C)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

const UFFD_API: u64 = 0xaa;
const EVENT_PAGEFAULT: u8 = 0x12;
const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const COPY_MODE_WP: u64 = 1 << 1;

/// The ioctls of a userfaultfd; nix makes them public functions.
mod ioctl {
    use super::{Api, Copy, Range, Register, WriteProtect};

    nix::ioctl_readwrite!(uffd_api, 0xaa, 0x3f, Api);
    nix::ioctl_readwrite!(uffd_register, 0xaa, 0x00, Register);
    nix::ioctl_read!(uffd_wake, 0xaa, 0x02, Range);
    nix::ioctl_readwrite!(uffd_copy, 0xaa, 0x03, Copy);
    nix::ioctl_readwrite!(uffd_writeprotect, 0xaa, 0x06, WriteProtect);
}
use ioctl::{uffd_api, uffd_copy, uffd_register, uffd_wake, uffd_writeprotect};

/// Pages that arrive on demand. Shared by the threads of a test.
pub struct Region {
    uffd: OwnedFd,
    base: NonNull<u8>,
    pages: usize,
}

// SAFETY: `base` is an address in the process's memory, mapped until the `Region` is dropped. The
// memory is touched by system calls and by ioctls on `uffd` only, never through a Rust reference.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; the kernel orders concurrent accesses to the pages.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `pages` pages, none of which is there.
    pub fn new(pages: usize) -> io::Result<Arc<Self>> {
        let len = pages * PAGE;
        // SAFETY: userfaultfd takes flags only and returns a new descriptor.
        let fd =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: `fd` was just created and nobody else owns it.
        let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut api = Api {
            api: UFFD_API,
            features: 0,
            ioctls: 0,
        };
        // SAFETY: `api` is a live `struct uffdio_api`.
        unsafe { uffd_api(uffd.as_raw_fd(), &mut api) }?;
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(io::Error::other("mmap gave address 0"));
        };
        let region = Self { uffd, base, pages };
        let mut register = Register {
            range: region.range(0, pages),
            mode: MODE_MISSING | MODE_WP,
            ioctls: 0,
        };
        // SAFETY: `register` is a live `struct uffdio_register`; its range is the mapping just made.
        unsafe { uffd_register(region.uffd.as_raw_fd(), &mut register) }?;
        Ok(Arc::new(region))
    }

    fn range(&self, page: usize, pages: usize) -> Range {
        assert!(
            page + pages <= self.pages,
            "page {page} is outside of the region"
        );
        Range {
            start: self.address(page * PAGE),
            len: (pages * PAGE) as u64,
        }
    }

    /// The address of byte `offset`, as the kernel's ioctls want it.
    fn address(&self, offset: usize) -> u64 {
        (self.base.as_ptr() as usize + offset) as u64
    }

    /// The pointer to bytes `offset..offset + len`, for a system call.
    fn pointer(&self, offset: usize, len: usize) -> *mut libc::c_void {
        assert!(
            offset + len <= self.pages * PAGE,
            "{offset}+{len} is outside of the region"
        );
        self.base.as_ptr().wrapping_add(offset).cast()
    }

    /// Delivers page `page` with `bytes` at its start and zeros behind them; whoever waits for it
    /// goes on.
    pub fn deliver(&self, page: usize, bytes: &[u8]) -> io::Result<()> {
        self.copy(page, bytes, 0)
    }

    /// Delivers page `page` write-protected: readers go on, the first write to it sleeps until
    /// [`Region::allow_write`].
    pub fn deliver_protected(&self, page: usize, bytes: &[u8]) -> io::Result<()> {
        self.copy(page, bytes, COPY_MODE_WP)
    }

    fn copy(&self, page: usize, bytes: &[u8], mode: u64) -> io::Result<()> {
        assert!(bytes.len() <= PAGE);
        let mut source = vec![0u8; PAGE];
        source[..bytes.len()].copy_from_slice(bytes);
        let range = self.range(page, 1);
        let mut copy = Copy {
            dst: range.start,
            src: source.as_ptr() as u64,
            len: range.len,
            mode,
            copied: 0,
        };
        // SAFETY: `copy` is a live `struct uffdio_copy`; `source` holds a page and outlives the call.
        unsafe { uffd_copy(self.uffd.as_raw_fd(), &mut copy) }?;
        Ok(())
    }

    /// Lifts the write protection of page `page`; whoever waits to write to it goes on.
    pub fn allow_write(&self, page: usize) -> io::Result<()> {
        let mut wp = WriteProtect {
            range: self.range(page, 1),
            mode: 0,
        };
        // SAFETY: `wp` is a live `struct uffdio_writeprotect`.
        unsafe { uffd_writeprotect(self.uffd.as_raw_fd(), &mut wp) }?;
        Ok(())
    }

    /// Takes all pages away: every access, also one that waits for a page, now ends in EFAULT.
    pub fn revoke(&self) -> io::Result<()> {
        // SAFETY: the range is this region's own mapping; no Rust reference to it exists.
        let r = unsafe {
            libc::mprotect(
                self.base.as_ptr().cast(),
                self.pages * PAGE,
                libc::PROT_NONE,
            )
        };
        if r != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut range = self.range(0, self.pages);
        // SAFETY: `range` is a live `struct uffdio_range`.
        unsafe { uffd_wake(self.uffd.as_raw_fd(), &mut range) }?;
        Ok(())
    }

    /// Waits until somebody waits for a page, and says for which; `None` when `bound` is over.
    pub fn wait_fault(&self, bound: Duration) -> io::Result<Option<usize>> {
        let timeout = PollTimeout::try_from(bound).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(self.uffd.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, timeout)? == 0 {
            return Ok(None);
        }
        let mut message = Message {
            event: 0,
            reserved: [0; 7],
            flags: 0,
            address: 0,
            thread: 0,
        };
        let size = std::mem::size_of::<Message>();
        // SAFETY: `message` is a live `struct uffd_msg` of `size` bytes, of which any value is valid.
        let n = unsafe {
            libc::read(
                self.uffd.as_raw_fd(),
                std::ptr::from_mut(&mut message).cast(),
                size,
            )
        };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        if usize::try_from(n).ok() != Some(size) || message.event != EVENT_PAGEFAULT {
            return Err(io::Error::other(format!(
                "odd userfaultfd event {:#x}",
                message.event
            )));
        }
        let offset = usize::try_from(message.address).map_err(io::Error::other)?
            - self.base.as_ptr() as usize;
        Ok(Some(offset / PAGE))
    }

    /// `write(fd, offset, len)`
    pub fn write(&self, fd: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<usize> {
        // SAFETY: the range lies within the mapping; the kernel copes with pages that are missing.
        let n = unsafe { libc::write(fd.as_raw_fd(), self.pointer(offset, len), len) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// `read(fd, offset, len)`
    pub fn read(&self, fd: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<usize> {
        // SAFETY: the range lies within the mapping, which no Rust reference points to.
        let n = unsafe { libc::read(fd.as_raw_fd(), self.pointer(offset, len), len) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// `ioctl(fd, request, offset)` with an argument of `len` bytes.
    pub fn ioctl(
        &self,
        fd: BorrowedFd<'_>,
        request: libc::c_ulong,
        offset: usize,
        len: usize,
    ) -> io::Result<()> {
        // SAFETY: the argument's `len` bytes lie within the mapping, which no Rust reference
        // points to.
        let r = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, self.pointer(offset, len)) };
        if r < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Copies `len` bytes at `offset` out. The pages must be there, or the caller sleeps.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let source = self.pointer(offset, len).cast::<u8>();
        let byte = |i: usize| {
            // SAFETY: the byte lies within the mapping, which is readable until `revoke`; it is
            // copied at once, so nobody else's write can be observed through a reference.
            unsafe { source.wrapping_add(i).read_volatile() }
        };
        (0..len).map(byte).collect()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this region's own, and every user holds the `Arc`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE) };
    }
}
