// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! An open umad file: its agents, its receive queue, its outstanding sends.
//!
//! Life cycle: open() makes it and enters it into its port; it ends with the close of its last
//! descriptor. If the device goes first, the file is dead: every call says so, its agents are gone, and
//! it keeps nothing but memory.
//!
//! Locking: [`UmadFile::inner`] is the file's lock, a spinlock. Handlers take it, so nothing that sleeps,
//! copies to or from a program, or calls `ib_core` is done under it; what has a destructor that does is
//! returned and dropped after unlocking. [`UmadFile::registering`] makes registrations of one file come
//! one after the other; it is taken before the file's lock, and never held while a program's memory is
//! touched. [`UmadFile::sieving`] comes between the two.

#![forbid(unsafe_code)]

use crate::{
    abi,
    agents::{
        AgentTable,
        FileAgent,
        Reserved,
        Slots, //
    },
    arrivals::Arrivals,
    bounds,
    cache::{
        Cache,
        Room as CacheRoom, //
    },
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
        },
        work, //
    },
    compat,
    fdinfo,
    outstanding::{
        self,
        NoRoom,
        Outstanding,
        Room,
        SendKey, //
    },
    packet::{
        Packet,
        Sender, //
    },
    port::Port,
    queue::{
        Next,
        RecvQueue, //
    },
    rdma::{
        address::{
            Address,
            AddressHandle, //
        },
        agent::{
            Registration,
            SendStatus, //
        },
        device::DeviceName,
        recv::GlobalSource,
        revocable::{
            Owner,
            User, //
        },
        trace::{
            self,
            DropReason,
            Traced, //
        }, //
    },
    register,
    seat::{
        AgentId,
        Seat, //
    },
    uapi::{
        self,
        Layout, //
    },
    write, //
};
use kernel::{
    device,
    impl_has_work,
    list::{
        List,
        ListArc, //
    },
    new_mutex,
    new_spinlock,
    new_work,
    prelude::*,
    seq_file::SeqFile,
    sync::{
        aref::ARef,
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        lock::{
            spinlock::SpinLockBackend,
            Guard, //
        },
        Arc,
        ArcBorrow,
        Mutex,
        SpinLock, //
    },
    uaccess::UserPtr,
    workqueue::{
        self,
        Work,
        WorkItem, //
    }, //
};

/// What the file's lock guards.
struct Inner {
    /// The device is there and the file is open.
    alive: bool,
    /// An agent was registered, so the layout is settled.
    used: bool,
    agents: AgentTable,
    queue: RecvQueue,
    outstanding: Outstanding,
    /// Address handles that were used.
    handles: Handles,
    arrivals: Arrivals,
    under_way: UnderWay,
    counters: Counters,
}

/// The sends that are written but not done, those that are being written included.
#[derive(Clone, Copy, Default)]
pub(crate) struct UnderWay {
    pub(crate) sends: usize,
    /// What they cost, see [`bounds`].
    pub(crate) cost: usize,
}

/// What happened in a file since it was opened.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counters {
    /// MADs that were handed to `ib_mad`.
    pub(crate) sent: u64,
    /// MADs that were received and queued.
    pub(crate) received: u64,
    /// Sends that got no response in time.
    pub(crate) timed_out: u64,
    /// Received MADs for which there was no room in the queue.
    pub(crate) dropped: u64,
}

/// A send that is being written, with what it costs until it is done.
///
/// Until it is posted it ends with this value; then with its completion.
pub(crate) struct SendBudget<'a> {
    file: &'a UmadFile,
    cost: usize,
}

impl SendBudget<'_> {
    /// What the send costs.
    pub(crate) fn cost(&self) -> usize {
        self.cost
    }
}

impl Drop for SendBudget<'_> {
    fn drop(&mut self) {
        self.file.inner.lock().under_way.end(self.cost);
    }
}

impl UnderWay {
    fn end(&mut self, cost: usize) {
        self.sends = self.sends.saturating_sub(1);
        self.cost = self.cost.saturating_sub(cost);
    }
}

