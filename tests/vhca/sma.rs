// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A small subnet management agent (IBA 14), and as much of a performance management agent (IBA 16.1) as
//! `ib_core` asks for.
//!
//! Answered: NodeDescription, NodeInfo, PortInfo, GUIDInfo, P_KeyTable, SLtoVLMappingTable,
//! VLArbitrationTable, and for a switch SwitchInfo and both
//! forwarding tables, in InfiniBand's form; NodeDescription and NodeInfo in OPA's, too. SMInfo goes to
//! the subnet manager, if there is one; any other attribute is said to be unsupported. M_Keys are checked on
//! InfiniBand ports.

#![forbid(unsafe_code)]

use crate::{
    node::{
        Node,
        Shape, //
    },
    uapi,
    verbs::device::{
        MadVerdict,
        OfferedMad,
        PortEvent,
        MAD_LEN,
        OPA_BASE_VERSION, //
    }, //
};
const CLASS_LID_ROUTED: u8 = 0x01;
const CLASS_DIRECTED_ROUTE: u8 = 0x81;
const CLASS_PERF_MGMT: u8 = 0x04;
const METHOD_GET: u8 = 0x01;
const METHOD_SET: u8 = 0x02;
const METHOD_GET_RESP: u8 = 0x81;
/// Status: the attribute, or the method with it, is not supported.
const STATUS_UNSUPPORTED: u16 = 0x000c;
/// Status: a field has a value that it cannot have.
const STATUS_INVALID: u16 = 0x001c;
/// The direction bit of a directed-route SMP, part of its status.
const DIRECTION: u16 = 0x8000;

/// Attributes.
mod attr {
    pub(super) const CLASS_PORT_INFO: u16 = 0x0001;
    pub(super) const NODE_DESCRIPTION: u16 = 0x0010;
    pub(super) const NODE_INFO: u16 = 0x0011;
    pub(super) const SWITCH_INFO: u16 = 0x0012;
    /// Of performance management.
    pub(super) const PORT_COUNTERS: u16 = 0x0012;
    pub(super) const GUID_INFO: u16 = 0x0014;
    pub(super) const PORT_INFO: u16 = 0x0015;
    pub(super) const PKEY_TABLE: u16 = 0x0016;
    pub(super) const SL_TO_VL: u16 = 0x0017;
    pub(super) const VL_ARBITRATION: u16 = 0x0018;
    pub(super) const LINEAR_FORWARDING: u16 = 0x0019;
    pub(super) const MULTICAST_FORWARDING: u16 = 0x001b;
    pub(super) const SM_INFO: u16 = 0x0020;
}

/// The vendor that `ib_core` and tools show: an OUI for documentation (RFC 9542).
const VENDOR: [u8; 3] = [0x00, 0x00, 0x5e];

/// Where the data of an SMP begins.
const SMP_DATA: usize = 64;
/// Where the data of a performance management MAD begins.
const PERF_DATA: usize = 64;
/// Where the data of an OPA SMP begins: LID routed, and directed route.
const OPA_DATA: (usize, usize) = (32, 176);

/// Whether a class is that of subnet management MADs.
fn is_smp_class(class: u8) -> bool {
    class == CLASS_LID_ROUTED || class == CLASS_DIRECTED_ROUTE
}

/// Whether a MAD is a directed-route SMP.
pub(crate) fn is_directed(mad: &[u8]) -> bool {
    mad.get(1) == Some(&CLASS_DIRECTED_ROUTE)
}

/// Whether a MAD asks a subnet management agent for something.
pub(crate) fn is_request(mad: &[u8]) -> bool {
    Request::parse(mad).is_some_and(|request| {
        is_smp_class(request.class)
            && request.attribute != attr::SM_INFO
            && (request.method == METHOD_GET || request.method == METHOD_SET)
    })
}

/// The header of a request.
struct Request {
    base_version: u8,
    class: u8,
    method: u8,
    attribute: u16,
    modifier: u32,
    /// Of subnet management MADs.
    m_key: u64,
}

