//! Examines every state in which a power loss could leave the files of a disk, and compares it with the oracle.
//!
//! Invariants checked in each state:
//! - the image opens without an operator, and a check finds no damage; while an operator may open either of two chains,
//!   both do; an internal snapshot is unchanged;
//! - the same holds for each chain that shares layers with the disk's;
//! - every sector reads as something legal (in one of [`WHOLE`] states every sector of the disk, in the others those
//!   around everything that was ever written);
//! - the maps of changed blocks name what they must (`crate::changes`);
//! - in one of [`AGAIN`] states, the same holds throughout a second life that begins there, and after its power losses.
//!
//! States: all combinations of contents for the sectors that are not durable, if they are few; otherwise none, all,
//! only one, all but one, whole pages of 4 KiB, and many at random. Each with and without the growth of each file, and
//! each with sectors of guest data that were being written replaced by rubbish. A state seen before with the same legal
//! contents is skipped.

mod expected;

use std::collections::BTreeMap;
use std::ops::Range;

use disk::FileId;
use rustc_hash::FxHashSet;

use crate::changes::{Names, Tracked};
use crate::file::Fate;
use crate::io::Visible;
use crate::link;
use crate::media::{Media, Unwritten};
use crate::oracle::{Illegal, Legal, Oracle};
use crate::qcow2;
use crate::random::Random;
use crate::reader;
use crate::restored::Copies;
use crate::run::{Death, Next, Setup, Sight, Violation, around, run, take_over};
use crate::schedule::{Pace, Schedule};
use crate::sector::{SECTOR, Words, mix};
use crate::subject::{Device, Form, Kind, Start, Subject, damage};
use crate::theme::{BLOCK, Theme};
use crate::workload;
use crate::wreck::Wreck;
use expected::{Expected, current_map, left_of_map};

/// A second life begins in one of this many states.
pub const AGAIN: u64 = 64;
/// One of this many states is read from end to end; in the others only windows around the workload are read.
pub const WHOLE: u64 = 12;
/// As [`WHOLE`], for chains, which are longer, and of which two may have to be read.
pub const WHOLE_CHAIN: u64 = 60;
/// In one of this many states the references of an internal snapshot are counted; its content is compared in each.
pub const COUNTED: u64 = 4;
/// After one of this many deaths of a process, the next one does more than read and flush, and power losses follow.
pub const LIVES_ON: u64 = 8;
/// Maximum number of operations after a death at which a fault may occur in the next process.
const AHEAD: u64 = 24;
/// Sectors per read when everything is read.
const PIECE: usize = 128;
/// [`PIECE`] as `u64`.
const PIECE_LEN: u64 = 128;
/// The first version number of a second life.
const SECOND_LIFE: u64 = 50_000;
/// Workload of a second life: new blocks, old ones, freed ones.
const SECOND_WORKLOAD: &str = "w1026+2 w2+1 f d0+1024 w2049+1 W7+1";
/// Workload of a second life of a disk that may have grown, or was growing.
const SECOND_GROWTH: &str = "w1026+2 w2+1 f grow d0+1024 W2557+2 w2049+1 W7+1";
/// Workload of a second life of a chain: the merge that the power loss may have interrupted is repeated and completes.
/// If the disk has grown, there is data after its old end.
const SECOND_MERGE: &str = "w1026+2 merge w2+1 f W4605+2";

/// Counts of an exploration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs of a workload with a schedule.
    pub runs: u64,
    /// Times at which a power loss was examined.
    pub events: u64,
    /// States reached, including those seen before.
    pub reached: u64,
    /// States that were opened, checked, read and compared.
    pub states: u64,
    /// Number of second lives.
    pub again: u64,
    /// Processes that died and were followed by another.
    pub deaths: u64,
}

impl Counts {
    /// Adds the counts of another exploration.
    pub fn add(&mut self, other: Counts) {
        self.runs += other.runs;
        self.events += other.events;
        self.reached += other.reached;
        self.states += other.states;
        self.again += other.again;
        self.deaths += other.deaths;
    }
}