/// A packet that is not queued: a send that is done, or one that is dropped for a reason. Must not be
/// dropped under the file's lock.
struct Unqueued {
    packet: ListArc<Packet>,
    dropped: Option<DropReason>,
}

impl Unqueued {
    fn dropped(packet: ListArc<Packet>, reason: DropReason) -> Self {
        Self {
            packet,
            dropped: Some(reason),
        }
    }
}

/// What a file is and does, at one moment.
pub(crate) struct FileStatus {
    /// The device is there and the file is open.
    pub(crate) alive: bool,
    pub(crate) layout: Layout,
    /// Packets that are not read.
    pub(crate) queued: usize,
    /// What they cost.
    pub(crate) queued_cost: usize,
    pub(crate) under_way: UnderWay,
    pub(crate) counters: Counters,
}

/// Address handles by their addresses. All are of the file's port, and so of the protection domain that
/// its agents share; the P_Key is said with each send, and is no part of them.
type Handles = Cache<4, Arc<AddressHandle>>;

/// An open umad file.
#[pin_data]
pub(crate) struct UmadFile {
    port: Arc<Port>,
    /// The node that was opened: messages name it.
    node: ARef<device::Device>,
    /// The device's name when the file was opened, for when the device is gone.
    device_name: DeviceName,
    /// Who opened it, for the coverage of what is done on its behalf.
    opener: OnBehalfOf,
    /// Makes registrations come one after the other.
    #[pin]
    registering: Mutex<()>,
    /// Held while the queue is lent out to be sieved.
    #[pin]
    sieving: Mutex<()>,
    #[pin]
    inner: SpinLock<Inner>,
    /// Headers have a P_Key index. Changed under the file's lock.
    has_pkey_index: Atomic<bool>,
    /// Memory that would have been of use, see [`UmadFile::get_memory_that_is_wanted`].
    wants_handles: Atomic<bool>,
    wanted_places: Atomic<usize>,
    /// Finds the way back of arrivals.
    #[pin]
    finder: Work<UmadFile>,
    finder_was_asked: Atomic<bool>,
    /// Those who sleep in read(): for a packet, of which each wakes one of them, or for the device to go.
    #[pin]
    readers: WaitQueue,
    /// Those who poll, by whatever call. They have a queue of their own, so that one who is woken there
    /// and does not read after all never stands for a reader.
    #[pin]
    pollers: WaitQueue,
}

impl_has_work! {
    impl HasWork<Self> for UmadFile { self.finder }
}

impl UmadFile {
    fn new(
        port: Arc<Port>,
        node: ARef<device::Device>,
        device_name: DeviceName,
    ) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                port,
                node,
                device_name,
                opener: OnBehalfOf::current(),
                registering <- new_mutex!((), "UmadFile::registering"),
                sieving <- new_mutex!((), "UmadFile::sieving"),
                // Made where it stays.
                inner <- new_spinlock!(init!(Inner {
                    alive: true,
                    used: false,
                    agents: AgentTable::new(),
                    queue: RecvQueue::new(),
                    outstanding: Outstanding::new(),
                    handles: Cache::new(),
                    arrivals: Arrivals::new(),
                    under_way: UnderWay::default(),
                    counters: Counters::default(),
                }), "UmadFile::inner"),
                has_pkey_index: Atomic::new(abi::first_layout() == Layout::PKeyIndex),
                wants_handles: Atomic::new(false),
                wanted_places: Atomic::new(outstanding::FIRST_PLACES),
                finder <- new_work!("UmadFile::finder"),
                finder_was_asked: Atomic::new(false),
                readers <- new_wait_queue!("UmadFile::readers"),
                pollers <- new_wait_queue!("UmadFile::pollers"),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// The port.
    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Who opened it.
    pub(crate) fn opener(&self) -> OnBehalfOf {
        self.opener
    }

