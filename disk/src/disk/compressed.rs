//! Reading compressed clusters.
//!
//! Knows nothing of how they are compressed. Keeps: a cluster is read and decompressed once for all requests that wait
//! for it, and the last few stay decompressed, so that small sequential reads do not decompress each cluster again and
//! again; a cluster that cannot be decompressed fails the requests for it and no others.
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
use crate::size::in_memory;
use crate::{Action, FileId, FileOffset, Span, Status};

/// Decompressed clusters that are kept: as many as there are commonly streams read side by side.
const KEPT_MAX: usize = 4;
/// Bytes of decompressed clusters that are kept: four of the usual size, or one of the largest.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// Names a cluster: its file, and the offset at which its compressed bytes begin.
pub(super) type Begin = (FileId, FileOffset);

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
pub(super) struct Want {
    pub reader: Reader,
    /// The bytes of the disk.
    pub span: Span,
    /// Where they begin in the decompressed cluster.
    skip: u64,
    into: Segments,
}

/// A cluster that is being read, or waits for memory.
#[derive(Debug)]
pub(super) struct Reading {
    at: FileOffset,
    size: u64,
    /// Where in what is read the compressed bytes begin.
    pub lead: u64,
    pub wants: Vec<Want>,
    /// A commit has overlapped it meanwhile.
    pub moved: bool,
}

/// A place inside a compressed cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cluster {
    pub file: FileId,
    /// The range of the file to be read.
    pub at: FileOffset,
    pub size: u64,
    /// Where in what is read the compressed bytes begin, and where in what they decompress to the wanted ones do.
    pub lead: u64,
    pub skip: u64,
    /// Bytes of the disk from this place on that are in the same cluster.
    pub len: u64,
}

/// How bytes of a cluster are had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The cluster was cached: the bytes are copied, or the status says that it is too short for them.
    Cached(Status),
    /// It is being read, or waits for memory.
    Joined,
    /// It is to be read now ([`CompressedReads::read`]).
    Read(Begin),
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

    /// Copies the bytes at `cluster`, which are those of `span`, to `into`, now or when it was read.
    pub fn want(&mut self, cluster: Cluster, span: Span, into: Segments, reader: Reader) -> Wanted {
        let Cluster { file, at, size, lead, skip, .. } = cluster;
        let begin = (file, at + lead);
        let want = Want { reader, span, skip, into };
        if let Some(bytes) = self.kept(begin) {
            return Wanted::Cached(copy_out(bytes, &want));
        }
        if let Some(reading) = self.reading.get_mut(&begin) {
            reading.wants.push(want);
            return Wanted::Joined;
        }
        self.reading.insert(begin, Reading { at, size, lead, wants: vec![want], moved: false });
        if self.budget.take(begin, size) { Wanted::Read(begin) } else { Wanted::Joined }
    }

    /// The read of a cluster that has its memory.
    pub fn read(&self, begin: Begin) -> Action {
        let Some(&Reading { at, size, .. }) = self.reading.get(&begin) else {
            unreachable!("nobody wants the cluster at {begin:?}")
        };
        Action::Read { at, into: Segments::zeroed(in_memory(size)) }
    }

    /// A cluster was read.
    pub fn ended(&mut self, begin: Begin) -> Reading {
        let Some(reading) = self.reading.remove(&begin) else {
            unreachable!("nobody has read the cluster at {begin:?}")
        };
        self.budget.give_back(reading.size);
        reading
    }

    /// Keeps a decompressed cluster, and copies what is wanted of it. The status of each want.
    pub fn serve(&mut self, begin: Begin, wants: &[Want], bytes: Vec<u8>) -> Vec<Status> {
        let statuses = wants.iter().map(|want| copy_out(&bytes, want)).collect();
        self.keep(begin, bytes);
        statuses
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

    /// `span` was allocated again in `file`: the place that is being read may soon hold other data.
    pub(super) fn moved(&mut self, file: FileId, span: Span) {
        for (_, reading) in self.reading.iter_mut().filter(|(begin, _)| begin.0 == file) {
            reading.moved |= reading.wants.iter().any(|want| want.span.overlaps(span));
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

#[cfg(test)]
mod test {
    use super::*;
    use crate::DiskOffset;

    const FILE: FileId = FileId(0);

    fn cluster(at: u64, skip: u64) -> Cluster {
        Cluster { file: FILE, at: FileOffset(at), size: 512, lead: 8, skip, len: 512 }
    }

    fn want(reads: &mut CompressedReads, at: u64, skip: u64, number: u32) -> (Wanted, Segments) {
        let (span, into) = (Span { at: DiskOffset(at * 8 + skip), len: 512 }, Segments::zeroed(512));
        (reads.want(cluster(at, skip), span, into.clone(), Reader::Request(number)), into)
    }

    #[test]
    fn a_cluster_is_read_once_for_all_who_want_it_and_kept() {
        let mut reads = CompressedReads::new(4096);
        let begin = (FILE, FileOffset(8));
        assert_eq!(want(&mut reads, 0, 0, 1).0, Wanted::Read(begin));
        let (joined, second) = want(&mut reads, 0, 512, 2);
        assert_eq!(joined, Wanted::Joined);
        let reading = reads.ended(begin);
        let bytes = [[1; 512], [2; 512]].concat();
        assert_eq!(reads.serve(begin, &reading.wants, bytes), [Status::Done; 2]);
        assert_eq!(second.to_vec(), [2; 512]);
        let (cached, third) = want(&mut reads, 0, 512, 3);
        assert_eq!((cached, third.to_vec()), (Wanted::Cached(Status::Done), vec![2; 512]));
        assert_eq!(want(&mut reads, 0, 1024, 4).0, Wanted::Cached(Status::Failed), "behind its end");
        reads.closed(FILE);
        assert_eq!(want(&mut reads, 0, 0, 5).0, Wanted::Read(begin), "the number names another file now");
    }

    #[test]
    fn a_cluster_that_finds_no_memory_waits_for_it() {
        let mut reads = CompressedReads::new(512);
        assert_eq!(want(&mut reads, 0, 0, 1).0, Wanted::Read((FILE, FileOffset(8))));
        assert_eq!(want(&mut reads, 512, 0, 2).0, Wanted::Joined);
        assert_eq!(reads.next(), None);
        reads.ended((FILE, FileOffset(8)));
        assert_eq!(reads.next(), Some((FILE, FileOffset(520))));
        reads.ended((FILE, FileOffset(520)));
        assert!(reads.is_idle());
    }

    #[test]
    fn a_commit_marks_the_reads_that_it_overlaps() {
        let mut reads = CompressedReads::new(4096);
        want(&mut reads, 0, 0, 1);
        want(&mut reads, 512, 0, 2);
        reads.moved(FILE, Span { at: DiskOffset(4096), len: 4096 });
        assert_eq!(
            [(FILE, FileOffset(8)), (FILE, FileOffset(520))].map(|begin| reads.ended(begin).moved),
            [false, true]
        );
    }
}
