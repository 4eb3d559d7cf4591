// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! How a check ends, and the macros that end it.

use std::fmt::Display;

/// The end of a check that is not a success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It failed; this is why.
    Failed(String),
    /// It does not apply here; this is why.
    Skipped(String),
}

/// What a check returns; with another type, what a step of one returns.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Ends a check that does not apply.
pub fn skip<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Failure::Skipped(why.into()))
}

// Everything that can be shown can be a failure. (Failure itself is not Display, or this would
// collide with the identity.)
impl<E: Display> From<E> for Failure {
    fn from(e: E) -> Self {
        Self::Failed(e.to_string())
    }
}

/// Says what was being done when an error came.
pub trait ResultExt<T> {
    /// Puts `what` before the error.
    fn what(self, what: impl Display) -> Outcome<T>;
}

impl<T, E: Into<Failure>> ResultExt<T> for Result<T, E> {
    fn what(self, what: impl Display) -> Outcome<T> {
        self.map_err(|e| match e.into() {
            Failure::Failed(why) => Failure::Failed(format!("{what}: {why}")),
            skipped => skipped,
        })
    }
}

/// Fails unless a condition holds; the rest is a format string that says what is wrong.
#[macro_export]
macro_rules! ensure {
    ($cond:expr) => {
        if !$cond {
            return Err($crate::Failure::Failed(
                format!("line {}: {} does not hold", line!(), stringify!($cond)),
            ));
        }
    };
    ($cond:expr, $($arg:tt)+) => {
        if !$cond {
            return Err($crate::Failure::Failed(
                format!("line {}: {}", line!(), format_args!($($arg)+)),
            ));
        }
    };
}

/// Fails unless two values are equal; the rest, if any, says what was looked at.
#[macro_export]
macro_rules! ensure_eq {
    ($left:expr, $right:expr) => {
        $crate::ensure_eq!($left, $right, "{}", stringify!($left))
    };
    ($left:expr, $right:expr, $($arg:tt)+) => {
        // A match keeps temporaries of both expressions alive until the end.
        match (&$left, &$right) {
            (left, right) => {
                if !(*left == *right) {
                    return Err($crate::Failure::Failed(format!(
                        "line {}: {}: {:?}, expected {:?}",
                        line!(), format_args!($($arg)+), left, right,
                    )));
                }
            }
        }
    };
}

/// Fails unless a call of the `umad` or `nix` crate failed with this errno.
#[macro_export]
macro_rules! ensure_errno {
    ($call:expr, $errno:ident) => {
        $crate::ensure_errno!($call, $errno, "{}", stringify!($call))
    };
    ($call:expr, $errno:ident, $($arg:tt)+) => {
        match $call {
            Ok(value) => return Err($crate::Failure::Failed(format!(
                "line {}: {}: succeeded with {:?}, expected {}",
                line!(), format_args!($($arg)+), value, stringify!($errno),
            ))),
            Err(e) => {
                let errno: Option<nix::errno::Errno> = $crate::AsErrno::as_errno(&e);
                if errno != Some(nix::errno::Errno::$errno) {
                    return Err($crate::Failure::Failed(format!(
                        "line {}: {}: {}, expected {}",
                        line!(), format_args!($($arg)+), e, stringify!($errno),
                    )));
                }
            }
        }
    };
}

/// Errors that may carry an errno, for [`ensure_errno!`](crate::ensure_errno).
pub trait AsErrno {
    /// The errno, if there is one.
    fn as_errno(&self) -> Option<nix::errno::Errno>;
}

impl AsErrno for umad::Error {
    fn as_errno(&self) -> Option<nix::errno::Errno> {
        self.errno()
    }
}

impl AsErrno for nix::errno::Errno {
    fn as_errno(&self) -> Option<nix::errno::Errno> {
        Some(*self)
    }
}

impl AsErrno for std::io::Error {
    fn as_errno(&self) -> Option<nix::errno::Errno> {
        self.raw_os_error().map(nix::errno::Errno::from_raw)
    }
}
