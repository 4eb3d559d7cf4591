// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Ports: the client of RDMA devices that makes a umad device, and an issm device, of each.
//!
//! Life cycle: when `ib_core` adds a device, each of its ports that does MADs gets a number, a umad node
//! and, if it has a subnet management interface, an issm node. When the device goes, the nodes go, the
//! device is revoked (from here on, open() and registering fail), the waiters of issm are woken, every
//! open file is killed, which wakes its waiters, and then all agents are retired; when the last user of
//! the device has let go, the removal goes on. A [`Port`] itself lives as long as a file or a node of it.
//!
//! Locking: [`Port::files`] is a spinlock; the file's lock is never taken under it.

#![forbid(unsafe_code)]

use crate::{
    abi,
    arrivals::Ways,
    chrdev::{
        class::Class,
        node::Node, //
    },
    compat::eopnotsupp,
    file::UmadFile,
    issm::{
        IsSm,
        IssmFile, //
    },
    numbers::{
        Number,
        Numbers, //
    },
    rdma::{
        address::GlobalRoute,
        changes::{
            EventRegistration,
            Watcher, //
        },
        client::{
            Alias,
            AliasSlot,
            Client,
            Slot, //
        },
        device::{
            Device,
            DeviceGuard, //
        },
        mad::MadHeader,
        recv::{
            GlobalSource,
            Source, //
        },
        trace::Traced, //
    },
    sysfs::UmadClass,
    uapi::PacketHeader, //
};
use kernel::{
    device,
    new_spinlock,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    str::CString,
    sync::{
        Arc,
        SpinLock, //
    }, //
};

/// A port of an RDMA device, with its umad and issm files.
#[pin_data]
pub(crate) struct Port {
    device: Arc<Device>,
    /// The device's own number: tracepoints tell it, also when the device is gone.
    device_index: u32,
    number: u32,
    /// Who is the port's subnet manager.
    #[pin]
    is_sm: IsSm,
    /// Ways back to those who sent to the port.
    #[pin]
    ways: Ways,
    /// The files that are open; `None` when the device is gone.
    #[pin]
    files: SpinLock<Option<Files>>,
}

impl Port {
    fn new(device: Arc<Device>, device_index: u32, number: u32) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                device,
                device_index,
                number,
                is_sm <- IsSm::new(),
                ways <- Ways::new(),
                files <- new_spinlock!(Some(RBTree::new()), "Port::files"),
            }),
            GFP_KERNEL,
        )
    }

    /// The device, while it is there.
    pub(crate) fn device(&self) -> Option<DeviceGuard> {
        self.device.get()
    }

    /// Whether the device is still there.
    pub(crate) fn is_live(&self) -> bool {
        self.device.is_live()
    }

    /// The port's number in its device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// What tracepoints tell of a packet of the port.
    pub(crate) fn traced(&self, header: PacketHeader, mad: MadHeader) -> Traced {
        Traced {
            device_index: self.device_index,
            port: self.number,
            header: zerocopy::transmute!(header),
            mad,
        }
    }

    /// Who is the port's subnet manager.
    pub(crate) fn is_sm(&self) -> &IsSm {
        &self.is_sm
    }

    /// The way back to a sender, if it is remembered. Does not sleep.
    pub(crate) fn recall_way(&self, source: &GlobalSource<'_>) -> Option<GlobalRoute> {
        self.ways.recall(self.device.changes(), source)
    }

    /// Finds the way back to a sender. Sleeps up to about a second.
    ///
    /// # Errors
    ///
    /// That there is none.
    pub(crate) fn find_way(&self, device: &DeviceGuard, source: &Source) -> Result<GlobalRoute> {
        self.ways.find(device, self.number, source)
    }

    /// Takes note of an open file, so that the removal of the device finds it.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone; `ENOMEM`.
    pub(crate) fn enter(&self, file: &Arc<UmadFile>) -> Result {
        let node = RBTreeNode::new(file_key(file), file.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut files = self.files.lock();
        let Some(open) = (*files).as_mut() else {
            drop(files);
            drop(node);
            return Err(ENXIO);
        };
        // No other file has this address while this one lives.
        let replaced = open.insert(node);
        drop(files);
        drop(replaced);
        Ok(())
    }

    /// Forgets a file that is closed.
    pub(crate) fn leave(&self, file: &Arc<UmadFile>) {
        let mut files = self.files.lock();
        let node = (*files)
            .as_mut()
            .and_then(|open| open.remove_node(&file_key(file)));
        drop(files);
        drop(node);
    }

    /// The file after another, in the order of their keys.
    fn file_after(&self, key: usize) -> Option<Arc<UmadFile>> {
        let files = self.files.lock();
        let cursor = files.as_ref()?.cursor_lower_bound(&key.checked_add(1)?)?;
        Some(cursor.current().1.clone())
    }

    /// Lets nothing begin any more on the files of a device that is revoked, and wakes all who wait.
    /// Returns the files, whose agents are to be retired.
    fn kill_files(&self) -> Option<Files> {
        let files = self.files.lock().take();
        for file in files.iter().flat_map(Files::values) {
            file.kill();
        }
        files
    }
}

