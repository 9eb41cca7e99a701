//! The legal contents of each sector of the disk, according to the responses that its guest got.
//!
//! Knows nothing about files, formats or crashes: only requests, ordered by one clock.
//!
//! The rule: a version is legal unless a *flushed* write was submitted after that version was answered. For reads
//! without a crash, replace "flushed" by "answered before the read was submitted". Hence overlapping writes that were
//! in flight together are unordered, a failed write may or may not be there, and a discard allows zero without
//! forbidding earlier contents.

mod parts;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::sector::{PARTS, Word, Words, mix};
pub use parts::{ALL, Parts, parts_of};

/// A time: the number of requests submitted and answered so far.
pub type Time = u64;

/// The content that a write gives to its sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Guest data with this version number.
    Guest(u32),
    /// Zeros.
    Zero,
    /// Possibly zeros: a discard, which may have no effect and replaces nothing.
    PerhapsZero,
}

impl Content {
    fn word(self, sector: u64) -> Word {
        match self {
            Content::Guest(version) => Word::guest(version, sector),
            Content::Zero | Content::PerhapsZero => Word::ZERO,
        }
    }

    fn words(self, sector: u64) -> Words {
        Words::whole(self.word(sector))
    }
}

/// Identifies a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteToken(pub u64);

/// A version of a run of sectors.
#[derive(Clone, Debug)]
struct Version {
    sectors: Range<u64>,
    /// The parts of each sector that it writes.
    parts: Parts,
    content: Content,
    write: WriteToken,
    submitted: Time,
    answered: Option<Time>,
    /// Whether it succeeded; otherwise it does not replace others.
    done: bool,
    flushed: bool,
}

/// An illegal content of a sector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} reads as {found:?}; legal would be {legal:?}")]
pub struct Illegal {
    /// The virtual sector.
    pub sector: u64,
    /// The content that was found.
    pub found: Words,
    /// The legal contents. For a sector written in parts, the contents of which it may be composed.
    pub legal: Vec<Words>,
}

/// The histories of all sectors.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// The initial content of the disk: durable, and zero where nothing is recorded.
    base: BTreeMap<u64, Words>,
    versions: Vec<Version>,
    clock: Time,
}

/// The legal contents of a run of sectors.
#[derive(Clone, Debug)]
struct Run {
    sectors: Range<u64>,
    contents: Vec<Content>,
    base: bool,
    /// The contents that may be trashed.
    unflushed: Vec<Content>,
    /// Whether parts were written, so that the legal contents must be searched for.
    in_parts: bool,
}

/// The legal contents of the disk after a power loss. Sectors that are not mentioned have their initial content.
#[derive(Clone, Debug)]
pub struct Legal<'a> {
    oracle: &'a Oracle,
    runs: Vec<Run>,
}

impl Oracle {
    /// A disk with the durable content `base`, and zero elsewhere.
    pub fn new(base: BTreeMap<u64, Words>) -> Oracle {
        Oracle { base, versions: Vec::new(), clock: 0 }
    }