    /// The node that was opened.
    pub(crate) fn node(&self) -> &device::Device {
        &self.node
    }

    /// The lock that makes registrations come one after the other.
    pub(crate) fn registering(&self) -> &Mutex<()> {
        &self.registering
    }

    /// The header layout. Each call asks once and keeps to the answer.
    pub(crate) fn layout(&self) -> Layout {
        if self.has_pkey_index.load(Relaxed) {
            Layout::PKeyIndex
        } else {
            Layout::Old
        }
    }

    fn set_layout(&self, _inner: &mut Inner, layout: Layout) {
        self.has_pkey_index
            .store(layout == Layout::PKeyIndex, Relaxed);
    }

    /// Reserves the lowest free agent id.
    ///
    /// # Errors
    ///
    /// `EPIPE` if the device is gone, `ENOMEM` if all ids are taken.
    pub(crate) fn reserve_seat(&self) -> Result<Seat> {
        loop {
            let mut inner = self.inner.lock();
            if !inner.alive {
                return Err(EPIPE);
            }
            match inner.agents.reserve() {
                Reserved::Seat(seat) => return Ok(seat),
                Reserved::Full => return Err(ENOMEM),
                Reserved::NeedsSlots => (),
            }
            let few = inner.agents.is_new();
            drop(inner);
            let slots = Slots::new(few)?;
            let unused = self.inner.lock().agents.enlarge(slots);
            drop(unused);
        }
    }

    /// Gives a reserved id back; the agent was not registered, or is unregistered again.
    pub(crate) fn cancel_seat(&self, seat: Seat) {
        self.inner.lock().agents.cancel(seat);
        self.drop_packets(seat.id(), |packet| packet.seat() == seat);
    }

    /// Lets the agent of a reserved seat be used. Gives it back if the device went meanwhile.
    pub(crate) fn publish(
        &self,
        seat: Seat,
        agent: Owner<FileAgent>,
    ) -> core::result::Result<(), Owner<FileAgent>> {
        self.inner.lock().agents.publish(seat, agent)
    }

    /// The program knows the agent's id. The file counts as used, and if it was not before, it gets
    /// `layout`, if there is one. Returns the layout if this was the file's first agent.
    pub(crate) fn confirm(&self, seat: Seat, layout: Option<Layout>) -> Option<Layout> {
        let mut inner = self.inner.lock();
        let first = !core::mem::replace(&mut inner.used, true);
        if let (true, Some(layout)) = (first, layout) {
            self.set_layout(&mut inner, layout);
        }
        let settled = first.then_some(self.layout());
        inner.agents.confirm(seat);
        let may_have_packets = inner.queue.may_have(seat.id());
        drop(inner);
        if may_have_packets {
            self.drop_packets(seat.id(), |packet| packet.seat().precedes(seat));
        }
        settled
    }

    /// Uses the header with the P_Key index from now on.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file had an agent already.
    fn enable_pkey(&self) -> Result {
        let mut inner = self.inner.lock();
        if inner.used {
            return Err(EINVAL);
        }
        self.set_layout(&mut inner, Layout::PKeyIndex);
        Ok(())
    }

