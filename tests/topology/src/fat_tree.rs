// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Fat trees: leaf switches with half of their ports to hosts and half upwards; above them spine switches, or,
//! where these would not have ports enough, pods of leaves and middle switches below a core.
//! The same numbers give the same fabric, name by name.

use std::collections::BTreeMap;

use crate::fabric::{Fabric, Kind, Link, Node};

/// Ports of the switches of a fabric of ordinary size.
const RADIX: usize = 36;
/// Ports of the switches of a tiny one: it is to have several switches, too.
const TINY_RADIX: usize = 4;
const TINY: usize = 16;
/// Nodes that ibsim and OpenSM are known to bear.
pub const MOST: usize = 10_000;
/// GUIDs of the nodes, locally administered.
const SWITCH_GUID: u64 = 0x0200_0000_0051_0000;
const CA_GUID: u64 = 0x0200_0000_00ca_0000;
/// Vendor (an OUI for documentation) and devices.
const VENDOR: u32 = 0x5e;
const RATE: &str = "4xEDR";

/// How many switches of which sort a number of hosts needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Plan {
    radix: usize,
    hosts: usize,
    leaves: usize,
    /// Middle switches, as many as leaves; none with two levels.
    middles: usize,
    spines: usize,
}

impl Plan {
    fn new(hosts: usize, radix: usize) -> Self {
        let half = radix / 2;
        let leaves = hosts.div_ceil(half);
        let middles = if leaves > radix { leaves } else { 0 };
        // Half as many as there are below, since all of a spine's ports go down.
        let spines = if leaves > 1 { leaves.div_ceil(2) } else { 0 };
        Self {
            radix,
            hosts,
            leaves,
            middles,
            spines,
        }
    }

    fn nodes(&self) -> usize {
        self.hosts + self.leaves + self.middles + self.spines
    }
}

/// A fat tree with exactly so many nodes, hosts and switches together; of switches with `radix` ports, or
/// what is usual.
///
/// # Errors
///
/// If the numbers are out of range.
pub fn make(nodes: usize, radix: Option<usize>) -> Result<Fabric, String> {
    if !(3..=MOST).contains(&nodes) {
        return Err(format!("{nodes} nodes: it must be from 3 to {MOST}"));
    }
    let usual = if nodes <= TINY { TINY_RADIX } else { RADIX };
    let radix = radix.unwrap_or(usual);
    if !(4..=64).contains(&radix) || radix % 2 != 0 {
        return Err(format!("{radix} ports: it must be even, and from 4 to 64"));
    }
    let mut plan = (1..nodes)
        .map(|hosts| Plan::new(hosts, radix))
        .take_while(|plan| plan.nodes() <= nodes)
        .last()
        .ok_or("there is no such fabric")?;
    // One host more would need several switches more; then there are spines to spare.
    plan.spines += nodes - plan.nodes();
    let below = plan.middles.max(plan.leaves);
    if plan.leaves.div_ceil(radix / 2) > radix || plan.spines > below * radix / 2 {
        return Err(format!("{nodes} nodes do not fit with {radix} ports"));
    }
    Ok(build(&plan))
}

fn build(plan: &Plan) -> Fabric {
    let half = plan.radix / 2;
    let mut maker = Maker::default();
    let leaves: Vec<usize> = (0..plan.leaves)
        .map(|n| maker.switch(&format!("leaf-{:03}", n + 1), plan.radix))
        .collect();
    let mut below = leaves.clone();
    if plan.middles > 0 {
        below = (0..plan.middles)
            .map(|n| maker.switch(&format!("middle-{:03}", n + 1), plan.radix))
            .collect();
        // A pod is as many leaves as a middle switch has ports for.
        for (leaves, middles) in leaves.chunks(half).zip(below.chunks(half)) {
            maker.spread(leaves, middles, half);
        }
    }
    let spines: Vec<usize> = (0..plan.spines)
        .map(|n| maker.switch(&format!("spine-{:03}", n + 1), plan.radix))
        .collect();
    // The ports of leaves (or of middle switches) for this are the upper half.
    maker.spread(&below, &spines, half);
    for host in 0..plan.hosts {
        let ca = maker.ca(&format!("node-{:04} hca-1", host + 1));
        maker.connect((leaves[host / half], host % half + 1), (ca, 1));
    }
    Fabric {
        nodes: maker.nodes,
        origin: None,
    }
}

