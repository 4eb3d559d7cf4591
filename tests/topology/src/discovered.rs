// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Reads a topology as ibnetdiscover writes it:
//!
//! ```text
//! vendid=0x2c9
//! devid=0xcb20
//! sysimgguid=0x506b4b0300000001
//! switchguid=0x506b4b0300000001(506b4b0300000001)
//! Switch  36 "S-506b4b0300000001"     # "leaf-1" enhanced port 0 lid 1 lmc 0
//! [1]     "H-506b4b0300000102"[1](506b4b0300000103)   # "node-1 mlx5_0" lid 3 4xEDR
//!
//! caguid=0x506b4b0300000102
//! Ca      1 "H-506b4b0300000102"      # "node-1 mlx5_0"
//! [1](506b4b0300000103)   "S-506b4b0300000001"[1]     # lid 3 lmc 0 "leaf-1" lid 1 4xEDR
//! ```

use std::collections::BTreeMap;

use crate::fabric::{Fabric, Kind, Link, Node, Wrong};

/// What stands before a node.
#[derive(Clone, Copy, Default)]
struct Before {
    vendor: u32,
    device: u32,
    system_guid: Option<u64>,
    guid: Option<u64>,
}

/// Reads a topology, and checks it. Also returns notes on lines that were not understood.
///
/// # Errors
///
/// The first thing that is wrong.
pub fn read(text: &str) -> Result<(Fabric, Vec<String>), Wrong> {
    let mut fabric = Fabric::default();
    let mut before = Before::default();
    let mut notes = Vec::new();
    for (line, number) in text.lines().map(str::trim_end).zip(1..) {
        let wrong = |why: String| Wrong::new(number, why);
        let word = line.split([' ', '\t', '=']).next().unwrap_or("");
        if let Some(comment) = line.strip_prefix('#') {
            if let Some(guid) = comment.trim().strip_prefix("Initiated from node ") {
                fabric.origin = guid.split(' ').next().and_then(hex);
            }
        } else if line.trim().is_empty() {
            before = Before::default();
        } else if line.starts_with('[') {
            let node = fabric
                .nodes
                .last_mut()
                .ok_or_else(|| wrong("a port before any node".into()))?;
            port(node, line, number).map_err(wrong)?;
        } else if let Some(kind) = kind(word) {
            let node = header(kind, &line[word.len()..], before, number).map_err(wrong)?;
            fabric.nodes.push(node);
            before = Before::default();
        } else if let Some(value) = line[word.len()..].strip_prefix('=') {
            let value = hex(value).ok_or_else(|| wrong(format!("{word} without a number")));
            let short = |value: u64| u32::try_from(value).unwrap_or(0);
            match word {
                "vendid" => before.vendor = short(value?),
                "devid" => before.device = short(value?),
                "sysimgguid" => before.system_guid = Some(value?),
                "switchguid" | "caguid" | "rtguid" => before.guid = Some(value?),
                _ => notes.push(format!("line {number} is passed over: {line}")),
            }
        } else {
            notes.push(format!("line {number} is passed over: {line}"));
        }
    }
    if text.trim().is_empty() {
        return Err(Wrong::new(0, "it is empty"));
    }
    if fabric.nodes.is_empty() {
        let why = "there is no line \"Switch ...\" or \"Ca ...\" in it: \
                   it is not what ibnetdiscover writes";
        return Err(Wrong::new(0, why));
    }
    fabric.check()?;
    Ok((fabric, notes))
}

fn kind(word: &str) -> Option<Kind> {
    match word {
        "Switch" => Some(Kind::Switch),
        "Ca" | "Hca" => Some(Kind::Ca),
        "Rt" => Some(Kind::Router),
        _ => None,
    }
}

/// A hexadecimal number, up to something that belongs to none.
fn hex(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let end = digits
        .find(|c: char| !c.is_ascii_hexdigit())
        .unwrap_or(digits.len());
    u64::from_str_radix(&digits[..end], 16).ok()
}

/// What stands in quotes at the beginning, and what follows it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    text.trim_start().strip_prefix('"')?.split_once('"')
}

/// A number in brackets at the beginning, and what follows it, without what chassis add: `[ext 5]`, a GUID.
fn bracketed(text: &str) -> Option<(u8, &str)> {
    let (number, mut rest) = text.trim_start().strip_prefix('[')?.split_once(']')?;
    loop {
        let close = match rest.chars().next() {
            Some('[') => ']',
            Some('(') => ')',
            _ => break,
        };
        rest = rest.split_once(close)?.1;
    }
    Some((number.parse().ok()?, rest))
}

