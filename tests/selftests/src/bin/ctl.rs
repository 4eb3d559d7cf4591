// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `ctl`: the program `umadctl`, run as a person or a program would. (Its name is taken by itself.)

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ktap::module::{unload_when_idle, Loaded};
use ktap::peers::{CLASS, SOON};
use ktap::prelude::*;
use ktap::Impl;
use nix::fcntl::OFlag;
use nix::sys::signal::{kill, Signal};
use nix::sys::stat::{makedev, mknod, Mode, SFlag};
use nix::unistd::Pid;
use selftests::netlink::Rdma;
use selftests::vhca::{Faults, Module, Pair, Shape, Spec, SpecExt, VhcaExt};
use serde_json::Value;

/// A user who may nothing.
const NOBODY: u32 = 65534;

/// The program, beside this one.
fn program() -> Outcome<Command> {
    let mut command = Command::new(std::env::current_exe()?.with_file_name("umadctl"));
    command.stdin(Stdio::null());
    Ok(command)
}

/// What a run of it said.
#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn finish(mut command: Command) -> Outcome<Ran> {
    let output = command.output()?;
    let code = output.status.code();
    Ok(Ran {
        code: code.ok_or_else(|| format!("it ended by {}", output.status))?,
        out: String::from_utf8(output.stdout)?,
        err: String::from_utf8(output.stderr)?,
    })
}

/// Runs it; the words of the command line are split at blanks.
fn umadctl(words: &str) -> Outcome<Ran> {
    let mut command = program()?;
    command.args(words.split_whitespace());
    finish(command)
}

/// The same as a user who may nothing.
fn umadctl_as_nobody(words: &str) -> Outcome<Ran> {
    let mut command = program()?;
    command
        .args(words.split_whitespace())
        .uid(NOBODY)
        .gid(NOBODY);
    finish(command)
}

impl Ran {
    /// Fails unless it ended with this exit code.
    fn ended(self, code: i32) -> Outcome<Self> {
        ensure!(
            self.code == code,
            "exit code {}, expected {code}: {self:?}",
            self.code
        );
        Ok(self)
    }

    fn json(&self) -> Outcome<Value> {
        ensure!(self.out.is_ascii(), "JSON is not ASCII: {:?}", self.out);
        serde_json::from_str(&self.out).what(format!("{self:?}"))
    }

    /// Fails if the output lacks one of these words.
    fn says(&self, words: &[&str]) -> Outcome {
        for word in words {
            ensure!(self.out.contains(word), "{word:?} is not said: {self:?}");
        }
        Ok(())
    }

    /// Fails if the errors lack one of these words.
    fn complains(&self, words: &[&str]) -> Outcome {
        for word in words {
            ensure!(self.err.contains(word), "{word:?} is not said: {self:?}");
        }
        Ok(())
    }

    /// Fails if anything could act on a terminal.
    fn is_harmless(&self) -> Outcome {
        let acts = |c: char| c.is_control() && c != '\n';
        ensure!(
            !self.out.contains(acts) && !self.err.contains(acts),
            "{self:?}"
        );
        Ok(())
    }
}

/// The entry of an array that has this value under this key.
fn entry<'a>(array: &'a Value, key: &str, value: impl Into<Value>) -> Outcome<&'a Value> {
    let value = value.into();
    let entries = array.as_array().ok_or("no array")?;
    let found = entries.iter().find(|entry| entry[key] == value);
    found.ok_or_else(|| format!("no {key} is {value}: {array}").into())
}

/// Fails unless values of an object are as expected.
fn has(object: &Value, expected: &[(&str, Value)]) -> Outcome {
    for (key, value) in expected {
        ensure_eq!(object[*key], *value, "{key} of {object}");
    }
    Ok(())
}

/// The findings of `doctor --json` about a topic that are problems.
fn problems<'a>(report: &'a Value, topic: &str) -> Vec<&'a Value> {
    let findings = report["findings"].as_array().into_iter().flatten();
    findings
        .filter(|f| f["topic"] == topic && f["level"] == "problem")
        .collect()
}

fn kind() -> Outcome<&'static str> {
    Ok(match Impl::current()? {
        Impl::C => "c",
        Impl::Rust => "rust",
    })
}

/// A run that goes on, in JSON lines.
struct Running {
    child: Child,
    pid: Pid,
}

