//! `cargo xtask simulate`: crash exploration from a command line.
//!
//! Parses arguments, limits the time and prints results; the exploration is in the `sim` crate. Every failure is
//! printed with the command that reproduces it.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sim::crash::{AGAIN, Counts, Explorer, WHOLE, WHOLE_CHAIN};
use sim::explore::{self, Bound, Case, Failure, Outcome};
use sim::fault::Fault;
use sim::flat;
use sim::io::{ROOM, Visible};
use sim::logs::ROOMY;
use sim::media::Unwritten;
use sim::planted::Planted;
use sim::schedule::{Pace, Schedule};
use sim::sector::SECTOR;
use sim::shrink::shrink;
use sim::subject::{Kind, LARGE, LayerType, Subject};
use sim::theme::Theme;
use sim::workload::{self, Op, Step};
use testbed::options::positive;

/// Explore crashes of disk images
///
/// Crashes disk images in every way that their storage allows, and compares what is left with the promises to the
/// guest. Without a seed: all workloads of up to N operations, and every fault at every operation. Exit status 0:
/// nothing found (or all planted bugs found). 1: otherwise.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The format to explore
    #[arg(long, default_value = "vhd", value_parser = ["vhd", "qcow2", "chain", "raw"])]
    format: String,
    /// Only this kind of image, such as used-child or qcow2-on-raw; an unknown one lists all
    #[arg(long)]
    kind: Option<Kind>,
    /// Only every Nth kind of image, from the Kth on: part K of N
    #[arg(long, value_name = "K/N", value_parser = part)]
    part: Option<(usize, usize)>,
    /// Sector size of the storage in bytes, 512 or 4096, which is also the smallest write
    #[arg(long, default_value_t = SECTOR, value_parser = unit)]
    unit: u64,
    /// Devices that are too small for the disk; some kinds only
    #[arg(long)]
    small_device: bool,
    /// Only storage whose unwritten sectors are zeroes, or stale
    #[arg(long, value_parser = tail)]
    tail: Option<Unwritten>,
    /// Operations in a workload [default: 3; with --seed 24]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    ops: Option<u32>,
    /// Random workloads, orders and faults, beginning with this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    runs: u64,
    /// Stop after this time, without failure
    #[arg(long)]
    seconds: Option<u64>,
    #[arg(long, default_value_t = 2, value_parser = positive)]
    threads: usize,
    /// Search for this planted bug, or for all, each in its format; fail if one is not found
    #[arg(long, value_name = "NAME")]
    planted: Option<String>,
    /// Maximum number of states to examine for each of them
    #[arg(long, default_value_t = 100_000)]
    states: u64,
    /// Only this workload, as w8+2 W8+2 z0+8 Z0+8 k0+8 d0+1024 r0+8 f (sectors; capitals: FUA; k: zeroes that keep
    /// their space) p33+2 P33+2 q1+2 Q1+2 s1+6 (writes, zeroes and reads of quarters of sectors), and, on chains,
    /// snapshot merge cancel grow clone rebase relink flatten revert; on raw images copy
    #[arg(long, value_name = "OPS")]
    workload: Option<String>,
    /// In this order: s, e or n, and choices, as in e.0.0.2
    #[arg(long, value_name = "ORDER")]
    schedule: Option<Schedule>,
    /// Fault failed, no-space, unsupported or full, at the Nth operation to which it applies
    #[arg(long, value_name = "KIND@N")]
    fault: Option<Fault>,
    /// Reads see a write at-push, or only at-completion
    #[arg(long, default_value = "at-push", value_parser = visible)]
    visible: Visible,
    /// Maximum number of requests in flight
    #[arg(long, default_value_t = 8, value_parser = positive)]
    depth: usize,
    /// Maximum number of file operations in flight [default: any number]
    #[arg(long, default_value_t = ROOM, hide_default_value = true, value_parser = positive)]
    room: usize,
    /// Capacity of a redo log in bytes
    #[arg(long, default_value_t = ROOMY, value_parser = positive)]
    log: usize,
    /// Use the lowest possible limits of the disk: no map, one fill at a time, immediate rounds
    #[arg(long)]
    tight: bool,
    /// Track changed blocks in a map of which this many regions may have an intent
    #[arg(long)]
    intents: Option<usize>,
    /// Split transfers into pieces of this size in bytes
    #[arg(long, value_parser = piece)]
    split: Option<u64>,
    /// Merge adjacent transfers up to this size in bytes
    #[arg(long)]
    merge: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that were checked, with their meaning.
