// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `module`: loading and unloading ib_umad, with devices present and files open.

#![forbid(unsafe_code)]

use std::fs;

use ktap::module::{is_loaded, load, unload, unload_when_idle, Loaded};
use ktap::peers::{CLASS, SOON};
use ktap::prelude::*;
use ktap::wait_for_umad;
use selftests::netlink::Uevents;
use selftests::task::MUST;

fn nodes_are_there() -> Outcome {
    ensure_eq!(wait_for_umad("rxe0")?, 0);
    ensure_eq!(wait_for_umad("rxe1")?, 1);
    Ok(())
}

fn unload_now() -> Outcome {
    unload_when_idle(SOON)
}

fn load_again() -> Outcome {
    load().what("loading")?;
    nodes_are_there()
}

/// Nothing of the module is left.
fn all_gone() -> Outcome {
    ensure!(!is_loaded());
    ensure!(!fs::exists(umad::sysfs::CLASS)?, "the class is there");
    for number in [0, 1] {
        ensure!(!umad::port::node(number).exists(), "umad{number} is there");
    }
    let devices = fs::read_to_string("/proc/devices")?;
    ensure!(!devices.contains("infiniband_mad"), "majors are claimed");
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("module");

    area.check(
        "unloading while a file is open: EWOULDBLOCK, and nothing happens",
        || {
            let peers = Peers::new()?;
            for _ in 0..3 {
                ensure_errno!(unload(), EWOULDBLOCK);
            }
            peers.round_trip(fresh_tid()).map(drop)
        },
    );
    area.check(
        "a file without agents counts, and so does one of another process",
        || {
            let port = Port::options().layout(Layout::Old).open(1)?;
            let mut child = fork(|| {
                std::thread::sleep(MUST);
                Ok(())
            })?;
            drop(port);
            ensure_errno!(unload(), EWOULDBLOCK);
            child.kill(MUST)
        },
    );
    area.check("a file of a device that is gone counts, too", || {
        let pair = RxePair::plain("mo")?;
        pair.a.plug()?;
        let port = Port::open(pair.a.umad()?)?;
        pair.a.unplug()?;
        ensure_errno!(unload(), EWOULDBLOCK);
        drop(port);
        Ok(())
    });
    area.check("a file opened by path only does not count", || {
        let _loaded = Loaded;
        let _path = nix::fcntl::open(
            "/dev/infiniband/umad0",
            nix::fcntl::OFlag::O_PATH,
            nix::sys::stat::Mode::empty(),
        )?;
        unload_now()?;
        all_gone()?;
        load_again()
    });
    area.check("loading twice: EEXIST", || {
        ensure_errno!(load(), EEXIST);
        Peers::new()?.round_trip(fresh_tid()).map(drop)
    });
    area.check(
        "unloading with devices present takes nodes, class and majors away",
        || {
            let _loaded = Loaded;
            unload_now()?;
            all_gone()?;
            load_again()?;
            Peers::new()?.round_trip(fresh_tid()).map(drop)
        },
    );
    area.check("unloading and loading send remove and add events", || {
        let _loaded = Loaded;
        let events = Uevents::open()?;
        let of = |action: &'static str, number: u32| {
            move |event: &selftests::netlink::Uevent| {
                event.get("ACTION").is_some_and(|a| a == action)
                    && event
                        .get("DEVNAME")
                        .is_some_and(|n| *n == format!("infiniband/umad{number}"))
            }
        };
        unload_now()?;
        // In which order the two ports go is not promised.
        let first = events.wait(MUST, |e| of("remove", 0)(e) || of("remove", 1)(e))?;
        let other = u32::from(of("remove", 0)(&first));
        events.wait(MUST, of("remove", other))?;
        load_again()?;
        let first = events.wait(MUST, |e| of("add", 0)(e) || of("add", 1)(e))?;
        let other = u32::from(of("add", 0)(&first));
        events.wait(MUST, of("add", other))?;
        Ok(())
    });
    area.check(
        "files that closed with sends outstanding do not hold it",
        || {
            let _loaded = Loaded;
            let peers = Peers::new()?;
            for _ in 0..100 {
                let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
                peers
                    .a
                    .port
                    .send(&request.timeout(Duration::from_secs(60)))?;
            }
            drop(peers);
            // Long before the requests would time out.
            unload_now()?;
            load_again()
        },
    );
    area.check(
        "devices that come while it is away are found when it is loaded",
        || {
            let _loaded = Loaded;
            unload_now()?;
            let pair = RxePair::new("mo")?;
            load_again()?;
            let (a, b) = (wait_for_umad(&pair.a.ibdev)?, wait_for_umad(&pair.b.ibdev)?);
            ensure_eq!((a.min(b), a.max(b)), (2, 3));
            Peers::on(&pair.a.ibdev, &pair.b.ibdev)?
                .round_trip(fresh_tid())
                .map(drop)
        },
    );
    area.check("reloaded 50 times", || {
        let _loaded = Loaded;
        for cycle in 0..50 {
            unload_now().what(format!("cycle {cycle}"))?;
            load_again().what(format!("cycle {cycle}"))?;
            let port = Port::open(0).what(format!("cycle {cycle}"))?;
            port.register2(&Peers::registration(CLASS))?;
        }
        Peers::new()?.round_trip(fresh_tid()).map(drop)
    })
    .timeout(200);
    area.check(
        "loaded and unloaded while others open, use and close",
        || {
            let _loaded = Loaded;
            let user = |number: u32| -> Outcome {
                loop {
                    match Port::open(number) {
                        Ok(port) => {
                            port.register2(&Peers::registration(0x45))?;
                        }
                        // No node, or one without a driver.
                        Err(e) if matches!(e.errno(), Some(Errno::ENOENT | Errno::ENXIO)) => {}
                        Err(e) => return Err(e.into()),
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            let mut users = [fork(|| user(0))?, fork(|| user(1))?];
            for cycle in 0..20 {
                // Between two uses there is a moment without; it may take a while to hit it.
                wait_until("unloaded between two uses", MUST, || {
                    (0..100).any(|_| unload().is_ok())
                })
                .what(format!("cycle {cycle}"))?;
                load().what(format!("cycle {cycle}"))?;
            }
            for user in &mut users {
                if !user.is_running() {
                    user.wait(MUST).what("a user")?;
                }
                user.kill(MUST)?;
            }
            nodes_are_there()?;
            Peers::new()?.round_trip(fresh_tid()).map(drop)
        },
    )
    .timeout(200);

    area.run()
}
