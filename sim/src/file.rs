//! One file on storage with a volatile cache: what is durable, what is written but not yet durable, and what a
//! power loss may make of that.
//!
//! Knows nothing of requests, formats or queues. Short transfers are not played here: finishing them is the
//! engines' affair, below the trait that the disk sees. An image with a data file is one file of two parts, each of
//! which is synced alone.
//!
//! Invariants, the fidelity of the whole simulator:
//! - a sync makes durable what had *completed* when the sync was *submitted*, and nothing else;
//! - after a failed sync, what it should have covered is never covered by a later one (as Linux marks such pages
//!   clean);
//! - what is not durable survives or not, sector by sector, each on its own.

use std::collections::BTreeMap;

use crate::media::{DATA_SECTOR, Media, Unwritten, place_digest, run_digest};
use crate::sector::{SECTOR, Sector, mix};

/// Names a write to a file, in the order in which they became visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

#[derive(Clone, Debug)]
struct Unsynced {
    write: WriteId,
    sector: u64,
    /// More than one only for zeros over sectors that nobody ever wrote: they share one fate.
    count: u64,
    /// Whether it is such a run.
    zeroed: bool,
    content: Sector,
    /// Number of the file's completion that this write was, if it has completed.
    completed: Option<u64>,
    /// A sync that should have covered it has failed.
    orphaned: bool,
}

impl Coverage {
    /// Of a sync that does nothing, in spite of what it answers.
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

/// What a sync submitted at some moment will cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    completions: u64,
    len: u64,
    /// Of the data file, and not of the image.
    data: bool,
}

/// A file with a volatile cache.
#[derive(Clone, Debug)]
pub struct SimFile {
    durable: Media,
    visible: Media,
    /// Of `durable`, which changes rarely and is asked for often.
    durable_digest: u64,
    unsynced: Vec<Unsynced>,
    completions: u64,
    /// The lengths that writes in flight need.
    growth: Vec<(WriteId, u64)>,
    /// The length that completed writes have given the file.
    completed_len: u64,
    writes: u64,
    sync_failed: bool,
    /// Somebody has looked at the time of its last change since: the next one is to be noticed.
    looked_at: bool,
}

