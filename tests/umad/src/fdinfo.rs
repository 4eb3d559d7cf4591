// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What `/proc/PID/fdinfo/FD` says of a umad file: which port it is of, whether that port is still there,
//! and what the file does.
//!
//! The kernel speaks of the file itself. A look-up by device number would speak of whoever has the number
//! now, which may be another device than the one that the file was opened for.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::str::FromStr;

use nix::fcntl::{fcntl, FcntlArg, OFlag};
use nix::sys::stat::{fstat, major, minor, SFlag};
use nix::sys::statfs::{fstatfs, PROC_SUPER_MAGIC};

use crate::port::Layout;
use crate::{AgentId, Error, MethodMask, Qpn, Result};

/// More than the kernel ever says of one file.
const MOST: u64 = 64 << 10;

/// What a umad file is and does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The RDMA device, as the kernel prints it: what is no printable character is `\xNN`. Of a device that
    /// is gone it is the name that it had when the file was opened.
    pub device: String,
    /// Its port.
    pub port: u32,
    /// The port is still there. Once false, it is false for good: a device that has the name or the number
    /// afterwards is another one.
    pub alive: bool,
    /// The header layout now.
    pub layout: Layout,
    /// Packets that wait to be read.
    pub unread: Amount,
    /// Sends that are not done.
    pub outstanding: Amount,
    /// MADs and messages that were handed over to be sent.
    pub sent: u64,
    /// MADs and messages that were received.
    pub received: u64,
    /// Sends that got no response in time.
    pub timed_out: u64,
    /// Received ones for which there was no room.
    pub dropped: u64,
    /// The agents, by id.
    pub agents: Vec<AgentInfo>,
}

/// A number of things, and what they cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// How many.
    pub count: u64,
    /// The memory that they are charged with.
    pub bytes: u64,
}

/// An agent of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentInfo {
    /// Its id.
    pub id: AgentId,
    /// Its queue pair.
    pub qp: Qpn,
    /// Who does RMPP.
    pub rmpp: Rmpp,
    /// The requests that it wants, if it wants any.
    pub interest: Option<Interest>,
}

/// Who does RMPP for an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rmpp {
    /// Nobody.
    None,
    /// The kernel.
    Kernel,
    /// The program.
    User,
}

/// Requests that an agent wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Management class.
    pub class: u8,
    /// Its version.
    pub class_version: u8,
    /// The vendor, in vendor classes.
    pub oui: u32,
    /// The methods.
    pub methods: MethodMask,
}

impl FileInfo {
    /// Asks about a file of this process.
    ///
    /// # Errors
    ///
    /// [`Error::NotUmad`] if it is none of ib_umad's, [`Error::NoFdInfo`] if it is, but the ib_umad that is
    /// loaded says nothing of its files, as the C module does not.
    pub fn of(fd: BorrowedFd<'_>) -> Result<Self> {
        let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(Error::sys("F_GETFL"))?;
        let stat = fstat(fd).map_err(Error::sys("fstat"))?;
        // With O_PATH there is a name, but no open file behind it.
        if OFlag::from_bits_retain(flags).contains(OFlag::O_PATH)
            || SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFCHR
        {
            return Err(Error::NotUmad);
        }
        // A thread may have a table of files of its own.
        let path = format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd());
        match Self::parse(&read(Path::new(&path))?)? {
            Some(info) => Ok(info),
            None if is_umad_number(stat.st_rdev) => Err(Error::NoFdInfo),
            None => Err(Error::NotUmad),
        }
    }

    /// Reads the text of a file `/proc/PID/fdinfo/FD`; `None` if no line in it is of ib_umad. Lines that are
    /// not known are passed over.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        let lines: Vec<(&str, &str)> = text
            .lines()
            .filter_map(|line| line.strip_prefix("umad-")?.split_once(":\t"))
            .collect();
        if lines.is_empty() {
            return Ok(None);
        }
        let one = |key: &'static str| {
            let mut values = lines.iter().filter(|(k, _)| *k == key).map(|(_, v)| *v);
            match (values.next(), values.next()) {
                (Some(value), None) => Ok(value),
                (None, _) => Err(bad(format!("umad-{key} is missing"))),
                _ => Err(bad(format!("umad-{key} is there twice"))),
            }
        };
        let info = Self {
            device: one("device")?.to_owned(),
            port: number("port", one("port")?)?,
            alive: match one("state")? {
                "alive" => true,
                "gone" => false,
                other => return Err(unexpected("state", other)),
            },
            layout: match one("header")? {
                "56" => Layout::Old,
                "64" => Layout::New,
                other => return Err(unexpected("header", other)),
            },
            unread: amount("unread", one("unread")?)?,
            outstanding: amount("outstanding", one("outstanding")?)?,
            sent: number("sent", one("sent")?)?,
            received: number("received", one("received")?)?,
            timed_out: number("timed-out", one("timed-out")?)?,
            dropped: number("dropped", one("dropped")?)?,
            agents: lines
                .iter()
                .filter(|(key, _)| *key == "agent")
                .map(|(_, value)| agent(value))
                .collect::<Result<_>>()?,
        };
        if info.device.is_empty() {
            return Err(unexpected("device", ""));
        }
        Ok(Some(info))
    }
}

