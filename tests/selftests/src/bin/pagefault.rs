// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `pagefault`: a call that is stuck in a page fault of its user memory, for as long as that
//! user likes, disturbs nobody else; and what a read() that fails in its copy leaves behind.
//!
//! A probe that must succeed has a bound: on a module where it hangs, the page is delivered after
//! it, so that everything ends.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ktap::peers::{CLASS, OUI, QUIET, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use selftests::figure::{figure, figure_time};
use selftests::stuck::{
    scene, Header, Mad, Place, Register, Register2, Rmpp, Scene, Stuck, Unregister, WriteBack,
    WriteBack2, OTHER, WANTED,
};
use selftests::task::{Task, MUST};
use selftests::uffd::{Region, PAGE};

/// Bytes of a header and a MAD in the new layout.
const PACKET: usize = 64 + 256;

/// How long a probe may take that needs nothing but a system call or a round trip.
const PROBE: Duration = Duration::from_secs(3);

/// How long an unplug may take: it waits for grace periods, and for commands to start.
const UNPLUG: Duration = Duration::from_secs(5);

/// Makes the call get stuck, runs `probe` in a thread, releases the page, and only then judges.
fn while_stuck<T: Send + 'static>(
    place: Place,
    scene: &Scene,
    what: &str,
    probe: impl FnOnce() -> Outcome<T> + Send + 'static,
) -> Outcome<T> {
    let mut stuck = Stuck::at(place, scene)?;
    let mut task = Task::start(probe);
    let in_time = task.within(PROBE);
    let result = stuck.release()?;
    ensure!(
        task.within(MUST),
        "{what} hangs even when the page is there"
    );
    ensure!(in_time, "{what} waits for the other's page");
    let Some(outcome) = task.stop() else {
        return Err("a thread hangs".into());
    };
    let outcome = outcome.what(what)?;
    if let Err(e) = result {
        return Err(format!("the stuck call failed: {e}").into());
    }
    Ok(outcome)
}

fn peers_scene() -> Outcome<Scene> {
    scene("rxe0", "rxe1")
}

fn open_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    while_stuck(place, &scene, "open()", || Ok(Port::open(0).map(drop)?))
}

fn close_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let port = Port::open(0)?;
    port.register2(&Peers::registration(0x42))?;
    while_stuck(place, &scene, "close() of another file", move || {
        drop(port);
        Ok(())
    })
}

fn register_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let port = Port::open(0)?;
    while_stuck(place, &scene, "registering on another file", move || {
        let agent = port.register2(&Peers::registration(0x42))?;
        Ok(port.unregister(agent)?)
    })
}

fn poll_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let file = Arc::clone(&scene.a);
    let events = while_stuck(place, &scene, "poll() of the file", move || {
        Ok(file
            .port
            .poll(PollFlags::POLLIN | PollFlags::POLLOUT, Duration::ZERO)?)
    })?;
    ensure_eq!(events, PollFlags::POLLOUT);
    Ok(())
}

fn read_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let tid = fresh_tid();
    scene
        .b
        .port
        .send(&scene.b.packet(&scene.a, Method::SEND, tid))?;
    scene.a.port.poll(PollFlags::POLLIN, SOON)?;
    let file = Arc::clone(&scene.a);
    let got = while_stuck(place, &scene, "read() of the file", move || {
        Ok(file.port.recv()?)
    })?;
    ensure_eq!(got.tid()?.low(), tid.low());
    Ok(())
}

fn write_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let tid = fresh_tid();
    let packet = scene.a.packet(&scene.b, Method::SEND, tid);
    let file = Arc::clone(&scene.a);
    let peer = Arc::clone(&scene.b);
    while_stuck(place, &scene, "write() by another thread", move || {
        file.port.send(&packet)?;
        peer.recv_tid(tid)?;
        Ok(())
    })
}

fn traffic_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let other = Arc::clone(&scene.other);
    while_stuck(place, &scene, "a round trip on another file", move || {
        other.round_trip(fresh_tid()).map(drop)
    })
}

