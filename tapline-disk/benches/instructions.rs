//! Measures what a request costs a disk's process in its own instructions, under valgrind: `cargo bench -p
//! tapline-disk`.
//!
//! The number of instructions does not depend on the load of the machine, so a change of one percent is visible. Each
//! program is measured with few and with many requests; the difference, divided by the number of additional requests,
//! is the figure: it excludes starting and stopping. Instructions of the kernel are not counted. Other programs, such
//! as an older build, are named behind `--` and are measured next to the current one; `--only=TEXT` selects the loads
//! that have TEXT in their names.
//! `--check` compares with the table that is kept with the source. For loads at high queue depth it fails if the disk's
//! part, which is the same each time, costs 3 % more, or another part 10 % more. `--write` writes that table.

#[path = "instructions/callgrind.rs"]
mod callgrind;
#[path = "instructions/table.rs"]
mod table;
#[allow(dead_code, reason = "the rest is the tests'")]
#[path = "../tests/all/tool/mod.rs"]
mod tool;

use std::path::Path;
use std::process::{Command, ExitCode};

use callgrind::{Counts, PARTS, by_parts};
use table::{Row, Table, compiler};
use testkit::ring::{Driver, Kind};
use tool::served::Disk;
use tool::{Room, TAPLINE};

/// The repetitions of each measurement; the minimum is used, as a busy machine only adds to it.
const ROUNDS: usize = 3;
/// The requests of a short run, and the additional ones of a long run.
const FEW: u64 = 512;
const MORE: u64 = 4096;
/// How often blocks are written before the measurement, so that the disk knows the location of nearly all of them.
const TIMES_BEFORE: usize = 5;
/// The exit code if the measurement cannot be run here.
const NOT_RUN: u8 = 77;
/// The number of requests between two flushes.
const FLUSHED: u64 = 256;

/// A load to measure.
#[derive(Clone, Copy)]
struct Load {
    format: &'static str,
    kind: Kind,
    /// Whether blocks are written for the first time.
    is_new: bool,
    depth: u64,
    /// Whether the front-end records requests in flight.
    is_recorded: bool,
    /// Whether changed blocks are recorded in a map.
    is_tracked: bool,
}

impl Load {
    fn name(&self) -> String {
        let what = match (self.kind, self.is_new) {
            (Kind::Read, _) => "read",
            (_, true) => "first write",
            (_, false) => "write",
        };
        let recorded = if self.is_recorded { "recorded" } else { "not recorded" };
        let tracked = if self.is_tracked { ", tracked" } else { "" };
        format!("{} {what}, {} at once, {recorded}{tracked}", self.format, self.depth)
    }

    /// Returns the instructions of a process that executes `requests` of this load, after all blocks were written if
    /// the load requires that.
    fn count(self, program: &str, requests: u64) -> Counts {
        // In memory, where I/O completes at once: only our instructions are of interest, not the storage.
        let room = Room::below(Path::new("/dev/shm"));
        room.done(&format!("image create {}:a --size 1G", self.format));
        let counts = room.file("counts");
        let mut command = room.command("valgrind");
        command.args(["--tool=callgrind", &format!("--callgrind-out-file={}", counts.display()), program]);
        // It does not poll, because the number of polls depends on the load of the machine.
        command.args(["serve", &format!("{}:a", self.format), "--vhost-user", "vm.sock", "--poll-max", "0"]);
        // valgrind does not support enough of io_uring: no request ever completes.
        command.args(["--io-engine", "aio"]);
        if self.is_tracked {
            command.args(["--track", "map"]);
        }
        let disk = Disk::start(command);
        let mut driver = Driver::connect(&room.file("vm.sock"), self.is_recorded);
        let blocks = FEW + MORE;
        if !self.is_new {
            let before = Load { depth: 32, ..self };
            (0..TIMES_BEFORE).for_each(|_| before.run(&mut driver, Kind::Write, 0..blocks));
        }
        self.run(&mut driver, self.kind, 0..requests);
        driver.leave();
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        let counted = String::from_utf8(room.read("counts")).unwrap();
        let parts = by_parts(&counted);
        assert!(parts.iter().sum::<u64>() > 0, "callgrind has counted nothing");
        parts
    }

