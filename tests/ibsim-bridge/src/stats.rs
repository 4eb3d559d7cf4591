// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Counters, and the file that shows them: a line with a name and a number for each.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What has happened so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// As text.
            pub fn text(&self) -> String {
                let mut text = String::new();
                $(text += &format!("{} {}\n", stringify!($name), self.$name);)*
                text
            }
        }
    };
}

counters! {
    /// MADs that left the device for the fabric.
    sent,
    /// MADs that came from the fabric to the device.
    received,
    /// SMPs of both ways, contained in the above.
    smps,
    /// Directed-route SMPs of the device to itself.
    local,
    /// Local ones that ibsim did not answer.
    local_unanswered,
    /// MADs that the fault option dropped on the way to the fabric.
    lost_out,
    /// MADs that the fault option dropped on the way from the fabric.
    lost_in,
    /// MADs that ibsim sent back, as they have no way.
    bounced,
    /// MADs that ibsim cannot carry.
    unfit,
    /// Responses to nothing that is known.
    unknown,
    /// Changes of the port that the device was told.
    port_changes,
    /// Connections to ibsim.
    connections,
    /// Whether the device's port is marked IsSM.
    is_sm,
}

/// A file that is kept up to date.
pub struct StatsFile {
    path: PathBuf,
    shown: Option<Stats>,
}

impl StatsFile {
    /// Shows counters in a file.
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            shown: None,
        }
    }

    /// Writes the file, unless nothing has changed. Readers see it whole.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn show(&mut self, stats: &Stats) -> io::Result<()> {
        if self.shown.as_ref() == Some(stats) {
            return Ok(());
        }
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        fs::write(&name, stats.text())?;
        fs::rename(&name, &self.path)?;
        self.shown = Some(*stats);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_a_line_for_each() {
        let path = std::env::temp_dir().join(format!("stats-{}", std::process::id()));
        let mut file = StatsFile::new(&path);
        let mut stats = Stats {
            sent: 12,
            ..Stats::default()
        };
        file.show(&stats).expect("a file");
        let text = fs::read_to_string(&path).expect("a file");
        assert_eq!(text.lines().next(), Some("sent 12"));
        assert_eq!(text.lines().count(), 13);
        fs::remove_file(&path).expect("a file");
        file.show(&stats).expect("nothing to do");
        assert!(!path.exists());
        stats.received = 1;
        file.show(&stats).expect("a file");
        let text = fs::read_to_string(&path).expect("a file");
        assert!(text.contains("\nreceived 1\n"), "{text}");
        fs::remove_file(&path).expect("a file");
    }
}
