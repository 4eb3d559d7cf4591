// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `unplug`: a device goes away under open files, at any moment.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use nix::sys::stat::{makedev, mknod, Mode, SFlag};
use selftests::figure::{self, figure, figure_time};
use selftests::netlink::Rdma;
use selftests::task::{handle_signal, Task, MUST, NEVER};
use umad::sysfs::CLASS as CLASS_DIR;

const PACKET: usize = 64 + 256;

/// How long a sleeper may take to notice the unplug; on a module where it does not, the test ends
/// its sleep by a signal.
const NOTICE: Duration = Duration::from_secs(5);

/// How `ibdev` of a pair goes away.
#[derive(Clone, Copy)]
enum Way {
    /// `rdma link delete`
    Link,
    /// `ip link delete` of the network device below
    Netdev,
}

// How long an unplug takes while so many files write to a GID that nobody has.
fn unplug_under(files: usize) -> Outcome<Duration> {
    let pair = pair()?;
    let umad = pair.a.umad()?;
    let nobody: Gid = "fe80::dead:beef".parse()?;
    let writers = (0..files)
        .map(|_| {
            let port = Port::open(umad)?;
            let agent = port.register2(&Registration::send_only())?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            let packet = Packet::new(agent, &Address::roce(nobody, 0), mad);
            // Again and again, until the device is gone.
            Ok(Task::start_asleep(libc::SYS_write, move || loop {
                match port.send(&packet) {
                    Err(e) if e.errno() == Some(Errno::EIO) => break,
                    _ => (),
                }
            }))
        })
        .collect::<Outcome<Vec<_>>>()?;
    let begin = Instant::now();
    pair.a.unplug()?;
    let took = begin.elapsed();
    for writer in writers {
        ensure!(writer.stop().is_some(), "a writer goes on");
    }
    Ok(took)
}

fn remove(pair: &RxePair, way: Way) -> Outcome {
    match way {
        Way::Link => pair.a.unplug(),
        Way::Netdev => {
            run(&format!("ip link delete {}", pair.a.netdev))?;
            // The RDMA devices of both ends follow from a work queue.
            wait_until("the RDMA devices are gone", SOON, || {
                !pair.a.is_plugged() && !pair.b.is_plugged()
            })
        }
    }
}

fn pair() -> Outcome<RxePair> {
    RxePair::new("up")
}

fn peers(pair: &RxePair) -> Outcome<Peers> {
    Peers::on(&pair.a.ibdev, &pair.b.ibdev)
}

/// A thread that sleeps in read().
fn reader(port: &Arc<Port>) -> Task<umad::Result<usize>> {
    let port = Arc::clone(port);
    Task::start_asleep(libc::SYS_read, move || {
        let mut buffer = [0; PACKET];
        port.read(&mut buffer)
    })
}

/// Each of these readers ends with EIO, by itself.
fn readers_end(readers: Vec<Task<umad::Result<usize>>>) -> Outcome {
    let mut asleep = 0;
    let mut results = Vec::new();
    let end = Instant::now() + NOTICE;
    for mut reader in readers {
        if reader.within(end.saturating_duration_since(Instant::now())) {
            results.push(reader.stop());
        } else {
            asleep += 1;
            // Ends it, so that the file can be closed and the device go.
            ensure!(
                reader.stop().is_some(),
                "a reader cannot even be interrupted"
            );
        }
    }
    ensure_eq!(asleep, 0, "readers that sleep on");
    for result in results.into_iter().flatten() {
        ensure_errno!(result, EIO);
    }
    Ok(())
}

