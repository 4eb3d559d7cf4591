// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `devices`: 200 of them, more than one major number has room for.
//!
//! Each is a Soft-RoCE device on a dummy Ethernet device, the cheapest that Soft-RoCE takes. The
//! last two are the ends of a veth, so that MADs can travel between ports above 64.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt;

use ktap::peers::CLASS;
use ktap::prelude::*;
use nix::sys::stat::{major, minor};
use selftests::netlink::Rdma;
use umad::sysfs::CLASS as CLASS_DIR;

/// All umad devices, with the two that are always there and the pair.
const ALL: u32 = 200;

/// Ports that fit into the fixed major.
const FIXED: u32 = 64;

/// Devices on dummies: numbers 2 to 197.
const DUMMIES: u32 = ALL - 4;

/// Runs a list of commands of `ip` or `rdma` in one process.
fn batch(program: &str, lines: impl Iterator<Item = String>) -> Outcome {
    let path = format!("/tmp/umad-devices-{program}");
    fs::write(&path, lines.collect::<Vec<_>>().join("\n") + "\n")?;
    run(&format!("{program} -b {path}"))?;
    fs::remove_file(path)?;
    Ok(())
}

fn make() -> Outcome {
    // The module may be loaded with devices of its own making; none are wanted.
    let _ = run("modprobe dummy numdummies=0");
    batch(
        "ip",
        (0..DUMMIES).flat_map(|n| {
            [
                format!("link add many{n} type dummy"),
                format!("link set many{n} up"),
            ]
        }),
    )?;
    batch(
        "rdma",
        (0..DUMMIES).map(|n| format!("link add rxm{n} type rxe netdev many{n}")),
    )
}

/// Removes what `make` made, as far as it is there.
fn remove() -> Outcome {
    let there = |n: &u32| fs::exists(format!("/sys/class/net/many{n}")).unwrap_or(false);
    let dummies: Vec<_> = (0..DUMMIES).filter(there).collect();
    batch("ip", dummies.iter().map(|n| format!("link delete many{n}")))?;
    wait_until("all devices are gone", Duration::from_secs(60), || {
        !(0..DUMMIES).any(|n| fs::exists(format!("/sys/class/infiniband/rxm{n}")).unwrap_or(true))
    })
}

/// Major and minor that sysfs names.
fn sysfs_numbers(n: u32) -> Outcome<(u64, u64)> {
    let text = fs::read_to_string(format!("{CLASS_DIR}/umad{n}/dev"))?;
    let Some((major, minor)) = text.trim_end().split_once(':') else {
        return Err(format!("umad{n}/dev: {text:?}").into());
    };
    Ok((major.parse()?, minor.parse()?))
}

