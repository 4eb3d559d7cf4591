// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Fabrics of ibsim, the simulator: hundreds of nodes, some of which are virtual HCAs of this machine.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use ktap::{wait_until, Outcome, ResultExt};
use nix::sys::signal::Signal;

use crate::command::{run, Running, LIMIT};
use crate::fabric::{folder, Local};
use crate::text::value;
use selftests::vhca::Module;

/// A fabric in ibsim, with bridges to devices of this machine.
pub struct Simulated {
    folder: PathBuf,
    /// Nodes.
    pub nodes: usize,
    /// Switches.
    pub switches: usize,
    /// Channel adapters.
    pub cas: usize,
    /// Cables.
    pub links: usize,
    options: String,
    places: Vec<String>,
    /// Fraction of the frames that the bridges lose.
    pub loss: f64,
    // The bridges go first, the module last.
    bridges: Vec<Option<Running>>,
    sim: Option<Running>,
    _module: Module,
}

// A value of ib-topology's output, which is meant for a shell.
fn fact<'a>(facts: &'a str, name: &str) -> Outcome<&'a str> {
    let line = facts
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    match line {
        Some(value) => Ok(value.trim_matches(['\'', '"'])),
        None => Err(format!("ib-topology does not tell {name}: {facts}").into()),
    }
}

impl Simulated {
    /// A fat tree of so many nodes, at some of whose hosts there are devices of this machine.
    pub fn fat_tree(nodes: usize, devices: usize) -> Outcome<Self> {
        let folder = folder("fabric")?;
        let command = format!(
            "/b/target/release/ib-topology generate --nodes {nodes} -o {}/net",
            folder.display()
        );
        Self::up(folder, &run(&command)?.ok()?.stdout, devices)
    }

    /// The fabric that a file tells of, in the format of ibnetdiscover.
    pub fn discovered(file: &str, devices: usize) -> Outcome<Self> {
        let folder = folder("fabric")?;
        let command = format!(
            "/b/target/release/ib-topology convert {file} -o {}/net",
            folder.display()
        );
        Self::up(folder, &run(&command)?.ok()?.stdout, devices)
    }

    fn up(folder: PathBuf, facts: &str, devices: usize) -> Outcome<Self> {
        // Room for bursts: ibsim spins without.
        fs::write("/proc/sys/net/unix/max_dgram_qlen", "512")?;
        let mut fabric = Self {
            nodes: fact(facts, "nodes")?.parse()?,
            switches: fact(facts, "switches")?.parse()?,
            cas: fact(facts, "cas")?.parse()?,
            links: fact(facts, "links")?.parse()?,
            options: fact(facts, "options")?.to_owned(),
            places: fact(facts, "places")?
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            loss: 0.0,
            bridges: (0..devices).map(|_| None).collect(),
            sim: None,
            _module: Module::load()?,
            folder,
        };
        fabric.start_sim()?;
        for number in 0..devices {
            fabric.plug(number)?;
        }
        Ok(fabric)
    }

    /// Starts ibsim, when it is not running.
    pub fn start_sim(&mut self) -> Outcome {
        let command = format!("ibsim -s {} {}/net", self.options, self.folder.display());
        let mut sim = Running::start(&command, &self.folder.join("ibsim"))?;
        sim.wait_for("simulator ready", LIMIT)?;
        self.sim = Some(sim);
        Ok(())
    }

    /// Kills ibsim.
    pub fn kill_sim(&mut self) -> Outcome {
        match self.sim.take() {
            Some(sim) => sim.kill(),
            None => Err("ibsim does not run".into()),
        }
    }

    /// Types a command at ibsim's console.
    pub fn console(&mut self, command: &str) -> Outcome {
        match &mut self.sim {
            Some(sim) => sim.type_line(command),
            None => Err("ibsim does not run".into()),
        }
    }

    /// The node of a device: its id.
    pub fn place(&self, number: usize) -> &str {
        &self.places[number]
    }

    /// A device of this machine.
    pub fn local(number: usize) -> Local {
        Local {
            ibdev: format!("vhca{number}"),
        }
    }

    /// Plugs a device in.
    pub fn plug(&mut self, number: usize) -> Outcome {
        let folder = self.folder.display();
        let command = format!(
            "/b/target/release/ibsim-bridge --node {} --device vhca{number} --stats {folder}/stats{number} --drop {}",
            self.places[number], self.loss
        );
        let mut bridge = Running::start(&command, &self.folder.join(format!("bridge{number}")))?;
        bridge.wait_for("ready:", LIMIT)?;
        self.bridges[number] = Some(bridge);
        Self::local(number).umad()?;
        Ok(())
    }

    /// Takes a device away: its bridge is told to end.
    pub fn unplug(&mut self, number: usize) -> Outcome {
        match self.bridges[number].take() {
            Some(bridge) => {
                let status = bridge.stop(Signal::SIGTERM, LIMIT)?;
                if status == "0" {
                    Ok(())
                } else {
                    Err(format!("bridge {number} ended with {status}").into())
                }
            }
            None => Err(format!("vhca{number} is not there").into()),
        }
    }

    /// Lets all bridges lose this fraction of the frames from now on; each device is replugged for that.
    pub fn lose(&mut self, fraction: f64) -> Outcome {
        self.loss = fraction;
        for number in 0..self.bridges.len() {
            self.unplug(number)?;
            self.plug(number)?;
        }
        Ok(())
    }

    /// A counter of a bridge.
    pub fn stat(&self, number: usize, name: &str) -> Outcome<u64> {
        // They are written every now and then.
        std::thread::sleep(Duration::from_millis(1500));
        let path = self.folder.join(format!("stats{number}"));
        let text = fs::read_to_string(&path).what(path.display())?;
        match value(&text, name) {
            Some(value) => Ok(value.parse()?),
            None => Err(format!("bridge {number} has no counter {name}").into()),
        }
    }

    /// MADs of a device that its bridge has lost on purpose.
    pub fn lost(&self, number: usize) -> Outcome<u64> {
        Ok(self.stat(number, "lost_out")? + self.stat(number, "lost_in")?)
    }

    /// Waits until a device's port is up again.
    pub fn wait_link(number: usize) -> Outcome {
        wait_until("the link is up", LIMIT, || {
            Self::local(number)
                .state()
                .is_ok_and(|state| !state.starts_with("1:"))
        })
    }
}