impl SimFile {
    /// A file of which everything is durable.
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
            looked_at: true,
        }
    }

    /// A new file of which nothing is durable: who has made it has not seen to that.
    pub fn cached(media: &Media) -> SimFile {
        let mut empty = Media::empty(media.unwritten());
        // A device is as long as it is.
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

    /// What a read finds: everything written.
    pub fn visible(&self) -> &Media {
        &self.visible
    }

    /// What survives at least.
    pub fn durable(&self) -> &Media {
        &self.durable
    }

    /// When it was last changed. A change from now on has another time, and survives a power loss: a child that
    /// records this one must notice each change, and the storage has no finer clock.
    pub fn look_at_time(&mut self) -> u64 {
        self.looked_at = true;
        self.visible.modified()
    }

    fn changed(&mut self) {
        if std::mem::take(&mut self.looked_at) {
            self.visible.set_modified(self.visible.modified() + 1);
        }
    }

    /// Applies a write of `contents` from `sector` on; `None` leaves a sector as it is (a failed write may reach
    /// any part of its range).
    pub fn apply(&mut self, sector: u64, contents: impl IntoIterator<Item = Option<Sector>>, grows: bool) -> WriteId {
        self.changed();
        self.writes += 1;
        let write = WriteId(self.writes);
        // Behind the end of the file there is nothing to deallocate, unless the storage is larger than the file.
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
            // Kept or lost, it reads the same.
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

    /// Makes the file longer, durably; what is new reads as zero.
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

    /// The write is known to have completed.
    pub fn complete(&mut self, write: WriteId) {
        self.completions += 1;
        for entry in self.unsynced.iter_mut().filter(|entry| entry.write == write) {
            entry.completed = Some(self.completions);
        }
        let len = self.growth.iter().find(|(grew, _)| *grew == write).map_or(0, |(_, len)| *len);
        self.completed_len = self.completed_len.max(len);
        self.growth.retain(|(grew, _)| *grew != write);
    }

    /// What a sync submitted now covers, of the image or of its data file.
    pub fn coverage(&self, data: bool) -> Coverage {
        Coverage { completions: self.completions, len: if data { 0 } else { self.completed_len }, data }
    }

    /// A sync has succeeded.
    pub fn synced(&mut self, coverage: Coverage) {
        // What lies under a newer durable sector cannot come up again: the storage has an order of its own for
        // writes to one place.
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

    /// A sync has failed.
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

    /// What a power loss at this moment may leave, on storage that writes so many sectors whole or not at all.
    pub fn crash(&self, unit: u64) -> Crash<'_> {
        let mut places: BTreeMap<(u64, bool), Vec<Content<'_>>> = BTreeMap::new();
        for entry in self.unsynced.iter().filter(|entry| !self.is_repeated(entry)) {
            let place = if entry.zeroed { entry.sector } else { entry.sector / unit * unit };
            let contents = places.entry((place, !entry.zeroed)).or_default();
            let content = Content::after(contents.last(), entry, unit);
            match contents.last_mut() {
                // A write leaves one content, however many sectors of the place it is about.
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

/// What a power loss may leave at a place: the sectors there that differ from what is durable, and what is in them.
#[derive(Clone)]
struct Content<'a>(Vec<&'a Unsynced>);

impl<'a> Content<'a> {
    /// A place of one sector holds what was written last. Into a larger one what was written before has gone too.
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
    /// Whether it writes what is durable there, and is alone in that: kept or lost, it reads the same.
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
    /// Sectors in a place.
    unit: u64,
    /// For each place that is not durable, ascending, what was written there, oldest first.
    places: Vec<Vec<Content<'a>>>,
}

/// What became of one sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// It holds what was durable.
    Lost,
    /// It holds its newest-but-n content.
    Kept(u8),
    /// A guest's bytes were being written and are rubbish now.
    Trashed,
}

impl<'a> Crash<'a> {
    /// The first sectors of the places in question, ascending.
    pub fn sectors(&self) -> impl Iterator<Item = u64> + '_ {
        self.places.iter().flat_map(|contents| contents.first()?.0.first()).map(|entry| entry.sector)
    }

    /// Number of places, each with a fate of its own.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Number of contents that the `place`th may have got.
    pub fn contents(&self, place: usize) -> usize {
        self.places.get(place).map_or(0, Vec::len)
    }

    /// Whether the file has grown since its length was durable.
    pub fn grown(&self) -> bool {
        self.file.visible.len() > self.file.durable.len()
    }

    /// A number that stands for all of the states together.
    pub fn digest(&self) -> u64 {
        let start = mix(self.file.durable_digest ^ mix(self.file.visible.len()) ^ self.time_digest());
        self.places.iter().flatten().fold(start, |sum, content| mix(sum ^ content.digest()))
    }

    fn time_digest(&self) -> u64 {
        mix(!self.file.visible.modified())
    }

    /// What is at a place that had this fate, up to the end of the file.
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

    /// Whether a power loss may leave rubbish. Of storage that writes more than a sector at once, every unit is either
    /// as it was or as it was to be: others' sectors are in it.
    pub fn may_trash(&self) -> bool {
        self.unit == 1
    }

    fn len(&self, growth_lost: bool) -> u64 {
        if growth_lost { self.file.durable.len() } else { self.file.visible.len() }
    }

    /// The file after the power came back: a fate for each place, in their order. What lies behind a length that
    /// was lost is gone whatever its fate.
    pub fn state(&self, fates: &[Fate], growth_lost: bool) -> Media {
        let len = self.len(growth_lost);
        let mut media = self.file.durable.clone();
        media.set_modified(self.file.visible.modified());
        media.set_len(len);
        for (place, fate) in fates.iter().enumerate() {
            for entry in self.entries(place, *fate, len) {
                match entry.zeroed {
                    true => media.zero(entry.sector, entry.count),
                    false => media.patch(entry.sector, fate.of(&entry.content)),
                }
            }
        }
        media
    }

    /// A number that stands for [`state`](Crash::state) of the same arguments, without making it.
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
                sum ^= place_digest(entry.sector, &fate.of(&entry.content));
            }
        }
        sum
    }

    /// What nobody wrote holds this.
    pub fn unwritten(&self) -> Unwritten {
        self.file.durable.unwritten()
    }
}

impl Fate {
    /// Only a guest's bytes can be trashed: a format without a journal, as VHD, stands on storage that writes a
    /// sector of metadata whole or not at all, and drives do.
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
    fn a_failed_sync_is_never_made_good() {
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
    fn digests_tell_states_apart_and_see_equal_ones() {
        let mut file = file();
        file.apply(0, [Some(word(1)), Some(word(1))], true);
        let crash = file.crash(1);
        let digest = |fates: [Fate; 2]| crash.state_digest(&fates, false);
        assert_ne!(digest([Fate::Lost, Fate::Kept(0)]), digest([Fate::Kept(0), Fate::Lost]));
        assert_eq!(digest([Fate::Kept(0), Fate::Lost]), digest([Fate::Kept(3), Fate::Lost]));
    }
}
