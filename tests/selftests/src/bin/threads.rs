// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `threads`: one file, or one port, used by many at the same time. Nothing is lost, nothing
//! comes twice.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::Arc;

use ktap::peers::{OUI, SOON};
use ktap::prelude::*;
use selftests::task::{handle_signal, Task, MUST};

const PACKET: usize = 64 + 256;

/// What a reader got: lower half of the TID, and the status.
type Got = (u32, u32);

/// Starts a thread that reads until a signal ends it, and reports what it gets.
fn reader(port: &Arc<Port>, to: mpsc::Sender<Got>) -> Task<umad::Result<()>> {
    let port = Arc::clone(port);
    Task::start(move || loop {
        let mut buffer = [0; PACKET];
        match port.read(&mut buffer) {
            Ok(len) => {
                let packet = Packet::from_bytes(&buffer[..len], Layout::New)?;
                let _ = to.send((packet.tid()?.low(), packet.header.status));
            }
            // The only signal is the one that ends it.
            Err(e) if e.errno() == Some(Errno::EINTR) => return Ok(()),
            Err(e) => return Err(e),
        }
    })
}

/// Collects packets until as many as expected have come; then looks whether more come.
fn collect(from: &Receiver<Got>, expected: usize) -> Outcome<BTreeMap<u32, Vec<u32>>> {
    let mut all: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for n in 0..expected {
        match from.recv_timeout(SOON) {
            Ok((tid, status)) => all.entry(tid).or_default().push(status),
            Err(_) => ensure!(false, "only {n} of {expected} came"),
        }
    }
    // A packet that comes twice has no event to wait for, hence a bound.
    while let Ok((tid, status)) = from.recv_timeout(ktap::peers::QUIET) {
        all.entry(tid).or_default().push(status);
    }
    Ok(all)
}

/// Each of these TIDs came once, with that status.
fn once_each(all: &BTreeMap<u32, Vec<u32>>, tids: &[u32], status: u32) -> Outcome {
    for tid in tids {
        let got = all.get(tid).map(Vec::as_slice).unwrap_or_default();
        ensure_eq!(got, [status], "packets of TID {tid:#x}");
    }
    ensure_eq!(all.len(), tids.len(), "transaction ids");
    Ok(())
}

fn tids(count: usize) -> Vec<u32> {
    (0..count).map(|_| fresh_tid().low()).collect()
}

/// A MAD of the class of `to`.
fn packet(from: AgentId, to: &Endpoint, method: Method, tid: u32) -> Packet {
    let mad = VendorMad::new(to.class, OUI, method, Tid::new(tid));
    Packet::new(from, &to.address(), mad.into_bytes())
}

/// Starts a thread that answers every request that comes to `endpoint` until it is stopped.
fn responder(endpoint: Endpoint) -> Task<Outcome> {
    Task::start(move || loop {
        match endpoint.port.recv() {
            Ok(request) => endpoint.port.send(&endpoint.response(&request)?)?,
            Err(e) if e.errno() == Some(Errno::EINTR) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    })
}

fn stop_all<T: Send + 'static>(tasks: Vec<Task<T>>) -> Outcome<Vec<T>> {
    let mut results = Vec::new();
    for task in tasks {
        match task.stop() {
            Some(result) => results.push(result),
            None => ensure!(false, "a thread hangs"),
        }
    }
    Ok(results)
}

/// Writers on `writing`, each with its own part of `tids`; the peer answers or not.
fn writers(
    writing: &Arc<Port>,
    agent: AgentId,
    to: &Endpoint,
    tids: &[u32],
    count: usize,
    timeout: Duration,
) -> Vec<Task<umad::Result<()>>> {
    tids.chunks(tids.len() / count)
        .map(|part| {
            let port = Arc::clone(writing);
            let packets: Vec<_> = part
                .iter()
                .map(|tid| packet(agent, to, Method::GET, *tid).timeout(timeout))
                .collect();
            Task::start(move || packets.iter().try_for_each(|packet| port.send(packet)))
        })
        .collect()
}

fn finish(tasks: Vec<Task<umad::Result<()>>>) -> Outcome {
    for mut task in tasks {
        match task.result(MUST) {
            Some(result) => result.clone()?,
            None => ensure!(false, "a thread hangs"),
        }
    }
    Ok(())
}

