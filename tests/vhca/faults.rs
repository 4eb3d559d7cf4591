// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Faults: which send, and which frame, suffers what.

#![forbid(unsafe_code)]

use crate::{
    uapi,
    verbs::{
        device::MadVerdict,
        queue::SendStatus, //
    }, //
};
use kernel::{
    error::Error,
    prelude::*, //
};

/// What is to happen to a send.
pub(crate) enum SendFate {
    /// `post_send` fails.
    Refused(Error),
    /// It is completed with this status, so many ms late, and goes on the wire if that is a success.
    Posted(SendStatus, u32),
}

/// What is to happen to a frame.
pub(crate) enum FrameFate {
    /// It is lost.
    Dropped,
    /// It goes out `copies` times, so many ms late.
    Sent {
        /// One, or two.
        copies: u32,
        /// Delay.
        delay_ms: u32,
    },
}

/// The faults of a device, and how far they have got.
pub(crate) struct Faults {
    set: uapi::Faults,
    sends: u32,
    frames: u32,
}

/// What user space may set: all zero.
const NONE: uapi::Faults = uapi::Faults {
    mgmt_class: 0,
    drop_every: 0,
    drop_next: 0,
    duplicate_every: 0,
    delay_ms: 0,
    fail_send_at: 0,
    fail_send_errno: 0,
    send_status_at: 0,
    send_status: 0,
    complete_delay_ms: 0,
    process_mad_delay_ms: 0,
    modify_port_errno: 0,
    consume_next: 0,
    refuse_next: 0,
    create_ah_errno: 0,
};

impl Faults {
    /// No faults.
    pub(crate) const fn none() -> Self {
        Self {
            set: NONE,
            sends: 0,
            frames: 0,
        }
    }

    /// Begins anew with these.
    ///
    /// # Errors
    ///
    /// `EINVAL` if a number is out of range.
    pub(crate) fn new(set: uapi::Faults) -> Result<Self> {
        /// Longest delay: an hour.
        const MAX_MS: u32 = 3_600_000;
        for ms in [
            set.delay_ms,
            set.complete_delay_ms,
            set.process_mad_delay_ms,
        ] {
            if ms > MAX_MS {
                return Err(EINVAL);
            }
        }
        for number in [
            set.fail_send_errno,
            set.modify_port_errno,
            set.create_ah_errno,
        ] {
            if number != 0 {
                as_error(number)?;
            }
        }
        if set.mgmt_class > 0xff || set.send_status > SendStatus::MAX.0 {
            return Err(EINVAL);
        }
        Ok(Self {
            set,
            sends: 0,
            frames: 0,
        })
    }

    fn concerns(&self, mgmt_class: u8) -> bool {
        self.set.mgmt_class == 0 || self.set.mgmt_class == u32::from(mgmt_class)
    }

    /// Decides over a send of a class.
    pub(crate) fn send(&mut self, mgmt_class: u8) -> SendFate {
        if !self.concerns(mgmt_class) {
            return SendFate::Posted(SendStatus::SUCCESS, 0);
        }
        self.sends = self.sends.saturating_add(1);
        if self.sends == self.set.fail_send_at {
            return SendFate::Refused(as_error(self.set.fail_send_errno).unwrap_or(EINVAL));
        }
        let status = if self.sends == self.set.send_status_at {
            match self.set.send_status {
                0 => SendStatus::MAX,
                status => SendStatus(status),
            }
        } else {
            SendStatus::SUCCESS
        };
        SendFate::Posted(status, self.set.complete_delay_ms)
    }

    /// Decides over a frame of a class.
    pub(crate) fn frame(&mut self, mgmt_class: u8) -> FrameFate {
        if !self.concerns(mgmt_class) {
            return FrameFate::Sent {
                copies: 1,
                delay_ms: 0,
            };
        }
        self.frames = self.frames.wrapping_add(1);
        if self.set.drop_next > 0 {
            self.set.drop_next -= 1;
            return FrameFate::Dropped;
        }
        if every(self.set.drop_every, self.frames) {
            return FrameFate::Dropped;
        }
        FrameFate::Sent {
            copies: 1 + u32::from(every(self.set.duplicate_every, self.frames)),
            delay_ms: self.set.delay_ms,
        }
    }

    /// What `process_mad` is to do with a request of a class: how many ms to sleep, and what to do
    /// instead of answering.
    pub(crate) fn request(&mut self, mgmt_class: u8) -> (u32, Option<MadVerdict>) {
        if !self.concerns(mgmt_class) {
            return (0, None);
        }
        let verdict = if self.set.consume_next > 0 {
            self.set.consume_next -= 1;
            Some(MadVerdict::Consumed)
        } else if self.set.refuse_next > 0 {
            self.set.refuse_next -= 1;
            Some(MadVerdict::Failed)
        } else {
            None
        };
        (self.set.process_mad_delay_ms, verdict)
    }

    /// How `modify_port` is to end.
    pub(crate) fn modify_port(&self) -> Result {
        outcome(self.set.modify_port_errno)
    }

    /// How `create_ah` is to end.
    pub(crate) fn create_ah(&self) -> Result {
        outcome(self.set.create_ah_errno)
    }
}

/// Success, or the error of a positive errno.
fn outcome(number: u32) -> Result {
    match number {
        0 => Ok(()),
        number => Err(as_error(number)?),
    }
}

/// Whether it is the turn of the `n`th.
fn every(interval: u32, n: u32) -> bool {
    n.checked_rem(interval) == Some(0)
}

/// The error of a positive errno.
fn as_error(number: u32) -> Result<Error> {
    /// The highest errno that a pointer can hold.
    const MAX_ERRNO: u32 = 4095;
    if number == 0 || number > MAX_ERRNO {
        return Err(EINVAL);
    }
    let number = i32::try_from(number).map_err(|_| EINVAL)?;
    Ok(Error::from_errno(-number))
}
