// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Soft-RoCE devices: those that are there, and pairs that a check makes for itself.

use std::fs;
use std::time::{Duration, Instant};

use umad::{sysfs, Gid};

use crate::{patient, run, wait_until, Outcome};

/// One end of a pair.
#[derive(Clone, Debug)]
pub struct RxePort {
    /// The Ethernet device below.
    pub netdev: String,
    /// The RDMA device.
    pub ibdev: String,
}

impl RxePort {
    fn new(netdev: String) -> Self {
        let ibdev = format!("rxe_{netdev}");
        Self { netdev, ibdev }
    }

    /// Its umad number now.
    pub fn umad(&self) -> Outcome<u32> {
        umad_number(&self.ibdev)
    }

    /// Makes the RDMA device: a hot plug. Waits until it can be used.
    pub fn plug(&self) -> Outcome {
        run(&format!(
            "rdma link add {} type rxe netdev {}",
            self.ibdev, self.netdev
        ))?;
        settle(&self.ibdev)
    }

    /// Removes the RDMA device: a hot unplug.
    pub fn unplug(&self) -> Outcome {
        run(&format!("rdma link delete {}", self.ibdev))?;
        Ok(())
    }

    /// True while the RDMA device is there.
    pub fn is_plugged(&self) -> bool {
        fs::exists(format!("{}/{}", sysfs::DEVICES, self.ibdev)).unwrap_or(false)
    }
}

/// Two Soft-RoCE devices on the two ends of a veth; all of it goes with the value.
#[derive(Debug)]
pub struct RxePair {
    /// One end.
    pub a: RxePort,
    /// The other end.
    pub b: RxePort,
}

impl RxePair {
    /// Makes `NAME0` and `NAME1` (Ethernet), `rxe_NAME0` and `rxe_NAME1` (RDMA), and waits until
    /// both can send, and their umad nodes are there (if ib_umad is loaded).
    ///
    /// A pair of that name that an earlier check left behind is removed first.
    pub fn new(name: &str) -> Outcome<Self> {
        let pair = Self::plain(name)?;
        pair.a.plug()?;
        pair.b.plug()?;
        Ok(pair)
    }

    /// The same without the RDMA devices.
    pub fn plain(name: &str) -> Outcome<Self> {
        let pair = Self {
            a: RxePort::new(format!("{name}0")),
            b: RxePort::new(format!("{name}1")),
        };
        pair.remove();
        let (a, b) = (&pair.a.netdev, &pair.b.netdev);
        run(&format!("ip link add {a} type veth peer name {b}"))?;
        for netdev in [a, b] {
            // Addresses are usable at once, and are what the GID table has at index 0.
            sysctl(netdev, "accept_dad", "0")?;
            sysctl(netdev, "addr_gen_mode", "0")?;
            run(&format!("ip link set {netdev} up"))?;
        }
        for (netdev, peer) in [(a, b), (b, a)] {
            let address = link_local(peer)?;
            let mac = mac(peer)?;
            run(&format!(
                "ip -6 neigh replace {address} lladdr {mac} dev {netdev} nud permanent"
            ))?;
        }
        Ok(pair)
    }

    // Removes what is there; what is not there cannot be removed, so errors say nothing.
    fn remove(&self) {
        for port in [&self.a, &self.b] {
            if port.is_plugged() {
                let _ = port.unplug();
            }
        }
        if fs::exists(format!("/sys/class/net/{}", self.a.netdev)).unwrap_or(false) {
            let _ = run(&format!("ip link delete {}", self.a.netdev));
        }
    }
}

impl Drop for RxePair {
    fn drop(&mut self) {
        self.remove();
    }
}

fn sysctl(netdev: &str, name: &str, value: &str) -> Outcome {
    let path = format!("/proc/sys/net/ipv6/conf/{netdev}/{name}");
    fs::write(&path, value).map_err(|e| format!("{path}: {e}"))?;
    Ok(())
}

fn mac(netdev: &str) -> Outcome<String> {
    let path = format!("/sys/class/net/{netdev}/address");
    let text = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    Ok(text.trim().to_owned())
}

// The link-local address that the kernel makes of the MAC address.
fn link_local(netdev: &str) -> Outcome<Gid> {
    let mac = mac(netdev)?;
    let bytes: Vec<u8> = mac
        .split(':')
        .map(|part| u8::from_str_radix(part, 16))
        .collect::<Result<_, _>>()?;
    let [a, b, c, d, e, f] = bytes[..] else {
        return Err(format!("{netdev} has the MAC address {mac}").into());
    };
    Ok(Gid([
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]))
}

/// Names of all Soft-RoCE devices (on `rdma link`'s word).
pub fn rxe_links() -> Outcome<Vec<String>> {
    Ok(run("rdma link show")?
        .lines()
        .filter_map(|line| {
            let name = line.split_whitespace().nth(1)?;
            Some(name.split('/').next()?.to_owned())
        })
        .collect())
}

/// The umad number of port 1 of a device.
pub fn umad_number(ibdev: &str) -> Outcome<u32> {
    match sysfs::find(ibdev, 1)? {
        Some(port) => Ok(port.number),
        None => Err(format!("{ibdev} has no umad device").into()),
    }
}

/// Waits until the device has a umad device and its node, and returns its number.
pub fn wait_for_umad(ibdev: &str) -> Outcome<u32> {
    let end = Instant::now() + patient(Duration::from_secs(30));
    loop {
        match umad_number(ibdev) {
            Ok(number) if umad::port::node(number).exists() => return Ok(number),
            other if Instant::now() >= end => {
                return Err(format!("{ibdev}: no umad node after 30 s: {other:?}").into())
            }
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Waits until port 1 of a device can send: it is active, GID index 0 is set; and until its umad
/// node is there, if ib_umad is loaded.
pub fn settle(ibdev: &str) -> Outcome {
    wait_until(
        &format!("port 1 of {ibdev} is active, with a GID"),
        Duration::from_secs(30),
        || {
            sysfs::state(ibdev, 1).is_ok_and(|state| state.starts_with('4'))
                && sysfs::gid(ibdev, 1, 0).is_ok_and(|gid| !gid.is_zero())
        },
    )?;
    if crate::module::is_loaded() {
        wait_for_umad(ibdev)?;
    }
    Ok(())
}
