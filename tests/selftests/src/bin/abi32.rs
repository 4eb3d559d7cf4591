// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `abi32`: the user ABI as a 32-bit program sees it, under a 64-bit kernel.
//!
//! The same program is built for 64 bits too, where it must see the same.

use std::os::fd::AsRawFd;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use umad::abi;
use umad::{Hdr, HdrOld, RegReq, RegReq2};

/// Methods with a bit in each word of the mask: 32 bits wide, or 64.
const METHODS: [Method; 6] = [
    Method(0x01),
    Method(0x1f),
    Method(0x20),
    Method(0x3f),
    Method(0x40),
    Method(0x7e),
];

/// `ioctl(fd, request, address)`, with an address that may be bad.
fn ioctl_at(port: &Port, request: u32, address: usize) -> nix::Result<()> {
    // SAFETY: the kernel checks the address; those that are given here are bad on purpose.
    let r = unsafe { libc::ioctl(port.as_raw_fd(), request as _, address) };
    Errno::result(r).map(drop)
}

fn layouts(area: &mut ktap::Area) {
    area.check(
        "the structures have the sizes of every architecture",
        || {
            ensure_eq!(size_of::<HdrOld>(), 56);
            ensure_eq!(size_of::<Hdr>(), 64);
            ensure_eq!(size_of::<RegReq>(), 28);
            ensure_eq!(size_of::<RegReq2>(), 40);
            Ok(())
        },
    );
    area.check("the ioctl numbers are those of every architecture", || {
        ensure_eq!(abi::REGISTER_AGENT, 0xc01c_1b01);
        ensure_eq!(abi::UNREGISTER_AGENT, 0x4004_1b02);
        ensure_eq!(abi::ENABLE_PKEY, 0x1b03);
        ensure_eq!(abi::REGISTER_AGENT2, 0xc028_1b04);
        Ok(())
    });
    area.check("numbers that do not exist: ENOTTY", || {
        let port = Port::open(0)?;
        for request in [0x1b00, 0x1b05, 0xc020_1b01, 0xc024_1b04, 0x4008_1b02] {
            ensure_errno!(ioctl_at(&port, request, 0), ENOTTY, "{request:#x}");
        }
        Ok(())
    });
}

fn registration(area: &mut ktap::Area) {
    type Register = fn(&Port, &Registration) -> umad::Result<AgentId>;
    let calls: [(&str, Register); 2] = [
        ("REGISTER_AGENT", Port::register),
        ("REGISTER_AGENT2", Port::register2),
    ];
    for (name, register) in calls {
        area.check(
            format!("{name} gives ids from 0 on, UNREGISTER_AGENT frees them"),
            move || {
                let port = Port::options().layout(Layout::Old).open(0)?;
                for id in 0..3 {
                    ensure_eq!(register(&port, &Registration::send_only())?, AgentId(id));
                }
                port.unregister(AgentId(1))?;
                ensure_errno!(port.unregister(AgentId(1)), EINVAL);
                ensure_errno!(port.unregister(AgentId(32)), EINVAL);
                ensure_eq!(register(&port, &Registration::send_only())?, AgentId(1));
                Ok(())
            },
        );
        area.check(
            format!("{name}: every word of the method mask arrives"),
            move || {
                let wanted = Registration::class(0x0a, 1).methods(&METHODS);
                let port = Port::open(0)?;
                register(&port, &wanted)?;
                // Each method is taken now, and none but these.
                let probe = Port::open(0)?;
                for method in (1..0x80).map(Method) {
                    let one = Registration::class(0x0a, 1).methods(&[method]);
                    match register(&probe, &one) {
                        Ok(agent) => {
                            ensure!(!METHODS.contains(&method), "{method:?} is not taken");
                            probe.unregister(agent)?;
                        }
                        Err(e) => {
                            ensure_eq!(e.errno(), Some(Errno::EINVAL), "{method:?}");
                            ensure!(METHODS.contains(&method), "{method:?} is taken");
                        }
                    }
                }
                Ok(())
            },
        );
        area.check(
            format!("{name}: MADs of the methods arrive, others do not"),
            move || {
                let registration = Registration::class(CLASS, 1).oui(OUI).methods(&METHODS);
                let a = Endpoint::open("rxe0", Layout::New, &registration)?;
                let umad = ktap::wait_for_umad("rxe1")?;
                let port = Port::open(umad)?;
                let agent = register(&port, &registration)?;
                let b = Endpoint {
                    port,
                    agent,
                    umad,
                    gid: umad::sysfs::gid("rxe1", 1, 0)?,
                    ibdev: "rxe1".into(),
                    class: CLASS,
                };
                for method in METHODS {
                    let tid = fresh_tid();
                    a.port.send(&a.packet(&b, method, tid))?;
                    let got = b.recv_tid(tid)?;
                    ensure_eq!(got.mad_header()?.method, method);
                }
                a.port.send(&a.packet(&b, Method(0x21), fresh_tid()))?;
                b.nothing_comes()
            },
        );
    }
    area.check(
        "an id is written where the structure has it, and nothing else",
        || {
            let port = Port::options().layout(Layout::Old).open(0)?;
            let wanted = Registration::class(0x0a, 1).methods(&METHODS).to_req();
            let mut req = RegReq { id: 77, ..wanted };
            port.register_raw(&mut req)?;
            ensure_eq!(req, RegReq { id: 0, ..wanted });
            let wanted = Registration::class(0x0b, 1).methods(&METHODS).to_req2();
            let mut req = RegReq2 { id: 77, ..wanted };
            port.register2_raw(&mut req)?;
            ensure_eq!(req, RegReq2 { id: 1, ..wanted });
            Ok(())
        },
    );
    area.check(
        "unknown flags: EINVAL, and the known ones are written back",
        || {
            let port = Port::open(0)?;
            let mut req = Registration::send_only().flags(0x8000_0002).to_req2();
            ensure_errno!(port.register2_raw(&mut req), EINVAL);
            ensure_eq!(req.flags, abi::USER_RMPP);
            Ok(())
        },
    );
    area.check("an OUI of more than 24 bits: EINVAL", || {
        let port = Port::open(0)?;
        let wanted = Peers::registration(CLASS).oui(0x0100_1405);
        ensure_errno!(port.register2(&wanted), EINVAL);
        Ok(())
    });
    area.check("bad addresses: EFAULT, and no agent stays", || {
        let port = Port::open(0)?;
        // Address 0, the kernel's half (of 32 bits), the last bytes.
        for address in [0, 0xffff_0000, 0xffff_fffd] {
            for request in [
                abi::REGISTER_AGENT,
                abi::UNREGISTER_AGENT,
                abi::REGISTER_AGENT2,
            ] {
                let got = ioctl_at(&port, request, address);
                ensure_errno!(got, EFAULT, "{request:#x} at {address:#x}");
            }
        }
        let agent = port.register2(&Registration::send_only())?;
        ensure_eq!(agent, AgentId(0));
        Ok(())
    });
}