    /// Advances the clock.
    pub fn tick(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// Records the submission of a write.
    pub fn submit(&mut self, write: WriteToken, submitted: Time, sectors: Range<u64>, content: Content) {
        self.submit_parts(write, submitted, sectors.start * PARTS..sectors.end * PARTS, content);
    }

    /// As `submit`, for parts of sectors, counted from the beginning of the disk.
    pub fn submit_parts(&mut self, write: WriteToken, submitted: Time, parts: Range<u64>, content: Content) {
        let (first, end) = (parts.start / PARTS, parts.end.div_ceil(PARTS));
        let whole = parts.start.div_ceil(PARTS)..parts.end / PARTS;
        let borders = match whole.start <= whole.end {
            true => vec![first, whole.start, whole.end, end],
            // Boundaries within a sector.
            false => vec![first, end],
        };
        for sectors in borders.windows(2).map(|pair| pair[0]..pair[1]).filter(|run| !run.is_empty()) {
            let parts = parts_of(sectors.start, parts.start, parts.end);
            let (answered, done, flushed) = (None, false, false);
            self.versions.push(Version { sectors, parts, content, write, submitted, answered, done, flushed });
        }
    }

    /// Records the response to a write. `durable`: it promises that the write survives.
    pub fn answer(&mut self, write: WriteToken, answered: Time, done: bool, durable: bool) {
        for version in self.versions.iter_mut().filter(|version| version.write == write) {
            version.answered = Some(answered);
            version.done = done;
            version.flushed = done && durable;
        }
    }

    /// Records that a flush submitted at `submitted` has succeeded.
    pub fn flushed(&mut self, submitted: Time) {
        for version in &mut self.versions {
            version.flushed |= version.done && version.answered.is_some_and(|answered| answered < submitted);
        }
    }

    /// The same history without the requests that have no answer.
    pub fn answered(&self) -> Oracle {
        let answered = |version: &&Version| version.answered.is_some();
        Oracle { versions: self.versions.iter().filter(answered).cloned().collect(), ..self.clone() }
    }

    /// A digest of the responses: of what later reads may return.
    pub fn answered_digest(&self) -> u64 {
        let answered = self.versions.iter().filter(|version| version.answered.is_some());
        answered.fold(0, |sum, version| mix(sum ^ version.write.0 ^ (u64::from(version.done) << 63)))
    }

    /// The initial content of a sector.
    pub fn base(&self, sector: u64) -> Words {
        self.base.get(&sector).copied().unwrap_or(Words::ZERO)
    }

    /// The sectors that were not zero initially.
    pub fn based(&self) -> impl Iterator<Item = u64> + '_ {
        self.base.keys().copied()
    }

    fn here(&self, sector: u64) -> impl Iterator<Item = &Version> {
        self.versions.iter().filter(move |version| version.sectors.contains(&sector))
    }

    fn is_in_parts(&self, sector: u64) -> bool {
        self.here(sector).any(|version| version.parts != ALL)
    }

    /// The versions of a sector that remain in some part, unless one of `replacing` was submitted after their response,
    /// and whether the initial content remains.
    fn standing(&self, sector: u64, replacing: impl Fn(&Version) -> bool) -> (Vec<&Version>, bool) {
        let parts = if self.is_in_parts(sector) { vec![1, 2, 4, 8] } else { vec![ALL] };
        let replaces = |version: &&Version| version.content != Content::PerhapsZero && replacing(version);
        let newest = |part: &Parts| {
            let here = self.here(sector).filter(|version| version.parts & part != 0);
            (*part, here.filter(replaces).map(|version| version.submitted).max().unwrap_or(0))
        };
        let newest: Vec<(Parts, Time)> = parts.iter().map(newest).collect();
        let stands = |version: &&Version| {
            let mut parts = newest.iter().filter(|(part, _)| version.parts & part != 0);
            parts.any(|(_, newest)| version.answered.is_none_or(|answered| answered >= *newest))
        };
        (self.here(sector).filter(stands).collect(), newest.iter().any(|(_, newest)| *newest == 0))
    }

    /// The legal contents after a power loss now.
    pub fn after_crash(&self) -> Legal<'_> {
        let mut borders: Vec<u64> =
            self.versions.iter().flat_map(|version| [version.sectors.start, version.sectors.end]).collect();
        borders.sort_unstable();
        borders.dedup();
        let run = |pair: &[u64]| {
            let sectors = *pair.first()?..*pair.last()?;
            let (standing, base) = self.standing(sectors.start, |version| version.flushed);
            let contents = standing.iter().map(|version| version.content).collect();
            // A part is written together with the rest of its sector, which may be other data of the guest: not
            // trashed, as metadata is not.
            let is_trashed = |version: &&&Version| !version.flushed && version.parts == ALL;
            let unflushed = standing.iter().filter(is_trashed).map(|version| version.content).collect();
            let in_parts = self.is_in_parts(sectors.start);
            Some(Run { sectors, contents, base, unflushed, in_parts })
        };
        Legal { oracle: self, runs: borders.windows(2).filter_map(run).collect() }
    }

    /// Checks the content of these parts found by a read submitted at `submitted` that ends now.
    pub fn check_read(&self, sector: u64, found: (Words, Parts), submitted: Time) -> Result<(), Illegal> {
        let before = |version: &Version| version.done && version.answered.is_some_and(|at| at < submitted);
        if self.explains(sector, found, &before) {
            return Ok(());
        }
        let (standing, base) = self.standing(sector, before);
        let mut legal: Vec<Words> = standing.iter().map(|version| version.content.words(sector)).collect();
        legal.extend(base.then(|| self.base(sector)));
        Err(Illegal { sector, found: found.0, legal })
    }

    /// Drops versions that can no longer be legal. Only while nothing is in flight.
    pub fn settle(&mut self) {
        let legal = self.after_crash();
        let stands = |version: &Version| {
            let covered = |run: &&Run| version.sectors.contains(&run.sectors.start);
            legal.runs.iter().filter(covered).any(|run| {
                let (standing, _) = self.standing(run.sectors.start, |version| version.flushed);
                standing.iter().any(|standing| standing.write == version.write)
            })
        };
        let kept: Vec<bool> = self.versions.iter().map(stands).collect();
        let mut kept = kept.into_iter();
        self.versions.retain(|_| kept.next().unwrap_or(true));
    }
}

