//! A file on storage with a volatile cache: what is durable, what is written but not yet durable, and the states in
//! which a power loss may leave it.
//!
//! Knows nothing about requests, formats or queues. Short transfers are not simulated: the engines complete them, below
//! the trait that the disk uses. An image with a data file is one file of two parts, which are synced separately.
//!
//! Invariants, the fidelity of the whole simulator:
//! - a sync makes durable what had *completed* when the sync was *submitted*, and nothing else;
//! - after a failed sync, the writes that it should have covered are never covered by a later one (Linux marks such
//!   pages clean);
//! - each sector that is not durable survives or not, independently of the others.

use std::collections::BTreeMap;

use crate::media::{DATA_SECTOR, Media, Unwritten, place_digest, run_digest};
use crate::sector::{SECTOR, Sector, mix};

/// Bytes that are left of a torn sector.
const KEPT: usize = 24;

/// Identifies a write to a file, in the order of visibility.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

#[derive(Clone, Debug)]
struct Unsynced {
    write: WriteId,
    sector: u64,
    /// More than one only for zeros over sectors that were never written: they share one fate.
    count: u64,
    /// Whether it is such a run.
    zeroed: bool,
    content: Sector,
    /// Index of the write's completion among the file's, if it has completed.
    completed: Option<u64>,
    /// Whether a sync that should have covered it has failed.
    orphaned: bool,
}

impl Coverage {
    /// The coverage of a sync that falsely reports success.
    pub const NOTHING: Coverage = Coverage { completions: 0, len: 0, data: false };
}

impl Unsynced {
    fn continues(&self, write: WriteId, sector: u64) -> bool {
        self.zeroed && self.write == write && self.sector + self.count == sector
    }

    fn digest(&self) -> u64 {
        if self.zeroed { run_digest(self.sector, self.count) } else { place_digest(self.sector, &self.content) }
    }
}

/// The writes that a sync covers, determined at its submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    completions: u64,
    len: u64,
    /// True for the data file, false for the image.
    data: bool,
}

/// A file with a volatile cache.
#[derive(Clone, Debug)]
pub struct SimFile {
    durable: Media,
    visible: Media,
    /// Digest of `durable`, cached because that changes rarely.
    durable_digest: u64,
    unsynced: Vec<Unsynced>,
    completions: u64,
    /// The lengths required by writes in flight.
    growth: Vec<(WriteId, u64)>,
    /// The length after all completed writes.
    completed_len: u64,
    writes: u64,
    sync_failed: bool,
    /// Whether the time of its last change was read since, so that the next change must get another time.
    time_was_read: bool,
    /// Whether a power loss may tear a sector of metadata.
    tears: bool,
}

impl SimFile {
    /// A file with durable contents.
    pub fn new(media: Media) -> SimFile {
        SimFile {
            completed_len: media.len(),
            visible: media.clone(),
            durable_digest: media.digest(),
            durable: media,
            unsynced: Vec::new(),
            completions: 0,
            growth: Vec::new(),
            writes: 0,
            sync_failed: false,
            time_was_read: true,
            tears: false,
        }
    }

    /// A new file with contents of which nothing is durable, because its creator has not synced it.
    pub fn cached(media: &Media) -> SimFile {
        let mut empty = Media::empty(media.unwritten());
        // A device has its length from the beginning.
        empty.set_len(if media.unwritten() == Unwritten::Stale { media.len() } else { 0 });
        let mut file = SimFile::new(empty);
        let sectors: BTreeMap<u64, Sector> = media.iter().map(|(at, content)| (at, content.clone())).collect();
        for (sector, content) in sectors {
            let write = file.apply(sector, [Some(content)], true);
            file.complete(write);
        }
        file.visible.set_len(media.len());
        file.completed_len = media.len();
        file
    }

    /// From now on a power loss may leave rubbish in each sector that is being written, and not only in guest data.
    pub fn may_tear(&mut self) {
        self.tears = true;
    }

    /// The contents that a read finds: everything written.
    pub fn visible(&self) -> &Media {
        &self.visible
    }

