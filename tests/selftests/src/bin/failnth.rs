// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `failnth`: whatever fails in the kernel meanwhile, a call says so, and leaves things as they
//! were. For each call, the first allocation or user copy is made to fail, then the second, until
//! none is left; after each, the same call without a failure must do what it does at any time.
//!
//! Needs a kernel with fault injection: `make test-debug` builds one.

#![forbid(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::Path;

use ktap::module::{is_loaded, load, unload, unload_when_idle, Loaded};
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::wait_for_umad;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::stat::Mode;
use selftests::injection::{code_of, Injection, Nth, ALL_MODULES};
use selftests::netlink::Rdma;
use selftests::vhca::{issms, names_in_class, Module, Shape, Spec, SpecExt, Vhca, VhcaExt, IS_SM};
use umad::mad::data_offset;
use umad::sysfs;

/// Long enough for the slowest area, and no measure.
const LONG: u64 = 1200;

/// A class that no other check uses, so that what a registration left behind would be in the way.
const OTHER_CLASS: u8 = 0x37;

fn open(path: &Path) -> nix::Result<OwnedFd> {
    nix::fcntl::open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

fn ready() -> Outcome<(Injection, Peers)> {
    Ok((Injection::new()?, Peers::new()?))
}

/// The module does its work.
fn works() -> Outcome {
    Peers::new()?.round_trip(fresh_tid()).map(drop)
}

fn all_methods() -> Registration {
    Registration::class(OTHER_CLASS, 1)
        .oui(OUI)
        .mask(MethodMask(u128::MAX >> 1))
}

/// Registers with a failure, and, if that was told, again without: the id is 0, and the methods are
/// there to be had, each time.
fn registers(nth: &Nth<'_>, register: impl Fn(&Port) -> umad::Result<AgentId>) -> Outcome {
    let port = fresh()?;
    let agent = match nth.sensible(nth.call(|| register(&port))?)? {
        Some(agent) => agent,
        None => register(&port).what("registering again")?,
    };
    ensure_eq!(agent, AgentId(0));
    ensure_errno!(fresh()?.register2(&all_methods()), EINVAL);
    port.unregister(agent)?;
    Ok(())
}

/// Writes with a failure, and, if that was told, again without. Returns whether it was.
fn writes(nth: &Nth<'_>, from: &Endpoint, packet: &Packet) -> Outcome<bool> {
    let bytes = packet.to_bytes(from.port.layout());
    match nth.sensible(nth.call(|| from.port.write(&bytes))?)? {
        Some(wrote) => {
            ensure_eq!(wrote, bytes.len());
            Ok(false)
        }
        None => {
            // Not a duplicate of what was refused.
            ensure_eq!(from.port.write(&bytes).what("again")?, bytes.len());
            Ok(true)
        }
    }
}

/// A message of several segments.
fn long_message(tid: Tid) -> Vec<u8> {
    let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, tid)
        .rmpp()
        .into_bytes();
    mad.resize(data_offset(CLASS), 0);
    mad.extend((0..=250).cycle().take(1000));
    mad
}

fn rmpp_peers() -> Outcome<Peers> {
    Peers::with(
        "rxe0",
        "rxe1",
        Layout::New,
        &Peers::registration(CLASS).rmpp(1),
    )
}

/// Reads with a failure, and, if that was told, again without: the packet is the same.
fn reads(nth: &Nth<'_>, port: &Port, tid: Tid, len: usize) -> Outcome {
    let mut buf = vec![0; len];
    let n = match nth.sensible(nth.call(|| port.read(&mut buf))?)? {
        Some(n) => n,
        None => {
            buf.fill(0);
            port.read(&mut buf).what("again")?
        }
    };
    ensure_eq!(n, len);
    let packet = Packet::from_bytes(&buf, port.layout())?;
    ensure_eq!(packet.tid()?.low(), tid.low());
    Ok(())
}

/// Numbers of the umad devices of an RDMA device.
fn umads(ibdev: &str) -> Outcome<usize> {
    let mut found = 0;
    for entry in fs::read_dir(sysfs::CLASS)? {
        let entry = entry?;
        let owner = fs::read_to_string(entry.path().join("ibdev"));
        found += usize::from(
            entry.file_name().to_string_lossy().starts_with("umad")
                && owner.is_ok_and(|owner| owner.trim() == ibdev),
        );
    }
    Ok(found)
}