impl Request {
    fn parse(mad: &[u8]) -> Option<Self> {
        let [base_version, class, _, method, ..] = *mad.first_chunk::<4>()?;
        Some(Self {
            base_version,
            class,
            method,
            attribute: u16::from_be_bytes(*mad.get(16..)?.first_chunk()?),
            modifier: u32::from_be_bytes(*mad.get(20..)?.first_chunk()?),
            m_key: u64::from_be_bytes(*mad.get(24..)?.first_chunk()?),
        })
    }

    fn is_set(&self) -> bool {
        self.method == METHOD_SET
    }
}

/// Answers a MAD, if it is one for an agent of the device.
pub(crate) fn answer(node: &Node, offered: &OfferedMad<'_>, reply: &mut [u8]) -> MadVerdict {
    let Some(request) = Request::parse(offered.mad) else {
        return MadVerdict::Failed;
    };
    let known = is_smp_class(request.class) || request.class == CLASS_PERF_MGMT;
    let for_agent = request.method == METHOD_GET || request.method == METHOD_SET;
    if !known || !for_agent || is_smp_class(request.class) && request.attribute == attr::SM_INFO {
        return MadVerdict::Pass;
    }
    let opa = request.base_version == OPA_BASE_VERSION;
    if is_smp_class(request.class) && !opa {
        // A manager with the wrong key gets no answer.
        let agent = node.port(node.managing_port(offered.port));
        if agent.is_ok_and(|port| !port.state.lock().admits(request.m_key, request.is_set())) {
            return MadVerdict::Consumed;
        }
    }
    let len = offered.mad.len().min(reply.len());
    if len < MAD_LEN {
        return MadVerdict::Failed;
    }
    for (to, from) in reply.iter_mut().zip(offered.mad) {
        *to = *from;
    }
    let data_at = match (opa, request.class) {
        (false, CLASS_PERF_MGMT) => PERF_DATA,
        (false, _) => SMP_DATA,
        (true, CLASS_DIRECTED_ROUTE) => OPA_DATA.1,
        (true, _) => OPA_DATA.0,
    };
    let Some(data) = reply
        .get_mut(data_at..)
        .and_then(|data| data.first_chunk_mut::<64>())
    else {
        return MadVerdict::Failed;
    };
    let status = match request.class {
        CLASS_PERF_MGMT if opa => Err(STATUS_UNSUPPORTED),
        CLASS_PERF_MGMT => performance(node, &request, data),
        _ if opa => opa_attribute(node, offered.port, &request, data),
        _ => attribute(node, offered.port, &request, data),
    };
    let mut status = status.err().unwrap_or(0);
    if request.class == CLASS_DIRECTED_ROUTE {
        status |= DIRECTION;
    }
    if let Some(method) = reply.get_mut(3) {
        *method = METHOD_GET_RESP;
    }
    put(reply, 4, &status.to_be_bytes());
    // What an OPA SMP has behind its data is not sent: a header, and the longest attribute here.
    MadVerdict::Reply(if opa { data_at + 64 } else { MAD_LEN })
}

/// A status that is not success.
type Status = core::result::Result<(), u16>;

/// An attribute of subnet management; the data of the request is replaced by that of the answer.
fn attribute(node: &Node, port: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    match request.attribute {
        attr::NODE_DESCRIPTION if !request.is_set() => {
            *data = *node.description();
            Ok(())
        }
        attr::NODE_INFO if !request.is_set() => {
            *data = [0; 64];
            node_info(node, port, (1, 1), data, false);
            Ok(())
        }
        attr::SWITCH_INFO if node.shape() == Shape::Switch => {
            let mut switch = node.switch().lock();
            if request.is_set() {
                switch.set_info(data);
            }
            *data = switch.info();
            Ok(())
        }
        attr::LINEAR_FORWARDING if node.shape() == Shape::Switch => {
            let index = usize::try_from(request.modifier).map_err(|_| STATUS_INVALID)?;
            let mut switch = node.switch().lock();
            if request.is_set() {
                switch.set_block(index, data).ok_or(STATUS_INVALID)?;
            }
            *data = switch.block(index).ok_or(STATUS_INVALID)?;
            Ok(())
        }
        attr::MULTICAST_FORWARDING if node.shape() == Shape::Switch => {
            let mut switch = node.switch().lock();
            if request.is_set() {
                let set = switch.set_group_block(request.modifier, data);
                set.ok_or(STATUS_INVALID)?;
            }
            *data = switch.group_block(request.modifier).ok_or(STATUS_INVALID)?;
            Ok(())
        }
        attr::PORT_INFO => port_info(node, port, request, data),
        attr::GUID_INFO => guid_info(node, port, request, data),
        attr::PKEY_TABLE => pkey_table(node, port, request, data),
        attr::SL_TO_VL => sl_to_vl(node, port, request, data),
        attr::VL_ARBITRATION => vl_arbitration(node, port, request, data),
        _ => Err(STATUS_UNSUPPORTED),
    }
}

