// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The tables of a switch (IBA 14.2.5.4, 14.2.5.10, 14.2.5.12).

#![forbid(unsafe_code)]

use crate::frame::FIRST_MULTICAST_LID;
use kernel::prelude::*;

/// LIDs that the linear forwarding table has room for.
const TABLE_LEN: usize = 1024;
/// Entries of a block of the linear table, as a MAD carries it.
const BLOCK_LEN: usize = 64;
/// LIDs that the multicast forwarding table has room for.
const GROUPS: usize = 1024;
/// Entries of a block of the multicast table: masks of 16 ports.
const GROUP_BLOCK_LEN: usize = 32;
/// What stands in the table for a LID that is nowhere.
const NOWHERE: u8 = 0xff;

/// What a switch knows.
pub(crate) struct Switch {
    ports: u8,
    table: KVec<u8>,
    /// For each multicast LID a mask of ports; all ports are in the first 16.
    groups: KVec<u16>,
    top: u16,
    life_time: u8,
    state_changed: bool,
}

impl Switch {
    /// A switch that forwards nothing yet.
    pub(crate) fn new(ports: u8) -> Result<Self> {
        let mut table = KVec::with_capacity(TABLE_LEN, GFP_KERNEL)?;
        table.resize(TABLE_LEN, NOWHERE, GFP_KERNEL)?;
        let mut groups = KVec::with_capacity(GROUPS, GFP_KERNEL)?;
        groups.resize(GROUPS, 0, GFP_KERNEL)?;
        Ok(Self {
            ports,
            table,
            groups,
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

    /// The ports that lead to a multicast LID, as a mask.
    pub(crate) fn group_ports(&self, mlid: u32) -> u16 {
        let index = mlid.checked_sub(FIRST_MULTICAST_LID);
        let entry = index.and_then(|index| self.groups.get(usize::try_from(index).ok()?));
        entry.copied().unwrap_or(0)
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
            (4, u16::try_from(GROUPS).unwrap_or(0)),
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

    /// A block of the linear forwarding table, as a Get returns it.
    pub(crate) fn block(&self, index: usize) -> Option<[u8; 64]> {
        let first = index.checked_mul(BLOCK_LEN)?;
        self.table.get(first..)?.first_chunk().copied()
    }

    /// Applies a Set of a block of the linear forwarding table.
    pub(crate) fn set_block(&mut self, index: usize, data: &[u8; 64]) -> Option<()> {
        let first = index.checked_mul(BLOCK_LEN)?;
        *self.table.get_mut(first..)?.first_chunk_mut()? = *data;
        Some(())
    }

    /// A block of the multicast forwarding table, as a Get returns it.
    pub(crate) fn group_block(&self, modifier: u32) -> Option<[u8; 64]> {
        let Block { first, ports } = Block::parse(modifier)?;
        let masks = self
            .groups
            .get(first..first.checked_add(GROUP_BLOCK_LEN)?)?;
        let mut data = [0; 64];
        if ports {
            for (to, mask) in data.chunks_exact_mut(2).zip(masks) {
                to.copy_from_slice(&mask.to_be_bytes());
            }
        }
        Some(data)
    }

    /// Applies a Set of a block of the multicast forwarding table.
    pub(crate) fn set_group_block(&mut self, modifier: u32, data: &[u8; 64]) -> Option<()> {
        let Block { first, ports } = Block::parse(modifier)?;
        let end = first.checked_add(GROUP_BLOCK_LEN)?;
        let masks = self.groups.get_mut(first..end)?;
        if ports {
            for (mask, from) in masks.iter_mut().zip(data.chunks_exact(2)) {
                *mask = u16::from_be_bytes(*from.first_chunk()?);
            }
        }
        Some(())
    }
}

/// Which part of the multicast forwarding table an attribute modifier means.
struct Block {
    /// The first entry.
    first: usize,
    /// It is about the first 16 ports; there are no others.
    ports: bool,
}

impl Block {
    fn parse(modifier: u32) -> Option<Self> {
        let index = usize::try_from(modifier & 0x1ff).ok()?;
        Some(Self {
            first: index.checked_mul(GROUP_BLOCK_LEN)?,
            ports: modifier >> 28 == 0,
        })
    }
}
