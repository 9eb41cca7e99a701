//! The content of a redo log, read back: the writes that were pending when its process died, in the batches of a round.
//!
//! Of the rounds that the process had under way, any write may be in the file. So each place that the log names is
//! written again, with what it must hold in the end, in the order of a round's batches: first what the first batch has
//! changed, and so on. It is as if no round had begun yet and one were sealed now.
//!
//! Knows nothing of what the bytes mean. The log is memory that others may have written to: whatever it holds leads to
//! these writes or to an error. Keeps: a sector that is written holds, of what was changed, what belongs to this batch
//! and those before it, and for the rest what the file has.

use std::collections::{BTreeMap, BTreeSet};

use super::records::{BYTES, FILL};
use crate::format::MetaWrite;
use crate::size::{in_memory, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind, ReadFault, Source};

/// The record that ends a gap: without place, batch or value. What is behind it counts only where it has been dropped.
pub const GAP: u64 = 0xf0;

/// Bytes that storage writes whole or not at all.
const SECTOR: u64 = 512;
/// Bytes of one record, at most: nothing that is logged is larger than a cluster of 2 MiB.
const RECORD_MAX: u64 = 2 << 20;

/// By where they stand.
type Sectors = BTreeMap<FileOffset, [u8; 512]>;

/// Writes that are still to be made: those that were pending when a process died.
#[derive(Clone, Debug)]
pub struct Owed {
    batches: Vec<Vec<MetaWrite>>,
    /// The content of the sectors when all of it is written.
    sectors: Sectors,
}

/// One change.
struct Record {
    batch: u8,
    at: FileOffset,
    len: u64,
    content: Content,
}

enum Content {
    Fill(u8),
    Bytes(Vec<u8>),
}

impl Owed {
    /// The writes that the records in `words` amount to, over the file as it is; `None` if there are no records. And
    /// the number of words that count: those in front of a gap.
    pub fn of(words: &[u64], source: &mut dyn Source) -> Result<(Option<Owed>, usize), ImageError> {
        let (records, count) = parse(words)?;
        if records.is_empty() {
            return Ok((None, count));
        }
        let mut sectors = Sectors::new();
        for record in &records {
            for at in record.sectors() {
                if let std::collections::btree_map::Entry::Vacant(place) = sectors.entry(at) {
                    place.insert(read_sector(source, at)?);
                }
            }
        }
        let numbers: BTreeSet<u8> = records.iter().map(|record| record.batch).collect();
        let mut batches = Vec::new();
        for batch in numbers {
            let mut touched = BTreeSet::new();
            for record in records.iter().filter(|record| record.batch == batch) {
                record.apply(&mut sectors);
                touched.extend(record.sectors());
            }
            batches.push(writes(&sectors, &touched));
        }
        Ok((Some(Owed { batches, sectors }), count))
    }

    /// Whole sectors that somebody is about to write, who knows their order.
    pub(crate) fn about_to_be<'a>(writes: impl IntoIterator<Item = &'a MetaWrite>) -> Owed {
        let mut sectors = Sectors::new();
        for MetaWrite { at, bytes } in writes {
            let contents = bytes.chunks_exact(512).filter_map(|sector| sector.try_into().ok());
            sectors.extend((at.0..).step_by(512).map(FileOffset).zip(contents));
        }
        Owed { batches: Vec::new(), sectors }
    }

    /// The writes, batch by batch: any order within one, a sync in front of the first and behind every one.
    pub fn batches(&self) -> &[Vec<MetaWrite>] {
        &self.batches
    }

    /// Number of sectors that are to be written.
    pub fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Turns bytes that were read at `at` into what they are when all is written.
    pub fn patch(&self, at: FileOffset, bytes: &mut [u8]) {
        let end = at.saturating_add(on_disk(bytes.len()));
        let first = FileOffset(at.0.saturating_sub(SECTOR - 1));
        for (&sector, content) in self.sectors.range(first..end) {
            let (from, to) = (sector.max(at), (sector + SECTOR).min(end));
            let places = bytes.get_mut(index(from, at)..index(to, at)).unwrap_or_default();
            let content = content.get(index(from, sector)..index(to, sector)).unwrap_or_default();
            places.iter_mut().zip(content).for_each(|(place, &byte)| *place = byte);
        }
    }

    /// The end of the last sector.
    fn end(&self) -> FileOffset {
        self.sectors.keys().next_back().map_or(FileOffset(0), |&at| at + SECTOR)
    }
}

impl Record {
    /// The sectors that it lies in.
    fn sectors(&self) -> impl Iterator<Item = FileOffset> + use<> {
        let first = self.at.align_down(SECTOR);
        (first.0..(self.at + self.len).0).step_by(512).map(FileOffset)
    }

