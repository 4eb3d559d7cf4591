// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The operations that are measured.
//!
//! Each is done many times, each time alone after a moment in which all earlier work ends, and its
//! median counts.

use std::time::Duration;

use ktap::peers::{fresh_tid, CLASS, OUI, SOON};
use ktap::prelude::*;
use nix::poll::PollFlags;
use selftests::vhca::{self, Smp, VhcaExt};
use umad::{abi, port::node};

use crate::clock::{drained, idle, set_priority, ticks, timed, Priority};

const HEADER: usize = Layout::New.header_len();
const PACKET: usize = HEADER + abi::MAD_LEN;
/// Where the lower half of the transaction id lies in a packet.
const TID: std::ops::Range<usize> = HEADER + 12..HEADER + 16;
/// Where the method lies in a packet.
const METHOD: usize = HEADER + 3;
/// Sends of a batch: the queue pair has room for them.
const BATCH: usize = 64;
/// A class that nobody listens to.
const UNHEARD: u8 = 0x3a;
/// As long as nobody waits.
const LONG: Duration = Duration::from_secs(3600);

/// Two open ports with an agent each, and packets from the one to the other.
struct Link {
    a: Port,
    from: AgentId,
    to: Address,
    b: Port,
}

impl Link {
    fn rxe(registration: &Registration) -> Outcome<Self> {
        let peers = Peers::with("rxe0", "rxe1", Layout::New, registration)?;
        Ok(Self {
            to: peers.b.address(),
            from: peers.a.agent,
            a: peers.a.port,
            b: peers.b.port,
        })
    }

    fn ib(pair: &vhca::Pair) -> Outcome<Self> {
        let wish = Peers::registration(CLASS);
        let (a, b) = (pair.a.agent(1, &wish)?, pair.b.agent(1, &wish)?);
        Ok(Self {
            to: Address::lid(2),
            from: a.agent,
            a: a.port,
            b: b.port,
        })
    }

    fn packet(&self, class: u8, method: Method, timeout: Duration) -> Vec<u8> {
        let mad = VendorMad::new(class, OUI, method, fresh_tid()).into_bytes();
        Packet::new(self.from, &self.to, mad)
            .timeout(timeout)
            .to_bytes(Layout::New)
    }

    /// Reads all that came to `b`; returns how many packets that were.
    fn drain(&self) -> Outcome<usize> {
        let mut buf = [0; PACKET];
        let mut count = 0;
        while !self.b.poll(PollFlags::POLLIN, Duration::ZERO)?.is_empty() {
            self.b.read(&mut buf)?;
            count += 1;
        }
        Ok(count)
    }
}

/// Gives a packet a transaction id that was not used yet.
fn renew(packet: &mut [u8]) {
    packet[TID].copy_from_slice(&fresh_tid().low().to_be_bytes());
}

fn median(mut samples: Vec<u64>) -> u64 {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or(0)
}

/// Measures and prints an operation: `one` does it once.
fn report(name: &str, times: usize, mut one: impl FnMut() -> Outcome<u64>) -> Outcome {
    let mut samples = Vec::with_capacity(times);
    for _ in 0..times {
        idle();
        samples.push(one().what(name)?);
    }
    println!("{name}\t{}", median(samples));
    Ok(())
}

fn write_call(link: &Link, packet: &mut [u8]) -> Outcome<u64> {
    renew(packet);
    let (cost, wrote) = timed(|| link.a.write(packet));
    ensure_eq!(wrote?, packet.len());
    idle();
    link.drain()?;
    Ok(cost)
}

/// A batch of writes, with everything that they cause until nobody has anything to do; for each.
fn write_all(link: &Link, packet: &mut [u8]) -> Outcome<u64> {
    let begin = ticks();
    for _ in 0..BATCH {
        renew(packet);
        link.a.write(packet)?;
    }
    let cost = drained()?.saturating_sub(begin);
    // If not all have come, not all work was counted.
    ensure_eq!(link.drain()?, BATCH);
    Ok(cost / 64)
}

fn read_call(link: &Link, packet: &mut [u8]) -> Outcome<u64> {
    renew(packet);
    link.a.write(packet)?;
    idle();
    let mut buf = [0; PACKET];
    let (cost, read) = timed(|| link.b.read(&mut buf));
    ensure_eq!(read?, PACKET);
    ensure!(
        buf[TID.start..] == packet[TID.start..],
        "another packet came"
    );
    Ok(cost)
}

