// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `abuse`: one process or peer that behaves badly, or very many at once; what the others notice of
//! it, and how long it takes until all of it is gone. Each check tells its figures.

#![forbid(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use ktap::peers::{CLASS, OUI};
use ktap::prelude::*;
use ktap::{slowness, wait_for_umad};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::signal::Signal;
use selftests::fdinfo::FdInfo;
use selftests::figure::{figure, figure_time, median_of};
use selftests::parameters::with;
use selftests::slab::shrink;
use selftests::stuck::{at_each_place, scene, Place, Stuck};
use selftests::task::{Task, MUST};

/// A class of its own, to see that an agent is gone.
const OWN: u8 = 0x39;

/// Round trips that a median is made of.
const TRIPS: usize = 41;

/// How long a round trip may take when somebody misbehaves; a bound against hanging.
const TRIP: Duration = Duration::from_secs(3);

/// The middle one of some round trips on files of their own, as a figure.
fn trips(what: &str, peers: &Arc<Peers>) -> Outcome<Duration> {
    let peers = Arc::clone(peers);
    median_of(what, TRIPS, TRIP, move || {
        peers.round_trip(fresh_tid()).map(drop)
    })
}

/// Fails if what was measured is not what it is without the disturbance. The machine has more to do, and
/// is shared: several times as long says nothing yet, waiting for somebody takes a hundred times as long.
fn ensure_undisturbed(undisturbed: Duration, disturbed: Duration) -> Outcome {
    let bound = undisturbed * 10 + Duration::from_millis(50);
    ensure!(
        disturbed < bound,
        "{disturbed:?}, without the disturbance {undisturbed:?}"
    );
    Ok(())
}

/// Nobody has the class [`OWN`], and the ports work.
fn nothing_is_left() -> Outcome {
    let port = Port::open(wait_for_umad("rxe0")?)?;
    port.register2(&Peers::registration(OWN))
        .what("an agent outlived its process")?;
    Peers::new()?.round_trip(fresh_tid()).map(drop)
}

/// A pipe's end that a child tells something through, as one byte.
fn tell(to: &impl AsFd) -> Outcome {
    nix::unistd::write(to, b"!")?;
    Ok(())
}

/// Whether somebody has told something.
fn is_readable(from: &impl AsFd) -> Outcome<bool> {
    use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
    let mut fds = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut fds, PollTimeout::ZERO)? > 0)
}

/// Waits for so many bytes.
fn hear(from: BorrowedFd<'_>, count: usize, limit: Duration) -> Outcome {
    use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
    let end = Instant::now() + ktap::patient(limit);
    let mut heard = 0;
    while heard < count {
        let left = end.saturating_duration_since(Instant::now());
        let ms = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(from, PollFlags::POLLIN)];
        ensure!(poll(&mut fds, ms)? == 1, "{heard} of {count} are ready");
        let mut some = [0; 512];
        let n = nix::unistd::read(from, &mut some)?;
        ensure!(n > 0, "{heard} of {count} were ready, and all are gone");
        heard += n;
    }
    Ok(())
}

/// Sleeps until a signal ends the process.
fn sleep_for_good() -> ! {
    loop {
        nix::unistd::pause();
    }
}

fn stuck_writers(area: &mut ktap::Area) {
    at_each_place(area, "what others notice", beside_stuck);
}

/// Round trips of others, open() and a MAD for the stuck file, with and without the stuck call.
fn beside_stuck(place: Place) -> Outcome {
    let scene = scene("rxe0", "rxe1")?;
    let name = place.name();
    let before = trips("round trip, nobody stuck", &scene.other)?;
    let mut stuck = Stuck::at(place, &scene)?;
    let measured = (|| {
        // A MAD for the file: from here on, whoever receives wants what the stuck call may hold.
        let mad = scene.b.packet(&scene.a, Method::SEND, fresh_tid());
        scene.b.port.send(&mad)?;
        trips(&format!("round trip, {name}"), &scene.other)
    })();
    // Before the verdict, so that everything ends.
    stuck.release()??;
    ensure_undisturbed(before, measured?)
}

