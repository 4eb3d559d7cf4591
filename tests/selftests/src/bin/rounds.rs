// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `rounds`: whatever is done a thousand times leaves no more memory in use than before. The
//! slab caches are counted before and after; if each round kept one object, it would be seen.

#![forbid(unsafe_code)]

use std::thread::sleep;

use ktap::module::{load, unload_when_idle, Loaded};
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::wait_for_umad;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use selftests::slab::Slab;
use selftests::vhca::{Module, Shape, Spec, SpecExt, VhcaExt};
use umad::mad::data_offset;

const LONG: u64 = 600;

/// Runs `round` some times to get caches and tables to their usual size, counts, runs it `rounds`
/// times, and counts again.
fn keeps_nothing(rounds: u32, mut round: impl FnMut() -> Outcome) -> Outcome {
    for n in 0..rounds.div_ceil(10) {
        round().what(format!("warming up, round {n}"))?;
    }
    settle();
    let before = Slab::count()?;
    for n in 0..rounds {
        round().what(format!("round {n}"))?;
    }
    let mut grown = Vec::new();
    // What is freed later is not kept: a grace period, or the ten seconds that RMPP remembers a message.
    for _ in 0..15 {
        settle();
        grown = Slab::count()?.grown_since(&before, u64::from(rounds) * 9 / 10);
        if grown.is_empty() {
            return Ok(());
        }
    }
    Err(format!("after {rounds} rounds: {}", grown.join("; ")).into())
}

fn settle() {
    sleep(Duration::from_secs(1));
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("rounds");

    area.check("1000 rounds: open, register, unregister, close", || {
        let umad = wait_for_umad("rxe0")?;
        keeps_nothing(1000, || {
            let port = Port::open(umad)?;
            let first = port.register2(&Peers::registration(CLASS))?;
            let _second = port.register2(&Registration::send_only())?;
            ensure_errno!(port.register2(&Peers::registration(CLASS)), EINVAL);
            port.unregister(first)?;
            Ok(())
        })
    })
    .timeout(LONG);
    area.check("1000 rounds: a MAD sent and read, and one not read", || {
        let peers = Peers::new()?;
        keeps_nothing(1000, || {
            peers.deliver(fresh_tid())?;
            let unread = Endpoint::open("rxe1", Layout::New, &Peers::registration(0x38))?;
            peers
                .a
                .port
                .send(&peers.a.packet(&unread, Method::SEND, fresh_tid()))?;
            unread.wait_readable()
        })
    })
    .timeout(LONG);
    area.check(
        "1000 rounds: a request answered, one timed out, one given up",
        || {
            let peers = Peers::new()?;
            keeps_nothing(1000, || {
                peers.round_trip(fresh_tid())?;
                let tid = fresh_tid();
                let silent = peers.a.packet(&peers.b, Method::SEND, tid);
                peers
                    .a
                    .port
                    .send(&silent.timeout(Duration::from_millis(1)))?;
                ensure!(peers.a.recv_tid(tid)?.header.status != 0);
                let given_up = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
                let request = given_up.packet(&peers.b, Method::SEND, fresh_tid());
                given_up
                    .port
                    .send(&request.timeout(Duration::from_secs(60)))?;
                peers.b.recv()?;
                peers.b.recv().map(drop)
            })
        },
    )
    .timeout(LONG);
    area.check(
        "1000 rounds: refused writes, reads and registrations",
        || {
            let peers = Peers::new()?;
            let request = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .timeout(Duration::from_secs(3600));
            peers.a.port.send(&request)?;
            peers.b.recv()?;
            keeps_nothing(1000, || {
                ensure_errno!(peers.a.port.send(&request), EINVAL, "a duplicate");
                let mut nobody = request.clone();
                nobody.agent = AgentId(30);
                ensure_errno!(peers.a.port.send(&nobody), EIO, "no such agent");
                ensure_errno!(peers.a.port.write(&[0; 64]), EINVAL, "too short");
                let port = fresh_on("rxe1")?;
                ensure_errno!(port.read(&mut [0; 55]), EINVAL, "too short");
                ensure_errno!(port.read(&mut [0; 320]), EAGAIN, "nothing there");
                let bad = Registration::class(0x81, 9).methods(&[Method::GET]).qpn(1);
                ensure!(port.register2(&bad.rmpp(7)).is_err());
                Ok(())
            })
        },
    )
    .timeout(LONG);
    area.check("200 rounds: a message of several segments", || {
        let registration = Peers::registration(CLASS).rmpp(1);
        let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
        keeps_nothing(200, || {
            let tid = fresh_tid();
            let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, tid)
                .rmpp()
                .into_bytes();
            mad.resize(data_offset(CLASS) + 2000, 0x5a);
            peers
                .a
                .port
                .send(&Packet::new(peers.a.agent, &peers.b.address(), mad))?;
            peers.b.recv_tid(tid).map(drop)
        })
    })
    .timeout(LONG);
    area.check("1000 rounds: issm opened and closed", || {
        let device = Spec::new(Shape::Ca, 1).plug()?;
        let path = device.issm(1)?;
        keeps_nothing(1000, || {
            nix::fcntl::open(&path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
            Ok(())
        })?;
        Ok(device.unplug()?)
    })
    .timeout(LONG);
    area.check("200 rounds: a device plugged and pulled out in use", || {
        keeps_nothing(200, || {
            let device = Spec::new(Shape::Ca, 2).plug()?;
            let agent = device.agent(1, &Registration::send_only())?;
            let _issm = nix::fcntl::open(
                &device.issm(2)?,
                OFlag::O_RDWR | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?;
            device.unplug()?;
            ensure_errno!(agent.port.read(&mut [0; 320]), EIO);
            Ok(())
        })
    })
    .timeout(LONG);
    area.check("100 rounds: the module loaded and unloaded", || {
        let _loaded = Loaded;
        keeps_nothing(100, || {
            unload_when_idle(SOON)?;
            load()?;
            wait_for_umad("rxe1").map(drop)
        })
    })
    .timeout(LONG);

    Module::run(area)
}
