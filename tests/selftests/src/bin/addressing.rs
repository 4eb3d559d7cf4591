// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `addressing`: the address fields of the header, out and in, on RoCE.
//!
//! What RoCE and Soft-RoCE do whatever umad does: the Q_Key on the wire is always the well-known
//! one, the LID is 0, the hop limit that is received is the route's, the flow label arrives as 0.

use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use umad::{sysfs, PkeyIndex};

// A packet from `a` to that address.
fn to(peers: &Peers, address: &Address) -> Packet {
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
    Packet::new(peers.a.agent, address, mad)
}

// Sends to that address and receives at `b`.
fn arrives(peers: &Peers, address: &Address) -> Outcome<Packet> {
    let packet = to(peers, address);
    peers.a.port.send(&packet)?;
    peers.b.recv_tid(packet.tid()?)
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("addressing");

    for layout in [Layout::Old, Layout::New] {
        let hdr = layout.header_len();
        area.check(
            format!("the sender's address is in the received header ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let got = peers.deliver(fresh_tid())?.address();
                ensure_eq!(got.qpn, Qpn::GSI);
                ensure_eq!((got.lid, got.path_bits, got.sl), (0, 0, 0));
                let Some(grh) = got.grh else {
                    return Err("no GRH".into());
                };
                ensure_eq!(grh.gid, peers.a.gid);
                ensure_eq!(grh.gid_index, 0);
                ensure_eq!((grh.hop_limit, grh.flow_label), (64, 0));
                Ok(())
            },
        );
        area.check(
            format!("grh_present is 1 in a received header ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                ensure_eq!(peers.deliver(fresh_tid())?.header.grh_present, 1);
                Ok(())
            },
        );
        area.check(
            format!("what was received can be answered as it is ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let request = peers
                    .a
                    .packet(&peers.b, Method::GET, fresh_tid())
                    .timeout(ktap::peers::SOON);
                peers.a.port.send(&request)?;
                let got = peers.b.recv_tid(request.tid()?)?;
                // Header and all, with the Q_Key of 0 that it has.
                let mut answer = got.clone();
                answer.mad[3] = Method::GET_RESP.0;
                ensure_eq!(answer.header.qkey.get(), 0);
                peers.b.port.send(&answer)?;
                let got = peers.a.recv_answer(request.tid()?)?;
                ensure_eq!(got.address().grh.map(|grh| grh.gid), Some(peers.b.gid));
                Ok(())
            },
        );
        area.check(format!("every traffic class arrives ({hdr})"), move || {
            let peers = Peers::with_layout(layout)?;
            for traffic_class in [0, 1, 0x20, 0x80, 0xfc, 0xff] {
                let mut address = peers.b.address();
                if let Some(grh) = &mut address.grh {
                    grh.traffic_class = traffic_class;
                }
                let got = arrives(&peers, &address)?.header.traffic_class;
                ensure_eq!(got, traffic_class);
            }
            Ok(())
        });
        area.check(format!("no GRH is EINVAL ({hdr})"), move || {
            let peers = Peers::with_layout(layout)?;
            for lid in [0, 1, 0xbfff, 0xffff] {
                let packet = to(&peers, &Address::lid(lid));
                ensure_errno!(peers.a.port.send(&packet), EINVAL, "LID {lid:#x}");
            }
            let mut packet = to(&peers, &peers.b.address());
            packet.header.grh_present = 0;
            ensure_errno!(
                peers.a.port.send(&packet),
                EINVAL,
                "a GID, but grh_present 0"
            );
            peers.b.nothing_comes()
        });
        area.check(
            format!("any grh_present but 0 means yes ({hdr})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                for present in [1, 2, 0x80, 0xff] {
                    let mut packet = to(&peers, &peers.b.address());
                    packet.header.grh_present = present;
                    peers.a.port.send(&packet)?;
                    peers.b.recv_tid(packet.tid()?)?;
                }
                Ok(())
            },
        );
    }

    area.check("the GID of zeroes is refused at once: ENETUNREACH", || {
        let peers = Peers::new()?;
        let packet = to(&peers, &Address::roce(Gid::default(), 0));
        ensure_errno!(peers.a.port.send(&packet), ENETUNREACH);
        Ok(())
    });
    for index in [100, 255] {
        area.check(
            format!("gid_index {index}, which no entry has, is ENODATA"),
            move || {
                let peers = Peers::new()?;
                let packet = to(&peers, &Address::roce(peers.b.gid, index));
                ensure_errno!(peers.a.port.send(&packet), ENODATA);
                peers.b.nothing_comes()
            },
        );
    }
    area.check(
        "a GID that nobody has: ETIMEDOUT, and the port goes on",
        || {
            let peers = Peers::new()?;
            let nobody: Gid = "fe80::dead:beef".parse()?;
            let packet = to(&peers, &Address::roce(nobody, 0));
            ensure_errno!(peers.a.port.send(&packet), ETIMEDOUT);
            peers.deliver(fresh_tid())?;
            // The transaction id was not used up.
            let mut again = packet.clone();
            peers
                .b
                .address()
                .grh
                .inspect(|grh| again.header.gid = grh.gid.0);
            peers.a.port.send(&again)?;
            peers.b.recv_tid(packet.tid()?)?;
            Ok(())
        },
    );
    area.check("a GID to which there is no route: ENETUNREACH", || {
        let peers = Peers::new()?;
        let far: Gid = "2001:db8::1".parse()?;
        ensure_errno!(
            peers.a.port.send(&to(&peers, &Address::roce(far, 0))),
            ENETUNREACH
        );
        Ok(())
    });
    area.check("a refused address leaves no outstanding send", || {
        let peers = Peers::new()?;
        let packet = to(&peers, &Address::lid(1)).timeout(Duration::from_millis(50));
        for _ in 0..100 {
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
        }
        peers.a.nothing_comes()
    });
    area.check("fields that RoCE does not need may hold anything", || {
        let peers = Peers::new()?;
        for n in [0, 1, 7, 0x55, 0xff] {
            let mut address = peers.b.address();
            address.lid = u16::from_be_bytes([n, n]);
            address.path_bits = n;
            if let Some(grh) = &mut address.grh {
                grh.hop_limit = n;
                grh.flow_label = u32::from(n) << 12;
            }
            arrives(&peers, &address).what(format!("{n:#x}"))?;
        }
        Ok(())
    });
    area.check("every service level is taken", || {
        let peers = Peers::new()?;
        for sl in 0..=15 {
            let mut address = peers.b.address();
            address.sl = sl;
            arrives(&peers, &address).what(format!("service level {sl}"))?;
        }
        Ok(())
    });
    area.check(
        "any Q_Key is taken: the kernel uses the well-known one",
        || {
            let peers = Peers::new()?;
            for qkey in [0, 1, Address::GSI_QKEY, 0x7fff_ffff, u32::MAX] {
                let mut address = peers.b.address();
                address.qkey = qkey;
                arrives(&peers, &address).what(format!("Q_Key {qkey:#x}"))?;
            }
            Ok(())
        },
    );
    area.check(
        "another queue pair than 1 is taken, and QP 1 does not get it",
        || {
            let peers = Peers::new()?;
            for qpn in [0, 2, 77, 0xff_ffff] {
                let mut address = peers.b.address();
                address.qpn = Qpn(qpn);
                peers.a.port.send(&to(&peers, &address))?;
            }
            peers.b.nothing_comes()
        },
    );
    area.check("P_Key index 0 comes in as 0", || {
        let peers = Peers::new()?;
        ensure_eq!(peers.deliver(fresh_tid())?.pkey_index, 0);
        Ok(())
    });
    for index in [1, 5, 0xffff] {
        area.check(
            format!("P_Key index {index}, which Soft-RoCE does not have, is taken and sent"),
            move || {
                let peers = Peers::new()?;
                let mut address = peers.b.address();
                address.pkey_index = PkeyIndex(index);
                ensure_eq!(arrives(&peers, &address)?.pkey_index, 0);
                Ok(())
            },
        );
    }
    area.check(
        "the old layout sends with P_Key index 0, whatever follows the header",
        || {
            let peers = Peers::with_layout(Layout::Old)?;
            ensure_eq!(peers.deliver(fresh_tid())?.pkey_index, 0);
            Ok(())
        },
    );
    area.check(
        "gid_index: the packet goes out with that GID, and comes in with that of its own",
        || {
            let pair = RxePair::new("x")?;
            let (one, two) = second_gids(&pair)?;
            ensure!(one.index > 0 && two.index > 0);
            let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
            let mut request = peers
                .a
                .packet(&peers.b, Method::GET, fresh_tid())
                .timeout(ktap::peers::SOON);
            request.header.gid = two.gid.0;
            request.header.gid_index = one.index;
            peers.a.port.send(&request)?;
            let got = peers.b.recv_tid(request.tid()?)?;
            ensure_eq!(Gid(got.header.gid), one.gid);
            ensure_eq!(got.header.gid_index, two.index);
            peers.b.port.send(&peers.b.response(&got)?)?;
            let answer = peers.a.recv_answer(request.tid()?)?;
            ensure_eq!(Gid(answer.header.gid), two.gid);
            ensure_eq!(answer.header.gid_index, one.index);
            Ok(())
        },
    );
    area.check(
        "a response to another GID than the one that asked is dropped",
        || {
            let pair = RxePair::new("y")?;
            let (one, two) = second_gids(&pair)?;
            let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
            let request = peers
                .a
                .packet(&peers.b, Method::GET, fresh_tid())
                .timeout(ktap::peers::SOON);
            peers.a.port.send(&request)?;
            let got = peers.b.recv_tid(request.tid()?)?;
            let mut elsewhere = peers.b.response(&got)?;
            elsewhere.header.gid = one.gid.0;
            elsewhere.header.gid_index = two.index;
            peers.b.port.send(&elsewhere)?;
            peers.a.nothing_comes()?;
            // A request on the same way arrives: it is not the way that drops.
            let mut proof = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
            proof.header.gid = one.gid.0;
            proof.header.gid_index = two.index;
            peers.b.port.send(&proof)?;
            ensure_eq!(peers.a.recv()?.tid()?.low(), proof.tid()?.low());
            peers.b.port.send(&peers.b.response(&got)?)?;
            peers.a.recv_answer(request.tid()?)?;
            Ok(())
        },
    );
    area.check("the own GID is an address like others", || {
        let peers = Peers::new()?;
        let packet = peers.a.packet(&peers.a, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
        let got = peers.a.recv()?;
        ensure_eq!(Gid(got.header.gid), peers.a.gid);
        ensure_eq!(got.tid()?.low(), packet.tid()?.low());
        Ok(())
    });

    area.run()
}