impl Running {
    fn start(words: &str) -> Outcome<Self> {
        let mut command = program()?;
        command.args(words.split_whitespace());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = Pid::from_raw(i32::try_from(child.id())?);
        Ok(Self { child, pid })
    }

    /// The tracefs instance that it makes.
    fn instance(&self) -> PathBuf {
        PathBuf::from(format!(
            "/sys/kernel/tracing/instances/umadctl-{}",
            self.pid
        ))
    }

    /// Waits until it listens.
    fn listens(&self) -> Outcome {
        let last = self
            .instance()
            .join("events/ib_umad/ib_umad_read_send/enable");
        wait_until("it listens", SOON, || {
            fs::read_to_string(&last).is_ok_and(|text| text.starts_with('1'))
        })?;
        Ok(())
    }

    /// Ends it by a signal, or waits for its end; returns the lines that it printed.
    fn end(mut self, signal: Option<Signal>) -> Outcome<(i32, Vec<Value>)> {
        if let Some(signal) = signal {
            kill(self.pid, signal)?;
        }
        let out = self.child.stdout.take().ok_or("no output")?;
        let mut lines = Vec::new();
        for line in BufReader::new(out).lines() {
            lines.push(serde_json::from_str(&line?)?);
        }
        let mut err = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut err)?;
        }
        let code = self.child.wait()?.code();
        Ok((code.ok_or_else(|| format!("it was killed: {err}"))?, lines))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, or a check has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends the check where the module has no tracepoints, after a look whether `sniff` says so.
fn need_tracepoints() -> Outcome {
    if Path::new("/sys/kernel/tracing/events/ib_umad").exists() {
        return Ok(());
    }
    let ran = umadctl("sniff -c 1")?.ended(3)?;
    ran.complains(&["has no tracepoints"])?;
    skip("this ib_umad has no tracepoints, and sniff says so")
}

fn checks_of_list(area: &mut ktap::Area<'_>) {
    area.check("list: the ports, for people", || {
        let ran = umadctl("list")?.ended(0)?;
        ran.says(&[
            "NODE", "umad0", "rxe0", "umad1", "rxe1", "ACTIVE", "fe80::", "GSI", "231:0",
        ])?;
        ensure_eq!(ran.out.lines().count(), 3);
        ran.is_harmless()
    });
    area.check("list: the ports, for programs", || {
        let list = umadctl("list --json")?.ended(0)?.json()?;
        has(
            &list,
            &[("module", kind()?.into()), ("abi_version", 5.into())],
        )?;
        let port = entry(&list["ports"], "node", "umad1")?;
        has(
            port,
            &[
                ("device", "rxe1".into()),
                ("port", 1.into()),
                ("node_present", true.into()),
                ("link_layer", "Ethernet".into()),
                ("state", "ACTIVE".into()),
                ("phys_state", "LinkUp".into()),
                ("lid", Value::Null),
                ("gid", umad::sysfs::gid("rxe1", 1, 0)?.to_string().into()),
                ("smi", false.into()),
                ("gsi", true.into()),
                ("issm", Value::Null),
                ("device_number", "231:1".into()),
            ],
        )?;
        has(
            &port["netlink"],
            &[("umad", "231:1".into()), ("issm", Value::Null)],
        )
    });
    area.check("list: InfiniBand, with LID and issm", || {
        let pair = Pair::new()?;
        let number = pair.b.umad(1)?;
        let list = umadctl("list --json")?.ended(0)?.json()?;
        let port = entry(&list["ports"], "node", format!("umad{number}"))?;
        has(
            port,
            &[
                ("link_layer", "InfiniBand".into()),
                ("lid", 2.into()),
                ("smi", true.into()),
                ("gsi", true.into()),
                ("issm", format!("issm{number}").into()),
            ],
        )?;
        // Improvement 3: netlink tells it with ours only.
        let issm = match Impl::current()? {
            Impl::C => Value::Null,
            Impl::Rust => format!("231:{}", number + 64).into(),
        };
        has(&port["netlink"], &[("issm", issm)])
    });
    area.check("list: a port for subnet management only", || {
        let device = Spec::new(Shape::SmiOnly, 1).plug()?;
        let number = device.umad(1)?;
        let list = umadctl("list --json")?.ended(0)?.json()?;
        let port = entry(&list["ports"], "node", format!("umad{number}"))?;
        has(port, &[("smi", true.into()), ("gsi", false.into())])
    });
    area.check(
        "list: what a user who may nothing cannot know is null",
        || {
            let list = umadctl_as_nobody("list --json")?.ended(0)?.json()?;
            has(
                entry(&list["ports"], "node", "umad0")?,
                &[("gsi", Value::Null)],
            )
        },
    );
    area.check("names of devices do nothing to a terminal", || {
        let pair = RxePair::new("ct")?;
        let evil = "e\x1b[2J\u{9b}\u{202e}\n";
        Rdma::open()?.rename(&pair.a.ibdev, evil)?;
        let runs = ["list", "doctor", "show", "ping nothing umad0"].map(umadctl);
        let json = umadctl("list --json");
        Rdma::open()?.rename(evil, &pair.a.ibdev)?;
        for ran in runs {
            ran?.is_harmless()?;
        }
        let json = json?.json()?;
        entry(&json["ports"], "device", evil)?;
        Ok(())
    });
}

