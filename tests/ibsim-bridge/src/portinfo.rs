// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The port as the fabric sees it, told by PortInfo (IBA 14.2.5.6) and the P_Key table, and what the device
//! is to be told of it.

use vhca::{PortParams, PORT_DOWN, PORT_REREGISTER, PORT_SET_STATE, PORT_WAIT_FOR_SM};

use crate::mad::DATA_LEN;

/// PortState of a port without a link.
const DOWN: u8 = 1;
/// PortPhysicalState of a port that looks for a link.
const POLLING: u8 = 2;

/// P_Keys that a device has room for.
pub const PKEYS: usize = 16;

/// What the bridge keeps in step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// LID.
    pub lid: u16,
    /// LMC.
    pub lmc: u8,
    /// MasterSMLID.
    pub sm_lid: u16,
    /// GID prefix; 0 as long as no subnet manager has set it.
    pub gid_prefix: u64,
    /// PortState.
    pub state: u8,
    /// The P_Key table.
    pub pkeys: [u16; PKEYS],
}

impl Port {
    /// The port with a new PortInfo.
    pub fn with_info(self, info: &[u8; DATA_LEN]) -> Self {
        let be16 = |at: usize| u16::from_be_bytes([info[at], info[at + 1]]);
        Self {
            lid: be16(16),
            lmc: info[34] & 7,
            sm_lid: be16(18),
            gid_prefix: info[8..16].try_into().map_or(0, u64::from_be_bytes),
            state: info[32] & 0xf,
            ..self
        }
    }

    /// The port with a new P_Key table, of which a device has room for a part.
    pub fn with_pkeys(self, table: &[u8; DATA_LEN]) -> Self {
        let mut pkeys = [0; PKEYS];
        for (pkey, bytes) in pkeys.iter_mut().zip(table.chunks_exact(2)) {
            *pkey = u16::from_be_bytes([bytes[0], bytes[1]]);
        }
        Self { pkeys, ..self }
    }

    /// The port after its cable was pulled out.
    pub fn unplugged(self) -> Self {
        Self {
            state: DOWN,
            ..self
        }
    }

    /// Whether a LID is the port's.
    pub fn owns_lid(&self, lid: u16) -> bool {
        self.lid != 0 && lid >> self.lmc == self.lid >> self.lmc
    }

    /// CapabilityMask in a PortInfo.
    pub fn cap_mask(info: &[u8; DATA_LEN]) -> u32 {
        u32::from_be_bytes([info[20], info[21], info[22], info[23]])
    }

    /// Whether a Set of PortInfo asks clients to register anew.
    pub fn asks_to_reregister(info: &[u8; DATA_LEN]) -> bool {
        info[51] & 0x80 != 0
    }

    /// A PortInfo, as it is without a link.
    pub fn without_link(mut info: [u8; DATA_LEN]) -> [u8; DATA_LEN] {
        info[32] = info[32] & 0xf0 | DOWN;
        info[33] = info[33] & 0x0f | (POLLING << 4);
        info
    }

    /// What the device is told: parameters and state. The capability mask is left alone, as the device is
    /// who changes it.
    pub fn params(&self, reregister: bool) -> (PortParams, u32) {
        let mut flags = PORT_WAIT_FOR_SM;
        if self.state <= DOWN {
            flags |= PORT_DOWN;
        } else {
            flags |= PORT_SET_STATE;
        }
        if reregister {
            flags |= PORT_REREGISTER;
        }
        let params = PortParams {
            lid: self.lid.into(),
            lmc: self.lmc.into(),
            sm_lid: self.sm_lid.into(),
            cable: 0,
            cap_mask: 0,
            flags,
            gid_prefix: self.gid_prefix,
            pkeys: self.pkeys,
        };
        (params, self.state.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> [u8; DATA_LEN] {
        let mut info = [0; DATA_LEN];
        info[8..16].copy_from_slice(&0xfe80_0000_0000_0001_u64.to_be_bytes());
        info[16..24].copy_from_slice(&[0, 8, 0, 2, 0, 0x40, 0xc0, 0x48]);
        info[32..35].copy_from_slice(&[0x14, 0x52, 0x42]);
        info
    }

    #[test]
    fn what_is_read_of_a_port_info() {
        let port = Port::default().with_info(&info());
        let expected = Port {
            lid: 8,
            lmc: 2,
            sm_lid: 2,
            gid_prefix: 0xfe80_0000_0000_0001,
            state: 4,
            pkeys: [0; PKEYS],
        };
        assert_eq!(port, expected);
        assert_eq!(Port::cap_mask(&info()), 0x40_c048);
        let owned: Vec<u16> = (0..16).filter(|lid| port.owns_lid(*lid)).collect();
        assert_eq!(owned, [8, 9, 10, 11]);
        assert!(!Port::default().owns_lid(0));
    }

    #[test]
    fn a_difference_is_seen_where_it_matters() {
        let port = Port::default().with_info(&info());
        let with = |at: usize, value: u8| {
            let mut info = info();
            info[at] = value;
            port.with_info(&info)
        };
        for at in [15, 17, 19, 34] {
            assert_ne!(with(at, 3), port, "byte {at}");
        }
        assert_ne!(with(32, 0x12), port, "the state");
        assert_eq!(with(27, 3), port, "M_KeyLeasePeriod");
        assert_eq!(with(23, 0x4a), port, "the device knows who is IsSM");
        let mut table = [0; DATA_LEN];
        table[..4].copy_from_slice(&[0xff, 0xff, 0x80, 0x01]);
        let partitioned = port.with_pkeys(&table);
        assert_ne!(partitioned, port);
        assert_eq!(partitioned.pkeys[..3], [0xffff, 0x8001, 0]);
        assert_eq!(partitioned.with_info(&info()), partitioned);
    }

    #[test]
    fn what_the_device_is_told() {
        let port = Port::default().with_info(&info());
        let (params, state) = port.params(false);
        assert_eq!((params.lid, params.lmc, params.sm_lid, state), (8, 2, 2, 4));
        assert_eq!(params.flags, PORT_WAIT_FOR_SM | PORT_SET_STATE);
        assert_eq!(params.cap_mask, 0);
        let (params, _) = port.params(true);
        assert_ne!(params.flags & PORT_REREGISTER, 0);
        let (params, _) = port.unplugged().params(false);
        assert_eq!(params.flags, PORT_WAIT_FOR_SM | PORT_DOWN);
        assert_eq!(params.lid, 8, "a port without a link keeps its LID");
        let down = Port::without_link(info());
        assert_eq!((down[32], down[33]), (0x11, 0x22));
        assert_eq!(Port::default().with_info(&down), port.unplugged());
    }

    #[test]
    fn the_bit_that_asks_to_register_anew() {
        let mut info = info();
        info[51] = 0x12;
        assert!(!Port::asks_to_reregister(&info));
        info[51] |= 0x80;
        assert!(Port::asks_to_reregister(&info));
    }
}
