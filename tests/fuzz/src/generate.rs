// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Makes programs: new ones, and changed ones. The same seed makes the same programs, as long as it is
//! given the same ones to change.

use fastrand::Rng;

use crate::call::{Call, Op, Program};
use crate::field::{Field, Kind, DEVICES, FILES, FIRST_RXE, LAST_TID};

/// Most calls of a program.
const LONGEST: usize = 40;

/// Makes programs from a seed.
pub struct Generator {
    rng: Rng,
    weights: Vec<(u32, Op)>,
    total: u32,
}

impl Generator {
    /// A generator.
    pub fn new(seed: u64) -> Self {
        let mut total = 0;
        let weights = Op::ALL
            .into_iter()
            .map(|op| {
                total += op.spec().weight;
                (total, op)
            })
            .collect();
        Self {
            rng: Rng::with_seed(seed),
            weights,
            total,
        }
    }

    /// The next program: a new one, or one of these, changed.
    pub fn program(&mut self, known: &[Program]) -> Program {
        let mut program = match self.rng.choice(known) {
            Some(old) if self.chance(70) => {
                let mut program = old.clone();
                for _ in 0..self.rng.u32(1..5) {
                    self.change(&mut program, known);
                }
                program
            }
            _ => self.fresh(),
        };
        program.0.truncate(LONGEST);
        tame(&mut program);
        program
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.u32(0..100) < percent
    }

    fn op(&mut self) -> Op {
        let at = self.rng.u32(0..self.total);
        self.weights
            .iter()
            .find(|(end, _)| at < *end)
            .map_or(Op::Write, |(_, op)| *op)
    }

    // Two files that can talk to each other, what they may say, and then whatever comes.
    fn fresh(&mut self) -> Program {
        let mut calls = Vec::new();
        if self.chance(90) {
            self.talk(&mut calls);
        }
        if self.chance(6) {
            // Two who want to be the subnet manager.
            let open = self.call_of(Op::Open).with(Field::Node, 1);
            for file in 2..4 {
                calls.push(
                    open.clone()
                        .with(Field::File, file)
                        .with(Field::Wait, self.rng.u64(0..2)),
                );
            }
            calls.push(Call::new(Op::Close).with(Field::File, 2));
        }
        if self.chance(3) {
            let device = self.rng.u64(0..FIRST_RXE);
            let fail = self.call_of(Op::Fail);
            let unplug = Call::new(Op::Unplug).with(Field::Device, device);
            calls.extend([
                unplug,
                fail,
                Call::new(Op::Plug).with(Field::Device, device),
            ]);
        }
        for _ in 0..self.rng.u32(1..14) {
            let op = self.op();
            calls.push(self.call_of(op));
        }
        Program(calls)
    }

