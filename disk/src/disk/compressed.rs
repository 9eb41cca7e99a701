//! Reading compressed clusters.
//!
//! Knows nothing of how they are compressed. Keeps: a cluster is read and decompressed once for all who wait for it,
//! and the last few stay decompressed, so that small sequential reads do not decompress each cluster again and again; a
//! cluster that cannot be decompressed fails those who wanted it and nobody else.
//!
//! A cluster may be freed while it is read: a write commits its new mapping, a round passes, and the old space is
//! reused. What was read may then be anything. So a commit marks the reads that it overlaps, and their readers resolve
//! the mapping again. A place that still holds a compressed cluster holds that same one: nothing is ever written
//! compressed.
//!
//! A read takes its memory from a budget, and waits there for reads of other clusters, each of which ends by itself. A
//! reader that wants a cluster whose read waits joins it.

use std::collections::{HashMap, VecDeque};

use memory::Segments;

use super::budget::Budget;
use super::{Disk, Missing, Op, Ready};
use crate::format::{Format, Mapping, Wait};
use crate::size::in_memory;
use crate::{Action, FileDone, FileId, Io, Span, Status};

/// Decompressed clusters that are kept: as many as there are commonly streams read side by side.
const KEPT_MAX: usize = 4;
/// Bytes of decompressed clusters that are kept: four of the usual size, or one of the largest.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// Names a cluster: its file, and the offset at which its compressed bytes begin.
pub(super) type Begin = (FileId, u64);

/// Who wants bytes of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reader {
    /// A request, of which this is a part.
    Request(u32),
    /// A fill.
    Fill(u32),
}

/// Bytes wanted of a cluster.
#[derive(Debug)]
struct Want {
    reader: Reader,
    /// The bytes of the disk.
    span: Span,
    /// Where they begin in the decompressed cluster.
    skip: u64,
    into: Segments,
}

/// A cluster that is being read, or waits for memory.
#[derive(Debug)]
struct Reading {
    at: u64,
    size: u64,
    lead: u64,
    wants: Vec<Want>,
    /// A commit has overlapped it meanwhile.
    moved: bool,
}

/// A place inside a compressed cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cluster {
    file: FileId,
    at: u64,
    size: u64,
    lead: u64,
    skip: u64,
    /// Bytes of the disk from this place on that are in the same cluster.
    pub len: u64,
}

/// Clusters that are being read, and those decompressed last.
#[derive(Debug)]
pub(super) struct CompressedReads {
    reading: HashMap<Begin, Reading>,
    budget: Budget<Begin>,
    /// Latest first.
    kept: VecDeque<(Begin, Vec<u8>)>,
}

impl CompressedReads {
    pub fn new(bytes_max: u64) -> CompressedReads {
        CompressedReads { reading: HashMap::new(), budget: Budget::new(bytes_max), kept: VecDeque::new() }
    }

    /// The next read that has waited for memory and has it now.
    pub fn next(&mut self) -> Option<Begin> {
        self.budget.next()
    }

    /// Bytes of memory for what is being read.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.budget.taken()
    }

    /// Whether nothing is being read and no memory is taken.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.reading.is_empty() && self.budget.is_whole()
    }

    fn keep(&mut self, begin: Begin, bytes: Vec<u8>) {
        self.kept.push_front((begin, bytes));
        let size = |kept: &VecDeque<(Begin, Vec<u8>)>| kept.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        while self.kept.len() > 1 && (self.kept.len() > KEPT_MAX || size(&self.kept) > KEPT_BYTES_MAX) {
            self.kept.pop_back();
        }
    }

    fn kept(&mut self, begin: Begin) -> Option<&[u8]> {
        let found = self.kept.iter().position(|(other, _)| *other == begin)?;
        if let Some(entry) = (found > 0).then(|| self.kept.remove(found)).flatten() {
            self.kept.push_front(entry);
        }
        self.kept.front().map(|(_, bytes)| bytes.as_slice())
    }

    /// Forgets a file that has left the disk: its number may come to name another one.
    pub(super) fn closed(&mut self, file: FileId) {
        self.kept.retain(|(begin, _)| begin.0 != file);
    }

    /// `span` was allocated anew in `file`: what is being read there may soon be something else.
    pub(super) fn moved(&mut self, file: FileId, span: Span) {
        for (_, reading) in self.reading.iter_mut().filter(|(begin, _)| begin.0 == file) {
            reading.moved |= reading.wants.iter().any(|want| want.span.overlaps(span));
        }
    }
}

