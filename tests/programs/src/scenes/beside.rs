// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The kernel's own users of MADs on the same ports: ib_ipoib, and rdma_cm.

use std::time::Duration;

use ktap::peers::SOON;
use ktap::{ensure, ensure_eq, wait_until, Outcome};
use programs::command::{run, run_for, LIMIT};
use programs::fabric::{folder, Cabled};
use programs::opensm::{OpenSm, Options, SWEEP};
use programs::report::Scene;
use programs::text::count;
use programs::there;

/// What the checks share.
#[derive(Default)]
pub struct World {
    fabric: Option<Cabled>,
    sm: Option<OpenSm>,
}

fn is_loaded(module: &str) -> bool {
    std::path::Path::new("/sys/module").join(module).exists()
}

fn ping(count: u32) -> Outcome<String> {
    let command = format!("busybox ping -c {count} -i 0.05 -W 5 10.77.0.2");
    Ok(run_for(&command, LIMIT)?.ok()?.stdout)
}

/// The scene.
pub fn scene() -> Scene<World> {
    let mut scene = Scene::new("beside");
    scene.check(
        "ib_ipoib",
        "loaded beside us, with rdma_cm; OpenSM: SUBNET UP",
        |world: &mut World, seen| {
            // No switch: ib_cm of this kernel writes outside of its memory when a device has port 0.
            for module in ["rdma_cm", "ib_ipoib"] {
                run(&format!("modprobe {module}"))?.ok()?;
            }
            let fabric = Cabled::pair()?;
            let options = Options {
                guid: fabric.a.guid()?,
                ..Options::default()
            };
            let mut sm = OpenSm::start(&folder("beside")?, &options)?;
            sm.wait_up(SWEEP)?;
            for module in ["ib_umad", "ib_cm", "rdma_cm", "ib_ipoib"] {
                seen.figure(module, is_loaded(module));
                ensure!(is_loaded(module), "{module} is not loaded");
            }
            (world.fabric, world.sm) = (Some(fabric), Some(sm));
            Ok(())
        },
    );
    scene.check(
        "ib_ipoib",
        "joins its groups, and two hosts reach each other",
        |_, seen| {
            // The second host is a network namespace.
            run("ip netns add peer")?.ok()?;
            run("ip link set ib1 netns peer")?.ok()?;
            run("ip address add 10.77.0.1/24 dev ib0")?.ok()?;
            run("ip link set ib0 up")?.ok()?;
            run("ip -n peer address add 10.77.0.2/24 dev ib1")?.ok()?;
            run("ip -n peer link set ib1 up")?.ok()?;
            wait_until("ib0 has a carrier", SOON, || {
                std::fs::read_to_string("/sys/class/net/ib0/carrier")
                    .is_ok_and(|text| text.trim() == "1")
            })?;
            // The first ones wait for path records.
            ping(3)?;
            let out = ping(50)?;
            ensure!(out.contains("50 packets received"), "{out}");
            seen.figure("received", 50);
            Ok(())
        },
    );
    scene.check("saquery", "shows the groups of ib_ipoib", |_, seen| {
        let out = run("saquery -C h1 -t 2000 -g")?.ok()?.stdout;
        let groups = count(&out, "MCMemberRecord group dump");
        ensure!(groups >= 2, "{groups} groups: {out}");
        ensure!(
            out.contains("ff12:401b:ffff::ffff:ffff"),
            "no broadcast group: {out}"
        );
        seen.figure("broadcast group", true);
        Ok(())
    });
    scene.check("opensm", "sweeps, while datagrams flow", |world, _| {
        let sm = there(world.sm.as_mut(), "subnet manager")?;
        let pinger = std::thread::spawn(|| ping(200));
        for _ in 0..5 {
            sm.sweep(SWEEP)?;
            let out = run("ibnetdiscover -C h1 -t 2000")?.ok()?.stdout;
            ensure_eq!(count(&out, "Ca"), 2, "CAs");
            std::thread::sleep(Duration::from_millis(100));
        }
        match pinger.join() {
            Ok(out) => {
                let out = out?;
                ensure!(out.contains("200 packets received"), "{out}");
            }
            Err(_) => return Err("the pinger panicked".into()),
        }
        Ok(())
    });
    scene.check("rdma_cm", "and ib_ipoib unload again", |world, seen| {
        if let Some(sm) = world.sm.take() {
            seen.figure("status", sm.stop(LIMIT)?);
        }
        world.fabric = None;
        run("ip netns delete peer")?.ok()?;
        for module in ["ib_ipoib", "rdma_cm", "iw_cm", "ib_cm"] {
            run(&format!("rmmod {module}"))?.ok()?;
        }
        Ok(())
    });
    scene
}
