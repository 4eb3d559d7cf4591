// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! An RDMA device and its operations.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct ib_device`, `struct ib_device_ops`
//!
//! Life cycle: [`Device::register`] makes the device appear, with all its clients; dropping the
//! [`Device`] is a surprise removal: it returns when no client uses the device any more. `ib_core` calls the
//! [`Provider`] in between, some operations from contexts that cannot sleep, which their documentation
//! says.

use super::{
    address::RawAh,
    lock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    queue::{
        QueuePair,
        RawCq,
        RawQp,
        SendRequest,
        SendStatus,
        Sending, //
    }, //
};
use crate::{
    bindings,
    compat, //
};
use core::{
    marker::PhantomData,
    mem::{
        size_of,
        ManuallyDrop, //
    },
    ptr::NonNull,
    slice, //
};
use kernel::{
    error::to_result,
    prelude::*,
    str::CString,
    sync::{
        Arc,
        ArcBorrow, //
    }, //
};

/// Bytes of a MAD.
pub(crate) const MAD_LEN: usize = 256;
/// Bytes of an OPA MAD.
pub(crate) const OPA_MAD_LEN: usize = 2048;
/// Bytes of the longest datagram that is no MAD: the MTU.
pub(crate) const MAX_DATA_LEN: usize = 4096;
/// Base version of an OPA MAD.
pub(crate) const OPA_BASE_VERSION: u8 = 0x80;

/// What a port can do.
#[derive(Clone, Copy)]
pub(crate) struct PortCaps(u32);

impl PortCaps {
    /// InfiniBand's link layer and addresses, and nothing more: no MADs.
    pub(crate) const LINK: Self = Self(bindings::RDMA_CORE_CAP_PROT_IB);
    /// Queue pair 0.
    pub(crate) const SMI: Self =
        Self(bindings::RDMA_CORE_CAP_IB_MAD | bindings::RDMA_CORE_CAP_IB_SMI);
    /// Queue pair 1, with what uses it: communication and subnet administration.
    pub(crate) const GSI: Self = Self(
        bindings::RDMA_CORE_CAP_IB_MAD
            | bindings::RDMA_CORE_CAP_IB_CM
            | bindings::RDMA_CORE_CAP_IB_SA
            | bindings::RDMA_CORE_CAP_AF_IB,
    );
    /// Queue pair 1 of a switch: without the clients that only hosts have.
    pub(crate) const SWITCH_GSI: Self =
        Self(bindings::RDMA_CORE_CAP_IB_MAD | bindings::RDMA_CORE_CAP_IB_CM);
    /// MADs of 2,048 bytes, LIDs of 32 bits.
    pub(crate) const OPA: Self =
        Self(bindings::RDMA_CORE_CAP_OPA_MAD | bindings::RDMA_CORE_CAP_OPA_AH);

    /// Both.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn max_mad_len(self) -> u32 {
        if self.0 & bindings::RDMA_CORE_CAP_IB_MAD == 0 {
            0
        } else if self.0 & bindings::RDMA_CORE_CAP_OPA_MAD != 0 {
            2048
        } else {
            256
        }
    }
}

/// What a port is like now. Numbers are those of PortInfo (IBA 14.2.5.6).
#[derive(Clone, Copy, Default)]
pub(crate) struct PortAttr {
    /// Upper half of the port's GIDs.
    pub(crate) gid_prefix: u64,
    /// PortState.
    pub(crate) state: u8,
    /// PortPhysicalState.
    pub(crate) phys_state: u8,
    /// CapabilityMask.
    pub(crate) cap_mask: u32,
    /// LID.
    pub(crate) lid: u32,
    /// LMC.
    pub(crate) lmc: u8,
    /// MasterSMLID.
    pub(crate) sm_lid: u32,
    /// MasterSMSL.
    pub(crate) sm_sl: u8,
    /// SubnetTimeOut.
    pub(crate) subnet_timeout: u8,
    /// InitTypeReply.
    pub(crate) init_type_reply: u8,
    /// Packets refused because of their P_Key.
    pub(crate) pkey_violations: u32,
}

