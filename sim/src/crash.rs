//! Looks at every state in which a power loss could leave a file, and holds each against the oracle.
//!
//! Invariants checked in each state:
//! - the image opens without an operator, and a check finds no damage;
//! - every sector reads as something legal (in one state of [`WHOLE`] every sector of the disk, in the others those
//!   around everything that was ever written);
//! - in one state of [`AGAIN`], the same holds all along a second life that begins there, and after its power
//!   losses.
//!
//! States: all combinations of contents for the sectors that are not durable, if they are few; else none, all, only
//! one, all but one, whole pages of 4 KiB, and many at random. Each with and without the file's growth, and each
//! sector of a guest that was being written also as rubbish. A state that was seen before with the same legal
//! contents is not looked at again.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use disk::{Disk, Operation, Options, Request, Span, Status, Token};
use memory::Segments;

use crate::file::{Crash, Fate, SimFile};
use crate::io::{ROOM, SimIo, Visible};
use crate::media::{Media, Unwritten};
use crate::oracle::{Legal, Oracle};
use crate::random::Random;
use crate::run::{Setup, Violation, run, words_of};
use crate::schedule::{Pace, Schedule};
use crate::sector::{SECTOR, Word, mix};
use crate::subject::{Start, Subject};
use crate::workload::{self, BLOCK, DISK, Op};

/// One state in so many is lived in again.
pub const AGAIN: u64 = 64;
/// One state in so many is read from end to end; the others where the workload was, and around it.
pub const WHOLE: u64 = 12;
/// Sectors read on each side of every border of a write.
const AROUND: u64 = 8;
/// Sectors of one read when everything is read.
const PIECE: usize = 128;
/// The same.
const PIECE_LEN: u64 = 128;
/// The first version number of a second life.
const SECOND_LIFE: u64 = 50_000;
/// What a second life does: new blocks, old ones, freed ones.
const SECOND_WORKLOAD: &str = "w1026+2 w2+1 f d0+1024 w2049+1 W7+1";

/// What was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs of a workload under a schedule.
    pub runs: u64,
    /// Moments with a power loss of their own.
    pub events: u64,
    /// States reached, also those seen before.
    pub reached: u64,
    /// States opened, checked, read and compared.
    pub states: u64,
    /// Second lives.
    pub again: u64,
}

impl Counts {
    /// Adds what another has looked at.
    pub fn add(&mut self, other: Counts) {
        self.runs += other.runs;
        self.events += other.events;
        self.reached += other.reached;
        self.states += other.states;
        self.again += other.again;
    }
}

/// The memory of an exploration.
pub struct Explorer {
    seen: HashSet<u64>,
    second_workload: Vec<Op>,
    /// An event with at most so many states has all of them looked at: 4096 is every subset of 12 sectors.
    pub all_up_to: u64,
    /// Of one with more, twice so many at random.
    pub at_random: u64,
    /// What was looked at so far.
    pub counts: Counts,
}

impl Explorer {
    /// One that rather looks at many events than at many states of each: for long workloads.
    pub fn broad() -> Explorer {
        Explorer { all_up_to: 64, at_random: 8, ..Explorer::default() }
    }
}

impl Default for Explorer {
    fn default() -> Explorer {
        let second_workload = workload::parse(SECOND_WORKLOAD).unwrap_or_default();
        Explorer { seen: HashSet::new(), second_workload, all_up_to: 4096, at_random: 64, counts: Counts::default() }
    }
}

/// What is being explored, and whether this is its first life.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// How the run was set up.
    pub setup: &'a Setup,
    /// The layers below the leaf.
    pub parents: &'a [Media],
    /// Whether states are lived in again.
    pub first_life: bool,
}

impl Explorer {
    /// Forgets which states were seen: a search without end must not remember without end.
    pub fn forget(&mut self) {
        self.seen.clear();
    }

