// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `ahcache`: what an address leads to changes, and the very next call notices.
//!
//! A module may remember how an address was resolved, as long as nobody can tell. Each check sends to an
//! address several times, so that whoever wants to remember it has done so; then something changes that
//! the resolution depended on.

#![forbid(unsafe_code)]

use ktap::peers::{CLASS, OUI, QUIET, SOON};
use ktap::prelude::*;
use selftests::vhca::{self, VhcaExt};
use umad::{addr::Grh, sysfs};

/// Two Soft-RoCE devices of the check's own, with an agent each.
struct Net {
    rxe: RxePair,
    peers: Peers,
}

impl Net {
    fn new() -> Outcome<Self> {
        let rxe = RxePair::new("ah")?;
        let peers = Peers::on(&rxe.a.ibdev, &rxe.b.ibdev)?;
        Ok(Self { rxe, peers })
    }

    /// Sends from `a` to an address; does not look whether it arrives.
    fn send(&self, to: &Address) -> Outcome<umad::Result<Tid>> {
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
        let packet = Packet::new(self.peers.a.agent, to, mad);
        let tid = packet.tid()?;
        Ok(self.peers.a.port.send(&packet).map(|()| tid))
    }

    /// Sends from `a` to an address, and receives it at `b`.
    fn deliver(&self, to: &Address) -> Outcome<Packet> {
        let tid = self.send(to)??;
        self.peers.b.recv_tid(tid)
    }

    /// Sends so often, and so far apart, that a module that wants to remember the address does.
    fn settle(&self, to: &Address) -> Outcome {
        for _ in 0..6 {
            self.deliver(to)?;
            std::thread::sleep(Duration::from_millis(30));
        }
        Ok(())
    }

    fn to_b(&self) -> Address {
        self.peers.b.address()
    }

    /// Gives the device `netdev` an address that can be used at once.
    fn add_address(netdev: &str, address: &str) -> Outcome {
        run(&format!(
            "ip -6 address add {address}/64 dev {netdev} nodad"
        ))?;
        Ok(())
    }
}

/// The index of a GID that can be sent from on RoCE v2, once it is there.
fn gid_index(ibdev: &str, gid: Gid) -> Outcome<u8> {
    let mut found = None;
    wait_until("the address is in the GID table", SOON, || {
        found = (0..64).find(|index| {
            let kind = format!(
                "{}/gid_attrs/types/{index}",
                sysfs::port_dir(ibdev, 1).display()
            );
            sysfs::gid(ibdev, 1, *index).is_ok_and(|there| there == gid)
                && std::fs::read_to_string(kind).is_ok_and(|kind| kind.trim() == "RoCE v2")
        });
        found.is_some()
    })?;
    Ok(u8::try_from(found.unwrap_or(0))?)
}

fn gid(text: &str) -> Outcome<Gid> {
    Ok(text.parse()?)
}

fn neighbours(area: &mut ktap::Area<'_>) {
    area.check("the peer's MAC address changes", || {
        let net = Net::new()?;
        net.settle(&net.to_b())?;
        let (a, b) = (&net.rxe.a.netdev, &net.rxe.b.netdev);
        run(&format!("ip link set {b} address 02:00:00:00:77:01"))?;
        run(&format!(
            "ip -6 neigh replace {} lladdr 02:00:00:00:77:01 dev {a} nud permanent",
            net.peers.b.gid
        ))?;
        net.deliver(&net.to_b())?;
        Ok(())
    });
    area.check("the peer's address moves to another device", || {
        let net = Net::new()?;
        let (a, b) = (&net.rxe.a.netdev, &net.rxe.b.netdev);
        Net::add_address(a, "fe80::77:1")?;
        Net::add_address(b, "fe80::77:2")?;
        let own = gid_index(&net.rxe.a.ibdev, gid("fe80::77:1")?)?;
        gid_index(&net.rxe.b.ibdev, gid("fe80::77:2")?)?;
        let to = Address::roce(gid("fe80::77:2")?, own);
        net.settle(&to)?;
        // Nobody has it on this network any more, and it is not known who had it.
        run(&format!("ip -6 address del fe80::77:2/64 dev {b}"))?;
        run(&format!("ip -6 neigh flush dev {a} to fe80::77:2"))?;
        let begin = Instant::now();
        ensure_errno!(net.send(&to)?, ETIMEDOUT);
        ensure!(begin.elapsed() > Duration::from_millis(500));
        // Now another one has it.
        Net::add_address(b, "fe80::77:2")?;
        gid_index(&net.rxe.b.ibdev, gid("fe80::77:2")?)?;
        // Whoever is asked on a busy machine may not answer within the second that the kernel waits.
        wait_until("the peer can be reached", SOON, || {
            net.send(&to).is_ok_and(|sent| sent.is_ok())
        })?;
        net.deliver(&to)?;
        Ok(())
    });
    area.check(
        "the neighbour is gone: the next write asks for it again",
        || {
            let net = Net::new()?;
            let to = net.to_b();
            net.settle(&to)?;
            let a = &net.rxe.a.netdev;
            run(&format!("ip -6 neigh del {} dev {a}", net.peers.b.gid))?;
            net.deliver(&to)?;
            let there = run(&format!("ip -6 neigh show dev {a}"))?;
            let gid = net.peers.b.gid.to_string();
            let address: std::net::Ipv6Addr = gid.parse()?;
            ensure!(there.contains(&address.to_string()), "neighbours: {there}");
            Ok(())
        },
    );
}