/// Reads a file that must be of procfs: something else could be mounted there.
fn read(path: &Path) -> Result<String> {
    let failed = |why: &dyn ToString| Error::Proc {
        path: path.to_owned(),
        why: why.to_string(),
    };
    let file = File::open(path).map_err(|e| failed(&e))?;
    let place = fstatfs(&file).map_err(|e| failed(&e))?;
    if place.filesystem_type() != PROC_SUPER_MAGIC {
        return Err(failed(&"not a file of procfs"));
    }
    let mut text = String::new();
    file.take(MOST)
        .read_to_string(&mut text)
        .map_err(|e| failed(&e))?;
    Ok(text)
}

/// Whether umad files have such a device number. This chooses between two errors, and is asked for nothing
/// else: the number may be another device's by now.
fn is_umad_number(device: nix::libc::dev_t) -> bool {
    let (major, minor) = (major(device), minor(device));
    // The numbers that ib_umad always had. Those of later ports are not fixed.
    if major == 231 {
        return minor < 64;
    }
    let link = std::fs::read_link(format!("/sys/dev/char/{major}:{minor}"));
    link.is_ok_and(|to| {
        let name = to.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| crate::sysfs::number_of(name).is_some())
    })
}

fn bad(why: String) -> Error {
    Error::FdInfo(why)
}

fn unexpected(key: &str, value: &str) -> Error {
    bad(format!("umad-{key} is {value:?}"))
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| unexpected(key, value))
}

/// `N packets, M bytes` and its like.
fn amount(key: &str, value: &str) -> Result<Amount> {
    let words: Vec<&str> = value.split(' ').collect();
    match words[..] {
        [count, _, bytes, "bytes"] => Ok(Amount {
            count: number(key, count)?,
            bytes: number(key, bytes)?,
        }),
        _ => Err(unexpected(key, value)),
    }
}

