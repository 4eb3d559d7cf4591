// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The queue pairs of a device that carry data, and the multicast groups that they have joined.
//!
//! The lock around [`DataQueues`] may be taken in any context; references are not dropped under it.

#![forbid(unsafe_code)]

use crate::verbs::queue::QueuePair;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Queue pairs 0 and 1 are those of MADs.
const FIRST_NUMBER: u32 = 2;
/// Numbers have 24 bits, and the last one stands for a multicast group.
const LAST_NUMBER: u32 = 0x00ff_fffe;

/// A queue pair in a multicast group.
struct Member {
    mgid: [u8; 16],
    mlid: u32,
    qp: Arc<QueuePair>,
}

/// The queue pairs that carry data.
pub(crate) struct DataQueues {
    qps: KVec<Arc<QueuePair>>,
    members: KVec<Member>,
    next: u32,
}

impl DataQueues {
    /// None.
    pub(crate) const fn new() -> Self {
        Self {
            qps: KVec::new(),
            members: KVec::new(),
            next: FIRST_NUMBER,
        }
    }

    /// A number that no queue pair has; not soon again the one of one that is gone.
    pub(crate) fn new_number(&mut self) -> u32 {
        loop {
            let number = self.next;
            self.next = if number == LAST_NUMBER {
                FIRST_NUMBER
            } else {
                number + 1
            };
            if self.qps.iter().all(|qp| qp.number() != number) {
                return number;
            }
        }
    }

    /// A new queue pair.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn add(&mut self, qp: Arc<QueuePair>) -> Result {
        Ok(self.qps.push(qp, GFP_ATOMIC)?)
    }

    /// A queue pair is gone.
    pub(crate) fn remove(&mut self, qp: &Arc<QueuePair>) -> Option<Arc<QueuePair>> {
        let at = self.qps.iter().position(|own| Arc::ptr_eq(own, qp))?;
        self.qps.remove(at).ok()
    }

    /// The queue pair with a number.
    pub(crate) fn find(&self, number: u32) -> Option<Arc<QueuePair>> {
        self.qps.iter().find(|qp| qp.number() == number).cloned()
    }

    /// A queue pair joins a multicast group, unless it is in it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn join(&mut self, mgid: [u8; 16], mlid: u32, qp: &Arc<QueuePair>) -> Result {
        if self.position(&mgid, mlid, qp).is_none() {
            let qp = qp.clone();
            self.members.push(Member { mgid, mlid, qp }, GFP_ATOMIC)?;
        }
        Ok(())
    }

    /// A queue pair leaves a multicast group; `None` if it is not in it.
    pub(crate) fn leave(
        &mut self,
        mgid: &[u8; 16],
        mlid: u32,
        qp: &QueuePair,
    ) -> Option<Arc<QueuePair>> {
        let at = self.position(mgid, mlid, qp)?;
        Some(self.members.remove(at).ok()?.qp)
    }

    /// A queue pair leaves one of the groups that it is in; `None` if there is none.
    pub(crate) fn leave_any(&mut self, qp: &QueuePair) -> Option<Arc<QueuePair>> {
        let mut members = self.members.iter();
        let at = members.position(|member| member.qp.number() == qp.number())?;
        Some(self.members.remove(at).ok()?.qp)
    }

    fn position(&self, mgid: &[u8; 16], mlid: u32, qp: &QueuePair) -> Option<usize> {
        self.members.iter().position(|member| {
            member.mgid == *mgid && member.mlid == mlid && member.qp.number() == qp.number()
        })
    }

    /// The `n`th queue pair of a group, beginning with 0. A datagram without a GID is for all groups of
    /// its LID.
    pub(crate) fn member(
        &self,
        n: usize,
        mgid: Option<&[u8; 16]>,
        mlid: u32,
    ) -> Option<Arc<QueuePair>> {
        let of_group =
            |member: &&Member| member.mlid == mlid && mgid.is_none_or(|mgid| *mgid == member.mgid);
        let member = self.members.iter().filter(of_group).nth(n)?;
        Some(member.qp.clone())
    }
}
