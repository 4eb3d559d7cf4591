// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What ib_umad is for, shown on two ports that see each other.
//!
//! `umad-demo [ASKER ANSWERER]` takes two RDMA devices with an ib_umad port (the first two that
//! there are, unless named), lets them exchange management datagrams, prints what happens, and
//! checks it: its exit status is 0 only if all went as it should.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use umad::sysfs::{self, UmadPort};
use umad::{Address, AgentId, Error, Gid, Layout, Method, Packet, Port, Registration};
use umad::{Tid, VendorMad};

/// A vendor class with RMPP; any from 0x30 to 0x4f would do.
const CLASS: u8 = 0x3a;
const OUI: u32 = 0x00_1405;

/// Round trips to make, and how long they may take: a slow machine makes fewer, but not less than
/// the first number.
const ROUND_TRIPS: std::ops::RangeInclusive<u32> = 100..=1000;
const ROUND_TRIPS_TIME: Duration = Duration::from_secs(5);

const TIMEOUT: Duration = Duration::from_millis(200);
/// The kernel counts ticks: 10 ms each, if it is configured for the slowest clock that there is.
const TICK: Duration = Duration::from_millis(10);
const MESSAGE: usize = 1 << 20;

/// A bound for what must come: large, since the machine may be emulated.
const PATIENCE: Duration = Duration::from_secs(60);

type Result<T> = std::result::Result<T, String>;

/// An open port with one agent.
struct End {
    name: String,
    port: Port,
    agent: AgentId,
    gid: Gid,
}

impl End {
    fn open(found: &UmadPort, methods: &[Method]) -> Result<Self> {
        let name = format!("umad{}", found.number);
        let wrong = |e: Error| format!("{name}: {e}");
        let port = Port::open(found.number).map_err(wrong)?;
        let registration = Registration::class(CLASS, 1)
            .oui(OUI)
            .methods(methods)
            .rmpp(1);
        let agent = port.register2(&registration).map_err(wrong)?;
        let gid = sysfs::gid(&found.ibdev, found.port, 0).map_err(wrong)?;
        Ok(Self {
            name,
            port,
            agent,
            gid,
        })
    }

    fn send(&self, packet: &Packet) -> Result<()> {
        self.port
            .send(packet)
            .map_err(|e| format!("{}: {e}", self.name))
    }

    fn recv(&self) -> Result<Packet> {
        self.port
            .recv_timeout(PATIENCE)
            .map_err(|e| format!("{}: {e}", self.name))
    }

    fn address(&self) -> Address {
        Address::roce(self.gid, 0)
    }
}

fn main() -> ExitCode {
    match demo() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("\nWRONG: {why}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    let (first, second) = find_ports()?;
    println!("\nAgents: class {CLASS:#04x} (vendor), OUI {OUI:#08x}, RMPP by the kernel");
    let asker = End::open(&first, &[])?;
    println!(
        "  {}  agent {}  asks; wants nothing unsolicited",
        asker.name, asker.agent
    );
    let answerer = End::open(&second, &[Method::GET, Method::SEND])?;
    println!(
        "  {}  agent {}  receives methods Get and Send",
        answerer.name, answerer.agent
    );
    // What fails does not keep the others from being shown.
    let answered = round_trips(&asker, &answerer).map_err(|why| format!("requests: {why}"));
    let timed_out = timeout(&asker, &answerer).map_err(|why| format!("timeout: {why}"));
    let arrived = message(&asker, &answerer).map_err(|why| format!("message: {why}"));
    let answered = answered?;
    timed_out.and(arrived)?;
    println!(
        "\nAll is well: {answered} requests answered, one timed out when it should, \
         {} KiB arrived byte for byte.",
        MESSAGE >> 10
    );
    Ok(())
}

// Shows the ports, and picks two.
fn find_ports() -> Result<(UmadPort, UmadPort)> {
    let ports = sysfs::ports().map_err(|e| format!("{e} (is ib_umad loaded?)"))?;
    let version = sysfs::abi_version().map_err(|e| e.to_string())?;
    println!("Ports with ib_umad (ABI version {version})");
    for found in &ports {
        let state = sysfs::state(&found.ibdev, found.port).unwrap_or_default();
        let gid = sysfs::gid(&found.ibdev, found.port, 0).unwrap_or_default();
        println!(
            "  {:<6} {} port {}, {}, GID {gid}",
            format!("umad{}", found.number),
            found.ibdev,
            found.port,
            state.split_once(": ").map_or(&*state, |(_, name)| name),
        );
    }
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let named = |name: &String| {
        ports
            .iter()
            .find(|found| found.ibdev == *name)
            .cloned()
            .ok_or_else(|| format!("{name} has no ib_umad port"))
    };
    match (&wanted[..], &ports[..]) {
        ([one, two], _) => Ok((named(one)?, named(two)?)),
        ([], [one, two, ..]) => Ok((one.clone(), two.clone())),
        ([], _) => Err(format!("two ports are needed, there are {}", ports.len())),
        _ => Err("usage: umad-demo [ASKER ANSWERER]".into()),
    }
}

// Requests and responses, one at a time; says how many.
fn round_trips(asker: &End, answerer: &End) -> Result<usize> {
    println!(
        "\nRequests from {}, answered by a thread at {}",
        asker.name, answerer.name
    );
    let done = AtomicBool::new(false);
    let (answered, times) = std::thread::scope(|scope| {
        let answers = scope.spawn(|| answer_until(answerer, &done));
        let start = Instant::now();
        let times = (1..=*ROUND_TRIPS.end())
            .take_while(|n| n <= ROUND_TRIPS.start() || start.elapsed() < ROUND_TRIPS_TIME)
            .map(|n| round_trip(asker, answerer, n))
            .collect::<Result<Vec<Duration>>>();
        done.store(true, Ordering::Release);
        let answered = answers
            .join()
            .map_err(|_| "the answering thread panicked".to_owned())?;
        Ok::<_, String>((answered?, times?))
    })?;
    if answered != times.len() {
        return Err(format!(
            "{} requests were made, {answered} came to {}",
            times.len(),
            answerer.name
        ));
    }
    let mut times = times;
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "  {answered} made, all answered; each response has its request's transaction id and bytes\n  \
         round trip: minimum {}, median {}, 99th percentile {}",
        human(at(0)),
        human(at(50)),
        human(at(99)),
    );
    Ok(answered)
}

