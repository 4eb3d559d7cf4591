// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `poll`: poll(), select() and epoll on a port.

#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::Arc;

use ktap::peers::{CLASS, QUIET, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::select::{select, FdSet};
use nix::sys::time::{TimeVal, TimeValLike};
use selftests::task::{Task, MUST, NEVER};

/// What a file can show at all, of what is asked for.
fn all() -> PollFlags {
    PollFlags::POLLIN
        | PollFlags::POLLRDNORM
        | PollFlags::POLLOUT
        | PollFlags::POLLWRNORM
        | PollFlags::POLLPRI
        | PollFlags::POLLRDBAND
        | PollFlags::POLLWRBAND
}

fn writable() -> PollFlags {
    PollFlags::POLLOUT | PollFlags::POLLWRNORM
}

fn readable() -> PollFlags {
    PollFlags::POLLIN | PollFlags::POLLRDNORM
}

/// The events of a file right now.
fn now(port: &Port) -> Outcome<PollFlags> {
    Ok(port.poll(all(), Duration::ZERO)?)
}

/// Sends `count` MADs from `a` to `b` and waits until the first can be read.
fn queue(peers: &Peers, count: usize) -> Outcome {
    for _ in 0..count {
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
    }
    let events = peers.b.port.poll(PollFlags::POLLIN, SOON)?;
    ensure!(
        events.contains(PollFlags::POLLIN),
        "nothing came: {events:?}"
    );
    Ok(())
}

/// A poll() that sleeps in a thread.
fn sleeper(port: &Arc<Port>, events: PollFlags) -> Task<umad::Result<PollFlags>> {
    let port = Arc::clone(port);
    Task::start_asleep(libc::SYS_poll, move || port.poll(events, NEVER))
}

fn state_checks(area: &mut ktap::Area) {
    area.check("a fresh file can be written and not read", || {
        for layout in [Layout::Old, Layout::New] {
            let port = Port::options().layout(layout).open(0)?;
            ensure_eq!(now(&port)?, writable());
        }
        Ok(())
    });
    area.check(
        "a waiting packet makes it readable, and it stays writable",
        || {
            let peers = Peers::new()?;
            queue(&peers, 1)?;
            ensure_eq!(now(&peers.b.port)?, readable() | writable());
            Ok(())
        },
    );
    area.check("the sender is not readable for what it sent", || {
        let peers = Peers::new()?;
        queue(&peers, 1)?;
        ensure_eq!(now(&peers.a.port)?, writable());
        Ok(())
    });
    area.check(
        "readable is a level: it lasts until the last packet is read",
        || {
            let peers = Peers::new()?;
            queue(&peers, 3)?;
            // Packets of a port stay in order: when a later one has come, all others are there.
            let registration = Peers::registration(0x31);
            Peers::with("rxe0", "rxe1", Layout::New, &registration)?.deliver(fresh_tid())?;
            for _ in 0..3 {
                ensure_eq!(now(&peers.b.port)?, readable() | writable());
                peers.b.port.recv()?;
            }
            ensure_eq!(now(&peers.b.port)?, writable());
            Ok(())
        },
    );
    area.check("polling takes nothing away", || {
        let peers = Peers::new()?;
        queue(&peers, 1)?;
        for _ in 0..100 {
            ensure_eq!(now(&peers.b.port)?, readable() | writable());
        }
        peers.b.recv()?;
        Ok(())
    });
    area.check("only what is asked for is told", || {
        let peers = Peers::new()?;
        queue(&peers, 1)?;
        let port = &peers.b.port;
        for asked in [
            PollFlags::POLLIN,
            PollFlags::POLLRDNORM,
            PollFlags::POLLOUT,
            PollFlags::POLLWRNORM,
        ] {
            ensure_eq!(port.poll(asked, Duration::ZERO)?, asked);
        }
        ensure_eq!(
            port.poll(PollFlags::POLLPRI, Duration::ZERO)?,
            PollFlags::empty()
        );
        Ok(())
    });
    area.check("a packet for another file of the port is not shown", || {
        let peers = Peers::new()?;
        let other = Port::open(1)?;
        queue(&peers, 1)?;
        ensure_eq!(now(&other)?, writable());
        Ok(())
    });
    area.check("writable also with many sends outstanding", || {
        let peers = Peers::new()?;
        // Requests that nobody answers: the peer's agent gets them and is silent.
        for _ in 0..200 {
            let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
            peers
                .a
                .port
                .send(&request.timeout(Duration::from_secs(60)))?;
        }
        ensure_eq!(now(&peers.a.port)?, writable());
        Ok(())
    });
    area.check("a timeout packet makes it readable", || {
        let peers = Peers::new()?;
        let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
        peers
            .a
            .port
            .send(&request.timeout(Duration::from_millis(50)))?;
        let events = peers.a.port.poll(all() - writable(), SOON)?;
        ensure_eq!(events, readable());
        ensure_eq!(now(&peers.a.port)?, readable() | writable());
        Ok(())
    });
    area.check(
        "a packet that a failing read put back is still shown",
        || {
            let peers = Peers::new()?;
            queue(&peers, 1)?;
            let mut short = [0; 64 + 255];
            for _ in 0..3 {
                ensure_errno!(peers.b.port.read(&mut short), EINVAL);
                ensure_eq!(now(&peers.b.port)?, readable() | writable());
            }
            peers.b.recv()?;
            ensure_eq!(now(&peers.b.port)?, writable());
            Ok(())
        },
    );
    area.check(
        "a message that was too long for a read is still shown",
        || {
            let registration = Peers::registration(CLASS).rmpp(1);
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
            let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid())
                .rmpp()
                .payload(&[7; 1000])
                .into_bytes();
            let message = Packet::new(peers.a.agent, &peers.b.address(), mad);
            // A kernel RMPP sender waits for acknowledgements only if it has a timeout.
            peers
                .a
                .port
                .send(&message.timeout(Duration::from_secs(5)))?;
            peers.b.port.poll(PollFlags::POLLIN, SOON)?;
            let mut small = [0; 64 + 256];
            ensure_errno!(peers.b.port.read(&mut small), ENOSPC);
            ensure_eq!(now(&peers.b.port)?, readable() | writable());
            ensure!(peers.b.recv()?.mad.len() >= 1040);
            ensure_eq!(now(&peers.b.port)?, writable());
            Ok(())
        },
    );
}

