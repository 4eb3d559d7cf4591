// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Completion queues and queue pairs: 0 and 1, and those of unreliable datagrams.
//!
//! C header: `include/rdma/ib_verbs.h`, `struct ib_cq`, `struct ib_qp`
//!
//! Life cycle: `ib_core` makes and destroys both; a completion queue outlives the queue pairs that use it.
//! A [`QueuePair`] that is destroyed may still be referred to: it takes and completes nothing any more.
//!
//! Locking: a queue pair's lock is taken before that of its completion queue, and no driver's lock is taken
//! under either. Both may be taken in any context.

use super::{
    address::{
        Address,
        RawAh, //
    },
    lock::{
        new_irq_spinlock,
        IrqSpinLock, //
    }, //
};
use crate::bindings;
use core::{
    mem::ManuallyDrop,
    ptr::NonNull,
    slice, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{
        delay::fsleep,
        Delta, //
    },
    types::ForeignOwnable, //
};

/// Bytes of a global route header.
pub(crate) const GRH_LEN: usize = 40;

/// How a send ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendStatus(pub(crate) u32);

impl SendStatus {
    /// It is on the wire.
    pub(crate) const SUCCESS: Self = Self(bindings::ib_wc_status_IB_WC_SUCCESS);
    /// The queue pair went first.
    pub(crate) const FLUSHED: Self = Self(bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR);
    /// The highest status that there is.
    pub(crate) const MAX: Self = Self(bindings::ib_wc_status_IB_WC_GENERAL_ERR);
}

/// A ring of completions.
struct Ring {
    // Some owners want tens of thousands.
    entries: KVVec<bindings::ib_wc>,
    first: usize,
    len: usize,
    /// The owner wants to be told of the next completion.
    armed: bool,
    /// The owner has taken some, and has not asked for more since: it may still be at work on them.
    in_hand: bool,
}

/// A completion queue.
#[pin_data]
pub(super) struct CompletionQueue {
    cq: *mut bindings::ib_cq,
    #[pin]
    ring: IrqSpinLock<Ring>,
}

// SAFETY: The pointer is used under the conditions that `push` names; the ring is locked.
unsafe impl Send for CompletionQueue {}
// SAFETY: As above.
unsafe impl Sync for CompletionQueue {}

/// A completion queue as `ib_core` allocates it for this driver.
#[repr(C)]
pub(super) struct RawCq {
    cq: bindings::ib_cq,
    ours: *mut c_void,
}

