// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl show`: who has which port open, and what they do with it.

use std::io::{stdout, IsTerminal};
use std::time::Duration;

use serde::Serialize;
use umad::fdinfo::{AgentInfo, Rmpp};
use umad::FileInfo;

use crate::failure::{Failure, Outcome};
use crate::holders::{self, Holder, Kind, Seen};
use crate::loaded::{self, Loaded};
use crate::names;
use crate::output::{note, print, print_json, shown, Format, Table};
use crate::signals::Interrupts;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Look again and again, that far apart.
    pub watch: Option<Duration>,
    /// End after so many looks.
    pub count: Option<u32>,
}

/// A file, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct File {
    pid: u32,
    process: String,
    uid: u32,
    fd: u32,
    path: String,
    kind: &'static str,
    /// What the kernel says of the file; null if it says nothing.
    info: Option<Info>,
}

#[derive(Debug, Serialize)]
struct Info {
    device: String,
    port: u32,
    alive: bool,
    header_bytes: usize,
    unread_packets: u64,
    unread_bytes: u64,
    outstanding_sends: u64,
    outstanding_bytes: u64,
    sent: u64,
    received: u64,
    timed_out: u64,
    dropped: u64,
    agents: Vec<Agent>,
}

#[derive(Debug, Serialize)]
struct Agent {
    id: u32,
    qp: u32,
    rmpp: &'static str,
    interest: Option<Interest>,
}

#[derive(Debug, Serialize)]
struct Interest {
    class: u8,
    class_version: u8,
    oui: u32,
    methods: Vec<u8>,
}

/// What `--json` prints, once or for each look.
#[derive(Debug, Serialize)]
struct Show {
    module: loaded::Kind,
    /// Whether the module says what its files do.
    tells: bool,
    files: Vec<File>,
    /// Processes that may not be looked into.
    hidden_processes: usize,
    /// What the kernel counts as users of the module.
    module_users: Option<u32>,
}

impl Agent {
    fn new(agent: &AgentInfo) -> Self {
        Self {
            id: agent.id.0,
            qp: agent.qp.0,
            rmpp: match agent.rmpp {
                Rmpp::None => "none",
                Rmpp::Kernel => "kernel",
                Rmpp::User => "user",
            },
            interest: agent.interest.as_ref().map(|interest| Interest {
                class: interest.class,
                class_version: interest.class_version,
                oui: interest.oui,
                methods: (0..128)
                    .filter(|method| (interest.methods.0 >> method) & 1 == 1)
                    .collect(),
            }),
        }
    }
}

impl Info {
    fn new(info: &FileInfo) -> Self {
        Self {
            device: info.device.clone(),
            port: info.port,
            alive: info.alive,
            header_bytes: info.layout.header_len(),
            unread_packets: info.unread.count,
            unread_bytes: info.unread.bytes,
            outstanding_sends: info.outstanding.count,
            outstanding_bytes: info.outstanding.bytes,
            sent: info.sent,
            received: info.received,
            timed_out: info.timed_out,
            dropped: info.dropped,
            agents: info.agents.iter().map(Agent::new).collect(),
        }
    }
}

impl File {
    /// Of a descriptor that was found.
    pub fn new(holder: &Holder) -> Self {
        Self {
            pid: holder.pid,
            process: holder.process.clone(),
            uid: holder.uid,
            fd: holder.fd,
            path: holder.path.clone(),
            kind: holder.kind.name(),
            info: match &holder.info {
                Some(Ok(info)) => Some(Info::new(info)),
                _ => None,
            },
        }
    }
}

/// Shows them.
pub fn run(wanted: Wanted, format: Format) -> Outcome {
    let Some(pause) = wanted.watch else {
        return look(format);
    };
    let interrupts = Interrupts::new()?;
    let mut left = wanted.count;
    loop {
        if format == Format::Text && stdout().is_terminal() {
            print("\x1b[H\x1b[J")?;
        }
        look(format)?;
        left = left.map(|left| left.saturating_sub(1));
        if left == Some(0) || interrupts.wait(pause)? {
            return Ok(());
        }
        if format == Format::Text && !stdout().is_terminal() {
            print("\n")?;
        }
    }
}