/// What a device is.
pub(crate) struct DeviceSpec<'a> {
    /// Name; with a `%d` the lowest number that is free.
    pub(crate) name: &'a CStr,
    /// Ports, without a switch's port 0.
    pub(crate) ports: u32,
    /// GUID of the node.
    pub(crate) node_guid: u64,
    /// Description of the node.
    pub(crate) node_desc: [u8; 64],
    /// A switch: all its management is at port 0.
    pub(crate) switch: bool,
    /// Without `process_mad`: `ib_mad` then treats all MADs alike.
    pub(crate) no_process_mad: bool,
}

/// A MAD that is offered to the device before anybody else gets it.
pub(crate) struct OfferedMad<'a> {
    /// The port.
    pub(crate) port: u32,
    /// The MAD, all 256 or 2,048 bytes.
    pub(crate) mad: &'a [u8],
    /// It came over the wire; otherwise it is a directed-route SMP that goes nowhere, or a question of
    /// `ib_core` itself.
    pub(crate) received: bool,
}

/// What a device does with an offered MAD.
pub(crate) enum MadVerdict {
    /// Whoever is registered for it shall have it.
    Pass,
    /// It is dealt with, and there is no answer.
    Consumed,
    /// It cannot be handled.
    Failed,
    /// It is answered: with so many bytes.
    Reply(usize),
}

/// A driver of RDMA devices that do MADs and datagrams.
pub(crate) trait Provider: Send + Sync + Sized + 'static {
    /// Entries of each port's P_Key table.
    const PKEYS: u16;
    /// Entries of each port's GID table.
    const GIDS: u8;

    /// What the ports can do. They must not change.
    fn port_caps(&self, port: u32) -> Result<PortCaps>;

    /// What a port is like now. Does not sleep.
    fn port_attr(&self, port: u32) -> Result<PortAttr>;

    /// An entry of a port's GID table, zero if it is not used. Does not sleep.
    fn gid(&self, port: u32, index: usize) -> Result<[u8; 16]>;

    /// An entry of a port's P_Key table, zero if it is not used. Does not sleep.
    fn pkey(&self, port: u32, index: usize) -> Result<u16>;

    /// Changes bits of a port's capability mask. May sleep.
    fn modify_port(&self, port: u32, set: u32, clear: u32) -> Result;

    /// Looks at a MAD. `reply` is a zeroed buffer for an answer. May sleep.
    fn process_mad(&self, offered: &OfferedMad<'_>, reply: &mut [u8]) -> MadVerdict;

    /// A number for a new queue pair that is not for MADs.
    fn new_qp_number(&self) -> u32;

    /// There is a new queue pair. May sleep.
    fn attach(&self, qp: Arc<QueuePair>) -> Result;

    /// A queue pair is gone. May sleep.
    fn detach(&self, qp: &Arc<QueuePair>);

    /// A queue pair joins a multicast group. May sleep.
    fn join(&self, qp: &Arc<QueuePair>, mgid: [u8; 16], mlid: u16) -> Result;

    /// A queue pair leaves a multicast group. May sleep.
    fn leave(&self, qp: &QueuePair, mgid: [u8; 16], mlid: u16) -> Result;

    /// Sends. Must complete the send, sooner or later, unless it is refused. Does not sleep.
    fn send(
        this: ArcBorrow<'_, Self>,
        qp: ArcBorrow<'_, QueuePair>,
        request: SendRequest,
    ) -> Result;

    /// An address handle is about to be made. Does not sleep.
    fn make_address_handle(&self) -> Result;

    /// An address handle is destroyed. Does not sleep.
    fn destroy_address_handle(&self);
}