/// Every call on a file of a port that is gone, after `used` says whether it has had an agent.
fn all_calls_fail(port: &Port, used: bool) -> Outcome {
    let header = port.layout().header_len();
    let mut buffer = vec![0xa5; header + 256];
    ensure_errno!(port.read(&mut buffer), EIO);
    ensure!(
        buffer.iter().all(|byte| *byte == 0xa5),
        "EIO wrote something"
    );
    ensure_errno!(port.read(&mut buffer[..header - 1]), EINVAL);
    let bytes = vec![0; header + 256];
    ensure_errno!(port.write(&bytes), EIO);
    ensure_errno!(port.write(&bytes[..header + 35]), EINVAL);
    let mut no_agent = bytes.clone();
    no_agent[..4].copy_from_slice(&32u32.to_ne_bytes());
    ensure_errno!(port.write(&no_agent), EINVAL);
    ensure_errno!(port.register(&Registration::send_only()), EPIPE);
    ensure_errno!(port.register2(&Registration::send_only()), EPIPE);
    // That the port is gone counts before what is wrong with the request.
    ensure_errno!(port.register(&Registration::send_only().qpn(9)), EPIPE);
    ensure_errno!(port.register2(&Registration::send_only().flags(!0)), EPIPE);
    for id in [0, 1, 31, 32, u32::MAX] {
        ensure_errno!(port.unregister(AgentId(id)), EINVAL, "agent {id}");
    }
    let events = port.poll(PollFlags::POLLIN | PollFlags::POLLOUT, Duration::ZERO)?;
    ensure_eq!(events, PollFlags::POLLERR);
    if used {
        ensure_errno!(port.enable_pkey(), EINVAL);
    } else {
        port.enable_pkey()?;
        port.enable_pkey()?;
    }
    Ok(())
}

fn sleepers(area: &mut ktap::Area) {
    for (way, name) in [
        (Way::Link, "rdma link delete"),
        (Way::Netdev, "ip link delete"),
    ] {
        area.check(
            format!("{name}: a blocked read() ends with EIO"),
            move || {
                handle_signal(false);
                let pair = pair()?;
                let port = Arc::new(Port::open(pair.a.umad()?)?);
                let read = reader(&port);
                remove(&pair, way)?;
                readers_end(vec![read])
            },
        )
        .improvement(1);
        area.check(
            format!("{name}: a sleeping poll() ends with POLLERR"),
            move || {
                let pair = pair()?;
                let port = Arc::new(Port::open(pair.a.umad()?)?);
                let polling = Arc::clone(&port);
                let mut poll = Task::start_asleep(libc::SYS_poll, move || {
                    polling.poll(PollFlags::POLLIN, NEVER)
                });
                remove(&pair, way)?;
                ensure_eq!(poll.result(MUST), Some(&Ok(PollFlags::POLLERR)));
                Ok(())
            },
        );
        area.check(
            format!("{name}: every call fails from then on"),
            move || {
                let pair = pair()?;
                let n = pair.a.umad()?;
                let old = Port::options().layout(Layout::Old);
                let (fresh, used, used_old) = (old.open(n)?, Port::open(n)?, old.open(n)?);
                used.register2(&Registration::send_only())?;
                used_old.register(&Registration::send_only())?;
                remove(&pair, way)?;
                all_calls_fail(&fresh, false)?;
                all_calls_fail(&used, true)?;
                all_calls_fail(&used_old, true)
            },
        );
    }
    area.check("all blocked readers of all files end with EIO", || {
        handle_signal(false);
        let pair = pair()?;
        let files = (0..3)
            .map(|_| Ok(Arc::new(Port::open(pair.a.umad()?)?)))
            .collect::<Outcome<Vec<_>>>()?;
        files[0].register2(&Peers::registration(CLASS))?;
        let readers: Vec<_> = files.iter().chain(&files).map(reader).collect();
        pair.a.unplug()?;
        readers_end(readers)
    })
    .improvement(1);
    area.check("a blocked reader in another process ends with EIO", || {
        let pair = pair()?;
        let port = Port::open(pair.a.umad()?)?;
        let mut child = fork(|| {
            let mut buffer = [0; PACKET];
            ensure_errno!(port.read(&mut buffer), EIO);
            Ok(())
        })?;
        let syscall = format!("/proc/{}/syscall", child.pid());
        let read = format!("{} ", libc::SYS_read);
        wait_until("the child sleeps in read()", SOON, || {
            fs::read_to_string(&syscall).is_ok_and(|text| text.starts_with(&read))
        })?;
        drop(port);
        pair.a.unplug()?;
        child.wait(NOTICE)
    })
    .improvement(1);
    area.check(
        "readers of the other port sleep on, and get their packet",
        || {
            let pair = pair()?;
            let Peers { a, b } = Peers::new()?;
            let packet = a.packet(&b, Method::SEND, fresh_tid());
            let port = Arc::new(b.port);
            let mut read = reader(&port);
            pair.a.unplug()?;
            ensure!(
                !read.within(ktap::peers::QUIET),
                "it ended: {:?}",
                read.result(SOON)
            );
            a.port.send(&packet)?;
            ensure!(matches!(read.result(MUST), Some(Ok(PACKET))));
            Ok(())
        },
    );
}

