// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! udev with rdma-core's rules, and a rule of an administrator.

use std::os::unix::fs::PermissionsExt;

use ktap::peers::SOON;
use ktap::{ensure, ensure_eq, wait_until, Outcome};
use programs::command::{run, Running};
use programs::fabric::{folder, Cabled};
use programs::report::{Scene, Seen};
use programs::text::without;

const RULE: &str = "/etc/udev/rules.d/99-umad-mode.rules";

/// What the checks share.
#[derive(Default)]
pub struct World {
    udev: Option<Running>,
    fabric: Option<Cabled>,
}

impl Drop for World {
    fn drop(&mut self) {
        // Without udev the devices have names and modes as the kernel gives them.
        let _ = std::fs::remove_file(RULE);
    }
}

// Properties of a device that udev knows, without what differs from boot to boot.
fn properties(seen: &mut Seen, path: &str) -> Outcome<String> {
    run("udevadm settle -t 30")?.ok()?;
    let out = run(&format!("udevadm info -q property -p {path}"))?
        .ok()?
        .stdout;
    seen.text(&without(&out, |line| {
        ["USEC_INITIALIZED", "SEQNUM", "DEVPATH", "MINOR"]
            .iter()
            .any(|name| line.starts_with(name))
    }));
    Ok(out)
}

fn mode(path: &str) -> Outcome<u32> {
    Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
}

/// The scene.
pub fn scene() -> Scene<World> {
    let mut scene = Scene::new("udev");
    scene.check(
        "udev",
        "rdma-core's alias of each umad device",
        |world: &mut World, seen| {
            std::fs::create_dir_all("/etc/udev/rules.d")?;
            std::fs::write(
                RULE,
                "KERNEL==\"umad*\", MODE=\"0640\"\nKERNEL==\"issm*\", MODE=\"0604\"\n",
            )?;
            let mut udev = Running::start(
                "/usr/lib/systemd/systemd-udevd",
                &folder("udev")?.join("log"),
            )?;
            wait_until("udev listens", SOON, || {
                std::path::Path::new("/run/udev/control").exists()
            })?;
            ensure!(udev.is_running());
            world.udev = Some(udev);
            world.fabric = Some(Cabled::pair()?);
            for number in 0..2 {
                let out = properties(seen, &format!("/sys/class/infiniband_mad/umad{number}"))?;
                let alias = format!("/sys/subsystem/rdma/devices/h{}:1/umad", number + 1);
                ensure!(
                    out.contains(&format!("SYSTEMD_ALIAS={alias}\n")),
                    "no alias {alias}: {out}"
                );
            }
            Ok(())
        },
    );
    scene.check(
        "udev",
        "node modes of a rule, again after the device was replugged",
        |world, seen| {
            let Some(fabric) = &mut world.fabric else {
                return Err("there is no fabric".into());
            };
            for round in 0..3 {
                let number = fabric.a.umad()?;
                run("udevadm settle -t 30")?.ok()?;
                ensure_eq!(
                    mode(&format!("/dev/infiniband/umad{number}"))?,
                    0o640,
                    "round {round}"
                );
                ensure_eq!(
                    mode(&format!("/dev/infiniband/issm{number}"))?,
                    0o604,
                    "round {round}"
                );
                let out = properties(seen, &format!("/sys/class/infiniband_mad/umad{number}"))?;
                ensure!(out.contains("devices/h1:1/umad\n"), "{out}");
                fabric.unplug("h1")?;
                run("udevadm settle -t 30")?.ok()?;
                ensure!(!std::path::Path::new(&format!("/dev/infiniband/umad{number}")).exists());
                // The adapter of the pair that is left has the other end of cable 1.
                fabric.plug("h1")?;
            }
            Ok(())
        },
    );
    scene
}
