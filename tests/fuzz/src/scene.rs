// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What programs play with: three pairs of virtual HCAs (`a`-`b`, `c`-`d`, and `o`-`p` of OPA), each connected by a
//! cable, the two Soft-RoCE devices (`r`, `s`), and a network namespace away from home.

use std::fs::File;
use std::sync::Mutex;
use std::time::Duration;

use ktap::{wait_until, Failure, Outcome, ResultExt};
use nix::sched::{setns, unshare, CloneFlags};
use selftests::injection::{self, Injection};
use selftests::netlink::Rdma;
use umad::{sysfs, Gid};
use vhca::{Faults, PortParams, Shape, Spec, Vhca, PORT_DOWN, PORT_WAIT_FOR_SM};

use crate::field::{DEVICES, FIRST_RXE};

const SOON: Duration = Duration::from_secs(30);
const RXE: [&str; 2] = ["rxe0", "rxe1"];
const VIRTUAL: usize = 6;

/// The mode in which a device belongs to one network namespace, for as long as it is needed. It can change
/// only while there is no other namespace.
pub struct Exclusive(());

impl Exclusive {
    /// Begins it.
    pub fn begin() -> Outcome<Self> {
        set_mode("exclusive")?;
        Ok(Self(()))
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        let _ = set_mode("shared");
    }
}

fn set_mode(mode: &str) -> Outcome {
    wait_until(&format!("devices are {mode}"), SOON, || {
        ktap::run(&format!("rdma system set netns {mode}")).is_ok()
    })
}

struct Plugged {
    vhca: Vhca,
    as_made: PortParams,
}

struct Seat {
    plugged: Option<Plugged>,
    /// Of the umad device that is there, or was there last.
    number: u32,
    /// Faults are set, or the port is changed.
    touched: bool,
}

/// The devices and namespaces.
pub struct Scene {
    /// Workers have devices of their own; names and cables have this number in them.
    number: u32,
    virtual_ones: [Mutex<Seat>; VIRTUAL],
    rxe: [(u32, Gid); 2],
    home: File,
    away: File,
}

