// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! OpenSM as a daemon, a link that comes and goes, a master that dies, a device that is pulled out, frames
//! that get lost, and a flood.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ktap::{ensure, ensure_eq, wait_until, Outcome};
use programs::command::{run, LIMIT};
use programs::fabric::{folder, Cabled, Local};
use programs::opensm::{OpenSm, Options, SWEEP};
use programs::report::Scene;
use programs::text::count;
use programs::there;
use umad::{Address, Method, Packet, Port, Registration, Tid, VendorMad};

/// What the checks share.
#[derive(Default)]
pub struct World {
    fabric: Option<Cabled>,
    sm: Option<OpenSm>,
    standby: Option<OpenSm>,
}

impl World {
    fn fabric(&mut self) -> Outcome<&mut Cabled> {
        there(self.fabric.as_mut(), "fabric")
    }

    fn sm(&mut self) -> Outcome<&mut OpenSm> {
        there(self.sm.as_mut(), "subnet manager")
    }

    fn local(name: &str) -> Local {
        Local {
            ibdev: name.to_owned(),
        }
    }

    fn options(name: &str, more: &str) -> Outcome<Options> {
        Ok(Options {
            guid: Self::local(name).guid()?,
            more: more.to_owned(),
        })
    }
}

// Users of the module: open files.
fn users() -> Outcome<u32> {
    Ok(std::fs::read_to_string("/sys/module/ib_umad/refcnt")?
        .trim()
        .parse()?)
}

// Nodes that the subnet manager knows.
fn nodes(from: &str) -> Outcome<usize> {
    let out = run(&format!("saquery -C {from} -t 2000 NR"))?.ok()?.stdout;
    Ok(count(&out, "NodeRecord dump"))
}

fn ensure_active(name: &str) -> Outcome {
    wait_until(&format!("{name} is active"), SWEEP, || {
        World::local(name)
            .state()
            .is_ok_and(|state| state == "4: ACTIVE")
    })
}

/// The scene.
pub fn scene() -> Scene<World> {
    let mut scene = Scene::new("sm");
    daemon(&mut scene);
    standby(&mut scene);
    replug(&mut scene);
    hardship(&mut scene);
    scene
}

fn daemon(scene: &mut Scene<World>) {
    scene.check("opensm", "as a daemon: SUBNET UP", |world, seen| {
        world.fabric = Some(Cabled::six()?);
        let mut sm = OpenSm::daemon(&folder("daemon")?, &World::options("h1", "-p 5")?)?;
        sm.wait_up(SWEEP)?;
        ensure!(sm.errors().is_empty(), "it complains: {:?}", sm.errors());
        world.sm = Some(sm);
        ensure!(World::local("h1").is_sm()?, "IsSM is not set");
        seen.figure("nodes", nodes("h2")?);
        Ok(())
    });
    scene.check("opensm", "heavy sweeps by SIGHUP", |world, _| {
        for _ in 0..3 {
            world.sm()?.sweep(SWEEP)?;
        }
        let errors = world.sm()?.errors();
        ensure!(errors.is_empty(), "it complains: {errors:?}");
        Ok(())
    });
    scene.check(
        "opensm",
        "a link goes down: the node is gone; up: it is back",
        |world, seen| {
            let lid = World::local("h4").lid()?;
            seen.figure("LID", lid);
            world.fabric()?.set_link("h4", false)?;
            world.sm()?.sweep(SWEEP)?;
            ensure_eq!(nodes("h2")?, 5);
            world.fabric()?.set_link("h4", true)?;
            world.sm()?.sweep(SWEEP)?;
            ensure_active("h4")?;
            ensure_eq!(World::local("h4").lid()?, lid);
            ensure_eq!(nodes("h2")?, 6);
            Ok(())
        },
    );
}

