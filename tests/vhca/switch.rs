// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The tables of a switch (IBA 14.2.5.4, 14.2.5.10).

#![forbid(unsafe_code)]

use kernel::prelude::*;

/// LIDs that the linear forwarding table has room for.
const TABLE_LEN: usize = 1024;
/// Entries of a block of the table, as a MAD carries it.
pub(crate) const BLOCK_LEN: usize = 64;
/// What stands in the table for a LID that is nowhere.
const NOWHERE: u8 = 0xff;

/// What a switch knows.
pub(crate) struct Switch {
    ports: u8,
    table: KVec<u8>,
    top: u16,
    life_time: u8,
    state_changed: bool,
}

impl Switch {
    /// A switch that forwards nothing yet.
    pub(crate) fn new(ports: u8) -> Result<Self> {
        let mut table = KVec::with_capacity(TABLE_LEN, GFP_KERNEL)?;
        table.resize(TABLE_LEN, NOWHERE, GFP_KERNEL)?;
        Ok(Self {
            ports,
            table,
            top: 0,
            life_time: 0,
            state_changed: false,
        })
    }

    /// The port that leads to a LID; not port 0, whose LIDs the switch knows by itself.
    pub(crate) fn out_port(&self, lid: u32) -> Option<u8> {
        let port = *self.table.get(usize::try_from(lid).ok()?)?;
        (1..=self.ports).contains(&port).then_some(port)
    }

    /// A port has come up or gone down.
    pub(crate) fn note_state_change(&mut self) {
        self.state_changed = true;
    }

    /// SwitchInfo, as a Get returns it.
    pub(crate) fn info(&self) -> [u8; 64] {
        let mut info = [0; 64];
        let fields = [
            (0, u16::try_from(TABLE_LEN).unwrap_or(0)),
            (6, self.top),
            // LidsPerPort and PartitionEnforcementCap.
            (12, 1),
            (14, 16),
        ];
        for (at, value) in fields {
            for (to, from) in info.iter_mut().skip(at).zip(value.to_be_bytes()) {
                *to = from;
            }
        }
        if let Some(byte) = info.get_mut(11) {
            *byte = self.life_time << 3 | u8::from(self.state_changed) << 2;
        }
        // Enhanced port 0 is the one that has a port's full PortInfo.
        if let Some(byte) = info.get_mut(16) {
            *byte = 1 << 3;
        }
        info
    }

    /// Applies a Set of SwitchInfo.
    pub(crate) fn set_info(&mut self, info: &[u8; 64]) {
        let [_, _, _, _, _, _, high, low, _, _, _, life, ..] = *info;
        self.top = u16::from_be_bytes([high, low]);
        self.life_time = life >> 3;
        if life & 1 << 2 != 0 {
            self.state_changed = false;
        }
    }

    /// A block of the linear forwarding table.
    pub(crate) fn block(&self, index: usize) -> Option<&[u8]> {
        let first = index.checked_mul(BLOCK_LEN)?;
        self.table.get(first..first.checked_add(BLOCK_LEN)?)
    }

    /// The same, to be changed.
    pub(crate) fn block_mut(&mut self, index: usize) -> Option<&mut [u8]> {
        let first = index.checked_mul(BLOCK_LEN)?;
        self.table.get_mut(first..first.checked_add(BLOCK_LEN)?)
    }
}
