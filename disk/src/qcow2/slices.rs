//! A bounded cache of pieces of tables: L2 tables or refcount blocks.
//!
//! Knows nothing of what is in them. Keeps: what is changed, in the round under way or pinned stays; a slice that is in
//! the cache is newer than the file or equal to it; and a fresh table, which the file does not have yet, is never
//! loaded.

use std::collections::{BTreeSet, HashSet, VecDeque};

use rustc_hash::FxHashMap;

use super::layout::{index, length};
use crate::FileOffset;
use crate::format::{MetaBlock, MetaWrite, Wait};
use crate::size::in_32_bits;

/// Bytes of a slice, but for smaller clusters: what storage of 4 KiB sectors reads and writes at least.
pub const SLICE: u64 = 4096;
/// Slices looked at for each one that comes, when there are too many: more than one, so that the cache shrinks back.
const LOOKS: usize = 4;

#[derive(Debug)]
struct Slice {
    bytes: Vec<u8>,
    /// Looked at since the hand passed.
    used: bool,
    /// Changed since the last seal.
    dirty: bool,
    /// In the round under way: a reload could find the old bytes.
    sealed: bool,
    /// Writes under way that will change it.
    pins: u32,
    /// A bit for each of its 64 parts, set by [`Slices::mark`]. The owner of the content knows what a mark means.
    marks: u64,
}

impl Slice {
    /// Whether the file has not what is here, or may not, or somebody is about to change it.
    fn must_stay(&self) -> bool {
        self.dirty || self.sealed || self.pins > 0
    }
}

/// The writes of a round.
#[derive(Debug, Default)]
pub struct Changes {
    /// Tables that the file does not have yet, whole.
    pub fresh: Vec<MetaWrite>,
    /// Changed slices of others.
    pub slices: Vec<MetaWrite>,
}

/// The cache. Slices and tables are named by their offset in the file.
#[derive(Debug)]
pub struct Slices {
    /// Bytes of a slice.
    size: u64,
    /// Bytes of a table: a cluster.
    cluster: u64,
    /// Slices kept though nothing is to be written of them.
    max: usize,
    /// Looked into for every cluster, and bounded, whatever the offsets: a fast hash will do.
    slices: FxHashMap<FileOffset, Slice>,
    /// The slices in the order in which a hand passes them.
    ring: VecDeque<FileOffset>,
    dirty: BTreeSet<FileOffset>,
    /// Tables of which the file has nothing: slices that are not here are zero.
    fresh: BTreeSet<FileOffset>,
    /// Requested with [`Wait::Load`] and not loaded yet.
    loading: HashSet<FileOffset>,
    /// The slices and fresh tables that the round under way makes durable.
    sealed: Vec<FileOffset>,
    sealed_fresh: BTreeSet<FileOffset>,
}

impl Slices {
    /// A cache of `budget` bytes for tables of a `cluster` each.
    pub fn new(cluster: u64, budget: u64) -> Slices {
        let size = SLICE.min(cluster);
        Slices {
            size,
            cluster,
            max: index(budget / size),
            slices: FxHashMap::default(),
            ring: VecDeque::new(),
            dirty: BTreeSet::new(),
            fresh: BTreeSet::new(),
            loading: HashSet::new(),
            sealed: Vec::new(),
            sealed_fresh: BTreeSet::new(),
        }
    }

    /// Bytes of a slice.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// See to it that the slice at `at` is here, or ask for it.
    pub fn need(&mut self, at: FileOffset) -> Result<(), Wait> {
        if let Some(slice) = self.slices.get_mut(&at) {
            slice.used = true;
            return Ok(());
        }
        if self.fresh.contains(&at.align_down(self.cluster)) {
            self.insert(at, vec![0; index(self.size)]);
            return Ok(());
        }
        self.loading.insert(at);
        Err(Wait::Load(MetaBlock { at, len: in_32_bits(self.size, "SLICE") }))
    }

    /// Whether the slice at `at` was requested and is not loaded yet.
    pub fn awaits(&self, at: FileOffset) -> bool {
        self.loading.contains(&at)
    }

    /// Takes in a slice that was requested.
    pub fn loaded(&mut self, at: FileOffset, bytes: &[u8]) {
        if self.loading.remove(&at) && length(bytes.len()) == self.size && !self.slices.contains_key(&at) {
            self.insert(at, bytes.to_vec());
        }
    }

