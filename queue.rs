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

use crate::{
    packet::Packet,
    seat::AgentId,
    uapi::MAX_AGENTS, //
};
use kernel::list::{
    List,
    ListArc, //
};

/// What there is to read.
pub(crate) enum Next {
    /// The oldest packet.
    Packet(ListArc<Packet>),
    /// Nothing.
    Empty,
    /// A [`Sieve`] has the packets just now.
    Sieved,
}

/// Unread packets, in the order in which they came.
///
/// # Invariants
///
/// `len`, `cost`, `timeouts` and `by_agent` count the packets in `packets` and in the [`Sieve`], if there is one.
/// Positions increase.
pub(crate) struct RecvQueue {
    packets: List<Packet>,
    len: usize,
    cost: usize,
    timeouts: usize,
    by_agent: [usize; MAX_AGENTS],
    next_position: u64,
    sieved: bool,
}

impl RecvQueue {
    /// An empty queue.
    pub(crate) const fn new() -> Self {
        // INVARIANT: There are no packets.
        Self {
            packets: List::new(),
            len: 0,
            cost: 0,
            timeouts: 0,
            by_agent: [0; MAX_AGENTS],
            next_position: 0,
            sieved: false,
        }
    }

    /// Whether there is nothing to read. While packets are sieved, that is not known: some may stay.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Packets that are not read.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many of them are reports of timeouts.
    pub(crate) fn timeouts(&self) -> usize {
        self.timeouts
    }

    /// What they cost, see [`bounds`].
    pub(crate) fn cost(&self) -> usize {
        self.cost
    }

    /// Appends a new packet.
    pub(crate) fn push(&mut self, packet: ListArc<Packet>) {
        packet.set_position(self.next_position);
        // INVARIANT: The position is higher than all before.
        self.next_position += 1;
        self.count(&packet);
        self.packets.push_back(packet);
    }

    /// Takes the oldest packet.
    pub(crate) fn pop(&mut self) -> Next {
        if self.sieved {
            return Next::Sieved;
        }
        match self.packets.pop_front() {
            Some(packet) => {
                self.discount(&packet);
                Next::Packet(packet)
            }
            None => Next::Empty,
        }
    }

    /// Puts a packet back to where [`RecvQueue::pop`] took it from.
    pub(crate) fn put_back(&mut self, packet: ListArc<Packet>) {
        self.count(&packet);
        // INVARIANT: It comes between those with lower and those with higher positions.
        insert(&mut self.packets, packet);
    }

    /// Takes out all packets for good.
    pub(crate) fn take(&mut self) -> List<Packet> {
        // INVARIANT: What a sieve has is not counted any more, and is dropped with it.
        self.len = 0;
        self.cost = 0;
        self.timeouts = 0;
        self.by_agent = [0; MAX_AGENTS];
        self.sieved = false;
        core::mem::replace(&mut self.packets, List::new())
    }

    /// Lends all packets out, to look through them without the lock; `None` if none is of the agent
    /// id, or the queue is lent out already.
    pub(crate) fn begin_sieve(&mut self, id: AgentId) -> Option<Sieve> {
        if self.sieved || self.by_agent(id) == 0 {
            return None;
        }
        self.sieved = true;
        Some(Sieve {
            id,
            count: 0,
            cost: 0,
            timeouts: 0,
            kept: core::mem::replace(&mut self.packets, List::new()),
            removed: List::new(),
        })
    }

    /// Takes back what a sieve has kept. Returns what it has not.
    pub(crate) fn end_sieve(&mut self, sieve: Sieve) -> List<Packet> {
        let Sieve {
            id,
            mut kept,
            mut removed,
            count,
            cost,
            timeouts,
        } = sieve;
        if !core::mem::replace(&mut self.sieved, false) {
            // The queue was taken meanwhile: the file is closed or its device gone.
            removed.push_all_back(&mut kept);
            return removed;
        }
        self.len -= count;
        self.cost -= cost;
        self.timeouts -= timeouts;
        if let Some(of_agent) = self.by_agent.get_mut(id.index()) {
            *of_agent -= count;
        }
        // What came meanwhile is new, but for what was put back: that is older, and stands first.
        let mut newer = core::mem::replace(&mut self.packets, kept);
        let last = self
            .packets
            .cursor_back()
            .peek_prev()
            .map(|last| last.position());
        while let Some(packet) = newer.pop_front() {
            if last.is_some_and(|last| packet.position() < last) {
                insert(&mut self.packets, packet);
            } else {
                self.packets.push_back(packet);
                break;
            }
        }
        self.packets.push_all_back(&mut newer);
        removed
    }