fn sleep_checks(area: &mut ktap::Area) {
    area.check("poll() without packets ends with its timeout", || {
        let peers = Peers::new()?;
        let start = Instant::now();
        let events = peers.b.port.poll(readable(), Duration::from_millis(100))?;
        ensure_eq!(events, PollFlags::empty());
        ensure!(start.elapsed() >= Duration::from_millis(100));
        Ok(())
    });
    area.check("a sleeping poll() is woken by a packet", || {
        let peers = Peers::new()?;
        let port = Arc::new(peers.b.port);
        let mut poll = sleeper(&port, readable());
        ensure!(!poll.within(QUIET), "it did not sleep");
        let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid());
        let to = Address::roce(peers.b.gid, 0);
        peers
            .a
            .port
            .send(&Packet::new(peers.a.agent, &to, mad.into_bytes()))?;
        match poll.result(MUST) {
            Some(Ok(events)) => ensure_eq!(*events, readable()),
            other => ensure!(false, "{other:?}"),
        }
        Ok(())
    });
    area.check("all pollers of a file are woken by one packet", || {
        let Peers { a, b } = Peers::new()?;
        let port = Arc::new(b.port);
        let mut polls: Vec<_> = (0..4).map(|_| sleeper(&port, readable())).collect();
        let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid());
        let to = Address::roce(b.gid, 0);
        a.port.send(&Packet::new(a.agent, &to, mad.into_bytes()))?;
        for poll in &mut polls {
            match poll.result(MUST) {
                Some(Ok(events)) => ensure_eq!(*events, readable()),
                other => ensure!(false, "{other:?}"),
            }
        }
        Ok(())
    });
    area.check(
        "a poller and a blocked reader are woken by the same packet",
        || {
            let Peers { a, b } = Peers::new()?;
            let port = Arc::new(b.port);
            let mut poll = sleeper(&port, readable());
            let reading = Arc::clone(&port);
            let mut read = Task::start_asleep(libc::SYS_read, move || {
                let mut buffer = [0; 320];
                reading.read(&mut buffer)
            });
            let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid());
            let to = Address::roce(b.gid, 0);
            a.port.send(&Packet::new(a.agent, &to, mad.into_bytes()))?;
            ensure!(matches!(read.result(MUST), Some(Ok(320))));
            // The reader may have been faster; then the poller goes on sleeping until the next packet.
            if !poll.within(QUIET) {
                let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid());
                a.port.send(&Packet::new(a.agent, &to, mad.into_bytes()))?;
            }
            ensure!(matches!(poll.result(MUST), Some(Ok(events)) if *events == readable()));
            Ok(())
        },
    );
    area.check("a sleeping poll() is not woken by a send", || {
        let Peers { a, b } = Peers::new()?;
        let port = Arc::new(a.port);
        let mut poll = sleeper(&port, readable());
        let mad = VendorMad::new(CLASS, ktap::peers::OUI, Method::SEND, fresh_tid());
        let to = Address::roce(b.gid, 0);
        port.send(&Packet::new(a.agent, &to, mad.into_bytes()))?;
        b.port.recv_timeout(SOON)?;
        // Nothing shall happen: there is no event to wait for, hence a bound.
        ensure!(!poll.within(QUIET), "it ended: {:?}", poll.result(QUIET));
        Ok(())
    });
    area.check("select() tells readable and writable", || {
        let peers = Peers::new()?;
        let look = |port: &Port, millis| -> Outcome<(bool, bool, bool)> {
            let mut reads = FdSet::new();
            reads.insert(port.as_fd());
            let mut writes = reads;
            let mut excepts = reads;
            let mut bound = TimeVal::milliseconds(millis);
            select(None, &mut reads, &mut writes, &mut excepts, &mut bound)?;
            let fd = port.as_fd();
            Ok((
                reads.contains(fd),
                writes.contains(fd),
                excepts.contains(fd),
            ))
        };
        ensure_eq!(look(&peers.b.port, 0)?, (false, true, false));
        queue(&peers, 1)?;
        ensure_eq!(look(&peers.b.port, 0)?, (true, true, false));
        peers.b.recv()?;
        ensure_eq!(look(&peers.b.port, 0)?, (false, true, false));
        Ok(())
    });
}