struct Arguments<'a> {
    options: &'a Options,
    subjects: Vec<Subject>,
    workload: Option<Vec<Op>>,
}

/// Runs the chore.
pub fn run(options: &Options) -> Result<(), String> {
    let arguments = Arguments::of(options)?;
    // A panic is a finding like any other, and is printed with it.
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    match (&arguments.workload, &options.planted, options.seed) {
        (Some(workload), _, _) => report(&arguments, &one_workload(&arguments, workload)?),
        (None, Some(name), _) => planted(&arguments, name),
        (None, None, Some(seed)) => report(&arguments, &seeds(&arguments, seed)),
        (None, None, None) => report(&arguments, &everything(&arguments)),
    }
}

impl std::ops::Deref for Arguments<'_> {
    type Target = Options;

    fn deref(&self) -> &Options {
        self.options
    }
}

impl Arguments<'_> {
    fn of(options: &Options) -> Result<Arguments<'_>, String> {
        let mut subjects = subjects(&options.format, options.kind, options.tail)?;
        let sectors = |subject: Subject| if options.unit == LARGE { subject.on_large_sectors() } else { Some(subject) };
        let device = |subject: Subject| if options.small_device { subject.on_small_device() } else { Some(subject) };
        let shaped = |subject: Subject| subject.shaped(options.split, options.merge);
        subjects = subjects.into_iter().filter_map(sectors).filter_map(device).map(shaped).collect();
        if subjects.is_empty() {
            return Err("no such kind of image is explored on such storage".into());
        }
        let workload = options.workload.as_deref().map(workload::parse).transpose();
        let workload = workload.map_err(|error| format!("--workload: {error}"))?;
        if options.kind.is_none() && options.seed.is_none() && workload.is_none() {
            subjects.retain(|subject| !subject.kind.is_deep());
        }
        if let Some((this, all)) = options.part {
            subjects = subjects.into_iter().skip(this - 1).step_by(all).collect();
            if subjects.is_empty() {
                return Err(format!("there are fewer than {this} kinds of images"));
            }
        }
        let themes = subjects.iter().map(|subject| subject.kind.theme());
        check_workload(workload.as_deref().unwrap_or_default(), themes)?;
        Ok(Arguments { options, subjects, workload })
    }

    /// The planted bug, if one is named.
    fn bug(&self) -> Result<Option<Planted>, String> {
        self.planted.as_deref().filter(|name| *name != "all").map(str::parse).transpose()
    }
}

/// Checks that the disks of these themes are large enough for a workload, if necessary after they have grown.
fn check_workload(ops: &[Op], themes: impl Iterator<Item = Theme>) -> Result<(), String> {
    let grows = ops.contains(&Op::Chain(Step::Grow));
    let sectors = themes.map(|theme| if grows { theme.grown() } else { theme.sectors() }).min().unwrap_or(0);
    match ops.iter().find(|op| !op.is_inside(sectors)) {
        Some(op) => Err(format!("--workload: {op} does not lie in the simulated disk of {} sectors", sectors)),
        None => Ok(()),
    }
}

fn unit(text: &str) -> Result<u64, String> {
    let unit = text.parse().ok().filter(|unit| [SECTOR, LARGE].contains(unit));
    unit.ok_or_else(|| format!("drives have sectors of {SECTOR} or {LARGE} bytes"))
}

fn part(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').and_then(|(this, all)| Some((this.parse().ok()?, all.parse().ok()?)));
    numbers.filter(|(this, all)| (1..=*all).contains(this)).ok_or_else(|| "1/4 is the first of four parts".into())
}

fn piece(text: &str) -> Result<u64, String> {
    let piece = text.parse().ok().filter(|piece: &u64| piece.is_power_of_two() && *piece >= SECTOR);
    piece.ok_or_else(|| format!("pieces are powers of two, of {SECTOR} bytes at least"))
}