fn checks_of_ping(area: &mut ktap::Area<'_>) {
    area.check("ping: by GID, with figures", || {
        let words = "ping umad0 rxe1/1 -c 20 -i 0.01 --json -W 20";
        let sums = umadctl(words)?.ended(0)?.json()?;
        has(
            &sums,
            &[
                ("from", "umad0".into()),
                ("to", "umad1".into()),
                (
                    "address",
                    format!("GID {}", umad::sysfs::gid("rxe1", 1, 0)?).into(),
                ),
                ("sent", 20.into()),
                ("answered", 20.into()),
                ("lost", 0.into()),
                ("wrong", 0.into()),
            ],
        )?;
        let time = |name: &str| sums["times"][name].as_f64().ok_or("no time");
        let (min, avg, max) = (time("min_us")?, time("avg_us")?, time("max_us")?);
        ensure!(0.0 < min && min <= avg && avg <= max, "{sums}");
        Ok(())
    });
    area.check("ping: for people", || {
        let ran = umadctl("ping rxe0 rxe1 -c 2 -i 0 -W 20")?.ended(0)?;
        ran.says(&[
            "    1: ",
            "    2: ",
            "2 sent, 2 answered, 0 lost (0.0 %)",
            "min ",
            "avg ",
            "max ",
        ])?;
        let quiet = umadctl("ping rxe0 rxe1 -c 2 -i 0 -W 20 -q")?.ended(0)?;
        ensure!(!quiet.out.contains("    1: "), "{quiet:?}");
        Ok(())
    });
    area.check("ping: waits for its interval", || {
        let start = Instant::now();
        umadctl("ping rxe0 rxe1 -c 4 -i 0.3 -W 20")?.ended(0)?;
        ensure!(
            start.elapsed() >= Duration::from_millis(900),
            "{:?}",
            start.elapsed()
        );
        Ok(())
    });
    for (more, address) in [("", "LID 2"), (" --gid", "LID 2, GID ")] {
        area.check(format!("ping: LID-routed{more}"), move || {
            let pair = Pair::new()?;
            let (a, b) = (pair.a.umad(1)?, pair.b.umad(1)?);
            let words = format!("ping umad{a} umad{b} -c 5 -i 0 --json -W 20{more}");
            let sums = umadctl(&words)?.ended(0)?.json()?;
            has(&sums, &[("sent", 5.into()), ("answered", 5.into())])?;
            let got = sums["address"].as_str().unwrap_or("");
            ensure!(got.starts_with(address), "{sums}");
            Ok(())
        });
    }
    area.check("ping: what is lost is counted, and is exit code 1", || {
        let pair = Pair::new()?;
        pair.a.faults(Faults {
            mgmt_class: 0x32,
            drop_every: 2,
            ..Faults::default()
        })?;
        let (a, b) = (pair.a.umad(1)?, pair.b.umad(1)?);
        let ran = umadctl(&format!("ping umad{a} umad{b} -c 6 -i 0 --json -W 4"))?.ended(1)?;
        has(
            &ran.json()?,
            &[
                ("sent", 6.into()),
                ("answered", 3.into()),
                ("lost", 3.into()),
            ],
        )
    });
    area.check("ping: Ctrl-C ends it with its sums", || {
        let running = Running::start("ping umad0 umad1 -c 0 -i 0.01 -W 20 --json")?;
        std::thread::sleep(ktap::patient(Duration::from_secs(2)));
        let (code, lines) = running.end(Some(Signal::SIGINT))?;
        ensure_eq!(code, 0);
        let [sums] = &lines[..] else {
            return Err(format!("{lines:?}").into());
        };
        ensure!(sums["answered"].as_u64() > Some(0), "{sums}");
        Ok(())
    });
    area.check("rmpp: Ctrl-C ends it while it waits for a message", || {
        let pair = Pair::new()?;
        pair.a.faults(Faults {
            mgmt_class: 0x32,
            drop_every: 1,
            ..Faults::default()
        })?;
        let (a, b) = (pair.a.umad(1)?, pair.b.umad(1)?);
        let running = Running::start(&format!("rmpp umad{a} umad{b} -W 1000 --json"))?;
        std::thread::sleep(ktap::patient(Duration::from_secs(2)));
        let (code, lines) = running.end(Some(Signal::SIGINT))?;
        ensure_eq!((code, lines.len()), (0, 1));
        has(&lines[0], &[("sent", 0.into()), ("lost", 0.into())])
    });
    area.check(
        "ping: a class that is taken, ports that are not there",
        || {
            let wish = Registration::class(0x32, 1)
                .oui(0x1405)
                .methods(&[Method::GET]);
            let _taken = Endpoint::open("rxe1", Layout::New, &wish)?;
            let ran = umadctl("ping rxe0 rxe1 -c 1")?.ended(3)?;
            ran.complains(&["class 0x32", "--class"])?;
            umadctl("ping rxe0 rxe1 -c 1 -W 20 --class 0x33")?.ended(0)?;
            for words in ["ping rxe0 umad77", "ping rxe0/2 rxe1", "rmpp x rxe1"] {
                umadctl(words)?.ended(3)?.complains(&["umadctl list"])?;
            }
            Ok(())
        },
    );
    area.check(
        "rmpp: messages around the size of a segment, and long ones",
        || {
            for size in [1, 215, 216, 217, 432, 433, 100_000] {
                let words = format!("rmpp umad0 umad1 -c 2 -s {size} --json -W 60");
                let sums = umadctl(&words)?.ended(0)?.json()?;
                has(
                    &sums,
                    &[
                        ("message_bytes", size.into()),
                        ("sent", 2.into()),
                        ("arrived", 2.into()),
                        ("lost", 0.into()),
                        ("wrong", 0.into()),
                    ],
                )?;
                ensure!(sums["bytes_per_second"].as_f64() > Some(0.0), "{sums}");
            }
            let ran = umadctl("rmpp umad0 umad1 -s 1000 -W 60")?.ended(0)?;
            ran.says(&["5 segments", "all bytes right", "1 sent, 1 arrived", "MB/s"])
        },
    );
    area.check("rmpp: LID-routed; and when nothing arrives", || {
        let pair = Pair::new()?;
        let (a, b) = (pair.a.umad(1)?, pair.b.umad(1)?);
        let words = format!("rmpp umad{a} umad{b} -s 20000 --json");
        has(
            &umadctl(&format!("{words} -W 60"))?.ended(0)?.json()?,
            &[("address", "LID 2".into()), ("arrived", 1.into())],
        )?;
        pair.a.faults(Faults {
            mgmt_class: 0x32,
            drop_every: 1,
            ..Faults::default()
        })?;
        let sums = umadctl(&format!("{words} -W 0.5"))?.ended(1)?.json()?;
        has(
            &sums,
            &[
                ("arrived", 0.into()),
                ("lost", 1.into()),
                ("times", Value::Null),
            ],
        )
    });
}

