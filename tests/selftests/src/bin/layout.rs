// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `layout`: the two header layouts, and which call brings which.
//!
//! A file starts with 56-byte headers. ENABLE_PKEY, or REGISTER_AGENT2 as the first registration,
//! turns that into 64 bytes with a P_Key index; any registration that worked settles it for good.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use selftests::task::{Task, MUST};
use selftests::uffd::{Region, PAGE};

// What the kernel thinks: one byte less than a header is EINVAL, a header is EAGAIN (nothing there).
fn ensure_layout(port: &Port, layout: Layout) -> Outcome {
    let mut buf = [0; 64];
    let len = layout.header_len();
    ensure_errno!(
        port.read(&mut buf[..len - 1]),
        EINVAL,
        "read of {} bytes",
        len - 1
    );
    ensure_errno!(port.read(&mut buf[..len]), EAGAIN, "read of {len} bytes");
    Ok(())
}

fn no_agent() -> Registration {
    Registration::class(CLASS, 200)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("layout");

    area.check("a fresh file has 56-byte headers", || {
        ensure_layout(&fresh()?, Layout::Old)
    });
    area.check("ENABLE_PKEY brings 64-byte headers", || {
        let port = fresh()?;
        port.enable_pkey()?;
        ensure_layout(&port, Layout::New)
    });
    area.check("ENABLE_PKEY twice is no error", || {
        let port = fresh()?;
        port.enable_pkey()?;
        port.enable_pkey()?;
        ensure_layout(&port, Layout::New)
    });
    area.check("REGISTER_AGENT keeps 56-byte headers", || {
        let port = fresh()?;
        port.register(&Registration::send_only())?;
        ensure_layout(&port, Layout::Old)
    });
    area.check(
        "REGISTER_AGENT after ENABLE_PKEY keeps 64-byte headers",
        || {
            let port = fresh()?;
            port.enable_pkey()?;
            port.register(&Registration::send_only())?;
            ensure_layout(&port, Layout::New)
        },
    );
    area.check(
        "REGISTER_AGENT2 as first registration brings 64-byte headers",
        || {
            let port = fresh()?;
            port.register2(&Registration::send_only())?;
            ensure_layout(&port, Layout::New)
        },
    );
    area.check(
        "REGISTER_AGENT2 after REGISTER_AGENT keeps 56-byte headers",
        || {
            let port = fresh()?;
            port.register(&Registration::send_only())?;
            port.register2(&Registration::send_only())?;
            ensure_layout(&port, Layout::Old)
        },
    );
    area.check(
        "ENABLE_PKEY after REGISTER_AGENT is EINVAL and changes nothing",
        || {
            let port = fresh()?;
            port.register(&Registration::send_only())?;
            ensure_errno!(port.enable_pkey(), EINVAL);
            ensure_layout(&port, Layout::Old)
        },
    );
    area.check(
        "ENABLE_PKEY after REGISTER_AGENT2 is EINVAL and changes nothing",
        || {
            let port = fresh()?;
            port.register2(&Registration::send_only())?;
            ensure_errno!(port.enable_pkey(), EINVAL);
            ensure_layout(&port, Layout::New)
        },
    );
    area.check(
        "ENABLE_PKEY is EINVAL even when all agents are gone again",
        || {
            let port = fresh()?;
            let agent = port.register(&Registration::send_only())?;
            port.unregister(agent)?;
            ensure_errno!(port.enable_pkey(), EINVAL);
            ensure_layout(&port, Layout::Old)
        },
    );
    area.check(
        "REGISTER_AGENT2 keeps 56-byte headers even when all agents are gone again",
        || {
            let port = fresh()?;
            let agent = port.register(&Registration::send_only())?;
            port.unregister(agent)?;
            port.register2(&Registration::send_only())?;
            ensure_layout(&port, Layout::Old)
        },
    );
    area.check("a REGISTER_AGENT that failed settles nothing", || {
        let port = fresh()?;
        ensure_errno!(port.register(&no_agent()), EINVAL);
        ensure_layout(&port, Layout::Old)?;
        port.enable_pkey()?;
        ensure_layout(&port, Layout::New)
    });
    area.check("a REGISTER_AGENT2 that failed settles nothing", || {
        let port = fresh()?;
        ensure_errno!(port.register2(&no_agent()), EINVAL);
        ensure_layout(&port, Layout::Old)?;
        port.register(&Registration::send_only())?;
        ensure_layout(&port, Layout::Old)
    });
    area.check("a layout belongs to one open file, not to the port", || {
        let (one, two) = (fresh()?, fresh()?);
        one.enable_pkey()?;
        ensure_layout(&one, Layout::New)?;
        ensure_layout(&two, Layout::Old)
    });
    area.check("a duplicated descriptor shares the layout", || {
        let port = fresh()?;
        let copy: OwnedFd = port.as_fd().try_clone_to_owned()?;
        port.enable_pkey()?;
        ensure_layout(&Port::from_fd(copy), Layout::New)
    });
    area.check("a child process shares the layout", || {
        let port = fresh()?;
        fork(|| {
            port.enable_pkey()?;
            Ok(())
        })?
        .wait(Duration::from_secs(20))?;
        ensure_layout(&port, Layout::New)
    });

    for layout in [Layout::Old, Layout::New] {
        let len = layout.header_len();
        area.check(
            format!("a MAD comes behind a {len}-byte header, unchanged"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let tid = fresh_tid();
                let mut packet = peers.a.packet(&peers.b, Method::SEND, tid);
                for (n, byte) in (0..=255).cycle().zip(&mut packet.mad[VendorMad::DATA..]) {
                    *byte = n;
                }
                peers.a.port.send(&packet)?;
                let mut buf = [0xee; 1024];
                peers.b.wait_readable()?;
                ensure_eq!(peers.b.port.read(&mut buf)?, len + 256);
                ensure_eq!(buf[len + 4..len + 8], packet.mad[4..8]);
                ensure_eq!(
                    buf[len + 12..len + 256],
                    packet.mad[12..],
                    "the MAD behind its TID"
                );
                ensure!(
                    buf[len + 256..].iter().all(|byte| *byte == 0xee),
                    "the rest of the buffer was written to"
                );
                Ok(())
            },
        );
        area.check(
            format!("the length field counts the {len}-byte header"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let got = peers.deliver(fresh_tid())?;
                ensure_eq!(usize::try_from(got.header.length)?, len + 256);
                Ok(())
            },
        );
        area.check(
            format!("fields without a meaning on receive are 0 ({len} bytes)"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mut packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .retries(7);
                packet.header.status = 99;
                packet.header.length = 12345;
                peers.a.port.send(&packet)?;
                let got = peers.b.recv_tid(packet.tid()?)?;
                ensure_eq!(got.header.status, 0);
                ensure_eq!(got.header.timeout_ms, 0);
                ensure_eq!(got.header.retries, 0);
                ensure_eq!(got.header.qkey.get(), 0);
                Ok(())
            },
        );
        area.check(
            format!("the id names the receiving agent ({len} bytes)"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let other = Peers::registration(CLASS + 1);
                let second = match layout {
                    Layout::Old => peers.b.port.register(&other)?,
                    Layout::New => peers.b.port.register2(&other)?,
                };
                ensure_eq!(second, AgentId(1));
                for (class, agent) in [(CLASS + 1, 1), (CLASS, 0)] {
                    let tid = fresh_tid();
                    let mad = VendorMad::new(class, OUI, Method::SEND, tid).into_bytes();
                    let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
                    peers.a.port.send(&packet)?;
                    ensure_eq!(peers.b.recv_tid(tid)?.agent, AgentId(agent));
                }
                Ok(())
            },
        );
        area.check(
            format!("a timeout comes behind a {len}-byte header"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .timeout(Duration::from_millis(50));
                peers.a.port.send(&packet)?;
                let got = peers.a.recv_tid(packet.tid()?)?;
                ensure_eq!(got.header.status, 110);
                ensure_eq!(got.mad.len(), 24);
                ensure_eq!(got.header.timeout_ms, 50);
                Ok(())
            },
        );
        area.check(
            format!("round trip between two {len}-byte files"),
            move || {
                let peers = Peers::with_layout(layout)?;
                for _ in 0..10 {
                    peers.round_trip(fresh_tid())?;
                }
                Ok(())
            },
        );
    }

    area.check("reserved bytes of a received header are 0", || {
        let peers = Peers::new()?;
        peers
            .a
            .port
            .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
        peers.b.wait_readable()?;
        let mut buf = [0xee; 320];
        ensure_eq!(peers.b.port.read(&mut buf)?, 320);
        ensure_eq!(buf[58..64], [0; 6]);
        Ok(())
    });
    area.check("reserved bytes of a sent header do not matter", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        let mut bytes = packet.to_bytes(Layout::New);
        bytes[58..64].fill(0xff);
        ensure_eq!(peers.a.port.write(&bytes)?, bytes.len());
        peers.b.recv_tid(packet.tid()?)?;
        Ok(())
    });
    area.check(
        "a 56-byte file and a 64-byte file talk to each other",
        || {
            let peers = Peers {
                a: Endpoint::open("rxe0", Layout::Old, &Peers::registration(CLASS))?,
                b: Endpoint::open("rxe1", Layout::New, &Peers::registration(CLASS))?,
            };
            let (got, answer) = peers.round_trip(fresh_tid())?;
            ensure_eq!(got.header.length, 320);
            ensure_eq!(answer.header.length, 312);
            Ok(())
        },
    );

    for (name, settle) in [("ENABLE_PKEY", true), ("the first REGISTER_AGENT2", false)] {
        area.check(
            format!("a read() that overlaps {name} has one layout"),
            move || {
                let peers = Peers::new()?;
                let port = Arc::new(
                    Port::options()
                        .layout(Layout::Old)
                        .open(ktap::wait_for_umad("rxe1")?)?,
                );
                let reader = Arc::clone(&port);
                let mut read = Task::start_asleep(libc::SYS_read, move || {
                    let mut buf = [0; 56 + 256];
                    (reader.read(&mut buf), buf)
                });
                if settle {
                    port.enable_pkey()?;
                }
                port.register2(&Peers::registration(CLASS + 1))?;
                let tid = fresh_tid();
                let mad = VendorMad::new(CLASS + 1, OUI, Method::SEND, tid).into_bytes();
                peers
                    .a
                    .port
                    .send(&Packet::new(peers.a.agent, &peers.b.address(), mad.clone()))?;
                let Some((len, buf)) = read.result(MUST) else {
                    return Err("the read() did not return".into());
                };
                ensure_eq!(
                    *len,
                    Ok(312),
                    "a 312-byte read() that began with 56-byte headers"
                );
                ensure_eq!(buf[16..20], 312u32.to_ne_bytes(), "the length field");
                ensure_eq!(buf[56..64], mad[..8], "the MAD behind 56 bytes");
                Ok(())
            },
        )
        .improvement(11);
    }
    area.check(
        "a write() that overlaps the first REGISTER_AGENT2 has one layout",
        || {
            let peers = Peers::new()?;
            let port = Arc::new(fresh()?);
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            let packet = Packet::new(AgentId(0), &peers.b.address(), mad);
            let bytes = packet.to_bytes(Layout::Old);
            // The write() stops in the middle of its header.
            let (head, tail) = bytes.split_at(32);
            let memory = Region::new(2)?;
            let mut page = vec![0; PAGE];
            page[PAGE - head.len()..].copy_from_slice(head);
            memory.deliver(0, &page)?;
            let (writer, region, len) = (Arc::clone(&port), Arc::clone(&memory), bytes.len());
            let mut write = Task::start(move || {
                region
                    .write(writer.as_fd(), PAGE - 32, len)
                    .map_err(|e| e.raw_os_error())
            });
            ensure_eq!(memory.wait_fault(MUST)?, Some(1));
            port.register2(&Registration::send_only())?;
            memory.deliver(1, tail)?;
            match write.result(MUST) {
                // No agent was there when it began: as good an answer as the other one.
                Some(Err(Some(libc::EIO))) => peers.b.nothing_comes(),
                Some(Ok(wrote)) => {
                    ensure_eq!(*wrote, bytes.len());
                    let got = peers
                        .b
                        .port
                        .recv_timeout(Duration::from_secs(5))
                        .what("a write() that succeeded")?;
                    ensure_eq!(got.mad[16..], packet.mad[16..]);
                    Ok(())
                }
                other => Err(format!("write() gave {other:?}").into()),
            }
        },
    )
    .improvement(11);

    area.run()
}
