// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The ioctls that register and unregister agents.
//!
//! A registration reads the program's request, reserves an id, registers with `ib_mad`, publishes the
//! agent and tells the program its id, in this order; if the last fails, all of it is undone. Between,
//! no lock is held that a handler, another file, or open() would need, and none at all while the
//! program's memory is touched.

#![forbid(unsafe_code)]

use crate::{
    agents::Handler,
    chrdev::{
        file::TaskName,
        log::is_message_allowed, //
    },
    file::UmadFile,
    rdma::{
        agent::{
            Agent,
            Interest,
            ManagementQp,
            Registration, //
        },
        revocable::Owner, //
    },
    seat::{
        AgentId,
        Seat, //
    },
    uapi::{
        Layout,
        RegReq,
        RegReq2,
        MAX_AGENTS,
        REG_FLAGS_CAP,
        REG_USER_RMPP, //
    }, //
};
use kernel::{
    dev_notice,
    dev_warn,
    prelude::*,
    str::BStr,
    sync::Arc,
    uaccess::{
        UserPtr,
        UserSlice, //
    }, //
};

/// Tells the kernel's log why a registration is refused. Scripts know these messages, with the names of
/// functions of the C module in them. What `ib_mad` refuses it tells itself, if it is asked to
/// (dynamic debug).
macro_rules! notice {
    ($file:expr, $($message:tt)*) => {
        if is_message_allowed() {
            dev_notice!($file.node(), $($message)*);
        }
    };
}

/// REGISTER_AGENT.
///
/// # Errors
///
/// In this order: `EPIPE` if the device is gone; `EFAULT`; `EINVAL` for a queue pair other than 0 and 1;
/// `ENOMEM` for a 33rd agent; what [`Agent::register`] says; `EFAULT` if the id cannot be written.
pub(crate) fn register_agent(file: Arc<UmadFile>, arg: UserPtr) -> Result {
    const CALL: &str = "ib_umad_reg_agent";
    check_device(&file, CALL)?;
    let bytes: [u8; core::mem::size_of::<RegReq>()] = read_user(arg)?;
    let req = RegReq::read_from_bytes(&bytes).map_err(|_| EINVAL)?;
    let qp = management_qp(&file, CALL, u32::from(req.qpn))?;
    let interest = (req.mgmt_class != 0).then(|| Interest {
        mgmt_class: req.mgmt_class,
        class_version: req.mgmt_class_version,
        oui: req.oui,
        methods: req.methods(),
    });
    let seat = register(&file, CALL, |_| {
        Ok(Registration {
            qp,
            interest,
            rmpp_version: req.rmpp_version,
            user_rmpp: false,
        })
    })?;
    tell_id(&file, seat, arg.wrapping_byte_add(RegReq::ID_OFFSET))?;
    if file.confirm(seat, None) == Some(Layout::Old) && is_message_allowed() {
        dev_warn!(
            file.node(),
            "process {} did not enable P_Key index support.\n",
            BStr::from_bytes(TaskName::current().as_bytes())
        );
        dev_warn!(
            file.node(),
            "   Documentation/infiniband/user_mad.rst has info on the new ABI.\n"
        );
    }
    Ok(())
}

/// REGISTER_AGENT2.
///
/// # Errors
///
/// In this order: `EPIPE` if the device is gone; `EFAULT`; `EINVAL` for a queue pair other than 0 and 1;
/// `EINVAL` for unknown flags, with the known ones written back (`EFAULT` if that fails); `ENOMEM` for a
/// 33rd agent; `EINVAL` for an OUI of more than 24 bits; what [`Agent::register`] says; `EFAULT` if the id
/// cannot be written.
pub(crate) fn register_agent2(file: Arc<UmadFile>, arg: UserPtr) -> Result {
    const CALL: &str = "ib_umad_reg_agent2";
    check_device(&file, CALL)?;
    let bytes: [u8; core::mem::size_of::<RegReq2>()] = read_user(arg)?;
    let req = RegReq2::read_from_bytes(&bytes).map_err(|_| EINVAL)?;
    let qp = management_qp(&file, CALL, req.qpn)?;
    if req.flags & !REG_FLAGS_CAP != 0 {
        notice!(
            file,
            "{} failed: invalid registration flags specified {:#x}; supported {:#x}\n",
            CALL,
            req.flags,
            REG_FLAGS_CAP
        );
        write_user(arg.wrapping_byte_add(RegReq2::FLAGS_OFFSET), REG_FLAGS_CAP)?;
        return Err(EINVAL);
    }
    let seat = register(&file, CALL, |file| {
        let interest = if req.mgmt_class != 0 {
            Some(Interest {
                mgmt_class: req.mgmt_class,
                class_version: req.mgmt_class_version,
                oui: oui(file, CALL, req.oui)?,
                methods: req.method_mask,
            })
        } else {
            None
        };
        Ok(Registration {
            qp,
            interest,
            rmpp_version: req.rmpp_version,
            user_rmpp: req.flags & REG_USER_RMPP != 0,
        })
    })?;
    tell_id(&file, seat, arg.wrapping_byte_add(RegReq2::ID_OFFSET))?;
    file.confirm(seat, Some(Layout::PKeyIndex));
    Ok(())
}

