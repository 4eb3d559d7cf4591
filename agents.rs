// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The agents of a file: their table, and what happens when `ib_mad` calls one.
//!
//! Life cycle of an agent: its id is reserved (the lowest free one), it is registered with `ib_mad`,
//! published in the table, and its id told to the program. It is taken out of the table, and then
//! retired, by whoever comes first: UNREGISTER_AGENT, the file's last close, or the removal of the
//! device. Retiring waits for writers that are in the middle of a send, and for handlers.
//!
//! An id is given out again after its agent is gone, so a packet names its agent's [`Seat`].
//!
//! Locking: [`AgentTable`] is guarded by the file's lock. Handlers take that lock and no other.

#![forbid(unsafe_code)]

use crate::{
    chrdev::coverage::OnBehalfOf,
    file::UmadFile,
    packet::{
        local_header,
        Packet,
        Sender, //
    },
    rdma::{
        agent::{
            Agent,
            MadHandler,
            Registration,
            SendStatus, //
        },
        mad::MadHeader,
        recv::{
            RecvInfo,
            RecvMad,
            WayBack, //
        },
        revocable::{
            Owner,
            User, //
        },
        trace::{
            self,
            DropReason, //
        }, //
    },
    seat::{
        AgentId,
        Seat, //
    },
    uapi::MAX_AGENTS, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A registered agent of a file.
pub(crate) type FileAgent = Agent<Handler>;

enum State {
    Free,
    /// Its registration is under way; MADs may come already.
    Reserved,
    Live(Owner<FileAgent>),
}

struct Slot {
    state: State,
    /// The last registration that had this id.
    registration: u64,
    /// Packets of earlier registrations than this are not to be read any more.
    readable_from: u64,
    /// A registration that was undone, since the program could not be told its id.
    undone: Option<u64>,
}

/// Agents by id.
///
/// It has slots for the ids that were in use so far: most files never have more than a few.
pub(crate) struct AgentTable {
    slots: KVec<Slot>,
}

/// All agents of a file that is closed or lost its device.
#[must_use = "to be retired"]
pub(crate) struct Evicted(KVec<Slot>);

impl Evicted {
    /// Retires them all: sleeps until the last one is unregistered.
    pub(crate) fn retire(self) {
        for slot in self.0 {
            if let State::Live(agent) = slot.state {
                agent.retire();
            }
        }
    }
}

/// The outcome of a wish for an id.
pub(crate) enum Reserved {
    /// The lowest free one.
    Seat(Seat),
    /// There must be more slots first, see [`AgentTable::enlarge`].
    NeedsSlots,
    /// There is none.
    Full,
}

/// Memory for slots.
pub(crate) struct Slots(KVec<Slot>);

impl Slots {
    /// Gets the memory, charged to the caller.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(few: bool) -> Result<Self> {
        let count = if few { FEW } else { MAX_AGENTS };
        Ok(Self(KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?))
    }
}

/// So many slots a file gets with its first agent.
const FEW: usize = 2;

impl AgentTable {
    /// A table without agents.
    pub(crate) const fn new() -> Self {
        Self { slots: KVec::new() }
    }

    /// Takes memory for more slots; returns what is to be freed.
    pub(crate) fn enlarge(&mut self, slots: Slots) -> Slots {
        let mut larger = slots.0;
        if larger.capacity() <= self.slots.capacity() {
            return Slots(larger);
        }
        for slot in self.slots.drain_all() {
            // There is room: it is larger.
            let _ = larger.push_within_capacity(slot);
        }
        Slots(core::mem::replace(&mut self.slots, larger))
    }

    /// Whether there are no slots yet.
    pub(crate) fn is_new(&self) -> bool {
        self.slots.is_empty()
    }

    fn slot(&self, id: AgentId) -> Option<&Slot> {
        self.slots.get(id.index())
    }

