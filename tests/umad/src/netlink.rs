// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! RDMA's device family of netlink: the devices' names and indices, and which character device serves a
//! port.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    bind, recv, send, socket, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol,
    SockType,
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x01;
const HEADER: usize = 16;

/// Flag: an answer for each object that there is.
pub const NLM_F_DUMP: u16 = 0x300;

/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 0)`
const NLDEV: u16 = 5 << 10;
const CMD_GET: u16 = 1;
const CMD_GET_CHARDEV: u16 = 15;

/// Attribute: index of a device.
pub const ATTR_DEV_INDEX: u16 = 1;
/// Attribute: name of a device.
pub const ATTR_DEV_NAME: u16 = 2;
const ATTR_PORT_INDEX: u16 = 3;
const ATTR_CHARDEV_TYPE: u16 = 69;
const ATTR_CHARDEV_NAME: u16 = 70;
const ATTR_CHARDEV_ABI: u16 = 71;
const ATTR_CHARDEV: u16 = 72;

/// What GET_CHARDEV says of a character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chardev {
    /// Name of the node, without a directory.
    pub name: String,
    /// Revision of the device's ABI.
    pub abi: u64,
    /// Major number.
    pub major: u64,
    /// Minor number.
    pub minor: u64,
}

/// A socket of the family.
#[derive(Debug)]
pub struct Rdma {
    socket: OwnedFd,
    sequence: u32,
}

/// The attributes of an answer.
pub type Attributes = BTreeMap<u16, Vec<u8>>;

impl Rdma {
    /// Opens a socket.
    pub fn open() -> nix::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRDMA,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// The devices: index and name.
    pub fn devices(&mut self) -> nix::Result<Vec<(u32, String)>> {
        let devices = self.ask(CMD_GET, NLM_F_DUMP, &[])?;
        let pair = |a: &Attributes| {
            let index = u32::try_from(number(a, ATTR_DEV_INDEX)?).ok()?;
            Some((index, text(a, ATTR_DEV_NAME)?))
        };
        Ok(devices.iter().filter_map(pair).collect())
    }

    /// The index of the device `name`.
    pub fn index(&mut self, name: &str) -> nix::Result<u32> {
        let devices = self.devices()?;
        let found = devices.into_iter().find(|(_, n)| n == name);
        found.map(|(index, _)| index).ok_or(Errno::ENODEV)
    }

    /// Asks for the character device of kind `kind` ("umad", "issm") of a device and port; a part
    /// that is `None` is left out of the request.
    pub fn chardev(
        &mut self,
        kind: &str,
        device: Option<u32>,
        port: Option<u32>,
    ) -> nix::Result<Chardev> {
        let mut attributes = vec![(ATTR_CHARDEV_TYPE, [kind.as_bytes(), b"\0"].concat())];
        if let Some(device) = device {
            attributes.push((ATTR_DEV_INDEX, device.to_ne_bytes().to_vec()));
        }
        if let Some(port) = port {
            attributes.push((ATTR_PORT_INDEX, port.to_ne_bytes().to_vec()));
        }
        let answers = self.ask(CMD_GET_CHARDEV, 0, &attributes)?;
        let answer = answers.first().ok_or(Errno::ENODATA)?;
        let devt = number(answer, ATTR_CHARDEV).ok_or(Errno::EBADMSG)?;
        Ok(Chardev {
            name: text(answer, ATTR_CHARDEV_NAME).ok_or(Errno::EBADMSG)?,
            abi: number(answer, ATTR_CHARDEV_ABI).ok_or(Errno::EBADMSG)?,
            // The kernel's encoding of a device number in 32 bits.
            major: (devt >> 8) & 0xfff,
            minor: (devt & 0xff) | ((devt >> 12) & 0xf_ff00),
        })
    }

    /// Sends a command of the family, and returns the attributes of each answer.
    pub fn ask(
        &mut self,
        command: u16,
        flags: u16,
        attributes: &[(u16, Vec<u8>)],
    ) -> nix::Result<Vec<Attributes>> {
        self.sequence += 1;
        let mut message = vec![0u8; HEADER];
        for (kind, value) in attributes {
            let len = u16::try_from(4 + value.len()).map_err(|_| Errno::EMSGSIZE)?;
            message.extend_from_slice(&len.to_ne_bytes());
            message.extend_from_slice(&kind.to_ne_bytes());
            message.extend_from_slice(value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let len = u32::try_from(message.len()).map_err(|_| Errno::EMSGSIZE)?;
        message[0..4].copy_from_slice(&len.to_ne_bytes());
        message[4..6].copy_from_slice(&(NLDEV + command).to_ne_bytes());
        message[6..8].copy_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        message[8..12].copy_from_slice(&self.sequence.to_ne_bytes());
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;

        let mut answers = Vec::new();
        let mut buffer = vec![0u8; 65536];
        loop {
            let n = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..n];
            while rest.len() >= HEADER {
                let len = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                let kind = u16::from_ne_bytes([rest[4], rest[5]]);
                if len < HEADER || len > rest.len() {
                    return Err(Errno::EBADMSG);
                }
                let body = &rest[HEADER..len];
                match kind {
                    NLMSG_DONE => return Ok(answers),
                    NLMSG_ERROR => {
                        let code = body.first_chunk().map_or(0, |c| i32::from_ne_bytes(*c));
                        // 0: the acknowledgement of what was done.
                        return match code {
                            0 => Ok(answers),
                            code => Err(Errno::from_raw(-code)),
                        };
                    }
                    _ => answers.push(parse(body)),
                }
                if flags & NLM_F_DUMP == 0 {
                    return Ok(answers);
                }
                rest = &rest[len.next_multiple_of(4).min(rest.len())..];
            }
        }
    }
}

fn parse(mut body: &[u8]) -> Attributes {
    let mut attributes = Attributes::new();
    while body.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([body[0], body[1]]));
        // The two highest bits mark nested attributes and byte order.
        let kind = u16::from_ne_bytes([body[2], body[3]]) & 0x3fff;
        if len < 4 || len > body.len() {
            break;
        }
        attributes.insert(kind, body[4..len].to_vec());
        body = &body[len.next_multiple_of(4).min(body.len())..];
    }
    attributes
}

fn text(attributes: &Attributes, kind: u16) -> Option<String> {
    let value = attributes.get(&kind)?;
    let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
    String::from_utf8(value[..end].to_vec()).ok()
}

fn number(attributes: &Attributes, kind: u16) -> Option<u64> {
    let value = attributes.get(&kind)?;
    if let Ok(four) = <[u8; 4]>::try_from(value.as_slice()) {
        return Some(u32::from_ne_bytes(four).into());
    }
    <[u8; 8]>::try_from(value.as_slice())
        .ok()
        .map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_are_cut_or_lie_end_the_list() {
        let one = [8, 0, 1, 0, 7, 0, 0, 0];
        assert_eq!(number(&parse(&one), ATTR_DEV_INDEX), Some(7));
        assert_eq!(number(&parse(&one[..7]), ATTR_DEV_INDEX), None);
        assert!(parse(&[3, 0, 1, 0, 7, 0, 0, 0]).is_empty());
        assert!(parse(&[0xff, 0xff, 1, 0]).is_empty());
        // A name without its end, and one that is no text.
        assert_eq!(
            text(&parse(&[6, 0, 2, 0, b'r', b'x']), ATTR_DEV_NAME).as_deref(),
            Some("rx")
        );
        assert_eq!(text(&parse(&[5, 0, 2, 0, 0xff]), ATTR_DEV_NAME), None);
    }
}
