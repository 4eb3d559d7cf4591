// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Transaction ids: ibsim writes the number of the client into the upper 16 bits of each request's, and
//! finds by it whom the response is for. So they are saved on the way out and restored on the way back.

use std::collections::{HashMap, VecDeque};

/// The bits that ibsim leaves alone.
const KEPT: u64 = (1 << 48) - 1;
/// Where ids that agree in those bits are made to differ.
const STEP: u64 = 1 << 40;
/// So many steps lead back to where they began.
const STEPS: u64 = 1 << 8;

/// What is to be done with a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// It is for the device.
    #[default]
    Device,
    /// It is for the device, and tells about its own port.
    OwnPort {
        /// The request told clients to register anew.
        reregister: bool,
    },
    /// It answers the device's question with this number.
    Question(u32),
}

/// What is known of a request's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The id that the request had.
    pub tid: u64,
    /// What the response is for.
    pub purpose: Purpose,
}

/// The ids of requests on their way. They are many, but not without bound: the oldest are forgotten.
pub struct Tids {
    limit: usize,
    by_tid: HashMap<u64, u64>,
    by_wire: HashMap<u64, Saved>,
    /// Those on the wire, oldest first.
    order: VecDeque<u64>,
}

impl Tids {
    /// None yet; at most so many.
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            by_tid: HashMap::new(),
            by_wire: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Saves a request's id, and returns the one to send it with. An id that is still known (a retry,
    /// a segment, an acknowledgement) is sent with the same one.
    pub fn save(&mut self, tid: u64, purpose: Purpose) -> u64 {
        if let Some(wire) = self.by_tid.get(&tid) {
            self.by_wire.insert(*wire, Saved { tid, purpose });
            return *wire;
        }
        if self.order.len() >= self.limit {
            if let Some(old) = self.order.pop_front() {
                if let Some(saved) = self.by_wire.remove(&old) {
                    self.by_tid.remove(&saved.tid);
                }
            }
        }
        // There are fewer ids in the table than steps and numbers, so one is free.
        let mut wire = tid & KEPT;
        for n in 1.. {
            if !self.by_wire.contains_key(&wire) {
                break;
            }
            let step = if n % STEPS == 0 { STEP + 1 } else { STEP };
            wire = wire.wrapping_add(step) & KEPT;
        }
        self.by_tid.insert(tid, wire);
        self.by_wire.insert(wire, Saved { tid, purpose });
        self.order.push_back(wire);
        wire
    }

    /// What is known of the id that a response came with.
    pub fn restore(&self, wire: u64) -> Option<Saved> {
        self.by_wire.get(&(wire & KEPT)).copied()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::new(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ibsim does to a request's id.
    fn mark(wire: u64, client: u64) -> u64 {
        wire & KEPT | (client << 48)
    }

    #[test]
    fn saved_and_restored() {
        let mut tids = Tids::new(10);
        let tid = 0x1234_0005_0000_0001;
        let wire = tids.save(tid, Purpose::Device);
        assert_eq!(wire, 0x0005_0000_0001);
        let back = tids.restore(mark(wire, 7)).expect("it is known");
        assert_eq!(back.tid, tid);
        assert_eq!(
            tids.restore(mark(wire, 7)),
            Some(back),
            "each segment of an answer needs it"
        );
        assert_eq!(tids.restore(0x99), None);
    }

    #[test]
    fn retries_and_acknowledgements_keep_the_id() {
        let mut tids = Tids::new(10);
        let wire = tids.save(5, Purpose::Question(1));
        assert_eq!(tids.save(5, Purpose::Device), wire);
        assert_eq!(
            tids.restore(wire).map(|saved| saved.purpose),
            Some(Purpose::Device),
            "the last one counts"
        );
    }

    #[test]
    fn ids_that_agree_in_the_kept_bits_stay_apart() {
        let mut tids = Tids::new(1000);
        let all: Vec<u64> = (0..600).map(|n| (n << 48) | 0xabcd).collect();
        let wires: Vec<u64> = all
            .iter()
            .map(|tid| tids.save(*tid, Purpose::Device))
            .collect();
        for (tid, wire) in all.iter().zip(&wires) {
            assert_eq!(wire & !KEPT, 0);
            assert_eq!(tids.restore(mark(*wire, 3)).map(|s| s.tid), Some(*tid));
        }
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut tids = Tids::new(2);
        let first = tids.save(1, Purpose::Device);
        tids.save(2, Purpose::Device);
        tids.save(1, Purpose::Device);
        tids.save(3, Purpose::Device);
        assert_eq!(tids.restore(first), None);
        assert!(tids.restore(2).is_some() && tids.restore(3).is_some());
        tids.clear();
        assert_eq!(tids.restore(3), None);
    }
}
