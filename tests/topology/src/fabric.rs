// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! A topology: nodes, and the cables between their ports.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// What kind of node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A switch.
    Switch,
    /// A channel adapter.
    Ca,
    /// A router.
    Router,
}

/// The far end of a cable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Id of the node.
    pub node: String,
    /// Number of the port.
    pub port: u8,
    /// Width and speed, as in `4xEDR`.
    pub rate: String,
    /// Where this was read; 0 if it was made.
    pub line: usize,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What kind.
    pub kind: Kind,
    /// A name that no other node has: `S-` or `H-` and the GUID, usually.
    pub id: String,
    /// NodeDescription.
    pub description: String,
    /// NodeGUID.
    pub guid: u64,
    /// SystemImageGUID.
    pub system_guid: u64,
    /// VendorID and DeviceID.
    pub vendor: (u32, u32),
    /// NumPorts.
    pub ports: u8,
    /// What the ports are connected to.
    pub links: BTreeMap<u8, Link>,
    /// Where this was read; 0 if it was made.
    pub line: usize,
}

/// A topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fabric {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The node that the topology was seen from.
    pub origin: Option<u64>,
}

/// What is wrong with a topology, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The line, from 1 on; 0 if it is about none.
    pub line: usize,
    /// What.
    pub why: String,
}

impl Wrong {
    /// Something wrong in a line.
    pub fn new(line: usize, why: impl Into<String>) -> Self {
        Self {
            line,
            why: why.into(),
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.why),
            line => write!(f, "line {line}: {}", self.why),
        }
    }
}

/// Bytes that ibsim has for the id of a node that a client wants to be at.
const LONGEST_ID: usize = 31;

impl Fabric {
    /// How many nodes of a kind there are.
    pub fn count(&self, kind: Kind) -> usize {
        self.nodes.iter().filter(|node| node.kind == kind).count()
    }

    /// How many cables there are.
    pub fn cables(&self) -> usize {
        self.nodes
            .iter()
            .map(|node| node.links.len())
            .sum::<usize>()
            / 2
    }

    /// Ports of all nodes, ports 0 of switches included.
    pub fn ports(&self) -> usize {
        self.nodes
            .iter()
            .map(|node| usize::from(node.ports) + 1)
            .sum()
    }

    /// Checks that ids and GUIDs are there once, and that both ends of each cable agree.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), Wrong> {
        if self.nodes.is_empty() {
            return Err(Wrong::new(0, "there is no node in it"));
        }
        let mut by_id = HashMap::new();
        let mut guids = HashMap::new();
        for node in &self.nodes {
            let at = node.line;
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
            if node.id.is_empty() || node.id.len() > LONGEST_ID || !node.id.chars().all(plain) {
                let why = format!("\"{}\" is no id of a node that ibsim could use", node.id);
                return Err(Wrong::new(at, why));
            }
            if let Some(other) = by_id.insert(&*node.id, node) {
                let why = format!("node \"{}\" is in line {}, too", node.id, other.line);
                return Err(Wrong::new(at, why));
            }
            if let Some(other) = guids.insert(node.guid, node) {
                let why = format!(
                    "node \"{}\" has the GUID {:#018x}, as \"{}\" in line {} has",
                    node.id, node.guid, other.id, other.line
                );
                return Err(Wrong::new(at, why));
            }
        }
        for node in &self.nodes {
            for (port, link) in &node.links {
                check_link(node, *port, link, &by_id)?;
            }
        }
        Ok(())
    }

    /// ibsim gives a channel adapter's ports the GUIDs behind that of the node, whatever they really are, so
    /// those of real nodes can collide. Nodes where that would happen get GUIDs of their own. Says how many.
    pub fn part_guids(&mut self) -> usize {
        const FREE: u64 = 0x0200_0000_00cc_0000;
        let mut taken: HashSet<u64> = self
            .nodes
            .iter()
            .filter(|node| node.kind == Kind::Switch)
            .map(|node| node.guid)
            .collect();
        let (mut changed, mut next) = (0, FREE);
        for node in &mut self.nodes {
            if node.kind == Kind::Switch {
                continue;
            }
            let ports = u64::from(node.ports);
            let own = |guid: u64| (1..=ports).map(move |n| guid.wrapping_add(n));
            if own(node.guid).any(|guid| taken.contains(&guid)) {
                node.guid = next;
                next += 0x100;
                changed += 1;
            }
            taken.extend(own(node.guid));
        }
        changed
    }

    /// Channel adapters whose first port is connected: ibsim's clients can be there. The one that the
    /// topology was seen from comes first.
    pub fn places(&self) -> Vec<&Node> {
        let usable = |node: &&Node| node.kind == Kind::Ca && node.links.contains_key(&1);
        // Switches have adapters inside, for reductions, that are no hosts.
        let inside = |node: &Node| node.description.contains("Aggregation Node");
        let mut places: Vec<&Node> = self.nodes.iter().filter(usable).collect();
        places.sort_by_key(|node| {
            let from_here = self.origin.is_some_and(|guid| guid == node.guid);
            (!from_here, inside(node))
        });
        places
    }

    /// The node that somebody names: by its id, its GUID or its description.
    pub fn find(&self, name: &str) -> Option<&Node> {
        let hex = name.strip_prefix("0x").unwrap_or(name);
        let guid = u64::from_str_radix(hex, 16).ok();
        let is = |node: &&Node| {
            node.id == name
                || node.description == name
                || guid.is_some_and(|guid| guid == node.guid)
        };
        self.nodes.iter().find(is)
    }

    /// Leaves out the nodes that cannot be reached from one. Says how many.
    pub fn keep_reachable(&mut self, from: &str) -> usize {
        let reached: HashSet<String> = match self.find(from) {
            Some(node) => self.reach(node).into_iter().map(str::to_owned).collect(),
            None => return 0,
        };
        let before = self.nodes.len();
        self.nodes.retain(|node| reached.contains(&node.id));
        before - self.nodes.len()
    }

    /// The ids of the nodes that can be reached from one, itself among them.
    pub fn reach<'a>(&'a self, from: &'a Node) -> HashSet<&'a str> {
        let by_id: HashMap<&str, &Node> = self.nodes.iter().map(|node| (&*node.id, node)).collect();
        let mut seen = HashSet::from([&*from.id]);
        let mut todo = vec![from];
        while let Some(node) = todo.pop() {
            for link in node.links.values() {
                if let Some(next) = by_id.get(&*link.node) {
                    if seen.insert(&next.id) {
                        todo.push(next);
                    }
                }
            }
        }
        seen
    }
}

