// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The bridge: one thread that takes frames from the device to ibsim and back, and keeps the device's port
//! in step with the fabric's.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signalfd::SignalFd;
use vhca::{Frame, Shape, Spec, Vhca, IS_SM, PORT_DOWN, PORT_WAIT_FOR_SM, USER_SMA};

use crate::agent::Agent;
use crate::fabric::{Error, Fabric, Node};
use crate::loss::Loss;
use crate::mad::{self, Mad};
use crate::portinfo::Port;
use crate::route::{self, Inbound};
use crate::stats::{Stats, StatsFile};
use crate::tids::{Purpose, Tids};

/// How often ibsim is asked for the port, and looked for if it is gone.
const POLL: Duration = Duration::from_millis(200);
/// Frames taken in one go, before others have their turn.
const BATCH: usize = 64;
/// So many messages may wait for ibsim; more stay with the device.
const WAITING: usize = 1024;
/// Transaction ids that are remembered.
const TIDS: usize = 1 << 16;

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Options {
    /// Base of the names of ibsim's sockets.
    pub base: String,
    /// Name of the node; empty for ibsim's choice.
    pub node: String,
    /// Name of the device; empty for the kernel's choice.
    pub device: String,
    /// Fraction of frames to lose, each way.
    pub loss: f64,
    /// Which ones.
    pub seed: u64,
    /// Where counters are shown.
    pub stats: Option<PathBuf>,
    /// How long ibsim may take to be there at the beginning.
    pub patience: Duration,
}

/// A device, at a node of a fabric.
pub struct Bridge {
    base: String,
    /// The node, and its GUID.
    node: String,
    guid: u64,
    device: Vhca,
    fabric: Option<Fabric>,
    /// As the device was told last.
    port: Port,
    /// Whether the port of the device is marked IsSM.
    is_sm: bool,
    /// ibsim does not know that yet.
    is_sm_untold: bool,
    tids: Tids,
    agent: Agent,
    loss: Loss,
    stats: Stats,
    file: Option<StatsFile>,
    next_poll: Instant,
}

