// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What waits for the reader of a control file whose device is wired to user space: frames that leave the
//! device, changes of capability masks, and questions to a subnet management agent.
//!
//! Locking: the two locks may be taken in any context and are never held together.

#![forbid(unsafe_code)]

use crate::{
    chrdev::wait::{
        new_wait_queue,
        WaitQueue, //
    },
    frame::Frame,
    uapi::{
        self,
        FrameHeader, //
    },
    verbs::{
        device::MadVerdict,
        lock::{
            new_irq_spinlock,
            IrqSpinLock, //
        }, //
    }, //
};
use core::mem::size_of;
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::Arc, //
};

/// Items that may wait for the reader; what is too much is lost, as on a slow link.
const MAX_ITEMS: usize = 16384;

/// Something to be read.
pub(crate) struct Item {
    header: FrameHeader,
    mad: KVec<u8>,
}

impl Item {
    /// Bytes that it takes in the reader's buffer.
    pub(crate) fn len(&self) -> usize {
        size_of::<FrameHeader>() + self.mad.len()
    }

    /// The two parts.
    pub(crate) fn parts(&self) -> (&[u8], &[u8]) {
        (self.header.as_bytes(), &self.mad)
    }
}

/// What a read finds.
pub(crate) enum Next {
    /// This.
    Item(Item),
    /// Something that is longer than the buffer; it stays.
    TooLong,
    /// There is no device.
    Closed,
}

struct Items {
    queue: RBTree<u64, Item>,
    first: u64,
    end: u64,
    open: bool,
}

/// A question that is not answered yet, or whose answer is not fetched.
struct Question {
    id: u32,
    answer: Option<KVec<u8>>,
}

struct Questions {
    next_id: u32,
    list: KVec<Question>,
}

/// The outbox of a control file.
#[pin_data]
pub(crate) struct Outbox {
    #[pin]
    items: IrqSpinLock<Items>,
    #[pin]
    questions: IrqSpinLock<Questions>,
    /// Readers and pollers.
    #[pin]
    readers: WaitQueue,
    /// Those who have asked.
    #[pin]
    askers: WaitQueue,
}

