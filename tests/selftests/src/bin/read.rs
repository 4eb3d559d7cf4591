// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `read`: buffers of all sizes, and packets that survive a read() that failed.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use ktap::memory::{Guarded, Prot, PAGE};
use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use nix::poll::PollFlags;
use selftests::task::{Task, MUST};
use selftests::uffd::Region;

// read() into any address.
fn read_at(port: &Port, at: *mut u8, len: usize) -> Result<usize, Errno> {
    // SAFETY: the kernel checks the range; what is valid of it belongs to a `Guarded`, which no
    // reference points to.
    let n = unsafe { libc::read(port.as_raw_fd(), at.cast(), len) };
    Errno::result(n)?;
    Ok(usize::try_from(n).unwrap_or(0))
}

// A packet waits at `b`; returns its MAD.
fn one_waits(peers: &Peers) -> Outcome<Vec<u8>> {
    let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
    for (n, byte) in (1..=250).cycle().zip(&mut packet.mad[VendorMad::DATA..]) {
        *byte = n;
    }
    peers.a.port.send(&packet)?;
    peers.b.wait_readable()?;
    Ok(packet.mad)
}

// An RMPP message of `payload` bytes waits at `b`; returns it.
fn message_waits(layout: Layout, payload: usize) -> Outcome<(Peers, Vec<u8>)> {
    let peers = Peers::with("rxe0", "rxe1", layout, &Peers::registration(CLASS).rmpp(1))?;
    let data: Vec<u8> = (1..=251).cycle().take(payload).collect();
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
        .rmpp()
        .payload(&data)
        .into_bytes();
    let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
    peers.a.port.send(&packet)?;
    peers.b.wait_readable()?;
    Ok((peers, mad))
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("read");

    for layout in [Layout::Old, Layout::New] {
        let hdr = layout.header_len();
        area.check(
            format!("less than a {hdr}-byte header is EINVAL at once, though nothing is there"),
            move || {
                // Blocking: a read() that waited would end in the check's timeout.
                let port = Port::options()
                    .layout(layout)
                    .open(ktap::wait_for_umad("rxe0")?)?;
                let mut buf = [0xee; 64];
                for len in 0..hdr {
                    ensure_errno!(port.read(&mut buf[..len]), EINVAL, "{len} bytes");
                }
                ensure_eq!(buf, [0xee; 64]);
                Ok(())
            },
        )
        .timeout(30);
        area.check(
            format!("every size below header and MAD is EINVAL and keeps the packet ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mad = one_waits(&peers)?;
                let mut buf = [0xee; 1024];
                for len in 0..hdr + 256 {
                    ensure_errno!(peers.b.port.read(&mut buf[..len]), EINVAL, "{len} bytes");
                }
                ensure_eq!(buf, [0xee; 1024], "the buffer of calls that failed");
                ensure_eq!(peers.b.port.read(&mut buf[..hdr + 256])?, hdr + 256);
                ensure_eq!(buf[hdr + 16..hdr + 256], mad[16..]);
                Ok(())
            },
        );
        area.check(
            format!("a larger buffer is left alone behind the packet ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                for len in [hdr + 257, hdr + 1000, 65536] {
                    one_waits(&peers)?;
                    let mut buf = vec![0xee; len];
                    ensure_eq!(peers.b.port.read(&mut buf)?, hdr + 256);
                    ensure!(
                        buf[hdr + 256..].iter().all(|byte| *byte == 0xee),
                        "bytes behind the packet were written to"
                    );
                }
                Ok(())
            },
        );
        area.check(
            format!("a timeout fits into header + 24, one less is EINVAL ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .timeout(Duration::from_millis(20));
                peers.a.port.send(&packet)?;
                peers.a.wait_readable()?;
                let mut buf = [0xee; 512];
                for len in 0..hdr + 24 {
                    ensure_errno!(peers.a.port.read(&mut buf[..len]), EINVAL, "{len} bytes");
                }
                ensure_eq!(buf, [0xee; 512], "the buffer of calls that failed");
                ensure_eq!(peers.a.port.read(&mut buf[..hdr + 24])?, hdr + 24);
                ensure_eq!(buf[4..8], 110u32.to_ne_bytes());
                Ok(())
            },
        );
        area.check(
            format!("a timeout leaves the rest of a larger buffer alone ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .timeout(Duration::from_millis(20));
                peers.a.port.send(&packet)?;
                peers.a.wait_readable()?;
                let mut buf = [0xee; 512];
                ensure_eq!(peers.a.port.read(&mut buf)?, hdr + 24);
                ensure!(buf[hdr + 24..].iter().all(|byte| *byte == 0xee));
                Ok(())
            },
        );
        area.check(
            format!("a buffer that ends in bad memory is EFAULT, everywhere ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mad = one_waits(&peers)?;
                let memory = Guarded::new(1)?;
                let whole = hdr + 256;
                for there in [0, 1, hdr - 1, hdr, hdr + 1, hdr + 255] {
                    ensure_errno!(
                        read_at(&peers.b.port, memory.before_end(there), whole),
                        EFAULT,
                        "{there} of {whole} bytes"
                    );
                }
                let n = read_at(&peers.b.port, memory.before_end(whole), whole)?;
                ensure_eq!(n, whole);
                let bytes = memory.get(PAGE - whole, whole)?;
                ensure_eq!(bytes[hdr + 16..], mad[16..]);
                Ok(())
            },
        );
        area.check(
            format!("a buffer longer than its memory is no error where it is not needed ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                one_waits(&peers)?;
                let memory = Guarded::new(1)?;
                let whole = hdr + 256;
                let n = read_at(&peers.b.port, memory.before_end(whole), whole + 5000)?;
                ensure_eq!(n, whole);
                Ok(())
            },
        );
        area.check(format!("a timeout survives EFAULT ({hdr})"), move || {
            let peers = Peers::with_layout(layout)?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_millis(20));
            peers.a.port.send(&packet)?;
            peers.a.wait_readable()?;
            let memory = Guarded::new(1)?;
            for there in [0, hdr, hdr + 23] {
                let at = memory.before_end(there);
                ensure_errno!(read_at(&peers.a.port, at, 512), EFAULT, "{there} bytes");
            }
            ensure_eq!(peers.a.recv()?.tid()?.low(), packet.tid()?.low());
            Ok(())
        });

        // Messages of more than one segment.
        area.check(
            format!("a long message: below header and first segment is EINVAL ({hdr})"),
            move || {
                let (peers, mad) = message_waits(layout, 1000)?;
                let mut buf = [0xee; 2048];
                for len in 0..hdr + 256 {
                    ensure_errno!(peers.b.port.read(&mut buf[..len]), EINVAL, "{len} bytes");
                }
                ensure_eq!(buf, [0xee; 2048], "the buffer of calls that failed");
                ensure_eq!(peers.b.recv()?.mad.len(), mad.len());
                Ok(())
            },
        );
        area.check(
            format!("a long message: too small is ENOSPC, with header and first segment ({hdr})"),
            move || {
                let (peers, mad) = message_waits(layout, 1000)?;
                let whole = hdr + mad.len();
                for len in [hdr + 256, hdr + 257, hdr + 600, whole - 1] {
                    let mut buf = vec![0xee; len];
                    ensure_errno!(peers.b.port.read(&mut buf), ENOSPC, "{len} bytes");
                    ensure_eq!(buf[16..20], u32::try_from(whole)?.to_ne_bytes(), "length");
                    ensure_eq!(buf[hdr + 40..hdr + 256], mad[40..256], "the first segment");
                    ensure!(
                        buf[hdr + 256..].iter().all(|byte| *byte == 0xee),
                        "bytes behind the first segment were written to"
                    );
                }
                let mut buf = vec![0; whole];
                ensure_eq!(peers.b.port.read(&mut buf)?, whole);
                ensure_eq!(buf[hdr + 40..], mad[40..]);
                ensure!(
                    peers
                        .b
                        .port
                        .poll(PollFlags::POLLIN, Duration::ZERO)?
                        .is_empty(),
                    "the message is still there"
                );
                Ok(())
            },
        );
        area.check(
            format!("a long message survives EFAULT in any of its segments ({hdr})"),
            move || {
                let (peers, mad) = message_waits(layout, 1000)?;
                let whole = hdr + mad.len();
                let memory = Guarded::new(1)?;
                for there in [0, hdr - 1, hdr + 255, hdr + 256, hdr + 500, whole - 1] {
                    ensure_errno!(
                        read_at(&peers.b.port, memory.before_end(there), whole),
                        EFAULT,
                        "{there} of {whole} bytes"
                    );
                }
                ensure_eq!(peers.b.recv()?.mad[40..], mad[40..]);
                Ok(())
            },
        );
        area.check(
            format!("a long message keeps its place at the head after ENOSPC ({hdr})"),
            move || {
                let (peers, mad) = message_waits(layout, 500)?;
                let after = Peers::registration(CLASS + 1);
                let second = match layout {
                    Layout::Old => peers.b.port.register(&after)?,
                    Layout::New => peers.b.port.register2(&after)?,
                };
                let sender = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
                let short = VendorMad::new(CLASS + 1, OUI, Method::SEND, fresh_tid()).into_bytes();
                sender
                    .port
                    .send(&Packet::new(sender.agent, &peers.b.address(), short))?;
                let mut buf = vec![0; hdr + 256];
                ensure_errno!(peers.b.port.read(&mut buf), ENOSPC);
                ensure_errno!(peers.b.port.read(&mut buf), ENOSPC, "once more");
                ensure_eq!(peers.b.recv()?.mad[40..], mad[40..]);
                ensure_eq!(peers.b.recv()?.agent, second);
                Ok(())
            },
        );
    }

    area.check(
        "an empty queue is EAGAIN on a non-blocking file, and the buffer is left alone",
        || {
            let port = fresh()?;
            let mut buf = [0xee; 1024];
            for len in [56, 57, 320, 1024] {
                ensure_errno!(port.read(&mut buf[..len]), EAGAIN, "{len} bytes");
            }
            ensure_eq!(buf, [0xee; 1024]);
            Ok(())
        },
    );
    area.check("bad memory is no error where nothing is to be read", || {
        let memory = Guarded::new(1)?;
        ensure_errno!(read_at(&fresh()?, memory.before_end(0), 320), EAGAIN);
        Ok(())
    });
    area.check("read-only memory is EFAULT and keeps the packet", || {
        let peers = Peers::new()?;
        one_waits(&peers)?;
        let memory = Guarded::new(1)?;
        memory.protect(0, 1, Prot::Read)?;
        for _ in 0..100 {
            ensure_errno!(read_at(&peers.b.port, memory.before_end(320), 320), EFAULT);
        }
        memory.protect(0, 1, Prot::Write)?;
        ensure_eq!(read_at(&peers.b.port, memory.before_end(320), 320)?, 320);
        Ok(())
    });
    area.check(
        "a packet that was not read leaves the file readable",
        || {
            let peers = Peers::new()?;
            one_waits(&peers)?;
            let mut buf = [0; 320];
            ensure_errno!(peers.b.port.read(&mut buf[..100]), EINVAL);
            ensure_eq!(
                peers.b.port.poll(PollFlags::POLLIN, Duration::ZERO)?,
                PollFlags::POLLIN
            );
            peers.b.port.read(&mut buf)?;
            ensure_eq!(
                peers.b.port.poll(PollFlags::POLLIN, Duration::ZERO)?,
                PollFlags::empty()
            );
            Ok(())
        },
    );
    area.check(
        "one packet per read, in the order in which they came",
        || {
            let peers = Peers::new()?;
            let mut tids = Vec::new();
            for _ in 0..200 {
                let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                tids.push(packet.tid()?.low());
                peers.a.port.send(&packet)?;
            }
            let mut buf = vec![0; 200 * 320];
            for tid in tids {
                peers.b.wait_readable()?;
                ensure_eq!(peers.b.port.read(&mut buf)?, 320);
                ensure_eq!(Packet::from_bytes(&buf, Layout::New)?.tid()?.low(), tid);
            }
            Ok(())
        },
    );
    area.check("packets of all agents of a file come in one order", || {
        let peers = Peers::new()?;
        peers.b.port.register2(&Peers::registration(CLASS + 1))?;
        peers.b.port.register2(&Peers::registration(CLASS + 2))?;
        let mut sent = Vec::new();
        for n in 0..30u8 {
            let tid = fresh_tid();
            let mad = VendorMad::new(CLASS + n % 3, OUI, Method::SEND, tid).into_bytes();
            peers
                .a
                .port
                .send(&Packet::new(peers.a.agent, &peers.b.address(), mad))?;
            sent.push((AgentId(u32::from(n % 3)), tid.low()));
        }
        for expected in sent {
            let got = peers.b.recv()?;
            ensure_eq!((got.agent, got.tid()?.low()), expected);
        }
        Ok(())
    });
    area.check(
        "two files that want the same port's MADs each get their own",
        || {
            let peers = Peers::new()?;
            let other = Endpoint::open("rxe1", Layout::Old, &Peers::registration(CLASS + 1))?;
            let to_other = peers.a.packet(&other, Method::SEND, fresh_tid());
            peers.a.port.send(&to_other)?;
            let got = peers.deliver(fresh_tid())?;
            ensure_eq!(got.mad[1], CLASS);
            ensure_eq!(other.recv()?.tid()?.low(), to_other.tid()?.low());
            peers.b.nothing_comes()?;
            other.nothing_comes()
        },
    );
    area.check("a read-only file receives", || {
        let peers = Peers::new()?;
        peers.b.port.unregister(peers.b.agent)?;
        let file = std::fs::File::open(umad::port::node(peers.b.umad))?;
        let port = Port::from_fd(file.into());
        port.register2(&Peers::registration(CLASS))?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        ensure_eq!(
            port.recv_timeout(ktap::peers::SOON)?.tid()?.low(),
            packet.tid()?.low()
        );
        Ok(())
    });
    area.check("a write-only file cannot be read: EBADF", || {
        let file = std::fs::File::options()
            .write(true)
            .open(umad::port::node(ktap::wait_for_umad("rxe0")?))?;
        ensure_errno!(Port::from_fd(file.into()).read(&mut [0; 320]), EBADF);
        Ok(())
    });
    area.check(
        "a reader that sleeps gets the packet that a failed read() put back",
        || {
            let peers = Peers::new()?;
            let port = Arc::new(peers.b.port);
            // The first reader takes the packet and stops, because its memory does not arrive.
            let memory = Region::new(1)?;
            let (file, region) = (Arc::clone(&port), Arc::clone(&memory));
            let packet = {
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
                let to = Address::roce(peers.b.gid, 0);
                Packet::new(peers.a.agent, &to, mad)
            };
            peers.a.port.send(&packet)?;
            let mut first = Task::start(move || {
                region
                    .read(file.as_fd(), 0, 320)
                    .map_err(|e| e.raw_os_error())
            });
            ensure_eq!(memory.wait_fault(MUST)?, Some(0));
            // The second one finds nothing, and sleeps.
            let file = Arc::clone(&port);
            let mut second = Task::start_asleep(libc::SYS_read, move || file.recv());
            ensure!(
                second.asleep_in(libc::SYS_read),
                "the second reader does not sleep"
            );
            memory.revoke()?;
            ensure_eq!(first.result(MUST), Some(&Err(Some(libc::EFAULT))));
            // A bound for the C module, where it sleeps for ever.
            match second.result(Duration::from_secs(5)) {
                Some(Ok(got)) => ensure_eq!(got.tid()?.low(), packet.tid()?.low()),
                Some(Err(e)) => return Err(e.to_string().into()),
                None => return Err("the second reader sleeps beside a packet".into()),
            }
            Ok(())
        },
    )
    .improvement(8);
    area.check(
        "poll() sees the packet that a failed read() put back",
        || {
            let peers = Peers::new()?;
            let port = Arc::new(peers.b.port);
            let memory = Region::new(1)?;
            let (file, region) = (Arc::clone(&port), Arc::clone(&memory));
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            let to = Address::roce(peers.b.gid, 0);
            peers.a.port.send(&Packet::new(peers.a.agent, &to, mad))?;
            let mut first = Task::start(move || {
                region
                    .read(file.as_fd(), 0, 320)
                    .map_err(|e| e.raw_os_error())
            });
            ensure_eq!(memory.wait_fault(MUST)?, Some(0));
            memory.revoke()?;
            ensure_eq!(first.result(MUST), Some(&Err(Some(libc::EFAULT))));
            ensure_eq!(
                port.poll(PollFlags::POLLIN, Duration::ZERO)?,
                PollFlags::POLLIN
            );
            ensure_eq!(port.recv()?.mad.len(), 256);
            Ok(())
        },
    );
    area.check(
        "a failed read() keeps the packet at the head while others wait behind it",
        || {
            let peers = Peers::new()?;
            let mut tids = Vec::new();
            for _ in 0..3 {
                let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                tids.push(packet.tid()?.low());
                peers.a.port.send(&packet)?;
            }
            peers.b.wait_readable()?;
            let memory = Guarded::new(1)?;
            for tid in tids {
                peers.b.wait_readable()?;
                ensure_errno!(read_at(&peers.b.port, memory.before_end(100), 320), EFAULT);
                ensure_errno!(peers.b.port.read(&mut [0; 300]), EINVAL);
                ensure_eq!(peers.b.recv()?.tid()?.low(), tid);
            }
            Ok(())
        },
    );

    area.run()
}
