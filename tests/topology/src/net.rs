// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Writes a topology as ibnetdiscover would, in the subset that ibsim reads without complaints. LIDs are 0:
//! a subnet manager finds a fabric that nobody has set up.

use std::collections::HashMap;
use std::fmt::Write;

use crate::fabric::{Fabric, Kind, Node};

/// Rates that ibsim knows; the fastest is what others become.
const SPEEDS: [&str; 8] = ["SDR", "DDR", "QDR", "FDR10", "FDR", "EDR", "HDR", "NDR"];
const WIDTHS: [&str; 5] = ["1x", "2x", "4x", "8x", "12x"];

/// A description without what would end it, or be taken for an option.
fn plain(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| match c {
            '"' | '=' | '#' | '@' => '_',
            c if c.is_control() => '_',
            c => c,
        })
        .collect();
    let mut end = plain.len().min(63);
    while !plain.is_char_boundary(end) {
        end -= 1;
    }
    plain[..end].to_owned()
}

/// A rate that ibsim knows.
fn rate(text: &str) -> String {
    let split = text.find('x').map(|at| text.split_at(at + 1));
    let (width, speed) = split.unwrap_or(("4x", text));
    let width = WIDTHS.into_iter().find(|known| *known == width);
    let speed = SPEEDS.into_iter().find(|known| *known == speed);
    format!("{}{}", width.unwrap_or("4x"), speed.unwrap_or("NDR"))
}

/// The topology as text.
pub fn write(fabric: &Fabric) -> String {
    let by_id: HashMap<&str, &Node> = fabric.nodes.iter().map(|node| (&*node.id, node)).collect();
    let mut text = format!(
        "# {} nodes: {} switches, {} channel adapters, {} routers; {} links\n",
        fabric.nodes.len(),
        fabric.count(Kind::Switch),
        fabric.count(Kind::Ca),
        fabric.count(Kind::Router),
        fabric.cables()
    );
    for node in &fabric.nodes {
        // Writing to a String does not fail.
        let _ = write_node(&mut text, node, &by_id);
    }
    text
}

fn write_node(text: &mut String, node: &Node, by_id: &HashMap<&str, &Node>) -> std::fmt::Result {
    let (word, guid, end) = match node.kind {
        Kind::Switch => ("Switch", "switchguid", " base port 0 lid 0 lmc 0"),
        Kind::Ca => ("Ca", "caguid", ""),
        Kind::Router => ("Rt", "rtguid", ""),
    };
    writeln!(text)?;
    writeln!(text, "vendid={:#x}", node.vendor.0)?;
    writeln!(text, "devid={:#x}", node.vendor.1)?;
    writeln!(text, "sysimgguid={:#x}", node.system_guid)?;
    writeln!(text, "{guid}={:#x}", node.guid)?;
    writeln!(
        text,
        "{word}\t{} \"{}\"\t\t# \"{}\"{end}",
        node.ports,
        node.id,
        plain(&node.description)
    )?;
    for (port, link) in &node.links {
        let peer = by_id.get(&*link.node);
        let name = peer.map_or(String::new(), |peer| plain(&peer.description));
        let own = match node.kind {
            Kind::Switch => "",
            _ => "lid 0 lmc 0 ",
        };
        writeln!(
            text,
            "[{port}]\t\"{}\"[{}]\t\t# {own}\"{name}\" lid 0 {}",
            link.node,
            link.port,
            rate(&link.rate)
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{discovered, fat_tree};

    #[test]
    fn what_is_written_can_be_read() {
        let mut fabric = fat_tree::make(60, None).expect("a fabric");
        let (mut read, notes) = discovered::read(&write(&fabric)).expect("it is fine");
        assert_eq!(notes, Vec::<String>::new());
        for node in fabric.nodes.iter_mut().chain(&mut read.nodes) {
            node.line = 0;
            node.links.values_mut().for_each(|link| link.line = 0);
        }
        assert_eq!(read, fabric);
    }

    #[test]
    fn lines_are_short_enough_for_ibsim() {
        let mut fabric = fat_tree::make(6, None).expect("a fabric");
        for node in &mut fabric.nodes {
            node.description = "ä\"=#@\n".repeat(20);
        }
        let text = write(&fabric);
        assert!(text.lines().all(|line| line.len() < 200));
        assert!(discovered::read(&text).is_ok());
    }

    #[test]
    fn rates() {
        assert_eq!(rate("4xEDR"), "4xEDR");
        assert_eq!(rate("2xHDR"), "2xHDR");
        assert_eq!(rate("4xFDR10"), "4xFDR10");
        assert_eq!(rate("4xXDR"), "4xNDR");
        assert_eq!(rate(""), "4xNDR");
    }
}