fn arrival_probe(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let tid = fresh_tid();
    let mad = scene.b.packet(&scene.a, Method::SEND, tid);
    let (other, peer) = (Arc::clone(&scene.other), Arc::clone(&scene.b));
    let what = "receiving on another file, behind a MAD for the stuck one,";
    while_stuck(place, &scene, what, move || {
        peer.port.send(&mad)?;
        other.round_trip(fresh_tid()).map(drop)
    })?;
    // The MAD for the stuck file was not lost.
    scene.a.recv_tid(tid)?;
    Ok(())
}

/// The unplug returns while the call is stuck; the call then fails as on any port that is gone.
fn unplug_probe(place: Place) -> Outcome {
    let pair = RxePair::new("pf")?;
    let scene = scene(&pair.a.ibdev, &pair.b.ibdev)?;
    let mut stuck = Stuck::at(place, &scene)?;
    let port = pair.a.clone();
    let mut unplug = Task::start(move || port.unplug());
    let begin = Instant::now();
    let in_time = unplug.within(UNPLUG);
    let what = format!("unplug, {}", place.name());
    match in_time {
        true => figure_time(&what, begin.elapsed()),
        false => figure(&what, format_args!(">{}", UNPLUG.as_millis()), "ms"),
    }
    let result = stuck.release()?;
    ensure!(
        unplug.within(MUST),
        "the unplug hangs even when the page is there"
    );
    ensure!(in_time, "the unplug waits for the page");
    if let Some(outcome) = unplug.stop() {
        outcome?;
    }
    match (place, result) {
        (Header | Mad | Rmpp, result) => ensure_errno!(result, EIO),
        (Register | Register2, result) => ensure_errno!(result, EPIPE),
        (Unregister, result) => ensure_errno!(result, EINVAL),
        // The agent may have been there for the moment before the unplug.
        (WriteBack | WriteBack2, Ok(_)) => {}
        (WriteBack | WriteBack2, result) => ensure_errno!(result, EPIPE),
    }
    let events = scene.a.port.poll(PollFlags::POLLIN, Duration::ZERO)?;
    ensure_eq!(events, PollFlags::POLLERR);
    Ok(())
}

/// The page arrives late, and the call does what it always does.
fn late_page(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let mut stuck = Stuck::at(place, &scene)?;
    // Nothing shall happen: there is no event to wait for, hence a bound.
    ensure!(!stuck.call.within(QUIET), "it did not wait for the page");
    let n = stuck.release()??;
    match place {
        Header | Mad | Rmpp => {
            ensure_eq!(n, 64 + stuck.mad.len(), "bytes written");
            let got = scene.b.recv()?;
            // RMPP fills the last segment up.
            ensure!(got.mad.len() >= stuck.mad.len(), "{} bytes", got.mad.len());
            ensure_eq!(got.mad[36..stuck.mad.len()], stuck.mad[36..]);
        }
        Register | Register2 | WriteBack | WriteBack2 => {
            let id = stuck.region.bytes(PAGE, 4);
            ensure_eq!(id, 2u32.to_ne_bytes(), "the id that was written");
            let again = scene.b.port.register2(&Peers::registration(WANTED));
            ensure!(again.is_ok(), "the other port is another matter");
            let port = Port::open(0)?;
            ensure_errno!(port.register2(&Peers::registration(WANTED)), EINVAL);
            scene.a.port.unregister(AgentId(2))?;
            port.register2(&Peers::registration(WANTED))?;
        }
        Unregister => {
            ensure_errno!(scene.a.port.unregister(AgentId(1)), EINVAL);
            scene.a.port.unregister(AgentId(0))?;
        }
    }
    Ok(())
}