/// The state of an exploration.
pub struct Explorer {
    seen: FxHashSet<u64>,
    /// Events with at most this many states are examined exhaustively: 4096 is every subset of 12 sectors.
    pub all_up_to: u64,
    /// For events with more states, twice this many are chosen at random.
    pub at_random: u64,
    /// The process dies at one of this many distinct times.
    pub deaths_each: u64,
    /// The counts so far.
    pub counts: Counts,
    /// Copies of the files of the current run.
    copies: Copies,
}

impl Explorer {
    /// An explorer for long workloads, which examines many events with few states each.
    pub fn broad() -> Explorer {
        Explorer { all_up_to: 64, at_random: 8, ..Explorer::default() }
    }
}

impl Default for Explorer {
    fn default() -> Explorer {
        Explorer {
            seen: FxHashSet::default(),
            all_up_to: 4096,
            at_random: 64,
            deaths_each: 1,
            counts: Counts::default(),
            copies: Copies::default(),
        }
    }
}

/// The run that is explored, and whether this is its first life.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// The setup of the run.
    pub setup: &'a Setup,
    /// Whether second lives may begin.
    pub first_life: bool,
}

impl Explorer {
    /// Begins a new run.
    pub fn begin_run(&mut self) {
        self.counts.runs += 1;
        self.copies = Copies::default();
    }

    /// Drops the record of states seen, so that an endless search does not grow without bound.
    pub fn forget(&mut self) {
        self.seen.clear();
    }

    /// Examines the states in which a power loss at this time may leave the files.
    pub fn event(&mut self, scene: Scene<'_>, sight: &Sight<'_>) -> Result<(), Violation> {
        let beside = sight.siblings.iter().map(|sibling| &sibling.chain);
        let mut files = files_of(sight.chains.iter().chain(beside));
        files.extend(sight.tracked.iter().map(|map| map.file));
        let wreck = Wreck::new(sight.io, &files);
        let legal = sight.oracle.after_crash();
        let current = sight.tracked.iter().find(|map| map.is_current());
        let began = current.map(Tracked::began);
        let legal_digest = mix(legal.digest() ^ scene_digest(scene, sight));
        if !self.seen.insert(mix(wreck.digest() ^ legal_digest)) {
            return Ok(());
        }
        self.counts.events += 1;
        let mut windows = None;
        let limits = (self.all_up_to, self.at_random);
        let mut look = |fates: &[Fate]| {
            for lengths in wreck.lengths() {
                self.counts.reached += 1;
                let digest = mix(wreck.state_digest(fates, lengths) ^ legal_digest);
                if self.seen.insert(digest) {
                    let kind = scene.setup.subject.kind;
                    let windows = windows.get_or_insert_with(|| windows_of(&legal, sight.oracle, kind));
                    let found = wreck.state(fates, lengths);
                    for sibling in sight.siblings {
                        let (left, legal) = (left_of(&sibling.chain, sight.forms, &found), sibling.legal());
                        let read =
                            recover(&scene.setup.subject, left, windows, &mut |at, words| legal.check(at, words));
                        read.map_err(|violation| Violation::Sibling(Box::new(violation)))?;
                    }
                    let map = current_map(scene, sight, &found)?;
                    let names = map.zip(began.as_ref()).map(|(map, began)| Names { map, began });
                    let left = current.filter(|_| names.is_some()).and_then(|map| left_of_map(map, &found));
                    let expected = Expected { legal: &legal, names, map: left };
                    self.state(scene, &starts_of(sight, &found), &expected, windows, digest)?;
                }
            }
            Ok(())
        };
        each_state(&wreck, limits, &mut look)
    }