fn packets(area: &mut ktap::Area) {
    for (layout, name) in [(Layout::Old, "56"), (Layout::New, "64")] {
        area.check(
            format!("{name}-byte header: a MAD goes and comes"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                packet.mad[40..].fill(0x5c);
                peers.a.port.send(&packet)?;
                let mut buffer = [0; 400];
                peers.b.port.poll(PollFlags::POLLIN, SOON)?;
                let len = peers.b.port.read(&mut buffer)?;
                ensure_eq!(len, layout.header_len() + 256);
                let got = Packet::from_bytes(&buffer[..len], layout)?;
                ensure_eq!(got.mad[24..], packet.mad[24..]);
                ensure_eq!(got.header.length as usize, len);
                ensure_eq!(got.header.qpn.get(), 1);
                ensure_eq!(got.header.gid, peers.a.gid.0);
                Ok(())
            },
        );
        area.check(
            format!("{name}-byte header: a request is answered"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let tid = fresh_tid();
                let (got, answer) = peers.round_trip(tid)?;
                ensure_eq!(answer.header.status, 0);
                ensure_eq!(answer.tid()?, got.tid()?);
                Ok(())
            },
        );
        area.check(
            format!("{name}-byte header: a request times out"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let request = peers.a.packet(&peers.b, Method::GET, fresh_tid());
                peers
                    .a
                    .port
                    .send(&request.clone().timeout(Duration::from_millis(50)))?;
                let got = peers.a.recv()?;
                ensure_eq!(got.header.status, Errno::ETIMEDOUT as u32);
                ensure_eq!(got.mad.len(), 24);
                ensure_eq!(got.tid()?.low(), request.tid()?.low());
                Ok(())
            },
        );
    }
    area.check(
        "a long message: ENOSPC tells its length, then it is read whole",
        || {
            let registration = Peers::registration(CLASS).rmpp(1);
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
            let payload: Vec<u8> = (0u8..=250).cycle().take(3000).collect();
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
                .rmpp()
                .payload(&payload);
            let message = Packet::new(peers.a.agent, &peers.b.address(), mad.into_bytes());
            peers
                .a
                .port
                .send(&message.timeout(Duration::from_secs(10)))?;
            peers.b.port.poll(PollFlags::POLLIN, SOON)?;
            let mut small = [0; 320];
            ensure_errno!(peers.b.port.read(&mut small), ENOSPC);
            let length = Packet::from_bytes(&small, Layout::New)?.header.length;
            let got = peers.b.recv()?;
            ensure_eq!(length as usize, 64 + got.mad.len());
            ensure_eq!(got.mad[40..3040], payload[..]);
            Ok(())
        },
    );
    area.check(
        "ENABLE_PKEY comes before the first agent, or EINVAL",
        || {
            let port = Port::options().layout(Layout::Old).open(0)?;
            port.enable_pkey()?;
            port.enable_pkey()?;
            port.register(&Registration::send_only())?;
            ensure_errno!(port.enable_pkey(), EINVAL);
            Ok(())
        },
    );
}

fn main() -> std::process::ExitCode {
    println!("# pointers of {} bits", usize::BITS);
    let mut area = ktap::Area::new("abi32");
    layouts(&mut area);
    registration(&mut area);
    packets(&mut area);
    area.run()
}
