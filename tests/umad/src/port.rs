// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! An open umad file.

use std::fs::File;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{fcntl, FcntlArg, OFlag};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::abi::{self, Hdr, HdrOld, RegReq, RegReq2, MAD_LEN};
use crate::{sysfs, AgentId, Error, FileInfo, Packet, Registration, Result};

/// The header layout of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// 56 bytes, without P_Key index.
    Old,
    /// 64 bytes, with P_Key index.
    New,
}

impl Layout {
    /// Bytes before the MAD.
    pub const fn header_len(self) -> usize {
        match self {
            Self::Old => size_of::<HdrOld>(),
            Self::New => size_of::<Hdr>(),
        }
    }
}

/// How to open a port. The default blocks and has the new layout.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    nonblock: bool,
    layout: Layout,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            nonblock: false,
            layout: Layout::New,
        }
    }
}

impl OpenOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// With `O_NONBLOCK`: `recv` fails with `EAGAIN` instead of waiting.
    pub fn nonblock(self, nonblock: bool) -> Self {
        Self { nonblock, ..self }
    }

    /// With [`Layout::New`] the P_Key index is enabled at once, with [`Layout::Old`] nothing is done:
    /// the file is as the kernel opened it, and `register2` can still change its layout. From ABI version 6
    /// on there is no other layout than the new one, whatever is asked for.
    pub fn layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// Opens umad device `number`.
    pub fn open(self, number: u32) -> Result<Port> {
        self.open_path(&node(number))
    }

    /// Opens a device node.
    pub fn open_path(self, path: &Path) -> Result<Port> {
        let mut options = File::options();
        options.read(true).write(true);
        if self.nonblock {
            options.custom_flags(OFlag::O_NONBLOCK.bits());
        }
        let file = options.open(path).map_err(|e| Error::Sys {
            call: "open",
            errno: Errno::from_raw(e.raw_os_error().unwrap_or(0)),
        })?;
        let port = Port::from_fd(file.into());
        if sysfs::abi_version().is_ok_and(|version| version > 5) {
            port.layout.store(NEW, Ordering::Release);
        } else if self.layout == Layout::New {
            port.enable_pkey()?;
        }
        Ok(port)
    }
}

/// Path of the node of umad device `number`.
pub fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/infiniband/umad{number}"))
}

// The states of `Port::layout`.
const FRESH: u8 = 0; // old layout, and nothing registered that would settle it
const OLD: u8 = 1;
const NEW: u8 = 2;
const SHARED: u8 = 3; // imported, and somebody else may still settle it

/// An open umad file: agents live on it, and end with it.
///
/// All calls take `&self`, so that threads can share it: one waits in [`Port::recv`] while others
/// send.
#[derive(Debug)]
pub struct Port {
    fd: OwnedFd,
    layout: AtomicU8,
}

impl Port {
    /// Opens umad device `number`: it blocks, with the new layout.
    pub fn open(number: u32) -> Result<Self> {
        OpenOptions::new().open(number)
    }

    /// Opens a device node: it blocks, with the new layout.
    pub fn open_path(path: &Path) -> Result<Self> {
        OpenOptions::new().open_path(path)
    }

    /// More ways to open.
    pub fn options() -> OpenOptions {
        OpenOptions::new()
    }