fn look(format: Format) -> Outcome {
    let module = Loaded::look();
    if module.kind == loaded::Kind::NotLoaded {
        return Err(Failure::new("ib_umad is not loaded").hint(Loaded::how_to_load()));
    }
    let seen = holders::look()?;
    // What is seen counts more than what the module is.
    let mut umad = seen.holders.iter().filter(|h| h.kind == Kind::Umad);
    let tells = match umad.next() {
        Some(holder) => holder.info.is_some(),
        None => module.kind == loaded::Kind::Rust,
    };
    match format {
        Format::Json => print_json(&Show {
            module: module.kind,
            tells,
            files: seen.holders.iter().map(File::new).collect(),
            hidden_processes: seen.hidden,
            module_users: module.users,
        })?,
        Format::Text => print(text(&seen))?,
    }
    for holder in &seen.holders {
        if let Some(Err(why)) = &holder.info {
            note(format_args!(
                "process {}, descriptor {}: {}",
                holder.pid,
                holder.fd,
                shown(why)
            ));
        }
    }
    if let Some(unseen) = unseen(&seen, &module) {
        note(unseen);
    }
    if !tells {
        return Err(Failure::new(format!(
            "the ib_umad that is loaded, the one {}, says nothing of its files in /proc/PID/fdinfo: \
             only who has a node open can be shown",
            module.name()
        ))
        .hint("The ib_umad of umad-rs tells agents, queues and counters."));
    }
    Ok(())
}

/// What could not be seen, and why.
pub fn unseen(seen: &Seen, module: &Loaded) -> Option<String> {
    if seen.hidden > 0 {
        return Some(format!(
            "{} processes of other users could not be looked into; root sees all",
            seen.hidden
        ));
    }
    // An open file counts twice: once for the device, once for its operations.
    let (seen, files) = (seen.holders.len(), module.users? / 2);
    let more = usize::try_from(files).ok()?.checked_sub(seen)?;
    (more > 0).then(|| {
        format!(
            "the kernel counts {files} open files, and {seen} descriptors were found: others may be under way \
             between processes, or in processes that /proc does not show here"
        )
    })
}

fn text(seen: &Seen) -> String {
    let mut files = Table::new(&[
        "PID",
        "PROCESS",
        "UID",
        "FD",
        "NODE",
        "DEVICE",
        "PORT",
        "STATE",
        "HEADER",
        "AGENTS",
        "UNREAD",
        "OUTSTANDING",
        "SENT",
        "RECEIVED",
        "TIMED OUT",
        "DROPPED",
    ]);
    let mut agents = Table::new(&[
        "PID", "FD", "AGENT", "QP", "CLASS", "VERSION", "OUI", "METHODS", "RMPP",
    ]);
    let mut some = false;
    for holder in &seen.holders {
        let path = holder.path.strip_prefix("/dev/infiniband/");
        let mut row = vec![
            holder.pid.to_string(),
            shown(&holder.process),
            holder.uid.to_string(),
            holder.fd.to_string(),
            shown(path.unwrap_or(&holder.path)),
        ];
        match &holder.info {
            Some(Ok(info)) => {
                row.extend([
                    // The kernel has escaped it.
                    shown(&info.device).replace("\\\\x", "\\x"),
                    info.port.to_string(),
                    if info.alive { "alive" } else { "gone" }.to_owned(),
                    info.layout.header_len().to_string(),
                    info.agents.len().to_string(),
                    info.unread.count.to_string(),
                    info.outstanding.count.to_string(),
                    info.sent.to_string(),
                    info.received.to_string(),
                    info.timed_out.to_string(),
                    info.dropped.to_string(),
                ]);
                for agent in &info.agents {
                    some = true;
                    agents.row(agent_row(holder, &Agent::new(agent)));
                }
            }
            _ => row.extend(std::iter::repeat_n("-".to_owned(), 11)),
        }
        files.row(row);
    }
    if seen.holders.is_empty() {
        return "No process that can be seen has a file of ib_umad open.\n".to_owned();
    }
    if some {
        format!("{files}\n{agents}")
    } else {
        files.to_string()
    }
}

fn agent_row(holder: &Holder, agent: &Agent) -> Vec<String> {
    let mut row = vec![
        holder.pid.to_string(),
        holder.fd.to_string(),
        agent.id.to_string(),
        agent.qp.to_string(),
    ];
    match &agent.interest {
        None => {
            row.extend(["-", "-", "-", "none: only answers to its requests"].map(str::to_owned))
        }
        Some(interest) => {
            let name = |method: &u8| names::named(names::method(interest.class, *method), *method);
            let methods: Vec<String> = interest.methods.iter().map(name).collect();
            row.extend([
                names::named(names::class(interest.class), interest.class),
                interest.class_version.to_string(),
                format!("{:06x}", interest.oui),
                match methods.len() {
                    128 => "all".to_owned(),
                    _ => methods.join(" "),
                },
            ]);
        }
    }
    row.push(agent.rmpp.to_owned());
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_escaped() {
        let seen = Seen {
            holders: vec![Holder {
                pid: 7,
                process: "a\nb\x1b[31m".to_owned(),
                uid: 0,
                fd: 3,
                path: "/tmp/\x1b]0;x\x07umad0".to_owned(),
                kind: Kind::Umad,
                info: None,
            }],
            hidden: 0,
        };
        let text = text(&seen);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(
            text.chars().all(|c| c == '\n' || !c.is_control()),
            "{text:?}"
        );
    }
}
