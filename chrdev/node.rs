// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Device nodes: a `struct cdev` and a `struct device` with the data that both serve.
//!
//! C headers: `include/linux/cdev.h`, `include/linux/device.h`
//!
//! Life cycle: [`Node::add`] makes the node appear in sysfs and `/dev`; dropping the [`Node`] makes it
//! disappear. Its memory, and with it its data, lives on as long as anybody holds a reference to the
//! device: an open file does, and so does an inode that still points to the cdev, so a file may even
//! be opened after the node is gone. It is the driver's part to refuse that.

use super::{
    class::{
        Class,
        ClassSpec, //
    },
    file::{
        FileVTable,
        Operations, //
    },
    region::DevNumber, //
};
use crate::{
    bindings,
    compat, //
};
use core::ptr::NonNull;
use kernel::{
    device,
    error::to_result,
    prelude::*,
    types::Opaque, //
};

/// The memory of a node.
#[repr(C)]
pub(super) struct NodeInner<T: Operations> {
    dev: Opaque<bindings::device>,
    cdev: Opaque<bindings::cdev>,
    data: T::Data,
}

impl<T: Operations> NodeInner<T> {
    /// The node that a cdev is part of.
    ///
    /// # Safety
    ///
    /// `cdev` must be that of a node of `T`.
    pub(super) unsafe fn from_cdev(cdev: *mut bindings::cdev) -> *mut Self {
        // SAFETY: By the caller; `Opaque` is transparent.
        unsafe { kernel::container_of!(Opaque::cast_from(cdev), Self, cdev) }.cast_mut()
    }

    /// The node's data.
    pub(super) fn data(&self) -> &T::Data {
        &self.data
    }

    /// The node's device.
    pub(super) fn device(&self) -> &device::Device {
        // SAFETY: The device was initialised with the node and lives in it.
        unsafe { device::Device::from_raw(self.dev.get()) }
    }

    /// # Safety
    ///
    /// Called by the kernel when the last reference to the device of a node of `T` is gone.
    unsafe extern "C" fn release(dev: *mut bindings::device) {
        // The device is the first field, see the check below.
        // SAFETY: `Node::add` leaked the box, and nobody else uses the node any more.
        drop(unsafe { KBox::from_raw(dev.cast::<Self>()) });
    }
}

/// A node that is there; it goes when this is dropped. Dropping sleeps.
///
/// # Invariants
///
/// `inner` is a node that was added, and one reference to its device is ours.
pub(crate) struct Node<T: Operations> {
    inner: NonNull<NodeInner<T>>,
}

// SAFETY: The functions of the driver core may be called from any thread; the data is `Send + Sync`.
unsafe impl<T: Operations> Send for Node<T> {}
// SAFETY: As above.
unsafe impl<T: Operations> Sync for Node<T> {}

impl<T: Operations> Node<T> {
    /// Adds a node of `class`: its attributes can be read before the uevent goes out.
    ///
    /// DROP ORDER: the class must outlive all of its nodes.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, `EEXIST` and what else the driver core says.
    pub(crate) fn add<C: ClassSpec<Data = T::Data>>(
        class: &Class<C>,
        name: &CStr,
        number: DevNumber,
        parent: Option<&device::Device>,
        data: T::Data,
    ) -> Result<Self> {
        const { assert!(core::mem::offset_of!(NodeInner<T>, dev) == 0) };
        let inner = KBox::new(
            NodeInner::<T> {
                dev: Opaque::zeroed(),
                cdev: Opaque::zeroed(),
                data,
            },
            GFP_KERNEL,
        )?;
        let inner = NonNull::from(KBox::leak(inner));
        let dev = inner.cast::<bindings::device>().as_ptr();
        // SAFETY: `inner` is valid and zeroed where it is not initialised. From `device_initialize` on
        // the last `put_device` frees it, through `release`.
        let (cdev, data) = unsafe {
            bindings::device_initialize(dev);
            (*dev).release = Some(NodeInner::<T>::release);
            (*dev).class = class.as_raw();
            (*dev).devt = number.as_raw();
            (*dev).parent = parent.map_or(core::ptr::null_mut(), |parent| {
                core::ptr::from_ref(parent).cast_mut().cast()
            });
            (
                (*inner.as_ptr()).cdev.get(),
                &raw const (*inner.as_ptr()).data,
            )
        };
        // INVARIANT: Our reference is that of `device_initialize`. The node is not added yet, so the
        // guard below must not run the destructor as it is.
        let unfinished = Unfinished(dev);
        // SAFETY: All pointers are valid; the class's attributes read the data as `C::Data`.
        unsafe {
            bindings::dev_set_drvdata(dev, data.cast_mut().cast());
            to_result(bindings::dev_set_name(
                dev,
                c"%s".as_char_ptr(),
                name.as_char_ptr(),
            ))?;
            bindings::cdev_init(cdev, FileVTable::<T>::table());
            (*cdev).owner = compat::this_module().as_ptr();
            to_result(bindings::cdev_device_add(cdev, dev))?;
        }
        core::mem::forget(unfinished);
        // INVARIANT: The node was added.
        Ok(Self { inner })
    }

    /// The node's device.
    pub(crate) fn device(&self) -> &device::Device {
        // SAFETY: By the type invariant.
        unsafe { self.inner.as_ref() }.device()
    }
}

impl<T: Operations> Drop for Node<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant: the node was added, and the reference is ours.
        unsafe {
            let inner = self.inner.as_ptr();
            bindings::cdev_device_del((*inner).cdev.get(), (*inner).dev.get());
            bindings::put_device((*inner).dev.get());
        }
    }
}

/// Gives up a device that could not be added.
struct Unfinished(*mut bindings::device);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // SAFETY: The reference of `device_initialize` is ours.
        unsafe { bindings::put_device(self.0) };
    }
}
