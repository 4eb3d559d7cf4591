// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `register`: REGISTER_AGENT and REGISTER_AGENT2, what they refuse, and what they bring.

use std::os::fd::AsRawFd;
use std::path::Path;

use ktap::kmsg::Mark;
use ktap::memory::{Guarded, Prot, PAGE};
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use umad::abi::{self, RegReq, RegReq2};
use zerocopy::{FromBytes, IntoBytes};

/// The two calls.
#[derive(Clone, Copy, Debug)]
enum Call {
    One,
    Two,
}

impl Call {
    const BOTH: [Self; 2] = [Self::One, Self::Two];

    fn name(self) -> &'static str {
        match self {
            Self::One => "REGISTER_AGENT",
            Self::Two => "REGISTER_AGENT2",
        }
    }

    fn register(self, port: &Port, registration: &Registration) -> umad::Result<AgentId> {
        match self {
            Self::One => port.register(registration),
            Self::Two => port.register2(registration),
        }
    }

    // The argument as the kernel gets it.
    fn argument(self, registration: &Registration) -> Vec<u8> {
        match self {
            Self::One => registration.to_req().as_bytes().to_vec(),
            Self::Two => registration.to_req2().as_bytes().to_vec(),
        }
    }

    // The call with any pointer.
    fn at(self, port: &Port, argument: *mut u8) -> Result<(), Errno> {
        let fd = port.as_raw_fd();
        // SAFETY: the kernel checks the pointer. If the range is valid, it is memory of a `Guarded`,
        // which no reference points to.
        unsafe {
            match self {
                Self::One => abi::ioctl::register_agent(fd, argument.cast::<RegReq>()),
                Self::Two => abi::ioctl::register_agent2(fd, argument.cast::<RegReq2>()),
            }
        }
        .map(drop)
    }
}

fn only() -> Registration {
    Registration::send_only()
}

fn vendor() -> Registration {
    Peers::registration(CLASS)
}

// An agent's worth: all ids can still be given out, the lowest first.
fn ensure_empty(port: &Port) -> Outcome {
    for id in 0..abi::MAX_AGENTS {
        ensure_eq!(port.register(&only())?, AgentId(id));
    }
    ensure_errno!(port.register(&only()), ENOMEM);
    Ok(())
}

// Is the method of the class free on rxe0?
fn ensure_free(registration: &Registration) -> Outcome {
    fresh()?
        .register(registration)
        .what("the class and its methods must be free")?;
    Ok(())
}

/// Our module writes ten messages in so long a time; the C module has no limit.
const LOG_WINDOW: Duration = Duration::from_millis(5200);