fn epoll_checks(area: &mut ktap::Area) {
    let flags = |events: &[EpollEvent]| events.iter().map(EpollEvent::events).collect::<Vec<_>>();
    area.check(
        "epoll, level-triggered, tells again until all is read",
        move || {
            let peers = Peers::new()?;
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            epoll.add(&peers.b.port, EpollEvent::new(EpollFlags::EPOLLIN, 7))?;
            let mut events = [EpollEvent::empty(); 4];
            ensure_eq!(epoll.wait(&mut events, 0u8)?, 0);
            queue(&peers, 2)?;
            for _ in 0..3 {
                ensure_eq!(epoll.wait(&mut events, 20_000u16)?, 1);
                ensure_eq!(flags(&events[..1]), [EpollFlags::EPOLLIN]);
                ensure_eq!(events[0].data(), 7);
            }
            peers.b.recv()?;
            ensure_eq!(epoll.wait(&mut events, 20_000u16)?, 1);
            peers.b.recv()?;
            ensure_eq!(epoll.wait(&mut events, 0u8)?, 0);
            Ok(())
        },
    );
    area.check(
        "epoll, edge-triggered, tells once for each arrival",
        move || {
            let peers = Peers::new()?;
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            let want = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            epoll.add(&peers.b.port, EpollEvent::new(want, 1))?;
            let mut events = [EpollEvent::empty(); 4];
            for _ in 0..3 {
                queue(&peers, 1)?;
                ensure_eq!(epoll.wait(&mut events, 20_000u16)?, 1);
                ensure_eq!(flags(&events[..1]), [EpollFlags::EPOLLIN]);
                // The packets of before are still unread, but there is no new one.
                ensure_eq!(
                    epoll.wait(&mut events, 100u8)?,
                    0,
                    "an edge without an arrival"
                );
            }
            for _ in 0..3 {
                peers.b.recv()?;
            }
            ensure_eq!(epoll.wait(&mut events, 0u8)?, 0, "an edge of a read");
            queue(&peers, 1)?;
            ensure_eq!(epoll.wait(&mut events, 20_000u16)?, 1);
            Ok(())
        },
    );
    area.check(
        "epoll wakes a sleeper, and a packet that waits at EPOLL_CTL_ADD is told",
        move || {
            let peers = Peers::new()?;
            queue(&peers, 1)?;
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            let want = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            epoll.add(&peers.b.port, EpollEvent::new(want, 1))?;
            let mut wait = Task::start(move || {
                let mut events = [EpollEvent::empty(); 4];
                let first = epoll.wait(&mut events, 20_000u16);
                let second = epoll.wait(&mut events, 20_000u16);
                (first, second)
            });
            ensure!(!wait.within(QUIET), "the second wait found something");
            queue(&peers, 1)?;
            ensure_eq!(wait.result(MUST), Some(&(Ok(1), Ok(1))));
            Ok(())
        },
    );
    area.check("a file that is closed leaves its epoll", || {
        let peers = Peers::new()?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&peers.b.port, EpollEvent::new(EpollFlags::EPOLLIN, 1))?;
        queue(&peers, 1)?;
        drop(peers);
        let mut events = [EpollEvent::empty(); 4];
        ensure_eq!(epoll.wait(&mut events, 0u8)?, 0);
        Ok(())
    });
}