/// What `show` says of a descriptor of this process. On the C module it says, too, that there is no more.
fn shown(fd: i32) -> Outcome<Value> {
    let code = match Impl::current()? {
        Impl::C => 3,
        Impl::Rust => 0,
    };
    let ran = umadctl("show --json")?.ended(code)?;
    if code == 3 {
        ran.complains(&["says nothing of its files", "fdinfo"])?;
    }
    let json = ran.json()?;
    let files = json["files"].as_array().ok_or("no files")?;
    let mut files = files
        .iter()
        .filter(|file| file["pid"] == std::process::id() && file["fd"] == fd);
    let found = files.next().ok_or_else(|| format!("not shown: {json}"))?;
    Ok(found.clone())
}

fn checks_of_show(area: &mut ktap::Area<'_>) {
    area.check(
        "show: who has a node open; on the C module it says that there is no more",
        || {
            let port = fresh()?;
            let file = shown(port.as_raw_fd())?;
            has(
                &file,
                &[
                    ("uid", 0.into()),
                    ("kind", "umad".into()),
                    ("path", "/dev/infiniband/umad0".into()),
                ],
            )?;
            match Impl::current()? {
                Impl::C => ensure!(file["info"].is_null(), "{file}"),
                Impl::Rust => ensure!(file["info"].is_object(), "{file}"),
            }
            Ok(())
        },
    );
    area.check("show: agents, queues, counters", || {
        let peers = Peers::new()?;
        for _ in 0..3 {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers.a.port.send(&packet)?;
        }
        let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
        peers
            .a
            .port
            .send(&packet.timeout(Duration::from_secs(100)))?;
        wait_until("four are there, three are done", SOON, || {
            let a = peers.a.port.info().map(|info| info.outstanding.count);
            let b = peers.b.port.info().map(|info| info.unread.count);
            a == Ok(1) && b == Ok(4)
        })?;
        let a = &shown(peers.a.port.as_raw_fd())?["info"];
        has(
            a,
            &[
                ("device", "rxe0".into()),
                ("port", 1.into()),
                ("alive", true.into()),
                ("header_bytes", 64.into()),
                ("sent", 4.into()),
                ("outstanding_sends", 1.into()),
                ("received", 0.into()),
            ],
        )?;
        let b = &shown(peers.b.port.as_raw_fd())?["info"];
        has(
            b,
            &[
                ("unread_packets", 4.into()),
                ("received", 4.into()),
                ("dropped", 0.into()),
            ],
        )?;
        let agent = entry(&b["agents"], "id", 0)?;
        has(agent, &[("qp", 1.into())])?;
        has(
            &agent["interest"],
            &[("class", CLASS.into()), ("oui", 0x1405.into())],
        )?;
        let methods = agent["interest"]["methods"]
            .as_array()
            .ok_or("no methods")?;
        ensure!(methods.contains(&Method::SEND.0.into()), "{agent}");
        umadctl("show")?
            .ended(0)?
            .says(&["OUTSTANDING", "METHODS", "Send(0x3)", "001405", "rxe1"])
    })
    .improvement(9);
    area.check("show: a file whose device is gone", || {
        let pair = RxePair::new("cg")?;
        let port = fresh_on(&pair.a.ibdev)?;
        pair.a.unplug()?;
        let file = shown(port.as_raw_fd())?;
        has(
            &file["info"],
            &[
                ("alive", false.into()),
                ("device", pair.a.ibdev.as_str().into()),
            ],
        )
    })
    .improvement(9);
    area.check("show --watch: again and again, and in between", || {
        let port = fresh()?;
        let running = Running::start("show --watch=0.1 -c 3 --json")?;
        let (code, lines) = running.end(None)?;
        ensure_eq!((code, lines.len()), (0, 3));
        for line in &lines {
            entry(&line["files"], "fd", port.as_raw_fd())?;
        }
        let running = Running::start("show --watch=100 --json")?;
        std::thread::sleep(ktap::patient(Duration::from_secs(1)));
        let (code, lines) = running.end(Some(Signal::SIGTERM))?;
        ensure_eq!((code, lines.len()), (0, 1));
        Ok(())
    })
    .improvement(9);
    area.check("show: an issm file", || {
        let pair = Pair::new()?;
        let file = File::options()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(pair.a.issm(1)?)?;
        let seen = shown(file.as_raw_fd())?;
        has(&seen, &[("kind", "issm".into()), ("info", Value::Null)])
    });
    area.check(
        "show: names of processes and paths do nothing to a terminal",
        || {
            fs::write("/proc/self/comm", "a\x1b[2Jb\nc")?;
            let path = "/tmp/umad\x1b]0;x\x07";
            let node = SFlag::S_IFCHR;
            mknod(path, node, Mode::S_IRUSR | Mode::S_IWUSR, makedev(231, 0))?;
            let file = File::options().read(true).write(true).open(path);
            fs::remove_file(path)?;
            let file = file?;
            let ran = umadctl("show")?;
            ran.is_harmless()?;
            ran.says(&["a\\u{1b}[2Jb\\nc"])?;
            umadctl("doctor")?.is_harmless()?;
            let seen = shown(file.as_raw_fd())?;
            ensure_eq!(seen["process"], "a\x1b[2Jb\nc");
            Ok(())
        },
    );
    area.check(
        "show: a user who may nothing is told what could not be seen",
        || {
            let _port = fresh()?;
            let ran = umadctl_as_nobody("show --json")?;
            ran.complains(&["could not be looked into", "root"])?;
            ensure!(ran.json()?["hidden_processes"].as_u64() > Some(0));
            Ok(())
        },
    );
}

