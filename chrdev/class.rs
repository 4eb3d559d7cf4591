// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Device classes with attributes.
//!
//! C headers: `include/linux/device/class.h`, `include/linux/sysfs.h`
//!
//! A driver says with [`ClassSpec`] what its class is; [`Class`] is there while it lives. Attributes
//! are read-only, and each device's are made by the driver core before the device's uevent goes out.

use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::null,
    slice, //
};
use kernel::{
    error::to_result,
    fmt,
    prelude::*,
    static_lock_class,
    types::Opaque, //
};

/// The text of an attribute: at most a page, what is too much is cut off.
pub(crate) struct AttributeText<'a> {
    page: &'a mut [u8],
    len: usize,
}

impl AttributeText<'_> {
    /// Appends bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for (to, from) in self.page.iter_mut().skip(self.len).zip(bytes) {
            *to = *from;
            self.len += 1;
        }
    }
}

impl fmt::Write for AttributeText<'_> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        self.push(s.as_bytes());
        Ok(())
    }
}

/// An attribute of each device of a class.
pub(crate) struct DeviceAttribute<D: 'static> {
    /// File name.
    pub(crate) name: &'static CStr,
    /// Writes the attribute's text. May sleep; the device's removal waits for it.
    pub(crate) show: fn(&D, &mut AttributeText<'_>) -> Result,
}

/// An attribute of the class itself.
pub(crate) struct ClassAttribute {
    /// File name.
    pub(crate) name: &'static CStr,
    /// Writes the attribute's text.
    pub(crate) show: fn(&mut AttributeText<'_>) -> Result,
}

/// What a class is.
pub(crate) trait ClassSpec: Sized + 'static {
    /// What the nodes of the class hold.
    type Data: Send + Sync + 'static;

    /// Name below `/sys/class`.
    const NAME: &'static CStr;

    /// Folder below `/dev` that holds the nodes.
    const FOLDER: &'static CStr;

    /// Attributes of the class.
    const CLASS_ATTRIBUTES: &'static [ClassAttribute];

    /// Attributes of each device.
    const DEVICE_ATTRIBUTES: &'static [DeviceAttribute<Self::Data>];
}

/// A C device attribute and what it shows.
#[repr(C)]
struct DeviceAttr<D: 'static> {
    attr: bindings::device_attribute,
    show: fn(&D, &mut AttributeText<'_>) -> Result,
}

