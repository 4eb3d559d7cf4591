// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The outstanding sends of a file, by what makes two of them the same transaction.
//!
//! A second send with the transaction id and class of one that is not done yet is refused: a request
//! if the first is a request, a response if the first is a response to the same port. RMPP segments
//! of an agent that does RMPP itself are not refused, since they all have one transaction id, but they
//! are counted. The cost does not grow with the number of sends but by its logarithm.
//!
//! When a send is done:
//! - a request as soon as its response can be read, or its timeout, or it failed;
//! - a response that is sent by RMPP or that waits for an answer of its own: when `ib_mad` completes it
//!   (for RMPP, with the last acknowledgement, which may come after the other side has read it all);
//! - any other response at once: the requester may have seen it as soon as it is posted.
//!
//! Locking: all of it is guarded by the file's lock. What methods return is to be dropped after that is
//! let go.

#![forbid(unsafe_code)]

use crate::{
    rdma::mad::MadHeader,
    uapi::PacketHeader, //
};
use kernel::{
    prelude::*,
    rbtree::{
        Entry,
        RBTree,
        RBTreeNode,
        RBTreeNodeReservation, //
    }, //
};

/// Whom a MAD goes to, as far as that makes a difference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Destination {
    /// Requests of a file are told apart by their transaction ids alone.
    Request,
    /// A response without GRH: the LID, in network byte order.
    Lid(u16),
    /// A response with GRH: the GID.
    Gid([u8; 16]),
}

/// What makes two sends the same transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SendKey {
    tid: u64,
    mgmt_class: u8,
    destination: Destination,
}

impl SendKey {
    /// The key of a MAD, with the transaction id that it is sent with.
    pub(crate) fn new(header: &PacketHeader, mad: &MadHeader) -> Self {
        let destination = if !mad.is_response() {
            Destination::Request
        } else if header.grh_present != 0 {
            Destination::Gid(header.gid)
        } else {
            Destination::Lid(header.lid_be)
        };
        Self {
            tid: mad.tid(),
            mgmt_class: mad.mgmt_class(),
            destination,
        }
    }
}

/// Memory to list a send with, got before the lock is taken.
pub(crate) struct Room(RBTreeNodeReservation<SendKey, usize>);

impl Room {
    /// Gets the memory.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?))
    }
}

/// Memory of a send that is not listed any more.
#[must_use = "to be dropped after unlocking"]
pub(crate) struct Unlisted {
    _node: Option<RBTreeNode<SendKey, usize>>,
}

/// The outstanding sends: how many there are of each key.
pub(crate) struct Outstanding {
    sends: RBTree<SendKey, usize>,
}

impl Outstanding {
    /// No sends.
    pub(crate) fn new() -> Self {
        Self {
            sends: RBTree::new(),
        }
    }

    /// Whether a send with this key is outstanding.
    pub(crate) fn contains(&self, key: &SendKey) -> bool {
        self.sends.get(key).is_some()
    }

    /// Lists a send.
    pub(crate) fn insert(&mut self, key: SendKey, room: Room) {
        match self.sends.entry(key) {
            // The room that is not needed is freed here, which only calls kfree().
            Entry::Occupied(mut entry) => *entry.get_mut() += 1,
            Entry::Vacant(entry) => {
                entry.insert(1, room.0);
            }
        }
    }

    /// Takes a send off the list.
    pub(crate) fn remove(&mut self, key: &SendKey) -> Unlisted {
        let node = match self.sends.find_mut(key) {
            Some(mut entry) if *entry.get() > 1 => {
                *entry.get_mut() -= 1;
                None
            }
            Some(entry) => Some(entry.remove_node()),
            None => None,
        };
        Unlisted { _node: node }
    }
}
