// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Fabrics of ibsim, with hundreds of nodes: sweeps, large tables, lost frames, links that go, a simulator
//! that dies, and a device that is pulled out.

use std::time::{Duration, Instant};

use ktap::{ensure, ensure_eq, wait_until, Outcome};
use programs::command::{run, run_for, run_until, Running, LIMIT};
use programs::fabric::folder;
use programs::opensm::{OpenSm, Options};
use programs::report::{Scene, Seen};
use programs::simulated::Simulated;
use programs::text::count;
use programs::there;

/// How long a sweep may take.
const SWEEP: Duration = Duration::from_secs(240);
/// How long a large table may take.
const TABLE: Duration = Duration::from_secs(240);

/// What the checks share.
#[derive(Default)]
pub struct World {
    // First to go.
    sm: Option<OpenSm>,
    fabric: Option<Simulated>,
    records: usize,
}

impl World {
    fn fabric(&mut self) -> Outcome<&mut Simulated> {
        there(self.fabric.as_mut(), "fabric")
    }

    fn sm(&mut self) -> Outcome<&mut OpenSm> {
        there(self.sm.as_mut(), "subnet manager")
    }

    // The subnet manager has a record of each node.
    fn all_nodes(&mut self, seen: &mut Seen) -> Outcome {
        let found = records("NR", "NodeRecord dump")?;
        seen.figure("nodes", found);
        ensure_eq!(found, self.fabric()?.nodes);
        Ok(())
    }

    fn start_sm(&mut self, wire: u32) -> Outcome {
        let options = Options {
            guid: Simulated::local(0).guid()?,
            // OpenSM remembers a thousand requests: it must not have more of them under way.
            more: format!("-n {wire}"),
        };
        let mut sm = OpenSm::start(&folder("sm")?, &options)?;
        sm.wait_up(SWEEP)?;
        self.sm = Some(sm);
        Ok(())
    }
}

// Records of a table, as saquery prints them, asked for at one of the devices. At the subnet manager's, 0, no
// frame of it leaves the machine.
fn records_at(device: usize, table: &str, head: &str) -> Outcome<usize> {
    // The time is for the whole answer, which may be tens of thousands of MADs.
    let timeout = if table == "PR" { 120_000 } else { 10_000 };
    let command = format!("saquery -C vhca{device} -t {timeout} {table}");
    let out = run_for(&command, TABLE)?.ok()?.stdout;
    Ok(count(&out, head))
}

fn records(table: &str, head: &str) -> Outcome<usize> {
    records_at(0, table, head)
}

// A fabric, and a subnet manager that brings it up, the size and costs of that as figures.
fn begin(scene: &mut Scene<World>, nodes: usize, wire: u32) {
    scene.check(
        "fabric",
        "a fat tree, and two of its nodes as devices",
        move |world, seen| {
            let fabric = Simulated::fat_tree(nodes, 2)?;
            seen.figure("nodes", fabric.nodes);
            seen.figure("links", fabric.links);
            ensure!(fabric.nodes >= nodes);
            world.fabric = Some(fabric);
            Ok(())
        },
    );
    scene.check("opensm", "SUBNET UP", move |world, seen| {
        let start = Instant::now();
        world.start_sm(wire)?;
        let took = start.elapsed();
        let smps = world.sm()?.status("QP0 MADs sent")?;
        seen.about("SMPs of the first sweep", smps, 2);
        seen.note(format!("{smps} SMPs, {:.1} s", took.as_secs_f64()));
        let errors = world.sm()?.errors();
        ensure!(errors.is_empty(), "it complains: {errors:?}");
        Ok(())
    });
    scene.check("saquery", "each node has its record", |world, seen| {
        let found = records("NR", "NodeRecord dump")?;
        seen.figure("records", found);
        ensure_eq!(found, world.fabric()?.nodes);
        Ok(())
    });
    scene.check(
        "ibnetdiscover",
        "each switch, each CA, each cable",
        |world, seen| {
            let out = run_for("ibnetdiscover -C vhca0 -t 2000", SWEEP)?
                .ok()?
                .stdout;
            figures(seen, &out);
            let fabric = world.fabric()?;
            ensure_eq!(count(&out, "Switch"), fabric.switches, "switches");
            ensure_eq!(count(&out, "Ca"), fabric.cas, "CAs");
            ensure_eq!(count(&out, "["), 2 * fabric.links, "ends of cables");
            Ok(())
        },
    );
}

