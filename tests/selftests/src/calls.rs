// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! System calls that no crate offers as they are needed here.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Tries a shared mapping of a page of a file, readable and writable.
pub fn map_shared(fd: BorrowedFd<'_>) -> nix::Result<()> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            crate::uffd::PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    // SAFETY: the mapping was just made, and nobody uses it.
    unsafe { libc::munmap(address, crate::uffd::PAGE) };
    Ok(())
}

/// An ioctl with a null pointer as its argument.
pub fn ioctl_null(fd: BorrowedFd<'_>, request: u32) -> nix::Result<()> {
    // SAFETY: the kernel checks the pointer like any other; nothing lies at address 0.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, 0) };
    Errno::result(r).map(drop)
}

/// Takes a descriptor that came through a socket, by its number.
pub fn adopt(fd: RawFd) -> nix::Result<OwnedFd> {
    nix::fcntl::fcntl(
        // SAFETY: only asked whether it is open; it is not kept.
        unsafe { BorrowedFd::borrow_raw(fd) },
        nix::fcntl::FcntlArg::F_GETFD,
    )?;
    // SAFETY: it is open, and the kernel gave its number to the caller and to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `read(fd, ..., len)` on a bare number, which may be closed meanwhile by somebody else.
pub fn read_by_number(fd: RawFd, len: usize) -> nix::Result<Vec<u8>> {
    let mut buffer = vec![0; len];
    // SAFETY: the buffer holds `len` bytes and outlives the call.
    let n = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), len) };
    let n = Errno::result(n)?;
    buffer.truncate(usize::try_from(n).map_err(|_| Errno::EOVERFLOW)?);
    Ok(buffer)
}

/// `write(fd, from, len)` from any address, readable or not.
pub fn write_at(fd: BorrowedFd<'_>, from: *const u8, len: usize) -> nix::Result<usize> {
    // SAFETY: the kernel checks the memory; a write only reads it.
    let n = unsafe { libc::write(fd.as_raw_fd(), from.cast(), len) };
    let n = Errno::result(n)?;
    usize::try_from(n).map_err(|_| Errno::EOVERFLOW)
}
