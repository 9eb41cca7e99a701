//! Attributes the instructions of a request: the machine's blocks of code are counted by a plugin of QEMU and assigned
//! to their owners.
//!
//! A case runs three times, the last time with three times as many requests, with a mark before each run and one after:
//! the cost of a run besides its requests (starting fio) cancels out in the difference.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::BedError;
use crate::guest::at;
use crate::guest::image::read;
use crate::programs::root;
use crate::tool;

/// Number of marks of a case.
pub const MARKS: usize = 4;

/// Addresses of Xen's code (its public header arch-x86/xen-x86_64.h, `HYPERVISOR_VIRT_START`).
const XEN: std::ops::Range<u64> = 0xffff_8000_0000_0000..0xffff_8800_0000_0000;
/// Addresses of Linux's code, and of its modules after that (Documentation/x86/x86_64/mm.rst).
const KERNEL: u64 = 0xffff_ffff_8000_0000;
const MODULES: u64 = 0xffff_ffff_a000_0000;

/// The owner of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Guest,
    Xen,
    Dom0,
    /// Modules of either domain: both load theirs to the same addresses.
    Modules,
    /// Tapline's processes.
    Ours,
    /// Other processes, such as fio in the guest.
    Programs,
}

impl Owner {
    pub const ALL: [Self; 6] = [Self::Guest, Self::Xen, Self::Dom0, Self::Modules, Self::Ours, Self::Programs];

    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest's kernel",
            Self::Xen => "Xen",
            Self::Dom0 => "dom0's kernel",
            Self::Modules => "modules of either",
            Self::Ours => "tapline-disk",
            Self::Programs => "other programs",
        }
    }
}

/// Instructions per request, by owner and function.
pub type Costs = BTreeMap<(Owner, String), f64>;

/// The plugin and the program that sets marks, built in `directory`.
pub struct Counter {
    pub plugin: PathBuf,
    pub mark: PathBuf,
}

impl Counter {
    pub fn make(directory: &Path) -> Result<Self, BedError> {
        fs::create_dir_all(directory).map_err(at("create", directory))?;
        let sources = root().join("testbed/xen/count");
        let counter = Self { plugin: directory.join("count.so"), mark: directory.join("mark") };
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&counter.plugin).arg(sources.join("plugin.c"));
        tool::text(&mut cc)?;
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-static", "-nostdlib", "-fno-stack-protector", "-o"]).arg(&counter.mark);
        tool::text(cc.arg(sources.join("mark.c")))?;
        Ok(counter)
    }
}

/// The positions of code as reported by dom0, and the dumps.
pub struct Counts {
    kernel: Symbols,
    xen: Symbols,
    ours: Symbols,
    /// Mappings of Tapline's code: first address, end, and the difference to the address in the file.
    maps: Vec<(u64, u64, u64)>,
    dumps: PathBuf,
}

/// Executed instructions by address, offset and length of the block.
type Dump = HashMap<(u64, u64), u64>;

impl Counts {
    /// Reads the counts: `out` was left by dom0, `program` is our disk process, and names of dumps begin with `dumps`.
    pub fn read(out: &Path, program: Option<&Path>, dumps: PathBuf) -> Result<Self, BedError> {
        let lines = |name: &str| Ok::<_, BedError>(String::from_utf8_lossy(&read(&out.join(name))?).into_owned());
        let mut counts = Self {
            kernel: Symbols::of_listing(&lines("kallsyms")?),
            xen: Symbols::of_listing(&lines("xensyms")?),
            ours: Symbols::default(),
            maps: Vec::new(),
            dumps,
        };
        if let Some(program) = program {
            counts.ours = Symbols::of_listing(&tool::text(Command::new("nm").arg("-C").arg(program))?);
            let headers = tool::text(Command::new("readelf").arg("-lW").arg(program).env("LC_ALL", "C"))?;
            let skew = code_segment(&headers).unwrap_or_default();
            counts.maps = lines("maps")?.lines().filter_map(|line| code_map(line, skew)).collect();
        }
        Ok(counts)
    }

    /// Instructions per request in the case whose first mark has the number `first`; its last run had `more` requests
    /// more than the others.
    pub fn costs(&self, first: usize, more: u32) -> Result<Costs, BedError> {
        let [a, b, c] = [1, 2, 3].map(|mark| self.dump(first + mark));
        let (a, b, c) = (a?, b?, c?);
        let dom0 = self.skew_of_dom0(&c);
        let mut costs = Costs::new();
        for (block, &last) in &c {
            let of = |dump: &Dump| dump.get(block).copied().unwrap_or(0);
            let (long, short) = (last - of(&b), of(&b) - of(&a));
            if long != short {
                let (long, short) = (number(long), number(short));
                *costs.entry(self.owner(*block, dom0)).or_default() += (long - short) / f64::from(more);
            }
        }
        Ok(costs)
    }

