// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `abi6`: the module with `abi_version=6`, which the kernel's document on user MADs announced: headers of
//! 64 bytes from the beginning, no ENABLE_PKEY. The C module has no such parameter.

#![forbid(unsafe_code)]

use std::ffi::CStr;
use std::fs;
use std::os::fd::AsFd;
use std::process::Command;

use ktap::kmsg::Mark;
use ktap::module::{is_loaded, load_with, unload_when_idle, Loaded};
use ktap::peers::SOON;
use ktap::prelude::*;
use ktap::Impl;
use selftests::fdinfo::FdInfo;
use selftests::netlink::Rdma;
use selftests::parameters::with;
use selftests::vhca::{Module, Pair, VhcaExt};

/// Runs `body` on the module with a parameter that the C module does not have.
fn ours_with(parameter: &CStr, body: impl FnOnce() -> Outcome) -> Outcome {
    if Impl::current()? == Impl::C {
        return skip("the C module has no parameter abi_version");
    }
    with(parameter, body)
}

fn six(body: impl FnOnce() -> Outcome) -> Outcome {
    ours_with(c"abi_version=6", body)
}

/// What the kernel thinks: one byte less than a header is EINVAL, a header is EAGAIN (nothing there).
fn ensure_header(port: &Port, len: usize) -> Outcome {
    let mut buffer = [0; 64];
    ensure_errno!(port.read(&mut buffer[..len - 1]), EINVAL);
    ensure_errno!(port.read(&mut buffer[..len]), EAGAIN);
    Ok(())
}

/// The version that netlink tells of `rxe0`'s umad.
fn version_by_netlink() -> Outcome<u64> {
    let mut rdma = Rdma::open()?;
    let index = rdma.index("rxe0")?;
    Ok(rdma.chardev("umad", Some(index), Some(1))?.abi)
}

/// Peers that registered by REGISTER_AGENT, without asking for a layout.
fn peers_by_first_call() -> Outcome<Peers> {
    Peers::with_layout(Layout::Old)
}

fn version(area: &mut ktap::Area<'_>) {
    area.check("sysfs and netlink tell the version", || {
        six(|| {
            ensure_eq!(umad::sysfs::abi_version()?, 6);
            ensure_eq!(version_by_netlink()?, 6);
            Ok(())
        })
    });
    area.check("5 is what there is without the parameter", || {
        ours_with(c"abi_version=5", || {
            ensure_eq!(umad::sysfs::abi_version()?, 5);
            ensure_eq!(version_by_netlink()?, 5);
            let port = fresh()?;
            ensure_header(&port, 56)?;
            port.enable_pkey()?;
            ensure_header(&port, 64)
        })
    });
    for parameter in [
        c"abi_version=0",
        c"abi_version=4",
        c"abi_version=7",
        c"abi_version=56",
        c"abi_version=4294967295",
        c"abi_version=six",
    ] {
        area.check(
            format!(
                "{}: EINVAL, and nothing is left",
                parameter.to_string_lossy()
            ),
            move || {
                if Impl::current()? == Impl::C {
                    return skip("the C module has no parameter abi_version");
                }
                unload_when_idle(SOON)?;
                let _again = Loaded;
                ensure_errno!(load_with(parameter), EINVAL);
                ensure!(!is_loaded());
                ensure!(!fs::read_to_string("/proc/devices")?.contains("infiniband_mad"));
                Ok(())
            },
        );
    }
}

fn headers(area: &mut ktap::Area<'_>) {
    area.check(
        "a fresh file has headers of 64 bytes, and so has one with an agent of either call",
        || {
            six(|| {
                let port = fresh()?;
                ensure_header(&port, 64)?;
                ensure_eq!(FdInfo::of(port.as_fd())?.get("header")?, "64");
                port.register(&Registration::send_only())?;
                ensure_header(&port, 64)?;
                let port = fresh()?;
                port.register2(&Registration::send_only())?;
                ensure_header(&port, 64)
            })
        },
    );
    area.check("ENABLE_PKEY is ENOTTY, and does no harm", || {
        six(|| {
            let port = fresh()?;
            ensure_errno!(port.enable_pkey(), ENOTTY);
            ensure_header(&port, 64)?;
            port.register(&Registration::send_only())?;
            ensure_errno!(port.enable_pkey(), ENOTTY);
            ensure_header(&port, 64)
        })
    });
    area.check(
        "requests and answers of agents of REGISTER_AGENT, which leaves no warning",
        || {
            six(|| {
                let mut log = Mark::now()?;
                let peers = peers_by_first_call()?;
                for _ in 0..10 {
                    let (got, answer) = peers.round_trip(fresh_tid())?;
                    ensure_eq!(usize::try_from(got.header.length)?, 64 + got.mad.len());
                    ensure_eq!(
                        usize::try_from(answer.header.length)?,
                        64 + answer.mad.len()
                    );
                }
                ensure_eq!(log.with("P_Key index")?, Vec::<String>::new());
                Ok(())
            })
        },
    );
    area.check("the report of a timeout has 64 bytes and 24", || {
        six(|| {
            let peers = peers_by_first_call()?;
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers
                .a
                .port
                .send(&packet.timeout(Duration::from_millis(20)))?;
            peers.a.wait_readable()?;
            let mut buffer = [0; 512];
            ensure_eq!(peers.a.port.read(&mut buffer)?, 64 + 24);
            Ok(())
        })
    });
}

