// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `trace`: the tracepoints `ib_umad:*`. Programs that know those of the C module see the same; and what
//! is dropped is told with its reason, which the C module has no tracepoint for.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;

use ktap::memory::{Guarded, Prot, PAGE};
use ktap::module::{file_of, load_file, unload_when_idle, Loaded};
use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::Impl;
use nix::sched::{sched_setaffinity, CpuSet};
use nix::unistd::Pid;
use selftests::calls::write_at;
use selftests::fdinfo::FdInfo;
use selftests::injection::{code_of, Injection};
use selftests::netlink::Rdma;
use selftests::parameters::with;
use selftests::task::MUST;
use selftests::trace::{events, format_of, Event, Trace};
use selftests::vhca::{Frame, Module, Shape, Spec, SpecExt, VhcaExt};

const WRITE: &str = "ib_umad_write";
const RECEIVED: &str = "ib_umad_read_recv";
const UNANSWERED: &str = "ib_umad_read_send";
const DROP: &str = "ib_umad_drop";
/// Those that the C module has.
const KNOWN: [&str; 3] = [RECEIVED, UNANSWERED, WRITE];

/// The number of a device.
fn index(ibdev: &str) -> Outcome<u32> {
    Ok(Rdma::open()?.index(ibdev)?)
}

/// The descriptions of the events that both modules have, as `module` has them.
fn formats_of(module: Impl) -> Outcome<Vec<String>> {
    unload_when_idle(SOON)?;
    load_file(&file_of(module)?, c"").what("loading")?;
    KNOWN.iter().map(|event| format_of(event)).collect()
}

/// A packet to `b` that fills in what it can, and asks for no answer.
fn colourful(peers: &Peers) -> Packet {
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
        .attribute(0x1234, 0x5678_9abc)
        .status(0x0a0b);
    let mut address = peers.b.address();
    if let Some(grh) = &mut address.grh {
        grh.traffic_class = 7;
        grh.flow_label = 0xabcde;
        grh.hop_limit = 9;
    }
    address.sl = 3;
    address.path_bits = 1;
    let mut packet = Packet::new(peers.a.agent, &address, mad.into_bytes());
    // What nobody looks at is traced all the same.
    packet.header.status = 0x1122_3344;
    packet.header.length = 99;
    packet.mad[6..8].copy_from_slice(&[0x5a, 0xa5]);
    packet
}