/// UNREGISTER_AGENT. When it returns, the agent's classes and methods are free.
///
/// # Errors
///
/// `EFAULT`; `EINVAL` if there is no such agent.
pub(crate) fn unregister_agent(file: &UmadFile, arg: UserPtr) -> Result {
    let id = AgentId::from_user(u32::from_ne_bytes(read_user(arg)?))?;
    // Who registers after this shall find the id and the methods free, not just the id.
    let _one_at_a_time = file.registering().lock();
    file.take_agent(id).ok_or(EINVAL)?.retire();
    Ok(())
}

/// Registers an agent and publishes it. `registration` is asked once an id is reserved.
fn register(
    file: &Arc<UmadFile>,
    call: &str,
    registration: impl FnOnce(&UmadFile) -> Result<Registration>,
) -> Result<Seat> {
    // A guard of the device: its removal waits until this is done or undone.
    let device = file.port().device().ok_or(EPIPE)?;
    let _one_at_a_time = file.registering().lock();
    let seat = file.reserve_seat().inspect_err(|e| {
        if *e == ENOMEM {
            notice!(file, "{}: Max Agents ({}) reached\n", call, MAX_AGENTS);
        }
    })?;
    let agent = registration(file)
        .and_then(|registration| {
            let handler = Handler::new(file.clone(), seat)?;
            Agent::register(device, file.port().number(), &registration, handler)
        })
        .and_then(|agent| Owner::new(agent, GFP_KERNEL))
        .inspect_err(|_| file.cancel_seat(seat))?;
    match file.publish(seat, agent) {
        Ok(()) => Ok(seat),
        Err(agent) => {
            // The device went while the agent was being registered.
            agent.retire();
            Err(EPIPE)
        }
    }
}

/// Tells the program the id of its new agent; without that, there is no agent.
fn tell_id(file: &UmadFile, seat: Seat, to: UserPtr) -> Result {
    write_user(to, seat.id().as_u32()).inspect_err(|_| {
        let _one_at_a_time = file.registering().lock();
        if let Some(agent) = file.take_seat(seat) {
            agent.retire();
        }
    })
}

fn check_device(file: &UmadFile, call: &str) -> Result {
    if file.port().is_live() {
        return Ok(());
    }
    notice!(file, "{}: invalid device\n", call);
    Err(EPIPE)
}

fn management_qp(file: &UmadFile, call: &str, qpn: u32) -> Result<ManagementQp> {
    match qpn {
        0 => Ok(ManagementQp::Smi),
        1 => Ok(ManagementQp::Gsi),
        _ => {
            notice!(file, "{}: invalid QPN {} specified\n", call, qpn);
            Err(EINVAL)
        }
    }
}

/// The three bytes of an OUI, highest first.
fn oui(file: &UmadFile, call: &str, oui: u32) -> Result<[u8; 3]> {
    match oui.to_be_bytes() {
        [0, a, b, c] => Ok([a, b, c]),
        _ => {
            notice!(file, "{} failed: oui invalid {:#010x}\n", call, oui);
            Err(EINVAL)
        }
    }
}

fn read_user<const N: usize>(from: UserPtr) -> Result<[u8; N]> {
    UserSlice::new(from, N).reader().read()
}

fn write_user(to: UserPtr, value: u32) -> Result {
    UserSlice::new(to, core::mem::size_of::<u32>())
        .writer()
        .write(&value)
}
