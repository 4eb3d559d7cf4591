// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The cables between the module's devices.
//!
//! A cable has a number; the first two ports that name it are connected, and their links come up. When
//! one of them goes, the other's link goes down, and the cable's end is free again.

#![forbid(unsafe_code)]

use crate::{
    node::Node,
    port::End, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        Mutex, //
    }, //
};

/// GUIDs that the kernel chooses begin here: locally administered ones.
const FIRST_GUID: u64 = 0x0200_5eff_fe00_0000;
/// From one node's GUID to the next: room for those of the ports.
const GUIDS_PER_NODE: u64 = 16;

/// A cable's end in a port.
struct Plugged {
    cable: u32,
    end: End,
}

/// All cables.
#[pin_data]
pub(crate) struct Fabric {
    #[pin]
    plugged: Mutex<KVec<Plugged>>,
    nodes: Atomic<u64>,
}

impl Fabric {
    /// No cables.
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                plugged <- new_mutex!(KVec::new(), "Fabric::plugged"),
                nodes: Atomic::new(0),
            }),
            GFP_KERNEL,
        )
    }

    /// A GUID that no other node has.
    pub(crate) fn new_guid(&self) -> u64 {
        let n = self.nodes.fetch_add(1, Relaxed);
        FIRST_GUID.wrapping_add(n.wrapping_mul(GUIDS_PER_NODE))
    }

    /// Plugs a cable into a port. Sleeps.
    ///
    /// # Errors
    ///
    /// `EBUSY` if both ends of the cable are in use; `ENOMEM`.
    pub(crate) fn connect(&self, cable: u32, end: End) -> Result {
        let mut plugged = self.plugged.lock();
        let mut others = plugged.iter().filter(|other| other.cable == cable);
        let peer = others.next().map(|other| other.end.clone());
        if others.next().is_some() {
            return Err(EBUSY);
        }
        plugged.push(
            Plugged {
                cable,
                end: end.clone(),
            },
            GFP_KERNEL,
        )?;
        if let Some(peer) = peer {
            peer.node.plug(peer.port, Some(end.clone()));
            end.node.plug(end.port, Some(peer));
        }
        Ok(())
    }

    /// Pulls all cables out of a node. Sleeps.
    pub(crate) fn disconnect(&self, node: &Arc<Node>) {
        let mut plugged = self.plugged.lock();
        while let Some(at) = plugged
            .iter()
            .position(|entry| Arc::ptr_eq(&entry.end.node, node))
        {
            let Ok(entry) = plugged.remove(at) else { break };
            entry.end.node.plug(entry.end.port, None);
            if let Some(peer) = plugged.iter().find(|other| other.cable == entry.cable) {
                peer.end.node.plug(peer.end.port, None);
            }
        }
    }
}
