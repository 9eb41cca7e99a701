//! What a request costs a disk's process in instructions of its own, under valgrind: `cargo bench -p tapline-disk`.
//!
//! Instructions are the same however busy the machine is, so that a limit of one in a hundred can be seen. Each program
//! is counted with few and with many requests; the difference, divided by the requests between, is the figure: starting
//! and stopping are in neither. What the kernel does is not counted. Other programs, such as an older build, are named
//! behind `--` and are counted beside the present one; `--only=TEXT` counts the loads that have TEXT in their names.

#[allow(dead_code, reason = "the rest is the tests'")]
#[path = "../tests/all/tool/mod.rs"]
mod tool;

use std::path::Path;
use std::process::Command;

use tool::ring::{Driver, Kind};
use tool::served::Disk;
use tool::{Room, TAPLINE};

/// Times that each figure is taken; the median is told.
const ROUNDS: usize = 3;
/// Requests of a short run, and those of a long one beyond it.
const FEW: u64 = 512;
const MORE: u64 = 4096;
/// Requests between two flushes.
const FLUSHED: u64 = 256;

/// What is counted.
#[derive(Clone, Copy)]
struct Load {
    format: &'static str,
    kind: Kind,
    /// Blocks that nobody has written before.
    is_new: bool,
    depth: u64,
    /// The front-end records what is in flight.
    is_recorded: bool,
}

impl Load {
    fn name(&self) -> String {
        let what = match (self.kind, self.is_new) {
            (Kind::Read, _) => "read",
            (_, true) => "first write",
            (_, false) => "write",
        };
        let recorded = if self.is_recorded { "recorded" } else { "not recorded" };
        format!("{} {what}, {} at once, {recorded}", self.format, self.depth)
    }

    /// Instructions of a process that serves so many requests of it, after all blocks were written where it asks for
    /// that.
    fn count(self, program: &str, requests: u64) -> u64 {
        // In memory, where I/O is done at once: what is counted is ours, not the storage's.
        let room = Room::below(Path::new("/dev/shm"));
        room.done(&format!("image create {}:a --size 1G", self.format));
        let counts = room.file("counts");
        let mut command = room.command("valgrind");
        command.args(["--tool=callgrind", &format!("--callgrind-out-file={}", counts.display()), program]);
        // It does not look for work before it sleeps: how often it would look depends on how busy the machine is.
        command.args(["serve", &format!("{}:a", self.format), "--vhost-user", "vm.sock", "--poll-max", "0"]);
        // valgrind knows too little of io_uring: nothing is ever answered.
        command.args(["--io-engine", "aio"]);
        let disk = Disk::start(command);
        let mut driver = Driver::connect(&room.file("vm.sock"), self.is_recorded);
        let blocks = FEW + MORE;
        if !self.is_new {
            Load { depth: 32, ..self }.run(&mut driver, Kind::Write, 0..blocks);
        }
        self.run(&mut driver, self.kind, 0..requests);
        driver.leave();
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        let counted = String::from_utf8(room.read("counts")).unwrap();
        let total = counted.lines().find_map(|line| line.strip_prefix("summary: ").or(line.strip_prefix("totals: ")));
        total.and_then(|total| total.trim().parse().ok()).expect("callgrind says how many there were")
    }

    /// Requests to blocks that lie apart, in batches, with a flush now and then.
    fn run(&self, driver: &mut Driver, kind: Kind, requests: std::ops::Range<u64>) {
        let mut left = requests;
        while !left.is_empty() {
            for n in left.by_ref().take(usize::try_from(self.depth).unwrap()) {
                // An odd number: each block once, in an order that is none.
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

    /// Instructions a request, median.
    fn figure(&self, program: &str) -> f64 {
        let mut seen: Vec<u64> =
            (0..ROUNDS).map(|_| self.count(program, FEW + MORE).saturating_sub(self.count(program, FEW))).collect();
        seen.sort_unstable();
        seen[ROUNDS / 2] as f64 / MORE as f64
    }
}

fn main() {
    let (options, others): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with("--"));
    let only = options.iter().find_map(|word| word.strip_prefix("--only=")).unwrap_or_default();
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("instructions: valgrind is not there; install the package of that name");
        std::process::exit(77);
    }
    let programs: Vec<&str> = std::iter::once(TAPLINE).chain(others.iter().map(String::as_str)).collect();
    println!("instructions a request, medians of {ROUNDS}; programs: {}", programs.join(", "));
    for format in ["raw", "vhd", "qcow2"] {
        for (kind, is_new) in [(Kind::Read, false), (Kind::Write, false), (Kind::Write, true)] {
            for depth in [1, 32] {
                for is_recorded in [false, true] {
                    let load = Load { format, kind, is_new, depth, is_recorded };
                    if !load.name().contains(only) {
                        continue;
                    }
                    // An older program may know nothing of records.
                    let asked = if is_recorded { &programs[..1] } else { &programs[..] };
                    let figures: Vec<String> =
                        asked.iter().map(|program| format!("{:10.0}", load.figure(program))).collect();
                    println!("{:50}{}", load.name(), figures.join(" "));
                }
            }
        }
    }
}
