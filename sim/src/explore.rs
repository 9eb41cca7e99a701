//! Runs many workloads with many schedules, and examines the power losses at each event.
//!
//! Knows nothing about clocks or terminals: the caller decides when to stop.

mod beginning;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use disk::ImageError;

use crate::crash::{Counts, Explorer, Scene};
use crate::fault::{Fault, FaultKind};
use crate::io::{ROOM, Visible};
use crate::logs::ROOMY;
use crate::media::Unwritten;
use crate::planted::Planted;
use crate::random::Random;
use crate::run::{End, Setup, Violation, run};
use crate::schedule::{Pace, Schedule};
use crate::sector::{Word, Words};
use crate::subject::{Kind, LayerType, Start, Subject, misspell};
use crate::theme::Theme;
use crate::workload::{self, Op};
pub use beginning::around_a_beginning;

/// The first version number of the explored workload; preparations have greater ones.
const FIRST: u64 = 1;
/// The first version number of the lowest layer's preparation, and the range of each preparation.
const PREPARATION: u64 = 40_000;
const PREPARATIONS: u64 = 1_000;

/// One run, completely described.
#[derive(Clone, Debug)]
pub struct Case {
    /// The image, and the faults.
    pub setup: Setup,
    /// The requests of the guest.
    pub workload: Vec<Op>,
    /// The order of events.
    pub schedule: Schedule,
}

impl Case {
    /// A case without bugs or faults.
    pub fn new(subject: Subject, workload: Vec<Op>, schedule: Schedule) -> Case {
        let setup = Setup {
            subject,
            bug: None,
            fault: None,
            visible: Visible::AtPush,
            depth: 8,
            room: ROOM,
            first: FIRST,
            log: ROOMY,
            tight: false,
            intents: None,
        };
        Case { setup, workload, schedule }
    }
}

impl fmt::Display for Case {
    /// The arguments of the command that runs this case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { subject, bug, fault, visible, depth, room, log, tight, intents, .. } = &self.setup;
        write!(f, "{subject}")?;
        bug.map_or(Ok(()), |bug| write!(f, " --planted {bug}"))?;
        fault.map_or(Ok(()), |fault| write!(f, " --fault {fault}"))?;
        if *visible == Visible::AtCompletion {
            write!(f, " --visible at-completion")?;
        }
        if *room < ROOM {
            write!(f, " --room {room}")?;
        }
        if *log < ROOMY {
            write!(f, " --log {log}")?;
        }
        if *tight {
            write!(f, " --tight")?;
        }
        intents.map_or(Ok(()), |intents| write!(f, " --intents {intents}"))?;
        write!(f, " --depth {depth} --schedule {} --workload '{}'", self.schedule, workload::text(&self.workload))
    }
}

/// A violation with the run that led to it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{violation}")]
pub struct Failure {
    /// The violation that was found.
    pub violation: Violation,
    /// The run in which it was found.
    pub case: Box<Case>,
}

/// The result of an exploration.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The counts of the exploration.
    pub counts: Counts,
    /// The first failure, which ends the search.
    pub failure: Option<Failure>,
}

/// The image of a subject, with the preparation of each layer done and durable, the lowest first.
pub fn prepare(subject: &Subject) -> Result<Start, ImageError> {
    let honest = Subject { told: subject.tail, ..*subject };
    let mut start = Start::default();
    for (below, layer) in subject.kind.layers().into_iter().rev().enumerate() {
        start.files.insert(0, subject.create_above(layer.made, &start)?);
        start.forms.insert(0, layer.made.form());
        start.base.extend(layer.made.given().into_iter().map(|(sector, word)| (sector, Words::whole(word))));
        let first = PREPARATION + PREPARATIONS * u64::try_from(below).unwrap_or(0);
        live_first(honest, &mut start, layer.preparation, first);
        if let (LayerType::MisspeltVhd, Some(file)) = (layer.made, start.files.first_mut()) {
            misspell(file);
        }
    }
    Ok(start)
}

