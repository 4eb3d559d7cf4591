// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The fields of a MAD that the bridge looks at or changes (IBA 13.4.2, 14.2.1).

/// Bytes of a MAD.
pub const LEN: usize = 256;
/// Bytes of an SMP's data.
pub const DATA_LEN: usize = 64;

/// A MAD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mad(pub [u8; LEN]);

/// Class of LID-routed SMPs.
pub const LID_ROUTED: u8 = 0x01;
/// Class of directed-route SMPs.
pub const DIRECTED: u8 = 0x81;
/// Method: Get.
pub const GET: u8 = 0x01;
/// Method: Set.
pub const SET: u8 = 0x02;
/// The bit of the method that makes it a response; also in acknowledgements of RMPP, against the flow.
const RESPONSE: u8 = 0x80;
/// The direction bit, in the first byte of a directed-route SMP's status.
const DIRECTION: u8 = 0x80;
/// Where an SMP's data begins.
const DATA: usize = 64;

/// Attribute: NodeDescription.
pub const NODE_DESCRIPTION: u16 = 0x10;
/// Attribute: NodeInfo.
pub const NODE_INFO: u16 = 0x11;
/// Attribute: PortInfo.
pub const PORT_INFO: u16 = 0x15;

impl Mad {
    /// A MAD from a frame; a short one is filled up.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut mad = [0; LEN];
        mad.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self(mad))
    }

    /// A directed-route Get of the node itself.
    pub fn local_get(tid: u64, attribute: u16, modifier: u32) -> Self {
        let mut mad = Self([0; LEN]);
        mad.0[..4].copy_from_slice(&[1, DIRECTED, 1, GET]);
        mad.set_tid(tid);
        mad.0[16..18].copy_from_slice(&attribute.to_be_bytes());
        mad.set_modifier(modifier);
        mad.0[32..36].fill(0xff);
        mad
    }

    /// Management class.
    pub fn class(&self) -> u8 {
        self.0[1]
    }

    /// Whether base and class version are such that ibsim takes it.
    pub fn is_plain(&self) -> bool {
        self.0[0] == 1 && self.0[2] <= 2
    }

    /// Method.
    pub fn method(&self) -> u8 {
        self.0[3]
    }

    /// Whether the method has the response bit.
    pub fn is_response(&self) -> bool {
        self.0[3] & RESPONSE != 0
    }

    /// Whether it is an SMP.
    pub fn is_smp(&self) -> bool {
        matches!(self.class(), LID_ROUTED | DIRECTED)
    }

    /// Whether it is a directed-route SMP.
    pub fn is_directed(&self) -> bool {
        self.class() == DIRECTED
    }

    /// Status, without the direction bit of a directed-route SMP.
    pub fn status(&self) -> u16 {
        let status = u16::from_be_bytes([self.0[4], self.0[5]]);
        if self.is_directed() {
            status & 0x7fff
        } else {
            status
        }
    }

    /// Makes a directed-route request its own response, with a status.
    pub fn respond(&mut self, status: u16) {
        self.0[3] = GET | RESPONSE;
        self.0[4..6].copy_from_slice(&status.to_be_bytes());
        self.0[4] |= DIRECTION;
    }

    /// Hop pointer of a directed-route SMP.
    pub fn set_hop_pointer(&mut self, hop: u8) {
        self.0[6] = hop;
    }

    /// Hop pointer of a directed-route SMP.
    pub fn hop_pointer(&self) -> u8 {
        self.0[6]
    }

    /// Hop count of a directed-route SMP.
    pub fn hop_count(&self) -> u8 {
        self.0[7]
    }

    /// Whether a directed-route SMP also has a part that is LID routed.
    pub fn has_lid_part(&self) -> bool {
        self.0[32..36] != [0xff; 4]
    }

    /// Transaction id.
    pub fn tid(&self) -> u64 {
        self.0[8..16].try_into().map_or(0, u64::from_be_bytes)
    }

    /// Changes the transaction id.
    pub fn set_tid(&mut self, tid: u64) {
        self.0[8..16].copy_from_slice(&tid.to_be_bytes());
    }

    /// Attribute.
    pub fn attribute(&self) -> u16 {
        u16::from_be_bytes([self.0[16], self.0[17]])
    }

    /// Attribute modifier.
    pub fn modifier(&self) -> u32 {
        u32::from_be_bytes([self.0[20], self.0[21], self.0[22], self.0[23]])
    }

    /// Changes the attribute modifier.
    pub fn set_modifier(&mut self, modifier: u32) {
        self.0[20..24].copy_from_slice(&modifier.to_be_bytes());
    }

    /// The data of an SMP.
    pub fn data(&self) -> [u8; DATA_LEN] {
        let mut data = [0; DATA_LEN];
        data.copy_from_slice(&self.0[DATA..DATA + DATA_LEN]);
        data
    }

    /// Changes the data of an SMP.
    pub fn set_data(&mut self, data: &[u8; DATA_LEN]) {
        self.0[DATA..DATA + DATA_LEN].copy_from_slice(data);
    }
}