/// Something that happened to a port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortEvent {
    /// The port is active now.
    Active,
    /// The port is not active any more.
    Down,
    /// LID or LMC changed.
    LidChange,
    /// The master SM changed.
    SmChange,
    /// The P_Key table changed.
    PkeyChange,
    /// The GID table changed.
    GidChange,
    /// The SM wants clients to register again.
    ClientReregister,
}

/// Where events of a device go while it is there.
#[pin_data]
pub(crate) struct Events {
    #[pin]
    device: IrqSpinLock<Option<NonNull<bindings::ib_device>>>,
}

// SAFETY: The pointer is used under the lock, while the device is registered.
unsafe impl Send for Events {}
// SAFETY: As above.
unsafe impl Sync for Events {}

impl Events {
    /// Of no device yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            device <- new_irq_spinlock!(None, "Events::device"),
        })
    }

    /// Tells the device's clients. May be called in any context.
    pub(crate) fn dispatch(&self, port: u32, event: PortEvent) {
        let device = self.device.lock();
        let Some(raw) = *device else { return };
        let mut c_event = bindings::ib_event {
            device: raw.as_ptr(),
            event: match event {
                PortEvent::Active => bindings::ib_event_type_IB_EVENT_PORT_ACTIVE,
                PortEvent::Down => bindings::ib_event_type_IB_EVENT_PORT_ERR,
                PortEvent::LidChange => bindings::ib_event_type_IB_EVENT_LID_CHANGE,
                PortEvent::SmChange => bindings::ib_event_type_IB_EVENT_SM_CHANGE,
                PortEvent::PkeyChange => bindings::ib_event_type_IB_EVENT_PKEY_CHANGE,
                PortEvent::GidChange => bindings::ib_event_type_IB_EVENT_GID_CHANGE,
                PortEvent::ClientReregister => bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
            },
            ..Default::default()
        };
        c_event.element.port_num = ManuallyDrop::new(port);
        // SAFETY: The device is registered while it is named here, and unregistering, which waits for
        // events, comes after it is not. The function copies the event.
        unsafe { bindings::ib_dispatch_event(&c_event) };
    }
}

/// The memory of a device.
#[repr(C)]
struct Inner<T: Provider> {
    device: bindings::ib_device,
    provider: ManuallyDrop<Arc<T>>,
}

/// A registered device; removed when dropped.
///
/// # Invariants
///
/// `inner` is a registered device that nobody else unregisters or frees.
pub(crate) struct Device<T: Provider> {
    inner: NonNull<Inner<T>>,
    events: Arc<Events>,
}

// SAFETY: A device may be unregistered by any thread.
unsafe impl<T: Provider> Send for Device<T> {}
// SAFETY: As above.
unsafe impl<T: Provider> Sync for Device<T> {}

impl<T: Provider> Device<T> {
    /// Registers a device. From here on, and already during the call, `ib_core` calls `provider`;
    /// `events` reach the clients when this has returned. Sleeps.
    ///
    /// # Errors
    ///
    /// `EEXIST` or `ENFILE` if there is a device of that name, `ENOMEM`, and what else
    /// `ib_register_device` says.
    pub(crate) fn register(
        spec: &DeviceSpec<'_>,
        provider: Arc<T>,
        events: Arc<Events>,
    ) -> Result<Self> {
        const { assert!(core::mem::offset_of!(Inner<T>, device) == 0) };
        // SAFETY: The size is that of a structure that begins with a device.
        let device = unsafe { bindings::vhca_alloc_device(size_of::<Inner<T>>()) };
        let inner = NonNull::new(device.cast::<Inner<T>>()).ok_or(ENOMEM)?;
        // SAFETY: The memory is ours, zeroed, and the device initialised; it is not registered.
        unsafe { (&raw mut (*inner.as_ptr()).provider).write(ManuallyDrop::new(provider)) };
        // Frees the device if it cannot be registered.
        let unfinished = Unfinished(inner);
        // SAFETY: As above.
        unsafe {
            (*device).phys_port_cnt = spec.ports;
            (*device).num_comp_vectors = 1;
            // CAST: Small constants.
            (*device).node_type = if spec.switch {
                bindings::RDMA_NODE_IB_SWITCH as u8
            } else {
                bindings::RDMA_NODE_IB_CA as u8
            };
            (*device).node_guid = spec.node_guid.to_be();
            for (to, from) in (*device).node_desc.iter_mut().zip(spec.node_desc) {
                // CAST: The same bits.
                *to = from as c_char;
            }
            if spec.switch {
                to_result(bindings::vhca_make_switch(device))?;
            }
            bindings::ib_set_device_ops(
                device,
                if spec.no_process_mad {
                    Ops::<T>::without_process_mad()
                } else {
                    Ops::<T>::table()
                },
            );
        }
        // SAFETY: The device is complete; the name is copied. No DMA device: addresses are pointers.
        to_result(unsafe {
            bindings::ib_register_device(device, spec.name.as_char_ptr(), core::ptr::null_mut())
        })?;
        core::mem::forget(unfinished);
        *events.device.lock() = NonNull::new(device);
        // INVARIANT: It is registered.
        Ok(Self { inner, events })
    }