fn unresolved(area: &mut ktap::Area) {
    area.check(
        "a writer to an address that does not resolve: others notice nothing, and it ends",
        || {
            let scene = scene("rxe0", "rxe1")?;
            let before = trips("round trip, nobody resolves", &scene.other)?;
            // Four files, each of which is always in the middle of a resolution.
            let nobody: Gid = "fe80::dead:beef".parse()?;
            let writers = (0..4)
                .map(|_| {
                    let from = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
                    Ok(Task::start_asleep(libc::SYS_write, move || {
                        let mut longest = Duration::ZERO;
                        for _ in 0..2 {
                            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid());
                            let to = Address::roce(nobody, 0);
                            let begin = Instant::now();
                            let sent =
                                from.port
                                    .send(&Packet::new(from.agent, &to, mad.into_bytes()));
                            longest = longest.max(begin.elapsed());
                            match sent {
                                Err(e) if e.errno() == Some(Errno::ETIMEDOUT) => {}
                                other => return Err(format!("{other:?}")),
                            }
                        }
                        Ok(longest)
                    }))
                })
                .collect::<Outcome<Vec<_>>>()?;
            let beside = trips("round trip, four others resolve", &scene.other)?;
            let mut longest = Duration::ZERO;
            for mut writer in writers {
                match writer.result(MUST) {
                    Some(Ok(time)) => longest = longest.max(*time),
                    other => ensure!(false, "a writer to nobody: {other:?}"),
                }
            }
            figure_time("write() to an address that does not resolve", longest);
            ensure_undisturbed(before, beside)?;
            // Neighbour discovery gives up after three probes of a second, resolved one file at a time.
            ensure!(longest < ktap::patient(MUST), "it took {longest:?}");
            Ok(())
        },
    );
}

/// Requests that nobody answers.
const MANY_SENDS: u32 = 10_000;

fn masses(area: &mut ktap::Area) {
    area.check(
        "SIGKILL with 10,000 requests outstanding: gone, with all of it",
        || {
            let (ready, tells) = nix::unistd::pipe()?;
            let peers = Peers::new()?;
            let mut child = fork(|| {
                let from = Endpoint::open("rxe0", Layout::New, &Peers::registration(OWN))?;
                let begin = Instant::now();
                for n in 1..=MANY_SENDS {
                    // The peer has no agent for it, and nobody answers a Send.
                    let mad = VendorMad::new(0x3f, OUI, Method::SEND, fresh_tid()).into_bytes();
                    let request = Packet::new(from.agent, &peers.b.address(), mad);
                    from.port
                        .send(&request.timeout(Duration::from_secs(1000)))?;
                    // Elsewhere they are all under way soon.
                    if slowness() > 1 {
                        keep_to_the_wire(n);
                    }
                }
                figure_time("10,000 requests written", begin.elapsed());
                tell(&tells)?;
                sleep_for_good()
            })?;
            hear(ready.as_fd(), 1, MUST * 5)?;
            let peers = Arc::new(peers);
            trips("round trip beside 10,000 outstanding requests", &peers)?;
            let begin = Instant::now();
            child.kill(MUST)?;
            figure_time(
                "SIGKILL with 10,000 requests outstanding, until gone",
                begin.elapsed(),
            );
            drop(peers);
            nothing_is_left()
        },
    )
    .timeout(240);
    area.check(
        "a thousand processes with 32 agents each: others work, and all of it ends",
        || {
            // A slow kernel is one that keeps more about each object, too.
            let processes = 1000 / usize::try_from(slowness())?;
            let umad = wait_for_umad("rxe0")?;
            let peers = Arc::new(Peers::new()?);
            let before = trips("round trip, no other agents", &peers)?;
            let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
            setrlimit(Resource::RLIMIT_NOFILE, hard.min(8192), hard)?;
            let (ready, tells) = nix::unistd::pipe()?;
            let begin = Instant::now();
            let mut children = Vec::new();
            for _ in 0..processes {
                children.push(fork(|| {
                    let port = Port::open(umad)?;
                    for id in 0..32 {
                        ensure_eq!(port.register2(&Registration::send_only())?, AgentId(id));
                    }
                    ensure_errno!(port.register2(&Registration::send_only()), ENOMEM);
                    tell(&tells)?;
                    sleep_for_good()
                })?);
            }
            hear(ready.as_fd(), processes, MUST * 6)?;
            figure("processes with 32 agents each", processes, "processes");
            figure_time("all of them have their agents after", begin.elapsed());
            let beside = trips("round trip beside all their agents", &peers)?;
            let begin = Instant::now();
            for child in &children {
                child.signal(Signal::SIGKILL)?;
            }
            for child in &mut children {
                child.kill(MUST * 6)?;
            }
            figure_time("all of them killed, until gone", begin.elapsed());
            ensure_undisturbed(before, beside)?;
            drop(peers);
            nothing_is_left()
        },
    )
    .timeout(300);
    area.check(
        "no descriptor left: EMFILE, and nothing is left behind",
        || {
            let umad = wait_for_umad("rxe0")?;
            let taken = Port::open(umad)?;
            taken.register2(&Peers::registration(OWN))?;
            let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
            setrlimit(Resource::RLIMIT_NOFILE, 64, hard)?;
            for _ in 0..20 {
                let mut files = Vec::new();
                let refused = loop {
                    match Port::open(umad) {
                        Ok(port) => {
                            port.register2(&Registration::send_only())?;
                            files.push(port);
                        }
                        Err(e) => break e,
                    }
                    ensure!(files.len() < 64, "the limit does not hold");
                };
                ensure_errno!(Err::<(), _>(refused), EMFILE);
                // The files that are there work.
                for port in &files {
                    ensure_errno!(port.register2(&Peers::registration(OWN)), EINVAL);
                }
            }
            drop(taken);
            nothing_is_left()
        },
    );
    area.check(
        "a process that forks again and again while it reads: each packet comes once, in order",
        || {
            let Peers { a, b } = Peers::new()?;
            let b = Arc::new(b);
            let count = 200;
            let reading = Arc::clone(&b);
            let mut reader = Task::start_asleep(libc::SYS_read, move || {
                (0..count)
                    .map(|_| Ok(reading.port.recv()?.tid()?.low()))
                    .collect::<Outcome<Vec<u32>>>()
            });
            let mut tids = Vec::new();
            for n in 0..count {
                let tid = fresh_tid();
                a.port.send(&a.packet(&b, Method::SEND, tid))?;
                tids.push(tid.low());
                if n % 8 == 0 {
                    // The child has the file, too, and ends with it open.
                    fork(|| Ok(()))?.wait(MUST)?;
                }
            }
            match reader.result(MUST) {
                Some(Ok(got)) => ensure_eq!(got, &tids),
                other => ensure!(false, "{other:?}"),
            }
            // The children's ends took nothing along.
            drop((a, b));
            Peers::new()?.round_trip(fresh_tid()).map(drop)
        },
    );
}