    /// Looks at all states in which a power loss at this moment may leave the leaf.
    pub fn event(&mut self, scene: Scene<'_>, leaf: &SimFile, oracle: &Oracle) -> Result<(), Violation> {
        let crash = leaf.crash();
        let legal = oracle.after_crash();
        let legal_digest = mix(legal.digest() ^ scene_digest(scene));
        if !self.seen.insert(mix(crash.digest() ^ legal_digest)) {
            return Ok(());
        }
        self.counts.events += 1;
        let growths: &[bool] = if crash.grown() { &[false, true] } else { &[false] };
        let mut windows = None;
        let limits = (self.all_up_to, self.at_random);
        let mut look = |fates: &[Fate]| {
            for growth_lost in growths.iter().copied() {
                self.counts.reached += 1;
                let digest = mix(crash.state_digest(fates, growth_lost) ^ legal_digest);
                if self.seen.insert(digest) {
                    let windows = windows.get_or_insert_with(|| windows_of(&legal, oracle));
                    self.state(scene, crash.state(fates, growth_lost), &legal, windows, digest)?;
                }
            }
            Ok(())
        };
        each_state(&crash, limits, &mut look)
    }

    fn state(
        &mut self,
        scene: Scene<'_>,
        leaf: Media,
        legal: &Legal<'_>,
        windows: &[Range<u64>],
        digest: u64,
    ) -> Result<(), Violation> {
        self.counts.states += 1;
        let mut files = vec![leaf];
        files.extend_from_slice(scene.parents);
        let again = scene.first_life && digest % AGAIN == 0;
        if !again && digest % WHOLE != 0 {
            return recover(&scene.setup.subject, files, windows, &mut |sector, word| legal.check(sector, word));
        }
        // Opening looks for damage too, so that this is seldom news.
        if let Some(damage) = files.first_mut().and_then(|leaf| scene.setup.subject.damage(leaf)) {
            return Err(Violation::Damage(damage));
        }
        let mut base = BTreeMap::new();
        let everything: Vec<_> = (0..DISK).step_by(PIECE).map(|at| at..(at + PIECE_LEN).min(DISK)).collect();
        recover(&scene.setup.subject, files.clone(), &everything, &mut |sector, word| {
            if word != Word::ZERO {
                base.insert(sector, word);
            }
            legal.check(sector, word)
        })?;
        if again { self.live_again(scene, Start { files, base }, digest) } else { Ok(()) }
    }

    /// A second life, and its power losses.
    fn live_again(&mut self, scene: Scene<'_>, start: Start, digest: u64) -> Result<(), Violation> {
        self.counts.again += 1;
        let setup = Setup { fault: None, first: SECOND_LIFE, ..*scene.setup };
        let pace = if digest & (1 << 40) == 0 { Pace::Serial } else { Pace::Eager };
        let workload = self.second_workload.clone();
        let limits = (self.all_up_to, self.at_random);
        (self.all_up_to, self.at_random) = (16, 4);
        let result = run(&setup, &start, &workload, &mut Schedule::undisturbed(pace), &mut |leaf, oracle| {
            self.event(Scene { setup: &setup, parents: scene.parents, first_life: false }, leaf, oracle)
        });
        (self.all_up_to, self.at_random) = limits;
        result.map(|_| ())
    }
}

/// A number for what must be the same for two states to be the same.
fn scene_digest(scene: Scene<'_>) -> u64 {
    let Subject { kind, told, .. } = scene.setup.subject;
    let stale = |tail| u64::from(tail == Unwritten::Stale);
    let kind = kind.to_string().bytes().fold(0, |sum: u64, byte| mix(sum ^ u64::from(byte)));
    mix(kind ^ (stale(scene.setup.subject.tail) << 1) ^ (stale(told) << 2) ^ u64::from(scene.first_life))
}

/// Calls `look` with the fates of all states that are to be looked at.
fn each_state(
    crash: &Crash<'_>,
    (all_up_to, at_random): (u64, u64),
    look: &mut dyn FnMut(&[Fate]) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let places = crash.places();
    let options = |place: usize| u64::try_from(crash.contents(place) + 1).unwrap_or(u64::MAX);
    let all = (0..places).try_fold(1u64, |product, place| product.checked_mul(options(place)));
    match all.filter(|all| *all <= all_up_to) {
        Some(all) => (0..all).try_for_each(|number| look(&combination(number, places, options)))?,
        None => some_states(crash, places, at_random, look)?,
    }
    // Rubbish beside what is lost and beside what is kept.
    for place in 0..places {
        for others in [Fate::Lost, Fate::Kept(0)] {
            let mut fates = vec![others; places];
            fates[place] = Fate::Trashed;
            look(&fates)?;
        }
    }
    Ok(())
}

