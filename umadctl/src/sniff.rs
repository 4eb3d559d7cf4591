// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl sniff`: the MADs that programs write and read, as `ib_umad`'s tracepoints tell them.

use std::time::Duration;

use nix::errno::Errno;
use nix::time::{clock_gettime, ClockId};
use serde::Serialize;
use umad::netlink::Rdma;
use umad::{Gid, Tid};

use crate::failure::{Context, Failure, Outcome};
use crate::names;
use crate::output::{note, print, print_json, shown, Format};
use crate::ports;
use crate::signals::Interrupts;
use crate::trace::{Instance, Layout, Record};

const SYSTEM: &str = "ib_umad";
const WRITE: &str = "ib_umad_write";
const RECV: &str = "ib_umad_read_recv";
const SEND: &str = "ib_umad_read_send";

/// How often to look.
const LOOK: Duration = Duration::from_millis(100);

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// End after so many MADs.
    pub count: Option<u64>,
    /// Only this port.
    pub port: Option<String>,
    /// Only this class.
    pub class: Option<u8>,
}

/// Which way a MAD goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Direction {
    /// A program wrote it.
    Sent,
    /// A program read it: it came from the port.
    Received,
    /// A program read it: a request of its own that was not answered.
    Unanswered,
}

/// A MAD, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Mad {
    /// Seconds since 1970.
    time: f64,
    direction: Direction,
    /// Index of the RDMA device, as netlink has it.
    device_index: u32,
    /// Its name; null if it is gone.
    device: Option<String>,
    port: u32,
    /// The process that wrote or read it, and its name if it was still there.
    pid: u32,
    process: Option<String>,
    agent: u32,
    class: u8,
    class_version: u8,
    method: u8,
    attribute: u16,
    modifier: u32,
    tid: String,
    mad_status: u16,
    /// Status of the packet: 0, or an errno.
    status: u32,
    /// Bytes of header and MAD, in what was received.
    length: u32,
    lid: u16,
    gid: Option<String>,
    qpn: u32,
    sl: u8,
    pkey_index: u16,
    timeout_ms: u32,
    retries: u32,
}

/// Reads a record. Fails if a field that is needed is not there.
fn decode(event: &str, layout: &Layout, record: &Record<'_>) -> Outcome<Mad> {
    let missing = |name: &str| {
        Failure::new(format!(
            "the tracepoint {event} has no field {name}, or not as it is known here"
        ))
        .hint("This kernel's tracepoints are other ones than this umadctl knows.")
    };
    fn narrow<T: TryFrom<u64>>(value: Option<u64>) -> Option<T> {
        T::try_from(value?).ok()
    }
    macro_rules! get {
        ($way:ident $name:literal) => {
            narrow(layout.$way(record.data, $name)).ok_or_else(|| missing($name))?
        };
    }
    let gid = layout.bytes(record.data, "gid");
    let gid: [u8; 16] = gid
        .and_then(|gid| gid.try_into().ok())
        .ok_or_else(|| missing("gid"))?;
    let grh: u8 = get!(number "grh_present");
    Ok(Mad {
        time: 0.0,
        direction: match event {
            WRITE => Direction::Sent,
            RECV => Direction::Received,
            _ => Direction::Unanswered,
        },
        device_index: get!(number "dev_index"),
        device: None,
        port: get!(number "port_num"),
        pid: get!(number "common_pid"),
        process: None,
        agent: get!(number "id"),
        class: get!(number "mgmt_class"),
        class_version: get!(number "class_version"),
        method: get!(number "method"),
        attribute: get!(big_endian "attr_id"),
        modifier: get!(big_endian "attr_mod"),
        tid: Tid(get!(big_endian "tid")).to_string(),
        mad_status: get!(big_endian "mad_status"),
        status: get!(number "status"),
        length: get!(number "length"),
        lid: get!(big_endian "lid"),
        gid: (grh != 0).then(|| Gid(gid).to_string()),
        qpn: get!(big_endian "qpn"),
        sl: get!(number "sl"),
        pkey_index: get!(number "pkey_index"),
        timeout_ms: get!(number "timeout_ms"),
        // The kernel has it under this name.
        retries: get!(number "retires"),
    })
}

/// Finds names of devices.
struct Devices {
    rdma: Option<Rdma>,
    known: Vec<(u32, String)>,
}

impl Devices {
    fn new() -> Self {
        Self {
            rdma: Rdma::open().ok(),
            known: Vec::new(),
        }
    }

    /// Asks again; devices come, go and are renamed.
    fn refresh(&mut self) {
        if let Some(rdma) = &mut self.rdma {
            self.known = rdma.devices().unwrap_or_default();
        }
    }

