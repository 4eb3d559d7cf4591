// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl doctor`: which `ib_umad` is loaded, why a node is missing, why an open would fail, and what
//! holds the module.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::stat::{major, minor};
use nix::unistd::{access, AccessFlags};
use serde::Serialize;
use umad::sysfs::{self, UmadPort};
use umad::{Layout, Port};

use crate::failure::{Failure, Outcome};
use crate::holders::{self, Seen};
use crate::loaded::{self, entries, Kind, Loaded};
use crate::output::{print, print_json, shown, Format};
use crate::ports::{self, text};
use crate::show;

const NODES: &str = "/dev/infiniband";

/// How a finding is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth to know.
    Note,
    /// Not as it should be.
    Problem,
}

/// A finding.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// How it is meant.
    pub level: Level,
    /// A word for what it is about, for programs: `module`, `devices`, `node`, `open`, `issm`, `holders`.
    pub topic: &'static str,
    /// What was found.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    module: Loaded,
    findings: Vec<Finding>,
    holders: Vec<show::File>,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, topic: &'static str, what: String, hint: Option<String>) {
        self.0.push(Finding {
            level,
            topic,
            what,
            hint,
        });
    }

    fn ok(&mut self, topic: &'static str, what: impl Into<String>) {
        self.add(Level::Ok, topic, what.into(), None);
    }

    fn note(&mut self, topic: &'static str, what: impl Into<String>, hint: impl Into<String>) {
        self.add(Level::Note, topic, what.into(), Some(hint.into()));
    }

    fn problem(&mut self, topic: &'static str, what: impl Into<String>, hint: impl Into<String>) {
        self.add(Level::Problem, topic, what.into(), Some(hint.into()));
    }
}

/// Looks at everything, and says what it finds.
pub fn run(format: Format) -> Outcome {
    let module = Loaded::look_closely();
    let mut findings = Findings::default();
    look_at_module(&module, &mut findings);
    let (ports, seen) = match module.kind {
        Kind::NotLoaded => Default::default(),
        _ => (sysfs::ports().unwrap_or_default(), holders::look()?),
    };
    look_at_devices(&module, &ports, &mut findings);
    for port in &ports {
        look_at_node(port, &mut findings);
        look_at_issm(port, &mut findings);
    }
    look_for_stale_nodes(&ports, &mut findings);
    if module.kind != Kind::NotLoaded {
        look_at_holders(&module, &seen, &mut findings);
    }
    let problems = findings.0.iter().filter(|f| f.level == Level::Problem);
    let problems = problems.count();
    match format {
        Format::Json => print_json(&Report {
            module,
            findings: findings.0,
            holders: seen.holders.iter().map(show::File::new).collect(),
        })?,
        Format::Text => {
            for finding in &findings.0 {
                let level = match finding.level {
                    Level::Ok => "ok",
                    Level::Note => "note",
                    Level::Problem => "PROBLEM",
                };
                print(format_args!("{level:<8} {}\n", finding.what))?;
                if let Some(hint) = &finding.hint {
                    print(format_args!("{:8} {hint}\n", ""))?;
                }
            }
        }
    }
    match problems {
        0 => Ok(()),
        1 => Err(Failure::wrong("1 problem")),
        n => Err(Failure::wrong(format!("{n} problems"))),
    }
}

fn look_at_module(module: &Loaded, findings: &mut Findings) {
    if module.kind == Kind::NotLoaded {
        findings.problem("module", "ib_umad is not loaded", Loaded::how_to_load());
        return;
    }
    let abi = sysfs::abi_version();
    findings.ok(
        "module",
        format!(
            "ib_umad is loaded, the one {}: {}; ABI version {}",
            module.name(),
            module.evidence,
            abi.as_ref().map_or("?".to_owned(), u32::to_string)
        ),
    );
    match &module.would_load {
        Some(file) if module.kind == Kind::Rust && file.starts_with("kernel/") => findings.note(
            "module",
            format!(
                "modprobe ib_umad would load {}: the kernel's own, not the one that is loaded",
                shown(file)
            ),
            "After the next boot it will be that one. make modules_install puts this one where modprobe takes it first.",
        ),
        Some(file) => findings.ok(
            "module",
            format!("modprobe ib_umad would load {}", shown(file)),
        ),
        None if module.kind == Kind::CBuiltIn => (),
        None => findings.note(
            "module",
            "modprobe would find no ib_umad for this kernel: the loaded one came by insmod",
            "It will be missing after the next boot; install it, and run depmod.",
        ),
    }
}