    /// A table that the file does not have yet: zero throughout.
    pub fn begin_table(&mut self, at: FileOffset) {
        self.fresh.insert(at);
    }

    /// The bytes of a slice that is here.
    pub fn bytes(&self, at: FileOffset) -> Option<&[u8]> {
        self.slices.get(&at).map(|slice| slice.bytes.as_slice())
    }

    /// The bytes of all that is here.
    pub fn all(&self) -> impl Iterator<Item = &[u8]> {
        self.slices.values().map(|slice| slice.bytes.as_slice())
    }

    /// The bytes of a slice that is here, unless a part of it, one of 64, was marked since it came.
    pub fn unmarked(&self, at: FileOffset, part: usize) -> Option<&[u8]> {
        let slice = self.slices.get(&at).filter(|slice| slice.marks & bit(part) == 0)?;
        Some(&slice.bytes)
    }

    /// Marks one of the 64 parts of a slice, if the slice is loaded.
    pub fn mark(&mut self, at: FileOffset, part: usize) {
        if let Some(slice) = self.slices.get_mut(&at) {
            slice.marks |= bit(part);
        }
    }

    /// The bytes of a slice that is here, to be changed.
    pub fn change(&mut self, at: FileOffset) -> Option<&mut [u8]> {
        let slice = self.slices.get_mut(&at)?;
        if !slice.dirty {
            slice.dirty = true;
            self.dirty.insert(at);
        }
        Some(&mut slice.bytes)
    }

    /// A write is under way that will change the slice: it stays.
    pub fn pin(&mut self, at: FileOffset) {
        if let Some(slice) = self.slices.get_mut(&at) {
            slice.pins += 1;
        }
    }

    /// That write has ended.
    pub fn unpin(&mut self, at: FileOffset) {
        if let Some(slice) = self.slices.get_mut(&at) {
            slice.pins -= 1;
        }
    }

    /// Pieces that a round would write.
    pub fn dirty(&self) -> usize {
        self.dirty.len() + self.fresh.difference(&self.sealed_fresh).count()
    }

    /// Begins a round: all that has changed, with the bytes of now.
    pub fn seal(&mut self) -> Changes {
        let mut changes = Changes::default();
        for at in std::mem::take(&mut self.dirty) {
            let Some(slice) = self.slices.get_mut(&at) else { continue };
            (slice.dirty, slice.sealed) = (false, true);
            self.sealed.push(at);
            if !self.fresh.contains(&at.align_down(self.cluster)) {
                changes.slices.push(MetaWrite { at, bytes: slice.bytes.clone() });
            }
        }
        self.sealed_fresh.clone_from(&self.fresh);
        changes.fresh = self.fresh.iter().map(|&at| self.whole(at)).collect();
        changes
    }

    /// The whole of a fresh table.
    fn whole(&self, at: FileOffset) -> MetaWrite {
        let mut bytes = Vec::with_capacity(index(self.cluster));
        let mut slice = at;
        while slice < at + self.cluster {
            match self.slices.get(&slice) {
                Some(found) => bytes.extend_from_slice(&found.bytes),
                None => bytes.resize(bytes.len() + index(self.size), 0),
            }
            slice += self.size;
        }
        MetaWrite { at, bytes }
    }

    /// Ends a round; slices that it did not make durable are dirty again.
    pub fn settled(&mut self, durable: bool) {
        for at in std::mem::take(&mut self.sealed) {
            let Some(slice) = self.slices.get_mut(&at) else { continue };
            slice.sealed = false;
            if !durable {
                slice.dirty = true;
                self.dirty.insert(at);
            }
        }
        let sealed = std::mem::take(&mut self.sealed_fresh);
        if durable {
            self.fresh.retain(|at| !sealed.contains(at));
        }
    }

    /// Forgets every slice that need not stay, and gives its memory back.
    pub fn drop_clean(&mut self) {
        self.slices.retain(|_, slice| slice.must_stay());
        self.slices.shrink_to_fit();
        self.ring.retain(|at| self.slices.contains_key(at));
        self.ring.shrink_to_fit();
    }

