//! The redo log of an image: what answered requests have changed in its metadata and no file says yet.
//!
//! A power loss may forget what was not flushed. The death of a process may not: its guest lives, and has received the
//! answers. So every change of metadata is also written to memory that outlives the process, before the request that
//! caused it is answered; the process that opens the image next reads it back ([`recovery`]).
//!
//! Knows nothing of where that memory comes from, nor of what a format's metadata means: a change is bytes at an offset
//! of the file. Keeps: what is published is a state that the format was in, whole; and nothing is dropped from the log
//! before a round has made it durable.
//!
//! # Steps
//!
//! 1. The format changes its metadata in memory, and notes each change with the number of the batch in which a round
//!    writes it ([`Records`]). *Killed here:* the image as before the request, which has no answer.
//! 2. All changes since the last time are appended and published by one store, the deepest layer first. *Killed here:*
//!    the image as after the request, or, between two layers, as while a merge has copied something and not yet given
//!    it up.
//! 3. The request is answered.
//! 4. A round is sealed: how far the log goes then is remembered. Its writes go to the file. *Killed here:* any of them
//!    is in the file; all of the log is still there, and says what each place must hold in the end.
//! 5. The round has settled: what was in the log when it was sealed is dropped, by one store.
//!
//! Some changes are not logged (another header, a larger table), and the log can be full. Then there is a *gap*:
//! nothing more is appended, and every request that writes is answered only when a round is durable. The next round
//! that is sealed ends the gap; what is logged from then on counts once that round has settled, and not before.
//!
//! # Whose log it is
//!
//! A log belongs to the file that holds its stamp ([`Stamp`]), and to no other: neither to another image in the same
//! place nor to an earlier state of the same one (`accepted_of`). Before the first record after a round (and the first
//! of all), the file gets a new stamp:
//!
//! 1. The log accepts the new stamp as well as the old one. *Killed here:* the file has either, and the log is of both.
//! 2. The stamp is written to the file; nothing is appended meanwhile. *Killed here:* as before.
//! 3. The log accepts the new stamp only, and changes are appended. *A copy of the file from before, put back:* it has
//!    an older stamp, and the log is void.
//!
//! Two logs belong to the file with their identity ([`Owner`]) as well: one without records that has never accepted a
//! stamp, and one that says that a sync has failed, which may have lost the stamp, too.

mod deaths;
mod records;
mod recovery;
#[cfg(test)]
mod test;

use std::fmt;

use memory::Shared;

pub use deaths::{IN_FLIGHT, Mark, Suspect};
pub use records::Records;
pub use recovery::{Owed, Patched};

use crate::size::{in_memory, on_disk};
use crate::stamp::{STAMP_LEN, Stamp};
use crate::{FileOffset, ImageError, ImageErrorKind, Source};

/// Bytes that identify a file.
pub const IDENTITY_LEN: usize = 192;
/// Bytes in front of the records.
pub const HEADER_LEN: usize = 4096;

