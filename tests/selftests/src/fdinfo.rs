// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What `/proc/PID/fdinfo/FD` says of a umad file.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

use ktap::prelude::*;

/// The lines of one file that are ib_umad's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FdInfo(Vec<(String, String)>);

impl FdInfo {
    /// Asks about a descriptor of this process.
    pub fn of(fd: impl AsFd) -> Outcome<Self> {
        Self::of_process("self", fd.as_fd().as_raw_fd())
    }

    /// Asks about a descriptor of another process.
    pub fn of_process(pid: &str, fd: i32) -> Outcome<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))?;
        let lines = text.lines().filter_map(|line| line.split_once(":\t"));
        let lines = lines.filter_map(|(key, value)| {
            Some((key.strip_prefix("umad-")?.to_owned(), value.to_owned()))
        });
        Ok(Self(lines.collect()))
    }

    /// The value of a key that stands there once, without its `umad-`.
    pub fn get(&self, key: &str) -> Outcome<&str> {
        match self.all(key).as_slice() {
            [value] => Ok(value),
            values => Err(format!("{key} stands there {} times: {self:?}", values.len()).into()),
        }
    }

    /// All values of a key.
    pub fn all(&self, key: &str) -> Vec<&str> {
        let found = self.0.iter().filter(|(k, _)| k == key);
        found.map(|(_, value)| value.as_str()).collect()
    }

    /// The first number of a value.
    pub fn number(&self, key: &str) -> Outcome<u64> {
        let value = self.get(key)?;
        let word = value.split(' ').next().unwrap_or("");
        word.parse().what(format!("{key} is {value:?}"))
    }

    /// The number of bytes in `N things, M bytes`.
    pub fn bytes(&self, key: &str) -> Outcome<u64> {
        let value = self.get(key)?;
        let words: Vec<&str> = value.split(' ').collect();
        match words.as_slice() {
            [_, _, bytes, "bytes"] => bytes.parse().what(format!("{key} is {value:?}")),
            _ => Err(format!("{key} is {value:?}").into()),
        }
    }
}