fn outstanding(area: &mut ktap::Area) {
    area.check("queued packets are lost: EIO at once", || {
        let pair = pair()?;
        let peers = peers(&pair)?;
        for _ in 0..3 {
            let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
            peers.b.port.send(&packet)?;
        }
        peers.a.port.poll(PollFlags::POLLIN, SOON)?;
        pair.a.unplug()?;
        all_calls_fail(&peers.a.port, true)
    });
    area.check("sends outstanding do not hold the unplug up", || {
        let pair = pair()?;
        let peers = peers(&pair)?;
        for _ in 0..200 {
            let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
            peers
                .a
                .port
                .send(&request.timeout(Duration::from_secs(600)))?;
        }
        pair.a.unplug()?;
        all_calls_fail(&peers.a.port, true)
    });
    area.check(
        "a long message on its way does not hold the unplug up",
        || {
            for sender_goes in [true, false] {
                let pair = pair()?;
                let peers = peers_rmpp(&pair)?;
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
                    .rmpp()
                    .payload(&vec![1; 500_000]);
                let message = Packet::new(peers.a.agent, &peers.b.address(), mad.into_bytes());
                peers
                    .a
                    .port
                    .send(&message.timeout(Duration::from_secs(10)))?;
                let (port, file) = match sender_goes {
                    true => (&pair.a, &peers.a.port),
                    false => (&pair.b, &peers.b.port),
                };
                port.unplug()?;
                all_calls_fail(file, true)?;
            }
            Ok(())
        },
    );
    area.check(
        "a write() that resolves an address does not hold it up for long",
        || {
            let pair = pair()?;
            let peers = peers(&pair)?;
            // A link-local GID that nobody has: its resolution takes about a second.
            let nobody: Gid = "fe80::dead:beef".parse()?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            let packet = Packet::new(peers.a.agent, &Address::roce(nobody, 0), mad);
            let file = Arc::new(peers.a.port);
            let writing = Arc::clone(&file);
            let mut write = Task::start_asleep(libc::SYS_write, move || writing.send(&packet));
            let mut unplug = Task::start(move || {
                pair.a.unplug()?;
                Outcome::Ok(pair)
            });
            ensure!(unplug.within(MUST), "the unplug hangs");
            // Which of the two ended first decides the error.
            match write.result(MUST) {
                Some(Err(e)) => ensure!(
                    matches!(
                        e.errno(),
                        Some(
                            Errno::EIO
                                | Errno::ETIMEDOUT
                                | Errno::ENODEV
                                | Errno::ENETUNREACH
                                | Errno::EINVAL
                        )
                    ),
                    "{e}"
                ),
                other => ensure!(false, "{other:?}"),
            }
            let Some(unplugged) = unplug.stop() else {
                return Err("the unplug hangs".into());
            };
            unplugged?;
            all_calls_fail(&file, true)
        },
    );
    area.check(
        "files that resolve addresses hold it up as long as one, not as long as all",
        || {
            let one = unplug_under(1)?;
            let many = unplug_under(12)?;
            figure_time("unplug, one file resolves an address", one);
            figure_time("unplug, twelve files resolve addresses", many);
            // One resolution takes about a second, which all of them are in the middle of.
            ensure!(many < one * 4, "one file: {one:?}, twelve files: {many:?}");
            Ok(())
        },
    )
    .improvement(4)
    .timeout(150);
    area.check(
        "writers and readers at work when it happens end with EIO",
        || {
            for _ in 0..3 {
                let pair = pair()?;
                let Peers { a, b } = peers(&pair)?;
                let (a, b) = (Arc::new(a), Arc::new(b));
                let writers: Vec<_> = (0..4)
                    .map(|_| {
                        let (a, b) = (Arc::clone(&a), Arc::clone(&b));
                        Task::start(move || loop {
                            let request = a.packet(&b, Method::GET, fresh_tid());
                            if let Err(e) = a.port.send(&request.timeout(Duration::from_millis(30)))
                            {
                                return e;
                            }
                        })
                    })
                    .collect();
                // Readers that never sleep for good, whatever the module.
                let reading = Arc::clone(&a);
                let reader = Task::start(move || loop {
                    match reading.port.recv_timeout(SOON) {
                        Ok(_) => {}
                        Err(e) => return e,
                    }
                });
                a.port.poll(PollFlags::POLLIN, SOON)?;
                pair.a.unplug()?;
                for mut task in writers.into_iter().chain([reader]) {
                    match task.result(MUST) {
                        Some(e) => ensure_eq!(e.errno(), Some(Errno::EIO)),
                        None => ensure!(false, "a thread hangs"),
                    }
                }
            }
            Ok(())
        },
    );
    area.check(
        "agents that come and go when it happens end with EPIPE",
        || {
            for _ in 0..3 {
                let pair = pair()?;
                let file = Port::open(pair.a.umad()?)?;
                let mut churn = Task::start(move || loop {
                    let agent = match file.register2(&Peers::registration(CLASS)) {
                        Ok(agent) => agent,
                        Err(e) => return ("register", e),
                    };
                    if let Err(e) = file.unregister(agent) {
                        // Gone between the two calls: unknown agent. The next register says it.
                        if e.errno() != Some(Errno::EINVAL) {
                            return ("unregister", e);
                        }
                    }
                });
                std::thread::sleep(Duration::from_millis(50));
                pair.a.unplug()?;
                match churn.result(MUST) {
                    Some(("register", e)) => ensure_eq!(e.errno(), Some(Errno::EPIPE)),
                    other => ensure!(false, "{other:?}"),
                }
            }
            Ok(())
        },
    );
    area.check(
        "the peer that stays gets timeouts, and nothing else",
        || {
            let pair = pair()?;
            let peers = peers(&pair)?;
            let request = peers.b.packet(&peers.a, Method::GET, fresh_tid());
            peers
                .b
                .port
                .send(&request.clone().timeout(Duration::from_secs(1)))?;
            peers.a.recv()?;
            pair.a.unplug()?;
            let got = peers.b.recv()?;
            ensure_eq!(got.header.status, Errno::ETIMEDOUT as u32);
            ensure_eq!(got.tid()?.low(), request.tid()?.low());
            Ok(())
        },
    );
    area.check(
        "close() after the unplug returns, whatever the file holds",
        || {
            let pair = pair()?;
            let peers = peers(&pair)?;
            for _ in 0..10 {
                let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
                peers.b.port.send(&packet)?;
                let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
                peers
                    .a
                    .port
                    .send(&request.timeout(Duration::from_secs(60)))?;
            }
            peers.a.port.poll(PollFlags::POLLIN, SOON)?;
            pair.a.unplug()?;
            let mut close = Task::start(move || drop(peers));
            ensure!(close.within(MUST), "close() hangs");
            Ok(())
        },
    );
}