fn tail(text: &str) -> Result<Unwritten, String> {
    match text {
        "zeroes" => Ok(Unwritten::Zeroes),
        "stale" => Ok(Unwritten::Stale),
        _ => Err("unwritten bytes are zeroes or stale".into()),
    }
}

fn visible(text: &str) -> Result<Visible, String> {
    match text {
        "at-push" => Ok(Visible::AtPush),
        "at-completion" => Ok(Visible::AtCompletion),
        _ => Err("a write is seen at-push or at-completion".into()),
    }
}

fn subjects(format: &str, kind: Option<Kind>, tail: Option<Unwritten>) -> Result<Vec<Subject>, String> {
    let kinds = Kind::of_format(format).unwrap_or_default();
    // One that is named need not be among those of which everything is explored.
    let mut subjects = explore::subjects(kind.as_ref().map_or(kinds, std::slice::from_ref));
    subjects.retain(|subject| subject.kind.format() == format);
    subjects.retain(|subject| tail.is_none_or(|tail| subject.tail == tail));
    if subjects.is_empty() { Err(format!("format {format} has no such kind of image")) } else { Ok(subjects) }
}

/// Tells how far it is, at most once a second, and when the time is over.
struct Progress {
    what: &'static str,
    begun: Instant,
    last: Mutex<Instant>,
    seconds: Option<u64>,
    shown: bool,
}

impl Progress {
    fn new(what: &'static str, arguments: &Arguments<'_>) -> Progress {
        let now = Instant::now();
        let shown = std::io::stderr().is_terminal() && !arguments.json;
        Progress { what, begun: now, last: Mutex::new(now), seconds: arguments.seconds, shown }
    }

