// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `ipoib`: the kernel's other users of a port beside us. OpenSM brings a subnet up over umad,
//! `ib_ipoib` joins its groups there and moves data, `ib_cm` and `rdma_cm` are loaded; links and devices
//! go while all of them are at work.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ktap::kmsg::Mark;
use ktap::prelude::*;
use selftests::vhca::{
    answer, attr, direct, Module, Shape, Smp, Spec, SpecExt, Vhca, VhcaExt, EXTERNAL,
    NO_PROCESS_MAD, PORT_DOWN, PORT_WAIT_FOR_SM,
};
use umad::sysfs;

/// PortState: Active.
const ACTIVE: u32 = 4;
/// Long enough for a subnet manager, and for what waits for it, under emulation.
const SUBNET: Duration = Duration::from_secs(60);
/// Q_Key of the groups that OpenSM makes for `ib_ipoib`.
const IPOIB_QKEY: u32 = 0x0b1b;

/// Kernel modules that are there as long as the value.
struct Loaded(&'static [&'static str]);

impl Loaded {
    fn all() -> Outcome<Self> {
        // Unloading goes from the last one to the first.
        let this = Self(&["ib_cm", "rdma_cm", "ib_ipoib"]);
        for module in this.0 {
            run(&format!("modprobe {module}"))?;
        }
        Ok(this)
    }

    fn unload(self) -> Outcome {
        for module in self.0.iter().rev() {
            if Path::new("/sys/module").join(module).exists() {
                run(&format!("modprobe -r {module}"))?;
            }
        }
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        for module in self.0.iter().rev() {
            let _ = run(&format!("modprobe -r {module}"));
        }
    }
}

/// A running OpenSM; it ends with the value.
struct OpenSm {
    child: Child,
    log: PathBuf,
}

