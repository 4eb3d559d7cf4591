// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Why something could not be done, and what to do about it; exit codes.

use std::fmt;

/// Exit code: what was looked at is not as it should be. A packet was lost, say, or the doctor found
/// something.
pub const WRONG: u8 = 1;
/// Exit code: it cannot be done here. The module is not loaded, say, or a permission is missing.
pub const IMPOSSIBLE: u8 = 3;

/// An error for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
    /// The exit code.
    pub code: u8,
}

/// What may fail so.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// It cannot be done here.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            hint: None,
            code: IMPOSSIBLE,
        }
    }

    /// Something is wrong with what was looked at.
    pub fn wrong(what: impl Into<String>) -> Self {
        Self {
            code: WRONG,
            ..Self::new(what)
        }
    }

    /// With what to do about it.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self {
            hint: Some(hint.into()),
            ..self
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// Puts a place before an error.
pub trait Context<T> {
    /// Puts `what` before the error.
    fn what(self, what: impl fmt::Display) -> Outcome<T>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn what(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|e| Failure::new(format!("{what}: {e}")))
    }
}