fn routes(area: &mut ktap::Area<'_>) {
    area.check("the route goes: ENETUNREACH; and comes back", || {
        let net = Net::new()?;
        let to = net.to_b();
        net.settle(&to)?;
        let a = &net.rxe.a.netdev;
        run(&format!("ip -6 route del fe80::/64 dev {a}"))?;
        ensure_errno!(net.send(&to)?, ENETUNREACH);
        run(&format!("ip -6 route append fe80::/64 dev {a} metric 256"))?;
        net.deliver(&to)?;
        Ok(())
    });
    area.check("the receiver's hop limit is that of its route now", || {
        let net = Net::new()?;
        let to = net.to_b();
        let b = &net.rxe.b.netdev;
        net.settle(&to)?;
        for hop_limit in [9, 200, 64] {
            // Not "replace", which would take the first route of that prefix, another device's.
            run(&format!("ip -6 route del fe80::/64 dev {b}"))?;
            run(&format!(
                "ip -6 route append fe80::/64 dev {b} metric 256 hoplimit {hop_limit}"
            ))?;
            let got = net.deliver(&to)?.address().grh.ok_or("no GRH")?;
            ensure_eq!(got.hop_limit, hop_limit);
            net.settle(&to)?;
            let got = net.deliver(&to)?.address().grh.ok_or("no GRH")?;
            ensure_eq!(got.hop_limit, hop_limit);
        }
        Ok(())
    });
    area.check("packets of many senders keep their order", || {
        let net = Net::new()?;
        let (a, b) = (&net.rxe.a.netdev, &net.rxe.b.netdev);
        let mut senders = Vec::new();
        for n in 1..=20 {
            let address = format!("fe80::79:{n:x}");
            Net::add_address(a, &address)?;
            senders.push(gid_index(&net.rxe.a.ibdev, gid(&address)?)?);
        }
        Net::add_address(b, "fe80::79:ff")?;
        gid_index(&net.rxe.b.ibdev, gid("fe80::79:ff")?)?;
        // Learns who is where.
        for own in &senders {
            net.deliver(&Address::roce(gid("fe80::79:ff")?, *own))?;
        }
        let mut sent = Vec::new();
        for round in 0..10 {
            for own in &senders {
                let to = Address::roce(gid("fe80::79:ff")?, *own);
                sent.push(net.send(&to)??.low());
            }
            if round % 3 == 0 {
                // A change: whatever was remembered does not count any more.
                run(&format!("ip -6 route replace fd00:7a::/64 dev {b}"))?;
                run(&format!("ip -6 route del fd00:7a::/64 dev {b}"))?;
            }
        }
        for tid in sent {
            ensure_eq!(net.peers.b.recv()?.tid()?.low(), tid);
        }
        Ok(())
    });
}

fn gids(area: &mut ktap::Area<'_>) {
    area.check("a GID is removed, and another one takes its index", || {
        let net = Net::new()?;
        let (a, b) = (&net.rxe.a.netdev, &net.rxe.b.netdev);
        Net::add_address(a, "fe80::7b:1")?;
        Net::add_address(b, "fe80::7b:2")?;
        let ibdev = &net.rxe.a.ibdev;
        let own = gid_index(ibdev, gid("fe80::7b:1")?)?;
        gid_index(&net.rxe.b.ibdev, gid("fe80::7b:2")?)?;
        let to = Address::roce(gid("fe80::7b:2")?, own);
        net.settle(&to)?;
        ensure_eq!(
            net.deliver(&to)?.address().grh.map(|grh| grh.gid),
            Some(gid("fe80::7b:1")?)
        );
        run(&format!("ip -6 address del fe80::7b:1/64 dev {a}"))?;
        wait_until("the GID is gone", SOON, || {
            sysfs::gid(ibdev, 1, own.into()).is_ok_and(|gid| gid.is_zero())
        })?;
        ensure!(
            net.send(&to)?.is_err(),
            "it was sent from a GID that is gone"
        );
        Net::add_address(a, "fe80::7b:3")?;
        ensure_eq!(gid_index(ibdev, gid("fe80::7b:3")?)?, own);
        ensure_eq!(
            net.deliver(&to)?.address().grh.map(|grh| grh.gid),
            Some(gid("fe80::7b:3")?)
        );
        Ok(())
    });
    area.check("the link goes down and up", || {
        let net = Net::new()?;
        let to = net.to_b();
        net.settle(&to)?;
        let a = &net.rxe.a.netdev;
        run(&format!("ip link set {a} down"))?;
        ensure!(
            net.send(&to)?.is_err(),
            "it was sent over a link that is down"
        );
        run(&format!("ip link set {a} up"))?;
        ktap::settle(&net.rxe.a.ibdev)?;
        wait_until("the GID is back", SOON, || {
            sysfs::gid(&net.rxe.a.ibdev, 1, 0).is_ok_and(|gid| gid == net.peers.a.gid)
        })?;
        wait_until("the peer can be reached", SOON, || {
            net.send(&to).is_ok_and(|sent| sent.is_ok())
        })?;
        net.deliver(&to)?;
        Ok(())
    });
    area.check("the device goes while its addresses are in use", || {
        let net = Net::new()?;
        net.settle(&net.to_b())?;
        net.rxe.a.unplug()?;
        ensure_errno!(net.send(&net.to_b())?, EIO);
        net.rxe.a.plug()?;
        let again = Peers::on(&net.rxe.a.ibdev, &net.rxe.b.ibdev);
        // `b` has the class already.
        drop(net.peers);
        drop(again);
        let peers = Peers::on(&net.rxe.a.ibdev, &net.rxe.b.ibdev)?;
        peers.deliver(fresh_tid())?;
        Ok(())
    });
}