/// The second major that belongs to the class.
fn dynamic_major() -> Outcome<u64> {
    let text = fs::read_to_string("/proc/devices")?;
    let majors = text
        .lines()
        .filter_map(|line| line.trim().split_once(' '))
        .filter(|(_, name)| *name == "infiniband_mad")
        .filter_map(|(major, _)| major.parse().ok())
        .filter(|major| *major != 231)
        .collect::<Vec<u64>>();
    match majors[..] {
        [major] => Ok(major),
        _ => Err(format!("other majors of infiniband_mad: {majors:?}").into()),
    }
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("devices");

    area.check("200 devices come", || {
        remove()?;
        make()?;
        let pair = RxePair::new("dv")?;
        // It stays for the next checks, and is removed at the end.
        std::mem::forget(pair);
        let ports = umad::sysfs::ports()?;
        ensure_eq!(ports.len(), 200);
        Ok(())
    })
    .timeout(250);
    area.check("numbers 0 to 199 are given out without a hole", || {
        let numbers: Vec<_> = umad::sysfs::ports()?.iter().map(|p| p.number).collect();
        ensure_eq!(numbers, (0..ALL).collect::<Vec<_>>());
        Ok(())
    });
    area.check(
        "ports up to 63 are minors of 231, from 64 on of the second major",
        || {
            let second = dynamic_major()?;
            for n in 0..ALL {
                let expected = match n.checked_sub(FIXED) {
                    None => (231, u64::from(n)),
                    Some(above) => (second, above.into()),
                };
                ensure_eq!(sysfs_numbers(n)?, expected, "umad{n}");
            }
            Ok(())
        },
    );
    area.check("every node has the numbers of its sysfs entry", || {
        for n in 0..ALL {
            let meta = fs::metadata(umad::port::node(n))?;
            let rdev = meta.rdev();
            ensure_eq!((major(rdev), minor(rdev)), sysfs_numbers(n)?, "umad{n}");
        }
        Ok(())
    });
    area.check("every sysfs entry names its device", || {
        let mut seen = std::collections::BTreeSet::new();
        for port in umad::sysfs::ports()? {
            ensure_eq!(port.port, 1, "umad{}", port.number);
            ensure!(seen.insert(port.ibdev.clone()), "{} twice", port.ibdev);
        }
        ensure!((0..DUMMIES).all(|n| seen.contains(&format!("rxm{n}"))));
        Ok(())
    });
    area.check("every port can be opened, and registers an agent", || {
        for n in 0..ALL {
            let port = Port::open(n).what(format!("umad{n}"))?;
            port.register2(&Peers::registration(CLASS))
                .what(format!("umad{n}"))?;
        }
        Ok(())
    });
    area.check("all 200 are open at once, one agent each", || {
        let ports = (0..ALL)
            .map(|n| {
                let port = Port::open(n)?;
                port.register2(&Peers::registration(CLASS))?;
                Ok(port)
            })
            .collect::<Outcome<Vec<_>>>()?;
        // A class is taken on its own port only; there it is.
        for n in [0, 63, 64, 199] {
            let again = Port::open(n)?.register2(&Peers::registration(CLASS));
            ensure_errno!(again, EINVAL, "umad{n}");
        }
        drop(ports);
        Ok(())
    });
    area.check("MADs travel between ports above 64", || {
        let peers = Peers::on("rxe_dv0", "rxe_dv1")?;
        ensure!(peers.a.umad >= FIXED && peers.b.umad >= FIXED);
        for _ in 0..10 {
            peers.round_trip(fresh_tid())?;
        }
        Ok(())
    });
    area.check(
        "an open file of port n reaches device n, not n - 64",
        || {
            // The node of the fixed part with the same minor is another device's.
            let peers = Peers::on("rxe_dv0", "rxe_dv1")?;
            let below = Port::open(peers.b.umad - FIXED)?;
            below.register2(&Peers::registration(CLASS))?;
            peers.deliver(fresh_tid())?;
            let events = below.poll(nix::poll::PollFlags::POLLIN, ktap::peers::QUIET)?;
            ensure!(
                events.is_empty(),
                "the packet came to umad{}",
                peers.b.umad - FIXED
            );
            Ok(())
        },
    );
    area.check("netlink names the numbers of ports above 64", || {
        let mut rdma = Rdma::open()?;
        for ibdev in ["rxe_dv0", "rxm100", "rxm0"] {
            let n = ktap::wait_for_umad(ibdev)?;
            let index = rdma.index(ibdev)?;
            let got = rdma.chardev("umad", Some(index), Some(1))?;
            ensure_eq!(got.name, format!("umad{n}"));
            ensure_eq!((got.major, got.minor), sysfs_numbers(n)?, "{ibdev}");
            ensure_eq!(got.abi, 5);
        }
        Ok(())
    });
    area.check(
        "the lowest free numbers are given out again, on both sides of 64",
        || {
            let name_of = |n: u32| umad::sysfs::ibdev(n);
            let holes = [10, 63, 64, 150];
            let gone = holes.map(name_of);
            for ibdev in &gone {
                run(&format!("rdma link delete {}", ibdev.clone()?))?;
            }
            for (ibdev, hole) in gone.iter().rev().zip(holes) {
                let ibdev = ibdev.clone()?;
                let netdev = ibdev.replace("rxm", "many");
                run(&format!("rdma link add {ibdev} type rxe netdev {netdev}"))?;
                ensure_eq!(ktap::wait_for_umad(&ibdev)?, hole, "{ibdev}");
            }
            let second = dynamic_major()?;
            ensure_eq!(sysfs_numbers(63)?, (231, 63));
            ensure_eq!(sysfs_numbers(64)?, (second, 0));
            Ok(())
        },
    );
    area.check("all go, and their numbers with them", || {
        run("ip link delete dv0")?;
        remove()?;
        wait_until("the pair is gone", Duration::from_secs(60), || {
            umad::sysfs::ports().is_ok_and(|ports| ports.len() == 2)
        })?;
        let numbers: Vec<_> = umad::sysfs::ports()?.iter().map(|p| p.number).collect();
        ensure_eq!(numbers, [0, 1]);
        let pair = RxePair::plain("dv")?;
        pair.a.plug()?;
        ensure_eq!(pair.a.umad()?, 2);
        Ok(())
    })
    .timeout(250);

    area.run()
}