    /// Takes a file that was just opened. (One that others may have used: [`Port::import`].)
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self {
            fd,
            layout: AtomicU8::new(FRESH),
        }
    }

    /// Takes a file that somebody else may have opened and used: one that was dup'ed, or that came over
    /// `SCM_RIGHTS` or by inheritance. Only an open umad file is taken.
    ///
    /// [`Port::info`] says which port it is of. Nothing is looked up by a number or a name for that, which
    /// may be another device's by now; the kernel is asked about the file itself.
    ///
    /// The other holders can register agents, too, and so choose the header layout: until it is settled the
    /// kernel is asked for it before each packet.
    ///
    /// # Errors
    ///
    /// [`Error::NotUmad`], and [`Error::NoFdInfo`] if the ib_umad that is loaded cannot be asked.
    pub fn import(fd: OwnedFd) -> Result<Self> {
        FileInfo::of(fd.as_fd())?;
        let port = Self {
            fd,
            layout: AtomicU8::new(SHARED),
        };
        port.settled_layout()?;
        Ok(port)
    }

    /// What the kernel says of this file: the device and port that it is of, whether they are still there,
    /// its agents, its packets.
    ///
    /// A program that looks further by the device's name, in sysfs say, asks again afterwards: if the file
    /// is still alive under that name, what was found is of this device.
    pub fn info(&self) -> Result<FileInfo> {
        FileInfo::of(self.fd.as_fd())
    }

    /// The layout that the file uses now.
    ///
    /// Of a file that was imported before its layout was settled, the kernel is asked for it; if it does
    /// not answer, it is the old one.
    pub fn layout(&self) -> Layout {
        self.settled_layout().unwrap_or(Layout::Old)
    }

    fn settled_layout(&self) -> Result<Layout> {
        match self.layout.load(Ordering::Acquire) {
            NEW => Ok(Layout::New),
            SHARED => {
                let info = self.info()?;
                // There is no way back from the new layout, and none from the old one once there was an
                // agent.
                match info.layout {
                    Layout::New => self.layout.store(NEW, Ordering::Release),
                    Layout::Old if info.agents.is_empty() => (),
                    Layout::Old => self.layout.store(OLD, Ordering::Release),
                }
                Ok(info.layout)
            }
            _ => Ok(Layout::Old),
        }
    }

    /// The layout of the packet that is to be read next. While it is not settled there was no agent, so
    /// there is no packet either: it is waited for here, as what a read() that waits yields would be in the
    /// layout of its beginning.
    fn layout_to_read(&self) -> Result<Layout> {
        if self.layout.load(Ordering::Acquire) == SHARED {
            self.settled_layout()?;
        }
        if self.layout.load(Ordering::Acquire) == SHARED {
            let flags = fcntl(&self.fd, FcntlArg::F_GETFL).map_err(Error::sys("F_GETFL"))?;
            if !OFlag::from_bits_retain(flags).contains(OFlag::O_NONBLOCK) {
                let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
                nix::poll::poll(&mut fds, PollTimeout::NONE).map_err(Error::sys("poll"))?;
            } else if self.poll(PollFlags::POLLIN, Duration::ZERO)?.is_empty() {
                return Err(Error::Sys {
                    call: "read",
                    errno: Errno::EAGAIN,
                });
            }
        }
        self.settled_layout()
    }

    /// Switches to the new layout; possible before the first registration only.
    pub fn enable_pkey(&self) -> Result<()> {
        // SAFETY: the call takes no argument, and `fd` is open.
        unsafe { abi::ioctl::enable_pkey(self.fd.as_raw_fd()) }
            .map_err(Error::sys("ENABLE_PKEY"))?;
        self.layout.store(NEW, Ordering::Release);
        Ok(())
    }

    /// Registers an agent by `REGISTER_AGENT`, which leaves the layout as it is.
    pub fn register(&self, registration: &Registration) -> Result<AgentId> {
        self.register_raw(&mut registration.to_req())
    }

    /// Registers an agent by `REGISTER_AGENT2`. As the first registration it brings the new layout.
    pub fn register2(&self, registration: &Registration) -> Result<AgentId> {
        self.register2_raw(&mut registration.to_req2())
    }

    /// `REGISTER_AGENT` with an argument as it is; the kernel writes into it.
    pub fn register_raw(&self, req: &mut RegReq) -> Result<AgentId> {
        // SAFETY: the argument is the structure that the call reads and writes.
        unsafe { abi::ioctl::register_agent(self.fd.as_raw_fd(), req) }
            .map_err(Error::sys("REGISTER_AGENT"))?;
        self.settle(OLD);
        Ok(AgentId(req.id))
    }

    /// `REGISTER_AGENT2` with an argument as it is; the kernel writes into it.
    pub fn register2_raw(&self, req: &mut RegReq2) -> Result<AgentId> {
        // SAFETY: the argument is the structure that the call reads and writes.
        unsafe { abi::ioctl::register_agent2(self.fd.as_raw_fd(), req) }
            .map_err(Error::sys("REGISTER_AGENT2"))?;
        self.settle(NEW);
        Ok(AgentId(req.id))
    }

    // The first registration settles the layout.
    fn settle(&self, layout: u8) {
        // Somebody else may have settled it already: then it stays.
        let _ = self
            .layout
            .compare_exchange(FRESH, layout, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Ends an agent. Packets that came for it can still be read.
    pub fn unregister(&self, agent: AgentId) -> Result<()> {
        // SAFETY: the argument is the number that the call reads.
        unsafe { abi::ioctl::unregister_agent(self.fd.as_raw_fd(), &agent.0) }
            .map_err(Error::sys("UNREGISTER_AGENT"))?;
        Ok(())
    }

    /// Sends a packet.
    pub fn send(&self, packet: &Packet) -> Result<()> {
        let bytes = packet.to_bytes(self.settled_layout()?);
        match self.write(&bytes)? {
            wrote if wrote == bytes.len() => Ok(()),
            wrote => Err(Error::ShortWrite {
                wrote,
                of: bytes.len(),
            }),
        }
    }

    /// Receives a packet, of any length. Waits for it, unless the file is non-blocking.
    ///
    /// A long RMPP message is read in two calls; the kernel keeps it at the head of the queue in
    /// between, but another reader of the same file may take it then. In that case what is at the
    /// head afterwards is returned.
    pub fn recv(&self) -> Result<Packet> {
        let layout = self.layout_to_read()?;
        let mut buf = vec![0; layout.header_len() + MAD_LEN];
        loop {
            match self.read(&mut buf) {
                Ok(len) => return Packet::from_bytes(&buf[..len.min(buf.len())], layout),
                Err(e) if e.errno() == Some(Errno::ENOSPC) => {
                    let need = Packet::from_bytes(&buf, layout)?.header.length;
                    let need = usize::try_from(need).unwrap_or(usize::MAX);
                    if need <= buf.len() {
                        return Err(e);
                    }
                    buf.resize(need, 0);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Receives a packet, or fails with [`Error::TimedOut`] when none came in time.
    ///
    /// When several threads read one file, it should be non-blocking: another reader may take the
    /// packet that this one was woken for, and a blocking file then waits for the next without a
    /// bound.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Packet> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !self.poll(PollFlags::POLLIN, left)?.is_empty() {
                match self.recv() {
                    Err(e) if e.errno() == Some(Errno::EAGAIN) => (),
                    result => return result,
                }
            }
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
        }
    }

    /// poll(): the events that are there, out of those asked for (and `POLLERR` in any case).
    pub fn poll(&self, events: PollFlags, timeout: Duration) -> Result<PollFlags> {
        let mut fds = [PollFd::new(self.fd.as_fd(), events)];
        // Rounded up, so that the end of the wait is never early.
        let ms = timeout.as_nanos().div_ceil(1_000_000);
        let ms = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
        nix::poll::poll(&mut fds, ms).map_err(Error::sys("poll"))?;
        Ok(fds[0].revents().unwrap_or(PollFlags::empty()))
    }

    /// write() as it is.
    pub fn write(&self, bytes: &[u8]) -> Result<usize> {
        nix::unistd::write(&self.fd, bytes).map_err(Error::sys("write"))
    }

    /// read() as it is.
    pub fn read(&self, buf: &mut [u8]) -> Result<usize> {
        nix::unistd::read(&self.fd, buf).map_err(Error::sys("read"))
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Port {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.fd.as_raw_fd()
    }
}

impl From<Port> for OwnedFd {
    fn from(port: Port) -> Self {
        port.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_their_lengths() {
        assert_eq!(Layout::Old.header_len(), 56);
        assert_eq!(Layout::New.header_len(), 64);
    }

    #[test]
    fn the_kernel_refuses_what_is_no_umad_file() {
        let port = OpenOptions::new()
            .layout(Layout::Old)
            .open_path(Path::new("/dev/null"))
            .unwrap();
        assert_eq!(port.enable_pkey().unwrap_err().errno(), Some(Errno::ENOTTY));
        assert_eq!(port.layout(), Layout::Old);
        assert_eq!(
            Port::open_path(Path::new("/nowhere")).unwrap_err().errno(),
            Some(Errno::ENOENT)
        );
    }
}