    /// The contents that survive in any case.
    pub fn durable(&self) -> &Media {
        &self.durable
    }

    /// Reads the time of the last change. The next change gets another time, which survives a power loss: a child that
    /// records this time must notice each change, and the storage has no finer clock.
    pub fn read_time(&mut self) -> u64 {
        self.time_was_read = true;
        self.visible.modified()
    }

    fn changed(&mut self) {
        if std::mem::take(&mut self.time_was_read) {
            self.visible.set_modified(self.visible.modified() + 1);
        }
    }

    /// Applies a write of `contents` from `sector` on; `None` leaves a sector unchanged, because a failed write may
    /// reach any part of its range.
    pub fn apply(&mut self, sector: u64, contents: impl IntoIterator<Item = Option<Sector>>, grows: bool) -> WriteId {
        self.changed();
        self.writes += 1;
        let write = WriteId(self.writes);
        // After the end of the file there is nothing to deallocate, unless the storage is larger than the file.
        let in_data_file = sector >= DATA_SECTOR;
        let grows = grows && !in_data_file;
        let everywhere = grows || in_data_file || self.visible.unwritten() == Unwritten::Stale;
        let limit = if everywhere { u64::MAX } else { self.visible.len().div_ceil(SECTOR) };
        let mut end = 0;
        for (sector, content) in (sector..limit).zip(contents) {
            if let Some(content) = content {
                end = if grows { (sector + 1) * SECTOR } else { 0 };
                self.apply_one(write, sector, content);
            }
        }
        if end > self.visible.len() {
            self.visible.set_len(end);
        }
        if end > self.durable.len() {
            self.growth.push((write, end));
        }
        write
    }

    fn apply_one(&mut self, write: WriteId, sector: u64, content: Sector) {
        let fresh = content == Sector::ZERO && self.visible.written(sector).is_none();
        if !fresh {
            self.visible.set(sector, content.clone());
        } else if self.visible.unwritten() == Unwritten::Zeroes {
            // Kept or lost, the sector reads the same.
            return;
        } else if let Some(run) = self.unsynced.last_mut().filter(|run| run.continues(write, sector)) {
            run.count += 1;
            self.visible.zero(run.sector, run.count);
            return;
        } else {
            self.visible.zero(sector, 1);
        }
        self.unsynced.push(Unsynced {
            write,
            sector,
            count: 1,
            zeroed: fresh,
            content,
            completed: None,
            orphaned: false,
        });
    }

    /// Extends the file durably; the new part reads as zero.
    pub fn extend(&mut self, len: u64) {
        self.changed();
        let old = self.visible.len();
        let len = len.max(old);
        if self.visible.unwritten() == Unwritten::Stale && len > old {
            let (first, count) = (old / SECTOR, (len - old).div_ceil(SECTOR));
            self.visible.zero(first, count);
            self.durable.zero(first, count);
        }
        self.visible.set_len(len);
        self.durable.set_len(len.max(self.durable.len()));
        self.completed_len = self.completed_len.max(len);
        self.durable_digest = self.durable.digest();
    }

    /// Records that a write has completed.
    pub fn complete(&mut self, write: WriteId) {
        self.completions += 1;
        for entry in self.unsynced.iter_mut().filter(|entry| entry.write == write) {
            entry.completed = Some(self.completions);
        }
        let len = self.growth.iter().find(|(grew, _)| *grew == write).map_or(0, |(_, len)| *len);
        self.completed_len = self.completed_len.max(len);
        self.growth.retain(|(grew, _)| *grew != write);
    }

    /// What a sync of the image or of its data file covers if submitted now.
    pub fn coverage(&self, data: bool) -> Coverage {
        Coverage { completions: self.completions, len: if data { 0 } else { self.completed_len }, data }
    }

