// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! How much memory one file may make the kernel keep, and the module parameters that say so.
//!
//! Three bounds, in bytes: one message, all sends of a file that are not done, all packets of a file
//! that are not read. What a write() takes is charged to the writer's memory cgroup besides. What
//! `ib_mad` receives is taken in its own work queues and cannot be charged to anybody, so the last
//! bound is the only one there.
//!
//! Costs are estimates from above of what lies in the slabs, and not only the user's bytes: a small
//! MAD costs several times its 256 bytes.

#![forbid(unsafe_code)]

use crate::{
    compat,
    module_parameters, //
};

/// What a send takes besides its bytes: `ib_mad`'s description of it, the packet that will tell of its
/// timeout, the entry among the outstanding sends.
const SEND_OVERHEAD: usize = 1024;
/// What a packet takes besides its MAD, its sender's address included.
const PACKET_OVERHEAD: usize = 256;
/// What `ib_mad` keeps for each segment that it receives, besides its bytes.
const SEGMENT_OVERHEAD: usize = 256;

/// A received MAD is dropped if more packets than this are unread, as it always was.
const MAX_UNREAD_PACKETS: usize = 200_000;

/// Whether a message of so many bytes may be written.
pub(crate) fn is_message_allowed(bytes: usize) -> bool {
    bytes <= compat::parameter(&module_parameters::max_message)
}

/// What a send of so many bytes costs until it is done.
pub(crate) fn send_cost(bytes: usize) -> usize {
    bytes.saturating_add(SEND_OVERHEAD)
}

/// What a received message costs that came in so many segments.
pub(crate) fn received_cost(segments: usize, segment_len: usize) -> usize {
    segments
        .saturating_mul(segment_len.saturating_add(SEGMENT_OVERHEAD))
        .saturating_add(PACKET_OVERHEAD)
}

/// What the report of a timeout costs until it is read.
pub(crate) const fn timeout_cost() -> usize {
    PACKET_OVERHEAD
}

/// What so many of them cost.
pub(crate) const fn timeouts_cost(timeouts: usize) -> usize {
    timeouts.saturating_mul(timeout_cost())
}

/// Whether sends, and reports of timeouts that are not read, may cost so much together.
pub(crate) fn are_sends_allowed(cost: usize) -> bool {
    cost <= compat::parameter(&module_parameters::max_outstanding)
}

/// Whether a received MAD that costs `cost` may be queued behind so many packets.
pub(crate) fn is_room_for(cost: usize, packets: usize, unread: usize) -> bool {
    packets <= MAX_UNREAD_PACKETS
        && unread.saturating_add(cost) <= compat::parameter(&module_parameters::max_unread)
}

#[kernel::prelude::kunit_tests(umad_bounds)]
mod tests {
    use super::*;

    #[test]
    fn costs_do_not_overflow() {
        assert_eq!(send_cost(usize::MAX), usize::MAX);
        assert_eq!(received_cost(usize::MAX, usize::MAX), usize::MAX);
        assert!(!is_message_allowed(usize::MAX));
        assert!(!are_sends_allowed(usize::MAX));
        assert!(!is_room_for(usize::MAX, 0, 1));
    }

    #[test]
    fn what_is_exactly_at_a_bound_is_allowed() {
        let max_message = compat::parameter(&module_parameters::max_message);
        assert!(is_message_allowed(max_message) && !is_message_allowed(max_message + 1));
        let max_outstanding = compat::parameter(&module_parameters::max_outstanding);
        assert!(are_sends_allowed(max_outstanding) && !are_sends_allowed(max_outstanding + 1));
        let max_unread = compat::parameter(&module_parameters::max_unread);
        assert!(is_room_for(max_unread, 0, 0) && is_room_for(1, 0, max_unread - 1));
        assert!(!is_room_for(2, 0, max_unread - 1));
        assert!(is_room_for(0, MAX_UNREAD_PACKETS, 0));
        assert!(!is_room_for(0, MAX_UNREAD_PACKETS + 1, 0));
    }
}
