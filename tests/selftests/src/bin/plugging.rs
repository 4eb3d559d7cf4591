// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `plugging`: devices that go while everything that can sleep does, and how long that takes; and
//! devices that come, go, change their names, links and namespaces at random, under load.
//!
//! `UMAD_CYCLES=N` has N random cycles, on each kind of device, instead of the usual some hundred.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use fastrand::Rng;
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::Impl;
use nix::fcntl::OFlag;
use nix::poll::PollFlags;
use nix::sys::stat::Mode;
use selftests::figure::{cycles, cycles_bound, figure, figure_time};
use selftests::netlink::Rdma;
use selftests::netns::{Exclusive, Named};
use selftests::task::{Task, MUST};
use selftests::vhca::{
    attr, direct, names_in_class, Agent, Faults, Module, Pair, Shape, Smp, Spec, SpecExt, Vhca,
    VhcaExt, PORT_DOWN,
};
use umad::mad::data_offset;
use umad::sysfs;

/// Later than any check ends.
const NEVER_MS: u32 = 3_000_000;

/// From now on sends of a device are completed later than any check ends.
fn no_send_completes(device: &Vhca) -> Outcome {
    Ok(device.faults(Faults {
        complete_delay_ms: NEVER_MS,
        ..Faults::default()
    })?)
}

/// A MAD of [`CLASS`] that no agent of the kernel answers.
fn unsolicited(from: &Agent, lid: u16) -> Packet {
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
    Packet::new(from.agent, &Address::lid(lid), mad)
}

/// Pulls a device out, and tells how long that took while something was so.
fn unplug_while(what: &str, device: Vhca) -> Outcome {
    let begin = Instant::now();
    let mut unplug = Task::start(move || device.unplug());
    match unplug.result(SOON) {
        Some(Ok(())) => {
            figure_time(&format!("unplug, {what}"), begin.elapsed());
            Ok(())
        }
        Some(Err(e)) => Err(format!("unplug, {what}: {e}").into()),
        None => Err(format!("unplug, {what}: not within {SOON:?}").into()),
    }
}

/// What a file of a device that is gone says.
fn ensure_gone(port: &Port) -> Outcome {
    ensure_errno!(port.read(&mut [0; 320]), EIO);
    ensure_errno!(port.write(&[0; 320]), EIO);
    ensure_errno!(port.register2(&Registration::send_only()), EPIPE);
    ensure_eq!(
        port.poll(PollFlags::POLLIN, Duration::ZERO)?,
        PollFlags::POLLERR
    );
    Ok(())
}

/// A check that pulls `a` of a pair out while it is as `hold` makes it; what `hold` returns lives on, and is
/// handed to `after`.
fn held<T: 'static>(
    area: &mut ktap::Area,
    what: &'static str,
    hold: impl FnOnce(&Pair) -> Outcome<T> + 'static,
    after: impl FnOnce(T) -> Outcome + 'static,
) {
    area.check(format!("unplug, {what}"), move || {
        let pair = Pair::new()?;
        let kept = hold(&pair)?;
        unplug_while(what, pair.a)?;
        after(kept)
    });
}