    fn name(&self, index: u32) -> Option<String> {
        let found = self.known.iter().find(|(known, _)| *known == index);
        found.map(|(_, name)| name.clone())
    }
}

/// Shows them until Ctrl-C, or until so many were shown.
pub fn run(wanted: &Wanted, format: Format) -> Outcome {
    let interrupts = Interrupts::new()?;
    let only = match &wanted.port {
        Some(word) => Some(ports::find(word)?),
        None => None,
    };
    let mut instance = Instance::new(SYSTEM, &[WRITE, RECV, SEND])?;
    let offset = now(ClockId::CLOCK_REALTIME)? - now(ClockId::CLOCK_MONOTONIC)?;
    let start = now(ClockId::CLOCK_MONOTONIC)?;
    let mut devices = Devices::new();
    let mut left = wanted.count;
    if format == Format::Text {
        note("listening; Ctrl-C ends it");
    }
    let mut ending = false;
    loop {
        if !ending && interrupts.wait(LOOK)? {
            // What happened before is still shown.
            instance.stop()?;
            ending = true;
        }
        let mut mads = Vec::new();
        let mut wrong = None;
        let lost = instance.read(
            |event, layout, record| match decode(event, layout, record) {
                Ok(mad) => mads.push((record.time, mad)),
                Err(why) => wrong = Some(why),
            },
        )?;
        if let Some(why) = wrong {
            return Err(why);
        }
        if lost {
            note("MADs were lost here: there were more than could be shown");
        }
        if !mads.is_empty() {
            devices.refresh();
        }
        for (time, mut mad) in mads {
            mad.device = devices.name(mad.device_index);
            let is_it = |port: &umad::sysfs::UmadPort| {
                mad.device.as_ref() == Some(&port.ibdev) && mad.port == port.port
            };
            if only.as_ref().is_some_and(|port| !is_it(port)) {
                continue;
            }
            if wanted.class.is_some_and(|class| class != mad.class) {
                continue;
            }
            mad.process = ports::process(mad.pid);
            let since = seconds(i128::from(time) - start);
            mad.time = seconds(i128::from(time) + offset);
            match format {
                Format::Json => print_json(&mad)?,
                Format::Text => print(text(&mad, since))?,
            }
            left = left.map(|left| left.saturating_sub(1));
            if left == Some(0) {
                return Ok(());
            }
        }
        if ending {
            return Ok(());
        }
    }
}

/// Nanoseconds by a clock.
fn now(clock: ClockId) -> Outcome<i128> {
    let time = clock_gettime(clock).what("clock_gettime")?;
    Ok(i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec()))
}

/// Seconds, to the microsecond.
#[allow(clippy::cast_precision_loss)] // microseconds since 1970 are exact in a double
fn seconds(nanoseconds: i128) -> f64 {
    (nanoseconds / 1000) as f64 / 1e6
}