/// The ports of all RDMA devices, and whether ib_umad serves them.
fn look_at_devices(module: &Loaded, served: &[UmadPort], findings: &mut Findings) {
    let devices = entries(Path::new(sysfs::DEVICES));
    if devices.is_empty() {
        findings.problem(
            "devices",
            "this kernel has no RDMA device",
            "Load the driver of the adapter (lspci -k names it), or, to try without one: \
             rdma link add rxe0 type rxe netdev ETHERNET-DEVICE",
        );
    }
    for device in devices {
        let folder = Path::new(sysfs::DEVICES).join(&device);
        let kind = text(&folder.join("node_type")).unwrap_or_default();
        for port in entries(&folder.join("ports")) {
            let is_it = |p: &&UmadPort| p.ibdev == device && p.port.to_string() == port;
            let name = format!("{} port {}", shown(&device), shown(&port));
            match served.iter().find(is_it) {
                Some(port) => {
                    findings.ok("devices", format!("{name} is {}", ports::node(port)));
                }
                None if module.kind == Kind::NotLoaded => (),
                None if kind.starts_with("4:") => findings.note(
                    "devices",
                    format!("{name} has no umad node: it is iWARP, which has no MADs"),
                    "Nothing is wrong.",
                ),
                None => findings.note(
                    "devices",
                    format!("{name} has no umad node"),
                    "Its driver says that the port has no MADs (iWARP, usNIC, EFA and some virtual ones have none), \
                     or ib_umad could not add it: then the kernel's log says why (dmesg | grep -i umad).",
                ),
            }
        }
    }
    let mode = text(Path::new("/sys/module/ib_core/parameters/netns_mode"));
    if mode.as_deref() == Some("N") {
        findings.note(
            "devices",
            "each RDMA device belongs to one network namespace (rdma system: netns exclusive)",
            "Devices of other namespaces are not to be seen here, and their nodes cannot be opened (EPERM): \
             use them there, or move them: rdma dev set DEVICE netns NAME",
        );
    }
}

/// The node of a port: is it there, is it the right one, can it be opened?
fn look_at_node(port: &UmadPort, findings: &mut Findings) {
    let path = umad::port::node(port.number);
    if !check_number(&path, &ports::node(port), findings) {
        return;
    }
    match Port::options()
        .nonblock(true)
        .layout(Layout::Old)
        .open(port.number)
    {
        Ok(file) => {
            let tells = match file.info() {
                Ok(_) => "its files tell what they do",
                Err(umad::Error::NoFdInfo) => "its files do not tell what they do",
                Err(_) => "what its files tell is not understood",
            };
            findings.ok("open", format!("{} can be opened; {tells}", path.display()));
        }
        Err(e) => {
            let hint = e.errno().map(|errno| why_open_fails(&path, errno));
            findings.problem(
                "open",
                format!("{} cannot be opened: {e}", path.display()),
                hint.unwrap_or_default(),
            );
        }
    }
}

/// The node of a port that can have a subnet manager. It is not opened: that would say that there is one.
fn look_at_issm(port: &UmadPort, findings: &mut Findings) {
    let Some(name) = ports::issm(port) else {
        return;
    };
    let path = Path::new(NODES).join(&name);
    if !check_number(&path, &name, findings) {
        return;
    }
    match access(&path, AccessFlags::R_OK) {
        Ok(()) => findings.ok("issm", format!("{} may be opened", path.display())),
        Err(errno) => findings.problem(
            "issm",
            format!("{} may not be opened: {errno}", path.display()),
            why_open_fails(&path, errno),
        ),
    }
}

/// Whether a node is there, with the number that the kernel gave it.
fn check_number(path: &Path, name: &str, findings: &mut Findings) -> bool {
    let number = text(&Path::new(sysfs::CLASS).join(name).join("dev"));
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) => {
            findings.problem(
                "node",
                format!("{} is missing: {e}", path.display()),
                format!(
                    "The kernel has the device, number {}. devtmpfs makes the node: is it what is mounted on /dev \
                     (findmnt /dev)? In a container the node has to be passed in. udev makes it anew: \
                     udevadm trigger -c add /sys/class/infiniband_mad/{name}",
                    number.as_deref().unwrap_or("?")
                ),
            );
            return false;
        }
    };
    let (major, minor) = (major(meta.rdev()), minor(meta.rdev()));
    if !meta.file_type().is_char_device() {
        findings.problem(
            "node",
            format!("{} is no device node", path.display()),
            "Somebody put it there: remove it, and have udev make the node (udevadm trigger -c add).",
        );
        return false;
    }
    if number.as_deref() != Some(&format!("{major}:{minor}")) {
        findings.problem(
            "node",
            format!(
                "{} has the number {major}:{minor}, the device has {}",
                path.display(),
                number.as_deref().unwrap_or("?")
            ),
            "The node is stale: it was copied or made by hand for an earlier device. Remove it, and have udev make \
             it anew (udevadm trigger -c add).",
        );
        return false;
    }
    true
}

