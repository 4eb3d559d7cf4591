// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! issm devices: whoever holds one open is the port's subnet manager, as far as the fabric is told.
//!
//! Opening sets IsSM in the port's capability mask (IBA 14.2.5.6), the last close clears it. There is
//! one holder at a time; others wait until it closes, or until a signal comes, or the device goes. The
//! file itself can do nothing.
//!
//! Locking: [`IsSm::held`] is a spinlock and says who may change the port; it is not held while the port
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
    sync::{
        Arc,
        SpinLock, //
    }, //
};

/// Who is a port's subnet manager: nobody or one holder.
#[pin_data]
pub(crate) struct IsSm {
    #[pin]
    held: SpinLock<bool>,
    #[pin]
    waiters: WaitQueue,
}

impl IsSm {
    /// Nobody is.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            held <- new_spinlock!(false, "IsSm::held"),
            waiters <- new_wait_queue!("IsSm::waiters"),
        })
    }

    /// Lets everybody who waits look again: the holder or the device is gone.
    pub(crate) fn wake(&self) {
        self.waiters.wake_all();
    }

    fn try_hold(&self) -> bool {
        !core::mem::replace(&mut *self.held.lock(), true)
    }

    fn let_go(&self) {
        *self.held.lock() = false;
        self.wake();
    }
}

/// The right to change the port's IsSM bit.
struct Holder(Arc<Port>);

impl Holder {
    /// Waits for the right.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone; `EAGAIN`; `ERESTARTSYS`.
    fn wait(port: &Arc<Port>, flags: OpenFlags) -> Result<Self> {
        let attempt = || {
            if !port.is_live() {
                return Some(Err(ENXIO));
            }
            port.is_sm().try_hold().then_some(Ok(()))
        };
        if flags.nonblocking() {
            attempt().unwrap_or(Err(EAGAIN))?;
        } else {
            port.is_sm().waiters.wait_until(attempt)??;
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