/// First word: "TAPLREDO".
const MAGIC: u64 = u64::from_be_bytes(*b"TAPLREDO");
/// Changed with the layout, and with what any word means: a log of another version is not understood. The first word
/// and this one stay where they are and mean the same in all versions, so that a program of any can tell that it does
/// not understand.
const VERSION: u64 = 2;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
/// Offset of the number of bytes that were ever appended, for programs that inspect a log from outside.
pub const HEAD_AT: usize = 16;
/// Offset of the number of these bytes that are dropped.
pub const TAIL_AT: usize = 24;
/// Offset of the flag that something was written that no sync has covered.
pub const UNSYNCED_AT: usize = 32;
/// Offset of the flag that a sync has failed, of the image or of one below it.
pub const FAILED_AT: usize = 40;
/// Offset of the bits that say which stamps count.
pub const ACCEPTED_AT: usize = 48;
/// Offset of the number of bytes for records, behind which they begin again at the first.
const CAPACITY_AT: usize = 56;
/// Offsets of the stamps. Two count while a new one is being written, three if that has failed before.
pub const STAMPS_AT: [usize; 3] = [64, 96, 208];
/// Offset of the number of bytes that the file has at least.
const REACH_AT: usize = 232;
/// Offset of the flag that a log in this place was void ([`RedoLog::was_void`]).
const WAS_VOID_AT: usize = 240;
/// The value at [`ACCEPTED_AT`] when all stamps count.
const ALL_STAMPS: u64 = 0b111;
/// In addition to the stamps: the log also belongs to the file with its identity, with any stamp or none. This is so
/// from the beginning until the file has its first stamp.
const UNSTAMPED: u64 = 0b1000;
/// Offset of the identity of the file.
pub const IDENTITY_AT: usize = 256;
/// Bytes from the beginning that say whose log it is, what requests its process had in flight, and whether there is
/// something to be read.
pub const PREFIX_LEN: usize = IDENTITY_AT + IDENTITY_LEN;
const _: () = assert!(
    STAMPS_AT[2] + STAMP_LEN <= REACH_AT
        && REACH_AT < WAS_VOID_AT
        && WAS_VOID_AT + WORD <= IDENTITY_AT
        && PREFIX_LEN <= HEADER_LEN
);
const _: () = assert!(STAMPS_AT[1] + STAMP_LEN <= IN_FLIGHT.start && IN_FLIGHT.end <= STAMPS_AT[2]);
/// Bytes from the beginning that say whether there is something to be read.
pub const STATE_LEN: usize = 64;

const WORD: usize = 8;
/// Kept free for the mark that ends a gap.
const SPARE: u64 = 8;
/// No log has ever had this many bytes appended, nor will: a head behind it is damage, and could not be counted up.
const HEAD_MAX: u64 = 1 << 63;

/// Whether a log with this beginning holds something that is not in its image. True for a log that is not understood,
/// as it may.
pub fn is_left(state: &[u8; STATE_LEN]) -> bool {
    let word = |at: usize| word_of(state, at);
    let says = || word(HEAD_AT) != word(TAIL_AT) || word(UNSYNCED_AT) != 0 || word(FAILED_AT) != 0;
    word(MAGIC_AT) == MAGIC && (word(VERSION_AT) != VERSION || says())
}

/// Whether a log, of which this is the beginning, says that a sync has failed.
pub fn has_failed(state: &[u8; STATE_LEN]) -> bool {
    let word = |at: usize| word_of(state, at);
    word(MAGIC_AT) == MAGIC && word(VERSION_AT) == VERSION && word(FAILED_AT) != 0
}

/// The stamps that a log accepts, of which its file has one, from the beginning of the log; none if it is not
/// understood.
pub fn stamps_of(prefix: &[u8; PREFIX_LEN]) -> Vec<Stamp> {
    if !is_understood(prefix) {
        return Vec::new();
    }
    (0..STAMPS_AT.len()).filter_map(|slot| stamp_of(prefix, slot)).collect()
}

/// Whether a log, from its beginning, is understood and belongs to another file or to another state of this one.
pub fn is_void(prefix: &[u8; PREFIX_LEN], owner: &Owner) -> bool {
    is_understood(prefix) && accepted_of(prefix, owner).is_none()
}

/// Whether a log, from its beginning, shows that something else than the last process has changed this very file: the
/// log of another file in its place says nothing about it.
pub fn shows_change(prefix: &[u8; PREFIX_LEN], owner: &Owner) -> bool {
    is_of_file(prefix, owner) && (is_void(prefix, owner) || was_void(prefix))
}

fn is_of_file(prefix: &[u8; PREFIX_LEN], owner: &Owner) -> bool {
    prefix.get(IDENTITY_AT..) == Some(owner.identity.as_slice())
}

