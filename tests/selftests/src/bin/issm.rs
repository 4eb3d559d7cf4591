// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `issm`: the issm devices. Who has one, what opening and closing it does to the port, who waits
//! for whom, and what happens when the device goes.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use ktap::peers::SOON;
use ktap::prelude::*;
use nix::fcntl::OFlag;
use nix::sys::stat::{major, minor, mknod, Mode, SFlag};
use selftests::netlink::{Chardev, Rdma};
use selftests::task::{handle_signal, Task, MUST, MUST_NOT};
use selftests::vhca::{
    answer, attr, cap_mask_of, direct, issms, Agent, Faults, Module, Pair, Shape, Smp, Spec,
    SpecExt, Vhca, VhcaExt, IS_SM, PORT_DOWN,
};
use umad::sysfs;

// Unlike the standard library's open(), these are not begun anew after a signal.
fn open_with(path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    nix::fcntl::open(path, flags | OFlag::O_CLOEXEC, Mode::empty())
}

fn open(path: &Path) -> nix::Result<OwnedFd> {
    open_with(path, OFlag::O_RDWR)
}

fn open_now(path: &Path) -> nix::Result<OwnedFd> {
    open_with(path, OFlag::O_RDWR | OFlag::O_NONBLOCK)
}

fn lone() -> Outcome<Vhca> {
    Spec::new(Shape::Ca, 1).plug()
}

fn is_sm(device: &Vhca, port: u32) -> Outcome<bool> {
    Ok(device.cap_mask(port)? & IS_SM != 0)
}

/// The capability mask of the port at the other end of the cable, as a subnet manager sees it.
fn cap_mask_over_cable(manager: &Agent) -> Outcome<u32> {
    let smp = Smp::directed(Method::GET, attr::PORT_INFO, 0, &[1]);
    Ok(cap_mask_of(&answer(&manager.ask(&direct(), smp.0)?)?))
}

fn ensure_is_sm(device: &Vhca, want: bool) -> Outcome {
    ensure_eq!(is_sm(device, 1)?, want, "IsSM of {}", device.ibdev);
    Ok(())
}

/// Waits for what a close in another process must have done.
fn ensure_becomes(device: &Vhca, want: bool) -> Outcome {
    wait_until(&format!("IsSM is {want}"), SOON, || {
        is_sm(device, 1).is_ok_and(|now| now == want)
    })
}