fn unplug_checks(area: &mut ktap::Area) {
    area.check(
        "after the unplug poll() shows POLLERR and nothing else",
        || {
            let pair = RxePair::new("po")?;
            let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
            queue(&peers, 1)?;
            let fresh = Port::open(peers.b.umad)?;
            pair.b.unplug()?;
            // A packet is still queued, and it does not count any more.
            for port in [&peers.b.port, &fresh] {
                ensure_eq!(now(port)?, PollFlags::POLLERR);
                ensure_eq!(port.poll(PollFlags::empty(), SOON)?, PollFlags::POLLERR);
            }
            ensure_eq!(now(&peers.a.port)?, writable(), "the other port");
            Ok(())
        },
    );
    area.check(
        "a sleeping poll() is woken by the unplug with POLLERR",
        || {
            let pair = RxePair::new("po")?;
            let port = Arc::new(Port::open(pair.a.umad()?)?);
            let mut poll = sleeper(&port, readable());
            pair.a.unplug()?;
            ensure_eq!(poll.result(MUST), Some(&Ok(PollFlags::POLLERR)));
            Ok(())
        },
    );
    area.check("epoll and select() tell of the unplug", || {
        let pair = RxePair::new("po")?;
        let port = Port::open(pair.a.umad()?)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let want = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(&port, EpollEvent::new(want, 1))?;
        pair.a.unplug()?;
        let mut events = [EpollEvent::empty(); 4];
        ensure_eq!(epoll.wait(&mut events, 20_000u16)?, 1);
        ensure_eq!(events[0].events(), EpollFlags::EPOLLERR);
        let mut reads = FdSet::new();
        reads.insert(port.as_fd());
        let mut bound = TimeVal::seconds(20);
        // An error counts as readable: the read() that follows tells it.
        ensure_eq!(select(None, &mut reads, None, None, &mut bound)?, 1);
        let mut buffer = [0; 320];
        ensure_errno!(port.read(&mut buffer), EIO);
        Ok(())
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("poll");
    state_checks(&mut area);
    sleep_checks(&mut area);
    epoll_checks(&mut area);
    unplug_checks(&mut area);
    area.run()
}
