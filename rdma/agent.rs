// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! MAD agents: who sends MADs, and who is told of received and completed ones.
//!
//! C header: `include/rdma/ib_mad.h`, `struct ib_mad_agent`
//!
//! Life cycle: [`Agent::register`] makes the agent and may call the handler before it returns;
//! dropping the agent unregisters it, which cancels its sends, waits for every handler and for every
//! send buffer to be freed, and only then drops the handler. Handlers run in process context, in
//! `ib_mad`'s work queues or in whoever unregisters, and may run at the same time.

use super::{
    address::AddressHandle,
    device::DeviceGuard,
    recv::{
        RecvInfo,
        RecvMad, //
    }, //
};
use crate::{
    bindings,
    chrdev::coverage::OnBehalfOf, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::Arc,
    types::ForeignOwnable, //
};

/// One of the two queue pairs of a port that carry MADs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ManagementQp {
    /// QP0, the subnet management interface.
    Smi,
    /// QP1, the general services interface.
    Gsi,
}

/// Which received requests an agent wants.
#[derive(Clone, Copy)]
pub(crate) struct Interest {
    /// Management class.
    pub(crate) mgmt_class: u8,
    /// Version of the class.
    pub(crate) class_version: u8,
    /// Whose class it is, for the vendor classes 0x30 to 0x4f.
    pub(crate) oui: [u8; 3],
    /// Methods, bit n of word n / 64.
    pub(crate) methods: [u64; 2],
}

/// What [`Agent::register`] wants to know.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    /// Queue pair.
    pub(crate) qp: ManagementQp,
    /// Which requests to receive; `None` for an agent that only gets responses.
    pub(crate) interest: Option<Interest>,
    /// RMPP version, 0 for none.
    pub(crate) rmpp_version: u8,
    /// Leave RMPP to the agent (`IB_MAD_USER_RMPP`).
    pub(crate) user_rmpp: bool,
}

/// How a send ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendStatus {
    /// It was sent and, if a response was awaited, that came.
    Success,
    /// No response came in time.
    TimedOut,
    /// Cancelled, or the queue pair failed.
    Failed,
}

/// What an agent's owner is told.
pub(crate) trait MadHandler: Sized + Send + Sync + 'static {
    /// What goes with each send, from posting it to its completion.
    type Send: ForeignOwnable + Send;

    /// On whose behalf it is told.
    fn on_behalf_of(&self) -> OnBehalfOf;

    /// A send is completed.
    fn sent(&self, send: Self::Send, status: SendStatus);

    /// A MAD came in. If `is_answer`, a request with its class and transaction id was waiting for it;
    /// [`MadHandler::sent`] is called for that later.
    fn received(&self, mad: RecvMad, info: &RecvInfo<'_>, is_answer: bool);
}

/// A registered MAD agent.
///
/// Dropping it sleeps, and waits for writers inside [`super::send::SendMad`]: never under a lock that
/// a handler takes.
///
/// # Invariants
///
/// `agent` is registered, its `context` is `_handler`, and its device is `device`.
pub(crate) struct Agent<H: MadHandler> {
    agent: NonNull<bindings::ib_mad_agent>,
    registration: Registration,
    /// DROP ORDER: handler and device go when the agent is unregistered, see `drop`.
    _handler: Arc<H>,
    device: DeviceGuard,
}

// SAFETY: `ib_mad` lets every function be called from any thread; the handler is `Send + Sync`.
unsafe impl<H: MadHandler> Send for Agent<H> {}
// SAFETY: As above; the functions may be called at the same time.
unsafe impl<H: MadHandler> Sync for Agent<H> {}

