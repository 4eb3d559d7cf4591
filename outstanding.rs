// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The outstanding sends of a file, by what makes two of them the same transaction.
//!
//! A second send with the transaction id and class of one that is not done yet is refused: a request
//! if the first is a request, a response if the first is a response to the same port. RMPP segments
//! of an agent that does RMPP itself are not refused, since they all have one transaction id, but they
//! are counted. The cost does not grow with the number of sends: a few are listed in one tree, many in
//! [`LISTS`] of them.
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

/// What makes two sends the same transaction, as numbers.
///
/// Requests of a file are told apart by transaction id and class alone; responses also by whom they go
/// to: a GID if they have a GRH, else a LID.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SendKey {
    tid: u64,
    class_and_lid: u64,
    gid: [u64; 2],
}

impl SendKey {
    /// The key of a MAD, with the transaction id that it is sent with.
    pub(crate) fn new(header: &PacketHeader, mad: &MadHeader) -> Self {
        const RESPONSE: u64 = 1 << 32;
        const GLOBAL: u64 = 1 << 33;
        let class = u64::from(mad.mgmt_class()) << 16;
        let (class_and_lid, gid) = if !mad.is_response() {
            (class, [0; 2])
        } else if header.grh_present != 0 {
            let [a, b, c, d, e, f, g, h, low @ ..] = header.gid;
            let high = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            (class | RESPONSE | GLOBAL, [high, u64::from_ne_bytes(low)])
        } else {
            (class | RESPONSE | u64::from(header.lid_be), [0; 2])
        };
        Self {
            tid: mad.tid(),
            class_and_lid,
            gid,
        }
    }

    /// Where it is listed among [`LISTS`].
    fn list(&self) -> usize {
        let [high, low] = self.gid;
        // Multiplying carries every bit into the upper ones.
        let hash = [self.class_and_lid, high, low]
            .iter()
            .fold(self.tid, |hash, word| {
                hash.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7) ^ word
            })
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // CAST: What is left is below `LISTS`.
        (hash >> (u64::BITS - LISTS.trailing_zeros())) as usize
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

type List = RBTree<SendKey, usize>;

/// So many lists hold many sends; a power of two.
const LISTS: usize = 4096;
/// More sends than this are many.
const FEW: usize = 64;

/// Memory for the lists of many sends.
pub(crate) struct Lists(KVVec<List>);

impl Lists {
    /// Gets the memory, charged to the caller.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        let mut lists = KVVec::with_capacity(LISTS, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..LISTS {
            lists.push(RBTree::new(), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(Self(lists))
    }
}

/// The outstanding sends: how many there are of each key.
pub(crate) struct Outstanding {
    len: usize,
    few: List,
    /// Empty, or [`LISTS`] of them, and `few` is empty.
    many: KVVec<List>,
}

impl Outstanding {
    /// No sends.
    pub(crate) fn new() -> Self {
        Self {
            len: 0,
            few: RBTree::new(),
            many: KVVec::new(),
        }
    }

    fn list_of(&mut self, key: &SendKey) -> &mut List {
        self.many.get_mut(key.list()).unwrap_or(&mut self.few)
    }

    /// Whether a send with this key is outstanding.
    pub(crate) fn contains(&mut self, key: &SendKey) -> bool {
        self.list_of(key).get(key).is_some()
    }

    /// Whether there are so many sends that [`Outstanding::spread`] would make the next ones faster.
    pub(crate) fn wants_lists(&self) -> bool {
        self.len > FEW && self.many.is_empty()
    }

    /// Spreads the sends over many lists. Returns memory that was not needed.
    pub(crate) fn spread(&mut self, lists: Lists) -> Option<Lists> {
        if !self.wants_lists() {
            return Some(lists);
        }
        self.many = lists.0;
        // The nodes keep their memory; there are hardly more than `FEW`.
        while let Some(cursor) = self.few.cursor_front_mut() {
            let key = *cursor.current().0;
            let (_, node) = cursor.remove_current();
            let replaced = self.list_of(&key).insert(node);
            drop(replaced);
        }
        None
    }

    /// Lists a send.
    pub(crate) fn insert(&mut self, key: SendKey, room: Room) {
        self.len += 1;
        match self.list_of(&key).entry(key) {
            // The room that is not needed is freed here, which only calls kfree().
            Entry::Occupied(mut entry) => *entry.get_mut() += 1,
            Entry::Vacant(entry) => {
                entry.insert(1, room.0);
            }
        }
    }

    /// Takes a send off the list.
    pub(crate) fn remove(&mut self, key: &SendKey) -> Unlisted {
        let mut listed = true;
        let node = match self.list_of(key).find_mut(key) {
            Some(mut entry) if *entry.get() > 1 => {
                *entry.get_mut() -= 1;
                None
            }
            Some(entry) => Some(entry.remove_node()),
            None => {
                listed = false;
                None
            }
        };
        self.len -= usize::from(listed);
        Unlisted { _node: node }
    }
}
