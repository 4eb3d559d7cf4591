// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What a file of a device node can do.
//!
//! C header: `include/linux/fs.h`, `struct file_operations`
//!
//! A driver implements [`Operations`]; an operation that it leaves out is a null pointer in the C
//! table, so the kernel treats it as it treats any device without it. `read` and `write` are the
//! classic operations: `readv()` calls them once for each of its buffers.

use super::{
    node::NodeInner,
    user::{
        UserBytes,
        UserRoom, //
    },
    wait::{
        PollEvents,
        PollTable, //
    }, //
};
use crate::{
    bindings,
    compat, //
};
use core::marker::PhantomData;
use kernel::{
    device,
    error::VTABLE_DEFAULT_ERROR,
    prelude::*,
    seq_file::SeqFile,
    types::ForeignOwnable,
    uaccess::UserPtr, //
};

/// How a node's files are positioned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Positioning {
    /// A stream: no position at all, so reads and writes do not wait for each other (`stream_open`).
    Stream,
    /// Not seekable (`nonseekable_open`).
    NonSeekable,
}

/// Flags of an open file.
#[derive(Clone, Copy)]
pub(crate) struct OpenFlags(u32);

impl OpenFlags {
    /// Whether the file is to return `EAGAIN` rather than wait (`O_NONBLOCK`).
    pub(crate) fn nonblocking(self) -> bool {
        self.0 & bindings::O_NONBLOCK != 0
    }
}