    /// The agent with this id, its seat, and the address handle that the file keeps for an address. The
    /// agent cannot be unregistered until the caller lets go.
    ///
    /// Unless there is a `budget` already, reserves what the send costs: `cost` says how much that is, if
    /// `ib_mad` does RMPP for the agent or if not.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no such agent; what `cost` says; `ENOBUFS` if the send and those that are under way
    /// cost too much together.
    pub(crate) fn borrow_agent<'a>(
        &'a self,
        id: AgentId,
        address: &Address,
        cost: impl FnOnce(bool) -> Result<usize>,
        budget: &mut Option<SendBudget<'a>>,
    ) -> Result<(User<FileAgent>, Seat, Option<Arc<AddressHandle>>)> {
        let key = address.words();
        let mut inner = self.inner.lock();
        if !inner.alive {
            return Err(EIO);
        }
        let kernel_rmpp = inner.agents.has_kernel_rmpp(id).ok_or(EIO)?;
        if budget.is_none() {
            let cost = cost(kernel_rmpp)?;
            let under_way = inner.under_way.cost.saturating_add(cost);
            // A timeout is paid for until it is read.
            let unread = bounds::timeouts_cost(inner.queue.timeouts());
            if !bounds::are_sends_allowed(under_way.saturating_add(unread)) {
                return Err(compat::enobufs());
            }
            inner.under_way.sends += 1;
            inner.under_way.cost = under_way;
            *budget = Some(SendBudget { file: self, cost });
        }
        // The budget that was just made must not be dropped under the lock: its caller has it.
        let (agent, seat) = inner.agents.get(id).ok_or(EIO)?;
        Ok((agent, seat, inner.handles.get(&key).cloned()))
    }

    /// Gets memory that earlier sends of the file could have made use of. It is charged to the program,
    /// which may be made to wait for it, so that nothing may be held. Without it, all goes on as it was.
    pub(crate) fn get_memory_that_is_wanted(&self) {
        if self.wants_handles.load(Relaxed) {
            self.wants_handles.store(false, Relaxed);
            if let Ok(room) = CacheRoom::new() {
                let unused = self.inner.lock().handles.enlarge(room);
                drop(unused);
            }
        }
        let wanted = self.wanted_places.load(Relaxed);
        if wanted > 0 {
            if let Ok(room) = Room::new(wanted) {
                let mut inner = self.inner.lock();
                let unneeded = inner.outstanding.enlarge(room);
                self.wanted_places
                    .store(inner.outstanding.wanted_places(), Relaxed);
                drop(inner);
                drop(unneeded);
            }
        }
    }

    /// A handle on an address: the `kept` one, if it is one that would be made now, or a new one, which
    /// sleeps.
    ///
    /// A handle is kept until something changes that it was made from, or it is a second old, or others
    /// have been used more recently; sends that are under way hold it besides.
    ///
    /// # Errors
    ///
    /// What [`AddressHandle::new`] says.
    pub(crate) fn address_handle(
        &self,
        agent: &FileAgent,
        address: &Address,
        kept: Option<Arc<AddressHandle>>,
    ) -> Result<Arc<AddressHandle>> {
        match kept {
            Some(handle) if handle.is_current() => return Ok(handle),
            old => drop(old),
        }
        let handle = Arc::new(AddressHandle::new(agent, address)?, GFP_KERNEL)?;
        let key = address.words();
        let mut inner = self.inner.lock();
        // Asked under the lock: who forgets the handles has let a new epoch begin before.
        let fallen = if inner.alive && handle.may_be_kept() {
            if inner.handles.needs_room() {
                self.wants_handles.store(true, Relaxed);
                None
            } else {
                inner.handles.put(key, handle.clone())
            }
        } else {
            None
        };
        drop(inner);
        drop(fallen);
        Ok(handle)
    }

    /// Keeps no address handle that is there now.
    pub(crate) fn forget_handles(&self) {
        let handles = self.inner.lock().handles.take();
        drop(handles);
    }

    /// Takes an agent out of the table; the caller is to retire it.
    pub(crate) fn take_agent(&self, id: AgentId) -> Option<Owner<FileAgent>> {
        let mut inner = self.inner.lock();
        if !inner.alive {
            return None;
        }
        inner.agents.take(id)
    }

    /// Takes the agent of a seat out of the table, and its packets out of the queue.
    pub(crate) fn take_seat(&self, seat: Seat) -> Option<Owner<FileAgent>> {
        let agent = self.inner.lock().agents.take_seat(seat);
        self.drop_packets(seat.id(), |packet| packet.seat() == seat);
        agent
    }

    /// Drops those unread packets of an agent id that `which` says.
    fn drop_packets(&self, id: AgentId, which: impl Fn(&Packet) -> bool) {
        let _one_at_a_time = self.sieving.lock();
        // The guard of a lock lives to the end of the statement, so the statement ends here.
        let sieve = self.inner.lock().queue.begin_sieve(id);
        let Some(mut sieve) = sieve else { return };
        sieve.remove_all(which);
        let mut inner = self.inner.lock();
        let removed = inner.queue.end_sieve(sieve);
        let reason = inner.why_gone();
        drop(inner);
        self.wake_all();
        self.discard(removed, reason);
    }

    /// Drops packets that nobody will read.
    fn discard(&self, packets: List<Packet>, reason: DropReason) {
        if trace::are_drops_traced() {
            for packet in packets.iter() {
                self.trace_dropped(&packet, reason);
            }
        }
        drop(packets);
    }

    /// A packet is dropped.
    fn trace_dropped(&self, packet: &Packet, reason: DropReason) {
        trace::dropped(reason, None, || self.traced(packet));
    }

    /// What tracepoints tell of a packet.
    fn traced(&self, packet: &Packet) -> Traced {
        let (header, mad) = packet.heads(self.layout());
        self.port.traced(header, mad)
    }

    /// A packet was read.
    #[cold]
    fn trace_read(&self, packet: &Packet) {
        if packet.is_timeout() {
            trace::read_sent(|| self.traced(packet));
        } else {
            trace::read_received(|| self.traced(packet));
        }
    }

    /// What the file is and does, at one moment.
    pub(crate) fn status(&self) -> FileStatus {
        let inner = self.inner.lock();
        FileStatus {
            alive: inner.alive,
            layout: self.layout(),
            queued: inner.queue.len(),
            queued_cost: inner.queue.cost(),
            under_way: inner.under_way,
            counters: inner.counters,
        }
    }

    /// What the agent with this id is, at one moment.
    pub(crate) fn registration(&self, id: AgentId) -> Option<Registration> {
        self.inner.lock().agents.registration(id)
    }

    /// The name that the device had when the file was opened.
    pub(crate) fn device_name(&self) -> &DeviceName {
        &self.device_name
    }

    /// Makes a send outstanding, before it is posted. From here on its budget is the packet's.
    ///
    /// With `refuse_duplicate`, a send with the same key that is outstanding already is an error; with
    /// `list`, the send is listed until it is done.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a duplicate; `ENOMEM`.
    pub(crate) fn begin_send(
        &self,
        key: &SendKey,
        budget: &mut Option<SendBudget<'_>>,
        list: bool,
        refuse_duplicate: bool,
    ) -> Result {
        loop {
            let mut inner = self.inner.lock();
            if refuse_duplicate && inner.outstanding.contains(key) {
                return Err(EINVAL);
            }
            let mut unneeded = None;
            if list {
                match inner.outstanding.insert(*key) {
                    Ok(table) => unneeded = Some(table),
                    Err(NoRoom::Moving(table)) => {
                        drop(inner);
                        drop(table);
                        continue;
                    }
                    Err(NoRoom::Places(places)) => {
                        drop(inner);
                        let room = Room::new(places)?;
                        let table = self.inner.lock().outstanding.enlarge(room);
                        drop(table);
                        continue;
                    }
                }
                self.wanted_places
                    .store(inner.outstanding.wanted_places(), Relaxed);
            }
            inner.counters.sent += 1;
            drop(inner);
            // It ends with the completion now.
            core::mem::forget(budget.take());
            drop(unneeded);
            return Ok(());
        }
    }

    /// A send was refused by `ib_mad`.
    pub(crate) fn abort_send(&self, send: &Packet) {
        let mut inner = self.inner.lock();
        inner.end_send(send);
        inner.under_way.end(send.send_cost());
        inner.counters.sent -= 1;
        drop(inner);
    }

    /// A send is completed. Called by handlers.
    pub(crate) fn complete_send(&self, send: Arc<Packet>, status: SendStatus) {
        // The send came back from `ib_mad`, and nobody else had a reference to it.
        let Some(packet) = Arc::into_unique_or_drop(send) else {
            return;
        };
        let packet = ListArc::from(packet);
        let mut inner = self.inner.lock();
        inner.end_send(&packet);
        inner.under_way.end(packet.send_cost());
        let unqueued = if status == SendStatus::TimedOut {
            inner.counters.timed_out += 1;
            inner.queue_packet(packet)
        } else {
            let dropped = (status == SendStatus::Failed).then_some(DropReason::SendFailed);
            Some(Unqueued { packet, dropped })
        };
        self.unlock_and_wake(inner, unqueued);
    }

    /// The way back to the sender of a MAD that came with a GRH, as far as it can be told without
    /// waiting. Called by handlers.
    ///
    /// # Errors
    ///
    /// That there is none.
    pub(crate) fn way_back(&self, source: &GlobalSource<'_>) -> Result<Sender> {
        if !source.asks_network() {
            return source.find().map(Sender::Found);
        }
        let known = self.port.recall_way(source);
        Ok(known.map_or_else(|| Sender::NotFoundYet(source.to_owned()), Sender::Found))
    }

    /// A MAD was received; if `is_answer`, a request was waiting for it. Called by handlers.
    pub(crate) fn queue_received(file: &Arc<Self>, packet: ListArc<Packet>, is_answer: bool) {
        let request = is_answer.then(|| packet.answered()).flatten();
        let mut inner = file.inner.lock();
        // Before the response can be read, even if it lines up first.
        if let Some(key) = request {
            inner.outstanding.answer(&key);
        }
        if inner.arrivals.is_busy() || packet.source().is_some() {
            let mut unqueued = None;
            let mut ask = false;
            if !inner.alive {
                unqueued = Some(Unqueued::dropped(packet, DropReason::FileGone));
            } else if !inner.admits(&packet) {
                unqueued = Some(Unqueued::dropped(packet, DropReason::QueueFull));
            } else {
                ask = inner.arrivals.push(packet);
            }
            drop(inner);
            file.end_unqueued(unqueued);
            if ask {
                file.finder_was_asked.store(true, Relaxed);
                // If the item is still at its end, it runs once more.
                let _ = workqueue::system_long().enqueue(file.clone());
            }
            return;
        }
        let unqueued = inner.queue_received(packet);
        file.unlock_and_wake(inner, unqueued);
    }

    /// Queues all arrivals, once their way back is found.
    fn find_ways(&self) {
        loop {
            let next = self.inner.lock().arrivals.pop();
            let Some(packet) = next else { break };
            // Without a way back it is dropped: nobody could be answered.
            let Some(packet) = self.find_way(packet) else {
                continue;
            };
            let mut inner = self.inner.lock();
            let unqueued = inner.queue_received(packet);
            self.unlock_and_wake(inner, unqueued);
        }
    }

    fn find_way(&self, packet: ListArc<Packet>) -> Option<ListArc<Packet>> {
        let Some(source) = packet.source() else {
            return Some(packet);
        };
        let found = match self.port.device() {
            Some(device) => self
                .port
                .find_way(&device, source)
                .map_err(|_| DropReason::NoWayBack),
            None => Err(DropReason::FileGone),
        };
        match found {
            Ok(global) => Packet::found(packet, &global),
            Err(reason) => {
                self.trace_dropped(&packet, reason);
                None
            }
        }
    }

    /// There is one packet more to be read: by one reader, or by who polls.
    fn wake_for_packet(&self) {
        self.readers.wake_one();
        self.pollers.wake_one();
    }

    /// Everybody is to look again.
    fn wake_all(&self) {
        self.readers.wake_all();
        self.pollers.wake_all();
    }

    /// Lets go of the file's lock, and then wakes a reader, unless the packet was not queued, and drops
    /// what is not needed any more.
    fn unlock_and_wake(
        &self,
        inner: Guard<'_, Inner, SpinLockBackend>,
        unqueued: Option<Unqueued>,
    ) {
        drop(inner);
        if unqueued.is_none() {
            self.wake_for_packet();
        }
        self.end_unqueued(unqueued);
    }

    /// Drops a packet that was not queued.
    fn end_unqueued(&self, unqueued: Option<Unqueued>) {
        if let Some(Unqueued { packet, dropped }) = unqueued {
            if let Some(reason) = dropped {
                self.trace_dropped(&packet, reason);
            }
            drop(packet);
        }
    }

    /// Takes the oldest packet, if there is one.
    ///
    /// # Errors
    ///
    /// `EIO` if the device is gone.
    fn try_take_packet(&self) -> Result<Next> {
        let mut inner = self.inner.lock();
        if !inner.alive {
            return Err(EIO);
        }
        Ok(inner.queue.pop())
    }

    /// Takes the oldest packet, waits for one if need be.
    fn take_packet(&self, flags: OpenFlags) -> Result<ListArc<Packet>> {
        while flags.nonblocking() {
            match self.try_take_packet()? {
                Next::Packet(packet) => return Ok(packet),
                Next::Empty => return Err(EAGAIN),
                // Nothing is not known to be there: wait until it is.
                Next::Sieved => drop(self.sieving.lock()),
            }
        }
        self.readers
            .wait_for_turn_until(|| match self.try_take_packet() {
                Ok(Next::Packet(packet)) => Some(Ok(packet)),
                Ok(Next::Empty | Next::Sieved) => None,
                Err(e) => Some(Err(e)),
            })?
    }

    /// Puts back a packet that could not be copied to its reader.
    fn put_back_packet(&self, packet: ListArc<Packet>) {
        let mut inner = self.inner.lock();
        if !inner.alive || !inner.agents.is_readable(packet.seat()) {
            let reason = inner.why_gone();
            drop(inner);
            self.trace_dropped(&packet, reason);
            drop(packet);
            return;
        }
        inner.queue.put_back(packet);
        drop(inner);
        self.wake_for_packet();
    }

    /// The device is gone, or the file is closed: ends everything of the file. Sleeps until the last
    /// handler has returned, and no writer is in the middle of a send.
    pub(crate) fn end(&self) {
        let mut inner = self.inner.lock();
        let unread = inner.kill();
        let handles = inner.handles.take();
        let agents = inner.agents.evict();
        drop(inner);
        self.wake_all();
        for packets in unread {
            self.discard(packets, DropReason::FileGone);
        }
        drop(handles);
        agents.retire();
        // No handler asks for it any more.
        if self.finder_was_asked.load(Relaxed) {
            work::wait_for(&self.finder);
        }
    }

    /// Lets nothing begin in the file any more, and wakes everybody. Does not sleep.
    pub(crate) fn kill(&self) {
        let unread = self.inner.lock().kill();
        self.wake_all();
        for packets in unread {
            self.discard(packets, DropReason::FileGone);
        }
    }
}

