//! Sectors written in parts: whether a content can have come about.
//!
//! Knows the versions of one sector and the parts that each has written. A write reaches all of its parts of a sector
//! or none: storage writes a sector atomically, with the unchanged rest. So the content must result from some of the
//! versions, laid over each other in an order that the responses do not exclude; versions that must be there may only
//! be missing if others hide them.

use super::{Content, Oracle, Version};
use crate::sector::{PARTS, Word, Words};

/// A set of parts of a sector, one bit for each.
pub type Parts = u8;

/// The set of all parts of a sector.
pub const ALL: Parts = 0b1111;

/// The parts of `sector` among those from `from` to `to`, which are counted from the beginning of the disk.
pub fn parts_of(sector: u64, from: u64, to: u64) -> Parts {
    let is_in = |part: &u64| (from..to).contains(&(sector * PARTS + part));
    (0..PARTS).filter(is_in).fold(0, |parts, part| parts | 1 << part)
}

/// Whether `found` equals `word(part)` in all of these parts.
fn holds(found: Words, parts: Parts, word: impl Fn(usize) -> Word) -> bool {
    found.0.iter().enumerate().all(|(part, found)| parts & 1 << part == 0 || *found == word(part))
}

impl Oracle {
    /// Whether these parts of a sector can have this content if every version for which `must` holds is included.
    pub(super) fn explains(
        &self,
        sector: u64,
        (found, parts): (Words, Parts),
        must: &dyn Fn(&Version) -> bool,
    ) -> bool {
        let versions: Vec<&Version> = self.here(sector).collect();
        let base = self.base(sector);
        let must = |version: &Version| version.content != Content::PerhapsZero && must(version);
        Search { sector, found, base, must: &must }.explains(parts, &versions)
    }
}

struct Search<'a> {
    sector: u64,
    found: Words,
    base: Words,
    must: &'a dyn Fn(&Version) -> bool,
}

impl Search<'_> {
    /// Whether some of `versions` can have left these parts. Tries each as the last one.
    fn explains(&self, parts: Parts, versions: &[&Version]) -> bool {
        let seen = || versions.iter().copied().filter(|version| version.parts & parts != 0);
        let as_at_first = || holds(self.found, parts, |part| self.base.0[part]);
        if parts == 0 || (!seen().any(self.must) && as_at_first()) {
            return true;
        }
        seen().any(|last| {
            // A version submitted after its response would lie over it.
            let later = |other: &Version| last.answered.is_some_and(|answered| answered < other.submitted);
            let is_hidden = seen().any(|other| later(other) && (self.must)(other));
            let word = last.content.word(self.sector);
            if is_hidden || !holds(self.found, parts & last.parts, |_| word) {
                return false;
            }
            let before = seen().filter(|other| !std::ptr::eq(*other, last) && !later(other)).collect::<Vec<_>>();
            self.explains(parts & !last.parts, &before)
        })
    }
}

#[cfg(test)]
mod test {
    use super::super::WriteToken;
    use super::*;

    /// Writes a version to some parts of sector 0 and answers it.
    fn written(oracle: &mut Oracle, number: u32, from: u64, to: u64) {
        let now = oracle.tick();
        oracle.submit_parts(WriteToken(number.into()), now, from..to, Content::Guest(number));
        let now = oracle.tick();
        oracle.answer(WriteToken(number.into()), now, true, false);
    }

    fn flush(oracle: &mut Oracle) {
        let submitted = oracle.tick();
        oracle.flushed(submitted);
    }

    /// Sector 0 with these versions in its parts.
    fn sector(numbers: [u32; 4]) -> Words {
        Words(numbers.map(|number| if number == 0 { Word::ZERO } else { Word::guest(number, 0) }))
    }

    fn legal(oracle: &Oracle, numbers: [u32; 4]) -> bool {
        let legal = oracle.after_crash();
        legal.check(0, sector(numbers)).is_ok()
    }

    #[test]
    fn parts_are_counted_from_the_disks_first() {
        assert_eq!((parts_of(0, 0, 4), parts_of(1, 5, 6), parts_of(1, 5, 30)), (ALL, 0b0010, 0b1110));
        assert_eq!(parts_of(3, 5, 6), 0);
    }

    #[test]
    fn data_next_to_a_write_is_unchanged() {
        let mut oracle = Oracle::default();
        written(&mut oracle, 1, 0, 4);
        flush(&mut oracle);
        written(&mut oracle, 2, 1, 3);
        assert!(legal(&oracle, [1, 1, 1, 1]) && legal(&oracle, [1, 2, 2, 1]));
        assert!(!legal(&oracle, [0, 2, 2, 1]) && !legal(&oracle, [2, 2, 2, 2]) && !legal(&oracle, [0, 0, 0, 0]));
        flush(&mut oracle);
        assert!(!legal(&oracle, [1, 1, 1, 1]) && legal(&oracle, [1, 2, 2, 1]));
    }

    #[test]
    fn a_sector_holds_all_of_a_write_or_nothing() {
        let mut oracle = Oracle::default();
        written(&mut oracle, 1, 1, 3);
        assert!(legal(&oracle, [0; 4]) && legal(&oracle, [0, 1, 1, 0]));
        assert!(!legal(&oracle, [0, 1, 0, 0]));
        written(&mut oracle, 2, 0, 8);
        assert!(!legal(&oracle, [2, 1, 1, 2]), "what was written after an answer lies over what was answered");
    }

    #[test]
    fn overlapping_neighbours_in_flight_are_unordered() {
        let mut oracle = Oracle::default();
        let now = oracle.tick();
        oracle.submit_parts(WriteToken(1), now, 0..2, Content::Guest(1));
        oracle.submit_parts(WriteToken(2), now, 1..3, Content::Guest(2));
        for token in [2, 1] {
            let now = oracle.tick();
            oracle.answer(WriteToken(token), now, true, true);
        }
        assert!(legal(&oracle, [1, 1, 2, 0]) && legal(&oracle, [1, 2, 2, 0]));
        assert!(!legal(&oracle, [1, 1, 0, 0]) && !legal(&oracle, [0, 2, 2, 0]), "a neighbour's answered write is lost");
    }

    #[test]
    fn a_read_of_parts_finds_what_was_answered_there() {
        let mut oracle = Oracle::default();
        written(&mut oracle, 1, 0, 4);
        written(&mut oracle, 2, 3, 4);
        let now = oracle.tick();
        let found = |numbers, parts| oracle.check_read(0, (sector(numbers), parts), now).is_ok();
        assert!(found([1, 1, 1, 2], ALL) && !found([1, 1, 1, 1], ALL));
        assert!(found([1, 1, 1, 1], 0b0111) && !found([0, 0, 0, 1], 0b1000));
    }

    #[test]
    fn dropped_versions_change_no_verdict_about_parts() {
        let mut oracle = Oracle::default();
        written(&mut oracle, 1, 0, 2);
        written(&mut oracle, 2, 0, 4);
        written(&mut oracle, 3, 1, 2);
        flush(&mut oracle);
        written(&mut oracle, 4, 2, 4);
        let digest = oracle.after_crash().digest();
        oracle.settle();
        assert_eq!(oracle.after_crash().digest(), digest);
        assert!(legal(&oracle, [2, 3, 2, 2]) && legal(&oracle, [2, 3, 4, 4]) && !legal(&oracle, [1, 3, 2, 2]));
        assert_eq!(oracle.versions.len(), 3);
    }
}
