// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The numbers of umad and issm devices.
//!
//! The first 64 ports have fixed device numbers: major 231, minor N for umadN and 64 + N for issmN. Ports
//! from the 65th on have numbers of a second major, which the kernel chooses when the module is loaded.

#![forbid(unsafe_code)]

use crate::chrdev::region::{
    DevNumber,
    Region, //
};
use kernel::{
    id_pool::IdPool,
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// The major of the fixed numbers; a name in `/proc/devices` and a rule in many a udev.
const MAJOR: u32 = 231;
/// Ports with fixed numbers.
const FIXED_PORTS: u32 = 64;
/// All ports that there can be (`RDMA_MAX_PORTS` of `ib_core`).
const MAX_PORTS: u32 = 8192;
/// Ports with numbers of the second major.
const MORE_PORTS: u32 = MAX_PORTS - FIXED_PORTS;

/// All numbers.
#[pin_data]
pub(crate) struct Numbers {
    fixed: Region,
    more: Region,
    #[pin]
    used: Mutex<IdPool>,
}

impl Numbers {
    /// Registers the device numbers.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the fixed ones are taken, by another module that does the same; `ENOMEM`.
    pub(crate) fn register(name: &'static CStr) -> Result<Arc<Self>> {
        let fixed = Region::register(DevNumber::new(MAJOR, 0), FIXED_PORTS * 2, name)
            .inspect_err(|_| pr_err!("device numbers {}:0-127 are taken\n", MAJOR))?;
        let more = Region::allocate(MORE_PORTS * 2, name)
            .inspect_err(|_| pr_err!("no second major device number\n"))?;
        // CAST: A u32 fits.
        let used = IdPool::with_capacity(MAX_PORTS as usize, GFP_KERNEL)?;
        Arc::pin_init(
            pin_init!(Self {
                fixed,
                more,
                used <- new_mutex!(used, "Numbers::used"),
            }),
            GFP_KERNEL,
        )
    }

    /// Takes the lowest number that is free.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if there is none.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Number> {
        let mut used = self.used.lock();
        let free = used.find_unused_id(0).ok_or(ENOSPC)?;
        if free.as_u32() >= MAX_PORTS {
            return Err(ENOSPC);
        }
        let value = free.as_u32();
        free.acquire();
        Ok(Number {
            value,
            numbers: self.clone(),
        })
    }
}

/// A port's number; free again when dropped.
pub(crate) struct Number {
    value: u32,
    numbers: Arc<Numbers>,
}

impl Number {
    /// The N of umadN and issmN.
    pub(crate) fn value(&self) -> u32 {
        self.value
    }

    /// The device number of umadN.
    ///
    /// # Errors
    ///
    /// None, in fact: every number has one.
    pub(crate) fn umad(&self) -> Result<DevNumber> {
        match self.value.checked_sub(FIXED_PORTS) {
            None => self.numbers.fixed.get(self.value),
            Some(more) => self.numbers.more.get(more),
        }
        .ok_or(ENOSPC)
    }

    /// The device number of issmN.
    ///
    /// # Errors
    ///
    /// None, in fact: every number has one.
    pub(crate) fn issm(&self) -> Result<DevNumber> {
        match self.value.checked_sub(FIXED_PORTS) {
            None => self.numbers.fixed.get(FIXED_PORTS + self.value),
            Some(more) => self.numbers.more.get(MORE_PORTS + more),
        }
        .ok_or(ENOSPC)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        // CAST: A u32 fits.
        self.numbers.used.lock().release_id(self.value as usize);
    }
}
