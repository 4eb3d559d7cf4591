// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The control device, `/dev/ib_vhca/control`: a file of it is a device.
//!
//! An open, and one ioctl with all parameters, plugs a device in; the close of the file pulls it out, as a
//! surprise. That form was chosen over configfs or netlink objects because nothing then outlives a test:
//! however it ends, by a signal or in the middle of a call, its devices go with it; because one structure
//! makes a device in one step, which has no half-made states; and because the file is also where frames go
//! to user space and come from there, which an object would need a second channel for.
//!
//! Locking: [`ControlFile::hca`] is a mutex and is held while a device is plugged in or pulled out.

#![forbid(unsafe_code)]

use crate::{
    chrdev::{
        class::{
            ClassAttribute,
            ClassSpec,
            DeviceAttribute, //
        },
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
            PollEvents,
            PollTable, //
        }, //
    },
    fabric::Fabric,
    faults::Faults,
    frame::Frame,
    hca::Hca,
    node::Node,
    outbox::{
        Next,
        Outbox, //
    },
    uapi::{
        self,
        Counters,
        Create,
        FrameHeader,
        PortChange, //
    },
    verbs::device::OPA_MAD_LEN, //
};
use core::mem::size_of;
use kernel::{
    device,
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        ArcBorrow,
        Mutex, //
    },
    uaccess::{
        UserPtr,
        UserSlice,
        UserSliceReader, //
    }, //
};

/// The class of the control device.
pub(crate) struct ControlClass;

impl ClassSpec for ControlClass {
    type Data = Arc<Fabric>;

    const NAME: &'static CStr = c"ib_vhca";
    const FOLDER: &'static CStr = c"ib_vhca";
    const CLASS_ATTRIBUTES: &'static [ClassAttribute] = &[];
    const DEVICE_ATTRIBUTES: &'static [DeviceAttribute<Arc<Fabric>>] = &[];
}

/// An open control file, with the device that it is.
#[pin_data]
pub(crate) struct ControlFile {
    fabric: Arc<Fabric>,
    outbox: Arc<Outbox>,
    #[pin]
    hca: Mutex<Option<Hca>>,
}

impl ControlFile {
    /// The node of the device.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is none.
    fn node(&self) -> Result<Arc<Node>> {
        Ok(self.hca.lock().as_ref().ok_or(ENODEV)?.node().clone())
    }

    fn create(&self, arg: UserPtr) -> Result {
        let mut room =
            KBox::<[u8; size_of::<Create>()]>::new([0; size_of::<Create>()], GFP_KERNEL)?;
        let (mut reader, mut writer) = UserSlice::new(arg, size_of::<Create>()).reader_writer();
        reader.read_slice(&mut room[..])?;
        let mut create = KBox::new(
            Create::read_from_bytes(&room[..]).map_err(|_| EINVAL)?,
            GFP_KERNEL,
        )?;
        if usize::try_from(create.size).map_err(|_| EINVAL)? != size_of::<Create>() {
            return Err(EINVAL);
        }
        let mut hca = self.hca.lock();
        if hca.is_some() {
            return Err(EBUSY);
        }
        let made = Hca::plug(&self.fabric, &create, &self.outbox)?;
        let name = made.name()?;
        create.name = [0; 64];
        for (to, from) in create.name.iter_mut().zip(name.to_bytes()) {
            *to = *from;
        }
        *hca = Some(made);
        drop(hca);
        writer.write_slice(create.as_bytes())
    }

    fn remove(&self) -> Result {
        let hca = self.hca.lock().take();
        hca.map(drop).ok_or(ENODEV)
    }

    fn set_port(&self, arg: UserPtr) -> Result {
        let change: PortChange = read(arg)?;
        let node = self.node()?;
        let changes = node
            .port(change.number)?
            .state
            .lock()
            .change(&change.port, change.state)?;
        node.announce(change.number, &changes);
        Ok(())
    }

    fn get_port(&self, arg: UserPtr) -> Result {
        let mut change: PortChange = read(arg)?;
        let node = self.node()?;
        let state = node.port(change.number)?.state.lock();
        change.port = state.params();
        change.state = u32::from(state.state);
        drop(state);
        write(arg, &change)
    }

