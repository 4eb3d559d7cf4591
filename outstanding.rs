// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The outstanding sends of a file, by what makes two of them the same transaction.
//!
//! A second send with the transaction id and class of one that is not done yet is refused: a request
//! if the first is a request, a response if the first is a response to the same port. RMPP segments
//! of an agent that does RMPP itself are not refused, since they all have one transaction id, but they
//! are counted. The cost does not grow with the number of sends.
//!
//! When a send is done:
//! - a request as soon as its response can be read, or its timeout, or it failed. `ib_mad` completes it
//!   only behind its response, so the list tells those that are answered from those that are not;
//! - a response that is sent by RMPP or that waits for an answer of its own: when `ib_mad` completes it
//!   (for RMPP, with the last acknowledgement, which may come after the other side has read it all);
//! - any other response at once: the requester may have seen it as soon as it is posted.
//!
//! Locking: all of it is guarded by the file's lock. What methods return is to be dropped after that is
//! let go.

#![forbid(unsafe_code)]

use crate::{
    chrdev::random::random_u64,
    rdma::mad::MadHeader,
    uapi::PacketHeader, //
};
use kernel::prelude::*;

/// What makes two sends the same transaction, as numbers.
///
/// Requests of a file are told apart by transaction id and class alone; responses also by whom they go
/// to: a GID if they have a GRH, else a LID.
#[derive(Clone, Copy)]
pub(crate) struct SendKey {
    tid: u64,
    class_and_lid: u64,
    gid: [u64; 2],
}

