// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `smi`: queue pair 0. Which port has it, who may register there, and subnet management MADs
//! (SMPs), by directed route and by LID: to the own port, to the other end of the cable, and through a
//! switch; answered, late, lost, refused.

#![forbid(unsafe_code)]

use ktap::prelude::*;
use selftests::vhca::{
    answer, attr, direct, smi, wait_for_umad, Agent, Faults, Module, Pair, Shape, Smp, Spec,
    SpecExt, Vhca, VhcaExt, DIRECTED, DIRECTION, EXTERNAL, LID_ROUTED, NO_PROCESS_MAD, PORT_DOWN,
    TIMED_OUT, UNSUPPORTED,
};
use umad::sysfs;

/// A class of vendors, with an OUI.
const VENDOR: u8 = 0x30;

fn lone(shape: Shape) -> Outcome<Vhca> {
    Spec::new(shape, 1).plug()
}

/// What registering an agent must end with.
fn ensure_registers(port: &Port, registration: &Registration, want: Option<Errno>) -> Outcome {
    for second in [false, true] {
        let call = if second { "AGENT2" } else { "AGENT" };
        let got = if second {
            port.register2(registration)
        } else {
            port.register(registration)
        };
        match (got, want) {
            (Ok(agent), None) => port.unregister(agent)?,
            (Err(e), Some(want)) if e.errno() == Some(want) => (),
            (got, want) => {
                let why = want.map_or("success".to_owned(), |e| e.to_string());
                return Err(format!("{call} {registration:?}: {got:?}, expected {why}").into());
            }
        }
    }
    Ok(())
}

/// Every combination of queue pair and class on a port that has these queue pairs.
fn ensure_matrix(ibdev: &str, port: u32, qp0: bool, qp1: bool) -> Outcome {
    let file = Port::options()
        .layout(Layout::Old)
        .open(wait_for_umad(ibdev, port)?)?;
    // Whether the queue pair is there is looked at first, then whether the class is one of its own.
    let verdict = |qpn: u32, of_qp0: Option<bool>| match (qpn, of_qp0) {
        (0, _) if !qp0 => Some(Errno::EPROTONOSUPPORT),
        (1, _) if !qp1 => Some(Errno::EPROTONOSUPPORT),
        (0, Some(false)) | (1, Some(true)) | (2.., _) => Some(Errno::EINVAL),
        _ => None,
    };
    let of_class = |class| Registration::class(class, 1).methods(&[Method::GET]);
    let wishes = [
        (of_class(LID_ROUTED), Some(true)),
        (of_class(DIRECTED), Some(true)),
        (of_class(VENDOR).oui(ktap::peers::OUI), Some(false)),
        (of_class(0x09), Some(false)),
        (Registration::send_only(), None),
    ];
    for (wish, of_qp0) in wishes {
        for qpn in [0, 1, 2, 255] {
            ensure_registers(&file, &wish.qpn(qpn), verdict(qpn, of_qp0))?;
        }
    }
    Ok(())
}

/// Type and port GUID in a NodeInfo.
fn node_info(data: &[u8; 64]) -> (u8, [u8; 8]) {
    let mut guid = [0; 8];
    guid.copy_from_slice(&data[20..28]);
    (data[2], guid)
}

fn port_guid(device: &Vhca, port: u32) -> Outcome<[u8; 8]> {
    let gid = sysfs::gid(&device.ibdev, port, 0)?.0;
    let mut guid = [0; 8];
    guid.copy_from_slice(&gid[8..]);
    Ok(guid)
}

fn get(attribute: u16, path: &[u8]) -> Smp {
    Smp::directed(Method::GET, attribute, 0, path)
}

fn ensure_node(manager: &Agent, to: &Address, smp: Smp, kind: u8, guid: [u8; 8]) -> Outcome {
    let path = smp.0[129..132].to_vec();
    let got = manager.ask(to, smp.0)?;
    let data = answer(&got).what(format!("to LID {:#x}, path {path:?}", to.lid))?;
    ensure_eq!(node_info(&data), (kind, guid));
    Ok(())
}

/// A request that must end with a timeout.
fn ensure_timeout(manager: &Agent, to: &Address, smp: &Smp) -> Outcome {
    let request = Packet::new(manager.agent, to, smp.0.clone()).timeout(Duration::from_millis(200));
    manager.port.send(&request)?;
    let got = manager.recv_tid(smp.tid())?;
    ensure_eq!(got.header.status, TIMED_OUT);
    ensure_eq!(got.header.timeout_ms, 200);
    // The MAD as it was sent, but for what the kernel has done to it: its header says enough.
    ensure_eq!(got.mad.get(3), smp.0.get(3), "the method");
    Ok(())
}

