// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Names of what is in a MAD's header: classes, methods, attributes.

/// The name of a management class, if it has one.
pub fn class(class: u8) -> Option<&'static str> {
    Some(match class {
        0x01 => "SubnLID",
        0x03 => "SubnAdm",
        0x04 => "PerfMgt",
        0x05 => "BM",
        0x06 => "DevMgt",
        0x07 => "ComMgt",
        0x08 => "SNMP",
        0x81 => "SubnDR",
        0x09..=0x0f | 0x30..=0x4f => "Vendor",
        0x10..=0x2f => "App",
        _ => return None,
    })
}

/// The name of a method in a class.
pub fn method(class: u8, method: u8) -> Option<&'static str> {
    Some(match (class, method) {
        (0x03, 0x12) => "GetTable",
        (0x03, 0x92) => "GetTableResp",
        (0x03, 0x13) => "GetTraceTable",
        (0x03, 0x14) => "GetMulti",
        (0x03, 0x94) => "GetMultiResp",
        (0x03, 0x15) => "Delete",
        (0x03, 0x95) => "DeleteResp",
        (_, 0x01) => "Get",
        (_, 0x02) => "Set",
        (_, 0x03) => "Send",
        (_, 0x05) => "Trap",
        (_, 0x06) => "Report",
        (_, 0x07) => "TrapRepress",
        (_, 0x81) => "GetResp",
        (_, 0x86) => "ReportResp",
        _ => return None,
    })
}

/// The name of an attribute in a class.
pub fn attribute(class: u8, attribute: u16) -> Option<&'static str> {
    Some(match (class, attribute) {
        (0x09..=0x4f, _) => return None,
        (_, 0x0001) => "ClassPortInfo",
        (_, 0x0002) => "Notice",
        (_, 0x0003) => "InformInfo",
        (0x01 | 0x81, 0x0010) => "NodeDescription",
        (0x01 | 0x81, 0x0011) => "NodeInfo",
        (0x01 | 0x81, 0x0012) => "SwitchInfo",
        (0x01 | 0x81, 0x0014) => "GUIDInfo",
        (0x01 | 0x81, 0x0015) => "PortInfo",
        (0x01 | 0x81, 0x0016) => "P_KeyTable",
        (0x01 | 0x81, 0x0017) => "SLtoVLMappingTable",
        (0x01 | 0x81, 0x0018) => "VLArbitrationTable",
        (0x01 | 0x81, 0x0019) => "LinearForwardingTable",
        (0x01 | 0x81, 0x001a) => "RandomForwardingTable",
        (0x01 | 0x81, 0x001b) => "MulticastForwardingTable",
        (0x01 | 0x81, 0x0020) => "SMInfo",
        (0x01 | 0x81, 0x0030) => "VendorDiag",
        (0x01 | 0x81, 0x0031) => "LedInfo",
        (0x03, 0x0011) => "NodeRecord",
        (0x03, 0x0012) => "PortInfoRecord",
        (0x03, 0x0014) => "SwitchInfoRecord",
        (0x03, 0x0018) => "SMInfoRecord",
        (0x03, 0x0020) => "LinkRecord",
        (0x03, 0x0031) => "ServiceRecord",
        (0x03, 0x0033) => "P_KeyTableRecord",
        (0x03, 0x0035) => "PathRecord",
        (0x03, 0x0038) => "MCMemberRecord",
        (0x03, 0x0039) => "TraceRecord",
        (0x03, 0x003a) => "MultiPathRecord",
        (0x03, 0x00f3) => "InformInfoRecord",
        (0x04, 0x0010) => "PortSamplesControl",
        (0x04, 0x0011) => "PortSamplesResult",
        (0x04, 0x0012) => "PortCounters",
        (0x04, 0x001d) => "PortCountersExtended",
        (0x06, 0x0010) => "IOUnitInfo",
        (0x06, 0x0011) => "IOControllerProfile",
        (0x06, 0x0012) => "ServiceEntries",
        (0x07, 0x0010) => "ConnectRequest",
        (0x07, 0x0011) => "MsgRcptAck",
        (0x07, 0x0012) => "ConnectReject",
        (0x07, 0x0013) => "ConnectReply",
        (0x07, 0x0014) => "ReadyToUse",
        (0x07, 0x0015) => "DisconnectRequest",
        (0x07, 0x0016) => "DisconnectReply",
        (0x07, 0x0017) => "ServiceIDResReq",
        (0x07, 0x0018) => "ServiceIDResReqResp",
        (0x07, 0x0019) => "LoadAlternatePath",
        (0x07, 0x001a) => "AlternatePathResponse",
        _ => return None,
    })
}

/// A name with its number, or the number alone.
pub fn named(name: Option<&str>, number: impl std::fmt::LowerHex) -> String {
    match name {
        Some(name) => format!("{name}({number:#x})"),
        None => format!("{number:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_depend_on_the_class() {
        assert_eq!(attribute(0x01, 0x11), Some("NodeInfo"));
        assert_eq!(attribute(0x03, 0x11), Some("NodeRecord"));
        assert_eq!(attribute(0x07, 0x10), Some("ConnectRequest"));
        assert_eq!(attribute(0x32, 0x01), None);
        assert_eq!(method(0x03, 0x92), Some("GetTableResp"));
        assert_eq!(method(0x01, 0x92), None);
        assert_eq!(named(class(0x81), 0x81u8), "SubnDR(0x81)");
        assert_eq!(named(class(0x77), 0x77u8), "0x77");
    }
}
