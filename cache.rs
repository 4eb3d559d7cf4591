// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A bounded cache: what goes is what was used least recently, of the few that compete for a place.
//!
//! A key belongs to one of [`SETS`] sets by its hash, and a set holds up to [`WAYS`] values, so that
//! looking for one costs the same however many there are. A cache takes memory when the first value is
//! put in ([`Room`]), which its user gets before it takes the lock that guards the cache; and what falls
//! out is returned, to be dropped after unlocking.

#![forbid(unsafe_code)]

use kernel::prelude::*;

/// Sets; a power of two.
const SETS: usize = 32;
/// Values of a set.
const WAYS: usize = 4;

/// What a cache is asked with: a few words that mix well enough when they are multiplied.
pub(crate) type Key<const N: usize> = [u64; N];

/// Whether all words are the same. A few instructions, where `==` is a call.
fn is_same<const N: usize>(one: &Key<N>, other: &Key<N>) -> bool {
    let words = one.iter().zip(other);
    words.fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

fn set_of<const N: usize>(key: &Key<N>) -> usize {
    // Multiplying carries every bit into the upper ones.
    let hash = key.iter().fold(0u64, |hash, word| {
        (hash.rotate_left(5) ^ *word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    // CAST: What is left is below `SETS`.
    (hash >> (u64::BITS - SETS.trailing_zeros())) as usize
}

struct Slot<const N: usize, V> {
    entry: Option<(Key<N>, V)>,
    used: u64,
}

type Sets<const N: usize, V> = KVec<[Slot<N, V>; WAYS]>;

/// Memory for the values of a cache.
pub(crate) struct Room<const N: usize, V>(Sets<N, V>);

impl<const N: usize, V> Room<N, V> {
    /// Gets the memory, charged to the caller.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        let mut sets = KVec::with_capacity(SETS, GFP_KERNEL_ACCOUNT)?;
        for _ in 0..SETS {
            sets.push(
                [const {
                    Slot {
                        entry: None,
                        used: 0,
                    }
                }; WAYS],
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        Ok(Self(sets))
    }
}

/// The cache.
pub(crate) struct Cache<const N: usize, V> {
    sets: Sets<N, V>,
    now: u64,
}

impl<const N: usize, V> Cache<N, V> {
    /// An empty cache, without memory.
    pub(crate) const fn new() -> Self {
        Self {
            sets: KVec::new(),
            now: 0,
        }
    }

    /// Whether a value can only be put in with memory.
    pub(crate) fn needs_room(&self) -> bool {
        self.sets.is_empty()
    }

    /// The value of a key.
    pub(crate) fn get(&mut self, key: &Key<N>) -> Option<&V> {
        let slot = self.sets.get_mut(set_of(key))?.iter_mut().find(|slot| {
            slot.entry
                .as_ref()
                .is_some_and(|(there, _)| is_same(there, key))
        })?;
        self.now += 1;
        slot.used = self.now;
        slot.entry.as_ref().map(|(_, value)| value)
    }

    /// Takes memory. Returns it if there is some already.
    pub(crate) fn enlarge(&mut self, room: Room<N, V>) -> Option<Room<N, V>> {
        if !self.needs_room() {
            return Some(room);
        }
        self.sets = room.0;
        None
    }

    /// Puts a value in. Returns what has no place (any more).
    pub(crate) fn put(&mut self, key: Key<N>, value: V) -> Option<V> {
        let Some(set) = self.sets.get_mut(set_of(&key)) else {
            return Some(value);
        };
        // The key's own place, or the one that was used least recently.
        let place = set.iter_mut().min_by_key(|slot| match &slot.entry {
            Some((there, _)) if is_same(there, &key) => (0, 0),
            Some(_) => (2, slot.used),
            None => (1, 0),
        })?;
        self.now += 1;
        place.used = self.now;
        place.entry.replace((key, value)).map(|(_, old)| old)
    }

    /// Takes out everything, and the memory with it.
    pub(crate) fn take(&mut self) -> All<N, V> {
        All {
            _sets: core::mem::replace(&mut self.sets, KVec::new()),
        }
    }
}

/// All that was in a cache.
#[must_use = "to be dropped after unlocking"]
pub(crate) struct All<const N: usize, V> {
    _sets: Sets<N, V>,
}
