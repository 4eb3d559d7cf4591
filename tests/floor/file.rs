// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Files: from write() to `ib_mad`, and from `ib_mad` to read().
//!
//! write() copies a packet, makes a send buffer of the file's first agent, and posts it with the address handle that the
//! file made at its first write(). The receive handler puts what comes into a list, and wakes a reader.
//!
//! Locking: [`Queue::packets`] is a spinlock; nothing else is taken under it. [`FloorFile::other`] is a mutex, held
//! while an agent is registered or unregistered.

#![forbid(unsafe_code)]

use crate::{
    chrdev::{
        coverage::OnBehalfOf,
        file::{
            OpenFlags,
            Operations,
            Positioning, //
        },
        user::{
            UserBytes,
            UserRoom, //
        },
        wait::{
            new_wait_queue,
            PollEvents,
            PollTable,
            WaitQueue, //
        }, //
    },
    port::FloorPort,
    rdma::{
        address::{
            Address,
            AddressHandle,
            GlobalRoute, //
        },
        agent::{
            Agent,
            Interest,
            MadHandler,
            ManagementQp,
            Registration,
            SendStatus, //
        },
        mad::MadHeader,
        recv::{
            RecvInfo,
            RecvMad,
            WayBack, //
        },
        send::{
            SendMad,
            Shape, //
        }, //
    },
    uapi::{
        PacketHeader,
        RegReq2,
        ENABLE_PKEY,
        HEADER_LEN,
        REGISTER_AGENT2,
        UNREGISTER_AGENT, //
    }, //
};
use core::mem::size_of;
use kernel::{
    device,
    list::{
        impl_list_arc_safe,
        impl_list_item,
        List,
        ListArc,
        ListLinks, //
    },
    new_mutex,
    new_spinlock,
    prelude::*,
    sync::{
        Arc,
        ArcBorrow,
        Mutex,
        SetOnce,
        SpinLock, //
    },
    uaccess::{
        UserPtr,
        UserSlice, //
    }, //
};

/// Bytes of a MAD.
const MAD_LEN: usize = 256;
/// Bytes of the headers of a vendor class with an OUI, the only ones that are measured.
const CLASS_HDR_LEN: usize = 40;

/// What read() returns.
#[pin_data]
struct Packet {
    #[pin]
    links: ListLinks,
    header: PacketHeader,
    mad: RecvMad,
}

impl_list_arc_safe! {
    impl ListArcSafe<0> for Packet { untracked; }
}
impl_list_item! {
    impl ListItem<0> for Packet { using ListLinks { self.links }; }
}

/// What came for the agents of a file.
#[pin_data]
struct Queue {
    #[pin]
    packets: SpinLock<List<Packet>>,
    #[pin]
    readers: WaitQueue,
    /// The way back to the only one who sends.
    way: SetOnce<GlobalRoute>,
}

impl Queue {
    fn pop(&self) -> Option<ListArc<Packet>> {
        self.packets.lock().pop_front()
    }

    /// The way back to who sent a MAD with a GRH.
    fn way_back(&self, info: &RecvInfo<'_>) -> Result<Option<GlobalRoute>> {
        let WayBack::Global(source) = info.way_back() else {
            return Ok(None);
        };
        if self.way.as_ref().is_none() {
            self.way.populate(source.find()?);
        }
        Ok(self.way.as_ref().copied())
    }

    fn push(&self, mad: RecvMad, info: &RecvInfo<'_>) -> Result {
        let way = self.way_back(info)?;
        let header = PacketHeader {
            id: 0,
            status: 0,
            timeout_ms: 0,
            retries: 0,
            // A constant that fits.
            length: u32::try_from(HEADER_LEN + MAD_LEN)?,
            qpn_be: info.src_qp().to_be(),
            qkey_be: 0,
            lid_be: info.slid().to_be(),
            sl: info.sl(),
            path_bits: info.path_bits(),
            grh_present: u8::from(way.is_some()),
            gid_index: way.map_or(0, |way| way.gid_index),
            hop_limit: way.map_or(0, |way| way.hop_limit),
            traffic_class: way.map_or(0, |way| way.traffic_class),
            gid: way.map_or([0; 16], |way| way.gid),
            flow_label_be: way.map_or(0, |way| way.flow_label.to_be()),
            pkey_index: info.pkey_index(),
            reserved: [0; 6],
        };
        let packet = ListArc::pin_init(
            try_pin_init!(Packet {
                links <- ListLinks::new(),
                header,
                mad,
            }),
            GFP_KERNEL,
        )?;
        self.packets.lock().push_back(packet);
        self.readers.wake_one();
        Ok(())
    }
}

impl MadHandler for Queue {
    type Send = ();

    fn on_behalf_of(&self) -> OnBehalfOf {
        OnBehalfOf::current()
    }

    fn sent(&self, _send: (), _status: SendStatus) {}

    fn received(&self, mad: RecvMad, info: &RecvInfo<'_>, _is_answer: bool) {
        // What gets lost is missed by the benchmark.
        let _ = self.push(mad, info);
    }
}

/// An open file.
#[pin_data]
pub(crate) struct FloorFile {
    port: Arc<FloorPort>,
    queue: Arc<Queue>,
    /// The agent with id 0, for the life of the file.
    agent: SetOnce<Agent<Queue>>,
    /// The agent with id 1, which comes and goes.
    #[pin]
    other: Mutex<Option<Agent<Queue>>>,
    handle: SetOnce<Arc<AddressHandle>>,
}