/// NodeInfo. OPA has four reserved bytes before the GUIDs.
fn node_info(node: &Node, port: u32, versions: (u8, u8), data: &mut [u8; 64], opa: bool) {
    let switch = node.shape() == Shape::Switch;
    let guids_at = if opa { 8 } else { 4 };
    let port_guid = node
        .port(node.managing_port(port))
        .ok()
        .and_then(|port| port.state.lock().guids.first().copied())
        .unwrap_or(0);
    let [_, _, _, ports] = node.port_count().to_be_bytes();
    let [_, _, _, local] = port.to_be_bytes();
    put(
        data,
        0,
        &[versions.0, versions.1, 1 + u8::from(switch), ports],
    );
    put(data, guids_at, &node.guid().to_be_bytes());
    put(data, guids_at + 8, &node.guid().to_be_bytes());
    put(data, guids_at + 16, &port_guid.to_be_bytes());
    let pkeys = u16::try_from(uapi::PKEYS).unwrap_or(0);
    put(data, guids_at + 24, &pkeys.to_be_bytes());
    let [a, b, c] = VENDOR;
    // Device id 1, revision 0.
    put(data, guids_at + 26, &[0, 1, 0, 0, 0, 0, local, a, b, c]);
}

/// PortInfo of a port; on a channel adapter 0 is the port that the request came in through.
fn port_info(node: &Node, local: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    let number = match request.modifier & 0xff {
        0 if node.shape() != Shape::Switch => local,
        number => number,
    };
    let port = node.port(number).map_err(|_| STATUS_INVALID)?;
    let [_, _, _, local] = local.to_be_bytes();
    let mut state = port.state.lock();
    let changes = if request.is_set() {
        Some(state.set_port_info(data).ok_or(STATUS_INVALID)?)
    } else {
        None
    };
    *data = state.port_info(local);
    if !state.shows_m_key(request.m_key) {
        put(data, 0, &[0; 8]);
    }
    drop(state);
    if let Some(changes) = changes {
        node.announce(number, &changes);
    }
    Ok(())
}

/// A block of eight GUIDs; there is one. The first is the hardware's own.
fn guid_info(node: &Node, local: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    let local = node.managing_port(local);
    let port = node.port(local).map_err(|_| STATUS_INVALID)?;
    if request.modifier != 0 {
        return Err(STATUS_INVALID);
    }
    let mut state = port.state.lock();
    let mut changed = false;
    if request.is_set() {
        for (own, wanted) in state.guids.iter_mut().zip(data.chunks_exact(8)).skip(1) {
            let wanted = wanted.first_chunk().map_or(0, |b| u64::from_be_bytes(*b));
            changed |= *own != wanted;
            *own = wanted;
        }
    }
    for (to, guid) in data.chunks_exact_mut(8).zip(state.guids) {
        to.copy_from_slice(&guid.to_be_bytes());
    }
    drop(state);
    if changed {
        node.tell(local, PortEvent::GidChange);
    }
    Ok(())
}

