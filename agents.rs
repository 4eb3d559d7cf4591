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
    file::UmadFile,
    packet::{
        Packet,
        Sender, //
    },
    rdma::{
        agent::{
            Agent,
            MadHandler,
            SendStatus, //
        },
        recv::{
            RecvInfo,
            RecvMad,
            WayBack, //
        },
        revocable::{
            Owner,
            User, //
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
    sync::{
        Arc,
        ArcBorrow, //
    }, //
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
pub(crate) struct AgentTable {
    slots: [Slot; MAX_AGENTS],
}

/// All agents of a file that is closed or lost its device.
pub(crate) type Evicted = [Option<Owner<FileAgent>>; MAX_AGENTS];

impl AgentTable {
    /// A table without agents.
    pub(crate) const fn new() -> Self {
        Self {
            slots: [const {
                Slot {
                    state: State::Free,
                    registration: 0,
                    readable_from: 0,
                    undone: None,
                }
            }; MAX_AGENTS],
        }
    }

    fn slot(&self, id: AgentId) -> Option<&Slot> {
        self.slots.get(id.index())
    }

    fn slot_mut(&mut self, id: AgentId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index())
    }

    /// Reserves the lowest free id; `None` if there is none.
    pub(crate) fn reserve(&mut self) -> Option<Seat> {
        let (index, slot) = self
            .slots
            .iter_mut()
            .enumerate()
            .find(|(_, slot)| matches!(slot.state, State::Free))?;
        let id = AgentId::from_index(index)?;
        slot.state = State::Reserved;
        slot.registration += 1;
        Some(Seat::new(id, slot.registration))
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
        let mut evicted = [const { None }; MAX_AGENTS];
        for (slot, agent) in self.slots.iter_mut().zip(evicted.iter_mut()) {
            *agent = slot.take();
            slot.state = State::Free;
        }
        evicted
    }
}

impl Slot {
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

    fn sent(&self, send: Arc<Packet>, status: SendStatus) {
        self.file.complete_send(send, status);
    }

    fn received(&self, mad: RecvMad, info: &RecvInfo<'_>, request: Option<ArcBorrow<'_, Packet>>) {
        let sender = match info.way_back() {
            WayBack::Local => Sender::Local,
            WayBack::Global(source) => match self.file.way_back(&source) {
                Ok(sender) => sender,
                // Nobody could be answered.
                Err(_) => return,
            },
        };
        // Nobody can be told that a MAD was lost; the sender's timeout does.
        if let Ok(packet) = Packet::received(self.seat, mad, info, sender) {
            UmadFile::queue_received(&self.file, packet, request.as_deref());
        }
    }
}
