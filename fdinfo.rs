// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `/proc/PID/fdinfo/FD` of a umad file: what it is and does.
//!
//! It also tells which port a descriptor is of that came from another process, and whether that port is
//! still there. A lookup by device number cannot tell that for sure: the number may be another port's by
//! now. `Documentation/userspace-mad.rst` lists the lines; new ones may come, so programs look for keys.

#![forbid(unsafe_code)]

use crate::{
    file::{
        FileStatus,
        UmadFile, //
    },
    rdma::agent::{
        ManagementQp,
        Registration, //
    },
    seat::AgentId,
    uapi::MAX_AGENTS, //
};
use kernel::{
    seq_file::SeqFile,
    seq_print,
    str::BStr, //
};

/// Prints it.
pub(crate) fn show(file: &UmadFile, to: &SeqFile) {
    // While the device is there its name is asked for, since it may change.
    let device = file.port().device();
    let name = device.as_ref().map(|device| device.name());
    let name = name.as_ref().unwrap_or(file.device_name());
    let status = file.status();

    seq_print!(to, "umad-device:\t{}\n", BStr::from_bytes(name.as_bytes()));
    seq_print!(to, "umad-port:\t{}\n", file.port().number());
    let state = if status.alive { "alive" } else { "gone" };
    seq_print!(to, "umad-state:\t{state}\n");
    seq_print!(to, "umad-header:\t{}\n", status.layout.header_len());
    show_work(&status, to);
    // One at a time: all of them would be much for the stack.
    for id in (0..MAX_AGENTS).filter_map(AgentId::from_index) {
        if let Some(agent) = file.registration(id) {
            show_agent(id, &agent, to);
        }
    }
}

fn show_work(status: &FileStatus, to: &SeqFile) {
    let FileStatus {
        queued,
        queued_cost,
        under_way,
        counters,
        ..
    } = status;
    seq_print!(to, "umad-unread:\t{queued} packets, {queued_cost} bytes\n");
    seq_print!(
        to,
        "umad-outstanding:\t{} sends, {} bytes\n",
        under_way.sends,
        under_way.cost
    );
    seq_print!(to, "umad-sent:\t{}\n", counters.sent);
    seq_print!(to, "umad-received:\t{}\n", counters.received);
    seq_print!(to, "umad-timed-out:\t{}\n", counters.timed_out);
    seq_print!(to, "umad-dropped:\t{}\n", counters.dropped);
}

fn show_agent(id: AgentId, agent: &Registration, to: &SeqFile) {
    let qp = match agent.qp {
        ManagementQp::Smi => 0,
        ManagementQp::Gsi => 1,
    };
    let rmpp = match (agent.rmpp_version, agent.user_rmpp) {
        (0, _) => "none",
        (_, true) => "user",
        (_, false) => "kernel",
    };
    let id = id.index();
    seq_print!(to, "umad-agent:\tid {id} qp {qp} rmpp {rmpp}");
    if let Some(interest) = &agent.interest {
        let [a, b, c] = interest.oui;
        let [low, high] = interest.methods;
        seq_print!(
            to,
            " class {:#04x} version {} oui {a:02x}{b:02x}{c:02x} methods {high:016x}{low:016x}",
            interest.mgmt_class,
            interest.class_version
        );
    }
    seq_print!(to, "\n");
}
