// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `umadctl rmpp`: long messages from one port of this machine to another; the kernel cuts them into
//! segments, and puts them together. Every byte is checked.

use std::time::{Duration, Instant};

use serde::Serialize;
use umad::{Method, Packet, Tid, VendorMad};

use crate::ends::{Ends, Received, Way};
use crate::failure::{Failure, Outcome};
use crate::output::{human, print, print_json, Format, Times};
use crate::ports;
use crate::signals::Interrupts;

/// Payload of a segment.
const SEGMENT: usize = umad::abi::MAD_LEN - VendorMad::DATA;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// From port to port.
    pub way: Way,
    /// So many messages; 0: until Ctrl-C.
    pub count: u32,
    /// Bytes of a message.
    pub size: usize,
    /// How long a message may take.
    pub timeout: Duration,
}

/// What `--json` prints.
#[derive(Debug, Default, Serialize)]
struct Sums {
    from: String,
    to: String,
    address: String,
    message_bytes: usize,
    sent: u32,
    arrived: u32,
    lost: u32,
    /// Messages that arrived with other bytes.
    wrong: u32,
    times: Option<Times>,
    bytes_per_second: Option<f64>,
}

/// Does it.
pub fn run(wanted: &Wanted, format: Format) -> Outcome {
    let interrupts = Interrupts::new()?;
    let ends = wanted.way.open(Method::SEND, 1)?;
    let mut sums = Sums {
        from: ports::node(&ends.from.which),
        to: ports::node(&ends.to.which),
        address: ends.words.clone(),
        message_bytes: wanted.size,
        ..Sums::default()
    };
    if format == Format::Text {
        print(format_args!(
            "From {} to {}, {}: messages of {} bytes, {} segments each\n",
            ends.from.name(),
            ends.to.name(),
            sums.address,
            wanted.size,
            wanted.size.div_ceil(SEGMENT).max(1)
        ))?;
    }
    let mut times = Vec::new();
    while wanted.count == 0 || sums.sent < wanted.count {
        let sequence = sums.sent.wrapping_add(1);
        let data = pattern(sequence, wanted.size);
        let tid = Tid::new(sequence);
        let begin = Instant::now();
        send(wanted, &ends, tid, &data)?;
        let got = ends.to.recv_tid(&interrupts, tid, wanted.timeout)?;
        let took = begin.elapsed();
        let said = match got {
            Received::Interrupted => break,
            Received::Packet(got) if is_message(payload(&got), &data) => {
                sums.arrived += 1;
                times.push(took);
                format!("{}, all bytes right", human(took))
            }
            Received::Packet(got) => {
                sums.wrong += 1;
                let got = payload(&got);
                let at = got.iter().zip(&data).position(|(a, b)| a != b);
                format!(
                    "{} bytes arrived, wrong from byte {}",
                    got.len(),
                    at.unwrap_or(got.len().min(data.len()))
                )
            }
            Received::Nothing => {
                sums.lost += 1;
                format!("not there after {}", human(wanted.timeout))
            }
        };
        sums.sent = sequence;
        if format == Format::Text && !wanted.way.quiet {
            print(format_args!("{:>5}: {said}\n", sums.sent))?;
        }
        if interrupts.wait(Duration::ZERO)? {
            break;
        }
    }
    finish(sums, &times, format)
}

fn finish(mut sums: Sums, times: &[Duration], format: Format) -> Outcome {
    let seconds: f64 = times.iter().map(Duration::as_secs_f64).sum();
    sums.times = Times::of(times);
    // Sizes of messages are exact in a double.
    #[allow(clippy::cast_precision_loss)]
    let bytes = sums.message_bytes as f64 * f64::from(sums.arrived);
    sums.bytes_per_second = (seconds > 0.0).then(|| (bytes / seconds).round());
    match format {
        Format::Json => print_json(&sums)?,
        Format::Text => {
            print(format_args!(
                "\n{} sent, {} arrived, {} lost, {} with wrong bytes\n",
                sums.sent, sums.arrived, sums.lost, sums.wrong
            ))?;
            if let (Some(times), Some(rate)) = (&sums.times, sums.bytes_per_second) {
                print(format_args!("message: {times}; {:.2} MB/s\n", rate / 1e6))?;
            }
        }
    }
    if sums.lost > 0 || sums.wrong > 0 {
        return Err(Failure::wrong(format!(
            "{} of {} messages failed",
            sums.lost + sums.wrong,
            sums.sent
        )));
    }
    Ok(())
}

fn send(wanted: &Wanted, ends: &Ends, tid: Tid, data: &[u8]) -> Outcome {
    let (service, sender) = (&wanted.way.service, &ends.from);
    let mad = VendorMad::new(service.class, service.oui, Method::SEND, tid)
        .rmpp()
        .payload(data);
    sender.send(&Packet::new(sender.agent, &ends.address, mad.into_bytes()))
}

/// What a message says.
fn payload(packet: &Packet) -> &[u8] {
    packet.mad.get(VendorMad::DATA..).unwrap_or_default()
}

/// Whether what arrived is the message. One that is shorter than a segment may come as a whole one.
fn is_message(got: &[u8], data: &[u8]) -> bool {
    let most = data.len().max(SEGMENT);
    got.len() <= most
        && got
            .strip_prefix(data)
            .is_some_and(|rest| rest.iter().all(|byte| *byte == 0))
}

/// Bytes without a short period, others for each message (a linear congruential generator).
fn pattern(sequence: u32, size: usize) -> Vec<u8> {
    let mut state = sequence;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_differ() {
        assert_ne!(pattern(1, 64), pattern(2, 64));
        assert_eq!(pattern(1, 64), pattern(1, 65)[..64]);
        let data = pattern(1, 300);
        assert!(is_message(&data, &data));
        assert!(!is_message(&data[..299], &data));
        assert!(!is_message(&[&data[..], &[0]].concat(), &data));
        assert!(is_message(&[&data[..10], &[0; 206]].concat(), &data[..10]));
        assert!(!is_message(&[&data[..10], &[1; 206]].concat(), &data[..10]));
    }
}
