// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A port: its addresses, its link, its tables, and its PortInfo (IBA 14.2.5.6).
//!
//! Locking: [`Port::state`] and [`Port::links`] may be taken in any context, and are never held together.

#![forbid(unsafe_code)]

use crate::{
    frame::Frame,
    node::Node,
    uapi::{
        self,
        PortParams, //
    },
    verbs::{
        device::PortEvent,
        lock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        queue::QueuePair, //
    }, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// Entries of the GID table.
pub(crate) const GIDS: usize = 8;
/// The default P_Key, full member.
const DEFAULT_PKEY: u16 = 0xffff;
/// fe80::/64.
const DEFAULT_GID_PREFIX: u64 = 0xfe80_0000_0000_0000;
/// CapabilityMask: traps, SL mapping, system image GUID, connection and device management,
/// client reregistration.
const DEFAULT_CAP_MASK: u32 = 1 << 2 | 1 << 6 | 1 << 11 | 1 << 19 | 1 << 25;

/// An MTU of 4,096 bytes.
const MTU_4096: u8 = 5;
/// Virtual lanes 0 to 7.
const VLS_0_TO_7: u8 = 4;
/// Bytes of a half of the VLArbitrationTable: an entry for each lane.
pub(crate) const VL_ARBITRATION_LEN: usize = 16;

/// PortState.
pub(crate) mod state {
    /// No link.
    pub(crate) const DOWN: u8 = 1;
    /// There is a link; a subnet manager has to configure the port.
    pub(crate) const INIT: u8 = 2;
    /// Configured, but not in use.
    pub(crate) const ARMED: u8 = 3;
    /// In use.
    pub(crate) const ACTIVE: u8 = 4;
}

/// PortPhysicalState.
mod phys_state {
    pub(super) const POLLING: u8 = 2;
    pub(super) const DISABLED: u8 = 3;
    pub(super) const LINK_UP: u8 = 5;
}

/// What can be set, and seen, of a port.
pub(crate) struct PortState {
    /// LID; 0 for none yet.
    pub(crate) lid: u32,
    /// So many low bits of the LID are path bits.
    pub(crate) lmc: u8,
    /// MasterSMLID.
    pub(crate) sm_lid: u32,
    /// MasterSMSL.
    pub(crate) sm_sl: u8,
    /// CapabilityMask.
    pub(crate) cap_mask: u32,
    /// Upper half of the GIDs.
    pub(crate) gid_prefix: u64,
    /// GUIDs; the port's own is the first.
    pub(crate) guids: [u64; GIDS],
    /// P_Keys; 0 for an entry that is not used.
    pub(crate) pkeys: [u16; uapi::PKEYS],
    /// PortState.
    pub(crate) state: u8,
    /// SubnetTimeOut.
    pub(crate) subnet_timeout: u8,
    /// InitTypeReply.
    pub(crate) init_type_reply: u8,
    /// P_KeyViolations.
    pub(crate) pkey_violations: u32,
    m_key: u64,
    m_key_lease: u16,
    m_key_protect: u8,
    m_key_violations: u16,
    /// Since when the lease of the M_Key runs, if it does.
    m_key_expires: Option<Instant<Monotonic>>,
    link_down_default: u8,
    neighbor_mtu: u8,
    operational_vls: u8,
    vl_high_limit: u8,
    /// SLtoVLMappingTable.
    pub(crate) sl_to_vl: [u8; 8],
    /// VLArbitrationTable: its low, and its high priority entries.
    pub(crate) vl_arbitration: [[u8; VL_ARBITRATION_LEN]; 2],
    /// There is somebody at the other end.
    linked: bool,
    /// Somebody holds it down.
    held_down: bool,
    /// It becomes active without a subnet manager.
    self_active: bool,
}

impl PortState {
    /// A port as it is asked for, without a link yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` if something is out of range.
    pub(crate) fn new(params: &PortParams, guid: u64) -> Result<Self> {
        let mut guids = [0; GIDS];
        if let Some(first) = guids.first_mut() {
            *first = guid;
        }
        let mut this = Self {
            lid: 0,
            lmc: 0,
            sm_lid: 0,
            sm_sl: 0,
            cap_mask: DEFAULT_CAP_MASK,
            gid_prefix: DEFAULT_GID_PREFIX,
            guids,
            pkeys: [0; uapi::PKEYS],
            state: state::DOWN,
            subnet_timeout: 18,
            init_type_reply: 0,
            pkey_violations: 0,
            m_key: 0,
            m_key_lease: 0,
            m_key_protect: 0,
            m_key_violations: 0,
            m_key_expires: None,
            link_down_default: phys_state::POLLING,
            neighbor_mtu: MTU_4096,
            operational_vls: 1,
            vl_high_limit: 0,
            sl_to_vl: [0; 8],
            vl_arbitration: [[0; VL_ARBITRATION_LEN]; 2],
            linked: false,
            held_down: false,
            self_active: true,
        };
        if let Some(first) = this.pkeys.first_mut() {
            *first = DEFAULT_PKEY;
        }
        // Nobody knows the port yet.
        let _ = this.change(params, 0)?;
        Ok(this)
    }

    /// Changes what user space wants changed; `state` counts with [`uapi::PORT_SET_STATE`].
    ///
    /// # Errors
    ///
    /// `EINVAL` if something is out of range; nothing is changed then.
    pub(crate) fn change(&mut self, params: &PortParams, state: u32) -> Result<Changes> {
        let lmc = u8::try_from(params.lmc).map_err(|_| EINVAL)?;
        if lmc > 7 || params.flags & !uapi::PORT_FLAGS != 0 {
            return Err(EINVAL);
        }
        let wanted = if params.flags & uapi::PORT_SET_STATE != 0 {
            let state = u8::try_from(state).map_err(|_| EINVAL)?;
            if !(state::INIT..=state::ACTIVE).contains(&state) {
                return Err(EINVAL);
            }
            Some(state)
        } else {
            None
        };
        let before = self.summary();
        self.lid = params.lid;
        self.lmc = lmc;
        self.sm_lid = params.sm_lid;
        if params.cap_mask != 0 {
            self.cap_mask = params.cap_mask;
        }
        if params.gid_prefix != 0 {
            self.gid_prefix = params.gid_prefix;
        }
        let pkeys_change = params.pkeys.iter().any(|pkey| *pkey != 0) && params.pkeys != self.pkeys;
        if pkeys_change {
            self.pkeys = params.pkeys;
        }
        self.held_down = params.flags & uapi::PORT_DOWN != 0;
        self.self_active = params.flags & uapi::PORT_WAIT_FOR_SM == 0;
        self.settle();
        if let Some(wanted) = wanted.filter(|_| self.state != state::DOWN) {
            self.state = wanted;
        }
        let mut changes = self.changes(&before, pkeys_change);
        if params.flags & uapi::PORT_REREGISTER != 0 {
            changes.push(PortEvent::ClientReregister);
        }
        Ok(changes)
    }

    /// As user space sees it.
    pub(crate) fn params(&self) -> PortParams {
        let mut flags = 0;
        if self.held_down {
            flags |= uapi::PORT_DOWN;
        }
        if !self.self_active {
            flags |= uapi::PORT_WAIT_FOR_SM;
        }
        PortParams {
            lid: self.lid,
            lmc: u32::from(self.lmc),
            sm_lid: self.sm_lid,
            cable: 0,
            cap_mask: self.cap_mask,
            flags,
            gid_prefix: self.gid_prefix,
            pkeys: self.pkeys,
        }
    }

    /// Somebody is at the other end now, or nobody.
    pub(crate) fn set_linked(&mut self, linked: bool) -> Changes {
        let before = self.summary();
        self.linked = linked;
        self.settle();
        self.changes(&before, false)
    }

    /// Brings the state in line with the link.
    fn settle(&mut self) {
        let up = self.linked && !self.held_down;
        if !up {
            self.state = state::DOWN;
        } else if self.state == state::DOWN {
            self.state = if self.self_active {
                state::ACTIVE
            } else {
                state::INIT
            };
        }
    }

    /// Whether a frame can pass: MADs do on any link, data when the subnet manager has made it active.
    pub(crate) fn passes(&self, frame: &Frame) -> bool {
        if frame.is_data() {
            self.state == state::ACTIVE
        } else {
            self.state != state::DOWN
        }
    }

    /// PortPhysicalState.
    pub(crate) fn phys_state(&self) -> u8 {
        if self.held_down {
            phys_state::DISABLED
        } else if self.linked {
            phys_state::LINK_UP
        } else {
            phys_state::POLLING
        }
    }

    /// Whether a LID is the port's.
    pub(crate) fn owns_lid(&self, lid: u32) -> bool {
        self.lid != 0 && lid >> self.lmc == self.lid >> self.lmc
    }

    /// The low bits of one of the port's LIDs, as a completion tells them.
    pub(crate) fn path_bits(&self, lid: u32) -> u8 {
        // OVERFLOW: The LMC is at most 7.
        u8::try_from(lid & ((1 << self.lmc) - 1)).unwrap_or(0)
    }

    /// An entry of the GID table, zero if it is not used.
    pub(crate) fn gid(&self, index: usize) -> Option<[u8; 16]> {
        let guid = *self.guids.get(index)?;
        if guid == 0 {
            return Some([0; 16]);
        }
        let mut gid = [0; 16];
        let (prefix, id) = gid.split_at_mut(8);
        prefix.copy_from_slice(&self.gid_prefix.to_be_bytes());
        id.copy_from_slice(&guid.to_be_bytes());
        Some(gid)
    }

    /// The index of a P_Key that a packet with `pkey` matches.
    pub(crate) fn match_pkey(&self, pkey: u16) -> Option<u16> {
        let mut pkeys = self.pkeys.iter();
        let index = pkeys.position(|own| same_partition(*own, pkey))?;
        u16::try_from(index).ok()
    }

    /// PortInfo, as a Get returns it; `local` is the number of the port
    /// that the request came in through.
    pub(crate) fn port_info(&self, local: u8) -> [u8; 64] {
        let mut info = [0; 64];
        let lid = self.lid16();
        let sm_lid = u16::try_from(self.sm_lid).unwrap_or(u16::MAX);
        put(&mut info, 0, &self.m_key.to_be_bytes());
        put(&mut info, 8, &self.gid_prefix.to_be_bytes());
        put(&mut info, 16, &lid.to_be_bytes());
        put(&mut info, 18, &sm_lid.to_be_bytes());
        put(&mut info, 20, &self.cap_mask.to_be_bytes());
        put(&mut info, 26, &self.m_key_lease.to_be_bytes());
        let pkey_violations = u16::try_from(self.pkey_violations).unwrap_or(u16::MAX);
        put(&mut info, 44, &self.m_key_violations.to_be_bytes());
        put(&mut info, 46, &pkey_violations.to_be_bytes());
        // CAST: A small constant.
        let arbitration = (VL_ARBITRATION_LEN / 2) as u8;
        // 4X and QDR; 4,096 bytes; eight virtual lanes.
        put(
            &mut info,
            28,
            &[
                local,
                2,
                2,
                2,
                4 << 4 | self.state,
                self.phys_state() << 4 | self.link_down_default,
                self.m_key_protect << 6 | self.lmc,
                4 << 4 | 4,
                self.neighbor_mtu << 4 | self.sm_sl,
                VLS_0_TO_7 << 4,
                self.vl_high_limit,
                arbitration,
                arbitration,
                self.init_type_reply << 4 | MTU_4096,
                0,
                self.operational_vls << 4,
            ],
        );
        // GUIDCap counts entries, which come in blocks of eight.
        let guid_cap = u8::try_from(GIDS).unwrap_or(0);
        put(&mut info, 50, &[guid_cap, self.subnet_timeout, 16]);
        info
    }

    fn lid16(&self) -> u16 {
        // A Get in InfiniBand's form on OPA sees the low half only, as the real ones do.
        u16::try_from(self.lid & 0xffff).unwrap_or(0)
    }

    /// Applies a Set of PortInfo. `None` if a field has a value that it cannot have.
    pub(crate) fn set_port_info(&mut self, info: &[u8; 64]) -> Option<Changes> {
        let before = self.summary();
        let (lid, sm_lid) = (be16(info, 16), be16(info, 18));
        let wanted = info.get(32)? & 0xf;
        let wanted_phys = info.get(33)? >> 4;
        if wanted > state::ACTIVE || lid >= 0xc000 || sm_lid >= 0xc000 {
            return None;
        }
        // From Init to Armed to Active, one step at a time or none; Down starts the link again.
        match wanted {
            state::ARMED if self.state < state::INIT => return None,
            state::ACTIVE if self.state < state::ARMED => return None,
            _ => {}
        }
        self.m_key = u64::from_be_bytes(*info.first_chunk()?);
        self.gid_prefix = u64::from_be_bytes(*info.get(8..)?.first_chunk()?);
        self.lid = u32::from(lid);
        self.sm_lid = u32::from(sm_lid);
        self.m_key_lease = be16(info, 26);
        self.m_key_protect = info.get(34)? >> 6;
        self.lmc = info.get(34)? & 7;
        self.sm_sl = info.get(36)? & 0xf;
        self.subnet_timeout = info.get(51)? & 0x1f;
        self.init_type_reply = info.get(41)? >> 4;
        self.vl_high_limit = *info.get(38)?;
        // Where 0 means no change, or is reserved.
        if (1..=MTU_4096).contains(&(info.get(36)? >> 4)) {
            self.neighbor_mtu = info.get(36)? >> 4;
        }
        if (1..=VLS_0_TO_7).contains(&(info.get(43)? >> 4)) {
            self.operational_vls = info.get(43)? >> 4;
        }
        // A count that a manager resets.
        if be16(info, 44) == 0 {
            self.m_key_violations = 0;
        }
        self.m_key_expires = None;
        if info.get(33)? & 0xf != 0 {
            self.link_down_default = info.get(33)? & 0xf;
        }
        match wanted_phys {
            phys_state::DISABLED => self.held_down = true,
            phys_state::POLLING => self.held_down = false,
            _ => {}
        }
        match wanted {
            state::DOWN => self.state = state::DOWN,
            state::ARMED | state::ACTIVE => self.state = wanted,
            _ => {}
        }
        self.settle();
        let mut changes = self.changes(&before, false);
        if info.get(51)? & 0x80 != 0 {
            changes.push(PortEvent::ClientReregister);
        }
        Some(changes)
    }

    /// Whether a manager with an M_Key may ask (or set) something (IBA 14.2.4). One that may not makes the
    /// lease run, at whose end the key protects nothing any more.
    pub(crate) fn admits(&mut self, m_key: u64, set: bool) -> bool {
        let lease_ms = i64::from(self.m_key_lease) * 1000;
        let over = self.m_key_expires.as_ref();
        if lease_ms != 0 && over.is_some_and(|since| since.elapsed().as_millis() >= lease_ms) {
            self.m_key_protect = 0;
            self.m_key_expires = None;
        }
        if self.m_key == 0 || m_key == self.m_key {
            self.m_key_expires = None;
            return true;
        }
        if !set && self.m_key_protect < 2 {
            return true;
        }
        self.m_key_violations = self.m_key_violations.saturating_add(1);
        if self.m_key_expires.is_none() {
            self.m_key_expires = Some(Instant::now());
        }
        false
    }

    /// Whether a manager with an M_Key may see the port's.
    pub(crate) fn shows_m_key(&self, m_key: u64) -> bool {
        self.m_key_protect == 0 || m_key == self.m_key
    }

    fn summary(&self) -> Summary {
        Summary {
            lid: (self.lid, self.lmc),
            sm: (self.sm_lid, self.sm_sl),
            gid_prefix: self.gid_prefix,
            active: self.state == state::ACTIVE,
        }
    }

    fn changes(&self, before: &Summary, pkeys: bool) -> Changes {
        let now = self.summary();
        let mut changes = Changes::none();
        if now.lid != before.lid {
            changes.push(PortEvent::LidChange);
        }
        if now.sm != before.sm {
            changes.push(PortEvent::SmChange);
        }
        if now.gid_prefix != before.gid_prefix {
            changes.push(PortEvent::GidChange);
        }
        if pkeys {
            changes.push(PortEvent::PkeyChange);
        }
        match (before.active, now.active) {
            (false, true) => changes.push(PortEvent::Active),
            (true, false) => changes.push(PortEvent::Down),
            _ => {}
        }
        changes
    }
}

/// Whether two P_Keys match (IBA 10.9.3): the same partition, and not both of them limited members.
pub(crate) fn same_partition(own: u16, other: u16) -> bool {
    const FULL: u16 = 0x8000;
    own & !FULL != 0 && own & !FULL == other & !FULL && (own | other) & FULL != 0
}

/// What clients are told of when it changes.
struct Summary {
    lid: (u32, u8),
    sm: (u32, u8),
    gid_prefix: u64,
    active: bool,
}

/// What has changed: events to be dispatched when no lock is held.
#[must_use]
pub(crate) struct Changes([Option<PortEvent>; 7]);

impl Changes {
    /// Nothing.
    pub(crate) fn none() -> Self {
        Self([None; 7])
    }

    /// Also this.
    pub(crate) fn push(&mut self, event: PortEvent) {
        if let Some(free) = self.0.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(event);
        }
    }

    /// All of it.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PortEvent> + '_ {
        self.0.iter().copied().flatten()
    }
}

fn put(to: &mut [u8], at: usize, bytes: &[u8]) {
    for (to, from) in to.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |pair| u16::from_be_bytes(*pair))
}

/// One end of a cable.
#[derive(Clone)]
pub(crate) struct End {
    /// The device.
    pub(crate) node: Arc<Node>,
    /// The port.
    pub(crate) port: u32,
}

/// What a port is connected to.
pub(crate) struct Links {
    /// Its queue pairs.
    pub(crate) qps: [Option<Arc<QueuePair>>; 2],
    /// The other end of its cable.
    pub(crate) peer: Option<End>,
}

/// A port.
#[pin_data]
pub(crate) struct Port {
    /// What it is like.
    #[pin]
    pub(crate) state: IrqSpinLock<PortState>,
    /// What it is connected to.
    #[pin]
    pub(crate) links: IrqSpinLock<Links>,
}

impl Port {
    /// A port that is connected to nothing.
    pub(crate) fn new(state: PortState) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                state <- new_irq_spinlock!(state, "Port::state"),
                links <- new_irq_spinlock!(Links {
                    qps: [None, None],
                    peer: None,
                }, "Port::links"),
            }),
            GFP_KERNEL,
        )
    }
}
