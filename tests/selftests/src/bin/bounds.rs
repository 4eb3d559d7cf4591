// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `bounds`: how much memory one file can make the kernel keep, and who pays for it.
//!
//! The bounds are module parameters; the module is loaded with small ones here. The C module has no
//! such parameters (the kernel ignores unknown ones), and no bounds.

#![forbid(unsafe_code)]

use std::fs;

use ktap::memory::{Guarded, Prot, PAGE};
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use selftests::calls::write_at;
use selftests::fdinfo::FdInfo;
use selftests::parameters::with;
use selftests::task::MUST;
use selftests::vhca::{Frame, Module, Shape, Spec, SpecExt, VhcaExt};
use std::os::fd::AsFd;

const KIB: usize = 1024;

fn rmpp_peers() -> Outcome<Peers> {
    let registration = Peers::registration(CLASS).rmpp(1);
    Peers::with("rxe0", "rxe1", Layout::New, &registration)
}

/// A message of so many bytes, headers included, that nobody answers.
fn message(peers: &Peers, len: usize) -> Packet {
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).rmpp();
    let mut mad = mad.into_bytes();
    mad.resize(len, 0x5a);
    Packet::new(peers.a.agent, &peers.b.address(), mad)
}

/// A send that stays outstanding until the check ends.
fn outstanding(peers: &Peers) -> Packet {
    let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
    packet.timeout(Duration::from_secs(100))
}

/// A memory cgroup of its own.
struct Cgroup(String);

impl Cgroup {
    fn new(limit: usize) -> Outcome<Self> {
        let root = "/sys/fs/cgroup";
        fs::write(format!("{root}/cgroup.subtree_control"), "+memory").what("memory cgroups")?;
        let group = Self(format!("{root}/umad-bounds"));
        if !fs::exists(&group.0)? {
            fs::create_dir(&group.0)?;
        }
        fs::write(format!("{}/memory.max", group.0), limit.to_string())?;
        Ok(group)
    }

    fn enter(&self) -> Outcome {
        Ok(fs::write(format!("{}/cgroup.procs", self.0), "0")?)
    }

    fn used(&self) -> Outcome<usize> {
        let text = fs::read_to_string(format!("{}/memory.current", self.0))?;
        Ok(text.trim().parse()?)
    }

