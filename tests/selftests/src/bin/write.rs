// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `write`: lengths, agents and memory that write() takes and refuses.

use std::os::fd::AsFd;

use ktap::memory::{Guarded, PAGE};
use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use selftests::calls::write_at;
use umad::mad::data_offset;

const KIB: usize = 1024;

// Agents of a class on both ports. The sender's is send-only: an agent may send any class.
fn class_peers(class: u8, layout: Layout) -> Outcome<Peers> {
    let send_only = Registration::send_only();
    Ok(Peers {
        a: Endpoint::open("rxe0", layout, &send_only)?,
        b: Endpoint::open("rxe1", layout, &Peers::registration(class))?,
    })
}

// A MAD of a class, every byte behind its RMPP header (and OUI) set.
fn full_mad(class: u8, tid: Tid) -> Vec<u8> {
    let mut mad = VendorMad::new(class, OUI, Method::SEND, tid).into_bytes();
    for (n, byte) in (1..=250).cycle().zip(&mut mad[VendorMad::DATA..]) {
        *byte = n;
    }
    mad
}

// Writes a MAD cut to `len` bytes; a good one must arrive, filled up with zeroes.
fn try_length(peers: &Peers, class: u8, len: usize) -> Outcome {
    let layout = peers.a.port.layout();
    let tid = fresh_tid();
    let mut mad = full_mad(class, tid);
    mad.resize(len, 0x77);
    let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
    let bytes = packet.to_bytes(layout);
    if len < data_offset(class).max(36) || len > 256 {
        ensure_errno!(
            peers.a.port.write(&bytes),
            EINVAL,
            "class {class:#x}, {len} bytes"
        );
        return Ok(());
    }
    ensure_eq!(
        peers
            .a
            .port
            .write(&bytes)
            .what(format!("class {class:#x}, {len} bytes"))?,
        bytes.len()
    );
    let got = peers
        .b
        .recv_tid(tid)
        .what(format!("class {class:#x}, {len} bytes"))?;
    ensure_eq!(got.mad[..8], packet.mad[..8], "{len} bytes: before the TID");
    ensure_eq!(
        got.mad[12..len],
        packet.mad[12..],
        "{len} bytes: behind the TID"
    );
    ensure!(
        got.mad[len..].iter().all(|byte| *byte == 0),
        "{len} bytes: the MAD is not filled up with zeroes"
    );
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("write");

    for layout in [Layout::Old, Layout::New] {
        let hdr = layout.header_len();
        for class in [0x03, 0x06, 0x0a, 0x10, CLASS] {
            area.check(
                format!("class {class:#04x}: every length from header+0 to header+256 ({hdr})"),
                move || {
                    let peers = class_peers(class, layout)?;
                    for len in 0..=256 {
                        try_length(&peers, class, len)?;
                    }
                    peers.b.nothing_comes()
                },
            )
            .timeout(300);
        }
        area.check(
            format!("every vendor class 0x30 to 0x4f: lengths at its borders ({hdr})"),
            move || {
                for class in 0x30..=0x4f {
                    let peers = class_peers(class, layout)?;
                    for len in [0, 35, 36, 39, 40, 41, 255, 256, 257] {
                        try_length(&peers, class, len)?;
                    }
                }
                Ok(())
            },
        )
        .timeout(300);
        area.check(
            format!("no class may write more than 256 bytes without RMPP ({hdr})"),
            move || {
                for class in [0x03, 0x06, 0x0a, 0x10, CLASS] {
                    let peers = class_peers(class, layout)?;
                    for len in [257, 300, 512, 4096, 70_000] {
                        try_length(&peers, class, len)?;
                    }
                }
                Ok(())
            },
        );
        area.check(
            format!("less than header and RMPP header is EINVAL before anything else ({hdr})"),
            move || {
                // The agent does not exist, and the memory is not there either.
                let peers = class_peers(CLASS, layout)?;
                let memory = Guarded::new(1)?;
                for len in 0..hdr + 36 {
                    let at = memory.before_end(0);
                    ensure_errno!(
                        write_at(peers.a.port.as_fd(), at, len),
                        EINVAL,
                        "{len} bytes"
                    );
                }
                ensure_errno!(
                    write_at(peers.a.port.as_fd(), memory.before_end(0), hdr + 36),
                    EFAULT
                );
                Ok(())
            },
        );
        area.check(
            format!("agents that do not exist: EIO, out of range: EINVAL ({hdr})"),
            move || {
                let peers = class_peers(CLASS, layout)?;
                let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                for id in [1, 2, 30, 31] {
                    packet.agent = AgentId(id);
                    ensure_errno!(peers.a.port.send(&packet), EIO, "agent {id}");
                }
                for id in [32, 33, 255, 256, 0x1_0000, 0x8000_0000, u32::MAX] {
                    packet.agent = AgentId(id);
                    ensure_errno!(peers.a.port.send(&packet), EINVAL, "agent {id}");
                }
                peers.b.nothing_comes()
            },
        );
        area.check(format!("without any agent: EIO ({hdr})"), move || {
            let peers = class_peers(CLASS, layout)?;
            let port = fresh()?;
            if layout == Layout::New {
                port.enable_pkey()?;
            }
            ensure_errno!(
                port.send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid())),
                EIO
            );
            Ok(())
        });
        area.check(
            format!("bad memory is EFAULT wherever it begins, and nothing is sent ({hdr})"),
            move || {
                let peers = class_peers(CLASS, layout)?;
                let packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .timeout(ktap::peers::SOON);
                let bytes = packet.to_bytes(layout);
                let memory = Guarded::new(1)?;
                for there in [0, 1, hdr - 1, hdr, hdr + 23, hdr + 35, hdr + 36, hdr + 255] {
                    let at = memory.put_at_end(&bytes[..there])?;
                    ensure_errno!(
                        write_at(peers.a.port.as_fd(), at, bytes.len()),
                        EFAULT,
                        "{there} of {} bytes",
                        bytes.len()
                    );
                }
                peers.b.nothing_comes()?;
                // The transaction id was not used up.
                let at = memory.put_at_end(&bytes)?;
                ensure_eq!(
                    write_at(peers.a.port.as_fd(), at, bytes.len())?,
                    bytes.len()
                );
                peers.b.recv_tid(packet.tid()?)?;
                Ok(())
            },
        );
        area.check(
            format!("write() does not change the program's bytes ({hdr})"),
            move || {
                let peers = class_peers(CLASS, layout)?;
                let bytes = peers
                    .a
                    .packet(&peers.b, Method::GET, Tid(0x1111_2222_3333_4444))
                    .to_bytes(layout);
                let memory = Guarded::new(1)?;
                let at = memory.put_at_end(&bytes)?;
                write_at(peers.a.port.as_fd(), at, bytes.len())?;
                ensure_eq!(memory.get(PAGE - bytes.len(), bytes.len())?, bytes);
                Ok(())
            },
        );
    }

    area.check(
        "1,000 writes of bad memory leak nothing that counts",
        || {
            let peers = Peers::new()?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(ktap::peers::SOON);
            let bytes = packet.to_bytes(Layout::New);
            let memory = Guarded::new(1)?;
            for n in 0..1000 {
                let at = memory.put_at_end(&bytes[..64 + 36 + n % 220])?;
                ensure_errno!(
                    write_at(peers.a.port.as_fd(), at, bytes.len()),
                    EFAULT,
                    "time {n}"
                );
            }
            // Each send that was left over would keep its agent from ending.
            peers.a.port.unregister(peers.a.agent)?;
            Ok(())
        },
    )
    .timeout(300);
    area.check(
        "500 writes on a non-blocking file: none is EAGAIN, all arrive in order",
        || {
            let peers = Peers::new()?;
            let port = Port::options().nonblock(true).open(peers.a.umad)?;
            let agent = port.register2(&Registration::send_only())?;
            let mut tids = Vec::new();
            for _ in 0..500 {
                let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                packet.agent = agent;
                port.send(&packet)?;
                tids.push(packet.tid()?.low());
            }
            for tid in tids {
                ensure_eq!(peers.b.recv()?.tid()?.low(), tid);
            }
            Ok(())
        },
    )
    .timeout(300);
    area.check("a write-only file sends", || {
        let peers = Peers::new()?;
        let file = std::fs::File::options()
            .write(true)
            .open(umad::port::node(peers.a.umad))?;
        let port = Port::from_fd(file.into());
        let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        packet.agent = port.register2(&Registration::send_only())?;
        port.send(&packet)?;
        peers.b.recv_tid(packet.tid()?)?;
        Ok(())
    });
    area.check("a read-only file cannot be written: EBADF", || {
        let peers = Peers::new()?;
        let port = Port::from_fd(std::fs::File::open(umad::port::node(peers.a.umad))?.into());
        port.register2(&Registration::send_only())?;
        ensure_errno!(
            port.send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid())),
            EBADF
        );
        Ok(())
    });
    area.check("an agent may send a class that it did not register", || {
        let peers = Peers::new()?;
        let other = Endpoint::open("rxe1", Layout::New, &Peers::registration(0x06))?;
        let mad = full_mad(0x06, fresh_tid());
        let packet = Packet::new(peers.a.agent, &other.address(), mad);
        peers.a.port.send(&packet)?;
        other.recv_tid(packet.tid()?)?;
        Ok(())
    });
    area.check(
        "an agent with RMPP may not send a class without it: EINVAL",
        || {
            let port = Port::open(ktap::wait_for_umad("rxe0")?)?;
            let agent = port.register2(&Registration::send_only().rmpp(1))?;
            let b = Endpoint::open("rxe1", Layout::New, &Peers::registration(0x0a))?;
            let packet = Packet::new(agent, &b.address(), full_mad(0x0a, fresh_tid()));
            ensure_errno!(port.send(&packet), EINVAL);
            b.nothing_comes()
        },
    );
    area.check(
        "the status, length and unused fields of a sent header do not matter",
        || {
            let peers = Peers::new()?;
            let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            packet.header.status = u32::MAX;
            packet.header.length = 1;
            packet.header.retries = u32::MAX;
            peers.a.port.send(&packet)?;
            peers.b.recv_tid(packet.tid()?)?;
            Ok(())
        },
    );
    area.check(
        "a MAD of another base version is taken, and no receiver gets it",
        || {
            let peers = Peers::new()?;
            let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            packet.mad[0] = 0x7f;
            peers.a.port.send(&packet)?;
            peers.b.nothing_comes()
        },
    );
    area.check("very long writes without RMPP are EINVAL", || {
        let peers = Peers::new()?;
        let mut bytes = peers
            .a
            .packet(&peers.b, Method::SEND, fresh_tid())
            .to_bytes(Layout::New);
        for len in [64 * KIB, 1024 * KIB, 16 * 1024 * KIB] {
            bytes.resize(len, 0);
            ensure_errno!(peers.a.port.write(&bytes), EINVAL, "{len} bytes");
        }
        peers.deliver(fresh_tid())?;
        Ok(())
    });
    area.check(
        "a count near 2^31, with a page of memory, is refused",
        || {
            let peers = Peers::new()?;
            let bytes = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .to_bytes(Layout::New);
            let memory = Guarded::new(1)?;
            let at = memory.put_at_end(&bytes)?;
            for len in [0x7fff_ffff, 0x8000_0000, 0xffff_ffff, usize::MAX >> 1] {
                match write_at(peers.a.port.as_fd(), at, len) {
                    // The range is checked against the address space first.
                    Err(Errno::EINVAL | Errno::EFAULT) => (),
                    other => return Err(format!("{len:#x} bytes: {other:?}").into()),
                }
            }
            peers.b.nothing_comes()
        },
    );
    area.check("a MAD for the own port comes back to it", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.a, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        ensure_eq!(peers.a.recv()?.tid()?.low(), packet.tid()?.low());
        Ok(())
    });

    area.run()
}
