// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A connection to ibsim: a control and a data socket, AF_UNIX datagrams with abstract names.
//!
//! ibsim is one thread, and spins when a client's queue is full; so whatever the bridge waits for, it takes
//! what comes meanwhile, and it never waits for room in ibsim's queue.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::mad::{Mad, DATA_LEN, NODE_DESCRIPTION};
use crate::portinfo::Port;
use crate::route::GSI_ON_WIRE;
use crate::tids::{Purpose, Tids};
use crate::wire::{Connect, Control, Kind, Packet, CONTROL_DATA, CONTROL_LEN, PACKET_LEN};

/// How long ibsim may take to answer on the control socket.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why something with ibsim went wrong.
#[derive(Debug)]
pub enum Error {
    /// It is not there (any more).
    Gone,
    /// It did not answer in time.
    Silent,
    /// It refused, and what.
    Refused(&'static str),
    /// Something that another try would not change.
    Wrong(String),
    /// Anything else.
    Io(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("ibsim is not there"),
            Self::Silent => f.write_str("ibsim does not answer"),
            Self::Refused(what) => write!(f, "ibsim refuses {what}"),
            Self::Wrong(why) => f.write_str(why),
            Self::Io(e) => e.fmt(f),
        }
    }
}

impl From<io::Error> for Error {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::NotConnected
            | io::ErrorKind::BrokenPipe => Self::Gone,
            _ => Self::Io(e),
        }
    }
}

/// What happens on the sockets.
type Result<T> = std::result::Result<T, Error>;

/// The fabric at the other end of the port's cable.
pub struct Fabric {
    control: UnixDatagram,
    data: UnixDatagram,
    client: u32,
    /// Name of the node.
    pub node: String,
    /// Messages that ibsim had no room for yet.
    waiting: VecDeque<Vec<u8>>,
    /// Messages that came while something else was waited for.
    early: VecDeque<Packet>,
}

/// The node as ibsim knows it.
pub struct Node {
    /// NodeInfo.
    pub info: [u8; DATA_LEN],
    /// NodeDescription.
    pub description: [u8; DATA_LEN],
    /// PortInfo of port 1.
    pub port_info: [u8; DATA_LEN],
    /// The P_Key table of port 1.
    pub pkeys: [u8; DATA_LEN],
}

impl Node {
    /// NodeType 1: a channel adapter.
    pub fn is_ca(&self) -> bool {
        self.info[2] == 1
    }

    /// NumPorts.
    pub fn ports(&self) -> u32 {
        self.info[3].into()
    }

    /// NodeGUID.
    pub fn guid(&self) -> u64 {
        self.info[12..20].try_into().map_or(0, u64::from_be_bytes)
    }

    /// The port.
    pub fn port(&self) -> Port {
        Port::default()
            .with_info(&self.port_info)
            .with_pkeys(&self.pkeys)
    }
}

// The name of a socket: ibsim counts a zero at its end, too.
fn address(base: &str, rest: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{base}:{rest}\0"))
}

