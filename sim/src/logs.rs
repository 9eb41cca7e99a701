//! The redo logs of a run's files: memory that outlives a process but no power loss.
//!
//! Knows nothing about the contents of logs except the position of their length. A new log's memory contains the log of
//! another image, as when an inode number is reused.

use std::collections::BTreeMap;

use disk::redo::{
    self, ACCEPTED_AT, FAILED_AT, HEAD_AT, HEADER_LEN, IDENTITY_AT, IDENTITY_LEN, Owner, PREFIX_LEN, STAMPS_AT,
    TAIL_AT, UNSYNCED_AT,
};
use disk::{FileId, FileOffset, ImageError, Records, RedoLog, Stamp};
use memory::Shared;

use crate::media::Media;
use crate::planted::Planted;
use crate::sector::mix;

/// Capacity in bytes of a log that holds all records of a short workload.
pub const ROOMY: usize = 16 << 10;
/// The owner of a leftover log: an image that no longer exists.
const GONE: Owner = Owner { identity: [0xee; IDENTITY_LEN], stamps: Vec::new(), session: [0xee; 16] };

/// Redo logs by file.
pub struct Logs {
    regions: BTreeMap<FileId, Shared>,
    capacity: usize,
    bug: Option<Planted>,
    /// Whether images are opened although a sync has failed.
    pub accepts: bool,
    /// Number of this life of the image. Together with the number of logs opened in it, it makes sessions unique.
    life: u64,
    opened: u64,
}

impl Logs {
    /// No logs yet; each will have this capacity in bytes for records.
    pub fn new(capacity: usize, bug: Option<Planted>, life: u64) -> Logs {
        Logs { regions: BTreeMap::new(), capacity, bug, accepts: false, life, opened: 0 }
    }

    /// Opens the log of a file that is opened for writing.
    pub fn open(&mut self, file: FileId, media: &mut Media) -> Result<RedoLog, ImageError> {
        if !self.regions.contains_key(&file) {
            self.regions.insert(file, self.used_before()?);
        }
        let Some(region) = self.regions.get(&file) else { unreachable!("it was just put there") };
        if self.bug == Some(Planted::FailedSyncForgotten) {
            set(region, FAILED_AT, 0);
        }
        let stamps = disk::stamps_in(media)?;
        self.sabotage(region, &stamps);
        self.opened += 1;
        let session = (u128::from(self.life) << 64 | u128::from(self.opened)).to_be_bytes();
        let mut log = RedoLog::open(region.clone(), &Owner { identity: identity(file), stamps, session }, media)?;
        if self.accepts {
            log.accept_failure();
        }
        Ok(log)
    }

    /// Applies a planted bug to a log that is opened for a file with these stamps.
    fn sabotage(&self, region: &Shared, found: &[Stamp]) {
        let accepted = get(region, ACCEPTED_AT);
        let stamps = STAMPS_AT.iter().filter_map(|&at| Stamp::from_bytes(&region.read::<24>(at)?));
        let is_of_session = |stamp: &Stamp| stamps.clone().any(|other| other.session == stamp.session);
        let (has_any, is_of_process) = (accepted != 0, accepted != 0 && found.iter().any(is_of_session));
        let newest = stamps.clone().zip(0..).filter(|(_, slot)| accepted & (1 << slot) != 0);
        let newest = newest.max_by_key(|(stamp, _)| stamp.number).map(|(_, slot)| 1 << slot);
        match (self.bug, found.first()) {
            (Some(Planted::LogOfAnotherImage), Some(stamp)) if has_any => set_owner_stamp(region, *stamp),
            (Some(Planted::StampOncePerProcess), Some(stamp)) if is_of_process => set_owner_stamp(region, *stamp),
            (Some(Planted::OldStampKept), _) if accepted != 0 => set(region, ACCEPTED_AT, 0b111),
            (Some(Planted::OldStampForgotten), _) if accepted != 0 => {
                set(region, ACCEPTED_AT, newest.unwrap_or(accepted))
            }
            _ => {}
        }
    }

    /// Memory that contains the log of another image, with a change at the position of a VHD's table.
    fn used_before(&self) -> Result<Shared, ImageError> {
        let region = empty(self.capacity);
        let mut log = RedoLog::open(region.clone(), &GONE, &mut [].as_slice())?;
        log.new_stamp();
        log.begin_stamp();
        log.end_stamp();
        let mut records = Records::default();
        records.collect();
        records.bytes(0, FileOffset(1536), &[0, 0, 0, 9, 0, 0, 0, 9]);
        log.append(&mut records, false);
        Ok(region)
    }

    /// Whether a file has a log that the next process must read.
    pub fn is_left(&self, file: FileId) -> bool {
        let state = self.regions.get(&file).and_then(|region| region.read(0));
        state.is_some_and(|state| redo::is_left(&state))
    }

    /// Whether a sync of a file has failed.
    pub fn has_failed(&self, file: FileId) -> bool {
        self.regions.get(&file).is_some_and(|region| get(region, FAILED_AT) != 0)
    }

