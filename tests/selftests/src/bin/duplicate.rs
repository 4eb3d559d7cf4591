// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `duplicate`: which sends are refused because the same one is outstanding.
//!
//! Two requests are the same when transaction id (with the agent's upper half) and class are; two
//! responses, when the destination is, too. A send is outstanding until it is answered, timed out,
//! or, without a timeout, handed to the wire.

use std::sync::atomic::{AtomicU32, Ordering};

use ktap::peers::{CLASS, OUI, QUIET, SOON};
use ktap::prelude::*;

// A request that stays outstanding until the check ends.
fn outstanding(peers: &Peers, tid: Tid) -> Packet {
    peers
        .a
        .packet(&peers.b, Method::SEND, tid)
        .timeout(Duration::from_secs(100))
}

// What `b` got of a Get that `a` waits for.
fn asked(peers: &Peers) -> Outcome<Packet> {
    let tid = fresh_tid();
    let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
    peers.a.port.send(&request)?;
    peers.b.recv_tid(tid)
}

// Receives without ever sleeping: the sooner the packet is seen, the better for these checks.
fn recv_awake(endpoint: &Endpoint) -> Outcome<Packet> {
    let end = Instant::now() + SOON;
    loop {
        match endpoint.port.recv_timeout(Duration::ZERO) {
            Err(umad::Error::TimedOut) if Instant::now() < end => (),
            result => return Ok(result?),
        }
    }
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("duplicate");

    for layout in [Layout::Old, Layout::New] {
        area.check(
            format!(
                "a request is EINVAL while the same one is outstanding ({})",
                layout.header_len()
            ),
            move || {
                let peers = Peers::with_layout(layout)?;
                let packet = outstanding(&peers, fresh_tid());
                peers.a.port.send(&packet)?;
                for _ in 0..10 {
                    ensure_errno!(peers.a.port.send(&packet), EINVAL);
                }
                peers.b.recv_tid(packet.tid()?)?;
                peers.b.nothing_comes()
            },
        );
    }
    area.check(
        "the upper half that the program writes makes no difference",
        || {
            let peers = Peers::new()?;
            peers
                .a
                .port
                .send(&outstanding(&peers, Tid(0x0000_0001_0000_0042)))?;
            for high in [0, 1, 2, 0xffff_ffff] {
                let packet = outstanding(&peers, Tid((high << 32) | 0x42));
                ensure_errno!(peers.a.port.send(&packet), EINVAL, "upper half {high:#x}");
            }
            Ok(())
        },
    );
    area.check(
        "method, attribute, timeout and data make no difference",
        || {
            let peers = Peers::new()?;
            let packet = outstanding(&peers, fresh_tid());
            peers.a.port.send(&packet)?;
            for (at, value) in [(3, 1), (3, 2), (17, 99), (23, 99), (2, 7), (200, 1)] {
                let mut other = packet.clone();
                other.mad[at] = value;
                ensure_errno!(peers.a.port.send(&other), EINVAL, "byte {at} is {value}");
            }
            let other = packet.clone().timeout(Duration::ZERO);
            ensure_errno!(peers.a.port.send(&other), EINVAL, "no timeout");
            Ok(())
        },
    );
    area.check(
        "another destination makes no difference for a request",
        || {
            let peers = Peers::new()?;
            let packet = outstanding(&peers, fresh_tid());
            peers.a.port.send(&packet)?;
            let mut other = packet.clone();
            other.header.gid = peers.a.gid.0;
            ensure_errno!(peers.a.port.send(&other), EINVAL);
            Ok(())
        },
    );
    area.check("another class is another request", || {
        let peers = Peers::new()?;
        let tid = fresh_tid();
        for class in [CLASS, CLASS + 1, 0x06, 0x0a] {
            let mut packet = outstanding(&peers, tid);
            packet.mad[1] = class;
            peers
                .a
                .port
                .send(&packet)
                .what(format!("class {class:#x}"))?;
            ensure_errno!(peers.a.port.send(&packet), EINVAL, "class {class:#x} again");
        }
        Ok(())
    });
    area.check("another agent of the file sends another request", || {
        let peers = Peers::new()?;
        let second = peers.a.port.register2(&Registration::send_only())?;
        let mut packet = outstanding(&peers, fresh_tid());
        peers.a.port.send(&packet)?;
        packet.agent = second;
        peers.a.port.send(&packet)?;
        ensure_errno!(
            peers.a.port.send(&packet),
            EINVAL,
            "the second agent's again"
        );
        packet.agent = peers.a.agent;
        ensure_errno!(
            peers.a.port.send(&packet),
            EINVAL,
            "the first agent's again"
        );
        Ok(())
    });
    area.check("another file sends another request", || {
        let peers = Peers::new()?;
        let other = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
        let packet = outstanding(&peers, fresh_tid());
        peers.a.port.send(&packet)?;
        other.port.send(&packet)?;
        ensure_errno!(peers.a.port.send(&packet), EINVAL);
        ensure_errno!(other.port.send(&packet), EINVAL);
        Ok(())
    });
    area.check(
        "a refused duplicate does not disturb the first one: it is answered",
        || {
            let peers = Peers::new()?;
            let tid = fresh_tid();
            let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
            peers.a.port.send(&request)?;
            for _ in 0..5 {
                ensure_errno!(peers.a.port.send(&request), EINVAL);
            }
            let got = peers.b.recv_tid(tid)?;
            peers.b.port.send(&peers.b.response(&got)?)?;
            ensure_eq!(peers.a.recv_tid(tid)?.header.status, 0);
            peers.b.nothing_comes()
        },
    );
    area.check(
        "a refused duplicate does not disturb the first one: it times out, once",
        || {
            let peers = Peers::new()?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_millis(500));
            peers.a.port.send(&packet)?;
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
            ensure_eq!(peers.a.recv()?.header.status, 110);
            peers.a.nothing_comes()
        },
    );
    area.check("after a timeout the id is free at once", || {
        let peers = Peers::new()?;
        let packet = peers
            .a
            .packet(&peers.b, Method::SEND, fresh_tid())
            .timeout(Duration::from_millis(10));
        for n in 0..30 {
            peers.a.port.send(&packet).what(format!("time {n}"))?;
            ensure_eq!(peers.a.recv_tid(packet.tid()?)?.header.status, 110);
        }
        Ok(())
    });
    area.check("without a timeout the id is free soon", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        for n in 0..10 {
            wait_until(&format!("time {n}"), SOON, || {
                peers.a.port.send(&packet).is_ok()
            })?;
            peers.b.recv_tid(packet.tid()?)?;
        }
        Ok(())
    });
    area.check(
        "an id can be used again as soon as its response could be read, 2,000 times",
        || {
            let peers = Peers::new()?;
            // Nobody has this class: the kernel answers, at once.
            let mad = VendorMad::new(CLASS + 9, OUI, Method::GET, fresh_tid()).into_bytes();
            let request = Packet::new(peers.a.agent, &peers.b.address(), mad).timeout(SOON);
            for n in 0..2000 {
                peers.a.port.send(&request).what(format!("time {n}"))?;
                recv_awake(&peers.a)?;
            }
            Ok(())
        },
    )
    .improvement(5)
    .racy("the C module refuses only until its send handler has run");
    area.check(
        "soon after its response an id is free on any module",
        || {
            let peers = Peers::new()?;
            let tid = fresh_tid();
            peers.round_trip(tid)?;
            let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
            wait_until("the id is free", SOON, || {
                peers.a.port.send(&request).is_ok()
            })
        },
    );
    area.check(
        "duplicates are found among 2,000 outstanding requests",
        || {
            let peers = Peers::new()?;
            let packets: Vec<_> = (0..2000)
                .map(|n| outstanding(&peers, Tid::new(n)))
                .collect();
            for packet in &packets {
                peers.a.port.send(packet)?;
            }
            for packet in packets.iter().step_by(111).chain(packets.last()) {
                ensure_errno!(peers.a.port.send(packet), EINVAL, "{:?}", packet.tid());
            }
            peers.a.port.send(&outstanding(&peers, Tid::new(2000)))?;
            Ok(())
        },
    )
    .timeout(300);

    // Responses.
    area.check(
        "a response with a timeout stays outstanding: the same one is EINVAL",
        || {
            let peers = Peers::new()?;
            let got = asked(&peers)?;
            let answer = peers.b.response(&got)?.timeout(Duration::from_secs(100));
            peers.b.port.send(&answer)?;
            peers.a.recv_tid(got.tid()?)?;
            std::thread::sleep(QUIET);
            for _ in 0..5 {
                ensure_errno!(peers.b.port.send(&answer), EINVAL);
            }
            Ok(())
        },
    );
    area.check(
        "a response without timeout is EINVAL while one with timeout is outstanding",
        || {
            let peers = Peers::new()?;
            let got = asked(&peers)?;
            let answer = peers.b.response(&got)?;
            peers
                .b
                .port
                .send(&answer.clone().timeout(Duration::from_secs(100)))?;
            peers.a.recv_tid(got.tid()?)?;
            ensure_errno!(peers.b.port.send(&answer), EINVAL);
            peers.a.nothing_comes()
        },
    );
    area.check(
        "after the timeout of a response the same one can be sent at once",
        || {
            let peers = Peers::new()?;
            let got = asked(&peers)?;
            let answer = peers.b.response(&got)?.timeout(Duration::from_millis(20));
            for n in 0..10 {
                peers.b.port.send(&answer).what(format!("time {n}"))?;
                ensure_eq!(peers.b.recv()?.header.status, 110);
            }
            Ok(())
        },
    );
    area.check("another upper half of the id is another response", || {
        let peers = Peers::new()?;
        let got = asked(&peers)?;
        let answer = peers.b.response(&got)?.timeout(Duration::from_secs(100));
        peers.b.port.send(&answer)?;
        let mut other = answer.clone();
        other.mad[8] ^= 0x80;
        peers.b.port.send(&other)?;
        ensure_errno!(peers.b.port.send(&other), EINVAL);
        Ok(())
    });
    area.check("another destination or class is another response", || {
        let peers = Peers::new()?;
        let got = asked(&peers)?;
        let answer = peers.b.response(&got)?.timeout(Duration::from_secs(100));
        peers.b.port.send(&answer)?;
        let mut other = answer.clone();
        other.header.gid = peers.b.gid.0;
        peers.b.port.send(&other)?;
        ensure_errno!(
            peers.b.port.send(&other),
            EINVAL,
            "the other destination again"
        );
        let mut other = answer.clone();
        other.mad[1] = CLASS + 1;
        peers.b.port.send(&other)?;
        ensure_errno!(peers.b.port.send(&other), EINVAL, "the other class again");
        ensure_errno!(peers.b.port.send(&answer), EINVAL, "the first one again");
        Ok(())
    });
    area.check("the agent makes no difference for a response", || {
        let peers = Peers::new()?;
        let second = peers.b.port.register2(&Registration::send_only())?;
        let got = asked(&peers)?;
        let mut answer = peers.b.response(&got)?.timeout(Duration::from_secs(100));
        peers.b.port.send(&answer)?;
        answer.agent = second;
        ensure_errno!(peers.b.port.send(&answer), EINVAL);
        Ok(())
    });
    area.check(
        "a request and a response with one id are no duplicates",
        || {
            let peers = Peers::new()?;
            // The id that `b`'s requests have on the wire.
            let probe = peers.b.packet(&peers.a, Method::SEND, Tid::new(77));
            peers.b.port.send(&probe)?;
            let wire = peers.a.recv()?.tid()?;
            let request = probe.clone().timeout(Duration::from_secs(100));
            wait_until("the probe has ended", SOON, || {
                peers.b.port.send(&request).is_ok()
            })?;
            let response = peers
                .b
                .packet(&peers.a, Method::GET_RESP, wire)
                .timeout(Duration::from_secs(100));
            peers.b.port.send(&response)?;
            ensure_errno!(peers.b.port.send(&response), EINVAL);
            ensure_errno!(peers.b.port.send(&request), EINVAL);
            Ok(())
        },
    );
    area.check("method TrapRepress counts among the responses", || {
        let peers = Peers::new()?;
        let repress = |to: &Endpoint| {
            let mad = VendorMad::new(CLASS, OUI, Method::TRAP_REPRESS, Tid((5 << 32) | 6));
            Packet::new(peers.b.agent, &to.address(), mad.into_bytes())
                .timeout(Duration::from_secs(100))
        };
        peers.b.port.send(&repress(&peers.a))?;
        ensure_errno!(peers.b.port.send(&repress(&peers.a)), EINVAL);
        peers.b.port.send(&repress(&peers.b))?;
        let mut response = repress(&peers.a);
        response.mad[3] = Method::GET_RESP.0;
        ensure_errno!(peers.b.port.send(&response), EINVAL, "another method");
        Ok(())
    });
    area.check(
        "a response can be repeated as soon as the requester could see it, 500 times",
        || {
            let peers = Peers::new()?;
            for n in 0..500 {
                let got = asked(&peers)?;
                let answer = peers.b.response(&got)?;
                peers.b.port.send(&answer)?;
                recv_awake(&peers.a)?;
                peers.b.port.send(&answer).what(format!("time {n}"))?;
            }
            Ok(())
        },
    )
    .improvement(12)
    .racy("the C module refuses only until its send handler has run");
    area.check(
        "a requester that asks again is answered again, 100 times",
        || {
            let peers = Peers::new()?;
            let tid = fresh_tid();
            for n in 0..100 {
                let request = peers.a.packet(&peers.b, Method::GET, tid).timeout(SOON);
                wait_until("the id is free", SOON, || {
                    peers.a.port.send(&request).is_ok()
                })?;
                let got = peers.b.recv_tid(tid)?;
                let answer = peers.b.response(&got)?;
                wait_until(&format!("answer {n} can be sent"), SOON, || {
                    peers.b.port.send(&answer).is_ok()
                })?;
                peers.a.recv_tid(tid)?;
            }
            Ok(())
        },
    );
    area.check(
        "soon after a response the same one can be sent on any module",
        || {
            let peers = Peers::new()?;
            let got = asked(&peers)?;
            let answer = peers.b.response(&got)?;
            peers.b.port.send(&answer)?;
            wait_until("the response can be sent again", SOON, || {
                peers.b.port.send(&answer).is_ok()
            })
        },
    );
    area.check(
        "of 8 threads that send one request at once, one succeeds",
        || {
            let peers = Peers::new()?;
            for n in 0..50 {
                let packet = outstanding(&peers, Tid::new(n));
                let sent = std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..8)
                        .map(|_| scope.spawn(|| peers.a.port.send(&packet).is_ok()))
                        .collect();
                    threads
                        .into_iter()
                        .map(|thread| thread.join().unwrap_or(false))
                        .filter(|ok| *ok)
                        .count()
                });
                ensure_eq!(sent, 1, "request {n}");
            }
            Ok(())
        },
    );
    area.check(
        "of two that send one request in step, one succeeds, 5,000 times",
        || {
            const ROUNDS: u32 = 5000;
            let peers = Peers::new()?;
            let arrived = AtomicU32::new(0);
            let send_all = || -> Vec<bool> {
                (0..ROUNDS)
                    .map(|n| {
                        let packet = outstanding(&peers, Tid::new(n));
                        // Both begin at the same moment, as nearly as that can be.
                        arrived.fetch_add(1, Ordering::SeqCst);
                        while arrived.load(Ordering::SeqCst) < 2 * (n + 1) {
                            std::hint::spin_loop();
                        }
                        peers.a.port.send(&packet).is_ok()
                    })
                    .collect()
            };
            let (one, other) = std::thread::scope(|scope| {
                let one = scope.spawn(send_all);
                (send_all(), one.join().unwrap_or_default())
            });
            let wrong = one.iter().zip(&other).position(|(a, b)| a == b);
            ensure_eq!(
                (one.len(), wrong),
                (other.len(), None),
                "the first wrong round"
            );
            Ok(())
        },
    )
    .timeout(300);

    area.run()
}