    fn talk(&mut self, calls: &mut Vec<Call>) {
        let pair = self.rng.u64(0..4) * 2;
        let class = *self
            .rng
            .choice(&[0x32, 0x32, 0x32, 0x30, 3, 0x0a, 1])
            .unwrap_or(&0x32);
        let version = if class == 3 { 2 } else { 1 };
        let (qpn, knows_rmpp) = (u64::from(class != 1), !matches!(class, 0x0a | 1));
        for file in 0..2 {
            calls.push(
                Call::new(Op::Open)
                    .with(Field::File, file)
                    .with(Field::Device, pair + file),
            );
            let mut register = Call::new(Op::Register)
                .with(Field::File, file)
                .with(Field::Class, class)
                .with(Field::Version, version)
                .with(Field::Qpn, qpn);
            if knows_rmpp {
                register.set(Field::Rmpp, u64::from(self.chance(70)));
                // The agent does RMPP itself, so it can say what it likes.
                register.set(Field::Flags, u64::from(self.chance(50)));
            }
            if self.chance(15) {
                register.set(Field::Request, 0);
                register.set(Field::Flags, 0);
            }
            if self.chance(8) {
                register = self.call_of(Op::Register).with(Field::File, file);
            }
            calls.push(register);
        }
        for _ in 0..self.rng.u32(1..4) {
            let way = self.rng.u64(0..2);
            let say = Call::new(Op::Write)
                .with(Field::Class, class)
                .with(Field::Version, version)
                .with(Field::Qpn, qpn);
            let say = |from: u64| {
                say.clone()
                    .with(Field::File, from)
                    .with(Field::To, pair + 1 - from)
            };
            let hear = |from: u64| {
                Call::new(Op::Read)
                    .with(Field::File, from)
                    .with(Field::Room, 4096)
            };
            // Until there is something to hear.
            let wait = |from: u64| {
                Call::new(Op::Poll)
                    .with(Field::File, from)
                    .with(Field::Ms, 3)
            };
            let tid = self.rng.u64(1..4);
            match self.rng.u32(0..6) {
                // A request, and its answer, or none.
                0 | 1 => {
                    let method = *self.rng.choice(&[1, 1, 2, 0x12]).unwrap_or(&1);
                    let timeout = *self.rng.choice(&[1, 5, 50]).unwrap_or(&5);
                    let request = say(way)
                        .with(Field::Method, method)
                        .with(Field::Tid, tid)
                        .with(Field::Timeout, timeout);
                    calls.extend([request, wait(1 - way), hear(1 - way)]);
                    let response = say(1 - way)
                        .with(Field::Method, if method == 0x12 { 0x92 } else { 0x81 })
                        .with(Field::Tid, LAST_TID);
                    if knows_rmpp && self.chance(50) {
                        self.segments(calls, &response);
                    } else {
                        calls.push(response);
                    }
                    calls.extend([wait(way), hear(way)]);
                }
                // A long message, and what its receiver says to the first segments, if it is not the kernel.
                2 | 3 if knows_rmpp => {
                    let size = *self.rng.choice(&[300, 1000, 5000, 20_000]).unwrap_or(&1000);
                    let message = say(way)
                        .with(Field::RmppVersion, 1)
                        .with(Field::RmppType, 1)
                        .with(Field::RmppFlags, 1);
                    calls.extend([
                        message
                            .with(Field::Size, size)
                            .with(Field::Timeout, 50)
                            .with(Field::Tid, tid),
                        wait(1 - way),
                    ]);
                    for _ in 0..self.rng.u32(0..4) {
                        let answer = say(1 - way)
                            .with(Field::Method, 0x83)
                            .with(Field::Tid, LAST_TID)
                            .with(Field::RmppVersion, 1)
                            .with(Field::RmppFlags, 1)
                            .with(Field::RmppType, self.rng.u64(2..5))
                            .with(
                                Field::RmppStatus,
                                *self.rng.choice(&[0, 0, 118, 120, 127]).unwrap_or(&0),
                            )
                            .with(Field::Segment, self.rng.u64(0..6))
                            .with(
                                Field::RmppLength,
                                *self
                                    .rng
                                    .choice(&[0, 1, 2, 5, 64, 0xffff_ffff])
                                    .unwrap_or(&1),
                            );
                        calls.extend([hear(1 - way), answer, wait(1 - way)]);
                    }
                    calls.push(hear(way));
                }
                // Segments that never were a message.
                4 if knows_rmpp => {
                    let segment = say(way).with(Field::Method, 3).with(Field::Tid, tid);
                    self.segments(calls, &segment);
                    calls.extend([wait(1 - way), hear(1 - way), hear(way)]);
                }
                _ => calls.extend([say(way).with(Field::Tid, tid), wait(1 - way), hear(1 - way)]),
            }
        }
        // Little of it is not as it should be.
        for _ in 0..self.rng.u32(0..3) {
            let at = self.rng.usize(0..calls.len());
            if let Some(field) = self.rng.choice(calls[at].op.spec().fields) {
                let value = self.value(*field, true);
                calls[at].set(*field, value);
            }
        }
    }

