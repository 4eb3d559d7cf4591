// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! `ib-topology`: writes topologies for ibsim.
//!
//! Its output says what the fabric is, as assignments of a shell: `nodes`, `switches`, `cas`, `routers`,
//! `links`, `options` (those that ibsim needs for its size) and `places` (ids of nodes for clients, the one
//! for a subnet manager first).

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ib_topology::fabric::{Fabric, Kind};
use ib_topology::{discovered, fat_tree, net};

/// Clients that ibsim can have.
const CLIENTS: usize = 10;

/// Writes topologies for ibsim.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Makes a fat tree
    Generate {
        /// Nodes: hosts and switches together
        #[arg(long)]
        nodes: usize,
        /// Ports of each switch; by default what is usual for the size
        #[arg(long)]
        radix: Option<usize>,
        /// Where it is written
        #[arg(long, short)]
        output: PathBuf,
    },
    /// Converts what ibnetdiscover has written, after a check
    Convert {
        /// What ibnetdiscover has written
        file: PathBuf,
        /// The node for the subnet manager: id, GUID or description; by default the one that
        /// ibnetdiscover ran on, or the first channel adapter
        #[arg(long)]
        node: Option<String>,
        /// Where it is written; without it, the file is only checked
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
}

// Says what a fabric is.
fn describe(fabric: &Fabric, places: &[&str]) -> String {
    let (nodes, switches) = (fabric.nodes.len(), fabric.count(Kind::Switch));
    let places = places[..places.len().min(CLIENTS)].join(" ");
    format!(
        "nodes={nodes}\nswitches={switches}\ncas={}\nrouters={}\nlinks={}\n\
         options='-N {} -S {} -P {}'\nplaces='{places}'\n",
        fabric.count(Kind::Ca),
        fabric.count(Kind::Router),
        fabric.cables(),
        nodes + 1,
        switches + 1,
        fabric.ports() + 1,
    )
}

fn run(command: Command) -> Result<String, String> {
    // Messages begin with it.
    let mut name = String::new();
    let (mut fabric, node, output) = match command {
        Command::Generate {
            nodes,
            radix,
            output,
        } => (fat_tree::make(nodes, radix)?, None, Some(output)),
        Command::Convert { file, node, output } => {
            name = format!("{}: ", file.display());
            let bytes = fs::read(&file).map_err(|e| format!("{name}{e}"))?;
            let text = String::from_utf8_lossy(&bytes);
            let (fabric, notes) = discovered::read(&text).map_err(|e| format!("{name}{e}"))?;
            const SHOWN: usize = 3;
            for note in notes.iter().take(SHOWN) {
                eprintln!("{name}{note}");
            }
            if notes.len() > SHOWN {
                eprintln!("{name}{} more such lines", notes.len() - SHOWN);
            }
            (fabric, node, output)
        }
    };
    let wanted = match &node {
        None => None,
        Some(name) => {
            let found = fabric.find(name);
            let found = found.ok_or_else(|| format!("there is no node {name}"))?;
            Some(found.id.clone())
        }
    };
    // Places are told by ids, which stay as they are.
    let mut places: Vec<String> = fabric.places().iter().map(|node| node.id.clone()).collect();
    if let Some(wanted) = wanted {
        let at = places.iter().position(|id| *id == wanted);
        let at = at.ok_or_else(|| {
            format!("node {wanted} is no channel adapter with a cable in its port 1")
        })?;
        let first = places.remove(at);
        places.insert(0, first);
    }
    let first = places
        .first()
        .ok_or_else(|| format!("{name}there is no channel adapter with a cable in its port 1"))?;
    let left_out = fabric.keep_reachable(first);
    if left_out > 0 {
        eprintln!("{left_out} nodes are left out, as they have no way to {first}");
        places.retain(|id| fabric.find(id).is_some());
    }
    let changed = fabric.part_guids();
    if changed > 0 {
        eprintln!(
            "{changed} channel adapters get other GUIDs: ibsim numbers ports behind their node, \
             which would make two ports the same"
        );
    }
    if let Some(output) = output {
        fs::write(&output, net::write(&fabric))
            .map_err(|e| format!("{}: {e}", output.display()))?;
    }
    let places: Vec<&str> = places.iter().map(|id| &**id).collect();
    Ok(describe(&fabric, &places))
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("ib-topology: {why}");
            ExitCode::FAILURE
        }
    }
}