fn old_programs(area: &mut ktap::Area<'_>) {
    area.check(
        "a MAD behind a header of 56 bytes is EINVAL, not another MAD; the log says whose",
        || {
            six(|| {
                let peers = peers_by_first_call()?;
                let mut log = Mark::now()?;
                for method in [Method::GET, Method::SET, Method::SEND, Method::GET_RESP] {
                    let packet = peers.a.packet(&peers.b, method, fresh_tid());
                    ensure_errno!(peers.a.port.write(&packet.to_bytes(Layout::Old)), EINVAL);
                }
                peers.b.nothing_comes()?;
                let name = fs::read_to_string("/proc/self/comm")?;
                let said = log.with(&format!("process {}: its headers", name.trim()))?;
                ensure_eq!(said.len(), 4, "{said:?}");
                // The file is none the worse for it.
                peers.round_trip(fresh_tid()).map(drop)
            })
        },
    );
    area.check(
        "a buffer for 56 bytes and a MAD is EINVAL, and the packet stays",
        || {
            six(|| {
                let peers = peers_by_first_call()?;
                let tid = fresh_tid();
                peers
                    .a
                    .port
                    .send(&peers.a.packet(&peers.b, Method::SEND, tid))?;
                peers.b.wait_readable()?;
                ensure_errno!(peers.b.port.read(&mut [0; 56 + 256]), EINVAL);
                ensure_eq!(peers.b.recv()?.tid()?.low(), tid.low());
                Ok(())
            })
        },
    );
    area.check("none of the six reserved bytes may be set", || {
        six(|| {
            let peers = peers_by_first_call()?;
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            let bytes = packet.to_bytes(Layout::New);
            for at in 58..64 {
                let mut bytes = bytes.clone();
                bytes[at] = 1;
                ensure_errno!(peers.a.port.write(&bytes), EINVAL, "byte {at}");
            }
            peers.b.nothing_comes()?;
            peers.a.port.write(&bytes)?;
            peers.b.recv_tid(packet.tid()?).map(drop)
        })
    });
    area.check("in version 5 nobody looks at them", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        let mut bytes = packet.to_bytes(Layout::New);
        bytes[58..64].fill(0xff);
        peers.a.port.write(&bytes)?;
        peers.b.recv_tid(packet.tid()?).map(drop)
    });
}

fn programs(area: &mut ktap::Area<'_>) {
    area.check("libibumad: all of the area of that name", || {
        six(|| {
            let program = std::env::current_exe()?.with_file_name("libibumad");
            let output = Command::new(program).output()?;
            let said = String::from_utf8_lossy(&output.stdout);
            let bad: Vec<&str> = said.lines().filter(|l| l.starts_with("not ok")).collect();
            let good = said.lines().filter(|l| l.starts_with("ok ")).count();
            ensure!(
                output.status.success() && bad.is_empty() && good > 10,
                "{good} ok, {bad:?}"
            );
            Ok(())
        })
    })
    .timeout(300);
    area.check("ibstat, smpquery and ibping find their way", || {
        six(|| {
            let pair = Pair::new()?;
            pair.a.umad(1)?;
            pair.b.umad(1)?;
            let (a, b) = (&pair.a.ibdev, &pair.b.ibdev);
            let stat = run(&format!("ibstat {a}"))?;
            ensure!(stat.contains("Base lid: 1"), "{stat}");
            let info = run(&format!("smpquery -C {a} -P 1 -D nodeinfo 0,1"))?;
            ensure!(
                info.contains("NodeType:") && info.contains("Channel Adapter"),
                "{info}"
            );
            let info = run(&format!("smpquery -C {a} -P 1 portinfo 2 1"))?;
            ensure!(info.contains("LinkState:"), "{info}");
            // A server, which is asked before it asks.
            let mut server = Command::new("ibping")
                .args(["-C", b, "-P", "1", "-S"])
                .spawn()?;
            let ping = wait_until("ibping is answered", SOON, || {
                run(&format!("ibping -C {a} -P 1 -c 3 2"))
                    .is_ok_and(|said| said.contains("3 received, 0% packet loss"))
            });
            server.kill()?;
            server.wait()?;
            ping
        })
    });
    area.check("OpenSM brings up a subnet", || {
        six(|| {
            let pair = Pair::new()?;
            pair.a.umad(1)?;
            let gid = umad::sysfs::gid(&pair.a.ibdev, 1, 0)?;
            let guid = gid.0.last_chunk().copied().map(u64::from_be_bytes);
            let guid = guid.ok_or("a GID has 16 bytes")?;
            // It ends when it is done.
            let log = "/tmp/abi6-opensm.log";
            let said = run(&format!(
                "env OSM_CACHE_DIR=/tmp OSM_TMP_DIR=/tmp opensm -o -g {guid:#018x} -f {log}"
            ))?;
            let log = fs::read_to_string(log).what(log)?;
            ensure!(log.contains("SUBNET UP"), "{said}\n{log}");
            Ok(())
        })
    })
    .timeout(120);
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("abi6");
    version(&mut area);
    headers(&mut area);
    old_programs(&mut area);
    programs(&mut area);
    Module::run(area)
}
