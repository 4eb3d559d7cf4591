// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `sysfs`: the class, its attributes, numbers, nodes, uevents and the module's own marks.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use ktap::prelude::*;
use selftests::netlink::{Uevent, Uevents};
use selftests::task::MUST;
use umad::sysfs::CLASS;

/// Contents of a file below the class.
fn attribute(name: &str) -> Outcome<String> {
    let path = format!("{CLASS}/{name}");
    fs::read_to_string(&path).what(path)
}

/// Names in a folder, sorted.
fn names(folder: &str) -> Outcome<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).what(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Major and minor number of a node.
fn device_number(node: impl AsRef<Path>) -> Outcome<(u64, u64)> {
    let node = node.as_ref();
    let meta = fs::metadata(node).what(node.display())?;
    ensure!(meta.file_type().is_char_device(), "{node:?} is no device");
    Ok((
        nix::sys::stat::major(meta.rdev()),
        nix::sys::stat::minor(meta.rdev()),
    ))
}

/// Whether an event is about a umad device.
fn of_umad(action: &str) -> impl Fn(&Uevent) -> bool + '_ {
    move |event| {
        event.get("ACTION").is_some_and(|a| a == action)
            && event
                .get("SUBSYSTEM")
                .is_some_and(|s| s == "infiniband_mad")
    }
}

/// A device of this area's own: one end of a veth is enough.
fn own() -> Outcome<RxePair> {
    RxePair::plain("sy")
}

/// The part of modinfo's section that names `key`, of the module under test.
fn modinfo(key: &str) -> Outcome<Vec<String>> {
    let image = fs::read(ktap::module::file()?)?;
    let tag = format!("{key}=");
    // The section holds "key=value" texts, each with a NUL on both sides.
    Ok(image
        .split(|byte| *byte == 0)
        .filter_map(|text| std::str::from_utf8(text).ok())
        .filter_map(|text| text.strip_prefix(&tag))
        .map(str::to_owned)
        .collect())
}

fn class_checks(area: &mut ktap::Area) {
    area.check("abi_version is 5 and a newline", || {
        ensure_eq!(attribute("abi_version")?, "5\n");
        Ok(())
    });
    area.check("ibdev names the device, with a newline", || {
        ensure_eq!(attribute("umad0/ibdev")?, "rxe0\n");
        ensure_eq!(attribute("umad1/ibdev")?, "rxe1\n");
        Ok(())
    });
    area.check("port is the decimal number of the port", || {
        ensure_eq!(attribute("umad0/port")?, "1\n");
        ensure_eq!(attribute("umad1/port")?, "1\n");
        Ok(())
    });
    area.check("the class holds abi_version and the ports, no issm", || {
        ensure_eq!(names(CLASS)?, ["abi_version", "umad0", "umad1"]);
        Ok(())
    });
    area.check("a device has the attributes dev, ibdev and port", || {
        let found = names(&format!("{CLASS}/umad0"))?;
        for name in ["dev", "ibdev", "port", "subsystem", "uevent"] {
            ensure!(found.iter().any(|f| f == name), "no {name} in {found:?}");
        }
        Ok(())
    });
    area.check(
        "attributes are readable by everybody and writable by nobody",
        || {
            for name in ["abi_version", "umad0/ibdev", "umad0/port"] {
                let path = format!("{CLASS}/{name}");
                ensure_eq!(fs::metadata(&path)?.mode() & 0o7777, 0o444, "{path}");
                // Even root, whom modes do not hold, cannot open it for writing.
                ensure_errno!(
                    fs::File::options().write(true).open(&path),
                    EACCES,
                    "{path}"
                );
            }
            Ok(())
        },
    );
    area.check("the subsystem is infiniband_mad", || {
        let link = fs::read_link(format!("{CLASS}/umad0/subsystem"))?;
        ensure!(link.ends_with("class/infiniband_mad"), "{link:?}");
        Ok(())
    });
    area.check("the device lies where its RDMA device's parent is", || {
        // A Soft-RoCE device has a parent only if its network device has one; a veth has none, so
        // both are virtual.
        let umad = fs::canonicalize(format!("{CLASS}/umad0"))?;
        let ib = fs::canonicalize("/sys/class/infiniband/rxe0")?;
        let above = |p: &Path| p.ancestors().nth(2).map(Path::to_owned);
        ensure_eq!(above(&umad), above(&ib));
        Ok(())
    });
}