    // Segments of a message: in order, out of it, doubled, missing, with lengths that are lies.
    fn segments(&mut self, calls: &mut Vec<Call>, of: &Call) {
        let count = self.rng.u64(1..5);
        let mut numbers: Vec<u64> = (1..=count).collect();
        match self.rng.u32(0..5) {
            0 => self.rng.shuffle(&mut numbers),
            1 => numbers.push(self.rng.u64(1..=count)),
            2 => drop(numbers.remove(0)),
            _ => (),
        }
        for number in numbers {
            let flags = 1 | (u64::from(number == 1) << 1) | (u64::from(number == count) << 2);
            let length = match (number == 1, number == count) {
                (true, _) => count * 220,
                (_, true) => 100,
                _ => 0,
            };
            let mut segment = of
                .clone()
                .with(Field::RmppVersion, 1)
                .with(Field::RmppType, 1)
                .with(Field::RmppFlags, flags)
                .with(Field::Segment, number)
                .with(Field::RmppLength, length);
            if self.chance(15) {
                segment.set(
                    Field::RmppLength,
                    self.number(Field::RmppLength.spec().kind),
                );
            }
            if self.chance(5) {
                segment.set(Field::RmppFlags, self.number(Field::RmppFlags.spec().kind));
            }
            calls.push(segment);
        }
        if self.chance(25) {
            calls.push(
                of.clone()
                    .with(Field::RmppVersion, 1)
                    .with(Field::RmppType, self.rng.u64(2..5))
                    .with(Field::RmppStatus, 120),
            );
        }
    }

    // Changes a program in one way.
    fn change(&mut self, program: &mut Program, known: &[Program]) {
        let calls = &mut program.0;
        let at = self.rng.usize(0..calls.len().max(1));
        match self.rng.u32(0..10) {
            0..=3 if !calls.is_empty() => {
                let fields = calls[at].op.spec().fields;
                if let Some(field) = self.rng.choice(fields) {
                    let value = self.value(*field, true);
                    calls[at].set(*field, value);
                }
            }
            4 if !calls.is_empty() => {
                calls.remove(at);
            }
            5 if !calls.is_empty() => {
                let call = calls[at].clone();
                calls.insert(at, call);
            }
            6 if !calls.is_empty() => calls[at].aside ^= true,
            7 => {
                if let Some(other) = self.rng.choice(known) {
                    let from = self.rng.usize(0..other.0.len().max(1));
                    calls.truncate(at);
                    calls.extend_from_slice(other.0.get(from..).unwrap_or(&[]));
                }
            }
            8 if calls.len() > 1 => {
                let other = self.rng.usize(0..calls.len());
                calls.swap(at, other);
            }
            _ => {
                let op = self.op();
                let call = self.call_of(op);
                calls.insert(at, call);
            }
        }
    }

    fn call_of(&mut self, op: Op) -> Call {
        let mut call = Call::new(op);
        for field in op.spec().fields {
            // Few arguments are out of the ordinary at once.
            let wild = self.chance(20);
            let value = self.value(*field, wild);
            call.set(*field, value);
        }
        call.aside = self.chance(4);
        call
    }

