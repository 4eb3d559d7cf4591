// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Who has files of `ib_umad` open: a walk through `/proc`.
//!
//! What a umad file is, the kernel says of the file itself, in its fdinfo. Files of the C module, and issm
//! files, say nothing; they are known by the device numbers that `ib_umad` has in `/proc/devices`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::sys::stat::{major, minor};
use umad::FileInfo;

use crate::failure::{Context, Outcome};
use crate::output::lossy;
use crate::ports;

/// What kind of file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// umad: MADs.
    Umad,
    /// issm: the mark of a subnet manager.
    Issm,
}

impl Kind {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Umad => "umad",
            Self::Issm => "issm",
        }
    }
}

/// A descriptor of a process.
#[derive(Clone, Debug)]
pub struct Holder {
    /// The process.
    pub pid: u32,
    /// Its name; the process chooses it.
    pub process: String,
    /// Its user.
    pub uid: u32,
    /// The descriptor.
    pub fd: u32,
    /// The path that was opened, as the kernel tells it.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// What the kernel says of it; `None` if it says nothing, an error if that cannot be understood.
    pub info: Option<Result<FileInfo, String>>,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The files, by process and descriptor.
    pub holders: Vec<Holder>,
    /// Processes that may not be looked into.
    pub hidden: usize,
}

/// Looks at all processes.
pub fn look() -> Outcome<Seen> {
    let majors = majors(&fs::read_to_string("/proc/devices").unwrap_or_default());
    let mut seen = Seen::default();
    for (pid, folder) in numbered(Path::new("/proc")).what("/proc")? {
        match look_into(pid, &folder, &majors, &mut seen.holders) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => seen.hidden += 1,
            // It has just ended.
            _ => (),
        }
    }
    seen.holders.sort_by_key(|holder| (holder.pid, holder.fd));
    Ok(seen)
}

/// What in a folder is named by a number.
fn numbered(folder: &Path) -> io::Result<impl Iterator<Item = (u32, PathBuf)>> {
    let entries = fs::read_dir(folder)?.flatten();
    Ok(entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, entry.path()))
    }))
}

fn look_into(pid: u32, folder: &Path, majors: &[u64], found: &mut Vec<Holder>) -> io::Result<()> {
    for (fd, descriptor) in numbered(&folder.join("fd"))? {
        let Ok(link) = fs::read_link(&descriptor) else {
            continue;
        };
        // Sockets, pipes and their like have no path.
        if !link.is_absolute() {
            continue;
        }
        let Ok(text) = fs::read(folder.join(format!("fdinfo/{fd}"))) else {
            continue;
        };
        let text = lossy(&text);
        if is_path_only(&text) {
            continue;
        }
        let (kind, info) = match FileInfo::parse(&text) {
            Ok(Some(info)) => (Kind::Umad, Some(Ok(info))),
            Err(e) => (Kind::Umad, Some(Err(e.to_string()))),
            Ok(None) => match kind_by_number(&descriptor, &link, majors) {
                Some(kind) => (kind, None),
                None => continue,
            },
        };
        found.push(Holder {
            pid,
            process: ports::process(pid).unwrap_or_default(),
            uid: fs::metadata(folder).map_or(u32::MAX, |meta| meta.uid()),
            fd,
            path: link.to_string_lossy().into_owned(),
            kind,
            info,
        });
    }
    Ok(())
}

/// By device number. Only what is in a folder of devices is looked at: a stat() of a file that lies on a
/// server might wait for it.
fn kind_by_number(descriptor: &Path, link: &Path, majors: &[u64]) -> Option<Kind> {
    let name = link.file_name()?.to_str()?;
    let named_so = name.starts_with("umad") || name.starts_with("issm");
    if !named_so && !link.starts_with("/dev") {
        return None;
    }
    let meta = fs::metadata(descriptor).ok()?;
    let (major, minor) = (major(meta.rdev()), minor(meta.rdev()));
    if !meta.file_type().is_char_device() || !majors.contains(&major) {
        return None;
    }
    // The fixed numbers; of others the kernel says what they are while their port is there.
    let umad = match major {
        231 => minor < 64,
        _ => fs::read_link(format!("/sys/dev/char/{major}:{minor}"))
            .ok()
            .and_then(|to| Some(to.file_name()?.to_str()?.starts_with("umad")))
            .unwrap_or_else(|| name.starts_with("umad")),
    };
    Some(if umad { Kind::Umad } else { Kind::Issm })
}

/// The major numbers of `ib_umad` in the text of `/proc/devices`.
fn majors(text: &str) -> Vec<u64> {
    let characters = text.lines().take_while(|line| *line != "Block devices:");
    characters
        .filter_map(|line| {
            let (number, name) = line.trim_start().split_once(' ')?;
            (name == "infiniband_mad").then(|| number.parse().ok())?
        })
        .collect()
}

/// Whether a descriptor is a mere name (`O_PATH`), by the text of its fdinfo.
fn is_path_only(text: &str) -> bool {
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:\t"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal, 8).ok());
    flags.is_some_and(|flags| OFlag::from_bits_retain(flags).contains(OFlag::O_PATH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_proc_devices() {
        let text =
            "Character devices:\n  1 mem\n231 infiniband_mad\n500 infiniband_mad\n231 \n x\n\
            501 infiniband_mad2\n\nBlock devices:\n  7 infiniband_mad\n";
        assert_eq!(majors(text), [231, 500]);
        assert!(majors("").is_empty());
    }

    #[test]
    fn flags_of_fdinfo() {
        assert!(is_path_only("pos:\t0\nflags:\t012000000\n"));
        assert!(!is_path_only("pos:\t0\nflags:\t02100002\n"));
        for text in [
            "",
            "flags:\t",
            "flags:\tz",
            "flags: 012000000",
            "flags:\t99999999999999",
        ] {
            assert!(!is_path_only(text), "{text}");
        }
    }

    #[test]
    fn this_process_is_looked_into() {
        let mut found = Vec::new();
        let folder = Path::new("/proc/self");
        look_into(std::process::id(), folder, &[231], &mut found).unwrap();
        assert!(found.is_empty());
    }
}