/// The page is taken away instead: EFAULT, and nothing stays behind.
fn page_gone(place: Place) -> Outcome {
    let scene = peers_scene()?;
    let mut stuck = Stuck::at(place, &scene)?;
    stuck.region.revoke()?;
    match stuck.call.result(MUST) {
        Some(Err(e)) => ensure_eq!(e.raw_os_error(), Some(libc::EFAULT)),
        other => ensure!(false, "{other:?}"),
    }
    if place.is_write() {
        scene.b.nothing_comes()?;
    } else {
        // Neither the id nor the class is taken; the agent to unregister still is there.
        let agent = scene.a.port.register2(&Peers::registration(WANTED))?;
        ensure_eq!(agent, AgentId(2));
        scene.a.port.unregister(AgentId(1))?;
    }
    scene.other.round_trip(fresh_tid()).map(drop)
}

type Probe = fn(Place) -> Outcome;

/// Adds a check for a place; where the C module holds a lock, it is an improvement.
fn isolation(area: &mut ktap::Area, place: Place, what: &str, probe: Probe, c_holds: bool) {
    let name = format!("{}: {what}", place.name());
    let check = area.check(name, move || probe(place));
    if c_holds && !place.lockless_in_c() {
        check.improvement(4);
    }
}

fn isolation_checks(area: &mut ktap::Area) {
    let all = [
        Header, Mad, Rmpp, Register, Register2, WriteBack, WriteBack2, Unregister,
    ];
    for place in all {
        isolation(area, place, "poll() of the file returns", poll_probe, true);
        // REGISTER_AGENT2 writes its id back as REGISTER_AGENT does; once is enough.
        if place != WriteBack2 {
            isolation(area, place, "unplug returns", unplug_probe, true);
            // In C a write() holds the lock of its file only, an ioctl that of the port too.
            isolation(area, place, "open() returns", open_probe, !place.is_write());
        }
        area.check(
            format!("{}: the page comes late, and it goes on", place.name()),
            move || late_page(place),
        );
    }
    for place in [Mad, Rmpp, Register2] {
        let what = "the port receives, behind a MAD for the file";
        isolation(area, place, what, arrival_probe, true);
    }
    for place in Place::EACH {
        let what = "another file sends and receives";
        isolation(area, place, what, traffic_probe, false);
    }
    for place in [Mad, Register2, Unregister] {
        isolation(area, place, "read() of the file goes on", read_probe, true);
    }
    for place in [Mad, Register2] {
        let what = "write() by another thread goes on";
        isolation(area, place, what, write_probe, true);
    }
    for place in [Mad, Register2] {
        let c_holds = !place.is_write();
        let what = "another file registers and unregisters";
        isolation(area, place, what, register_probe, c_holds);
        isolation(
            area,
            place,
            "close() of another file returns",
            close_probe,
            c_holds,
        );
    }
    for place in Place::EACH {
        area.check(
            format!("{}: the page goes for good, EFAULT", place.name()),
            move || page_gone(place),
        );
    }
    area.check(
        "write() stuck in its MAD: its agent can be unregistered, then EIO",
        || {
            let scene = peers_scene()?;
            let mut stuck = Stuck::at(Mad, &scene)?;
            let file = Arc::clone(&scene.a);
            let mut unregister = Task::start(move || file.port.unregister(AgentId(0)));
            let in_time = unregister.within(PROBE);
            let result = stuck.release()?;
            ensure!(unregister.within(MUST), "UNREGISTER_AGENT hangs");
            ensure!(in_time, "UNREGISTER_AGENT waits for the page");
            ensure_eq!(unregister.stop(), Some(Ok(())));
            ensure_errno!(result, EIO);
            Ok(())
        },
    )
    .improvement(4);
    area.check("a process that is stuck in write() can be killed", || {
        let scene = peers_scene()?;
        let mut child = fork(|| {
            let region = Region::new(1)?;
            region.write(scene.a.port.as_fd(), 0, PACKET)?;
            Ok(())
        })?;
        let syscall = format!("/proc/{}/syscall", child.pid());
        let write = format!("{} ", libc::SYS_write);
        wait_until("the child sleeps in write()", SOON, || {
            std::fs::read_to_string(&syscall).is_ok_and(|text| text.starts_with(&write))
        })?;
        child.kill(MUST)?;
        scene.other.round_trip(fresh_tid()).map(drop)
    });
}

