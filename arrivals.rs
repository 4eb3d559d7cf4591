// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Received MADs on their way into the queue.
//!
//! A packet tells the way back to its sender. On RoCE the network is asked for it, which can take a
//! second, and the port's receive handler, on which all who receive on the port depend, must not wait
//! for that. So the answers are remembered for the port ([`Ways`]); and a MAD from a sender that is not
//! remembered, or not any more, goes to a work item of its file, which asks. All MADs that come for the
//! file while that is busy line up behind, so that a file's packets stay in the order in which they came.
//!
//! Locking: [`Arrivals`] is guarded by the file's lock, [`Ways`] is a spinlock that is taken with no
//! other held.

#![forbid(unsafe_code)]

use crate::{
    cache::{
        Cache,
        Room, //
    },
    packet::Packet,
    rdma::{
        address::GlobalRoute,
        changes::{
            Changes,
            Epoch,
            OwnGid, //
        },
        device::LiveDevice,
        recv::{
            GlobalSource,
            Known,
            Source,
            SourceKey, //
        }, //
    }, //
};
use kernel::{
    list::{
        List,
        ListArc, //
    },
    new_spinlock,
    prelude::*,
    sync::SpinLock, //
};

/// The MADs of a file whose way back is being found, and those behind them.
pub(crate) struct Arrivals {
    waiting: List<Packet>,
    len: usize,
    cost: usize,
    /// The work item has been asked to run, and has not found the list empty since.
    busy: bool,
}

impl Arrivals {
    /// None.
    pub(crate) const fn new() -> Self {
        Self {
            waiting: List::new(),
            len: 0,
            cost: 0,
            busy: false,
        }
    }

    /// Whether a packet has to line up, even if its own way back is known.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// How many line up.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What they cost, see [`crate::bounds`].
    pub(crate) fn cost(&self) -> usize {
        self.cost
    }

    /// Lets a packet line up. Returns whether the work item must be asked to run.
    pub(crate) fn push(&mut self, packet: ListArc<Packet>) -> bool {
        self.cost += packet.cost();
        self.waiting.push_back(packet);
        self.len += 1;
        !core::mem::replace(&mut self.busy, true)
    }

    /// The next packet; `None` ends the work.
    pub(crate) fn pop(&mut self) -> Option<ListArc<Packet>> {
        let next = self.waiting.pop_front();
        match &next {
            Some(packet) => {
                self.len -= 1;
                self.cost -= packet.cost();
            }
            None => self.busy = false,
        }
        next
    }

    /// Takes out all.
    pub(crate) fn take(&mut self) -> List<Packet> {
        self.len = 0;
        self.cost = 0;
        core::mem::replace(&mut self.waiting, List::new())
    }
}

type Remembered = Cache<5, (Known, Epoch)>;

/// Ways back that were found for a port.
#[pin_data]
pub(crate) struct Ways {
    #[pin]
    remembered: SpinLock<Remembered>,
}

impl Ways {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            remembered <- new_spinlock!(Cache::new(), "Ways::remembered"),
        })
    }

    /// The way back, if it is remembered and still the same. Does not sleep.
    pub(crate) fn recall(
        &self,
        changes: &Changes,
        source: &GlobalSource<'_>,
    ) -> Option<GlobalRoute> {
        let key = source.key()?;
        let (known, epoch) = *self.remembered.lock().get(&key.words())?;
        let own = source.own_gid(known.gid_index)?;
        (own.gid() == *key.own_gid() && epoch.is_current(changes, &own))
            .then(|| source.route(&key, known))
    }

    /// Finds the way back, and remembers it. Sleeps up to about a second.
    ///
    /// # Errors
    ///
    /// That there is none.
    pub(crate) fn find(
        &self,
        device: &LiveDevice,
        port: u32,
        source: &Source,
    ) -> Result<GlobalRoute> {
        let Some(key) = source.key() else {
            return source.find(device, port);
        };
        // What changes after its epoch was taken makes an answer an old one; and for that the index of
        // the own GID must be known first.
        let stale = self.remembered.lock().get(&key.words()).copied();
        let mut index = stale.map(|(known, _)| known.gid_index);
        let mut global = None;
        for _ in 0..2 {
            let own = index.and_then(|index| OwnGid::get(device, port, index));
            let epoch = own
                .filter(|own| own.gid() == *key.own_gid())
                .and_then(|own| Epoch::of_network(device, &own));
            let found = source.find(device, port)?;
            if let (true, Some(epoch)) = (index == Some(found.gid_index), epoch) {
                let known = Known {
                    gid_index: found.gid_index,
                    hop_limit: found.hop_limit,
                };
                self.remember(key, known, epoch);
                return Ok(found);
            }
            index = Some(found.gid_index);
            global = Some(found);
        }
        global.ok_or(EAGAIN)
    }

    fn remember(&self, key: &SourceKey, known: Known, epoch: Epoch) {
        let needs_room = self.remembered.lock().needs_room();
        let room = if needs_room { Room::new().ok() } else { None };
        let mut remembered = self.remembered.lock();
        let unused = room.and_then(|room| remembered.enlarge(room));
        remembered.put(key.words(), (known, epoch));
        drop(remembered);
        drop(unused);
    }
}
