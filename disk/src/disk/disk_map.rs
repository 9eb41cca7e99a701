//! Where the bytes of the disk live: the chain map, loaded on demand.
//!
//! Knows nothing of requests and of waiting. Keeps: a damaged part of a chunk does not make the rest of it unreadable.

use std::collections::VecDeque;

use super::chain::Chain;
use super::layer::Missing;
use crate::chain_map::{ChainMap, Location, Run};
use crate::format::Format;
use crate::{DiskOffset, Span};

/// Damaged chunks that are remembered.
const DAMAGED_MAX: usize = 256;
/// Bytes of a damaged chunk that are mapped together.
const PAGE: u64 = 4096;
/// Writes in place to chunks that are not known for each of them that is mapped, since that may find nothing.
const WRITES_A_LOOK: u32 = 8;

/// The known locations of the bytes of a disk.
#[derive(Debug)]
pub(super) struct DiskMap {
    known: ChainMap,
    /// Bytes of memory that it may take.
    budget: usize,
    /// Chunks that cannot be loaded as a whole, the oldest first. Their sound parts are still found, page by page.
    damaged: VecDeque<DiskOffset>,
    /// Bytes of metadata cached since the caches were last dropped.
    cached_bytes: usize,
    /// Writes in place to chunks that are not known, since one was last mapped.
    written: u32,
}

impl DiskMap {
    /// Of a disk of `len` bytes.
    pub fn new(len: u64, budget: usize) -> DiskMap {
        let known = ChainMap::new(len, budget);
        DiskMap { known, budget, damaged: VecDeque::new(), cached_bytes: 0, written: 0 }
    }

    /// Where byte `at` lives, and for how many bytes, if that is known.
    #[inline(always)]
    pub fn lookup(&self, at: DiskOffset) -> Option<(Location, u64)> {
        self.known.lookup(at)
    }

    /// Where byte `at` lives, and for how many bytes. `Err` names metadata to be loaded first.
    pub fn resolve<F: Format>(&mut self, at: DiskOffset, chain: &mut Chain<F>) -> Result<(Location, u64), Missing> {
        if let Some(found) = self.known.lookup(at) {
            return Ok(found);
        }
        let chunk = ChainMap::chunk_of(at);
        let damaged = self.damaged.contains(&chunk.at);
        let wanted = if damaged { Span { at: at.align_down(PAGE), len: PAGE } } else { chunk };
        let runs = chain.map(0, inside(wanted, chain))?;
        let Some(run) = runs.iter().find(|run| at < run.span.end()) else {
            unreachable!("the walk covers the span without gaps")
        };
        let found = (run.place.advanced(at - run.span.at), run.span.end() - at);
        if !damaged {
            self.keep(chunk, &runs);
        }
        Ok(found)
    }

    /// Byte `at` is overwritten where the leaf has it. A chunk is not mapped for a write alone, as that may take loads
    /// of all layers; but a guest that only writes gets to know the chunks of which the leaf has everything.
    pub fn written_in_place<F: Format>(&mut self, at: DiskOffset, chain: &mut Chain<F>) {
        if self.known.lookup(at).is_some() {
            return;
        }
        self.written += 1;
        if self.written < WRITES_A_LOOK {
            return;
        }
        self.written = 0;
        let chunk = ChainMap::chunk_of(at);
        if let Some(runs) = chain.map_of_leaf(inside(chunk, chain)) {
            self.keep(chunk, &runs);
        }
    }

    fn keep(&mut self, chunk: Span, runs: &[Run]) {
        self.known.insert(chunk, runs);
        self.cached_bytes += size_of_val(runs);
    }

    /// Extends a run of which `len` bytes are known into the following chunks, up to `left` bytes.
    pub fn coalesce(&self, at: DiskOffset, place: Location, mut len: u64, left: u64) -> u64 {
        while len < left {
            let next = self.known.lookup(at + len);
            match next.filter(|&(next, _)| next == place.advanced(len)) {
                Some((_, more)) => len = (len + more).min(left),
                None => break,
            }
        }
        len
    }

    /// The known mappings, to be changed with those of the layers.
    pub fn known_mut(&mut self) -> &mut ChainMap {
        &mut self.known
    }

    /// Forgets the chunk around a byte.
    pub fn forget(&mut self, at: DiskOffset) {
        self.known.forget(at);
    }

    /// Forgets everything, for the layers show something else.
    pub fn reset(&mut self, len: u64) {
        self.known = ChainMap::new(len, self.budget);
    }

    /// Metadata of the chunk around a byte makes no sense. Returns whether that is new: then what waits looks again.
    pub fn met_damage(&mut self, at: DiskOffset) -> bool {
        let chunk = ChainMap::chunk_of(at).at;
        if self.damaged.contains(&chunk) {
            return false;
        }
        if self.damaged.len() == DAMAGED_MAX {
            self.damaged.pop_front();
        }
        self.damaged.push_back(chunk);
        true
    }

