// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! The node's own subnet management agent: directed-route SMPs that go nowhere are answered by ibsim's
//! node. Whoever asks waits for it inside of a system call, so there is always an answer: if ibsim does not
//! say anything in time, or is not there, it is what ibsim said last, with the link down.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::mad::{self, Mad, DATA_LEN};
use crate::portinfo::Port;
use crate::route;
use crate::tids::Purpose;

/// Status: the method with this attribute is not supported.
const UNSUPPORTED: u16 = 0x000c;
/// How long ibsim may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// A question of the device that is not answered yet.
struct Question {
    id: u32,
    /// The port that it came through.
    port: u32,
    mad: Mad,
    end: Instant,
}

/// The agent.
#[derive(Default)]
pub struct Agent {
    asked: Vec<Question>,
    /// The last answers, by attribute and modifier.
    known: HashMap<(u16, u32), [u8; DATA_LEN]>,
}

impl Agent {
    /// The device asks. Returns what to ask ibsim: its client is at port 1, so for another port that
    /// has to be said.
    pub fn ask(&mut self, id: u32, port: u32, mad: Mad, now: Instant) -> Mad {
        let mut to_ask = mad.clone();
        if port > 1 && mad.attribute() == mad::PORT_INFO && mad.modifier() & 0xff == 0 {
            to_ask.set_modifier(mad.modifier() | port);
        }
        self.asked.push(Question {
            id,
            port,
            mad,
            end: now + PATIENCE,
        });
        to_ask
    }

    /// What the device's question is about, if it is its port 1.
    pub fn about(&self, id: u32) -> Option<Purpose> {
        let question = self.asked.iter().find(|question| question.id == id)?;
        (question.port <= 1).then(|| route::own_port(&question.mad))?
    }

    /// ibsim has answered. Returns the answer for the device, unless it is too late.
    pub fn answer(&mut self, id: u32, mut mad: Mad) -> Option<Mad> {
        let at = self.asked.iter().position(|question| question.id == id)?;
        let question = self.asked.swap_remove(at);
        if mad.status() == 0 {
            self.learn(&mad);
        }
        mad.set_modifier(question.mad.modifier());
        if mad.attribute() == mad::NODE_INFO && question.port > 1 {
            let mut data = mad.data();
            set_local_port(&mut data, question.port);
            mad.set_data(&data);
        }
        Some(mad)
    }

    /// Remembers an answer.
    pub fn learn(&mut self, mad: &Mad) {
        let key = (mad.attribute(), mad.modifier());
        self.known.insert(key, mad.data());
    }

    /// Questions that have waited for too long, or, without ibsim, all; with answers.
    pub fn overdue(&mut self, now: Instant, all: bool) -> Vec<(u32, Mad)> {
        let (late, rest) = std::mem::take(&mut self.asked)
            .into_iter()
            .partition(|question| all || question.end <= now);
        self.asked = rest;
        let late: Vec<Question> = late;
        late.into_iter()
            .map(|question| (question.id, self.remembered(&question)))
            .collect()
    }

    /// When the first question will have waited for too long.
    pub fn next_end(&self) -> Option<Instant> {
        self.asked.iter().map(|question| question.end).min()
    }

    fn remembered(&self, question: &Question) -> Mad {
        let mut mad = question.mad.clone();
        let known = self.known.get(&(mad.attribute(), mad.modifier()));
        match known {
            Some(data) if mad.method() == mad::GET => {
                let mut data = match mad.attribute() {
                    mad::PORT_INFO => Port::without_link(*data),
                    _ => *data,
                };
                if mad.attribute() == mad::NODE_INFO && question.port > 1 {
                    set_local_port(&mut data, question.port);
                }
                mad.set_data(&data);
                mad.respond(0);
            }
            _ => mad.respond(UNSUPPORTED),
        }
        mad
    }
}

/// Changes a NodeInfo of port 1 to that of another port: its number, and its GUID, which is the node's plus
/// the number.
fn set_local_port(info: &mut [u8; DATA_LEN], port: u32) {
    let node = info[12..20].try_into().map_or(0, u64::from_be_bytes);
    let guid = node.wrapping_add(port.into());
    info[20..28].copy_from_slice(&guid.to_be_bytes());
    info[32] = u8::try_from(port).unwrap_or(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_info() -> Mad {
        let mut mad = Mad::local_get(1, mad::NODE_INFO, 0);
        let mut data = [0; DATA_LEN];
        data[19] = 0x10;
        data[27] = 0x11;
        data[32] = 1;
        mad.set_data(&data);
        mad.respond(0);
        mad
    }

    #[test]
    fn ibsim_answers() {
        let mut agent = Agent::default();
        let now = Instant::now();
        let smp = Mad::local_get(1, mad::NODE_INFO, 0);
        assert_eq!(agent.ask(5, 1, smp.clone(), now), smp);
        assert_eq!(agent.answer(6, node_info()), None, "nobody asked");
        assert_eq!(agent.answer(5, node_info()), Some(node_info()));
        assert_eq!(agent.answer(5, node_info()), None, "once is enough");
        assert!(agent.overdue(now + PATIENCE, false).is_empty());
    }

    #[test]
    fn of_another_port() {
        let mut agent = Agent::default();
        let now = Instant::now();
        agent.ask(5, 2, Mad::local_get(1, mad::NODE_INFO, 0), now);
        let data = agent.answer(5, node_info()).expect("an answer").data();
        assert_eq!((data[27], data[32]), (0x12, 2));
        let smp = agent.ask(6, 2, Mad::local_get(2, mad::PORT_INFO, 0), now);
        assert_eq!(smp.modifier(), 2);
        let answer = agent.answer(6, smp).expect("an answer");
        assert_eq!(answer.modifier(), 0, "as it was asked");
    }

    #[test]
    fn without_ibsim() {
        let mut agent = Agent::default();
        let now = Instant::now();
        agent.learn(&node_info());
        let mut port_info = Mad::local_get(3, mad::PORT_INFO, 1);
        port_info.set_data(&[0x44; DATA_LEN]);
        agent.learn(&port_info);
        for (id, attribute, modifier) in
            [(1, mad::NODE_INFO, 0), (2, mad::PORT_INFO, 1), (3, 0x16, 0)]
        {
            agent.ask(id, 1, Mad::local_get(7, attribute, modifier), now);
        }
        assert!(agent.overdue(now, false).is_empty());
        assert_eq!(agent.next_end(), Some(now + PATIENCE));
        let late = agent.overdue(now, true);
        assert_eq!(late.len(), 3);
        let (ids, mads): (Vec<u32>, Vec<Mad>) = late.into_iter().unzip();
        assert_eq!(ids, [1, 2, 3]);
        assert_eq!(mads[0].data(), node_info().data());
        assert_eq!(mads[1].data()[32], 0x41, "the link is down");
        assert_eq!(mads[2].status(), UNSUPPORTED);
        assert!(mads.iter().all(|mad| mad.is_response() && mad.tid() == 7));
        assert_eq!(agent.next_end(), None);
    }
}