    /// Executes requests at scattered blocks, in batches, with occasional flushes.
    fn run(&self, driver: &mut Driver, kind: Kind, requests: std::ops::Range<u64>) {
        let mut left = requests;
        while !left.is_empty() {
            for n in left.by_ref().take(usize::try_from(self.depth).unwrap()) {
                // An odd number: each block once, in no obvious order.
                driver.prepare(kind, n * 4099 % (1 << 18));
            }
            driver.kick();
            driver.drain();
            if left.start % FLUSHED == 0 {
                driver.offer(Kind::Flush, 1 << 20);
                driver.drain();
            }
        }
    }

    /// Returns the instructions per request, by part, from the run with the fewest.
    fn figure(&self, program: &str) -> Row {
        let mut seen: Vec<Counts> = (0..ROUNDS)
            .map(|_| {
                let (many, few) = (self.count(program, FEW + MORE), self.count(program, FEW));
                std::array::from_fn(|part| many[part].saturating_sub(few[part]))
            })
            .collect();
        seen.sort_unstable_by_key(|parts| parts.iter().sum::<u64>());
        let parts = seen[0].map(|part| part as f64 / MORE as f64);
        Row { load: self.name(), is_batch: self.depth > 1, total: parts.iter().sum(), parts }
    }
}

/// Returns the loads.
fn loads() -> Vec<Load> {
    let mut loads = Vec::new();
    for format in ["raw", "vhd", "qcow2"] {
        for (kind, is_new) in [(Kind::Read, false), (Kind::Write, false), (Kind::Write, true)] {
            for depth in [1, 32] {
                for (is_recorded, is_tracked) in [(false, false), (true, false), (false, true)] {
                    loads.push(Load { format, kind, is_new, depth, is_recorded, is_tracked });
                }
            }
        }
    }
    loads
}

fn main() -> ExitCode {
    let (options, others): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with("--"));
    let has = |name: &str| options.iter().any(|option| option == name);
    let only = options.iter().find_map(|word| word.strip_prefix("--only=")).unwrap_or_default();
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("instructions: valgrind is not there; install the package of that name");
        return ExitCode::from(NOT_RUN);
    }
    let kept = if has("--check") { Some(Table::read()) } else { None }.transpose();
    let kept = match kept {
        Ok(kept) => kept,
        Err(why) => return failed(&why),
    };
    if let Some(kept) = kept.as_ref().filter(|kept| kept.compiler != compiler()) {
        eprintln!("instructions: the table is of {}, and this is {}: not compared", kept.compiler, compiler());
        return ExitCode::from(NOT_RUN);
    }
    let rows = count_all(only, &others, kept.is_some());
    if let Some(kept) = kept {
        let exceeded = kept.exceeded(&rows);
        exceeded.iter().for_each(|line| eprintln!("{line}"));
        if !exceeded.is_empty() {
            return failed("requests cost more than the table allows; if they have to, --write keeps the new figures");
        }
        println!("{} loads: no request costs more than the table allows", rows.len());
    }
    match has("--write").then(|| Table { compiler: compiler(), rows }.write()) {
        Some(Err(why)) => failed(&why),
        _ => ExitCode::SUCCESS,
    }
}

fn failed(why: &str) -> ExitCode {
    eprintln!("instructions: {why}");
    ExitCode::FAILURE
}

/// Measures and prints the loads that have `only` in their names; returns the figures of the current program.
fn count_all(only: &str, others: &[String], is_check: bool) -> Vec<Row> {
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    println!(
        "instructions a request, the least of {ROUNDS} rounds; of {TAPLINE} and its parts, and of {}",
        others.join(", ")
    );
    println!("{:44}{:>8} {}", "", "all", PARTS.map(|part| format!("{part:>10}")).join(" "));
    let mut rows = Vec::new();
    for load in loads().into_iter().filter(|load| load.name().contains(only)) {
        // What recording costs, of requests in flight or of changed blocks, is shown on request.
        if is_check && (load.is_recorded || load.is_tracked) {
            continue;
        }
        let row = load.figure(TAPLINE);
        let parts = row.parts.map(|part| format!("{part:10.0}")).join(" ");
        // An older program may not support either.
        let asked = if load.is_recorded || load.is_tracked { &[] } else { &others[..] };
        let older: Vec<String> = asked.iter().map(|program| format!("{:10.0}", load.figure(program).total)).collect();
        println!("{:44}{:8.0} {parts} {}", row.load, row.total, older.join(" "));
        rows.push(row);
    }
    rows
}