/// A block of 32 P_Keys; there is one, and its second half is empty.
fn pkey_table(node: &Node, local: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    // The modifier's upper half is a port of a switch, whose table would be for enforcement.
    if request.modifier & 0xffff != 0 {
        return Err(STATUS_INVALID);
    }
    let number = match request.modifier >> 16 {
        number if node.shape() == Shape::Switch => number,
        _ => local,
    };
    let port = node.port(number).map_err(|_| STATUS_INVALID)?;
    let mut state = port.state.lock();
    let mut changed = false;
    if request.is_set() {
        for (own, wanted) in state.pkeys.iter_mut().zip(data.chunks_exact(2)) {
            let wanted = wanted.first_chunk().map_or(0, |b| u16::from_be_bytes(*b));
            changed |= *own != wanted;
            *own = wanted;
        }
    }
    data.fill(0);
    for (to, pkey) in data.chunks_exact_mut(2).zip(state.pkeys) {
        to.copy_from_slice(&pkey.to_be_bytes());
    }
    drop(state);
    if changed {
        node.tell(number, PortEvent::PkeyChange);
    }
    Ok(())
}

/// SLtoVLMappingTable. A switch has one for each pair of ports; here the port that a frame comes in
/// through makes no difference.
fn sl_to_vl(node: &Node, local: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    let number = match request.modifier & 0xff {
        number if node.shape() == Shape::Switch => number,
        _ => local,
    };
    let port = node.port(number).map_err(|_| STATUS_INVALID)?;
    let mut state = port.state.lock();
    if request.is_set() {
        if let Some(table) = data.first_chunk() {
            state.sl_to_vl = *table;
        }
    }
    data.fill(0);
    put(data, 0, &state.sl_to_vl);
    Ok(())
}

/// A block of the VLArbitrationTable: the first one of each priority; there are no others.
fn vl_arbitration(node: &Node, local: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    let number = match request.modifier & 0xff {
        number if node.shape() == Shape::Switch => number,
        _ => local,
    };
    let half = match request.modifier >> 16 {
        1 => 0,
        3 => 1,
        _ => return Err(STATUS_INVALID),
    };
    let port = node.port(number).map_err(|_| STATUS_INVALID)?;
    let mut state = port.state.lock();
    let table = state.vl_arbitration.get_mut(half).ok_or(STATUS_INVALID)?;
    if request.is_set() {
        if let Some(entries) = data.first_chunk() {
            *table = *entries;
        }
    }
    data.fill(0);
    put(data, 0, table.as_slice());
    Ok(())
}

/// An attribute of subnet management in OPA's form.
fn opa_attribute(node: &Node, port: u32, request: &Request, data: &mut [u8; 64]) -> Status {
    match request.attribute {
        attr::NODE_DESCRIPTION if !request.is_set() => {
            *data = *node.description();
            Ok(())
        }
        attr::NODE_INFO if !request.is_set() => {
            *data = [0; 64];
            node_info(node, port, (OPA_BASE_VERSION, OPA_BASE_VERSION), data, true);
            Ok(())
        }
        _ => Err(STATUS_UNSUPPORTED),
    }
}

/// An attribute of performance management: `ib_core` shows the counters in sysfs.
fn performance(node: &Node, request: &Request, data: &mut [u8; 64]) -> Status {
    match request.attribute {
        attr::CLASS_PORT_INFO if !request.is_set() => {
            *data = [0; 64];
            put(data, 0, &[1, 1]);
            Ok(())
        }
        attr::PORT_COUNTERS => {
            let select = data.get(1).copied().unwrap_or(0);
            *data = [0; 64];
            put(data, 1, &[select]);
            // Packets and words of 32 bits; counters stop at their end. The device's are its ports'.
            let counters = node.counters();
            for (at, packets) in [
                (24, counters.frames_out.get()),
                (28, counters.frames_in.get()),
            ] {
                let words = packets.saturating_mul(MAD_WORDS);
                put(data, at, &clamp(words).to_be_bytes());
                put(data, at + 8, &clamp(packets).to_be_bytes());
            }
            Ok(())
        }
        _ => Err(STATUS_UNSUPPORTED),
    }
}

/// Words of 32 bits in a MAD.
const MAD_WORDS: u64 = 64;

fn clamp(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn put(to: &mut [u8], at: usize, bytes: &[u8]) {
    for (to, from) in to.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}