fn node_checks(area: &mut ktap::Area) {
    area.check("the first 64 ports are minors of major 231", || {
        ensure_eq!(attribute("umad0/dev")?, "231:0\n");
        ensure_eq!(attribute("umad1/dev")?, "231:1\n");
        Ok(())
    });
    area.check(
        "nodes are /dev/infiniband/umadN, with the numbers of sysfs",
        || {
            ensure_eq!(device_number("/dev/infiniband/umad0")?, (231, 0));
            ensure_eq!(device_number("/dev/infiniband/umad1")?, (231, 1));
            Ok(())
        },
    );
    area.check("nodes belong to root and have mode 0600", || {
        let meta = fs::metadata("/dev/infiniband/umad0")?;
        ensure_eq!(meta.mode() & 0o7777, 0o600);
        ensure_eq!((meta.uid(), meta.gid()), (0, 0));
        Ok(())
    });
    area.check("there is no issm node on RoCE", || {
        let issm: Vec<_> = names("/dev/infiniband")?
            .into_iter()
            .filter(|name| name.starts_with("issm"))
            .collect();
        ensure!(issm.is_empty(), "{issm:?}");
        Ok(())
    });
    area.check("the uevent attribute names numbers and node", || {
        let text = attribute("umad1/uevent")?;
        for line in ["MAJOR=231", "MINOR=1", "DEVNAME=infiniband/umad1"] {
            ensure!(text.lines().any(|l| l == line), "no {line} in {text:?}");
        }
        // The class gives the node no mode of its own.
        ensure!(!text.contains("DEVMODE"), "{text:?}");
        Ok(())
    });
    area.check("/dev/char leads from the number to the device", || {
        let there = fs::canonicalize("/sys/dev/char/231:0")?;
        ensure_eq!(there, fs::canonicalize(format!("{CLASS}/umad0"))?);
        Ok(())
    });
    area.check("two majors are claimed: 231 and a dynamic one", || {
        let text = fs::read_to_string("/proc/devices")?;
        let majors: Vec<u32> = text
            .lines()
            .filter_map(|line| line.trim().split_once(' '))
            .filter(|(_, name)| *name == "infiniband_mad")
            .filter_map(|(major, _)| major.parse().ok())
            .collect();
        ensure_eq!(majors.len(), 2, "majors of infiniband_mad: {majors:?}");
        ensure!(majors.contains(&231), "{majors:?}");
        Ok(())
    });
}

