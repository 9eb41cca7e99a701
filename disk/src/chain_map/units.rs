//! A chunk whose runs begin and end at multiples of a unit, in files too: four bytes for each unit.
//!
//! Scattered images with clusters of the usual size look like this, in units of 64 KiB, and scattered VHDs, in units of
//! 4 KiB. Knows nothing of other chunks, nor how it is known what the words are. Keeps: what was packed is found again,
//! byte for byte.

use super::location::{CHUNK, Location, Run, SECTOR};
use crate::{DiskOffset, FileId, FileOffset};

/// The clusters of most images of qcow2.
pub const CLUSTER: u64 = 64 << 10;
/// The size of most reads of guests.
pub const PAGE: u64 = 4096;

/// Words that the units of a chunk take.
pub const CLUSTER_WORDS: usize = 16;
pub const PAGE_WORDS: usize = 256;

/// Bits of an entry that say which unit of the file; the file is in those above.
const PLACE_BITS: u32 = 26;
const PLACE_MASK: u32 = (1 << PLACE_BITS) - 1;
/// No file has this unit of the last file that can be named.
const ZERO: u32 = u32::MAX;
/// As the unit: in a compressed cluster.
const INSIDE: u32 = PLACE_MASK - 1;

/// An entry, if a place has one: its file is among the first 64, and the place in it at a multiple of the unit and
/// among the first 67 million units: below 4 TiB in units of 64 KiB, below 256 GiB in those of 4 KiB.
fn entry<const UNIT: u64>(place: Location) -> Option<u32> {
    let (file, unit) = match place {
        Location::Zero => return Some(ZERO),
        Location::Compressed { file } => (file, INSIDE),
        Location::Data { file, at } if at % UNIT == 0 => {
            (file, u32::try_from(at / UNIT).ok().filter(|&unit| unit < INSIDE)?)
        }
        // Rare, and distinguished from others only in a longer entry.
        Location::Data { .. } | Location::Shared { .. } | Location::Damaged { .. } => return None,
    };
    (u32::from(file.0) <= u32::MAX >> PLACE_BITS).then_some((u32::from(file.0) << PLACE_BITS) | unit)
}

#[inline(always)]
fn place<const UNIT: u64>(entry: u32) -> Location {
    if entry == ZERO {
        return Location::Zero;
    }
    let [top, ..] = entry.to_be_bytes();
    let file = FileId(top >> (PLACE_BITS - (u32::BITS - u8::BITS)));
    match entry & PLACE_MASK {
        INSIDE => Location::Compressed { file },
        unit => Location::Data { file, at: FileOffset(u64::from(unit) * UNIT) },
    }
}

/// The units of the chunk at `base`, if it has this shape.
pub fn pack<const UNIT: u64, const WORDS: usize>(base: DiskOffset, runs: &[Run]) -> Option<[u64; WORDS]> {
    if runs.last()?.span.end() != base.checked_add(CHUNK)? || runs.iter().any(|run| run.span.len % UNIT != 0) {
        return None;
    }
    let mut words = [0; WORDS];
    let mut lay = |run: &Run| lay::<UNIT>(&mut words, run.span.at - base, run.span.len, run.place);
    runs.iter().all(&mut lay).then_some(words)
}

/// Overlays the units of a chunk with a run. Returns whether it could; if not, they are unchanged.
pub fn lay<const UNIT: u64>(words: &mut [u64], within: u64, len: u64, place: Location) -> bool {
    let last = place.advanced(len.saturating_sub(UNIT));
    let has_entry = |place| entry::<UNIT>(place).is_some();
    if within % UNIT != 0 || len % UNIT != 0 || !has_entry(place) || !has_entry(last) {
        return false;
    }
    for unit in 0..len / UNIT {
        let into = unit * UNIT;
        let (Some((word, shift)), Some(new)) = (spot::<UNIT>(within + into), entry::<UNIT>(place.advanced(into)))
        else {
            return false;
        };
        if let Some(word) = words.get_mut(word) {
            *word = (*word & !(u64::from(u32::MAX) << shift)) | (u64::from(new) << shift);
        }
    }
    true
}

/// Where byte `within` of the chunk lives, and how many bytes of its unit are left.
#[inline(always)]
pub fn lookup<const UNIT: u64>(words: &[u64], within: u64) -> Option<(Location, u64)> {
    let (word, shift) = spot::<UNIT>(within)?;
    let entry = u32::try_from((words.get(word)? >> shift) & u64::from(u32::MAX)).ok()?;
    let into = within % UNIT;
    Some((place::<UNIT>(entry).advanced(into), UNIT - into))
}

/// The word of a byte's unit, and where in it that begins.
#[inline(always)]
fn spot<const UNIT: u64>(within: u64) -> Option<(usize, u32)> {
    let unit = usize::try_from(within / UNIT).ok()?;
    Some((unit / 2, if unit % 2 == 0 { 0 } else { 32 }))
}

const _: () = assert!(CLUSTER * 32 == CHUNK && CLUSTER_WORDS == 16, "a chunk is 32 clusters, two to a word");
const _: () = assert!(PAGE * 512 == CHUNK && PAGE_WORDS == 256 && PAGE % SECTOR == 0, "a chunk is 512 pages");

#[cfg(test)]
mod test {
    use super::*;

    const UNIT: u64 = CLUSTER;

    #[test]
    fn a_place_has_an_entry_or_is_refused() {
        let data = |file, at| Location::Data { file: FileId(file), at };
        let packed = |file| Location::Compressed { file: FileId(file) };
        let last = (u64::from(INSIDE) - 1) * UNIT;
        for kept in [
            Location::Zero,
            data(0, FileOffset(0)),
            data(63, FileOffset(last)),
            data(63, FileOffset(0)),
            packed(0),
            packed(63),
        ] {
            assert_eq!(entry::<UNIT>(kept).map(place::<UNIT>), Some(kept));
        }
        for refused in [
            data(64, FileOffset(0)),
            data(0, FileOffset(512)),
            data(0, FileOffset(last + UNIT)),
            data(63, FileOffset(last + 2 * UNIT)),
            packed(64),
        ] {
            assert_eq!(entry::<UNIT>(refused), None, "{refused:?}");
        }
    }

    #[test]
    fn a_run_that_cannot_be_laid_changes_nothing() {
        let run = Run { span: crate::Span { at: DiskOffset(0), len: CHUNK }, place: Location::Zero };
        let mut words = pack::<UNIT, CLUSTER_WORDS>(DiskOffset(0), &[run]).unwrap();
        let before = words;
        let near_the_end = Location::Data { file: FileId(1), at: FileOffset((u64::from(INSIDE) - 1) * UNIT) };
        assert!(!lay::<UNIT>(&mut words, 0, 2 * UNIT, near_the_end));
        assert!(!lay::<UNIT>(&mut words, 512, UNIT, Location::Zero));
        assert!(!lay::<UNIT>(&mut words, 0, 512, Location::Zero));
        assert_eq!(words, before);
        assert!(lay::<UNIT>(&mut words, UNIT, UNIT, near_the_end));
        assert_eq!(lookup::<UNIT>(&words, UNIT + 7), Some((near_the_end.advanced(7), UNIT - 7)));
        assert_eq!(lookup::<UNIT>(&words, 2 * UNIT), Some((Location::Zero, UNIT)));
    }
}
