// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `rmpp`: messages of more than one MAD, cut and joined by the kernel, or raw.

use std::os::fd::AsRawFd;

use ktap::memory::Guarded;
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use umad::mad::data_offset;
use zerocopy::IntoBytes;

const KIB: usize = 1024;

// Bytes that repeat with no period of a segment's length.
fn pattern(len: usize) -> Vec<u8> {
    (0..=250).cycle().take(len).collect()
}

// A message of a class with RMPP: headers, then `payload` bytes.
fn message(class: u8, method: Method, tid: Tid, payload: usize) -> Vec<u8> {
    let mut mad = VendorMad::new(class, OUI, method, tid).rmpp().into_bytes();
    if !(0x30..=0x4f).contains(&class) {
        mad[36..].fill(0);
    }
    // The rest of the class header is a part of the message.
    mad.resize(data_offset(class), 0x5a);
    mad.extend_from_slice(&pattern(payload));
    mad
}

fn registration(class: u8) -> Registration {
    Peers::registration(class).rmpp(1)
}

fn rmpp_peers(class: u8, layout: Layout) -> Outcome<Peers> {
    Peers::with("rxe0", "rxe1", layout, &registration(class))
}

// What was received must be what was sent: header, class header, payload.
fn ensure_same(got: &Packet, sent: &[u8], layout: Layout) -> Outcome {
    ensure_eq!(got.mad.len(), sent.len(), "length of the message");
    ensure_eq!(
        usize::try_from(got.header.length)?,
        layout.header_len() + sent.len(),
        "the header's length field"
    );
    ensure_eq!(got.mad[..8], sent[..8]);
    ensure_eq!(got.mad[12..24], sent[12..24]);
    if let Some(at) = (36..sent.len()).find(|n| got.mad[*n] != sent[*n]) {
        return Err(format!(
            "byte {at} of {} is {:#x}, not {:#x}",
            sent.len(),
            got.mad[at],
            sent[at]
        )
        .into());
    }
    Ok(())
}

// Sends a message from `a` to `b`, unsolicited.
fn send_message(peers: &Peers, class: u8, payload: usize) -> Outcome<Vec<u8>> {
    let mad = message(class, Method::SEND, fresh_tid(), payload);
    let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
    peers.a.port.send(&packet)?;
    Ok(mad)
}

