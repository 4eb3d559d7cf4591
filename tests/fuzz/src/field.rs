// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The arguments of calls: their names, what values they take, and which of these are worth trying.

/// An argument. Calls share them; what they mean for a call is told at its [`crate::call::Op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // each one's name, and what it can be, stands in `spec`
pub enum Field {
    File,
    Other,
    Device,
    Node,
    Wait,
    Abi,
    Mem,
    Bad,
    Request,
    Id,
    Qpn,
    Class,
    Version,
    Oui,
    Rmpp,
    Flags,
    Methods,
    MethodsHigh,
    Command,
    Argument,
    Write,
    Header,
    Status,
    Timeout,
    Retries,
    Length,
    To,
    Grh,
    Sl,
    PathBits,
    GidIndex,
    Pkey,
    Base,
    Method,
    Tid,
    Attribute,
    RmppVersion,
    RmppType,
    RmppFlags,
    RmppStatus,
    Segment,
    RmppLength,
    Size,
    Room,
    Read,
    Poll,
    Events,
    Ms,
    Protection,
    Direction,
    Offset,
    Fcntl,
    Fork,
    Where,
    Fault,
    Count,
    Change,
    Text,
}

/// How many there are.
pub const FIELDS: usize = Field::Text as usize + 1;

/// What values an argument takes.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// One of so many files of the program.
    File,
    /// One of these words; the value is its place.
    Word(&'static [&'static str]),
    /// A number; these are worth trying, others are below the bound.
    Number(&'static [u64], u64),
}

/// An argument's description.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its name in a program's text.
    pub name: &'static str,
    /// What it is if it is not said.
    pub default: u64,
    /// What values it takes.
    pub kind: Kind,
}

/// Files of a program.
pub const FILES: usize = 8;
/// The transaction id of the MAD that was read last, whoever read it.
pub const LAST_TID: u64 = u64::MAX;

/// Devices by their letters: two pairs of virtual channel adapters, one of OPA, one of Soft-RoCE.
pub const DEVICES: &[&str] = &["a", "b", "c", "d", "o", "p", "r", "s"];
/// The first Soft-RoCE device in [`DEVICES`].
pub const FIRST_RXE: u64 = 6;

const U32: u64 = u32::MAX as u64;
const U64: u64 = u64::MAX;

impl Field {
    /// Whether it is usual to tell it by hexadecimal digits.
    pub const fn is_hex(self) -> bool {
        use Field as F;
        let some = matches!(
            self,
            F::Class | F::Oui | F::Methods | F::MethodsHigh | F::Command | F::Argument | F::Method
        );
        some || matches!(
            self,
            F::Attribute | F::Events | F::Base | F::Pkey | F::RmppFlags
        )
    }

