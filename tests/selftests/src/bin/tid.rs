// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `tid`: transaction ids. The kernel owns the upper half of a request's, and by it a response
//! finds the agent that asked.

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;

// A request from `from` that waits for its answer.
fn request(from: &Endpoint, to: &Endpoint, tid: Tid) -> Packet {
    from.packet(to, Method::GET, tid).timeout(SOON)
}

// Another agent on the file of `endpoint`, send-only.
fn second_agent(endpoint: &Endpoint) -> Outcome<AgentId> {
    Ok(endpoint.port.register2(&Registration::send_only())?)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("tid");

    for method in [
        Method::GET,
        Method::SET,
        Method::SEND,
        Method::TRAP,
        Method::REPORT,
        Method(0x10),
        Method(0x7f),
    ] {
        area.check(
            format!("method {method:?}: the upper half is the agent's, the lower half stays"),
            move || {
                let peers = Peers::with(
                    "rxe0",
                    "rxe1",
                    Layout::New,
                    &Peers::registration(CLASS).methods(&[method]),
                )?;
                let mut high = None;
                for given in [
                    0x0000_0000_1234_5678,
                    0xffff_ffff_9abc_def0,
                    0x8000_0000_0000_0001,
                ] {
                    peers
                        .a
                        .port
                        .send(&peers.a.packet(&peers.b, method, Tid(given)))?;
                    let got = peers.b.recv_tid(Tid(given))?.tid()?;
                    ensure_eq!(got.low(), Tid(given).low());
                    ensure!(got.high() != Tid(given).high() || got.high() == 0);
                    ensure_eq!(*high.get_or_insert(got.high()), got.high(), "another time");
                }
                Ok(())
            },
        );
    }
    area.check(
        "lower halves 0, 1, 2^31 and 2^32-1 are ids like others",
        || {
            let peers = Peers::new()?;
            for low in [0, 1, 0x8000_0000, u32::MAX] {
                let (got, answer) = peers.round_trip(Tid::new(low))?;
                ensure_eq!((got.tid()?.low(), answer.tid()?.low()), (low, low));
            }
            Ok(())
        },
    );
    area.check(
        "each agent has an upper half of its own, on every file and port",
        || {
            let peers = Peers::new()?;
            let mut highs = Vec::new();
            let other_file = Endpoint::open("rxe0", Layout::Old, &Registration::send_only())?;
            let other_port = Endpoint::open("rxe1", Layout::New, &Registration::send_only())?;
            let second = second_agent(&peers.a)?;
            for (port, agent) in [
                (&peers.a.port, peers.a.agent),
                (&peers.a.port, second),
                (&other_file.port, other_file.agent),
                (&other_port.port, other_port.agent),
            ] {
                let mut packet = peers.a.packet(&peers.b, Method::SEND, Tid::new(42));
                packet.agent = agent;
                port.send(&packet)?;
                highs.push(peers.b.recv_tid(Tid::new(42))?.tid()?.high());
            }
            let mut unique = highs.clone();
            unique.sort_unstable();
            unique.dedup();
            ensure_eq!(unique.len(), highs.len(), "upper halves {highs:x?}");
            Ok(())
        },
    );
    area.check("a new agent with an old id has another upper half", || {
        let peers = Peers::new()?;
        let before = peers.deliver(fresh_tid())?.tid()?.high();
        peers.a.port.unregister(peers.a.agent)?;
        let again = peers.a.port.register2(&Peers::registration(CLASS))?;
        ensure_eq!(again, peers.a.agent);
        let after = peers.deliver(fresh_tid())?.tid()?.high();
        ensure!(before != after, "both are {after:#x}");
        Ok(())
    });
    area.check(
        "a response goes out with the transaction id that it was given",
        || {
            let peers = Peers::new()?;
            let request = request(&peers.a, &peers.b, fresh_tid());
            peers.a.port.send(&request)?;
            let got = peers.b.recv_tid(request.tid()?)?;
            peers.b.port.send(&peers.b.response(&got)?)?;
            let answer = peers.a.recv_answer(request.tid()?)?;
            ensure_eq!(answer.tid()?, got.tid()?);
            ensure_eq!(answer.header.status, 0);
            Ok(())
        },
    );
    area.check(
        "method TrapRepress is a response: its id stays, and it finds the asker",
        || {
            let peers = Peers::with(
                "rxe0",
                "rxe1",
                Layout::New,
                &Peers::registration(CLASS).methods(&[Method::TRAP]),
            )?;
            let trap = peers
                .a
                .packet(&peers.b, Method::TRAP, fresh_tid())
                .timeout(SOON);
            peers.a.port.send(&trap)?;
            let got = peers.b.recv_tid(trap.tid()?)?;
            let mut repress = peers.b.response(&got)?;
            repress.mad[3] = Method::TRAP_REPRESS.0;
            peers.b.port.send(&repress)?;
            let answer = peers.a.recv_answer(trap.tid()?)?;
            ensure_eq!(answer.tid()?, got.tid()?);
            ensure_eq!(answer.mad_header()?.method, Method::TRAP_REPRESS);
            Ok(())
        },
    );
    area.check(
        "class 0x05: the attribute modifier's lowest bit makes a response",
        || {
            let registration = Registration::class(0x05, 1).methods(&[Method::SEND]);
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
            let ask = request(&peers.a, &peers.b, fresh_tid());
            let mut ask = Packet { ..ask };
            ask.mad[3] = Method::SEND.0;
            peers.a.port.send(&ask)?;
            let got = peers.b.recv_tid(ask.tid()?)?;
            let mut answer = peers.b.response(&got)?;
            answer.mad[3] = Method::SEND.0;
            answer.mad[20..24].copy_from_slice(&1u32.to_be_bytes());
            peers.b.port.send(&answer)?;
            let answer = peers.a.recv_answer(ask.tid()?)?;
            ensure_eq!(answer.tid()?, got.tid()?);
            ensure_eq!(answer.agent, peers.a.agent);
            Ok(())
        },
    );
    area.check(
        "a vendor MAD with that bit is a request: its upper half is replaced",
        || {
            let peers = Peers::new()?;
            let mut packet = peers
                .a
                .packet(&peers.b, Method::SEND, Tid(0x0bad_0bad_0000_0077));
            packet.mad[20..24].copy_from_slice(&1u32.to_be_bytes());
            peers.a.port.send(&packet)?;
            ensure!(peers.b.recv_tid(packet.tid()?)?.tid()?.high() != 0x0bad_0bad);
            Ok(())
        },
    );
    area.check(
        "of two agents of a file, the one that asked gets the response",
        || {
            let peers = Peers::new()?;
            let second = second_agent(&peers.a)?;
            for agent in [second, peers.a.agent, second] {
                let mut ask = request(&peers.a, &peers.b, fresh_tid());
                ask.agent = agent;
                peers.a.port.send(&ask)?;
                let got = peers.b.recv_tid(ask.tid()?)?;
                peers.b.port.send(&peers.b.response(&got)?)?;
                ensure_eq!(peers.a.recv_answer(ask.tid()?)?.agent, agent);
            }
            Ok(())
        },
    );
    area.check(
        "of two files that ask with the same id, each gets its own response",
        || {
            let peers = Peers::new()?;
            let other = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
            let tid = fresh_tid();
            for (from, mark) in [(&peers.a, 1), (&other, 2)] {
                let mut ask = request(from, &peers.b, tid);
                ask.mad[200] = mark;
                from.port.send(&ask)?;
            }
            for _ in 0..2 {
                let got = peers.b.recv_tid(tid)?;
                peers.b.port.send(&peers.b.response(&got)?)?;
            }
            for (from, mark) in [(&other, 2), (&peers.a, 1)] {
                ensure_eq!(from.recv_answer(tid)?.mad[200], mark);
                from.nothing_comes()?;
            }
            Ok(())
        },
    );
    area.check(
        "responses may come in another order than the requests",
        || {
            let peers = Peers::new()?;
            let tids: Vec<Tid> = (0..20).map(|_| fresh_tid()).collect();
            let mut asked = Vec::new();
            for tid in &tids {
                peers.a.port.send(&request(&peers.a, &peers.b, *tid))?;
                asked.push(peers.b.recv_tid(*tid)?);
            }
            for got in asked.iter().rev() {
                peers.b.port.send(&peers.b.response(got)?)?;
            }
            for tid in tids.iter().rev() {
                let answer = peers.a.recv()?;
                ensure_eq!((answer.tid()?.low(), answer.header.status), (tid.low(), 0));
            }
            Ok(())
        },
    );
    area.check(
        "an agent gets the response in a class that it did not register",
        || {
            let peers = Peers::new()?;
            let registration = Peers::registration(CLASS + 5);
            let other = Endpoint::open("rxe1", Layout::New, &registration)?;
            let ask = request(&peers.a, &other, fresh_tid());
            peers.a.port.send(&ask)?;
            let got = other.recv_tid(ask.tid()?)?;
            other.port.send(&other.response(&got)?)?;
            ensure_eq!(peers.a.recv_answer(ask.tid()?)?.agent, peers.a.agent);
            Ok(())
        },
    );
    area.check("a response that nobody asked for is dropped", || {
        let peers = Peers::new()?;
        let high = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
        peers.b.port.send(&high)?;
        // The upper half of `a`, as `b` learns it from any request.
        let got = peers.deliver(fresh_tid())?;
        peers.a.recv_tid(high.tid()?)?;
        let made_up = [
            Tid((u64::from(got.tid()?.high()) << 32) | 0x7777),
            Tid(0x00ff_fff0_0000_0001),
            Tid(u64::MAX),
            Tid(1),
        ];
        for tid in made_up {
            let packet = peers.b.packet(&peers.a, Method::GET_RESP, tid);
            peers.b.port.send(&packet)?;
        }
        peers.a.nothing_comes()
    });
    area.check(
        "a response of another class is dropped, the right one still comes",
        || {
            let peers = Peers::new()?;
            let ask = request(&peers.a, &peers.b, fresh_tid());
            peers.a.port.send(&ask)?;
            let got = peers.b.recv_tid(ask.tid()?)?;
            let mut wrong = peers.b.response(&got)?;
            wrong.mad[1] = CLASS + 1;
            peers.b.port.send(&wrong)?;
            peers.a.nothing_comes()?;
            peers.b.port.send(&peers.b.response(&got)?)?;
            ensure_eq!(peers.a.recv_answer(ask.tid()?)?.mad[1], CLASS);
            Ok(())
        },
    );
    area.check("a second response to one request is dropped", || {
        let peers = Peers::new()?;
        let tid = fresh_tid();
        let (got, _) = peers.round_trip(tid)?;
        let again = peers.b.response(&got)?;
        // The first one may still be outstanding for some time (see area `duplicate`).
        wait_until("the response can be sent again", SOON, || {
            peers.b.port.send(&again).is_ok()
        })?;
        peers.a.nothing_comes()
    });
    area.check("a response that comes after the timeout is dropped", || {
        let peers = Peers::new()?;
        let ask = peers
            .a
            .packet(&peers.b, Method::GET, fresh_tid())
            .timeout(Duration::from_millis(50));
        peers.a.port.send(&ask)?;
        let got = peers.b.recv_tid(ask.tid()?)?;
        ensure_eq!(peers.a.recv_tid(ask.tid()?)?.header.status, 110);
        peers.b.port.send(&peers.b.response(&got)?)?;
        peers.a.nothing_comes()
    });
    area.check(
        "a response to a request that waited for none is dropped",
        || {
            let peers = Peers::new()?;
            let ask = peers.a.packet(&peers.b, Method::GET, fresh_tid());
            peers.a.port.send(&ask)?;
            let got = peers.b.recv_tid(ask.tid()?)?;
            peers.b.port.send(&peers.b.response(&got)?)?;
            peers.a.nothing_comes()
        },
    );
    area.check("a response to a closed file harms nobody", || {
        let peers = Peers::new()?;
        let gone = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
        let ask = request(&gone, &peers.b, fresh_tid());
        gone.port.send(&ask)?;
        let got = peers.b.recv_tid(ask.tid()?)?;
        drop(gone);
        peers.b.port.send(&peers.b.response(&got)?)?;
        peers.a.nothing_comes()?;
        peers.round_trip(fresh_tid())?;
        Ok(())
    });
    area.check(
        "the OUI and version of a response do not matter for its way",
        || {
            let peers = Peers::new()?;
            let ask = request(&peers.a, &peers.b, fresh_tid());
            peers.a.port.send(&ask)?;
            let got = peers.b.recv_tid(ask.tid()?)?;
            let mut answer = peers.b.response(&got)?;
            answer.mad[2] = 9;
            answer.mad[36..40].copy_from_slice(&(OUI + 7).to_be_bytes());
            peers.b.port.send(&answer)?;
            ensure_eq!(peers.a.recv_answer(ask.tid()?)?.mad[2], 9);
            Ok(())
        },
    );

    area.run()
}