impl SendKey {
    /// The key of a MAD, with the transaction id that it is sent with.
    pub(crate) fn new(header: &PacketHeader, mad: &MadHeader, is_response: bool) -> Self {
        const RESPONSE: u64 = 1 << 32;
        const GLOBAL: u64 = 1 << 33;
        let class = u64::from(mad.mgmt_class()) << 16;
        let (class_and_lid, gid) = if !is_response {
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

    /// The key of the request that a response is the answer to.
    pub(crate) fn answered_by(mad: &MadHeader) -> Self {
        Self {
            tid: mad.tid(),
            class_and_lid: u64::from(mad.mgmt_class()) << 16,
            gid: [0; 2],
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let [high, low] = self.gid;
        let [other_high, other_low] = other.gid;
        // Most keys differ in the first word; all of it is a few instructions, and no call.
        self.tid == other.tid
            && self.class_and_lid == other.class_and_lid
            && high == other_high
            && low == other_low
    }
}

/// A place of a [`Table`].
#[derive(Clone, Copy)]
struct Slot {
    key: SendKey,
    /// Sends with the key; 0 for a free place.
    count: u32,
    /// How many of them are answered, but not completed yet.
    answered: u32,
}

impl Slot {
    fn waits(&self) -> bool {
        self.count > self.answered
    }

    /// One send with the key is done. Those that are answered are done first, as they wait for nothing.
    fn subtract(&mut self) {
        self.count = self.count.saturating_sub(1);
        self.answered = self.answered.saturating_sub(1);
    }
}

/// Sends by key, in places that follow from the keys: each stands in the first place that was free from
/// its own on. At most half of the places are taken, so that few must be looked at.
///
/// # Invariants
///
/// The number of places is a power of two, or 0. Between the place that follows from a key and the one
/// that it stands in, none is free.
struct Table {
    slots: KVVec<Slot>,
    taken: usize,
    /// Odd, and random, one for each word of a key, so that no program can make its keys follow to the
    /// same place.
    factors: [u64; 4],
}

impl Table {
    const fn new() -> Self {
        // INVARIANT: There are no places.
        Self {
            slots: KVVec::new(),
            taken: 0,
            factors: [1; 4],
        }
    }

    fn with_places(places: usize) -> Result<Self> {
        const FREE: Slot = Slot {
            key: SendKey {
                tid: 0,
                class_and_lid: 0,
                gid: [0; 2],
            },
            count: 0,
            answered: 0,
        };
        let mut slots = KVVec::with_capacity(places, GFP_KERNEL_ACCOUNT)?;
        slots.extend_with(places, FREE, GFP_KERNEL_ACCOUNT)?;
        // INVARIANT: All are free; the callers ask for powers of two.
        Ok(Self {
            slots,
            taken: 0,
            factors: [(); 4].map(|()| random_u64() | 1),
        })
    }

    fn places(&self) -> usize {
        self.slots.len()
    }

    /// The place that follows from a key; 0 if there is none.
    fn place_of(&self, key: &SendKey) -> usize {
        let [high, low] = key.gid;
        let hash = [key.tid, key.class_and_lid, high, low]
            .into_iter()
            .zip(self.factors)
            .fold(0u64, |hash, (word, factor)| {
                hash.wrapping_add(word.wrapping_mul(factor))
            });
        // The highest bits depend on all of the key. CAST: What is left is below the number of places.
        let bits = self.places().trailing_zeros();
        hash.checked_shr(u64::BITS.saturating_sub(bits))
            .unwrap_or(0) as usize
    }

    /// The place after another one.
    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.places() - 1)
    }

    /// The place that a key stands in, or the free one that it would.
    fn find(&mut self, key: &SendKey) -> Option<(usize, &mut Slot)> {
        let mut place = self.place_of(key);
        loop {
            match self.slots.get(place) {
                Some(slot) if slot.count != 0 && !slot.key.is_same(key) => {
                    place = self.after(place);
                }
                Some(_) => return self.slots.get_mut(place).map(|slot| (place, slot)),
                None => return None,
            }
        }
    }

    /// Adds to the counts of a key. The caller sees to it that there is room.
    fn add(&mut self, key: SendKey, count: u32, answered: u32) {
        if let Some((_, slot)) = self.find(&key) {
            // INVARIANT: It is the first free place from its own on, or its own.
            let was_free = slot.count == 0;
            slot.key = key;
            slot.count += count;
            slot.answered += answered;
            self.taken += usize::from(was_free);
        }
    }

    /// Takes one from the counts of a key, if it is there.
    fn subtract(&mut self, key: &SendKey) {
        let Some((mut hole, slot)) = self.find(key) else {
            return;
        };
        if slot.count == 0 {
            return;
        }
        slot.subtract();
        if slot.count > 0 {
            return;
        }
        self.taken -= 1;
        // INVARIANT: Whoever stands behind the hole, and could stand in it, moves there.
        let mut place = hole;
        loop {
            place = self.after(place);
            let Some(slot) = self.slots.get(place).copied().filter(|slot| slot.count > 0) else {
                break;
            };
            let mask = self.places() - 1;
            let from_own = place.wrapping_sub(self.place_of(&slot.key)) & mask;
            let from_hole = place.wrapping_sub(hole) & mask;
            if from_own >= from_hole {
                if let Some(to) = self.slots.get_mut(hole) {
                    *to = slot;
                }
                if let Some(freed) = self.slots.get_mut(place) {
                    (freed.count, freed.answered) = (0, 0);
                }
                hole = place;
            }
        }
    }
}

/// What no class and LID are.
const GONE: u64 = u64::MAX;

/// Places of a file's first table.
pub(crate) const FIRST_PLACES: usize = 32;
/// So many places of the former table are emptied with each send.
const STEPS: usize = 16;

/// Memory for a larger table.
pub(crate) struct Room(Table);

impl Room {
    /// Gets the memory, charged to the caller. `places` is what [`Outstanding::wanted_places`] said.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(places: usize) -> Result<Self> {
        Ok(Self(Table::with_places(places)?))
    }
}

/// Why a send could not be listed.
pub(crate) enum NoRoom {
    /// The former table is in the way; some of it is moved now, and it may be tried again.
    Moving(Unneeded),
    /// A table of so many places is needed.
    Places(usize),
}

/// Memory that is not needed any more.
#[must_use = "to be dropped after unlocking"]
pub(crate) struct Unneeded {
    _table: Option<Table>,
}

/// The outstanding sends: how many there are of each key.
///
/// When the table gets too small, a larger one takes its place, and what is in the former one moves a
/// few places at a time, so that no call takes long.
pub(crate) struct Outstanding {
    table: Table,
    /// Its places below `moved` are moved; those are still marked as taken.
    former: Table,
    moved: usize,
}