    /// Records that a sync has succeeded.
    pub fn synced(&mut self, coverage: Coverage) {
        // Data under a newer durable sector cannot return: storage orders writes to the same sector.
        let mut newest: BTreeMap<u64, WriteId> = BTreeMap::new();
        for entry in self.unsynced.iter().filter(|entry| !entry.orphaned && covers(coverage, entry)) {
            if entry.zeroed {
                self.durable.zero(entry.sector, entry.count);
            } else {
                newest.insert(entry.sector, entry.write);
                self.durable.set(entry.sector, entry.content.clone());
            }
        }
        if coverage.len > self.durable.len() {
            self.durable.set_len(coverage.len);
        }
        self.durable_digest = self.durable.digest();
        self.unsynced.retain(|entry| match newest.get(&entry.sector) {
            _ if entry.zeroed => entry.orphaned || !covers(coverage, entry),
            Some(newest) => entry.write > *newest,
            None => true,
        });
    }

    /// Records that a sync has failed.
    pub fn sync_failed(&mut self, coverage: Coverage) {
        self.sync_failed = true;
        for entry in self.unsynced.iter_mut().filter(|entry| covers(coverage, entry)) {
            entry.orphaned = true;
        }
    }

    /// Whether a sync has ever failed.
    pub fn has_failed(&self) -> bool {
        self.sync_failed
    }

    /// The states that a power loss now may leave, on storage with atomic units of this many sectors.
    pub fn crash(&self, unit: u64) -> Crash<'_> {
        let mut places: BTreeMap<(u64, bool), Vec<Content<'_>>> = BTreeMap::new();
        for entry in self.unsynced.iter().filter(|entry| !self.is_repeated(entry)) {
            let place = if entry.zeroed { entry.sector } else { entry.sector / unit * unit };
            let contents = places.entry((place, !entry.zeroed)).or_default();
            let content = Content::after(contents.last(), entry, unit);
            match contents.last_mut() {
                // A write leaves one content of a place, however many of its sectors it changes.
                Some(last) if unit > 1 && last.write() == Some(entry.write) => *last = content,
                _ => contents.push(content),
            }
        }
        for contents in places.values_mut() {
            let mut seen = Vec::new();
            contents.retain(|content| {
                let news = !seen.contains(&content.digest());
                seen.push(content.digest());
                news
            });
        }
        Crash { file: self, unit, places: places.into_values().collect() }
    }
}

/// The possible content of a place: its sectors that differ from the durable ones.
#[derive(Clone)]
struct Content<'a>(Vec<&'a Unsynced>);

impl<'a> Content<'a> {
    /// The content after a write: in a place of one sector only the write, in a larger one earlier writes as well.
    fn after(before: Option<&Content<'a>>, entry: &'a Unsynced, unit: u64) -> Content<'a> {
        let others = before.filter(|_| unit > 1).into_iter().flat_map(|before| before.0.iter().copied());
        let mut entries: Vec<_> = others.filter(|other| other.sector != entry.sector).collect();
        entries.push(entry);
        Content(entries)
    }

    fn write(&self) -> Option<WriteId> {
        self.0.last().map(|entry| entry.write)
    }

    fn digest(&self) -> u64 {
        self.0.iter().fold(0, |sum, entry| sum ^ entry.digest())
    }
}

impl SimFile {
    /// Whether it is the only write there and equals the durable content: kept or lost, it reads the same.
    fn is_repeated(&self, entry: &Unsynced) -> bool {
        let alone = || self.unsynced.iter().filter(|other| other.sector == entry.sector).count() == 1;
        !entry.zeroed && self.durable.written(entry.sector) == Some(&entry.content) && alone()
    }
}

fn covers(coverage: Coverage, entry: &Unsynced) -> bool {
    let on_it = (entry.sector >= DATA_SECTOR) == coverage.data;
    on_it && entry.completed.is_some_and(|completed| completed <= coverage.completions)
}

/// The states in which one power loss may leave a file.
pub struct Crash<'a> {
    file: &'a SimFile,
    /// Number of sectors in a place.
    unit: u64,
    /// For each place that is not durable, ascending, its written contents, the oldest first.
    places: Vec<Vec<Content<'a>>>,
}

/// The fate of a place in a power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// It holds the durable content.
    Lost,
    /// It holds its newest-but-n content.
    Kept(u8),
    /// It holds rubbish, because guest data was being written.
    Trashed,
}

