// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Completion queues, and queue pairs 0 and 1.
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
    entries: KVec<bindings::ib_wc>,
    first: usize,
    len: usize,
    /// The owner wants to be told of the next completion.
    armed: bool,
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
        let mut entries = KVec::with_capacity(len, GFP_KERNEL)?;
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
        done
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
        // SAFETY: By the caller the queue is live. Its handler only queues a work.
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
    cqe: *mut bindings::ib_cqe,
    len: u32,
}

// SAFETY: The pointer is only handed back.
unsafe impl Send for SendToken {}
// SAFETY: As above.
unsafe impl Sync for SendToken {}

/// A send that `ib_core` posts.
pub(crate) struct SendRequest {
    /// To complete it with.
    pub(crate) token: SendToken,
    /// The MAD.
    pub(crate) mad: KVec<u8>,
    /// Where to.
    pub(crate) address: Address,
    /// Destination queue pair.
    pub(crate) remote_qpn: u32,
    /// Index of the P_Key to send with.
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
    /// `wr` must be a work request for queue pair 0 or 1 with addresses of kernel memory.
    pub(super) unsafe fn from_raw(wr: *const bindings::ib_send_wr, max: usize) -> Result<Self> {
        // SAFETY: By the caller; a work request for these queue pairs is part of an `ib_ud_wr`.
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
        let mut mad = KVec::with_capacity(room, GFP_ATOMIC)?;
        for segment in segments.iter().filter(|segment| segment.length != 0) {
            // CAST: Virtual DMA: the address is a pointer, and a u32 fits.
            // SAFETY: By the caller.
            let bytes = unsafe {
                slice::from_raw_parts(segment.addr as usize as *const u8, segment.length as usize)
            };
            mad.extend_from_slice(bytes, GFP_ATOMIC)?;
        }
        Ok(Self {
            token: SendToken {
                // SAFETY: Work requests of the kernel name their completion entry.
                cqe: unsafe { *wr.__bindgen_anon_1.wr_cqe },
                len,
            },
            mad,
            // SAFETY: By the caller; the handle is one of this driver's.
            address: unsafe { RawAh::address(ud.ah) },
            remote_qpn: ud.remote_qpn,
            pkey_index: ud.pkey_index,
        })
    }
}

/// A MAD that arrives.
pub(crate) struct Arrival<'a> {
    /// The global route header, if it came with one.
    pub(crate) grh: Option<&'a [u8; GRH_LEN]>,
    /// The MAD.
    pub(crate) mad: &'a [u8],
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

/// Why a MAD was not received.
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
    cqe: *mut bindings::ib_cqe,
    addr: u64,
    len: u32,
}

/// What a queue pair's lock guards.
struct Inner {
    /// The C queue pair, until it is destroyed.
    qp: Option<NonNull<bindings::ib_qp>>,
    send_cq: *mut bindings::ib_cq,
    recv_cq: *mut bindings::ib_cq,
    /// In a state in which it receives.
    receiving: bool,
    /// A ring of posted buffers.
    buffers: KVec<Option<RecvBuffer>>,
    first: usize,
    len: usize,
}