impl Outstanding {
    /// No sends, and no room for any.
    pub(crate) const fn new() -> Self {
        Self {
            table: Table::new(),
            former: Table::new(),
            moved: 0,
        }
    }

    /// How many places a larger table should have; 0 if there is room enough.
    pub(crate) fn wanted_places(&self) -> usize {
        let places = self.table.places();
        if self.former.places() > 0 || (self.table.taken + 1) * 2 <= places {
            0
        } else {
            (places * 2).max(FIRST_PLACES)
        }
    }

    /// Takes a larger table.
    pub(crate) fn enlarge(&mut self, room: Room) -> Unneeded {
        if self.wanted_places() == 0 || room.0.places() <= self.table.places() {
            return Unneeded {
                _table: Some(room.0),
            };
        }
        let former = core::mem::replace(&mut self.table, room.0);
        self.moved = 0;
        let none = core::mem::replace(&mut self.former, former);
        Unneeded { _table: Some(none) }
    }

    /// Moves some of the former table. Returns it when it is empty.
    fn move_some(&mut self) -> Option<Table> {
        for _ in 0..STEPS {
            let slot = *self.former.slots.get(self.moved)?;
            if slot.count > 0 {
                self.former.taken = self.former.taken.saturating_sub(1);
                if slot.key.class_and_lid != GONE {
                    self.table.add(slot.key, slot.count, slot.answered);
                }
            }
            self.moved += 1;
            if self.moved == self.former.places() {
                return Some(core::mem::replace(&mut self.former, Table::new()));
            }
        }
        None
    }

    /// The place of a key in the former table, if it is there and not moved.
    fn in_former(&mut self, key: &SendKey) -> Option<&mut Slot> {
        if self.former.places() == 0 {
            return None;
        }
        let moved = self.moved;
        let (place, slot) = self.former.find(key)?;
        (slot.count > 0 && place >= moved).then_some(slot)
    }

    /// Whether a send with this key is outstanding, and not answered.
    pub(crate) fn contains(&mut self, key: &SendKey) -> bool {
        self.table.find(key).is_some_and(|(_, slot)| slot.waits())
            || self.in_former(key).is_some_and(|slot| slot.waits())
    }

    /// One request with this key, if there is one, is answered.
    pub(crate) fn answer(&mut self, key: &SendKey) {
        // What is in the former table is older.
        if let Some(slot) = self.in_former(key).filter(|slot| slot.waits()) {
            slot.answered += 1;
        } else if let Some((_, slot)) = self.table.find(key).filter(|(_, slot)| slot.waits()) {
            slot.answered += 1;
        }
    }

    /// Lists a send.
    ///
    /// # Errors
    ///
    /// That there is no room: there was no memory for more, or many came at the same time.
    pub(crate) fn insert(&mut self, key: SendKey) -> core::result::Result<Unneeded, NoRoom> {
        // More are tolerated than are wanted, but there must be a free place to end each search.
        if (self.table.taken + self.former.taken + 1) * 8 > self.table.places() * 7 {
            return Err(if self.former.places() > 0 {
                NoRoom::Moving(Unneeded {
                    _table: self.move_some(),
                })
            } else {
                NoRoom::Places(self.wanted_places())
            });
        }
        self.table.add(key, 1, 0);
        Ok(Unneeded {
            _table: self.move_some(),
        })
    }

    /// Takes one from the counts of a key in the former table, if one is there that is not answered later
    /// than one in the other table. What is gone there is marked by a key that no MAD has: places below
    /// `moved` and those behind them must stay as they are.
    fn remove_former(&mut self, key: &SendKey) -> bool {
        if self.former.places() == 0 {
            return false;
        }
        let answered = self
            .table
            .find(key)
            .is_some_and(|(_, slot)| slot.answered > 0);
        let Some(slot) = self.in_former(key) else {
            return false;
        };
        if answered && slot.answered == 0 {
            return false;
        }
        slot.subtract();
        if slot.count == 0 {
            slot.count = 1;
            slot.key.class_and_lid = GONE;
        }
        true
    }