fn peers_rmpp(pair: &RxePair) -> Outcome<Peers> {
    let registration = Peers::registration(CLASS).rmpp(1);
    Peers::with(&pair.a.ibdev, &pair.b.ibdev, Layout::New, &registration)
}

/// A node of a umad number that the test made itself, so that it outlives the device.
struct OwnNode(PathBuf);

impl OwnNode {
    fn new(number: u32) -> Outcome<Self> {
        let path = PathBuf::from(format!("/tmp/umad-node-{number}"));
        let _ = fs::remove_file(&path);
        let device = makedev(231, number.into());
        mknod(&path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device)?;
        Ok(Self(path))
    }
}

impl Drop for OwnNode {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn numbers(area: &mut ktap::Area) {
    area.check(
        "a node of one's own opens the port, and says ENXIO after the unplug",
        || {
            let pair = pair()?;
            let node = OwnNode::new(pair.a.umad()?)?;
            Port::open_path(&node.0)?;
            pair.a.unplug()?;
            ensure_errno!(Port::open_path(&node.0), ENXIO);
            // And the port again after the next plug.
            pair.a.plug()?;
            Port::open_path(&node.0)?;
            Ok(())
        },
    );
    area.check(
        "opening anew by an open file's inode: ENXIO after the unplug",
        || {
            use std::os::fd::AsRawFd;
            let pair = pair()?;
            let port = Port::open(pair.a.umad()?)?;
            let path = format!("/proc/self/fd/{}", port.as_raw_fd());
            Port::open_path(Path::new(&path))?;
            pair.a.unplug()?;
            ensure_errno!(Port::open_path(Path::new(&path)), ENXIO);
            // Not the new device that has the number meanwhile, either.
            pair.a.plug()?;
            ensure_errno!(Port::open_path(Path::new(&path)), ENXIO);
            Ok(())
        },
    );
    area.check("numbers nobody has: ENXIO", || {
        for number in [5, 63] {
            let node = OwnNode::new(number)?;
            ensure_errno!(Port::open_path(&node.0), ENXIO);
        }
        Ok(())
    });
    area.check(
        "sysfs, node and number are gone while a file is open",
        || {
            let pair = pair()?;
            let n = pair.a.umad()?;
            let port = Port::open(n)?;
            pair.a.unplug()?;
            ensure!(!fs::exists(format!("{CLASS_DIR}/umad{n}"))?);
            ensure!(!umad::port::node(n).exists());
            all_calls_fail(&port, false)
        },
    );
    area.check(
        "the number is given out again while a file of the old device is open",
        || {
            let pair = pair()?;
            let n = pair.a.umad()?;
            let old = Port::open(n)?;
            old.register2(&Peers::registration(CLASS))?;
            pair.a.unplug()?;
            pair.a.plug()?;
            ensure_eq!(pair.a.umad()?, n);
            let peers = peers(&pair)?;
            all_calls_fail(&old, true)?;
            peers.round_trip(fresh_tid())?;
            drop(old);
            peers.round_trip(fresh_tid())?;
            Ok(())
        },
    );
    area.check("the lowest free number is given out", || {
        let one = RxePair::new("up")?;
        let two = RxePair::new("uq")?;
        ensure_eq!((one.a.umad()?, one.b.umad()?), (2, 3));
        ensure_eq!((two.a.umad()?, two.b.umad()?), (4, 5));
        one.b.unplug()?;
        two.a.unplug()?;
        two.a.plug()?;
        ensure_eq!(two.a.umad()?, 3);
        one.b.plug()?;
        ensure_eq!(one.b.umad()?, 4);
        ensure_eq!((one.a.umad()?, two.b.umad()?), (2, 5), "those that stayed");
        Ok(())
    });
    area.check(
        "what was open before works on beside a device that comes and goes",
        || {
            let peers = Peers::new()?;
            let pair = RxePair::plain("up")?;
            for _ in 0..5 {
                pair.a.plug()?;
                peers.round_trip(fresh_tid())?;
                pair.a.unplug()?;
                peers.round_trip(fresh_tid())?;
            }
            Ok(())
        },
    );
}

/// Lets others have the processor: the load is there to be in the way, not to fill the machine.
fn breathe() {
    std::thread::sleep(Duration::from_millis(2));
}

/// Opens, uses and closes whatever umad device the pair's first end has, for ever.
fn use_what_is_there(number: u32) -> Outcome {
    loop {
        let port = match Port::options().nonblock(true).open(number) {
            Ok(port) => port,
            Err(e) if matches!(e.errno(), Some(Errno::ENOENT | Errno::ENXIO)) => {
                breathe();
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let agent = match port.register2(&Registration::send_only()) {
            Ok(agent) => agent,
            Err(e) if e.errno() == Some(Errno::EPIPE) => continue,
            Err(e) => return Err(e.into()),
        };
        let mut buffer = [0; PACKET];
        match port.read(&mut buffer) {
            Err(e) if matches!(e.errno(), Some(Errno::EAGAIN | Errno::EIO)) => {}
            other => ensure!(false, "read: {other:?}"),
        }
        match port.unregister(agent) {
            Ok(()) => {}
            Err(e) if e.errno() == Some(Errno::EINVAL) => {}
            Err(e) => return Err(e.into()),
        }
        breathe();
    }
}

/// Receives what comes on the pair's first end, answers it, and holds requests outstanding.
fn serve_what_is_there(number: u32, peer: Address) -> Outcome {
    loop {
        let Ok(port) = Port::open(number) else {
            breathe();
            continue;
        };
        let Ok(agent) = port.register2(&Peers::registration(CLASS)) else {
            continue;
        };
        loop {
            let mad = VendorMad::new(CLASS, OUI, Method::GET, fresh_tid()).into_bytes();
            let request = Packet::new(agent, &peer, mad).timeout(Duration::from_millis(200));
            if port.send(&request).is_err() {
                break;
            }
            match port.recv_timeout(Duration::from_millis(20)) {
                Ok(_) | Err(umad::Error::TimedOut) => {}
                Err(e) if e.errno() == Some(Errno::EIO) => break,
                Err(e) => return Err(e.into()),
            }
        }
    }
}

fn cycles(area: &mut ktap::Area) {
    area.check("plugs and unplugs under load", || {
        let (pair, cycles) = (pair()?, figure::cycles(200)?);
        let n = pair.a.umad()?;
        let b = Endpoint::open(&pair.b.ibdev, Layout::New, &Peers::registration(CLASS))?;
        let to = Address::roce(umad::sysfs::gid(&pair.a.ibdev, 1, 0)?, 0);
        let mut users = vec![
            fork(|| use_what_is_there(n))?,
            fork(|| serve_what_is_there(n, b.address()))?,
            fork(|| loop {
                // From outside: MADs that come in whether the device is there or not. They are Sends,
                // because ib_core answers a Get that no agent wants by itself, and in 7.3 that can
                // use its own agent of the port after its end: refcount_t warnings from
                // agent_send_response, whatever umad module is loaded.
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
                b.port.send(&Packet::new(b.agent, &to, mad))?;
                breathe();
            })?,
        ];
        // By netlink, without a pause between the two.
        let mut rdma = Rdma::open()?;
        let begin = Instant::now();
        for cycle in 0..cycles {
            let what = || format!("cycle {cycle}");
            rdma.delete_link(&pair.a.ibdev).what(what())?;
            rdma.add_link(&pair.a.ibdev, "rxe", &pair.a.netdev)
                .what(what())?;
            ensure_eq!(pair.a.umad()?, n, "number in cycle {cycle}");
        }
        figure("plug cycles under load, without a pause", cycles, "cycles");
        figure_time("each of them, without a pause", begin.elapsed() / cycles);
        ktap::settle(&pair.a.ibdev)?;
        for user in &mut users {
            if !user.is_running() {
                user.wait(MUST).what("one of the users")?;
            }
            user.kill(MUST)?;
        }
        drop(b);
        peers(&pair)?.round_trip(fresh_tid()).map(drop)
    })
    .timeout(figure::cycles_bound(200));
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("unplug");
    sleepers(&mut area);
    outstanding(&mut area);
    numbers(&mut area);
    cycles(&mut area);
    area.run()
}