fn one_file(area: &mut ktap::Area) {
    area.check(
        "8 writers and 2 readers on one file: each answer comes once",
        || {
            handle_signal(false);
            let Peers { a, b } = Peers::new()?;
            let tids = tids(320);
            let port = Arc::new(a.port);
            let (to, from) = mpsc::channel();
            let readers: Vec<_> = (0..2).map(|_| reader(&port, to.clone())).collect();
            let writers = writers(&port, a.agent, &b, &tids, 8, Duration::from_secs(60));
            let answers = responder(b);
            finish(writers)?;
            let all = collect(&from, tids.len())?;
            stop_all(readers)?;
            stop_all(vec![answers])?;
            once_each(&all, &tids, 0)
        },
    );
    area.check(
        "8 writers and 2 readers on one file: each timeout comes once",
        || {
            handle_signal(false);
            let Peers { a, b } = Peers::new()?;
            let tids = tids(320);
            let port = Arc::new(a.port);
            let (to, from) = mpsc::channel();
            let readers: Vec<_> = (0..2).map(|_| reader(&port, to.clone())).collect();
            finish(writers(
                &port,
                a.agent,
                &b,
                &tids,
                8,
                Duration::from_millis(100),
            ))?;
            let all = collect(&from, tids.len())?;
            stop_all(readers)?;
            once_each(&all, &tids, Errno::ETIMEDOUT as u32)
        },
    );
    area.check("answers and timeouts mixed: each request ends once", || {
        handle_signal(false);
        let Peers { a, b } = Peers::new()?;
        let tids = tids(320);
        let port = Arc::new(a.port);
        let (to, from) = mpsc::channel();
        let readers: Vec<_> = (0..2).map(|_| reader(&port, to.clone())).collect();
        // The peer answers every other request, about when it times out.
        let agent = a.agent;
        let writers = writers(&port, agent, &b, &tids, 8, Duration::from_millis(150));
        let answers = Task::start(move || loop {
            match b.port.recv() {
                Ok(request) if request.tid()?.low() % 2 == 0 => {
                    b.port.send(&b.response(&request)?)?;
                }
                Ok(_) => {}
                Err(e) if e.errno() == Some(Errno::EINTR) => return Outcome::Ok(()),
                Err(e) => return Err(e.into()),
            }
        });
        finish(writers)?;
        let all = collect(&from, tids.len())?;
        stop_all(readers)?;
        stop_all(vec![answers])?;
        ensure_eq!(all.len(), tids.len());
        for (tid, got) in &all {
            ensure_eq!(got.len(), 1, "packets of TID {tid:#x}");
            let timed_out = got[0] == Errno::ETIMEDOUT as u32;
            ensure!(
                timed_out || got[0] == 0 && tid % 2 == 0,
                "{tid:#x}: {got:?}"
            );
        }
        Ok(())
    });
    area.check(
        "as many packets as blocked readers: each reader gets one",
        || {
            let Peers { a, b } = Peers::new()?;
            let tids = tids(8);
            let packets: Vec<_> = tids
                .iter()
                .map(|tid| packet(a.agent, &b, Method::SEND, *tid))
                .collect();
            let port = Arc::new(b.port);
            let mut readers: Vec<_> = tids
                .iter()
                .map(|_| {
                    let port = Arc::clone(&port);
                    Task::start_asleep(libc::SYS_read, move || {
                        let mut buffer = [0; PACKET];
                        let len = port.read(&mut buffer)?;
                        Packet::from_bytes(&buffer[..len], Layout::New)?.tid()
                    })
                })
                .collect();
            packets.iter().try_for_each(|packet| a.port.send(packet))?;
            let mut got = Vec::new();
            for reader in &mut readers {
                match reader.result(MUST) {
                    Some(tid) => got.push(tid.clone()?.low()),
                    None => ensure!(false, "a reader sleeps on"),
                }
            }
            got.sort_unstable();
            ensure_eq!(got, tids);
            Ok(())
        },
    );
    area.check(
        "one blocked reader and one that polls: each packet comes once",
        || {
            handle_signal(false);
            let Peers { a, b } = Peers::new()?;
            let tids = tids(200);
            let packets: Vec<_> = tids
                .iter()
                .map(|tid| packet(a.agent, &b, Method::SEND, *tid))
                .collect();
            let port = Arc::new(b.port);
            let (to, from) = mpsc::channel();
            let blocked = reader(&port, to.clone());
            let polling = Arc::clone(&port);
            let mut poller = Task::start(move || loop {
                // Between poll() and read() the other reader may take the packet; the read() then
                // sleeps until the next one, or the end.
                match polling.recv_timeout(SOON) {
                    Ok(packet) => {
                        let _ = to.send((packet.tid()?.low(), packet.header.status));
                    }
                    Err(e) if e.errno() == Some(Errno::EINTR) => return Ok(()),
                    Err(umad::Error::TimedOut) => return Ok(()),
                    Err(e) => return Err(e),
                }
            });
            for packet in &packets {
                a.port.send(packet)?;
                ensure!(!poller.within(Duration::ZERO), "the poller ended");
            }
            let all = collect(&from, tids.len())?;
            stop_all(vec![blocked, poller])?;
            once_each(&all, &tids, 0)
        },
    );
    area.check("two processes share a file: each packet comes once", || {
        let Peers { a, b } = Peers::new()?;
        let tids = tids(200);
        let (pipe_in, pipe_out) = nix::unistd::pipe()?;
        // The child reads what it can get until a pause tells that all has come, and reports count
        // and sum of the transaction ids.
        let read_all = |limit: u64| -> Outcome<[u64; 2]> {
            let [mut count, mut sum] = [0, 0];
            while count < limit {
                match b.port.recv_timeout(Duration::from_secs(2)) {
                    Ok(packet) => {
                        count += 1;
                        sum += u64::from(packet.tid()?.low());
                    }
                    Err(umad::Error::TimedOut) => break,
                    Err(e) if e.errno() == Some(Errno::EAGAIN) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            Ok([count, sum])
        };
        // The two may race for a packet: whoever loses must not sleep for it.
        nix::fcntl::fcntl(
            &b.port,
            nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
        )?;
        let mut child = fork(|| {
            let report = read_all(u64::MAX)?.map(u64::to_ne_bytes).concat();
            nix::unistd::write(&pipe_out, &report)?;
            Ok(())
        })?;
        for tid in &tids {
            a.port.send(&packet(a.agent, &b, Method::SEND, *tid))?;
        }
        // The parent takes at most half, so that both have a share.
        let mine = read_all(100)?;
        child.wait(MUST)?;
        let mut report = [[0; 8]; 2];
        nix::unistd::read(&pipe_in, report.as_flattened_mut())?;
        let theirs = report.map(u64::from_ne_bytes);
        let expected: u64 = tids.iter().map(|tid| u64::from(*tid)).sum();
        ensure_eq!(theirs[0] + mine[0], 200, "packets in both processes");
        ensure_eq!(theirs[1] + mine[1], expected, "sum of all transaction ids");
        Ok(())
    });
    area.check("agents come and go while others of the file work", || {
        let Peers { a, b } = Peers::new()?;
        let trips = Peers {
            a: Endpoint {
                port: Port::open(0)?,
                ..a
            },
            b,
        };
        let agent = trips.a.port.register2(&Registration::send_only())?;
        ensure_eq!(agent, AgentId(0));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let churn: Vec<_> = [0x40, 0x41, 0x42]
                .into_iter()
                .map(|class| {
                    let (port, done) = (&trips.a.port, &done);
                    scope.spawn(move || -> Outcome {
                        while !done.load(Ordering::Relaxed) {
                            let agent = port.register2(&Peers::registration(class))?;
                            ensure!((1..4).contains(&agent.0), "agent {agent}");
                            port.unregister(agent)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            let mut outcome = Ok(());
            for _ in 0..30 {
                outcome = trips.round_trip(fresh_tid()).map(|_| ());
                if outcome.is_err() {
                    break;
                }
            }
            done.store(true, Ordering::Relaxed);
            for thread in churn {
                match thread.join() {
                    Ok(ended) => ended?,
                    Err(_) => ensure!(false, "a thread panicked"),
                }
            }
            outcome
        })
    });
}

fn one_port(area: &mut ktap::Area) {
    area.check("8 files send to one: each MAD comes once", || {
        handle_signal(false);
        let Peers { a, b } = Peers::new()?;
        drop(a);
        let tids = tids(320);
        let port = Arc::new(b.port);
        let (to, from) = mpsc::channel();
        let readers: Vec<_> = (0..2).map(|_| reader(&port, to.clone())).collect();
        let b = Endpoint {
            port: Port::open(1)?,
            ..b
        };
        let mut senders = Vec::new();
        for part in tids.chunks(40) {
            let port = Port::open(0)?;
            let agent = port.register2(&Registration::send_only())?;
            let packets: Vec<_> = part
                .iter()
                .map(|tid| packet(agent, &b, Method::SEND, *tid))
                .collect();
            senders.push(Task::start(move || {
                packets.iter().try_for_each(|packet| port.send(packet))?;
                // A MAD may still be on its way out: the file must outlive it.
                std::thread::sleep(Duration::from_millis(300));
                umad::Result::Ok(())
            }));
        }
        finish(senders)?;
        let all = collect(&from, tids.len())?;
        stop_all(readers)?;
        once_each(&all, &tids, 0)
    });
    area.check("MADs of one file come in the order of its writes", || {
        let peers = Peers::new()?;
        let tids = tids(300);
        for tid in &tids {
            let packet = packet(peers.a.agent, &peers.b, Method::SEND, *tid);
            peers.a.port.send(&packet)?;
        }
        for tid in &tids {
            let got = peers.b.recv()?.tid()?.low();
            ensure_eq!(got, *tid);
        }
        Ok(())
    });
    area.check(
        "round trips go on while files of the port open and close",
        || {
            let peers = Peers::new()?;
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let churn: Vec<_> = (0u8..4)
                    .map(|n| {
                        let done = &done;
                        scope.spawn(move || -> Outcome {
                            while !done.load(Ordering::Relaxed) {
                                let port = Port::open(u32::from(n % 2))?;
                                port.register2(&Peers::registration(0x40 + n))?;
                            }
                            Ok(())
                        })
                    })
                    .collect();
                let mut outcome = Ok(());
                for _ in 0..20 {
                    outcome = peers.round_trip(fresh_tid()).map(|_| ());
                    if outcome.is_err() {
                        break;
                    }
                }
                done.store(true, Ordering::Relaxed);
                for thread in churn {
                    match thread.join() {
                        Ok(ended) => ended?,
                        Err(_) => ensure!(false, "a thread panicked"),
                    }
                }
                outcome
            })
        },
    );
    area.check(
        "of many that register one class at once, one gets it",
        || {
            let barrier = std::sync::Barrier::new(8);
            for _ in 0..10 {
                let winners = std::thread::scope(|scope| -> Outcome<Vec<bool>> {
                    let threads: Vec<_> = (0..8)
                        .map(|_| {
                            scope.spawn(|| -> Outcome<(Port, bool)> {
                                let port = Port::open(0)?;
                                barrier.wait();
                                match port.register2(&Peers::registration(0x43)) {
                                    Ok(_) => Ok((port, true)),
                                    Err(e) if e.errno() == Some(Errno::EINVAL) => Ok((port, false)),
                                    Err(e) => Err(e.into()),
                                }
                            })
                        })
                        .collect();
                    let mut all = Vec::new();
                    for thread in threads {
                        match thread.join() {
                            // The files stay open until all have tried.
                            Ok(result) => all.push(result?),
                            Err(_) => ensure!(false, "a thread panicked"),
                        }
                    }
                    Ok(all.into_iter().map(|(_, won)| won).collect())
                })?;
                ensure_eq!(winners.iter().filter(|won| **won).count(), 1);
            }
            Ok(())
        },
    );
    area.check(
        "of many that register on one file at once, each gets its own id",
        || {
            let port = Port::open(0)?;
            let barrier = std::sync::Barrier::new(8);
            let mut ids = std::thread::scope(|scope| -> Outcome<Vec<u32>> {
                let threads: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| -> Outcome<Vec<u32>> {
                            barrier.wait();
                            let agents = (0..4).map(|_| port.register2(&Registration::send_only()));
                            Ok(agents.map(|a| a.map(|a| a.0)).collect::<Result<_, _>>()?)
                        })
                    })
                    .collect();
                let mut all = Vec::new();
                for thread in threads {
                    match thread.join() {
                        Ok(ids) => all.extend(ids?),
                        Err(_) => ensure!(false, "a thread panicked"),
                    }
                }
                Ok(all)
            })?;
            ids.sort_unstable();
            ensure_eq!(ids, (0..32).collect::<Vec<_>>());
            ensure_errno!(port.register2(&Registration::send_only()), ENOMEM);
            Ok(())
        },
    );
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("threads");
    one_file(&mut area);
    one_port(&mut area);
    area.run()
}