// A GID and its index.
struct Entry {
    gid: Gid,
    index: u8,
}

// Gives both devices of a pair a second link-local address, and so a second GID.
fn second_gids(pair: &RxePair) -> Outcome<(Entry, Entry)> {
    let (one, two) = ("fe80::5:1", "fe80::5:2");
    let (a, b) = (&pair.a, &pair.b);
    for (port, own, peer, other) in [(a, one, b, two), (b, two, a, one)] {
        let dev = &port.netdev;
        run(&format!("ip -6 address add {own}/64 dev {dev} nodad"))?;
        let mac = std::fs::read_to_string(format!("/sys/class/net/{}/address", peer.netdev))?;
        run(&format!(
            "ip -6 neigh replace {other} lladdr {} dev {dev} nud permanent",
            mac.trim()
        ))?;
    }
    let entry = |ibdev: &str, gid: &str| -> Outcome<Entry> {
        let gid = gid.parse()?;
        let index = gid_index(ibdev, gid)?;
        Ok(Entry { gid, index })
    };
    Ok((entry(&a.ibdev, one)?, entry(&b.ibdev, two)?))
}

// The index of a GID in a port's table, once it is there.
fn gid_index(ibdev: &str, gid: Gid) -> Outcome<u8> {
    let mut found = None;
    wait_until(
        &format!("{gid} is in the table of {ibdev}"),
        Duration::from_secs(20),
        || {
            found = (0..16).find(|n| sysfs::gid(ibdev, 1, u32::from(*n)).is_ok_and(|g| g == gid));
            found.is_some()
        },
    )?;
    found.ok_or_else(|| "no such GID".into())
}