/// Asks for the answer to a request that a fault of a device delays, but does not lose.
fn ensure_answer_in_spite_of(faults: impl Fn(&Pair) -> Outcome) -> Outcome {
    let pair = Pair::new()?;
    let manager = pair.a.manager(1)?;
    faults(&pair)?;
    let guid = port_guid(&pair.b, 1)?;
    ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1]), 1, guid)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("smi");

    area.check("a port with both queue pairs: who can register", || {
        ensure_matrix(&lone(Shape::Ca)?.ibdev, 1, true, true)
    });
    area.check("a port with QP 0 only: QP 1 is EPROTONOSUPPORT", || {
        ensure_matrix(&lone(Shape::SmiOnly)?.ibdev, 1, true, false)
    });
    area.check("a port without QP 0: it is EPROTONOSUPPORT", || {
        ensure_matrix(&lone(Shape::NoSmi)?.ibdev, 1, false, true)
    });
    area.check("a switch: who can register at its port 0", || {
        ensure_matrix(&lone(Shape::Switch)?.ibdev, 0, true, true)
    });
    area.check("an OPA port: who can register", || {
        ensure_matrix(&lone(Shape::Opa)?.ibdev, 1, true, true)
    });
    area.check("a port that is down: who can register", || {
        let device = Spec::new(Shape::Ca, 1)
            .port(1, |port| port.flags = PORT_DOWN)
            .plug()?;
        ensure_matrix(&device.ibdev, 1, true, true)
    });
    area.check("every port of a device with eight", || {
        let device = Spec::new(Shape::Ca, 8).plug()?;
        for port in 1..=8 {
            ensure_matrix(&device.ibdev, port, true, true)?;
        }
        Ok(())
    });
    area.check("a device without MADs has no umad device", || {
        // The second device is there to know when the first one was dealt with.
        let without = lone(Shape::NoMad)?;
        let with = lone(Shape::Ca)?;
        with.umad(1)?;
        ensure_eq!(sysfs::find(&without.ibdev, 1)?, None);
        Ok(())
    });
    area.check("a switch has one umad device, of port 0", || {
        let device = Spec::new(Shape::Switch, 4).plug()?;
        device.umad(0)?;
        let ports: Vec<u32> = sysfs::ports()?
            .into_iter()
            .filter(|port| port.ibdev == device.ibdev)
            .map(|port| port.port)
            .collect();
        ensure_eq!(ports, [0]);
        Ok(())
    });
    area.check("one agent for a class and method of QP 0", || {
        let device = lone(Shape::Ca)?;
        let (first, second) = (Port::open(device.umad(1)?)?, Port::open(device.umad(1)?)?);
        let wish = Registration::class(DIRECTED, 1)
            .methods(&[Method::GET])
            .qpn(0);
        let agent = first.register2(&wish)?;
        ensure_errno!(second.register2(&wish), EINVAL);
        second.register2(&wish.methods(&[Method::SET]))?;
        first.unregister(agent)?;
        second.register2(&wish)?;
        Ok(())
    });

    for shape in [Shape::Ca, Shape::SmiOnly, Shape::Opa] {
        area.check(
            format!("{shape:?}: an SMP that goes nowhere is answered"),
            move || {
                let device = lone(shape)?;
                let guid = port_guid(&device, 1)?;
                ensure_node(
                    &device.manager(1)?,
                    &direct(),
                    get(attr::NODE_INFO, &[]),
                    1,
                    guid,
                )
            },
        );
        area.check(
            format!("{shape:?}: a directed route over the cable"),
            move || {
                let pair = Pair::of(shape)?;
                for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
                    let manager = from.manager(1)?;
                    let guid = port_guid(to, 1)?;
                    ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1]), 1, guid)?;
                    let smp = get(attr::NODE_DESCRIPTION, &[1]);
                    let data = answer(&manager.ask(&direct(), smp.0)?)?;
                    ensure!(data.starts_with(to.ibdev.as_bytes()), "{data:?}");
                }
                Ok(())
            },
        );
        area.check(format!("{shape:?}: an SMP by LID"), move || {
            let pair = Pair::of(shape)?;
            let manager = pair.a.manager(1)?;
            let guid = port_guid(&pair.b, 1)?;
            let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
            let got = manager.ask(&smi(2), smp.0)?;
            ensure_eq!(node_info(&answer(&got)?), (1, guid));
            ensure_eq!(got.header.lid.get(), 2, "the LID that answered");
            ensure_eq!(got.header.qpn.get(), 0, "the queue pair that answered");
            ensure_eq!(got.header.grh_present, 0);
            Ok(())
        });
    }
    area.check("a switch answers at hop 0", || {
        let device = lone(Shape::Switch)?;
        let guid = port_guid(&device, 0)?;
        let manager = device.manager(0)?;
        ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[]), 2, guid)?;
        let info = answer(&manager.ask(&direct(), get(attr::SWITCH_INFO, &[]).0)?)?;
        ensure!(info[0..2] != [0, 0], "LinearFDBCap is 0");
        Ok(())
    });
    area.check("an answer has come all the way back", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        let got = manager.ask(&direct(), get(attr::NODE_INFO, &[1]).0)?;
        ensure_eq!(got.mad[6], 0, "the hop pointer");
        ensure_eq!(got.mad[7], 1, "the hop count");
        ensure_eq!(got.mad[193], 1, "the first port of the return path");
        ensure_eq!(got.mad_header()?.status.get(), DIRECTION);
        ensure_eq!(got.header.lid.get(), 0xffff);
        ensure_eq!(got.header.status, 0);
        ensure_eq!(got.mad.len(), 256);
        Ok(())
    });
    area.check("answers keep the TID, and find their agent", || {
        let pair = Pair::new()?;
        let managers = [pair.a.manager(1)?, pair.a.manager(1)?, pair.a.manager(1)?];
        let mut sent = Vec::new();
        for round in 0..8 {
            for manager in &managers {
                let smp = get(attr::NODE_INFO, if round % 2 == 0 { &[1] } else { &[] });
                manager
                    .port
                    .send(&manager.request(&direct(), smp.0.clone()))?;
                sent.push((manager, smp.tid()));
            }
        }
        for manager in &managers {
            let mut want: Vec<u32> = sent
                .iter()
                .filter(|(to, _)| std::ptr::eq(*to, manager))
                .map(|(_, tid)| tid.low())
                .collect();
            while !want.is_empty() {
                let got = manager.port.recv_timeout(ktap::peers::SOON)?;
                answer(&got)?;
                let low = got.tid()?.low();
                ensure!(want.contains(&low), "an answer to {low:#x}");
                want.retain(|tid| *tid != low);
            }
        }
        Ok(())
    });
    area.check("an attribute that the node has not: status 0x000c", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        for path in [&[][..], &[1]] {
            let got = manager.ask(&direct(), get(attr::SWITCH_INFO, path).0)?;
            ensure_eq!(got.mad_header()?.status.get(), UNSUPPORTED | DIRECTION);
            ensure_eq!(got.header.status, 0);
        }
        let smp = Smp::lid_routed(Method::GET, attr::SWITCH_INFO, 0);
        let got = manager.ask(&smi(2), smp.0)?;
        ensure_eq!(got.mad_header()?.status.get(), UNSUPPORTED);
        Ok(())
    });
    area.check("Set(PortInfo) changes the port, and sysfs follows", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        let mut info = answer(&manager.ask(&direct(), get(attr::PORT_INFO, &[1]).0)?)?;
        ensure_eq!(info[16..18], [0, 2], "the LID");
        info[16..18].copy_from_slice(&[0, 77]);
        info[18..20].copy_from_slice(&[0, 1]);
        // No change of state.
        info[32] &= 0xf0;
        info[33] = 0;
        let smp = Smp::directed(Method::SET, attr::PORT_INFO, 1, &[1]).data(&info);
        let now = answer(&manager.ask(&direct(), smp.0)?)?;
        ensure_eq!(now[16..20], [0, 77, 0, 1]);
        let path = sysfs::port_dir(&pair.b.ibdev, 1);
        ensure_eq!(std::fs::read_to_string(path.join("lid"))?.trim(), "0x4d");
        ensure_eq!(std::fs::read_to_string(path.join("sm_lid"))?.trim(), "0x1");
        let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
        answer(&manager.ask(&smi(77), smp.0)?)?;
        Ok(())
    });
    area.check("a port is brought from Init to Active", || {
        let pair = Pair::with(Shape::Ca, |_, mut port| {
            port.flags = selftests::vhca::PORT_WAIT_FOR_SM;
            port
        })?;
        let manager = pair.a.manager(1)?;
        for (state, name) in [(3, "3: ARMED"), (4, "4: ACTIVE")] {
            let mut info = answer(&manager.ask(&direct(), get(attr::PORT_INFO, &[1]).0)?)?;
            info[32] = info[32] & 0xf0 | state;
            info[33] = 0;
            let smp = Smp::directed(Method::SET, attr::PORT_INFO, 1, &[1]).data(&info);
            answer(&manager.ask(&direct(), smp.0)?)?;
            ensure_eq!(sysfs::state(&pair.b.ibdev, 1)?, name);
        }
        Ok(())
    });
    area.check(
        "GUIDs and P_Keys are set, and the tables in sysfs follow",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            let mut guids = answer(&manager.ask(&direct(), get(attr::GUID_INFO, &[1]).0)?)?;
            guids[16..24].copy_from_slice(&[2, 0, 0, 0, 0, 0, 0, 9]);
            let smp = Smp::directed(Method::SET, attr::GUID_INFO, 0, &[1]).data(&guids);
            answer(&manager.ask(&direct(), smp.0)?)?;
            wait_until("the GID is in the table", ktap::peers::SOON, || {
                sysfs::gid(&pair.b.ibdev, 1, 2)
                    .is_ok_and(|gid| gid.to_string() == "fe80::200:0:0:9")
            })?;
            let mut pkeys = [0; 64];
            pkeys[..6].copy_from_slice(&[0xff, 0xff, 0, 0, 0x80, 5]);
            let smp = Smp::directed(Method::SET, attr::PKEY_TABLE, 0, &[1]).data(&pkeys);
            ensure_eq!(answer(&manager.ask(&direct(), smp.0)?)?, pkeys);
            wait_until("the P_Key is in the table", ktap::peers::SOON, || {
                sysfs::pkey(&pair.b.ibdev, 1, 2).is_ok_and(|pkey| pkey == 0x8005)
            })
        },
    );
    area.check("the tables of the virtual lanes are kept", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        for (attribute, modifier, len) in [
            (attr::SL_TO_VL, 0, 8),
            (attr::VL_ARBITRATION, 1 << 16, 16),
            (attr::VL_ARBITRATION, 3 << 16, 16),
        ] {
            let mut table = [0; 64];
            for (at, byte) in (1..).zip(&mut table[..len]) {
                *byte = at;
            }
            let smp = Smp::directed(Method::SET, attribute, modifier, &[1]).data(&table);
            ensure_eq!(answer(&manager.ask(&direct(), smp.0)?)?, table);
            let smp = Smp::lid_routed(Method::GET, attribute, modifier);
            ensure_eq!(answer(&manager.ask(&smi(2), smp.0)?)?, table);
        }
        Ok(())
    });
    area.check(
        "M_Key: what each level of protection lets pass, and the lease",
        || {
            const KEY: u64 = 0x1122_3344_5566_7788;
            const OTHER: u64 = KEY + 1;
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            let set = |key: u64, new_key: u64, level: u8, lease: u16| -> Outcome<Smp> {
                let got = manager.ask(&direct(), get(attr::PORT_INFO, &[1]).m_key(key).0)?;
                let mut info = answer(&got)?;
                info[..8].copy_from_slice(&new_key.to_be_bytes());
                info[26..28].copy_from_slice(&lease.to_be_bytes());
                info[32] &= 0xf0;
                info[33] = 0;
                info[34] = (level << 6) | info[34] & 0x3f;
                let smp = Smp::directed(Method::SET, attr::PORT_INFO, 1, &[1]);
                Ok(smp.m_key(key).data(&info))
            };
            let shown = |key: u64| -> Outcome<u64> {
                let got = manager.ask(&direct(), get(attr::PORT_INFO, &[1]).m_key(key).0)?;
                Ok(u64::from_be_bytes(answer(&got)?[..8].try_into()?))
            };
            let first = set(0, KEY, 0, 0)?;
            answer(&manager.ask(&direct(), first.0)?)?;
            for (level, seen) in [(0, Some(KEY)), (1, Some(0)), (2, None), (3, None)] {
                let smp = set(KEY, KEY, level, 0)?;
                answer(&manager.ask(&direct(), smp.0)?)?;
                ensure_eq!(shown(KEY)?, KEY, "level {level}");
                if let Some(seen) = seen {
                    ensure_eq!(shown(OTHER)?, seen, "level {level}");
                } else {
                    let smp = get(attr::PORT_INFO, &[1]).m_key(OTHER);
                    ensure_timeout(&manager, &direct(), &smp)?;
                }
                let smp = set(KEY, KEY, level, 0)?.m_key(OTHER);
                ensure_timeout(&manager, &direct(), &smp)?;
            }
            let smp = set(KEY, KEY, 2, 1)?;
            answer(&manager.ask(&direct(), smp.0)?)?;
            // The first refusal makes the lease run: one second.
            ensure_timeout(
                &manager,
                &direct(),
                &get(attr::PORT_INFO, &[1]).m_key(OTHER),
            )?;
            std::thread::sleep(Duration::from_millis(1100));
            ensure_eq!(shown(OTHER)?, KEY);
            Ok(())
        },
    );
    area.check("a switch keeps its multicast forwarding table", || {
        let cable = std::process::id();
        let _switch = Spec::new(Shape::Switch, 2)
            .port(1, |port| port.cable = cable)
            .plug()?;
        let adapter = Spec::new(Shape::Ca, 1).cabled(1, 1, cable).plug()?;
        let manager = adapter.manager(1)?;
        let mut table = [0; 64];
        table[3] = 0b110;
        for block in [0, 31] {
            let smp = Smp::directed(Method::SET, attr::MULTICAST_FORWARDING, block, &[1]);
            let got = manager.ask(&direct(), smp.data(&table).0)?;
            ensure_eq!(answer(&got)?, table);
        }
        let smp = get(attr::MULTICAST_FORWARDING, &[1]);
        ensure_eq!(answer(&manager.ask(&direct(), smp.0)?)?, table);
        let smp = Smp::directed(Method::GET, attr::MULTICAST_FORWARDING, 32, &[1]);
        let got = manager.ask(&direct(), smp.0)?;
        ensure!(
            got.mad_header()?.status.get() & !DIRECTION != 0,
            "a block behind the table"
        );
        Ok(())
    });
    area.check("a route that cannot be: EINVAL at once", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        // The first step is not through the agent's port.
        for path in [&[2][..], &[0], &[255, 1]] {
            let smp = get(attr::NODE_INFO, path);
            ensure_errno!(
                manager.port.send(&manager.request(&direct(), smp.0)),
                EINVAL,
                "path {path:?}"
            );
        }
        // Longer than a path can be.
        let mut smp = get(attr::NODE_INFO, &[1]);
        smp.0[7] = 64;
        ensure_errno!(
            manager.port.send(&manager.request(&direct(), smp.0)),
            EINVAL
        );
        // Somewhere in the middle of a path, where only a switch can be.
        let mut smp = get(attr::NODE_INFO, &[1, 1, 1]);
        smp.0[6] = 1;
        ensure_errno!(
            manager.port.send(&manager.request(&direct(), smp.0)),
            EINVAL
        );
        let guid = port_guid(&pair.b, 1)?;
        ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1]), 1, guid)
    });
    area.check("nobody forwards behind a channel adapter: timeout", || {
        let pair = Pair::new()?;
        let smp = get(attr::NODE_INFO, &[1, 1]);
        ensure_timeout(&pair.a.manager(1)?, &direct(), &smp)
    });
    area.check("a LID that nobody has: timeout", || {
        let pair = Pair::new()?;
        let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
        ensure_timeout(&pair.a.manager(1)?, &smi(99), &smp)
    });
    area.check(
        "a link that is down: hop 0 is answered, hop 1 is not",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            pair.b.change(1, |port| port.flags = PORT_DOWN)?;
            let guid = port_guid(&pair.a, 1)?;
            ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[]), 1, guid)?;
            ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1]))?;
            pair.b.change(1, |port| port.flags = 0)?;
            let guid = port_guid(&pair.b, 1)?;
            ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1]), 1, guid)
        },
    );
    area.check("the other device is pulled out: timeout", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        pair.b.unplug()?;
        ensure_eq!(sysfs::state(&pair.a.ibdev, 1)?, "1: DOWN");
        ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1]))
    });

    area.check("a lost request: timeout; with a retry: an answer", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        let lose_one = Faults {
            mgmt_class: DIRECTED.into(),
            drop_next: 1,
            ..Faults::default()
        };
        pair.a.faults(lose_one)?;
        ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1]))?;
        ensure_eq!(pair.a.counters()?.dropped, 1);
        pair.a.faults(lose_one)?;
        let smp = get(attr::NODE_INFO, &[1]);
        let request = Packet::new(manager.agent, &direct(), smp.0.clone())
            .timeout(Duration::from_millis(300))
            .retries(20);
        manager.port.send(&request)?;
        answer(&manager.recv_tid(smp.tid())?)?;
        ensure_eq!(pair.a.counters()?.dropped, 2);
        Ok(())
    });
    area.check("a lost answer: timeout", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        pair.b.faults(Faults {
            mgmt_class: DIRECTED.into(),
            drop_next: 1,
            ..Faults::default()
        })?;
        ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1]))
    });
    area.check("frames that are delayed", || {
        ensure_answer_in_spite_of(|pair| {
            let late = Faults {
                delay_ms: 300,
                ..Faults::default()
            };
            pair.a.faults(late)?;
            pair.b.faults(late)?;
            Ok(())
        })
    });
    area.check("an answer that comes twice is given once", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        pair.b.faults(Faults {
            mgmt_class: DIRECTED.into(),
            duplicate_every: 1,
            ..Faults::default()
        })?;
        let smp = get(attr::NODE_INFO, &[1]);
        answer(&manager.ask(&direct(), smp.0.clone())?)?;
        ensure_eq!(pair.b.counters()?.duplicated, 1);
        manager.nothing_comes(smp.tid(), ktap::peers::QUIET)
    });
    area.check("sends that are completed late, after their answer", || {
        ensure_answer_in_spite_of(|pair| {
            pair.a.faults(Faults {
                complete_delay_ms: 400,
                ..Faults::default()
            })?;
            Ok(())
        })
    });
    area.check("a node that answers late", || {
        ensure_answer_in_spite_of(|pair| {
            pair.b.faults(Faults {
                process_mad_delay_ms: 400,
                ..Faults::default()
            })?;
            Ok(())
        })
    });
    area.check(
        "the hardware refuses a send: its errno, and nothing else",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            for (number, errno) in [
                (12, Errno::ENOMEM),
                (22, Errno::EINVAL),
                (11, Errno::EAGAIN),
            ] {
                pair.a.faults(Faults {
                    mgmt_class: DIRECTED.into(),
                    fail_send_at: 1,
                    fail_send_errno: number,
                    ..Faults::default()
                })?;
                let smp = get(attr::NODE_INFO, &[1]);
                let sent = manager
                    .port
                    .send(&manager.request(&direct(), smp.0.clone()));
                let got = sent.err().and_then(|e| e.errno());
                ensure_eq!(got, Some(errno));
                manager.nothing_comes(smp.tid(), Duration::from_millis(100))?;
                // The same transaction can be sent again.
                answer(&manager.ask(&direct(), smp.0)?)?;
            }
            Ok(())
        },
    );
    area.check("a send that fails on the wire counts as unanswered", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        pair.a.faults(Faults {
            mgmt_class: DIRECTED.into(),
            send_status_at: 1,
            ..Faults::default()
        })?;
        ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1]))?;
        answer(&manager.ask(&direct(), get(attr::NODE_INFO, &[1]).0)?)?;
        Ok(())
    });
    area.check(
        "a send that fails on the wire and waits for nothing: nothing comes",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            // General error, flushed, remote operation error.
            for status in [21, 5, 11] {
                pair.a.faults(Faults {
                    mgmt_class: DIRECTED.into(),
                    send_status_at: 1,
                    send_status: status,
                    ..Faults::default()
                })?;
                let smp = get(attr::NODE_INFO, &[1]);
                manager
                    .port
                    .send(&Packet::new(manager.agent, &direct(), smp.0.clone()))?;
                manager.nothing_comes(smp.tid(), ktap::peers::QUIET)?;
                answer(&manager.ask(&direct(), get(attr::NODE_INFO, &[1]).0)?)?;
            }
            Ok(())
        },
    );
    area.check(
        "a send that the hardware says was not answered: timeout, though it waits for nothing",
        || {
            let pair = Pair::new()?;
            let manager = pair.a.manager(1)?;
            pair.a.faults(Faults {
                mgmt_class: DIRECTED.into(),
                send_status_at: 1,
                send_status: 20,
                ..Faults::default()
            })?;
            let smp = get(attr::NODE_INFO, &[1]);
            manager
                .port
                .send(&Packet::new(manager.agent, &direct(), smp.0.clone()))?;
            let got = manager.recv_tid(smp.tid())?;
            ensure_eq!(got.header.status, TIMED_OUT);
            ensure_eq!(got.header.timeout_ms, 0);
            Ok(())
        },
    );
    area.check("the node's agent refuses a request: EINVAL", || {
        let device = lone(Shape::Ca)?;
        let manager = device.manager(1)?;
        device.faults(Faults {
            mgmt_class: DIRECTED.into(),
            refuse_next: 1,
            ..Faults::default()
        })?;
        let smp = get(attr::NODE_INFO, &[]);
        ensure_errno!(
            manager
                .port
                .send(&manager.request(&direct(), smp.0.clone())),
            EINVAL
        );
        answer(&manager.ask(&direct(), smp.0)?)?;
        Ok(())
    });
    area.check(
        "the own node's agent swallows a request: neither answer nor timeout",
        || {
            let device = lone(Shape::Ca)?;
            let manager = device.manager(1)?;
            device.faults(Faults {
                mgmt_class: DIRECTED.into(),
                consume_next: 1,
                ..Faults::default()
            })?;
            let smp = get(attr::NODE_INFO, &[]);
            let request = Packet::new(manager.agent, &direct(), smp.0.clone())
                .timeout(Duration::from_millis(100));
            manager.port.send(&request)?;
            manager.nothing_comes(smp.tid(), Duration::from_millis(600))?;
            answer(&manager.ask(&direct(), smp.0)?)?;
            Ok(())
        },
    );
    area.check("the other node's agent swallows a request: timeout", || {
        let pair = Pair::new()?;
        pair.b.faults(Faults {
            mgmt_class: DIRECTED.into(),
            consume_next: 1,
            ..Faults::default()
        })?;
        ensure_timeout(&pair.a.manager(1)?, &direct(), &get(attr::NODE_INFO, &[1]))
    });
    area.check(
        "a driver without process_mad: hop 0 goes out, and nobody answers",
        || {
            let device = Spec::new(Shape::Ca, 1).flags(NO_PROCESS_MAD).plug()?;
            ensure_timeout(&device.manager(1)?, &direct(), &get(attr::NODE_INFO, &[]))
        },
    );

    area.check(
        "SMInfo goes to the manager of the other port, which answers",
        || {
            let pair = Pair::new()?;
            let asks = pair.a.manager(1)?;
            for (class, to) in [(DIRECTED, direct()), (LID_ROUTED, smi(2))] {
                let answers = pair.b.agent(
                    1,
                    &Registration::class(class, 1)
                        .methods(&[Method::GET, Method::SET])
                        .qpn(0),
                )?;
                let smp = if class == DIRECTED {
                    get(attr::SM_INFO, &[1])
                } else {
                    Smp::lid_routed(Method::GET, attr::SM_INFO, 0)
                };
                asks.port.send(&asks.request(&to, smp.0.clone()))?;
                let got = answers.recv_attribute(class, attr::SM_INFO)?;
                ensure_eq!(got.tid()?.low(), smp.tid().low());
                ensure_eq!(got.mad_header()?.method, Method::GET);
                let mut mad = got.mad.clone();
                mad[3] = Method::GET_RESP.0;
                if class == DIRECTED {
                    mad[4] |= 0x80;
                }
                mad[Smp::DATA..Smp::DATA + 4].copy_from_slice(b"mine");
                answers
                    .port
                    .send(&Packet::new(answers.agent, &got.address(), mad))?;
                let data = answer(&asks.recv_tid(smp.tid())?)?;
                ensure!(data.starts_with(b"mine"), "class {class:#x}: {data:?}");
            }
            Ok(())
        },
    );
    area.check("SMInfo without a manager there: status 0x000c", || {
        let pair = Pair::new()?;
        let asks = pair.a.manager(1)?;
        let got = asks.ask(&direct(), get(attr::SM_INFO, &[1]).0)?;
        ensure_eq!(got.mad_header()?.status.get(), UNSUPPORTED | DIRECTION);
        Ok(())
    });
    area.check(
        "SMInfo at hop 0 goes to the manager of the own port",
        || {
            let device = lone(Shape::Ca)?;
            let wish = Registration::class(DIRECTED, 1)
                .methods(&[Method::GET])
                .qpn(0);
            let (answers, asks) = (device.agent(1, &wish)?, device.manager(1)?);
            let smp = get(attr::SM_INFO, &[]);
            let request = Packet::new(asks.agent, &direct(), smp.0.clone())
                .timeout(Duration::from_millis(200));
            asks.port.send(&request)?;
            let got = answers.recv_attribute(DIRECTED, attr::SM_INFO)?;
            ensure_eq!(got.tid()?.low(), smp.tid().low());
            ensure_eq!(got.header.status, 0);
            ensure_eq!(got.header.lid.get(), 0xffff);
            // ib_mad completes such a send when it is handed over: no timeout follows.
            asks.nothing_comes(smp.tid(), Duration::from_millis(800))
        },
    );
    area.check(
        "SMInfo at hop 0 without a manager: neither answer nor timeout",
        || {
            let device = lone(Shape::Ca)?;
            let asks = device.manager(1)?;
            let smp = get(attr::SM_INFO, &[]);
            let request = Packet::new(asks.agent, &direct(), smp.0.clone())
                .timeout(Duration::from_millis(100));
            asks.port.send(&request)?;
            asks.nothing_comes(smp.tid(), Duration::from_millis(600))
        },
    );
    area.check(
        "an agent of QP 1 gets answers from the own port's agent, and from no other",
        || {
            let pair = Pair::new()?;
            let agent = pair.a.agent(1, &Registration::send_only())?;
            let guid = port_guid(&pair.a, 1)?;
            ensure_node(&agent, &direct(), get(attr::NODE_INFO, &[]), 1, guid)?;
            // The answer comes to the queue pair that asked, and is thrown away there.
            ensure_timeout(&agent, &direct(), &get(attr::NODE_INFO, &[1]))?;
            let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
            ensure_timeout(&agent, &smi(2), &smp)
        },
    );
    area.check("a MAD of another class to QP 0 is for nobody", || {
        let pair = Pair::new()?;
        let wish = Peers::registration(VENDOR);
        let (sender, receiver) = (pair.a.agent(1, &wish)?, pair.b.agent(1, &wish)?);
        let mad = VendorMad::new(VENDOR, ktap::peers::OUI, Method::SEND, fresh_tid()).into_bytes();
        let tid = MadHdr::of(&mad)?.tid();
        sender
            .port
            .send(&Packet::new(sender.agent, &smi(2), mad.clone()))?;
        receiver.nothing_comes(tid, ktap::peers::QUIET)?;
        sender
            .port
            .send(&Packet::new(sender.agent, &Address::lid(2), mad))?;
        receiver.recv_tid(tid)?;
        Ok(())
    });
    area.check(
        "a switch's manager cannot send by directed route: EINVAL",
        || {
            let device = lone(Shape::Switch)?;
            let manager = device.manager(0)?;
            for path in [&[1][..], &[1, 1]] {
                let smp = get(attr::NODE_INFO, path);
                ensure_errno!(
                    manager.port.send(&manager.request(&direct(), smp.0)),
                    EINVAL
                );
            }
            Ok(())
        },
    );
    area.check("a trap reaches the agent for it, and no other", || {
        let pair = Pair::new()?;
        let wish = Registration::class(LID_ROUTED, 1).qpn(0);
        let traps = pair.b.agent(1, &wish.methods(&[Method::TRAP]))?;
        let others = pair.b.agent(1, &wish.methods(&[Method::REPORT]))?;
        let sender = pair.a.manager(1)?;
        let smp = Smp::lid_routed(Method::TRAP, 2, 0);
        sender
            .port
            .send(&Packet::new(sender.agent, &smi(2), smp.0.clone()))?;
        let got = traps.recv_tid(smp.tid())?;
        ensure_eq!(got.mad_header()?.method, Method::TRAP);
        ensure_eq!(got.header.lid.get(), 1);
        ensure_eq!(got.header.qpn.get(), 0);
        others.nothing_comes(smp.tid(), ktap::peers::QUIET)
    });

    area.check(
        "a directed route through a switch, and by LID when it forwards",
        || {
            let cable = std::process::id();
            let switch = Spec::new(Shape::Switch, 3)
                .name("vsw")
                .port(0, |port| port.lid = 9)
                .port(1, |port| port.cable = cable)
                .port(2, |port| port.cable = cable + 1_000_000)
                .plug()?;
            let a = Spec::new(Shape::Ca, 1).cabled(1, 1, cable).plug()?;
            let b = Spec::new(Shape::Ca, 1)
                .cabled(1, 2, cable + 1_000_000)
                .plug()?;
            let manager = a.manager(1)?;
            let in_switch = port_guid(&switch, 0)?;
            ensure_node(
                &manager,
                &direct(),
                get(attr::NODE_INFO, &[1]),
                2,
                in_switch,
            )?;
            let far = port_guid(&b, 1)?;
            ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1, 2]), 1, far)?;
            // Back to where it began, and a port that leads nowhere.
            let own = port_guid(&a, 1)?;
            ensure_node(&manager, &direct(), get(attr::NODE_INFO, &[1, 1]), 1, own)?;
            ensure_timeout(&manager, &direct(), &get(attr::NODE_INFO, &[1, 3]))?;
            let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
            ensure_timeout(&manager, &smi(2), &smp)?;
            let mut table = [0xff; 64];
            table[1] = 1;
            table[2] = 2;
            table[9] = 0;
            let smp = Smp::directed(Method::SET, attr::LINEAR_FORWARDING, 0, &[1]).data(&table);
            ensure_eq!(answer(&manager.ask(&direct(), smp.0)?)?, table);
            for (lid, want) in [(2, (1, far)), (9, (2, in_switch))] {
                let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
                ensure_node(&manager, &smi(lid), smp, want.0, want.1)?;
            }
            Ok(())
        },
    );
    area.check(
        "a switch that is no device of this host answers, too",
        || {
            let cable = std::process::id();
            let switch = Spec::new(Shape::Switch, 2)
                .flags(EXTERNAL)
                .port(0, |port| port.lid = 9)
                .port(1, |port| port.cable = cable)
                .plug()?;
            ensure_eq!(switch.ibdev, "");
            let adapter = Spec::new(Shape::Ca, 1).cabled(1, 1, cable).plug()?;
            let manager = adapter.manager(1)?;
            let got = answer(&manager.ask(&direct(), get(attr::NODE_INFO, &[1]).0)?)?;
            ensure_eq!(node_info(&got).0, 2);
            let mut table = [0xff; 64];
            table[1] = 1;
            table[9] = 0;
            let smp = Smp::directed(Method::SET, attr::LINEAR_FORWARDING, 0, &[1]).data(&table);
            answer(&manager.ask(&direct(), smp.0)?)?;
            let smp = Smp::lid_routed(Method::GET, attr::NODE_INFO, 0);
            ensure_node(&manager, &smi(9), smp, 2, node_info(&got).1)
        },
    );
    area.check("each port of a device has its own way", || {
        let cable = std::process::id();
        let two = Spec::new(Shape::Ca, 2)
            .cabled(1, 1, cable)
            .cabled(2, 2, cable + 1_000_000)
            .plug()?;
        let one = Spec::new(Shape::Ca, 1).cabled(1, 3, cable).plug()?;
        let other = Spec::new(Shape::Ca, 1)
            .cabled(1, 4, cable + 1_000_000)
            .plug()?;
        for (port, far) in [(1, &one), (2, &other)] {
            let manager = two.manager(port)?;
            let through = u8::try_from(port)?;
            let guid = port_guid(far, 1)?;
            ensure_node(
                &manager,
                &direct(),
                get(attr::NODE_INFO, &[through]),
                1,
                guid,
            )?;
            let smp = get(attr::NODE_INFO, &[3 - through]);
            ensure_errno!(
                manager.port.send(&manager.request(&direct(), smp.0)),
                EINVAL
            );
        }
        Ok(())
    });
    area.check(
        "the device goes while sends and frames are late: at once, and quietly",
        || {
            let pair = Pair::new()?;
            let managers = [pair.a.manager(1)?, pair.b.manager(1)?];
            let late = Faults {
                mgmt_class: DIRECTED.into(),
                delay_ms: 3_000_000,
                complete_delay_ms: 3_000_000,
                ..Faults::default()
            };
            pair.a.faults(late)?;
            pair.b.faults(Faults {
                complete_delay_ms: 0,
                ..late
            })?;
            for _ in 0..20 {
                for manager in &managers {
                    let smp = get(attr::NODE_INFO, &[1]);
                    manager.port.send(&manager.request(&direct(), smp.0))?;
                }
            }
            let begin = Instant::now();
            pair.a.unplug()?;
            pair.b.unplug()?;
            ensure!(
                begin.elapsed() < ktap::peers::SOON,
                "it took {:?}",
                begin.elapsed()
            );
            Ok(())
        },
    );
    area.check("200 requests in a row, and nothing is left of them", || {
        let pair = Pair::new()?;
        let manager = pair.a.manager(1)?;
        for number in 0..200 {
            let path: &[u8] = if number % 3 == 0 { &[] } else { &[1] };
            answer(&manager.ask(&direct(), get(attr::NODE_INFO, path).0)?)?;
        }
        drop(manager);
        // The subnet administration's client keeps one handle, on the subnet manager.
        wait_until(
            "all address handles are destroyed",
            ktap::peers::SOON,
            || {
                pair.a.counters().is_ok_and(|now| {
                    now.ahs_made - now.ahs_destroyed <= 1 && now.sends == now.completions
                })
            },
        )
    });

    Module::run(area)
}