fn sleeping_points(area: &mut ktap::Area) {
    held(area, "nothing open", |_| Ok(()), |()| Ok(()));
    held(
        area,
        "8 files with 32 agents each",
        |pair| {
            (0..8)
                .map(|_| {
                    let port = Port::open(pair.a.umad(1)?)?;
                    for _ in 0..32 {
                        port.register2(&Registration::send_only())?;
                    }
                    Ok(port)
                })
                .collect::<Outcome<Vec<_>>>()
        },
        |ports| ports.iter().try_for_each(ensure_gone),
    );
    held(
        area,
        "a poll() sleeps",
        |pair| {
            let agent = Arc::new(pair.a.manager(1)?);
            let polling = Arc::clone(&agent);
            let poll = Task::start_asleep(libc::SYS_poll, move || {
                polling.port.poll(PollFlags::POLLIN, MUST)
            });
            Ok((agent, poll))
        },
        |(agent, mut poll)| {
            ensure_eq!(poll.result(MUST), Some(&Ok(PollFlags::POLLERR)));
            ensure_gone(&agent.port)
        },
    );
    held(
        area,
        "500 requests wait for their responses",
        |pair| {
            let agent = pair.a.agent(1, &Registration::send_only())?;
            for _ in 0..500 {
                let request = unsolicited(&agent, 2).timeout(Duration::from_secs(1000));
                agent.port.send(&request)?;
            }
            Ok(agent)
        },
        |agent| ensure_gone(&agent.port),
    );
    held(
        area,
        "1,000 sends in a queue that stands still",
        |pair| {
            let agent = pair.a.agent(1, &Registration::send_only())?;
            no_send_completes(&pair.a)?;
            // More than the hardware's queue takes, so ib_mad keeps the rest.
            for _ in 0..1000 {
                agent.port.send(&unsolicited(&agent, 2))?;
            }
            Ok(agent)
        },
        |agent| ensure_gone(&agent.port),
    );
    held(
        area,
        "a message waits for its acknowledgements",
        |pair| {
            let agent = pair.a.agent(1, &Registration::send_only().rmpp(1))?;
            pair.b.faults(Faults {
                drop_every: 1,
                ..Faults::default()
            })?;
            let mut packet = unsolicited(&agent, 2).timeout(Duration::from_secs(1000));
            packet.mad[24..28].copy_from_slice(&[1, 1, RmppHdr::ACTIVE, 0]);
            packet.mad.resize(300_000, 0x5a);
            agent.port.send(&packet)?;
            Ok(agent)
        },
        |agent| ensure_gone(&agent.port),
    );
    held(
        area,
        "3,000 packets unread, and more come",
        |pair| {
            let reader = pair.a.agent(1, &Peers::registration(CLASS))?;
            let peer = pair.b.agent(1, &Registration::send_only())?;
            for _ in 0..3000 {
                peer.port.send(&unsolicited(&peer, 1))?;
            }
            let flood = Task::start(move || {
                for _ in 0..3000 {
                    peer.port.send(&unsolicited(&peer, 1))?;
                }
                umad::Result::Ok(())
            });
            Ok((reader, flood))
        },
        |(reader, mut flood)| {
            ensure_gone(&reader.port)?;
            ensure!(matches!(flood.result(MUST), Some(Ok(()))));
            Ok(())
        },
    );
    held(
        area,
        "close() waits for sends that are late",
        |pair| {
            let agent = pair.a.agent(1, &Registration::send_only())?;
            no_send_completes(&pair.a)?;
            for _ in 0..20 {
                agent.port.send(&unsolicited(&agent, 2))?;
            }
            let close = Task::start_asleep(libc::SYS_close, move || drop(agent));
            Ok(close)
        },
        |mut close| {
            ensure!(close.within(MUST), "close() goes on waiting");
            Ok(())
        },
    );
    held(
        area,
        "UNREGISTER_AGENT waits for sends that are late",
        |pair| {
            let agent = Arc::new(pair.a.agent(1, &Registration::send_only())?);
            no_send_completes(&pair.a)?;
            for _ in 0..20 {
                agent.port.send(&unsolicited(&agent, 2))?;
            }
            let file = Arc::clone(&agent);
            let unregister =
                Task::start_asleep(libc::SYS_ioctl, move || file.port.unregister(file.agent));
            Ok((agent, unregister))
        },
        |(agent, mut unregister)| {
            ensure_eq!(unregister.result(MUST), Some(&Ok(())));
            ensure_gone(&agent.port)
        },
    );
    held(
        area,
        "a write() sleeps in the driver's process_mad",
        |pair| {
            let agent = Arc::new(pair.a.manager(1)?);
            pair.a.faults(Faults {
                process_mad_delay_ms: 1000,
                ..Faults::default()
            })?;
            let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[]);
            let request = agent.request(&direct(), smp.0);
            let file = Arc::clone(&agent);
            let write = Task::start_asleep(libc::SYS_write, move || file.port.send(&request));
            Ok((agent, write))
        },
        |(agent, mut write)| {
            match write.result(MUST) {
                Some(Ok(())) => (),
                Some(Err(e)) => ensure_eq!(e.errno(), Some(Errno::EIO)),
                None => ensure!(false, "write() goes on waiting"),
            }
            ensure_gone(&agent.port)
        },
    );
    held(
        area,
        "issm is held",
        |pair| Ok(File::open(pair.a.issm(1)?)?),
        |issm| {
            drop(issm);
            Ok(())
        },
    );
}

/// Lets others have the processor: the load is there to be in the way, not to fill the machine.
fn breathe() {
    std::thread::sleep(Duration::from_millis(1));
}

