// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `unregister`: UNREGISTER_AGENT, and what is left of an agent.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use ktap::memory::Guarded;
use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use selftests::task::{Task, MUST};
use umad::abi;

fn only() -> Registration {
    Registration::send_only()
}

// UNREGISTER_AGENT with any pointer.
fn unregister_at(port: &Port, argument: *const u8) -> Result<(), Errno> {
    // SAFETY: the call only reads, and the kernel checks the pointer.
    unsafe { abi::ioctl::unregister_agent(port.as_raw_fd(), argument.cast::<u32>()) }.map(drop)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("unregister");

    for id in [0, 1, 31] {
        area.check(format!("id {id}, never registered, is EINVAL"), move || {
            ensure_errno!(fresh()?.unregister(AgentId(id)), EINVAL);
            Ok(())
        });
    }
    for id in [32, 33, 64, 255, 0x1_0000, 0x8000_0000, u32::MAX] {
        area.check(format!("id {id:#x}, out of range, is EINVAL"), move || {
            let port = fresh()?;
            port.register(&only())?;
            ensure_errno!(port.unregister(AgentId(id)), EINVAL);
            port.unregister(AgentId(0))?;
            Ok(())
        });
    }
    area.check("an agent can be unregistered once", || {
        let port = fresh()?;
        let agent = port.register(&only())?;
        port.unregister(agent)?;
        ensure_errno!(port.unregister(agent), EINVAL);
        Ok(())
    });
    area.check("agents can be unregistered in any order", || {
        let port = fresh()?;
        for _ in 0..32 {
            port.register(&only())?;
        }
        for n in 0..32 {
            // 5 and 32 have no common factor: every id once.
            port.unregister(AgentId(n * 5 % 32))?;
        }
        for n in 0..32 {
            ensure_errno!(port.unregister(AgentId(n)), EINVAL, "agent {n}");
        }
        Ok(())
    });
    area.check("an id means an agent of its own file only", || {
        let (one, two) = (fresh()?, fresh()?);
        one.register(&only())?;
        ensure_errno!(two.unregister(AgentId(0)), EINVAL);
        one.unregister(AgentId(0))?;
        Ok(())
    });
    area.check(
        "bad pointers are EFAULT, 1,000 times, and harm no agent",
        || {
            let port = fresh()?;
            port.register(&only())?;
            let memory = Guarded::new(1)?;
            for _ in 0..1000 {
                for pointer in [
                    std::ptr::null(),
                    std::ptr::without_provenance(usize::MAX - 0xfff),
                    memory.before_end(0).cast_const(),
                    memory.before_end(3).cast_const(),
                ] {
                    ensure_errno!(unregister_at(&port, pointer), EFAULT, "{pointer:?}");
                }
            }
            port.unregister(AgentId(0))?;
            Ok(())
        },
    )
    .timeout(300);
    area.check("the argument may end at the end of memory", || {
        let port = fresh()?;
        port.register(&only())?;
        port.register(&only())?;
        let memory = Guarded::new(1)?;
        unregister_at(&port, memory.put_at_end(&1u32.to_ne_bytes())?)?;
        ensure_errno!(port.unregister(AgentId(1)), EINVAL);
        Ok(())
    });
    for (name, read, write) in [("read-only", true, false), ("write-only", false, true)] {
        area.check(format!("unregistering works on a {name} file"), move || {
            let number = ktap::wait_for_umad("rxe0")?;
            let file = std::fs::File::options()
                .read(read)
                .write(write)
                .open(umad::port::node(number))?;
            let port = Port::from_fd(file.into());
            let agent = port.register(&only())?;
            port.unregister(agent)?;
            Ok(())
        });
    }
    area.check("a write for an unregistered agent is EIO", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.unregister(peers.a.agent)?;
        ensure_errno!(peers.a.port.send(&packet), EIO);
        peers.b.nothing_comes()
    });
    area.check("other agents of the file go on", || {
        let peers = Peers::new()?;
        let second = peers.b.port.register2(&Peers::registration(CLASS + 1))?;
        peers.b.port.unregister(peers.b.agent)?;
        let tid = fresh_tid();
        let mad = VendorMad::new(CLASS + 1, OUI, Method::SEND, tid).into_bytes();
        let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
        peers.a.port.send(&packet)?;
        ensure_eq!(peers.b.recv_tid(tid)?.agent, second);
        Ok(())
    });
    area.check("nothing comes for an unregistered agent", || {
        let peers = Peers::new()?;
        peers.deliver(fresh_tid())?;
        peers.b.port.unregister(peers.b.agent)?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        peers.b.nothing_comes()
    });
    area.check("a response to an unregistered agent is dropped", || {
        let peers = Peers::new()?;
        let request = peers
            .a
            .packet(&peers.b, Method::GET, fresh_tid())
            .timeout(ktap::peers::SOON);
        peers.a.port.send(&request)?;
        let got = peers.b.recv()?;
        peers.a.port.unregister(peers.a.agent)?;
        // The id is the same again, the transaction id's upper half is not.
        ensure_eq!(
            peers.a.port.register2(&Peers::registration(CLASS))?,
            peers.a.agent
        );
        peers.b.port.send(&peers.b.response(&got)?)?;
        peers.a.nothing_comes()
    });
    area.check(
        "outstanding sends of the agent end without a packet",
        || {
            let peers = Peers::new()?;
            for _ in 0..20 {
                let packet = peers
                    .a
                    .packet(&peers.b, Method::SEND, fresh_tid())
                    .timeout(Duration::from_millis(100));
                peers.a.port.send(&packet)?;
            }
            peers.a.port.unregister(peers.a.agent)?;
            // A packet that was queued before the call may be there; afterwards none comes.
            while peers.a.port.recv_timeout(Duration::ZERO).is_ok() {}
            peers.a.nothing_comes()
        },
    );
    area.check(
        "the transaction ids of the agent are free for the next one",
        || {
            let peers = Peers::new()?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_secs(60));
            for _ in 0..5 {
                peers.a.port.send(&packet)?;
                ensure_errno!(
                    peers.a.port.send(&packet),
                    EINVAL,
                    "the same while outstanding"
                );
                peers.a.port.unregister(peers.a.agent)?;
                ensure_eq!(
                    peers.a.port.register2(&Peers::registration(CLASS))?,
                    peers.a.agent
                );
            }
            Ok(())
        },
    );
    area.check("packets that had come for the agent stay readable", || {
        let peers = Peers::new()?;
        let mut tids = Vec::new();
        for _ in 0..5 {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            tids.push(packet.tid()?.low());
            peers.a.port.send(&packet)?;
        }
        // The last one has come when another file of the port sees what was sent after it.
        drain(&peers)?;
        peers.b.port.unregister(peers.b.agent)?;
        for tid in tids {
            let got = peers.b.port.recv_timeout(Duration::ZERO)?;
            ensure_eq!((got.agent, got.tid()?.low()), (peers.b.agent, tid));
        }
        peers.b.nothing_comes()
    });
    area.check(
        "a timeout that had come for the agent stays readable",
        || {
            let peers = Peers::new()?;
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_millis(30));
            peers.a.port.send(&packet)?;
            peers.a.wait_readable()?;
            peers.a.port.unregister(peers.a.agent)?;
            let got = peers.a.port.recv_timeout(Duration::ZERO)?;
            ensure_eq!(got.header.status, 110);
            ensure_eq!(got.tid()?.low(), packet.tid()?.low());
            Ok(())
        },
    );
    area.check(
        "an id that is given out again yields nothing of its predecessor",
        || {
            let peers = Peers::new()?;
            peers
                .a
                .port
                .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
            drain(&peers)?;
            peers.b.port.unregister(peers.b.agent)?;
            let again = peers.b.port.register2(&Peers::registration(CLASS))?;
            ensure_eq!(again, peers.b.agent);
            peers.b.nothing_comes().what("the old agent's MAD")?;
            // The new agent gets its own.
            peers.deliver(fresh_tid())?;
            Ok(())
        },
    )
    .improvement(6);
    area.check(
        "packets of other agents survive when an id is given out again",
        || {
            let peers = Peers::new()?;
            let second = peers.b.port.register2(&Peers::registration(CLASS + 1))?;
            let tid = fresh_tid();
            let mad = VendorMad::new(CLASS + 1, OUI, Method::SEND, tid).into_bytes();
            peers
                .a
                .port
                .send(&Packet::new(peers.a.agent, &peers.b.address(), mad))?;
            peers.b.wait_readable()?;
            peers.b.port.unregister(peers.b.agent)?;
            peers.b.port.register2(&Peers::registration(CLASS))?;
            let got = peers.b.port.recv_timeout(Duration::ZERO)?;
            ensure_eq!((got.agent, got.tid()?.low()), (second, tid.low()));
            Ok(())
        },
    );
    area.check(
        "of eight threads that unregister one agent, one succeeds",
        || {
            let port = fresh()?;
            for _ in 0..100 {
                let agent = port.register(&only())?;
                let done = std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..8)
                        .map(|_| scope.spawn(|| port.unregister(agent).is_ok()))
                        .collect();
                    threads
                        .into_iter()
                        .map(|thread| thread.join().unwrap_or(false))
                        .filter(|ok| *ok)
                        .count()
                });
                ensure_eq!(done, 1);
            }
            Ok(())
        },
    );
    area.check("an id is not free before the agent's methods are", || {
        let pair = RxePair::new("un")?;
        let port = Arc::new(Port::open(pair.a.umad()?)?);
        let agent = port.register2(&Peers::registration(CLASS))?;
        // A writer that waits for an address for a while: so long the agent is there.
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
        let nobody = Address::roce("fe80::dead:beef".parse()?, 0);
        let packet = Packet::new(agent, &nobody, mad);
        let file = Arc::clone(&port);
        let mut write = Task::start_asleep(libc::SYS_write, move || file.send(&packet));
        let file = Arc::clone(&port);
        let mut unregister = Task::start_asleep(libc::SYS_ioctl, move || file.unregister(agent));
        ensure!(
            !write.within(Duration::ZERO),
            "the writer does not wait: {:?}",
            write.result(MUST)
        );
        ensure_eq!(
            port.register2(&Peers::registration(CLASS))
                .what("the methods of the agent that is being unregistered")?,
            agent
        );
        ensure!(matches!(unregister.result(MUST), Some(Ok(()))));
        ensure!(write.within(MUST));
        Ok(())
    });
    area.check("500 agents come and go under traffic", || {
        let peers = Peers::new()?;
        for _ in 0..500 {
            let packet = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_secs(60));
            peers.a.port.send(&packet)?;
            peers.b.port.unregister(peers.b.agent)?;
            peers.a.port.unregister(peers.a.agent)?;
            let again = Peers::registration(CLASS);
            ensure_eq!(peers.a.port.register2(&again)?, peers.a.agent);
            ensure_eq!(peers.b.port.register2(&again)?, peers.b.agent);
        }
        // What is queued is of former agents; now the last ones work.
        while peers.b.port.recv_timeout(Duration::ZERO).is_ok() {}
        peers.round_trip(fresh_tid())?;
        Ok(())
    })
    .timeout(300);

    area.run()
}

// Waits until all that `a` has sent so far has been received by the agents of `b`'s port: MADs of
// one sender arrive in order, and one more comes to another file.
fn drain(peers: &Peers) -> Outcome {
    let witness = Endpoint::open(
        &peers.b.ibdev,
        Layout::New,
        &Peers::registration(CLASS + 15),
    )?;
    let packet = peers.a.packet(&witness, Method::SEND, fresh_tid());
    peers.a.port.send(&packet)?;
    witness.recv_tid(packet.tid()?)?;
    Ok(())
}