fn known(area: &mut ktap::Area<'_>) {
    area.check(
        "both modules describe their events by the same words",
        || {
            let mine = Impl::current()?;
            let _again = Loaded;
            let others = formats_of(if mine == Impl::C { Impl::Rust } else { Impl::C })?;
            let own = formats_of(mine)?;
            for ((event, own), other) in KNOWN.iter().zip(own).zip(others) {
                ensure!(
                    own.contains("field:") && own.contains("print fmt:"),
                    "{own}"
                );
                ensure_eq!(own, other, "{event}");
            }
            let drop = (mine == Impl::Rust).then_some(DROP);
            let all: Vec<&str> = drop.into_iter().chain(KNOWN).collect();
            ensure_eq!(events()?, all);
            Ok(())
        },
    );
    for layout in [Layout::Old, Layout::New] {
        let len = layout.header_len();
        area.check(
            format!("a write() is traced as it was written ({len})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let trace = Trace::of(&KNOWN)?;
                let packet = colourful(&peers)
                    .timeout(Duration::from_secs(50))
                    .retries(3);
                peers.a.port.send(&packet)?;
                let text = Event::text_of(index("rxe0")?, 1, &packet)?;
                ensure_eq!(trace.only(WRITE)?, text);
                Ok(())
            },
        );
        area.check(
            format!("a received MAD is traced when it is read, not before ({len})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let trace = Trace::of(&[RECEIVED, UNANSWERED])?;
                peers.a.port.send(&colourful(&peers))?;
                peers.b.wait_readable()?;
                ensure_eq!(trace.events()?, []);
                let packet = peers.b.recv()?;
                let text = Event::text_of(index("rxe1")?, 1, &packet)?;
                ensure!(
                    text.contains("attr_id 0x1234") && text.contains("grh 0x1"),
                    "{text}"
                );
                ensure_eq!(trace.only(RECEIVED)?, text);
                Ok(())
            },
        );
        area.check(
            format!("so is the report of a timeout, as it is read ({len})"),
            move || {
                let peers = Peers::with_layout(layout)?;
                let trace = Trace::of(&[RECEIVED, UNANSWERED])?;
                let sent = colourful(&peers).timeout(Duration::from_millis(20));
                peers.a.port.send(&sent)?;
                peers.a.wait_readable()?;
                ensure_eq!(trace.events()?, []);
                let packet = peers.a.recv()?;
                ensure_eq!(packet.header.status, 110);
                ensure_eq!(packet.tid()?.low(), sent.tid()?.low());
                let text = Event::text_of(index("rxe0")?, 1, &packet)?;
                ensure_eq!(trace.only(UNANSWERED)?, text);
                Ok(())
            },
        );
    }
    area.check("the P_Key index is traced", || {
        let peers = Peers::new()?;
        let trace = Trace::of(&[WRITE])?;
        let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        packet.pkey_index = 0x77;
        // It is none; but the packet was written.
        let _ = peers.a.port.send(&packet);
        ensure!(trace.only(WRITE)?.contains(" pkeyi 119  MAD:"));
        Ok(())
    });
    area.check(
        "a write() that is refused for what is in it is traced, too",
        || {
            let peers = Peers::new()?;
            let trace = Trace::of(&[WRITE])?;
            let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            packet.agent = AgentId(31);
            ensure_errno!(peers.a.port.send(&packet), EIO);
            ensure_eq!(
                trace.only(WRITE)?,
                Event::text_of(index("rxe0")?, 1, &packet)?
            );
            Ok(())
        },
    );
    area.check("what cannot be read as a packet is not traced", || {
        let peers = Peers::new()?;
        let trace = Trace::of(&KNOWN)?;
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        ensure_errno!(
            peers.a.port.write(&packet.to_bytes(Layout::New)[..99]),
            EINVAL
        );
        let fd = peers.a.port.as_fd();
        ensure_errno!(write_at(fd, std::ptr::null(), 64 + 256), EFAULT);
        let memory = Guarded::new(2)?;
        memory.put(PAGE - 64, &packet.to_bytes(Layout::New)[..64])?;
        memory.protect(1, 1, Prot::None)?;
        let start = memory.start().wrapping_add(PAGE - 64);
        ensure_errno!(write_at(fd, start, 64 + 256), EFAULT);
        let mut packet = packet;
        packet.agent = AgentId(32);
        ensure_errno!(peers.a.port.send(&packet), EINVAL);
        ensure_eq!(trace.events()?, []);
        Ok(())
    });
    area.check(
        "a read() that fails is not traced, the one that has it then is, once",
        || {
            let peers = Peers::new()?;
            let trace = Trace::of(&[RECEIVED, UNANSWERED])?;
            let short = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers
                .a
                .port
                .send(&short.timeout(Duration::from_millis(20)))?;
            for end in [&peers.a, &peers.b] {
                end.wait_readable()?;
                for _ in 0..3 {
                    ensure_errno!(end.port.read(&mut [0; 64 + 20]), EINVAL);
                }
            }
            ensure_eq!(trace.events()?, []);
            peers.b.recv()?;
            trace.only(RECEIVED)?;
            trace.clear()?;
            peers.a.recv()?;
            trace.only(UNANSWERED)?;
            Ok(())
        },
    );
    area.check(
        "a message by RMPP is one event on each side, with all its length",
        || {
            let registration = Peers::registration(CLASS).rmpp(1);
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
            let trace = Trace::of(&KNOWN)?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).rmpp();
            let mad = mad.payload(&[0x5a; 5000]).into_bytes();
            let message = Packet::new(peers.a.agent, &peers.b.address(), mad);
            peers.a.port.send(&message)?;
            let got = peers.b.recv()?;
            ensure!(got.header.length > 64 + 5000, "{}", got.header.length);
            let seen = trace.wait(2)?;
            ensure_eq!(seen[0].text, Event::text_of(index("rxe0")?, 1, &message)?);
            ensure_eq!(seen[1].text, Event::text_of(index("rxe1")?, 1, &got)?);
            Ok(())
        },
    );
    area.check(
        "500 requests and answers are 2,000 events: nothing is lost, nothing doubled",
        || {
            const COUNT: usize = 500;
            let peers = Peers::new()?;
            let trace = Trace::of(&KNOWN)?;
            let mut expected = Vec::new();
            let (a, b) = (index("rxe0")?, index("rxe1")?);
            for _ in 0..COUNT {
                let tid = fresh_tid();
                let request = peers.a.packet(&peers.b, Method::GET, tid);
                let request = request.timeout(Duration::from_secs(60));
                peers.a.port.send(&request)?;
                let got = peers.b.recv_tid(tid)?;
                let response = peers.b.response(&got)?;
                peers.b.port.send(&response)?;
                let answer = peers.a.recv_answer(tid)?;
                for (device, name, packet) in [
                    (a, WRITE, request),
                    (b, RECEIVED, got),
                    (b, WRITE, response),
                    (a, RECEIVED, answer),
                ] {
                    expected.push(Event {
                        name: name.to_owned(),
                        text: Event::text_of(device, 1, &packet)?,
                    });
                }
            }
            let seen = trace.wait(4 * COUNT)?;
            for (n, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                ensure_eq!(seen, expected, "event {n}");
            }
            Ok(())
        },
    );
    area.check("begun and ended while others write and read", || {
        on_one_processor()?;
        let peers = Peers::new()?;
        let end = Instant::now() + Duration::from_secs(3);
        std::thread::scope(|scope| {
            let busy = scope.spawn(|| {
                while Instant::now() < end {
                    peers.round_trip(fresh_tid())?;
                }
                Ok::<_, ktap::Failure>(())
            });
            let mut seen = 0;
            while Instant::now() < end {
                let trace = Trace::of(&KNOWN)?;
                let _ = wait_until("", Duration::from_millis(50), || false);
                seen += trace.events()?.len();
            }
            ensure!(seen > 0, "no event");
            busy.join().map_err(|_| "the thread panicked")?
        })
    });
}