    /// The device's name.
    pub(crate) fn name(&self) -> Result<CString> {
        // SAFETY: By the type invariant. The name may change while it is read, which at worst mixes
        // two; it ends with a zero at any time.
        let name =
            unsafe { CStr::from_char_ptr(bindings::vhca_device_name(self.inner.as_ptr().cast())) };
        Ok(CString::try_from(name)?)
    }
}

/// A device that is not registered (any more), and that nobody uses; freed when dropped.
struct Unfinished<T: Provider>(NonNull<Inner<T>>);

impl<T: Provider> Drop for Unfinished<T> {
    fn drop(&mut self) {
        // SAFETY: The device is ours. Its memory goes with the last reference to it, the provider now: no
        // operation is called without a client or a file, and there are none.
        unsafe {
            let provider = core::ptr::read(&raw const (*self.0.as_ptr()).provider);
            bindings::ib_dealloc_device(self.0.as_ptr().cast());
            drop(ManuallyDrop::into_inner(provider));
        }
    }
}

impl<T: Provider> Drop for Device<T> {
    fn drop(&mut self) {
        *self.events.device.lock() = None;
        // SAFETY: By the type invariant. The call returns when all clients have let go.
        unsafe { bindings::ib_unregister_device(self.inner.as_ptr().cast()) };
        drop(Unfinished(self.inner));
    }
}

/// The C operations of a [`Provider`].
struct Ops<T: Provider>(PhantomData<T>);

impl<T: Provider> Ops<T> {
    /// The provider of a device.
    ///
    /// # Safety
    ///
    /// `device` must be one of this driver's, and stay registered for `'a`.
    unsafe fn provider<'a>(device: *mut bindings::ib_device) -> ArcBorrow<'a, T> {
        // SAFETY: By the caller; `register` has set the provider.
        let provider: &'a Arc<T> = unsafe { &(*device.cast::<Inner<T>>()).provider };
        provider.as_arc_borrow()
    }