impl Watcher for Port {
    /// No file keeps what was made before: it would be of no use, and it keeps an entry of the GID
    /// table that may have been removed.
    fn changed(&self) {
        let mut key = 0;
        while let Some(file) = self.file_after(key) {
            key = file_key(&file);
            file.forget_handles();
        }
    }
}

/// Open umad files by the address of their memory.
type Files = RBTree<usize, Arc<UmadFile>>;

fn file_key(file: &Arc<UmadFile>) -> usize {
    // CAST: The address is a key and is not used as a pointer again.
    Arc::as_ptr(file) as usize
}

/// The nodes of a port.
pub(crate) struct PortNodes {
    port: Arc<Port>,
    /// Lets the port be told of events; gone before the device is waited for.
    events: Option<EventRegistration<Port>>,
    umad: Option<Node<UmadFile>>,
    issm: Option<Node<IssmFile>>,
    /// Files that were open when the device went, until their agents are retired.
    killed: Option<Files>,
    /// DROP ORDER: free again when the nodes are gone from sysfs.
    _number: Number,
}

impl PortNodes {
    /// Makes the nodes of a port and appends them to `ports`. On an error the umad node may be there
    /// already, with files open: the caller takes down what is in `ports`.
    fn add(
        context: &Context,
        device: &Arc<Device>,
        number: u32,
        ports: &mut KVec<PortNodes>,
    ) -> Result {
        let guard = device.get().ok_or(ENODEV)?;
        let has_smi = guard.cap_ib_smi(number);
        let port = Port::new(device.clone(), guard.index(), number)?;
        let dev_number = context.numbers.take()?;
        let n = dev_number.value();
        let umad_name = CString::try_from_fmt(fmt!("umad{n}"))?;
        let issm_name = CString::try_from_fmt(fmt!("issm{n}"))?;
        let (umad_dev, issm_dev) = (dev_number.umad()?, dev_number.issm()?);
        ports.push(
            Self {
                port: port.clone(),
                events: None,
                umad: None,
                issm: None,
                killed: None,
                _number: dev_number,
            },
            GFP_KERNEL,
        )?;
        let nodes = ports.last_mut().ok_or(ENODEV)?;
        nodes.events = Some(EventRegistration::new(guard.clone(), port.clone())?);
        let (class, parent) = (&context.class, guard.parent());
        nodes.umad = Some(Node::add(
            class,
            &umad_name,
            umad_dev,
            parent,
            port.clone(),
        )?);
        if has_smi {
            nodes.issm = Some(Node::add(class, &issm_name, issm_dev, parent, port)?);
        }
        Ok(())
    }
}