    /// Takes a send off the list: one that is answered, if there is one. The table keeps its places: who
    /// had many sends outstanding will again.
    pub(crate) fn remove(&mut self, key: &SendKey) {
        if !self.remove_former(key) {
            self.table.subtract(key);
        }
    }
}

#[kunit_tests(umad_outstanding)]
mod tests {
    use super::*;
    use crate::rdma::mad::MAD_HDR_LEN;
    use zerocopy::FromZeros;

    fn header(class: u8, tid: u64) -> MadHeader {
        let mut mad = [0; MAD_HDR_LEN];
        let [_, mgmt_class, _, _, _, _, _, _, at_tid @ .., _, _, _, _, _, _, _, _] = &mut mad;
        *mgmt_class = class;
        *at_tid = tid.to_be_bytes();
        MadHeader::from_array(mad)
    }

    /// The key of a request, or of a response, to a LID, or to a GID that ends in `gid`.
    fn key(is_response: bool, class: u8, tid: u64, lid: u16, gid: Option<u8>) -> SendKey {
        let mut header = PacketHeader::new_zeroed();
        header.lid_be = lid.to_be();
        if let Some(gid) = gid {
            header.grh_present = 1;
            let [.., last] = &mut header.gid;
            *last = gid;
        }
        SendKey::new(&header, &self::header(class, tid), is_response)
    }

    fn request(tid: u64) -> SendKey {
        key(false, 0x30, tid, 1, None)
    }

    /// Lists a send as a writer does: with more room first, if that is wanted.
    fn insert(sends: &mut Outstanding, key: SendKey) -> Result {
        let places = sends.wanted_places();
        if places > 0 {
            drop(sends.enlarge(Room::new(places)?));
        }
        drop(sends.insert(key).map_err(|_| ENOMEM)?);
        Ok(())
    }

    #[test]
    fn requests_differ_by_transaction_id_and_class() {
        let one = request(7);
        assert!(one.is_same(&key(false, 0x30, 7, 2, Some(3))));
        assert!(!one.is_same(&request(8)));
        assert!(!one.is_same(&request(7 | 1 << 32)));
        assert!(!one.is_same(&key(false, 0x31, 7, 1, None)));
    }

    #[test]
    fn responses_differ_by_destination_as_well() {
        let one = key(true, 0x30, 7, 1, None);
        assert!(one.is_same(&key(true, 0x30, 7, 1, None)));
        assert!(!one.is_same(&key(true, 0x30, 7, 2, None)));
        assert!(!one.is_same(&request(7)));
        let routed = key(true, 0x30, 7, 1, Some(9));
        assert!(!routed.is_same(&one));
        // With a GRH the LID is only the way.
        assert!(routed.is_same(&key(true, 0x30, 7, 2, Some(9))));
        assert!(!routed.is_same(&key(true, 0x30, 7, 1, Some(8))));
    }

    #[test]
    fn sends_of_one_key_are_counted() -> Result {
        let mut sends = Outstanding::new();
        let key = request(7);
        assert!(!sends.contains(&key));
        for _ in 0..3 {
            insert(&mut sends, key)?;
        }
        for _ in 0..2 {
            sends.remove(&key);
            assert!(sends.contains(&key));
        }
        sends.remove(&key);
        assert!(!sends.contains(&key));
        // One that is not listed.
        sends.remove(&key);
        assert!(!sends.contains(&key));
        Ok(())
    }

    #[test]
    fn an_answered_request_is_not_in_the_way_of_the_next() -> Result {
        let mut sends = Outstanding::new();
        let key = request(7);
        // None is there.
        sends.answer(&key);
        assert!(!sends.contains(&key));
        insert(&mut sends, key)?;
        sends.answer(&SendKey::answered_by(&header(0x31, 7)));
        sends.answer(&SendKey::answered_by(&header(0x30, 8)));
        assert!(sends.contains(&key));
        sends.answer(&SendKey::answered_by(&header(0x30, 7)));
        assert!(!sends.contains(&key));
        // The next one is outstanding, also when the first one is done.
        insert(&mut sends, key)?;
        assert!(sends.contains(&key));
        sends.remove(&key);
        assert!(sends.contains(&key));
        sends.remove(&key);
        assert!(!sends.contains(&key));
        assert_eq!(sends.table.taken, 0);
        Ok(())
    }

