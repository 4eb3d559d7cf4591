// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl list`: the ports that `ib_umad` serves.

use std::path::Path;

use serde::Serialize;
use umad::netlink::Rdma;
use umad::sysfs::{self, UmadPort};
use umad::{Layout, Port, Registration};

use crate::failure::Outcome;
use crate::loaded::{Kind, Loaded};
use crate::output::{note, print, print_json, shown, Format, Table};
use crate::ports;

/// A port, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// `umadN`.
    node: String,
    /// The node is in `/dev/infiniband`.
    node_present: bool,
    /// Name of the RDMA device.
    device: String,
    /// Its port.
    port: u32,
    /// `InfiniBand` or `Ethernet`.
    link_layer: Option<String>,
    /// `ACTIVE` and its like.
    state: Option<String>,
    /// `LinkUp` and its like.
    phys_state: Option<String>,
    /// The LID; null where there is none.
    lid: Option<u16>,
    /// The LID of the subnet manager.
    sm_lid: Option<u32>,
    /// The GID at index 0; null if it is zero.
    gid: Option<String>,
    /// The port has queue pair 0: subnet management.
    smi: bool,
    /// The port has queue pair 1; null if the node could not be opened to ask.
    gsi: Option<bool>,
    /// `issmN`, if there is one.
    issm: Option<String>,
    /// Device number in sysfs, `major:minor`.
    device_number: Option<String>,
    /// What netlink says.
    netlink: Netlink,
}

/// Device numbers by netlink's GET_CHARDEV; null where it tells none.
#[derive(Debug, Serialize)]
struct Netlink {
    umad: Option<String>,
    issm: Option<String>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct List {
    module: Kind,
    abi_version: Option<u32>,
    ports: Vec<Entry>,
}

fn entry(port: &UmadPort, rdma: &mut Option<Rdma>) -> Entry {
    let class = Path::new(sysfs::CLASS);
    let node = ports::node(port);
    let issm = ports::issm(port);
    let attribute = |name: &str| ports::attribute(port, name);
    let gid = sysfs::gid(&port.ibdev, port.port, 0).ok();
    let mut netlink = |kind: &str| {
        let rdma = rdma.as_mut()?;
        let index = rdma.index(&port.ibdev).ok()?;
        let found = rdma.chardev(kind, Some(index), Some(port.port)).ok()?;
        Some(format!("{}:{}", found.major, found.minor))
    };
    Entry {
        node_present: umad::port::node(port.number).exists(),
        device: port.ibdev.clone(),
        port: port.port,
        link_layer: attribute("link_layer"),
        state: attribute("state").map(|text| ports::word(&text).to_owned()),
        phys_state: attribute("phys_state").map(|text| ports::word(&text).to_owned()),
        lid: ports::lid(port),
        sm_lid: attribute("sm_lid").and_then(|text| ports::number(&text)),
        gid: gid.filter(|gid| !gid.is_zero()).map(|gid| gid.to_string()),
        smi: issm.is_some(),
        gsi: has_gsi(port),
        issm,
        device_number: ports::text(&class.join(&node).join("dev")),
        netlink: Netlink {
            umad: netlink("umad"),
            issm: netlink("issm"),
        },
        node,
    }
}

/// An agent can be registered on queue pair 1 where there is one.
fn has_gsi(port: &UmadPort) -> Option<bool> {
    let file = Port::options().nonblock(true).layout(Layout::Old);
    let file = file.open(port.number).ok()?;
    match file.register(&Registration::send_only()) {
        Ok(_) => Some(true),
        Err(e) if e.errno() == Some(nix::errno::Errno::EPROTONOSUPPORT) => Some(false),
        Err(_) => None,
    }
}

/// Lists them.
pub fn run(format: Format) -> Outcome {
    let found = ports::all()?;
    let mut rdma = Rdma::open().ok();
    let list = List {
        module: Loaded::look().kind,
        abi_version: sysfs::abi_version().ok(),
        ports: found.iter().map(|port| entry(port, &mut rdma)).collect(),
    };
    if format == Format::Json {
        return print_json(&list);
    }
    if list.ports.is_empty() {
        note("ib_umad is loaded, but there is no port that has MADs. umadctl doctor says more.");
        return Ok(());
    }
    let mut table = Table::new(&[
        "NODE", "DEVICE", "PORT", "LINK", "STATE", "LID", "SM LID", "GID", "QPS", "ISSM", "NUMBER",
        "NETLINK",
    ]);
    let dash = || "-".to_owned();
    let text = |value: &Option<String>| value.as_deref().map_or_else(dash, shown);
    for port in &list.ports {
        let qps = match (port.smi, port.gsi) {
            (true, Some(true)) => "SMI GSI",
            (true, Some(false)) => "SMI",
            (true, None) => "SMI ?",
            (false, Some(true)) => "GSI",
            (false, Some(false)) => "-",
            (false, None) => "?",
        };
        table.row(vec![
            if port.node_present {
                port.node.clone()
            } else {
                format!("{} (missing)", port.node)
            },
            shown(&port.device),
            port.port.to_string(),
            text(&port.link_layer),
            text(&port.state),
            port.lid.map_or_else(dash, |lid| lid.to_string()),
            match port.sm_lid {
                None | Some(0) => dash(),
                Some(lid) => lid.to_string(),
            },
            text(&port.gid),
            qps.to_owned(),
            text(&port.issm),
            text(&port.device_number),
            text(&port.netlink.umad),
        ]);
    }
    print(table)
}
