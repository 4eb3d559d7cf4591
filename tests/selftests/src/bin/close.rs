// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `close`: what ends with the last close of a file, what does not end before it, and what
//! unread packets of an agent that is gone become.

#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use ktap::peers::{CLASS, OUI, QUIET, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use nix::sys::socket::{
    recvmsg, sendmsg, socketpair, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags,
    SockFlag, SockType, UnixAddr,
};
use selftests::task::{Task, MUST};

const PACKET: usize = 64 + 256;

/// A class that only this area's own files register.
const OWN: u8 = 0x44;

/// Whether somebody has the class on the port of `rxe0`.
fn class_taken() -> Outcome<bool> {
    match Port::open(0)?.register2(&Peers::registration(OWN)) {
        Ok(_) => Ok(false),
        Err(e) if e.errno() == Some(Errno::EINVAL) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// An open file of `rxe0` that has the class.
fn owner() -> Outcome<Port> {
    let port = Port::open(0)?;
    port.register2(&Peers::registration(OWN))?;
    ensure!(class_taken()?);
    Ok(port)
}

/// Peers of the own class.
fn peers() -> Outcome<Peers> {
    let registration = Peers::registration(OWN).rmpp(1);
    Peers::with("rxe0", "rxe1", Layout::New, &registration)
}

/// A request that nobody answers, which stays outstanding for a minute.
fn unanswered(peers: &Peers) -> Packet {
    peers
        .a
        .packet(&peers.b, Method::GET, fresh_tid())
        .timeout(Duration::from_secs(60))
}

/// An RMPP message of so many bytes.
fn message(from: &Endpoint, to: &Endpoint, len: usize) -> Packet {
    let mad = VendorMad::new(OWN, OUI, Method::SEND, fresh_tid())
        .rmpp()
        .payload(&vec![0x3c; len]);
    Packet::new(from.agent, &to.address(), mad.into_bytes()).timeout(Duration::from_secs(10))
}

/// Closes a file in a thread, so that a close that hangs is seen.
fn close(file: impl Send + 'static) -> Outcome {
    let mut close = Task::start(move || drop(file));
    ensure!(close.within(MUST), "close() hangs");
    Ok(())
}

/// Another pair of agents on the same ports still works.
fn port_works() -> Outcome {
    Peers::with("rxe0", "rxe1", Layout::New, &Peers::registration(0x45))?
        .round_trip(fresh_tid())
        .map(drop)
}

/// Sends a descriptor through a socket; it stays in the socket until it is received.
fn pass(socket: impl AsFd, port: &Port) -> Outcome {
    let fds = [port.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let data = [IoSlice::new(b"x")];
    let fd = socket.as_fd().as_raw_fd();
    sendmsg::<UnixAddr>(fd, &data, &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// The number of the descriptor that `pass` sent.
fn passed(socket: impl AsFd) -> Outcome<RawFd> {
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let fd = socket.as_fd().as_raw_fd();
    let message = recvmsg::<UnixAddr>(fd, &mut data, Some(&mut space), MsgFlags::empty())?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            if let [fd] = fds[..] {
                return Ok(fd);
            }
        }
    }
    Err("no descriptor came".into())
}

fn last_close(area: &mut ktap::Area) {
    area.check("the class is free as soon as close() returns", || {
        for _ in 0..100 {
            owner()?;
            ensure!(!class_taken()?);
        }
        Ok(())
    });
    area.check("all 32 agents of a file end with it", || {
        let classes: Vec<u8> = (0x09..0x10).chain(0x30..0x49).collect();
        ensure_eq!(classes.len(), 32);
        for _ in 0..3 {
            let port = Port::open(0)?;
            for class in &classes {
                port.register2(&Peers::registration(*class))
                    .what(format!("class {class:#x}"))?;
            }
        }
        Ok(())
    });
    area.check(
        "dup(): the file lives until the last descriptor is closed",
        || {
            let port = owner()?;
            let copy = nix::unistd::dup(&port)?;
            drop(port);
            ensure!(class_taken()?, "the agent ended with the first close");
            drop(copy);
            ensure!(!class_taken()?);
            Ok(())
        },
    );
    area.check(
        "dup(): the second descriptor goes on with the same agents",
        || {
            let Peers { a, b } = peers()?;
            let copy = Port::from_fd(nix::unistd::dup(&a.port)?);
            let packet = a.packet(&b, Method::SEND, fresh_tid());
            drop(a.port);
            ensure_eq!(copy.write(&packet.to_bytes(Layout::New))?, PACKET);
            b.recv_tid(packet.tid()?)?;
            Ok(())
        },
    );
    area.check(
        "fork(): the child keeps the file alive, its end frees it",
        || {
            let port = owner()?;
            let mut child = fork(|| {
                // Until it is killed.
                std::thread::sleep(MUST);
                Ok(())
            })?;
            drop(port);
            ensure!(class_taken()?, "the agent ended with the parent's close");
            child.kill(MUST)?;
            ensure!(!class_taken()?);
            Ok(())
        },
    );
    area.check("fork(): parent and child send by the same agent", || {
        let peers = peers()?;
        let tids = [fresh_tid(), fresh_tid()];
        fork(|| {
            let packet = peers.a.packet(&peers.b, Method::SEND, tids[0]);
            Ok(peers.a.port.send(&packet)?)
        })?
        .wait(MUST)?;
        let packet = peers.a.packet(&peers.b, Method::SEND, tids[1]);
        peers.a.port.send(&packet)?;
        for tid in tids {
            ensure_eq!(peers.b.recv()?.tid()?.low(), tid.low());
        }
        Ok(())
    });
    area.check(
        "SCM_RIGHTS: a descriptor on its way keeps the file alive",
        || {
            let none = SockFlag::SOCK_CLOEXEC;
            let (here, there) = socketpair(AddressFamily::Unix, SockType::Stream, None, none)?;
            let port = owner()?;
            pass(&here, &port)?;
            drop(port);
            ensure!(class_taken()?, "the agent ended with the sender's close");
            // Never received: it goes with the socket.
            drop(there);
            ensure!(!class_taken()?);
            Ok(())
        },
    );
    area.check(
        "SCM_RIGHTS: the receiver sends by the sender's agent, and gets its answer",
        || {
            let none = SockFlag::empty();
            let (here, there) = socketpair(AddressFamily::Unix, SockType::Stream, None, none)?;
            let Peers { a, b } = peers()?;
            let tid = fresh_tid();
            let request = a.packet(&b, Method::GET, tid).timeout(SOON);
            pass(&here, &a.port)?;
            drop(a.port);
            let mut child = fork(|| {
                let fd = passed(&there)?;
                let port = selftests::calls::adopt(fd)?;
                ensure_eq!(
                    nix::unistd::write(&port, &request.to_bytes(Layout::New))?,
                    PACKET
                );
                let mut buffer = [0; PACKET];
                ensure_eq!(nix::unistd::read(&port, &mut buffer)?, PACKET);
                let answer = Packet::from_bytes(&buffer, Layout::New)?;
                ensure_eq!((answer.tid()?.low(), answer.header.status), (tid.low(), 0));
                Ok(())
            })?;
            let got = b.recv_tid(tid)?;
            b.port.send(&b.response(&got)?)?;
            child.wait(MUST)
        },
    );
    area.check(
        "a blocked read() keeps the file alive over the close of its descriptor",
        || {
            let Peers { a, b } = peers()?;
            let packet = a.packet(&b, Method::SEND, fresh_tid());
            // The thread reads by number, as a program does that forgets who else uses it.
            let reading = b.port.as_raw_fd();
            let fd: OwnedFd = b.port.into();
            let mut read = Task::start_asleep(libc::SYS_read, move || {
                selftests::calls::read_by_number(reading, PACKET)
            });
            drop(fd);
            ensure!(!read.within(QUIET), "it ended: {:?}", read.result(QUIET));
            a.port.send(&packet)?;
            ensure!(matches!(read.result(MUST), Some(Ok(bytes)) if bytes.len() == PACKET));
            Ok(())
        },
    );
}

fn busy_close(area: &mut ktap::Area) {
    area.check("with 200 requests outstanding", || {
        let peers = peers()?;
        for _ in 0..200 {
            peers.a.port.send(&unanswered(&peers))?;
        }
        close(peers.a.port)?;
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("while MADs are on their way out", || {
        for _ in 0..20 {
            let Peers { a, b } = peers()?;
            for _ in 0..30 {
                a.port.send(&a.packet(&b, Method::SEND, fresh_tid()))?;
            }
            close(a.port)?;
            ensure!(!class_taken()?);
        }
        port_works()
    });
    area.check("with unread packets and messages", || {
        let peers = peers()?;
        for _ in 0..100 {
            let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
            peers.b.port.send(&packet)?;
        }
        peers.b.port.send(&message(&peers.b, &peers.a, 100_000))?;
        peers.b.port.send(&message(&peers.b, &peers.a, 1000))?;
        peers.a.port.poll(PollFlags::POLLIN, SOON)?;
        close(peers.a.port)?;
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("with unread timeouts", || {
        let peers = peers()?;
        for _ in 0..50 {
            let request = unanswered(&peers).timeout(Duration::from_millis(20));
            peers.a.port.send(&request)?;
        }
        peers.a.port.poll(PollFlags::POLLIN, SOON)?;
        close(peers.a.port)?;
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("while requests time out", || {
        for n in 0..20u64 {
            let peers = peers()?;
            for _ in 0..30 {
                let request = unanswered(&peers).timeout(Duration::from_millis(20));
                peers.a.port.send(&request)?;
            }
            // From before the first timeout to after the last.
            std::thread::sleep(Duration::from_millis(5 + n * 2));
            close(peers.a.port)?;
        }
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("while answers arrive", || {
        for _ in 0..10 {
            let Peers { a, b } = peers()?;
            for _ in 0..20 {
                let request = a.packet(&b, Method::GET, fresh_tid());
                a.port.send(&request.timeout(SOON))?;
            }
            for _ in 0..20 {
                let request = b.recv()?;
                b.port.send(&b.response(&request)?)?;
            }
            close(a.port)?;
        }
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("of the sender while a long message is on its way", || {
        for _ in 0..5 {
            let Peers { a, b } = peers()?;
            a.port.send(&message(&a, &b, 500_000))?;
            close(a.port)?;
            close(b.port)?;
        }
        ensure!(!class_taken()?);
        port_works()
    });
    area.check("of the receiver while a long message is on its way", || {
        for n in 0..5u64 {
            let Peers { a, b } = peers()?;
            b.port.send(&message(&b, &a, 500_000))?;
            std::thread::sleep(Duration::from_millis(n * 5));
            close(a.port)?;
            close(b.port)?;
        }
        ensure!(!class_taken()?);
        port_works()
    });
    area.check(
        "a late answer is nobody's, also when the class has a new agent",
        || {
            let Peers { a, b } = peers()?;
            let request = a.packet(&b, Method::GET, fresh_tid());
            a.port.send(&request.timeout(SOON))?;
            let got = b.recv()?;
            drop(a.port);
            let next = owner()?;
            b.port.send(&b.response(&got)?)?;
            let came = next.poll(PollFlags::POLLIN, QUIET)?;
            ensure!(came.is_empty(), "it came to the next agent of the class");
            Ok(())
        },
    );
    area.check("SIGKILL in the middle of everything", || {
        let peers = peers()?;
        let flood = || -> Outcome {
            loop {
                peers
                    .a
                    .port
                    .send(&unanswered(&peers).timeout(Duration::from_millis(20)))?;
                let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
                peers.b.port.send(&packet)?;
            }
        };
        let mut child = fork(flood)?;
        peers.b.port.poll(PollFlags::POLLIN, SOON)?;
        drop(peers);
        child.kill(MUST)?;
        ensure!(!class_taken()?, "an agent outlived its process");
        port_works()
    });
    area.check(
        "100 files of a port are open at once, and all close",
        || {
            let mut files = Vec::new();
            for _ in 0..100 {
                let port = Port::open(0)?;
                port.register2(&Registration::send_only())?;
                files.push(port);
            }
            close(files)?;
            port_works()
        },
    );
}

/// Peers with `count` unread packets at agent 0 of `b`.
fn unread(count: usize) -> Outcome<(Peers, Vec<u32>)> {
    let peers = peers()?;
    let mut tids = Vec::new();
    for _ in 0..count {
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        tids.push(packet.tid()?.low());
    }
    // Packets of a port stay in order: when a later one has come, all others are there.
    Peers::with("rxe0", "rxe1", Layout::New, &Peers::registration(0x45))?.deliver(fresh_tid())?;
    Ok((peers, tids))
}

fn unread_packets(area: &mut ktap::Area) {
    area.check(
        "unread packets of an unregistered agent stay readable",
        || {
            let (peers, tids) = unread(3)?;
            peers.b.port.unregister(AgentId(0))?;
            ensure_eq!(
                peers.b.port.poll(PollFlags::POLLIN, Duration::ZERO)?,
                PollFlags::POLLIN
            );
            for tid in tids {
                let got = peers.b.recv()?;
                ensure_eq!((got.tid()?.low(), got.agent), (tid, AgentId(0)));
            }
            ensure!(peers
                .b
                .port
                .poll(PollFlags::POLLIN, Duration::ZERO)?
                .is_empty());
            Ok(())
        },
    );
    area.check("an unregistered agent gets nothing more", || {
        let (peers, tids) = unread(1)?;
        peers.b.port.unregister(AgentId(0))?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        ensure_eq!(peers.b.recv()?.tid()?.low(), tids[0]);
        peers.b.nothing_comes()
    });
    area.check("they are dropped when the id is given out again", || {
        let (peers, _) = unread(3)?;
        peers.b.port.unregister(AgentId(0))?;
        let agent = peers.b.port.register2(&Peers::registration(CLASS))?;
        ensure_eq!(agent, AgentId(0));
        let events = peers.b.port.poll(PollFlags::POLLIN, Duration::ZERO)?;
        ensure!(events.is_empty(), "agent 0 has its predecessor's packets");
        Ok(())
    })
    .improvement(6);
    area.check("the first packet of an id's new agent is its own", || {
        let (peers, _) = unread(3)?;
        peers.b.port.unregister(AgentId(0))?;
        peers.b.port.register2(&Peers::registration(CLASS))?;
        let tid = fresh_tid();
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, tid).into_bytes();
        let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
        peers.a.port.send(&packet)?;
        let got = peers.b.recv()?;
        ensure_eq!(got.tid()?.low(), tid.low());
        ensure_eq!(got.mad_header()?.mgmt_class, CLASS);
        Ok(())
    })
    .improvement(6);
    area.check("unread timeouts are dropped with the id, too", || {
        let peers = peers()?;
        for _ in 0..3 {
            let request = unanswered(&peers).timeout(Duration::from_millis(20));
            peers.a.port.send(&request)?;
        }
        // All have timed out when one that was sent later, and waits longer, has.
        let other = Peers::new()?;
        let later = other.a.packet(&other.b, Method::GET, fresh_tid());
        other
            .a
            .port
            .send(&later.timeout(Duration::from_millis(200)))?;
        other.a.recv()?;
        peers.a.port.unregister(AgentId(0))?;
        peers.a.port.register2(&Registration::send_only())?;
        let events = peers.a.port.poll(PollFlags::POLLIN, Duration::ZERO)?;
        ensure!(events.is_empty(), "agent 0 has its predecessor's timeouts");
        Ok(())
    })
    .improvement(6);
    area.check(
        "packets of the other agents stay when an id is given out again",
        || {
            let (peers, tids) = unread(2)?;
            let one = peers.b.port.register2(&Registration::send_only())?;
            peers.b.port.unregister(one)?;
            ensure_eq!(peers.b.port.register2(&Registration::send_only())?, one);
            for tid in tids {
                ensure_eq!(peers.b.recv()?.tid()?.low(), tid);
            }
            Ok(())
        },
    );
    area.check("a registration that fails drops nothing", || {
        let (peers, tids) = unread(2)?;
        peers.b.port.unregister(AgentId(0))?;
        let bad = peers.b.port.register2(&Registration::send_only().qpn(2));
        ensure_errno!(bad, EINVAL);
        let taken = Port::open(1)?;
        taken.register2(&Peers::registration(CLASS))?;
        let bad = peers.b.port.register2(&Peers::registration(CLASS));
        ensure_errno!(bad, EINVAL);
        for tid in tids {
            ensure_eq!(peers.b.recv()?.tid()?.low(), tid);
        }
        Ok(())
    });
    area.check(
        "requests outstanding at UNREGISTER_AGENT end without a packet",
        || {
            let peers = peers()?;
            let port = Arc::new(peers.a.port);
            let to = peers.b.address();
            for _ in 0..20 {
                let mad = VendorMad::new(OWN, OUI, Method::GET, fresh_tid()).into_bytes();
                let request = Packet::new(AgentId(0), &to, mad);
                port.send(&request.timeout(Duration::from_millis(300)))?;
            }
            port.unregister(AgentId(0))?;
            // Twice the timeout; nothing tells that no packet comes.
            let events = port.poll(PollFlags::POLLIN, Duration::from_millis(600))?;
            ensure!(events.is_empty(), "a packet came: {:?}", port.recv());
            Ok(())
        },
    );
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("close");
    last_close(&mut area);
    busy_close(&mut area);
    unread_packets(&mut area);
    area.run()
}
