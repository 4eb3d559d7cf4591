// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl ping`: round trips of vendor-class MADs between two ports of this machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use umad::{Address, Method, Packet, Registration, Tid, VendorMad};

use crate::ends::{address, End, Received, Routing, Service, LOOK};
use crate::failure::{Failure, Outcome};
use crate::output::{human, print, print_json, Format, Times};
use crate::ports;
use crate::signals::Interrupts;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The port that asks.
    pub from: String,
    /// The port that answers.
    pub to: String,
    /// So many round trips; 0: until Ctrl-C.
    pub count: u32,
    /// From one request to the next.
    pub interval: Duration,
    /// How long to wait for an answer.
    pub timeout: Duration,
    /// For whom the agents are.
    pub service: Service,
    /// The way.
    pub routing: Routing,
    /// Only the sums.
    pub quiet: bool,
}

/// What `--json` prints.
#[derive(Debug, Default, Serialize)]
struct Sums {
    from: String,
    to: String,
    address: String,
    sent: u32,
    answered: u32,
    lost: u32,
    /// Answers whose bytes were not those of the request.
    wrong: u32,
    times: Option<Times>,
}

enum Answer {
    Right,
    Wrong(String),
    Lost,
    Interrupted,
}

/// Does it.
pub fn run(wanted: &Wanted, format: Format) -> Outcome {
    let interrupts = Interrupts::new()?;
    let (from, to) = (ports::find(&wanted.from)?, ports::find(&wanted.to)?);
    let (address, way) = address(&from, &to, &wanted.routing)?;
    let service = Registration::class(wanted.service.class, 1).oui(wanted.service.oui);
    let answerer = End::open(&to, &service.methods(&[Method::GET]))?;
    let asker = End::open(&from, &service)?;
    let mut sums = Sums {
        from: ports::node(&from),
        to: ports::node(&to),
        address: way,
        ..Sums::default()
    };
    if format == Format::Text {
        print(format_args!(
            "From {} to {}, {}: class {:#04x}, 256 bytes\n",
            asker.name(),
            answerer.name(),
            sums.address,
            wanted.service.class
        ))?;
    }
    let done = AtomicBool::new(false);
    let mut times = Vec::new();
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| answer(&answerer, &done));
        let asked = ask(
            wanted,
            format,
            &interrupts,
            &asker,
            &address,
            &mut sums,
            &mut times,
        );
        done.store(true, Ordering::Release);
        match answers.join() {
            Ok(answered) => asked.and(answered),
            Err(_) => Err(Failure::wrong("the answering thread ended early")),
        }
    })?;
    sums.times = Times::of(&times);
    match format {
        Format::Json => print_json(&sums)?,
        Format::Text => {
            let percent = f64::from(sums.lost) * 100.0 / f64::from(sums.sent.max(1));
            print(format_args!(
                "\n{} sent, {} answered, {} lost ({percent:.1} %){}\n",
                sums.sent,
                sums.answered,
                sums.lost,
                match sums.wrong {
                    0 => String::new(),
                    wrong => format!(", {wrong} with wrong bytes"),
                }
            ))?;
            if let Some(times) = &sums.times {
                print(format_args!("round trip: {times}\n"))?;
            }
        }
    }
    if sums.lost > 0 || sums.wrong > 0 {
        return Err(Failure::wrong(format!(
            "{} of {} round trips failed",
            sums.lost + sums.wrong,
            sums.sent
        )));
    }
    Ok(())
}

fn ask(
    wanted: &Wanted,
    format: Format,
    interrupts: &Interrupts,
    asker: &End,
    address: &Address,
    sums: &mut Sums,
    times: &mut Vec<Duration>,
) -> Outcome {
    let told = format == Format::Text && !wanted.quiet;
    loop {
        let sequence = sums.sent.wrapping_add(1);
        let begin = Instant::now();
        let answer = round_trip(wanted, interrupts, asker, address, sequence)?;
        let took = begin.elapsed();
        let said = match answer {
            Answer::Right => {
                sums.answered += 1;
                times.push(took);
                human(took)
            }
            Answer::Wrong(why) => {
                sums.wrong += 1;
                why
            }
            Answer::Interrupted => return Ok(()),
            Answer::Lost => {
                sums.lost += 1;
                format!("no answer within {}", human(wanted.timeout))
            }
        };
        sums.sent = sequence;
        if told {
            print(format_args!("{sequence:>5}: {said}\n"))?;
        }
        if sums.sent == wanted.count {
            return Ok(());
        }
        if interrupts.wait(wanted.interval.saturating_sub(begin.elapsed()))? {
            return Ok(());
        }
    }
}

fn round_trip(
    wanted: &Wanted,
    interrupts: &Interrupts,
    asker: &End,
    address: &Address,
    sequence: u32,
) -> Outcome<Answer> {
    let tid = Tid::new(sequence);
    let mad = VendorMad::new(wanted.service.class, wanted.service.oui, Method::GET, tid)
        .payload(format!("umadctl ping {} {sequence}", std::process::id()).as_bytes());
    let request = Packet::new(asker.agent, address, mad.into_bytes()).timeout(wanted.timeout);
    asker.send(&request)?;
    // The kernel says when it gives up, which it may do late.
    let end = Instant::now() + wanted.timeout * 2 + Duration::from_secs(5);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let packet = match asker.recv_unless(interrupts, left)? {
            Received::Packet(packet) => packet,
            Received::Nothing => return Ok(Answer::Lost),
            Received::Interrupted => return Ok(Answer::Interrupted),
        };
        // One that was given up by then.
        if packet.tid().is_ok_and(|got| got.low() != tid.low()) {
            continue;
        }
        if packet.header.status != 0 {
            return Ok(Answer::Lost);
        }
        let data = |packet: &Packet| packet.mad.get(VendorMad::DATA..).map(<[u8]>::to_vec);
        let status = packet.mad_header().map_or(0, |header| header.status.get());
        if status != 0 {
            return Ok(Answer::Wrong(format!("answered with status {status:#06x}")));
        }
        if data(&packet) != data(&request) {
            return Ok(Answer::Wrong("answered with other bytes".to_owned()));
        }
        return Ok(Answer::Right);
    }
}

/// Answers requests with their own bytes.
fn answer(answerer: &End, done: &AtomicBool) -> Outcome {
    while !done.load(Ordering::Acquire) {
        let Some(mut packet) = answerer.recv(LOOK)? else {
            continue;
        };
        // The header of a request is an address to answer to; only the Q_Key is not told.
        let mut to = packet.address();
        to.qkey = Address::GSI_QKEY;
        if let Some(method) = packet.mad.get_mut(3) {
            *method = Method::GET_RESP.0;
        }
        answerer.send(&Packet::new(answerer.agent, &to, packet.mad))?;
    }
    Ok(())
}
