// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What a device has put off: completions and frames that a fault delays.
//!
//! Locking: the agenda's lock may be taken in any context; nothing is done, and nothing dropped, under it.

#![forbid(unsafe_code)]

use crate::{
    frame::Frame,
    node::Node,
    verbs::{
        alarm::Ring,
        lock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        queue::{
            QueuePair,
            SendStatus,
            SendToken, //
        }, //
    }, //
};
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::Arc,
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// Something to be done.
pub(crate) enum Task {
    /// Complete a send.
    Complete {
        /// Whose.
        qp: Arc<QueuePair>,
        /// Which.
        token: SendToken,
        /// How.
        status: SendStatus,
        /// To count it.
        node: Arc<Node>,
    },
    /// Let a frame go its way.
    Start {
        /// From where.
        node: Arc<Node>,
        /// The port that it is sent from.
        port: u32,
        /// The frame.
        frame: Frame,
    },
}

impl Task {
    fn perform(self) {
        match self {
            Self::Complete {
                qp,
                token,
                status,
                node,
            } => node.complete(&qp, token, status),
            Self::Start { node, port, frame } => node.start(port, frame),
        }
    }

    /// There is no memory to put it off, or the device is about to go: a send is completed, or nobody
    /// could unregister, and a frame is lost.
    pub(crate) fn abandon(self) {
        if let Self::Complete {
            qp, token, node, ..
        } = self
        {
            node.complete(&qp, token, SendStatus::FLUSHED);
        }
    }
}

/// When: nanoseconds since the agenda was made, and a number that keeps the order.
type When = (i64, u64);

struct Entries {
    tasks: RBTree<When, Task>,
    count: u64,
    /// The device is about to go: nothing is put off any more.
    closed: bool,
}

/// The list of tasks.
#[pin_data]
pub(crate) struct Agenda {
    epoch: Instant<Monotonic>,
    #[pin]
    entries: IrqSpinLock<Entries>,
}

impl Agenda {
    /// Nothing to do.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                epoch: Instant::now(),
                entries <- new_irq_spinlock!(Entries {
                    tasks: RBTree::new(),
                    count: 0,
                    closed: false,
                }, "Agenda::entries"),
            }),
            GFP_KERNEL,
        )
    }

    fn now(&self) -> i64 {
        self.epoch.elapsed().as_nanos()
    }

    /// Puts a task off by `ms`. The owner sets the alarm. Does not sleep.
    ///
    /// # Errors
    ///
    /// The task back, if there is no memory, or the agenda is closed.
    pub(crate) fn put_off(&self, ms: u32, task: Task) -> core::result::Result<(), Task> {
        let due = self.now() + i64::from(ms) * NANOS_PER_MS;
        let Ok(room) = kernel::rbtree::RBTreeNodeReservation::new(GFP_ATOMIC) else {
            return Err(task);
        };
        let mut entries = self.entries.lock();
        if entries.closed {
            return Err(task);
        }
        let number = entries.count;
        entries.count += 1;
        // The number makes the key a new one, so nothing is replaced.
        let replaced = entries.tasks.insert(room.into_node((due, number), task));
        drop(entries);
        drop(replaced);
        Ok(())
    }

    /// Takes the first task, if its time has come; otherwise says in how many ms it will.
    fn next(&self) -> Next {
        let mut entries = self.entries.lock();
        let Some(cursor) = entries.tasks.cursor_front_mut() else {
            return Next::None;
        };
        let left = cursor.current().0 .0 - self.now();
        if left > 0 {
            let ms = u32::try_from(left / NANOS_PER_MS + 1).unwrap_or(u32::MAX);
            return Next::In(ms);
        }
        let (_, node) = cursor.remove_current();
        Next::Task(node)
    }

    /// Takes all tasks, due or not, and abandons them; there will be no others.
    pub(crate) fn close(&self) {
        let mut entries = self.entries.lock();
        entries.closed = true;
        let mut tasks = core::mem::replace(&mut entries.tasks, RBTree::new());
        drop(entries);
        while let Some(cursor) = tasks.cursor_front_mut() {
            let (_, node) = cursor.remove_current();
            node.to_key_value().1.abandon();
        }
    }
}

const NANOS_PER_MS: i64 = 1_000_000;

enum Next {
    None,
    In(u32),
    Task(RBTreeNode<When, Task>),
}

impl Ring for Agenda {
    fn ring(&self) -> Option<u32> {
        loop {
            match self.next() {
                Next::None => return None,
                Next::In(ms) => return Some(ms),
                Next::Task(node) => node.to_key_value().1.perform(),
            }
        }
    }
}
