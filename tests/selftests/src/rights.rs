// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Descriptors that go from one process to another (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use ktap::prelude::*;
use nix::sys::socket::{
    recvmsg, sendmsg, socketpair, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags,
    SockFlag, SockType, UnixAddr,
};

/// Two sockets that are connected with each other.
pub fn pair() -> Outcome<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Sends a descriptor.
pub fn send(over: &OwnedFd, fd: BorrowedFd<'_>) -> Outcome {
    let fds = [fd.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&fds)];
    let data = [IoSlice::new(b"!")];
    sendmsg::<UnixAddr>(
        over.as_raw_fd(),
        &data,
        &control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

/// Receives a descriptor.
pub fn receive(over: &OwnedFd) -> Outcome<OwnedFd> {
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let mut room = nix::cmsg_space!([RawFd; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(over.as_raw_fd(), &mut data, Some(&mut room), flags)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            if let [fd] = fds[..] {
                // SAFETY: the kernel has just opened it for this process, and nobody else knows it.
                return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
    Err("no descriptor came".into())
}