/// Runs the preparation of a layer, with requests numbered from `first`.
fn live_first(subject: Subject, start: &mut Start, preparation: &str, first: u64) {
    let preparation = workload::parse(preparation).unwrap_or_default();
    if preparation.is_empty() {
        return;
    }
    let mut case = Case::new(subject, preparation, Schedule::undisturbed(Pace::Serial));
    case.setup.first = first;
    let end = match run(&case.setup, start, &case.workload, &mut case.schedule, &mut |_| Ok(())) {
        Ok(end) => end,
        Err(violation) => panic!("the preparation of {:?} fails: {violation}", subject.kind),
    };
    let written = case.workload.iter().zip(first..).filter(|(op, _)| matches!(op, Op::Write(..)));
    for (op, number) in written {
        let version = u32::try_from(number).unwrap_or(u32::MAX);
        let word = |sector| Words::whole(Word::guest(version, sector));
        start.base.extend(op.sectors().range().map(|sector| (sector, word(sector))));
    }
    start.files = end.files;
}

/// Runs one case and examines every power loss in it.
pub fn explore(explorer: &mut Explorer, start: &Start, case: &mut Case) -> Result<End, Failure> {
    explorer.begin_run();
    let Case { setup, workload, schedule } = case;
    explorer.deaths_each = if workload.len() == COMMON { DEATHS_EACH } else { 1 };
    let looked = catch_unwind(AssertUnwindSafe(|| {
        let scene = Scene { setup, first_life: true };
        run(setup, start, workload, schedule, &mut |sight| {
            explorer.event(scene, sight)?;
            explorer.death(scene, sight)
        })
    }));
    let result = looked.unwrap_or_else(|panic| Err(Violation::Panic(panic_text(panic.as_ref()))));
    result.map_err(|violation| Failure { violation, case: Box::new(case.clone()) })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("of an unknown kind").into()
}

/// Length of the workloads of which there are most. Deaths of a process in them mostly repeat what shorter ones have
/// shown, so the process dies only at one of [`DEATHS_EACH`] times.
const COMMON: usize = 3;
const DEATHS_EACH: u64 = 4;

/// Limits of an exhaustive search.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Maximum number of operations in a workload.
    pub ops: u32,
    /// For each length of a workload, from 1 on: the maximum number of deviations of a schedule from "each request ends
    /// before the next begins" and from "all begin before the first ends". The last entry applies to all longer ones.
    pub interferences: [usize; 3],
}

impl Bound {
    /// The bound of the run for every change, which takes some minutes.
    pub fn of_ops(ops: u32, theme: Theme) -> Bound {
        let interferences = match theme {
            Theme::Image => [3, 2, 1],
            Theme::Growing => [2, 1, 1],
            Theme::Chain => [1, 1, 0],
        };
        Bound { ops, interferences }
    }

    /// Maximum number of operations for this kind of image. Mixed chains are as many again, and short workloads suffice
    /// for what is new in them: allocations of one format taken over by the other. The same applies to images that
    /// other programs create, with an internal snapshot or of version 2. With compressed clusters a single operation
    /// suffices: a cluster that is shared, or partly overwritten.
    pub fn ops_of(&self, kind: Kind) -> u32 {
        let of_others = kind.is_of_others();
        match (kind.is_packed() || of_others && kind.theme() == Theme::Chain, kind.is_mixed() || of_others) {
            (true, _) => 1,
            (false, true) => self.ops.saturating_sub(1).max(1),
            (false, false) => self.ops,
        }
    }

    fn interferences(&self, len: u32) -> usize {
        let at = usize::try_from(len).unwrap_or(usize::MAX).clamp(1, self.interferences.len()) - 1;
        self.interferences.get(at).copied().unwrap_or(0)
    }
}