/// Whether a log, from its beginning, says that its file was changed ([`RedoLog::was_void`]).
pub fn was_void(prefix: &[u8; PREFIX_LEN]) -> bool {
    let word = prefix.get(WAS_VOID_AT..).and_then(|rest| rest.first_chunk());
    is_understood(prefix) && word.is_some_and(|word| u64::from_ne_bytes(*word) != 0)
}

fn is_understood(prefix: &[u8; PREFIX_LEN]) -> bool {
    let word = |at: usize| word_of_prefix(prefix, at);
    word(MAGIC_AT) == MAGIC && word(VERSION_AT) == VERSION
}

/// The stamp in this slot, if it counts.
fn stamp_of(prefix: &[u8; PREFIX_LEN], slot: usize) -> Option<Stamp> {
    let at = *STAMPS_AT.get(slot).filter(|_| word_of_prefix(prefix, ACCEPTED_AT) & (1 << slot) != 0)?;
    Stamp::from_bytes(prefix.get(at..at + STAMP_LEN)?)
}

/// The stamps that the log accepts from now on, if it belongs to the owner's file in its present state.
fn accepted_of(prefix: &[u8; PREFIX_LEN], owner: &Owner) -> Option<u64> {
    let word = |at: usize| word_of_prefix(prefix, at);
    let has = |slot: &usize| stamp_of(prefix, *slot).is_some_and(|stamp| owner.stamps.contains(&stamp));
    let accepted = word(ACCEPTED_AT);
    let failed = word(FAILED_AT) != 0;
    if let Some(slot) = (0..STAMPS_AT.len()).find(has) {
        return Some(1 << slot | if failed { UNSTAMPED } else { 0 });
    }
    let is_same_file = is_of_file(prefix, owner);
    let is_unstamped = accepted == 0 || accepted & UNSTAMPED != 0;
    match (is_same_file, failed) {
        // With a failed sync the stamp may be lost, too.
        (true, true) => Some(accepted),
        (true, false) if is_unstamped && word(HEAD_AT) == word(TAIL_AT) => Some(0),
        _ => None,
    }
}

fn word_of_prefix(prefix: &[u8; PREFIX_LEN], at: usize) -> u64 {
    prefix.first_chunk().map_or(0, |state| word_of(state, at))
}

fn word_of(state: &[u8; STATE_LEN], at: usize) -> u64 {
    let bytes = state.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The file for which a log is opened, and the process that opens it.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Distinguishes the file from all others of this boot, as far as its file system can tell.
    pub identity: [u8; IDENTITY_LEN],
    /// The stamps that the file has.
    pub stamps: Vec<Stamp>,
    /// Random bytes of this process, from which its stamps are made.
    pub session: [u8; 16],
}

/// How far what is appended can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logging {
    /// All of it.
    Complete,
    /// Something is missing, and nothing is appended.
    Gap,
    /// The round under way has what was missing; what is appended counts when it has settled.
    AfterGap,
}

/// The log of one image that is open for writing.
pub struct RedoLog {
    region: Shared,
    /// Bytes for records.
    capacity: u64,
    /// Bytes ever appended, and of those the ones that are dropped.
    head: u64,
    tail: u64,
    /// The head when the round under way was sealed.
    sealed: u64,
    logging: Logging,
    /// The pending writes of the process before.
    owed: Option<Owed>,
    /// Whether a sync has failed under that process, or under us.
    failed: bool,
    /// The last stamp that this process has made.
    stamp: Stamp,
}

impl fmt::Debug for RedoLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RedoLog { head, tail, logging, .. } = self;
        f.debug_struct("RedoLog").field("head", head).field("tail", tail).field("logging", logging).finish()
    }
}