impl<'a> Crash<'a> {
    /// The first sectors of the places, ascending.
    pub fn sectors(&self) -> impl Iterator<Item = u64> + '_ {
        self.places.iter().flat_map(|contents| contents.first()?.0.first()).map(|entry| entry.sector)
    }

    /// Number of places with independent fates.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Number of contents that the `place`th may have.
    pub fn contents(&self, place: usize) -> usize {
        self.places.get(place).map_or(0, Vec::len)
    }

    /// Whether the file has grown since its length was durable.
    pub fn grown(&self) -> bool {
        self.file.visible.len() > self.file.durable.len()
    }

    /// A digest of all states together.
    pub fn digest(&self) -> u64 {
        let start = mix(self.file.durable_digest ^ mix(self.file.visible.len()) ^ self.time_digest());
        self.places.iter().flatten().fold(start, |sum, content| mix(sum ^ content.digest()))
    }

    fn time_digest(&self) -> u64 {
        mix(!self.file.visible.modified())
    }

    /// The written sectors of a place with this fate, up to the end of the file.
    fn entries(&self, place: usize, fate: Fate, len: u64) -> impl Iterator<Item = &'a Unsynced> {
        let contents = self.places.get(place).map_or(&[][..], Vec::as_slice);
        let newest = contents.len().saturating_sub(1);
        let found = match fate {
            Fate::Lost => None,
            Fate::Kept(back) => contents.get(newest.saturating_sub(usize::from(back))),
            Fate::Trashed => contents.last(),
        };
        let entries = found.into_iter().flat_map(|content| content.0.clone());
        entries.filter(move |entry| entry.sector < len / SECTOR || entry.sector >= DATA_SECTOR)
    }

    /// Whether a power loss may leave rubbish. Units of more than a sector are either unchanged or completely written,
    /// because they contain sectors of other writes.
    pub fn may_trash(&self) -> bool {
        self.unit == 1
    }

    /// What is left of a content. Of torn metadata that is the beginning, and zeroes.
    fn left(&self, fate: Fate, content: &Sector) -> Sector {
        match content {
            Sector::Bytes(bytes) if fate == Fate::Trashed && self.file.tears => {
                let mut torn = **bytes;
                torn[KEPT..].fill(0);
                Sector::of(&torn)
            }
            _ => fate.of(content),
        }
    }

    fn len(&self, growth_lost: bool) -> u64 {
        if growth_lost { self.file.durable.len() } else { self.file.visible.len() }
    }

    /// The file after the power loss, with a fate for each place in order. Sectors after a lost length are gone
    /// whatever their fate.
    pub fn state(&self, fates: &[Fate], growth_lost: bool) -> Media {
        let len = self.len(growth_lost);
        let mut media = self.file.durable.clone();
        media.set_modified(self.file.visible.modified());
        media.set_len(len);
        for (place, fate) in fates.iter().enumerate() {
            for entry in self.entries(place, *fate, len) {
                match entry.zeroed {
                    true => media.zero(entry.sector, entry.count),
                    false => media.patch(entry.sector, self.left(*fate, &entry.content)),
                }
            }
        }
        media
    }

    /// The digest of [`state`](Crash::state) with the same arguments, without building it.
    pub fn state_digest(&self, fates: &[Fate], growth_lost: bool) -> u64 {
        let len = self.len(growth_lost);
        let mut sum = self.file.durable_digest ^ mix(self.file.durable.len()) ^ mix(len) ^ self.time_digest();
        for (place, fate) in fates.iter().enumerate() {
            for entry in self.entries(place, *fate, len) {
                if entry.zeroed {
                    sum ^= entry.digest();
                    continue;
                }
                let old = self.file.durable.written(entry.sector);
                sum ^= old.map_or(0, |old| place_digest(entry.sector, old));
                sum ^= place_digest(entry.sector, &self.left(*fate, &entry.content));
            }
        }
        sum
    }

    /// What sectors hold that were never written.
    pub fn unwritten(&self) -> Unwritten {
        self.file.durable.unwritten()
    }
}