    fn apply(&self, sectors: &mut Sectors) {
        let end = self.at + self.len;
        for sector in self.sectors() {
            let Some(content) = sectors.get_mut(&sector) else { continue };
            let (from, to) = (self.at.max(sector), end.min(sector + SECTOR));
            let Some(places) = content.get_mut(index(from, sector)..index(to, sector)) else { continue };
            match &self.content {
                Content::Fill(byte) => places.fill(*byte),
                Content::Bytes(bytes) => {
                    let bytes = bytes.get(index(from, self.at)..index(to, self.at)).unwrap_or_default();
                    places.iter_mut().zip(bytes).for_each(|(place, &byte)| *place = byte);
                }
            }
        }
    }
}

/// How far an offset lies behind another.
fn index(at: FileOffset, base: FileOffset) -> usize {
    in_memory(at - base)
}

/// The records in front of a gap, and the words they take.
fn parse(words: &[u64]) -> Result<(Vec<Record>, usize), ImageError> {
    let damaged =
        |what: &str| ImageError::new(ImageErrorKind::Corrupt, format!("the image's redo log is damaged: {what}"));
    let mut records = Vec::new();
    let all = words.len();
    let mut words = words.iter().copied();
    while let Some(head) = words.next() {
        if head == GAP {
            return Ok((records, all - words.len() - 1));
        }
        let (at, kind) = (FileOffset(head >> 8), (head >> 4) & 0xf);
        let [.., low] = head.to_be_bytes();
        let batch = low & 0xf;
        let value = words.next().ok_or_else(|| damaged("a record ends before its value"))?;
        let (len, content) = match kind {
            1..=8 => (kind, Content::Bytes(value.to_be_bytes().to_vec())),
            FILL => {
                let [.., byte] = value.to_be_bytes();
                (value >> 8, Content::Fill(byte))
            }
            BYTES => {
                let count = in_memory(value.div_ceil(8));
                if count > words.len() {
                    return Err(damaged("a record ends before its bytes"));
                }
                (value, Content::Bytes(words.by_ref().take(count).flat_map(u64::to_be_bytes).collect()))
            }
            _ => return Err(damaged("a record is of no kind")),
        };
        if len == 0 || len > RECORD_MAX {
            return Err(damaged("a record is of no size"));
        }
        records.push(Record { batch, at, len, content });
    }
    Ok((records, all))
}

/// A sector of the file; zeros behind its end.
fn read_sector(source: &mut dyn Source, at: FileOffset) -> Result<[u8; 512], ImageError> {
    let mut sector = [0; 512];
    let there = in_memory(source.len().saturating_sub(at.0).min(SECTOR));
    let Some(bytes) = sector.get_mut(..there).filter(|bytes| !bytes.is_empty()) else { return Ok(sector) };
    source.read_at(at, bytes).map_err(|fault| {
        ImageError::at(ImageErrorKind::Storage, at, format!("cannot read what a redo log has changes for: {fault}"))
    })?;
    Ok(sector)
}

/// Writes of some sectors, neighbours in one.
fn writes(sectors: &Sectors, touched: &BTreeSet<FileOffset>) -> Vec<MetaWrite> {
    let mut writes: Vec<MetaWrite> = Vec::new();
    for at in touched {
        let Some(content) = sectors.get(at) else { continue };
        let end = |write: &MetaWrite| write.at + on_disk(write.bytes.len());
        match writes.last_mut().filter(|last| end(last) == *at) {
            Some(last) => last.bytes.extend_from_slice(content),
            None => writes.push(MetaWrite { at: *at, bytes: content.to_vec() }),
        }
    }
    writes
}

/// A file as it is when the pending writes have been made.
pub struct Patched<'a> {
    source: &'a mut dyn Source,
    owed: Option<&'a Owed>,
}

impl<'a> Patched<'a> {
    /// The file as it is, without pending writes.
    pub fn of(source: &'a mut dyn Source) -> Patched<'a> {
        Patched::new(source, None)
    }

    pub(crate) fn new(source: &'a mut dyn Source, owed: Option<&'a Owed>) -> Patched<'a> {
        Patched { source, owed }
    }
}

impl Source for Patched<'_> {
    fn has_data_file(&self) -> bool {
        self.source.has_data_file()
    }

    fn len(&self) -> u64 {
        self.source.len().max(self.owed.map_or(0, |owed| owed.end().0))
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let len = on_disk(bytes.len());
        let end = at.saturating_add(len);
        if end.0 > self.len() {
            return Err(ReadFault::PastEnd(end));
        }
        let there = in_memory(self.source.len().saturating_sub(at.0).min(len));
        let (in_file, behind) = bytes.split_at_mut(there);
        behind.fill(0);
        if !in_file.is_empty() {
            self.source.read_at(at, in_file)?;
        }
        if let Some(owed) = self.owed {
            owed.patch(at, bytes);
        }
        Ok(())
    }
}
