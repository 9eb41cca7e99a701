//! Reading a page, while it is written.
//!
//! The writer is not trusted: a process that was broken into may write anything, and cut the file. Nothing is mapped,
//! therefore, and every number is only a number. Reading does not disturb the writer, and takes no memory from the file
//! system for what the writer has never counted.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use memory::size::in_memory;

use crate::clock::monotonic;
use crate::histogram::{BUCKETS, Histogram, ROW};
use crate::layout::*;
use crate::page::Spent;
use crate::place;
use crate::snapshot::{InFlight, KindCounts, Record, Snapshot};

/// Attempts, without a pause, to read while no batch is being written.
const ATTEMPTS: usize = 16;

/// Records of traced requests that one call to the kernel reads.
const READ_AT_ONCE: usize = 1024;

/// Why a page was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read it")]
    Failed(#[from] io::Error),
    /// It is something else.
    #[error("it is not a statistics page")]
    NotAPage,
    /// The file is there, and its process has not initialized it yet: one that is starting, or was killed then.
    #[error("its process has not started to write it")]
    NotStarted,
    /// It was written by another version of the disk program.
    #[error("it is of version {0}, and this program reads version {VERSION}: use the tapline of that version")]
    Version(u64),
}

/// A statistics page that is open for reading.
#[derive(Debug)]
pub struct Reader {
    file: File,
}

impl Reader {
    /// Opens the page at `path`.
    pub fn open(path: &Path) -> Result<Reader, ReadError> {
        Reader::of(place::open(path)?.ok_or(ReadError::NotAPage)?)
    }

    /// Reads the page in `file`.
    pub fn of(file: File) -> Result<Reader, ReadError> {
        let reader = Reader { file };
        reader.head()?;
        Ok(reader)
    }

    /// The counters now.
    pub fn snapshot(&self) -> Result<Snapshot, ReadError> {
        let mut attempt = 0;
        let (head, torn) = loop {
            attempt += 1;
            let head = self.head()?;
            let sequence = head.word(SEQUENCE_AT);
            let same = sequence % 2 == 0 && self.word(SEQUENCE_AT)? == sequence;
            if same || attempt == ATTEMPTS {
                break (head, !same);
            }
        };
        let mut kinds = [KindCounts::default(); KINDS];
        for (kind, counts) in kinds.iter_mut().enumerate() {
            for (field, value) in counts.fields.iter_mut().enumerate() {
                *value = head.word(kind_at(kind) + field * 8);
            }
        }
        let mut counts = [0; Count::ALL.len()];
        counts.iter_mut().zip(Count::ALL).for_each(|(value, count)| *value = head.word(count.at()));
        let in_flight = self.in_flight(head.word(SLOTS_USED_AT))?;
        Ok(Snapshot {
            identity: head.identity(),
            pid: u32::try_from(head.word(PID_AT)).ok().filter(|pid| *pid > 0),
            incarnation: head.word(INCARNATION_AT),
            created: head.word(CREATED_AT),
            started: head.word(STARTED_AT),
            updated: head.word(UPDATED_AT),
            read: monotonic(),
            slow_clock: head.word(SOURCE_AT) != 0,
            torn,
            kinds,
            counts,
            in_flight,
        })
    }

    /// The histogram of what requests of a kind have spent in a stage, or of their whole durations.
    pub fn histogram(&self, kind: Kind, stage: Option<Stage>) -> Result<Histogram, ReadError> {
        let at = histogram_at(kind as usize, stage.map_or(STAGES, |stage| stage as usize));
        let mut found = Vec::new();
        let mut bytes = [0; ROW_LEN];
        // Rows that were never counted in have no memory, and are not read.
        let mut next = at;
        let end = at + BUCKETS * 8;
        while let Some(row) = self.data_from(next, end)? {
            self.file.read_exact_at(&mut bytes, row as u64)?;
            for (bucket, count) in bytes.chunks_exact(8).enumerate() {
                let count = u64::from_ne_bytes(count.try_into().unwrap_or_default());
                if count > 0 {
                    found.push(((row - at) / ROW_LEN * ROW + bucket, count));
                }
            }
            next = row + ROW_LEN;
        }
        Ok(Histogram::of(found))
    }

    /// How many requests were ever traced, and until when they are; `None` if they are not.
    pub fn traced(&self) -> Result<(u64, Option<u64>), ReadError> {
        let head = self.head()?;
        Ok((head.word(TRACED_AT).min(TRACED_MAX), Some(head.word(TRACED_UNTIL_AT)).filter(|until| *until > 0)))
    }

