//! The expected content of a VDI: for each 4 KiB, the stamps that may be there.
//!
//! A write that was answered is there. Of one that was not, each 4 KiB may be there or not, until the first read
//! settles it: later reads must show the same. Knows nothing about how disks are read.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Bytes that are written atomically, whichever process is killed.
pub const UNIT: u64 = 4096;

/// Bits of a stamp on the disk that identify its unit, enough for 64 GiB. They detect data at the wrong place.
const PLACE_BITS: u32 = 24;

/// A range of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first unit.
    pub at: u64,
    /// Number of units.
    pub len: u64,
}

/// The stamps that may be in each unit. Units without an entry are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content(BTreeMap<u64, Vec<u64>>);

impl Content {
    /// Records a write, or with stamp 0 a discard, that was answered.
    pub fn set(&mut self, range: Range, stamp: u64) {
        for unit in range.at..range.at + range.len {
            match stamp {
                0 => drop(self.0.remove(&unit)),
                _ => drop(self.0.insert(unit, vec![stamp])),
            }
        }
    }

    /// Records a write that may have been done or not.
    pub fn set_perhaps(&mut self, range: Range, stamp: u64) {
        for unit in range.at..range.at + range.len {
            let may = self.0.entry(unit).or_insert_with(|| vec![0]);
            if !may.contains(&stamp) {
                may.push(stamp);
            }
        }
    }

    /// Allows the other content as well, for each unit separately.
    pub fn or(&mut self, other: &Content) {
        let units: Vec<u64> = self.0.keys().chain(other.0.keys()).copied().collect();
        for unit in units {
            let more = other.may_be(unit).to_vec();
            let may = self.0.entry(unit).or_insert_with(|| vec![0]);
            may.extend(more);
            may.sort_unstable();
            may.dedup();
        }
    }

    fn may_be(&self, unit: u64) -> &[u64] {
        self.0.get(&unit).map_or(&[0], Vec::as_slice)
    }

    /// Compares bytes that were read; uncertain units are settled by them.
    pub fn check_read(&mut self, first: u64, bytes: &[u8]) -> Result<(), String> {
        let mut wrong = String::new();
        let mut count = 0_u64;
        for (unit, read) in (first..).zip(bytes.chunks(unit_len())) {
            let found = stamp_of(unit, read);
            let may = self.may_be(unit);
            match found {
                Ok(stamp) if may == [stamp] => {}
                Ok(stamp) if may.contains(&stamp) => self.set(Range { at: unit, len: 1 }, stamp),
                other => {
                    count += 1;
                    if count <= 8 {
                        let found = other.map_or_else(|why| why, |stamp| format!("stamp {stamp}"));
                        write!(wrong, "; 4 KiB number {unit}: {found}, should be one of {may:?}").ok();
                    }
                }
            }
        }
        if count == 0 { Ok(()) } else { Err(format!("{count} units of 4 KiB are wrong{wrong}")) }
    }
}

/// The bytes that are written to a range.
pub fn bytes_of(range: Range, stamp: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for unit in range.at..range.at + range.len {
        let word = if stamp == 0 { 0 } else { stamp << PLACE_BITS | unit };
        bytes.extend(word.to_le_bytes().repeat(unit_len() / 8));
    }
    bytes
}

fn unit_len() -> usize {
    4096
}

fn stamp_of(unit: u64, bytes: &[u8]) -> Result<u64, String> {
    let first = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    // All words are equal if each is equal to the one before.
    if bytes.get(8..) != bytes.get(..bytes.len().saturating_sub(8)) {
        return Err("it is torn".into());
    }
    match (first, first & ((1 << PLACE_BITS) - 1)) {
        (0, _) => Ok(0),
        (_, place) if place == unit => Ok(first >> PLACE_BITS),
        (_, place) => Err(format!("what belongs to unit {place}, stamp {}", first >> PLACE_BITS)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const AT: Range = Range { at: 3, len: 2 };

    #[test]
    fn an_answered_write_must_be_there_and_nothing_else() {
        let mut content = Content::default();
        content.set(AT, 7);
        assert_eq!(content.check_read(3, &bytes_of(AT, 7)), Ok(()));
        assert!(content.check_read(3, &bytes_of(AT, 6)).is_err());
        assert!(content.check_read(3, &bytes_of(AT, 0)).unwrap_err().contains("2 units"));
        assert!(content.check_read(0, &vec![1; 4096]).is_err());
        // Data at another place than it was written to.
        content.set(Range { at: 5, len: 2 }, 7);
        assert!(content.check_read(5, &bytes_of(AT, 7)).unwrap_err().contains("belongs to unit 3"));
    }

    #[test]
    fn an_uncertain_unit_is_settled_by_the_first_read() {
        for seen in [7, 8, 0] {
            let mut content = Content::default();
            content.set_perhaps(AT, 7);
            content.set_perhaps(AT, 8);
            assert_eq!(content.check_read(3, &bytes_of(AT, seen)), Ok(()));
            for other in [7, 8, 0] {
                assert_eq!(content.check_read(3, &bytes_of(AT, other)).is_ok(), other == seen);
            }
        }
    }

    #[test]
    fn either_of_two_states_is_allowed_in_each_unit() {
        let (mut one, mut other) = (Content::default(), Content::default());
        one.set(AT, 7);
        other.set(Range { at: 4, len: 2 }, 8);
        one.or(&other);
        assert_eq!(one.check_read(3, &bytes_of(Range { at: 3, len: 1 }, 0)), Ok(()));
        assert_eq!(one.check_read(4, &bytes_of(Range { at: 4, len: 1 }, 7)), Ok(()));
        assert_eq!(one.check_read(5, &bytes_of(Range { at: 5, len: 1 }, 8)), Ok(()));
        assert!(one.check_read(4, &bytes_of(Range { at: 4, len: 1 }, 8)).is_err());
    }
}
