//! The content of a file: a sparse map of sectors, cheap to copy and to change a little.
//!
//! Knows nothing about durability, which [`crate::file::SimFile`] tracks.
//!
//! Invariant: every sector has a content, including unwritten ones and those after the end.

use std::collections::BTreeMap;
use std::sync::Arc;

use disk::{DATA_FILE, FileOffset, ReadFault, Source};

use crate::sector::{SECTOR, SECTOR_LEN, Sector, Word, sectors_of};

/// The first sector of the data file of an image that has one. The disk sees both as one [`Media`], whose length is the
/// image's.
pub const DATA_SECTOR: u64 = DATA_FILE.0 / SECTOR;

/// The content of sectors that were never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unwritten {
    /// Zeros, as on a file system.
    Zeroes,
    /// Earlier data of the storage, as on a logical volume.
    Stale,
}

/// The content of one file.
#[derive(Clone, Debug)]
pub struct Media {
    sectors: Arc<BTreeMap<u64, Sector>>,
    /// Changes to the shared `sectors` in this value.
    over: Vec<(u64, Sector)>,
    /// Runs (first sector, count) that read as zero without having been written: deallocated, or zeroed at once. A
    /// block has thousands of such sectors.
    zeroed: Vec<(u64, u64)>,
    len: u64,
    unwritten: Unwritten,
    has_data_file: bool,
    modified: u64,
}

/// Creation time of files, in seconds since 1970.
pub const CREATED: u64 = 1_000_000_000;

impl Media {
    /// Creates an empty file.
    pub fn empty(unwritten: Unwritten) -> Media {
        Media {
            sectors: Arc::default(),
            over: Vec::new(),
            zeroed: Vec::new(),
            len: 0,
            unwritten,
            has_data_file: false,
            modified: CREATED,
        }
    }

    /// Adds an unwritten data file.
    pub fn add_data_file(&mut self) {
        self.has_data_file = true;
    }

    /// Modification time in seconds since 1970.
    pub fn modified(&self) -> u64 {
        self.modified
    }

    /// Sets the modification time.
    pub fn set_modified(&mut self, modified: u64) {
        self.modified = modified;
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has length zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Changes the length. Sectors that are cut off become unwritten.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            let first = len.div_ceil(SECTOR);
            self.over.retain(|(at, _)| *at < first || *at >= DATA_SECTOR);
            self.zeroed.retain_mut(|(at, count)| {
                *count = if *at < DATA_SECTOR { (*count).min(first.saturating_sub(*at)) } else { *count };
                *count > 0
            });
            if self.sectors.range(first..DATA_SECTOR).next().is_some() {
                let sectors = Arc::make_mut(&mut self.sectors);
                let mut behind = sectors.split_off(&first);
                sectors.append(&mut behind.split_off(&DATA_SECTOR));
            }
        }
        self.len = len;
    }

    /// The content of unwritten sectors.
    pub fn unwritten(&self) -> Unwritten {
        self.unwritten
    }

    /// The content of a sector.
    pub fn get(&self, sector: u64) -> Sector {
        match self.written(sector) {
            Some(content) => content.clone(),
            None if self.unwritten == Unwritten::Zeroes || self.is_zeroed(sector) => Sector::ZERO,
            None => Sector::Word(Word::stale(sector)),
        }
    }

    fn is_zeroed(&self, sector: u64) -> bool {
        self.zeroed.iter().any(|(at, count)| (*at..at + count).contains(&sector))
    }

    /// The content of a sector if it was written.
    pub fn written(&self, sector: u64) -> Option<&Sector> {
        let own = self.over.iter().rev().find(|(at, _)| *at == sector).map(|(_, content)| content);
        own.or_else(|| self.sectors.get(&sector))
    }

    /// The bytes of `count` sectors.
    pub fn read(&self, sector: u64, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(count * SECTOR).unwrap_or(0)];
        let mut put = |at: u64, content: &Sector| {
            let place = usize::try_from((at - sector) * SECTOR).ok().and_then(|at| bytes.get_mut(at..at + SECTOR_LEN));
            if let Some(place) = place.and_then(|place| place.first_chunk_mut()) {
                content.copy_to(place);
            }
        };
        let range = sector..sector + count;
        if self.unwritten == Unwritten::Stale {
            range.clone().filter(|at| !self.is_zeroed(*at)).for_each(|at| put(at, &Sector::Word(Word::stale(at))));
        }
        self.sectors.range(range.clone()).for_each(|(at, content)| put(*at, content));
        self.over.iter().filter(|(at, _)| range.contains(at)).for_each(|(at, content)| put(*at, content));
        bytes
    }

    /// Changes a sector permanently. The length stays.
    pub fn set(&mut self, sector: u64, content: Sector) {
        self.over.retain(|(at, _)| *at != sector);
        Arc::make_mut(&mut self.sectors).insert(sector, content);
    }

    /// Changes a sector in this value only: for a few sectors, cheap however large the file is.
    pub fn patch(&mut self, sector: u64, content: Sector) {
        self.over.push((sector, content));
    }

    /// Makes a run of unwritten sectors read as zero.
    pub fn zero(&mut self, sector: u64, count: u64) {
        if self.zeroed.iter().any(|(at, len)| *at <= sector && sector + count <= at + len) {
            return;
        }
        self.zeroed.retain(|(at, len)| *at < sector || sector + count < at + len);
        self.zeroed.push((sector, count));
    }

    /// Writes bytes from the beginning of a sector, and extends the file.
    pub fn write(&mut self, at: FileOffset, bytes: &[u8]) {
        let end = at.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        for (sector, content) in (at / SECTOR..).zip(sectors_of(bytes)) {
            self.set(sector, content);
        }
        self.len = self.len.max(end.0);
    }

    /// The written sectors in arbitrary order; one written twice may appear twice.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Sector)> {
        self.sectors
            .iter()
            .map(|(at, content)| (*at, content))
            .chain(self.over.iter().map(|(at, sector)| (*at, sector)))
    }

    /// A digest of the whole content.
    pub fn digest(&self) -> u64 {
        let sectors = self.sectors.iter().fold(0, |sum: u64, (at, content)| sum ^ place_digest(*at, content));
        let zeroed = self.zeroed.iter().fold(0, |sum: u64, (at, count)| sum ^ run_digest(*at, *count));
        sectors ^ zeroed ^ crate::sector::mix(self.len)
    }
}