fn is_sm(device: &Vhca) -> Outcome<bool> {
    Ok(device.cap_mask(1)? & IS_SM != 0)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("failnth");

    area.check("open() of a umad device", || {
        let injection = Injection::new()?;
        let path = umad::port::node(wait_for_umad("rxe0")?);
        injection.every("open umad", 4, |nth| {
            nth.sensible(nth.call(|| open(&path))?).map(drop)
        })?;
        works()
    })
    .timeout(LONG);
    area.check("REGISTER_AGENT", || {
        let injection = Injection::new()?;
        injection.every("REGISTER_AGENT", 8, |nth| {
            registers(nth, |port| port.register(&all_methods()))
        })?;
        works()
    })
    .timeout(LONG);
    area.check("REGISTER_AGENT2", || {
        let injection = Injection::new()?;
        injection.every("REGISTER_AGENT2", 8, |nth| {
            registers(nth, |port| port.register2(&all_methods()))
        })?;
        // The known flags are written back, or that fails.
        let port = fresh()?;
        injection.every("REGISTER_AGENT2 with unknown flags", 2, |nth| {
            let result = nth.call(|| port.register2(&all_methods().flags(2)))?;
            let errno = result.err().and_then(|e| e.errno());
            ensure!(
                matches!(errno, Some(Errno::EINVAL | Errno::EFAULT)),
                "{errno:?}"
            );
            Ok(())
        })?;
        works()
    })
    .timeout(LONG);
    area.check("UNREGISTER_AGENT", || {
        let injection = Injection::new()?;
        injection.every("UNREGISTER_AGENT", 1, |nth| {
            let port = fresh()?;
            let agent = port.register2(&all_methods())?;
            if nth
                .sensible(nth.call(|| port.unregister(agent))?)?
                .is_none()
            {
                port.unregister(agent).what("again")?;
            }
            // Gone, and its methods are free.
            ensure_errno!(port.unregister(agent), EINVAL);
            fresh()?.register2(&all_methods())?;
            Ok(())
        })?;
        works()
    })
    .timeout(LONG);
    area.check("ENABLE_PKEY", || {
        let injection = Injection::new()?;
        injection.every("ENABLE_PKEY", 0, |nth| {
            let port = fresh()?;
            nth.sensible(nth.call(|| port.enable_pkey())?).map(drop)
        })?;
        works()
    })
    .timeout(LONG);

    area.check("write() of a MAD that wants no answer", || {
        let (injection, peers) = ready()?;
        injection.every("write, unsolicited", 4, |nth| {
            let tid = fresh_tid();
            writes(nth, &peers.a, &peers.a.packet(&peers.b, Method::SEND, tid))?;
            peers.b.recv_tid(tid).map(drop)
        })?;
        // A file that has not sent to the address before.
        injection.every("write, to a new address", 12, |nth| {
            let tid = fresh_tid();
            let from = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
            writes(nth, &from, &from.packet(&peers.b, Method::SEND, tid))?;
            peers.b.recv_tid(tid).map(drop)
        })?;
        peers.b.nothing_comes().what("no MAD comes twice")?;
        peers.round_trip(fresh_tid()).map(drop)
    })
    .timeout(LONG);
    area.check("write() of a request, and of its response", || {
        let (injection, peers) = ready()?;
        let request = |tid: Tid| {
            peers
                .a
                .packet(&peers.b, Method::GET, tid)
                .timeout(Duration::from_secs(60))
        };
        injection.every("write, request", 4, |nth| {
            let tid = fresh_tid();
            writes(nth, &peers.a, &request(tid))?;
            let got = peers.b.recv_tid(tid)?;
            peers.b.port.send(&peers.b.response(&got)?)?;
            ensure_eq!(peers.a.recv_tid(tid)?.header.status, 0);
            Ok(())
        })?;
        injection.every("write, response", 4, |nth| {
            let tid = fresh_tid();
            peers.a.port.send(&request(tid))?;
            let got = peers.b.recv_tid(tid)?;
            writes(nth, &peers.b, &peers.b.response(&got)?)?;
            ensure_eq!(peers.a.recv_tid(tid)?.header.status, 0);
            Ok(())
        })?;
        peers.a.nothing_comes().what("no response comes twice")?;
        peers.b.nothing_comes().what("no request comes twice")
    })
    .timeout(LONG);
    area.check(
        "write() and read() of a message of several segments",
        || {
            let (injection, peers) = (Injection::new()?, rmpp_peers()?);
            let send = |tid: Tid| Packet::new(peers.a.agent, &peers.b.address(), long_message(tid));
            injection.every("write, RMPP", 10, |nth| {
                let tid = fresh_tid();
                writes(nth, &peers.a, &send(tid))?;
                let got = peers.b.recv_tid(tid)?;
                ensure_eq!(got.mad.len(), send(tid).mad.len());
                Ok(())
            })?;
            peers.b.nothing_comes().what("no message comes twice")?;
            let len = 64 + long_message(fresh_tid()).len();
            injection.every("read, RMPP", 6, |nth| {
                let tid = fresh_tid();
                peers.a.port.send(&send(tid))?;
                peers.b.wait_readable()?;
                reads(nth, &peers.b.port, tid, len)
            })?;
            Ok(())
        },
    )
    .timeout(LONG);
    area.check("read() of a MAD, and of a timeout; poll()", || {
        let (injection, peers) = ready()?;
        injection.every("read", 2, |nth| {
            let tid = fresh_tid();
            peers
                .a
                .port
                .send(&peers.a.packet(&peers.b, Method::SEND, tid))?;
            peers.b.wait_readable()?;
            reads(nth, &peers.b.port, tid, 64 + 256)
        })?;
        injection.every("read, timeout", 2, |nth| {
            let tid = fresh_tid();
            let request = peers.a.packet(&peers.b, Method::SEND, tid);
            peers
                .a
                .port
                .send(&request.timeout(Duration::from_millis(1)))?;
            peers.a.wait_readable()?;
            reads(nth, &peers.a.port, tid, 64 + 24)?;
            peers.b.recv_tid(tid).map(drop)
        })?;
        let tid = fresh_tid();
        peers
            .a
            .port
            .send(&peers.a.packet(&peers.b, Method::SEND, tid))?;
        peers.b.wait_readable()?;
        injection.every("poll", 1, |nth| {
            let mut fds = [PollFd::new(peers.b.port.as_fd(), PollFlags::POLLIN)];
            let polled = nth.call(|| nix::poll::poll(&mut fds, PollTimeout::ZERO))?;
            if let Some(ready) = nth.sensible(polled)? {
                ensure_eq!(ready, 1);
            }
            Ok(())
        })?;
        peers.b.recv_tid(tid).map(drop)
    })
    .timeout(LONG);
    area.check("close() with agents, packets and sends outstanding", || {
        let (injection, peers) = ready()?;
        injection.every("close", 0, |nth| {
            let port = Port::open(peers.a.umad)?;
            let agent = port.register2(&all_methods())?;
            let mut request = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            request.agent = agent;
            port.send(&request.clone().timeout(Duration::from_secs(60)))?;
            let mad = VendorMad::new(OTHER_CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            peers
                .b
                .port
                .send(&Packet::new(peers.b.agent, &peers.a.address(), mad))?;
            port.poll(PollFlags::POLLIN, SOON)?;
            let fd = OwnedFd::from(port).into_raw_fd();
            // The file is closed, whatever fails.
            nth.call(|| nix::unistd::close(fd))??;
            fresh()?.register2(&all_methods()).what("after the close")?;
            Ok(())
        })?;
        peers.round_trip(fresh_tid()).map(drop)
    })
    .timeout(LONG);

    area.check("open() and close() of an issm device", || {
        let injection = Injection::new()?;
        let device = Spec::new(Shape::Ca, 1).plug()?;
        let path = device.issm(1)?;
        injection.every("open issm", 4, |nth| {
            let file = nth.sensible(nth.call(|| open(&path))?)?;
            ensure_eq!(is_sm(&device)?, file.is_some(), "IsSM");
            // The next one does not find it taken.
            drop(file);
            drop(nix::fcntl::open(
                &path,
                OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?);
            Ok(())
        })?;
        injection.every("close issm", 0, |nth| {
            let fd = open(&path)?.into_raw_fd();
            ensure!(is_sm(&device)?);
            nth.call(|| nix::unistd::close(fd))??;
            ensure!(!is_sm(&device)?, "IsSM is left behind");
            Ok(())
        })?;
        Ok(device.unplug()?)
    })
    .timeout(LONG);
    area.check("a device with SMI comes and goes", || {
        let injection = Injection::new()?;
        let before = names_in_class()?;
        // What the device's own driver and ib_core allocate for themselves is not looked at here.
        let code = code_of("ib_umad")?;
        injection.within(Some(code.clone()))?;
        injection.every("device added (2 ports with SMI)", 40, |nth| {
            let device = nth
                .call(|| Spec::new(Shape::Ca, 2).create())?
                .what("plugging")?;
            let (umads, issms) = (umads(&device.ibdev)?, issms(&device.ibdev)?.len());
            ensure!(
                (umads, issms) == (0, 0) || (umads, issms) == (2, 2),
                "{umads} umad and {issms} issm devices"
            );
            device.unplug()?;
            ensure_eq!(names_in_class()?, before);
            Ok(())
        })?;
        injection.every("device removed", 0, |nth| {
            let device = Spec::new(Shape::Ca, 1).plug()?;
            let (umad, issm) = (device.umad(1)?, device.issm(1)?);
            let port = Port::open(umad)?;
            let _issm = open(&issm)?;
            nth.call(|| device.unplug())??;
            ensure_eq!(names_in_class()?, before);
            let mut buf = [0; 320];
            ensure_errno!(port.read(&mut buf), EIO);
            Ok(())
        })?;
        injection.within(None)
    })
    .timeout(LONG);
    area.check("a Soft-RoCE device comes and goes", || {
        let injection = Injection::new()?;
        let before = names_in_class()?;
        let pair = RxePair::plain("fn")?;
        let mut rdma = Rdma::open()?;
        injection.within(Some(code_of("ib_umad")?))?;
        injection.every("Soft-RoCE device added", 20, |nth| {
            nth.call(|| rdma.add_link(&pair.a.ibdev, "rxe", &pair.a.netdev))??;
            let found = umads(&pair.a.ibdev)?;
            ensure!(found <= 1);
            rdma.delete_link(&pair.a.ibdev)?;
            ensure_eq!(names_in_class()?, before);
            Ok(())
        })?;
        injection.every("Soft-RoCE device removed", 0, |nth| {
            pair.a.plug()?;
            let port = Port::open(pair.a.umad()?)?;
            port.register2(&all_methods())?;
            nth.call(|| rdma.delete_link(&pair.a.ibdev))??;
            ensure_eq!(names_in_class()?, before);
            ensure_errno!(port.register2(&all_methods()), EPIPE);
            Ok(())
        })?;
        injection.within(None)
    })
    .timeout(LONG);
    area.check("the module is loaded and unloaded", || {
        let _loaded = Loaded;
        let injection = Injection::new()?;
        // What the module itself asks for: until it runs, its loader has no module on its stack.
        injection.within(Some(ALL_MODULES))?;
        unload_when_idle(SOON)?;
        injection.every("module loaded (2 devices)", 30, |nth| {
            let loaded = nth.sensible(nth.call(load)?)?.is_some();
            ensure_eq!(is_loaded(), loaded);
            if loaded {
                unload_when_idle(SOON)?;
            }
            ensure!(!fs::exists(sysfs::CLASS)?, "the class is left behind");
            let devices = fs::read_to_string("/proc/devices")?;
            ensure!(!devices.contains("infiniband_mad"), "majors are left");
            Ok(())
        })?;
        injection.every("module unloaded", 0, |nth| {
            load()?;
            let end = Instant::now() + SOON;
            // Something like udev may look at a node at any moment, so one refusal means nothing.
            loop {
                match nth.call(unload)? {
                    Ok(()) => break,
                    Err(Errno::EWOULDBLOCK) if Instant::now() < end => nth.again(),
                    Err(e) => return Err(e.into()),
                }
            }
            ensure!(!is_loaded());
            ensure!(!fs::exists(sysfs::CLASS)?, "the class is left behind");
            Ok(())
        })?;
        injection.within(None)?;
        load()?;
        wait_for_umad("rxe1")?;
        works()
    })
    .timeout(LONG);
    area.check(
        "a receiver without memory: MADs are lost, and nothing else",
        || {
            let (injection, peers) = ready()?;
            let code = code_of("ib_umad")?;
            injection.starve(code, || {
                for _ in 0..10 {
                    let tid = fresh_tid();
                    peers
                        .a
                        .port
                        .send(&peers.a.packet(&peers.b, Method::SEND, tid))?;
                }
                peers.b.nothing_comes()?;
                // The end of a request needs no memory.
                let tid = fresh_tid();
                let request = peers.a.packet(&peers.b, Method::GET, tid);
                peers
                    .a
                    .port
                    .send(&request.timeout(Duration::from_millis(100)))?;
                ensure_eq!(
                    peers.a.recv_tid(tid)?.header.status,
                    u32::try_from(libc::ETIMEDOUT)?
                );
                Ok(())
            })?;
            peers.b.nothing_comes()?;
            peers.round_trip(fresh_tid()).map(drop)
        },
    )
    .timeout(LONG);

    Module::run(area)
}
