// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The kernel's trace events, read from an instance of tracefs of our own, in the ring buffer's own form.
//!
//! The text of `trace_pipe` will not do: it has the processes' names in it as they are, newlines included,
//! so a process could write lines of its own.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::failure::{Context, Failure, Outcome};
use crate::loaded::{entries, Kind, Loaded};
use crate::output::lossy;

/// A field of an event, or of a page of the ring buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    name: String,
    offset: usize,
    size: usize,
}

/// What tracefs says in a file `format`: the event's number, and its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The number.
    pub id: u16,
    fields: Vec<Field>,
}

impl Layout {
    /// Reads the text of such a file. Lines that are not understood are passed over: what is wanted of
    /// them will be missed.
    pub fn parse(text: &str) -> Self {
        let mut layout = Self::default();
        for line in text.lines() {
            if let Some(id) = line.strip_prefix("ID:") {
                layout.id = id.trim().parse().unwrap_or(0);
            }
            if let Some(field) = line.trim_start().strip_prefix("field:").and_then(field) {
                layout.fields.push(field);
            }
        }
        layout
    }

    /// The bytes of a field in a record; `None` if there is no such field, or the record ends before.
    pub fn bytes<'a>(&self, record: &'a [u8], name: &str) -> Option<&'a [u8]> {
        let field = self.fields.iter().find(|field| field.name == name)?;
        record.get(field.offset..field.offset.checked_add(field.size)?)
    }

    /// A field that is a number, in the machine's order.
    pub fn number(&self, record: &[u8], name: &str) -> Option<u64> {
        native(self.bytes(record, name)?)
    }

    /// The same for one that is big-endian.
    pub fn big_endian(&self, record: &[u8], name: &str) -> Option<u64> {
        let bytes = self.bytes(record, name)?;
        let mut value = [0; 8];
        value
            .get_mut(8usize.checked_sub(bytes.len())?..)?
            .copy_from_slice(bytes);
        Some(u64::from_be_bytes(value))
    }
}

fn native(bytes: &[u8]) -> Option<u64> {
    Some(match bytes.len() {
        1 => u64::from(bytes[0]),
        2 => u16::from_ne_bytes(bytes.try_into().ok()?).into(),
        4 => u32::from_ne_bytes(bytes.try_into().ok()?).into(),
        8 => u64::from_ne_bytes(bytes.try_into().ok()?),
        _ => return None,
    })
}

/// `u8 gid[16]; offset:88; size:16; signed:0;`, with tabs.
fn field(text: &str) -> Option<Field> {
    let mut parts = text.split(';').map(str::trim);
    let declaration = parts.next()?;
    let name = declaration.rsplit(' ').next()?;
    let name = name.split('[').next()?;
    let mut number = |key: &str| parts.next()?.strip_prefix(key)?.parse().ok();
    Some(Field {
        name: name.to_owned(),
        offset: number("offset:")?,
        size: number("size:")?,
    })
}

/// An event in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// When, by the trace clock, in nanoseconds.
    pub time: u64,
    /// The fields.
    pub data: &'a [u8],
}

/// Kinds of entries of the ring buffer that are no events; smaller ones are lengths in words.
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
const DELTA_BITS: u32 = 27;
/// Bits of a page's length: events were lost before it.
const MISSED: u64 = 1 << 31;

/// The events of a page of the ring buffer, and whether some were lost before it. `header` is the layout
/// that tracefs tells in `events/header_page`. What is cut or makes no sense ends the list.
pub fn records<'a>(header: &Layout, page: &'a [u8]) -> (Vec<Record<'a>>, bool) {
    let mut found = Vec::new();
    let (Some(mut time), Some(commit)) = (
        header.number(page, "timestamp"),
        header.number(page, "commit"),
    ) else {
        return (found, false);
    };
    let missed = commit & MISSED != 0;
    let start = header.fields.iter().find(|field| field.name == "data");
    let Some(all) = start.and_then(|field| page.get(field.offset..)) else {
        return (found, missed);
    };
    // The upper bits are flags; a page is never that long.
    let length = usize::try_from(commit & 0xf_ffff).unwrap_or(0);
    let mut rest = all.get(..length).unwrap_or(all);
    while let Some(entry) = Entry::parse(&mut rest) {
        match entry {
            Entry::Time(stamp) => time = stamp | (time & (0x1f << 59)),
            Entry::Later(delta) => time = time.wrapping_add(delta),
            Entry::Skip(delta) => time = time.wrapping_add(delta),
            Entry::Event(delta, data) => {
                time = time.wrapping_add(delta);
                found.push(Record { time, data });
            }
        }
    }
    (found, missed)
}

