// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Kernel clients of RDMA devices.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct ib_client`
//!
//! A driver implements [`Client`] and keeps a `static` [`Slot`] for it, since `ib_core` calls `add`
//! with nothing but the device. [`Registration`] registers the client and unregisters it when
//! dropped. `ib_core` calls `add` once for each device and, after it succeeded, `remove` once; it may
//! call them for different devices at the same time. [`Alias`] is a second client name that answers
//! netlink's GET_CHARDEV out of the first one's data.

use super::device::Device;
use crate::bindings;
use crate::compat::eopnotsupp;
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    device,
    error::{
        from_result,
        to_result, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering,
            Atomic, //
        },
        Arc, //
    },
    types::ForeignOwnable, //
};

/// A client of RDMA devices.
pub(crate) trait Client: Sized + 'static {
    /// The client's name, also in netlink's GET_CHARDEV.
    const NAME: &'static CStr;

    /// What all devices share. Lives as long as the registration.
    type Context: Send + Sync;

    /// What the client keeps for one device.
    type Data: Send + Sync;

    /// ABI version that GET_CHARDEV tells.
    fn abi_version() -> u32;

    /// The client's slot.
    fn slot() -> &'static Slot<Self>;

    /// A device came. An error means that the client has no use for it. May sleep.
    fn add(context: &Self::Context, device: &Arc<Device>) -> Result<KBox<Self::Data>>;

    /// The device goes. When this returns, or a moment later, nothing may use it: the caller waits
    /// until every guard of `device` is dropped. May sleep.
    fn remove(context: &Self::Context, device: &Device, data: KBox<Self::Data>);

    /// The character device of a port, for GET_CHARDEV. `port` comes from user space.
    fn chardev(data: &Self::Data, port: u32) -> Result<&device::Device>;
}

/// A second name for a client: answers GET_CHARDEV with other nodes of the same data.
pub(crate) trait Alias: Sized + 'static {
    /// The client whose data answers.
    type Of: Client;

    /// The second name.
    const NAME: &'static CStr;

    /// The alias's slot.
    fn slot() -> &'static AliasSlot<Self>;

    /// The character device of a port. `port` comes from user space.
    fn chardev(data: &<Self::Of as Client>::Data, port: u32) -> Result<&device::Device>;
}

/// What a client keeps for one device, and the device.
struct Entry<T: Client> {
    device: Arc<Device>,
    data: KBox<T::Data>,
}

/// A client's C struct with its context. Declare one `static` for each client.
pub(crate) struct Slot<T: Client> {
    registered: Atomic<bool>,
    client: UnsafeCell<bindings::ib_client>,
    context: UnsafeCell<Option<T::Context>>,
}

// SAFETY: `Registration` is the only one to change `client` and `context`, and `registered` lets only
// one of it exist; it changes them before and after `ib_core` can call back. The context is shared
// between callbacks, which `Context: Sync` allows, and dropped by any thread, which `Send` allows.
unsafe impl<T: Client> Sync for Slot<T> {}

impl<T: Client> Slot<T> {
    /// An empty slot.
    pub(crate) const fn new() -> Self {
        Self {
            registered: Atomic::new(false),
            client: UnsafeCell::new(pin_init::zeroed()),
            context: UnsafeCell::new(None),
        }
    }

    /// The context of the registered client.
    ///
    /// # Safety
    ///
    /// Only for callbacks of `ib_core`: they come only while the client is registered.
    unsafe fn context(&self) -> Option<&T::Context> {
        // SAFETY: By the caller: nobody changes the context while the client is registered.
        unsafe { (*self.context.get()).as_ref() }
    }
}

/// A registered client; unregisters, and so removes every device, when dropped. May sleep.
pub(crate) struct Registration<T: Client>(PhantomData<T>);