#[derive(Default)]
struct Maker {
    nodes: Vec<Node>,
    cas: u64,
    /// Ports of each node that are taken from below.
    taken: Vec<usize>,
}

impl Maker {
    fn push(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.taken.push(0);
        self.nodes.len() - 1
    }

    fn switch(&mut self, name: &str, radix: usize) -> usize {
        let guid = SWITCH_GUID + u64::try_from(self.nodes.len()).unwrap_or(0);
        self.push(Node {
            kind: Kind::Switch,
            id: format!("S-{guid:016x}"),
            description: name.to_owned(),
            guid,
            system_guid: guid,
            vendor: (VENDOR, 2),
            ports: u8::try_from(radix).unwrap_or(u8::MAX),
            links: BTreeMap::new(),
            line: 0,
        })
    }

    fn ca(&mut self, name: &str) -> usize {
        let guid = CA_GUID + 0x10 * self.cas;
        self.cas += 1;
        self.push(Node {
            kind: Kind::Ca,
            id: format!("H-{guid:016x}"),
            description: name.to_owned(),
            guid,
            system_guid: guid,
            vendor: (VENDOR, 1),
            ports: 1,
            links: BTreeMap::new(),
            line: 0,
        })
    }

    // Connects ports `half + 1` and on of each lower switch to the upper ones in turn, each beginning with
    // another one; these take their ports in order.
    fn spread(&mut self, lower: &[usize], upper: &[usize], half: usize) {
        for (first, low) in lower.iter().enumerate() {
            for nth in 0..half {
                let tries = upper.len();
                let next = (0..tries)
                    .map(|n| upper[(first + nth + n) % tries])
                    .find(|up| self.taken[*up] < self.room(*up, half));
                let Some(up) = next else { return };
                self.taken[up] += 1;
                let up_port = self.taken[up];
                self.connect((*low, half + 1 + nth), (up, up_port));
            }
        }
    }

    // Ports that a switch has for those below it.
    fn room(&self, node: usize, half: usize) -> usize {
        if self.nodes[node].description.starts_with("middle") {
            half
        } else {
            2 * half
        }
    }

    fn connect(&mut self, one: (usize, usize), other: (usize, usize)) {
        for ((from, port), (to, to_port)) in [(one, other), (other, one)] {
            let number = |port: usize| u8::try_from(port).unwrap_or(u8::MAX);
            let link = Link {
                node: self.nodes[to].id.clone(),
                port: number(to_port),
                rate: RATE.to_owned(),
                line: 0,
            };
            self.nodes[from].links.insert(number(port), link);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(fabric: &Fabric) -> (usize, usize) {
        (fabric.count(Kind::Switch), fabric.count(Kind::Ca))
    }

    #[test]
    fn exactly_as_many_as_wanted_and_all_connected() {
        for nodes in (3..120).chain([279, 280, 281, 647, 648, 700, 701, 1059, 1060, 2000]) {
            let fabric = make(nodes, None).expect("a fabric");
            assert_eq!(fabric.nodes.len(), nodes);
            assert_eq!(fabric.check(), Ok(()), "{nodes}");
            assert_eq!(fabric.reach(&fabric.nodes[0]).len(), nodes, "{nodes}");
            let hosts = fabric.places();
            assert_eq!(hosts.len(), fabric.count(Kind::Ca));
            assert!(fabric.nodes.iter().all(|node| node
                .links
                .keys()
                .all(|port| (1..=node.ports).contains(port))));
        }
    }

    #[test]
    fn shapes() {
        assert_eq!(counts(&make(6, None).expect("a fabric")), (3, 3));
        assert_eq!(counts(&make(280, None).expect("a fabric")), (23, 257));
        let large = make(1060, None).expect("a fabric");
        assert_eq!(counts(&large), (130, 930));
        assert!(large.nodes.iter().any(|n| n.description == "middle-052"));
        assert_eq!(counts(&make(1060, Some(64)).expect("a fabric")), (48, 1012));
    }

    #[test]
    fn each_time_the_same() {
        assert_eq!(make(280, None), make(280, None));
    }

    #[test]
    fn what_does_not_go() {
        assert!(make(2, None).is_err());
        assert!(make(MOST + 1, None).is_err());
        assert!(make(10, Some(5)).is_err());
        assert!(make(9000, Some(4)).is_err());
    }
}