/// MADs, or requests, of a flood.
const FLOOD: u32 = 20_000;

/// Called after the `n`th send: no faster than MADs go over the wire, as those of one port wait for one another, and the
/// cheaper a write() is, the more would.
fn keep_to_the_wire(n: u32) {
    if n % 32 == 0 {
        std::thread::sleep(ktap::patient(Duration::from_millis(10)));
    }
}

/// What the flooded file may keep.
const BOUND: u64 = 4 << 20;

/// Bytes of the kernel's slabs, without what they keep for later.
fn slab() -> Outcome<u64> {
    shrink()?;
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Slab:"));
    let words = line.ok_or("no Slab in /proc/meminfo")?;
    let kib: u64 = words.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// Fails if slabs have grown by more than a bound. The allocator keeps some objects more than are in use,
/// and others use it, too.
fn ensure_bounded(what: &str, before: u64, bound: u64) -> Outcome {
    let grown = slab()?.saturating_sub(before);
    figure(what, grown / 1024, "KiB");
    ensure!(
        grown < bound + bound / 4 + (2 << 20),
        "{what}: {grown} bytes, the bound is {bound}"
    );
    Ok(())
}

/// Answers what comes to a file, until the value goes: what a flood drowns can be asked for again.
struct Server {
    end: Arc<AtomicBool>,
    _thread: Task<()>,
}

impl Server {
    fn on(file: Endpoint) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&end);
        let _thread = Task::start(move || {
            while !ends.load(Ordering::Relaxed) {
                if let Ok(request) = file.port.recv_timeout(Duration::from_millis(50)) {
                    // One that is asked again while its answer is on its way is refused; it is on its way.
                    let _ = file
                        .response(&request)
                        .map(|answer| file.port.send(&answer));
                }
            }
        });
        Self { end, _thread }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// What others see while somebody floods: round trips, and how late a timeout is.
fn beside_flood(when: &str, asks: &Arc<Endpoint>, answers: &Address) -> Outcome {
    let request = |asks: &Endpoint, to: &Address, class: u8| {
        let mad = VendorMad::new(class, OUI, Method::GET, fresh_tid()).into_bytes();
        Packet::new(asks.agent, to, mad)
    };
    let (file, to) = (Arc::clone(asks), *answers);
    median_of(&format!("round trip, {when}"), TRIPS, TRIP * 3, move || {
        let request = request(&file, &to, OWN)
            .timeout(Duration::from_millis(100))
            .retries(50);
        file.port.send(&request)?;
        ensure_eq!(file.recv_tid(request.tid()?)?.header.status, 0);
        Ok(())
    })?;
    let timeout = Duration::from_millis(50);
    let mut latest = Duration::ZERO;
    for _ in 0..5 {
        // Nobody has the class, and nobody answers a Send.
        let mut request = request(asks, answers, 0x3f).timeout(timeout);
        request.mad[3] = Method::SEND.0;
        let begin = Instant::now();
        asks.port.send(&request)?;
        ensure!(asks.recv_tid(request.tid()?)?.header.status != 0);
        latest = latest.max(begin.elapsed());
    }
    figure_time(&format!("timeout of 50 ms, {when}"), latest);
    ensure!(latest < ktap::patient(TRIP), "it came after {latest:?}");
    Ok(())
}

fn floods(area: &mut ktap::Area) {
    area.check(
        "a peer that floods, a process that does not read: memory is bounded, others work",
        || {
            with(c"max_unread=4194304", || {
                let flood = Peers::new()?;
                let asks = Arc::new(Endpoint::open(
                    "rxe0",
                    Layout::New,
                    &Registration::send_only(),
                )?);
                let answers = Endpoint::open("rxe1", Layout::New, &Peers::registration(OWN))?;
                let to = answers.address();
                let _server = Server::on(answers);
                beside_flood("nobody floods", &asks, &to)?;
                let before = slab()?;
                let (ends, end) = nix::unistd::pipe()?;
                let mut child = fork(|| {
                    let (begin, mut sent) = (Instant::now(), 0_u32);
                    // So many, and as long as others are looked at.
                    while sent < FLOOD || !is_readable(&ends)? {
                        let packet = flood.a.packet(&flood.b, Method::SEND, fresh_tid());
                        flood.a.port.send(&packet)?;
                        sent += 1;
                        keep_to_the_wire(sent);
                    }
                    figure("MADs of the flood", sent, "MADs");
                    figure_time("each of them", begin.elapsed() / sent);
                    Ok(())
                })?;
                beside_flood("a peer floods", &asks, &to)?;
                tell(&end)?;
                child.wait(MUST * 5)?;
                // The last of them have come when another one has.
                let fence = Registration::class(0x3a, 1)
                    .oui(OUI)
                    .methods(&[Method::SEND]);
                Peers::with("rxe0", "rxe1", Layout::New, &fence)?.deliver(fresh_tid())?;
                ensure_bounded("slabs have grown by the flood's MADs", before, BOUND)?;
                let info = FdInfo::of(flood.b.port.as_fd())?;
                let dropped = info.number("dropped")?;
                figure(
                    "MADs of the flood that were dropped and counted",
                    dropped,
                    "MADs",
                );
                ensure!(dropped > 0, "nothing was dropped");
                ensure!(info.bytes("unread")? <= BOUND);
                Ok(())
            })
        },
    )
    .improvement(7)
    .timeout(240);
    area.check(
        "a process that floods with requests and never reads its timeouts: memory is bounded",
        || {
            with(c"max_outstanding=4194304", || {
                let from = Endpoint::open("rxe0", Layout::New, &Registration::send_only())?;
                let to = Endpoint::open("rxe1", Layout::New, &Registration::send_only())?.address();
                let before = slab()?;
                let (mut sent, mut refused) = (0_u32, 0_u32);
                for _ in 0..FLOOD {
                    let mad = VendorMad::new(0x3f, OUI, Method::SEND, fresh_tid()).into_bytes();
                    let request =
                        Packet::new(from.agent, &to, mad).timeout(Duration::from_millis(1));
                    match from.port.send(&request) {
                        Ok(()) => sent += 1,
                        Err(e) => {
                            ensure_errno!(Err::<(), _>(e), ENOBUFS, "after {sent} sends");
                            refused += 1;
                        }
                    }
                }
                figure(
                    "requests of the flood that were refused",
                    refused,
                    "requests",
                );
                ensure_bounded("slabs have grown by unread timeouts", before, BOUND)?;
                ensure!(refused > 0, "all {sent} were sent");
                // Who reads may send again; and every one that was sent ends.
                for _ in 0..sent {
                    ensure!(from.recv()?.header.status != 0);
                }
                let mad = VendorMad::new(0x3f, OUI, Method::SEND, fresh_tid()).into_bytes();
                from.port.send(&Packet::new(from.agent, &to, mad))?;
                Ok(())
            })
        },
    )
    .improvement(7)
    .timeout(240);
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("abuse");
    stuck_writers(&mut area);
    unresolved(&mut area);
    floods(&mut area);
    masses(&mut area);
    area.run()
}