impl Scene {
    /// Makes the one of this number.
    pub fn new(number: u32) -> Outcome<Self> {
        let own = || File::open("/proc/thread-self/ns/net");
        let home = own()?;
        // Only that thread goes away.
        let away = std::thread::spawn(move || -> Outcome<File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(own()?)
        });
        let away = away.join().map_err(|_| "a thread ended early")??;
        let empty = || {
            Mutex::new(Seat {
                plugged: None,
                number: 63,
                touched: false,
            })
        };
        let rxe =
            |name| -> Outcome<_> { Ok((ktap::wait_for_umad(name)?, sysfs::gid(name, 1, 0)?)) };
        let scene = Self {
            number,
            virtual_ones: [empty(), empty(), empty(), empty(), empty(), empty()],
            rxe: [rxe(RXE[0])?, rxe(RXE[1])?],
            home,
            away,
        };
        scene.restore()?;
        Ok(scene)
    }

    fn seat(&self, device: u64) -> Option<std::sync::MutexGuard<'_, Seat>> {
        let seat = self.virtual_ones.get(usize::try_from(device).ok()?)?;
        Some(
            seat.lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    /// The number of a device's umad device.
    pub fn umad(&self, device: u64) -> u32 {
        match self.seat(device) {
            Some(seat) => seat.number,
            None => self.rxe[usize::from(device != FIRST_RXE)].0,
        }
    }

    /// The GID of a Soft-RoCE device.
    pub fn gid(&self, device: u64) -> Gid {
        self.rxe[usize::from(device != FIRST_RXE)].1
    }

    /// The LID of a virtual HCA, which it has as long as it is not changed.
    pub fn lid(device: u64) -> u16 {
        u16::try_from(device).map_or(0, |lid| lid + 1)
    }

    /// Plugs a virtual HCA in, unless it is there.
    pub fn plug(&self, device: u64) -> Outcome {
        let Some(mut seat) = self.seat(device) else {
            return Ok(());
        };
        if seat.plugged.is_some() {
            return Ok(());
        }
        let shape = if device < 4 { Shape::Ca } else { Shape::Opa };
        let letter = usize::try_from(device)
            .ok()
            .and_then(|n| DEVICES.get(n))
            .unwrap_or(&"?");
        let cable = 0x6600 + self.number * 8 + u32::try_from(device / 2)?;
        let spec = Spec::new(shape, 1).name(&format!("fuzz{}_{letter}", self.number));
        let vhca = spec.cabled(1, Self::lid(device).into(), cable).create()?;
        let (as_made, _) = vhca.port(1)?;
        // It is there when it is made; udev, and so the node's owner, may be late.
        let found = sysfs::find(&vhca.ibdev, 1)?;
        seat.plugged = Some(Plugged { vhca, as_made });
        seat.number = found.ok_or("a virtual HCA without a umad device")?.number;
        seat.touched = false;
        Ok(())
    }

    /// Pulls a virtual HCA out.
    pub fn unplug(&self, device: u64) -> Outcome<bool> {
        let taken = self.seat(device).and_then(|mut seat| seat.plugged.take());
        match taken {
            Some(plugged) => {
                plugged.vhca.unplug()?;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Sets a fault; the kinds are the words of [`crate::field::Field::Fault`].
    pub fn fault(&self, device: u64, kind: u64, n: u64) -> Outcome {
        let n = u32::try_from(n)?;
        let mut faults = Faults::default();
        match kind {
            1 => faults.drop_next = n,
            2 => faults.duplicate_every = n,
            3 => (faults.fail_send_at, faults.fail_send_errno) = (n, 12),
            4 => (faults.send_status_at, faults.send_status) = (n, 12),
            5 => faults.modify_port_errno = 5,
            6 => faults.delay_ms = n,
            7 => faults.complete_delay_ms = n,
            8 => faults.consume_next = n,
            _ => (),
        }
        if let Some(mut seat) = self.seat(device) {
            seat.touched = true;
            if let Some(plugged) = &seat.plugged {
                plugged.vhca.faults(faults)?;
            }
        }
        Ok(())
    }

    /// Changes a port; the kinds are the words of [`crate::field::Field::Change`].
    pub fn change(&self, device: u64, kind: u64) -> Outcome {
        let Some(mut seat) = self.seat(device) else {
            return Ok(());
        };
        seat.touched = true;
        if let Some(plugged) = &seat.plugged {
            let mut port = plugged.as_made;
            match kind {
                1 => port.flags |= PORT_DOWN,
                2 => port.lid += 16,
                3 => port.pkeys[..3].copy_from_slice(&[0xffff, 0x8001, 0x0002]),
                4 => port.flags |= PORT_WAIT_FOR_SM,
                _ => (),
            }
            plugged.vhca.set_port(1, port, 0)?;
        }
        Ok(())
    }

    /// Asks netlink for the number of a device's node.
    pub fn chardev(&self, device: u64, issm: bool) -> nix::Result<()> {
        let name = match self.seat(device) {
            Some(seat) => seat
                .plugged
                .as_ref()
                .map(|plugged| plugged.vhca.ibdev.clone())
                .unwrap_or_default(),
            None => RXE[usize::from(device != FIRST_RXE)].to_owned(),
        };
        let mut rdma = Rdma::open()?;
        let index = rdma.index(&name)?;
        rdma.chardev(if issm { "issm" } else { "umad" }, Some(index), Some(1))
            .map(drop)
    }

    /// Makes it as it was at the begin.
    pub fn restore(&self) -> Outcome {
        for device in 0..FIRST_RXE {
            self.plug(device).what("plugging a virtual HCA in")?;
            let Some(mut seat) = self.seat(device) else {
                continue;
            };
            if std::mem::take(&mut seat.touched) {
                if let Some(plugged) = &seat.plugged {
                    plugged.vhca.faults(Faults::default())?;
                    plugged.vhca.set_port(1, plugged.as_made, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Moves the calling thread to the network namespace away, or home.
    pub fn go(&self, away: bool) -> nix::Result<()> {
        setns(
            if away { &self.away } else { &self.home },
            CloneFlags::CLONE_NEWNET,
        )
    }
}

/// Makes faults possible that the call [`crate::call::Op::Fail`] asks for: of allocations and copies that are made below the
/// code of ib_umad. Nothing happens where the kernel cannot do that.
pub fn allow_failures() -> Outcome {
    match Injection::new() {
        Ok(injection) => injection.within(Some(injection::code_of("ib_umad")?)),
        Err(Failure::Skipped(_)) => Ok(()),
        Err(failure) => Err(failure),
    }
}