    // A value: any, or the usual one.
    fn value(&mut self, field: Field, wild: bool) -> u64 {
        let spec = field.spec();
        match (field, spec.kind) {
            (Field::File | Field::Other, _) => match self.chance(85) {
                true => self.rng.u64(0..2),
                false => self.rng.u64(0..FILES as u64),
            },
            (Field::Device | Field::To, _) => match self.chance(95) {
                true => self.rng.u64(0..u64::try_from(DEVICES.len()).unwrap_or(1)),
                false => self.word(spec.kind),
            },
            (
                Field::Fault
                | Field::Change
                | Field::Text
                | Field::Fork
                | Field::Fcntl
                | Field::Where,
                _,
            ) => self.word(spec.kind),
            (Field::Size, _) if self.chance(60) => 256,
            // Few would get far otherwise.
            (
                Field::Mem
                | Field::Abi
                | Field::Header
                | Field::Write
                | Field::Read
                | Field::Node
                | Field::Wait,
                _,
            ) => match self.chance(10) {
                true => self.word(spec.kind),
                false => spec.default,
            },
            (
                Field::Method
                | Field::Tid
                | Field::Size
                | Field::Room
                | Field::RmppVersion
                | Field::RmppType
                | Field::RmppFlags,
                Kind::Number(..),
            )
            | (
                Field::Segment | Field::RmppLength | Field::Timeout | Field::Count | Field::Ms,
                Kind::Number(..),
            ) => self.number(spec.kind),
            _ if !wild => spec.default,
            (_, Kind::Word(_)) => self.word(spec.kind),
            _ => self.number(spec.kind),
        }
    }

    fn word(&mut self, kind: Kind) -> u64 {
        let Kind::Word(words) = kind else { return 0 };
        self.rng
            .u64(0..u64::try_from(words.len()).unwrap_or(1).max(1))
    }

    fn number(&mut self, kind: Kind) -> u64 {
        match kind {
            Kind::Number(good, bound) => match self.rng.choice(good) {
                Some(value) if self.chance(85) => *value,
                _ => self.rng.u64(0..=bound),
            },
            _ => 0,
        }
    }
}

/// Takes out of a program what kernels are known to fail at for reasons that are not umad's.
///
/// A Get (or another request) that nobody owns is answered by `ib_mad` itself; if the device goes at that moment, `ib_core`
/// warns about its own reference count. So whoever pulls a device out sends nothing that is answered.
///
/// A directed-route SMP of InfiniBand's length that stays on an OPA port is copied by `ib_mad` as if it had OPA's, from beyond
/// the end of its buffer (`handle_outgoing_dr_smp`). So there it has OPA's.
pub fn tame(program: &mut Program) {
    let unplugs = program.has(Op::Unplug);
    let opa = |call: &Call| call.op == Op::Open && matches!(call.get(Field::Device), 4 | 5);
    let opens_opa = program.0.iter().any(opa);
    for call in &mut program.0 {
        if opens_opa && call.op == Op::Write && call.get(Field::Class) == 0x81 {
            call.set(Field::Base, 0x80);
        }
        match call.op {
            Op::Write if unplugs => {
                if call.get(Field::Method) & 0x80 == 0 && call.get(Field::Method) != 7 {
                    call.set(Field::Method, 3);
                }
            }
            // Soft-RoCE devices are everybody's.
            Op::Unplug | Op::Plug | Op::Fault | Op::Port => {
                let device = call.get(Field::Device);
                call.set(Field::Device, device % FIRST_RXE);
            }
            _ => (),
        }
        // The kernel is in the middle of them.
        if matches!(call.op, Op::Fail | Op::Netns) {
            call.aside = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(seed: u64) -> Vec<Program> {
        let mut generator = Generator::new(seed);
        let mut known = Vec::new();
        for n in 0..300 {
            let program = generator.program(&known);
            if n % 10 == 0 {
                known.push(program.clone());
            }
        }
        known
    }

    #[test]
    fn a_seed_says_it_all() {
        assert!(some(7) == some(7));
        assert!(some(7) != some(8));
    }

    #[test]
    fn programs_are_bounded_tame_and_can_be_told() {
        for program in some(1) {
            assert!(program.0.len() <= LONGEST);
            assert!(program.to_string().parse::<Program>().expect("a program") == program);
            if program.has(Op::Unplug) {
                let gets = |call: &Call| call.op == Op::Write && call.get(Field::Method) == 1;
                assert!(!program.0.iter().any(gets));
            }
        }
    }
}
