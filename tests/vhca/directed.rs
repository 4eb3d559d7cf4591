// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The way of directed-route SMPs through a switch (IBA 14.2.2).
//!
//! The switch does that itself, as the hardware of real ones does, and answers for itself, too. `ib_mad` has
//! code for switches that leave it to the host, but that looks up the port that an SMP came in through in a
//! table which `ib_core` makes for port 0 only.

#![forbid(unsafe_code)]

/// Where an SMP goes next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Out of this port.
    Out(u8),
    /// To the switch's own agent.
    Here,
    /// Nowhere: the route is not possible.
    Nowhere,
}

/// Longest path.
const MAX_HOPS: u8 = 63;
/// The direction bit, in the first byte of the status.
const DIRECTION: u8 = 0x80;

const STATUS: usize = 4;
const HOP_POINTER: usize = 6;
const HOP_COUNT: usize = 7;
const INITIAL_PATH: usize = 128;
const RETURN_PATH: usize = 192;

fn byte(smp: &[u8], at: usize) -> u8 {
    smp.get(at).copied().unwrap_or(0)
}

fn set(smp: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = smp.get_mut(at) {
        *byte = value;
    }
}

/// Takes an SMP, with the permissive LID at both ends of its route, one step further; it came in through
/// `port`. Its hop pointer and its return path are updated.
pub(crate) fn step(smp: &mut [u8], port: u8) -> Next {
    let (pointer, count) = (byte(smp, HOP_POINTER), byte(smp, HOP_COUNT));
    if count == 0 || count > MAX_HOPS {
        return Next::Nowhere;
    }
    let at = usize::from(pointer);
    if byte(smp, STATUS) & DIRECTION == 0 {
        if pointer == 0 || pointer > count {
            return Next::Nowhere;
        }
        set(smp, RETURN_PATH + at, port);
        set(smp, HOP_POINTER, pointer + 1);
        if pointer == count {
            Next::Here
        } else {
            Next::Out(byte(smp, INITIAL_PATH + at + 1))
        }
    } else if (2..=count).contains(&pointer) {
        set(smp, HOP_POINTER, pointer - 1);
        Next::Out(byte(smp, RETURN_PATH + at - 1))
    } else {
        // An answer to a manager at port 0: that could not have sent the request.
        Next::Nowhere
    }
}

/// Sends the answer to an SMP that was for the switch itself on its way back: returns the port.
pub(crate) fn turn(smp: &mut [u8]) -> u8 {
    let count = byte(smp, HOP_COUNT);
    set(smp, HOP_POINTER, count);
    byte(smp, RETURN_PATH + usize::from(count))
}