/// Lets this thread, and those that it begins, run on one processor. To begin a trace changes code; QEMU's emulated
/// processors at times fall over code that is changed while they run it.
fn on_one_processor() -> Outcome {
    let mut one = CpuSet::new();
    one.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &one)?;
    Ok(())
}

/// Traces what is dropped; fails on a module that does not tell.
fn drops() -> Outcome<Trace> {
    Trace::of(&[DROP])
}

/// How many events of drops there are by their reasons.
fn reasons(events: &[Event]) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for event in events {
        let behind_port = event.text.split_once(' ').map_or("", |(_, rest)| rest);
        let reason = behind_port.split(" error ").next().unwrap_or("");
        *count.entry(reason.to_owned()).or_insert(0) += 1;
    }
    count
}

/// The text of an event without the upper half of the transaction id, which the kernel chooses.
fn below_hi_tid(text: &str) -> String {
    match text.split_once(" tid 0x") {
        Some((before, tid)) => format!("{before} tid {}", tid.get(8..).unwrap_or("")),
        None => text.to_owned(),
    }
}

/// What `b` receives is not read; waits until it is there.
fn fill(peers: &Peers, count: u64) -> Outcome {
    for _ in 0..count {
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers.a.port.send(&packet)?;
    }
    wait_until("all have come", SOON, || {
        FdInfo::of(peers.b.port.as_fd())
            .and_then(|info| info.number("unread"))
            .is_ok_and(|unread| unread == count)
    })
}