    /// Records in the log of a file, if it has one, that a sync of a file below it has failed.
    pub fn fail(&mut self, file: FileId) {
        self.regions.get(&file).into_iter().for_each(|region| set(region, FAILED_AT, 1));
    }

    /// Clears the failed sync of a file, or of one below it, as a planted bug does.
    pub fn forget_failure(&mut self, file: FileId) {
        self.regions.get(&file).into_iter().for_each(|region| set(region, FAILED_AT, 0));
    }

    /// Removes the log of a file that is closed for writing with nothing pending.
    pub fn close(&mut self, file: FileId) {
        self.regions.remove(&file);
    }

    /// Number of bytes that were ever appended to the log of a file.
    pub fn head(&self, file: FileId) -> u64 {
        self.regions.get(&file).map_or(0, |region| get(region, HEAD_AT))
    }

    /// Drops records up to this position too early, as a planted bug does.
    pub fn drop_until(&mut self, file: FileId, head: u64) {
        if let Some(region) = self.regions.get(&file) {
            set(region, TAIL_AT, head.max(get(region, TAIL_AT)));
        }
    }

    /// The logs as found by the next process, for which these files are numbered from 0.
    pub fn of_chain(&self, chain: &[FileId]) -> Logs {
        let copy = |(file, id): (FileId, &FileId)| Some((file, self.regions.get(id).map(copy_of)?));
        let mut logs = Logs::new(self.capacity, self.bug, self.life);
        logs.regions = (0..).map(FileId).zip(chain).filter_map(copy).collect();
        logs.opened = self.opened;
        // The owner belongs to the file, not to its number.
        for (file, region) in &logs.regions {
            let ours = chain.get(usize::from(file.0)).map(|id| identity(*id));
            if region.read(IDENTITY_AT) == ours {
                region.write(IDENTITY_AT, identity(*file));
            }
        }
        logs
    }

    /// Whether the log of a file would be applied to `media`, and has pending writes.
    pub fn would_be_applied(&self, file: FileId, media: &mut Media) -> Result<bool, ImageError> {
        let Some(region) = self.regions.get(&file).map(copy_of) else { return Ok(false) };
        let stamps = disk::stamps_in(media)?;
        self.sabotage(&region, &stamps);
        let owner = Owner { identity: identity(file), stamps, session: [0xdd; 16] };
        Ok(RedoLog::open(region, &owner, media)?.owed().is_some())
    }

    /// Whether the log of a file contains nothing that the file lacks.
    pub fn is_empty(&self, file: FileId) -> bool {
        self.regions.get(&file).is_none_or(|region| get(region, HEAD_AT) == get(region, TAIL_AT))
    }

    /// A digest of the logs of some files.
    pub fn digest(&self, files: &[FileId]) -> u64 {
        let words = |region: &Shared| {
            let (head, tail) = (get(region, HEAD_AT), get(region, TAIL_AT));
            let capacity = u64::try_from(self.capacity).unwrap_or(1).max(1);
            let at = |at: u64| HEADER_LEN + usize::try_from(at % capacity).unwrap_or(0);
            let records =
                (tail..head).step_by(8).map(|place| get(region, at(place))).fold(0, |sum, word| mix(sum ^ word));
            mix(records ^ get(region, UNSYNCED_AT)) ^ mix(get(region, FAILED_AT) + 2)
        };
        files.iter().filter_map(|file| self.regions.get(file)).fold(0, |sum, region| mix(sum ^ words(region)))
    }
}

/// The identity of a file.
fn identity(file: FileId) -> [u8; IDENTITY_LEN] {
    [file.0; IDENTITY_LEN]
}

/// Changes the owner of a log to the file with this stamp.
fn set_owner_stamp(region: &Shared, stamp: Stamp) {
    region.write(STAMPS_AT[0], stamp.to_bytes());
    set(region, ACCEPTED_AT, 1);
}

fn empty(capacity: usize) -> Shared {
    Shared::of_words((HEADER_LEN + capacity) / 8)
}

fn copy_of(from: &Shared) -> Shared {
    let capacity = from.len() - HEADER_LEN;
    let into = empty(capacity);
    let (head, tail) = (get(from, HEAD_AT), get(from, TAIL_AT));
    let len = u64::try_from(capacity).unwrap_or(1).max(1);
    let record = |at: u64| HEADER_LEN + usize::try_from(at % len).unwrap_or(0);
    // Dropped records are not copied.
    for at in (0..PREFIX_LEN).step_by(8).chain((tail..head).step_by(8).map(record)) {
        into.publish_u64_native(at, from.load_u64_native(at).unwrap_or(0));
    }
    into
}

fn get(region: &Shared, at: usize) -> u64 {
    region.load_u64_native(at).unwrap_or(0)
}

fn set(region: &Shared, at: usize, value: u64) {
    region.publish_u64_native(at, value);
}
