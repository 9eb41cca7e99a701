//! The redo logs of a run's files: memory that outlives a process, and no power loss.
//!
//! Knows nothing of what is in a log but where it says how much that is. A new log's memory holds the log of another
//! image, as where a file's number is used again.

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

/// Bytes for the records of a log into which all of a short workload goes.
pub const ROOMY: usize = 16 << 10;
/// An image that is gone.
const GONE: Owner = Owner { identity: [0xee; IDENTITY_LEN], stamps: Vec::new(), session: [0xee; 16] };

/// Logs by the number of their file.
pub struct Logs {
    regions: BTreeMap<FileId, Shared>,
    capacity: usize,
    bug: Option<Planted>,
    /// Whether who opens a log takes the image as it is though a sync has failed.
    pub accepts: bool,
    /// What distinguishes this life of the image from others, and how many logs were opened in it: no two processes
    /// have the same session.
    life: u64,
    opened: u64,
}

impl Logs {
    /// No logs yet; each is to have so many bytes for records.
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

    /// What a planted bug does to a log that is opened for a file with these stamps.
    fn sabotage(&self, region: &Shared, found: &[Stamp]) {
        let accepted = get(region, ACCEPTED_AT);
        let stamps = STAMPS_AT.iter().filter_map(|&at| Stamp::from_bytes(&region.read::<24>(at)?));
        let is_of_session = |stamp: &Stamp| stamps.clone().any(|other| other.session == stamp.session);
        let (has_any, is_of_process) = (accepted != 0, accepted != 0 && found.iter().any(is_of_session));
        let newest = stamps.clone().zip(0..).filter(|(_, slot)| accepted & (1 << slot) != 0);
        let newest = newest.max_by_key(|(stamp, _)| stamp.number).map(|(_, slot)| 1 << slot);
        match (self.bug, found.first()) {
            (Some(Planted::LogOfAnotherImage), Some(stamp)) if has_any => believe(region, *stamp),
            (Some(Planted::StampOncePerProcess), Some(stamp)) if is_of_process => believe(region, *stamp),
            (Some(Planted::OldStampKept), _) if accepted != 0 => set(region, ACCEPTED_AT, 0b111),
            (Some(Planted::OldStampForgotten), _) if accepted != 0 => {
                set(region, ACCEPTED_AT, newest.unwrap_or(accepted))
            }
            _ => {}
        }
    }

    /// Memory in which the log of another image stands, with a change where a VHD has its table.
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

    /// Whether a file has a log that its next process must read.
    pub fn is_left(&self, file: FileId) -> bool {
        let state = self.regions.get(&file).and_then(|region| region.read(0));
        state.is_some_and(|state| redo::is_left(&state))
    }

    /// Whether a sync of a file has failed.
    pub fn has_failed(&self, file: FileId) -> bool {
        self.regions.get(&file).is_some_and(|region| get(region, FAILED_AT) != 0)
    }

    /// A sync of a file below this one has failed, if this one has a log.
    pub fn fail(&mut self, file: FileId) {
        self.regions.get(&file).into_iter().for_each(|region| set(region, FAILED_AT, 1));
    }

    /// Forgets that a sync of a file, or of one below it, has failed: what a planted bug does.
    pub fn forget_failure(&mut self, file: FileId) {
        self.regions.get(&file).into_iter().for_each(|region| set(region, FAILED_AT, 0));
    }

    /// A file is closed for writing, with nothing left to be read.
    pub fn close(&mut self, file: FileId) {
        self.regions.remove(&file);
    }

    /// How many bytes were ever appended to the log of a file.
    pub fn head(&self, file: FileId) -> u64 {
        self.regions.get(&file).map_or(0, |region| get(region, HEAD_AT))
    }

    /// Drops of the log of a file what was appended up to there: what a planted bug does too early.
    pub fn drop_until(&mut self, file: FileId, head: u64) {
        if let Some(region) = self.regions.get(&file) {
            set(region, TAIL_AT, head.max(get(region, TAIL_AT)));
        }
    }

    /// What the next process finds, for which these files have the numbers from 0 on.
    pub fn of_chain(&self, chain: &[FileId]) -> Logs {
        let copy = |(file, id): (FileId, &FileId)| Some((file, self.regions.get(id).map(copy_of)?));
        let mut logs = Logs::new(self.capacity, self.bug, self.life);
        logs.regions = (0..).map(FileId).zip(chain).filter_map(copy).collect();
        logs.opened = self.opened;
        // Whose log it is goes with the file, not with its number.
        for (file, region) in &logs.regions {
            let ours = chain.get(usize::from(file.0)).map(|id| identity(*id));
            if region.read(IDENTITY_AT) == ours {
                region.write(IDENTITY_AT, identity(*file));
            }
        }
        logs
    }

    /// Whether the log of a file would be used for what `media` holds, and has something to be written to it.
    pub fn believes(&self, file: FileId, media: &mut Media) -> Result<bool, ImageError> {
        let Some(region) = self.regions.get(&file).map(copy_of) else { return Ok(false) };
        let stamps = disk::stamps_in(media)?;
        self.sabotage(&region, &stamps);
        let owner = Owner { identity: identity(file), stamps, session: [0xdd; 16] };
        Ok(RedoLog::open(region, &owner, media)?.owed().is_some())
    }

    /// Whether nothing is in the log of a file that the file does not have.
    pub fn is_empty(&self, file: FileId) -> bool {
        self.regions.get(&file).is_none_or(|region| get(region, HEAD_AT) == get(region, TAIL_AT))
    }

    /// A number for what stands in the logs of some files.
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

/// What distinguishes a file from others.
fn identity(file: FileId) -> [u8; IDENTITY_LEN] {
    [file.0; IDENTITY_LEN]
}

/// Has a log be of the file with this stamp, whatever image it is of.
fn believe(region: &Shared, stamp: Stamp) {
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
    // What is dropped is nobody's business.
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
