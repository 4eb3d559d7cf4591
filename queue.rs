// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The receive queue of a file.
//!
//! First in, first out, over all agents of the file. A reader takes a packet out, copies it with no
//! lock held, and puts it back where it was if that fails; packets are numbered as they come, so the
//! place is found again whatever other readers did meanwhile.
//!
//! Locking: all of it is guarded by the file's lock. What methods return is to be dropped after that
//! is let go.

#![forbid(unsafe_code)]

use crate::packet::Packet;
use kernel::list::{
    List,
    ListArc, //
};

/// A received MAD is dropped if more packets than this are unread. Timeouts are queued always, but
/// their number is bounded by the sends that the file has outstanding.
pub(crate) const MAX_UNREAD: usize = 200_000;

/// Unread packets, in the order in which they came.
///
/// # Invariants
///
/// `len` is the number of packets in `packets`, whose positions increase.
pub(crate) struct RecvQueue {
    packets: List<Packet>,
    len: usize,
    next_position: u64,
}

impl RecvQueue {
    /// An empty queue.
    pub(crate) const fn new() -> Self {
        // INVARIANT: There are no packets.
        Self {
            packets: List::new(),
            len: 0,
            next_position: 0,
        }
    }

    /// Whether there is nothing to read.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether another received MAD is one too many.
    pub(crate) fn is_full(&self) -> bool {
        self.len > MAX_UNREAD
    }

    /// Appends a new packet.
    pub(crate) fn push(&mut self, packet: ListArc<Packet>) {
        packet.set_position(self.next_position);
        // INVARIANT: The position is higher than all before.
        self.next_position += 1;
        self.len += 1;
        self.packets.push_back(packet);
    }

    /// Takes the oldest packet.
    pub(crate) fn pop(&mut self) -> Option<ListArc<Packet>> {
        let packet = self.packets.pop_front()?;
        self.len -= 1;
        Some(packet)
    }

    /// Puts a packet back to where [`RecvQueue::pop`] took it from.
    pub(crate) fn put_back(&mut self, packet: ListArc<Packet>) {
        let mut cursor = self.packets.cursor_front();
        // Only packets that were put back, too, can be before it: few.
        while cursor
            .peek_next()
            .is_some_and(|next| next.position() < packet.position())
        {
            cursor.move_next();
        }
        // INVARIANT: All before the cursor have lower positions, all behind it higher ones.
        cursor.insert(packet);
        self.len += 1;
    }

    /// Takes out every packet that `which` says.
    pub(crate) fn remove_all(&mut self, which: impl Fn(&Packet) -> bool) -> List<Packet> {
        let mut removed = List::new();
        let mut cursor = self.packets.cursor_front();
        loop {
            let Some(next) = cursor.peek_next() else {
                break;
            };
            if which(&next) {
                self.len -= 1;
                removed.push_back(next.remove());
            } else {
                cursor.move_next();
            }
        }
        removed
    }

    /// Takes out all packets.
    pub(crate) fn take(&mut self) -> List<Packet> {
        self.len = 0;
        core::mem::replace(&mut self.packets, List::new())
    }
}