impl RawCq {
    /// Sets up a new queue of at least `len` entries.
    ///
    /// # Safety
    ///
    /// `cq` must be a `RawCq` that `ib_core` has just allocated.
    pub(super) unsafe fn create(cq: *mut bindings::ib_cq, len: u32) -> Result {
        let len = usize::try_from(len).map_err(|_| EINVAL)?;
        let mut entries = KVVec::with_capacity(len, GFP_KERNEL)?;
        for _ in 0..len {
            entries.push(bindings::ib_wc::default(), GFP_KERNEL)?;
        }
        let ours = KBox::pin_init(
            pin_init!(CompletionQueue {
                cq,
                ring <- new_irq_spinlock!(Ring {
                    entries,
                    first: 0,
                    len: 0,
                    armed: false,
                    in_hand: false,
                }, "CompletionQueue::ring"),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: By the caller.
        unsafe {
            (*cq).cqe = c_int::try_from(len).unwrap_or(c_int::MAX);
            (*cq.cast::<Self>()).ours = ours.into_foreign();
        }
        Ok(())
    }

    /// Frees what `create` made.
    ///
    /// # Safety
    ///
    /// `cq` must be a queue that `create` set up and nobody uses any more.
    pub(super) unsafe fn destroy(cq: *mut bindings::ib_cq) {
        // SAFETY: By the caller.
        drop(unsafe { <Pin<KBox<CompletionQueue>>>::from_foreign((*cq.cast::<Self>()).ours) });
    }

    /// The queue.
    ///
    /// # Safety
    ///
    /// `cq` must be a queue that `create` set up, and live for `'a`.
    unsafe fn get<'a>(cq: *mut bindings::ib_cq) -> Pin<&'a CompletionQueue> {
        // SAFETY: By the caller.
        unsafe { <Pin<KBox<CompletionQueue>>>::borrow((*cq.cast::<Self>()).ours) }
    }

    /// Moves up to `num` completions to `wc`, returns how many.
    ///
    /// # Safety
    ///
    /// `cq` must be a live queue, `wc` valid for writes of `num` completions.
    pub(super) unsafe fn poll(
        cq: *mut bindings::ib_cq,
        num: c_int,
        wc: *mut bindings::ib_wc,
    ) -> c_int {
        // SAFETY: By the caller.
        let queue = unsafe { Self::get(cq) };
        let mut ring = queue.ring.lock();
        let mut done = 0;
        while done < num && ring.len > 0 {
            let (first, size) = (ring.first, ring.entries.len());
            let Some(entry) = ring.entries.get(first) else {
                break;
            };
            // CAST: Not negative, and fits.
            // SAFETY: By the caller, `done` is below `num`.
            unsafe { core::ptr::copy_nonoverlapping(entry, wc.add(done as usize), 1) };
            ring.first = (first + 1) % size;
            ring.len -= 1;
            done += 1;
        }
        ring.in_hand = done > 0;
        done
    }

    /// Waits until the owner is done with what it has taken. Sleeps, but not for ever.
    ///
    /// # Safety
    ///
    /// `cq` must be a live queue.
    pub(super) unsafe fn wait_until_idle(cq: *mut bindings::ib_cq) {
        /// More than any handler of a completion takes.
        const TRIES: u32 = 5000;
        // SAFETY: By the caller.
        let queue = unsafe { Self::get(cq) };
        for _ in 0..TRIES {
            if !queue.ring.lock().in_hand {
                break;
            }
            fsleep(Delta::from_millis(1));
        }
    }

    /// Asks for a call of the completion handler at the next completion. Returns whether there may be
    /// completions already, if that is asked for.
    ///
    /// # Safety
    ///
    /// `cq` must be a live queue.
    pub(super) unsafe fn arm(
        cq: *mut bindings::ib_cq,
        flags: bindings::ib_cq_notify_flags,
    ) -> c_int {
        // SAFETY: By the caller.
        let queue = unsafe { Self::get(cq) };
        let mut ring = queue.ring.lock();
        ring.armed = true;
        ring.in_hand = false;
        let report = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;
        c_int::from(report && ring.len > 0)
    }
}

impl CompletionQueue {
    /// Adds a completion and tells the owner, if that waits. The owner sizes the queue for all that it
    /// posts; a completion that finds no room is lost, as it is in hardware.
    ///
    /// # Safety
    ///
    /// The queue must not be destroyed meanwhile.
    unsafe fn push(&self, wc: bindings::ib_wc) {
        let mut ring = self.ring.lock();
        let size = ring.entries.len();
        if ring.len >= size {
            drop(ring);
            pr_err!("a completion queue is full\n");
            return;
        }
        let at = (ring.first + ring.len) % size;
        if let Some(entry) = ring.entries.get_mut(at) {
            *entry = wc;
        }
        ring.len += 1;
        let armed = core::mem::replace(&mut ring.armed, false);
        drop(ring);
        if !armed {
            return;
        }
        // SAFETY: By the caller the queue is live. Its handler only queues a work, or raises a softirq.
        unsafe {
            if let Some(handler) = (*self.cq).comp_handler {
                handler(self.cq, (*self.cq).cq_context);
            }
        }
    }
}

/// What identifies a posted send until it is completed.
#[must_use]
pub(crate) struct SendToken {
    id: u64,
    len: u32,
}

/// A send that `ib_core` posts.
pub(crate) struct SendRequest {
    /// To complete it with.
    pub(crate) token: SendToken,
    /// The MAD, or the data.
    pub(crate) payload: KVec<u8>,
    /// Where to.
    pub(crate) address: Address,
    /// Destination queue pair.
    pub(crate) remote_qpn: u32,
    /// Q_Key of the destination, or one that stands for the sender's own.
    pub(crate) remote_qkey: u32,
    /// Index of the P_Key to send a MAD with.
    pub(crate) pkey_index: u16,
}

impl SendRequest {
    /// Copies a posted work request. Does not sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is no send of at most `max` bytes, `ENOMEM`.
    ///
    /// # Safety
    ///
    /// `wr` must be a work request of a datagram, with addresses of kernel memory.
    pub(super) unsafe fn from_raw(wr: *const bindings::ib_send_wr, max: usize) -> Result<Self> {
        // SAFETY: By the caller; that of a datagram is part of an `ib_ud_wr`.
        let (wr, ud) = unsafe { (&*wr, &*kernel::container_of!(wr, bindings::ib_ud_wr, wr)) };
        if wr.opcode != bindings::ib_wr_opcode_IB_WR_SEND || ud.ah.is_null() {
            return Err(EINVAL);
        }
        let count = usize::try_from(wr.num_sge).map_err(|_| EINVAL)?;
        if count == 0 {
            return Err(EINVAL);
        }
        // SAFETY: By the caller.
        let segments = unsafe { slice::from_raw_parts(wr.sg_list, count) };
        let len = segments
            .iter()
            .try_fold(0u32, |sum, segment| sum.checked_add(segment.length))
            .ok_or(EINVAL)?;
        let room = usize::try_from(len).map_err(|_| EINVAL)?;
        if room > max {
            return Err(EINVAL);
        }
        let mut payload = KVec::with_capacity(room, GFP_ATOMIC)?;
        for segment in segments.iter().filter(|segment| segment.length != 0) {
            // CAST: Virtual DMA: the address is a pointer, and a u32 fits.
            // SAFETY: By the caller.
            let bytes = unsafe {
                slice::from_raw_parts(segment.addr as usize as *const u8, segment.length as usize)
            };
            payload.extend_from_slice(bytes, GFP_ATOMIC)?;
        }
        Ok(Self {
            token: SendToken {
                // SAFETY: Number or pointer, it is handed back as it is.
                id: unsafe { *wr.__bindgen_anon_1.wr_id },
                len,
            },
            payload,
            // SAFETY: By the caller; the handle is one of this driver's.
            address: unsafe { RawAh::address(ud.ah) },
            remote_qpn: ud.remote_qpn,
            remote_qkey: ud.remote_qkey,
            pkey_index: ud.pkey_index,
        })
    }
}

/// A datagram that arrives.
pub(crate) struct Arrival<'a> {
    /// The global route header, if it came with one.
    pub(crate) grh: Option<&'a [u8; GRH_LEN]>,
    /// The MAD, or the data.
    pub(crate) payload: &'a [u8],
    /// Queue pair of the sender.
    pub(crate) src_qp: u32,
    /// LID of the sender.
    pub(crate) slid: u32,
    /// Service level.
    pub(crate) sl: u8,
    /// Low bits of the LID that it was sent to.
    pub(crate) dlid_path_bits: u8,
    /// Index of its P_Key in the port's table.
    pub(crate) pkey_index: u16,
    /// The port whose queue pair it is.
    pub(crate) port: u32,
}

/// Why a datagram was not received.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecvFailure {
    /// The queue pair is in no state to receive, or gone.
    NotReceiving,
    /// No buffer is posted.
    NoBuffer,
    /// The buffer that is next is too small; it stays.
    TooLong,
}

/// A posted receive buffer.
#[derive(Clone, Copy)]
struct RecvBuffer {
    id: u64,
    addr: u64,
    len: u32,
}

/// What a queue pair is bound to.
#[derive(Clone, Copy)]
pub(crate) struct Binding {
    /// The port.
    pub(crate) port: u32,
    /// Index of the P_Key of its data.
    pub(crate) pkey_index: u16,
    /// Q_Key.
    pub(crate) qkey: u32,
}

/// What a queue pair does with a send.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    /// It sends.
    Ready,
    /// It completes it as flushed.
    Flushing,
    /// It refuses.
    Refusing,
}