    /// # Safety
    ///
    /// Called by `ib_core` with valid arguments, as all below.
    unsafe extern "C" fn query_device(
        device: *mut bindings::ib_device,
        attr: *mut bindings::ib_device_attr,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe {
            (*attr).sys_image_guid = (*device).node_guid;
            (*attr).max_mr_size = u64::MAX;
            (*attr).kernel_cap_flags = u64::from(bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY);
            (*attr).max_qp = 256;
            (*attr).max_qp_wr = 8192;
            (*attr).max_send_sge = 4;
            (*attr).max_recv_sge = 1;
            (*attr).max_cq = 256;
            (*attr).max_cqe = 131_072;
            (*attr).max_pd = 64;
            (*attr).max_ah = 65536;
            (*attr).max_mcast_grp = 1024;
            (*attr).max_mcast_qp_attach = 256;
            (*attr).max_total_mcast_qp_attach = 1024;
            (*attr).max_pkeys = T::PKEYS;
        }
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn query_port(
        device: *mut bindings::ib_device,
        port: u32,
        attr: *mut bindings::ib_port_attr,
    ) -> c_int {
        // SAFETY: By the caller.
        let (provider, out) = unsafe { (Self::provider(device), &mut *attr) };
        let attr = match provider.port_attr(port) {
            Ok(attr) => attr,
            Err(e) => return e.to_errno(),
        };
        out.subnet_prefix = attr.gid_prefix;
        out.state = u32::from(attr.state);
        out.phys_state = attr.phys_state;
        out.max_mtu = bindings::ib_mtu_IB_MTU_4096;
        out.active_mtu = bindings::ib_mtu_IB_MTU_4096;
        out.gid_tbl_len = c_int::from(T::GIDS);
        out.port_cap_flags = attr.cap_mask;
        out.max_msg_sz = 4096;
        out.bad_pkey_cntr = attr.pkey_violations;
        out.pkey_tbl_len = T::PKEYS;
        out.sm_lid = attr.sm_lid;
        out.lid = attr.lid;
        out.lmc = attr.lmc;
        out.max_vl_num = 1;
        out.sm_sl = attr.sm_sl;
        out.subnet_timeout = attr.subnet_timeout;
        out.init_type_reply = attr.init_type_reply;
        // CAST: Small constants.
        out.active_width = bindings::ib_port_width_IB_WIDTH_4X as u8;
        out.active_speed = bindings::ib_port_speed_IB_SPEED_QDR as u16;
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn modify_port(
        device: *mut bindings::ib_device,
        port: u32,
        _mask: c_int,
        change: *mut bindings::ib_port_modify,
    ) -> c_int {
        // SAFETY: By the caller.
        let (provider, change) = unsafe { (Self::provider(device), &*change) };
        errno(provider.modify_port(port, change.set_port_cap_mask, change.clr_port_cap_mask))
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn get_port_immutable(
        device: *mut bindings::ib_device,
        port: u32,
        out: *mut bindings::ib_port_immutable,
    ) -> c_int {
        // SAFETY: By the caller.
        let (provider, out) = unsafe { (Self::provider(device), &mut *out) };
        match provider.port_caps(port) {
            Ok(caps) => {
                out.pkey_tbl_len = c_int::from(T::PKEYS);
                out.gid_tbl_len = c_int::from(T::GIDS);
                out.core_cap_flags = caps.0;
                out.max_mad_size = caps.max_mad_len();
                0
            }
            Err(e) => e.to_errno(),
        }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn query_gid(
        device: *mut bindings::ib_device,
        port: u32,
        index: c_int,
        gid: *mut bindings::ib_gid,
    ) -> c_int {
        // SAFETY: By the caller.
        let provider = unsafe { Self::provider(device) };
        let entry = usize::try_from(index)
            .map_err(|_| EINVAL)
            .and_then(|index| provider.gid(port, index));
        match entry {
            Ok(bytes) => {
                // SAFETY: By the caller; all members of the union are 16 bytes.
                unsafe { (*gid).raw = ManuallyDrop::new(bytes) };
                0
            }
            Err(e) => e.to_errno(),
        }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn query_pkey(
        device: *mut bindings::ib_device,
        port: u32,
        index: u16,
        pkey: *mut u16,
    ) -> c_int {
        // SAFETY: By the caller.
        match unsafe { Self::provider(device) }.pkey(port, usize::from(index)) {
            Ok(entry) => {
                // SAFETY: By the caller.
                unsafe { *pkey = entry };
                0
            }
            Err(e) => e.to_errno(),
        }
    }

    /// # Safety
    ///
    /// See `query_device`. `mad` has 2,048 bytes if the port is an OPA port and the MAD's base version
    /// says so, else 256; `out_mad` has `*out_len`.
    unsafe extern "C" fn process_mad(
        device: *mut bindings::ib_device,
        _flags: c_int,
        port: u32,
        _wc: *const bindings::ib_wc,
        grh: *const bindings::ib_grh,
        mad: *const bindings::ib_mad,
        out_mad: *mut bindings::ib_mad,
        out_len: *mut usize,
        out_pkey_index: *mut u16,
    ) -> c_int {
        // SAFETY: By the caller.
        let (provider, mad, room) = unsafe { (Self::provider(device), mad.cast::<u8>(), *out_len) };
        // SAFETY: By the caller: a MAD begins with its base version.
        let len = if room >= OPA_MAD_LEN && unsafe { *mad } == OPA_BASE_VERSION {
            OPA_MAD_LEN
        } else {
            MAD_LEN
        };
        // SAFETY: By the caller. The two buffers are not the same.
        let (mad, reply) = unsafe {
            (
                slice::from_raw_parts(mad, len),
                slice::from_raw_parts_mut(out_mad.cast::<u8>(), room),
            )
        };
        reply.fill(0);
        let offered = OfferedMad {
            port,
            mad,
            received: !grh.is_null(),
        };
        let verdict = match provider.process_mad(&offered, reply) {
            MadVerdict::Failed => bindings::ib_mad_result_IB_MAD_RESULT_FAILURE,
            MadVerdict::Pass => bindings::ib_mad_result_IB_MAD_RESULT_SUCCESS,
            MadVerdict::Consumed => {
                bindings::ib_mad_result_IB_MAD_RESULT_SUCCESS
                    | bindings::ib_mad_result_IB_MAD_RESULT_CONSUMED
            }
            MadVerdict::Reply(len) => {
                // SAFETY: By the caller.
                unsafe {
                    *out_len = len.min(room);
                    *out_pkey_index = 0;
                }
                bindings::ib_mad_result_IB_MAD_RESULT_SUCCESS
                    | bindings::ib_mad_result_IB_MAD_RESULT_REPLY
            }
        };
        // CAST: Small flags.
        verdict as c_int
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn alloc_pd(
        _pd: *mut bindings::ib_pd,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn dealloc_pd(
        _pd: *mut bindings::ib_pd,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn create_ah(
        ah: *mut bindings::ib_ah,
        attr: *mut bindings::rdma_ah_init_attr,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: By the caller.
        let made = unsafe { Self::provider((*ah).device) }.make_address_handle();
        if made.is_ok() {
            // SAFETY: By the caller.
            unsafe { RawAh::fill(ah, (*attr).ah_attr) };
        }
        errno(made)
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn query_ah(
        ah: *mut bindings::ib_ah,
        attr: *mut bindings::rdma_ah_attr,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe { RawAh::query(ah, attr) };
        0
    }

    /// # Safety
    ///
    /// See `query_device`. Called with interrupts off, too.
    unsafe extern "C" fn destroy_ah(ah: *mut bindings::ib_ah, _flags: u32) -> c_int {
        // SAFETY: By the caller.
        unsafe { Self::provider((*ah).device) }.destroy_address_handle();
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn create_cq(
        cq: *mut bindings::ib_cq,
        attr: *const bindings::ib_cq_init_attr,
        _attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        // SAFETY: By the caller.
        errno(unsafe { RawCq::create(cq, (*attr).cqe) })
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn destroy_cq(
        cq: *mut bindings::ib_cq,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe { RawCq::destroy(cq) };
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn poll_cq(
        cq: *mut bindings::ib_cq,
        num: c_int,
        wc: *mut bindings::ib_wc,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe { RawCq::poll(cq, num, wc) }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn req_notify_cq(
        cq: *mut bindings::ib_cq,
        flags: bindings::ib_cq_notify_flags,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe { RawCq::arm(cq, flags) }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn create_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_init_attr,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: By the caller.
        let provider = unsafe { Self::provider((*qp).device) };
        // SAFETY: By the caller.
        let ours = match unsafe { RawQp::create(qp, attr, || provider.new_qp_number()) } {
            Ok(ours) => ours,
            Err(e) => return e.to_errno(),
        };
        match provider.attach(ours) {
            Ok(()) => 0,
            Err(e) => {
                // SAFETY: Just created, and refused: `ib_core` frees it.
                drop(unsafe { RawQp::destroy(qp) });
                e.to_errno()
            }
        }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn modify_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        mask: c_int,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // CAST: The same bits.
        // SAFETY: By the caller.
        errno(unsafe { RawQp::get(qp).modify(&*attr, mask as u32) })
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn query_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        _mask: c_int,
        init_attr: *mut bindings::ib_qp_init_attr,
    ) -> c_int {
        // SAFETY: By the caller.
        unsafe { RawQp::get(qp).query(&mut *attr, &mut *init_attr) };
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn attach_mcast(
        qp: *mut bindings::ib_qp,
        mgid: *mut bindings::ib_gid,
        mlid: u16,
    ) -> c_int {
        // SAFETY: By the caller; all members of the union are 16 bytes.
        unsafe {
            let (provider, ours) = (Self::provider((*qp).device), RawQp::get(qp));
            errno(provider.join(&ours.into(), *(*mgid).raw, mlid))
        }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn detach_mcast(
        qp: *mut bindings::ib_qp,
        mgid: *mut bindings::ib_gid,
        mlid: u16,
    ) -> c_int {
        // SAFETY: By the caller; all members of the union are 16 bytes.
        unsafe {
            let (provider, ours) = (Self::provider((*qp).device), RawQp::get(qp));
            errno(provider.leave(&ours, *(*mgid).raw, mlid))
        }
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn destroy_qp(
        qp: *mut bindings::ib_qp,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        // SAFETY: By the caller; the completion queues of a queue pair outlive it.
        unsafe {
            let ours = RawQp::destroy(qp);
            Self::provider((*qp).device).detach(&ours);
            // `ib_mad` destroys a queue pair while its handler of completions may be at work, which would then
            // give a buffer back to what is freed.
            if !ours.is_data() {
                RawCq::wait_until_idle((*qp).recv_cq);
                RawCq::wait_until_idle((*qp).send_cq);
            }
        }
        0
    }

    /// # Safety
    ///
    /// See `query_device`. Called with a spinlock held and interrupts off.
    unsafe extern "C" fn post_send(
        qp: *mut bindings::ib_qp,
        mut wr: *const bindings::ib_send_wr,
        bad_wr: *mut *const bindings::ib_send_wr,
    ) -> c_int {
        // SAFETY: By the caller.
        let (provider, ours) = unsafe { (Self::provider((*qp).device), RawQp::get(qp)) };
        let max = if ours.is_data() {
            MAX_DATA_LEN
        } else {
            OPA_MAD_LEN
        };
        while !wr.is_null() {
            // SAFETY: By the caller.
            let sent = unsafe { SendRequest::from_raw(wr, max) }.and_then(|request| {
                match ours.sending() {
                    Sending::Ready => T::send(provider, ours, request),
                    Sending::Flushing => {
                        ours.complete(request.token, SendStatus::FLUSHED);
                        Ok(())
                    }
                    Sending::Refusing => Err(EINVAL),
                }
            });
            if let Err(e) = sent {
                // SAFETY: By the caller.
                unsafe { *bad_wr = wr };
                return e.to_errno();
            }
            // SAFETY: By the caller.
            wr = unsafe { (*wr).next };
        }
        0
    }

    /// # Safety
    ///
    /// See `query_device`. Called in any context.
    unsafe extern "C" fn post_recv(
        qp: *mut bindings::ib_qp,
        mut wr: *const bindings::ib_recv_wr,
        bad_wr: *mut *const bindings::ib_recv_wr,
    ) -> c_int {
        // SAFETY: By the caller.
        let ours = unsafe { RawQp::get(qp) };
        while !wr.is_null() {
            // SAFETY: By the caller: what is posted stays until it is completed.
            if let Err(e) = unsafe { ours.post_recv(wr) } {
                // SAFETY: By the caller.
                unsafe { *bad_wr = wr };
                return e.to_errno();
            }
            // SAFETY: By the caller.
            wr = unsafe { (*wr).next };
        }
        0
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn get_dma_mr(
        _pd: *mut bindings::ib_pd,
        _access: c_int,
    ) -> *mut bindings::ib_mr {
        no_memory_region()
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn reg_user_mr(
        _pd: *mut bindings::ib_pd,
        _start: u64,
        _length: u64,
        _virt_addr: u64,
        _access: c_int,
        _dmah: *mut bindings::ib_dmah,
        _udata: *mut bindings::ib_udata,
    ) -> *mut bindings::ib_mr {
        no_memory_region()
    }

    /// # Safety
    ///
    /// See `query_device`.
    unsafe extern "C" fn dereg_mr(
        _mr: *mut bindings::ib_mr,
        _udata: *mut bindings::ib_udata,
    ) -> c_int {
        0
    }

    // The memory regions are there because `ib_core` takes a device without them for no verbs provider,
    // and then gives it no MADs.
    const WITHOUT_PROCESS_MAD: bindings::ib_device_ops = bindings::ib_device_ops {
        owner: compat::this_module().as_ptr(),
        driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
        query_device: Some(Self::query_device),
        query_port: Some(Self::query_port),
        modify_port: Some(Self::modify_port),
        get_port_immutable: Some(Self::get_port_immutable),
        query_gid: Some(Self::query_gid),
        query_pkey: Some(Self::query_pkey),
        alloc_pd: Some(Self::alloc_pd),
        dealloc_pd: Some(Self::dealloc_pd),
        create_ah: Some(Self::create_ah),
        query_ah: Some(Self::query_ah),
        destroy_ah: Some(Self::destroy_ah),
        create_cq: Some(Self::create_cq),
        destroy_cq: Some(Self::destroy_cq),
        poll_cq: Some(Self::poll_cq),
        req_notify_cq: Some(Self::req_notify_cq),
        create_qp: Some(Self::create_qp),
        modify_qp: Some(Self::modify_qp),
        query_qp: Some(Self::query_qp),
        destroy_qp: Some(Self::destroy_qp),
        attach_mcast: Some(Self::attach_mcast),
        detach_mcast: Some(Self::detach_mcast),
        post_send: Some(Self::post_send),
        post_recv: Some(Self::post_recv),
        get_dma_mr: Some(Self::get_dma_mr),
        reg_user_mr: Some(Self::reg_user_mr),
        dereg_mr: Some(Self::dereg_mr),
        size_ib_ah: size_of::<RawAh>(),
        size_ib_cq: size_of::<RawCq>(),
        size_ib_pd: size_of::<bindings::ib_pd>(),
        size_ib_qp: size_of::<RawQp>(),
        ..pin_init::zeroed()
    };

    const TABLE: bindings::ib_device_ops = bindings::ib_device_ops {
        process_mad: Some(Self::process_mad),
        ..Self::WITHOUT_PROCESS_MAD
    };

    fn table() -> &'static bindings::ib_device_ops {
        &Self::TABLE
    }

    fn without_process_mad() -> &'static bindings::ib_device_ops {
        &Self::WITHOUT_PROCESS_MAD
    }
}

/// What C expects of an operation.
fn errno(result: Result) -> c_int {
    match result {
        Ok(()) => 0,
        Err(e) => e.to_errno(),
    }
}

/// The answer to whoever wants a memory region.
fn no_memory_region() -> *mut bindings::ib_mr {
    // SAFETY: The function only computes.
    unsafe { bindings::vhca_err_ptr(compat::eopnotsupp().to_errno() as c_long) }.cast()
}
