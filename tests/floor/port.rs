// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Ports: the client of RDMA devices that makes a node of each.

#![forbid(unsafe_code)]

use crate::{
    chrdev::{
        class::{
            AttributeText,
            Class,
            ClassAttribute,
            ClassSpec,
            DeviceAttribute, //
        },
        node::Node,
        region::Region, //
    },
    compat::eopnotsupp,
    file::FloorFile,
    rdma::{
        client::{
            Client,
            Slot, //
        },
        device::Device, //
    },
    uapi, //
};
use core::fmt::Write as _;
use kernel::{
    device,
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    }, //
};

/// How many ports there can have been since the module was loaded.
pub(crate) const MAX_PORTS: u32 = 64;

/// A port of an RDMA device.
pub(crate) struct FloorPort {
    pub(crate) device: Arc<Device>,
    pub(crate) number: u32,
}

/// The class of the nodes, with the attributes that programs look for.
pub(crate) struct FloorClass;

impl ClassSpec for FloorClass {
    type Data = Arc<FloorPort>;

    const NAME: &'static CStr = c"infiniband_mad";
    const FOLDER: &'static CStr = c"infiniband";

    const CLASS_ATTRIBUTES: &'static [ClassAttribute] = &[ClassAttribute {
        name: c"abi_version",
        show: |text| writeln!(text, "{}", uapi::ABI_VERSION).map_err(|_| EIO),
    }];

    const DEVICE_ATTRIBUTES: &'static [DeviceAttribute<Arc<FloorPort>>] = &[
        DeviceAttribute {
            name: c"ibdev",
            show: show_ibdev,
        },
        DeviceAttribute {
            name: c"port",
            show: |port, text| writeln!(text, "{}", port.number).map_err(|_| EIO),
        },
    ];
}

fn show_ibdev(port: &Arc<FloorPort>, text: &mut AttributeText<'_>) -> Result {
    text.push(port.device.get().ok_or(ENODEV)?.name().as_bytes());
    text.push(b"\n");
    Ok(())
}

/// What all devices share.
///
/// DROP ORDER: the class before the numbers.
pub(crate) struct Context {
    class: Class<FloorClass>,
    region: Region,
    next: Atomic<u32>,
}

impl Context {
    pub(crate) fn new(class: Class<FloorClass>, region: Region) -> Self {
        Self {
            class,
            region,
            next: Atomic::new(0),
        }
    }
}

/// The client "umad", in its place.
pub(crate) struct FloorClient;

static SLOT: Slot<FloorClient> = Slot::new();

impl Client for FloorClient {
    const NAME: &'static CStr = c"umad";

    type Context = Context;
    type Data = KVec<Node<FloorFile>>;

    fn abi_version() -> u32 {
        uapi::ABI_VERSION
    }

    fn slot() -> &'static Slot<Self> {
        &SLOT
    }

    fn add(context: &Context, device: &Arc<Device>) -> Result<KBox<Self::Data>> {
        let guard = device.get().ok_or(ENODEV)?;
        let mut nodes = KVec::new();
        for number in guard.ports().filter(|port| guard.cap_ib_mad(*port)) {
            let n = context.next.fetch_add(1, Relaxed);
            let port = FloorPort {
                device: device.clone(),
                number,
            };
            let node = Node::add(
                &context.class,
                &CString::try_from_fmt(fmt!("umad{n}"))?,
                context.region.get(n).ok_or(ENOSPC)?,
                guard.parent(),
                Arc::new(port, GFP_KERNEL)?,
            )?;
            nodes.push(node, GFP_KERNEL)?;
        }
        if nodes.is_empty() {
            return Err(eopnotsupp());
        }
        Ok(KBox::new(nodes, GFP_KERNEL)?)
    }

    fn remove(_context: &Context, _device: &Device, nodes: KBox<Self::Data>) {
        drop(nodes);
    }

    fn chardev(_nodes: &Self::Data, _port: u32) -> Result<&device::Device> {
        Err(eopnotsupp())
    }
}