// Opens a socket with a name; it never blocks.
fn socket(base: &str, name: &str) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::bind_addr(&address(base, name)?)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl Fabric {
    /// Connects to the ibsim with this base of names, at a node, or, if that is empty, where ibsim likes.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`] if there is no ibsim; [`Error::Refused`] if there is no such node, or it has
    /// ten clients already; others.
    pub fn connect(base: &str, node: &str, id: u32) -> Result<Self> {
        let control = socket(base, &format!("ctl{id}"))?;
        control.connect_addr(&address(base, "ctl")?)?;
        // ibsim wants to find this one as soon as it hears of the client.
        let data = socket(base, &format!("in{id}"))?;
        let mut this = Self {
            control,
            data,
            client: 0,
            node: String::new(),
            waiting: VecDeque::new(),
            early: VecDeque::new(),
        };
        let wish = Connect::new(id, GSI_ON_WIRE, node)
            .ok_or_else(|| Error::Wrong(format!("the name of node {node} is too long")))?;
        let answer = match this.call(Kind::Connect, wish.bytes()) {
            Err(Error::Refused(_)) => Err(Error::Refused("this node, or any more clients")),
            other => other,
        }?;
        let (client, node) =
            Connect::answer(&answer).ok_or(Error::Wrong("a strange answer of ibsim".into()))?;
        (this.client, this.node) = (client, node);
        this.data
            .connect_addr(&address(base, &format!("out{client}"))?)?;
        Ok(this)
    }

    /// Number of the client.
    pub fn client(&self) -> u32 {
        self.client
    }

    /// Asks for all that is known of the node.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn ask_node(&mut self) -> Result<Node> {
        let info = self.call(Kind::GetNodeInfo, &[])?;
        let port_info = self.port_info()?;
        let pkeys = self.pkeys()?;
        // The one thing that only an SMP can tell.
        let mut tids = Tids::new(1);
        let smp = Mad::local_get(1, NODE_DESCRIPTION, 0);
        let packet = crate::route::question(smp, Purpose::Device, &mut tids);
        self.send(&packet)?;
        let end = Instant::now() + PATIENCE;
        let description = loop {
            let known = |packet: &Packet| {
                packet.mad.attribute() == NODE_DESCRIPTION && packet.mad.is_response()
            };
            if let Some(at) = self.early.iter().position(known) {
                break self.early.remove(at).map(|packet| packet.mad.data());
            }
            self.wait(None, end)?;
        };
        let description = description.ok_or(Error::Silent)?;
        Ok(Node {
            info,
            description,
            port_info,
            pkeys,
        })
    }

    /// PortInfo of the port.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn port_info(&mut self) -> Result<[u8; CONTROL_DATA]> {
        self.call(Kind::GetPortInfo, &[0])
    }

    /// The P_Key table of the port.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn pkeys(&mut self) -> Result<[u8; CONTROL_DATA]> {
        self.call(Kind::GetPkeys, &[])
    }

    /// Marks the port as that of a subnet manager, or not.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn set_is_sm(&mut self, is_sm: bool) -> Result<()> {
        self.call(Kind::SetIsSm, &u32::from(is_sm).to_ne_bytes())?;
        Ok(())
    }

    /// Leaves the fabric. ibsim keeps IsSM otherwise.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn disconnect(mut self) -> Result<()> {
        self.set_is_sm(false)?;
        self.call(Kind::Disconnect, &[])?;
        Ok(())
    }

    // Sends a control message, and waits for its answer.
    fn call(&mut self, kind: Kind, data: &[u8]) -> Result<[u8; CONTROL_DATA]> {
        let message = Control::new(self.client, kind, data);
        let end = Instant::now() + PATIENCE;
        let mut buf = [0; CONTROL_LEN + 1];
        // An answer that came too late is nobody's.
        while self.control.recv(&mut buf).is_ok() {}
        loop {
            match self.control.send(message.bytes()) {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(Some(PollFlags::POLLOUT), end)?;
                }
                Err(e) => return Err(e.into()),
            }
        }
        loop {
            match self.control.recv(&mut buf) {
                Ok(len) => match Control::answer(&buf[..len], kind) {
                    Some(Ok(data)) => return Ok(data),
                    Some(Err(_)) => return Err(Error::Refused("a control message")),
                    None => {}
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(Some(PollFlags::POLLIN), end)?;
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    // Waits until the control socket is ready for something, or a data message is there, which it takes.
    fn wait(&mut self, control: Option<PollFlags>, end: Instant) -> Result<()> {
        let left = end.saturating_duration_since(Instant::now());
        let ms = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
        let mut fds = [
            PollFd::new(self.control.as_fd(), control.unwrap_or(PollFlags::empty())),
            PollFd::new(self.data.as_fd(), PollFlags::POLLIN),
        ];
        match nix::poll::poll(&mut fds, ms) {
            Ok(0) => return Err(Error::Silent),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(Error::Io(e.into())),
        }
        while let Some(packet) = self.recv_data()? {
            self.early.push_back(packet);
        }
        Ok(())
    }

    fn recv_data(&mut self) -> Result<Option<Packet>> {
        let mut buf = [0; PACKET_LEN + 1];
        loop {
            match self.data.recv(&mut buf) {
                Ok(len) => {
                    if let Some(packet) = Packet::parse(&buf[..len]) {
                        return Ok(Some(packet));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn recv(&mut self) -> Result<Option<Packet>> {
        match self.early.pop_front() {
            Some(packet) => Ok(Some(packet)),
            None => self.recv_data(),
        }
    }

    /// Whether messages are there that no poll() tells of.
    pub fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// Sends a message, now or, if ibsim has no room, later.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn send(&mut self, packet: &Packet) -> Result<()> {
        self.waiting.push_back(packet.to_bytes());
        self.flush()
    }

    /// Sends what there is room for.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn flush(&mut self) -> Result<()> {
        while let Some(message) = self.waiting.front() {
            match self.data.send(message) {
                Ok(_) => {
                    self.waiting.pop_front();
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Messages that wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl AsFd for Fabric {
    /// The data socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.data.as_fd()
    }
}