/// What a queue pair's lock guards.
struct Inner {
    /// The C queue pair, until it is destroyed.
    qp: Option<NonNull<bindings::ib_qp>>,
    send_cq: *mut bindings::ib_cq,
    recv_cq: *mut bindings::ib_cq,
    state: bindings::ib_qp_state,
    binding: Binding,
    /// A ring of posted buffers.
    buffers: KVec<Option<RecvBuffer>>,
    first: usize,
    len: usize,
}

impl Inner {
    /// In a state in which it receives.
    fn is_receiving(&self) -> bool {
        matches!(
            self.state,
            bindings::ib_qp_state_IB_QPS_RTR
                | bindings::ib_qp_state_IB_QPS_RTS
                | bindings::ib_qp_state_IB_QPS_SQD
                | bindings::ib_qp_state_IB_QPS_SQE
        )
    }

    /// The buffer that is next, if one is posted.
    fn first_buffer(&self) -> Option<RecvBuffer> {
        *self.buffers.get(self.first)?
    }

    /// Takes the buffer that is next.
    fn take_buffer(&mut self) -> Option<RecvBuffer> {
        let buffer = self.buffers.get_mut(self.first)?.take()?;
        self.first = (self.first + 1) % self.buffers.len();
        self.len -= 1;
        Some(buffer)
    }