    /// Lets the process die now and another one take over. Power losses during the takeover are examined in one of
    /// [`LIVES_ON`] cases, and always if a failed sync is accepted.
    pub fn death(&mut self, scene: Scene<'_>, sight: &Sight<'_>) -> Result<(), Violation> {
        let files = files_of(sight.chains.iter());
        self.copies.put_back(sight)?;
        self.copies.take(sight, &files);
        let (wreck, legal) = (Wreck::new(sight.io, &files), sight.oracle.after_crash());
        let told = sight.oracle.answered_digest();
        let digest =
            mix(!wreck.digest() ^ legal.digest() ^ told ^ sight.logs.digest(&files) ^ scene_digest(scene, sight));
        let ahead = sight.io.fault_ahead().filter(|ahead| *ahead <= AHEAD).unwrap_or(0);
        let digest = mix(digest ^ ahead);
        if !self.seen.insert(digest) || digest % self.deaths_each != 0 {
            return Ok(());
        }
        let windows = windows_of(&legal, sight.oracle, scene.setup.subject.kind);
        let setup = Setup { first: SECOND_LIFE, ..*scene.setup };
        let limits = (self.all_up_to, self.at_random);
        (self.all_up_to, self.at_random) = (16, 4);
        // Whether pending I/O has reached the storage, whether a failed sync is accepted, and which process is next.
        let mut ways = vec![(true, false, Next::Serves)];
        ways.extend((scene.setup.visible == Visible::AtCompletion).then_some((false, false, Next::Serves)));
        ways.extend(sight.io.sync_failed().then_some((true, true, Next::Serves)));
        ways.extend(match digest / self.deaths_each / LIVES_ON % 4 {
            0 => Some((true, false, Next::WithoutSpace)),
            1 => Some((true, false, Next::OnlyReads)),
            _ => None,
        });
        let mut one = |chain: &Vec<FileId>, (reached, accepts, next)| {
            self.counts.deaths += 1;
            let other = sight.chains.iter().find(|other| *other != chain && other.first() == chain.first());
            let other = other.map(Vec::as_slice);
            // Rare are deaths at which two chains differ in what the leaf records.
            let lives_on = other.is_some() || digest / self.deaths_each % LIVES_ON == 0;
            let death = Death { chain, other, reached, windows: &windows, lives_on, accepts, next };
            let mut watch = |sight: &Sight<'_>| match lives_on || accepts {
                true => self.event(Scene { setup: &setup, first_life: false }, sight),
                false => Ok(()),
            };
            take_over(&setup, sight, &death, &mut watch)
        };
        let result = ways.iter().try_for_each(|way| check_chains(sight.chains.iter().map(|chain| one(chain, *way))));
        (self.all_up_to, self.at_random) = limits;
        result
    }

    /// Examines the chains in one state.
    fn state(
        &mut self,
        scene: Scene<'_>,
        chains: &[Start],
        expected: &Expected<'_>,
        windows: &[Range<u64>],
        digest: u64,
    ) -> Result<(), Violation> {
        self.counts.states += 1;
        if let Some(version) = scene.setup.subject.kind.with_snapshot() {
            chains.iter().try_for_each(|chain| snapshot_is_kept(chain, version, digest % COUNTED == 0))?;
        }
        let again = scene.first_life && digest % AGAIN == 0;
        let whole = if scene.setup.subject.kind.theme() == Theme::Chain { WHOLE_CHAIN } else { WHOLE };
        check_chains(chains.iter().map(|chain| {
            if again || digest % whole == 0 {
                let base = self.state_throughout(scene, chain, expected)?;
                if again {
                    let map = expected.map.clone();
                    self.second_life(scene, Start { base, map, ..chain.clone() }, digest)?;
                }
                return Ok(());
            }
            expected.recover(&scene.setup.subject, chain.clone(), windows, &mut |_, _| {})
        }))
    }

    /// Checks the files and reads every sector; returns the content.
    fn state_throughout(
        &mut self,
        scene: Scene<'_>,
        chain: &Start,
        expected: &Expected<'_>,
    ) -> Result<BTreeMap<u64, Words>, Violation> {
        // Opening detects most damage, so this rarely finds more.
        let mut files = chain.files.clone();
        if let Some(found) = files.iter_mut().zip(&chain.forms).find_map(|(file, form)| damage(file, *form)) {
            return Err(Violation::Damage(found));
        }
        let everything = everything(scene.setup.subject.kind);
        let mut base = BTreeMap::new();
        expected.recover(&scene.setup.subject, chain.clone(), &everything, &mut |sector, word| {
            if word != Words::ZERO {
                base.insert(sector, word);
            }
        })?;
        Ok(base)
    }

    /// Runs a second life, with its power losses.
    fn second_life(&mut self, scene: Scene<'_>, start: Start, digest: u64) -> Result<(), Violation> {
        self.counts.again += 1;
        let setup = Setup { fault: None, first: SECOND_LIFE, ..*scene.setup };
        let pace = if digest & (1 << 40) == 0 { Pace::Serial } else { Pace::Eager };
        let workload = match setup.subject.kind.theme() {
            Theme::Image => SECOND_WORKLOAD,
            Theme::Growing => SECOND_GROWTH,
            Theme::Chain => SECOND_MERGE,
        };
        let workload = workload::parse(workload).unwrap_or_default();
        let limits = (self.all_up_to, self.at_random);
        (self.all_up_to, self.at_random) = (16, 4);
        let result = run(&setup, &start, &workload, &mut Schedule::undisturbed(pace), &mut |sight| {
            self.event(Scene { setup: &setup, first_life: false }, sight)
        });
        (self.all_up_to, self.at_random) = limits;
        result.map(|_| ())
    }
}

