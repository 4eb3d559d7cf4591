// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `netns`: who may open a port, by network namespace, in the two modes of the RDMA
//! subsystem; the same for issm; and a device that moves to another namespace.
//!
//! The mode can change only while no other network namespace exists, so it is changed first, and
//! changed back when the last one is gone.

#![forbid(unsafe_code)]

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use ktap::peers::{CLASS, SOON};
use ktap::prelude::*;
use nix::fcntl::OFlag;
use nix::sched::{unshare, CloneFlags};
use nix::sys::socket::{
    recvmsg, sendmsg, socketpair, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags,
    SockFlag, SockType, UnixAddr,
};
use nix::sys::stat::Mode;
use selftests::netns::{Exclusive, Named};
use selftests::task::{Task, MUST, MUST_NOT};
use selftests::vhca::{Module, Shape, Spec, SpecExt, VhcaExt, IS_SM};

const PACKET: usize = 64 + 256;

/// Runs `body` in a child process in a network namespace of its own.
fn elsewhere(body: impl FnOnce() -> Outcome) -> Outcome {
    fork(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        body()
    })?
    .wait(MUST)
}

fn shared_mode(area: &mut ktap::Area) {
    area.check(
        "shared mode: a port can be opened from every namespace",
        || {
            elsewhere(|| {
                let port = Port::open(0)?;
                port.register2(&Peers::registration(CLASS))?;
                Ok(())
            })
        },
    );
    area.check(
        "shared mode: a file of another namespace sends and receives",
        || elsewhere(|| Peers::new()?.round_trip(fresh_tid()).map(drop)),
    );
    area.check(
        "shared mode: sysfs shows the ports in every namespace",
        || {
            elsewhere(|| {
                ensure_eq!(umad::sysfs::ibdev(0)?, "rxe0");
                ensure_eq!(umad::sysfs::port(0)?, 1);
                Ok(())
            })
        },
    );
}

fn exclusive_mode(area: &mut ktap::Area) {
    area.check(
        "exclusive mode: open() from another namespace is EPERM",
        || {
            let _mode = Exclusive::begin()?;
            elsewhere(|| {
                for number in [0, 1] {
                    ensure_errno!(Port::open(number), EPERM);
                }
                Ok(())
            })
        },
    );
    area.check(
        "exclusive mode: EPERM does not hold for the device's own namespace",
        || {
            let _mode = Exclusive::begin()?;
            let mut there = fork(|| {
                unshare(CloneFlags::CLONE_NEWNET)?;
                for _ in 0..50 {
                    ensure_errno!(Port::open(0), EPERM);
                }
                Ok(())
            })?;
            for _ in 0..50 {
                Port::open(0)?;
            }
            there.wait(MUST)?;
            Peers::new()?.round_trip(fresh_tid()).map(drop)
        },
    );
    area.check("exclusive mode: EPERM for every way of opening", || {
        let _mode = Exclusive::begin()?;
        elsewhere(|| {
            for (read, write) in [(true, false), (false, true), (true, true)] {
                let file = fs::File::options()
                    .read(read)
                    .write(write)
                    .open("/dev/infiniband/umad0");
                ensure_errno!(file, EPERM, "read {read}, write {write}");
            }
            let port = Port::options().nonblock(true).open(0);
            ensure_errno!(port, EPERM);
            Ok(())
        })
    });
    area.check(
        "exclusive mode: a file works on in another namespace",
        || {
            let _mode = Exclusive::begin()?;
            let peers = Peers::new()?;
            elsewhere(|| {
                // Only open() asks where the caller is.
                peers.round_trip(fresh_tid())?;
                let agent = peers.a.port.register2(&Registration::send_only())?;
                Ok(peers.a.port.unregister(agent)?)
            })
        },
    );
    area.check(
        "exclusive mode: a file of before the change works on",
        || {
            let peers = Peers::new()?;
            let _mode = Exclusive::begin()?;
            peers.round_trip(fresh_tid()).map(drop)
        },
    );
    area.check(
        "exclusive mode: a descriptor can be given to another namespace",
        || {
            let _mode = Exclusive::begin()?;
            let none = SockFlag::empty();
            let (here, there) = socketpair(AddressFamily::Unix, SockType::Stream, None, none)?;
            let peers = Peers::new()?;
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            let mut child = fork(|| {
                // Its own copies of the parent's files are not what it uses.
                unshare(CloneFlags::CLONE_NEWNET)?;
                ensure_errno!(Port::open(0), EPERM);
                let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
                let mut byte = [0];
                let mut data = [IoSliceMut::new(&mut byte)];
                let socket = there.as_fd().as_raw_fd();
                let message =
                    recvmsg::<UnixAddr>(socket, &mut data, Some(&mut space), MsgFlags::empty())?;
                let Some(ControlMessageOwned::ScmRights(fds)) = message.cmsgs()?.next() else {
                    return Err("no descriptor came".into());
                };
                let file = selftests::calls::adopt(fds[0])?;
                let bytes = packet.to_bytes(Layout::New);
                ensure_eq!(nix::unistd::write(&file, &bytes)?, PACKET);
                Ok(())
            })?;
            let fds = [peers.a.port.as_raw_fd()];
            let rights = [ControlMessage::ScmRights(&fds)];
            let data = [IoSlice::new(b"x")];
            let socket = here.as_fd().as_raw_fd();
            sendmsg::<UnixAddr>(socket, &data, &rights, MsgFlags::empty(), None)?;
            child.wait(MUST)?;
            peers.b.recv_tid(packet.tid()?).map(drop)
        },
    );
    area.check(
        "exclusive mode: a device that came later belongs to its maker",
        || {
            let _mode = Exclusive::begin()?;
            let pair = RxePair::plain("nn")?;
            pair.a.plug()?;
            let n = pair.a.umad()?;
            Port::open(n)?;
            elsewhere(|| {
                ensure_errno!(Port::open(n), EPERM);
                Ok(())
            })
        },
    );
}