fn text(mad: &Mad, since: f64) -> String {
    let device = match &mad.device {
        Some(name) => shown(name),
        None => format!("#{}", mad.device_index),
    };
    let (arrow, word) = match mad.direction {
        Direction::Sent => ("->", "to"),
        Direction::Received => ("<-", "from"),
        Direction::Unanswered => ("!!", "to"),
    };
    let class = names::named(names::class(mad.class), mad.class);
    let method = names::named(names::method(mad.class, mad.method), mad.method);
    let attribute = names::named(names::attribute(mad.class, mad.attribute), mad.attribute);
    let mut line = format!(
        "{since:>12.6} {device}/{} {arrow} {class} {method} {attribute}",
        mad.port
    );
    if mad.modifier != 0 {
        line += &format!(" modifier {:#x}", mad.modifier);
    }
    line += &format!(" TID {} {word}", mad.tid);
    if mad.lid != 0 || mad.gid.is_none() {
        line += &format!(" LID {}", mad.lid);
    }
    if let Some(gid) = &mad.gid {
        line += &format!(" GID {gid}");
    }
    line += &format!(" QP{}", mad.qpn);
    if mad.mad_status != 0 {
        line += &format!(" MAD status {:#06x}", mad.mad_status);
    }
    if mad.status != 0 {
        let name = i32::try_from(mad.status).map(Errno::from_raw);
        line += &match name {
            Ok(Errno::UnknownErrno) | Err(_) => format!(" status {}", mad.status),
            Ok(name) => format!(" status {} ({name:?})", mad.status),
        };
    }
    let process = mad.process.as_deref().map(shown).unwrap_or_default();
    line + &format!(" [{} {process}]\n", mad.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: &str = "ID: 5\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\
        \tfield:u8 port_num;\toffset:8;\tsize:1;\tsigned:0;\n\
        \tfield:u8 sl;\toffset:9;\tsize:1;\tsigned:0;\n\
        \tfield:u8 path_bits;\toffset:10;\tsize:1;\tsigned:0;\n\
        \tfield:u8 grh_present;\toffset:11;\tsize:1;\tsigned:0;\n\
        \tfield:u32 id;\toffset:12;\tsize:4;\tsigned:0;\n\
        \tfield:u32 status;\toffset:16;\tsize:4;\tsigned:0;\n\
        \tfield:u32 timeout_ms;\toffset:20;\tsize:4;\tsigned:0;\n\
        \tfield:u32 retires;\toffset:24;\tsize:4;\tsigned:0;\n\
        \tfield:u32 length;\toffset:28;\tsize:4;\tsigned:0;\n\
        \tfield:u32 qpn;\toffset:32;\tsize:4;\tsigned:0;\n\
        \tfield:u16 lid;\toffset:42;\tsize:2;\tsigned:0;\n\
        \tfield:u16 attr_id;\toffset:44;\tsize:2;\tsigned:0;\n\
        \tfield:u16 pkey_index;\toffset:46;\tsize:2;\tsigned:0;\n\
        \tfield:u8 mgmt_class;\toffset:49;\tsize:1;\tsigned:0;\n\
        \tfield:u8 class_version;\toffset:50;\tsize:1;\tsigned:0;\n\
        \tfield:u8 method;\toffset:51;\tsize:1;\tsigned:0;\n\
        \tfield:u16 mad_status;\toffset:56;\tsize:2;\tsigned:0;\n\
        \tfield:u32 attr_mod;\toffset:60;\tsize:4;\tsigned:0;\n\
        \tfield:u64 tid;\toffset:64;\tsize:8;\tsigned:0;\n\
        \tfield:u8 gid[16];\toffset:72;\tsize:16;\tsigned:0;\n\
        \tfield:u32 dev_index;\toffset:88;\tsize:4;\tsigned:0;\n";

    fn record() -> Vec<u8> {
        let mut data = vec![0; 96];
        data[4..8].copy_from_slice(&77u32.to_ne_bytes());
        data[8] = 2;
        data[11] = 1;
        data[16..20].copy_from_slice(&110u32.to_ne_bytes());
        data[32..36].copy_from_slice(&1u32.to_be_bytes());
        data[42..44].copy_from_slice(&9u16.to_be_bytes());
        data[44..46].copy_from_slice(&0x11u16.to_be_bytes());
        data[49] = 0x81;
        data[51] = 0x01;
        data[56..58].copy_from_slice(&0x8000u16.to_be_bytes());
        data[64..72].copy_from_slice(&0x0000_0001_0000_0abcu64.to_be_bytes());
        data[72] = 0xfe;
        data[88..92].copy_from_slice(&3u32.to_ne_bytes());
        data
    }

    #[test]
    fn a_mad_is_a_line() {
        let (layout, data) = (Layout::parse(FORMAT), record());
        let record = Record {
            time: 0,
            data: &data,
        };
        let mut mad = decode(SEND, &layout, &record).unwrap();
        assert_eq!((mad.port, mad.device_index, mad.pid), (2, 3, 77));
        mad.process = Some("x\n\x1b[m".to_owned());
        assert_eq!(
            text(&mad, 0.5),
            "    0.500000 #3/2 !! SubnDR(0x81) Get(0x1) NodeInfo(0x11) TID 00000001:00000abc to LID 9 \
             GID fe00:: QP1 MAD status 0x8000 status 110 (ETIMEDOUT) [77 x\\n\\u{1b}[m]\n"
        );
        mad.device = Some("rxe0".to_owned());
        mad.direction = Direction::Received;
        mad.gid = None;
        let text = text(&mad, 1.0);
        assert!(
            text.contains(" rxe0/2 <- ") && text.contains(" from LID 9 QP1"),
            "{text}"
        );
    }

    #[test]
    fn other_layouts_are_refused() {
        let (layout, data) = (Layout::parse(FORMAT), record());
        for end in [0, 50, 71, 91] {
            let cut = Record {
                time: 0,
                data: &data[..end],
            };
            assert!(decode(WRITE, &layout, &cut).is_err(), "{end}");
        }
        let record = Record {
            time: 0,
            data: &data,
        };
        for (from, to) in [
            ("u8 method", "u8 mode"),
            ("size:16", "size:12"),
            ("tid;\toffset:64;\tsize:8", "tid;\toffset:64;\tsize:9"),
        ] {
            let layout = Layout::parse(&FORMAT.replace(from, to));
            assert!(decode(WRITE, &layout, &record).is_err(), "{to}");
        }
    }
}
