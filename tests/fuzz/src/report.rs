// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Which basic blocks of the module there are, which were reached, and which were not. Blocks are counted in
//! what `objdump` says: at the begin of each stands a call of the coverage hook.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use ktap::{Outcome, ResultExt};

use crate::coverage::{Block, Blocks, SECTIONS};

const HOOK: &str = "__sanitizer_cov_trace_pc";

/// Why a block is none that a program can be expected to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It is.
    Code,
    /// It tells that a check failed: an assertion, a bound, an overflow, KASAN. That never happens if the
    /// code is right.
    Check,
    /// It is in a copy of a function that nobody calls, since it is a part of all its callers.
    Copy,
    /// KUnit's tests, which are compiled into the module on such a kernel.
    Test,
}

/// A basic block.
#[derive(Clone, Debug)]
pub struct Known {
    /// Where it is.
    pub block: Block,
    /// The function.
    pub function: String,
    /// Bytes from its begin.
    pub offset: u64,
    /// What kind of block.
    pub kind: Kind,
    /// The line of the source, if it is known.
    pub line: String,
}

// What is called, or pointed to: names of functions, and places in sections of code.
#[derive(Default)]
struct References {
    names: HashSet<String>,
    places: HashSet<(u8, u64)>,
}

fn section_of(name: &str) -> Option<u8> {
    SECTIONS
        .iter()
        .position(|known| *known == name)
        .and_then(|n| u8::try_from(n).ok())
}

impl References {
    fn of(disassembly: &str) -> Self {
        let mut found = Self::default();
        let mut section = None;
        let mut function = String::new();
        // Tables for the unwinder and for debuggers point to everything.
        let mut counts = true;
        for line in disassembly.lines() {
            if let Some(name) = line.strip_prefix("Disassembly of section ") {
                section = section_of(name.trim_end_matches(':'));
                counts = section.is_some();
            } else if let Some(name) = line.strip_prefix("RELOCATION RECORDS FOR [") {
                counts = [".rodata", ".data", ".init.data", ".gnu.linkonce", ".kunit"]
                    .iter()
                    .any(|begin| name.starts_with(begin));
                section = None;
            } else if !counts {
            } else if let Some((_, name)) = line
                .strip_suffix(">:")
                .and_then(|line| line.split_once(" <"))
            {
                name.clone_into(&mut function);
            } else if let Some((_, text)) = line.split_once("R_X86_64_") {
                found.relocation(text);
            } else if let (Some(section), Some((left, name))) = (section, line.rsplit_once(" <")) {
                // A branch to another function of the section.
                let name = without_addend(name.trim_end_matches('>')).0;
                let address = left
                    .rsplit(char::is_whitespace)
                    .next()
                    .and_then(|text| u64::from_str_radix(text, 16).ok());
                if let Some(address) = address.filter(|_| name != function) {
                    found.places.insert((section, address));
                }
            }
        }
        found
    }

    fn relocation(&mut self, text: &str) {
        let Some((kind, value)) = text.split_once(char::is_whitespace) else {
            return;
        };
        let (name, addend) = without_addend(value.trim());
        match section_of(name) {
            Some(section) => {
                // Such a one counts from the end of its own four bytes.
                let own = if kind.starts_with('P') { 4 } else { 0 };
                self.places.insert((section, addend + own));
            }
            None => {
                self.names.insert(name.to_owned());
            }
        }
    }

    fn has(&self, section: u8, address: u64, name: &str) -> bool {
        self.places.contains(&(section, address)) || self.names.contains(name)
    }
}

// "name+0x12" or "name-0x4"
fn without_addend(text: &str) -> (&str, u64) {
    match text.rfind("0x") {
        Some(at) if at > 0 && matches!(text.as_bytes()[at - 1], b'+' | b'-') => (
            &text[..at - 1],
            u64::from_str_radix(&text[at + 2..], 16).unwrap_or(0),
        ),
        _ => (text, 0),
    }
}

