// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `signals`: what a signal does to a call that sleeps, and to one that does not.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use ktap::peers::{QUIET, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use selftests::task::{handle_signal, Task, MUST};

const PACKET: usize = 64 + 256;

/// A thread that sleeps in read().
fn reader(port: &Arc<Port>) -> Task<umad::Result<usize>> {
    let port = Arc::clone(port);
    Task::start_asleep(libc::SYS_read, move || {
        let mut buffer = [0; PACKET];
        port.read(&mut buffer)
    })
}

/// Sends a signal to a sleeping task again and again while `body` works.
fn bombarded<T: Send + 'static>(task: &Task<T>, body: impl FnOnce() -> Outcome) -> Outcome {
    let done = AtomicBool::new(false);
    let signal = task.signaller();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                signal();
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let outcome = body();
        done.store(true, Ordering::Relaxed);
        outcome
    })
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("signals");

    area.check("a signal interrupts a sleeping read(): EINTR", || {
        handle_signal(false);
        let port = Arc::new(Port::open(0)?);
        let mut read = reader(&port);
        read.signal();
        match read.result(MUST) {
            Some(result) => ensure_errno!(result.clone(), EINTR),
            None => ensure!(false, "it sleeps on"),
        }
        Ok(())
    });
    area.check(
        "with SA_RESTART the read() goes on, and gets its packet",
        || {
            handle_signal(true);
            let Peers { a, b } = Peers::new()?;
            let request = a.packet(&b, Method::SEND, fresh_tid());
            let port = Arc::new(b.port);
            let mut read = reader(&port);
            for _ in 0..20 {
                read.signal();
                ensure!(!read.within(Duration::from_millis(10)), "it ended");
            }
            a.port.send(&request)?;
            ensure!(matches!(read.result(MUST), Some(Ok(PACKET))));
            Ok(())
        },
    );
    area.check("an interrupted read() takes no packet", || {
        handle_signal(false);
        let Peers { a, b } = Peers::new()?;
        let tid = fresh_tid();
        let request = a.packet(&b, Method::SEND, tid);
        let port = Arc::new(b.port);
        let mut read = reader(&port);
        read.signal();
        ensure!(matches!(read.result(MUST), Some(Err(_))));
        a.port.send(&request)?;
        let got = port.recv_timeout(SOON)?;
        ensure_eq!(got.tid()?.low(), tid.low());
        Ok(())
    });
    area.check(
        "of several readers only the one that has the signal ends",
        || {
            handle_signal(false);
            let port = Arc::new(Port::open(0)?);
            let mut readers: Vec<_> = (0..3).map(|_| reader(&port)).collect();
            readers[1].signal();
            ensure!(matches!(readers[1].result(MUST), Some(Err(_))));
            // The others sleep on; nothing tells that, so there is a bound.
            ensure!(!readers[0].within(QUIET) && !readers[2].within(QUIET));
            Ok(())
        },
    );
    area.check(
        "an interrupted reader does not lose the others' wake-up",
        || {
            handle_signal(false);
            let Peers { a, b } = Peers::new()?;
            let packet = |n: u32| {
                let mut packet = a.packet(&b, Method::SEND, fresh_tid());
                packet.mad[100..104].copy_from_slice(&n.to_be_bytes());
                packet
            };
            let packets: Vec<_> = (0..50).map(packet).collect();
            let port = Arc::new(b.port);
            for packet in packets {
                let mut first = reader(&port);
                let mut second = reader(&port);
                // The signal and the packet race; whoever is left must get the packet.
                first.signal();
                a.port.send(&packet)?;
                let interrupted = matches!(first.result(MUST), Some(Err(_)));
                if interrupted {
                    ensure!(matches!(second.result(MUST), Some(Ok(PACKET))));
                } else {
                    ensure!(matches!(first.result(MUST), Some(Ok(PACKET))));
                    ensure!(second.stop().is_some(), "the second reader cannot be ended");
                }
            }
            Ok(())
        },
    );
    area.check("signals do not keep read() from packets that wait", || {
        handle_signal(false);
        let Peers { a, b } = Peers::new()?;
        for _ in 0..200 {
            a.port.send(&a.packet(&b, Method::SEND, fresh_tid()))?;
        }
        // Packets of a port stay in order: when a later one has come, all others are there.
        let registration = Peers::registration(0x31);
        Peers::with("rxe0", "rxe1", Layout::New, &registration)?.deliver(fresh_tid())?;
        let (start, started) = std::sync::mpsc::channel();
        let mut read = Task::start(move || {
            let _ = started.recv();
            let mut buffer = [0; PACKET];
            (0..200).try_for_each(|_| b.port.read(&mut buffer).map(|_| ()))
        });
        let signal = read.signaller();
        let done = AtomicBool::new(false);
        let got = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    signal();
                }
            });
            let _ = start.send(());
            let got = read.result(MUST).cloned();
            done.store(true, Ordering::Relaxed);
            got
        });
        ensure_eq!(got, Some(Ok(())));
        Ok(())
    });
    area.check("a masked signal does not wake read()", || {
        handle_signal(false);
        let port = Arc::new(Port::open(0)?);
        let reading = Arc::clone(&port);
        let mut read = Task::start_asleep(libc::SYS_read, move || {
            let mut mask = SigSet::empty();
            mask.add(Signal::SIGUSR1);
            mask.thread_swap_mask(SigmaskHow::SIG_BLOCK).and_then(|_| {
                let mut buffer = [0; PACKET];
                nix::unistd::read(&*reading, &mut buffer)
            })
        });
        read.signal();
        // It sleeps on; nothing tells that, so there is a bound.
        ensure!(!read.within(QUIET), "it ended: {:?}", read.result(QUIET));
        Ok(())
    });
    area.check(
        "a signal interrupts poll(): EINTR, also with SA_RESTART",
        || {
            for restart in [false, true] {
                handle_signal(restart);
                let port = Arc::new(Port::open(0)?);
                let polling = Arc::clone(&port);
                let mut poll = Task::start_asleep(libc::SYS_poll, move || {
                    polling.poll(PollFlags::POLLIN, MUST * 2)
                });
                poll.signal();
                match poll.result(MUST) {
                    Some(result) => ensure_errno!(result.clone(), EINTR),
                    None => ensure!(false, "it sleeps on"),
                }
            }
            Ok(())
        },
    );
    area.check(
        "SIGKILL ends a process in read(), and its class is free",
        || {
            let registration = Peers::registration(0x31);
            let (has_class, says_so) = nix::unistd::pipe()?;
            let mut child = fork(|| {
                let port = Port::open(0)?;
                port.register2(&registration)?;
                nix::unistd::write(&says_so, b".")?;
                port.recv()?;
                Ok(())
            })?;
            drop(says_so);
            ensure_eq!(nix::unistd::read(&has_class, &mut [0])?, 1);
            let port = Port::open(0)?;
            ensure_errno!(port.register2(&registration), EINVAL);
            child.kill(MUST)?;
            port.register2(&registration)?;
            Ok(())
        },
    );
    area.check("SIGSTOP and SIGCONT do not disturb a read()", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        let mut child = fork(|| {
            let mut buffer = [0; PACKET];
            ensure_eq!(peers.b.port.read(&mut buffer)?, PACKET);
            Ok(())
        })?;
        for _ in 0..3 {
            child.signal(Signal::SIGSTOP)?;
            let status = waitpid(child.pid(), Some(WaitPidFlag::WUNTRACED))?;
            ensure!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
            child.signal(Signal::SIGCONT)?;
        }
        peers.a.port.send(&packet)?;
        child.wait(MUST)
    });
    area.check(
        "signals do not break write(): each MAD goes once and whole",
        || {
            handle_signal(true);
            let Peers { a, b } = Peers::new()?;
            let packets: Vec<_> = (0..200)
                .map(|_| a.packet(&b, Method::SEND, fresh_tid()))
                .collect();
            let tids: Vec<_> = packets.iter().map(|p| p.tid().map(Tid::low)).collect();
            let (next, turn) = std::sync::mpsc::channel();
            let write = Task::start(move || {
                for packet in packets {
                    if turn.recv().is_err() {
                        break;
                    }
                    a.port.send(&packet)?;
                }
                umad::Result::Ok(a)
            });
            bombarded(&write, || {
                for tid in tids {
                    next.send(())?;
                    let got = b.port.recv_timeout(SOON)?;
                    ensure_eq!(got.tid()?.low(), tid?);
                }
                Ok(())
            })
        },
    );
    area.check("signals do not break register and unregister", || {
        handle_signal(true);
        let work = Task::start(|| {
            let port = Port::open(0)?;
            for _ in 0..100 {
                let agent = port.register2(&Peers::registration(0x31))?;
                port.unregister(agent)?;
            }
            umad::Result::Ok(())
        });
        bombarded(&work, || {
            // Its end is looked at below.
            std::thread::sleep(QUIET);
            Ok(())
        })?;
        match work.stop() {
            Some(result) => result?,
            None => ensure!(false, "it hangs"),
        }
        Ok(())
    });

    area.run()
}