fn figures(seen: &mut Seen, out: &str) {
    seen.figure("switches", count(out, "Switch"));
    seen.figure("CAs", count(out, "Ca"));
    seen.figure("ends of cables", count(out, "["));
}

/// 280 nodes.
pub fn medium() -> Scene<World> {
    let mut scene = Scene::new("medium");
    begin(&mut scene, 280, 32);
    scene.check("iblinkinfo", "each cable from both sides", |world, _| {
        let out = run_for("iblinkinfo -C vhca0 -t 2000", SWEEP)?.ok()?.stdout;
        let up = out
            .lines()
            .filter(|line| line.contains("Active/  LinkUp)==>"))
            .count();
        ensure_eq!(up, 2 * world.fabric()?.links, "ends of links that are up");
        Ok(())
    });
    scene.check(
        "saquery",
        "tables of thousands of records",
        |world, seen| {
            for (table, head) in [
                ("PIR", "PortInfoRecord dump"),
                ("LR", "LinkRecord dump"),
                ("PR", "PathRecord dump"),
            ] {
                let start = Instant::now();
                let found = records_at(1, table, head)?;
                seen.figure(table, found);
                seen.note(format!(
                    "{found} records of {table} in {:.1} s",
                    start.elapsed().as_secs_f64()
                ));
                ensure!(found > 500, "{found} records of {table}");
                if table == "LR" {
                    ensure_eq!(found, 2 * world.fabric()?.links);
                }
                if table == "PIR" {
                    world.records = found;
                }
            }
            Ok(())
        },
    );
    scene.check(
        "ibping",
        "a thousand pings between two nodes, none lost",
        |_, seen| {
            let lid = Simulated::local(1).lid()?;
            let server = Running::start("ibping -S -C vhca1", &folder("ibping")?.join("log"))?;
            run_until(
                &format!("ibping -C vhca0 -t 3000 -c 1 {lid}"),
                " 1 received",
            )?;
            let ended = run(&format!("ibping -C vhca0 -t 3000 -f -c 1000 {lid}"))?.ok()?;
            drop(server);
            ended.says("1000 packets transmitted, 1000 received")?;
            seen.figure("received", 1000);
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "a cable is pulled (ibsim's console): the node is gone; and put back",
        |world, seen| {
            let (nodes, place) = (world.fabric()?.nodes, world.fabric()?.place(1).to_owned());
            world.fabric()?.console(&format!("Unlink \"{place}\"[1]"))?;
            wait_until("the link is down", LIMIT, || {
                Simulated::local(1)
                    .state()
                    .is_ok_and(|state| state.starts_with("1:"))
            })?;
            world.sm()?.sweep(SWEEP)?;
            let without = records("NR", "NodeRecord dump")?;
            world.fabric()?.console(&format!("ReLink \"{place}\"[1]"))?;
            Simulated::wait_link(1)?;
            world.sm()?.sweep(SWEEP)?;
            let with = records("NR", "NodeRecord dump")?;
            seen.figure("without", without);
            seen.figure("with", with);
            ensure_eq!(without, nodes - 1);
            ensure_eq!(with, nodes);
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "ibsim dies and is started anew: the fabric comes up again",
        |world, seen| {
            world.fabric()?.kill_sim()?;
            wait_until("the port is down", LIMIT, || {
                Simulated::local(0)
                    .state()
                    .is_ok_and(|state| state.starts_with("1:"))
            })?;
            world.fabric()?.start_sim()?;
            Simulated::wait_link(0)?;
            Simulated::wait_link(1)?;
            world.sm()?.sweep(SWEEP)?;
            world.all_nodes(seen)
        },
    );
    scene.check(
        "opensm",
        "its device is pulled out: a new one brings the fabric up",
        |world, seen| {
            world.fabric()?.unplug(0)?;
            let sm = there(world.sm.take(), "subnet manager")?;
            sm.kill(LIMIT)?;
            world.fabric()?.plug(0)?;
            Simulated::wait_link(0)?;
            world.start_sm(32)?;
            world.all_nodes(seen)
        },
    );
    scene.check(
        "opensm",
        "one frame in a hundred is lost: SUBNET UP",
        |world, seen| {
            if let Some(sm) = world.sm.take() {
                ensure_eq!(sm.stop(LIMIT)?, "0");
            }
            world.fabric()?.lose(0.01)?;
            Simulated::wait_link(0)?;
            world.start_sm(32)?;
            world.sm()?.sweep(SWEEP)?;
            let smps = world.sm()?.status("QP0 MADs sent")?;
            let lost = world.fabric()?.lost(0)?;
            seen.note(format!("{smps} SMPs in two sweeps; {lost} MADs were lost"));
            ensure!(lost > 50, "{lost} MADs were lost");
            Ok(())
        },
    );
    scene.check(
        "saquery",
        "one frame in a hundred is lost: the tables are whole",
        |world, seen| {
            let before = world.fabric()?.lost(0)? + world.fabric()?.lost(1)?;
            let (links, ports) = (2 * world.fabric()?.links, world.records);
            let mut tries = 0;
            for (table, head, want) in [
                ("LR", "LinkRecord dump", links),
                ("PIR", "PortInfoRecord dump", ports),
                ("LR", "LinkRecord dump", links),
            ] {
                let found = loop {
                    tries += 1;
                    // The request itself can be lost: saquery does not ask again.
                    match records_at(1, table, head) {
                        Err(why) if tries == 12 => return Err(why),
                        Err(_) => (),
                        Ok(found) => break found,
                    }
                };
                seen.figure(table, found);
                ensure_eq!(found, want, "records of {table}");
            }
            let lost = world.fabric()?.lost(0)? + world.fabric()?.lost(1)? - before;
            seen.note(format!(
                "{tries} requests for three tables; {lost} MADs were lost"
            ));
            ensure!(lost > 5, "{lost} MADs were lost");
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "brings up the fabric that ibnetdiscover has written down",
        |world, seen| {
            let discovered = folder("discovered")?.join("fabric");
            let out = run_for("ibnetdiscover -C vhca0 -t 4000", SWEEP)?.ok()?;
            std::fs::write(&discovered, &out.stdout)?;
            let sm = there(world.sm.take(), "subnet manager")?;
            ensure_eq!(sm.stop(LIMIT)?, "0");
            let (nodes, links) = (world.fabric()?.nodes, world.fabric()?.links);
            // Its module goes before it comes again.
            world.fabric = None;
            let file = discovered.display().to_string();
            let fabric = world.fabric.insert(Simulated::discovered(&file, 1)?);
            ensure_eq!((fabric.nodes, fabric.links), (nodes, links));
            world.start_sm(32)?;
            world.all_nodes(seen)
        },
    );
    scene.check("opensm", "ends: nothing is left of it", |world, seen| {
        let sm = there(world.sm.take(), "subnet manager")?;
        seen.figure("status", sm.stop(LIMIT)?);
        world.fabric = None;
        let users = std::fs::read_to_string("/sys/module/ib_umad/refcnt")?;
        ensure_eq!(users.trim(), "0", "open files");
        Ok(())
    });
    scene
}

/// More than a thousand nodes.
pub fn large() -> Scene<World> {
    let mut scene = Scene::new("large");
    begin(&mut scene, 1050, 100);
    scene.check(
        "opensm",
        "a heavy sweep; ends when told to",
        |world, seen| {
            let before = world.sm()?.status("QP0 MADs sent")?;
            world.sm()?.sweep(SWEEP)?;
            let smps = world.sm()?.status("QP0 MADs sent")? - before;
            seen.about("SMPs of the second sweep", smps, 2);
            seen.note(format!("{smps} SMPs"));
            let sm = there(world.sm.take(), "subnet manager")?;
            seen.figure("status", sm.stop(LIMIT)?);
            Ok(())
        },
    );
    scene
}