/// The description in a comment, and what follows it.
fn described(comment: &str) -> (&str, &str) {
    let Some((_, rest)) = comment.split_once('"') else {
        return ("", comment);
    };
    // A description may have quotes in it; what follows it does not.
    rest.rsplit_once('"').unwrap_or((rest, ""))
}

fn header(kind: Kind, rest: &str, before: Before, line: usize) -> Result<Node, String> {
    let form = "a node should be: Switch or Ca, number of ports, \"id\", # \"description\"";
    let (ports, rest) = rest.trim_start().split_once([' ', '\t']).ok_or(form)?;
    let ports: u8 = ports
        .parse()
        .map_err(|_| format!("\"{ports}\" is no number of ports (1 to 254)"))?;
    if ports == 0 || ports == u8::MAX {
        return Err(format!("{ports} is no number of ports (1 to 254)"));
    }
    let (id, rest) = quoted(rest).ok_or(form)?;
    let (description, _) = described(rest);
    // An id is a letter and the GUID.
    let in_id = id.split_once('-').and_then(|(_, guid)| hex(guid));
    let guid = before
        .guid
        .or(in_id)
        .ok_or_else(|| format!("node \"{id}\" has no GUID"))?;
    Ok(Node {
        kind,
        id: id.to_owned(),
        description: if description.is_empty() {
            id.to_owned()
        } else {
            description.to_owned()
        },
        guid,
        system_guid: before.system_guid.unwrap_or(guid),
        vendor: (before.vendor, before.device),
        ports,
        links: BTreeMap::new(),
        line,
    })
}

/// Whether a word is a width and a speed, as in `4xEDR`.
fn is_rate(word: &str) -> bool {
    word.split_once('x').is_some_and(|(width, speed)| {
        width.parse::<u8>().is_ok() && speed.starts_with(|c: char| c.is_ascii_uppercase())
    })
}