impl RedoLog {
    /// Opens the log in `region` for an image, whose file is `source`. A region that holds nothing, or the log of
    /// another image or of another state of this one, becomes an empty log. One that is laid out in another way is left
    /// as it is.
    pub fn open(region: Shared, owner: &Owner, source: &mut dyn Source) -> Result<RedoLog, ImageError> {
        let capacity = region.len().checked_sub(HEADER_LEN).map(|len| len / WORD * WORD);
        let capacity = capacity.and_then(|len| u64::try_from(len).ok()).filter(|&len| len > SPARE);
        let Some(capacity) = capacity else {
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, "the redo log is too small to hold anything"));
        };
        let mut log = RedoLog {
            region,
            capacity,
            head: 0,
            tail: 0,
            sealed: 0,
            logging: Logging::Complete,
            owed: None,
            failed: false,
            stamp: Stamp { session: owner.session, number: 0 },
        };
        if log.is_of(owner)? {
            log.resume(source)?;
        } else {
            // A reset that was interrupted has left no first word, and what it says stays.
            if log.word(MAGIC_AT) == MAGIC {
                let prefix = log.region.read(0);
                log.store(WAS_VOID_AT, u64::from(prefix.is_some_and(|prefix| shows_change(&prefix, owner))));
            }
            log.reset(&owner.identity);
        }
        Ok(log)
    }

    /// Whether the region holds the log of this file in the state in which the file is.
    fn is_of(&self, owner: &Owner) -> Result<bool, ImageError> {
        if self.word(MAGIC_AT) != MAGIC {
            return Ok(false);
        }
        let unknown = |how: String| {
            let what = format!("the redo log of the process that used the image last is {how}");
            Err(ImageError::new(ImageErrorKind::Unsupported, what))
        };
        // First: where the rest lies is known of this version only.
        match self.word(VERSION_AT) {
            VERSION => {}
            other => return unknown(format!("of version {other}, and this program knows version {VERSION}")),
        }
        let prefix = self.region.read(0).and_then(|prefix| accepted_of(&prefix, owner));
        let Some(accepted) = prefix else { return Ok(false) };
        self.store(ACCEPTED_AT, accepted);
        match self.word(CAPACITY_AT) {
            other if other != self.capacity => {
                unknown(format!("made for {other} bytes of records, and this program has {}", self.capacity))
            }
            _ => Ok(true),
        }
    }

    /// Whether the region held the log of another state of this file, and [`RedoLog::forget_void`] was not called
    /// since: the file was restored, or another program has written to it. It outlives the process, since the log
    /// itself is dropped when it is opened.
    pub fn was_void(&self) -> bool {
        self.word(WAS_VOID_AT) != 0
    }

    /// Nothing depends any more on whether something else has changed the file: what relied on it is void, durably.
    pub fn forget_void(&self) {
        self.store(WAS_VOID_AT, 0);
    }

    /// An empty log. Until it has its first word, the region holds none.
    fn reset(&mut self, identity: &[u8; IDENTITY_LEN]) {
        self.store(MAGIC_AT, 0);
        for at in [HEAD_AT, TAIL_AT, UNSYNCED_AT, FAILED_AT, ACCEPTED_AT, REACH_AT] {
            self.store(at, 0);
        }
        self.forget_deaths();
        self.store(VERSION_AT, VERSION);
        self.store(CAPACITY_AT, self.capacity);
        self.region.write(IDENTITY_AT, *identity);
        self.store(MAGIC_AT, MAGIC);
    }

    /// A new stamp for the file. `None` if writing the last ones has failed, so that the file may have any of them.
    pub fn new_stamp(&mut self) -> Option<Stamp> {
        if self.used() == 0 && self.word(ACCEPTED_AT) & ALL_STAMPS == ALL_STAMPS {
            // Nothing depends on which of them the file has.
            self.store(ACCEPTED_AT, UNSTAMPED);
        }
        self.free_slot()?;
        self.stamp.number += 1;
        Some(self.stamp)
    }

    /// The new stamp is about to be written to the file: from now on the log is of the file with it, too.
    pub fn begin_stamp(&mut self) {
        let Some(slot) = self.free_slot() else { unreachable!("a stamp is begun that there was no room for") };
        if let Some(&at) = STAMPS_AT.get(slot) {
            self.region.write(at, self.stamp.to_bytes());
        }
        let accepted = match self.word(ACCEPTED_AT) {
            0 => UNSTAMPED,
            accepted => accepted,
        };
        self.store(ACCEPTED_AT, accepted | (1 << slot));
    }

    fn free_slot(&self) -> Option<usize> {
        (0..STAMPS_AT.len()).find(|slot| self.word(ACCEPTED_AT) & (1 << slot) == 0)
    }

    /// The file has the last stamp that was begun: no other counts any more.
    pub fn end_stamp(&mut self) {
        let slot = STAMPS_AT.iter().position(|&at| self.region.read(at) == Some(self.stamp.to_bytes()));
        let Some(slot) = slot else { unreachable!("a stamp was written that the log does not have") };
        self.store(ACCEPTED_AT, 1 << slot);
    }

    /// The file could not be given a stamp, or may have been: what was to be logged is not.
    pub(crate) fn leave_gap(&mut self) {
        self.logging = Logging::Gap;
    }

    /// Reads what the process before us has left.
    fn resume(&mut self, source: &mut dyn Source) -> Result<(), ImageError> {
        (self.head, self.tail) = (self.word(HEAD_AT), self.word(TAIL_AT));
        self.sealed = self.tail;
        self.failed = self.word(FAILED_AT) != 0;
        let is_in_order = self.tail <= self.head && self.head < HEAD_MAX;
        if self.head % 8 != 0 || self.tail % 8 != 0 || !is_in_order || self.used() > self.capacity {
            let what = format!("the image's redo log is damaged: it goes from {} to {}", self.tail, self.head);
            return Err(ImageError::new(ImageErrorKind::Corrupt, what));
        }
        let words = (self.tail..self.head).step_by(WORD).map(|at| self.word(self.place(at)));
        let (owed, count) = Owed::of(&words.collect::<Vec<_>>(), source)?;
        // What the records refer to would be zeroes, once a write behind it has made the file longer.
        let (len, reach) = (source.len(), self.word(REACH_AT));
        if !self.failed && owed.is_some() && len < reach && !source.has_data_file() {
            let what = format!("the file has {len} bytes, and its last process has written {reach}: it was cut off");
            return Err(ImageError::new(ImageErrorKind::Corrupt, what));
        }
        self.owed = owed;
        // Behind a gap that no round has ended, nothing counts, and nothing is to be appended.
        let len = on_disk(count * WORD);
        self.set_head(self.tail + len);
        Ok(())
    }

    /// The pending writes of the process before, until they are durable.
    pub fn owed(&self) -> Option<&Owed> {
        self.owed.as_ref()
    }

    /// The file as it is when all pending writes of the last process have been made; the image must be opened from
    /// this.
    pub fn patched<'a>(&'a self, source: &'a mut dyn Source) -> Patched<'a> {
        Patched::new(source, self.owed.as_ref())
    }

    /// Whether this process or the one before has seen a sync fail of this image or of one below it. Pending writes are
    /// then read and never written: they refer to data that may be lost, and a merge may have freed here what is lost
    /// below.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// The image is opened by someone who knows that a sync has failed, and accepts its state after a power loss:
    /// pending writes, none of which was flushed, are dropped. To be called before the image is opened through the log.
    pub fn accept_failure(&mut self) {
        self.tail = self.head;
        self.sealed = self.head;
        self.store(TAIL_AT, self.tail);
        self.owed = None;
        self.failed = false;
        self.store(FAILED_AT, 0);
    }

    /// Whether something was written to the image that no sync has covered.
    pub fn is_unsynced(&self) -> bool {
        self.word(UNSYNCED_AT) != 0
    }

    /// Whether the image's file has everything that this log could hold, so that no process has to read the log.
    pub fn is_clean(&self) -> bool {
        self.used() == 0 && !self.is_unsynced() && !self.failed && self.logging == Logging::Complete
    }

    /// Whether requests that write must be made durable before they are answered.
    pub(crate) fn has_gap(&self) -> bool {
        self.logging != Logging::Complete
    }

    /// Whether changes are appended at present.
    pub(crate) fn appends(&self) -> bool {
        self.logging != Logging::Gap
    }

    /// Bytes of records that a process after us would read.
    pub(crate) fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Bytes for records.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Appends and publishes changes, or leaves a gap. `below`: there is a gap in the log of a layer below, without
    /// which these make no sense.
    pub fn append(&mut self, records: &mut Records, below: bool) {
        let len = on_disk(records.words().len() * WORD);
        if self.logging != Logging::Gap && !records.is_empty() {
            assert!(self.owed.is_none(), "an image is changed before what its last process has left is durable");
            let room = self.capacity.saturating_sub(self.used()).saturating_sub(SPARE);
            if below || records.is_incomplete() || len > room {
                self.logging = Logging::Gap;
            } else {
                let (mut at, end) = (self.place(self.head), self.end());
                for &word in records.words() {
                    self.store(at, word);
                    at += WORD;
                    if at >= end {
                        at = HEADER_LEN;
                    }
                }
                self.set_head(self.head + len);
            }
        }
        records.clear();
    }

    /// Notes that the file extends to `end` at least: data that records will refer to were written up to there.
    pub(crate) fn reaches(&mut self, end: FileOffset) {
        if end.0 > self.word(REACH_AT) {
            self.store(REACH_AT, end.0);
        }
    }

    /// Something is being written that no sync has covered.
    pub(crate) fn touched(&mut self) {
        self.store(UNSYNCED_AT, 1);
    }

    /// A sync has failed, of the image or of one below it: that is to be known until the image is opened on purpose by
    /// someone who knows of it.
    pub fn sync_failed(&mut self) {
        self.failed = true;
        self.store(FAILED_AT, 1);
    }

    /// A round was sealed: all that was appended until now, and what was not, is in it.
    pub(crate) fn seal(&mut self) {
        if self.logging == Logging::Gap {
            self.store(self.place(self.head), recovery::GAP);
            self.set_head(self.head + SPARE);
            self.logging = Logging::AfterGap;
        }
        self.sealed = self.head;
    }

    /// The round has ended. `synced`: nothing was written since it was sealed.
    pub(crate) fn settle(&mut self, durable: bool, synced: bool) {
        match (durable, self.logging) {
            (false, Logging::AfterGap) => {
                // What was appended behind the gap counts only with the round.
                self.set_head(self.sealed - SPARE);
                self.logging = Logging::Gap;
            }
            (false, _) => {}
            (true, logging) => {
                self.tail = self.sealed;
                self.store(TAIL_AT, self.tail);
                self.owed = None;
                if logging == Logging::AfterGap {
                    self.logging = Logging::Complete;
                }
                if synced {
                    self.store(UNSYNCED_AT, 0);
                }
            }
        }
    }

    fn set_head(&mut self, head: u64) {
        self.head = head;
        self.store(HEAD_AT, head);
    }

    /// Where the byte of this number stands.
    fn place(&self, at: u64) -> usize {
        HEADER_LEN + in_memory(at % self.capacity)
    }

    /// Where the last byte for records ends.
    fn end(&self) -> usize {
        HEADER_LEN + in_memory(self.capacity)
    }

    fn word(&self, at: usize) -> u64 {
        let Some(word) = self.region.load_u64_native(at) else {
            unreachable!("a word of the redo log lies outside of it")
        };
        word
    }

    fn store(&self, at: usize, value: u64) {
        let stored = self.region.publish_u64_native(at, value);
        assert!(stored.is_some(), "a word of the redo log lies outside of it");
    }
}
