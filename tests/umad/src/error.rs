// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What can go wrong.

use std::fmt;
use std::path::PathBuf;

pub use nix::errno::Errno;

/// Result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The kernel said no.
    Sys {
        /// The call, as a person would name it.
        call: &'static str,
        /// Its answer.
        errno: Errno,
    },
    /// A file of sysfs could not be read or understood.
    Sysfs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file of procfs could not be read.
    Proc {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A descriptor is no open umad file.
    NotUmad,
    /// A descriptor is a umad file, but the ib_umad that is loaded says nothing of its files.
    NoFdInfo,
    /// What the kernel says of a umad file could not be understood.
    FdInfo(String),
    /// A packet is too short to hold what it should hold.
    Truncated {
        /// Bytes that are there.
        got: usize,
        /// Bytes that are needed.
        need: usize,
    },
    /// write() took only a part of the packet.
    ShortWrite {
        /// Bytes that were taken.
        wrote: usize,
        /// Bytes that were given.
        of: usize,
    },
    /// A text is not an address.
    Address,
    /// Nothing came within the time that was given.
    TimedOut,
}

impl Error {
    pub(crate) fn sys(call: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Sys { call, errno }
    }

    /// The kernel's errno, if it was the kernel that refused.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Sys { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sys { call, errno } => write!(f, "{call}: {errno}"),
            Self::Sysfs { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Proc { path, why } => write!(f, "{}: {why}", path.display()),
            Self::NotUmad => f.write_str("not an open umad file"),
            Self::NoFdInfo => f.write_str(
                "the ib_umad that is loaded says nothing of its files in /proc/PID/fdinfo (the C module does not)",
            ),
            Self::FdInfo(why) => write!(f, "fdinfo of a umad file: {why}"),
            Self::Truncated { got, need } => write!(f, "{got} bytes where {need} are needed"),
            Self::ShortWrite { wrote, of } => write!(f, "write() took {wrote} of {of} bytes"),
            Self::Address => f.write_str("not an address"),
            Self::TimedOut => f.write_str("nothing came in time"),
        }
    }
}

impl std::error::Error for Error {}