    fn slot_mut(&mut self, id: AgentId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index())
    }

    /// Reserves the lowest free id.
    pub(crate) fn reserve(&mut self) -> Reserved {
        let free = self
            .slots
            .iter()
            .position(|slot| matches!(slot.state, State::Free));
        let index = match free {
            Some(index) => index,
            None if self.slots.len() >= MAX_AGENTS => return Reserved::Full,
            None => {
                if self.slots.push_within_capacity(Slot::new()).is_err() {
                    return Reserved::NeedsSlots;
                }
                self.slots.len() - 1
            }
        };
        let (Some(id), Some(slot)) = (AgentId::from_index(index), self.slots.get_mut(index)) else {
            return Reserved::Full;
        };
        slot.state = State::Reserved;
        slot.registration += 1;
        Reserved::Seat(Seat::new(id, slot.registration))
    }

    /// Gives a reserved id back.
    pub(crate) fn cancel(&mut self, seat: Seat) {
        if let Some(slot) = self.slot_mut(seat.id()) {
            if matches!(slot.state, State::Reserved) && slot.registration == seat.registration() {
                slot.state = State::Free;
                slot.undone = Some(slot.registration);
            }
        }
    }

    /// Puts an agent into its reserved seat. Gives it back if the seat is not reserved (any more).
    pub(crate) fn publish(
        &mut self,
        seat: Seat,
        agent: Owner<FileAgent>,
    ) -> core::result::Result<(), Owner<FileAgent>> {
        match self.slot_mut(seat.id()) {
            Some(slot)
                if matches!(slot.state, State::Reserved)
                    && slot.registration == seat.registration() =>
            {
                slot.state = State::Live(agent);
                Ok(())
            }
            _ => Err(agent),
        }
    }

    /// The program knows the id now: packets of earlier agents with it are not to be read any more.
    pub(crate) fn confirm(&mut self, seat: Seat) {
        if let Some(slot) = self.slot_mut(seat.id()) {
            slot.readable_from = slot.readable_from.max(seat.registration());
        }
    }

    /// Whether a packet of this seat is still to be read.
    pub(crate) fn is_readable(&self, seat: Seat) -> bool {
        self.slot(seat.id()).is_some_and(|slot| {
            seat.registration() >= slot.readable_from && slot.undone != Some(seat.registration())
        })
    }

    /// Whether new packets of this seat are to be queued.
    pub(crate) fn is_seated(&self, seat: Seat) -> bool {
        self.slot(seat.id()).is_some_and(|slot| {
            slot.registration == seat.registration() && !matches!(slot.state, State::Free)
        })
    }

    /// Whether `ib_mad` does RMPP for the agent with this id; `None` if there is no such agent.
    pub(crate) fn has_kernel_rmpp(&self, id: AgentId) -> Option<bool> {
        match &self.slot(id)?.state {
            State::Live(agent) => Some(agent.kernel_rmpp()),
            _ => None,
        }
    }

    /// What the agent with this id is.
    pub(crate) fn registration(&self, id: AgentId) -> Option<Registration> {
        match &self.slot(id)?.state {
            State::Live(agent) => Some(*agent.registration()),
            _ => None,
        }
    }

    /// The agent with this id, and its seat. It cannot be unregistered until the caller lets go.
    pub(crate) fn get(&self, id: AgentId) -> Option<(User<FileAgent>, Seat)> {
        let slot = self.slot(id)?;
        match &slot.state {
            State::Live(agent) => Some((agent.share(), Seat::new(id, slot.registration))),
            _ => None,
        }
    }

    /// Takes the agent with this id out of the table; the caller is to retire it.
    pub(crate) fn take(&mut self, id: AgentId) -> Option<Owner<FileAgent>> {
        self.slot_mut(id)?.take()
    }

    /// Takes the agent of this seat out of the table, unless that was done already: its registration
    /// is undone.
    pub(crate) fn take_seat(&mut self, seat: Seat) -> Option<Owner<FileAgent>> {
        let slot = self
            .slot_mut(seat.id())
            .filter(|slot| slot.registration == seat.registration())?;
        slot.undone = Some(slot.registration);
        slot.take()
    }

    /// Takes all agents out of the table, and reservations with them.
    pub(crate) fn evict(&mut self) -> Evicted {
        Evicted(core::mem::replace(&mut self.slots, KVec::new()))
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            state: State::Free,
            registration: 0,
            readable_from: 0,
            undone: None,
        }
    }

    /// Takes the agent out, if there is one.
    fn take(&mut self) -> Option<Owner<FileAgent>> {
        match core::mem::replace(&mut self.state, State::Free) {
            State::Live(agent) => Some(agent),
            other => {
                self.state = other;
                None
            }
        }
    }
}

/// Whom `ib_mad` tells about an agent's MADs.
///
/// It keeps the file's memory alive; the file keeps the agent, and with it the handler, until it is
/// closed, so the circle ends there.
pub(crate) struct Handler {
    file: Arc<UmadFile>,
    seat: Seat,
}

impl Handler {
    /// The handler of the agent that is to be seated in `seat`.
    pub(crate) fn new(file: Arc<UmadFile>, seat: Seat) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { file, seat }, GFP_KERNEL)?)
    }
}

impl MadHandler for Handler {
    type Send = Arc<Packet>;

    fn on_behalf_of(&self) -> OnBehalfOf {
        self.file.opener()
    }

    fn sent(&self, send: Arc<Packet>, status: SendStatus) {
        self.file.complete_send(send, status);
    }