    /// What it is.
    pub const fn spec(self) -> Spec {
        use Kind::{File, Number, Word};
        let (name, default, kind) = match self {
            Self::File => ("f", 0, File),
            Self::Other => ("other", 1, File),
            Self::Device => ("dev", 0, Word(DEVICES)),
            Self::Node => ("node", 0, Word(&["umad", "issm"])),
            Self::Wait => ("wait", 0, Word(&["no", "yes"])),
            Self::Abi => ("abi", 0, Word(&["64", "32"])),
            Self::Mem => (
                "mem",
                0,
                Word(&["ok", "edge", "absent", "readonly", "null", "kernel"]),
            ),
            Self::Bad => ("bad", 1, Number(&[1, 4, 8, 20, 36, 56, 64, 100, 256], 400)),
            Self::Request => ("request", 1, Word(&["1", "2"])),
            Self::Id => ("id", 0, Number(&[0, 0, 0, 1, 2, 31, 32, 33, U32], U32)),
            Self::Qpn => ("qpn", 1, Number(&[0, 1, 1, 1, 2, 0x0100_0000, U32], U32)),
            Self::Class => (
                "class",
                0x32,
                Number(
                    &[
                        0, 1, 3, 3, 4, 6, 7, 9, 0x0a, 0x0f, 0x10, 0x21, 0x30, 0x32, 0x32, 0x4f,
                        0x50, 0x81,
                    ],
                    255,
                ),
            ),
            Self::Version => ("version", 1, Number(&[0, 1, 1, 2, 7, 8, 0x80], 255)),
            Self::Oui => (
                "oui",
                0x1405,
                Number(&[0, 0x1405, 0x00ff_ffff, 0x0100_0000], U32),
            ),
            Self::Rmpp => ("rmpp", 0, Number(&[0, 1, 1, 2], 255)),
            Self::Flags => ("flags", 0, Number(&[0, 0, 1, 1, 2, 3], U32)),
            Self::Methods => (
                "methods",
                0xe,
                Number(&[0, 2, 8, 0xe, 0x4_000e, U64, 1 << 63], U64),
            ),
            Self::MethodsHigh => ("high", 0, Number(&[0, 0, 2, U64], U64)),
            Self::Command => (
                "cmd",
                0x1b03,
                Number(
                    &[
                        0x1b01,
                        0x1b02,
                        0x1b03,
                        0x1b04,
                        0xc01c_1b01,
                        0x4004_1b02,
                        0xc028_1b04,
                        0x5421,
                        0x541b,
                        0x5452,
                        0x5450,
                        0xc01c_1b04,
                        0x1b05,
                    ],
                    U32,
                ),
            ),
            Self::Argument => (
                "arg",
                0,
                Number(
                    &[0, 1, 0xffff_f000, 0x7fff_ffff_f000, 0xffff_8880_0000_0000],
                    U64,
                ),
            ),
            Self::Write => ("how", 0, Word(&["write", "writev", "pwrite"])),
            Self::Header => ("hdr", 0, Word(&["auto", "old", "new"])),
            Self::Status => ("status", 0, Number(&[0, 110], U32)),
            Self::Timeout => ("timeout", 0, Number(&[0, 0, 1, 5, 50, 1000, U32], 100)),
            Self::Retries => ("retries", 0, Number(&[0, 0, 1, 3, U32], 10)),
            Self::Length => ("length", 0, Number(&[0, 256, U32], U32)),
            Self::To => (
                "to",
                1,
                Word(&[
                    "a",
                    "b",
                    "c",
                    "d",
                    "o",
                    "p",
                    "r",
                    "s",
                    "none",
                    "permissive",
                    "multicast",
                ]),
            ),
            Self::Grh => ("grh", 0, Word(&["auto", "no", "yes", "wild"])),
            Self::Sl => ("sl", 0, Number(&[0, 1, 15, 16, 255], 255)),
            Self::PathBits => ("bits", 0, Number(&[0, 1, 127, 255], 255)),
            Self::GidIndex => ("gid", 0, Number(&[0, 0, 1, 2, 255], 255)),
            Self::Pkey => ("pkey", 0, Number(&[0, 0, 1, 15, 16, 0xffff], 0xffff)),
            Self::Base => ("base", 1, Number(&[1, 1, 0x80, 0], 255)),
            Self::Method => (
                "method",
                3,
                Number(
                    &[
                        0, 1, 2, 3, 3, 5, 6, 7, 0x12, 0x13, 0x14, 0x81, 0x81, 0x85, 0x86, 0x92,
                        0x92, 0x93,
                    ],
                    255,
                ),
            ),
            Self::Tid => (
                "tid",
                1,
                Number(&[1, 1, 2, 3, LAST_TID, LAST_TID, 0x1_0000_0001], 16),
            ),
            Self::Attribute => (
                "attr",
                1,
                Number(&[1, 0x10, 0x11, 0x15, 0x20, 0x38], 0xffff),
            ),
            Self::RmppVersion => ("rv", 0, Number(&[0, 1, 1, 1, 2], 255)),
            Self::RmppType => ("rt", 0, Number(&[0, 1, 1, 2, 2, 3, 4, 5], 255)),
            Self::RmppFlags => ("rf", 0, Number(&[0, 1, 1, 3, 5, 7, 0xf9], 255)),
            Self::RmppStatus => ("rs", 0, Number(&[0, 1, 118, 119, 120, 127, 128], 255)),
            Self::Segment => (
                "seg",
                0,
                Number(&[0, 1, 1, 2, 2, 3, 4, 64, 65, U32, 0x7fff_ffff], U32),
            ),
            Self::RmppLength => (
                "len",
                0,
                Number(
                    &[
                        0,
                        1,
                        20,
                        64,
                        216,
                        220,
                        221,
                        240,
                        440,
                        1000,
                        4000,
                        U32,
                        0x8000_0000,
                    ],
                    U32,
                ),
            ),
            Self::Size => {
                let sizes = &[
                    0, 1, 23, 24, 35, 36, 40, 55, 56, 64, 255, 256, 256, 256, 257, 400, 500, 1000,
                    2048, 2049, 6000, 70_000,
                ];
                ("size", 256, Number(sizes, 3000))
            }
            Self::Room => {
                let sizes = &[
                    0, 1, 24, 56, 64, 79, 80, 100, 312, 320, 321, 512, 512, 512, 4096, 4096,
                    100_000,
                ];
                ("size", 512, Number(sizes, 600))
            }
            Self::Read => ("how", 0, Word(&["read", "readv", "pread"])),
            Self::Poll => ("how", 0, Word(&["poll", "epoll"])),
            Self::Events => ("events", 1, Number(&[0, 1, 4, 5, 0x2000, 0xffff], 0xffff)),
            Self::Ms => ("ms", 0, Number(&[0, 0, 0, 1, 2], 4)),
            Self::Protection => ("prot", 3, Number(&[0, 1, 2, 3, 4, 7], 7)),
            Self::Direction => ("to", 0, Word(&["pipe", "file"])),
            Self::Offset => ("offset", 0, Number(&[0, 1, 4096, U64], U64)),
            Self::Fcntl => (
                "cmd",
                0,
                Word(&[
                    "getfl", "nonblock", "block", "async", "getfd", "cloexec", "lock",
                ]),
            ),
            Self::Fork => (
                "child",
                0,
                Word(&["exit", "close", "read", "write", "poll"]),
            ),
            Self::Where => ("to", 0, Word(&["home", "away"])),
            Self::Fault => {
                let kinds = &[
                    "none", "drop", "double", "refuse", "status", "modify", "delay", "late",
                    "swallow",
                ];
                ("kind", 0, Word(kinds))
            }
            Self::Count => ("n", 1, Number(&[1, 1, 2, 3, 5, 8], 24)),
            Self::Change => (
                "change",
                0,
                Word(&["restore", "down", "lid", "pkeys", "init"]),
            ),
            Self::Text => ("file", 0, Word(&["fdinfo", "ibdev", "port", "abi_version"])),
        };
        Spec {
            name,
            default,
            kind,
        }
    }
}