/// Buffer of a read() whose last page is missing: the copy gets stuck in the MAD.
const SPLIT: usize = PAGE - 200;

/// A read() in a thread that is stuck in its copy.
struct StuckRead {
    call: Task<io::Result<usize>>,
    region: Arc<Region>,
}

impl StuckRead {
    fn of(file: &Arc<Endpoint>, len: usize) -> Outcome<Self> {
        let region = Region::new(2)?;
        region.deliver(0, &[])?;
        let (file, memory) = (Arc::clone(file), Arc::clone(&region));
        let call = Task::start(move || memory.read(file.port.as_fd(), SPLIT, len));
        match region.wait_fault(MUST)? {
            Some(1) => Ok(Self { call, region }),
            other => Err(format!("page {other:?} is waited for").into()),
        }
    }

    /// Takes the page away: the read() fails with EFAULT.
    fn fail(mut self) -> Outcome {
        self.region.revoke()?;
        match self.call.result(MUST) {
            Some(Err(e)) => ensure_eq!(e.raw_os_error(), Some(libc::EFAULT)),
            other => ensure!(false, "{other:?}"),
        }
        Ok(())
    }

    /// Delivers the page: the packet.
    fn succeed(mut self) -> Outcome<Packet> {
        self.region.deliver(1, &[])?;
        match self.call.result(MUST) {
            Some(Ok(len)) => Ok(Packet::from_bytes(
                &self.region.bytes(SPLIT, *len),
                Layout::New,
            )?),
            other => Err(format!("{other:?}").into()),
        }
    }
}

/// Peers with so many MADs in the queue of `b`; returns their TIDs too.
fn queued(count: usize) -> Outcome<(Endpoint, Arc<Endpoint>, Vec<u32>)> {
    let registration = Peers::registration(CLASS).rmpp(1);
    let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
    let mut tids = Vec::new();
    for _ in 0..count {
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        tids.push(packet.tid()?.low());
    }
    // Packets of a port stay in order: when a later one has come, all others are there.
    let registration = Peers::registration(OTHER);
    Peers::with("rxe0", "rxe1", Layout::New, &registration)?.deliver(fresh_tid())?;
    Ok((peers.a, Arc::new(peers.b), tids))
}

/// Reads what waits; the TIDs.
fn drain(file: &Endpoint, count: usize) -> Outcome<Vec<u32>> {
    let mut tids = Vec::new();
    for _ in 0..count {
        tids.push(file.recv()?.tid()?.low());
    }
    Ok(tids)
}