/// One of the chains must be consistent, and all consistent ones must have legal contents.
fn check_chains(chains: impl Iterator<Item = Result<(), Violation>>) -> Result<(), Violation> {
    let mut unfit = None;
    let mut fits = false;
    for chain in chains {
        match chain {
            Err(Violation::TakenOver(violation)) if matches!(*violation, Violation::Unfit(_)) => {
                unfit = Some(*violation)
            }
            Err(violation @ Violation::Unfit(_)) => unfit = Some(violation),
            other => {
                other?;
                fits = true;
            }
        }
    }
    unfit.filter(|_| !fits).map_or(Ok(()), Err)
}

/// Checks that the internal snapshot is unchanged; with `count`, also the refcounts of its clusters.
fn snapshot_is_kept(chain: &Start, version: u32, count: bool) -> Result<(), Violation> {
    // The file with the snapshot is the lowest qcow2 layer.
    let Some(of_qcow2) = chain.forms.iter().rposition(|form| *form == Form::Qcow2) else { return Ok(()) };
    let Some(file) = chain.files.get(of_qcow2) else { return Ok(()) };
    let lost = qcow2::lost_of_snapshot(file, version);
    let found = lost.or_else(|| if count { damage(&mut file.clone(), Form::Qcow2) } else { None });
    found.map_or(Ok(()), |found| Err(Violation::Damage(found)))
}