fn round_trip(link: &Link, packet: &mut [u8]) -> Outcome<u64> {
    renew(packet);
    let mut buf = [0; PACKET];
    let begin = ticks();
    link.a.write(packet)?;
    link.b.read(&mut buf)?;
    // The header leads back as it is, but for the Q_Key, which nobody looks at.
    buf[METHOD] |= Method::RESPONSE;
    link.b.write(&buf)?;
    let read = link.a.read(&mut buf)?;
    let cost = ticks().saturating_sub(begin);
    ensure_eq!(read, PACKET);
    ensure_eq!(buf[TID], packet[TID]);
    ensure_eq!(buf[METHOD], Method::GET_RESP.0);
    Ok(cost)
}

/// What is sent and received on a link.
fn exchanges(name: &str, link: &Link, times: usize) -> Outcome {
    let mut send = link.packet(CLASS, Method::SEND, Duration::ZERO);
    let mut get = link.packet(CLASS, Method::GET, LONG);
    report(&format!("{name}write call"), times, || {
        write_call(link, &mut send)
    })?;
    report(&format!("{name}write with all work"), times / 3, || {
        write_all(link, &mut send)
    })?;
    report(&format!("{name}round trip"), times, || {
        round_trip(link, &mut get)
    })?;
    report(&format!("{name}read"), times, || read_call(link, &mut send))
}

/// Calls that send nothing.
fn small_calls(times: usize) -> Outcome {
    let link = Link::rxe(&Peers::registration(CLASS))?;
    let umad = umad::sysfs::find("rxe0", 1)?.ok_or("rxe0 has no umad device")?;
    let silent = Port::options().nonblock(true).open(umad.number)?;
    let mut buf = [0; PACKET];
    report("read, nothing there", times, || {
        let (cost, read) = timed(|| silent.read(&mut buf));
        ensure_errno!(read, EAGAIN);
        Ok(cost)
    })?;
    report("poll", times, || {
        let (cost, events) = timed(|| silent.poll(PollFlags::POLLIN, Duration::ZERO));
        ensure!(events?.is_empty());
        Ok(cost)
    })?;
    let wish = Peers::registration(CLASS + 1);
    report("register + unregister", times, || {
        let (cost, done) = timed(|| {
            link.a
                .register2(&wish)
                .and_then(|agent| link.a.unregister(agent))
        });
        done?;
        Ok(cost)
    })?;
    let path = node(umad.number);
    report("open + close", times, || {
        let (cost, opened) = timed(|| std::fs::File::open(&path).map(drop));
        opened?;
        Ok(cost)
    })
}

/// Writes to addresses that were never written to.
fn new_destinations(times: usize) -> Outcome {
    let mut link = Link::rxe(&Peers::registration(CLASS))?;
    let mut flow_label = 0;
    report("write call, new destination", times, || {
        flow_label += 1;
        if let Some(grh) = &mut link.to.grh {
            grh.flow_label = flow_label;
        }
        let mut packet = link.packet(CLASS, Method::SEND, Duration::ZERO);
        write_call(&link, &mut packet)
    })
}

/// Makes so many sends outstanding on `a`.
fn make_outstanding(link: &Link, packet: &mut [u8], count: usize) -> Outcome {
    for n in 0..count {
        renew(packet);
        link.a.write(packet)?;
        if n % BATCH == 0 {
            idle();
        }
    }
    idle();
    Ok(())
}

/// Writes while many sends wait for an answer, and the close of such a file.
fn outstanding(times: usize, counts: &[usize]) -> Outcome {
    let link = Link::rxe(&Peers::registration(CLASS))?;
    let mut packet = link.packet(UNHEARD, Method::SEND, LONG);
    let mut there = 0;
    for count in counts {
        make_outstanding(&link, &mut packet, count - there)?;
        report(&format!("write, {count} outstanding"), times, || {
            write_call(&link, &mut packet)
        })?;
        there = count + times;
    }
    Ok(())
}

/// The close of a file with so many packets that nobody read.
fn close_unread(times: usize, count: usize) -> Outcome {
    report(&format!("close, {count} unread"), times, || {
        let link = Link::rxe(&Peers::registration(CLASS))?;
        let mut packet = link.packet(CLASS, Method::SEND, Duration::ZERO);
        make_outstanding(&link, &mut packet, count)?;
        let (cost, ()) = timed(|| drop(link.b));
        Ok(cost)
    })
}