/// A digest of the content of a sector.
pub fn place_digest(sector: u64, content: &Sector) -> u64 {
    crate::sector::mix(sector.wrapping_mul(0x0100_0000_01b3) ^ content.digest())
}

/// A digest of a run of zeros.
pub fn run_digest(sector: u64, count: u64) -> u64 {
    crate::sector::mix(crate::sector::mix(sector) ^ count)
}

impl Source for Media {
    fn has_data_file(&self) -> bool {
        self.has_data_file
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let len = u64::try_from(bytes.len()).map_err(|_| ReadFault::PastEnd(FileOffset(u64::MAX)))?;
        let end =
            at.checked_add(len).filter(|end| end.0 <= self.len).ok_or(ReadFault::PastEnd(FileOffset(self.len)))?;
        let mut rest = bytes;
        let mut from = at;
        while from < end {
            let mut whole = [0; SECTOR_LEN];
            self.get(from / SECTOR).copy_to(&mut whole);
            let inside = usize::try_from(from % SECTOR).map_err(|_| ReadFault::PastEnd(from))?;
            let take = rest.len().min(SECTOR_LEN - inside);
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&whole[inside..inside + take]);
            rest = later;
            from += u64::try_from(take).unwrap_or(SECTOR);
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_at_any_alignment_and_not_past_the_end() {
        let mut media = Media::empty(Unwritten::Zeroes);
        let bytes: Vec<u8> = (0..1536u32).map(|n| (n % 251) as u8).collect();
        media.write(FileOffset(512), &bytes);
        let mut found = vec![0; 700];
        assert_eq!(media.read_at(FileOffset(500), &mut found), Ok(()));
        assert_eq!(found[..12], [0; 12]);
        assert_eq!(found[12..], bytes[..688]);
        assert_eq!(media.read_at(FileOffset(1400), &mut found), Err(ReadFault::PastEnd(FileOffset(2048))));
    }

    #[test]
    fn what_was_cut_off_does_not_come_back() {
        let mut media = Media::empty(Unwritten::Stale);
        media.write(FileOffset(0), &[1; 2048]);
        media.patch(3, Sector::ZERO);
        media.set_len(1024);
        media.set_len(2048);
        assert_eq!(media.get(1), Sector::of(&[1; 512]));
        assert_eq!(media.get(2), Sector::Word(Word::stale(2)));
        assert_eq!(media.get(3), Sector::Word(Word::stale(3)));
    }
}