/// Nodes without a device.
fn look_for_stale_nodes(ports: &[UmadPort], findings: &mut Findings) {
    for name in entries(Path::new(NODES)) {
        let digits = name.strip_prefix("umad").or(name.strip_prefix("issm"));
        let Some(number) = digits.and_then(|digits| digits.parse::<u32>().ok()) else {
            continue;
        };
        let known = ports.iter().any(|port| port.number == number);
        if !known || !Path::new(sysfs::CLASS).join(&name).exists() {
            findings.problem(
                "node",
                format!("{NODES}/{} is stale: there is no such device", shown(&name)),
                "Nothing that opens it gets anywhere. If its device was just removed, look again; else somebody \
                 made the node by hand: remove it.",
            );
        }
    }
}

/// Why an open of a node fails with an errno, and what to do.
pub fn why_open_fails(path: &Path, errno: Errno) -> String {
    match errno {
        Errno::EACCES => {
            let owner = fs::metadata(path).map(|meta| {
                format!(
                    " It belongs to user {}, group {}, mode {:o}.",
                    meta.uid(),
                    meta.gid(),
                    meta.mode() & 0o7777
                )
            });
            format!(
                "Only who may read and write the node can open it.{} Use root, or a udev rule that lets a group: \
                 SUBSYSTEM==\"infiniband_mad\", KERNEL==\"umad*\", GROUP=\"rdma\", MODE=\"0660\" \
                 (who can send to QP0 can reconfigure the fabric). In a container, its device cgroup must allow it.",
                owner.unwrap_or_default()
            )
        }
        Errno::EPERM => "The RDMA device belongs to another network namespace (rdma system says netns exclusive), \
             or a device cgroup forbids the node. Run in that namespace, or move the device: \
             rdma dev set DEVICE netns NAME"
            .to_owned(),
        Errno::ENOENT => format!(
            "The node is missing. {}",
            if Loaded::look().kind == loaded::Kind::NotLoaded {
                Loaded::how_to_load()
            } else {
                "umadctl doctor says why.".to_owned()
            }
        ),
        Errno::ENXIO => "There is no device with the node's number: it has gone, or the node is stale.".to_owned(),
        Errno::ENODEV => "No module serves the node's number: ib_umad is not loaded, or the node is stale.".to_owned(),
        Errno::EMFILE | Errno::ENFILE => "Too many files are open (ulimit -n).".to_owned(),
        Errno::ENOMEM => "There is no memory.".to_owned(),
        _ => "The kernel's log may say why (dmesg | grep -i umad).".to_owned(),
    }
}

/// What keeps the module from being unloaded.
fn look_at_holders(module: &Loaded, seen: &Seen, findings: &mut Findings) {
    for holder in &seen.holders {
        let what = holder.kind.name();
        let gone = match &holder.info {
            Some(Ok(info)) if !info.alive => ", whose device is gone",
            _ => "",
        };
        findings.add(
            Level::Note,
            "holders",
            format!(
                "process {} ({}), user {}, has {} open{gone} (descriptor {}, {what})",
                holder.pid,
                shown(&holder.process),
                holder.uid,
                shown(&holder.path),
                holder.fd
            ),
            None,
        );
    }
    if !module.used_by.is_empty() {
        let names: Vec<String> = module.used_by.iter().map(|name| shown(name)).collect();
        findings.add(
            Level::Note,
            "holders",
            format!("modules that use ib_umad: {}", names.join(" ")),
            None,
        );
    }
    if let Some(unseen) = show::unseen(seen, module) {
        findings.add(Level::Note, "holders", unseen, None);
    }
    match module.users {
        Some(0) => findings.ok("holders", "nothing holds the module: it can be unloaded"),
        Some(users) => findings.note(
            "holders",
            format!("the module is in use: rmmod ib_umad would refuse (the kernel's count is {users})"),
            "It can be unloaded when these files are closed. (An open file counts twice; tracing counts, too.)",
        ),
        None => (),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_its_reason() {
        let path = Path::new("/dev/null");
        let mut seen = std::collections::BTreeSet::new();
        for errno in [
            Errno::EACCES,
            Errno::EPERM,
            Errno::ENOENT,
            Errno::ENXIO,
            Errno::ENODEV,
            Errno::EMFILE,
            Errno::EIO,
        ] {
            assert!(seen.insert(why_open_fails(path, errno)), "{errno}");
        }
        assert!(why_open_fails(path, Errno::EACCES).contains("mode 666"));
    }
}