impl<T: Client> Registration<T> {
    /// Registers the client and adds every device that is there. May sleep.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the client is registered already, or what `ib_register_client` says.
    pub(crate) fn new(context: T::Context) -> Result<Self> {
        let slot = T::slot();
        if slot.registered.xchg(true, ordering::Full) {
            return Err(EBUSY);
        }
        // SAFETY: `registered` was false: no other registration exists, and no callback comes before
        // `ib_register_client` below.
        unsafe {
            *slot.context.get() = Some(context);
            *slot.client.get() = ClientVTable::<T>::client();
        }
        // From here on the destructor cleans up, but for the unregistering.
        // SAFETY: The C struct is static, and the module drops the registration before it goes.
        let ret = to_result(unsafe { bindings::ib_register_client(slot.client.get()) });
        if let Err(e) = ret {
            Self::clear();
            return Err(e);
        }
        Ok(Self(PhantomData))
    }

    /// Empties the slot of a client that is not registered with `ib_core` (any more).
    fn clear() {
        let slot = T::slot();
        // SAFETY: No callback comes any more, and `registered` is still true: no other registration
        // touches the slot.
        unsafe { *slot.context.get() = None };
        slot.registered.store(false, ordering::Release);
    }
}

impl<T: Client> Drop for Registration<T> {
    fn drop(&mut self) {
        // SAFETY: `new` registered the client. The call waits for every callback.
        unsafe { bindings::ib_unregister_client(T::slot().client.get()) };
        Self::clear();
    }
}

/// The callbacks of a [`Client`].
struct ClientVTable<T: Client>(PhantomData<T>);

impl<T: Client> ClientVTable<T> {
    fn client() -> bindings::ib_client {
        bindings::ib_client {
            name: T::NAME.as_char_ptr(),
            add: Some(Self::add),
            remove: Some(Self::remove),
            get_nl_info: Some(Self::get_nl_info),
            ..Default::default()
        }
    }

    /// # Safety
    ///
    /// Called by `ib_core` with a device that stays valid until `remove` returns.
    unsafe extern "C" fn add(raw: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            let ptr = NonNull::new(raw).ok_or(EINVAL)?;
            // SAFETY: This is a callback of `ib_core`.
            let context = unsafe { T::slot().context() }.ok_or(ENODEV)?;
            // Memory first: what `T::add` made could not be undone from here.
            let room = KBox::<Entry<T>>::new_uninit(GFP_KERNEL)?;
            // SAFETY: `ib_core` keeps the device until `remove` returns, which revokes and waits; so
            // does the error path below.
            let device = unsafe { Device::new(ptr) }?;
            match T::add(context, &device) {
                Ok(data) => {
                    let entry = KBox::write(room, Entry { device, data });
                    // SAFETY: The device is valid, the client registered, and this is the time when
                    // `ib_core` wants the data to be set. `remove` takes the entry back.
                    unsafe {
                        bindings::ib_set_client_data(
                            raw,
                            T::slot().client.get(),
                            entry.into_foreign(),
                        )
                    };
                    Ok(0)
                }
                Err(e) => {
                    if let Some(revoked) = device.revoke() {
                        revoked.wait();
                    }
                    Err(e)
                }
            }
        })
    }

    /// # Safety
    ///
    /// Called by `ib_core` with a device that `add` accepted and the data that it set.
    unsafe extern "C" fn remove(_raw: *mut bindings::ib_device, data: *mut c_void) {
        // SAFETY: `add` set the data with `into_foreign`, and `ib_core` calls `remove` once for it.
        let Some(entry) = (unsafe { KBox::<Entry<T>>::try_from_foreign(data) }) else {
            return;
        };
        let Entry { device, data } = KBox::into_inner(entry);
        // SAFETY: This is a callback of `ib_core`.
        if let Some(context) = unsafe { T::slot().context() } {
            T::remove(context, &device, data);
        }
        // Whatever the client did: the device may go only when nobody uses it.
        if let Some(revoked) = device.revoke() {
            revoked.wait();
        }
    }

    /// # Safety
    ///
    /// Called by `ib_core` with the data that `add` set and a valid `res`, while `remove` is kept
    /// from being called.
    unsafe extern "C" fn get_nl_info(
        _raw: *mut bindings::ib_device,
        data: *mut c_void,
        res: *mut bindings::ib_client_nl_info,
    ) -> c_int {
        // SAFETY: By the caller, `res` is valid, and `data` null or an entry that lives during the call.
        unsafe { answer::<T>(data, res, T::chardev) }
    }
}