    /// Counts bytes of metadata that were loaded, or written and kept.
    pub fn cached(&mut self, bytes: usize) {
        self.cached_bytes += bytes;
    }

    /// Bytes of metadata cached since [`DiskMap::clear`].
    pub fn cached_bytes(&self) -> usize {
        self.cached_bytes
    }

    /// Drops all that can be loaded again.
    pub fn clear(&mut self) {
        self.cached_bytes = 0;
        self.known.clear();
    }
}

/// The part of a span that is on the disk.
fn inside<F: Format>(span: Span, chain: &Chain<F>) -> Span {
    span.intersection(Span { at: DiskOffset(0), len: chain.geometry().len }).unwrap_or(span)
}

#[cfg(test)]
mod test {
    use super::super::layer::Layer;
    use super::super::test::clusters::{CLUSTER, Clusters};
    use super::*;
    use crate::FileId;
    use crate::chain_map::CHUNK;

    const LEN: u64 = 2 * CHUNK;

    /// A leaf that has its first cluster, on an empty base, with all metadata loaded.
    fn chain() -> Chain<Clusters> {
        let mut leaf = Clusters::new(LEN);
        leaf.put(&mut Vec::new(), 0, 7);
        let geometry = leaf.geometry();
        let layers = [(FileId(0), leaf), (FileId(1), Clusters::new(LEN))];
        Chain::new(layers.map(|(file, layer)| Layer::new(file, layer)).into(), geometry)
    }

    fn resolve(map: &mut DiskMap, chain: &mut Chain<Clusters>, at: u64) -> (Location, u64) {
        loop {
            match map.resolve(DiskOffset(at), chain) {
                Ok(found) => return found,
                Err(missing) => {
                    for (file, block) in missing {
                        assert!(chain.of(file).load(block, vec![0; 512]));
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_resolved_is_known_until_it_is_forgotten() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        assert!(map.lookup(DiskOffset(0)).is_none() && map.resolve(DiskOffset(0), &mut chain).is_err());
        let (place, len) = resolve(&mut map, &mut chain, 512);
        assert!(place.is_in(FileId(0)) && len == CLUSTER - 512);
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), Some((Location::Zero, CHUNK - CLUSTER)));
        assert!(map.cached_bytes() > 0);
        map.forget(DiskOffset(0));
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), None);
    }

    /// Whether the map gets to know the chunk around a byte by writes to it.
    fn learns(map: &mut DiskMap, chain: &mut Chain<Clusters>, at: u64) -> bool {
        (0..WRITES_A_LOOK).for_each(|_| map.written_in_place(DiskOffset(at), chain));
        map.lookup(DiskOffset(at)).is_some()
    }

    #[test]
    fn a_guest_that_only_writes_gets_to_know_the_chunks_that_the_leaf_has() {
        let mut leaf = Clusters::new(LEN);
        (0..CHUNK / CLUSTER).for_each(|cluster| leaf.put(&mut Vec::new(), cluster, 7));
        leaf.put(&mut Vec::new(), CHUNK / CLUSTER, 7);
        let geometry = leaf.geometry();
        let layers = [(FileId(0), leaf), (FileId(1), Clusters::new(LEN))];
        let mut chain = Chain::new(layers.map(|(file, layer)| Layer::new(file, layer)).into(), geometry);
        let mut map = DiskMap::new(LEN, 1 << 20);
        assert!(!learns(&mut map, &mut chain, 0), "its metadata is not loaded");
        while let Err(missing) = chain.allocated(0..1, Span { at: DiskOffset(0), len: LEN }) {
            let (file, block) = missing[0];
            assert!(chain.of(file).load(block, vec![0; 512]));
        }
        assert!(learns(&mut map, &mut chain, CLUSTER));
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), map.resolve(DiskOffset(CLUSTER), &mut chain).ok());
        assert!(!learns(&mut map, &mut chain, CHUNK), "the rest of it is in the layer below");
        chain.layers_mut().pop();
        assert!(learns(&mut map, &mut chain, CHUNK));
        assert_eq!(map.lookup(DiskOffset(CHUNK + CLUSTER)), Some((Location::Zero, CHUNK - CLUSTER)));
    }

    #[test]
    fn runs_that_continue_in_the_next_chunk_are_one() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        let len = resolve(&mut map, &mut chain, CLUSTER).1;
        assert_eq!(map.coalesce(DiskOffset(CLUSTER), Location::Zero, len, CHUNK), len, "the next chunk is not known");
        resolve(&mut map, &mut chain, CHUNK);
        assert_eq!(map.coalesce(DiskOffset(CLUSTER), Location::Zero, len, CHUNK), CHUNK);
    }

    #[test]
    fn a_damaged_chunk_is_mapped_page_by_page_and_not_kept() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        assert!(map.met_damage(DiskOffset(CLUSTER)) && !map.met_damage(DiskOffset(0)), "the same chunk");
        assert_eq!(resolve(&mut map, &mut chain, CLUSTER + 512), (Location::Zero, PAGE - 512));
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), None);
    }
}