/// Two threads that write in turn, each on its own file or both on one, with all work; for each send.
fn two_threads(times: usize) -> Outcome {
    let (one, other) = (
        Link::rxe(&Peers::registration(CLASS))?,
        Link::rxe(&Peers::registration(CLASS + 1))?,
    );
    let packets = [CLASS, CLASS + 1];
    for (name, files) in [
        ("two threads on one file, a send", [&one, &one]),
        ("two threads on two files, a send", [&one, &other]),
    ] {
        report(name, times, || {
            let mut cost = 0;
            let begin = ticks();
            std::thread::scope(|scope| -> Outcome {
                let writers = files.iter().zip(packets).map(|(link, class)| {
                    let class = if std::ptr::eq(*link, &one) {
                        CLASS
                    } else {
                        class
                    };
                    let mut packet = link.packet(class, Method::SEND, Duration::ZERO);
                    scope.spawn(move || -> Outcome {
                        set_priority(Priority::First)?;
                        for _ in 0..BATCH / 2 {
                            renew(&mut packet);
                            link.a.write(&packet)?;
                            std::thread::yield_now();
                        }
                        Ok(())
                    })
                });
                for writer in writers.collect::<Vec<_>>() {
                    writer.join().map_err(|_| "a writer panicked")??;
                }
                Ok(())
            })?;
            cost += drained()?.saturating_sub(begin);
            ensure_eq!(one.drain()? + other.drain()?, BATCH);
            Ok(cost / 64)
        })?;
    }
    Ok(())
}

/// A packet that comes while so many threads sleep in read() on its file, with all work.
fn sleeping_readers(times: usize, count: usize) -> Outcome {
    let link = Link::rxe(&Peers::registration(CLASS))?;
    let mut packet = link.packet(CLASS, Method::SEND, Duration::ZERO);
    std::thread::scope(|scope| -> Outcome {
        let readers: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| -> umad::Result<()> {
                    let mut buf = [0; PACKET];
                    // One with another method is the last one.
                    while link.b.read(&mut buf).is_ok() && buf[METHOD] == Method::SEND.0 {}
                    Ok(())
                })
            })
            .collect();
        let plural = if count == 1 { "" } else { "s" };
        report(
            &format!("a packet for {count} sleeping reader{plural}"),
            times,
            || {
                renew(&mut packet);
                let begin = ticks();
                link.a.write(&packet)?;
                Ok(drained()?.saturating_sub(begin))
            },
        )?;
        packet[METHOD] = Method::GET.0;
        for _ in 0..count {
            renew(&mut packet);
            link.a.write(&packet)?;
        }
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok(())
    })
}

/// Writes on a file of a port, on another file of which somebody resolves an address.
fn beside_resolver(times: usize) -> Outcome {
    let nobody = Link {
        to: Address::roce("fe80::dead:beef".parse()?, 0),
        ..Link::rxe(&Peers::registration(CLASS + 1))?
    };
    let link = Link::rxe(&Peers::registration(CLASS))?;
    let mut packet = link.packet(CLASS, Method::SEND, Duration::ZERO);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| -> Outcome {
        scope.spawn(|| {
            let packet = nobody.packet(CLASS + 1, Method::SEND, Duration::ZERO);
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                // It fails, about a second later.
                let _ = nobody.a.write(&packet);
            }
        });
        idle();
        let outcome = report("write call, another file resolves", times, || {
            write_call(&link, &mut packet)
        });
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        outcome
    })
}

/// Directed-route SMPs over a cable, which the other end answers by itself.
fn directed(pair: &vhca::Pair, times: usize) -> Outcome {
    let agent = pair.a.agent(1, &Registration::class(0x81, 1).qpn(0))?;
    let mut buf = [0; PACKET];
    let request = |agent: &vhca::Agent| {
        let smp = Smp::directed(Method::GET, 0x11, 0, &[1]);
        agent
            .request(&vhca::direct(), smp.0)
            .timeout(LONG)
            .to_bytes(Layout::New)
    };
    report("InfiniBand, directed route, write call", times, || {
        let packet = request(&agent);
        let (cost, wrote) = timed(|| agent.port.write(&packet));
        ensure_eq!(wrote?, packet.len());
        ensure_eq!(agent.port.read(&mut buf)?, PACKET);
        Ok(cost)
    })?;
    report("InfiniBand, directed route, round trip", times, || {
        let packet = request(&agent);
        let begin = ticks();
        agent.port.write(&packet)?;
        let read = agent.port.read(&mut buf)?;
        let cost = ticks().saturating_sub(begin);
        ensure_eq!(read, PACKET);
        Ok(cost)
    })
}

/// The close of a file with so many sends outstanding.
fn close(times: usize, count: usize) -> Outcome {
    report(&format!("close, {count} outstanding"), times, || {
        let link = Link::rxe(&Peers::registration(CLASS))?;
        let mut packet = link.packet(UNHEARD, Method::SEND, LONG);
        make_outstanding(&link, &mut packet, count)?;
        let (cost, ()) = timed(|| drop(link.a));
        Ok(cost)
    })
}