fn checks_of_doctor(area: &mut ktap::Area<'_>) {
    area.check("doctor: all is well, and which module it is", || {
        let report = umadctl("doctor --json")?.ended(0)?.json()?;
        has(
            &report["module"],
            &[("kind", kind()?.into()), ("users", 0.into())],
        )?;
        // What modprobe would load here is the kernel's own, in C.
        let file = report["module"]["would_load"].as_str();
        ensure!(
            file.is_some_and(|file| file.starts_with("kernel/")),
            "{report}"
        );
        let other = Impl::current()? == Impl::Rust;
        let text = report["findings"].to_string();
        ensure_eq!(text.contains("not the one that is loaded"), other, "{text}");
        let ran = umadctl("doctor")?.ended(0)?;
        ran.says(&[
            "ib_umad is loaded",
            "rxe0 port 1 is umad0",
            "/dev/infiniband/umad0 can be opened",
            "it can be unloaded",
        ])
    });
    area.check("doctor: what holds the module", || {
        let port = fresh()?;
        let report = umadctl("doctor --json")?.ended(0)?.json()?;
        has(&report["module"], &[("users", 2.into())])?;
        let holder = entry(&report["holders"], "pid", std::process::id())?;
        has(
            holder,
            &[
                ("fd", port.as_raw_fd().into()),
                ("path", "/dev/infiniband/umad0".into()),
            ],
        )?;
        umadctl("doctor")?.says(&[
            "rmmod ib_umad would refuse",
            &format!("process {}", std::process::id()),
        ])
    });
    area.check(
        "doctor: the module is not loaded; each command says so",
        || {
            let _loaded = Loaded;
            unload_when_idle(SOON)?;
            let report = umadctl("doctor --json")?.ended(1)?.json()?;
            has(&report["module"], &[("kind", "not-loaded".into())])?;
            ensure_eq!(problems(&report, "module").len(), 1);
            for words in [
                "list",
                "show",
                "ping umad0 umad1",
                "rmpp umad0 umad1",
                "sniff",
            ] {
                let ran = umadctl(words)?.ended(3)?;
                ran.complains(&["ib_umad is not loaded", "modprobe"])?;
            }
            Ok(())
        },
    );
    area.check(
        "doctor: a node is missing, no node, or another device's",
        || {
            let node = Path::new("/dev/infiniband/umad1");
            let look = || -> Outcome<Value> { umadctl("doctor --json")?.ended(1)?.json() };
            // Not another one in its place: the kernel removes only a node that it made.
            let aside = Path::new("/dev/umad1-aside");
            fs::rename(node, aside)?;
            let missing = look();
            let open = umadctl("ping umad0 umad1 -c 1");
            fs::write(node, "")?;
            let regular = look();
            fs::remove_file(node)?;
            mknod(node, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(231, 0))?;
            let other = look();
            fs::rename(aside, node)?;
            ensure!(fs::metadata(node)?.file_type().is_char_device());
            for (report, word) in [
                (missing?, "missing"),
                (regular?, "no device node"),
                (other?, "stale"),
            ] {
                let found = problems(&report, "node");
                ensure_eq!(found.len(), 1, "{word}: {report}");
                let text = found[0].to_string();
                ensure!(text.contains(word), "{word}: {text}");
            }
            open?.ended(3)?.complains(&["The node is missing"])?;
            umadctl("doctor")?.ended(0)?;
            Ok(())
        },
    );
    area.check("doctor: a node without a device", || {
        let node = "/dev/infiniband/umad50";
        mknod(node, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(231, 50))?;
        let report = umadctl("doctor --json");
        fs::remove_file(node)?;
        let report = report?.ended(1)?.json()?;
        ensure_eq!(problems(&report, "node").len(), 1, "{report}");
        Ok(())
    });
    area.check("doctor: a permission is missing", || {
        let report = umadctl_as_nobody("doctor --json")?.ended(1)?.json()?;
        let found = problems(&report, "open");
        ensure_eq!(found.len(), 2, "{report}");
        ensure!(
            found[0]["hint"].to_string().contains("mode 600"),
            "{report}"
        );
        let ran = umadctl_as_nobody("ping umad0 umad1")?.ended(3)?;
        ran.complains(&["EACCES", "udev rule"])
    });
    area.check("doctor: the device is another network namespace's", || {
        let _mode = selftests::netns::Exclusive::begin()?;
        let namespace = selftests::netns::Named::new("ctl")?;
        namespace.inside(|| {
            let report = umadctl("doctor --json")?.json()?;
            let text = report.to_string();
            ensure!(text.contains("netns exclusive"), "{text}");
            Ok(())
        })
    });
    area.check(
        "doctor: an issm node is not opened for the diagnosis",
        || {
            let pair = Pair::new()?;
            pair.a.issm(1)?;
            let before = pair.a.cap_mask(1)?;
            let ran = umadctl("doctor")?.ended(0)?;
            ran.says(&[&format!("issm{} may be opened", pair.a.umad(1)?)])?;
            ensure_eq!(pair.a.cap_mask(1)?, before);
            Ok(())
        },
    );
}