fn dropped_writes(area: &mut ktap::Area<'_>) {
    area.check("nothing is dropped where nothing goes wrong", || {
        let peers = Peers::new()?;
        let trace = drops()?;
        for _ in 0..20 {
            peers.round_trip(fresh_tid())?;
            peers.deliver(fresh_tid())?;
        }
        let unanswered = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers
            .a
            .port
            .send(&unanswered.timeout(Duration::from_millis(10)))?;
        ensure_eq!(peers.a.recv()?.header.status, 110);
        peers.b.recv()?;
        drop(peers);
        ensure_eq!(trace.events()?, []);
        Ok(())
    })
    .improvement(14);
    area.check(
        "a write() that is refused: why, and what the program was told",
        || {
            let peers = Peers::new()?;
            let device = index("rxe0")?;
            let trace = drops()?;
            let see = |reason: &str, errno: Errno, packet: &Packet| -> Outcome {
                let text = Event::text_of_drop(device, 1, reason, -(errno as i32), packet)?;
                ensure_eq!(trace.only(DROP)?, text);
                trace.clear()
            };
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            let packet = packet.timeout(Duration::from_secs(50));
            peers.a.port.send(&packet)?;
            ensure_errno!(peers.a.port.send(&packet), EINVAL);
            see("duplicate", Errno::EINVAL, &packet)?;

            let mut other = packet.clone();
            other.agent = AgentId(9);
            ensure_errno!(peers.a.port.send(&other), EIO);
            see("agent gone", Errno::EIO, &other)?;

            let mut other = packet.clone();
            other.mad.resize(300, 0);
            ensure_errno!(peers.a.port.send(&other), EINVAL);
            see("refused", Errno::EINVAL, &other)?;

            let bytes = packet.to_bytes(Layout::New);
            let memory = Guarded::new(2)?;
            memory.put(PAGE - 128, &bytes[..128])?;
            memory.protect(1, 1, Prot::None)?;
            let start = memory.start().wrapping_add(PAGE - 128);
            ensure_errno!(write_at(peers.a.port.as_fd(), start, bytes.len()), EFAULT);
            see("copy failed", Errno::EFAULT, &packet)
        },
    )
    .improvement(14);
    area.check("a write() over a bound: which one", || {
        with(c"max_message=65536 max_outstanding=131072", || {
            let registration = Peers::registration(CLASS).rmpp(1);
            let peers = Peers::with("rxe0", "rxe1", Layout::New, &registration)?;
            peers.b.port.unregister(peers.b.agent)?;
            let trace = drops()?;
            let message = |len| {
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).rmpp();
                let mut mad = mad.into_bytes();
                mad.resize(len, 0);
                let packet = Packet::new(peers.a.agent, &peers.b.address(), mad);
                packet.timeout(Duration::from_secs(50))
            };
            ensure_errno!(peers.a.port.send(&message(65537)), EMSGSIZE);
            ensure!(trace.only(DROP)?.contains(" message too long error -90 "));
            trace.clear()?;
            peers.a.port.send(&message(65536))?;
            ensure_errno!(peers.a.port.send(&message(65536)), ENOBUFS);
            ensure!(trace.only(DROP)?.contains(" too many sends error -105 "));
            Ok(())
        })
    })
    .improvement(14);
    area.check("sends that are cancelled: one event for each", || {
        let peers = Peers::new()?;
        let device = index("rxe0")?;
        let trace = drops()?;
        let mut sent = Vec::new();
        for _ in 0..50 {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            let packet = packet.timeout(Duration::from_secs(50));
            peers.a.port.send(&packet)?;
            sent.push(packet);
        }
        peers.a.port.unregister(peers.a.agent)?;
        // But for the upper half of the transaction id, each is as it was written.
        let mut seen: Vec<String> = trace
            .wait(50)?
            .iter()
            .map(|e| below_hi_tid(&e.text))
            .collect();
        let text = |packet| Event::text_of_drop(device, 1, "send failed or cancelled", 0, packet);
        let expected: Outcome<Vec<String>> = sent.iter().map(text).collect();
        let mut expected: Vec<String> = expected?.iter().map(|text| below_hi_tid(text)).collect();
        seen.sort();
        expected.sort();
        ensure_eq!(seen, expected);
        Ok(())
    })
    .improvement(14);
}