/// Fills in the answer to a GET_CHARDEV.
///
/// # Safety
///
/// `data` must be null or what `add` of `T` set, and live during the call; `res` must be valid.
unsafe fn answer<T: Client>(
    data: *mut c_void,
    res: *mut bindings::ib_client_nl_info,
    chardev: fn(&T::Data, u32) -> Result<&device::Device>,
) -> c_int {
    from_result(|| {
        if data.is_null() {
            return Err(eopnotsupp());
        }
        // SAFETY: By the caller, and since it is not null, this is an entry of `T`.
        let entry = unsafe { KBox::<Entry<T>>::borrow(data) };
        // SAFETY: By the caller.
        let res = unsafe { &mut *res };
        let node = chardev(&entry.data, res.port)?;
        res.abi = T::abi_version().into();
        // The caller takes its own reference before it lets `remove` be called.
        res.cdev = core::ptr::from_ref(node).cast_mut().cast();
        Ok(0)
    })
}

/// An alias's C struct. Declare one `static` for each alias.
pub(crate) struct AliasSlot<A: Alias> {
    registered: Atomic<bool>,
    client: UnsafeCell<bindings::ib_client>,
    _alias: PhantomData<A>,
}

// SAFETY: `AliasRegistration` is the only one to change `client`, and `registered` lets only one exist.
unsafe impl<A: Alias> Sync for AliasSlot<A> {}

impl<A: Alias> AliasSlot<A> {
    /// An empty slot.
    pub(crate) const fn new() -> Self {
        Self {
            registered: Atomic::new(false),
            client: UnsafeCell::new(pin_init::zeroed()),
            _alias: PhantomData,
        }
    }
}

/// A registered alias; unregisters when dropped. May sleep.
///
/// It owns the registration of the client whose data it answers from.
/// DROP ORDER: the alias is unregistered by its destructor, before the client by the field's.
pub(crate) struct AliasRegistration<A: Alias> {
    _of: Registration<A::Of>,
}

impl<A: Alias> AliasRegistration<A> {
    /// Registers the alias of a registered client. May sleep.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the alias is registered already, or what `ib_register_client` says; the client is
    /// unregistered then.
    pub(crate) fn new(of: Registration<A::Of>) -> Result<Self> {
        let slot = A::slot();
        if slot.registered.xchg(true, ordering::Full) {
            return Err(EBUSY);
        }
        // SAFETY: `registered` was false, so nobody else touches the slot.
        unsafe {
            *slot.client.get() = bindings::ib_client {
                name: A::NAME.as_char_ptr(),
                get_nl_info: Some(Self::get_nl_info),
                ..Default::default()
            };
        }
        // SAFETY: The C struct is static, and the module drops the registration before it goes.
        if let Err(e) = to_result(unsafe { bindings::ib_register_client(slot.client.get()) }) {
            slot.registered.store(false, ordering::Release);
            return Err(e);
        }
        Ok(Self { _of: of })
    }

    /// # Safety
    ///
    /// Called by `ib_core` with a device that the alias is registered on, and a valid `res`.
    unsafe extern "C" fn get_nl_info(
        raw: *mut bindings::ib_device,
        _data: *mut c_void,
        res: *mut bindings::ib_client_nl_info,
    ) -> c_int {
        // SAFETY: `ib_core` removes clients from a device in the reverse order of their registration,
        // the alias was registered after its client, and while this runs it holds off the removal of
        // the alias (`client_data_rwsem`). So the client's data is either not set yet (null) or live.
        unsafe {
            let data = bindings::ib_get_client_data(raw, <A::Of>::slot().client.get());
            answer::<A::Of>(data, res, A::chardev)
        }
    }
}

impl<A: Alias> Drop for AliasRegistration<A> {
    fn drop(&mut self) {
        let slot = A::slot();
        // SAFETY: `new` registered the alias. The call waits for every callback.
        unsafe { bindings::ib_unregister_client(slot.client.get()) };
        slot.registered.store(false, ordering::Release);
    }
}
