// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! What the kernel's slab caches hold: a way to see that something is not given back.

use std::collections::BTreeMap;
use std::fs;

use ktap::prelude::*;

/// Tells all caches to give back what they keep for later.
///
/// The check is skipped where the kernel cannot.
pub fn shrink() -> Outcome {
    let Ok(caches) = fs::read_dir("/sys/kernel/slab") else {
        return skip("the kernel has no /sys/kernel/slab (CONFIG_SLUB_DEBUG)");
    };
    for cache in caches {
        let cache = cache?.path();
        // Merged caches are links to one.
        if !cache.is_symlink() {
            let shrink = cache.join("shrink");
            fs::write(&shrink, "1").what(shrink.display())?;
        }
    }
    Ok(())
}

/// Objects in use, and their size, by cache.
pub struct Slab(BTreeMap<String, (u64, u64)>);

impl Slab {
    /// Counts, after the caches were told to give back what they keep for later.
    ///
    /// The check is skipped where the kernel does not count.
    pub fn count() -> Outcome<Self> {
        shrink()?;
        let text = fs::read_to_string("/proc/slabinfo")?;
        let mut caches = BTreeMap::new();
        for line in text.lines().skip(2) {
            let mut words = line.split_whitespace();
            let name = words.next().ok_or("an empty line in /proc/slabinfo")?;
            let mut number =
                || -> Outcome<u64> { Ok(words.next().ok_or("a short line in slabinfo")?.parse()?) };
            let (active, _all, size) = (number()?, number()?, number()?);
            caches.insert(name.to_owned(), (active, size));
        }
        Ok(Self(caches))
    }

    /// The caches that hold at least `objects` more than `before`, for people to read.
    pub fn grown_since(&self, before: &Self, objects: u64) -> Vec<String> {
        let mut grown = Vec::new();
        for (name, (now, size)) in &self.0 {
            // Address ranges are given back in bulk, whenever the kernel thinks fit.
            if name == "vmap_area" {
                continue;
            }
            let then = before.0.get(name).map_or(0, |(then, _)| *then);
            let more = now.saturating_sub(then);
            if more >= objects {
                grown.push(format!("{name} (of {size} bytes): {then} to {now} objects"));
            }
        }
        grown
    }
}
