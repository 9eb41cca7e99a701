//! What each sector of the disk may hold, by what its guest was told.
//!
//! Knows nothing of files, formats or crashes as such: only requests, in the order of one clock.
//!
//! The rule: a version is legal unless a *flushed* write was submitted after that version was answered. For reads
//! without a crash, read "answered before the read was submitted" for "flushed". Hence overlapping writes that
//! were in flight together have no order, a failed write may or may not be there, and a discard allows zero
//! without forbidding what was there before.

mod parts;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::sector::{PARTS, Word, Words, mix};
pub use parts::{ALL, Parts, parts_of};

/// A moment: number of requests submitted and answered so far.
pub type Moment = u64;

/// What a write gives to its sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The guest's bytes of this version number.
    Guest(u32),
    /// Zeros.
    Zero,
    /// Perhaps zeros: a discard, which need not do anything and replaces nothing.
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

/// Names a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteToken(pub u64);

/// One content that a run of sectors was given.
#[derive(Clone, Debug)]
struct Version {
    sectors: Range<u64>,
    /// Which parts of each.
    parts: Parts,
    content: Content,
    write: WriteToken,
    submitted: Moment,
    answered: Option<Moment>,
    /// Whether it succeeded: only then it replaces others.
    done: bool,
    flushed: bool,
}

/// What is found at a sector and should not be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} reads as {found:?}; legal would be {legal:?}")]
pub struct Illegal {
    /// The virtual sector.
    pub sector: u64,
    /// Its content.
    pub found: Words,
    /// What it might have been. Of a sector of which parts were written: what it might have been made of.
    pub legal: Vec<Words>,
}

/// All sectors' histories.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// What the disk held when the history begins: durable, and zero where nothing is said.
    base: BTreeMap<u64, Words>,
    versions: Vec<Version>,
    clock: Moment,
}

/// What a run of sectors may hold.
#[derive(Clone, Debug)]
struct Run {
    sectors: Range<u64>,
    contents: Vec<Content>,
    base: bool,
    /// The contents that may be trashed.
    unflushed: Vec<Content>,
    /// Parts of them were written: what they may hold is to be looked for.
    in_parts: bool,
}

/// What the disk may hold after a power loss at one moment. Sectors that are not mentioned are as at first.
#[derive(Clone, Debug)]
pub struct Legal<'a> {
    oracle: &'a Oracle,
    runs: Vec<Run>,
}

impl Oracle {
    /// A disk that holds `base`, durably, and zero elsewhere.
    pub fn new(base: BTreeMap<u64, Words>) -> Oracle {
        Oracle { base, versions: Vec::new(), clock: 0 }
    }

    /// The next moment.
    pub fn tick(&mut self) -> Moment {
        self.clock += 1;
        self.clock
    }

    /// Sectors are about to get a content.
    pub fn submit(&mut self, write: WriteToken, submitted: Moment, sectors: Range<u64>, content: Content) {
        self.submit_parts(write, submitted, sectors.start * PARTS..sectors.end * PARTS, content);
    }

    /// The same for parts of sectors, counted from the disk's first.
    pub fn submit_parts(&mut self, write: WriteToken, submitted: Moment, parts: Range<u64>, content: Content) {
        let (first, end) = (parts.start / PARTS, parts.end.div_ceil(PARTS));
        let whole = parts.start.div_ceil(PARTS)..parts.end / PARTS;
        let borders = match whole.start <= whole.end {
            true => vec![first, whole.start, whole.end, end],
            // In the middle of a sector.
            false => vec![first, end],
        };
        for sectors in borders.windows(2).map(|pair| pair[0]..pair[1]).filter(|run| !run.is_empty()) {
            let parts = parts_of(sectors.start, parts.start, parts.end);
            let (answered, done, flushed) = (None, false, false);
            self.versions.push(Version { sectors, parts, content, write, submitted, answered, done, flushed });
        }
    }

    /// A write is answered. `durable`: with the promise that it survives.
    pub fn answer(&mut self, write: WriteToken, answered: Moment, done: bool, durable: bool) {
        for version in self.versions.iter_mut().filter(|version| version.write == write) {
            version.answered = Some(answered);
            version.done = done;
            version.flushed = done && durable;
        }
    }

    /// A flush that was submitted at `submitted` has succeeded.
    pub fn flushed(&mut self, submitted: Moment) {
        for version in &mut self.versions {
            version.flushed |= version.done && version.answered.is_some_and(|answered| answered < submitted);
        }
    }

