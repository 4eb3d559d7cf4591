// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The MAD's own header and what `ib_mad` knows of management classes.
//!
//! C header: `include/rdma/ib_mad.h`; source of the layout: IBA 13.4.2 (common MAD fields) and 13.6.2
//! (RMPP fields).

use crate::bindings;

/// Bytes of the header that all MADs have.
pub(crate) const MAD_HDR_LEN: usize = 24;

/// Bytes of the MAD header and the RMPP header behind it.
pub(crate) const RMPP_HDR_LEN: usize = 36;

/// The RMPP header says that this MAD takes part in RMPP.
///
/// Source: IBA 13.6.2.1, RMPPFlags, Active.
pub(crate) const RMPP_FLAG_ACTIVE: u8 = 1;

const _: () = assert!(MAD_HDR_LEN == bindings::IB_MGMT_MAD_HDR as usize);
const _: () = assert!(RMPP_HDR_LEN == bindings::IB_MGMT_RMPP_HDR as usize);
const _: () = assert!(RMPP_FLAG_ACTIVE as u32 == bindings::IB_MGMT_RMPP_FLAG_ACTIVE);
const _: () = assert!(MAD_HDR_LEN == core::mem::size_of::<bindings::ib_mad_hdr>());

/// The header that all MADs have, as it is on the wire.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct MadHeader([u8; MAD_HDR_LEN]);

impl MadHeader {
    /// Makes a header of its bytes.
    pub(crate) const fn from_array(bytes: [u8; MAD_HDR_LEN]) -> Self {
        Self(bytes)
    }

    /// Takes the header out of the bytes that a MAD begins with. `None` if there are too few.
    pub(crate) fn from_mad(mad: &[u8]) -> Option<Self> {
        mad.first_chunk().copied().map(Self)
    }

    /// The bytes.
    pub(crate) fn as_bytes(&self) -> &[u8; MAD_HDR_LEN] {
        &self.0
    }

    /// Base version.
    pub(crate) fn base_version(&self) -> u8 {
        self.0[0]
    }

    /// Management class.
    pub(crate) fn mgmt_class(&self) -> u8 {
        self.0[1]
    }

    /// Transaction id.
    pub(crate) fn tid(&self) -> u64 {
        let [_, _, _, _, _, _, _, _, tid @ .., _, _, _, _, _, _, _, _] = self.0;
        u64::from_be_bytes(tid)
    }

    /// Replaces the upper half of the transaction id.
    pub(crate) fn set_hi_tid(&mut self, hi_tid: u32) {
        let [_, _, _, _, _, _, _, _, a, b, c, d, ..] = &mut self.0;
        [*a, *b, *c, *d] = hi_tid.to_be_bytes();
    }

    /// Whether this MAD answers another one (IBA 13.4.5; also a TrapRepress and a Baseboard
    /// Management response).
    pub(crate) fn is_response(&self) -> bool {
        // SAFETY: `self` has the size and the alignment of a `struct ib_mad_hdr` and outlives the call.
        unsafe { bindings::ib_response_mad(core::ptr::from_ref(self).cast()) != 0 }
    }
}

/// Whether MADs of the class have an RMPP header (IBA 13.6).
pub(crate) fn is_rmpp_class(mgmt_class: u8) -> bool {
    // SAFETY: The function only compares numbers.
    unsafe { bindings::ib_is_mad_class_rmpp(mgmt_class) != 0 }
}

/// Bytes of all headers of a MAD of the class: where its data begins. 24, 40, 56 or 64.
pub(crate) fn class_header_len(mgmt_class: u8) -> usize {
    // SAFETY: The function only compares numbers.
    let len = unsafe { bindings::ib_get_mad_data_offset(mgmt_class) };
    usize::try_from(len).unwrap_or(RMPP_HDR_LEN)
}

#[kernel::prelude::kunit_tests(umad_mad)]
mod tests {
    use super::*;

    const SUBN: u8 = 0x01;
    const SA: u8 = 0x03;
    const DEVICE: u8 = 0x06;
    const VENDOR: u8 = 0x09;
    const VENDOR_OUI: u8 = 0x30;

    #[test]
    fn headers_have_the_lengths_of_their_classes() {
        assert_eq!(class_header_len(SUBN), 24);
        assert_eq!(class_header_len(SA), 56);
        assert_eq!(class_header_len(DEVICE), 64);
        assert_eq!(class_header_len(VENDOR), 24);
        assert_eq!(class_header_len(VENDOR_OUI), 40);
    }

    #[test]
    fn classes_with_rmpp_headers() {
        assert!(is_rmpp_class(SA) && is_rmpp_class(VENDOR_OUI));
        assert!(!is_rmpp_class(SUBN) && !is_rmpp_class(VENDOR));
    }

    #[test]
    fn a_header_needs_all_its_bytes() {
        assert!(MadHeader::from_mad(&[0; MAD_HDR_LEN - 1]).is_none());
        assert!(MadHeader::from_mad(&[0; MAD_HDR_LEN]).is_some());
    }

    #[test]
    fn only_the_upper_half_of_a_transaction_id_is_replaced() {
        let mut header = MadHeader::from_array([0x5a; MAD_HDR_LEN]);
        header.set_hi_tid(0x0102_0304);
        assert_eq!(header.tid(), 0x0102_0304_5a5a_5a5a);
        let untouched = header.as_bytes().iter().filter(|b| **b == 0x5a).count();
        assert_eq!(untouched, MAD_HDR_LEN - 4);
    }

    #[test]
    fn responses_are_told_by_method() {
        let mut bytes = [0; MAD_HDR_LEN];
        bytes[1] = SA;
        for (method, response) in [(0x01, false), (0x81, true), (0x07, true), (0x92, true)] {
            bytes[3] = method;
            assert_eq!(MadHeader::from_array(bytes).is_response(), response);
        }
    }
}
