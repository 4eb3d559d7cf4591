// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Programs: sequences of calls, and their text. A line is a call:
//!
//! ```text
//! open f=0 dev=a
//! register f=0 class=0x32 rmpp=1
//! & write f=0 to=b size=1000      # at the same time as the next
//! unplug dev=c
//! ```
//!
//! What a call is not told has its default.

use std::fmt;
use std::str::FromStr;

use crate::field::{Field, Kind, FIELDS, FILES, LAST_TID};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // told by `spec`
pub enum Op {
    Open,
    Register,
    Unregister,
    EnablePkey,
    Ioctl,
    Write,
    Read,
    Poll,
    Mmap,
    Splice,
    Sendfile,
    Lseek,
    Fcntl,
    Dup,
    Fork,
    Close,
    Sleep,
    Netns,
    Unplug,
    Plug,
    Fault,
    Port,
    Look,
    Chardev,
    Fail,
}

/// A call's description.
pub struct Spec {
    /// Its name.
    pub name: &'static str,
    /// How often it is chosen, as a part of all.
    pub weight: u32,
    /// Its arguments.
    pub fields: &'static [Field],
}

impl Op {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Open,
        Self::Register,
        Self::Unregister,
        Self::EnablePkey,
        Self::Ioctl,
        Self::Write,
        Self::Read,
        Self::Poll,
        Self::Mmap,
        Self::Splice,
        Self::Sendfile,
        Self::Lseek,
        Self::Fcntl,
        Self::Dup,
        Self::Fork,
        Self::Close,
        Self::Sleep,
        Self::Netns,
        Self::Unplug,
        Self::Plug,
        Self::Fault,
        Self::Port,
        Self::Look,
        Self::Chardev,
        Self::Fail,
    ];

    /// What it is.
    pub const fn spec(self) -> Spec {
        use Field as F;
        let (name, weight, fields): (_, _, &'static [Field]) = match self {
            Self::Open => ("open", 80, &[F::File, F::Device, F::Node, F::Wait]),
            Self::Register => (
                "register",
                120,
                &[
                    F::File,
                    F::Request,
                    F::Qpn,
                    F::Class,
                    F::Version,
                    F::Oui,
                    F::Rmpp,
                    F::Flags,
                    F::Methods,
                    F::MethodsHigh,
                    F::Mem,
                    F::Bad,
                    F::Abi,
                ],
            ),
            Self::Unregister => ("unregister", 40, &[F::File, F::Id, F::Mem, F::Bad, F::Abi]),
            Self::EnablePkey => ("enable_pkey", 15, &[F::File, F::Abi]),
            Self::Ioctl => ("ioctl", 15, &[F::File, F::Command, F::Argument, F::Abi]),
            Self::Write => (
                "write",
                350,
                &[
                    F::File,
                    F::Write,
                    F::Mem,
                    F::Bad,
                    F::Header,
                    F::Id,
                    F::Status,
                    F::Timeout,
                    F::Retries,
                    F::Length,
                    F::Qpn,
                    F::To,
                    F::Grh,
                    F::Sl,
                    F::PathBits,
                    F::GidIndex,
                    F::Pkey,
                    F::Base,
                    F::Class,
                    F::Version,
                    F::Method,
                    F::Tid,
                    F::Attribute,
                    F::RmppVersion,
                    F::RmppType,
                    F::RmppFlags,
                    F::RmppStatus,
                    F::Segment,
                    F::RmppLength,
                    F::Oui,
                    F::Size,
                ],
            ),
            Self::Read => ("read", 200, &[F::File, F::Read, F::Room, F::Mem, F::Bad]),
            Self::Poll => ("poll", 40, &[F::File, F::Poll, F::Events, F::Ms]),
            Self::Mmap => ("mmap", 4, &[F::File, F::Protection]),
            Self::Splice => ("splice", 4, &[F::File, F::Direction, F::Size]),
            Self::Sendfile => ("sendfile", 4, &[F::File, F::Direction, F::Size]),
            Self::Lseek => ("lseek", 4, &[F::File, F::Offset]),
            Self::Fcntl => ("fcntl", 8, &[F::File, F::Fcntl]),
            Self::Dup => ("dup", 8, &[F::File, F::Other]),
            Self::Fork => ("fork", 1, &[F::File, F::Fork]),
            Self::Close => ("close", 30, &[F::File]),
            Self::Sleep => ("sleep", 15, &[F::Ms]),
            Self::Netns => ("netns", 6, &[F::Where]),
            Self::Unplug => ("unplug", 2, &[F::Device]),
            Self::Plug => ("plug", 2, &[F::Device]),
            Self::Fault => ("fault", 10, &[F::Device, F::Fault, F::Count]),
            Self::Port => ("port", 5, &[F::Device, F::Change]),
            Self::Look => ("look", 10, &[F::File, F::Device, F::Text]),
            Self::Chardev => ("chardev", 2, &[F::Device, F::Node]),
            Self::Fail => ("fail", 40, &[F::Count]),
        };
        Spec {
            name,
            weight,
            fields,
        }
    }
}