    /// Gives a buffer back unused.
    fn flush(&self, buffer: RecvBuffer) {
        let Some(qp) = self.qp else { return };
        let mut wc = bindings::ib_wc {
            status: bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
            opcode: bindings::ib_wc_opcode_IB_WC_RECV,
            qp: qp.as_ptr(),
            ..Default::default()
        };
        wc.__bindgen_anon_1.wr_id = ManuallyDrop::new(buffer.id);
        // SAFETY: The queue pair is there while its lock is held, and so is its completion queue.
        unsafe { RawCq::get(self.recv_cq).push(wc) };
    }
}

/// The same capacities once more.
fn copy_of(cap: &bindings::ib_qp_cap) -> bindings::ib_qp_cap {
    bindings::ib_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        ..Default::default()
    }
}

/// A queue pair: 0 or 1 of a port, or one of unreliable datagrams.
#[pin_data]
pub(crate) struct QueuePair {
    number: u32,
    kind: bindings::ib_qp_type,
    cap: bindings::ib_qp_cap,
    #[pin]
    inner: IrqSpinLock<Inner>,
}

// SAFETY: The pointers are used under the lock only, while the C queue pair is there.
unsafe impl Send for QueuePair {}
// SAFETY: As above.
unsafe impl Sync for QueuePair {}

/// A queue pair as `ib_core` allocates it for this driver.
#[repr(C)]
pub(super) struct RawQp {
    qp: bindings::ib_qp,
    ours: *mut c_void,
}

impl RawQp {
    /// Sets up a new queue pair.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for what is neither queue pair 0 or 1 nor one of plain datagrams; `ENOMEM`.
    ///
    /// # Safety
    ///
    /// `qp` must be a `RawQp` that `ib_core` has just allocated, `attr` be valid.
    pub(super) unsafe fn create(
        qp: *mut bindings::ib_qp,
        attr: *const bindings::ib_qp_init_attr,
        new_number: impl FnOnce() -> u32,
    ) -> Result<Arc<QueuePair>> {
        // SAFETY: By the caller.
        let attr = unsafe { &*attr };
        let number = match attr.qp_type {
            bindings::ib_qp_type_IB_QPT_SMI => 0,
            bindings::ib_qp_type_IB_QPT_GSI => 1,
            bindings::ib_qp_type_IB_QPT_UD if attr.create_flags == 0 && attr.srq.is_null() => {
                new_number()
            }
            _ => return Err(crate::compat::eopnotsupp()),
        };
        let room = usize::try_from(attr.cap.max_recv_wr).map_err(|_| EINVAL)?;
        let mut buffers = KVec::with_capacity(room, GFP_KERNEL)?;
        for _ in 0..room {
            buffers.push(None, GFP_KERNEL)?;
        }
        let ours = Arc::pin_init(
            pin_init!(QueuePair {
                number,
                kind: attr.qp_type,
                cap: copy_of(&attr.cap),
                inner <- new_irq_spinlock!(Inner {
                    qp: NonNull::new(qp),
                    send_cq: attr.send_cq,
                    recv_cq: attr.recv_cq,
                    state: bindings::ib_qp_state_IB_QPS_RESET,
                    binding: Binding {
                        port: attr.port_num,
                        pkey_index: 0,
                        qkey: 0,
                    },
                    buffers,
                    first: 0,
                    len: 0,
                }, "QueuePair::inner"),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: By the caller.
        unsafe {
            (*qp).qp_num = number;
            (*qp.cast::<Self>()).ours = ours.clone().into_foreign();
        }
        Ok(ours)
    }

    /// Takes what `create` made; nothing is received or completed any more.
    ///
    /// # Safety
    ///
    /// `qp` must be a queue pair that `create` set up, and that `ib_core` destroys.
    pub(super) unsafe fn destroy(qp: *mut bindings::ib_qp) -> Arc<QueuePair> {
        // SAFETY: By the caller.
        let ours = unsafe { Arc::<QueuePair>::from_foreign((*qp.cast::<Self>()).ours) };
        let mut inner = ours.inner.lock();
        inner.qp = None;
        drop(inner);
        ours
    }

    /// The queue pair.
    ///
    /// # Safety
    ///
    /// `qp` must be a queue pair that `create` set up, and live for `'a`.
    pub(super) unsafe fn get<'a>(
        qp: *mut bindings::ib_qp,
    ) -> kernel::sync::ArcBorrow<'a, QueuePair> {
        // SAFETY: By the caller.
        unsafe { Arc::<QueuePair>::borrow((*qp.cast::<Self>()).ours) }
    }
}

impl QueuePair {
    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether it carries something else than MADs.
    pub(crate) fn is_data(&self) -> bool {
        self.number > 1
    }

