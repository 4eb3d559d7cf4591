// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl ping`: round trips of vendor-class MADs between two ports of this machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use umad::{Address, Method, Packet, Tid, VendorMad};

use crate::ends::{End, Ends, Received, Way, LOOK};
use crate::failure::{Failure, Outcome};
use crate::output::{human, print, print_json, Format, Times};
use crate::ports;
use crate::signals::Interrupts;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// From the port that asks to the one that answers.
    pub way: Way,
    /// So many round trips; 0: until Ctrl-C.
    pub count: u32,
    /// From one request to the next.
    pub interval: Duration,
    /// How long to wait for an answer.
    pub timeout: Duration,
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
    let ends = wanted.way.open(Method::GET, 0)?;
    let mut sums = Sums {
        from: ports::node(&ends.from.which),
        to: ports::node(&ends.to.which),
        address: ends.words.clone(),
        ..Sums::default()
    };
    if format == Format::Text {
        print(format_args!(
            "From {} to {}, {}: class {:#04x}, 256 bytes\n",
            ends.from.name(),
            ends.to.name(),
            sums.address,
            wanted.way.service.class
        ))?;
    }
    let done = AtomicBool::new(false);
    let mut times = Vec::new();
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| answer(&ends.to, &done));
        let asked = ask(wanted, format, &interrupts, &ends, &mut sums, &mut times);
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
    ends: &Ends,
    sums: &mut Sums,
    times: &mut Vec<Duration>,
) -> Outcome {
    let told = format == Format::Text && !wanted.way.quiet;
    loop {
        let sequence = sums.sent.wrapping_add(1);
        let begin = Instant::now();
        let answer = round_trip(wanted, interrupts, ends, sequence)?;
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
    ends: &Ends,
    sequence: u32,
) -> Outcome<Answer> {
    let tid = Tid::new(sequence);
    let service = &wanted.way.service;
    let mad = VendorMad::new(service.class, service.oui, Method::GET, tid)
        .payload(format!("umadctl ping {} {sequence}", std::process::id()).as_bytes());
    let asker = &ends.from;
    let request = Packet::new(asker.agent, &ends.address, mad.into_bytes()).timeout(wanted.timeout);
    asker.send(&request)?;
    // The kernel says when it gives up, which it may do late.
    let patience = wanted.timeout * 2 + Duration::from_secs(5);
    let packet = match asker.recv_tid(interrupts, tid, patience)? {
        Received::Packet(packet) => packet,
        Received::Nothing => return Ok(Answer::Lost),
        Received::Interrupted => return Ok(Answer::Interrupted),
    };
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
    Ok(Answer::Right)
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