    fn keep_going(&self, done: usize, all: usize) -> bool {
        let elapsed = self.begun.elapsed();
        if let Ok(mut last) = self.last.try_lock() {
            if self.shown && last.elapsed() > Duration::from_secs(1) {
                *last = Instant::now();
                eprint!("\r{}: {done} of {all}, {} s ", self.what, elapsed.as_secs());
            }
        }
        self.seconds.is_none_or(|seconds| elapsed.as_secs() < seconds)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}

/// What was done, in words, and what came of it.
struct Findings {
    scope: String,
    outcome: Outcome,
    /// The first difference from an array of bytes.
    difference: Option<String>,
    took: Duration,
}

/// Explores all short workloads, then every fault, then long sequences compared with an array of bytes.
fn everything(arguments: &Arguments<'_>) -> Findings {
    let begun = Instant::now();
    let theme = arguments.subjects.first().map_or(Theme::Image, |subject| subject.kind.theme());
    let bound = Bound::of_ops(arguments.ops.unwrap_or(3), theme);
    let progress = Progress::new("workloads", arguments);
    let mut outcome = explore::exhaustive(&arguments.subjects, bound, None, arguments.threads, &|done, all| {
        progress.keep_going(done, all)
    });
    drop(progress);
    if theme == Theme::Chain && outcome.failure.is_none() {
        let progress = Progress::new("around the beginning of a merge", arguments);
        let around = explore::around_a_beginning(None, arguments.threads, &|done, all| progress.keep_going(done, all));
        outcome.counts.add(around.counts);
        outcome.failure = around.failure;
    }
    if outcome.failure.is_none() {
        let progress = Progress::new("faults", arguments);
        let faults =
            explore::every_fault(&arguments.subjects, arguments.threads, &|done, all| progress.keep_going(done, all));
        outcome.counts.add(faults.counts);
        outcome.failure = faults.failure;
    }
    let tails = [Unwritten::Zeroes, Unwritten::Stale];
    let made = LayerType::of_format(&arguments.format).filter(|_| outcome.failure.is_none());
    let compare = |made, tail| flat::compare(1, made, tail, 6, 500).err().map(|difference| difference.to_string());
    let difference = made.and_then(|made| tails.into_iter().find_map(|tail| compare(made, tail)));
    let images: Vec<String> = arguments.subjects.iter().map(|subject| subject.kind.to_string()).collect();
    let fewer = arguments.subjects.iter().any(|subject| subject.kind.has_less());
    let scope = format!(
        "all workloads of 1 to {} operations{} over an alphabet of {}, on {} images ({}; unwritten bytes zero or \
         stale);\norders: one request after the other, all at once, all at once and the newest first, each with at \
         most {:?} deviations for 1, 2, 3 operations; all states of up to 12 unsynced sectors, else a sample; \
         opened and read where written, 1 in {} throughout, 1 in {AGAIN} lived in and crashed again;\nEIO, \
         ENOSPC, unsupported and a full queue at every operation of {} workloads{}",
        bound.ops,
        if fewer { " (fewer on two formats, with compressed clusters and on what others make)" } else { "" },
        theme.alphabet().len(),
        arguments.subjects.len(),
        dedup(images).join(", "),
        bound.interferences,
        if theme == Theme::Chain { WHOLE_CHAIN } else { WHOLE },
        arguments.subjects.iter().map(|subject| explore::fault_workloads(subject).len()).max().unwrap_or(0),
        if made.is_some() { "; 2 chains of 6 layers against an array of bytes" } else { "" },
    );
    Findings { scope, outcome, difference, took: begun.elapsed() }
}

fn dedup(mut names: Vec<String>) -> Vec<String> {
    names.dedup();
    names
}

fn seeds(arguments: &Arguments<'_>, seed: u64) -> Findings {
    let begun = Instant::now();
    let ops = arguments.ops.unwrap_or(24);
    let progress = Progress::new("runs", arguments);
    let seeds = seed..seed.saturating_add(arguments.runs);
    let len = usize::try_from(ops).unwrap_or(usize::MAX);
    let mut outcome = explore::random(&arguments.subjects, seeds, len, arguments.threads, &|done, all| {
        progress.keep_going(done, all)
    });
    drop(progress);
    outcome.failure = outcome.failure.map(shrink);
    let scope = format!("random workloads of {ops} operations, from seed {seed} on");
    Findings { scope, outcome, difference: None, took: begun.elapsed() }
}

/// Explores one workload with the given schedule, or with many.
fn one_workload(arguments: &Arguments<'_>, workload: &[Op]) -> Result<Findings, String> {
    /// Number of deviations that are tried if no schedule is given.
    const INTERFERENCES: usize = 2;
    let begun = Instant::now();
    let bug = arguments.bug()?;
    let mut explorer = Explorer::default();
    let mut failure = None;
    for subject in arguments.subjects.iter().map(|subject| subject.plant(bug)) {
        let start = explore::prepare(&subject).map_err(|error| error.to_string())?;
        let given = arguments.schedule.clone();
        let starts = given.map_or(Pace::ALL.map(Schedule::undisturbed).to_vec(), |schedule| vec![schedule]);
        for first in starts {
            let mut next = failure.is_none().then_some(first);
            while let Some(schedule) = next {
                let mut case = Case::new(subject, workload.to_vec(), schedule);
                (case.setup.bug, case.setup.fault) = (bug, arguments.fault);
                (case.setup.visible, case.setup.depth) = (arguments.visible, arguments.depth);
                (case.setup.room, case.setup.log, case.setup.tight) = (arguments.room, arguments.log, arguments.tight);
                case.setup.intents = arguments.intents;
                failure = explore::explore(&mut explorer, &start, &mut case).err();
                let more = arguments.schedule.is_none() && failure.is_none();
                next = if more { case.schedule.next(INTERFERENCES) } else { None };
            }
        }
    }
    let outcome = Outcome { counts: explorer.counts, failure };
    let scope = format!("the workload '{}'", workload::text(workload));
    Ok(Findings { scope, outcome, difference: None, took: begun.elapsed() })
}

fn reproduce(failure: &Failure) -> String {
    format!("cargo xtask simulate {}", failure.case)
}

fn counts_json(counts: Counts) -> Value {
    json!({
        "runs": counts.runs, "events": counts.events, "reached": counts.reached,
        "states": counts.states, "second_lives": counts.again,
        "deaths": counts.deaths,
    })
}

fn failure_json(failure: &Failure) -> Value {
    json!({ "violation": failure.violation.to_string(), "reproduce": reproduce(failure) })
}

fn report(arguments: &Arguments<'_>, findings: &Findings) -> Result<(), String> {
    let Findings { scope, outcome, difference, took } = findings;
    let failed = outcome.failure.is_some() || difference.is_some();
    if arguments.json {
        let failure = outcome.failure.as_ref().map(failure_json);
        let object = json!({
            "format": arguments.format, "scope": scope, "counts": counts_json(outcome.counts),
            "seconds": took.as_secs_f64(), "failure": failure, "difference": difference,
        });
        println!("{object}");
    } else {
        let Counts { runs, events, reached, states, again, deaths } = outcome.counts;
        println!("{scope}");
        println!(
            "{runs} runs, {events} moments, {reached} states reached, {states} different ones opened and compared, \
             {again} lived in again; {deaths} processes that died and were followed by another; {:.1} s",
            took.as_secs_f64()
        );
        if !failed {
            println!("nothing found");
        }
    }
    match (&outcome.failure, difference) {
        (Some(failure), _) => Err(format!("FOUND: {failure}\nagain: {}", reproduce(failure))),
        (None, Some(difference)) => {
            Err(format!("FOUND: {difference}\nagain: cargo xtask simulate --format {} --ops 1", arguments.format))
        }
        (None, None) => Ok(()),
    }
}

/// Searches for planted bugs.
fn planted(arguments: &Arguments<'_>, name: &str) -> Result<(), String> {
    let bugs: Vec<Planted> = if name == "all" { Planted::all().collect() } else { vec![name.parse()?] };
    let begun = Instant::now();
    let mut missed = Vec::new();
    let mut list = Vec::new();
    for bug in &bugs {
        let Outcome { counts, failure } = explore::hunt(*bug, arguments.states);
        let mut line = String::new();
        let result = match &failure {
            Some(failure) => write!(line, "{bug:20} found after {:6} states: {failure}", counts.states),
            None => write!(line, "{bug:20} NOT FOUND in {} states", counts.states),
        };
        result.map_err(|error| error.to_string())?;
        if !arguments.json {
            println!("{}", line.chars().take(160).collect::<String>());
        }
        if failure.is_none() {
            missed.push(bug.to_string());
        }
        list.push(json!({
            "name": bug.to_string(), "found": failure.is_some(), "counts": counts_json(counts),
            "failure": failure.as_ref().map(failure_json),
        }));
        if let (Some(failure), 1, false) = (&failure, bugs.len(), arguments.json) {
            println!("again: {}", reproduce(failure));
        }
    }
    let (found, took) = (bugs.len().saturating_sub(missed.len()), begun.elapsed().as_secs_f64());
    if arguments.json {
        println!("{}", json!({ "planted": list, "found": found, "of": bugs.len(), "seconds": took }));
    } else {
        println!("found {found}/{}, {took:.1} s", bugs.len());
    }
    if missed.is_empty() { Ok(()) } else { Err(format!("not found: {}", missed.join(", "))) }
}

#[cfg(test)]
mod test {
    use super::*;

