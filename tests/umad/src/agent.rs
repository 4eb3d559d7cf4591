// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Agents: what a program says to the kernel before it can send or receive.

use std::fmt;

use crate::abi::{RegReq, RegReq2, USER_RMPP};
use crate::{Method, Qpn};

/// The number of an agent on its open file: 0 to 31, the lowest free one first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentId(pub u32);

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of methods: one bit for each of the 128 that are not responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MethodMask(pub u128);

impl MethodMask {
    /// No method: nothing unsolicited is wanted.
    pub const NONE: Self = Self(0);

    /// The set with these methods; the response bit of a method does not count.
    pub fn of(methods: &[Method]) -> Self {
        Self(methods.iter().fold(0, |mask, m| mask | (1 << (m.0 & 0x7f))))
    }

    /// The two 64-bit words of `REGISTER_AGENT2`.
    #[allow(clippy::cast_possible_truncation)] // each word is one half
    pub const fn to_u64s(self) -> [u64; 2] {
        [self.0 as u64, (self.0 >> 64) as u64]
    }

    /// The words of `REGISTER_AGENT`, which the kernel reads as an array of `long`.
    ///
    /// On a 64-bit big-endian machine that swaps each pair.
    #[allow(clippy::cast_possible_truncation)] // each word is a quarter
    pub const fn to_words(self) -> [u32; 4] {
        let m = self.0;
        let words = [
            m as u32,
            (m >> 32) as u32,
            (m >> 64) as u32,
            (m >> 96) as u32,
        ];
        if cfg!(all(target_endian = "big", target_pointer_width = "64")) {
            [words[1], words[0], words[3], words[2]]
        } else {
            words
        }
    }
}

/// A wish for an agent.
///
/// Starts from [`Registration::send_only`] or [`Registration::class`]; the rest has the values that
/// most agents want: QP 1, no RMPP, no OUI, no unsolicited MADs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    /// QP 0 or 1. (The ABI has 8 bits for it in one call and 32 in the other.)
    pub qpn: Qpn,
    /// Management class; 0: the agent only sends, and gets the responses to its requests.
    pub class: u8,
    /// Version of the class.
    pub class_version: u8,
    /// Vendor of classes 0x30 to 0x4f.
    pub oui: u32,
    /// Unsolicited MADs that are wanted.
    pub methods: MethodMask,
    /// 0, or 1 for RMPP.
    pub rmpp_version: u8,
    /// Flags of `REGISTER_AGENT2`.
    pub flags: u32,
}

impl Registration {
    /// An agent that sends in any class and gets the responses.
    pub fn send_only() -> Self {
        Self {
            qpn: Qpn::GSI,
            ..Self::default()
        }
    }

    /// An agent of a class.
    pub fn class(class: u8, class_version: u8) -> Self {
        Self {
            class,
            class_version,
            ..Self::send_only()
        }
    }

    /// Uses this queue pair.
    pub fn qpn(self, qpn: u32) -> Self {
        Self {
            qpn: Qpn(qpn),
            ..self
        }
    }

    /// Names the vendor (24 bits).
    pub fn oui(self, oui: u32) -> Self {
        Self { oui, ..self }
    }

    /// Wants unsolicited MADs with these methods.
    pub fn methods(self, methods: &[Method]) -> Self {
        Self {
            methods: MethodMask::of(methods),
            ..self
        }
    }

    /// Wants unsolicited MADs by mask.
    pub fn mask(self, methods: MethodMask) -> Self {
        Self { methods, ..self }
    }

    /// Lets the kernel do RMPP, in this version (1 is the only one).
    pub fn rmpp(self, rmpp_version: u8) -> Self {
        Self {
            rmpp_version,
            ..self
        }
    }

    /// Does RMPP by itself; only `REGISTER_AGENT2` knows it.
    pub fn user_rmpp(self) -> Self {
        self.flags(USER_RMPP)
    }

    /// Sets the flags of `REGISTER_AGENT2`.
    pub fn flags(self, flags: u32) -> Self {
        Self { flags, ..self }
    }

    /// The argument of `REGISTER_AGENT`: it has no flags, 8 bits of QP number and 24 of OUI.
    #[allow(clippy::cast_possible_truncation)] // a QP number over 255 becomes 255, which no kernel takes
    pub fn to_req(&self) -> RegReq {
        let [_, a, b, c] = self.oui.to_be_bytes();
        RegReq {
            id: 0,
            method_mask: self.methods.to_words(),
            qpn: self.qpn.0.min(0xff) as u8,
            mgmt_class: self.class,
            mgmt_class_version: self.class_version,
            oui: [a, b, c],
            rmpp_version: self.rmpp_version,
            padding: 0,
        }
    }

    /// The argument of `REGISTER_AGENT2`.
    pub fn to_req2(&self) -> RegReq2 {
        RegReq2 {
            id: 0,
            qpn: self.qpn.0,
            mgmt_class: self.class,
            mgmt_class_version: self.class_version,
            res: 0,
            flags: self.flags,
            method_mask: self.methods.to_u64s(),
            oui: self.oui,
            rmpp_version: self.rmpp_version,
            reserved: [0; 3],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_name_the_method() {
        let mask = MethodMask::of(&[Method(1), Method(33), Method(64), Method(127)]);
        assert_eq!(mask.to_u64s(), [(1 << 1) | (1 << 33), 1 | (1 << 63)]);
        #[cfg(target_endian = "little")]
        assert_eq!(mask.to_words(), [1 << 1, 1 << 1, 1, 1 << 31]);
        assert_eq!(
            MethodMask::of(&[Method(0x81)]),
            MethodMask::of(&[Method(1)])
        );
    }

    #[test]
    fn both_requests_say_the_same() {
        let reg = Registration::class(0x31, 2).oui(0x0a0b0c).rmpp(1);
        let (one, two) = (reg.to_req(), reg.to_req2());
        assert_eq!(one.oui, [0x0a, 0x0b, 0x0c]);
        assert_eq!(two.oui, 0x0a0b0c);
        assert_eq!((one.qpn, two.qpn), (1, 1));
        assert_eq!((one.mgmt_class, two.mgmt_class), (0x31, 0x31));
        assert_eq!((one.rmpp_version, two.rmpp_version), (1, 1));
        assert_eq!(Registration::send_only().qpn(0x101).to_req().qpn, 0xff);
    }
}
