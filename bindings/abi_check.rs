// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Checks the hand-written user ABI of `uapi/` against the C header, at compile time.

#![forbid(unsafe_code)]

use crate::{
    bindings as c,
    uapi, //
};
use core::mem::{
    align_of,
    offset_of,
    size_of, //
};

/// Size of the C structure and offset of each of its fields, against the Rust ones.
macro_rules! same_layout {
    ($rust:ty, $c:ty, $($field:ident = $c_field:ident),* $(,)?) => {
        const _: () = {
            assert!(size_of::<$rust>() == size_of::<$c>());
            $(assert!(offset_of!($rust, $field) == offset_of!($c, $c_field));)*
        };
    };
}

same_layout!(
    uapi::PacketHeader,
    c::ib_user_mad_hdr,
    id = id,
    status = status,
    timeout_ms = timeout_ms,
    retries = retries,
    length = length,
    qpn_be = qpn,
    qkey_be = qkey,
    lid_be = lid,
    sl = sl,
    path_bits = path_bits,
    grh_present = grh_present,
    gid_index = gid_index,
    hop_limit = hop_limit,
    traffic_class = traffic_class,
    gid = gid,
    flow_label_be = flow_label,
    pkey_index = pkey_index,
    reserved = reserved,
);

same_layout!(
    uapi::RegReq2,
    c::ib_user_mad_reg_req2,
    id = id,
    qpn = qpn,
    mgmt_class = mgmt_class,
    mgmt_class_version = mgmt_class_version,
    res = res,
    flags = flags,
    method_mask = method_mask,
    oui = oui,
    rmpp_version = rmpp_version,
    reserved = reserved,
);

const _: () = {
    assert!(uapi::OLD_HEADER_LEN == size_of::<c::ib_user_mad_hdr_old>());
    assert!(uapi::ABI_VERSION == c::IB_USER_MAD_ABI_VERSION);
    assert!(uapi::REG_FLAGS_CAP == c::IB_USER_MAD_USER_RMPP);
    assert!(uapi::STATUS_TIMED_OUT == c::ETIMEDOUT);
    // bindgen does not understand the C type of this one's bitmap, see `types.list`.
    assert!(size_of::<uapi::RegReq>() == 28);
    assert!(align_of::<uapi::RegReq>() == 4);
    assert!(offset_of!(uapi::RegReq, method_mask) == 4);
    assert!(offset_of!(uapi::RegReq, qpn) == 20);
    assert!(offset_of!(uapi::RegReq, rmpp_version) == 26);
};
