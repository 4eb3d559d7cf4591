// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The class `infiniband_mad` and its attributes.
//!
//! `/sys/class/infiniband_mad/abi_version`; for each umad and issm device `ibdev`, the name of the RDMA
//! device, and `port`, the number of its port.

#![forbid(unsafe_code)]

use crate::{
    abi,
    chrdev::class::{
        AttributeText,
        ClassAttribute,
        ClassSpec,
        DeviceAttribute, //
    },
    port::Port, //
};
use core::fmt::Write as _;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The class `infiniband_mad`.
pub(crate) struct UmadClass;

impl ClassSpec for UmadClass {
    type Data = Arc<Port>;

    const NAME: &'static CStr = c"infiniband_mad";
    const FOLDER: &'static CStr = c"infiniband";

    const CLASS_ATTRIBUTES: &'static [ClassAttribute] = &[ClassAttribute {
        name: c"abi_version",
        show: show_abi_version,
    }];

    const DEVICE_ATTRIBUTES: &'static [DeviceAttribute<Arc<Port>>] = &[
        DeviceAttribute {
            name: c"ibdev",
            show: show_ibdev,
        },
        DeviceAttribute {
            name: c"port",
            show: show_port,
        },
    ];
}

fn show_abi_version(text: &mut AttributeText<'_>) -> Result {
    writeln!(text, "{}", abi::version()).map_err(|_| EIO)
}

/// The name as it is now: it follows a rename.
fn show_ibdev(port: &Arc<Port>, text: &mut AttributeText<'_>) -> Result {
    let device = port.device().ok_or(ENODEV)?;
    text.push(device.name().as_bytes());
    text.push(b"\n");
    Ok(())
}

fn show_port(port: &Arc<Port>, text: &mut AttributeText<'_>) -> Result {
    writeln!(text, "{}", port.number()).map_err(|_| EIO)
}