fn life_checks(area: &mut ktap::Area) {
    area.check("ibdev follows a rename at once", || {
        let pair = own()?;
        pair.a.plug()?;
        let n = pair.a.umad()?;
        let ibdev = format!("umad{n}/ibdev");
        ensure_eq!(attribute(&ibdev)?, "rxe_sy0\n");
        run("rdma dev set rxe_sy0 name another")?;
        let renamed = attribute(&ibdev);
        run("rdma dev set another name rxe_sy0")?;
        ensure_eq!(renamed?, "another\n");
        ensure_eq!(attribute(&ibdev)?, "rxe_sy0\n");
        Ok(())
    });
    area.check("ibdev holds the longest name", || {
        let pair = own()?;
        pair.a.plug()?;
        let n = pair.a.umad()?;
        let long = "n".repeat(63);
        run(&format!("rdma dev set rxe_sy0 name {long}"))?;
        let shown = attribute(&format!("umad{n}/ibdev"));
        run(&format!("rdma dev set {long} name rxe_sy0"))?;
        ensure_eq!(shown?, format!("{long}\n"));
        Ok(())
    });
    area.check("an open file survives a rename of its device", || {
        let pair = RxePair::new("sy")?;
        let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
        run("rdma dev set rxe_sy0 name another")?;
        let trip = peers.round_trip(fresh_tid());
        run("rdma dev set another name rxe_sy0")?;
        trip?;
        Ok(())
    });
    area.check("the add event names node and numbers", || {
        let pair = own()?;
        let events = Uevents::open()?;
        pair.a.plug()?;
        let event = events.wait(MUST, of_umad("add"))?;
        let n = pair.a.umad()?;
        let get = |key: &str| event.get(key).cloned().unwrap_or_default();
        ensure_eq!(get("DEVNAME"), format!("infiniband/umad{n}"));
        ensure_eq!(get("MAJOR"), "231");
        ensure_eq!(get("MINOR"), n.to_string());
        let path = get("DEVPATH");
        ensure!(
            path.ends_with(&format!("/infiniband_mad/umad{n}")),
            "DEVPATH {path:?}"
        );
        Ok(())
    });
    area.check(
        "attributes and node are there when the add event arrives",
        || {
            let pair = own()?;
            // The plug happens in a child, so that the event is looked at as early as can be; several
            // times, for an attribute that comes late may still win a race.
            for _ in 0..5 {
                let events = Uevents::open()?;
                let mut plug = fork(|| pair.a.plug())?;
                let event = events.wait(MUST, of_umad("add"))?;
                let path = event.get("DEVPATH").cloned().unwrap_or_default();
                let node = event.get("DEVNAME").cloned().unwrap_or_default();
                let ibdev = fs::read_to_string(format!("/sys{path}/ibdev"));
                let port = fs::read_to_string(format!("/sys{path}/port"));
                let node = fs::metadata(format!("/dev/{node}"));
                plug.wait(MUST)?;
                pair.a.unplug()?;
                ensure_eq!(ibdev?, "rxe_sy0\n");
                ensure_eq!(port?, "1\n");
                ensure!(node?.file_type().is_char_device());
            }
            Ok(())
        },
    );
    area.check("the port can be opened when the add event arrives", || {
        let pair = own()?;
        for _ in 0..5 {
            let events = Uevents::open()?;
            let mut plug = fork(|| pair.a.plug())?;
            let event = events.wait(MUST, of_umad("add"))?;
            let node = event.get("DEVNAME").cloned().unwrap_or_default();
            let port = Port::open_path(Path::new(&format!("/dev/{node}")));
            plug.wait(MUST)?;
            drop(port?);
            pair.a.unplug()?;
        }
        Ok(())
    });
    area.check(
        "a remove event goes out, and class entry and node are gone",
        || {
            let pair = own()?;
            pair.a.plug()?;
            let n = pair.a.umad()?;
            let events = Uevents::open()?;
            pair.a.unplug()?;
            let event = events.wait(MUST, of_umad("remove"))?;
            let node = event.get("DEVNAME").cloned().unwrap_or_default();
            ensure_eq!(node, format!("infiniband/umad{n}"));
            ensure!(!fs::exists(format!("{CLASS}/umad{n}"))?);
            ensure!(!umad::port::node(n).exists());
            ensure!(!fs::exists(format!("/sys/dev/char/231:{n}"))?);
            Ok(())
        },
    );
    area.check(
        "an attribute that is held open fails with ENODEV after the unplug",
        || {
            use std::io::Read;
            let pair = own()?;
            pair.a.plug()?;
            let n = pair.a.umad()?;
            let mut held = fs::File::open(format!("{CLASS}/umad{n}/ibdev"))?;
            pair.a.unplug()?;
            let mut text = String::new();
            ensure_errno!(held.read_to_string(&mut text), ENODEV);
            Ok(())
        },
    );
    area.check("attributes can be read while devices come and go", || {
        let pair = own()?;
        let mut reader = fork(|| loop {
            // What is read is a whole name or an error of a device that is gone.
            for n in 2..4 {
                match fs::read_to_string(format!("{CLASS}/umad{n}/ibdev")) {
                    Ok(text) => ensure_eq!(text, "rxe_sy0\n"),
                    Err(e) => ensure!(
                        matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)),
                        "{e}"
                    ),
                }
            }
        })?;
        for _ in 0..12 {
            pair.a.plug()?;
            pair.a.unplug()?;
        }
        if reader.is_running() {
            return reader.kill(MUST);
        }
        reader.wait(MUST)
    });
}

fn module_checks(area: &mut ktap::Area) {
    area.check("the module is called ib_umad", || {
        let modules = fs::read_to_string("/proc/modules")?;
        ensure!(modules.lines().any(|line| line.starts_with("ib_umad ")));
        ensure!(fs::exists("/sys/module/ib_umad")?);
        ensure_eq!(modinfo("name")?, ["ib_umad"]);
        Ok(())
    });
    area.check(
        "modprobe finds it by rdma-client-umad and rdma-client-issm",
        || {
            let mut aliases = modinfo("alias")?;
            aliases.sort();
            ensure_eq!(aliases, ["rdma-client-issm", "rdma-client-umad"]);
            Ok(())
        },
    );
    area.check(
        "the licence lets it be used with ib_core, and both licences be chosen",
        || {
            ensure_eq!(modinfo("license")?, ["Dual BSD/GPL"]);
            Ok(())
        },
    );
    area.check("it is built for the running kernel", || {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let magic = modinfo("vermagic")?.join(" ");
        ensure!(
            magic.split(' ').next() == Some(release.trim()),
            "vermagic {magic:?} on {release:?}"
        );
        Ok(())
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("sysfs");
    class_checks(&mut area);
    node_checks(&mut area);
    life_checks(&mut area);
    module_checks(&mut area);
    area.run()
}