    fn received(&self, mad: RecvMad, info: &RecvInfo<'_>, is_answer: bool) {
        let sender = match info.way_back() {
            WayBack::Local => Sender::Local,
            WayBack::Global(source) => match self.file.way_back(&source) {
                Ok(sender) => sender,
                // Nobody could be answered.
                Err(_) => return self.dropped(DropReason::NoWayBack, info, mad.header()),
            },
        };
        let traced = trace::are_drops_traced().then(|| mad.header());
        match Packet::received(self.seat, mad, info, sender) {
            Ok(packet) => UmadFile::queue_received(&self.file, packet, is_answer),
            // No program can be told that a MAD was lost; the sender's timeout does.
            Err(_) => {
                if let Some(header) = traced {
                    self.dropped(DropReason::NoMemory, info, header);
                }
            }
        }
    }
}

impl Handler {
    /// A received MAD does not become a packet.
    #[cold]
    fn dropped(&self, reason: DropReason, info: &RecvInfo<'_>, mad: MadHeader) {
        let port = self.file.port();
        trace::dropped(reason, None, || {
            port.traced(local_header(self.seat, info), mad)
        });
    }
}

#[kunit_tests(umad_agents)]
mod tests {
    use super::*;

    /// Reserves an id, with more slots if need be.
    fn reserve(table: &mut AgentTable) -> Result<Seat> {
        loop {
            match table.reserve() {
                Reserved::Seat(seat) => return Ok(seat),
                Reserved::NeedsSlots => drop(table.enlarge(Slots::new(table.is_new())?)),
                Reserved::Full => return Err(ENOSPC),
            }
        }
    }

    /// Reserves all ids; says whether they came in order.
    fn fill(table: &mut AgentTable) -> bool {
        (0..MAX_AGENTS).all(|id| reserve(table).is_ok_and(|seat| seat.id().index() == id))
    }

    #[test]
    fn ids_come_lowest_first_and_end_at_32() {
        let mut table = AgentTable::new();
        assert!(fill(&mut table));
        assert!(matches!(table.reserve(), Reserved::Full));
    }

    #[test]
    fn more_slots_keep_what_is_there() -> Result {
        let mut table = AgentTable::new();
        assert!(matches!(table.reserve(), Reserved::NeedsSlots));
        let first = reserve(&mut table)?;
        drop(table.enlarge(Slots::new(false)?));
        // Fewer are no use.
        drop(table.enlarge(Slots::new(true)?));
        assert!(table.is_seated(first));
        assert_eq!(reserve(&mut table)?.id().index(), 1);
        Ok(())
    }

    #[test]
    fn an_id_that_is_given_back_is_the_next() -> Result {
        let mut table = AgentTable::new();
        assert!(fill(&mut table));
        let seat = Seat::new(AgentId::from_user(5)?, 1);
        table.cancel(seat);
        assert!(!table.is_seated(seat));
        let next = reserve(&mut table)?;
        assert_eq!(next.id().index(), 5);
        assert!(seat.precedes(next));
        assert!(matches!(table.reserve(), Reserved::Full));
        Ok(())
    }

    #[test]
    fn an_old_seat_cannot_give_back_a_new_one() -> Result {
        let mut table = AgentTable::new();
        let old = reserve(&mut table)?;
        table.cancel(old);
        let new = reserve(&mut table)?;
        table.cancel(old);
        assert!(table.is_seated(new));
        assert!(!table.is_seated(old));
        Ok(())
    }

    #[test]
    fn packets_stay_readable_until_the_id_is_told_again() -> Result {
        let mut table = AgentTable::new();
        let old = reserve(&mut table)?;
        table.confirm(old);
        assert!(table.is_readable(old));
        // As if the agent had lived and were gone.
        if let Some(slot) = table.slot_mut(old.id()) {
            slot.state = State::Free;
        }
        assert!(table.is_readable(old));
        let new = reserve(&mut table)?;
        assert_eq!(new.id().index(), old.id().index());
        assert!(table.is_readable(old));
        table.confirm(new);
        assert!(!table.is_readable(old));
        assert!(table.is_readable(new));
        Ok(())
    }

    #[test]
    fn packets_of_an_undone_registration_are_never_read() -> Result {
        let mut table = AgentTable::new();
        let undone = reserve(&mut table)?;
        assert!(table.is_readable(undone));
        table.cancel(undone);
        assert!(!table.is_readable(undone));
        Ok(())
    }

    #[test]
    fn a_reserved_seat_has_no_agent_yet() -> Result {
        let mut table = AgentTable::new();
        let seat = reserve(&mut table)?;
        assert!(table.is_seated(seat));
        assert!(table.get(seat.id()).is_none());
        assert!(table.take(seat.id()).is_none());
        assert!(table.has_kernel_rmpp(seat.id()).is_none());
        // Not taken out by the attempt.
        assert!(table.is_seated(seat));
        Ok(())
    }

    #[test]
    fn eviction_ends_reservations() -> Result {
        let mut table = AgentTable::new();
        let seat = reserve(&mut table)?;
        table.evict().retire();
        assert!(!table.is_seated(seat));
        assert!(!table.is_readable(seat));
        Ok(())
    }
}
