// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `timeout`: one packet for each request that stays unanswered, and none for others.
//!
//! Method Send serves as the request without an answer: a Get that no agent wants is answered by
//! the kernel. A timeout is early by less than a tick of the kernel's clock, which `ib_mad` counts in;
//! how late it is depends on the machine, so lateness has only the bound of what must come at all.

use std::collections::BTreeSet;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use nix::time::{clock_getres, ClockId};

// A request that `b` receives and does not answer.
fn unanswered(peers: &Peers, ms: u64) -> Packet {
    peers
        .a
        .packet(&peers.b, Method::SEND, fresh_tid())
        .timeout(Duration::from_millis(ms))
}

// Sends a packet, waits for its timeout, and says how long it took.
fn time_out(peers: &Peers, packet: &Packet) -> Outcome<(Packet, Duration)> {
    let start = Instant::now();
    peers.a.port.send(packet)?;
    let got = peers.a.recv_tid(packet.tid()?)?;
    let took = start.elapsed();
    ensure_eq!(got.header.status, 110);
    Ok((got, took))
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("timeout");

    for layout in [Layout::Old, Layout::New] {
        let hdr = layout.header_len();
        area.check(
            format!("the packet is the request's header, with status 110 ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mut packet = unanswered(&peers, 40).retries(1);
                packet.header.length = 0x0102_0304;
                packet.header.status = 5;
                packet.header.sl = 2;
                packet.header.hop_limit = 9;
                packet.header.traffic_class = 3;
                if layout == Layout::New {
                    packet.pkey_index = 4;
                }
                let (got, _) = time_out(&peers, &packet)?;
                let mut expected = packet.header;
                expected.status = 110;
                ensure_eq!(got.header, expected);
                ensure_eq!(got.pkey_index, packet.pkey_index);
                Ok(())
            },
        );
        area.check(
            format!("the MAD is the header as it was sent, 24 bytes ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mut packet = unanswered(&peers, 40);
                packet.mad[4..8].copy_from_slice(&[1, 2, 3, 4]);
                packet.mad[16..24].copy_from_slice(&[5, 6, 7, 8, 9, 10, 11, 12]);
                let (got, _) = time_out(&peers, &packet)?;
                ensure_eq!(got.mad.len(), 24);
                ensure_eq!(got.mad[..8], packet.mad[..8]);
                ensure_eq!(got.mad[12..24], packet.mad[12..24]);
                Ok(())
            },
        );
    }
    area.check("the transaction id is the one on the wire", || {
        let peers = Peers::new()?;
        let packet = unanswered(&peers, 40);
        let (got, _) = time_out(&peers, &packet)?;
        ensure_eq!(peers.b.recv_tid(packet.tid()?)?.tid()?, got.tid()?);
        Ok(())
    });
    for ms in [1, 10, 50, 200, 500] {
        area.check(format!("{ms} ms: not early by a tick"), move || {
            let peers = Peers::new()?;
            let limit = Duration::from_millis(ms);
            // The clock that goes by ticks.
            let tick = Duration::from(clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)?);
            ensure!(tick <= Duration::from_millis(10), "a tick of {tick:?}");
            let mut latest = Duration::ZERO;
            for _ in 0..5 {
                let (_, took) = time_out(&peers, &unanswered(&peers, ms))?;
                ensure!(took + tick > limit, "after {took:?}");
                latest = latest.max(took.saturating_sub(limit));
            }
            // For people: how late depends on the machine, so nothing is demanded.
            println!("# {ms} ms: late by {latest:.1?} at most");
            Ok(())
        });
    }
    area.check("one packet per request, no second one", || {
        let peers = Peers::new()?;
        time_out(&peers, &unanswered(&peers, 30))?;
        peers.a.nothing_comes()
    });
    area.check("100 requests: 100 packets, each id once", || {
        let peers = Peers::new()?;
        let mut left = BTreeSet::new();
        for n in 0..100 {
            let packet = unanswered(&peers, 20 + n % 50);
            left.insert(packet.tid()?.low());
            peers.a.port.send(&packet)?;
        }
        while !left.is_empty() {
            let got = peers.a.recv()?;
            ensure_eq!(got.header.status, 110);
            ensure!(left.remove(&got.tid()?.low()), "{} twice", got.tid()?);
        }
        peers.a.nothing_comes()
    });
    area.check("the earliest end comes first", || {
        let peers = Peers::new()?;
        let long = unanswered(&peers, 1500);
        let short = unanswered(&peers, 100);
        peers.a.port.send(&long)?;
        peers.a.port.send(&short)?;
        ensure_eq!(peers.a.recv()?.tid()?.low(), short.tid()?.low());
        ensure_eq!(peers.a.recv()?.tid()?.low(), long.tid()?.low());
        Ok(())
    });
    area.check("timeout 0: no packet, answered or not", || {
        let peers = Peers::new()?;
        for _ in 0..10 {
            peers.a.port.send(&unanswered(&peers, 0))?;
        }
        peers.a.nothing_comes()
    });
    area.check(
        "timeout 0 with retries: one MAD on the wire, no packet",
        || {
            let peers = Peers::new()?;
            let packet = unanswered(&peers, 0).retries(5);
            peers.a.port.send(&packet)?;
            peers.b.recv_tid(packet.tid()?)?;
            peers.b.nothing_comes()?;
            peers.a.nothing_comes()
        },
    );
    area.check("an answer in time: the answer, and no timeout", || {
        let peers = Peers::new()?;
        let request = peers
            .a
            .packet(&peers.b, Method::GET, fresh_tid())
            .timeout(Duration::from_secs(3));
        peers.a.port.send(&request)?;
        let got = peers.b.recv_tid(request.tid()?)?;
        peers.b.port.send(&peers.b.response(&got)?)?;
        ensure_eq!(peers.a.recv()?.header.status, 0);
        match peers.a.port.recv_timeout(Duration::from_secs(4)) {
            Err(umad::Error::TimedOut) => Ok(()),
            other => Err(format!("after the answer came {other:?}").into()),
        }
    });
    area.check("the kernel's own answer counts as an answer", || {
        let peers = Peers::new()?;
        let mad = VendorMad::new(CLASS + 9, OUI, Method::GET, fresh_tid()).into_bytes();
        let packet =
            Packet::new(peers.a.agent, &peers.b.address(), mad).timeout(Duration::from_secs(2));
        peers.a.port.send(&packet)?;
        ensure_eq!(peers.a.recv()?.header.status, 0);
        match peers.a.port.recv_timeout(Duration::from_secs(3)) {
            Err(umad::Error::TimedOut) => Ok(()),
            other => Err(format!("after the answer came {other:?}").into()),
        }
    });
    for retries in [1, 2, 4] {
        area.check(
            format!(
                "{retries} retries: {} MADs on the wire, then one packet",
                retries + 1
            ),
            move || {
                let peers = Peers::new()?;
                let packet = unanswered(&peers, 60).retries(retries);
                let (got, took) = time_out(&peers, &packet)?;
                let whole = Duration::from_millis(60 * u64::from(retries + 1));
                ensure!(took >= whole, "after {took:?}, with {whole:?} to wait");
                ensure_eq!(got.header.retries, retries);
                for n in 0..=retries {
                    let copy = peers.b.port.recv_timeout(SOON).what(format!("copy {n}"))?;
                    ensure_eq!(copy.tid()?, got.tid()?);
                    ensure_eq!(copy.mad, {
                        let mut mad = packet.mad.clone();
                        mad[8..16].copy_from_slice(&got.tid()?.0.to_be_bytes());
                        mad
                    });
                }
                peers.b.nothing_comes()?;
                peers.a.nothing_comes()
            },
        );
    }
    area.check("an answer to a repetition ends the request", || {
        let peers = Peers::new()?;
        let request = peers
            .a
            .packet(&peers.b, Method::GET, fresh_tid())
            .timeout(Duration::from_millis(300))
            .retries(50);
        peers.a.port.send(&request)?;
        peers.b.recv_tid(request.tid()?)?;
        let second = peers.b.recv_tid(request.tid()?)?;
        peers.b.port.send(&peers.b.response(&second)?)?;
        ensure_eq!(peers.a.recv_tid(request.tid()?)?.header.status, 0);
        // No copy was under way for longer than this.
        while peers.b.port.recv_timeout(ktap::peers::QUIET).is_ok() {}
        peers.a.nothing_comes()
    });
    area.check(
        "a timeout of 2^32-1 ms does not end soon, and its file can be closed",
        || {
            let peers = Peers::new()?;
            for ms in [u64::from(u32::MAX), 0x7fff_ffff, 0x8000_0000] {
                peers.a.port.send(&unanswered(&peers, ms))?;
            }
            peers.a.nothing_comes()
        },
    );
    area.check("the request of one file does not end in another", || {
        let peers = Peers::new()?;
        let other = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
        time_out(&peers, &unanswered(&peers, 50))?;
        other.nothing_comes()
    });
    area.check("the packet names the agent that sent", || {
        let peers = Peers::new()?;
        let second = peers.a.port.register2(&Registration::send_only())?;
        for agent in [second, peers.a.agent] {
            let mut packet = unanswered(&peers, 30);
            packet.agent = agent;
            ensure_eq!(time_out(&peers, &packet)?.0.agent, agent);
        }
        Ok(())
    });
    area.check(
        "a response that is sent with a timeout ends with a packet, too",
        || {
            let peers = Peers::new()?;
            let request = peers
                .a
                .packet(&peers.b, Method::GET, fresh_tid())
                .timeout(SOON);
            peers.a.port.send(&request)?;
            let got = peers.b.recv_tid(request.tid()?)?;
            let answer = peers.b.response(&got)?.timeout(Duration::from_millis(50));
            peers.b.port.send(&answer)?;
            ensure_eq!(peers.a.recv_tid(request.tid()?)?.header.status, 0);
            let end = peers.b.recv()?;
            ensure_eq!(end.header.status, 110);
            ensure_eq!(end.tid()?, got.tid()?);
            Ok(())
        },
    );
    area.check("a program can wait with poll() for a time-out", || {
        let peers = Peers::new()?;
        peers.a.port.send(&unanswered(&peers, 80))?;
        peers.a.wait_readable()?;
        ensure_eq!(peers.a.recv()?.header.status, 110);
        Ok(())
    });
    area.check("requests that end beside others that are answered", || {
        let peers = Peers::new()?;
        let mut silent = BTreeSet::new();
        for _ in 0..20 {
            let packet = unanswered(&peers, 300);
            silent.insert(packet.tid()?.low());
            peers.a.port.send(&packet)?;
            let (_, answer) = {
                let tid = fresh_tid();
                let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
                peers.a.port.send(&request)?;
                let got = peers.b.recv_tid(tid)?;
                peers.b.port.send(&peers.b.response(&got)?)?;
                // A time-out of an earlier one may come first.
                loop {
                    let answer = peers.a.recv()?;
                    if answer.header.status == 0 {
                        break (got, answer);
                    }
                    ensure!(silent.remove(&answer.tid()?.low()));
                }
            };
            ensure_eq!(answer.mad_header()?.method, Method::GET_RESP);
        }
        while !silent.is_empty() {
            let end = peers.a.recv()?;
            ensure_eq!(end.header.status, 110);
            ensure!(silent.remove(&end.tid()?.low()));
        }
        Ok(())
    });

    area.run()
}
