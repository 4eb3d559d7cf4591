// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! issm devices: whoever holds one open is the port's subnet manager, as far as the fabric is told.
//!
//! Opening sets IsSM in the port's capability mask (IBA 14.2.5.6), the last close clears it. There is
//! one holder at a time; others wait in the order in which they came until it closes, or until a signal
//! comes, or the device goes. The file itself can do nothing.
//!
//! Locking: [`IsSm::turn`] is a spinlock and says who may change the port; it is not held while the port
//! is changed.

#![forbid(unsafe_code)]

use crate::{
    chrdev::{
        file::{
            OpenFlags,
            Operations,
            Positioning, //
        },
        wait::{
            new_wait_queue,
            WaitQueue, //
        }, //
    },
    port::Port,
    rdma::device::CAP_IS_SM, //
};
use kernel::{
    device,
    new_spinlock,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::{
        Arc,
        SpinLock, //
    }, //
};

/// Whose turn it is.
struct Turn {
    held: bool,
    next_ticket: u64,
    /// Those who wait, first come first served.
    waiting: RBTree<u64, ()>,
}

/// Who is a port's subnet manager: nobody or one holder.
#[pin_data]
pub(crate) struct IsSm {
    #[pin]
    turn: SpinLock<Turn>,
    #[pin]
    waiters: WaitQueue,
}

impl IsSm {
    /// Nobody is.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            turn <- new_spinlock!(Turn {
                held: false,
                next_ticket: 0,
                waiting: RBTree::new(),
            }, "IsSm::turn"),
            waiters <- new_wait_queue!("IsSm::waiters"),
        })
    }

    /// Lets everybody who waits look again: the holder or the device is gone.
    pub(crate) fn wake(&self) {
        self.waiters.wake_all();
    }

    /// Becomes the holder, if nobody is and nobody waits.
    fn try_hold(&self) -> bool {
        let mut turn = self.turn.lock();
        if turn.held || !turn.waiting.is_empty() {
            return false;
        }
        turn.held = true;
        true
    }

    /// Queues up behind all who wait already.
    fn queue_up(&self) -> Result<Ticket<'_>> {
        let room = RBTreeNodeReservation::new(GFP_KERNEL)?;
        let mut turn = self.turn.lock();
        let number = turn.next_ticket;
        turn.next_ticket += 1;
        let replaced = turn.waiting.insert(room.into_node(number, ()));
        drop(turn);
        drop(replaced);
        Ok(Ticket {
            is_sm: self,
            number,
        })
    }

    fn let_go(&self) {
        self.turn.lock().held = false;
        self.wake();
    }
}

/// A place among those who wait; given up when dropped.
struct Ticket<'a> {
    is_sm: &'a IsSm,
    number: u64,
}

impl Ticket<'_> {
    /// Becomes the holder, if nobody is and nobody has waited longer.
    fn try_hold(&self) -> bool {
        let mut turn = self.is_sm.turn.lock();
        let first = turn.waiting.keys().next().copied();
        if turn.held || first != Some(self.number) {
            return false;
        }
        turn.held = true;
        true
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let node = self.is_sm.turn.lock().waiting.remove_node(&self.number);
        // The next one may be first now.
        self.is_sm.wake();
        drop(node);
    }
}

/// The right to change the port's IsSM bit.
struct Holder(Arc<Port>);

impl Holder {
    /// Waits for the right.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone; `EAGAIN`; `ERESTARTSYS`; `ENOMEM`.
    fn wait(port: &Arc<Port>, flags: OpenFlags) -> Result<Self> {
        let is_sm = port.is_sm();
        if !port.is_live() {
            return Err(ENXIO);
        }
        if !is_sm.try_hold() {
            if flags.nonblocking() {
                return Err(EAGAIN);
            }
            let ticket = is_sm.queue_up()?;
            is_sm.waiters.wait_until(|| {
                if !port.is_live() {
                    return Some(Err(ENXIO));
                }
                ticket.try_hold().then_some(Ok(()))
            })??;
        }
        Ok(Self(port.clone()))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.is_sm().let_go();
    }
}

/// An open issm file.
pub(crate) struct IssmFile {
    holder: Holder,
}

#[vtable]
impl Operations for IssmFile {
    type Data = Arc<Port>;
    type File = KBox<IssmFile>;

    const POSITIONING: Positioning = Positioning::NonSeekable;

    /// Errors: `ENXIO` if the device is gone, before or while this waits; `EAGAIN` if another holds it
    /// and the file is not to wait; `ERESTARTSYS`; `EPERM` if the caller's network namespace may not use
    /// the device; what the driver says to the change (`EOPNOTSUPP` if it cannot); `ENOMEM`.
    fn open(port: &Arc<Port>, _node: &device::Device, flags: OpenFlags) -> Result<KBox<Self>> {
        let file = KBox::new_uninit(GFP_KERNEL_ACCOUNT)?;
        let holder = Holder::wait(port, flags)?;
        let device = port.device().ok_or(ENXIO)?;
        if !device.accessible_from_current_netns() {
            return Err(EPERM);
        }
        device.modify_port_caps(port.number(), CAP_IS_SM, 0)?;
        Ok(KBox::write(file, Self { holder }))
    }

    fn release(file: KBox<Self>) {
        let port = &file.holder.0;
        if let Some(device) = port.device() {
            // Nobody can be told of an error at a close.
            let _ = device.modify_port_caps(port.number(), 0, CAP_IS_SM);
        }
        // The holder goes after the bit is cleared: the next one must find it so.
    }
}