impl Fate {
    /// Only guest data can be trashed: a format without a journal, such as VHD, relies on atomic writes of metadata
    /// sectors, which drives provide.
    fn of(self, content: &Sector) -> Sector {
        match (self, content) {
            (Fate::Trashed, Sector::Word(word)) => Sector::Word(word.trashed().unwrap_or(*word)),
            _ => content.clone(),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::sector::Word;

    fn word(version: u32) -> Sector {
        Sector::Word(Word::guest(version, 0))
    }

    fn file() -> SimFile {
        let mut media = Media::empty(Unwritten::Zeroes);
        media.set_len(8 * SECTOR);
        SimFile::new(media)
    }

    #[test]
    fn a_sync_covers_only_what_completed_before_it_was_submitted() {
        let mut file = file();
        let early = file.apply(0, [Some(word(1))], true);
        let late = file.apply(1, [Some(word(2))], true);
        file.complete(early);
        let sync = file.coverage(false);
        file.complete(late);
        file.synced(sync);
        assert_eq!(file.durable().get(0), word(1));
        assert_eq!(file.durable().get(1), Sector::ZERO);
        assert_eq!(file.crash(1).sectors().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn writes_of_a_failed_sync_are_never_covered_later() {
        let mut file = file();
        let write = file.apply(0, [Some(word(1))], true);
        file.complete(write);
        let sync = file.coverage(false);
        file.sync_failed(sync);
        file.synced(file.coverage(false));
        assert_eq!(file.durable().get(0), Sector::ZERO);
        assert_eq!(file.visible().get(0), word(1));
    }

    #[test]
    fn a_crash_keeps_or_loses_each_sector_and_any_of_its_versions() {
        let mut file = file();
        file.apply(0, [Some(word(1)), Some(word(1))], true);
        file.apply(0, [Some(word(2))], true);
        let crash = file.crash(1);
        assert_eq!((crash.contents(0), crash.contents(1)), (2, 1));
        let state = crash.state(&[Fate::Kept(1), Fate::Lost], false);
        assert_eq!((state.get(0), state.get(1)), (word(1), Sector::ZERO));
        let state = crash.state(&[Fate::Trashed, Fate::Kept(0)], false);
        assert_eq!((state.get(0), state.get(1)), (Sector::Word(Word::guest(2, 0).trashed().unwrap()), word(1)));
    }

    #[test]
    fn growth_is_durable_only_by_a_sync() {
        let mut file = file();
        let write = file.apply(10, [Some(word(1))], true);
        assert!(file.crash(1).grown());
        assert_eq!(file.crash(1).state(&[Fate::Kept(0)], true).len(), 8 * SECTOR);
        file.complete(write);
        file.synced(file.coverage(false));
        assert_eq!(file.crash(1).state(&[], true).len(), 11 * SECTOR);
    }

    #[test]
    fn nothing_of_a_new_file_is_durable_before_it_is_synced() {
        let mut media = Media::empty(Unwritten::Zeroes);
        media.set(2, word(1));
        media.set_len(8 * SECTOR);
        let mut file = SimFile::cached(&media);
        assert_eq!((file.visible().len(), file.visible().get(2)), (8 * SECTOR, word(1)));
        assert_eq!((file.durable().len(), file.durable().get(2)), (0, Sector::ZERO));
        file.synced(file.coverage(false));
        assert_eq!((file.durable().len(), file.durable().get(2)), (8 * SECTOR, word(1)));
    }

    #[test]
    fn digests_are_equal_exactly_for_equal_states() {
        let mut file = file();
        file.apply(0, [Some(word(1)), Some(word(1))], true);
        let crash = file.crash(1);
        let digest = |fates: [Fate; 2]| crash.state_digest(&fates, false);
        assert_ne!(digest([Fate::Lost, Fate::Kept(0)]), digest([Fate::Kept(0), Fate::Lost]));
        assert_eq!(digest([Fate::Kept(0), Fate::Lost]), digest([Fate::Kept(3), Fate::Lost]));
    }
}
