// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `fdinfo`: what `/proc/PID/fdinfo/FD` tells of a umad file.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use selftests::fdinfo::FdInfo;
use selftests::task::MUST;

/// The file's lines; fails where there are none, as on the C module.
fn info(port: &Port) -> Outcome<FdInfo> {
    FdInfo::of(port.as_fd())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("fdinfo");

    area.check("a fresh file: device, port, layout, nothing else", || {
        let port = fresh()?;
        let info = info(&port)?;
        for (key, value) in [
            ("device", "rxe0"),
            ("port", "1"),
            ("state", "alive"),
            ("header", "56"),
            ("unread", "0 packets, 0 bytes"),
            ("outstanding", "0 sends, 0 bytes"),
            ("sent", "0"),
            ("received", "0"),
            ("timed-out", "0"),
            ("dropped", "0"),
        ] {
            ensure_eq!(info.get(key)?, value, "{key}");
        }
        ensure!(info.all("agent").is_empty());
        Ok(())
    })
    .improvement(9);
    area.check("the layout follows ENABLE_PKEY and REGISTER_AGENT2", || {
        let port = fresh()?;
        port.enable_pkey()?;
        ensure_eq!(info(&port)?.get("header")?, "64");
        let port = fresh()?;
        port.register2(&Registration::send_only())?;
        ensure_eq!(info(&port)?.get("header")?, "64");
        let port = fresh()?;
        port.register(&Registration::send_only())?;
        ensure_eq!(info(&port)?.get("header")?, "56");
        Ok(())
    })
    .improvement(9);
    area.check("agents, by id, with what they were registered for", || {
        let port = fresh()?;
        port.register2(&Registration::send_only().rmpp(1))?;
        let gone = port.register2(&Registration::send_only())?;
        port.register2(
            &Registration::class(CLASS, 1)
                .oui(OUI)
                .methods(&[Method::GET, Method::SEND, Method(0x7f)])
                .rmpp(1)
                .user_rmpp(),
        )?;
        port.register2(&Registration::class(0x0a, 3).methods(&[Method::SET]))?;
        port.unregister(gone)?;
        ensure_eq!(
            info(&port)?.all("agent"),
            vec![
                "id 0 qp 1 rmpp kernel",
                "id 2 qp 1 rmpp user class 0x30 version 1 oui 001405 \
                 methods 8000000000000000000000000000000a",
                "id 3 qp 1 rmpp none class 0x0a version 3 oui 000000 \
                 methods 00000000000000000000000000000004",
            ]
        );
        Ok(())
    })
    .improvement(9);
    area.check("32 agents are 32 lines", || {
        let port = fresh()?;
        for _ in 0..32 {
            port.register2(&Registration::send_only())?;
        }
        ensure_eq!(info(&port)?.all("agent").len(), 32);
        Ok(())
    })
    .improvement(9);
    area.check("sent, received, unread: counted as they happen", || {
        let peers = Peers::new()?;
        for _ in 0..5 {
            peers
                .a
                .port
                .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
        }
        wait_until("five are unread", SOON, || {
            info(&peers.b.port).is_ok_and(|i| i.number("unread").is_ok_and(|n| n == 5))
        })?;
        let b = info(&peers.b.port)?;
        ensure_eq!(b.number("received")?, 5);
        ensure!(b.bytes("unread")? >= 5 * 256);
        peers.b.recv()?;
        ensure_eq!(info(&peers.b.port)?.number("unread")?, 4);
        ensure_eq!(info(&peers.b.port)?.number("received")?, 5);
        wait_until("all sends are done", SOON, || {
            info(&peers.a.port)
                .is_ok_and(|i| i.get("outstanding").is_ok_and(|o| o == "0 sends, 0 bytes"))
        })?;
        ensure_eq!(info(&peers.a.port)?.number("sent")?, 5);
        Ok(())
    })
    .improvement(9);
    area.check("outstanding sends and timeouts are counted", || {
        let peers = Peers::new()?;
        let send = |ms| {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers
                .a
                .port
                .send(&packet.timeout(Duration::from_millis(ms)))
        };
        send(100_000)?;
        send(100_000)?;
        send(50)?;
        let timeout = peers.a.recv()?;
        ensure_eq!(timeout.header.status, 110);
        let a = info(&peers.a.port)?;
        ensure_eq!(a.number("outstanding")?, 2);
        ensure!(a.bytes("outstanding")? >= 2 * 256);
        ensure_eq!(a.number("timed-out")?, 1);
        ensure_eq!(a.number("sent")?, 3);
        // Unregistering ends them.
        peers.a.port.unregister(peers.a.agent)?;
        ensure_eq!(info(&peers.a.port)?.get("outstanding")?, "0 sends, 0 bytes");
        Ok(())
    })
    .improvement(9);
    area.check("a write that is refused leaves no trace", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        let packet = packet.timeout(Duration::from_secs(100));
        peers.a.port.send(&packet)?;
        let before = info(&peers.a.port)?;
        ensure_eq!(before.number("sent")?, 1);
        // A duplicate; an agent that is none; a GID index that is none; too long.
        ensure_errno!(peers.a.port.send(&packet), EINVAL);
        let mut other = packet.clone();
        other.agent = AgentId(7);
        ensure_errno!(peers.a.port.send(&other), EIO);
        let mut other = packet.clone();
        other.header.gid_index = 250;
        ensure!(peers.a.port.send(&other).is_err());
        let mut other = packet.clone();
        other.mad.resize(300, 0);
        ensure_errno!(peers.a.port.send(&other), EINVAL);
        ensure_eq!(info(&peers.a.port)?, before);
        Ok(())
    })
    .improvement(9);
    area.check("a file whose device is gone says so, for ever", || {
        let pair = RxePair::new("fi")?;
        let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
        pair.a.unplug()?;
        let a = info(&peers.a.port)?;
        ensure_eq!(a.get("state")?, "gone");
        ensure_eq!(a.get("device")?, pair.a.ibdev);
        ensure!(a.all("agent").is_empty());
        ensure_eq!(info(&peers.b.port)?.get("state")?, "alive");
        // Another device may have its number and its name now.
        pair.a.plug()?;
        ensure_eq!(info(&peers.a.port)?.get("state")?, "gone");
        let again = Port::open(pair.a.umad()?)?;
        ensure_eq!(info(&again)?.get("state")?, "alive");
        Ok(())
    })
    .improvement(9);
    area.check("the name follows a rename", || {
        let pair = RxePair::new("fr")?;
        let port = fresh_on(&pair.a.ibdev)?;
        run(&format!("rdma dev set {} name renamed0", pair.a.ibdev))?;
        let seen = info(&port).and_then(|info| Ok(info.get("device")?.to_owned()));
        run(&format!("rdma dev set renamed0 name {}", pair.a.ibdev))?;
        ensure_eq!(seen?, "renamed0");
        Ok(())
    })
    .improvement(9);
    area.check("another process sees the same of the same file", || {
        let peers = Peers::new()?;
        let fd = peers.a.port.as_fd().as_raw_fd();
        let mut child = fork(|| {
            std::thread::sleep(MUST);
            Ok(())
        })?;
        let mine = info(&peers.a.port)?;
        ensure_eq!(mine.get("device")?, "rxe0");
        ensure_eq!(FdInfo::of_process(&child.pid().to_string(), fd)?, mine);
        child.kill(MUST)
    })
    .improvement(9);
    area.check("asking while sends, reads and agents come and go", || {
        let peers = Peers::new()?;
        let end = Instant::now() + Duration::from_secs(2);
        let asked = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let mut asked = 0;
                while Instant::now() < end {
                    info(&peers.a.port)?.get("state")?;
                    asked += 1;
                }
                Ok::<u32, ktap::Failure>(asked)
            });
            while Instant::now() < end {
                peers.round_trip(fresh_tid())?;
                let agent = peers.a.port.register2(&Registration::send_only())?;
                peers.a.port.unregister(agent)?;
            }
            asking.join().map_err(|_| "the thread panicked")?
        })?;
        ensure!(asked > 10, "asked {asked} times");
        Ok(())
    })
    .improvement(9);
    area.run()
}
