// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Waiting for something, polling for it, and waking those who do.
//!
//! C header: `include/linux/wait.h`, `include/linux/poll.h`
//!
//! Unlike `kernel::sync::CondVar` a [`WaitQueue`] knows no lock: the condition takes the locks that it
//! needs, and a waker wakes after it has let go of them. And unlike `PollCondVar` it needs no RCU
//! grace period when it is dropped, see [`WaitQueue`].

use crate::bindings;
use core::marker::PhantomData;
use kernel::{
    prelude::*,
    sync::LockClassKey,
    types::Opaque, //
};

/// A queue of tasks that wait, and of polls.
///
/// Must be dropped only when nobody can wait or poll any more. A queue that belongs to an open file,
/// or to what an open file keeps alive, fulfils that: `epoll` takes its entries off before a file is
/// released, and `poll` and `select` hold the file.
#[pin_data]
pub(crate) struct WaitQueue {
    #[pin]
    head: Opaque<bindings::wait_queue_head>,
}

// SAFETY: A wait queue has a lock of its own.
unsafe impl Send for WaitQueue {}
// SAFETY: As above.
unsafe impl Sync for WaitQueue {}

impl WaitQueue {
    /// Makes an empty queue. `name` and `key` are what lockdep shows.
    pub(crate) fn new(name: &'static CStr, key: Pin<&'static LockClassKey>) -> impl PinInit<Self> {
        pin_init!(Self {
            head <- Opaque::ffi_init(|slot: *mut bindings::wait_queue_head| {
                // SAFETY: `slot` is valid for writes, and pinned; name and key are static.
                unsafe { bindings::__init_waitqueue_head(slot, name.as_char_ptr(), key.as_ptr()) }
            }),
        })
    }

    /// Sleeps until `condition` returns something, and returns that.
    ///
    /// `condition` must not sleep. Who makes it true must wake the queue afterwards.
    ///
    /// # Errors
    ///
    /// `ERESTARTSYS` if a signal came first.
    pub(crate) fn wait_until<R>(&self, condition: impl FnMut() -> Option<R>) -> Result<R> {
        self.wait(0, condition)
    }

    /// The same as one of those whom [`WaitQueue::wake_one`] wakes one at a time.
    ///
    /// A wake-up is never lost: who is woken and has a signal besides looks at the condition before it
    /// gives up, so if that is true, it returns what it found. Who finds the condition false although it
    /// was woken sleeps again; somebody else made use of what it was woken for.
    pub(crate) fn wait_for_turn_until<R>(&self, condition: impl FnMut() -> Option<R>) -> Result<R> {
        self.wait(bindings::WQ_FLAG_EXCLUSIVE as c_int, condition)
    }

    fn wait<R>(&self, flags: c_int, mut condition: impl FnMut() -> Option<R>) -> Result<R> {
        if let Some(found) = condition() {
            return Ok(found);
        }
        let mut entry = bindings::wait_queue_entry::default();
        let entry = &raw mut entry;
        // SAFETY: `entry` is valid, and stays where it is until `finish_wait` has taken it off.
        unsafe { bindings::init_wait_entry(entry, flags) };
        let result = loop {
            // CAST: A task state is a small constant.
            // SAFETY: The queue is initialised, and the entry is, too.
            let interrupted = unsafe {
                bindings::prepare_to_wait_event(
                    self.head.get(),
                    entry,
                    bindings::TASK_INTERRUPTIBLE as c_int,
                )
            };
            // The entry is queued and the task's state set: a wake-up from here on ends `schedule`.
            if let Some(found) = condition() {
                break Ok(found);
            }
            if interrupted != 0 {
                break Err(ERESTARTSYS);
            }
            // SAFETY: Called from process context, without a spinlock.
            unsafe { bindings::schedule() };
        };
        // SAFETY: As above; afterwards the entry is on no queue.
        unsafe { bindings::finish_wait(self.head.get(), entry) };
        result
    }

    /// Wakes one of those who wait for their turn, and everybody else who waits or polls.
    pub(crate) fn wake_one(&self) {
        // SAFETY: The queue is initialised.
        unsafe { bindings::umad_wake_up_interruptible(self.head.get()) };
    }

    /// Wakes everybody who waits or polls.
    pub(crate) fn wake_all(&self) {
        // SAFETY: The queue is initialised.
        unsafe { bindings::umad_wake_up_interruptible_all(self.head.get()) };
    }
}

/// Makes a [`WaitQueue`] with a lock class of its own.
macro_rules! new_wait_queue {
    ($name:literal) => {
        $crate::chrdev::wait::WaitQueue::new(
            ::kernel::c_str!($name),
            ::kernel::static_lock_class!(),
        )
    };
}
pub(crate) use new_wait_queue;

/// A poll of a file.
pub(crate) struct PollTable<'a> {
    file: *mut bindings::file,
    table: *mut bindings::poll_table,
    _poll: PhantomData<&'a ()>,
}

impl PollTable<'_> {
    /// # Safety
    ///
    /// Both must be what a file's `poll` was given, and `'a` end before that returns.
    pub(super) unsafe fn from_raw(
        file: *mut bindings::file,
        table: *mut bindings::poll_table,
    ) -> Self {
        Self {
            file,
            table,
            _poll: PhantomData,
        }
    }

    /// Lets a wake-up of `queue` end the poll. To be called before the state is looked at.
    ///
    /// The queue must live as long as the file.
    pub(crate) fn register(&self, queue: &WaitQueue) {
        // SAFETY: File and table are valid by the contract of `from_raw`.
        unsafe { bindings::poll_wait(self.file, queue.head.get(), self.table) };
    }
}

/// What a poll found.
#[derive(Clone, Copy)]
pub(crate) struct PollEvents(u32);

impl PollEvents {
    /// There is something to read.
    pub(crate) const READABLE: Self = Self(bindings::POLLIN | bindings::POLLRDNORM);
    /// A write will not wait.
    pub(crate) const WRITABLE: Self = Self(bindings::POLLOUT | bindings::POLLWRNORM);
    /// The device is gone.
    pub(crate) const ERROR: Self = Self(bindings::POLLERR);

    /// Both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The C mask.
    pub(super) fn as_raw(self) -> bindings::__poll_t {
        self.0
    }
}