/// Reads the blocks out of a disassembly.
pub fn blocks(disassembly: &str) -> Vec<Known> {
    let references = References::of(disassembly);
    let mut found: Vec<Known> = Vec::new();
    let mut is_called = false;
    let mut section = None;
    let mut function = String::new();
    let mut begin = 0;
    // The address of the instruction whose relocation names the hook; that of the next is the block's.
    let mut hook = false;
    let mut source = "";
    for line in disassembly.lines() {
        if let Some(name) = line.strip_prefix("Disassembly of section ") {
            let name = name.trim_end_matches(':');
            section = section_of(name);
            continue;
        }
        if line.starts_with("RELOCATION RECORDS") {
            break;
        }
        let Some(section) = section else { continue };
        if let Some((address, name)) = line
            .strip_suffix(">:")
            .and_then(|line| line.split_once(" <"))
        {
            if let Ok(address) = u64::from_str_radix(address, 16) {
                (function, begin) = (name.to_owned(), address);
                is_called = references.has(section, address, name);
            }
            hook = false;
            continue;
        }
        if line.contains("\tR_X86_64_") || line.contains(": R_X86_64_") {
            if line.contains(HOOK) {
                hook = true;
            } else if is_check(line) {
                if let Some(last) = found.last_mut().filter(|last| last.function == function) {
                    last.kind = match last.kind {
                        Kind::Code => Kind::Check,
                        other => other,
                    };
                }
            }
            continue;
        }
        if let Some(at) = source_line(line) {
            source = at;
            continue;
        }
        let address = line
            .trim_start()
            .split_once(':')
            .and_then(|(a, _)| u64::from_str_radix(a, 16).ok());
        let Some(address) = address else { continue };
        if std::mem::take(&mut hook) {
            let Ok(offset) = u32::try_from(address) else {
                continue;
            };
            found.push(Known {
                block: Block { section, offset },
                offset: address.saturating_sub(begin),
                kind: match () {
                    () if is_test(&function) => Kind::Test,
                    () if !is_called => Kind::Copy,
                    () if source.contains("core/src/ub_checks.rs") => Kind::Check,
                    () => Kind::Code,
                },
                function: function.clone(),
                line: source.to_owned(),
            });
        }
    }
    found
}

// "/some/folder/file.rs:12 (discriminator 3)", without the folders that lead nowhere.
fn source_line(line: &str) -> Option<&str> {
    let (file, number) = line.split_whitespace().next()?.rsplit_once(':')?;
    (line.starts_with('/') && file.ends_with(".rs") && number.bytes().all(|b| b.is_ascii_digit()))
        .then_some(())?;
    let words = line.split_whitespace().next()?;
    let short = ["/rdma/", "/chrdev/", "/uapi/", "/rust/kernel/", "/library/"]
        .into_iter()
        .find_map(|dir| words.rfind(dir));
    Some(match short.or_else(|| words.rfind('/')) {
        Some(at) => &words[at + 1..],
        None => words,
    })
}

fn is_check(relocation: &str) -> bool {
    [
        "core::panicking::",
        "core::result::unwrap_failed",
        "core::option::",
        "slice_index",
        "core::slice::index",
        "rust_build_error",
        "__asan_report_",
    ]
    .iter()
    .any(|part| relocation.contains(part))
}

fn is_test(function: &str) -> bool {
    function.contains("::tests::") || function.contains("kunit") || function.contains("KUNIT")
}

