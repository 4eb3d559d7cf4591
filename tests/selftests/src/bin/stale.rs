// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `stale`: no byte that nobody wrote reaches a program or the wire.
//!
//! The kernel is started so that it fills what it allocates, and what it frees, with a pattern (`slab_debug=P`)
//! instead of zeroes (`init_on_alloc=0`). Everything that is read, and every frame on a wire in user
//! space, is compared to its last byte, also where nothing is said to be.

#![forbid(unsafe_code)]

use std::fs;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use selftests::vhca::{
    attr, direct, smi, Agent, Frame, Module, Shape, Smp, Spec, SpecExt, Vhca, VhcaExt,
};
use umad::mad::data_offset;
use zerocopy::IntoBytes;

/// LID of the device, and of who sends to it.
const HERE: u32 = 1;
const THERE: u32 = 77;

/// Subnet administration.
const SA: u8 = 0x03;

/// Bytes that neither zero, nor a pattern of the kernel's, nor a pointer's are.
fn data(len: usize) -> Vec<u8> {
    (0x80..=0x9f).cycle().take(len).collect()
}

/// A device whose wire ends in the check.
fn device() -> Outcome<Vhca> {
    let spec = Spec::new(Shape::Ca, 1).port(1, |port| port.lid = HERE);
    let device = spec.in_user_space().plug()?;
    wait_until("the link is up", SOON, || {
        device.port(1).is_ok_and(|(_, state)| state > 1)
    })?;
    Ok(device)
}

fn address() -> Outcome<Address> {
    Ok(Address::lid(u16::try_from(THERE)?))
}

/// A MAD that arrives.
fn arriving(mad: &[u8]) -> Frame {
    Frame::mad(1, THERE, HERE, mad.to_vec())
}

/// Fails with the first place where bytes are not what they should be.
fn ensure_bytes(what: &str, got: &[u8], expected: &[u8]) -> Outcome {
    ensure_eq!(got.len(), expected.len(), "{what}: bytes");
    let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
    if let Some(at) = wrong {
        let end = (at + 16).min(got.len());
        return Err(format!(
            "{what}: from byte {at} on {:02x?}, expected {:02x?}",
            &got[at..end],
            &expected[at..end]
        )
        .into());
    }
    Ok(())
}

/// A MAD on the wire: what was written, with the upper half of its transaction id set, and zeroes.
fn ensure_on_wire(what: &str, got: &Frame, written: &[u8]) -> Outcome {
    let mut expected = written.to_vec();
    expected.resize(256, 0);
    expected[8..12].copy_from_slice(got.mad.get(8..12).ok_or("a frame without a header")?);
    ensure_bytes(what, &got.mad, &expected)
}

/// What a read of a file returns, all of it, from a buffer that is larger.
fn read(agent: &Agent) -> Outcome<Vec<u8>> {
    agent
        .port
        .poll(nix::poll::PollFlags::POLLIN, ktap::patient(SOON))?;
    let mut buffer = vec![0xcc; 4096];
    let len = agent.port.read(&mut buffer)?;
    ensure!(
        buffer[len..].iter().all(|byte| *byte == 0xcc),
        "bytes behind the packet were written"
    );
    buffer.truncate(len);
    Ok(buffer)
}

/// The header of a MAD that arrived without a GRH, in the new layout, with all that it does not tell zero.
fn arrived_header(agent: AgentId, len: usize) -> Outcome<Vec<u8>> {
    let mut header = vec![0; 64];
    header[0..4].copy_from_slice(&agent.0.to_ne_bytes());
    let total = u32::try_from(64 + len)?;
    header[16..20].copy_from_slice(&total.to_ne_bytes());
    header[20..24].copy_from_slice(&1u32.to_be_bytes());
    header[28..30].copy_from_slice(&u16::try_from(THERE)?.to_be_bytes());
    Ok(header)
}

