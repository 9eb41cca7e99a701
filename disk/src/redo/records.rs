//! Changes that a format has made to its metadata since they were last taken, encoded in the words of a redo log.
//!
//! A record is a word with the place, the kind and the batch; then one with the value, or the length and what follows:
//!
//! ```text
//! at << 8 | kind << 4 | batch    value                       kind = number of bytes of the value, 1 to 8
//! at << 8 | FILL << 4 | batch    length << 8 | byte          so many bytes, all alike
//! at << 8 | BYTES << 4 | batch   length, then the bytes, padded to whole words
//! ```
//!
//! Knows nothing of what the bytes mean. Keeps: a change says what the bytes are now, never by how much they have
//! changed, so that it makes no difference how often it is done.

use crate::FileOffset;
use crate::size::on_disk;

/// Kind of a record: bytes all alike.
pub const FILL: u64 = 9;
/// Kind of a record: bytes that follow.
pub const BYTES: u64 = 10;

/// Batches of a round, at most.
const BATCHES: u64 = 16;
/// Offsets in a file are below this: what is left of a word.
const AT_END: u64 = 1 << 56;

/// Records that are still to be logged. None are collected before [`Records::collect`].
#[derive(Debug, Default)]
pub struct Records {
    collecting: bool,
    words: Vec<u64>,
    incomplete: bool,
}

impl Records {
    /// From now on changes are noted; earlier ones are in the file, or concern no one.
    pub fn collect(&mut self) {
        self.collecting = true;
    }

    /// Whether nothing has changed.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty() && !self.incomplete
    }

    /// Whether something has changed that was not noted.
    pub fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// The encoded records that are still to be logged.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Forgets what was noted.
    pub fn clear(&mut self) {
        self.words.clear();
        self.incomplete = false;
    }

    /// Takes over what another has noted.
    pub fn append(&mut self, other: &mut Records) {
        self.words.append(&mut other.words);
        self.incomplete |= std::mem::take(&mut other.incomplete);
    }

    /// Something has changed that no record can say.
    pub fn leave_out(&mut self) {
        self.incomplete |= self.collecting;
    }

    /// `bytes` stand at offset `at` of the file now, which `batch` of a round writes.
    pub fn bytes(&mut self, batch: u8, at: FileOffset, bytes: &[u8]) {
        if !self.collecting || bytes.is_empty() {
            return;
        }
        let len = on_disk(bytes.len());
        if let ..=8 = len {
            self.begin(batch, at, len);
            self.words.push(word(bytes));
            return;
        }
        self.begin(batch, at, BYTES);
        self.words.push(len);
        self.words.extend(bytes.chunks(8).map(word));
    }

    /// `len` bytes from offset `at` of the file on are `byte` now.
    pub fn fill(&mut self, batch: u8, at: FileOffset, len: u64, byte: u8) {
        if self.collecting && len > 0 {
            self.begin(batch, at, FILL);
            self.words.push((len << 8) | u64::from(byte));
        }
    }

    fn begin(&mut self, batch: u8, at: FileOffset, kind: u64) {
        assert!(u64::from(batch) < BATCHES && at.0 < AT_END, "batch {batch} at byte {at} cannot be logged");
        self.words.push((at.0 << 8) | (kind << 4) | u64::from(batch));
    }
}

/// Up to eight bytes as a word, the first of them in front.
#[inline]
fn word(bytes: &[u8]) -> u64 {
    if let Ok(whole) = bytes.try_into() {
        return u64::from_be_bytes(whole);
    }
    let mut whole = [0; 8];
    whole.iter_mut().zip(bytes).for_each(|(place, &byte)| *place = byte);
    u64::from_be_bytes(whole)
}