/// Explores all workloads within `bound` on all `subjects`, with `threads` threads. `keep_going` is called periodically
/// with the number of workloads done and in total.
pub fn exhaustive(
    subjects: &[Subject],
    bound: Bound,
    bug: Option<Planted>,
    threads: usize,
    keep_going: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Outcome {
    let themes: BTreeMap<Kind, Vec<Vec<Op>>> = subjects
        .iter()
        .map(|Subject { kind, .. }| (*kind, (1..=bound.ops_of(*kind)).flat_map(|len| kind.every(len)).collect()))
        .collect();
    let chunks = |subject: &Subject| themes.get(&subject.kind).map(|workloads| workloads.chunks(CHUNK));
    let jobs: Vec<(Subject, &[Vec<Op>])> = subjects
        .iter()
        .flat_map(|subject| chunks(subject).into_iter().flatten().map(|chunk| (*subject, chunk)))
        .collect();
    let all: usize = jobs.iter().map(|(_, chunk)| chunk.len()).sum();
    let done = AtomicUsize::new(0);
    in_threads(Explorer::default, threads, jobs.len(), &|explorer, job| {
        let (subject, chunk) = jobs[job];
        let start = start_of(&subject, chunk.first())?;
        for workload in chunk {
            let len = u32::try_from(workload.len()).unwrap_or(u32::MAX);
            every_schedule(explorer, &start, subject, workload, bug, bound.interferences(len))?;
            if !keep_going(done.fetch_add(1, Ordering::Relaxed), all) {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Number of workloads that a thread takes at a time.
const CHUNK: usize = 40;

/// The prepared image, or the failure to prepare it.
fn start_of(subject: &Subject, workload: Option<&Vec<Op>>) -> Result<Start, Failure> {
    prepare(subject).map_err(|error| Failure {
        violation: Violation::Open(error),
        case: Box::new(Case::new(*subject, workload.cloned().unwrap_or_default(), Schedule::undisturbed(Pace::Serial))),
    })
}

fn every_schedule(
    explorer: &mut Explorer,
    start: &Start,
    subject: Subject,
    workload: &[Op],
    bug: Option<Planted>,
    interferences: usize,
) -> Result<(), Failure> {
    for pace in Pace::ALL {
        let mut next = Some(Schedule::undisturbed(pace));
        let mut visible = Visible::AtPush;
        while let Some(schedule) = next {
            let mut case = Case::new(subject, workload.to_vec(), schedule);
            (case.setup.bug, case.setup.visible) = (bug, visible);
            explore(explorer, start, &mut case)?;
            next = case.schedule.next(interferences);
            // The two kinds of storage alternate.
            visible = match visible {
                Visible::AtPush => Visible::AtCompletion,
                Visible::AtCompletion => Visible::AtPush,
            };
        }
    }
    Ok(())
}

/// Distributes jobs to threads until all are done, one fails, or one ends the search.
fn in_threads(
    explorer: fn() -> Explorer,
    threads: usize,
    jobs: usize,
    work: &(dyn Fn(&mut Explorer, usize) -> Result<bool, Failure> + Sync),
) -> Outcome {
    let next = AtomicUsize::new(0);
    let enough = AtomicBool::new(false);
    let outcome = Mutex::new(Outcome::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut explorer = explorer();
                let mut failure = None;
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    if job >= jobs || enough.load(Ordering::Relaxed) {
                        break;
                    }
                    match work(&mut explorer, job) {
                        Ok(true) => {}
                        Ok(false) => enough.store(true, Ordering::Relaxed),
                        Err(found) => {
                            failure = Some(found);
                            enough.store(true, Ordering::Relaxed);
                        }
                    }
                }
                let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                outcome.counts.add(explorer.counts);
                outcome.failure = outcome.failure.take().or(failure);
            });
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The case of a seed, from which image, storage, depth, fault, workload and order are derived.
pub fn seeded(subjects: &[Subject], seed: u64, ops: usize, bug: Option<Planted>) -> Case {
    let mut random = Random::new(seed);
    let subject = subjects[random.index(subjects.len())];
    let workload = subject.kind.theme().random(&mut random, ops);
    let mut case = Case::new(subject, workload, Schedule::seeded(random.number()));
    case.setup.visible = [Visible::AtPush, Visible::AtCompletion][random.index(2)];
    case.setup.depth = 1 + random.index(8);
    // One in four engines has a queue that is shorter than the disk's requests need.
    case.setup.room = [1 + random.index(4), ROOM, ROOM, ROOM][random.index(4)];
    let kinds = bug.map_or(&[][..], Planted::faults);
    let nth = 1 + random.below(u64::try_from(ops).unwrap_or(0) * 4);
    let kind = [FaultKind::Failed, FaultKind::NoSpace, FaultKind::Unsupported, FaultKind::Full][random.index(4)];
    let faulty = random.below(4) == 0;
    case.setup.fault = match kinds.first() {
        // A small number, because few operations are deallocations.
        Some(FaultKind::Unsupported) => Some(Fault { kind: FaultKind::Unsupported, nth: nth % 3 + 1 }),
        // A merge should have reached its round.
        Some(FaultKind::Failed) => Some(Fault { kind: FaultKind::Failed, nth }),
        Some(kind) => Some(Fault { kind: *kind, nth: nth % 16 + 1 }),
        None => faulty.then_some(Fault { kind, nth }),
    };
    // One in four redo logs is soon full, or has no room at all.
    let small = [FULL << random.index(8), 512 + 256 * random.index(4)][random.index(2)];
    case.setup.log = [small, ROOMY, ROOMY, ROOMY][random.index(4)];
    if bug.is_some_and(Planted::needs_full_log) {
        case.setup.log = FULL;
    }
    // One in four disks has low limits.
    case.setup.tight = random.below(4) == 0;
    // One in four guests ignores sector boundaries.
    if random.below(4) == 0 || bug.is_some_and(Planted::is_about_parts) {
        case.workload = workload::in_parts(case.workload, &mut random);
    }
    case.workload.splice(0..0, bug.into_iter().flat_map(Planted::needs).copied());
    case.setup.bug = bug;
    // One in four storages has large sectors, which a bug planted there has anyway.
    let large = random.below(4) == 0 && bug.is_none();
    let subject = if large { subject.on_large_sectors().unwrap_or(subject) } else { subject.plant(bug) };
    // One in four devices, where possible, is too small for its disk.
    let small = random.below(4) == 0 && bug.is_none();
    case.setup.subject = subject.on_small_device().filter(|_| small).unwrap_or(subject);
    // One in four engines splits transfers, merges them or both.
    if random.below(4) == 0 && bug.is_none() {
        case.setup.subject = case.setup.subject.shaped_at_random(&mut random);
    }
    case.setup.intents = crate::changes::intents_at_random(bug, &mut random);
    case
}

/// Explores the cases of `runs` seeds, beginning with `seed`.
pub fn random(
    subjects: &[Subject],
    seeds: std::ops::Range<u64>,
    ops: usize,
    threads: usize,
    keep_going: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Outcome {
    let jobs = usize::try_from(seeds.end.saturating_sub(seeds.start)).unwrap_or(usize::MAX);
    let done = AtomicUsize::new(0);
    in_threads(Explorer::broad, threads, jobs, &|explorer, job| {
        let seed = seeds.start + u64::try_from(job).unwrap_or(0);
        let mut case = seeded(subjects, seed, ops, None);
        let start = start_of(&case.setup.subject, Some(&case.workload))?;
        // So that a seed finds the same alone as among others.
        explorer.forget();
        explore(explorer, &start, &mut case)?;
        Ok(keep_going(done.fetch_add(1, Ordering::Relaxed), jobs))
    })
}

/// Searches for a planted bug in images of its format, until it is found or `states_max` states were examined.
pub fn hunt(bug: Planted, states_max: u64) -> Outcome {
    let kinds = Kind::of_format(bug.format()).unwrap_or_default();
    // Layers of two formats have no bugs of their own, and longer chains would need longer workloads.
    let kinds: Vec<Kind> = kinds.iter().copied().filter(|kind| !kind.is_mixed() && kind.is_searched_for(bug)).collect();
    let subjects = subjects(&kinds);
    let ops = if bug.needs_an_order() { 1 } else { HUNT_OPS };
    let mut explorer = Explorer::broad();
    let mut failure = None;
    for seed in 0.. {
        let mut case = seeded(&subjects, seed, ops, Some(bug));
        let looked = start_of(&case.setup.subject, None).and_then(|start| explore(&mut explorer, &start, &mut case));
        failure = looked.err();
        if failure.is_some() || explorer.counts.states >= states_max {
            break;
        }
    }
    Outcome { counts: explorer.counts, failure }
}

/// Size in bytes of a redo log that the first change fills.
const FULL: usize = 16;

/// Number of operations in a workload of a hunt, unless the bug needs a certain order: enough to allocate, free and
/// reallocate a cluster, and for a disk to grow, merge a layer and be used after its old end.
const HUNT_OPS: usize = 16;

/// All subjects of some kinds, on both kinds of storage.
pub fn subjects(kinds: &[Kind]) -> Vec<Subject> {
    let tails = [Unwritten::Zeroes, Unwritten::Stale];
    kinds.iter().flat_map(|kind| tails.map(|tail| Subject::new(*kind, tail))).collect()
}

/// Fails the first operation, the second and so on until a run ends without a failure, for each kind of fault, image
/// and workload.
pub fn every_fault(
    subjects: &[Subject],
    threads: usize,
    keep_going: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Outcome {
    let kinds = [FaultKind::Failed, FaultKind::NoSpace, FaultKind::Unsupported, FaultKind::Full];
    let jobs: Vec<(Subject, FaultKind, &str)> = subjects
        .iter()
        .flat_map(|subject| {
            kinds
                .into_iter()
                .flat_map(move |kind| fault_workloads(subject).iter().map(move |text| (*subject, kind, *text)))
        })
        .collect();
    let done = AtomicUsize::new(0);
    in_threads(Explorer::broad, threads, jobs.len(), &|explorer, job| {
        let (subject, kind, text) = jobs[job];
        let workload = workload::parse(text).unwrap_or_default();
        let start = start_of(&subject, Some(&workload))?;
        for pace in Pace::ALL {
            for nth in 1.. {
                let mut case = Case::new(subject, workload.clone(), Schedule::undisturbed(pace));
                case.setup.fault = Some(Fault { kind, nth });
                if !explore(explorer, &start, &mut case)?.fault_happened {
                    break;
                }
            }
        }
        Ok(keep_going(done.fetch_add(1, Ordering::Relaxed), jobs.len()))
    })
}

/// The workloads in which each operation fails once.
pub fn fault_workloads(subject: &Subject) -> &'static [&'static str] {
    match subject.kind.theme() {
        Theme::Image => &FAULT_WORKLOADS[..],
        Theme::Growing => &GROWTH_FAULT_WORKLOADS,
        Theme::Chain if subject.kind.has_less() => &MIXED_FAULT_WORKLOADS,
        Theme::Chain => &CHAIN_FAULT_WORKLOADS,
    }
}

/// Workloads for faults: allocation, reuse and discards, each followed by a flush so that a lost write is found.
const FAULT_WORKLOADS: [&str; 5] = [
    "w0+2 w1024+1 f w3+1 r0+8 W1+1 r0+8 f",
    "w0+4 f d0+1024 f w1024+2 w4+1 f r0+8 w0+1 f",
    "w2+1 f z0+1024 f w1026+1 z2+3 f r0+8 w9+1 f",
    "W1023+2 w2048+1 d0+8 Z2048+2 f r1020+8 w2050+1 r2048+4 f",
    "p1+2 w1+1 P3+6 f q4094+5 w1024+1 f s1+9 Q9+1 f",
];
/// The same for disks that grow and are used after their old end.
const GROWTH_FAULT_WORKLOADS: [&str; 6] = {
    let [first, second, third, fourth, fifth] = FAULT_WORKLOADS;
    [first, second, third, fourth, fifth, "w2556+1 f grow W2557+2 f w263166+2 d0+8 f w1026+1 r2550+9 f"]
};
/// For chains of two formats or with compressed clusters: a snapshot in the one, merged into the other.
const MIXED_FAULT_WORKLOADS: [&str; 1] = ["snapshot W0+3 merge w4095+2 f merge d0+1024 f"];
/// The same for chains: each verb with requests before and after it, and repeated after its failure.
const CHAIN_FAULT_WORKLOADS: [&str; 8] = [
    "w0+2 snapshot w1+2 f r0+8 snapshot w0+1 f",
    "w0+2 merge w1+2 f r0+8 merge f r4090+8",
    "snapshot W0+3 merge w4095+2 f merge d0+1024 f",
    "w1+1 merge W2+1 cancel w4095+2 f merge r0+8 f",
    "W0+2 merge f snapshot f",
    "w0+2 rebase w1+2 f r0+8 flatten W0+1 f",
    "W0+2 snapshot w1+2 clone f revert w0+1 f relink W1+1 f",
    "p1+2 merge P6+3 p16382+4 f q2+7 snapshot p5+1 s0+16 f",
];