impl Bridge {
    /// Connects to ibsim, and makes the device.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub fn start(options: &Options) -> Result<Self, String> {
        let end = Instant::now() + options.patience;
        let (fabric, node) = loop {
            match attach(&options.base, &options.node) {
                Ok(both) => break both,
                Err(Error::Gone) if Instant::now() < end => std::thread::sleep(POLL / 4),
                Err(e) => return Err(e.to_string()),
            }
        };
        if !node.is_ca() {
            return Err(format!("node {} is not a channel adapter", fabric.node));
        }
        let mut spec = Spec::new(Shape::Ca, node.ports().clamp(1, 8))
            .in_user_space()
            .flags(USER_SMA)
            .guid(node.guid())
            .name(&options.device)
            .description(&node.description);
        for number in 1..=node.ports().clamp(1, 8) {
            let index = usize::try_from(number).unwrap_or(0);
            spec = spec.port(index, |port| {
                // ibsim's clients are at their node's first port.
                port.flags = PORT_DOWN | PORT_WAIT_FOR_SM;
                port.cap_mask = Port::cap_mask(&node.port_info) & !IS_SM;
            });
        }
        let device = spec
            .create()
            .map_err(|e| format!("the device cannot be made: {e}"))?;
        let mut this = Self {
            base: options.base.clone(),
            node: fabric.node.clone(),
            guid: node.guid(),
            device,
            fabric: None,
            port: Port::default(),
            is_sm: false,
            is_sm_untold: false,
            tids: Tids::new(TIDS),
            agent: Agent::default(),
            loss: Loss::new(options.loss, options.seed),
            stats: Stats::default(),
            file: options.stats.as_deref().map(StatsFile::new),
            next_poll: Instant::now() + POLL,
        };
        this.connected(fabric, &node).map_err(|e| e.to_string())?;
        this.show_stats()?;
        Ok(this)
    }

    /// One line that says what there is.
    pub fn describe(&self) -> String {
        let client = self.fabric.as_ref().map_or(0, Fabric::client);
        format!(
            "device {}, node {}, GUID {:#018x}, client {client} of {}",
            self.device.ibdev, self.node, self.guid, self.base
        )
    }

    /// Works until a signal comes; then leaves the fabric and removes the device.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub fn run(mut self, signals: &SignalFd) -> Result<(), String> {
        while !self.turn(signals)? {}
        if let Some(fabric) = self.fabric.take() {
            match fabric.disconnect() {
                Ok(()) | Err(Error::Gone) => {}
                Err(e) => eprintln!("ibsim-bridge: while leaving: {e}"),
            }
        }
        self.stats.is_sm = 0;
        self.show_stats()?;
        self.device
            .unplug()
            .map_err(|e| format!("the device cannot be removed: {e}"))
    }

    fn show_stats(&mut self) -> Result<(), String> {
        match &mut self.file {
            Some(file) => file
                .show(&self.stats)
                .map_err(|e| format!("the file with counters: {e}")),
            None => Ok(()),
        }
    }

    // Waits for something, and does it. Says whether that was a signal.
    fn turn(&mut self, signals: &SignalFd) -> Result<bool, String> {
        let now = Instant::now();
        let mut end = self.next_poll;
        if let Some(question) = self.agent.next_end() {
            end = end.min(question);
        }
        if self.fabric.as_ref().is_some_and(Fabric::has_early) {
            end = now;
        }
        let left = end.saturating_duration_since(now);
        // Rounded up, or the last millisecond would be spent spinning.
        let ms = left.as_micros().div_ceil(1000);
        let ms = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
        let waiting = self.fabric.as_ref().map_or(0, Fabric::waiting);
        let mut fds = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        if waiting < WAITING {
            fds.push(PollFd::new(self.device.as_fd(), PollFlags::POLLIN));
        }
        if let Some(fabric) = &self.fabric {
            let mut flags = PollFlags::POLLIN;
            if waiting > 0 {
                flags |= PollFlags::POLLOUT;
            }
            fds.push(PollFd::new(fabric.as_fd(), flags));
        }
        match nix::poll::poll(&mut fds, ms) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(format!("poll: {e}")),
        }
        if fds[0].any().unwrap_or(false) {
            return Ok(true);
        }
        let mut outcome = self.take_from_fabric();
        if outcome.is_ok() {
            // What the device has to say is taken even without a fabric: somebody may wait for an answer.
            outcome = self.take_from_device()?;
        }
        if outcome.is_ok() && self.next_poll <= Instant::now() {
            self.next_poll = Instant::now() + POLL;
            outcome = if self.fabric.is_some() {
                self.poll_port()
            } else {
                self.reconnect()?
            };
            self.show_stats()?;
        }
        match outcome {
            Ok(()) => {}
            // Slow, or stopped: frames wait.
            Err(Error::Silent) => eprintln!("ibsim-bridge: ibsim does not answer"),
            Err(Error::Gone) => self.lost()?,
            Err(e) => return Err(e.to_string()),
        }
        let all = self.fabric.is_none();
        for (id, mad) in self.agent.overdue(Instant::now(), all) {
            self.stats.local_unanswered += 1;
            self.answer(id, &mad)?;
        }
        Ok(false)
    }

    // ibsim is gone: the cable is out.
    fn lost(&mut self) -> Result<(), String> {
        eprintln!("ibsim-bridge: ibsim is gone; waiting for it to come back");
        self.fabric = None;
        self.tids.clear();
        self.set_port(self.port.unplugged(), false)
            .map_err(|e| e.to_string())
    }

    fn reconnect(&mut self) -> Result<Result<(), Error>, String> {
        match attach(&self.base, &self.node) {
            Ok((_, node)) if node.guid() != self.guid => Err(format!(
                "node {} has another GUID now: {:#018x}",
                self.node,
                node.guid()
            )),
            Ok((fabric, node)) => {
                let outcome = self.connected(fabric, &node);
                if outcome.is_ok() {
                    eprintln!("ibsim-bridge: ibsim is back");
                }
                Ok(outcome)
            }
            // It goes while it comes: try again.
            Err(Error::Gone | Error::Silent) => Ok(Ok(())),
            Err(e) => Err(e.to_string()),
        }
    }

    // The cable is in.
    fn connected(&mut self, mut fabric: Fabric, node: &Node) -> Result<(), Error> {
        let keys = [
            (mad::NODE_INFO, 0, node.info),
            (mad::NODE_DESCRIPTION, 0, node.description),
            (mad::PORT_INFO, 0, node.port_info),
            (mad::PORT_INFO, 1, node.port_info),
        ];
        for (attribute, modifier, data) in keys {
            let mut smp = Mad::local_get(0, attribute, modifier);
            smp.set_data(&data);
            self.agent.learn(&smp);
        }
        fabric.set_is_sm(self.is_sm)?;
        self.is_sm_untold = false;
        self.fabric = Some(fabric);
        self.stats.connections += 1;
        self.set_port(node.port(), false)
    }

    fn set_port(&mut self, port: Port, reregister: bool) -> Result<(), Error> {
        if port == self.port && !reregister {
            return Ok(());
        }
        let (params, state) = port.params(reregister);
        self.device
            .set_port(1, params, state)
            .map_err(|e| Error::Wrong(format!("the device's port cannot be changed: {e}")))?;
        self.port = port;
        self.stats.port_changes += 1;
        Ok(())
    }

    // Asks ibsim for the port. Nothing overtakes the answer, but for what came in front of it.
    fn poll_port(&mut self) -> Result<(), Error> {
        self.tell_is_sm()?;
        let Some(fabric) = &mut self.fabric else {
            return Ok(());
        };
        let info = fabric.port_info()?;
        let pkeys = fabric.pkeys()?;
        // Messages that came meanwhile may tell something newer: then the next poll will do.
        if fabric.has_early() {
            return Ok(());
        }
        self.set_port(self.port.with_info(&info).with_pkeys(&pkeys), false)
    }

    fn take_from_fabric(&mut self) -> Result<(), Error> {
        let Some(fabric) = &mut self.fabric else {
            return Ok(());
        };
        fabric.flush()?;
        for _ in 0..BATCH {
            let Some(packet) = self
                .fabric
                .as_mut()
                .map(Fabric::recv)
                .transpose()?
                .flatten()
            else {
                break;
            };
            match route::inbound(packet, &self.port, &self.tids) {
                Inbound::Frame(frame, purpose) => {
                    if self.loss.next_is_lost() {
                        self.stats.lost_in += 1;
                        continue;
                    }
                    let mad = Mad::new(&frame.mad);
                    if let Some(mad) = &mad {
                        self.snoop(mad, purpose)?;
                        self.stats.smps += u64::from(mad.is_smp());
                    }
                    self.stats.received += 1;
                    self.write(&frame)?;
                }
                Inbound::Answer(id, mad) => {
                    let about = self.agent.about(id);
                    if let Some(mad) = self.agent.answer(id, mad) {
                        self.snoop(&mad, about.unwrap_or_default())?;
                        self.answer(id, &mad).map_err(Error::Wrong)?;
                    }
                }
                Inbound::Bounce => self.stats.bounced += 1,
                Inbound::Unknown => self.stats.unknown += 1,
            }
        }
        Ok(())
    }

    // A PortInfo of the own port: the device is told before whoever asked for it.
    fn snoop(&mut self, mad: &Mad, purpose: Purpose) -> Result<(), Error> {
        match purpose {
            Purpose::OwnPort { reregister } if mad.status() == 0 => {
                self.set_port(self.port.with_info(&mad.data()), reregister)
            }
            _ => Ok(()),
        }
    }

    fn write(&self, frame: &Frame) -> Result<(), Error> {
        self.device
            .write_frame(frame)
            .map_err(|e| Error::Wrong(format!("the device takes no frame: {e}")))
    }

    // Answers a question of the device.
    fn answer(&self, id: u32, mad: &Mad) -> Result<(), String> {
        let frame = Frame {
            kind: Frame::LOCAL,
            port: 1,
            dlid: 0,
            slid: 0,
            dest_qp: 0,
            src_qp: 0,
            sl: 0,
            pkey: 0,
            id,
            grh: None,
            mad: mad.0.to_vec(),
        };
        match self.device.write_frame(&frame) {
            Err(e) if e.raw_os_error() != Some(ESRCH) => {
                Err(format!("the device takes no answer: {e}"))
            }
            // Who asked may have been killed.
            _ => Ok(()),
        }
    }

    // The outer error ends the bridge, the inner one is the fabric's.
    fn take_from_device(&mut self) -> Result<Result<(), Error>, String> {
        for _ in 0..BATCH {
            if self
                .fabric
                .as_ref()
                .is_some_and(|fabric| fabric.waiting() >= WAITING)
            {
                break;
            }
            let frame = match self.device.read_frame(Duration::ZERO) {
                Ok(frame) => frame,
                Err(e) if e.kind() == io::ErrorKind::TimedOut => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(format!("the device: {e}")),
            };
            let outcome = match frame.kind {
                Frame::MAD => self.send(&frame),
                Frame::CAP_MASK => self.cap_mask(&frame),
                Frame::LOCAL => self.ask(&frame),
                _ => Ok(()),
            };
            if outcome.is_err() {
                return Ok(outcome);
            }
        }
        Ok(Ok(()))
    }

    fn send(&mut self, frame: &Frame) -> Result<(), Error> {
        let Some(fabric) = &mut self.fabric else {
            return Ok(());
        };
        match route::outbound(frame, &self.port, &mut self.tids) {
            Ok(packet) => {
                if self.loss.next_is_lost() {
                    self.stats.lost_out += 1;
                    return Ok(());
                }
                self.stats.sent += 1;
                self.stats.smps += u64::from(packet.mad.is_smp());
                fabric.send(&packet)
            }
            Err(_) => {
                self.stats.unfit += 1;
                Ok(())
            }
        }
    }

    fn cap_mask(&mut self, frame: &Frame) -> Result<(), Error> {
        let is_sm = frame.dlid & IS_SM != 0;
        if frame.port != 1 || is_sm == self.is_sm {
            return Ok(());
        }
        self.is_sm = is_sm;
        self.is_sm_untold = true;
        self.stats.is_sm = is_sm.into();
        self.tell_is_sm()
    }

    // If ibsim does not answer, it is told again with the next poll.
    fn tell_is_sm(&mut self) -> Result<(), Error> {
        if let Some(fabric) = self.fabric.as_mut().filter(|_| self.is_sm_untold) {
            fabric.set_is_sm(self.is_sm)?;
            self.is_sm_untold = false;
        }
        Ok(())
    }

    fn ask(&mut self, frame: &Frame) -> Result<(), Error> {
        self.stats.local += 1;
        let Some(mad) = Mad::new(&frame.mad) else {
            self.stats.unfit += 1;
            return Ok(());
        };
        let smp = self.agent.ask(frame.id, frame.port, mad, Instant::now());
        let Some(fabric) = &mut self.fabric else {
            return Ok(());
        };
        let purpose = Purpose::Question(frame.id);
        fabric.send(&route::question(smp, purpose, &mut self.tids))
    }
}

/// Errno: nobody waits for it.
const ESRCH: i32 = nix::errno::Errno::ESRCH as i32;

fn attach(base: &str, node: &str) -> Result<(Fabric, Node), Error> {
    let mut fabric = Fabric::connect(base, node, std::process::id())?;
    let node = fabric.ask_node()?;
    Ok((fabric, node))
}
