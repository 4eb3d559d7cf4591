// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The tracepoints `ib_umad:*`.
//!
//! C headers: `include/trace/events/ib_umad.h`; `bindings/trace_drop.h`
//!
//! What is to be traced is asked for only while somebody traces it: until then a tracepoint is an
//! instruction that does nothing.

use super::mad::MadHeader;
use crate::bindings;
use core::mem::size_of;
use kernel::prelude::*;

/// Bytes of a packet header, with the P_Key index.
const HEADER_LEN: usize = size_of::<bindings::ib_user_mad_hdr>();

/// What is known of a traced packet.
pub(crate) struct Traced {
    /// The device's number.
    pub(crate) device_index: u32,
    /// The port's number in its device.
    pub(crate) port: u32,
    /// The packet header.
    pub(crate) header: [u8; HEADER_LEN],
    /// The MAD's own header.
    pub(crate) mad: MadHeader,
}

/// Why a MAD reaches nobody; the texts are in `bindings/trace_drop.h`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DropReason {
    /// Received, but the file's queue is full.
    QueueFull = bindings::umad_drop_reason_UMAD_DROP_QUEUE_FULL,
    /// There is no memory.
    NoMemory = bindings::umad_drop_reason_UMAD_DROP_NO_MEMORY,
    /// Received, but nobody knows the way back to the sender.
    NoWayBack = bindings::umad_drop_reason_UMAD_DROP_NO_WAY_BACK,
    /// Its agent is gone, or was never there.
    AgentGone = bindings::umad_drop_reason_UMAD_DROP_AGENT_GONE,
    /// The device is gone, or the file is closed.
    FileGone = bindings::umad_drop_reason_UMAD_DROP_FILE_GONE,
    /// A send was cancelled, or failed in the hardware.
    SendFailed = bindings::umad_drop_reason_UMAD_DROP_SEND_FAILED,
    /// Written, but longer than messages may be.
    TooLong = bindings::umad_drop_reason_UMAD_DROP_TOO_LONG,
    /// Written, but the file has too many sends that are not done.
    TooManySends = bindings::umad_drop_reason_UMAD_DROP_TOO_MANY_SENDS,
    /// Written, but it could not be read from the program.
    CopyFailed = bindings::umad_drop_reason_UMAD_DROP_COPY_FAILED,
    /// Written, but its transaction is outstanding.
    Duplicate = bindings::umad_drop_reason_UMAD_DROP_DUPLICATE,
    /// Written, but refused for another reason.
    Refused = bindings::umad_drop_reason_UMAD_DROP_REFUSED,
}

/// Whether somebody traces `$tracepoint` (of `bindings`).
macro_rules! is_on {
    ($tracepoint:ident) => {{
        #[cfg(CONFIG_TRACEPOINTS)]
        // SAFETY: `bindings/trace.c` defines the tracepoint, which has such a key.
        unsafe {
            kernel::jump_label::static_branch_unlikely!(
                bindings::$tracepoint,
                bindings::tracepoint,
                key
            )
        }
        #[cfg(not(CONFIG_TRACEPOINTS))]
        false
    }};
}

/// A packet was written.
#[inline(always)]
pub(crate) fn written(packet: impl FnOnce() -> Traced) {
    if is_on!(__tracepoint_ib_umad_write) {
        emit(packet, |file, header, mad| {
            // SAFETY: By `emit`.
            unsafe { bindings::rust_do_trace_ib_umad_write(file, header, mad) }
        });
    }
}

/// Somebody traces what is read: then [`read_received`] or [`read_sent`] is to be told.
#[inline(always)]
pub(crate) fn are_reads_traced() -> bool {
    is_on!(__tracepoint_ib_umad_read_recv) || is_on!(__tracepoint_ib_umad_read_send)
}

/// A received MAD was read.
pub(crate) fn read_received(packet: impl FnOnce() -> Traced) {
    if is_on!(__tracepoint_ib_umad_read_recv) {
        emit(packet, |file, header, mad| {
            // SAFETY: By `emit`.
            unsafe { bindings::rust_do_trace_ib_umad_read_recv(file, header, mad) }
        });
    }
}

/// The report that nobody answered a send was read.
pub(crate) fn read_sent(packet: impl FnOnce() -> Traced) {
    if is_on!(__tracepoint_ib_umad_read_send) {
        emit(packet, |file, header, mad| {
            // SAFETY: By `emit`.
            unsafe { bindings::rust_do_trace_ib_umad_read_send(file, header, mad) }
        });
    }
}

/// Somebody traces what is dropped.
#[inline(always)]
pub(crate) fn are_drops_traced() -> bool {
    is_on!(__tracepoint_ib_umad_drop)
}

/// A packet is dropped. `error` is what its writer is told, if there is one.
#[inline(always)]
pub(crate) fn dropped(reason: DropReason, error: Option<Error>, packet: impl FnOnce() -> Traced) {
    if are_drops_traced() {
        emit(packet, |file, header, mad| {
            let error = error.map_or(0, Error::to_errno);
            // SAFETY: By `emit`. CAST: The enum has the C one's numbers.
            unsafe { bindings::rust_do_trace_ib_umad_drop(file, header, mad, reason as u32, error) }
        });
    }
}

/// Calls `tracepoint` with pointers to what the tracepoints look into, which are valid for the call.
#[cold]
#[inline(never)]
fn emit(
    packet: impl FnOnce() -> Traced,
    tracepoint: impl FnOnce(
        *mut bindings::ib_umad_file,
        *mut bindings::ib_user_mad_hdr,
        *mut bindings::ib_mad_hdr,
    ),
) {
    let mut packet = packet();
    let device = bindings::umad_traced_device {
        index: packet.device_index,
    };
    let port = bindings::ib_umad_port {
        ib_dev: &raw const device,
        port_num: packet.port,
    };
    let mut file = bindings::ib_umad_file {
        port: &raw const port,
    };
    // SAFETY: The structure is made of numbers; each sequence of its bytes is one.
    let mut header: bindings::ib_user_mad_hdr = unsafe { core::mem::transmute(packet.header) };
    // A `MadHeader` has the layout of the C structure.
    let mad = (&raw mut packet.mad).cast();
    tracepoint(&raw mut file, &raw mut header, mad);
}
