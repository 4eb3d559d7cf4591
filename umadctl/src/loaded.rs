// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Which `ib_umad` the kernel has, and which one it would load.
//!
//! The one of umad-rs is told from the C module by the names of its functions, in `/proc/kallsyms`: rustc's
//! begin with `_R`, and a module in C has none of them, whichever kernel or vendor's package it is of.
//! Versions, paths and taints would tell less: both are built in the tree and out of it. (The parameters of
//! a Rust module do not show in sysfs.)

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

use serde::Serialize;
use umad::sysfs;

use crate::ports::text;

const FOLDER: &str = "/sys/module/ib_umad";

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// None.
    NotLoaded,
    /// The one in Rust, of umad-rs.
    Rust,
    /// The one in C, as a module.
    C,
    /// The one in C, in the kernel itself.
    CBuiltIn,
    /// One that the kernel does not say enough about.
    Unknown,
}

/// What is loaded.
#[derive(Clone, Debug, Serialize)]
pub struct Loaded {
    /// Which.
    pub kind: Kind,
    /// How this was told.
    pub evidence: String,
    /// Users that the kernel counts: two for each open file, others for tracing and for modules.
    pub users: Option<u32>,
    /// Modules that use it.
    pub used_by: Vec<String>,
    /// The file that modprobe would load, below the folder of the kernel's modules; only
    /// [`Loaded::look_closely`] asks for it.
    pub would_load: Option<String>,
}

impl Loaded {
    /// Looks.
    pub fn look() -> Self {
        let folder = Path::new(FOLDER);
        let class = Path::new(sysfs::CLASS).exists();
        let (kind, evidence) = match (fs::metadata(folder), class) {
            (Err(_), false) => (
                Kind::NotLoaded,
                format!("neither {FOLDER} nor {} is there", sysfs::CLASS),
            ),
            (Err(_), true) => (
                Kind::CBuiltIn,
                format!("{} is there, {FOLDER} is not", sysfs::CLASS),
            ),
            (Ok(meta), _) => {
                let kind = kind_by_symbols(meta.ino());
                let evidence = match kind {
                    Kind::Rust => "it has functions of rustc's in /proc/kallsyms",
                    Kind::C => "it has no function of rustc's in /proc/kallsyms",
                    _ => "it has no functions in /proc/kallsyms",
                };
                (kind, evidence.to_owned())
            }
        };
        Self {
            kind,
            evidence,
            users: text(&folder.join("refcnt")).and_then(|users| users.parse().ok()),
            used_by: entries(&folder.join("holders")),
            would_load: None,
        }
    }

    /// Looks at what modprobe would load, too.
    pub fn look_closely() -> Self {
        Self {
            would_load: would_load(),
            ..Self::look()
        }
    }

    /// What to do if it is not loaded.
    pub fn how_to_load() -> String {
        match would_load() {
            Some(_) => "As root: modprobe ib_umad".to_owned(),
            None => format!(
                "{} names no ib_umad: install it for this kernel, and run depmod; then, as root: modprobe ib_umad",
                dep_file().unwrap_or_else(|| "modules.dep".to_owned())
            ),
        }
    }

    /// A short name.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::NotLoaded => "not loaded",
            Kind::Rust => "in Rust (umad-rs)",
            Kind::C => "in C",
            Kind::CBuiltIn => "in C, built into the kernel",
            Kind::Unknown => "of a kind that the kernel does not tell",
        }
    }
}

/// By the symbols, which are many: once for a module, whose folder in sysfs says whether it is still the
/// same.
fn kind_by_symbols(folder: u64) -> Kind {
    static KNOWN: Mutex<Option<(u64, Kind)>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    if let Some((_, kind)) = known.filter(|(of, _)| *of == folder) {
        return kind;
    }
    let symbols = File::open("/proc/kallsyms").map(BufReader::new);
    let kind = symbols.and_then(in_symbols).unwrap_or(Kind::Unknown);
    *known = Some((folder, kind));
    kind
}

/// What kind the lines `ADDRESS TYPE NAME<tab>[MODULE]` of kallsyms speak of.
fn in_symbols(symbols: impl BufRead) -> io::Result<Kind> {
    let mut kind = Kind::Unknown;
    for line in symbols.split(b'\n') {
        let line = line?;
        let Some(symbol) = line.strip_suffix(b"\t[ib_umad]") else {
            continue;
        };
        let name = symbol.rsplit(|byte| *byte == b' ').next();
        if name.is_some_and(|name| name.starts_with(b"_R")) {
            return Ok(Kind::Rust);
        }
        kind = Kind::C;
    }
    Ok(kind)
}

/// The names in a folder, in order; none if there is no folder.
pub fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn dep_file() -> Option<String> {
    let release = nix::sys::utsname::uname().ok()?;
    let release = release.release().to_str()?;
    Some(format!("/lib/modules/{release}/modules.dep"))
}

fn would_load() -> Option<String> {
    in_dep(&text(Path::new(&dep_file()?))?)
}

/// The file of ib_umad in the text of a modules.dep. depmod has chosen already where there are several.
fn in_dep(text: &str) -> Option<String> {
    let files = text
        .lines()
        .filter_map(|line| Some(line.split_once(':')?.0));
    let mut wanted = files.filter(|file| {
        let name = file.rsplit('/').next().unwrap_or(file);
        // It may be compressed: ib_umad.ko.xz.
        name == "ib_umad.ko" || name.starts_with("ib_umad.ko.")
    });
    wanted.next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_tell_the_kind() {
        let kind = |text: &[u8]| in_symbols(text).unwrap();
        let c = b"0 T _RNvC6kernel4init\n0 t ib_umad_open\t[ib_umad]\n0 t _RNvC4x\t[ib_umad2]\n";
        assert_eq!(kind(c), Kind::C);
        let rust = b"0 t umad_mkdev\t[ib_umad]\n0 t _RNvMC7ib_umad4open\t[ib_umad]\n";
        assert_eq!(kind(rust), Kind::Rust);
        assert_eq!(
            kind(b"0 T _RNvC6kernel4init\n\xff\xff\n\t[ib_umad2]\n"),
            Kind::Unknown
        );
        assert_eq!(kind(b""), Kind::Unknown);
        assert_eq!(kind(b"\t[ib_umad]"), Kind::C);
    }

    #[test]
    fn the_file_in_modules_dep() {
        let text = "kernel/a/not_ib_umad.ko: kernel/b.ko\n\
            kernel/c.ko.xz: updates/ib_umad.ko\n\
            updates/dkms/ib_umad.ko.xz: kernel/ib_core.ko\n";
        assert_eq!(in_dep(text).as_deref(), Some("updates/dkms/ib_umad.ko.xz"));
        assert_eq!(in_dep("ib_umad.ko\n"), None);
        assert_eq!(in_dep(""), None);
    }
}