    /// The same for requests that stand in both tables, or in the former one.
    #[test]
    fn an_answered_request_stays_so_while_it_moves() -> Result {
        const OLD: u64 = 16;
        let mut sends = Outstanding::new();
        for tid in 0..OLD {
            insert(&mut sends, request(tid))?;
        }
        for tid in 0..OLD {
            sends.answer(&request(tid));
        }
        drop(sends.enlarge(Room::new(FIRST_PLACES * 2)?));
        // Each of these moves some of the others.
        for tid in 0..OLD {
            assert!(!sends.contains(&request(tid)));
            drop(sends.insert(request(tid)).map_err(|_| ENOMEM)?);
            assert!(sends.contains(&request(tid)));
            sends.remove(&request(tid));
            assert!(sends.contains(&request(tid)));
        }
        for tid in 0..OLD {
            sends.remove(&request(tid));
            assert!(!sends.contains(&request(tid)));
        }
        assert_eq!(sends.table.taken, 0);
        Ok(())
    }

    #[test]
    fn without_room_a_send_is_refused_and_the_others_stay() -> Result {
        let mut sends = Outstanding::new();
        assert!(sends.insert(request(0)).is_err());
        assert!(!sends.contains(&request(0)));
        drop(sends.enlarge(Room::new(FIRST_PLACES)?));
        let listed = (0..1000)
            .take_while(|tid| sends.insert(request(*tid)).is_ok())
            .count();
        assert!(listed >= FIRST_PLACES / 2 && listed < FIRST_PLACES);
        assert_eq!(
            (0..1000)
                .filter(|tid| sends.contains(&request(*tid)))
                .count(),
            listed
        );
        Ok(())
    }

    #[test]
    fn a_room_that_came_too_late_changes_nothing() -> Result {
        let mut sends = Outstanding::new();
        drop(sends.enlarge(Room::new(FIRST_PLACES)?));
        insert(&mut sends, request(1))?;
        drop(sends.enlarge(Room::new(FIRST_PLACES)?));
        drop(sends.enlarge(Room::new(FIRST_PLACES * 4)?));
        assert!(sends.contains(&request(1)));
        Ok(())
    }

    /// Sends come and go at random, while the table grows; a plain list of counts is the measure.
    #[test]
    fn it_agrees_with_a_list_of_counts() -> Result {
        const KEYS: usize = 600;
        let mut counts = KVec::with_capacity(KEYS, GFP_KERNEL)?;
        counts.extend_with(KEYS, 0u32, GFP_KERNEL)?;
        let mut sends = Outstanding::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut wrong = 0;
        for step in 0..6000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // First mostly more, then mostly fewer. CAST: Small numbers.
            let add = random >> 60 < if step < 3000 { 11 } else { 5 };
            let tid = (random >> 20) % KEYS as u64;
            let Some(count) = counts.get_mut(tid as usize) else {
                return Err(EINVAL);
            };
            if add {
                insert(&mut sends, request(tid))?;
                *count += 1;
            } else {
                sends.remove(&request(tid));
                *count = count.saturating_sub(1);
            }
            wrong += usize::from(sends.contains(&request(tid)) != (*count > 0));
            if step % 500 == 0 {
                wrong += (0..)
                    .zip(counts.iter())
                    .filter(|(tid, count)| sends.contains(&request(*tid)) != (**count > 0))
                    .count();
            }
        }
        assert_eq!(wrong, 0);
        for (tid, count) in (0..).zip(counts.iter()) {
            for _ in 0..*count {
                sends.remove(&request(tid));
            }
        }
        assert!(!(0..KEYS as u64).any(|tid| sends.contains(&request(tid))));
        assert_eq!(sends.table.taken, 0);
        Ok(())
    }
}