/// A task that sleeps in the open() of an issm device.
fn waiter(path: &Path) -> Task<nix::Result<OwnedFd>> {
    let path = path.to_owned();
    Task::start_asleep(libc::SYS_openat, move || open(&path))
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("issm");

    for (shape, with) in [
        (Shape::Ca, true),
        (Shape::SmiOnly, true),
        (Shape::NoSmi, false),
        (Shape::Switch, true),
        (Shape::Opa, true),
        (Shape::NoMad, false),
    ] {
        let has = if with { "a port has" } else { "no port has" };
        area.check(
            format!("{shape:?}: {has} an issm device, with the umad number"),
            move || {
                let ports = if shape == Shape::Switch { 4 } else { 2 };
                let device = Spec::new(shape, ports).plug()?;
                // The second device is there to know when the first one was dealt with.
                let after = lone()?;
                after.umad(1)?;
                let want: Vec<(u32, u32)> = sysfs::ports()?
                    .into_iter()
                    .filter(|port| port.ibdev == device.ibdev && with)
                    .map(|port| (port.number, port.port))
                    .collect();
                ensure_eq!(issms(&device.ibdev)?, want);
                let count = match shape {
                    _ if !with => 0,
                    Shape::Switch => 1,
                    _ => 2,
                };
                ensure_eq!(want.len(), count, "issm devices");
                Ok(())
            },
        );
    }
    area.check("a port that is down has one, too", || {
        let device = Spec::new(Shape::Ca, 1)
            .port(1, |port| port.flags = PORT_DOWN)
            .plug()?;
        let _held = open(&device.issm(1)?)?;
        ensure_is_sm(&device, true)
    });
    area.check("each port of a device has its own", || {
        let device = Spec::new(Shape::Ca, 3).plug()?;
        let held = open(&device.issm(2)?)?;
        for port in 1..=3 {
            ensure_eq!(is_sm(&device, port)?, port == 2, "port {port}");
        }
        let _other = open_now(&device.issm(3)?)?;
        drop(held);
        for port in 1..=3 {
            ensure_eq!(is_sm(&device, port)?, port == 3, "port {port}");
        }
        Ok(())
    });
    area.check(
        "the node: a character device 231:64+N, attributes in sysfs",
        || {
            let device = lone()?;
            let (path, number) = (device.issm(1)?, device.umad(1)?);
            let node = std::fs::metadata(&path)?;
            ensure!(node.file_type().is_char_device());
            ensure_eq!(
                (major(node.rdev()), minor(node.rdev())),
                (231, 64 + u64::from(number))
            );
            let folder = format!("{}/issm{number}", sysfs::CLASS);
            ensure_eq!(
                std::fs::read_to_string(format!("{folder}/ibdev"))?,
                format!("{}\n", device.ibdev)
            );
            ensure_eq!(std::fs::read_to_string(format!("{folder}/port"))?, "1\n");
            ensure_eq!(
                std::fs::read_to_string(format!("{folder}/dev"))?,
                format!("231:{}\n", 64 + number)
            );
            Ok(())
        },
    );
    area.check("sysfs follows a rename of the device", || {
        let device = lone()?;
        let number = device.umad(1)?;
        let path = format!("{}/issm{number}/ibdev", sysfs::CLASS);
        run(&format!("rdma dev set {} name other", device.ibdev))?;
        ensure_eq!(std::fs::read_to_string(path)?, "other\n");
        Ok(())
    });

    area.check(
        "open sets IsSM, the close clears it: in sysfs, and in PortInfo over the cable",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            let before = cap_mask_over_cable(&manager)?;
            ensure_eq!(before & IS_SM, 0);
            ensure_is_sm(&pair.b, false)?;
            for _ in 0..3 {
                let held = open(&pair.b.issm(1)?)?;
                ensure_is_sm(&pair.b, true)?;
                ensure_eq!(cap_mask_over_cable(&manager)?, before | IS_SM);
                drop(held);
                ensure_is_sm(&pair.b, false)?;
                ensure_eq!(cap_mask_over_cable(&manager)?, before);
            }
            ensure_eq!(pair.b.counters()?.modified, 6, "calls of modify_port");
            Ok(())
        },
    );
    area.check("the other bits of the capability mask stay", || {
        let device = lone()?;
        let path = device.issm(1)?;
        for mask in [0x0208_0844, 0xffff_fffd, 0x4000_0000] {
            device.change(1, |port| port.cap_mask = mask)?;
            let held = open(&path)?;
            ensure_eq!(device.cap_mask(1)?, mask | IS_SM);
            drop(held);
            ensure_eq!(device.cap_mask(1)?, mask);
        }
        Ok(())
    });
    area.check(
        "the last close counts: a copy of the descriptor holds it",
        || {
            let device = lone()?;
            let held = open(&device.issm(1)?)?;
            let copy = held.try_clone()?;
            drop(held);
            ensure_is_sm(&device, true)?;
            drop(copy);
            ensure_is_sm(&device, false)
        },
    );
    area.check("a child holds it after its parent has closed it", || {
        let device = lone()?;
        let held = open(&device.issm(1)?)?;
        let mut child = fork(|| {
            std::thread::sleep(SOON);
            Ok(())
        })?;
        drop(held);
        ensure_is_sm(&device, true)?;
        child.kill(MUST)?;
        ensure_becomes(&device, false)
    });
    area.check("kill -9 clears IsSM", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let mut holder = fork(|| {
            let _held = open(&path)?;
            std::thread::sleep(SOON);
            Ok(())
        })?;
        ensure_becomes(&device, true)?;
        holder.kill(MUST)?;
        ensure_becomes(&device, false)?;
        drop(open_now(&path)?);
        Ok(())
    });
    area.check("read-only and write-only are as good", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let held = open_with(&path, OFlag::O_RDONLY)?;
        ensure_is_sm(&device, true)?;
        drop(held);
        let held = open_with(&path, OFlag::O_WRONLY)?;
        ensure_is_sm(&device, true)?;
        drop(held);
        ensure_is_sm(&device, false)
    });

    area.check(
        "a second open with O_NONBLOCK: EAGAIN, and nothing changes",
        || {
            let device = lone()?;
            let path = device.issm(1)?;
            let held = open(&path)?;
            for _ in 0..3 {
                ensure_errno!(open_now(&path), EAGAIN);
            }
            ensure_is_sm(&device, true)?;
            ensure_eq!(device.counters()?.modified, 1);
            drop(held);
            drop(open_now(&path)?);
            ensure_is_sm(&device, false)
        },
    );
    area.check("a second open waits, and takes over at the close", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let held = open(&path)?;
        let mut second = waiter(&path);
        ensure!(!second.within(MUST_NOT), "the second open() did not wait");
        drop(held);
        ensure!(
            matches!(second.result(MUST), Some(Ok(_))),
            "the second open() did not succeed"
        );
        ensure_is_sm(&device, true)?;
        // Cleared, and set again.
        ensure_eq!(device.counters()?.modified, 3);
        drop(second.stop());
        ensure_is_sm(&device, false)
    });
    area.check("four that wait get it one after the other", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let mut held = Some(open(&path)?);
        let mut waiting: Vec<_> = (0..4).map(|_| waiter(&path)).collect();
        while !waiting.is_empty() {
            drop(held.take());
            let end = Instant::now() + MUST;
            let next = loop {
                if let Some(at) = waiting
                    .iter_mut()
                    .position(|task| task.within(Duration::ZERO))
                {
                    ensure_eq!(at, 0, "who came first is not the first");
                    break waiting.remove(at);
                }
                ensure!(Instant::now() < end, "nobody took over");
                std::thread::sleep(Duration::from_millis(2));
            };
            std::thread::sleep(Duration::from_millis(50));
            ensure!(
                !waiting.iter_mut().any(|task| task.within(Duration::ZERO)),
                "two hold it at the same time"
            );
            ensure_is_sm(&device, true)?;
            let Some(Ok(file)) = next.stop() else {
                return Err("an open() failed".into());
            };
            held = Some(file);
        }
        drop(held);
        ensure_is_sm(&device, false)
    });
    area.check(
        "who closes and opens anew does not overtake one who waits",
        || {
            let device = lone()?;
            let path = device.issm(1)?;
            for _ in 0..20 {
                let held = open(&path)?;
                let mut second = waiter(&path);
                drop(held);
                ensure_errno!(open_now(&path), EAGAIN);
                ensure!(
                    matches!(second.result(MUST), Some(Ok(_))),
                    "the one who waits did not get it"
                );
                ensure_errno!(open_now(&path), EAGAIN);
                drop(second.stop());
            }
            Ok(())
        },
    );
    area.check("the holder dies by kill -9: the waiter takes over", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let mut holder = fork(|| {
            let _held = open(&path)?;
            std::thread::sleep(SOON);
            Ok(())
        })?;
        ensure_becomes(&device, true)?;
        let mut second = waiter(&path);
        holder.kill(MUST)?;
        ensure!(
            matches!(second.result(MUST), Some(Ok(_))),
            "the waiter did not take over"
        );
        ensure_is_sm(&device, true)
    });
    area.check("a signal ends the wait: EINTR", || {
        handle_signal(false);
        let device = lone()?;
        let path = device.issm(1)?;
        let _held = open(&path)?;
        let second = waiter(&path);
        ensure_eq!(second.stop().and_then(Result::err), Some(Errno::EINTR));
        ensure_errno!(open_now(&path), EAGAIN);
        ensure_is_sm(&device, true)
    });
    area.check("a waiter that is killed leaves nothing behind", || {
        let device = lone()?;
        let path = device.issm(1)?;
        let held = open(&path)?;
        let mut second = fork(|| {
            let _held = open(&path)?;
            Ok(())
        })?;
        std::thread::sleep(MUST_NOT);
        ensure!(second.is_running());
        second.kill(MUST)?;
        drop(held);
        ensure_is_sm(&device, false)?;
        drop(open_now(&path)?);
        Ok(())
    });

    area.check("no read, no write, no ioctl, no seek", || {
        let device = lone()?;
        let held = open(&device.issm(1)?)?;
        let mut buf = [0; 64];
        ensure_errno!(nix::unistd::read(&held, &mut buf), EINVAL);
        ensure_errno!(nix::unistd::write(&held, &buf), EINVAL);
        for command in [0x1b03, 0xc01c_1b01, 0x4004_1b02] {
            ensure_errno!(
                selftests::vhca::bare_ioctl(&held, command),
                ENOTTY,
                "{command:#x}"
            );
        }
        ensure_errno!(
            nix::unistd::lseek(&held, 0, nix::unistd::Whence::SeekSet),
            ESPIPE
        );
        Ok(())
    });
    area.check("poll says what it says of any file without an own", || {
        let device = lone()?;
        let held = open(&device.issm(1)?)?;
        let port = Port::from_fd(held);
        let events = port.poll(
            nix::poll::PollFlags::POLLIN | nix::poll::PollFlags::POLLOUT,
            Duration::from_millis(100),
        )?;
        ensure_eq!(
            events,
            nix::poll::PollFlags::POLLIN | nix::poll::PollFlags::POLLOUT
        );
        Ok(())
    });

    for (number, errno) in [(95, Errno::EOPNOTSUPP), (5, Errno::EIO)] {
        area.check(
            format!("modify_port fails: {errno}, and nothing is held"),
            move || {
                let device = lone()?;
                let path = device.issm(1)?;
                device.faults(Faults {
                    modify_port_errno: number,
                    ..Faults::default()
                })?;
                for _ in 0..3 {
                    ensure_eq!(open(&path).err(), Some(errno));
                }
                ensure_eq!(device.counters()?.modify_failed, 3);
                device.faults(Faults::default())?;
                let held = open_now(&path)?;
                ensure_is_sm(&device, true)?;
                // A close cannot fail: the bit stays, but the next one can have it.
                device.faults(Faults {
                    modify_port_errno: number,
                    ..Faults::default()
                })?;
                drop(held);
                ensure_is_sm(&device, true)?;
                device.faults(Faults::default())?;
                drop(open_now(&path)?);
                ensure_is_sm(&device, false)
            },
        );
    }
    area.check(
        "modify_port fails while another waits: that one is told, too",
        || {
            let device = lone()?;
            let path = device.issm(1)?;
            let held = open(&path)?;
            let mut second = waiter(&path);
            device.faults(Faults {
                modify_port_errno: 95,
                ..Faults::default()
            })?;
            drop(held);
            let got = second
                .result(MUST)
                .and_then(|got| got.as_ref().err())
                .copied();
            ensure_eq!(got, Some(Errno::EOPNOTSUPP));
            device.faults(Faults::default())?;
            drop(open_now(&path)?);
            Ok(())
        },
    );

    area.check(
        "the device goes while issm is held: the close is quiet",
        || {
            let device = lone()?;
            let path = device.issm(1)?;
            let held = open(&path)?;
            device.unplug()?;
            ensure!(!path.exists(), "the node is still there");
            drop(held);
            // Its number is free again.
            let next = lone()?;
            ensure_eq!(next.issm(1)?, path);
            drop(open_now(&path)?);
            Ok(())
        },
    );
    area.check(
        "the module can go when the holder of a device that is gone has closed",
        || {
            let device = lone()?;
            let held = open(&device.issm(1)?)?;
            device.unplug()?;
            ensure_errno!(ktap::module::unload(), EWOULDBLOCK);
            drop(held);
            ktap::module::unload_when_idle(MUST)?;
            ktap::module::load()?;
            Ok(())
        },
    );
    area.check("the device goes while another waits for issm: that one gets ENXIO at once", || {
        if ktap::Impl::current()? == ktap::Impl::C {
            return skip(
                "improvement 2: the C module gives the dead port to the waiter, which crashes the kernel",
            );
        }
        let device = lone()?;
        let path = device.issm(1)?;
        let held = open(&path)?;
        let mut waiting: Vec<_> = (0..3).map(|_| waiter(&path)).collect();
        device.unplug()?;
        for task in &mut waiting {
            let got = task
                .result(MUST)
                .and_then(|got| got.as_ref().err())
                .copied();
            ensure_eq!(got, Some(Errno::ENXIO));
        }
        drop(held);
        Ok(())
    });
    area.check("a stale node, its device held open: ENXIO", || {
        if ktap::Impl::current()? == ktap::Impl::C {
            return skip(
                "improvement 2: the C module says EAGAIN or, when the holder has closed, crashes the kernel",
            );
        }
        let device = lone()?;
        let path = device.issm(1)?;
        // An inode of its own keeps the cdev as long as the first open of it is cached.
        let stale = std::env::temp_dir().join(format!("issm-{}", std::process::id()));
        let devt = std::fs::metadata(&path)?.rdev();
        mknod(&stale, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, devt)?;
        let held = open(&stale)?;
        device.unplug()?;
        let while_held = open_now(&stale);
        drop(held);
        let after = open_now(&stale);
        std::fs::remove_file(&stale)?;
        ensure_errno!(while_held, ENXIO, "while it is held");
        ensure_errno!(after, ENXIO, "after the close");
        Ok(())
    });
    area.check(
        "opens race with the removal of the device: each gets it, or ENXIO",
        || {
            if ktap::Impl::current()? == ktap::Impl::C {
                return skip("improvement 2: the C module can crash the kernel in this race");
            }
            // A thousand races: eight ports, an opener for each.
            for _ in 0..125 {
                let device = Spec::new(Shape::Ca, 8).plug()?;
                let mut openers = Vec::new();
                for port in 1..=8 {
                    let path = device.issm(port)?;
                    openers.push(Task::start(move || loop {
                        if let Err(e) = open(&path) {
                            return e;
                        }
                        // The removal needs the processor, too.
                        std::thread::sleep(Duration::from_micros(200));
                    }));
                }
                device.unplug()?;
                for mut opener in openers {
                    let got = opener.result(MUST).copied();
                    // ENOENT: the node is gone from the file system.
                    ensure!(
                        matches!(got, Some(Errno::ENXIO | Errno::ENOENT)),
                        "an open() ended with {got:?}"
                    );
                }
            }
            Ok(())
        },
    )
    .timeout(240);

    for shape in [
        Shape::Ca,
        Shape::SmiOnly,
        Shape::NoSmi,
        Shape::Switch,
        Shape::Opa,
    ] {
        let port = u32::from(shape != Shape::Switch);
        area.check(format!("netlink: umad of {shape:?}"), move || {
            let device = Spec::new(shape, 1).plug()?;
            let number = device.umad(port)?;
            let mut rdma = Rdma::open()?;
            let index = rdma.index(&device.ibdev)?;
            let got = rdma.chardev("umad", Some(index), Some(port))?;
            ensure_eq!(got, chardev("umad", number));
            ensure_errno!(rdma.chardev("umad", Some(index), Some(port + 1)), EINVAL);
            Ok(())
        });
        if shape == Shape::NoSmi {
            area.check("netlink: issm of a port without QP 0 is EOPNOTSUPP", || {
                let device = Spec::new(Shape::NoSmi, 1).plug()?;
                device.umad(1)?;
                let mut rdma = Rdma::open()?;
                let index = rdma.index(&device.ibdev)?;
                ensure_errno!(rdma.chardev("issm", Some(index), Some(1)), EOPNOTSUPP);
                Ok(())
            });
        } else {
            area.check(format!("netlink: issm of {shape:?}"), move || {
                let device = Spec::new(shape, 1).plug()?;
                let number = device.umad(port)?;
                let mut rdma = Rdma::open()?;
                let index = rdma.index(&device.ibdev)?;
                let got = rdma.chardev("issm", Some(index), Some(port))?;
                ensure_eq!(got, chardev("issm", number));
                Ok(())
            })
            .improvement(3);
        }
    }
    area.check("netlink: each port of a device", || {
        let device = Spec::new(Shape::Ca, 3).plug()?;
        let mut rdma = Rdma::open()?;
        let index = rdma.index(&device.ibdev)?;
        for port in 1..=3 {
            let number = device.umad(port)?;
            let got = rdma.chardev("umad", Some(index), Some(port))?;
            ensure_eq!(got, chardev("umad", number), "port {port}");
        }
        Ok(())
    });
    area.check("netlink: a device without MADs is EOPNOTSUPP", || {
        let without = Spec::new(Shape::NoMad, 1).plug()?;
        lone()?.umad(1)?;
        let mut rdma = Rdma::open()?;
        let index = rdma.index(&without.ibdev)?;
        for kind in ["umad", "issm"] {
            ensure_errno!(
                rdma.chardev(kind, Some(index), Some(1)),
                EOPNOTSUPP,
                "{kind}"
            );
        }
        Ok(())
    });

    Module::run(area)
}

fn chardev(kind: &str, number: u32) -> Chardev {
    Chardev {
        name: format!("{kind}{number}"),
        abi: 5,
        major: 231,
        minor: u64::from(number) + if kind == "issm" { 64 } else { 0 },
    }
}
