// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Programs in files, and the few of many that reach what all of them do.

use std::fs;
use std::path::{Path, PathBuf};

use ktap::{Outcome, ResultExt};

use crate::call::Program;
use crate::coverage::Blocks;

const HEAD: &str = "# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause\n";

/// Reads the programs of a folder, or of a file, in the order of their names.
pub fn read(path: &Path) -> Outcome<Vec<(PathBuf, Program)>> {
    let mut files = if path.is_dir() {
        let entries = fs::read_dir(path).what(path.display())?;
        entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?
    } else {
        vec![path.to_owned()]
    };
    files.sort();
    let mut programs = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).what(file.display())?;
        let program = text.parse::<Program>().what(file.display())?;
        programs.push((file, program));
    }
    Ok(programs)
}

/// Writes programs to a folder, with how many blocks each brings beyond those before it.
pub fn write(folder: &Path, programs: &[(Program, usize)]) -> Outcome {
    fs::create_dir_all(folder)?;
    for (n, (program, blocks)) in (1..).zip(programs) {
        let text = format!(
            "{HEAD}# {blocks} basic blocks beyond those of the programs before it\n{program}"
        );
        fs::write(folder.join(format!("{n:02}.txt")), text)?;
    }
    Ok(())
}

/// Chooses, by what each one reaches: first the one that reaches most, then the one that adds most to it, and so
/// on. Says which, and what each adds.
pub fn choose(reached: &[Blocks]) -> Vec<(usize, Blocks)> {
    let mut covered = Blocks::new();
    let mut chosen = Vec::new();
    loop {
        let gain = |blocks: &Blocks| blocks.difference(&covered).count();
        let best = (0..reached.len()).max_by_key(|n| (gain(&reached[*n]), usize::MAX - n));
        match best.map(|n| {
            (
                n,
                reached[n].difference(&covered).copied().collect::<Blocks>(),
            )
        }) {
            Some((n, new)) if !new.is_empty() => {
                covered.extend(&new);
                chosen.push((n, new));
            }
            _ => return chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coverage::Block;

    #[test]
    fn few_that_reach_all_are_chosen() {
        let set = |offsets: &[u32]| -> Blocks {
            offsets
                .iter()
                .map(|offset| Block {
                    section: 0,
                    offset: *offset,
                })
                .collect()
        };
        let reached = [
            set(&[1, 2]),
            set(&[1, 2, 3]),
            set(&[4]),
            set(&[3, 4]),
            set(&[]),
        ];
        let chosen = choose(&reached);
        assert_eq!(chosen.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(chosen[1].1, set(&[4]));
    }
}