    fn kills(&self) -> Outcome<u32> {
        let text = fs::read_to_string(format!("{}/memory.events", self.0))?;
        let line = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
        Ok(line.unwrap_or("0").parse()?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = wait_until("the cgroup is empty", SOON, || {
            fs::remove_dir(&self.0).is_ok()
        });
    }
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("bounds");

    area.check(
        "a message over max_message is EMSGSIZE, one below is sent",
        || {
            with(c"max_message=65536", || {
                let peers = rmpp_peers()?;
                peers.a.port.send(&message(&peers, 64 * KIB))?;
                ensure_eq!(peers.b.recv()?.mad.len(), 64 * KIB);
                ensure_errno!(peers.a.port.send(&message(&peers, 64 * KIB + 1)), EMSGSIZE);
                ensure_errno!(peers.a.port.send(&message(&peers, 1024 * KIB)), EMSGSIZE);
                peers.a.port.send(&message(&peers, 64 * KIB))?;
                ensure_eq!(peers.b.recv()?.mad.len(), 64 * KIB);
                Ok(())
            })
        },
    )
    .improvement(7);
    area.check(
        "EMSGSIZE comes before any byte behind the headers is looked at",
        || {
            with(c"max_message=65536", || {
                let peers = rmpp_peers()?;
                let bytes = message(&peers, 256).to_bytes(Layout::New);
                let memory = Guarded::new(64)?;
                memory.put(0, &bytes)?;
                memory.protect(1, 63, Prot::None)?;
                let fd = peers.a.port.as_fd();
                ensure_errno!(write_at(fd, memory.start(), 64 * PAGE), EMSGSIZE);
                Ok(())
            })
        },
    )
    .improvement(7);
    area.check("what is too long without RMPP is EINVAL, as always", || {
        with(c"max_message=65536", || {
            let peers = Peers::new()?;
            for len in [257, 64 * KIB, 64 * KIB + 1, 1024 * KIB] {
                let mut packet = message(&peers, len);
                packet.mad[26] = 0;
                ensure_errno!(peers.a.port.send(&packet), EINVAL, "{len} bytes");
                ensure_errno!(
                    peers.a.port.send(&message(&peers, len)),
                    EINVAL,
                    "{len}, active"
                );
            }
            Ok(())
        })
    });
    area.check("the usual bound lets a message of 8 MiB through", || {
        let peers = rmpp_peers()?;
        peers.a.port.send(&message(&peers, 8 * KIB * KIB))?;
        Ok(())
    });
    area.check(
        "sends over max_outstanding are ENOBUFS until others are done",
        || {
            with(c"max_outstanding=1048576", || {
                let peers = Peers::new()?;
                let mut sent = 0;
                let refused = loop {
                    match peers.a.port.send(&outstanding(&peers)) {
                        Ok(()) if sent < 5000 => sent += 1,
                        Ok(()) => return Err("5,000 sends of a file may be outstanding".into()),
                        Err(e) => break e,
                    }
                };
                ensure_errno!(Err::<(), _>(refused), ENOBUFS, "after {sent} sends");
                // Each costs its bytes and 1 KiB.
                ensure_eq!(sent, 1024 * KIB / (256 + 1024));
                // Only this file's.
                peers
                    .b
                    .port
                    .send(&peers.b.packet(&peers.a, Method::SEND, fresh_tid()))?;
                let other =
                    Peers::with("rxe0", "rxe1", Layout::New, &Peers::registration(CLASS + 1))?;
                other.deliver(fresh_tid())?;
                // The answer to one makes room for one.
                let got = peers.b.recv()?;
                let mut answer = peers.b.response(&got)?;
                answer.mad[3] = Method::GET_RESP.0;
                ensure_errno!(peers.a.port.send(&outstanding(&peers)), ENOBUFS);
                peers.b.port.send(&answer)?;
                wait_until("a send may begin", SOON, || {
                    peers.a.port.send(&outstanding(&peers)).is_ok()
                })?;
                ensure_errno!(peers.a.port.send(&outstanding(&peers)), ENOBUFS);
                // Unregistering ends all.
                peers.a.port.unregister(peers.a.agent)?;
                let agent = peers.a.port.register2(&Registration::send_only())?;
                let mut packet = outstanding(&peers);
                packet.agent = agent;
                peers.a.port.send(&packet)?;
                Ok(())
            })
        },
    )
    .improvement(7);
    area.check("timed-out sends make room, too", || {
        with(c"max_outstanding=16384", || {
            let peers = Peers::new()?;
            for round in 0..20 {
                let mut sent = 0;
                loop {
                    let packet = outstanding(&peers).timeout(Duration::from_millis(30));
                    match peers.a.port.send(&packet) {
                        Ok(()) if sent < 1000 => sent += 1,
                        Ok(()) => return Err("1,000 sends may be outstanding".into()),
                        Err(e) => {
                            ensure_errno!(Err::<(), _>(e), ENOBUFS, "round {round}");
                            break;
                        }
                    }
                }
                for _ in 0..sent {
                    ensure_eq!(peers.a.recv()?.header.status, 110);
                }
            }
            let info = FdInfo::of(peers.a.port.as_fd())?;
            ensure_eq!(info.get("outstanding")?, "0 sends, 0 bytes");
            Ok(())
        })
    })
    .improvement(7);
    area.check(
        "reports of timeouts that nobody reads count against max_outstanding",
        || {
            with(c"max_outstanding=16384", || {
                let peers = Peers::new()?;
                let info = || FdInfo::of(peers.a.port.as_fd());
                let mut sent = 0;
                // Until one is refused though none is under way.
                loop {
                    let idle = info().is_ok_and(|i| i.number("outstanding").is_ok_and(|n| n == 0));
                    let packet = outstanding(&peers).timeout(Duration::from_millis(1));
                    match peers.a.port.send(&packet) {
                        Ok(()) if sent < 500 => sent += 1,
                        Ok(()) => return Err("500 sends, and none was read".into()),
                        Err(e) => {
                            ensure_errno!(Err::<(), _>(e), ENOBUFS, "after {sent} sends");
                            if idle {
                                break;
                            }
                        }
                    }
                }
                let (unread, send) = (info()?.bytes("unread")?, 256 + 1024);
                ensure!(unread <= 16384 && unread + send > 16384, "{unread} bytes");
                // Each is read, and makes room.
                for _ in 0..sent {
                    ensure_eq!(peers.a.recv()?.header.status, 110);
                }
                peers.a.port.send(&outstanding(&peers))?;
                Ok(())
            })
        },
    )
    .improvement(7);
    area.check(
        "of 200,100 MADs that nobody reads, 200,001 are kept",
        || {
            const KEPT: u32 = 200_001;
            let device = Spec::new(Shape::Ca, 1)
                .port(1, |port| port.lid = 1)
                .in_user_space()
                .plug()?;
            let agent = |class| device.agent(1, &Peers::registration(class));
            let (idle, busy) = (agent(CLASS)?, agent(CLASS + 1)?);
            let arrive = |class, n: u32| {
                let mad = VendorMad::new(class, OUI, Method::SEND, Tid::new(n));
                device.write_frame(&Frame::mad(1, 2, 1, mad.into_bytes()))
            };
            for n in 0..KEPT + 99 {
                arrive(CLASS, n)?;
                // The queue pair has room for some hundred; a MAD for another file comes behind them.
                if n % 128 == 0 || n > KEPT {
                    arrive(CLASS + 1, n)?;
                    busy.recv_tid(Tid::new(n))?;
                }
            }
            let mut buffer = [0; 64 + 256];
            for n in 0..KEPT {
                idle.port.read(&mut buffer).what(format!("packet {n}"))?;
                let tid = u32::from_be_bytes([buffer[76], buffer[77], buffer[78], buffer[79]]);
                ensure_eq!(tid, n, "the transaction id");
            }
            match idle.port.recv_timeout(ktap::peers::QUIET) {
                Err(umad::Error::TimedOut) => (),
                other => return Err(format!("one more: {other:?}").into()),
            }
            // There is room again.
            arrive(CLASS, KEPT)?;
            idle.recv_tid(Tid::new(KEPT))?;
            Ok(())
        },
    )
    .timeout(600);
    area.check("a reader that does not read: the queue ends at max_unread, drops are counted", || {
        with(c"max_unread=65536", || {
            let peers = Peers::new()?;
            for _ in 0..200 {
                peers
                    .a
                    .port
                    .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
            }
            let info = || FdInfo::of(peers.b.port.as_fd());
            info()?.get("dropped")?;
            // Each costs twice its 256 bytes and 256 more.
            let fit = 64 * KIB / 768;
            wait_until("all have come", SOON, || {
                info().is_ok_and(|i| {
                    matches!((i.number("received"), i.number("dropped")), (Ok(r), Ok(d)) if r + d == 200)
                })
            })?;
            ensure_eq!(info()?.number("unread")?, u64::try_from(fit)?);
            ensure_eq!(info()?.number("dropped")?, 200 - u64::try_from(fit)?);
            ensure!(info()?.bytes("unread")? <= 64 * 1024);
            // A timeout arrives all the same.
            let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
            peers.b.port.send(&packet.timeout(Duration::from_millis(20)))?;
            wait_until("the timeout is queued", SOON, || {
                info().is_ok_and(|i| i.number("unread").is_ok_and(|n| n == fit as u64 + 1))
            })?;
            // Who reads has room again.
            for _ in 0..fit {
                ensure_eq!(peers.b.recv()?.header.status, 0);
            }
            ensure_eq!(peers.b.recv()?.header.status, 110);
            peers.deliver(fresh_tid())?;
            Ok(())
        })
    })
    .improvement(7);
    area.check(
        "a message too long for the reader's queue is dropped whole",
        || {
            with(c"max_unread=65536", || {
                let peers = rmpp_peers()?;
                peers.a.port.send(&message(&peers, 100 * KIB))?;
                let info = || FdInfo::of(peers.b.port.as_fd());
                info()?.get("dropped")?;
                wait_until("it is dropped", SOON, || {
                    info().is_ok_and(|i| i.number("dropped").is_ok_and(|n| n == 1))
                })?;
                peers.a.port.send(&message(&peers, 10 * KIB))?;
                ensure_eq!(peers.b.recv()?.mad.len(), 10 * KIB);
                Ok(())
            })
        },
    )
    .improvement(7);
    area.check(
        "messages that are sent are charged to the sender's memory cgroup",
        || {
            let peers = rmpp_peers()?;
            let group = Cgroup::new(256 * KIB * KIB)?;
            // A destination where nobody acknowledges: the message stays.
            peers.b.port.unregister(peers.b.agent)?;
            let before = group.used()?;
            let packet = message(&peers, 4 * KIB * KIB).timeout(Duration::from_secs(100));
            let mut sender = fork(|| {
                group.enter()?;
                Ok(peers.a.port.send(&packet)?)
            })?;
            sender.wait(MUST)?;
            // What the sender had of its own is gone with it.
            let charged = group.used()?.saturating_sub(before);
            ensure!(charged >= 4 * KIB * KIB, "{charged} bytes are charged");
            Ok(())
        },
    )
    .improvement(7);
    area.check(
        "a sender over its cgroup's limit is the one who suffers",
        || {
            let peers = rmpp_peers()?;
            let group = Cgroup::new(24 * KIB * KIB)?;
            peers.b.port.unregister(peers.b.agent)?;
            let mut sender = fork(|| {
                let packet = message(&peers, 4 * KIB * KIB).timeout(Duration::from_secs(100));
                group.enter()?;
                for n in 0..16_u32 {
                    let mut packet = packet.clone();
                    packet.mad[12..16].copy_from_slice(&n.to_be_bytes());
                    if let Err(e) = peers.a.port.send(&packet) {
                        ensure_errno!(Err::<(), _>(e), ENOMEM, "message {n}");
                        return Ok(());
                    }
                }
                skip("all were sent")
            })?;
            let ended = sender.wait(MUST);
            let kills = group.kills()?;
            match ended {
                // ENOMEM.
                Ok(()) => (),
                Err(ktap::Failure::Skipped(why)) => return Err(why.into()),
                // Or killed for it.
                Err(ktap::Failure::Failed(why)) => {
                    ensure!(kills > 0, "not by the kernel: {why}");
                }
            }
            // Nobody else.
            Peers::with("rxe0", "rxe1", Layout::New, &Peers::registration(CLASS + 1))?
                .round_trip(fresh_tid())?;
            Ok(())
        },
    )
    .improvement(7)
    .timeout(200);
    Module::run(area)
}
