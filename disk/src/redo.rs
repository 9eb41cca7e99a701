//! The redo log of an image: what answered requests have changed in its metadata and no file says yet.
//!
//! A power loss may forget what was not flushed. The death of a process may not: its guest lives, and has been told. So
//! every change of metadata is also written to memory that outlives the process, before the request that caused it is
//! answered; the process that opens the image next reads it back ([`recovery`]).
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

mod deaths;
mod records;
mod recovery;
#[cfg(test)]
mod test;

use std::fmt;

use memory::Shared;

pub use deaths::{Mark, Suspect};
pub use records::Records;
pub use recovery::{Owed, Patched};

use crate::size::{in_memory, on_disk};
use crate::{ImageError, ImageErrorKind, Source};

/// Bytes that say whose log it is.
pub const IDENTITY_LEN: usize = 64;
/// Bytes in front of the records.
pub const HEADER_LEN: usize = 4096;

/// First word: "TAPLREDO".
const MAGIC: u64 = u64::from_be_bytes(*b"TAPLREDO");
/// Changed with the layout, and with what any word means: a log of another version is not understood. The first word
/// and this one stay where they are and mean the same in all versions, so that a program of any can tell that it does
/// not understand.
const VERSION: u64 = 1;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
/// Where it stands how many bytes were ever appended, for whoever looks at a log from outside.
pub const HEAD_AT: usize = 16;
/// Where it stands how many of them are dropped.
pub const TAIL_AT: usize = 24;
/// Where it stands whether something was written that no sync has covered.
pub const UNSYNCED_AT: usize = 32;
/// Where it stands whether a sync has failed, of the image or of one below it.
pub const FAILED_AT: usize = 40;
/// Where it stands when the process was last seen to write.
const SEEN_AT: usize = 48;
/// Where it stands for how many bytes of records there is room, which is where they begin again at the first; zero in a
/// log of before this was noted.
const CAPACITY_AT: usize = 56;
/// Where it stands whose log it is.
pub const IDENTITY_AT: usize = 64;
/// Bytes from the beginning that say whether there is something to be read.
pub const STATE_LEN: usize = 64;

const WORD: usize = 8;
/// Kept free for the mark that ends a gap.
const SPARE: u64 = 8;

/// Whether a log, of which this is the beginning, says something that is not in its image; of one that is not
/// understood nobody can say that it does not.
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

fn word_of(state: &[u8; STATE_LEN], at: usize) -> u64 {
    let bytes = state.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
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
    /// What the process before us has left to be done.
    owed: Option<Owed>,
    /// Whether a sync has failed under that process, or under us.
    failed: bool,
}

impl fmt::Debug for RedoLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RedoLog { head, tail, logging, .. } = self;
        f.debug_struct("RedoLog").field("head", head).field("tail", tail).field("logging", logging).finish()
    }
}