/// A call with its arguments.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    /// What it is.
    pub op: Op,
    /// It is made by a second thread, while the first goes on.
    pub aside: bool,
    values: [u64; FIELDS],
}

impl Call {
    /// A call with the usual arguments.
    pub fn new(op: Op) -> Self {
        let mut call = Self {
            op,
            aside: false,
            values: [0; FIELDS],
        };
        for field in op.spec().fields {
            call.set(*field, field.spec().default);
        }
        call
    }

    /// The same with another argument.
    pub fn with(mut self, field: Field, value: u64) -> Self {
        self.set(field, value);
        self
    }

    /// An argument.
    pub fn get(&self, field: Field) -> u64 {
        self.values[field as usize]
    }

    /// Changes an argument.
    pub fn set(&mut self, field: Field, value: u64) {
        self.values[field as usize] = value;
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = self.op.spec();
        if self.aside {
            f.write_str("& ")?;
        }
        f.write_str(spec.name)?;
        for field in spec.fields {
            let (value, spec) = (self.get(*field), field.spec());
            // What is told first is what it is about: always.
            let always = matches!(
                field,
                Field::File | Field::Device | Field::To | Field::Class
            );
            if value == spec.default && !always {
                continue;
            }
            write!(f, " {}=", spec.name)?;
            match spec.kind {
                Kind::Word(words) => {
                    f.write_str(
                        usize::try_from(value)
                            .ok()
                            .and_then(|n| words.get(n))
                            .unwrap_or(&"?"),
                    )?;
                }
                _ if *field == Field::Tid && value == LAST_TID => f.write_str("last")?,
                _ if value < 1_000_000 && !field.is_hex() => write!(f, "{value}")?,
                _ => write!(f, "{value:#x}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Call {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace().peekable();
        let aside = words.next_if_eq(&"&").is_some();
        let name = words.next().ok_or("no call")?;
        let op = Op::ALL
            .into_iter()
            .find(|op| op.spec().name == name)
            .ok_or_else(|| format!("no such call: {name}"))?;
        let mut call = Self::new(op);
        call.aside = aside;
        for word in words {
            let (name, text) = word
                .split_once('=')
                .ok_or_else(|| format!("{word}: no value"))?;
            let field = op
                .spec()
                .fields
                .iter()
                .find(|field| field.spec().name == name)
                .ok_or_else(|| format!("{word}: no such argument"))?;
            call.set(
                *field,
                value(*field, text).ok_or_else(|| format!("{word}: no such value"))?,
            );
        }
        Ok(call)
    }
}

fn value(field: Field, text: &str) -> Option<u64> {
    let number = || match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    match field.spec().kind {
        Kind::Word(words) => words
            .iter()
            .position(|word| *word == text)
            .and_then(|n| u64::try_from(n).ok()),
        Kind::File => number().filter(|n| *n < FILES as u64),
        Kind::Number(..) if field == Field::Tid && text == "last" => Some(LAST_TID),
        Kind::Number(..) => number(),
    }
}

/// A sequence of calls.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Program(pub Vec<Call>);

impl Program {
    /// Whether a call of this kind is in it.
    pub fn has(&self, op: Op) -> bool {
        self.0.iter().any(|call| call.op == op)
    }

    /// Whether it could kill a kernel with the C module: an open of issm that meets an unplug.
    pub fn crashes_c(&self) -> bool {
        self.has(Op::Unplug)
            && self
                .0
                .iter()
                .any(|call| call.op == Op::Open && call.get(Field::Node) == 1)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|call| writeln!(f, "{call}"))
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Program {
    type Err = String;

    /// Reads a program; `#` begins a comment.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut calls = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or("").trim();
            if !line.is_empty() {
                calls.push(line.parse().map_err(|e| format!("line {number}: {e}"))?);
            }
        }
        Ok(Self(calls))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let text = "open f=0 dev=a wait=yes\n& write f=1 to=none class=0x32 tid=last size=6000\nclose f=7\n";
        let program: Program = text.parse().expect("a program");
        assert_eq!(program.to_string(), text);
        assert_eq!(program.0[1].get(Field::Tid), LAST_TID);
        assert!(program.0[1].aside && !program.0[2].aside);
    }

    #[test]
    fn what_is_wrong_is_told() {
        for text in [
            "opn f=0",
            "open f=8",
            "open size=3",
            "open dev=z",
            "open f",
            "&",
        ] {
            assert!(text.parse::<Program>().is_err(), "{text}");
        }
        assert!("# nothing\n\n"
            .parse::<Program>()
            .expect("empty")
            .0
            .is_empty());
    }

    #[test]
    fn each_call_has_its_place() {
        for op in Op::ALL {
            let call = Call::new(op);
            assert_eq!(call.to_string().parse::<Call>().expect("a call"), call);
            assert_eq!(
                Op::ALL
                    .iter()
                    .filter(|other| other.spec().name == op.spec().name)
                    .count(),
                1
            );
        }
    }
}