/// A C class attribute and what it shows.
#[repr(C)]
struct ClassAttr {
    attr: bindings::class_attribute,
    show: fn(&mut AttributeText<'_>) -> Result,
}

/// A list of attributes as the driver core wants it: pointers, and a null behind them.
struct Group {
    _attrs: KVec<*mut bindings::attribute>,
    _group: KBox<bindings::attribute_group>,
    groups: KVec<*const bindings::attribute_group>,
}

impl Group {
    fn new(attrs: impl Iterator<Item = *mut bindings::attribute>) -> Result<Self> {
        let mut list = KVec::new();
        for attr in attrs {
            list.push(attr, GFP_KERNEL)?;
        }
        list.push(core::ptr::null_mut(), GFP_KERNEL)?;
        let mut group = KBox::new(bindings::attribute_group::default(), GFP_KERNEL)?;
        // SAFETY: Both are valid, and live as long as the group is used.
        unsafe { bindings::umad_attribute_group_set(&mut *group, list.as_mut_ptr()) };
        let mut groups = KVec::with_capacity(2, GFP_KERNEL)?;
        groups.push(&raw const *group, GFP_KERNEL)?;
        groups.push(null(), GFP_KERNEL)?;
        Ok(Self {
            _attrs: list,
            _group: group,
            groups,
        })
    }
}

/// A registered class; unregistered when dropped.
///
/// # Invariants
///
/// `class` is registered, and everything that it points to is owned by the other fields, which do not
/// move or change while it is.
pub(crate) struct Class<C: ClassSpec> {
    class: KBox<Opaque<bindings::class>>,
    _class_group: Group,
    _device_group: Group,
    _class_attrs: KVec<ClassAttr>,
    _device_attrs: KVec<DeviceAttr<C::Data>>,
}

// SAFETY: The class is read-only while it is registered, and the driver core locks for itself.
unsafe impl<C: ClassSpec> Send for Class<C> {}
// SAFETY: As above.
unsafe impl<C: ClassSpec> Sync for Class<C> {}

impl<C: ClassSpec> Class<C> {
    /// Registers the class.
    ///
    /// # Errors
    ///
    /// `EEXIST` if there is such a class, `ENOMEM`.
    pub(crate) fn register() -> Result<Self> {
        let mut class_attrs = KVec::with_capacity(C::CLASS_ATTRIBUTES.len(), GFP_KERNEL)?;
        for spec in C::CLASS_ATTRIBUTES {
            let mut attr = bindings::class_attribute {
                show: Some(show_class),
                ..Default::default()
            };
            init_attribute(&mut attr.attr, spec.name);
            class_attrs.push(
                ClassAttr {
                    attr,
                    show: spec.show,
                },
                GFP_KERNEL,
            )?;
        }
        let mut device_attrs = KVec::with_capacity(C::DEVICE_ATTRIBUTES.len(), GFP_KERNEL)?;
        for spec in C::DEVICE_ATTRIBUTES {
            let mut attr = bindings::device_attribute::default();
            // SAFETY: The attribute is valid.
            unsafe {
                bindings::umad_device_attribute_set_show(&mut attr, Some(show_device::<C::Data>))
            };
            init_attribute(&mut attr.attr, spec.name);
            device_attrs.push(
                DeviceAttr {
                    attr,
                    show: spec.show,
                },
                GFP_KERNEL,
            )?;
        }
        let class_group = Group::new(class_attrs.iter_mut().map(|a| &raw mut a.attr.attr))?;
        let device_group = Group::new(device_attrs.iter_mut().map(|a| &raw mut a.attr.attr))?;
        let class = KBox::new(
            Opaque::new(bindings::class {
                name: C::NAME.as_char_ptr(),
                devnode: Some(Folder::<C>::devnode),
                class_groups: class_group.groups.as_ptr(),
                dev_groups: device_group.groups.as_ptr(),
                ..Default::default()
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The class is complete and, like all that it points to, stays where it is: on the heap.
        to_result(unsafe { bindings::class_register(class.get()) })?;
        // INVARIANT: Just registered.
        Ok(Self {
            class,
            _class_group: class_group,
            _device_group: device_group,
            _class_attrs: class_attrs,
            _device_attrs: device_attrs,
        })
    }

    /// The C class.
    pub(super) fn as_raw(&self) -> *const bindings::class {
        self.class.get()
    }
}

impl<C: ClassSpec> Drop for Class<C> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { bindings::class_unregister(self.class.get()) };
    }
}

/// Names an attribute and makes it world-readable.
fn init_attribute(attr: &mut bindings::attribute, name: &'static CStr) {
    attr.name = name.as_char_ptr();
    attr.mode = 0o444;
    #[cfg(CONFIG_DEBUG_LOCK_ALLOC)]
    {
        // lockdep wants a static key for an attribute that is not static itself.
        attr.key = static_lock_class!().as_ptr();
    }
    #[cfg(not(CONFIG_DEBUG_LOCK_ALLOC))]
    let _ = static_lock_class!();
}

/// Lets `show` write into the page that sysfs gave.
///
/// # Safety
///
/// `buf` must be a page that nobody else uses meanwhile.
unsafe fn show_into(
    buf: *mut c_char,
    show: impl FnOnce(&mut AttributeText<'_>) -> Result,
) -> isize {
    // SAFETY: By the caller; sysfs zeroes the page.
    let page = unsafe { slice::from_raw_parts_mut(buf.cast::<u8>(), kernel::page::PAGE_SIZE) };
    let mut text = AttributeText { page, len: 0 };
    match show(&mut text) {
        // OVERFLOW: At most a page.
        Ok(()) => isize::try_from(text.len).unwrap_or(0),
        // CAST: An errno fits.
        Err(e) => e.to_errno() as isize,
    }
}

/// # Safety
///
/// Called by sysfs with a device of a class whose data is `D`, one of the class's attributes, and a page.
unsafe extern "C" fn show_device<D: 'static>(
    dev: *mut bindings::device,
    attr: *mut bindings::device_attribute,
    buf: *mut c_char,
) -> isize {
    // SAFETY: The attribute is the first field of a `DeviceAttr<D>`, which the class owns; a node set
    // the device's driver data to its own data, and its removal waits for this call.
    unsafe {
        let attr = &*attr.cast::<DeviceAttr<D>>();
        let data = &*bindings::dev_get_drvdata(dev).cast::<D>();
        show_into(buf, |text| (attr.show)(data, text))
    }
}

/// # Safety
///
/// Called by sysfs with one of the class's attributes and a page.
unsafe extern "C" fn show_class(
    _class: *const bindings::class,
    attr: *const bindings::class_attribute,
    buf: *mut c_char,
) -> isize {
    // SAFETY: The attribute is the first field of a `ClassAttr`, which the class owns.
    unsafe {
        let attr = &*attr.cast::<ClassAttr>();
        show_into(buf, |text| (attr.show)(text))
    }
}

/// Where the nodes of a class are made.
struct Folder<C: ClassSpec>(PhantomData<C>);

impl<C: ClassSpec> Folder<C> {
    /// # Safety
    ///
    /// Called by the driver core with a valid device; it frees the string.
    unsafe extern "C" fn devnode(
        dev: *const bindings::device,
        _mode: *mut bindings::umode_t,
    ) -> *mut c_char {
        // SAFETY: The format takes two strings, and both are valid.
        unsafe {
            bindings::kasprintf(
                bindings::GFP_KERNEL,
                c"%s/%s".as_char_ptr(),
                C::FOLDER.as_char_ptr(),
                bindings::dev_name(dev),
            )
        }
    }
}