/// The files of some chains, each once.
fn files_of<'a>(chains: impl Iterator<Item = &'a Vec<FileId>>) -> Vec<FileId> {
    let mut files: Vec<FileId> = chains.flatten().copied().collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// The chains, with their files as a power loss has left them.
fn starts_of(sight: &Sight<'_>, found: &[(FileId, Media)]) -> Vec<Start> {
    sight.chains.iter().map(|chain| left_of(chain, sight.forms, found)).collect()
}

/// One chain with these files.
fn left_of(chain: &[FileId], forms: &[Form], found: &[(FileId, Media)]) -> Start {
    let media = |id: &FileId| found.iter().find(|(file, _)| file == id).map(|(_, media)| media.clone());
    let form = |id: &FileId| forms.get(usize::from(id.0)).copied();
    Start {
        files: chain.iter().filter_map(media).collect(),
        forms: chain.iter().filter_map(form).collect(),
        base: BTreeMap::new(),
        map: None,
    }
}

/// A digest of everything that distinguishes states.
fn scene_digest(scene: Scene<'_>, sight: &Sight<'_>) -> u64 {
    let Subject { kind, told, tail, unit, device, .. } = scene.setup.subject;
    let (stale, small) = (|tail| u64::from(tail == Unwritten::Stale), device != Device::Roomy);
    let kind = kind.to_string().bytes().fold(0, |sum: u64, byte| mix(sum ^ u64::from(byte)));
    let chain = |sum: u64, chain: &Vec<FileId>| chain.iter().fold(mix(!sum), |sum, file| mix(sum ^ u64::from(file.0)));
    let beside = sight.siblings.iter().fold(0, |sum, sibling| mix(!sum ^ sibling.digest()));
    let chains = sight.chains.iter().fold(beside, chain);
    let storage = ((unit - SECTOR) << 8) ^ (stale(tail) << 1) ^ (stale(told) << 2) ^ (u64::from(small) << 3);
    let tracked = sight.tracked.iter().fold(0, |sum, map| mix(!sum ^ map.digest()));
    mix(kind ^ chains ^ storage ^ tracked ^ u64::from(scene.first_life))
}

/// Calls `look` with the fates of all states to examine.
fn each_state(
    wreck: &Wreck<'_>,
    (all_up_to, at_random): (u64, u64),
    look: &mut dyn FnMut(&[Fate]) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let places = wreck.places();
    let options = |place: usize| u64::try_from(wreck.contents(place) + 1).unwrap_or(u64::MAX);
    let all = (0..places).try_fold(1u64, |product, place| product.checked_mul(options(place)));
    match all.filter(|all| *all <= all_up_to) {
        Some(all) => (0..all).try_for_each(|number| look(&combination(number, places, options)))?,
        None => some_states(wreck, places, at_random, look)?,
    }
    // Rubbish next to lost and next to kept sectors.
    for place in (0..places).filter(|place| wreck.may_trash(*place)) {
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

/// A selection of states if there are too many: the most telling ones, and some at random.
fn some_states(
    wreck: &Wreck<'_>,
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
    // Storage with 4 KiB sectors: all sectors of a page have the same fate.
    let pages = wreck.pages();
    let mut random = Random::new(wreck.digest());
    for _ in 0..at_random {
        let seed = random.number();
        let by_page: Vec<Fate> = pages.iter().map(|page| coin(mix(seed ^ page))).collect();
        look(&by_page)?;
        let mut each = |place| {
            let back = random.index(wreck.contents(place) + 1);
            if back == 0 { Fate::Lost } else { Fate::Kept(u8::try_from(back - 1).unwrap_or(u8::MAX)) }
        };
        look(&(0..places).map(&mut each).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn coin(number: u64) -> Fate {
    if number % 2 == 0 { Fate::Lost } else { Fate::Kept(0) }
}

/// Every sector of a disk that a workload can reach, grown or not.
fn everything(kind: Kind) -> Vec<Range<u64>> {
    let pieces = |part: Range<u64>| part.clone().step_by(PIECE).map(move |at| at..(at + PIECE_LEN).min(part.end));
    kind.theme().reach().into_iter().flat_map(pieces).collect()
}

/// The windows where errors are likely: around every border of a write and of a block, and around the initial data.
fn windows_of(legal: &Legal<'_>, oracle: &Oracle, kind: Kind) -> Vec<Range<u64>> {
    let sectors = kind.grown();
    let borders = legal.runs().flat_map(|run| [run.start, run.end]);
    let blocks = (0..=kind.sectors() / BLOCK).map(|block| block * BLOCK);
    around(borders.chain(blocks).chain([kind.sectors()]).chain(oracle.based()), sectors)
}

/// The content of a chain in some windows.
#[cfg(test)]
pub(crate) fn read_back(subject: &Subject, start: Start, windows: &[Range<u64>]) -> BTreeMap<u64, Words> {
    let mut found = BTreeMap::new();
    let mut take = |sector, word| {
        found.insert(sector, word);
        Ok(())
    };
    recover(subject, start, windows, &mut take).unwrap();
    found
}

/// Opens the chain as after a power loss and passes the content to `judge`.
pub fn recover(
    subject: &Subject,
    start: Start,
    windows: &[Range<u64>],
    judge: &mut dyn FnMut(u64, Words) -> Result<(), Illegal>,
) -> Result<(), Violation> {
    let Start { mut files, forms, .. } = start;
    let layers = subject.open(&mut files, &forms, 1).map_err(Violation::Open)?;
    link::check(&layers, &files).map_err(Violation::Unfit)?;
    let mut found = Ok(());
    reader::read(layers, files, windows, &mut |sector, words| {
        found = std::mem::replace(&mut found, Ok(())).and_then(|()| judge(sector, words));
    })?;
    found.map_err(Violation::Recovered)
}
