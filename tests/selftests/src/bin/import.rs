// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `import`: `Port::import` says of a descriptor that came from elsewhere which port it is of, whether
//! that is still there, and uses it rightly; it refuses what is no umad file.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::Impl;
use nix::fcntl::OFlag;
use selftests::rights;
use selftests::task::{Task, MUST};
use selftests::vhca::{Module, Pair, VhcaExt};
use umad::{sysfs, Error};

/// A second descriptor of the same file, imported.
fn imported(port: &Port) -> Outcome<Port> {
    Ok(Port::import(port.as_fd().try_clone_to_owned()?)?)
}

/// Agent 0 of a port, as an endpoint asks and answers.
fn endpoint(port: Port, ibdev: &str) -> Outcome<Endpoint> {
    Ok(Endpoint {
        umad: ktap::wait_for_umad(ibdev)?,
        gid: sysfs::gid(ibdev, 1, 0)?,
        ibdev: ibdev.to_owned(),
        agent: AgentId(0),
        class: CLASS,
        port,
    })
}

/// A file of `rxe0` with an agent that asks, in a layout; the answerer, on `rxe1`.
fn asker(layout: Layout) -> Outcome<(Port, Endpoint)> {
    let port = fresh()?;
    let registration = Registration::class(CLASS, 1).oui(OUI);
    match layout {
        Layout::Old => port.register(&registration)?,
        Layout::New => port.register2(&registration)?,
    };
    Ok((port, answerer()?))
}

fn answerer() -> Outcome<Endpoint> {
    let registration = Registration::class(CLASS, 1)
        .oui(OUI)
        .methods(&[Method::GET]);
    Endpoint::open("rxe1", Layout::New, &registration)
}