enum Entry<'a> {
    Time(u64),
    Later(u64),
    Skip(u64),
    Event(u64, &'a [u8]),
}

impl<'a> Entry<'a> {
    /// Takes the first entry; `None` at the end.
    fn parse(rest: &mut &'a [u8]) -> Option<Self> {
        let head = word(rest)?;
        let (kind, delta) = if cfg!(target_endian = "little") {
            (head & 0x1f, head >> 5)
        } else {
            (head >> DELTA_BITS, head & ((1 << DELTA_BITS) - 1))
        };
        let delta = u64::from(delta);
        Some(match kind {
            PADDING if delta == 0 => return None,
            PADDING => {
                let length = word(rest)?;
                take(rest, length.checked_sub(4)?)?;
                Self::Skip(delta)
            }
            TIME_EXTEND => Self::Later(delta + (u64::from(word(rest)?) << DELTA_BITS)),
            TIME_STAMP => Self::Time(delta + (u64::from(word(rest)?) << DELTA_BITS)),
            0 => {
                // The length counts its own word.
                let length = word(rest)?;
                Self::Event(delta, take(rest, length.checked_sub(4)?)?)
            }
            words => Self::Event(delta, take(rest, words * 4)?),
        })
    }
}

fn word(rest: &mut &[u8]) -> Option<u32> {
    let (word, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_ne_bytes(*word))
}

fn take<'a>(rest: &mut &'a [u8], length: u32) -> Option<&'a [u8]> {
    let length = usize::try_from(length).ok()?;
    // Entries are aligned to words.
    let (data, after) = rest.split_at_checked(length.checked_next_multiple_of(4)?)?;
    *rest = after;
    data.get(..length)
}

/// An instance of tracefs: ring buffers and switches of our own. It goes with the value.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    header: Layout,
    /// The events that are switched on.
    pub events: Vec<(String, Layout)>,
    buffers: Vec<File>,
}

const PREFIX: &str = "umadctl-";