fn wire(area: &mut ktap::Area) {
    area.check("short MADs on the wire end in zeroes", || {
        let device = device()?;
        let plain = device.agent(1, &Registration::send_only())?;
        let rmpp = device.agent(1, &Registration::send_only().rmpp(1))?;
        let smi_agent = device.manager(1)?;
        for class in [0x04, 0x07, 0x0a, SA, CLASS, 0x4f] {
            let least = data_offset(class).max(36);
            for len in [least, least + 1, 64, 65, 128, 255, 256] {
                if len < least {
                    continue;
                }
                let tid = fresh_tid();
                let mut mad = VendorMad::new(class, OUI, Method::SEND, tid).into_bytes();
                mad.truncate(len);
                let begin = data_offset(class).min(len);
                mad[begin..].copy_from_slice(&data(len - begin));
                let send = |agent: &Agent, mad: &[u8]| -> Outcome<Frame> {
                    agent
                        .port
                        .send(&Packet::new(agent.agent, &address()?, mad.to_vec()))?;
                    device.frame(tid, ktap::patient(SOON))
                };
                let what = format!("class {class:#04x}, {len} bytes");
                ensure_on_wire(&what, &send(&plain, &mad)?, &mad)?;
                if matches!(class, SA | CLASS | 0x4f) {
                    let mut mad = mad;
                    // What a program leaves there, an agent with RMPP does not send.
                    mad[24] = 0x11;
                    let got = send(&rmpp, &mad)?;
                    mad[24..36].fill(0);
                    ensure_on_wire(&format!("{what}, RMPP agent"), &got, &mad)?;
                }
            }
        }
        for len in [36, 40, 64, 200, 256] {
            let mut smp = Smp::lid_routed(Method::SEND, attr::NODE_INFO, 0);
            smp.0.truncate(len);
            let to = smi(u16::try_from(THERE)?);
            let request = Packet::new(smi_agent.agent, &to, smp.0.clone());
            smi_agent.port.send(&request)?;
            let got = device.frame(smp.tid(), ktap::patient(SOON))?;
            ensure_on_wire(&format!("an SMP of {len} bytes"), &got, &smp.0)?;
        }
        Ok(())
    });
    area.check("each segment of a message, and its last one's end", || {
        let device = device()?;
        let agent = device.agent(1, &Registration::send_only().rmpp(1))?;
        for class in [SA, CLASS] {
            let offset = data_offset(class);
            let room = 256 - offset;
            for len in [1, 2, room - 1, room, room + 1, 2 * room - 3, 3 * room + 100] {
                let tid = fresh_tid();
                let mut mad = VendorMad::new(class, OUI, Method::SEND, tid)
                    .rmpp()
                    .into_bytes();
                mad.resize(offset, 0);
                let all = data(len);
                mad.extend(&all);
                agent
                    .port
                    .send(&Packet::new(agent.agent, &address()?, mad.clone()))?;
                let mut left = &all[..];
                for segment in 1_u32.. {
                    let got = device.frame(tid, ktap::patient(SOON))?;
                    let now;
                    (now, left) = left.split_at(left.len().min(room));
                    let mut expected = mad[..offset].to_vec();
                    expected.extend(now);
                    expected.resize(256, 0);
                    // The RMPP header is the kernel's.
                    expected[24..36].copy_from_slice(&got.mad[24..36]);
                    let what = format!("class {class:#04x}, {len} bytes, segment {segment}");
                    ensure_eq!(got.mad[28..32], segment.to_be_bytes(), "{what}");
                    ensure_on_wire(&what, &got, &expected)?;
                    let mut ack = got.mad.clone();
                    ack[24..36].fill(0);
                    (ack[24], ack[25], ack[26]) = (1, RmppHdr::ACK, RmppHdr::ACTIVE);
                    ack[28..32].copy_from_slice(&segment.to_be_bytes());
                    ack[32..36].copy_from_slice(&(segment + 64).to_be_bytes());
                    // An acknowledgement is a response to the message.
                    ack[3] |= Method::RESPONSE;
                    device.write_frame(&arriving(&ack))?;
                    if left.is_empty() {
                        break;
                    }
                }
            }
        }
        Ok(())
    });
    area.check("acknowledgements end in zeroes", || {
        let device = device()?;
        let agent = device.agent(1, &Peers::registration(CLASS).rmpp(1))?;
        let tid = fresh_tid();
        let mad = segment(tid, 1, RmppHdr::FIRST | RmppHdr::LAST, 20 + 4, &data(216));
        device.write_frame(&arriving(&mad))?;
        read(&agent)?;
        let got = device.frame(tid, ktap::patient(SOON))?;
        ensure_eq!(got.mad[25], RmppHdr::ACK);
        let rest = got.mad.get(40..).ok_or("a short frame")?;
        ensure_bytes("an acknowledgement", rest, &[0; 216])
    });
}