/// Takes down the nodes of a device, and the device with them.
fn take_down(device: &Device, ports: &mut [PortNodes]) {
    for nodes in ports.iter_mut() {
        drop(nodes.issm.take());
        drop(nodes.umad.take());
        drop(nodes.events.take());
    }
    let revoked = device.revoke();
    // First all are told, of all ports, and no new send begins; then the sends that are under way are
    // waited for, which takes as long as the slowest of them, and not as long as all together.
    for nodes in ports.iter_mut() {
        nodes.port.is_sm.wake();
        nodes.killed = nodes.port.kill_files();
    }
    for nodes in ports.iter_mut() {
        let killed = nodes.killed.take();
        for file in killed.iter().flat_map(Files::values) {
            file.end();
        }
    }
    if let Some(revoked) = revoked {
        revoked.wait();
    }
}

/// What all devices share.
///
/// DROP ORDER: the class, whose name the device numbers go by, before the numbers.
pub(crate) struct Context {
    pub(crate) class: Class<UmadClass>,
    pub(crate) numbers: Arc<Numbers>,
}

/// The client "umad".
pub(crate) struct UmadClient;

static UMAD_SLOT: Slot<UmadClient> = Slot::new();

impl Client for UmadClient {
    const NAME: &'static CStr = c"umad";

    type Context = Context;
    type Data = KVec<PortNodes>;

    fn abi_version() -> u32 {
        abi::version()
    }

    fn slot() -> &'static Slot<Self> {
        &UMAD_SLOT
    }

    fn add(context: &Context, device: &Arc<Device>) -> Result<KBox<KVec<PortNodes>>> {
        let mut ports = KVec::new();
        let added = add_ports(context, device, &mut ports)
            .and_then(|()| Ok(KBox::<KVec<PortNodes>>::new_uninit(GFP_KERNEL)?));
        match added {
            Ok(room) => Ok(KBox::write(room, ports)),
            Err(e) => {
                take_down(device, &mut ports);
                Err(e)
            }
        }
    }

    fn remove(_context: &Context, device: &Device, mut ports: KBox<KVec<PortNodes>>) {
        take_down(device, &mut ports);
    }

    fn chardev(ports: &KVec<PortNodes>, port: u32) -> Result<&device::Device> {
        Ok(find(ports, port)?
            .umad
            .as_ref()
            .ok_or_else(eopnotsupp)?
            .device())
    }
}

/// Makes the nodes of every port that does MADs.
///
/// # Errors
///
/// `EOPNOTSUPP` if there is none; what making them says.
fn add_ports(context: &Context, device: &Arc<Device>, ports: &mut KVec<PortNodes>) -> Result {
    let numbers = device.get().ok_or(ENODEV)?.ports();
    for number in numbers {
        if !device.get().ok_or(ENODEV)?.cap_ib_mad(number) {
            continue;
        }
        PortNodes::add(context, device, number, ports)?;
    }
    if ports.is_empty() {
        return Err(eopnotsupp());
    }
    Ok(())
}

/// The nodes of a port that user space asks for.
///
/// # Errors
///
/// `EINVAL` if there is no such port, `EOPNOTSUPP` if it does no MADs.
fn find(ports: &[PortNodes], number: u32) -> Result<&PortNodes> {
    if let Some(nodes) = ports.iter().find(|nodes| nodes.port.number == number) {
        return Ok(nodes);
    }
    let device = ports.first().and_then(|nodes| nodes.port.device());
    match device {
        Some(device) if device.ports().contains(&number) => Err(eopnotsupp()),
        _ => Err(EINVAL),
    }
}

/// The client name "issm": the issm nodes of the same ports.
pub(crate) struct IssmAlias;

static ISSM_SLOT: AliasSlot<IssmAlias> = AliasSlot::new();

impl Alias for IssmAlias {
    type Of = UmadClient;

    const NAME: &'static CStr = c"issm";

    fn slot() -> &'static AliasSlot<Self> {
        &ISSM_SLOT
    }

    fn chardev(ports: &KVec<PortNodes>, port: u32) -> Result<&device::Device> {
        Ok(find(ports, port)?
            .issm
            .as_ref()
            .ok_or_else(eopnotsupp)?
            .device())
    }
}
