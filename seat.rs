// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! How an agent is named: by its id in the file, which is given out again after it is gone, and by its
//! seat, which never is.

#![forbid(unsafe_code)]

use crate::{
    chrdev::nospec::array_index_nospec,
    uapi::MAX_AGENTS, //
};
use kernel::prelude::*;

/// The id of an agent in its file.
///
/// # Invariants
///
/// Below [`MAX_AGENTS`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgentId(u8);

impl AgentId {
    /// An id that a program named; the processor cannot speculate past the table with it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such id.
    pub(crate) fn from_user(id: u32) -> Result<Self> {
        let index = usize::try_from(id).map_err(|_| EINVAL)?;
        if index >= MAX_AGENTS {
            return Err(EINVAL);
        }
        // INVARIANT: Just checked.
        u8::try_from(array_index_nospec(index, MAX_AGENTS))
            .map(Self)
            .map_err(|_| EINVAL)
    }

    /// The id of a table's index; `None` if there is no such id.
    pub(crate) fn from_index(index: usize) -> Option<Self> {
        // INVARIANT: Checked.
        u8::try_from(index)
            .ok()
            .filter(|_| index < MAX_AGENTS)
            .map(Self)
    }

    /// The number.
    pub(crate) fn as_u32(self) -> u32 {
        u32::from(self.0)
    }

    /// The number, as an index.
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// An agent's place: its id, and which of all registrations had it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat {
    id: AgentId,
    registration: u64,
}

impl Seat {
    /// The place of the `registration`th agent with this id.
    pub(crate) fn new(id: AgentId, registration: u64) -> Self {
        Self { id, registration }
    }

    /// Which of all registrations with this id it is.
    pub(crate) fn registration(self) -> u64 {
        self.registration
    }

    /// The agent's id.
    pub(crate) fn id(self) -> AgentId {
        self.id
    }

    /// Whether the agent had its id before `other` got it.
    pub(crate) fn precedes(self, other: Seat) -> bool {
        self.id == other.id && self.registration < other.registration
    }
}

#[kunit_tests(umad_seat)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_programs_are_below_32() {
        assert!(AgentId::from_user(0).is_ok_and(|id| id.as_u32() == 0));
        assert!(AgentId::from_user(31).is_ok_and(|id| id.as_u32() == 31));
        for id in [32, 33, 255, 256, 1 << 8 | 31, u32::MAX] {
            assert!(AgentId::from_user(id).is_err_and(|e| e == EINVAL));
        }
    }

    #[test]
    fn ids_of_the_table_are_below_32() {
        assert!(AgentId::from_index(31).is_some_and(|id| id.index() == 31));
        assert!(AgentId::from_index(32).is_none());
        assert!(AgentId::from_index(256).is_none());
    }

    #[test]
    fn a_seat_precedes_later_ones_of_its_id_only() -> Result {
        let (one, two) = (AgentId::from_user(1)?, AgentId::from_user(2)?);
        assert!(Seat::new(one, 1).precedes(Seat::new(one, 2)));
        assert!(!Seat::new(one, 2).precedes(Seat::new(one, 2)));
        assert!(!Seat::new(one, 3).precedes(Seat::new(one, 2)));
        assert!(!Seat::new(two, 1).precedes(Seat::new(one, 2)));
        Ok(())
    }
}