    /// The traced requests from number `from` on, in order, as many as there are still.
    pub fn records(&self, from: u64) -> Result<Vec<Record>, ReadError> {
        let (count, _) = self.traced()?;
        let mut number = from.max(count.saturating_sub(RECORDS as u64));
        let mut found = Vec::new();
        let mut bytes = vec![0; READ_AT_ONCE.min(in_memory(count.saturating_sub(number))) * RECORD_LEN];
        while number < count {
            // Up to where the records go round.
            let slot = in_memory(number % RECORDS as u64);
            let many = in_memory(count - number).min(RECORDS - slot).min(READ_AT_ONCE);
            let bytes = bytes.get_mut(..many * RECORD_LEN).unwrap_or_default();
            self.file.read_exact_at(bytes, (TRACE_AT + slot * RECORD_LEN) as u64)?;
            let records = (number..).zip(bytes.chunks_exact(RECORD_LEN));
            found.extend(records.filter_map(|(number, bytes)| record(number, bytes)));
            number += many as u64;
        }
        Ok(found)
    }

    /// The first row from `at` on that has memory, before `end`.
    fn data_from(&self, at: usize, end: usize) -> Result<Option<usize>, ReadError> {
        if at >= end {
            return Ok(None);
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at as u64)) {
            Ok(found) => {
                let found = in_memory(found) / ROW_LEN * ROW_LEN;
                Ok(Some(found.max(at)).filter(|found| *found < end))
            }
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(errno) => Err(ReadError::Failed(errno.into())),
        }
    }

    fn head(&self) -> Result<Head, ReadError> {
        let mut head = Head([0; SLOTS_AT]);
        match self.file.read_exact_at(&mut head.0, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let is_new = self.file.metadata()?.len() == 0;
                return Err(if is_new { ReadError::NotStarted } else { ReadError::NotAPage });
            }
            read => read?,
        }
        match (head.word(MAGIC_AT), head.word(VERSION_AT), head.word(LEN_AT)) {
            (MAGIC, VERSION, len) if len == PAGE_LEN as u64 => Ok(head),
            (MAGIC, version, _) if version != VERSION => Err(ReadError::Version(version)),
            // The magic number is the last word that is initialized.
            (0, ..) => Err(ReadError::NotStarted),
            _ => Err(ReadError::NotAPage),
        }
    }

    fn word(&self, at: usize) -> Result<u64, ReadError> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// The requests in flight, the oldest first.
    fn in_flight(&self, used: u64) -> Result<Vec<InFlight>, ReadError> {
        let mut bytes = vec![0; in_memory(used).min(SLOTS.into()) * SLOT_LEN];
        self.file.read_exact_at(&mut bytes, SLOTS_AT as u64)?;
        let word = |slot: &[u8], number: usize| {
            let bytes = slot.get(number * 8..number * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_ne_bytes(bytes.unwrap_or_default())
        };
        let of = |slot: &[u8]| {
            let (taken, at, what, submitted) = (word(slot, 0), word(slot, 1), word(slot, 2), word(slot, 3));
            let kind = Kind::ALL.get(usize::try_from(what & 0xff).ok()?)?;
            // Of the request that had the slot before, if it is older.
            let submitted = (submitted >= taken).then_some(submitted);
            (taken > 0).then_some(InFlight { kind: *kind, at, len: what >> 8, taken, submitted })
        };
        let mut found: Vec<InFlight> = bytes.chunks_exact(SLOT_LEN).filter_map(of).collect();
        found.sort_by_key(|request| request.taken);
        Ok(found)
    }
}

/// A record, if it is still that of this request.
fn record(number: u64, bytes: &[u8]) -> Option<Record> {
    let word = |word: usize| {
        let bytes = bytes.get(word * 8..word * 8 + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_ne_bytes(bytes.unwrap_or_default())
    };
    if word(0) != number + 1 {
        return None;
    }
    let what = word(1);
    let kind = *Kind::ALL.get(usize::try_from(what & 0xff).ok()?)?;
    let outcome = match what >> 8 & 0xff {
        0 => Outcome::Done,
        error => *Outcome::ERRORS.get(usize::try_from(error).ok()? - 1)?,
    };
    let (seen, taken, begun, ended, split, queue) = (word(3), word(4), word(5), word(6), word(7), word(8));
    let (answered, shown) = (word(9), word(10));
    let spent = Spent { seen, taken, begun, ended, split, queue };
    let stages = spent.stages(answered, shown);
    Some(Record { number, kind, outcome, at: word(2), len: what >> 16, seen, stages, shown })
}

/// The first bytes of a page.
struct Head([u8; SLOTS_AT]);

impl Head {
    fn word(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_ne_bytes(bytes.unwrap_or_default())
    }

    fn identity(&self) -> String {
        let len = in_memory(self.word(IDENTITY_AT)).min(IDENTITY_MAX);
        let bytes = self.0.get(IDENTITY_AT + 8..IDENTITY_AT + 8 + len).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }
}