fn standby(scene: &mut Scene<World>) {
    scene.check("opensm", "a second one stands by", |world, seen| {
        let mut standby = OpenSm::start(&folder("standby")?, &World::options("h3", "-p 1")?)?;
        standby.wait_for("Entering STANDBY state", SWEEP)?;
        world.standby = Some(standby);
        ensure!(World::local("h1").is_sm()?);
        ensure!(World::local("h3").is_sm()?);
        let out = run("sminfo -C h3 -t 2000 3")?;
        seen.figure("status", &out.status);
        Ok(())
    });
    scene.check(
        "opensm",
        "the master dies by kill -9: the standby takes over",
        |world, seen| {
            let Some(master) = world.sm.take() else {
                return Err("there is no master".into());
            };
            master.kill(LIMIT)?;
            wait_until("IsSM of the dead master is cleared", LIMIT, || {
                World::local("h1").is_sm().is_ok_and(|is| !is)
            })?;
            let Some(mut standby) = world.standby.take() else {
                return Err("there is no standby".into());
            };
            standby.wait_for("Entering MASTER state", SWEEP)?;
            standby.wait_up(SWEEP)?;
            let lid = World::local("h3").lid()?;
            let out = run("sminfo -C h2 -t 2000")?.ok()?.stdout;
            ensure!(out.contains(&format!("sm lid {lid} ")), "{out}");
            ensure!(out.contains("SMINFO_MASTER"), "{out}");
            seen.figure("LID", lid);
            world.standby = Some(standby);
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "one of higher priority comes back, and is given the subnet",
        |world, _| {
            let mut sm = OpenSm::start(&folder("back")?, &World::options("h1", "-p 5")?)?;
            sm.wait_for("Entering MASTER state", SWEEP)?;
            sm.wait_up(SWEEP)?;
            world.sm = Some(sm);
            let Some(mut standby) = world.standby.take() else {
                return Err("there is no standby".into());
            };
            standby.wait_for("Entering STANDBY state", SWEEP)?;
            ensure_eq!(standby.stop(LIMIT)?, "0");
            ensure!(!World::local("h3").is_sm()?, "IsSM is still set");
            Ok(())
        },
    );
}

fn replug(scene: &mut Scene<World>) {
    scene.check(
        "opensm",
        "its device is pulled out, five times: a new one brings the fabric up",
        |world, seen| {
            for _ in 0..5 {
                let before = Instant::now();
                world.fabric()?.unplug("h1")?;
                seen.note(format!(
                    "the device was gone after {} ms",
                    before.elapsed().as_millis()
                ));
                // It never ends by itself, so it is told to.
                ensure!(world.sm()?.is_running(), "it ended by itself");
                let sm = there(world.sm.take(), "subnet manager")?;
                sm.kill(LIMIT)?;
                ensure_eq!(users()?, 0, "open files");
                world.fabric()?.plug("h1")?;
                let mut sm = OpenSm::start(&folder("anew")?, &World::options("h1", "")?)?;
                sm.wait_up(SWEEP)?;
                world.sm = Some(sm);
                ensure_active("h1")?;
                ensure_eq!(nodes("h2")?, 6);
            }
            Ok(())
        },
    );
}

fn hardship(scene: &mut Scene<World>) {
    scene.check(
        "opensm",
        "one in twenty of the frames of each device is lost: sweeps end, the tables are whole",
        |world, seen| {
            world.fabric()?.drop_every(20)?;
            for _ in 0..5 {
                world.sm()?.sweep(SWEEP)?;
            }
            for _ in 0..10 {
                let mut tries = 0;
                let found = loop {
                    tries += 1;
                    // A request or an answer can be lost: saquery does not ask again.
                    match nodes("h2") {
                        Err(why) if tries == 8 => return Err(why),
                        Err(_) => (),
                        Ok(found) => break found,
                    }
                };
                ensure_eq!(found, 6);
            }
            let lost = world.fabric()?.dropped()?;
            world.fabric()?.drop_every(0)?;
            seen.note(format!("{lost} frames were lost"));
            ensure!(lost > 5, "{lost} frames were lost");
            world.sm()?.sweep(SWEEP)?;
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "a flood of GMPs at its port does not starve its sweeps",
        |world, seen| {
            let start = Instant::now();
            for _ in 0..5 {
                world.sm()?.sweep(SWEEP)?;
            }
            let quiet = start.elapsed();
            let (stop, sent) = (
                Arc::new(AtomicBool::new(false)),
                Arc::new(AtomicU64::new(0)),
            );
            let lid = u16::try_from(World::local("h1").lid()?)?;
            let senders: Vec<_> = ["h2", "h3"]
                .into_iter()
                .map(|name| {
                    let (stop, sent) = (stop.clone(), sent.clone());
                    std::thread::spawn(move || flood(name, lid, &stop, &sent))
                })
                .collect();
            let start = Instant::now();
            let mut swept = Ok(());
            for _ in 0..5 {
                swept = swept.and_then(|()| world.sm()?.sweep(SWEEP));
            }
            let flooded = start.elapsed();
            stop.store(true, Ordering::Relaxed);
            for sender in senders {
                match sender.join() {
                    Ok(result) => result?,
                    Err(_) => return Err("a sender panicked".into()),
                }
            }
            swept?;
            seen.note(format!(
                "five sweeps: {} ms, and {} ms among {} GMPs",
                quiet.as_millis(),
                flooded.as_millis(),
                sent.load(Ordering::Relaxed)
            ));
            ensure!(sent.load(Ordering::Relaxed) > 1000, "that was no flood");
            // An SMP that waited for GMPs would time out, which takes a second.
            ensure!(
                flooded < quiet * 20 + Duration::from_secs(5),
                "the sweeps took {flooded:?}"
            );
            Ok(())
        },
    );
    scene.check("opensm", "ends: nothing is left of it", |world, seen| {
        let sm = there(world.sm.take(), "subnet manager")?;
        seen.figure("status", sm.stop(LIMIT)?);
        ensure_eq!(users()?, 0, "open files");
        ensure!(!World::local("h1").is_sm()?, "IsSM is still set");
        world.fabric = None;
        ensure!(!std::path::Path::new("/dev/infiniband/umad0").exists());
        Ok(())
    });
}

// Sends MADs that nobody answers to queue pair 1 of a port, as fast as it goes.
fn flood(from: &str, lid: u16, stop: &AtomicBool, sent: &AtomicU64) -> Outcome {
    let port = Port::open(World::local(from).umad()?)?;
    let agent = port.register2(&Registration::send_only())?;
    let to = Address {
        lid,
        ..Address::default()
    };
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let mad = VendorMad::new(0x30, 0x00_1405, Method::SEND, Tid(number)).into_bytes();
        port.send(&Packet::new(agent, &to, mad))?;
        sent.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
