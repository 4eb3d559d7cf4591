// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A device that is plugged in: its node, registered with `ib_core` (unless it stands in the fabric only),
//! and cabled.
//!
//! Dropping it is a surprise removal: the cables are pulled first, so that nothing arrives any more; then
//! all that was late is completed, since `ib_mad` waits for that; then `ib_core` removes the device; and
//! then nothing is left that would run later.

#![forbid(unsafe_code)]

use crate::{
    fabric::Fabric,
    node::{
        Node,
        Shape, //
    },
    outbox::Outbox,
    port::End,
    uapi::{
        self,
        Create, //
    },
    verbs::device::{
        Device,
        DeviceSpec, //
    }, //
};
use kernel::{
    prelude::*,
    str::CString,
    sync::Arc, //
};

/// A device that is plugged in.
pub(crate) struct Hca {
    node: Arc<Node>,
    fabric: Arc<Fabric>,
    device: Option<Device<Node>>,
}

impl Hca {
    /// Plugs in a device. Sleeps.
    ///
    /// # Errors
    ///
    /// `EINVAL` if something is out of range; `EBUSY` if a cable has two ends plugged in already; what
    /// `ib_register_device` says, which for a name that is taken is `ENFILE`; `ENOMEM`.
    pub(crate) fn plug(
        fabric: &Arc<Fabric>,
        create: &Create,
        outbox: &Arc<Outbox>,
    ) -> Result<Self> {
        let user = match create.wiring {
            uapi::WIRING_CABLES => false,
            uapi::WIRING_USER => true,
            _ => return Err(EINVAL),
        };
        if create.flags & !uapi::CREATE_FLAGS != 0 || create.reserved != 0 {
            return Err(EINVAL);
        }
        let guid = match create.node_guid {
            0 => fabric.new_guid(),
            guid => guid,
        };
        let outbox = user.then(|| outbox.clone());
        if let Some(outbox) = &outbox {
            outbox.open();
        }
        let external = create.flags & uapi::CREATE_EXTERNAL != 0;
        if external && (create.shape != uapi::SHAPE_SWITCH || user) {
            return Err(EINVAL);
        }
        let node = Node::new(create, guid, outbox)?;
        let mut this = Self {
            node,
            fabric: fabric.clone(),
            device: None,
        };
        let node = &this.node;
        if !external {
            let name = name(&create.name)?;
            this.device = Some(Device::register(
                &DeviceSpec {
                    name: &name,
                    ports: node.port_count(),
                    node_guid: guid,
                    node_desc: create.node_desc,
                    switch: node.shape() == Shape::Switch,
                    no_process_mad: create.flags & uapi::CREATE_NO_PROCESS_MAD != 0,
                },
                node.clone(),
                node.events().clone(),
            )?);
        }
        for (params, port) in create.port.iter().zip(0u32..).skip(1) {
            if params.cable != 0 && port <= node.port_count() && !user {
                let node = node.clone();
                this.fabric.connect(params.cable, End { node, port })?;
            }
        }
        Ok(this)
    }

    /// What its hardware does.
    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The device's name; empty if it is no device of this host.
    pub(crate) fn name(&self) -> Result<CString> {
        match &self.device {
            Some(device) => device.name(),
            None => Ok(CString::try_from(c"")?),
        }
    }
}

impl Drop for Hca {
    fn drop(&mut self) {
        self.fabric.disconnect(&self.node);
        self.node.prepare_removal();
        drop(self.device.take());
        self.node.finish_removal();
    }
}

/// The name that is asked for, or the common pattern.
fn name(bytes: &[u8; 64]) -> Result<CString> {
    let name = CStr::from_bytes_until_nul(bytes).map_err(|_| EINVAL)?;
    if name.is_empty() {
        return Ok(CString::try_from(c"vhca%d")?);
    }
    // A name is part of paths; and a pattern would be the kernel's to fill in.
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte == b'-';
    if !name.to_bytes().iter().all(plain) {
        return Err(EINVAL);
    }
    Ok(CString::try_from(name)?)
}
