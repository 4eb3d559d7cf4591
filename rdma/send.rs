// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! MADs to send.
//!
//! C header: `include/rdma/ib_mad.h`, `struct ib_mad_send_buf`
//!
//! A [`SendMad`] keeps `ib_mad`'s agent from being unregistered, so it must be short-lived: no user
//! memory is touched and no address resolved while one exists. [`SendMad::post`] gives it to `ib_mad`,
//! which gives it back to the agent's send handler, once.

use super::{
    address::AddressHandle,
    agent::{
        Agent,
        MadHandler, //
    }, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::{
        null_mut,
        NonNull, //
    },
    slice, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::Arc,
    types::ForeignOwnable, //
};

/// What must be known to make a [`SendMad`].
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Queue pair to send to.
    pub(crate) remote_qpn: u32,
    /// Index of the P_Key to send with.
    pub(crate) pkey_index: u16,
    /// Send as many segments by RMPP.
    pub(crate) rmpp: bool,
    /// Bytes of all headers.
    pub(crate) hdr_len: usize,
    /// Bytes of data behind the headers.
    pub(crate) data_len: usize,
    /// Base version of the MAD, which says how large a segment is.
    pub(crate) base_version: u8,
}

/// A MAD that is not sent yet.
///
/// # Invariants
///
/// `buf` is a send buffer that nobody else uses or frees.
pub(crate) struct SendMad<'a, H: MadHandler> {
    buf: NonNull<bindings::ib_mad_send_buf>,
    shape: Shape,
    _agent: PhantomData<&'a Agent<H>>,
}

impl<'a, H: MadHandler> SendMad<'a, H> {
    /// Makes room for a MAD, all zeroes, but for an RMPP header that `ib_mad` fills in.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is too long for one MAD and not sent by RMPP, or the agent cannot RMPP; `ENOMEM`.
    pub(crate) fn new(agent: &'a Agent<H>, shape: Shape) -> Result<Self> {
        let hdr_len = c_int::try_from(shape.hdr_len).map_err(|_| EINVAL)?;
        let data_len = c_int::try_from(shape.data_len).map_err(|_| EINVAL)?;
        // SAFETY: The agent is registered.
        let buf = from_err_ptr(unsafe {
            bindings::ib_create_send_mad(
                agent.as_raw(),
                shape.remote_qpn,
                shape.pkey_index,
                c_int::from(shape.rmpp),
                hdr_len,
                data_len,
                // Charged to whose program writes.
                bindings::GFP_KERNEL_ACCOUNT,
                shape.base_version,
            )
        })?;
        // INVARIANT: Just made.
        Ok(Self {
            buf: NonNull::new(buf).ok_or(ENOMEM)?,
            shape,
            _agent: PhantomData,
        })
    }

    /// The headers and, unless it is sent by RMPP, the data behind them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = if self.shape.rmpp {
            self.shape.hdr_len
        } else {
            self.shape.hdr_len + self.shape.data_len
        };
        // SAFETY: By the type invariant. `ib_create_send_mad` allocates `hdr_len` bytes for an RMPP
        // MAD, and for others a whole MAD, which it checked that `hdr_len + data_len` fits in.
        unsafe { slice::from_raw_parts_mut((*self.buf.as_ptr()).mad.cast(), len) }
    }

    /// The segments for the data of an RMPP MAD, one after the other; none of another MAD.
    pub(crate) fn segments_mut(&mut self) -> SegmentsMut<'_> {
        let buf = self.buf.as_ptr();
        // SAFETY: By the type invariant.
        let (count, len) = unsafe { ((*buf).seg_count, (*buf).seg_size) };
        // INVARIANT: The buffer has segments 1..=seg_count, each of `seg_size` bytes.
        SegmentsMut {
            buf,
            next: 1,
            last: if self.shape.rmpp { count } else { 0 },
            len: usize::try_from(len).unwrap_or(0),
            _mad: PhantomData,
        }
    }

    /// Sends the MAD. Once this is called, the agent's send handler may run with `send`.
    ///
    /// `timeout_ms` is how long to wait for a response, 0 for none; `retries` how often to send again.
    ///
    /// # Errors
    ///
    /// What `ib_post_send_mad` says, and `send` back: the handler is not called for it.
    pub(crate) fn post(
        self,
        ah: Arc<AddressHandle>,
        timeout_ms: u32,
        retries: u32,
        send: H::Send,
    ) -> core::result::Result<(), (Error, H::Send)> {
        let buf = self.buf.as_ptr();
        // SAFETY: The agent of the buffer is registered, and its queue pair has a protection domain.
        if !ah.is_of(unsafe { (*(*(*buf).mad_agent).qp).pd }) {
            // Made for another port.
            return Err((EINVAL, send));
        }
        core::mem::forget(self);
        // SAFETY: By the type invariant, the buffer is ours until it is posted. `ib_mad` takes the bits
        // of `timeout_ms` as unsigned again.
        unsafe {
            (*buf).ah = ah.as_raw();
            (*buf).context[1] = ah.into_foreign();
            (*buf).timeout_ms = timeout_ms.cast_signed_bits();
            (*buf).retries = retries.cast_signed_bits();
            (*buf).context[0] = send.into_foreign();
        }
        // SAFETY: The buffer is complete; the send handler owns it from here on, unless this fails.
        match to_result(unsafe { bindings::ib_post_send_mad(buf, null_mut()) }) {
            Ok(()) => Ok(()),
            Err(e) => {
                // SAFETY: The send was refused, so all of it is ours again.
                let send = unsafe {
                    let ah = Arc::<AddressHandle>::from_foreign((*buf).context[1]);
                    let send = H::Send::from_foreign((*buf).context[0]);
                    bindings::ib_free_send_mad(buf);
                    drop(ah);
                    send
                };
                Err((e, send))
            }
        }
    }
}

/// Iterates over the segments of a MAD that is not sent yet.
///
/// # Invariants
///
/// `buf` has segments `next..=last`, each of `len` bytes, and nobody else uses them for `'a`.
pub(crate) struct SegmentsMut<'a> {
    buf: *mut bindings::ib_mad_send_buf,
    next: c_int,
    last: c_int,
    len: usize,
    _mad: PhantomData<&'a mut [u8]>,
}

impl<'a> Iterator for SegmentsMut<'a> {
    type Item = &'a mut [u8];

    fn next(&mut self) -> Option<&'a mut [u8]> {
        if self.next > self.last {
            return None;
        }
        // SAFETY: By the type invariant; each segment is handed out once.
        let segment = unsafe {
            let segment = bindings::ib_get_rmpp_segment(self.buf, self.next);
            slice::from_raw_parts_mut(segment.cast(), self.len)
        };
        self.next += 1;
        Some(segment)
    }
}

impl<H: MadHandler> Drop for SendMad<'_, H> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { bindings::ib_free_send_mad(self.buf.as_ptr()) };
    }
}

/// The same bits as a signed number (`u32::cast_signed` is not stable in the kernel's compiler).
trait CastSignedBits {
    fn cast_signed_bits(self) -> c_int;
}

impl CastSignedBits for u32 {
    fn cast_signed_bits(self) -> c_int {
        c_int::from_ne_bytes(self.to_ne_bytes())
    }
}