impl OpenSm {
    /// Starts it on port 1 of a device.
    fn start(device: &Vhca) -> Outcome<Self> {
        device.umad(1)?;
        let dir = std::env::temp_dir().join(format!("opensm-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let log = dir.join("log");
        let output = fs::File::create(dir.join("output"))?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "opensm", "-s", "2", "-g"])
            .arg(format!("{:#x}", guid(device)?))
            .arg("-f")
            .arg(&log)
            .env("OSM_TMP_DIR", &dir)
            .env("OSM_CACHE_DIR", &dir)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        Ok(Self { child, log })
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for OpenSm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(dir) = self.log.parent() {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// GUID of port 1 of a device.
fn guid(device: &Vhca) -> Outcome<u64> {
    let gid = sysfs::gid(&device.ibdev, 1, 0)?.0;
    Ok(u64::from_be_bytes(gid[8..].try_into()?))
}

/// The end of a hardware address of ib_ipoib's: it names the port.
fn address_end(guid: u64) -> String {
    let bytes = guid.to_be_bytes().map(|byte| format!("{byte:02x}"));
    bytes.join(":")
}

/// The network interface of a port, with its hardware address.
fn find_interface(guid: u64) -> Option<(String, String)> {
    for entry in fs::read_dir("/sys/class/net").ok()?.flatten() {
        let Ok(address) = fs::read_to_string(entry.path().join("address")) else {
            continue;
        };
        let address = address.trim();
        // 20 bytes: flags and queue pair, then the GID.
        if address.len() == 59 && address.ends_with(&address_end(guid)) {
            let name = entry.file_name().to_string_lossy().into_owned();
            return Some((name, address.to_owned()));
        }
    }
    None
}

/// A device's network interface, which may be in a network namespace of its own.
struct Interface {
    name: String,
    namespace: Option<Namespace>,
    qpn: u32,
}

impl Interface {
    /// Waits for the interface of port 1 of a device, gives it an IPv4 address, and sets it up.
    fn of(device: &Vhca, namespace: Option<Namespace>, ip: &str) -> Outcome<Self> {
        let guid = guid(device)?;
        wait_until("there is a network interface", SUBNET, || {
            find_interface(guid).is_some()
        })?;
        let (name, address) = find_interface(guid).ok_or("the interface is gone")?;
        let qpn = u32::from_str_radix(&address[3..11].replace(':', ""), 16)?;
        if let Some(namespace) = &namespace {
            run(&format!("ip link set {name} netns {}", namespace.0))?;
        }
        let this = Self {
            name,
            namespace,
            qpn,
        };
        this.run(&format!("ip address add {ip}/24 dev {}", this.name))?;
        this.run(&format!("ip link set {} up", this.name))?;
        Ok(this)
    }

    /// Runs a command where the interface is.
    fn run(&self, command: &str) -> Outcome<String> {
        match &self.namespace {
            Some(namespace) => run(&format!("ip netns exec {} {command}", namespace.0)),
            None => run(command),
        }
    }

    /// Whether it is up, and has joined its broadcast group.
    fn is_running(&self) -> bool {
        self.run(&format!("ip -o link show dev {}", self.name))
            .is_ok_and(|line| line.contains("LOWER_UP") && line.contains("state UP"))
    }

    fn wait_running(&self, want: bool) -> Outcome {
        wait_until(&format!("{} runs: {want}", self.name), SUBNET, || {
            self.is_running() == want
        })
    }

    /// Pings an address; all answers must come.
    fn ping(&self, ip: &str, bytes: u32) -> Outcome {
        // The first one waits for address resolution and a path record, and more than one may be lost
        // meanwhile.
        wait_until(&format!("{ip} answers"), SUBNET, || {
            self.run(&format!("busybox ping -c 1 -W 2 {ip}")).is_ok()
        })?;
        let said = self.run(&format!("busybox ping -c 5 -W 10 -s {bytes} {ip}"))?;
        ensure!(said.contains("5 packets received"), "{said}");
        Ok(())
    }
}

/// A named network namespace; it ends with the value.
struct Namespace(String);

impl Namespace {
    fn new() -> Outcome<Self> {
        let name = format!("ipoib-{}", std::process::id());
        run(&format!("ip netns add {name}"))?;
        Ok(Self(name))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = run(&format!("ip netns delete {}", self.0));
    }
}

/// Two channel adapters with a subnet manager on the first one, and with their interfaces.
///
/// DROP ORDER: the interfaces and the subnet manager before the devices.
struct Subnet {
    near: Interface,
    far: Interface,
    sm: OpenSm,
    a: Vhca,
    b: Vhca,
    // Only there to forward.
    _switch: Option<Vhca>,
}

const NEAR: &str = "10.99.7.1";
const FAR: &str = "10.99.7.2";

impl Subnet {
    fn new(with_switch: bool) -> Outcome<Self> {
        let cable = std::process::id();
        let adapter = |cable| {
            Spec::new(Shape::Ca, 1)
                .port(1, |port| {
                    port.cable = cable;
                    port.flags = PORT_WAIT_FOR_SM;
                })
                .plug()
        };
        let (a, b, switch);
        if with_switch {
            let (left, right) = (cable, cable + 1_000_000);
            // As a device of this host it would make ib_cm crash.
            let mut spec = Spec::new(Shape::Switch, 4).flags(EXTERNAL);
            for (number, cable) in [(1, left), (3, right)] {
                spec = spec.port(number, |port| {
                    port.cable = cable;
                    port.flags = PORT_WAIT_FOR_SM;
                });
            }
            switch = Some(spec.plug()?);
            (a, b) = (adapter(left)?, adapter(right)?);
        } else {
            switch = None;
            (a, b) = (adapter(cable)?, adapter(cable)?);
        }
        let near = Interface::of(&a, None, NEAR)?;
        let far = Interface::of(&b, Some(Namespace::new()?), FAR)?;
        ensure!(!near.is_running(), "it runs without a subnet manager");
        let mut sm = OpenSm::start(&a)?;
        wait_until("the ports are active", SUBNET, || {
            let active = |device: &Vhca| device.port(1).is_ok_and(|(_, state)| state == ACTIVE);
            active(&a) && active(&b) || !sm.is_running()
        })?;
        ensure!(sm.is_running(), "OpenSM has ended: {}", sm.log());
        let this = Self {
            near,
            far,
            sm,
            a,
            b,
            _switch: switch,
        };
        this.near.wait_running(true)?;
        this.far.wait_running(true)?;
        Ok(this)
    }
}

/// The kernel's log, to be looked through for complaints of those that we are beside.
struct Complaints(Mark);

impl Complaints {
    fn watch() -> Outcome<Self> {
        Ok(Self(Mark::now()?))
    }

    fn ensure_none(mut self) -> Outcome {
        let mut lines = self.0.lines()?;
        lines.retain(|line| {
            let what = [
                "timing out",
                "ailed",
                "WARNING",
                "BUG",
                "queue is full",
                "lost",
            ];
            what.iter().any(|word| line.contains(word))
        });
        ensure!(lines.is_empty(), "{lines:?}");
        Ok(())
    }
}

fn data_moves(with_switch: bool) -> Outcome {
    let complaints = Complaints::watch()?;
    let modules = Loaded::all()?;
    let subnet = Subnet::new(with_switch)?;
    subnet.near.ping(FAR, 56)?;
    // As long as the group's MTU lets a packet be, and longer.
    subnet.near.ping(FAR, 1900)?;
    subnet.far.ping(NEAR, 6000)?;
    for device in [&subnet.a, &subnet.b] {
        let counters = device.counters()?;
        ensure_eq!(counters.qkey_violations, 0);
        ensure_eq!(counters.pkey_violations, 0);
        ensure_eq!(counters.no_buffer, 0);
    }
    drop(subnet);
    modules.unload()?;
    complaints.ensure_none()
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("ipoib");

    area.check(
        "two nodes: OpenSM over umad, both interfaces run, ping",
        || data_moves(false),
    )
    .timeout(240);
    area.check(
        "through a switch: OpenSM over umad, both interfaces run, ping",
        || data_moves(true),
    )
    .timeout(240);
    area.check(
        "a MAD to ib_ipoib's queue pair does not get in: it has QP 1's Q_Key, whatever is asked for",
        || {
            let _modules = Loaded::all()?;
            let subnet = Subnet::new(false)?;
            let agent = subnet.a.agent(1, &Registration::send_only())?;
            let lid = u16::try_from(subnet.b.port(1)?.0.lid)?;
            let before = subnet.b.counters()?;
            for qkey in [0, IPOIB_QKEY, Address::GSI_QKEY] {
                let to = Address {
                    qpn: Qpn(subnet.far.qpn),
                    qkey,
                    ..Address::lid(lid)
                };
                let mad = VendorMad::new(0x09, 0, Method::SEND, fresh_tid()).into_bytes();
                agent.port.send(&Packet::new(agent.agent, &to, mad))?;
            }
            wait_until("they are counted", SUBNET, || {
                subnet
                    .b
                    .counters()
                    .is_ok_and(|now| now.qkey_violations == before.qkey_violations + 3)
            })
        },
    )
    .timeout(240);
    area.check("a link goes down and comes up", || {
        let complaints = Complaints::watch()?;
        let modules = Loaded::all()?;
        let mut subnet = Subnet::new(false)?;
        subnet.near.ping(FAR, 56)?;
        subnet.b.change(1, |port| port.flags |= PORT_DOWN)?;
        subnet.far.wait_running(false)?;
        subnet.b.change(1, |port| port.flags &= !PORT_DOWN)?;
        subnet.far.wait_running(true)?;
        subnet.near.ping(FAR, 56)?;
        ensure!(subnet.sm.is_running(), "OpenSM has ended");
        drop(subnet);
        modules.unload()?;
        complaints.ensure_none()
    })
    .timeout(240);
    area.check("both devices are pulled out under traffic", || {
        let complaints = Complaints::watch()?;
        let modules = Loaded::all()?;
        let subnet = Subnet::new(false)?;
        subnet.near.ping(FAR, 56)?;
        let reader = subnet.a.agent(1, &Registration::send_only())?;
        let mut flood = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "busybox", "ping", "-q", "-A", "-s"])
            .args(["1400", FAR])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let before = subnet.b.counters()?.delivered;
        wait_until("there is traffic", SUBNET, || {
            subnet
                .b
                .counters()
                .is_ok_and(|now| now.delivered > before + 50)
        })?;
        let Subnet {
            near,
            far,
            sm,
            a,
            b,
            _switch,
        } = subnet;
        b.unplug()?;
        a.unplug()?;
        ensure_errno!(reader.port.read(&mut [0; 320]), EIO);
        ensure!(
            find_interface_named(&near.name).is_none(),
            "the interface is still there"
        );
        flood.kill()?;
        flood.wait()?;
        drop((near, far, sm));
        modules.unload()?;
        complaints.ensure_none()
    })
    .timeout(240);
    area.check("the modules come and go while umad is at work", || {
        let subnet = {
            let modules = Loaded::all()?;
            let subnet = Subnet::new(false)?;
            // The interfaces go; the subnet stays.
            let Subnet {
                near,
                far,
                sm,
                a,
                b,
                ..
            } = subnet;
            drop((near, far));
            modules.unload()?;
            (sm, a, b)
        };
        let (mut sm, a, b) = subnet;
        let manager = a.manager(1)?;
        for _ in 0..5 {
            let modules = Loaded::all()?;
            let far = guid(&b)?;
            wait_until("there is an interface", SUBNET, || {
                find_interface(far).is_some()
            })?;
            let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[1]);
            answer(&manager.ask(&direct(), smp.0)?)?;
            modules.unload()?;
            ensure!(find_interface(far).is_none(), "the interface is left");
        }
        ensure!(sm.is_running(), "OpenSM has ended");
        Ok(())
    })
    .timeout(240);
    for (name, shape, ports, flags) in [
        ("a CA with three ports", Shape::Ca, 3, 0),
        ("a CA without process_mad", Shape::Ca, 1, NO_PROCESS_MAD),
        ("QP 0 only", Shape::SmiOnly, 1, 0),
        ("no QP 0", Shape::NoSmi, 2, 0),
        ("OPA", Shape::Opa, 2, 0),
        ("no MADs", Shape::NoMad, 1, 0),
    ] {
        area.check(
            format!("beside ib_ipoib and rdma_cm: {name}, in and out"),
            move || {
                let complaints = Complaints::watch()?;
                let modules = Loaded::all()?;
                for _ in 0..3 {
                    let device = Spec::new(shape, ports).flags(flags).plug()?;
                    if matches!(shape, Shape::Ca | Shape::SmiOnly | Shape::Opa) && flags == 0 {
                        let smp = Smp::directed(Method::GET, attr::NODE_INFO, 0, &[]);
                        answer(&device.manager(1)?.ask(&direct(), smp.0)?)?;
                    }
                    device.unplug()?;
                }
                modules.unload()?;
                complaints.ensure_none()
            },
        )
        .timeout(240);
    }

    Module::run(area)
}

fn find_interface_named(name: &str) -> Option<PathBuf> {
    let path = Path::new("/sys/class/net").join(name);
    path.exists().then_some(path)
}
