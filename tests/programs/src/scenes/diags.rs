// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A small fabric that a subnet manager has brought up: the programs that look at it.

use ktap::{ensure, ensure_eq, Outcome};
use programs::command::{run, run_until, Ended, Running, LIMIT};
use programs::fabric::{folder, Cabled};
use programs::opensm::{OpenSm, Options, SWEEP};
use programs::report::{Scene, Seen};
use programs::text::{count, figures_hidden, numbers_hidden, value, without};
use programs::there;

/// What the checks share.
#[derive(Default)]
pub struct World {
    fabric: Option<Cabled>,
    sm: Option<OpenSm>,
}

impl World {
    fn fabric(&self) -> Outcome<&Cabled> {
        there(self.fabric.as_ref(), "fabric")
    }

    // LIDs of the two ports of this machine.
    fn lids(&self) -> Outcome<(u32, u32)> {
        let fabric = self.fabric()?;
        Ok((fabric.a.lid()?, fabric.b.lid()?))
    }
}

// What a program printed, to be the same with either module: but for the date, for how the machine's clock is
// rated, for the way that a query took and the age of the subnet manager.
fn keep(seen: &mut Seen, ended: &Ended) {
    seen.figure("$", &ended.command);
    seen.figure("status", &ended.status);
    let printed = without(&ended.stdout, |line| {
        line.contains("generated on") || line.contains("MHZ")
    });
    seen.text(&figures_hidden(&printed, &["LocalPort", "ActCount"]));
    // Behind these there is a process id.
    seen.text(&without(&ended.stderr, |line| line.starts_with("ibwarn")));
}

// Runs a program that must succeed, and keeps what it printed.
fn good(seen: &mut Seen, command: &str) -> Outcome<Ended> {
    let ended = run(command)?;
    keep(seen, &ended);
    ended.ok()
}

// The same for a program that prints things in the order in which answers come: its lines, sorted.
fn good_sorted(seen: &mut Seen, command: &str) -> Outcome<Ended> {
    let ended = run(command)?;
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    let sorted = Ended {
        command: ended.command.clone(),
        status: ended.status.clone(),
        stdout: lines.join("\n"),
        stderr: ended.stderr.clone(),
    };
    keep(seen, &sorted);
    ended.ok()
}

// Runs a program that must fail, says why, and keeps what it printed.
fn bad(seen: &mut Seen, command: &str, status: &str, why: &str) -> Outcome {
    let ended = run(command)?;
    keep(seen, &ended);
    ended.with_status(status)?.says(why)?;
    Ok(())
}