    fn dump(&self, mark: usize) -> Result<Dump, BedError> {
        let text = read(&self.dumps.with_extension(mark.to_string()))?;
        let mut dump = Dump::new();
        for line in String::from_utf8_lossy(&text).lines() {
            let mut numbers = line.split(' ').map(|word| u64::from_str_radix(word, 16).unwrap_or(0));
            let mut next = || numbers.next().unwrap_or(0);
            let (address, place, _length, executed) = (next(), next(), next(), next());
            *dump.entry((address, place)).or_default() += executed;
        }
        Ok(dump)
    }

    /// The offset of dom0's kernel from its link addresses, which is the same for all of it: Xen gives it one piece of
    /// memory, and a guest several.
    fn skew_of_dom0(&self, dump: &Dump) -> u64 {
        let mut pages: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for &(address, place) in dump.keys().filter(|(address, _)| (KERNEL..MODULES).contains(address)) {
            pages.entry(place.wrapping_sub(address)).or_default().insert(address >> 12);
        }
        pages.into_iter().max_by_key(|(_, pages)| pages.len()).map_or(0, |(skew, _)| skew)
    }

    fn owner(&self, (address, place): (u64, u64), dom0: u64) -> (Owner, String) {
        match address {
            MODULES.. => (Owner::Modules, self.kernel.at(address)),
            KERNEL.. if place.wrapping_sub(address) == dom0 => (Owner::Dom0, self.kernel.at(address)),
            KERNEL.. => (Owner::Guest, self.kernel.at(address)),
            _ if XEN.contains(&address) => (Owner::Xen, self.xen.at(address)),
            _ => match self.maps.iter().find(|(from, end, _)| (*from..*end).contains(&address)) {
                Some((_, _, off)) => (Owner::Ours, self.ours.at(address.wrapping_sub(*off))),
                None => (Owner::Programs, String::new()),
            },
        }
    }
}

/// Converts a count; none is large enough for this to be inexact.
#[allow(clippy::cast_precision_loss, reason = "see above")]
fn number(count: u64) -> f64 {
    count as f64
}

/// Names of functions by address.
#[derive(Default)]
struct Symbols(BTreeMap<u64, String>);

impl Symbols {
    /// Parses lines of an address, a letter and a name: /proc/kallsyms, /proc/xen/xensyms, nm.
    fn of_listing(listing: &str) -> Self {
        let symbol = |line: &str| {
            let (address, rest) = line.split_once(' ')?;
            let (kind, name) = rest.trim_start().split_once([' ', '\t'])?;
            let is_code = matches!(kind, "t" | "T" | "w" | "W" | "i");
            is_code.then_some(())?;
            Some((u64::from_str_radix(address, 16).ok()?, name.replace('\t', " ")))
        };
        Self(listing.lines().filter_map(symbol).collect())
    }

    fn at(&self, address: u64) -> String {
        self.0.range(..=address).next_back().map_or_else(|| "?".to_owned(), |(_, name)| name.clone())
    }
}

/// The difference between addresses and file offsets of a program's code, from `readelf -lW`.
fn code_segment(headers: &str) -> Option<u64> {
    let line = headers.lines().find(|line| line.trim_start().starts_with("LOAD") && line.contains("R E"))?;
    let mut words = line.split_whitespace().skip(1).map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let (offset, address) = (words.next()?.ok()?, words.next()?.ok()?);
    Some(address.wrapping_sub(offset))
}

/// Parses a line of /proc/PID/maps if it maps our code.
fn code_map(line: &str, skew: u64) -> Option<(u64, u64, u64)> {
    let mut words = line.split_whitespace();
    let (from, end) = words.next()?.split_once('-')?;
    let is_code = words.next()?.contains('x') && line.contains("/tapline");
    let hex = |word| u64::from_str_radix(word, 16).ok();
    let (from, end, offset) = (hex(from)?, hex(end)?, hex(words.next()?)?);
    is_code.then(|| (from, end, from.wrapping_sub(offset).wrapping_sub(skew)))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_address_has_the_name_before_it() {
        let symbols = Symbols::of_listing("1000 T first\n1010 d data\n1100 t second\t[module]\n");

        assert_eq!(symbols.at(0x10ff), "first");
        assert_eq!(symbols.at(0x1100), "second [module]");
        assert_eq!(symbols.at(0xfff), "?");
    }

    #[test]
    fn an_address_in_a_process_is_found_in_its_file() {
        let skew = code_segment("  LOAD           0x002000 0x0000000000003000 0x3000 0x10 0x10 R E 0x1000\n").unwrap();
        let (from, _, off) = code_map("7f00002000-7f00009000 r-xp 00002000 00:13 7  /drop/tapline-disk", skew).unwrap();

        assert_eq!(from - off, 0x3000);
        assert_eq!(code_map("7f00002000-7f00009000 rw-p 00002000 00:13 7  /drop/tapline-disk", skew), None);
    }
}