fn open_issm(path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    nix::fcntl::open(
        path,
        OFlag::O_RDWR | OFlag::O_CLOEXEC | flags,
        Mode::empty(),
    )
}

fn issm(area: &mut ktap::Area) {
    area.check("shared mode: issm can be held from every namespace", || {
        let device = Spec::new(Shape::Ca, 1).plug()?;
        let path = device.issm(1)?;
        elsewhere(|| {
            let held = open_issm(&path, OFlag::O_NONBLOCK)?;
            ensure!(device.cap_mask(1)? & IS_SM != 0);
            drop(held);
            ensure!(device.cap_mask(1)? & IS_SM == 0);
            Ok(())
        })
    });
    area.check(
        "exclusive mode: issm from another namespace is EPERM, and nothing is held",
        || {
            let _mode = Exclusive::begin()?;
            let device = Spec::new(Shape::Ca, 1).plug()?;
            let path = device.issm(1)?;
            elsewhere(|| {
                for _ in 0..20 {
                    for flags in [OFlag::empty(), OFlag::O_NONBLOCK] {
                        ensure_errno!(open_issm(&path, flags), EPERM);
                    }
                }
                Ok(())
            })?;
            ensure!(device.cap_mask(1)? & IS_SM == 0);
            open_issm(&path, OFlag::O_NONBLOCK)?;
            Ok(())
        },
    );
    area.check(
        "exclusive mode: issm that is held, from another namespace: the wait comes first",
        || {
            let _mode = Exclusive::begin()?;
            let device = Spec::new(Shape::Ca, 1).plug()?;
            let path = device.issm(1)?;
            fork(|| {
                let held = open_issm(&path, OFlag::O_NONBLOCK)?;
                unshare(CloneFlags::CLONE_NEWNET)?;
                ensure_errno!(open_issm(&path, OFlag::O_NONBLOCK), EAGAIN);
                let waits_for = path.clone();
                let mut waiter = Task::start_asleep(libc::SYS_openat, move || {
                    open_issm(&waits_for, OFlag::empty())
                });
                ensure!(!waiter.within(MUST_NOT), "it did not wait");
                drop(held);
                let got = waiter.result(MUST).and_then(|got| got.as_ref().err());
                ensure_eq!(got.copied(), Some(Errno::EPERM));
                // And the one that was refused holds nothing.
                ensure_errno!(open_issm(&path, OFlag::O_NONBLOCK), EPERM);
                Ok(())
            })?
            .wait(MUST)?;
            ensure!(device.cap_mask(1)? & IS_SM == 0);
            open_issm(&path, OFlag::O_NONBLOCK)?;
            Ok(())
        },
    );
}

fn moved_device(area: &mut ktap::Area) {
    area.check(
        "a device that moves takes its port away from open files",
        || {
            let pair = RxePair::plain("nn")?;
            let _mode = Exclusive::begin()?;
            pair.a.plug()?;
            let n = pair.a.umad()?;
            let port = Port::open(n)?;
            port.register2(&Peers::registration(CLASS))?;
            let _there = Named::new("umad-there")?;
            run("rdma dev set rxe_nn0 netns umad-there")?;
            let mut buffer = [0; PACKET];
            ensure_errno!(port.read(&mut buffer), EIO);
            ensure_errno!(port.register2(&Registration::send_only()), EPIPE);
            Ok(())
        },
    );
    area.check(
        "a device that has moved can be opened there, and not here",
        || {
            let pair = RxePair::plain("nn")?;
            let _mode = Exclusive::begin()?;
            pair.a.plug()?;
            let n = pair.a.umad()?;
            let there = Named::new("umad-there")?;
            there.inside(|| {
                ensure_errno!(Port::open(n), EPERM);
                Ok(())
            })?;
            run("rdma dev set rxe_nn0 netns umad-there")?;
            // It came anew, with the lowest number.
            ensure!(
                umad::port::node(n).exists(),
                "no node for the device that moved"
            );
            ensure_errno!(Port::open(n), EPERM);
            there.inside(|| {
                let port = Port::open(n)?;
                // Soft-RoCE gets no QP 1 in a namespace where its Ethernet device is not, so ib_core
                // has no port for agents; but it is ib_core that says so, not the namespace check.
                ensure_errno!(port.register2(&Peers::registration(CLASS)), ENODEV);
                Ok(())
            })
        },
    );
    area.check("a device comes back when its namespace goes", || {
        let pair = RxePair::plain("nn")?;
        let _mode = Exclusive::begin()?;
        pair.a.plug()?;
        let n = pair.a.umad()?;
        let there = Named::new("umad-there")?;
        run("rdma dev set rxe_nn0 netns umad-there")?;
        ensure_errno!(Port::open(n), EPERM);
        drop(there);
        // The namespace goes in the background.
        wait_until("the device is back", SOON, || Port::open(n).is_ok())
    });
    area.check("shared again: everybody opens every port", || {
        Exclusive::end()?;
        elsewhere(|| Peers::new()?.round_trip(fresh_tid()).map(drop))
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("netns");
    shared_mode(&mut area);
    exclusive_mode(&mut area);
    issm(&mut area);
    moved_device(&mut area);
    Module::run(area)
}
