// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `iblid`: addresses of InfiniBand and OPA. MADs of general services by LID, path bits, P_Keys,
//! global routes on InfiniBand, jumbo MADs, devices with several ports, many devices, and names that
//! change.

#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;

use ktap::peers::{CLASS, OUI, QUIET, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use nix::sys::stat::{major, minor};
use selftests::task::Task;
use selftests::vhca::{
    answer, attr, direct, issms, Agent, Faults, Frame, Module, Pair, PortParams, Shape, Smp, Spec,
    SpecExt, Vhca, VhcaExt, DIRECTION, PORT_DOWN, TIMED_OUT, USER_SMA,
};
use umad::{addr::Grh, sysfs, PkeyIndex};

/// Two agents of the class [`CLASS`].
struct Talkers {
    pair: Pair,
    a: Agent,
    b: Agent,
}

impl Talkers {
    fn on(pair: Pair) -> Outcome<Self> {
        let wish = Peers::registration(CLASS);
        Ok(Self {
            a: pair.a.agent(1, &wish)?,
            b: pair.b.agent(1, &wish)?,
            pair,
        })
    }

    fn new() -> Outcome<Self> {
        Self::on(Pair::new()?)
    }

    fn with(change: impl Fn(u32, PortParams) -> PortParams) -> Outcome<Self> {
        Self::on(Pair::with(Shape::Ca, change)?)
    }

    /// A MAD that wants no answer from `a`, received by `b`.
    fn deliver(&self, to: &Address) -> Outcome<Packet> {
        let mad = send_mad();
        let tid = MadHdr::of(&mad)?.tid();
        self.a.port.send(&Packet::new(self.a.agent, to, mad))?;
        self.b.recv_tid(tid)
    }

    /// The same, but it must not arrive.
    fn lose(&self, to: &Address) -> Outcome {
        let mad = send_mad();
        let tid = MadHdr::of(&mad)?.tid();
        self.a.port.send(&Packet::new(self.a.agent, to, mad))?;
        self.b.nothing_comes(tid, QUIET)
    }

    /// A Get from `a`, answered by `b` to where `back` says, given where it seems to come from; returns
    /// what `a` then reads.
    fn exchange(
        &self,
        to: &Address,
        timeout: Duration,
        back: impl FnOnce(Address) -> Address,
    ) -> Outcome<Packet> {
        let mad = vendor(Method::GET);
        let tid = MadHdr::of(&mad)?.tid();
        let request = Packet::new(self.a.agent, to, mad).timeout(timeout);
        self.a.port.send(&request)?;
        let got = self.b.recv_tid(tid)?;
        let mut mad = got.mad.clone();
        mad[3] = Method::GET_RESP.0;
        let address = Address {
            qkey: Address::GSI_QKEY,
            ..back(got.address())
        };
        self.b
            .port
            .send(&Packet::new(self.b.agent, &address, mad))?;
        self.a.recv_tid(tid)
    }

    fn round_trip(&self, to: &Address) -> Outcome<Packet> {
        let got = self.exchange(to, SOON / 2, |from| from)?;
        ensure_eq!(got.header.status, 0);
        ensure_eq!(got.mad_header()?.method, Method::GET_RESP);
        Ok(got)
    }
}

fn vendor(method: Method) -> Vec<u8> {
    VendorMad::new(CLASS, OUI, method, fresh_tid()).into_bytes()
}

fn send_mad() -> Vec<u8> {
    vendor(Method::SEND)
}

/// A jumbo MAD of so many bytes.
fn jumbo(len: usize) -> Vec<u8> {
    let mut mad = send_mad();
    mad[0] = 0x80;
    mad.truncate(len);
    while mad.len() < len {
        let next = u8::try_from(mad.len() % 251).unwrap_or(0);
        mad.push(next);
    }
    mad
}

/// Reads a packet of any length.
fn read_long(port: &Port) -> Outcome<Packet> {
    ensure!(
        port.poll(PollFlags::POLLIN, SOON)?
            .contains(PollFlags::POLLIN),
        "no packet came"
    );
    let mut buf = vec![0; 4096];
    let len = port.read(&mut buf)?;
    Ok(Packet::from_bytes(&buf[..len], port.layout())?)
}

fn with_grh(gid: Gid, gid_index: u8, lid: u16) -> Address {
    Address {
        grh: Some(Grh {
            gid,
            gid_index,
            hop_limit: 9,
            traffic_class: 0x5a,
            flow_label: 0xa_bcde,
        }),
        ..Address::lid(lid)
    }
}

fn pkeys(list: &[u16]) -> [u16; 16] {
    let mut table = [0; 16];
    table[..list.len()].copy_from_slice(list);
    table
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("iblid");

    for layout in [Layout::Old, Layout::New] {
        area.check(
            format!("a MAD by LID: what its header says ({layout:?})"),
            move || {
                let talkers = Talkers::new()?;
                let port = Port::options()
                    .layout(layout)
                    .open(talkers.pair.b.umad(1)?)?;
                let wish = Peers::registration(CLASS + 1);
                let agent = match layout {
                    Layout::Old => port.register(&wish)?,
                    Layout::New => port.register2(&wish)?,
                };
                let mad = VendorMad::new(CLASS + 1, OUI, Method::SEND, fresh_tid()).into_bytes();
                let to = Address {
                    sl: 5,
                    ..Address::lid(2)
                };
                talkers
                    .a
                    .port
                    .send(&Packet::new(talkers.a.agent, &to, mad.clone()))?;
                let got = port.recv_timeout(SOON)?;
                ensure_eq!(got.agent, agent);
                ensure_eq!(got.header.lid.get(), 1);
                ensure_eq!(got.header.qpn.get(), 1);
                ensure_eq!(got.header.sl, 5);
                ensure_eq!(got.header.path_bits, 0);
                ensure_eq!(got.header.grh_present, 0);
                ensure_eq!(got.header.gid, [0; 16]);
                ensure_eq!(got.header.hop_limit, 0);
                ensure_eq!(got.header.gid_index, 0);
                ensure_eq!(got.header.flow_label.get(), 0);
                ensure_eq!(got.header.status, 0);
                ensure_eq!(got.pkey_index, 0);
                ensure_eq!(
                    usize::try_from(got.header.length)?,
                    layout.header_len() + 256
                );
                ensure_eq!(got.mad[16..], mad[16..]);
                Ok(())
            },
        );
    }
    area.check("round trips by LID, both ways", || {
        let talkers = Talkers::new()?;
        for _ in 0..20 {
            let got = talkers.round_trip(&Address::lid(2))?;
            ensure_eq!(got.header.lid.get(), 2);
        }
        let back = Talkers {
            a: talkers.b,
            b: talkers.a,
            pair: talkers.pair,
        };
        let got = back.round_trip(&Address::lid(1))?;
        ensure_eq!(got.header.lid.get(), 1);
        Ok(())
    });
    area.check("the own LID: it comes back", || {
        let talkers = Talkers::new()?;
        let other = talkers.pair.a.agent(1, &Peers::registration(CLASS + 1))?;
        let mad = VendorMad::new(CLASS + 1, OUI, Method::SEND, fresh_tid()).into_bytes();
        let tid = MadHdr::of(&mad)?.tid();
        talkers
            .a
            .port
            .send(&Packet::new(talkers.a.agent, &Address::lid(1), mad))?;
        ensure_eq!(other.recv_tid(tid)?.header.lid.get(), 1);
        Ok(())
    });
    area.check("LIDs that nobody has: timeout", || {
        let talkers = Talkers::new()?;
        for lid in [0, 3, 0xbfff, 0xc001, 0xffff] {
            let mad = vendor(Method::GET);
            let tid = MadHdr::of(&mad)?.tid();
            let request = Packet::new(talkers.a.agent, &Address::lid(lid), mad)
                .timeout(Duration::from_millis(100));
            talkers.a.port.send(&request)?;
            let got = talkers.a.recv_tid(tid)?;
            ensure_eq!(got.header.status, TIMED_OUT, "LID {lid:#x}");
        }
        Ok(())
    });
    area.check("the LID changes while agents are there", || {
        let talkers = Talkers::new()?;
        talkers.round_trip(&Address::lid(2))?;
        talkers.pair.b.change(1, |port| port.lid = 300)?;
        talkers.lose(&Address::lid(2))?;
        let got = talkers.round_trip(&Address::lid(300))?;
        ensure_eq!(got.header.lid.get(), 300);
        Ok(())
    });
    area.check("the link goes down and comes up again", || {
        let talkers = Talkers::new()?;
        talkers.pair.b.change(1, |port| port.flags = PORT_DOWN)?;
        talkers.lose(&Address::lid(2))?;
        talkers.pair.b.change(1, |port| port.flags = 0)?;
        talkers.round_trip(&Address::lid(2))?;
        Ok(())
    });

    area.check(
        "LMC: each of the LIDs reaches the port, which is told the path bits",
        || {
            let talkers = Talkers::with(|lid, mut port| {
                if lid == 2 {
                    port.lid = 8;
                    port.lmc = 2;
                }
                port
            })?;
            for bits in 0..4 {
                let got = talkers.deliver(&Address::lid(8 + u16::from(bits)))?;
                ensure_eq!(got.header.path_bits, bits);
                ensure_eq!(got.header.lid.get(), 1);
            }
            talkers.lose(&Address::lid(7))?;
            talkers.lose(&Address::lid(12))
        },
    );
    area.check("LMC: path bits choose the LID that it comes from", || {
        let talkers = Talkers::with(|lid, mut port| {
            if lid == 1 {
                port.lid = 16;
                port.lmc = 3;
            }
            port
        })?;
        for bits in 0..8 {
            let to = Address {
                path_bits: bits,
                ..Address::lid(2)
            };
            let got = talkers.deliver(&to)?;
            ensure_eq!(got.header.lid.get(), 16 + u16::from(bits));
            let got = talkers.round_trip(&to)?;
            ensure_eq!(got.header.path_bits, bits);
        }
        Ok(())
    });
    area.check("LMC: an answer to another of the LIDs is none", || {
        let talkers = Talkers::with(|lid, mut port| {
            if lid == 1 {
                port.lid = 16;
                port.lmc = 1;
            }
            port
        })?;
        // ib_mad compares with the LMC in its cache, which follows the port a little later.
        wait_until("ib_mad knows the LMC", SOON, || {
            talkers
                .exchange(&Address::lid(2), Duration::from_millis(150), |from| {
                    Address { lid: 17, ..from }
                })
                .is_ok_and(|got| got.header.status == TIMED_OUT)
        })?;
        let got = talkers.exchange(&Address::lid(2), SOON / 2, |from| Address {
            lid: 16,
            ..from
        })?;
        ensure_eq!(got.header.status, 0);
        Ok(())
    });

    area.check(
        "a P_Key table with holes: the index is that of the receiver",
        || {
            let talkers = Talkers::with(|lid, mut port| {
                port.pkeys = if lid == 1 {
                    pkeys(&[0xffff, 0, 0x8005, 0, 0, 0x8007])
                } else {
                    pkeys(&[
                        0x8007, 0, 0, 0xffff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x8005,
                    ])
                };
                port
            })?;
            for (from, to) in [(0, 3), (2, 15), (5, 0)] {
                let got = talkers.deliver(&Address {
                    pkey_index: PkeyIndex(from),
                    ..Address::lid(2)
                })?;
                ensure_eq!(got.pkey_index, to, "P_Key index {from}");
                ensure_eq!(
                    sysfs::pkey(&talkers.pair.a.ibdev, 1, from.into())?,
                    sysfs::pkey(&talkers.pair.b.ibdev, 1, got.pkey_index.into())?
                );
            }
            // Answered with the P_Key that it came with.
            let got = talkers.round_trip(&Address {
                pkey_index: PkeyIndex(2),
                ..Address::lid(2)
            })?;
            ensure_eq!(got.pkey_index, 2);
            Ok(())
        },
    );
    area.check(
        "a hole, and a P_Key of another partition: not received",
        || {
            let talkers = Talkers::with(|lid, mut port| {
                port.pkeys = pkeys(if lid == 1 {
                    &[0xffff, 0, 0x8009]
                } else {
                    &[0xffff]
                });
                port
            })?;
            for index in [1, 2] {
                talkers.lose(&Address {
                    pkey_index: PkeyIndex(index),
                    ..Address::lid(2)
                })?;
            }
            ensure_eq!(talkers.pair.b.counters()?.pkey_violations, 2);
            Ok(())
        },
    );
    area.check("limited members do not hear each other", || {
        let talkers = Talkers::with(|lid, mut port| {
            port.pkeys = pkeys(if lid == 1 {
                &[0xffff, 0x0011, 0x8022]
            } else {
                &[0xffff, 0x0011, 0x0022]
            });
            port
        })?;
        let of = |index| Address {
            pkey_index: PkeyIndex(index),
            ..Address::lid(2)
        };
        talkers.lose(&of(1))?;
        ensure_eq!(talkers.deliver(&of(2))?.pkey_index, 2);
        Ok(())
    });
    area.check("a P_Key index behind the table: EINVAL", || {
        let talkers = Talkers::new()?;
        for index in [16, 0xffff] {
            let to = Address {
                pkey_index: PkeyIndex(index),
                ..Address::lid(2)
            };
            let packet = Packet::new(talkers.a.agent, &to, send_mad());
            ensure_errno!(talkers.a.port.send(&packet), EINVAL, "index {index}");
        }
        talkers.deliver(&Address::lid(2))?;
        Ok(())
    });
    area.check("the old layout has no P_Key index: it is 0", || {
        let talkers = Talkers::with(|_, mut port| {
            port.pkeys = pkeys(&[0xffff, 0x8005]);
            port
        })?;
        let port = Port::options()
            .layout(Layout::Old)
            .open(talkers.pair.a.umad(1)?)?;
        let agent = port.register(&Registration::send_only())?;
        let to = Address {
            pkey_index: PkeyIndex(1),
            ..Address::lid(2)
        };
        let packet = Packet::new(agent, &to, send_mad());
        port.send(&packet)?;
        ensure_eq!(talkers.b.recv_tid(packet.tid()?)?.pkey_index, 0);
        Ok(())
    });

    area.check("a GRH on InfiniBand: what the receiver is told", || {
        let talkers = Talkers::new()?;
        let (from, to) = (
            sysfs::gid(&talkers.pair.a.ibdev, 1, 0)?,
            sysfs::gid(&talkers.pair.b.ibdev, 1, 0)?,
        );
        let got = talkers.deliver(&with_grh(to, 0, 2))?;
        ensure_eq!(got.header.grh_present, 1);
        ensure_eq!(Gid(got.header.gid), from);
        ensure_eq!(got.header.gid_index, 0);
        ensure_eq!(got.header.traffic_class, 0x5a);
        ensure_eq!(got.header.flow_label.get(), 0xa_bcde);
        // ib_core answers with the highest, whatever came.
        ensure_eq!(got.header.hop_limit, 255);
        ensure_eq!(got.header.lid.get(), 1);
        let got = talkers.round_trip(&with_grh(to, 0, 2))?;
        ensure_eq!(Gid(got.header.gid), to);
        Ok(())
    });
    area.check("a GRH from another GID of the port, to another one", || {
        let talkers = Talkers::new()?;
        let manager = talkers.pair.a.manager(1)?;
        for (path, device) in [(&[][..], &talkers.pair.a), (&[1], &talkers.pair.b)] {
            let mut guids = [0; 64];
            guids[24..32].copy_from_slice(&[2, 0, 0, 0, 0, 0, 7, u8::try_from(path.len())?]);
            let smp = Smp::directed(Method::SET, attr::GUID_INFO, 0, path).data(&guids);
            answer(&manager.ask(&direct(), smp.0)?)?;
            wait_until("the GID is in the table", SOON, || {
                sysfs::gid(&device.ibdev, 1, 3).is_ok_and(|gid| !gid.is_zero())
            })?;
        }
        let (from, to) = (
            sysfs::gid(&talkers.pair.a.ibdev, 1, 3)?,
            sysfs::gid(&talkers.pair.b.ibdev, 1, 3)?,
        );
        // ib_core's table follows the port's own a little later.
        wait_until("the GID can be sent from", SOON, || {
            talkers
                .deliver(&with_grh(to, 3, 2))
                .is_ok_and(|got| got.header.gid_index == 3 && Gid(got.header.gid) == from)
        })?;
        talkers.round_trip(&with_grh(to, 3, 2))?;
        Ok(())
    });
    area.check(
        "a GRH from a GID index that is empty: ENODATA; behind the table: EINVAL",
        || {
            let talkers = Talkers::new()?;
            let to = sysfs::gid(&talkers.pair.b.ibdev, 1, 0)?;
            let send = |index| {
                let packet = Packet::new(talkers.a.agent, &with_grh(to, index, 2), send_mad());
                talkers.a.port.send(&packet)
            };
            for index in [1, 7] {
                ensure_errno!(send(index), ENODATA, "index {index}");
            }
            for index in [8, 255] {
                ensure_errno!(send(index), EINVAL, "index {index}");
            }
            Ok(())
        },
    );
    area.check("an answer without the request's GRH is none", || {
        let talkers = Talkers::new()?;
        let to = sysfs::gid(&talkers.pair.b.ibdev, 1, 0)?;
        let got = talkers.exchange(&with_grh(to, 0, 2), Duration::from_millis(200), |from| {
            Address { grh: None, ..from }
        })?;
        ensure_eq!(got.header.status, TIMED_OUT);
        Ok(())
    });

    area.check("OPA: the upper half of a LID is cut off", || {
        let pair = Pair::with(Shape::Opa, |lid, mut port| {
            if lid == 1 {
                port.lid = 0x0003_0021;
            }
            port
        })?;
        let talkers = Talkers::on(pair)?;
        let mut mark = ktap::kmsg::Mark::now()?;
        ensure_eq!(talkers.deliver(&Address::lid(2))?.header.lid.get(), 0x21);
        ensure!(mark.with("WARNING")?.is_empty(), "the kernel warns");
        Ok(())
    });
    for len in [24, 40, 255, 256, 257, 300, 1024, 2047, 2048] {
        area.check(
            format!("OPA: a MAD of {len} bytes arrives as long as it is"),
            move || {
                let talkers = Talkers::on(Pair::of(Shape::Opa)?)?;
                let mad = jumbo(len);
                // Without an OUI it is for nobody here.
                if len < VendorMad::DATA {
                    let packet = Packet::new(talkers.a.agent, &Address::lid(2), mad);
                    let sent = talkers.a.port.send(&packet).err().and_then(|e| e.errno());
                    ensure!(matches!(sent, None | Some(Errno::EINVAL)), "{sent:?}");
                    return Ok(());
                }
                let packet = Packet::new(talkers.a.agent, &Address::lid(2), mad.clone());
                talkers.a.port.send(&packet)?;
                let got = read_long(&talkers.b.port)?;
                ensure_eq!(got.mad.len(), len);
                ensure_eq!(got.mad[16..], mad[16..]);
                ensure_eq!(usize::try_from(got.header.length)?, 64 + len);
                Ok(())
            },
        );
    }
    area.check(
        "OPA: longer than a jumbo MAD is EINVAL; so is a long MAD of the usual version",
        || {
            let talkers = Talkers::on(Pair::of(Shape::Opa)?)?;
            let mut usual = jumbo(257);
            usual[0] = 1;
            for mad in [jumbo(2049), jumbo(5000), usual] {
                let packet = Packet::new(talkers.a.agent, &Address::lid(2), mad);
                ensure_errno!(talkers.a.port.send(&packet), EINVAL);
            }
            Ok(())
        },
    );
    area.check("InfiniBand: a jumbo MAD is EINVAL", || {
        let talkers = Talkers::new()?;
        for len in [257, 2048] {
            let packet = Packet::new(talkers.a.agent, &Address::lid(2), jumbo(len));
            ensure_errno!(talkers.a.port.send(&packet), EINVAL, "{len} bytes");
        }
        Ok(())
    });
    area.check("OPA: a MAD of the usual version is 256 bytes", || {
        let talkers = Talkers::on(Pair::of(Shape::Opa)?)?;
        ensure_eq!(talkers.deliver(&Address::lid(2))?.mad.len(), 256);
        talkers.round_trip(&Address::lid(2))?;
        Ok(())
    });
    area.check(
        "OPA: a buffer too small for a jumbo MAD: EINVAL, and it stays",
        || {
            let talkers = Talkers::on(Pair::of(Shape::Opa)?)?;
            let packet = Packet::new(talkers.a.agent, &Address::lid(2), jumbo(1000));
            talkers.a.port.send(&packet)?;
            ensure!(!talkers.b.port.poll(PollFlags::POLLIN, SOON)?.is_empty());
            for len in [63, 64, 320, 64 + 999] {
                let mut buf = vec![0; len];
                ensure_errno!(talkers.b.port.read(&mut buf), EINVAL, "{len} bytes");
            }
            ensure_eq!(read_long(&talkers.b.port)?.mad.len(), 1000);
            Ok(())
        },
    );
    area.check("OPA: a directed-route SMP of its own form", || {
        let pair = Pair::of(Shape::Opa)?;
        let manager = pair.a.manager(1)?;
        for path in [&[][..], &[1]] {
            let usual = Smp::directed(Method::GET, attr::NODE_DESCRIPTION, 0, path);
            let mut mad = vec![0; 2048];
            mad[..24].copy_from_slice(&usual.0[..24]);
            (mad[0], mad[2]) = (0x80, 0x80);
            mad[32..40].fill(0xff);
            for (to, from) in mad[41..104].iter_mut().zip(path) {
                *to = *from;
            }
            let packet = Packet::new(manager.agent, &direct(), mad).timeout(SOON / 2);
            manager.port.send(&packet)?;
            let got = read_long(&manager.port)?;
            ensure_eq!(got.tid()?.low(), usual.tid().low());
            ensure_eq!(got.header.status, 0);
            ensure_eq!(got.mad_header()?.status.get(), DIRECTION);
            let owner = if path.is_empty() { &pair.a } else { &pair.b };
            ensure!(
                got.mad[176..].starts_with(owner.ibdev.as_bytes()),
                "path {path:?}: {:?}",
                &got.mad[176..200]
            );
        }
        Ok(())
    });

    area.check(
        "two ports of one device, one cable: MADs go to the port that they are for",
        || {
            let cable = std::process::id();
            let device = Spec::new(Shape::Ca, 2)
                .cabled(1, 1, cable)
                .cabled(2, 2, cable)
                .plug()?;
            let wish = Peers::registration(CLASS);
            let (one, two) = (device.agent(1, &wish)?, device.agent(2, &wish)?);
            for (from, to, lid) in [(&one, &two, 2), (&two, &one, 1)] {
                let mad = send_mad();
                let tid = MadHdr::of(&mad)?.tid();
                from.port
                    .send(&Packet::new(from.agent, &Address::lid(lid), mad))?;
                ensure_eq!(to.recv_tid(tid)?.header.lid.get(), 3 - lid);
                from.nothing_comes(tid, Duration::from_millis(50))?;
            }
            Ok(())
        },
    );
    area.check("eight ports: umad devices in order, each its own", || {
        let device = Spec::new(Shape::Ca, 8).plug()?;
        let mut last = None;
        for port in 1..=8 {
            let number = device.umad(port)?;
            ensure!(
                last.is_none_or(|before| before < number),
                "port {port}: umad{number}"
            );
            last = Some(number);
            ensure_eq!(sysfs::ibdev(number)?, device.ibdev);
            ensure_eq!(sysfs::port(number)?, port);
        }
        Ok(())
    });
    area.check("a rename: sysfs follows, open files do not mind", || {
        let talkers = Talkers::new()?;
        let number = talkers.pair.a.umad(1)?;
        run(&format!(
            "rdma dev set {} name vrenamed",
            talkers.pair.a.ibdev
        ))?;
        ensure_eq!(sysfs::ibdev(number)?, "vrenamed");
        ensure_eq!(sysfs::port(number)?, 1);
        talkers.round_trip(&Address::lid(2))?;
        let port = Port::open(number)?;
        port.register2(&Registration::send_only())?;
        Ok(())
    });
    area.check(
        "72 ports: numbers go on behind 63, with a second major",
        || {
            let devices: Vec<Vhca> = (0..9)
                .map(|_| Spec::new(Shape::Ca, 8).plug())
                .collect::<Result<_, _>>()?;
            let mut seen = 0;
            let mut second = None;
            for device in &devices {
                for port in 1..=8 {
                    let number = device.umad(port)?;
                    let node = std::fs::metadata(umad::port::node(number))?.rdev();
                    let issm = std::fs::metadata(device.issm(port)?)?.rdev();
                    let (umad, issm) = ((major(node), minor(node)), (major(issm), minor(issm)));
                    let n = u64::from(number);
                    if number < 64 {
                        ensure_eq!((umad, issm), ((231, n), (231, 64 + n)), "umad{number}");
                    } else {
                        seen += 1;
                        let major = *second.get_or_insert(umad.0);
                        ensure!(major != 231);
                        ensure_eq!(umad, (major, n - 64), "umad{number}");
                        ensure_eq!(issm.0, major, "issm{number}");
                        ensure!(issm.1 >= 8128, "issm{number} has minor {}", issm.1);
                        ensure_eq!(issm.1, 8128 + n - 64, "issm{number}");
                        let port = Port::open(number)?;
                        port.register2(&Registration::send_only())?;
                    }
                }
                ensure_eq!(issms(&device.ibdev)?.len(), 8);
            }
            ensure!(seen >= 8, "{seen} ports behind umad63");
            Ok(())
        },
    )
    .timeout(240);

    area.check(
        "a fabric in user space: a request is seen there, and answered from there",
        || {
            let device = Spec::new(Shape::Ca, 1)
                .port(1, |port| port.lid = 1)
                .in_user_space()
                .plug()?;
            let agent = device.agent(1, &Registration::send_only())?;
            let mad = vendor(Method::GET);
            let tid = MadHdr::of(&mad)?.tid();
            let to = Address {
                sl: 3,
                ..Address::lid(77)
            };
            agent.port.send(&agent.request(&to, mad.clone()))?;
            // ib_core asks things of its own.
            let frame = device.frame(tid, SOON)?;
            ensure_eq!(
                (frame.dlid, frame.slid, frame.dest_qp, frame.src_qp),
                (77, 1, 1, 1)
            );
            ensure_eq!((frame.sl, frame.pkey), (3, 0xffff));
            ensure_eq!(frame.mad[16..], mad[16..]);
            let mut reply = Frame {
                dlid: frame.slid,
                slid: frame.dlid,
                ..frame.clone()
            };
            reply.mad[3] = Method::GET_RESP.0;
            device.write_frame(&reply)?;
            let got = agent.recv_tid(tid)?;
            ensure_eq!(got.header.lid.get(), 77);
            ensure_eq!(got.header.sl, 3);
            Ok(())
        },
    );
    area.check("a fabric in user space hears of IsSM", || {
        let device = Spec::new(Shape::Ca, 1).in_user_space().plug()?;
        let path = device.issm(1)?;
        let mut held = Some(std::fs::File::open(&path)?);
        for want in [true, false] {
            if !want {
                held = None;
            }
            let frame = loop {
                let frame = device.read_frame(SOON)?;
                // ib_cm sets a bit of its own when the device comes.
                if frame.kind == Frame::CAP_MASK
                    && (frame.dlid & selftests::vhca::IS_SM != 0) == want
                {
                    break frame;
                }
            };
            ensure_eq!(frame.port, 1);
        }
        ensure!(held.is_none());
        Ok(())
    });
    area.check("a fabric in user space answers for the node, too", || {
        let device = Spec::new(Shape::Ca, 1)
            .in_user_space()
            .flags(USER_SMA)
            .plug()?;
        let manager = device.manager(1)?;
        let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[]);
        let request = manager.request(&direct(), smp.0.clone());
        let mut asker = selftests::task::Task::start(move || {
            let sent = manager.port.send(&request).map_err(|e| e.errno());
            (sent, manager)
        });
        let frame = loop {
            let frame = device.read_frame(SOON)?;
            if frame.kind == Frame::LOCAL {
                break frame;
            }
        };
        ensure_eq!(MadHdr::of(&frame.mad)?.tid().low(), smp.tid().low());
        ensure!(!asker.within(Duration::from_millis(200)), "it did not wait");
        let mut reply = frame.clone();
        reply.mad[3] = Method::GET_RESP.0;
        reply.mad[4] |= 0x80;
        reply.mad[Smp::DATA..Smp::DATA + 4].copy_from_slice(b"from");
        device.write_frame(&reply)?;
        let Some((Ok(()), manager)) = asker.result(SOON) else {
            return Err("the write() did not succeed".into());
        };
        let data = answer(&manager.recv_tid(smp.tid())?)?;
        ensure!(data.starts_with(b"from"), "{data:?}");
        Ok(())
    });
    area.check(
        "frames lost, late and twice: a MAD arrives as often as it should",
        || {
            let talkers = Talkers::new()?;
            let only = u32::from(CLASS);
            for (faults, times) in [
                (
                    Faults {
                        mgmt_class: only,
                        drop_next: 1,
                        ..Faults::default()
                    },
                    0,
                ),
                (
                    Faults {
                        mgmt_class: only,
                        delay_ms: 100,
                        ..Faults::default()
                    },
                    1,
                ),
                (
                    Faults {
                        mgmt_class: only,
                        duplicate_every: 1,
                        ..Faults::default()
                    },
                    2,
                ),
            ] {
                talkers.pair.a.faults(faults)?;
                let mad = send_mad();
                let tid = MadHdr::of(&mad)?.tid();
                talkers
                    .a
                    .port
                    .send(&Packet::new(talkers.a.agent, &Address::lid(2), mad))?;
                for _ in 0..times {
                    talkers.b.recv_tid(tid)?;
                }
                talkers.b.nothing_comes(tid, QUIET)?;
            }
            Ok(())
        },
    );

    area.check(
        "devices are pulled out under traffic, with frames lost, late and twice",
        || {
            for round in 0..12 {
                let talkers = Talkers::new()?;
                for device in [&talkers.pair.a, &talkers.pair.b] {
                    device.faults(Faults {
                        drop_every: 7,
                        duplicate_every: 5,
                        delay_ms: round % 3,
                        complete_delay_ms: round % 4,
                        ..Faults::default()
                    })?;
                }
                let Talkers { pair, a, b } = talkers;
                let senders: Vec<_> = [(a, 2), (b, 1)]
                    .into_iter()
                    .map(|(agent, lid)| {
                        Task::start(move || loop {
                            let packet = Packet::new(agent.agent, &Address::lid(lid), send_mad());
                            if let Err(e) = agent.port.send(&packet) {
                                return e.errno();
                            }
                        })
                    })
                    .collect();
                std::thread::sleep(Duration::from_millis(100));
                let Pair { a, b } = pair;
                let sent = a.counters()?.delivered + b.counters()?.delivered;
                ensure!(sent > 0, "nothing was delivered");
                for device in if round % 2 == 0 { [a, b] } else { [b, a] } {
                    device.unplug()?;
                }
                for mut sender in senders {
                    let got = sender.result(SOON).copied();
                    ensure_eq!(got, Some(Some(Errno::EIO)), "what a send() ended with");
                }
            }
            Ok(())
        },
    );
    area.check("the test equipment refuses what makes no sense", || {
        let refused = |spec: Spec| spec.create().err();
        for ports in [0, 9] {
            ensure_eq!(refused(Spec::new(Shape::Ca, ports)), Some(Errno::EINVAL));
        }
        for flags in [4, 0x8000_0000] {
            ensure_eq!(
                refused(Spec::new(Shape::Ca, 1).flags(flags)),
                Some(Errno::EINVAL)
            );
            let port = Spec::new(Shape::Ca, 1).port(1, |port| port.flags = flags);
            ensure_eq!(refused(port), Some(Errno::EINVAL));
        }
        for name in ["a/b", "a%d", "a b"] {
            ensure_eq!(
                refused(Spec::new(Shape::Ca, 1).name(name)),
                Some(Errno::EINVAL)
            );
        }
        let lmc = Spec::new(Shape::Ca, 1).port(1, |port| port.lmc = 8);
        ensure_eq!(refused(lmc), Some(Errno::EINVAL));
        let pair = Pair::new()?;
        let third = Spec::new(Shape::Ca, 1).cabled(1, 3, std::process::id());
        ensure_eq!(refused(third), Some(Errno::EBUSY));
        let taken = Spec::new(Shape::Ca, 1).name(&pair.a.ibdev);
        ensure_eq!(refused(taken), Some(Errno::ENFILE));
        for faults in [
            Faults {
                mgmt_class: 256,
                ..Faults::default()
            },
            Faults {
                send_status: 22,
                ..Faults::default()
            },
            Faults {
                delay_ms: u32::MAX,
                ..Faults::default()
            },
            Faults {
                modify_port_errno: 4096,
                ..Faults::default()
            },
        ] {
            ensure!(pair.a.faults(faults).is_err(), "{faults:?}");
        }
        ensure_errno!(pair.a.port(2), EINVAL);
        Ok(())
    });

    Module::run(area)
}
