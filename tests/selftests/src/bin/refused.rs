// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `refused`: what the module asks of `ib_core` and the hardware is refused. The caller is told, with
//! the errno of whoever refused; nothing is left behind; and the next call is like any.
//!
//! Registrations that are refused are in the areas `register` and `netns`, `modify_port` is in `issm`,
//! `process_mad` in `smi`; what fails for want of memory, the making of nodes among it, is in `failnth`.

#![forbid(unsafe_code)]

use std::os::fd::AsFd;

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use ktap::Impl;
use selftests::fdinfo::FdInfo;
use selftests::figure::figure;
use selftests::vhca::{Agent, Faults, Module, Pair, Shape, Spec, SpecExt, Vhca, VhcaExt};
use umad::mad::data_offset;

const REFUSALS: [Errno; 4] = [Errno::ENOMEM, Errno::EINVAL, Errno::EAGAIN, Errno::EIO];

/// The number in a fault.
fn number(errno: Errno) -> Outcome<u32> {
    Ok(u32::try_from(errno as i32)?)
}

/// A MAD that nobody answers.
fn unsolicited(from: &Agent, lid: u16) -> Packet {
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).into_bytes();
    Packet::new(from.agent, &Address::lid(lid), mad)
}

/// Nothing of the file is under way, as far as the module tells.
fn ensure_idle(agent: &Agent) -> Outcome {
    if Impl::current()? == Impl::C {
        return Ok(());
    }
    wait_until("nothing is outstanding", SOON, || {
        FdInfo::of(agent.port.as_fd())
            .is_ok_and(|info| info.get("outstanding") == Ok("0 sends, 0 bytes"))
    })
}

/// All address handles of a device are gone, but for one that subnet administration's client keeps on the
/// subnet manager; and all sends are completed.
fn ensure_nothing_left(device: &Vhca) -> Outcome {
    wait_until("handles are destroyed, sends completed", SOON, || {
        device.counters().is_ok_and(|now| {
            now.ahs_made - now.ahs_destroyed <= 1
                && now.sends == now.completions + now.sends_refused
        })
    })
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("refused");

    area.check(
        "create_ah: its errno, and the same MAD goes afterwards",
        || {
            let pair = Pair::new()?;
            let from = pair.a.agent(1, &Registration::send_only())?;
            let at = pair.b.agent(1, &Peers::registration(CLASS))?;
            for errno in REFUSALS {
                let packet = unsolicited(&from, 2).timeout(Duration::from_millis(50));
                // The own address is another each time, so none that is kept is good any more.
                pair.a
                    .change(1, |port| port.lid = if port.lid == 1 { 3 } else { 1 })?;
                pair.a.faults(Faults {
                    create_ah_errno: number(errno)?,
                    ..Faults::default()
                })?;
                // The event of the change is told from a work queue.
                wait_until("create_ah is asked", SOON, || {
                    match from.port.send(&unsolicited(&from, 2)) {
                        Err(e) => e.errno() == Some(errno),
                        Ok(()) => false,
                    }
                })?;
                for _ in 0..3 {
                    let got = from.port.send(&packet).err().and_then(|e| e.errno());
                    ensure_eq!(got, Some(errno));
                }
                ensure_idle(&from)?;
                pair.a.faults(Faults::default())?;
                from.port.send(&packet)?;
                at.recv_tid(packet.tid()?)?;
                ensure_eq!(from.recv_tid(packet.tid()?)?.header.status, 110);
            }
            drop(from);
            ensure_nothing_left(&pair.a)
        },
    );
    area.check(
        "post_send: its errno, and no handle or send is left",
        || {
            let pair = Pair::new()?;
            let at = pair.b.agent(1, &Peers::registration(CLASS))?;
            for errno in REFUSALS {
                let from = pair.a.agent(1, &Registration::send_only())?;
                for timeout in [0, 50] {
                    let packet = unsolicited(&from, 2).timeout(Duration::from_millis(timeout));
                    pair.a.faults(Faults {
                        mgmt_class: CLASS.into(),
                        fail_send_at: 1,
                        fail_send_errno: number(errno)?,
                        ..Faults::default()
                    })?;
                    let got = from.port.send(&packet).err().and_then(|e| e.errno());
                    ensure_eq!(got, Some(errno));
                    ensure_idle(&from)?;
                    from.port.send(&packet)?;
                    at.recv_tid(packet.tid()?)?;
                }
                drop(from);
                ensure_nothing_left(&pair.a)?;
            }
            Ok(())
        },
    );
    area.check(
        "post_send, at each segment of a message: the next one arrives",
        || {
            let pair = Pair::new()?;
            let from = pair.a.agent(1, &Registration::send_only().rmpp(1))?;
            let at = pair.b.agent(1, &Peers::registration(CLASS).rmpp(1))?;
            let message = || {
                let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid()).rmpp();
                let mut mad = mad.into_bytes();
                mad.resize(data_offset(CLASS) + 12 * 216, 0x5a);
                Packet::new(from.agent, &Address::lid(2), mad).timeout(Duration::from_secs(1000))
            };
            let mut told = 0;
            for segment in 1..=12 {
                let before = pair.a.counters()?.sends_refused;
                pair.a.faults(Faults {
                    mgmt_class: CLASS.into(),
                    fail_send_at: segment,
                    fail_send_errno: number(Errno::ENOMEM)?,
                    ..Faults::default()
                })?;
                let lost = message();
                match from.port.send(&lost) {
                    Ok(()) => (),
                    Err(e) => {
                        ensure_eq!(e.errno(), Some(Errno::ENOMEM), "segment {segment}");
                        told += 1;
                    }
                }
                // From here on it is the next message's sends that would be counted.
                wait_until("the segment is refused", SOON, || {
                    let now = pair.a.counters();
                    now.is_ok_and(|now| now.sends_refused > before)
                })?;
                let next = message();
                from.port.send(&next).what(format!("segment {segment}"))?;
                let got = at
                    .recv_tid(next.tid()?)
                    .what(format!("segment {segment}"))?;
                ensure_eq!(got.mad.len(), next.mad.len());
            }
            figure(
                "refused segments of a message that write() told of",
                told,
                "of 12 segments",
            );
            ensure!(told >= 1, "write() told nothing");
            // Closing does not wait for what never was sent.
            drop(from);
            ensure_nothing_left(&pair.a)
        },
    );
    area.check(
        "create_ah and post_send, all of them, while a device goes",
        || {
            for n in 0..10 {
                let device = Spec::new(Shape::Ca, 1)
                    .port(1, |port| port.lid = 1)
                    .plug()?;
                let from = device.agent(1, &Registration::send_only())?;
                let mut faults = Faults {
                    create_ah_errno: number(Errno::ENOMEM)?,
                    ..Faults::default()
                };
                if n % 2 == 1 {
                    faults = Faults {
                        mgmt_class: CLASS.into(),
                        fail_send_at: 2,
                        ..Faults::default()
                    };
                }
                device.faults(faults)?;
                for _ in 0..5 {
                    let _ = from.port.send(&unsolicited(&from, 2));
                }
                device.unplug()?;
                ensure_errno!(from.port.send(&unsolicited(&from, 2)), EIO);
            }
            Ok(())
        },
    );

    Module::run(area)
}