/// Two InfiniBand ports with an agent each.
struct Fabric {
    pair: vhca::Pair,
    a: vhca::Agent,
    b: vhca::Agent,
}

impl Fabric {
    fn new() -> Outcome<Self> {
        let pair = vhca::Pair::new()?;
        let wish = Peers::registration(CLASS);
        Ok(Self {
            a: pair.a.agent(1, &wish)?,
            b: pair.b.agent(1, &wish)?,
            pair,
        })
    }

    fn send(&self, to: &Address) -> Outcome<Tid> {
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
        let packet = Packet::new(self.a.agent, to, mad);
        self.a.port.send(&packet)?;
        Ok(packet.tid()?)
    }

    fn deliver(&self, to: &Address) -> Outcome<Packet> {
        let tid = self.send(to)?;
        self.b.recv_tid(tid)
    }

    fn settle(&self, to: &Address) -> Outcome {
        for _ in 0..6 {
            self.deliver(to)?;
        }
        Ok(())
    }
}

fn infiniband(area: &mut ktap::Area<'_>) {
    area.check("the peer's LID is reassigned", || {
        let fabric = Fabric::new()?;
        let to = Address::lid(2);
        fabric.settle(&to)?;
        fabric.pair.b.change(1, |port| port.lid = 9)?;
        let tid = fabric.send(&to)?;
        fabric.b.nothing_comes(tid, QUIET)?;
        fabric.deliver(&Address::lid(9))?;
        Ok(())
    });
    area.check("the own LID is reassigned", || {
        let fabric = Fabric::new()?;
        let to = Address::lid(2);
        fabric.settle(&to)?;
        ensure_eq!(fabric.deliver(&to)?.address().lid, 1);
        fabric.pair.a.change(1, |port| port.lid = 7)?;
        ensure_eq!(fabric.deliver(&to)?.address().lid, 7);
        Ok(())
    });
    area.check("the own GID changes under a global route", || {
        let fabric = Fabric::new()?;
        let ibdev = &fabric.pair.a.ibdev;
        let to = Address {
            grh: Some(Grh {
                gid: sysfs::gid(&fabric.pair.b.ibdev, 1, 0)?,
                gid_index: 0,
                hop_limit: 9,
                ..Grh::default()
            }),
            ..Address::lid(2)
        };
        fabric.settle(&to)?;
        let before = sysfs::gid(ibdev, 1, 0)?;
        ensure_eq!(
            fabric.deliver(&to)?.address().grh.map(|grh| grh.gid),
            Some(before)
        );
        fabric
            .pair
            .a
            .change(1, |port| port.gid_prefix = 0xfec0_0000_0000_0077)?;
        wait_until("the GID is another one", SOON, || {
            sysfs::gid(ibdev, 1, 0).is_ok_and(|gid| gid != before)
        })?;
        let now = sysfs::gid(ibdev, 1, 0)?;
        ensure_eq!(
            fabric.deliver(&to)?.address().grh.map(|grh| grh.gid),
            Some(now)
        );
        Ok(())
    });
    area.check("the link goes down and up on InfiniBand", || {
        let fabric = Fabric::new()?;
        let to = Address::lid(2);
        fabric.settle(&to)?;
        fabric
            .pair
            .a
            .change(1, |port| port.flags |= vhca::PORT_DOWN)?;
        let tid = fabric.send(&to)?;
        fabric.b.nothing_comes(tid, QUIET)?;
        fabric
            .pair
            .a
            .change(1, |port| port.flags &= !vhca::PORT_DOWN)?;
        fabric.deliver(&to)?;
        Ok(())
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("ahcache");
    neighbours(&mut area);
    routes(&mut area);
    gids(&mut area);
    infiniband(&mut area);
    vhca::Module::run(area)
}