fn reader_checks(area: &mut ktap::Area) {
    area.check(
        "read() stuck in its copy: it gets its packet when the page comes",
        || {
            let (_a, b, tids) = queued(1)?;
            let read = StuckRead::of(&b, PACKET)?;
            ensure_eq!(read.succeed()?.tid()?.low(), tids[0]);
            Ok(())
        },
    );
    area.check("read() stuck in its copy: another reader reads on", || {
        let (_a, b, tids) = queued(3)?;
        let read = StuckRead::of(&b, PACKET)?;
        let file = Arc::clone(&b);
        let mut next = Task::start(move || drain(&file, 2));
        let in_time = next.within(PROBE);
        let first = read.succeed()?;
        ensure!(in_time, "the other reader waits for the page");
        ensure_eq!(next.stop().unwrap_or_else(|| Ok(vec![]))?, tids[1..]);
        ensure_eq!(first.tid()?.low(), tids[0]);
        Ok(())
    });
    area.check(
        "read() stuck in its copy: the port goes on, and this file too",
        || {
            let (a, b, _) = queued(1)?;
            let read = StuckRead::of(&b, PACKET)?;
            let (file, tid) = (Arc::clone(&b), fresh_tid());
            let mut work = Task::start(move || -> Outcome {
                a.port.send(&a.packet(&file, Method::SEND, tid))?;
                file.recv_tid(tid)?;
                let port = Port::open(1)?;
                port.register2(&Peers::registration(OTHER))?;
                let agent = file.port.register2(&Registration::send_only())?;
                Ok(file.port.unregister(agent)?)
            });
            let in_time = work.within(PROBE);
            read.succeed()?;
            ensure!(in_time, "somebody waits for the page");
            work.stop().unwrap_or(Ok(()))
        },
    );
    area.check(
        "read() stuck in its copy: its packet's agent can be unregistered",
        || {
            let (_a, b, tids) = queued(1)?;
            let read = StuckRead::of(&b, PACKET)?;
            let file = Arc::clone(&b);
            let mut unregister = Task::start(move || file.port.unregister(AgentId(0)));
            let in_time = unregister.within(PROBE);
            let packet = read.succeed()?;
            ensure!(in_time, "UNREGISTER_AGENT waits for the page");
            ensure_eq!(unregister.stop(), Some(Ok(())));
            ensure_eq!(packet.tid()?.low(), tids[0]);
            Ok(())
        },
    );
    area.check("read() stuck in its copy: unplug returns", || {
        let pair = RxePair::new("pf")?;
        let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        let b = Arc::new(peers.b);
        b.port.poll(PollFlags::POLLIN, SOON)?;
        let read = StuckRead::of(&b, PACKET)?;
        let port = pair.b.clone();
        let mut unplug = Task::start(move || port.unplug());
        let in_time = unplug.within(UNPLUG);
        // The read() began before the unplug, so it may still have its packet.
        let got = read.succeed()?;
        ensure!(in_time, "the unplug waits for the page");
        unplug.stop().unwrap_or(Ok(()))?;
        ensure_eq!(got.tid()?.low(), packet.tid()?.low());
        let mut buffer = [0; PACKET];
        ensure_errno!(b.port.read(&mut buffer), EIO);
        Ok(())
    });
    area.check(
        "a copy that ends in EFAULT leaves the packet, whole, for the next",
        || {
            let (_a, b, tids) = queued(2)?;
            StuckRead::of(&b, PACKET)?.fail()?;
            StuckRead::of(&b, PACKET)?.fail()?;
            ensure_eq!(drain(&b, 2)?, tids);
            Ok(())
        },
    );
    area.check(
        "EFAULT while another reader takes the next: the packet is at the head",
        || {
            let (_a, b, tids) = queued(3)?;
            let first = StuckRead::of(&b, PACKET)?;
            let second = StuckRead::of(&b, PACKET)?;
            first.fail()?;
            let head = b.recv()?.tid()?.low();
            let got = second.succeed()?.tid()?.low();
            ensure_eq!((head, got), (tids[0], tids[1]));
            ensure_eq!(drain(&b, 1)?, tids[2..]);
            Ok(())
        },
    );
    area.check("two copies fail, first come first: the order stays", || {
        let (_a, b, tids) = queued(3)?;
        let first = StuckRead::of(&b, PACKET)?;
        let second = StuckRead::of(&b, PACKET)?;
        first.fail()?;
        second.fail()?;
        ensure_eq!(drain(&b, 3)?, tids);
        Ok(())
    })
    .improvement(8);
    area.check("two copies fail, last come first: the order stays", || {
        let (_a, b, tids) = queued(3)?;
        let first = StuckRead::of(&b, PACKET)?;
        let second = StuckRead::of(&b, PACKET)?;
        second.fail()?;
        first.fail()?;
        ensure_eq!(drain(&b, 3)?, tids);
        Ok(())
    });
    area.check(
        "EINVAL beside a stuck reader leaves its packet behind the other's",
        || {
            let (_a, b, tids) = queued(3)?;
            let first = StuckRead::of(&b, PACKET)?;
            let mut short = [0; PACKET - 1];
            ensure_errno!(b.port.read(&mut short), EINVAL);
            first.fail()?;
            ensure_eq!(drain(&b, 3)?, tids);
            Ok(())
        },
    );
    area.check(
        "ENOSPC beside a stuck reader: its message is behind the other's packet",
        || {
            let (a, b, mut tids) = queued(1)?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
                .rmpp()
                .payload(&[9; 1000]);
            let message = Packet::new(a.agent, &b.address(), mad.into_bytes());
            a.port
                .send(&message.clone().timeout(Duration::from_secs(5)))?;
            tids.push(message.tid()?.low());
            let first = StuckRead::of(&b, PACKET)?;
            b.port.poll(PollFlags::POLLIN, SOON)?;
            let mut small = [0; PACKET];
            ensure_errno!(b.port.read(&mut small), ENOSPC);
            first.fail()?;
            ensure_eq!(drain(&b, 2)?, tids);
            Ok(())
        },
    );
    area.check(
        "a sleeping reader is woken for a packet that EFAULT put back",
        || {
            let (_a, b, tids) = queued(1)?;
            let read = StuckRead::of(&b, PACKET)?;
            let file = Arc::clone(&b);
            let mut sleeper = Task::start_asleep(libc::SYS_read, move || {
                let mut buffer = [0; PACKET];
                let len = file.port.read(&mut buffer)?;
                Packet::from_bytes(&buffer[..len], Layout::New)?.tid()
            });
            read.fail()?;
            ensure!(sleeper.within(PROBE), "it sleeps on");
            match sleeper.stop() {
                Some(tid) => ensure_eq!(tid?.low(), tids[0]),
                None => ensure!(false, "it hangs"),
            }
            Ok(())
        },
    )
    .improvement(8);
    area.check(
        "a sleeping reader is woken for a message that ENOSPC put back",
        || {
            let (a, b, _) = queued(0)?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
                .rmpp()
                .payload(&[9; 1000]);
            let message = Packet::new(a.agent, &b.address(), mad.into_bytes());
            a.port.send(&message.timeout(Duration::from_secs(5)))?;
            b.port.poll(PollFlags::POLLIN, SOON)?;
            let mut read = StuckRead::of(&b, PACKET)?;
            let file = Arc::clone(&b);
            let mut sleeper = Task::start_asleep(libc::SYS_read, move || {
                let mut buffer = [0; 4096];
                file.port.read(&mut buffer)
            });
            read.region.deliver(1, &[])?;
            match read.call.result(MUST) {
                Some(Err(e)) => ensure_eq!(e.raw_os_error(), Some(libc::ENOSPC)),
                other => ensure!(false, "{other:?}"),
            }
            ensure!(sleeper.within(PROBE), "it sleeps on");
            ensure!(matches!(sleeper.stop(), Some(Ok(len)) if len >= 64 + 1040));
            Ok(())
        },
    )
    .improvement(8);
    area.check(
        "a sleeping poll() is woken for a packet that EFAULT put back",
        || {
            let (_a, b, _) = queued(1)?;
            let read = StuckRead::of(&b, PACKET)?;
            let file = Arc::clone(&b);
            let mut sleeper = Task::start_asleep(libc::SYS_poll, move || {
                file.port.poll(PollFlags::POLLIN, PROBE * 2)
            });
            read.fail()?;
            ensure!(sleeper.within(PROBE), "it sleeps on");
            ensure_eq!(sleeper.stop(), Some(Ok(PollFlags::POLLIN)));
            Ok(())
        },
    )
    .improvement(8);
    area.check(
        "close() of the descriptor while a read() is stuck: the file lives on",
        || {
            let (_a, b, tids) = queued(1)?;
            let file = Arc::new(nix::unistd::dup(&b.port)?);
            let region = Region::new(2)?;
            region.deliver(0, &[])?;
            let (fd, memory) = (Arc::clone(&file), Arc::clone(&region));
            let mut call = Task::start(move || memory.read(fd.as_fd(), SPLIT, PACKET));
            ensure_eq!(region.wait_fault(MUST)?, Some(1));
            drop(b);
            region.deliver(1, &[])?;
            ensure!(matches!(call.result(MUST), Some(Ok(PACKET))));
            let packet = Packet::from_bytes(&region.bytes(SPLIT, PACKET), Layout::New)?;
            ensure_eq!(packet.tid()?.low(), tids[0]);
            Ok(())
        },
    );
}