impl Legal<'_> {
    /// The contents that a sector may have, or be composed of.
    pub fn words(&self, sector: u64) -> Vec<Words> {
        let Some(run) = self.run(sector) else { return vec![self.oracle.base(sector)] };
        let mut words: Vec<Words> = run.contents.iter().map(|content| content.words(sector)).collect();
        words.extend(run.base.then(|| self.oracle.base(sector)));
        words.sort_unstable();
        words.dedup();
        words
    }

    fn run(&self, sector: u64) -> Option<&Run> {
        let at = self.runs.partition_point(|run| run.sectors.end <= sector);
        self.runs.get(at).filter(|run| run.sectors.contains(&sector))
    }

    /// Checks the content of a sector. If it was being written, it may have been trashed.
    pub fn check(&self, sector: u64, found: Words) -> Result<(), Illegal> {
        let legal = match self.run(sector) {
            Some(run) => {
                let is_one_of = || run.contents.iter().any(|content| content.words(sector) == found);
                let is_explained = || self.oracle.explains(sector, (found, ALL), &|version| version.flushed);
                let is_legal = if run.in_parts { is_explained() } else { is_one_of() };
                let trashed = |content: &Content| content.word(sector).trashed().map(Words::whole) == Some(found);
                is_legal
                    || !run.in_parts && run.base && self.oracle.base(sector) == found
                    || run.unflushed.iter().any(trashed)
            }
            None => self.oracle.base(sector) == found,
        };
        if legal { Ok(()) } else { Err(Illegal { sector, found, legal: self.words(sector) }) }
    }

    /// The runs of sectors with a history.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs.iter().filter(|run| !run.contents.is_empty()).map(|run| run.sectors.clone())
    }

    /// A digest of all legal contents.
    pub fn digest(&self) -> u64 {
        self.runs.iter().filter(|run| !run.contents.is_empty()).fold(0, |sum, run| {
            let sum = mix(mix(sum ^ run.sectors.start) ^ run.sectors.end) ^ u64::from(run.base);
            // Independent of the order.
            let set = |contents: &[Content]| {
                let mut words: Vec<u64> = contents.iter().map(|content| content.word(run.sectors.start).0).collect();
                words.sort_unstable();
                words.dedup();
                words.into_iter().fold(0, |sum, word| mix(sum ^ word))
            };
            let sum = mix(sum ^ set(&run.contents)).wrapping_add(set(&run.unflushed));
            if run.in_parts { mix(sum ^ self.parts_digest(run.sectors.start)) } else { sum }
        })
    }

    /// The digest of a sector of which parts were written: it depends on the versions of the parts and their possible
    /// order.
    fn parts_digest(&self, sector: u64) -> u64 {
        let (standing, _) = self.oracle.standing(sector, |version| version.flushed);
        standing.iter().fold(0, |sum, version| {
            let later = |other: &&Version| version.answered.is_some_and(|answered| answered < other.submitted);
            let later = standing.iter().fold(0, |bits, other| bits << 1 | u64::from(later(other)));
            let sum = mix(sum ^ version.content.word(sector).0) ^ u64::from(version.parts);
            mix(mix(sum ^ later) ^ u64::from(version.flushed))
        })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn version(number: u32) -> Words {
        Words::whole(Word::guest(number, 0))
    }

    fn write(oracle: &mut Oracle, number: u32) {
        let now = oracle.tick();
        oracle.submit(WriteToken(number.into()), now, 0..1, Content::Guest(number));
    }

    fn legal(oracle: &Oracle) -> Vec<Words> {
        oracle.after_crash().words(0)
    }

    fn answer(oracle: &mut Oracle, token: u64, done: bool) {
        let now = oracle.tick();
        oracle.answer(WriteToken(token), now, done, false);
    }

    fn flush(oracle: &mut Oracle) {
        let submitted = oracle.tick();
        oracle.flushed(submitted);
    }

    #[test]
    fn a_flush_forbids_what_was_answered_before_the_flushed_write_began() {
        let mut oracle = Oracle::default();
        write(&mut oracle, 1);
        answer(&mut oracle, 1, true);
        assert_eq!(legal(&oracle), [Words::ZERO, version(1)]);
        flush(&mut oracle);
        assert_eq!(legal(&oracle), [version(1)]);
        write(&mut oracle, 2);
        assert_eq!(legal(&oracle), [version(1), version(2)]);
    }

    #[test]
    fn writes_in_flight_together_have_no_order() {
        let mut oracle = Oracle::default();
        write(&mut oracle, 1);
        write(&mut oracle, 2);
        answer(&mut oracle, 2, true);
        answer(&mut oracle, 1, true);
        flush(&mut oracle);
        assert_eq!(legal(&oracle), [version(1), version(2)]);
    }

    #[test]
    fn a_flush_covers_only_what_was_answered_before_it() {
        let mut oracle = Oracle::default();
        write(&mut oracle, 1);
        let submitted = oracle.tick();
        answer(&mut oracle, 1, true);
        oracle.flushed(submitted);
        assert_eq!(legal(&oracle), [Words::ZERO, version(1)]);
    }

    #[test]
    fn a_failed_write_may_be_there_or_not() {
        let mut oracle = Oracle::default();
        write(&mut oracle, 1);
        answer(&mut oracle, 1, true);
        write(&mut oracle, 2);
        answer(&mut oracle, 2, false);
        flush(&mut oracle);
        assert_eq!(legal(&oracle), [version(1), version(2)]);
        let now = oracle.tick();
        assert!(
            oracle.check_read(0, (version(1), ALL), now).is_ok()
                && oracle.check_read(0, (version(2), ALL), now).is_ok()
        );
    }

    #[test]
    fn a_read_finds_the_newest_answered_or_what_is_in_flight() {
        let mut oracle = Oracle::default();
        write(&mut oracle, 1);
        answer(&mut oracle, 1, true);
        write(&mut oracle, 2);
        let now = oracle.tick();
        assert!(oracle.check_read(0, (Words::ZERO, ALL), now).is_err());
        assert!(oracle.check_read(0, (version(1), ALL), now).is_ok());
        assert!(oracle.check_read(0, (version(2), ALL), now).is_ok());
    }

    #[test]
    fn a_discard_allows_zero_and_forbids_nothing() {
        let mut oracle = Oracle::new(BTreeMap::from([(0, version(1))]));
        let now = oracle.tick();
        oracle.submit(WriteToken(1), now, 0..8, Content::PerhapsZero);
        answer(&mut oracle, 1, true);
        flush(&mut oracle);
        assert_eq!(legal(&oracle), [Words::ZERO, version(1)]);
    }

    #[test]
    fn only_what_is_not_yet_flushed_may_be_trashed() {
        let mut oracle = Oracle::default();
        let trashed = Words::whole(Word::guest(1, 0).trashed().unwrap());
        write(&mut oracle, 1);
        answer(&mut oracle, 1, true);
        assert!(oracle.after_crash().check(0, trashed).is_ok());
        flush(&mut oracle);
        assert!(oracle.after_crash().check(0, trashed).is_err());
    }

    #[test]
    fn dropped_versions_change_no_verdict() {
        let mut oracle = Oracle::default();
        for number in 1..=3 {
            write(&mut oracle, number);
            answer(&mut oracle, number.into(), true);
        }
        flush(&mut oracle);
        write(&mut oracle, 4);
        answer(&mut oracle, 4, true);
        let before = (legal(&oracle), oracle.after_crash().digest());
        oracle.settle();
        assert_eq!((legal(&oracle), oracle.after_crash().digest()), before);
        assert_eq!(oracle.versions.len(), 2);
    }
}