/// An error that a device which may go at any moment explains; another one ends the check.
fn explained<T>(what: &str, result: umad::Result<T>, errnos: &[Errno]) -> Outcome<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.errno().is_some_and(|e| errnos.contains(&e)) => Ok(None),
        Err(e) => Err(format!("{what}: {e}").into()),
    }
}

/// Opens whatever umad device has one of some numbers, sends, reads, registers, and closes, for ever.
fn load(seed: u64, numbers: std::ops::Range<u32>, to: impl Fn(&mut Rng) -> Address) -> Outcome {
    let mut rng = Rng::with_seed(seed);
    // The C module crashes when an issm device goes while somebody opens it (improvement 2).
    let with_issm = Impl::current()? == Impl::Rust;
    loop {
        breathe();
        let number = rng.u32(numbers.clone());
        let _issm = if with_issm && rng.u8(..) < 64 {
            let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
            let path = format!("/dev/infiniband/issm{number}");
            match nix::fcntl::open(path.as_str(), flags, Mode::empty()) {
                Ok(file) => Some(file),
                Err(Errno::ENOENT | Errno::ENXIO | Errno::EAGAIN | Errno::EPERM) => None,
                Err(e) => return Err(format!("open() of issm: {e}").into()),
            }
        } else {
            None
        };
        let port = Port::options().nonblock(true).open(number);
        let gone = [Errno::ENOENT, Errno::ENXIO, Errno::EPERM];
        let Some(port) = explained("open()", port, &gone)? else {
            continue;
        };
        let rmpp = rng.bool();
        let qpn = u32::from(rng.u8(..) >= 64);
        let registration = match (qpn, rng.bool()) {
            (0, _) => Registration::send_only().qpn(0),
            (_, true) => Registration::send_only().rmpp(rmpp.into()),
            (_, false) => Peers::registration(CLASS).rmpp(rmpp.into()),
        };
        // No such queue pair, no MADs (any more), or the methods are taken.
        let refused = [
            Errno::EPIPE,
            Errno::EPROTONOSUPPORT,
            Errno::ENODEV,
            Errno::EINVAL,
        ];
        let agent = port.register2(&registration);
        let Some(agent) = explained("REGISTER_AGENT2", agent, &refused)? else {
            continue;
        };
        for _ in 0..rng.u32(1..8) {
            let packet = if qpn == 0 {
                // To the node itself: ib_core answers what comes over the wire by an agent of its own, which
                // it may use after its end when the device goes.
                let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[]);
                Packet::new(agent, &direct(), smp.0)
            } else {
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid());
                let mut mad = match rmpp {
                    true => mad.rmpp().into_bytes(),
                    false => mad.into_bytes(),
                };
                if rmpp {
                    mad.resize(data_offset(CLASS) + rng.usize(1..3000), 0x5a);
                }
                Packet::new(agent, &to(&mut rng), mad)
            };
            let timeout = Duration::from_millis(rng.u64(0..30));
            let refused = [
                Errno::EIO,
                Errno::EINVAL,
                Errno::ENODEV,
                Errno::ETIMEDOUT,
                Errno::ENETUNREACH,
                Errno::EHOSTUNREACH,
                Errno::ENODATA,
            ];
            if explained("write()", port.send(&packet.timeout(timeout)), &refused)?.is_none() {
                break;
            }
        }
        for _ in 0..rng.u32(0..4) {
            let mut buffer = vec![0; rng.usize(320..4000)];
            let nothing = [Errno::EAGAIN, Errno::EIO, Errno::ENOSPC];
            explained("read()", port.read(&mut buffer), &nothing)?;
            let wait = Duration::from_millis(rng.u64(0..4));
            port.poll(PollFlags::POLLIN, wait)?;
        }
        if rng.bool() {
            // It went with the device.
            explained("UNREGISTER_AGENT", port.unregister(agent), &[Errno::EINVAL])?;
        }
    }
}

/// Runs `body` while some processes are under load, all of which must still be at it at the end.
fn under_load(
    seed: u64,
    numbers: std::ops::Range<u32>,
    to: impl Fn(&mut Rng) -> Address + Copy,
    body: impl FnOnce() -> Outcome,
) -> Outcome {
    let mut users = (0..4)
        .map(|n| fork(|| load(seed + n, numbers.clone(), to)))
        .collect::<Outcome<Vec<_>>>()?;
    body()?;
    for user in &mut users {
        if !user.is_running() {
            user.wait(MUST).what("one of the users")?;
        }
        user.kill(MUST)?;
    }
    Ok(())
}