/// A request over one descriptor of a file, answered, and read over another one.
fn round_trip(asker: &Endpoint, reader: &Port, answerer: &Endpoint) -> Outcome {
    let mut request = asker.packet(answerer, Method::GET, fresh_tid());
    request.header.timeout_ms = 60_000;
    request.mad[100] = 0xa5;
    asker.port.send(&request)?;
    let got = answerer.recv()?;
    ensure_eq!(got.mad[100], 0xa5, "a byte of the request");
    answerer.port.send(&answerer.response(&got)?)?;
    let answer = reader.recv_timeout(ktap::patient(SOON))?;
    ensure_eq!(answer.header.status, 0);
    ensure_eq!(answer.mad.len(), 256);
    ensure_eq!(answer.tid()?.low(), request.tid()?.low());
    ensure_eq!(answer.mad_header()?.method, Method::GET_RESP);
    ensure_eq!(answer.mad[100], 0xa5, "a byte of the answer");
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("import");

    area.check(
        "a umad file is imported, or the error says that the module tells nothing",
        || {
            let port = fresh()?;
            let result = Port::import(port.as_fd().try_clone_to_owned()?);
            match Impl::current()? {
                Impl::Rust => {
                    result?;
                }
                Impl::C => {
                    let why = result.err().ok_or("it succeeded")?;
                    ensure_eq!(why, Error::NoFdInfo);
                    ensure!(why.to_string().contains("C module"), "{why}");
                }
            }
            Ok(())
        },
    );
    area.check("a dup: device, port, alive, layout", || {
        let port = fresh_on("rxe1")?;
        let info = imported(&port)?.info()?;
        ensure_eq!((info.device.as_str(), info.port), ("rxe1", 1));
        ensure!(info.alive);
        ensure_eq!(info.layout, Layout::Old);
        ensure!(info.agents.is_empty());
        Ok(())
    })
    .improvement(9);
    for layout in [Layout::Old, Layout::New] {
        area.check(
            format!("a dup of a file with agents is used in its layout ({layout:?})"),
            move || {
                let (port, answerer) = asker(layout)?;
                let second = endpoint(imported(&port)?, "rxe0")?;
                ensure_eq!(second.port.layout(), layout);
                ensure_eq!(second.port.info()?.agents.len(), 1);
                round_trip(&second, &second.port, &answerer)?;
                // One asks, the other one reads, in both ways.
                round_trip(&second, &port, &answerer)?;
                let first = endpoint(port, "rxe0")?;
                round_trip(&first, &second.port, &answerer)
            },
        )
        .improvement(9);
    }
    area.check("ENABLE_PKEY of another holder is followed", || {
        let port = fresh()?;
        let second = imported(&port)?;
        ensure_eq!(second.layout(), Layout::Old);
        port.enable_pkey()?;
        ensure_eq!(second.layout(), Layout::New);
        Ok(())
    })
    .improvement(9);
    for layout in [Layout::Old, Layout::New] {
        area.check(
            format!("another holder's first agent settles the layout of a reader that waits already ({layout:?})"),
            move || {
                let number = ktap::wait_for_umad("rxe0")?;
                let port = Port::options().layout(Layout::Old).open(number)?;
                let second = imported(&port)?;
                let mut reader = Task::start_asleep(nix::libc::SYS_poll, move || second.recv());
                ensure!(!reader.within(Duration::ZERO), "it did not wait");
                let registration = Registration::class(CLASS, 1).oui(OUI).methods(&[Method::SEND]);
                match layout {
                    Layout::Old => port.register(&registration)?,
                    Layout::New => port.register2(&registration)?,
                };
                let sender = Endpoint::open("rxe1", Layout::New, &Registration::send_only())?;
                let receiver = endpoint(port, "rxe0")?;
                let mut packet = sender.packet(&receiver, Method::SEND, fresh_tid());
                packet.mad[200] = 0x77;
                sender.port.send(&packet)?;
                let got = reader.result(MUST).ok_or("it still waits")?;
                let got = got.as_ref().map_err(|e| format!("recv: {e}"))?;
                ensure_eq!(got.mad.len(), 256);
                ensure_eq!(got.mad[200], 0x77);
                ensure_eq!(got.tid()?.low(), packet.tid()?.low());
                Ok(())
            },
        )
        .improvement(9);
    }
    area.check("an own registration settles the layout, too", || {
        let port = fresh()?;
        let second = endpoint(imported(&port)?, "rxe0")?;
        let agent = second
            .port
            .register2(&Registration::class(CLASS, 1).oui(OUI))?;
        ensure_eq!(agent, AgentId(0));
        ensure_eq!(second.port.layout(), Layout::New);
        round_trip(&second, &second.port, &answerer()?)
    })
    .improvement(9);
    area.check("nothing to read yet: EAGAIN on a non-blocking file", || {
        ensure_errno!(imported(&fresh()?)?.recv(), EAGAIN);
        Ok(())
    })
    .improvement(9);
    area.check(
        "over SCM_RIGHTS from a process that is gone: identity, agents, round trips",
        || {
            let (mine, its) = rights::pair()?;
            let mut child = fork(|| {
                let (port, _) = asker(Layout::New)?;
                rights::send(&its, port.as_fd())
            })?;
            let fd = rights::receive(&mine)?;
            child.wait(MUST)?;
            let port = Port::import(fd)?;
            let info = port.info()?;
            ensure_eq!((info.device.as_str(), info.port), ("rxe0", 1));
            ensure!(info.alive);
            ensure_eq!(info.layout, Layout::New);
            ensure_eq!(info.agents.len(), 1);
            let port = endpoint(port, "rxe0")?;
            round_trip(&port, &port.port, &answerer()?)
        },
    )
    .improvement(9);
    area.check(
        "a port that goes is told, and imported afterwards, too",
        || {
            let pair = RxePair::new("im")?;
            let port = fresh_on(&pair.a.ibdev)?;
            let before = imported(&port)?;
            ensure!(before.info()?.alive);
            pair.a.unplug()?;
            let after = imported(&port)?;
            for file in [&before, &after] {
                let info = file.info()?;
                ensure!(!info.alive);
                ensure_eq!(info.device, pair.a.ibdev);
            }
            ensure_errno!(after.recv(), EIO);
            Ok(())
        },
    )
    .improvement(9);
    area.check(
        "the number is another device's: each file says its own",
        || {
            let pair = RxePair::new("in")?;
            let (mine, its) = rights::pair()?;
            let mut child = fork(|| {
                let port = fresh_on(&pair.a.ibdev)?;
                rights::send(&its, port.as_fd())
            })?;
            let number = pair.a.umad()?;
            child.wait(MUST)?;
            // The file is under way when the device goes.
            pair.a.unplug()?;
            pair.b.unplug()?;
            pair.b.plug()?;
            // The look-up by number would say the wrong device now.
            ensure_eq!(
                sysfs::ibdev(number)?,
                pair.b.ibdev,
                "the number's new owner"
            );
            let old = Port::import(rights::receive(&mine)?)?.info()?;
            ensure_eq!(old.device, pair.a.ibdev);
            ensure!(!old.alive);
            let new = imported(&Port::options().layout(Layout::Old).open(number)?)?.info()?;
            ensure_eq!(new.device, pair.b.ibdev);
            ensure!(new.alive);
            Ok(())
        },
    )
    .improvement(9);
    area.check("files that are none are refused", || {
        let named_so = Path::new("/tmp/umad0");
        fs::write(named_so, "umad-device:\trxe0\numad-port:\t1\n")?;
        let regular = File::open(named_so)?;
        fs::remove_file(named_so)?;
        let only_a_name = File::options()
            .read(true)
            .custom_flags(OFlag::O_PATH.bits())
            .open("/dev/infiniband/umad0")?;
        let (read_end, write_end) = nix::unistd::pipe()?;
        let (socket, _other) = rights::pair()?;
        let files: [(&str, OwnedFd); 8] = [
            ("a regular file", regular.into()),
            ("a folder", File::open("/dev/infiniband")?.into()),
            ("a pipe, to read", read_end),
            ("a pipe, to write", write_end),
            ("a socket", socket),
            ("another character device", File::open("/dev/zero")?.into()),
            ("a name of a umad node (O_PATH)", only_a_name.into()),
            (
                "its attributes in sysfs",
                File::open(format!("{}/umad0/dev", sysfs::CLASS))?.into(),
            ),
        ];
        for (what, fd) in files {
            let result = Port::import(fd);
            ensure!(matches!(result, Err(Error::NotUmad)), "{what}: {result:?}");
        }
        Ok(())
    });
    area.check("an issm file is refused", || {
        let pair = Pair::new()?;
        let file = File::options()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(pair.a.issm(1)?)?;
        let result = Port::import(file.into());
        ensure!(matches!(result, Err(Error::NotUmad)), "{result:?}");
        Ok(())
    });
    area.check("what is refused is closed", || {
        let file = File::open("/dev/zero")?;
        let number = file.as_raw_fd();
        ensure!(Port::import(file.into()).is_err());
        ensure!(fs::read_link(format!("/proc/self/fd/{number}")).is_err());
        Ok(())
    });
    Module::run(area)
}