/// Queue pair 0 or 1 of a port.
#[pin_data]
pub(crate) struct QueuePair {
    number: u32,
    port: u32,
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
    /// `EOPNOTSUPP` for any but queue pairs 0 and 1; `ENOMEM`.
    ///
    /// # Safety
    ///
    /// `qp` must be a `RawQp` that `ib_core` has just allocated, `attr` be valid.
    pub(super) unsafe fn create(
        qp: *mut bindings::ib_qp,
        attr: *const bindings::ib_qp_init_attr,
    ) -> Result<Arc<QueuePair>> {
        // SAFETY: By the caller.
        let attr = unsafe { &*attr };
        let number = match attr.qp_type {
            bindings::ib_qp_type_IB_QPT_SMI => 0,
            bindings::ib_qp_type_IB_QPT_GSI => 1,
            _ => return Err(crate::compat::EOPNOTSUPP),
        };
        let room = usize::try_from(attr.cap.max_recv_wr).map_err(|_| EINVAL)?;
        let mut buffers = KVec::with_capacity(room, GFP_KERNEL)?;
        for _ in 0..room {
            buffers.push(None, GFP_KERNEL)?;
        }
        let ours = Arc::pin_init(
            pin_init!(QueuePair {
                number,
                port: attr.port_num,
                inner <- new_irq_spinlock!(Inner {
                    qp: NonNull::new(qp),
                    send_cq: attr.send_cq,
                    recv_cq: attr.recv_cq,
                    receiving: false,
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
        inner.receiving = false;
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
    /// Its number, 0 or 1.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Its port.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Goes into a state in which it receives, or into one in which it does not.
    pub(super) fn set_state(&self, state: bindings::ib_qp_state) {
        self.inner.lock().receiving = matches!(
            state,
            bindings::ib_qp_state_IB_QPS_RTR
                | bindings::ib_qp_state_IB_QPS_RTS
                | bindings::ib_qp_state_IB_QPS_SQD
                | bindings::ib_qp_state_IB_QPS_SQE
        );
    }

    /// Takes a receive buffer.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not in one piece, `ENOMEM` if there are too many already.
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
                cqe: *(*wr).__bindgen_anon_1.wr_cqe,
                addr: segment.addr,
                len: segment.length,
            }
        };
        let mut inner = self.inner.lock();
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

    /// Receives a MAD into the next buffer. May be called in any context.
    pub(crate) fn receive(&self, arrival: &Arrival<'_>) -> core::result::Result<(), RecvFailure> {
        let mut inner = self.inner.lock();
        let Some(qp) = inner.qp.filter(|_| inner.receiving) else {
            return Err(RecvFailure::NotReceiving);
        };
        let (first, size) = (inner.first, inner.buffers.len());
        let Some(buffer) = inner.buffers.get_mut(first).and_then(Option::take) else {
            return Err(RecvFailure::NoBuffer);
        };
        let len = GRH_LEN + arrival.mad.len();
        if usize::try_from(buffer.len).map_or(true, |room| room < len) {
            // Not used up.
            if let Some(slot) = inner.buffers.get_mut(first) {
                *slot = Some(buffer);
            }
            return Err(RecvFailure::TooLong);
        }
        inner.first = (first + 1) % size;
        inner.len -= 1;
        let grh = arrival.grh.unwrap_or(&[0; GRH_LEN]);
        // CAST: Virtual DMA: the address is a pointer.
        let to = buffer.addr as usize as *mut u8;
        // SAFETY: The buffer has `len` bytes at least and stays until it is completed, which is below.
        unsafe {
            core::ptr::copy_nonoverlapping(grh.as_ptr(), to, GRH_LEN);
            core::ptr::copy_nonoverlapping(
                arrival.mad.as_ptr(),
                to.add(GRH_LEN),
                arrival.mad.len(),
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
        wc.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(buffer.cqe);
        // SAFETY: The queue pair is there while its lock is held, and so is its completion queue.
        unsafe { RawCq::get(inner.recv_cq).push(wc) };
        Ok(())
    }

    /// Completes a send. May be called in any context. Does nothing if the queue pair is gone, which
    /// `ib_mad` lets happen only when all of its sends are completed.
    pub(crate) fn complete(&self, token: SendToken, status: SendStatus) {
        let inner = self.inner.lock();
        let Some(qp) = inner.qp else { return };
        let mut wc = bindings::ib_wc {
            status: status.0,
            opcode: bindings::ib_wc_opcode_IB_WC_SEND,
            byte_len: token.len,
            qp: qp.as_ptr(),
            ..Default::default()
        };
        wc.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(token.cqe);
        // SAFETY: As in `receive`.
        unsafe { RawCq::get(inner.send_cq).push(wc) };
    }
}
