// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What sysfs tells about umad devices and the ports behind them.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Error, Gid, Result};

/// Folder of the class.
pub const CLASS: &str = "/sys/class/infiniband_mad";

/// Folder of the RDMA devices.
pub const DEVICES: &str = "/sys/class/infiniband";

/// A umad device: the port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UmadPort {
    /// N of `/dev/infiniband/umadN`.
    pub number: u32,
    /// The RDMA device.
    pub ibdev: String,
    /// Its port.
    pub port: u32,
}

fn bad(path: &Path, why: impl ToString) -> Error {
    Error::Sysfs {
        path: path.to_owned(),
        why: why.to_string(),
    }
}

fn text(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|e| bad(path, e))?;
    // Names can have a newline at their end, too.
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn value<T: FromStr>(path: &Path) -> Result<T> {
    let text = text(path)?;
    text.parse()
        .map_err(|_| bad(path, format!("unexpected {text:?}")))
}

/// Version of the ABI.
pub fn abi_version() -> Result<u32> {
    value(&Path::new(CLASS).join("abi_version"))
}

/// Name of the RDMA device behind umad device `number`.
pub fn ibdev(number: u32) -> Result<String> {
    text(&Path::new(CLASS).join(format!("umad{number}/ibdev")))
}

/// Port of the RDMA device behind umad device `number`.
pub fn port(number: u32) -> Result<u32> {
    value(&Path::new(CLASS).join(format!("umad{number}/port")))
}

/// All umad devices, by number. A device that goes away meanwhile is left out.
pub fn ports() -> Result<Vec<UmadPort>> {
    let class = Path::new(CLASS);
    let mut found = Vec::new();
    for entry in fs::read_dir(class).map_err(|e| bad(class, e))? {
        let name = entry.map_err(|e| bad(class, e))?.file_name();
        let Some(number) = name.to_str().and_then(number_of) else {
            continue;
        };
        if let (Ok(ibdev), Ok(port)) = (ibdev(number), port(number)) {
            found.push(UmadPort {
                number,
                ibdev,
                port,
            });
        }
    }
    found.sort_by_key(|port| port.number);
    Ok(found)
}

/// The umad device of a port, if it is there.
pub fn find(ibdev: &str, port: u32) -> Result<Option<UmadPort>> {
    Ok(ports()?
        .into_iter()
        .find(|found| found.ibdev == ibdev && found.port == port))
}

/// The GID at `index` of a port's table.
pub fn gid(ibdev: &str, port: u32, index: u32) -> Result<Gid> {
    value(&port_dir(ibdev, port).join(format!("gids/{index}")))
}

/// The P_Key at `index` of a port's table.
pub fn pkey(ibdev: &str, port: u32, index: u32) -> Result<u16> {
    let path = port_dir(ibdev, port).join(format!("pkeys/{index}"));
    let text = text(&path)?;
    u16::from_str_radix(text.trim_start_matches("0x"), 16)
        .map_err(|_| bad(&path, format!("unexpected {text:?}")))
}

/// State of a port, as `4: ACTIVE`.
pub fn state(ibdev: &str, port: u32) -> Result<String> {
    text(&port_dir(ibdev, port).join("state"))
}

/// Folder of a port.
pub fn port_dir(ibdev: &str, port: u32) -> PathBuf {
    Path::new(DEVICES).join(ibdev).join(format!("ports/{port}"))
}

// N of "umadN"; names that the kernel would not write (umad007, umad+1) are not numbers.
pub(crate) fn number_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("umad")?;
    let number: u32 = digits.parse().ok()?;
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_umad_names_have_numbers() {
        assert_eq!(number_of("umad0"), Some(0));
        assert_eq!(number_of("umad191"), Some(191));
        for name in ["issm0", "umad", "umad01", "umad+1", "abi_version", "umad-1"] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }
}