    /// A number for what the guest was told: what its reads may find from now on.
    pub fn answered_digest(&self) -> u64 {
        let answered = self.versions.iter().filter(|version| version.answered.is_some());
        answered.fold(0, |sum, version| mix(sum ^ version.write.0 ^ (u64::from(version.done) << 63)))
    }

    /// The content that a sector had at first.
    pub fn base(&self, sector: u64) -> Words {
        self.base.get(&sector).copied().unwrap_or(Words::ZERO)
    }

    /// The sectors that were not zero at first.
    pub fn based(&self) -> impl Iterator<Item = u64> + '_ {
        self.base.keys().copied()
    }

    fn here(&self, sector: u64) -> impl Iterator<Item = &Version> {
        self.versions.iter().filter(move |version| version.sectors.contains(&sector))
    }

    fn is_in_parts(&self, sector: u64) -> bool {
        self.here(sector).any(|version| version.parts != ALL)
    }

    /// The versions of a sector that stand in some part, unless one of `replacing` was submitted after they were
    /// answered, and whether the first content does.
    fn standing(&self, sector: u64, replacing: impl Fn(&Version) -> bool) -> (Vec<&Version>, bool) {
        let parts = if self.is_in_parts(sector) { vec![1, 2, 4, 8] } else { vec![ALL] };
        let replaces = |version: &&Version| version.content != Content::PerhapsZero && replacing(version);
        let newest = |part: &Parts| {
            let here = self.here(sector).filter(|version| version.parts & part != 0);
            (*part, here.filter(replaces).map(|version| version.submitted).max().unwrap_or(0))
        };
        let newest: Vec<(Parts, Moment)> = parts.iter().map(newest).collect();
        let stands = |version: &&Version| {
            let mut parts = newest.iter().filter(|(part, _)| version.parts & part != 0);
            parts.any(|(_, newest)| version.answered.is_none_or(|answered| answered >= *newest))
        };
        (self.here(sector).filter(stands).collect(), newest.iter().any(|(_, newest)| *newest == 0))
    }

    /// What may be found after a power loss at this moment.
    pub fn after_crash(&self) -> Legal<'_> {
        let mut borders: Vec<u64> =
            self.versions.iter().flat_map(|version| [version.sectors.start, version.sectors.end]).collect();
        borders.sort_unstable();
        borders.dedup();
        let run = |pair: &[u64]| {
            let sectors = *pair.first()?..*pair.last()?;
            let (standing, base) = self.standing(sectors.start, |version| version.flushed);
            let contents = standing.iter().map(|version| version.content).collect();
            // Beside a part there is a guest's too, which is written with it and counts as metadata does.
            let is_trashed = |version: &&&Version| !version.flushed && version.parts == ALL;
            let unflushed = standing.iter().filter(is_trashed).map(|version| version.content).collect();
            let in_parts = self.is_in_parts(sectors.start);
            Some(Run { sectors, contents, base, unflushed, in_parts })
        };
        Legal { oracle: self, runs: borders.windows(2).filter_map(run).collect() }
    }

    /// Checks what a read of these parts found that was submitted at `submitted` and ends now.
    pub fn check_read(&self, sector: u64, found: (Words, Parts), submitted: Moment) -> Result<(), Illegal> {
        let before = |version: &Version| version.done && version.answered.is_some_and(|at| at < submitted);
        if self.explains(sector, found, &before) {
            return Ok(());
        }
        let (standing, base) = self.standing(sector, before);
        let mut legal: Vec<Words> = standing.iter().map(|version| version.content.words(sector)).collect();
        legal.extend(base.then(|| self.base(sector)));
        Err(Illegal { sector, found: found.0, legal })
    }

    /// Forgets versions that no check can find legal any more. Only while nothing is in flight.
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
    /// What a sector may hold, or be made of.
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

    /// Checks what was found. A sector that was being written may have been trashed.
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

    /// The runs of sectors that have a history.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs.iter().filter(|run| !run.contents.is_empty()).map(|run| run.sectors.clone())
    }

    /// A number that stands for all that may be found.
    pub fn digest(&self) -> u64 {
        self.runs.iter().filter(|run| !run.contents.is_empty()).fold(0, |sum, run| {
            let sum = mix(mix(sum ^ run.sectors.start) ^ run.sectors.end) ^ u64::from(run.base);
            // Of a set: the same words in another order are the same.
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

    /// The same for a sector of which parts were written: what may be found depends on which of them, and on what could
    /// lie over what.
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
    fn what_is_forgotten_changes_no_verdict() {
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