    fn insert(&mut self, at: FileOffset, bytes: Vec<u8>) {
        self.slices.insert(at, Slice { bytes, used: true, dirty: false, sealed: false, pins: 0, marks: 0 });
        self.ring.push_back(at);
        for _ in 0..LOOKS {
            if self.slices.len() <= self.max {
                return;
            }
            let Some(oldest) = self.ring.pop_front() else { return };
            let Some(slice) = self.slices.get_mut(&oldest) else { continue };
            let stays = slice.must_stay() || slice.used || oldest == at;
            slice.used = false;
            if stays {
                self.ring.push_back(oldest);
            } else {
                self.slices.remove(&oldest);
            }
        }
    }
}

/// The mark of a part.
fn bit(part: usize) -> u64 {
    1 << part
}

#[cfg(test)]
mod test {
    use super::*;

    fn cache() -> Slices {
        Slices::new(65536, 4 * SLICE)
    }

    fn load(slices: &mut Slices, at: u64) {
        assert!(slices.need(FileOffset(at)).is_err());
        slices.loaded(FileOffset(at), &[7; 4096]);
        assert_eq!(slices.need(FileOffset(at)), Ok(()));
    }

    #[test]
    fn what_is_changed_sealed_or_pinned_is_not_forgotten() {
        let mut slices = cache();
        (0..3).for_each(|number| load(&mut slices, number * SLICE));
        slices.change(FileOffset(0)).unwrap()[0] = 1;
        slices.change(FileOffset(SLICE)).unwrap()[0] = 1;
        let changes = slices.seal();
        assert_eq!(changes.slices.len(), 2);
        slices.change(FileOffset(0)).unwrap()[0] = 2;
        slices.pin(FileOffset(2 * SLICE));
        (100..200).for_each(|number| load(&mut slices, number * SLICE));
        for at in [0, SLICE, 2 * SLICE] {
            assert!(slices.bytes(FileOffset(at)).is_some(), "{at}");
        }
        assert!(slices.slices.len() <= 8, "{}", slices.slices.len());
    }

    #[test]
    fn all_that_is_clean_can_be_dropped_and_nothing_else_is() {
        let mut slices = Slices::new(65536, 64 * SLICE);
        (0..40).for_each(|number| load(&mut slices, number * SLICE));
        slices.change(FileOffset(0)).unwrap()[0] = 1;
        slices.seal();
        slices.change(FileOffset(SLICE)).unwrap()[0] = 2;
        slices.pin(FileOffset(2 * SLICE));
        assert_eq!(slices.slices.len(), 40);
        slices.drop_clean();
        assert_eq!((slices.slices.len(), slices.ring.len()), (3, 3));
        for (at, first) in [(0, 1), (SLICE, 2), (2 * SLICE, 7)] {
            assert_eq!(slices.bytes(FileOffset(at)).unwrap()[0], first);
        }
        slices.settled(true);
        slices.unpin(FileOffset(2 * SLICE));
        slices.drop_clean();
        assert_eq!(slices.slices.len(), 1, "one is still to be written");
        load(&mut slices, 3 * SLICE);
    }

    #[test]
    fn a_failed_round_is_written_again() {
        let mut slices = cache();
        load(&mut slices, 0);
        slices.begin_table(FileOffset(65536));
        slices.change(FileOffset(0)).unwrap()[0] = 1;
        assert_eq!((slices.seal().slices.len(), slices.dirty()), (1, 0));
        slices.settled(false);
        assert_eq!(slices.dirty(), 2);
        let again = slices.seal();
        assert_eq!((again.slices.len(), again.fresh.len()), (1, 1));
        slices.settled(true);
        assert_eq!(slices.dirty(), 0);
    }

    #[test]
    fn a_fresh_table_is_zero_without_being_read_and_written_whole() {
        let mut slices = cache();
        slices.begin_table(FileOffset(65536));
        slices.need(FileOffset(65536 + SLICE)).unwrap();
        slices.change(FileOffset(65536 + SLICE)).unwrap()[1] = 9;
        let changes = slices.seal();
        assert!(changes.slices.is_empty());
        assert_eq!((changes.fresh[0].bytes.len(), changes.fresh[0].bytes[4097]), (65536, 9));
        slices.settled(true);
        assert!(slices.need(FileOffset(65536)).is_err(), "now it is in the file");
    }
}
