// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The kernel's log since a mark.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use crate::Outcome;

/// A place in the kernel's log: what is written later can be read.
#[derive(Debug)]
pub struct Mark(File);

impl Mark {
    /// The end of the log as it is now.
    pub fn now() -> Outcome<Self> {
        let mut log = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self(log))
    }

    /// The messages since the mark, or since the last call.
    pub fn lines(&mut self) -> Outcome<Vec<String>> {
        let records = self.records()?;
        Ok(records.into_iter().map(|(_, message)| message).collect())
    }

    /// The messages since the mark, or since the last call, each with its level (4: warning, 5: notice).
    pub fn records(&mut self) -> Outcome<Vec<(u32, String)>> {
        let mut lines = Vec::new();
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => return Ok(lines),
                Ok(n) => {
                    let text = String::from_utf8_lossy(&record[..n]);
                    // "priority,sequence,time,flags;message", then lines of properties.
                    let (head, message) = text.split_once(';').unwrap_or(("", &text));
                    let priority = head.split(',').next().and_then(|p| p.parse::<u32>().ok());
                    let message = message.lines().next().unwrap_or("").to_owned();
                    // The other bits say who wrote it.
                    lines.push((priority.ok_or("no priority")? & 7, message));
                }
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => return Ok(lines),
                // EPIPE: messages were overwritten before they were read.
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) => {
                    lines.push((0, "(messages were lost)".to_owned()));
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The messages since the mark, or since the last call, that hold `part`.
    pub fn with(&mut self, part: &str) -> Outcome<Vec<String>> {
        let mut lines = self.lines()?;
        lines.retain(|line| line.contains(part));
        Ok(lines)
    }
}