impl Instance {
    /// Makes one, and switches these events of a system on.
    pub fn new(system: &str, events: &[&str]) -> Outcome<Self> {
        let root = root()?;
        let folder = root.join("events").join(system);
        if !folder.exists() {
            return Err(no_events(system));
        }
        remove_old(&root);
        let header = Layout::parse(&read(&root.join("events/header_page"))?);
        for wanted in ["timestamp", "commit", "data"] {
            if !header.fields.iter().any(|field| field.name == wanted) {
                return Err(Failure::new(format!(
                    "this kernel's ring buffer has no field {wanted} in its pages"
                )));
            }
        }
        let path = root.join(format!("instances/{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| denied(&path, &e))?;
        let mut instance = Self {
            path,
            header,
            events: Vec::new(),
            buffers: Vec::new(),
        };
        // The clock that can be set against the time of day.
        instance.write("trace_clock", "mono")?;
        for event in events {
            let layout = Layout::parse(&read(&folder.join(event).join("format"))?);
            instance.write(&format!("events/{system}/{event}/enable"), "1")?;
            instance.events.push(((*event).to_owned(), layout));
        }
        for cpu in entries(&instance.path.join("per_cpu")) {
            let path = instance
                .path
                .join("per_cpu")
                .join(cpu)
                .join("trace_pipe_raw");
            let file = File::options()
                .read(true)
                .custom_flags(OFlag::O_NONBLOCK.bits())
                .open(&path);
            instance.buffers.push(file.what(path.display())?);
        }
        Ok(instance)
    }

    fn write(&self, file: &str, value: &str) -> Outcome {
        let path = self.path.join(file);
        fs::write(&path, value).what(path.display())
    }

    /// Records no more; what is recorded can still be read.
    pub fn stop(&self) -> Outcome {
        self.write("tracing_on", "0")
    }

    /// Reads what there is, and hands it on in the order of time. Returns whether events were lost.
    pub fn read(&mut self, mut each: impl FnMut(&str, &Layout, &Record<'_>)) -> Outcome<bool> {
        let page = self.header.fields.iter().find(|field| field.name == "data");
        let size = page.map_or(4096, |data| data.offset + data.size);
        let mut pages: Vec<Vec<u8>> = Vec::new();
        for buffer in &mut self.buffers {
            loop {
                let mut page = vec![0; size];
                match buffer.read(&mut page) {
                    Ok(0) => break,
                    Ok(length) => {
                        page.truncate(length);
                        pages.push(page);
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
                    Err(e) => return Err(e).what("trace_pipe_raw"),
                }
            }
        }
        let mut missed = false;
        let mut all = Vec::new();
        for page in &pages {
            let (records, lost) = records(&self.header, page);
            missed |= lost;
            all.extend(records);
        }
        all.sort_by_key(|record| record.time);
        for record in &all {
            let id = record.data.first_chunk().map(|id| u16::from_ne_bytes(*id));
            let event = self.events.iter().find(|(_, layout)| Some(layout.id) == id);
            if let Some((name, layout)) = event {
                each(name, layout, record);
            }
        }
        Ok(missed)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // An open buffer would keep it.
        self.buffers.clear();
        if let Err(e) = fs::remove_dir(&self.path) {
            crate::output::note(format_args!(
                "{} is left over: {e}. As root: rmdir {0}",
                self.path.display()
            ));
        }
    }
}

/// Removes instances of ours whose process was killed.
fn remove_old(root: &Path) {
    let folder = root.join("instances");
    for name in entries(&folder) {
        let pid = name
            .strip_prefix(PREFIX)
            .filter(|pid| pid.parse::<u32>().is_ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // If it cannot be removed, it can be used by nobody's harm.
            let _ = fs::remove_dir(folder.join(name));
        }
    }
}

fn root() -> Outcome<PathBuf> {
    for place in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
        let place = Path::new(place);
        match fs::metadata(place.join("instances")) {
            Ok(_) => return Ok(place.to_owned()),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(denied(place, &e));
            }
            Err(_) => (),
        }
    }
    Err(
        Failure::new("tracefs is not mounted, or this kernel does not trace")
            .hint("As root: mount -t tracefs tracefs /sys/kernel/tracing"),
    )
}

fn denied(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("{}: {error}", path.display()));
    match error.kind() {
        io::ErrorKind::PermissionDenied => failure.hint("Tracing is for root."),
        _ => failure,
    }
}

/// Reads a file of tracefs. Some of them yield nothing but what the first read() takes, so it takes much.
fn read(path: &Path) -> Outcome<String> {
    let mut file = File::open(path).map_err(|e| denied(path, &e))?;
    let mut text = Vec::new();
    let mut part = vec![0; 64 << 10];
    loop {
        match file.read(&mut part).what(path.display())? {
            0 => return Ok(lossy(&text)),
            length => text.extend_from_slice(&part[..length]),
        }
    }
}

fn no_events(system: &str) -> Failure {
    let module = Loaded::look();
    match module.kind {
        Kind::NotLoaded => Failure::new("ib_umad is not loaded").hint(Loaded::how_to_load()),
        _ => Failure::new(format!(
            "the ib_umad that is loaded, the one {}, has no tracepoints (events/{system})",
            module.name()
        ))
        .hint("The C module has them if the kernel is built with CONFIG_TRACEPOINTS."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
        \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
        \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
        \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";

    const EVENT: &str = "name: ib_umad_write\nID: 1234\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:u8 port_num;\toffset:8;\tsize:1;\tsigned:0;\n\
        \tfield:u32 qpn;\toffset:12;\tsize:4;\tsigned:0;\n\
        \tfield:u8 gid[16];\toffset:16;\tsize:16;\tsigned:0;\n\n\
        print fmt: \"field:%d\", REC->port_num\n";

    #[test]
    fn fields_of_an_event() {
        let layout = Layout::parse(EVENT);
        assert_eq!(layout.id, 1234);
        let mut record = vec![0; 32];
        record[8] = 7;
        record[12..16].copy_from_slice(&[0, 0, 0, 1]);
        record[16] = 0xfe;
        assert_eq!(layout.number(&record, "port_num"), Some(7));
        assert_eq!(layout.big_endian(&record, "qpn"), Some(1));
        assert_eq!(layout.bytes(&record, "gid").map(|gid| gid[0]), Some(0xfe));
        assert_eq!(layout.number(&record, "gid"), None);
        assert_eq!(layout.big_endian(&record, "gid"), None);
        assert_eq!(layout.number(&record, "nothing"), None);
        assert_eq!(layout.bytes(&record[..31], "gid"), None);
        for text in [
            "field:",
            "field:u8 a",
            "field:u8 a; offset:x; size:1;",
            "field:u8 a; offset:1; size:99999999999999999999999;",
            "ID:\nID: 70000",
        ] {
            assert_eq!(Layout::parse(text), Layout::default(), "{text}");
        }
        let far = Layout::parse(&format!("field:u8 a;\toffset:{};\tsize:2;\n", usize::MAX));
        assert_eq!(far.bytes(&record, "a"), None);
    }

    fn head(kind: u32, delta: u32) -> [u8; 4] {
        let word = if cfg!(target_endian = "little") {
            kind | (delta << 5)
        } else {
            (kind << DELTA_BITS) | delta
        };
        word.to_ne_bytes()
    }

    fn page(time: u64, flags: u64, entries: &[&[u8]]) -> Vec<u8> {
        let data = entries.concat();
        let mut page = time.to_ne_bytes().to_vec();
        page.extend((data.len() as u64 | flags).to_ne_bytes());
        page.extend(data);
        page
    }

    #[test]
    fn events_of_a_page() {
        let header = Layout::parse(PAGE);
        let page = page(
            1000,
            MISSED,
            &[
                &head(2, 5),
                b"abcdefgh",
                &head(TIME_EXTEND, 1),
                &2u32.to_ne_bytes(),
                &head(0, 3),
                &10u32.to_ne_bytes(),
                b"ABCDEF\0\0",
                &head(PADDING, 1),
                &8u32.to_ne_bytes(),
                b"....",
                &head(TIME_STAMP, 9),
                &0u32.to_ne_bytes(),
                &head(1, 1),
                b"last",
                &head(PADDING, 0),
                b"never seen",
            ],
        );
        let (found, missed) = records(&header, &page);
        assert!(missed);
        let extended = 1005 + 1 + (2 << DELTA_BITS) + 3;
        let found: Vec<_> = found.iter().map(|r| (r.time, r.data)).collect();
        assert_eq!(
            found,
            [
                (1005, &b"abcdefgh"[..]),
                (extended, b"ABCDEF"),
                (10, b"last"),
            ]
        );
    }

    /// A page as a kernel made it: it is always read as a whole.
    #[test]
    fn a_page_of_a_kernel() {
        let header = Layout::parse(&PAGE.replace("int overwrite", "char overwrite"));
        let mut page = vec![0; 4096];
        page[..24].copy_from_slice(&[
            0x2e, 0xf8, 0x34, 0x6c, 4, 0, 0, 0, 0x64, 0, 0, 0, 0, 0, 0, 0, 0x18, 0, 0, 0, 0x85, 6,
            0, 0,
        ]);
        let (found, missed) = records(&header, &page);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].data.len(), &found[0].data[..2]),
            (96, &[0x85, 6][..])
        );
        assert!(!missed);
    }

    #[test]
    fn pages_that_are_cut_or_lie() {
        let header = Layout::parse(PAGE);
        let whole = page(
            1,
            0,
            &[
                &head(2, 5),
                b"abcdefgh",
                &head(0, 1),
                &8u32.to_ne_bytes(),
                b"xyzw",
            ],
        );
        assert_eq!(records(&header, &whole).0.len(), 2);
        for end in 0..whole.len() {
            assert!(records(&header, &whole[..end]).0.len() < 2, "cut at {end}");
        }
        for length in [0u32, 3, 5, 4096, u32::MAX - 2, u32::MAX] {
            for kind in [0, PADDING] {
                let page = page(1, 0, &[&head(kind, 1), &length.to_ne_bytes()]);
                assert!(records(&header, &page).0.is_empty(), "{kind}, {length}");
            }
        }
        assert!(records(&Layout::default(), &whole).0.is_empty());
        // Whatever the bytes are, it ends.
        let mut state = 1u32;
        for _ in 0..2000 {
            let mut page = whole.clone();
            for byte in &mut page[8..] {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = state.to_be_bytes()[0];
            }
            records(&header, &page);
        }
    }
}
