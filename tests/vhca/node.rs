// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A device of the fabric: what its hardware would do.
//!
//! A send becomes a frame, which a fault may drop, delay or duplicate; the frame leaves a port, goes over
//! the cable (through switches, which are nodes, too) or to the control file's reader, and arrives at a
//! port, whose queue pair receives it. Without delays all of that happens in `post_send`: nothing here
//! sleeps, but for `process_mad` and what makes and removes devices.
//!
//! Locking: each lock guards one thing and is let go before the next one is taken.

#![forbid(unsafe_code)]

use crate::{
    agenda::{
        Agenda,
        Task, //
    },
    counters::Counters,
    data::DataQueues,
    directed::{
        self,
        Next, //
    },
    faults::{
        Faults,
        FrameFate,
        SendFate, //
    },
    frame::{
        self,
        Frame, //
    },
    outbox::Outbox,
    port::{
        same_partition,
        Changes,
        End,
        Links,
        Port,
        PortState,
        GIDS, //
    },
    sma,
    switch::Switch,
    uapi::{
        self,
        Create, //
    },
    verbs::{
        alarm::Alarm,
        device::{
            Events,
            MadVerdict,
            OfferedMad,
            PortAttr,
            PortCaps,
            PortEvent,
            Provider, //
        },
        lock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        queue::{
            Arrival,
            Binding,
            QueuePair,
            RecvFailure,
            SendRequest,
            SendStatus,
            SendToken, //
        }, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{
        Arc,
        ArcBorrow, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

/// What kind of device it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A channel adapter.
    Ca,
    /// A channel adapter with queue pair 0 only.
    SmiOnly,
    /// A channel adapter with queue pair 1 only.
    NoSmi,
    /// A switch.
    Switch,
    /// A channel adapter with OPA MADs.
    Opa,
    /// A channel adapter without MADs.
    NoMad,
}

impl Shape {
    fn from_user(shape: u32) -> Result<Self> {
        Ok(match shape {
            uapi::SHAPE_CA => Self::Ca,
            uapi::SHAPE_SMI_ONLY => Self::SmiOnly,
            uapi::SHAPE_NO_SMI => Self::NoSmi,
            uapi::SHAPE_SWITCH => Self::Switch,
            uapi::SHAPE_OPA => Self::Opa,
            uapi::SHAPE_NO_MAD => Self::NoMad,
            _ => return Err(EINVAL),
        })
    }

    fn port_caps(self) -> PortCaps {
        let link = PortCaps::LINK;
        match self {
            Self::Ca => link.and(PortCaps::SMI).and(PortCaps::GSI),
            Self::SmiOnly => link.and(PortCaps::SMI),
            Self::NoSmi => link.and(PortCaps::GSI),
            Self::Switch => link.and(PortCaps::SMI).and(PortCaps::SWITCH_GSI),
            Self::Opa => link
                .and(PortCaps::SMI)
                .and(PortCaps::GSI)
                .and(PortCaps::OPA),
            Self::NoMad => link,
        }
    }
}

/// A device.
#[pin_data]
pub(crate) struct Node {
    shape: Shape,
    guid: u64,
    description: [u8; 64],
    /// A switch's begin with port 0, others' with port 1.
    ports: KVec<Arc<Port>>,
    #[pin]
    switch: IrqSpinLock<Switch>,
    #[pin]
    data: IrqSpinLock<DataQueues>,
    #[pin]
    faults: IrqSpinLock<Faults>,
    counters: Counters,
    events: Arc<Events>,
    agenda: Arc<Agenda>,
    #[pin]
    alarm: Alarm<Agenda>,
    /// Where frames go that are for user space.
    outbox: Option<Arc<Outbox>>,
    /// User space answers directed-route SMPs that go nowhere.
    user_sma: bool,
    /// It is no device of this host: nobody else looks at its MADs.
    external: bool,
}

impl Node {
    /// A device as it is asked for, with the GUID `guid`. With an `outbox` it is wired to user space.
    ///
    /// # Errors
    ///
    /// `EINVAL` if something is out of range; `ENOMEM`.
    pub(crate) fn new(
        create: &Create,
        guid: u64,
        outbox: Option<Arc<Outbox>>,
    ) -> Result<Arc<Self>> {
        let shape = Shape::from_user(create.shape)?;
        let count = usize::try_from(create.ports).map_err(|_| EINVAL)?;
        if count == 0 || count > uapi::MAX_PORTS {
            return Err(EINVAL);
        }
        let first = usize::from(shape != Shape::Switch);
        let mut ports = KVec::new();
        for (number, params) in create.port.iter().enumerate().take(count + 1).skip(first) {
            // A port's GUID is the node's plus its number; a switch's port 0 has that of the node. Wraps
            // around only where the node's was chosen so.
            let guid = guid.wrapping_add(u64::try_from(number).unwrap_or(0));
            let mut state = PortState::new(params, guid)?;
            // A switch's port 0 is always up; and user space is always at the other end.
            if number == 0 || outbox.is_some() {
                let _ = state.set_linked(true);
            }
            ports.push(Port::new(state)?, GFP_KERNEL)?;
        }
        let switch = Switch::new(u8::try_from(count).unwrap_or(0))?;
        let (description, events) = (create.node_desc, Arc::pin_init(Events::new(), GFP_KERNEL)?);
        let user_sma = create.flags & uapi::CREATE_USER_SMA != 0;
        let external = create.flags & uapi::CREATE_EXTERNAL != 0;
        let agenda = Agenda::new()?;
        let alarm = Alarm::new(agenda.clone());
        Arc::pin_init(
            pin_init!(Self {
                shape,
                guid,
                description,
                ports,
                switch <- new_irq_spinlock!(switch, "Node::switch"),
                data <- new_irq_spinlock!(DataQueues::new(), "Node::data"),
                faults <- new_irq_spinlock!(Faults::none(), "Node::faults"),
                counters: Counters::new(),
                events,
                agenda,
                alarm <- alarm,
                outbox,
                user_sma,
                external,
            }),
            GFP_KERNEL,
        )
    }

    /// What kind of device it is.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// GUID of the node.
    pub(crate) fn guid(&self) -> u64 {
        self.guid
    }

    /// NodeDescription.
    pub(crate) fn description(&self) -> &[u8; 64] {
        &self.description
    }

    /// Where events go.
    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// What has happened.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The tables of a switch.
    pub(crate) fn switch(&self) -> &IrqSpinLock<Switch> {
        &self.switch
    }

    /// Sets the faults.
    pub(crate) fn set_faults(&self, faults: Faults) {
        *self.faults.lock() = faults;
    }

    /// Ports, without a switch's port 0.
    pub(crate) fn port_count(&self) -> u32 {
        let all = u32::try_from(self.ports.len()).unwrap_or(0);
        all - u32::from(self.shape == Shape::Switch)
    }

    /// A port.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such port.
    pub(crate) fn port(&self, number: u32) -> Result<&Arc<Port>> {
        let first = u32::from(self.shape != Shape::Switch);
        let index = number.checked_sub(first).ok_or(EINVAL)?;
        self.ports
            .get(usize::try_from(index).map_err(|_| EINVAL)?)
            .ok_or(EINVAL)
    }

    /// The port whose queue pairs serve a port.
    pub(crate) fn managing_port(&self, number: u32) -> u32 {
        if self.shape == Shape::Switch {
            0
        } else {
            number
        }
    }

    /// Tells clients what has changed.
    pub(crate) fn announce(&self, port: u32, changes: &Changes) {
        for event in changes.iter() {
            if event == PortEvent::Down || event == PortEvent::Active {
                self.switch.lock().note_state_change();
            }
            self.tell(port, event);
        }
    }

    /// Tells clients of an event. They know nothing of a switch's ports but port 0.
    pub(crate) fn tell(&self, port: u32, event: PortEvent) {
        if self.managing_port(port) == port {
            self.events.dispatch(port, event);
        }
    }

    /// Connects a port to the other end of its cable, or to nobody.
    pub(crate) fn plug(&self, port: u32, peer: Option<End>) {
        let Ok(this) = self.port(port) else { return };
        let linked = peer.is_some();
        let old = core::mem::replace(&mut this.links.lock().peer, peer);
        drop(old);
        let changes = this.state.lock().set_linked(linked);
        self.announce(port, &changes);
    }

    /// The device is about to be unregistered: `ib_mad` waits for all sends, so none is late any more.
    pub(crate) fn prepare_removal(&self) {
        self.agenda.close();
        if let Some(outbox) = &self.outbox {
            outbox.close();
        }
    }

    /// The device is unregistered: nothing is done later any more. Sleeps.
    pub(crate) fn finish_removal(&self) {
        self.alarm.stop();
    }

    /// Completes a send.
    pub(crate) fn complete(&self, qp: &QueuePair, token: SendToken, status: SendStatus) {
        self.counters.completions.count();
        qp.complete(token, status);
    }

    /// Puts a task off, or, where that is impossible, gives it up.
    fn put_off(&self, ms: u32, task: Task) {
        match self.agenda.put_off(ms, task) {
            Ok(()) => self.alarm.set(0),
            Err(task) => task.abandon(),
        }
    }

    /// The frame of a send.
    fn frame(&self, qp: &QueuePair, binding: &Binding, request: &mut SendRequest) -> Result<Frame> {
        let address = &request.address;
        let dlid = address.dlid;
        let permissive = dlid == frame::PERMISSIVE_LID || dlid == frame::OPA_PERMISSIVE_LID;
        let state = self.port(binding.port)?.state.lock();
        let slid = match (permissive, self.shape) {
            (true, Shape::Opa) => frame::OPA_PERMISSIVE_LID,
            (true, _) => frame::PERMISSIVE_LID,
            // OVERFLOW: The LMC is at most 7.
            _ => state.lid | u32::from(address.path_bits) & ((1 << state.lmc) - 1),
        };
        let pkey_index = if qp.is_data() {
            binding.pkey_index
        } else {
            request.pkey_index
        };
        let pkey = if qp.number() == 0 {
            0xffff
        } else {
            let pkey = state.pkeys.get(usize::from(pkey_index));
            pkey.copied().ok_or(EINVAL)?
        };
        // A Q_Key with this bit stands for that of the sender (IBA 10.2.5).
        const OWN_QKEY: u32 = 1 << 31;
        let qkey = if request.remote_qkey & OWN_QKEY != 0 {
            binding.qkey
        } else {
            request.remote_qkey
        };
        let grh = match &address.global {
            Some(route) => {
                let sgid = state.gid(usize::from(route.sgid_index)).ok_or(EINVAL)?;
                let len = request.payload.len();
                Some(frame::global_route_header(route, sgid, len))
            }
            None => None,
        };
        Ok(Frame {
            dlid,
            slid,
            dest_qp: request.remote_qpn,
            src_qp: qp.number(),
            sl: address.sl,
            pkey,
            qkey,
            grh,
            payload: core::mem::take(&mut request.payload),
            hops: 0,
        })
    }

    /// The group that a frame goes to, if it goes to one. OPA has other LIDs for them.
    fn group(&self, frame: &Frame) -> Option<u32> {
        frame.group().filter(|_| self.shape != Shape::Opa)
    }

    /// Lets a frame out of the port that it is sent from, or finds that it stays here.
    pub(crate) fn start(&self, from: u32, frame: Frame) {
        let Ok(port) = self.port(from) else { return };
        if let Some(mlid) = self.group(&frame) {
            // The sender's own port is one of those that the group is at.
            if port.state.lock().passes(&frame) {
                self.deliver_to_group(from, mlid, &frame);
            }
            if self.shape == Shape::Switch {
                self.forward_to_group(from, mlid, frame);
            } else {
                self.leave(from, frame);
            }
            return;
        }
        // A subnet management agent in user space answers those to the own LID, too.
        let theirs = self.user_sma && frame.dest_qp == 0;
        let own = !theirs && !frame.is_permissive() && {
            let state = port.state.lock();
            state.passes(&frame) && state.owns_lid(frame.dlid)
        };
        if own {
            self.deliver(from, &frame);
        } else if self.shape != Shape::Switch {
            self.leave(from, frame);
        } else if frame.is_permissive() {
            // `ib_mad` lets no manager at port 0 send these.
            self.counters.undeliverable.count();
        } else {
            self.forward(frame);
        }
    }

    /// A switch sends a frame on to where its LID is.
    fn forward(&self, mut frame: Frame) {
        let out = self.switch.lock().out_port(frame.dlid);
        frame.hops += 1;
        match out {
            Some(out) if frame.hops < frame::MAX_HOPS => self.leave(u32::from(out), frame),
            _ => self.counters.undeliverable.count(),
        }
    }

    /// A switch sends a frame on to where its group is, but not to where it came from.
    fn forward_to_group(&self, from: u32, mlid: u32, mut frame: Frame) {
        let ports = self.switch.lock().group_ports(mlid);
        frame.hops += 1;
        if frame.hops >= frame::MAX_GROUP_HOPS {
            self.counters.undeliverable.count();
            return;
        }
        for out in 1..=self.port_count() {
            if out == from || ports & 1 << out == 0 {
                continue;
            }
            match frame.duplicate() {
                Ok(copy) => self.leave(out, copy),
                Err(_) => self.counters.undeliverable.count(),
            }
        }
        if from != 0 && ports & 1 != 0 {
            self.deliver_to_group(0, mlid, &frame);
        }
    }

    /// A switch takes a directed-route SMP further, or answers it.
    fn direct(&self, number: u32, mut frame: Frame) {
        let through = u8::try_from(number).unwrap_or(0);
        let next = if frame.dest_qp == 0 && sma::is_directed(&frame.payload) {
            directed::step(&mut frame.payload, through)
        } else {
            Next::Nowhere
        };
        match next {
            Next::Out(out) if out != 0 => self.leave(u32::from(out), frame),
            Next::Here => {
                if self.answer(number, &mut frame).is_some() {
                    let back = directed::turn(&mut frame.payload);
                    self.leave(u32::from(back), frame);
                }
            }
            _ => self.counters.undeliverable.count(),
        }
    }

    /// Replaces a request to the switch by its answer, if it has one. Does not sleep.
    fn answer(&self, number: u32, frame: &mut Frame) -> Option<()> {
        self.counters.offered.count();
        let offered = OfferedMad {
            port: number,
            mad: &frame.payload,
            received: true,
        };
        let len = frame.payload.len();
        let mut reply = KVec::with_capacity(len, GFP_ATOMIC).ok()?;
        reply.resize(len, 0, GFP_ATOMIC).ok()?;
        let MadVerdict::Reply(_) = sma::answer(self, &offered, &mut reply) else {
            return None;
        };
        self.counters.answered.count();
        frame.payload = reply;
        Some(())
    }

    /// A frame leaves a port.
    pub(crate) fn leave(&self, number: u32, frame: Frame) {
        let Ok(port) = self.port(number) else {
            self.counters.undeliverable.count();
            return;
        };
        if !port.state.lock().passes(&frame) {
            self.counters.undeliverable.count();
            return;
        }
        self.counters.frames_out.count();
        if let Some(outbox) = &self.outbox {
            if frame.is_data() || outbox.push_mad(number, frame).is_err() {
                self.counters.undeliverable.count();
            }
            return;
        }
        let peer = port.links.lock().peer.clone();
        match peer {
            Some(End { node, port }) => node.arrive(port, frame),
            None => self.counters.undeliverable.count(),
        }
    }

    /// A frame arrives at a port.
    pub(crate) fn arrive(&self, number: u32, frame: Frame) {
        let Ok(port) = self.port(number) else { return };
        let managing = self.managing_port(number);
        self.counters.frames_in.count();
        let from_user = self.outbox.is_some();
        if !port.state.lock().passes(&frame) || from_user && frame.is_data() {
            self.counters.undeliverable.count();
            return;
        }
        if let Some(mlid) = self.group(&frame) {
            if self.shape == Shape::Switch {
                self.forward_to_group(number, mlid, frame);
            } else {
                self.deliver_to_group(number, mlid, &frame);
            }
            return;
        }
        if self.shape == Shape::Switch && frame.is_permissive() {
            self.direct(number, frame);
            return;
        }
        let for_me = if frame.is_permissive() {
            frame.dest_qp == 0
        } else {
            self.port(managing)
                .is_ok_and(|port| port.state.lock().owns_lid(frame.dlid))
        };
        if for_me {
            self.deliver(managing, &frame);
        } else if self.shape == Shape::Switch {
            self.forward(frame);
        } else {
            self.counters.undeliverable.count();
        }
    }

    /// Gives a frame to the queue pair that it is for.
    fn deliver(&self, managing: u32, frame: &Frame) {
        let Ok(port) = self.port(managing) else {
            return;
        };
        if self.external {
            self.answer_by_lid(managing, frame);
            return;
        }
        let qp = if frame.is_data() {
            self.data.lock().find(frame.dest_qp)
        } else {
            port.qp(frame.dest_qp)
        };
        let Some(qp) = qp else {
            self.counters.no_queue_pair.count();
            return;
        };
        self.hand_over(managing, &qp, frame);
    }

    /// Answers a MAD by LID, if the agent has an answer.
    fn answer_by_lid(&self, managing: u32, frame: &Frame) {
        let answer = frame.duplicate().ok().and_then(|mut answer| {
            self.answer(managing, &mut answer)?;
            Some(answer)
        });
        let Some(mut answer) = answer else {
            self.counters.no_queue_pair.count();
            return;
        };
        (answer.dlid, answer.slid) = (frame.slid, frame.dlid);
        (answer.dest_qp, answer.src_qp) = (frame.src_qp, frame.dest_qp);
        answer.grh = None;
        self.start(managing, answer);
    }

    /// Gives a frame to all queue pairs of a group at a port.
    fn deliver_to_group(&self, managing: u32, mlid: u32, frame: &Frame) {
        // The group may change meanwhile: at worst one gets the frame twice, or not at all.
        for n in 0.. {
            let member = self.data.lock().member(n, frame.dgid(), mlid);
            let Some(qp) = member else { return };
            if qp.binding().port == managing {
                self.hand_over(managing, &qp, frame);
            }
        }
    }

    /// Lets a queue pair receive a frame, if the keys are right.
    fn hand_over(&self, managing: u32, qp: &QueuePair, frame: &Frame) {
        let Ok(port) = self.port(managing) else {
            return;
        };
        let binding = qp.binding();
        if binding.port != managing {
            self.counters.no_queue_pair.count();
            return;
        }
        let mut state = port.state.lock();
        let pkey_index = match frame.dest_qp {
            0 => Some(0),
            1 => state.match_pkey(frame.pkey),
            _ => {
                let own = state.pkeys.get(usize::from(binding.pkey_index));
                own.filter(|own| same_partition(**own, frame.pkey))
                    .map(|_| binding.pkey_index)
            }
        };
        let Some(pkey_index) = pkey_index else {
            state.pkey_violations = state.pkey_violations.saturating_add(1);
            drop(state);
            self.counters.pkey_violations.count();
            return;
        };
        let dlid_path_bits = if frame.is_permissive() || self.group(frame).is_some() {
            0
        } else {
            state.path_bits(frame.dlid)
        };
        drop(state);
        if frame.is_data() && frame.qkey != binding.qkey {
            self.counters.qkey_violations.count();
            return;
        }
        let received = qp.receive(&Arrival {
            grh: frame.grh.as_ref(),
            payload: &frame.payload,
            src_qp: frame.src_qp,
            slid: frame.slid,
            sl: frame.sl,
            dlid_path_bits,
            pkey_index,
            port: managing,
        });
        match received {
            Ok(()) => self.counters.delivered.count(),
            Err(RecvFailure::NoBuffer) => self.counters.no_buffer.count(),
            Err(RecvFailure::NotReceiving) => self.counters.no_queue_pair.count(),
            Err(RecvFailure::TooLong) => self.counters.undeliverable.count(),
        }
    }
}

impl Port {
    /// A queue pair of the port.
    fn qp(&self, number: u32) -> Option<Arc<QueuePair>> {
        let index = usize::try_from(number).ok()?;
        self.links.lock().qps.get(index)?.clone()
    }

    /// Changes which queue pair has a number; returns the one that had it.
    fn set_qp(&self, number: u32, qp: Option<Arc<QueuePair>>) -> Result<Option<Arc<QueuePair>>> {
        let index = usize::try_from(number).map_err(|_| EINVAL)?;
        let links: &mut Links = &mut self.links.lock();
        let slot = links.qps.get_mut(index).ok_or(EINVAL)?;
        Ok(core::mem::replace(slot, qp))
    }
}

impl Provider for Node {
    // CAST: Small constants.
    const PKEYS: u16 = uapi::PKEYS as u16;
    const GIDS: u8 = GIDS as u8;

    fn port_caps(&self, port: u32) -> Result<PortCaps> {
        self.port(port)?;
        Ok(self.shape.port_caps())
    }

    fn port_attr(&self, port: u32) -> Result<PortAttr> {
        let state = self.port(port)?.state.lock();
        Ok(PortAttr {
            gid_prefix: state.gid_prefix,
            state: state.state,
            phys_state: state.phys_state(),
            cap_mask: state.cap_mask,
            lid: state.lid,
            lmc: state.lmc,
            sm_lid: state.sm_lid,
            sm_sl: state.sm_sl,
            subnet_timeout: state.subnet_timeout,
            init_type_reply: state.init_type_reply,
            pkey_violations: state.pkey_violations,
        })
    }

    fn gid(&self, port: u32, index: usize) -> Result<[u8; 16]> {
        self.port(port)?.state.lock().gid(index).ok_or(EINVAL)
    }

    fn pkey(&self, port: u32, index: usize) -> Result<u16> {
        let state = self.port(port)?.state.lock();
        state.pkeys.get(index).copied().ok_or(EINVAL)
    }

    fn modify_port(&self, port: u32, set: u32, clear: u32) -> Result {
        self.counters.modified.count();
        let allowed = self.faults.lock().modify_port();
        let this = allowed
            .and_then(|()| self.port(port))
            .inspect_err(|_| self.counters.modify_failed.count())?;
        let mut state = this.state.lock();
        state.cap_mask = state.cap_mask & !clear | set;
        let cap_mask = state.cap_mask;
        drop(state);
        if let Some(outbox) = &self.outbox {
            // A reader that is too slow has lost it, as it would a frame.
            let _ = outbox.push_cap_mask(port, cap_mask);
        }
        Ok(())
    }

    fn process_mad(&self, offered: &OfferedMad<'_>, reply: &mut [u8]) -> MadVerdict {
        self.counters.offered.count();
        if sma::is_request(offered.mad) {
            let class = offered.mad.get(1).copied().unwrap_or(0);
            let (ms, instead) = self.faults.lock().request(class);
            if ms != 0 {
                fsleep(Delta::from_millis(i64::from(ms)));
            }
            if let Some(verdict) = instead {
                return verdict;
            }
        }
        let verdict = match &self.outbox {
            Some(outbox) if self.user_sma && sma::is_request(offered.mad) => {
                if offered.received {
                    // The fabric has an agent of its own for this node: this one is for a manager.
                    MadVerdict::Pass
                } else {
                    outbox.ask(offered.port, offered.mad, reply)
                }
            }
            _ => sma::answer(self, offered, reply),
        };
        if let MadVerdict::Reply(_) = verdict {
            self.counters.answered.count();
        }
        verdict
    }

    fn new_qp_number(&self) -> u32 {
        self.data.lock().new_number()
    }

    fn attach(&self, qp: Arc<QueuePair>) -> Result {
        if qp.is_data() {
            return self.data.lock().add(qp);
        }
        let (port, number) = (qp.binding().port, qp.number());
        let old = self.port(port)?.set_qp(number, Some(qp))?;
        drop(old);
        Ok(())
    }

    fn detach(&self, qp: &Arc<QueuePair>) {
        if qp.is_data() {
            loop {
                let left = self.data.lock().leave_any(qp);
                if left.is_none() {
                    break;
                }
            }
            let old = self.data.lock().remove(qp);
            drop(old);
            return;
        }
        let old = self
            .port(qp.binding().port)
            .and_then(|port| port.set_qp(qp.number(), None));
        drop(old);
    }

    fn join(&self, qp: &Arc<QueuePair>, mgid: [u8; 16], mlid: u16) -> Result {
        self.data.lock().join(mgid, u32::from(mlid), qp)
    }

    fn leave(&self, qp: &QueuePair, mgid: [u8; 16], mlid: u16) -> Result {
        let left = self.data.lock().leave(&mgid, u32::from(mlid), qp);
        left.map(drop).ok_or(EINVAL)
    }

    fn send(
        this: ArcBorrow<'_, Self>,
        qp: ArcBorrow<'_, QueuePair>,
        mut request: SendRequest,
    ) -> Result {
        this.counters.sends.count();
        // Data is of no class.
        let class = match request.payload.get(1) {
            Some(class) if !qp.is_data() => *class,
            _ => 0,
        };
        let binding = qp.binding();
        let fate = this.faults.lock().send(class);
        let (status, late_ms) = match fate {
            SendFate::Refused(e) => {
                this.counters.sends_refused.count();
                return Err(e);
            }
            SendFate::Posted(status, late_ms) => (status, late_ms),
        };
        let frame = this
            .frame(&qp, &binding, &mut request)
            .inspect_err(|_| this.counters.sends_refused.count())?;
        let token = request.token;
        if late_ms == 0 {
            this.complete(&qp, token, status);
        } else {
            this.put_off(
                late_ms,
                Task::Complete {
                    qp: qp.into(),
                    token,
                    status,
                    node: this.into(),
                },
            );
        }
        if status != SendStatus::SUCCESS {
            return Ok(());
        }
        let fate = this.faults.lock().frame(class);
        let (copies, delay_ms) = match fate {
            FrameFate::Dropped => {
                this.counters.dropped.count();
                return Ok(());
            }
            FrameFate::Sent { copies, delay_ms } => (copies, delay_ms),
        };
        let second = if copies > 1 {
            frame.duplicate().ok()
        } else {
            None
        };
        if second.is_some() {
            this.counters.duplicated.count();
        }
        for frame in [Some(frame), second].into_iter().flatten() {
            // `ib_mad` sends with interrupts off. What a receiver of data leaves to a softirq had to wait
            // for the next interrupt then.
            let at_once = delay_ms == 0 && frame.is_data() == qp.is_data();
            if at_once {
                this.start(binding.port, frame);
            } else {
                this.put_off(
                    delay_ms,
                    Task::Start {
                        node: this.into(),
                        port: binding.port,
                        frame,
                    },
                );
            }
        }
        Ok(())
    }

    fn make_address_handle(&self) -> Result {
        self.faults.lock().create_ah()?;
        self.counters.ahs_made.count();
        Ok(())
    }

    fn destroy_address_handle(&self) {
        self.counters.ahs_destroyed.count();
    }
}