fn checks_of_sniff(area: &mut ktap::Area<'_>) {
    area.check(
        "sniff: a request, its answer, a timeout; gone with Ctrl-C",
        || {
            need_tracepoints()?;
            let running = Running::start("sniff --json")?;
            running.listens()?;
            let instance = running.instance();
            let peers = Peers::new()?;
            let tid = fresh_tid();
            peers.round_trip(tid)?;
            let lonely = fresh_tid();
            let packet = peers.a.packet(&peers.b, Method::SEND, lonely);
            peers
                .a
                .port
                .send(&packet.timeout(Duration::from_millis(50)))?;
            ensure_eq!(peers.a.recv()?.header.status, 110);
            let (code, lines) = running.end(Some(Signal::SIGINT))?;
            ensure_eq!(code, 0);
            ensure!(!instance.exists(), "the instance is left over");
            let of = |tid: Tid| -> Vec<&Value> {
                let tail = format!("{:08x}", tid.low());
                let same =
                    |mad: &&Value| mad["tid"].as_str().is_some_and(|tid| tid.ends_with(&tail));
                lines.iter().filter(same).collect()
            };
            let seen = of(tid);
            ensure_eq!(seen.len(), 4, "{lines:?}");
            let common = [
                ("class", CLASS.into()),
                ("port", 1.into()),
                ("qpn", 1.into()),
                ("status", 0.into()),
            ];
            let pid: Value = std::process::id().into();
            for (mad, direction, device, to) in [
                (seen[0], "sent", "rxe0", &peers.b),
                (seen[1], "received", "rxe1", &peers.a),
                (seen[2], "sent", "rxe1", &peers.a),
                (seen[3], "received", "rxe0", &peers.b),
            ] {
                has(mad, &common)?;
                has(
                    mad,
                    &[
                        ("direction", direction.into()),
                        ("device", device.into()),
                        ("gid", to.gid.to_string().into()),
                        ("pid", pid.clone()),
                    ],
                )?;
            }
            ensure_eq!(seen[3]["method"].as_u64().map(|m| m & 0x80), Some(0x80));
            let times: Vec<f64> = seen.iter().filter_map(|mad| mad["time"].as_f64()).collect();
            ensure!(times.is_sorted(), "{times:?}");
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
            ensure!(
                (now.as_secs_f64() - times[0]).abs() < 600.0,
                "{times:?}, now {now:?}"
            );
            let seen = of(lonely);
            let last = seen.last().ok_or("no timeout")?;
            has(
                last,
                &[("direction", "unanswered".into()), ("status", 110.into())],
            )
        },
    );
    area.check("sniff: filters, a count, the text", || {
        need_tracepoints()?;
        let mut command = program()?;
        command.args([
            "sniff",
            "-c",
            "2",
            "--port",
            "rxe1",
            "--class",
            &CLASS.to_string(),
        ]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let running = Running {
            pid: Pid::from_raw(i32::try_from(child.id())?),
            child: Command::new("true").spawn()?,
        };
        running.listens()?;
        let peers = Peers::new()?;
        let tid = fresh_tid();
        peers.round_trip(tid)?;
        let mut text = String::new();
        child
            .stdout
            .take()
            .ok_or("no output")?
            .read_to_string(&mut text)?;
        ensure_eq!(child.wait()?.code(), Some(0));
        let lines: Vec<&str> = text.lines().collect();
        ensure_eq!(lines.len(), 2, "{text}");
        ensure!(lines[0].contains("rxe1/1 <- Vendor(0x30)"), "{text}");
        ensure!(lines[1].contains("rxe1/1 -> Vendor(0x30)"), "{text}");
        ensure!(lines[0].contains(&format!("{:08x}", tid.low())), "{text}");
        ensure!(
            lines[0].contains(&format!("from GID {}", peers.a.gid)),
            "{text}"
        );
        Ok(())
    });
    area.check("sniff: LIDs on InfiniBand", || {
        need_tracepoints()?;
        let pair = Pair::new()?;
        let (a, b) = (pair.a.umad(1)?, pair.b.umad(1)?);
        let running = Running::start(&format!("sniff --json --class 0x32 -c 4 --port umad{a}"))?;
        running.listens()?;
        umadctl(&format!("ping umad{a} umad{b} -c 2 -i 0 -W 20"))?.ended(0)?;
        let (code, lines) = running.end(None)?;
        ensure_eq!((code, lines.len()), (0, 4));
        for mad in &lines {
            has(
                mad,
                &[
                    ("lid", 2.into()),
                    ("gid", Value::Null),
                    ("class", 0x32.into()),
                ],
            )?;
        }
        Ok(())
    });
    area.check(
        "sniff: what a killed one left is removed by the next",
        || {
            need_tracepoints()?;
            let killed = Running::start("sniff")?;
            killed.listens()?;
            let left = killed.instance();
            drop(killed);
            ensure!(left.exists(), "nothing was left");
            let next = Running::start("sniff --json")?;
            next.listens()?;
            ensure!(!left.exists(), "{} is still there", left.display());
            let instance = next.instance();
            next.end(Some(Signal::SIGTERM))?;
            ensure!(!instance.exists(), "the instance is left over");
            Ok(())
        },
    );
    area.check("sniff: for root only", || {
        umadctl_as_nobody("sniff -c 1")?
            .ended(3)?
            .complains(&["root"])
    });
}

fn checks_of_the_rest(area: &mut ktap::Area<'_>) {
    area.check("man pages are written, one for each command", || {
        let folder = PathBuf::from(format!("/tmp/umadctl-man-{}", std::process::id()));
        umadctl(&format!("man {}", folder.display()))?.ended(0)?;
        let mut pages: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(&folder)? {
            pages.push(entry?.path());
        }
        for command in ["", "-list", "-show", "-ping", "-rmpp", "-sniff", "-doctor"] {
            let page = folder.join(format!("umadctl{command}.1"));
            let text = fs::read_to_string(&page).what(page.display())?;
            ensure!(text.contains(".SH DESCRIPTION"), "{text}");
        }
        ensure!(pages.len() >= 7, "{pages:?}");
        fs::remove_dir_all(&folder)?;
        Ok(())
    });
    area.check("completions are what the shell can read", || {
        for shell in ["bash", "zsh", "fish"] {
            umadctl(&format!("completion {shell}"))?
                .ended(0)?
                .says(&["umadctl", "doctor"])?;
        }
        let file = "/tmp/umadctl-completion";
        fs::write(file, umadctl("completion bash")?.ended(0)?.out)?;
        fs::set_permissions(file, fs::Permissions::from_mode(0o644))?;
        run(&format!("bash -n {file}"))?;
        Ok(())
    });
    area.check("wrong arguments are exit code 2", || {
        for words in [
            "",
            "lists",
            "ping umad0",
            "ping umad0 umad1 --class 0x81",
            "show -c 2",
            "sniff -c 0",
            "rmpp umad0 umad1 -s 0",
            "ping umad0 umad1 -W 0",
        ] {
            umadctl(words)?.ended(2)?;
        }
        umadctl("--help")?.ended(0)?.says(&["Exit codes"])?;
        umadctl("ping --help")?
            .ended(0)?
            .says(&["--timeout", "0x32", "Exit codes"])
    });
    area.check("a reader who has seen enough is no error", || {
        let mut command = program()?;
        let child = command
            .args(["completion", "zsh"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut child = child;
        drop(child.stdout.take());
        let output = child.wait_with_output()?;
        ensure_eq!(output.status.code(), Some(0), "{output:?}");
        ensure!(output.stderr.is_empty(), "{output:?}");
        Ok(())
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("ctl");
    checks_of_list(&mut area);
    checks_of_ping(&mut area);
    checks_of_show(&mut area);
    checks_of_doctor(&mut area);
    checks_of_sniff(&mut area);
    checks_of_the_rest(&mut area);
    Module::run(area)
}