/// Pairs of a name and a value; names that are not known are passed over.
fn agent(value: &str) -> Result<AgentInfo> {
    let wrong = || unexpected("agent", value);
    let words: Vec<&str> = value.split(' ').collect();
    let get = |name: &str| {
        let mut pairs = words.chunks_exact(2);
        pairs.find(|pair| pair[0] == name).map(|pair| pair[1])
    };
    let need = |name: &str| get(name).ok_or_else(wrong);
    let hex = |digits: &str| u128::from_str_radix(digits, 16).map_err(|_| wrong());
    let interest = match get("class") {
        None => None,
        Some(class) => {
            let class = class.strip_prefix("0x").ok_or_else(wrong)?;
            Some(Interest {
                class: u8::try_from(hex(class)?).map_err(|_| wrong())?,
                class_version: need("version")?.parse().map_err(|_| wrong())?,
                oui: u32::try_from(hex(need("oui")?)?).map_err(|_| wrong())?,
                methods: MethodMask(hex(need("methods")?)?),
            })
        }
    };
    Ok(AgentInfo {
        id: AgentId(need("id")?.parse().map_err(|_| wrong())?),
        qp: Qpn(need("qp")?.parse().map_err(|_| wrong())?),
        rmpp: match need("rmpp")? {
            "none" => Rmpp::None,
            "kernel" => Rmpp::Kernel,
            "user" => Rmpp::User,
            _ => return Err(wrong()),
        },
        interest,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const TEXT: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t28\nino:\t412\n\
        umad-device:\trxe0\numad-port:\t1\numad-state:\talive\numad-header:\t64\n\
        umad-unread:\t3 packets, 2112 bytes\numad-outstanding:\t1 sends, 960 bytes\n\
        umad-sent:\t18446744073709551615\numad-received:\t9\numad-timed-out:\t2\numad-dropped:\t0\n\
        umad-weather:\tfair\n\
        umad-agent:\tid 0 qp 1 rmpp kernel\n\
        umad-agent:\tid 3 qp 0 rmpp user class 0x30 version 1 oui 001405 \
        methods 8000000000000000000000000000000a shoe 43\n";

    #[test]
    fn all_of_it_is_understood() {
        let info = FileInfo::parse(TEXT).unwrap().unwrap();
        assert_eq!((info.device.as_str(), info.port), ("rxe0", 1));
        assert!(info.alive);
        assert_eq!(info.layout, Layout::New);
        assert_eq!((info.unread.count, info.unread.bytes), (3, 2112));
        assert_eq!((info.outstanding.count, info.outstanding.bytes), (1, 960));
        assert_eq!((info.sent, info.received), (u64::MAX, 9));
        assert_eq!((info.timed_out, info.dropped), (2, 0));
        assert_eq!(info.agents.len(), 2);
        assert_eq!(info.agents[0].interest, None);
        assert_eq!(info.agents[1].rmpp, Rmpp::User);
        let interest = info.agents[1].interest.unwrap();
        assert_eq!((interest.class, interest.oui), (0x30, 0x1405));
        assert_eq!(interest.methods, MethodMask((1 << 127) | 0b1010));
    }

    #[test]
    fn other_files_are_none() {
        assert_eq!(FileInfo::parse("").unwrap(), None);
        assert_eq!(FileInfo::parse("pos:\t0\nflags:\t02\n").unwrap(), None);
        // Lines that only have the words in them.
        let text = "path:\t/x/umad-device:\trxe0\n umad-port:\t1\n";
        assert_eq!(FileInfo::parse(text).unwrap(), None);
    }

    #[test]
    fn what_is_cut_or_wrong_is_refused() {
        // Wherever the text ends within the lines that must be there.
        let last = TEXT.find("umad-weather").unwrap();
        let first = TEXT.find("umad-device:\t").unwrap() + "umad-device:\t".len();
        for end in first..last - 1 {
            let cut = FileInfo::parse(&TEXT[..end]);
            // The digits of a last number may be cut.
            assert!(cut.is_err(), "cut at {end}: {cut:?}");
        }
        for (from, to) in [
            ("umad-device:\trxe0", "umad-device:\t"),
            ("alive", "aliver"),
            ("umad-header:\t64", "umad-header:\t60"),
            ("umad-port:\t1", "umad-port:\t-1"),
            ("umad-port:\t1", "umad-port:\t1\numad-port:\t2"),
            ("3 packets, 2112 bytes", "3 packets"),
            ("3 packets, 2112 bytes", "3 packets, 2112 bytes more"),
            ("18446744073709551615", "18446744073709551616"),
            ("id 0 qp 1", "id 0 qp"),
            ("class 0x30", "class 0x130"),
            ("class 0x30", "class 30"),
            (
                "8000000000000000000000000000000a",
                "18000000000000000000000000000000a",
            ),
            ("methods 8000", "m\u{e4}thods 8000"),
            ("rmpp user", "rmpp nobody"),
        ] {
            let text = TEXT.replace(from, to);
            assert_ne!(text, TEXT, "{from}");
            assert!(FileInfo::parse(&text).is_err(), "{to}");
        }
    }

    #[test]
    fn files_of_this_process_that_are_none() {
        let null = File::open("/dev/null").unwrap();
        assert_eq!(FileInfo::of(null.as_fd()), Err(Error::NotUmad));
        let dir = File::open("/").unwrap();
        assert_eq!(FileInfo::of(dir.as_fd()), Err(Error::NotUmad));
        assert!(matches!(
            read(Path::new("/etc/passwd")),
            Err(Error::Proc { .. })
        ));
    }
}