fn dropped_received(area: &mut ktap::Area<'_>) {
    area.check("a queue that is full: an event for each, as many as are counted", || {
        with(c"max_unread=65536", || {
            let peers = Peers::new()?;
            let trace = drops()?;
            let mut sent = Vec::new();
            for _ in 0..200 {
                let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
                peers.a.port.send(&packet)?;
                sent.push(packet);
            }
            let info = || FdInfo::of(peers.b.port.as_fd());
            wait_until("all have come", SOON, || {
                info().is_ok_and(|i| {
                    matches!((i.number("received"), i.number("dropped")), (Ok(r), Ok(d)) if r + d == 200)
                })
            })?;
            let dropped = usize::try_from(info()?.number("dropped")?)?;
            ensure!(dropped > 100, "{dropped} dropped");
            let seen = trace.wait(dropped)?;
            ensure_eq!(reasons(&seen), BTreeMap::from([("queue full".to_owned(), dropped)]));
            // What is told is what came, from whom it came. Which of them did not fit may depend on the moment at
            // which the first ones' way back was found.
            let device = index("rxe1")?;
            let came: Outcome<BTreeSet<String>> = sent
                .into_iter()
                .map(|mut packet| {
                    packet.agent = peers.b.agent;
                    packet.header.gid = peers.a.gid.0;
                    let text = Event::text_of_drop(device, 1, "queue full", 0, &packet)?;
                    Ok(below_hi_tid(&text))
                })
                .collect();
            let told: BTreeSet<String> = seen.iter().map(|e| below_hi_tid(&e.text)).collect();
            ensure_eq!(told.len(), dropped, "one is told twice");
            let others: Vec<_> = told.difference(&came?).cloned().collect();
            ensure_eq!(others, Vec::<String>::new());
            Ok(())
        })
    })
    .improvement(14);
    area.check(
        "what is not read when its agent's id is given out again",
        || {
            let peers = Peers::new()?;
            let trace = drops()?;
            fill(&peers, 7)?;
            peers.b.port.unregister(peers.b.agent)?;
            ensure_eq!(trace.events()?, []);
            ensure_eq!(
                peers.b.port.register2(&Registration::send_only())?,
                peers.b.agent
            );
            ensure_eq!(
                reasons(&trace.wait(7)?),
                BTreeMap::from([("agent gone".to_owned(), 7)])
            );
            Ok(())
        },
    )
    .improvement(14);
    area.check("what is not read when the file is closed", || {
        let peers = Peers::new()?;
        let trace = drops()?;
        fill(&peers, 9)?;
        drop(peers.b);
        let all = BTreeMap::from([("device gone or file closed".to_owned(), 9)]);
        ensure_eq!(reasons(&trace.wait(9)?), all);
        Ok(())
    })
    .improvement(14);
    area.check(
        "what is not read when the device goes, and what is written behind it",
        || {
            let pair = RxePair::new("tr")?;
            let peers = Peers::on(&pair.a.ibdev, &pair.b.ibdev)?;
            let device = index(&pair.b.ibdev)?;
            let trace = drops()?;
            fill(&peers, 5)?;
            pair.b.unplug()?;
            let all = BTreeMap::from([("device gone or file closed".to_owned(), 5)]);
            ensure_eq!(reasons(&trace.wait(5)?), all);
            trace.clear()?;
            let packet = peers.b.packet(&peers.a, Method::SEND, fresh_tid());
            ensure_errno!(peers.b.port.send(&packet), EIO);
            let reason = "device gone or file closed";
            let text = Event::text_of_drop(device, 1, reason, -libc::EIO, &packet)?;
            ensure_eq!(trace.only(DROP)?, text);
            Ok(())
        },
    )
    .improvement(14);
    area.check("a MAD whose sender cannot be answered", || {
        let device = Spec::new(Shape::Ca, 1)
            .port(1, |port| port.lid = 1)
            .in_user_space()
            .plug()?;
        let agent = device.agent(1, &Peers::registration(CLASS))?;
        let trace = drops()?;
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
        let mut frame = Frame::mad(1, 2, 1, mad.clone());
        frame.grh = Some([7; 40]);
        device.write_frame(&frame)?;
        let text = trace.only(DROP)?;
        let tid = format!("tid {:#018x}", umad::MadHdr::of(&mad)?.tid().0);
        ensure!(text.contains(":1 no way back error 0 "), "{text}");
        ensure!(text.contains("lid 0x0002") && text.contains(&tid), "{text}");
        // The next one is not held up.
        let tid = fresh_tid();
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, tid).into_bytes();
        device.write_frame(&Frame::mad(1, 2, 1, mad))?;
        agent.recv_tid(tid)?;
        Ok(())
    })
    .improvement(14);
    area.check("a MAD for which there is no memory", || {
        let injection = Injection::new()?;
        let peers = Peers::new()?;
        let trace = drops()?;
        injection.starve(code_of("ib_umad")?, || {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers.a.port.send(&packet)?;
            let text = trace.only(DROP)?;
            ensure!(text.contains(":1 no memory error 0 "), "{text}");
            Ok(())
        })
    })
    .improvement(14);
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("trace");
    known(&mut area);
    area.check(
        "a write() to a file whose device is gone is traced, and is EIO",
        || {
            let device = Spec::new(Shape::Ca, 1).plug()?;
            let index = index(&device.ibdev)?;
            let agent = device.agent(1, &Peers::registration(CLASS))?;
            let trace = Trace::of(&[WRITE])?;
            device.unplug()?;
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            let packet = Packet::new(agent.agent, &Address::lid(2), mad);
            let mut writer = fork(|| {
                ensure_errno!(agent.port.send(&packet), EIO);
                Ok(())
            })?;
            writer.wait(MUST)?;
            ensure_eq!(trace.only(WRITE)?, Event::text_of(index, 1, &packet)?);
            Ok(())
        },
    )
    // What the C module leaves behind its crash cannot be closed.
    .timeout(40)
    .improvement(14)
    .crashes_c();
    dropped_writes(&mut area);
    dropped_received(&mut area);
    Module::run(area)
}