/// The `number`th combination of fates.
fn combination(number: u64, places: usize, options: impl Fn(usize) -> u64) -> Vec<Fate> {
    let mut rest = number;
    let mut fate = |place| {
        let picked = rest % options(place);
        rest /= options(place);
        match picked.checked_sub(1) {
            None => Fate::Lost,
            Some(back) => Fate::Kept(u8::try_from(back).unwrap_or(u8::MAX)),
        }
    };
    (0..places).map(&mut fate).collect()
}

/// Of too many states those that are most telling, and some at random.
fn some_states(
    crash: &Crash<'_>,
    places: usize,
    at_random: u64,
    look: &mut dyn FnMut(&[Fate]) -> Result<(), Violation>,
) -> Result<(), Violation> {
    for (one, others) in [(Fate::Kept(0), Fate::Lost), (Fate::Lost, Fate::Kept(0))] {
        look(&vec![others; places])?;
        for place in 0..places {
            let mut fates = vec![others; places];
            fates[place] = one;
            look(&fates)?;
        }
    }
    // Storage that writes 4 KiB at once: every sector of a page has the same fate.
    let pages: Vec<u64> = crash.sectors().map(|sector| sector / 8).collect();
    let mut random = Random::new(crash.digest());
    for _ in 0..at_random {
        let seed = random.number();
        let by_page: Vec<Fate> = pages.iter().map(|page| coin(mix(seed ^ page))).collect();
        look(&by_page)?;
        let mut each = |place| {
            let back = random.index(crash.contents(place) + 1);
            if back == 0 { Fate::Lost } else { Fate::Kept(u8::try_from(back - 1).unwrap_or(u8::MAX)) }
        };
        look(&(0..places).map(&mut each).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn coin(number: u64) -> Fate {
    if number % 2 == 0 { Fate::Lost } else { Fate::Kept(0) }
}

/// Where something may have gone wrong: around every border of a write and of a block, and where there was
/// something from the beginning.
fn windows_of(legal: &Legal<'_>, oracle: &Oracle) -> Vec<Range<u64>> {
    let borders = legal.runs().flat_map(|run| [run.start, run.end]);
    let blocks = (0..=DISK / BLOCK).map(|block| block * BLOCK);
    let around = |at: u64| at.saturating_sub(AROUND)..(at + AROUND).min(DISK);
    let mut windows: Vec<Range<u64>> = borders.chain(blocks).chain(oracle.based()).map(around).collect();
    windows.sort_unstable_by_key(|window| window.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for window in windows {
        match merged.last_mut() {
            Some(last) if window.start <= last.end => last.end = last.end.max(window.end),
            _ => merged.push(window),
        }
    }
    merged
}

/// Opens the image as after a power loss and hands what is read there to `judge`.
pub fn recover(
    subject: &Subject,
    mut files: Vec<Media>,
    windows: &[Range<u64>],
    judge: &mut dyn FnMut(u64, Word) -> Result<(), crate::oracle::Illegal>,
) -> Result<(), Violation> {
    let layers = subject.open(&mut files).map_err(Violation::Open)?;
    let options = Options { requests: windows.len(), ..Options::default() };
    let mut disk = Disk::new(layers, options).map_err(Violation::Open)?;
    let mut io = SimIo::new(files, Visible::AtCompletion, ROOM, None);
    let mut found = Ok(());
    for window in windows {
        let span = Span { at: window.start * SECTOR, len: (window.end - window.start) * SECTOR };
        let memory = Segments::zeroed(usize::try_from(span.len).unwrap_or(0));
        let read = Request::new(Operation::Read, span, memory.clone(), Token(window.start), &disk.geometry());
        match read {
            Ok(read) => disk.submit(read, &mut io),
            Err(status) => return Err(Violation::Unreadable { sector: window.start, status }),
        }
        while disk.in_flight() > 0 && io.pending() > 0 {
            let done = io.finish(0);
            disk.settle(done, &mut io);
        }
        let Some((request, status)) = disk.answer() else {
            std::mem::forget(disk);
            return Err(Violation::Unanswered(1));
        };
        request.retire();
        if status != Status::Done {
            found = Err(Violation::Unreadable { sector: window.start, status });
        }
        for (sector, word) in window.clone().zip(words_of(&memory)) {
            found = found.and_then(|()| judge(sector, word).map_err(Violation::Recovered));
        }
    }
    found
}