impl<H: MadHandler> Agent<H> {
    /// Registers an agent on a port. May sleep.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` if the port lacks the queue pair, `EINVAL` for a class, version or RMPP
    /// version that cannot be, or methods that another agent has, `ENOMEM`, or what a security module
    /// says. Source: `ib_register_mad_agent`.
    pub(crate) fn register(
        device: DeviceGuard,
        port: u32,
        reg: &Registration,
        handler: Arc<H>,
    ) -> Result<Self> {
        let mut req = reg.interest.map(|interest| bindings::ib_mad_reg_req {
            mgmt_class: interest.mgmt_class,
            mgmt_class_version: interest.class_version,
            oui: interest.oui,
            method_mask: bitmap(&interest.methods),
        });
        let req = req
            .as_mut()
            .map_or(core::ptr::null_mut(), |req| &raw mut *req);
        let qp_type = match reg.qp {
            ManagementQp::Smi => bindings::ib_qp_type_IB_QPT_SMI,
            ManagementQp::Gsi => bindings::ib_qp_type_IB_QPT_GSI,
        };
        let flags = if reg.user_rmpp { USER_RMPP } else { 0 };
        // SAFETY: The guard keeps the device; `req` is null or outlives the call, which copies it; the
        // handler lives until the agent is unregistered, see `drop`.
        let agent = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                device.as_raw(),
                port,
                qp_type,
                req,
                reg.rmpp_version,
                Some(Self::send_handler),
                Some(Self::recv_handler),
                Arc::as_ptr(&handler).cast_mut().cast(),
                flags,
            )
        })?;
        // INVARIANT: Just registered with this context and device.
        Ok(Self {
            agent: NonNull::new(agent).ok_or(ENOMEM)?,
            registration: *reg,
            _handler: handler,
            device,
        })
    }

    /// The C agent.
    pub(super) fn as_raw(&self) -> *mut bindings::ib_mad_agent {
        self.agent.as_ptr()
    }

    /// What was asked for when it was registered.
    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    /// The device.
    pub(super) fn device(&self) -> &DeviceGuard {
        &self.device
    }

    /// The port's number.
    pub(crate) fn port(&self) -> u32 {
        // SAFETY: By the type invariant; the field does not change.
        u32::from(unsafe { (*self.as_raw()).port_num })
    }

    /// Upper half of the transaction ids of the agent's requests; routes the responses to it.
    pub(crate) fn hi_tid(&self) -> u32 {
        // SAFETY: By the type invariant; the field does not change.
        unsafe { (*self.as_raw()).hi_tid }
    }

    /// Whether `ib_mad` does RMPP for the agent.
    pub(crate) fn kernel_rmpp(&self) -> bool {
        // SAFETY: By the type invariant.
        unsafe { bindings::ib_mad_kernel_rmpp_agent(self.as_raw()) != 0 }
    }

    /// # Safety
    ///
    /// Called by `ib_mad` with a registered agent of this type and a send that
    /// [`super::send::SendMad::post`] posted.
    unsafe extern "C" fn send_handler(
        agent: *mut bindings::ib_mad_agent,
        wc: *mut bindings::ib_mad_send_wc,
    ) {
        // SAFETY: `ib_mad` passes valid pointers; the context is the handler, which `drop` keeps until
        // no handler runs any more.
        let (handler, buf, status) =
            unsafe { (&*(*agent).context.cast::<H>(), (*wc).send_buf, (*wc).status) };
        let _section = handler.on_behalf_of().begin();
        // SAFETY: `post` put the foreign pointers there, and `ib_mad` completes each send once.
        let (send, ah) = unsafe {
            (
                H::Send::from_foreign((*buf).context[0]),
                Arc::<AddressHandle>::from_foreign((*buf).context[1]),
            )
        };
        handler.sent(
            send,
            match status {
                bindings::ib_wc_status_IB_WC_SUCCESS => SendStatus::Success,
                bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR => SendStatus::TimedOut,
                _ => SendStatus::Failed,
            },
        );
        drop(ah);
        // SAFETY: A completed send belongs to its poster. Last, since it lets go of the agent.
        unsafe { bindings::ib_free_send_mad(buf) };
    }

    /// # Safety
    ///
    /// Called by `ib_mad` with a registered agent of this type, and a received MAD that the handler is
    /// to free.
    unsafe extern "C" fn recv_handler(
        agent: *mut bindings::ib_mad_agent,
        send_buf: *mut bindings::ib_mad_send_buf,
        wc: *mut bindings::ib_mad_recv_wc,
    ) {
        let Some(wc) = NonNull::new(wc) else { return };
        // SAFETY: As in `send_handler`.
        let handler = unsafe { &*(*agent).context.cast::<H>() };
        let _section = handler.on_behalf_of().begin();
        // SAFETY: `ib_mad` gives the MAD away.
        let mad = unsafe { RecvMad::from_raw(wc) };
        // SAFETY: The work completion and the GRH are valid while the handler runs.
        let info = unsafe { RecvInfo::new(agent, wc) };
        if !info.is_success() {
            return;
        }
        // What the buffer holds is not looked at: it is that of whoever sent the request at hop 0 of a
        // directed route, and a send that fails meanwhile may be freed. A request that comes with a
        // buffer is no answer.
        let is_answer = !send_buf.is_null() && mad.header().is_response();
        handler.received(mad, &info, is_answer);
    }
}

impl<H: MadHandler> Drop for Agent<H> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the agent is registered, and nobody else unregisters it. The
        // call returns when no handler runs and no send buffer is left; the fields go after it.
        unsafe { bindings::ib_unregister_mad_agent(self.agent.as_ptr()) };
    }
}

/// `IB_MAD_USER_RMPP`.
pub(crate) const USER_RMPP: u32 = 1;
const _: () = assert!(USER_RMPP == bindings::IB_MAD_USER_RMPP);

// A C bitmap is an array of `unsigned long`.
const _: () = assert!(c_ulong::BITS == u64::BITS);

/// A set of methods as a C bitmap.
fn bitmap(words: &[u64; 2]) -> [c_ulong; 2] {
    // CAST: Both have 64 bits.
    words.map(|word| word as c_ulong)
}