    fn parse(words: &str) -> Result<Options, String> {
        testbed::options::parse(&words.split_whitespace().collect::<Vec<_>>())
    }

    #[test]
    fn a_reproduction_is_a_command_that_is_understood() {
        let case = Case::new(
            Subject::new(Kind::Child, Unwritten::Stale),
            workload::parse("f").unwrap_or_default(),
            Schedule::undisturbed(Pace::Newest),
        );
        let options = parse(&case.to_string().replace('\'', "")).unwrap();
        let again = Arguments::of(&options).unwrap();
        assert_eq!((again.subjects, again.workload), (vec![case.setup.subject], Some(case.workload)));
    }

    #[test]
    fn an_unknown_option_and_a_missing_value_are_named() {
        assert!(parse("--op 3").unwrap_err().contains("unexpected argument '--op'"));
        assert!(parse("--seed").unwrap_err().contains("a value is required for '--seed <SEED>'"));
    }

    #[test]
    fn impossible_arguments_are_refused() {
        let is_refused = |words: &str| parse(words).map_or(true, |options| Arguments::of(&options).is_err());
        assert!(!is_refused("--ops 3"));
        for words in ["--op 3", "--seed", "--format vhd --kind raw", "--depth 0", "--workload w2560+1", "--unit 1024"] {
            assert!(is_refused(words), "{words}");
        }
    }
}