/// A file that changes its layout while a write() in the old one is stuck in its header.
fn layout_changes_in_write(change: impl FnOnce(&Port) -> umad::Result<AgentId>) -> Outcome {
    let Peers { a, b } = Peers::new()?;
    let fresh = Arc::new(Port::options().layout(Layout::Old).open(0)?);
    let tid = fresh_tid();
    let mut packet = a.packet(&b, Method::SEND, tid);
    packet.agent = AgentId(0);
    packet.mad[40..].fill(0x77);
    let bytes = packet.to_bytes(Layout::Old);
    let region = Region::new(1)?;
    let (file, memory, len) = (Arc::clone(&fresh), Arc::clone(&region), bytes.len());
    let mut call = Task::start(move || memory.write(file.as_fd(), 0, len));
    ensure_eq!(region.wait_fault(MUST)?, Some(0));
    let changed = change(&fresh);
    region.deliver(0, &bytes)?;
    ensure_eq!(changed?, AgentId(0));
    match call.result(MUST) {
        Some(Ok(n)) => ensure_eq!(*n, len),
        other => ensure!(false, "{other:?}"),
    }
    // A MAD that went wrong vanishes: nothing tells it, hence a bound.
    let got = b.port.recv_timeout(PROBE)?;
    ensure_eq!(got.tid()?.low(), tid.low());
    ensure_eq!(got.mad[40..], packet.mad[40..]);
    Ok(())
}