    /// Takes a frame from user space.
    fn take_frame(&self, mut buf: UserSliceReader) -> Result<usize> {
        let total = buf.len();
        let mut bytes = [0; size_of::<FrameHeader>()];
        if total < bytes.len() || total > bytes.len() + OPA_MAD_LEN {
            return Err(EINVAL);
        }
        buf.read_slice(&mut bytes)?;
        let header = FrameHeader::read_from_bytes(&bytes).map_err(|_| EINVAL)?;
        let len = total - bytes.len();
        if usize::try_from(header.len).map_err(|_| EINVAL)? != len {
            return Err(EINVAL);
        }
        let mut mad = KVec::with_capacity(len, GFP_KERNEL)?;
        buf.read_all(&mut mad, GFP_KERNEL)?;
        match header.kind {
            uapi::KIND_MAD => {
                let node = self.node()?;
                node.port(header.port)?;
                node.arrive(
                    header.port,
                    Frame {
                        dlid: header.dlid,
                        slid: header.slid,
                        dest_qp: header.dest_qp,
                        src_qp: header.src_qp,
                        sl: u8::try_from(header.sl).map_err(|_| EINVAL)?,
                        pkey: u16::try_from(header.pkey).map_err(|_| EINVAL)?,
                        qkey: 0,
                        grh: (header.flags & uapi::FRAME_GRH != 0).then_some(header.grh),
                        payload: mad,
                        hops: 0,
                    },
                );
            }
            uapi::KIND_LOCAL => self.outbox.answer(header.id, mad)?,
            _ => return Err(EINVAL),
        }
        Ok(total)
    }
}

/// Reads an ioctl's structure.
fn read<T: FromBytes>(arg: UserPtr) -> Result<T> {
    let mut bytes = KVec::new();
    UserSlice::new(arg, size_of::<T>()).read_all(&mut bytes, GFP_KERNEL)?;
    T::read_from_bytes(&bytes).map_err(|_| EINVAL)
}

/// Writes an ioctl's structure.
fn write<T: IntoBytes + zerocopy::Immutable>(arg: UserPtr, value: &T) -> Result {
    UserSlice::new(arg, size_of::<T>())
        .writer()
        .write_slice(value.as_bytes())
}

#[vtable]
impl Operations for ControlFile {
    type Data = Arc<Fabric>;
    type File = Arc<ControlFile>;

    const POSITIONING: Positioning = Positioning::Stream;

    fn open(fabric: &Arc<Fabric>, _node: &device::Device, _flags: OpenFlags) -> Result<Arc<Self>> {
        let (fabric, outbox) = (fabric.clone(), Outbox::new()?);
        Arc::pin_init(
            pin_init!(Self {
                fabric,
                outbox,
                hca <- new_mutex!(None, "ControlFile::hca"),
            }),
            GFP_KERNEL,
        )
    }

    /// A surprise removal.
    fn release(file: Arc<Self>) {
        // There may be no device.
        let _ = file.remove();
    }

    /// Errors: `ENOSPC` if the buffer is too small for what is next, `EAGAIN`, `ERESTARTSYS`. At the
    /// end of the device, 0 bytes.
    fn read(file: ArcBorrow<'_, Self>, flags: OpenFlags, mut buf: UserRoom) -> Result<usize> {
        let room = buf.len();
        let next = if flags.nonblocking() {
            file.outbox.next(room).ok_or(EAGAIN)?
        } else {
            file.outbox
                .readers()
                .wait_until(|| file.outbox.next(room))?
        };
        match next {
            Next::Item(item) => {
                let (header, mad) = item.parts();
                buf.write(header)?;
                buf.write(mad)?;
                Ok(item.len())
            }
            Next::TooLong => Err(ENOSPC),
            Next::Closed => Ok(0),
        }
    }

    /// Errors: `EINVAL` if it is no frame, or there is no such port; `ENODEV` if there is no device;
    /// `ESRCH` if nobody waits for an answer.
    fn write(file: ArcBorrow<'_, Self>, buf: UserBytes) -> Result<usize> {
        file.take_frame(buf.reader())
    }

    fn poll(file: ArcBorrow<'_, Self>, table: &PollTable<'_>) -> PollEvents {
        table.register(file.outbox.readers());
        match file.outbox.status() {
            (true, _) => PollEvents::WRITABLE.and(PollEvents::READABLE),
            (false, true) => PollEvents::WRITABLE,
            (false, false) => PollEvents::WRITABLE.and(PollEvents::ERROR),
        }
    }

    /// Errors: `ENOIOCTLCMD`; those of [`Hca::plug`], `EBUSY` if the file has a device already, `ENODEV` if
    /// it has none, `EINVAL`, `EFAULT`, `ENOMEM`.
    fn ioctl(file: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result {
        match cmd {
            uapi::CREATE => file.create(arg),
            uapi::REMOVE => file.remove(),
            uapi::SET_FAULTS => {
                let faults = Faults::new(read(arg)?)?;
                file.node()?.set_faults(faults);
                Ok(())
            }
            uapi::GET_COUNTERS => {
                let counters: Counters = file.node()?.counters().snapshot();
                write(arg, &counters)
            }
            uapi::SET_PORT => file.set_port(arg),
            uapi::GET_PORT => file.get_port(arg),
            _ => Err(ENOIOCTLCMD),
        }
    }
}