impl<F: Format> Disk<F> {
    /// Where the first bytes of `span`, which the map says are in a compressed cluster of `file`, are. `None` if the
    /// format disagrees: the file was changed behind our back.
    pub(super) fn compressed_place(&mut self, file: FileId, span: Span) -> Result<Option<Cluster>, Missing> {
        match self.format_of(file).map(span) {
            Ok(Mapping::Compressed { at, size, lead, skip, len }) if len > 0 => {
                Ok(Some(Cluster { file, at, size, lead, skip, len: len.min(span.len) }))
            }
            Err(Wait::Load(block)) => Err(vec![(file, block)]),
            _ => Ok(None),
        }
    }

    /// Copies the bytes at `cluster`, which are those of `span`, to `into`. Status if the cluster is cached, `None` if
    /// it is being read.
    pub(super) fn read_compressed<I: Io>(
        &mut self,
        cluster: Cluster,
        span: Span,
        into: Segments,
        reader: Reader,
        io: &mut I,
    ) -> Option<Status> {
        let Cluster { file, at, size, lead, skip, .. } = cluster;
        let begin = (file, at + lead);
        let want = Want { reader, span, skip, into };
        if let Some(bytes) = self.compressed.kept(begin) {
            return Some(copy_out(bytes, &want));
        }
        if let Some(reading) = self.compressed.reading.get_mut(&begin) {
            reading.wants.push(want);
            return None;
        }
        self.compressed.reading.insert(begin, Reading { at, size, lead, wants: vec![want], moved: false });
        if self.compressed.budget.take(begin, size) {
            self.begin_compressed_read(begin, io);
        }
        None
    }

    /// Begins to read a cluster that has its memory.
    pub(super) fn begin_compressed_read<I: Io>(&mut self, begin: Begin, io: &mut I) {
        let Some(&Reading { at, size, .. }) = self.compressed.reading.get(&begin) else {
            unreachable!("nobody wants the cluster at {begin:?}")
        };
        let into = Segments::zeroed(in_memory(size));
        self.push(Op::ReadCompressed { begin }, begin.0, Action::Read { at, into }, io);
    }

    /// A compressed cluster has been read.
    pub(super) fn compressed_read<I: Io>(&mut self, begin: Begin, done: FileDone, io: &mut I) {
        let Some(Reading { size, lead, wants, moved, .. }) = self.compressed.reading.remove(&begin) else {
            unreachable!("nobody has read the cluster at {begin:?}")
        };
        self.compressed.budget.give_back(size);
        if moved {
            return wants.iter().for_each(|want| self.look_again(want, io));
        }
        let was_read = done.result.is_ok();
        let bytes = match (done.result, done.op.action) {
            (Ok(()), Action::Read { into, .. }) => self.decompress(begin.0, lead, &into.to_vec()),
            _ => None,
        };
        let statuses: Vec<Status> = match &bytes {
            Some(bytes) => wants.iter().map(|want| copy_out(bytes, want)).collect(),
            None => wants.iter().map(|_| Status::Failed).collect(),
        };
        if was_read && bytes.is_none() {
            wants.iter().for_each(|want| self.met_damage(begin.0, want.span));
        }
        if let Some(bytes) = bytes {
            self.compressed.keep(begin, bytes);
        }
        for (want, status) in wants.iter().zip(statuses) {
            self.served(want, status, io);
        }
    }

    fn decompress(&mut self, file: FileId, lead: u64, bytes: &[u8]) -> Option<Vec<u8>> {
        let bytes = bytes.get(usize::try_from(lead).ok()?..)?;
        self.format_of(file).decompress(bytes).ok()
    }

    fn served<I: Io>(&mut self, want: &Want, status: Status, io: &mut I) {
        match want.reader {
            Reader::Request(number) => self.part_ended(number, status),
            Reader::Fill(fill) => self.fill_read(fill, status, io),
        }
    }

    fn look_again<I: Io>(&mut self, want: &Want, io: &mut I) {
        match want.reader {
            Reader::Request(number) => self.ready.push_back(Ready::Request { number, rest: want.span }),
            // Cannot happen: its ticket keeps all others from moving the cluster.
            Reader::Fill(fill) => self.fill_read(fill, Status::Failed, io),
        }
    }
}

/// Copies the wanted bytes from a decompressed cluster.
fn copy_out(bytes: &[u8], want: &Want) -> Status {
    let range = usize::try_from(want.skip).ok().and_then(|from| Some(from..from.checked_add(want.into.len())?));
    match range.and_then(|range| bytes.get(range)) {
        Some(bytes) => {
            want.into.copy_from(bytes);
            Status::Done
        }
        None => Status::Failed,
    }
}
