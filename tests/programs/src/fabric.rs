// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Fabrics to run programs on.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ktap::peers::SOON;
use ktap::{wait_until, Outcome};
use selftests::vhca::{Faults, Module, Shape, Spec, Vhca, PORT_DOWN, PORT_WAIT_FOR_SM};
use umad::sysfs;

/// A port of this machine.
#[derive(Clone, Debug)]
pub struct Local {
    /// Its RDMA device; the port is the first.
    pub ibdev: String,
}

impl Local {
    fn read(&self, file: &str) -> Outcome<String> {
        let path = sysfs::port_dir(&self.ibdev, 1).join(file);
        Ok(fs::read_to_string(path)?.trim().to_owned())
    }

    /// Its GUID, as programs take it.
    pub fn guid(&self) -> Outcome<String> {
        let gid = self.read("gids/0")?;
        Ok(format!(
            "0x{}",
            gid.replace(':', "").get(16..).unwrap_or_default()
        ))
    }

    /// Its LID.
    pub fn lid(&self) -> Outcome<u32> {
        let text = self.read("lid")?;
        Ok(u32::from_str_radix(text.trim_start_matches("0x"), 16)?)
    }

    /// "4: ACTIVE" and others.
    pub fn state(&self) -> Outcome<String> {
        self.read("state")
    }

    /// True if a subnet manager runs on it.
    pub fn is_sm(&self) -> Outcome<bool> {
        let text = self.read("cap_mask")?;
        Ok(u32::from_str_radix(text.trim_start_matches("0x"), 16)? & 2 != 0)
    }

    /// Number of its umad device.
    pub fn umad(&self) -> Outcome<u32> {
        selftests::vhca::wait_for_umad(&self.ibdev, 1)
    }
}

/// A fabric of the virtual HCA's own devices: all of them are devices of this machine.
pub struct Cabled {
    /// Where the subnet manager runs.
    pub a: Local,
    /// Another one.
    pub b: Local,
    /// Switches.
    pub switches: usize,
    /// Channel adapters.
    pub cas: usize,
    /// Cables.
    pub links: usize,
    devices: BTreeMap<String, Vhca>,
    _module: Module,
}

fn adapter(name: &str, cable: u32) -> Outcome<Vhca> {
    Ok(Spec::new(Shape::Ca, 1)
        .name(name)
        .cabled(1, 0, cable)
        .port(1, |port| port.flags = PORT_WAIT_FOR_SM)
        .create()?)
}

impl Cabled {
    /// Six nodes: two switches with two cables between them, and two channel adapters at each, h1 to h4.
    pub fn six() -> Outcome<Self> {
        let module = Module::load()?;
        let mut devices = BTreeMap::new();
        for (name, first) in [("s1", 1), ("s2", 3)] {
            let switch = Spec::new(Shape::Switch, 4)
                .name(name)
                .cabled(1, 0, 101)
                .cabled(2, 0, 102)
                .cabled(3, 0, first)
                .cabled(4, 0, first + 1)
                .create()?;
            devices.insert(name.to_owned(), switch);
        }
        for number in 1..=4 {
            let name = format!("h{number}");
            devices.insert(name.clone(), adapter(&name, number)?);
        }
        Self::of(module, devices, ("h1", "h3"), (2, 4, 6))
    }

    /// Two channel adapters, h1 and h2, with a cable.
    pub fn pair() -> Outcome<Self> {
        let module = Module::load()?;
        let mut devices = BTreeMap::new();
        for name in ["h1", "h2"] {
            devices.insert(name.to_owned(), adapter(name, 1)?);
        }
        Self::of(module, devices, ("h1", "h2"), (0, 2, 1))
    }

    fn of(
        module: Module,
        devices: BTreeMap<String, Vhca>,
        (a, b): (&str, &str),
        (switches, cas, links): (usize, usize, usize),
    ) -> Outcome<Self> {
        let local = |name: &str| Local {
            ibdev: name.to_owned(),
        };
        for name in devices.keys().filter(|name| name.starts_with('h')) {
            local(name).umad()?;
        }
        Ok(Self {
            a: local(a),
            b: local(b),
            switches,
            cas,
            links,
            devices,
            _module: module,
        })
    }

    fn device(&self, name: &str) -> Outcome<&Vhca> {
        match self.devices.get(name) {
            Some(device) => Ok(device),
            None => Err(format!("{name} is not plugged in").into()),
        }
    }

    /// Pulls a channel adapter out, whoever uses it; returns when it is gone.
    pub fn unplug(&mut self, name: &str) -> Outcome {
        match self.devices.remove(name) {
            Some(device) => Ok(device.unplug()?),
            None => Err(format!("{name} is not plugged in").into()),
        }
    }

    /// Plugs a channel adapter in again, at the cable of its number.
    pub fn plug(&mut self, name: &str) -> Outcome {
        let cable = name.trim_start_matches('h').parse()?;
        self.devices.insert(name.to_owned(), adapter(name, cable)?);
        let local = Local {
            ibdev: name.to_owned(),
        };
        local.umad()?;
        Ok(())
    }

    /// Takes the link of a channel adapter down, or up again.
    pub fn set_link(&self, name: &str, up: bool) -> Outcome {
        let device = self.device(name)?;
        device.change(1, |port| {
            port.flags = if up { PORT_WAIT_FOR_SM } else { PORT_DOWN };
        })?;
        wait_until("the link has changed", SOON, || {
            device.port(1).is_ok_and(|(_, state)| (state > 1) == up)
        })
    }

    /// Each device drops each so-manieth of the frames that it sends; 0 for none.
    pub fn drop_every(&self, frames: u32) -> Outcome {
        for device in self.devices.values() {
            device.faults(Faults {
                drop_every: frames,
                ..Faults::default()
            })?;
        }
        Ok(())
    }

    /// Frames that were dropped so.
    pub fn dropped(&self) -> Outcome<u64> {
        let mut sum = 0;
        for device in self.devices.values() {
            sum += device.counters()?.dropped;
        }
        Ok(sum)
    }
}

/// Makes an empty folder for a program's files.
pub fn folder(name: &str) -> Outcome<std::path::PathBuf> {
    let path = Path::new("/tmp/programs").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path)?;
    Ok(path)
}