/// Uses all receive buffers of the port: for MADs of a base version that nobody knows, after which `ib_mad` puts the
/// buffers back as they are.
fn use_buffers(device: &Vhca) -> Outcome {
    let mut used = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
    used[40..].fill(0xee);
    used[0] = 0x42;
    let before = device.counters()?;
    for n in 0..1200 {
        device.write_frame(&arriving(&used))?;
        if n % 64 == 0 {
            wait_until("they are taken", SOON, || {
                device.counters().is_ok_and(|now| {
                    now.delivered + now.no_buffer - before.delivered - before.no_buffer > n
                })
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// A segment of a message of [`CLASS`], as a peer sends it.
fn segment(tid: Tid, number: u32, flags: u8, payload: u32, bytes: &[u8]) -> Vec<u8> {
    let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, tid).into_bytes();
    (mad[24], mad[25], mad[26]) = (1, RmppHdr::DATA, RmppHdr::ACTIVE | flags);
    mad[28..32].copy_from_slice(&number.to_be_bytes());
    mad[32..36].copy_from_slice(&payload.to_be_bytes());
    mad.truncate(40);
    mad.extend(bytes);
    mad
}

fn programs(area: &mut ktap::Area) {
    area.check(
        "read(): fields that say nothing, and reserved ones, are zero",
        || {
            let device = device()?;
            let agent = device.agent(1, &Peers::registration(CLASS))?;
            let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            mad[40..].copy_from_slice(&data(216));
            device.write_frame(&arriving(&mad))?;
            let mut expected = arrived_header(agent.agent, 256)?;
            expected.extend(&mad);
            ensure_bytes("a MAD, new layout", &read(&agent)?, &expected)?;
            let port = Port::options().layout(Layout::Old).open(device.umad(1)?)?;
            let id = port.register(&Peers::registration(CLASS + 1))?;
            let old = Agent { port, agent: id };
            mad[1] = CLASS + 1;
            device.write_frame(&arriving(&mad))?;
            let mut expected = arrived_header(id, 256 - 8)?;
            expected.truncate(56);
            expected.extend(&mad);
            ensure_bytes("a MAD, old layout", &read(&old)?, &expected)
        },
    );
    area.check("read(): the report of a timeout", || {
        let device = device()?;
        let agent = device.agent(1, &Registration::send_only())?;
        let mad = VendorMad::new(CLASS, OUI, Method::GET, fresh_tid()).into_bytes();
        let request = Packet::new(agent.agent, &address()?, mad.clone());
        let request = request.timeout(Duration::from_millis(20));
        let bytes = request.to_bytes(Layout::New);
        agent.port.write(&bytes)?;
        let got = read(&agent)?;
        let mut expected = bytes[..64 + 24].to_vec();
        expected[4..8].copy_from_slice(&110u32.to_ne_bytes());
        // As on the wire.
        expected[64 + 8..64 + 12].copy_from_slice(&got[64 + 8..64 + 12]);
        ensure_bytes("a timeout", &got, &expected)
    });
    area.check("read(): a message whose last segment is not full", || {
        let device = device()?;
        let agent = device.agent(1, &Peers::registration(CLASS).rmpp(1))?;
        for last in [1_usize, 100, 215, 216] {
            let tid = fresh_tid();
            let all = data(2 * 216 + last);
            let total = u32::try_from(all.len() + 3 * 4)?;
            let payloads = [total, 220, u32::try_from(last + 4)?];
            let flags = [RmppHdr::FIRST, 0, RmppHdr::LAST];
            for (n, part) in (0..).zip(all.chunks(216)) {
                let number = u32::try_from(n + 1)?;
                // The peer's segments are full MADs; what is behind its payload is the peer's.
                let mut part = part.to_vec();
                part.resize(216, 0xee);
                let mad = segment(tid, number, flags[n], payloads[n], &part);
                device.write_frame(&arriving(&mad))?;
            }
            let got = read(&agent)?;
            let mut expected = arrived_header(agent.agent, 40 + all.len())?;
            expected.extend(segment(tid, 1, RmppHdr::FIRST, total, &[]));
            expected.extend(&all);
            ensure_bytes(&format!("{last} bytes in the last"), &got, &expected)?;
        }
        Ok(())
    });
    area.check("read(): a MAD that came short on the wire", || {
        let device = device()?;
        let agent = device.agent(1, &Peers::registration(CLASS))?;
        use_buffers(&device)?;
        for len in [40, 41, 64, 100, 255, 256] {
            let mut mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
            mad.truncate(len);
            mad[40..].copy_from_slice(&data(len - 40));
            device.write_frame(&arriving(&mad))?;
            let mut expected = arrived_header(agent.agent, 256)?;
            expected.extend(&mad);
            expected.resize(64 + 256, 0);
            ensure_bytes(
                &format!("{len} bytes on the wire"),
                &read(&agent)?,
                &expected,
            )?;
        }
        Ok(())
    })
    .improvement(13);
    area.check("read(): a message with a segment that came short", || {
        let device = device()?;
        let agent = device.agent(1, &Peers::registration(CLASS).rmpp(1))?;
        use_buffers(&device)?;
        let tid = fresh_tid();
        let all = data(3 * 216);
        let total = u32::try_from(all.len() + 3 * 4)?;
        let mut expected = arrived_header(agent.agent, 40 + all.len())?;
        expected.extend(segment(tid, 1, RmppHdr::FIRST, total, &[]));
        expected.extend(&all);
        let came = 60;
        expected[64 + 40 + 216 + came..64 + 40 + 2 * 216].fill(0);
        for (number, part, flags, payload) in [
            (1, &all[..216], RmppHdr::FIRST, total),
            (2, &all[216..216 + came], 0, 220),
            (3, &all[2 * 216..], RmppHdr::LAST, 220),
        ] {
            device.write_frame(&arriving(&segment(tid, number, flags, payload, part)))?;
        }
        ensure_bytes("the message", &read(&agent)?, &expected)
    })
    .improvement(13);
    area.check("ioctls write what they say, and nothing else", || {
        let port = Port::open(0)?;
        let mut first = Peers::registration(CLASS).to_req2();
        let before = first;
        let id = port.register2_raw(&mut first)?;
        let mut expected = before.as_bytes().to_vec();
        expected[0..4].copy_from_slice(&id.0.to_ne_bytes());
        ensure_bytes("REGISTER_AGENT2", first.as_bytes(), &expected)?;
        let old = Port::options().layout(Layout::Old).open(0)?;
        let mut first = Peers::registration(CLASS + 1).to_req();
        let before = first;
        let id = old.register_raw(&mut first)?;
        let mut expected = before.as_bytes().to_vec();
        expected[0..4].copy_from_slice(&id.0.to_ne_bytes());
        ensure_bytes("REGISTER_AGENT", first.as_bytes(), &expected)
    });
    area.check("answers of the own node's agent", || {
        let device = device()?;
        let manager = device.manager(1)?;
        let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[]);
        manager
            .port
            .send(&manager.request(&direct(), smp.0.clone()))?;
        let got = manager.recv_tid(smp.tid())?;
        // M_Key, reserved bytes, and the paths of a MAD that went nowhere.
        ensure_bytes("M_Key", &got.mad[24..32], &[0; 8])?;
        ensure_bytes("reserved", &got.mad[36..64], &[0; 28])?;
        ensure_bytes("both paths", &got.mad[128..], &[0; 128])
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("stale");
    area.check("the kernel fills what it allocates with a pattern", || {
        for cache in ["kmalloc-256", "kmalloc-512", "kmalloc-cg-256"] {
            let path = format!("/sys/kernel/slab/{cache}/poison");
            ensure_eq!(fs::read_to_string(&path).what(&path)?.trim(), "1", "{path}");
        }
        let line = fs::read_to_string("/proc/cmdline")?;
        ensure!(
            line.split_whitespace()
                .any(|word| word == "init_on_alloc=0"),
            "{line}"
        );
        Ok(())
    });
    wire(&mut area);
    programs(&mut area);
    Module::run(area)
}