/// Prints what was reached, and writes a list of what was not.
pub fn report(disassembly: &Path, reached: &[PathBuf], list: Option<&Path>) -> Outcome {
    let known = blocks(&fs::read_to_string(disassembly).what(disassembly.display())?);
    let mut seen = Blocks::new();
    for path in reached {
        for line in fs::read_to_string(path).what(path.display())?.lines() {
            seen.insert(line.parse()?);
        }
    }
    let count = |kind, hit: Option<bool>| {
        let wanted =
            |k: &&Known| k.kind == kind && hit.is_none_or(|hit| seen.contains(&k.block) == hit);
        known.iter().filter(wanted).count()
    };
    let all = count(Kind::Code, None);
    let hit = count(Kind::Code, Some(true));
    if all == 0 {
        return Err(format!("{}: no instrumented code", disassembly.display()).into());
    }
    let stray = seen
        .iter()
        .filter(|block| !known.iter().any(|known| known.block == **block))
        .count();
    println!("basic blocks    {:>6}", known.len());
    println!(
        "  code          {all:>6}, {hit} reached: {}.{} %",
        hit * 100 / all,
        hit * 1000 / all % 10
    );
    println!(
        "  failed checks {:>6}, {} reached",
        count(Kind::Check, None),
        count(Kind::Check, Some(true))
    );
    println!(
        "  never called  {:>6}, {} reached",
        count(Kind::Copy, None),
        count(Kind::Copy, Some(true))
    );
    println!("  KUnit         {:>6}", count(Kind::Test, None));
    if stray > 0 {
        println!("  reached, but not known: {stray}");
    }

    let mut functions: BTreeMap<&str, (usize, Vec<&Known>)> = BTreeMap::new();
    for known in known.iter().filter(|known| known.kind == Kind::Code) {
        let entry = functions.entry(&known.function).or_default();
        entry.0 += 1;
        if !seen.contains(&known.block) {
            entry.1.push(known);
        }
    }
    functions.retain(|_, (_, missed)| !missed.is_empty());
    let whole = functions
        .values()
        .filter(|(all, missed)| *all == missed.len())
        .count();
    println!(
        "functions with code that was not reached: {}, {whole} of them as a whole",
        functions.len()
    );
    if let Some(list) = list {
        let mut text = String::new();
        for (function, (all, missed)) in &functions {
            writeln!(text, "{function}: {} of {all} not reached", missed.len())?;
            for known in missed {
                let section = SECTIONS
                    .get(usize::from(known.block.section))
                    .unwrap_or(&"?");
                writeln!(
                    text,
                    "    +{:#x}  {section}+{:#x}  {}",
                    known.offset, known.block.offset, known.line
                )?;
            }
        }
        fs::write(list, text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
Disassembly of section .text:

0000000000000010 <ib_umad::f>:
ib_umad::f():
/x/rdma/f.rs:12 (discriminator 3)
  10:\tcall   15 <ib_umad::f+0x5>
\t\t\t11: R_X86_64_PLT32\t__sanitizer_cov_trace_pc-0x4
  15:\tret
  16:\tcall   1b <ib_umad::f+0xb>
\t\t\t17: R_X86_64_PLT32\t__sanitizer_cov_trace_pc-0x4
  1b:\tcall   20 <ib_umad::f+0x10>
\t\t\t1c: R_X86_64_PLT32\tcore::panicking::panic-0x4

0000000000000020 <ib_umad::g>:
  20:\tjmp    30 <ib_umad::a::tests::t>
  22:\tcall   27 <ib_umad::g+0x7>
\t\t\t23: R_X86_64_PLT32\t__sanitizer_cov_trace_pc-0x4
  27:\tret

0000000000000030 <ib_umad::a::tests::t>:
  30:\tcall   35 <x>
\t\t\t31: R_X86_64_PLT32\t__sanitizer_cov_trace_pc-0x4
  35:\tret

Disassembly of section .data:

0000000000000010 <g>:
  10:\tcall   15 <g>
\t\t\t11: R_X86_64_PLT32\t__sanitizer_cov_trace_pc-0x4
  15:\tret

RELOCATION RECORDS FOR [.rodata]:
OFFSET           TYPE              VALUE
0000000000000000 R_X86_64_64       ib_umad::f

RELOCATION RECORDS FOR [.orc_unwind_ip]:
OFFSET           TYPE              VALUE
0000000000000000 R_X86_64_PC32     .text+0x1c
";

    #[test]
    fn blocks_are_found_and_sorted() {
        let found = blocks(TEXT);
        assert_eq!(found[0].line, "rdma/f.rs:12");
        let seen: Vec<_> = found
            .iter()
            .map(|known| (known.block.offset, known.offset, known.kind))
            .collect();
        assert_eq!(
            seen,
            [
                (0x15, 5, Kind::Code),
                (0x1b, 0xb, Kind::Check),
                (0x27, 7, Kind::Copy),
                (0x35, 5, Kind::Test)
            ]
        );
    }
}