/// The seed of a random run: each has its own, and tells it; `UMAD_SEED` brings one back.
fn seed() -> Outcome<u64> {
    let seed = match std::env::var("UMAD_SEED") {
        Ok(text) => text.parse().what(format!("UMAD_SEED is {text:?}"))?,
        Err(_) => fastrand::u64(..1 << 32),
    };
    println!("# UMAD_SEED={seed}");
    Ok(seed)
}

/// Tells how many cycles there were, and how long they took.
fn tell_cycles(what: &str, count: u32, begin: Instant) {
    figure(
        &format!("random plug cycles under load, {what}"),
        count,
        "cycles",
    );
    figure_time(
        &format!("each of them, {what}"),
        begin.elapsed() / count.max(1),
    );
}

/// One of the places for virtual HCAs; each two of them are cabled.
struct Slot {
    index: u32,
    device: Option<Vhca>,
}

impl Slot {
    fn plug(&mut self, rng: &mut Rng) -> Outcome {
        let shapes = [
            Shape::Ca,
            Shape::Ca,
            Shape::SmiOnly,
            Shape::NoSmi,
            Shape::Opa,
        ];
        let shape = shapes[rng.usize(..shapes.len())];
        let (lid, cable) = (1 + self.index % 2, std::process::id() * 4 + self.index / 2);
        let name = format!("p{}x{}", std::process::id(), self.index);
        let spec = Spec::new(shape, rng.u32(1..3))
            .cabled(1, lid, cable)
            .name(&name);
        let device = spec.plug()?;
        self.device = Some(device);
        self.disturb(rng)
    }

    fn disturb(&mut self, rng: &mut Rng) -> Outcome {
        let Some(device) = &self.device else {
            return Ok(());
        };
        device.faults(Faults {
            drop_every: rng.u32(0..6),
            duplicate_every: rng.u32(0..6),
            delay_ms: rng.u32(0..4),
            complete_delay_ms: rng.u32(0..8),
            process_mad_delay_ms: rng.u32(0..4),
            ..Faults::default()
        })?;
        Ok(())
    }

    fn rename(&mut self, rdma: &mut Rdma) -> Outcome {
        if let Some(device) = &mut self.device {
            let new = match device.ibdev.strip_suffix("_r") {
                Some(old) => old.to_owned(),
                None => format!("{}_r", device.ibdev),
            };
            rdma.rename(&device.ibdev, &new).what("renaming")?;
            device.ibdev = new;
        }
        Ok(())
    }

    fn toggle_link(&mut self) -> Outcome {
        if let Some(device) = &self.device {
            device.change(1, |port| port.flags ^= PORT_DOWN)?;
        }
        Ok(())
    }
}