impl WorkItem for UmadFile {
    type Pointer = Arc<UmadFile>;

    fn run(file: Arc<UmadFile>) {
        let _section = file.opener.begin();
        file.find_ways();
    }
}

impl Inner {
    /// Lets nothing begin any more. Returns what is not read, to be dropped after unlocking.
    fn kill(&mut self) -> [List<Packet>; 2] {
        self.alive = false;
        [self.queue.take(), self.arrivals.take()]
    }

    /// Why a packet has nobody any more who would read it.
    fn why_gone(&self) -> DropReason {
        if self.alive {
            DropReason::AgentGone
        } else {
            DropReason::FileGone
        }
    }

    /// Whether there is room for a received MAD; if not, it counts as dropped. Reports of timeouts are not
    /// asked about: `max_outstanding` bounds them.
    fn admits(&mut self, packet: &Packet) -> bool {
        let is_room = bounds::is_room_for(
            packet.cost(),
            self.queue.len() + self.arrivals.len(),
            self.queue.cost() + self.arrivals.cost(),
        );
        self.counters.dropped += u64::from(!is_room);
        is_room
    }

    /// Queues a received MAD, unless there is no room, or the device or its agent is gone: then the packet
    /// comes back.
    fn queue_received(&mut self, packet: ListArc<Packet>) -> Option<Unqueued> {
        if !self.admits(&packet) {
            return Some(Unqueued::dropped(packet, DropReason::QueueFull));
        }
        let unqueued = self.queue_packet(packet);
        if unqueued.is_none() {
            self.counters.received += 1;
        }
        unqueued
    }