/// The operations of a node's files.
#[vtable]
pub(crate) trait Operations: Sized + 'static {
    /// What the node holds.
    type Data: Send + Sync + 'static;

    /// An open file: what its descriptors share.
    type File: ForeignOwnable + Send + Sync;

    /// How files are positioned.
    const POSITIONING: Positioning;

    /// Opens a file of the node `dev`.
    fn open(data: &Self::Data, dev: &device::Device, flags: OpenFlags) -> Result<Self::File>;

    /// The last descriptor is gone.
    fn release(file: Self::File);

    /// Reads into `buf`, returns the number of bytes.
    fn read(
        _file: <Self::File as ForeignOwnable>::Borrowed<'_>,
        _flags: OpenFlags,
        _buf: UserRoom,
    ) -> Result<usize> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Writes what is in `buf`, returns the number of bytes.
    fn write(
        _file: <Self::File as ForeignOwnable>::Borrowed<'_>,
        _buf: UserBytes,
    ) -> Result<usize> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells what the file is ready for.
    fn poll(
        _file: <Self::File as ForeignOwnable>::Borrowed<'_>,
        _table: &PollTable<'_>,
    ) -> PollEvents {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Prints what `/proc/PID/fdinfo/FD` says of the file, in lines of `key:` tab `value`.
    fn show_fdinfo(_file: <Self::File as ForeignOwnable>::Borrowed<'_>, _to: &SeqFile) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// An ioctl, from 64-bit and from 32-bit programs alike: its structures must be the same for both.
    fn ioctl(
        _file: <Self::File as ForeignOwnable>::Borrowed<'_>,
        _cmd: u32,
        _arg: UserPtr,
    ) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

/// The C table of [`Operations`].
pub(super) struct FileVTable<T: Operations>(PhantomData<T>);

impl<T: Operations> FileVTable<T> {
    /// # Safety
    ///
    /// Called by the kernel for a file that is being opened; the inode's cdev is that of a node of `T`.
    unsafe extern "C" fn open(inode: *mut bindings::inode, file: *mut bindings::file) -> c_int {
        // SAFETY: `chrdev_open` holds a reference to the cdev, which is part of a node.
        let node = unsafe { NodeInner::<T>::from_cdev(bindings::umad_inode_cdev(inode)) };
        // SAFETY: The cdev holds a reference to the device, so the node lives during this call.
        let (data, dev) = unsafe { ((*node).data(), (*node).device()) };
        // SAFETY: The file is valid.
        let flags = OpenFlags(unsafe { (*file).f_flags });
        let opened = match T::open(data, dev, flags) {
            Ok(opened) => opened,
            Err(e) => return e.to_errno(),
        };
        // SAFETY: The file is being opened, its private data is ours. The two functions only set flags
        // of the file and return 0.
        unsafe {
            (*file).private_data = opened.into_foreign();
            match T::POSITIONING {
                Positioning::Stream => bindings::stream_open(inode, file),
                Positioning::NonSeekable => bindings::nonseekable_open(inode, file),
            }
        }
    }

    /// # Safety
    ///
    /// Called by the kernel, once, for a file that `open` opened.
    unsafe extern "C" fn release(_inode: *mut bindings::inode, file: *mut bindings::file) -> c_int {
        // SAFETY: `open` put the foreign pointer there, and nobody uses it after this.
        T::release(unsafe { T::File::from_foreign((*file).private_data) });
        0
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened.
    unsafe extern "C" fn read(
        file: *mut bindings::file,
        buf: *mut c_char,
        count: usize,
        _pos: *mut bindings::loff_t,
    ) -> isize {
        // SAFETY: `open` put the foreign pointer there, `release` comes later.
        let (opened, flags) = unsafe {
            (
                T::File::borrow((*file).private_data),
                OpenFlags((*file).f_flags),
            )
        };
        let buf = UserRoom::new(UserPtr::from_ptr(buf.cast()), count);
        count_or_errno(T::read(opened, flags, buf))
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened.
    unsafe extern "C" fn write(
        file: *mut bindings::file,
        buf: *const c_char,
        count: usize,
        _pos: *mut bindings::loff_t,
    ) -> isize {
        // SAFETY: As in `read`.
        let opened = unsafe { T::File::borrow((*file).private_data) };
        let buf = UserBytes::new(UserPtr::from_ptr(buf.cast_mut().cast()), count);
        count_or_errno(T::write(opened, buf))
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened.
    unsafe extern "C" fn poll(
        file: *mut bindings::file,
        table: *mut bindings::poll_table,
    ) -> bindings::__poll_t {
        // SAFETY: As in `read`; the table is valid or null during the call.
        let (opened, table) = unsafe {
            (
                T::File::borrow((*file).private_data),
                PollTable::from_raw(file, table),
            )
        };
        T::poll(opened, &table).as_raw()
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened, with a seq_file of this call's own.
    unsafe extern "C" fn show_fdinfo(to: *mut bindings::seq_file, file: *mut bindings::file) {
        // SAFETY: As in `read`; the seq_file is this call's.
        let (opened, to) =
            unsafe { (T::File::borrow((*file).private_data), SeqFile::from_raw(to)) };
        T::show_fdinfo(opened, to);
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened.
    unsafe extern "C" fn ioctl(file: *mut bindings::file, cmd: c_uint, arg: c_ulong) -> c_long {
        // SAFETY: As in `read`.
        let opened = unsafe { T::File::borrow((*file).private_data) };
        match T::ioctl(opened, cmd, UserPtr::from_addr(arg)) {
            Ok(()) => 0,
            // CAST: An errno fits.
            Err(e) => e.to_errno() as c_long,
        }
    }

    /// # Safety
    ///
    /// Called by the kernel for a file that `open` opened, for a 32-bit program.
    #[cfg(CONFIG_COMPAT)]
    unsafe extern "C" fn compat_ioctl(
        file: *mut bindings::file,
        cmd: c_uint,
        arg: c_ulong,
    ) -> c_long {
        // CAST: A 32-bit program's pointer has 32 bits.
        // SAFETY: The function only computes.
        let arg = unsafe { bindings::compat_ptr(arg as u32) };
        // SAFETY: By the caller.
        unsafe { Self::ioctl(file, cmd, arg as c_ulong) }
    }

    const VTABLE: bindings::file_operations = bindings::file_operations {
        owner: compat::this_module().as_ptr(),
        open: Some(Self::open),
        release: Some(Self::release),
        read: if T::HAS_READ { Some(Self::read) } else { None },
        write: if T::HAS_WRITE {
            Some(Self::write)
        } else {
            None
        },
        poll: if T::HAS_POLL { Some(Self::poll) } else { None },
        show_fdinfo: if T::HAS_SHOW_FDINFO {
            Some(Self::show_fdinfo)
        } else {
            None
        },
        unlocked_ioctl: if T::HAS_IOCTL {
            Some(Self::ioctl)
        } else {
            None
        },
        #[cfg(CONFIG_COMPAT)]
        compat_ioctl: if T::HAS_IOCTL {
            Some(Self::compat_ioctl)
        } else {
            None
        },
        ..pin_init::zeroed()
    };

    /// The table, which is static.
    pub(super) const fn table() -> &'static bindings::file_operations {
        &Self::VTABLE
    }
}

/// What `read` and `write` return to the kernel.
fn count_or_errno(result: Result<usize>) -> isize {
    match result {
        // The kernel limits `count` to `MAX_RW_COUNT`, so a count always fits.
        Ok(n) => isize::try_from(n).unwrap_or(isize::MAX),
        // CAST: An errno fits.
        Err(e) => e.to_errno() as isize,
    }
}

/// The name of the calling thread, as `ps` shows it.
pub(crate) struct TaskName([u8; 16]);

impl TaskName {
    /// The calling thread's name now.
    pub(crate) fn current() -> Self {
        let task = kernel::task::Task::current_raw();
        // SAFETY: `current` is valid. Another thread may change the name meanwhile, a byte at a time;
        // hence the volatile read of plain bytes. The last byte is zero at any time.
        Self(unsafe { (&raw const (*task).comm).cast::<[u8; 16]>().read_volatile() })
    }

    /// The name's bytes, without the terminating zero.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        self.0.get(..len).unwrap_or(&[])
    }
}