/// The end of the kernel's log, when there is room for messages again.
fn quiet_log() -> Outcome<Mark> {
    if ktap::Impl::current()? == ktap::Impl::Rust {
        std::thread::sleep(LOG_WINDOW);
    }
    Mark::now()
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("register");

    // What both calls refuse, and with which errno.
    let refused: Vec<(&str, Registration, Errno)> = vec![
        ("QP 2", only().qpn(2), Errno::EINVAL),
        ("QP 255", vendor().qpn(255), Errno::EINVAL),
        (
            "QP 0 for a send-only agent on RoCE",
            only().qpn(0),
            Errno::EPROTONOSUPPORT,
        ),
        (
            "QP 0 for class 0x01 on RoCE",
            Registration::class(0x01, 1).qpn(0),
            Errno::EPROTONOSUPPORT,
        ),
        (
            "QP 0 for class 0x81 on RoCE",
            Registration::class(0x81, 1).qpn(0),
            Errno::EPROTONOSUPPORT,
        ),
        (
            "QP 0 on RoCE, even for a class that is none",
            Registration::class(0x90, 200).qpn(0),
            Errno::EPROTONOSUPPORT,
        ),
        (
            "class 0x01 on QP 1",
            Registration::class(0x01, 1),
            Errno::EINVAL,
        ),
        (
            "class 0x81 on QP 1",
            Registration::class(0x81, 1),
            Errno::EINVAL,
        ),
        (
            "class 0x50, one above the vendors",
            Registration::class(0x50, 1),
            Errno::EINVAL,
        ),
        ("class 0x80", Registration::class(0x80, 1), Errno::EINVAL),
        ("class 0x82", Registration::class(0x82, 1), Errno::EINVAL),
        ("class 0xff", Registration::class(0xff, 1), Errno::EINVAL),
        (
            "class version 0x83",
            Registration::class(0x0a, 0x83),
            Errno::EINVAL,
        ),
        (
            "class version 0xff",
            Registration::class(0x0a, 0xff),
            Errno::EINVAL,
        ),
        (
            "vendor class 0x30 without OUI",
            Registration::class(0x30, 1),
            Errno::EINVAL,
        ),
        (
            "vendor class 0x4f without OUI",
            Registration::class(0x4f, 1),
            Errno::EINVAL,
        ),
        ("RMPP version 2", vendor().rmpp(2), Errno::EINVAL),
        ("RMPP version 255", only().rmpp(255), Errno::EINVAL),
        (
            "RMPP in class 0x0a, which has none",
            Registration::class(0x0a, 1).rmpp(1),
            Errno::EINVAL,
        ),
        (
            "RMPP in class 0x09, which has none",
            Registration::class(0x09, 1).rmpp(1),
            Errno::EINVAL,
        ),
    ];
    for call in Call::BOTH {
        for (what, registration, errno) in refused.clone() {
            area.check(
                format!("{} refuses {what} ({errno:?})", call.name()),
                move || {
                    let port = fresh()?;
                    match call.register(&port, &registration) {
                        Err(e) => ensure_eq!(e.errno(), Some(errno)),
                        Ok(id) => return Err(format!("agent {id} was registered").into()),
                    }
                    // Nothing is left of it.
                    ensure_eq!(port.register(&only())?, AgentId(0));
                    Ok(())
                },
            );
        }
    }

    // What both calls take.
    let taken: Vec<(&str, Registration)> = vec![
        ("a send-only agent", only()),
        ("a send-only agent with RMPP", only().rmpp(1)),
        (
            "a send-only agent whose version, OUI and methods make no sense",
            Registration::class(0, 255)
                .oui(0x00ff_ffff)
                .mask(MethodMask(u128::MAX)),
        ),
        ("class version 0", Registration::class(0x0a, 0)),
        ("class version 0x82", Registration::class(0x0a, 0x82)),
        (
            "class 0x2f without OUI, one below the vendors",
            Registration::class(0x2f, 1),
        ),
        (
            "an OUI where the class has none",
            Registration::class(0x0a, 1).oui(OUI),
        ),
        ("an OUI in which one bit is set", vendor().oui(1)),
        ("the highest OUI", vendor().oui(0x00ff_ffff)),
        (
            "all methods of a vendor class",
            vendor().mask(MethodMask(u128::MAX)),
        ),
        ("RMPP in class 0x03", Registration::class(0x03, 2).rmpp(1)),
        ("RMPP in class 0x06", Registration::class(0x06, 1).rmpp(1)),
        ("RMPP in class 0x10", Registration::class(0x10, 1).rmpp(1)),
        ("RMPP in class 0x12", Registration::class(0x12, 1).rmpp(1)),
        ("RMPP in a vendor class", vendor().rmpp(1)),
    ];
    for call in Call::BOTH {
        for (what, registration) in taken.clone() {
            area.check(format!("{} takes {what}", call.name()), move || {
                ensure_eq!(call.register(&fresh()?, &registration)?, AgentId(0));
                Ok(())
            });
        }
        area.check(
            format!("{} takes every class from 0x02 to 0x4f", call.name()),
            move || {
                for class in 0x02..=0x4f {
                    // A file has room for 32.
                    let registration = Registration::class(class, 1).oui(OUI);
                    call.register(&fresh()?, &registration)
                        .what(format!("class {class:#x}"))?;
                }
                Ok(())
            },
        );
        area.check(
            format!("{} refuses every class from 0x50 to 0xff", call.name()),
            move || {
                let port = fresh()?;
                for class in 0x50..=0xff {
                    let registration = Registration::class(class, 1).oui(OUI);
                    ensure_errno!(
                        call.register(&port, &registration),
                        EINVAL,
                        "class {class:#x}"
                    );
                }
                ensure_empty(&port)
            },
        );
    }

    // REGISTER_AGENT2 alone.
    area.check(
        "REGISTER_AGENT2 refuses QP numbers that 8 bits would make valid",
        || {
            let port = fresh()?;
            for qpn in [0x100, 0x101, 0x0100_0001, u32::MAX] {
                ensure_errno!(port.register2(&only().qpn(qpn)), EINVAL, "QP {qpn:#x}");
            }
            ensure_empty(&port)
        },
    );
    for flags in [2, 3, 0x8000_0000, u32::MAX] {
        area.check(
            format!("REGISTER_AGENT2 refuses flags {flags:#x} and writes back what it knows"),
            move || {
                let port = fresh()?;
                let mut req = vendor().flags(flags).to_req2();
                req.id = 77;
                let before = req;
                ensure_errno!(port.register2_raw(&mut req), EINVAL);
                ensure_eq!(req.flags, abi::USER_RMPP);
                req.flags = before.flags;
                ensure_eq!(req, before, "the other fields");
                ensure_empty(&port)?;
                ensure_free(&vendor())
            },
        );
    }
    area.check(
        "bad flags are reported even when the OUI is bad and no slot is free",
        || {
            let port = fresh()?;
            ensure_empty(&port)?;
            let mut req = vendor().oui(0xff00_0001).flags(4).to_req2();
            ensure_errno!(port.register2_raw(&mut req), EINVAL);
            ensure_eq!(req.flags, abi::USER_RMPP);
            Ok(())
        },
    );
    area.check(
        "a bad QP number is reported first: flags are not written back",
        || {
            let mut req = vendor().qpn(2).flags(4).to_req2();
            ensure_errno!(fresh()?.register2_raw(&mut req), EINVAL);
            ensure_eq!(req.flags, 4);
            Ok(())
        },
    );
    area.check(
        "REGISTER_AGENT2 refuses USER_RMPP for a send-only agent",
        || {
            let port = fresh()?;
            let mut req = only().rmpp(1).user_rmpp().to_req2();
            ensure_errno!(port.register2_raw(&mut req), EINVAL);
            ensure_eq!(req.flags, abi::USER_RMPP);
            ensure_empty(&port)
        },
    );
    area.check(
        "REGISTER_AGENT2 takes USER_RMPP with and without an RMPP version",
        || {
            let port = fresh()?;
            port.register2(&vendor().rmpp(1).user_rmpp())?;
            port.register2(&Peers::registration(CLASS + 1).user_rmpp())?;
            port.register2(&Registration::class(0x0a, 1).user_rmpp())?;
            Ok(())
        },
    );
    for oui in [0x0100_0000, 0x0100_1405, 0xff00_0000, u32::MAX] {
        area.check(
            format!("REGISTER_AGENT2 refuses OUI {oui:#010x}: more than 24 bits"),
            move || {
                let port = fresh()?;
                ensure_errno!(port.register2(&vendor().oui(oui)), EINVAL);
                ensure_errno!(
                    port.register2(&Registration::class(0x0a, 1).oui(oui)),
                    EINVAL,
                    "a class without OUI"
                );
                ensure_empty(&port)
            },
        );
    }
    area.check(
        "REGISTER_AGENT2 does not look at the OUI of a send-only agent",
        || {
            fresh()?.register2(&only().oui(u32::MAX))?;
            Ok(())
        },
    );
    area.check("REGISTER_AGENT2 ignores its reserved fields", || {
        let mut req = vendor().to_req2();
        req.res = 0xffff;
        req.reserved = [0xff; 3];
        ensure_eq!(fresh()?.register2_raw(&mut req)?, AgentId(0));
        ensure_eq!((req.res, req.reserved), (0xffff, [0xff; 3]));
        Ok(())
    });

    // The argument.
    for call in Call::BOTH {
        area.check(
            format!("{} writes the id, and nothing else", call.name()),
            move || {
                let port = fresh()?;
                call.register(&port, &only())?;
                let mut argument = call.argument(&vendor());
                argument[..4].fill(0xee);
                let memory = Guarded::new(1)?;
                let at = memory.put_at_end(&argument)?;
                call.at(&port, at)?;
                argument[..4].copy_from_slice(&1u32.to_ne_bytes());
                ensure_eq!(memory.get(PAGE - argument.len(), argument.len())?, argument);
                Ok(())
            },
        );
        area.check(
            format!(
                "{} works on an argument that ends at the end of memory",
                call.name()
            ),
            move || {
                let memory = Guarded::new(1)?;
                call.at(&fresh()?, memory.put_at_end(&call.argument(&vendor()))?)?;
                Ok(())
            },
        );
        area.check(
            format!(
                "{} of bad pointers is EFAULT, 1,000 times, and leaks no agent",
                call.name()
            ),
            move || {
                let port = fresh()?;
                let memory = Guarded::new(1)?;
                let argument = call.argument(&vendor());
                memory.put_at_end(&argument)?;
                let bad: [*mut u8; 5] = [
                    std::ptr::null_mut(),
                    std::ptr::without_provenance_mut(8),
                    // An address of the kernel.
                    std::ptr::without_provenance_mut(usize::MAX - 0xfff),
                    memory.before_end(0),
                    // All but the last byte is there.
                    memory.before_end(argument.len() - 1),
                ];
                for _ in 0..1000 {
                    for pointer in bad {
                        ensure_errno!(call.at(&port, pointer), EFAULT, "{pointer:?}");
                    }
                }
                ensure_empty(&port)?;
                ensure_free(&vendor())
            },
        )
        .timeout(300);
        area.check(
            format!(
                "{} whose id cannot be written is EFAULT, 1,000 times, and leaves no agent",
                call.name()
            ),
            move || {
                let port = fresh()?;
                let memory = Guarded::new(1)?;
                let at = memory.put_at_end(&call.argument(&vendor()))?;
                memory.protect(0, 1, Prot::Read)?;
                for n in 0..1000 {
                    // Were one registered, the next would get EINVAL: its methods are taken.
                    ensure_errno!(call.at(&port, at), EFAULT, "time {n}");
                }
                ensure_free(&vendor())?;
                ensure_empty(&port)
            },
        )
        .timeout(300);
        area.check(
            format!(
                "{} whose id cannot be written does not settle the header layout",
                call.name()
            ),
            move || {
                let port = fresh()?;
                let memory = Guarded::new(1)?;
                let at = memory.put_at_end(&call.argument(&only()))?;
                memory.protect(0, 1, Prot::Read)?;
                ensure_errno!(call.at(&port, at), EFAULT);
                let mut buf = [0; 56];
                ensure_errno!(port.read(&mut buf), EAGAIN, "a 56-byte read");
                port.enable_pkey()?;
                ensure_errno!(port.read(&mut buf), EINVAL, "a 56-byte read");
                Ok(())
            },
        );
    }
    area.check(
        "REGISTER_AGENT2 whose flags cannot be written back is EFAULT",
        || {
            let port = fresh()?;
            let memory = Guarded::new(1)?;
            let at = memory.put_at_end(&Call::Two.argument(&vendor().flags(2)))?;
            memory.protect(0, 1, Prot::Read)?;
            ensure_errno!(Call::Two.at(&port, at), EFAULT);
            ensure_empty(&port)
        },
    );
    area.check("a refused REGISTER_AGENT writes nothing", || {
        let mut req = vendor().qpn(9).to_req();
        req.id = 0xeeee_eeee;
        let before = req;
        ensure_errno!(fresh()?.register_raw(&mut req), EINVAL);
        ensure_eq!(req, before);
        Ok(())
    });
    area.check("ioctls that umad does not have are ENOTTY", || {
        let port = fresh()?;
        let fd = port.as_raw_fd();
        let mut argument = [0u8; 64];
        let known = [
            abi::REGISTER_AGENT,
            abi::UNREGISTER_AGENT,
            abi::ENABLE_PKEY,
            abi::REGISTER_AGENT2,
        ];
        let numbers = (0..=5).map(|nr| 0xc01c_1b00 | nr);
        // Right number, wrong size, direction or magic.
        for request in numbers.chain([0xc01c_1c01, 0x401c_1b01, 0xc01d_1b01, 0x1b04, 0x5401]) {
            if known.contains(&request) {
                continue;
            }
            let request = libc::Ioctl::from(request);
            // SAFETY: `argument` is longer than what any of these calls would access.
            let result = unsafe { libc::ioctl(fd, request, argument.as_mut_ptr()) };
            ensure_errno!(Errno::result(result), ENOTTY, "ioctl {request:#x}");
        }
        Ok(())
    });

    // Ids.
    area.check("ids go from 0 to 31, the 33rd agent is ENOMEM", || {
        ensure_empty(&fresh()?)
    });
    area.check("both calls share the ids of a file", || {
        let port = fresh()?;
        for id in 0..abi::MAX_AGENTS {
            let call = Call::BOTH[usize::try_from(id % 2)?];
            ensure_eq!(call.register(&port, &only())?, AgentId(id));
        }
        for call in Call::BOTH {
            ensure_errno!(call.register(&port, &only()), ENOMEM);
        }
        Ok(())
    });
    area.check(
        "with 32 agents, a bad QP is still EINVAL, a bad class ENOMEM",
        || {
            let port = fresh()?;
            ensure_empty(&port)?;
            for call in Call::BOTH {
                ensure_errno!(call.register(&port, &only().qpn(2)), EINVAL);
                ensure_errno!(call.register(&port, &Registration::class(0xff, 1)), ENOMEM);
            }
            ensure_errno!(port.register2(&vendor().oui(u32::MAX)), ENOMEM);
            Ok(())
        },
    );
    area.check("the lowest free id is given out first", || {
        let port = fresh()?;
        ensure_empty(&port)?;
        for id in [20, 3, 31, 0, 4] {
            port.unregister(AgentId(id))?;
        }
        for id in [0, 3, 4, 20, 31] {
            ensure_eq!(port.register(&only())?, AgentId(id));
        }
        ensure_errno!(port.register(&only()), ENOMEM);
        Ok(())
    });
    area.check("two files of a port have ids of their own", || {
        let (one, two) = (fresh()?, fresh()?);
        ensure_eq!(one.register(&only())?, AgentId(0));
        ensure_eq!(two.register(&only())?, AgentId(0));
        ensure_eq!(one.register(&only())?, AgentId(1));
        Ok(())
    });
    area.check("40 files with 32 agents each", || {
        let mut files = Vec::new();
        for _ in 0..40 {
            let port = fresh()?;
            ensure_empty(&port)?;
            files.push(port);
        }
        Ok(())
    })
    .timeout(300);
    area.check(
        "eight threads that register at once get 32 different ids",
        || {
            let port = fresh()?;
            let mut ids = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| {
                            (0..4)
                                .map(|_| port.register(&only()))
                                .collect::<Result<Vec<_>, _>>()
                        })
                    })
                    .collect();
                let mut ids = Vec::new();
                for thread in threads {
                    match thread.join() {
                        Ok(got) => ids.extend(got?),
                        Err(_) => return Err(ktap::Failure::Failed("a thread panicked".into())),
                    }
                }
                Ok(ids)
            })?;
            ids.sort();
            ensure_eq!(ids, (0..32).map(AgentId).collect::<Vec<_>>());
            ensure_errno!(port.register(&only()), ENOMEM);
            Ok(())
        },
    );
    for (name, read, write) in [("read-only", true, false), ("write-only", false, true)] {
        area.check(format!("registering works on a {name} file"), move || {
            let number = ktap::wait_for_umad("rxe0")?;
            let file = std::fs::File::options()
                .read(read)
                .write(write)
                .open(umad::port::node(number))?;
            let port = Port::from_fd(file.into());
            ensure_eq!(port.register(&only())?, AgentId(0));
            ensure_eq!(port.register2(&vendor())?, AgentId(1));
            Ok(())
        });
    }

    // Who may have which methods.
    for (what, registration) in [
        ("a vendor class", vendor()),
        (
            "class 0x0a",
            Registration::class(0x0a, 1).methods(&[Method::GET, Method::SET]),
        ),
        (
            "class 0x03",
            Registration::class(0x03, 2).methods(&[Method::REPORT]),
        ),
    ] {
        area.check(
            format!("the same methods of {what} twice on one file are EINVAL"),
            move || {
                let port = fresh()?;
                port.register(&registration)?;
                for call in Call::BOTH {
                    ensure_errno!(call.register(&port, &registration), EINVAL);
                }
                ensure_eq!(port.register(&only())?, AgentId(1));
                Ok(())
            },
        );
        area.check(
            format!("the same methods of {what} on two files are EINVAL"),
            move || {
                let (one, two) = (fresh()?, fresh()?);
                one.register(&registration)?;
                for call in Call::BOTH {
                    ensure_errno!(call.register(&two, &registration), EINVAL);
                }
                Ok(())
            },
        );
        area.check(
            format!("methods of {what} are free after close()"),
            move || {
                let one = fresh()?;
                one.register(&registration)?;
                drop(one);
                ensure_free(&registration)
            },
        );
        area.check(
            format!("methods of {what} are free after UNREGISTER_AGENT"),
            move || {
                let (one, two) = (fresh()?, fresh()?);
                let agent = one.register(&registration)?;
                ensure_errno!(two.register(&registration), EINVAL);
                one.unregister(agent)?;
                two.register(&registration)?;
                ensure_errno!(one.register(&registration), EINVAL);
                Ok(())
            },
        );
        area.check(format!("two ports each have {what}"), move || {
            let (one, two) = (fresh()?, fresh_on("rxe1")?);
            one.register(&registration)?;
            two.register(&registration)?;
            Ok(())
        });
        area.check(
            format!("without methods, {what} can be registered many times"),
            move || {
                let (one, two) = (fresh()?, fresh()?);
                one.register(&registration)?;
                for port in [&one, &two] {
                    for _ in 0..3 {
                        port.register(&registration.mask(MethodMask::NONE))?;
                    }
                }
                Ok(())
            },
        );
    }
    area.check(
        "disjoint methods of one class go to two agents, each gets its own",
        || {
            let peers = Peers::with(
                "rxe0",
                "rxe1",
                Layout::New,
                &vendor().methods(&[Method::SEND]),
            )?;
            let second = peers
                .b
                .port
                .register2(&vendor().methods(&[Method::REPORT]))?;
            for (method, agent) in [
                (Method::REPORT, second),
                (Method::SEND, peers.b.agent),
                (Method::REPORT, second),
            ] {
                let packet = peers.a.packet(&peers.b, method, fresh_tid());
                peers.a.port.send(&packet)?;
                ensure_eq!(peers.b.recv_tid(packet.tid()?)?.agent, agent);
            }
            Ok(())
        },
    );
    area.check(
        "one common method is enough for EINVAL, the others stay free",
        || {
            let (one, two) = (fresh()?, fresh()?);
            one.register(&vendor().methods(&[Method::GET, Method::SET]))?;
            ensure_errno!(
                two.register(&vendor().methods(&[Method::SET, Method::SEND])),
                EINVAL
            );
            two.register(&vendor().methods(&[Method::SEND, Method::REPORT]))?;
            Ok(())
        },
    );
    area.check("another OUI is another class: both get their own", || {
        let peers = Peers::new()?;
        let other = peers.b.port.register2(&vendor().oui(OUI + 1))?;
        for (oui, agent) in [(OUI + 1, other), (OUI, peers.b.agent)] {
            let tid = fresh_tid();
            let mad = VendorMad::new(CLASS, oui, Method::SEND, tid).into_bytes();
            peers
                .a
                .port
                .send(&Packet::new(peers.a.agent, &peers.b.address(), mad))?;
            ensure_eq!(peers.b.recv_tid(tid)?.agent, agent);
        }
        Ok(())
    });
    area.check(
        "another class version is another class: both get their own",
        || {
            let peers = Peers::new()?;
            let mut registration = vendor();
            registration.class_version = 2;
            let other = peers.b.port.register2(&registration)?;
            for (version, agent) in [(2, other), (1, peers.b.agent)] {
                let tid = fresh_tid();
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, tid)
                    .class_version(version)
                    .into_bytes();
                peers
                    .a
                    .port
                    .send(&Packet::new(peers.a.agent, &peers.b.address(), mad))?;
                ensure_eq!(peers.b.recv_tid(tid)?.agent, agent);
            }
            Ok(())
        },
    );
    area.check(
        "eight OUIs fit into a vendor class, the ninth is ENOMEM",
        || {
            let port = fresh()?;
            for n in 1..=8 {
                port.register(&Peers::registration(0x41).oui(n))?;
            }
            ensure_errno!(port.register(&Peers::registration(0x41).oui(9)), ENOMEM);
            port.unregister(AgentId(3))?;
            ensure_eq!(
                port.register(&Peers::registration(0x41).oui(9))?,
                AgentId(3)
            );
            Ok(())
        },
    );

    // What registration brings.
    for call in Call::BOTH {
        area.check(
            format!(
                "{}: each of the 128 bits of the mask is its method",
                call.name()
            ),
            move || {
                let sender = Endpoint::open("rxe0", Layout::New, &only())?;
                for method in 0..128 {
                    // TrapRepress is a response, and a response goes by its TID.
                    if Method(method) == Method::TRAP_REPRESS {
                        continue;
                    }
                    let file = fresh_on("rxe1")?;
                    let registration = vendor().mask(MethodMask(1 << method));
                    let agent = call.register(&file, &registration)?;
                    let receiver = Endpoint {
                        port: file,
                        agent,
                        class: CLASS,
                        ibdev: "rxe1".into(),
                        umad: ktap::wait_for_umad("rxe1")?,
                        gid: umad::sysfs::gid("rxe1", 1, 0)?,
                    };
                    let packet = sender.packet(&receiver, Method(method), fresh_tid());
                    sender.port.send(&packet)?;
                    let got = receiver
                        .recv_tid(packet.tid()?)
                        .what(format!("method {method:#x}"))?;
                    ensure_eq!(got.mad_header()?.method, Method(method));
                }
                Ok(())
            },
        )
        .timeout(300);
    }
    area.check(
        "an agent gets no method, class, version or OUI that it did not ask for",
        || {
            let sender = Endpoint::open("rxe0", Layout::New, &only())?;
            let receiver = Endpoint::open("rxe1", Layout::New, &vendor().methods(&[Method::SEND]))?;
            let mads = [
                VendorMad::new(CLASS, OUI, Method::REPORT, fresh_tid()),
                VendorMad::new(CLASS + 1, OUI, Method::SEND, fresh_tid()),
                VendorMad::new(CLASS, OUI + 1, Method::SEND, fresh_tid()),
                VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).class_version(2),
            ];
            for mad in mads {
                let packet = Packet::new(sender.agent, &receiver.address(), mad.into_bytes());
                sender.port.send(&packet)?;
            }
            // What follows on the same way comes, so the others are not still under way.
            let last = sender.packet(&receiver, Method::SEND, fresh_tid());
            sender.port.send(&last)?;
            ensure_eq!(receiver.recv()?.tid()?.low(), last.tid()?.low());
            Ok(())
        },
    );
    area.check(
        "a send-only agent gets nothing unsolicited, but its responses",
        || {
            let asker = Endpoint::open("rxe0", Layout::New, &only())?;
            let answerer = Endpoint::open("rxe1", Layout::New, &vendor())?;
            let mut back = answerer.packet(&asker, Method::SEND, fresh_tid());
            back.mad[1] = CLASS;
            answerer.port.send(&back)?;
            let request = asker
                .packet(&answerer, Method::GET, fresh_tid())
                .timeout(SOON);
            asker.port.send(&request)?;
            let got = answerer.recv_tid(request.tid()?)?;
            answerer.port.send(&answerer.response(&got)?)?;
            let answer = asker.recv()?;
            ensure_eq!(answer.tid()?.low(), request.tid()?.low());
            ensure_eq!(answer.header.status, 0);
            Ok(())
        },
    );
    area.check(
        "a Get that no agent wants is answered by the kernel",
        || {
            let asker = Endpoint::open("rxe0", Layout::New, &only())?;
            let silent = Endpoint::open("rxe1", Layout::New, &only())?;
            let mad = VendorMad::new(0x33, OUI, Method::GET, fresh_tid()).into_bytes();
            let request = Packet::new(asker.agent, &silent.address(), mad).timeout(SOON);
            asker.port.send(&request)?;
            let answer = asker.recv_tid(request.tid()?)?;
            ensure_eq!(answer.mad_header()?.method, Method::GET_RESP);
            ensure_eq!(answer.mad_header()?.status.get(), 0x000c);
            Ok(())
        },
    );

    // The warning.
    let warning = "did not enable P_Key index support";
    area.check(
        "REGISTER_AGENT without P_Key index warns once per file",
        move || {
            let mut log = quiet_log()?;
            let port = fresh()?;
            port.register(&only())?;
            let lines = log.with(warning)?;
            ensure_eq!(lines.len(), 1, "warnings after the first agent");
            let number = ktap::wait_for_umad("rxe0")?;
            ensure!(
                lines[0].contains(&format!("umad{number}"))
                    && lines[0].contains("process register"),
                "it should name the device and the process: {}",
                lines[0]
            );
            port.register(&only())?;
            port.unregister(AgentId(0))?;
            port.register(&only())?;
            ensure_eq!(log.with(warning)?.len(), 0, "warnings after more agents");
            fresh()?.register(&only())?;
            ensure_eq!(log.with(warning)?.len(), 1, "warnings for the next file");
            Ok(())
        },
    );
    area.check(
        "a REGISTER_AGENT that failed does not use up the warning",
        move || {
            let mut log = quiet_log()?;
            let port = fresh()?;
            ensure_errno!(port.register(&only().qpn(2)), EINVAL);
            ensure_errno!(port.register(&Registration::class(0xff, 1)), EINVAL);
            ensure_eq!(log.with(warning)?.len(), 0);
            port.register(&only())?;
            ensure_eq!(log.with(warning)?.len(), 1);
            Ok(())
        },
    );
    area.check(
        "no warning with ENABLE_PKEY or REGISTER_AGENT2",
        move || {
            let mut log = Mark::now()?;
            let port = fresh()?;
            port.enable_pkey()?;
            port.register(&only())?;
            let port = fresh()?;
            port.register2(&only())?;
            port.register(&only())?;
            ensure_eq!(log.with(warning)?.len(), 0);
            Ok(())
        },
    );
    area.check("a refused registration says why, in the words that scripts know", || {
        let pair = RxePair::plain("rn")?;
        pair.a.plug()?;
        let umad = pair.a.umad()?;
        let port = Port::options().layout(Layout::Old).open(umad)?;
        let mut log = quiet_log()?;
        let mut says = |level: u32, message: &str| -> Outcome {
            let told = log.records()?;
            let told: Vec<_> = told.iter().filter(|(_, m)| m.contains("infiniband_mad umad")).collect();
            let expected = (level, format!("infiniband_mad umad{umad}: {message}"));
            ensure_eq!(told, [&expected]);
            Ok(())
        };
        ensure_errno!(port.register(&only().qpn(2)), EINVAL);
        says(5, "ib_umad_reg_agent: invalid QPN 2 specified")?;
        ensure_errno!(port.register2(&only().qpn(300)), EINVAL);
        says(5, "ib_umad_reg_agent2: invalid QPN 300 specified")?;
        ensure_errno!(port.register2(&only().flags(0x106)), EINVAL);
        says(5, "ib_umad_reg_agent2 failed: invalid registration flags specified 0x106; supported 0x1")?;
        ensure_errno!(port.register2(&vendor().oui(0x0100_1405)), EINVAL);
        says(5, "ib_umad_reg_agent2 failed: oui invalid 0x01001405")?;
        for _ in 0..32 {
            port.register2(&Registration::send_only())?;
        }
        ensure_errno!(port.register(&only()), ENOMEM);
        says(5, "ib_umad_reg_agent: Max Agents (32) reached")?;
        ensure_errno!(port.register2(&only()), ENOMEM);
        says(5, "ib_umad_reg_agent2: Max Agents (32) reached")?;
        pair.a.unplug()?;
        ensure_errno!(port.register(&only()), EPIPE);
        says(5, "ib_umad_reg_agent: invalid device")?;
        ensure_errno!(port.register2(&only()), EPIPE);
        says(5, "ib_umad_reg_agent2: invalid device")
    });
    area.check(
        "the warning's words and level are those that scripts know, too",
        || {
            let mut log = quiet_log()?;
            fresh()?.register(&only())?;
            let told = log.records()?;
            let umad = format!("infiniband_mad umad{}: ", ktap::wait_for_umad("rxe0")?);
            let told: Vec<_> = told.iter().filter(|(_, m)| m.starts_with(&umad)).collect();
            let name = std::fs::read_to_string("/proc/self/comm")?;
            let first = format!(
                "{umad}process {} did not enable P_Key index support.",
                name.trim()
            );
            let second =
                format!("{umad}   Documentation/infiniband/user_mad.rst has info on the new ABI.");
            ensure_eq!(told, [&(4, first), &(4, second)]);
            Ok(())
        },
    );
    area.check("ib_mad says why it refuses, if it is asked to", || {
        let control = "/proc/dynamic_debug/control";
        if !std::fs::exists(control)? {
            return skip("this kernel has no dynamic debug");
        }
        let ask = |flag| std::fs::write(control, format!("func ib_register_mad_agent {flag}"));
        ask("+p").what("dynamic debug")?;
        let mut log = Mark::now()?;
        let outcome = [
            (only().rmpp(7), "invalid RMPP Version 7"),
            (
                Registration {
                    class_version: 0x83,
                    ..vendor()
                },
                "invalid Class Version 131",
            ),
            (vendor().oui(0), "No OUI specified for class 0x"),
        ]
        .into_iter()
        .try_for_each(|(registration, why)| -> Outcome {
            ensure_errno!(fresh()?.register2(&registration), EINVAL);
            let told = log.records()?;
            let found = told.iter().any(|(level, m)| *level == 7 && m.contains(why));
            ensure!(found, "no {why:?} in {told:?}");
            Ok(())
        });
        ask("-p")?;
        outcome
    });
    area.check("a program cannot flood the kernel's log", || {
        let port = fresh()?;
        let mut log = quiet_log()?;
        let flood = |count: u32| -> Outcome {
            for _ in 0..count {
                ensure_errno!(port.register(&only().qpn(2)), EINVAL);
            }
            Ok(())
        };
        let begin = Instant::now();
        flood(500)?;
        let windows = begin.elapsed().as_secs() / 5 + 1;
        let told = log.with("invalid QPN 2")?.len();
        ensure!(
            u64::try_from(told)? <= 10 * windows,
            "{told} messages in {:?}",
            begin.elapsed()
        );
        ensure!(told >= 10, "{told} messages");
        // It tells how many it held back, when there is room again.
        std::thread::sleep(LOG_WINDOW);
        flood(1)?;
        ensure_eq!(log.with("ib_umad: ")?.len(), 1);
        Ok(())
    })
    .improvement(15);
    area.check(
        "registering on a file that is no umad file is ENOTTY",
        || {
            let port = Port::options()
                .layout(Layout::Old)
                .open_path(Path::new("/dev/null"))?;
            for call in Call::BOTH {
                ensure_errno!(call.register(&port, &only()), ENOTTY);
            }
            Ok(())
        },
    );
    area.check(
        "what the kernel writes back is what the structure says",
        || {
            let port = fresh()?;
            let memory = Guarded::new(1)?;
            let at = memory.put_at_end(&Call::Two.argument(&only()))?;
            Call::Two.at(&port, at)?;
            let bytes = memory.get(PAGE - 40, 40)?;
            let req = RegReq2::read_from_bytes(&bytes).map_err(|e| e.to_string())?;
            ensure_eq!(req, only().to_req2());
            Ok(())
        },
    );

    area.run()
}