    /// Queues a packet, unless the device or its agent is gone: then the packet comes back.
    fn queue_packet(&mut self, packet: ListArc<Packet>) -> Option<Unqueued> {
        if !self.alive || !self.agents.is_seated(packet.seat()) {
            return Some(Unqueued::dropped(packet, self.why_gone()));
        }
        self.queue.push(packet);
        None
    }

    /// Takes a send that is done off the list.
    fn end_send(&mut self, send: &Packet) {
        if let Some(key) = send.listed() {
            self.outstanding.remove(key);
        }
    }
}

#[vtable]
impl Operations for UmadFile {
    type Data = Arc<Port>;
    type File = Arc<UmadFile>;

    const POSITIONING: Positioning = Positioning::Stream;

    /// Errors: `ENXIO` if the device is gone, `EPERM` if the caller's network namespace may not use it,
    /// `ENOMEM`.
    fn open(port: &Arc<Port>, node: &device::Device, _flags: OpenFlags) -> Result<Arc<Self>> {
        let device = port.device().ok_or(ENXIO)?;
        if !device.accessible_from_current_netns() {
            return Err(EPERM);
        }
        let file = Self::new(port.clone(), node.into(), device.name())?;
        port.enter(&file)?;
        Ok(file)
    }

    fn release(file: Arc<Self>) {
        file.port.leave(&file);
        file.end();
    }