// As long as a large message may take in an emulated machine.
const LONG: Duration = Duration::from_secs(200);

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("rmpp");

    for layout in [Layout::Old, Layout::New] {
        let hdr = layout.header_len();
        for (class, segment) in [(0x03, 200), (0x06, 192), (0x10, 192), (CLASS, 216)] {
            area.check(
                format!("class {class:#04x}: 0 bytes to 4 segments, around each border ({hdr})"),
                move || {
                    let peers = rmpp_peers(class, layout)?;
                    let borders = (0..=4).flat_map(|n| {
                        let border: usize = n * segment;
                        [border.saturating_sub(1), border, border + 1]
                    });
                    for payload in borders {
                        let sent = send_message(&peers, class, payload)?;
                        let got = peers.b.recv().what(format!("{payload} bytes"))?;
                        ensure_same(&got, &sent, layout).what(format!("{payload} bytes"))?;
                    }
                    Ok(())
                },
            );
        }
        for len in [KIB, 4 * KIB, 64 * KIB, 1024 * KIB] {
            area.check(
                format!("a message of {len} bytes arrives byte for byte ({hdr})"),
                move || {
                    let peers = rmpp_peers(CLASS, layout)?;
                    let sent = send_message(&peers, CLASS, len)?;
                    let got = peers.b.port.recv_timeout(LONG)?;
                    ensure_same(&got, &sent, layout)
                },
            )
            .timeout(300);
        }
        area.check(
            format!("a long answer to a short question ({hdr})"),
            move || {
                let peers = rmpp_peers(CLASS, layout)?;
                for payload in [1, 216, 217, 5000] {
                    let tid = fresh_tid();
                    let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
                    peers.a.port.send(&request)?;
                    let got = peers.b.recv_tid(tid)?;
                    let mad = message(CLASS, Method::GET_RESP, got.tid()?, payload);
                    let mut answer = peers.b.response(&got)?;
                    answer.mad = mad.clone();
                    peers.b.port.send(&answer)?;
                    let got = peers.a.recv_tid(tid)?;
                    ensure_same(&got, &mad, layout).what(format!("{payload} bytes"))?;
                    ensure_eq!(got.mad[8..12], mad[8..12], "the upper half of the id");
                    ensure_eq!(got.header.status, 0);
                }
                Ok(())
            },
        );
        area.check(
            format!("ENOSPC tells the length, and the next read() gets all ({hdr})"),
            move || {
                let peers = rmpp_peers(CLASS, layout)?;
                let sent = send_message(&peers, CLASS, 3000)?;
                peers.b.wait_readable()?;
                let mut buf = vec![0; hdr + 256];
                ensure_errno!(peers.b.port.read(&mut buf), ENOSPC);
                let first = Packet::from_bytes(&buf, layout)?;
                ensure_eq!(usize::try_from(first.header.length)?, hdr + sent.len());
                ensure_eq!(first.agent, peers.b.agent);
                ensure_eq!(Gid(first.header.gid), peers.a.gid);
                ensure_eq!(first.mad[36..256], sent[36..256]);
                buf.resize(hdr + sent.len(), 0);
                ensure_eq!(peers.b.port.read(&mut buf)?, hdr + sent.len());
                ensure_same(&Packet::from_bytes(&buf, layout)?, &sent, layout)?;
                ensure!(peers
                    .b
                    .port
                    .poll(PollFlags::POLLIN, Duration::ZERO)?
                    .is_empty());
                Ok(())
            },
        );
    }
    area.check("a message of 4 MiB arrives byte for byte", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        let sent = send_message(&peers, CLASS, 4096 * KIB)?;
        let got = peers.b.port.recv_timeout(LONG)?;
        ensure_same(&got, &sent, Layout::New)
    })
    .timeout(300);
    area.check(
        "the RMPP header of a received message is that of its first segment",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            send_message(&peers, CLASS, 1000)?;
            let got = RmppHdr::of(&peers.b.recv()?.mad)?;
            ensure_eq!((got.version, got.rmpp_type), (1, RmppHdr::DATA));
            ensure_eq!(got.rtime_flags & 7, RmppHdr::ACTIVE | RmppHdr::FIRST);
            ensure_eq!(got.segment.get(), 1);
            // OUI and its byte count in each of the 5 segments.
            ensure_eq!(got.length.get(), 1000 + 5 * 4);
            Ok(())
        },
    );
    area.check(
        "the kernel fills in the RMPP header, whatever the program left there",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            let mut mad = message(CLASS, Method::SEND, fresh_tid(), 700);
            // Version, type (data), flags, status, segment, length.
            mad[24..36].copy_from_slice(&[9, 1, RmppHdr::ACTIVE, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
            peers.a.port.send(&packet)?;
            ensure_same(&peers.b.recv()?, &mad, Layout::New)
        },
    );
    area.check("a send-only agent with RMPP sends messages", || {
        let peers = Peers {
            a: Endpoint::open("rxe0", Layout::New, &Registration::send_only().rmpp(1))?,
            b: Endpoint::open("rxe1", Layout::New, &registration(CLASS))?,
        };
        let sent = send_message(&peers, CLASS, 2000)?;
        ensure_same(&peers.b.recv()?, &sent, Layout::New)
    });
    area.check("an agent with RMPP sends plain MADs as well", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        let got = peers.deliver(fresh_tid())?;
        ensure_eq!(got.mad.len(), 256);
        peers.round_trip(fresh_tid())?;
        Ok(())
    });
    area.check(
        "without the Active flag, more than 256 bytes are EINVAL",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            let mut mad = message(CLASS, Method::SEND, fresh_tid(), 400);
            mad[26] = 0;
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
            peers.b.nothing_comes()
        },
    );
    area.check("an agent without RMPP sends no message: EINVAL", || {
        let peers = Peers::new()?;
        let mad = message(CLASS, Method::SEND, fresh_tid(), 400);
        let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
        ensure_errno!(peers.a.port.send(&packet), EINVAL);
        peers.b.nothing_comes()
    });
    area.check(
        "an agent without RMPP may set the Active flag in a plain MAD",
        || {
            let peers = Peers::new()?;
            let mut mad = message(CLASS, Method::SEND, fresh_tid(), 216);
            mad[24..36].fill(0x21);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
            peers.a.port.send(&packet)?;
            let got = peers.b.recv_tid(packet.tid()?)?;
            ensure_eq!(got.mad[16..], mad[16..]);
            Ok(())
        },
    );
    area.check(
        "a message with its headers only: one segment without data",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            let sent = send_message(&peers, CLASS, 0)?;
            let got = peers.b.recv()?;
            ensure_eq!(got.mad.len(), 40);
            ensure_same(&got, &sent, Layout::New)
        },
    );
    area.check("a message cut short of its class header is EINVAL", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        let whole = message(CLASS, Method::SEND, fresh_tid(), 0);
        for len in 36..40 {
            let packet = Packet::new(peers.a.agent, &peers.b.address(), whole[..len].to_vec());
            ensure_errno!(peers.a.port.send(&packet), EINVAL, "{len} bytes");
        }
        peers.b.nothing_comes()
    });
    area.check(
        "bad memory in any segment is EFAULT, and nothing is sent",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            let mad = message(CLASS, Method::SEND, fresh_tid(), 2000);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
            let bytes = packet.to_bytes(Layout::New);
            let memory = Guarded::new(1)?;
            for there in [
                0,
                63,
                64 + 35,
                64 + 38,
                64 + 40,
                64 + 300,
                64 + 1500,
                bytes.len() - 1,
            ] {
                let at = memory.put_at_end(&bytes[..there])?;
                // SAFETY: the kernel checks the range, and only reads it.
                let n = unsafe { libc::write(peers.a.port.as_raw_fd(), at.cast(), bytes.len()) };
                ensure_errno!(Errno::result(n), EFAULT, "{there} of {} bytes", bytes.len());
            }
            peers.b.nothing_comes()?;
            peers.a.port.send(&packet)?;
            ensure_same(&peers.b.recv()?, &mad, Layout::New)
        },
    );
    area.check("ten messages at once, each arrives whole", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        let mut sent = Vec::new();
        for n in 0..10 {
            sent.push(send_message(&peers, CLASS, 3000 + 100 * n)?);
        }
        for _ in 0..10 {
            let got = peers.b.port.recv_timeout(LONG)?;
            let at = sent.iter().position(|mad| mad[12..16] == got.mad[12..16]);
            let Some(at) = at else {
                return Err("a message that was not sent".into());
            };
            ensure_same(&got, &sent.swap_remove(at), Layout::New)?;
        }
        Ok(())
    });
    area.check("messages in both directions at once", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        let there = send_message(&peers, CLASS, 20_000)?;
        let back = message(CLASS, Method::SEND, fresh_tid(), 30_000);
        let packet = Packet::new(peers.b.agent, &peers.a.address(), back.clone());
        peers.b.port.send(&packet)?;
        ensure_same(&peers.b.port.recv_timeout(LONG)?, &there, Layout::New)?;
        ensure_same(&peers.a.port.recv_timeout(LONG)?, &back, Layout::New)
    })
    .timeout(300);
    area.check("a message whose sender ends at once harms nobody", || {
        let peers = rmpp_peers(CLASS, Layout::New)?;
        for _ in 0..10 {
            let sender = Endpoint::open("rxe0", Layout::New, &Registration::send_only().rmpp(1))?;
            let mad = message(CLASS, Method::SEND, fresh_tid(), 50_000);
            sender
                .port
                .send(&Packet::new(sender.agent, &peers.b.address(), mad))?;
        }
        // Some may have made it; the port goes on.
        let sent = send_message(&peers, CLASS, 1000)?;
        loop {
            let got = peers.b.port.recv_timeout(LONG)?;
            if got.mad[12..16] == sent[12..16] {
                return ensure_same(&got, &sent, Layout::New);
            }
        }
    });
    area.check(
        "a message that nobody acknowledges ends with a timeout",
        || {
            // The receiver has no RMPP: the kernel there acknowledges nothing.
            let peers = Peers {
                a: Endpoint::open("rxe0", Layout::New, &registration(CLASS))?,
                b: Endpoint::open("rxe1", Layout::New, &Peers::registration(CLASS))?,
            };
            let mad = message(CLASS, Method::SEND, fresh_tid(), 1000);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad)
                .timeout(Duration::from_millis(300));
            let start = Instant::now();
            peers.a.port.send(&packet)?;
            let end = peers.a.recv_tid(packet.tid()?)?;
            ensure_eq!(end.header.status, 110);
            ensure_eq!(end.mad.len(), 24);
            ensure!(start.elapsed() >= Duration::from_millis(300));
            Ok(())
        },
    );
    area.check(
        "a message with a timeout that is acknowledged but not answered ends with one",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            let mad = message(CLASS, Method::SEND, fresh_tid(), 1000);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone())
                .timeout(Duration::from_millis(700));
            let start = Instant::now();
            peers.a.port.send(&packet)?;
            ensure_same(&peers.b.recv()?, &mad, Layout::New)?;
            ensure_eq!(peers.a.recv_tid(packet.tid()?)?.header.status, 110);
            ensure!(start.elapsed() >= Duration::from_millis(700));
            peers.a.nothing_comes()
        },
    );
    area.check(
        "a message without timeout ends without a packet, acknowledged",
        || {
            let peers = rmpp_peers(CLASS, Layout::New)?;
            send_message(&peers, CLASS, 1000)?;
            peers.b.recv()?;
            peers.a.nothing_comes()
        },
    );

    // User RMPP.
    let raw = |class| Peers::registration(class).rmpp(1).user_rmpp();
    area.check(
        "user RMPP: segments come raw, and the kernel acknowledges none",
        move || {
            let peers = Peers {
                a: Endpoint::open("rxe0", Layout::New, &registration(CLASS))?,
                b: Endpoint::open("rxe1", Layout::New, &raw(CLASS))?,
            };
            let mad = message(CLASS, Method::SEND, fresh_tid(), 1000);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone())
                .timeout(Duration::from_millis(200));
            peers.a.port.send(&packet)?;
            let got = peers.b.recv()?;
            ensure_eq!(got.mad.len(), 256);
            let rmpp = RmppHdr::of(&got.mad)?;
            ensure_eq!(rmpp.segment.get(), 1);
            ensure_eq!(rmpp.rtime_flags & 7, RmppHdr::ACTIVE | RmppHdr::FIRST);
            ensure_eq!(got.mad[36..], mad[36..256]);
            // No second segment without an acknowledgement: the sender gives up.
            ensure_eq!(peers.a.recv()?.header.status, 110);
            peers.b.nothing_comes()
        },
    );
    area.check(
        "user RMPP: a program that acknowledges by itself gets the whole message",
        move || {
            let peers = Peers {
                a: Endpoint::open("rxe0", Layout::New, &registration(CLASS))?,
                b: Endpoint::open("rxe1", Layout::New, &raw(CLASS))?,
            };
            let sent = send_message(&peers, CLASS, 500)?;
            let mut joined = Vec::new();
            for segment in 1..=3u32 {
                let got = peers.b.recv()?;
                let rmpp = RmppHdr::of(&got.mad)?;
                ensure_eq!(rmpp.segment.get(), segment);
                ensure_eq!(rmpp.rtime_flags & RmppHdr::LAST != 0, segment == 3);
                joined.extend_from_slice(&got.mad[40..]);
                // The ACK answers this segment, and lets one more come.
                let mut ack = peers.b.response(&got)?;
                let header = RmppHdr {
                    rmpp_type: RmppHdr::ACK,
                    rtime_flags: RmppHdr::ACTIVE,
                    segment: segment.into(),
                    length: (segment + 1).into(),
                    ..RmppHdr::active()
                };
                ack.mad[3] = Method::SEND.0 | Method::RESPONSE;
                ack.mad[24..36].copy_from_slice(header.as_bytes());
                peers.b.port.send(&ack)?;
            }
            ensure_eq!(joined[..500], sent[40..]);
            peers.a.nothing_comes()
        },
    );
    area.check(
        "user RMPP: what is sent is not cut: more than 256 bytes are EINVAL",
        move || {
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &raw(CLASS))?;
            let mad = message(CLASS, Method::SEND, fresh_tid(), 217);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
            peers.b.nothing_comes()
        },
    );
    area.check(
        "user RMPP: the RMPP header goes out as the program wrote it",
        move || {
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &raw(CLASS))?;
            let mut mad = message(CLASS, Method::SEND, fresh_tid(), 216);
            mad[24..36].copy_from_slice(&[1, 2, 0x79, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad.clone());
            peers.a.port.send(&packet)?;
            ensure_eq!(peers.b.recv_tid(packet.tid()?)?.mad[12..], mad[12..]);
            Ok(())
        },
    );
    area.check(
        "user RMPP: segments may repeat the transaction id while it is outstanding",
        move || {
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &raw(CLASS))?;
            let mad = message(CLASS, Method::SEND, fresh_tid(), 216);
            let packet = Packet::new(peers.a.agent, &peers.b.address(), mad)
                .timeout(Duration::from_secs(60));
            for _ in 0..5 {
                peers.a.port.send(&packet)?;
                peers.b.recv_tid(packet.tid()?)?;
            }
            Ok(())
        },
    );
    area.check(
        "user RMPP: without the Active flag the rule of duplicates holds",
        move || {
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &raw(CLASS))?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_secs(60));
            peers.a.port.send(&packet)?;
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
            // And what is outstanding makes no segment a duplicate.
            let mut segment = packet.clone();
            segment.mad[26] = RmppHdr::ACTIVE;
            peers.a.port.send(&segment)?;
            Ok(())
        },
    );
    area.check(
        "user RMPP: further segments of an answer come though its request has ended",
        move || {
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &raw(CLASS))?;
            let tid = fresh_tid();
            let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
            peers.a.port.send(&request)?;
            let got = peers.b.recv_tid(tid)?;
            for segment in 1..=3u32 {
                let mut answer = peers.b.response(&got)?;
                answer.mad[24..36].copy_from_slice(
                    RmppHdr {
                        segment: segment.into(),
                        ..RmppHdr::active()
                    }
                    .as_bytes(),
                );
                peers.b.port.send(&answer)?;
                let came = peers.a.recv_tid(tid)?;
                ensure_eq!(RmppHdr::of(&came.mad)?.segment.get(), segment);
            }
            Ok(())
        },
    );
    area.check("user RMPP in a class without RMPP: plain MADs", || {
        let registration = Registration::class(0x0a, 1)
            .methods(&[Method::SEND])
            .user_rmpp();
        let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
        peers.deliver(fresh_tid())?;
        Ok(())
    });

    area.run()
}