/// The scene.
pub fn scene() -> Scene<World> {
    let mut scene = Scene::new("diags");
    scene.check("fabric", "six nodes with cables", |world: &mut World, _| {
        world.fabric = Some(Cabled::six()?);
        Ok(())
    });
    scene.check(
        "ibstat",
        "before there is a subnet manager: Initializing",
        |world, seen| {
            let device = &world.fabric()?.a.ibdev;
            let out = good(seen, &format!("ibstat {device} 1"))?.stdout;
            ensure_eq!(value(&out, "State"), Some("Initializing"));
            ensure_eq!(value(&out, "Base lid"), Some("0"));
            Ok(())
        },
    );
    scene.check(
        "sminfo",
        "before there is a subnet manager: fails",
        |world, seen| {
            let device = &world.fabric()?.a.ibdev;
            bad(
                seen,
                &format!("sminfo -C {device} -t 500"),
                "255",
                "failed: query",
            )
        },
    );
    scene.check("opensm", "foreground: SUBNET UP", |world, seen| {
        let options = Options {
            guid: world.fabric()?.a.guid()?,
            ..Options::default()
        };
        let mut sm = OpenSm::start(&folder("sm-a")?, &options)?;
        sm.wait_up(SWEEP)?;
        seen.note(format!("{} SMPs", sm.status("QP0 MADs sent")?));
        let errors = sm.errors();
        ensure!(errors.is_empty(), "it complains: {errors:?}");
        world.sm = Some(sm);
        for port in [&world.fabric()?.a, &world.fabric()?.b] {
            ensure_eq!(port.state()?, "4: ACTIVE");
            ensure!(port.lid()? != 0);
        }
        ensure!(world.fabric()?.a.is_sm()?, "IsSM is not set");
        Ok(())
    });
    scene.check("sminfo", "the master", |world, seen| {
        let (a, _) = world.lids()?;
        let out = run("sminfo -C h1 -t 2000")?.ok()?.stdout;
        ensure!(out.contains("SMINFO_MASTER"), "{out}");
        ensure!(out.contains(&format!("sm lid {a} ")), "{out}");
        // The activity count is another one each time.
        seen.text(out.split("activity count").next().unwrap_or_default());
        Ok(())
    });
    scene.check(
        "ibstat",
        "all devices, Active, with their LIDs",
        |world, seen| {
            let (a, b) = world.lids()?;
            let out = good(seen, "ibstat")?.stdout;
            for lid in [a, b] {
                ensure!(
                    out.contains(&format!("Base lid: {lid}\n")),
                    "no LID {lid}: {out}"
                );
            }
            good(seen, "ibstat -l")?;
            good(seen, "ibstat -p")?;
            Ok(())
        },
    );
    scene.check("ibstatus", "Active", |_, seen| {
        let out = good(seen, "ibstatus")?.stdout;
        ensure!(out.contains("4: ACTIVE"), "{out}");
        Ok(())
    });
    scene.check(
        "ibnetdiscover",
        "each switch, each CA, each cable",
        |world, seen| {
            let out = good_sorted(seen, "ibnetdiscover -C h1 -t 2000")?.stdout;
            let fabric = world.fabric()?;
            ensure_eq!(count(&out, "Switch"), fabric.switches, "switches");
            ensure_eq!(count(&out, "Ca"), fabric.cas, "CAs");
            ensure_eq!(count(&out, "["), 2 * fabric.links, "ends of cables");
            good_sorted(seen, "ibnetdiscover -C h1 -t 2000 -l")?;
            good_sorted(seen, "ibnetdiscover -C h1 -t 2000 -p")?;
            Ok(())
        },
    );
    scene.check("iblinkinfo", "each cable from both sides", |world, seen| {
        let out = good_sorted(seen, "iblinkinfo -C h1 -t 2000")?.stdout;
        let up = out
            .lines()
            .filter(|line| line.contains("Active/  LinkUp)==>"))
            .count();
        let fabric = world.fabric()?;
        ensure_eq!(up, 2 * fabric.links, "ends of links that are up");
        Ok(())
    });
    for (program, switches, cas) in [
        ("ibnodes", true, true),
        ("ibswitches", true, false),
        ("ibhosts", false, true),
    ] {
        scene.check(program, "one line for each", move |world, seen| {
            let out = good_sorted(seen, &format!("{program} -C h1 -t 2000"))?.stdout;
            let fabric = world.fabric()?;
            let want = usize::from(switches) * fabric.switches + usize::from(cas) * fabric.cas;
            ensure_eq!(count(&out, "Switch") + count(&out, "Ca"), want, "lines");
            Ok(())
        });
    }
    scene.check("ibtracert", "from one end to the other", |world, seen| {
        let (a, b) = world.lids()?;
        let out = good(seen, &format!("ibtracert -C h1 -t 2000 {a} {b}"))?.stdout;
        ensure_eq!(count(&out, "["), 3, "hops");
        Ok(())
    });
    scene.check("ibroute", "a switch's forwarding table", |_, seen| {
        let lids = run("ibswitches -C h1")?.ok()?.stdout;
        let lid = value(&lids, " lid").unwrap_or("0").to_owned();
        let out = good(seen, &format!("ibroute -C h1 -t 2000 {lid}"))?.stdout;
        ensure!(out.contains("6 valid lids dumped"), "{out}");
        Ok(())
    });
    scene.check("ibaddr", "GID, LID, and by GUID", |world, seen| {
        let (a, b) = world.lids()?;
        let out = good(seen, "ibaddr -C h1 -t 2000")?.stdout;
        ensure!(out.contains(&format!("LID start 0x{a:x} end")), "{out}");
        let guid = world.fabric()?.b.guid()?;
        let out = good(seen, &format!("ibaddr -C h1 -t 2000 -G {guid}"))?.stdout;
        ensure!(out.contains(&format!("LID start 0x{b:x} end")), "{out}");
        Ok(())
    });
    scene.check(
        "ibportstate",
        "by directed route: query, disable, enable",
        |world, seen| {
            let path = "-C h1 -t 2000 -D 0,1";
            let out = good(seen, &format!("ibportstate {path} 4 query"))?.stdout;
            ensure_eq!(value(&out, "LinkState"), Some("Active"));
            good(seen, &format!("ibportstate {path} 4 disable"))?;
            let out = good(seen, &format!("ibportstate {path} 4 query"))?.stdout;
            ensure_eq!(value(&out, "PhysLinkState"), Some("Disabled"));
            good(seen, &format!("ibportstate {path} 4 enable"))?;
            let Some(sm) = &mut world.sm else {
                return Err("no subnet manager".into());
            };
            sm.sweep(SWEEP)?;
            let out = good(seen, &format!("ibportstate {path} 4 query"))?.stdout;
            ensure_eq!(value(&out, "LinkState"), Some("Active"));
            Ok(())
        },
    );
    scene.check(
        "perfquery",
        "counters of one's own port, and of another; reset",
        |world, seen| {
            let (_, b) = world.lids()?;
            let out = run("perfquery -C h1 -t 2000")?.ok()?.stdout;
            ensure!(
                value(&out, "PortXmitPkts").and_then(|n| n.parse::<u64>().ok()) > Some(0),
                "{out}"
            );
            seen.text(&numbers_hidden(&out));
            let out = run(&format!("perfquery -C h1 -t 2000 {b} 1"))?.ok()?.stdout;
            seen.text(&numbers_hidden(&out));
            run(&format!("perfquery -C h1 -t 2000 -R {b} 1"))?.ok()?;
            let ended = run(&format!("perfquery -C h1 -t 2000 -x {b} 1"))?;
            seen.text(&numbers_hidden(&format!(
                "{}{}",
                ended.stdout, ended.stderr
            )));
            Ok(())
        },
    );
    scene.check("ibqueryerrors", "all ports", |_, seen| {
        let ended = run("ibqueryerrors -C h1 -t 2000")?;
        seen.figure("status", &ended.status);
        seen.text(&numbers_hidden(&ended.stdout));
        ended.says("Summary")?;
        Ok(())
    });
    scene.check(
        "smpquery",
        "by LID, GUID and directed route",
        |world, seen| {
            let (_, b) = world.lids()?;
            let guid = world.fabric()?.b.guid()?;
            for (query, says) in [
                (format!("nodeinfo {b}"), "Channel Adapter"),
                (format!("nodedesc {b}"), "..h3"),
                (
                    format!("portinfo {b} 1"),
                    "LinkState:.......................Active",
                ),
                (format!("pkeys {b} 1"), "0xffff"),
                (format!("-G nodeinfo {guid}"), "Channel Adapter"),
                ("-D nodeinfo 0".to_owned(), "Channel Adapter"),
                ("-D nodeinfo 0,1".to_owned(), "Switch"),
                ("-D switchinfo 0,1".to_owned(), "LinearFdbCap"),
                (
                    "-D portinfo 0,1 1".to_owned(),
                    "LinkState:.......................Active",
                ),
                ("-D nodedesc 0,1,1".to_owned(), "..s2"),
            ] {
                good(seen, &format!("smpquery -C h1 -t 2000 {query}"))?.says(says)?;
            }
            Ok(())
        },
    );
    scene.check("smpdump", "directed and by LID", |world, seen| {
        let (_, b) = world.lids()?;
        good(seen, "smpdump -C h1 -t 2000 -D 0 0x11")?;
        good(seen, "smpdump -C h1 -t 2000 -D 0,1 0x15 1")?;
        good(seen, &format!("smpdump -C h1 -t 2000 {b} 0x11"))?;
        Ok(())
    });
    scene.check("saquery", "the tables", |world, seen| {
        let (a, b) = world.lids()?;
        // Nodes, path records of all pairs, end ports, links, subnet managers and so on.
        for (table, head, records) in [
            ("NR".to_owned(), "NodeRecord dump", 6),
            ("PIR".to_owned(), "PortInfoRecord dump", 14),
            ("PR".to_owned(), "PathRecord dump", 36),
            ("LR".to_owned(), "LinkRecord dump", 12),
            ("SMIR".to_owned(), "SMInfoRecord dump", 1),
            ("CPI".to_owned(), "SA ClassPortInfo", 1),
            ("LFTR".to_owned(), "LFT Record dump", 2),
            ("SWIR".to_owned(), "SwitchInfoRecord dump", 2),
            ("-g".to_owned(), "MCMemberRecord group dump", 1),
            ("-s".to_owned(), "PortInfoRecord dump", 1),
            (format!("--src-to-dst {a}:{b}"), "PathRecord dump", 1),
        ] {
            let out = good(seen, &format!("saquery -C h1 -t 2000 {table}"))?.stdout;
            ensure_eq!(count(&out, head), records, "records of {table}");
        }
        Ok(())
    });
    scene.check("ibping", "one hundred pings, none lost", |world, seen| {
        let fabric = world.fabric()?;
        let (a, b) = (fabric.a.ibdev.clone(), fabric.b.ibdev.clone());
        let (_, lid) = world.lids()?;
        let server = Running::start(&format!("ibping -S -C {b}"), &folder("ibping")?.join("log"))?;
        run_until(&format!("ibping -C {a} -t 2000 -c 1 {lid}"), " 1 received")?;
        let ended = run(&format!("ibping -C {a} -t 2000 -f -c 100 {lid}"))?.ok()?;
        ensure!(
            ended
                .stdout
                .contains("100 packets transmitted, 100 received"),
            "{}",
            ended.stdout
        );
        drop(server);
        seen.figure("received", 100);
        Ok(())
    });
    scene.check("ibsysstat", "asks a server", |world, seen| {
        let fabric = world.fabric()?;
        let (a, b) = (fabric.a.ibdev.clone(), fabric.b.ibdev.clone());
        let (_, lid) = world.lids()?;
        let server = Running::start(
            &format!("ibsysstat -S -C {b}"),
            &folder("ibsysstat")?.join("log"),
        )?;
        run_until(&format!("ibsysstat -t 2000 -C {a} {lid} host"), "guest")?;
        for (operation, says) in [
            ("ping", "sysstat ping succeeded"),
            ("host", "guest"),
            ("cpu", "cpu 0: model"),
        ] {
            good(seen, &format!("ibsysstat -t 2000 -C {a} {lid} {operation}"))?.says(says)?;
        }
        drop(server);
        Ok(())
    });
    scene.check(
        "vendstat",
        "says that nobody knows its class here",
        |world, seen| {
            let (_, b) = world.lids()?;
            bad(
                seen,
                &format!("vendstat -C h1 -t 500 -N {b}"),
                "255",
                "classportinfo query",
            )
        },
    );
    scene.check(
        "ibccquery",
        "says that nobody knows its class here",
        |world, seen| {
            let (_, b) = world.lids()?;
            let command = format!("ibccquery -C h1 -t 500 CongestionInfo {b}");
            bad(seen, &command, "255", "congestion info query failed")
        },
    );
    scene.check(
        "srp_daemon",
        "once over all ports: there is no target",
        |_, seen| {
            let ended = good(seen, "srp_daemon -o -c -n -a -i h1 -p 1")?;
            ensure_eq!(ended.stdout, "");
            Ok(())
        },
    );
    for (flow, name) in [
        ("c", "Create Inventory"),
        ("v", "Validate Inventory"),
        ("s", "Services Registration"),
        ("e", "Event Forwarding"),
        ("m", "Multicast"),
    ] {
        scene.check("osmtest", name, move |world, seen| {
            let folder = std::path::Path::new("/tmp/osmtest");
            std::fs::create_dir_all(folder)?;
            let guid = world.fabric()?.a.guid()?;
            let command = format!(
                "osmtest -g {guid} -t 2000 -i /tmp/osmtest/inventory -l /tmp/osmtest/log -f {flow}"
            );
            good(seen, &command)?.says(&format!("TEST \"{name}\" PASS"))?;
            Ok(())
        });
    }
    scene.check("ibacm", "finds no verbs device, and ends", |_, seen| {
        let _ = std::fs::remove_file("/var/log/ibacm.log");
        let ended = run("ibacm --systemd")?;
        let log = std::fs::read_to_string("/var/log/ibacm.log").unwrap_or_default();
        let said = format!("{}{}{log}", ended.stdout, ended.stderr);
        seen.figure("status", &ended.status);
        ensure!(
            said.contains("unable to open any devices"),
            "it ended with {}: {said}",
            ended.status
        );
        Ok(())
    });
    for program in ["umad_reg2", "umad_register2"] {
        scene.check(program, "no failures", move |_, seen| {
            let ended = good(seen, &format!("/b/libibumad-tests/{program}"))?;
            ended.says("had 0 failures")?;
            Ok(())
        });
    }
    scene.check(
        "umad_sa_mcm_rereg_test",
        "joins, leaves, and joins again",
        |world, seen| {
            let file = folder("mcm")?.join("guids");
            let fabric = world.fabric()?;
            // The subnet manager lets a port join for itself only.
            std::fs::write(&file, format!("{}\n", fabric.a.guid()?))?;
            for (option, says) in [
                ("-c", "1 of 1 queried"),
                ("-j", "1 of 1 queried"),
                ("", "got 2 responses"),
                ("-l", "1 of 1 queried"),
            ] {
                let ended = good(
                    seen,
                    &format!(
                    "/b/libibumad-tests/umad_sa_mcm_rereg_test -C h1 -P 1 -t 1000 -F {} {option}",
                    file.display()
                ),
                )?;
                ensure!(!ended.stderr.contains("ERR"), "{}", ended.stderr);
                ensure!(!ended.stderr.contains("status 0x"), "{}", ended.stderr);
                ended.says(says)?;
            }
            Ok(())
        },
    );
    scene.check(
        "rdma",
        "devices, links, resources; a device renamed under the subnet manager",
        |world, seen| {
            good(seen, "rdma dev")?;
            good(seen, "rdma link")?;
            let a = world.fabric()?.a.ibdev.clone();
            good(seen, &format!("rdma dev set {a} name renamed"))?;
            good(seen, "ibstat renamed 1")?;
            good(seen, &format!("rdma dev set renamed name {a}"))?;
            good(seen, "rdma res show")?;
            Ok(())
        },
    );
    scene.check(
        "opensm",
        "a heavy sweep by SIGHUP; ends when told to",
        |world, seen| {
            let Some(mut sm) = world.sm.take() else {
                return Err("no subnet manager".into());
            };
            sm.sweep(SWEEP)?;
            let status = sm.stop(LIMIT)?;
            seen.figure("status", status);
            ensure!(!world.fabric()?.a.is_sm()?, "IsSM is still set");
            Ok(())
        },
    );
    scene
}