    /// Errors: `EINVAL` if there is no room for a header, or not for the packet; `EIO` if the device is
    /// gone; `EAGAIN`; `ERESTARTSYS`; and see [`Packet::copy_to`].
    fn read(file: ArcBorrow<'_, Self>, flags: OpenFlags, buf: UserRoom) -> Result<usize> {
        let layout = file.layout();
        if buf.len() < layout.header_len() {
            return Err(EINVAL);
        }
        let packet = file.take_packet(flags)?;
        let copied = packet.copy_to(buf, layout);
        if copied.is_err() {
            file.put_back_packet(packet);
        } else if trace::are_reads_traced() {
            file.trace_read(&packet);
        }
        copied
    }

    fn write(file: ArcBorrow<'_, Self>, buf: UserBytes) -> Result<usize> {
        write::write(&file, buf)
    }

    fn poll(file: ArcBorrow<'_, Self>, table: &PollTable<'_>) -> PollEvents {
        table.register(&file.pollers);
        let inner = file.inner.lock();
        if !inner.alive {
            PollEvents::ERROR
        } else if inner.queue.is_empty() {
            PollEvents::WRITABLE
        } else {
            PollEvents::WRITABLE.and(PollEvents::READABLE)
        }
    }

    fn show_fdinfo(file: ArcBorrow<'_, Self>, to: &SeqFile) {
        fdinfo::show(&file, to);
    }

    /// Errors: `ENOTTY` for an unknown number, which ENABLE_PKEY may be, and see [`register`].
    fn ioctl(file: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result {
        match cmd {
            uapi::REGISTER_AGENT => register::register_agent(file.into(), arg),
            uapi::REGISTER_AGENT2 => register::register_agent2(file.into(), arg),
            uapi::UNREGISTER_AGENT => register::unregister_agent(&file, arg),
            uapi::ENABLE_PKEY if abi::has_enable_pkey() => file.enable_pkey(),
            _ => Err(ENOIOCTLCMD),
        }
    }
}
