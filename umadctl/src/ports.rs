// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The ports that `ib_umad` serves: what sysfs says of them, and how they are named on the command line.

use std::fs;
use std::path::Path;

use umad::sysfs::{self, UmadPort};

use crate::failure::{Failure, Outcome};
use crate::loaded::Loaded;
use crate::output::{lossy, shown};

/// All ports.
pub fn all() -> Outcome<Vec<UmadPort>> {
    if !Path::new(sysfs::CLASS).exists() {
        return Err(Failure::new("ib_umad is not loaded").hint(Loaded::how_to_load()));
    }
    sysfs::ports().map_err(|e| Failure::new(e.to_string()))
}

/// The port that a word on the command line means: `umad0`, its node, a device, or a device and a port.
pub fn find(word: &str) -> Outcome<UmadPort> {
    let ports = all()?;
    choose(&ports, word).map_err(|why| {
        why.hint("umadctl list shows the ports; umadctl doctor says why one is missing.")
    })
}

fn choose(ports: &[UmadPort], word: &str) -> Outcome<UmadPort> {
    let name = word.strip_prefix("/dev/infiniband/").unwrap_or(word);
    if let Some(port) = ports.iter().find(|port| node(port) == name) {
        return Ok(port.clone());
    }
    // A device's name may have anything in it: the port comes behind the last separator.
    let of_device: Vec<_> = ports.iter().filter(|port| port.ibdev == name).collect();
    match of_device[..] {
        [port] => return Ok(port.clone()),
        [] => (),
        _ => {
            return Err(Failure::new(format!(
                "{} has {} ports: say which, as in {}/1",
                shown(name),
                of_device.len(),
                shown(name)
            )))
        }
    }
    let parts = name.rsplit_once(['/', ':']);
    let found = parts.and_then(|(device, number)| {
        let number: u32 = number.parse().ok()?;
        let mut ports = ports.iter();
        ports.find(|port| port.ibdev == device && port.port == number)
    });
    match found {
        Some(port) => Ok(port.clone()),
        None => Err(Failure::new(format!(
            "there is no port {} with ib_umad",
            shown(word)
        ))),
    }
}

/// The name of a port's node.
pub fn node(port: &UmadPort) -> String {
    format!("umad{}", port.number)
}

/// The name of the node of a port that can have a subnet manager.
pub fn issm(port: &UmadPort) -> Option<String> {
    let name = format!("issm{}", port.number);
    Path::new(sysfs::CLASS).join(&name).exists().then_some(name)
}

/// The name of a process, which it chooses itself; `None` if it has ended.
pub fn process(pid: u32) -> Option<String> {
    text(&Path::new("/proc").join(pid.to_string()).join("comm"))
}

/// What a port is called in a sentence: `umad0 (mlx5_0 port 1)`.
pub fn name(port: &UmadPort) -> String {
    format!("{} ({} port {})", node(port), shown(&port.ibdev), port.port)
}

/// A file of sysfs that a port has, without its newline.
pub fn attribute(port: &UmadPort, name: &str) -> Option<String> {
    let path = sysfs::port_dir(&port.ibdev, port.port).join(name);
    text(&path)
}

/// The text of a small file, without its newline.
pub fn text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(lossy(bytes.strip_suffix(b"\n").unwrap_or(&bytes)))
}

/// A number of sysfs, decimal or hexadecimal.
pub fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The name in `4: ACTIVE`.
pub fn word(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, word)| word)
}

/// Whether MADs find the port by its LID.
pub fn is_infiniband(port: &UmadPort) -> bool {
    attribute(port, "link_layer").is_some_and(|layer| layer == "InfiniBand")
}

/// The LID of a port, if a subnet manager has given it one.
pub fn lid(port: &UmadPort) -> Option<u16> {
    let lid = number(&attribute(port, "lid")?)?;
    u16::try_from(lid)
        .ok()
        .filter(|lid| *lid != 0 && *lid != 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(number: u32, ibdev: &str, port: u32) -> UmadPort {
        UmadPort {
            number,
            ibdev: ibdev.to_owned(),
            port,
        }
    }

    #[test]
    fn words_for_ports() {
        let ports = [
            port(0, "rxe0", 1),
            port(1, "mlx5_0", 1),
            port(2, "mlx5_0", 2),
            port(7, "odd/1", 1),
        ];
        let number = |word| choose(&ports, word).map(|port| port.number);
        for (word, expected) in [
            ("umad0", 0),
            ("/dev/infiniband/umad2", 2),
            ("rxe0", 0),
            ("rxe0/1", 0),
            ("mlx5_0:2", 2),
            ("odd/1", 7),
            ("odd/1/1", 7),
        ] {
            assert_eq!(number(word), Ok(expected), "{word}");
        }
        for word in [
            "", "umad", "umad3", "umad00", "mlx5_0", "rxe0/2", "rxe0/", "/", ":1", "rxe",
        ] {
            assert!(number(word).is_err(), "{word}");
        }
        let why = choose(&ports, "a\x1b[2J").unwrap_err();
        assert!(!why.what.contains('\x1b'), "{}", why.what);
    }

    #[test]
    fn numbers_of_sysfs() {
        assert_eq!(number("0x1f"), Some(31));
        assert_eq!(number("12"), Some(12));
        assert_eq!(number("0xfffffffff"), None);
        assert_eq!(number(""), None);
        assert_eq!(word("4: ACTIVE"), "ACTIVE");
        assert_eq!(word("?"), "?");
    }
}