    /// What it is bound to.
    pub(crate) fn binding(&self) -> Binding {
        self.inner.lock().binding
    }

    /// Goes into another state, and takes over what the mask names.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such transition.
    pub(super) fn modify(&self, attr: &bindings::ib_qp_attr, mask: u32) -> Result {
        let names = |bit: bindings::ib_qp_attr_mask| mask & bit != 0;
        let mut inner = self.inner.lock();
        let current = if names(bindings::ib_qp_attr_mask_IB_QP_CUR_STATE) {
            attr.cur_qp_state
        } else {
            inner.state
        };
        let next = if names(bindings::ib_qp_attr_mask_IB_QP_STATE) {
            attr.qp_state
        } else {
            current
        };
        // SAFETY: The function looks into tables, and checks its arguments for them.
        if !unsafe { bindings::ib_modify_qp_is_ok(current, next, self.kind, mask) } {
            return Err(EINVAL);
        }
        if names(bindings::ib_qp_attr_mask_IB_QP_PORT) {
            inner.binding.port = attr.port_num;
        }
        if names(bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX) {
            inner.binding.pkey_index = attr.pkey_index;
        }
        if names(bindings::ib_qp_attr_mask_IB_QP_QKEY) {
            inner.binding.qkey = attr.qkey;
        }
        inner.state = next;
        match next {
            bindings::ib_qp_state_IB_QPS_RESET => while inner.take_buffer().is_some() {},
            bindings::ib_qp_state_IB_QPS_ERR => {
                while let Some(buffer) = inner.take_buffer() {
                    inner.flush(buffer);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Tells what it is like.
    pub(super) fn query(
        &self,
        attr: &mut bindings::ib_qp_attr,
        init_attr: &mut bindings::ib_qp_init_attr,
    ) {
        let inner = self.inner.lock();
        attr.qp_state = inner.state;
        attr.cur_qp_state = inner.state;
        attr.port_num = inner.binding.port;
        attr.pkey_index = inner.binding.pkey_index;
        attr.qkey = inner.binding.qkey;
        attr.path_mtu = bindings::ib_mtu_IB_MTU_4096;
        attr.cap = copy_of(&self.cap);
        init_attr.cap = copy_of(&self.cap);
        init_attr.qp_type = self.kind;
        init_attr.send_cq = inner.send_cq;
        init_attr.recv_cq = inner.recv_cq;
        init_attr.port_num = inner.binding.port;
    }

    /// What it does with a send now.
    pub(super) fn sending(&self) -> Sending {
        match self.inner.lock().state {
            bindings::ib_qp_state_IB_QPS_RTS => Sending::Ready,
            bindings::ib_qp_state_IB_QPS_ERR | bindings::ib_qp_state_IB_QPS_SQE => {
                Sending::Flushing
            }
            _ => Sending::Refusing,
        }
    }

    /// Takes a receive buffer.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not in one piece, or in this state; `ENOMEM` if there are too many already.
    ///
    /// # Safety
    ///
    /// `wr` must be a valid work request; its buffer must stay until the queue pair completes it or is
    /// destroyed.
    pub(super) unsafe fn post_recv(&self, wr: *const bindings::ib_recv_wr) -> Result {
        // SAFETY: By the caller.
        let buffer = unsafe {
            if (*wr).num_sge != 1 {
                return Err(EINVAL);
            }
            let segment = &*(*wr).sg_list;
            RecvBuffer {
                id: *(*wr).__bindgen_anon_1.wr_id,
                addr: segment.addr,
                len: segment.length,
            }
        };
        let mut inner = self.inner.lock();
        match inner.state {
            bindings::ib_qp_state_IB_QPS_RESET => return Err(EINVAL),
            bindings::ib_qp_state_IB_QPS_ERR => {
                inner.flush(buffer);
                return Ok(());
            }
            _ => {}
        }
        let size = inner.buffers.len();
        if inner.len >= size {
            return Err(ENOMEM);
        }
        let at = (inner.first + inner.len) % size;
        if let Some(slot) = inner.buffers.get_mut(at) {
            *slot = Some(buffer);
        }
        inner.len += 1;
        Ok(())
    }

    /// Receives a datagram into the next buffer. May be called in any context.
    pub(crate) fn receive(&self, arrival: &Arrival<'_>) -> core::result::Result<(), RecvFailure> {
        let mut inner = self.inner.lock();
        let Some(qp) = inner.qp.filter(|_| inner.is_receiving()) else {
            return Err(RecvFailure::NotReceiving);
        };
        let Some(buffer) = inner.first_buffer() else {
            return Err(RecvFailure::NoBuffer);
        };
        let len = GRH_LEN + arrival.payload.len();
        if usize::try_from(buffer.len).map_or(true, |room| room < len) {
            return Err(RecvFailure::TooLong);
        }
        let _ = inner.take_buffer();
        let grh = arrival.grh.unwrap_or(&[0; GRH_LEN]);
        // CAST: Virtual DMA: the address is a pointer.
        let to = buffer.addr as usize as *mut u8;
        // SAFETY: The buffer has `len` bytes at least and stays until it is completed, which is below.
        unsafe {
            core::ptr::copy_nonoverlapping(grh.as_ptr(), to, GRH_LEN);
            core::ptr::copy_nonoverlapping(
                arrival.payload.as_ptr(),
                to.add(GRH_LEN),
                arrival.payload.len(),
            );
        }
        let mut wc = bindings::ib_wc {
            status: bindings::ib_wc_status_IB_WC_SUCCESS,
            opcode: bindings::ib_wc_opcode_IB_WC_RECV,
            byte_len: u32::try_from(len).unwrap_or(0),
            qp: qp.as_ptr(),
            src_qp: arrival.src_qp,
            slid: arrival.slid,
            // CAST: A flag.
            wc_flags: if arrival.grh.is_some() {
                bindings::ib_wc_flags_IB_WC_GRH as c_int
            } else {
                0
            },
            pkey_index: arrival.pkey_index,
            sl: arrival.sl,
            dlid_path_bits: arrival.dlid_path_bits,
            port_num: arrival.port,
            ..Default::default()
        };
        wc.__bindgen_anon_1.wr_id = ManuallyDrop::new(buffer.id);
        // SAFETY: The queue pair is there while its lock is held, and so is its completion queue.
        unsafe { RawCq::get(inner.recv_cq).push(wc) };
        Ok(())
    }

    /// Completes a send. May be called in any context. Does nothing if the queue pair is gone, which
    /// `ib_mad` lets happen only when all of its sends are completed.
    pub(crate) fn complete(&self, token: SendToken, status: SendStatus) {
        let mut inner = self.inner.lock();
        let Some(qp) = inner.qp else { return };
        let failed = status != SendStatus::SUCCESS && status != SendStatus::FLUSHED;
        if failed && self.is_data() && inner.state == bindings::ib_qp_state_IB_QPS_RTS {
            inner.state = bindings::ib_qp_state_IB_QPS_SQE;
        }
        let mut wc = bindings::ib_wc {
            status: status.0,
            opcode: bindings::ib_wc_opcode_IB_WC_SEND,
            byte_len: token.len,
            qp: qp.as_ptr(),
            ..Default::default()
        };
        wc.__bindgen_anon_1.wr_id = ManuallyDrop::new(token.id);
        // SAFETY: As in `receive`.
        unsafe { RawCq::get(inner.send_cq).push(wc) };
    }
}