fn layout_checks(area: &mut ktap::Area) {
    area.check(
        "a write() that overlaps ENABLE_PKEY keeps its layout",
        || {
            layout_changes_in_write(|port| {
                port.enable_pkey()?;
                port.register(&Registration::send_only())
            })
        },
    )
    .improvement(11);
    area.check(
        "a write() that overlaps the first REGISTER_AGENT2 keeps its layout",
        || layout_changes_in_write(|port| port.register2(&Registration::send_only())),
    )
    .improvement(11);
    area.check(
        "a write() that overlaps REGISTER_AGENT keeps its layout",
        || layout_changes_in_write(|port| port.register(&Registration::send_only())),
    );
    area.check(
        "a read() that sleeps over the first REGISTER_AGENT2 keeps its layout",
        || {
            let Peers { a, b } = Peers::new()?;
            b.port.unregister(b.agent)?;
            let fresh = Arc::new(Port::options().layout(Layout::Old).open(1)?);
            let file = Arc::clone(&fresh);
            // Just enough for the old layout, by which the call was begun.
            let mut call = Task::start_asleep(libc::SYS_read, move || {
                let mut buffer = [0; 56 + 256];
                file.read(&mut buffer).map(|len| buffer[..len].to_vec())
            });
            fresh.register2(&Peers::registration(CLASS))?;
            let tid = fresh_tid();
            a.port.send(&a.packet(&b, Method::SEND, tid))?;
            match call.result(MUST) {
                Some(Ok(bytes)) => {
                    let packet = Packet::from_bytes(bytes, Layout::Old)?;
                    ensure_eq!(packet.tid()?.low(), tid.low());
                    ensure_eq!(packet.header.length, 56 + 256, "length of the header");
                }
                other => ensure!(false, "{other:?}"),
            }
            Ok(())
        },
    )
    .improvement(11);
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("pagefault");
    isolation_checks(&mut area);
    reader_checks(&mut area);
    layout_checks(&mut area);
    area.run()
}