fn port(node: &mut Node, text: &str, line: usize) -> Result<(), String> {
    let form = "a port should be: [port] \"id of the other node\"[its port] # ...";
    let (port, rest) = bracketed(text).ok_or(form)?;
    let (peer, rest) = quoted(rest).ok_or(form)?;
    let (peer_port, rest) = bracketed(rest).ok_or(form)?;
    if port == 0 && node.kind == Kind::Switch {
        // Port 0 is inside.
        return Ok(());
    }
    if port == 0 || port > node.ports {
        return Err(format!(
            "port {port} of \"{}\", which has ports 1 to {}",
            node.id, node.ports
        ));
    }
    let (_, after) = described(rest);
    let rate = after.split_whitespace().find(|word| is_rate(word));
    let link = Link {
        node: peer.to_owned(),
        port: peer_port,
        rate: rate.unwrap_or("4xEDR").to_owned(),
        line,
    };
    if let Some(other) = node.links.insert(port, link) {
        return Err(format!(
            "port {port} of \"{}\" is in line {}, too",
            node.id, other.line
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "\
#
# Topology file: generated on Mon Nov 30 00:00:00 2026
#
# Initiated from node 0000000000000102 port 0000000000000103

vendid=0x2c9
devid=0xcb20
sysimgguid=0x1
switchguid=0x1(1)
Switch\t36 \"S-0000000000000001\"\t\t# \"leaf \"A\"\" enhanced port 0 lid 1 lmc 0
[1][ext 7]\t\"H-0000000000000102\"[1](103) \t\t# \"node-1 mlx5_0\" lid 3 4xEDR
[2]\t\"H-0000000000000202\"[2](204) \t\t# \"node-2 mlx5_0\" lid 4 2xHDR

vendid=0x2c9
devid=0x1017
sysimgguid=0x102
caguid=0x102
Ca\t1 \"H-0000000000000102\"\t\t# \"node-1 mlx5_0\"
[1](103) \t\"S-0000000000000001\"[1][ext 7]\t\t# lid 3 lmc 0 \"leaf \"A\"\" lid 1 4xEDR

caguid=0x202
Ca\t2 \"H-0000000000000202\"\t\t# \"node-2 mlx5_0\"
[2](204) \t\"S-0000000000000001\"[2]\t\t# lid 4 lmc 0 \"leaf \"A\"\" lid 1 2xHDR
";

    #[test]
    fn a_small_one() {
        let (fabric, notes) = read(SMALL).expect("it is fine");
        assert!(notes.is_empty(), "{notes:?}");
        assert_eq!(fabric.nodes.len(), 3);
        assert_eq!((fabric.cables(), fabric.origin), (2, Some(0x102)));
        let leaf = &fabric.nodes[0];
        assert_eq!((leaf.kind, leaf.ports, leaf.guid), (Kind::Switch, 36, 1));
        assert_eq!(leaf.description, "leaf \"A\"");
        assert_eq!(leaf.vendor, (0x2c9, 0xcb20));
        assert_eq!(leaf.links[&2].rate, "2xHDR");
        assert_eq!(leaf.links[&1].rate, "4xEDR");
        assert_eq!(fabric.nodes[2].system_guid, 0x202);
        let places: Vec<&str> = fabric.places().iter().map(|node| &*node.id).collect();
        assert_eq!(
            places,
            ["H-0000000000000102"],
            "its port 1 is not connected"
        );
    }

    /// What ibnetdiscover printed of a fabric with 24 nodes.
    const PRINTED: &str = include_str!("../fixtures/24-nodes.ibnetdiscover");

    #[test]
    fn what_ibnetdiscover_printed() {
        let (fabric, notes) = read(PRINTED).expect("it is fine");
        assert!(notes.is_empty(), "{notes:?}");
        assert_eq!(
            (fabric.count(Kind::Switch), fabric.count(Kind::Ca)),
            (3, 21)
        );
        assert_eq!(fabric.cables(), 57);
        assert_eq!(fabric.places()[0].description, "node-0001 hca-1");
        assert_eq!(fabric.reach(&fabric.nodes[0]).len(), 24);
    }

    fn why(from: &str, to: &str) -> String {
        assert!(SMALL.contains(from), "{from}");
        let broken = SMALL.replacen(from, to, 1);
        read(&broken).expect_err("it is wrong").to_string()
    }

    #[test]
    fn broken_ones() {
        let cases = [
            (
                "Switch\t36",
                "Switch\tmany",
                "line 10: \"many\" is no number of ports",
            ),
            ("Switch\t36", "Switch\t1", "line 12: port 2 of"),
            (
                "[1][ext 7]\t\"H-",
                "[one]\t\"H-",
                "line 11: a port should be",
            ),
            (
                "\"H-0000000000000102\"[1](",
                "\"H-0000000000000102\"(",
                "line 11: a port should be",
            ),
            (
                "Ca\t1 \"H-0000000000000102\"",
                "Ca\t1 H-102",
                "line 18: a node should be",
            ),
            (
                "[2](204) \t\"S-0000000000000001\"[2]",
                "[2](204) \t\"S-0000000000000001\"[3]",
                "line 12: ",
            ),
            (
                "caguid=0x202",
                "caguid=0x102",
                "line 22: node \"H-0000000000000202\" has the GUID",
            ),
            (
                "caguid=0x202",
                "caguid=",
                "line 21: caguid without a number",
            ),
            ("[2](204)", "[1](204)", "line 12: "),
        ];
        for (from, to, expected) in cases {
            let why = why(from, to);
            assert!(why.starts_with(expected), "{to}: {why}");
        }
        let end = SMALL.find("\ncaguid=0x202").expect("it is there");
        let cut = read(&SMALL[..end]).expect_err("it is wrong").to_string();
        assert!(cut.contains("line 12") && cut.contains("missing"), "{cut}");
        let twice = SMALL.replace("[2]\t", "[1]\t");
        let why = read(&twice).expect_err("it is wrong").to_string();
        assert!(why.contains("is in line 11, too"), "{why}");
        assert!(read("[1] \"S-1\"[1]").is_err(), "a port before any node");
        for (text, expected) in [
            ("", "empty"),
            ("hello\n", "ibnetdiscover"),
            ("\u{0}\u{1}", "ibnetdiscover"),
        ] {
            let why = read(text).expect_err("it is wrong").to_string();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn what_is_not_understood_is_told() {
        let text = SMALL.replace("\nvendid=0x2c9\ndevid=0x1017", "\nChassis 1\ndevid=0x1017");
        let (_, notes) = read(&text).expect("it is fine");
        assert_eq!(notes, ["line 14 is passed over: Chassis 1"]);
    }
}