impl FloorFile {
    fn handle(&self, agent: &Agent<Queue>, header: &PacketHeader) -> Result<Arc<AddressHandle>> {
        if let Some(handle) = self.handle.as_ref() {
            return Ok(handle.clone());
        }
        let address = Address {
            lid: u16::from_be(header.lid_be),
            sl: header.sl,
            path_bits: header.path_bits,
            global: (header.grh_present != 0).then(|| GlobalRoute {
                gid: header.gid,
                gid_index: header.gid_index,
                flow_label: u32::from_be(header.flow_label_be),
                hop_limit: header.hop_limit,
                traffic_class: header.traffic_class,
            }),
        };
        let handle = Arc::new(AddressHandle::new(agent, &address)?, GFP_KERNEL)?;
        self.handle.populate(handle.clone());
        Ok(handle)
    }

    fn send(&self, from: &UserBytes) -> Result<usize> {
        let packet: [u8; HEADER_LEN + MAD_LEN] = from.first()?;
        let (header, bytes) = packet.split_first_chunk::<HEADER_LEN>().ok_or(EINVAL)?;
        let header = PacketHeader::read_from_bytes(header).map_err(|_| EINVAL)?;
        let agent = self.agent.as_ref().ok_or(EIO)?;
        let handle = self.handle(agent, &header)?;
        let mut mad = SendMad::new(
            agent,
            Shape {
                remote_qpn: u32::from_be(header.qpn_be),
                pkey_index: header.pkey_index,
                rmpp: false,
                hdr_len: CLASS_HDR_LEN,
                data_len: MAD_LEN - CLASS_HDR_LEN,
                base_version: 1,
            },
        )?;
        let room = mad.bytes_mut().first_chunk_mut::<MAD_LEN>().ok_or(EINVAL)?;
        *room = *bytes.first_chunk().ok_or(EINVAL)?;
        let (mad_header, _) = room.split_first_chunk_mut().ok_or(EINVAL)?;
        let mut own = MadHeader::from_array(*mad_header);
        if !own.is_response() {
            own.set_hi_tid(agent.hi_tid());
            if let Some(to) = mad_header.first_chunk_mut() {
                *to = *own.as_bytes();
            }
        }
        mad.post(handle, header.timeout_ms, header.retries, ())
            .map_err(|(e, ())| e)?;
        Ok(packet.len())
    }

    /// Registers an agent as the first, or as the other one; returns its id.
    fn register(&self, req: &RegReq2) -> Result<u32> {
        let [_, oui @ ..] = req.oui.to_be_bytes();
        let registration = Registration {
            qp: ManagementQp::Gsi,
            interest: (req.mgmt_class != 0).then_some(Interest {
                mgmt_class: req.mgmt_class,
                class_version: req.mgmt_class_version,
                oui,
                methods: req.method_mask,
            }),
            rmpp_version: 0,
            user_rmpp: false,
        };
        let device = self.port.device.get().ok_or(EPIPE)?;
        let mut other = self.other.lock();
        let agent = Agent::register(device, self.port.number, &registration, self.queue.clone())?;
        if self.agent.as_ref().is_none() {
            self.agent.populate(agent);
            return Ok(0);
        }
        *other = Some(agent);
        Ok(1)
    }
}

#[vtable]
impl Operations for FloorFile {
    type Data = Arc<FloorPort>;
    type File = Arc<Self>;

    const POSITIONING: Positioning = Positioning::Stream;

    fn open(port: &Arc<FloorPort>, _dev: &device::Device, _flags: OpenFlags) -> Result<Arc<Self>> {
        let queue = Arc::pin_init(
            pin_init!(Queue {
                packets <- new_spinlock!(List::new(), "Queue::packets"),
                readers <- new_wait_queue!("Queue::readers"),
                way: SetOnce::new(),
            }),
            GFP_KERNEL,
        )?;
        Arc::pin_init(
            pin_init!(Self {
                port: port.clone(),
                queue,
                agent: SetOnce::new(),
                other <- new_mutex!(None, "FloorFile::other"),
                handle: SetOnce::new(),
            }),
            GFP_KERNEL,
        )
    }

    fn release(file: Arc<Self>) {
        drop(file);
    }

    fn read(file: ArcBorrow<'_, Self>, flags: OpenFlags, mut buf: UserRoom) -> Result<usize> {
        let queue = &file.queue;
        let packet = match queue.pop() {
            Some(packet) => packet,
            None if flags.nonblocking() => return Err(EAGAIN),
            None => queue.readers.wait_for_turn_until(|| queue.pop())?,
        };
        let mad = packet.mad.first_segment();
        buf.write(packet.header.as_bytes())?;
        buf.write(mad)?;
        Ok(HEADER_LEN + mad.len())
    }

    fn write(file: ArcBorrow<'_, Self>, buf: UserBytes) -> Result<usize> {
        file.send(&buf)
    }

    fn poll(file: ArcBorrow<'_, Self>, table: &PollTable<'_>) -> PollEvents {
        table.register(&file.queue.readers);
        if file.queue.packets.lock().is_empty() {
            PollEvents::WRITABLE
        } else {
            PollEvents::WRITABLE.and(PollEvents::READABLE)
        }
    }

    fn ioctl(file: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result {
        match cmd {
            ENABLE_PKEY => Ok(()),
            REGISTER_AGENT2 => {
                let (mut from, mut to) = UserSlice::new(arg, size_of::<RegReq2>()).reader_writer();
                let mut bytes = [0; size_of::<RegReq2>()];
                from.read_slice(&mut bytes)?;
                let req = RegReq2::read_from_bytes(&bytes).map_err(|_| EINVAL)?;
                to.write_slice(&file.register(&req)?.to_ne_bytes())
            }
            UNREGISTER_AGENT => {
                let other = file.other.lock().take();
                drop(other);
                Ok(())
            }
            _ => Err(ENOTTY),
        }
    }
}