impl Outbox {
    /// Empty, and closed.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                items <- new_irq_spinlock!(Items {
                    queue: RBTree::new(),
                    first: 0,
                    end: 0,
                    open: false,
                }, "Outbox::items"),
                questions <- new_irq_spinlock!(Questions {
                    next_id: 1,
                    list: KVec::new(),
                }, "Outbox::questions"),
                readers <- new_wait_queue!("Outbox::readers"),
                askers <- new_wait_queue!("Outbox::askers"),
            }),
            GFP_KERNEL,
        )
    }

    /// Opens it, empty.
    pub(crate) fn open(&self) {
        let mut items = self.items.lock();
        let old = core::mem::replace(&mut items.queue, RBTree::new());
        items.first = items.end;
        items.open = true;
        drop(items);
        drop(old);
    }

    /// The device goes: nothing is put in any more, nobody waits.
    pub(crate) fn close(&self) {
        self.items.lock().open = false;
        self.readers.wake_all();
        self.askers.wake_all();
    }

    fn is_open(&self) -> bool {
        self.items.lock().open
    }

    /// Those who read and poll.
    pub(crate) fn readers(&self) -> &WaitQueue {
        &self.readers
    }

    /// Whether there is something to read, and whether there is a device.
    pub(crate) fn status(&self) -> (bool, bool) {
        let items = self.items.lock();
        (items.first != items.end, items.open)
    }

    fn push(&self, header: FrameHeader, mad: KVec<u8>) -> Result {
        let room = RBTreeNodeReservation::new(GFP_ATOMIC)?;
        let mut items = self.items.lock();
        let waiting = usize::try_from(items.end - items.first).unwrap_or(usize::MAX);
        if !items.open || waiting >= MAX_ITEMS {
            drop(items);
            return Err(ENOSPC);
        }
        let at = items.end;
        items.end += 1;
        // The number is new, so nothing is replaced.
        let replaced = items.queue.insert(room.into_node(at, Item { header, mad }));
        drop(items);
        drop(replaced);
        self.readers.wake_all();
        Ok(())
    }

    /// A frame leaves a port. Does not sleep.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the reader is too slow, or the device goes, `ENOMEM`.
    pub(crate) fn push_mad(&self, port: u32, frame: Frame) -> Result {
        let header = FrameHeader {
            port,
            dlid: frame.dlid,
            slid: frame.slid,
            dest_qp: frame.dest_qp,
            src_qp: frame.src_qp,
            sl: u32::from(frame.sl),
            pkey: u32::from(frame.pkey),
            flags: if frame.grh.is_some() {
                uapi::FRAME_GRH
            } else {
                0
            },
            grh: frame.grh.unwrap_or([0; 40]),
            ..header(uapi::KIND_MAD, &frame.payload)
        };
        self.push(header, frame.payload)
    }

    /// A port's capability mask has changed. Does not sleep.
    ///
    /// # Errors
    ///
    /// As [`Outbox::push_mad`].
    pub(crate) fn push_cap_mask(&self, port: u32, cap_mask: u32) -> Result {
        let header = FrameHeader {
            port,
            dlid: cap_mask,
            ..header(uapi::KIND_CAP_MASK, &[])
        };
        self.push(header, KVec::new())
    }

    /// Asks the reader for the answer to a MAD, and waits until it comes, a signal does, or the device
    /// goes. Sleeps.
    pub(crate) fn ask(&self, port: u32, mad: &[u8], reply: &mut [u8]) -> MadVerdict {
        let Ok(answer) = self.try_ask(port, mad) else {
            return MadVerdict::Failed;
        };
        for (to, from) in reply.iter_mut().zip(&answer) {
            *to = *from;
        }
        MadVerdict::Reply(answer.len())
    }

    fn try_ask(&self, port: u32, mad: &[u8]) -> Result<KVec<u8>> {
        let mut copy = KVec::with_capacity(mad.len(), GFP_KERNEL)?;
        copy.extend_from_slice(mad, GFP_KERNEL)?;
        let mut questions = self.questions.lock();
        let id = questions.next_id;
        questions.next_id = id.wrapping_add(1);
        let listed = questions
            .list
            .push(Question { id, answer: None }, GFP_ATOMIC);
        drop(questions);
        listed?;
        let header = FrameHeader {
            port,
            id,
            ..header(uapi::KIND_LOCAL, &copy)
        };
        let outcome = self.push(header, copy).and_then(|()| {
            self.askers.wait_until(|| {
                let mut questions = self.questions.lock();
                let found = questions.list.iter_mut().find(|question| question.id == id);
                let answer = found.and_then(|question| question.answer.take());
                drop(questions);
                match answer {
                    Some(answer) => Some(Ok(answer)),
                    None if !self.is_open() => Some(Err(ENODEV)),
                    None => None,
                }
            })?
        });
        let mut questions = self.questions.lock();
        let at = questions.list.iter().position(|question| question.id == id);
        let question = at.and_then(|at| questions.list.remove(at).ok());
        drop(questions);
        drop(question);
        outcome
    }

    /// The answer to a question.
    ///
    /// # Errors
    ///
    /// `ESRCH` if nobody waits for it (any more).
    pub(crate) fn answer(&self, id: u32, mad: KVec<u8>) -> Result {
        let mut questions = self.questions.lock();
        let found = questions.list.iter_mut().find(|question| question.id == id);
        let Some(question) = found else {
            drop(questions);
            return Err(ESRCH);
        };
        let old = question.answer.replace(mad);
        drop(questions);
        drop(old);
        self.askers.wake_all();
        Ok(())
    }

    /// Takes the first item, if it is no longer than `room`; `None` if there is none yet.
    pub(crate) fn next(&self, room: usize) -> Option<Next> {
        let mut items = self.items.lock();
        let Some(cursor) = items.queue.cursor_front_mut() else {
            return (!items.open).then_some(Next::Closed);
        };
        if cursor.current().1.len() > room {
            return Some(Next::TooLong);
        }
        let (_, node) = cursor.remove_current();
        items.first += 1;
        drop(items);
        Some(Next::Item(node.to_key_value().1))
    }
}

/// A header that says no more than this.
fn header(kind: u32, mad: &[u8]) -> FrameHeader {
    FrameHeader {
        kind,
        port: 0,
        dlid: 0,
        slid: 0,
        dest_qp: 0,
        src_qp: 0,
        sl: 0,
        pkey: 0,
        len: u32::try_from(mad.len()).unwrap_or(0),
        id: 0,
        flags: 0,
        reserved: 0,
        grh: [0; 40],
    }
}
