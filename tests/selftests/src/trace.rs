// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The tracepoints `ib_umad:*`, read from tracefs.

use std::fs;
use std::path::{Path, PathBuf};

use ktap::peers::SOON;
use ktap::prelude::*;

const TRACEFS: &str = "/sys/kernel/tracing";

/// An event in the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its name, without the system.
    pub name: String,
    /// What it prints, without blanks at the end.
    pub text: String,
}

/// The description of an event that programs read its records by, but for the number that it happens to have.
pub fn format_of(event: &str) -> Outcome<String> {
    let path = format!("{TRACEFS}/events/ib_umad/{event}/format");
    let text = fs::read_to_string(&path).what(path)?;
    let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with("ID:")).collect();
    Ok(lines.join("\n"))
}

/// The events that ib_umad has.
pub fn events() -> Outcome<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(format!("{TRACEFS}/events/ib_umad"))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// A trace of its own; gone with the value.
pub struct Trace(PathBuf);

impl Trace {
    /// Traces some events of ib_umad.
    pub fn of(events: &[&str]) -> Outcome<Self> {
        let dir = format!("{TRACEFS}/instances/umad-{}", std::process::id());
        fs::create_dir(&dir).what(&dir)?;
        let trace = Self(dir.into());
        for event in events {
            trace.set(&format!("events/ib_umad/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> Outcome {
        let path = self.0.join(file);
        fs::write(&path, value).what(path.display())
    }

    /// All events so far, in order; fails if there was no room for some.
    pub fn events(&self) -> Outcome<Vec<Event>> {
        for cpu in fs::read_dir(self.0.join("per_cpu"))? {
            let stats = fs::read_to_string(cpu?.path().join("stats"))?;
            for lost in ["overrun", "commit overrun", "dropped events"] {
                ensure!(stats.contains(&format!("{lost}: 0")), "{stats}");
            }
        }
        let text = fs::read_to_string(self.0.join("trace"))?;
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(Event::parse).collect()
    }

    /// Waits until there are so many events, and sees that there are not more.
    pub fn wait(&self, count: usize) -> Outcome<Vec<Event>> {
        let mut seen = Ok(Vec::new());
        let _ = wait_until("", SOON, || {
            seen = self.events();
            seen.as_ref().map_or(true, |events| events.len() >= count)
        });
        let seen = seen?;
        ensure_eq!(seen.len(), count, "{seen:#?}");
        Ok(seen)
    }

    /// What the only event so far prints; it must be this one.
    pub fn only(&self, name: &str) -> Outcome<String> {
        match self.wait(1)?.pop() {
            Some(event) if event.name == name => Ok(event.text),
            event => Err(format!("not {name}: {event:?}").into()),
        }
    }

    /// Forgets what was traced so far.
    pub fn clear(&self) -> Outcome {
        self.set("trace", "")
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Nobody may be on the way into the buffer any more.
        let _ = self.set("events/enable", "0");
        let _ = remove(&self.0);
    }
}

fn remove(dir: &Path) -> Outcome {
    wait_until("the trace can be removed", SOON, || {
        fs::remove_dir(dir).is_ok()
    })
}

impl Event {
    /// `task-pid [cpu] flags seconds: name: text`
    fn parse(line: &str) -> Outcome<Self> {
        let behind_time = line.split_once("ib_umad_").map(|(_, rest)| rest);
        let Some((name, text)) = behind_time.and_then(|rest| rest.split_once(": ")) else {
            return Err(format!("no event: {line}").into());
        };
        Ok(Self {
            name: format!("ib_umad_{name}"),
            text: text.trim_end().to_owned(),
        })
    }

    /// What `write`, `read_recv` and `read_send` print of a packet of port `port` of the device with this
    /// number.
    pub fn text_of(device: u32, port: u32, packet: &Packet) -> Outcome<String> {
        let hdr = packet.full_header();
        let (base, mad) = (hdr.base, packet.mad_header()?);
        Ok(format!(
            "{device}:{port} umad_hdr: id {:#010x} status {:#010x} ms {} ret {} len {} QP{} qkey {:#010x} \
             lid {:#06x} sl {} path_bits {:#x} grh {:#x} gidi {} hop_lim {} traf_cl {} gid {} \
             flow {:#010x} pkeyi {}  MAD: base_ver {:#x} class {:#x} class_ver {:#x} method {:#x} \
             status {:#06x} class_specific {:#06x} tid {:#018x} attr_id {:#06x} attr_mod {:#010x}",
            packet.agent.0,
            base.status,
            base.timeout_ms,
            base.retries,
            base.length,
            base.qpn.get(),
            base.qkey.get(),
            base.lid.get(),
            base.sl,
            base.path_bits,
            base.grh_present,
            base.gid_index,
            base.hop_limit,
            base.traffic_class,
            umad::Gid(base.gid),
            base.flow_label.get(),
            hdr.pkey_index,
            mad.base_version,
            mad.mgmt_class,
            mad.class_version,
            mad.method.0,
            mad.status.get(),
            mad.class_specific.get(),
            mad.tid.get(),
            mad.attr_id.get(),
            mad.attr_mod.get(),
        ))
    }

    /// What `drop` prints of a packet that is dropped for this reason.
    pub fn text_of_drop(
        device: u32,
        port: u32,
        reason: &str,
        error: i32,
        packet: &Packet,
    ) -> Outcome<String> {
        let (base, mad) = (packet.header, packet.mad_header()?);
        Ok(format!(
            "{device}:{port} {reason} error {error} id {:#010x} ms {} QP{} lid {:#06x} grh {:#x} gid {}  \
             MAD: class {:#x} class_ver {:#x} method {:#x} status {:#06x} tid {:#018x} attr_id {:#06x} \
             attr_mod {:#010x}",
            packet.agent.0,
            base.timeout_ms,
            base.qpn.get(),
            base.lid.get(),
            base.grh_present,
            umad::Gid(base.gid),
            mad.mgmt_class,
            mad.class_version,
            mad.method.0,
            mad.status.get(),
            mad.tid.get(),
            mad.attr_id.get(),
            mad.attr_mod.get(),
        ))
    }
}