fn random(area: &mut ktap::Area) {
    area.check(
        "virtual HCAs: random plugs, unplugs, renames, links down and up, faults; under load",
        || {
            let (seed, before, count) = (seed()?, names_in_class()?, cycles(300)?);
            let mut rng = Rng::with_seed(seed);
            let mut rdma = Rdma::open()?;
            let to = |rng: &mut Rng| Address::lid(rng.u16(1..4));
            let begin = Instant::now();
            // umad0 and umad1 are Soft-RoCE's.
            under_load(seed + 1, 2..10, to, || {
                let mut slots: Vec<_> = (0..4)
                    .map(|index| Slot {
                        index,
                        device: None,
                    })
                    .collect();
                let mut done = 0;
                while done < count {
                    let slot = &mut slots[rng.usize(..4)];
                    if slot.device.is_none() {
                        slot.plug(&mut rng)?;
                    } else {
                        match rng.u8(..100) {
                            0..10 => slot.rename(&mut rdma)?,
                            10..20 => slot.toggle_link()?,
                            20..30 => slot.disturb(&mut rng)?,
                            _ => {
                                if let Some(device) = slot.device.take() {
                                    device.unplug()?;
                                    done += 1;
                                }
                            }
                        }
                    }
                    if rng.bool() {
                        std::thread::sleep(Duration::from_micros(rng.u64(0..3000)));
                    }
                }
                Ok(())
            })?;
            tell_cycles("virtual HCAs", count, begin);
            ensure_eq!(names_in_class()?, before);
            // And the next device is like any.
            let pair = Pair::new()?;
            let (from, at) = (
                pair.a.agent(1, &Registration::send_only())?,
                pair.b.agent(1, &Peers::registration(CLASS))?,
            );
            let packet = unsolicited(&from, 2);
            from.port.send(&packet)?;
            at.recv_tid(packet.tid()?).map(drop)
        },
    )
    .timeout(cycles_bound(300));
    area.check(
        "Soft-RoCE: random plugs, unplugs, renames, links down and up; under load",
        || {
            let (seed, count) = (seed()?, cycles(60)?);
            let mut rng = Rng::with_seed(seed);
            let mut rdma = Rdma::open()?;
            let pair = RxePair::plain("pl")?;
            let before = names_in_class()?;
            pair.a.plug()?;
            pair.b.plug()?;
            // Nothing is sent to the end that goes: ib_core gives buffers back to a queue pair of Soft-RoCE that
            // is freed.
            let gid = sysfs::gid(&pair.b.ibdev, 1, 0)?;
            let to = |_: &mut Rng| Address::roce(gid, 0);
            let mut names = [pair.a.ibdev.clone(), pair.b.ibdev.clone()];
            let begin = Instant::now();
            under_load(seed + 1, 2..3, to, || {
                let mut done = 0;
                while done < count {
                    let end = rng.usize(..2);
                    let (port, name) = ([&pair.a, &pair.b][end], &mut names[end]);
                    match rng.u8(..100) {
                        0..15 => {
                            let new = match name.strip_suffix("_r") {
                                Some(old) => old.to_owned(),
                                None => format!("{name}_r"),
                            };
                            rdma.rename(name, &new).what("renaming")?;
                            *name = new;
                        }
                        15..25 => {
                            run(&format!("ip link set {} down", port.netdev))?;
                            run(&format!("ip link set {} up", port.netdev))?;
                        }
                        _ => {
                            let (port, name) = (&pair.a, &mut names[0]);
                            rdma.delete_link(name).what("unplugging")?;
                            *name = port.ibdev.clone();
                            rdma.add_link(name, "rxe", &port.netdev).what("plugging")?;
                            done += 1;
                        }
                    }
                    if rng.bool() {
                        std::thread::sleep(Duration::from_micros(rng.u64(0..3000)));
                    }
                }
                Ok(())
            })?;
            tell_cycles("Soft-RoCE", count, begin);
            for name in &names {
                rdma.delete_link(name)?;
            }
            ensure_eq!(names_in_class()?, before);
            // Neighbours were forgotten with the links.
            drop(pair);
            let pair = RxePair::new("pl")?;
            let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
            peers.round_trip(fresh_tid()).map(drop)
        },
    )
    .timeout(cycles_bound(300));
    area.check("a device moves between namespaces, under load", || {
        let (seed, count) = (seed()?, cycles(20)?);
        let pair = RxePair::plain("pl")?;
        let _mode = Exclusive::begin()?;
        pair.a.plug()?;
        pair.b.plug()?;
        let gid = sysfs::gid(&pair.b.ibdev, 1, 0)?;
        let there = Named::new("umad-plugging")?;
        let (here, away) = (File::open("/proc/self/ns/net")?, there.file()?);
        let begin = Instant::now();
        let mut rdma = Rdma::open()?;
        let to = |_: &mut Rng| Address::roce(gid, 0);
        under_load(seed, 2..3, to, || {
            for _ in 0..count {
                rdma.move_to(&pair.a.ibdev, away.as_fd()).what("there")?;
                let back = fork(|| {
                    nix::sched::setns(&away, nix::sched::CloneFlags::CLONE_NEWNET)?;
                    Rdma::open()?
                        .move_to(&pair.a.ibdev, here.as_fd())
                        .what("back")
                });
                back?.wait(MUST)?;
            }
            Ok(())
        })?;
        tell_cycles("moves to another namespace and back", count, begin);
        // Soft-RoCE gets no queue pair 1 back where it was before; a device that is made anew does.
        pair.a.unplug()?;
        pair.a.plug()?;
        let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
        peers.round_trip(fresh_tid())?;
        Ok(())
    })
    .timeout(cycles_bound(300));
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("plugging");
    sleeping_points(&mut area);
    random(&mut area);
    Module::run(area)
}