impl RedoLog {
    /// Opens the log in `region` for the image with this identity, whose file is `source`. A region that holds nothing,
    /// or the log of another image, becomes an empty log. One that is laid out in another way is left as it is.
    pub fn open(region: Shared, identity: &[u8; IDENTITY_LEN], source: &mut dyn Source) -> Result<RedoLog, ImageError> {
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
        };
        if log.is_of(identity)? {
            log.resume(source)?;
        } else {
            log.reset(identity);
        }
        Ok(log)
    }

    /// Whether the region holds a log of the image with this identity.
    fn is_of(&self, identity: &[u8; IDENTITY_LEN]) -> Result<bool, ImageError> {
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
        if self.region.read(IDENTITY_AT) != Some(*identity) {
            return Ok(false);
        }
        match self.word(CAPACITY_AT) {
            other if other != 0 && other != self.capacity => {
                unknown(format!("made for {other} bytes of records, and this program has {}", self.capacity))
            }
            _ => Ok(true),
        }
    }

    /// An empty log. Until it has its first word, the region holds none.
    fn reset(&mut self, identity: &[u8; IDENTITY_LEN]) {
        self.store(MAGIC_AT, 0);
        for at in [HEAD_AT, TAIL_AT, UNSYNCED_AT, FAILED_AT, SEEN_AT] {
            self.store(at, 0);
        }
        self.forget_deaths();
        self.store(VERSION_AT, VERSION);
        self.store(CAPACITY_AT, self.capacity);
        self.region.write(IDENTITY_AT, *identity);
        self.store(MAGIC_AT, MAGIC);
    }

    /// Reads what the process before us has left.
    fn resume(&mut self, source: &mut dyn Source) -> Result<(), ImageError> {
        (self.head, self.tail) = (self.word(HEAD_AT), self.word(TAIL_AT));
        self.sealed = self.tail;
        self.failed = self.word(FAILED_AT) != 0;
        if self.head % 8 != 0 || self.tail % 8 != 0 || self.tail > self.head || self.used() > self.capacity {
            let what = format!("the image's redo log is damaged: it goes from {} to {}", self.tail, self.head);
            return Err(ImageError::new(ImageErrorKind::Corrupt, what));
        }
        let words = (self.tail..self.head).step_by(WORD).map(|at| self.word(self.place(at)));
        let (owed, count) = Owed::of(&words.collect::<Vec<_>>(), source)?;
        self.owed = owed;
        // Behind a gap that no round has ended, nothing counts, and nothing is to be appended.
        let len = u64::try_from(count * WORD).unwrap_or(u64::MAX);
        self.set_head(self.tail + len);
        Ok(())
    }

    /// What the process before us has left to be written, until it is durable.
    pub fn owed(&self) -> Option<&Owed> {
        self.owed.as_ref()
    }

    /// The file as it is when all that is owed has been written: what the image is to be opened from.
    pub fn patched<'a>(&'a self, source: &'a mut dyn Source) -> Patched<'a> {
        Patched::new(source, self.owed.as_ref())
    }

    /// Whether the process before us, or we, have seen a sync fail of this image or of one below it. What is owed is
    /// read then, and never written: it speaks of data that may be lost, and a merge may have freed here what is
    /// lost below.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// The image is opened by someone who knows that a sync has failed, and takes it as after a power loss: what is
    /// owed is forgotten, none of which was flushed. Before it is opened through the log.
    pub fn accept_failure(&mut self) {
        self.tail = self.head;
        self.sealed = self.head;
        self.store(TAIL_AT, self.tail);
        self.owed = None;
        self.failed = false;
        self.store(FAILED_AT, 0);
    }

    /// When the process before us was last seen to write, in the words of [`RedoLog::seen`]; zero if it never was.
    pub fn last_seen(&self) -> u64 {
        self.word(SEEN_AT)
    }

    /// This process is at work on the image; `now` is for whoever opens it next, and of no meaning here. A clock that
    /// was set back does not count: the image would look as if somebody had changed it since.
    pub fn seen(&self, now: u64) {
        self.store(SEEN_AT, now.max(self.last_seen()));
    }

    /// Whether something was written to the image that no sync has covered.
    pub fn is_unsynced(&self) -> bool {
        self.word(UNSYNCED_AT) != 0
    }

    /// Whether the image's file says all that this log could say: nobody has to read it.
    pub fn is_clean(&self) -> bool {
        self.used() == 0 && !self.is_unsynced() && !self.failed && self.logging == Logging::Complete
    }

    /// Whether requests that write must be made durable before they are answered.
    pub(crate) fn has_gap(&self) -> bool {
        self.logging != Logging::Complete
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
                self.set_head(self.head.saturating_add(len));
            }
        }
        records.clear();
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
            self.set_head(self.head.saturating_add(SPARE));
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
        let within = at.checked_rem(self.capacity).unwrap_or(0);
        HEADER_LEN + in_memory(within)
    }

    /// Where the last byte for records ends.
    fn end(&self) -> usize {
        HEADER_LEN + in_memory(self.capacity)
    }

    fn word(&self, at: usize) -> u64 {
        self.region.load_u64_native(at).unwrap_or(0)
    }

    fn store(&self, at: usize, value: u64) {
        let stored = self.region.publish_u64_native(at, value);
        assert!(stored.is_some(), "a word of the redo log lies outside of it");
    }
}