fn check_link(
    node: &Node,
    port: u8,
    link: &Link,
    by_id: &HashMap<&str, &Node>,
) -> Result<(), Wrong> {
    let cable = format!(
        "\"{}\"[{port}] is connected to \"{}\"[{}]",
        node.id, link.node, link.port
    );
    let Some(peer) = by_id.get(&*link.node) else {
        return Err(Wrong::new(
            link.line,
            format!("{cable}, a node that is missing (is the file complete?)"),
        ));
    };
    let Some(back) = peer.links.get(&link.port) else {
        let why = if link.port > peer.ports {
            format!("{cable}, which has {} ports only", peer.ports)
        } else {
            format!("{cable}, which does not say so")
        };
        return Err(Wrong::new(link.line, why));
    };
    if back.node != node.id || back.port != port {
        let why = format!(
            "{cable}, but that says in line {} that it is connected to \"{}\"[{}]",
            back.line, back.node, back.port
        );
        return Err(Wrong::new(link.line, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fat_tree;

    fn six() -> Fabric {
        fat_tree::make(6, None).expect("a fabric")
    }

    fn wrong(change: impl FnOnce(&mut Fabric)) -> String {
        let mut fabric = six();
        change(&mut fabric);
        fabric.check().expect_err("it is wrong").to_string()
    }

    #[test]
    fn what_is_wrong_is_found() {
        assert_eq!(six().check(), Ok(()));
        let empty = Fabric::default().check().expect_err("it is wrong");
        assert_eq!(empty.to_string(), "there is no node in it");
        assert!(wrong(|f| f.nodes[1].id = f.nodes[0].id.clone()).contains("too"));
        assert!(wrong(|f| f.nodes[1].guid = f.nodes[0].guid).contains("GUID"));
        assert!(wrong(|f| f.nodes[1].id = "a b".into()).contains("no id"));
        assert!(wrong(|f| drop(f.nodes.pop())).contains("missing"));
        let pulled = wrong(|f| {
            let port = *f.nodes[5].links.keys().next().expect("a port");
            f.nodes[5].links.remove(&port);
        });
        assert!(pulled.contains("does not say so"), "{pulled}");
        let moved = wrong(|f| {
            if let Some(link) = f.nodes[5].links.values_mut().next() {
                link.port += 1;
                link.line = 77;
            }
        });
        assert!(moved.contains("connected to"), "{moved}");
    }

    #[test]
    fn port_guids_are_parted() {
        let mut fabric = six();
        let cas: Vec<usize> = (0..6)
            .filter(|n| fabric.nodes[*n].kind == Kind::Ca)
            .collect();
        assert_eq!(fabric.clone().part_guids(), 0);
        fabric.nodes[cas[0]].guid = 0x100;
        fabric.nodes[cas[0]].ports = 2;
        fabric.nodes[cas[1]].guid = 0x101;
        assert_eq!(fabric.part_guids(), 1);
        assert_eq!(fabric.nodes[cas[0]].guid, 0x100);
        assert_ne!(fabric.nodes[cas[1]].guid, 0x101);
        assert_eq!(fabric.check(), Ok(()));
    }

    #[test]
    fn places_for_clients() {
        let mut fabric = six();
        let last = fabric.places().last().map(|node| node.guid);
        fabric.origin = last;
        assert_eq!(fabric.places().first().map(|node| node.guid), last);
        assert_eq!(fabric.places().len(), 3);
        let id = fabric.places()[0].id.clone();
        let description = fabric.places()[0].description.clone();
        for name in [&id, &description, &format!("{:#x}", last.unwrap_or(0))] {
            assert_eq!(fabric.find(name).map(|node| &node.id), Some(&id));
        }
        assert!(fabric.find("nobody").is_none());
        assert_eq!(fabric.reach(fabric.places()[0]).len(), 6);
        let other = fabric.places()[1].id.clone();
        assert_eq!(fabric.keep_reachable(&other), 0);
        // The cable between host and leaf.
        for node in &mut fabric.nodes {
            node.links
                .retain(|_, link| node.id != id && link.node != id);
        }
        assert_eq!(fabric.places().len(), 2);
        assert_eq!(fabric.keep_reachable(&other), 1);
        assert_eq!((fabric.nodes.len(), fabric.check()), (5, Ok(())));
    }
}