fn rmpp(times: usize, len: usize) -> Outcome {
    let link = Link::rxe(&Peers::registration(CLASS).rmpp(1))?;
    let tid = fresh_tid();
    let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, tid)
        .rmpp()
        .into_bytes();
    mad.truncate(umad::mad::data_offset(CLASS));
    mad.extend((0..=250u8).cycle().take(len));
    let mut packet = Packet::new(link.from, &link.to, mad).to_bytes(Layout::New);
    let mut buf = vec![0; packet.len()];
    let kib = len / 1024;
    report(&format!("RMPP {kib} KiB, write"), times, || {
        renew(&mut packet);
        let (cost, wrote) = timed(|| link.a.write(&packet));
        ensure_eq!(wrote?, packet.len());
        ensure!(!link.b.poll(PollFlags::POLLIN, SOON)?.is_empty());
        link.b.read(&mut buf)?;
        Ok(cost)
    })?;
    report(&format!("RMPP {kib} KiB, read"), times, || {
        renew(&mut packet);
        link.a.write(&packet)?;
        ensure!(!link.b.poll(PollFlags::POLLIN, SOON)?.is_empty());
        idle();
        let (cost, read) = timed(|| link.b.read(&mut buf));
        ensure_eq!(read?, packet.len());
        ensure_eq!(buf[TID.end..].len(), packet[TID.end..].len());
        ensure!(buf[HEADER + 36..] == packet[HEADER + 36..]);
        Ok(cost)
    })?;
    report(&format!("RMPP {kib} KiB, whole"), times, || {
        renew(&mut packet);
        let begin = ticks();
        link.a.write(&packet)?;
        link.b.read(&mut buf)?;
        Ok(ticks().saturating_sub(begin))
    })
}

/// Makes later figures steady: tables of `ib_mad` and Soft-RoCE get their depth, and caches their
/// contents.
pub fn warm() -> Outcome {
    set_priority(Priority::First)?;
    let link = Link::rxe(&Peers::registration(CLASS))?;
    for _ in 0..4200 {
        let agent = link.a.register2(&Registration::send_only())?;
        link.a.unregister(agent)?;
    }
    let mut packet = link.packet(CLASS, Method::SEND, Duration::ZERO);
    for n in 0..10_000 {
        renew(&mut packet);
        link.a.write(&packet)?;
        if n % BATCH == 0 {
            idle();
            link.drain()?;
        }
    }
    Ok(())
}

/// Writes, goes round, opens and closes, registers and unregisters, for ever.
pub fn repeat() -> Outcome {
    set_priority(Priority::First)?;
    let link = Link::rxe(&Peers::registration(CLASS))?;
    let mut send = link.packet(CLASS, Method::SEND, Duration::ZERO);
    let mut get = link.packet(CLASS, Method::GET, LONG);
    loop {
        idle();
        write_call(&link, &mut send)?;
        idle();
        round_trip(&link, &mut get)?;
        idle();
        drop(std::fs::File::open(node(0)));
        idle();
        let agent = link.a.register2(&Peers::registration(CLASS + 1))?;
        idle();
        link.a.unregister(agent)?;
    }
}

/// Which operations are measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All.
    All,
    /// What is quickly done.
    Quick,
    /// What `ib_floor` can.
    Floor,
}

/// Measures operations.
pub fn run(extent: Extent) -> Outcome {
    set_priority(Priority::First)?;
    let times = if extent == Extent::Quick { 15 } else { 31 };
    let link = Link::rxe(&Peers::registration(CLASS))?;
    exchanges("", &link, times)?;
    drop(link);
    small_calls(times)?;
    match extent {
        Extent::All => {
            new_destinations(times)?;
            outstanding(times, &[1000, 10_000, 30_000])?;
            close(1, 10_000)?;
            close_unread(1, 10_000)?;
            two_threads(times / 3)?;
            sleeping_readers(times, 1)?;
            sleeping_readers(times, 8)?;
            beside_resolver(times)?;
            rmpp(7, 64 * 1024)?;
            rmpp(3, 1024 * 1024)?;
        }
        Extent::Quick => {
            new_destinations(times)?;
            outstanding(times, &[1000])?;
            rmpp(3, 64 * 1024)?;
        }
        Extent::Floor => {}
    }
    let module = vhca::Module::load()?;
    let pair = vhca::Pair::new()?;
    let link = Link::ib(&pair)?;
    exchanges("InfiniBand, ", &link, times)?;
    if extent == Extent::All {
        directed(&pair, times)?;
    }
    drop((link, pair));
    drop(module);
    Ok(())
}