fn round_trip(asker: &End, answerer: &End, n: u32) -> Result<Duration> {
    let question = format!("question {n}");
    let tid = Tid::new(0x1000_0000 + n);
    let mad = VendorMad::new(CLASS, OUI, Method::GET, tid).payload(question.as_bytes());
    let request =
        Packet::new(asker.agent, &answerer.address(), mad.into_bytes()).timeout(PATIENCE / 2);
    let start = Instant::now();
    asker.send(&request)?;
    let response = asker.recv()?;
    let took = start.elapsed();
    let header = response.mad_header().map_err(|e| e.to_string())?;
    let same = response.mad.get(VendorMad::DATA..) == request.mad.get(VendorMad::DATA..);
    if response.header.status != 0 || header.method != Method::GET_RESP || !same {
        return Err(format!(
            "request {n} was answered with status {}, method {:?}, {} bytes",
            response.header.status,
            header.method,
            if same { "the same" } else { "other" }
        ));
    }
    if header.tid().low() != tid.low() {
        return Err(format!("request {tid} was answered as {}", header.tid()));
    }
    Ok(took)
}

// Answers requests with their own bytes; says how many.
fn answer_until(answerer: &End, done: &AtomicBool) -> Result<usize> {
    let mut count = 0;
    loop {
        let mut packet = match answerer.port.recv_timeout(Duration::from_millis(50)) {
            Ok(packet) => packet,
            Err(Error::TimedOut) if done.load(Ordering::Acquire) => return Ok(count),
            Err(Error::TimedOut) => continue,
            Err(e) => return Err(format!("{}: {e}", answerer.name)),
        };
        // A received header is an address to answer to as it is.
        packet.agent = answerer.agent;
        packet.mad[3] = Method::GET_RESP.0;
        answerer.send(&packet)?;
        count += 1;
    }
}

// A request that nobody answers.
fn timeout(asker: &End, answerer: &End) -> Result<()> {
    println!(
        "\nA request that {} receives, but does not answer",
        answerer.name
    );
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, Tid::new(0x2000_0000));
    let request = Packet::new(asker.agent, &answerer.address(), mad.into_bytes()).timeout(TIMEOUT);
    let start = Instant::now();
    asker.send(&request)?;
    let end = asker.recv()?;
    let took = start.elapsed();
    answerer.recv()?;
    let status = end.header.status;
    println!(
        "  asked to wait {}; the request came back after {}, with status {status}{}",
        human(TIMEOUT),
        human(took),
        if status == 110 { " (ETIMEDOUT)" } else { "" }
    );
    if status != 110 {
        return Err("it should have come back with status 110".into());
    }
    if took + TICK < TIMEOUT {
        return Err("it came back early".into());
    }
    Ok(())
}

// One long message.
fn message(asker: &End, answerer: &End) -> Result<()> {
    println!(
        "\nA message of {} KiB from {} to {} (RMPP)",
        MESSAGE >> 10,
        asker.name,
        answerer.name
    );
    // A linear congruential generator: bytes without a short period.
    let mut state = 1u32;
    let data: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    })
    .take(MESSAGE)
    .collect();
    let mad = VendorMad::new(CLASS, OUI, Method::SEND, Tid::new(0x3000_0000))
        .rmpp()
        .payload(&data)
        .into_bytes();
    let length = mad.len();
    let packet = Packet::new(asker.agent, &answerer.address(), mad);
    let sum = crc32fast::hash(&data);
    let start = Instant::now();
    asker.send(&packet)?;
    println!(
        "  sent      CRC-32 {sum:08x}, one write() of {} bytes, {} segments on the wire",
        Layout::New.header_len() + length,
        data.len().div_ceil(256 - VendorMad::DATA),
    );
    let got = answerer.recv()?;
    let took = start.elapsed();
    let received = got.mad.get(VendorMad::DATA..).unwrap_or_default();
    println!(
        "  received  CRC-32 {:08x}, one read() of {} bytes, after {}",
        crc32fast::hash(received),
        got.header.length,
        human(took),
    );
    if received != data {
        return Err("what was received is not what was sent".into());
    }
    Ok(())
}

// A time as a person would write it.
fn human(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    if us < 1e3 {
        format!("{us:.0} µs")
    } else if us < 1e6 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_readable() {
        assert_eq!(human(Duration::from_micros(412)), "412 µs");
        assert_eq!(human(Duration::from_micros(1234)), "1.2 ms");
        assert_eq!(human(Duration::from_millis(2500)), "2.50 s");
    }
}