    /// Whether there are packets of an agent id.
    pub(crate) fn may_have(&self, id: AgentId) -> bool {
        self.by_agent(id) > 0
    }

    fn by_agent(&self, id: AgentId) -> usize {
        self.by_agent.get(id.index()).copied().unwrap_or(0)
    }

    fn count(&mut self, packet: &Packet) {
        self.len += 1;
        self.cost += packet.cost();
        self.timeouts += usize::from(packet.is_timeout());
        if let Some(count) = self.by_agent.get_mut(packet.seat().id().index()) {
            *count += 1;
        }
    }

    fn discount(&mut self, packet: &Packet) {
        self.len -= 1;
        self.cost -= packet.cost();
        self.timeouts -= usize::from(packet.is_timeout());
        if let Some(count) = self.by_agent.get_mut(packet.seat().id().index()) {
            *count -= 1;
        }
    }
}

/// Inserts a packet by its position, which is lower than that of most.
fn insert(packets: &mut List<Packet>, packet: ListArc<Packet>) {
    let mut cursor = packets.cursor_front();
    while cursor
        .peek_next()
        .is_some_and(|next| next.position() < packet.position())
    {
        cursor.move_next();
    }
    cursor.insert(packet);
}

/// All packets of a queue, lent out: looking through 200,000 of them under the file's lock would keep
/// the port's receive handler waiting. Readers wait for it.
#[must_use = "to be given back"]
///
/// # Invariants
///
/// `count` is the number of packets in `removed`, all of which are of the agent id `id`, and `cost`
/// and `timeouts` are theirs.
pub(crate) struct Sieve {
    id: AgentId,
    kept: List<Packet>,
    removed: List<Packet>,
    count: usize,
    cost: usize,
    timeouts: usize,
}

impl Sieve {
    /// Removes every packet of the agent id that `which` says.
    pub(crate) fn remove_all(&mut self, which: impl Fn(&Packet) -> bool) {
        let mut cursor = self.kept.cursor_front();
        loop {
            let Some(next) = cursor.peek_next() else {
                break;
            };
            if next.seat().id() == self.id && which(&next) {
                // INVARIANT: One more, of the same id.
                self.count += 1;
                self.cost += next.cost();
                self.timeouts += usize::from(next.is_timeout());
                self.removed.push_back(next.remove());
            } else {
                cursor.move_next();
            }
        }
    }
}

#[kernel::prelude::kunit_tests(umad_queue)]
mod tests {
    use super::*;
    use crate::{
        packet::tests::{
            tid,
            unanswered, //
        },
        seat::Seat, //
    };
    use kernel::prelude::*;

    fn packet(id: u32, tid: u64) -> Result<ListArc<Packet>> {
        unanswered(Seat::new(AgentId::from_user(id)?, 1), tid)
    }

    /// A queue of packets with the transaction ids 0, 1, ..., of these agents.
    fn queue_of(agents: &[u32]) -> Result<RecvQueue> {
        let mut queue = RecvQueue::new();
        for (tid, id) in (0..).zip(agents) {
            queue.push(packet(*id, tid)?);
        }
        Ok(queue)
    }

    fn pop(queue: &mut RecvQueue) -> Result<ListArc<Packet>> {
        match queue.pop() {
            Next::Packet(packet) => Ok(packet),
            Next::Empty => Err(ENOENT),
            Next::Sieved => Err(EBUSY),
        }
    }

    /// Whether the queue holds exactly these, in this order, and counts them right.
    fn holds(queue: &mut RecvQueue, tids: &[u64]) -> bool {
        queue.len == tids.len()
            && queue.cost == tids.len() * crate::bounds::timeout_cost()
            && queue.by_agent.iter().sum::<usize>() == tids.len()
            && tids
                .iter()
                .all(|want| pop(queue).is_ok_and(|packet| tid(&packet) == Some(*want)))
            && matches!(queue.pop(), Next::Empty)
            && queue.is_empty()
            && queue.cost == 0
            && queue.by_agent.iter().all(|count| *count == 0)
    }

    #[test]
    fn first_in_first_out() -> Result {
        assert!(holds(&mut queue_of(&[])?, &[]));
        assert!(holds(&mut queue_of(&[0, 1, 0, 2])?, &[0, 1, 2, 3]));
        Ok(())
    }

    #[test]
    fn what_is_put_back_stands_where_it_stood() -> Result {
        let mut queue = queue_of(&[0, 0, 1, 1])?;
        let (a, b, c) = (pop(&mut queue)?, pop(&mut queue)?, pop(&mut queue)?);
        queue.put_back(b);
        queue.push(packet(0, 4)?);
        queue.put_back(c);
        queue.put_back(a);
        assert!(holds(&mut queue, &[0, 1, 2, 3, 4]));
        Ok(())
    }

    #[test]
    fn what_is_put_back_to_an_empty_queue_is_there() -> Result {
        let mut queue = queue_of(&[0])?;
        let packet = pop(&mut queue)?;
        assert!(queue.is_empty());
        queue.put_back(packet);
        assert!(holds(&mut queue, &[0]));
        Ok(())
    }

    #[test]
    fn a_sieve_removes_what_it_is_told_of_its_agent() -> Result {
        let mut queue = queue_of(&[0, 1, 0, 1, 1])?;
        let mut sieve = queue.begin_sieve(AgentId::from_user(1)?).ok_or(ENOENT)?;
        sieve.remove_all(|packet| tid(packet) != Some(3));
        let removed = queue.end_sieve(sieve);
        assert_eq!(removed.iter().count(), 2);
        assert!(holds(&mut queue, &[0, 2, 3]));
        Ok(())
    }

    #[test]
    fn nothing_is_lost_while_a_sieve_has_the_packets() -> Result {
        let mut queue = queue_of(&[0, 1, 0, 1])?;
        // Readers have the first and the third, and bring them back meanwhile.
        let (first, second, third) = (pop(&mut queue)?, pop(&mut queue)?, pop(&mut queue)?);
        queue.put_back(second);
        let mut sieve = queue.begin_sieve(AgentId::from_user(1)?).ok_or(ENOENT)?;
        assert!(matches!(queue.pop(), Next::Sieved));
        assert!(!queue.is_empty());
        assert!(queue.begin_sieve(AgentId::from_user(1)?).is_none());
        queue.push(packet(1, 4)?);
        queue.put_back(third);
        queue.put_back(first);
        sieve.remove_all(|packet| tid(packet) == Some(1));
        drop(queue.end_sieve(sieve));
        assert!(holds(&mut queue, &[0, 2, 3, 4]));
        Ok(())
    }

    #[test]
    fn a_sieve_that_removes_everything_leaves_what_came_meanwhile() -> Result {
        let mut queue = queue_of(&[1, 1])?;
        let mut sieve = queue.begin_sieve(AgentId::from_user(1)?).ok_or(ENOENT)?;
        queue.push(packet(1, 2)?);
        sieve.remove_all(|_| true);
        drop(queue.end_sieve(sieve));
        assert!(holds(&mut queue, &[2]));
        Ok(())
    }

    #[test]
    fn no_sieve_for_an_agent_without_packets() -> Result {
        let mut queue = queue_of(&[0, 0])?;
        assert!(queue.begin_sieve(AgentId::from_user(1)?).is_none());
        assert!(holds(&mut queue, &[0, 1]));
        Ok(())
    }

    #[test]
    fn a_queue_that_is_taken_from_a_sieve_stays_empty() -> Result {
        let mut queue = queue_of(&[1, 0])?;
        let mut sieve = queue.begin_sieve(AgentId::from_user(1)?).ok_or(ENOENT)?;
        assert_eq!(queue.take().iter().count(), 0);
        sieve.remove_all(|_| true);
        assert_eq!(queue.end_sieve(sieve).iter().count(), 2);
        assert!(holds(&mut queue, &[]));
        Ok(())
    }
}
